"""Parameters of masks and scores: their specifications, and the check of values against them.

A parameter is annotated with a type for the type checker and, inside `Annotated`, with a specification that people
read and that this module checks:

    seq_lens: Annotated[Tensor, "int[B] in 0..S"]
    prefix_len: Annotated[int | Tensor, "int in 0..S | int[] in 0..S | int[B] in 0..S"]

A specification is a list of alternatives, `KIND`, `KIND(n)` or `KIND[dimensions]`, each with optional inclusive bounds:

    int, float, bool   a Python number (also NumPy's)
    length             an int that only bounds lengths, so that kernels do not depend on it
    int(2)             a tuple of two Python numbers
    int[B, S]          a tensor; `int[]` is a 0-dimensional one

Dimensions and bounds are integers, names of the sizes below, or a new name, which stands for any size:

    B  batch size            Q   number of queries      S  number of positions: the larger of q_offset + Q and KV
    H  number of query heads KV  number of keys

Lists, tuples and NumPy arrays are accepted in place of tensors.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from flexmasks import compat, context
from flexmasks.spec.code import TakenInGraph

_SIZES = re.compile(r"\b[A-Z]+\b")  # torch traces no compilation of a pattern
_BOUND = r"-?\d+(?:\.\d+)?(?:e-?\d+)?|[A-Z]+(?:-\d+)?"
_ALTERNATIVE = re.compile(
    r"(?P<kind>int|float|bool|length)(?:\((?P<count>[1-9]\d*)\)|\[(?P<dims>[A-Z0-9, ]*)\])?"
    rf"(?: in (?P<low>{_BOUND})?\.\.(?P<high>{_BOUND})?)?"
)
_QUOTES = "'\""
_SPECIFICATION_INSIDE = re.compile(rf"(?:^|[{_QUOTES}])(?:int|float|bool|length)(?:\[|\(| in )")
_SPEC_OF_TYPE = {int: "int", float: "float", bool: "bool"}
_NUMPY_TYPES = (np.ndarray, np.generic)
_INT_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Size:
    """Sizes of a call, which bound its indices: b < batch, h < heads, q < q_len (before q_offset) and kv < kv_len."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    device: torch.device
    q_offset: int = 0  # the largest offset, if batch elements have different ones
    dtype: torch.dtype = torch.float32  # dtype of the scores
    approximate: bool = False  # half precision is precise enough for score functions
    may_read: bool = True  # the host may read the values of tensors
    at_most: tuple[str, ...] = ()  # names of sizes (see `named`) that are upper bounds, because they cannot be read
    ends_among_keys: bool = True  # queries that start where a tensor says have no positions behind the last key's
    starts: Tensor | None = field(default=None, compare=False)  # int[batch], the offsets if a tensor has them
    # The q_len of sequences, whose bound is q_len.
    most_queries: Callable[[], Tensor] | None = field(default=None, compare=False)
    # Where the queries of each sequence start among all that lie end to end, int[batch] or more, and the number of all.
    end_to_end: tuple[Tensor, int] | None = field(default=None, compare=False)

    @property
    def positions_of_q(self) -> int:
        """Number of positions that queries reach: q_offset + q_len."""
        return self.q_offset + self.q_len

    @property
    def positions(self) -> int:
        """Number of positions that queries and keys reach: q + q_offset and kv are below it."""
        return max(self.positions_of_q, self.kv_len)

    @property
    def reads_at_once(self) -> bool:
        return context.reads_at_once(self.device)

    @property
    def runs_on_cpu(self) -> bool:
        """Whether the kernels are those for a CPU."""
        return self.device.type == "cpu"

    def named(self) -> dict[str, int]:
        """The sizes by the names that specifications use."""
        return {"B": self.batch, "H": self.heads, "Q": self.q_len, "KV": self.kv_len, "S": self.positions}

    def fits(self, name: str, count: int) -> bool:
        size = self.named()[name]
        return count <= size if name in self.at_most else count == size


