"""Functions of masks and scores evaluated at single elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmasks.blocks import limits
from flexmasks.blocks.limits import Work
from flexmasks.devices import has_float64
from flexmasks.ranges import GiveUp, Range, TooLarge
from flexmasks.ranges.context import KnownBounds
from flexmasks.ranges.evaluate import check_boolean, evaluate
from flexmasks.ranges.value import LIKE_FUNCTIONS

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_Function = TypeVar("_Function", bound=Callable[..., Tensor])
_INDEX_LIMIT = 1 << 31  # above every index


# Inside torch.compile vmap fails for them with tensors of floats and a whole number that changes from call to call.
_ARITHMETIC = [
    getattr(owner, name)
    for operation in ("add", "sub", "mul", "div", "truediv", "floordiv", "floor_divide")
    for name in (operation, f"{operation}_", f"__{operation}__", f"__r{operation}__", f"__i{operation}__")
    for owner in (torch, Tensor)
    if hasattr(owner, name)
]


_CLAMPS = (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, torch.clamp_min, Tensor.clamp_min, torch.clamp_max,
           Tensor.clamp_max)  # fmt: skip


class _IndexingByNumbers(TorchFunctionMode):
    """Makes `tensor[i]` with a number `i` in a tensor a lookup: torch reads the value, which vmap does not allow.

    And under vmap a clamp has the type that it has outside.
    """

    operations = 0  # of the function

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        if func in _ARITHMETIC:
            if any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
                args = tuple([float(x) if type(x) is int else x for x in args])
        elif func in _CLAMPS:
            tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
            if len({x.dtype for x in tensors}) > 1:  # torch.result_type fails inside torch.compile
                dtype = functools.reduce(torch.maximum, tensors).dtype
                args = tuple([x.to(dtype) if isinstance(x, Tensor) else x for x in args])
                kwargs = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in (kwargs or {}).items()}
        elif func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in index) and all(
                isinstance(i, Tensor) or type(i) is int for i in index
            ):
                for dim in reversed(range(len(index))):  # while torch traces, vmap fails on constants among indices
                    if not isinstance(index[dim], Tensor):
                        tensor = tensor.select(dim, index[dim])
                return torch.ops.aten.index(tensor, [i for i in index if isinstance(i, Tensor)])
        return func(*args, **(kwargs or {}))


def over_indices(function: _Function, prefix: tuple[int | None, ...] = ()) -> Callable[..., Tensor]:
    """A mask_mod as a function of four index vectors, whose result is [b, h, q, kv].

    prefix: vmap's dimensions for arguments before the indices: (0,) for a score_mod, which takes a score [b, h, q, kv],
        and (None,) for a score_mod of one number.

    The function sees tensors without dimensions, as in torch's create_mask.
    """
    vmapped: Callable[..., Tensor] = function
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        vmapped = torch.vmap(vmapped, in_dims=prefix + dims)
    return with_indexing_by_numbers(vmapped)


def with_indexing_by_numbers(function: _Function) -> Callable[..., Tensor]:
    def evaluated(*args: Tensor) -> Tensor:
        with _IndexingByNumbers():
            return function(*args)

    return evaluated


class _ConstantsLikeIndices(TorchFunctionMode):
    """Makes constants of indices independent of them. `b.new_zeros(())`, with which torch's or_masks and and_masks
    start, is a constant to which vmap gives the dimension of `b`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        values = (*args[1:], *kwargs.values())
        if (name.startswith("new_") or name in LIKE_FUNCTIONS) and not any(isinstance(x, Tensor) for x in values):
            args = torch.zeros(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:]
        return func(*args, **kwargs)


def dependence_by_vmap(mask_mod: MaskMod, batch: int, heads: int, device: torch.device) -> tuple[int, int]:
    """The batch and head size of a mask, 1 where vmap's result has a stride of 0 because the function does not depend
    on that index. All indices go through vmap, as in `over_indices`, because torch promotes dtypes otherwise without
    it.
    """

    def visible_at(indices: Iterator[Tensor]) -> Tensor:
        return boolean(over_indices(mask_mod)(*indices), 4)

    indices = [torch.zeros(n, dtype=torch.int64, device=device) for n in (batch, heads, 1, 1)]
    try:
        with _ConstantsLikeIndices():
            visible = visible_at(x.clone() for x in indices)
    except Exception:  # such a constant cannot be changed in place by an index
        visible = visible_at(iter(indices))
    of_batch, of_heads = (1 if visible.stride(dim) == 0 else visible.shape[dim] for dim in (0, 1))
    return of_batch, of_heads


def boolean(visible: Tensor, dims: int) -> Tensor:
    """A mask function's result if it is one boolean for each element of indices of `dims` dimensions.

    Raises TypeError for another dtype, ValueError for another number of dimensions.
    """
    check_boolean(visible.dtype)
    if visible.ndim != dims:
        raise ValueError(
            "a mask function must return one truth value for each b, h, q, kv, all numbers; "
            f"got a tensor of shape {list(visible.shape[dims:])}."
        )
    return visible


