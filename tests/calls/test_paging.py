"""A paged KV cache, compared with keys gathered page by page, contiguous keys, and torch's own paged attention.

Each mask and shape takes seconds to compile on the CPU, so tests of one query share the shapes of `decoding`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from functions import short_and_campaign
from helpers import DEVICES, TOLERANCE, check_lse, error, label, one_in, try_examples
from hypothesis import strategies as st
from oracles import attend
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import flexmasks
from flexmasks import pages
from flexmasks.backends import fa4, fa4_functions, fa4_package
from flexmasks.backends import flex_kernels as kernels
from flexmasks.backends.call import Call, Kernel, Unavailable
from flexmasks.backends.table import BACKENDS, Backend
from flexmasks.request import Request

WHERE = [
    pytest.param("cpu", "flex", marks=pytest.mark.slow),  # which compiles to C++
    pytest.param("cpu", "reference"),
    pytest.param("cuda", "flex", marks=pytest.mark.gpu),
    pytest.param("cuda", "auto", marks=pytest.mark.gpu),
    pytest.param("cuda", "reference", marks=pytest.mark.gpu),
]
PAGES = [(16, 6, 1), (64, 3, 4), (128, 2, 70)]  # page size, most pages of a sequence, queries


class Paged:
    """A cache with sequences of these lengths in shuffled pages, among pages of no sequence.

    Slots that no sequence uses are poisoned.
    """

    def __init__(
        self,
        lens: list[int],
        page_size: int,
        columns: int,
        kv_heads: int = 2,
        size: int = 32,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        v_size: int | None = None,
    ) -> None:
        sizes = size, size if v_size is None else v_size
        n_pages = len(lens) * columns + 3
        order = torch.randperm(n_pages).tolist()
        self.k, self.v = (torch.randn(n_pages, page_size, kv_heads, n).to(device, dtype) for n in sizes)
        rows = []
        self.unused = torch.ones(n_pages, page_size, dtype=torch.bool)
        for length in lens:
            own = [order.pop() for _ in range(-(-length // page_size))]
            for n in range(length):
                self.unused[own[n // page_size], n % page_size] = False
            rows.append([*own, *[-1, 10**6, own[0] if own else 0] * columns][:columns])
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.unused = self.unused.to(device)
        self.k[self.unused], self.v[self.unused] = math.nan, torch.finfo(dtype).max / 4

    def sequence(self, cache: Tensor, b: int) -> Tensor:
        """Return a batch element's keys or values, [1, Hkv, length, D], gathered page by page."""
        length, page_size = int(self.lens[b]), cache.shape[1]
        parts = []
        for place in range(-(-length // page_size)):
            page = cache[int(self.table[b, place])]
            parts.append(page[: length - place * page_size])
        return torch.cat(parts).transpose(0, 1)[None]

    def expected(
        self,
        q: Tensor,
        visible: Callable[[int, int, int], Tensor],
        scores: Callable[[Tensor, int, int], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return output and lse in float64, by one batch element at a time.

        `visible(b, queries, keys)` are booleans [queries, keys], `scores(scores, b, keys)` the changed scores.
        """
        outs, lses = [], []
        for b in range(len(q)):
            own_q, length = q[b : b + 1].detach().double().cpu(), int(self.lens[b])
            if not length:
                outs.append(own_q.new_zeros(*own_q.shape[:3], self.v.shape[3]))
                lses.append(torch.full(own_q.shape[:3], -math.inf, dtype=torch.float64))
                continue
            k, v = (self.sequence(x, b).double().cpu() for x in (self.k, self.v))
            change = None if scores is None else lambda s, b=b, n=length: scores(s, b, n)  # type: ignore[misc]
            out, lse = attend(own_q, k, v, visible(b, q.shape[2], length), change)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def attention(self, q: Tensor, **arguments: Any) -> Any:
        return flexmasks.paged_attention(q, self.k, self.v, self.table, self.lens, **arguments)


def decoding(device: str = "cpu", columns: int = 6) -> tuple[Paged, Tensor]:
    """Return four sequences in pages of 16, and the query of each sequence's last token, [4, 6, 1, 32].

    Grouped heads; a sequence without keys, one that ends with a page, one that ends inside of one.
    """
    cache = Paged([16 * columns - 5, 0, 71, 16 * (columns - 1)], 16, columns, device=device)
    return cache, torch.randn(4, 6, 1, 32, device=device)


def last(b: int, queries: int, keys: int) -> Tensor:
    """Return the causal mask of the last queries."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def everything(b: int, queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool)


# --- compared with keys gathered page by page ---


@pytest.mark.parametrize(
    ("page_size", "columns", "queries", "device", "backend"),
    [
        *one_in(3, [pytest.param(*pages, "cpu", "flex", marks=pytest.mark.slow) for pages in PAGES]),
        *(pytest.param(*n, *at.values, marks=at.marks) for n in PAGES for at in WHERE if at.values != ("cpu", "flex")),
    ],
)
def test_the_last_queries(page_size: int, columns: int, queries: int, device: str, backend: str) -> None:
    """Run the last queries of sequences as in `decoding`, with several page sizes and numbers of queries."""
    lens = [page_size * columns - 5, 0, 71, page_size * (columns - 1)]
    cache = Paged(lens, page_size, columns, device=device, v_size=32 if page_size == 128 else 48)
    q = torch.randn(4, 6, queries, 32, device=device)
    with torch.no_grad():
        out = cache.attention(q, mask="causal", backend=backend)
        assert error(out, cache.expected(q, last)[0]) < TOLERANCE[torch.float32]
        assert torch.all(out[1] == 0)
        if (device, backend) != ("cpu", "flex") or queries == 4:
            out = cache.attention(q, backend=backend)
            assert error(out, cache.expected(q, everything)[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("device", DEVICES)
def test_queries_before_heads(device: str, backend: str) -> None:
    """q and the output are [B, Q, H, D], and the lse is [B, H, Q] all the same."""
    cache, q = decoding(device)
    given = q.new_empty(4, 1, 6, 2, 32)[..., 0, :].copy_(q.transpose(1, 2))  # each head of a tensor with gaps
    out, lse = cache.attention(given, mask="causal", layout="bshd", return_lse=True, backend=backend)
    assert out.shape == (4, 1, 6, 32)
    want, want_lse = cache.expected(q, last)
    assert error(out.transpose(1, 2), want) < TOLERANCE[torch.float32]
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-5, rtol=1e-5)


def test_a_layout_of_queries_that_is_not_said() -> None:
    cache, q = decoding()
    with pytest.raises(ValueError, match=r"must be a multiple of .*; q \[B, Q, H, D\] needs layout='bshd'"):
        cache.attention(q.transpose(1, 2), mask="causal")
    with pytest.raises(TypeError, match=r"^flexmasks.paged_attention: with layout='bshd', q must be a tensor"):
        cache.attention(q[0, 0, 0], mask="causal", layout="bshd")


@pytest.mark.parametrize(("device", "backend"), WHERE)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.campaign), torch.bfloat16], ids=label)
def test_half_precision(dtype: torch.dtype, device: str, backend: str) -> None:
    cache = Paged([300, 40, 129], 32, 10, size=64, device=device, dtype=dtype, v_size=32)
    q = torch.randn(3, 8, 3, 64, device=device).to(dtype)
    with torch.no_grad():
        out = cache.attention(q, mask="causal", backend=backend)
    assert out.dtype == dtype
    assert error(out, cache.expected(q, last)[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_lse_sinks_scale_and_offsets(device: str) -> None:
    cache = Paged([90, 33, 64], 16, 6, kv_heads=1, device=device, v_size=16)
    q, sinks = torch.randn(3, 2, 20, 32, device=device), torch.randn(2, device=device)
    starts = torch.tensor([10, 0, 50], dtype=torch.int32, device=device)
    out, lse = cache.attention(q, mask="causal", q_offset=starts, scale=0.3, sink_logits=sinks, return_lse=True)

    def visible(b: int, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(int(starts[b]))

    scaled = 0.3 * math.sqrt(32)
    want, want_lse = cache.expected(q * scaled, visible)
    logits = sinks.double().cpu()[:, None]
    check_lse(lse, torch.logaddexp(want_lse, logits), 1e-5)
    assert error(out, want * torch.sigmoid(want_lse - logits)[..., None]) < TOLERANCE[torch.float32]


def _near_by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, reach: Annotated[Tensor, "int[H]"]) -> Tensor:
    return (kv <= q) & (q - kv <= reach[h])


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
def test_masks_of_all_kinds_count_positions_in_the_sequence(device: str) -> None:
    cache = Paged([90, 33, 60], 16, 6, device=device)
    q = torch.randn(3, 2, 30, 32, device=device)
    lens = [90, 33, 60]
    ids = torch.arange(96, device=device) // 20

    def window(b: int, queries: int, keys: int) -> Tensor:
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        return (distance >= 0) & (distance <= 25)

    def document(b: int, queries: int, keys: int) -> Tensor:
        own = torch.arange(keys) // 20
        return last(b, queries, keys) & (own[keys - queries :, None] == own)

    def near(b: int, queries: int, keys: int) -> Tensor:
        return window(b, queries, keys).triu(keys - queries - 7)

    both = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    numbers = torch.tensor(lens, device=device)
    by_batch = lambda b, h, q, kv: (kv < q) & (numbers[b] > 40)  # noqa: E731
    with torch.no_grad():
        out = cache.attention(q, mask="sliding_window", window=25)
        assert error(out, cache.expected(q, window)[0]) < TOLERANCE[torch.float32]
        assert error(cache.attention(q, mask=both), cache.expected(q, document)[0]) < TOLERANCE[torch.float32]
        want = cache.expected(q, lambda b, n, m: (lens[b] > 40) & torch.ones(n, m).tril(m - n - 1).bool())[0]
        assert error(cache.attention(q, mask=by_batch), want) < TOLERANCE[torch.float32]
        reach = torch.tensor([25, 7], device=device)
        want = cache.expected(q, lambda *sizes: torch.stack([window(*sizes), near(*sizes)]))[0]
        cache.table[0, 0] = -1  # no query of any head sees its keys
        assert error(cache.attention(q, mask=_near_by_head, reach=reach), want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("device", "backend"), WHERE)
def test_scores_count_positions_in_the_sequence(device: str, backend: str) -> None:
    cache = Paged([90, 0, 64], 16, 6, device=device)
    q, slopes = torch.randn(3, 2, 9, 32, device=device), torch.tensor([0.3, 0.01], device=device)

    def biased(scores: Tensor, b: int, keys: int) -> Tensor:
        distance = torch.arange(9)[:, None] + keys - 9 - torch.arange(keys)
        return scores - slopes.double().cpu().view(1, 2, 1, 1) * distance

    with torch.no_grad():
        if (device, backend) != ("cpu", "flex"):
            out = cache.attention(q, mask="causal", score="alibi", slopes=slopes, backend=backend)
            assert error(out, cache.expected(q, last, biased)[0]) < TOLERANCE[torch.float32]
        out = cache.attention(q, mask="causal", score=["alibi", "softcap"], slopes=slopes, cap=2.0, backend=backend)
    want = cache.expected(q, last, lambda s, b, n: 2.0 * torch.tanh(biased(s, b, n) / 2.0))[0]
    assert error(out, want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_that_share_a_prefix(device: str) -> None:
    cache = Paged([91, 91, 91, 40], 16, 6, device=device)
    cache.table[1, :5] = cache.table[0, :5]
    cache.table[2, :3] = cache.table[0, :3]
    q = torch.randn(4, 6, 1, 32, device=device)
    with torch.no_grad():
        out = cache.attention(q, mask="causal")
    assert error(out, cache.expected(q, last)[0]) < TOLERANCE[torch.float32]


@st.composite
def caches(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int, int]:
    """Draw a page table whose sequences may share pages, lengths, page size, pages in the pool, and queries."""
    batch, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    page_size, n_pages = draw(st.integers(1, 40)), columns + draw(st.integers(0, 6))
    rows = [draw(st.permutations(range(n_pages)))[:columns] for _ in range(batch)]
    lens = [draw(st.integers(0, columns * page_size)) for _ in range(batch)]
    for row, length in zip(rows, lens, strict=True):
        for place in range(-(-length // page_size), columns):
            row[place] = draw(st.integers(-3, n_pages + 3))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return (
        torch.tensor(rows, dtype=dtype),
        torch.tensor(lens, dtype=dtype),
        page_size,
        n_pages,
        draw(st.integers(1, 90)),
    )


@short_and_campaign(20, campaign=200)
def test_any_table(examples: int) -> None:
    try_examples(examples, _check_table, caches(), st.sampled_from(["causal", "full", "window"]), st.integers(0, 100))


def _check_table(cache: tuple[Tensor, Tensor, int, int, int], inner: str, start: int) -> None:
    table, lens, page_size, n_pages, queries = cache
    batch, slots = len(table), page_size * n_pages
    mask = flexmasks.get_mask("sliding_window", window=17) if inner == "window" else inner
    position = torch.full((batch, slots), -1)
    for b in range(batch):
        for n in range(int(lens[b])):
            position[b, int(table[b, n // page_size]) * page_size + n % page_size] = n
    at_q, at_kv = torch.arange(start, start + queries)[:, None], position[:, None, None]
    visible = (at_kv >= 0) & {
        "causal": at_kv <= at_q,
        "full": at_q >= 0,
        "window": (at_kv <= at_q) & (at_q - at_kv <= 17),
    }[inner]
    made = flexmasks.paged(mask, table, lens, page_size)
    assert torch.equal(flexmasks.dense_mask(made, queries, slots, q_offset=start).expand_as(visible), visible)
    blocks = made.blocks(queries, slots, block_size=(64, 16), q_offset=start)
    assert blocks.not_understood == ()
    seen = F.pad(visible, (0, -slots % 16, 0, -queries % 64)).unflatten(3, (-1, 16)).unflatten(2, (-1, 64))
    assert torch.equal(blocks.block_mask.to_dense().bool(), seen.any(-1).any(-2))
    q, (k, v) = torch.randn(batch, 2, queries, 8), torch.randn(2, n_pages, page_size, 1, 8)
    out = flexmasks.paged_attention(q, k, v, table, lens, mask=mask, q_offset=start, backend="reference")
    own_k, own_v = (x.flatten(0, 1).transpose(0, 1)[None].expand(batch, -1, -1, -1).double() for x in (k, v))
    assert error(out, attend(q.double(), own_k, own_v, visible)[0]) < TOLERANCE[torch.float32]


# --- pages that were freed, and rings of pages ---

FREED = ["minus one", "a page for all", "another sequence's", "beyond", "ring"]
FREED_MASKS: dict[str, tuple[Any, int, int]] = {  # and how many keys it sees before a query's own, and at the start
    "window": (flexmasks.get_mask("sliding_window", window=37), 37, 0),
    "sinks": (flexmasks.get_mask("sink_window", sinks=3, window=37), 37, 3),
    "function": (lambda b, h, q, kv: (kv <= q) & (q - kv <= 37), 37, 0),
}
FREED_WHERE = [
    *((*case, "cpu", torch.float32) for case in ((1, "auto"), (40, "reference"), (3, "reference"))),
    pytest.param(40, "flex", "cpu", torch.float32, marks=pytest.mark.slow),
    *((n, "reference with gradients", "cpu", torch.float32) for n in (1, 40)),
    *(
        pytest.param(n, backend, "cuda", dtype, marks=pytest.mark.gpu)
        for n, dtype in ((1, torch.bfloat16), (40, torch.float32), (200, torch.bfloat16))
        for backend in ("auto", "decode", "flex", "reference", "fa4", "reference with gradients", "flex with gradients")
        if not (backend == "fa4" and n < 200) and not (backend == "decode" and n == 200)
    ),
]


def freed_pages(
    kind: str, lens: list[int], page_size: int, reach: int, sinks: int, queries: int, device: str, dtype: torch.dtype
) -> tuple[Paged, list[tuple[Tensor, Tensor]]]:
    """Return a cache in which pages were freed that no query sees, and all keys and values of the sequences in float64.

    A ring has just as many pages as the window needs, and behind the last key it holds those of the turn before.
    """
    columns = -(-max(lens) // page_size)
    cache = Paged(lens, page_size, columns, device=device, dtype=dtype)
    cache.k.fill_(math.nan)
    in_ring, sink_pages = -(-(reach + queries) // page_size), -(-sinks // page_size)
    no_page, whole = int(cache.unused.all(1).nonzero()[0]), []
    for b, length in enumerate(lens):
        k, v = torch.randn(2, length, *cache.k.shape[2:]).to(dtype)
        whole.append((k.double().transpose(0, 1)[None], v.double().transpose(0, 1)[None]))
        own = cache.table[b].tolist()
        kept = (length - queries - reach) // page_size
        for place in range(sink_pages, -(-length // page_size)):
            if kind == "ring":
                own[place] = own[sink_pages + (place - sink_pages) % in_ring]
            elif place < kept:
                stale = int(cache.table[b - 1, place])
                own[place] = {"minus one": -1, "a page for all": no_page, "beyond": 10**6}.get(kind, stale)
        for n in range(length):
            if kind == "ring" or n // page_size >= kept or n < sinks:
                slot = own[n // page_size], n % page_size
                cache.k[slot], cache.v[slot] = k[n].to(device), v[n].to(device)
        cache.table[b] = torch.tensor(own)
    return cache, whole


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("mask", FREED_MASKS)
@pytest.mark.parametrize(("queries", "backend", "device", "dtype"), FREED_WHERE)
def test_pages_that_no_query_sees(mask: str, queries: int, backend: str, device: str, dtype: torch.dtype) -> None:
    """Their entries hold anything, and pages that repeat hold the last of their keys."""
    made, reach, sinks = FREED_MASKS[mask]
    lens, page_size = ([330, 200, 291], 16) if queries < 200 else ([830, 300, 611], 32)
    slopes, learns = torch.rand(6, device=device) / 8, backend.endswith("gradients")
    call: dict[str, Any] = {"mask": made, "backend": backend.split()[0]}
    if mask == "sinks" and (device, backend) != ("cpu", "flex") and backend != "fa4":
        call |= {"score": "alibi", "slopes": slopes}
    bias = slopes if "score" in call else slopes * 0
    if backend == "fa4":
        pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
        if mask != "window":
            pytest.skip("FlashAttention 4 knows only windows")
    if mask == "function" and (device, backend) == ("cpu", "flex"):
        pytest.skip("quick kernels read no bits")
    for kind in FREED:  # on a GPU the values of later tables are not read
        cache, whole = freed_pages(kind, lens, page_size, reach, sinks, queries, device, dtype)
        if learns or (device, backend) == ("cpu", "flex"):  # then hidden keys must be finite
            cache.k = cache.k.nan_to_num(0.0)
        q = torch.randn(3, 6, queries, 32).to(device, dtype).requires_grad_(learns)
        out = cache.attention(q, **call)
        want, grad = _seen_by_window(q, whole, reach, sinks, bias)
        assert error(out, want) < TOLERANCE[dtype], kind
        if learns:
            assert error(torch.autograd.grad(out.sum(), q)[0], grad) < 2 * TOLERANCE[dtype], kind


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
def test_pages_that_no_query_of_a_mixed_batch_sees(device: str) -> None:
    mask, reach, sinks = FREED_MASKS["sinks"]
    q, slopes = torch.randn(10, 6, 32, device=device), torch.rand(6, device=device) / 8
    for kind in FREED:
        cache, whole = freed_pages(kind, [330, 200, 291], 16, reach, sinks, 9, device, torch.float32)
        pages: dict[str, Any] = {"page_table": cache.table, "kv_lens": cache.lens}
        out = flexmasks.varlen_attention(
            q, cache.k, cache.v, [0, 1, 1, 10], mask=mask, score="alibi", slopes=slopes, **pages
        )
        for own, sequence in ((slice(0, 1), 0), (slice(1, 10), 2)):
            want, _ = _seen_by_window(
                q[own].transpose(0, 1)[None], whole[sequence : sequence + 1], reach, sinks, slopes
            )
            assert error(out[own].transpose(0, 1)[None], want) < TOLERANCE[torch.float32], kind


def _seen_by_window(
    q: Tensor, whole: list[tuple[Tensor, Tensor]], reach: int, sinks: int, slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of the last queries in float64, and the gradient of its sum by the queries."""
    wants, grads = [], []
    for own, (k, v) in zip(q.detach().double().cpu().split(1), whole, strict=True):
        own.requires_grad_()
        at_q, at_kv = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None], torch.arange(k.shape[2])
        visible = (at_kv <= at_q) & ((at_q - at_kv <= reach) | (at_kv < sinks))
        bias = slopes.double().cpu().view(1, -1, 1, 1) * (at_kv - at_q)
        out = attend(own, k, v, visible, lambda s, bias=bias: s + bias)[0]  # type: ignore[misc]
        wants.append(out.detach())
        grads.append(torch.autograd.grad(out.sum(), own)[0])
    return torch.cat(wants), torch.cat(grads)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.campaign), DEVICES[1]])
@pytest.mark.parametrize("queries", [1, 40])
def test_pages_that_no_query_sees_inside_a_compiled_model(queries: int, device: str) -> None:
    mask, reach, sinks = FREED_MASKS["sinks"]
    slopes = torch.rand(6, device=device) / 8

    def model(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return flexmasks.paged_attention(q + 1, k, v, table, lens, mask=mask, score="alibi", slopes=slopes) * 2

    compiled = torch.compile(model, fullgraph=True)
    for kind in FREED:
        cache, whole = freed_pages(kind, [330, 200, 291], 16, reach, sinks, queries, device, torch.float32)
        q = torch.randn(3, 6, queries, 32, device=device)
        with torch.no_grad():
            out = compiled(q, cache.k.nan_to_num(0.0), cache.v, cache.table, cache.lens)
        assert error(out, 2 * _seen_by_window(q + 1, whole, reach, sinks, slopes)[0]) < TOLERANCE[torch.float32]


@st.composite
def odd_tables(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int, int, int]:
    """Draw a table with any pages, lengths, page size, pages in the pool, queries, and where they start."""
    batch, columns, page_size = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    n_pages = draw(st.integers(1, 5))
    rows = [[draw(st.integers(-1, n_pages)) for _ in range(columns)] for _ in range(batch)]
    lens = [draw(st.integers(0, columns * page_size)) for _ in range(batch)]
    queries = draw(st.integers(1, 4))
    start = draw(st.integers(0, max(0, columns * page_size - queries)))
    return torch.tensor(rows), torch.tensor(lens), page_size, n_pages, queries, start


@short_and_campaign(20, campaign=1000)
def test_any_odd_table(examples: int) -> None:
    inner = st.sampled_from(["window", "sinks", "prefix", "full"])
    try_examples(examples, _check_odd_table, odd_tables(), inner)


def _check_odd_table(cache: tuple[Tensor, Tensor, int, int, int, int], inner: str) -> None:
    """A call is right, or raises where a query sees a key that is not there."""
    table, lens, page_size, n_pages, queries, start = cache
    room, masks = table.shape[1] * page_size, {"window": (5, 0), "sinks": (5, 2), "prefix": (-1, 7), "full": (99, 99)}
    reach, sinks = masks[inner]
    mask = lambda b, h, q, kv: ((q - kv <= reach) & (kv <= q)) | (kv < sinks)  # noqa: E731
    at_q, at_kv = torch.arange(start, start + queries)[:, None], torch.arange(room)
    seen = mask(0, 0, at_q, at_kv)
    slots = torch.where((table >= 0) & (table < n_pages), table, -1).repeat_interleave(page_size, 1) * page_size
    slots = torch.where(slots < 0, -1, slots + at_kv % page_size)  # [B, room]
    needed = seen.any(0) & (at_kv < lens[:, None])
    is_there = not bool((needed & (slots < 0)).any())
    in_pool = torch.zeros(len(table), queries, n_pages * page_size, dtype=torch.bool)
    is_last = True
    for b, row in enumerate(slots.tolist()):
        own = row[: int(lens[b])]
        last = {slot: n for n, slot in enumerate(own) if slot >= 0}
        is_last &= all(last[slot] == n for n, slot in enumerate(own) if slot >= 0 and needed[b, n])
        for slot, n in last.items():
            in_pool[b, :, slot] = seen[:, n]
    q, (k, v) = torch.randn(len(table), 2, queries, 8), torch.randn(2, n_pages, page_size, 1, 8)
    by_position = [x.double().flatten(0, 1)[slots.clamp(min=0)].transpose(1, 2) for x in (k, v)]
    want = attend(q.double(), *by_position, (seen & (at_kv < lens[:, None, None]))[:, None])[0]
    pool = flexmasks.paged(mask, table, lens, page_size)
    arguments: dict[str, Any] = {"mask": mask, "q_offset": start}
    for is_right, reads_on, more in (
        (is_there, (), {}),
        (is_there, (), {"backend": "reference"}),
        (is_there and is_last, ("cpu",), {"backend": "reference"}),  # as on a GPU
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pages, "runs_triton", lambda device, on=reads_on: device.type in on)
            if is_right:
                out = flexmasks.paged_attention(q, k, v, table, lens, **arguments, **more)
                assert error(out, want) < TOLERANCE[torch.float32]
            else:
                with pytest.raises(ValueError, match=r"paged_attention: `page_table` (must have|has a page twice)"):
                    flexmasks.paged_attention(q, k, v, table, lens, **arguments, **more)
    if is_there and is_last:
        got = flexmasks.dense_mask(pool, queries, n_pages * page_size, q_offset=start)
        assert torch.equal(got[:, 0].expand_as(in_pool), in_pool)


# --- compared with a whole prefill of contiguous keys and values ---


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "params",
    [{"mask": "causal"}, pytest.param({"mask": "sliding_window", "window": 40}, marks=pytest.mark.campaign)],
    ids=lambda params: params["mask"],
)
def test_prefill_in_chunks_and_decoding_are_the_whole(params: dict[str, Any], device: str) -> None:
    """Chunks of two batch elements go into pages as they come: 64 tokens at once, then four, then single ones."""
    length, page_size, kv_heads = 150, 16, 2
    q = torch.randn(2, 4, length, 32, device=device)
    k, v = torch.randn(2, 2, kv_heads, length, 32, device=device)
    columns = -(-length // page_size)
    table = torch.randperm(2 * columns, device=device).view(2, columns).int()
    k_cache, v_cache = torch.full((2, 2 * columns, page_size, kv_heads, 32), 7.0, device=device)
    k_cache.fill_(math.nan)
    kv_lens = torch.zeros(2, dtype=torch.int32, device=device)
    with torch.no_grad():
        whole = flexmasks.attention(q, k, v, **params)
        parts = []
        for step in [64, 64, 4, 4, 4, *[1] * 10]:
            start = int(kv_lens[0])
            for n in range(start, start + step):
                for b in range(2):
                    slot = int(table[b, n // page_size]), n % page_size
                    k_cache[slot], v_cache[slot] = k[b, :, n], v[b, :, n]
            kv_lens += step  # a server changes lengths in place, too
            part = q[:, :, start : start + step]
            parts.append(flexmasks.paged_attention(part, k_cache, v_cache, table, kv_lens, **params))
        assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-5)
        prefill = flexmasks.paged_attention(q, k_cache, v_cache, table, kv_lens, **params)
    assert torch.allclose(prefill, whole, atol=1e-5)


def test_other_layers_of_a_step_find_what_the_first_one_planned() -> None:
    cache, q = decoding()
    with torch.no_grad():
        cache.attention(q, mask="causal")
        before = flexmasks.cache_info()["plans"].parts
        cache.attention(q, mask="causal")
        after = flexmasks.cache_info()["plans"].parts
        assert after["calls"].hits == before["calls"].hits + 1
        assert after["blocks"] == before["blocks"]
        cache.lens[[0, 2, 3]] -= 3
        out = cache.attention(q, mask="causal")
    assert error(out, cache.expected(q, last)[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_compiles_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = decoding(device)
    cache.attention(q, mask="causal")
    monkeypatch.setattr(kernels, "_new_kernel", None)
    for _ in range(3):
        cache.lens = (cache.lens - 5).clamp(min=0)
        cache.table = cache.table.roll(1, 0)
        cache.lens = cache.lens.roll(1, 0)
        out = cache.attention(q, mask="causal")
        assert error(out, cache.expected(q, last)[0]) < TOLERANCE[torch.float32]


@pytest.mark.slow
def test_inside_a_compiled_model() -> None:
    cache, q = decoding()
    call = torch.compile(lambda q: cache.attention(q * 2, mask="causal") + 1, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(call(q), cache.attention(q * 2, mask="causal") + 1, atol=1e-5)


def test_gradients() -> None:
    cache = Paged([90, 0, 33], 16, 6, size=8, dtype=torch.float64)
    cache.k[cache.unused], cache.v[cache.unused] = 0.0, 0.0
    tensors = [torch.randn(3, 4, 5, 8, dtype=torch.float64), cache.k.clone(), cache.v.clone()]
    q, k, v = (x.requires_grad_() for x in tensors)
    out = flexmasks.paged_attention(q, k, v, cache.table, cache.lens, mask="causal")
    cache.k, cache.v = (x.detach().clone().requires_grad_() for x in (k, v))
    other_q = q.detach().clone().requires_grad_()
    wants = []
    for b in (0, 2):
        own = (cache.sequence(x, b) for x in (cache.k, cache.v))
        wants.append(attend(other_q[b : b + 1], *own, last(b, 5, int(cache.lens[b])))[0])
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (torch.cat(wants) * weight[[0, 2]]).sum().backward()
    for x, y in ((q, other_q), (k, cache.k), (v, cache.v)):
        assert x.grad is not None
        assert torch.allclose(x.grad, y.grad, atol=1e-9)


# --- compared with torch's own paged attention ---


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("page_size", "lens"), [pytest.param(32, [96, 32, 128], marks=pytest.mark.campaign), (128, [200, 1, 384])]
)
def test_against_torch(page_size: int, lens: list[int], device: str) -> None:
    module = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    batch, heads, columns, queries = len(lens), 2, 4, 16
    n_pages = batch * columns + 2
    pool = module.PagedAttention(n_pages, page_size, batch, device=device)
    for step in range(columns):  # each sequence takes a page in turn, so that no two pages of one lie side by side
        for b, length in enumerate(lens):
            wanted = torch.tensor(min(length, (step + 1) * page_size), device=device)
            pool.reserve(torch.tensor(b, device=device), wanted)
    kv_lens = torch.tensor(lens, device=device)
    longest = columns * page_size
    k, v = torch.randn(2, batch, heads, longest, 32, device=device)
    k_pool, v_pool = torch.zeros(2, 1, heads, n_pages * page_size, 32, device=device)
    for b, length in enumerate(lens):
        rows, places = torch.tensor([b], device=device), torch.arange(length, device=device)[None]
        pool.assign(rows, places, k[b : b + 1, :, :length], v[b : b + 1, :, :length], k_pool, v_pool)
    starts = torch.tensor([max(0, n - queries) for n in lens], device=device)
    causal = lambda b, h, q, kv: q + starts[b] >= kv  # noqa: E731
    logical = create_block_mask(causal, batch, None, queries, longest, device, (128, page_size))
    theirs = pool.convert_logical_block_mask(logical, kv_len=kv_lens)
    table = pool.page_table[:, :columns]
    mask = flexmasks.paged("causal", table, kv_lens, page_size)
    slots = n_pages * page_size

    ours = flexmasks.block_mask(mask, queries, slots, block_size=(128, page_size), q_offset=starts)
    want = create_mask(theirs.mask_mod, batch, 1, queries, slots, device=device)
    got = flexmasks.dense_mask(mask, queries, slots, q_offset=starts)
    assert torch.equal(got.expand_as(want), want)
    assert torch.equal(ours.to_dense(), (theirs.to_dense() > 0).to(ours.to_dense().dtype))

    k_cache, v_cache = (x[0].transpose(0, 1).unflatten(0, (n_pages, page_size)) for x in (k_pool, v_pool))
    q = torch.randn(batch, heads, queries, 32, device=device)
    with torch.no_grad():
        expected = torch.compile(flex_attention, fullgraph=True, dynamic=False)(q, k_pool, v_pool, block_mask=theirs)
        out = flexmasks.paged_attention(
            q, k_cache.contiguous(), v_cache.contiguous(), table, kv_lens, mask="causal", q_offset=starts
        )
    assert torch.allclose(out, expected, atol=1e-5 if device == "cpu" else 1e-2)


# --- what it costs ---


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_ranges_leave_open_what_is_partial(page_size: int) -> None:
    """Look only at partial blocks, and hardly any if blocks fit into pages.

    The pool has 32768 slots, and its pages are in random order.
    """
    slots, batch = 32768, 8
    table = torch.randperm(slots // page_size).view(batch, -1)
    lens = torch.randint(slots // batch // 2, slots // batch + 1, (batch,))
    mask = flexmasks.paged("causal", table, lens, page_size)
    blocks = mask.blocks(1, slots, q_offset=lens - 1)
    assert blocks.not_understood == ()
    assert blocks.undecided is not None
    assert blocks.undecided <= blocks.partial
    fitting = mask.blocks(1, slots, q_offset=lens - 1, block_size=(128, page_size))
    assert fitting.undecided is not None
    assert fitting.undecided <= batch
    assert page_size < 128 or blocks.undecided <= batch


def _chunks() -> tuple[Paged, Tensor]:
    """Return sequences that share pages, with slots that hold anything, and 70 queries of each."""
    cache = Paged([90, 130, 0, 75, 160], 16, 10)
    cache.table[1, :3] = cache.table[0, :3]
    return cache, torch.randn(5, 6, 70, 32)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_chunks_of_sequences_that_share_pages(backend: str) -> None:
    """With masks and scores by batch element, lse and sinks."""
    cache, q = _chunks()
    limits, slopes, sinks = torch.tensor([90, 100, 0, 70, 150]), torch.rand(5, 6), torch.randn(6)
    mask = lambda b, h, q, kv: (kv <= q) & (kv < limits[b])  # noqa: E731
    score = lambda score, b, h, q, kv: score - slopes[b, h] * (q - kv)  # noqa: E731

    def seen(b: int, queries: int, keys: int) -> Tensor:
        return last(b, queries, keys) & (torch.arange(keys) < limits[b])

    def biased(scores: Tensor, b: int, keys: int) -> Tensor:
        return scores - slopes[b].double()[:, None, None] * (torch.arange(70)[:, None] + keys - 70 - torch.arange(keys))

    want, want_lse = cache.expected(q, seen, biased)
    logits = sinks.double()[:, None]
    with torch.no_grad():
        for _ in range(2):
            out = cache.attention(q, mask=mask, score=score, backend=backend)
            assert error(out, want) < TOLERANCE[torch.float32]
            call: dict[str, Any] = {"return_lse": True, "sink_logits": sinks, "backend": backend}
            out, lse = cache.attention(q, mask=mask, score=score, **call)
            assert error(out, want * torch.sigmoid(want_lse - logits)[..., None]) < TOLERANCE[torch.float32]
            check_lse(lse, torch.logaddexp(want_lse, logits), 1e-5)


def test_chunks_by_a_table_without_a_row_to_spare() -> None:
    """It has a row for each position of a query, and none behind the last one."""
    cache = Paged([160, 90, 130], 16, 10)
    q, table = torch.randn(3, 6, 70, 32), torch.rand(3, 1, 160, 160) < 0.5

    def seen(b: int, queries: int, keys: int) -> Tensor:
        return table[b, 0, keys - queries : keys, :keys]

    with torch.no_grad():
        out = cache.attention(q, mask="dense", visible=table, backend="reference")
    assert error(out, cache.expected(q, seen)[0]) < TOLERANCE[torch.float32]


def test_blocks_of_chunks_have_keys_of_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pool each block of 64 slots has pages of four sequences, and would be computed for each of them."""
    computed = []
    run = pages.attend

    def noted(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Any:
        blocks = flexmasks.explain(q, k, v, mask=request.mask, q_offset=request.q_offset).blocks
        computed.append((blocks.partial + blocks.full) * math.prod(blocks.block_mask.BLOCK_SIZE))  # pairs
        return run(q, k, v, request)

    monkeypatch.setattr(pages, "attend", noted)
    batch, columns, page_size = 4, 64, 16
    k_cache, v_cache = torch.randn(2, batch * columns, page_size, 2, 32)
    table = torch.arange(batch * columns).view(columns, batch).T.contiguous()  # pages in turns
    lens, q = torch.full((batch,), columns * page_size), torch.randn(batch, 2, 128, 32)
    with torch.no_grad():
        out = flexmasks.paged_attention(q, k_cache, v_cache, table, lens, mask="causal", backend="reference")
        monkeypatch.setattr(pages, "runs_triton", lambda device: True)
        pool = flexmasks.paged_attention(q, k_cache, v_cache, table, lens, mask="causal", backend="reference")
    assert torch.allclose(out, pool, atol=1e-5)
    assert 3 * computed[0] < computed[1]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flex", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 4, 200])
def test_the_pool_is_not_copied_on_a_gpu(queries: int, dtype: torch.dtype, backend: str) -> None:
    if backend == "reference" and dtype != torch.float32:
        pytest.skip("the reference computes in float32: it makes one copy of the pool")
    batch, n_pages, page_size = 32, 4096, 128
    k_cache, v_cache = torch.randn(2, n_pages, page_size, 2, 64, device="cuda", dtype=dtype)
    table = torch.randperm(n_pages, device="cuda").view(batch, -1)[:, :8].int()
    lens = torch.randint(200, 8 * page_size, (batch,), device="cuda", dtype=torch.int32)
    q = torch.randn(batch, 8, queries, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        for turn in range(2):  # the first call compiles
            lens += turn
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            flexmasks.paged_attention(q, k_cache, v_cache, table, lens, mask="causal", backend=backend)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4 * k_cache.nbytes  # a copy for each batch element would take 32 times the pool


@pytest.mark.gpu
def test_many_sequences_on_a_gpu() -> None:
    lens = torch.randint(1, 2048, (64,)).tolist()
    cache = Paged(lens, 16, 128, kv_heads=2, size=128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(64, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        out = cache.attention(q, mask="causal")
    assert error(out, cache.expected(q, last)[0]) < TOLERANCE[torch.bfloat16]


# --- FlashAttention 4 ---

WINDOWS: dict[str, tuple[Any, Callable[[int, int, int], Tensor]]] = {
    "causal": ("causal", last),
    "full": (None, everything),
    "window": (
        flexmasks.get_mask("sliding_window", window=50),
        lambda b, queries, keys: last(b, queries, keys).triu(keys - queries - 50),
    ),
    "both sides": (
        flexmasks.get_mask("local", left=30, right=9),
        lambda b, queries, keys: everything(b, queries, keys).tril(keys - queries + 9).triu(keys - queries - 30),
    ),
}


def chunks(page_size: int, device: str, dtype: torch.dtype, sizes: tuple[int, int] = (64, 64)) -> tuple[Paged, Tensor]:
    """Return sequences in pages, one of them without keys, and their last 150 queries.

    sizes: the head sizes of keys and of values.
    """
    size, v_size = sizes
    cache = Paged([700, 160, 333, 0, 512, 170], page_size, -(-700 // page_size), 2, size, device, dtype, v_size)
    return cache, torch.randn(6, 6, 150, size, device=device).to(dtype)


def _attend_to_pages(
    q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], cap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute what FlashAttention 4 documents for these arguments, in float64 and without flexmasks."""
    table, lens = arguments["page_table"], arguments["seqused_k"]
    assert table.dtype == lens.dtype == torch.int32
    scale = arguments["softmax_scale"]
    scaled = q.double() if scale is None else q.double() * scale * q.shape[-1] ** 0.5
    outs, lses = [], []
    for own_q, numbers, length in zip(scaled, table.tolist(), lens.tolist(), strict=True):
        needed = -(-length // k.shape[1])
        own_k, own_v = (x[numbers[:needed]].flatten(0, 1)[:length].double().transpose(0, 1)[None] for x in (k, v))
        visible = torch.ones(len(own_q), length, dtype=torch.bool)
        behind = length - len(own_q)
        left, right = arguments.get("window_size_left"), arguments.get("window_size_right")
        right = 0 if arguments.get("causal") else right
        visible = visible if right is None else visible.tril(behind + right)
        visible = visible if left is None else visible.triu(behind - left)
        if length:
            change = None if cap is None else lambda s: cap * torch.tanh(s / cap)
            out, lse = attend(own_q.transpose(0, 1)[None], own_k, own_v, visible, change)
        else:
            rows = own_q.shape[1::-1]
            out, lse = torch.zeros(1, *rows, v.shape[3]), torch.full((1, *rows), -math.inf)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs).to(q.dtype), torch.cat(lses).float()


@pytest.mark.parametrize(
    ("mask", "page_size"),
    one_in(2, [(mask, size) for n, mask in enumerate(WINDOWS) for size in ((32, 256) if n % 2 else (256, 32))]),
)
def test_fa4_reads_pages(mask: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function takes the kernel's place; it gets pages of 256 slots in two parts."""
    monkeypatch.setattr(fa4_package, "why_missing", lambda: "")
    monkeypatch.setattr(fa4_package, "_import_failures", [])
    monkeypatch.setattr(pages, "runs_triton", lambda device: True)
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    sizes = []

    def attend(q: Tensor, k: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        sizes.append(k.shape[1])
        return _attend_to_pages(q, k, *more)

    monkeypatch.setattr(fa4_functions, "forward", attend)
    _check_fa4(mask, page_size, "cpu", torch.float32, (64, 48))
    assert {*sizes} == {min(page_size, 128)}


def test_parts_of_pages() -> None:
    """Pages are read in parts of 128 slots if they lie in order and head sizes are not above 128."""

    def parts(page_size: int, size: int = 64, v_size: int = 64, cut: int = 0) -> int:
        caches = (torch.empty(3, page_size + cut, 2, n)[:, :page_size] for n in (size, v_size))
        return fa4._parts_of_pages(*caches)

    assert [parts(n) for n in (64, 128, 192, 256, 384)] == [1, 1, 1, 2, 3]
    assert [parts(256, 128, 128), parts(256, 192, 128), parts(256, 64, 256), parts(256, cut=16)] == [2, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.campaign)], ids=label)
@pytest.mark.parametrize(
    ("mask", "sizes", "page_size"),
    one_in(3, list(itertools.product(WINDOWS, [(64, 64), (192, 128)], [1, 16, 40, 64, 128, 256, 384]))),
)
def test_fa4_reads_pages_on_a_gpu(mask: str, sizes: tuple[int, int], page_size: int, dtype: torch.dtype) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    _check_fa4(mask, page_size, "cuda", dtype, sizes)


def _check_fa4(name: str, page_size: int, device: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    cache, q = chunks(page_size, device, dtype, sizes)
    mask, visible = WINDOWS[name]
    with torch.no_grad():
        for turn in range(3):  # later turns have other lengths and tables
            cache.lens -= turn
            cache.lens.clamp_(min=0)
            cache.table = cache.table.long() if turn == 2 else cache.table.clone()
            out, lse = cache.attention(q, mask=mask, return_lse=True, q_offset=None, backend="fa4")
            want, want_lse = cache.expected(q, visible)
            assert error(out, want) < TOLERANCE[dtype]
            check_lse(lse, want_lse, 10 * TOLERANCE[dtype])
            assert torch.all(out[3] == 0)
        out = cache.attention(q, mask=mask, score="softcap", cap=2.0, scale=0.3, sink_logits=torch.zeros(6).to(q))
        want, want_lse = cache.expected(q, visible, lambda s, b, n: 2 * torch.tanh(s * 0.3 * sizes[0] ** 0.5 / 2))
        assert error(out, want * torch.sigmoid(want_lse)[..., None]) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_fa4_in_pages_is_captured() -> None:
    """Replays see lengths, tables and caches that change in place."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    cache, q = chunks(64, "cuda", torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            cache.attention(q, mask="causal", backend="fa4")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cache.attention(q, mask="causal", backend="fa4")
        for turn in range(1, 4):
            cache.lens.sub_(turn).clamp_(min=0)
            q.normal_()
            graph.replay()
            assert error(out, cache.expected(q, last)[0]) < TOLERANCE[torch.bfloat16]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_fa4_leaves_pages_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that are no windows, queries elsewhere and calls that learn go another way, and so does a failure."""
    monkeypatch.setattr(fa4_package, "why_missing", lambda: "")
    monkeypatch.setattr(fa4_package, "_import_failures", [])
    monkeypatch.setattr(
        pages, "runs_triton", lambda device: True
    )  # copies have anything in blocks that quick kernels read
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    calls_of_kernel: list[int] = []

    def failing(*arguments: Any) -> Any:
        calls_of_kernel.append(1)
        raise TypeError("no such kernel")

    def interface() -> Any:
        raise Unavailable("it is not installed")

    monkeypatch.setattr(fa4_package, "interface", interface)  # flex_flash asks for it
    monkeypatch.setattr(fa4_functions, "forward", failing)
    cache, q = Paged([210, 0, 170], 32, 7), torch.randn(3, 4, 150, 32)
    cache.k = cache.k.nan_to_num(0.0)
    cache.v = cache.v.clamp(max=5.0)
    for more in ({"mask": lambda b, h, q, kv: kv % 3 < 2}, {"mask": "causal", "q_offset": 5}):
        cache.attention(q, **more)
    cache.attention(q.clone().requires_grad_(), mask="causal")
    assert not calls_of_kernel
    want, _ = cache.expected(q, last)
    for _ in range(2):
        assert error(cache.attention(q, mask="causal"), want) < TOLERANCE[torch.float32]
    assert len(calls_of_kernel) == 1
    flexmasks.clear_caches()


def test_any_backend_of_the_table_may_read_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of pages but what the table says, whatever the backend's name."""
    monkeypatch.setattr(pages, "runs_triton", lambda device: True)
    asked: list[bool] = []

    def refuses(call: Call) -> str:
        asked.append(call.pages is not None)
        return "it only listens"

    monkeypatch.setitem(BACKENDS, "listens", Backend("listens", refuses, lambda call: Kernel(), reads_pages=True))
    with pytest.raises(ValueError, match="it only listens"):
        Paged([210, 0, 170], 32, 7).attention(torch.randn(3, 4, 150, 32), mask="causal", backend="listens")
    assert asked == [True, False]  # with pages, and then without them


# --- errors ---

Q, K = torch.randn(2, 4, 3, 16), torch.randn(8, 16, 2, 16)
TABLE, LENS = torch.tensor([[0, 1], [2, 3]]), torch.tensor([32, 17])
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q a list": ({"q": [1.0]}, TypeError, "`q` must be a tensor \\[B, H, Q, D\\]; got q list"),
    "cache of 3 dimensions": ({"k_cache": K[0]}, ValueError, "4 dimensions, \\[n_pages, page_size, Hkv, D\\]"),
    "cache empty": ({"v_cache": K[:0]}, ValueError, "`v_cache` is empty"),
    "caches of two shapes": (
        {"v_cache": K[:4]},
        ValueError,
        "one shape but for the head size; got q .*, v_cache float32\\[4, 16, 2, 16\\]",
    ),
    "dtypes": ({"q": Q.double()}, TypeError, "must have one dtype; got q float64"),
    "devices": ({"q": Q.to("meta")}, ValueError, "must be on one device"),
    "head sizes": ({"q": Q[..., :8]}, ValueError, "q and k_cache must have one head size D"),
    "heads": ({"q": Q[:, :3]}, ValueError, "multiple of the number of key heads"),
    "pages apart": (
        {"k_cache": torch.randn(8, 2, 16, 2, 16)[:, 0]},
        ValueError,
        "the pages of `k_cache` must follow each other in memory, .* strides are \\(1024, 32, 16, 1\\)",
    ),
    "head size not last": (
        {"v_cache": K.transpose(2, 3).contiguous().transpose(2, 3)},
        ValueError,
        "the pages of `v_cache` must",
    ),
    "table a number": ({"page_table": 3}, TypeError, "`page_table` must be an integer tensor \\[B, P\\]"),
    "table of other batch": ({"page_table": TABLE[:1]}, ValueError, "with B = 2 on cpu, got int64\\[1, 2\\] on cpu"),
    "table of floats": ({"page_table": TABLE.float()}, ValueError, "got float32\\[2, 2\\]"),
    "lengths of other batch": ({"kv_lens": LENS[:1]}, ValueError, "`kv_lens` must be an integer tensor \\[B\\]"),
    "a number of keys": ({"kv_lens": 32}, TypeError, "`kv_lens` must be .*, got int"),
    "more queries than keys": (
        {"kv_lens": torch.tensor([32, 2])},
        ValueError,
        "sequence 1 has kv_lens = 2 keys and 3 queries; pass `q_offset`",
    ),
    "unknown parameter": ({"window": 3}, TypeError, "no argument is named `window`"),
    "a block mask": ({"block_mask": None}, TypeError, "no argument is named `block_mask`"),
    "page not there": (
        {"page_table": torch.tensor([[0, 1], [2, 8]])},
        ValueError,
        "paged_attention: `page_table` must have pages 0..7 where a query sees keys, "
        "got 8 for page 1 of batch element 1",
    ),
    "page freed too early": (
        {"page_table": torch.tensor([[0, -1], [2, 3]]), "mask": "sliding_window", "window": 17},
        ValueError,
        "paged_attention: `page_table` must have pages 0..7 where a query sees keys, "
        "got -1 for page 1 of batch element 0",
    ),
    "keys beyond the pages": (
        {"kv_lens": torch.tensor([33, 4])},
        ValueError,
        "2 pages \\* `page_size` 16 = 32, got 33",
    ),
    "keys below 0": ({"kv_lens": torch.tensor([-1, 4])}, ValueError, "values from -1 to 4"),
    "scale": ({"scale": math.nan}, TypeError, "`scale` must be a finite number"),
    "backend": ({"backend": "sdpa"}, ValueError, "backend 'sdpa' cannot run this call"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    wrong, kind, message = ERRORS[case]
    good = {"q": Q, "k_cache": K, "v_cache": K, "page_table": TABLE, "kv_lens": LENS}
    with pytest.raises(kind, match=message) as raised:
        flexmasks.paged_attention(**(good | wrong))
    assert str(raised.value).startswith("flexmasks")


def test_a_page_twice_where_pages_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a slot of the pool has one position; in copies it has both."""
    table = torch.tensor([[0, 1], [2, 2]])
    out = flexmasks.paged_attention(Q, K, K, table, LENS)
    keys = K[table[1]].flatten(0, 1)[:17].transpose(0, 1).repeat_interleave(2, 0)
    assert torch.allclose(out[1], F.scaled_dot_product_attention(Q[1], keys, keys), atol=1e-5)
    monkeypatch.setattr(pages, "runs_triton", lambda device: True)
    words = (
        "paged_attention: `page_table` has a page twice in batch element 1, page 2, of which only the last keys count, "
        "but a query sees an earlier one, key 0 of 17"
    )
    with pytest.raises(ValueError, match=words):
        flexmasks.paged_attention(Q, K, K, table, LENS, backend="reference")


def test_each_mask_is_checked_by_a_table_that_lacks_pages() -> None:
    """Also where another layer of the step, whose mask hides their keys, ran before."""
    table = torch.tensor([[0, 1], [-1, 3]])
    window = flexmasks.get_mask("sliding_window", window=0)
    for _ in range(2):
        flexmasks.paged_attention(Q[:, :, -1:], K, K, table, LENS, mask=window)
        with pytest.raises(ValueError, match=r"must have pages 0\.\.7 where a query sees keys, got -1"):
            flexmasks.paged_attention(Q[:, :, -1:], K, K, table, LENS)
