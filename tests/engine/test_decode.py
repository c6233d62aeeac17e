"""Few queries: backend "decode", compared with torch's create_mask and attention in float64."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import few_queries_plain
import pytest
import torch
from functions import short_and_campaign
from helpers import TOLERANCE, check_lse, error, in_campaigns, one_in, play_graphs, try_examples
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from benchmarks import private_torch
from benchmarks.examples import on_device
from flexmasks import road
from flexmasks.backends import decode
from flexmasks.backends.added import is_added
from flexmasks.backends.call import Ready
from flexmasks.plans.whole import Whole
from flexmasks.plans.windows import Intervals
from flexmasks.request import Request
from flexmasks.road import plan_call
from flexmasks.spec.registry import example

BATCH, HEADS, KV_HEADS, LENGTH = 3, 4, 2, 160
MASKS = [e.name for e in flexmasks.list_masks()]
HALF = [torch.float16, torch.bfloat16]


_ON_CPU = ["cpu", "cpu, as on a GPU"]


@pytest.fixture(params=[*_ON_CPU, pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where calls run; "as on a GPU", the operator of the kernels runs in plain torch, and calls are renewed."""
    if request.param == "cpu, as on a GPU":
        monkeypatch.setattr(decode, "_ON_GPU", ("cpu", "cuda"))
        few_queries_plain.replace_kernels(monkeypatch)
        monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))
        play_graphs(monkeypatch)
    flexmasks.clear_caches()
    with torch.device(request.param.partition(",")[0]):
        yield request.param
    flexmasks.clear_caches()


def tensors(q_len: int, kv_len: int = LENGTH, dtype: torch.dtype = torch.float32, **sizes: int) -> list[Tensor]:
    """Return q, k and v, which lie in memory as caches do: [B, S, H, D]."""
    heads, kv_heads = sizes.get("heads", HEADS), sizes.get("kv_heads", KV_HEADS)
    size, batch = sizes.get("size", 16), sizes.get("batch", BATCH)
    shapes = [(q_len, heads, size), (kv_len, kv_heads, size), (kv_len, kv_heads, sizes.get("v_size", size))]
    return [torch.randn(batch, *shape).to(dtype).transpose(1, 2) for shape in shapes]


def moved(mask_mod: Callable[..., Tensor], offset: int | Tensor) -> Callable[..., Tensor]:
    """Return a mask_mod whose first query is at a position, one for each batch element if it is a tensor."""
    if isinstance(offset, int):
        return lambda b, h, q, kv: mask_mod(b, h, q + offset, kv)
    return lambda b, h, q, kv: mask_mod(b, h, q + offset[b], kv)


def check(
    qkv: list[Tensor],
    mask: Any,
    offset: int | Tensor = 0,
    bias: Callable[[Tensor], Tensor] | None = None,
    **call: Any,
) -> None:
    """Compare output and lse with attention in float64.

    bias: the scores [B, H, Q, KV] after a score change, from the scores.
    """
    q, k, v = qkv
    visible = create_mask(moved(flexmasks.get_mask(mask), offset), len(q), q.shape[1], q.shape[2], k.shape[2], q.device)
    groups = q.shape[1] // k.shape[1]
    exact_q, exact_k, exact_v = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = exact_q @ exact_k.mT * call.get("scale", q.shape[3] ** -0.5)
    scores = (scores if bias is None else bias(scores)).masked_fill(~visible, -math.inf)
    want_lse = scores.logsumexp(-1)
    want = (scores - want_lse.clamp(min=-1e30)[..., None]).exp() @ exact_v
    out, lse = flexmasks.attention(*qkv, mask=mask, q_offset=offset, backend="decode", return_lse=True, **call)
    assert out.dtype == q.dtype
    assert error(out, want.cpu()) < TOLERANCE[q.dtype]
    check_lse(lse, want_lse.cpu(), 1e-5 if q.dtype == torch.float32 else 2e-2)
    again = flexmasks.attention(*qkv, mask=mask, q_offset=offset, backend="decode", **call)
    assert torch.equal(again, out)


