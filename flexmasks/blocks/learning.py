"""Score changes whose tensors learn from visible pairs alone.

The derivative of a score change may be NaN or infinite where the mask hides a pair, as that of `log(q - kv)` where keys
follow their query. The gradient of the score is 0 there, and 0 * inf, which is NaN, would reach the sums over pairs
that are the gradients of tensors. So what a function reads of such tensors is read through gates: the number itself,
whose gradient is chosen, not multiplied, to be 0 where the pair is hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmasks.blocks.elements import over_indices, with_indexing_by_numbers

# Operations that read elements of their first argument: a gate before them would hold the whole tensor for each pair.
_READS = (
    Tensor.__getitem__, Tensor.select, Tensor.index_select, Tensor.gather, Tensor.take, Tensor.take_along_dim,
    torch.select, torch.index_select, torch.gather, torch.take, torch.take_along_dim, torch.embedding,
    torch.nn.functional.embedding, torch.ops.aten.index, torch.ops.aten.index.Tensor,
)  # fmt: skip


class _Gates(TorchFunctionMode):
    """Puts gates between the values of pairs and the tensors that are the same for all pairs."""

    def __init__(self, visible: Tensor, of_pairs: Sequence[Tensor]) -> None:
        super().__init__()
        self._visible = visible
        self._of_pairs = list(of_pairs)  # and all that is computed from them

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_of_pairs((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if any(func is known for known in _READS):
            out = func(*args, **kwargs)
            out = out if self._is_of_pairs(args[0]) else self._gated(out)
        else:
            out = func(*self._gated(args), **{name: self._gated(x) for name, x in kwargs.items()})
        self._of_pairs.extend(out if isinstance(out, tuple | list) else [out])
        return out

    def _is_of_pairs(self, x: Any) -> bool:
        if isinstance(x, tuple | list):
            return any(self._is_of_pairs(part) for part in x)
        return isinstance(x, Tensor) and any(x is known for known in self._of_pairs)

    def _gated(self, x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)([self._gated(part) for part in x])
        learns = isinstance(x, Tensor) and x.is_floating_point() and not self._is_of_pairs(x)
        return torch.where(self._visible, x, x.detach()) if learns else x


def _from_visible(score_mod: Callable[..., Tensor], visible: Tensor, score: Tensor, *indices: Tensor) -> Tensor:
    """Return the changed score of a pair, from which tensors learn only if the pair is visible."""
    with _Gates(visible, (score, *indices)):
        return score_mod(score, *indices)


def over_visible(score_mod: Callable[..., Tensor], visible: Tensor | None, score: Tensor, *indices: Tensor) -> Tensor:
    """Return changed scores [b, h, q, kv], from which tensors learn at visible pairs.

    visible: bool [b or 1, h or 1, q or 1, kv or 1], or None if all pairs are.
    score: [b, h, q, kv], or one number; hidden ones may hold anything.
    indices: vectors of b, h, q and kv.
    """
    has_scores = score.ndim > 0
    if visible is None:
        return over_indices(score_mod, (0 if has_scores else None,))(score, *indices)
    function: Callable[..., Tensor] = functools.partial(_from_visible, score_mod)
    for dim in (3, 2, 1, 0):
        of_visible = 0 if visible.shape[dim] > 1 else None
        of_index = [0 if n == dim else None for n in range(4)]
        function = torch.vmap(function, in_dims=(of_visible, 0 if has_scores else None, *of_index))
    ones = [dim for dim in range(4) if visible.shape[dim] == 1]
    score = torch.where(visible, score, 0.0) if has_scores else score
    return with_indexing_by_numbers(function)(visible.squeeze(ones), score, *indices)
