"""Compiled flex_attention, with one code object per kind of call.

So no two kinds of calls share a recompile limit.

torch counts recompilations by code object and, at its limit, would run flex_attention unfused. Here every kind of call
(the functions of mask and score with their constants, dtype, batch, heads, head size, options) has a code object of
its own, in which only lengths vary; torch makes lengths symbolic after the first few. If torch reaches the limit for
another reason, the code object is replaced, so nothing ever runs unfused.
"""

from __future__ import annotations

import itertools
import logging
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import forms
from flexmasks.backends.call import HALF_DTYPES, TRANSFORMED, Call, Result, Unavailable, first_line, proven, transformed
from flexmasks.cache import Cache

_log = logging.getLogger("flexmasks")
_kernel_numbers = itertools.count()
# Guards that are left out: torch checks at each call that its own modules have not changed, a tenth of a call's time.
_GUARDS_OF_TORCH = ("G['compat']", "G['__builtins_dict", "G['__import_torch_dot", "__import__('torch')")
_MAX_NOTED_SHAPES = 64  # shapes that one kernel remembers
_RUNS_AS_DATA = 32  # runs on a GPU after which a function is compiled that could be compiled before
_RUNS_BETWEEN_LOOKUPS = 64  # after this many runs a replay looks its kernel up again, which marks it as used
# Kernel options to try one after the other, for GPUs whose shared memory is too small for the earlier options.
_SMALLER_KERNELS: tuple[dict[str, Any], ...] = (
    {},
    {"num_stages": 1},
    {
        "num_stages": 1, "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32,
        "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
    },
)  # fmt: skip

