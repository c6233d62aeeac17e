"""`flexmasks.compare` and `check` for all lengths and parameters: what is proved, refuted and not decided."""

from __future__ import annotations

import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from functions import short_and_campaign
from torch import Tensor

import flexmasks
from flexmasks import get_mask, masks
from flexmasks.__main__ import main
from flexmasks.integrations.huggingface.recognition import Positions, recognized

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("islpy", reason="islpy, which proves, is not installed")
pytest.importorskip("z3", reason="z3, which proves, is not installed")


def asked(a: Any, b: Any, parameters: Mapping[str, Any] | None = None, **params: Any) -> flexmasks.Proof:
    return flexmasks.compare(a, b, lengths="all", parameters=parameters, **params)


# --- random pairs, against dense masks ---

LENGTH = 40
NAMED: dict[str, dict[str, tuple[int, int]]] = {  # masks, and the parameters that are drawn
    "causal": {},
    "full": {},
    "inverse_causal": {},
    "sliding_window": {"window": (0, 12)},
    "local": {"left": (0, 9), "right": (0, 9)},
    "band": {"lower": (-9, 5), "upper": (-3, 9)},
    "chunked": {"chunk": (1, 9), "start": (-4, 9)},
    "chunked_causal": {"chunk": (1, 9), "start": (-4, 9)},
    "block_causal": {"block": (1, 9)},
    "prefix_lm": {"prefix_len": (0, 20)},
    "sink_window": {"sinks": (0, 5), "window": (0, 9)},
    "dilated_window": {"window": (0, 12), "dilation": (1, 5)},
    "strided": {"stride": (1, 7)},
    "fixed": {"stride": (1, 7), "summary": (0, 3)},
    "longformer": {"window": (0, 7), "tokens": (0, 5)},
    "temporal_window": {"frame": (1, 7), "window": (0, 3), "tokens": (0, 4)},
    "eagle3": {"length": (1, 20)},
    "block_diffusion": {"length": (1, 20), "block": (1, 7)},
}
WRITTEN = [
    *("(q + h) % {n} < {k}", "abs(q - kv) < {k}", "torch.where(q > {k}, q - kv, kv - q) <= {n}", "b <= kv"),
    *("(q // {n} - kv // {m}).clamp(-1, 2) == 0", "torch.minimum(q, kv + {k}) % {n} != 1", "-q + kv < -{k}"),
    *("(q - kv) % -{n} == -1", "(kv - q) // -{n} <= {k}", "(q >= kv).int() + (q % {n} == 0) > 0", "h * {k} + kv <= q"),
    *("(q < {k}) == (kv < {n})", "~(kv > q) ^ (q > {k})", "2 * q - 3 * kv <= {k}", "torch.max(q, number) - kv >= {n}"),
    *("torch.logical_and(kv % {n}, q >= kv)", "(q > {k}) + (kv > {n})", "torch.where(q % {n} == 0, kv < {k}, True)"),
]
OF_TABLES = ["doc[q] == doc[kv]", "doc[kv] <= doc[q]", "kv < lens[b]", "(doc[q] // {n} == doc[kv] // {n}) & (kv <= q)"]
PADDING = torch.tensor([0, 3])
KEPT = torch.rand(2, 30, generator=torch.Generator().manual_seed(1)) < 0.8
TABLES = {"torch": torch, "number": torch.tensor(5), "doc": torch.arange(LENGTH) // 7, "lens": torch.tensor([9, 30])}
Tree = tuple[Any, ...]  # ("&", tree, tree), ("|", tree, tree), ("~", tree), ("named", name, params), ("written", code)


def drawn(draw: random.Random, depth: int, with_tables: bool) -> Tree:
    if depth and draw.random() < 0.75:
        operation = draw.choice("&|~")
        return operation, *(drawn(draw, depth - 1, with_tables) for _ in range(1 if operation == "~" else 2))
    if draw.random() < 0.5:
        name = draw.choice(list(NAMED))
        return "named", name, {n: draw.randint(*limits) for n, limits in NAMED[name].items()}
    code = draw.choice(OF_TABLES if with_tables and draw.random() < 0.6 else WRITTEN)
    return "written", code.format(n=draw.randint(1, 7), m=draw.randint(1, 7), k=draw.randint(0, 9))


def made(tree: Tree, values: Mapping[str, Any]) -> flexmasks.Mask:
    """Return the mask of a tree, with other values of named parameters and tables."""
    if tree[0] == "named":
        return get_mask(tree[1], **{n: values.get(n, v) for n, v in tree[2].items()})
    if tree[0] == "written":
        return get_mask(eval(f"lambda b, h, q, kv: {tree[1]}", TABLES | {n: values[n] for n in TABLES if n in values}))
    parts = [made(part, values) for part in tree[1:]]
    return ~parts[0] if tree[0] == "~" else parts[0] & parts[1] if tree[0] == "&" else parts[0] | parts[1]


def rewritten(draw: random.Random, tree: Tree) -> Tree:
    """Write the same mask in another way."""
    if tree[0] == "written":
        return ("~", ("written", f"({tree[1]}) == False")) if draw.random() < 0.3 else tree
    if tree[0] == "named":
        name, own = tree[1:]
        if name == "sliding_window":
            return "&", ("named", "causal", {}), ("named", "band", {"lower": -own["window"], "upper": 3})
        if name == "chunked_causal":
            return "&", ("named", "causal", {}), ("named", "chunked", own)
        return tree
    parts = [rewritten(draw, part) for part in tree[1:]]
    if tree[0] == "~":
        return tree[0], *parts
    return draw.choice([(tree[0], *parts[::-1]), ("~", ("&|"[tree[0] == "&"], *(("~", part) for part in parts)))])


def changed(draw: random.Random, tree: Tree) -> Tree:
    """Change one number by one, if there is one."""
    if tree[0] == "named" and tree[2]:
        name = draw.choice(list(tree[2]))
        low, high = NAMED[tree[1]][name]
        return *tree[:2], tree[2] | {name: min(high, max(low, tree[2][name] + draw.choice([-1, 1])))}
    if tree[0] in "&|~":
        place = draw.randrange(1, len(tree))
        return *tree[:place], changed(draw, tree[place]), *tree[place + 1 :]
    return tree


def limits_of(tree: Tree) -> dict[str, list[tuple[int, int]]]:
    """Return the limits within which each parameter of a tree is drawn, by each mask that takes it."""
    if tree[0] == "named":
        return {n: [limits] for n, limits in NAMED[tree[1]].items()}
    found: dict[str, list[tuple[int, int]]] = {}
    for part in () if tree[0] == "written" else tree[1:]:
        for name, limits in limits_of(part).items():
            found[name] = found.get(name, []) + limits
    return found


def check_pair(seed: int, with_tables: bool) -> str:
    draw = random.Random(seed)
    a = drawn(draw, 2, with_tables)
    other = drawn(draw, 1, with_tables)
    b = draw.choice([other, ("&", a, other), rewritten(draw, a), rewritten(draw, changed(draw, a))])
    box: dict[str, tuple[int, int | None]] = {}
    for name, limits in limits_of(("&", a, b)).items():
        if draw.random() < 0.35:
            low, high = max(x for x, _ in limits), min(x for _, x in limits)
            box[name] = low, draw.choice([high, None])
    proof = asked(made(a, {}), made(b, {}), box)
    samples = [{n: draw.randint(x, x + 12 if y is None else y) for n, (x, y) in box.items()} for _ in range(5)]
    case = seed, a, b, box, proof

    def dense(tree: Tree, values: Mapping[str, int], n: int = LENGTH) -> Tensor:
        return flexmasks.dense_mask(made(tree, values), n, batch=2, heads=2).expand(2, 2, n, n)

    for values in samples:
        shown_by_a, shown_by_b = dense(a, values), dense(b, values)
        assert not (proof.equal and (shown_by_a ^ shown_by_b).any()), (case, values)
        assert not (proof.implies and (shown_by_a & ~shown_by_b).any()), (case, values)
        assert not (proof.implied and (shown_by_b & ~shown_by_a).any()), (case, values)
    if proof.equal is False:
        (b_, h, q, kv), found = proof.first, dict(proof.parameters)
        there = [made(tree, found)(*map(torch.tensor, proof.first)) for tree in (a, b)]
        assert there[0] != there[1], case
        assert proof.example.only_a + proof.example.only_b >= 1, case
        n = max(q, kv) + 1
        if not with_tables:
            least = flexmasks.compare(made(a, found), made(b, found), n, batch=b_ + 1, heads=h + 1)
            assert least.first == proof.first, case
        if not with_tables and n > 1:
            for values in [found, *samples]:
                assert torch.equal(dense(a, values, n - 1), dense(b, values, n - 1)), (case, values)
    return proof.verdict


# Others each day; a failure names its seed.
FIRST = int(os.environ.get("FLEXMASKS_SEED", "0")) * 1000


@short_and_campaign(40, 1000)
def test_random_pairs_without_tables(examples: int) -> None:
    verdicts = Counter(check_pair(seed, False) for seed in range(FIRST, FIRST + examples))
    assert verdicts["proved"] > examples / 5
    assert verdicts["refuted"] > examples / 5
    assert verdicts["not decided"] <= examples / 20


@short_and_campaign(20, 500)
def test_random_pairs_with_tables(examples: int) -> None:
    verdicts = Counter(check_pair(seed, True) for seed in range(FIRST, FIRST + examples))
    assert verdicts["proved"] > examples / 10
    assert verdicts["refuted"] > examples / 10
    assert verdicts["not decided"] <= examples / 10


# --- what `check` finds ---


def wrong_pairs(kind: str, shown: Tensor) -> Tensor:
    """Return the pairs that show a finding in a mask [n, n]; for rows and columns those of the first key or query."""
    n = torch.arange(len(shown))
    first_key, first_query = n == 0, (n == 0)[:, None]
    return {
        "sees the future": shown & (n > n[:, None]),
        "does not see itself": ~shown & (n == n[:, None]),
        "sees nothing": ~shown.any(1, keepdim=True) & first_key,
        "seen by nobody": ~shown.any(0) & first_query,
    }[kind]


def check_findings(seed: int) -> None:
    draw = random.Random(seed)
    tree = drawn(draw, 2, False)
    box = {name: limits[0] for name, limits in limits_of(tree).items() if len(limits) == 1 and draw.random() < 0.3}
    found = flexmasks.check(made(tree, {}), lengths="all", parameters=box)
    samples = [{n: draw.randint(*limits) for n, limits in box.items()} for _ in range(3)]
    undecided = [f.words for f in found if f.kind == "not decided"]
    for kind in ("sees the future", "does not see itself", "sees nothing", "seen by nobody"):
        finding, case = found.of(kind), (seed, tree, box, found)
        if any(words.startswith(kind) for words in undecided):
            continue
        least = 14 if finding is None else int(re.search(r"q_len=(\d+)", finding.words)[1])
        for values in samples:  # no finding is missed, and none is at a smaller length
            for n in range(1, min(least, 14)):
                dense = flexmasks.dense_mask(made(tree, values), n, batch=1, heads=1)[0, 0]
                assert not wrong_pairs(kind, dense).any(), (kind, n, values, case)
        if finding is not None:
            own = {n: int(value) for n, value in re.findall(r"(\w+)=(-?\d+)", finding.words) if n in box}
            b, h, q, kv = finding.pair
            dense = flexmasks.dense_mask(made(tree, own), least, batch=b + 1, heads=h + 1)[-1, -1]
            assert wrong_pairs(kind, dense)[q, kv], (kind, case)


@short_and_campaign(8, 500)
def test_findings_of_random_masks(examples: int) -> None:
    for seed in range(FIRST, FIRST + examples):
        check_findings(seed)


def test_findings_for_all_lengths() -> None:
    assert not flexmasks.check("causal", lengths="all")
    assert not flexmasks.check("sliding_window", lengths="all", parameters={"window": (0, None)})
    future = flexmasks.check("prefix_lm", lengths="all", parameters={"prefix_len": (0, None)}, forbid="sees the future")
    assert [(f.kind, f.severity, f.pair) for f in future] == [("sees the future", "error", (0, 0, 0, 1))]
    assert "q_len=2, prefix_len=2" in future[0].words
    later = flexmasks.check(lambda b, h, q, kv: kv <= q - 3, lengths="all")
    assert {f.kind: f.pair for f in later} == {
        "does not see itself": (0, 0, 0, 0),
        "sees nothing": (0, 0, 0, 0),
        "seen by nobody": (0, 0, 0, 0),
    }


def test_documents_that_are_crossed() -> None:
    causal, own = masks.causal(), masks.document(document_ids=IDS)
    (crossed,) = flexmasks.check(causal, lengths="all", document_ids=IDS)
    assert (crossed.kind, crossed.severity, crossed.pair) == ("crosses a document", "error", (0, 0, 1, 0))
    assert not flexmasks.check(causal & own, lengths="all", document_ids=IDS)
    by_itself = flexmasks.check("document", lengths="all", document_ids=IDS)
    assert [(f.kind, f.pair) for f in by_itself] == [("sees the future", (0, 0, 0, 1))]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "sliding_window", "--length", "all", "--parameters", "{'window': (0, None)}"]) == 0
    assert capsys.readouterr().out == "nothing found\n"


