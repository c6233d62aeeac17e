"""Queries that start where a tensor says, on FlashAttention 4, against float64.

With TRITON_INTERPRET=1 Triton's interpreter runs the library's own kernel on a CPU, and a function takes the place of
FlashAttention 4. The interpreter must be chosen before Triton is imported. Hence the last test runs this file in a
process of its own.
"""

from __future__ import annotations

import gc
import math
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import TOLERANCE, check_by_the_interpreter, check_lse, compiled_for_hopper, error, one_in, try_examples
from hypothesis import strategies as st
from torch import Tensor

import flexmasks
from flexmasks import calls
from flexmasks.backends import fa4

pytest.importorskip("triton")
behind_keys = pytest.importorskip("flexmasks.kernels.behind_keys")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")] if INTERPRETED else []  # NumPy warns of 0 / 0
on_device = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])


class Case(NamedTuple):
    """A call whose queries start at given positions.

    window: how far a query sees back, or None, and ahead.
    cut: whether q, k, v are parts of larger tensors.
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
    cut: bool = False
    seed: int = 0

    def made(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the starts."""
        torch.manual_seed(self.seed)

        def randn(heads: int, length: int, size: int) -> Tensor:
            x = torch.randn(len(self.starts), heads, length + 3 * self.cut, size + 8 * self.cut)
            return x.to(device, self.dtype)[:, :, :length, :size]

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

    def are_behind(self, starts: Tensor) -> Tensor:
        """Return whether there is no key at the end of what a query might see, [B, Q]."""
        place = starts.long()[:, None] + torch.arange(self.q_len, device=starts.device)
        return place + self.window[1] >= self.kv_len


def check_kernel(case: Case, device: str) -> None:
    """Check the rows behind the keys against float64, and that the kernel leaves the other rows alone."""
    q, k, v, starts = case.made(device)
    out = torch.full((*q.shape[:3], case.v_size), math.nan, device=device, dtype=case.dtype)
    if case.seed % 2:  # as FlashAttention 4 returns it
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.full(q.shape[:3], math.nan, device=device)
    scale = case.size**-0.5 if case.scale is None else case.scale
    behind_keys.attend_behind_keys(out, lse, q, k, v, starts, case.window, scale, case.cap)
    want, want_lse = case.expected(q, k, v, starts)
    behind = case.are_behind(starts)[:, None].expand(lse.shape)
    out, lse, behind = out.cpu(), lse.cpu(), behind.cpu()
    assert torch.equal(out.isnan().all(-1), ~behind)
    assert torch.equal(lse.isnan(), ~behind)
    if behind.any():
        assert error(out[behind], want[behind]) < TOLERANCE[case.dtype]
        check_lse(lse[behind], want_lse[behind], 10 * TOLERANCE[case.dtype])


CASES = {
    "none behind": Case((0, 30, 60)),
    "some behind": Case((0, 61, 99, 75)),
    "all behind": Case((100, 1000, 2**31 - 1)),
    "int32": Case((2**31 - 1, 70), of_starts=torch.int32),
    "far behind": Case((2**40, 80)),
    "window": Case((0, 80, 100, 130, 2**40), window=(20, 0)),
    "ahead": Case((0, 50, 70, 100), window=(None, 15)),
    "window ahead": Case((50, 70, 100, 160), window=(9, 15)),
    "before": Case((50, 61, 70, 100), window=(30, -5)),
    "ahead of all": Case((0, 3), window=(None, 2**40)),
    "cap": Case((70, 90), cap=2.0, scale=0.7),
    "other sizes": Case((70, 90), size=24, v_size=8, cut=True),
    "one head": Case((70, 90), heads=3, kv_heads=3, q_len=70),
    "wide": Case((70, 90), size=256, v_size=192, kv_len=75),
}


@on_device
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [FP32] if INTERPRETED else [FP16, BF16])
def test_kernel(case: str, dtype: torch.dtype, device: str) -> None:
    check_kernel(CASES[case]._replace(dtype=dtype), device)


