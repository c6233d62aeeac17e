"""A mask or score function as a user hands it over, also as text. What a text leaves open is made up."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from flexmasks import Mask, Score, get_mask, get_score
from flexmasks.extend import flatten, in_message

_CALL = "flexmasks.alike"
_SHORTEST, _LONGEST = 128, 1 << 19
_MOST_OF_PAIRS = 1 << 18  # elements of a made-up tensor of pairs
_FEW = 64  # elements of a tensor that may be lengths of batch elements
_BATCH, _HEADS, _WIDTH, _SMALL = 2, 8, 8, 5
_NUMBERS = (27, 11, 18, 7, 43, 61)  # numbers whose halves, doubles and neighbors differ
_SIZES = (  # of names, in this order
    ("kernel|dilation|sink", lambda length: _SMALL),
    ("head", lambda length: _HEADS),
    ("^[wW]$|width|_w$", lambda length: _WIDTH),
    ("^H$|height|_h$", lambda length: length // _WIDTH),
    ("len|total|seq|^[nNSLT]$", lambda length: length),
)
_ROLES = ("b", "h", "q", "kv")
_FUNCTION = """
def _mask(b, h, q, kv):
    batch_idx, head_idx, q_idx, kv_idx, k, k_idx = b, h, q, kv, kv, kv
