"""A call inside a user's own torch.compile.

torch traces these functions into the user's graph. It cannot trace how ranges are computed, so `_planned_blocks` does
that behind its back, in plain Python: it gets the mask as data, names and numbers and tensors, and what it does with
the tensors becomes part of the user's graph too. So blocks are planned at each run, on the device, from the tensors of
that run.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import empty, fa4, flash, flex, flex_kernels, forms, plain, reference, sdpa, tiles_operator
from flexmasks.backends.call import Call, Result, exports_any_length
from flexmasks.backends.rewritten import WAYS_IN_TRACE
from flexmasks.backends.slices import OverIndices
from flexmasks.backends.table import BACKENDS, choose, warn_of_order, why_not
from flexmasks.blocks.elements import over_indices
from flexmasks.blocks.lists import of_block_mask, widened
from flexmasks.graphs import Flat, in_graph
from flexmasks.plans.bounds import MaskKind, plan_bounds, unread
from flexmasks.plans.checks import fail
from flexmasks.plans.naming import naming
from flexmasks.plans.portable import OfData, OfMask, PortableBlockMask
from flexmasks.plans.shifted import shifted_mask, shifted_score
from flexmasks.plans.sizes import block_size_for
from flexmasks.plans.traced import TracedMask, TracedScore, without_traced
from flexmasks.request import Request, checked
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.as_data import data_of, is_readable, of_data
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, Modifier, ResolvedInner, Score

_log = logging.getLogger("flexmasks")
_NAMES = list(BACKENDS)
# Backends that torch traces through: what makes a call without q, k and v of a Call.
_DIRECT: dict[str, Callable[[Call], Callable[..., tuple[Tensor, Tensor | None]]]] = {
    "fa4": fa4.DirectCall.of,
    "sdpa": sdpa.FusedCall.of,
}
_COMPILED = ("flash", "triton", "cpu")  # backends that compile the functions of mask and score
_WAYS = tuple(WAYS_IN_TRACE.values())
_REASONS: list[str] = []  # reasons of refused backends, for errors
_UNKNOWN = ("unknown", "")  # stands for a score that is not given, and for functions that torch must trace


def run(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Result:
    """Run a call by operations that torch can trace. The result may or may not have the call's sinks, see Result."""
    request, size = _checked(q, k, v, request)
    mask, score = map(_with_constants, from_arguments(request.mask, request.score, request.params))
    if 0 in q.shape or 0 in k.shape:
        return Result(*_without_pairs(q, k, v, mask, score, size, request.return_lse))
    if plain.in_onnx_export():
        return Result(*_in_plain_operations(q, k, v, request, mask, score, size))
    q_offset, resolved = cast(int | Tensor, request.q_offset), None
    block_mask = None if request.block_mask is None else widened(request.block_mask)
    if block_mask is not None:
        of_mask = *_data_of_block_mask(block_mask, q.device), compat.constants(tuple(block_mask.BLOCK_SIZE))
    else:
        mask = cast(Mask, from_arguments("full", None, {})[0] if mask is None else mask)
        if not exports_any_length(q, k):
            # Raises errors of parameters, which torch would not show if they came later. In a program for any length
            # its comparisons would bind the lengths; `_chosen` raises those of the example.
            resolved = mask.resolve(size)
        of_mask = data_of(mask, q.device), q_offset, None
    score_data, facts = _data_of_score(score, q.device), _facts_of(q, k, v, request, score)
    arguments = of_mask, score_data, q_offset, q, k, v, compat.constants(request.scale), tuple(facts)
    place, way_of_mask, way_of_score, _ = _chosen(request.backend, *arguments).shape
    if place >= len(_NAMES):
        fail(f"backend {request.backend!r} cannot run this call inside torch.compile: {_reason(place)}.")
    name = _NAMES[place]
    if name in _DIRECT:
        return _run_by_windows(name, request, *arguments)
    by_tiles = name == "reference" and block_mask is None and _runs_by_tiles(q, score, score_data)
    if by_tiles and compat.is_exporting():  # blocks in the graph would tie it to a range of lengths
        call = ("mask", of_mask[0], q_offset, ()), score_data, q_offset, (1, 1), compat.constants(request.scale)
        out, lse = _by_tiles(q, k, v, (), call)
        return Result(out, lse if request.return_lse else None)
    if block_mask is None:
        mask = cast(Mask, mask)
        bound = _bound(mask, mask.resolve(size) if resolved is None else resolved, size, name, way_of_mask)
        mask_mod = shifted_mask(bound, _held(q_offset, name))
        if name != "reference" or by_tiles:
            block_mask = _block_mask(of_mask[0], q_offset, q, k, size, name, mask_mod)
    elif way_of_mask:
        block_mask = copy.copy(block_mask)
        block_mask.mask_mod = mask_mod = _WAYS[way_of_mask - 1](block_mask.mask_mod)
    else:
        mask_mod = block_mask.mask_mod
    score_mod = None
    if score is not None:
        bound = _bound(score, score.resolve(size), size, name, way_of_score)
        score_mod = shifted_score(bound, _held(q_offset, name))
    if name == "reference":
        out, lse = _by_reference(q, k, v, request, mask, score, block_mask, mask_mod, score_mod)
        return Result(out, lse if request.return_lse else None)
    if not facts.needs_grad:
        q, k, v = q.detach(), k.detach(), v.detach()
    return Result(*_by_flex(name, q, k, v, request, cast(compat.BlockMask, block_mask), score_mod))


