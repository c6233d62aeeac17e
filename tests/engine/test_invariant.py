"""Inside `flexmasks.invariant` a sequence has the same bits whatever else is in the call, and however it is said."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import flash_double
import pytest
import torch
from helpers import DEVICES, error, on_gpu_of
from oracles import attend
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexmasks
from flexmasks import compat, context, get_mask
from flexmasks.backends import fa4_functions, fa4_package, table
from flexmasks.kernels.sinks import with_sinks


class Sequences(NamedTuple):
    """Sequences end to end: q and weights of the output [total, H, D], k and v [total, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    lens: list[int]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self[:4]

    def spans(self) -> list[slice]:
        ends = list(itertools.accumulate(self.lens))
        return [slice(end - n, end) for n, end in zip(self.lens, ends, strict=True)]

    def in_order(self, order: Sequence[int]) -> Sequences:
        spans = self.spans()
        tokens = torch.cat([torch.arange(spans[i].start, spans[i].stop) for i in order]).to(self.q.device)
        return Sequences(*(x[tokens] for x in self.tensors), [self.lens[i] for i in order])

    def offsets(self) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(self.lens)], device=self.q.device)

    def ids(self) -> Tensor:
        lens = torch.tensor(self.lens, device=self.q.device)
        return torch.repeat_interleave(torch.arange(len(self.lens), device=self.q.device), lens)


class Kind(NamedTuple):
    """A mask inside a sequence, with what a call gets besides."""

    mask: flexmasks.Mask
    call: dict[str, Any]
    sinks: bool = False

    def given(self, made: Sequences) -> dict[str, Any]:
        sinks = torch.linspace(-1, 2, made.q.shape[1], device=made.q.device)
        return self.call | ({"sink_logits": sinks} if self.sinks else {})


KINDS = {
    "causal": Kind(get_mask("causal"), {}),
    "window": Kind(get_mask("sliding_window", window=100), {}),
    "full": Kind(get_mask("full"), {}),
    "soft-cap": Kind(get_mask("causal"), {"score": "softcap", "cap": 5.0}),
    "sinks": Kind(get_mask("sliding_window", window=100), {"scale": 0.2}, sinks=True),
}
Results = tuple[Tensor, ...]  # out, lse and gradients of q, k and v, each with the tokens first


def _attended(made: Sequences, attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Results:
    """Return the results of sequences that are laid out as [1, H, total, D]."""
    leaves = [x.detach().transpose(0, 1)[None].requires_grad_() for x in made.tensors[:3]]
    out, lse = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, made.weights.transpose(0, 1)[None])
    return out[0].transpose(0, 1), lse[0].t(), *(g[0].transpose(0, 1) for g in gradients)


def _alone(made: Sequences, kind: Kind) -> list[Results]:
    def attend(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        return _call(*qkv, kind, made, mask=kind.mask)

    spans = zip(made.spans(), made.lens, strict=True)
    return [_attended(Sequences(*(x[span] for x in made.tensors), [n]), attend) for span, n in spans]


def _call(q: Tensor, k: Tensor, v: Tensor, kind: Kind, made: Sequences, **call: Any) -> tuple[Tensor, Tensor]:
    return flexmasks.attention(q, k, v, return_lse=True, **kind.given(made), **call)


def _cut(made: Sequences, results: Results) -> list[Results]:
    return [tuple(x[span] for x in results) for span in made.spans()]


def _by_ids(made: Sequences, kind: Kind) -> list[Results]:
    mask = kind.mask & get_mask("document", document_ids=made.ids())
    return _cut(made, _attended(made, lambda *qkv: _call(*qkv, kind, made, mask=mask)))


def _by_offsets(made: Sequences, kind: Kind) -> list[Results]:
    """With padding behind the last sequence."""
    more = 37
    longer = Sequences(*(torch.cat([x, x[:more]]) for x in made.tensors), made.lens)
    mask = flexmasks.packed(kind.mask, made.offsets())
    return _cut(made, _attended(longer, lambda *qkv: _call(*qkv, kind, made, mask=mask)))


def _by_plan(made: Sequences, kind: Kind) -> list[Results]:
    mask = kind.mask & get_mask("document", document_ids=made.ids())
    plan = flexmasks.plan(mask, len(made.q), batch=1, heads=made.q.shape[1], invariant=True)
    return _cut(made, _attended(made, lambda *qkv: _call(*qkv, kind, made, mask=plan)))


def _by_blocks(made: Sequences, kind: Kind) -> list[Results]:
    mask = kind.mask & get_mask("document", document_ids=made.ids())
    blocks = flexmasks.block_mask(mask, len(made.q), batch=1, heads=made.q.shape[1])
    return _cut(made, _attended(made, lambda *qkv: _call(*qkv, kind, made, block_mask=blocks)))


def _varlen(made: Sequences, kind: Kind) -> list[Results]:
    leaves = [x.detach().requires_grad_() for x in made.tensors[:3]]
    given = {"mask": kind.mask, **kind.given(made)}
    out, lse = flexmasks.varlen_attention(*leaves, made.offsets(), return_lse=True, **given)
    return _cut(made, (out, lse.t(), *torch.autograd.grad(out, leaves, made.weights)))


def _rows(made: Sequences, kind: Kind) -> list[Results]:
    """In a batch of two rows, of which the first has the sequences in reverse, one token shifted."""
    order = range(len(made.lens))[::-1]
    other = made.in_order(order)
    token = Sequences(*(x[:1] for x in made.tensors), [1])
    rows = [[token, other], [made, token]]
    q, k, v, weights = (
        torch.stack([torch.cat([part[n] for part in row]) for row in rows]).transpose(1, 2) for n in range(4)
    )
    q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))
    ids = torch.stack([torch.cat([part.ids() + 100 * n for n, part in enumerate(row)]) for row in rows])
    mask = get_mask("document", document_ids=ids) & kind.mask
    out, lse = _call(q, k, v, kind, made, mask=mask)
    results = out, lse[..., None], *torch.autograd.grad(out, (q, k, v), weights)
    first, second = ([x[n].transpose(0, 1) for x in results] for n in range(2))
    first[1], second[1] = first[1][..., 0], second[1][..., 0]
    in_reverse = _cut(other, tuple(x[1:] for x in first))
    for one, two in zip(in_reverse[::-1], _cut(made, tuple(second)), strict=True):
        assert all(map(torch.equal, one, two))
    return in_reverse[::-1]