@dataclass(frozen=True)
class _Alternative:
    """One alternative of a specification, such as `int[B] in 0..S`."""

    kind: str
    count: int | None = None  # length of a tuple of numbers
    dims: tuple[str, ...] | None = None  # dimensions of a tensor; None for numbers
    low: str = ""
    high: str = ""

    @classmethod
    def parse(cls, text: str) -> _Alternative:
        match = _ALTERNATIVE.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"flexmasks: cannot read the parameter specification {text.strip()!r}; pass alternatives such as "
                "'int in 0..', 'int(2)' or 'float[B, S] in 0..1', joined by ' | '; see flexmasks.spec.parameters."
            )
        low, high = match["low"], match["high"]
        if low and high and not low[0].isalpha() and not high[0].isalpha() and float(low) > float(high):
            raise ValueError(
                f"flexmasks: the parameter specification {text.strip()!r} takes no value: {low} is above {high}."
            )
        count, dims = match["count"], match["dims"]
        return cls(
            kind=match["kind"],
            count=int(count) if count else None,
            dims=None if dims is None else tuple(d.strip() for d in dims.split(",") if d.strip()),
            low=match["low"] or "",
            high=match["high"] or "",
        )


@dataclass(frozen=True)
class Parameter:
    """One keyword-only parameter of a mask or score function."""

    name: str
    spec: str
    required: bool
    default: Any
    alternatives: tuple[_Alternative, ...]

    def takes_tensor(self, rank: int | None = None) -> bool:
        """Whether the parameter accepts a tensor; of `rank` dimensions, if that is given."""
        return any(a.dims is not None and rank in (None, len(a.dims)) for a in self.alternatives)

    def is_sequence(self, value: Any) -> bool:
        """Whether a value is a sequence that stands for a tensor."""
        if not isinstance(value, tuple) or any(a.count == len(value) for a in self.alternatives):
            return False
        return self.takes_tensor()

    @property
    def is_plain_number(self) -> bool:
        """Whether the function's author wrote no specification, or `int` or `float` alone."""
        return self.spec in ("", _SPEC_OF_TYPE[int], _SPEC_OF_TYPE[float])

    @property
    def is_length(self) -> bool:
        return any(a.kind == "length" for a in self.alternatives)

    def tensor(self, value: Any, device: torch.device | None) -> Tensor:
        """Return a sequence as a tensor, an empty one in the dtype that the specification asks for."""
        made = torch.tensor(value, device=device)
        kinds = {a.kind for a in self.alternatives if a.dims is not None}
        if made.numel() or "float" in kinds:
            return made
        return made.long() if "int" in kinds else made.bool()

    def check(self, what: str, value: Any, size: Size, sizes: dict[str, int]) -> Any:
        """Return the value checked against the specification, sequences as tensors.

        `what` names the mask or score in errors. `sizes` maps names of sizes to numbers; new names in the
        specification are added to it with the sizes that the value has. Values of tensors are checked if they may be
        read. Raises ValueError or TypeError.
        """
        if not self.alternatives or (value is None and not self.required and self.default is None):
            return value
        if self.is_sequence(value):
            if len(value) == 2 and not any(a.dims for a in self.alternatives):  # one number is meant, here are two
                got = in_message(value)
                if self.name == "window":
                    got += f"; with two sides it is mask='local', left={value[0]!r}, right={value[1]!r}"
                raise self._error(TypeError, what, got, sizes)
            try:
                value = self.tensor(value, size.device)
            except (TypeError, ValueError, RuntimeError) as error:
                got = f"a sequence that cannot be made a tensor ({error})"
                raise self._error(ValueError, what, got, sizes) from error
        if isinstance(value, Tensor):
            takes_it = self.is_plain_number and value.ndim == 0 and _is_dtype(value.dtype, self.spec)
            return value if takes_it else self._check_tensor(what, value, size, sizes)
        return self._check_numbers(what, value, size, sizes)

    def _check_numbers(self, what: str, value: Any, size: Size, sizes: dict[str, int]) -> Any:
        numbers = value if isinstance(value, tuple) else (value,)
        count = len(numbers) if isinstance(value, tuple) else None
        for alternative in self.alternatives:
            if alternative.dims is None and alternative.count == count:
                if not all(_is_number(n, alternative.kind) for n in numbers):
                    continue
                low, high = _bound(alternative.low, sizes), _bound(alternative.high, sizes)
                if alternative.low.partition("-")[0] in size.at_most:  # the size itself may be smaller
                    low = None
                inside = ((low is None or n >= low) and (high is None or n <= high) for n in numbers)
                if not all(inside) or not all(map(_is_finite, numbers)):
                    raise self._error(ValueError, what, repr(value), sizes)
                return value
        raise self._error(TypeError, what, _with_type(value), sizes)

    def _check_tensor(self, what: str, value: Tensor, size: Size, sizes: dict[str, int]) -> Tensor:
        if not is_dense(value):
            raise self._error(ValueError, what, not_dense(value), sizes)
        shape = tuple(value.shape)
        fits = [a for a in self.alternatives if a.dims is not None and _is_dtype(value.dtype, a.kind)]
        if not fits:
            advice = _advice_on_dtype({a.kind for a in self.alternatives if a.dims is not None}, value)
            raise self._error(TypeError, what, _with_type(value) + advice, sizes)
        for alternative in fits:
            new_sizes = _match(alternative.dims or (), shape, sizes, size.at_most)
            if new_sizes is not None:
                break
        else:
            advice = _advice_on_shape([a.dims or () for a in fits], shape, sizes)
            raise self._error(ValueError, what, _with_type(value) + advice, sizes)
        sizes.update(new_sizes)
        if value.device != size.device:
            got = f"a tensor on {value.device} in a call on {size.device}; {how_to_move(value.device)}"
            raise self._error(ValueError, what, got, sizes)
        low, high = _bound(alternative.low, sizes), _bound(alternative.high, sizes)
        if (low is not None or high is not None) and may_read(size, value) and value.numel():
            least, most = torch.stack(torch.aminmax(value.detach())).tolist()
            if not ((low is None or least >= low) and (high is None or most <= high)):
                raise self._error(ValueError, what, f"values from {least} to {most}", sizes)
        return value

    def _error(self, kind: type[Exception], what: str, got: str, sizes: Mapping[str, int]) -> Exception:
        names = dict.fromkeys(_SIZES.findall(self.spec))
        here = ", ".join(f"{n}={sizes[n]}" for n in names if n in sizes)
        return kind(f"{what}: `{self.name}` must be {self.spec}{f' (here {here})' if here else ''}, got {got}.")


