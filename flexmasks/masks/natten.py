import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.orders import coordinates
from flexmasks.spec import Size, always, bounded, check_canvas, may_read, register_mask

Length = Annotated[int, "int in 1.."]
Order = Annotated[Tensor | None, "int[KV] in 0..KV-1"]
Kernel1 = Annotated[int, "int in 1.."]
Kernel2 = Annotated[int | tuple[int, int], "int in 1.. | int(2) in 1.."]
Kernel3 = Annotated[int | tuple[int, int, int], "int in 1.. | int(3) in 1.."]
Pixels = Tensor | None  # coordinates of all tokens, [axes, tokens], None in row-major order
Words = tuple[Tensor, Tensor, Tensor, int]  # see `words_of`
Place = tuple[Tensor, Tensor | None]  # of a pixel on an axis: its number in its dilation group, and the group's


def _prepare1(
    size: Size | None,
    *,
    length: Length,
    kernel: Kernel1,
    dilation: Kernel1 = 1,
    stride: Kernel1 = 1,
    causal: Annotated[bool, "bool"] = False,
) -> dict[str, Any]:
    return _prepare(size, {"length": length}, None, kernel, dilation, stride, causal)


def _prepare2(
    size: Size | None,
    *,
    height: Length,
    width: Length,
    kernel: Kernel2,
    dilation: Kernel2 = 1,
    stride: Kernel2 = 1,
    causal: Annotated[bool | tuple[bool, bool], "bool | bool(2)"] = False,
    order: Order = None,
) -> dict[str, Any]:
    canvas = {"height": height, "width": width}
    return _with_words(size, _prepare(size, canvas, order, kernel, dilation, stride, causal))


def _prepare3(
    size: Size | None,
    *,
    depth: Length,
    height: Length,
    width: Length,
    kernel: Kernel3,
    dilation: Kernel3 = 1,
    stride: Kernel3 = 1,
    causal: Annotated[bool | tuple[bool, bool, bool], "bool | bool(3)"] = False,
    order: Order = None,
) -> dict[str, Any]:
    canvas = {"depth": depth, "height": height, "width": width}
    return _with_words(size, _prepare(size, canvas, order, kernel, dilation, stride, causal))


def _in_kernels(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, axes: tuple[Any, ...], pixels: Pixels, words: Words | None
) -> Tensor:
    return _neighborhood(q, kv, axes, pixels) if words is None else seen_by_words(q, kv, words)