def _compiled(made: Sequences, kind: Kind) -> list[Results]:
    offsets = made.offsets()

    @torch.compile(fullgraph=True)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with flexmasks.invariant():
            return _call(q, k, v, kind, made, mask=flexmasks.packed(kind.mask, offsets))

    return _cut(made, _attended(made, attend))


WAYS = {
    "ids": _by_ids, "offsets": _by_offsets, "plan": _by_plan, "blocks": _by_blocks, "varlen": _varlen, "rows": _rows,
    "compiled": _compiled,
}  # fmt: skip
_SHAPES = [  # query heads, heads of keys, head size
    (4, 4, 64), (8, 2, 64), (4, 2, 96), (8, 2, 128), (2, 2, 256),
]  # fmt: skip
_ON_CPU = [(4, 2, 16)]
_LENS = {"cuda": [1, 300, 37, 128, 1000, 129, 700, 64], "cpu": [1, 70, 37, 128, 129]}


def _sequences(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Sequences:
    heads, kv_heads, size = shape
    lens = _LENS[device]
    generator = torch.Generator(device).manual_seed(3)
    q, k, v, weights = (
        torch.randn(sum(lens), n, size, device=device, dtype=dtype, generator=generator)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    return Sequences(q, k, v, weights, lens)


_HAS_CPU = table.BACKENDS["reference"].varies is not table._varies
_NEEDS_CPU = pytest.mark.skipif(not _HAS_CPU, reason="no kernel for CPUs is invariant")


def _cases() -> Iterator[Any]:
    for device, shapes, dtype in (("cpu", _ON_CPU, torch.float32), ("cuda", _SHAPES, torch.bfloat16)):
        for n, (shape, kind, way) in enumerate(itertools.product(shapes, KINDS, WAYS)):
            marks = [pytest.mark.gpu] if device == "cuda" else [_NEEDS_CPU]
            marks += [pytest.mark.slow] if (device, way) == ("cpu", "compiled") else []
            yield pytest.param(device, shape, torch.float16 if n % 5 == 4 else dtype, kind, way, marks=marks)


@pytest.mark.parametrize(("device", "shape", "dtype", "kind", "way"), list(_cases()))
def test_training(device: str, shape: tuple[int, int, int], dtype: torch.dtype, kind: str, way: str) -> None:
    """Output, lse and gradients of packed sequences are those of each one alone."""
    made = _sequences(device, shape, dtype)
    with flexmasks.invariant():
        want = _alone(made, KINDS[kind])
    if way == "plan":
        got = _by_plan(made, KINDS[kind])
    else:
        with flexmasks.invariant():
            got = WAYS[way](made, KINDS[kind])
    for n, (one, other) in enumerate(zip(got, want, strict=True)):
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), one, other, strict=True):
            assert torch.equal(x, y), (name, made.lens[n])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["causal", "window", "soft-cap", "sinks"])
