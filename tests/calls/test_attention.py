"""The call `attention`: rows that see nothing, poison, compositions, decoding, sequences end to end, compilation."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from functions import short_and_campaign
from helpers import (
    DEVICES,
    TOLERANCE,
    check_lse,
    error,
    exact,
    in_campaigns,
    one_in,
    peak_memory,
    skip_unless_flash_takes,
    try_examples,
)
from hypothesis import strategies as st
from oracles import attend
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

import flexmasks
from benchmarks.examples import on_device
from flexmasks import trees
from flexmasks.backends import short, table, waiting
from flexmasks.orders import in_tiles, tile_order
from flexmasks.request import Request
from flexmasks.road import plan_call

BACKENDS = {"cpu": ["reference", "flex"], "cuda": ["reference", "flex", "flex_flash"]}
WHERE = [
    pytest.param(device, backend, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for device, backends in BACKENDS.items()
    for backend in backends
]


def of_dtypes(dtypes: Sequence[torch.dtype], late: torch.dtype) -> pytest.MarkDecorator:
    """Parametrize device, backend and dtype; campaigns compile the kernels of `late` for the CPU, each for seconds.

    Those of the other dtypes are compiled by turns.
    """
    cases = [
        pytest.param(*where.values, dtype, marks=where.marks)
        for where, dtype in itertools.product(WHERE, dtypes)
        if where.values != ("cpu", "flex")
    ]
    of_cpu = [pytest.param("cpu", "flex", dtype, marks=pytest.mark.slow) for dtype in dtypes if dtype != late]
    cases += [*one_in(len(of_cpu), of_cpu), in_campaigns(("cpu", "flex", late))]
    return pytest.mark.parametrize(("device", "backend", "dtype"), cases)


def _skip_unless_possible(backend: str, dtype: torch.dtype) -> None:
    if backend == "flex_flash":
        pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
        if dtype == torch.float32:
            pytest.skip("flex_flash takes half precision only")


def _of_lengths(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v of three batch elements with 200, 70 and no real tokens, seq_lens, and which tokens are real."""
    q, k, v = torch.randn(3, 3, 2, 200, 64, device=device).to(dtype)
    seq_lens = torch.tensor([200, 70, 0], device=device)
    return q, k, v, seq_lens, torch.arange(200, device=device) < seq_lens[:, None]


@of_dtypes(list(TOLERANCE), late=torch.float16)
def test_rows_that_see_nothing(device: str, backend: str, dtype: torch.dtype) -> None:
    _skip_unless_possible(backend, dtype)
    q, k, v, seq_lens, real = _of_lengths(device, dtype)
    hidden = ~real[:, None].expand(3, 2, 200)
    arguments: dict[str, Any] = {"mask": "grouped_tril", "seq_lens": seq_lens, "backend": backend}
    with torch.no_grad():
        out = flexmasks.attention(q, k, v, **arguments)
    assert torch.all(out[hidden] == 0)
    assert out.isfinite().all()
    if (device, backend) == ("cpu", "flex"):
        return
    if backend != "flex_flash":  # which gives no lse
        with torch.no_grad():
            lse = flexmasks.attention(q, k, v, return_lse=True, **arguments)[1]
        assert torch.equal(lse == -math.inf, hidden)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    flexmasks.attention(*leaves, **arguments).backward(torch.randn_like(out))
    for x in leaves:
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert torch.all(x.grad[hidden] == 0)


@of_dtypes(list(TOLERANCE), late=torch.float16)
def test_poison_in_hidden_places_leaves_the_forward_pass_alone(device: str, backend: str, dtype: torch.dtype) -> None:
    _skip_unless_possible(backend, dtype)
    q, k, v, seq_lens, real = _of_lengths(device, dtype)
    arguments: dict[str, Any] = {"mask": "grouped_tril", "seq_lens": seq_lens, "backend": backend}
    clean = flexmasks.attention(q, k, v, **arguments)
    hidden = ~real[:, None].expand(3, 2, 200)
    large = torch.finfo(dtype).max / 4
    for poison in (math.nan, math.inf, -math.inf):
        bad_q, bad_k, bad_v = q.clone(), k.clone(), v.clone()
        bad_q[hidden], bad_k[hidden], bad_v[hidden] = poison, poison, large
        assert torch.equal(flexmasks.attention(bad_q, bad_k, bad_v, **arguments), clean)


@pytest.mark.slow
@of_dtypes([torch.bfloat16, torch.float32], late=torch.float32)
def test_poison_while_decoding(device: str, backend: str, dtype: torch.dtype) -> None:
    """Each batch element has one query and a cache of its own length; what lies past that length is undefined."""
    _skip_unless_possible(backend, dtype)
    q = torch.randn(3, 4, 1, 64, device=device).to(dtype)
    k, v = torch.randn(2, 3, 2, 200, 64, device=device).to(dtype)
    seq_lens = torch.tensor([200, 70, 1], device=device)
    arguments: dict[str, Any] = {"mask": "padding", "kv_lens": seq_lens, "backend": backend}
    clean = flexmasks.attention(q, k, v, **arguments)
    real = torch.arange(200, device=device) < seq_lens[:, None]
    want, _ = attend(*(x.double().cpu() for x in (q, k, v)), real.cpu()[:, None, None])
    assert error(clean, want) < TOLERANCE[dtype]
    hidden = ~real[:, None].expand(3, 2, 200)
    for poison in (math.nan, math.inf, -math.inf):
        k[hidden], v[hidden] = poison, torch.finfo(dtype).max / 4
        assert torch.equal(flexmasks.attention(q, k, v, **arguments), clean)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_poison_in_later_keys_and_sdpa(device: str, dtype: torch.dtype) -> None:
    """In torch's SDPA a poisoned key reaches the rows that see it, and no other row."""
    q, k, v = torch.randn(3, 2, 2, 150, 64, device=device).to(dtype)
    clean = flexmasks.attention(q, k, v, mask="causal")
    k[:, :, 100] = math.nan
    got = flexmasks.attention(q, k, v, mask="causal")
    assert torch.equal(got[:, :, :100], clean[:, :, :100])
    assert got[:, :, 100:].isnan().all()


def test_sdpa_takes_no_later_queries() -> None:
    """It would show them the first keys alone."""
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    want = flexmasks.attention(q, k, v, mask="causal", backend="sdpa")[:, :, 15:]
    later = {"mask": "causal", "q_offset": 15}
    with pytest.raises(ValueError, match="with the first query at the first key"):
        flexmasks.attention(q[:, :, 15:], k, v, backend="sdpa", **later)
    assert torch.allclose(flexmasks.attention(q[:, :, 15:], k, v, backend="reference", **later), want, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_the_reference_survives_poison_everywhere_hidden(device: str, poison: float) -> None:
    q, k, v, seq_lens, real = _of_lengths(device, torch.float32)
    weight = torch.randn_like(q)

    def gradients(*tensors: Tensor, weight: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = flexmasks.attention(*leaves, mask="grouped_tril", seq_lens=seq_lens, backend="reference")
        return [out, *torch.autograd.grad(out, leaves, weight)]

    clean = gradients(q, k, v, weight=weight)
    hidden = ~real[:, None].expand(3, 2, 200)
    for x in (q, k, v, weight):
        x[hidden] = poison
    for got, want in zip(gradients(q, k, v, weight=weight), clean, strict=True):
        assert torch.equal(got, want)


def test_the_reference_shows_poison_that_is_seen() -> None:
    q, k, v = torch.randn(3, 1, 1, 20, 8)
    v[0, 0, 5, 3] = math.nan
    k[0, 0, 9] = math.inf
    out = flexmasks.attention(q, k, v, mask="causal", backend="reference")
    assert out[0, 0, :5].isfinite().all()
    assert out[0, 0, 5:9, 3].isnan().all()
    assert out[0, 0, 9:].isnan().all()


def test_the_reference_shows_poison_that_is_seen_to_transforms() -> None:
    q, k, v = torch.randn(3, 2, 1, 1, 20, 8)
    v[:, 0, 0, 5, 3], v[:, 0, 0, 7, 4] = math.nan, math.inf
    out = torch.func.vmap(lambda *x: flexmasks.attention(*x, mask="causal", backend="reference"))(q, k, v)[:, 0, 0]
    assert torch.equal(out[..., 3].isfinite(), (torch.arange(20) < 5).expand(2, -1))
    assert torch.equal(out[..., 4].isfinite(), (torch.arange(20) < 7).expand(2, -1))
    assert out[..., [0, 1, 2, 5, 6, 7]].isfinite().all()


_POISONED: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda q, k, bias: q[:, :, 0],
    lambda q, k, bias: k[:, :, 0],
    lambda q, k, bias: k[:, :, 60],
    lambda q, k, bias: k[:, :, 60, 3],
    lambda q, k, bias: q,
    lambda q, k, bias: bias[60],
]
_SEEN = [("auto", 2, torch.float32), ("auto", 90, torch.float32), ("auto", 90, torch.bfloat16)]
_MORE_SEEN = [(b, n, t) for b in ("flex", "auto") for n in (1, 2, 90) for t in TOLERANCE if (b, n, t) not in _SEEN]


def _some_see_nothing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv <= q) & (q % 7 != 2)


