"""Mask and Score: a function together with its parameters, as a value.

A value can be compared, hashed, printed, combined (`&`, `|`, `~`) and called as an ordinary mask_mod or
score_mod. `resolve` checks the parameters against the sizes of a call, `bind` makes the plain closure that
torch traces; in between stands what is worth caching: only that which is not the user's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from flexmasks.cache import identity
from flexmasks.spec.captures import Aliases, Opaque, Readable, Reader
from flexmasks.spec.parameters import Parameter, Size, describe, freeze, implied_size, parameters_of

if TYPE_CHECKING:
    from flexmasks.blocks.counts import Blocks


@dataclass(frozen=True, eq=False)
class Definition:
    """A function of indices and what is known of it: its name, parameters and hooks."""

    kind: str  # "mask" or "score"
    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    registered: bool = False
    prepare: Callable[..., dict[str, Any]] | None = None
    example: Callable[[int], dict[str, Any]] | None = None
    inner_size: Callable[..., Size] | None = None
    dense: Callable[..., Any] | None = None
    template: str = ""  # how operators print

    @functools.cached_property
    def own(self) -> bool:
        """Whether its functions are this library's, and read nothing that could change."""
        if not (self.registered or self.template):  # one of the library's functions given as a function
            return False
        functions = [f for f in (self.function, self.prepare, self.inner_size, self.dense) if f is not None]
        plain = all(isinstance(f, types.FunctionType) and f.__closure__ is None for f in functions)
        return plain and all(str(f.__module__).startswith("flexmasks.") for f in functions)

    @property
    def doc(self) -> str:
        """The function's docstring, cleaned."""
        return inspect.cleandoc(self.function.__doc__ or "")

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # never changes, and is known by identity

    def __reduce__(self) -> Any:  # pickled by name: the functions of a definition may be lambdas
        return (_registered, (self.kind, self.name)) if self.registered else super().__reduce__()


