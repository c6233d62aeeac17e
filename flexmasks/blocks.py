"""From a mask's function to torch's BlockMask: ranges first, element by element only where they leave it open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from flexmasks.ranges import GiveUp, Range, evaluate

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_Mod = TypeVar("_Mod", bound=Callable[..., Tensor])
_CHUNK = (1 << 22, 1 << 19)  # elements evaluated at once: on a GPU, and on a CPU, where they should stay in its cache


@dataclass(frozen=True)
class Blocks:
    """The blocks of a mask: the eight index tensors of a BlockMask, and what is known of them.

    It holds no tensor of the user's: `block_mask` puts the function back.
    """

    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    indices: tuple[Tensor, ...]  # in BlockMask's order: kv, full_kv, q, full_q, each (counts, indices)
    total: int  # blocks in all, over the batch and heads that the mask depends on
    partial: int
    full: int
    undecided: int  # looked at element by element
    not_understood: tuple[str, ...]

    @property
    def empty(self) -> int:
        return self.total - self.partial - self.full

    def block_mask(self, mask_mod: MaskMod) -> BlockMask:
        """The BlockMask of these blocks and that function."""
        lengths: Any = (self.q_len, self.kv_len)
        return BlockMask(*(lengths, *self.indices, self.block_size, mask_mod))


class _ScalarIndexing(TorchFunctionMode):
    """Under vmap, `tensor[i]` with a number `i` would read its value; as an index operation it does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, Tensor | int) for i in index):
                device = tensor.device
                whole = [i if isinstance(i, Tensor) else torch.tensor(i, device=device) for i in index]
                return torch.ops.aten.index(tensor, whole)
        return func(*args, **(kwargs or {}))


def over_indices(mod: _Mod, prefix: tuple[int, ...] = ()) -> Callable[..., Tensor]:
    """A mask_mod (or, with prefix (0,), a score_mod) of numbers as one of index vectors b, h, q, kv.

    The result is [b, h, q, kv]. To the function its arguments stay numbers, as in torch's own create_mask.
    """
    function: Callable[..., Tensor] = mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=prefix + dims)

    def evaluated(*args: Tensor) -> Tensor:
        with _ScalarIndexing():
            return function(*args)

    return evaluated


def dependence(mask_mod: MaskMod, batch: int, heads: int, device: torch.device) -> tuple[int, int]:
    """The batch and head size of a mask: 1 where its function does not depend on the index."""
    result = _evaluate(mask_mod, batch, heads, *_ends_of_blocks(1, 1, device), *_ends_of_blocks(1, 1, device))
    return (batch, heads) if result is None else (result[0].lo.shape[0], result[0].lo.shape[1])


