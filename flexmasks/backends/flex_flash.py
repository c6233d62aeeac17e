"""Backend "flex_flash": torch's compiled flex_attention on CUDA, with kernels of FlashAttention 4."""

from __future__ import annotations

import torch

from flexmasks import compat
from flexmasks.backends import fa4_package, flex, forms
from flexmasks.backends.call import Call, Kernel, Plans
from flexmasks.blocks.bits import can_be_bits
from flexmasks.blocks.counts import Blocks
from flexmasks.devices import nvidia_capability

_FLASH = "FLASH"  # torch's name in kernel_options
_MAX_SIZE_OF_ANY = 128  # the largest head size of kernels that take the block size of every other backend
# On compute capability 9.0, by the largest head size: the blocks that tiles are fitted to, as large as fit into shared
# memory in both passes.
_FITTED_ON, _FITTED = (9, 0), {192: (128, 96), 256: (128, 64)}


def block_size(head_size: int, device: torch.device) -> tuple[int, int] | None:
    """Return the block size of kernels for a head size, or None.

    None stands for the block size of all other backends.
    """
    if head_size <= _MAX_SIZE_OF_ANY or not _fits_blocks(device):
        return None
    return next((fitted for most, fitted in _FITTED.items() if head_size <= most), None)


@compat.constant_in_graphs
def _fits_blocks(device: torch.device) -> bool:
    return fa4_package.fits_tiles() and nvidia_capability(device) == _FITTED_ON


def _wanted(call: Call) -> tuple[int, int] | None:
    return block_size(call.q.shape[3], call.q.device)


def _fitted(call: Call) -> Call:
    """Return a call in blocks that the kernels take. `refuses` says which calls have no such blocks."""
    wanted = _wanted(call)
    return call if wanted is None else call.resized(wanted) or call


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    reason = fa4_package.refuses_package(call) or flex.refuses_to_compile(call)
    if reason:
        return reason
    if fa4_package.is_small(call.q.device):
        return f"on compute capability {fa4_package.SMALL} it takes no blocks"
    reason = _refuses_head_size(call)
    if reason:
        return reason
    if call.learns:
        return "it gives no gradient to captured tensors of a mask or score"
    if call.with_lse and not compat.FLASH_GIVES_LSE:
        return "before torch 2.14 its lse has no gradient, and torch 2.11 multiplies it by ln 2"
    if call.has_number_tensors:
        return "its compiler takes no 0-dimensional captured tensors"
    if call.q.shape[2] == 1 and call.needs_grad:
        return "its backward pass needs more than one query"
    is_grouped = call.q.shape[1] != call.k.shape[1]
    if is_grouped and call.needs_grad and call.score is not None and call.cap is None:
        return "its backward pass calls score changes with wrong heads if heads are grouped"
    if (numbers := call.numbers_of(call.score)) is not None and numbers.are_later:
        return "its compiler takes no numbers of score changes as inputs, and kernels for other values are compiled"
    call = _fitted(call)
    return _refuses_numbers(call) or forms.refuses(call) or forms.why_not_flash(call)


def _refuses_head_size(call: Call) -> str | None:
    """Return why no kernel takes the call's head size, or None."""
    size, wanted = call.q.shape[3], _wanted(call)
    most = max(_FITTED) if _fits_blocks(call.q.device) else _MAX_SIZE_OF_ANY
    if not 16 <= size <= most:
        return f"with blocks it takes head sizes from 16 to {most} here, not {size}"
    if call.v.shape[3] != size and size <= _MAX_SIZE_OF_ANY:
        return "with blocks it takes values of q's head size only, or of 128 for head size 192 on an H100 or H200"
    if wanted is not None and call.resized(wanted) is None:
        return only_blocks_of(wanted)
    return None


def only_blocks_of(size: tuple[int, int]) -> str:
    """Return why a user's own blocks of another size are refused."""
    return f"with this head size it takes blocks of {size[0]} queries x {size[1]} keys only"


def _refuses_numbers(call: Call) -> str | None:
    """Return why a mask whose numbers change compiles too many kernels, or None.

    For other block sizes such a mask goes as data.
    """
    wanted = _wanted(call)
    if wanted is None or can_be_bits(wanted):
        return None
    numbers = call.numbers_of(call.mask)
    if numbers is None or not numbers.are_inputs:
        return None
    return "kernels for other values of the mask's numbers are compiled, and its blocks for this head size are no data"


def adds_in_any_order(call: Call) -> str | None:
    """Return what the kernel adds in changing order, or None.

    torch knows an ordered sum on compute capability 10 only, for block masks with metadata that ours do not have.
    """
    return "the gradients of queries" if call.needs_grad else None


def kernel(call: Call) -> Kernel:
    if call.is_traced:
        return flex.kernel_in_graph(call, _FLASH, _wanted(call))
    fa4_package.interface()  # what torch's kernel would import
    call = _fitted(call)
    return _Fitted(call, _FLASH, forms.why_data(call, for_flash=True))


class _Fitted(flex.FlexKernel):
    """A kernel of FLASH, in blocks that fit it."""

    def __init__(self, call: Call, backend: str | None, why_data: str) -> None:
        super().__init__(call, backend, why_data)
        self._block_size = call.mask.block_size

    def forms(self, plans: Plans) -> tuple[flex.FlexForm]:
        return super().forms(self._fitted(plans))

    def blocks(self, plans: Plans) -> Blocks:
        return super().blocks(self._fitted(plans))

    def _fitted(self, plans: Plans) -> Plans:
        return plans._replace(mask=plans.mask.resized(self._block_size))
