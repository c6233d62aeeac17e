"""Masks as other projects define them, each beside the mask of this library that equals it.

The functions are written from the projects' definitions, with the tensors that these close over. Where a project fills
a matrix in a loop, the function equals that matrix. Sizes follow the length, so that short ones have every part.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import flexmasks
from flexmasks import Mask, masks

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Pair(NamedTuple):
    """A project's function and the mask of this library that equals it.

    heads: query heads, 1 for a mask that is the same in all.
    q_offset: where the queries of `named` start among its keys; those of `function` start at 0.
    limits: for which numbers of both `proof` is to show that they are equal, as `parameters` of `flexmasks.compare`.
    """

    function: Function
    named: Mask
    q_len: int
    kv_len: int
    heads: int = 1
    q_offset: int = 0
    limits: dict[str, Any] | None = None

    def compare(self) -> Any:
        """Return what `flexmasks.compare` finds at these lengths."""
        sizes: dict[str, Any] = {"batch": 1, "heads": self.heads, "q_len": self.q_len, "kv_len": self.kv_len}
        if self.q_len == self.kv_len:
            return flexmasks.compare(self.function, self.named, **sizes)
        function = flexmasks.plan(self.function, q_offset=0, **sizes)
        return flexmasks.compare(function, flexmasks.plan(self.named, q_offset=self.q_offset, **sizes))

    def proof(self) -> Any:
        """Return what `flexmasks.compare` finds for all lengths."""
        named, memory = self.named, self.q_offset

        def later(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return named(b, h, q + memory, kv)

        return flexmasks.compare(self.function, later if memory else named, lengths="all", parameters=self.limits)


class Wild(NamedTuple):
    """A mask of another project: where it is defined, and what makes it at a length.

    version: a release, or the first digits of the commit that was read.
    length: tokens at which it is measured.
    """

    name: str
    project: str
    file: str
    version: str
    length: int
    make: Callable[[int, Generator], Pair]

    def pair(self, length: int, device: torch.device | str = "cpu") -> Pair:
        """Return the function and the mask for about as many tokens, with the same random numbers each time."""
        with torch.device(device):
            return self.make(length, torch.Generator(device).manual_seed(0))

    @property
    def expression(self) -> str:
        """The mask of this library as the code says it."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.make)))
        (named,) = (
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "named"
        )
        return re.sub(r"\bmasks\.", "", ast.unparse(named))

    @property
    def about(self) -> str:
        """What the mask is for."""
        return inspect.getdoc(self.make) or ""


WILD: dict[str, Wild] = {}


def _wild(
    name: str, project: str, file: str, version: str, length: int = 8192
) -> Callable[[Callable[[int, Generator], Pair]], Callable[[int, Generator], Pair]]:
    def add(make: Callable[[int, Generator], Pair]) -> Callable[[int, Generator], Pair]:
        WILD[name] = Wild(name, project, file, version, length, make)
        return make

    return add


# Drafts


