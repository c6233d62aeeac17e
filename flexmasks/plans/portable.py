"""Block masks that can be pickled, copied and moved, because they know their mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks.blocks.counts import Blocks
from flexmasks.blocks.lists import lists_of, of_block_mask
from flexmasks.kernels.operators import separate
from flexmasks.plans.data import reading_bits
from flexmasks.plans.lengths import Lengths, plan_mask
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.sizes import Offset
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import from_pickle, loaded_function
from flexmasks.spec.indexing import leading
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, loaded

_FORMAT = [0x666D_0001]  # of pickles


@dataclass(frozen=True, eq=False)
class OfMask:
    """A mask with its sizes: what a block mask was planned from."""

    mask: Mask
    batch: int
    heads: int
    q_offset: Offset
    bits: tuple[Tensor, Tensor] | None = None  # words and their table, if the block mask's function reads bits

    def mask_mod(self, block_mask: BlockMask) -> Callable[..., Tensor]:
        """The function of a block mask, its parameters checked against the sizes."""
        if self.bits is not None:
            height, width = block_mask.BLOCK_SIZE
            return reading_bits(*self.bits, (height, width))
        q_len, kv_len = block_mask.seq_lengths
        size = Size(self.batch, self.heads, q_len, kv_len, block_mask.kv_num_blocks.device)
        return MaskPlan(self.mask, size, self.q_offset).bound()

    def to(self, device: torch.device | str) -> OfMask:
        q_offset = self.q_offset.to(device) if isinstance(self.q_offset, Tensor) else self.q_offset
        bits = None if self.bits is None else (self.bits[0].to(device), self.bits[1].to(device))
        return OfMask(self.mask.to(device), self.batch, self.heads, q_offset, bits)


class PortableBlockMask(BlockMask):
    """A BlockMask that `flexmasks.block_mask` made.

    Pickles hold its mask and sizes. It is planned when it is loaded.
    """

    source: OfMask
    ndim = 4  # transformers asks for it

    @classmethod
    def of(cls, block_mask: BlockMask, source: OfMask) -> Self:
        made = cls.__new__(cls)
        vars(made).update(vars(block_mask), source=source)
        return made

    def to(self, device: torch.device | str) -> PortableBlockMask:
        """Return the block mask on a device, with the tensors among its mask's parameters."""
        moved = PortableBlockMask.of(super().to(device), self.source.to(device))
        moved.mask_mod = moved.source.mask_mod(moved)
        return moved

    def to_dense(self) -> Tensor:
        """Return which blocks are computed, int32 [B, H, query blocks, key blocks].

        torch's own method takes no lists with fewer places than there are blocks.
        """
        partial, full = of_block_mask(self)
        return (partial | full).int()

    def __copy__(self) -> PortableBlockMask:
        return self.of(self, self.source)

    def __reduce__(self) -> Any:
        source, counts = self.source, self.kv_num_blocks
        sizes = *self.seq_lengths, source.batch, source.heads
        # torch.load's map_location moves the tensor, which says the device.
        head = torch.tensor(_FORMAT, device=counts.device)
        how = source.q_offset, tuple(self.BLOCK_SIZE), source.bits is not None, tuple(counts.shape[:2])
        return loaded_block_mask, (head, source.mask, sizes, *how)


def block_mask_of(call: str, mask: Mask, lengths: Lengths, as_data: bool, may_wait: bool) -> PortableBlockMask:
    plan = plan_mask(call, mask, lengths, may_wait=may_wait or as_data)  # finding bits waits in any case
    if not as_data:
        return _portable(plan, plan.block_mask)
    data = plan.data_alone()
    return _portable(plan, data.block_mask(), (data.words, data.table))


def _portable(plan: MaskPlan, block_mask: BlockMask, bits: tuple[Tensor, Tensor] | None = None) -> PortableBlockMask:
    source = OfMask(plan.mask, plan.size.batch, plan.size.heads, plan.offset, bits)
    return PortableBlockMask.of(block_mask, source)


