"""Masks and scores that are prepared without reading a tensor's value on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import arguments, label, spread, try_examples
from hypothesis import strategies as st
from oracles import MASK_CASES, SCORE_CASES, Case, dense, offsets
from oracles.case import int32, int64
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flexmasks
from flexmasks.backends.fa4 import hide_padding
from flexmasks.blocks.elements import over_indices
from flexmasks.plans.plan import shifted_mask, shifted_score
from flexmasks.plans.windows import window_of
from flexmasks.spec.examples import example, on_device
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Modifier, ResolvedInner

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# Operations that read values on the host, or whose results have shapes that depend on values.
READS = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "unique", "bincount")


class NoLists(TorchFunctionMode):
    """A mode in which no tensor may become a list or an array, which is no operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (Tensor.tolist, Tensor.numpy, Tensor.__array__)
        return func(*args, **(kwargs or {}))


class NoReads(TorchDispatchMode):
    """A mode in which no operation may read a value on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_truth = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in (args[1] if isinstance(args[1], list) else ())
        )
        repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        assert not (name.lstrip("_").rstrip("0123456789") in {r.lstrip("_") for r in READS} or by_truth or repeats), name
        return func(*args, **(kwargs or {}))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a mask or score with every tensor among its parameters changed."""
    if isinstance(value, tuple):
        return tuple(with_tensors(v, change) for v in value)
    if isinstance(value, Modifier):
        return type(value)(value.definition, {n: with_tensors(v, change) for n, v in value.params.items()})
    return change(value) if isinstance(value, Tensor) else value


def tensors_of(value: Modifier) -> list[Tensor]:
    found: list[Tensor] = []
    with_tensors(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def leaves(resolved: Any) -> list[Tensor]:
    """Return the tensors in what `resolve` returned, in a fixed order."""
    if isinstance(resolved, Mapping):
        return [t for name in sorted(resolved) for t in leaves(resolved[name])]
    if isinstance(resolved, ResolvedInner):
        return [t for inner in resolved.resolved for t in leaves(inner)]
    return [resolved] if isinstance(resolved, Tensor) else []


def evaluated(value: Modifier, size: Size, starts: Tensor | None = None) -> Tensor:
    """Return the mask, or the changed scores, of all pairs; scores are 1 before the change."""
    bound = value.bind(value.resolve(size))
    shift = 0 if starts is None else starts
    indices = [torch.arange(n) for n in (size.batch, size.heads, size.q_len, size.kv_len)]
    if value.kind == "mask":
        return over_indices(shifted_mask(bound, shift))(*indices)
    ones = torch.ones([len(i) for i in indices], dtype=size.dtype)
    return over_indices(shifted_score(bound, shift), (0,))(ones, *indices)


def check_unread(value: Modifier, size: Size, starts: Tensor | None = None) -> Tensor:
    """Check a value whose tensors may not be read, and return the mask or the scores of all pairs.

    Its preparation reads nothing, and its operations have fixed shapes: a trace of them with other tensors gives the
    same result. What it shows is what it shows if its tensors may be read.
    """
    unread = replace(size, may_read=False)
    with NoReads(), NoLists():
        resolved = value.resolve(unread)

    def prepare(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        return leaves(with_tensors(value, lambda _: next(rest)).resolve(unread))

    tensors = tensors_of(value)
    with torch.no_grad():
        traced = make_fx(prepare, tracing_mode="fake")(*(torch.zeros_like(t) for t in tensors))
        pairs = zip(traced(*tensors), leaves(resolved), strict=True)
    assert all(torch.equal(got, want) for got, want in pairs)
    shown = evaluated(value, unread, starts)
    assert torch.equal(shown, evaluated(value, size, starts))
    return shown


def size_of(case: Case) -> tuple[Size, Tensor | None]:
    """Return the size of a case, and where the queries of each batch element start."""
    starts = offsets(case)
    size = Size(case.batch, case.heads, case.q_len, case.kv_len, CPU, max(starts), torch.float64)
    return size, None if max(starts) == 0 else torch.tensor(starts)


def value_of(kind: str, case: Case) -> Modifier:
    params = arguments(case)
    del params["q_offset"]
    get = flexmasks.get_mask if kind == "mask" else flexmasks.get_score
    return on_device(get(case.name, **params), CPU)


def test_no_reads_notices_reads() -> None:
    x = torch.arange(4)
    reads: list[Callable[[], Any]] = [
        lambda: int(x.max()),
        lambda: bool((x > 1).any()),
        lambda: x.tolist(),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.unique(),
        lambda: torch.equal(x, x + 0),
        lambda: x.repeat_interleave(x),
    ]
    for read in reads:
        with pytest.raises(AssertionError), NoReads(), NoLists():
            read()


@pytest.mark.parametrize("case", spread(MASK_CASES, 3), ids=label)
def test_masks(case: Case) -> None:
    got = check_unread(value_of("mask", case), *size_of(case))
    assert torch.equal(got, dense(case))


@pytest.mark.parametrize("case", spread(SCORE_CASES, 2), ids=label)
def test_scores(case: Case) -> None:
    check_unread(value_of("score", case), *size_of(case))


NAMES = [("mask", m.name) for m in flexmasks.list_masks()] + [("score", s.name) for s in flexmasks.list_scores()]
