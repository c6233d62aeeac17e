"""What `explain` says of a call, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

from flexmasks.blocks.counts import Blocks


@dataclass(frozen=True, repr=False)
class Explanation:
    """How a call of `attention` runs: printed it is text, in Jupyter a table."""

    backend: str
    others: Mapping[str, str]  # the other backends, and why not they
    compiles: str  # whether this call compiles, and why
    anew: str  # what would make it compile again, or ""
    blocks: Blocks  # what the mask skips

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("backend", self.backend), *((f"not {name}", reason) for name, reason in self.others.items())]
        rows.append(("compiles", self.compiles))
        if self.anew:
            rows.append(("compiled anew by", self.anew))
        return rows

    def __str__(self) -> str:
        (first, backend), *rest = self._rows()
        return "\n".join([f"{first}: {backend}", *(f"  {what}: {said}" for what, said in rest), str(self.blocks)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self._rows() + [("", line) for line in str(self.blocks).splitlines()]
        cells = "".join(
            f'<tr><th style="text-align:left">{html.escape(what)}</th>'
            f'<td style="text-align:left">{html.escape(said)}</td></tr>'
            for what, said in rows
        )
        return f"<table>{cells}</table>"