def _checked(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Request, Size]:
    """Check all but mask and score; a symbolic number that says where queries start becomes a tensor."""
    q_offset = cast(int | Tensor, request.q_offset)
    size = unread(checked(q, k, v, request), q_offset)
    if isinstance(q_offset, int):
        if compat.has_static_value(q_offset):
            q_offset = cast(int, compat.as_constant(q_offset))  # a guard may have fixed a symbolic number
        else:
            q_offset = torch.full((q.shape[0],), q_offset, device=q.device)  # is planned like one that changes
            size = unread(size, q_offset)
        request = request._replace(q_offset=q_offset)
    return request, size


def _facts_of(q: Tensor, k: Tensor, v: Tensor, request: Request, score: Score | None) -> _Facts:
    learns = torch.is_grad_enabled() and score is not None and score.learns()
    # The tensors that a function captures are not known here.
    may_learn = learns or (torch.is_grad_enabled() and score is not None and not is_readable(score))
    needs_grad = learns or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    return _Facts(score is not None, needs_grad, may_learn, request.return_lse, bool(request.kernel_options))


def _run_by_windows(name: str, request: Request, *arguments: Any) -> Result:
    """Run a call on a backend that takes windows; its kernel may fold in the call's sinks."""
    *_, q, k, v, _, _ = arguments
    given = request.sink_logits
    sinks = (given,) if given is not None and name == "fa4" and fa4.folds_sinks(q, k, v, given) else ()
    results = _run_directly(name, sinks, *arguments)
    return Result(results[0], results[1] if request.return_lse else None, has_sinks=len(sinks) > 0)


def _block_mask(
    data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, size: Size, name: str, mask_mod: Callable[..., Tensor]
) -> compat.BlockMask:
    block_size = (flash.block_size(q.shape[3], q.device) if name == "flash" else None) or block_size_for(size)
    lists = _planned_blocks(data, q_offset, q.detach(), k.detach(), block_size)
    lengths: Any = (size.q_len, size.kv_len)
    return compat.BlockMask(*(lengths, *lists, block_size, mask_mod))


