"""Backend "flex": calls of compiled flex_attention. Backend "flex_flash" shares them."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import flex_invariant, forms, padded
from flexmasks.backends.aligned import Aligned, in_one_list, rounded_first
from flexmasks.backends.call import (
    HALF_DTYPES,
    TRANSFORMED,
    BlocksAndScore,
    Call,
    Inputs,
    Kernel,
    Operand,
    Plans,
    RefusedByAll,
    Result,
    Unavailable,
    exports_any_length,
    first_line,
    raise_passing_error,
    with_gradients_once,
)
from flexmasks.backends.flex_kernels import OUT_OF_RESOURCE, NeedsData, Runner, flex_by, widened
from flexmasks.backends.kernel_tiles import NO_READS, UNKNOWN_READS, Reads, chosen_tiles
from flexmasks.devices import compiles_by_triton, why_no_triton
from flexmasks.kernels.operators import hold, separate
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.sizes import block_size_for
from flexmasks.plans.windows import Look
from flexmasks.spec.bands import is_zero
from flexmasks.spec.structure import flatten
from flexmasks.spec.values import Score

_log = logging.getLogger("flexmasks")
_TILE = 128  # the most queries or keys of a tile
_LEAST_PADDED = 1024, 1 << 24  # queries, and elements of q: copies of fewer take as long as they save
_ENDS_AT_TILES = "IS_DIVISIBLE"  # a kernel option of torch's, see `_lengths`
# Kernel options to try one after the other, for GPUs whose shared memory is too small for the earlier options.
_SMALLER_KERNELS: tuple[dict[str, Any], ...] = (
    {},
    {"num_stages": 1},
    {
        "num_stages": 1, "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32,
        "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
    },
)  # fmt: skip


def options(
    q: Tensor | Operand,
    k: Tensor | Operand,
    v: Tensor | Operand,
    backend: str | None,
    given: dict[str, Any] | None,
    block_size: tuple[int, int],
    reads: Reads = NO_READS,
) -> dict[str, Any]:
    """Return the kernel_options of a call: the user's, torch's `backend` name, and tiles for torch's Triton kernels."""
    chosen = dict(given or {})
    if backend is not None:
        chosen["BACKEND"] = backend
        return chosen
    # For few queries torch takes its decoding kernel, which finds no tile for more than 128 rows of a group.
    grouped_rows = q.shape[2] * (q.shape[1] // k.shape[1])
    by_triton = compiles_by_triton(q.device)
    tiles = chosen_tiles(q, v, block_size, reads) if by_triton and not chosen else {}
    if by_triton and any(map(_is_cut, (q.shape[2], k.shape[2]), block_size)):
        chosen.setdefault(_ENDS_AT_TILES, False)
    if by_triton and grouped_rows > 128 and not chosen.keys() & {"BACKEND", "FORCE_USE_FLEX_ATTENTION"}:
        return {**tiles, **chosen, "BACKEND": "TRITON"}
    # The backward pass of a decoding kernel is that of all others.
    return {**{name: value for name, value in tiles.items() if name.startswith("bwd_")}, **chosen}


def _is_cut(length: int, size: int) -> bool:
    """Return whether the last block is cut where torch's kernels would read on.

    They look where tokens end unless 128 divides the lengths, and then read past the end of larger blocks.
    """
    return size > _TILE and compat.has_static_value(length) and length % size > 0


class FlexForm(NamedTuple):
    """The blocks of a mask with the function of partial ones, and a score change, as a compiled kernel takes them.

    shapes: of words and table of a mask that goes as data.
    of_score: the key of the score change.
    aligned: the slots of the tokens, if documents start at blocks. looks: those that confirm them.
    """

    block_mask: Any
    score_mod: Callable[..., Tensor] | None
    of_score: Hashable
    shapes: tuple[torch.Size, ...] | None = None
    aligned: Aligned | None = None
    looks: tuple[Look, ...] = ()


def kernel(call: Call) -> Kernel:
    return kernel_in_graph(call) if call.is_traced else FlexKernel(call, None, forms.why_data(call))


class FlexKernel(Kernel):
    """Compiled flex_attention."""

    def __init__(self, call: Call, backend: str | None, why_data: str) -> None:
        """backend: torch's name. why_data: why the kernel reads the mask as data, or ""."""
        self._is_flash, self.why_data = backend == "FLASH", why_data
        self._needs_grad, self._with_lse, self._scale = call.needs_grad, call.with_lse, call.scale
        self._is_invariant = call.context.is_invariant
        self._what, self._of_mask, self._captured = call.what, call.kernel_key[0], call.shapes
        self._score = forms.compiled_score(call, for_flash=self._is_flash)
        known = self.why_data or call.mask.is_by_library or call.shapes is None or forms.has_failed(call)
        self._may_be_data = not (known or self._is_flash)  # flex may compile what FLASH cannot
        self._set_options(call, backend, {})
        self._runners: dict[Hashable, Runner] = {}  # by the shapes of forms

    def _set_options(self, call: Call, backend: str | None, more: dict[str, Any]) -> None:
        chosen = _options(call, backend, more, as_data=bool(self.why_data))
        self._lengths = _lengths(call, chosen)
        self._options = chosen or None
        self._key = _key(call, backend, chosen, self._lengths)

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        return self._of_mask, self._key, bool(self.why_data)

    def forms(self, plans: Plans) -> tuple[FlexForm]:
        score_mod, of_score = self._score(plans.score)
        if self._is_invariant:
            score_mod = rounded_first(score_mod)
        if self.why_data:
            data = forms.needed_data(plans.mask, self.why_data)
            block_mask, shapes = data.block_mask(for_flash=self._is_flash), data.shapes
        else:
            block_mask, shapes = plans.mask.block_mask, None
        if self._lengths == "aligned":
            aligned, looks = Aligned.of(plans.mask)
            aligned = aligned.for_batch(block_mask.kv_num_blocks.shape[0])
            block_mask = aligned.block_mask(block_mask)
            score_mod = aligned.score_mod(score_mod, is_relative=_is_relative(plans))
            return (FlexForm(block_mask, score_mod, of_score, shapes, aligned, looks),)
        if self._is_invariant:
            block_mask = in_one_list(block_mask, full_are_hidden=plans.mask.is_given and not self.why_data)
        if self._lengths == "padded":
            block_mask = padded.for_whole_blocks(block_mask)
        return (FlexForm(block_mask, score_mod, of_score, shapes),)

    def starts(self, forms: tuple[FlexForm, ...]) -> Tensor | None:
        return None if forms[0].aligned is None else forms[0].aligned.starts

    def confirm(self, forms: tuple[FlexForm, ...]) -> None:
        for look in forms[0].looks:
            look.confirm()

    def runner(self, form: FlexForm) -> Runner:
        """Return what runs the kernel for lists of these shapes."""
        batch, heads = form.block_mask.kv_num_blocks.shape[:2]
        which = form.of_score, batch, heads, form.shapes
        runner = self._runners.get(which)
        if runner is None:
            of_mask, captured = self._of_mask, self._captured
            if form.shapes is not None:
                words, table = form.shapes
                of_mask = "data", words, _is_one(table[0]), table[1:]
                captured = None if captured is None else captured[2:]
            key = of_mask, form.of_score, *self._key, form.block_mask.BLOCK_SIZE, _is_one(batch), heads
            runner = self._runners[which] = Runner(self._what, key, captured, self._may_be_data)
        return runner

    def first(self, call: Call, inputs: Inputs) -> Result:
        """Run the first call of its kind. If shared memory is too small, smaller kernels are tried."""
        is_fixed = self._is_flash or self._is_invariant or call.kernel_options
        may_shrink = compiles_by_triton(call.q.device) and not is_fixed
        attempts = _SMALLER_KERNELS if may_shrink else _SMALLER_KERNELS[:1]
        for more_options in attempts:
            if more_options:
                self._set_options(call, None, more_options)
                self._runners.clear()
            try:
                try:
                    return super().first(call, inputs)
                except NeedsData:
                    forms.note_failed(call)
                    self._may_be_data, self.why_data = False, forms.why_data(call)
                    self._set_options(call, None, more_options)
                    self._runners.clear()
                    return super().first(call, inputs)
            except Unavailable as error:
                if more_options is attempts[-1] or OUT_OF_RESOURCE not in str(error):
                    raise
                _log.info("the kernel takes too much shared memory: compiling it again, with smaller blocks")
        raise AssertionError("the last attempt returns or raises")

    def compiles(self, forms: tuple[FlexForm, ...], q: Tensor, k: Tensor, v: Tensor) -> str:
        if forms[0].aligned is not None:
            q, k, v = (forms[0].aligned.like(x) for x in (q, k, v))
        return self.runner(*forms).compiles(q, k, v)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: FlexForm
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and lse or None.

        Raises Unavailable if the call cannot be compiled.
        """
        aligned = forms[0].aligned
        if aligned is None:
            return self._run(q, k, v, forms[0])
        results = aligned.around(functools.partial(self._run, form=forms[0]), q, k, v)
        self.confirm(forms)
        return results

    def _run(self, q: Tensor, k: Tensor, v: Tensor, form: FlexForm) -> tuple[Tensor, Tensor | None]:
        if not self._needs_grad:
            # On the CPU torch refuses tensors that require a gradient, even under no_grad. For a view it makes symbols
            # of its base's sizes, too, for which it may find no guard ("sources must not be empty for symbol").
            q, k, v = q.detach(), k.detach(), v.detach()
        elif q is k or k is v or v is q:  # torch compiles anew for one tensor twice, and torch 2.11 fails
            k, v = k.view_as(k), v.view_as(v)
        if compat.in_foreign_dispatch_mode():  # torch would mark the code as never to be compiled
            raise RefusedByAll(
                "flexmasks.attention: torch compiles nothing inside a TorchDispatchMode of this kind, such as a "
                'FlopCounterMode; pass backend="reference" there.'
            )
        try:
            out, lse = self.runner(form)(
                q, k, v, form.score_mod, form.block_mask, self._scale, self._options, self._with_lse
            )
        except NeedsData:
            raise
        except Exception as error:  # FLASH compiles at the first call, and raises errors of any type
            raise_passing_error(error)
            is_of_compiler = isinstance(error, compat.TorchDynamoException | compat.InductorError)
            if not (is_of_compiler or self._is_flash or compat.compiler_is_off()):
                raise
            raise Unavailable(first_line(error)) from error
        if self._needs_grad and not compat.is_compiling():
            out = with_gradients_once("flex", out, "CompiledFunction", by_compiler=True)
        return out, None if lse is None else lse.float()


def _is_relative(plans: Plans) -> bool:
    """Return whether the score change depends on distances alone, those in the documents of slots included."""
    plan: ScorePlan | None = plans.score
    if plan is None or plan.opaque:
        return False
    score = plan.score
    if score._definition.by_library and score.name == "packed":  # reads no places for such a change
        are_aligned = "kv_offsets" not in score.params and is_zero(score.params.get("q_start", 0))
        return are_aligned and all(isinstance(s, Score) and s._is_relative() for s in score._operands())
    return score._is_relative()


def _options(call: Call, backend: str | None, more_options: dict[str, Any], *, as_data: bool) -> dict[str, Any]:
    if call.context.is_invariant:
        return flex_invariant.options(call)
    given = {**(call.kernel_options or {}), **more_options}
    reads = _reads(call, backend, as_data) if not given else NO_READS
    chosen = options(call.q, call.k, call.v, backend, given, call.mask.block_size, reads)
    return {**chosen, _ENDS_AT_TILES: True} if _lengths(call, chosen) else chosen


def _reads(call: Call, backend: str | None, as_data: bool) -> Reads:
    """Return what kernels read for each pair, if tiles are to be chosen by it."""
    chooses = call.on_gpu and backend is None and not call.kernel_options
    return forms.reads_of(call, as_data=as_data) if chooses else NO_READS


def _lengths(call: Call, chosen: dict[str, Any]) -> str:
    """Return how torch's Triton kernel is spared from looking in each tile where queries and keys end, or "".

    They end at tiles and blocks, "whole", or are "padded" to do so; no tile of torch's or ours has more than 128 of
    them. torch asks this only of lengths that it knows while it compiles, and for any length takes kernels that look:
    1.2 to 1.6 times as long on an H200. The copies take longer than a forward pass saves where queries see few blocks,
    so that training alone is padded. A user's own blocks may be full where tokens end, and pairs of padding may give
    tensors that a score learns a gradient of NaN: nothing is padded then.

    Inside `invariant` one kernel runs for all lengths, so that all that do not end so are padded, or documents
    "aligned".
    """
    lengths = call.q.shape[2], call.k.shape[2]
    are_whole = all(n % _TILE == 0 and n % size == 0 for n, size in zip(lengths, call.mask.block_size, strict=True))
    if call.context.is_invariant:
        has_documents = isinstance(call.mask, MaskPlan) and call.mask.documents is not None
        return "aligned" if has_documents else "whole" if are_whole else "padded"
    if chosen.get("BACKEND") != "TRITON" or call.kernel_options:
        return ""
    if are_whole:
        return "whole"
    queries, elements = _LEAST_PADDED
    is_long = lengths[0] >= queries and call.q.numel() >= max(elements, call.k.numel())
    return "padded" if call.needs_grad and is_long and not (call.mask.is_given or call.learns) else ""


def _key(call: Call, backend: str | None, chosen: dict[str, Any], lengths: str) -> tuple[Hashable, ...]:
    """Return the parts of a kernel's key, named by `_KEY_PARTS`, between those of functions and of lists.

    chosen: the kernel options. lengths: what `_lengths` returns.
    """
    q, k, v = call.q, call.k, call.v
    learning = tuple(call.needs_grad and x.requires_grad for x in (q, k, v))
    # torch's decoding kernel on a GPU divides its work by the batch size, and is not taken for a symbolic one.
    may_decode = compiles_by_triton(q.device) and "BACKEND" not in chosen
    others = {name: value for name, value in chosen.items() if name != _ENDS_AT_TILES}
    return (
        backend, q.dtype, q.device, q.shape[0] if may_decode else _is_one(q.shape[0]), lengths, q.shape[1],
        k.shape[1], q.shape[3], v.shape[3], call.with_lse, call.scale, repr(others), torch.is_grad_enabled(), *learning,
    )  # fmt: skip


def _is_one(batch: int) -> bool:
    """Return whether torch compiles a kernel for this batch size alone. Other batch sizes may share a kernel."""
    return batch == 1


@functools.cache
def _why_not_loaded() -> str:
    """Return why torch's compilers cannot be loaded, or "".

    They make the folder of compiled code when they are loaded. A warning is logged once.
    """
    try:
        compat.compiler_is_off()
    except OSError as error:
        why = f"torch's compilers cannot be loaded: {first_line(error)}"
        _log.warning("%s; slower backends run the calls", why)
        return why
    return ""


def refuses_to_compile(call: Call) -> str | None:
    """Return why nothing can be compiled where this call is made, or None."""
    if call.is_traced:  # the user's torch.compile compiles it
        if call.context.has_transforms:
            return "inside torch.compile its operator has no rules for transforms of torch.func"
        any_length = exports_any_length(call.q, call.k)
        return "lists of blocks would tie an exported program to a range of lengths" if any_length else None
    failed = _why_not_loaded()
    if failed:
        return failed
    if compat.compiler_is_off():
        return "torch.compile is switched off, by torch._dynamo.config.disable"
    return TRANSFORMED if call.context.is_transformed else None


def refuses(call: Call) -> str | None:
    """Return why torch's Triton kernels, or on a CPU its kernels in C++, cannot run a call, or None."""
    return _refuses_here(call) or refuses_to_compile(call) or forms.refuses(call)


def _refuses_here(call: Call) -> str | None:
    if call.device_type not in ("cpu", "cuda"):
        return _refuses_device(call)
    if call.q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {call.dtype}"
    if call.on_gpu:
        if lacking := why_no_triton(call.q.device):
            return lacking
        has_two_dtypes = call.k.dtype != call.q.dtype and call.needs_grad
        return "its kernel has gradients only where q, k and v have one dtype" if has_two_dtypes else None
    if call.k.dtype != call.q.dtype:
        return "torch's compiled flex_attention takes one dtype on the CPU"
    if call.needs_grad:
        return "torch's compiled flex_attention has no gradients on the CPU"
    if call.with_lse:
        return "torch's compiled flex_attention gives no lse on the CPU"
    if call.is_traced and _reads_symbolic_sizes(call):
        return "torch's compiler may write wrong code for tensors of symbolic sizes that a mask or score reads"
    return None


def _refuses_device(call: Call) -> str | None:
    """Return why a call cannot run on a device that is neither a CPU nor CUDA's, or None."""
    device = call.device_type
    if device not in ("xpu", "mps"):
        return f"it does not run on {device}"
    if device not in compat.FLEX_RUNS_ON:
        return f"it does not run on {device}: this torch's flex_attention does not"
    if call.q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {call.dtype}"
    if call.k.dtype != call.q.dtype:
        return f"torch's compiled flex_attention takes one dtype on {device}"
    if call.needs_grad:
        return f"on {device} it runs forward passes only"
    if device != "mps":
        return None
    if call.with_lse:
        return "on mps it gives no lse"
    if call.is_traced:
        return "on mps it is not used inside torch.compile"
    return forms.why_not_metal(call)


def _reads_symbolic_sizes(call: Call) -> bool:
    """Return whether functions may read tensors of symbolic sizes.

    torch writes the names of its variables for tiles over names of sizes that begin alike, as ks1 over ks17.
    """
    if all(map(compat.has_static_value, (*call.q.shape, *call.k.shape))):
        return False
    return call.q_offset is None or any(part.opaque or part.tensors for part in call.parts)


def adds_in_any_order(call: Call) -> str | None:
    """Return what the kernel adds in changing order, or None."""
    adds = call.on_gpu and call.learns
    return "the gradients of tensors that the score or mask reads, by atomic operations," if adds else None


# --- in graphs of torch.compile ---


def kernel_in_graph(call: Call, backend: str | None = None, block_size: tuple[int, int] | None = None) -> Kernel:
    plan = cast(MaskPlan, call.mask)
    block_size = plan.block_size if plan.is_given else block_size or block_size_for(plan.size)
    how = call.scale, call.with_lse, call.needs_grad, call.kernel_options, block_size
    if call.context.is_invariant:
        return KernelInGraph(backend, *how, reads=flex_invariant.reads_of(call), is_invariant=True)
    return KernelInGraph(backend, *how, reads=_reads(call, backend, as_data=False))


@dataclass(frozen=True, eq=False)  # torch 2.11 hashes one that it makes in a graph before it has fields
class KernelInGraph(Kernel):
    """torch's flex_attention, which torch.compile compiles with the user's graph."""

    backend: str | None
    scale: float | None
    with_lse: bool
    needs_grad: bool
    kernel_options: dict[str, Any] | None
    block_size: tuple[int, int]
    attend: Callable[..., Any] | None = None  # torch's flex_attention, or one like it
    reads: Reads = UNKNOWN_READS
    is_invariant: bool = False

    def forms(self, plans: Plans) -> tuple[Any, ...]:
        """Return the blocks and the score, and the slots of the tokens if documents start at blocks."""
        mask: MaskPlan = plans.mask.resized(self.block_size)
        form = BlocksAndScore.of(plans._replace(mask=mask))
        if not self.is_invariant:
            return (form,)
        block_mask, score_mod = form.block_mask, rounded_first(form.score_mod)
        if mask.documents is None:
            return (BlocksAndScore(padded.for_whole_blocks(in_one_list(block_mask)), score_mod),)
        aligned = Aligned.of(mask)[0].for_batch(block_mask.kv_num_blocks.shape[0])
        score_mod = aligned.score_mod(score_mod, is_relative=_is_relative(plans))
        return BlocksAndScore(aligned.block_mask(block_mask, in_graph=True), score_mod), aligned

    def starts(self, forms: tuple[Any, ...]) -> Tensor | None:
        return None if len(forms) == 1 else cast(Aligned, forms[1]).starts

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
    ) -> tuple[Tensor, Tensor | None]:
        if len(forms) == 1:
            return self._run(q, k, v, *forms)
        form, aligned = forms
        results: tuple[Tensor, Tensor | None] = aligned.around(functools.partial(self._run, form=form), q, k, v)
        return results

    def _run(self, q: Tensor, k: Tensor, v: Tensor, form: BlocksAndScore) -> tuple[Tensor, Tensor | None]:
        (block_mask, score_mod), scale = form, self.scale
        if not self.needs_grad:
            q, k, v = q.detach(), k.detach(), v.detach()
        on_cpu = q.device.type == "cpu"
        if on_cpu:  # torch's CPU kernel fails for views of tensors with other dimensions
            q, k, scale = widened(q, k, scale)
            q, k, v = separate(q), separate(k), separate(v)
        attend = functools.partial(flex_by, self.attend or attend_in_graph)
        if not self.is_invariant:
            chosen = options(q, k, v, self.backend, self.kernel_options, self.block_size, self.reads)
        else:
            chosen = {} if on_cpu else flex_invariant.fixed_options(q, v, self.block_size, self.reads)
            if padded.has_more_tokens(block_mask, q, k):
                attend = functools.partial(padded.with_padding, attend)
        out, lse = attend(q, k, v, score_mod, block_mask, scale, chosen, self.with_lse)
        return separate(out) if on_cpu else out, lse


