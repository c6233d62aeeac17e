"""`flexmasks.compare`: against dense masks, what it takes as a mask, what it says and draws."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from functions import LONG_TABLES, Drawn, Pick, compiled, composed, drawn, short_and_campaign, structured
from helpers import try_examples
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import flexmasks
from flexmasks.blocks import difference
from flexmasks.masks import causal, document, local, sliding_window

pytestmark = pytest.mark.usefixtures("one_thread")


def only(a: Tensor, b: Tensor) -> tuple[int, int, Any]:
    """Return what `compare` is to find in two masks as booleans of one shape."""
    differing = (a ^ b).nonzero()
    return int((a & ~b).sum()), int((b & ~a).sum()), tuple(differing[0].tolist()) if len(differing) else None


def found(comparison: flexmasks.Comparison) -> tuple[int, int, Any]:
    return comparison.only_a, comparison.only_b, comparison.first


# --- the answer ---

_AND = " vs "


def a_pair(pick: Pick) -> str:
    """Write two masks: of the same kind, or with a part in common."""
    write = pick([structured, structured, composed])
    a, b = write(pick), write(pick)
    return a + _AND + pick(["{b}", "({a}) & ({b})", "({a}) | ({b})", "({a}) ^ (kv == 5)", "~~({a})"]).format(a=a, b=b)


def check_pair(example: Drawn, squares: int) -> None:
    a, b = (compiled(code, LONG_TABLES) for code in example.expression.split(_AND))
    sizes = example.batch, example.heads, example.q_len, example.kv_len
    wanted = only(*(create_mask(f, *sizes, device="cpu") for f in (a, b)))
    with mock.patch.object(difference, "_FIRST_SQUARES", squares):
        got = flexmasks.compare(a, b, *sizes[2:], batch=sizes[0], heads=sizes[1], q_offset=0)
    assert found(got) == wanted
    assert (got.equal, got.implies, got.implied) == (wanted[2] is None, not wanted[0], not wanted[1])


@pytest.mark.parametrize("squares", [1, 64, 1 << 20])  # the fewer, the larger are those that are decided first
@short_and_campaign(40, 5000)
def test_random_pairs(examples: int, squares: int) -> None:
    try_examples(examples, lambda example: check_pair(example, squares), drawn(a_pair))


LENGTH = 131_072


def test_documents_and_a_window_over_many_tokens() -> None:
    size, window = 1000, 700
    packed = causal() & document(document_ids=torch.arange(LENGTH) // size)
    got = flexmasks.compare(packed, sliding_window(window=window), LENGTH)
    ends = [min(n + size, LENGTH) - n for n in range(0, LENGTH, size)]  # the lengths of the documents
    assert got.only_a == sum((n - window) * (n - window - 1) // 2 for n in ends if n > window)
    inside = sum(min(q, window) + 1 for n in ends for q in range(n))
    assert got.only_b == sum(min(q, window) + 1 for q in range(LENGTH)) - inside
    assert got.first == (0, 0, window + 1, 0)


@pytest.mark.parametrize("pair", [(77_777, 5), (0, 0), (LENGTH - 1, LENGTH - 1), (131_000, 130_999)])
def test_one_pair_among_many(pair: tuple[int, int]) -> None:
    table = torch.arange(LENGTH)
    q_of_pair, kv_of_pair = pair

    def all_but_one(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (table[q] >= kv) & ~((q == q_of_pair) & (table[kv] == kv_of_pair))

    assert found(flexmasks.compare("causal", all_but_one, LENGTH)) == (1, 0, (0, 0, *pair))
    assert found(flexmasks.compare(all_but_one, "causal", LENGTH)) == (0, 1, (0, 0, *pair))
    assert flexmasks.compare(all_but_one, all_but_one, LENGTH).equal


def test_the_first_pair_is_not_in_the_first_square() -> None:
    pairs = torch.zeros(64, 64, dtype=torch.bool)
    pairs[20, 3] = pairs[17, 40] = True
    assert found(flexmasks.compare(pairs, torch.zeros_like(pairs))) == (2, 0, (0, 0, 17, 40))


def test_batch_elements_and_heads() -> None:
    lens = torch.tensor([7, 40, 40])
    shorter = flexmasks.get_mask("grouped_tril", seq_lens=lens)
    got = flexmasks.compare("causal", shorter, 40, heads=5)
    dense = [flexmasks.dense_mask(mask, 40, batch=3, heads=5).expand(3, 5, 40, 40) for mask in ("causal", shorter)]
    assert found(got) == only(*dense)
    later = flexmasks.compare("causal", lambda b, h, q, kv: kv <= q - h, 40, batch=3, heads=2)
    assert found(later) == (3 * 40, 0, (0, 1, 0, 0))


@pytest.mark.gpu
def test_masks_on_two_devices() -> None:
    ids = torch.arange(9000) // 700
    on_cpu, on_gpu = (causal() & document(document_ids=ids.to(device)) for device in ("cpu", "cuda"))
    assert flexmasks.compare(on_cpu, on_gpu, 9000).equal
    window = sliding_window(window=500)
    assert found(flexmasks.compare(on_gpu, window, 9000)) == found(flexmasks.compare(on_cpu, window, 9000))


# --- what is compared ---


def functions_of_transformers() -> dict[str, Any]:
    masking = pytest.importorskip("transformers.masking_utils")
    window = masking.and_masks(masking.causal_mask_function, masking.sliding_window_overlay(9))
    return {"causal": masking.causal_mask_function, "window": window}


SUBJECTS: dict[str, Any] = {
    "name": "causal",
    "Mask": causal(),
    "function": lambda b, h, q, kv: q >= kv,
    "list": ["causal", sliding_window(window=99)],
    "plan": flexmasks.plan("causal", 64),
    "block mask of this library": flexmasks.block_mask("causal", 64, block_size=16),
    "block mask": create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=16),
    "booleans": torch.ones(64, 64, dtype=torch.bool).tril(),
    "booleans of batch elements": torch.ones(3, 1, 64, 64, dtype=torch.bool).tril(),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_forms_of_a_mask(name: str) -> None:
    assert flexmasks.compare(SUBJECTS[name], "causal", 64).equal
    batch = 3 if name.endswith("elements") else 1
    got = flexmasks.compare(local(left=3, right=1), SUBJECTS[name], 64)
    assert found(got) == (batch * 63, batch * (60 * 61 // 2), (0, 0, 0, 1))


def test_functions_of_transformers() -> None:
    given = functions_of_transformers()
    assert flexmasks.compare(given["causal"], "causal", 50).equal
    assert flexmasks.compare(given["window"], "sliding_window", 50, window=8).equal
    assert flexmasks.compare(given["window"], "sliding_window", 50, window=9).only_b == 50 - 9


def test_lengths_of_what_is_given() -> None:
    plan = flexmasks.plan("causal", 8, 24, q_offset="last", batch=2, heads=3)
    seen = flexmasks.dense_mask("causal", 8, 24, q_offset=16)[0, 0]
    for a, b in ((plan, seen), (plan, "causal"), (seen, "causal")):
        assert flexmasks.compare(a, b, None if a is plan or b is seen else 8, q_offset=16).equal
    # A BlockMask counts queries from 0, whatever the others do.
    blocks = create_block_mask(lambda b, h, q, kv: q + 16 >= kv, None, None, 8, 24, device="cpu", BLOCK_SIZE=8)
    assert flexmasks.compare("causal", blocks, q_offset="last").equal
    assert flexmasks.compare("causal", blocks, q_offset=[16, 15]).only_b == 8


def block_mask(full: bool, row: int) -> BlockMask:
    """Return causal blocks of 16 x 16 with one more block, the first of a row, as full or partial."""
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    counts, indices = blocks.kv_num_blocks.clone(), blocks.kv_indices.clone()
    full_counts, full_indices = blocks.full_kv_num_blocks.clone(), blocks.full_kv_indices.clone()
    (full_indices if full else indices)[0, 0, row, 0] = row + 1 if full else 3
    (full_counts if full else counts)[0, 0, row] = 1
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=16, mask_mod=blocks.mask_mod, seq_lengths=(64, 64)
    )


def test_lists_that_are_not_those_of_their_function() -> None:
    shown = flexmasks.compare("causal", block_mask(full=True, row=0))  # block 1 of row 0, which is empty, is full
    assert found(shown) == (0, 256, (0, 0, 0, 16))
    assert re.search(r"lists of b .* 256.*\(0, 0, 0, 16\)", shown.notes[0])
    assert shown.notes[0] in repr(shown)
    hidden = flexmasks.compare(block_mask(full=False, row=1), "causal")  # the diagonal block of row 1 is missing
    assert found(hidden) == (0, 16 * 17 // 2, (0, 0, 16, 16))
    assert len(hidden.notes) == 1
    assert not flexmasks.compare(SUBJECTS["block mask"], "full").notes
    both = flexmasks.compare(*[block_mask(full=True, row=0)] * 2)
    assert both.equal
    assert len(both.notes) == 2


# --- what is said and drawn ---


def test_one_line() -> None:
    got = flexmasks.compare("causal", "sliding_window", 1024, window=9)
    line = "Comparison(a=causal(), b=sliding_window(window=9): of 1,048,576 pairs a alone shows 514,605, b alone 0, "
    assert repr(got) == f"{line}first (b, h, q, kv) = (0, 0, 10, 0))"
    line = "Comparison(a=causal(), b=causal(): of 1,048,576 pairs all are the same)"
    assert repr(flexmasks.compare("causal", "causal", 1024)) == line


def test_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    but_one = lambda b, h, q, kv: (kv <= q) ^ ((h == 1) & (q == 9000) & (kv == 3))  # noqa: E731
    got = flexmasks.compare("causal", but_one, 16384, heads=2)
    got.show(columns=32)
    lines = capsys.readouterr().out.splitlines()
    assert [(n, line.index("a")) for n, line in enumerate(lines[:16]) if "a" in line] == [(9000 // 1024, 0)]
    assert "a shown by a alone" in "\n".join(lines)
    assert lines[-1] == "head 1"
    assert "a" not in got.draw(h=0).text(32).splitlines()[8]
    drawn_as_svg = flexmasks.compare("causal", local(left=1, right=1), 8).draw().svg()
    assert drawn_as_svg.count("<path") > 3
    for words in ("hidden by both", "shown by both", "shown by a alone", "shown by b alone"):
        assert words in drawn_as_svg
    mixed = flexmasks.compare("causal", ~causal(), 64).draw().text(32)
    assert mixed.splitlines()[0] == "xx" + "b" * 30


# --- errors ---

BLOCKS = SUBJECTS["block mask"]
ERRORS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no length": (("causal", "full"), {}, "flexmasks.compare: pass `q_len`, the number of queries."),
    "length of a block mask": (("causal", BLOCKS, 60), {}, "is for q_len=64, got q_len=60"),
    "lengths of two": ((BLOCKS, torch.ones(60, 60) > 0), {}, "is for q_len=60, got q_len=64"),
    "name": (("causal", "causl", 4), {}, "did you mean 'causal'?"),
    "no mask": (("causal", None, 4), {}, "must be a name, a Mask or a function, got None"),
    "parameter of neither": (("causal", "full", 4), {"window": 3}, "no argument is named `window`"),
    "parameter of a Mask": ((sliding_window(window=2), "full", 4), {"window": 3}, "`window` is given twice"),
    "missing parameter": (("sliding_window", "full", 4), {}, "mask 'sliding_window' needs `window`"),
    "heads": (("causal", lambda b, h, q, kv: kv <= h, 4), {}, "depends on its head index; pass `heads`"),
    "alignment": (("causal", "full", 4, 8), {}, "pass q_offset=4 or 'last'"),
    "table": (
        ("full", lambda b, h, q, kv: torch.ones(3)[q] > 0, 4),
        {},
        "<lambda> failed on index tensors: IndexError",
    ),
    "numbers": (("full", lambda b, h, q, kv: q - kv, 4), {}, "must return a boolean tensor, got one of int64"),
    "bias": (("causal", torch.zeros(4, 4), 4), {}, "what is added to scores is score=m"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    given, params, words = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        flexmasks.compare(*given, **params)
