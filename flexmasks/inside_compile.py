"""A call inside a user's own torch.compile.

torch traces these functions into the user's graph. It cannot trace how ranges are computed, so `_planned_blocks` does
that behind its back, in plain Python: it gets the mask as data, names and numbers and tensors, and what it does with
the tensors becomes part of the user's graph too. So blocks are planned at each run, on the device, from the tensors of
that run.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import compat
from flexmasks.backends import flex, reference
from flexmasks.backends.slices import OverIndices
from flexmasks.blocks.elements import over_indices
from flexmasks.plans.bounds import MaskKind, plan_bounds, unread
from flexmasks.plans.checks import fail
from flexmasks.plans.plan import block_size_for, naming
from flexmasks.plans.shifted import shifted_mask, shifted_score
from flexmasks.request import Request, checked
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.captures import Opaque
from flexmasks.spec.definitions import Definition, define, from_pickle
from flexmasks.spec.parameters import Size
from flexmasks.spec.templates import made, noted, read, reads_of
from flexmasks.spec.values import Mask, Modifier, Score

_log = logging.getLogger("flexmasks")
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
    grad = torch.is_grad_enabled()
    needs_grad = grad and (q.requires_grad or k.requires_grad or v.requires_grad)
    needs_grad = needs_grad or (grad and score is not None and score.learns())
    block_mask, backend = request.block_mask, request.backend
    if block_mask is None and mask is None and score is None and not request.return_lse and backend in ("auto", "sdpa"):
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, scale=request.scale, enable_gqa=grouped), None
    is_cpu = not q.is_cuda
    impossible = ("sdpa", "triton", "flash") if is_cpu else ("sdpa", "cpu")
    if backend in impossible or (backend == "flash" and request.return_lse):
        fail(f"backend {backend!r} cannot run this call inside torch.compile; leave the choice to torch: 'auto'.")
    if block_mask is None:
        mask = from_arguments("full", None, {})[0] if mask is None else mask
        block_mask = _planned(cast(Mask, mask), size, q, k, q_offset)
    score_mod = None
    if score is not None:
        score_mod = shifted_score(score.bind(score.resolve(size)), q_offset)
    needs_reference = is_cpu and (needs_grad or request.return_lse or q.dtype == torch.float64)
    if backend == "reference" or (backend == "auto" and needs_reference):
        functions = _over_indices(mask, score, q, k, q_offset, block_mask, score_mod)
        out, lse = reference.attend(q, k, v, score_mod, block_mask, request.scale, functions)
        return out, lse if request.return_lse else None
    if not needs_grad:
        q, k, v = q.detach(), k.detach(), v.detach()
    options = flex.options(q, k, "FLASH" if backend == "flash" else None, request.kernel_options)
    out, lse = flex.flex(q, k, v, score_mod, block_mask, request.scale, options, request.return_lse)
    return (flex.separate(out) if is_cpu else out), lse


def _planned(mask: Mask, size: Size, q: Tensor, k: Tensor, q_offset: int | Tensor) -> BlockMask:
    """Return the BlockMask of a mask. torch traces this function."""
    block_size = block_size_for(size)
    heads = size.heads if q.is_cuda else None
    mask_mod = shifted_mask(mask.bind(mask.resolve(size), heads), q_offset)
    indices = _planned_blocks(_data_of(mask, size.device), q_offset, q.detach(), k.detach(), block_size)
    lengths: Any = (size.q_len, size.kv_len)
    return BlockMask(*(lengths, *indices, block_size, mask_mod))


@compat.nonstrict_trace
def _planned_blocks(
    data: Any, q_offset: int | Tensor, q: Tensor, k: Tensor, block_size: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return the index tensors of a mask's blocks.

    data: the mask as `_data_of` returns it.
    """
    try:
        return _blocks_of(data, q_offset, q, k, block_size)
    except Exception as error:  # torch would not show it
        _log.exception("a mask could not be planned inside torch.compile: %s", error)
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
    block_mask: BlockMask,
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
            return _masked(mask_data, q_offset, like_q, like_k, *indices)

    if score is not None and _can_be_data(score):
        score_data = _data_of(score, q.device)

        def of_scores(scores: Tensor, *indices: Tensor) -> Tensor:
            return _scored(score_data, q_offset, like_q, like_k, scores, *indices)

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
    name, captured = definition.name, []
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
    definition = value.definition
    inner = [v for p in value.params.values() for v in (p if isinstance(p, tuple) else (p,)) if isinstance(v, Modifier)]
    return (definition.own or isinstance(definition.reads, tuple)) and all([_can_be_data(v) for v in inner])


def _name_and_captured(definition: Definition) -> tuple[str, list[Any]]:
    """Return the name of the template of a user's functions, and what they captured."""
    function, reads = definition.function, definition.reads
    if reads is None:  # not a Mask made outside
        if not isinstance(function, types.FunctionType) or function.__code__.co_freevars:
            fail(f"the {definition.kind} function {definition.name!r} captures variables; {_MAKE_IT_OUTSIDE}")
        name, captured = f"{_noted_alone(function)}", []
    elif isinstance(reads, str):
        fail(
            f"the {definition.kind} function {definition.name!r} reads {reads}, which torch.compile cannot follow; {_PASS_TENSORS}"
        )
    else:
        name, captured = f"{_noted(*definition.functions)}", read(reads)
    if name.startswith(_PROBLEM):
        fail(
            f"the {definition.kind} function {definition.name!r} reads {name.removeprefix(_PROBLEM)}; {_MAKE_IT_OUTSIDE}"
        )
    return name, captured


@torch.compiler.assume_constant_result
def _noted(*functions: Any) -> str:
    try:
        return noted(*functions)
    except Opaque as problem:
        return f"{_PROBLEM}{problem}"


@torch.compiler.assume_constant_result
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