@pytest.mark.slow
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    ("backend", "q_len", "dtype"),
    [*_SEEN[:1], *one_in(2, _SEEN[1:]), *(pytest.param(*more, marks=pytest.mark.campaign) for more in _MORE_SEEN)],
)
def test_poison_that_is_seen(backend: str, q_len: int, dtype: torch.dtype, needs_grad: bool) -> None:
    """Rows that see a score of NaN or inf are NaN, with the gradients of what they see; other rows are right."""
    if needs_grad and backend == "flex":
        pytest.skip("it has no gradients")
    keys, kv_heads = 150, 1
    at = torch.arange(q_len)[:, None] + keys - q_len
    visible = _some_see_nothing(at, at, at, torch.arange(keys))
    for with_lse, value, poisoned in itertools.product((False, True), (math.nan, math.inf), _POISONED):
        if with_lse and backend == "flex":
            continue
        q, k, v = (torch.randn(2, n, m, 32).to(dtype) for n, m in ((2, q_len), (kv_heads, keys), (kv_heads, keys)))
        bias = torch.zeros(keys)
        poisoned(q, k, bias).fill_(value)
        scores = (q.double() @ k.double().mT * 32**-0.5 + bias).masked_fill(~visible, -math.inf)
        is_bad = (scores.isnan() | (scores == math.inf)).any(-1)
        want = scores.softmax(-1).masked_fill(~visible, 0) @ v.double()
        leaves = [x.requires_grad_(needs_grad) for x in (q, k, v)]
        result = flexmasks.attention(
            *leaves, mask=_some_see_nothing, q_offset=keys - q_len, backend=backend, return_lse=with_lse,
            score=lambda s, b, h, q, kv, bias=bias: s + bias[kv],
        )  # fmt: skip
        out, lse = result if isinstance(result, tuple) else (result, None)
        assert torch.equal(out.isnan().any(-1), is_bad)
        assert torch.equal(out.isnan().all(-1), is_bad)
        assert error(out[~is_bad], want[~is_bad]) < TOLERANCE[dtype]
        assert lse is None or not lse[is_bad].isfinite().any()
        if needs_grad:
            d_q, d_k, d_v = torch.autograd.grad(out.sum(), leaves)
            reached = (is_bad[..., None] & visible).any(1).any(1, keepdim=True)
            assert torch.equal(d_q.isnan().any(-1), is_bad)
            assert d_k.isnan().any(-1)[reached].all()
            assert d_v.isnan().any(-1)[reached].all()


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", one_in(2, [False, True]))
def test_scores_that_make_nan(is_compiled: bool) -> None:
    """Of finite numbers, also with blocks of a user's own."""
    q, k, v = torch.randn(3, 1, 2, 96, 16)
    bias = torch.randn(96)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + torch.log(torch.where(h == 0, bias[kv], 1.0))

    of_mask: Any = lambda b, h, q, kv: (kv <= q) & (q % 7 != 2)  # noqa: E731
    blocks = create_block_mask(of_mask, None, None, 96, 96, device="cpu", BLOCK_SIZE=32)
    call: Any = torch.compile(flexmasks.attention, fullgraph=True) if is_compiled else flexmasks.attention
    at = torch.arange(96)
    visible = of_mask(0, 0, at[:, None], at)
    is_bad = torch.stack([(visible & (bias < 0)).any(-1), torch.zeros(96).bool()])[None]
    scores = (q @ k.mT / 4 + torch.log(torch.stack([bias, torch.ones(96)]))[:, None]).masked_fill(~visible, -math.inf)
    want = scores.softmax(-1).masked_fill(~visible, 0) @ v
    out = call(q, k, v, block_mask=blocks, score=score, backend="flex")
    assert torch.equal(out.isnan().all(-1), is_bad)
    assert torch.equal(out.isnan().any(-1), is_bad)
    assert error(out[~is_bad], want[~is_bad]) < TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("q_len", [2, 90, 150])
def test_poison_that_is_seen_on_a_gpu(backend: str, q_len: int) -> None:
    at = torch.arange(q_len)[:, None] + 150 - q_len
    visible = _some_see_nothing(at, at, at, torch.arange(150))
    for where in ("q", "k"):
        q, k, v = (torch.randn(2, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (q_len, 150, 150))
        (q if where == "q" else k)[0, 0, 1] = math.nan
        want = (q.double() @ k.double().mT).cpu().masked_fill(~visible, -math.inf).logsumexp(-1)
        out, lse = flexmasks.attention(
            q, k, v, mask=_some_see_nothing, q_offset=150 - q_len, backend=backend, return_lse=True
        )
        assert torch.equal(out.isnan().all(-1).cpu(), want.isnan())
        assert torch.equal(lse.isnan().cpu(), want.isnan())
        assert torch.equal(lse.isneginf().cpu(), want.isneginf())


# --- compositions ---


@st.composite
def masks(draw: st.DrawFn, batch: int, length: int) -> flexmasks.Mask:
    name = draw(st.sampled_from(["causal", "sliding_window", "local", "prefix_lm", "document", "padding", "own"]))
    integers = lambda top, size: torch.tensor(draw(st.lists(st.integers(0, top), min_size=size, max_size=size)))  # noqa: E731
    match name:
        case "sliding_window":
            return flexmasks.get_mask(name, window=draw(st.integers(0, length)))
        case "local":
            left, right = draw(st.integers(0, length)), draw(st.integers(0, 40))
            return flexmasks.get_mask(name, left=left, right=torch.tensor(right))
        case "prefix_lm":
            return flexmasks.get_mask(name, prefix_len=integers(length, batch))
        case "document":
            steps = draw(st.integers(1, 200))
            ids = torch.arange(length) // steps
            return flexmasks.get_mask(name, document_ids=ids if draw(st.booleans()) else ids.flip(0))
        case "padding":
            return flexmasks.get_mask(name, kv_lens=integers(1, batch))
        case "own":
            n, r = draw(st.integers(1, 5)), draw(st.integers(0, 4))
            return flexmasks.get_mask(lambda b, h, q, kv: (q + h) % n != (kv + r) % n)
    return flexmasks.get_mask(name)


@st.composite
def calls(draw: st.DrawFn) -> tuple[flexmasks.Mask, tuple[int, int, int, int, int], int | Tensor]:
    batch, kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    q_len, kv_len = draw(st.integers(1, 600)), draw(st.integers(1, 600))
    offset: int | Tensor = draw(st.integers(0, 300))
    if draw(st.booleans()):
        most = max(0, kv_len - q_len)
        offset = torch.tensor(draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch)))
    top = int(offset.max()) if isinstance(offset, Tensor) else offset
    positions = max(kv_len, top + q_len)
    mask = draw(masks(batch, positions))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(masks(batch, positions))
        mask = draw(st.sampled_from([mask & other, mask | other, mask & ~other]))
    return mask, (batch, kv_heads * groups, kv_heads, q_len, kv_len), offset


def _check(call: Any, v_size: int, backend: str) -> None:
    """Compare a call with torch's SDPA, whose mask torch makes of a plain function."""
    mask, (batch, heads, kv_heads, q_len, kv_len), offset = call
    q = torch.randn(batch, heads, q_len, 16)
    k, v = (torch.randn(batch, kv_heads, kv_len, n) for n in (16, v_size))
    starts = offset if isinstance(offset, Tensor) else torch.full((batch,), offset)
    visible = create_mask(lambda b, h, i, j: mask(b, h, i + starts[b], j), batch, heads, q_len, kv_len, device="cpu")
    dense = flexmasks.dense_mask(mask, q_len, kv_len, batch=batch, heads=heads, q_offset=offset)
    assert torch.equal(dense.expand_as(visible), visible)
    want = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=visible, enable_gqa=heads != kv_heads
    )
    want = torch.where(visible.any(-1, keepdim=True), want, 0.0)
    out = flexmasks.attention(q, k, v, mask=mask, q_offset=offset, backend=backend)
    assert error(out, want) < TOLERANCE[torch.float32]


@pytest.mark.slow
@short_and_campaign(30, campaign=500)
def test_compositions_on_the_reference(examples: int) -> None:
    try_examples(examples, _check, calls(), st.sampled_from([1, 16, 24]), st.just("reference"))


@pytest.mark.campaign  # each example compiles a kernel, which takes seconds
def test_compositions_compiled_cpu() -> None:
    try_examples(30, _check, calls(), st.sampled_from([8, 16, 24]), st.just("flex"))


@pytest.mark.slow
def test_a_composition_compiled_cpu() -> None:
    prefixes = flexmasks.get_mask("prefix_lm", prefix_len=torch.tensor([300, 0]))
    documents = flexmasks.get_mask("document", document_ids=torch.arange(400) // 90)
    padding = flexmasks.get_mask("padding", kv_lens=torch.tensor([390, 1]))
    own = flexmasks.get_mask(lambda b, h, q, kv: (q + h) % 3 != (kv + 1) % 3)
    _check(((documents | prefixes) & ~own & padding, (2, 4, 2, 200, 400), torch.tensor([200, 7])), 24, "flex")


# --- values of another head size ---

_SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64).view(4, 1, 1)


class _Kind(NamedTuple):
    """A mask and a score change, and the same as functions of places and of the distances between them."""

    mask: Any
    visible: Callable[[Tensor, Tensor], Tensor]
    score: Any = None
    changed: Callable[[Tensor, Tensor], Tensor] | None = None