def _by_flex(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    request: Request,
    block_mask: compat.BlockMask,
    score_mod: Callable[..., Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse, or None, of torch's flex_attention."""
    scale = request.scale
    if name == "cpu":  # torch's CPU kernel fails for views of tensors with other dimensions
        q, k, scale = flex_kernels.widened(q, k, scale)
        q, k, v = flex_kernels.separate(q), flex_kernels.separate(k), flex_kernels.separate(v)
    backend = "FLASH" if name == "flash" else None
    options = flex.options(q, k, v, backend, request.kernel_options, block_mask.BLOCK_SIZE)
    out, lse = flex_kernels.flex(q, k, v, score_mod, block_mask, scale, options, request.return_lse)
    return flex_kernels.separate(out) if name == "cpu" else out, lse


def _without_pairs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, score: Score | None, size: Size, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    if mask is not None:
        mask.checked(size)
    tensors = [] if score is None else [t for t in score.params.values() if isinstance(t, Tensor) and t.requires_grad]
    out, lse = empty.attend(q, k, v, tensors)
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
        mask = cast(Mask, from_arguments("full", None, {})[0] if mask is None else mask)
        mask_mod = shifted_mask(mask.bind(mask.resolve(size)), q_offset)
    out, lse = plain.attend(q, k, v, score_mod, mask_mod, request.scale)
    return out, lse if request.return_lse else None


def _data_of_block_mask(block_mask: compat.BlockMask, device: torch.device) -> tuple[Any, int | Tensor]:
    """Return the mask of given blocks as data, or `_UNKNOWN`, and where its queries start."""
    source = block_mask.source if isinstance(block_mask, PortableBlockMask) else None
    if not isinstance(source, OfMask) or not is_readable(source.mask):
        return _UNKNOWN, 0
    return data_of(source.mask, device), source.q_offset


def _data_of_score(score: Score | None, device: torch.device) -> Flat | tuple[str, str]:
    return _UNKNOWN if score is None or not is_readable(score) else data_of(score, device)


# --- the choice of a backend ---


class _Facts(NamedTuple):
    """Properties of a call that its tensors do not show while torch traces."""

    has_score: bool
    needs_grad: bool
    learns: bool  # or may learn
    with_lse: bool
    has_options: bool


@in_graph
def _chosen(backend: str, *arguments: Any) -> Tensor:
    """Return the backend and the ways of mask and score, as a tensor's lengths.

    The backend is a place in _NAMES, and a way is what `_bound` takes. Places behind all backends are those of reasons.
    torch takes only tensors from functions that it does not trace, and knows their lengths while it traces. The place
    and the ways depend on kinds and shapes alone. The comparisons of symbolic lengths made here become guards.
    """
    with _errors_logged():
        (data, q_offset, block_size), _, _, q, k, *_ = arguments
        if block_size is None and exports_any_length(q, k):
            _check_at_example(data, unread(_size(q, k), q_offset))
        call = _call_of(*arguments)
        place = _place_of_chosen(backend, call)
        ways = [0, 0]
        if place < len(_NAMES) and _NAMES[place] in _COMPILED:
            ways = [("", *WAYS_IN_TRACE).index(forms.way_in_trace(call, is_score)) for is_score in (False, True)]
        return torch.empty(place, *ways, 0)


def _check_at_example(data: Any, size: Size) -> None:
    """Raise the errors of a mask's parameters at the lengths of the example. No symbolic lengths are compared."""
    with compat.without_dispatch_modes():
        alone, known = without_traced(cast(Mask, of_data("mask", _with_hints(data))), size)
        alone.resolve(known)


def _with_hints(data: Any) -> Any:
    """Return data with the present values of symbolic numbers."""
    if isinstance(data, tuple):
        return tuple(map(_with_hints, data))
    return compat.size_hint(data) if isinstance(data, torch.SymInt) else data


def _place_of_chosen(backend: str, call: Call) -> int:
    reason = None if backend == "auto" else why_not(backend, call)
    if reason is None:
        name = choose(call)[0][0].name if backend == "auto" else backend
        refused = forms.refuses_traced(call) if name in _COMPILED else None
        if refused is None:
            warn_of_order(name, call)
            return _NAMES.index(name)
        reason, should_be_written_otherwise = refused
        if backend == "auto" and not should_be_written_otherwise:
            _log.warning('inside torch.compile, backend "reference" takes the place of %r: %s', name, reason)
            return _NAMES.index("reference")
    _REASONS.append(reason)
    return len(_NAMES) + len(_REASONS) - 1


@compat.constant_in_graphs
def _reason(place: int) -> str:
    return _REASONS[place - len(_NAMES)]


@in_graph
def _run_directly(name: str, sinks: tuple[Tensor, ...], *arguments: Any) -> tuple[Tensor, ...]:
    """Return output, and lse if there is one, of a backend that takes windows.

    sinks: the logits of the call's sinks, if the backend's kernel folds them in.
    """
    with _errors_logged():
        call = _call_of(*arguments)
        out, lse = _DIRECT[name](call)(call.q, call.k, call.v, *sinks)
    return (out,) if lse is None else (out, lse)


def _call_of(
    of_mask: tuple[Any, int | Tensor, tuple[int, int] | None],
    score_data: Any,
    q_offset: int | Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    facts: tuple[bool, ...],
) -> Call:
    """Return a call that backends can be asked about while torch traces."""
    has_score, needs_grad, learns, with_lse, has_options = facts
    data, offset, block_size = of_mask
    size, score_size = unread(_size(q, k), offset), unread(_size(q, k), q_offset)
    mask = None if data == _UNKNOWN else cast(Mask, of_data("mask", data))
    score = None if score_data == _UNKNOWN else cast(Score, of_data("score", score_data))
    return Call(
        q=q,
        k=k,
        v=v,
        mask=TracedMask(mask, size, offset, ("traced", data[:2]), block_size),
        score=TracedScore(score, score_size, q_offset, score_data[:2]) if has_score else None,
        q_offset=q_offset,
        scale=scale,
        with_lse=with_lse,
        kernel_options={"given": True} if has_options else None,
        needs_grad=needs_grad,
        learns=learns,
        is_traced=True,
    )


# --- the plan of a mask ---


def _with_constants(value: Any) -> Any:
    """Return a mask, score or value whose floats torch takes as constants.

    Kernels of flex_attention take no symbolic floats.
    """
    if isinstance(value, float):
        return compat.as_constant(value)
    if not _holds_floats(value):
        return value
    if isinstance(value, Modifier):
        return type(value)(value.definition, {n: _with_constants(v) for n, v in value.params.items()})
    return tuple([_with_constants(v) for v in value])


def _holds_floats(value: Any) -> bool:
    if isinstance(value, float):
        return True
    for v in value.params.values() if isinstance(value, Modifier) else value if isinstance(value, tuple) else ():
        if _holds_floats(v):
            return True
    return False


def _bound(value: Modifier, resolved: Any, size: Size, backend: str, way: int) -> Callable[..., Tensor]:
    """Return the bound function of a mask or score, given what `resolve` returned.

    way: the place in _WAYS, counted from 1, of how it is rewritten, or 0.
    """
    held = cast(Modifier, _held(value, backend))
    heads = size.heads if size.device.type == "cuda" else None
    bound = held.bind(_held(resolved, backend), heads, for_kernels=True)
    return _WAYS[way - 1](bound) if way else bound


def _held(value: Any, backend: str) -> Any:
    """Return a value whose tensors torch's kernels can capture.

    torch's CPU kernel fails if it captures a tensor that the same graph computes, other than by a custom operator. Its
    kernels for GPUs take a constant tensor in which the graph has set elements (`x = torch.zeros(n); x[i] = 1`) for the
    constant, without the elements: seen with torch 2.11. They read a view as it is.
    """
    if backend not in _COMPILED:
        return value
    if isinstance(value, Tensor):
        return flex_kernels.separate(value.detach()) if backend == "cpu" else value.unsqueeze(0).select(0, 0)
    if isinstance(value, Modifier):
        return type(value)(value.definition, {n: _held(v, backend) for n, v in value.params.items()})
    if isinstance(value, ResolvedInner):
        return ResolvedInner(value.source, _held(value.resolved, backend))
    if isinstance(value, dict):
        return {n: _held(v, backend) for n, v in value.items()}
    return tuple([_held(v, backend) for v in value]) if isinstance(value, tuple | list) else value


@in_graph
def _planned_blocks(
    data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, block_size: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return the index tensors of a mask's blocks.

    Calls of a graph that are alike share them: torch merges equal operations only in graphs of training, and only where
    they read the same constants.

    data: the mask as `data_of` returns it.
    """
    with _errors_logged():
        kept = compat.kept_with_graph()
        values: list[Any] = []
        sizes = tuple(q.shape[:3]), tuple(k.shape[:3]), block_size
        key = None if kept is None else _key_of((data, q_offset, q.device, *sizes), values)
        if kept is None or key is None:
            return _blocks_of(data, q_offset, q, k, block_size)
        if key not in kept:
            kept[key] = _blocks_of(data, q_offset, q, k, block_size), values
        indices: tuple[Tensor, ...] = kept[key][0]
        return indices


def _key_of(value: Any, values: list[Any]) -> Hashable | None:
    """Return a key of what a traced call hands on, or None.

    values: gets what must live as long as the key.
    """
    if isinstance(value, tuple | list):
        keys = [_key_of(x, values) for x in value]
        return None if None in keys else tuple(keys)
    if isinstance(value, Tensor):
        key, alive = compat.value_in_graph(value)
        values.append(alive)
        return key
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "symbolic", str(value)
    return (type(value), value) if isinstance(value, Hashable) else None


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    """Log errors, which torch would replace by its own."""
    try:
        yield
    except Exception as error:
        _log.error("a call inside torch.compile cannot be planned: %s: %s", type(error).__name__, error)
        raise


def _blocks_of(
    data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, block_size: tuple[int, int]
) -> tuple[Tensor, ...]:
    mask, size = cast(Mask, of_data("mask", data)), _size(q, k)
    with torch.no_grad(), naming(mask):
        layout = plan_bounds(MaskKind(mask, q_offset, size, False, block_size)).layout
    if q.is_cuda:
        return layout.indices
    # torch's CPU kernel fails if two lists share their memory.
    return tuple(flex_kernels.separate(x) for x in layout.indices)


# --- the reference backend ---


def _by_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    request: Request,
    mask: Mask | None,
    score: Score | None,
    block_mask: compat.BlockMask | None,
    mask_mod: Callable[..., Tensor],
    score_mod: Callable[..., Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return output and lse: by tiles, as one operator, or by slices, which torch traces.

    The operator runs on the CPU, where reading the values of tensors waits for nothing, and knows no transforms.

    block_mask: None for slices of a mask that the caller did not plan: while torch traces they reach all keys.
    """
    q_offset = cast(int | Tensor, request.q_offset)
    visible = _visible(mask, block_mask, q_offset, q.device)
    score_data = _data_of_score(score, q.device)
    if visible is not None and block_mask is not None and _runs_by_tiles(q, score, score_data):
        scale, blocks = compat.constants(request.scale), of_block_mask(block_mask)
        call = visible, score_data, q_offset, block_mask.BLOCK_SIZE, scale
        return cast(tuple[Tensor, Tensor], _by_tiles(q, k, v, blocks, call))
    of_mask = over_indices(mask_mod)
    block_size = (1, 1) if block_mask is None else block_mask.BLOCK_SIZE
    of_scores = None if score_mod is None else over_indices(score_mod, (0,))
    like_q, like_k = q.detach(), k.detach()
    # torch.compile can trace vmap only where no checkpoint is around, so functions run behind its back if they can.
    if visible is not None:

        def of_mask(*indices: Tensor) -> Tensor:
            return cast(Tensor, _masked(visible, block_size, like_q, like_k, *indices))

    if isinstance(score_data, Flat):

        def of_scores(scores: Tensor, *indices: Tensor) -> Tensor:
            return cast(Tensor, _scored(score_data, q_offset, like_q, like_k, scores, *indices))

    return reference.attend(q, k, v, score_mod, block_mask, request.scale, OverIndices(of_mask, of_scores))


def _runs_by_tiles(q: Tensor, score: Score | None, score_data: Any) -> bool:
    return q.device.type == "cpu" and (score is None or isinstance(score_data, Flat)) and not compat.transforms_active()


def _visible(
    mask: Mask | None, block_mask: compat.BlockMask | None, q_offset: int | Tensor, device: torch.device
) -> Any:
    """Return the keys that queries see as `Described.visible` has them.

    The result is None for a function that torch must trace.
    """
    sizes: tuple[int, ...] = ()
    if mask is None and isinstance(block_mask, PortableBlockMask):
        source = block_mask.source
        if isinstance(source, OfData):
            return "bits", source.words, source.table
        mask, q_offset, sizes = source.mask, source.q_offset, (source.batch, source.heads)
        if not is_readable(mask):
            return None
    return None if mask is None else ("mask", data_of(mask, device), q_offset, sizes)


@in_graph
def _by_tiles(q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Tensor, ...], call: Any) -> tuple[Tensor, Tensor]:
    visible, score, q_offset, block_size, scale = call
    score = None if score == _UNKNOWN else score
    described = tiles_operator.Described(visible, score, q_offset, block_size, scale)
    return tiles_operator.attend(q, k, v, blocks, described)


@in_graph
def _masked(visible: Any, block_size: tuple[int, int], q: Tensor, k: Tensor, *indices: Tensor) -> Tensor:
    with torch.no_grad():
        call = tiles_operator.Described(visible, None, 0, block_size, None)
        return over_indices(call.mask_mod(q, k))(*indices)


@in_graph
def _scored(data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, scores: Tensor, *indices: Tensor) -> Tensor:
    score_mod = tiles_operator.Described((), data, q_offset, (1, 1), None).score_mod(q, k)
    return over_indices(cast(Callable[..., Tensor], score_mod), (0,))(scores, *indices)


def _size(q: Tensor, k: Tensor) -> Size:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return Size(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device, dtype=dtype)