def device_named(call: str, device: Any) -> torch.device:
    """Return a device as torch's. Raises ValueError, which names the call, for anything else."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        problem = str(error).splitlines()[0][:150]
        raise ValueError(f"{call}: `device` must be a torch device, got {in_message(device)} ({problem}).") from None


def how_to_move(device: torch.device) -> str:
    if device.type == "meta":
        return (
            "`to_empty` and `load_state_dict(assign=True)` do not reach the masks that a module holds: make the mask "
            "again, or in `forward`, of a buffer"
        )
    return "a module does not move the masks that it holds: use `mask.to(device)`, or make it in `forward`, of a buffer"


def _advice_on_dtype(kinds: set[str], value: Tensor) -> str:
    """Return what to write where a tensor of numbers stands for other values, or ""."""
    if "float" in kinds:
        return "; pass `x.float()`" if value.dtype in _INT_DTYPES else ""
    if "bool" in kinds and value.dtype in _INT_DTYPES:
        return "; pass `x.bool()` if 1 is visible"
    if not value.is_floating_point():
        return ""
    if "bool" in kinds:
        added = "or, if x is added to scores, score=x"
        return f"; pass `x.bool()` if 1 is visible, `x == 0` if 0 is visible and -inf hidden, {added}"
    return "; pass `x.long()`" if "int" in kinds else ""


def _advice_on_shape(wanted: list[tuple[str, ...]], shape: tuple[int, ...], sizes: Mapping[str, int]) -> str:
    """Return what to write for a tensor `m` that fits the dimensions of a parameter in another form, or ""."""
    forms = [(f"m.squeeze({i})", shape[:i] + shape[i + 1 :]) for i, n in enumerate(shape) if n == 1]
    if len(shape) > 2 and all(n == 1 for n in shape[1:-1]):
        forms.append(("m.flatten(0, -2)", (shape[0], shape[-1])))
    batch, heads, before_pairs = sizes.get("B"), sizes.get("H"), [n for n in shape[:-2] if n != 1]
    if batch and before_pairs == [batch]:
        forms.append(("m[:, None] if it is [batch, queries, keys]", (batch, 1, *shape[-2:])))
    if batch and heads and before_pairs == [batch * heads]:
        text = f"m.unflatten(0, ({batch}, {heads})) if it is [batch * heads, queries, keys]"
        forms.append((text, (batch, heads, *shape[-2:])))
    for dims in sorted(wanted, key=lambda dims: (len(dims), -dims.count("1"))):
        if len(dims) >= len(shape):  # sizes of 1 are expanded, and dimensions added on the left
            aligned = (1,) * (len(dims) - len(shape)) + shape
            whole = tuple(sizes.get(d, n) if n == 1 else n for d, n in zip(dims, aligned, strict=True))
            first = len(dims) - len(shape)
            kept = ["-1" if i >= first and n == aligned[i] else str(n) for i, n in enumerate(whole)]
            forms.append((f"m.expand({', '.join(kept)})", whole))
    for text, form in forms:
        if any(_match(dims, form, sizes, ()) is not None for dims in wanted):
            return f"; a tensor `m` like this is {text}"
    return ""


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    signature = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if not signature:
        return {}
    specs = dict(_specs_of(function.func if isinstance(function, functools.partial) else function))
    return _parameters([(p.name, p.default is p.empty, p.default) for p in signature], specs)


def parameters_in_graph(taken: TakenInGraph) -> dict[str, Parameter]:
    """Return the parameters of a function that torch.compile reads, without the values of defaults."""
    specs = dict(_specs_of(taken.function)) if taken.is_annotated else {}
    return _parameters([(name, required, None) for name, required in taken.named], specs)


def _parameters(taken: Sequence[tuple[str, bool, Any]], specs: Mapping[str, str]) -> dict[str, Parameter]:
    """taken: names, whether each is required, and defaults."""
    parameters: dict[str, Parameter] = {}
    sizes = set("BHQS") | {"KV"}  # names of sizes that bounds may use
    for name, required, default in taken:
        spec = specs.get(name, "")
        parameters[name] = Parameter(
            name=name,
            spec=spec,
            required=required,
            default=None if required else freeze(default),
            alternatives=tuple(_Alternative.parse(t) for t in spec.split("|")) if spec else (),
        )
        sizes |= {d for a in parameters[name].alternatives for d in a.dims or ()}
        bounds = [bound for a in parameters[name].alternatives for bound in (a.low, a.high)]
        unknown = [bound for bound in bounds if bound[:1].isupper() and bound.partition("-")[0] not in sizes]
        if unknown:
            raise ValueError(
                f"flexmasks: the specification {spec!r} of `{name}` is bounded by {unknown[0]!r}, which is no size; "
                f"the sizes are {', '.join(sorted(n for n in sizes if not n.isdigit()))}."
            )
    return parameters


@compat.constant_in_graphs
def _specs_of(function: Callable[..., Any]) -> tuple[tuple[str, str], ...]:
    """Return the names of a function's parameters with the specifications in their annotations.

    Annotations that cannot be evaluated name what only a type checker imports.
    """
    names = getattr(inspect.unwrap(function), "__globals__", {})
    hints: dict[str, Any] = {}
    for name, written in (getattr(function, "__annotations__", None) or {}).items():
        alone: Any = types.SimpleNamespace(__annotations__={name: written})
        try:
            hints |= get_type_hints(alone, names, include_extras=True)
        except Exception as error:  # a string may hold anything
            if isinstance(written, str) and _SPECIFICATION_INSIDE.search(written):
                advice = "import what it names when the module runs, not for type checkers only"
                if "Annotated" not in written:
                    advice = f"write Annotated[Tensor, {written.strip(_QUOTES)!r}]"
                raise TypeError(f"flexmasks: the annotation {written} of `{name}` cannot be read; {advice}.") from error
    specs = {}
    for name, hint in hints.items():
        if get_origin(hint) is Annotated:
            specs[name] = next((m for m in get_args(hint)[1:] if isinstance(m, str)), "")
        elif hint in _SPEC_OF_TYPE:
            specs[name] = _SPEC_OF_TYPE[hint]
    return tuple(specs.items())


def as_number(value: Any) -> Any:
    """Return NumPy's scalars, and arrays without dimensions, as Python's numbers, and any other value as it is.

    So they count wherever a number is taken. A tensor without dimensions is no number: a device would have to be asked.
    """
    is_number = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
    return value.item() if is_number else value


def freeze(value: Any) -> Any:
    """Return lists as tuples, NumPy values as Python's, and any other value as it is."""
    if isinstance(value, _NUMPY_TYPES):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    return value