_KINDS = {
    "causal": _Kind("causal", lambda q, kv: q >= kv),
    "window": _Kind(
        flexmasks.get_mask("sliding_window", window=30), lambda q, kv: (q >= kv) & (q - kv <= 30),
        flexmasks.get_score("softcap", cap=3.0), lambda scores, distance: 3 * torch.tanh(scores / 3),
    ),
    "documents": _Kind(
        flexmasks.get_mask("document", document_ids=torch.arange(140) // 50), lambda q, kv: q // 50 == kv // 50,
        "alibi", lambda scores, distance: scores - _SLOPES * distance,
    ),
    "function": _Kind(
        lambda b, h, q, kv: (q >= kv) & (kv % 7 != 3) & (q != 5), lambda q, kv: (q >= kv) & (kv % 7 != 3) & (q != 5)
    ),
}  # fmt: skip


_V_SIZES = {(16, 24): "causal", (32, 16): "documents", (192, 128): "causal"}  # and their kind on a CPU


def _of_v_sizes() -> list[Any]:
    """Return devices, backends, kinds and sizes; kernels for a CPU take seconds, so the suite tries one a day."""
    cases = []
    for device, backends in BACKENDS.items():
        for backend in [*(b for b in backends if b != "flex_flash"), "auto", *(["sdpa"] if device == "cuda" else [])]:
            for kind, size in itertools.product(_KINDS if backend != "sdpa" else ["causal"], _V_SIZES):
                marks = [pytest.mark.gpu] if device == "cuda" else []
                cases.append(pytest.param(device, backend, kind, *size, marks=marks))
    by_turns = [("cpu", "flex", kind, *size) for size, kind in _V_SIZES.items()]
    others = [case for case in cases if case.values not in by_turns]
    return [
        *one_in(3, by_turns),
        *(in_campaigns(case) if case.values[:2] == ("cpu", "flex") else case for case in others),
    ]


@pytest.mark.parametrize(("device", "backend", "kind", "size", "v_size"), _of_v_sizes())
def test_values_of_another_head_size(size: int, v_size: int, device: str, backend: str, kind: str) -> None:
    """Output, lse and gradients are those of float64, with grouped heads, and with sinks."""
    mask, visible, score, changed = _KINDS[kind]
    mask = on_device(mask, torch.device(device)) if isinstance(mask, flexmasks.Mask) else mask
    learns = (device, backend) != ("cpu", "flex")
    only_out = backend == "sdpa" or not learns  # these backends have no lse
    dtype = torch.bfloat16 if device == "cuda" and (size, v_size) == (192, 128) else torch.float32
    q = torch.randn(2, 4, 140, size, device=device).to(dtype).requires_grad_(learns)
    kv_heads = 4 if backend == "sdpa" else 2
    k, v = (torch.randn(2, kv_heads, 140, n, device=device).to(dtype).requires_grad_(learns) for n in (size, v_size))
    others = [exact(x) for x in (q, k, v)]
    at_q, at_kv = torch.arange(140)[:, None], torch.arange(140)
    change = None if changed is None else lambda scores: changed(scores, at_q - at_kv)
    want, want_lse = attend(*others, visible(at_q, at_kv), change)
    call: dict[str, Any] = {"mask": mask, "score": score, "backend": backend}
    for _ in range(2):  # the second call repeats the first
        if only_out:
            out = flexmasks.attention(q, k, v, **call)
        else:
            out, lse = flexmasks.attention(q, k, v, return_lse=True, **call)
            check_lse(lse, want_lse, TOLERANCE[dtype])
        assert out.shape == (2, 4, 140, v_size)
        assert error(out, want) < TOLERANCE[dtype]
    if not learns:
        return
    weight, lse_weight = torch.randn_like(out), torch.randn(2, 4, 140, device=device)
    loss, want_loss = (out * weight).sum(), (want * weight.double().cpu()).sum()
    if not only_out:
        seen = ~want_lse.isinf()
        loss = loss + (lse * lse_weight)[seen.to(device)].sum()
        want_loss = want_loss + (want_lse * lse_weight.double().cpu())[seen].sum()
    expected = torch.autograd.grad(want_loss, others, retain_graph=True)
    for got, exactly, x in zip(torch.autograd.grad(loss, (q, k, v)), expected, (q, k, v), strict=True):
        assert got.shape == x.shape
        assert error(got, exactly) < 2 * TOLERANCE[dtype]
    if only_out:
        return
    sinks = torch.randn(4, device=device)
    logits = sinks.double().cpu()[:, None]
    out = flexmasks.attention(q, k, v, sink_logits=sinks, **call)
    assert error(out, want * torch.sigmoid(want_lse - logits)[..., None]) < TOLERANCE[dtype]


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len", [1, 200])
def test_values_that_are_a_part_of_the_keys(q_len: int, device: str) -> None:
    """As in multi-head latent attention, whose cache holds the values as the first numbers of the keys."""
    q, k = torch.randn(2, 8, q_len, 48, device=device), torch.randn(2, 1, 200, 48, device=device, requires_grad=True)
    same = exact(k)
    visible = torch.ones(q_len, 200, dtype=torch.bool).tril(200 - q_len)
    want, _ = attend(q.double().cpu(), same, same[..., :32], visible)
    call: dict[str, Any] = {"mask": "causal", "q_offset": 200 - q_len}
    out = flexmasks.attention(q, k, k[..., :32], **call)
    with torch.no_grad():
        for got in (out, flexmasks.attention(q, k, k[..., :32], **call)):
            assert error(got, want) < TOLERANCE[torch.float32]
    weight = torch.randn_like(out)
    (got_k,) = torch.autograd.grad(out, k, weight)
    (want_k,) = torch.autograd.grad(want, same, weight.double().cpu())
    assert error(got_k, want_k) < 2 * TOLERANCE[torch.float32]


@pytest.mark.usefixtures("quick_kernels")
def test_calls_that_differ_in_the_head_size_of_v_alone() -> None:
    """Neither a kept call nor a kept failure of one is another's."""
    q, k = torch.randn(2, 1, 2, 90, 16)
    kinds = set()
    for v_size in (16, 8, 24, 16):
        v = torch.randn(1, 2, 90, v_size)
        want, _ = attend(*(x.double() for x in (q, k, v)), torch.ones(90, 90, dtype=torch.bool).tril())
        assert error(flexmasks.attention(q, k, v, mask="causal"), want) < TOLERANCE[torch.float32]
        kinds.add(plan_call(q, k, v, Request("causal")).call.outcome_key)
    assert len(kinds) == 3


# --- calls ---


def test_nothing_is_needed() -> None:
    q, k, v = torch.randn(3, 2, 3, 50, 16)
    assert torch.allclose(flexmasks.attention(q, k, v), F.scaled_dot_product_attention(q, k, v), atol=1e-6)
    assert torch.allclose(
        flexmasks.attention(q, k, v, scale=0.3), F.scaled_dot_product_attention(q, k, v, scale=0.3), atol=1e-6
    )


@pytest.mark.parametrize("device", DEVICES)
def test_lse_and_its_gradient(device: str) -> None:
    q, k, v = (torch.randn(2, 2, 150, n, device=device, requires_grad=True) for n in (32, 32, 48))
    others = [exact(x) for x in (q, k, v)]
    mask = flexmasks.get_mask("sliding_window", window=20)
    out, lse = flexmasks.attention(q, k, v, mask=mask, return_lse=True)
    want, want_lse = attend(*others, flexmasks.dense_mask(mask, 150))
    assert lse.dtype == torch.float32
    check_lse(lse, want_lse, TOLERANCE[torch.float32])
    weight = torch.randn_like(lse)
    ((lse * weight).sum() + out.sum()).backward()
    ((want_lse * weight.double().cpu()).sum() + want.sum()).backward()
    for x, y in zip((q, k, v), others, strict=True):
        assert error(x.grad, y.grad) < 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_decoding_step_by_step_equals_the_whole(device: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 40, 32, device=device)
    with torch.no_grad():
        whole = flexmasks.attention(q, k, v, mask="sliding_window", window=7, backend="reference")
        graphs = 0
        for step in range(30, 40):
            part = flexmasks.attention(q[:, :, step : step + 1], k, v, mask="sliding_window", window=7, q_offset=step)
            assert torch.allclose(part, whole[:, :, step : step + 1], atol=1e-5)
            graphs = graphs or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs  # later steps compile nothing


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mask", "params"),
    one_in(3, [("causal", {}), ("sliding_window", {"window": 30}), ("sink_window", {"window": 20, "sinks": 3})]),
)
def test_a_prefill_in_chunks_equals_the_whole(device: str, mask: str, params: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 2, 2, 150, 32, device=device)
    with torch.no_grad():
        parts = [
            flexmasks.attention(q[:, :, i : i + 50], k, v, mask=mask, q_offset=i, **params) for i in range(0, 150, 50)
        ]
    want, _ = attend(*(exact(x) for x in (q, k, v)), flexmasks.dense_mask(mask, 150, **params))
    assert error(torch.cat(parts, 2), want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_with_room_and_batch_elements_of_different_lengths(device: str) -> None:
    """Each batch element decodes at its own position; what the cache holds past that position is undefined."""
    lengths = [40, 7, 120]
    q = torch.randn(3, 4, 2, 32, device=device)
    k, v = torch.randn(2, 3, 2, 128, 32, device=device)
    for n, length in enumerate(lengths):
        k[n, :, length + 2 :] = math.nan
    got = flexmasks.attention(q, k, v, mask="causal", q_offset=torch.tensor(lengths, device=device))
    for n, length in enumerate(lengths):
        real_q, real_k, real_v = q[n : n + 1], k[n : n + 1, :, : length + 2], v[n : n + 1, :, : length + 2]
        visible = torch.ones(2, length + 2, dtype=torch.bool).tril(length)
        want, _ = attend(real_q.double().cpu(), real_k.double().cpu(), real_v.double().cpu(), visible)
        assert error(got[n : n + 1], want) < TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_a_learned_bias_stays_fused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's default blocks would need more shared memory at these sizes than an H200 has."""
    q, k, v = (torch.randn(1, 4, 600, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    table = torch.randn(4, 1199, device="cuda", requires_grad=True)
    weight = torch.randn_like(q)

    def gradients(backend: str) -> list[Tensor]:
        out = flexmasks.attention(q, k, v, mask="causal", score="relative_bias", table=table, backend=backend)
        return [out, *torch.autograd.grad(out, (q, k, v, table), weight)]

    want = gradients("reference")
    monkeypatch.setattr("flexmasks.backends.reference.attend", None)
    for got, expected in zip(gradients("auto"), want, strict=True):
        assert error(got, expected.double().cpu()) < 2 * TOLERANCE[torch.bfloat16]


# The lengths of each sequence's queries and keys, and the position of its first query.
_VARLEN = {
    "itself": ((5, 130, 0, 40), None, 0),
    "other keys": ((5, 130, 0, 40), (30, 0, 7, 200), 0),
    "ends aligned": ((5, 130, 0, 40, 1), (5, 200, 7, 170, 90), "ends"),
    "an int": ((60, 9), (100, 80), 25),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", _VARLEN)
def test_varlen(case: str, dtype: torch.dtype, device: str) -> None:
    """Compare with each sequence alone in float64: grouped heads, gradients, lse, a score, tokens past the end."""
    lengths, keys, start = _VARLEN[case]
    keys = lengths if keys is None else keys
    rest = 0 if case == "ends aligned" else 3
    q = torch.randn(sum(lengths) + rest, 4, 32).to(device, dtype).requires_grad_()
    k, v = (torch.randn(sum(keys) + rest, 2, n).to(device, dtype).requires_grad_() for n in (32, 16))
    offsets, kv_offsets = (torch.tensor([0, *n], device=device).cumsum(0) for n in (lengths, keys))
    starts = torch.tensor(keys) - torch.tensor(lengths) if start == "ends" else torch.tensor([start] * len(lengths))
    upstream, lse_upstream = torch.randn_like(q)[..., :16], torch.randn(4, len(q), device=device)
    others = [exact(x) for x in (q, k, v)]
    out, lse = flexmasks.varlen_attention(
        q, k, v, offsets, None if keys is lengths else kv_offsets, mask="sliding_window", window=60, score="softcap",
        cap=3.0, q_offset=starts.to(device) if start == "ends" else start, return_lse=True,
    )  # fmt: skip
    assert out.shape == (len(q), 4, 16)
    assert lse.shape == (4, len(q))
    want, want_lse = torch.zeros_like(others[0][..., :16]), torch.full((4, len(q)), -math.inf, dtype=torch.float64)
    for i, first in enumerate(starts.tolist()):
        (a, b), (c, d) = offsets[i : i + 2].tolist(), kv_offsets[i : i + 2].tolist()
        if a == b or c == d:
            continue
        distance = torch.arange(b - a)[:, None] + first - torch.arange(d - c)
        visible = (distance >= 0) & (distance <= 60)
        own = [others[0][a:b], others[1][c:d].repeat_interleave(2, 1), others[2][c:d].repeat_interleave(2, 1)]
        one, one_lse = attend(*(x.transpose(0, 1)[None] for x in own), visible, lambda s: 3 * torch.tanh(s / 3))
        places = torch.arange(a, b)
        want = want.index_put((places,), one[0].transpose(0, 1))
        want_lse = want_lse.index_put((torch.arange(4)[:, None], places), one_lse[0])
    tolerance = 1e-9 if dtype == torch.float64 else TOLERANCE[dtype]
    seen = ~want_lse.isinf()
    assert error(out, want) < tolerance
    check_lse(lse, want_lse, tolerance)
    loss = (out * upstream).sum() + (lse * lse_upstream)[seen.to(device)].sum()
    want_loss = (want * upstream.double().cpu()).sum() + (want_lse * lse_upstream.double().cpu())[seen].sum()
    expected = torch.autograd.grad(want_loss, others)
    for got, exactly in zip(torch.autograd.grad(loss, (q, k, v)), expected, strict=True):
        assert error(got, exactly) < 2 * tolerance


@pytest.mark.slow
def test_varlen_is_attention_with_packed() -> None:
    q, k, v = torch.randn(3, 90, 4, 32)
    lens = torch.tensor([20, 50])
    sinks = torch.randn(4)
    out = flexmasks.varlen_attention(
        q, k, v, [0, 40, 90], mask="grouped_tril", seq_lens=lens, sink_logits=sinks, score="alibi"
    )
    score = flexmasks.packed(flexmasks.get_score("alibi"), [0, 40, 90])
    mask = flexmasks.packed(flexmasks.get_mask("grouped_tril", seq_lens=lens), [0, 40, 90])
    packed_qkv = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = flexmasks.attention(*packed_qkv, mask=mask, sink_logits=sinks, score=score)
    assert torch.allclose(out, want[0].transpose(0, 1), atol=1e-6)
    call = lambda x, b="auto": flexmasks.varlen_attention(x, k, v, [0, 40, 90], mask="causal", backend=b) * 2  # noqa: E731
    assert torch.allclose(torch.compile(call, backend="aot_eager")(q), call(q, "reference"), atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": torch.zeros(1, 4, 9, 16)}, "`q` must be a tensor [total, H, D], got float32[1, 4, 9, 16] on cpu"),
        ({"k": None}, "`k` must be a tensor [total, H, D], got NoneType"),
        (
            {"offsets": [0.0, 9.0]},
            "`offsets` must be int[N + 1] on cpu, the starts of N sequences and the end of the last",
        ),
        (
            {"offsets": 9},
            "`offsets` must be int[N + 1] on cpu, the starts of N sequences and the end of the last, got 9",
        ),
        ({"offsets": [0]}, "`offsets` must be int[N + 1]"),
        ({"offsets": [0, 3, 2, 9]}, "`offsets` must rise from 0 to at most the length 9, got 0, 3, 2, 9"),
        *(
            (
                {"kv_offsets": kv_offsets, **more},
                f"varlen_attention: `offsets` has 2 sequences, `kv_offsets` has {count}",
            )
            for kv_offsets, count in (([0, 9], 1), ([0, 4, 6, 9], 3))
            for more in ({}, {"mask": "causal"}, {"q_offset": "last"}, {"q_offset": "first"}, {"q_offset": [0, 0]})
        ),
        ({"kv_offsets": "no"}, "`kv_offsets` must be int[N + 1]"),
        ({"q_offset": torch.zeros(3, dtype=torch.int64)}, "an integer tensor [B] = [2] on cpu, got int64[3]"),
        ({"k": torch.zeros(12, 4, 16)}, "q has 9 tokens and k 12: pass `kv_offsets`"),
        ({"q_offset": -1}, "`q_offset` must be an int from 0 to 2**31 - 1"),
        ({"sink_logits": torch.zeros(3)}, "`sink_logits` must be a floating tensor [H] = [4]"),
        ({"mask": "grouped_tril", "seq_lens": [1, 2, 3]}, "`seq_lens` must be int[B] in 0..S (here B=2, S=7)"),
    ],
)
def test_varlen_says_what_does_not_fit(wrong: dict[str, Any], message: str) -> None:
    x = torch.randn(9, 4, 16)
    arguments: dict[str, Any] = {"q": x, "k": x, "v": x, "offsets": [0, 2, 9], **wrong}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        flexmasks.varlen_attention(**arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
def test_inside_a_users_compile(device: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 150, 32, device=device)
    ids = torch.arange(150, device=device) // 40
    mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    made = flexmasks.block_mask(mask, 150)

    def model(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
        score = ["alibi", "softcap"]
        return flexmasks.attention(q * 2, k, v, block_mask=made, score=score, cap=5.0, backend=backend) + 1

    with torch.no_grad():
        got = torch.compile(model, fullgraph=True)(q, k, v)
        assert torch.allclose(got, model(q, k, v, "reference"), atol=1e-5)
        theirs = create_block_mask(mask, None, None, 150, 150, device=device)
        want, _ = attend(*(exact(x) for x in (q, k, v)), flexmasks.dense_mask(mask, 150).cpu())
        assert error(flexmasks.attention(q, k, v, block_mask=theirs), want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_inside_a_users_compile(device: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 150, 32, device=device)
    made = flexmasks.block_mask("sliding_window", 150, window=20, device=device)
    projection = torch.nn.Linear(64, 8, device=device)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flexmasks.attention(torch.tanh(q), k, v, block_mask=made)
        return projection(out.transpose(1, 2).flatten(2)).relu()

    def gradients(call: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return [*torch.autograd.grad(call(*leaves).sum(), leaves)]

    backend = "aot_eager" if device == "cpu" else "inductor"  # on a CPU no kernel of flexmasks has gradients
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for got, want in zip(gradients(compiled), gradients(model), strict=True):
        assert torch.allclose(got, want, atol=1e-4)


def test_inside_compile_bad_block_masks_are_named() -> None:
    """Torch's kernel would end the process for some of these block masks."""
    q, k, v = torch.randn(3, 2, 2, 150, 32)
    made = flexmasks.block_mask("grouped_tril", 150, seq_lens=torch.tensor([150, 3, 7]))
    call = torch.compile(lambda q, k, v, **more: flexmasks.attention(q, k, v, **more), fullgraph=True)
    with torch.no_grad():
        with pytest.raises(Exception, match=r"`block_mask` was made for"):
            call(q, k, v, block_mask=made)
        assert torch.allclose(call(q, k, v), F.scaled_dot_product_attention(q, k, v), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "length"),
    [*one_in(2, [(8, 8), (16, 40)]), *(pytest.param(*n, marks=pytest.mark.campaign) for n in ((8, 40), (16, 24)))],
)
def test_what_lies_behind_the_keys_of_small_heads(size: int, length: int) -> None:
    """torch's kernel reads and writes whole tiles there, on CPUs without AVX-512."""
    q, *rest = torch.randn(3, 1, 2, length + 8, size)
    for x in rest:
        x[:, :, length:] = 1e30
    q, k, v = (x[:, :, :length] for x in (q, *rest))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for scale in (None, size**-0.5):
        for _ in range(3):
            got = flexmasks.attention(q, k, v, mask="causal", scale=scale, backend="flex")
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx_with_fake_tensors_is_refused(mode: str) -> None:
    """Calls of fake tensors compute nothing, which no graph may hold."""
    tensors = [torch.randn(1, 2, 40, 16) for _ in range(3)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask="causal")

    with pytest.raises(RuntimeError, match="make_fx cannot hold it with fake tensors"):
        make_fx(call, tracing_mode=mode)(*tensors)
    graph, others = make_fx(call)(*tensors), [torch.randn(1, 2, 40, 16) for _ in range(3)]
    torch.testing.assert_close(graph(*others), call(*others))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8,), pytest.param((8, 16, 32), marks=pytest.mark.campaign)])
def test_small_heads_of_several_sizes_inside_compile(sizes: tuple[int, ...]) -> None:
    """In the suite the first size is symbolic at once, as later ones are."""
    made = flexmasks.block_mask("causal", 40)
    call = torch.compile(lambda q, k, v: flexmasks.attention(q, k, v, block_mask=made, backend="flex"), fullgraph=True)
    for size in sizes:
        q, k, v = torch.randn(3, 1, 2, 40, size).unbind()
        if len(sizes) == 1:
            for x in (q, k, v):
                torch._dynamo.maybe_mark_dynamic(x, 3)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(call(q, k, v), want)


@pytest.mark.slow
def test_inside_compile_what_only_a_score_learns_gets_its_gradient() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    slopes = torch.rand(2, requires_grad=True)
    made = flexmasks.block_mask("causal", 40)
    call = torch.compile(
        lambda q, k, v: flexmasks.attention(q, k, v, block_mask=made, score="alibi", slopes=slopes),
        fullgraph=True,
        backend="aot_eager",
    )
    (got,) = torch.autograd.grad(call(q, k, v).square().sum(), slopes)
    out = flexmasks.attention(q, k, v, mask="causal", score="alibi", slopes=slopes)
    (want,) = torch.autograd.grad(out.square().sum(), slopes)
    assert torch.allclose(got, want, rtol=1e-4)
    with torch.no_grad():
        assert torch.allclose(call(q.requires_grad_(), k, v), out, atol=1e-5)


@pytest.mark.parametrize("name", ["batch", "heads"])
def test_a_block_mask_of_unknown_extent_is_refused(name: str) -> None:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv < (b if name == "batch" else h) * 100 + 50

    keep = torch.ones(3, 200, dtype=torch.bool)
    for build in (flexmasks.block_mask, flexmasks.dense_mask):
        with pytest.raises(ValueError, match=f"pass `{name}`"):
            build(mask, 200)
        assert build(mask, 200, **{name: 3}).shape[name == "heads"] == 3
        with pytest.raises(ValueError, match="pass `batch`"):
            build(lambda b, h, q, kv: keep[b, kv], 200)
        assert build("padding", 200, kv_lens=[3, 4]).shape[0] == 2
        assert build("causal", 200).shape[:2] == (1, 1)


def test_inside_compile_tensors_are_checked() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    made = flexmasks.block_mask("causal", 40)
    call = torch.compile(lambda q, k, v: flexmasks.attention(q, k, v, block_mask=made), fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="same length"):
        call(q, k, v[:, :, :30])


def test_a_block_mask_of_lists_alone_is_honored_by_the_reference() -> None:
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    made = flexmasks.block_mask("full", 256)
    made.full_kv_num_blocks[:] = 1  # the first key block only, for a mask_mod that shows all
    rows = torch.arange(256)[:, None] >= 0
    visible = rows & (torch.arange(256) < 128)
    out = flexmasks.attention(q, k, v, block_mask=made, backend="reference")
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, attn_mask=visible), atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
@short_and_campaign(30, campaign=200)
def test_many_windows_and_many_lengths_in_one_process(examples: int, device: str) -> None:
    """Results are right and never unfused, memory stays flat, and changed tensors compile nothing."""
    q, k, v = torch.randn(3, 2, 2, 210, 16, device=device)
    exactly = [x.double().cpu() for x in (q, k, v)]

    def check(**arguments: Any) -> None:
        with torch.no_grad():
            out = flexmasks.attention(q, k, v, backend="flex", **arguments)
        visible = flexmasks.dense_mask(arguments.pop("mask"), 210, batch=2, **arguments)
        want, _ = attend(*exactly, visible.cpu())
        assert error(out, want) < TOLERANCE[torch.float32]

    start = counters["stats"]["unique_graphs"]
    for window in range(20):
        check(mask="sliding_window", window=window)
    memory = peak_memory()
    for window in range(20, examples):
        check(mask="sliding_window", window=window)
    assert peak_memory() - memory < 32e6
    assert counters["stats"]["unique_graphs"] - start <= 8
    check(mask="grouped_tril", seq_lens=torch.tensor([210, 1], device=device))
    check(mask="sliding_window", window=torch.tensor(3, device=device))
    start, memory = counters["stats"]["unique_graphs"], peak_memory()  # compiling has its own peak
    for n in range(examples):
        check(mask="grouped_tril", seq_lens=torch.tensor([n, 210 - n], device=device))
        check(mask="sliding_window", window=torch.tensor(n, device=device))
    assert counters["stats"]["unique_graphs"] == start
    assert peak_memory() - memory < 32e6


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
def test_one_tensor_as_queries_keys_and_values(device: str) -> None:
    backend = "flex"
    x, y, z = torch.randn(3, 2, 2, 210, 16, device=device)
    graphs = set()
    for q, k, v in ((x, y, z), (x, x, x), (x, y, y), (x, x, y), (x, y, x)):
        others = {t: exact(t) for t in (q, k, v)}
        leaves = {t: t.detach().requires_grad_(device == "cuda") for t in others}
        with torch.set_grad_enabled(device == "cuda"):  # torch's kernel for the CPU has no gradients
            out = flexmasks.attention(leaves[q], leaves[k], leaves[v], mask="causal", backend=backend)
        graphs.add(counters["stats"]["unique_graphs"])
        want = F.scaled_dot_product_attention(others[q], others[k], others[v], is_causal=True)
        assert error(out, want) < TOLERANCE[torch.float32]
        if out.requires_grad:
            out.sum().backward()
            want.sum().backward()
            assert all(error(leaves[t].grad, others[t].grad) < 10 * TOLERANCE[torch.float32] for t in others)
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_cleared_caches_free_the_compiled_code() -> None:
    from flexmasks.backends import flex_kernels as kernels

    q, k, v = torch.randn(3, 1, 2, 100, 16)
    flexmasks.clear_caches()
    gc.collect()
    before = set(vars(kernels))
    with torch.no_grad():
        flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: q - kv == 77, backend="flex")
    (compiled,) = (
        n for n in set(vars(kernels)) - before if n.startswith("__compiled_fn")
    )  # torch stores the compiled code in the module
    alive = weakref.ref(vars(kernels)[compiled])
    flexmasks.clear_caches()
    gc.collect()
    assert not hasattr(kernels, compiled)
    assert alive() is None


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_lists_are_inputs_of_the_kernel_too() -> None:
    q, k, v = torch.randn(3, 2, 2, 130, 16)
    graphs = set()
    for n in (3, 50, 130):
        out = flexmasks.attention(q, k, v, mask="padding", kv_lens=[n, 130], backend="flex")
        graphs.add(counters["stats"]["unique_graphs"])
        want = flexmasks.attention(q, k, v, mask="padding", kv_lens=torch.tensor([n, 130]), backend="reference")
        assert torch.allclose(out, want, atol=1e-5)
    assert len(graphs) == 1


def test_what_prepare_computes_from_a_learned_tensor_is_computed_in_each_call() -> None:
    def prepare(size: Any, *, rate: Tensor) -> dict[str, Any]:
        return {"slope": rate.exp()}

    @flexmasks.register_score(prepare=prepare)
    def decay(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, slope: Tensor) -> Tensor:
        """Scores that fall with distance."""
        return score - slope[h] * (q - kv)

    q, k, v = torch.randn(3, 1, 2, 20, 8)
    rate = torch.zeros(2, requires_grad=True)
    arguments: dict[str, Any] = {"mask": "causal", "score": "decay", "rate": rate}
    with torch.no_grad():
        flexmasks.attention(q, k, v, backend="reference", **arguments)
    gradients = []
    for _ in range(2):
        (gradient,) = torch.autograd.grad(flexmasks.attention(q, k, v, **arguments).sum(), rate)
        gradients.append(gradient)
    assert torch.equal(*gradients)
    assert torch.all(gradients[0] != 0)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_many_lengths_where_torch_cannot_make_them_symbolic() -> None:
    """Use a score that captures a tensor [B, length]: torch compiles a CPU kernel for each length."""
    for length in (100, 103, 109):
        q, k, v = torch.randn(3, 2, 2, length, 16)
        bias = torch.randn(2, length)

        def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, bias: Tensor = bias) -> Tensor:
            return score + bias[b, kv]

        out = flexmasks.attention(q, k, v, mask="causal", score=score, backend="flex")
        want, _ = attend(q, k, v, torch.ones(length, length).tril().bool(), lambda s, t=bias: s + t[:, None, None])
        assert torch.allclose(out, want, atol=1e-5)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("scale", [-0.5, 0, 1e-3])
