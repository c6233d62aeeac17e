"""Tests of small calls on a CPU that need no gradients: they run without compiling, and are compiled when that pays."""

import functools
import logging
import math
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import flexmasks
from flexmasks.backends import flex_kernels, short, waiting
from flexmasks.kernels import compiling

_NAN, _INF = math.nan, math.inf
IDS = torch.arange(96) // 40


def _own(b, h, q, kv):
    return (q >= kv) & (kv % 7 != 3)


def _documents(b, h, q, kv):
    return (IDS[q] == IDS[kv]) & (q >= kv)


def _hides_rows(b, h, q, kv):
    return (q % 5 != 2) & (kv % 3 != 1)


FUNCTIONS = [_own, _documents, _hides_rows]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that are compiled in a test, where small calls run without, as they do outside tests."""
    monkeypatch.setattr(short, "refuses_on_cpu", short.refuses_on_cpu.__wrapped__)
    monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 1 << 36)
    names: list[str] = []
    log = flex_kernels._log_compiled
    monkeypatch.setattr(flex_kernels, "_log_compiled", lambda *args: (names.append(args[1]), log(*args)))
    flexmasks.clear_caches()
    yield names
    flexmasks.clear_caches()


def _qkv(dtype=torch.float32, batch=2, heads=4, kv_heads=4, length=96):
    torch.manual_seed(length)
    q = torch.randn(batch, heads, length, 16)
    k, v = torch.randn(2, batch, kv_heads, length, 16)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _expected(q, k, v, function):
    """Attention by SDPA in float64, and exactly 0 where a query sees nothing."""
    visible = create_mask(function, 1, 1, q.shape[2], k.shape[2], device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.masked_fill(~visible.any(-1)[..., None], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_small_calls_are_exact_and_compile_nothing(compiled, function, kv_heads, dtype):
    q, k, v = _qkv(dtype, kv_heads=kv_heads)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    explanation = flexmasks.explain(q, k, v, mask=function)
    assert explanation.backend == "short"
    assert "answered without compiling" in explanation.compiles
    for _ in range(3):  # planned, replayed, and new tensors
        out = flexmasks.attention(q, k, v, mask=function)
        torch.testing.assert_close(out.double(), _expected(q, k, v, function), atol=tolerance, rtol=tolerance)
        q, k, v = q + 1, k.flip(2), v * 2
    assert compiled == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_another_default_dtype(default, dtype):
    q, k, v = _qkv(dtype)
    try:
        torch.set_default_dtype(default)
        out = flexmasks.attention(q, k, v, mask=_own, backend="short")
        added = flexmasks.attention(q, k, v, mask=_own, score=lambda score, b, h, q, kv: score - kv, backend="short")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, flexmasks.attention(q, k, v, mask=_own, backend="short"))
    assert added.isfinite().all()


def test_queries_that_see_nothing_give_zero():
    q, k, v = _qkv()
    out = flexmasks.attention(q, k, v, mask=_hides_rows)
    assert (out[:, :, 2::5] == 0).all()
    assert (out[:, :, 0::5] != 0).any(-1).all()


@pytest.mark.parametrize("poison", [_NAN, _INF])
def test_hidden_keys_may_hold_anything(poison):
    q, k, v = _qkv()
    k[:, :, 1::3] = poison
    q[:, :, 2::5] = poison
    clean_k, clean_q = k.clone(), q.clone()
    clean_k[:, :, 1::3] = 0
    clean_q[:, :, 2::5] = 0
    out = flexmasks.attention(q, k, v, mask=_hides_rows)
    torch.testing.assert_close(out.double(), _expected(clean_q, clean_k, v, _hides_rows), atol=1e-5, rtol=1e-5)


def test_new_values_in_tensors_are_seen(compiled):
    q, k, v = _qkv()
    for n in (40, 30, 7, 50):
        ids = torch.arange(96) // n
        out = flexmasks.attention(q, k, v, mask="document", document_ids=ids)
        expected = _expected(q, k, v, lambda b, h, q, kv, ids=ids: ids[q] == ids[kv])
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert compiled == []


def test_equal_calls_give_equal_bits():
    q, k, v = _qkv()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (flexmasks.attention(q, k, v, mask=_own) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("makes_new_tensors", [False, True])
def test_a_loop_is_compiled_when_it_has_taken_as_long(compiled, monkeypatch, makes_new_tensors):
    q, k, v = _qkv()
    products = 2 * 4 * 96 * 96 * 32
    monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 5 * products)
    expected = _expected(q, k, v, _documents)
    for n in range(8):
        ids = IDS.clone() if makes_new_tensors else IDS
        function = lambda b, h, q, kv, ids=ids: (ids[q] == ids[kv]) & (q >= kv)  # noqa: E731
        out = flexmasks.attention(q, k, v, mask=function)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        assert len(compiled) == (n >= 5)
    assert flexmasks.explain(q, k, v, mask=function).backend == "flex"


@pytest.mark.slow
def test_named_backends_run(compiled, monkeypatch):
    q, k, v = _qkv()
    for limit in (1 << 36, 0):
        monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", limit)
        for backend in ("short", "reference", "flex"):
            out = flexmasks.attention(q, k, v, mask=_own, backend=backend)
            torch.testing.assert_close(out.double(), _expected(q, k, v, _own), atol=1e-5, rtol=1e-5)
            assert flexmasks.explain(q, k, v, mask=_own, backend=backend).backend == backend
    assert len(compiled) == 1


def test_large_calls_are_compiled_at_once():
    q, k, v = (torch.empty(1, 1, 1025, 16) for _ in range(3))
    explanation = flexmasks.explain(q, k, v, mask=_own)
    assert explanation.backend == "flex"
    assert "1,024" in explanation.others["short"]


SCORES = {
    "alibi": "alibi",
    "softcap": flexmasks.get_score("softcap", cap=5.0),
    "squares": lambda score, b, h, q, kv: score * score.abs(),
    "several": ["alibi", flexmasks.get_score("softcap", cap=5.0)],
    "of keys": lambda score, b, h, q, kv: IDS[kv] * 0.5,
}


def _of_size(v_size):
    q, k, v = _qkv()
    return q, k, torch.cat([v, v], -1)[..., :v_size]


@pytest.mark.parametrize("mask", ["causal", _own, _documents])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("v_size", [16, 24])
def test_every_mask_and_score_compiles_nothing(compiled, monkeypatch, score, mask, v_size):
    """Until such calls have taken as long as that would."""
    q, k, v = _of_size(v_size)
    call = {"mask": mask, "score": SCORES[score]}
    expected = flexmasks.attention(q, k, v, backend="reference", **call)
    flexmasks.clear_caches()
    explanation = flexmasks.explain(q, k, v, **call)
    assert explanation.backend in ("short", "reference")
    assert "answered without compiling" in explanation.compiles
    plan = flexmasks.plan(mask, 96, batch=2, heads=4, score=SCORES[score])
    for _ in range(3):
        torch.testing.assert_close(flexmasks.attention(q, k, v, **call), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(flexmasks.attention(q, k, v, mask=plan), expected, atol=1e-5, rtol=1e-5)
    assert compiled == []
    monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 1)
    assert flexmasks.explain(q, k, v, **call).backend == "flex"


def test_a_loop_of_scores_that_change_is_compiled_when_it_has_taken_as_long(compiled, monkeypatch):
    q, k, v = _qkv()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 3 * 2 * 4 * 96 * 96 * 32)
    expected = flexmasks.attention(q, k, v, mask="causal", score="softcap", cap=5.0, backend="reference")
    flexmasks.clear_caches()
    for n in range(6):
        out = flexmasks.attention(q, k, v, mask="causal", score="softcap", cap=5.0)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert len(compiled) == (n >= 3)


@pytest.mark.parametrize("limit", [0.2, 60.0])
def test_a_compilation_that_takes_long_says_so_once(caplog, monkeypatch, limit):
    q, k, v = _qkv()
    monkeypatch.setattr(compiling, "_SLOW_SECONDS", limit)
    backend = lambda graph, inputs: (time.sleep(0.3), graph)[1]  # noqa: E731
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    with caplog.at_level(logging.WARNING, "flexmasks"):
        for _ in range(3):
            flexmasks.attention(q, k, v, mask="causal", score="softcap", cap=5.0, backend="flex")
        time.sleep(0.3)
    lines = [r.getMessage() for r in caplog.records if r.name == "flexmasks"]
    assert len(lines) == (limit < 1)
    assert all("softcap(cap=5.0)" in line and "about" not in line for line in lines), lines


def test_given_blocks_are_honored_pair_by_pair() -> None:
    """Blocks of torch's, and lists that were edited: what a full block shows, the function does not decide."""
    q, k, v = torch.randn(3, 2, 4, 200, 16)
    made = create_block_mask(lambda b, h, q, kv: q >= kv + 3 * h, None, 4, 200, 200, "cpu", 64)
    made.full_kv_num_blocks[:, 0, 2] = 1  # of the third row of a head only the first full block
    visible = create_mask(lambda b, h, q, kv: q >= kv + 3 * h, 1, 4, 200, 200, "cpu")
    visible[:, 0, 128:192, 64:128] = False
    out = flexmasks.attention(q, k, v, block_mask=made)
    assert flexmasks.explain(q, k, v, block_mask=made).backend == "short"
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=visible).nan_to_num(0.0)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("over", ["batch", "heads", "both"])
@pytest.mark.parametrize("what", ["hidden keys", "one query", "second gradients"])
def test_calls_that_the_reference_finishes_keep_the_masks_of_all_heads(over, what):
    """Numbers that are not finite, and derivatives of gradients, are left to the reference."""
    torch.manual_seed(0)
    q, k, v = _qkv(length=96)
    shape = {"batch": (2, 1), "heads": (1, 4), "both": (2, 4)}[over]
    windows = torch.arange(8).view(2, 4)[: shape[0], : shape[1]] * 9
    q_index, kv_index = torch.arange(96)[:, None], torch.arange(96)
    seen = (q_index >= kv_index) & (q_index - kv_index <= windows[..., None, None]) & (kv_index < 80)
    if what == "hidden keys":
        k[:, :, 80:] = math.nan
    elif what == "one query":
        q[0, 0, 5] = math.nan

    def mask(b, h, q, kv):
        window = windows[b if shape[0] > 1 else b * 0, h if shape[1] > 1 else h * 0]
        return (q >= kv) & (q - kv <= window) & (kv < 80)

    def by_hand(q, k, v):
        scores = q @ k.nan_to_num().transpose(-1, -2) / math.sqrt(q.shape[-1])
        return (scores.masked_fill(~seen, -1e30).softmax(-1) * seen) @ v

    if what == "second gradients":
        results = []
        for attend in (lambda *x: flexmasks.attention(*x, mask=mask), by_hand):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
            results.append([*first, *second])
        got, want = results
    else:
        got, want = [flexmasks.attention(q, k, v, mask=mask)], [by_hand(q, k, v)]
        got[0][0, 0, 5] = want[0][0, 0, 5] = 0
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-3, atol=1e-3 * float(b.detach().abs().max()))
