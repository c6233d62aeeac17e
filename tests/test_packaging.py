"""Distributions of the library: an editable install, and the files of a source distribution."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import flexmasks

ROOT = Path(__file__).parent.parent
_IGNORED = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".venv", "build", "dist"}
MADE = ("PKG-INFO", "setup.cfg", "flexmasks.egg-info/")  # files that setuptools adds

pytest.importorskip("setuptools", minversion="77")


def files_of_the_repository() -> list[str]:
    """Return the files that git knows or would add, or all but caches where there is no repository of git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = None
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed is not None and listed.returncode == 0:
        return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    files = [file.relative_to(ROOT) for file in ROOT.rglob("*") if file.is_file()]
    names = [str(file) for file in files if not _IGNORED & set(file.parts)]
    return [name for name in names if not name.startswith(MADE)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository in a folder named flexmasks."""
    folder = tmp_path_factory.mktemp("holder") / "flexmasks"
    for name in files_of_the_repository():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def build(clone: Path, kind: str, out: Path) -> Path:
    """Return the distribution that pip would build."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=300)
    assert not result.returncode, result.stderr
    (made,) = out.iterdir()
    return made


def test_the_source_distribution_has_all_files(clone: Path, tmp_path: Path) -> None:
    with tarfile.open(build(clone, "sdist", tmp_path)) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    assert sorted(name for name in names if not name.startswith(MADE)) == sorted(files_of_the_repository())
    assert {"tests/conftest.py", "tests/helpers.py", "tests/oracles/__init__.py", "constraints.txt"} <= set(names)


def test_the_wheel_has_the_package_only(clone: Path, tmp_path: Path) -> None:
    wheel = build(clone, "wheel", tmp_path)
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    wanted = {n for n in files_of_the_repository() if n.startswith("flexmasks/") and n.endswith(".py")}
    templates = {f"flexmasks/pictures/{name}.html" for name in ("frame", "gallery", "reference")}
    assert set(names) == wanted | templates | {"flexmasks/py.typed"}
    assert wheel.name.split("-")[:2] == ["flexmasks", flexmasks.__version__]


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
