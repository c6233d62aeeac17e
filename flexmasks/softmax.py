"""The fused masked softmax: `masked_softmax` by a mask's name, `scaled_masked_softmax` by a boolean tensor.

Both come down to one operator, torch.ops.flexmasks.masked_softmax, that torch.compile, torch.export and autograd know:
Triton kernels on a GPU (flexmasks.softmax_kernels), plain torch elsewhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined] # not listed

from flexmasks.blocks import over_indices
from flexmasks.params import Size, describe
from flexmasks.planning import rows_of
from flexmasks.registry import from_arguments, get_mask
from flexmasks.values import Mask

MaskLike = str | Mask | Callable[..., Tensor]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
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
        scale: factor of x, a finite number; autocast changes nothing.
        **params: the parameters of a mask given by name.

    Returns:
        The softmax, of x's shape and dtype, contiguous.

    Raises:
        ValueError, TypeError: on any input that does not fit, with what to pass.

    Inside torch.compile and torch.export the mask, where it is no tensor, becomes boolean inside the graph. Visible
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
    if isinstance(mask, Tensor):
        from_arguments(None, None, params)  # there are none
        if mask.dtype != torch.bool:
            raise TypeError(f"{call}: a tensor `mask` must be boolean, True = visible, got {describe(mask)}.")
        _check_mask(call, x, mask)
        return _softmax(x, None, None, mask, True, torch.sym_float(scale))
    if mask is None or not x.numel():
        from_arguments(mask, None, params)
        return _softmax(x, None, None, None, False, torch.sym_float(scale))
    if torch.compiler.is_compiling():
        seen, bounds = _inside_graph(mask, params, x)
        return _softmax(x, bounds, None, seen, True, torch.sym_float(scale))
    rows = rows_of(mask, params, x.shape, x.device)
    return _softmax(x, rows.bounds, rows.bits, None, False, torch.sym_float(scale))


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
    if not isinstance(mask, Tensor) or mask.dtype not in _MASK_DTYPES:
        raise TypeError(f"{call}: `mask` must be a boolean or integer tensor, True = hidden, got {_kind(mask)}.")
    _check_mask(call, x, mask)
    return _softmax(x, None, None, mask, False, torch.sym_float(scale))


def _inside_graph(mask: MaskLike, params: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """The mask as booleans, and the bounds of its rows, computed inside a graph of torch.compile."""
    batch, heads, q_len, kv_len = x.shape
    size = Size(batch, heads, q_len, kv_len, x.device)
    if isinstance(mask, str | Mask) or params:
        made = get_mask(mask, **params)
        mod = made.bind(made.resolve(size))
    else:
        mod = mask  # its signature cannot be read here
    indices = (torch.arange(n, device=size.device) for n in (size.batch, size.heads, size.q_len, size.kv_len))
    seen = over_indices(mod)(*indices)
    for dim in (0, 1, 2):
        if seen.stride(dim) == 0:  # the mask does not depend on it
            seen = seen.narrow(dim, 0, 1)
    column = torch.arange(size.kv_len, device=size.device)
    end = torch.where(seen, column + 1, 0).amax(-1)
    first = torch.minimum(torch.where(seen, column, size.kv_len).amin(-1), end)
    return seen, torch.stack([first, end], -1).int()


def _check(call: str, x: Any, scale: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{call}: `x` must be a tensor, got {_kind(x)}.")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{call}: `x` must be float16, bfloat16, float32 or float64, got {describe(x)}.")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{call}: `x` must be a dense tensor, got one of layout {x.layout}.")
    if not x.ndim:
        raise ValueError(f"{call}: `x` must have at least one dimension, got {describe(x)}.")
    if isinstance(scale, torch.SymFloat | torch.SymInt):  # of a shape that is being traced
        return
    if type(scale) is not float and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"{call}: `scale` must be a number, got {scale!r}.")
    if not torch.compiler.is_compiling() and not -_LARGEST <= scale <= _LARGEST:
        raise ValueError(f"{call}: `scale` must be finite, at most {_LARGEST:.3g}, got {scale!r}.")


def _check_mask(call: str, x: Tensor, mask: Tensor) -> None:
    if mask.device != x.device:
        raise ValueError(f"{call}: `mask` is on {mask.device}, `x` on {x.device}; use mask.to({str(x.device)!r}).")
    fits = mask.ndim <= x.ndim and all(
        m in (1, n) for m, n in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{call}: `mask` must broadcast to x's shape {list(x.shape)}: each size, from the last, that of x or 1; "
            f"got {describe(mask)}."
        )


def _kind(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else type(value).__name__


# --- what runs ---


def _forward(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    if x.is_cuda and x.dtype in _KERNEL_DTYPES:
        from flexmasks import softmax_kernels  # Triton is not everywhere

        with _current(x.device):
            return softmax_kernels.forward(x, bounds, bits, mask, visible, scale)
    return _forward_plain(x, bounds, bits, mask, visible, scale)


def _backward(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    if y.is_cuda and y.dtype in _KERNEL_DTYPES:
        from flexmasks import softmax_kernels

        with _current(y.device):
            return softmax_kernels.backward(dy, y, bounds, scale)
    return _backward_plain(dy, y, scale)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return _NOTHING if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def _forward_plain(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """The softmax in plain torch, a slice of the rows at a time; half precisions are computed in float32."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = torch.arange(x.shape[-1], device=x.device)
    for rows in _slices(x):
        of_bounds, of_bits, of_mask = (None if t is None else _rows(t, rows) for t in (bounds, bits, mask))
        hidden = _hidden(columns, of_bounds, of_bits, of_mask, visible)
        scores = _rows(x, rows).to(_accumulator(x.dtype)) * scale
        if hidden is None:
            found = scores.softmax(-1)
        else:
            found = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0)
        _rows(y, rows).copy_(found)
    return y


