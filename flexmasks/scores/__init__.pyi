"""Functions that make scores. Written by `python tests/test_readme.py` from the definitions."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from flexmasks.masks.packed import packed as packed
from flexmasks.masks.paged import paged as paged
from flexmasks.spec.values import Score

__all__ = [
    "alibi",
    "checkerboard",
    "decomposed_bias",
    "dense_bias",
    "distance_bias",
    "forgetting",
    "kerple",
    "long_temperature",
    "packed",
    "paged",
    "pair_bias",
    "relative_bias",
    "relative_bias_2d",
    "sandwich",
    "softcap",
    "ssmax",
    "t5_bias",
    "temperature",
]

def alibi(
    *,
    slopes: Tensor | NDArray[Any] | Sequence[float] | None = None,
    bidirectional: bool = False,
) -> Score:
    """Scores minus a slope of each head times the distance (ALiBi).

    slopes: one for each query head, in score - slopes[h] * (q - kv). By default the slopes of the paper, if the number
        of heads is known; a score_mod of torch's own flex_attention needs `slopes`. A tensor that requires a gradient
        gets one.
    bidirectional: True for the distance |q - kv|, for encoders. By default a key after the query gets a bonus, which
        causal masks hide.
    """

def checkerboard() -> Score:
    """Scores at even distance doubled, at odd distance halved: an example."""

def decomposed_bias(
    *,
    rel_h: Tensor | NDArray[Any] | Sequence[Sequence[Sequence[Sequence[float]]]],
    rel_w: Tensor | NDArray[Any] | Sequence[Sequence[Sequence[Sequence[float]]]],
) -> Score:
    """Scores plus each query's biases of the key's row and of its column.

    rel_h: [batch, query heads, queries, rows of keys]. Mostly it is computed from q and a table, so that it has a row
        for each query of the call; it may also have one for each position from 0 on.
    rel_w: [batch, query heads, queries, columns of keys], likewise. There are rows * columns keys. Tensors that require
        a gradient get one.
    """

def dense_bias(
    *,
    bias: Tensor | NDArray[Any] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[Sequence[float]]]],
) -> Score:
    """Scores plus a tensor of queries x keys.

    bias: [queries, keys] for all, or [batch or 1, query heads or 1, queries, keys]. It has a row for each query of the
        call, or for each position from 0 on, or one for all. A floating tensor that is passed as the score is this one,
        also as [query heads, queries, keys]. A tensor that requires a gradient gets one. The kernel reads the tensor
        itself: where a bias follows from a table, `relative_bias`, `relative_bias_2d`, `t5_bias` and `distance_bias`
        read less memory, and `pair_bias` where groups of batch elements share one.
    """

def distance_bias(
    *,
    table: Tensor | NDArray[Any] | Sequence[Sequence[float]],
    distances: Tensor | NDArray[Any] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
) -> Score:
    """Scores plus a learned bias of given distances, table[h, distances[b, q, kv]].

    table: [query heads, distances]. A tensor that requires a gradient gets one.
    distances: [queries, keys] for all batch elements or for each, such as distances in a graph. Pairs that are out of
        reach need a number of their own.
    """

def forgetting(
    *,
    log_gates: Tensor | NDArray[Any] | Sequence[Sequence[Sequence[float]]],
) -> Score:
    """Scores plus the log forget gates after the key, up to the query.

    log_gates: [batch, query heads, positions], mostly logsigmoid(x), at most 0: a gate for each key, from position 0
        on; with q_offset, also those of the keys before the queries. A tensor that requires a gradient gets one. In
        half precision the sums are float32, and they are computed once a call.
    """

def kerple(
    *,
    scales: Tensor | NDArray[Any] | Sequence[float],
    rates: Tensor | NDArray[Any] | Sequence[float],
) -> Score:
    """Scores minus the logarithm of the distance, as each head learns it (KERPLE).

    scales, rates: one for each query head, above 0. Tensors that require a gradient get one.
    """

def long_temperature(
    *,
    floor: int = 8192,
    strength: float | Tensor = 0.1,
) -> Score:
    """Sharper scores for far queries, a step more after each `floor` tokens.

    floor: number of tokens in a step; queries before position floor - 1 stay as they are.
    strength: how much sharper; 0 for nothing. A tensor that requires a gradient gets one.
    """

def pair_bias(
    *,
    bias: Tensor | NDArray[Any] | Sequence[Sequence[Sequence[Sequence[float]]]],
    group: int = 1,
) -> Score:
    """Scores plus a bias of pairs that groups share, bias[b // group, h, q, kv].

    bias: [groups, query heads or 1, queries, keys], or one group for all batch elements. It has a row for each query of
        the call, or for each position from 0 on, or one for all. A tensor that requires a gradient gets one, summed
        over the batch elements of a group.
    group: number of consecutive batch elements that share a bias. In triangle attention each of the N rows of a pair
        representation is a batch element, and the rows of one protein share a bias: `group=N`.
    """

def relative_bias(
    *,
    table: Tensor | NDArray[Any] | Sequence[Sequence[float]],
) -> Score:
    """Scores plus a learned bias of the distance, table[h, kv - q + max_distance].

    table: [H, 2 * max_distance + 1], column 0 for keys max_distance or more before the query, the last column for keys
        max_distance or more after it. A tensor that requires a gradient gets one.
    """

def relative_bias_2d(
    *,
    table: Tensor | NDArray[Any] | Sequence[Sequence[Sequence[float]]],
    height: int,
    width: int,
) -> Score:
    """Scores plus a learned bias of the distance in rows and in columns.

    table: [query heads, 2 * height - 1, 2 * width - 1]; the entry of a pair is table[h, row of q - row of kv +
        height - 1, column of q - column of kv + width - 1]. A tensor that requires a gradient gets one.
    height, width: the image, or the window of one; token t is in row t // width and column t % width, and there are
        height * width keys.
    """

def sandwich(
    *,
    dims: int = 128,
    ratios: Tensor | NDArray[Any] | Sequence[float] | None = None,
    positions: int | None = None,
) -> Score:
    """Scores plus the inner product of the sinusoidal embeddings of both positions.

    dims: size of the embeddings, even; i runs over 0 to dims / 2 - 1 (128 in the paper, whatever the head size).
    ratios: one for each query head; by default the ratios of the paper, H / (8 (h + 1)) for head h of H, counted from
        0. A tensor that requires a gradient gets one.
    positions: number of positions that the table of products covers; by default the number of positions of the call.
    """

def softcap(
    *,
    cap: float | Tensor,
    exact: bool = False,
) -> Score:
    """Scores bent into (-cap, cap): cap * tanh(score / cap).

    cap: the bound, above 0 (Gemma 2 uses 50, Grok-1 30). A tensor that requires a gradient gets one.
    exact: on a GPU in float16 and bfloat16 tanh is the processor's own instruction, with a relative error of at most
        2**-11, the error of rounding to float16. `exact=True` computes it in full, two to three times slower.
    """

def ssmax(
    *,
    scales: Tensor | NDArray[Any] | Sequence[float],
) -> Score:
    """Scores times the logarithm of the number of keys so far (scalable softmax).

    scales: one for each query head. A tensor that requires a gradient gets one.
    """

def t5_bias(
    *,
    table: Tensor | NDArray[Any] | Sequence[Sequence[float]],
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Score:
    """Scores plus T5's relative position bias, table[bucket of kv - q, h].

    table: [buckets, query heads]. A tensor that requires a gradient gets one.
    max_distance: from this distance on, all distances share the last bucket of their side. Near distances have buckets
        of their own.
    bidirectional: True for encoders, where half of the buckets are for later keys; False for decoders, where later keys
        share bucket 0.
    """

def temperature(
    *,
    temperatures: Tensor | NDArray[Any] | Sequence[float],
) -> Score:
    """Scores divided by a temperature of each head: score / temperatures[h].

    temperatures: one for each query head, not 0; above 1 attention is flatter. A tensor that requires a gradient gets
        one.
    """