def test_findings_that_are_not_decided() -> None:
    kept = flexmasks.check(masks.key_padding(attention_mask=KEPT), lengths="all", forbid="not decided")
    assert [f.kind for f in kept.errors] == ["not decided", "not decided"]  # whether a row or a column is empty
    canvas = flexmasks.check(masks.natten(height=4, width=4, kernel=3), lengths="all")
    assert {f.kind for f in canvas} == {"not decided"}
    assert "the canvas does not match the length" in canvas[0].words
    (formula,) = flexmasks.check(lambda b, h, q, kv: q.float() >= kv, lengths="all")
    assert (formula.kind, formula.pair) == ("not decided", None)


# --- known answers ---


def of(n: Callable[[Any], flexmasks.Mask]) -> Callable[..., Any]:
    """Return a function of a parameter `n` that shows what the mask of `n` shows."""

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, n: int) -> Tensor:
        return make(n)(b, h, q, kv)

    make = n
    return mask


IDS = torch.tensor([0, 0, 1, 1, 1, 2])
ANY = {"n": (None, None)}
FROM_0, FROM_1 = {"n": (0, None)}, {"n": (1, None)}
SAME: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "a window of all": ("causal", "sliding_window", {"window": ("q_len", None)}),
    "blocks of one": ("causal", get_mask("block_causal", block=1), {}),
    "one block": ("full", "block_causal", {"block": ("q_len", None)}),
    "no prefix": ("causal", "prefix_lm", {"prefix_len": (0, 0)}),
    "a prefix of all": ("full", "prefix_lm", {"prefix_len": ("q_len", None)}),
    "a stride of one": ("causal", get_mask("strided", stride=1), {}),
    "one side": (of(lambda n: masks.sliding_window(window=n)), of(lambda n: masks.local(left=n, right=0)), FROM_0),
    "no sinks": (
        of(lambda n: masks.sliding_window(window=n)),
        of(lambda n: masks.sink_window(sinks=0, window=n)),
        FROM_0,
    ),
    "no gaps": (
        of(lambda n: masks.dilated_window(window=n, dilation=1)),
        of(lambda n: masks.local(left=n, right=n)),
        FROM_0,
    ),
    "no summary": (of(lambda n: masks.fixed(stride=n, summary=0)), of(lambda n: masks.chunked_causal(chunk=n)), FROM_1),
    "chunks": ("chunked_causal", lambda b, h, q, kv, *, chunk: (kv <= q) & (kv >= q - q % chunk), {"chunk": (1, None)}),
    "documents by chunks": (
        "chunked_causal",
        lambda b, h, q, kv, *, chunk: (q >= kv) & (q // chunk == kv // chunk),
        {"chunk": (1, None), "start": (0, 0)},
    ),
    "a chunk later": (
        of(lambda n: masks.chunked(chunk=6, start=n)),
        of(lambda n: masks.chunked(chunk=6, start=n + 6)),
        ANY,
    ),
    "unlimited": (
        of(lambda n: masks.band(lower=-n, upper=n) & "causal"),
        of(lambda n: masks.sliding_window(window=n)),
        ANY | FROM_0,
    ),
    "documents": (masks.document(document_ids=IDS), lambda b, h, q, kv: ~(IDS[q] != IDS[kv]), {}),
    "rows of documents": (
        masks.document(document_ids=IDS[None]),
        lambda b, h, q, kv: IDS[None][b][q] - IDS[None][b, kv] == 0,
        {},
    ),
    "ids that rise": (
        masks.document(document_ids=IDS) & "causal",
        lambda b, h, q, kv: (kv <= q) & (IDS[q] <= IDS[kv]),
        {"document_ids": "increasing"},
    ),
    "two lists": (["causal", masks.document(document_ids=IDS)], masks.document(document_ids=IDS) & "causal", {}),
}


