"""The road of a call, from the arguments of `attention` to a backend.

A call that was made before, with the same functions, parameters, shapes and tensors, is replayed from a cache. Any
other call is checked and planned, and its backend is chosen. Calls under autocast, with jagged nested tensors or
attention sinks are first turned into plain calls. A call inside a user's own torch.compile goes to
`flexmasks.inside_compile`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flexmasks import checkpointing, compat
from flexmasks.backends.call import Kind, Ready, Refused
from flexmasks.backends.plain import computes_nothing
from flexmasks.backends.reference import frozen_functions
from flexmasks.backends.table import BACKENDS, check, choose, is_not_here
from flexmasks.blocks.lists import lists_of
from flexmasks.cache import ENTRY, KINDS, PLANS, Part, identity
from flexmasks.errors import passing_error
from flexmasks.planned import (
    Planned,
    Sinks,
    as_nested,
    greatest_of,
    laid_end_to_end,
    plan_call,
    run_first_time,
    sinks_of,
    under_autocast,
    with_sinks_of,
)
from flexmasks.plans.checks import any_nested, check_sinks, fail
from flexmasks.plans.explanation import Explanation
from flexmasks.plans.held import HeldPlan, Launch, without_plan
from flexmasks.plans.sizes import is_capturing
from flexmasks.request import Request
from flexmasks.spec.arguments import from_arguments, functions_of
from flexmasks.spec.definitions import is_by_library
from flexmasks.spec.structure import Opaque, flatten, plain_key, tensors_of, with_tensors
from flexmasks.spec.values import Mask, Score

_log = logging.getLogger("flexmasks")
_Run = TypeVar("_Run", bound=Callable[..., Any])
_READY: Part[Ready] = Part(PLANS, "calls")  # they share most index tensors with the cache "blocks"
_CALL_KINDS: Part[Kind] = Part(KINDS, "calls")
_SCALES = float, int, type(None)
_OFFSETS = int, str, type(None)
# On a CPU new tensors are planned from the start, which checks their values: reading them costs nothing there.
_KINDS_ON = ("cuda",)
_DIMS = 4  # of q, k and v


def unseen(run: _Run) -> _Run:
    """Decorate a call that selective activation checkpointing is not to look into.

    The checkpointing keeps results of single operations, which kernels overwrite, and counts operations, of which plans
    make some at their first call only. What is inside is computed again, but for torch's own attention.
    """

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        if not compat.is_compiling() and checkpointing.in_selective_checkpointing():
            with checkpointing.unseen_by_checkpointing():
                return run(*args)
        return run(*args)

    return cast(_Run, call)


@unseen
def run(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `attention`."""
    if request.sink_logits is not None:
        check_sinks(q, request.sink_logits)
    if torch.jit.is_tracing():  # type: ignore[attr-defined] # public, and not listed
        fail(
            "torch.jit.trace cannot hold it, because values choose what is computed; use torch.export.export or "
            "torch.compile, and for ONNX torch.onnx.export with dynamo=True.",
            RuntimeError,
        )
    with under_autocast(q, k, v) as (q, k, v):
        if not any_nested(q, k, v):
            return _run(q, k, v, request)
        return as_nested(q, *_run(*laid_end_to_end(q, k, v, without_plan(q, k, request))))


