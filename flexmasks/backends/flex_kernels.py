"""Kernels of flex_attention, compiled with one code object for each kind of call.

torch counts recompilations by code object and, at its limit, would run flex_attention unfused. Here every kind of call
(the functions of mask and score with their constants, dtype, heads, head size, options) has a code object of its own,
in which only batch size and lengths vary; torch makes them symbolic after the first few. Before torch reaches the limit
for another reason, the code object is replaced, so nothing ever runs unfused.

A call that may compile holds a lock, so threads that make the same call at once compile one kernel.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import padded
from flexmasks.backends.call import Unavailable, first_line
from flexmasks.cache import KERNELS, Part
from flexmasks.errors import is_refused_for_tracing, is_wrong_bound, passing_error
from flexmasks.kernels.compiling import announce, warn_when_slow
from flexmasks.kernels.direct import with_rows_together
from flexmasks.kernels.operators import separate

_log = logging.getLogger("flexmasks")
_kernel_numbers = itertools.count()

# `compilations` counts those of the thread; `running` describes the call whose kernel it runs; `timer` waits for the
# end of a compilation.
_this_thread = threading.local()

# Guards that are left out: torch checks at each call that its own modules have not changed, a tenth of a call's time.
_GUARDS_OF_TORCH = ("G['compat']", "G['_announce", "G['__builtins_dict", "G['__import_torch_dot", "__import__('torch')")

OUT_OF_RESOURCE = "out of resource"  # part of an error of Triton: smaller kernels may work

_CPP_FAILED = "CppCompileError"  # part of an error of Inductor

_FEW_QUERIES = 128  # below which torch may take another kernel on a GPU

_MAX_NOTED_SHAPES = 64  # shapes that one kernel remembers

_MAX_COPIED = 1 << 28  # the most bytes of q, k and v that are copied for one call on a CPU

_RUNS_BETWEEN_LOOKUPS = 64  # after this many runs a replay looks its kernel up again, which marks it as used


class _Shapes(NamedTuple):
    """Shapes for which torch may compile the same code again."""

    batch: int
    q_len: int
    kv_len: int
    strides: tuple[tuple[int, ...], ...]  # of q, k and v, empty for what is contiguous
    contiguous: tuple[bool, ...]  # whether q, k and v are
    captured: Hashable  # shapes of the tensors that mask and score captured
    packed: tuple[tuple[int, ...], ...]  # strides of q, k and v that are constants, see `packed_dims`

    @property
    def specialized(self) -> tuple[Any, ...]:
        """Properties that torch specializes even in a dynamic-shape kernel.

        The properties are lengths of 1, equal lengths, and memory layouts.
        """
        return self.q_len == 1, self.kv_len == 1, self.q_len == self.kv_len, self.contiguous, self.packed


@dataclass
class _Graphs:
    """The graphs that torch has compiled from one code object."""

    count: int = 0
    most: int = 8


@dataclass(frozen=True, eq=False)
class _Kernel:
    compiled: Callable[..., Any]
    is_static: bool  # compiled for each length separately
    on_gpu: bool
    follows_failure: bool = False  # torch could not compile the kernel in whose place this one is
    graphs: _Graphs = field(default_factory=_Graphs)
    shapes_run: set[_Shapes] = field(default_factory=set)

    def run(
        self,
        what: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mod: Any,
        block_mask: Any,
        scale: float | None,
        *others: Any,
    ) -> Any:
        """Run `flex`.

        what: describes the functions, for the log.
        """
        _this_thread.running = what, q, k, others[0]
        try:
            if not self.on_gpu:
                q, k, scale = widened(q, k, scale)
            return self.compiled(q, k, v, score_mod, block_mask, scale, *others)
        finally:
            _this_thread.running = None
            _stop_timer()

    @property
    def has_room(self) -> bool:
        """Return whether torch may compile two more graphs: for new shapes, and by its guards."""
        return self.graphs.count + 1 < self.graphs.most

    def is_ready(self, shapes: _Shapes) -> bool:
        """Return whether torch should have the code for these shapes."""
        return shapes in self.shapes_run or self.takes_any_length(shapes)

    def takes_any_length(self, shapes: _Shapes) -> bool:
        """Return whether torch should have symbolic lengths for such shapes.

        It has them after the first few lengths.
        """
        return not self.is_static and sum(other.specialized == shapes.specialized for other in self.shapes_run) >= 3

    def why_compiled(self, shapes: _Shapes) -> str:
        """Return why torch compiled for these shapes, given the shapes before."""
        others = self.shapes_run - {shapes}
        if all(other.batch != shapes.batch for other in others):
            return "no kernel had this batch size"
        if all((other.q_len, other.kv_len) != (shapes.q_len, shapes.kv_len) for other in others):
            return "no kernel had these lengths"
        if all(other.captured != shapes.captured for other in others):
            return "no kernel had these shapes of tensors in mask or score"
        if all(other.strides != shapes.strides for other in others):
            return "no kernel had this memory layout of q, k and v"
        return "torch's guards ask for it"


def _stop_timer() -> None:
    """End the wait for a compilation of this thread that takes long."""
    timer, _this_thread.timer = getattr(_this_thread, "timer", None), None
    if timer is not None:
        timer.cancel()


COMPILED: Part[_Kernel] = Part(KERNELS, "kernels")


class InPlaceOfScore(NamedTuple):
    """What `flex` gets in place of a score change if another function attends in place of torch's flex_attention.

    attend: takes this in place of the score change. name: of the functions that it finds by it.
    tensors: those of these functions.
    """

    attend: Callable[..., Any]
    name: str
    tensors: tuple[Tensor, ...]


@compat.constant_in_graphs
def _announce() -> bool:
    """Log what the kernel that this thread runs is, before torch compiles it.

    torch calls this while it traces `flex`, perhaps several times, and at no other time.
    """
    running, _this_thread.running = getattr(_this_thread, "running", None), None
    if running is not None:
        what, q, k, kernel_options = running
        backend = "flex_flash" if (kernel_options or {}).get("BACKEND") == "FLASH" else "flex"
        described = f"attention for backend {backend!r}, {_described(what, q, k)}"
        announce(described)
        _this_thread.timer = warn_when_slow(described)
    return True


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: compat.BlockMask | None,
    scale: float | None,
    kernel_options: Any,
    with_lse: bool,
    packed: Sequence[Sequence[bool]],
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse, or None, of torch's flex_attention. Grouped heads are recognized from the shapes.

    packed: for q, k and v on a GPU, for which dimensions' strides torch compiles, see `packed_dims`.
    """
    _announce()
    for x, dims in zip((q, k, v), packed, strict=False):
        for stride, is_constant in zip(x.stride(), dims, strict=False):
            if is_constant:
                compat.as_constant(stride)
    by = score_mod.attend if isinstance(score_mod, InPlaceOfScore) else compat.flex_attention
    attend = functools.partial(flex_by, by)
    if padded.has_more_tokens(block_mask, q, k):
        attend = functools.partial(padded.with_padding, attend)
    return attend(q, k, v, score_mod, block_mask, scale, kernel_options, with_lse)


