"""What a parameter of a mask or a score may be: its specification, and the check of a value against it.

A parameter is annotated with a type for the type checker and, inside `Annotated`, with a
specification that people read and that this module checks:

    seq_lens: Annotated[Tensor, "int[B] in 0..S"]
    prefix_len: Annotated[int | Tensor, "int in 0..S | int[] in 0..S | int[B] in 0..S"]

A specification is a list of alternatives, `KIND`, `KIND(n)` or `KIND[dimensions]`, each with optional inclusive bounds:

    int, float, bool   a Python number (also NumPy's)
    int(2)             a tuple of two Python numbers
    int[B, S]          a tensor; `int[]` is a 0-dimensional one

Dimensions and bounds are integers, names of the sizes below, or a new name, which stands for whatever size came:

    B  batch size            Q   number of queries      S  number of positions: the largest of q_offset + Q and KV
    H  number of query heads KV  number of keys

Lists, tuples and NumPy arrays are taken where a tensor is asked for.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from flexmasks import compat

_BOUND = r"-?\d+(?:\.\d+)?(?:e-?\d+)?|[A-Z]+(?:-\d+)?"
_ALTERNATIVE = re.compile(
    r"(?P<kind>int|float|bool)(?:\((?P<count>[1-9]\d*)\)|\[(?P<dims>[A-Z0-9, ]*)\])?"
    rf"(?: in (?P<low>{_BOUND})?\.\.(?P<high>{_BOUND})?)?"
)
_PLAIN = {int: "int", float: "float", bool: "bool"}
_NUMPY = (np.ndarray, np.generic)
_INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Size:
    """How far the indices of a call range: b < batch, h < heads, q < q_len (before q_offset), kv < kv_len."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    device: torch.device
    q_offset: int = 0  # the largest one, where there are several
    dtype: torch.dtype = torch.float32  # of the scores
    approximate: bool = False  # functions of scores need no more precision than queries in float16 or bfloat16 have

    @property
    def positions_of_q(self) -> int:
        """Number of positions that queries reach."""
        return self.q_offset + self.q_len

    @property
    def positions(self) -> int:
        """Number of positions that queries and keys reach: indices q + q_offset and kv are below it."""
        return max(self.positions_of_q, self.kv_len)

    def named(self) -> dict[str, int]:
        """The sizes by the names that specifications use."""
        return {"B": self.batch, "H": self.heads, "Q": self.q_len, "KV": self.kv_len, "S": self.positions}


@dataclass(frozen=True)
class _Alternative:
    text: str
    kind: str
    count: int | None = None  # length of a tuple
    dims: tuple[str, ...] | None = None  # dimensions of a tensor
    low: str = ""
    high: str = ""

    @classmethod
    def parse(cls, text: str) -> _Alternative:
        found = _ALTERNATIVE.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"flexmasks: cannot read the parameter specification {text.strip()!r}; pass alternatives such as "
                "'int in 0..', 'int(2)' or 'float[B, S] in 0..1', joined by ' | '; see flexmasks.spec.parameters."
            )
        dims = found["dims"]
        return cls(
            text=text.strip(),
            kind=found["kind"],
            count=int(found["count"]) if found["count"] else None,
            dims=None if dims is None else tuple(d.strip() for d in dims.split(",") if d.strip()),
            low=found["low"] or "",
            high=found["high"] or "",
        )


