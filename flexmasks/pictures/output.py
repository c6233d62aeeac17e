"""The terminal and the files that pictures and tables are written to."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

CALL = "flexmasks.show"  # the call that error messages name
WIDEST_TEXT = 80  # characters


def text_width() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST_TEXT)


def check_columns(columns: Any) -> int:
    if type(columns) is not int or columns < 1:
        raise ValueError(f"{CALL}: `columns` must be an int above 0, got {columns!r}.")
    return columns


def check_kind(path: Path) -> str:
    """The suffix of a picture's file; ValueError for another kind, ImportError if it needs matplotlib, which is
    missing.
    """
    kind = path.suffix.lower()
    if kind not in (".svg", ".html", ".txt", ".pdf", ".png"):
        raise ValueError(f"flexmasks: a picture is saved as .svg, .html, .txt, .pdf or .png, got {str(path)!r}.")
    if kind in (".pdf", ".png") and importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            f"flexmasks: a {kind} file needs matplotlib: `pip install matplotlib`; .svg, .html and .txt need nothing."
        )
    return kind


def check_writable(path: Path) -> None:
    """Raise OSError if a file cannot be written, before the work whose result it will hold. A file that exists keeps
    its contents, no new file stays.
    """
    _check_folder(path)
    existed = path.exists()
    path.open("ab").close()
    if not existed:
        path.unlink()


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"flexmasks: {str(path)!r} cannot be written, {str(path.parent)!r} is no folder.")


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file whole, text as UTF-8: a process that is killed meanwhile leaves the old one. The content goes to
    `path` with `.part` behind it, which then takes the file's place. What is no regular file, such as /dev/stdout, is
    written directly, and so is a file in a folder that takes no new ones. A file with this content stays as it is.
    """
    content = content.encode() if isinstance(content, str) else content
    path = Path(path).resolve()  # a link stays, and the file that it leads to is replaced
    _check_folder(path)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    if path.exists() and path.read_bytes() == content:
        return
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_bytes(content)
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    except PermissionError:
        path.write_bytes(content)
    finally:
        unfinished.unlink(missing_ok=True)
