"""`python recipes/benchmark.py choice`: the times of all backends, from which `backend="auto"` is fitted and judged."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import Benchmark, Row, text_table
from flexmasks import Mask, attention, get_mask, packed
from flexmasks.backends import forms, times
from flexmasks.backends.call import Call
from flexmasks.backends.table import choose
from flexmasks.bench.clock import wall_milliseconds
from flexmasks.plans.mask_plan import GivenPlan
from flexmasks.request import Request
from flexmasks.road import plan_call

FIT, CHECK = "fit", "check"
_REPEATS, _QUICK_REPEATS = 5, 2
_MILLISECONDS = 6.0  # of one repeat
_MOST_CALLS = 60  # in one repeat
_WARM_UP, _LEAST_WARM_UP = 6, 2  # plans of new tensors are exact at first, then recorded, then captured,
_LONG = 10.0  # which matters less for steps of so many milliseconds
_LEFT_OUT = "reference", "decode"  # one is for all that others cannot run, the other has rules of its own
MaskLike = Mask | Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A mask of some tokens. `mean` is the mean length of documents, or whatever its mask makes of it."""

    use: str
    batch: int
    length: int
    mean: int = 0


@dataclass(frozen=True)
class Group:
    """Cases of one mask, which share their kernels."""

    mask: str
    head_size: int
    cases: tuple[Case, ...]
    heads: int = 8
    kv_heads: int = 8

    @property
    def name(self) -> str:
        return f"{self.mask}, head size {self.head_size}, {self.heads} / {self.kv_heads} heads"


# --- masks, by names: what draws their tensors, and what makes a mask of these ---


def _ids(case: Case, at: torch.device, generator: torch.Generator) -> Tensor:
    """Documents end to end, of random lengths."""
    starts = torch.rand(case.batch, case.length, generator=generator) < 1 / case.mean
    return starts.cumsum(1).to(at)


def _offsets(case: Case, at: torch.device, generator: torch.Generator) -> Tensor:
    cuts = torch.randperm(case.length - 1, generator=generator)[: case.length // case.mean - 1] + 1
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([case.length])]).to(at)


def _lens(case: Case, at: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randint(case.length // 2, case.length + 1, (case.batch,), generator=generator).to(at)


def _prefixes(case: Case, at: torch.device, generator: torch.Generator) -> Tensor:
    return (_lens(case, at, generator) * 0.4).long()


def _nothing(case: Case, at: torch.device, generator: torch.Generator) -> Tensor:
    return torch.zeros(0)


def _document(ids: Tensor) -> Mask:
    return get_mask("document", document_ids=ids)


def _read(ids: Tensor) -> MaskLike:
    return lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])


def _some_read(ids: Tensor) -> MaskLike:
    """Tokens of even documents see all before them."""
    return lambda b, h, q, kv: (q >= kv) & ((ids[b, q] == ids[b, kv]) | (ids[b, q] & 1 == 0))


def _computed(_: Tensor) -> MaskLike:
    return lambda b, h, q, kv: (q >= kv) & ((q - kv < 600) | (kv % 256 < 32))


def _every_fourth(_: Tensor) -> MaskLike:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < 4096) & ((q - kv) % 4 == 0)


def _bits(_: Tensor) -> MaskLike:
    return lambda b, h, q, kv: (q >= kv) & (((q >> 5) ^ (kv >> 5)) % 4 < 2)


