"""A call inside a user's own torch.compile.

torch cannot trace how ranges are computed, and takes long to read Python. So what torch reads here only encodes the
call: names, numbers and tensors. `_attend` gets them in plain Python, chooses a backend, plans the blocks and calls
the kernel; what it does with the tensors becomes part of the user's graph. So blocks are planned at each run, on the
device, from the tensors of that run.

Two kinds of calls torch must read itself, by `_run_traced`: those with functions that only torch can read, as those of
a score that was not made a Score outside, and those by slices, whose checkpoints it has to see.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from flexmasks import compat
from flexmasks.backends import flex, flex_flash, forms, plain, tiles_operator
from flexmasks.backends.call import BlocksAndScore, Call, Operand, Plans, Ready, Result, exports_any_length
from flexmasks.backends.encoded import BITS, UNKNOWN, Encoded, changed, errors_logged
from flexmasks.backends.slices import OverIndices, Visible, attend_by_slices
from flexmasks.backends.table import BACKENDS, choose, only_choice, warn_of_dtypes, warn_of_order, why_not
from flexmasks.backends.tangents import Duals, TangentsInGraph, with_tangents
from flexmasks.backends.traced_blocks import (
    aligned_traced,
    bits_of_function,
    check_can_be_asked,
    check_numbers,
    encode_mask,
    in_graph_offset,
    of_bits,
    planned_blocks,
    reads_batch_and_heads,
)
from flexmasks.blocks import bits as of_words
from flexmasks.blocks.build import lists_of_blocks
from flexmasks.blocks.elements import over_indices, over_visible
from flexmasks.blocks.lists import as_kernels_read, grid, lists_of, made_of
from flexmasks.context import Context
from flexmasks.devices import compiles_by_triton
from flexmasks.graphs import Flat, in_graph, text_of_constants, value_of_text
from flexmasks.kernels.operators import separate
from flexmasks.kernels.sinks import with_sinks
from flexmasks.plans.checks import fail
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.plan import over_zeros
from flexmasks.plans.portable import PortableBlockMask, function_of_lists
from flexmasks.plans.sizes import block_size_for, shifted_mask, shifted_score, unread
from flexmasks.request import Request, checked
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.bands import holds_documents
from flexmasks.spec.encoding import encode_if_readable, note_constants
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, Modifier, Score

_log = logging.getLogger("flexmasks")
_COMPILED = ("flex_flash", "flex")  # backends that compile the functions of mask and score
_TRACED = (*_COMPILED, "reference")  # backends for functions that only torch's tracing can read
_MOST_BITS = 1 << 31  # of a mask that is looked at at each run


def run(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Result:
    """Run a call by operations that torch can trace. The result may or may not have the call's sinks, see Result."""
    size = checked(q, k, v, request)
    mask, score = from_arguments(request.mask, request.score, request.params)
    if 0 in q.shape or 0 in k.shape:
        q_offset = request.q_offset if isinstance(request.q_offset, Tensor) else 0
        return Result(*_without_pairs(q, k, v, mask, score, unread(size, q_offset), request.return_lse))
    block_mask: compat.BlockMask | None = None
    of_mask: Any = UNKNOWN
    if request.block_mask is not None:
        block_mask = _as_graphs_read(as_kernels_read(request.block_mask))
    else:
        mask = cast(Mask, from_arguments("full", None, {})[0] if mask is None else mask)
        of_mask = encode_mask(mask, q.device)
    of_score: Any = None if score is None else encode_if_readable(score, q.device, size.dtype) or UNKNOWN
    q_offset = aligned_traced(q, k, request.q_offset, of_mask, of_score, request.block_mask is not None)
    request = request._replace(q_offset=q_offset)
    if compat.in_onnx_export():
        return Result(*_in_plain_operations(q, k, v, request, mask, score, unread(size, q_offset)))
    encoded = Encoded(of_mask, q_offset) if request.block_mask is None else _of_block_mask(request.block_mask, q)
    bits: tuple[Tensor, ...] | None = None
    if isinstance(encoded.mask, Flat) and "(False, " in encoded.mask.text:  # perhaps a function that a user wrote
        bits = _bits_of(*encoded[:4], q.detach(), k.detach())
    elif encoded.mask == UNKNOWN and block_mask is not None:
        check_numbers(block_mask.mask_mod, q.device)
    elif encoded.mask == UNKNOWN:
        of_size, block_size = unread(size, q_offset), block_size_for(size)
        bits = bits_of_function("attention", cast(Mask, mask), of_size, q_offset, block_size)
    if bits is not None and bits[0].ndim:
        if request.must_be_invariant and holds_documents(mask):
            fail(
                "inside flexmasks.invariant() torch.compile would read a mask of documents as bits, which do not say "
                "where these start: write its function with whole numbers that fit 32 bits, and one index for each "
                "tensor, or call attention outside of torch.compile."
            )
        words, table, *lists_of_bits = bits
        block_size = encoded.block_size or compat.constants(block_size_for(size))
        encoded = Encoded((BITS, words, table), 0, block_size)
        lists = lists_of_bits if block_mask is None else lists_of(block_mask)
        block_mask = of_bits((q.shape[2], k.shape[2]), (words, table, *lists), block_size)
    encoded = encoded._replace(score=of_score, q_offset=q_offset)
    learns = torch.is_grad_enabled() and _may_learn(score, of_score, request.backend)
    needs_grad = learns or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    facts = needs_grad, learns, request.return_lse
    kept = request.backend_name, encoded.block_size, encoded.sizes, request.must_be_invariant
    constants = text_of_constants((*kept, *facts))
    lists = () if block_mask is None else lists_of(block_mask)
    options = compat.constants(tuple((request.kernel_options or {}).items()))
    given = encoded.mask, encoded.offset, of_score, q_offset, q, k, v, compat.constants(request.scale)
    results = _attend(constants, request.sink_logits, lists, options, *given)
    if results[0].ndim == q.ndim:
        lse = results[1] if request.return_lse else None
        return Result(results[0], lse, has_sinks=request.sink_logits is not None)
    name, size = _TRACED[results[0].shape[0]], unread(size, q_offset)
    return _run_traced(name, request, mask, score, block_mask, encoded, size, q, k, v, needs_grad)


