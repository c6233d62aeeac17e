"""The masked softmaxes against a float64 oracle, and their errors."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import functions
import numpy as np
import oracles
import pytest
import torch
from functions import Drawn, drawn
from helpers import DEVICES, TOLERANCE, arguments, check_by_the_interpreter, error, label, one_in
from hypothesis import given, settings
from oracles import MASK_CASES, Case
from softmax_oracle import softmax
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks.kernels import softmax_operator

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BOUND = TOLERANCE | {torch.float64: 1e-12}
NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.usefixtures("one_thread")
FORWARD = torch.ops.flexmasks.masked_softmax.default
BACKWARD = torch.ops.flexmasks.masked_softmax_backward.default
LENGTHS = [1, 2, 15, 16, 17, 127, 128, 1000, 1001, 2048, 4097]


def poisoned(x: Tensor, visible: Tensor) -> Tensor:
    """Return x with NaN and infinities in all hidden places."""
    poison = torch.tensor([NAN, INF, -INF], dtype=x.dtype)[torch.randint(3, x.shape)]
    return torch.where(visible.expand(x.shape), x, poison)


def check(call: Any, x: Tensor, visible: Tensor, scale: float, device: str) -> None:
    """Check output and gradient of `call`, with NaN and infinities in the hidden places of x and dy."""
    dy = torch.randn(x.shape).to(x.dtype)
    want, want_dx = softmax(x, visible, scale, dy)
    x = poisoned(x, visible).to(device).requires_grad_()
    y = call(x)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    hidden = ~visible.expand(x.shape)
    assert torch.all(y.detach().cpu()[hidden] == 0)
    assert error(y, want, 1e-9) < BOUND[x.dtype]
    y.backward(poisoned(dy, visible).to(device))
    assert x.grad is not None
    assert torch.all(x.grad.cpu()[hidden] == 0)
    unit = max(1e-9, float(want.norm()) / max(1, want.numel()) ** 0.5)
    assert error(x.grad, want_dx, unit) < 2 * BOUND[x.dtype]


# --- masks ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", one_in(4, [c for c in MASK_CASES if c.q_offset == 0]), ids=label)
def test_masks(case: Case, device: str) -> None:
    visible = oracles.dense(case)
    x = torch.randn(case.batch, case.heads, case.q_len, case.kv_len)
    call_arguments = arguments(case, device)
    del call_arguments["q_offset"]
    check(lambda x: flexmasks.masked_softmax(x, mask=case.name, q_offset=0, **call_arguments), x, visible, 1.0, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", LENGTHS)
def test_lengths(columns: int, dtype: torch.dtype, device: str) -> None:
    x = (torch.randn(2, 2, 5, columns) * 2).to(dtype)
    lengths = torch.tensor([3, columns // 2])
    q, kv = torch.arange(5)[:, None], torch.arange(columns)
    visible = (kv <= q * columns // 4) & (kv < lengths.view(2, 1, 1, 1))
    scale = -0.5
    there = lengths.to(device)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q * columns // 4) & (kv < there[b])

    check(lambda x: flexmasks.masked_softmax(x, mask=mask, q_offset=0, scale=scale), x, visible, scale, device)
    seen = visible.to(device)
    check(lambda x: flexmasks.masked_softmax(x, mask=seen, scale=scale), x, visible, scale, device)
    check(lambda x: flexmasks.scaled_masked_softmax(x, ~seen, scale), x, visible, scale, device)
    check(lambda x: flexmasks.scaled_masked_softmax(x, (~seen).int(), scale), x, visible, scale, device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_example_of_grouped_tril(device: str) -> None:
    """Rows 3 and 4 of batch 0 and row 4 of batch 1 are zero; the visible probabilities of exactly 1 / S are not."""
    x = torch.zeros(3, 2, 5, 5, device=device)
    y = flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=torch.tensor([3, 4, 5], device=device)).cpu()
    for b, length in enumerate((3, 4, 5)):
        for r in range(5):
            want = [1 / (r + 1) if c <= r and r < length and c < length else 0.0 for c in range(5)]
            assert torch.equal(y[b, 0, r], torch.tensor(want))
    assert torch.all(y[2, :, 4] == 0.2)
    one = flexmasks.masked_softmax(torch.randn(1, 1, 1, 1, device=device), mask="grouped_tril", seq_lens=[1])
    assert one.item() == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    for y in (
        flexmasks.masked_softmax(x),
        flexmasks.masked_softmax(x, mask="causal"),
        flexmasks.masked_softmax(x, mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)),
        flexmasks.scaled_masked_softmax(x, torch.ones(1, dtype=torch.bool, device=device)),
    ):
        assert y.shape == x.shape
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
def test_masks_that_broadcast(device: str) -> None:
    x = torch.randn(2, 3, 4, 37)
    for shape in ((37,), (4, 37), (4, 1), (2, 1, 1, 37), (2, 1, 4, 37), (3, 1, 1), ()):
        hidden = torch.rand(shape) < 0.5
        there = hidden.to(device)
        check(lambda x, m=there: flexmasks.scaled_masked_softmax(x, m), x, ~hidden, 1.0, device)
    line = torch.rand(37) < 0.5
    check(lambda x: flexmasks.scaled_masked_softmax(x, line.to(device)), x[0, 0, 0], ~line, 1.0, device)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    base = torch.randn(4, 3, 20, 24, device=device)
    for x in (
        base.transpose(2, 3),
        base.transpose(0, 1),
        base[..., ::2],
        base[:, :, ::3],
        base[:1].expand(4, 3, 20, 24),
    ):
        want, _ = softmax(x, torch.ones(x.shape[-2:], dtype=torch.bool).tril())
        y = flexmasks.masked_softmax(x, mask="causal", q_offset=0)
        assert y.is_contiguous()
        assert error(y, want, 1e-9) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_infinite_scores_give_what_torch_gives(device: str) -> None:
    x = torch.randn(6, 8, device=device)
    x[0] = -INF
    x[1, 3] = INF
    x[2, 3] = NAN
    x[3, :5] = -INF
    x[4] = torch.finfo(torch.float32).min
    hidden = torch.arange(8, device=device) > 6
    y = flexmasks.scaled_masked_softmax(x, hidden)
    assert torch.allclose(y[:, :7], torch.softmax(x[:, :7], -1), equal_nan=True)
    assert torch.all(y[:, 7] == 0)


@pytest.mark.parametrize("shape", [(64, 128, 128), (128, 64, 1, 128), (8192, 1, 128), (16, 1, 1 << 16)])
def test_memory_is_bounded(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """No call copies all of a half-precision tensor to float32, however the rows are laid out."""
    monkeypatch.setattr(softmax_operator, "_PART_ELEMENTS", math.prod(shape) // 8)
    x = torch.randn(shape).bfloat16()
    hidden = torch.rand(shape[-1]) < 0.5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y = flexmasks.scaled_masked_softmax(x, hidden)
        dx = BACKWARD(x, y, None, 1.0)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= x.nbytes
    monkeypatch.setattr(softmax_operator, "_PART_ELEMENTS", x.numel())
    assert torch.equal(y, flexmasks.scaled_masked_softmax(x, hidden))
    assert torch.equal(dx, BACKWARD(x, y, None, 1.0))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_leaves_the_dtype(device: str) -> None:
    with torch.autocast(device, torch.bfloat16):
        x = torch.randn(1, 1, 4, 4, device=device, requires_grad=True)
        y = flexmasks.masked_softmax(x, mask="causal")
        y.sum().backward()
    assert y.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_negative_views(device: str) -> None:
    values = torch.randn(2, 1, 5, 6, device=device)
    x = torch.complex(values, values).conj().imag
    assert x.is_neg()
    want = flexmasks.masked_softmax(-values, mask="causal", q_offset=0)
    assert torch.equal(flexmasks.masked_softmax(x, mask="causal", q_offset=0), want)
    leaf = values.clone().requires_grad_()
    y = flexmasks.masked_softmax(leaf, mask="causal", q_offset=0)
    (of_negative,) = torch.autograd.grad(y, leaf, x, retain_graph=True)
    (of_plain,) = torch.autograd.grad(y, leaf, -values)
    assert torch.equal(of_negative, of_plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-50, -1e-50, 0.0])
def test_scales_close_to_zero(scale: float, device: str) -> None:
    x = torch.tensor([[5.0, 1, 2], [-3e38, 3e38, 1], [torch.nan, 1, 2]], device=device).view(1, 1, 3, 3)
    want = torch.tensor([[1 / 3] * 3, [1 / 3] * 3, [torch.nan] * 3], device=device).view(1, 1, 3, 3)
    torch.testing.assert_close(flexmasks.masked_softmax(x, scale=scale), want, equal_nan=True)


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.campaign)])
def test_random_compositions(examples: int) -> None:
    @settings(max_examples=examples)
    @given(drawn(functions.structured))
    def right(case: Drawn) -> None:
        mod = functions.compiled(case.expression, functions.LONG_TABLES)
        visible = create_mask(mod, case.batch, case.heads, case.q_len, case.kv_len, device="cpu")[:, :, :9]
        x = torch.randn(visible.shape)
        inner = flexmasks.get_mask(mod) & flexmasks.get_mask("full")
        check(lambda x: flexmasks.masked_softmax(x, mask=inner, q_offset=0), x, visible, 1.0, "cpu")

    right()


# --- errors ---

X = torch.zeros(2, 3, 4, 5)
NESTED = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: flexmasks.masked_softmax([1.0]), TypeError, "`x` must be a tensor .*, got list; use torch.as_tensor"),
        (lambda: flexmasks.masked_softmax(X.int()), TypeError, r"`x` must be .* float16, .*, got int32\[2, 3, 4, 5\]"),
        (lambda: flexmasks.masked_softmax(NESTED), TypeError, "`x` must be a dense tensor, got a nested one"),
        (lambda: flexmasks.scaled_masked_softmax(X, NESTED > 0), TypeError, "`mask` must be a dense tensor, got a nes"),
        (lambda: flexmasks.masked_softmax(X, mask=(X > 0).to_sparse()), TypeError, "`mask` must be .* layout .*sparse"),
        (lambda: flexmasks.scaled_masked_softmax(X, (X > 0).to_sparse()), TypeError, "`mask` must be a dense tensor"),
        (lambda: flexmasks.masked_softmax(X, mask=[True] * 5), TypeError, "boolean tensor, .* list; use torch"),
        (lambda: flexmasks.scaled_masked_softmax(X, np.ones(5) > 0), TypeError, "got ndarray; use torch.as_tensor"),
        (lambda: flexmasks.masked_softmax(X, mask=torch.nn.Linear(5, 5)), TypeError, "mask Linear: .* 5 were given"),
        (lambda: flexmasks.masked_softmax(X, scale=torch.tensor(2.0)), TypeError, "got Tensor; multiply `x` by it"),
        (lambda: flexmasks.masked_softmax(X, scale=1j), TypeError, "`scale` must be a number, got 1j"),
        (lambda: flexmasks.masked_softmax(X[0, 0, 0]), ValueError, r"two dimensions, .* got float32\[5\]"),
        (lambda: flexmasks.masked_softmax(X, dtype=torch.int32), TypeError, "`dtype` must be .* got torch.int32"),
        (lambda: flexmasks.masked_softmax(X.to_sparse()), TypeError, "dense tensor"),
        (lambda: flexmasks.masked_softmax(X, scale="1"), TypeError, "`scale` must be a number, got '1'"),
        (lambda: flexmasks.masked_softmax(X, scale=True), TypeError, "`scale` must be a number, got True"),
        (lambda: flexmasks.masked_softmax(X, scale=NAN), ValueError, "`scale` must be finite, at most .*, got nan"),
        (lambda: flexmasks.masked_softmax(X, mask="casual"), ValueError, "did you mean 'causal'"),
        (lambda: flexmasks.masked_softmax(X, window=2), TypeError, "no argument is named `window`"),
        (lambda: flexmasks.masked_softmax(X, mask=X > 0, window=2), TypeError, "no argument is named `window`"),
        (lambda: flexmasks.masked_softmax(X, mask="sliding_window"), TypeError, "needs `window`"),
        (lambda: flexmasks.masked_softmax(X, mask="grouped_tril", seq_lens=[1, 9], q_offset=0), ValueError, "seq_lens"),
        (lambda: flexmasks.masked_softmax(X, mask=X), TypeError, "or a boolean tensor, True = visible, got float32"),
        (lambda: flexmasks.masked_softmax(X, mask=X[:, :2] > 0), ValueError, r"broadcast to x's shape \[2, 3, 4, 5\]"),
        (lambda: flexmasks.masked_softmax(X, mask=X[None] > 0), ValueError, "must broadcast"),
        (lambda: flexmasks.masked_softmax(X, mask=lambda b, h, q, kv: q, q_offset=0), TypeError, "boolean"),
        (lambda: flexmasks.scaled_masked_softmax(X, X.cfloat()), TypeError, "booleans or numbers, .* got"),
        (lambda: flexmasks.scaled_masked_softmax(X, None), TypeError, "booleans or numbers, .* got NoneType"),
        (lambda: flexmasks.scaled_masked_softmax(X, X[..., :2] > 0), ValueError, "must broadcast"),
        (lambda: flexmasks.scaled_masked_softmax(X, (X > 0).to("meta")), ValueError, "`mask` is on meta, `x` on cpu"),
        (lambda: flexmasks.scaled_masked_softmax(X[0, 0, 0, 0], X > 0), ValueError, "at least one dimension"),
    ],
)  # fmt: skip
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert str(caught.value).startswith("flexmasks")


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_numbers_of_all_kinds(scale: Any) -> None:
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(flexmasks.masked_softmax(x, scale=scale), flexmasks.masked_softmax(x, scale=0.5))
    assert torch.equal(flexmasks.masked_softmax(x, scale=np.int64(2)), flexmasks.masked_softmax(x, scale=2))


@pytest.mark.slow
def test_a_module_is_a_mask() -> None:
    class Threshold(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("most", torch.tensor(2))

        def forward(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q - kv < self.most

    x, module = torch.randn(1, 2, 6, 6), Threshold()
    for most in (2, 4):
        module.most.fill_(most)
        want = flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: q - kv < most)  # noqa: B023
        assert torch.equal(flexmasks.masked_softmax(x, mask=module), want)
        compiled = torch.compile(lambda x: flexmasks.masked_softmax(x, mask=module), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), want)


# --- kernels ---


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is interpreted in this process already")
@pytest.mark.parametrize("selection", ["not campaign", pytest.param("campaign", marks=pytest.mark.campaign)])
def test_kernels_by_the_interpreter(selection: str) -> None:
    """The kernels' own tests, in a process that chose Triton's interpreter before it was imported."""
    check_by_the_interpreter(str(Path(__file__).with_name("test_softmax_kernels.py")), "-m", selection)


@pytest.mark.parametrize("shape", [(5, 5), (3, 5, 5), (3, 2, 5, 5), (2, 3, 2, 5, 5)], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_scores_of_other_dimensions(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Without heads, without batch elements, and with several dimensions of them; also in another dtype."""
    x = torch.randn(shape)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    want = torch.softmax(x.masked_fill(hidden, -math.inf), -1, dtype=dtype)
    got = flexmasks.masked_softmax(x, mask="causal", dtype=dtype)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(flexmasks.masked_softmax(x, mask=~hidden, dtype=dtype), want)
    if len(shape) == 3:  # [B, Q, K]
        lens = torch.tensor([5, 2, 3])
        visible = torch.arange(5) < lens[:, None, None]
        want = torch.softmax(x.masked_fill(~visible, -math.inf), -1)
        torch.testing.assert_close(flexmasks.masked_softmax(x, mask="padding", kv_lens=lens), want)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float32])
def test_masks_and_scales_of_the_source(dtype: torch.dtype, is_compiled: bool) -> None:
    """A mask of any dtype, and a scale of one element, with or without a dimension."""
    x, hidden = torch.randn(2, 3, 4, 6), torch.rand(2, 1, 4, 6) > 0.6
    hidden[..., 0] = False
    call: Any = flexmasks.scaled_masked_softmax
    torch._dynamo.reset()
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if is_compiled else call
    want = torch.softmax((x * 0.5).masked_fill(hidden, -math.inf), -1)
    for scale in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
        torch.testing.assert_close(call(x, hidden.to(dtype), scale), want)


def test_a_scale_that_learns() -> None:
    x, hidden = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.rand(4, 6) > 0.6
    hidden[:, 0] = False
    scale = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    got = flexmasks.scaled_masked_softmax(x, hidden, scale)
    want = torch.softmax((x * scale).masked_fill(hidden, -math.inf), -1)
    for mine, theirs in zip(*(torch.autograd.grad((y * weight).sum(), scale) for y in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs)