def _natten(case: Case) -> MaskLike:
    return get_mask("natten", height=case.length // 64, width=64, kernel=13)


_Draw = Callable[[Case, torch.device, torch.Generator], Tensor]
MASKS: dict[str, tuple[_Draw, Callable[[Tensor, Case, int], MaskLike]]] = {
    "causal": (_nothing, lambda x, case, size: get_mask("causal")),
    "full": (_nothing, lambda x, case, size: get_mask("full")),
    "window": (_nothing, lambda x, case, size: get_mask("sliding_window", window=_window(size))),
    "chunks": (_nothing, lambda x, case, size: get_mask("chunked_causal", chunk=_window(size))),
    "natten": (_nothing, lambda x, case, size: _natten(case)),
    "function": (_nothing, lambda x, case, size: _computed(x)),
    "function, all partial": (_nothing, lambda x, case, size: _every_fourth(x)),
    "function as data": (_nothing, lambda x, case, size: _bits(x)),
    "documents": (_ids, lambda x, case, size: get_mask("causal") & _document(x)),
    "documents both ways": (_ids, lambda x, case, size: _document(x)),
    "sequences": (_offsets, lambda x, case, size: packed("causal", x)),
    "prefix": (_prefixes, lambda x, case, size: get_mask("prefix_lm", prefix_len=x)),
    "lengths": (_lens, lambda x, case, size: get_mask("grouped_tril", seq_lens=x)),
    "function of ids": (_ids, lambda x, case, size: _read(x)),
    "function of some ids": (_ids, lambda x, case, size: _some_read(x)),
}


def _window(head_size: int) -> int:
    return {64: 512, 96: 2000}.get(head_size, 1024)


# --- cases: the first two differ in batch size and length, so that kernels for any length follow ---


def _cases(*cases: tuple[Any, ...]) -> tuple[Case, ...]:
    return tuple(Case(*case) for case in cases)


_PLAIN = _cases((FIT, 2, 1024), (FIT, 4, 2048), (FIT, 2, 4096), (FIT, 8, 4096), (FIT, 2, 16384), (FIT, 2, 32768))
_DOCUMENTS = _cases(
    (FIT, 2, 1024, 200), (FIT, 4, 2048, 600), (FIT, 2, 4096, 120), (FIT, 8, 4096, 250), (FIT, 2, 8192, 2500),
    (FIT, 4, 8192, 800), (FIT, 2, 16384, 400), (FIT, 2, 32768, 5000),
)  # fmt: skip
_FEW = _cases((FIT, 2, 2048, 500), (FIT, 4, 4096, 500), (FIT, 2, 16384, 1500))


def _checks(*cases: tuple[Any, ...]) -> tuple[Case, ...]:
    return _cases(*((CHECK, *case) for case in cases))


# The calls by which the choice is judged, forward alone and with gradients: 30 masks, 60 calls.
_CHECKED = {
    64: {
        "documents": _checks((8, 1024, 100), (2, 8192, 300), (4, 16384, 700), (2, 32768, 1500)),
        "causal": _checks((2, 8192)), "window": _checks((2, 8192)), "prefix": _checks((4, 2048)),
        "chunks": _checks((2, 32768)), "function": _checks((4, 8192)), "function of ids": _checks((4, 4096, 300)),
    },
    96: {
        "documents": _checks((4, 4096, 300), (2, 8192, 100), (2, 16384, 4000), (2, 32768, 700)),
        "causal": _checks((8, 1024)), "window": _checks((2, 32768)), "prefix": _checks((2, 16384)),
        "chunks": _checks((4, 4096)), "function": _checks((2, 2048)), "function of ids": _checks((2, 32768, 1500)),
    },
    128: {
        "documents": _checks((8, 2048, 300), (2, 4096, 1500), (4, 8192, 4000), (2, 32768, 100)),
        "causal": _checks((4, 8192)), "window": _checks((8, 2048)), "prefix": _checks((2, 8192)),
        "chunks": _checks((4, 16384)), "function": _checks((2, 16384)), "function of ids": _checks((4, 8192, 700)),
    },
}  # fmt: skip


def groups() -> list[Group]:
    """All groups, those first that tell most."""
    made = []
    for mask in ("documents", "function of ids", "window", "prefix", "function", "chunks", "causal"):
        for size in (128, 64, 96):
            fitted = _DOCUMENTS if MASKS[mask][0] is _ids else _PLAIN
            if size == 96:
                fitted = (*fitted[:2], fitted[3], fitted[6]) if mask == "documents" else (*fitted[:2], fitted[-2])
            made.append(Group(mask, size, (*fitted, *_CHECKED[size][mask])))
    made += [Group("function as data", size, _PLAIN[:5]) for size in (128, 64)]
    made += [Group("function, all partial", 128, _PLAIN[:5]), Group("function of some ids", 64, _DOCUMENTS[:7])]
    made += [Group("causal", 256, _PLAIN[:5]), Group("documents", 256, _DOCUMENTS[:6])]
    made += [Group("window", 256, _PLAIN[:5]), Group("function of ids", 256, _FEW), Group("function", 256, _FEW)]
    made += [Group("sequences", 128, _DOCUMENTS[:7]), Group("documents both ways", 128, _DOCUMENTS[:7], 16, 4)]
    made += [Group("lengths", 64, _PLAIN[:5]), Group("natten", 128, _PLAIN[:5])]
    made += [Group("function, all partial", 64, _PLAIN[:4]), Group("causal", 128, _PLAIN[:5], 16, 4)]
    made += [Group("sequences", 64, _DOCUMENTS[:7]), Group("full", 64, _PLAIN[:4])]
    return made


# --- measuring ---


def measure(group: Group, device: torch.device, repeats: int) -> Iterator[Row]:
    """The figures of a group's cases, each forward alone and with gradients, or without repeats none of them.

    Masks with tensors have new ones at each step, as in training; where the choice is judged, the same ones too.
    """
    for needs_grad in (False, True):
        for case in group.cases:
            yield from _measure_case(group, case, needs_grad, device, repeats)


def _measure_case(group: Group, case: Case, needs_grad: bool, device: torch.device, repeats: int) -> Iterator[Row]:
    def tensor(heads: int) -> Tensor:
        shape = case.batch, case.length, heads, group.head_size
        made = torch.randn(shape, dtype=torch.bfloat16, device=device)
        return made.transpose(1, 2).requires_grad_(needs_grad)

    inputs = q, k, v = tensor(group.heads), tensor(group.kv_heads), tensor(group.kv_heads)
    upstream = torch.randn_like(q).detach()
    draw, make = MASKS[group.mask]
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(case, device, generator) for _ in range(5)]
    others = itertools.cycle(drawn)
    mask = make(drawn[0], case, group.head_size)

    def step(backend: str, is_new: bool) -> None:
        given = make(next(others).clone(), case, group.head_size) if is_new else mask
        out = attention(q, k, v, mask=given, backend=backend)
        if needs_grad:
            torch.autograd.grad(out, inputs, upstream)

    call = plan_call(q, k, v, Request(mask=mask, params={})).call
    able, _ = choose(call)
    row: Row = {
        "use": case.use, "mask": group.mask, "batch": case.batch, "length": case.length, "mean": case.mean,
        "heads": group.heads, "kv_heads": group.kv_heads, "head_size": group.head_size, "dtype": "bfloat16",
        "gradients": needs_grad, **facts(call), "auto": able[0].name,
    }  # fmt: skip
    ways = [*(b.name for b in able if b.name not in _LEFT_OUT), *["auto"] * (case.use == CHECK)]
    for is_new in (False,) if draw is _nothing else (True,) if case.use == FIT else (True, False):
        steps = {name: functools.partial(step, name, is_new) for name in ways}
        milliseconds, failed = _timed(steps, device, repeats)
        row["sequences"] = sequences_of(call)
        yield {**row, "new": is_new, "ms": milliseconds, **({"failed": failed} if failed else {})}


