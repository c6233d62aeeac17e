"""Measure the suite by planted faults: small mistakes, put into the library one at a time, which tests should find.

    pip install pytest-cov
    python tests/planted.py record                      # run the suite once, and note which test runs which line
    python tests/planted.py                             # try all faults of tests/planted_faults.py
    python tests/planted.py --only 'ranges/|causal'     # those whose file, old or new text has a match
    python tests/planted.py --old COMMIT                # ask the tests of an earlier commit, too
    python tests/planted.py record -- tests/engine/test_ranges.py    # record chosen tests

A fault is planted in a temporary copy of the repository. There the tests run that reached its lines when they were
recorded, the quickest first, until one fails. A test that also fails without the fault does not count. When the suite
has tried all faults, what it misses goes to the campaigns, and with --old to earlier tests. The rows are written into
recipes/results/planted.json, and `python tests/test_readme.py` writes recipes/results/planted.md from them. Rows of
faults that were not tried stay.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planted_faults import FAULTS, Fault
from repository import ROOT, copy_to
from tabulate import tabulate

if TYPE_CHECKING:  # it is installed for this script alone
    from coverage import CoverageData

TABLE = ROOT / "recipes/results/planted.json"
_STAGES = 30, 150  # tests of the first runs of pytest; all others are one more
_CASES = 3  # of a test function, before cases of others come
_SLOW = 20.0  # seconds of tests that come last, whatever their function
# They look at the planted text itself, or at a table that this script writes.
_OWN = (
    "tests/test_house.py::test_planted_faults_fit_the_source",
    "tests/test_readme.py::test_the_generated_parts_are_up_to_date[recipes/results/planted.md]",
)
SUITE, CAMPAIGNS, OLD, CRASH = "the suite", "campaigns", "the old suite", "an error at import"  # what finds faults
_FINDERS = SUITE, CRASH, CAMPAIGNS, OLD
_SHOWN, _AROUND = 50, 3  # characters of a text in the table, and words or signs around what differs


# --- what tests reach ---


def record(folder: Path, tests: Sequence[str]) -> int:
    """Run the suite once, and keep in a folder which test runs which line, and how long tests take."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", "-p", "no:cacheprovider"]
    command += ["--cov=flexmasks", "--cov-context=test", "--cov-report=", f"--junitxml={folder / 'report.xml'}", *tests]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    seed = os.environ.get("FLEXMASKS_SEED", str(date.today().toordinal()))
    (folder / "seed").write_text(seed)
    environment = os.environ | {"COVERAGE_FILE": str(folder / "coverage"), "PYTHONPATH": path, "FLEXMASKS_SEED": seed}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


