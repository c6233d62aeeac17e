"""The road of a call, from the arguments of `attention` to a kernel.

A call that was made before, with the same functions, parameters, shapes and tensors, goes straight to its kernel. One
of a known kind makes the forms that its kernel reads of new tensors. Any other call is checked and planned, and its
backend is chosen. A call inside a user's own torch.compile goes to `flexmasks.inside_compile`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import checkpointing, compat
from flexmasks.backends import tangents
from flexmasks.backends.call import (
    Call,
    Inputs,
    Kernel,
    Kind,
    Operand,
    Plans,
    Ready,
    RefusedByAll,
    Result,
    Unavailable,
    proven,
)
from flexmasks.backends.flex_dropout import Drawn, DropoutKernel
from flexmasks.backends.plain import attend_nothing, computes_nothing, greatest_scores
from flexmasks.backends.reference import frozen_functions
from flexmasks.backends.table import BACKENDS, choose, is_not_here, made_ready, only_choice, why_not
from flexmasks.backends.table import run as run_on_backend
from flexmasks.blocks.lists import as_kernels_read as as_lists_of_kernels
from flexmasks.blocks.lists import lists_of
from flexmasks.cache import ENTRY, KINDS, PLANS, Part, identity
from flexmasks.context import Context, is_invariant
from flexmasks.dropout import Dropout, kept_of, with_dropout
from flexmasks.errors import Outgrown, Unfit, passing_error, raise_to_user
from flexmasks.kernels.sinks import with_sinks
from flexmasks.layouts import as_kernels_read, as_nested, laid_end_to_end, under_autocast
from flexmasks.plans.alignment import aligned
from flexmasks.plans.checks import ATTENTION, any_nested, check_sinks, fail
from flexmasks.plans.explanation import Explanation
from flexmasks.plans.held import HeldPlan, Launch, without_plan
from flexmasks.plans.mask_plan import GivenPlan, MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.sizes import block_size_for, unread
from flexmasks.request import Request, checked
from flexmasks.spec.aliases import Aliases
from flexmasks.spec.arguments import from_arguments, functions_of, get_mask
from flexmasks.spec.definitions import is_by_library
from flexmasks.spec.parameters import is_dense
from flexmasks.spec.structure import Opaque, flatten, plain_key, tensors_of, with_tensors
from flexmasks.spec.values import Mask, Score

_log = logging.getLogger("flexmasks")
_READY: Part[Ready] = Part(PLANS, "calls")  # they share most index tensors with the cache "blocks"
_CALL_KINDS: Part[Kind] = Part(KINDS, "calls")
_SCALES = float, int, type(None)
_OFFSETS = int, str, type(None)
# On a CPU new tensors are planned from the start, which checks their values: reading them costs nothing there.
_KINDS_ON = ("cuda",)
_DIMS = 4  # of q, k and v
Results = tuple[Tensor, Tensor | None]  # output, and lse if it is wanted
_CPU = torch.device("cpu")


def attend(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `attention`."""
    held = request.mask if isinstance(request.mask, HeldPlan) else None
    if held is not None and held.is_invariant:
        request = request._replace(is_invariant=True)
    if request.block_mask is not None and is_invariant():
        request = _by_its_mask(q, k, request)
    if compat.is_compiling():
        try:
            return _attend_in_graph(q, k, v, request)
        except (ValueError, TypeError) as error:
            raise_to_user(isinstance(error, TypeError), str(error))
            raise
    context = Context.now(q.device if isinstance(q, Tensor) else _CPU)
    context = context._replace(is_invariant=True) if request.is_invariant else context
    if context.in_mode and checkpointing.in_selective_checkpointing():
        with checkpointing.unseen_by_checkpointing():  # why: see `unseen`
            return attend(q, k, v, request)
    if request.sink_logits is not None:
        check_sinks(q, request.sink_logits)
    if torch.jit.is_tracing():  # type: ignore[attr-defined] # public, and not listed
        fail(
            "torch.jit.trace cannot hold it, because values choose what is computed; use torch.export.export or "
            "torch.compile, and for ONNX torch.onnx.export with dynamo=True.",
            RuntimeError,
        )
    if context.autocast is not None:
        with under_autocast(q, k, v) as (q, k, v):
            return attend(q, k, v, request)
    are_plain = type(q) is type(k) is type(v) is Tensor and not (q.is_nested or k.is_nested or v.is_nested)
    if not are_plain and any_nested(q, k, v):
        return as_nested(q, *attend(*laid_end_to_end(q, k, v, without_plan(q, k, request))))
    q, k, v = as_kernels_read(q, k, v)
    if request.dropout is not None:
        return with_dropout(attend, q, k, v, request, at_once=_dropout_at_once)
    if context.is_transformed and not context.is_invariant and request.backend not in ("reference", "sdpa"):
        with_tangents = _attend_forward(q, k, v, request)
        if with_tangents is not None:
            return with_tangents
    has_more = request.score is not None or request.params or request.q_offset is not None
    if held is not None and held.owns_tensors and not (has_more or context.has_transforms):
        results = _attend_by_plan(q, k, v, held, request, context)
    else:
        request = request if held is None else without_plan(q, k, request)
        request = _with_plain_tensors(request) if context.has_transforms else request
        results = _attend(q, k, v, request, context, known_call(q, k, v, request, context))
    # Whoever makes the call again for a backward pass compares what it read.
    return checkpointing.watched(results, lambda: _check_of_tensors(q, k, request))  # type: ignore[return-value]


