"""The names of torch's flex_attention: equal block masks, results and errors, in eager calls and in torch.compile.

The cases are those of torch's documentation and of its own tests. The oracles are torch's create_block_mask and
create_mask, and the formula in float64.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch
from helpers import one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention.experimental._paged_attention import PagedAttention

import flexmasks
from flexmasks import flex

B, H, S, D = 2, 4, 160, 32
Function = Callable[..., Tensor]
_SAME = ["BlockMask", "AuxRequest", "AuxOutput", "and_masks", "or_masks", "create_mask", "noop_mask"]


def _scores(device: str = "cpu") -> dict[str, Function]:
    """Score changes of torch's documentation and tests."""
    make = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    head, batch, token = (make(n).to(device) for n in (H, B, S))
    pairs, of_heads, relative = (make(*n).to(device) for n in ((S, S), (B, H, S, S), (2 * S,)))
    many, which = make(B, H, 4, S).to(device), torch.tensor(1, device=device)
    scale = torch.full((), 3, dtype=torch.int32, device=device)
    first, half = torch.tensor([30, 70], device=device), (torch.arange(S) >= S // 2).to(device)
    hidden = -math.inf

    def composed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(q >= kv, score + (q - kv), hidden)

    return {
        "identity": lambda score, b, h, q, kv: score,
        "causal": lambda score, b, h, q, kv: torch.where(q >= kv, score, hidden),
        "relative": lambda score, b, h, q, kv: score + (q - kv),
        "alibi": lambda score, b, h, q, kv: score + torch.exp2(-((h + 1) * 8.0 / H)) * (kv - q),
        "softcap": lambda score, b, h, q, kv: 20.0 * torch.tanh(score / 20.0),
        "inverse causal": lambda score, b, h, q, kv: torch.where(q <= kv, score, hidden),
        "times two": lambda score, b, h, q, kv: score * 2,
        "squared": lambda score, b, h, q, kv: score * score,
        "silu": lambda score, b, h, q, kv: torch.nn.functional.silu(score),
        "odd keys": lambda score, b, h, q, kv: torch.where(kv % 2 == 0, score, hidden),
        "composed": composed,
        "head offset": lambda score, b, h, q, kv: score * head[h],
        "all dimensions": lambda score, b, h, q, kv: score + token[q] + batch[b] + head[h],
        "sequences": lambda score, b, h, q, kv: torch.where(half[q] == half[kv], score, hidden),
        "pairs": lambda score, b, h, q, kv: score + pairs[q, kv],
        "pairs of heads": lambda score, b, h, q, kv: score + of_heads[b, h, q, kv],
        "relative table": lambda score, b, h, q, kv: score + relative[(q - kv) + S],
        "one index after the other": lambda score, b, h, q, kv: score + of_heads[b][h][q, kv],
        "index in a tensor": lambda score, b, h, q, kv: score + many[b][h][which, q],
        "captured number": lambda score, b, h, q, kv: score + scale,
        "both ways at first": lambda score, b, h, q, kv: torch.where(
            (q >= kv) | ((q <= first[b]) & (kv <= first[b])), score, hidden
        ),
        "quotient of numbers": lambda score, b, h, q, kv: score - q // (1 + kv),
    }  # fmt: skip


def _masks(device: str = "cpu") -> dict[str, Function]:
    """Mask functions of torch's documentation and tests."""
    ids = (torch.arange(S) // 50).to(device)
    lengths, table = torch.tensor([S, 90], device=device), torch.rand(S, S, generator=torch.Generator().manual_seed(1))
    table = (table > 0.3).to(device)
    window = lambda b, h, q, kv: (q - kv).abs() <= 20  # noqa: E731
    causal = lambda b, h, q, kv: q >= kv  # noqa: E731
    prefix = lambda b, h, q, kv: kv <= 40  # noqa: E731
    width = 16

    def natten(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row, column = q // width, q % width
        return ((row - kv // width).abs() <= 2) & ((column - kv % width).abs() <= 3)

    return {
        "causal": causal,
        "window": flex.and_masks(causal, window),
        "prefix": flex.or_masks(prefix, causal),
        "documents": lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv),
        "padding": lambda b, h, q, kv: (q < lengths[b]) & (kv < lengths[b]),
        "heads": lambda b, h, q, kv: (q - kv).abs() < 10 + 20 * h,
        "dilated": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0),
        "natten": natten,
        "table": lambda b, h, q, kv: table[q, kv],
        "nothing": lambda b, h, q, kv: q < 0,
        "all": flex.noop_mask,
    }


def _formula(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Function | None, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention in float64: output, lse and the greatest score of each row."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[3])
    if score_mod is not None:
        b, h, i, j = (torch.arange(n, device=q.device) for n in scores.shape)
        function = score_mod
        for dims in (
            (0, None, None, None, 0),
            (0, None, None, 0, None),
            (0, None, 0, None, None),
            (0, 0, None, None, None),
        ):
            function = torch.vmap(function, in_dims=dims)
        scores = function(scores, b, h, i, j)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return weights @ v, lse, scores.amax(-1)


def _qkv(kv_heads: int = H, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = (B, H, S, D), (B, kv_heads, S, D), (B, kv_heads, S, D)
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def _error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    same = (got == want) | (got.isnan() & want.isnan())
    return float(torch.where(same, 0.0, (got.double() - want.double()).abs()).max())


def _check_gradients(out: Tensor, want: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, grad)
    expected = torch.autograd.grad(want, inputs, grad.to(want.dtype))
    for x, y in zip(got, expected, strict=True):
        assert _error(x, y.nan_to_num()) < tolerance * max(1.0, float(y.detach().nan_to_num().abs().max()))


# --- names and signatures ---


def test_names_are_torchs() -> None:
    """Every public name of torch's module is here; signatures have torch's names, order and defaults."""
    assert set(flex.__all__) == set(of_torch.__all__)
    for name in _SAME:
        assert getattr(flex, name) is getattr(of_torch, name)
    for name in ("flex_attention", "create_block_mask"):
        mine, theirs = (inspect.signature(getattr(m, name)).parameters for m in (flex, of_torch))
        assert [*mine][: len(theirs)] == [*theirs]
        assert all(mine[n].default == theirs[n].default and mine[n].kind == theirs[n].kind for n in theirs)


# --- block masks ---


def _assert_equal(mine: Any, theirs: Any) -> None:
    assert (mine.shape, mine.BLOCK_SIZE, mine.seq_lengths) == (theirs.shape, theirs.BLOCK_SIZE, theirs.seq_lengths)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        x, y = getattr(mine, name), getattr(theirs, name)
        assert (x is None and y is None) or (torch.equal(x, y) and x.dtype == y.dtype), name


@pytest.mark.parametrize("name", _masks())
@pytest.mark.parametrize("sizes", [(None, None), (B, H), (1, H), (B, None)])
def test_block_masks_are_torchs(name: str, sizes: tuple[int | None, int | None]) -> None:
    arguments: Any = (_masks()[name], *sizes, S, S, "cpu", 32)
    mine, theirs = flex.create_block_mask(*arguments), of_torch.create_block_mask(*arguments)
    _assert_equal(mine, theirs)
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    assert mine.sparsity() == theirs.sparsity()
    _assert_equal(mine[:, :1], theirs[:, :1])
    _assert_equal(mine.to("cpu"), theirs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_block_masks_are_torchs(data: Any) -> None:
    q_len, kv_len = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 200))
    block = data.draw(st.sampled_from([16, 32, 128, (16, 64), (128, 32)]))
    left, step = data.draw(st.integers(-5, 60)), data.draw(st.integers(1, 4))
    batch, heads = data.draw(st.sampled_from([None, 1, 3])), data.draw(st.sampled_from([None, 2]))

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv <= left + 7 * b) & (kv % step == 0) & (q + h >= kv)

    arguments: Any = (mask, batch, heads, q_len, kv_len, "cpu", block)
    _assert_equal(flex.create_block_mask(*arguments), of_torch.create_block_mask(*arguments))


def test_options_of_block_masks() -> None:
    causal = _masks()["causal"]
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("torch's function has no separate_full_blocks before 2.13")
    mine = flex.create_block_mask(causal, None, None, S, S, "cpu", 32, False, False)
    assert mine.full_kv_num_blocks is None
    assert torch.equal(mine.to_dense(), of_torch.create_block_mask(causal, None, None, S, S, "cpu", 32).to_dense())
    for order in (True, False):
        arguments: Any = (causal, None, None, S, S, "cpu", 32, False, True, True, order)
        mine, theirs = flex.create_block_mask(*arguments), of_torch.create_block_mask(*arguments)
        assert torch.equal(mine.dq_write_order, theirs.dq_write_order)
        assert mine.dq_kv_order_spt is theirs.dq_kv_order_spt is order
    plain: Any = (causal, None, None, S, S, "cpu", 32, False, True, False)
    _assert_equal(flex.create_block_mask(*plain, False), flex.create_block_mask(*plain, True))
    with pytest.raises(ValueError, match="dq_kv_order must be a bool"):
        flex.create_block_mask(*plain, torch.tensor(1))
    with pytest.raises(ValueError, match="q_len"):
        flex.create_block_mask(causal, None, None, 0, S, "cpu")
    with pytest.raises(TypeError, match="must take"):
        flex.create_block_mask(lambda q, kv: q >= kv, None, None, S, S, "cpu")


# --- results ---


@pytest.mark.parametrize("name", _scores())
def test_scores_and_their_gradients(name: str) -> None:
    score_mod, (q, k, v) = _scores()[name], _qkv()
    out, aux = flex.flex_attention(q, k, v, score_mod, return_aux=flex.AuxRequest(lse=True, max_scores=True))
    want, lse, most = _formula(q, k, v, score_mod, None)
    assert _error(out, want) < 2e-5
    assert _error(aux.lse, lse) < 2e-5 * max(1.0, float(lse.detach().abs().max()))
    assert _error(aux.max_scores, most) < 2e-5 * max(1.0, float(most.detach().abs().max()))
    _check_gradients(out, want, [q, k, v], 2e-5)


@pytest.mark.parametrize("name", _masks())
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_masks_and_their_gradients(name: str, kv_heads: int) -> None:
    mask, (q, k, v) = _masks()[name], _qkv(kv_heads)
    block_mask = flex.create_block_mask(mask, B, H, S, S, "cpu")
    visible = of_torch.create_mask(mask, B, H, S, S, "cpu")
    cap = _scores()["softcap"]
    call = functools.partial(flex.flex_attention, q, k, v, cap, block_mask, 0.3, enable_gqa=True)
    out, lse = call(return_lse=True)
    _, aux = call(return_aux=flex.AuxRequest(max_scores=True))
    want, want_lse, most = _formula(q * 0.3 * math.sqrt(D), k, v, cap, visible)
    assert _error(out, want) < 2e-5
    assert _error(lse, want_lse) < 2e-5
    assert _error(aux.max_scores, most) < 2e-5
    _check_gradients(out, want, [q, k, v], 2e-5)


def test_biases_learn() -> None:
    """Gradients of captured tensors, for which torch has none on a CPU."""
    q, k, v = _qkv()
    bias, gate = torch.randn(H, S, S, requires_grad=True), torch.randn(H, requires_grad=True)
    score_mod = lambda score, b, h, q, kv: score * torch.sigmoid(gate[h]) + bias[h, q, kv]  # noqa: E731
    block_mask = flex.create_block_mask(_masks()["causal"], None, None, S, S, "cpu")
    out = flex.flex_attention(q, k, v, score_mod, block_mask)
    want, *_ = _formula(q, k, v, score_mod, of_torch.create_mask(_masks()["causal"], 1, 1, S, S, "cpu"))
    _check_gradients(out, want, [q, k, v, bias, gate], 2e-5)


def test_keys_of_one_batch_element() -> None:
    """k and v of batch 1 are those of all: a prompt that all sequences share."""
    q, k, v = _qkv()
    k, v = (x[:1].detach().requires_grad_() for x in (k, v))
    block_mask = flex.create_block_mask(_masks()["documents"], None, None, S, S, "cpu")
    out = flex.flex_attention(q, k, v, block_mask=block_mask)
    want, *_ = _formula(q, k, v, None, of_torch.create_mask(_masks()["documents"], 1, 1, S, S, "cpu"))
    assert _error(out, want) < 2e-5
    _check_gradients(out, want, [q, k, v], 2e-5)
    compiled = torch.compile(flex.flex_attention, fullgraph=True)(q, k, v)
    assert _error(compiled, _formula(q, k, v, None, None)[0]) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_keys_of_another_dtype(dtype: torch.dtype) -> None:
    """A cache in few bits, with its scale in the score."""
    q, k, v = (x.detach() for x in _qkv(2))
    scale = torch.tensor([0.5, 2.0, 1.0, 3.0])
    score_mod = lambda score, b, h, q, kv: score * scale[h]  # noqa: E731
    k, v = k.to(dtype), v.to(dtype)
    out = flex.flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert out.dtype == q.dtype
    assert _error(out, _formula(q, k, v, score_mod, None)[0]) < 2e-5
    step = flex.flex_attention(q[:, :, :1], k, v, score_mod, enable_gqa=True)
    assert _error(step, _formula(q[:, :, :1], k, v, score_mod, None)[0]) < 2e-5


def test_pages() -> None:
    """torch's own PagedAttention: its block masks read all places of the lists."""
    page, lengths = 32, torch.tensor([S, 97])
    paged = PagedAttention(16, page, B, device="cpu")
    q, k, v = (x.detach() for x in _qkv())
    caches = torch.zeros(2, 1, H, 16 * page, D)
    for n in range(B):
        paged.reserve(torch.tensor(n), torch.tensor(S))
    positions = torch.arange(S).expand(B, S)
    paged.assign(torch.arange(B), positions, k, v, *caches)
    mask = lambda b, h, q, kv: (q >= kv) & (kv < lengths[b])  # noqa: E731
    logical = flex.create_block_mask(mask, B, 1, S, S, "cpu", page)
    physical = paged.convert_logical_block_mask(logical)
    score_mod = _scores()["relative"]
    out = flex.flex_attention(q, *caches, paged.get_score_mod(score_mod), physical)
    want, *_ = _formula(q, k, v, score_mod, of_torch.create_mask(mask, B, 1, S, S, "cpu"))
    assert _error(out, want) < 2e-5


# --- as torch's eager call takes them ---

SCALES = [
    torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64), torch.tensor(2), torch.tensor([0.3]),
    torch.rand(H, 1, 1), torch.rand(S), torch.rand(B, 1, S, 1), torch.rand(B, H, S, S, dtype=torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("scale", SCALES, ids=lambda t: f"{t.dtype}{[*t.shape]}")
@pytest.mark.parametrize("name", [None, "softcap"])
def test_a_tensor_as_scale(scale: Tensor, name: str | None) -> None:
    q, k, v = _qkv()
    score_mod, causal = _scores()[name] if name else None, _masks()["causal"]
    leaf = scale.clone().requires_grad_(scale.is_floating_point())
    block_mask = flex.create_block_mask(causal, None, None, S, S, "cpu")
    request = of_torch.AuxRequest(lse=True, max_scores=True)
    out, aux = flex.flex_attention(q, k, v, score_mod, block_mask, leaf, return_aux=request)
    exactly = scale.double().requires_grad_()
    scores = q.double() @ k.double().mT * exactly
    scores = 20.0 * torch.tanh(scores / 20.0) if name else scores
    scores = scores.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -math.inf)
    want = scores.softmax(-1) @ v.double()
    assert (out - want).abs().max() < 1e-5
    assert (aux.lse - scores.logsumexp(-1)).abs().max() < 1e-5
    assert (aux.max_scores - scores.amax(-1)).abs().max() < 1e-5
    if leaf.requires_grad:
        got, wanted = (torch.autograd.grad(x.square().sum(), y)[0] for x, y in ((out, leaf), (want, exactly)))
        assert (got - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.abs().max()))


def test_a_tensor_as_scale_inside_torch_compile() -> None:
    q, k, v = (x.detach() for x in _qkv())
    step = torch.compile(lambda q, t: flex.flex_attention(q * 2, k, v, scale=t), fullgraph=True, backend="aot_eager")
    for number in (0.1, 0.3):
        want = (q.double() * 2 @ k.double().mT * number).softmax(-1) @ v.double()
        assert (step(q, torch.tensor(number)) - want).abs().max() < 1e-5


@pytest.mark.parametrize("make", ["torch", "flex", "as_data"])
@pytest.mark.parametrize("sizes", [(3, 1), (3, 6), (1, 6), (B, 6), (3, H)])
def test_block_masks_of_more_batch_elements_or_heads(make: str, sizes: tuple[int, int]) -> None:
    """Of these, the first count."""
    q, k, v = _qkv()

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & ((b * (sizes[0] > 1) + h * (sizes[1] > 1) + kv) % 3 > 0)

    if make == "as_data":
        given = {"batch": sizes[0], "heads": sizes[1], "device": "cpu"}
        block_mask = flexmasks.block_mask(mask, S, S, as_data=True, **given)
    else:
        module = of_torch if make == "torch" else flex
        block_mask = module.create_block_mask(mask, *sizes, S, S, "cpu", 32)
    visible = of_torch.create_mask(mask, B, H, S, S, "cpu")
    scores = (q.double() @ k.double().mT / D**0.5).masked_fill(~visible, -math.inf)
    want = torch.where(visible.any(-1, keepdim=True), scores.softmax(-1), 0.0) @ v.double()
    assert (flex.flex_attention(q, k, v, block_mask=block_mask) - want).abs().max() < 1e-5
    if (make, sizes) == ("torch", (3, 6)):  # it ends the process in torch's compiled kernel
        out = flex.flex_attention(*(x.detach() for x in (q, k, v)), block_mask=block_mask, kernel_options={})
        assert (out - want).abs().max() < 1e-5


# --- errors ---


def test_errors() -> None:
    q, k, v = _qkv()
    for request in (of_torch.AuxRequest(), of_torch.AuxRequest(lse=True)):
        with pytest.raises(ValueError, match="pass `return_aux=AuxRequest\\(lse=True\\)` alone, without `return_lse`"):
            flex.flex_attention(q, k, v, return_lse=True, return_aux=request)
    with pytest.raises(ValueError, match=r"a tensor `scale` must broadcast to \[B, Hq, L, S\] = .*, got \[7\]"):
        flex.flex_attention(q, k, v, scale=torch.rand(7))
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex.flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(
        ValueError, match="BACKEND must be one of 'AUTO', 'TRITON', 'FLASH', 'TRITON_DECODE', got 'TRITN'"
    ):
        flex.flex_attention(q, k, v, kernel_options={"BACKEND": "TRITN"})
    with pytest.raises(ValueError, match="`kernel_options` has no option 'BLOK_M'; torch knows BACKEND, "):
        flex.flex_attention(q, k, v, kernel_options={"BLOK_M": 64})
    made = flex.create_block_mask(_masks()["causal"], None, None, S, S, "cpu", 32)
    with pytest.raises(ValueError, match=r"must have lists \[B, H, rows, columns\].*index a BlockMask with slices"):
        flex.flex_attention(q, k, v, block_mask=made[:, :, torch.tensor(1)])
    with pytest.raises(ValueError, match="batch size"):
        flex.flex_attention(q, k[:1], v)
    with pytest.raises(ValueError, match="block_mask"):
        flex.flex_attention(q, k, v, block_mask=flex.create_block_mask(_masks()["causal"], None, None, S, S + 1, "cpu"))


# --- inside torch.compile ---


def _backend(dynamic: bool | None) -> str:
    return "aot_eager" if dynamic else "inductor"  # C++ for symbolic sizes takes a minute


class _Window:
    """An object as a mask function."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= self.window + b)


def _window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, window: int) -> Tensor:
    return (q >= kv) & (q - kv <= window + b)


def _plain_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv <= 9 + b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "backend", "dynamic"),
    [
        (_plain_window, "inductor", None),
        (_plain_window, "aot_eager", True),
        (functools.partial(_window, window=9), "aot_eager", None),
        (_Window(9), "aot_eager", None),
        (_Window(9).__call__, "aot_eager", None),
    ],
    ids=["function", "function of any length", "partial", "object", "method"],
)
def test_a_step_in_one_graph(mask: Function, backend: str, dynamic: bool | None) -> None:
    """Block mask and attention in one graph, for all kinds of functions, with gradients."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block_mask = flex.create_block_mask(mask, q.shape[0], None, q.shape[2], k.shape[2], q.device)
        out: Tensor = flex.flex_attention(q, k, v, _scores_in_graph, block_mask)
        return out

    is_old = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)
    if isinstance(mask, _Window) and is_old and sys.version_info >= (3, 12):
        pytest.skip("torch 2.11 cannot trace Python 3.12's look at the signature of an object")
    torch._dynamo.reset()
    q, k, v = _qkv()
    visible = of_torch.create_mask(_plain_window, B, 1, S, S, "cpu")
    out = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)(q, k, v)
    want, *_ = _formula(q, k, v, _scores_in_graph, visible)
    assert _error(out, want) < 2e-5
    _check_gradients(out, want, [q, k, v], 2e-5)


