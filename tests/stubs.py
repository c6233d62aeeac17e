"""The types of the constructors, for editors and type checkers: definitions come in, `__init__.pyi` files go out."""

from __future__ import annotations

import re

from flexmasks.spec.definitions import Definition, names
from flexmasks.spec.parameters import Parameter

FILES = {"mask": "flexmasks/masks/__init__.pyi", "score": "flexmasks/scores/__init__.pyi"}
BY_HAND = ("packed", "paged")  # constructors with types of their own
_HEAD = '''"""Functions that make {kind}s. Written by `python tests/test_readme.py` from the definitions."""

from collections.abc import Sequence
{imports}
from numpy.typing import NDArray
from torch import Tensor

from flexmasks.masks.packed import packed as packed
from flexmasks.masks.paged import paged as paged
from flexmasks.spec.values import {value}

__all__ = [
{exported}
]
'''


def stub(kind: str) -> str:
    """Return the text of the stub of `flexmasks.masks` or `flexmasks.scores`."""
    own = {name: d for name, d in sorted(names(kind).items()) if d.by_library}
    functions = [_function(d) for name, d in own.items() if name not in BY_HAND]
    exported = "\n".join(f'    "{name}",' for name in own)
    typing = [name for name in ("Any", "Literal") if any(re.search(rf"\b{name}\b", f) for f in functions)]
    imports = f"from typing import {', '.join(typing)}\n"
    head = _HEAD.format(kind=kind, imports=imports, value=kind.title(), exported=exported)
    return "\n".join([head, *functions])


def _function(d: Definition) -> str:
    lines = [f"    {p.name}: {_type(p)}{'' if p.required else f' = {p.default!r}'},\n" for p in d.parameters.values()]
    parameters = f"\n    *,\n{''.join(lines)}" if lines else ""
    first, *paragraphs = d.doc.split("\n\n")
    about = [p for p in paragraphs if re.split(r"[,:]", p)[0] in d.parameters]
    text = "\n".join(f"    {line}" if line else "" for line in "\n\n".join([first, *about]).split("\n"))
    end = "\n    " if about else ""
    return f'def {d.name}({parameters}) -> {d.kind.title()}:\n    """{text.lstrip()}{end}"""\n'


def _type(p: Parameter) -> str:
    """Return the type of a parameter: numbers, tuples and words, and for tensors also arrays and nested sequences."""
    numbers, sequences, takes_tensor = [], [], False
    for a in p.alternatives:
        element = "int" if a.kind == "length" else a.kind
        if a.dims is None:
            numbers.append(element if a.count is None else f"tuple[{', '.join([element] * a.count)}]")
            continue
        takes_tensor = True
        if a.dims and not (element == "bool" and any(o.kind == "int" and o.dims == a.dims for o in p.alternatives)):
            sequences.append("Sequence[" * len(a.dims) + element + "]" * len(a.dims))
    tensors = (["Tensor", "NDArray[Any]"] if sequences else ["Tensor"]) if takes_tensor else []
    is_optional = not p.required and p.default is None
    return " | ".join(dict.fromkeys([*numbers, *tensors, *sequences, *(["None"] if is_optional else [])]))
