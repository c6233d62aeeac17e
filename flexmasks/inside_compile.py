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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from flexmasks import compat
from flexmasks.backends import (
    flex,
    flex_flash,
    flex_kernels,
    forms,
    plain,
    reference,
    short_gpu,
    tiles_operator,
)
from flexmasks.backends.call import Call, Operand, Plans, Ready, Result, exports_any_length
from flexmasks.backends.slices import OverIndices
from flexmasks.backends.table import BACKENDS, choose, warn_of_dtypes, warn_of_order, why_not
from flexmasks.backends.traced_blocks import (
    aligned_traced,
    bits_of_function,
    check_can_be_asked,
    check_numbers,
    encode_mask,
    errors_logged,
    in_graph_offset,
    of_bits,
    planned_blocks,
    reads_batch_and_heads,
)
from flexmasks.blocks.bits import BITS, can_be_bits
from flexmasks.blocks.build import lists_of_blocks
from flexmasks.blocks.elements import over_indices, over_visible
from flexmasks.blocks.lists import as_kernels_read, grid, lists_of, made_of, of_block_mask
from flexmasks.context import Context
from flexmasks.graphs import Flat, in_graph, text_of_constants, value_of_text
from flexmasks.kernels.operators import separate
from flexmasks.kernels.sinks import with_sinks
from flexmasks.plans.bounds import unread
from flexmasks.plans.checks import fail
from flexmasks.plans.data import reading_bits
from flexmasks.plans.portable import PortableBlockMask
from flexmasks.plans.sizes import block_size_for, shifted_mask, shifted_score
from flexmasks.plans.traced import UNKNOWN, TracedMask, TracedScore, size_of, without_traced
from flexmasks.request import Request, checked
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.encoding import decode, encode_if_readable, note_constants
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, Modifier, ResolvedInner, Score

_log = logging.getLogger("flexmasks")
_NAMES = list(BACKENDS)
_DIRECT = "fa4", "sdpa"  # backends whose kernels torch traces
_COMPILED = ("flex_flash", "flex")  # backends that compile the functions of mask and score
_MUST_TRACE = ()  # no output has this shape
_MOST_BITS = 1 << 31  # of a mask that is looked at at each run
_BITS = "bits"  # begins an encoded mask whose bits are known, see `Described.visible`


class _Encoded(NamedTuple):
    """The mask of a call, or of given blocks, as functions of a graph get it."""

    mask: Any  # what `encode` returns, the bits of blocks behind _BITS, or UNKNOWN
    offset: int | Tensor  # where its queries start
    block_size: Any = None  # of given blocks
    sizes: tuple[int, ...] = ()  # the batch size and the number of heads that given blocks see


