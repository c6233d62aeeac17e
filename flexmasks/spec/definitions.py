"""Definitions of masks and scores, and the table of their names."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import operator
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.errors import refused_to_pickle, why_not_pickled
from flexmasks.spec.code import taken_in_graph
from flexmasks.spec.elsewhere import ADVICE, NAMES
from flexmasks.spec.parameters import (
    Parameter,
    Size,
    in_message,
    is_array,
    is_dense,
    parameters_in_graph,
    parameters_of,
    shortened,
)
from flexmasks.spec.structure import is_empty

# Fields of a definition that hold functions, which decide what the mask or score does.
FUNCTIONS = ("function", "prepare", "inner_size", "band", "cap", "factors", "compiled", "counts")
# Keyword arguments of `attention`. It hands on no parameters of these names.
KEYWORDS = (
    "mask", "score", "scale", "block_mask", "q_offset", "sink_logits", "dropout_p", "dropout_seed", "return_lse",
    "return_max", "backend", "kernel_options", "layout",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Definition:
    """A function of indices, with its name, parameters and hooks (see `register_mask`)."""

    kind: str  # "mask" or "score"
    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    registered: bool = False
    prepare: Callable[..., dict[str, Any]] | None = None
    example: Callable[[int], dict[str, Any]] | None = None
    inner_size: Callable[..., Size] | None = None
    band: Callable[..., Any] | None = None  # of a mask, see `register_mask`
    cap: Callable[..., Any] | None = None  # of a score, see `register_score`
    factors: Callable[..., Any] | None = None  # of a score, see `register_score`
    compiled: Callable[..., Any] | None = None  # a mask's function as kernels compute it, if it is not `function`
    counts: Callable[..., Any] | None = None  # of a mask, see `register_mask`
    relative: bool = False  # a score that depends on the head and on kv - q alone, and takes any distance
    drawn: bool = False  # its tensors are new in each call
    template: str = ""  # how an operator is printed, such as " & "
    # Whether this library, not a user, made the definition. Its functions capture nothing, so its name identifies them.
    by_library: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_library", self._is_by_library())

    def _is_by_library(self) -> bool:
        # A user may pass or register one of the library's functions, under another name, as their own.
        # The functions of operators, such as a mask's part, are private.
        function = getattr(self.function, "__name__", "")
        has_its_name = function in (self.name, f"{self.name}_{self.kind}") or function.startswith("_")
        if not (self.registered and has_its_name):
            return False
        functions = [f for f in self.functions if f is not None]
        plain = all(isinstance(f, types.FunctionType) and f.__closure__ is None for f in functions)
        # functools.wraps changes a function's `__module__`, but not its global variables.
        return plain and all(str(f.__globals__.get("__name__")).startswith("flexmasks.") for f in functions)

    @property
    def functions(self) -> tuple[Callable[..., Any] | None, ...]:
        return tuple([getattr(self, name) for name in FUNCTIONS])

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")

    def paragraph(self, title: str) -> str:
        """The docstring's paragraph `title: ...` on one line; an empty line or another title ends it."""
        match = re.search(rf"^{title}: (.*?)(?=\n\s*\n|\n[A-Z]\w*:|\Z)", self.doc, re.MULTILINE | re.DOTALL)
        return " ".join(match[1].split()) if match else ""

    def __deepcopy__(self, memo: Any) -> Definition:
        """Return the definition itself, or that of a copied object: a module's copy needs masks that read the copy."""
        function = self.function if self.registered else _deep_copy_of(self.function, memo)
        return self if function is self.function else replace(self, function=function)

    def __reduce__(self) -> Any:  # a registered definition is pickled by name, because its functions may be lambdas
        if self.registered:
            return from_pickle, (self.kind, self.name)
        problem = why_not_pickled(self.function)
        if problem:
            return refused_to_pickle(
                f"flexmasks: the {self.kind} {self.name!r} cannot be pickled, because pickles hold functions by name: "
                f"{problem}. Define it at the top level of a module, with tensors and numbers as parameters after `*`, "
                f"or register it with flexmasks.register_{self.kind}."
            )
        return loaded_function, (self.kind, self.function, self.name)