def define(kind: str, function: Callable[..., Any], name: str | None = None, **hooks: Any) -> Definition:
    """Read a mask or score function's signature.

    Raises TypeError where it does not take `(b, h, q, kv)`, or `(score, b, h, q, kv)`, by position.
    """
    arguments = ("b", "h", "q", "kv") if kind == "mask" else ("score", "b", "h", "q", "kv")
    if not callable(function) or isinstance(function, type | bool):
        raise TypeError(f"flexmasks: a {kind} is a name, a {kind.title()} or a function, got {function!r}.")
    if name is None:
        inner = function.func if isinstance(function, functools.partial) else function
        name = getattr(inner, "__name__", type(inner).__name__)
    try:
        signature = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"flexmasks: the signature of the {kind} function {name!r} cannot be read: {error}") from error
    positional = [p for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    spread = any(p.kind is p.VAR_POSITIONAL for p in signature)
    if len(required) > len(arguments) or (len(positional) < len(arguments) and not spread):
        raise TypeError(
            f"flexmasks: the {kind} function {name!r} must take ({', '.join(arguments)}) by position, "
            f"its signature is {inspect.signature(function)}; parameters come after `*`."
        )
    return Definition(kind, name, function, parameters_of(hooks.get("prepare") or function), **hooks)


class Modifier(Readable):
    """What Mask and Score share: a definition and the values of its parameters."""

    kind: ClassVar[str]
    definition: Definition
    params: Mapping[str, Any]

    def __init__(self, definition: Definition, params: Mapping[str, Any]) -> None:
        self.definition = definition
        self.params = {name: freeze(value) for name, value in params.items()}
        self._bound: dict[torch.device, tuple[Hashable, Callable[..., Tensor]]] = {}

    @classmethod
    def of(cls, definition: Definition, params: Mapping[str, Any]) -> Self:
        """The value of `definition` with `params`, or a TypeError where one is unknown or missing."""
        known = definition.parameters
        unknown = [name for name in params if name not in known]
        if unknown:
            takes = ", ".join(f"`{n}`" for n in known) or "no parameters"
            raise TypeError(
                f"flexmasks: {cls.kind} {definition.name!r} has no parameter `{unknown[0]}`; takes {takes}."
            )
        missing = [p for name, p in known.items() if p.required and name not in params]
        if missing:
            wants = ", ".join(f"`{p.name}`" + (f" ({p.spec})" if p.spec else "") for p in missing)
            raise TypeError(f"flexmasks: {cls.kind} {definition.name!r} needs {wants}.")
        made = cls(definition, params)
        for name, value in made.params.items():
            for inner in _nested(value):
                if inner.kind != cls.kind:
                    raise TypeError(
                        f"flexmasks {cls.kind} {definition.name!r}: `{name}` must be a {cls.kind}, got {inner!r}, "
                        f"a {inner.kind}."
                    )
        return made

    @property
    def name(self) -> str:
        """The name it is registered under, or the function's own."""
        return self.definition.name

    def batch_size(self) -> int | None:
        """The batch size that the parameters' shapes imply, or None."""
        return self.implied_size("B")

    def implied_size(self, dimension: str) -> int | None:
        """The size (B, H, Q, KV or S, see flexmasks.spec.parameters) that the parameters' shapes imply, or None."""
        own = implied_size(dimension, self.definition.parameters, self.params)
        if self.definition.inner_size is not None and dimension != "H":
            return own  # those inside have sizes of their own
        nested = (m.implied_size(dimension) for value in self.params.values() for m in _nested(value))
        return next((n for n in (own, *nested) if n), None)

    def _repr_html_(self) -> str:
        """What Jupyter shows: its picture, over lengths that its parameters suggest."""
        from flexmasks.pictures.show import html_of  # imports this module

        return html_of(self)

    def tensors(self) -> list[Tensor]:
        """The tensors among the parameters and what functions captured, as far as they can be read."""
        found: list[Tensor] = []
        with contextlib.suppress(Opaque):
            self.capture(found)
        return found

    def numbers(self) -> list[Tensor]:
        """The 0-dimensional tensors among the parameters, also those of masks or scores inside."""
        own = [v for v in self.params.values() if isinstance(v, Tensor) and v.ndim == 0]
        return own + [t for v in self.params.values() for m in _nested(v) for t in m.numbers()]

    def learns(self) -> bool:
        """Whether a tensor among the parameters, also those of masks or scores inside, requires a gradient."""
        tensors = (v for v in self.params.values() if isinstance(v, Tensor))
        inner = (m for v in self.params.values() for m in _nested(v))
        return any(t.requires_grad for t in tensors) or any(m.learns() for m in inner)

    def capture(self, tensors: list[Tensor], lift: bool = False, contents: bool = True) -> Hashable:
        """A key of everything but tensors' contents; the tensors are appended to `tensors`.

        With `lift` the numbers that `resolve` would lift are left out of the key. Without `contents` so are the
        elements of sequences that become tensors: the key of a kernel, to which all these are inputs.
        Raises captures.Opaque where a user's function captured what cannot be read.
        """
        reader = Reader(tensors)
        return reader.finish(self.read(reader, lift, contents))

    def read(self, reader: Reader, lift: bool = False, contents: bool = True) -> Hashable:
        """See `capture`."""
        definition = self.definition
        pairs: list[Hashable] = []
        for name, value in self.params.items():
            parameter = definition.parameters[name]
            if lift and type(value) is int and parameter.takes_tensor(0):
                pairs.append((name, "lifted"))
            elif not contents and parameter.is_sequence(value):
                pairs.append((name, "sequence"))
            elif nested := _nested(value):
                pairs.append((name, *(m.read(reader, lift, contents) for m in nested)))
            else:
                pairs.append((name, reader.key(value)))
        if definition.own:
            return self.kind, definition.name, *pairs
        functions = (definition.function, definition.prepare, definition.inner_size, definition.dense)
        return self.kind, *map(reader.key, functions), *pairs

    def aliased(self, aliases: Aliases) -> Self:
        """See `captures.Aliases`."""
        hooks = ("function", "prepare", "inner_size", "dense")
        definition = replace(self.definition, **{n: aliases.of(getattr(self.definition, n)) for n in hooks})
        return type(self)(definition, {n: aliases.of(v) for n, v in self.params.items()})

    def checked(self, size: Size) -> dict[str, Any]:
        """The parameters by name, checked against a call's sizes; sequences are tensors."""
        definition, sizes = self.definition, size.named()
        what = f"flexmasks {self.kind} {self.name!r}"
        values = {n: p.default for n, p in definition.parameters.items()} | dict(self.params)
        return {n: definition.parameters[n].check(what, v, size, sizes) for n, v in values.items()}

    def resolve(self, size: Size | None, lift: bool = False, device: torch.device | None = None) -> dict[str, Any]:
        """Check the parameters against a call's sizes; return those that `bind` must use instead of the given ones.

        The result holds none of the user's tensors: where `prepare` returns one, it says which. With `lift`, numbers
        that may be tensors become tensors, so that a compiled kernel takes them as inputs. Without sizes nothing is
        checked (a bare call as a mask_mod).
        """
        definition = self.definition
        what = f"flexmasks {self.kind} {self.name!r}"
        if size is not None:
            device = size.device
            values = self.checked(size)
            if self.kind == "score":
                values = {n: _precise(v, size.dtype) for n, v in values.items()}
        else:
            values = {n: p.default for n, p in definition.parameters.items()} | dict(self.params)
            values = {n: _as_tensor(definition.parameters[n], v, device) for n, v in values.items()}
        inner = size
        try:
            if definition.inner_size is not None and size is not None:
                inner = definition.inner_size(size, **values)
            if definition.prepare is not None:
                given = values
                values = definition.prepare(size, **values)
                if size is None and device is not None:  # what it made of numbers is on the CPU
                    values = {n: _moved(v, given, device) for n, v in values.items()}
        except (ValueError, TypeError) as error:
            raise type(error)(f"{what}: {error}") from None
        if lift:
            for n, p in definition.parameters.items():
                if type(values.get(n)) is int and p.takes_tensor(0):
                    values[n] = torch.tensor(values[n], device=device)
        extras: dict[str, Any] = {}
        for n, value in values.items():
            if nested := _nested(value):
                source = next(p for p, v in self.params.items() if v is value)
                extras[n] = NestedExtras(source, tuple(m.resolve(inner, lift, device) for m in nested))
            elif isinstance(value, Tensor) and (same := [p for p, v in self.params.items() if v is value]):
                if same != [n]:
                    extras[n] = _Given(same[0])
            elif n in self.params and value is self.params[n]:
                continue
            elif definition.prepare is not None or n in self.params or value is not definition.parameters[n].default:
                extras[n] = value
        return extras | {n: _Absent for n in self.params if n not in values}  # those that prepare left out

    def bind(self, extras: Mapping[str, Any], heads: int | None = None) -> Callable[..., Tensor]:
        """The plain function of indices, with its parameters bound. `extras` is what `resolve` gave.

        With `heads`, 0-dimensional tensors among them are read by the head's index: some kernels have none.
        """
        bound: dict[str, Any] = {}
        for name, value in {**self.params, **extras}.items():
            if isinstance(value, NestedExtras):
                source = self.params[value.source]
                mods = tuple(m.bind(e, heads) for m, e in zip(_nested(source), value.extras, strict=True))
                bound[name] = mods if isinstance(source, tuple) else mods[0]
            elif isinstance(value, _Given):
                bound[name] = self.params[value.parameter]
            elif value is not _Absent:
                bound[name] = value
        function = self.definition.function
        if not bound:
            return function
        numbers = {n: bound.pop(n) for n, v in [*bound.items()] if heads and isinstance(v, Tensor) and v.ndim == 0}
        if heads and numbers:
            function = _by_head(function, numbers, heads)
        return _close(self.kind, function, bound)

    def _standalone(self, device: torch.device) -> Callable[..., Tensor]:
        """The function for a bare call, kept until a tensor that it was prepared from changes."""
        found = self._bound.get(device)
        if torch.compiler.is_compiling():  # the tracer sees neither versions nor a cache
            return self.bind(self.resolve(None, device=device)) if found is None else found[1]
        state = self._state() if self._prepared() else ()
        if found is None or state is None or found[0] != state:
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                found = self._bound[device] = state, self.bind(self.resolve(None, device=device))
        return found[1]

    def _prepared(self) -> bool:
        nested = [m for value in self.params.values() for m in _nested(value)]
        return self.definition.prepare is not None or any(m._prepared() for m in nested)

    def _state(self) -> Hashable | None:
        """What a preparation depends on, or None where that cannot be known."""
        tensors: list[Tensor] = []
        try:
            key = self.capture(tensors)
        except Opaque:
            return None
        states = [identity(t) for t in tensors]
        return None if None in states else (key, *states)

    def __reduce__(self) -> Any:
        return type(self), (self.definition, dict(self.params))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Modifier):
            return NotImplemented
        if self.kind != other.kind or self.definition.function is not other.definition.function:
            return False
        return self.params.keys() == other.params.keys() and all(
            _same(v, other.params[n]) for n, v in self.params.items()
        )

    def __hash__(self) -> int:
        params = frozenset((n, _hashable(v)) for n, v in self.params.items())
        return hash((self.kind, self.definition.function, params))

    def __repr__(self) -> str:
        given = ", ".join(f"{n}={describe(v)}" for n, v in self.params.items())
        return f"{self.name}({given})" if self.definition.registered or given else self.name