def run(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Result:
    """Run a call by operations that torch can trace. The result may or may not have the call's sinks, see Result."""
    size = checked(q, k, v, request)
    mask, score = from_arguments(request.mask, request.score, request.params)
    if 0 in q.shape or 0 in k.shape:
        q_offset = request.q_offset if isinstance(request.q_offset, Tensor) else 0
        return Result(*_without_pairs(q, k, v, mask, score, unread(size, q_offset), request.return_lse))
    block_mask: compat.BlockMask | None = None
    encoded: Any = UNKNOWN
    if request.block_mask is not None:
        block_mask = as_kernels_read(request.block_mask)
    else:
        mask = cast(Mask, from_arguments("full", None, {})[0] if mask is None else mask)
        encoded = encode_mask(mask, q.device)
    encoded_score: Any = encode_if_readable(score, q.device, size.dtype) or UNKNOWN
    q_offset = aligned_traced(q, k, request.q_offset, encoded, score, encoded_score, request.block_mask is not None)
    request = request._replace(q_offset=q_offset)
    if compat.in_onnx_export():
        return Result(*_in_plain_operations(q, k, v, request, mask, score, unread(size, q_offset)))
    of_mask = _Encoded(encoded, q_offset) if request.block_mask is None else _data_of_block_mask(request.block_mask, q)
    bits: tuple[Tensor, ...] | None = None
    if isinstance(of_mask.mask, Flat) and "(False, " in of_mask.mask.text:  # perhaps a function that a user wrote
        bits = _bits_of(of_mask.mask, of_mask.offset, of_mask.block_size, of_mask.sizes, q.detach(), k.detach())
    elif of_mask.mask == UNKNOWN and block_mask is not None:
        check_numbers(block_mask.mask_mod, q.device)
    elif of_mask.mask == UNKNOWN:
        of_size, block_size = unread(size, q_offset), block_size_for(size)
        bits = bits_of_function("attention", cast(Mask, mask), of_size, q_offset, block_size)
    if bits is not None and bits[0].shape != _MUST_TRACE:
        words, table, *lists_of_bits = bits
        block_size = of_mask.block_size or compat.constants(block_size_for(size))
        of_mask = _Encoded((_BITS, words, table), 0, block_size)
        lists = lists_of_bits if block_mask is None else lists_of(block_mask)
        block_mask = of_bits((q.shape[2], k.shape[2]), (words, table, *lists), block_size)
    facts = _facts_of(q, k, v, request, score, encoded_score)
    scale = compat.constants(request.scale)
    arguments = of_mask, encoded_score, q_offset, q, k, v, scale, facts
    if of_mask.mask != UNKNOWN and (score is None or encoded_score != UNKNOWN) and compat.IS_TESTED:
        lists = () if block_mask is None else lists_of(block_mask)
        options = compat.constants(tuple((request.kernel_options or {}).items()))
        constants = text_of_constants((request.backend_name, of_mask.block_size, of_mask.sizes, *facts))
        given = of_mask.mask, of_mask.offset, encoded_score, q_offset, q, k, v, scale
        results = _attend(constants, request.sink_logits, lists, options, *given)
        if results[0].shape != _MUST_TRACE:
            lse = results[1] if request.return_lse else None
            return Result(results[0], lse, has_sinks=request.sink_logits is not None)
    return _run_traced(request, mask, score, block_mask, size, *arguments)


@functools.lru_cache(maxsize=256)
def _log_once(message: str) -> None:
    _log.warning(message)


@in_graph
def _bits_of(
    encoded: Any, offset: int | Tensor, block_size: tuple[int, int] | None, sizes: tuple[int, ...], q: Tensor, k: Tensor
) -> tuple[Tensor, ...]:
    """Return the bits of a mask that the user's compiler may compute otherwise than Python does, their table, and the
    lists of blocks; an operator computes them at each run. Of any other mask the result is one tensor of no dimensions.
    """
    with errors_logged():
        encoded = _changed(encoded, _without_gradient)
        mask = cast(Mask, decode("mask", _changed(encoded, compat.size_hint)))
        size = unread(size_of(q, k, sizes), offset)
        reason = forms.why_bits_in_trace(TracedMask(mask, size, offset, None), q, k)
        if not reason:
            return (torch.empty(()),)
        height, width = block_size or block_size_for(size)
        reads_b, reads_h = reads_batch_and_heads(mask)
        of_batch = size.batch if reads_b or isinstance(offset, Tensor) else 1
        shape = of_batch, size.heads if reads_h else 1, *grid((size.q_len, size.kv_len), (height, width))
        why = f"torch.compile may compute the mask {mask!r} otherwise than Python does: {reason}"
        if not can_be_bits((height, width)) or math.prod(map(compat.size_hint, shape)) * height * width > _MOST_BITS:
            fail(
                f"{why}; write it with whole numbers that fit 32 bits, and one index for each tensor, or make the "
                "blocks outside, with flexmasks.block_mask(..., as_data=True), and pass them as block_mask."
            )
        _log_once(f"{why}. Its bits are computed by a look at all pairs, at each run.")
        described = tiles_operator.Described(("mask", encoded, offset, sizes), None, 0, (height, width), None)
        words, table, possible, full = tiles_operator.bits_in_graph(q, k, (*shape, height, width // BITS), described)
        lists = lists_of_blocks(possible, full)
        return words, table, *(map(separate, lists) if q.device.type == "cpu" else lists)


@in_graph
def _attend(
    constants: str,
    sinks: Tensor | None,
    lists: tuple[Tensor, ...],
    options: tuple[Any, ...],
    encoded: Any,
    offset: int | Tensor,
    encoded_score: Any,
    q_offset: int | Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Return output, and lse if it is wanted, of a call whose functions are encoded.

    The result is a tensor of the shape _MUST_TRACE if torch must trace the call: by slices, which are checkpointed.

    constants: the text of the backend's name, the size of given blocks, the sizes of the mask, and `_Facts`.
    sinks: logits that are folded into both.
    lists: those of given blocks.
    options: the items of kernel_options.
    """
    with errors_logged():
        backend, block_size, sizes, *facts = value_of_text(constants)
        of_mask = _Encoded(_changed(encoded, _without_gradient), offset, block_size, sizes)
        if not lists and exports_any_length(q, k):
            _check_at_example(of_mask.mask, unread(size_of(q, k), q_offset))
        name = _chosen_for(backend, of_mask, encoded_score, q_offset, q, k, v, scale, facts)
        if name in _COMPILED:
            of_mask = of_mask._replace(mask=_changed(of_mask.mask, _constant))
            encoded_score = _changed(encoded_score, _constant)
        call = _call_of(of_mask, encoded_score, q_offset, q, k, v, scale, facts)
        if name in _DIRECT:
            kernel = BACKENDS[name].kernel(call)
            out, lse, _, has_sinks = Ready(kernel, kernel.forms(Plans(call.mask, call.score)))(q, k, v, sinks)
            sinks = None if has_sinks else sinks
        elif name == "short":
            out, lse = short_gpu.attend_traced(call, q, k, v)
        elif name == "reference":
            if q.device.type != "cpu" or call.context.has_transforms:
                return (torch.empty(_MUST_TRACE),)
            out, lse = _by_tiles(call, (q, k, v), lists, of_mask, encoded_score, q_offset)
        else:
            mask_mod, score_mod = _functions_of(call, of_mask, size_of(q, k), name)
            block_mask = _block_mask_of(q, k, call.mask, lists, of_mask, name, mask_mod)
            if not call.needs_grad:
                q, k, v = q.detach(), k.detach(), v.detach()
            how = call.scale, dict(options), call.with_lse, block_mask, score_mod
            out, lse = _by_flex(flex.attend_in_graph, name, q, k, v, *how)
        if sinks is not None:
            out, lse = with_sinks(out, cast(Tensor, lse), sinks, return_lse=True)
    return (out, cast(Tensor, lse)) if call.with_lse else (out,)


def _block_mask_of(
    q: Tensor,
    k: Tensor,
    mask: Any,
    lists: tuple[Tensor, ...],
    of_mask: _Encoded,
    name: str,
    mask_mod: Callable[..., Tensor],
) -> compat.BlockMask:
    if not lists:
        return _block_mask(of_mask.mask, of_mask.offset, q, k, mask.size, name, mask_mod)
    return made_of((q.shape[2], k.shape[2]), lists, of_mask.block_size, mask_mod)


def _functions_of(
    call: Call, of_mask: _Encoded, size: Size, name: str
) -> tuple[Callable[..., Tensor], Callable[..., Tensor] | None]:
    """Return the functions of mask and score, or None, as a backend computes them."""
    mods: list[Callable[..., Tensor]] = []
    for part in call.parts:
        if part is call.mask and of_mask.mask[0] == _BITS:
            words, table = _held(of_mask.mask[1:], name)
            mods.append(reading_bits(words, table, of_mask.block_size))
        else:
            bound = _bound(part.value, part.value.resolve(part.size), size, name)
            shifted = shifted_mask if part is call.mask else shifted_score
            mods.append(shifted(bound, _held(part.offset, name)))
    return mods[0], None if call.score is None else mods[1]


def _by_tiles(
    call: Call,
    qkv: tuple[Tensor, Tensor, Tensor],
    lists: tuple[Tensor, ...],
    of_mask: _Encoded,
    encoded_score: Any,
    q_offset: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return output and lse of the reference, as one operator.

    It runs on the CPU, where reading the values of tensors waits for nothing, and knows no transforms. Blocks in a
    program for any length would tie it to a range of lengths.
    """
    block_size = 1, 1
    blocks: tuple[Tensor, ...] = ()
    if lists or not compat.is_exporting():
        block_mask = _block_mask_of(*qkv[:2], call.mask, lists, of_mask, "reference", noop_mask)
        block_size, blocks = block_mask.BLOCK_SIZE, of_block_mask(block_mask)
    visible = of_mask.mask if of_mask.mask[0] == _BITS else ("mask", of_mask.mask, of_mask.offset, of_mask.sizes)
    score = None if call.score is None else encoded_score
    described = tiles_operator.Described(visible, score, q_offset, block_size, call.scale)
    return tiles_operator.attend(*qkv, blocks, described)


def _run_traced(
    request: Request,
    mask: Mask | None,
    score: Score | None,
    block_mask: compat.BlockMask | None,
    size: Size,
    *arguments: Any,
) -> Result:
    """Run a call with a function that only torch's tracing can read."""
    of_mask, encoded_score, q_offset, q, k, v, _, facts = arguments
    name, size = _NAMES[_chosen(request.backend_name, *arguments).shape[0]], unread(size, q_offset)
    mask, score = _changed(mask, _constant_float), _changed(score, _constant_float)
    if block_mask is None:
        mask = cast(Mask, mask)
        mask_mod = shifted_mask(_bound(mask, mask.resolve(size), size, name), _held(q_offset, name))
        if name != "reference":
            block_mask = _block_mask(of_mask.mask, q_offset, q, k, size, name, mask_mod)
    else:
        mask_mod = block_mask.mask_mod
    score_mod = None
    if score is not None:
        bound = _bound(score, score.resolve(size), size, name)
        score_mod = shifted_score(bound, _held(q_offset, name))
    if name == "reference":
        out, lse = _by_traced_reference(q, k, v, request, of_mask, encoded_score, block_mask, mask_mod, score_mod)
        return Result(out, lse if request.return_lse else None)
    if not facts.needs_grad:
        q, k, v = q.detach(), k.detach(), v.detach()
    given = request.scale, request.kernel_options, request.return_lse
    attend = compat.flex_attention
    return Result(*_by_flex(attend, name, q, k, v, *given, cast(compat.BlockMask, block_mask), score_mod))


def _facts_of(q: Tensor, k: Tensor, v: Tensor, request: Request, score: Score | None, encoded_score: Any) -> _Facts:
    learns = needs_grad = False
    if torch.is_grad_enabled():
        if isinstance(encoded_score, Flat):
            learns = any(isinstance(x, Tensor) and x.requires_grad for x in encoded_score.leaves)
        elif score is not None:
            # What functions captured is not known. A backend that is named gives the gradients, or torch raises.
            learns = score.learns() or request.backend == "auto"
        needs_grad = learns or q.requires_grad or k.requires_grad or v.requires_grad
    return _Facts(score is not None, needs_grad, learns, request.return_lse, bool(request.kernel_options))


def _block_mask(
    encoded: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, size: Size, name: str, mask_mod: Callable[..., Tensor]
) -> compat.BlockMask:
    block_size = (flex_flash.block_size(q.shape[3], q.device) if name == "flex_flash" else None) or block_size_for(size)
    lists = planned_blocks(encoded, q_offset, q.detach(), k.detach(), block_size)
    return made_of((size.q_len, size.kv_len), lists, block_size, mask_mod)


def _by_flex(
    attend: Callable[..., Any],
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    kernel_options: dict[str, Any] | None,
    with_lse: bool,
    block_mask: compat.BlockMask,
    score_mod: Callable[..., Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse, or None, of torch's flex_attention.

    attend: that function, or one like it.
    """
    on_cpu = q.device.type == "cpu"
    if on_cpu:  # torch's CPU kernel fails for views of tensors with other dimensions
        q, k, scale = flex_kernels.widened(q, k, scale)
        q, k, v = separate(q), separate(k), separate(v)
    backend = "FLASH" if name == "flex_flash" else None
    options = flex.options(q, k, v, backend, kernel_options, block_mask.BLOCK_SIZE)
    out, lse = flex_kernels.flex_by(attend, q, k, v, score_mod, block_mask, scale, options, with_lse)
    return separate(out) if on_cpu else out, lse


def _without_pairs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, score: Score | None, size: Size, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    if mask is not None:
        mask.checked(size)
    tensors = [] if score is None else [t for t in score.params.values() if isinstance(t, Tensor) and t.requires_grad]
    out, lse = plain.attend_nothing(q, k, v, tensors)
    return out, lse if with_lse else None


def _in_plain_operations(
    q: Tensor, k: Tensor, v: Tensor, request: Request, mask: Mask | None, score: Score | None, size: Size
) -> tuple[Tensor, Tensor | None]:
    """Return the result of a call in operations that ONNX has."""
    q_offset = cast(int | Tensor, request.q_offset)
    score_mod = None if score is None else shifted_score(score.bind(score.resolve(size)), q_offset)
    if request.block_mask is not None:
        mask_mod = request.block_mask.mask_mod
    else:
        mask = cast(Mask, mask)
        mask_mod = shifted_mask(mask.bind(mask.resolve(size)), q_offset)
    out, lse = plain.attend_at_once(q, k, v, score_mod, mask_mod, request.block_mask, request.scale)
    return out, lse if request.return_lse else None


def _data_of_block_mask(block_mask: compat.BlockMask, q: Tensor) -> _Encoded:
    source = block_mask.source if isinstance(block_mask, PortableBlockMask) else None
    size = compat.constants(tuple(block_mask.BLOCK_SIZE))
    if source is not None and source.bits is not None:
        return _Encoded((_BITS, *source.bits), 0, size)
    encoded = None if source is None else encode_if_readable(source.mask, q.device)
    if source is None or encoded is None:
        return _Encoded(UNKNOWN, 0, size)
    offset = in_graph_offset(source.q_offset, q)
    return _Encoded(encoded, offset, size, compat.constants((source.batch, source.heads)))


# --- the choice of a backend ---


class _Facts(NamedTuple):
    """Properties of a call that its tensors do not show while torch traces."""

    has_score: bool
    needs_grad: bool
    learns: bool  # or may learn
    with_lse: bool
    has_options: bool


@in_graph
def _chosen(backend: str, of_mask: Sequence[Any], *arguments: Any) -> Tensor:
    """Return the backend's place in _NAMES as a tensor's length.

    torch takes only tensors from functions that it does not trace, and knows their lengths while it traces. The choice
    depends on kinds and shapes alone. The comparisons of symbolic lengths made here become guards.
    """
    with errors_logged():
        name = _chosen_for(backend, _Encoded(*of_mask), *arguments)  # of a graph it is a plain tuple
        return torch.empty(_NAMES.index(name), 0)


def _check_at_example(encoded: Any, size: Size) -> None:
    """Raise the errors of a mask's parameters at the lengths of the example. No symbolic lengths are compared."""
    with compat.without_modes():
        alone, known = without_traced(cast(Mask, decode("mask", _changed(encoded, compat.size_hint))), size)
        alone.resolve(known)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return something encoded, a mask, a score or what `resolve` returned, with all parts changed; torch traces it."""
    if isinstance(value, Modifier):
        return type(value)(value.definition, {n: _changed(v, change) for n, v in value.params.items()})
    if isinstance(value, ResolvedInner):
        return ResolvedInner(value.source, _changed(value.resolved, change))
    if isinstance(value, dict):
        return {n: _changed(v, change) for n, v in value.items()}
    return tuple([_changed(v, change) for v in value]) if isinstance(value, tuple | list) else change(value)


def _constant(part: Any) -> Any:
    """Return a symbolic number as a constant of the compiled code, and anything else as it is."""
    if isinstance(part, torch.SymFloat):
        return float(part)
    return int(part) if isinstance(part, torch.SymInt) else part


def _without_gradient(part: Any) -> Any:
    """Return a tensor of a mask, which gives it no gradient, as one that wants none, and anything else as it is."""
    return part.detach() if isinstance(part, Tensor) and part.requires_grad else part


def _chosen_for(backend: str, of_mask: _Encoded, encoded_score: Any, *arguments: Any) -> str:
    """Return `_choice` for a call with the present values of the numbers that its functions captured."""
    of_mask = of_mask._replace(mask=_changed(of_mask.mask, compat.size_hint))
    call = _call_of(of_mask, _changed(encoded_score, compat.size_hint), *arguments)
    if isinstance(call.score, TracedScore) and call.score.value is not None:
        with compat.without_modes():
            note_constants(*without_traced(call.score.value, call.score.size))
    return _choice(backend, call)


def _choice(backend: str, call: Call) -> str:
    """Return the backend that runs a call."""
    reason = None if backend == "auto" else why_not(backend, call)
    if reason is None:
        name = choose(call)[0][0].name if backend == "auto" else backend
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
    of_mask: _Encoded,
    encoded_score: Any,
    q_offset: int | Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    facts: Sequence[bool],
) -> Call:
    """Return a call that backends can be asked about while torch traces."""
    has_score, needs_grad, learns, with_lse, has_options = facts
    encoded, offset, block_size, sizes = of_mask
    size, score_size = unread(size_of(q, k, sizes), offset), unread(size_of(q, k), q_offset)
    mask = None if encoded == UNKNOWN or encoded[0] == _BITS else cast(Mask, decode("mask", encoded))
    score = None if encoded_score == UNKNOWN else cast(Score, decode("score", encoded_score))
    key = "traced", encoded[:1] if mask is None else encoded[:2]
    return Call(
        q=Operand.of(q),
        k=Operand.of(k),
        v=Operand.of(v),
        mask=TracedMask(mask, size, offset, key, block_size, rows=q.shape[0] * q.shape[1]),
        score=TracedScore(score, score_size, q_offset, encoded_score[:2]) if has_score else None,
        q_offset=q_offset if isinstance(q_offset, int) else None,
        scale=scale,
        with_lse=with_lse,
        kernel_options={"given": True} if has_options else None,
        needs_grad=needs_grad,
        learns=learns,
        context=Context.now(q.device)._replace(is_compiling=True),
    )


# --- the plan of a mask ---


def _constant_float(part: Any) -> Any:
    """Return a float as a constant, since kernels of flex_attention take no symbolic floats, anything else as it is."""
    return compat.as_constant(part) if isinstance(part, float) else part


def _bound(value: Modifier, resolved: Any, size: Size, backend: str) -> Callable[..., Tensor]:
    """Return the bound function of a mask or score, given what `resolve` returned."""
    held = cast(Modifier, _held(value, backend))
    heads = size.heads if size.device.type == "cuda" else None
    return held.bind(_held(resolved, backend), heads, for_kernels=True)


def _held(value: Any, backend: str) -> Any:
    """Return a value whose tensors torch's kernels can capture.

    torch's CPU kernel fails if it captures a tensor that the same graph computes, other than by a custom operator. Its
    kernels for GPUs take a constant tensor in which the graph has set elements (`x = torch.zeros(n); x[i] = 1`) for the
    constant, without the elements: seen with torch 2.11. They read a view as it is.
    """
    return _changed(value, _separate) if backend in _COMPILED else value


def _separate(part: Any) -> Any:
    if not isinstance(part, Tensor):
        return part
    return separate(part.detach()) if part.device.type == "cpu" else part.unsqueeze(0).select(0, 0)


def _by_traced_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    request: Request,
    of_mask: _Encoded,
    encoded_score: Any,
    block_mask: compat.BlockMask | None,
    mask_mod: Callable[..., Tensor],
    score_mod: Callable[..., Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return output and lse by slices, which torch traces; without a block mask they reach all keys."""
    (encoded, offset, _, sizes), q_offset = of_mask, cast(int | Tensor, request.q_offset)
    visible = over_indices(mask_mod)
    scored: Callable[..., Tensor] | None = None if score_mod is None else functools.partial(over_visible, score_mod)
    like_q, like_k = q.detach(), k.detach()
    # torch.compile can trace vmap only where no checkpoint is around, so functions run behind its back if they can.
    if encoded == UNKNOWN:
        check_can_be_asked()
    if isinstance(encoded, Flat):

        def visible(*indices: Tensor) -> Tensor:
            return cast(Tensor, _masked((encoded, offset, sizes), like_q, like_k, *indices))

    if isinstance(encoded_score, Flat):

        def scored(visible: Tensor | None, scores: Tensor, *indices: Tensor) -> Tensor:
            return cast(Tensor, _scored(encoded_score, q_offset, like_q, like_k, visible, scores, *indices))

    return reference.attend(q, k, v, score_mod, block_mask, request.scale, OverIndices(visible, scored))


@in_graph
def _masked(of_mask: Any, q: Tensor, k: Tensor, *indices: Tensor) -> Tensor:
    with torch.no_grad():
        call = tiles_operator.Described(("mask", *of_mask), None, 0, (1, 1), None)
        return over_indices(call.mask_mod(q, k))(*indices)


@in_graph
def _scored(
    encoded: Any,
    q_offset: int | Tensor,
    q: Tensor,
    k: Tensor,
    visible: Tensor | None,
    scores: Tensor,
    *indices: Tensor,
) -> Tensor:
    score_mod = tiles_operator.Described((), encoded, q_offset, (1, 1), None).score_mod(q, k)
    return over_visible(cast(Callable[..., Tensor], score_mod), visible, scores, *indices)
