"""The files of the repository, for tests and scripts that copy it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "build", "dist"}


def files() -> list[str]:
    """Return the files that git knows, and new ones in the folders of these.

    What else a user keeps beside them, such as a virtual environment of any name, does not belong to the repository.
    Where git cannot tell, as in an unpacked source distribution, these are all files but caches and environments.
    """
    known = _listed("--cached")
    if known is None:
        places = [place for place in ROOT.iterdir() if not (place / "pyvenv.cfg").exists()]
        found = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
        names = [file.relative_to(ROOT) for file in found if file.is_file()]
        return [str(name) for name in names if not (_CACHES & set(name.parts) or ".egg-info" in str(name))]
    folders = tuple({name.partition("/")[0] + "/" for name in known if "/" in name})
    new = [name for name in _listed("--others", "--exclude-standard") or () if name.startswith(folders)]
    return [name for name in known + new if (ROOT / name).exists()]  # deleted files are listed until the next commit


def _listed(*which: str) -> list[str] | None:
    """Return the names of files that git lists, or None where it cannot."""
    if not ((ROOT / ".git").exists() and shutil.which("git")):
        return None
    listed = subprocess.run(["git", "ls-files", "-z", *which], cwd=ROOT, capture_output=True, text=True)
    return None if listed.returncode else [name for name in listed.stdout.split("\0") if name]


def copy_to(folder: Path) -> Path:
    """Copy the files of the repository into a new folder, and return it."""
    for name in files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # of a file that is replaced right now
            shutil.copy2(ROOT / name, folder / name)
    return folder