def _scores_in_graph(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score * 2 + h


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, *one_in(3, [True])])  # Inductor takes half a minute
def test_functions_made_in_the_step(dynamic: bool | None) -> None:
    """Functions that capture tensors of the graph and numbers that change."""

    def step(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, window: int) -> Tensor:
        ids = ids + 1

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (ids[b, i] == ids[b, j]) & (i >= j) & (i - j <= window)

        block_mask = flex.create_block_mask(mask, q.shape[0], None, q.shape[2], k.shape[2], q.device)
        out: Tensor = flex.flex_attention(q, k, v, lambda score, b, h, i, j: score + ids[b, i], block_mask)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=_backend(dynamic))
    ids = torch.stack([torch.arange(S) // 50, torch.arange(S) // 30])
    for window in (9, 11, 23):
        q, k, v = _qkv()
        out, want = compiled(q, k, v, ids, window), step(q, k, v, ids, window)
        assert _error(out, want) < 2e-5
        _check_gradients(out, want, [q, k, v], 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "documents", "padding", "table", "nothing"])
def test_a_compiled_create_block_mask(name: str) -> None:
    """torch.compile(create_block_mask), as torch's documentation advises, makes the same blocks."""
    torch._dynamo.reset()
    arguments: Any = (_masks()[name], B, None, S, S, "cpu")
    made = torch.compile(flex.create_block_mask, backend="inductor" if name == "causal" else "aot_eager")(*arguments)
    q, k, v = _qkv()
    visible = of_torch.create_mask(_masks()[name], B, 1, S, S, "cpu")
    assert _error(flex.flex_attention(q, k, v, block_mask=made), _formula(q, k, v, None, visible)[0]) < 2e-5
    computed, exact = made.to_dense().bool(), of_torch.create_block_mask(*arguments).to_dense().bool()
    assert bool((computed | ~exact).all())


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["name", "function", "booleans", "plan", "block mask", "bshd", "nothing"])
def test_greatest_scores_of_attention(form: str, device: str) -> None:
    """attention(return_max=True) has them for every way in, beside the same output and lse."""
    dtype, bound = (torch.bfloat16, 2e-2) if device == "cuda" else (torch.float32, 2e-5)
    q, k, v = (x.detach() for x in _qkv(2, device, dtype))
    q = q[:, :, 20:]
    i, j = torch.arange(20, S, device=device)[:, None], torch.arange(S, device=device)
    visible, q_len = (i >= j) & (i - j <= 30), S - 20
    call: dict[str, Any] = {"mask": "sliding_window", "window": 30, "q_offset": 20}
    window = lambda b, h, q, kv: (q >= kv) & (q - kv <= 30)  # noqa: E731
    if form == "function":
        call = {"mask": window, "q_offset": 20}
    elif form == "booleans":
        call = {"mask": visible}
    elif form == "plan":
        call = {"mask": flexmasks.plan("sliding_window", q_len, S, window=30, q_offset="last", batch=B, device=device)}
    elif form == "block mask":
        call = {
            "mask": of_torch.create_block_mask(lambda b, h, q, kv: window(b, h, q + 20, kv), 1, 1, q_len, S, device)
        }
    elif form == "nothing":
        visible, call = visible & False, {"mask": lambda b, h, q, kv: q < 0, "q_offset": 0}
    score = lambda s, b, h, q, kv: s * (1 + h)  # noqa: E731
    want, want_lse, most = _formula(q, k, v, score, visible)
    if form == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        call["layout"], want = "bshd", want.transpose(1, 2)
    out, lse, greatest = flexmasks.attention(q, k, v, score=score, return_lse=True, return_max=True, **call)
    assert _error(out, want) < bound
    assert _error(lse, want_lse) < 5 * bound
    assert _error(greatest, most) < 5 * bound
    _, alone = flexmasks.attention(q, k, v, score=score, return_max=True, **call)
    assert torch.equal(alone, greatest)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_full", [False, True])
