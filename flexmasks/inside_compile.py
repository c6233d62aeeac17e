"""A call inside a user's own torch.compile.

torch traces these functions into the user's graph. It cannot trace how ranges are computed, so `_planned_blocks` does
that behind its back, in plain Python: it gets the mask as data, names and numbers and tensors, and what it does with
the tensors becomes part of the user's graph too. So blocks are planned at each run, on the device, from the tensors of
that run.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import fa4, flex, forms, reference, sdpa
from flexmasks.backends.call import Call
from flexmasks.backends.slices import OverIndices
from flexmasks.backends.table import BACKENDS, choose
from flexmasks.blocks.elements import over_indices
from flexmasks.plans.bounds import MaskKind, plan_bounds, unread
from flexmasks.plans.checks import fail
from flexmasks.plans.data import FirstAsData
from flexmasks.plans.plan import block_size_for, naming
from flexmasks.plans.shifted import shifted_mask, shifted_score
from flexmasks.plans.windows import window_of
from flexmasks.request import Request, checked
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.bands import cap_of
from flexmasks.spec.captures import Aliases, Opaque
from flexmasks.spec.definitions import Definition, define, from_pickle
from flexmasks.spec.parameters import Size
from flexmasks.spec.templates import made, noted, read, reads_of
from flexmasks.spec.values import Mask, Modifier, ResolvedInner, Score

_log = logging.getLogger("flexmasks")
_NAMES = list(BACKENDS)
# Backends that torch traces through: what makes a call without q, k and v of a Call.
_DIRECT: dict[str, Callable[[Call], Callable[..., tuple[Tensor, Tensor | None]]]] = {
    "fa4": fa4.DirectCall.of,
    "sdpa": sdpa.TracedCall.of,
}
_COMPILED = ("flash", "triton", "cpu")  # backends that compile the functions of mask and score
_REASONS: list[str] = []  # reasons of refused backends, for errors
_UNKNOWN = ("unknown", "")  # stands for a score that is not given, or whose function torch must trace
_NONE = "none"
_MAKE_IT_OUTSIDE = (
    "make a Mask of it outside the compiled function, with flexmasks.get_mask(function), and pass the Mask."
)
_PASS_TENSORS = "let it read plain tensors and numbers, and make a Mask of it with flexmasks.get_mask(function)."
_PROBLEM = "problem: "  # begins the name of a template that cannot be made


def run(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Run a call by operations that torch can trace."""
    q_offset = cast(int | Tensor, request.q_offset)
    size = unread(checked(q, k, v, request), q_offset)
    mask, score = from_arguments(request.mask, request.score, request.params)
    learns = torch.is_grad_enabled() and score is not None and score.learns()
    needs_grad = learns or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    if request.block_mask is not None:
        name, block_mask = _backend_of_block_mask(q, request, needs_grad), request.block_mask
    else:
        mask = cast(Mask, from_arguments("full", None, {})[0] if mask is None else mask)
        resolved = mask.resolve(size)  # raises errors of parameters, which torch would not show if they came later
        data = _data_of(mask, q.device)
        score_data = _UNKNOWN if score is None or not _can_be_data(score) else _data_of(score, q.device)
        facts = _Facts(score is not None, needs_grad, learns, request.return_lse, bool(request.kernel_options))
        arguments = data, score_data, q_offset, q, k, v, _value_data(request.scale, q.device), tuple(facts)
        number = _chosen(request.backend, *arguments)
        if number < 0:
            fail(f"backend {request.backend!r} cannot run this call inside torch.compile: {_reason(number)}.")
        name = _NAMES[number]
        if name in _DIRECT:
            direct = _run_directly(name, *arguments)
            return direct[0], direct[1] if request.return_lse else None
        indices = _planned_blocks(data, q_offset, q.detach(), k.detach(), block_size_for(size))
        mask_mod = shifted_mask(_bound(mask, resolved, size, name), _copied(q_offset) if name == "cpu" else q_offset)
        lengths: Any = (size.q_len, size.kv_len)
        block_mask = compat.BlockMask(*(lengths, *indices, block_size_for(size), mask_mod))
    score_mod = None
    if score is not None:
        bound = _bound(score, score.resolve(size), size, name)
        score_mod = shifted_score(bound, _copied(q_offset) if name == "cpu" else q_offset)
    if name == "reference":
        functions = _over_indices(mask, score, q, k, q_offset, block_mask, score_mod)
        result = reference.attend(q, k, v, score_mod, block_mask, request.scale, functions)
        return result[0], result[1] if request.return_lse else None
    if not needs_grad:
        q, k, v = q.detach(), k.detach(), v.detach()
    if name == "cpu":  # torch's CPU kernel fails for views of tensors with other dimensions
        q, k, v = flex.separate(q), flex.separate(k), flex.separate(v)
    backend = "FLASH" if name == "flash" else None
    options = flex.options(q, k, backend, request.kernel_options, block_mask.BLOCK_SIZE)
    out, lse = flex.flex(q, k, v, score_mod, block_mask, request.scale, options, request.return_lse)
    return (flex.separate(out) if name == "cpu" else out), lse


