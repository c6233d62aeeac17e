"""Mixed batches: `varlen_attention` with a paged cache, compared with each sequence by itself in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import few_queries_plain
import pytest
import torch
from functions import short_and_campaign
from helpers import TOLERANCE, check_lse, error, one_in, try_examples
from hypothesis import strategies as st
from oracles import attend
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from benchmarks import private_torch
from benchmarks.examples import on_device
from flexmasks import pages, road
from flexmasks.backends import decode
from flexmasks.plans.mixed import PagedSequences, in_pieces
from flexmasks.spec.registry import example

HEADS, KV_HEADS, SIZE, V_SIZE = 4, 2, 16, 24
MASKS = [e.name for e in flexmasks.list_masks() if e.name not in ("packed", "paged")]
# Masks with numbers of sequences, tables, and neither.
ON_CPU = ["grouped_tril", "padding", "key_padding", "sliding_window", "document", "tree", "slices", "bsr", "dense"]
MaskMod = Callable[..., Tensor]


@pytest.fixture(params=["cpu", "cpu, as on a GPU", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where calls run; "as on a GPU", batches are cut into pieces without a value read, and calls are renewed."""
    if request.param == "cpu, as on a GPU":
        monkeypatch.setattr(pages, "reads_at_once", lambda device: False)
        monkeypatch.setattr(pages, "runs_triton", lambda device: True)
        monkeypatch.setattr(decode, "_ON_GPU", ("cpu", "cuda"))
        few_queries_plain.replace_kernels(monkeypatch)
        monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))
    flexmasks.clear_caches()
    with torch.device(request.param.partition(",")[0]):
        yield request.param
    flexmasks.clear_caches()