@_wild("DFlash", "sgl-project/SpecForge", "specforge/core/dflash.py: create_dflash_block_mask", "02ab617")
def _dflash(length: int, random: Generator) -> Pair:
    """Blocks that are drafted at once: each sees itself and the context before its anchor."""
    block, count = 16, length // 16
    anchors = torch.randint(1, length - block, (1, count), generator=random).sort().values
    keep = torch.arange(count)[None] < count - count // 8
    anchors = torch.where(keep, anchors, 0)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        number = q // block
        safe = number.clamp(max=count - 1)
        in_context = (kv < length) & (kv < anchors[b, safe])
        in_block = (kv >= length) & (number == (kv - length) // block)
        return (in_context | in_block) & keep[b, safe] & (number < count)

    named = masks.anchored(anchors=torch.where(keep, anchors, -1), block=block, context=length)
    return Pair(mask, named, count * block, length + count * block)


@_wild(
    "P-EAGLE",
    "vllm-project/speculators",
    "src/speculators/models/peagle/attention.py: create_peagle_mask_mod",
    "06129c6",
)
def _peagle(length: int, random: Generator) -> Pair:
    """Drafts of several tokens from sampled positions; each sees its chain and the text before it."""
    base = length // 2
    lengths = torch.tensor([base // 2, base // 4, base // 8])  # of documents; padding behind them
    documents = torch.repeat_interleave(torch.arange(3), lengths)
    documents = F.pad(documents, (0, base - len(documents)), value=-1)
    anchors, depths, places = [torch.arange(base)], [torch.zeros(base, dtype=torch.long)], torch.arange(base)
    parents = [torch.where(documents == documents.roll(1), torch.arange(base) - 1, -1)]
    kept, count = torch.arange(int(lengths.sum())), base
    for depth in range(1, 8):  # each round samples from what the one before sampled
        kept = kept[torch.rand(len(kept), generator=random) < 0.6]
        anchors.append(kept)
        depths.append(torch.full_like(kept, depth))
        parents.append(places[kept])
        places[kept] = torch.arange(count, count + len(kept))
        count += len(kept)
    anchor, depth_of, parent = torch.cat(anchors), torch.cat(depths), torch.cat(parents)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q_anchor, kv_anchor = anchor[q], anchor[kv]
        same_document = documents[q_anchor] == documents[kv_anchor]
        context = (depth_of[kv] == 0) & (q_anchor >= kv_anchor)
        chain = (q_anchor == kv_anchor) & (depth_of[q] >= depth_of[kv])
        return (documents[q_anchor] != -1) & same_document & (context | chain)

    real = torch.where(documents[anchor] < 0, -1, 0)
    named = masks.tree(parents=parent) & masks.groups(q_group=real, kv_group=real)
    return Pair(mask, named, count, count)


@_wild(
    "JetSpec, training",
    "meta-pytorch/attention-gym",
    "attn_gym/masks/jetspec.py: generate_jetspec_training_mask_mod",
    "1d7f0ac",
)
def _jetspec_training(length: int, random: Generator) -> Pair:
    """Sampled blocks behind a prefix: each token sees the prefix and its block up to itself."""
    block, count, prefix = 16, length // 32, length // 2

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        behind = kv - prefix
        same_block = (kv >= prefix) & (q // block == behind // block)
        return (kv < prefix) | (same_block & (behind % block <= q % block))

    anchors = torch.full((count,), prefix)
    named = masks.anchored(anchors=anchors, block=block, context=prefix) & masks.band(lower=-length, upper=prefix)
    return Pair(mask, named, count * block, prefix + count * block)


def _random_tree(count: int, random: Generator) -> list[int]:
    """Return the parents of nodes, of which each has one among the 16 before it."""
    steps = torch.randint(1, 17, (count,), generator=random).tolist()
    return [max(node - step, 0) if node else -1 for node, step in enumerate(steps)]


def _ancestors(parents: list[int]) -> Tensor:
    """Return booleans [nodes, nodes]: node j is node i or above it."""
    above = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] |= above[parent]
    return above


@_wild(
    "JetSpec, tree",
    "meta-pytorch/attention-gym",
    "attn_gym/masks/jetspec.py: generate_jetspec_tree_causal_mask_mod",
    "1d7f0ac",
)
def _jetspec_tree(length: int, random: Generator) -> Pair:
    """Nodes of a draft tree behind a prefix: each sees the prefix and its ancestors."""
    nodes, prefix = length // 4, length - length // 4
    parents = _random_tree(nodes, random)
    above = _ancestors(parents)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        node = (kv - prefix).clamp(min=0, max=nodes - 1)
        in_tree = (kv >= prefix) & (kv < prefix + nodes)
        return (kv < prefix) | (in_tree & above[q, node])

    named = masks.tree(parents=parents, start=prefix)
    return Pair(mask, named, nodes, length, q_offset=prefix)


@_wild("Medusa", "FasterDecoding/Medusa", "medusa/model/utils.py: generate_medusa_buffers", "2b89814")
def _medusa(length: int, random: Generator) -> Pair:
    """64 candidates behind a KV cache; the matrix of candidates is added to a causal mask."""
    nodes, context = 64, length - 64
    parents = _random_tree(nodes, random)
    medusa_attn_mask = _ancestors(parents).float()

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(kv < context, True, medusa_attn_mask[q, (kv - context).clamp(min=0)] != 0)

    named = masks.tree(parents=parents, start=context)
    return Pair(mask, named, nodes, length, q_offset=context)


@_wild("Trees of rollouts", "verl-project/verl", "verl/utils/prefix_tree/forward.py", "pull request 6689")
def _rollouts(length: int, random: Generator) -> Pair:
    """Answers that share beginnings, level by level: a token sees the texts above its own, and its own causally."""
    texts = [(-1, length // 4), *((0, length // 16) for _ in range(4))]  # the text above, tokens
    texts += [(1 + n // 4, length // 32) for n in range(16)]
    counts = torch.tensor([count for _, count in texts])
    enter, leave, clock = [0] * len(texts), [0] * len(texts), 0

    def visit(text: int) -> None:
        nonlocal clock
        enter[text], clock = clock, clock + 1
        for below, (above, _) in enumerate(texts):
            if above == text:
                visit(below)
        leave[text], clock = clock, clock + 1

    visit(0)
    enters, leaves = (torch.repeat_interleave(torch.tensor(x), counts) for x in (enter, leave))

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (enters[kv] <= enters[q]) & (leaves[q] <= leaves[kv]) & (kv <= q)

    parents = torch.arange(int(counts.sum())) - 1
    starts = counts.cumsum(0) - counts
    for (above, _), start in zip(texts, starts.tolist(), strict=True):
        parents[start] = starts[above] + counts[above] - 1 if above >= 0 else -1
    named = masks.tree(parents=parents)
    return Pair(mask, named, len(parents), len(parents))


# Video


def _padded(tokens: int) -> int:
    return -(-tokens // 128) * 128


_SELF_FORCING = "wan/modules/causal_model.py"


@_wild(
    "Self-Forcing, causal",
    "guandeh17/Self-Forcing",
    f"{_SELF_FORCING}: _prepare_blockwise_causal_attn_mask",
    "a48b50f",
    32760,
)
def _self_forcing_causal(length: int, random: Generator) -> Pair:
    """21 frames, causal between groups of three; padding sees itself only."""
    frame, frames = length // 21, 3
    total = 21 * frame
    ends = torch.zeros(_padded(total), dtype=torch.long)
    for start in range(0, total, frames * frame):
        ends[start : start + frames * frame] = start + frames * frame

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < ends[q]) | (q == kv)

    positions = torch.arange(len(ends))
    alone = torch.where(positions < total, -1, positions)
    named = masks.block_causal(block=frames * frame) & masks.document(document_ids=alone)
    return Pair(mask, named, len(ends), len(ends))


@_wild(
    "Self-Forcing, teacher",
    "guandeh17/Self-Forcing",
    f"{_SELF_FORCING}: _prepare_teacher_forcing_mask",
    "a48b50f",
    16380,
)
def _self_forcing_teacher(length: int, random: Generator) -> Pair:
    """Clean frames, then the same frames noised: these see themselves and the clean frames before them."""
    frame = length // 2 // 21
    clean, block = 21 * frame, 3 * frame
    padded = _padded(2 * clean)
    context_ends, own_starts, own_ends, clean_ends = (torch.zeros(padded, dtype=torch.long) for _ in range(4))
    for number, start in enumerate(range(0, clean, block)):
        context_ends[start : start + block] = start + block
        noised = slice(clean + start, clean + start + block)
        own_starts[noised], own_ends[noised] = clean + start, clean + start + block
        clean_ends[noised] = number * block

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        of_clean = (q < clean) & (kv < context_ends[q])
        own = (kv < own_ends[q]) & (kv >= own_starts[q])
        of_noised = (q >= clean) & (own | ((kv < clean_ends[q]) & (kv >= 0)))
        return (q == kv) | of_clean | of_noised

    positions = torch.arange(padded)
    alone = torch.where(positions < 2 * clean, -1, positions)
    named = masks.block_diffusion(length=clean, block=block, clean_first=True) & masks.document(document_ids=alone)
    return Pair(mask, named, padded, padded)


@_wild(
    "Self-Forcing, image to video",
    "guandeh17/Self-Forcing",
    f"{_SELF_FORCING}: _prepare_blockwise_causal_attn_mask_i2v",
    "a48b50f",
    32760,
)
def _self_forcing_image(length: int, random: Generator) -> Pair:
    """The first frame by itself, then groups of four, of which the last seven frames are visible."""
    frame, frames, window = length // 21, 4, 7
    total = 21 * frame
    ends = torch.zeros(_padded(total), dtype=torch.long)
    ends[:frame] = frame
    for start in range(frame, total, frames * frame):
        ends[start : start + frames * frame] = start + frames * frame

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((kv < ends[q]) & (kv >= (ends[q] - window * frame))) | (q == kv)

    positions = torch.arange(len(ends))
    starts = torch.where(positions < total, ends - window * frame, positions)
    named = masks.intervals(starts=starts, ends=torch.where(positions < total, ends, positions + 1))
    return Pair(mask, named, len(ends), len(ends))


def radial_blocks(frames: int, frame: int, block: int) -> Tensor:
    """Return which blocks radial attention shows, [blocks, blocks], of a video without text (Wan)."""
    blocks = frames * frame // block
    shown = torch.zeros(blocks, blocks, dtype=torch.bool)
    places = torch.arange(frame)
    apart = (places[:, None] - places).abs()
    for i in range(frames):
        for j in range(frames):
            distance = abs(i - j)
            decay = 2 ** (frame.bit_length() - distance.bit_length())
            width = {0: frame, 1: frame // 2}.get(distance, max(decay, block))
            is_split = decay < 128 and distance % int(128 / decay) != 0
            pairs = torch.ones_like(apart, dtype=torch.bool) if j == 0 else (apart <= width) & (not is_split)
            row, column = i * frame % block, j * frame % block
            rest = -frame % block
            pairs = F.pad(pairs, (column, rest, row, rest))
            rows, columns = pairs.shape[0] // block, pairs.shape[1] // block
            tiles = pairs[: rows * block, : columns * block].unflatten(1, (columns, block)).unflatten(0, (rows, block))
            density = tiles.sum(1) / block  # [rows, columns, block] of each key
            is_dense = (density > 1 / 3).sum(-1) / ((density > 0).sum(-1) + 1e-9) > 0.6
            first_row, first_column = i * frame // block, j * frame // block
            shown[first_row : first_row + rows, first_column : first_column + columns] |= is_dense
    return shown


@_wild(
    "Radial attention",
    "mit-han-lab/radial-attention",
    "radial_attn/attn_mask.py: gen_log_mask_shrinked",
    "09c88be",
    16000,
)
def _radial(length: int, random: Generator) -> Pair:
    """Blocks of a video: the further apart two frames, the narrower the diagonal, and the fewer frames."""
    frames, block = 16, 128 if length > 4096 else 16
    frame = length // frames
    table = radial_blocks(frames, frame, block)
    count = len(table) * block

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[q // block, kv // block]

    named = masks.block_sparse(visible_blocks=table, block=block)
    return Pair(mask, named, count, count)


@_wild(
    "NABLA", "huggingface/diffusers", "src/diffusers/models/transformers/transformer_kandinsky.py: nablaT_v2", "0.42.1"
)
def _nabla(length: int, random: Generator) -> Pair:
    """Blocks of 64 tokens with 90% of the weights of averaged queries and keys, and a window of blocks."""
    heads, blocks, side = 4, length // 64, 4 if length > 4096 else 1
    canvas = (blocks // side**2, side, side)
    q_mean, k_mean = (torch.randn(1, heads, blocks, 16, generator=random) for _ in range(2))
    weights, order = torch.softmax(q_mean @ k_mean.transpose(-2, -1), -1).sort(-1)
    chosen = (weights.cumsum(-1) >= 1 - 0.9).gather(-1, order.argsort(-1))
    places = torch.stack(torch.meshgrid(*map(torch.arange, canvas), indexing="ij")).flatten(1)
    near = (places[:, :, None] - places[:, None]).abs() <= torch.tensor([11, 3, 3])[:, None, None] // 2
    table = chosen | near.all(0)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[b, h, q // 64, kv // 64]

    named = masks.block_sparse(visible_blocks=table, block=64)
    return Pair(mask, named, blocks * 64, blocks * 64, heads)


# Text with images


@_wild("BAGEL", "ByteDance-Seed/Bagel", "data/data_utils.py: create_sparse_mask", "2025", 16384)
def _bagel(length: int, random: Generator) -> Pair:
    """Text is causal, images see all of themselves, and images that are denoised are seen by nobody else."""
    modes, unit = ("causal", "full", "noise", "causal", "noise", "full", "causal"), length // 64
    splits: list[tuple[int, str]] = []  # tokens and mode
    documents: list[int] = []
    while sum(documents) < length:
        sizes = torch.randint(1, 2 * unit, (len(modes),), generator=random).tolist()
        if sum(documents) + sum(sizes) > length:
            sizes = [length - sum(documents)]
        splits += [*zip(sizes, modes, strict=False)]
        documents.append(sum(sizes))

    def ids(*chosen: str) -> Tensor:
        """The number of each token's split as the project has it, in float32; -1 where its mode is another one."""
        return torch.tensor(
            [float(i if mode in chosen else -1) for i, (n, mode) in enumerate(splits) for _ in range(n)]
        )

    images, noise = ids("full", "noise"), ids("noise")
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents)) + 1

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_image = (images[q] == images[kv]) & (images[q] >= 0)
        of_others = (noise[kv] >= 0) & (noise[q] != noise[kv])
        return ((q >= kv) | in_image) & ~of_others & (document[q] == document[kv])

    named = (
        masks.bidirectional_spans(span_ids=images.long())
        & masks.private_spans(span_ids=noise.long())
        & masks.document(document_ids=document)
    )
    return Pair(mask, named, length, length)


@_wild("openpi", "Physical-Intelligence/openpi", "src/openpi/models/pi0.py: make_attn_mask", "7bf7eb9")
def _openpi(length: int, random: Generator) -> Pair:
    """Images and text see each other, the state sees them, actions see all; a missing camera and padding are hidden."""
    image, text = length // 4, length // 8
    actions = length - 3 * image - text - 1
    valid = torch.ones(1, length, dtype=torch.bool)
    valid[:, 2 * image : 3 * image] = False
    valid[:, 3 * image + text // 2 : 3 * image + text] = False
    starts_block = torch.tensor([[False] * (3 * image + text) + [True, True] + [False] * (actions - 1)])
    block = starts_block.cumsum(1)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (block[b, kv] <= block[b, q]) & (valid[b, kv] & valid[b, q])

    group = torch.where(valid, 0, -1)
    named = masks.block_causal(ids=block) & masks.groups(q_group=group, kv_group=group)
    return Pair(mask, named, length, length)


def _images_in_text(length: int, image: int) -> Tensor:
    """Return the type of each token, [1, length]: 1 for an image, one after each as many tokens of text."""
    return (torch.arange(length) // image % 2)[None]


_GEMMA = "src/transformers/models/gemma3/modeling_gemma3.py: create_masks_for_vision_model"


@_wild("Gemma 3, global layers", "huggingface/transformers", _GEMMA, "5.24.0", 16384)
def _gemma(length: int, random: Generator) -> Pair:
    """Causal text, with images that see all of themselves."""
    is_image = _images_in_text(length, 256 if length > 4096 else 32) == 1
    starts = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
    ids = torch.where(is_image, starts.int().cumsum(1) - 1, -1)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) | ((ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0))

    named = masks.bidirectional_spans(span_ids=ids)
    return Pair(mask, named, length, length)


@_wild("Gemma 3, window layers", "huggingface/transformers", _GEMMA, "5.24.0", 16384)
def _gemma_window(length: int, random: Generator) -> Pair:
    """The same, and no key further back than the window; images see their own later tokens at any distance."""
    is_image = _images_in_text(length, 256 if length > 4096 else 32) == 1
    starts = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
    ids, window = torch.where(is_image, starts.int().cumsum(1) - 1, -1), length // 16

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = (kv <= q) | ((ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0))
        return seen & (kv > q - window)

    named = masks.bidirectional_spans(span_ids=ids) & masks.band(lower=1 - window, upper=length)
    return Pair(mask, named, length, length)


@_wild(
    "PaliGemma",
    "huggingface/transformers",
    "src/transformers/models/paligemma/modeling_paligemma.py: PaliGemmaModel.forward",
    "5.24.0",
)
def _paligemma(length: int, random: Generator) -> Pair:
    """An image and a prompt that see each other, and an answer behind them."""
    prefix = length // 4 + 37
    token_type_ids = (torch.arange(length) >= prefix).long()[None]
    ids = torch.where(token_type_ids == 0, 0, -1)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) | ((ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0))

    named = masks.prefix_lm(prefix_len=prefix)
    return Pair(mask, named, length, length)


@_wild(
    "Mllama",
    "huggingface/transformers",
    "src/transformers/models/mllama/processing_mllama.py: convert_sparse_cross_attention_mask_to_dense",
    "5.24.0",
)
def _mllama(length: int, random: Generator) -> Pair:
    """Text sees the tiles of the last image before it; two neighboring images count as one.

    The model then lets text without an image see everything.
    """
    tokens, tiles = 1601 if length > 4096 else 17, 4  # of a tile, of an image at most
    intervals = [(length // 8, length // 2), (length // 2, length), (length // 2 + 1, length)]
    used = [4, 1, 2]  # tiles of each image
    table = torch.zeros(1, length, len(used) * tiles)
    for image, ((start, end), count) in enumerate(zip(intervals, used, strict=True)):
        table[:, start:end, image * tiles : image * tiles + count] = 1

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[b, q, kv // tokens] == 1

    images = [image if tile < count else -1 for image, count in enumerate(used) for tile in range(tiles)]
    image_ids = torch.tensor(images).repeat_interleave(tokens)
    named = masks.vision_cross(intervals=intervals, image_ids=image_ids)
    return Pair(mask, named, length, len(image_ids))


# Images


@_wild(
    "Qwen2.5-VL, windows",
    "huggingface/transformers",
    "src/transformers/vision_utils.py: get_vision_window_index",
    "5.24.0",
    16384,
)
def _qwen_windows(length: int, random: Generator) -> Pair:
    """Patches that are sorted by windows, of 8 x 8 patches inside and fewer at the edges."""
    side, window, merged = (math.isqrt(length) - 2) // 2, 4, 4  # in groups of 2 x 2 patches
    counts = [min(window, side - start) for start in range(0, side, window)]
    lengths = torch.tensor([height * width * merged for height in counts for width in counts])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return number[q] == number[kv]

    named = flexmasks.packed("full", cu_seqlens)
    return Pair(mask, named, len(number), len(number))


def _side(length: int) -> int:
    return math.isqrt(length) // 8 * 8


@_wild(
    "Swin, shifted windows",
    "microsoft/Swin-Transformer",
    "models/swin_transformer.py: SwinTransformerBlock",
    "9cd3dbd",
    16384,
)
def _swin(length: int, random: Generator) -> Pair:
    """Windows of 8 x 8 pixels after a roll by 4; pixels that the roll brought together do not see each other."""
    side, window, shift = _side(length), 8, 4

    def parts(token: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The window and the region of a token in rows and columns, after the roll."""
        row, column = (token // side - shift) % side, (token % side - shift) % side
        regions = ((i >= side - window).int() + (i >= side - shift).int() for i in (row, column))
        return row // window, column // window, *regions  # type: ignore[return-value]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same = [i == j for i, j in zip(parts(q), parts(kv), strict=True)]
        return same[0] & same[1] & same[2] & same[3]

    windows = side // window
    row, column, row_region, column_region = parts(torch.arange(side**2))
    ids = ((row * windows + column) * 3 + row_region) * 3 + column_region
    named = masks.document(document_ids=ids)
    return Pair(mask, named, side**2, side**2)


@_wild("MaxViT, blocks", "google-research/maxvit", "maxvit/models/maxvit.py: window_partition", "70a4707", 16384)
def _maxvit_blocks(length: int, random: Generator) -> Pair:
    """Windows of 8 x 8 pixels."""
    side, window = _side(length), 8

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same_rows = q // side // window == kv // side // window
        return same_rows & (q % side // window == kv % side // window)

    pixel = torch.arange(side**2)
    ids = pixel // side // window * side + pixel % side // window
    named = masks.document(document_ids=ids)
    return Pair(mask, named, side**2, side**2)


@_wild("MaxViT, grid", "google-research/maxvit", "maxvit/models/maxvit.py: grid_partition", "70a4707", 16384)
def _maxvit_grid(length: int, random: Generator) -> Pair:
    """8 x 8 pixels that are spread over the image."""
    side = _side(length)
    step = side // 8

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q // side % step == kv // side % step) & (q % side % step == kv % side % step)

    pixel = torch.arange(side**2)
    ids = pixel // side % step * step + pixel % side % step
    named = masks.document(document_ids=ids)
    return Pair(mask, named, side**2, side**2)


@_wild(
    "Axial, rows", "lucidrains/axial-attention", "axial_attention/axial_attention.py: AxialAttention", "74d0a44", 16384
)
def _axial_rows(length: int, random: Generator) -> Pair:
    """Each pixel sees its row."""
    side = _side(length)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q // side == kv // side

    named = masks.chunked(chunk=side)
    return Pair(mask, named, side**2, side**2, limits={"side": (1, None), "chunk": ("side", "side")})


@_wild(
    "Axial, columns",
    "lucidrains/axial-attention",
    "axial_attention/axial_attention.py: AxialAttention",
    "74d0a44",
    16384,
)
def _axial_columns(length: int, random: Generator) -> Pair:
    """Each pixel sees its column."""
    side = _side(length)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q % side == kv % side

    named = masks.dilated_window(window=side**2, dilation=side)
    return Pair(mask, named, side**2, side**2)


@_wild("VAR", "FoundationVision/VAR", "models/var.py: attn_bias_for_masking", "a5cf0a1", 10521)
def _var(length: int, random: Generator) -> Pair:
    """Images of growing size: each sees itself and the smaller ones. The sizes are those of Infinity."""
    sizes = [max(1, round(s * (length / 10521) ** 0.5)) for s in (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)]
    level = torch.cat([torch.full((size * size,), i) for i, size in enumerate(sizes)])

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return level[q] >= level[kv]

    named = masks.block_causal(ids=level)
    return Pair(mask, named, len(level), len(level))


# Long text


@_wild("LongNet", "microsoft/torchscale", "torchscale/component/dilated_attention.py: DilatedAttention", "11e745e")
def _longnet(length: int, random: Generator) -> Pair:
    """A branch of dilated attention: in each segment every fourth token sees every fourth one, by turns of heads."""
    heads, ratio, segment = 4, 4, length // 4

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        turn = h // (heads // ratio)
        chosen = (q % segment % ratio == turn) & (kv % segment % ratio == turn)
        return chosen & (q // segment == kv // segment) & (q >= kv)

    token, turn = torch.arange(length), (torch.arange(heads) // (heads // ratio))[:, None]
    group = torch.where(token % segment % ratio == turn, 0, -1)[None]
    named = masks.groups(q_group=group, kv_group=group) & masks.chunked_causal(chunk=segment)
    return Pair(mask, named, length, length, heads)


@_wild("MoBA", "MoonshotAI/MoBA", "moba/moba_naive.py: moba_attn_varlen_naive", "2025")
def _moba(length: int, random: Generator) -> Pair:
    """Each query sees its own chunk causally, and the chunks before it whose mean key fits best."""
    heads, chunk, k = 4, length // 32, 4
    length = 32 * chunk
    queries, keys = (torch.randn(heads, length, 16, generator=random) for _ in range(2))
    gate = queries @ keys.unflatten(1, (-1, chunk)).mean(2).transpose(1, 2)  # [heads, queries, chunks]
    of_query, of_key = torch.arange(length)[:, None] // chunk, torch.arange(length // chunk)
    gate = torch.where(of_query < of_key, -math.inf, torch.where(of_query == of_key, math.inf, gate))
    chosen = gate.topk(k).indices
    need_attend = torch.zeros_like(gate, dtype=torch.bool).scatter_(-1, chosen, True)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return need_attend[h, q, kv // chunk] & (q >= kv)

    indices = chosen.transpose(0, 1).contiguous()
    named = masks.topk(indices=indices, granularity=chunk) & masks.causal()
    return Pair(mask, named, length, length, heads)


@_wild(
    "NSA, selected",
    "fla-org/native-sparse-attention",
    "native_sparse_attention/ops/parallel.py: parallel_nsa",
    "8cddc2e",
)
def _nsa_selected(length: int, random: Generator) -> Pair:
    """Each query sees 16 blocks of 64 keys, or as many as there are, up to itself; heads of a group share them."""
    block = 64 if length > 4096 else 8
    last = torch.arange(length)[:, None, None] // block
    scores = torch.rand(length, 1, length // block, generator=random)
    scores = torch.where(torch.arange(length // block) > last, -1.0, scores)  # the query's own block is always chosen
    scores = torch.where(torch.arange(length // block) == last, 2.0, scores)
    best = scores.topk(min(16, length // block))
    block_indices = torch.where(best.values < 0, -1, best.indices)  # [queries, 1, 16]
    chosen = torch.zeros(length, length // block + 1, dtype=torch.bool).scatter_(1, block_indices[:, 0] + 1, True)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return chosen[q, kv // block + 1] & (kv <= q)

    named = masks.topk(indices=block_indices, granularity=block) & masks.causal()
    return Pair(mask, named, length, length)


@_wild(
    "NSA, compressed",
    "fla-org/native-sparse-attention",
    "native_sparse_attention/ops/parallel.py: parallel_nsa_compression",
    "8cddc2e",
    32768,
)
def _nsa_compressed(length: int, random: Generator) -> Pair:
    """Each query sees one key for each whole block up to itself."""
    block = 64 if length > 4096 else 8

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv < (q + 1) // block

    ends = (torch.arange(length) + 1) // block
    named = masks.intervals(starts=torch.zeros_like(ends), ends=ends)
    return Pair(mask, named, length, length // block)


@_wild("Gist tokens", "jayelm/gisting", "src/data/gist.py: make_gist_mask", "af62a64")
def _gist(length: int, random: Generator) -> Pair:
    """An encoder: tokens behind the gist tokens see these and each other, tokens before see all but those behind."""
    first, count = length // 2 - 3, 10
    is_gist = (torch.arange(length) >= first) & (torch.arange(length) < first + count)
    from_first = (is_gist.cumsum(0) >= 1)[None]
    to_last = (is_gist.flip(0).cumsum(0).flip(0) >= 1)[None]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(to_last[b, q], to_last[b, kv], from_first[b, kv])

    is_before = torch.arange(length) < first + count
    starts = torch.where(is_before, 0, first)
    named = masks.intervals(starts=starts, ends=torch.where(is_before, first + count, length))
    return Pair(mask, named, length, length)


@_wild("Gist tokens, decoder", "jayelm/gisting", "src/gist_llama.py: GistLlamaModel.forward", "af62a64")
def _gist_decoder(length: int, random: Generator) -> Pair:
    """The same mask and a causal one."""
    first, count = length // 2 - 3, 10
    is_gist = (torch.arange(length) >= first) & (torch.arange(length) < first + count)
    from_first = (is_gist.cumsum(0) >= 1)[None]
    to_last = (is_gist.flip(0).cumsum(0).flip(0) >= 1)[None]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & torch.where(to_last[b, q], to_last[b, kv], from_first[b, kv])

    segments = (torch.arange(length) >= first + count).int()
    named = masks.summaries(segment_ids=segments, is_summary=is_gist)
    return Pair(mask, named, length, length)


@_wild("Transformer-XL", "kimiyoung/transformer-xl", "pytorch/mem_transformer.py: MemTransformerLM._forward", "81b1b19")
def _transformer_xl(length: int, random: Generator) -> Pair:
    """A segment sees itself causally, and the memory of the segment before it."""
    queries, memory = length // 2, length // 2

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ~(kv - q >= 1 + memory)

    named = masks.causal()
    return Pair(mask, named, queries, length, q_offset=memory, limits={"memory": (0, None)})


@_wild("Transformer-XL, same length", "kimiyoung/transformer-xl", "pytorch/mem_transformer.py: same_length", "81b1b19")
def _transformer_xl_window(length: int, random: Generator) -> Pair:
    """The same, where each query sees as many keys as the memory has."""
    queries, memory = length // 2, length // 2
    mask_len = memory + queries - memory
    shift = queries - mask_len if mask_len > 0 else queries

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ~((kv - q >= 1 + memory) | (kv - q <= -shift))

    named = masks.sliding_window(window=memory - 1)
    return Pair(mask, named, queries, length, q_offset=memory)


@_wild(
    "XLNet",
    "huggingface/transformers",
    "src/transformers/data/data_collator.py: DataCollatorForPermutationLanguageModeling",
    "5.24.0",
)
def _xlnet(length: int, random: Generator) -> Pair:
    """The content stream: each token sees the tokens that are not predicted, and those before it in a random order."""
    order = torch.cat([torch.randperm(length // 2, generator=random) + i * (length // 2) for i in range(2)])
    is_masked = torch.rand(length, generator=random) < 1 / 6
    perm_index = torch.where(is_masked, order, -1)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        cannot = (perm_index[q] <= perm_index[kv]) & is_masked[kv]
        return ~cannot | (q == kv)

    named = (
        masks.block_causal(ids=perm_index, strict=True)
        | masks.key_padding(attention_mask=~is_masked[None])
        | masks.band(lower=0, upper=0)
    )
    return Pair(mask, named, length, length)


# Diffusion of text


@_wild("Block diffusion", "kuleshov-group/bd3lms", "models/dit.py: block_diff_mask", "2025", 16384)
def _block_diffusion(length: int, random: Generator) -> Pair:
    """Noised tokens beside the same tokens clean, in blocks; LLaDA 2, SDAR and Fast-dLLM train with the same mask."""
    n, block = length // 2, 32

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q_is_clean, kv_is_clean = q >= n, kv >= n
        q_block = torch.where(q_is_clean, (q - n) // block, q // block)
        kv_block = torch.where(kv_is_clean, (kv - n) // block, kv // block)
        diagonal = (q_block == kv_block) & (q_is_clean == kv_is_clean)
        offset = (q_block > kv_block) & kv_is_clean & ~q_is_clean
        causal = (q_block >= kv_block) & kv_is_clean & q_is_clean
        return diagonal | offset | causal

    limits = {"block": (1, None), "n": (1, None), "length": ("n", "n")}
    named = masks.block_diffusion(length=n, block=block)
    return Pair(mask, named, length, length, limits=limits)


@_wild(
    "Block diffusion, sampling",
    "NVlabs/Fast-dLLM",
    "modeling.py of Efficient-Large-Model/Fast_dLLM_v2_7B: eval_block_diff_mask",
    "2025",
    16384,
)
def _block_diffusion_sampling(length: int, random: Generator) -> Pair:
    """Each block sees itself and the blocks before it."""
    block = 32

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q // block >= kv // block

    named = masks.block_causal(block=block)
    return Pair(mask, named, length, length, limits={"block": (1, None)})


# Speech


@_wild("WeNet, chunks", "wenet-e2e/wenet", "wenet/utils/mask.py: subsequent_chunk_mask", "decd0cf")
def _wenet(length: int, random: Generator) -> Pair:
    """Frames see their chunk of 16 frames and four chunks before it."""
    chunk, left = 16, 4
    limits = {"chunk": (1, None), "left": (0, None)}

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        start = ((q // chunk - left) * chunk).clamp(min=0)
        return (kv >= start) & (kv < (q // chunk + 1) * chunk)

    named = masks.block_window(chunk=chunk, left=left, right=0)
    return Pair(mask, named, length, length, limits=limits)


@_wild(
    "NeMo, chunks", "NVIDIA-NeMo/NeMo", "nemo/collections/asr/modules/conformer_encoder.py: _create_masks", "89a42ec"
)
def _nemo(length: int, random: Generator) -> Pair:
    """att_context_size=[70, 13] in the style "chunked_limited", and padding."""
    chunk, left, real = 14, 70 // 14, length - length // 10
    valid = torch.arange(length) < real

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        apart = torch.div(q, chunk, rounding_mode="trunc") - torch.div(kv, chunk, rounding_mode="trunc")
        return (apart <= left) & (apart >= 0) & valid[q] & valid[kv]

    group = torch.where(valid, 0, -1)
    named = masks.block_window(chunk=chunk, left=left, right=0) & masks.groups(q_group=group, kv_group=group)
    return Pair(mask, named, length, length)
