"""Distributions of the library: an editable install, and the files of a source distribution; the table of versions."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import repository
from repository import ROOT

import flexmasks

MADE = ("PKG-INFO", "setup.cfg", "flexmasks.egg-info/")  # files that setuptools adds

pytest.importorskip("setuptools", minversion="77")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository in a folder named flexmasks."""
    return repository.copy_to(tmp_path_factory.mktemp("holder") / "flexmasks")


@pytest.mark.parametrize("is_known_to_git", [True, False])
def test_what_a_user_keeps_in_the_clone_is_not_copied(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known_to_git: bool
) -> None:
    """An environment of any name, whose links to folders cannot be copied as files."""
    folder, own = tmp_path / "flexmasks", [*repository.files(), "flexmasks/masks/not_added_yet.py"]
    shutil.copytree(clone, folder)
    if is_known_to_git:
        for command in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *command], cwd=folder, check=True)
        (folder / "notes.txt").write_text("of the user")
    for name in (".v", "env", "my environment"):
        (folder / name / "lib").mkdir(parents=True)
        (folder / name / "lib/module.py").write_text("")
        (folder / name / "pyvenv.cfg").write_text("")
        (folder / name / "lib64").symlink_to("lib")
    (folder / "flexmasks/masks/not_added_yet.py").write_text("")
    monkeypatch.setattr(repository, "ROOT", folder)
    assert sorted(repository.files()) == sorted(own)
    repository.copy_to(tmp_path / "copy")
    assert (tmp_path / "copy/flexmasks/masks/not_added_yet.py").exists()


def build(clone: Path, kind: str, out: Path) -> Path:
    """Return the distribution that pip would build."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=300)
    assert not result.returncode, result.stderr
    (made,) = out.iterdir()
    return made


@pytest.mark.slow
def test_the_source_distribution_has_all_files(clone: Path, tmp_path: Path) -> None:
    with tarfile.open(build(clone, "sdist", tmp_path)) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    assert sorted(name for name in names if not name.startswith(MADE)) == sorted(repository.files())
    assert {"tests/conftest.py", "tests/helpers.py", "tests/oracles/__init__.py", "constraints.txt"} <= set(names)
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", ".ci/versions"} <= set(names)


def test_the_wheel_has_the_package_only(clone: Path, tmp_path: Path) -> None:
    wheel = build(clone, "wheel", tmp_path)
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    wanted = {n for n in repository.files() if n.startswith("flexmasks/") and n.endswith(".py")}
    others = {"flexmasks/masks/__init__.pyi", "flexmasks/scores/__init__.pyi"}
    assert set(names) == wanted | others | {"flexmasks/py.typed"}
    assert wheel.name.split("-")[:2] == ["flexmasks", flexmasks.__version__]
    check_metadata(zipfile.ZipFile(wheel).read(f"flexmasks-{flexmasks.__version__}.dist-info/METADATA").decode())


def check_metadata(text: str) -> None:
    """Check what a package index would show."""
    metadata = Parser().parsestr(text)
    assert metadata["Version"] == flexmasks.__version__
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("MIT", ">=3.11")
    assert "attention" in metadata["Keywords"].split(",")
    versions = [c.rpartition(" ")[2] for c in metadata.get_all("Classifier") if re.search(r"Python :: 3\.\d+$", c)]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert set(metadata.get_all("Provides-Extra")) == {
        "test",
        "plot",
        "notebooks",
        "proofs",
        "docs",
        "browser",
        "cudnn",
        "flash",
        "huggingface",
        "diffusers",
        "triton",
        "doors",
    }
    # Each torch brings its own Triton: no limit may stand here, but in extras.
    needed = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed == {"torch", "tabulate", "numpy", "jinja2"}
    assert all(re.match("triton>=3.6;", n) for n in metadata.get_all("Requires-Dist") if n.startswith("triton"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["the folder that holds the clone", "the clone"])
def test_an_editable_install(clone: Path, tmp_path: Path, folder: str) -> None:
    """Python that starts next to the clone sees a folder named flexmasks, which must not hide the package."""
    site, out = tmp_path / "site", tmp_path / "out"
    out.mkdir()
    zipfile.ZipFile(build(clone, "editable", out)).extractall(site)
    where = clone if folder == "the clone" else clone.parent
    # -S leaves out the packages of this environment, where another flexmasks may be installed.
    code = f"""
