"""The package flash-attn-4: whether it is there, in which version, and which calls none of its kernels takes."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexmasks import compat
from flexmasks.backends.call import HALF_DTYPES, Call, Unavailable, first_line
from flexmasks.devices import nvidia_capability, nvidia_major

_log = logging.getLogger("flexmasks")

# Up to version 4.0.0b25 flash-attn-4 gives garbage as gradients in 0.1 to 1% of launches on compute capability 9.0: its
# block-sparse backward pass has a race (flash-attention pull request 2756).
_FIRST_RIGHT_BETA = 26

# The major compute capability of consumer GPUs, with 100 KB of shared memory, for which flash-attn-4 has other kernels.
SMALL, _MAX_SIZE_ON_SMALL = 12, 128

# Head sizes above 128 that flash-attn-4 takes on compute capability 10 and 11.
_LARGE_SIZES_ABOVE_HOPPER = ((192, 128), (256, 256))

# Different head sizes of q and of v that flash-attn-4 is tested with by its authors, and those tested with gradients.
_V_SIZES, _V_SIZES_WITH_GRADIENTS = ((128, 64), (192, 128)), ((192, 128),)

# The kernel's arguments but tensors, each with its type in a schema of torch.
NUMBERS = {
    "max_seqlen_q": "SymInt?", "max_seqlen_k": "SymInt?", "softmax_scale": "float?",
    "window_size_left": "SymInt?", "window_size_right": "SymInt?", "causal": "bool?",
}  # fmt: skip

# The arguments that the library gives to functions of flash-attn-4, see `fa4_functions`.
_FOR_BOTH = ("cu_seqlens_q", "cu_seqlens_k", *NUMBERS, "score_mod")

_NEEDED = {
    "_flash_attn_fwd": (*_FOR_BOTH, "seqused_k", "page_table", "tile_mn", "return_lse"),
    "_flash_attn_bwd": (*_FOR_BOTH, "score_mod_bwd", "dlse", "deterministic"),
}

_FITS_TILES = "_fit_sm90_fwd_tile_to_block_sparsity"  # the function of flash-attn-4 that fits tiles to smaller blocks

# Variables of flash-attn-4: "1" if it keeps compiled kernels on the disk, and where.
KEEPS_KERNELS, KERNEL_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def is_installed() -> bool:
    """Return whether flash-attn-4 is there, in a version that can be called."""
    return not why_missing()


def why_missing() -> str:
    """Return why flash-attn-4 cannot be called, or "". A package of another version is warned of once."""
    return _package().why_missing


def fits_tiles() -> bool:
    """Return whether flash-attn-4 fits the tiles of its kernels to blocks that are smaller."""
    return _package().fits_tiles


class _Package(NamedTuple):
    """Facts about the installed flash-attn-4."""

    why_missing: str  # why it cannot be called, or ""
    fits_tiles: bool = False


@functools.cache
def _package() -> _Package:
    """Return facts about the installed flash-attn-4. Its source is read instead of imported, which takes seconds."""
    try:
        spec = importlib.util.find_spec("flash_attn.cute")
    except ModuleNotFoundError:
        spec = None
    except Exception as error:  # find_spec imports flash_attn, whose code may raise anything
        return _warned(f"cannot be imported: {first_line(error)}")
    if spec is None:
        return _Package("the package flash-attn-4 is not installed")
    files = [Path(folder) / "interface.py" for folder in spec.submodule_search_locations or ()]
    source = next((file.read_text(encoding="utf-8") for file in files if file.exists()), None)
    if source is None:
        return _warned("has no flash_attn.cute.interface")
    try:
        functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        return _warned(f"cannot be imported: {first_line(error)}")
    for name, needed in _NEEDED.items():
        if name not in functions:
            return _warned(f"has no function {name}")
        taken = functions[name]
        names = {argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
        lacking = [argument for argument in needed if argument not in names]
        if lacking and taken.kwarg is None:
            return _warned(f"has a function {name} without {', '.join(lacking)}")
    if _has_race():
        return _warned("may give garbage as gradients: before 4.0.0b26 its backward pass has a race")
    _keep_kernels_on_disk()
    return _Package("", _FITS_TILES in functions)


def _has_race() -> bool:
    """Return whether flash-attn-4 is known to be older than its first right version."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    beta = re.match(r"4\.0\.0\.?(?:b(\d+)(\.?dev)?|a|dev)", version)
    return beta is not None and (int(beta[1] or 0), beta[2] is None) < (_FIRST_RIGHT_BETA, True)