class Mask(Modifier):
    """Which keys each query sees: a value made by `get_mask`, or by `&`, `|`, `~` of masks and functions.

    Called as `mask(b, h, q, kv)` it is an ordinary FlexAttention mask_mod. Masks are equal when they have one
    function and equal given parameters. Lists and NumPy arrays are taken as tuples and equal those; a tensor equals
    a tensor of its dtype, device, shape and content, and no list; a default that is given equals none that is not.

    Example:
        >>> import flexmasks
        >>> packed = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=[0, 0, 1, 1])
        >>> packed
        causal() & document(document_ids=(0, 0, 1, 1))
    """

    kind = "mask"

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self._standalone(q.device)(b, h, q, kv)

    def __and__(self, other: str | Mask | Callable[..., Tensor]) -> Mask:
        return _combine(AND, self, other)

    def __rand__(self, other: str | Mask | Callable[..., Tensor]) -> Mask:
        return _combine(AND, other, self)

    def __or__(self, other: str | Mask | Callable[..., Tensor]) -> Mask:
        return _combine(OR, self, other)

    def __ror__(self, other: str | Mask | Callable[..., Tensor]) -> Mask:
        return _combine(OR, other, self)

    def __invert__(self) -> Mask:
        return Mask(NOT, {"mask": self})

    def blocks(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: torch.device | str | None = None,
        block_size: int | tuple[int, int] = 128,
        q_offset: int | Tensor = 0,
    ) -> Blocks:
        """The mask's empty, partial and full blocks over these lengths, counted, and the BlockMask that they make.

        Takes and raises what `flexmasks.block_mask` does.

        Example:
            >>> import flexmasks
            >>> print(flexmasks.get_mask("sliding_window", window=512).blocks(8192))
            blocks of 128 x 128: 4096, of which empty 3786, partial 124, full 186; skipped: 92.4%
            looked at element by element: 124
        """
        from flexmasks.attention import plan_mask  # imports this module

        lengths = (q_len, kv_len, batch, heads, device, block_size, q_offset)
        return plan_mask("Mask.blocks", self, *lengths, {}).blocks()

    def __bool__(self) -> bool:
        raise TypeError(
            "flexmasks: a mask has no truth value; combine masks with `&`, `|` and `~`, not `and`, `or`, `not`."
        )

    def __repr__(self) -> str:
        template = self.definition.template
        if not template:
            return super().__repr__()
        masks = self.params["masks"] if "masks" in self.params else (self.params["mask"],)
        parts = [f"({m!r})" if _binds_looser(m, self) else repr(m) for m in masks]
        return template + parts[0] if len(parts) == 1 else template.join(parts)