def of_name(name: str, q_len: int) -> flexmasks.Mask:
    """Return the example of a registered mask."""
    if name == "packed":
        return flexmasks.packed("causal", [0, q_len // 2, q_len], [0, 60, LENGTH])
    return on_device(example("mask", name, LENGTH), torch.get_default_device())


def by_turns(names: list[str], numbers: list[int]) -> list[Any]:
    """Return ways, names and numbers. The suite tries one number of a name, which has the ways on a CPU by turns."""
    cases = []
    for n, name in enumerate(names):
        for turn, number in enumerate(numbers):
            of_way = [pytest.param(way, name, number) for way in (_ON_CPU if n % 2 else _ON_CPU[::-1])]
            on_gpu = pytest.param("cuda", name, number, marks=pytest.mark.gpu)
            if n % len(numbers) == turn:
                cases += [*one_in(2, of_way), on_gpu]
            else:
                cases += map(in_campaigns, [*of_way, on_gpu])
    return cases


@pytest.mark.parametrize(("way", "name", "q_len"), by_turns(MASKS, [1, 4, 17]), indirect=["way"])
def test_every_mask(name: str, q_len: int) -> None:
    """Each at several places of the queries, which are the same or not in each batch element."""
    mask = of_name(name, q_len)
    batch = BATCH if name == "packed" else flexmasks.block_mask(mask, LENGTH).shape[0]
    offsets = [0] if name == "packed" else [0, 90, torch.randint(0, LENGTH - q_len + 1, (batch,))]
    for offset in offsets:
        check(tensors(q_len, batch=batch), mask, offset)


def test_plans_whose_mask_and_score_change() -> None:
    q, k, v = tensors(1)
    lens, slopes = torch.tensor([50, 160, 90]), torch.rand(HEADS)
    where = {"batch": BATCH, "heads": HEADS, "q_offset": LENGTH - 1}
    mask = lambda b, h, q, kv: (kv < lens[b]) & (kv % 7 != 3)  # noqa: E731
    plan = flexmasks.plan(mask, 1, LENGTH, score="alibi", slopes=slopes, **where)
    exact_k, exact_v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    for _ in range(3):
        scores = q.double() @ exact_k.mT / 4 - slopes[:, None, None] * (LENGTH - 1 - torch.arange(LENGTH))
        key = torch.arange(LENGTH)
        scores = scores.masked_fill((key >= lens[:, None, None, None]) | (key % 7 == 3), -math.inf)
        for _ in range(2):
            out = flexmasks.attention(q, k, v, mask=plan, backend="decode")
            assert error(out, (scores.softmax(-1) @ exact_v).cpu()) < TOLERANCE[torch.float32]
        lens, slopes = torch.randint(1, LENGTH, (BATCH,)), torch.rand(HEADS)
        plan.update(lens=lens, slopes=slopes)


def pages_of(cache: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Return keys or values [B, Hkv, KV, D] in pages, which lie as the table says; others are NaN."""
    pages = cache.transpose(1, 2).reshape(-1, page_size, *cache.shape[1::2])
    pool = torch.full((int(table.max()) + 2, *pages.shape[1:]), math.nan, dtype=cache.dtype)
    pool[table.flatten()] = pages
    return pool


@pytest.mark.parametrize(
    ("way", "name", "page_size"),
    by_turns([n for n in MASKS if n not in ("packed", "paged")], [1, 16, 40]),
    indirect=["way"],
)
def test_every_mask_in_pages(name: str, page_size: int) -> None:
    """Pages give what the same keys give side by side, and a sequence may have no keys."""
    mask = of_name(name, 3)
    of_one = name in ("grouped_tril", "key_padding", "padding")  # their examples have one batch element
    batch = 1 if of_one else max(2, flexmasks.block_mask(mask, LENGTH).shape[0])
    q, k, v = tensors(3, batch=batch, v_size=24)
    table = torch.randperm(batch * LENGTH // page_size + 9)[: batch * LENGTH // page_size].view(batch, -1)
    lens = torch.randint(3, LENGTH + 1, (batch,))
    lens[0] = 100 if of_one else 0
    pool = [pages_of(x, table, page_size) for x in (k, v)]
    used = torch.arange(0, LENGTH, page_size) < lens[:, None]
    noise = torch.where(used, table, -7)
    out, lse = flexmasks.paged_attention(q, *pool, noise, lens, mask=mask, return_lse=True, backend="decode")
    whole = mask & flexmasks.get_mask("padding", kv_lens=lens)
    want, want_lse = flexmasks.attention(
        q, k, v, mask=whole, q_offset=(lens - 3).clamp(min=0), return_lse=True, backend="reference"
    )
    assert error(out, want.double().cpu()) < TOLERANCE[torch.float32]
    check_lse(lse, want_lse.double().cpu(), 1e-5)
    assert of_one or not out[0].any()


def test_shared_pages() -> None:
    q, k, v = tensors(1, 64, batch=2)
    k[1, :, :32], v[1, :, :32] = k[0, :, :32], v[0, :, :32]
    table = torch.tensor([[5, 2, 0, 7], [5, 2, 6, 1]], dtype=torch.int32)
    pool = [pages_of(x, table.long(), 16) for x in (k, v)]
    out = flexmasks.paged_attention(q, *pool, table, torch.tensor([64, 50]), mask="causal", backend="decode")
    want = flexmasks.attention(q, k, v, mask="causal", q_offset=torch.tensor([63, 49]), backend="reference")
    assert error(out, want.double().cpu()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("q_len", [65, 200, pytest.param(512, marks=pytest.mark.campaign)])
def test_chunks(q_len: int, way: str) -> None:
    """Chunks of a prompt behind a long cache, on a GPU, without and with pages."""
    if way == "cpu":
        pytest.skip("on a CPU chunks have another way")
    kv_len = 8 * q_len + 16 - 8 * q_len % 16
    q, k, v = tensors(q_len, kv_len, batch=2)
    lens = torch.tensor([kv_len - 5, q_len])
    table = torch.randperm(2 * kv_len // 16).view(2, -1)
    pool = [pages_of(x, table, 16) for x in (k, v)]
    masks = [
        flexmasks.get_mask("causal"),
        flexmasks.get_mask("sliding_window", window=100),
        flexmasks.get_mask("block_causal", block=64),
    ]
    for mask in [*masks, flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & ((q + h) % 3 != kv % 5))]:
        check([q, k, v], mask, lens - q_len)
        seen = mask & flexmasks.get_mask("padding", kv_lens=lens)
        want = flexmasks.attention(q, k, v, mask=seen, q_offset=lens - q_len, backend="reference")
        out = flexmasks.paged_attention(q, *pool, table, lens, mask=mask)
        assert error(out, want.double().cpu()) < TOLERANCE[torch.float32]


# --- scores ---


Scores = dict[str, tuple[Any, Callable[[Tensor], Tensor]]]
NAMES = ("alibi", "table", "before", "some", "cap", "factor", "taken away", "twice", "chosen", "alpha", "sum")
ADDED = NAMES[:4]


def scores() -> Scores:
    """Return score changes, with what they do to scores [B, H, Q, KV] of queries from position 40 on."""
    table, by_head = torch.randn(HEADS, LENGTH), torch.rand(HEADS)
    return {
        "alibi": (
            flexmasks.get_score("alibi", slopes=by_head),
            lambda s: s - by_head[:, None, None] * _distances(s).abs(),
        ),
        "table": (lambda score, b, h, q, kv: score + table[h, kv], lambda s: s + table[:, None]),
        "before": (lambda score, b, h, q, kv: table[h, kv] + score - 1, lambda s: s + table[:, None] - 1),
        "some": (lambda score, b, h, q, kv: score + torch.where(q > kv, 0.5, -torch.inf), lambda s: s + _before(s)),
        "cap": (flexmasks.get_score("softcap", cap=2.0), lambda s: 2 * (s / 2).tanh()),
        "factor": (lambda score, b, h, q, kv: score * by_head[h], lambda s: s * by_head[:, None, None]),
        "taken away": (lambda score, b, h, q, kv: table[h, kv] - score, lambda s: table[:, None] - s),
        "twice": (lambda score, b, h, q, kv: score + score, lambda s: 2 * s),
        "chosen": (
            lambda score, b, h, q, kv: torch.where(q > kv, score, -1.0),
            lambda s: torch.where(_distances(s) > 0, s, -1.0),
        ),
        "alpha": (lambda score, b, h, q, kv: torch.add(table[h, kv], score, alpha=2), lambda s: table[:, None] + 2 * s),
        "sum": (lambda score, b, h, q, kv: score * 2 + 1, lambda s: 2 * s + 1),
    }


def _distances(scores: Tensor) -> Tensor:
    q_len, kv_len = scores.shape[2:]
    return torch.arange(40, 40 + q_len)[:, None] - torch.arange(kv_len)


def _before(scores: Tensor) -> Tensor:
    return torch.where(_distances(scores) > 0, 0.5, -math.inf)


@pytest.mark.parametrize("name", NAMES)
def test_scores(name: str, way: str) -> None:
    score, change = scores()[name]
    q, k, v = tensors(5)
    call = plan_call(q, k, v, Request(flexmasks.get_mask("causal"), flexmasks.get_score(score), q_offset=40)).call
    assert is_added(call) == (name in ADDED)
    if way == "cpu" or name in (*ADDED, "cap"):
        check([q, k, v], "causal", 40, change, score=score)
    else:
        with pytest.raises(ValueError, match="only soft-caps and score changes that add"):
            flexmasks.attention(q, k, v, mask="causal", q_offset=40, score=score, backend="decode")


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(dtype: torch.dtype, way: str) -> None:
    changes = scores()
    for name in ADDED if way == "cpu" else (*ADDED, "cap"):
        score, change = changes[name]
        check(tensors(2, dtype=dtype), "causal", 40, change, score=score)
    check(tensors(2, dtype=dtype), "causal", 40)
    if way == "cpu":
        with pytest.raises(ValueError, match="only values of q's head size"):
            check(tensors(2, dtype=dtype, v_size=24), "causal", 40)
    else:
        check(tensors(2, dtype=dtype, v_size=24), "causal", 40)
    with pytest.raises(ValueError, match="score changes that add"):
        check(tensors(2, dtype=dtype), "causal", 40, changes["factor"][1], score=changes["factor"][0])


def test_sinks_and_scales() -> None:
    q, k, v = tensors(3)
    call: dict[str, Any] = {"mask": "causal", "q_offset": 50, "sink_logits": torch.randn(HEADS), "scale": 0.7}
    table = torch.arange(BATCH * LENGTH // 16).view(BATCH, -1)
    pool = [pages_of(x, table, 16) for x in (k, v)]
    want, want_lse = flexmasks.attention(q, k, v, backend="reference", return_lse=True, **call)
    lens = torch.full((BATCH,), LENGTH)
    for out, lse in (
        flexmasks.attention(q, k, v, backend="decode", return_lse=True, **call),
        flexmasks.paged_attention(q, *pool, table, lens, backend="decode", return_lse=True, **call),
    ):
        assert error(out, want.double().cpu()) < TOLERANCE[torch.float32]
        check_lse(lse, want_lse.double().cpu(), 1e-5)


# --- what lies in memory ---


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_hidden_keys_may_hold_anything(poison: float) -> None:
    """Also between visible keys, and behind the end of some sequences."""
    for score in (None, scores()["cap"][0]):
        q, k, v = tensors(2)
        visible = torch.rand(BATCH, LENGTH) < 0.5
        visible[0, 100:], visible[1] = False, False
        want = flexmasks.attention(
            q, k, v, mask="key_padding", attention_mask=visible, score=score, backend="reference"
        )
        k = torch.where(visible[:, None, :, None], k, poison)
        for _ in range(2):
            out = flexmasks.attention(
                q, k, v, mask="key_padding", attention_mask=visible, score=score, backend="decode"
            )
            assert error(out, want.double().cpu()) < TOLERANCE[torch.float32]


def test_layouts() -> None:
    """Heads of any grouping, and any strides."""
    for sizes in ({"kv_heads": 1}, {"kv_heads": 4}, {"batch": 1}):
        check(tensors(3, **sizes), "causal", 77)
    q, k, v = tensors(3)
    check([q, k.mT.contiguous().mT, v.mT.contiguous().mT], "causal", 77)
    check([q.mT.contiguous().mT, k, v], "causal", 77)
    check([q[..., :1].expand_as(q), k, v], "causal", 77)
    check([q, k[:1].expand_as(k), v[:1].expand_as(v)], "causal", 77)


@pytest.mark.parametrize("v_size", [16, 8])
@pytest.mark.parametrize("bias", [-math.inf, torch.finfo(torch.float32).min, -1e20])
def test_large_biases(bias: float, v_size: int, way: str) -> None:
    """A row whose scores are all -inf sees nothing; equal scores have equal weights, however low they are."""
    q, k, v = tensors(3, 40, heads=KV_HEADS, v_size=v_size)
    added = torch.zeros(3, 40)
    added[1], added[2, 7:] = bias, bias
    scores = q.double() @ k.double().mT / 4 + added.double()
    want, want_lse = scores.softmax(-1).nan_to_num(0.0) @ v.double(), scores.logsumexp(-1)
    function = lambda score, b, h, q, kv: torch.relu(score) - torch.relu(-score) + added[q, kv]  # noqa: E731
    scores_by = [{"score": "dense_bias", "bias": added}, *([{"score": function}] if way == "cpu" else [])]
    for backend in ("decode", "reference"):
        for score in scores_by:
            out, lse = flexmasks.attention(q, k, v, backend=backend, return_lse=True, q_offset="first", **score)
            assert error(out, want.cpu()) < TOLERANCE[torch.float32]
            assert torch.allclose(lse.double(), want_lse, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", one_in(2, [False, True]))  # eight kernels together
def test_one_query_of_a_batch_that_sees_nothing(is_compiled: bool, way: str) -> None:
    """In torch's kernel for one query on a CPU the output is memory that nothing was written to."""
    if is_compiled and way == "cpu, as on a GPU":
        pytest.skip("it would compile the same as on a CPU")
    q, k, v = tensors(1, 640, torch.bfloat16, batch=1, size=64)
    compiled = torch.compile(lambda *x: flexmasks.attention(*x[:3], block_mask=x[3]), fullgraph=True)
    made = flexmasks.block_mask("padding", 1, 640, kv_lens=torch.tensor([600]))
    for lens in (torch.tensor([600]), torch.tensor([0]), torch.tensor([0])):
        left = [torch.full((n,), math.nan) for n in (64, 128, 256, 512, 1024, 2048, 4096) * 8]
        del left  # memory that is free now holds NaN
        with torch.no_grad():
            if is_compiled:
                for counts in (made.kv_num_blocks, made.full_kv_num_blocks):
                    assert counts is not None
                    counts *= lens.any()  # a block mask of its own for each length would be compiled anew
                out = compiled(q.float(), k.float(), v.float(), made)
            else:
                out = flexmasks.attention(q, k, v, mask="padding", kv_lens=lens, score="softcap", cap=30.0)
        assert bool(out.any()) == bool(lens.any())
        assert out.isfinite().all()


def test_batch_elements_one_by_one() -> None:
    """Few keys of long caches: each element's own keys are read."""
    q, k, v = tensors(1, 4000, batch=4)
    ends = torch.tensor([3990, 5, 60, 7])
    check([q, k, v], flexmasks.get_mask("sliding_window", window=9), ends)
    call = plan_call(q, k, v, Request(flexmasks.get_mask("sliding_window", window=9), q_offset=ends)).call
    parts = decode._parts(call.mask.whole.visible, len(q))
    assert [(p.keys.start, p.keys.stop) for p in parts] == [(3981, 3991), (0, 6), (51, 61), (0, 8)]


def test_changes_in_place_are_seen() -> None:
    q, k, v = tensors(1)
    lens = torch.tensor([1, 50, 100])
    table = torch.arange(BATCH * LENGTH // 16).view(BATCH, -1)
    pool = [pages_of(x, table, 16) for x in (k, v)]
    for _ in range(3):
        want = flexmasks.attention(q, k, v, mask="padding", kv_lens=lens, backend="reference")
        for _ in range(2):
            for out in (
                flexmasks.attention(q, k, v, mask="padding", kv_lens=lens, backend="decode"),
                flexmasks.paged_attention(q, *pool, table, lens, backend="decode"),
            ):
                assert error(out, want.double().cpu()) < TOLERANCE[torch.float32]
        lens += 9
    order = torch.randperm(len(pool[0]))
    inverse = order.argsort()
    pool = [x[order] for x in pool]
    table.copy_(inverse[table])
    assert (
        error(flexmasks.paged_attention(q, *pool, table, lens - 9, backend="decode"), want.double().cpu())
        < TOLERANCE[torch.float32]
    )


def test_tensors_by_turns() -> None:
    """Calls with some tensors are right after calls with others, without and with pages."""
    q, k, v = tensors(2)
    table = torch.arange(BATCH * LENGTH // 16).view(BATCH, -1)
    pool = [pages_of(x, table, 16) for x in (k, v)]
    rows = torch.randn(7, HEADS, LENGTH)
    drawn = [torch.randint(2, LENGTH + 1, (BATCH,)) for _ in range(5)]
    changes: list[Callable[..., Tensor] | None] = [
        None if n % 2 else (lambda score, b, h, q, kv, row=row: score + row[h, kv]) for n, row in enumerate(rows[:5])
    ]
    want = [
        flexmasks.attention(q, k, v, mask="causal", score=score, q_offset=lens - 2, backend="reference")
        for lens, score in zip(drawn, changes, strict=True)
    ]
    for n in (0, 1, 2, 3, 4, 4, 0, 3, 1, 1, 2, 4, 0):
        score, expected = changes[n], want[n].double().cpu()
        out = flexmasks.attention(q, k, v, mask="causal", score=score, q_offset=drawn[n] - 2, backend="decode")
        assert error(out, expected) < TOLERANCE[torch.float32]
        for lens in (drawn[n], drawn[n].int()):
            for _ in range(2):
                out = flexmasks.paged_attention(q, *pool, table, lens, mask="causal", score=score, backend="decode")
                assert error(out, expected) < TOLERANCE[torch.float32]


def test_tensors_whose_elements_share_memory() -> None:
    for _ in range(4):
        q, k, v = tensors(2)
        one = torch.rand(1, 1, 2, LENGTH) < 0.5
        step = torch.rand(LENGTH + 1) < 0.5
        for table in (one.expand(BATCH, HEADS, -1, -1), step.unfold(0, LENGTH, 1).expand(BATCH, HEADS, -1, -1)):
            check([q, k, v], lambda b, h, q, kv, table=table: table[b, h, q, kv])


def test_products_beyond_half_precision() -> None:
    """Products of q and k may be larger than float16 holds, also where a hidden key is NaN."""
    q, k, v = (300 * torch.randn(1, 2, n, 16) for n in (1, 40, 40))
    k[:, :, 30:] = math.nan
    scores = 1e-6 * (q.half().double() @ k[:, :, :30].half().double().mT)
    v = (v / 300).half()
    got = flexmasks.attention(
        q.half(), k.half(), v, mask="causal", q_offset=torch.tensor([29]), scale=1e-6, backend="decode"
    )
    want = scores.softmax(-1) @ v[:, :, :30].double()
    assert error(got, want.cpu()) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", HALF)
def test_products_beyond_half_precision_beside_poison(dtype: torch.dtype) -> None:
    """A key that nobody sees is NaN among the others."""
    q, k, v = tensors(1, dtype=dtype)
    q, k = 300 * q, 300 * k
    seen = torch.arange(LENGTH) != 50
    exact_k, exact_v = (x[:, :, seen].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    k[:, :, 50] = math.nan
    out = flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: kv != 50, scale=1e-6, backend="decode")
    want = (q.double() @ exact_k.mT * 1e-6).softmax(-1) @ exact_v
    assert error(out, want.cpu()) < TOLERANCE[dtype]


def test_a_serving_loop_waits_for_nothing_and_can_be_captured(way: str) -> None:
    """After the first steps nothing is read on the host; a CUDA graph follows lengths and tables that change."""
    if way != "cuda":
        pytest.skip("needs a GPU")
    q, k, v = tensors(2, dtype=torch.float16)
    table = torch.arange(BATCH * LENGTH // 16).view(BATCH, -1)
    pool = [pages_of(x, table, 16) for x in (k, v)]
    lens, slopes = torch.full((BATCH,), 50), torch.rand(HEADS)

    def step(lens: Tensor, table: Tensor) -> list[Tensor]:
        calls: list[dict[str, Any]] = [{}, {"score": "alibi", "slopes": slopes}, {"score": "softcap", "cap": 2.0}]
        outs = [flexmasks.paged_attention(q, *pool, table, lens, mask="causal", **call) for call in calls]
        return [*outs, *(flexmasks.attention(q, k, v, mask="causal", q_offset=lens - 2, **call) for call in calls)]

    def drawn() -> tuple[Tensor, Tensor]:
        pages = [torch.randint(BATCH, ()).item() for _ in range(BATCH)]  # sequences that take over another's pages
        return torch.randint(2, LENGTH + 1, (BATCH,)), table[pages]

    for _ in range(4):
        step(*drawn())
    for lens_of_step, table_of_step in [drawn() for _ in range(5)]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(lens_of_step, table_of_step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    held = table.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step(lens, held)
    for _ in range(50):
        for place, new in zip((lens, held), drawn(), strict=True):
            place.copy_(new)
        graph.replay()
        for out, want in zip(outs, step(lens.clone(), held.clone()), strict=True):
            assert torch.equal(out, want)


# --- bands ---


def bands() -> dict[str, flexmasks.Mask]:
    """Return masks that kernels on a GPU take as intervals of keys."""
    window = flexmasks.get_mask("sliding_window", window=30)
    return {
        "causal": flexmasks.get_mask("causal"),
        "full": flexmasks.get_mask("full"),
        "window": window,
        "local": flexmasks.get_mask("local", left=20, right=9),
        "both": flexmasks.get_mask("local", left=50, right=3) & "causal",
        "padded": window & flexmasks.get_mask("padding", kv_lens=torch.tensor([0, 100, LENGTH])),
    }


def ready(qkv: list[Tensor], mask: Any, offset: int | Tensor = 0, **more: Any) -> Any:
    call, plans, *_ = plan_call(*qkv, Request(flexmasks.get_mask(mask), q_offset=offset, backend="decode", **more))
    assert decode.refuses(call) is None
    kernel = decode.kernel(call)
    return Ready(kernel, kernel.forms(plans))


_BANDS = ["causal", "full", "window", "local", "both", "padded"]


@pytest.mark.parametrize(("name", "q_len"), one_in(2, list(itertools.product(_BANDS, [1, 4, 17]))))
def test_bands(name: str, q_len: int, way: str) -> None:
    """Queries before the end of the keys, at it and, by a number, behind it; no mask is computed."""
    mask = bands()[name]
    offsets: list[int | Tensor] = [
        *(torch.randint(0, LENGTH - q_len + 1, (BATCH,)) for _ in range(2)), torch.full((BATCH,), LENGTH - q_len),
        *(0, 100, LENGTH - 1, LENGTH + 7),
    ]  # fmt: skip
    for offset in offsets:
        for dtype in (torch.float32, torch.float16):
            check(tensors(q_len, dtype=dtype), mask, offset)
        if way != "cpu":
            assert isinstance(ready(tensors(q_len), mask, offset).forms[0], Intervals)
    if way != "cpu":
        assert flexmasks.cache_info()["plans"].parts["whole"].entries == 0


@pytest.mark.parametrize(("q_len", "name"), one_in(3, list(itertools.product([1, 4, 17], _BANDS[:-1]))))
def test_bands_in_pages(name: str, q_len: int, way: str) -> None:
    """The queries are the last ones of each sequence, or start elsewhere; a sequence may have no keys."""
    mask = bands()[name]
    table = torch.randperm(BATCH * LENGTH // 16).view(BATCH, -1)
    q, k, v = tensors(q_len)
    pool = [pages_of(x, table, 16) for x in (k, v)]
    for _ in range(2):
        lens = torch.randint(q_len, LENGTH + 1, (BATCH,))
        lens[torch.randint(BATCH, ())] = 0
        whole = mask & flexmasks.get_mask("padding", kv_lens=lens)
        for offset in (None, (lens - q_len - 3).clamp(min=0), 5):
            more: dict[str, Any] = {"return_lse": True}
            out, lse = flexmasks.paged_attention(
                q, *pool, table, lens, mask=mask, q_offset=offset, backend="decode", **more
            )
            starts = (lens - q_len).clamp(min=0) if offset is None else offset
            want, want_lse = flexmasks.attention(q, k, v, mask=whole, q_offset=starts, backend="reference", **more)
            assert error(out, want.double().cpu()) < TOLERANCE[torch.float32]
            check_lse(lse, want_lse.double().cpu(), 1e-5)
    if way != "cpu":
        assert flexmasks.cache_info()["plans"].parts["whole"].entries == 0


def test_what_is_no_band(way: str) -> None:
    """Other masks are tensors: windows of tensors, several paddings, and queries that see no key at all."""
    if way == "cpu":
        pytest.skip("on a CPU every mask is a tensor")
    lens = torch.tensor([5, 100, LENGTH])
    padding = flexmasks.get_mask("padding", kv_lens=lens)
    masks: list[Any] = [
        flexmasks.get_mask("sliding_window", window=torch.tensor(30)),
        padding & flexmasks.get_mask("padding", kv_lens=lens - 1),
        ~flexmasks.get_mask("causal"),
        lambda b, h, q, kv: q >= kv,
    ]
    for mask in masks:
        check(tensors(3), mask, 60)
        assert isinstance(ready(tensors(3), mask, 60).forms[0], Whole)


def test_values_of_bands_are_checked() -> None:
    """For the first tensors of a kind on a GPU, and on a CPU for all."""
    with pytest.raises(ValueError, match="`q_offset` must be at least 0"):
        flexmasks.attention(*tensors(1), mask="causal", q_offset=torch.tensor([3, -1, 3]), backend="decode")
    seq_lens = torch.tensor([3, LENGTH + 1, 3])
    with pytest.raises(ValueError, match="kv_lens"):
        flexmasks.attention(*tensors(1), mask="padding", kv_lens=seq_lens, backend="decode")


@pytest.mark.parametrize("lens", [[-1, 5, 5], [LENGTH + 1, 5, 5]])
def test_errors_of_pages_name_the_call_s_arguments(lens: list[int]) -> None:
    table = torch.arange(BATCH * LENGTH // 16).view(BATCH, -1)
    q, k, v = tensors(1)
    pool = [pages_of(x, table, 16) for x in (k, v)]
    with pytest.raises(ValueError, match="paged_attention: `kv_lens` must be"):
        flexmasks.paged_attention(q, *pool, table, torch.tensor(lens), mask="causal", backend="decode")


def test_replays_of_bands_follow_their_tensors(way: str) -> None:
    """New tensors at each step, tensors that change in place, and scores that are made for each of them."""
    q, k, v = tensors(2)
    slopes = torch.rand(HEADS)
    window = flexmasks.get_mask("sliding_window", window=30)
    offset = torch.tensor([7, 70, 140])
    for n in range(5):
        for mask in ("causal", window):
            check([q, k, v], mask, offset)
            check([q, k, v], mask, offset.int())
            for _ in range(2):
                own: dict[str, Any] = {"mask": mask, "q_offset": offset, "score": "alibi", "slopes": slopes}
                want = flexmasks.attention(q, k, v, backend="reference", **own)
                assert error(flexmasks.attention(q, k, v, backend="decode", **own), want.double().cpu()) < 1e-5
        if n % 2:
            offset.add_(1)
        else:
            offset = offset + 2


@pytest.mark.slow
def test_replays_hold_none_of_the_users_tensors() -> None:
    offset, seq_lens = torch.tensor([7, 70, 140]), torch.tensor([10, 100, 150])
    for _ in range(3):
        offset, seq_lens = offset + 1, seq_lens + 1
        mask = flexmasks.get_mask("causal") & flexmasks.get_mask("padding", kv_lens=seq_lens)
        flexmasks.attention(*tensors(2), mask=mask, q_offset=offset, backend="decode")
    refs = [weakref.ref(t) for t in (offset, seq_lens)]
    del offset, seq_lens, mask
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@short_and_campaign(25, 1000)
def test_random_bands(examples: int) -> None:
    bound = st.one_of(st.none(), st.integers(0, 100))
    sizes = st.tuples(st.integers(1, 6), st.integers(1, 300), st.integers(1, 3), st.sampled_from([(1, 1), (6, 2)]))
    try_examples(examples, _check_band, sizes, bound, bound, st.booleans(), st.integers(0, 3))


def _check_band(
    sizes: tuple[int, int, int, tuple[int, int]], left: int | None, right: int | None, is_padded: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q_len, kv_len, batch, (heads, kv_heads) = sizes
    if q_len > 4 and kv_len < 8 * q_len:
        return
    mask = flexmasks.get_mask("full" if right is None else "causal")
    if left is not None:
        mask = flexmasks.get_mask("local", left=left, right=kv_len if right is None else right)
    if is_padded:
        mask &= flexmasks.get_mask("padding", kv_lens=torch.randint(0, kv_len + 1, (batch,)))
    offset = torch.randint(0, max(0, kv_len - q_len) + 1, (batch,))
    offset = offset if seed % 2 else int(torch.randint(0, kv_len + 50, ()))
    check(tensors(q_len, kv_len, batch=batch, heads=heads, kv_heads=kv_heads), mask, offset)


@pytest.mark.gpu
def test_bands_compile_and_compute_nothing_later(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, a step with new numbers launches the kernels of attention, and what the caller computes."""
    if way != "cuda":
        pytest.skip("needs a GPU")
    q, k, v = tensors(1, 4096, dtype=torch.float16)
    table = torch.arange(BATCH * 4096 // 16).view(BATCH, -1).int()
    pool = [pages_of(x, table.long(), 16) for x in (k, v)]

    def step(lens: Tensor, window: int) -> list[Tensor]:
        masks = ["causal", flexmasks.get_mask("sliding_window", window=window)]
        outs = [flexmasks.attention(q, k, v, mask=mask, q_offset=lens, backend="decode") for mask in masks]
        paged = (flexmasks.paged_attention(q, *pool, table, lens, mask=mask, backend="decode") for mask in masks)
        return [*outs, *paged]

    lens = [torch.randint(1, 4096, (BATCH,)) for _ in range(6)]
    for n in range(2):
        step(lens[n], 100)

    def compiled(*_: Any) -> None:
        raise AssertionError("a kernel is compiled")

    launch = pytest.importorskip("flexmasks.kernels.few_queries_launch")
    monkeypatch.setattr(launch, "compiled", compiled)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(lens[2], 100)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    kernels = {e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    assert kernels == {"attend_kernel", "join_kernel"}
    step(lens[3], 200)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
def test_bands_in_a_graph(q_len: int, way: str) -> None:
    """A replay sees positions, lengths and tables that have changed in place."""
    if way != "cuda":
        pytest.skip("needs a GPU")
    q, k, v = tensors(q_len, 4096, dtype=torch.float16)
    table = torch.arange(BATCH * 4096 // 16).view(BATCH, -1).int()
    pool = [pages_of(x, table.long(), 16) for x in (k, v)]
    lens, starts = torch.full((BATCH,), 50), torch.full((BATCH,), 40)
    window = flexmasks.get_mask("sliding_window", window=300)
    slopes = torch.rand(HEADS)

    def step(lens: Tensor, starts: Tensor) -> list[Tensor]:
        more: list[dict[str, Any]] = [{"mask": "causal"}, {"mask": window, "score": "alibi", "slopes": slopes}]
        outs = [flexmasks.attention(q, k, v, q_offset=starts, **m) for m in more]
        padded = flexmasks.get_mask("causal") & flexmasks.get_mask("padding", kv_lens=lens)
        outs.append(flexmasks.attention(q, k, v, q_offset=starts, mask=padded))
        return [*outs, *(flexmasks.paged_attention(q, *pool, table, lens, **m) for m in more)]

    step(lens, starts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step(lens, starts)
    for _ in range(20):
        lens.copy_(torch.randint(q_len, 4097, (BATCH,)))
        starts.copy_(torch.randint(0, 4097 - q_len, (BATCH,)))
        graph.replay()
        for out, want in zip(outs, step(lens.clone(), starts.clone()), strict=True):
            assert torch.equal(out, want)


# --- the choice of the backend ---


def test_decoding_compiles_nothing(way: str) -> None:
    """New lengths, new functions, new numbers, batch sizes: there is nothing to compile."""
    before = private_torch.compiled_graphs()
    for n, batch in itertools.product((1, 2, 30), (1, 3)):
        q, k, v = tensors(1, 100 + n, batch=batch)
        for mask in ("causal", lambda b, h, q, kv, n=n: q + n >= kv):
            assert flexmasks.explain(q, k, v, mask=mask, q_offset="first").backend == "decode"
            offset = torch.full((batch,), 99)
            flexmasks.attention(q, k, v, mask=mask, score="alibi", q_offset=offset, backend="decode")
    assert private_torch.compiled_graphs() == before


def test_what_is_refused(way: str) -> None:
    q, k, v = tensors(2)

    def reason(*tensors: Tensor, **call: Any) -> str:
        with pytest.raises(ValueError, match="backend 'decode' cannot run this call") as refused:
            flexmasks.attention(*tensors, backend="decode", **call)
        return str(refused.value)

    most = 64 if way == "cpu" else 2048
    assert f"up to {most:,} queries" in reason(*tensors(most + 1, 8 * most + 8))
    assert "8 times as many keys" in reason(*tensors(21))
    assert "no gradients" in reason(q.requires_grad_(), k, v)
    assert "not float64" in reason(*(x.detach().double() for x in (q, k, v)))
    assert "takes a mask" in reason(
        *tensors(2), block_mask=flexmasks.block_mask("causal", 2, LENGTH, q_offset="first", device=q.device)
    )
    assert "no kernel_options" in reason(*tensors(2), kernel_options={"num_stages": 1})
    with torch.no_grad():
        flexmasks.attention(q, k, v, mask="causal", backend="decode", q_offset="last")


@short_and_campaign(25, 1000)
def test_random_calls(examples: int) -> None:
    sizes = st.tuples(
        st.integers(1, 4), st.integers(1, 90), st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (6, 6)])
    )
    head_sizes = st.tuples(st.sampled_from([8, 24, 64]), st.sampled_from([8, 24, 64]))
    try_examples(examples, _check_call, sizes, head_sizes, st.floats(0.0, 1.0), st.booleans())


def _check_call(
    sizes: tuple[int, int, int, tuple[int, int]], head_sizes: tuple[int, int], share: float, by_head: bool
) -> None:
    q_len, kv_len, batch, (heads, kv_heads) = sizes
    visible = torch.rand(batch, heads if by_head else 1, q_len, kv_len) < share
    table = visible.expand(batch, heads, -1, -1)
    size, v_size = head_sizes
    qkv = tensors(q_len, kv_len, batch=batch, heads=heads, kv_heads=kv_heads, size=size, v_size=v_size)
    check(qkv, lambda b, h, q, kv: table[b, h, q, kv])
