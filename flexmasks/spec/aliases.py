"""Aliases of a user's tensors, which caches keep in the place of these."""

from __future__ import annotations

import math

from torch import Tensor
from torch.autograd import forward_ad

from flexmasks import compat
from flexmasks.spec.structure import Opaque

_MAX_COPIED = 1 << 24  # the most bytes for which an expanded tensor is written out


class Aliases:
    """An alias for each tensor, in place of it in what a cache keeps: caches keep no tensor of the user's.

    An alias is a tensor object of its own that shares the tensor's memory, or has a copy of it if the tensor lies in
    pieces. It is the same one whenever the tensor is met.

    nbytes: bytes of the tensors that were copied.
    """

    def __init__(self) -> None:
        # By id. The tensor is kept too, so that no other object gets its id.
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}
        self.nbytes = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return the alias of a tensor. Raises Opaque for one that has derivatives, or attributes."""
        if id(tensor) not in self._aliases:
            if type(tensor) is not Tensor or has_derivatives(tensor) or vars(tensor):
                raise Opaque("a tensor that learns, or that has attributes")
            alias = in_one_piece(tensor.detach())
            if not tensor.is_contiguous():
                kept = (n for n, step in zip(alias.shape, alias.stride(), strict=True) if step)
                self.nbytes += math.prod(kept) * alias.element_size()
            self._aliases[id(tensor)] = tensor, alias
        return self._aliases[id(tensor)][1]


def has_derivatives(tensor: Tensor) -> bool:
    """Whether a tensor needs a gradient, or has a derivative that is taken forward. An alias would have neither."""
    if tensor.requires_grad:
        return True
    may_be_dual = compat.in_forward_derivative() and tensor.is_floating_point()
    return may_be_dual and forward_ad.unpack_dual(tensor).tangent is not None


def in_one_piece(tensor: Tensor) -> Tensor:
    """Return a tensor as compiled kernels take it: contiguous, or expanded from what is contiguous.

    torch's compiler fails for some tensors with gaps, and compiles anew for each layout. Only small tensors are written
    out where they are expanded.
    """
    if tensor.is_contiguous():
        return tensor
    if tensor.nelement() * tensor.element_size() <= _MAX_COPIED:
        return tensor.contiguous()
    part = tensor
    for dim, step in enumerate(tensor.stride()):
        part = part if step else part.narrow(dim, 0, 1)
    return part.contiguous().expand(tensor.shape)
