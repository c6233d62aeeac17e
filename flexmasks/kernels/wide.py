"""Copies in numbers of 16 bytes: torch moves numbers one by one where a copy changes the layout, and a GPU moves wide
ones in less time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks.devices import on_gpu
from flexmasks.kernels.direct import is_plain

_BYTES = 16


def may_be_wide(x: Tensor) -> bool:
    """Whether a tensor may be copied in wide numbers: not in torch.compile, whose own copies are fast, and not in
    torch.func's transforms and forward derivatives.
    """
    return on_gpu(x.device) and is_plain(x) and not x.is_conj()


def in_wide_numbers(x: Tensor) -> Tensor:
    """A tensor's memory as numbers of 16 bytes if possible, else the tensor."""
    return x.detach().view(torch.complex128) if _is_aligned(x) else x.detach()


def copy(place: Tensor, x: Tensor) -> None:
    """Copy a tensor into a place of the same shape and dtype. Gradients are not followed."""
    place, x = place.detach(), x.detach()
    if may_be_wide(x) and may_be_wide(place) and _is_aligned(x) and _is_aligned(place):
        place, x = place.view(torch.complex128), x.view(torch.complex128)
    place.copy_(x)


def _is_aligned(x: Tensor) -> bool:
    """Whether each row lies side by side, from a multiple of 16 bytes on."""
    if x.ndim == 0 or x.stride(-1) != 1 or x.data_ptr() % _BYTES:
        return False
    return not any(n * x.element_size() % _BYTES for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1]))
