"""The picture of two masks, one over the other."""

from __future__ import annotations

from typing import ClassVar

import torch

from flexmasks import get_mask
from flexmasks.extend import MaskOverLengths
from flexmasks.pictures.cells import Grid, MaskCells
from flexmasks.pictures.picture import MaskPicture

_HIDDEN, _SHOWN, _ONLY_A, _ONLY_B, _EITHER = range(5)  # kinds of cells
_MEANINGS = {
    _HIDDEN: "hidden by both",
    _SHOWN: "shown by both",
    _ONLY_A: "shown by a alone",
    _ONLY_B: "shown by b alone",
    _EITHER: "some by a alone, some by b alone",
}


class ComparedCells(MaskCells):
    """Cells of a batch element and head of two masks, which differ where one pair of them does.

    masks: of the pairs that both show, that the first alone and that the second alone shows.
    """

    def __init__(self, name: str, element: str, masks: list[MaskOverLengths], at: tuple[int, int]) -> None:
        self.name, self.element, self.block_size = name, element, (1, 1)
        self.q_len, self.kv_len = masks[0].size.q_len, masks[0].size.kv_len
        self._masks, self._at = masks, at

    def grid(self, rows: int, columns: int) -> Grid:
        cell = -(-self.q_len // rows), -(-self.kv_len // columns)
        both, only_a, only_b = (mask.visible_in(cell, *self._at)[0] for mask in self._masks)
        kinds = torch.where(both, _SHOWN, _HIDDEN)
        kinds = torch.where(only_b, _ONLY_B, torch.where(only_a, _ONLY_A, kinds))
        return Grid(torch.where(only_a & only_b, _EITHER, kinds), cell)


class ComparedPicture(MaskPicture):
    """Picture of the pairs that two masks show, and that one of them shows alone."""

    symbols: ClassVar = {_HIDDEN: "·", _SHOWN: "█", _ONLY_A: "a", _ONLY_B: "b", _EITHER: "x"}
    colors: ClassVar = {_HIDDEN: "k0", _SHOWN: "n3", _ONLY_A: "k2", _ONLY_B: "k3", _EITHER: "p8"}

    def __init__(self, cells: ComparedCells) -> None:
        self._cells = cells  # which have no counts of blocks

    def _legend(self, grid: Grid) -> list[tuple[int, str]]:
        present = set(grid.values.unique().tolist())
        return [(kind, meaning) for kind, meaning in _MEANINGS.items() if kind in present]

    def _notes(self) -> list[str]:
        return []


def compared_picture(
    call: str, title: str, a: MaskOverLengths, b: MaskOverLengths, at: tuple[int, int]
) -> ComparedPicture:
    """Return the picture of a batch element and head. Where queries start is in the functions of a and b."""
    size = a.size
    functions = (
        lambda *indices: a.function(*indices) & b.function(*indices),
        lambda *indices: a.function(*indices) & ~b.function(*indices),
        lambda *indices: b.function(*indices) & ~a.function(*indices),
    )
    lengths = {"q_len": size.q_len, "kv_len": size.kv_len, "batch": size.batch, "heads": size.heads}
    masks = [MaskOverLengths(call, get_mask(f), **lengths, device=size.device, q_offset=0) for f in functions]
    parts = (("batch element", at[0], size.batch), ("head", at[1], size.heads))
    element = ", ".join(f"{what} {index}" for what, index, n in parts if n > 1)
    return ComparedPicture(ComparedCells(title, element, masks, at))
