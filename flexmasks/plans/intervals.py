"""Masks whose queries see intervals of keys.

Nothing is computed for such a mask of a few queries: kernels read where queries start and how many keys sequences have.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexmasks.plans.shifted import Offset
from flexmasks.spec.bands import Band, band_of, intersection
from flexmasks.spec.definitions import AND
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask


@dataclass(frozen=True)
class Intervals:
    """A mask of the keys around a query's position.

    left, right: numbers of keys before and after the position, both included. None means that there is no bound.
    offset: the position of the first query, or of each batch element's; None if the queries are the last ones.
    lens: the number of keys of each batch element; None for all keys.
    """

    left: int | None
    right: int | None
    offset: Offset | None
    lens: Tensor | None

    nbytes = 0

    def with_tensors(self, offset: Offset | None, lens: Tensor | None) -> Intervals:
        """Return the same intervals with other tensors."""
        return Intervals(self.left, self.right, offset, lens)


def intervals_of(mask: Mask, size: Size, offset: Offset) -> Intervals | None:
    """A mask as intervals if it is a band, which may hide the keys behind the lengths of sequences, else None.

    No value of a tensor is read.
    """
    bands: list[Band] = []
    lens: Tensor | None = None
    for part in mask.params["masks"] if mask.definition is AND else (mask,):
        if part.definition.by_library and part.name == "padding":
            given = part.checked(size)["seq_lens"]
            if lens is not None or given is not part.params["seq_lens"]:
                return None
            lens = given
        else:
            band = band_of(part, size)
            if band is None or band.sequences is not None:
                return None
            bands.append(band)
    band = intersection(bands)
    if band is None or (band.left is not None and band.right is not None and band.left + band.right < 0):
        return None
    return Intervals(band.left, band.right, offset, lens)
