"""Copies in numbers of 16 bytes.

Torch moves numbers one by one where a copy changes the layout, so on a GPU wide numbers take less time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks.kernels.direct import is_plain

_WIDE_ON = ("cuda",)  # devices where copies of 16 bytes at once are faster
_BYTES = 16


def may_be_wide(x: Tensor) -> bool:
    """Return whether a tensor may be copied in wide numbers.

    It may not in torch.compile, whose own copies are fast, and in torch.func's transforms and forward derivatives.
    """
    return x.device.type in _WIDE_ON and is_plain(x) and not x.is_conj()


def in_wide_numbers(x: Tensor) -> Tensor:
    """Return a tensor's memory as numbers of 16 bytes if possible, else the tensor."""
    return x.detach().view(torch.complex128) if _is_aligned(x) else x.detach()


def copy(place: Tensor, x: Tensor) -> None:
    """Copy a tensor into a place of the same shape and dtype.

    Gradients are not followed.
    """
    place, x = place.detach(), x.detach()
    if may_be_wide(x) and may_be_wide(place) and _is_aligned(x) and _is_aligned(place):
        place, x = place.view(torch.complex128), x.view(torch.complex128)
    place.copy_(x)


def _is_aligned(x: Tensor) -> bool:
    """Return whether each row lies side by side, from a multiple of 16 bytes on."""
    if x.ndim == 0 or x.stride(-1) != 1 or x.data_ptr() % _BYTES:
        return False
    return not any(n * x.element_size() % _BYTES for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1]))