# Tiles for half precision, by head size, where they are faster than torch's own (H200, torch 2.11). A forward and a
# backward pass of documents, of documents with ALiBi, and of padding (nearly all blocks full) take 0.75, 0.67 and 0.92
# of the time at head size 64, and 0.97, 0.91 and 1.00 at head size 128.
_TILES: dict[int, dict[str, int]] = {
    64: {
        "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
        "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
        "bwd_num_warps": 4, "bwd_num_stages": 3,
    },
    128: {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
}  # fmt: skip
_TILES_ARE_FOR = (9, 0)  # the compute capability of the GPU where they were measured
_TILES_DIVIDE = 128  # block sizes that these tiles fit in are multiples of this


class _Shapes(NamedTuple):
    """Shapes for which torch may compile the same code again."""

    q_len: int
    kv_len: int
    contiguous: tuple[bool, ...]  # whether q, k and v are
    captured: Hashable  # shapes of the tensors that mask and score captured

    @property
    def specialized(self) -> tuple[Any, ...]:
        """Properties that torch specializes even in a dynamic-shape kernel.

        The properties are lengths of 1, equal lengths, and memory layouts.
        """
        return self.q_len == 1, self.kv_len == 1, self.q_len == self.kv_len, self.contiguous


@dataclass(frozen=True)
class _Kernel:
    compiled: Callable[..., Any]
    is_static: bool  # compiled for each length separately
    shapes_run: set[_Shapes] = field(default_factory=set)


_KERNELS: Cache[_Kernel] = Cache("kernels", max_bytes=256)  # an entry counts one byte


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: compat.BlockMask | None,
    scale: float | None,
    kernel_options: Any,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse, or None, of torch's flex_attention.

    Grouped heads are recognized from the shapes.
    """
    grouped = q.shape[1] != k.shape[1]
    if with_lse:
        out, aux = compat.flex_attention(
            q,
            k,
            v,
            score_mod,
            block_mask,
            scale,
            grouped,
            kernel_options=kernel_options,
            return_aux=compat.AuxRequest(lse=True),
        )
        return out, aux.lse
    return compat.flex_attention(q, k, v, score_mod, block_mask, scale, grouped, kernel_options=kernel_options), None


def options(
    q: Tensor,
    k: Tensor,
    backend: str | None,
    given: dict[str, Any] | None,
    block_size: tuple[int, int],
    proven: Callable[[], dict[str, bool]] = dict,
) -> dict[str, Any]:
    """Return the kernel_options of a call.

    The options are the user's, torch's `backend` name, and, only for torch's Triton kernel for many queries, tiles and
    `proven` options.
    """
    chosen = dict(given or {})
    if backend is not None:
        chosen["BACKEND"] = backend
        return chosen
    # Below 128 queries torch takes its decoding kernel, which finds no tile for more than 128 rows of a group.
    grouped_rows = q.shape[2] * (q.shape[1] // k.shape[1])
    if q.is_cuda and grouped_rows > 128 and not chosen.keys() & {"BACKEND", "FORCE_USE_FLEX_ATTENTION"}:
        tiles = {} if chosen else _tiles(q, block_size)
        return {**tiles, **proven(), **chosen, "BACKEND": "TRITON"}
    return chosen


def _tiles(q: Tensor, block_size: tuple[int, int]) -> dict[str, int]:
    """Return the options of faster tiles for torch's Triton kernel, if there are any."""
    tiles = _TILES.get(q.shape[3])
    if tiles is None or q.dtype not in HALF_DTYPES or any(n % _TILES_DIVIDE for n in block_size):
        return {}
    return tiles if q.device.index is not None and _capability(q.device.index) == _TILES_ARE_FOR else {}


@compat.constant_in_graphs
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@torch.library.custom_op("flexmasks::separate", mutates_args=())
def separate(x: Tensor) -> Tensor:
    """Copy a tensor in a way that Inductor fuses nothing across.

    torch's kernel for the CPU fails with the next operation fused in.
    """
    return x.clone()


@separate.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# --- kernels by kind of call ---


def _run_kernel(key: Hashable, captured: Hashable, *args: Any) -> tuple[Tensor, Tensor | None]:
    """Run `flex(*args)`, compiled by the code object of `key`.

    `captured` has the shapes of captured tensors. Errors of torch's compilation are raised unchanged.
    """
    kernel = _KERNELS.get(key)
    shapes = _shapes(args[0], args[1], args[2], captured)
    if kernel is None:
        kernel = _new_kernel(key)
        _log.info("compiling attention for q %s, the first of its kind: this takes some seconds", list(args[0].shape))
    graphs_before = compat.compiled_graphs()
    start = time.perf_counter()
    try:
        result = kernel.compiled(*args)
    except compat.FailOnRecompileLimitHit:
        result = _new_kernel(key, kernel.is_static).compiled(*args)
    except compat.InductorError:
        if kernel.is_static or args[0].is_cuda:
            raise
        # torch's compiler for the CPU fails for some kernels with symbolic lengths; each length then has a kernel.
        result = _new_kernel(key, is_static=True).compiled(*args)
    except (torch.OutOfMemoryError, compat.TorchDynamoException):
        raise
    except Exception:
        _KERNELS.drop(key)  # torch may have marked the code as never to be compiled
        raise
    if shapes not in kernel.shapes_run and len(kernel.shapes_run) < _MAX_NOTED_SHAPES:
        current = _KERNELS.get(key)
        if current is not None:
            current.shapes_run.add(shapes)
    if compat.compiled_graphs() != graphs_before:
        _log.info("compiled attention for q %s in %.1f s", list(args[0].shape), time.perf_counter() - start)
    return result  # type: ignore[no-any-return] # torch.compile keeps no types


def _shapes(q: Tensor, k: Tensor, v: Tensor, captured: Hashable) -> _Shapes:
    return _Shapes(q.shape[2], k.shape[2], tuple(x.is_contiguous() for x in (q, k, v)), captured)


def _new_kernel(key: Hashable, is_static: bool = False) -> _Kernel:
    name = f"flexmasks_kernel_{next(_kernel_numbers)}"
    code = flex.__code__.replace(co_name=name)
    function = types.FunctionType(code, flex.__globals__, name)
    # torch keeps compiled code, and with it the code object, until `forget_code` drops both.
    weakref.finalize(function, compat.forget_code, code).atexit = False
    dynamic = False if is_static else None
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, options={"guard_filter_fn": _needed_guards})
    kernel = _Kernel(compiled, is_static)
    _KERNELS.put(key, (), kernel, 1)
    return kernel