def same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def hashable(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, tuple):
        return tuple(hashable(v) for v in value)
    return value if isinstance(value, Hashable) else type(value).__name__


def listed(value: Any, device: torch.device | None) -> Any:
    """Return a sequence or a NumPy array as a tensor, and NumPy's numbers as Python's, see `as_number`.

    Any other value, and what cannot be made a tensor, is returned as it is: a check comes later.
    """
    value = as_number(value)
    if isinstance(value, list | tuple | np.ndarray):
        try:
            return torch.tensor(value, device=device)
        except (TypeError, ValueError, RuntimeError):
            return value
    return value


def can_be_read(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: not while torch traces, under torch.vmap, or without memory."""
    plain = None if compat.is_compiling() else compat.without_wrappers(tensor)
    return plain is not None and not (plain.is_meta or isinstance(plain, compat.FakeTensor))


def is_of_vmap(tensor: Tensor) -> bool:
    """Whether torch.vmap hides a dimension of a tensor."""
    return compat.without_wrappers(tensor) is None


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has sizes and strides: nested and sparse ones have not."""
    return tensor.layout == torch.strided and not tensor.is_nested


def not_dense(tensor: Tensor) -> str:
    """Return a tensor that is not dense as text, and what to do."""
    return f"{describe(tensor)}; use `.{'to_padded_tensor(0)' if tensor.is_nested else 'to_dense()'}`"


def may_read(size: Size | None, *tensors: Tensor) -> bool:
    """Whether the host may read the values of these tensors, to check them for example.

    Without sizes a mask or score is called by itself, and values may be read.
    """
    return (size is None or size.may_read) and all(can_be_read(t) for t in tensors)


def implied_size(dimension: str, parameters: Mapping[str, Parameter], values: Mapping[str, Any]) -> int | None:
    """Return the size B, H, Q, KV or S that the shapes of the values imply, or None."""
    for name, value in values.items():
        parameter = parameters.get(name)
        if parameter is None or not (isinstance(value, Tensor) or parameter.is_sequence(value)):
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else _shape(value)
        for alternative in parameter.alternatives:
            if alternative.dims is not None and len(alternative.dims) == len(shape) and dimension in alternative.dims:
                return shape[alternative.dims.index(dimension)]
    return None


_LONGEST_SHOWN = 80  # characters of a wrong value in a message


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def in_message(value: Any) -> str:
    """Return a wrong value as one short line of a message."""
    if is_array(value):
        return f"a NumPy array {value.dtype}{list(value.shape)}"
    if isinstance(value, compat.BlockMask):
        return "a BlockMask"
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.FunctionType) and value.__module__.startswith("flexmasks."):
        return f"{value.__module__}.{value.__name__}"
    return shortened(" ".join(describe(value).split()), _LONGEST_SHOWN)


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def check_returned(hook: str, value: Any, types: type | tuple[type, ...], what: str) -> None:
    """Raise TypeError if a user's hook returned another type."""
    if not isinstance(value, types) or isinstance(value, bool):
        raise TypeError(f"`{hook}` must return {what}, got {describe(value)}.")


