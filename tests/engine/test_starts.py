"""Queries that start where a tensor says, against float64.

Their positions end at the last key at most: q_offset is 0 or at most KV - Q. Where FlashAttention 4 is not installed, a
function takes its place.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from helpers import TOLERANCE, check_lse, error
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor

import flexmasks
from flexmasks import road
from flexmasks.backends import fa4_functions, fa4_package

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Case(NamedTuple):
    """A call whose queries start at given positions.

    window: how far a query sees back, or None, and ahead.
    """

    starts: tuple[int, ...]
    q_len: int = 40
    kv_len: int = 100
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    v_size: int = 16
    window: tuple[int | None, int] = (None, 0)
    dtype: torch.dtype = FP32
    of_starts: torch.dtype = torch.int64
    cap: float | None = None
    scale: float | None = None

    def made(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the starts."""
        torch.manual_seed(0)

        def randn(heads: int, length: int, size: int) -> Tensor:
            return torch.randn(len(self.starts), heads, length, size).to(device, self.dtype)

        q = randn(self.heads, self.q_len, self.size)
        k = randn(self.kv_heads, self.kv_len, self.size)
        v = randn(self.kv_heads, self.kv_len, self.v_size)
        return q, k, v, torch.tensor(self.starts, dtype=self.of_starts, device=device)

    def expected(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and lse in float64, on the CPU."""
        q, k, v, starts = q.double().cpu(), k.double().cpu(), v.double().cpu(), starts.cpu()
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = q @ k.mT * (self.size**-0.5 if self.scale is None else self.scale)
        scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
        scores = scores.masked_fill(~self.visible(starts)[:, None], -math.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)

    def visible(self, starts: Tensor) -> Tensor:
        """Return which keys each query sees, [B, Q, KV]."""
        place = starts.long()[:, None, None] + torch.arange(self.q_len, device=starts.device)[:, None]
        key = torch.arange(self.kv_len, device=starts.device)
        left, right = self.window
        seen = key <= place + right
        return seen if left is None else seen & (key >= place - left)


# --- the rule, in all backends ---

TABLE = torch.arange(100) // 9 % 2
RULED: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "window": {"mask": "sliding_window", "window": 20},
    "both sides": {"mask": "local", "left": 20, "right": 9},
    "document": {"mask": "document", "document_ids": TABLE},
    "global_tokens": {"mask": "global_tokens", "tokens": TABLE == 1},
    "sandwich": {"mask": "causal", "score": "sandwich", "dims": 8},
    "relative_bias": {"mask": "full", "score": "relative_bias", "table": torch.randn(4, 199)},
    "function": {"mask": lambda b, h, q, kv: (kv <= q) & (kv % 7 != q % 5)},
}


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, ...], **call: Any) -> tuple[Tensor, Tensor]:
    """Return output and lse of calls of one batch element each, whose queries start at a number."""
    results = [
        flexmasks.attention(*(x[b : b + 1].double() for x in (q, k, v)), q_offset=start, return_lse=True,
                            backend="reference", **call)
        for b, start in enumerate(starts)
    ]  # fmt: skip
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["flex", "reference", "short", "decode"])
@pytest.mark.parametrize("name", RULED)
def test_queries_that_end_with_the_keys(name: str, backend: str) -> None:
    """At first, with other tensors, after plans are recorded, and with more queries than keys, which start at 0."""
    flexmasks.clear_caches()
    call = RULED[name]
    q_len = 3 if backend == "decode" else 40
    steps = [(100 - q_len, 0), (0, 100 - q_len), *((n, 100 - q_len) for n in range(17))]
    steps = steps if backend != "flex" else steps[:3]  # which compiles
    case = Case((0, 0), q_len, 100)
    q, k, v, _ = case.made("cpu")
    q.requires_grad_(backend == "short")
    for starts in steps:
        offset = torch.tensor(starts)
        got = flexmasks.attention(
            q, k, v, q_offset=offset, return_lse=backend in ("reference", "decode"), backend=backend, **call
        )
        out, lse = got if isinstance(got, tuple) else (got, None)
        want, want_lse = _one_by_one(q, k, v, starts, **call)
        assert error(out, want) < TOLERANCE[FP32]
        if lse is not None:
            check_lse(lse, want_lse, 1e-4)
        with pytest.raises(ValueError, match="the values of a tensor `q_offset` must be 0 or at most KV - Q"):
            flexmasks.attention(q, k, v, q_offset=offset + 1, backend=backend, **call)
    zeros = torch.zeros(2, dtype=torch.int64)
    k, v = k[:, :, : q_len - 1], v[:, :, : q_len - 1]
    call = call | {n: x[..., :q_len] for n, x in call.items() if n in ("document_ids", "tokens")}
    out = flexmasks.attention(q, k, v, q_offset=zeros, backend=backend, **call)
    assert error(out, _one_by_one(q, k, v, (0, 0), **call)[0]) < TOLERANCE[FP32]


def test_a_number_may_be_larger() -> None:
    """Keys of cross attention may have positions of their own."""
    q, k, v, _ = Case((0, 0)).made("cpu")
    for start in (61, 100, 1000):
        out = flexmasks.attention(q, k, v, mask="sliding_window", window=30, q_offset=start)
        want, _ = Case((start, start), window=(30, 0)).expected(q, k, v, torch.tensor([start, start]))
        assert error(out, want) < TOLERANCE[FP32]


@pytest.mark.parametrize("call", [flexmasks.block_mask, flexmasks.dense_mask, flexmasks.draw])
def test_the_rule_without_a_call_of_attention(call: Any) -> None:
    more = {"b": 1} if call is flexmasks.draw else {}
    call("causal", 40, 100, q_offset=[60, 0], **more)
    with pytest.raises(ValueError, match=r"100 - 40, got 61; a number may be larger"):
        call("causal", 40, 100, q_offset=[61, 0], **more)


@pytest.mark.usefixtures("quick_kernels")
def test_the_rule_with_pages() -> None:
    pool, table, lens = torch.randn(2, 6, 16, 2, 8), torch.tensor([[3, 0, 1], [5, 2, 4]]), torch.tensor([48, 30])
    q = torch.randn(2, 4, 20, 8)
    flexmasks.paged_attention(q, *pool, table, lens, mask="causal", q_offset=torch.tensor([28, 10]))
    with pytest.raises(ValueError, match="the values of a tensor `q_offset`"):
        flexmasks.paged_attention(q, *pool, table, lens, mask="causal", q_offset=torch.tensor([29, 10]))
    tokens, offsets = torch.randn(25, 4, 8), torch.tensor([0, 20, 25])
    pages = {"page_table": table, "kv_lens": lens, "mask": "causal"}
    flexmasks.varlen_attention(tokens, *pool, offsets, q_offset=[28, 43], **pages)
    with pytest.raises(ValueError, match="sequence 1 starts at 44 with 5 queries, and its pages have room for 48 keys"):
        flexmasks.varlen_attention(tokens, *pool, offsets, q_offset=[28, 44], **pages)


# --- FlashAttention 4 ---

MASKS: dict[str, tuple[Any, tuple[int | None, int]]] = {
    "causal": ("causal", (None, 0)),
    "window": (flexmasks.get_mask("sliding_window", window=50), (50, 0)),
    "both": (flexmasks.get_mask("causal") & flexmasks.get_mask("local", left=30, right=9), (30, 0)),
}
STARTS = [(0, 300, 570), (570, 0, 469), (5, 100, 127), (569, 421, 570)]


def _attend_from_the_end(
    q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], cap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute what FlashAttention 4 does for these arguments; it is told of no more keys than there are."""
    lens = arguments["seqused_k"]
    assert lens.dtype == torch.int32
    assert all(abs(arguments.get(f"window_size_{side}") or 0) < 2**31 for side in ("left", "right"))
    left, right = arguments.get("window_size_left"), 0 if arguments.get("causal") else arguments["window_size_right"]
    assert torch.all((lens >= 0) & (lens <= k.shape[1]))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    case = Case(tuple((lens.long() - q.shape[1]).tolist()), q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.shape[3],
                v.shape[3], (left, right), cap=cap, scale=arguments["softmax_scale"])  # fmt: skip
    out, lse = case.expected(q.transpose(1, 2), k, v, torch.tensor(case.starts))
    return out.transpose(1, 2).to(q.dtype), lse.float()


def check_call(name: str, dtype: torch.dtype, sizes: tuple[int, int], device: str) -> None:
    """Check calls with other starts each time; hidden keys hold NaN."""
    mask, window = MASKS[name]
    size, v_size = sizes
    for turn, starts in enumerate(STARTS):
        case = Case(starts, 150, 720, 6, 2, size, v_size, window, dtype)
        case = case._replace(of_starts=(torch.int64, torch.int32, torch.int8, torch.int64)[turn])
        q, k, v, begins = case.made(device)
        want, want_lse = case.expected(q, k, v, begins)
        seen = case.visible(begins).any(1)[:, None, :, None]
        k = torch.where(seen, k, math.nan)
        with torch.no_grad():
            out, lse = flexmasks.attention(q, k, v, mask=mask, q_offset=begins, return_lse=True, backend="fa4")
        assert error(out, want) < TOLERANCE[dtype]
        check_lse(lse, want_lse, 10 * TOLERANCE[dtype])
        logits = torch.linspace(-1, 1, 6, device=device)
        more = {"score": "softcap", "cap": 2.0, "scale": 0.3, "sink_logits": logits}
        with torch.no_grad():
            out = flexmasks.attention(q, k, v, mask=mask, q_offset=begins, backend="fa4", **more)
        want, want_lse = case._replace(cap=2.0, scale=0.3).expected(q, k.nan_to_num(0.0), v, begins)
        assert error(out, want * torch.sigmoid(want_lse - logits.cpu()[:, None])[..., None]) < TOLERANCE[dtype]


def _takes_the_place_of_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function compute what FlashAttention 4 does."""
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    monkeypatch.setattr(fa4_functions, "forward", _attend_from_the_end)
    flexmasks.clear_caches()


@pytest.mark.parametrize("mask", MASKS)
def test_call_of_fa4(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_the_place_of_fa4(monkeypatch)
    check_call(mask, FP32, (16, 24), "cpu")


def test_new_starts_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with other starts are made from the first one, which is not kept alive."""
    _takes_the_place_of_fa4(monkeypatch)
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu",))
    plans: list[Any] = []
    plan_call = road.plan_call
    monkeypatch.setattr(road, "plan_call", lambda *a: plans.append(a) or plan_call(*a))
    case = Case((0, 300, 570), 150, 720)
    q, k, v, starts = case.made("cpu")
    for begins in STARTS:
        starts = starts.new_tensor(begins)
        out = flexmasks.attention(q, k, v, mask="causal", q_offset=starts, backend="fa4")
        assert error(out, case.expected(q, k, v, starts)[0]) < TOLERANCE[FP32]
    starts -= starts.clamp(max=50)  # in place
    out = flexmasks.attention(q, k, v, mask="causal", q_offset=starts, backend="fa4")
    assert error(out, case.expected(q, k, v, starts)[0]) < TOLERANCE[FP32]
    assert len(plans) == 1
    memory = weakref.ref(starts.untyped_storage())
    del starts, begins
    gc.collect()
    assert memory() is None
    flexmasks.clear_caches()


def _check_updates(device: str, dtype: torch.dtype) -> None:
    """A plan's kernel is told anew where the keys end, in the memory that a CUDA graph would read."""
    case = Case(STARTS[0], 150, 720, dtype=dtype)
    q, k, v, starts = case.made(device)
    plan = flexmasks.plan("causal", 150, 720, device=device, q_offset=starts)
    for begins in STARTS:
        starts = starts.new_tensor(begins)
        plan.update(q_offset=starts)
        for _ in range(2):
            out = flexmasks.attention(q, k, v, mask=plan, backend="fa4")
            assert error(out, case.expected(q, k, v, starts)[0]) < TOLERANCE[dtype]


def test_updated_starts_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_the_place_of_fa4(monkeypatch)
    _check_updates("cpu", FP32)


@pytest.mark.gpu
def test_updated_starts_reach_the_kernel_on_a_gpu() -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    _check_updates("cuda", torch.bfloat16)


def test_long_windows_are_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is longer than the keys is causal to the kernel, whatever its number."""
    _takes_the_place_of_fa4(monkeypatch)
    given: list[dict[str, Any]] = []
    forward = fa4_functions.forward
    monkeypatch.setattr(fa4_functions, "forward", lambda *a: given.append(a[3]) or forward(*a))
    case = Case((0, 300, 570), 150, 720)
    q, k, v, starts = case.made("cpu")
    for window in (718, 719, 2**31):
        mask = flexmasks.get_mask("sliding_window", window=window)
        out = flexmasks.attention(q, k, v, mask=mask, q_offset=starts, backend="fa4")
        assert error(out, case._replace(window=(window, 0)).expected(q, k, v, starts)[0]) < TOLERANCE[FP32]
    assert [a.get("causal", False) for a in given] == [False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "dtype"), [((64, 64), FP16), ((128, 128), BF16), ((192, 128), BF16)])
@pytest.mark.parametrize("mask", MASKS)
def test_call_on_a_gpu(mask: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    check_call(mask, dtype, sizes, "cuda")


@pytest.mark.gpu
def test_new_starts_wait_for_nothing_and_are_captured() -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    case = Case((0, 300, 570), 512, 4096, 32, 8, 128, 128, dtype=BF16)
    q, k, v, starts = case.made("cuda")

    def attend() -> Tensor:
        out: Tensor = flexmasks.attention(q, k, v, mask="causal", q_offset=starts, backend="fa4")
        return out

    with torch.no_grad():
        attend()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outs = {}
            for begins in ((3584, 0, 100), (3000, 3583, 3584)):
                starts = starts.clone().copy_(torch.tensor(begins).pin_memory(), non_blocking=True)
                outs[begins] = attend(), starts
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for out, begins in outs.values():
            assert error(out, case.expected(q, k, v, begins)[0]) < TOLERANCE[BF16]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend()
        for turn in range(1, 5):
            starts.sub_(900 * turn).clamp_(min=0)
            q.normal_()
            graph.replay()
            assert error(out, case.expected(q, k, v, starts)[0]) < TOLERANCE[BF16]


def _refusal(**call: Any) -> str:
    """Return why FlashAttention 4 would not run a call of 150 queries and 720 keys, or ""."""
    case = Case((0, 300, 570), 150, 720)
    q, k, v, starts = case.made("cpu")
    learns = call.pop("learns", False)
    explained = flexmasks.explain(q.requires_grad_(learns), k, v, q_offset=starts, **call)
    return "" if explained.backend == "fa4" else explained.others["fa4"]


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_the_place_of_fa4(monkeypatch)
    assert _refusal(mask="causal") == ""
    assert "no gradients" in _refusal(mask="causal", learns=True)
    lens = torch.tensor([700, 80, 720])
    causal_keys = flexmasks.get_mask("causal") & flexmasks.get_mask("padding", kv_lens=lens)
    ahead = flexmasks.get_mask("local", left=30, right=1)
    for mask in (causal_keys, "full", ahead):
        assert "without lengths" in _refusal(mask=mask)
    assert "it knows only windows" in _refusal(mask=lambda b, h, q, kv: kv % 3 < 2)
    q, k, v, zeros = Case((0, 0, 0), 150, 149).made("cpu")
    explained = flexmasks.explain(q, k, v, mask="causal", q_offset=zeros)
    assert "no more queries than keys" in explained.others["fa4"]


def test_a_failure_is_one_of_such_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose queries start elsewhere are a kind of their own."""
    _takes_the_place_of_fa4(monkeypatch)

    def failing(*arguments: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fa4_functions, "forward", failing)
    q, k, v, starts = Case((0, 300, 570), 150, 720).made("cpu")
    flexmasks.attention(q, k, v, mask="causal", q_offset=starts)
    assert "no compiler" in _refusal(mask="causal")
    assert flexmasks.explain(q, k, v, mask="causal", q_offset=0).backend == "fa4"
    flexmasks.clear_caches()


def test_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_the_place_of_fa4(monkeypatch)
    q, k, v, starts = Case((0, 300, 570), 150, 720).made("cpu")
    assert "none:" in flexmasks.explain(q, k, v, mask="causal", q_offset=starts).plan
    assert "none:" not in flexmasks.explain(q, k, v, mask="causal", q_offset=0).plan
