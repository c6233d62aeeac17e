"""Mask and Score: a definition together with the values of its parameters.

A value can be compared, hashed, printed, combined (`&`, `|`, `~`) and called as an ordinary mask_mod or score_mod.
`resolve` checks the parameters against the sizes of a call and prepares them; `bind` makes the plain closure that
torch traces. The result of `resolve` holds none of the user's tensors, so that it may be cached.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NoReturn, Self

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.counts import Blocks
from flexmasks.errors import refused_to_pickle, why_not_pickled
from flexmasks.spec.aliases import in_one_piece
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import (
    AND,
    FUNCTIONS,
    NOT,
    OR,
    Definition,
    check_names,
    define,
    definition,
    of_pairs,
)
from flexmasks.spec.parameters import (
    Parameter,
    Size,
    check_returned,
    describe,
    device_named,
    freeze,
    hashable,
    how_to_move,
    implied_size,
    in_message,
    same,
)
from flexmasks.spec.structure import Filling, Readable, Recipe, Walk, flatten, state_of, tensors_of

_NO_FUNCTIONS = [f.name for f in fields(Definition) if f.init and f.name not in FUNCTIONS]


@dataclass(frozen=True)
class ResolvedInner(Readable):
    """The resolved arguments of the masks or scores inside the parameter `source`."""

    source: str
    resolved: tuple[Mapping[str, Any], ...]

    def _taken(self, walk: Walk) -> tuple[Hashable, Recipe]:
        key, make = walk.take(self.resolved, (id(self), "attribute", "resolved"))
        source = self.source
        return (source, key), lambda filling: ResolvedInner(source, make(filling))


@dataclass(frozen=True)
class Given(Readable):
    """The user's own tensor, given as this parameter."""

    parameter: str

    def _taken(self, walk: Walk) -> tuple[Hashable, Recipe]:
        return self, lambda _: self


class Absent:
    """A parameter that `prepare` consumed and the function does not take."""