def _deep_copy_of(value: Any, memo: Any) -> Any:
    """Return copy.deepcopy of a value. A function has copies of what it captured, if there are any."""
    if isinstance(value, functools.partial):
        taken = copy.deepcopy((value.args, value.keywords), memo)
        return functools.partial(_deep_copy_of(value.func, memo), *taken[0], **taken[1])
    if not isinstance(value, types.FunctionType) or value.__closure__ is None:
        return copy.deepcopy(value, memo)
    if id(value) in memo:
        return memo[id(value)]
    cells = [types.CellType() for _ in value.__closure__]
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    made.__kwdefaults__, made.__annotations__, made.__doc__ = value.__kwdefaults__, value.__annotations__, value.__doc__
    made.__module__, made.__qualname__ = value.__module__, value.__qualname__
    made.__dict__.update(value.__dict__)
    memo[id(value)] = made  # before its variables are copied, which may hold it
    is_changed = False
    for own, cell in zip(cells, value.__closure__, strict=True):
        if not is_empty(cell):
            own.cell_contents = cell.cell_contents
            with contextlib.suppress(Exception):  # what cannot be copied is shared, as functions are by copy.deepcopy
                own.cell_contents = _deep_copy_of(cell.cell_contents, memo)
            is_changed |= own.cell_contents is not cell.cell_contents
    memo[id(value)] = made if is_changed else value
    return memo[id(value)]


def define(kind: str, function: Callable[..., Any], name: str | None = None, **hooks: Any) -> Definition:
    """Make a definition of a mask or score function by reading its signature.

    Raises TypeError if the function does not take `(b, h, q, kv)`, or `(score, b, h, q, kv)`, by position.
    """
    arguments = ("b", "h", "q", "kv") if kind == "mask" else ("score", "b", "h", "q", "kv")
    if not callable(function) or isinstance(function, type | bool) or constructed_by(kind, function):
        got = f"{in_message(function)}{hint_for(kind, function)}"
        raise TypeError(f"flexmasks: a {kind} is a name, a {kind.title()} or a function, got {got}.")
    if name is None:
        inner = function.func if isinstance(function, functools.partial) else function
        name = getattr(inner, "__name__", type(inner).__name__)
    if torch.compiler.is_dynamo_compiling() and (taken := taken_in_graph(function)) is not None:
        if taken.least > len(arguments) or (len(taken.positional) < len(arguments) and not taken.takes_any):
            raise _unfit(kind, name, arguments, f"({', '.join(taken.positional)})")
        return Definition(kind, name, function, parameters_in_graph(taken), **hooks)
    if torch.compiler.is_dynamo_compiling() and isinstance(function, functools.partial):
        return Definition(kind, name, function, {}, **hooks)
    try:
        signature = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"flexmasks: the signature of the {kind} function {name!r} cannot be read: {error}") from error
    positional = [p for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    takes_any_number = any(p.kind is p.VAR_POSITIONAL for p in signature)
    if len(required) > len(arguments) or (len(positional) < len(arguments) and not takes_any_number):
        raise _unfit(kind, name, arguments, str(inspect.signature(function)))
    return Definition(kind, name, function, parameters_of(hooks.get("prepare") or function), **hooks)


def _unfit(kind: str, name: str, arguments: tuple[str, ...], signature: str) -> TypeError:
    return TypeError(
        f"flexmasks: the {kind} function {name!r} must take ({', '.join(arguments)}) by position, "
        f"its signature is {signature}; parameters come after `*`."
    )


def check_names(definition: Definition, params: Mapping[str, Any]) -> None:
    """Raise TypeError if a parameter is unknown or missing."""
    kind, name, known = definition.kind, definition.name, definition.parameters
    if unknown := [n for n in params if n not in known]:
        takes = f"{kind} {name!r} takes {', '.join(f'`{n}`' for n in known) or 'none'}"
        advice = advice_on_name(unknown[0], params[unknown[0]], tuple(known), takes)
        raise TypeError(f"flexmasks: no parameter is named `{unknown[0]}`; {advice}")
    if missing := [p for n, p in known.items() if p.required and n not in params]:
        wants = ", ".join(f"`{p.name}`" + (f" ({p.spec})" if p.spec else "") for p in missing)
        written = f"flexmasks.get_{kind}({name!r}, {', '.join(f'{p.name}=...' for p in missing)})"
        is_kept = any(p.name in KEYWORDS for p in missing)
        hint = f": pass {written}, because attention has an argument of that name" if is_kept else ""
        raise TypeError(f"flexmasks: {kind} {name!r} needs {wants}{hint}.")


def advice_on_name(name: str, value: Any, names: tuple[str, ...], takes: str) -> str:
    """The end of a message on a keyword argument that neither mask nor score takes.

    names: the names of what mask and score take.
    takes: the same as text.
    """
    if meant := meant_by(name, names):
        return f"did you mean `{meant}`?"
    if name in _TENSORS_ELSEWHERE and isinstance(value, Tensor):
        return f"{advice_on_tensor(_TENSORS_ELSEWHERE[name], value)}."
    if name in ADVICE:
        return f"{ADVICE[name]}."
    if name in KEYWORDS:
        return f"flexmasks.attention has an argument of that name; {takes}."
    return f"{takes}{owners_of(name)}."


# Keyword arguments of other libraries for tensors, and what they are here.
_TENSORS_ELSEWHERE = {"attn_mask": "mask", "attn_bias": "score"}


@compat.constant_in_graphs  # torch cannot trace difflib
def meant_by(name: str, names: tuple[str, ...]) -> str:
    """Which of these names is meant by one of another library, or by a misspelt one; "" if none is."""
    found = [meant for meant in NAMES.get(name, ()) if meant.partition("=")[0] in names]
    if not found and name not in ADVICE and name not in KEYWORDS and not owners_of(name):
        found = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.75)
    return found[0] if found else ""


