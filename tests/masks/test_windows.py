"""Windows that kernels know natively: the arguments of such kernels, and FlashAttention 4 called directly."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import flash_double
import pytest
import torch
from helpers import TOLERANCE, NoLists, NoReads, captured, check_lse, error, exact, on_gpu_of, one_in
from hypothesis import given
from hypothesis import strategies as st
from oracles import attend
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flexmasks
from benchmarks.examples import on_device
from flexmasks import Mask, compat, road
from flexmasks.backends import fa4, fa4_functions, fa4_package, flex_flash
from flexmasks.backends.call import Plans
from flexmasks.backends.fa4 import Fa4Kernel, VarlenForm
from flexmasks.backends.reference import _Reference
from flexmasks.backends.table import BACKENDS
from flexmasks.context import Context
from flexmasks.errors import Unfit
from flexmasks.kernels import tanh
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.windows import Look, Window, window_of
from flexmasks.request import Request
from flexmasks.road import plan_call
from flexmasks.spec.bands import Sequences
from flexmasks.spec.parameters import Size


def _size(batch: int, q_len: int, kv_len: int, offset: int = 0) -> Size:
    return Size(batch, 2, q_len, kv_len, torch.device("cpu"), q_offset=offset, may_read=False)


def _shown_by_window(window: Window, q_len: int, kv_len: int) -> Tensor:
    """Return the pairs that a kernel shows, [q_len, kv_len], by the definition of a Window."""
    first, last = window.keys
    shown = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for i in range(q_len):
        for j in range(last - first):
            behind = i + window.offset - j
            left, right = window.left, window.right
            shown[i, first + j] = (left is None or behind <= left) and (right is None or -behind <= right)
    return shown


def _shown_by_flash(window: Window, q_len: int, kv_len: int) -> Tensor:
    """Return what FlashAttention shows by its documentation: query i stands at key i + keys - queries."""
    first, last = window.keys
    shift = window.offset - (last - first - q_len)
    arguments = Fa4Kernel(window, (q_len, kv_len), None, None, False)._arguments(shift)
    left, right = arguments.get("window_size_left"), arguments.get("window_size_right")
    if arguments.get("causal"):
        assert left is right is None
        right = 0
    shown = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for i in range(q_len):
        for j in range(last - first):
            at = i + (last - first) - q_len
            shown[i, first + j] = (left is None or j >= at - left) and (right is None or j <= at + right)
    assert left is None or left >= 0
    assert right is None or right >= 0
    return shown


@given(st.data())
def test_the_window_that_kernels_show_is_the_mask(data: st.DataObject) -> None:
    q_len, kv_len = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    offset = data.draw(st.integers(0, 14))
    number = st.integers(0, 14)
    masks = {
        "full": dict,
        "causal": dict,
        "sliding_window": lambda: {"window": data.draw(number)},
        "local": lambda: {"left": data.draw(number), "right": data.draw(number)},
    }
    names = data.draw(st.lists(st.sampled_from(sorted(masks)), min_size=1, max_size=3))
    mask = flexmasks.get_mask(names[0], **masks[names[0]]())
    for name in names[1:]:
        mask = mask & flexmasks.get_mask(name, **masks[name]())
    want = flexmasks.dense_mask(mask, q_len, kv_len, q_offset=offset)[0, 0]
    window = window_of(mask, _size(1, q_len, kv_len, offset))
    if window is None:
        assert not want.any(-1).all()  # kernels show no mask in which a query sees nothing
        return
    assert torch.equal(_shown_by_window(window, q_len, kv_len), want)
    assert torch.equal(_shown_by_flash(window, q_len, kv_len), want)
    assert abs(window.pairs(q_len) - int(want.sum())) <= q_len


def _shown_in_sequences(window: Window, sequences: Sequences, total: int, kv_total: int) -> Tensor:
    """Return the visible pairs of all sequences laid end to end, [total, kv_total]."""
    shown = torch.zeros(total, kv_total, dtype=torch.bool)
    starts, kv_starts = sequences.q.tolist(), sequences.kv.tolist()
    assert sequences.q.dtype == sequences.kv.dtype == torch.int32
    assert (starts[-1], kv_starts[-1]) == (total, kv_total)
    lengths = [(b - a, d - c) for a, b, c, d in zip(starts, starts[1:], kv_starts, kv_starts[1:], strict=False)]
    for (n, m), start, kv_start in zip(lengths, starts, kv_starts, strict=False):
        alone = Window(window.left, window.right, m - n, (0, m), False)  # kernels align the ends
        shown[start : start + n, kv_start : kv_start + m] = _shown_by_window(alone, n, m)
    return shown


def _draw_offsets(data: st.DataObject, count: int) -> Tensor:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    return torch.tensor([0, *lengths]).cumsum(0)


def _sequences(mask: Mask, size: Size, heads: int = 0) -> Sequences:
    window = window_of(mask, size)
    assert window is not None
    return MaskPlan(mask, replace(size, may_read=window.by_look)).sequences(heads)[0]


def _used(offsets: Tensor, batch: int, length: int) -> Tensor:
    """Return which tokens of all batch elements, laid end to end, are no padding."""
    return (torch.arange(length) < offsets[-1]).repeat(batch)


@pytest.mark.slow
@given(st.data())
def test_sequences_without_reading_offsets(data: st.DataObject) -> None:
    """Check that the sequences show the mask outside of padding, and that padding sees only padding."""
    batch, count, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), 3
    offsets = _draw_offsets(data, count)
    length = max(1, int(offsets[-1]) + data.draw(st.integers(0, 9)))
    name, earlier = data.draw(st.sampled_from(["full", "causal", "sliding_window"])), data.draw(st.integers(0, 4))
    inner = flexmasks.get_mask(name, **({"window": earlier} if name == "sliding_window" else {}))
    bound = data.draw(st.none() | st.integers(int(offsets.diff().max()), 12))
    mask = flexmasks.packed(inner, offsets, max_length=bound)
    if data.draw(st.booleans()):
        mask = flexmasks.get_mask("sliding_window", window=data.draw(st.integers(0, 9))) & mask
    window = window_of(mask, _size(batch, length, length))
    assert window is not None
    sequences = _sequences(mask, _size(batch, length, length))
    assert sequences.counts.tolist() == [int(offsets[-1])] * 2
    want = flexmasks.dense_mask(mask, length, batch=batch).expand(batch, 1, length, length)[:, 0].int()
    by_head = cast(Tensor, sequences.head_after_head(heads, length).by_head)
    for laid, copies in ((sequences, 1), (sequences._replace(q=by_head, kv=by_head), heads)):
        used, total = _used(offsets, batch * copies, length), copies * batch * length
        assert laid.q.tolist() == sorted(laid.q.tolist())
        assert laid.q[-1] == total
        assert int(laid.q.diff().max()) <= max(1, length if bound is None else bound)
        shown = _shown_in_sequences(window, laid, total, total)
        assert torch.equal(shown[used], torch.block_diag(*want.repeat_interleave(copies, 0)).bool()[used])
        assert not shown[~used][:, used].any()


@pytest.mark.slow
@given(st.data())
def test_sequences_of_other_keys_without_reading_offsets(data: st.DataObject) -> None:
    batch, count = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    offsets, kv_offsets = _draw_offsets(data, count), _draw_offsets(data, count)
    q_len, kv_len = (max(1, int(x[-1]) + data.draw(st.integers(0, 5))) for x in (offsets, kv_offsets))
    name, earlier = data.draw(st.sampled_from(["full", "causal", "sliding_window"])), data.draw(st.integers(0, 4))
    inner = flexmasks.get_mask(name, **({"window": earlier} if name == "sliding_window" else {}))
    start = data.draw(st.just(0) | st.lists(st.integers(0, 4), min_size=count, max_size=count))
    bound = data.draw(st.none() | st.integers(4, 12))
    mask = flexmasks.packed(inner, offsets, kv_offsets, q_start=start, max_length=bound)
    window = window_of(mask, _size(batch, q_len, kv_len))
    assert (window is None) == (name != "full")  # only values could say whether the ends are aligned, as in kernels
    if window is None:
        return
    each = flexmasks.dense_mask(mask, q_len, kv_len, batch=batch, q_offset=0).expand(batch, -1, -1, -1)[:, 0].int()
    want = torch.block_diag(*each).bool()
    used, kv_used = _used(offsets, batch, q_len), _used(kv_offsets, batch, kv_len)
    shown = _shown_in_sequences(window, _sequences(mask, _size(batch, q_len, kv_len)), batch * q_len, batch * kv_len)
    assert torch.equal(shown[used], want[used])
    assert not shown[~used][:, kv_used].any()


def test_windows_that_only_values_decide() -> None:
    offsets = torch.tensor([0, 3, 6])
    for mask in (
        flexmasks.packed("causal", offsets, offsets),
        flexmasks.packed("causal", offsets, q_start=torch.tensor([0, 0])),
        flexmasks.packed("causal", offsets, q_start=1),
    ):
        assert window_of(mask, _size(1, 6, 6)) is None
    mask = flexmasks.packed("full", offsets, offsets, q_start=torch.tensor([0, 2]))
    assert window_of(mask, _size(1, 6, 6)) is not None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bound", [None, 7])
@pytest.mark.parametrize("layout", ["heads", "tokens", "other keys"])
def test_fa4_hides_padding(layout: str, bound: int | None, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a call of FlashAttention 4 whose padding nobody has read; a function takes the kernel's place."""
    flash_double.replace(monkeypatch)
    offsets, kv_offsets = torch.tensor([0, 6, 6, 11]), torch.tensor([0, 2, 6, 13])
    mask, q_len, kv_len = flexmasks.packed("causal", offsets, max_length=bound), 20, 20
    if layout == "other keys":
        mask, q_len, kv_len = flexmasks.packed("full", offsets, kv_offsets, max_length=bound), 15, 24
    shapes = [(q_len, 2, 4), (kv_len, 2, 4), (kv_len, 2, 6)]
    leaves = [torch.randn(batch, *shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    q, k, v = (x.contiguous() if layout == "heads" else x for x in leaves)
    learned = [q, k, v]
    others = [exact(x) for x in learned]
    for x in learned:
        x.requires_grad_()
    window = window_of(mask, _size(batch, q_len, kv_len))
    assert window is not None
    sequences = _sequences(mask, _size(batch, q_len, kv_len), 2 if layout == "heads" else 0)
    assert (sequences.by_head is not None) == (layout == "heads")
    kernel = Fa4Kernel(window, (q_len, kv_len), None, None, True)
    assert not kernel.folds_sinks(q, k, v, torch.zeros(2))  # they would get gradients from padding
    out, lse = kernel(q, k, v, None, VarlenForm(sequences))
    assert lse is not None
    want, want_lse = attend(*others, flexmasks.dense_mask(mask, q_len, kv_len, batch=batch, q_offset=0))
    assert torch.allclose(out, want)
    check_lse(lse, want_lse, 1e-9)
    seen = ~want_lse.isinf()
    weight, lse_weight = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out * weight).sum() + (lse * lse_weight)[seen].sum(), learned)
    expected = torch.autograd.grad((want * weight).sum() + (want_lse * lse_weight)[seen].sum(), others)
    for x, y in zip(got, expected, strict=True):
        assert torch.allclose(x, y.to(x.dtype))