class Modifier(Readable):
    """Base of Mask and Score: a definition and the values of its parameters."""

    _kind: ClassVar[str]
    _how_to_combine: ClassVar[str]
    __array_ufunc__ = None  # NumPy's arrays leave `&` and `|` to masks, which say what to write
    _definition: Definition
    params: Mapping[str, Any]
    _calls: ClassVar[Any]  # the public calls, which the package sets: they import this module

    def __init__(self, definition: Definition | None = None, params: Mapping[str, Any] | None = None) -> None:
        if params is None or not isinstance(definition, Definition):
            raise TypeError(
                f"flexmasks: a {type(self).__name__} is made by flexmasks.get_{self._kind}({definition!r})."
            )
        self._definition = definition
        self.params = {name: freeze(value) for name, value in params.items()}
        self._bound: dict[torch.device, tuple[Hashable, Callable[..., Tensor]]] = {}

    @classmethod
    def _of(cls, definition: Definition, params: Mapping[str, Any]) -> Self:
        """Return the value of a definition with these parameters.

        Raises TypeError if a parameter is unknown or missing.
        """
        check_names(definition, params)
        made = cls(definition, params)
        for name, value in made.params.items():
            for inner in _modifiers_in(value):
                if inner._kind != cls._kind:
                    raise TypeError(
                        f"flexmasks {cls._kind} {definition.name!r}: `{name}` must be a {cls._kind}, got {inner!r}, "
                        f"a {inner._kind}."
                    )
        return made

    @property
    def name(self) -> str:
        """The registered name, or the function's own name."""
        return self._definition.name

    def _operands(self) -> list[Modifier]:
        """The masks or scores among the parameters."""
        return [m for value in self.params.values() for m in _modifiers_in(value)]

    def _inside(self) -> list[Modifier]:
        """The value, and all masks or scores inside it."""
        return [self, *[m for inner in self._operands() for m in inner._inside()]]

    def _is_by_library(self) -> bool:
        """Whether this library wrote all functions."""
        return all(m._definition.by_library for m in self._inside())

    @functools.cached_property
    def _own_key(self) -> tuple[Hashable, list[Tensor]] | None:
        """The value's key and tensors if the library wrote all functions, so that nothing else can change, or None."""
        if not self._is_by_library():
            return None
        structure, leaves = flatten(self)
        return None if structure.unreadable else (structure.key, leaves.tensors)

    @functools.cached_property
    def _alone(self) -> Any:
        """The function, if the value is one function and nothing else, or None."""
        functions = [f for f in self._definition.functions if f is not None]
        return functions[0] if len(functions) == 1 and not self.params else None

    def _is_relative(self) -> bool:
        """Whether a score depends on heads and distances alone, see `register_score(relative=True)`."""
        return all(m._definition.relative for m in self._inside())

    def _is_drawn(self) -> bool:
        """Whether some of its tensors are new in each call."""
        return any(m._definition.drawn for m in self._inside())

    def _has_other_function(self) -> bool:
        """Whether kernels compute another function than the mask's own, see `register_mask(compiled=)`."""
        return any(m._definition.compiled is not None for m in self._inside())

    def _implied_size(self, dimension: str) -> int | None:
        """The size that the parameters' shapes imply for B, H, Q, KV or S, see flexmasks.spec.parameters, or None."""
        own = implied_size(dimension, self._definition.parameters, self.params)
        if self._definition.inner_size is not None and dimension != "H":
            return own  # inner masks see other sizes than the call's
        sizes = [n for n in (own, *(m._implied_size(dimension) for m in self._operands())) if n]
        return next((n for n in sizes if n != 1), 1 if sizes else None)  # tables of size 1 are for all

    def _repr_html_(self) -> str:
        return str(self._calls._html_of(self))  # Jupyter shows the picture, over lengths that the parameters suggest

    @says_what_to_write()
    def draw(self, q_len: int | None = None, kv_len: int | None = None, **arguments: Any) -> Any:
        """Return the picture over these lengths, see `flexmasks.draw`."""
        return self._calls.draw(self, q_len, kv_len, **arguments)

    @says_what_to_write()
    def show(self, q_len: int | None = None, kv_len: int | None = None, **arguments: Any) -> None:
        """Show the picture over these lengths, see `flexmasks.show`."""
        self._calls.show(self, q_len, kv_len, **arguments)

    def _tensors(self) -> list[Tensor]:
        """The tensors among parameters and captured variables, without variables that cannot be read."""
        return tensors_of(self)

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors that have names, with their names in words."""
        leaves, holders = flatten(self)[1], {id(m): m for m in self._inside()}
        named = []
        for place, tensor in zip(leaves.places, leaves.tensors, strict=True):
            if place is None:
                continue
            holder = holders.get(place.holder)
            what = f"the {place.kind} `{place.name}` of the function"
            named.append((what if holder is None else f"`{place.name}` of {holder._kind} {holder.name!r}", tensor))
        return named

    def _numbers(self) -> list[Tensor]:
        """The 0-dimensional tensors among the parameters, those of inner masks or scores included."""
        return [t for t in self._parameter_tensors() if t.ndim == 0]

    def _learns(self) -> bool:
        """Whether a tensor among the parameters, those of inner values included, requires a gradient."""
        return any(t.requires_grad for t in self._parameter_tensors())

    def _parameter_tensors(self) -> list[Tensor]:
        return [v for m in self._inside() for v in m.params.values() if isinstance(v, Tensor)]

    def _holds_lists(self) -> bool:
        """Whether sequences stand for tensors among the parameters, inner ones included."""
        return any(m._definition.parameters[n].is_sequence(v) for m in self._inside() for n, v in m.params.items())

    def _taken(self, walk: Walk) -> tuple[Hashable, Recipe]:
        definition = self._definition
        without_tensors: Definition | dict[str, Any] = definition
        key: list[Hashable] = [self._kind]
        functions: list[Recipe] = []
        defaults: dict[str, Recipe] = {}
        if definition.by_library:
            key.append(definition.name)
        else:  # functions and defaults may hold tensors
            without_tensors = {name: getattr(definition, name) for name in _NO_FUNCTIONS}
            for function in definition.functions:
                part, recipe = walk.take(function)
                key.append(part)
                functions.append(recipe)
            for name, parameter in definition.parameters.items():
                if isinstance(parameter.default, Tensor):  # the function has it, too
                    _, _, place = walk.seen.get(id(parameter.default), (0, None, None))
                    defaults[name] = walk.take(parameter.default, place)[1]
            if defaults:
                without_tensors["parameters"] = _with_defaults(definition.parameters, dict.fromkeys(defaults))
        params: dict[str, Recipe] = {}
        for name, value in self.params.items():
            parameter = definition.parameters[name]
            if walk.lifts and type(value) is int and parameter.takes_tensor(0):
                key.append((name, "lifted"))
            elif not walk.contents and parameter.is_length:
                continue
            elif not walk.contents and parameter.is_sequence(value):
                key.append((name, "sequence"))
            else:
                part, params[name] = walk.take(value, (id(self), "parameter", name))
                key.append((name, part))
        return tuple(key), functools.partial(_filled, type(self), without_tensors, functions, defaults, params)

    def _checked(self, size: Size) -> dict[str, Any]:
        """The parameters by name, checked against a call's sizes, with sequences as tensors."""
        parameters, sizes = self._definition.parameters, size.named()
        what = f"flexmasks {self._kind} {self.name!r}"
        return {n: parameters[n].check(what, v, size, sizes) for n, v in self._values().items()}

    def _check(self, size: Size, known: dict[str, int]) -> None:
        """Check the parameters, and those of inner masks or scores, against the sizes that are known.

        known: sizes by the names of `Size.named`. Those of the batch and the heads that shapes imply are added, for
            other masks and scores of the same call; 1 implies nothing.

        Raises ValueError or TypeError.
        """
        parameters, sizes = self._definition.parameters, dict(known)
        for name, value in self._values().items():
            parameters[name].check(f"flexmasks {self._kind} {self.name!r}", value, size, sizes)
        known |= {n: sizes[n] for n in ("B", "H") if sizes.get(n, 1) != 1}
        if self._definition.inner_size is None:  # others see other sizes than the call's, which may depend on values
            for inner in self._operands():
                inner._check(size, known)

    def _values(self) -> dict[str, Any]:
        return {n: p.default for n, p in self._definition.parameters.items()} | dict(self.params)

    def _resolve(self, size: Size | None, lift: bool = False, device: torch.device | None = None) -> dict[str, Any]:
        """Return the arguments that `bind` uses in place of the given parameters, checked against a call's sizes.

        The result holds none of the user's tensors: where `prepare` returns one, the result says which parameter it
        is. With `lift`, numbers that may be tensors become tensors, so that a compiled kernel takes them as inputs.
        Without sizes nothing is checked: the value is called by itself, as a mask_mod or score_mod.
        """
        parameters, prepare = self._definition.parameters, self._definition.prepare
        if size is not None:
            device = size.device
            arguments = self._checked(size)
            if self._kind == "score":
                arguments = {n: _in_precision(v, size.dtype) for n, v in arguments.items()}
        else:
            arguments = {n: self._unchecked(n, v, device) for n, v in self._values().items()}
        inner_size = size
        try:
            if self._definition.inner_size is not None and size is not None:
                inner_size = self._definition.inner_size(size, **arguments)
                check_returned("inner_size", inner_size, Size, "a flexmasks.spec.Size")
            if prepare is not None:
                given = arguments
                arguments = prepare(size, **arguments)
                check_returned("prepare", arguments, dict, "a dict of the function's arguments")
                if size is None and device is not None:  # `prepare` made tensors of numbers on the CPU
                    arguments = {n: _moved(v, given, device) for n, v in arguments.items()}
        except (ValueError, TypeError) as error:
            raise self._named(error) from None
        if lift:
            for n, p in parameters.items():
                if type(arguments.get(n)) is int and p.takes_tensor(0):
                    arguments[n] = torch.full((), arguments[n], device=device)  # without a copy from the host
        return self._without_users_tensors(arguments, inner_size, lift, device)

    def _without_users_tensors(
        self, arguments: Mapping[str, Any], inner_size: Size | None, lift: bool, device: torch.device | None
    ) -> dict[str, Any]:
        """Return the arguments that differ from the given parameters, with `Given` for a user's tensor."""
        resolved: dict[str, Any] = {}
        parameters, has_prepared = self._definition.parameters, self._definition.prepare is not None
        for n, value in arguments.items():
            given = self.params.get(n, Absent if has_prepared else parameters[n].default)
            if inner := _modifiers_in(value):
                source = next((p for p, v in self.params.items() if v is value), n)
                if self._given(source) is not value:
                    raise self._named(TypeError(f"`prepare` must return the {self._kind} `{n}` as it was given."))
                resolved[n] = ResolvedInner(source, tuple(m._resolve(inner_size, lift, device) for m in inner))
            elif isinstance(value, Tensor) and (names := [p for p, v in self.params.items() if v is value]):
                if names != [n]:
                    resolved[n] = Given(names[0])
            elif value is not given:
                resolved[n] = in_one_piece(value) if isinstance(value, Tensor) else value
        return resolved | {n: Absent for n in self.params if n not in arguments}

    def _unchecked(self, name: str, value: Any, device: torch.device | None) -> Any:
        """A parameter's value with a sequence as a tensor, for a call without sizes."""
        parameter = self._definition.parameters[name]
        if not parameter.is_sequence(value):
            return value
        try:
            return parameter.tensor(value, device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._named(ValueError(f"`{name}` cannot be made a tensor: {error}")) from error

    def _named(self, error: Exception) -> Exception:
        """Return a hook's error with the name of the mask or score before it."""
        is_named = str(error).startswith("flexmasks")
        return error if is_named else type(error)(f"flexmasks {self._kind} {self.name!r}: {error}")

    def _bind(
        self,
        resolved: Mapping[str, Any],
        heads: int | None = None,
        for_kernels: bool = False,
    ) -> Callable[..., Tensor]:
        """Return the plain function of indices with its arguments bound, given what `resolve` returned.

        With `heads`, the function reads 0-dimensional tensors by the head's index, because some kernels take no
        0-dimensional tensors.
        With `for_kernels`, the function is the one that kernels compute, see `register_mask(compiled=)`.
        """
        arguments: dict[str, Any] = {}
        for name, value in {**self.params, **resolved}.items():
            if isinstance(value, ResolvedInner):
                source = self._given(value.source)
                inner = zip(_modifiers_in(source), value.resolved, strict=True)
                mods = (m._bind(r, heads, for_kernels) for m, r in inner)
                made = tuple(next(mods) if isinstance(x, Modifier) else x for x in _parts_of(source))
                arguments[name] = made if isinstance(source, tuple) else made[0]
            elif isinstance(value, Given):
                arguments[name] = self.params[value.parameter]
            elif value is not Absent:
                arguments[name] = value
        function = (self._definition.compiled if for_kernels else None) or self._definition.function
        if not arguments:
            return function
        if heads:
            numbers = {n: v for n, v in arguments.items() if isinstance(v, Tensor) and v.ndim == 0}
            if numbers:
                over_heads = {n: v.expand(max(heads, 2)) for n, v in numbers.items()}
                function = _by_head(function, over_heads)
                arguments = {n: v for n, v in arguments.items() if n not in numbers}
        return _close(self._kind, function, arguments)

    def _standalone(self, device: torch.device) -> Callable[..., Tensor]:
        """The function for a call outside `attention`, kept until a tensor that it was prepared from changes."""
        known = self._bound.get(device)
        if compat.is_compiling():  # torch can trace neither versions of tensors nor a cache
            return self._bind(self._resolve(None, device=device)) if known is None else known[1]
        state = () if all(m._definition.prepare is None for m in self._inside()) else state_of(self, [])
        if known is None or state is None or known[0] != state:
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                known = self._bound[device] = state, self._bind(self._resolve(None, device=device))
        return known[1]

    def to(self, device: torch.device | str) -> Self:
        """Return the same mask or score with the tensors among its parameters on a device.

        Tensors that a user's function captured stay where they are.
        """
        call = f"flexmasks.{type(self).__name__}.to"
        device = device_named(call, device)
        if device.type != "meta":
            self._check_data(call)
        return type(self)(self._definition, {n: _on(v, device) for n, v in self.params.items()})

    def _given(self, name: str) -> Any:
        parameter = self._definition.parameters.get(name)
        return self.params.get(name, parameter and parameter.default)

    def _check_data(self, call: str) -> None:
        """Raise ValueError for a tensor on the meta device."""
        for name, tensor in self._named_tensors():
            if tensor.is_meta:
                advice = how_to_move(tensor.device)
                raise ValueError(f"{call}: {name} must hold data, it is {describe(tensor)} on meta; {advice}.")

    def __reduce__(self) -> Any:
        parts = itertools.chain.from_iterable(map(_parts_of, self.params.values()))
        problem = why_not_pickled(tuple(x for x in parts if not isinstance(x, Modifier)))
        if problem:
            return refused_to_pickle(f"flexmasks: the {self._kind} {self!r} cannot be pickled: {problem}.")
        return loaded, (self._kind, self._definition, dict(self.params))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Modifier):
            return NotImplemented
        if self._kind != other._kind or self._definition.function is not other._definition.function:
            return False
        return self.params.keys() == other.params.keys() and all(
            same(v, other.params[n]) for n, v in self.params.items()
        )

    def __hash__(self) -> int:
        params = frozenset((n, hashable(v)) for n, v in self.params.items())
        return hash((self._kind, self._definition.function, params))

    def __repr__(self) -> str:
        given = ", ".join(f"{n}={describe(v)}" for n, v in self.params.items())
        return f"{self.name}({given})" if self._definition.registered or given else self.name


