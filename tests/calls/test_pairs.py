"""Tensors of pairs, as scaled_dot_product_attention takes them, as masks and scores of `flexmasks.attention`."""

from __future__ import annotations

import gc
import math
import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flexmasks
from flexmasks.extend import mask_and_score
from flexmasks.spec import pairs as spec_pairs
from flexmasks.spec.pairs import least_visible_blocks

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = 2, 4, 33, 40
HIDING = ["-inf", "lowest", "both"]


def qkv(sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    batch, heads, q_len, kv_len = sizes
    return [
        torch.randn(batch, heads, n, 8, dtype=torch.float64).to(dtype).requires_grad_(grad)
        for n in (q_len, kv_len, kv_len)
    ]


def ours(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, **options: Any) -> Tensor:
    mask, score, _ = mask_and_score(pairs, (*q.shape[:3], k.shape[2]), **options)
    return flexmasks.attention(q, k, v, mask=mask, score=score, q_offset=0)


def exact(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + pairs) v in float64, and 0 where a row is -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    added = torch.where(pairs, 0.0, -math.inf) if pairs.dtype == torch.bool else pairs.double()
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + added
    return scores.softmax(-1).nan_to_num(0) @ v


def drawn(random: random.Random, dtype: torch.dtype) -> Tensor:
    """A tensor that broadcasts to SIZES, of any number of dimensions, values and strides."""
    shape = [random.choice([1, n]) for n in SIZES][random.randrange(5) :]
    shown = torch.rand(shape) < random.choice([0.0, 0.1, 0.6, 0.95, 1.0])
    if shown.ndim > 1 and random.random() < 0.3:
        shown[..., :2, :] = False  # rows that see nothing
    if dtype == torch.bool:
        pairs = shown
    else:
        pairs = torch.randn(shape) if random.random() < 0.5 else torch.zeros(shape)
        lowest = torch.finfo(dtype).min
        hidden = {
            "-inf": -math.inf,
            "lowest": lowest,
            "both": torch.tensor([lowest, -math.inf])[(shown * 7 % 2).long()],
        }
        pairs = torch.where(shown, pairs.to(dtype), torch.as_tensor(hidden[random.choice(HIDING)]).to(dtype))
    how = random.randrange(4)
    if how == 1:  # every second element of a larger tensor
        return torch.stack([pairs, ~pairs if dtype == torch.bool else -pairs], -1)[..., 0]
    if how == 2 and pairs.ndim > 1:
        return pairs.mT.contiguous().mT
    return pairs.expand([SIZES[i - pairs.ndim] for i in range(pairs.ndim)]) if how == 3 and pairs.ndim else pairs


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_shape_dtype_and_stride_is_what_sdpa_reads(dtype: torch.dtype) -> None:
    drawing = random.Random(str(dtype))
    of_q = torch.float32 if dtype == torch.bool else dtype
    within = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}[of_q]
    for _ in range(25):
        pairs, (q, k, v) = drawn(drawing, dtype), qkv(dtype=of_q, grad=True)  # for these nothing is compiled
        what = f"{pairs.dtype} {list(pairs.shape)} {pairs.stride()}"
        out = ours(q, k, v, pairs)
        assert ((out.double() - exact(q, k, v, pairs)).abs() < 2 * within).all(), what
        by_torch = scaled_dot_product_attention(q, k, v, attn_mask=pairs.expand(SIZES))
        torch.testing.assert_close(out, by_torch, rtol=within, atol=within)