@dataclass(frozen=True)
class Parameter:
    """One keyword-only parameter of a mask or score: its name, specification, and whether it must be given."""

    name: str
    spec: str
    required: bool
    default: Any
    alternatives: tuple[_Alternative, ...]

    def takes_tensor(self, rank: int | None = None) -> bool:
        """Whether a tensor (of that rank) may be given."""
        return any(a.dims is not None and rank in (None, len(a.dims)) for a in self.alternatives)

    def is_sequence(self, value: Any) -> bool:
        """Whether a value is a sequence that is made a tensor."""
        numbers = isinstance(value, tuple) and any(a.count == len(value) for a in self.alternatives)
        return isinstance(value, tuple) and not numbers and self.takes_tensor()

    def tensor(self, value: Any, device: torch.device | None) -> Tensor:
        """A sequence as a tensor; of an empty one torch knows no dtype."""
        made = torch.tensor(value, device=device)
        kinds = {a.kind for a in self.alternatives if a.dims is not None}
        if made.numel() or "float" in kinds:
            return made
        return made.long() if "int" in kinds else made.bool()

    def check(self, what: str, value: Any, size: Size, sizes: dict[str, int]) -> Any:
        """The value, fit for the mask's function, or a ValueError or TypeError that says what to pass.

        `sizes` maps the names of sizes to numbers and learns the new names that this value gives a size to.
        """
        if not self.alternatives or (value is None and not self.required and self.default is None):
            return value
        if self.is_sequence(value):
            try:
                value = self.tensor(value, size.device)
            except (TypeError, ValueError, RuntimeError) as error:
                raise self._error(ValueError, what, f"a sequence that is no tensor ({error})", sizes) from error
        if isinstance(value, Tensor):
            return self._check_tensor(what, value, size, sizes)
        return self._check_numbers(what, value, sizes)

    def _check_numbers(self, what: str, value: Any, sizes: dict[str, int]) -> Any:
        numbers = value if isinstance(value, tuple) else (value,)
        count = len(numbers) if isinstance(value, tuple) else None
        for alternative in self.alternatives:
            if alternative.dims is None and alternative.count == count:
                if not all(_is_number(n, alternative.kind) for n in numbers):
                    continue
                low, high = _bound(alternative.low, sizes), _bound(alternative.high, sizes)
                inside = ((low is None or n >= low) and (high is None or n <= high) for n in numbers)
                if not all(inside) or not all(map(_is_finite, numbers)):
                    raise self._error(ValueError, what, repr(value), sizes)
                return value
        raise self._error(TypeError, what, _with_type(value), sizes)

    def _check_tensor(self, what: str, value: Tensor, size: Size, sizes: dict[str, int]) -> Tensor:
        shape = tuple(value.shape)
        fits = [a for a in self.alternatives if a.dims is not None and _is_dtype(value.dtype, a.kind)]
        if not fits:
            raise self._error(TypeError, what, _with_type(value), sizes)
        for alternative in fits:
            learned = _match(alternative.dims or (), shape, sizes)
            if learned is not None:
                break
        else:
            raise self._error(ValueError, what, _with_type(value), sizes)
        sizes.update(learned)
        if value.device != size.device:
            raise self._error(ValueError, what, f"one on {value.device}, and the call is on {size.device}", sizes)
        low, high = _bound(alternative.low, sizes), _bound(alternative.high, sizes)
        if (low is not None or high is not None) and can_be_read(value) and value.numel():
            least, most = torch.stack(torch.aminmax(value.detach())).tolist()
            if not ((low is None or least >= low) and (high is None or most <= high)):
                raise self._error(ValueError, what, f"values from {least} to {most}", sizes)
        return value

    def _error(self, kind: type[Exception], what: str, got: str, sizes: Mapping[str, int]) -> Exception:
        names = dict.fromkeys(re.findall(r"\b[A-Z]+\b", self.spec))
        here = ", ".join(f"{n}={sizes[n]}" for n in names if n in sizes)
        return kind(f"{what}: `{self.name}` must be {self.spec}{f' (here {here})' if here else ''}, got {got}.")


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The keyword-only parameters of a function, by name."""
    signature = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if not signature:
        return {}
    try:
        inner = function.func if isinstance(function, functools.partial) else function
        hints = get_type_hints(inner, include_extras=True)
    except (NameError, TypeError, AttributeError):  # annotations of names that only a type checker sees
        hints = {}
    found: dict[str, Parameter] = {}
    sizes = set("BHQS") | {"KV"}  # of the call, and of the parameters read so far
    for p in signature:
        hint = hints.get(p.name)
        spec = ""
        if get_origin(hint) is Annotated:
            spec = next((m for m in get_args(hint)[1:] if isinstance(m, str)), "")
        elif hint in _PLAIN:
            spec = _PLAIN[hint]
        found[p.name] = Parameter(
            name=p.name,
            spec=spec,
            required=p.default is p.empty,
            default=None if p.default is p.empty else freeze(p.default),
            alternatives=tuple(_Alternative.parse(t) for t in spec.split("|")) if spec else (),
        )
        sizes |= {d for a in found[p.name].alternatives for d in a.dims or ()}
        bounds = [bound for a in found[p.name].alternatives for bound in (a.low, a.high)]
        unknown = [bound for bound in bounds if bound[:1].isupper() and bound.partition("-")[0] not in sizes]
        if unknown:
            raise ValueError(
                f"flexmasks: the specification {spec!r} of `{p.name}` is bounded by {unknown[0]!r}, which is no size; "
                f"there are {', '.join(sorted(n for n in sizes if not n.isdigit()))}."
            )
    return found


def per_batch(value: int | Tensor, b: Tensor) -> int | Tensor:
    """A parameter that is one number, or one per batch element: its value for batch element `b`."""
    return value[b] if isinstance(value, Tensor) and value.ndim else value


def at(table: Tensor, b: Tensor, position: Tensor) -> Tensor:
    """A parameter with one value per position, for all batch elements or for each: its value at `position`."""
    return table[b, position] if table.ndim == 2 else table[position]


_NUMBERS_ON = ("cpu",)


def always(n: int, index: Tensor) -> Tensor | int:
    """The number n where an index is wanted: on a GPU made of another index, as FLASH's compiler takes no constant.

    Not times 0, in which torch sees a constant. On a CPU a number, by which kernels are up to 1.5 times as fast.
    """
    if index.device.type in _NUMBERS_ON:
        return n
    return index % 1 + n if n else index % 1


def bounded(table: Tensor, low: int, high: int) -> Tensor:
    """The table, with a note of the bounds of what it holds, by which `flash` knows that an index is not negative."""
    if not torch.compiler.is_compiling():
        table.bounds = low, high  # type: ignore[attr-defined]
    return table


def pair(value: Any) -> tuple[Any, Any]:
    """A parameter that is one value for both axes, or one per axis: always one per axis."""
    return value if isinstance(value, tuple) else (value, value)


def check_covers_queries(name: str, count: int, size: Size | None, what: str = "a row") -> None:
    """Raise ValueError where a parameter that must have something for each position of queries has too few."""
    if size is not None and count < size.positions_of_q:
        raise ValueError(
            f"`{name}` must have {what} for each of the {size.positions_of_q} positions of queries (those before "
            f"q_offset, too), got {count}."
        )


def freeze(value: Any) -> Any:
    """Lists and NumPy values as tuples and Python numbers, so that a mask holds values; tensors stay as they are."""
    if isinstance(value, _NUMPY):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    return value


def can_be_read(tensor: Tensor) -> bool:
    """Whether a tensor's values can be asked for: not while a graph is traced, without memory, or under torch.vmap."""
    if torch.compiler.is_compiling():
        return False
    while compat.is_wrapped(tensor):
        if compat.is_batched(tensor):
            return False
        tensor = compat.unwrapped(tensor)
    return not (tensor.is_meta or isinstance(tensor, compat.FakeTensor))


