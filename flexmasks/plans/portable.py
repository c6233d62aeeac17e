"""Block masks that can be pickled, copied and moved, because they know their mask."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexmasks import compat
from flexmasks.blocks.bits import BITS, can_be_bits
from flexmasks.blocks.lists import grid, lists_of, of_block_mask
from flexmasks.plans.checks import INT_DTYPES
from flexmasks.plans.data import reading_bits
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.shifted import Offset
from flexmasks.plans.sizes import MAX_POSITIONS
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import from_pickle, loaded_function
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, loaded

_LISTS = 8  # the number of lists in a BlockMask


@dataclass(frozen=True, eq=False)
class OfMask:
    """A mask with its sizes: where the function of a block mask comes from."""

    mask: Mask
    batch: int
    heads: int
    q_offset: Offset

    def mask_mod(self, block_mask: BlockMask) -> Callable[..., Tensor]:
        """The function of a block mask, its parameters checked against the sizes."""
        q_len, kv_len = block_mask.seq_lengths
        size = Size(self.batch, self.heads, q_len, kv_len, block_mask.kv_num_blocks.device)
        return MaskPlan(self.mask, size, self.q_offset).bound()

    def to(self, device: torch.device | str) -> OfMask:
        q_offset = self.q_offset.to(device) if isinstance(self.q_offset, Tensor) else self.q_offset
        return OfMask(self.mask.to(device), self.batch, self.heads, q_offset)

    def state(self) -> tuple[Any, ...]:  # what a pickle holds
        return "mask", self.mask, self.batch, self.heads, self.q_offset


@dataclass(frozen=True, eq=False)
class OfData:
    """The bits of a mask: where the function of a block mask comes from."""

    words: Tensor
    table: Tensor

    def mask_mod(self, block_mask: BlockMask) -> Callable[..., Tensor]:
        height, width = block_mask.BLOCK_SIZE
        return reading_bits(self.words, self.table, (height, width))

    def to(self, device: torch.device | str) -> OfData:
        return OfData(self.words.to(device), self.table.to(device))

    def state(self) -> tuple[Any, ...]:
        return "data", self.words, self.table


class PortableBlockMask(BlockMask):
    """A BlockMask that `flexmasks.block_mask` made.

    Pickles hold its index tensors and its mask, by name or as a function of a module.
    """

    source: OfMask | OfData
    ndim = 4  # transformers asks for it

    @classmethod
    def of(cls, block_mask: BlockMask, source: OfMask | OfData) -> Self:
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
        lists, state = lists_of(self), self.source.state()
        sizes = tuple(self.seq_lengths), tuple(self.BLOCK_SIZE)
        return loaded_block_mask, (lists, *sizes, state, _checksum(lists, state))


def made_like(known: BlockMask, *arguments: Any) -> BlockMask:
    """A BlockMask with the blocks of a known one, and what that knows of its mask; torch can trace this."""
    made: Any = type(known)(*arguments)
    if isinstance(known, PortableBlockMask):
        made.source = known.source
    return cast(BlockMask, made)


def loaded_block_mask(
    lists: Any, lengths: Any, block_size: Any, state: Any, checksum: int | None = None
) -> PortableBlockMask:
    """Return the block mask that a pickle stored.

    torch.load(weights_only=True) calls this function with what a file says, so the arguments may be anything. Kernels
    read memory at the places that the lists and the bits name. So they are copied, because a file may change its own
    tensors later, and the copies are checked.

    checksum: that of the lists and bits, None for no check of them. Files of torch's format before 1.6 have no contents
        yet when this is called, and so another checksum.

    Raises ValueError if the arguments are not those of a block mask.
    """
    if not (isinstance(lists, tuple) and isinstance(state, tuple)):
        _damaged("lists of blocks and mask")
    lists, state = _copied(lists), _copied(state)
    if checksum is not None and checksum != _checksum(lists, state):
        _damaged("lists of blocks", ", or the file was saved with _use_new_zipfile_serialization=False")
    for pair in (lengths, block_size):
        if not (_is_tuple(pair, 2) and all(type(n) is int and 0 < n < MAX_POSITIONS for n in pair)):
            _damaged("lengths")
    if not (_is_tuple(lists, _LISTS) and isinstance(lists[0], Tensor) and lists[0].ndim == 3):
        _damaged("lists of blocks")
    rows, columns = grid(lengths, block_size)
    sizes, device = tuple(lists[0].shape[:2]), lists[0].device
    for place in range(0, _LISTS, 2):
        counts, indices = lists[place : place + 2]
        shape = (rows, columns) if place < _LISTS // 2 else (columns, rows)
        width = indices.shape[-1] if isinstance(indices, Tensor) and indices.ndim == 4 else shape[1]
        if not (width == shape[1] or (compat.TAKES_NARROW_LISTS and 0 < width < shape[1])):
            _damaged("lists of blocks")
        _check(counts, (*sizes, shape[0]), width, device)
        _check(indices, (*sizes, shape[0], width), shape[1] - 1, device)
    if _is_tuple(state, 5) and state[0] == "mask":
        _, mask, batch, heads, q_offset = state
        source: OfMask | OfData = _of_mask(mask, batch, heads, q_offset, sizes, device)
    elif _is_tuple(state, 3) and state[0] == "data" and can_be_bits(block_size):
        _, words, table = state
        source = _of_data(words, table, sizes, (rows, columns), block_size, device)
    else:
        _damaged("mask")
    arguments: Any = (lengths, *lists, block_size, noop_mask)  # the function needs the lists
    made = PortableBlockMask.of(BlockMask(*arguments), source)
    made.mask_mod = source.mask_mod(made)
    return made


def _copied(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.detach().clone() if isinstance(x, Tensor) and not x.is_meta else x for x in values)


def _checksum(lists: tuple[Any, ...], state: tuple[Any, ...]) -> int:
    found = 0
    for x in (*lists, *state):
        if isinstance(x, Tensor) and not x.is_meta and x.layout == torch.strided:
            content: Any = x.detach().cpu().contiguous().numpy()
            found = zlib.crc32(content, found)
    return found


def _of_mask(mask: Any, batch: Any, heads: Any, q_offset: Any, sizes: tuple[int, ...], device: torch.device) -> OfMask:
    for given, size in zip((batch, heads), sizes, strict=True):
        if type(given) is not int or not 0 < given < MAX_POSITIONS or size not in (1, given):
            _damaged("sizes")
    is_tensor = isinstance(q_offset, Tensor) and q_offset.dtype in INT_DTYPES and q_offset.shape == (batch,)
    is_on_device = is_tensor and q_offset.device == device
    if not isinstance(mask, Mask) or not (is_on_device or type(q_offset) is int):
        _damaged("mask")
    return OfMask(mask, batch, heads, q_offset)


def _of_data(
    words: Any,
    table: Any,
    sizes: tuple[int, ...],
    blocks: tuple[int, int],
    block_size: tuple[int, int],
    device: torch.device,
) -> OfData:
    if not isinstance(words, Tensor) or words.ndim != 3 or not len(words) or words.dtype != torch.int32:
        _damaged("bits")
    is_bits = tuple(words.shape[1:]) == (block_size[0], block_size[1] // BITS) and words.device == device
    if not is_bits or not isinstance(table, Tensor) or table.ndim != 4 or any(map(int.__lt__, table.shape[2:], blocks)):
        _damaged("bits")
    _check(table, (*sizes, *table.shape[2:]), len(words) - 1, device)
    return OfData(words, table)


def _check(x: Any, shape: tuple[int, ...], most: int, device: torch.device) -> None:
    """Check an int32 tensor's shape, and that its values are from 0 to `most`."""
    is_right = isinstance(x, Tensor) and x.dtype == torch.int32 and tuple(x.shape) == shape and x.device == device
    if not is_right or x.is_meta or x.layout != torch.strided or not 0 <= int(x.min()) <= int(x.max()) <= most:
        _damaged("lists of blocks")


def _is_tuple(value: Any, length: int) -> bool:
    return isinstance(value, tuple) and len(value) == length


def _damaged(part: str, more: str = "") -> NoReturn:
    raise ValueError(f"flexmasks: the pickle of a block mask is damaged: its {part} do not fit{more}.")


@says_what_to_write()
def safe_globals() -> list[Callable[..., Any]]:
    """Return the functions that torch.load(weights_only=True) calls for masks, scores and block masks.

    They find definitions by their registered names, or take functions that you have allowed, and call neither. Torch
    calls them for a file of a stranger if you allow it: importing flexmasks does not.

    Example:
        >>> import tempfile, torch, flexmasks
        >>> with tempfile.TemporaryFile() as file, torch.serialization.safe_globals(flexmasks.safe_globals()):
        ...     torch.save(flexmasks.get_mask("sliding_window", window=3), file)
        ...     _ = file.seek(0)
        ...     torch.load(file)
        sliding_window(window=3)
    """
    return [loaded, from_pickle, loaded_function, loaded_block_mask]
