"""Copies in numbers of 16 bytes.

Torch moves numbers one by one where a copy changes the layout, so on a GPU wide numbers take less time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks import compat

_WIDE_ON = ("cuda",)  # devices where copies of 16 bytes at once are faster
_BYTES = 16


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor may be copied in wide numbers.

    It may not in torch.compile, whose own copies are fast, and in torch.func's transforms and forward derivatives.
    """
    if x.device.type not in _WIDE_ON or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    if compat.is_compiling() or compat.in_dispatch_mode():
        return False
    is_of_transform = compat.transforms_active() or compat.is_wrapped(x) or compat.is_batched_gradient(x)
    return not (is_of_transform or compat.in_forward_derivative() or x.is_neg() or x.is_conj())


def in_wide_numbers(x: Tensor) -> Tensor:
    """Return a tensor's memory as numbers of 16 bytes if possible, else the tensor."""
    return x.detach().view(torch.complex128) if _is_aligned(x) else x.detach()


def copy(place: Tensor, x: Tensor) -> None:
    """Copy a tensor into a place of the same shape and dtype.

    Gradients are not followed.
    """
    place, x = place.detach(), x.detach()
    if is_plain(x) and is_plain(place) and _is_aligned(x) and _is_aligned(place):
        place, x = place.view(torch.complex128), x.view(torch.complex128)
    place.copy_(x)


def _is_aligned(x: Tensor) -> bool:
    """Return whether each row lies side by side, from a multiple of 16 bytes on."""
    if x.ndim == 0 or x.stride(-1) != 1 or x.data_ptr() % _BYTES:
        return False
    return not any(n * x.element_size() % _BYTES for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1]))
