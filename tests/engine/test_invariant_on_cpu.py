"""Inside `flexmasks.invariant` on a CPU a sequence has the same bits, with any mask and score, and right values."""

from __future__ import annotations

import contextlib
import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fresh
import pytest
import torch
from helpers import TOLERANCE, arguments, by_turns, check_lse, error, exact, in_campaigns, qkv, try_examples
from hypothesis import strategies as st
from oracles import MASK_CASES, Case, attend, dense
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

import flexmasks
from flexmasks import get_mask
from flexmasks.backends import ordered, ordered_places
from flexmasks.spec import Band, Mask, in_sequences
from flexmasks.spec.definitions import define

_HEADS, _SIZE = 4, 8


def _skipping(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & ((q - kv) % 3 != 1)


def _by_distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A score of a user's, whose functions of one index alone round otherwise in odd numbers of elements."""
    return score * torch.exp(-(h + 1.0) / 3) - torch.log1p((q - kv).abs() * 0.3)


_MASKS: dict[str, Any] = {
    "causal": "causal", "window": get_mask("sliding_window", window=50), "full": "full",
    "prefix": get_mask("prefix_lm", prefix_len=45), "user's": _skipping,
}  # fmt: skip
_SCORES: dict[str, Any] = {
    "none": {}, "soft-cap": {"score": "softcap", "cap": 3.0}, "alibi": {"score": "alibi"},
    "user's": {"score": _by_distance},
}  # fmt: skip


class Made(NamedTuple):
    """Tensors of sequences end to end, [1, heads, tokens, D], with weights of output and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    of_out: Tensor
    of_lse: Tensor

    def at(self, tokens: Any) -> Made:
        return Made(*(x[:, :, tokens] for x in self))


def _made(length: int, dtype: torch.dtype = torch.float32, kv_heads: int = 2, seed: int = 0) -> Made:
    generator = torch.Generator().manual_seed(seed)
    heads = _HEADS, kv_heads, kv_heads, _HEADS
    tensors = [torch.randn(1, n, length, _SIZE, generator=generator).to(dtype) for n in heads]
    precise = torch.promote_types(dtype, torch.float32)
    return Made(*tensors, torch.randn(1, _HEADS, length, generator=generator).to(precise))


def _results(made: Made, call: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return output, lse and the gradients of q, k and v of a call inside."""
    leaves = [x.detach().clone().requires_grad_() for x in made[:3]]
    with flexmasks.invariant():
        out, lse = call(*leaves)
    return [x.detach() for x in (out, lse, *torch.autograd.grad((out, lse), leaves, made[3:]))]


def _attention(mask: Any, **call: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    return partial(flexmasks.attention, mask=mask, return_lse=True, **call)


def _check_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=False):
        assert torch.equal(x, y), name


def _spans(lens: Sequence[int]) -> list[slice]:
    ends = list(itertools.accumulate(lens))
    return [slice(end - n, end) for n, end in zip(lens, ends, strict=True)]


# --- packings and batches ---


def _by_ids(mask: Any, lens: Sequence[int], call: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    return _attention(get_mask(mask) & get_mask("document", document_ids=ids), **call)


def _by_crossed_ids(mask: Any, lens: Sequence[int], call: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    ids = torch.repeat_interleave(torch.arange(len(lens)).flip(0), torch.tensor(lens))
    cross = get_mask("cross_document", q_document_ids=ids, kv_document_ids=ids)
    return _attention(cross & get_mask(mask), **call)


def _by_offsets(mask: Any, lens: Sequence[int], call: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    return _attention(flexmasks.packed(mask, [0, *itertools.accumulate(lens)]), **call)


def _by_block_mask(mask: Any, lens: Sequence[int], call: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    packed = flexmasks.packed(mask, [0, *itertools.accumulate(lens)])
    block_mask = flexmasks.block_mask(packed, sum(lens), sum(lens), batch=1, heads=_HEADS, block_size=64)
    return partial(flexmasks.attention, block_mask=block_mask, return_lse=True, **call)


def _varlen(mask: Any, lens: Sequence[int], call: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    def attend(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        tokens, offsets = (x[0].transpose(0, 1) for x in qkv), torch.tensor([0, *itertools.accumulate(lens)])
        out, lse = flexmasks.varlen_attention(*tokens, offsets, mask=mask, return_lse=True, **call)
        return out.transpose(0, 1)[None], lse[None]

    return attend


_WAYS = {
    "ids": _by_ids, "crossed": _by_crossed_ids, "offsets": _by_offsets, "blocks": _by_block_mask, "varlen": _varlen
}  # fmt: skip
_DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def test_packed() -> None:
    """With any others, in any order, at any place of a row, each sequence is as alone."""

    def check(
        lens: list[int], mask: str, score: str, way: str, dtype: torch.dtype, kv_heads: int, before: list[int]
    ) -> None:
        if mask == "prefix" and way in ("ids", "crossed"):  # whose prefixes are those of the row
            mask = "full"
        call = _SCORES[score]
        made = _made(sum(lens), dtype, kv_heads, seed=sum(lens))
        more = _made(sum(before), dtype, kv_heads, seed=1)
        row = Made(*(torch.cat(pair, 2) for pair in zip(more, made, strict=True)))
        packed = _results(row, _WAYS[way](_MASKS[mask], [*before, *lens], call))
        mine = [x[:, :, sum(before) :] for x in packed]
        for span in _spans(lens):
            alone = _results(made.at(span), _attention(_MASKS[mask], **call))
            _check_equal([x[:, :, span] for x in mine], alone)

    try_examples(
        25, check, st.lists(st.integers(1, 140), min_size=1, max_size=3), st.sampled_from(list(_MASKS)),
        st.sampled_from(list(_SCORES)), st.sampled_from(list(_WAYS)), st.sampled_from(_DTYPES),
        st.sampled_from([1, 2, 4]), st.lists(st.integers(1, 150), max_size=2),
    )  # fmt: skip


def test_batched() -> None:
    """In any batch, at any place in it, and in rows of any length, a batch element is as alone."""

    def check(length: int, longer: int, place: int, mask: str, score: str, dtype: torch.dtype) -> None:
        made, room, call = _made(length, dtype), length + longer, _SCORES[score]
        others = [_made(room, dtype, seed=n + 1) for n in range(3)]
        others[place] = Made(*(torch.cat([x, y[:, :, length:]], 2) for x, y in zip(made, others[place], strict=True)))
        batch = Made(*(torch.cat(rows) for rows in zip(*others, strict=True)))
        lens = torch.full((3,), room)
        lens[place] = length
        # Queries behind the end see keys, and are not to add to their gradients.
        batch.of_out[place, :, length:] = batch.of_lse[place, :, length:] = 0
        got = _results(batch, _attention(get_mask(_MASKS[mask]) & get_mask("padding", kv_lens=lens), **call))
        alone = _results(made, _attention(_MASKS[mask], **call))
        _check_equal([x[place : place + 1, :, :length] for x in got], alone)

    try_examples(
        12, check, st.integers(1, 200), st.integers(0, 150), st.integers(0, 2), st.sampled_from(list(_MASKS)),
        st.sampled_from(list(_SCORES)), st.sampled_from(_DTYPES),
    )  # fmt: skip


def test_padded_on_the_left() -> None:
    """As tokenizers pad prompts: positions count from the first token that is none of the padding."""
    length, before = 150, 45
    made, row = _made(length), _made(length + before, seed=1)
    row = Made(*(torch.cat([y[:, :, :before], x], 2) for x, y in zip(made, row, strict=True)))
    marks = (torch.arange(length + before) >= before)[None]
    padded = _results(row, _attention(get_mask("causal") & get_mask("key_padding", attention_mask=marks)))
    _check_equal([x[:, :, before:] for x in padded], _results(made, _attention("causal")))


def test_scattered_documents() -> None:
    """Tokens of a document are the same wherever they stand in a row."""
    ids = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0))
    made = _made(200)
    got = _results(made, _attention(get_mask("causal") & get_mask("document", document_ids=ids)))
    for n in range(3):
        _check_equal([x[:, :, ids == n] for x in got], _results(made.at(ids == n), _attention("causal")))


# --- chunks, steps of decoding, pages ---


def test_decoded() -> None:
    """Any chunk of a prefill, down to one token, is as in the whole prefill, from any cache."""

    def check(stop: int, count: int, room: int, page: int, mask: str, score: str, dtype: torch.dtype) -> None:
        first, made = max(0, stop - count), _made(stop, dtype)
        call, name = _SCORES[score] | {"return_lse": True}, _MASKS[mask]
        with flexmasks.invariant():
            want = [x[0, :, first:] for x in flexmasks.attention(*made[:3], mask=name, **call)]
            own = made.q[:, :, first:]
            got = [flexmasks.attention(own, *made[1:3], mask=name, q_offset=first, **call)]
            two = [torch.cat([x, x.new_full((1, 2, room, _SIZE), 7.0)], 2) for x in made[1:3]]
            two, own = [torch.cat([x.flip(1), x]) for x in two], torch.cat([own.flip(1), own])
            padding = get_mask("padding", kv_lens=torch.tensor([stop + room, stop]))
            starts = torch.tensor([room, first])
            got.append(flexmasks.attention(own, *two, mask=padding & get_mask(name), q_offset=starts, **call))
            used = -(-(stop + room) // page)
            caches = [torch.nn.functional.pad(x, (0, 0, 0, used * page - x.shape[2])).transpose(1, 2) for x in two]
            order = torch.randperm(2 * used, generator=torch.Generator().manual_seed(page))
            pool = [x.reshape(2 * used, page, 2, _SIZE)[order].contiguous() for x in caches]
            pages = pool, order.argsort().view(2, used), torch.tensor([stop + room, stop])
            got.append(flexmasks.paged_attention(own, *pages[0], *pages[1:], mask=name, **call))
            tokens, offsets = own.transpose(1, 2).flatten(0, 1), torch.tensor([0, stop - first, 2 * (stop - first)])
            given = {"page_table": pages[1], "kv_lens": pages[2], "mask": name, **call}
            out, lse = flexmasks.varlen_attention(tokens, *pool, offsets, **given)
            got.append((out[stop - first :].transpose(0, 1)[None], lse[None, :, stop - first :]))
        for results in got:
            _check_equal([x[-1] for x in results], want)

    try_examples(
        12, check, st.integers(1, 260), st.sampled_from([1, 1, 7, 60]), st.integers(0, 90),
        st.sampled_from([8, 48, 128]), st.sampled_from(["causal", "window", "user's"]),
        st.sampled_from(list(_SCORES)), st.sampled_from(_DTYPES),
    )  # fmt: skip


@pytest.mark.parametrize("is_paged", [False, True])
def test_sinks(is_paged: bool) -> None:
    """In rows of any length; queries of no sequence have the sink as their lse."""
    made, sinks = _made(150), torch.linspace(-1, 2, _HEADS).requires_grad_()
    call: dict[str, Any] = {"mask": "causal", "sink_logits": sinks, "return_lse": True}
    with flexmasks.invariant():
        out, lse = flexmasks.attention(*made[:3], **call)
        tokens, offsets = made.q[0].transpose(0, 1), torch.tensor([0, 3, 9])
        tokens = torch.cat([tokens[10:13], tokens[144:]])
        tokens = torch.cat([tokens, tokens[:2]])
        if is_paged:
            pools = [x.transpose(1, 2).reshape(5, 30, 2, _SIZE) for x in made[1:3]]
            table, lens = torch.arange(5).expand(2, 5), torch.tensor([13, 150])
            got, of_tokens = flexmasks.varlen_attention(tokens, *pools, offsets, page_table=table, kv_lens=lens, **call)
        else:
            keys = [torch.cat([x[0, :, :13], x[0]], 1).transpose(0, 1) for x in made[1:3]]
            starts, q_offset = torch.tensor([0, 13, 163]), torch.tensor([10, 144])
            got, of_tokens = flexmasks.varlen_attention(
                tokens, *keys, offsets, kv_offsets=starts, q_offset=q_offset, **call
            )
    want = torch.cat([out[0, :, 10:13], out[0, :, 144:]], 1).transpose(0, 1)
    assert torch.equal(got[:9], want)
    assert torch.equal(of_tokens[:, :9], torch.cat([lse[0, :, 10:13], lse[0, :, 144:]], 1))
    assert torch.equal(of_tokens[:, 9:], sinks.detach()[:, None].expand(-1, 2))
    assert not got[9:].any()


# --- however it is said, and wherever it runs ---


def test_inside_compile() -> None:
    """Packed with others, a sequence is as alone outside; sinks and scores learn and change alike."""
    lens = [37, 150, 20]
    made, mask = _made(sum(lens)), get_mask("prefix_lm", prefix_len=60)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    call = {"mask": mask & get_mask("document", document_ids=ids), **_SCORES["soft-cap"]}
    sinks = torch.linspace(-1, 2, _HEADS)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return flexmasks.attention(q, k, v, sink_logits=sinks, return_lse=True, **call)

    leaves = [x.clone().requires_grad_() for x in (*made[:3], sinks)]
    found = []
    for one in (attend, torch.compile(attend, fullgraph=True)):
        with flexmasks.invariant():
            results = one(*leaves)
        found.append([*results, *torch.autograd.grad(results, leaves, made[3:])])
    assert all(map(torch.equal, *found))
    alone = _results(made.at(slice(0, 37)), _attention(mask, sink_logits=sinks, **_SCORES["soft-cap"]))
    _check_equal([x[:, :, :37] for x in found[1][:5]], alone)


def test_however_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By any number of threads, in a mode of torch, by operations over few tiles, by name, and by a plan."""
    mask = _by_offsets("causal", [50, 170, 30], _SCORES["user's"])
    made = _made(250, kv_heads=4)
    want = _results(made, mask)
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            _check_equal(_results(made, mask), want)
        finally:
            torch.set_num_threads(threads)
    with FlopCounterMode(display=False):
        _check_equal(_results(made, mask), want)
    for scores in (1, 5 * ordered_places.QUERIES * ordered_places.KEYS):
        monkeypatch.setattr(ordered, "_MAX_SCORES", scores)
        _check_equal(_results(made, mask), want)
    monkeypatch.undo()
    _check_equal(_results(made, partial(mask, backend="reference")), want)
    plan = flexmasks.plan(mask.keywords["mask"], 250, invariant=True)
    leaves = [x.requires_grad_() for x in made[:3]]
    results = flexmasks.attention(*leaves, mask=plan, return_lse=True, **_SCORES["user's"])
    _check_equal([*results, *torch.autograd.grad(results, leaves, made[3:])], want)


_PROCESS = """
    import hashlib, sys, torch, flexmasks

    torch.manual_seed(0)
    leaves = [torch.randn(2, 4, 200, 8, requires_grad=True) for _ in range(3)]
    attend = lambda *qkv: flexmasks.attention(*qkv, mask="sliding_window", window=70, return_lse=True)
    if sys.argv[1] == "compiled":
        attend = torch.compile(attend, fullgraph=True)
    with flexmasks.invariant():
        out, lse = attend(*leaves)
    found = [out, lse, *torch.autograd.grad([out, lse], leaves, [out.detach(), lse.detach()])]
    print(hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in found)).hexdigest())
"""


@pytest.mark.parametrize("how", ["eager", in_campaigns("compiled")])
def test_processes(how: str, tmp_path: Path) -> None:
    """With caches and numbers of threads of their own."""
    ran = [
        fresh.run(textwrap.dedent(_PROCESS), what, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS=threads)
        for what, threads in (("eager", "1"), (how, "2"))
    ]
    assert ran[0].stdout, ran[0].stderr
    assert ran[0].stdout == ran[1].stdout, ran[1].stderr


# --- values ---


_NESTED = "document", "cross_document", "packed"  # refused inside another one
_KNOWN = [c for c in MASK_CASES if c.name != "paged" and c.params.get("mask", ("",))[0] not in _NESTED]


@by_turns(_KNOWN, [8], turns=6)
def test_values(case: Case, size: int) -> None:
    """Output, lse and gradients of any mask are those of the formula."""
    leaves = qkv(case, torch.float32, grouped=case.q_len % 2 == 0, size=size)
    given = arguments(case)
    offset = given.pop("q_offset")
    with flexmasks.invariant():
        mask = get_mask(case.name, **given)
        out, lse = flexmasks.attention(*leaves, mask=mask, q_offset=offset, return_lse=True)
    slopes, exactly = torch.randn_like(out), [exact(x) for x in leaves]
    want, of_rows = attend(*exactly, dense(case))
    assert error(out, want) < TOLERANCE[torch.float32]
    check_lse(lse, of_rows, TOLERANCE[torch.float32])
    gradients = torch.autograd.grad(out, leaves, slopes), torch.autograd.grad(want, exactly, slopes.double())
    for x, y in zip(*gradients, strict=True):
        assert error(x, y) < 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("score", ["soft-cap", "alibi", "user's", "sinks"])
def test_values_with_scores(score: str) -> None:
    """Gradients of lse and of sinks included, for queries that see nothing, too."""
    made, sinks = _made(180, torch.float64), torch.linspace(-1, 2, _HEADS, dtype=torch.float64)
    call = {} if score == "sinks" else _SCORES[score]
    mask = get_mask("causal") & (lambda b, h, q, kv: q % 50 > 5)

    def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, Tensor]:
        given = {"sink_logits": sinks[0]} if sinks else {}
        return flexmasks.attention(q, k, v, mask=mask, return_lse=True, backend="reference", **given, **call)

    leaves = [x.requires_grad_() for x in (*made[:3], *([sinks] if score == "sinks" else []))]
    found = []
    for context in (flexmasks.invariant(), contextlib.nullcontext()):
        with context:
            results = attend(*leaves)
        found.append([*results, *torch.autograd.grad(results, leaves, made[3:])])
    for x, y in zip(*found, strict=True):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-12)


def test_what_is_not_finite_stays_where_it_is() -> None:
    """Other documents, hidden keys and queries that do not see it have the bits that they have without."""
    made, lens = _made(200), [60, 100, 40]
    call = _by_offsets("causal", lens, _SCORES["soft-cap"])
    want = _results(made, call)
    bad = Made(*(x.clone() for x in made))
    for x, value in zip(bad[:4], (math.nan, math.inf, math.nan, math.nan), strict=True):
        x[:, :, 130] = value
    got = _results(bad, call)
    for x, y in zip(got[:2], want[:2], strict=True):
        assert torch.equal(x[:, :, :130], y[:, :, :130])
    others = [*range(60), *range(160, 200)]
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x[:, :, others], y[:, :, others])
        assert x[:, :, 130].isnan().all()
    assert got[0][:, :, 131:160].isnan().all()


# --- refusals ---


def _foreign(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _halves(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q < 50) == (kv < 50)


_of_user = define("mask", _halves, "halves", band=lambda size: in_sequences(Band(), size, torch.tensor([0, 50, 100])))


def _documents() -> flexmasks.Mask:
    return get_mask("document", document_ids=torch.arange(100) // 40)


def _padding() -> flexmasks.Mask:
    return get_mask("key_padding", attention_mask=torch.arange(100)[None] >= 30)


def test_heads_of_one_number_are_refused() -> None:
    q, k, v = _made(100)[:3]
    with flexmasks.invariant(), pytest.raises(ValueError, match="heads of one number"):
        flexmasks.attention(q, k, v[..., :1], mask="causal")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: {"mask": _documents() | get_mask("causal")}, "knows document as the mask or joined to others by &"),
        (lambda: {"mask": flexmasks.packed(_documents(), [0, 100])}, "has packed and document"),
        (lambda: {"mask": _documents() & _padding()}, "leave key_padding out"),
        (lambda: {"mask": flexmasks.packed(_padding(), [0, 100])}, "leave key_padding out"),
        (lambda: {"mask": _padding() | get_mask("causal")}, "knows key_padding as the mask or joined to others by &"),
        (lambda: {"mask": Mask._of(_of_user, {})}, "knows document, cross_document and packed, not halves"),
        (
            lambda: {
                "mask": "paged",
                "inner": get_mask("causal"),
                "page_table": [[0]],
                "kv_lens": [100],
                "page_size": 100,
            },
            "flexmasks.paged_attention puts them in their own",
        ),
        (lambda: {"block_mask": create_block_mask(_foreign, 1, 1, 100, 100, "cpu")}, "of block masks, only one of"),
        (
            lambda: {"score": "dense_bias", "bias": torch.zeros(100, 100, requires_grad=True)},
            "a tensor of the score le",
        ),
    ],
)
def test_refused(call: Callable[[], dict[str, Any]], words: str) -> None:
    with flexmasks.invariant(), pytest.raises(ValueError, match=words):
        flexmasks.attention(*_made(100)[:3], **call())


def test_gradients_that_are_refused() -> None:
    leaves = [x.requires_grad_() for x in _made(40)[:3]]
    with flexmasks.invariant():
        out = flexmasks.attention(*leaves, mask="causal")
        with pytest.raises(RuntimeError, match="leave out create_graph=True"):
            torch.autograd.grad(out.sum(), leaves, create_graph=True)
        with pytest.raises(ValueError, match=r"reference: inside transforms of torch\.func"):
            torch.func.grad(lambda q: flexmasks.attention(q, *leaves[1:], mask="causal").sum())(leaves[0].detach())


def test_refused_inside_compile() -> None:
    """A function that only tracing can read, of which the sequences are not known."""
    made = _made(100)

    class Windows:
        def __init__(self) -> None:
            self.widths = {"one": 30}

        def visible(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q - kv < self.widths["one"]

    windows = Windows()
    call = torch.compile(lambda *qkv: flexmasks.attention(*qkv, mask=windows.visible))
    with flexmasks.invariant(), pytest.raises(ValueError, match="only torch's tracing can read"):
        call(*made[:3])
