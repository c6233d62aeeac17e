"""Measure the suite by random faults: mutations of the library, one at a time, which tests of its room should find.

    python tests/mutations.py                           # 60 mutations, evenly over the rooms
    python tests/mutations.py --seed 7 --count 6 --only '^blocks/'
    python tests/mutations.py --list                    # print them, and run nothing

A mutation turns a comparison or a sign, takes the next index or number, leaves out an argument or an element of a key,
takes `or` for `and`, or drops a `not`. What runs is what a developer would run who changed that file: its examples, the
tests that are named after it or import it, and those of its room, until one fails. Whoever finds that a mutation is
missed writes a test, deletes code that does nothing, or sees that both programs do the same. A fault that has got a
test goes into tests/planted_faults.py.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from planted import ROOT, SUITE, Trial, line_of
from planted_faults import Fault

PACKAGE = ROOT / "flexmasks"
# Tests of a file or a folder of the package, beside those that are named after a file or import it; quick ones first.
# Of several entries that fit, the longest counts.
TESTS = {
    "masks/": "masks orders constructors errors",
    "scores/": "scores biases constructors errors",
    "ranges/": "ranges blocks",
    "spec/": "values messages constructors objects pickles cache layouts errors masks scores",
    "blocks/": "blocks counts bounded_search data",
    "plans/": "plans plan_held plan_updates rows windows alignment data prepared starts mixed softmax scores errors",
    "plans/mask_plan": "plans data masks prepared",
    "spec/bands": "windows layouts masks objects",
    "spec/encoding": "inside_compile",
    "spec/structure": "cache values objects inside_compile",
    "spec/templates": "inside_compile",
    "backends/": "decode dense windows small_calls attention scores data kernel_counts padded strides errors",
    "backends/encoded": "inside_compile",
    "backends/t": "scores attention faults inside_compile",
    "kernels/": "softmax softmax_transforms",
    "kernels/few_queries": "few_queries",
    "kernels/index_lists": "blocks few_queries",
    "kernels/sinks": "sinks",
    "kernels/whole_mask": "whole_mask",
    "integrations/diffusers": "diffusers",
    "integrations/huggingface/": "huggingface huggingface_vision huggingface_sharded watch",
    "integrations/": "watch",
    "integrations/distributed/": "distributed_plan distributed_exchange distributed",
    "pictures/": "picture command",
    "bench/": "bench command",
    "": "taken errors cache attention strides export",
    "__main__": "command",
    "canvas": "canvas",
    "checkpointing": "kept",
    "compat": "missing host_process",
    "errors": "faults messages pickles",
    "flex": "flex",
    "graphs": "inside_compile",
    "inside_compile": "inside_compile export",
    "later": "import",
    "orders": "orders",
    "pages": "paging mixed",
    "planning": "plan_held plan_updates",
    "sharded": "distributed",
    "softmax": "softmax",
    "extend": "extend picture distributed_plan",
    "trees": "trees",
    "workers": "threads",
}
_ON_GPUS = re.compile(r"_gpu\.py|/fa4|/flex_flash|_launch\.py")  # no CPU runs them
_ROOMS = "masks", "scores", "ranges", "spec", "blocks", "plans", "backends", "kernels", "integrations", "pictures", ""
_TURNED = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
    "+": ("-",),
    "-": ("+",),
    "and": ("or",),
    "or": ("and",),
}
_SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.And: "and", ast.Or: "or",
}  # fmt: skip
_SEEN_ELSEWHERE = {"device", "strict"}  # without them nothing changes on a CPU, or in a program without faults
_NEED_ALL = {"isinstance", "min", "max", "torch.where", "torch.minimum", "torch.maximum", "replace"}
# Calls whose arguments are types, or words of a message.
_OF_WORDS = {"cast", "fail", "wrong", "TypeVar", "warn", "warning", "info", "print", "ValueError", "TypeError"}


class Mutation(NamedTuple):
    """A piece of a source, by the places of its first and last character, and what takes its place."""

    kind: str
    start: int
    stop: int
    new: str


def mutations(source: str) -> Iterator[Mutation]:
    """Yield the mutations of a source, with those that change nothing."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return starts[place[0] - 1] + place[1], starts[place[2] - 1] + place[3]

    def text(node: ast.AST) -> str:
        return source[slice(*span(node))]

    def between(kind: str, left: ast.AST, sign: ast.AST, right: ast.AST) -> Iterator[Mutation]:
        old = _SIGNS.get(type(sign), "")
        start, stop = span(left)[1], span(right)[0]
        for new in _TURNED.get(old, ()):
            yield Mutation(kind, start, stop, source[start:stop].replace(old, new, 1))

    for node, in_function, is_of_key in _code_of(ast.parse(source)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, sign, right in zip(operands, node.ops, operands[1:], strict=False):
                yield from between("comparison", left, sign, right)
        elif isinstance(node, ast.BinOp):
            yield from between("sign", node.left, node.op, node.right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between("truth", left, node.op, right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            kind = "truth" if isinstance(node.op, ast.Not) else "sign"
            yield Mutation(kind, *span(node), f"({text(node.operand)})")
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if type(number := node.slice.value) is int:
                for new in {number + 1, abs(number - 1)}:
                    yield Mutation("index", *span(node.slice), str(new))
        elif isinstance(node, ast.Constant) and type(node.value) is int and in_function:
            yield Mutation("number", *span(node), str(node.value + 1))
        elif isinstance(node, ast.Call):
            given = [*node.args, *node.keywords]
            last = node.args[-1:] if len(node.args) > 1 and text(node.func) not in _NEED_ALL else []
            for left_out in [*last, *(word for word in node.keywords if word.arg not in _SEEN_ELSEWHERE)]:
                rest = ", ".join(text(x) for x in given if x is not left_out)
                yield Mutation("argument", *span(node), f"{text(node.func)}({rest})")
        elif isinstance(node, ast.Tuple) and is_of_key and len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
            for left_out in node.elts:
                yield Mutation(
                    "key", *span(node), f"({''.join(f'{text(x)}, ' for x in node.elts if x is not left_out)})"
                )


def _code_of(node: ast.AST, in_function: bool = False, is_of_key: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Yield the nodes that compute: no annotations, messages and types.

    Each comes with whether it is inside a function, and whether it is part of a key.
    """
    yield node, in_function, is_of_key
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in field if isinstance(field, list) else [field]:
            called = child.func if isinstance(child, ast.Call) else None
            words = isinstance(called, ast.Name | ast.Attribute) and ast.unparse(called).split(".")[-1] in _OF_WORDS
            if words or not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr):
                continue
            is_function = isinstance(child, ast.FunctionDef | ast.Lambda)
            names = [child.name] if isinstance(child, ast.FunctionDef) else []
            if isinstance(child, ast.Assign):
                names = [ast.unparse(target) for target in child.targets]
            of_key = is_of_key or any(re.search(r"(^|_)key($|_)|^identity$", name) for name in names)
            yield from _code_of(child, in_function or is_function, of_key)


def as_fault(file: str, mutation: Mutation) -> Fault | None:
    """Return a mutation of a file of the package as a fault, or None if it changes nothing, or is no Python."""
    source, (_, start, stop, new) = (PACKAGE / file).read_text(), mutation
    try:
        if ast.dump(ast.parse(source[:start] + new + source[stop:])) == ast.dump(ast.parse(source)):
            return None
    except SyntaxError:
        return None
    first, last = start, stop
    while source.count(source[first:last]) > 1:  # a fault's text stands once in its file
        first = source.rfind("\n", 0, max(first - 1, 0)) + 1
        last = source.find("\n", last + 1) % (len(source) + 1)
    return Fault(file, source[first:last], source[first:start] + new + source[stop:last], tuple(tests_of(file)))


def tests_of(file: str) -> list[str]:
    """Return the files of tests that a developer would run who changed a file of the package."""
    module = ".".join(("flexmasks", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
    folder, _, name = module.rpartition(".")
    imports = re.compile(
        rf"^\s*(from {re.escape(module)} import|import {re.escape(module)}\b"
        rf"|from {re.escape(folder)} import .*\b{name}\b)", re.MULTILINE
    )  # fmt: skip
    sources = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    is_deep = len(Path(file).parts) > 2  # in `integrations`, whose files share names with others
    named = [path for path in sources if path.stem in (f"test_{name}", f"test_{name}s") and not is_deep]
    importing = [path for path, text in sources.items() if imports.search(text) and not is_deep]
    room = max((start for start in TESTS if file.startswith(start)), key=len)
    of_room = [path for test in TESTS[room].split() for path in sources if path.stem == f"test_{test}"]
    tests = dict.fromkeys([*named, *of_room, *sorted(importing, key=lambda path: path.stat().st_size)])
    return [f"flexmasks/{file}", *(str(path.relative_to(ROOT)) for path in tests if path in sources)]


def chosen(count: int, seed: int, only: str) -> list[tuple[str, Fault]]:
    """Return mutations, evenly over the rooms, and inside of a room over the kinds of mutations."""
    rooms: dict[str, dict[str, list[tuple[str, Mutation]]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        if re.search(only, file) and not _ON_GPUS.search(file):
            room = next(room for room in _ROOMS if file.startswith(f"{room}/") or not room)
            for mutation in mutations(path.read_text()):
                rooms[room][mutation.kind].append((file, mutation))
    draw, found = random.Random(seed), dict[Fault, str]()
    while len(found) < count and any(any(kinds.values()) for kinds in rooms.values()):
        for kinds in rooms.values():
            kind = draw.choice([kind for kind, of_kind in kinds.items() if of_kind] or [""])
            fault = as_fault(*kinds[kind].pop(draw.randrange(len(kinds[kind])))) if kind else None
            if fault is not None and len(found) < count:
                found[fault] = kind
    return [(kind, fault) for fault, kind in found.items()]


class _Trial(Trial):
    """Trials that believe a failing test at first, which saves half of the runs; `all_pass` asks for all at the end."""

    def _fails_without(self, test: str, options: list[str], by: str) -> bool:
        return False

    def all_pass(self, tests: Sequence[str]) -> bool:
        """Return whether tests pass without a fault."""
        return not tests or self._pytest(self._clean[False], tests, math.inf)[0] == 0


def _tried(trial: Trial, fault: Fault) -> dict[str, Any]:
    """Return the row of a fault. Tests that are named after its file, or after what the file defines, come first."""
    words = [Path(fault.file).stem.strip("_")]
    if fault.file.startswith(("masks/", "scores/")):
        words += re.findall(r"^def ([a-z]\w*)\(", (PACKAGE / fault.file).read_text(), re.MULTILINE)
    row = trial.by_suite(fault, [*fault.tests, "-k", " or ".join(words)])
    return row if row["by"] else trial.by_suite(fault, fault.tests)


def main() -> int:
    """Try the mutations of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--skip", type=int, default=0, metavar="COUNT", help="how many were tried already")
    parser.add_argument("--only", default="", metavar="REGEX", help="of files in the folder of the package")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of a mutation")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    mutants = chosen(options.count, options.seed, options.only)
    missed, failed = 0, set[str]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stopped run removes its folder
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        trial = _Trial(Path(folder), options.limit, {"FLEXMASKS_SLOW": os.environ.get("FLEXMASKS_SLOW", "1")})
        for number, (kind, fault) in [*enumerate(mutants, 1)][options.skip :]:
            print(f"{number}/{len(mutants)} {kind} {fault.file}:{line_of(fault)}: {fault.old!r} -> {fault.new!r}")
            if not options.list:
                row = _tried(trial, fault)
                over = " in the time" if row.get("is_over") else ""
                missed += not row["by"]
                failed |= {row["test"]} if row["by"] == SUITE else set()
                print(f"    {row['seconds']} s: {row['test'] or f'MISSED{over} by {fault.tests}'}", flush=True)
        if not trial.all_pass(sorted(failed)):
            print("Some of these tests fail without a fault, too.")
    if not options.list:
        print(f"{missed} of {len(mutants) - options.skip} are missed")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
