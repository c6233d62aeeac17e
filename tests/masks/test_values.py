"""Mask and Score as values: algebra, equality, printing, what may be a parameter, and torch's own functions on them."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import pickle
import threading
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import flexmasks
from flexmasks import Mask, Score, get_mask, get_score
from flexmasks.spec import definitions
from flexmasks.spec.definitions import _NAMES

LENGTH = 64
MASKS = sorted(entry.name for entry in flexmasks.list_masks())
SCORES = sorted(entry.name for entry in flexmasks.list_scores())


def odd(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q + kv) % 2 == 1


def near(b: Any, h: Any, q: Any, kv: Any, *, window: int = 2) -> Any:
    return (q - kv).abs() <= window


def example(kind: str, name: str, length: int = LENGTH) -> Any:
    definition = _NAMES[kind][name]
    params = definition.example(length) if definition.example else {}
    if (kind, name) == ("score", "alibi"):
        params = {"slopes": [0.5]}
    elif kind == "score" and name in ("packed", "paged"):
        params["inner"] = get_score("alibi", slopes=[0.5])
    elif (kind, name) == ("score", "sandwich"):
        params = {"ratios": [0.5], "positions": length}
    return (get_mask if kind == "mask" else get_score)(name, **params)


def truth(mask: Callable[..., Any], length: int = LENGTH) -> Tensor:
    """Return the mask of a function that is called by hand, [length, length]."""
    n = torch.arange(length)
    zero = torch.tensor(0)
    return mask(zero, zero, n[:, None], n).expand(length, length)


def dense(mask: Any, length: int = LENGTH, **params: Any) -> Tensor:
    return flexmasks.dense_mask(mask, length, batch=1, heads=1, **params)[0, 0]


# --- algebra ---

LEAVES: list[Any] = [
    get_mask("causal"),
    get_mask("sliding_window", window=2),
    get_mask("document", document_ids=[0, 0, 0, 1, 1, 2, 2, 2]),
    get_mask("padding", kv_lens=torch.tensor([6])),
    odd,
    functools.partial(near, window=1),
]
TRUTHS = [truth(m, 8) for m in LEAVES]


def trees() -> Any:
    leaf = st.integers(0, len(LEAVES) - 1)
    return st.recursive(
        leaf, lambda inner: st.one_of(st.tuples(st.sampled_from("&|"), inner, inner), st.tuples(st.just("~"), inner))
    )


def built(tree: Any) -> tuple[Any, Tensor]:
    if isinstance(tree, int):
        return LEAVES[tree], TRUTHS[tree]
    operator, *parts = tree
    masks, values = zip(*map(built, parts), strict=True)
    if not any(isinstance(m, Mask) for m in masks):
        masks = (get_mask(masks[0]), *masks[1:])
    if operator == "~":
        return ~masks[0], ~values[0]
    if operator == "&":
        return masks[0] & masks[1], values[0] & values[1]
    return masks[0] | masks[1], values[0] | values[1]


@pytest.mark.slow
@given(trees())
def test_algebra(tree: Any) -> None:
    mask, want = built(tree)
    assert torch.equal(dense(mask, 8), want)
    made = flexmasks.block_mask(mask, 8, block_size=2)
    blocks = want.view(4, 2, 4, 2)
    assert torch.equal(made.to_dense()[0, 0].bool(), blocks.any(3).any(1))


@given(trees())
def test_the_repr_of_an_expression_means_the_same(tree: Any) -> None:
    names = [f"leaf{i}" for i in range(len(LEAVES))]
    leaves = {n: get_mask(_named(n)) for n in names}
    mask = _tree(tree, leaves)
    read = eval(repr(mask), {}, leaves)
    truths = dict(zip(names, TRUTHS, strict=True))
    assert torch.equal(eval(repr(mask), {}, truths), _tree(tree, truths))
    assert repr(read) == repr(mask)
    assert read == mask


def _named(name: str) -> Any:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    mask.__name__ = name
    return mask


def _tree(tree: Any, leaves: dict[str, Any]) -> Any:
    if isinstance(tree, int):
        return leaves[f"leaf{tree}"]
    parts = [_tree(t, leaves) for t in tree[1:]]
    return ~parts[0] if tree[0] == "~" else parts[0] & parts[1] if tree[0] == "&" else parts[0] | parts[1]


def test_functions_on_either_side() -> None:
    causal, seen = get_mask("causal"), truth(get_mask("causal"))
    other = truth(odd)
    for mask, want in (
        (causal & odd, seen & other),
        (odd & causal, seen & other),
        (causal | odd, seen | other),
        (odd | causal, seen | other),
        (~(odd & causal) | near, ~(seen & other) | truth(near)),
    ):
        assert isinstance(mask, Mask)
        assert torch.equal(dense(mask), want)


def test_what_completion_offers() -> None:
    of_both = ["draw", "name", "params", "show", "to"]
    for value, more in (
        (get_mask("causal"), ["blocks", "dense", "inverse", "plan"]),
        (get_score("softcap", cap=2.0), []),
    ):
        assert [name for name in dir(value) if not name.startswith("_")] == sorted(of_both + more)


def test_a_mask_answers_as_the_calls_of_its_names_do(capsys: pytest.CaptureFixture[str]) -> None:
    mask = get_mask("sliding_window", window=2)
    assert torch.equal(mask.dense(3, 5, q_offset="last"), flexmasks.dense_mask(mask, 3, 5, q_offset="last"))
    assert mask.plan(300, batch=2).sparsity == flexmasks.plan(mask, 300, batch=2).sparsity
    assert mask.draw(9, block_size=3).svg() == flexmasks.draw(mask, 9, block_size=3).svg()
    for value in (mask, get_score("softcap", cap=2.0)):
        value.show(8, columns=40)
        shown = capsys.readouterr().out
        flexmasks.show(value, 8, columns=40)
        assert shown == capsys.readouterr().out != ""
    with pytest.raises(ValueError, match=r"^flexmasks.show: 4 queries, 6 keys: pass q_offset"):
        mask.show(4, 6)
    with pytest.raises(TypeError, match=r"^flexmasks.Mask.dense: missing a required argument: 'q_len'"):
        mask.dense()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (get_mask("causal"), "causal()"),
        (get_mask("local", left=3, right=1), "local(left=3, right=1)"),
        (get_mask("document", document_ids=torch.zeros(64, dtype=torch.int64)), "document(document_ids=int64[64])"),
        (get_mask("padding", kv_lens=np.array([3, 5])), "padding(kv_lens=(3, 5))"),
        (get_mask(odd), "odd"),
        (get_mask(near, window=3), "near(window=3)"),
        (get_mask(functools.partial(near, window=3)), "near"),
        (get_mask("causal") & odd & near, "causal() & odd & near"),
        (get_mask("causal") & (odd & get_mask(near)), "causal() & odd & near"),
        ((get_mask("causal") | odd) & near, "(causal() | odd) & near"),
        (get_mask("causal") & odd | near, "causal() & odd | near"),
        (~(get_mask("causal") & odd), "~(causal() & odd)"),
        (~get_mask("causal") & odd, "~causal() & odd"),
        (~~get_mask("causal"), "~~causal()"),
        (get_score("softcap", cap=30.0), "softcap(cap=30.0)"),
        (flexmasks.packed(get_mask("causal") | odd, [0, 4]), "packed(inner=causal() | odd, offsets=(0, 4))"),
    ],
)
def test_repr(mask: Any, text: str) -> None:
    assert repr(mask) == text


def test_others_show_themselves_in_one_line() -> None:
    ids = torch.arange(1000) // 300
    packed = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    blocks = flexmasks.get_mask("causal").blocks(1024)
    assert repr(blocks) == "Blocks(64 of 128 x 128, 28 empty, 8 partial, 28 full; 43.8% of the pairs skipped)"
    assert str(blocks).startswith("blocks of 128 x 128: 64, of which empty 28, partial 8, full 28; skipped: 43.8%\n")
    (entry,) = (e for e in flexmasks.list_scores() if e.name == "softcap")
    assert (
        repr(entry) == "Entry(score softcap(cap, exact=False): Scores bent into (-cap, cap): cap * tanh(score / cap).)"
    )
    plan = flexmasks.plan(packed, 1000, batch=2)
    what = "causal() & document(document_ids=int64[1000])"
    assert repr(plan) == f"Plan({what}, q_len=1000, kv_len=1000, batch=2 on cpu)"
    ids = [int(i) for i in ids]
    plan = flexmasks.plan("document", 1000, score="alibi", document_ids=ids, slopes=torch.ones(8))
    what = "document(document_ids=(0, 0, 0, ... 1000 values)) with score alibi(slopes=float32[8])"
    assert repr(plan) == f"Plan({what}, q_len=1000, kv_len=1000 on cpu)"


# --- equality ---

IDS = torch.tensor([0, 0, 1])
NAN = float("nan")
EQUAL: list[tuple[Any, Any]] = [
    (get_mask("causal"), get_mask("causal")),
    (get_mask("local", left=1, right=2), get_mask("local", right=2, left=1)),
    (get_mask("document", document_ids=IDS), get_mask("document", document_ids=IDS.clone())),
    (get_mask("document", document_ids=[0, 0, 1]), get_mask("document", document_ids=(0, 0, 1))),
    (get_mask("document", document_ids=[0, 0, 1]), get_mask("document", document_ids=np.array([0, 0, 1]))),
    (get_mask("document", document_ids=[[0, 1]]), get_mask("document", document_ids=np.array([[0, 1]]))),
    (get_mask("sliding_window", window=3), get_mask("sliding_window", window=np.int64(3))),
    (get_mask(odd), get_mask(odd)),
    (get_mask("causal") & odd, get_mask("causal") & odd),
    (get_mask("causal") & (get_mask(odd) & near), (get_mask("causal") & odd) & near),
    (~get_mask("causal"), ~get_mask("causal")),
    (get_score("softcap", cap=3.0), get_score("softcap", cap=3.0)),
    (get_score(lambda s, b, h, q, kv, *, c: s, c={"a": 1}), None),  # the score equals itself
    (get_mask(near, window=NAN), None),
]
UNEQUAL: list[tuple[Any, Any]] = [
    (get_mask("causal"), get_mask("full")),
    (get_mask("causal"), "causal"),
    (get_mask("packed", inner=get_mask("full"), offsets=[0, 3]), get_score("packed", inner=None, offsets=[0, 3])),
    (get_mask("local", left=1, right=2), get_mask("local", left=2, right=1)),
    (get_mask("document", document_ids=IDS), get_mask("document", document_ids=IDS + 1)),
    (get_mask("document", document_ids=IDS), get_mask("document", document_ids=IDS.int())),
    (get_mask("document", document_ids=IDS), get_mask("document", document_ids=IDS.to("meta"))),
    (
        get_mask("document", document_ids=IDS),
        get_mask("document", document_ids=[0, 0, 1]),
    ),  # a list has another kernel than a tensor
    (get_mask("document", document_ids=IDS), get_mask("document", document_ids=IDS[None])),
    (get_score("softcap", cap=3.0), get_score("softcap", cap=3)),
    (get_mask(near, window=1), get_mask(near, window=True)),
    (get_mask(near), get_mask(near, window=2)),  # a default that is given counts as given
    (get_mask("causal") & odd, odd & get_mask("causal")),  # the order of operands is kept
    (get_mask("causal") & odd, get_mask("causal") | odd),
    (get_mask("causal"), ~~get_mask("causal")),
]


@pytest.mark.parametrize(("a", "b"), EQUAL, ids=repr)
def test_equal(a: Any, b: Any) -> None:
    b = a if b is None else b
    assert a == b
    assert hash(a) == hash(b)
    assert len({a, b}) == 1


@pytest.mark.parametrize(("a", "b"), UNEQUAL, ids=repr)
def test_unequal(a: Any, b: Any) -> None:
    assert (a == b) is False
    assert (b == a) is False


def test_in_place_changes_change_equality_and_not_the_hash() -> None:
    ids = IDS.clone()
    a, b = get_mask("document", document_ids=ids), get_mask("document", document_ids=IDS)
    before = hash(a)
    ids.add_(1)
    assert a != b
    assert hash(a) == before


def test_lists_are_taken_as_they_were() -> None:
    ids = [0] * 64
    mask = get_mask("document", document_ids=ids)
    ids[0] = 1
    assert mask == get_mask("document", document_ids=[0] * 64)


def test_a_mask_called_by_itself_is_prepared_once_until_its_tensors_change(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Mask] = []
    resolve = Mask._resolve
    monkeypatch.setattr(
        Mask, "_resolve", lambda self, *args, **more: prepared.append(self) or resolve(self, *args, **more)
    )
    parents = torch.tensor([-1, 0, 1, 2])
    mask = get_mask("tree", parents=parents)
    for last in (2, 2, 2, 0, 0):
        if int(parents[3]) != last:
            parents[3] = last
        assert truth(mask, 4)[3].tolist() == [True, last == 2, last == 2, True]
    assert len(prepared) == 2


@pytest.mark.parametrize(
    "mask",
    [
        get_mask("causal"),
        get_mask("document", document_ids=torch.zeros(64, dtype=torch.int64)) & ~get_mask("causal"),
        flexmasks.packed(get_mask("causal") | get_mask(odd), torch.tensor([0, 10, 64])),
        get_mask(near, window=3),
    ],
    ids=repr,
)
def test_copies(mask: Mask) -> None:
    want = truth(mask)  # this call prepares the mask
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other is not mask
        assert repr(other) == repr(mask)
        assert torch.equal(dense(other), want)
        assert torch.equal(truth(other), want)
        if mask._definition.registered:
            assert other == mask
            assert hash(other) == hash(mask)


def test_deep_copies_have_tensors_of_their_own() -> None:
    mask = get_mask("padding", kv_lens=torch.tensor([3]))
    other = copy.deepcopy(mask)
    mask.params["kv_lens"].add_(10)
    assert (truth(mask)[0].sum(), truth(other)[0].sum()) == (13, 3)


class Holder(torch.nn.Module):
    """A module whose masks read the buffer of a module inside it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        inner = self.inner = Reader()
        shown, least, lock = inner.shown, 0, threading.Lock()
        shown_at = lambda kv: shown[kv] if lock else kv > 0  # noqa: E731 # nobody can copy a lock

        def again(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, depth: int = 1) -> Tensor:
            return again(b, h, q, kv, depth - 1) if depth else shown[kv]

        functions: dict[str, Callable[..., Tensor]] = {
            "module": self.inner,
            "method of a module": self.inner.forward,
            "partial": functools.partial(Reader.forward, self.inner),
            "own method": self.own,
            "closure": lambda b, h, q, kv: self.inner.shown[kv],
            "closure of a module": lambda b, h, q, kv: inner.shown[kv],
            "closure of a tensor": lambda b, h, q, kv: shown[kv] & (kv >= least),
            "function in a closure": lambda b, h, q, kv: shown_at(kv),
            "partial of a closure": functools.partial(lambda n, b, h, q, kv: shown[kv], 1),
            "recursion": again,
        }
        self.mask = get_mask(functions[how])
        self.both = get_mask("causal") & self.mask

    def own(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.inner.shown[kv]


class Reader(torch.nn.Module):
    shown: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shown", torch.ones(64, dtype=torch.bool))

    def forward(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.shown[kv]


@pytest.mark.parametrize(
    "how",
    [
        "module", "method of a module", "partial", "own method", "closure", "closure of a module",
        "closure of a tensor", "function in a closure", "partial of a closure", "recursion",
    ],
)  # fmt: skip
def test_masks_of_a_copied_module_read_the_copy(how: str) -> None:
    first = Holder(how)
    want = truth(first.mask).clone(), truth(first.both).clone()
    other = copy.deepcopy(first)
    other.inner.shown[3:] = False
    for mask, changed, before in zip((first.mask, first.both), (other.mask, other.both), want, strict=True):
        assert torch.equal(truth(mask), before)
        hidden = torch.arange(before.shape[-1]) >= 3
        assert torch.equal(truth(changed), before & ~hidden)
        assert torch.equal(dense(changed), before & ~hidden)


# --- as torch's mask_mods and score_mods ---


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_torch_mask_mods(name: str) -> None:
    n = 128
    mask = example("mask", name, n)
    for combined in (mask, ~mask | odd, get_mask("causal") & mask):
        want = truth(combined, n)
        assert torch.equal(create_mask(combined, 1, 1, n, n, device="cpu")[0, 0], want)
        made = create_block_mask(combined, 1, 1, n, n, device="cpu", BLOCK_SIZE=16)
        assert torch.equal(made.to_dense(), flexmasks.block_mask(combined, n, block_size=16).to_dense())
        assert torch.equal(dense(combined, n), want)
        assert torch.equal(dense(lambda b, h, q, kv, m=combined: m(b, h, q, kv), n), want)


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_torch_score_mods(name: str) -> None:
    q, k, v = torch.randn(3, 1, 1, LENGTH, 8)
    score = example("score", name)
    assert isinstance(score, Score)
    want = flexmasks.attention(q, k, v, score=score, backend="reference")
    index = torch.arange(3)
    assert score(torch.ones(3), index * 0, index * 0, index, index).shape == (3,)  # `packed` reads its offsets here
    assert torch.allclose(flex_attention(q, k, v, score_mod=score), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_compiled_by_torch() -> None:
    q, k, v = torch.randn(3, 2, 1, LENGTH, 16)
    mask = get_mask("sliding_window", window=20) & flexmasks.packed("causal", torch.tensor([0, 40, LENGTH]))
    made = create_block_mask(mask, 1, 1, LENGTH, LENGTH, device="cpu")
    out = torch.compile(flex_attention, fullgraph=True)(q, k, v, block_mask=made)
    assert torch.allclose(out, flexmasks.attention(q, k, v, mask=mask, backend="reference"), atol=1e-5)


def test_bare_calls_follow_their_tensors() -> None:
    offsets, lengths = torch.tensor([0, 10, LENGTH]), torch.tensor([20])
    mask = flexmasks.packed("causal", offsets) & get_mask("padding", kv_lens=lengths)
    for _ in range(3):
        fresh = flexmasks.packed("causal", offsets.tolist()) & get_mask("padding", kv_lens=lengths.tolist())
        assert torch.equal(create_mask(mask, 1, 1, LENGTH, LENGTH, device="cpu")[0, 0], truth(fresh))
        offsets[1] += 20
        lengths += 10


# --- parameters ---


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([i // 20 for i in range(LENGTH)]),
        torch.tensor([[i // 20 for i in range(LENGTH)]], dtype=torch.uint8),
        [i // 20 for i in range(LENGTH)],
        tuple(i // 20 for i in range(LENGTH)),
        np.arange(LENGTH) // 20,
        np.arange(LENGTH, dtype=np.int32)[None] // 20,
        [torch.tensor(i // 20) for i in range(LENGTH)],
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_a_tensor_may_be_given_as(ids: Any) -> None:
    n = torch.arange(LENGTH)
    want = n[:, None] // 20 == n // 20
    mask = get_mask("document", document_ids=ids)
    assert torch.equal(dense(mask), want)
    assert torch.equal(truth(mask), want)
    q, k, v = torch.randn(3, 1, 1, LENGTH, 8)
    out = flexmasks.attention(q, k, v, mask="document", document_ids=ids, backend="reference")
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, want), atol=1e-5)


@pytest.mark.parametrize("window", [3, np.int32(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)], ids=repr)
def test_what_a_number_may_be_given_as(window: Any) -> None:
    want = dense("local", left=3, right=0)
    for mask in (get_mask("sliding_window", window=window), get_mask("local", left=window, right=0)):
        assert torch.equal(dense(mask), want)
        assert torch.equal(truth(mask), want)
        assert torch.equal(dense(mask & near), want & truth(near))


class Band:
    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= self.window

    def method(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self(b, h, q, kv)

    @staticmethod
    def static(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= 5


def positional(window: int, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() <= window


def annotated(b: Any, h: Any, q: Any, kv: Any, *, window: Annotated[int | Tensor, "int in 0.. | int[]"]) -> Any:
    return (q - kv).abs() <= window


@pytest.mark.parametrize(
    ("function", "params"),
    [
        (lambda b, h, q, kv: (q - kv).abs() <= 5, {}),
        (lambda b, h, q, kv, w=5: (q - kv).abs() <= w, {}),
        (lambda b, h, q, kv, *, window=5: (q - kv).abs() <= window, {}),
        (lambda *indices: (indices[2] - indices[3]).abs() <= 5, {}),
        (near, {"window": 5}),
        (near, {"window": np.int64(5)}),
        (annotated, {"window": 5}),
        (annotated, {"window": torch.tensor(5)}),
        (functools.partial(near, window=5), {}),
        (functools.partial(near, window=3), {"window": 5}),
        (functools.partial(annotated, window=5), {}),
        (functools.partial(positional, 5), {}),
        (Band(5), {}),
        (Band(3).static, {}),
        (Band(5).method, {}),
    ],
)
def test_what_a_function_may_be(function: Any, params: dict[str, Any]) -> None:
    n = torch.arange(LENGTH)
    want = (n[:, None] - n).abs() <= 5
    assert torch.equal(dense(function, **params), want)
    assert torch.equal(dense(get_mask(function, **params) & get_mask("full")), want)
    assert torch.equal(flexmasks.block_mask(function, LENGTH, block_size=1, **params).to_dense()[0, 0].bool(), want)
    q, k, v = torch.randn(3, 1, 1, LENGTH, 8)
    out = flexmasks.attention(q, k, v, mask=function, backend="reference", **params)
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, want), atol=1e-5)


@pytest.mark.slow
def test_a_default_tensor_is_not_kept_alive() -> None:
    import gc
    import weakref

    def make() -> Any:
        ends = torch.tensor([5])
        return (lambda b, h, q, kv, *, ends=ends: kv < ends[b]), weakref.ref(ends)

    function, alive = make()
    assert dense(function).sum() == 5 * LENGTH
    flexmasks.block_mask(function, LENGTH, batch=1)
    del function
    gc.collect()
    assert alive() is None


def test_no_parameter_has_the_name_of_an_argument_of_attention() -> None:
    """Such a parameter could not be given by name."""
    taken = set(inspect.signature(flexmasks.attention).parameters) - {"params"}
    for kind, entries in (("mask", flexmasks.list_masks()), ("score", flexmasks.list_scores())):
        for entry in entries:
            assert not taken & set(definitions.definition(kind, entry.name).parameters), entry.name


def test_a_cell_that_runs_again_replaces_its_mask() -> None:
    def cell(step: int) -> None:
        @flexmasks.register_mask()
        def of_a_cell(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv % step == 0

    cell(2)
    before = flexmasks.get_mask("of_a_cell")
    cell(3)
    assert flexmasks.dense_mask("of_a_cell", 4)[0, 0, 0].tolist() == [True, False, False, True]
    assert flexmasks.dense_mask(before, 4)[0, 0, 0].tolist() == [True, False, True, False]
    assert len([m for m in flexmasks.list_masks() if m.name == "of_a_cell"]) == 1

    def of_a_cell(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv >= q

    with pytest.raises(ValueError, match="registered already"):
        flexmasks.register_mask()(of_a_cell)


def test_arrays_of_numpy_beside_masks() -> None:
    """NumPy takes no part of an array for a mask: the error tells of the whole array."""
    causal, visible = flexmasks.get_mask("causal"), np.ones((4, 4), bool)
    for combined in (operator.and_, operator.or_):
        with pytest.raises(TypeError, match=r"got a NumPy array bool\[4, 4\]; a dense mask `m` is mask=torch"):
            combined(visible, causal)


def test_a_bare_call_with_a_sequence_that_is_no_tensor() -> None:
    index = torch.tensor(0)
    with pytest.raises(ValueError, match="flexmasks mask 'document': `document_ids` cannot be made a tensor"):
        get_mask("document", document_ids=[[0, 1], [0]])(index, index, index, index)


def test_names_where_masks_are_combined() -> None:
    causal = flexmasks.get_mask("causal")
    assert causal & "full" == causal & flexmasks.get_mask("full")
    assert "full" | causal == flexmasks.get_mask("full") | causal
    with pytest.raises(TypeError, match="mask 'document' needs `document_ids`"):
        causal & "document"
    window = flexmasks.get_mask("sliding_window", window=3)
    assert flexmasks.packed("sliding_window", [0, 4, 10], window=3) == flexmasks.packed(window, [0, 4, 10])


@pytest.mark.usefixtures("quick_kernels")
def test_a_function_of_the_library_given_as_one_is_not_the_registered_mask() -> None:
    from flexmasks.masks.vertical_slash import vertical_slash

    q, k, v = torch.randn(3, 1, 1, 8, 16)
    tables = {"vertical": torch.ones(9, dtype=torch.bool), "slash": torch.ones(9, dtype=torch.bool)}
    flexmasks.attention(q, k, v, mask=flexmasks.get_mask(vertical_slash, **tables))
    with pytest.raises((ValueError, TypeError), match="vertical_slash"):
        flexmasks.attention(q, k, v, mask="vertical_slash", **tables)


def test_values_inside_sequences_imply_heads_alone() -> None:
    score = flexmasks.packed(flexmasks.get_score("alibi", slopes=[0.5, 0.25, 0.125]), [0, 4, 12])
    mask = flexmasks.packed(flexmasks.get_mask("document", document_ids=[[0] * 8] * 2), [0, 4, 12])
    assert score._implied_size("H") == 3
    assert [mask._implied_size(name) for name in ("B", "S", "H")] == [None, None, None]


def test_a_value_learns_if_one_inside_it_does() -> None:
    for learns in (False, True):
        score = flexmasks.get_score("alibi", slopes=torch.rand(2, requires_grad=learns))
        assert flexmasks.packed(score, [0, 4, 12])._learns() == learns


def test_masks_are_no_tensors_to_torch() -> None:
    q, mask = torch.randn(1, 1, 4, 8), flexmasks.get_mask("causal")
    for value, kind in ((mask, "Mask"), (flexmasks.plan(mask, 4), "Plan")):
        with pytest.raises(TypeError, match=rf"takes tensors, got a {kind}; flexmasks.dense_mask makes one"):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, value)
    assert repr(torch.ones(4, 4, dtype=torch.bool) & mask) == "dense(visible=bool[4, 4]) & causal()"
    assert (q == mask) is False


# --- numbers of NumPy ---

_QKV = torch.randn(3, 1, 2, 16, 16)
_ROWS = _QKV[0, 0].transpose(0, 1)
_POOL = torch.randn(2, 16, 2, 16)
_SCORES = torch.randn(1, 2, 16, 16)
_HIDDEN = torch.rand(16, 16) < 0.5
NUMBERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "scale": (0.25, lambda n: flexmasks.attention(*_QKV, mask="causal", scale=n)),
    "scale an int": (2, lambda n: flexmasks.attention(*_QKV, mask="causal", scale=n)),
    "q_offset": (3, lambda n: flexmasks.attention(*_QKV, mask="causal", q_offset=n)),
    "a mask's int": (3, lambda n: flexmasks.attention(*_QKV, mask="sliding_window", window=n)),
    "a score's float": (2.5, lambda n: flexmasks.attention(*_QKV, score="softcap", cap=n)),
    "scale of varlen": (0.25, lambda n: flexmasks.varlen_attention(_ROWS, _ROWS, _ROWS, [0, 16], scale=n)),
    "most queries": (16, lambda n: flexmasks.varlen_attention(_ROWS, _ROWS, _ROWS, [0, 16], max_seqlen_q=n)),
    "scale of pages": (0.25, lambda n: flexmasks.paged_attention(_QKV[0], _POOL, _POOL, [[1, 0]], [20], scale=n)),
    "q_offset of pages": (4, lambda n: flexmasks.paged_attention(_QKV[0], _POOL, _POOL, [[1, 0]], [20], q_offset=n)),
    "explain": (0.25, lambda n: str(flexmasks.explain(*_QKV, mask="causal", scale=n))),
    "scale of a softmax": (0.25, lambda n: flexmasks.masked_softmax(_SCORES, mask="causal", scale=n)),
    "q_offset of a softmax": (3, lambda n: flexmasks.masked_softmax(_SCORES, mask="causal", q_offset=n)),
    "Megatron's scale": (0.25, lambda n: flexmasks.scaled_masked_softmax(_SCORES, _HIDDEN, n)),
    "lengths": (48, lambda n: flexmasks.block_mask("causal", n, n, batch=n, heads=n, block_size=n).to_dense()),
    "a dense mask's lengths": (7, lambda n: flexmasks.dense_mask("causal", n, n, batch=n, heads=n, q_offset=n)),
    "blocks": (300, lambda n: str(flexmasks.get_mask("causal").blocks(n, n))),
    "a pair of block sizes": (64, lambda n: flexmasks.block_mask("causal", 128, block_size=(n, n)).BLOCK_SIZE),
    "a plan": (16, lambda n: repr(flexmasks.plan("causal", n, n, batch=n, heads=n))),
    "a picture": (40, lambda n: flexmasks.draw("causal", n, n, batch=n, heads=n, b=n - 1, h=n - 1).text()),
    "a canvas": (4, lambda n: flexmasks.orders.tile_order((n, n), (n, n))),
    "Morton's canvas": (4, lambda n: flexmasks.orders.morton_order([n, n])),
    "page_size": (4, lambda n: flexmasks.dense_mask(flexmasks.paged("causal", [[1, 0]], [7], n), 4, 8, q_offset=0)),
    "q_start": (4, lambda n: flexmasks.dense_mask(flexmasks.packed("causal", [0, 8], q_start=n), 8, 8)),
}


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_numbers(name: str) -> None:
    """They are taken wherever a number is, also as arrays without dimensions."""
    number, call = NUMBERS[name]
    want = call(number)
    for dtype in ("int16", "int64") if isinstance(number, int) else ("float32", "float64"):
        for same in (np.dtype(dtype).type(number), np.array(number, dtype)):
            got = call(same)
            assert torch.equal(got, want) if isinstance(want, Tensor) else got == want
