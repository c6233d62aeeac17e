"""Compiled flex_attention: one piece of code per kind of call, so that no recompile limit is ever shared.

torch counts recompilations by code object and, at the limit, would run flex_attention unfused. Here every kind of
call (the functions of mask and score with their constants, dtype, batch, heads, head size, options) has a code object
of its own, in which only lengths vary; torch makes those symbolic after the first few. Whatever else makes torch
compile anew, at the limit the code object is replaced, and nothing ever runs unfused.
"""

from __future__ import annotations

import itertools
import logging
import time
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexmasks import compat
from flexmasks.cache import Cache

_log = logging.getLogger("flexmasks")
_numbers = itertools.count()


class _Kind(NamedTuple):
    """What torch may compile the same code for again."""

    q_len: int
    kv_len: int
    contiguous: tuple[bool, ...]  # q, k and v
    form: Hashable  # shapes of what mask and score captured

    @property
    def special(self) -> tuple[Any, ...]:
        """What a kernel for any lengths is not for any of: torch has others for lengths of 1, and for equal ones."""
        return self.q_len == 1, self.kv_len == 1, self.q_len == self.kv_len, self.contiguous


@dataclass(frozen=True)
class _Kernel:
    compiled: Callable[..., Any]
    static: bool  # compiled for each length anew
    seen: set[_Kind] = field(default_factory=set)  # what it has run


# What torch compiled is checked at each call to still hold. Not that torch's own modules are what they were: a tenth
# of a call's time.
_TORCHS_OWN = ("G['flex_attention']", "G['__builtins_dict", "G['__import_torch_dot", "__import__('torch')")
_KINDS = 64  # so many are noted
_NOTED = 64  # every so many runs
_KERNELS: Cache[_Kernel] = Cache("kernels", max_bytes=256)  # counted, not measured: one byte each


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask | None,
    scale: float | None,
    kernel_options: Any,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """torch's flex_attention with grouped heads seen from the shapes, and lse or None."""
    grouped = q.shape[1] != k.shape[1]
    if with_lse:
        out, aux = flex_attention(
            q,
            k,
            v,
            score_mod,
            block_mask,
            scale,
            grouped,
            kernel_options=kernel_options,
            return_aux=AuxRequest(lse=True),
        )
        return out, aux.lse
    return flex_attention(q, k, v, score_mod, block_mask, scale, grouped, kernel_options=kernel_options), None


def options(
    q: Tensor,
    k: Tensor,
    backend: str | None,
    given: dict[str, Any] | None,
    proven: Callable[[], dict[str, bool]] = dict,
) -> dict[str, Any]:
    """The kernel_options of a call: the user's, the backend, and for torch's kernel for many queries what is proven."""
    chosen = dict(given or {})
    if backend is not None:
        chosen["BACKEND"] = backend
        return chosen
    # torch takes its decoding kernel below 128 queries, which finds no tile for more than 128 rows of a group
    grouped_rows = q.shape[2] * (q.shape[1] // k.shape[1])
    if q.is_cuda and grouped_rows > 128 and not chosen.keys() & {"BACKEND", "FORCE_USE_FLEX_ATTENTION"}:
        return {**proven(), **chosen, "BACKEND": "TRITON"}
    return chosen


@torch.library.custom_op("flexmasks::separate", mutates_args=())
def separate(x: Tensor) -> Tensor:
    """A copy that nothing is fused across: torch's kernel for the CPU fails with what follows it fused in."""
    return x.clone()


@separate.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def run(key: Hashable, form: Hashable, *args: Any) -> tuple[Tensor, Tensor | None]:
    """`flex(*args)` compiled, by the code object of `key`; `form` are the shapes of what mask and score captured.

    Whatever torch raises while compiling comes through.
    """
    kernel = _KERNELS.get(key)
    kind = _kind(args[0], args[1], args[2], form)
    if kernel is None:
        kernel = _new(key)
        _log.info("compiling attention for q %s, the first of its kind: some seconds", list(args[0].shape))
    before = compat.compiled_graphs()
    start = time.perf_counter()
    try:
        result = kernel.compiled(*args)
    except compat.FailOnRecompileLimitHit:
        result = _new(key, kernel.static).compiled(*args)
    except compat.InductorError:
        if kernel.static or args[0].is_cuda:
            raise
        # torch's compiler for the CPU cannot do some kernels with symbolic lengths: then one for each length
        result = _new(key, static=True).compiled(*args)
    except (torch.OutOfMemoryError, compat.TorchDynamoException):
        raise
    except Exception:
        _KERNELS.drop(key)  # torch may have marked its code as never to be compiled
        raise
    if kind not in kernel.seen and len(kernel.seen) < _KINDS and (found := _KERNELS.get(key)) is not None:
        found.seen.add(kind)
    if compat.compiled_graphs() != before:
        _log.info("compiled attention for q %s in %.1f s", list(args[0].shape), time.perf_counter() - start)
    return result  # type: ignore[no-any-return] # torch.compile keeps no types


class Runner:
    """`run` for one kind of call: after the first time by the shortest way, for calls at the same lengths."""

    def __init__(self, key: Hashable, form: Hashable) -> None:
        self.key = key
        self._form = form
        self._kernel: Callable[[], _Kernel | None] = lambda: None  # not held: the cache bounds what there is
        self._runs = 0

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        kernel = self._kernel()
        self._runs += 1
        if kernel is None or self._runs % _NOTED == 0:  # the cache is to know that it is in use
            result = run(self.key, self._form, *args)
            kernel = _KERNELS.get(self.key)
            if kernel is not None:
                self._kernel = weakref.ref(kernel)
            return result
        try:
            return kernel.compiled(*args)  # type: ignore[no-any-return] # torch.compile keeps no types
        except (compat.FailOnRecompileLimitHit, compat.InductorError):
            return run(self.key, self._form, *args)

    def compiles(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Whether a call with these tensors would compile, in words."""
        kernel = _KERNELS.get(self.key)
        if kernel is None:
            return "yes, some seconds: it is the first call of its kind"
        kind = _kind(q, k, v, self._form)
        if kind in kernel.seen:
            return "no: such a call has run before"
        if kernel.static or sum(other.special == kind.special for other in kernel.seen) < 3:
            known = "such a call has run before, but not with these lengths, shapes or memory layout"
            return f"probably, some seconds: {known}"
        return "no: such a call has run at other lengths, by a kernel for any"


def _kind(q: Tensor, k: Tensor, v: Tensor, form: Hashable) -> _Kind:
    return _Kind(q.shape[2], k.shape[2], tuple(x.is_contiguous() for x in (q, k, v)), form)


def _new(key: Hashable, static: bool = False) -> _Kernel:
    name = f"flexmasks_kernel_{next(_numbers)}"
    code = flex.__code__.replace(co_name=name)
    function = types.FunctionType(code, flex.__globals__, name)
    # torch keeps what it compiled of a code object, and the code object by it, until it is told to forget
    weakref.finalize(function, compat.forget_code, code).atexit = False
    dynamic = False if static else None
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, options={"guard_filter_fn": _needed})
    kernel = _Kernel(compiled, static)
    _KERNELS.put(key, (), kernel, 1)
    return kernel


def _needed(guards: Sequence[Any]) -> list[bool]:
    return [not guard.name.startswith(_TORCHS_OWN) for guard in guards]