_LN_2 = math.log(2.0)
# What torch's flex_attention adds to the options of its operator.
_OPTIONS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_MAX": False,
}  # fmt: skip


class _Aux(NamedTuple):
    lse: Tensor | None


def attend_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: compat.BlockMask,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: Any = None,
) -> Any:
    """Return what torch's flex_attention returns, with the arguments that it has, where torch.compile does not read.

    Dynamo would read torch's flex_attention, and the functions of mask and score, line by line: a third of the time of
    a compiled model's first step. Here the operator behind it is called as torch calls it while Dynamo reads.

    Tensors of the functions become the operator's inputs, as Dynamo makes them.
    """
    for x in (q, k, v):  # kernels are made for a number of heads and a head size
        int(x.shape[1]), int(x.shape[3])
    options = {**_OPTIONS, **(kernel_options or {})}
    is_freed = options["BACKEND"] == "FLASH" and not compat.FLASH_HOLDS_CAPTURED
    score, of_score = _with_inputs(score_mod or _unchanged, copied=is_freed)
    mask, of_mask = _with_inputs(block_mask.mask_mod, copied=is_freed)
    *lists, _ = block_mask.as_tuple()
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    with_lse = return_aux is not None or (q.is_cuda and torch.is_grad_enabled())
    options["OUTPUT_LOGSUMEXP"] = with_lse
    operator = torch.ops.higher_order.flex_attention
    out, lse, _ = operator(q, k, v, score, (*lists, mask), scale, options, of_score, of_mask)
    if is_freed and (of_score or of_mask) and not out.requires_grad:
        hold(out, [*of_score, *of_mask])
    return out if return_aux is None else (out, _Aux(lse if options["BACKEND"] == "FLASH" else lse * _LN_2))


def _unchanged(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


def _with_inputs(
    function: Callable[..., Tensor], copied: bool = False
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return a function that takes the tensors that it reads behind its arguments, and these tensors.

    copied: whether as copies, which Inductor does not compute anew in the function.
    """
    structure, leaves = flatten(function)
    count = len(leaves.tensors)

    def with_inputs(*arguments: Any) -> Tensor:
        arguments, tensors = arguments[: len(arguments) - count], arguments[len(arguments) - count :]
        result: Tensor = structure.fill(tensors, has_own_globals=True)(*arguments)
        return result

    held = [separate(x.detach()) if copied else held_by_kernels(x) for x in leaves.tensors]
    return with_inputs, tuple(held)


def held_by_kernels(x: Tensor) -> Tensor:
    """Return a tensor that torch's kernels can capture.

    torch's CPU kernel fails if it captures a tensor that the same graph computes, other than by a custom operator. Its
    kernels for GPUs take a constant tensor in which the graph has set elements (`x = torch.zeros(n); x[i] = 1`) for the
    constant, without the elements: seen with torch 2.11. They read a view as it is.
    """
    return separate(x.detach()) if x.device.type == "cpu" else x.unsqueeze(0).select(0, 0)