def _dropout_at_once(
    q: Tensor, k: Tensor, v: Tensor, few: Tensor, request: Request, dropout: Dropout
) -> Results | None:
    """Return the results of a call with dropout that has one backward pass, or None if it is to have two.

    Its kernel gives no lse, and no gradients but those of q, k and v. Where another backend is the fastest for kept
    pairs, that one runs them.

    few: v, or as much of it as the lse takes.
    request: without dropout.
    """
    context, sinks = Context.now(q.device), request.sink_logits
    is_plain = not (request.return_lse or request.kernel_options or request.must_be_invariant)
    is_for_flex = q.device.type in _KINDS_ON and request.backend_name in ("auto", "flex")
    if not (is_plain and is_for_flex) or context.is_transformed or context.is_capturing:
        return None
    backend = f"{request.backend}, {dropout.dropped} pairs dropped of {dropout.p}"
    alone = without_plan(q, k, request)._replace(backend=backend, sink_logits=None)
    known = known_call(q, k, v, alone, context)
    if known is None or any(t.requires_grad for t in (*known.tensors, *([] if sinks is None else [sinks]))):
        return None

    def fastest(call: Call) -> Kernel:
        of_kept = plan_call(q, k, v, kept_of(q, k, request, dropout._replace(seed=0))).call  # nothing is drawn
        runs_flex = choose(of_kept)[0][0].name == "flex" if request.backend == "auto" else not why_not("flex", of_kept)
        return DropoutKernel(call, dropout.dropped, dropout.p) if runs_flex and dropout.p < 1 else Kernel()

    (kernel, forms), planned = _ready_of_own_key(known, q, k, v, alone, context, fastest)
    if not (isinstance(kernel, DropoutKernel) and kernel.fits):
        return None
    change = dropout.kept(tuple(q.shape[:3]), k.shape[2], q.device)
    _, lse = attend(q.detach(), k.detach(), few, request._replace(return_lse=True))
    ready = Ready(kernel, (*forms, Drawn.of(change, cast(Tensor, lse), dropout.p)))
    try:
        inputs = Inputs(q, k, v, None, Plans(None))
        out, *_ = ready(q, k, v) if planned is None else proven(planned.call, ready, inputs)
    except Unavailable as error:
        _log.info("dropout takes two backward passes here: %s", error)
        kernel.fits = False
        return None
    return checkpointing.watched((out, None), lambda: _check_of_tensors(q, k, request))  # type: ignore[return-value]


def _ready_of_own_key(
    known: Known | None, q: Tensor, k: Tensor, v: Tensor, request: Request, context: Context,
    kernel: Callable[[Call], Kernel],
) -> tuple[Ready, Planned | None]:  # fmt: skip
    """Return what a kernel that is no backend reads of a call, and how it is planned if none of its kind was before.

    request: its `backend` is a name that no backend has, so that caches do not take its calls for others.
    known: how caches find this request.
    """
    ready, planned = plan_again(known), None
    if ready is None:
        planned = plan_call(q, k, v, request._replace(backend="auto"), context)
        ready = kernel(planned.call).ready(Inputs(q, k, v, None, planned.plans))
        if known is not None and not context.is_capturing:
            keep(known, Result(q, None, ready), planned)
    return ready, planned