@pytest.mark.parametrize("which", range(len(_SHAPES)))
def test_decoding(device: str, kind: str, which: int) -> None:
    """Chunks of a prefill and single tokens have the bits of one prefill, from caches of any layout."""
    shape = _SHAPES[which] if device == "cuda" else _ON_CPU[0]
    if device == "cpu" and (which or not _HAS_CPU):
        pytest.skip("one shape on a CPU")
    made = _sequences(device, shape, torch.bfloat16)._replace(lens=[])
    length, room = (1000, 1280) if device == "cuda" else (130, 256)
    q, k, v = (x[:length].transpose(0, 1)[None] for x in made.tensors[:3])
    call = {"mask": KINDS[kind].mask, "return_lse": True, **KINDS[kind].given(made)}
    caches = [torch.cat([x, x.new_full((1, x.shape[1], room - length, x.shape[3]), 3.0)], 2) for x in (k, v)]
    with flexmasks.invariant(), torch.no_grad():
        want = flexmasks.attention(q, k, v, **call)
        for first, stop in ((0, 70), (70, length // 2), (length // 2, length // 2 + 1), (length - 1, length)):
            for what, (out, lse) in _decoded(q, k, v, caches, first, stop, call):
                assert torch.equal(out[-1], want[0][0, :, first:stop]), (what, first, stop)
                assert torch.equal(lse[-1], want[1][0, :, first:stop]), (what, first, stop)


def _decoded(
    q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], first: int, stop: int, call: dict[str, Any]
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield the results of the queries first..stop - 1, as the last batch element, from all kinds of caches."""
    own = q[:, :, first:stop]
    yield "last", flexmasks.attention(own, k[:, :, :stop], v[:, :, :stop], q_offset="last", **call)
    own, two = own.expand(2, -1, -1, -1), [torch.cat([x.flip(2), x]) for x in caches]
    starts = torch.tensor([11, first], device=q.device)
    yield "starts", flexmasks.attention(own, *two, q_offset=starts, **call)
    lens = torch.tensor([max(stop - first, 5), stop], device=q.device)
    for page in (16, 128):
        pages = [x.transpose(1, 2).reshape(-1, page, x.shape[1], x.shape[3]) for x in two]
        order = torch.randperm(len(pages[0]), device=q.device)
        pool, table = [x[order] for x in pages], order.argsort().view(2, -1)
        yield f"pages of {page}", flexmasks.paged_attention(own, *pool, table, lens, **call)


# --- how it is chosen, and what FlashAttention 4 is told ---


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a double of FlashAttention 4, the only backend, is told: arguments and numbers of keys."""
    given: list[dict[str, Any]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        known = {name: x for name, x in arguments.items() if not isinstance(x, Tensor)}
        given.append(known | {"keys": k.shape[-3], "is_inside": context.is_invariant()})
        return flash_double.forward(q, k, v, **arguments)

    def backward(*tensors: Tensor, deterministic: bool, **arguments: Any) -> tuple[Tensor, ...]:
        given.append({"deterministic": deterministic})
        return flash_double.backward(*tensors, **arguments)

    flash_double.replace(monkeypatch, _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    on_gpu_of(monkeypatch, (9, 0))
    # flex is for calls that are not inside.
    flex = replace(table.BACKENDS["flex"], varies=table._varies)
    backends = {name: table.BACKENDS[name] for name in ("fa4", "sdpa")} | {"flex": flex}
    monkeypatch.setattr(table, "BACKENDS", backends)
    return given


@pytest.mark.parametrize(
    ("q", "k", "tile"),
    [
        ((3, 1, 8, 64), (3, 100, 8, 64), True),
        ((3, 16, 32, 128), (50, 16, 8, 128), True),  # from pages
        ((3, 17, 32, 128), (50, 16, 8, 128), False),
        ((3, 1, 8, 96), (3, 100, 8, 96), False),
        ((3, 1, 8, 128), (3, 100, 8, 64), False),
        ((30, 8, 64), (30, 8, 64), False),  # end to end
    ],
)
def test_few_queries_take_a_small_tile(
    q: tuple[int, ...], k: tuple[int, ...], tile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu_of(monkeypatch, (9, 0))
    tensors = (torch.empty(shape, device="meta") for shape in (q, k, k))
    assert fa4_functions._tile_of_few(*tensors) == ({"tile_mn": (64, 128)} if tile else {})


def _qkv(q_len: int, kv_len: int, learns: bool = False) -> list[Tensor]:
    return [torch.randn(1, 2, n, 8, dtype=torch.float64, requires_grad=learns) for n in (q_len, kv_len, kv_len)]


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _shown(q_len: int, kv_len: int, q_offset: int, window: int | None) -> Tensor:
    distance = torch.arange(q_len)[:, None] + q_offset - torch.arange(kv_len)
    return (distance >= 0) & (distance <= (kv_len if window is None else window))


@pytest.mark.parametrize(
    ("q_len", "kv_len", "q_offset", "window", "keys"),
    [
        (200, 200, 0, None, 200),
        (1, 300, 120, None, 121),
        (1, 300, 250, 20, 251),
        (150, 300, 9, 20, 159),
        (1, 9, 8, 20, 9),
    ],
)
def test_keys_are_read_from_the_first_one(
    q_len: int, kv_len: int, q_offset: int, window: int | None, keys: int, told: list[dict[str, Any]]
) -> None:
    """With the bounds of any other length, and for few queries too."""
    call: dict[str, Any] = {"mask": "causal"} if window is None else {"mask": "sliding_window", "window": window}
    q, k, v = _qkv(q_len, kv_len)
    with flexmasks.invariant():
        out = flexmasks.attention(q, k, v, q_offset=q_offset, **call)
        assert flexmasks.explain(q, k, v, q_offset=q_offset, **call).invariant == "yes"
    bounds = {"causal": True} if window is None else {"window_size_left": window, "window_size_right": 0}
    assert told[0].items() >= {"keys": keys, **bounds}.items()
    assert error(out, attend(q, k, v, _shown(q_len, kv_len, q_offset, window))[0]) < 1e-12


def test_gradients_are_added_in_order(told: list[dict[str, Any]]) -> None:
    """Also where the backward pass runs outside."""
    q, k, v = _qkv(150, 150, learns=True)
    with flexmasks.invariant():
        out = flexmasks.attention(q, k, v, mask="causal")
    out.sum().backward()
    assert told[-1] == {"deterministic": True}


def test_sinks_are_folded_in_by_one_way(told: list[dict[str, Any]]) -> None:
    q, k, v = _qkv(150, 150)
    with flexmasks.invariant():
        flexmasks.attention(q, k, v, mask="causal", sink_logits=torch.zeros(2, dtype=torch.float64))
    assert "learnable_sink" not in told[0]


@pytest.mark.parametrize("device", DEVICES)
def test_sinks_by_the_operator(device: str) -> None:
    """It computes what others do, and torch finds nothing wrong with it."""
    out, lse, sinks = torch.randn(2, 3, 40, 16), torch.randn(2, 3, 40), torch.tensor([0.3, -math.inf, 2.0])
    lse[0, 0, 5] = -math.inf
    out[0, 0, 5] = 0
    leaves = [x.to(device).requires_grad_() for x in (out, lse, sinks)]
    weights = [torch.randn_like(x) for x in leaves[:2]]
    got, want = (with_sinks(*leaves, True, by_operator=one) for one in (True, False))
    both = zip(
        (*got, *torch.autograd.grad(got, leaves, weights)),
        (*want, *torch.autograd.grad(want, leaves, weights)),
        strict=True,
    )
    for x, y in both:
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(torch.ops.flexmasks.fold_sinks, [*(x.detach().requires_grad_() for x in leaves), None])


def test_what_cannot_refuses_in_words(told: list[dict[str, Any]]) -> None:
    """And runs outside. No other kernel takes the place of one that values refuse."""
    q, k, v = _qkv(150, 150)
    scattered = get_mask("document", document_ids=torch.arange(150) % 3)
    with flexmasks.invariant():
        with pytest.raises(ValueError, match=r"'fa4' cannot run this call: .* both sides of another"):
            flexmasks.attention(q, k, v, mask=scattered)
        with pytest.raises(ValueError, match=r"inside flexmasks.invariant\(\): .*flex: what it computes .* depends on"):
            flexmasks.attention(q.float(), k.float(), v.float(), mask="causal", score="alibi")
        with pytest.raises(ValueError, match="'sdpa' cannot run this call: what it computes of a sequence depends on"):
            flexmasks.attention(q, k, v, mask="causal", backend="sdpa")
    assert flexmasks.attention(q, k, v, mask="causal", backend="sdpa").shape == q.shape


def test_explain_says_how(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _qkv(150, 150)
    says = flexmasks.explain(q, k, v, mask="causal").invariant
    assert says == "no, but inside flexmasks.invariant(), where fa4 runs such calls"
    on_gpu_of(monkeypatch, (10, 0))
    says = flexmasks.explain(q, k, v, mask="causal", backend="fa4").invariant
    assert says == "no, it was not shown to be invariant on compute capability 10"
    plan = flexmasks.plan("causal", 150, invariant=True)
    with pytest.raises(ValueError, match="fa4: it was not shown"):
        plan.explain(q, k, v)


def test_block_masks_stand_for_their_mask(told: list[dict[str, Any]]) -> None:
    """Where they know it."""
    q, k, v = _qkv(150, 150)
    blocks = flexmasks.block_mask("causal", 150, batch=1, heads=2)
    with flexmasks.invariant():
        flexmasks.attention(q, k, v, block_mask=blocks)
        assert told[-1]["causal"]
        assert flexmasks.explain(q, k, v, block_mask=blocks).backend == "fa4"
        with pytest.raises(ValueError, match="no backend can run"):
            flexmasks.attention(q, k, v, block_mask=create_block_mask(_causal, None, None, 150, 150, device="cpu"))
        with pytest.raises(ValueError, match="150"):
            flexmasks.attention(*_qkv(160, 160), block_mask=blocks)


def test_plans_carry_it(told: list[dict[str, Any]]) -> None:
    plan = flexmasks.plan("causal", 150, invariant=True)
    q, k, v = _qkv(150, 150)
    for one in (plan, pickle.loads(pickle.dumps(plan)), plan.to("cpu"), copy.copy(plan)):
        told.clear()
        flexmasks.attention(q, k, v, mask=one, backend="auto")
        assert one.is_invariant
        assert told
        assert repr(one).endswith("invariant=True)")
    assert not context.is_invariant()


@pytest.mark.parametrize("leaves_by", ["end", "error"])
def test_contexts_nest(leaves_by: str) -> None:
    with contextlib.suppress(RuntimeError), flexmasks.invariant():
        with flexmasks.invariant():
            pass
        assert context.is_invariant()
        if leaves_by == "error":
            raise RuntimeError
    assert not context.is_invariant()


def test_contexts_of_threads_overlap() -> None:
    """Each counts until it is left, whoever leaves first; and a function may be decorated."""
    first, second = flexmasks.invariant(), flexmasks.invariant()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert context.is_invariant()
    second.__exit__()
    assert not context.is_invariant()
    assert flexmasks.invariant()(context.is_invariant)()
    assert not context.is_invariant()


def test_plans_leave_the_process_as_it_is(told: list[dict[str, Any]]) -> None:
    """A call of another thread beside that of a plan is not inside."""
    q, k, v = _qkv(150, 150)
    flexmasks.attention(q, k, v, mask=flexmasks.plan("causal", 150, invariant=True))
    assert [call["is_inside"] for call in told] == [False]


@pytest.mark.skipif(not _HAS_CPU, reason="no kernel for CPUs is invariant")
def test_backward_under_autocast_in_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        q = torch.randn(1, 2, 40, 16, requires_grad=True)
        with flexmasks.invariant(), torch.autocast("cpu", torch.bfloat16):
            (inside,) = torch.autograd.grad(flexmasks.attention(q, q, q, mask="causal").sum(), q)
    finally:
        torch.set_num_threads(before)
    with torch.autocast("cpu", torch.bfloat16):
        (want,) = torch.autograd.grad(flexmasks.attention(q, q, q, mask="causal").sum(), q)
    assert error(inside, want) < 0.02


def test_torchs_own_setting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compat.inductor_config
    assert not context.is_invariant()
    monkeypatch.setattr(compat.sys, "modules", {"torch._inductor.config": SimpleNamespace(batch_invariant=True)})
    assert context.is_invariant()
    monkeypatch.setattr(compat.sys, "modules", {"torch._inductor.config": config})
    assert context.is_invariant() == getattr(config, "batch_invariant", False)
    monkeypatch.setattr(compat.sys, "modules", {})
    assert not context.is_invariant()
    monkeypatch.setenv("TORCHINDUCTOR_BATCH_INVARIANT", "1")
    assert context.is_invariant()


def test_what_is_kept_is_kept_apart(told: list[dict[str, Any]]) -> None:
    """A call inside takes nothing that one outside has made, and the other way around, also in graphs."""
    q, k, v = _qkv(130, 300)
    call: dict[str, Any] = {"mask": "sliding_window", "window": 20, "q_offset": 121}
    for _ in range(2):
        flexmasks.attention(q, k, v, backend="fa4", **call)
        assert told[-1]["keys"] == 150
        told.clear()
        with flexmasks.invariant():
            flexmasks.attention(q, k, v, **call)
        assert told[-1]["keys"] == 251