@on_device
def test_random_calls_of_the_kernel(device: str) -> None:
    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        kv_len, q_len = draw(st.integers(1, 150)), draw(st.integers(1, 150))
        right = draw(st.integers(-20, 20))
        left = draw(st.one_of(st.none(), st.integers(max(0, -right), 60)))
        starts = draw(st.lists(st.integers(0, kv_len + 70), min_size=1, max_size=3))
        return Case(
            tuple(starts), q_len, kv_len, 2, draw(st.sampled_from([1, 2])), 16, 16, (left, right),
            draw(st.sampled_from([FP32] if INTERPRETED else [FP16, BF16])),
            draw(st.sampled_from([torch.int32, torch.int64])), draw(st.sampled_from([None, 3.0])),
            cut=draw(st.booleans()), seed=draw(st.integers(0, 1000)),
        )  # fmt: skip

    try_examples(10 if INTERPRETED else 40, lambda case: check_kernel(case, device), cases())


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256)])
def test_kernel_fits_a_hopper_gpu(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shared memory fits a processor, and no length, stride or number of a window is a constant of it."""
    made = []

    def compiled(kernel: Any, _programs: int, warps: int, *given: tuple[Any, ...]) -> Callable[..., None]:
        assert not [
            p.name
            for p, x in zip(kernel.params, (*given[0], *given[1]), strict=True)
            if isinstance(x, int) and not p.is_constexpr and not p.do_not_specialize
        ]
        made.append(compiled_for_hopper(kernel, warps, (*given[0], *given[1])))
        return lambda *_: None

    monkeypatch.setattr(behind_keys, "compiled", compiled)
    monkeypatch.setattr(behind_keys, "_launches", behind_keys.Launches())
    case = Case((70, 90), size=sizes[0], v_size=sizes[1], window=(20, 3), dtype=BF16)
    q, k, v, starts = case.made("cpu")
    out, lse = torch.empty(2, 4, 40, sizes[1], dtype=BF16), torch.empty(2, 4, 40)
    behind_keys.attend_behind_keys(out, lse, q, k, v, starts, case.window, 0.1, 2.0)
    assert made[0].metadata.shared <= 227 * 2**10
    assert "wgmma" in made[0].asm["ptx"]


# --- the whole call ---

MASKS: dict[str, tuple[Any, tuple[int | None, int]]] = {
    "causal": ("causal", (None, 0)),
    "window": (flexmasks.get_mask("sliding_window", window=50), (50, 0)),
    "both sides": (flexmasks.get_mask("local", left=30, right=9), (30, 9)),
    "ahead of all": (flexmasks.get_mask("local", left=30, right=2**31 - 1), (30, 2**31 - 1)),
}
STARTS = [(0, 300, 571), (700, 0, 640), (5, 100, 127), (565, 566, 2000)]


def _attend_from_the_end(
    q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], cap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute what FlashAttention 4 does for these arguments, with zeros for keys and values that do not exist."""
    lens = arguments["seqused_k"]
    assert lens.dtype == torch.int32
    assert all(abs(arguments.get(f"window_size_{side}") or 0) < 2**31 for side in ("left", "right"))
    left, right = arguments.get("window_size_left"), 0 if arguments.get("causal") else arguments["window_size_right"]
    most = k.shape[1] + q.shape[1]
    assert torch.all((lens >= 0) & (lens <= most))
    k, v = (torch.cat([x, x.new_zeros(len(x), most - x.shape[1], *x.shape[2:])], 1).transpose(1, 2) for x in (k, v))
    case = Case(tuple((lens.long() - q.shape[1]).tolist()), q.shape[1], most, q.shape[2], k.shape[1], q.shape[3],
                v.shape[3], (left, right), cap=cap, scale=arguments["softmax_scale"])  # fmt: skip
    out, lse = case.expected(q.transpose(1, 2), k, v, torch.tensor(case.starts))
    return out.transpose(1, 2).to(q.dtype), lse.float()


def check_call(name: str, dtype: torch.dtype, sizes: tuple[int, int], device: str) -> None:
    """Check calls with other starts each time; hidden keys hold NaN."""
    mask, window = MASKS[name]
    size, v_size = sizes
    for turn, starts in enumerate(STARTS[:2] if INTERPRETED else STARTS):
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
    monkeypatch.setattr(fa4, "refuses_package", lambda call: None)
    monkeypatch.setattr(fa4, "_finds_zeros_behind_keys", lambda device: True)
    monkeypatch.setattr(fa4, "_forward", _attend_from_the_end)
    flexmasks.clear_caches()


by_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="the library's own kernel runs by the interpreter")