def _refuse(name: str, sign: str) -> None:
    """Let an operator of masks and scores that means nothing raise an error that says what to write."""

    def refused(self: Modifier, *others: Any) -> NoReturn:
        got = " and ".join(map(in_message, (self, *others)))
        raise TypeError(f"flexmasks: {self._how_to_combine}, not by `{sign}`; got {got}.")

    setattr(Modifier, f"__{name}__", refused)


_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "matmul": "@", "pow": "**",
    "lshift": "<<", "rshift": ">>", "xor": "^", "and": "&", "or": "|",
}  # fmt: skip
_OTHER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "pos": "+", "invert": "~"}
for _name, _sign in _OTHER.items() | _BINARY.items() | {f"r{name}": sign for name, sign in _BINARY.items()}.items():
    _refuse(_name, _sign)
_refuse("bool", "and`, `or`, `not`, `if")


def _filled(
    cls: type[Modifier],
    without_tensors: Definition | dict[str, Any],
    functions: list[Recipe],
    defaults: dict[str, Recipe],
    params: dict[str, Recipe],
    filling: Filling,
) -> Modifier:
    """Return a mask or score with a library's definition, or one that is made of these functions and defaults."""
    if isinstance(without_tensors, Definition):
        return cls(without_tensors, filling.dictionary(params))
    made = {**without_tensors, **dict(zip(FUNCTIONS, filling.sequence(functions), strict=True))}
    if defaults:
        made["parameters"] = _with_defaults(made["parameters"], filling.dictionary(defaults))
    return cls(Definition(**made), filling.dictionary(params))


