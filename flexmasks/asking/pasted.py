"""Source text of a mask or score function, as a function. Numbers and tensors that the text leaves open are made up."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

_SHORTEST, LONGEST = 128, 16384
_BATCH, _HEADS, _WIDTH, _KERNEL = 2, 8, 8, 5
_NUMBERS = (7, 11, 18, 27, 43, 61)  # numbers whose halves, doubles and neighbors differ
_ROLES = ("b", "h", "q", "kv")
_NAMES_OF_ROLES = ("b|batch|batch_idx", "h|head|head_idx", "q|i|row|q_(idx|index|pos)", "kv?|j|col|kv?_(idx|index|pos)")
_SIZES = (  # of names, in this order
    ("kernel", lambda length: _KERNEL),
    ("head", lambda length: _HEADS),
    ("^[wW]$|width|_w$", lambda length: _WIDTH),
    ("^H$|height|_h$", lambda length: length // _WIDTH),
    ("len|total|seq|^[nNSLT]$", lambda length: length),
)
_KNOWN = {
    **vars(builtins), "torch": torch, "math": math, "np": np, "numpy": np, "F": torch.nn.functional, "nn": torch.nn,
    "Tensor": Tensor, "partial": functools.partial, "functools": functools,
    **{name: getattr(flex_attention, name) for name in ("and_masks", "or_masks", "noop_mask")},
}  # fmt: skip
_Function = ast.FunctionDef | ast.Lambda


class Pasted(NamedTuple):
    """A function of indices or dense mask [B, H, Q, KV], and what is known of it.

    length: the number of queries and keys for which its tensors were made, or at which its numbers matter.
    numbers: those in the text.
    made_up: values that the text leaves open, by name.
    """

    function: Any
    length: int
    numbers: tuple[Any, ...] = ()
    made_up: Mapping[str, Any] = {}


def of_text(text: str, given: Mapping[str, Any], part: int = 1) -> Pasted:
    """Return the function in a text: a lambda, a definition, one that makes such a function or a dense mask, or an
    expression of q and kv. The text runs in this process.

    given: values of names that the text leaves open; lists are tensors.
    part: a name such as `n` or `seq_len` stands for one of so many parts of the length.

    Raises ValueError if the text has no such function, fails, or needs what cannot be made up.
    """
    try:
        tree = _Plain().visit(ast.parse(textwrap.dedent(text.strip("\n"))))
    except SyntaxError as error:
        raise ValueError(f"flexmasks: the text is no Python; line {error.lineno}: {error.msg}.") from None
    tree.body, target = _with_target(tree.body)
    values = _Values(tree, given, part)
    space = {**_KNOWN, **{name: values[name] for name in _free(tree)}}
    code = compile(ast.fix_missing_locations(tree), "<pasted>", "exec", annotations.compiler_flag)
    with saying(values.made_up):
        exec(code, space)
    return _of_indices(space["_pasted"], target, values)


def of_function(function: Callable[..., Any], given: Mapping[str, Any], part: int = 1) -> Pasted:
    """Return a function of indices, or what a function that makes one returns; see `of_text`."""
    try:
        tree = _Plain().visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError):  # a built-in or callable object, or part of a longer expression
        tree = ast.parse("")
    target = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    return _of_indices(function, target, _Values(tree, given, part))


def length_for(numbers: Iterable[Any]) -> int:
    """Return a number of queries and keys at which the meaning of such numbers shows."""
    whole = sorted({n for n in numbers if type(n) is int and 1 < n <= LONGEST // 3})
    canvas = 2 * math.prod(whole[-2:])
    return max([_SHORTEST, *(3 * n for n in whole[-1:]), *([canvas] if canvas <= 2048 else [])])


def _of_indices(function: Any, target: ast.AST | None, values: _Values) -> Pasted:
    """Call what makes a function of indices, or give that its further arguments."""
    if isinstance(target, _Function):
        takes = _arguments(target)
        if not _positions(target):
            with saying(values.made_up):
                function = function(**{name: values[name] for name in takes})
        elif further := takes[_positions(target) :]:
            function = functools.partial(function, **{name: values[name] for name in further})
    values.check_all_are_used()
    if isinstance(function, Tensor) and function.ndim > 1 and function.shape[-1] > 1:
        visible = function if function.dtype == torch.bool else function == function.max()
        function = visible.reshape(*[1] * (4 - visible.ndim), *visible.shape)
        return Pasted(function, function.shape[-1], values.numbers, values.made_up)
    if not callable(function):
        raise ValueError(f"flexmasks: the text makes no function of (b, h, q, kv) and no mask, but {function!r:.80}.")
    return Pasted(function, values.length, values.numbers, values.made_up)


@contextlib.contextmanager
def saying(made_up: Mapping[str, Any]) -> Iterator[None]:
    """Errors of a user's code say what was made up for it."""
    try:
        yield
    except Exception as error:  # it may raise anything
        names = list(made_up)
        hint = f"; {', '.join(names)} had to be made up: pass values, as in {names[0]}=..." if names else ""
        raise ValueError(f"flexmasks: the function fails ({type(error).__name__}: {error}){hint}.") from error


