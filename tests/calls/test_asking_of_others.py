"""Functions of other libraries: which of this library's masks they are, by `compare`, and what `check` says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from findings_oracle import verify
from functions_of_others import BATCH, HEADS, LENGTH, LIBRARIES, TREE
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks import Mask, check, compare
from flexmasks.masks import (
    block_causal,
    block_diffusion,
    causal,
    chunked,
    chunked_causal,
    dilated_window,
    document,
    full,
    local,
    natten,
    prefix_lm,
    sliding_tile,
    sliding_window,
    tree,
)
from flexmasks.orders import morton_order, tile_order

pytestmark = pytest.mark.usefixtures("one_thread")
Function = Callable[..., Tensor]
FUNCTIONS = {(library, name): f for library, functions in LIBRARIES.items() for name, f in functions().items()}


def texts_as_tree() -> Mask:
    parents: list[int] = []
    last: list[int] = []  # the last token of each node
    for parent, count in TREE:
        parents += [last[parent] if parent >= 0 else -1, *range(len(parents), len(parents) + count - 1)]
        last.append(len(parents) - 1)
    return tree(parents=parents)


def lengths(*counts: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


IMAGE = {"height": 32, "width": 32, "kernel": 7}
# This library's masks of the same definitions.
SAME: dict[tuple[str, str], Callable[[], Mask]] = {
    ("attention-gym", "causal"): causal,
    ("attention-gym", "sliding window"): lambda: sliding_window(window=128),
    ("attention-gym", "prefix"): lambda: prefix_lm(prefix_len=200),
    ("attention-gym", "documents"): lambda: flexmasks.packed("causal", [0, 300, 700, LENGTH]),
    ("attention-gym", "natten"): lambda: natten(**IMAGE),
    ("attention-gym", "natten in tiles"): lambda: natten(**IMAGE, order=tile_order((32, 32), (8, 8))),
    ("attention-gym", "natten in Morton's order"): lambda: natten(**IMAGE, order=morton_order((32, 32))),
    ("attention-gym", "dilated window"): lambda: dilated_window(window=64, dilation=4),
    ("attention-gym", "batchified"): lambda: chunked_causal(chunk=96),
    ("attention-gym", "paged"): causal,
    ("torchtitan", "causal"): causal,
    ("torchtitan", "documents"): lambda: document(document_ids=lengths(300, 20, 400, LENGTH - 720)),
    ("torchtitan", "fixed blocks"): lambda: chunked(chunk=256),
    ("torchtitan", "sliding window"): lambda: sliding_window(window=127),
    ("torchtitan", "images"): lambda: document(document_ids=lengths(256, 64, 512, 192)),
    ("torchtitan", "causal inside documents"): lambda: flexmasks.packed("causal", [0, 300, 320, 720, LENGTH]),
    ("transformers", "causal"): causal,
    ("transformers", "bidirectional"): full,
    ("transformers", "sliding"): lambda: sliding_window(window=127),
    ("transformers", "sliding, bidirectional"): lambda: local(left=128, right=128),
    ("diffusers", "causal frames"): lambda: block_causal(block=64),
    ("diffusers", "noised and clean frames"): lambda: block_diffusion(length=LENGTH // 2, block=64),
    ("verl", "ancestors"): texts_as_tree,
}
# Functions that read behind the end of a tensor at this length.
READ_BEHIND = [("transformers", "padding with offsets"), ("torch", "dense")]


@pytest.mark.parametrize("key", SAME, ids=" ".join)
def test_the_same_masks(key: tuple[str, str]) -> None:
    found = compare(FUNCTIONS[key], SAME[key](), LENGTH, batch=BATCH)
    assert found.equal, found


def test_a_tree_whose_texts_see_each_other() -> None:
    """Of texts below two nodes each sees the other's node, if what comes before the leaves counts as one prefix."""
    function = FUNCTIONS["verl", "prefixes"]
    found = compare(function, texts_as_tree(), LENGTH)
    assert found.implied
    assert found.first == (0, 0, 300, 200)  # the second node sees the first one
    counts = [count for _, count in TREE]
    below = [sum(counts[n] for n in nodes) for nodes in ((3, 4), (2, 5, 6))]
    assert found.only_a == below[0] * counts[2] + below[1] * counts[1]
    # check finds it, too, where texts below a node are one document, and the keys of the root are left out.
    nodes = lengths(*counts)
    documents = torch.tensor([0, 1, 2, 1, 1, 2, 2])[nodes]
    below_root = flexmasks.get_mask(lambda b, h, q, kv: nodes[kv] > 0)
    (error,) = check(below_root & function, LENGTH, document_ids=documents).errors
    assert (error.kind, error.pair) == ("crosses a document", (0, 0, 300, 200))
    assert not check(below_root & texts_as_tree(), LENGTH, document_ids=documents, forbid="sees the future").errors


def test_tiles_that_do_not_move_at_the_edges() -> None:
    """A window of tiles is cut at the edges in diffusers, and moves inside in sliding tile attention."""
    ours = sliding_tile(canvas=(4, 16, 16), tile=(1, 8, 8), window=(3, 2, 1))
    found = compare(FUNCTIONS["diffusers", "sliding tiles"], ours, LENGTH)
    assert found.implies
    assert found.first == (0, 0, 0, 512)


@pytest.mark.parametrize("key", FUNCTIONS, ids=" ".join)
def test_what_is_true_of_them(key: tuple[str, str]) -> None:
    function, heads = FUNCTIONS[key], HEADS if key[0] == "torch" else 1
    found = check(function, LENGTH, batch=BATCH, heads=heads)
    if key in READ_BEHIND:
        (finding,) = found.errors
        assert finding.kind == "reads behind the end"
        assert finding.pair is not None
        with pytest.raises(IndexError):
            function(*map(torch.tensor, finding.pair))
        return
    assert not found.errors
    verify(found, create_mask(function, BATCH, heads, LENGTH, LENGTH, device="cpu"), [0])