def test_any_scale(scale: float) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    out = flexmasks.attention(q, k, v, mask="causal", scale=scale)
    assert torch.allclose(out, attend(q, k, v, torch.ones(40, 40).tril().bool(), scale=scale)[0], atol=1e-5)


def test_threads_leave_torchs_switches_alone() -> None:
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = torch.randn(3, 2, 4, 64, 16)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: flexmasks.attention(q, k, v, mask="causal"), range(300)))
    mask = torch.rand(64, 64) > 0.5
    assert F.scaled_dot_product_attention(q, k, v, attn_mask=mask).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_learned_tensors_in_half_precision_sum_their_gradients_in_float32(dtype: torch.dtype) -> None:
    length = 512
    q, k, v = torch.randn(3, 1, 2, length, 16)
    table = (torch.randn(2, 33) * 0.1).to(dtype).requires_grad_()
    slopes = torch.rand(2).to(dtype).requires_grad_()
    arguments: dict[str, Any] = {"mask": "causal", "score": ["relative_bias", "alibi"]}
    weight = torch.randn(1, 2, length, 16)
    out = flexmasks.attention(q, k, v, table=table, slopes=slopes, **arguments)
    got = torch.autograd.grad(out, (table, slopes), weight)
    exactly = [exact(x) for x in (table, slopes)]
    out = flexmasks.attention(
        q.double(), k.double(), v.double(), table=exactly[0], slopes=exactly[1], backend="reference", **arguments
    )
    for x, y in zip(got, torch.autograd.grad(out, exactly, weight.double()), strict=True):
        assert error(x, y) < TOLERANCE[dtype]