import site, sys
site.addsitedir({str(site)!r})
sys.path.append({sysconfig.get_path("purelib")!r})
import flexmasks
print(flexmasks.__file__, flexmasks.attention.__name__)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=where, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout.split() == [str(clone / "flexmasks/__init__.py"), "attention"], result.stderr


@pytest.mark.campaign
def test_distributions_in_a_fresh_environment(clone: Path, tmp_path: Path) -> None:
    """The wheel alone runs the commands, and the source distribution's tests judge the wheel.

    The environment is fresh but for the packages that it depends on, which come from the environment of the tests.
    """
    for kind in ("wheel", "sdist"):
        (tmp_path / kind).mkdir()
    wheel, sdist = (build(clone, kind, tmp_path / kind) for kind in ("wheel", "sdist"))
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str, folder: Path = tmp_path) -> str:
        result = subprocess.run(
            [str(python), *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=1500
        )
        assert not result.returncode, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout

    run("-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    site = tmp_path / "venv/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # A line of plain text: the packages come behind the wheel, and editable installs among them are left out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("flexmasks-*")
    shutil.rmtree(source / "flexmasks")  # what is imported is the wheel

    where = "import flexmasks; print(flexmasks.__file__, flexmasks.__version__)"
    assert run("-c", where).split() == [str(site / "flexmasks/__init__.py"), flexmasks.__version__]
    assert "skipped:" in run("-m", "flexmasks", "demo")
    assert flexmasks.__version__ in run("-m", "flexmasks", "--version")
    shown = "import sys; sys.path.append(sys.argv[1]); import gallery; print(gallery.code('mask', 'tree'))"
    assert "parents = " in run("-c", shown, str(source / "recipes/site"))
    assert "SDPA" in run("-m", "flexmasks", "bench", "--mask", "causal", "--shape", "1,2,256,32")
    files = [
        "tests/masks/test_masks.py",
        "tests/masks/test_scores.py",
        "tests/masks/test_pickles.py",
        "tests/masks/test_orders.py",
    ]
    run("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *files, folder=source)

    run("-m", "pip", "uninstall", "-y", "setuptools")  # a newer one comes from the environment of the tests
    again = ("--force-reinstall", "--no-build-isolation")
    run("-m", "pip", "install", "--no-deps", "--no-index", *again, str(sdist))
    assert run("-c", where).split() == [str(site / "flexmasks/__init__.py"), flexmasks.__version__]
    assert "skipped:" in run("-m", "flexmasks", "demo")


# --- the table of versions ---


@pytest.fixture
def versions(tmp_path: Path) -> Any:
    """Return the script `.ci/versions` as a module that writes into a folder of the test."""
    loader = importlib.machinery.SourceFileLoader("versions", str(ROOT / ".ci/versions"))
    spec = importlib.util.spec_from_loader("versions", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.TABLE = tmp_path / "versions.json"
    return module


def row(torch: str, python: str = "3.11.7", numpy: str = "2.4.6", **others: Any) -> dict[str, Any]:
    return {"torch": torch, "python": python, "numpy": numpy} | others


def test_a_run_replaces_the_row_of_its_versions_only(versions: Any) -> None:
    for new in (row("2.15.0"), row("2.9.0"), row("2.15.0", "3.13.0"), row("2.15.0", numpy="1.26.4"), row("2.15.1")):
        versions.record(new)
    rows = json.loads(versions.TABLE.read_text())["rows"]
    assert rows == [row("2.9.0"), row("2.15.0", numpy="1.26.4"), row("2.15.1"), row("2.15.0", "3.13.0")]
    assert [file.name for file in versions.TABLE.parent.iterdir()] == ["versions.json"]


def test_the_script_knows_the_versions_of_the_constraints(versions: Any) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert versions.TRITON[pins["torch"].rpartition(".")[0]] == pins["triton"].rpartition(".")[0]