_SHOWN_ELEMENTS = 64  # the longest sequence that `describe` writes out


def describe(value: Any) -> str:
    """Return a value as short text.

    Tensors become dtype and shape, long sequences their first numbers, nested ones their shape, others their repr.
    """
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_nested:
            return f"a nested tensor of {dtype}, {value.layout}, {value.dim()} dimensions"
        sizes = ", ".join([f"{n}" for n in value.shape])  # which torch.compile knows how to write, unlike a list
        return f"{dtype}[{sizes}]{'' if value.layout == torch.strided else f' of {value.layout}'}"
    shape = _shape(value)
    if math.prod(shape) <= _SHOWN_ELEMENTS:
        return repr(value)
    return f"({', '.join(map(repr, value[:3]))}, ... {len(value)} values)" if len(shape) == 1 else f"tuple{list(shape)}"


def _shape(value: Any) -> tuple[int, ...]:
    # Of nested tuples, by the first element of each.
    shape = []
    while isinstance(value, tuple):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _match(
    dims: tuple[str, ...], shape: tuple[int, ...], sizes: Mapping[str, int], at_most: tuple[str, ...]
) -> dict[str, int] | None:
    """Return the sizes of new names, or None if the shape does not match. Sizes in `at_most` are upper bounds."""
    if len(dims) != len(shape):
        return None
    new_sizes: dict[str, int] = {}
    for dim, n in zip(dims, shape, strict=True):
        want = int(dim) if dim.isdigit() else sizes.get(dim, new_sizes.get(dim))
        if want is None:
            new_sizes[dim] = n
        elif want != n and not (dim in at_most and n < want):
            return None
    return new_sizes


def _bound(text: str, sizes: Mapping[str, int]) -> int | float | None:
    """Return a bound as a number, or None for no bound and for a size that no value has given yet."""
    if not text:
        return None
    if text[0].isupper():
        name, _, less = text.partition("-")
        return sizes[name] - int(less or 0) if name in sizes else None
    return float(text) if "." in text or "e" in text else int(text)


def _is_number(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    return isinstance(value, int | torch.SymInt) or (kind == "float" and isinstance(value, float))


def _is_finite(n: int | float) -> bool:
    # Compared, because torch.compile traces no math.isfinite of a number that it makes an input.
    return -math.inf < n < math.inf if isinstance(n, float) else -(2**63) <= n < 2**63


def _is_dtype(dtype: torch.dtype, kind: str) -> bool:
    kinds = {"int": dtype in _INT_DTYPES, "bool": dtype == torch.bool, "float": dtype.is_floating_point}
    return kinds.get(kind, False)


def _with_type(value: Any) -> str:
    if isinstance(value, Tensor):
        return describe(value)
    hint = "; pass a list or a tensor" if isinstance(value, Iterable) and not isinstance(value, tuple | str) else ""
    return f"{in_message(value)} ({type(value).__name__}){hint}"
