"""What `Modifier.resolve` returns in places of arguments that are no values by themselves."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from flexmasks.spec.structure import Readable, Recipe, Walk


@dataclass(frozen=True)
class ResolvedInner(Readable):
    """The resolved arguments of the masks or scores inside the parameter `source`."""

    source: str
    resolved: tuple[Mapping[str, Any], ...]

    def taken(self, walk: Walk) -> tuple[Hashable, Recipe]:
        key, make = walk.take(self.resolved, (id(self), "attribute", "resolved"))
        source = self.source
        return (source, key), lambda filling: ResolvedInner(source, make(filling))


@dataclass(frozen=True)
class Given(Readable):
    """The user's own tensor, given as this parameter."""

    parameter: str

    def taken(self, walk: Walk) -> tuple[Hashable, Recipe]:
        return self, lambda _: self


class Absent:
    """A parameter that `prepare` consumed and the function does not take."""
