"""Functions of masks as people write them: those of other libraries, by their public definitions, in our words.

`test_peers.py` compares masks with the libraries themselves, where they are installed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[..., Tensor]
BATCH, HEADS, LENGTH = 2, 4, 1024


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def window(size: int) -> Function:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= size)


def attention_gym() -> dict[str, Function]:
    offsets = torch.tensor([0, 300, 700, LENGTH], dtype=torch.int32)
    document = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), offsets.diff())
    spans = torch.tensor([[40, 100], [400, 600]])  # offset and length of an image, by batch element
    intervals = torch.tensor([[0, 500], [500, LENGTH]])  # of an image, the text that sees it
    pages = torch.arange(LENGTH // 128).expand(BATCH, -1).contiguous()

    def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        inner = causal(b, h, q - offsets[document[q]], kv - offsets[document[kv]])
        return (document[q] == document[kv]) & inner

    def neighborhood(of: Callable[[Tensor], tuple[Tensor, Tensor]], width: int, kernel: int) -> Function:
        def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            axes = zip(of(q), of(kv), strict=True)
            centers = ((i.clamp(kernel // 2, width - 1 - kernel // 2), j) for i, j in axes)
            return functools.reduce(operator.and_, ((i - j).abs() <= kernel // 2 for i, j in centers))

        return mask

    def in_tiles(i: Tensor) -> tuple[Tensor, Tensor]:
        tile, inside = i // 64, i % 64
        return tile // 4 * 8 + inside // 8, tile % 4 * 8 + inside % 8

    def even_bits(i: Tensor) -> Tensor:
        i = i & 0x55555555
        for shift, bits in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            i = (i ^ (i >> shift)) & bits
        return i

    def transfusion(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        offset, length = spans[b, 0], spans[b, 1]
        return causal(b, h, q, kv) | ((q >= offset) & (kv < offset + length))

    def flamingo(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        interval = intervals[kv // 512]
        return (q >= interval[0]) & (q < interval[1])

    def paged(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        page = pages[b, kv // 128]
        return torch.where(page >= 0, causal(b, h, q, page * 128 + kv % 128), False)

    return {
        "causal": causal,
        "sliding window": window(128),
        "prefix": lambda b, h, q, kv: (kv < 200) | causal(b, h, q, kv),
        "documents": documents,
        "natten": neighborhood(lambda i: (i // 32, i % 32), 32, 7),
        "natten in tiles": neighborhood(in_tiles, 32, 7),
        "natten in Morton's order": neighborhood(lambda i: (even_bits(i), even_bits(i >> 1)), 32, 7),
        "dilated window": lambda b, h, q, kv: ((q - kv).abs() <= 64) & ((q - kv).abs() % 4 == 0),
        "transfusion": transfusion,
        "flamingo": flamingo,
        "batchified": lambda b, h, q, kv: (q // 96 == kv // 96) & causal(b, h, q % 96, kv % 96),
        "paged": paged,
    }


def torchtitan() -> dict[str, Function]:
    """models/common/attention/attention.py, and of images create_block_diagonal_mask in models/common/vision_encoder.py
    (2026): tokens of all rows lie end to end, and the positions of a document start at 0.
    """
    positions = torch.cat([torch.arange(n) for n in (300, 20, 400, LENGTH - 720)])
    ids = ((positions == 0).int().cumsum(0) - 1).int()
    # Where documents start, in whole blocks of 128; later places hold the number of tokens.
    starts = torch.full((-(-(LENGTH + 1) // 128) * 128,), LENGTH, dtype=torch.int32)
    starts[: ids[-1] + 1] = (positions == 0).nonzero()[:, 0].int()
    images = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), torch.tensor([256, 64, 512, 192]))
    sequence = (torch.rand(BATCH, LENGTH) < 0.01).cumsum(1)
    return {
        "causal": causal,
        "documents": lambda b, h, q, kv: ids[q] == ids[kv],
        "starts of documents": lambda b, h, q, kv: kv >= starts[ids[q]],
        "fixed blocks": lambda b, h, q, kv: q // 256 == kv // 256,
        "sliding window": lambda b, h, q, kv: (kv <= q) & (q - kv < 128),
        "images": lambda b, h, q, kv: images[q] == images[kv],
        "causal inside documents": lambda b, h, q, kv: causal(b, h, q, kv) & (kv >= starts[ids[q]]),
        "documents by batch element": lambda b, h, q, kv: causal(b, h, q, kv) & (sequence[b, q] == sequence[b, kv]),
    }


def verl() -> dict[str, Function]:
    """verl/utils/prefix_tree/forward.py in pull request 6689: a tree of texts, level by level. `TREE` has its nodes.

    "prefixes" is its first version: what comes before the leaves counts as one prefix.
    """
    enter, leave, leaf, prefix = tree_of_verl()

    def prefixes(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_prefix, same_leaf = kv < prefix, (leaf[q] == leaf[kv]) & (leaf[q] >= 0)
        return (in_prefix & (kv <= q)) | (same_leaf & (kv <= q)) | (in_prefix & (leaf[q] >= 0))

    def ancestors(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (enter[kv] <= enter[q]) & (leave[q] <= leave[kv]) & (kv <= q)

    return {"prefixes": prefixes, "ancestors": ancestors}


# The nodes of a tree of texts, level by level: the parent and the number of tokens.
TREE = [(-1, 200), (0, 100), (0, 150), (1, 80), (1, 94), (2, 200), (2, 200)]


def tree_of_verl() -> tuple[Tensor, Tensor, Tensor, int]:
    """Return when a walk through TREE enters and leaves the node of each token, its leaf or -1, and the tokens before
    all leaves.
    """
    enter, leave, clock = [0] * len(TREE), [0] * len(TREE), 0

    def visit(node: int) -> None:
        nonlocal clock
        enter[node], clock = clock, clock + 1
        for child in (n for n, (parent, _) in enumerate(TREE) if parent == node):
            visit(child)
        leave[node], clock = clock, clock + 1

    visit(0)
    parents = {parent for parent, _ in TREE}
    leaves = [-1 if node in parents else node for node in range(len(TREE))]
    counts = torch.tensor([count for _, count in TREE])
    of_tokens = (torch.repeat_interleave(torch.tensor(x), counts) for x in (enter, leave, leaves))
    return *of_tokens, sum(count for node, (_, count) in enumerate(TREE) if node in parents)


def transformers() -> dict[str, Function]:
    padding, starts = torch.rand(BATCH, LENGTH) < 0.9, torch.tensor([0, 5])
    ids = torch.arange(LENGTH).expand(BATCH, -1) // 100
    sliding = lambda b, h, q, kv: kv > q - 128  # noqa: E731
    padded = lambda b, h, q, kv: padding[b, kv]  # noqa: E731
    chunked = lambda b, h, q, kv: (kv - starts[b]) // 64 == (q - starts[b]) // 64  # noqa: E731
    packed = lambda b, h, q, kv: ids[b, q] == ids[b, kv]  # noqa: E731

    def every(*masks: Function) -> Function:
        def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            made = q.new_ones((), dtype=torch.bool)
            for m in masks:
                made = made & m(b, h, q, kv).to(made.device)
            return made

        return mask

    def any_of(*masks: Function) -> Function:
        def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            made = q.new_zeros((), dtype=torch.bool)
            for m in masks:
                made = made | m(b, h, q, kv).to(made.device)
            return made

        return mask

    def later(mask: Function, of_q: int | Tensor, of_kv: int) -> Function:
        return lambda b, h, q, kv: mask(b, h, q + of_q, kv + of_kv)

    return {
        "causal": lambda b, h, q, kv: kv <= q,
        "bidirectional": lambda b, h, q, kv: q >= 0,
        "sliding": every(sliding, causal),
        "sliding, bidirectional": lambda b, h, q, kv: (q - kv).abs() <= 128,
        "chunked": every(chunked, causal),
        "padding": every(causal, padded),
        "packed": every(causal, packed),
        "blockwise": any_of(causal, lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0)),
        "with offsets": later(every(sliding, causal), 512, 0),
        "padding with offsets": later(every(causal, padded), 0, 7),
        "with a tensor as offset": later(every(sliding, causal), torch.tensor(512), 0),
    }


def diffusers() -> dict[str, Function]:
    """Of 0.42: masks of its dispatcher, models/transformers/transformer_kandinsky6_sr.py (sliding_tile_mask, of blocks
    of 64 tokens) and transformer_anyflow_far.py (_build_causal_mask of noised and clean frames).
    """
    padding, text = torch.rand(BATCH, LENGTH) < 0.9, torch.tensor([77, 50])
    half, frames = LENGTH // 2, (torch.arange(LENGTH) % (LENGTH // 2) // 64).float()

    def sliding_tiles(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """4 frames of 2 x 2 blocks, of which those nearby are visible: 3 frames, 3 x 1 blocks."""
        axes = [(i // 256, i // 128 % 2, i // 64 % 2) for i in (q, kv)]
        near = [(x - y).abs() <= window // 2 for x, y, window in zip(*axes, (3, 3, 1), strict=True)]
        return functools.reduce(operator.and_, near)

    def noised_and_clean(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same, not_later = frames[q] == frames[kv], frames[q] >= frames[kv]
        q_is_noise, kv_is_noise = q < half, kv < half
        hidden = (~q_is_noise & kv_is_noise) | (q_is_noise & kv_is_noise & ~same) | (q_is_noise & ~kv_is_noise & same)
        return not_later & ~hidden

    return {
        "sliding tiles": sliding_tiles,
        "noised and clean frames": noised_and_clean,
        "key padding": lambda b, h, q, kv: padding[b, kv],
        "padding of both": lambda b, h, q, kv: padding[b, q] & padding[b, kv],
        "text and image": lambda b, h, q, kv: (kv < text[b]) | (kv >= 128),
        "causal frames": lambda b, h, q, kv: q // 64 >= kv // 64,
    }


def torch_documentation() -> dict[str, Function]:
    prefix, document = torch.tensor([100, 200]), torch.arange(LENGTH, dtype=torch.int32) // 100
    offsets = torch.arange(0, LENGTH + 1, 100)
    return {
        "prefix": lambda b, h, q, kv: (kv <= prefix[b]) | causal(b, h, q, kv),
        "documents": lambda b, h, q, kv: causal(b, h, q, kv) & (document[q] == document[kv]),
        "dense": (lambda table: lambda b, h, q, kv: table[b, h, q, kv])(torch.rand(BATCH, HEADS, 64, 64) < 0.5),
        "jagged": lambda b, h, q, kv: q - offsets[document[q]] >= kv - offsets[document[kv]],
        "strided": lambda b, h, q, kv: (q - kv) % 8 == 0,
        "by heads": lambda b, h, q, kv: torch.where(h < 2, q - kv <= 128, q >= kv),
        "windows of heads": lambda b, h, q, kv: q - kv <= torch.where(h < 2, 128, 512),
        "every third before": lambda b, h, q, kv: (q - kv) % 3 == 1,
    }


LIBRARIES: dict[str, Callable[[], dict[str, Function]]] = {
    "attention-gym": attention_gym,
    "torchtitan": torchtitan,
    "transformers": transformers,
    "diffusers": diffusers,
    "verl": verl,
    "torch": torch_documentation,
}
