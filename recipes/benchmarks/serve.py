"""`python recipes/benchmark.py serve`: attention of a serving loop."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loops import Draws, Replayed
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps import QUICK, USUAL, Pace, measure, measured_rows
from benchmarks.steps_tables import OURS, github_table
from flexmasks.attention import attention, explain, paged_attention
from flexmasks.backends.fa4 import MIN_QUERIES
from flexmasks.backends.fa4_package import is_installed
from flexmasks.bench.clock import interleaved, wall_milliseconds
from flexmasks.scores.alibi import alibi_slopes
from flexmasks.spec.arguments import get_mask

DENSE, FA4 = "SDPA + mask", "FA4"
_REPLAYED = ", replayed"
_DRAWS = 8  # different lengths, which the steps take by turns
_COPIED_BYTES = {"cuda": 1 << 31, "cpu": 1 << 28}


class Room(NamedTuple):
    """Sizes of a cache with room for each sequence."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    room: int


class Case(NamedTuple):
    """A call of a serving loop: its queries are the last of each sequence."""

    name: str
    cache: Room
    q_len: int = 1
    window: int | None = None  # earlier keys that a query sees; None for all
    more: dict[str, Any] = {}  # noqa: RUF012 # further arguments of `attention`; nothing changes them


_GPU = [
    Room(64, 32, 8, 128, 8192),
    Room(8, 32, 8, 128, 32768),
    Room(1, 32, 8, 128, 131072),
    Room(256, 16, 16, 64, 2048),
    Room(8, 32, 8, 128, 2048),
]
_CPU = [Room(8, 32, 8, 64, 4096), Room(1, 32, 8, 64, 32768)]
_SMALL = [Room(2, 4, 2, 16, 256), Room(1, 4, 2, 16, 512)]