@pytest.mark.slow
@by_the_interpreter
@pytest.mark.parametrize("mask", one_in(len(MASKS), list(MASKS)))
def test_call_in_parts(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_the_place_of_fa4(monkeypatch)
    check_call(mask, FP32, (16, 24), "cpu")


@pytest.mark.slow
@by_the_interpreter
def test_new_starts_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with other starts are made from the first one, which is not kept alive."""
    _takes_the_place_of_fa4(monkeypatch)
    monkeypatch.setattr(calls, "_RENEWED_ON", ("cpu",))
    plans: list[Any] = []
    planned = calls._planned
    monkeypatch.setattr(calls, "_planned", lambda *a: plans.append(a) or planned(*a))
    case = Case((0, 300, 571), 150, 720)
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


@pytest.mark.slow
@by_the_interpreter
def test_long_windows_are_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is longer than the keys is causal to the kernel, whatever its number."""
    _takes_the_place_of_fa4(monkeypatch)
    given: list[dict[str, Any]] = []
    forward = fa4._forward
    monkeypatch.setattr(fa4, "_forward", lambda *a: given.append(a[3]) or forward(*a))
    case = Case((0, 300, 700), 150, 720)
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
    case = Case((0, 300, 571), 512, 4096, 32, 8, 128, 128, dtype=BF16)
    q, k, v, starts = case.made("cuda")

    def attend() -> Tensor:
        out: Tensor = flexmasks.attention(q, k, v, mask="causal", q_offset=starts, backend="fa4")
        return out

    with torch.no_grad():
        attend()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outs = {}
            for begins in ((3584, 0, 100), (4000, 3585, 9000)):
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
    case = Case((0, 300, 571), 150, 720)
    q, k, v, starts = case.made("cpu")
    learns = call.pop("learns", False)
    explained = flexmasks.explain(q.requires_grad_(learns), k, v, q_offset=starts, **call)
    return "" if explained.backend == "fa4" else explained.others["fa4"]


@pytest.mark.skipif(INTERPRETED, reason="asks, and runs nothing")
def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_the_place_of_fa4(monkeypatch)
    assert _refusal(mask="causal") == ""
    assert "no gradients" in _refusal(mask="causal", learns=True)
    lens = torch.tensor([700, 80, 720])
    causal_keys = flexmasks.get_mask("causal") & flexmasks.get_mask("padding", seq_lens=lens)
    for mask in (causal_keys, "full"):
        assert "without lengths" in _refusal(mask=mask)
    assert "it knows only windows" in _refusal(mask=lambda b, h, q, kv: kv % 3 < 2)
    monkeypatch.setattr(fa4, "_finds_zeros_behind_keys", lambda device: False)
    assert "may read memory behind the keys" in _refusal(mask="causal")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="nothing is computed")
def test_a_failure_is_one_of_such_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose queries start elsewhere are a kind of their own."""
    _takes_the_place_of_fa4(monkeypatch)

    def failing(*arguments: Any) -> None:
        raise RuntimeError("no compiler for Triton")

    monkeypatch.setattr(behind_keys, "attend_behind_keys", failing)
    q, k, v, starts = Case((0, 300, 571), 150, 720).made("cpu")
    flexmasks.attention(q, k, v, mask="causal", q_offset=starts)
    assert "no compiler for Triton" in _refusal(mask="causal")
    assert flexmasks.explain(q, k, v, mask="causal").backend == "fa4"
    flexmasks.clear_caches()


@pytest.mark.skipif(INTERPRETED, reason="nothing is computed")
def test_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_the_place_of_fa4(monkeypatch)
    q, k, v, starts = Case((0, 300, 571), 150, 720).made("cpu")
    assert "none:" in flexmasks.explain(q, k, v, mask="causal", q_offset=starts).plan
    assert "none:" not in flexmasks.explain(q, k, v, mask="causal").plan


# --- by the interpreter ---


@pytest.mark.skipif(INTERPRETED, reason="Triton is interpreted in this process already")
@pytest.mark.parametrize("selection", ["not campaign", pytest.param("campaign", marks=pytest.mark.campaign)])
def test_kernel_by_the_interpreter(selection: str) -> None:
    """The tests of this file, in a process that chose Triton's interpreter before it was imported."""
    check_by_the_interpreter(__file__, "-m", selection)