def _run(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Run a call of dense tensors, outside autocast."""
    q, k, v = _as_kernels_read(q, k, v)
    if not compat.is_compiling():
        return _run_eagerly(q, k, v, request)
    request = without_plan(q, k, request)
    from flexmasks import inside_compile  # loads torch's compilers

    sinks, request = sinks_of(request)
    return with_sinks_of(inside_compile.run(q, k, v, request), sinks)


def _as_kernels_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v for all batch elements of q, without a copy; those of one batch element are for all.

    Queries that lie one element apart, as `unfold` makes them of a signal, are copied: products on a CPU read them as
    if they were transposed.
    """
    if not all(isinstance(x, Tensor) and x.ndim == _DIMS and x.layout == torch.strided for x in (q, k, v)):
        return q, k, v
    if k.shape[0] == v.shape[0] == 1 != q.shape[0]:
        k, v = k.expand(q.shape[0], -1, -1, -1), v.expand(q.shape[0], -1, -1, -1)
    if not q.is_cuda and q.stride(2) == q.stride(3) == 1 < q.shape[3]:
        q = q.contiguous()
    return q, k, v


def explain(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Explanation:
    """Explain how a call of `attention` would run."""
    request = without_plan(q, k, request)
    if request.sink_logits is not None:
        check_sinks(q, request.sink_logits)
        request = request._replace(sink_logits=None, return_lse=True)
    with under_autocast(q, k, v) as (q, k, v):
        if any_nested(q, k, v):
            q, k, v, request = laid_end_to_end(q, k, v, request)
        q, k, v = _as_kernels_read(q, k, v)
        if computes_nothing(q, k, v):
            fail("`explain` needs q, k and v with data, on a real device, and at least one query and key.")
        planned = plan_call(q, k, v, request)
        call = planned.call
        check(call, request.backend_name)
        able, reasons = choose(call)
        is_auto = request.backend == "auto"
        chosen = able[0] if is_auto else BACKENDS[request.backend_name]
        able_too = f"it can run the call, but {chosen.name} {'is faster here' if is_auto else 'was asked for'}"
        others = {b.name: reasons.get(b.name, able_too) for b in BACKENDS.values() if b is not chosen}
        compiles, blocks = chosen.compiles(call), chosen.blocks(call)
        mask = planned.mask.resized(blocks.block_mask.BLOCK_SIZE) or planned.mask
        plan = chosen.plan(call) or mask.explained()
        as_data = chosen.why_data(call)
        form = f"data: {as_data}" if as_data else "its function"
        not_here = tuple(name for name, reason in others.items() if is_not_here(reason))
        return Explanation(chosen.name, others, compiles, chosen.recompiles_on, plan, form, blocks, not_here)


def _run_eagerly(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Run a call outside torch.compile."""
    results = _replayed_or_planned(q, k, v, request)
    return cast(tuple[Tensor, Tensor | None], checkpointing.watched(results, lambda: _check_of_tensors(q, k, request)))


def _check_of_tensors(q: Tensor, k: Tensor, request: Request) -> Callable[[], None]:
    """Return what raises torch's error if a tensor that a call's mask or score reads has changed in place since."""
    request = without_plan(q, k, request)
    mask, score = from_arguments(request.mask, request.score, request.params)
    blocks = request.block_mask
    mask_mod, lists = (mask, None) if blocks is None else (blocks.mask_mod, lists_of(blocks))
    *_, check = frozen_functions(mask_mod, score, q, (request.q_offset, lists))
    return check


def _replayed_or_planned(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Run a call. One that was made before goes straight to its kernel."""
    if isinstance(request.mask, HeldPlan):
        return _run_plan(q, k, v, request.mask, request)
    if compat.transforms_active():
        request = _with_plain_tensors(request)
    if request.q_offset is None and type(q) is type(k) is Tensor and q.ndim == k.ndim == _DIMS:
        request = request._replace(q_offset=0) if q.shape[2] == k.shape[2] else request
    return _run_given(q, k, v, request, key_and_tensors(q, k, v, sinks_of(request)[1]))


def greatest(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
    """Return the greatest score of each query of a call, [B, H, Q]."""
    with under_autocast(q, k, v) as (q, k, v):
        return greatest_of(*_as_kernels_read(q, k, v), without_plan(q, k, request))


def _run_given(
    q: Tensor, k: Tensor, v: Tensor, request: Request, known: tuple[Hashable, list[Tensor]] | None
) -> tuple[Tensor, Tensor | None]:
    """Run a call of a mask, whose key and tensors are known."""
    sinks, inner = sinks_of(request)
    if known is not None and not (known[1] and is_capturing(q.device)):  # a captured call plans again at each replay
        again = run_again(*known, q, k, v, sinks)
        if again is not None:
            return again
    states = [] if known is None else list(map(identity, known[1]))
    result, planned = run_first_time(q, k, v, inner)
    if known is not None and result.ready is not None and planned is not None and not is_capturing(q.device):
        key, tensors = key_and_tensors(q, k, v, inner) or (None, [])
        # Another thread may have changed a variable or a tensor meanwhile.
        if (key, *map(id, tensors)) == (known[0], *map(id, known[1])) and states == list(map(identity, tensors)):
            keep(*known, result.ready, planned)
    return with_sinks_of(result, sinks)


def _run_plan(q: Tensor, k: Tensor, v: Tensor, held: HeldPlan, request: Request) -> tuple[Tensor, Tensor | None]:
    """Run a call of a plan that the user holds. It finds what its earlier calls made ready without a search."""
    plain = not held.owns_tensors or request.score is not None or request.params or request.q_offset is not None
    if plain or compat.transforms_active():
        return _replayed_or_planned(q, k, v, without_plan(q, k, request))
    sinks, inner = sinks_of(request)
    key = _key_of_sizes(q, k, v, inner)
    capturing = bool(held.tensors) and is_capturing(q.device)
    launch, state = held.launch(key)
    if capturing and held.of_one_step:
        launch = None
    if key is not None and launch is not None:
        launch.is_in_graph |= capturing
        again = _run_ready(launch.ready, q, k, v, sinks)
        if again is not None:
            return again
        held.launches.pop(key, None)
    request = without_plan(q, k, request)
    inner = sinks_of(request)[1]
    if key is not None and (held.of_one_step or not held.tensors):
        known = _with_functions(key, inner)
        out = _run_given(q, k, v, request, known)
        ready = None if known is None else _READY.get(*known)
        if ready is not None and not capturing:
            held.keep(key, Launch(ready), state)
        return out
    result, planned = run_first_time(q, k, v, inner)
    may_keep = planned is not None and planned.call.holds_aliases and not capturing
    if key is not None and result.ready is not None and planned is not None and may_keep:
        held.keep(key, Launch(result.ready, planned.call.plans), state)
    return with_sinks_of(result, sinks)


def _with_plain_tensors(request: Request) -> Request:
    """Return a request without the wrappers of torch.func.grad around tensors that have no gradients.

    These are whole numbers, and all that a mask holds. Nobody can read the memory of a wrapped tensor.
    """
    others = request.score, dict(request.params), request.q_offset
    if any(map(compat.is_wrapped, tensors_of((request.mask, others)))):
        with contextlib.suppress(Opaque):
            mask = with_tensors(request.mask, _without_wrappers)
            score, params, offset = with_tensors(
                others, lambda t: t if t.is_floating_point() or t.is_complex() else _without_wrappers(t)
            )
            return request._replace(mask=mask, score=score, params=params, q_offset=offset)
    return request


def _without_wrappers(tensor: Tensor) -> Tensor:
    """Return a tensor without the wrappers of gradients. One that belongs to a batch of vmap stays as it is."""
    plain = compat.without_wrappers(tensor)
    return tensor if plain is None else plain


def _run_ready(
    ready: Ready, q: Tensor, k: Tensor, v: Tensor, sinks: Sinks | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """Return output and lse of a call whose forms are made, or None if it failed.

    A call that failed is planned again. Errors that say nothing about it are raised.
    """
    try:
        if sinks is None:
            return ready.kernel(q, k, v, None, *ready.forms)
        return with_sinks_of(ready(q, k, v, sinks.logits), sinks)
    except Exception as error:  # kernels raise errors of any type
        if isinstance(error, Refused) or passing_error(error) is not None:
            raise
        return None


def run_again(
    key: Hashable, tensors: list[Tensor], q: Tensor, k: Tensor, v: Tensor, sinks: Sinks | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """Return output and lse of a call that was made before, or None. What fails now is forgotten."""
    ready = _known(key, tensors, q.device)
    result = None if ready is None else _run_ready(ready, q, k, v, sinks)
    if ready is not None and result is None:
        _READY.drop(key, tensors)
        _CALL_KINDS.drop((key, *_layouts(tensors)))
    return result


def keep(key: Hashable, tensors: list[Tensor], ready: Ready, planned: Planned) -> None:
    """Keep a call for the same tensors, and its kind for others."""
    if planned.call.holds_aliases:
        _READY.put(key, tensors, ready, ENTRY + ready.nbytes + planned.aliases.nbytes)
    elif not any(t.requires_grad for t in tensors):
        return
    if tensors and planned.call.q.device.type in _KINDS_ON:
        with contextlib.suppress(Opaque):
            kind = Kind(ready.kernel, planned.call.plans, tensors, planned.where_last)
            _CALL_KINDS.put((key, *_layouts(tensors)), (), kind, ENTRY)


def plan_again(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Ready | None:
    """Do all that a call does before its kernel runs. The result is None if no call of its kind was made before."""
    known = key_and_tensors(q, k, v, request)
    return None if known is None else _known(*known, q.device)


def _known(key: Hashable, tensors: list[Tensor], device: torch.device) -> Ready | None:
    """Return what an earlier call with these tensors made ready, or else what the kind of such calls makes, or None."""
    learns = any(t.requires_grad for t in tensors)  # what is kept would hold them
    ready = None if learns else _READY.get(key, tensors)
    if ready is not None or not tensors or device.type not in _KINDS_ON:
        return ready
    kind = _CALL_KINDS.get((key, *_layouts(tensors)))
    try:
        ready = None if kind is None else kind(tensors)
    except Exception as error:  # a form that is planned from the start may raise anything, which that call says
        if passing_error(error) is not None:
            raise
        return None
    if ready is not None and not learns:
        copied = sum(t.nbytes for t in tensors if not t.is_contiguous())
        _READY.put(key, tensors, ready, ENTRY + ready.nbytes + copied)
    return ready


def _layouts(tensors: list[Tensor]) -> list[Hashable]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def key_and_tensors(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Hashable, list[Tensor]] | None:
    """Return the cache key of a call and the tensors it reads. The result is None if the call cannot be cached."""
    of_sizes = _key_of_sizes(q, k, v, request)
    return None if of_sizes is None else _with_functions(of_sizes, request)


def _with_functions(of_sizes: Hashable, request: Request) -> tuple[Hashable, list[Tensor]] | None:
    """Return the cache key of a call with its mask and score, and the tensors that it reads, or None."""
    tensors: list[Tensor] = []
    blocks = request.block_mask
    functions = _simple_key(request, tensors) if blocks is None else None
    if functions is None:
        mask: Any = functions_of("mask", request.mask)
        if blocks is not None:
            mask = blocks.mask_mod, lists_of(blocks), blocks.BLOCK_SIZE, blocks.seq_lengths
        structure, leaves = flatten((mask, functions_of("score", request.score), request.params, request.q_offset))
        if structure.unreadable:
            return None
        functions, tensors = structure.key, leaves.tensors
    learning = tuple(n for n, t in enumerate(tensors) if t.requires_grad) if torch.is_grad_enabled() else ()
    return (functions, of_sizes, learning), tensors


def _key_of_sizes(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Hashable | None:
    """Return the cache key of a call without its mask and score, or None if the call cannot be cached.

    It has all on which the choice of a backend depends, so that no call takes the kernel of another one.
    """
    scale, with_lse, backend = request.scale, request.return_lse, request.backend
    if not (type(q) is type(k) is type(v) is Tensor and type(backend) is str and type(with_lse) is bool):
        return None
    if request.block_mask is not None:
        is_alone = isinstance(request.block_mask, compat.BlockMask) and request.mask is None
        if not is_alone or compat.transforms_active():
            return None
    if type(scale) not in _SCALES or compat.in_forward_derivative() or compat.in_vmap():
        return None
    device, grad = q.device, torch.is_grad_enabled()
    try:
        layouts = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    except RuntimeError:  # nested and sparse tensors have none; checks say so
        return None
    return (
        scale, with_lse, request.sink_logits is not None, backend, grad, torch.get_default_dtype(),
        None if request.kernel_options is None else repr(request.kernel_options),
        layouts, q.dtype, k.dtype, v.dtype,
        device, k.device, v.device, q.requires_grad, k.requires_grad, v.requires_grad,
        compat.transforms_active(), compat.sdp_settings(),
    )  # fmt: skip


def _simple_key(request: Request, tensors: list[Tensor]) -> Hashable | None:
    """Return the key of a call with common arguments only, else None.

    Common arguments are masks and scores of the library and plain functions, with numbers and tensors. This function
    takes a third of the time of `flatten`, which reads everything.
    """
    offset: Any = request.q_offset
    key: list[Hashable] = [offset]
    for kind, value in (("mask", request.mask), ("score", request.score)):
        if value is None:
            key.append(None)
        elif type(value) is str and is_by_library(kind, value):
            key.append(value)
        elif type(value) is (Mask if kind == "mask" else Score) and value.own_key is not None:
            own_key, own_tensors = value.own_key
            key += [kind, own_key]
            tensors += own_tensors
        else:
            captured = plain_key(value, tensors) if type(value) is FunctionType else None
            if captured is None:
                return None
            key.append(captured)
    if type(offset) is Tensor and not vars(offset):
        tensors.append(offset)
        key[0] = "tensor"
    elif type(offset) not in _OFFSETS:
        return None
    key.append("params")
    return tuple(key) if _add_parameters(key, request.params, tensors) else None


def _add_parameters(key: list[Hashable], params: Mapping[str, Any], tensors: list[Tensor]) -> bool:
    """Add parameters to a key, and their tensors to the tensors.

    Returns whether all are numbers and plain tensors.
    """
    for name, value in params.items():
        kind: Any = type(value)
        if kind is Tensor and not vars(value):
            tensors.append(value)
            key.append(name)
        elif kind is int or kind is bool:
            key += [name, kind, value]
        elif kind is float:
            key += [name, repr(value)]  # 0.0 and -0.0 are equal, and differ in what they do
        else:
            return False
    return True