def of_pairs(kind: str, value: Any) -> tuple[Definition, Mapping[str, Any]] | None:
    """Return the definition and parameters of a tensor of pairs, as SDPA takes one: booleans, or what is added.

    value: [Q, KV], [H, Q, KV] or [B, H, Q, KV], with 1 for dimensions that are the same for all but KV. None is
        returned for anything else.
    """
    if not isinstance(value, Tensor) or not is_dense(value) or value.ndim < 2:
        return None
    if not (value.dtype == torch.bool if kind == "mask" else value.is_floating_point()):
        return None
    known = definition(kind, {"mask": "dense", "score": "dense_bias"}[kind])
    return known, {next(iter(known.parameters)): value[None] if value.ndim == 3 else value}


def hint_for(kind: str, value: Any) -> str:
    """The end of a sentence that says what to write instead of a value."""
    if isinstance(value, compat.BlockMask):
        return "; it is `block_mask=` of flexmasks.attention and torch's flex_attention; print(block_mask) draws it"
    if isinstance(value, Tensor) or is_array(value):
        return f"; {advice_on_tensor(kind, value)}"
    if isinstance(value, types.ModuleType):
        own = [f"{kind}={n!r}" for n, d in _NAMES[kind].items() if d.function.__module__ == value.__name__]
        return f", a module; write {' or '.join(own) or f'the name of a {kind}, or a function of the module'}"
    if made := constructed_by(kind, value):
        needed = ", ".join(f"{p.name}=..." for p in made.parameters.values() if p.required)
        argument = "" if made.kind == kind else f"{made.kind}="
        return f", which makes a {made.kind}; write {argument}{made.name}({needed})"
    return str(getattr(type(value), "hint", ""))  # of a plan


