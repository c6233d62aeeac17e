"""Plans of masks with tensors, from ranges alone: the host reads no value of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flexmasks.blocks.build import Layout, bounds
from flexmasks.blocks.elements import MaskMod
from flexmasks.plans.recorded import Recorded
from flexmasks.plans.sizes import Offset, shifted_mask, unread
from flexmasks.spec.bands import band_of
from flexmasks.spec.parameters import Size
from flexmasks.spec.structure import Opaque, Structure, flatten, replaced, tensors_of
from flexmasks.spec.values import Mask, Modifier


class Resolved(NamedTuple):
    """Arguments of a mask's function, and the blocks of the mask."""

    arguments: dict[str, Any]  # what `Mask._resolve` returned
    layout: Layout


class SizedMask(NamedTuple):
    """All that a plan by bounds is made from. A recorded plan takes other tensors in the places of its tensors."""

    mask: Mask
    offset: Offset
    size: Size
    lifted: bool  # numbers are inputs of the kernel
    block_size: tuple[int, int]


def plan_bounds(given: SizedMask) -> Resolved:
    """The arguments and the blocks of a mask, by operations of fixed shapes. Raises what its own function raises."""
    size = unread(given.size, given.offset)
    arguments = given.mask._resolve(size, given.lifted)
    mask_mod = _with_implied_band(given.mask, size, shifted_mask(given.mask._bind(arguments), given.offset))
    sizes = size.batch, size.heads, size.q_len, size.kv_len, size.device, given.block_size
    layout = bounds(mask_mod, *sizes, is_traced=not given.size.may_read)
    return Resolved(arguments, layout)


def _with_implied_band(mask: Mask, size: Size, mask_mod: MaskMod) -> MaskMod:
    """A mask_mod that shows the same pairs, in which ranges see how far keys are from queries.

    Inside sequences that lie end to end, the distance of two positions is that of their tokens, which ranges of
    positions do not show.
    """
    bands = [
        band for part in mask._joined() if (band := band_of(part, size)) is not None and band.sequences is not None
    ]
    left, right = (bands[0].left, bands[0].right) if len(bands) == 1 else (None, None)
    if (left is None and right is None) or bands[0].has_other_keys or size.q_len != size.kv_len:
        return mask_mod

    def bounded(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        visible = mask_mod(b, h, q, kv)
        visible = visible if left is None else visible & (q - kv <= left)
        return visible if right is None else visible & (kv - q <= right)

    return bounded


class RecordedPlan:
    """`plan_bounds`, recorded, for all masks that differ in the values of tensors only.

    inputs: the tensors of the mask and its offset. Neither they nor the mask are kept.

    Raises an error of any type where the plan cannot be recorded, for example where a function reads a tensor's value.
    """

    def __init__(self, given: SizedMask, inputs: Sequence[Tensor]) -> None:
        def plan(*tensors: Tensor) -> list[Tensor]:
            mask, offset = replaced((given.mask, given.offset), zip(inputs, tensors, strict=True))
            arguments, layout = plan_bounds(given._replace(mask=mask, offset=offset))
            structure, made = taken_apart(arguments)
            if structure is None:
                raise Opaque("`prepare` returns tensors inside objects")
            self._arguments, self._layout = structure, layout._replace(indices=())
            self._index_bounds = [getattr(t, "bounds", None) for t in made]
            # A cache holds the outputs, which must not be the user's own tensors.
            return [t.clone() if any(t is x for x in tensors) else t for t in (*layout.indices, *made)]

        self._recorded = Recorded(plan, inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> Resolved:
        """The arguments and the blocks of a mask with these tensors."""
        made = self._recorded(inputs)
        count = len(made) - len(self._index_bounds)
        for tensor, index_bounds in zip(made[count:], self._index_bounds, strict=True):
            if index_bounds is not None:
                tensor.bounds = index_bounds  # type: ignore[attr-defined] # see spec.indexing.bounded
        return Resolved(self._arguments.fill(made[count:]), self._layout._replace(indices=tuple(made[:count])))


def taken_apart(resolved: Any) -> tuple[Structure | None, list[Tensor]]:
    """What `resolve` returned without its tensors, None if no copy of it can hold others, and the tensors."""
    structure, leaves = flatten(resolved)
    return structure if structure.is_whole and not leaves.has_global else None, leaves.all_tensors


def reads_made_tensors(value: Modifier, resolved: Any) -> bool:
    """Whether a function for kernels alone reads tensors, given what `resolve` returned."""
    return value._has_other_function() and bool(tensors_of(resolved))