def facts(call: Call) -> Row:
    """What the times of backends depend on, see `flexmasks.backends.times`."""
    batch, heads, length, _ = call.q.shape
    case, window = times.case_of(call), call.mask.window
    if window is not None and not window.has_sequences:
        full, partial = window.blocks(length)
    else:  # of this very mask, not of the first of its kind
        blocks = call.mask.blocks()
        rows = blocks.block_mask.kv_num_blocks.numel()
        full, partial = blocks.full / rows, blocks.partial / rows
    reads = times.READS_TENSORS if call.mask.computed(batch * heads).reads_tensors else times.PLAIN
    return {
        "rows": case.rows,
        "full": float(f"{full:.4g}"),
        "partial": float(f"{partial:.4g}"),
        "reads": times.READS_DATA if forms.why_bits(call) else reads,
        "has_tensors": case.has_tensors,
        "whole": case.whole,
    }


def sequences_of(call: Call) -> int:
    """How many sequences kernels are told of, 0 if the mask is not in sequences."""
    if isinstance(call.mask, GivenPlan) or call.mask.window is None or not call.mask.window.has_sequences:
        return 0
    sequences, _ = call.mask.sequences()
    return sequences.q.shape[0] - 1


def _timed(
    steps: Mapping[str, Callable[[], None]], device: torch.device, repeats: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of a step among many, host included, by turns; and why some did not run."""
    counts, failed = {}, {}
    for name, step in steps.items():
        try:
            counts[name] = max(1, min(_MOST_CALLS, int(_MILLISECONDS / _warm_up(step, device))))
        except Exception as error:  # kernels raise errors of any type
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    times: dict[str, list[float]] = {}
    gc.collect()
    for turn in range(repeats):
        names = list(counts)
        random.Random(turn).shuffle(names)
        for name in names:
            times.setdefault(name, []).append(wall_milliseconds(steps[name], device, counts[name]))
    return {name: float(f"{statistics.median(times[name]):.4g}") for name in steps if name in times}, failed


def _warm_up(step: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of the last step."""
    for n in range(_WARM_UP):
        milliseconds = wall_milliseconds(step, device)
        if n >= _LEAST_WARM_UP and milliseconds > _LONG:
            break
    return milliseconds


# --- the command ---


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    repeats, made = _REPEATS, groups()
    if quick:
        repeats, made = _QUICK_REPEATS, [replace(g, cases=g.cases[:1]) for g in made]
    return {g.name: functools.partial(lambda g: list(measure(g, device, repeats)), g) for g in made}


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    rows = [{**r, **r["ms"]} for r in results["rows"]]
    names = dict.fromkeys(name for r in rows for name in r["ms"])
    columns = ["use", "mask", "head_size", "batch", "length", "mean", "gradients", "new", "auto"]
    return text_table({**results, "rows": rows}, [(name, name) for name in (*columns, *names)])


BENCHMARK = Benchmark("choice", _todo, table)
