"""The scaled masked softmax, forward and backward, as two functions.

Kernels of the Megatron kind come as two functions without autograd. The mask is float16 of 0 and 1, 1 = hidden, and is
shared by all heads; the scale is a tensor of one element. With y the softmax of x * scale over the columns that are
not hidden, the gradient of x is scale * (y * dy - y * sum(y * dy)). Both functions check what they get, and run the
library's operator, which has one kernel in each direction.
"""

# %%
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import interleaved

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


# %% The two functions. The scale is read by the host; in a training loop pass a number to
# flexmasks.scaled_masked_softmax, and let autograd call its backward.
def scaled_masked_softmax_forward(x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    """Return softmax(x * scale) over the places where the mask is 0, and 0 where it is 1.

    Args:
        x: scores, [B, H, Q, K].
        mask: 0 = visible, 1 = hidden, [B or 1, 1, Q, K], of a floating-point dtype.
        scale: a tensor of one element.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    _check_scores("x", x)
    _check_scale(scale)
    if not isinstance(mask, Tensor) or mask.dtype not in FLOATS:
        raise TypeError(f"`mask` must be a floating-point tensor of 0 and 1, 1 = hidden, got {_describe(mask)}.")
    batch, _, queries, keys = x.shape
    if mask.ndim != 4 or mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, queries, keys):
        want = f"[{batch} or 1, 1, {queries}, {keys}]"
        raise ValueError(f"`mask` must have the shape {want} for `x` {list(x.shape)}, got {list(mask.shape)}.")
    hidden = mask == 1
    if not bool((hidden | (mask == 0)).all()):
        raise ValueError("`mask` must be 0 (visible) or 1 (hidden) everywhere; it has other values.")
    return flexmasks.scaled_masked_softmax(x, hidden, float(scale))


def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of x, scale * (y * grad - y * sum(y * grad)), in which hidden places are 0.

    Args:
        grad: the gradient of y, of y's shape and dtype.
        y: what the forward function returned, [B, H, Q, K].
        scale: the scale of the forward function, a tensor of one element.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    _check_scores("grad", grad)
    _check_scores("y", y)
    _check_scale(scale)
    if grad.shape != y.shape or grad.dtype != y.dtype:
        raise ValueError(f"`grad` must have the shape and dtype of `y`, {_describe(y)}, got {_describe(grad)}.")
    return torch.ops.flexmasks.masked_softmax_backward(grad, y, None, float(scale))  # type: ignore[no-any-return]


def _check_scores(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"`{name}` must be a tensor of float16, bfloat16 or float32, got {_describe(x)}.")
    if x.ndim != 4:
        raise ValueError(f"`{name}` must have four dimensions, [B, H, Q, K], got {list(x.shape)}.")


def _check_scale(scale: Tensor) -> None:
    if not isinstance(scale, Tensor):
        raise TypeError(f"`scale` must be a tensor of one element, got {scale!r}; pass torch.tensor({scale!r}).")
    if scale.numel() != 1:
        raise ValueError(f"`scale` must have one element, got the shape {list(scale.shape)}.")


def _describe(x: object) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


# %% The references are both formulas, in float64 and in plain torch. Exponentials of hidden places are set to 0, so a
# row that is hidden entirely is 0.
def forward_by_formula(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute softmax(where(mask, hidden, x * scale))."""
    scores = x.double() * scale
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * (1 - mask.double())
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def backward_by_formula(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Compute scale * (y * dy - y * sum(y * dy))."""
    y, dy = y.double(), dy.double()
    return scale * (y * dy - y * (y * dy).sum(-1, keepdim=True))


# %% Arguments that do not fit are refused in words.
def check_refusals(x: Tensor, mask: Tensor, scale: Tensor) -> None:
    """Pass wrong arguments, and print what the functions say."""
    wrong: dict[str, tuple[type[Exception], Callable[[], Tensor]]] = {
        "`mask` must have the shape": (ValueError, lambda: scaled_masked_softmax_forward(x, mask[..., :-1], scale)),
        "`mask` must be a floating": (TypeError, lambda: scaled_masked_softmax_forward(x, mask.bool(), scale)),
        "`mask` must be 0": (ValueError, lambda: scaled_masked_softmax_forward(x, mask * 2, scale)),
        "`x` must have four": (ValueError, lambda: scaled_masked_softmax_forward(x[0], mask, scale)),
        "`x` must be a tensor of": (TypeError, lambda: scaled_masked_softmax_forward(x.double(), mask, scale)),
        "`scale` must have one": (ValueError, lambda: scaled_masked_softmax_forward(x, mask, scale.repeat(2))),
        "`scale` must be a tensor": (TypeError, lambda: scaled_masked_softmax_forward(x, mask, 0.5)),  # type: ignore[arg-type]
        "`grad` must have the shape": (ValueError, lambda: scaled_masked_softmax_backward(x[:, :1], x, scale)),
    }
    for begins, (kind, call) in wrong.items():
        said = ""
        try:
            call()
        except kind as error:
            said = str(error)
        print(f"{kind.__name__}: {said}")
        assert said.startswith(begins)


# %% Check at the full size, [1, 8, 1024, 1024] in float16, and time both functions.
def main() -> None:
    """Check and time both functions."""
    file = start(__doc__)
    x, dy = torch.randn(2, 1, 8, 1024, 1024, device=DEVICE).half()
    mask = (torch.rand(1, 1, 1024, 1024, device=DEVICE) < 0.3).half()
    mask[0, 0, 7] = 1  # a row that sees nothing
    scale = torch.tensor([0.125], device=DEVICE)

    y = scaled_masked_softmax_forward(x, mask, scale)
    check("forward", y, forward_by_formula(x, mask, 0.125))
    dx = scaled_masked_softmax_backward(dy, y, scale)
    check("backward", dx, backward_by_formula(dy, y, 0.125))
    exact = x.double().requires_grad_()
    (want,) = torch.autograd.grad(forward_by_formula(exact, mask, 0.125), exact, dy.double())
    check("backward against autograd of the formula", dx, want)
    assert not bool(y[:, :, 7].any()), "a row that sees nothing must be 0"
    assert not bool((y * mask).any()), "hidden places must be 0"
    assert not bool((dx * mask).any()), "hidden places have no gradient"
    assert (y.dtype, dx.dtype, y.shape, dx.shape) == (x.dtype, x.dtype, x.shape, x.shape)
    several = torch.randn(3, 2, 5, 9, device=DEVICE).half()
    masks = (torch.rand(3, 1, 5, 9, device=DEVICE) < 0.5).half()
    got = scaled_masked_softmax_forward(several, masks, torch.tensor(2.0))
    check("a mask for each batch element, and a scale without dimensions", got, forward_by_formula(several, masks, 2.0))
    print()
    check_refusals(x, mask, scale)

    calls: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: scaled_masked_softmax_forward(x, mask, scale),
        "forward in plain torch": lambda: torch.softmax((x * scale).masked_fill(mask.bool(), -10000.0), -1),
        "backward": lambda: scaled_masked_softmax_backward(dy, y, scale),
        "backward in plain torch": lambda: scale * (y * dy - y * (y * dy).sum(-1, keepdim=True)),
    }
    times = interleaved(calls, DEVICE, 7 if ON_GPU else 2)
    shape = "x".join(map(str, x.shape))
    rows: list[Row] = [{"x": f"{shape} float16", "": who, "ms": float(f"{ms:.4g}")} for who, (ms, _) in times.items()]
    finish(rows, file, "The forward function includes the check of the mask's values and the reading of the scale.")


if __name__ == "__main__":
    main()