def test_head_sizes_of_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two different head sizes are taken as far as flash-attn-4 is tested with them by its authors."""
    monkeypatch.setattr(fa4_package, "why_missing", lambda: "")
    monkeypatch.setattr(fa4_package, "_import_failures", [])
    on_gpu_of(monkeypatch, (9, 0))

    def reason(size: int, v_size: int, learns: bool = False, kv_heads: int = 4) -> str | None:
        shapes = (4, size), (kv_heads, size), (kv_heads, v_size)
        q, k, v = (torch.empty(1, h, 200, n, dtype=torch.bfloat16, device="meta") for h, n in shapes)
        return fa4_package.refuses_package(SimpleNamespace(q=q, k=k, v=v, on_gpu=True, needs_grad=learns))  # type: ignore[arg-type]

    for size, v_size in ((64, 64), (128, 128), (192, 128), (128, 64)):
        assert reason(size, v_size) is None
        assert reason(size, v_size, kv_heads=2) is None
    assert reason(128, 128, learns=True, kv_heads=2) is None
    assert reason(192, 128, learns=True) is None
    assert "only if heads are not grouped" in str(reason(192, 128, learns=True, kv_heads=2))
    assert "gradients it takes 192 with 128 for v, not 128 with 64" in str(reason(128, 64, learns=True))
    assert "it takes 128 with 64 or 192 with 128 for v, not 64 with 128" in str(reason(64, 128))


_ON_12: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"needs_grad": True}, ""),
    "a soft-cap": ({"cap": 30.0}, ""),
    "a soft-cap that learns": ({"cap": 30.0, "needs_grad": True}, "its backward pass takes no score changes"),
    "large heads": ({"size": 192}, "it takes head sizes up to 128, not 192"),
}


@pytest.mark.parametrize("case", _ON_12)
def test_fa4_on_consumer_gpus(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On compute capability 12 flash-attn-4 has other kernels, which lack score changes with gradients, and pages."""
    given, reason = _ON_12[case]
    call = _call_on(monkeypatch, (12, 0), **given)
    assert (fa4.refuses(call) or "") == (f"on compute capability 12 {reason}" if reason else "")
    call.pages = object()
    assert fa4.refuses(call) is not None
    assert flex_flash.refuses(call) is not None