def _with_defaults(parameters: Mapping[str, Parameter], defaults: Mapping[str, Any]) -> dict[str, Parameter]:
    return {n: replace(p, default=defaults[n]) if n in defaults else p for n, p in parameters.items()}


def _device_of(value: Modifier, q: Tensor) -> torch.device:
    try:
        return q.device
    except AttributeError:
        raise TypeError(
            f"flexmasks: {value!r} is called with index tensors, such as torch.tensor(3), got {describe(q)}; "
            "flexmasks.dense_mask gives a mask as booleans."
        ) from None


def _refuse_to_transformers(*_: Any) -> NoReturn:
    raise ValueError(
        "flexmasks: transformers' models take a Mask or a plan as `attention_mask` after "
        '`flexmasks.integrations.huggingface.register()`, by attn_implementation="flexmasks", "sdpa" or '
        '"flex_attention". By any other, as "eager", they take booleans: '
        "`attention_mask=flexmasks.dense_mask(mask, tokens, batch=batch)`."
    )


class _AnyLength:
    """A length of a Mask, which has none: transformers' own functions of masks compute with it, and fail in words."""

    __add__ = __radd__ = __rsub__ = __neg__ = _refuse_to_transformers


class AsAttentionMask:
    """What transformers asks of what a model gets as `attention_mask`, for Mask and Plan."""

    ndim, shape = 4, (_AnyLength(),) * 4  # of any numbers of batch elements, heads, queries and keys
    sum = __getitem__ = _refuse_to_transformers

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in ("cumsum", "ndim", "shape", "sum")]

    # Chunks start behind the padding on the left, which is where the running sum of a mask is 0: here nowhere.

    def cumsum(self, dim: int) -> Tensor:
        return torch.ones(1, 1)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.zeros_like:
            return torch.zeros(1, 1)
        if not inspect.isroutine(function):  # an operator of graphs, as of a checkpoint, which takes any arguments
            with compat.without_torch_function():
                return function(*args, **(kwargs or {}))
        name, kind = getattr(function, "__name__", str(function)), cls.__name__
        raise TypeError(f"flexmasks: torch's {name} takes tensors, got a {kind}; flexmasks.dense_mask makes one of it.")


