"""What the modules of any torch model see, by gradients of their outputs with respect to their inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexmasks.integrations.layers import LayerMask, layer_of_pairs

_ROWS = 64  # that are looked at if none are named


@dataclass
class _Call:
    """A call of a module: its inputs of tokens, and whether a module inside of it mixes tokens."""

    inputs: list[Tensor]
    mixes: bool = False


@contextlib.contextmanager
def probed(
    model: nn.Module,
    hear: Callable[[nn.Module | None, LayerMask], None],
    rows: Sequence[int] | None,
    layers: Collection[nn.Module],
) -> Iterator[None]:
    """Tell `hear` each of the layers, and each innermost module that mixes tokens, with the tokens that reach these
    rows of its output, or some; and with None in place of a module, which tokens of the first input reach the output of
    the model.

    Inputs and outputs are [batch, tokens, width], or [tokens, width]. Calls without gradients tell nothing.
    """
    running: list[_Call] = []
    first: list[Tensor] = []
    is_busy = False  # activation checkpoints run modules again when gradients are computed

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known: dict[int, tuple[Tensor, Tensor]] = {}  # inputs that are one tensor stay one

        def own(x: Any) -> Any:
            x = _with_gradient(x)
            # As a tensor of its own an input has no gradient by way of other inputs, which were made of it.
            return known.setdefault(id(x), (x, x.view_as(x)))[1] if _has_tokens(x) else x

        if is_busy:
            return None
        args = tuple(map(own, args))
        kwargs = {name: x if "mask" in name else own(x) for name, x in kwargs.items()}
        first.extend([] if first else [x for x, _ in known.values()])
        running.append(_Call([x for _, x in known.values()]))
        return args, kwargs

    def leave(module: nn.Module, args: Any, result: Any) -> Any:
        nonlocal is_busy
        if is_busy:
            return None
        call, is_busy = running.pop(), True
        results = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result]
        out = next(filter(_has_tokens, results), None)
        if out is not None and (not running or not call.mixes or module in layers):
            of_sequences = (1, 0, 2) if getattr(module, "batch_first", True) is False else (0, 1, 2)
            order = (0, 2, 1) if isinstance(module, nn.Conv1d) else of_sequences
            inputs = [x for x in (call.inputs if running else first) if x.ndim == out.ndim]
            found = next(filter(None, (_reached(out, x, order, rows) for x in inputs)), None)
            if found is not None:
                hear(None if call.mixes and not running else module, found)
                call.mixes = True
        if running:
            running[-1].mixes |= call.mixes
        is_busy = False
        result = _with_gradient(result)
        first.extend([result] if not call.inputs and _has_tokens(result) else [])  # embeddings
        return result

    hooks: list[Any] = []
    try:
        for module in model.modules():
            hooks += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
        with torch.enable_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _has_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.ndim in (2, 3)


def _with_gradient(x: Any) -> Any:
    """Return a value, a tensor of floats as one that has a gradient, and may be changed in place."""
    is_plain = isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad and torch.is_grad_enabled()
    return x.detach().requires_grad_().clone() if is_plain else x


def _reached(out: Tensor, x: Tensor, order: tuple[int, ...], rows: Sequence[int] | None) -> LayerMask | None:
    """Return which tokens of an input reach rows of an output, or None if all reach none but their own rows.

    order: the dimensions of batch elements, tokens and numbers.
    """

    def batched(x: Tensor) -> Tensor:
        return x[None] if x.ndim == 2 else x.permute(order)

    def reach(rows: Tensor) -> Tensor:
        score = (batched(out)[:, rows.to(out.device)] @ weights).sum()
        (gradient,) = torch.autograd.grad(score, x, retain_graph=True, materialize_grads=True)
        return (batched(gradient) != 0).any(-1)

    (batch, q_len, width), kv_len = batched(out).shape, batched(x).shape[1]
    # All numbers of a row count, each with a weight, because the sum of a normalized row has no gradient.
    weights = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(out)
    some = torch.linspace(0, q_len - 1, min(q_len, _ROWS)).long().tolist()
    chosen = torch.tensor(some if rows is None else [row % q_len for row in rows if row < q_len], dtype=torch.int64)
    others = torch.ones(kv_len, dtype=torch.bool)
    others[chosen if q_len == kv_len else []] = False
    if batched(x).shape[0] != batch or (others.any() and not reach(chosen)[:, others].any()):
        return None
    reached = torch.zeros(batch, q_len, kv_len, dtype=torch.bool, device=x.device)
    for row in chosen:
        reached[:, row] = reach(row[None])
    if q_len == kv_len and not (reached & ~torch.eye(q_len, dtype=torch.bool, device=x.device)).any():
        return None
    if q_len == kv_len:
        reached[:, chosen, chosen] = True
    return layer_of_pairs(reached[:, None], tuple(chosen.tolist()))
