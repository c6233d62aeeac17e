"""The fused masked softmax: `masked_softmax` of any mask, `scaled_masked_softmax` in the form of Megatron-LM.

Both call one operator, torch.ops.flexmasks.masked_softmax (flexmasks.kernels.softmax_operator), which torch.compile,
torch.export and autograd know. Under transforms of torch.func, in forward mode and in exports to ONNX they are
operations of torch.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import checkpointing, compat
from flexmasks.context import is_traced_or_transformed
from flexmasks.kernels.direct import is_plain
from flexmasks.kernels.softmax_operator import has_transforms, hidden_places, softmax, softmax_alone, softmax_operator
from flexmasks.plans.checks import ARRAYS, check_hidden, check_scores, check_visible
from flexmasks.plans.rows import rows_of
from flexmasks.spec.aliases import has_derivatives
from flexmasks.spec.arguments import Alignment, MaskLike, from_arguments
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.parameters import as_number, can_be_read, listed

_LARGE = 1 << 28  # scores, of which the formula makes several copies in float32
_log = logging.getLogger("flexmasks")


@says_what_to_write()
def masked_softmax(
    x: Tensor,
    *,
    mask: MaskLike | Tensor | None = None,
    scale: float = 1.0,
    q_offset: Alignment = None,
    dtype: torch.dtype | None = None,
    **params: Any,
) -> Tensor:
    """Return softmax(x * scale) over visible columns, and 0 elsewhere.

    The mask says which columns each row sees. It is computed, not loaded: the visible columns of each row are planned
    once and cached (see `flexmasks.cache_info`), and the kernel reads only the visible columns. A row that sees nothing
    is 0 everywhere. Hidden scores may hold anything, NaN too, and so may their gradients: neither reaches an output or
    a gradient. Visible scores give what torch.softmax gives: NaN for a row that holds only -inf, and for a row with a
    NaN or +inf.

    Args:
        x: scores, [B, H, Q, K], or [Q, K] and [B, Q, K] for one head, or [..., B, H, Q, K], whose leading dimensions
            are batch elements; float16, bfloat16, float32 or float64 (on a GPU float64 is not fused), of any strides.
            Sums are float32 (float64 for float64).
        mask: a registered mask's name, a Mask, or a function (b, h, q, kv) -> bool of index tensors, True = visible; or
            a boolean tensor, True = visible, that broadcasts to x. Everything is visible by default.
        scale: factor of x, a finite number, also NumPy's. Autocast does not affect the call.
        q_offset: the position of row 0 to the mask, as in `attention`: an int >= 0, integers [B], "first" or "last". It
            must be given where Q and K differ and the mask reads the row's position.
        dtype: x is cast to it first, as by torch.softmax; by default x keeps its dtype.
        **params: the parameters of a mask given by name.

    Returns:
        The softmax, of x's shape and dtype, or of `dtype`, contiguous.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    It is differentiable in x, in derivatives of any order, forward and reverse, and under all transforms of torch.func.
    Forward mode, these transforms, and gradients of gradients take operations of torch in place of the kernel, which
    need several times the memory of x.
    Where values cannot be read (inside torch.compile, torch.export and make_fx, of fake and meta tensors, under
    torch.vmap over tensors of the mask) a mask that is no tensor becomes a boolean tensor, with only the dimensions on
    which it depends. torch.onnx.export(dynamo=True) gets plain operations. Visible places at which the softmax
    underflows to 0 pass on no gradient.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Example:
        >>> import torch, flexmasks
        >>> flexmasks.masked_softmax(torch.zeros(1, 1, 4, 4), mask="grouped_tril", seq_lens=torch.tensor([3]))[0, 0]
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.3333, 0.3333, 0.3333, 0.0000],
                [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    scale = as_number(scale)
    check_scores("flexmasks.masked_softmax", x, scale, dtype, ndim=2)
    x = x if dtype is None else x.to(dtype)
    _check_export("flexmasks.masked_softmax")
    if mask is None or isinstance(mask, (Tensor, *ARRAYS)):
        if q_offset is not None:
            raise TypeError("flexmasks.masked_softmax: a mask that is a tensor has no positions; leave out `q_offset`.")
        check_visible("flexmasks.masked_softmax", x, mask)
        from_arguments(None, None, params)  # raises for any parameter: only a mask given by name takes parameters
        return _watched(_softmax(x, None, None, mask, True, scale), mask)
    q_offset = listed(q_offset, x.device)
    scores = x if x.ndim == 4 else x.reshape(_with_heads(x.shape))
    out = _softmax(scores, *rows_of(mask, params, scores, q_offset), True, scale)
    return _watched(out if x.ndim == 4 else out.view(x.shape), mask, params, q_offset)


def _check_export(call: str) -> None:
    if compat.in_onnx_export() and torch.jit.is_tracing():  # type: ignore[attr-defined] # public, and not listed
        raise RuntimeError(f"{call}: torch.onnx.export needs dynamo=True.")


def _with_heads(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of scores with one batch dimension and one of heads."""
    *batch, q_len, kv_len = shape
    *batch, heads = batch if len(batch) > 1 else [*batch, 1]
    return math.prod(batch), heads, q_len, kv_len


def _softmax(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """Call the operator, whose arguments these are, or the formula where the operator has no derivatives."""
    if is_plain(x):
        return softmax_alone(x, bounds, bits, mask, visible, float(scale))
    if not (has_transforms() or compat.in_onnx_export()):
        return softmax_operator(x, bounds, bits, mask, visible, torch.sym_float(scale))  # type: ignore[no-any-return]
    if compat.statically_known_true(x.numel() > _LARGE):
        _warn_of_formula()
    columns = torch.arange(x.shape[-1], device=x.device)
    return softmax(x, hidden_places(columns, None if mask is not None else bounds, bits, mask, visible), scale)


@compat.constant_in_graphs
def _warn_of_formula() -> None:
    _warn_once(
        "flexmasks: under transforms of torch.func, in forward mode and in exports to ONNX a softmax is computed by "
        "operations of torch, which take several times the memory of the scores."
    )


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def _watched(out: Tensor, mask: Any, params: Any = None, q_offset: Any = None) -> Tensor:
    """Return the output of a call with a mask, which activation checkpointing may make again."""
    without_gradient = torch.is_grad_enabled() and not out.requires_grad
    if mask is None or without_gradient or is_traced_or_transformed():
        return out

    def check_of_tensors() -> Callable[[], None]:
        from flexmasks.backends.reference import frozen_functions  # imports torch's tracing

        is_tensor = isinstance(mask, Tensor)
        function = None if is_tensor else from_arguments(mask, None, params)[0]
        return frozen_functions(function, None, out, (q_offset, mask if is_tensor else None))[2]

    return cast(Tensor, checkpointing.watched((out,), check_of_tensors)[0])


@says_what_to_write(lambda *given: "x, mask and scale")
def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return softmax(x * scale) over the columns that a mask in the form of Megatron-LM leaves, and 0 elsewhere.

    In that form, as in apex, True, 1 or any number but 0 HIDES a column. It is the only call of flexmasks in which True
    does not mean visible: `masked_softmax(x, mask=~hidden, scale=scale)` is the same for booleans.

    The mask is read once, with its own strides, and never expanded in memory. A row whose columns are all hidden is 0
    everywhere (implementations that fill with a finite score instead of -inf give 1 / K there). NaN and inf act as in
    `masked_softmax`, and so do derivatives.

    Args:
        x: scores, [..., K], float16, bfloat16, float32 or float64 (on a GPU float64 is not fused), of any strides.
        mask: booleans or numbers, True or any number but 0 = HIDDEN. Of any shape that broadcasts to x's: [B, 1, Q, K],
            say.
        scale: factor of x, a finite number, or a tensor of one element, which the host reads. Where values cannot be
            read, as inside torch.compile, or where it learns, x is multiplied by it.

    Returns:
        The softmax, of x's shape and dtype, contiguous.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    Source: scaled_masked_softmax of Megatron-LM, Shoeybi et al., 2019.

    Example:
        >>> import torch, flexmasks
        >>> flexmasks.scaled_masked_softmax(torch.zeros(2, 3), torch.tensor([[0, 0, 1], [1, 1, 1]]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    scale = as_number(scale)
    if isinstance(scale, Tensor) and scale.numel() == 1:
        is_number = can_be_read(scale) and not has_derivatives(scale)
        x, factor = (x, float(scale)) if is_number else (x * scale.to(x.dtype), 1.0)
    else:
        factor = cast(float, scale)
    check_scores("flexmasks.scaled_masked_softmax", x, factor)
    check_hidden("flexmasks.scaled_masked_softmax", x, mask)
    _check_export("flexmasks.scaled_masked_softmax")
    hidden = mask != 0 if mask.is_floating_point() else mask
    return _watched(_softmax(x, None, None, hidden, False, factor), mask)