def test_greatest_scores_in_given_blocks(is_full: bool, device: str) -> None:
    """Blocks that are not listed hide their pairs, and full ones show all, whatever the mask's function says."""
    q, k, v = torch.randn(3, 2, 2, 256, 64, device=device)
    columns = torch.tensor([[1], [0]]), torch.tensor([[0], [1]])  # of each row of blocks, by batch element
    listed = torch.stack([torch.cat([c, 1 - c], 1) for c in columns])[:, None].to(device, torch.int32)
    ones = torch.ones(2, 1, 2, dtype=torch.int32, device=device)
    lists = (ones * 0, listed, ones, listed) if is_full else (ones, listed)
    function = (lambda b, h, q, kv: kv < 0) if is_full else (lambda b, h, q, kv: kv % 3 > 0)
    made: Any = of_torch.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=function, seq_lengths=(256, 256))
    visible = torch.zeros(2, 1, 256, 256, dtype=torch.bool, device=device)
    for b, column in enumerate(columns):
        for row in range(2):
            start = int(column[row]) * 128
            visible[b, 0, row * 128 : row * 128 + 128, start : start + 128] = True
    visible &= torch.ones_like(visible) if is_full else (torch.arange(256, device=device) % 3 > 0)
    want, want_lse, most = _formula(q, k, v, None, visible)
    for call in ({"mask": made}, {"block_mask": made}):
        out, lse, greatest = flexmasks.attention(q, k, v, return_lse=True, return_max=True, **call)
        bound = 2e-2 if device == "cuda" else 2e-5  # kernels for GPUs may multiply in TF32
        assert _error(out, want) < bound
        assert _error(lse, want_lse) < 5 * bound
        assert _error(greatest, most) < 5 * bound