@pytest.mark.slow
def test_the_reference_under_torch_func_and_twice() -> None:
    q, k, v = (exact(x) for x in torch.randn(3, 1, 2, 6, 3))
    call = lambda q: flexmasks.attention(q, k, v, mask="causal", backend="reference")  # noqa: E731
    want = torch.autograd.grad(call(q).square().sum(), q)[0]
    assert torch.allclose(torch.func.grad(lambda q: call(q).square().sum())(q), want)
    assert torch.allclose(torch.func.vmap(call)(torch.stack([q, 2 * q]))[1], call(2 * q))
    assert torch.autograd.gradgradcheck(lambda q: flexmasks.attention(q, k, v, mask="causal"), q)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("mask", ["causal", None, lambda b, h, q, kv: q - kv < 5])
def test_vmap_and_forward_derivatives(mask: Any) -> None:
    flexmasks.clear_caches()
    q, k, v = torch.randn(3, 1, 2, 60, 16)
    call = lambda q: flexmasks.attention(q, k, v, mask=mask)  # noqa: E731
    backend = flexmasks.explain(q, k, v, mask=mask).backend
    want = call(q)
    for _ in range(2):
        assert torch.allclose(torch.func.vmap(call)(torch.stack([2 * q, q]))[1], want, atol=1e-5)
        primal, tangent = torch.func.jvp(call, (q,), (v,))
        assert torch.allclose(primal, want, atol=1e-5)
    exactly = [x.double() for x in (q, k, v)]
    visible = flexmasks.dense_mask(mask, 60) if mask is not None else torch.tensor(True)
    scores = lambda q: (q @ exactly[1].mT / 4).masked_fill(~visible, -math.inf)  # noqa: E731
    _, slope = torch.func.jvp(lambda q: scores(q).softmax(-1) @ exactly[2], (exactly[0],), (exactly[2],))
    assert error(tangent, slope) < 1e-5
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, v)
        tangent = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
        assert error(tangent, slope) < 1e-5
    assert flexmasks.explain(q, k, v, mask=mask).backend == backend  # later calls run as before


_READ: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "bias": lambda t: {"score": t},
    "table": lambda t: {"score": "relative_bias", "table": t[:2, :5], "mask": "causal"},
    "lambda": lambda t: {"score": lambda score, b, h, q, kv: score * t[h, 0]},
    "number": lambda t: {"score": "temperature", "temperatures": t[0, :2].exp()},
}