@functools.lru_cache(maxsize=256)
def _log_once(message: str) -> None:
    _log.warning(message)


@in_graph
def _bits_of(
    mask: Any, offset: int | Tensor, block_size: tuple[int, int] | None, sizes: tuple[int, ...], q: Tensor, k: Tensor
) -> tuple[Tensor, ...]:
    """Return the bits of a mask that the user's compiler may compute otherwise than Python does, their table, and the
    lists of blocks; an operator computes them at each run. Of any other mask the result is one tensor of no dimensions.
    """
    with errors_logged():
        encoded = Encoded(changed(mask, _without_gradient), offset, block_size, sizes)
        plan: MaskPlan = encoded.with_numbers(compat.size_hint).plans(q, k).mask
        reason = forms.why_bits_in_trace(plan, q, k)
        if not reason:
            return (torch.empty(()),)
        size = plan.size
        height, width = block_size or block_size_for(size)
        reads_b, reads_h = reads_batch_and_heads(plan.mask)
        of_batch = size.batch if reads_b or isinstance(offset, Tensor) else 1
        shape = of_batch, size.heads if reads_h else 1, *grid((size.q_len, size.kv_len), (height, width))
        why = f"torch.compile may compute the mask {plan.what} otherwise than Python does: {reason}"
        pairs = math.prod(map(compat.size_hint, shape)) * height * width
        if not of_words.can_be_bits((height, width)) or pairs > _MOST_BITS:
            fail(
                f"{why}; write it with whole numbers that fit 32 bits, and one index for each tensor, or make the "
                "blocks outside, with flexmasks.block_mask(..., as_data=True), and pass them as block_mask."
            )
        _log_once(f"{why}. Its bits are computed by a look at all pairs, at each run.")
        words, table, possible, full = tiles_operator.bits_in_graph(
            q, k, (*shape, height, width // of_words.BITS), encoded
        )
        lists = lists_of_blocks(possible, full)
        return words, table, *(map(separate, lists) if q.device.type == "cpu" else lists)


@in_graph
def _attend(
    constants: str,
    sinks: Tensor | None,
    lists: tuple[Tensor, ...],
    options: tuple[Any, ...],
    mask: Any,
    offset: int | Tensor,
    score: Any,
    q_offset: int | Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Return output, and lse if it is wanted, of a call whose functions are encoded.

    If torch must trace the call, the result is a tensor of two dimensions, which is as long as the place of the backend
    in _TRACED: torch takes only tensors from functions that it does not trace, and knows their lengths while it traces.
    The choice depends on kinds and shapes alone. The comparisons of symbolic lengths made here become guards.

    constants: the text of the backend's name, the size of given blocks, the sizes of the mask, whether the call is
        inside `invariant`, needs a gradient, has a score that may learn, and wants the lse.
    sinks: logits that are folded into both.
    lists: those of given blocks.
    options: the items of kernel_options.
    """
    with errors_logged():
        backend, block_size, sizes, must_be_invariant, *facts = value_of_text(constants)
        encoded = Encoded(changed(mask, _without_gradient), offset, block_size, sizes, score, q_offset)
        plans = encoded.with_numbers(compat.size_hint).plans(q, k, lists)
        call = _call_of(plans, q, k, v, scale, dict(options), facts, must_be_invariant)
        if not lists and exports_any_length(q, k):  # no symbolic lengths are compared
            with compat.without_modes():
                plan = cast(MaskPlan, call.mask)
                at_example, size = over_zeros(plan.mask, plan.size)
                at_example._resolve(size)
        must_trace = UNKNOWN in (encoded.mask, encoded.score) or not compat.IS_TESTED
        if must_trace and must_be_invariant:
            fail(
                "inside flexmasks.invariant() torch.compile must read the mask and the score as values: make them "
                "outside of it, by flexmasks.mask and flexmasks.score, or name them."
            )
        name = _chosen(backend, call, _TRACED if must_trace else tuple(BACKENDS))
        if not (must_trace or lists or must_be_invariant or call.learns or backend in ("reference", "sdpa")):
            others = *changed((mask, offset, score, q_offset), _without_gradient), sinks
            duals = Duals.of(q, k, v, others) if call.context.has_transforms else None
            found = duals and _with_tangents(duals, constants, options, scale)
            if found:
                return found if call.with_lse else found[:1]
        by_slices = name == "reference" and (q.device.type != "cpu" or call.context.has_transforms)
        if by_slices or must_trace:
            return (torch.empty(_TRACED.index(name), 0),)
        plans = (encoded.with_numbers(_constant) if name in _COMPILED else encoded).plans(q, k, lists)
        kernel = BACKENDS[name].kernel(replace(call, mask=plans.mask, score=plans.score))
        forms = kernel.forms(plans)
        out, lse, _, has_sinks, _ = Ready(kernel, forms)(q, k, v, sinks)
        if sinks is not None and not has_sinks:
            starts = kernel.starts(forms) if must_be_invariant else None
            out, lse = with_sinks(out, cast(Tensor, lse), sinks, True, by_operator=must_be_invariant, starts=starts)
    return (out, cast(Tensor, lse)) if call.with_lse else (out,)


def _with_tangents(
    duals: Duals, constants: str, options: tuple[Any, ...], scale: float | None
) -> tuple[Tensor, ...] | None:
    """Return output and lse of a call in forward mode, or None if torch must trace it."""
    mask, offset, score, q_offset, sinks = duals.others
    *kept, _ = value_of_text(constants)
    _, block_size, sizes, *_ = kept
    with compat.outside_forward_derivatives():
        given = text_of_constants((*kept, True)), sinks, (), options, mask, offset, score, q_offset
        results = _attend(*given, *duals.qkv, scale)
        if results[0].ndim != duals.qkv[0].ndim:
            return None
        encoded = Encoded(mask, offset, block_size, sizes, score, q_offset)
        of_results = TangentsInGraph.apply(encoded, scale, *duals.qkv, *duals.tangents, *results)
    return with_tangents(results, of_results)


def _may_learn(score: Score | None, of_score: Any, backend: str) -> bool:
    if isinstance(of_score, Flat):
        return any(isinstance(x, Tensor) and x.requires_grad for x in of_score.leaves)
    # What functions captured is not known. A backend that is named gives the gradients, or torch raises.
    return score is not None and (score._learns() or backend == "auto")


def _without_pairs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, score: Score | None, size: Size, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    if mask is not None:
        mask._checked(size)
    tensors = [] if score is None else [t for t in score.params.values() if isinstance(t, Tensor) and t.requires_grad]
    out, lse = plain.attend_nothing(q, k, v, tensors)
    return out, lse if with_lse else None


def _in_plain_operations(
    q: Tensor, k: Tensor, v: Tensor, request: Request, mask: Mask | None, score: Score | None, size: Size
) -> tuple[Tensor, Tensor | None]:
    """Return the result of a call in operations that ONNX has."""
    q_offset = cast(int | Tensor, request.q_offset)
    score_mod = None if score is None else shifted_score(score._bind(score._resolve(size)), q_offset)
    if request.block_mask is not None:
        mask_mod = request.block_mask.mask_mod
    else:
        mask = cast(Mask, mask)
        mask_mod = shifted_mask(mask._bind(mask._resolve(size)), q_offset)
    out, lse = plain.attend_at_once(q, k, v, score_mod, mask_mod, request.block_mask, request.scale)
    return out, lse if request.return_lse else None


def _of_block_mask(block_mask: compat.BlockMask, q: Tensor) -> Encoded:
    source = block_mask.source if isinstance(block_mask, PortableBlockMask) else None
    size = compat.constants(tuple(block_mask.BLOCK_SIZE))
    if source is not None and source.bits is not None:
        return Encoded((BITS, *source.bits), 0, size)
    encoded = None if source is None else encode_if_readable(source.mask, q.device)
    if source is None or encoded is None:
        return Encoded(UNKNOWN, 0, size)
    offset = in_graph_offset(source.q_offset, q)
    return Encoded(encoded, offset, size, compat.constants((source.batch, source.heads)))


def _as_graphs_read(block_mask: compat.BlockMask) -> compat.BlockMask:
    """A BlockMask of blocks alone with a function that shows them, and no tensor as two lists, as Kandinsky has it.

    Graphs that run without a kernel ask the function alone. torch's compiler for CPUs fails with a constant function,
    and with one tensor for two arguments of a kernel.
    """
    if block_mask.mask_mod is not noop_mask:
        return block_mask
    numbers, indices, full_numbers, full_indices, *others = lists_of(block_mask)
    lists = numbers, indices, full_numbers, separate(indices) if full_indices is indices else full_indices, *others
    return made_of(block_mask.seq_lengths, lists, block_mask.BLOCK_SIZE, function_of_lists(block_mask))


# --- the choice of a backend ---


def _constant(part: Any) -> Any:
    """Return a symbolic number as a constant of the compiled code, and anything else as it is."""
    if isinstance(part, torch.SymFloat):
        return float(part)
    return int(part) if isinstance(part, torch.SymInt) else part


def _without_gradient(part: Any) -> Any:
    """Return a tensor of a mask, which gives it no gradient, as one that wants none, and anything else as it is."""
    return part.detach() if isinstance(part, Tensor) and part.requires_grad else part


def _chosen(backend: str, call: Call, names: tuple[str, ...]) -> str:
    """Return the name of the backend that runs a call, one of `names`."""
    if call.score is not None and not call.score.opaque:
        with compat.without_modes():
            note_constants(*over_zeros(call.score.value, call.score.size))
    reason = None if backend == "auto" else why_not(backend, call)
    if backend not in ("auto", *names):
        reason = reason or "only torch can read its functions, for flex and the reference"
    if call.context.is_invariant and reason is None:
        backend = only_choice(call, backend)
    if reason is None:
        name = next(b.name for b in choose(call)[0] if b.name in names) if backend == "auto" else backend
        reason = forms.kills(call) if name in _COMPILED else None
        if reason is None:
            warn_of_order(name, call)
            if backend == "auto":
                warn_of_dtypes(name, call)
            return name
        if backend == "auto":
            _log.warning('inside torch.compile, backend "reference" takes the place of %r: %s', name, reason)
            return "reference"
    return fail(f"backend {backend!r} cannot run this call inside torch.compile: {reason}.")


def _call_of(
    plans: Plans,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    options: dict[str, Any],
    facts: Any,
    must_be_invariant: bool = False,
) -> Call:
    """Return a call that backends can be asked about while torch traces."""
    q_offset, (needs_grad, learns, with_lse) = plans.encoded.q_offset, facts
    return Call(
        q=Operand.of(q),
        k=Operand.of(k),
        v=Operand.of(v),
        mask=plans.mask,
        score=plans.score,
        q_offset=q_offset if isinstance(q_offset, int) else None,
        scale=scale,
        with_lse=with_lse,
        kernel_options=options or None,
        needs_grad=needs_grad,
        learns=learns,
        context=Context.now(q.device)._replace(is_compiling=True, is_invariant=must_be_invariant),
    )


# --- calls that torch traces ---


def _run_traced(
    name: str,
    request: Request,
    mask: Mask | None,
    score: Score | None,
    block_mask: compat.BlockMask | None,
    encoded: Encoded,
    size: Size,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    needs_grad: bool,
) -> Result:
    """Run a call with a function that only torch's tracing can read."""
    q_offset, is_compiled = cast(int | Tensor, request.q_offset), name != "reference"
    score_mod = None if score is None else shifted_score(*_bound(score, size, q_offset, is_compiled))
    if not is_compiled:
        out, lse = _by_slices(q, k, v, request.scale, encoded, block_mask, score_mod)
        return Result(out, lse if request.return_lse else None)
    if block_mask is None:
        mask_mod = shifted_mask(*_bound(cast(Mask, mask), size, q_offset, is_compiled))
        block_size = flex_flash.block_size(q.shape[3], q.device) if name == "flex_flash" else None
        block_size = block_size or block_size_for(size)
        lists = planned_blocks(encoded.mask, q_offset, q.detach(), k.detach(), block_size)
        block_mask = made_of((size.q_len, size.kv_len), lists, block_size, mask_mod)
    backend = "FLASH" if name == "flex_flash" else None
    how = request.scale, request.return_lse, needs_grad, request.kernel_options, block_mask.BLOCK_SIZE
    kernel = flex.KernelInGraph(backend, *how, compat.flex_attention)
    return Result(*kernel(q, k, v, None, BlocksAndScore(block_mask, score_mod)))


def _bound(
    value: Modifier, size: Size, offset: int | Tensor, is_compiled: bool
) -> tuple[Callable[..., Tensor], int | Tensor]:
    """Return the bound function of a mask or score, and where queries start."""
    value = changed(value, _constant_float)
    parts = value, value._resolve(size), offset
    value, resolved, offset = changed(parts, _held) if is_compiled else parts
    heads = size.heads if compiles_by_triton(size.device) else None
    return value._bind(resolved, heads, for_kernels=True), offset


def _constant_float(part: Any) -> Any:
    """Return a float as a constant, since kernels of flex_attention take no symbolic floats, anything else as it is."""
    return compat.as_constant(part) if isinstance(part, float) else part


def _held(part: Any) -> Any:
    return flex.held_by_kernels(part) if isinstance(part, Tensor) else part


def _by_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    encoded: Encoded,
    block_mask: compat.BlockMask | None,
    score_mod: Callable[..., Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return output and lse by slices, which torch traces; without a block mask they reach all keys."""
    of_mask, q_offset, of_score = tuple(encoded[:4]), encoded.q_offset, encoded.score
    scored: Callable[..., Tensor] | None = None if score_mod is None else functools.partial(over_visible, score_mod)
    like_q, like_k = q.detach(), k.detach()
    # torch.compile can trace vmap only where no checkpoint is around, so functions run behind its back if they can.
    if encoded.mask == UNKNOWN:
        check_can_be_asked()
        visible = over_indices(cast(compat.BlockMask, block_mask).mask_mod)
    else:

        def visible(*indices: Tensor) -> Tensor:
            return cast(Tensor, _masked(of_mask, like_q, like_k, *indices))

    if isinstance(of_score, Flat):

        def scored(visible: Tensor | None, scores: Tensor, *indices: Tensor) -> Tensor:
            return cast(Tensor, _scored(of_score, q_offset, like_q, like_k, visible, scores, *indices))

    blocks = None if block_mask is None else Visible.of(block_mask)
    return attend_by_slices(q, k, v, score_mod, blocks, scale, OverIndices(visible, scored))


@in_graph
def _masked(of_mask: Any, q: Tensor, k: Tensor, *indices: Tensor) -> Tensor:
    with torch.no_grad():
        return over_indices(Encoded(*of_mask).plans(q, k).mask.bound())(*indices)


@in_graph
def _scored(
    of_score: Any,
    q_offset: int | Tensor,
    q: Tensor,
    k: Tensor,
    visible: Tensor | None,
    scores: Tensor,
    *indices: Tensor,
) -> Tensor:
    score_mod = Encoded(UNKNOWN, score=of_score, q_offset=q_offset).plans(q, k).score.mod()
    return over_visible(score_mod, visible, scores, *indices)