def constructed_by(kind: str, value: Any) -> Definition | None:
    """Return the definition whose constructor a value is, one of this kind if there are two, None for other values."""
    if not isinstance(value, types.FunctionType):
        return None
    for of_kind in (kind, "score" if kind == "mask" else "mask"):  # by names: torch 2.11 traces no hash of a function
        constructor, made = CONSTRUCTORS[of_kind].get(value.__name__, (None, None))
        if constructor is value:
            return made
    return None


def advice_on_tensor(kind: str, value: Any) -> str:
    """What to write for a tensor `m`, or NumPy array, in place of itself."""
    dtype, m = str(value.dtype), "torch.as_tensor(m)" if is_array(value) else "m"
    if "bool" in dtype:
        return f"a dense mask `m` is mask={_as_pairs(m, value)}{_as_padding(m, value)}"
    if kind == "score":
        bias = _as_pairs(m if "float" in dtype else f"{m}.float()", value)
        return f"a bias `m`, {_PAIRS}, is score={bias}"
    shown = f"mask={_as_pairs(f'{m}.bool()', value)}{_as_padding(f'{m}.bool()', value)}"
    if "float" not in dtype:
        return f"a dense mask `m`, where 0 is hidden, is {shown}"
    return f"what is added to scores is score={_as_pairs(m, value)}; where 1 is visible, it is {shown}"


_PAIRS = "[queries, keys] or [batch or 1, heads or 1, queries, keys]"


def _as_pairs(m: str, value: Any) -> str:
    if value.ndim == 1:
        return f"{m}.expand(q.shape[2], -1)"
    if value.ndim == 3:
        return f"{m} if it is [heads, queries, keys], {m}[:, None] if [batch, queries, keys]"
    if value.ndim == 4 and value.shape[2] == 1:
        return f"{m}.expand(-1, -1, q.shape[2], -1)"
    return m if value.ndim in (2, 4) else f"{m} as {_PAIRS}"


def _as_padding(m: str, value: Any) -> str:
    is_padding = value.ndim == 2 or (value.ndim == 4 and tuple(value.shape[1:3]) == (1, 1))
    of_keys = m if value.ndim == 2 else f"{m}[:, 0, 0].expand(len(q), -1)"
    return f", or mask='key_padding', attention_mask={of_keys} if it is [batch, keys]" if is_padding else ""


# --- the table of names ---

_NAMES: dict[str, dict[str, Definition]] = {"mask": {}, "score": {}}
# The functions of `flexmasks.masks` and `flexmasks.scores`, see `spec/arguments.py`.
CONSTRUCTORS: dict[str, dict[str, tuple[Callable[..., Any], Definition]]] = {"mask": {}, "score": {}}


def names(kind: str) -> dict[str, Definition]:
    return _NAMES[kind]


def definition(kind: str, name: str) -> Definition:
    """Return the definition registered under a name, or raise ValueError with the nearest names."""
    known = _NAMES[kind]
    if name in known:
        return known[name]
    other = "score" if kind == "mask" else "mask"
    if name in _NAMES[other]:
        raise ValueError(f"flexmasks: {name!r} is a {other}, pass it as `{other}=`, not as `{kind}=`.")
    raise ValueError(f"flexmasks: no {kind} is named {name!r}; {_hint(kind, name)}")


