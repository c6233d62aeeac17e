"""Functions that graphs of torch.compile hold whole, and what is handed on to them.

Such a function takes its tensors and numbers one by one, and a text that says where they belong.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch

from flexmasks import compat
from flexmasks.compat import constant_in_graphs

value_of_text = functools.lru_cache(maxsize=1024)(ast.literal_eval)


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile not look into a function, whose operations on tensors enter the graph.

    torch traces how Python takes each tuple among the arguments apart, which would be most of the time of a model's
    first call. So tensors and numbers are handed on one by one, and a text says where they belong. What is Flat already
    needs no more work.

    function: takes tensors, numbers, strings, None and tuples of them, and returns tensors, which follow from what the
        arguments hold, the library and the device alone: torch keeps compiled graphs in files.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    _IN_GRAPHS[name] = function
    _key_of_library()  # before the files may change
    with compat.IMPORTING:
        torch.compiler.allow_in_graph(run_in_graph)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        leaves: list[Any] = []
        text = text_of(args, leaves)
        made = run_in_graph(name, text, *leaves)
        if isinstance(made, torch.Tensor) and made.ndim == _DIMS_OF_ERROR:
            raise (TypeError if made.shape[0] else ValueError)(f"{_message(made.shape[-1])}")
        return made

    return call


_DIMS_OF_ERROR = 9
_MESSAGES: list[str] = []


def _noted(error: ValueError | TypeError) -> torch.Tensor:
    """Return a tensor whose shape stands for an error: one that `run_in_graph` raised would reach the user inside pages
    of torch's own.
    """
    if str(error) not in _MESSAGES:
        _MESSAGES.append(str(error))
    shape = isinstance(error, TypeError), *[0] * (_DIMS_OF_ERROR - 2), _MESSAGES.index(str(error))
    return torch.empty(tuple(map(int, shape)))


@constant_in_graphs
def _message(place: int) -> str:
    return _MESSAGES[place]


_IN_GRAPHS: dict[str, Callable[..., Any]] = {}


def run_in_graph(name: str, text: str, *leaves: Any) -> Any:
    """Run a function that `in_graph` marked.

    Graphs of torch.compile hold this function by its name, so it is public.
    """
    _let_torch_keep_graphs()
    try:
        return _IN_GRAPHS[name](*Flat(text, tuple(map(_plain, leaves))).values())
    except (ValueError, TypeError) as error:
        is_looked_at = any(isinstance(x, compat.FakeTensor) for x in leaves) and not compat.in_tracing_mode()
        # The user's code has caught an error with which a graph runs.
        if is_for_user(error) and (is_looked_at or str(error) in _MESSAGES):
            return _noted(error)
        raise


def is_for_user(error: Exception) -> bool:
    """Return whether a function of `in_graph` raises an error to the user as it is."""
    return isinstance(error, (ValueError, TypeError)) and str(error).startswith("flexmasks")


def _plain(value: Any) -> Any:
    """Return a value without the kinds of dict and list that graphs hold."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _let_torch_keep_graphs() -> None:
    """Let torch keep compiled graphs with `run_in_graph` on the disk.

    Without it a new process differentiates and lowers each graph again, which takes most of a model's first call. The
    setting is documented, in a private module; torch makes its value part of the keys of its cache.
    """
    config = compat.inductor_config
    # Torch 2.11 leaves the default dtype out of its keys.
    name, key = f"{__name__}.{run_in_graph.__name__}", f"{_key_of_library()} {torch.get_default_dtype()}"
    known = getattr(config, "unsafe_marked_cacheable_functions", None)
    if _key_of_library() and known is not None and known.get(name) != key:
        config.unsafe_marked_cacheable_functions = known | {name: key}


@functools.cache
def _key_of_library() -> str:
    """Return a text that changes with the sources of flexmasks and the version of flash-attn-4.

    It is empty if there are no sources.
    """
    key, folder = hashlib.sha256(), pathlib.Path(__file__).parent
    paths = sorted(folder.rglob("*.py"))
    for path in paths:
        text = path.read_bytes()
        key.update(f"{path.relative_to(folder)} {len(text)} ".encode() + text)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        key.update(importlib.metadata.version("flash-attn-4").encode())
    return key.hexdigest() if paths else ""


@constant_in_graphs
def _repr(value: Any) -> str:
    return repr(value)


def text_of_constants(values: tuple[Any, ...]) -> str:
    """Return a text of values that torch knows while it traces, for `value_of_text`."""
    return f"{_repr(values)}"  # torch has no guard for what `_repr` returns; a string of it needs none


_PLACE = 0  # where a tensor or number belongs
_IN_TEXT = (bool, str, type(None))


class Flat(NamedTuple):
    """Nested tuples taken apart, for functions of `in_graph`, which get the tuples."""

    text: str  # see `text_of`
    leaves: tuple[Any, ...]

    def values(self) -> tuple[Any, ...]:
        """Return the nested tuples."""
        return cast(tuple[Any, ...], _filled(value_of_text(self.text), iter(self.leaves)))


def text_of(values: tuple[Any, ...], leaves: list[Any]) -> str:
    """Return a text of nested tuples, and append their tensors and numbers to `leaves`.

    The text is that of Python, with 0 for a leaf. torch traces this function.
    """
    return text_of_constants(_places(values, leaves))


def _places(values: tuple[Any, ...], leaves: list[Any]) -> tuple[Any, ...]:
    """Return values with places in place of tensors and numbers, and append these to `leaves`.

    A list holds the text of what is flat already.
    """
    places: list[Any] = []
    for value in values:
        if isinstance(value, _IN_TEXT):
            places.append(value)
        elif not isinstance(value, tuple):
            leaves.append(value)
            places.append(_PLACE)
        elif isinstance(value, Flat):
            leaves.extend(value.leaves)
            places.append([value.text])
        else:
            places.append(_places(value, leaves))
    return tuple(places)


def _filled(place: Any, leaves: Iterator[Any]) -> Any:
    place = value_of_text(place[0]) if isinstance(place, list) else place
    if isinstance(place, tuple):
        return tuple([_filled(inner, leaves) for inner in place])
    return next(leaves) if place is _PLACE else place