def _keep_kernels_on_disk() -> None:
    """Let flash-attn-4 keep its compiled kernels on the disk.

    They lie in a folder of the user's, from which later processes load them.

    Nothing changes if the user has set one of its variables, if it is imported already, or if the folder cannot be
    written.
    """
    is_chosen = KEEPS_KERNELS in os.environ or KERNEL_FOLDER in os.environ
    if is_chosen or "flash_attn.cute.cache_utils" in sys.modules:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexmasks" / "flash-attn-4"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a RuntimeError says that there is no home
        return
    if os.access(folder, os.W_OK | os.X_OK):
        os.environ.update({KEEPS_KERNELS: "1", KERNEL_FOLDER: str(folder)})


def _warned(what: str) -> _Package:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        what = f"{importlib.metadata.version('flash-attn-4')} {what}"
    why = f"the package flash-attn-4 {what}"
    _log.warning("%s, so other backends run its calls", why)
    return _Package(why)


_import_failures: list[str] = []  # why importing flash-attn-4 failed


def interface() -> Any:
    """Return the module with flash-attn-4's functions.

    Raises Unavailable if importing it fails; later calls of any kind then refuse it.
    """
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # the code of another package may raise anything
        _import_failures[:] = [f"the package flash-attn-4 cannot be imported: {first_line(error)}"]
        raise Unavailable(_import_failures[0]) from error


def why_unusable() -> str:
    """Return why flash-attn-4 cannot be called, or imported, or ""."""
    return why_missing() or next(iter(_import_failures), "")


def refuses_package(call: Call) -> str | None:
    """Return why flash-attn-4 cannot take the call, called directly or through flex_attention, or None."""
    head_size, v_size = call.q.shape[3], call.v.shape[3]
    if not call.on_gpu:
        return "it runs on CUDA only"
    missing = why_unusable()
    if missing:
        return missing
    major = nvidia_major(call.q.device)
    if nvidia_capability(call.q.device) is None:
        return "it runs on GPUs of NVIDIA only"
    if major < 9:
        return "it needs compute capability 9.0 or above"
    if call.q.dtype not in HALF_DTYPES:
        return f"it takes float16 and bfloat16, not {call.dtype}"
    if head_size > 256 or head_size % 8:
        return f"it takes head sizes that are multiples of 8 up to 256, not {head_size}"
    if major == SMALL and max(head_size, v_size) > _MAX_SIZE_ON_SMALL:
        return f"on compute capability {major} it takes head sizes up to {_MAX_SIZE_ON_SMALL}, not {head_size}"
    if major in (10, 11) and head_size > 128 and (head_size, v_size) not in _LARGE_SIZES_ABOVE_HOPPER:
        return f"on compute capability {major} it takes head sizes up to 128, 192 with 128 for v, and 256"
    if v_size != head_size:
        taken = _V_SIZES_WITH_GRADIENTS if call.needs_grad else _V_SIZES
        if (head_size, v_size) not in taken:
            sizes = " or ".join(f"{size} with {other}" for size, other in taken)
            gradients = " and gradients" if call.needs_grad else ""
            return f"with two head sizes{gradients} it takes {sizes} for v, not {head_size} with {v_size}"
        if call.needs_grad and call.q.shape[1] != call.k.shape[1]:
            return "its backward pass takes two head sizes only if heads are not grouped"
    if call.needs_grad and -head_size % 32 > 8:
        return f"its gradients are wrong for head sizes 8 or 16 past a multiple of 32, as {head_size} is"
    return None


def is_small(device: torch.device) -> bool:
    """Return whether a GPU is a consumer's, see `SMALL`."""
    return nvidia_major(device) == SMALL


@compat.constant_in_graphs
def knows_sinks() -> bool:
    """Return whether flash-attn-4 takes sinks, with their gradient; earlier versions do not."""
    return _has_argument_of_sinks()


@functools.cache
def _has_argument_of_sinks() -> bool:
    """Return what `knows_sinks` does, found once, because every call with sinks asks.

    torch.compile cannot take the result of a function with a cache as a constant.
    """
    functions = (getattr(interface(), name) for name in _NEEDED)
    return all("learnable_sink" in inspect.signature(function).parameters for function in functions)