@compat.constant_in_graphs  # torch cannot trace difflib and patterns
def _hint(kind: str, name: str) -> str:
    known, other = _NAMES[kind], "score" if kind == "mask" else "mask"
    if combined := _combined(kind, name):
        return combined
    written = _written(name)
    whole = rf"(?<!\w){written}(?!\w)"
    part = written if len(name) >= _LONG else rf"(?<![^\W_]){written}(?![^\W_])"
    plain = _written(re.sub(_GENERIC, "", name, flags=re.IGNORECASE))
    parameters = {n: known[n].parameters.values() for n in known}
    fewest_parameters_first = sorted(known, key=lambda n: (sum(p.required for p in parameters[n]), len(parameters[n])))
    hints = (
        [repr(n) for n in known if re.fullmatch(written, n)],
        [repr(n) for n in fewest_parameters_first if re.match(written, n)][:_MOST_ENTRIES],
        _spelled(name.lower(), known, 0.9),
        {n: repr(n) for n in known if re.fullmatch(plain, n)} | _by_peers(kind, whole),
        _spelled(name.lower(), known, 0.8),
        {n: f"the {other} {hint}" for n, hint in _by_peers(other, whole).items()},
        {n: hint for peer in _peer_near(kind, name) for n, hint in _by_peers(kind, rf"\b{peer}\b").items()},
        _by_peers(kind, part, ("", "Peers", "Source")),
        _spelled(name, known, 0.5),
    )
    found = next(filter(None, hints), ())
    hint = " or ".join(found.values() if isinstance(found, dict) else found)
    return f"did you mean {hint}?" if hint else f"flexmasks.list_{kind}s() names the {len(known)} that exist."


@functools.cache
def _names_in_text(names: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![^\W_])({'|'.join(longest_first)})(?![^\W_])(\([^()]*\))?")


def _combined(kind: str, name: str) -> str:
    """What to write for a text of several names, or of a name with its arguments or with `~`; "" for other texts."""
    pattern = _names_in_text(tuple(_NAMES[kind]))
    parts, rest = pattern.findall(name), pattern.sub("", name)
    if name.isidentifier() or not parts or not re.fullmatch(r"([\W_]|and|or|not)*", rest):
        return ""
    made = []
    for part, _ in parts:
        needs = [f"{p.name}=..." for p in _NAMES[kind][part].parameters.values() if p.required]
        made.append(f"flexmasks.get_{kind}({', '.join([repr(part), *needs])})")
    if kind == "score":
        return f"pass score=[{', '.join(made)}]." if len(made) > 1 else f"pass score={made[0]}."
    sign = " | " if re.search(r"\||\bor\b", rest) else " & "
    text = sign.join(made)
    if len(made) == 1 and re.search("[~!-]|not", rest):
        text = f"~{text}"
    return f"masks are combined as values: mask={text}." if text != made[0] else f"pass mask={text}."


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_GENERIC = r"(?<=.)(?:[\W_]|(?<=[a-z]))(attention|mask|bias|mod|score)s?(?![a-z])"  # words that say no more
_LONG = 5  # letters of a name that may stand inside a word of a docstring
_MOST_ENTRIES = 3  # that a name finds; one that finds more says little
_LONGEST_PEER, _PEER_BEFORE = 130, 40  # characters that are shown of it, and before the name


def _written(name: str) -> str:
    # A pattern for a name in any style: `sliding_window`, `SlidingWindow`, `sliding-window`.
    words = _WORD.findall(name)
    return "(?i:" + r"[\W_]*".join(words) + ")" if words else "(?!)"


def _spelled(name: str, names: Iterable[str], cutoff: float) -> list[str]:
    return [repr(n) for n in difflib.get_close_matches(name, names, n=3, cutoff=cutoff)]


def _peer_near(kind: str, name: str) -> list[str]:
    # The name in other libraries that is nearest to a misspelt one.
    peers = {w for d in _NAMES[kind].values() for w in re.findall(r"\w{8,}", d.paragraph("Peers"))}
    return difflib.get_close_matches(name, peers, n=1, cutoff=0.85)