# --- the choice of a backend ---


class _Facts(NamedTuple):
    """Properties of a call that its tensors do not show while torch traces."""

    has_score: bool
    needs_grad: bool
    learns: bool
    with_lse: bool
    has_options: bool


def _backend_of_block_mask(q: Tensor, request: Request, needs_grad: bool) -> str:
    """Return the name of the backend for a user's own BlockMask."""
    if q.is_cuda:
        if request.backend in ("sdpa", "cpu", "fa4") or (request.backend == "flash" and request.return_lse):
            fail(f"backend {request.backend!r} cannot run this call inside torch.compile; pass 'auto'.")
        return "triton" if request.backend == "auto" else request.backend
    needs_reference = needs_grad or request.return_lse or q.dtype == torch.float64
    if request.backend not in ("auto", "cpu", "reference") or (request.backend == "cpu" and needs_reference):
        fail(f"backend {request.backend!r} cannot run this call inside torch.compile; pass 'auto'.")
    return "reference" if needs_reference or request.backend == "reference" else "cpu"


@compat.nonstrict_trace
def _chosen(backend: str, *arguments: Any) -> int:
    """Return the place of the chosen backend, or a negative number: that of a reason.

    It depends on kinds and shapes alone. The comparisons of symbolic lengths made here become guards.
    """
    with _errors_logged():
        return _number_of_chosen(backend, _call_of(*arguments))


def _number_of_chosen(backend: str, call: Call) -> int:
    reason = None if backend == "auto" else BACKENDS[backend].refuses(call)
    if reason is None:
        name = choose(call)[0][0].name if backend == "auto" else backend
        reason = forms.refuses_traced(call) if name in _COMPILED else None
    if reason is not None:
        _REASONS.append(reason)
        return -len(_REASONS)
    return _NAMES.index(name)


@compat.constant_in_graphs
def _reason(number: int) -> str:
    return _REASONS[-number - 1]


