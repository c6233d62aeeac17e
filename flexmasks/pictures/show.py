"""The calls `show` and `draw`, and what Jupyter shows."""

from __future__ import annotations

from html import escape
from typing import Any, cast

from torch import Tensor

from flexmasks import Mask, Score, get_mask, get_score, list_masks, list_scores
from flexmasks.extend import (
    Alignment,
    MaskLike,
    MaskOverLengths,
    ScoreLike,
    ScoreOverLengths,
    as_number,
    define,
    definition_of,
    implied_size,
    says_what_to_write,
)
from flexmasks.pictures.cells import MaskCells, ScoreCells, WeightCells
from flexmasks.pictures.lengths import accepted_lengths
from flexmasks.pictures.output import CALL
from flexmasks.pictures.picture import MaskPicture, Picture, ScorePicture

_SINGLE_PAIRS_UP_TO = 128  # positions; longer pictures show blocks


@says_what_to_write()
def draw(
    mask: MaskLike | ScoreLike,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    q_offset: Alignment = None,
    **params: Any,
) -> Picture:
    """Return the picture of a mask, a score change or attention weights without showing it.

    Takes the arguments of `flexmasks.show` except `columns`, and raises the same errors. The picture has `.svg()`,
    `.text(columns)`, `.save(path)` and `.plot(ax)`, and Jupyter displays it.

    Example:
        >>> import flexmasks
        >>> picture = flexmasks.draw("causal", 1024)
        >>> picture.counts.empty, picture.counts.partial, picture.counts.full
        (28, 8, 28)
    """
    q_len, kv_len, b, h, batch, heads = map(as_number, (q_len, kv_len, b, h, batch, heads))
    if isinstance(mask, Tensor) and mask.is_floating_point() and 2 <= mask.ndim <= 4 and mask.numel():
        return _of_weights(mask[(None,) * (4 - mask.ndim)], b, h)
    value = _mask_or_score(mask, params)
    if q_len is None:
        accepted = accepted_lengths(value, b, h)
        q_len, kv_len = accepted[0], kv_len or accepted[1]
        q_offset = 0 if q_offset is None else q_offset
    if batch is None:
        is_sequence = isinstance(q_offset, list | tuple) or getattr(q_offset, "ndim", 0) > 0
        batch = implied_size(value, "B") or (len(cast(Tensor, q_offset)) if is_sequence else None)
    heads = implied_size(value, "H") if heads is None else heads
    _check_element(b, h, batch, heads)
    batch = b + 1 if batch is None else batch
    if isinstance(value, Score):
        if heads is None:
            heads = max(8, h + 1) if definition_of(value).registered else h + 1
        sizes = {"batch": batch, "heads": heads, "q_offset": q_offset}
        return ScorePicture(ScoreCells(ScoreOverLengths(CALL, value, q_len=q_len, kv_len=kv_len, **sizes), b, h))
    heads = h + 1 if heads is None else heads
    if block_size is None:
        short = all(n is None or (type(n) is int and n <= _SINGLE_PAIRS_UP_TO) for n in (q_len, kv_len))
        block_size = 1 if short else 128
    sizes = {"batch": batch, "heads": heads, "q_offset": q_offset, "block_size": block_size}
    return MaskPicture(MaskCells(MaskOverLengths(CALL, value, q_len=q_len, kv_len=kv_len, **sizes), b, h))


@says_what_to_write()
def show(
    mask: MaskLike | ScoreLike,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    q_offset: Alignment = None,
    columns: int | None = None,
    **params: Any,
) -> None:
    """Show what a mask makes visible, or what a score change adds.

    The picture of a mask also shows which blocks kernels skip. In Jupyter the picture is an SVG, elsewhere text. It is
    drawn from blocks, so a million tokens take seconds. `flexmasks.draw` returns the picture instead.

    Args:
        mask: a mask as in `flexmasks.block_mask`, or a score change as in `flexmasks.attention`: a name (if a mask
            and a score share it, the mask's), a value, or a function; or attention weights, a floating tensor
            [Q, KV], [H, Q, KV] or [B, H, Q, KV], of which only `b`, `h` and `columns` choose.
        q_len, kv_len: numbers of queries and keys; by default those that the parameters suggest.
        b, h: the batch element and head to draw.
        batch, heads: numbers of batch elements and heads; by default what the parameters' shapes imply, else b + 1
            and h + 1 (registered score changes get at least 8 heads).
        block_size: an int or a pair; by default 1 up to 128 positions, else 128.
        q_offset: where the queries start, as in `flexmasks.attention`, and to be given where it must be there; by
            default at key 0 where the parameters suggest the lengths.
        columns: width of the text in characters; by default the terminal's, at most 80.
        params: the parameters of the mask or score.

    Raises:
        ValueError, TypeError: an argument is wrong; the message says which.

    Example:
        >>> import flexmasks
        >>> flexmasks.show("sliding_window", 6, window=2)
        █·····
        ██····
        ███···
        ·███··
        ··███·
        ···███
        █ visible   · hidden
        visible 41.7%, hidden 58.3% of the pairs
        6 queries (down) x 6 keys (across), a character is 1 x 1 of them
    """
    sizes: dict[str, Any] = {"b": b, "h": h, "batch": batch, "heads": heads, "block_size": block_size}
    draw(mask, q_len, kv_len, **sizes, q_offset=q_offset, **params).show(columns)


def _check_element(b: Any, h: Any, batch: Any, heads: Any) -> None:
    for name, index, n in (("b", b, batch), ("h", h, heads)):
        if type(index) is not int or index < 0 or (isinstance(n, int) and 0 < n <= index):
            raise ValueError(f"{CALL}: `{name}` must be an int from 0{f' to {n - 1}' if n else ''}, got {index!r}.")


def _of_weights(weights: Tensor, b: int, h: int) -> Picture:
    """Return the picture of weights [B, H, Q, KV]."""
    batch, heads = weights.shape[:2]
    _check_element(b, h, batch, heads)
    places = (("batch element", b, batch), ("head", h, heads))
    element = ", ".join(f"{what} {index}" for what, index, n in places if n > 1)
    return ScorePicture(WeightCells(weights[b, h], element))


def html_of(value: Any) -> str:
    """The HTML of a mask's or score's picture, or of the reason why there is none: Jupyter shows no errors."""
    try:
        return f"<div>{draw(value).svg()}</div>"
    except Exception as error:
        reason = f"no picture: {error or type(error).__name__}"
        try:
            name = repr(value)
        except Exception:
            name = type(value).__name__
        return f"<pre>{escape(name)}\n{escape(reason)}</pre>"


def _mask_or_score(given: Any, params: dict[str, Any]) -> Mask | Score:
    if isinstance(given, str):
        is_mask, is_score = (any(e.name == given for e in entries) for entries in (list_masks(), list_scores()))
        wraps_score = any(isinstance(v, Score) for v in params.values())  # such as packed(inner=...)
        is_score = is_score and (wraps_score or not is_mask)
    elif isinstance(given, Mask | Score):
        is_score = isinstance(given, Score)
    else:
        is_score = not _defines("mask", given) and _defines("score", given)
    return get_score(given, **params) if is_score else get_mask(given, **params)


def _defines(kind: str, function: Any) -> bool:
    try:
        define(kind, function)
    except TypeError:
        return False
    return True
