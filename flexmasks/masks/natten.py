from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.params import Size, check_canvas, pair
from flexmasks.registry import register_mask


def _prepare(
    size: Size | None,
    *,
    height: Annotated[int, "int in 1.."],
    width: Annotated[int, "int in 1.."],
    kernel: Annotated[int | tuple[int, int], "int in 1.. | int(2) in 1.."],
    dilation: Annotated[int | tuple[int, int], "int in 1.. | int(2) in 1.."] = 1,
    causal: Annotated[bool | tuple[bool, bool], "bool | bool(2)"] = False,
) -> dict[str, Any]:
    check_canvas(size, height, width)
    axes = list(zip(pair(kernel), pair(dilation), (height, width), ("height", "width"), strict=True))
    for k, d, length, axis in axes:
        if k * d > length:
            raise ValueError(
                f"the kernel does not fit: kernel {k} with dilation {d} spans {k * d} pixels, `{axis}` is {length}; "
                f"pass a kernel of at most {length // d} there."
            )
    return {"canvas": (height, width), "kernel": pair(kernel), "dilation": pair(dilation), "causal": pair(causal)}


@register_mask(prepare=_prepare, example=lambda length: {"height": 16, "width": length // 16, "kernel": 7})
def natten(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    canvas: tuple[int, int],
    kernel: tuple[int, int],
    dilation: tuple[int, int],
    causal: tuple[bool, bool],
) -> Tensor:
    """Neighborhood attention: each pixel sees exactly `kernel` pixels per axis, the window shifting at the edges.

    height, width: the canvas; token t is row t // width, column t % width, and the keys are height * width.
    kernel: pixels seen per axis, an int or (rows, columns); an even kernel has one more before the query than after.
    dilation: distance of neighboring pixels of the window, an int or (rows, columns); kernel * dilation must fit.
    causal: a bool or (rows, columns); on a causal axis the window ends at the query and is cut, not shifted.

    Source: Hassani et al., Neighborhood Attention Transformer, 2023, and Dilated Neighborhood Attention, 2022;
        the definition is that of the NATTEN library (stride 1).
    """
    width = canvas[1]
    rows = _axis(q // width, kv // width, canvas[0], kernel[0], dilation[0], causal[0])
    return rows & _axis(q % width, kv % width, width, kernel[1], dilation[1], causal[1])


def _axis(i: Tensor, j: Tensor, length: int, kernel: int, dilation: int, causal: bool) -> Tensor:
    """One axis: the dilation splits it into groups of every dilation-th pixel; a window lies within a group."""
    last: int | Tensor = length - kernel
    same = None
    if dilation > 1:
        group = i % dilation
        same = j % dilation == group
        last = (length - group + dilation - 1) // dilation - kernel
        i, j = i // dilation, j // dilation
    if causal:
        seen = (j <= i) & (i - j < kernel)
    else:
        start = i - kernel // 2
        start = torch.where(start < 0, 0, start)  # not clamp: some backends of FlexAttention lack it
        start = torch.where(start > last, last, start)
        middle = (j - (start + kernel // 2)).abs() <= kernel // 2  # one comparison: faster in kernels
        seen = middle if kernel % 2 else (j >= start) & (j < start + kernel)
    return seen if same is None else seen & same
