"""Attention over many GPUs on paper: what each way of exchange sends and computes.

A sequence that many GPUs hold together can be attended to in three ways: GPUs exchange heads, gather all keys and
values, or fetch those that their own queries see. Which is best depends on the mask, the heads and the network. All is
counted from the blocks of the mask, so no GPU is needed: `--ranks 1024 --length 4194304 --mask causal`
takes masks at their examples; for others call `plan`.
"""

# %%
from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tabulate import tabulate

import flexmasks
from _measure import Row, check, finish, start
from flexmasks.integrations.distributed.balance import Order, balance, batch_of, block_size_for, counted_masks
from flexmasks.integrations.distributed.counts import CountedMask, Parts, check_int, fail
from flexmasks.pictures.output import text_width
from flexmasks.spec.arguments import MaskLike
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import definition

_BACKWARD = 2.5  # arithmetic of the backward pass over that of the forward pass: five matrix products, not two
_MOST_ROWS = 1 << 15  # rows of blocks that are counted by default
_MOST_RANKS = 1 << 14  # counting what each rank sees of each other one then takes 6 GB


# %% What a plan holds.
@dataclass(frozen=True)
class PerRank:
    """A figure of all ranks."""

    busiest: float
    mean: float

    @classmethod
    def of(cls, values: np.ndarray) -> PerRank:
        """Return the greatest value and the mean."""
        return cls(float(values.max()), float(values.mean()))

    @property
    def unevenness(self) -> float:
        """Return the busiest over the mean, 1 if all are 0."""
        return self.busiest / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class Way:
    """Costs of one way of exchange, summed over masks.

    name: "heads", "gather", "seen", or "heads x gather" of two dimensions.
    refusal: why this way cannot be, else None. Then there are no figures.
    received, received_in_backward: bytes that a rank receives in the forward pass, and in the backward pass.
    blocks: computed blocks of a rank, each of one query head and batch element.
    communication, computation: seconds of the busiest rank in the forward pass, and in both passes.
    """

    name: str
    refusal: str | None = None
    received: PerRank = PerRank(0, 0)
    received_in_backward: PerRank = PerRank(0, 0)
    blocks: PerRank = PerRank(0, 0)
    communication: tuple[float, float] = (math.inf, math.inf)
    computation: tuple[float, float] = (math.inf, math.inf)

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the expected seconds of the forward pass, and of both passes."""
        forward, both = (a + b for a, b in zip(self.communication, self.computation, strict=True))
        return forward, both


@dataclass(frozen=True)
class Plan:
    """A plan on paper, which prints as a table.

    masks: each mask and the number of times that it occurs.
    order: the parts of the sequence that each rank holds.
    block_size: queries and keys of a block.
    shape: batch elements, query heads, key heads, head size and bytes of a number.
    bandwidth, flops: bytes that a rank receives, and operations that it computes, in a second.
    ways: what each way costs.
    """

    masks: tuple[tuple[str, int], ...]
    order: Order
    block_size: int
    shape: tuple[int, int, int, int, int]
    bandwidth: float
    flops: float
    ways: tuple[Way, ...]

    @property
    def fastest(self) -> Way:
        """Return the way with the least seconds for both passes."""
        return min(self.ways, key=lambda way: way.seconds[1])

    def way(self, name: str) -> Way:
        """Return the way of a name.

        Raises KeyError if there is none.
        """
        return {way.name: way for way in self.ways}[name]

    def __str__(self) -> str:
        order, (batch, q_heads, kv_heads, head_size, dtype_bytes) = self.order, self.shape
        most = max(map(len, order.parts))
        kind = "in the order of the sequence" if order.is_natural else f"in at most {most} parts each"
        masks = ", ".join(text if times == 1 else f"{times} x {text}" for text, times in self.masks)
        possible = [way for way in self.ways if way.refusal is None]
        figures = {
            "received, busiest": [_bytes(way.received.busiest) for way in possible],
            "received, mean": [_bytes(way.received.mean) for way in possible],
            "blocks, busiest": [f"{way.blocks.busiest:,.0f}" for way in possible],
            "blocks, mean": [f"{way.blocks.mean:,.0f}" for way in possible],
            "busiest / mean": [f"{way.blocks.unevenness:.2f}" for way in possible],
            "exchange": [_seconds(way.communication[0]) for way in possible],
            "computation": [_seconds(way.computation[0]) for way in possible],
            "forward": [_seconds(way.seconds[0]) for way in possible],
            "with backward": [_seconds(way.seconds[1]) for way in possible],
        }
        table = tabulate(
            [[name, *values] for name, values in figures.items()],
            headers=["a rank", *(way.name.replace(" x ", " x\n") for way in possible)],
            colalign=["left", *["right"] * len(possible)],
            disable_numparse=True,
        )
        lines = [
            f"{masks}: {order.length:,} tokens over {order.ranks:,} ranks, {kind}",
            f"batch {batch}, {q_heads} query heads, {kv_heads} key heads of {head_size}, {dtype_bytes} bytes a number, "
            f"blocks of {self.block_size}",
            f"a rank receives {self.bandwidth / 1e9:g} GB/s and computes {self.flops / 1e12:g} TFLOP/s",
        ]
        refused = [f"{way.name} cannot be: {way.refusal}" for way in self.ways if way.refusal]
        head = [textwrap.fill(line, text_width(), subsequent_indent="    ") for line in lines]
        return "\n".join([*head, "", table, "", *refused, f"fastest: {self.fastest.name}"])


# %% The blocks of the masks are counted once; each way follows from them.
@says_what_to_write()
def plan(
    masks: MaskLike | Sequence[MaskLike],
    length: int,
    ranks: int,
    *,
    order: Order | Literal["balanced"] | None = None,
    batch: int | None = None,
    q_heads: int = 32,
    kv_heads: int = 8,
    head_size: int = 128,
    dtype_bytes: int = 2,
    bandwidth: float = 50e9,
    flops: float = 400e12,
    block_size: int | None = None,
) -> Plan:
    """Return what attention over many ranks would exchange and compute.

    It is computed from the blocks of the masks; no process group and no GPU is needed. `print` shows a table of these
    ways:

    - "heads": each rank gets all tokens of some heads of q, k and v, and gives back the output of the others' tokens.
    - "gather": each rank gets all keys and values.
    - "seen": each rank gets the keys and values that its own queries see, see `seen_by`.
    - "heads x gather", if there are fewer heads than ranks: neighbors exchange heads, as many ranks as divide both the
      numbers of heads and of ranks; keys and values are gathered from the others.

    The backward pass of each way sends the gradients back the way that the values came. With "seen", the rank whose
    keys are seen by many others receives much then.

    The expected seconds are those of the busiest rank, exchange and computation one after the other. A computed block
    counts with all its pairs, 4 x head size operations each in the forward pass, 2.5 times as many in the backward
    pass. Where a cut between ranks is inside a block, the blocks on both sides count. Padding is left out, which
    "heads" and "gather" send if ranks have different numbers of tokens, and the detour that "heads" takes on CPUs.

    Args:
        masks: the mask, or the masks of all layers of a model, whose figures are summed.
        length: the number of tokens.
        ranks: the number of ranks.
        order: the parts of each rank. By default those of the sequence itself, as torch.chunk cuts; "balanced": as
            `balance` gives.
        batch: batch elements, by default those of the masks' tensors, or 1.
        q_heads, kv_heads, head_size: numbers of heads of q, and of k and v, and their size.
        dtype_bytes: bytes of a number.
        bandwidth: bytes that each rank receives in a second.
        flops: operations that each rank computes in a second.
        block_size: queries and keys of a block. By default 128, for more than 4,194,304 tokens the least multiple by a
            power of 2 with which there are at most 32,768 rows of blocks.

    Raises:
        ValueError, TypeError: an input does not fit.

    Example:
        >>> paper = plan(flexmasks.get_mask("sliding_window", window=4096), 262144, 64)
        >>> seen, gathered = paper.way("seen"), paper.way("gather")
        >>> paper.fastest.name, gathered.received.busiest / seen.received.busiest
        ('seen', 63.0)
    """
    sizes = {"length": length, "ranks": ranks, "q_heads": q_heads, "kv_heads": kv_heads, "head_size": head_size}
    for name, n in {**sizes, "dtype_bytes": dtype_bytes}.items():
        check_int("plan", name, n)
    if ranks > _MOST_RANKS:
        fail("plan", f"it takes at most {_MOST_RANKS:,} ranks, got {ranks:,}: it counts tokens of each pair of ranks.")
    for name, x in (("bandwidth", bandwidth), ("flops", flops)):
        if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < math.inf:
            fail("plan", f"`{name}` must be a number above 0, got {x!r}.")
    if q_heads % kv_heads:
        fail("plan", f"`q_heads` must be a multiple of `kv_heads`, got {q_heads} and {kv_heads}.")
    counted = counted_masks("plan", masks)
    batch = batch or batch_of(counted) or 1
    if order == "balanced":
        order = balance(masks, length, ranks, block_size=block_size, batch=batch, heads=q_heads)
    order = Order.natural(length, ranks) if order is None else order
    if not isinstance(order, Order) or (order.length, order.ranks) != (length, ranks):
        fail(
            "plan", f'`order` must be "balanced" or an Order of {length} tokens over {ranks} ranks, got {order!r:.200}.'
        )
    block_size = block_size_for(length, _MOST_ROWS) if block_size is None else block_size
    blocks = np.zeros((ranks, q_heads))  # of one rank's queries, by head
    kept = np.zeros((ranks, ranks))  # tokens of each owner that a rank's queries see
    for mask, times in counted.items():
        of_mask, seen = CountedMask("plan", mask, length, block_size, batch, q_heads).of_parts(order.parts)
        blocks += times * of_mask.numpy()
        kept += times * _overlaps(seen, order.parts)
    paper = _Paper(order, sum(counted.values()), batch * dtype_bytes * head_size, q_heads, kv_heads)
    group = math.gcd(ranks, kv_heads)
    figures: dict[str, _Figures | str] = {
        "heads": paper.heads(ranks, blocks)
        if group == ranks
        else f"{ranks:,} ranks do not divide {kv_heads} key heads",
        "gather": paper.heads(1, blocks),
        "seen": paper.seen(kept, blocks),
    }
    if 1 < group < ranks:
        figures[f"heads {group} x gather {ranks // group}"] = paper.heads(group, blocks)
    seconds_of_block = 4 * head_size * block_size**2 / flops
    ways = [
        Way(name, f) if isinstance(f, str) else _way(name, f, bandwidth, seconds_of_block)
        for name, f in figures.items()
    ]
    shape = batch, q_heads, kv_heads, head_size, dtype_bytes
    texts = tuple((repr(mask), times) for mask, times in counted.items())
    return Plan(texts, order, block_size, shape, float(bandwidth), float(flops), tuple(ways))


@dataclass(frozen=True)
class _Figures:
    """Bytes that ranks receive in the two passes, and blocks that they compute."""

    received: np.ndarray
    received_in_backward: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True)
class _Paper:
    """Sizes that all ways share.

    token_bytes: bytes of one token of one head, over all batch elements.
    """

    order: Order
    layers: int
    token_bytes: int
    q_heads: int
    kv_heads: int

    def heads(self, group: int, blocks: np.ndarray) -> _Figures:
        """Return the figures if groups of neighbors exchange heads.

        Keys and values are gathered from other groups. A group may be one rank, or all ranks.
        """
        own = np.array(self.order.sizes, dtype=np.float64)
        of_group = own.reshape(-1, group).sum(1).repeat(group)
        groups = len(own) // group
        new, given = of_group - own, own * (group - 1)
        q, kv = self.q_heads / group, 2 * self.kv_heads / group
        forward = new * (q + kv) + given * q + (self.order.length - of_group) * kv
        backward = new * q + given * (q + kv) + of_group * (groups - 1) * kv
        computed = blocks.reshape(groups, group, group, -1).sum((1, 3)).flatten()
        token_bytes = self.layers * self.token_bytes
        return _Figures(forward * token_bytes, backward * token_bytes, computed)

    def seen(self, kept: np.ndarray, blocks: np.ndarray) -> _Figures:
        """Return the figures if keys and values that are seen are exchanged.

        kept: [ranks, ranks], the tokens of each owner that a rank sees, summed over layers.
        """
        others = kept * (1 - np.eye(len(kept))) * (2 * self.kv_heads * self.token_bytes)
        return _Figures(others.sum(1), others.sum(0), blocks.sum(1))


def _way(name: str, figures: _Figures, bandwidth: float, seconds_of_block: float) -> Way:
    forward, backward, blocks = (
        PerRank.of(x) for x in (figures.received, figures.received_in_backward, figures.blocks)
    )
    exchange, compute = forward.busiest / bandwidth, blocks.busiest * seconds_of_block
    both = exchange + backward.busiest / bandwidth, compute * (1 + _BACKWARD)
    return Way(name, None, forward, backward, blocks, (exchange, both[0]), (compute, both[1]))


def _overlaps(seen: Sequence[Parts], parts: Sequence[Parts]) -> np.ndarray:
    """Return how many tokens of each owner a rank sees, [ranks, owners]."""
    owners = np.repeat(np.arange(len(parts)), [len(own) for own in parts])
    bounds = np.array([part for own in parts for part in own], dtype=np.float64)
    tokens = np.zeros((len(seen), len(parts)))
    for rank, ranges in enumerate(seen):
        if ranges:
            edges = np.array(ranges, dtype=np.float64)
            sizes = edges[:, 1] - edges[:, 0]
            ends = np.cumsum(sizes)
            seen_before = np.interp(bounds, edges.flatten(), np.stack([ends - sizes, ends], 1).flatten())
            tokens[rank] = np.bincount(owners, seen_before[:, 1] - seen_before[:, 0], len(parts))
    return tokens


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def _seconds(count: float) -> str:
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if count * factor < 1000:
            return f"{count * factor:.3g} {unit}"
    return f"{count:.3g} s" if count < 1000 else f"{count:,.0f} s"


# %% The bytes that are seen are checked on a short sequence, key by key.
def main() -> None:
    """Check the counts, and print the plan that the command line asks for."""
    parser = argparse.ArgumentParser(add_help=False)
    for name, default in (
        ("ranks", 64), ("length", 1 << 18), ("heads", 32), ("kv-heads", 8), ("head-size", 128), ("dtype-bytes", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mask", dest="masks", action="append", help="a mask at its example; may be repeated")
    parser.add_argument("--balance", action="store_true", help="let all ranks compute equally many blocks")
    parser.add_argument("--bandwidth", type=float, default=50.0, help="GB that a rank receives in a second")
    parser.add_argument("--tflops", type=float, default=400.0, help="1e12 operations of a rank in a second")
    asked = parser.parse_known_args()[0]
    file = start(__doc__, torch.device("cpu"))

    mask, ranks, length = flexmasks.get_mask("sliding_window", window=100), 4, 512
    seen = flexmasks.dense_mask(mask, length)[0, 0].view(ranks, length // ranks, length).any(1)
    others = seen.sum(1) - torch.stack([seen[r].view(ranks, -1)[r].sum() for r in range(ranks)])
    way = plan(mask, length, ranks, kv_heads=8, head_size=128, dtype_bytes=2).way("seen")
    token_bytes = 2 * 8 * 128 * 2  # keys and values of a token
    got = torch.tensor([way.received.busiest, way.received.mean], dtype=torch.float64)
    check("bytes that ranks receive", got, torch.stack([others.max(), others.double().mean()]).double() * token_bytes)

    paper = plan(
        [example_of(name, asked.length) for name in asked.masks or ["causal", "sliding_window"]],
        asked.length,
        asked.ranks,
        order="balanced" if asked.balance else None,
        q_heads=asked.heads,
        kv_heads=asked.kv_heads,
        head_size=asked.head_size,
        dtype_bytes=asked.dtype_bytes,
        bandwidth=asked.bandwidth * 1e9,
        flops=asked.tflops * 1e12,
    )
    print(f"\n{paper}")
    rows: list[Row] = [
        {
            "way": way.name,
            "received, MB": way.received.busiest / 1e6,
            "blocks": way.blocks.busiest,
            "forward, ms": way.seconds[0] * 1e3,
            "with backward, ms": way.seconds[1] * 1e3,
        }
        for way in paper.ways
        if way.refusal is None
    ]
    finish(rows, file, "Of the busiest rank; computed, not measured.", torch.device("cpu"))


def example_of(name: str, length: int) -> flexmasks.Mask:
    """Return a mask of the registry with the parameters of its example."""
    if name not in {entry.name for entry in flexmasks.list_masks()}:
        raise SystemExit(f"no mask is named {name!r}; `python -m flexmasks list` names all")
    example = definition("mask", name).example
    return flexmasks.get_mask(name, **(example(length) if example else {}))


if __name__ == "__main__":
    main()