def _by_its_mask(q: Tensor, k: Tensor, request: Request) -> Request:
    """Return a request with the mask of a block mask that knows it, so that the same kernel runs for both."""
    from flexmasks.plans.portable import PortableBlockMask  # loads flex_attention, which made the block mask

    blocks = request.block_mask
    if not isinstance(blocks, PortableBlockMask) or request.mask is not None:
        return request
    if request.q_offset is not None and not (type(request.q_offset) is int and request.q_offset == 0):
        return request
    if tuple(blocks.seq_lengths) != (*q.shape[2:3], *k.shape[2:3]):  # which is an error
        return request
    of_blocks = blocks.source.q_offset
    if request.q_offset is not None and not (type(of_blocks) is int and of_blocks == 0):  # that of the score
        return request
    return request._replace(block_mask=None, mask=blocks.source.mask, q_offset=blocks.source.q_offset)


def unseen(is_traced: bool) -> contextlib.AbstractContextManager[None]:
    """Let selective activation checkpointing not look into a call.

    The checkpointing keeps results of single operations, which kernels overwrite, and counts operations, of which plans
    make some at their first call only. What is inside is computed again, but for torch's own attention.

    is_traced: whether torch.compile traces the call. The checkpointing then looks at its graph.
    """
    if is_traced or not checkpointing.in_selective_checkpointing():
        return contextlib.nullcontext()
    return checkpointing.unseen_by_checkpointing()


