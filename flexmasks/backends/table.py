"""The table of backends, and the choice among them.

`backend="auto"` asks the backends in the order that `_fastest_first` makes of the table for a call.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexmasks.backends import (
    cudnn,
    decode,
    fa4,
    fa4_package,
    flex,
    flex_flash,
    flex_invariant,
    reference,
    sdpa,
    short,
    times,
    waiting,
)
from flexmasks.backends.call import Call, Inputs, Kernel, Ready, RefusedByAll, Result, Unavailable, first_line
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.errors import Unfit, passing_error
from flexmasks.plans.score_plan import ScorePlan

_log = logging.getLogger("flexmasks")
_FLEX_RECOMPILES_ON = (
    "another function of the mask or score, another number in them (up to six values, then the number is an input, or "
    "the mask goes as data), scale, dtype, number of heads, head size, gradients or lse wanted or not; the first few "
    "new batch sizes, lengths and memory layouts; never the values of tensors"
)
_FA4_RECOMPILES_ON = (
    "another dtype, head size or cap (up to six values); the first use of causal, windows, sequences or a tensor "
    "`q_offset`; never another number"
)


def _varies(call: Call) -> str | None:
    return "what it computes of a sequence depends on what else is in the call, inside flexmasks.invariant()"


_CUDNN_RECOMPILES_ON = "another dtype, size or memory layout of q, k and v; gradients or lse wanted or not"


@dataclass(frozen=True)
class Backend:
    """One way to run a call."""

    name: str
    refuses: Callable[[Call], str | None]  # why it cannot run a call, or None
    kernel: Callable[[Call], Kernel]
    adds_in_any_order: Callable[[Call], str | None] = lambda call: None  # what it sums in changing order, or None
    recompiles_on: str = ""  # changes that make it compile again
    reads_pages: bool = False
    reads_any_dtype: bool = False  # k and v may have another dtype than q
    can_be_traced: bool = False  # torch.compile may trace a call, see `flexmasks.inside_compile`
    # Why the results of a sequence may depend on what else is in the call, or None, see `flexmasks.invariant`.
    varies: Callable[[Call], str | None] = _varies
    unfit: Callable[[Call], str] = lambda call: ""  # why a look at the mask, which takes time, speaks against it, or ""
    lacks: Callable[[], str] = lambda: ""  # what this machine lacks for any call, in the words of `refuses`, or ""


BACKENDS = {
    b.name: b
    for b in (
        Backend(
            "fa4", fa4.refuses, fa4.kernel, fa4.adds_in_any_order, _FA4_RECOMPILES_ON, reads_pages=True,
            can_be_traced=True, varies=fa4.varies, lacks=fa4_package.why_unusable,
        ),
        Backend("decode", decode.refuses, decode.kernel, reads_pages=True),
        Backend("sdpa", sdpa.refuses, sdpa.kernel, can_be_traced=True),
        Backend(
            "flex_flash", flex_flash.refuses, flex_flash.kernel, flex_flash.adds_in_any_order, _FLEX_RECOMPILES_ON,
            can_be_traced=True, lacks=fa4_package.why_unusable,
        ),
        Backend(
            "flex", flex.refuses, flex.kernel, flex.adds_in_any_order, _FLEX_RECOMPILES_ON, reads_any_dtype=True,
            can_be_traced=True, varies=flex_invariant.varies,
        ),
        Backend(
            "cudnn", cudnn.refuses, cudnn.kernel, recompiles_on=_CUDNN_RECOMPILES_ON, unfit=cudnn.unfit,
            lacks=cudnn.why_unusable,
        ),
        Backend("short", short.refuses, short.kernel, can_be_traced=True),
        Backend("reference", reference.refuses, reference.kernel, reads_any_dtype=True, can_be_traced=True,
            varies=reference.varies),
    )
}  # fmt: skip
_SIZE_FOR_BIAS = 32  # of a head, up to which "short" adds a bias as fast as others (H100)
_MAX_QUERIES_OF_DECODE = 32  # on a GPU; for more, flex is faster, but from pages
_COST_OF_ORDER = "the reference, which adds in order, takes many times as long"

_FAILURES: Part[str] = Part(KINDS, "failures")  # why a backend failed for a kind of call: "auto" leaves it out


def choose(call: Call) -> tuple[list[Backend], dict[str, str]]:
    """Return the backends that can run a call, fastest first.

    Also returns the reasons against the other backends, by name.
    """
    able, reasons = [], {}
    for backend in _fastest_first(call):
        reason = _reason_against(backend, call)
        if reason is None:
            able.append(backend)
        else:
            reasons[backend.name] = reason
    return able, reasons


def is_not_here(reason: str) -> bool:
    """Return whether a reason against a backend is that this machine, or the device of a call, lacks it."""
    is_of_device = reason.startswith(("it runs on ", "it does not run on "))
    return is_of_device or any(reason == backend.lacks() for backend in BACKENDS.values())


def _fastest_first(call: Call) -> list[Backend]:
    """Return the backends of "auto" by their speed for a call.

    The reference is last, but for kernels whose compilation a small call on a CPU waits with.
    """
    if call.context.is_invariant:
        return list(BACKENDS.values())
    if not call.on_gpu or call.pages is not None:
        waits = waiting.uncompiled(call) is not None
        return [*(b for b in BACKENDS.values() if not (waits and b.name == "flex")), *[BACKENDS["flex"]] * waits]
    is_decoding = call.q.shape[2] <= _MAX_QUERIES_OF_DECODE and why_not("decode", call) is None
    if is_decoding or _is_for_short(call):
        first = ["sdpa", "decode" if is_decoding else "short"]
    else:
        able = [name for name in times.MEASURED if _may_be_able(name, call)]
        first = ["cudnn"] * _is_for_cudnn(call, able) + times.fastest(call, able)
    return [BACKENDS[name] for name in (*first, *(name for name in BACKENDS if name not in first))]


def _may_be_able(name: str, call: Call) -> bool:
    """Return whether a backend may be able to run a call. Whether FLASH is takes a look at functions, at its turn."""
    reason = fa4_package.refuses_package(call) if name == "flex_flash" else why_not(name, call)
    return reason is None


def _is_for_cudnn(call: Call, able: list[str]) -> bool:
    """Return whether "cudnn" is best for a call on a GPU that others may be able to run."""
    if {"fa4", "sdpa", "short"} & {*able} or why_not("cudnn", call) is not None:
        return False
    return cudnn.is_fastest(call, "flex_flash" in able and not call.context.must_be_deterministic)


def _is_for_short(call: Call) -> bool:
    """Return whether "short" is best for a call on a GPU, whatever its size.

    It is where a score adds what learns: other kernels sum its gradient by atomics, in another order at each run. Where
    a tensor is added as it is, "short" is as fast as others in small heads, and needs no blocks.
    """
    is_bias = isinstance(call.score, ScorePlan) and call.score.is_bias and call.q.shape[3] <= _SIZE_FOR_BIAS
    return (call.learns or is_bias) and short.refuses(call) is None


def _reason_against(backend: Backend, call: Call) -> str | None:
    reason = why_not(backend.name, call)
    if reason or call.is_traced or call.context.is_invariant:
        return reason
    kind = backend.name, call.outcome_key
    return _FAILURES.get(kind) or _FAILURES.get((*kind, *_lengths(call)))


def why_not(name: str, call: Call) -> str | None:
    """Return why a backend cannot run a call, also where it must be deterministic or invariant, or None."""
    backend = BACKENDS[name]
    if call.is_traced and not backend.can_be_traced:
        return "torch.compile does not trace it"
    if call.pages is not None and not backend.reads_pages:
        return "it reads no pages"
    if call.k.dtype != call.q.dtype and not backend.reads_any_dtype:
        return "its kernel takes k and v in the dtype of q only"
    is_invariant = call.context.is_invariant
    sums = backend.adds_in_any_order(call) if is_invariant or call.context.must_be_deterministic else None
    if sums is not None:
        forbids = "flexmasks.invariant()" if is_invariant else "torch.use_deterministic_algorithms(True)"
        reason = f"it adds {sums} in changing order, which {forbids} forbids"
        # Where "short" does not run the call either, nothing but the reference does.
        is_slow = name == "flex" and not is_invariant and why_not("short", call) is not None
        return f"{reason}; {_COST_OF_ORDER}" if is_slow else reason
    against = backend.refuses(call)
    return backend.varies(call) if is_invariant and against is None else against


def warn_of_dtypes(name: str, call: Call) -> None:
    """Log once that the reference runs a call because k and v have another dtype than q."""
    if name == "reference" and call.k.dtype != call.q.dtype:
        _warn_of_dtypes(call.device_type, call.q.dtype, call.k.dtype, call.needs_grad)


@functools.cache
def _warn_of_dtypes(device: str, of_q: torch.dtype, of_k: torch.dtype, needs_grad: bool) -> None:
    _log.warning(
        'q is %s, k and v are %s, and on %s %s only backend "reference", which is slow, takes two dtypes: cast q, or k '
        "and v, to run faster", of_q, of_k, device, "with gradients" if needs_grad else "for this call",
    )  # fmt: skip


def warn_of_order(name: str, call: Call) -> None:
    """Warn, as torch with warn_only, of results that may differ from run to run."""
    sums = BACKENDS[name].adds_in_any_order(call) if call.context.settings[-1] else None
    if sums is not None:
        warnings.warn(
            f"flexmasks.attention: backend {name!r} adds {sums} in changing order, so results may differ from run to "
            "run, and torch.use_deterministic_algorithms(True, warn_only=True) is set.",
            stacklevel=2,
        )


def _cannot_run(name: str, reason: object) -> ValueError:
    return ValueError(f"flexmasks.attention: backend {name!r} cannot run this call: {reason}.")


def only_choice(call: Call, name: str) -> str:
    """Return the name of the backend of a call if only one may run it, else "auto".

    Inside `flexmasks.invariant` the first of the table that can run the call is the only one: another one would give
    other bits. Raises ValueError if it cannot run the call.
    """
    if name == "auto" and not call.context.is_invariant:
        return name
    if name == "auto":
        able, reasons = choose(call)
        if not able:
            here = {name: reason for name, reason in reasons.items() if not is_not_here(reason)}
            against = "; ".join(f"{name}: {reason}" for name, reason in reversed((here or reasons).items()))
            raise ValueError(
                "flexmasks.attention: no backend can run this call inside flexmasks.invariant(): "
                f"{against}. Make the call outside, or change what the reasons name."
            )
        return able[0].name
    reason = why_not(name, call)
    if reason is not None:
        raise _cannot_run(name, reason)
    return name


def made_ready(call: Call, inputs: Inputs, name: str) -> tuple[list[Backend], Ready, dict[str, str]]:
    """Return the backends that can run a call of a named backend or "auto", with the kernel of the first of them made
    ready, and the reasons against all others. Raises ValueError if a named backend cannot run it.
    """
    name = only_choice(call, name)
    able, reasons = choose(call)
    while True:
        chosen = able[0] if name == "auto" else BACKENDS[name]
        try:
            return able, chosen.kernel(call).ready(inputs), reasons
        except (Unfit, Unavailable) as reason:
            if name != "auto":
                raise _cannot_run(name, reason) from None
            reasons[able.pop(0).name] = str(reason)


def run(call: Call, inputs: Inputs, name: str, otherwise: Callable[[], Result] | None = None) -> Result:
    """Run a call on a named backend, or for "auto" on the fastest one.

    otherwise: runs for "auto" a call that no backend can run.

    If a backend fails with "auto", the next one runs the call, and a warning is logged. An error of missing memory is
    raised instead: another backend would hide it, and might take many times as long. So is the error by which torch's
    activation checkpointing ends what it computes again.
    """
    name = only_choice(call, name)
    if name != "auto":
        try:
            result = BACKENDS[name].kernel(call).first(call, inputs)
            warn_of_order(name, call)
            return result
        except Unfit as reason:
            raise _cannot_run(name, reason) from None
        except Unavailable as error:
            raise RuntimeError(f"flexmasks.attention: backend {name!r} failed: {error}") from error
    failures: dict[str, Exception] = {}
    faster: Kernel | None = None
    for backend in _fastest_first(call):
        if _reason_against(backend, call) is not None:
            continue
        kernel: Kernel | None = None
        try:
            kernel = backend.kernel(call)
            result = kernel.first(call, inputs)
        except Unfit:
            faster = kernel if faster is None and kernel is not None and kernel.fits_by_values else faster
            continue
        except Exception as error:  # kernels raise errors of any type
            if isinstance(error, RefusedByAll) or passing_error(error) is not None:
                raise
            failures[backend.name] = error
            continue
        for name, failure in failures.items():
            _leave_out(name, call, failure)
        warn_of_order(backend.name, call)
        warn_of_dtypes(backend.name, call)
        return result if faster is None else result._replace(faster=faster)
    if otherwise is not None:
        result = otherwise()
        for name, failure in failures.items():
            _leave_out(name, call, failure)
        return result
    # No backend can run the call, so it is itself wrong, such as by a function of the user's that raises.
    for failure in failures.values():
        if not isinstance(failure, Unavailable):
            raise failure
    reasons = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
    raise RuntimeError(f"flexmasks.attention: no backend could run this call. {reasons}")


def _leave_out(name: str, call: Call, error: Exception) -> None:
    """Leave a failed backend out for calls of a kind with the same lengths.

    After a second failure it is left out for any lengths.
    """
    why = str(error) if isinstance(error, Unavailable) else first_line(error)
    # Under transforms, or with views among its tensors, a failure may say nothing about the call's kind.
    if not (call.context.has_transforms or any(x.is_negated for x in (call.q, call.k, call.v))):
        kind, reason = (name, call.outcome_key), f"it failed before: {why}"
        if _FAILURES.get((*kind, *_lengths(call))) is None:  # else another thread has failed with these lengths
            _FAILURES.put(kind, (), "" if _FAILURES.get(kind) is None else reason, FACT)
            _FAILURES.put((*kind, *_lengths(call)), (), reason, FACT)
    _log.warning("backend %r failed and is left out for such calls: %s", name, why)


def _lengths(call: Call) -> tuple[int, int]:
    return call.q.shape[2], call.k.shape[2]
