"""Shared setup of all tests: which tests run, a restored registry, seeds and threads."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import os
import random
import shutil
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Threads that wait for others leave the core to the other workers of pytest: half of the time on two cores. Torch's
# threads read this when torch is imported.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Some tests are drawn anew each day. The workers of pytest inherit the seed.
os.environ.setdefault("FLEXMASKS_SEED", str(date.today().toordinal()))

import pytest
import torch
import torch._dynamo
import torch._inductor.codecache
from hypothesis import settings
from torch.utils import _config_module

import flexmasks
from flexmasks.backends import short, waiting
from flexmasks.backends.call import Call
from flexmasks.kernels import compiling
from flexmasks.spec import definitions

if TYPE_CHECKING:  # not all torch builds have process groups
    from benchmarks.processes import Processes

settings.register_profile("flexmasks", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("flexmasks")


_SMOKE_OF_FILE = 2  # functions
_LONGEST = "test_four_processes", "test_by_the_interpreter", "test_kernel_by_the_interpreter", "test_kernels_by_the"


class _EveryTest:
    """Fixtures of all tests; fixtures of a conftest.py would not reach the examples in docstrings of the package."""

    @pytest.fixture(autouse=True)
    def _compiled_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compile small calls on a CPU at once, as tests of compiled kernels mean; `test_small_calls.py` undoes it."""
        refuses = short.refuses_on_cpu

        @functools.wraps(refuses)
        def refuses_without_gradients(call: Call) -> str | None:
            return refuses(call) if call.needs_grad else "in tests it is for calls that need gradients"

        monkeypatch.setattr(short, "refuses_on_cpu", refuses_without_gradients)
        monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 0)
        monkeypatch.setattr(compiling, "_SLOW_SECONDS", 600.0)  # other processes may take the cores

    @pytest.fixture(autouse=True)
    def _registry_restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Remove after each test the masks and scores that it registered."""
        monkeypatch.setattr(definitions, "_NAMES", {kind: dict(known) for kind, known in definitions._NAMES.items()})


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_EveryTest())
    set_up_process()
    # The workers of pytest and other processes inherit the choice.
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    os.environ.setdefault("FLEXMASKS_SLOW", "5" if is_whole else "1")
    if "campaign" not in config.option.markexpr:
        _compile_without_optimization()


def pytest_report_header() -> str:
    return f"seed of the tests that are drawn anew each day: FLEXMASKS_SEED={os.environ['FLEXMASKS_SEED']}"


def set_up_process() -> None:
    """Divide the cores among pytest's workers, and compile kernels for the CPU in half of the time.

    Each worker, and each process that it starts, computes on one thread; more threads would wait for each other.

    Torch traces functions most of the time, and makes millions of objects. Python's search for cycles among them takes
    a fifth of that time if it comes at every 700th object. A pool of
    compilers in each process would take seconds to start.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    if torch.cuda.is_available():
        return
    gc.set_threshold(100_000, 50, 100)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # for the processes that tests start
    torch._inductor.config.compile_threads = 1
    os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
    torch._dynamo.config.run_gc_after_compile = False
    _trace_faster()
    _precompile_headers()
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        _set_up_interpreter()