class Mask(AsAttentionMask, Modifier):
    """The keys that each query sees, as a value.

    `get_mask` makes a Mask, and so do `&`, `|` and `~` of masks and functions.

    Called as `mask(b, h, q, kv)` a Mask is an ordinary FlexAttention mask_mod. Inside torch.compile such a call takes
    what the last call outside prepared, as `create_block_mask` makes it, if there was one. Masks are equal when they
    have the same function and equal given parameters. Lists and NumPy arrays are stored as tuples, and equal tuples of
    the same elements. A tensor equals a tensor of the same dtype, device, shape and content, but no list. A parameter
    that is given as its default does not equal a parameter that is left out.

    Example:
        >>> import flexmasks
        >>> from flexmasks.masks import causal, document
        >>> packed = causal() & document(document_ids=[0, 0, 1, 1])
        >>> packed
        causal() & document(document_ids=(0, 0, 1, 1))
    """

    _kind = "mask"
    _how_to_combine = "masks are combined by `&`, `|` and `~`"
    _count_blocks: ClassVar[Callable[..., Blocks]]  # set by flexmasks.plans

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self._standalone(_device_of(self, q))(b, h, q, kv)

    def __and__(self, other: str | Mask | Callable[..., Tensor] | Tensor) -> Mask:
        return _combine(AND, self, other)

    def __rand__(self, other: str | Mask | Callable[..., Tensor] | Tensor) -> Mask:
        return _combine(AND, other, self)

    def __or__(self, other: str | Mask | Callable[..., Tensor] | Tensor) -> Mask:
        return _combine(OR, self, other)

    def __ror__(self, other: str | Mask | Callable[..., Tensor] | Tensor) -> Mask:
        return _combine(OR, other, self)

    def __invert__(self) -> Mask:
        return Mask(NOT, {"mask": self})

    def _joined(self) -> Sequence[Mask]:
        """The masks that must all show a pair: those that `&` joins, or this one."""
        return self.params["masks"] if self._definition is AND else (self,)

    def inverse(self) -> Mask:
        """`~mask`, for functions inside torch.compile, which does not trace that operator (seen to 2.13)."""
        return self.__invert__()

    @says_what_to_write()
    def blocks(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: torch.device | str | None = None,
        block_size: int | tuple[int, int] = 128,
        q_offset: int | Tensor | Sequence[int] | Literal["first", "last"] | None = None,
        exact: bool = False,
    ) -> Blocks:
        """Return the counts of empty, partial and full blocks over these lengths, and the BlockMask.

        Up to 65,536 tokens the blocks are exact, and beyond where that takes seconds. If it takes longer, the search
        ends after some seconds. Blocks that it did not reach count as partial, which attention computes exactly all the
        same; `unknown` says how many they are, `partial` is an upper bound then, and `empty`, `full` and `sparsity`
        are lower bounds. With `exact` the search goes on to the end; where tqdm is installed it shows on stderr how
        long that takes, and Ctrl-C ends it.

        Other arguments and errors are those of `flexmasks.block_mask`.

        Example:
            >>> import flexmasks
            >>> print(flexmasks.masks.sliding_window(window=512).blocks(8192))
            blocks of 128 x 128: 4096, of which empty 3786, partial 124, full 186; skipped: 92.4%
            looked at element by element: 124
        """
        sizes = {"batch": batch, "heads": heads, "device": device, "block_size": block_size, "q_offset": q_offset}
        return Mask._count_blocks(self, q_len, kv_len, exact=exact, **sizes)

    @says_what_to_write()
    def dense(self, q_len: int, kv_len: int | None = None, **arguments: Any) -> Tensor:
        """Return the booleans of all pairs, True = visible, see `flexmasks.dense_mask`."""
        made: Tensor = self._calls.dense_mask(self, q_len, kv_len, **arguments)
        return made

    @says_what_to_write()
    def plan(self, q_len: int, kv_len: int | None = None, **arguments: Any) -> Any:
        """Return the plan for calls of these lengths, see `flexmasks.plan`."""
        return self._calls.plan(self, q_len, kv_len, **arguments)

    def __repr__(self) -> str:
        template = self._definition.template
        if not template:
            return super().__repr__()
        parts = [f"({m!r})" if _binds_looser(m, self) else repr(m) for m in self._operands()]
        return template + parts[0] if len(parts) == 1 else template.join(parts)