@pytest.mark.parametrize("hiding", HIDING)
def test_gradients_of_all_that_learns(hiding: str) -> None:
    values = {"-inf": -math.inf, "lowest": torch.finfo(torch.float64).min}
    for pairs in (torch.randn(4, 33, 40), torch.randn(2, 1, 33, 40).mT.contiguous().mT, torch.randn(1, 1, 40)):
        leaf = pairs.double()
        leaf[..., 20:30] = values["lowest"] if hiding == "lowest" else values["-inf"]
        leaf[..., 30:35] = values["-inf"] if hiding == "-inf" else values["lowest"]
        leaf = leaf.requires_grad_()
        inputs = [*qkv(dtype=torch.float64, grad=True), leaf]
        upstream = torch.randn(2, 4, 33, 8, dtype=torch.float64)
        for got, want in zip(
            torch.autograd.grad(ours(*inputs), inputs, upstream),
            torch.autograd.grad(exact(*inputs), inputs, upstream),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_numbers_near_the_lowest_are_compared_like_all_others() -> None:
    """A row of nothing but the lowest number, and -inf, is the average of the values that are not at -inf."""
    lowest = torch.finfo(torch.float32).min
    pairs = torch.full((33, 40), lowest)
    pairs[1, 10:] = -math.inf
    pairs[2, :5] = 0
    pairs[3, 5] = lowest * 0.9  # by far the greatest
    q, k, v = qkv(grad=True)
    score = mask_and_score(pairs, SIZES).score
    assert score is not None
    shown = score.params["bias"][0, 0, [0, 1, 3]].nan_to_num(neginf=0)
    assert (shown * math.log2(math.e)).isfinite().all()  # as kernels multiply
    out = ours(q, k, v, pairs)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, attn_mask=pairs))
    torch.testing.assert_close(out[:, :, 0], v.mean(2))
    torch.testing.assert_close(out[:, :, 1], v[:, :, :10].mean(2))
    torch.testing.assert_close(out[:, :, 3], v[:, :, 5])
    upstream = torch.randn_like(out)
    got, want = (
        torch.autograd.grad(run(q, k, v, pairs), (q, k, v), upstream) for run in (ours, scaled_dot_product_attention)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_masks_become() -> None:
    shown = torch.ones(33, 40, dtype=torch.bool)

    def made(pairs: Tensor, **options: Any) -> tuple[str | None, bool]:
        mask, score, _ = mask_and_score(pairs, SIZES, **options)
        return None if mask is None else mask.name, score is not None

    assert made(shown) == made(torch.zeros(2, 1, 1, 40)) == made(shown[0].expand(2, -1), of_keys=True) == (None, False)
    assert made(shown.tril()) == made(torch.full((33, 40), -math.inf).triu(1)) == ("causal", False)
    assert made(shown.tril(1)) == ("dense", False)
    padding = shown[0].repeat(2, 1)
    padding[1, 20:] = False
    assert made(padding, of_keys=True) == made(padding[:, None, None]) == ("key_padding", False)
    assert made(torch.zeros(33, 40).masked_fill(~shown.tril(), torch.finfo(torch.float32).min)) == ("causal", False)
    assert made(torch.randn(33, 40)) == (None, True)
    assert made(torch.randn(33, 40).masked_fill(~shown.tril(), -math.inf)) == ("causal", True)
    assert made(torch.full((33, 40), -1e9)) == (None, True)
    # bfloat16's lowest number lies below that of float16, so autocast to float16 hides by it
    row = torch.full((1, 40), torch.finfo(torch.bfloat16).min)
    assert made(row) == (None, True)
    with torch.autocast("cpu", torch.float16):
        assert made(row) == ("dense", False)
        assert made(row.double()) == (None, True)  # autocast leaves float64 as it is


def test_blocks_are_counted() -> None:
    visible = torch.zeros(300, 400, dtype=torch.bool)
    visible[0, 0] = visible[299, 399] = visible[130, 127] = True
    assert mask_and_score(visible, (1, 1, 300, 400)).visible_blocks == pytest.approx(3 / 12)
    assert mask_and_score(visible[:1], (1, 1, 300, 400)).visible_blocks == pytest.approx(1 / 4)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that are looked at."""
    seen: list[Tensor] = []
    look = spec_pairs._looked
    monkeypatch.setattr(spec_pairs, "_looked", lambda table, *rest: seen.append(table) or look(table, *rest))
    return seen


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(300, 500), (256, 256), (129, 1000)]), st.booleans())
def test_some_queries_never_show_more_blocks(seed: int, lengths: tuple[int, int], is_bool: bool) -> None:
    torch.manual_seed(seed)
    sizes, shape = (2, 3, *lengths), [n if torch.rand(()) < 0.5 else 1 for n in (2, 3)]
    shown = (torch.rand(*shape, *((n + 63) // 64 for n in lengths)) < torch.rand(())).repeat_interleave(64, 2)
    visible = shown.repeat_interleave(64, 3)[:, :, : lengths[0], : lengths[1]].contiguous()
    pairs = visible if is_bool else torch.randn(visible.shape).masked_fill(~visible, -math.inf)
    assert least_visible_blocks(pairs, sizes) <= (mask_and_score(pairs, sizes).visible_blocks or 0.0)


def test_some_queries_tell_what_a_look_may_leave_out() -> None:
    sizes, causal = (2, 3, 300, 300), torch.ones(300, 300, dtype=torch.bool).tril()
    for visible in (causal, torch.ones_like(causal), torch.ones(2, 1, 1, 300, dtype=torch.bool)):
        added = torch.zeros(visible.shape).masked_fill(~visible, -math.inf)
        assert least_visible_blocks(visible, sizes) == least_visible_blocks(added, sizes) == 0
    assert least_visible_blocks(torch.ones(300, 300), sizes) == 1
    assert least_visible_blocks(torch.ones(300, 300).masked_fill(~causal, -math.inf), sizes) == pytest.approx(2 / 3)


def test_a_tensor_is_looked_at_once_and_again_when_it_changes(looks: list[Tensor], monkeypatch: Any) -> None:
    monkeypatch.setattr(spec_pairs, "_MOST_COMPARED", -1)  # as tensors that are not small
    pairs = torch.ones(2, 33, 40, dtype=torch.bool)
    q, k, v = qkv(grad=True)
    for _ in range(3):
        assert mask_and_score(pairs[:, None], SIZES).mask is None  # a view made anew, as layers make it
    assert len(looks) == 1
    pairs[0, :, 7] = False
    first = mask_and_score(pairs[:, None], SIZES).mask
    assert first is mask_and_score(pairs[:, None], SIZES).mask
    assert len(looks) == 2
    torch.testing.assert_close(ours(q, k, v, pairs[:, None]), exact(q, k, v, pairs[:, None]).float())
    pairs[1, :, 9] = False
    torch.testing.assert_close(ours(q, k, v, pairs[:, None]), exact(q, k, v, pairs[:, None]).float())
    assert len(looks) == 3
    mask_and_score(pairs[:1, None].expand(2, -1, -1, -1), SIZES)  # other views are other tensors
    for one in (pairs[:1, None], pairs[1:, None]):
        torch.testing.assert_close(ours(q[:1], k[:1], v[:1], one), exact(q[:1], k[:1], v[:1], one).float())
    assert len(looks) == 6
    added = torch.zeros(33, 40).masked_fill(torch.rand(33, 40) < 0.5, -math.inf)
    with torch.inference_mode():
        mask = mask_and_score(added, SIZES).mask
        assert mask is not None
        assert mask is mask_and_score(added, SIZES).mask
    assert len(looks) == 7
    torch.testing.assert_close(flexmasks.attention(q, k, v, mask=mask, q_offset=0), exact(q, k, v, added).float())


def test_equal_tensors_after_each_other_are_one_mask(looks: list[Tensor]) -> None:
    """Layers that each make the mask of their model share its plan."""
    keys = torch.rand(2, 1, 1, 40) < 0.5
    masks = [mask_and_score(keys.clone(), SIZES).mask for _ in range(3)]
    assert masks[0] is masks[1] is masks[2]
    assert len(looks) == 1
    changed = keys.logical_not()
    q, k, v = qkv(grad=True)
    for pairs in (changed, keys):
        torch.testing.assert_close(ours(q, k, v, pairs), exact(q, k, v, pairs).float())
    assert len(looks) == 3


@pytest.mark.parametrize("make", [lambda: torch.rand(33, 40) < 0.5, lambda: torch.randn(33, 40)])
def test_a_tensor_is_not_kept_alive(make: Any) -> None:
    flexmasks.clear_caches()
    pairs = make()
    for view in (pairs, pairs[None]):
        mask_and_score(view, SIZES)
    dies = weakref.ref(pairs)
    del pairs, view
    gc.collect()
    assert dies() is None
    assert flexmasks.cache_info()["plans"].parts["tensors of pairs"].entries == 0


def test_graphs_read_no_values_and_compile_once(looks: list[Tensor]) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(ours, backend=count, fullgraph=True)
    lowest = torch.finfo(torch.float32).min
    some = torch.rand(33, 40) < 0.5
    some[:, 0] = True
    for hidden in (
        torch.zeros(33, 40),
        torch.randn(33, 40).masked_fill(~some, -math.inf),
        torch.full((33, 40), lowest),
    ):
        q, k, v = qkv()
        torch.testing.assert_close(compiled(q, k, v, hidden), exact(q, k, v, hidden).float(), rtol=1e-4, atol=1e-5)
    assert graphs == 1
    for shown in (some, ~some, torch.ones_like(some), torch.zeros_like(some)):
        q, k, v = qkv()
        torch.testing.assert_close(compiled(q, k, v, shown), exact(q, k, v, shown).float(), rtol=1e-4, atol=1e-5)
    assert graphs == 2
    assert not looks


def test_no_values_are_read_under_transforms(looks: list[Tensor]) -> None:
    q, k, v = qkv()
    pairs = torch.stack([torch.rand(33, 40) < 0.5, torch.ones(33, 40, dtype=torch.bool)])
    grad = torch.func.grad(lambda q, p: ours(q, k, v, p).sum())
    for p in pairs:
        want = torch.autograd.grad(exact(q.requires_grad_(), k, v, p).sum(), q)[0]
        torch.testing.assert_close(grad(q.detach(), p), want)
    assert not looks


@pytest.mark.parametrize(
    ("pairs", "options", "error", "words"),
    [
        (
            torch.ones(33, 40, dtype=torch.int64),
            {},
            TypeError,
            r"True for visible keys.* got int64\[33, 40\].*bool\(\)",
        ),
        ([[True]], {}, TypeError, r"a mask that is a tensor must be bool, .* got"),
        (torch.eye(40).to_sparse(), {}, TypeError, "must be bool"),
        (torch.ones(33, 39), {}, ValueError, r"must broadcast to \[2, 4, 33, 40\] \(B, H, Q, KV.*\), got \[33, 39\]"),
        (torch.ones(1, 2, 4, 33, 40), {}, ValueError, "must broadcast"),
        (torch.ones(3, 40), {"of_keys": True}, ValueError, r"must broadcast to \[2, 40\] \(keys of.*got \[3, 40\]"),
        (torch.ones(40), {"of_keys": True}, ValueError, r"got \[40\]"),
    ],
)
def test_errors(pairs: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        mask_and_score(pairs, SIZES, **options)


def test_empty_calls() -> None:
    for sizes in ((0, 4, 33, 40), (2, 4, 0, 40), (2, 4, 33, 0)):
        assert mask_and_score(torch.ones(sizes, dtype=torch.bool), sizes)[:2] == (None, None)
        q, k, v = qkv(sizes)
        assert ours(q, k, v, torch.zeros(sizes)).shape == q.shape