class Score(Modifier):
    """A change of the attention scores: a value made by `get_score`.

    Called as `score_mod(score, b, h, q, kv)` it is an ordinary FlexAttention score_mod. One that reads its tensors
    when it is first called (`packed`) must be called once before torch.compile traces it.

    Example:
        >>> import flexmasks
        >>> flexmasks.get_score("softcap", cap=30.0)
        softcap(cap=30.0)
    """

    kind = "score"

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self._standalone(q.device)(score, b, h, q, kv)


def to_mask(value: Any) -> Mask:
    """A Mask as it is; a name, and a plain function `(b, h, q, kv)`, as a Mask of no parameters."""
    if isinstance(value, Score):
        raise TypeError(f"flexmasks: a mask is needed, {value!r} is a score.")
    if isinstance(value, str):
        from flexmasks.spec.registry import get_mask  # imports this module

        return get_mask(value)
    return value if isinstance(value, Mask) else Mask.of(define("mask", value), {})


def _all_of(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, masks: tuple[Callable[..., Tensor], ...]) -> Tensor:
    return functools.reduce(operator.and_, [m(b, h, q, kv) for m in masks])


def _any_of(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, masks: tuple[Callable[..., Tensor], ...]) -> Tensor:
    return functools.reduce(operator.or_, [m(b, h, q, kv) for m in masks])