def test_fa4_on_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (128, 192, 256)
    reasons = {c: [fa4.refuses(_call_on(monkeypatch, c, size=n)) for n in sizes] for c in ((8, 0), (9, 0), (10, 0))}
    assert reasons[8, 0] == ["it needs compute capability 9.0 or above"] * 3
    assert reasons[9, 0] == [None] * 3
    assert reasons[10, 0][0] is reasons[10, 0][2] is None
    assert "up to 128, 192 with 128 for v, and 256" in str(reasons[10, 0][1])
    assert flex_flash.refuses(_call_on(monkeypatch, (12, 0), size=64)) == "on compute capability 12 it takes no blocks"
    q, sinks = torch.zeros(1, 4, 200, 64), torch.zeros(4)
    monkeypatch.setattr(fa4_package, "knows_sinks", lambda: True)
    for capability in ((9, 0), (12, 0)):
        _call_on(monkeypatch, capability)
        assert fa4.folds_sinks(q, q, q, sinks)
        assert fa4.folds_sinks(q.requires_grad_(), q, q, sinks) == (capability == (9, 0))
        q.requires_grad_(False)
    for capability in ((8, 0), (8, 6), (8, 9)):
        reason = flex_flash.refuses(_call_on(monkeypatch, capability, score=True, size=64))
        assert reason == "it needs compute capability 9.0 or above"


def _call_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], size: int = 64, **given: Any) -> Any:
    """Return a double of a call of causal attention on a GPU with flash-attn-4."""
    monkeypatch.setattr(fa4_package, "why_missing", lambda: "")
    monkeypatch.setattr(fa4_package, "_import_failures", [])
    on_gpu_of(monkeypatch, capability)
    q = torch.empty(1, 4, 200, size, dtype=torch.bfloat16, device="meta")
    call = {"needs_grad": False, "cap": None, "score": None, "kernel_options": None, "scale": None, **given}
    call |= {
        "on_gpu": True,
        "is_traced": False,
        "pages": None,
        "numbers_of": lambda part: None,
        "mask": SimpleNamespace(window=Window(None, 0, 0, (0, 200), False)),
    }
    return SimpleNamespace(q=q, k=q, v=q, context=Context.now(q.device), **call)


def test_masks_that_are_no_window() -> None:
    get = flexmasks.get_mask
    for mask in (
        ~get("causal"),
        get("causal") | get("full"),
        get("causal") & get("padding", kv_lens=[3]),
        flexmasks.packed("full", [0, 6]) & flexmasks.packed("full", [0, 6]),
        get("sliding_window", window=torch.tensor(3)),
        flexmasks.packed(get("grouped_tril", seq_lens=[5]), [0, 6]),
        get(lambda b, h, q, kv: q >= kv),
    ):
        assert window_of(mask, _size(1, 6, 6)) is None
    assert window_of(flexmasks.packed("full", [0, 9]), _size(1, 6, 9, offset=3)) is None
    # Outside the sequences, distances are those of tokens.
    other_keys = flexmasks.packed("full", [0, 3, 6], [0, 5, 9])
    assert window_of(get("causal") & other_keys, _size(1, 6, 9)) is None
    assert window_of(get("full") & other_keys, _size(1, 6, 9)) is not None


@pytest.mark.parametrize(
    ("mask", "params", "q_len", "offset"),
    [
        ("causal", {}, 1, 299),
        ("causal", {}, 1, 120),
        ("sliding_window", {"window": 70}, 1, 250),
        ("causal", {}, 200, 0),
    ],
)
def test_decoding_and_short_queries_go_to_sdpa(mask: str, params: dict[str, int], q_len: int, offset: int) -> None:
    """The visible keys are cut out, and the mask over them is full or causal."""
    q = torch.randn(2, 4, q_len, 16, requires_grad=True)
    k, v = (torch.randn(2, 2, 300, 16, requires_grad=True) for _ in range(2))
    others = [exact(x) for x in (q, k, v)]
    explanation = flexmasks.explain(q, k, v, mask=mask, q_offset=offset, **params)
    assert explanation.backend == "sdpa"
    visible = flexmasks.dense_mask(mask, q_len, 300, q_offset=offset, **params)
    want, _ = attend(*others, visible)
    for _ in range(2):  # the second call repeats the first
        out = flexmasks.attention(q, k, v, mask=mask, q_offset=offset, **params)
        assert error(out, want) < TOLERANCE[torch.float32]
    for got, expected in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), others), strict=True
    ):
        assert error(got, expected) < 2 * TOLERANCE[torch.float32]


# --- FlashAttention 4, called directly ---