class _Plain(ast.NodeTransformer):
    """Drops classes around methods, decorators and bare annotations, and makes names of `self.config.window`."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        if node.args.args and node.args.args[0].arg in ("self", "cls"):
            del node.args.args[0]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> list[Any]:
        return [self.visit(method) for method in node.body if isinstance(method, ast.FunctionDef)]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return None if node.value is None else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        parts = ast.unparse(node).split(".")
        if parts[0] in ("self", "cls", "config", "cfg", "args") and all(map(str.isidentifier, parts)):
            return ast.copy_location(ast.Name("_".join(parts[parts[0] in ("self", "cls") :]), ast.Load()), node)
        return self.generic_visit(node)


def _arguments(node: _Function) -> list[str]:
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _positions(node: ast.AST) -> int:
    """Return 4 for a mask function, 5 for a score function, and 0 for all else."""
    if not isinstance(node, _Function) or any(map(_positions, itertools.islice(ast.walk(node), 1, None))):
        return 0
    required = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
    return required if required in (4, 5) else 0


def _with_target(body: list[ast.stmt]) -> tuple[list[ast.stmt], ast.AST]:
    """Return the statements that make the last function of indices, as `_pasted`, and the node that it comes from."""
    found: list[tuple[bool, int, ast.AST]] = []
    for place, statement in enumerate(body):
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.FunctionDef):
            found.append((any(map(_positions, ast.walk(statement))), place, statement))
        elif value is not None:
            names = sorted({node.id for node in ast.walk(value) if isinstance(node, ast.Name)})
            roles = [next((n for n in names if re.fullmatch(role, n)), None) for role in _NAMES_OF_ROLES]
            if isinstance(value, ast.Call) and re.search(r"\b(and|or)_masks$", ast.unparse(value.func)):
                found.append((True, place, value))
            elif inside := [node for node in ast.walk(value) if _positions(node)]:
                found.append((True, place, inside[-1]))
            elif roles[2] and roles[3] and isinstance(statement, ast.Expr | ast.Return):
                taken = ", ".join(name or f"_{n}" for n, name in enumerate(roles))
                found.append((True, place, ast.parse(f"lambda {taken}: {ast.unparse(value)}", mode="eval").body))
            elif isinstance(value, ast.Call):
                found.append((False, place, value))
    if not found:
        raise ValueError(
            "flexmasks: the text has no function of (b, h, q, kv): pass a lambda, a definition, or an expression of q "
            "and kv, such as q >= kv."
        )
    _, place, target = max(found, key=lambda one: one[:2])
    value = ast.Name(target.name, ast.Load()) if isinstance(target, ast.FunctionDef) else target
    kept = [s for n, s in enumerate(body) if n < place or isinstance(s, ast.FunctionDef | ast.Import | ast.ImportFrom)]
    return [*kept, ast.Assign([ast.Name("_pasted", ast.Store())], value)], target  # type: ignore[arg-type]


def _free(tree: ast.AST) -> list[str]:
    """Return the names that a text reads and does not define; annotations are not read."""
    nodes = list(ast.walk(tree))
    roots = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    unread = {part for root in roots if isinstance(root, ast.AST) for part in ast.walk(root)}
    names = [node for node in nodes if isinstance(node, ast.Name) and node not in unread]
    defined = {a for node in nodes if isinstance(node, _Function) for a in _arguments(node)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {(a.asname or a.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias) for a in [node]}
    defined |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return list(dict.fromkeys(name.id for name in names if name.id not in defined and name.id not in _KNOWN))


class _Values:
    """Values of the names in a text: given ones, defaults of arguments, or made-up ones that fit their use."""

    def __init__(self, tree: ast.AST, given: Mapping[str, Any], part: int) -> None:
        self._given = {n: torch.tensor(v) if isinstance(v, list | tuple) else v for n, v in given.items()}
        self._nodes, self._part = list(ast.walk(tree)), part
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        literals = [node.value for node in self._nodes if isinstance(node, ast.Constant)]
        self.numbers = tuple(n for n in (*literals, *given.values()) if type(n) in (int, float))
        self.length = length_for(self.numbers)
        self.made_up: dict[str, Any] = {}
        self._used: set[str] = set()
        self._next = iter(_NUMBERS)
        self._generator = torch.Generator().manual_seed(0)
        functions = [node for node in self._nodes if isinstance(node, _Function) and _positions(node)]
        self._of_score = any(_positions(node) == 5 for node in functions)
        self._roles: dict[str, str] = {}
        for node in functions:
            self._roles |= zip(_arguments(node)[_positions(node) - 4 :], _ROLES, strict=False)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name. Raises ValueError for a function, which cannot be made up."""
        self._used.add(name)
        if name not in self._given and (default := self._default(name)) is not None:
            self._given[name] = default
        if name not in self._given:
            self._given[name] = self.made_up[name] = self._made(name)
        return self._given[name]

    def check_all_are_used(self) -> None:
        """Raise ValueError if a value was given for a name that nothing reads."""
        if unused := [name for name in self._given if name not in self._used]:
            raise ValueError(f"flexmasks: the function leaves no `{unused[0]}` open.")

    def _default(self, name: str) -> Any:
        for node in self._nodes:
            if isinstance(node, _Function):
                arguments = [*node.args.posonlyargs, *node.args.args]
                pairs = [*zip(arguments[::-1], node.args.defaults[::-1], strict=False)]
                for argument, default in (*pairs, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)):
                    if argument.arg == name and isinstance(default, ast.Constant):
                        return default.value
        return None

    def _made(self, name: str) -> Any:
        uses = [n for n in self._nodes if isinstance(n, ast.Name) and n.id == name]
        beside = [(n, self._parents.get(n)) for n in uses]
        calls = [p for n, p in beside if isinstance(p, ast.Call) and p.func is n]
        joined = [p for n, p in beside if isinstance(p, ast.Call) and re.search("(and|or)_masks$", ast.unparse(p.func))]
        if calls or joined:
            if "causal" in name or re.fullmatch("(inner_?)?(mask_?)?(mod|fn|function)|mask|inner", name):
                return lambda b, h, q, kv: q >= kv
            raise ValueError(f"flexmasks: the text calls `{name}` without its definition; paste that too.")
        if re.search("offsets|cu_seq", name):
            return torch.tensor([0, *(self.length * n // 8 for n in (1, 3, 4)), self.length])
        if indexed := [n for n, p in beside if isinstance(p, ast.Subscript) and p.value is n]:
            return self._tensor(indexed)
        length = self.length // self._part
        size = next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
        return next(self._next, 5) if size is None else size(length)

    def _tensor(self, uses: Iterable[ast.Name]) -> Tensor:
        """Make a tensor: of biases, lengths of batch elements, flags, ends of spans, or numbers of documents."""
        dims: list[str] = []
        is_flag, is_end = True, False
        is_start = any(re.search("prefix|start|left", use.id) for use in uses)
        for use in uses:
            node, own = use, []
            while isinstance(outer := self._parents.get(node), ast.Subscript) and outer.value is node:
                index = outer.slice
                own += [self._dimension(i) for i in (index.elts if isinstance(index, ast.Tuple) else [index])]
                node = outer  # type: ignore[assignment]
            dims = max(dims, own, key=len)
            beside = self._parents.get(node)
            combines = isinstance(beside, ast.BinOp) and isinstance(beside.op, ast.BitAnd | ast.BitOr | ast.BitXor)
            is_flag &= combines or not isinstance(beside, ast.Compare | ast.BinOp | ast.Subscript)
            if isinstance(beside, ast.Compare):
                others = [side for side in (beside.left, *beside.comparators) if isinstance(side, ast.Name)]
                is_end |= any(self._roles.get(side.id) in ("q", "kv") for side in others)
        length = self.length
        sizes = {"b": _BATCH, "h": _HEADS, "s": length}
        random = torch.rand([sizes.get(d) or int(d) for d in dims], generator=self._generator)
        if self._of_score:
            return random
        if "s" not in dims:
            return (length * (1 + random) / (8 if is_start else 2)).long()
        if is_flag:
            return random < (0.15 if dims.count("s") == 1 else 0.5)
        if is_end:
            return (torch.arange(1, length + 1) + random * length / 4).long().clamp(max=length)
        return (random < 8 / length).cumsum(-1) * 5 % 9 - 1  # numbers that rise and fall, some of them negative

    def _dimension(self, index: ast.AST) -> str:
        roles = {self._roles[n.id] for n in ast.walk(index) if isinstance(n, ast.Name) and n.id in self._roles}
        if roles == {"q", "kv"}:  # a distance, from the middle
            middle = [n.value for n in ast.walk(index) if isinstance(n, ast.Constant) and type(n.value) is int]
            return str(2 * max([*middle, 0]) + 1 if middle else 2 * self.length - 1)
        return roles.pop() if roles in ({"b"}, {"h"}) else "s"
