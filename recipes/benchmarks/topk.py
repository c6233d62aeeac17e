"""`python recipes/benchmark.py topk`: keys that an indexer chose for each query, against a dense additive mask."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexmasks
from benchmarks.memory import peak_bytes
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps_tables import github_table
from flexmasks import attention, get_mask
from flexmasks.bench.clock import interleaved, wall_milliseconds

_RUNS = 3
_OURS, _PLANNED, _SDPA, _FLEX, _FLOOR = "flexmasks", "one plan", "SDPA + mask", "flex + dense", "causal flash"
_PASSES = "forward", "both"


class Case(NamedTuple):
    """`chosen` entries of `granularity` tokens for each query, which all heads share.

    choice: where they lie among the earlier tokens: anywhere, among the latest quarter, or in runs.
    """

    choice: str
    granularity: int
    chosen: int
    heads: int
    kv_heads: int
    length: int
    size: int

    @property
    def shape(self) -> str:
        return f"{self.heads} and {self.kv_heads} heads, {self.length:,}x{self.size}"

    @property
    def description(self) -> str:
        return f"{self.choice}, {self.chosen:,} x {self.granularity}, {self.shape}"

    def indices(self, device: torch.device) -> Tensor:
        """Entries of each query, int32 [queries, 1, chosen]; -1 for none."""
        torch.manual_seed(0)
        q = torch.arange(self.length, device=device)[:, None]
        draw = functools.partial(torch.randint, 1 << 30, dtype=torch.int32, device=device)
        last = (q // self.granularity).int()  # the entry of the query itself
        if self.choice == "anywhere":
            return (draw((self.length, self.chosen)) % (last + 1))[:, None]
        if self.choice == "latest quarter":
            reach = self.length // 4 // self.granularity
            return (last - draw((self.length, self.chosen)) % reach).clamp(min=-1)[:, None]
        run = max(_RUN, self.granularity)  # 64 queries in a row choose the same runs, the one of the queries first
        runs, own = self.chosen * self.granularity // run, q[::_RUN] // run
        starts = draw((len(own), runs)) % (own.int() + 1)
        starts[:, :1] = own
        entries = starts[:, :, None] * (run // self.granularity) + torch.arange(run // self.granularity, device=device)
        return entries.flatten(1).int().repeat_interleave(_RUN, 0)[: self.length, None].contiguous()


_RUN = 64
_SHAPE, _ONE_KEY_HEAD = (16, 16, 32768, 128), (16, 1, 32768, 128)
_CASES = [
    Case("anywhere", 1, 2048, *_SHAPE),
    Case("latest quarter", 1, 2048, *_SHAPE),
    Case("runs", 1, 2048, *_SHAPE),
    Case("runs", 1, 2048, *_ONE_KEY_HEAD),
    Case("latest quarter", 64, 32, *_SHAPE),
    Case("runs", 64, 32, *_SHAPE),
    Case("runs", 128, 16, *_SHAPE),
]
_QUICK = [
    *(Case(choice, 1, 128, 4, 4, 512, 16) for choice in ("anywhere", "latest quarter", "runs")),
    Case("runs", 128, 2, 4, 1, 512, 16),
]


def _chosen(indices: Tensor, case: Case) -> Tensor:
    """Booleans [queries, keys], as transformers' layers make them: True where a key was chosen."""
    entries = -(-case.length // case.granularity)
    chosen = torch.zeros(case.length, entries + 1, dtype=torch.bool, device=indices.device)
    place = torch.where(indices < 0, entries, indices.long())[:, 0]
    chosen = chosen.scatter_(1, place, True)[:, :entries]
    if case.granularity > 1:
        chosen = chosen.repeat_interleave(case.granularity, 1)[:, : case.length]
    return chosen


def _topk(indices: Tensor, case: Case) -> flexmasks.Mask:
    return get_mask("topk", indices=indices, granularity=case.granularity) & get_mask("causal")


def _ways(case: Case, indices: Tensor, q: Tensor) -> dict[str, Callable[..., Tensor]]:
    """Functions of q, k and v. But for the last two they plan and make masks of new indices at each call."""
    length, device = case.length, q.device
    has_few_keys = case.kv_heads < case.heads
    plan = flexmasks.plan(_topk(indices, case), length, heads=case.heads, device=device)
    # The causal mask that a model makes once for all layers.
    causal = torch.zeros(length, length, device=device, dtype=q.dtype)
    causal.masked_fill_(torch.ones_like(causal, dtype=torch.bool).triu_(1), -math.inf)
    compiled = torch.compile(flex_attention)

    def by_topk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, mask=_topk(indices.clone(), case))
        return out

    def by_plan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, mask=plan)
        return out

    def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal.masked_fill(~_chosen(indices.clone(), case), -math.inf)
        if has_few_keys:
            k, v = (x.expand(-1, case.heads, -1, -1) if x.shape[1] == 1 else x for x in (k, v))
            k, v = (x.repeat_interleave(case.heads // x.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])

    def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = _chosen(indices.clone(), case)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & chosen[q, kv]

        block_mask = create_block_mask(mask_mod, None, None, length, length, device)
        out: Tensor = compiled(q, k, v, block_mask=block_mask)
        return out

    def by_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=has_few_keys)

    ways = {_OURS: by_topk, _PLANNED: by_plan, _SDPA: by_sdpa, _FLEX: by_flex, _FLOOR: by_flash}
    if has_few_keys:  # compiled once, not twice
        del ways[_FLEX]
    return ways


def _rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    """Return times of forward passes and of both passes, all in, the memory that both add, and differences of outputs
    from SDPA's.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, heads, case.length, case.size, device=device, dtype=dtype, requires_grad=True)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    d_out, indices = torch.randn_like(q), case.indices(device)
    with torch.no_grad():
        ways = _ways(case, indices, q)
        visited = flexmasks.block_mask(_topk(indices, case), case.length, device=device, block_size=128)
        all_causal = flexmasks.block_mask("causal", case.length, device=device, block_size=128)

    with torch.no_grad():
        wanted = ways[_SDPA](q, k, v)
        differences = {
            who: float((attend(q.detach(), k.detach(), v.detach()) - wanted).abs().max())
            for who, attend in ways.items()
            if who != _FLOOR
        }

    def step(attend: Callable[..., Tensor], passes: str) -> object:
        if passes == "both":
            return torch.autograd.grad(attend(q, k, v), (q, k, v), d_out)
        with torch.no_grad():
            return attend(q.detach(), k.detach(), v.detach())

    about = {
        "case": case.choice, "entries": f"{case.chosen:,} x {case.granularity}", "shape": case.shape,
        "dtype": str(dtype)[6:],
        "blocks": round((100 - visited.sparsity()) / (100 - all_causal.sparsity()), 4),
    }  # fmt: skip
    rows: list[Row] = []
    for passes in _PASSES:
        is_both = passes == "both"
        calls = {
            who: functools.partial(step, attend, passes)
            for who, attend in ways.items()
            if not (is_both and who == _FLEX and device.type != "cuda")  # which has no gradients there
        }
        for _ in range(3):  # plans of new tensors are exact at first, then recorded, then captured
            calls[_OURS]()
        times = interleaved(calls, device, runs, wall_milliseconds)
        rows += [
            {
                **about, "kind": passes, "who": who, "ms": float(f"{ms:.4g}"), "iqr": float(f"{iqr:.3g}"),
                **({"gb": float(f"{peak_bytes(calls[who], device) / 1e9:.3g}")} if is_both else {}),
                **({"difference": float(f"{differences[who]:.2g}")} if who in differences else {}),
            }
            for who, (ms, iqr) in times.items()
        ]  # fmt: skip
    return rows


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_small = quick or device.type != "cuda"
    return {
        case.description: functools.partial(_rows, case, device, 2 if is_small else _RUNS)
        for case in (_QUICK if is_small else _CASES)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("chosen", "case"), ("entries", "entries"), ("shape", "shape"), ("blocks", "blocks"), ("passes", "kind"),
        ("way", "who"), ("ms", "ms"), ("IQR", "iqr"), ("GB", "gb"), ("difference", "difference"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    found: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for row in results["rows"]:
        key = row["case"], row["entries"], row["shape"], row["blocks"]
        found.setdefault(key, {})[row["who"], row["kind"]] = row
    ways = [_OURS, _PLANNED, _SDPA, _FLEX, _FLOOR]
    times, memory = [], []
    for (choice, entries, shape, blocks), rows in found.items():
        about = [choice, entries, shape, f"{blocks:.0%}"]
        cells = [" / ".join(f"{rows[who, p]['ms']:.3g}" for p in _PASSES if (who, p) in rows) for who in ways]
        share = " / ".join(f"{rows[_SDPA, p]['ms'] / rows[_OURS, p]['ms']:.1f} x" for p in _PASSES)
        times.append([*about, *cells, share])
        memory.append([*about, *(f"{rows[who, 'both']['gb']:.3g}" if (who, "both") in rows else "" for who in ways)])
    header = ["chosen", "entries x tokens", "heads of q and k, S x D", "blocks"]
    about_all = (
        "forward / forward and backward pass, milliseconds all in. Blocks: the share of the causal mask's blocks of "
        "128 x 128 in which a key was chosen."
    )
    return (
        f"{measured_on(results)}; {about_all}\n\n{github_table(times, [*header, *ways, 'SDPA / flexmasks'])}\n\n"
        f"Peak memory that both passes add, GB:\n\n{github_table(memory, [*header, *ways])}"
    )


BENCHMARK = Benchmark("topk", _todo, table)