def count_blocks(mask: Mask, q_len: int, kv_len: int | None, exact: bool = True, **sizes: Any) -> Blocks:
    plan = plan_mask("flexmasks.Mask.blocks", mask, Lengths(q_len, kv_len, **sizes), exact)
    blocks = plan.blocks()
    return replace(blocks, block_mask=_portable(plan, blocks.block_mask))


def made_like(known: BlockMask, *arguments: Any) -> BlockMask:
    """A BlockMask with the blocks of a known one, and what that knows of its mask; torch can trace this."""
    made: Any = type(known)(*arguments)
    if isinstance(known, PortableBlockMask):
        made.source = known.source
    return cast(BlockMask, made)


def function_of_lists(block_mask: BlockMask) -> Callable[..., Tensor]:
    """What kernels show of a BlockMask, as a function: its full blocks, and of partial ones what its function shows."""
    partial, full = map(separate, of_block_mask(block_mask))  # torch's compiler for CPUs takes no tensor on its way
    (height, width), mask_mod = block_mask.BLOCK_SIZE, block_mask.mask_mod

    def shown(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = *leading(full, b, h, q), q // height, kv // width
        visible: Tensor = full[block] | (partial[block] & mask_mod(b, h, q, kv))
        return visible

    return shown


def repeated(block_mask: BlockMask, batch: int, heads: int) -> BlockMask:
    """The block mask with lists for each batch element and head."""
    lists = [None if x is None else x.expand(batch, heads, *x.shape[2:]).contiguous() for x in lists_of(block_mask)]
    return made_like(block_mask, block_mask.seq_lengths, *lists, block_mask.BLOCK_SIZE, block_mask.mask_mod)


def loaded_block_mask(
    head: Any, mask: Any, sizes: Any, q_offset: Any, block_size: Any, as_data: Any, of_lists: Any
) -> BlockMask:
    """Return the block mask that a pickle stored, planned anew.

    torch.load(weights_only=True) calls this function with what a file says, so the arguments may be anything.

    head: the format on the block mask's device. In torch's files from before 1.6 tensors have no values yet.
    sizes: the lengths of queries and keys, the numbers of batch elements and heads. of_lists: those of the lists.

    Raises ValueError or TypeError if the arguments are not those of a block mask.
    """
    call = "flexmasks: a pickled block mask"
    if not isinstance(head, Tensor) or not isinstance(mask, Mask) or head.is_meta or head.tolist() != _FORMAT:
        raise ValueError(
            f"{call} cannot be read: it is of another version of flexmasks, is to be loaded without data, or was saved "
            "with _use_new_zipfile_serialization=False. Save it again, or save its mask."
        )
    q_len, kv_len, batch, heads = sizes
    lengths = Lengths(q_len, kv_len, batch, heads, head.device, q_offset, block_size)
    made = block_mask_of(call, mask, lengths, as_data, may_wait=True)  # what is in a file is checked
    return made if tuple(made.kv_num_blocks.shape[:2]) == of_lists else repeated(made, *of_lists)


@says_what_to_write()
def safe_globals() -> list[Callable[..., Any]]:
    """Return the functions that torch.load(weights_only=True) calls for masks, scores and block masks.

    They find definitions by their registered names, or take functions that you have allowed. Those of block masks are
    called, to plan them. Torch calls these functions for a file of a stranger if you allow it: importing flexmasks does
    not.

    Example:
        >>> import tempfile, torch, flexmasks
        >>> with tempfile.TemporaryFile() as file, torch.serialization.safe_globals(flexmasks.safe_globals()):
        ...     torch.save(flexmasks.get_mask("sliding_window", window=3), file)
        ...     _ = file.seek(0)
        ...     torch.load(file)
        sliding_window(window=3)
    """
    return [loaded, from_pickle, loaded_function, loaded_block_mask]