def implied_size(dimension: str, parameters: Mapping[str, Parameter], values: Mapping[str, Any]) -> int | None:
    """The size (B, H, Q, KV or S) that the shapes of the values imply, or None where they imply none."""
    for name, value in values.items():
        parameter = parameters.get(name)
        if parameter is None or not (isinstance(value, Tensor) or parameter.is_sequence(value)):
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else _shape(value)
        for alternative in parameter.alternatives:
            if alternative.dims is not None and len(alternative.dims) == len(shape) and dimension in alternative.dims:
                return shape[alternative.dims.index(dimension)]
    return None


_LONG = 64  # elements of a sequence that are shown


def describe(value: Any) -> str:
    """A value as a repr shows it: tensors by dtype and shape, long sequences by shape, all else by its own repr."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    shape = _shape(value)
    return f"tuple{list(shape)}" if math.prod(shape) > _LONG else repr(value)


def _shape(value: Any) -> tuple[int, ...]:
    shape = []
    while isinstance(value, tuple):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _match(dims: tuple[str, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> dict[str, int] | None:
    if len(dims) != len(shape):
        return None
    learned: dict[str, int] = {}
    for dim, n in zip(dims, shape, strict=True):
        want = int(dim) if dim.isdigit() else sizes.get(dim, learned.get(dim))
        if want is None:
            learned[dim] = n
        elif want != n:
            return None
    return learned


def _bound(text: str, sizes: Mapping[str, int]) -> int | float | None:
    if not text:
        return None
    if text[0].isupper():
        name, _, less = text.partition("-")
        return sizes[name] - int(less or 0) if name in sizes else None  # None: what has this size was not given
    return float(text) if "." in text or "e" in text else int(text)


def _is_number(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind == "float" and isinstance(value, float))


def _is_finite(n: int | float) -> bool:
    return math.isfinite(n) if isinstance(n, float) else -(2**63) <= n < 2**63


def _is_dtype(dtype: torch.dtype, kind: str) -> bool:
    return {"int": dtype in _INTS, "bool": dtype == torch.bool, "float": dtype.is_floating_point}[kind]


def _with_type(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else f"{value!r} ({type(value).__name__})"