def _inverse(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, mask: Callable[..., Tensor]) -> Tensor:
    return ~mask(b, h, q, kv)


def _chain(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, scores: tuple[Callable[..., Tensor], ...]
) -> Tensor:
    for change in scores:
        score = change(score, b, h, q, kv)
    return score


AND, OR, NOT = (
    define("mask", function, name, registered=True, template=template)
    for function, name, template in ((_all_of, "&", " & "), (_any_of, "|", " | "), (_inverse, "~", "~"))
)
CHAIN = define("score", _chain, "chain", registered=True)


def _combine(definition: Definition, *operands: Any) -> Mask:
    masks: list[Mask] = []
    for operand in operands:
        mask = to_mask(operand)
        masks += mask.params["masks"] if mask.definition is definition else [mask]
    return Mask(definition, {"masks": tuple(masks)})


def _binds_looser(inner: Mask, outer: Mask) -> bool:
    order = [NOT, AND, OR]
    return bool(inner.definition.template) and order.index(inner.definition) > order.index(outer.definition)


@dataclass(frozen=True)
class NestedExtras:
    """In a value's extras: the masks or scores of its parameter `source`, and their own extras."""

    source: str
    extras: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class _Given:
    """In a value's extras: the parameter itself, as it was given."""

    parameter: str


class _Absent:
    """In a value's extras, as it is: a parameter that the function does not take."""


def _close(kind: str, function: Callable[..., Tensor], params: dict[str, Any]) -> Callable[..., Tensor]:
    if kind == "mask":

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return function(b, h, q, kv, **params)

        return mask_mod

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return function(score, b, h, q, kv, **params)

    return score_mod


def _by_head(function: Callable[..., Tensor], numbers: Mapping[str, Tensor], heads: int) -> Callable[..., Tensor]:
    """The function of a mask or score with numbers that are read by the head's index, from tensors of all heads."""
    of_heads = {n: v.expand(max(heads, 2)) for n, v in numbers.items()}

    def read(*args: Tensor, **params: Any) -> Tensor:
        h = args[-3]
        return function(*args, **params, **{n: t[h] for n, t in of_heads.items()})

    return read


def _precise(value: Any, dtype: torch.dtype) -> Any:
    """A tensor in half precision as one of the scores' dtype: what is computed from it is added to scores."""
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(dtype) if is_half else value


def _moved(value: Any, given: Mapping[str, Any], device: torch.device) -> Any:
    made = isinstance(value, Tensor) and not any(value is v for v in given.values())
    return value.to(device) if made else value


def _nested(value: Any) -> list[Modifier]:
    values = value if isinstance(value, tuple) else (value,)
    return [v for v in values if isinstance(v, Modifier)]


def _as_tensor(parameter: Parameter, value: Any, device: torch.device | None) -> Any:
    return parameter.tensor(value, device) if parameter.is_sequence(value) else value


def _registered(kind: str, name: str) -> Definition:
    """A definition that pickle stored."""
    from flexmasks.spec.registry import definition  # imports this module

    operators = {d.name: d for d in (AND, OR, NOT, CHAIN)}
    return operators[name] if name in operators else definition(kind, name)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, tuple):
        return tuple(_hashable(v) for v in value)
    return value if isinstance(value, Hashable) else type(value).__name__
