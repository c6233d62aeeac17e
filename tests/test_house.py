"""The house: the direction of imports, questions around a call, private names of torch, and the planted faults."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted_faults import FAULTS

import flexmasks
from flexmasks import extend

PACKAGE = Path(__file__).parent.parent / "flexmasks"
FILES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}
TREES = {module: ast.parse(file.read_text()) for module, file in FILES.items()}

# A room imports rooms of lower numbers, and itself.
ORDER = {
    room: number
    for number, rooms in enumerate(
        [
            ["compat"],
            ["cache", "checkpointing", "context", "devices", "workers", "errors", "graphs"],
            ["kernels"],
            ["ranges"],
            ["blocks"],
            ["spec"],
            ["orders"],
            ["masks"],
            ["scores"],
            ["plans"],
            ["backends"],
            ["request"],
            ["dropout"],
            ["layouts", "inside_compile"],
            ["road"],
            ["pages", "sharded"],
            ["later"],
            ["attention", "softmax"],
            ["dot_product", "flex"],
            ["planning"],
            ["extend"],
            ["trees", "weighing"],
            ["pictures"],
            ["asking"],
            ["integrations"],
            ["bench"],
            ["__main__"],
        ]
    )
    for room in rooms
}
# Masks and scores are definitions: outside of their rooms they import only these rooms.
FOR_DEFINITIONS = ["flexmasks.spec", "flexmasks.orders", "flexmasks.kernels.tanh"]
# Rooms that build on public names and `flexmasks.extend` alone, each with the rooms whose other names it may use.
ON_PUBLIC_NAMES = {
    "trees": (),
    "weighing": (),
    "pictures": ("pictures",),
    "asking": ("asking", "pictures"),
    "integrations": ("integrations",),
    "bench": ("bench",),
    "__main__": ("asking", "bench", "pictures"),
}
THEIR_PACKAGES = {"torch", "numpy", "tabulate", "matplotlib", "transformers", "diffusers", *sys.stdlib_module_names}


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of all imports of a module: at its top, in functions and for type checkers."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def file_of(name: str) -> str | None:
    """Return the module of the package that defines an imported name, None for other packages."""
    while name not in FILES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in FILES else None


def room_of(module: str) -> str:
    """Return the room of a module, "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def test_every_file_has_a_room() -> None:
    assert {room_of(module) for module in FILES} - {""} <= set(ORDER)


def test_imports_run_in_one_direction() -> None:
    wrong = []
    for module in FILES:
        for line, name in imports(module):
            target = file_of(name)
            if target is None or module == "flexmasks" or room_of(target) == room_of(module):
                continue
            if target == "flexmasks" and room_of(module) in ON_PUBLIC_NAMES:
                continue
            allowed = room_of(target) and ORDER[room_of(target)] < ORDER[room_of(module)]
            if room_of(module) in ("masks", "scores") and FILES[module].name != "__init__.py":
                allowed = any(f"{target}.".startswith(f"{known}.") for known in FOR_DEFINITIONS)
            if not allowed:
                wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_some_rooms_build_on_public_names() -> None:
    public = {f"flexmasks.{name}" for name in (*flexmasks.__all__, "__version__", "trees")}
    public |= {f"flexmasks.extend.{name}" for name in extend.__all__}
    wrong = [
        f"{module}:{line} imports {name}"
        for module in FILES
        if room_of(module) in ON_PUBLIC_NAMES
        for line, name in imports(module)
        if name not in public and name.partition(".")[0] not in THEIR_PACKAGES
        if not any(name.startswith(f"flexmasks.{room}.") for room in ON_PUBLIC_NAMES[room_of(module)])
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_files() -> None:
    # Python runs the file of the public names before each of the others.
    graph = {m: {t for _, name in imports(m) if (t := file_of(name)) not in (None, m, "flexmasks")} for m in FILES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


# How many lines may ask; what a function's caller knows, the caller says.
MOST_LINES_THAT_ASK = {r"is_compiling\(\)": 26, r"is_cuda|device\.type": 60}


@pytest.mark.parametrize("question", MOST_LINES_THAT_ASK)
def test_facts_around_a_call_are_asked_once(question: str) -> None:
    asking = [line for file in FILES.values() for line in file.read_text().splitlines() if re.search(question, line)]
    assert len(asking) <= MOST_LINES_THAT_ASK[question], "\n".join(asking)


def test_constants_of_graphs_are_no_dicts() -> None:
    """torch.compile fails where code reads a dict that a function returned as a constant."""
    functions = [f for tree in TREES.values() for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    marked = [f for f in functions if any("constant_in_graphs" in ast.unparse(d) for d in f.decorator_list)]
    assert len(marked) > 10
    assert not [f.name for f in marked if f.returns is None or "dict" in ast.unparse(f.returns)]


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the private names of torch that a file imports or reads, such as `torch._C`."""
    of_torch: dict[str, str] = {}  # the torch symbol that each name in the file refers to
    chains: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            chains += [(node.lineno, alias.name) for alias in node.names]
            of_torch |= {alias.asname: alias.name for alias in node.names if alias.asname}
            of_torch |= {"torch": "torch"}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            chains += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
            of_torch |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        parts, base = [], node
        while isinstance(base, ast.Attribute):
            parts, base = [base.attr, *parts], base.value
        if parts and isinstance(base, ast.Name) and base.id in of_torch:
            chains.append((node.lineno, ".".join([of_torch[base.id], *parts])))
    for line, chain in chains:
        first, *rest = chain.split(".")
        if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest):
            yield line, chain


@pytest.mark.slow
def test_private_names_of_torch_stand_in_compat() -> None:
    wrong = [
        f"{module}:{line} {name}"
        for module, tree in TREES.items()
        if module != "flexmasks.compat"
        for line, name in private_names(tree)
    ]
    assert not wrong, "\n".join(wrong)


def test_planted_faults_fit_the_source() -> None:
    assert len(FAULTS) >= 80
    assert len({fault[:3] for fault in FAULTS}) == len(FAULTS)
    sources = {name: (PACKAGE / name).read_text() for name in {fault.file for fault in FAULTS}}
    parsed = {name: ast.dump(ast.parse(source)) for name, source in sources.items()}
    for fault in FAULTS:
        source = sources[fault.file]
        assert source.count(fault.old) == 1, fault
        assert ast.dump(ast.parse(source.replace(fault.old, fault.new))) != parsed[fault.file], fault
        assert all((PACKAGE.parent / test.partition("::")[0]).exists() for test in fault.tests), fault