class Score(Modifier):
    """A change of the attention scores: a value made by `get_score`.

    Called as `score_mod(score, b, h, q, kv)` a Score is an ordinary FlexAttention score_mod. Call a score that prepares
    tensors (`packed`) before torch.compile traces it, and after each change of a tensor that it was made from: compiled
    code takes what the last call outside prepared. Calls of `attention` need neither.

    Example:
        >>> import flexmasks
        >>> flexmasks.get_score("softcap", cap=30.0)
        softcap(cap=30.0)
    """

    _kind = "score"
    _how_to_combine = "scores are combined as a list, score=[a, b], which applies them in turn"

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self._standalone(_device_of(self, q))(score, b, h, q, kv)


def loaded(kind: str, definition: Definition, params: dict[str, Any]) -> Modifier:
    """Return the mask or score that a pickle stored.

    torch.load(weights_only=True) calls this function with what a file says, so the arguments may be anything. Nothing
    is computed here, and the functions of the library get numbers, strings, tensors, masks and scores only.

    Raises TypeError for other arguments.
    """
    if not isinstance(definition, Definition) or definition.kind != kind or not isinstance(params, dict):
        raise TypeError(f"flexmasks: a pickle of a {kind} is damaged.")
    cls = Mask if kind == "mask" else Score
    return cls._of(definition, params)