def test_errors_name_the_call() -> None:
    q = torch.randn(1, 2, 4, 8)
    for arguments, message in (
        ((q, q, q, None, None, "a"), r"^flexmasks.flex.flex_attention: `scale`"),
        ((q, q[:, :1], q), r"^flexmasks.flex.flex_attention: query has 2 heads"),
        ((q, q, q, 3), "score"),
        ((q, q), r"^flexmasks.flex.flex_attention: missing a required argument: 'value'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            flex.flex_attention(*arguments)


@pytest.mark.slow
def test_where_greatest_scores_are_not_given() -> None:
    q = torch.randn(1, 1, 4, 8)
    compiled = torch.compile(lambda q: flexmasks.attention(q, q, q, return_max=True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="AuxRequest"):
        compiled(q)
    nested = torch.nested.nested_tensor([q[0, 0, :2], q[0, 0]], layout=torch.jagged)
    nested = nested.unflatten(-1, (1, 8)).transpose(1, 2)
    with pytest.raises(TypeError, match="jagged"):
        flexmasks.attention(nested, nested, nested, return_max=True)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("queries", [1, S])
def test_keys_in_few_bits_on_a_gpu(dtype: torch.dtype, queries: int) -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in _qkv(2, "cuda", torch.bfloat16))
    q, k, v = q[:, :, :queries], k.to(dtype), v.to(dtype)
    scale = torch.tensor([0.5, 2.0, 1.0, 3.0], device="cuda")
    score_mod = lambda score, b, h, q, kv: score * scale[h]  # noqa: E731
    want = _formula(q, k, v, score_mod, None)[0]
    for call in (flex.flex_attention, torch.compile(flex.flex_attention, fullgraph=True)):
        assert _error(call(q, k, v, score_mod, enable_gqa=True), want) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", _masks())
def test_masks_on_a_gpu(name: str) -> None:
    """Eager and compiled, with gradients, lse and greatest scores; k and v of one batch element."""
    torch._dynamo.reset()
    mask, (q, k, v) = _masks("cuda")[name], _qkv(2, "cuda", torch.bfloat16)
    k, v = (x[:1].detach().requires_grad_() for x in (k, v))
    visible = of_torch.create_mask(mask, B, H, S, S, "cuda")
    arguments: Any = (mask, B, H, S, S)
    _assert_equal(flex.create_block_mask(*arguments), of_torch.create_block_mask(*arguments, "cuda"))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        block_mask = flex.create_block_mask(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
        return flex.flex_attention(q, k, v, None, block_mask, enable_gqa=True, return_aux=flex.AuxRequest(True, False))

    for call in (step, torch.compile(step, fullgraph=True)):
        out, aux = call(q, k, v)
        want, lse, most = _formula(q, k, v, None, visible)
        assert _error(out, want) < 2e-2
        assert _error(aux.lse, lse) < 2e-2
        _check_gradients(out, want, [q, k, v], 2e-2)
    block_mask = flex.create_block_mask(*arguments)
    with torch.no_grad():
        request = flex.AuxRequest(lse=True, max_scores=True)
        _, aux = flex.flex_attention(q, k, v, None, block_mask, enable_gqa=True, return_aux=request)
    assert _error(aux.max_scores, most) < 2e-2
    part = of_torch.create_block_mask(mask, B, H, S, S, "cuda")[:, 1:3]  # slices of lists, and expanded ones
    part.mask_mod = lambda b, h, q, kv: mask(b, h + 1, q, kv)
    want, *_ = _formula(q[:, 1:3], k, v, None, visible[:, 1:3])
    for call in (flex.flex_attention, torch.compile(flex.flex_attention, fullgraph=True)):
        assert _error(call(q[:, 1:3], k, v, block_mask=part), want) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", _scores())
def test_scores_on_a_gpu(name: str) -> None:
    torch._dynamo.reset()
    score_mod, (q, k, v) = _scores("cuda")[name], _qkv(H, "cuda", torch.bfloat16)
    for call in (flex.flex_attention, torch.compile(flex.flex_attention, fullgraph=True)):
        out, (want, *_) = call(q, k, v, score_mod), _formula(q, k, v, score_mod, None)
        assert _error(out, want) < 2e-2 * max(1.0, float(want.detach().abs().max()))
        _check_gradients(out, want, [q, k, v], 4e-2)