class Recorded:
    """What `record` has kept in a folder."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self._data: CoverageData = CoverageData(str(folder / "coverage"))
        self._data.read()
        self._files = {file.rpartition("/flexmasks/")[2]: file for file in self._data.measured_files()}
        self._tests = {_test_of(context) for context in self._data.measured_contexts()} - {""}
        cases = ET.parse(folder / "report.xml").getroot().iter("testcase")
        self._seconds = {(case.get("classname"), case.get("name")): float(case.get("time", 0)) for case in cases}

    def seconds(self, test: str) -> float:
        """Return how long a test took."""
        path, bracket, case = test.partition("[")
        file, *names = path.split("::")
        names = [file.removesuffix(".py").replace("/", "."), *names]
        return self._seconds.get((".".join(names[:-1]), names[-1] + bracket + case), 0.0)

    def tests_for(self, fault: Fault) -> list[str]:
        """Return the tests of a fault, in the order in which they are tried: those that it names come first.

        Lines that run at import are reached by all tests of their file, unless the fault names tests.
        """
        file = self._files.get(fault.file)
        by_line = self._data.contexts_by_lineno(file) if file else {}
        reached = {n: {_test_of(context) for context in contexts} for n, contexts in by_line.items()}
        tests = set().union(*(reached.get(n, ()) for n in lines_of(fault))) - {""}
        if not tests and not fault.tests:
            tests = set().union(*reached.values()) - {""}
        named: set[str] = set()
        for name in fault.tests:
            named |= {t for t in self._tests if t == name or t.startswith((f"{name}::", f"{name}["))} or {name}
        cases: collections.Counter[str] = collections.Counter()
        ordered: list[tuple[bool, bool, int, int, str]] = []
        for test in sorted(tests | named, key=lambda t: (self.seconds(t), t)):
            function = test.partition("[")[0]
            ordered.append(
                (test not in named, self.seconds(test) > _SLOW, cases[function] // _CASES, len(ordered), test)
            )
            cases[function] += 1
        return [test for *_, test in sorted(ordered)]


def _test_of(context: str) -> str:
    """Return the node id in a context, which ends with a phase of the test; "" for code that runs at import."""
    return context.rpartition("|")[0]


def line_of(fault: Fault) -> int:
    """Return the first line that a fault changes."""
    source = (ROOT / "flexmasks" / fault.file).read_text()
    place = next((n for n, pair in enumerate(zip(fault.old, fault.new, strict=False)) if len({*pair}) > 1), 0)
    return source[: source.index(fault.old) + place].count("\n") + 1


def lines_of(fault: Fault) -> set[int]:
    """Return the lines of the statements that a fault changes.

    Of a compound statement these are the lines before its body, but of a function the body: its first lines run at
    import.
    """
    source = (ROOT / "flexmasks" / fault.file).read_text()
    first = source[: source.index(fault.old)].count("\n") + 1
    changed = set(range(first, first + fault.old.rstrip("\n").count("\n") + 1))
    lines = set(changed)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            own = range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)
            if not isinstance(node, ast.ClassDef) and changed & {*own, node.lineno}:
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                lines |= set(range(node.lineno + 1, (node.end_lineno or 0) + 1)) if is_function else set(own)
    return lines


# --- trials ---


class Trial:
    """Copies of the repository, and runs of tests in them."""

    def __init__(self, folder: Path, limit: float, choice: dict[str, str], old: str = "") -> None:
        """limit: seconds of a fault and a kind of tests. choice: variables that choose among tests. old: a commit."""
        self._folder, self._limit, self._choice, self._old = folder, limit, choice, old
        self._numbers = itertools.count()
        self._clean = {is_old: self._copy(f"clean-{is_old:d}", is_old) for is_old in (False, bool(old))}
        self._broken: dict[tuple[str, str], bool] = {}  # whether a test of a kind fails without a fault
        self._lock = threading.Lock()  # the clean copies are for one run at a time
        self._running: set[subprocess.Popen[Any]] = set()
        self._is_stopped = False

    def _copy(self, name: str, old: bool = False) -> Path:
        """Return a new copy, with the tests of the earlier commit if asked for."""
        place = copy_to(self._folder / name)
        if old:
            self._lay_old_tests(place)
        return place

    def _lay_old_tests(self, place: Path) -> None:
        shutil.rmtree(place / "tests")
        command = ["git", "archive", self._old, "tests"]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(place, filter="data")

    def collected(self, files: Sequence[str]) -> set[str]:
        """Return the node ids of all tests of some files."""
        _, output = self._pytest(self._clean[False], [*files, "--collect-only"], math.inf)
        return set(output.splitlines())

    def by_suite(self, fault: Fault, tests: Sequence[str]) -> dict[str, Any]:
        """Return the row of a fault for which the suite alone was asked."""
        row = {"file": fault.file, "line": line_of(fault), "old": fault.old, "new": fault.new, "tests": len(tests)}
        with self._planted(fault) as place:
            start = time.perf_counter()
            found = self._by_suite(place, tests)
        seconds = round(time.perf_counter() - start)
        if not found:
            return row | {"by": "", "test": "", "seconds": seconds, "is_over": seconds >= self._limit}
        return row | {"by": SUITE if "::" in found else CRASH, "test": found, "seconds": seconds}

    def by_others(self, fault: Fault, tests: Sequence[str], row: dict[str, Any]) -> dict[str, Any]:
        """Return the row of a fault that the suite misses, for which campaigns and earlier tests were asked."""
        files = sorted({test.partition("::")[0] for test in tests if test.startswith("tests/")})
        with self._planted(fault) as place:
            for by in (CAMPAIGNS, OLD)[: 2 if self._old else 1]:
                if by == OLD:
                    self._lay_old_tests(place)
                    files = [name for name in files if (place / name).exists()]
                start = time.perf_counter()
                if found := self._first_failure(place, files or ["tests"], by):
                    return row | {"by": by, "test": found, "seconds": round(time.perf_counter() - start)}
        return row

    @contextlib.contextmanager
    def _planted(self, fault: Fault) -> Iterator[Path]:
        """Yield a copy with a fault."""
        place = self._copy(f"fault-{next(self._numbers)}")
        file = place / "flexmasks" / fault.file
        file.write_text(file.read_text().replace(fault.old, fault.new))
        yield place
        shutil.rmtree(place)

    def _by_suite(self, place: Path, tests: Sequence[str]) -> str:
        """Return the first test of the suite that fails, as `_first_failure` does."""
        end = time.perf_counter() + self._limit
        ends = [0, *(n for n in _STAGES if n < len(tests)), len(tests)]
        for first, last in itertools.pairwise(ends):
            chosen = place.with_suffix(".chosen")
            chosen.write_text("\n".join(tests[first:last]))
            if first < last and (found := self._first_failure(place, [f"@{chosen}"], SUITE, end)):
                return found
        return ""

    def _first_failure(self, place: Path, chosen: Sequence[str], by: str, end: float | None = None) -> str:
        """Return the first test that fails, and does not fail without the fault.

        The result is "" if there is none before the limit, and pytest's error if a file of tests cannot be imported.
        """
        end = end or time.perf_counter() + self._limit
        options = ["-m", "campaign"] if by == CAMPAIGNS else []
        broken = [*_OWN, *(test for (of, test), is_broken in [*self._broken.items()] if is_broken and of == by)]
        while (seconds := end - time.perf_counter()) > 0:
            left_out = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in broken]
            code, output = self._pytest(place, [*chosen, *options, *left_out], seconds)
            if code in (None, 0, 5):  # the time was over, all passed, or none was chosen
                return ""
            failed = _failed_in(place)
            if not failed:
                errors = re.findall(r"^(?:E  |ERROR: ).*", output, re.MULTILINE) or output.splitlines() or [""]
                return f"pytest ended with {code}: {errors[-1].strip()[:150]}".replace("::", ":")
            if not self._fails_without(failed, options, by):
                return failed if "::" in failed else f"{failed} could not be imported"
            broken.append(failed)
        return ""

    def _fails_without(self, test: str, options: list[str], by: str) -> bool:
        """Return whether a test fails without a fault, or its file cannot be imported."""
        with self._lock:
            if (by, test) not in self._broken:
                options = options if "::" in test else ["--collect-only"]
                code, _ = self._pytest(self._clean[by == OLD], [test, *options], self._limit)
                self._broken[by, test] = code != 0
            return self._broken[by, test]

    def _pytest(self, place: Path, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Return the exit code, or None if the time is over, and the output."""
        path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
        # Threads of the recorded run: workers of pytest-xdist compute on one.
        environment = os.environ | self._choice | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        report = place.with_suffix(".xml")
        report.unlink(missing_ok=True)
        if self._is_stopped:
            return None, ""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        with tempfile.TemporaryFile("w+", dir=self._folder) as output:
            # A session of its own, so that the processes that tests have started end, too.
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=place,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                code = process.wait(None if math.isinf(seconds) else seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                self._running.discard(process)
            output.seek(0)
            return code, output.read()

    def stop(self) -> None:
        """End all runs, and let none start."""
        self._is_stopped = True
        for process in [*self._running]:
            os.killpg(process.pid, signal.SIGKILL)


def _failed_in(place: Path) -> str:
    """Return the test that failed in a copy, or the file of tests that could not be imported, or "".

    The report is read, because node ids in the output may be cut.
    """
    report = place.with_suffix(".xml")
    for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():
        if case.find("failure") is None and case.find("error") is None:
            continue
        names = [*filter(None, case.get("classname", "").split(".")), case.get("name", "")]
        if len(names) == 1:  # a file, whose name has dots
            return f"{names[0].replace('.', '/')}.py"
        count = next((n for n in range(1, len(names)) if (place / f"{'/'.join(names[:n])}.py").exists()), 1)
        return "::".join([f"{'/'.join(names[:count])}.py", *names[count:]])
    return ""


# --- the table ---


def write(rows: Iterable[dict[str, Any]]) -> None:
    """Put rows into the table, in the order of the faults; rows of faults that are no more go."""
    known = json.loads(TABLE.read_text())["rows"] if TABLE.exists() else []
    by_fault = {(row["file"], row["old"], row["new"]): row for row in [*known, *rows]}
    kept = [by_fault[fault[:3]] for fault in FAULTS if fault[:3] in by_fault]
    made = TABLE.with_suffix(".tmp")
    made.write_text(json.dumps({"rows": kept}, indent=1) + "\n")
    made.replace(TABLE)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of rows, and its summary."""
    counts = collections.Counter(row["by"] for row in rows)
    by = ", ".join(f"{counts[name]} by {name} {'' if name in (SUITE, CRASH) else 'only'}".strip() for name in _FINDERS)
    table = [
        {
            "fault": f"{row['file']}:{row['line']}",
            "change": _code(_change(row["old"], row["new"])),
            "found by": f"{'' if row['by'] == SUITE else row['by'] + ': '}{_code(row['test'].removeprefix('tests/'))}"
            if row["by"]
            else f"nobody, {row['tests']} tests{', not all in the time' if row['is_over'] else ''}",
            "seconds": row["seconds"],
        }
        for row in rows
    ]
    summary = f"{len(rows)} faults: {by}, {counts['']} by nobody."
    return f"{summary}\n\n{tabulate(table, headers='keys', tablefmt='github')}"


def _change(old: str, new: str) -> str:
    """Return what differs between two texts, in a few characters."""
    before, after = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (old, new))
    least = min(len(before), len(after))
    first = next((n for n in range(least) if before[n] != after[n]), least)
    last = next((n for n in range(least - first) if before[-1 - n] != after[-1 - n]), least - first)
    first, last = max(0, first - _AROUND), max(0, last - _AROUND)
    parts = (" ".join("".join(text[first : len(text) - last]).split()) for text in (before, after))
    old, new = (part if len(part) <= _SHOWN else f"{part[:_SHOWN]}..." for part in parts)
    return f"{old} -> {new}" if new else f"without {old}"


def _code(text: str) -> str:
    """Return a text as code in a cell of a table; pages must not read it as a link."""
    return f"`{text.replace('|', chr(92) + '|').replace('](', '] (')}`"


def _is_among(test: str, known: set[str]) -> bool:
    return test in known or any(other.startswith((f"{test}::", f"{test}[")) for other in known)


def main() -> int:
    """Record, or try the faults of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [record] [options] [-- TEST ...]",
    )
    parser.add_argument("what", nargs="?", choices=("record", "try"), default="try", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".planted", help="where the recorded run is kept")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at once, by default 2")
    parser.add_argument("--only", default="", metavar="REGEX", help="faults whose file, old or new text has a match")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of a fault and a kind of tests")
    parser.add_argument("--old", default="", metavar="COMMIT", help="whose tests are asked for what others miss")
    arguments, tests = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, tests = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments)
    if options.what == "record":
        return record(options.folder.resolve(), tests)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stopped run removes its folder
    chosen = [fault for fault in FAULTS if any(re.search(options.only, text) for text in fault[:3])]
    recorded = Recorded(options.folder)
    tests_of = {fault: recorded.tests_for(fault) for fault in chosen}
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        # The choices of the day that was recorded: the campaigns are asked for the other tests.
        choice = {"FLEXMASKS_SEED": (options.folder / "seed").read_text(), "FLEXMASKS_SLOW": "5"}
        trial = Trial(Path(folder), options.limit, choice, options.old)
        files = {test.partition("::")[0] for tests in tests_of.values() for test in tests}
        files = {file for file in files if (ROOT / file).exists()}  # others are gone since the suite was recorded
        known = trial.collected(sorted(files)) | files  # some node ids may differ from run to run
        tests_of = {fault: [test for test in tests if _is_among(test, known)] for fault, tests in tests_of.items()}
        rows = _tried(trial, options.jobs, {f: (trial.by_suite, f, tests) for f, tests in tests_of.items()})
        missed = {f: (trial.by_others, f, tests_of[f], row) for f, row in rows.items() if not row["by"]}
        rows |= _tried(trial, options.jobs, missed)
    return 0 if all(row["by"] for row in rows.values()) else 1


def _tried(trial: Trial, jobs: int, calls: dict[Fault, tuple[Any, ...]]) -> dict[Fault, dict[str, Any]]:
    """Return the rows of calls, each a function and its arguments. Rows are written as they come."""
    rows: dict[Fault, dict[str, Any]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        trials = {pool.submit(*call): fault for fault, call in calls.items()}
        try:
            for done in as_completed(trials):
                row = rows[trials[done]] = done.result()
                write(rows.values())
                result = f"{row['by']}, {row['test']}" if row["by"] else f"not found by its {row['tests']} tests"
                count = f"{len(rows)}/{len(calls)}"
                print(f"{count} {row['file']}:{row['line']} {row['seconds']} s: {result}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            trial.stop()
            raise
    return rows


if __name__ == "__main__":
    sys.exit(main())