@compat.nonstrict_trace
def _run_directly(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Return output, and lse if there is one, of a backend that takes windows."""
    call = _call_of(*arguments)
    out, lse = _DIRECT[name](call)(call.q, call.k, call.v)
    return (out,) if lse is None else (out, lse)


def _call_of(
    data: Any, score_data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Any, facts: Any
) -> Call:
    """Return a call that backends can be asked about while torch traces."""
    has_score, needs_grad, learns, with_lse, has_options = facts
    size = unread(_size(q, k), q_offset)
    mask = cast(Mask, _of_data("mask", data))
    score = None if score_data == _UNKNOWN else cast(Score, _of_data("score", score_data))
    tensors = [t for value in (mask, score) if value is not None for t in value.tensors()]
    window = window_of(mask, size) if isinstance(q_offset, int) else None
    pairs = size.q_len * size.kv_len
    return Call(
        q=q,
        k=k,
        v=v,
        what=repr(mask),
        window=lambda: window,
        cap=None if score is None else cap_of(score, size),
        blocks=_no_blocks,
        data=_no_blocks,
        computed_fraction=lambda: 0.5 if window is None or tensors else window.pairs(size.q_len) / pairs,
        is_mostly_partial=lambda: bool(tensors),
        proven_options=dict,
        mask_mod=lambda: _as_kernels_see(mask, size, q_offset),
        mask_is_own=mask.is_own(),
        first_as_data=FirstAsData.NONE,
        score_mod=None if not has_score else lambda: _as_kernels_see(cast(Score, score), size, q_offset),
        score_is_own=score is not None and score.is_own(),
        scale=_value_of("mask", scale),
        with_lse=with_lse,
        kernel_options={"given": True} if has_options else None,
        kernel_key=(("traced", data[:2]), score_data[:2]),
        numbers=(_no_blocks, None),
        shapes=None if has_score and score is None else (),
        needs_grad=needs_grad,
        learns=learns,
        has_number_tensors=any(t.ndim == 0 for t in tensors),
        holds_aliases=False,
        is_traced=True,
    )


def _no_blocks() -> Any:
    raise AssertionError("the choice of a backend reads no blocks while torch traces")


def _as_kernels_see(value: Mask | Score, size: Size, q_offset: int | Tensor) -> Callable[..., Tensor]:
    """Return the function that a kernel would compile, over tensors of zeros.

    The tensors that torch traces belong to its trace.
    """
    with compat.without_dispatch_modes():
        zeros = [_zeros_like(t) for t in value.tensors()]
        lengths = (size.batch, size.heads, size.q_len, size.kv_len, size.q_offset)
        batch, heads, q_len, kv_len, q_end = map(compat.size_hint, lengths)
        known = replace(size, batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, q_offset=q_end)
        alone = Aliases(zip(value.tensors(), zeros, strict=True)).of(value)
        offset = _zeros_like(q_offset) if isinstance(q_offset, Tensor) else compat.size_hint(q_offset)
        mod = alone.bind(alone.resolve(known), heads)
        return shifted_mask(mod, offset) if value.kind == "mask" else shifted_score(mod, offset)


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros([compat.size_hint(n) for n in x.shape], dtype=x.dtype, device=x.device)


# --- the plan of a mask ---


def _bound(value: Modifier, resolved: Any, size: Size, backend: str) -> Callable[..., Tensor]:
    """Return the bound function of a mask or score, given what `resolve` returned."""
    if backend == "cpu":
        value, resolved = _in_own_memory(value), _copied(resolved)
    return value.bind(resolved, size.heads if size.device.type == "cuda" else None)


def _in_own_memory(value: Modifier) -> Modifier:
    """Return the value with copies of its tensors.

    torch's CPU kernel fails if it captures a tensor that the same graph computes, other than by a custom operator.
    """
    return type(value)(value.definition, {n: _copied(v) for n, v in value.params.items()})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return flex.separate(value.detach())
    if isinstance(value, Modifier):
        return _in_own_memory(value)
    if isinstance(value, ResolvedInner):
        return ResolvedInner(value.source, _copied(value.resolved))
    if isinstance(value, dict):
        return {n: _copied(v) for n, v in value.items()}
    return tuple([_copied(v) for v in value]) if isinstance(value, tuple) else value


@compat.nonstrict_trace
def _planned_blocks(
    data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, block_size: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return the index tensors of a mask's blocks.

    data: the mask as `_data_of` returns it.
    """
    with _errors_logged():
        return _blocks_of(data, q_offset, q, k, block_size)


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
    mask, size = cast(Mask, _of_data("mask", data)), _size(q, k)
    with torch.no_grad(), naming(mask):
        layout = plan_bounds(MaskKind(mask, q_offset, size, False, block_size)).layout
    if q.is_cuda:
        return layout.indices
    return tuple(flex.separate(x) for x in layout.indices)  # torch's CPU kernel fails if two lists share their memory


def _over_indices(
    mask: Mask | None,
    score: Score | None,
    q: Tensor,
    k: Tensor,
    q_offset: int | Tensor,
    block_mask: compat.BlockMask,
    score_mod: Callable[..., Tensor] | None,
) -> OverIndices:
    """Return the functions of a call over vectors of indices.

    torch.compile can trace vmap only where no checkpoint is around, so the functions run behind its back if they can.
    """
    of_mask = over_indices(block_mask.mask_mod)
    of_scores = None if score_mod is None else over_indices(score_mod, (0,))
    like_q, like_k = q.detach(), k.detach()
    if mask is not None:
        mask_data = _data_of(mask, q.device)

        def of_mask(*indices: Tensor) -> Tensor:
            return cast(Tensor, _masked(mask_data, q_offset, like_q, like_k, *indices))

    if score is not None and _can_be_data(score):
        score_data = _data_of(score, q.device)

        def of_scores(scores: Tensor, *indices: Tensor) -> Tensor:
            return cast(Tensor, _scored(score_data, q_offset, like_q, like_k, scores, *indices))

    return OverIndices(of_mask, of_scores)


@compat.nonstrict_trace
def _masked(data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, *indices: Tensor) -> Tensor:
    """Return a mask over vectors of indices."""
    mask = _of_data("mask", data)
    with torch.no_grad():
        resolved = mask.resolve(unread(_size(q, k), q_offset))
        return over_indices(shifted_mask(mask.bind(resolved), q_offset))(*indices)


@compat.nonstrict_trace
def _scored(data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, scores: Tensor, *indices: Tensor) -> Tensor:
    """Return the changed scores over vectors of indices."""
    score = _of_data("score", data)
    resolved = score.resolve(unread(_size(q, k), q_offset))
    return over_indices(shifted_score(score.bind(resolved), q_offset), (0,))(scores, *indices)


def _size(q: Tensor, k: Tensor) -> Size:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return Size(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device, dtype=dtype)


# --- masks as data: strings, numbers and tensors in tuples ---


def _data_of(mask: Modifier, device: torch.device) -> Any:
    """Return a mask as data. torch traces this function."""
    definition = mask.definition
    name: str = definition.name
    captured: list[Any] = []
    if not definition.own:
        name, captured = _name_and_captured(definition)
    params = []
    for key, value in mask.params.items():
        parameter = definition.parameters[key]
        if parameter.is_sequence(value) and not isinstance(value[0] if value else None, Modifier):
            value = parameter.tensor(value, device)
        params.append((key, _value_data(value, device)))
    return definition.own, name, tuple(captured), tuple(params)


def _can_be_data(value: Modifier) -> bool:
    """Return whether all functions of a mask or score were looked into outside."""
    if not (value.definition.own or isinstance(value.definition.reads, tuple)):
        return False
    for parameter in value.params.values():
        for inner in parameter if isinstance(parameter, tuple) else (parameter,):
            if isinstance(inner, Modifier) and not _can_be_data(inner):
                return False
    return True


def _name_and_captured(definition: Definition) -> tuple[str, list[Any]]:
    """Return the name of the template of a user's functions, and what they captured."""
    function, reads, what = definition.function, definition.reads, f"the {definition.kind} function {definition.name!r}"
    if isinstance(reads, str):
        fail(f"{what} reads {reads}, which torch.compile cannot follow; {_PASS_TENSORS}")
    if not isinstance(function, types.FunctionType):
        fail(f"{what} is a {type(function).__name__}, which torch.compile cannot follow; pass a plain function.")
    if reads is not None:
        name, captured = f"{_noted(*definition.functions)}", read(reads)
    elif function.__code__.co_freevars:  # not a Mask made outside
        fail(f"{what} captures variables; {_MAKE_IT_OUTSIDE}")
    else:
        name, captured = f"{_noted_alone(function)}", []
    if name.startswith(_PROBLEM):
        fail(f"{what} reads {name.removeprefix(_PROBLEM)}; {_MAKE_IT_OUTSIDE}")
    return name, captured


@compat.constant_in_graphs
def _noted(*functions: Any) -> str:
    try:
        return noted(*functions)
    except Opaque as problem:
        return f"{_PROBLEM}{problem}"


@compat.constant_in_graphs
def _noted_alone(function: Any) -> str:
    """Return the name of the template of a function that captures nothing."""
    reads = reads_of(function)
    if reads:
        return f"{_PROBLEM}{reads if isinstance(reads, str) else 'tensors or numbers among its variables'}"
    return noted(function, None, None, None)


def _definition_of(kind: str, template: str, captured: Any) -> Definition:
    """Return the definition of a user's functions."""
    function, prepare, inner_size, native = made(template, captured)
    return define(kind, function, prepare=prepare, inner_size=inner_size, native=native)


def _value_data(value: Any, device: torch.device) -> Any:
    if isinstance(value, Modifier):
        return "inner", _data_of(value, device)
    if isinstance(value, tuple):
        return "tuple", tuple([_value_data(v, device) for v in value])
    return (_NONE,) if value is None else ("value", value)


def _of_data(kind: str, data: Any) -> Modifier:
    """Return the mask or score that `_data_of` turned into data."""
    own, name, captured, params = data
    definition = from_pickle(kind, name) if own else _definition_of(kind, name, captured)
    cls = Mask if kind == "mask" else Score
    return cls(definition, {key: _value_of(kind, value) for key, value in params})


def _value_of(kind: str, data: Any) -> Any:
    if data[0] == "inner":
        return _of_data(kind, data[1])
    if data[0] == "tuple":
        return tuple(_value_of(kind, v) for v in data[1])
    return None if data[0] == _NONE else data[1]
