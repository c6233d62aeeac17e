"""Errors of masks and scores that name them, and the line of the user's code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flexmasks.blocks.build import materialize
from flexmasks.blocks.decide import dependence
from flexmasks.errors import users_frames, users_line
from flexmasks.plans.data import CannotBeData
from flexmasks.ranges.context import Refused
from flexmasks.spec.parameters import Size, how_to_move
from flexmasks.spec.values import Mask, Modifier

_ERRORS_OF_FUNCTIONS = (
    ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError, NameError, AssertionError,
)  # fmt: skip


@contextlib.contextmanager
def naming(value: Modifier) -> Iterator[None]:
    """Turn errors of a mask's or score's own function into errors that name it, and the line of the user's code.

    Their tracebacks show that code alone.
    """
    what = f"flexmasks {value._kind} {value!r}"
    try:
        yield
    except CannotBeData as error:
        raise type(error)(f"{what}: {error}") from None
    except torch.OutOfMemoryError:
        raise
    except _ERRORS_OF_FUNCTIONS as error:
        text, is_refusal = str(error), isinstance(error, Refused)
        if isinstance(error, ValueError | TypeError):
            if text.startswith("flexmasks"):
                raise
            text = f"{what}: {text}"
        elif "data-dependent control flow" in text or ".item()" in text:
            is_refusal = True
            text = (
                f"{what} may not decide by `if`, `and`, `or` or `not`, nor read the value of an index or score, "
                "which stands for many values. Use torch.where, torch.minimum and torch.maximum, `&`, `|` and `~`."
            )
        else:
            text = f"{what} failed on index tensors: {type(error).__name__}: {text[:300]}"
        if "device" in text or " on meta" in text:
            text = f"{text.rstrip('.')}{_whereabouts(value)}"
        place, trace = users_line(error.__traceback__, value._definition.function), users_frames(error.__traceback__)
        named = (TypeError if isinstance(error, TypeError) else ValueError)(f"{text} ({place})" if place else text)
        if is_refusal or (trace is None and isinstance(error, ValueError | TypeError)):  # the message says all
            raise named.with_traceback(trace) from None
        error.__suppress_context__ = True  # what this library tried before
        raise named from error.with_traceback(trace or error.__traceback__)


def named(value: Modifier, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of a mask or score whose errors name it."""

    def naming_errors(*indices: Tensor) -> Tensor:
        with naming(value):
            return function(*indices)

    return naming_errors


def _whereabouts(value: Modifier) -> str:
    named = value._named_tensors()
    here = "".join(f"; {name} is on {tensor.device}" for name, tensor in named)
    return here + next((f"; {how_to_move(t.device)}" for _, t in named if t.is_meta), "")


def check_open_extents(mask: Mask, mask_mod: Callable[..., Tensor], size: Size, extents: tuple[str, ...]) -> None:
    """Raise ValueError if a mask depends on the index of an open extent. The mask's own errors come first."""
    for extent in extents:
        doubled = replace(size, **{extent: 2 * getattr(size, extent)})
        try:
            sizes = dependence(mask_mod, doubled.batch, doubled.heads, size.device)
        except Exception as error:
            # An index out of range shows a dependence; any other error is raised when the mask is used.
            if not isinstance(error, IndexError) and "indexes a dimension" not in str(error):
                continue
            sizes = doubled.batch, doubled.heads
        if sizes[extent == "heads"] > 1:
            with naming(mask):
                materialize(mask_mod, size.batch, size.heads, 1, 1, size.device)
            raise ValueError(
                f"flexmasks: the mask {mask!r} depends on its {extent.removesuffix('s')} index; pass `{extent}`, the "
                "size of that index."
            )