_NEGATIVE_DIMS = 0, -1, -2, -3


def packed_dims(x: Tensor) -> tuple[bool, ...]:
    """Return for which dimensions torch's compiler cannot derive the stride from sizes, within a token's stride.

    Slices of one projection to q, k and v have such a one. In a kernel for any length it would be unknown, and Triton,
    which then cannot tell that rows are aligned, loads single elements: twice as long on an H200. Larger strides, such
    as those of a cache of more keys, change with lengths, and stay unknown.
    """
    strides, known, packed = x.stride(), {0, 1}, [False] * 4
    for stride, negative_dim in sorted(zip(strides, _NEGATIVE_DIMS, strict=True)):  # the order in which torch derives
        packed[-negative_dim] = stride <= strides[2] and stride not in known
        known.add(stride * x.shape[-negative_dim])
    return tuple(packed)


def flex_by(
    attend: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: compat.BlockMask | None,
    scale: float | None,
    kernel_options: Any,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return what `flex` returns, by torch's flex_attention or a function like it."""
    on_cpu, on_metal, has_few_queries = q.device.type == "cpu", q.device.type == "mps", q.shape[2] < _FEW_QUERIES
    if on_cpu:  # torch's kernel gives wrong numbers where all elements of a head are one
        q, k, v = with_rows_together(q, k, v)
    if on_cpu or on_metal:
        score_mod = _as_stored(score_mod)
    grouped = q.shape[1] != k.shape[1]
    if with_lse:
        out, aux = attend(
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
        if has_few_queries and not on_cpu:
            # torch's kernel for few queries on a GPU gives rows that see NaN the lse of rows that see nothing.
            lse = cast(Tensor, aux.lse)
            return out, torch.where(lse.isneginf() & out.isnan().any(-1), math.nan, lse)
        return out, aux.lse
    out = attend(q, k, v, score_mod, block_mask, scale, grouped, kernel_options=kernel_options)
    if on_cpu and q.shape[2] == 1 and block_mask is not None:
        # torch's kernel for one query on a CPU leaves the output unwritten if there is no block at all.
        full = block_mask.full_kv_num_blocks
        has_blocks = block_mask.kv_num_blocks.any() if full is None else (block_mask.kv_num_blocks + full).any()
        out = torch.where(has_blocks, separate(out), 0)
    return out, None


def _as_stored(score_mod: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    """Return a score change whose results torch's kernel on a CPU stores and reads right. It takes no measurable time.

    The kernel stores a result that depends on fewer indices than a tile has, as `bias[kv]`, over the first scores of
    the tile only. So results are made to depend on the score, by a choice that the compiler does not see through.

    NaN become infinite: a row that sees one is then NaN, as inf - inf is. The kernel would drop the keys of a block
    from a row whose scores there have a NaN: the greatest score of such a block counts as -inf. The one for MPS would
    drop NaN as if they were hidden.
    """

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if score_mod is not None:
            score = torch.where(q >= 0, score_mod(score, b, h, q, kv), score)
        return torch.where(score != score, math.inf, score)

    return changed


# Head sizes below this one take another way through torch's kernel for CPUs, by vectors; a tile takes 16 keys.
_SAFE_HEAD_SIZE, _SHORTEST_VECTOR = 24, 4

_VECTORS_FILL_TILES = torch.backends.cpu.get_cpu_capability() == "AVX512"


def widened(q: Tensor, k: Tensor, scale: float | None) -> tuple[Tensor, Tensor, float | None]:
    """Return q and k on a CPU with heads wide enough for torch's kernel, and the scale.

    On CPUs whose vectors do not fill a tile of keys, torch's kernel reads and writes whole tiles at the last keys of
    small heads: seen with AVX2, in torch 2.11 and 2.13. What lies behind the keys then changes outputs.
    """
    size = q.shape[3]
    if _VECTORS_FILL_TILES or size >= _SAFE_HEAD_SIZE or size % _SHORTEST_VECTOR:
        return q, k, scale
    size = int(compat.as_constant(size))  # kernels take no symbolic scale
    missing = 0, _SAFE_HEAD_SIZE - size
    return F.pad(q, missing), F.pad(k, missing), size**-0.5 if scale is None else scale


class NeedsData(Unavailable):
    """Error of a function that torch's kernels get wrong, whose mask may go as data."""


def _run_kernel(
    what: str, key: Hashable, captured: Hashable, may_be_data: bool, *args: Any
) -> tuple[Tensor, Tensor | None]:
    """Run `flex(*args)`, compiled by the code object of `key`.

    `what` describes the functions, for the log. `captured` has the shapes of captured tensors. Errors of torch's
    compilation are raised unchanged, but NeedsData is raised if the mask may go as data instead.
    """
    q, k, v, *_, packed = args
    shapes = shapes_of(q, k, v, packed, captured)
    kernel = COMPILED.get(key)
    if kernel is not None and kernel.is_ready(shapes):
        with contextlib.suppress(_Retry):
            return _run_compiled(kernel, what, *args)
    with compat.compile_lock:
        before, start, why = _compilations(), time.perf_counter(), ""
        kernel = COMPILED.get(key)  # another thread may have made it
        if kernel is None:
            why = _why_new(key)
            kernel = _new_kernel(key)
        elif kernel.graphs.count and not (kernel.has_room or kernel.is_ready(shapes)):
            why = f"torch keeps at most {kernel.graphs.most} graphs of a function"
            kernel = _new_kernel(key, kernel.is_static)
        try:
            result = kernel.run(what, *args)
        except compat.FailOnRecompileLimitHit:  # other threads have compiled meanwhile
            why = "torch's recompile limit was reached"
            kernel = _new_kernel(key, kernel.is_static)
            result = kernel.run(what, *args)
        except Exception as error:
            if passing_error(error) is not None:
                if _compilations() != before:  # torch may have marked the code as never to be compiled
                    COMPILED.drop(key)
                raise
            is_of_compiler = isinstance(error, compat.InductorError)
            may_be_shapes = (is_of_compiler or is_wrong_bound(error)) and OUT_OF_RESOURCE not in str(error)
            # The kernel that reads data may take a mask whose function torch cannot compile, on a CPU only for any
            # length.
            if may_be_data and may_be_shapes and not kernel.is_static:
                COMPILED.drop(key)
                raise NeedsData(first_line(error)) from error
            may_be_shapes = may_be_shapes or (isinstance(error, compat.TorchDynamoException) and not is_of_compiler)
            if kernel.is_static or not may_be_shapes:
                if not is_of_compiler:
                    COMPILED.drop(key)  # torch may have marked the code as never to be compiled
                raise
            # The first graph of a kernel has no symbolic sizes. With ten of them torch's C++ for the CPU is wrong: it
            # replaces a name within a longer name.
            is_static = kernel.follows_failure or _CPP_FAILED in str(error) or is_wrong_bound(error)
            why = f"torch could not compile it for {'any length' if kernel.graphs.count else 'this call'}"
            kernel = _new_kernel(key, is_static, follows_failure=True)
            try:
                result = kernel.run(what, *args)
            except Exception:
                COMPILED.drop(key)
                raise
        if _compilations() != before:
            _log_compiled(start, what, q, k, why or kernel.why_compiled(shapes))
        if len(kernel.shapes_run) < _MAX_NOTED_SHAPES:
            kernel.shapes_run.add(shapes)
    return result  # type: ignore[no-any-return] # torch.compile keeps no types


def _laid_out(key: Hashable, captured: Hashable, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v on a CPU in layouts that need few kernels.

    Torch compiles for each layout anew, which takes longer than copies of many calls. Tensors stay as they are if they
    are contiguous as [B, H, S, D] or [B, S, H, D], unless there is a kernel for the first and none for the second.
    Large tensors are not copied: one for all batch elements would take the memory of many.
    """
    given = q, k, v
    if all(x.is_contiguous() for x in given):
        return given
    are_plain = [x.is_contiguous() or x.transpose(1, 2).is_contiguous() for x in given]
    if sum(x.nelement() * x.element_size() for x in given if not x.is_contiguous()) > _MAX_COPIED:
        return given
    plain = [x if is_plain else x.contiguous() for x, is_plain in zip(given, are_plain, strict=True)]
    kernel, shapes = COMPILED.get(key), shapes_of(plain[0], plain[1], plain[2], (), captured)
    copied = shapes._replace(strides=((),) * 3, contiguous=(True,) * 3)
    if kernel is not None and not kernel.is_ready(shapes) and kernel.is_ready(copied):
        plain = [x.contiguous() for x in plain]
    return plain[0], plain[1], plain[2]


class _Retry(Exception):
    """A compiled kernel did not run, and may run under the lock."""


def _run_compiled(kernel: _Kernel, what: str, *args: Any) -> tuple[Tensor, Tensor | None]:
    """Run a compiled kernel without the lock.

    Raises _Retry if torch cannot compile, or refuses to run the kernel now.
    """
    before, start = _compilations(), time.perf_counter()
    try:
        result = kernel.run(what, *args)
    except (compat.FailOnRecompileLimitHit, compat.InductorError) as error:
        raise _Retry from error
    except RuntimeError as error:
        if not (is_refused_for_tracing(error) or is_wrong_bound(error)):
            raise
        raise _Retry from error
    if _compilations() != before:
        if kernel.graphs.count >= kernel.graphs.most:
            kernel.shapes_run.clear()  # the next call makes a new kernel, which has room for more graphs
        _log_compiled(start, what, args[0], args[1], "torch's guards ask for it")
    return result  # type: ignore[no-any-return] # torch.compile keeps no types


def _log_compiled(start: float, what: str, q: Tensor, k: Tensor, why: str) -> None:
    _log.info("compiled attention in %.1f s: %s: %s", time.perf_counter() - start, _described(what, q, k), why)


def _described(what: str, q: Tensor, k: Tensor) -> str:
    return f"{what}, {str(q.dtype).removeprefix('torch.')}, q {list(q.shape)}, k {list(k.shape)}"


def _compilations() -> int:
    return getattr(_this_thread, "compilations", 0)


def _why_new(key: Any) -> str:
    """Return why a kernel is needed beside the kernels that are there."""
    differences: list[list[str]] = [
        [name for name, mine, other in zip(_KEY_PARTS, key, known, strict=True) if mine != other]
        for known in COMPILED.known_keys()
    ]
    if not differences:
        return "it is the first kernel"
    nearest = min(differences, key=len)
    return "no kernel had this " + ", ".join(dict.fromkeys(nearest))


def shapes_of(q: Tensor, k: Tensor, v: Tensor, packed: Sequence[Sequence[bool]], captured: Hashable) -> _Shapes:
    """Return the shapes of a call.

    packed: as for `flex`. captured: the shapes of the tensors that mask and score captured.
    """
    contiguous = tuple(x.is_contiguous() for x in (q, k, v))
    strides = tuple(() if x.is_contiguous() else x.stride() for x in (q, k, v))
    constant = tuple(tuple(itertools.compress(x.stride(), dims)) for x, dims in zip((q, k, v), packed, strict=False))
    return _Shapes(q.shape[0], q.shape[2], k.shape[2], strides, contiguous, captured, constant)


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[int, ...], ...]:
    return q.stride(), k.stride(), v.stride()


def _new_kernel(key: Hashable, is_static: bool = False, follows_failure: bool = False) -> _Kernel:
    name = f"flexmasks_kernel_{next(_kernel_numbers)}"
    code = flex.__code__.replace(co_name=name)
    function = types.FunctionType(code, flex.__globals__, name)
    # torch keeps compiled code, and with it the code object, until `forget_code` drops both.
    weakref.finalize(function, compat.forget_code, code).atexit = False
    graphs = _Graphs(most=compat.recompile_limit())

    def needed_guards(guards: Sequence[Any]) -> list[bool]:
        """Return which guards torch keeps; torch asks once in each compilation, at its end."""
        graphs.count += 1
        _stop_timer()
        _this_thread.compilations = _compilations() + 1
        return [not guard.name.startswith(_GUARDS_OF_TORCH) for guard in guards]

    # For any length torch does not know either where views begin: the few that are not aligned are copied.
    options: dict[str, Any] = {"guard_filter_fn": needed_guards}
    on_gpu = _is_for_gpu(key)
    if on_gpu:
        options["assume_aligned_inputs"] = True
    compiled = torch.compile(function, fullgraph=True, dynamic=False if is_static else None, options=options)
    kernel = _Kernel(compiled, is_static, on_gpu, follows_failure, graphs)
    COMPILED.put(key, (), kernel, 1)
    return kernel


class Runner:
    """Runs one kind of call, and holds its kernel after the first run.

    Later runs skip the lookup of the kernel by key.
    """

    def __init__(self, what: str, key: Hashable, captured: Hashable, may_be_data: bool) -> None:
        self.key, self._on_gpu = key, _is_for_gpu(key)
        self._what, self._captured, self._may_be_data = what, captured, may_be_data
        # A weak reference, so that the cache bounds the number of kernels.
        self._kernel: Callable[[], _Kernel | None] = lambda: None
        self._packed: dict[Any, Any] = {}  # the packed dimensions of q, k and v, by strides that have run
        self._runs = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
        kernel, strides = self._kernel(), _strides(q, k, v)
        self._runs += 1
        packed = self._packed.get(strides)
        may_run = kernel is not None and kernel.has_room and packed is not None
        if kernel is not None and may_run and self._runs % _RUNS_BETWEEN_LOOKUPS:
            try:  # cheaper than contextlib.suppress, on the way of every call
                return _run_compiled(kernel, self._what, q, k, v, *args, packed)
            except _Retry:
                pass
        q, k, v, packed = self._laid_out(q, k, v)
        result = _run_kernel(self._what, self.key, self._captured, self._may_be_data, q, k, v, *args, packed)
        kernel = COMPILED.get(self.key)
        if kernel is not None:
            self._kernel = weakref.ref(kernel)
            if len(self._packed) < _MAX_NOTED_SHAPES:
                self._packed[_strides(q, k, v)] = packed
        return result

    def _laid_out(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[tuple[bool, ...], ...]]:
        """Return q, k and v as their kernel takes them, and `packed` as for `flex`."""
        if self._on_gpu:
            return q, k, v, (packed_dims(q), packed_dims(k), packed_dims(v))
        return *_laid_out(self.key, self._captured, q, k, v), ()

    def compiles(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Say whether a call with these tensors would compile."""
        kernel = COMPILED.get(self.key)
        if kernel is None:
            return "yes, some seconds: it is the first call of its kind"
        shapes = shapes_of(*self._laid_out(q, k, v), self._captured)
        if shapes in kernel.shapes_run:
            return "no: such a call has run before"
        if not kernel.takes_any_length(shapes):
            return "probably, some seconds: such calls have run, but not with these lengths, shapes or memory layouts"
        return "no: such a call has run at other lengths, by a kernel for any length"


# The parts of a kernel's key in words, for the log.
_KEY_PARTS = (
    "mask with its numbers", "score with its numbers", "backend", "dtype", "device", "batch size",
    "kind of lengths (multiples of 128, padded to them, or others)", "number of heads",
    "number of heads of k and v", "head size", "head size of v", "wish for an lse", "scale", "set of kernel options",
    *["wish for gradients"] * 4, "block size", "batch size of block lists", "number of heads of block lists",
)  # fmt: skip


def _is_for_gpu(key: Any) -> bool:
    return bool(key[_KEY_PARTS.index("device")].type != "cpu")