class Step:
    """A step with `counts` queries of sequences of `lens` keys, and `rest` queries of no sequence.

    PagedSequences may share pages. Slots without a key are NaN in `k` and large in `v`, table entries without a page
    anything.
    """

    def __init__(
        self,
        counts: list[int],
        lens: list[int],
        page_size: int = 16,
        columns: int = 10,
        rest: int = 0,
        shared: int = 0,
        starts: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.counts, self.lens, self.page_size = counts, lens, page_size
        n_pages = len(lens) * columns + 3
        order = torch.randperm(n_pages, device="cpu").tolist()
        used = torch.zeros(n_pages, page_size, dtype=torch.bool, device="cpu")
        self.rows: list[list[int]] = []
        for length in lens:
            needed = -(-length // page_size)
            own = self.rows[0][: min(shared, needed)] if self.rows and shared else []
            own = [page for page in own if page in range(n_pages)]
            own = own + [order.pop() for _ in range(needed - len(own))]
            for n in range(length):
                used[own[n // page_size], n % page_size] = True
            self.rows.append([*own, *[-1, 10**6, own[0] if own else 0] * columns][:columns])
        self.k, self.v = (torch.randn(n_pages, page_size, KV_HEADS, n).to(dtype) for n in (SIZE, V_SIZE))
        self.k[~used.to(self.k.device)] = math.nan
        self.v[~used.to(self.k.device)] = torch.finfo(dtype).max / 4
        self.q = torch.randn(sum(counts) + rest, HEADS, SIZE).to(dtype)
        self.offsets = torch.tensor([sum(counts[:n]) for n in range(len(counts) + 1)], dtype=torch.int32)
        self.table, self.kv_lens = torch.tensor(self.rows, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
        self.given_starts = None if starts is None else torch.tensor(starts)
        behind = [max(0, n - c) for n, c in zip(lens, counts, strict=True)]
        self.starts = behind if starts is None else starts

    def attention(self, **arguments: Any) -> Any:
        return flexmasks.varlen_attention(
            self.q, self.k, self.v, self.offsets, page_table=self.table, kv_lens=self.kv_lens,
            q_offset=self.given_starts, **arguments,
        )  # fmt: skip

    def keys(self, cache: Tensor, s: int) -> Tensor:
        """Return the keys or values of a sequence, [1, Hkv, keys, D], one after the other."""
        slots = [cache[self.rows[s][n // self.page_size], n % self.page_size] for n in range(self.lens[s])]
        return torch.stack(slots, 1)[None]

    def expected(
        self, mask: MaskMod, change: Callable[..., Tensor] | None = None, tensors: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return output and lse in float64, by one sequence at a time.

        change: the score change, of scores and the indices b, h, q and kv.
        tensors: q, k and v in place of the step's own.
        """
        q, k, v = tensors or (self.q, self.k, self.v)
        out = torch.zeros(*q.shape[:2], V_SIZE, dtype=torch.float64, device="cpu")
        lse = torch.full((HEADS, len(q)), -math.inf, dtype=torch.float64, device="cpu")
        first = 0
        for s, (count, length, start) in enumerate(zip(self.counts, self.lens, self.starts, strict=True)):
            places, first = range(first, first + count), first + count
            if not count or not length:
                continue

            def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, s: int = s, start: int = start) -> Tensor:
                return mask(torch.full_like(b, s), h, q + start, kv)

            def changed(scores: Tensor, s: int = s, start: int = start) -> Tensor:
                h, at_q, at_kv = (torch.arange(n, device=self.q.device) for n in scores.shape[1:])
                indices = s, h[:, None, None], at_q[:, None] + start, at_kv
                return change(scores.to(self.q.device), *indices).cpu()  # type: ignore[misc]

            seen = create_mask(visible, 1, HEADS, count, length, self.q.device).cpu()
            own = q[places.start : places.stop].transpose(0, 1)[None].double().cpu()
            own_k, own_v = (self.keys(x, s).double().cpu() for x in (k, v))
            with torch.device("cpu"):
                one, one_lse = attend(own, own_k, own_v, seen, None if change is None else changed)
            index = torch.tensor(places, device="cpu")
            out = out.index_copy(0, index, one[0].transpose(0, 1))
            lse = lse.index_copy(1, index, one_lse[0])
        return out, lse


def server(**more: Any) -> Step:
    """Return a step in which sequences decode, take chunks, have no queries, no keys, drafts, or a whole prompt."""
    return Step([1, 1, 0, 70, 1, 5, 30, 1], [93, 160, 48, 150, 0, 64, 30, 17], rest=6, **more)


def causal(b: Any, h: Any, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def check(step: Step, mask: Any, mask_mod: MaskMod | None = None, **call: Any) -> None:
    """Compare output and lse with float64; a second call, with and without lse, gives the same."""
    with torch.no_grad():
        out, lse = step.attention(mask=mask, return_lse=True, **call)
        want, want_lse = step.expected(flexmasks.get_mask(mask) if mask_mod is None else mask_mod)
        assert out.shape == (*step.q.shape[:2], V_SIZE)
        assert out.dtype == step.q.dtype
        if not len(step.q):
            return
        assert error(out, want) < TOLERANCE[step.q.dtype]
        check_lse(lse, want_lse, 1e-5 if step.q.dtype == torch.float32 else 2e-2)
        assert not out[sum(step.counts) :].any()
        assert torch.equal(step.attention(mask=mask, return_lse=True, **call)[0], out)
        assert error(step.attention(mask=mask, **call), want) < TOLERANCE[step.q.dtype]


# --- compared with each sequence by itself ---


_PAGES = [(1, 0), (16, 4), (40, 1)]


@pytest.mark.parametrize(
    ("backend", "page_size", "shared"),
    [
        *one_in(3, [pytest.param("auto", *pages, marks=pytest.mark.slow) for pages in _PAGES]),
        *(("reference", *pages) for pages in _PAGES),
    ],
)
def test_a_server_s_step(page_size: int, shared: int, backend: str) -> None:
    """Also of sequences that share their first pages."""
    step = server(page_size=page_size, columns=160 // page_size, shared=shared)
    check(step, "causal", causal, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.campaign)])
def test_half_precision(dtype: torch.dtype) -> None:
    check(Step([30, 30], [93, 160], rest=2, dtype=dtype), "causal", causal)


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_server_s_step_in_half_precision(dtype: torch.dtype) -> None:
    check(server(dtype=dtype), "causal", causal)


def test_queries_that_are_not_the_last_ones() -> None:
    check(Step([20, 1, 7], [90, 30, 64], starts=[30, 29, 0]), "causal", causal)
    step = Step([20, 1, 7], [90, 30, 64], starts=[5, 5, 5])
    out = step.attention(mask="causal", backend="reference")
    step.given_starts = 5  # type: ignore[assignment]
    assert torch.equal(step.attention(mask="causal", backend="reference"), out)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *one_in(2, [("cpu, as on a GPU", name) for name in MASKS]),
        *(pytest.param("cpu", n, marks=[] if n in ON_CPU else pytest.mark.campaign) for n in MASKS),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in MASKS),
    ],
    indirect=["way"],
)
def test_every_mask(name: str) -> None:
    """Each registered mask, with tables and numbers of its example, or of the sequences."""
    of_sequences: dict[str, dict[str, Any]] = {
        "grouped_tril": {"seq_lens": torch.tensor([90, 100, 0, 70])},
        "padding": {"kv_lens": torch.tensor([90, 100, 0, 70])},
        "key_padding": {"attention_mask": torch.rand(4, 160) < 0.7},
        "topk": {"indices": torch.randint(-1, 160, (4, 160, 1, 9))},
    }
    if name in of_sequences:
        mask = flexmasks.get_mask(name, **of_sequences[name])
    else:
        mask = on_device(example("mask", name, 160), torch.get_default_device())
        batch = flexmasks.block_mask(mask, 160).shape[0]
        assert batch in (1, 4)
    check(Step([1, 20, 3, 0], [100, 160, 77, 50]), mask, backend="reference")


def test_functions_see_sequences_and_their_positions() -> None:
    """Masks and scores of users, by batch element, head and position."""
    limits, slopes = torch.tensor([100, 40, 0, 120, 9, 30, 20, 10]), torch.rand(8, HEADS)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (kv < limits[b]) & ((kv + h) % 3 != 0)

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - slopes[b, h] * (q - kv)

    step = server()
    for backend in ("auto", "reference"):
        with torch.no_grad():
            out, lse = step.attention(mask=mask, score=score, return_lse=True, backend=backend)
        want, want_lse = step.expected(mask, score)
        assert error(out, want) < TOLERANCE[torch.float32]
        check_lse(lse, want_lse, 1e-5)


def test_sinks_scale_and_registered_scores() -> None:
    step, sinks, slopes = server(), torch.randn(HEADS), torch.rand(HEADS)
    call: dict[str, Any] = {"mask": "sliding_window", "window": 30, "score": ["alibi", "softcap"], "slopes": slopes}
    with torch.no_grad():
        out, lse = step.attention(**call, cap=3.0, scale=0.5, sink_logits=sinks, return_lse=True)
        again = step.attention(**call, cap=3.0, scale=0.5, sink_logits=sinks)

    def change(scores: Tensor, b: int, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return 3 * torch.tanh((scores * 0.5 * SIZE**0.5 - slopes[h].double() * (q - kv).abs()) / 3)

    want, want_lse = step.expected(lambda b, h, q, kv: (kv <= q) & (q - kv <= 30), change)
    logits = sinks.double().cpu()[:, None]
    share = torch.sigmoid(want_lse - logits).T[..., None]
    assert error(out, want * share) < TOLERANCE[torch.float32]
    assert error(again, want * share) < TOLERANCE[torch.float32]
    check_lse(lse, torch.logaddexp(want_lse, logits), 1e-5)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    page_size, columns, batch = draw(st.integers(1, 40)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    lens = [draw(st.integers(0, page_size * columns)) for _ in range(batch)]
    counts = [draw(st.integers(0, n or 3)) for n in lens]
    lasts = [max(0, page_size * columns - n) for n in counts]
    starts = [draw(st.integers(0, n)) for n in lasts] if draw(st.booleans()) else None
    return Step(counts, lens, page_size, columns, draw(st.integers(0, 9)), draw(st.integers(0, 3)), starts)


@short_and_campaign(12, campaign=400)
def test_any_batch(examples: int) -> None:
    try_examples(examples, _check_any, steps(), st.sampled_from(["causal", "full", "window", "by sequence"]))


def _check_any(step: Step, name: str) -> None:
    def by_sequence(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q + kv + b) % 3 != 0

    mask: Any = {"window": flexmasks.get_mask("sliding_window", window=7), "by sequence": by_sequence}.get(name, name)
    check(step, mask, backend="reference")


# --- gradients, torch.compile, transforms ---


def gradients(call: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = call(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device="cpu").view(out.shape)
    (out.double().cpu() * weights).sum().backward()
    return [x.grad for x in leaves if x.grad is not None]


def _called(step: Step, **arguments: Any) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flexmasks.varlen_attention(
            q, k, v, step.offsets, page_table=step.table, kv_lens=step.kv_lens, mask="causal", **arguments
        )
        return out

    return call


def test_gradients() -> None:
    step = Step([1, 20, 0, 5, 1], [40, 64, 9, 5, 0], rest=3, shared=2)
    step.k, step.v = step.k.nan_to_num(0.0), step.v.clamp(max=5.0)
    tensors = step.q, step.k, step.v
    got = gradients(_called(step), *tensors)
    want = gradients(lambda *x: step.expected(causal, tensors=x)[0], *tensors)
    for x, y in zip(got, want, strict=True):
        assert error(x, y.double().cpu()) < 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("rest", [0, 3])
def test_gradients_of_a_step_without_queries(rest: int) -> None:
    step = Step([0, 0], [20, 5], rest=rest)
    step.k, step.v = step.k.nan_to_num(0.0), step.v.clamp(max=5.0)
    tensors = step.q, step.k, step.v
    assert not any(x.any() for x in gradients(_called(step), *tensors))
    out, lse = step.attention(mask="causal", return_lse=True)
    assert out.shape == (rest, HEADS, V_SIZE)
    assert lse.shape == (HEADS, rest)
    assert not out.any()
    with torch.autocast(step.q.device.type, dtype=torch.bfloat16):
        assert step.attention(mask="causal").dtype == torch.bfloat16


def test_gradients_of_queries_alone_and_of_a_score() -> None:
    step, slopes = Step([1, 70], [90, 130]), torch.rand(HEADS, requires_grad=True)
    step.k, step.v = step.k.nan_to_num(0.0), step.v.clamp(max=5.0)
    q = step.q.clone().requires_grad_()
    out = _called(step, score="alibi", slopes=slopes)(q, step.k, step.v)
    same = slopes.detach().double().requires_grad_()
    other_q = step.q.clone().requires_grad_()
    want, _ = step.expected(causal, lambda s, b, h, q, kv: s - same[h] * (q - kv).abs(), (other_q, step.k, step.v))
    out.double().cpu().square().sum().backward()
    want.square().sum().backward()
    for x, y in ((q, other_q), (slopes, same)):
        assert x.grad is not None
        assert y.grad is not None
        assert error(x.grad, y.grad.double().cpu()) < 2 * TOLERANCE[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "needs_gradients"),
    [
        *one_in(2, [("cpu", False), ("cpu, as on a GPU", True)]),
        pytest.param("cpu", True, marks=pytest.mark.campaign),
        pytest.param("cpu, as on a GPU", False, marks=pytest.mark.campaign),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
    indirect=["way"],
)
def test_inside_torch_compile(needs_gradients: bool, way: str) -> None:
    """One graph for every content of the tensors."""
    step = server()
    step.k, step.v = step.k.nan_to_num(0.0), step.v.clamp(max=5.0)

    @torch.compile(fullgraph=True, backend="inductor" if way == "cuda" else "aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        out: Tensor = flexmasks.varlen_attention(q, k, v, offsets, page_table=table, kv_lens=lens, mask="causal")
        return 2 * out

    graphs = None
    for _ in range(3):

        def compiled(*tensors: Tensor) -> Tensor:
            out: Tensor = call(*tensors, step.offsets, step.table, step.kv_lens)
            return out

        def alone(*tensors: Tensor) -> Tensor:
            return 2 * step.expected(causal, tensors=tensors)[0]

        tensors = step.q, step.k, step.v
        if needs_gradients:
            for x, y in zip(gradients(compiled, *tensors), gradients(alone, *tensors), strict=True):
                assert error(x, y.double().cpu()) < 2 * TOLERANCE[torch.float32]
        else:
            with torch.no_grad():
                assert error(compiled(*tensors), alone(*tensors)) < TOLERANCE[torch.float32]
        assert graphs in (None, private_torch.compiled_graphs())
        graphs = private_torch.compiled_graphs()
        draw_step(step)


# --- steps of a server ---


def draw_step(step: Step) -> None:
    """Give a step other offsets, lengths and pages, in new tensors of the same shapes."""
    n, total = len(step.lens), len(step.q)
    cuts = torch.randint(0, total + 1, (n,), device="cpu").sort().values.tolist()
    step.counts = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    room = step.table.shape[1] * step.page_size
    step.lens = [int(torch.randint(c, room + 1, (), device="cpu")) for c in step.counts]
    step.starts = [length - count for length, count in zip(step.lens, step.counts, strict=True)]
    order = torch.randperm(len(step.k), device="cpu")[: step.table.numel()].view(step.table.shape)
    step.rows, step.table = order.tolist(), order.to(step.table)
    step.offsets = torch.tensor([0, *cuts], dtype=torch.int32)
    step.kv_lens = torch.tensor(step.lens, dtype=torch.int32)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_new_tensors_compile_nothing(name: str) -> None:
    step = server()
    step.k, step.v = step.k.nan_to_num(0.0), step.v.clamp(max=5.0)
    mask: Any = flexmasks.get_mask("sliding_window", window=30) if name == "window" else name
    graphs = None
    with torch.no_grad():
        for _ in range(5):
            out = step.attention(mask=mask, backend="reference")
            assert torch.equal(step.attention(mask=mask, backend="reference"), out)  # another layer of the step
            assert error(out, step.expected(flexmasks.get_mask(mask))[0]) < TOLERANCE[torch.float32]
            assert graphs in (None, private_torch.compiled_graphs())
            graphs = private_torch.compiled_graphs()
            draw_step(step)


def test_few_queries_on_a_gpu(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backend "decode" takes pieces, with every mask, and makes its whole mask again for new tensors."""
    if way == "cpu":
        pytest.skip("a batch of 70 queries is no call of few queries")
    monkeypatch.setattr(decode, "_ON_GPU", ("cpu", "cuda"))
    monkeypatch.setattr(decode, "_KEYS_FOR_A_QUERY", 1)
    step = server()
    for _ in range(3):
        step.k, step.v = step.k.nan_to_num(0.0), step.v.clamp(max=5.0)
        check(step, flexmasks.get_mask("sliding_window", window=30), backend="decode")
        draw_step(step)


def test_queries_of_one_place_in_a_cuda_graph(way: str) -> None:
    """A captured step sees offsets, lengths and pages that were changed in place."""
    if way != "cuda":
        pytest.skip("needs a CUDA device")
    step = server()
    step.k, step.v = step.k.nan_to_num(0.0), step.v.clamp(max=5.0)
    held = step.offsets, step.table, step.kv_lens
    with torch.no_grad():
        for _ in range(3):
            step.attention(mask="causal")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step.attention(mask="causal")
        for _ in range(4):
            draw_step(step)
            for x, new in zip(held, (step.offsets, step.table, step.kv_lens), strict=True):
                x.copy_(new)
            graph.replay()
            assert error(out, step.expected(causal)[0]) < 2e-3


@pytest.mark.gpu
def test_new_tensors_are_not_read_on_a_gpu(way: str) -> None:
    step = server()
    step.k, step.v = step.k.nan_to_num(0.0), step.v.clamp(max=5.0)
    with torch.no_grad():
        for turn in range(6):
            if turn > 2:
                torch.cuda.set_sync_debug_mode("error")
            try:
                out = step.attention(mask="causal")
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert error(out, step.expected(causal)[0]) < 2e-3
            draw_step(step)


def test_pieces_read_no_value() -> None:
    """Tensors without data give pieces of shapes that depend on the shapes alone."""
    with FakeTensorMode():
        offsets, lens = torch.zeros(9, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
        mixed = in_pieces(PagedSequences(offsets, torch.zeros(8).long(), torch.zeros(8, 10).int(), lens), 300)
    assert mixed.batches[0].tokens.shape == (300 // 64 + 8, 64)
    assert mixed.places.shape == (300,)


# --- arguments ---


def good() -> dict[str, Any]:
    step = Step([2, 1], [20, 17], columns=2)
    return {
        "q": step.q, "k": step.k, "v": step.v, "offsets": step.offsets, "page_table": step.table,
        "kv_lens": step.kv_lens, "mask": "causal",
    }  # fmt: skip


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kv_offsets too": ({"kv_offsets": [0, 9, 20]}, TypeError, "`kv_offsets`, or `page_table` and `kv_lens`, not both"),
    "no lengths": ({"kv_lens": None}, TypeError, "needs both `page_table` and `kv_lens`; `kv_lens` is missing"),
    "no table": ({"page_table": None}, TypeError, "`page_table` is missing"),
    "q of 4 dimensions": ({"q": torch.zeros(1, 4, 3, 16)}, ValueError, "`q` must be a tensor [total, H, D]"),
    "k end to end": ({"k": torch.zeros(20, 2, 16)}, ValueError, "4 dimensions, [n_pages, page_size, Hkv, D]"),
    "dtypes": ({"q": torch.zeros(3, 4, 16, dtype=torch.float64)}, TypeError, "must have one dtype; got q float64"),
    "head sizes": ({"q": torch.zeros(3, 4, 8)}, ValueError, "q and k_cache must have one head size D"),
    "heads": ({"q": torch.zeros(3, 3, 16)}, ValueError, "multiple of the number of key heads"),
    "table of other sequences": (
        {"page_table": torch.zeros(3, 2, dtype=torch.int64)},
        ValueError,
        "`page_table` must be an integer tensor [B, P] with B = 2",
    ),
    "other numbers of sequences": (
        {"offsets": torch.tensor([0, 1, 2, 3])},
        ValueError,
        "`page_table` must be an integer tensor [B, P] with B = 3",
    ),
    "a number of keys": ({"kv_lens": 20}, TypeError, "`kv_lens` must be an integer tensor [B]"),
    "offsets fall": ({"offsets": torch.tensor([0, 3, 2])}, ValueError, "`offsets` must rise from 0 to at most"),
    "offsets past the end": ({"offsets": torch.tensor([0, 3, 4])}, ValueError, "at most the length 3, got [0, 3, 4]"),
    "offsets of floats": ({"offsets": [0.0, 1.0, 2.0]}, ValueError, "`offsets` must be int[N + 1]"),
    "more queries than keys": (
        {"kv_lens": torch.tensor([1, 17])},
        ValueError,
        "sequence 0 has kv_lens = 1 keys and 2 queries; pass `q_offset`",
    ),
    "q_offset": ({"q_offset": torch.zeros(3, dtype=torch.int64)}, ValueError, "[B] = [2]"),
    "sinks": ({"sink_logits": torch.zeros(3)}, TypeError, "floating tensor [H] = [4]"),
    "unknown parameter": ({"window": 3}, TypeError, "no argument is named `window`"),
    "seqused_k": ({"seqused_k": 3}, TypeError, "`kv_lens`"),
    "block_table": ({"block_table": 3}, TypeError, "`page_table`"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, way: str) -> None:
    wrong, kind, message = ERRORS[case]
    if way == "cuda":
        pytest.skip("tensors of wrong arguments are on the CPU")
    given = good() | wrong
    qkv = [given.pop(n) for n in ("q", "k", "v", "offsets")]
    with pytest.raises(kind, match=re.escape(message)) as raised:
        flexmasks.varlen_attention(*qkv, **given)
    assert str(raised.value).startswith("flexmasks")


@pytest.mark.parametrize("counts", [[2, 1, 1], [0, 1, 3], [2, 2, 2], [1, 0, 1]])
@pytest.mark.parametrize("wrong", range(3))
def test_wrong_pages_are_those_of_their_sequence(counts: list[int], wrong: int) -> None:
    """PagedSequences with equally many queries are rows of one batch, where they have other numbers."""
    step = Step(counts, [20, 17, 30], columns=2)
    given = {"offsets": step.offsets, "mask": "causal"}
    call = lambda **g: flexmasks.varlen_attention(step.q, step.k, step.v, **given, **g)  # noqa: E731
    table, lens, negative = step.table.clone(), step.kv_lens.clone(), step.kv_lens.clone()
    table[wrong, 1], lens[wrong], negative[wrong] = 99, 2 * step.k.shape[1] + 1, -1
    if not counts[wrong]:  # its pages are not read
        assert call(page_table=table, kv_lens=step.kv_lens).isfinite().all()
        return
    with pytest.raises(
        ValueError, match=rf"^flexmasks.varlen_attention: .* got 99 for page 1 of batch element {wrong}"
    ):
        call(page_table=table, kv_lens=step.kv_lens)
    with pytest.raises(
        ValueError, match=rf"^flexmasks.varlen_attention: `kv_lens` must be at most .* got {lens[wrong]}"
    ):
        call(page_table=step.table, kv_lens=lens)
    with pytest.raises(ValueError, match=r"^flexmasks.varlen_attention: `kv_lens` must be .*, got values from -1"):
        call(page_table=step.table, kv_lens=negative)