def _needed_guards(guards: Sequence[Any]) -> list[bool]:
    return [not guard.name.startswith(_GUARDS_OF_TORCH) for guard in guards]


class Runner:
    """Runs one kind of call, and holds its kernel after the first run.

    Later runs skip the lookup of the kernel by key.
    """

    def __init__(self, key: Hashable, captured: Hashable) -> None:
        self.key = key
        self._captured = captured
        self._kernel: Callable[[], _Kernel | None] = lambda: (
            None
        )  # a weak reference, so that the cache bounds the number of kernels
        self._runs = 0

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        kernel = self._kernel()
        self._runs += 1
        if kernel is None or self._runs % _RUNS_BETWEEN_LOOKUPS == 0:
            result = _run_kernel(self.key, self._captured, *args)
            kernel = _KERNELS.get(self.key)
            if kernel is not None:
                self._kernel = weakref.ref(kernel)
            return result
        try:
            return kernel.compiled(*args)  # type: ignore[no-any-return] # torch.compile keeps no types
        except (compat.FailOnRecompileLimitHit, compat.InductorError):
            return _run_kernel(self.key, self._captured, *args)

    def compiles(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Say whether a call with these tensors would compile."""
        kernel = _KERNELS.get(self.key)
        if kernel is None:
            return "yes, some seconds: it is the first call of its kind"
        shapes = _shapes(q, k, v, self._captured)
        if shapes in kernel.shapes_run:
            return "no: such a call has run before"
        if kernel.is_static or sum(other.specialized == shapes.specialized for other in kernel.shapes_run) < 3:
            return "probably, some seconds: such calls have run, but not with these lengths, shapes or memory layouts"
        return "no: such a call has run at other lengths, by a kernel for any length"


# --- what the backends flash, triton and cpu share ---


@dataclass(frozen=True)
class CompiledCall:
    """A call of compiled flex_attention without q, k and v."""

    runner: Runner
    score_mod: Callable[..., Tensor] | None
    block_mask: Any  # a BlockMask; None only in a renewal
    scale: float | None
    kernel_options: dict[str, Any] | None
    with_lse: bool
    needs_grad: bool
    is_flash: bool
    is_data: bool = False  # the kernel reads the mask as data
    runs_left: Iterator[int] | None = None  # ends when the mask's function is to be compiled

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.block_mask.as_tuple() if isinstance(t, Tensor))

    @property
    def key(self) -> Hashable:
        """Cache key of the compiled kernel."""
        return self.runner.key

    @classmethod
    def of(
        cls,
        call: Call,
        backend: str | None,
        more_options: dict[str, Any] | None = None,
        as_data: bool | None = None,
    ) -> CompiledCall:
        """Return a call for torch's `backend` name, with `more_options` besides its kernel options.

        as_data: whether the kernel reads the mask as data; by default `why_data` decides.
        """
        block_mask, (of_mask, of_score), shapes = call.blocks().block_mask, call.kernel_key, call.shapes
        given = {**(call.kernel_options or {}), **(more_options or {})}
        chosen = options(call.q, call.k, backend, given, block_mask.BLOCK_SIZE, call.proven_options)
        kind = _kind(call, backend, chosen)
        runs_left = None
        if as_data is None:
            as_data = bool(why_data(call, backend, chosen))
            if as_data and call.is_cuda and not forms.why_inexact(call):
                runs_left = iter(range(_RUNS_AS_DATA))
        if as_data:
            data = call.data()
            block_mask, of_mask = data.block_mask(for_flash=backend == "FLASH"), ("data", data.shapes)
            shapes = None if shapes is None else shapes[2:]
        return cls(
            runner=Runner((of_mask, of_score, *kind, *_lists_kind(block_mask)), shapes),
            score_mod=forms.compiled_score(call),
            block_mask=block_mask if as_data else forms.compiled_mask(call, block_mask),
            scale=call.scale,
            kernel_options=chosen or None,
            with_lse=call.with_lse,
            needs_grad=call.needs_grad,
            is_flash=backend == "FLASH",
            is_data=as_data,
            runs_left=runs_left,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, and lse or None.

        Raises Unavailable if the call cannot be compiled, or if the mask's function is to be compiled now.
        """
        if self.runs_left is not None and next(self.runs_left, None) is None:
            raise Unavailable("the function is compiled after its first calls")
        if not self.needs_grad and (q.requires_grad or k.requires_grad or v.requires_grad):
            # On the CPU torch refuses tensors that require a gradient, even under no_grad.
            q, k, v = q.detach(), k.detach(), v.detach()
        if q is k or k is v or v is q:  # torch 2.11 has no CPU kernel for one tensor twice; other releases recompile
            k, v = k.view_as(k), v.view_as(v)
        if compat.in_foreign_dispatch_mode():  # torch would mark the code as never to be compiled
            raise RuntimeError(
                "flexmasks.attention: torch compiles nothing inside a TorchDispatchMode of this kind, such as a "
                'FlopCounterMode; pass backend="reference" there.'
            )
        try:
            out, lse = self.runner(
                q, k, v, self.score_mod, self.block_mask, self.scale, self.kernel_options, self.with_lse
            )
        except torch.OutOfMemoryError:
            raise
        except (compat.TorchDynamoException, compat.InductorError) as error:
            raise Unavailable(first_line(error)) from error
        except Exception as error:  # FLASH compiles at the first call, and raises errors of any type
            if not self.is_flash and not compat.compiler_is_off():
                raise
            raise Unavailable(first_line(error)) from error
        return out, None if lse is None else lse.float()


def _kind(call: Call, backend: str | None, chosen: dict[str, Any]) -> tuple[Hashable, ...]:
    """Return what a kernel depends on besides the functions and the lists of blocks."""
    q, k = call.q, call.k
    learning = tuple(call.needs_grad and x.requires_grad for x in (q, k, call.v))
    return (
        backend, q.dtype, q.device, q.shape[0], q.shape[1], k.shape[1], q.shape[3], call.with_lse, call.scale,
        repr(chosen), torch.is_grad_enabled(), *learning,
    )  # fmt: skip


def _lists_kind(block_mask: compat.BlockMask) -> tuple[Hashable, ...]:
    return block_mask.BLOCK_SIZE, block_mask.kv_num_blocks.shape[:2]


def why_data(call: Call, backend: str | None = None, chosen: dict[str, Any] | None = None) -> str:
    """Return why the kernel reads the mask as data, or ""."""
    if call.is_traced:
        return ""
    if backend is not None:
        return forms.why_inexact(call)
    block_mask = call.blocks().block_mask
    if chosen is None:
        chosen = options(call.q, call.k, None, call.kernel_options, block_mask.BLOCK_SIZE, call.proven_options)
    kind = _kind(call, backend, chosen)
    is_compiled = _KERNELS.get((*call.kernel_key, *kind, *_lists_kind(block_mask))) is not None
    return forms.why_data(call, kind, is_compiled)


def refuses_to_compile(call: Call) -> str | None:
    """Return why nothing can be compiled where this call is made, or None."""
    if call.is_traced:  # the user's torch.compile compiles it
        return None
    if compat.compiler_is_off():
        return "torch.compile is switched off, by torch._dynamo.config.disable"
    return TRANSFORMED if transformed() else None


def run(call: Call, backend: str | None = None) -> Result:
    """Run a call with torch's `backend` name, or torch's own choice.

    If shared memory is too small, smaller kernels are tried.
    """
    may_shrink = backend is None and call.is_cuda and not call.kernel_options
    attempts = _SMALLER_KERNELS if may_shrink else _SMALLER_KERNELS[:1]
    for more_options in attempts:
        compiled = CompiledCall.of(call, backend, more_options)
        try:
            result = proven(call, compiled)
            if backend is None:
                forms.note_run(call, _kind(call, backend, compiled.kernel_options or {}), compiled.is_data)
            return result
        except Unavailable as error:
            if more_options is attempts[-1] or "out of resource" not in str(error):
                raise
            _log.info("the kernel takes too much shared memory: compiling it again, with smaller blocks")
    raise AssertionError("the last attempt returns or raises")


def compiles(call: Call, backend: str | None = None) -> str:
    """Say whether a call would compile."""
    return CompiledCall.of(call, backend).runner.compiles(call.q, call.k, call.v)