"""
_OPERATOR = r"(?:[<>=!]=|[<>%*/+-]|//)"
_KNOWN = {
    **vars(builtins), "__name__": "pasted",
    "torch": torch, "math": math, "np": np, "numpy": np, "F": torch.nn.functional, "nn": torch.nn,
    "Tensor": Tensor, "partial": functools.partial, "functools": functools,
    **{name: getattr(flex_attention, name) for name in ("and_masks", "or_masks", "noop_mask")},
}  # fmt: skip


class Pasted(NamedTuple):
    """A mask or score, and what is known of it.

    at: its values at vectors of indices, of scores of 0, where a user's function runs as torch runs it.
    length: the number of queries and keys at which its numbers matter, and that made-up tensors have.
    numbers, tensors: those in it, with how to write them.
    made_up: values that the text leaves open, by name.
    """

    value: Mask | Score
    at: Callable[..., Tensor]
    length: int
    numbers: Mapping[int | float, str]
    tensors: Mapping[str, Tensor]
    made_up: Mapping[str, Any]


def read(given: Any, names: Mapping[str, Any]) -> Pasted:
    """Return the mask or score of a function of indices, of a dense mask, of a function that makes one of these, or of
    the text of any of these or of an expression of q and kv. A text runs in this process.

    names: values of names that the text leaves open, and of further arguments; lists are tensors.

    Raises ValueError or TypeError if there is no such function, if it fails, or needs what cannot be made up.
    """
    if not isinstance(given, str | Tensor) and not callable(given):
        raise TypeError(f"{_CALL}: pass a function, its text, or a dense mask, got {in_message(given)}.")
    tree, space = _tree(given), dict(_KNOWN)
    values = _Values(tree, names)
    while True:  # until all names that the text leaves open have a value
        try:
            while isinstance(given, str) and tree.body:  # each statement once
                exec(compile(ast.Module(tree.body[:1], []), "<pasted>", "exec", annotations.compiler_flag), space)
                del tree.body[0]
            made = given if isinstance(given, Tensor) else values.closed(space.get("_pasted", given))
            value, at = _as_value(made)
            shown = at(*torch.zeros(4, 1, dtype=torch.int64))
            break
        except Exception as error:  # a user's function may raise anything
            if isinstance(error, NameError) and isinstance(given, str) and error.name and error.name not in space:
                space[error.name] = values[error.name]
                continue
            if str(error).startswith("flexmasks"):
                raise
            names_made = ", ".join(values.made_up)
            hint = (
                f"; {names_made} had to be made up: pass values, as in {names_made.partition(',')[0]}=..."
                if names_made
                else ""
            )
            raise ValueError(f"flexmasks: the function fails ({type(error).__name__}: {error}){hint}.") from error
    if unused := names.keys() - values.known.keys():
        raise ValueError(f"flexmasks: the function leaves no `{unused.pop()}` open.")
    if isinstance(value, Mask) and shown.dtype != torch.bool:
        got = str(shown.dtype).removeprefix("torch.")
        raise TypeError(f"{_CALL}: a mask function returns booleans, this one {got}.")
    tensors = {name: v for name, v in values.made_up.items() if isinstance(v, Tensor)}
    numbers = {v: name for name, v in reversed(values.made_up.items()) if type(v) in (int, float)}
    leaves = flatten(value)[1]
    if not isinstance(made, Tensor):  # which would be found as itself
        tensors |= {p.name: t for p, t in zip(leaves.places, leaves.tensors, strict=True) if p is not None}
    constants = getattr(getattr(given, "__code__", None), "co_consts", ())  # where there is no source
    others = [*(n for n in constants if type(n) in (int, float)), *(number.value for number in leaves.numbers)]
    literals = values.literals.union(others).difference(numbers)
    ends = [int(t.max()) for t in tensors.values() if t.ndim == 1 and t.dtype == torch.int64 and 0 < len(t) <= _FEW]
    length = max(values.length, _length_for(literals), *ends)
    numbers |= {n: repr(n) for n in sorted(literals, reverse=True)}
    return Pasted(value, at, length, numbers, tensors, values.made_up)


def _length_for(numbers: Iterable[Any]) -> int:
    """Return a number of queries and keys at which the meaning of such numbers shows."""
    whole = sorted({n for n in numbers if type(n) is int and 1 < n <= _LONGEST // 3})
    canvas = 2 * math.prod(whole[-2:])
    return max([_SHORTEST, *(3 * n for n in whole[-1:]), *([canvas] if canvas <= 2048 else [])])


def _as_value(function: Any) -> tuple[Mask | Score, Callable[..., Tensor]]:
    """Return a mask or score of a function, and its values at vectors of indices."""
    is_plain = not isinstance(function, Tensor | Mask | Score)
    if is_plain and not callable(function):
        raise ValueError(f"flexmasks: {function!r:.80} is no function of (b, h, q, kv) and no dense mask.")
    if isinstance(function, Score) or (is_plain and _positions(function) == 5):
        score = get_score(function)
        call = torch.vmap(score) if is_plain else score
        return score, lambda *indices: call(torch.zeros(len(indices[0])), *indices)
    mask = get_mask(function)
    return mask, torch.vmap(mask) if is_plain else mask


def _positions(function: Any) -> int:
    """Return 4 for a mask function, 5 for a score function, and 0 for all else, as a function that makes one."""
    parameters = inspect.signature(function).parameters.values()
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    makes = any(isinstance(one, types.CodeType) and one.co_argcount in (4, 5) for one in constants)
    return len(taken) if len(taken) in (4, 5) and not makes else 0


# --- the text ---


def _tree(given: Any) -> ast.Module:
    """Return a text, or the source of a function, as statements; none where there is no source."""
    try:
        text = given if isinstance(given, str) else inspect.getsource(given)
        text = re.sub(r"\b(self|cls|config|cfg|args)\.(?=\w)", "", re.sub(r"\((self|cls)(, *|(?=\)))", "(", text))
        tree = ast.parse(textwrap.dedent(text.strip("\n")))
        return _with_target(tree) if isinstance(given, str) else tree
    except SyntaxError as error:
        if isinstance(given, str):
            raise ValueError(f"flexmasks: the text is no Python; line {error.lineno}: {error.msg}.") from None
    except (OSError, TypeError):  # a built-in or callable object
        pass
    return ast.parse("")


def _indices(node: ast.AST) -> list[str]:
    """Return the names of the indices, and of the score, that a function takes; none for all else."""
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return []
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    required = arguments[: len(arguments) - len(node.args.defaults)]
    return required if len(required) in (4, 5) else []


def _functions(statement: ast.AST) -> list[Any]:
    """Return the functions of indices in a statement, and the calls that combine some, the outermost first."""
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Call) or _indices(node)]
    return [n for n in nodes if not isinstance(n, ast.Call) or re.search(r"\b(and|or)_masks$", ast.unparse(n.func))]


def _with_target(tree: ast.Module) -> ast.Module:
    """Return statements that set `_pasted` to the last function of indices, or else to the last function or value. What
    comes after it, and what is done with it, does not run.
    """
    body: list[Any] = []
    for statement in tree.body:
        body += statement.body if isinstance(statement, ast.ClassDef) else [statement]
    definitions = [s for s in body if isinstance(s, ast.FunctionDef)]
    for definition in definitions:
        definition.decorator_list = []
    text = ast.unparse(tree)
    has_function = definitions or re.search(r"\blambda\b|\b(and|or)_masks\b", text)
    if not has_function and all(re.search(rf"\b{name}(_idx)?\b", text) for name in ("q", "kv?")):
        function: Any = ast.parse(_FUNCTION).body[0]  # of an expression, or of what stands inside of a function
        function.body += [*body[:-1], ast.Return(getattr(body[-1], "value", None))]
        body = definitions = [function]
    found = [s for s in body if isinstance(s, ast.FunctionDef) or getattr(s, "value", None)]
    if not found:
        raise ValueError(
            "flexmasks: the text has no function of (b, h, q, kv): pass a lambda, a definition, or an expression of q "
            "and kv, such as q >= kv."
        )
    last = ([s for s in found if _functions(s)] or found)[-1]
    target = ast.Name(last.name, ast.Load()) if last in definitions else [*_functions(last), last.value][0]
    place = body.index(last)
    kept = body[:place] + [s for s in body[place:] if s in definitions]
    tree.body = [*kept, ast.Assign([ast.Name("_pasted", ast.Store())], target)]
    return ast.fix_missing_locations(tree)


# --- what it leaves open ---


class _Values:
    """Values of the names in a text: given ones, or made-up ones that fit their use."""

    def __init__(self, tree: ast.AST, given: Mapping[str, Any]) -> None:
        self._given = {n: torch.tensor(v) if isinstance(v, list | tuple) else v for n, v in given.items()}
        self._text, nodes = ast.unparse(tree), list(ast.walk(tree))
        constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
        self.literals = {n for n in (*constants, *given.values()) if type(n) in (int, float)}
        self.length = _length_for(self.literals)
        self.known: dict[str, Any] = {}
        self._numbers = iter(_NUMBERS)
        self._generator = torch.Generator().manual_seed(0)
        functions = [names for node in nodes if (names := _indices(node))]
        self._of_score = any(len(names) == 5 for names in functions)
        self._roles = {n: role for names in functions for n, role in zip(names[-4:], _ROLES, strict=True)}

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name. Raises ValueError for a function, which cannot be made up."""
        if name not in self.known:
            self.known[name] = self._given[name] if name in self._given else self._made(name)
        return self.known[name]

    @property
    def made_up(self) -> dict[str, Any]:
        return {name: value for name, value in self.known.items() if name not in self._given}

    def closed(self, function: Any) -> Any:
        """Return a function of indices with its further arguments, or what a function that makes one returns."""
        if callable(function) and not isinstance(function, Tensor | Mask | Score):
            positions = _positions(function)
            further = list(inspect.signature(function).parameters.values())[positions:]
            further = [p for p in further if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            wanted = [p.name for p in further if p.name in self._given or p.default is p.empty or p.default is None]
            arguments = {name: self[name] for name in wanted}
            function = functools.partial(function, **arguments) if arguments else function
            function = function if positions else function()
        if not isinstance(function, Tensor) or function.ndim < 2:
            return function
        visible = function if function.dtype == torch.bool else function == function.max()
        return visible.reshape(*[1] * (4 - visible.ndim), *visible.shape)

    def _made(self, name: str) -> Any:
        if re.search("offsets|cu_seq", name):
            return torch.tensor([0, *(self.length * n // 8 for n in (1, 3, 4)), self.length])
        if uses := list(re.finditer(rf"\b{name}((?:\[[^]]*\])+)", self._text)):
            return self._tensor(uses)
        if re.search("causal|^(inner_?)?(mask_?)?(mod|fn|function)$|^mask$|^inner$", name):
            return lambda b, h, q, kv: q >= kv
        if re.search(rf"\b{name}\(", self._text):
            raise ValueError(f"flexmasks: the text calls `{name}` without its definition; paste that too.")
        size = next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
        return next(self._numbers, _SMALL) if size is None else size(self.length)

    def _tensor(self, uses: Sequence[re.Match[str]]) -> Tensor:
        """Make a tensor: of biases, lengths of batch elements, flags, or numbers of documents."""
        dims: list[str] = []
        is_flag = True
        for use in uses:
            dims = max(dims, [self._dimension(index) for index in re.split(r"\]\[|, ", use[1])], key=len)
            before, after = self._text[: use.start()], self._text[use.end() :]
            is_flag &= not (re.search(rf"{_OPERATOR} \(?$", before) or re.match(rf"[\])]? {_OPERATOR}", after))
        length = min(self.length, int(float(_MOST_OF_PAIRS) ** (1 / max(1, dims.count("s")))))
        sizes = {"b": _BATCH, "h": _HEADS, "s": length}
        random = torch.rand([sizes.get(d) or int(d) for d in dims], generator=self._generator)
        if self._of_score:
            return random
        if "s" not in dims:
            return (length * (1 + random) / 2).long()
        if is_flag:
            return random < (0.15 if dims.count("s") == 1 else 0.5)
        places = torch.arange(length) / length + random[..., :1] / 16
        ids: Tensor = torch.tensor([4, -1, 7, 2])[torch.bucketize(places, torch.tensor([7, 8, 10]) / 16)]
        return ids

    def _dimension(self, index: str) -> str:
        roles = {self._roles[name] for name in re.findall(r"\w+", index) if name in self._roles}
        if roles == {"q", "kv"}:  # a distance, from the middle
            return str(2 * max(map(int, re.findall(r"\b\d+", index)), default=self.length - 1) + 1)
        return roles.pop() if roles in ({"b"}, {"h"}) else "s"