def dense(mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """The mask as booleans, [batch or 1, heads or 1, q_len, kv_len]."""
    batch, heads = dependence(mask_mod, batch, heads, device)
    indices = (torch.arange(n, device=device) for n in (batch, heads, q_len, kv_len))
    return _boolean(over_indices(mask_mod)(*indices), 4)


def build(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    block_size: tuple[int, int] = (128, 128),
) -> Blocks:
    """Find a mask's empty, partial and full blocks, exactly those of torch's create_block_mask.

    Raises ValueError or TypeError where the function is no mask.
    """
    q_ends = _ends_of_blocks(q_len, block_size[0], device)
    kv_ends = _ends_of_blocks(kv_len, block_size[1], device)
    rows, columns = len(q_ends[0]), len(kv_ends[0])
    # A block that the edge cuts is partial, as torch has it: what lies past the edge counts as hidden.
    whole_q = q_ends[1] - q_ends[0] == block_size[0] - 1
    whole_kv = kv_ends[1] - kv_ends[0] == block_size[1] - 1
    whole = whole_q[:, None] & whole_kv[None, :]
    result = _evaluate(mask_mod, batch, heads, *q_ends, *kv_ends)
    unknown: tuple[str, ...]
    if result is None:
        shape = (batch, heads, rows, columns)
        certain = torch.zeros(shape, dtype=torch.bool, device=device)
        possible, unknown = ~certain, ("the function as a whole",)
    else:
        truth, names = result
        shape = (*truth.lo.shape[:2], rows, columns)
        certain, possible, unknown = truth.lo.expand(shape), truth.hi.expand(shape), tuple(names)
    visible = certain.clone()
    full = certain & whole
    open_blocks = (possible & ~certain).nonzero()
    function = _over_blocks(mask_mod)
    todo = open_blocks
    for places in (8, max(block_size)):  # most show that they are partial in 8 x 8 places; the others need all
        q_places, kv_places = (_spread(min(n, places), n, device) for n in block_size)
        step = max(1, _CHUNK[device.type == "cpu"] // (len(q_places) * len(kv_places)))
        left = []
        for chunk in todo.split(step) if len(todo) else ():
            b, h, i, j = chunk.unbind(1)
            # Past the edge the last element is seen again, which changes nothing.
            q = (q_ends[0][i, None] + q_places).clamp(max=q_len - 1)
            kv = (kv_ends[0][j, None] + kv_places).clamp(max=kv_len - 1)
            some, all_ = function(b, h, q, kv)
            visible[b, h, i, j] = some
            full[b, h, i, j] = all_ & whole[i, j]
            left.append(chunk[some == all_])
        todo = torch.cat([todo[:0], *left])
    partial = visible & ~full
    by_row = (*_ordered(partial), *_ordered(full))
    by_column = (*_ordered(partial.transpose(-2, -1)), *_ordered(full.transpose(-2, -1)))
    counts = torch.stack([partial.sum(), full.sum()]).tolist()
    return Blocks(
        q_len=q_len,
        kv_len=kv_len,
        block_size=block_size,
        indices=(*by_row, *by_column),
        total=partial.numel(),
        partial=counts[0],
        full=counts[1],
        undecided=len(open_blocks),
        not_understood=unknown,
    )


def of_block_mask(block_mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Which blocks of a BlockMask are partial, and which are full: booleans [B, H, query blocks, key blocks]."""
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return partial, torch.zeros_like(partial)
    return partial, _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    table.scatter_(-1, torch.where(listed, indices, columns).long(), True)
    return table[..., :columns]


def _ends_of_blocks(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, length, size, device=device)
    return first, (first + (size - 1)).clamp(max=length - 1)


def _evaluate(
    mask_mod: MaskMod, batch: int, heads: int, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
) -> tuple[Range, list[str]] | None:
    device = q_lo.device
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    q_len, kv_len = int(q_hi[-1]), int(kv_hi[-1])
    try:
        truth, unknown = evaluate(
            mask_mod,
            Range.of_indices(b, b, batch - 1),
            Range.of_indices(h, h, heads - 1),
            Range.of_indices(q_lo.view(1, 1, -1, 1), q_hi.view(1, 1, -1, 1), q_len),
            Range.of_indices(kv_lo.view(1, 1, 1, -1), kv_hi.view(1, 1, 1, -1), kv_len),
        )
    except GiveUp:
        return None
    shape = (1,) * (4 - truth.lo.ndim) + tuple(truth.lo.shape)
    lo, hi = truth.lo.to(device).view(shape), truth.hi.to(device).expand(truth.lo.shape).view(shape)
    return Range(lo, hi, torch.bool, 1.0), unknown


def _spread(count: int, length: int, device: torch.device) -> Tensor:
    """So many positions from 0 to length - 1, both among them."""
    return torch.linspace(0, length - 1, count, dtype=torch.float64, device=device).round().long()


def _over_blocks(mask_mod: MaskMod) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Whether any, and whether all elements of each of n blocks are visible: b, h [n] and q, kv [n, elements]."""
    function: Callable[..., Tensor] = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        function = torch.vmap(function, in_dims=dims)

    def evaluated(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        with _ScalarIndexing():
            seen = _boolean(function(b.clone(), h.clone(), q, kv), 3)  # it may change its indices in place
        return seen.flatten(1).any(1), seen.flatten(1).all(1)

    return evaluated


def _boolean(seen: Tensor, dims: int) -> Tensor:
    if seen.dtype != torch.bool:
        raise TypeError(
            "flexmasks: a mask function must return a boolean tensor, "
            f"got one of {str(seen.dtype).removeprefix('torch.')}; compare, as in `q >= kv`."
        )
    if seen.ndim != dims:
        raise ValueError(
            "flexmasks: a mask function must return one truth value for each b, h, q, kv, all numbers; "
            f"got a tensor of shape {list(seen.shape[dims:])}."
        )
    return seen


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the number of marked columns and their indices in order, then those of the others."""
    marked = blocks.cumsum(-1, dtype=torch.int32)
    counts = marked[..., -1].contiguous()
    columns = torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device)
    place = torch.where(blocks, marked - 1, counts[..., None] + columns - marked)
    indices = torch.empty(blocks.shape, dtype=torch.int32, device=blocks.device)
    indices.scatter_(-1, place.long(), columns.expand(blocks.shape))
    return counts, indices