class Elements:
    """A mask at elements of n blocks: called with b, h [n], q [n, queries] and kv [n, keys], it returns booleans [n,
    queries, keys] on the device of the indices.

    They come from ranges of one element each, which start faster than vmap, and where ranges do not know an operation
    from vmap.

    device: the device that the function sees its indices on.
    widest: elements of the largest tensor that the function sees, as `decide` gives it.
    work: counts what the function computes.
    """

    def __init__(self, mask_mod: MaskMod, device: torch.device, widest: int = 1, work: Work | None = None) -> None:
        self.mask_mod, self.device, self.widest = mask_mod, device, widest
        self.work = Work() if work is None else work
        self.known_bounds: KnownBounds = {}
        self._ranges_give_elements = has_float64(device)
        function: Callable[..., Tensor] = mask_mod
        for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
            function = torch.vmap(function, in_dims=dims)
        self._vmapped = function

    def blocks_at_once(self, elements: int) -> int:
        blocks = limits.elements_at_once(self.device) // elements
        blocks_if_wide = limits.WIDE_ELEMENTS_AT_ONCE // (elements * self.widest)
        return max(1, min(blocks, blocks_if_wide))

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if not len(b):
            return torch.zeros((0, q.shape[1], kv.shape[1]), dtype=torch.bool, device=b.device)
        visible = self._by_ranges(b, h, q, kv) if self._ranges_give_elements else None
        if visible is None:
            self._ranges_give_elements = False
            indices = (x.clone().to(self.device) for x in (b, h, q, kv))  # the function may change them in place
            with _IndexingByNumbers() as mode:
                visible = boolean(self._vmapped(*indices), 3).to(b.device)
            self.work.done += mode.operations * visible.numel() * self.widest
        return visible

    def _by_ranges(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor | None:
        n = len(b)
        shapes = (n, 1, 1, 1), (n, 1, 1, 1), (n, 1, -1, 1), (n, 1, 1, -1)
        visible = self.by_ranges([x.double().view(shape) for x, shape in zip((b, h, q, kv), shapes, strict=True)])
        return None if visible is None else visible.to(b.device).expand(n, 1, q.shape[1], kv.shape[1])[:, 0]

    def by_ranges(self, indices: Sequence[Tensor]) -> Tensor | None:
        """The elements at float64 indices of four dimensions that broadcast, as ranges give them, None if ranges do not
        know all of the function's operations.
        """
        truth = self.on_ranges(*(block_indices(x, x) for x in indices))
        return truth.lo if truth is not None and truth.exact else None

    def on_ranges(self, b: Range, h: Range, q: Range, kv: Range) -> Range | None:
        """What ranges know of the mask on ranges of indices, None where they give up."""
        try:
            evaluated = evaluate(self.mask_mod, b, h, q, kv, self.device, bounds=self.known_bounds)
        except (GiveUp, TooLarge):
            return None
        self.work.done += evaluated.computed
        return evaluated.truth


def block_indices(lo: Tensor, hi: Tensor) -> Range:
    """A range of indices whose greatest value is unknown."""
    return Range.of_indices(lo, hi, _INDEX_LIMIT, limit_reached=False)


def coordinates_of(places: Tensor, shape: torch.Size) -> Tensor:
    """The coordinates [n, dimensions] of flat places, as torch.unravel_index returns them, which waits for a GPU."""
    coordinates = []
    for size in reversed(shape):
        coordinates.append(places % size)
        places = places // size
    return torch.stack(coordinates[::-1], 1)


def places_of(coordinates: Tensor, shape: Sequence[int]) -> Tensor:
    """The flat places of coordinates [n, dimensions], of which those along a dimension of size 1 count as 0."""
    places = torch.zeros_like(coordinates[:, 0])
    for dim, size in enumerate(shape):
        places = places * size + (coordinates[:, dim] if size > 1 else 0)
    return places


# Operations that read elements of their first argument: a gate before them would hold the whole tensor for each pair.
_READS = (
    Tensor.__getitem__, Tensor.select, Tensor.index_select, Tensor.gather, Tensor.take, Tensor.take_along_dim,
    torch.select, torch.index_select, torch.gather, torch.take, torch.take_along_dim, torch.embedding,
    torch.nn.functional.embedding, torch.ops.aten.index, torch.ops.aten.index.Tensor,
)  # fmt: skip


class _Gates(TorchFunctionMode):
    """Puts gates between the values of pairs and the tensors that are the same for all pairs, so that these learn from
    visible pairs alone.

    The derivative of a score change may be NaN or infinite where the mask hides a pair, as that of `log(q - kv)` where
    keys follow their query. The gradient of the score is 0 there, and 0 * inf, which is NaN, would reach the sums over
    pairs that are the gradients of tensors. So what a function reads of such tensors is read through gates: the number
    itself, whose gradient is chosen, not multiplied, to be 0 where the pair is hidden.
    """

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
