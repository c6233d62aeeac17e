"""Explanation of how a call runs, as text and as HTML."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from flexmasks.blocks.counts import Blocks

_HTML = """<table>
{%- for name, text in rows %}
<tr><th style="text-align:left">{{ name }}</th><td style="text-align:left">{{ text }}</td></tr>
{%- endfor %}
</table>"""


@dataclass(frozen=True, repr=False)
class Explanation:
    """Explanation of how a call of `attention` runs.

    It prints as text, at most 80 characters wide, and Jupyter shows it as a table.
    """

    backend: str
    compiles: str  # whether this call compiles, and why
    recompiles_on: str  # changes that would make a later call compile again, or ""
    others: Mapping[str, str]  # reasons against the other backends, by name
    plan: str  # how the blocks are found when tensors change
    mask: str  # what the kernel computes the mask from
    blocks: Blocks  # what the mask skips
    invariant: str  # whether the result of a sequence depends on what else is in the call, see `flexmasks.invariant`
    not_here: tuple[str, ...] = ()  # the other backends that this machine, or the device of the call, lacks

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("backend", self.backend), ("compiles", self.compiles)]
        if self.recompiles_on:
            rows.append(("recompiles on", self.recompiles_on))
        rows += [("plan", self.plan), ("mask", self.mask), ("invariant", self.invariant)]
        rows += [(f"not {name}", reason) for name, reason in self.others.items() if name not in self.not_here]
        lacking: dict[str, list[str]] = {}
        for name in self.not_here:
            lacking.setdefault(self.others[name], []).append(name)
        if lacking:
            said = [f"{', '.join(names)} ({reason})" for reason, names in lacking.items()]
            rows.append(("not here", "; ".join(said)))
        return rows

    def __str__(self) -> str:
        (name, backend), *rest = self._rows()
        lines = [f"{name}: {backend}", *(f"  {name}: {text}" for name, text in rest), *str(self.blocks).splitlines()]
        width = max(24, min(shutil.get_terminal_size().columns, 80))
        return "\n".join(
            textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            for line in lines
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import jinja2  # a dependency of torch; loading it takes time, and most processes show no HTML

        rows = self._rows() + [("", line) for line in str(self.blocks).splitlines()]
        return jinja2.Environment(autoescape=True).from_string(_HTML).render(rows=rows)
