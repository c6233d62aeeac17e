"""A Triton kernel that writes a value into the padding of rows of tokens, and touches nothing else."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.kernels.direct import on
from flexmasks.kernels.launches import Launch, compiled, layouts_of

_TOKENS, _WARPS = 32, 4  # of a program
_launches: Launches[Launch] = Launches("padding")


@triton.jit(do_not_specialize=["tokens", "length", "heads", "of_token", "of_head"])
def padding_kernel(
    x, counts, tokens, length, heads, of_token, of_head,
    PLACE: tl.constexpr, VALUE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    count = tl.load(counts + PLACE)
    is_padding = (token < tokens) & (token % length >= count)
    if tl.max(is_padding.to(tl.int32), 0) > 0:
        column = tl.arange(0, WIDTH)[None, :]
        rows = x + token.to(tl.int64)[:, None] * of_token + column
        values = tl.full((TOKENS, WIDTH), VALUE, tl.float32)
        values = tl.where(count < 0, float("nan"), values).to(x.dtype.element_ty)
        for _ in range(heads):
            tl.store(rows, values, mask=is_padding[:, None] & (column < SIZE))
            rows += of_head


def hide_padding(x: Tensor, length: int, counts: Tensor, place: int, value: float) -> None:
    """Write a value behind the first `counts[place]` tokens of each row of `length` tokens, or NaN if that is negative.

    x: [tokens, H, D], rows end to end; the last stride is 1 or D is.
    counts: int32[2].
    """
    tokens, heads, size = x.shape
    key = place, value, length, x.device.index, *layouts_of(x)
    with on(x.device):
        launch = _launches.get(key)
        if launch is None:
            numbers = tokens, length, heads, x.stride(0), x.stride(1)
            constants = place, value, size, triton.next_power_of_2(size), _TOKENS
            launch = compiled(padding_kernel, -(-tokens // _TOKENS), _WARPS, (x, counts), (), (*numbers, *constants))
            _launches.keep(key, launch)
        launch((x, counts), ())