@pytest.mark.parametrize("way", ["jvp", "jacfwd", "dual"])
@pytest.mark.parametrize("name", _READ)
def test_forward_derivatives_of_what_a_score_reads(name: str, way: str) -> None:
    torch.manual_seed(0)
    q, table, tangent = torch.randn(1, 2, 9, 4).double(), torch.randn(9, 9).double(), torch.randn(9, 9).double()
    call = lambda t: torch.cat(  # noqa: E731
        [x.flatten() for x in flexmasks.attention(q * t[0, 0], q, q, return_lse=True, **_READ[name](t))]
    )
    call(table)  # derivatives are not lost in a call that is made again either
    want = (call(table + 1e-6 * tangent) - call(table - 1e-6 * tangent)) / 2e-6
    for _ in range(2):
        if way == "dual":
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(table, tangent)
                got = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
        elif way == "jvp":
            got = torch.func.jvp(call, (table,), (tangent,))[1]
        else:
            got = torch.func.jacfwd(call)(table).flatten(1) @ tangent.flatten()
        assert torch.allclose(got, want, atol=1e-7)


@pytest.mark.slow
def test_a_kernel_is_compiled_outside_of_modes_in_which_nothing_compiles() -> None:
    flexmasks.clear_caches()
    q, k, v = torch.randn(3, 1, 2, 60, 16)
    mask = lambda b, h, q, kv: q - kv < 7  # noqa: E731
    call = functools.partial(flexmasks.attention, q, k, v, mask=mask)
    want = call(backend="reference")
    for _ in range(2):  # before the kernel is compiled, and after
        with torch._dynamo.config.patch(disable=True):
            assert flexmasks.explain(q, k, v, mask=mask).backend == "reference"
            assert torch.allclose(call(), want, atol=1e-5)
        with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="inside a TorchDispatchMode"):
            call()
        with FlopCounterMode(display=False):
            assert torch.allclose(call(backend="reference"), want, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert flexmasks.explain(q.bfloat16(), k, v, mask=mask).backend == "flex"
        negative = torch.complex(q, k).conj().imag
        flexmasks.attention(q, negative, v, mask=mask)
        assert flexmasks.explain(q, k, v, mask=mask).backend == "flex"
        assert torch.allclose(call(backend="flex"), want, atol=1e-5)


def test_a_default_device_elsewhere_changes_nothing() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    want = flexmasks.attention(q, k, v, mask="natten", height=5, width=8, kernel=3, backend="reference")
    flexmasks.clear_caches()
    with torch.device("meta"):
        got = flexmasks.attention(q, k, v, mask="natten", height=5, width=8, kernel=3, backend="reference")
    assert torch.equal(got, want)


@pytest.mark.parametrize("way", ["auto", "short", "decode", "reference", "blocks as data", "pages of trees"])
def test_every_way_runs_under_a_default_device_elsewhere(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "refuses_on_cpu", short.refuses_on_cpu.__wrapped__)  # type: ignore[attr-defined] # small calls
    monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 1 << 36)
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=torch.arange(64) // 20)
    if way == "blocks as data":
        call = lambda: flexmasks.block_mask(mask, 64, block_size=64, as_data=True, device="cpu").to_dense()  # noqa: E731
    elif way == "pages of trees":
        batch = trees.pack([[5, 6, 7], [5, 6, 8, 9]])
        call = lambda: batch.pages(2, room=1).page_table  # noqa: E731
    else:
        q = q[:, :, -2:] if way == "decode" else q
        call = lambda: flexmasks.attention(q, k, v, mask=mask, q_offset="last", backend=way)  # noqa: E731
    want = call()
    flexmasks.clear_caches()
    with torch.device("meta"):
        got = call()
    assert torch.equal(got, want)
    if way == "auto":
        assert "it failed before" not in str(flexmasks.explain(q, k, v, mask=mask, q_offset="last"))


# Without C++ such kernels are counted in test_kernel_counts.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [(100, 333, 77), pytest.param((100, 128, 200, 256, 333, 511, 77, 384), marks=pytest.mark.campaign)]
)
def test_many_lengths_compile_a_bounded_number_of_kernels(lengths: tuple[int, ...]) -> None:
    start = counters["stats"]["unique_graphs"]
    for length in lengths:
        q, k, v = torch.randn(3, 1, 2, length, 16)
        out = flexmasks.attention(q, k, v, mask="prefix_lm", prefix_len=10)
        want, _ = attend(*(x.double() for x in (q, k, v)), flexmasks.dense_mask("prefix_lm", length, prefix_len=10))
        assert error(out, want) < TOLERANCE[torch.float32]
    assert counters["stats"]["unique_graphs"] - start <= min(3, len(lengths) - 1)


@pytest.mark.usefixtures("quick_kernels")
def test_no_grad_and_tensors_that_require_gradients_use_the_kernel() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 2, 130, 16))
    slopes = torch.rand(2, requires_grad=True)
    with torch.no_grad():
        got = flexmasks.attention(q, k, v, mask="causal", score="alibi", slopes=slopes, backend="flex")
        want = flexmasks.attention(q, k, v, mask="causal", score="alibi", slopes=slopes, backend="reference")
    assert torch.allclose(got, want, atol=1e-5)


def test_explain_names_the_backend_and_the_reasons() -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 16)
    text = str(flexmasks.explain(q, k, v, mask="sliding_window", window=4))
    assert text.startswith("backend: flex")
    assert "not here: fa4, flex_flash, cudnn (it runs on CUDA only)" in text
    assert "empty 81, partial 19, full 0" in text
    text = str(flexmasks.explain(q.requires_grad_(), k, v, mask="sliding_window", window=4))
    assert text.startswith("backend: short")
    assert "not flex: torch's compiled flex_attention has no gradients" in text


@pytest.mark.parametrize("score", [None, "alibi"])
@pytest.mark.parametrize("groups", [1, 2])
def test_memory_of_the_reference_is_bounded(score: str | None, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of scores never exceed their bound, and small tiles give the same results and gradients."""
    from flexmasks.backends import tiles

    batch, heads, length = 2, 4, 300
    kv = (heads // groups, length, 8)
    q, k, v = (exact(x) for x in (torch.randn(batch, heads, length, 8), *torch.randn(2, batch, *kv)))
    lens = torch.tensor([300, 45])

    def call() -> list[Tensor]:
        mask = flexmasks.get_mask("grouped_tril", seq_lens=lens) & (lambda b, h, q, kv: (kv // 64 != 1) | (h == 2))
        out, lse = flexmasks.attention(q, k, v, mask=mask, score=score, backend="reference", return_lse=True)
        return [out, lse, *torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v))]

    whole = call()
    sizes = set()
    scores_in = tiles.Tiles._scores_in

    def counted(self: Any, *args: Any) -> Tensor:
        scores = scores_in(self, *args)
        sizes.add(scores.numel())
        return scores

    monkeypatch.setattr(tiles, "_MAX_SCORES", 10_000)
    monkeypatch.setattr(tiles, "_MIN_QUERIES", 8)
    monkeypatch.setattr(tiles.Tiles, "_scores_in", counted)
    for got, want in zip(call(), whole, strict=True):
        assert torch.allclose(got, want)
    assert max(sizes) <= 10_000
    assert len(sizes) > 10


def test_the_reference_keeps_memory_that_grows_with_the_length() -> None:
    """The backward pass needs q, k, v, the output and lse, and nothing else is saved."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 2048, 16))
    saved = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = flexmasks.attention(q, k, v, mask="sliding_window", window=300)
    assert sum(saved) == 4 * q.nbytes + q[..., 0].nbytes
    out.sum().backward()


def _learning(kind: str, learned: Tensor) -> Any:
    """Return a score change that captures `learned`, [H], or a tensor made of it, in a closure or in an object."""
    factor = learned.exp() if "made" in kind else learned
    if "object" in kind:

        class Change:
            def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                return torch.sin(score) * factor[h] - 0.1 * (q - kv)

        return Change()
    return lambda score, b, h, q, kv: torch.sin(score) * factor[h] - 0.1 * (q - kv)


@pytest.mark.parametrize("kind", ["leaf", "made", "object", "object made"])
def test_the_reference_finds_what_a_score_learns(kind: str) -> None:
    q, k, v = (exact(x) for x in torch.randn(3, 2, 2, 30, 8))
    learned = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    score = _learning(kind, learned)
    inputs = (q, k, v, learned)
    out = flexmasks.attention(q, k, v, mask="causal", score=score, backend="reference")
    factor = (learned.exp() if "made" in kind else learned)[:, None, None]
    distance = torch.arange(30)[:, None] - torch.arange(30)
    want, _ = attend(q, k, v, distance >= 0, lambda s: torch.sin(s) * factor - 0.1 * distance)
    weight = torch.randn_like(out)
    for x, y in zip(torch.autograd.grad(out, inputs, weight), torch.autograd.grad(want, inputs, weight), strict=True):
        assert torch.allclose(x, y, atol=1e-10)


def test_second_derivatives_of_the_reference() -> None:
    q, k, v = (exact(x) for x in torch.randn(3, 1, 2, 4, 2))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def call(*tensors: Tensor) -> Any:
        return flexmasks.attention(
            *tensors[:3], mask="causal", score=["softcap", "alibi"], cap=3.0, slopes=tensors[3], return_lse=True
        )

    assert torch.autograd.gradcheck(call, (q, k, v, slopes))
    assert torch.autograd.gradgradcheck(call, (q, k, v, slopes), fast_mode=True)  # along random directions
    (first,) = torch.autograd.grad(call(q, k, v, slopes)[0].square().sum(), q, create_graph=True)
    batched = torch.autograd.grad(first, (k, slopes), torch.eye(first.numel()).view(-1, *first.shape).double()[:5],
                                  is_grads_batched=True)  # fmt: skip
    assert all(x.isfinite().all() for x in batched)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "short"])