def cases(caches: list[Room], device: torch.device) -> list[Case]:
    """Return all cases.

    They are decoding from each cache, and calls with more in them from the first or the longest.
    """
    first, longest = caches[0], max(caches, key=lambda c: c.room)
    slopes, sinks = torch.tensor(alibi_slopes(first.heads), device=device), torch.zeros(first.heads, device=device)
    window = longest.room // 32
    return [
        *(Case("decoding", cache) for cache in caches),
        Case(f"decoding, window of {window}", longest, window=window - 1),
        Case("decoding, ALiBi", first, more={"score": "alibi", "slopes": slopes}),
        Case("decoding, soft-cap", first, more={"score": "softcap", "cap": 50.0}),
        Case("decoding, sinks", first, more={"sink_logits": sinks}),
        Case("4 drafted tokens", first, q_len=4),
        *(
            Case(f"chunks of {min(512, cache.room // 8)}", cache, q_len=min(512, cache.room // 8))
            for cache in dict.fromkeys((longest, caches[1]))
        ),
    ]


class Serving:
    """Calls of one case with new lengths at every step."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        batch, heads, kv_heads, size, room = case.cache
        self.case, self.device = case, device
        self.q = torch.randn(batch, heads, case.q_len, size, device=device, dtype=dtype)
        self.k, self.v = torch.randn(2, batch, kv_heads, room, size, device=device, dtype=dtype).unbind()
        generator = torch.Generator(device).manual_seed(0)
        self.lens = torch.randint(case.q_len, room + 1, (_DRAWS, batch), generator=generator, device=device)

    @property
    def bytes_to_read(self) -> float:
        """Bytes of the keys and values that a step sees, in the mean."""
        _, _, kv_heads, size, room = self.case.cache
        seen = room if self.case.window is None else self.case.window + self.case.q_len
        keys: float = self.lens.clamp(max=seen).sum(1).float().mean().item()
        return keys * 2 * kv_heads * size * self.k.element_size()

    def ours(self, lens: Tensor) -> Tensor:
        out: Tensor = attention(
            self.q, self.k, self.v, q_offset=lens - self.case.q_len, **self._mask(), **self.case.more
        )
        return out

    def paged(self, page_size: int) -> Callable[[Tensor], Tensor]:
        """Return attention to the same keys and values in pages, which lie in any order."""
        table = torch.randperm(self.k.shape[0] * self.k.shape[2] // page_size, device=self.device)
        k, v = (torch.empty_like(x).index_copy_(0, table, x) for x in map(self._pages(page_size), (self.k, self.v)))
        table = table.view(len(self.k), -1).int()

        def attend(lens: Tensor) -> Tensor:
            out: Tensor = paged_attention(self.q, k, v, table, lens, **self._mask(), **self.case.more)
            return out

        return attend

    def dense(self, lens: Tensor) -> Tensor:
        """Return what torch computes with the mask as a tensor."""
        keys = torch.arange(self.k.shape[2], device=self.device)
        places = (lens[:, None] - self.case.q_len + torch.arange(self.case.q_len, device=self.device))[..., None]
        seen = keys <= places
        if self.case.window is not None:
            seen &= keys >= places - self.case.window
        return F.scaled_dot_product_attention(self.q, self.k, self.v, attn_mask=seen[:, None], enable_gqa=True)

    def fa4(self, lens: Tensor) -> Tensor:
        """Return what FlashAttention 4 computes, called directly."""
        window = (self.case.window, 0)
        out, *_ = importlib.import_module("flash_attn.cute").flash_attn_varlen_func(
            *(x.transpose(1, 2) for x in (self.q, self.k, self.v)), seqused_k=lens.int(), causal=True,
            window_size=(None, None) if self.case.window is None else window,
        )  # fmt: skip
        return cast(Tensor, out).transpose(1, 2)

    @property
    def runs_fa4(self) -> bool:
        is_few = self.case.q_len < MIN_QUERIES
        return self.device.type == "cuda" and not is_few and not self.case.more and is_installed()

    def backend(self) -> str:
        more = {n: x for n, x in self.case.more.items() if n != "sink_logits"}
        with torch.no_grad():
            return explain(
                self.q, self.k, self.v, q_offset=self.lens[0] - self.case.q_len, **self._mask(), **more
            ).backend

    def _mask(self) -> dict[str, Any]:
        window = self.case.window
        return {"mask": "causal" if window is None else get_mask("sliding_window", window=window)}

    @staticmethod
    def _pages(page_size: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x.transpose(1, 2).unflatten(1, (-1, page_size)).flatten(0, 1).contiguous()


def _rows(case: Case, page_sizes: Iterable[int], device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of a case."""
    serving = Serving(case, device, dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {OURS: serving.ours}
    functions |= {f"{OURS}, pages of {n}": serving.paged(n) for n in page_sizes}
    if not case.more:
        functions[DENSE] = serving.dense
    if serving.runs_fa4:
        functions[FA4] = serving.fa4
    steps: dict[str, Callable[[], Tensor]] = {}
    for who, call in functions.items():
        steps[who] = functools.partial(lambda call, draws: call(draws.new()), call, Draws(serving.lens))
        if device.type == "cuda":
            steps[f"{who}{_REPLAYED}"] = Replayed(call, Draws(serving.lens))
    with torch.no_grad():
        measured = measure(steps, device, pace, cold=False)
        bytes_per_ms = _COPIED_BYTES[device.type] * 2 / _copy_ms(device)
    rows = measured_rows("serve", case.name, case.cache, dtype, measured)
    for row in rows:
        row["roof_ms"] = float(f"{serving.bytes_to_read / bytes_per_ms:.4g}")
        row["difference"] = measured.difference(row["who"], OURS)
    rows[0]["backend"] = serving.backend()
    return rows


def _copy_ms(device: torch.device) -> float:
    """Return the milliseconds of a copy of `_COPIED_BYTES`."""
    source = torch.zeros(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, device, 7, wall_milliseconds)
    return times["copy"][0]


# --- the command ---


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_cuda = device.type == "cuda"
    dtype, pace = torch.bfloat16 if is_cuda else torch.float32, QUICK if quick else USUAL
    caches = _SMALL if quick else _GPU if is_cuda else _CPU
    page_sizes = (16, 64, 128, 256) if is_cuda and not quick else (16, 128)
    return {
        f"{case.name}, {' x '.join(map(str, case.cache))}": functools.partial(
            _rows, case, page_sizes, device, dtype, pace
        )
        for case in cases(caches, device)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("case", "case"), ("B x H x Hkv x D x room", "shape"), ("who", "who"), ("backend", "backend"), ("ms", "ms"),
        ("IQR", "iqr"), ("alone, ms", "alone_ms"), ("roof, ms", "roof_ms"), ("first s", "first_s"),
        ("compiles later", "compilations"), ("longest ms", "longest_ms"), ("waits", "synchronizations"),
        ("difference", "difference"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of one run."""
    by_case: dict[tuple[str, str], list[Row]] = {}
    for r in results["rows"]:
        by_case.setdefault((r["case"], r["shape"]), []).append(r)
    peers = [peer for peer in (DENSE, FA4) if any(r["who"] == peer for r in results["rows"])]
    rows = []
    for (case, shape), of_case in by_case.items():
        by_who = {r["who"]: r for r in of_case}
        for who, r in by_who.items():
            is_first, way = who == OURS, _REPLAYED if who.endswith(_REPLAYED) else ""
            rows.append([
                case if is_first else "", shape if is_first else "", who, r.get("backend", ""), f"{r['ms']:.3g}",
                f"{r['ms'] / r['roof_ms']:.2f} x", *(_share(r, by_who.get(f"{peer}{way}")) for peer in peers),
                f"{r['first_s']:.2f}", str(r["compilations"]), f"{r['longest_ms']:.3g}",
                "" if r["synchronizations"] is None else f"{r['synchronizations']:g}",
            ])  # fmt: skip
    header = ["case", "B x H x Hkv x D x room", "who", "backend", "ms", "roof", *peers, "first, s", "compiles later"]
    header += ["longest later, ms", "waits"]
    return f"{measured_on(results)}; medians.\n\n{github_table(rows, header)}"


def _share(row: Row, of: Row | None) -> str:
    return "" if of is None else f"{row['ms'] / of['ms']:.2f} x"


BENCHMARK = Benchmark("serve", _todo, table)