_IDS = torch.tensor([0] * 100 + [1] * 37 + [4] * 163)
_CASES: dict[str, dict[str, Any]] = {
    "full": {"mask": "full"},
    "causal": {"mask": "causal"},
    "causal, scale": {"mask": "causal", "scale": 0.05},
    "fewer keys": {"mask": "full", "kv_len": 170},
    "more keys, causal": {"mask": "causal", "kv_len": 450, "q_offset": 0},
    "more keys, causal at the end": {"mask": "causal", "kv_len": 450, "q_offset": 150},
    "sliding window": {"mask": "sliding_window", "window": 70},
    "itself alone": {"mask": "sliding_window", "window": 0},
    "sliding window, later": {"mask": "sliding_window", "window": 70, "kv_len": 450, "q_offset": 120},
    "local": {"mask": "local", "left": 20, "right": 50},
    "local, more keys": {"mask": "local", "left": 20, "right": 50, "kv_len": 800, "q_offset": 100},
    "packed": {"mask": flexmasks.packed("causal", [0, 0, 130, 131, 300])},
    "packed, padding": {"mask": flexmasks.packed("causal", [0, 20, 210]), "batch": 1},
    "packed, other keys": {
        "mask": flexmasks.packed("full", [0, 5, 100, 290], [0, 150, 150, 380]),
        "batch": 1,
        "kv_len": 400,
    },
    "softcap": {"mask": "causal", "score": "softcap", "cap": 3.0},
    "softcap, window": {"mask": "sliding_window", "window": 70, "score": "softcap", "cap": 3.0},
    "softcap, documents": {"mask": flexmasks.packed("causal", [0, 130, 300]), "score": "softcap", "cap": 3.0},
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", one_in(2, list(_CASES)))
@pytest.mark.parametrize(
    ("dtype", "size", "v_size", "grouped"),
    [
        (torch.bfloat16, 64, 64, False),
        (torch.float16, 128, 128, True),
        pytest.param(torch.float16, 96, 96, False, marks=pytest.mark.campaign),
        (torch.bfloat16, 192, 128, False),
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_fa4(case: str, dtype: torch.dtype, size: int, v_size: int, grouped: bool, with_sinks: bool) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    call = dict(_CASES[case], backend="fa4")
    batch, kv_len = call.pop("batch", 2), call.pop("kv_len", 300)
    call["mask"] = _on_gpu(call["mask"])
    q = torch.randn(batch, 4, 300, size, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(batch, 2 if grouped else 4, kv_len, n, device="cuda", dtype=dtype, requires_grad=True)
        for n in (size, v_size)
    )
    if with_sinks:
        call["sink_logits"] = torch.tensor([0.5, -1.0, -math.inf, 4.0], device="cuda", requires_grad=True)
    learned = [q, k, v, *([call["sink_logits"]] if with_sinks else [])]
    others = [exact(x) for x in learned]
    lengths = {n: call[n] for n in ("q_offset", "window", "left", "right") if n in call}
    visible = flexmasks.dense_mask(call["mask"], 300, kv_len, batch=batch, device="cuda", **lengths).cpu()
    change = (lambda s: 3 * torch.tanh(s / 3)) if "score" in call else None
    of_mask = attend(*others[:3], visible, change, call.get("scale"))
    want, want_lse = flash_double.with_sinks(*of_mask, others[3] if with_sinks else None)
    weight = torch.randn(batch, 4, 300, v_size, device="cuda", dtype=dtype)
    lse_weight = torch.randn(batch, 4, 300, device="cuda")
    seen = ~want_lse.isinf()
    expected = torch.autograd.grad(
        (want * weight.double().cpu()).sum() + (want_lse * lse_weight.double().cpu())[seen].sum(), others
    )
    for _ in range(2):  # the second call repeats the first
        out, lse = flexmasks.attention(q, k, v, return_lse=True, **call)
        assert error(out, want) < TOLERANCE[dtype]
        check_lse(lse, want_lse, TOLERANCE[dtype])
        loss = (out * weight).sum() + (lse * lse_weight)[seen.cuda()].sum()
        for got, exactly in zip(torch.autograd.grad(loss, learned), expected, strict=True):
            assert error(got, exactly, unit=1.0 if got.ndim == 1 else 0.05) < 2 * TOLERANCE[dtype]


@pytest.mark.gpu
def test_what_only_values_could_decide_is_not_for_fa4() -> None:
    """The host would have to read that the last query is at the last key."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    mask = flexmasks.packed("causal", [0, 5, 100, 290], [0, 155, 250, 450], q_start=[150, 0, 10])
    q, k = (torch.randn(1, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (300, 460))
    explanation = flexmasks.explain(q, k, k, mask=_on_gpu(mask))
    assert explanation.backend != "fa4"
    assert "laid end to end" in explanation.others["fa4"]


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length", "lies"), [(1, 300, True), (2, 16384, True), (2, 16384, False)])
def test_documents_go_to_fa4_where_that_pays(batch: int, length: int, lies: bool) -> None:
    """Others compute documents that do not lie end to end, and short rows, where a look takes longer than it saves."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    ids = (torch.arange(length, device="cuda") // 100).repeat(batch, 1)
    if not lies:
        ids[1, -1] = 0
    q, k, v = torch.randn(3, batch, 16, length, 64, device="cuda", dtype=torch.bfloat16).unbind()
    mask = flexmasks.get_mask("document", document_ids=ids) & flexmasks.get_mask("causal")
    explanation = flexmasks.explain(q, k, v, mask=mask)
    assert (explanation.backend == "fa4") == (lies and length > 300)
    assert lies or "on both sides of another" in explanation.others["fa4"]
    named = flexmasks.attention(q, k, v, mask=mask, backend="fa4" if lies else "flex")
    assert error(named, flexmasks.attention(q, k, v, mask=mask, backend="flex")) < TOLERANCE[torch.bfloat16]


_UNREAD: dict[str, tuple[flexmasks.Mask, int, int, int]] = {  # batch, lengths of queries and keys
    "no padding": (flexmasks.packed("causal", [0, 0, 130, 131, 300]), 2, 300, 300),
    "padding": (flexmasks.packed("causal", [0, 20, 210]), 2, 300, 300),
    "padding, bounded": (flexmasks.packed("causal", [0, 20, 110], max_length=128), 2, 700, 700),
    "padding only": (flexmasks.packed("causal", [0, 0]), 1, 300, 300),
    "window": (flexmasks.packed(flexmasks.get_mask("sliding_window", window=30), [0, 100, 150]), 2, 300, 300),
    "other keys": (flexmasks.packed("full", [0, 5, 100, 290], [0, 150, 150, 380]), 2, 300, 400),
    "padding of keys alone": (flexmasks.packed("full", [0, 100, 300], [0, 50, 90]), 1, 300, 700),
    "padding of queries alone": (flexmasks.packed("full", [0, 100, 120], [0, 50, 400]), 1, 300, 400),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", _UNREAD)
@pytest.mark.parametrize(("dtype", "grouped"), [(torch.bfloat16, False), (torch.float16, True)])
def test_fa4_without_reading_offsets(case: str, dtype: torch.dtype, grouped: bool) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    mask, batch, q_len, kv_len = _UNREAD[case]
    mask = on_device(mask, torch.device("cuda", 0))
    heads = 2 if grouped else 4
    shapes = [(batch, 4, q_len, 64), (batch, heads, kv_len, 64), (batch, heads, kv_len, 64)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    others = [exact(x) for x in (q, k, v)]
    size = Size(batch, 4, q_len, kv_len, q.device, may_read=False)
    weight, lse_weight = torch.randn_like(q), torch.randn(batch, 4, q_len, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        window = window_of(mask, size)
        assert window is not None
        # Without grouped heads, the same tokens are read head by head, as `Fa4Kernel.forms` does.
        form = VarlenForm(_sequences(mask, size, 0 if grouped else 4))
        kernel = Fa4Kernel(window, (q_len, kv_len), None, None, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out, lse = kernel(q, k, v, None, form)
    assert lse is not None
    visible = flexmasks.dense_mask(mask, q_len, kv_len, batch=batch, device="cuda").cpu()
    want, want_lse = attend(*others, visible)
    assert error(out, want) < TOLERANCE[dtype]
    check_lse(lse, want_lse, TOLERANCE[dtype])
    seen = ~want_lse.isinf()
    assert torch.all(out.cpu()[~seen] == 0)
    got = torch.autograd.grad((out * weight).sum() + (lse * lse_weight)[seen.cuda()].sum(), (q, k, v))
    expected = torch.autograd.grad(
        (want * weight.double().cpu()).sum() + (want_lse * lse_weight.double().cpu())[seen].sum(), others
    )
    for x, y in zip(got, expected, strict=True):
        assert error(x, y) < 2 * TOLERANCE[dtype]
        hidden = y.abs().amax(-1) == 0
        assert torch.all(x.cpu()[hidden] == 0)


def _on_gpu(value: Any) -> Any:
    """Return a mask, a tuple or a tensor with all its tensors on a GPU."""
    if isinstance(value, tuple):
        return tuple(_on_gpu(v) for v in value)
    if isinstance(value, flexmasks.Mask):
        return flexmasks.Mask(value._definition, {n: _on_gpu(v) for n, v in value.params.items()})
    return value.cuda() if isinstance(value, Tensor) else value


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "size"), one_in(3, [(backend, size) for size in range(8, 129, 8) for backend in ("fa4", "flex_flash")])
)
def test_flash_head_sizes(backend: str, size: int) -> None:
    """Head sizes that the backend takes are right, with gradients; for some sizes its kernels are wrong."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    q, k, v = (torch.randn(1, 2, 200, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    others = [exact(x) for x in (q, k, v)]
    want, _ = attend(*others, torch.ones(200, 200, dtype=torch.bool).tril())
    if "head size" in flexmasks.explain(q, k, v, mask="causal").others.get(backend, ""):
        return
    out = flexmasks.attention(q, k, v, mask="causal", backend=backend)
    assert error(out, want) < TOLERANCE[torch.bfloat16]
    weight = torch.randn_like(q)
    expected = torch.autograd.grad((want * weight.double().cpu()).sum(), others)
    for got, exactly in zip(torch.autograd.grad(out, (q, k, v), weight), expected, strict=True):
        assert error(got, exactly) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_small_and_large_calls() -> None:
    """The host's time decides small calls: sdpa where it can run, else short. Large calls take FlashAttention 4."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    small, large = (torch.randn(2, 8, n, 64, device="cuda", dtype=torch.bfloat16) for n in (512, 8192))

    def backend_of(x: Tensor, mask: Any, **more: Any) -> str:
        return flexmasks.explain(x, x, x, mask=mask, **more).backend

    def own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv % 3 != 1)

    assert [backend_of(small, m) for m in ("full", "causal", own)] == ["sdpa", "sdpa", "short"]
    assert backend_of(small, "causal", return_lse=True) == "short"
    assert backend_of(large, "full") == backend_of(large, "causal") == "fa4"
    assert backend_of(large, own) in ("flex", "flex_flash")
    assert backend_of(small, flexmasks.packed("causal", [0, 100, 512])) == "short"
    assert "faster here" in flexmasks.explain(small, small, small, mask="causal").others["fa4"]


@pytest.mark.gpu
def test_fa4_has_no_second_derivative_and_says_so() -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    (first,) = torch.autograd.grad(
        flexmasks.attention(q, k, v, mask="causal", backend="fa4").sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad((first + q).sum(), k)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "size"), one_in(2, [(backend, size) for size in (64, 128) for backend in ("flex", "flex_flash", "fa4")])
)
def test_the_cheap_tanh(backend: str, size: int) -> None:
    """Check that its error is at most twice that of the exact tanh, or below the rounding of outputs."""
    if backend != "flex":
        pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    q, k, v = ((2 * torch.randn(1, 2, 512, size, device="cuda")).to(torch.bfloat16).requires_grad_() for _ in range(3))
    weight = torch.randn_like(q)

    def run(**more: Any) -> list[Tensor]:
        out = flexmasks.attention(q, k, v, mask="causal", score="softcap", cap=20.0, **more)
        return [out, *torch.autograd.grad(out, (q, k, v), weight)]

    others = [exact(x) for x in (q, k, v)]
    want, _ = attend(*others, torch.ones(512, 512, dtype=torch.bool).tril(), lambda s: 20 * torch.tanh(s / 20))
    expected = [want, *torch.autograd.grad((want * weight.double().cpu()).sum(), others)]
    exactly = run(exact=True, backend="flex_flash" if backend == "fa4" else backend)
    for cheap, full, true in zip(run(backend=backend), exactly, expected, strict=True):
        assert error(cheap, true) < max(2 * error(full, true), TOLERANCE[torch.bfloat16] / 4)


def test_the_cheap_tanh_is_first_asked_for_while_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tanh, "_lower", functools.cache(tanh._lower.__wrapped__))
    x = torch.randn(8)
    torch.testing.assert_close(torch.compile(tanh.tanh_approx, fullgraph=True)(x), x.tanh())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_is_exact_elsewhere(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 50, 16, dtype=dtype)
    got = flexmasks.attention(q, k, v, score="softcap", cap=2.0)
    want, _ = attend(q.double(), k.double(), v.double(), None, lambda s: 2 * torch.tanh(s / 2))
    assert math.isclose(error(got, want), 0, abs_tol=1e-6 if dtype == torch.float32 else 1e-14)


def test_sdpa_asks_for_a_kernel_once_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    flexmasks.clear_caches()
    q, k, v = torch.randn(3, 1, 2, 40, 16, requires_grad=True).unbind()
    other = k.transpose(1, 2).contiguous().transpose(1, 2)
    asked, choice = [], compat.fused_sdp_choice

    def counted(*args: Any, **keywords: Any) -> int:
        asked.append(args)
        return choice(*args, **keywords)

    monkeypatch.setattr(compat, "fused_sdp_choice", counted)

    def asks(*tensors: Tensor) -> int:
        asked.clear()
        assert flexmasks.explain(*tensors, mask="causal").backend in ("sdpa", "short")
        asked.clear()
        flexmasks.attention(*tensors, mask="causal")
        return len(asked)

    assert asks(q, k, v) > 0
    assert asks(q, k, v) == 0
    assert asks(q, other, v) == 1
    assert asks(q, other, v) == 0
    with sdpa_kernel(SDPBackend.MATH):  # torch has no fused kernel for the call any more
        assert asks(q, k, v) > 0
        assert flexmasks.explain(q, k, v, mask="causal").backend == "short"


def _interface_with(*names: str) -> SimpleNamespace:
    """Return an interface of flash-attn-4 whose functions take these arguments."""
    parameters = ", ".join(("*tensors", *(f"{name}=None" for name in names)))
    functions: dict[str, Any] = {}
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        exec(f"def {name}({parameters}): raise AssertionError", functions)
    return SimpleNamespace(**{n: f for n, f in functions.items() if n.startswith("_flash")})


def test_which_sinks_flash_attention_4_folds_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks that learn alone belong to a call that was chosen as one without gradients."""
    q, sinks = torch.randn(1, 2, 4, 8), torch.zeros(2)
    learning, learning_sinks = q.clone().requires_grad_(), sinks.clone().requires_grad_()
    fa4_package._has_argument_of_sinks.cache_clear()
    monkeypatch.setattr(fa4_package, "interface", lambda: _interface_with("learnable_sink"))
    assert fa4.folds_sinks(q, q, q, sinks)
    assert fa4.folds_sinks(q, learning, q, learning_sinks)
    assert not fa4.folds_sinks(q, q, q, learning_sinks)
    with torch.no_grad():
        assert fa4.folds_sinks(q, q, q, learning_sinks)
    fa4_package._has_argument_of_sinks.cache_clear()
    monkeypatch.setattr(fa4_package, "interface", lambda: _interface_with("softmax_scale"))  # an earlier version
    assert not fa4.folds_sinks(q, q, q, sinks)
    fa4_package._has_argument_of_sinks.cache_clear()


def test_a_call_with_sinks_is_another_kind() -> None:
    """What fails with sinks may run without them."""
    q = torch.randn(1, 2, 40, 8)
    kinds, keys = set(), set()
    for sinks in (None, torch.zeros(2)):
        request = Request("causal", None, {}, None, None, 0, sinks, True, "auto", None)
        kinds.add(plan_call(q, q, q, request).call.outcome_key)
        known = road.known_call(q, q, q, request, Context.now(q.device))
        assert known is not None
        keys.add(known.key)
    assert len(kinds) == len(keys) == 2


# --- documents by ids ---


def _ids(lengths: list[list[int]], names: str = "ascending") -> Tensor:
    """Return ids of documents of these lengths for each batch element."""
    count = max(map(len, lengths))
    of = {"ascending": torch.arange(count), "any": torch.randperm(count) - 3}[names]
    return torch.stack([torch.repeat_interleave(of[: len(row)], torch.tensor(row)) for row in lengths])


_ROWS = [[3, 40, 1, 1, 55], [100], [25, 25, 25, 25], [1] * 100]


@pytest.mark.parametrize("names", ["ascending", "any"])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("rows", [_ROWS, _ROWS[:1], _ROWS[3:]])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_sequences(
    causal: bool, rows: list[list[int]], layout: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_double.replace(monkeypatch)
    ids, batch = _ids(rows, names), len(rows)
    mask = flexmasks.get_mask("document", document_ids=ids if batch > 1 else ids[0])
    mask = flexmasks.get_mask("causal") & mask if causal else mask
    leaves = [torch.randn(batch, 100, 2, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    q, k, v = (x.contiguous() if layout == "heads" else x for x in leaves)
    window = window_of(mask, _size(batch, 100, 100))
    assert window is not None
    sequences = _sequences(mask, _size(batch, 100, 100), 2 if layout == "heads" else 0)
    assert len(sequences.q) - 1 >= sum(map(len, rows))
    kernel = Fa4Kernel(window, (100, 100), None, None, True)
    out, lse = kernel(q, k, v, None, VarlenForm(sequences))
    want, want_lse = attend(q, k, v, flexmasks.dense_mask(mask, 100, batch=batch, heads=2))
    torch.testing.assert_close(out, want)
    assert lse is not None
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([0, 0, 1, 1, 0, 0], "on both sides"),
        ([[0, 1, 2, 3, 4, 5], [5, 5, 4, 5, 3, 3]], "on both sides"),
        ([[5, 4, 3, 2, 1, 0], [1, 1, -1, -1, 0, 0]], None),
        ([-1, -1, 3, 3, 2**40, 2**40], None),
    ],
)
def test_documents_that_lie_end_to_end(ids: Any, reason: str | None) -> None:
    """Only values show it, in any order of the ids."""
    mask = flexmasks.get_mask("document", document_ids=torch.tensor(ids))
    window = window_of(mask, _size(2, 6, 6))
    assert window is not None
    assert window.by_look
    kernel, plans = (
        Fa4Kernel(window, (6, 6), None, None, True),
        Plans(MaskPlan(mask, replace(_size(2, 6, 6), may_read=True))),
    )
    if reason is None:
        (form,) = kernel.forms(plans)
        assert form is not None
    else:
        with pytest.raises(Unfit, match=reason):
            kernel.forms(plans)


def test_more_documents_than_there_was_room_for() -> None:
    """Plans of a kind have as much room as the first of them needed, and more once one needs it."""
    plan = MaskPlan(
        flexmasks.get_mask("document", document_ids=torch.arange(100) // 50), replace(_size(1, 100, 100), may_read=True)
    )
    rooms = [len(plan.sequences()[0].q)]
    for size in (20, 1, 3):
        ids = torch.arange(100) // size
        other = plan.template().with_tensors([ids])
        laid, look = other.sequences()
        assert look is not None
        if size == 1:
            with pytest.raises(Unfit, match="takes at most 64 documents here, and there are 100"):
                look.confirm()
            mask = flexmasks.get_mask("document", document_ids=ids)  # the call is planned again, as one of a new kind
            plan = MaskPlan(mask, replace(_size(1, 100, 100), may_read=True))
            laid, look = plan.sequences()
            assert look is not None
        look.confirm()
        starts = laid.q
        rooms.append(len(starts))
        assert starts.unique().tolist() == [*range(0, 100, size), 100]
    assert rooms == [65, 65, 257, 257]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What runs calls of documents, see `_noted`, on a CPU by the kinds of a GPU."""
    flexmasks.clear_caches()
    flash_double.replace(monkeypatch)
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu",))
    on_cpu = replace(BACKENDS["fa4"], refuses=lambda call: None if call.mask.window else "it knows only windows")
    monkeypatch.setitem(BACKENDS, "fa4", on_cpu)
    return _noted(monkeypatch, fa4=Fa4Kernel, reference=_Reference)


def _noted(monkeypatch: pytest.MonkeyPatch, **kernels: Any) -> list[str]:
    """Return a list that gets the names of kernels that run, and "late" for one whose values do not fit it."""
    names: list[str] = []
    for name, kernel in kernels.items():

        def call(*args: Any, name: str = name, kernel: Any = kernel.__call__) -> Any:
            try:
                results = kernel(*args)
            except Unfit:
                names.append("late")
                raise
            names.append(name)
            return results

        monkeypatch.setattr(kernel, "__call__", call)
    return names


def _scattered() -> Tensor:
    return torch.randint(0, 3, (1, 100))


def _attend_documents(ids: Tensor) -> None:
    q, k, v = torch.randn(3, 1, 2, 100, 8, dtype=torch.float64)
    mask = flexmasks.get_mask("document", document_ids=ids)
    want, _ = attend(q, k, v, flexmasks.dense_mask(mask, 100))
    torch.testing.assert_close(flexmasks.attention(q, k, v, mask=mask), want)


def test_calls_of_a_kind_are_right_for_any_documents(ran: list[str]) -> None:
    """The kernel starts before the host looks. What it finds too late, no result may show."""
    for ids in (_ids([[30, 70]]), _ids([[1, 99]]), _scattered(), _ids([[50, 50]]), _ids([[1] * 100]), _ids([[20] * 5])):
        _attend_documents(ids)
    assert ran == ["fa4", "fa4", "late", "reference", "fa4", "late", "fa4", "fa4"]  # 100 documents have no room


@pytest.mark.parametrize("begin", one_in(2, [["fa4"], ["reference", "fa4"]]))
def test_scattered_documents_cost_their_own_calls_only(begin: list[str], ran: list[str]) -> None:
    def run(letters: str) -> list[str]:
        """Run calls of scattered documents, s, and of such as lie end to end, and return what ran them."""
        ran.clear()
        for letter in letters:
            _attend_documents(_scattered() if letter == "s" else _ids([[30, 70]]))
        return list(ran)

    assert run("e" if len(begin) == 1 else "se") == begin
    assert run("sesee") == ["late", "reference", "fa4", "late", "reference", "fa4", "fa4"]
    assert run("s" * 200) == ["late", *["reference"] * 200]  # later ones look first, and ever fewer of them
    assert run("e" * 70).index("fa4") < 64
    assert set(run("e" * 5)) == {"fa4"}


@pytest.mark.gpu
def test_scattered_documents_cost_their_own_calls_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    flexmasks.clear_caches()
    names = _noted(monkeypatch, fa4=Fa4Kernel)
    q, k, v = torch.randn(3, 2, 16, 16384, 64, device="cuda", dtype=torch.bfloat16).unbind()
    for letter in "esesese":
        ids = (torch.arange(16384, device="cuda") // 100).repeat(2, 1)
        ids[1, -1] = 0 if letter == "s" else ids[1, -1]
        mask = flexmasks.get_mask("document", document_ids=ids) & flexmasks.get_mask("causal")
        want = flexmasks.attention(q, k, v, mask=mask, backend="flex")
        assert error(flexmasks.attention(q, k, v, mask=mask), want) < TOLERANCE[torch.bfloat16]
    assert names == ["fa4", *["late", "fa4"] * 3]


def test_few_calls_of_documents_that_stay_scattered_look(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(Look, "confirm", lambda look, confirm=Look.confirm: (looks.append(look), confirm(look))[1])
    for _ in range(200):
        _attend_documents(_scattered())
    assert set(ran) == {"reference"}
    assert len(looks) < 10


def test_a_plan_with_new_documents_asks_the_faster_kernel_again(ran: list[str]) -> None:
    q, k, v = torch.randn(3, 1, 2, 100, 8, dtype=torch.float64)
    mask = flexmasks.get_mask("document", document_ids=_scattered())
    plan = flexmasks.plan(mask, 100, batch=1, heads=2)
    for ids in (None, _ids([[30, 70]]), _scattered(), _ids([[50, 50]])):
        if ids is not None:
            plan.update(document_ids=ids)
        for _ in range(2):
            want, _ = attend(q, k, v, flexmasks.dense_mask(plan.mask, 100))
            torch.testing.assert_close(flexmasks.attention(q, k, v, mask=plan), want)
    assert ran == ["reference"] * 2 + ["fa4"] * 2 + ["late"] + ["reference"] * 2 + ["fa4"] * 2


def test_documents_are_no_sequences_for_other_keys() -> None:
    mask = flexmasks.get_mask("document", document_ids=torch.arange(9) // 2)
    assert window_of(mask, _size(1, 4, 9)) is None
    assert window_of(mask, replace(_size(1, 4, 4), q_offset=5)) is None
    assert window_of(mask & flexmasks.get_mask("padding", kv_lens=torch.tensor([3])), _size(1, 9, 9)) is None
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.arange(9))
        assert window_of(flexmasks.get_mask("document", document_ids=fake), _size(1, 9, 9)) is None


# --- documents that are promised to lie end to end ---


@given(st.data())
def test_promised_documents_are_sequences(data: st.DataObject) -> None:
    """Nothing of the ids is read, and sequences without room for all documents say so."""
    length, batch = data.draw(st.integers(1, 100) | st.just(1200)), data.draw(st.integers(1, 3))
    cuts = data.draw(st.lists(st.sets(st.integers(1, length), max_size=24), min_size=batch, max_size=batch))
    names = data.draw(st.permutations(range(-9, 16)))
    rows = [[names[sum(cut <= place for cut in row)] for place in range(length)] for row in cuts]
    ids = torch.tensor(rows if data.draw(st.booleans()) or batch > 1 else rows[0])
    count = sum(len({*row}) for row in rows)
    most = data.draw(st.integers(1, 9) | st.none())
    window = data.draw(st.integers(0, 9) | st.none())
    mask = flexmasks.get_mask("document", document_ids=ids, contiguous=True, max_documents=most)
    plain = flexmasks.get_mask("document", document_ids=ids)
    if window is not None:
        mask, plain = (flexmasks.get_mask("sliding_window", window=window) & m for m in (mask, plain))
    size = _size(batch, length, length)
    with NoReads(), NoLists():
        found = window_of(mask, size)
        assert found == Window(window, None if window is None else 0, 0, (0, length), True)
        laid, look = MaskPlan(mask, size).sequences()
    assert look is None
    room = batch * (max(16, -(-length // 64)) if most is None else most)
    assert len(laid.q) == room + 1
    assert laid.counts.tolist() == ([length] * 2 if count <= room else [-1] * 2)
    if count <= room:
        sequence = torch.searchsorted(laid.q, torch.arange(batch * length), right=True).view(batch, 1, length)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        shown = sequence[..., None] == sequence[..., None, :]
        if window is not None:
            shown &= (distance >= 0) & (distance <= window)
        want = flexmasks.dense_mask(plain, length, batch=batch)
        assert torch.equal(shown, want.expand(batch, 1, length, length))


@pytest.mark.parametrize(
    ("ids", "most", "error"),
    [
        ([0, 0, 1, 1, 0, 0], None, "`contiguous` promises that .* Leave out `contiguous`."),
        ([[5, 4, 3, 2, 1, 0], [1, 1, 2, 1, 0, 0]], None, "`contiguous` promises"),
        ([[1, 1, 1, 1, 1, 1], [3, 3, -1, -1, 0, 0]], 2, "`max_documents` is 2, but a row has 3 documents"),
        ([3, 3, -1, -1, 0, 0], 3, ""),
        ([5, 4, 3, 2, 1, 0], None, ""),  # by default there may be fewer of so short ones: a promise of nobody
    ],
)
def test_promises_are_checked_where_values_may_be_read(ids: Any, most: int | None, error: str) -> None:
    q, given = torch.randn(2, 1, 6, 8), {"document_ids": torch.tensor(ids), "contiguous": True, "max_documents": most}
    if error:
        with pytest.raises(ValueError, match=f"mask 'document': {error}"):
            flexmasks.attention(q, q, q, mask="document", **given)
        return
    out = flexmasks.attention(q, q, q, mask="document", **given)
    want = flexmasks.attention(q, q, q, mask="document", document_ids=given["document_ids"], backend="reference")
    torch.testing.assert_close(out, want)


def test_a_bound_of_documents_needs_the_promise() -> None:
    mask = flexmasks.get_mask("document", document_ids=torch.arange(6), max_documents=6)
    for call in (lambda: flexmasks.dense_mask(mask, 6), lambda: window_of(mask, _size(1, 6, 6))):
        with pytest.raises(ValueError, match=r"mask 'document': `max_documents`, 6, .* pass contiguous=True, too"):
            call()


@pytest.fixture
def fa4_in_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backend "fa4" on a CPU, also in graphs, with plain torch in place of FlashAttention."""
    thread = ThreadPoolExecutor(1)  # which sees derivatives, and operators do not
    differentiate = lambda *args, **given: thread.submit(flash_double.backward, *args, **given).result()  # noqa: E731
    flash_double.replace(monkeypatch, _flash_attn_bwd=differentiate)
    monkeypatch.setattr(fa4, "MIN_QUERIES", 16)
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    with torch.library._scoped_library("flexmasks", "FRAGMENT") as library:
        for operator in (fa4_functions.traced_forward, fa4_functions.traced_backward):
            library.impl(operator._opoverload, operator._init_fn, "CPU")
        yield


def _attend_in_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    mask = flexmasks.masks.causal() & flexmasks.masks.document(document_ids=ids, contiguous=True, max_documents=4)
    return flexmasks.attention(q, k, v, mask=mask, backend="fa4")


def _visible_in_documents(ids: Tensor) -> Tensor:
    return flexmasks.dense_mask("causal", ids.shape[1]) & (ids[:, None, :, None] == ids[:, None, None, :])


@pytest.mark.usefixtures("fa4_in_graphs")
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_promised_documents_inside_compile(layout: str, is_checkpointed: bool) -> None:
    """New documents compile nothing, and more than there is room for give NaN."""
    compiled = 0

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return aot_eager(graph, inputs)

    def step(*given: Tensor) -> Tensor:
        if is_checkpointed:
            return cast(Tensor, checkpoint(_attend_in_documents, *given, use_reentrant=False))
        return _attend_in_documents(*given)

    run = torch.compile(step, fullgraph=True, backend=compiler)
    for rows in ([[30, 70], [100]], [[1, 50, 40, 9], [20, 20, 20, 40]], [[100], [20] * 5], [[20] * 5, [25] * 4]):
        ids = _ids(rows, "any")
        leaves = [torch.randn(2, 100, 2, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
        leaves = [(x.contiguous() if layout == "heads" else x).requires_grad_() for x in leaves]
        out = run(*leaves, ids)
        slope = torch.randn_like(out)
        got = torch.autograd.grad(out, leaves, slope)
        if sum(map(len, rows)) > 8:
            assert all(x.isnan().all() for x in (out, *got))
            continue
        want, _ = attend(*leaves, _visible_in_documents(ids))
        torch.testing.assert_close(out, want)
        for x, y in zip(got, torch.autograd.grad(want, leaves, slope), strict=True):
            torch.testing.assert_close(x, y)
    assert compiled == 1


@pytest.mark.usefixtures("fa4_in_graphs")
def test_promised_documents_are_exported() -> None:
    class Layer(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return _attend_in_documents(*given)

    tensors, first = torch.randn(3, 2, 2, 100, 8, dtype=torch.float64).unbind(), _ids([[30, 70], [100]])
    exported = torch.export.export(Layer(), (*tensors, first))
    assert "fa4_forward" in str(exported.graph)
    for ids in (first, _ids([[1, 50, 40, 9], [99, 1]])):
        torch.testing.assert_close(exported.module()(*tensors, ids), attend(*tensors, _visible_in_documents(ids))[0])


@pytest.mark.gpu
def test_promised_documents_in_a_cuda_graph() -> None:
    """Replays see other ids, and give NaN for more documents than there is room for."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    q, k, v = torch.randn(3, 1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(1, 1024, dtype=torch.int64, device="cuda")
    causal = flexmasks.get_mask("causal")

    def call() -> Tensor:
        documents = flexmasks.get_mask("document", document_ids=ids, contiguous=True)
        return flexmasks.attention(q, k, v, mask=causal & documents, backend="fa4")

    graph, out = captured(call)
    for row in ([300, 700, 24], [1, 2, 1021], [64] * 16, [32] * 32):
        ids.copy_(_ids([row]))
        graph.replay()
        if len(row) > 16:
            assert bool(out.isnan().all())
            continue
        want, _ = attend(*map(exact, (q, k, v)), _visible_in_documents(ids.cpu()))
        assert error(out, want) < TOLERANCE[torch.bfloat16]