def to_mask(value: Any) -> Mask:
    """Return a mask, a name, a function `(b, h, q, kv)` or a boolean tensor of pairs as a Mask."""
    if isinstance(value, Score):
        raise TypeError(f"flexmasks: a mask is needed, but {value!r} is a score.")
    if isinstance(value, str):
        return Mask._of(definition("mask", value), {})
    if (pairs := of_pairs("mask", value)) is not None:
        return Mask._of(*pairs)
    return value if isinstance(value, Mask) else Mask._of(define("mask", value), {})


def _combine(operator: Definition, *operands: Any) -> Mask:
    masks: list[Mask] = []
    for operand in operands:
        mask = to_mask(operand)
        masks += mask.params["masks"] if mask._definition is operator else [mask]
    return Mask(operator, {"masks": tuple(masks)})


def _binds_looser(inner: Modifier, outer: Mask) -> bool:
    order = [NOT, AND, OR]
    return bool(inner._definition.template) and order.index(inner._definition) > order.index(outer._definition)


def _close(kind: str, function: Callable[..., Tensor], arguments: dict[str, Any]) -> Callable[..., Tensor]:
    """Return a plain closure: torch traces closures well, but objects that hold numbers badly."""
    if kind == "mask":

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return function(b, h, q, kv, **arguments)

        return mask_mod

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return function(score, b, h, q, kv, **arguments)

    return score_mod


def _by_head(function: Callable[..., Tensor], over_heads: Mapping[str, Tensor]) -> Callable[..., Tensor]:
    def read(*args: Tensor, **arguments: Any) -> Tensor:
        h = args[-3]
        return function(*args, **arguments, **{n: t[h] for n, t in over_heads.items()})

    return read


def _in_precision(value: Any, dtype: torch.dtype) -> Any:
    # A score function adds tensors in half precision to the scores.
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(dtype) if is_half else value


def _moved(value: Any, given: Mapping[str, Any], device: torch.device) -> Any:
    # Tensors that `prepare` made move to the device, the user's stay on theirs.
    is_made = isinstance(value, Tensor) and not any(value is v for v in given.values())
    return value.to(device) if is_made else value


def _parts_of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _modifiers_in(value: Any) -> list[Modifier]:
    return [v for v in _parts_of(value) if isinstance(v, Modifier)]


def _on(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, tuple):
        return tuple(_on(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor | Modifier) else value