def _attend_in_graph(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call that torch traces."""
    if request.sink_logits is not None:
        check_sinks(q, request.sink_logits)
    with under_autocast(q, k, v) as (q, k, v):
        if any_nested(q, k, v):
            dense = laid_end_to_end(q, k, v, without_plan(q, k, request), is_traced=True)
            return as_nested(q, *_attend_in_graph(*dense), is_traced=True)
        from flexmasks import inside_compile  # loads torch's compilers

        q, k, v = as_kernels_read(q, k, v)
        if request.dropout is not None:
            return with_dropout(_attend_in_graph, q, k, v, request, is_traced=True)
        result = inside_compile.run(q, k, v, with_lse_for_sinks(without_plan(q, k, request)))
        return with_sinks_of(result, request)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, request: Request, context: Context, known: Known | None
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call, by what earlier calls have made, or from the start."""
    if known is not None and not (known.tensors and context.is_capturing):  # a captured call plans at each replay
        results = run_known(known, q, k, v, request)
        if results is not None:
            return results
    states = [] if known is None else list(map(identity, known.tensors))
    result, planned = run_first_time(q, k, v, with_lse_for_sinks(request), context)
    if known is not None and result.ready is not None and planned is not None and not context.is_capturing:
        now = known_call(q, k, v, request, context)
        # Another thread may have changed a variable or a tensor meanwhile.
        if now is not None and now.is_same(known) and states == list(map(identity, now.tensors)):
            keep(known, result, planned)
    return with_sinks_of(result, request)


def _attend_by_plan(
    q: Tensor, k: Tensor, v: Tensor, held: HeldPlan, request: Request, context: Context
) -> tuple[Tensor, Tensor | None]:
    """Return what `_attend` does, by a plan that owns its tensors and has what its earlier calls made ready."""
    key, captures = _key_of_sizes(q, k, v, request, context), bool(held.tensors) and context.is_capturing
    launch, state = held.launch(key)
    refused: Kernel | None = None
    if launch is not None and not (captures and held.of_one_step):
        launch.is_in_graph |= captures
        results, refused = _run_ready(launch.ready, q, k, v, request)
        if results is not None:
            return results
        held.launches.pop(key, None)
    request = without_plan(q, k, request)
    if key is not None and (held.of_one_step or not held.tensors):  # it takes what calls of other plans have made
        known = known_call(q, k, v, request, context, key)
        results = _attend(q, k, v, request, context, known)
        found = None if known is None else _READY.get(*known)
        if found is not None and not captures:
            held.keep(key, Launch(found), state)
        return results
    known = None if key is None or captures else known_call(q, k, v, request, context, key)
    if known is not None:
        results, launch = _run_by_kind(known, q, k, v, request, refused, keeps=False)
        if launch is not None and results is not None:
            held.keep(key, launch, state)
            return results
    result, planned = run_first_time(q, k, v, with_lse_for_sinks(request), context)
    if known is not None and result.ready is not None and planned is not None and planned.call.holds_aliases:
        held.keep(key, Launch(result.ready, planned.plans, has_faster=result.faster is not None), state)
        _keep_kind(known, result, planned)
    return with_sinks_of(result, request)


def _attend_forward(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Results | None:
    """Return output and lse with their tangents, or None if the reference must differentiate its own operations."""
    if computes_nothing(q, k, v):
        return None
    request = without_plan(q, k, request)
    duals = tangents.Duals.of(q, k, v, tuple(request._replace(params=dict(request.params))))
    if duals is None:
        return None
    request = Request(*duals.others)
    with compat.outside_forward_derivatives():
        out, lse, *of_results = _with_tangents(duals, request)
    results = tangents.with_tangents((out, lse), of_results)
    return results[0], results[1] if request.return_lse else None


def _with_tangents(duals: tangents.Duals, request: Request) -> tuple[Tensor, ...]:
    """Return output, lse and their tangents."""
    q, k, v = duals.qkv
    context = Context.now(q.device)
    for_tangents = request._replace(backend="tangents", sink_logits=None, return_lse=True, kernel_options=None)
    known = known_call(q, k, v, for_tangents, context)
    ready, _ = _ready_of_own_key(
        known, q, k, v, for_tangents, context, lambda call: tangents.TangentKernel(call.scale, q, k, v)
    )
    kernel, (form,) = cast(tangents.TangentKernel, ready.kernel), ready.forms
    by_backend = request.backend != "auto" or request.sink_logits is not None or not kernel.gives_output(q, v, form)
    results: Any = None
    if by_backend or learns_any((*duals.qkv, *duals.tangents)):
        results = attend(q, k, v, request._replace(return_lse=True))
    try:
        return kernel.run(duals.qkv, duals.tangents, results, form)
    except Unavailable:  # Triton has failed, and is not asked again
        return _with_tangents(duals, request)


def _check_of_tensors(q: Tensor, k: Tensor, request: Request) -> Callable[[], None]:
    """Return what raises torch's error if a tensor that a call's mask or score reads has changed in place since."""
    request = without_plan(q, k, request)
    mask, score = from_arguments(request.mask, request.score, request.params)
    blocks = request.block_mask
    mask_mod, lists = (mask, None) if blocks is None else (blocks.mask_mod, lists_of(blocks))
    *_, check = frozen_functions(mask_mod, score, q, (request.q_offset, lists))
    return check


def _with_plain_tensors(request: Request) -> Request:
    """Return a request without the wrappers of torch.func.grad around tensors that have no gradients.

    These are whole numbers, and all that a mask holds. Nobody can read the memory of a wrapped tensor.
    """
    others = request.score, dict(request.params), request.q_offset
    if any(map(compat.is_wrapped, tensors_of((request.mask, others)))):
        with contextlib.suppress(Opaque):
            mask = with_tensors(request.mask, tangents.alone)
            score, params, offset = with_tensors(
                others, lambda t: t if t.is_floating_point() or t.is_complex() else tangents.alone(t)
            )
            return request._replace(mask=mask, score=score, params=params, q_offset=offset)
    return request


# --- what earlier calls have made ---


class Known(NamedTuple):
    """A call as caches find it: a key of all but tensors, and the tensors that its mask and score read."""

    key: Hashable
    tensors: list[Tensor]

    def is_same(self, other: Known) -> bool:
        return self.key == other.key and list(map(id, self.tensors)) == list(map(id, other.tensors))


def run_known(known: Known, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Results | None:
    """Return output and lse of a call that was made before, or None. What fails now is forgotten."""
    ready = _READY.get(*known)
    if ready is None:
        return _run_by_kind(known, q, k, v, request)[0]
    results, refused = _run_ready(ready, q, k, v, request)
    if results is None:
        _READY.drop(*known)
        if refused is not None:
            return _run_by_kind(known, q, k, v, request, refused)[0]
        _CALL_KINDS.drop((known.key, *_layouts(known.tensors)))
    return results


def _run_by_kind(
    known: Known, q: Tensor, k: Tensor, v: Tensor, request: Request, refused: Kernel | None = None, keeps: bool = True
) -> tuple[Results | None, Launch | None]:
    """Return output and lse of a call by the kind of such calls, and what ran it. None if it is to be planned.

    refused: a kernel that has run the call, and then found that it does not fit the values of the tensors.
    keeps: whether a call with the same tensors is to find what ran this one.
    """
    while True:
        launch = _launch_of_kind(known, refused)
        if launch is None:
            return None, None
        # What is kept would hold tensors that learn.
        is_kept = keeps and not any(t.requires_grad for t in known.tensors)
        if is_kept:
            _keep_ready(known, launch.ready)
        results, refused = _run_ready(launch.ready, q, k, v, request)
        if results is not None:
            return results, launch
        if is_kept:
            _READY.drop(*known)
        if refused is None:
            _CALL_KINDS.drop((known.key, *_layouts(known.tensors)))
            return None, None


def _run_ready(ready: Ready, q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Results | None, Kernel | None]:
    """Return output and lse of a call whose forms are made, or None if it failed, and the kernel if it has found that
    it does not fit the values.

    A call that failed is planned again. Errors that say nothing about it are raised.
    """
    try:
        if request.sink_logits is None:
            return ready.kernel(q, k, v, None, *ready.forms), None
        return with_sinks_of(ready(q, k, v, request.sink_logits), request), None
    except Exception as error:  # kernels raise errors of any type
        if isinstance(error, RefusedByAll) or passing_error(error) is not None:
            raise
        return None, ready.kernel if isinstance(error, Unfit) and not isinstance(error, Outgrown) else None


def keep(known: Known, result: Result, planned: Planned) -> None:
    """Keep what made the result of a call for the same tensors, and its kind for others."""
    key, tensors = known
    ready = cast(Ready, result.ready)
    if planned.call.holds_aliases:
        _READY.put(key, tensors, ready, ENTRY + ready.nbytes + planned.aliases.nbytes)
    elif not any(t.requires_grad for t in tensors):
        return
    _keep_kind(known, result, planned)


def _keep_kind(known: Known, result: Result, planned: Planned) -> None:
    """Keep the kind of a call, for other tensors."""
    if not (known.tensors and planned.call.device_type in _KINDS_ON):
        return
    with contextlib.suppress(Opaque):
        first, key = _kind_of(known, planned, cast(Ready, result.ready).kernel), (known.key, *_layouts(known.tensors))
        former = _CALL_KINDS.get(key)
        if first.kernel.fits_by_values:
            first.others = None if former is None else former.others
        elif former is not None and former.kernel.fits_by_values:
            former.others, first = first, former
        elif result.faster is not None:
            others, first = first, _kind_of(known, planned, result.faster)
            first.others, first.is_unrun = others, True
            first.refuse()
        _CALL_KINDS.put(key, (), first, 2 * ENTRY)


def _kind_of(known: Known, planned: Planned, kernel: Kernel) -> Kind:
    return Kind(kernel, planned.plans, known.tensors, planned.where_last)


def _launch_of_kind(known: Known, refused: Kernel | None = None) -> Launch | None:
    """Return a call with these tensors, made by the kind of a call with other ones, or None.

    refused: a kernel that has run the call, and then found that it does not fit the values of the tensors.
    """
    tensors = known.tensors
    if not tensors or tensors[0].device.type not in _KINDS_ON or not all(map(is_dense, tensors)):
        return None
    first = _CALL_KINDS.get((known.key, *_layouts(tensors)))
    for kind in () if first is None else first.in_turn(refused):
        try:
            made = kind.ready(tensors)
        except Unfit as reason:
            if isinstance(reason, Outgrown):
                return None
        except Exception as error:  # a form that is planned from the start may raise anything, which that call says
            if passing_error(error) is not None:
                raise
            return None
        else:
            return None if kind.is_unrun else Launch(*made, has_faster=kind is not first)
    return None


def plan_again(known: Known | None) -> Ready | None:
    """Do all that a call does before its kernel runs. The result is None if no call of its kind was made before."""
    ready = None if known is None else _READY.get(*known)
    launch = None if known is None or ready is not None else _launch_of_kind(known)
    if known is not None and launch is not None:
        ready = launch.ready
        _keep_ready(known, launch.ready)
    return ready


def _keep_ready(known: Known, ready: Ready) -> None:
    copied = sum(t.nbytes for t in known.tensors if not t.is_contiguous())
    _READY.put(known.key, known.tensors, ready, ENTRY + ready.nbytes + copied)


def _layouts(tensors: list[Tensor]) -> list[Hashable]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def known_call(
    q: Tensor, k: Tensor, v: Tensor, request: Request, context: Context, of_sizes: Hashable = None
) -> Known | None:
    """Return how a call is found, or None if it cannot be kept.

    of_sizes: the key of its sizes, if that is known.
    """
    of_sizes = of_sizes or _key_of_sizes(q, k, v, request, context)
    if of_sizes is None:
        return None
    tensors: list[Tensor] = []
    blocks, offset = request.block_mask, request.q_offset
    if offset is None and q.shape[2:3] == k.shape[2:3]:
        offset = 0
    functions = _simple_key(request, offset, tensors) if blocks is None else None
    if functions is None:
        mask: Any = functions_of("mask", request.mask)
        if blocks is not None:
            mask = blocks.mask_mod, lists_of(blocks), blocks.BLOCK_SIZE, blocks.seq_lengths
        structure, leaves = flatten((mask, functions_of("score", request.score), request.params, offset))
        if structure.unreadable:
            return None
        functions, tensors = structure.key, leaves.tensors
    learning = tuple([n for n, t in enumerate(tensors) if t.requires_grad]) if context.wants_grad else ()
    return Known((functions, of_sizes, learning), tensors)


def _key_of_sizes(q: Tensor, k: Tensor, v: Tensor, request: Request, context: Context) -> Hashable | None:
    """Return the key of a call without its mask and score, or None if the call cannot be kept.

    It has all on which the choice of a backend depends, so that no call takes the kernel of another one.
    """
    scale, with_lse, backend = request.scale, request.return_lse, request.backend
    if not (type(q) is type(k) is type(v) is Tensor and type(backend) is str and type(with_lse) is bool):
        return None
    if request.block_mask is not None:
        is_alone = isinstance(request.block_mask, compat.BlockMask) and request.mask is None
        if not is_alone or context.has_transforms:
            return None
    if type(scale) not in _SCALES or context.is_transformed:
        return None
    try:
        layouts = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    except RuntimeError:  # nested and sparse tensors have none; checks say so
        return None
    has_sinks = request.sink_logits is not None
    return (
        scale, with_lse or has_sinks, has_sinks, backend,
        None if request.kernel_options is None else repr(request.kernel_options), layouts, q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, q.requires_grad, k.requires_grad, v.requires_grad, context,
    )  # fmt: skip


def _simple_key(request: Request, offset: Any, tensors: list[Tensor]) -> Hashable | None:
    """Return the key of a call with common arguments only, else None.

    Common arguments are masks and scores of the library and plain functions, with numbers and tensors. This function
    takes a third of the time of `flatten`, which reads everything.
    """
    key: list[Hashable] = [offset]
    for what, value in (("mask", request.mask), ("score", request.score)):
        if value is None:
            key.append(None)
        elif type(value) is str and is_by_library(what, value):
            key.append(value)
        elif type(value) is (Mask if what == "mask" else Score) and value._own_key is not None:
            own_key, own_tensors = value._own_key
            key += [what, own_key]
            tensors += own_tensors
        else:
            if type(value) is (Mask if what == "mask" else Score):
                value = value._alone
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
    for name, value in request.params.items():
        kind: Any = type(value)
        if kind is Tensor and not vars(value):
            tensors.append(value)
            key.append(name)
        elif kind is int or kind is bool:
            key += [name, kind, value]
        elif kind is float:
            key += [name, repr(value)]  # 0.0 and -0.0 are equal, and differ in what they do
        else:
            return None
    return tuple(key)


# --- a call from the start ---


class Planned(NamedTuple):
    """The facts of a call, and the plans that it was made from."""

    call: Call
    plans: Plans
    aliases: Aliases
    where_last: Tensor | None = None  # where the last queries of each sequence start, if the plans read it


def run_first_time(
    q: Tensor, k: Tensor, v: Tensor, request: Request, context: Context
) -> tuple[Result, Planned | None]:
    """Check, plan and run a call.

    Returns the result, and the plans if what was made may be cached.
    """
    if computes_nothing(q, k, v):
        return Result(*_run_nothing(q, k, v, request)), None
    planned = plan_call(q, k, v, request, context)
    inputs = Inputs(q, k, v, request.sink_logits, planned.plans)
    return run_on_backend(planned.call, inputs, request.backend_name), planned


def _run_nothing(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return the result of a call that computes nothing.

    Its mask and score are checked, but for the values of tensors.
    """
    if compat.in_tracing_mode() and any(isinstance(x, compat.FakeTensor) for x in (q, k, v)):
        fail(
            "make_fx cannot hold it with fake tensors, because blocks are planned; use torch.export.export, "
            "torch.compile, or make_fx with tracing_mode='real'.",
            RuntimeError,
        )
    size, values = checked(q, k, v, request), from_arguments(request.mask, request.score, request.params)
    size = unread(size, aligned(ATTENTION, request.q_offset, size, values))
    for value in values:
        if value is not None:
            value._checked(size)
    out, lse = attend_nothing(q, k, v, tensors_that_learn(values[1]))
    return out, lse if request.return_lse else None


def greatest(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
    """Return the greatest score of each query of a call, [B, H, Q], see `attention`."""
    refuse_in_graph(
        "`return_max` is not for a call inside torch.compile; there, use flexmasks.flex.flex_attention with "
        "return_aux=AuxRequest(max_scores=True)."
    )
    with under_autocast(q, k, v) as (q, k, v):
        q, k, v = as_kernels_read(q, k, v)
        if any_nested(q, k, v):
            fail("`return_max` takes no jagged tensors; pass padded ones, with a mask of their lengths.", TypeError)
        if computes_nothing(q, k, v):
            precise = torch.promote_types(q.dtype, torch.float32)
            return torch.full(q.shape[:3], -math.inf, dtype=precise, device=q.device)
        call, (mask, score, *_), *_ = plan_call(q, k, v, without_plan(q, k, request))
        return greatest_scores(q, k, None if score is None else score.mod(), mask.block_mask, call.scale)


def refuse_in_graph(reason: str) -> None:
    if compat.is_compiling():
        fail(reason, RuntimeError)


def tensors_that_learn(score: Score | None) -> list[Tensor]:
    """Return the tensors of a score change that learn."""
    return [] if score is None else [t for t in score._tensors() if t.requires_grad]


def plan_call(q: Tensor, k: Tensor, v: Tensor, request: Request, context: Context | None = None) -> Planned:
    """Check a call's arguments and plan its mask and score."""
    size = checked(q, k, v, request)
    mask, score = from_arguments(request.mask, request.score, request.params)
    q_offset = aligned(ATTENTION, request.q_offset, size, (mask, score))
    aliases = Aliases()
    mask_plan: MaskPlan | GivenPlan
    if request.block_mask is not None:
        mask_plan = GivenPlan(as_lists_of_kernels(request.block_mask), aliases)
    else:
        mask = get_mask("full") if mask is None else mask
        mask_plan = MaskPlan(
            mask, size, q_offset, lift=True, block_size=block_size_for(size), aliases=aliases, allows_bounds=True,
            exact=False,
        )  # fmt: skip
    score_plan = None if score is None else ScorePlan(score, size, q_offset, aliases=aliases)
    plans = [mask_plan] if score_plan is None else [mask_plan, score_plan]
    learns = learns_any(t for plan in plans for t in plan.tensors)
    needs_grad = learns_any((q, k, v))
    call = Call(
        q=Operand.of(q),
        k=Operand.of(k),
        v=Operand.of(v),
        mask=mask_plan,
        score=score_plan,
        q_offset=q_offset if isinstance(q_offset, int) else None,
        scale=None if request.scale is None else float(request.scale),
        with_lse=request.return_lse,
        kernel_options=request.kernel_options,
        needs_grad=learns or needs_grad,
        learns=learns,
        context=context or Context.now(q.device),
        has_sinks=request.sink_logits is not None,
    )
    return Planned(call, Plans(mask_plan, score_plan), aliases)


def learns_any(tensors: Iterable[Tensor]) -> bool:
    """Return whether a gradient of some of the tensors is wanted."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


# --- sinks ---


def with_lse_for_sinks(request: Request) -> Request:
    """Return the request for a backend: with sinks it asks for the lse, into which they are folded."""
    return request if request.sink_logits is None else request._replace(return_lse=True)


def with_sinks_of(result: Result, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call, into which its sinks are folded."""
    if request.sink_logits is None:
        return result.out, result.lse
    if result.has_sinks:
        return result.out, result.lse if request.return_lse else None
    given = cast(Tensor, result.lse), request.sink_logits, request.return_lse
    if not request.must_be_invariant:
        return with_sinks(result.out, *given)
    starts = None if result.ready is None else result.ready.kernel.starts(result.ready.forms)
    return with_sinks(result.out, *given, by_operator=True, starts=starts)


# --- explanations ---


def explain(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Explanation:
    """Explain how a call of `attention` would run."""
    must_be_invariant = is_invariant() or (isinstance(request.mask, HeldPlan) and request.mask.is_invariant)
    if request.block_mask is not None and is_invariant():
        request = _by_its_mask(q, k, request)
    request = without_plan(q, k, request)
    if request.sink_logits is not None:
        check_sinks(q, request.sink_logits)
        request = request._replace(sink_logits=None, return_lse=True)
    with under_autocast(q, k, v) as (q, k, v):
        if any_nested(q, k, v):
            q, k, v, request = laid_end_to_end(q, k, v, request)
        q, k, v = as_kernels_read(q, k, v)
        if computes_nothing(q, k, v):
            fail("`explain` needs q, k and v with data, on a real device, and at least one query and key.")
        if request.dropout is not None:  # of its two calls that for the kept pairs; nothing is drawn
            request = kept_of(q, k, request, request.dropout._replace(seed=0))
        context = Context.now(q.device)._replace(is_invariant=must_be_invariant)
        call, plans, *_ = plan_call(q, k, v, request, context)
        able, (kernel, forms), reasons = made_ready(call, Inputs(q, k, v, None, plans), request.backend_name)
        is_auto = request.backend == "auto"
        chosen = able[0] if is_auto else BACKENDS[request.backend_name]
        why = "was asked for" if not is_auto else "comes first" if call.context.is_invariant else "is faster here"
        able_too = f"it can run the call, but {chosen.name} {why}"
        others = {
            b.name: reasons.get(b.name) or b.unfit(call) or able_too for b in BACKENDS.values() if b is not chosen
        }
        compiles, blocks = kernel.compiles(forms, q, k, v), kernel.blocks(plans)
        mask = plans.mask.resized(blocks.block_mask.BLOCK_SIZE) or plans.mask
        plan = kernel.instead_of_blocks(forms) or mask.explained()
        form = f"data: {kernel.why_data}" if kernel.why_data else "its function"
        not_here = tuple(name for name, reason in others.items() if is_not_here(reason))
        invariance = _invariance(call, request.backend_name, chosen.name)
        return Explanation(
            chosen.name, compiles, chosen.recompiles_on, others, plan, form, blocks, invariance, not_here
        )


def _invariance(call: Call, asked_for: str, chosen: str) -> str:
    """Say whether the result of a sequence depends on what else is in a call, see `invariant`."""
    if call.context.is_invariant:
        return "yes"
    inside = replace(call, context=call.context._replace(is_invariant=True))
    try:
        return f"no, but inside flexmasks.invariant(), where {only_choice(inside, asked_for)} runs such calls"
    except ValueError:
        return f"no, {why_not(chosen, inside)}"
