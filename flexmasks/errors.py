"""What an error of torch says: whether memory ran out, a file was damaged, or a kernel has a known fault."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator

import torch

from flexmasks import compat


def is_wrong_bound(error: Exception) -> bool:
    """Return whether a kernel for the CPU compared an index with a wrong bound.

    For some functions, tensors and lengths torch's CPU kernels for any length compare an index with the length of their
    own part of the keys or queries. No public equivalent.
    """
    return isinstance(error, RuntimeError) and "index out of bounds" in str(error) and "SplitSize" in str(error)


def is_refused_for_tracing(error: RuntimeError) -> bool:
    """Return whether a compiled function refused to run because some thread traces. No public equivalent."""
    return str(error).startswith("Detected that you are using FX to symbolically trace")


# Parts of messages about missing memory: of PyTorch's allocator for the CPU, cuBLAS, Triton and CuTe.
_NO_MEMORY = "out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED", "cudaErrorMemoryAllocation"
# Numbers of errors of a folder that cannot be made or written, or of a full disk.
_CANNOT_WRITE = errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENOSPC


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from.

    `inner_exception` is what an error of torch's compilers wraps. No public equivalent; without it a backend would be
    left out for good after memory ran out while torch compiled.
    """
    known: set[int] = set()  # an inner error may have been raised from the outer one
    while error is not None and id(error) not in known:
        yield error
        known.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__


def passing_error(error: BaseException) -> BaseException | None:
    """Return the error that says nothing about the code that raised it, or None.

    It is the innermost one, among an error and its causes, of missing memory, or the end of what torch's activation
    checkpointing computes again: once it has all tensors that were saved, it ends the computation by an error. That
    error has no public name; without it a backend that saves the last tensors would seem to have failed.
    """
    found = None
    for e in causes(error):
        is_named = isinstance(e, (torch.OutOfMemoryError, MemoryError, compat.StopRecomputation))
        if is_named or (isinstance(e, RuntimeError) and any(text in str(e) for text in _NO_MEMORY)):
            found = e
    return found


def cannot_read(error: BaseException) -> bool:
    """Return whether an error comes from a damaged pickle, source or library."""
    kinds = EOFError, ImportError, SyntaxError, UnicodeDecodeError, pickle.UnpicklingError

    def tells(e: BaseException) -> bool:
        is_library = isinstance(e, OSError) and e.errno is None  # the system gives no number for one
        # Inductor asserts, without a word, that a file of its cache holds what was written there.
        is_silent = str(e).partition("\n")[0].rstrip().endswith("AssertionError:")
        return is_library or is_silent or (isinstance(e, kinds) and not isinstance(e, ModuleNotFoundError))

    return any(map(tells, causes(error)))


def cannot_write(error: BaseException) -> bool:
    return any(isinstance(e, OSError) and e.errno in _CANNOT_WRITE for e in causes(error))