@pytest.mark.parametrize("name", SAME)
def test_masks_that_are_the_same(name: str) -> None:
    a, b, box = SAME[name]
    proof = asked(a, b, box)
    assert (proof.verdict, proof.implies, proof.implied, proof.first) == ("proved", True, True, None), proof
    assert all(x in repr(proof) for x in box)


DIFFERENT: dict[str, tuple[Any, Any, dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "a window of W keys": (
        "sliding_window",
        lambda b, h, q, kv, *, window: (kv <= q) & (q - kv < window),
        {"window": (1, None)},
        (0, 0, 1, 0),
        {"window": 1},
    ),
    "one far pair": ("causal", lambda b, h, q, kv: (kv <= q) & ~((q == 23) & (kv == 11)), {}, (0, 0, 23, 11), {}),
    "a head and a row of the batch": (
        "causal",
        lambda b, h, q, kv: kv <= q + (b == 2) * (h == 1),
        {},
        (2, 1, 0, 1),
        {},
    ),
    "below zero": (
        lambda b, h, q, kv: kv == q,
        "band",
        {"lower": (None, -1), "upper": (0, 0)},
        (0, 0, 1, 0),
        {"lower": -1},
    ),
    "blocks by a symbol": ("causal", "block_causal", {"block": (3, 5)}, (0, 0, 0, 1), {"block": 3}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_smallest_difference(name: str) -> None:
    a, b, box, first, parameters = DIFFERENT[name]
    proof = asked(a, b, box)
    assert (proof.verdict, proof.first) == ("refuted", first), proof
    assert parameters.items() <= proof.parameters.items()
    length = max(8, first[2] + 1, first[3] + 1)
    assert proof.example.draw().text(80).count("\n") >= length
    assert f"q={first[2]}, kv={first[3]}" in repr(proof)


def test_tables_of_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    proof = asked(masks.padding(kv_lens=[5, 6]) & "causal", "causal")
    assert (proof.verdict, proof.implies, proof.implied, proof.first) == ("refuted", True, False, (0, 0, 0, 0))
    assert proof.parameters["kv_lens"].tolist() == [0]
    proof.show()
    assert "8 queries (down) x 8 keys" in capsys.readouterr().out
    at_least_two = asked(masks.padding(kv_lens=[5, 6]) & "causal", "causal", {"kv_lens": (2, None)})
    assert at_least_two.first == (0, 0, 2, 2)
    assert at_least_two.parameters["kv_lens"].tolist() == [2]
    assert "kv_lens in 2.." in repr(at_least_two)


def test_tensors_with_equal_values_are_the_same_table() -> None:
    a, other = masks.document(document_ids=IDS), IDS.clone()
    assert asked(a, lambda b, h, q, kv: other[q] == other[kv]).equal
    other[0] = 9
    assert asked(a, lambda b, h, q, kv: other[q] == other[kv]).equal is False


def test_a_name_is_one_value_in_all_masks() -> None:
    both = masks.sliding_window(window=3) | masks.dilated_window(window=3, dilation=2)
    written = masks.sliding_window(window=9) | masks.dilated_window(window=9, dilation=2)
    assert asked(both, written, {"window": (0, None)}).equal
    assert asked(both, written).equal is False


UNDECIDED: dict[str, tuple[Any, Any, str]] = {
    "floats": ("causal", lambda b, h, q, kv: q * 0.5 >= kv, "only whole numbers are read, not float"),
    "bits": ("causal", lambda b, h, q, kv: (q & 7) >= kv, "`and_` of such values is not read"),
    "tensors": ("causal", lambda b, h, q, kv: q.float() >= kv, "cannot be read as a formula"),
    "narrow": (
        (lambda ids: lambda b, h, q, kv: ids[q] - ids[kv] > 0)(IDS.to(torch.uint8)),
        lambda b, h, q, kv: q < 0,
        "read in bool, int32 and int64",
    ),
    "a negative index": ("causal", lambda b, h, q, kv: IDS[q - kv] > 0, "may read a table at a negative index"),
    "a division": ("causal", lambda b, h, q, kv: q // (kv - 3) > 0, "may divide by 0"),
    "another maximum": ("causal", lambda b, h, q, kv: torch.max(q) >= kv, "`maximum` of such values"),
    "computed tables": (
        masks.bidirectional_spans(span_ids=[0, 0, -1]),
        "causal",
        "the values of a table that a mask computes",
    ),
    "a canvas": (masks.natten(height=4, width=4, kernel=3), "causal", "the canvas does not match the length"),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_is_not_decided(name: str) -> None:
    a, b, reason = UNDECIDED[name]
    proof = asked(a, b)
    assert (proof.verdict, proof.equal, proof.example) == ("not decided", None, None), proof
    assert reason in proof.reason, proof
    assert reason in repr(proof)


def test_divisors_that_are_symbols() -> None:
    """Python's quotients are rounded down, and its remainders have the sign of the divisor."""

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, n: int) -> Tensor:
        return ((q - kv) // n <= -1) & ((kv - q) % n >= n // 2)

    below = asked(mask, lambda b, h, q, kv: ((kv - q) // 3 <= -1) & ((q - kv) % 3 <= 2), {"n": (-3, -3)})
    assert below.equal, below
    above = asked(mask, lambda b, h, q, kv: (q < kv) & ((kv - q) % 4 > 1), {"n": (4, 4)})
    assert above.equal, above
    assert "may divide by 0" in asked(mask, "causal", {"n": (-3, 3)}).reason


def test_values_that_a_specification_excludes() -> None:
    lens = torch.tensor([3, 4])
    padding = masks.padding(kv_lens=lens)
    assert asked(padding, padding | (lambda b, h, q, kv: lens[b] < 0)).equal
    absolute = lambda b, h, q, kv, *, prefix_len: (kv <= q) | (kv < abs(prefix_len))  # noqa: E731
    assert asked("prefix_lm", absolute, {"prefix_len": (-9, 9)}).equal


def test_values_that_rise() -> None:
    box = {"document_ids": "increasing"}
    proof = asked(masks.document(document_ids=IDS) & "causal", "causal", box)
    assert (proof.verdict, proof.implies, proof.first) == ("refuted", True, (0, 0, 1, 0))
    ids = proof.parameters["document_ids"].tolist()
    assert ids == sorted(ids)
    between = lambda b, h, q, kv: (kv <= q) & (IDS[q] == IDS[kv]) & (IDS[(q + kv) // 2] == IDS[q])  # noqa: E731
    assert asked(masks.document(document_ids=IDS) & "causal", between, box).equal


def test_large_numbers() -> None:
    assert asked("full", lambda b, h, q, kv: q < 2**70, {"q_len": (1, 2**65)}).equal
    assert asked("full", lambda b, h, q, kv: q < 2**70).verdict == "not decided"  # a tensor holds no such position


def test_sums_of_booleans_are_booleans() -> None:
    twice = asked("causal", lambda b, h, q, kv: ((q >= kv) + (q >= kv)) == 1)
    assert twice.equal
    assert asked("causal", lambda b, h, q, kv: ((q >= kv).int() + (q >= kv)) == 2).equal


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a length": ({"q_len": 8}, "pass none of them, got `q_len`"),
    "another word": ({"lengths": "every"}, "got lengths='every'"),
    "an unknown name": ({"parameters": {"windo": (1, 2)}}, "names `windo`; the parameters of these masks are `window`"),
    "a number": ({"parameters": {"window": 3}}, r"has limits, such as \{'window': \(0, None\)\}"),
    "another name": ({"parameters": {"window": (0, "size")}}, "an int, None, 'q_len' or the name of another"),
    "no values": ({"parameters": {"window": (5, 3)}}, "leaves no values"),
    "none of the specification": ({"parameters": {"window": (-5, -1)}}, "leaves no values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    given, words = WRONG[name]
    with pytest.raises(ValueError, match=rf"^flexmasks\.compare: .*{words}"):
        flexmasks.compare("causal", masks.sliding_window(window=3), **{"lengths": "all", **given})
    with pytest.raises(ValueError, match="which have no lengths of their own, got a BlockMask"):
        flexmasks.compare("causal", flexmasks.block_mask("causal", 128), lengths="all")


def test_without_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = masks.document(document_ids=IDS), lambda b, h, q, kv: IDS[kv] == IDS[q]
    monkeypatch.setitem(sys.modules, "z3", None)
    assert asked("causal", masks.strided(stride=1)).equal
    assert "z3 of pip install 'flexmasks[proofs]' may decide it" in asked(*tables).reason
    monkeypatch.setitem(sys.modules, "islpy", None)
    with pytest.raises(ImportError, match=r"needs islpy and z3 of pip install 'flexmasks\[proofs\]'"):
        asked("causal", "causal")
    monkeypatch.delitem(sys.modules, "z3")
    assert asked(*tables).equal
    assert asked("causal", masks.strided(stride=1)).equal


def test_a_table_that_holds_indices_of_another() -> None:
    documents, texts = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 5])
    mask = lambda b, h, q, kv: (kv <= q) & (texts[documents[q]] == texts[documents[kv]])  # noqa: E731
    assert "negative index" in asked("causal", mask).reason
    proof = asked(masks.document(document_ids=documents) & "causal", mask, {"documents": (0, None)})
    assert (proof.implies, proof.implied, proof.first) == (True, False, (0, 0, 1, 0))
    assert proof.parameters["texts"].numel() <= 8


# --- masks of other libraries ---


def masking() -> Any:
    return pytest.importorskip("transformers.masking_utils")


def of_transformers(m: Any) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Return for each mask function of transformers the registered mask, and parameters for all of whose values they
    are the same; the names are those of transformers.
    """
    chunks = masks.chunked(chunk=4, start=PADDING), masks.chunked_causal(chunk=4, start=PADDING)
    packed = m.and_masks(m.causal_mask_function, m.packed_sequence_mask_function(IDS.expand(2, -1)))
    return {
        "causal": (m.causal_mask_function, "causal", {}),
        "bidirectional": (m.bidirectional_mask_function, "full", {}),
        "sliding": (
            m.sliding_window_causal_mask_function(4),
            lambda b, h, q, kv, *, sliding_window: masks.sliding_window(window=sliding_window - 1)(b, h, q, kv),
            {"sliding_window": (1, None)},
        ),
        "sliding on both sides": (
            m.sliding_window_bidirectional_mask_function(4),
            lambda b, h, q, kv, *, sliding_window: masks.local(left=sliding_window, right=sliding_window)(b, h, q, kv),
            {"sliding_window": (0, None)},
        ),
        "chunked": (m.chunked_overlay(4, PADDING), chunks[0], {}),
        "chunked causal": (m.chunked_causal_mask_function(4, PADDING), chunks[1], {}),
        "padding": (m.padding_mask_function(KEPT), masks.key_padding(attention_mask=KEPT), {}),
        "packed": (packed, masks.document(document_ids=IDS.expand(2, -1)) & "causal", {}),
        "later": (
            m.add_offsets_to_mask_function(m.sliding_window_causal_mask_function(4), 3, 0),
            lambda b, h, q, kv, *, q_offset: masks.sliding_window(window=3)(b, h, q + q_offset, kv),
            {"q_offset": (0, None)},
        ),
    }


OF_TRANSFORMERS = [
    "causal",
    "bidirectional",
    "sliding",
    "sliding on both sides",
    "chunked",
    "chunked causal",
    "padding",
    "packed",
    "later",
]
LENGTHS = (1, 2, 3, 5, 6, 8, 13, 17, 23, 30)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_masks_of_transformers(name: str) -> None:
    theirs, ours, box = of_transformers(masking())[name]
    proof = asked(theirs, ours, box)
    assert proof.equal, proof


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_recognized_masks_of_transformers(name: str) -> None:
    theirs, _, _ = of_transformers(masking())[name]
    for n in LENGTHS:
        if name == "packed" and n > len(IDS):
            continue
        positions = Positions(batch=2, first=0, key_stop=n, query_stop=n, device=torch.device("cpu"), trusted=True)
        found = recognized(theirs, positions)
        assert found is not None
        comparison = flexmasks.compare(found.mask(), theirs, n, batch=2)
        assert comparison.equal, comparison
    if name not in ("padding", "packed"):  # their tables are cut to the step's lengths
        assert asked(found.mask(), theirs).equal


# From the definitions of these libraries, in our words; the numbers are named as there.
PEERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "attention-gym generate_sliding_window": (
        "sliding_window",
        lambda b, h, q, kv, *, window: (q >= kv) & (q - kv <= window),
        {"window": (0, None)},
    ),
    "attention-gym generate_prefix_lm_mask": (
        "prefix_lm",
        lambda b, h, q, kv, *, prefix_len: torch.logical_or(kv < prefix_len, q >= kv),
        {"prefix_len": (0, None)},
    ),
    "attention-gym generate_dilated_sliding_window": (
        masks.dilated_window(window=0, dilation=3),
        lambda b, h, q, kv, *, window: ((q - kv).abs() <= window) & ((q - kv) % 3 == 0),
        {"window": (0, None)},
    ),
    "torchtitan get_sliding_window_mask_mod": (
        lambda b, h, q, kv, *, window_size: masks.sliding_window(window=window_size - 1)(b, h, q, kv),
        lambda b, h, q, kv, *, window_size: (kv <= q) & (q - kv < window_size),
        {"window_size": (1, None)},
    ),
    "torchtitan get_fixed_block_mask_mod": (
        lambda b, h, q, kv, *, fixed_block_size: masks.chunked_causal(chunk=fixed_block_size)(b, h, q, kv),
        lambda b, h, q, kv, *, fixed_block_size: (
            (q // fixed_block_size == kv // fixed_block_size) & (q % fixed_block_size >= kv % fixed_block_size)
        ),
        {"fixed_block_size": (1, None)},
    ),
    "JAX splash LocalMask": (
        "local",
        lambda b, h, q, kv, *, left, right: (q - left <= kv) & (q + right >= kv),
        {"left": (0, None), "right": (0, None)},
    ),
    "JAX splash ChunkedCausalMask": (
        masks.chunked_causal(chunk=7),
        lambda b, h, q, kv: (q // 7 == kv // 7) & (q >= kv),
        {},
    ),
    "xformers make_local_attention": (
        lambda b, h, q, kv, *, size: masks.sliding_window(window=size - 1)(b, h, q, kv),
        lambda b, h, q, kv, *, size: ~((kv > q) | (kv <= q - size)),
        {"size": (1, None)},
    ),
    "BD3-LM block_diff_mask": (
        masks.block_diffusion(length=1, block=4),
        lambda b, h, q, kv, *, length: block_diff_mask(q, kv, 4, length),
        {"length": (1, None)},
    ),
    "SpecForge generate_eagle3_mask, without padding": (
        masks.eagle3(length=6),
        lambda b, h, q, kv: ((q >= kv) & (kv < 6)) | ((kv >= 6) & ((kv - q) % 6 == 0)),
        {},
    ),
    "OpenAI sparse_attention strided": (
        masks.strided(stride=5),
        lambda b, h, q, kv: (q >= kv) & ((kv > q - 5) | ((q - kv) % 5 == 0)),
        {},
    ),
    "StreamingLLM start_size and recent_size": (
        lambda b, h, q, kv, *, start, recent: masks.sink_window(sinks=start, window=recent - 1)(b, h, q, kv),
        lambda b, h, q, kv, *, start, recent: (kv <= q) & ~((kv >= start) & (kv <= q - recent)),
        {"start": (0, None), "recent": (1, None)},
    ),
    "Longformer attention_window": (
        lambda b, h, q, kv, *, n: masks.longformer(window=n, tokens=2)(b, h, q, kv),
        lambda b, h, q, kv, *, n: (abs(q - kv) <= 2 * n // 2) | (torch.minimum(q, kv) < 2),
        {"n": (0, None)},
    ),
    "diffusers' causal frames": (
        masks.block_causal(block=64),
        lambda b, h, q, kv: q // 64 >= kv // 64,
        {},
    ),
}


def block_diff_mask(q: Any, kv: Any, block_size: int, n: Any) -> Any:
    """From kuleshov-group/bd3lms."""
    clean_q, clean_kv = q >= n, kv >= n
    block_q = torch.where(clean_q == 1, (q - n) // block_size, q // block_size)
    block_kv = torch.where(clean_kv == 1, (kv - n) // block_size, kv // block_size)
    diagonal = (block_q == block_kv) & (clean_q == clean_kv)
    offset = (block_q > block_kv) & (clean_kv == 1) & (clean_q == 0)
    causal = (block_q >= block_kv) & (clean_kv == 1) & (clean_q == 1)
    return diagonal | offset | causal


@pytest.mark.parametrize("name", PEERS)
def test_masks_of_other_libraries(name: str) -> None:
    ours, theirs, box = PEERS[name]
    proof = asked(ours, theirs, box)
    assert proof.equal, proof