def test_second_derivatives_where_inputs_are_made_of_each_other(backend: str) -> None:
    """Keys that are values, or made of the queries, and a bias that is made of them."""
    x, y = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(2))
    visible = torch.ones(6, 6, dtype=torch.bool).tril()

    def inputs(x: Tensor, y: Tensor) -> list[list[Tensor]]:
        bias = x.sum(-1)[:, :, None]
        return [[x, x, x], [x, y, y * 2], [y, x, x[..., :8], bias.detach()], [x, y, y, bias]]

    for q, k, v, *bias in inputs(x, y):
        score = bias[0] if bias else None
        backend = "reference" if bias else backend
        out = flexmasks.attention(q, k, v, mask="causal", score=score, backend=backend)
        want, _ = attend(q, k, v, visible, lambda s, score=score: s if score is None else s + score)
        found = []
        for result in (out, want):
            first = torch.autograd.grad(result.sin().sum(), (x, y), create_graph=True, materialize_grads=True)
            total = torch.stack([g.sin().sum() for g in first]).sum()
            second = torch.autograd.grad(total, (x, y), retain_graph=True, materialize_grads=True)
            found.append([*first, *second])
        for got, wanted in zip(*found, strict=True):
            assert torch.allclose(got, wanted, atol=2e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "mask", "length"),
    [
        *(("cpu", torch.float32, mask, 40) for mask in ("causal", None, "sliding_window")),
        ("cpu", torch.float32, "causal", 300),
        *(
            pytest.param("cuda", dtype, mask, length, marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.bfloat16)
            for mask in ("causal", None, "sliding_window")
            for length in (40, 1000)
        ),
    ],
)
def test_second_derivatives_are_right_or_refused(
    device: str, dtype: torch.dtype, mask: str | None, length: int
) -> None:
    """A backend that has none says so when they are computed, also of a repeated call, and gives the first ones."""
    q, k, v = (torch.randn(1, 2, length, 16, device=device).to(dtype).requires_grad_() for _ in range(3))
    call: dict[str, Any] = {"mask": mask} | ({"window": 9} if mask == "sliding_window" else {})
    want = [exact(x) for x in (q, k, v)]
    out = flexmasks.attention(*want, **call, backend="reference")
    (first,) = torch.autograd.grad(out.square().sum(), want[0], create_graph=True)
    second = torch.autograd.grad(first.square().sum(), want)
    for _ in range(2):
        out = flexmasks.attention(q, k, v, **call)
        backend = flexmasks.explain(q, k, v, **call).backend
        message = f"^flexmasks.attention: backend '{backend[:4]}.*pass backend='reference'"
        if backend in ("flex", "flex_flash"):  # torch compiles no gradients that are to be differentiated
            with pytest.raises(RuntimeError, match=message):
                torch.autograd.grad(out.square().sum(), q, create_graph=True)
            continue
        (got,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        assert error(got, first) < 2 * TOLERANCE[dtype]
        if backend not in ("sdpa", "short", "reference"):
            with pytest.raises(RuntimeError, match=message):
                torch.autograd.grad(got.square().sum(), (q, k, v))
            continue
        results = torch.autograd.grad(got.square().sum(), (q, k, v))
        for x, y in zip(results, second, strict=True):
            assert error(x, y) < 4 * TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:.*context_fn.*")
def test_the_reference_under_selective_checkpointing() -> None:
    """Matrix products that a policy saves may not be overwritten."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_product = op == torch.ops.aten.bmm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask="causal", score="alibi").square().sum()

    tensors = [torch.randn(1, 2, 48, 8, requires_grad=True) for _ in range(3)]
    saving = functools.partial(create_selective_checkpoint_contexts, policy)
    loss = checkpoint(call, *tensors, use_reentrant=False, context_fn=saving)
    got, want = torch.autograd.grad(loss, tensors), torch.autograd.grad(call(*tensors), tensors)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


_PARAMETER = torch.tensor([0.01, -0.02], requires_grad=True)
_IN_CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "documents": lambda q, k, v, ids: flexmasks.attention(q, k, v, mask="document", document_ids=ids),
    "window": lambda q, k, v, ids: flexmasks.attention(q, k, v, mask="sliding_window", window=20),
    "reference": lambda q, k, v, ids: flexmasks.attention(
        q, k, v, mask="document", document_ids=ids, backend="reference"
    ),
    "sdpa": lambda q, k, v, ids: flexmasks.attention(q, k, v, mask="causal", backend="sdpa"),
    "user": lambda q, k, v, ids: flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: (ids[b, q] + kv - q) % 3 < 2),
    "sinks": lambda q, k, v, ids: flexmasks.attention(
        q, k, v, mask="document", document_ids=ids, sink_logits=v[0, :, 0, 0], return_lse=True
    )[0],
    "alibi": lambda q, k, v, ids: flexmasks.attention(q, k, v, mask="causal", score="alibi"),
    "parameter": lambda q, k, v, ids: flexmasks.attention(
        q, k, v, mask=lambda b, h, i, j: torch.tanh(_PARAMETER[h] * (i - j)) < 0.5
    ),
    "decoding": lambda q, k, v, ids: flexmasks.attention(q[:, :, :1], k, v, mask="causal", q_offset=9),
}


@pytest.mark.parametrize(("name", "early_stop"), one_in(2, [(n, e) for e in (True, False) for n in _IN_CHECKPOINTS]))
def test_activation_checkpointing(name: str, early_stop: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A call may be the last of a region, which ends by an error when it is computed again."""
    call = _IN_CHECKPOINTS[name]

    def inner(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return call(q.sin(), k, v, ids)

    def outer(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        once = checkpoint(inner, q, k, v, ids, use_reentrant=False)
        return call(once + q, k, v, ids)

    for _ in range(3):
        tensors = [torch.randn(2, 2, 150, 8, requires_grad=True) for _ in range(3)]
        ids = torch.randint(0, 5, (2, 150)).sort(1).values
        with set_checkpoint_early_stop(early_stop):
            got = checkpoint(outer, *tensors, ids, use_reentrant=False)
            got = torch.autograd.grad(got.square().sum(), tensors)
        want = torch.autograd.grad(outer(*tensors, ids).square().sum(), tensors)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)
    assert not [r for r in caplog.records if r.name == "flexmasks"]


def _slots(x: Tensor) -> Tensor:
    """Return heads of a sequence as a paged cache whose pages hold 150 tokens."""
    return x.transpose(1, 2).contiguous()


_SELECTED = {
    **_IN_CHECKPOINTS,
    "offset": lambda q, k, v, ids: flexmasks.attention(q[:, :, :99], k, v, mask="causal", q_offset=ids[:, -1] + 1),
    "made inside": lambda q, k, v, ids: flexmasks.attention(q, k, v, mask="document", document_ids=ids + 1),
    "grouped_tril": lambda q, k, v, ids: flexmasks.attention(q, k, v, mask="grouped_tril", seq_lens=ids[:, -1] * 20),
    "natten": lambda q, k, v, ids: in_tiles(
        flexmasks.attention, q, k, v, order=tile_order((15, 10), (5, 5)), mask="natten", height=15, width=10,
        kernel=(5, 3),
    ),
    "pages": lambda q, k, v, ids: flexmasks.paged_attention(
        q[:, :, -20:], _slots(k), _slots(v), ids.new_tensor([[1], [0]]), ids[:, -1] + 140, mask="causal"
    ),
    "mixed": lambda q, k, v, ids: flexmasks.varlen_attention(
        q[0, :, :20].transpose(0, 1), _slots(k), _slots(v), [0, 1, 20], mask="causal",
        page_table=ids.new_tensor([[1], [0]]), kv_lens=ids[:, -1] + 140,
    ),
    "varlen": lambda q, k, v, ids: flexmasks.varlen_attention(
        *(x[0].transpose(0, 1) for x in (q, k, v)), torch.stack([ids[0, 0], ids[0, -1] * 20]), mask="causal"
    ),
    "softmax": lambda q, k, v, ids: flexmasks.masked_softmax(
        q @ k.mT, mask="grouped_tril", seq_lens=ids[:, -1] * 20
    ) @ v,
}  # fmt: skip


@pytest.mark.usefixtures("cold")
@pytest.mark.filterwarnings("ignore:.*context_fn.*")
@pytest.mark.parametrize(
    ("name", "saved"),
    [
        *one_in(2, [(name, saved) for saved in ("all", "products and attention") for name in _SELECTED]),
        # What computes all again is tried for other calls in test_activation_checkpointing.
        *(in_campaigns((name, "none")) if name in _IN_CHECKPOINTS else (name, "none") for name in _SELECTED),
    ],
)
def test_selective_activation_checkpointing(name: str, saved: str, caplog: pytest.LogCaptureFixture) -> None:
    """It counts operations and keeps results: it sees none of a plan, and nothing that it keeps is overwritten."""
    seen = set()

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        seen.add(str(op))
        is_product = any(part in str(op) for part in ("mm", "attention"))
        is_saved = saved == "all" or (saved == "products and attention" and is_product)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def call(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return _SELECTED[name](q.sin(), k, v, ids).square()

    saving = functools.partial(create_selective_checkpoint_contexts, policy)
    for _ in range(3):
        tensors = [torch.randn(2, 2, 150, 8, requires_grad=True) for _ in range(3)]
        ids = torch.randint(0, 5, (2, 150)).sort(1).values
        got = checkpoint(call, *tensors, ids, use_reentrant=False, context_fn=saving)
        got = torch.autograd.grad(got.sum(), tensors)
        want = torch.autograd.grad(call(*tensors, ids).sum(), tensors)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)
    assert not [r for r in caplog.records if r.name == "flexmasks"]
    assert "aten.sin.default" in seen
    assert any("attention" in op for op in seen) == (name in ("sdpa", "decoding"))  # which users name in their policies


@pytest.mark.usefixtures("cold")
@pytest.mark.filterwarnings("ignore:.*context_fn.*")
@pytest.mark.parametrize("name", ["documents", "grouped", "alibi"])
def test_selective_checkpointing_inside_other_modes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the modes of the checkpoint see nothing of a call."""
    monkeypatch.setattr("torch.fx.traceback.current_meta", {})  # where torch leaves what it notes under make_fx

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name == "grouped":
            return flexmasks.attention(q.sin(), k[:, :1], v[:, :1], mask="causal")
        return _IN_CHECKPOINTS[name](q.sin(), k, v, ids)

    def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        saving = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(call, q, k, v, use_reentrant=False, context_fn=saving)  # type: ignore[no-any-return]

    def tensors() -> list[Tensor]:
        return [torch.randn(2, 2, 150, 8, requires_grad=True) for _ in range(3)]

    ids = torch.randint(0, 5, (2, 150)).sort(1).values
    inputs = tensors()
    out = region(*inputs)
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(out.sum(), inputs)
    want = torch.autograd.grad(call(*inputs).sum(), inputs)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    if name != "documents":  # whose ids are real
        with FakeTensorMode():
            fakes = torch.autograd.grad(region(*(inputs := tensors())).sum(), inputs)
        assert all(isinstance(x, FakeTensor) for x in fakes)
    if name == "grouped":
        graph, others = make_fx(region)(*tensors()), tensors()
        torch.testing.assert_close(graph(*others), region(*others))


def test_gradients_of_the_reference_in_a_batch() -> None:
    q, k, v = (exact(x) for x in torch.randn(3, 1, 2, 20, 4))
    out = flexmasks.attention(q, k, v, mask="sliding_window", window=3)
    weights = torch.randn(3, *out.shape, dtype=torch.float64)
    batched = torch.autograd.grad(out, (q, k, v), weights, is_grads_batched=True, retain_graph=True)
    for n, weight in enumerate(weights):
        for x, y in zip(batched, torch.autograd.grad(out, (q, k, v), weight, retain_graph=True), strict=True):
            assert torch.allclose(x[n], y)


_UNUSUAL_SCORES: dict[str, Any] = {
    "constant": lambda s, b, h, q, kv: 0.1 * (q - kv).double(),
    "unchanged": lambda s, b, h, q, kv: s,
    "hides": lambda s, b, h, q, kv: torch.where(q - kv < 3, s, -math.inf),
    "NaN where hidden": lambda s, b, h, q, kv: s + torch.log((q - kv).double()),
}


@pytest.mark.parametrize("score", _UNUSUAL_SCORES)
def test_unusual_scores_on_the_reference(score: str) -> None:
    q, k, v = (exact(x) for x in torch.randn(3, 1, 2, 20, 4))
    change, at, to = _UNUSUAL_SCORES[score], torch.arange(20)[:, None], torch.arange(20)
    out = flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: q > kv, score=change, backend="reference")
    visible = (at > to) & ((at - to < 3) | (score != "hides"))
    want, _ = attend(q, k, v, visible, lambda s: torch.where(visible, change(s, 0, 0, at, to), 0.0))
    assert torch.allclose(out, want)
    gradients = (torch.autograd.grad(x.sum(), (q, k, v), materialize_grads=True) for x in (out, want))
    for got, exactly in zip(*gradients, strict=True):
        assert torch.allclose(got, exactly)


@pytest.mark.usefixtures("quick_kernels")
def test_explain_says_whether_a_call_compiles() -> None:
    flexmasks.clear_caches()
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    arguments: dict[str, Any] = {"mask": "sliding_window", "window": 4}
    assert flexmasks.explain(q, k, v, **arguments).compiles.startswith("yes")
    flexmasks.attention(q, k, v, **arguments)
    explanation = flexmasks.explain(q, k, v, **arguments)
    assert explanation.compiles.startswith("no")
    assert flexmasks.explain(q[:, :, :30], k, v, q_offset="last", **arguments).compiles.startswith("probably")
    other = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert flexmasks.explain(other, k, v, **arguments).compiles.startswith("no")  # a CPU copies it into that layout
    with torch.autocast("cpu", torch.bfloat16):
        assert flexmasks.explain(q, k, v, **arguments).compiles.startswith("yes")
    assert flexmasks.explain(q.bfloat16(), k.bfloat16(), v.bfloat16(), **arguments).compiles.startswith("yes")
    assert flexmasks.explain(q, k, v).compiles.startswith("no")
    assert (
        flexmasks.explain(q, k, v, sink_logits=torch.zeros(2)).backend == "reference"
    )  # a call with sinks needs the lse
    assert repr(explanation) == str(explanation)
    root = ElementTree.fromstring(explanation._repr_html_())
    assert {"backend", "compiles", "not here"} <= {str(th.text) for th in root.iter("th")}


@pytest.mark.parametrize(("device", "backend"), [*WHERE, pytest.param("cuda", "auto", marks=pytest.mark.gpu)])
def test_a_learned_sink(device: str, backend: str) -> None:
    """A sink is one more key that all queries see: its score is the sink, its value 0."""
    if backend == "flex_flash" or (device, backend) == ("cpu", "flex"):
        pytest.skip("this backend has no lse, which sinks need")
    dtype = torch.float32 if backend in ("reference", "flex") else torch.float16
    _skip_unless_possible(backend, dtype)
    q, k, v, seq_lens, _ = _of_lengths(device, dtype)
    sink = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    arguments: dict[str, Any] = {"mask": "grouped_tril", "seq_lens": seq_lens, "backend": backend}
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = flexmasks.attention(q, k, v, sink_logits=sink, return_lse=True, **arguments)
    others = [exact(x) for x in (q, k, v, sink)]
    visible = F.pad(flexmasks.dense_mask("grouped_tril", 200, seq_lens=seq_lens.cpu()), (1, 0), value=True)
    exact_q, exact_k, exact_v, logits = others
    scores = F.pad(exact_q @ exact_k.mT / 8, (1, 0)) + F.pad(logits.view(1, 2, 1, 1), (0, 200))
    scores = scores.masked_fill(~visible, -math.inf)
    want, want_lse = scores.softmax(-1) @ F.pad(exact_v, (0, 0, 1, 0)), scores.logsumexp(-1)
    assert error(out, want) < TOLERANCE[dtype]
    check_lse(lse, want_lse, TOLERANCE[dtype])
    weight, lse_weight = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out * weight).sum() + (lse * lse_weight).sum(), (q, k, v, sink))
    loss = (want * weight.double().cpu()).sum() + (want_lse * lse_weight.double().cpu()).sum()
    for g, w in zip(got, torch.autograd.grad(loss, others), strict=True):
        assert error(g, w, unit=1.0 if w.ndim == 1 else 0.05) < 2 * TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flex", "flex_flash"])
def test_lse_in_half_precision_without_gradients(backend: str) -> None:
    """FLASH is refused where torch gives its lse in another unit."""
    q, k, v, seq_lens, _ = _of_lengths("cuda", torch.float16)
    visible = flexmasks.dense_mask("grouped_tril", 200, seq_lens=seq_lens.cpu())
    if backend == "flex_flash":
        skip_unless_flash_takes((q, k, v), mask="grouped_tril", seq_lens=seq_lens, return_lse=True)
    lse = flexmasks.attention(q, k, v, mask="grouped_tril", seq_lens=seq_lens, backend=backend, return_lse=True)[1]
    check_lse(lse, attend(*(exact(x) for x in (q, k, v)), visible)[1], TOLERANCE[torch.float16])


def test_heads_without_a_sink() -> None:
    q, k, v = (exact(x) for x in torch.randn(3, 1, 2, 4, 8))
    sink = torch.tensor([0.5, -math.inf], dtype=torch.float64, requires_grad=True)
    arguments: dict[str, Any] = {"mask": "grouped_tril", "seq_lens": [2]}
    out, lse = flexmasks.attention(q, k, v, sink_logits=sink, return_lse=True, **arguments)
    want, want_lse = flexmasks.attention(q, k, v, return_lse=True, **arguments)
    assert torch.allclose(out[:, 1], want[:, 1])
    assert torch.equal(out[:, :, 2:], torch.zeros(1, 2, 2, 8))
    assert torch.equal(lse[:, 1], want_lse[:, 1])
    assert torch.equal(lse[0, 0, 2:], sink[:1].expand(2))
    out.sum().backward(retain_graph=True)
    lse[lse.isfinite()].sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, sink))


def test_a_sink_of_the_wrong_kind() -> None:
    q, k, v = torch.randn(3, 1, 2, 10, 8)
    for sink in (torch.zeros(3), torch.zeros(2, dtype=torch.int64), [0.0, 0.0], 1.0):
        with pytest.raises(TypeError, match=r"`sink_logits` must be a floating tensor \[H\] = \[2\]"):
            flexmasks.attention(q, k, v, sink_logits=sink)  # type: ignore[arg-type]


_MADE_INSIDE = ("padding", "documents", "own function", "of floats", "where queries start")


@pytest.mark.parametrize(
    ("kind", "length"),  # of the backends "short" and "reference"
    [
        *((kind, 64) for kind in _MADE_INSIDE),
        *(pytest.param(kind, 1100, marks=[] if "own" in kind else pytest.mark.campaign) for kind in _MADE_INSIDE),
    ],
)
def test_what_masks_read_made_inside_torch_func_grad(kind: str, length: int, caplog: pytest.LogCaptureFixture) -> None:
    """Gradients are those of plain calls before and after, and no backend fails on the way."""
    q, k, v = torch.randn(3, 2, 1, length, 8)
    numbers = torch.randint(1, 20, (2, length)).sort().values
    starts = torch.tensor([0, 3])

    def loss(q: Tensor, numbers: Tensor, starts: Tensor) -> Tensor:
        numbers, starts = numbers + 1, starts + 1  # new at each call, and wrapped inside a transform
        halves = numbers / 2

        def own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & (numbers[b, q] == numbers[b, kv])

        def of_floats(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & (halves[b, kv] > 5.0)

        arguments: dict[str, dict[str, Any]] = {
            "padding": {"mask": "padding", "kv_lens": numbers[:, -1]},
            "documents": {"mask": "document", "document_ids": numbers},
            "own function": {"mask": own},
            "of floats": {"mask": of_floats},
            "where queries start": {"mask": "causal", "q_offset": starts},
        }
        shorter = q[:, :, : length - 8] if kind == "where queries start" else q
        return flexmasks.attention(shorter, k, v, **arguments[kind]).square().sum()

    for _ in range(2):
        leaf = q.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(leaf, numbers, starts), leaf)
        for _ in range(2):
            assert error(torch.func.grad(loss)(q, numbers, starts), want) < 1e-5
        many = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, None))(torch.stack([q, q]), numbers, starts)
        assert error(many[1], want) < 1e-5
    assert not [r for r in caplog.records if r.name == "flexmasks" and "failed" in r.message]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(("of_q", "of_k"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_cache_of_fewer_bits_is_right_and_says_once_that_it_is_slow(
    of_q: torch.dtype, of_k: torch.dtype, needs_grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    table._warn_of_dtypes.cache_clear()
    q = torch.randn(1, 2, 40, 16, dtype=of_q, requires_grad=needs_grad)
    k, v = torch.randn(2, 1, 2, 40, 16).to(of_k)
    for window in (5, 9, 5):
        out = flexmasks.attention(q, k, v, mask="sliding_window", window=window)
        distance = torch.arange(40)[:, None] - torch.arange(40)
        scores = q.double() @ k.double().mT / 4
        want = scores.masked_fill((distance < 0) | (distance > window), -math.inf).softmax(-1) @ v.double()
        assert error(out, want) < 1e-5
        assert flexmasks.explain(q, k, v, mask="sliding_window", window=window).backend == "reference"
    lines = [r.getMessage() for r in caplog.records if r.name == "flexmasks" and r.levelname == "WARNING"]
    assert len(lines) == 1
    assert f"q is {of_q}, k and v are {of_k}" in lines[0]
