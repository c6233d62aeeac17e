"""Attention on images: a 2-D window, and neighborhood attention with dilation.

An image of height x width pixels is a sequence of height * width tokens, row by row: token t is at row t // width and
column t % width. In stand-alone self-attention (SASA) each pixel sees the pixels at most `window` rows and columns
away, fewer at the edges. In neighborhood attention (NATTEN) every pixel sees the same number of pixels: at an edge the
window moves inward. With dilation d it sees every d-th pixel of a window that is d times as wide.
"""

# %%
from __future__ import annotations

import functools
from typing import Any

import flexmasks
from _measure import (
    CHECKED_SHAPE,
    ON_GPU,
    TIMED_SHAPE,
    Row,
    causal_rows,
    check_attention,
    finish,
    mask_rows,
    pair_by_pair,
    random_qkv,
    start,
    textbook,
)


# %% The references. SASA is a matter of distance.
def sasa_sees(q: int, kv: int, width: int, window: int) -> bool:
    """Return whether pixel q sees pixel kv."""
    (q_row, q_column), (row, column) = divmod(q, width), divmod(kv, width)
    return max(abs(q_row - row), abs(q_column - column)) <= window


# NATTEN is a list of visible pixels along each axis. From the pixels i, i +- dilation,
# i +- 2 * dilation, ... a run of `kernel` pixels is visible, centered at i or as close to i as the edges allow.
def natten_axis(i: int, length: int, kernel: int, dilation: int) -> list[int]:
    """Return the positions from 0 to length - 1 that position i sees."""
    in_step = [j for j in range(length) if j % dilation == i % dilation]
    first = in_step.index(i) - kernel // 2
    first = min(max(first, 0), len(in_step) - kernel)
    return in_step[first : first + kernel]


@functools.cache
def natten_pixels(q: int, height: int, width: int, kernel: int, dilation: int) -> set[int]:
    """Return the pixels that pixel q sees."""
    rows = natten_axis(q // width, height, kernel, dilation)
    columns = natten_axis(q % width, width, kernel, dilation)
    return {row * width + column for row in rows for column in columns}


# %% A picture of what pixel (1, 1) sees in an image of 6 x 8 pixels.
def picture(mask: flexmasks.Mask, pixel: tuple[int, int], height: int, width: int) -> str:
    """Return one row of the mask, folded into the shape of the image."""
    row, column = pixel
    seen = flexmasks.dense_mask(mask, height * width)[0, 0, row * width + column].view(height, width)
    return "\n".join("".join("█" if s else "·" for s in line) for line in seen.tolist())


# %% Check on images that are not square, because a square hides an exchange of height and width.
def main() -> None:
    """Draw, check and time both masks."""
    file = start(__doc__)
    for name, params in {"sasa": {"window": 2}, "natten": {"kernel": 3, "dilation": 2}}.items():
        mask = flexmasks.get_mask(name, height=6, width=8, **params)
        print(f"what pixel (1, 1) sees by {mask}:\n{picture(mask, (1, 1), 6, 8)}\n")

    height, width = 16, CHECKED_SHAPE[2] // 16
    canvas: dict[str, Any] = {"height": height, "width": width}
    sasa = pair_by_pair(lambda q, kv: sasa_sees(q, kv, width, 3), height * width)
    check_attention(
        f"SASA, window of 3, {height} x {width}",
        lambda q, k, v: flexmasks.attention(q, k, v, mask="sasa", window=3, **canvas),
        lambda q, k, v: textbook(q, k, v, sasa),
    )
    for dilation in (1, 2):
        natten = pair_by_pair(lambda q, kv, d=dilation: kv in natten_pixels(q, height, width, 7, d), height * width)  # type: ignore[misc]
        assert bool((natten.sum(1) == 49).all()), "each pixel sees 7 x 7"
        mask = flexmasks.get_mask("natten", kernel=7, dilation=dilation, **canvas)
        check_attention(
            f"NATTEN, 7 x 7, dilation {dilation}, {height} x {width}",
            # A CPU compiles slowly, so it runs these masks in plain torch.
            lambda q, k, v, mask=mask: flexmasks.attention(  # type: ignore[misc]
                q, k, v, mask=mask, backend="auto" if ON_GPU else "reference"
            ),
            lambda q, k, v, seen=natten: textbook(q, k, v, seen),  # type: ignore[misc]
        )

    canvas = {"height": 64, "width": TIMED_SHAPE[2] // 64} if ON_GPU else canvas
    masks = {"SASA 7 x 7": flexmasks.get_mask("sasa", window=3, **canvas)}
    if ON_GPU:
        masks["SASA 17 x 17"] = flexmasks.get_mask("sasa", window=8, **canvas)
        masks["NATTEN 7 x 7"] = flexmasks.get_mask("natten", kernel=7, **canvas)
        masks["NATTEN 7 x 7, dilation 2"] = flexmasks.get_mask("natten", kernel=7, dilation=2, **canvas)
    q, k, v = random_qkv()
    rows: list[Row] = []
    for what, mask in masks.items():
        blocks = mask.blocks(TIMED_SHAPE[2])
        saved = {"skipped": f"{blocks.sparsity:.0%}", "of the rest hidden": f"{blocks.hidden:.0%}"}
        rows += [row | saved for row in mask_rows(what, mask, q, k, v)]
    finish(rows + causal_rows(q, k, v), file, "TFLOP/s count the pairs that the mask shows.")


if __name__ == "__main__":
    main()