@register_mask(
    prepare=_prepare2, compiled=_in_kernels, example=lambda length: {"height": 16, "width": length // 16, "kernel": 7}
)
def natten(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, axes: tuple[Any, ...], pixels: Pixels, words: Words | None
) -> Tensor:
    """Neighborhood attention on an image: each pixel sees `kernel` pixels per axis.

    height, width: the canvas; token t is in row t // width and column t % width, and there are height * width keys.
    kernel: number of pixels seen per axis, an int or (rows, columns), also at an edge, where the window shifts inward;
        an even kernel has one more pixel before the query than after it.
    dilation: distance between neighboring pixels of the window, an int or (rows, columns); kernel * dilation must fit.
    stride: number of neighboring queries that share a window, an int or (rows, columns), at most the kernel. They
        share the window of their middle query (of two, the right one), or on a causal axis of their last query. With
        dilation, queries share a window only inside their dilation group.
    causal: a bool or (rows, columns). On a causal axis the window ends at the query, and an edge cuts it.
    order: the pixel of each token if tokens are not in row-major order, as flexmasks.orders gives it. With tokens in
        tiles a window mostly touches fewer blocks: flexmasks.orders.in_tiles takes q, k and v into tiles and the output
        back.

    Source: Hassani et al., Neighborhood Attention Transformer, 2023; Dilated Neighborhood Attention, 2022; Generalized
        Neighborhood Attention, 2025; the definition is that of the NATTEN library.
    Peers: NATTEN na2d and NeighborhoodAttention2D; attention-gym generate_natten, generate_tiled_natten and
        generate_morton_natten (order=) show one key more for an even kernel.
    """
    return _neighborhood(q, kv, axes, pixels)


@register_mask(prepare=_prepare1, example=lambda length: {"length": length, "kernel": max(1, length // 8)})
def natten1d(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, axes: tuple[Any, ...], pixels: None) -> Tensor:
    """Neighborhood attention on a sequence: each token sees exactly `kernel` tokens.

    length: number of tokens.
    kernel, dilation, stride, causal: as in the mask `natten`, for one axis.

    Source: Hassani et al., Neighborhood Attention Transformer, 2023; the definition is that of the NATTEN library.
    Peers: NATTEN na1d and NeighborhoodAttention1D; `local` and `dilated_window` cut the window at the ends instead.
    """
    return _neighborhood(q, kv, axes, pixels)


@register_mask(
    prepare=_prepare3,
    compiled=_in_kernels,
    example=lambda length: {"depth": 4, "height": 8, "width": length // 32, "kernel": 3},
)
def natten3d(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, axes: tuple[Any, ...], pixels: Pixels, words: Words | None
) -> Tensor:
    """Neighborhood attention on a video: each voxel sees `kernel` voxels per axis.

    depth, height, width: the canvas; token t is voxel (t // (height * width), t // width % height, t % width).
    kernel, dilation, stride, causal, order: as in the mask `natten`, one for all axes or (depth, rows, columns):
        causal=(True, False, False) is causal in time.

    Source: Hassani et al., Neighborhood Attention Transformer, 2023; Generalized Neighborhood Attention, 2025; the
        definition is that of the NATTEN library.
    Peers: NATTEN na3d and NeighborhoodAttention3D.
    """
    return _neighborhood(q, kv, axes, pixels)


def _prepare(size: Size | None, canvas: dict[str, int], order: Tensor | None, *window: Any) -> dict[str, Any]:
    """The arguments of the masks. `window`: kernel, dilation, stride and causal, one for all axes or for each."""
    check_canvas(size, canvas)
    each = [v if isinstance(v, tuple) else (v,) * len(canvas) for v in window]
    axes = tuple(zip(canvas.values(), *each, strict=True))
    for name, (length, k, d, s, _) in zip(canvas, axes, strict=True):
        if k * d > length:
            raise ValueError(
                f"the kernel does not fit: kernel {k} with dilation {d} spans {k * d} pixels, `{name}` is {length}; "
                f"pass a kernel of at most {length // d} there."
            )
        if s > k:
            raise ValueError(f"`stride` must be at most the kernel, {k} along `{name}`, got {s}.")
    pixels = pixels_of(size, order, tuple(canvas.values()))
    if pixels is not None:  # blocks of a group are recognized by its number, and not by pixels far apart
        places = [apart(i, axis[2]) for i, axis in zip(pixels, axes, strict=True)]
        pixels = torch.stack([i for i, _ in places] + [group for _, group in places if group is not None])
    return {"axes": axes, "pixels": pixels}


def _with_words(size: Size | None, prepared: dict[str, Any]) -> dict[str, Any]:
    axes, pixels = prepared["axes"], prepared["pixels"]
    canvas, _, dilations, strides, _ = zip(*axes, strict=True)
    if size is None or not (max(dilations) > 1 or are_words_faster(size, canvas, pixels, strides)):
        return prepared | {"words": None}
    fields = []
    tokens = torch.arange(math.prod(canvas), dtype=torch.int32, device=size.device)
    for (i, group), axis in zip(_places(tokens, axes, pixels), axes, strict=True):
        length, _, dilation, *_ = axis
        first, last = limits(i, group, *axis)
        fields.append(((length - 1) // dilation, i, torch.where(first < 0, 0, first), last))
        if group is not None:
            fields.append((dilation - 1, *[group] * 3))
    return prepared | {"words": words_of(size, fields)}


def pixels_of(size: Size | None, order: Tensor | None, canvas: Sequence[int]) -> Pixels:
    """The coordinates of each token, [axes, tokens], or None in row-major order. Raises ValueError if the order may be
    read and is no permutation.
    """
    if order is None:
        return None
    tokens = torch.arange(len(order), device=order.device)
    if may_read(size, order) and not torch.equal(order.long().sort().values, tokens):
        raise ValueError("`order` must be a permutation: each pixel once.")
    return torch.stack(coordinates(order.int(), canvas))


def place(token: Tensor, canvas: Sequence[int], pixels: Pixels) -> list[Tensor]:
    """The coordinates of a token, one for each axis, of `pixels` or of row-major order."""
    if pixels is None:
        return coordinates(token, canvas)
    return [pixels[always(n, token), token] for n in range(len(canvas))]


def _places(token: Tensor, axes: tuple[Any, ...], pixels: Pixels) -> list[Place]:
    """The places of a token, one for each axis, of `_prepare`'s `pixels` or of row-major order."""
    here = place(token, [axis[0] for axis in axes], pixels)
    if pixels is None:
        return [apart(i, axis[2]) for i, axis in zip(here, axes, strict=True)]
    rows = itertools.count(len(axes))
    groups = [pixels[always(next(rows), token), token] if axis[2] > 1 else None for axis in axes]
    return list(zip(here, groups, strict=True))


def apart(i: Tensor, dilation: int) -> Place:
    """The number of pixel i in its dilation group, and the group, None without dilation."""
    return (i // dilation, i % dilation) if dilation > 1 else (i, None)


def _neighborhood(q: Tensor, kv: Tensor, axes: tuple[Any, ...], pixels: Pixels) -> Tensor:
    places = zip(_places(q, axes, pixels), _places(kv, axes, pixels), axes, strict=True)
    return functools.reduce(operator.and_, [sees(i, j, *axis) for i, j, axis in places])


def sees(i: Place, j: Place, length: int, kernel: int, dilation: int, stride: int, causal: bool) -> Tensor:
    """Whether i sees j on one axis. With dilation they see each other only inside their group."""
    first, last = limits(*i, length, kernel, dilation, stride, causal)
    if kernel % 2 and not causal:
        seen = (j[0] - (first + kernel // 2)).abs() <= kernel // 2  # one comparison is faster than two
    else:
        seen = (j[0] >= first) & (j[0] <= last)
    return seen if j[1] is None else seen & (j[1] == i[1])


def limits(
    i: Tensor, group: Tensor | None, length: int, kernel: int, dilation: int, stride: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The first and the last pixel, counted in the dilation group, of a place's window on one axis. On a causal axis
    the first one may lie before the axis.
    """
    end = length - 1 if group is None else (length - group + dilation - 1) // dilation - 1
    leader = i
    if stride > 1:
        leader = i // stride * stride + (stride - 1 if causal else stride // 2)
        leader = torch.where(leader > end, end, leader)
    if causal:
        return leader - (kernel - 1), i
    start = leader - kernel // 2
    start = torch.where(start < 0, 0, start)  # some backends of FlexAttention lack clamp
    start = torch.where(start > end + 1 - kernel, end + 1 - kernel, start)
    return start, start + (kernel - 1)


# --- as kernels compute it ---

_MIN_DIVISIONS = 2  # with two, words take 0.57 of a forward pass's time, with one 0.99 (H200, FLASH)


def are_words_faster(size: Size, canvas: Sequence[int], pixels: Pixels, strides: Sequence[int] = ()) -> bool:
    """Whether kernels read words sooner than they compute coordinates; a GPU divides by powers of 2 with a shift."""
    if size.runs_on_cpu or pixels is not None:
        return True
    divisors = {math.prod(canvas[n:]) for n in range(1, len(canvas))} | set(strides)
    return sum(n & (n - 1) != 0 for n in divisors) >= _MIN_DIVISIONS


def words_of(size: Size, fields: Sequence[tuple[int, Tensor, Tensor, Tensor]]) -> Words | None:
    """Words of all coordinates, or None if they do not fit.

    A word is an int32. There are words of keys, of the first pixels that queries see, and of the last pixels; with them
    goes the word of all guard bits. Each coordinate has a field with a guard bit above it. Where the guard bits are set
    in one word and not in the other, their difference has those guard bits whose coordinates are not less, and no field
    borrows from the next. So kernels compare all axes at once. The words of the last pixels have the guard bits, and
    from the words of the first pixels the guard bits are subtracted.

    fields: for each coordinate the greatest one, and int32[tokens] of the tokens' coordinates, of the first and of the
        last coordinate that they see.
    """
    bits = [greatest.bit_length() for greatest, *_ in fields]
    if sum(bits) + len(bits) > 31:
        return None
    words = [torch.zeros_like(x) for x in fields[0][1:]]
    shift, guards = 0, 0
    for count, (_, *of_field) in zip(bits, fields, strict=True):
        words = [word + (x << shift) for word, x in zip(words, of_field, strict=True)]
        shift += count + 1
        guards += 1 << (shift - 1)
    if size.at_most:  # a sequence that is too long for the canvas is not noticed, and must not be read past the end
        more = size.positions - len(words[0])
        words = [torch.cat([word, word[-1:].expand(more)]) if more > 0 else word for word in words]
    at, first, last = words
    all_fields = (1 << shift) - 1 - guards  # all bits of coordinates
    return (
        bounded(at, 0, all_fields),
        bounded(first - guards, -guards, all_fields - guards),
        bounded(last + guards, guards, all_fields + guards),
        guards,
    )


def seen_by_words(q: Tensor, kv: Tensor, words: Words) -> Tensor:
    """Whether all coordinates of keys lie inside the limits of queries."""
    at, first, last, guards = words
    at_key = at[kv]
    return (at_key - first[q]) & (last[q] - at_key) & guards == guards
