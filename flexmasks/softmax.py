"""The fused masked softmax: `masked_softmax` by a mask's name, `scaled_masked_softmax` by a boolean tensor.

Both come down to one operator, torch.ops.flexmasks.masked_softmax, that torch.compile, torch.export and autograd know:
Triton kernels on a GPU (flexmasks.kernels.softmax), plain torch elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

from flexmasks import compat
from flexmasks.plans.rows import Rows, rows_of
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.parameters import describe
from flexmasks.spec.values import Mask

MaskLike = str | Mask | Callable[..., Tensor]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ARRAYS = (list, tuple, np.ndarray)
_SYMBOLS = (torch.SymFloat, torch.SymInt)
_LARGEST = torch.finfo(torch.float32).max / math.log2(math.e)  # kernels compute by powers of two
_CHUNK = 1 << 20  # elements that plain torch computes at once
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NOTHING = contextlib.nullcontext()
_library = torch.library.Library("flexmasks", "FRAGMENT")

# x [..., K]. What is visible is what all of these leave visible, each broadcasting to x's leading dimensions:
# bounds, int32 [..., 2]: first visible column and end of each row; 0, 0 for a row that sees nothing
# bits, int32 [..., ceil(K / 32)]: column k is visible where bit k % 32 of word k // 32 is set; needs bounds, and is not
#     set outside them
# mask, bool or integer [..., K or 1]: not 0 where visible (`visible`), or where hidden (not `visible`)
_library.define(
    "masked_softmax(Tensor x, Tensor? bounds, Tensor? bits, Tensor? mask, bool visible, Scalar scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "masked_softmax_backward(Tensor dy, Tensor y, Tensor? bounds, Scalar scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_forward_op = torch.ops.flexmasks.masked_softmax.default
_backward_op = torch.ops.flexmasks.masked_softmax_backward.default


def masked_softmax(x: Tensor, *, mask: MaskLike | Tensor | None = None, scale: float = 1.0, **params: Any) -> Tensor:
    """softmax(x * scale) over the columns that a mask lets each row see, and 0 elsewhere; differentiable.

    The mask is computed, not loaded: what each row sees is found once, kept (see `flexmasks.cache_info`), and tells
    the kernel which columns to read. A row that sees nothing is 0 everywhere. Hidden scores may hold anything, NaN too,
    and so may their gradients: neither reaches an output or a gradient. Visible ones give what torch.softmax gives:
    NaN for a row of -inf, or with a NaN or inf.

    Args:
        x: scores, [B, H, Q, K], float16, bfloat16, float32 or float64 (on a GPU float64 is not fused), of any strides.
            Sums are float32 (float64 for float64).
        mask: a registered mask's name, a Mask, or a function (b, h, q, kv) -> bool of index tensors, True = visible; or
            a boolean tensor, True = visible, that broadcasts to x; everything is visible by default.
        scale: factor of x, a finite number, also NumPy's; autocast changes nothing.
        **params: the parameters of a mask given by name.

    Returns:
        The softmax, of x's shape and dtype, contiguous.

    Raises:
        ValueError, TypeError: on any input that does not fit, with what to pass.

    All of torch's transforms know it, in derivatives of any order, forward and reverse. Where values cannot be read
    (inside torch.compile, torch.export and make_fx, of fake and meta tensors, under torch.vmap over what the mask is
    made of) the mask, if it is no tensor, is computed as booleans, of the dimensions on which it depends. Visible
    places at which the softmax is 0 by underflow pass no gradient on.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Example:
        >>> import torch, flexmasks
        >>> flexmasks.masked_softmax(torch.zeros(1, 1, 4, 4), mask="grouped_tril", seq_lens=torch.tensor([3]))[0, 0]
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.3333, 0.3333, 0.3333, 0.0000],
                [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    call = "flexmasks.masked_softmax"
    _check(call, x, scale)
    if x.ndim != 4:
        raise ValueError(f"{call}: `x` must have 4 dimensions, [B, H, Q, K], got {describe(x)}.")
    if mask is None:
        from_arguments(None, None, params)  # there are none
        rows = Rows()
    elif isinstance(mask, (Tensor, *_ARRAYS)):
        from_arguments(None, None, params)
        wanted = "must be a name, a Mask, a function, or a boolean tensor, True = visible"
        _check_mask(call, x, mask, (torch.bool,), wanted)
        rows = Rows(seen=mask)
    else:
        rows = rows_of(mask, params, x)
    return _softmax(x, *rows, True, torch.sym_float(scale))


def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(x * scale) over the columns that are not masked, and 0 at those that are; differentiable in x.

    The mask is read once, with its own strides, and never expanded in memory. A row whose columns are all masked is 0
    everywhere (elsewhere, with a finite score in place of -inf, it is 1 / K). NaN and inf are as in `masked_softmax`.

    Args:
        x: scores, [..., K], float16, bfloat16, float32 or float64 (on a GPU float64 is not fused), of any strides.
        mask: boolean, or integer with 0 for False: True = HIDDEN, as in Megatron-LM and apex. Of any shape that
            broadcasts to x's: [B, 1, Q, K], say.
        scale: factor of x, a finite number.

    Returns:
        The softmax, of x's shape and dtype, contiguous.

    Raises:
        ValueError, TypeError: on any input that does not fit, with what to pass.

    Source: scaled_masked_softmax of Megatron-LM, Shoeybi et al., 2019.

    Example:
        >>> import torch, flexmasks
        >>> flexmasks.scaled_masked_softmax(torch.zeros(2, 3), torch.tensor([[0, 0, 1], [1, 1, 1]]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    call = "flexmasks.scaled_masked_softmax"
    _check(call, x, scale)
    _check_mask(call, x, mask, _MASK_DTYPES, "must be a boolean or integer tensor, True = hidden")
    return _softmax(x, None, None, mask, False, torch.sym_float(scale))


def _check(call: str, x: Any, scale: Any) -> None:
    _check_tensor(call, "x", x, _DTYPES, "must be a tensor of float16, bfloat16, float32 or float64")
    if not x.ndim:
        raise ValueError(f"{call}: `x` must have at least one dimension, got {describe(x)}.")
    if isinstance(scale, _SYMBOLS):  # of a shape that is being traced
        return
    is_number = type(scale) is float or (isinstance(scale, numbers.Real) and not isinstance(scale, bool))
    if not is_number:
        is_tensor = isinstance(scale, (Tensor, np.ndarray))
        got = f"{type(scale).__name__}; multiply `x` by it instead" if is_tensor else repr(scale)
        raise TypeError(f"{call}: `scale` must be a number, got {got}.")
    if not -_LARGEST <= scale <= _LARGEST:
        raise ValueError(f"{call}: `scale` must be finite, at most {_LARGEST:.3g}, got {scale!r}.")


def _check_mask(call: str, x: Tensor, mask: Any, dtypes: tuple[torch.dtype, ...], wanted: str) -> None:
    _check_tensor(call, "mask", mask, dtypes, wanted)
    if mask.device != x.device:
        raise ValueError(f"{call}: `mask` is on {mask.device}, `x` on {x.device}; use mask.to({str(x.device)!r}).")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    fits = _broadcasts if torch.compiler.is_compiling() else lambda m, n: m in (1, n)
    if mask.ndim > x.ndim or not all(fits(m, n) for m, n in sizes):
        raise ValueError(
            f"{call}: `mask` must broadcast to x's shape {list(x.shape)}: each size, from the last, that of x or 1; "
            f"got {describe(mask)}."
        )


def _broadcasts(m: int, n: int) -> bool:
    """Whether a size is 1 or n. Sizes that only runs of a graph will know are taken for equal, which those check."""
    if guard_or_false(m == 1) or guard_or_false(m == n):
        return True
    if not guard_or_true(m == n):
        return False
    compat.require(m == n, lambda: "flexmasks: a mask's sizes must be those of x, or 1")
    return True


def _check_tensor(call: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], wanted: str) -> None:
    if not isinstance(value, Tensor):
        hint = "; use torch.as_tensor" if isinstance(value, _ARRAYS) else ""
        raise TypeError(f"{call}: `{name}` {wanted}, got {type(value).__name__}{hint}.")
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(f"{call}: `{name}` must be a dense tensor, got {kind}.")
    if value.dtype not in dtypes:
        raise TypeError(f"{call}: `{name}` {wanted}, got {describe(value)}.")


# --- what runs ---


def _forward(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    if x.is_cuda and x.dtype in _KERNEL_DTYPES:
        from flexmasks.kernels import softmax as softmax_kernels  # Triton is not everywhere

        with _current(x.device):
            return softmax_kernels.forward(x, bounds, bits, mask, visible, scale)
    return _forward_plain(x, bounds, bits, mask, visible, scale)


def _backward(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    if y.is_cuda and y.dtype in _KERNEL_DTYPES:
        from flexmasks.kernels import softmax as softmax_kernels

        with _current(y.device):
            return softmax_kernels.backward(dy, y, bounds, scale)
    return _backward_plain(dy, y, scale)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return _NOTHING if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def _forward_plain(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """The softmax in plain torch, some rows at a time; half precisions are computed in float32."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = torch.arange(x.shape[-1], device=x.device)
    for part in _parts(x.shape):
        of_bounds, of_bits, of_mask = (None if t is None else _cut(t, part) for t in (bounds, bits, mask))
        hidden = _hidden(columns, of_bounds, of_bits, of_mask, visible)
        scores = _cut(x, part).to(_accumulator(x.dtype)) * scale
        if hidden is None:
            found = scores.softmax(-1)
        else:
            found = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0)
        _cut(y, part).copy_(found)
    return y


def _backward_plain(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    for part in _parts(y.shape):
        found = _over_visible(lambda y, dy: scale * y * (dy - _dot(y, dy)), _cut(y, part), _cut(dy, part))
        _cut(dx, part).copy_(found)
    return dx


def _over_visible(formula: Callable[..., Tensor], y: Tensor, *others: Tensor) -> Tensor:
    """A formula of a softmax y and others of its shape, with 0 for these, and in the result, where y is 0: hidden."""
    hidden = y == 0
    wide = _accumulator(y.dtype)
    found = formula(y.to(wide), *(t.to(wide).masked_fill(hidden, 0) for t in others))
    return found.masked_fill(hidden, 0).to(y.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _hidden(
    columns: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool
) -> Tensor | None:
    """Where nothing is visible, [..., K], not expanded; None: nowhere."""
    hidden = None
    if mask is not None:
        hidden = (mask == 0) if visible else (mask != 0)
    if bits is not None:
        word, bit = columns // 32, (columns % 32).int()
        unset = (bits.index_select(-1, word) >> bit) & 1 == 0
        hidden = unset if hidden is None else hidden | unset
    if bounds is not None:
        outside = (columns < bounds[..., :1]) | (columns >= bounds[..., 1:])
        hidden = outside if hidden is None else hidden | outside
    return hidden


def _parts(shape: torch.Size) -> Iterator[tuple[slice, ...]]:
    """Slices of the leading dimensions that cut a tensor into parts of at most _CHUNK elements, or else of one row."""
    *leading, size = shape
    steps: list[int] = []
    for n in reversed(leading):
        steps.insert(0, max(1, min(n, _CHUNK // max(1, size))))
        size *= steps[0]
    starts = (range(0, n, step) for n, step in zip(leading, steps, strict=True))
    for part in itertools.product(*starts):
        yield tuple(slice(start, start + step) for start, step in zip(part, steps, strict=True))


def _cut(x: Tensor, part: tuple[slice, ...]) -> Tensor:
    """The part of a tensor that broadcasts to the one that is cut."""
    own = part[len(part) - x.ndim + 1 :] if x.ndim else ()
    return x[tuple(slice(None) if n == 1 else p for n, p in zip(x.shape[:-1], own, strict=True))]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- derivatives ---


class _Softmax(compat.SingleLevelFunction):
    """The softmax where no transform is at work, which needs no dispatcher; and the operator's derivatives."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        y = _forward(*args)
        ctx.save_for_backward(*_Softmax.saved(args, y))
        ctx.scale = args[-1]
        return y

    @staticmethod
    def saved(args: Sequence[Any], y: Tensor) -> tuple[Tensor | None, ...]:
        _, bounds, *_ = args
        return y, bounds

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, bounds = ctx.saved_tensors
        return _gradient(dy, y, bounds, ctx.scale), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> Tensor:
        y, bounds = ctx.saved_tensors
        with _forward_mode():
            return _gradient(dx, y, bounds, ctx.scale)  # the Jacobian is symmetric


class _SoftmaxBackward(compat.SingleLevelFunction):
    """Derivatives of the backward operator."""

    @staticmethod
    def saved(args: Sequence[Any], dx: Tensor) -> tuple[Tensor | None, ...]:
        dy, y, bounds, _ = args
        return dy, y, bounds

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        dy, y, bounds = ctx.saved_tensors
        of_dy = _gradient(d, y, bounds, ctx.scale) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_dy, None, None, None
        of_y = _over_visible(lambda y, d, dy: ctx.scale * (d * (dy - _dot(y, dy)) - dy * _dot(d, y)), y, d, dy)
        return of_dy, of_y, None, None

    @staticmethod
    def jvp(ctx: Any, d_dy: Tensor | None, d_y: Tensor | None, *_: None) -> Tensor:
        dy, y, bounds = ctx.saved_tensors
        with _forward_mode():
            dy, y = (forward_ad.unpack_dual(t, level=0).primal for t in (dy, y))  # there is but one level
            found = torch.zeros_like(y) if d_dy is None else _gradient(d_dy, y, bounds, ctx.scale)
            if d_y is None:
                return found
            return found + _over_visible(
                lambda y, d_y, dy: ctx.scale * (d_y * (dy - _dot(y, dy)) - y * _dot(d_y, dy)), y, d_y, dy
            )


def _forward_mode() -> contextlib.AbstractContextManager[object]:
    """Forward mode on: torch turns it off inside a Function, outer transforms would take all in there for constant."""
    return compat.forward_derivatives(True)


def _softmax(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """The operator, by the shortest way."""
    if not _is_plain(x):
        return _forward_op(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
    if x.requires_grad and torch.is_grad_enabled():
        return _Softmax.apply(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
    return _forward(x, bounds, bits, mask, visible, scale)


def _gradient(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    """The backward operator, by the shortest way."""
    if _is_plain(y) and _is_plain(dy) and not torch.is_grad_enabled():
        return _backward(dy, y, bounds, scale)
    return _backward_op(dy, y, bounds, scale)  # type: ignore[no-any-return]


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor holds just numbers, and nothing watches what is done with it: the dispatcher is not needed."""
    return bool(
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and not compat.transforms_active()
        and not compat.in_dispatch_mode()
        and not compat.in_forward_derivative()
        and not compat.is_batched_gradient(x)  # under torch.autograd.grad(is_grads_batched=True)
        and not x.is_meta
        and not x.is_neg()  # what z.conj().imag is: kernels read memory, which lacks the sign
    )


# --- what the dispatcher knows ---


def _register(op: Any, run: Callable[..., Tensor], function: Any, fake: Callable[..., Tensor]) -> None:
    name = op._schema.name

    class Formula(function):
        """The function for the dispatcher, which calls it for one transform of torch.func after the other."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            *args_of_op, keyset = args
            with compat.below_autograd(), torch.enable_grad(), _forward_mode():
                y: Tensor = op.redispatch(keyset & compat.after_autograd_keys, *args_of_op)
            saved = function.saved(args_of_op, y)
            ctx.save_for_backward(*saved)
            ctx.save_for_forward(*saved)
            ctx.scale = args_of_op[-1]
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return *function.backward(ctx, *grads), None

    def autograd(keyset: Any, *args: Any) -> Any:
        with compat.single_level_autograd():
            return Formula.apply(*args, keyset)

    def vmapped(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return op(*_batched(info.batch_size, in_dims, args)), 0

    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(name, fake, lib=_library)
    torch.library.register_vmap(name, vmapped, lib=_library)


def _batched(size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """The arguments of an operator under vmap: the mapped dimension first, in all tensors that have it."""
    ndim = args[0].ndim - (in_dims[0] is not None)
    found = []
    for n, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if dim is not None:
            arg = arg.movedim(dim, 0)
            arg = arg.reshape(size, *(1,) * (ndim + 1 - arg.ndim), *arg.shape[1:])
        elif n == 0 or (n == 1 and len(args) == 4):  # x; dy and y
            arg = arg.expand(size, *arg.shape)
        found.append(arg)
    return found


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_register(_forward_op, _forward, _Softmax, _fake)
_register(_backward_op, _backward, _SoftmaxBackward, lambda dy, y, *_: _fake(y))