def _backward_plain(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    for rows in _slices(y):
        weights, slopes = (_rows(t, rows).to(_accumulator(y.dtype)) for t in (y, dy))
        _rows(dx, rows).copy_(_formula(slopes, weights, scale))
    return dx


def _formula(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    zero = y == 0
    products = (y * dy).masked_fill(zero, 0)
    return (scale * (products - y * products.sum(-1, keepdim=True))).masked_fill(zero, 0)


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


def _slices(x: Tensor) -> list[tuple[int, int]]:
    """Starts and lengths of slices of the last leading dimension."""
    if x.ndim < 2:
        return [(0, 1)]
    n = x.shape[-2]
    step = max(1, _CHUNK // max(1, x.numel() // max(1, n)))
    return [(start, min(step, n - start)) for start in range(0, n, step)]


def _rows(x: Tensor, rows: tuple[int, int]) -> Tensor:
    return x.narrow(-2, *rows) if x.ndim > 1 and x.shape[-2] > 1 else x


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- autograd, vmap, forward-mode AD ---


class _Softmax(torch.autograd.Function):
    """The operator as torch.func knows it; the operator's own autograd formula, too."""

    @staticmethod
    def forward(
        x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
    ) -> Tensor:
        if _is_plain(x):
            return _forward(x, bounds, bits, mask, visible, scale)
        with torch._C._AutoDispatchBelowAutograd():
            return _forward_op(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, bounds, _, _, _, ctx.scale = inputs
        ctx.save_for_backward(output, bounds)
        ctx.save_for_forward(output, bounds)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, bounds = ctx.saved_tensors
        return _gradient(dy, y, bounds, ctx.scale), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> Tensor:
        y, bounds = ctx.saved_tensors
        return _gradient(dx, y, bounds, ctx.scale)  # the Jacobian is symmetric

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _softmax(*_batched(info.batch_size, in_dims, args)), 0


class _EagerSoftmax(torch.autograd.Function):
    """The same where no transform is at work: without `setup_context` a call takes half the time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bounds: Tensor | None,
        bits: Tensor | None,
        mask: Tensor | None,
        visible: bool,
        scale: float,
    ) -> Tensor:
        y = _forward(x, bounds, bits, mask, visible, scale)
        ctx.save_for_backward(y, bounds)
        ctx.scale = scale
        return y

    backward = _Softmax.backward


class _SoftmaxBackward(torch.autograd.Function):
    @staticmethod
    def forward(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
        if _is_plain(y) and _is_plain(dy):
            return _backward(dy, y, bounds, scale)
        with torch._C._AutoDispatchBelowAutograd():
            return _backward_op(dy, y, bounds, scale)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, y, bounds, ctx.scale = inputs
        ctx.save_for_backward(dy, y, bounds)
        ctx.save_for_forward(dy, y, bounds)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        dy, y, bounds = ctx.saved_tensors
        of_dy = _gradient(d, y, bounds, ctx.scale) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_dy, None, None, None
        zero = y == 0
        d, dy = d.masked_fill(zero, 0), dy.masked_fill(zero, 0)
        of_y = ctx.scale * (d * (dy - (y * dy).sum(-1, keepdim=True)) - dy * (d * y).sum(-1, keepdim=True))
        return of_dy, of_y, None, None

    @staticmethod
    def jvp(ctx: Any, d_dy: Tensor | None, d_y: Tensor | None, *_: None) -> Tensor:
        dy, y, bounds = ctx.saved_tensors
        found = torch.zeros_like(y) if d_dy is None else _gradient(d_dy, y, bounds, ctx.scale)
        if d_y is None:
            return found
        zero = y == 0
        d_y, dy = d_y.masked_fill(zero, 0), dy.masked_fill(zero, 0)
        sums = (y * dy).sum(-1, keepdim=True), (d_y * dy).sum(-1, keepdim=True)
        change: Tensor = ctx.scale * (d_y * dy - d_y * sums[0] - y * sums[1])
        return found + change

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _gradient(*_batched(info.batch_size, in_dims, args)), 0


def _softmax(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """The operator, by the shortest way."""
    if torch.compiler.is_compiling():
        return _forward_op(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
    if _is_plain(x):
        if x.requires_grad and torch.is_grad_enabled():
            return _EagerSoftmax.apply(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
        return _forward(x, bounds, bits, mask, visible, scale)
    return _Softmax.apply(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]


def _gradient(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    """The backward operator, by the shortest way."""
    if torch.compiler.is_compiling():
        return _backward_op(dy, y, bounds, scale)  # type: ignore[no-any-return]
    if _is_plain(y) and _is_plain(dy) and not torch.is_grad_enabled():
        return _backward(dy, y, bounds, scale)
    return _SoftmaxBackward.apply(dy, y, bounds, scale)  # type: ignore[no-any-return]


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor holds just numbers, and nothing watches what is done with it: the dispatcher is not needed."""
    return bool(
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
        and not _len_torch_dispatch_stack()
        and forward_ad._current_level < 0
        and not torch._C._functorch.is_legacy_batchedtensor(x)  # under torch.autograd.grad(is_grads_batched=True)
        and x.device.type != "meta"
        and not x.is_neg()  # what z.conj().imag is: kernels read memory, which lacks the sign
    )


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


# --- what the dispatcher knows ---


def _register(
    op: Any, run: Callable[..., Tensor], function: type[torch.autograd.Function], fake: Callable[..., Tensor]
) -> None:
    name = op._schema.name

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_forward = lambda *_: None
        function.setup_context(ctx, inputs, output)

    formula = make_autograd_impl(op, Info(function.backward, setup_context))

    def autograd(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(
            isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args
        ):
            raise NotImplementedError(
                f"torch.ops.{name.replace('::', '.')} has no forward-mode derivative here: a torch.compile'd function "
                "or a direct call of the operator; call flexmasks.masked_softmax, uncompiled."
            )
        return formula(keyset, *args)

    def vmapped(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return op(*_batched(info.batch_size, in_dims, args)), 0

    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(name, fake, lib=_library)
    torch.library.register_vmap(name, vmapped, lib=_library)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_register(_forward_op, _forward, _Softmax, _fake)
_register(_backward_op, _backward, _SoftmaxBackward, lambda dy, y, *_: _fake(y))