def _precompile_headers() -> None:
    """Save half of the time of a C++ compiler, which goes into reading headers.

    Torch precompiles one header of all that kernels of flex_attention include; here it precompiles all of them. Other
    kernels include that one alone, and templates of the others would take half of their time.
    """
    torchs = torch._inductor.codecache._get_cpp_prefix_header
    headers, of_flex = str(Path(__file__).parent / "kernel_headers.h"), "ATen/native/CPUBlas.h"
    cache = torch._inductor.codecache.CppPythonBindingsCodeCache
    load, includes_all = cache.load_pybinding_async.__func__, False

    def loaded(cls: Any, types: Any, code: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal includes_all
        includes_all = of_flex in code  # what another thread writes costs time, and changes no kernel
        return load(cls, types, code, *args, **kwargs)

    def header(device: str) -> str | None:
        return headers if includes_all and device.startswith("cpu") else torchs(device)

    cache.load_pybinding_async = classmethod(loaded)
    torch._inductor.codecache._get_cpp_prefix_header = header


def _trace_faster() -> None:
    """Save a tenth of the time in which Dynamo traces functions.

    It keeps the bytecode of 128 functions, and a call of the library inlines some hundreds. And at each instruction it
    asks torch's settings, which look at many things before a default.
    """
    bytecode, config = torch._dynamo.bytecode_transformation, _config_module
    bytecode._cached_cleaned_instructions = functools.cache(bytecode._cached_cleaned_instructions.__wrapped__)
    if "deprecated" not in config._ConfigEntry.__annotations__:
        return  # an earlier torch, with other settings
    ask, unset = config.ConfigModule.__getattr__, config._UNSET_SENTINEL
    plain: dict[tuple[Any, str], tuple[Any, Any]] = {}  # settings that are what was set, or else this value

    def value(self: Any, name: str) -> Any:
        if (self, name) not in plain:
            asked, entry = ask(self, name), self._config[name]
            default = entry.default if entry.env_value_default is unset else entry.env_value_default
            comes_from_elsewhere = entry.alias or entry.justknob or entry.env_value_force is not unset
            if not (comes_from_elsewhere or entry.deprecated) and isinstance(default, config._IMMUTABLE_CONFIG_TYPES):
                plain[self, name] = entry, default
            return asked
        entry, default = plain[self, name]
        if entry.hide:
            return ask(self, name)
        was_set = entry.user_override.get()
        return default if was_set is unset else was_set

    config.ConfigModule.__getattr__ = value


def _compile_without_optimization() -> None:
    """Leave out what takes a C++ compiler longest and tests of a few rows do not need.

    The processes that this one starts inherit the compiler. Campaigns compile as users do.
    """
    if not torch.cuda.is_available() and "FLEXMASKS_CXX" not in os.environ and (compiler := shutil.which("g++")):
        os.environ |= {"FLEXMASKS_CXX": compiler, "CXX": str(Path(__file__).parent / "compiler" / "g++")}
        torch._inductor.config.cpp.cxx = (None, os.environ["CXX"])


def _set_up_interpreter() -> None:
    """Save half of the time of Triton's interpreter, and run the programs of half of the launches last to first.

    At each call of one function by another, it looks through Triton's language for functions to replace. From the
    second call of a launch on, all are replaced. A GPU runs programs in any order: what one writes beyond its own rows
    must not be hidden by the next one, which overwrites it.
    """
    from triton.runtime import interpreter

    launch, replace = interpreter.GridExecutor.__call__, interpreter._patch_lang
    set_program = interpreter.InterpreterBuilder.set_grid_idx
    replaced: set[int] = set()  # the globals that functions of this launch see the language in
    draw, is_reversed = random.Random(0), False

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_reversed
        replaced.clear()
        is_reversed = draw.random() < 0.5
        return launch(self, *args, **kwargs)

    def set_program_in_order(self: Any, *place: int) -> None:
        set_program(self, *(n - 1 - i if is_reversed else i for n, i in zip(self.grid_dim, place, strict=True)))

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = id(self.fn.__globals__)
        if place not in replaced:
            replace(self.fn)
            replaced.add(place)
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = launched, called
    interpreter.InterpreterBuilder.set_grid_idx = set_program_in_order


def _smoke_tests(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the first case of the first functions of each file, without those that take seconds or need a GPU."""
    chosen: dict[Path, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        takes_long = any(mark in item.keywords for mark in ("slow", "campaign", "gpu"))
        if isinstance(item, pytest.Function) and not takes_long and not item.name.startswith(_LONGEST):
            chosen[item.path].setdefault(item.function.__name__, item)
    return [item for of_file in chosen.values() for item in itertools.islice(of_file.values(), _SMOKE_OF_FILE)]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose tests and their order.

    Campaigns are left out unless `-m` names them, and GPU tests are skipped without a GPU. A run of the whole suite
    takes each slow test on one of five days, and leaves it to the campaigns on the others; a run of named files takes
    all. The longest tests are the first: at the end the other workers would wait for them.
    """
    turns = int(os.environ["FLEXMASKS_SLOW"])
    days, day = divmod(int(os.environ["FLEXMASKS_SEED"]), turns)
    for item in items:
        if "slow" in item.keywords and zlib.crc32(f"{days} {item.nodeid}".encode()) % turns != day:
            item.add_marker(pytest.mark.campaign)
    for item in _smoke_tests(items):
        item.add_marker(pytest.mark.smoke)
    items.sort(key=lambda item: not item.name.startswith(_LONGEST))
    if "campaign" not in config.option.markexpr:
        left_out = ["campaign" in item.keywords for item in items]
        config.hook.pytest_deselected(items=[item for item, out in zip(items, left_out, strict=True) if out])
        items[:] = [item for item, out in zip(items, left_out, strict=True) if not out]
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is here"))


def pytest_collection_finish() -> None:
    """Leave what imports have made out of Python's searches for cycles, of which tests ask for hundreds."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write why tests were skipped: a line for each of the ten most frequent reasons."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common(10):
        terminalreporter.write_line(f"{count} skipped: {reason}")
    if len(reasons) > 10:
        terminalreporter.write_line(f"{len(reasons) - 10} more reasons: `-rs` shows all")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run a module's tests on one thread.

    More threads gain nothing for short random functions, and wait for each other on a machine with few cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cold() -> Iterator[None]:
    """Forget all kernels, plans and failures before and after a test."""
    flexmasks.clear_caches()
    yield
    flexmasks.clear_caches()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    """Two processes of one group, which all modules share because they take seconds to start."""
    yield from _processes(2)


@pytest.fixture(scope="session")
def four() -> Iterator[Processes]:
    """Four processes of one group, as `two`."""
    yield from _processes(4)


@pytest.fixture(scope="session")
def eight() -> Iterator[Processes]:
    """Eight processes of one group, as `two`."""
    yield from _processes(8)


def _processes(count: int) -> Iterator[Processes]:
    from benchmarks.processes import Processes

    processes = Processes(count)
    yield processes
    processes.close()