def _by_peers(kind: str, pattern: str, titles: tuple[str, ...] = ("Peers",)) -> dict[str, str]:
    """Return the masks or scores that have a name in other libraries, with these names.

    titles: the paragraphs of their docstrings in which the pattern may be, "" for their own names.
    """
    found: dict[str, str] = {}
    for name, d in _NAMES[kind].items():
        clauses = [(t, c) for t in titles for c in (d.paragraph(t) if t else name).rstrip(".").split("; ")]
        for title, clause in clauses:
            if match := re.search(pattern, clause):
                first = max(0, match.start() - _PEER_BEFORE) if len(clause) > _LONGEST_PEER else 0
                first = clause.rfind(" ", 0, first) + 1  # words stay whole
                peer = f"{'...' if first else ''}{shortened(clause[first:], _LONGEST_PEER)}"
                found[name] = f"{name!r} ({peer})" if title == "Peers" else repr(name)
                break
    return found if len(found) <= _MOST_ENTRIES else {}


def known_elsewhere(name: str) -> str:
    """Return what to import for a name in another library, as the rest of a sentence, or ""."""
    if not re.search("[a-z](_|[A-Z])", name):  # plain words stand in the texts, too
        return ""
    found = [(kind, n) for kind in _NAMES for n in _by_peers(kind, rf"(?<!\w){name}(?!\w)")]
    return "".join(f"; write `from flexmasks.{kind}s import {n}`" for kind, n in found[:1])


def nearest(kind: str, name: str) -> str:
    """Return what to write in place of a name that `flexmasks.masks` or `.scores` lacks, as the rest of a sentence."""
    for k, known in _NAMES.items():
        if name in known:
            is_ours = known[name].by_library
            return (
                f"; write `from flexmasks.{k}s import {name}`" if is_ours else f"; write `flexmasks.get_{k}({name!r})`"
            )
    hint = _hint(kind, name)
    meant = re.match(r"did you mean (?:the (\w+) )?'(\w+)'", hint)
    return f"; {hint}" + (f" Write `from flexmasks.{meant[1] or kind}s import {meant[2]}`" if meant else "")


@compat.constant_in_graphs
def owners_of(parameter: str) -> str:
    """The end of a sentence that names the masks and scores with a parameter, or ""."""
    parts = []
    for kind, known in _NAMES.items():
        having = [(name, d.parameters) for name, d in known.items() if parameter in d.parameters]
        owners = sorted((sum(p.required for p in own.values()), len(own), name) for name, own in having)
        if owners:
            names = [name for *_, name in owners]
            more, as_in = "s" * (len(names) > 1), f"{kind}=flexmasks.get_{kind}({names[0]!r}, {parameter}=...)"
            parts.append(f"of the {kind}{more} {', '.join(map(repr, names))}, as in {as_in}")
    return f"; `{parameter}` is a parameter {', and '.join(parts)}" if parts else ""


def is_by_library(kind: str, name: str) -> bool:
    """Whether a name is one of the library's own, whose functions never change."""
    known = _NAMES[kind].get(name)
    return known is not None and known.by_library


def loaded_function(kind: str, function: Callable[..., Any], name: str) -> Definition:
    """Return the definition of a function that a pickle stored. Raises TypeError for other arguments."""
    _check_stored(kind, name, is_right=callable(function))
    return define(kind, function, name)


def from_pickle(kind: str, name: str) -> Definition:
    """Return the definition that a pickle stored by name. Raises TypeError or ValueError if there is none."""
    _check_stored(kind, name)
    return OPERATORS.get((kind, name)) or definition(kind, name)


def _check_stored(kind: Any, name: Any, is_right: bool = True) -> None:
    if not (is_right and isinstance(kind, str) and kind in _NAMES and isinstance(name, str)):
        raise TypeError("flexmasks: a pickle of a mask or score is damaged.")


# --- operators: definitions whose parameters are masks or scores ---


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
CHAIN = define("score", _chain, "chain", registered=True, relative=True)
OPERATORS = {(d.kind, d.name): d for d in (AND, OR, NOT, CHAIN)}


def add_operator(definition: Definition) -> Definition:
    """Add an operator, which is found by its name but not listed, and return it."""
    OPERATORS[definition.kind, definition.name] = definition
    return definition
