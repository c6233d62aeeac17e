"""Masks of a model's layers, with pictures."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from flexmasks import Mask, Picture, Plan, draw, get_mask
from flexmasks.extend import Blocks, says_what_to_write
from flexmasks.integrations.huggingface.attention import watched

_CALL = "flexmasks.integrations.huggingface.masks"
_TEXT_COLUMNS = 40  # of a picture among several


@dataclass(frozen=True, eq=False)
class LayerMask:
    """A mask with the sizes of a layer's call; printed, or displayed by Jupyter, it is its picture.

    Two are equal if their masks and sizes are.

    mask: the mask.
    q_offset: the position of the first query, as in `flexmasks.attention`.
    q_len, kv_len, batch, heads: the numbers of queries, keys, batch elements and heads of queries.
    """

    mask: Mask
    q_offset: int | Tensor
    q_len: int
    kv_len: int
    batch: int
    heads: int

    @functools.cached_property
    def blocks(self) -> Blocks:
        """Return the counts of its blocks of 128 x 128, over all batch elements."""
        return self.mask.blocks(self.q_len, self.kv_len, **self._extents)

    @property
    def sparsity(self) -> float:
        """Return the share of all pairs in blocks that kernels skip, from 0 to 1."""
        return self.blocks.sparsity

    def draw(self, b: int = 0, h: int = 0, block_size: int | tuple[int, int] | None = None) -> Picture:
        """Return the picture of a batch element and head, as `flexmasks.draw`."""
        return draw(self.mask, self.q_len, self.kv_len, b=b, h=h, block_size=block_size, **self._extents)

    @property
    def _extents(self) -> dict[str, Any]:
        return {"batch": self.batch, "heads": self.heads, "q_offset": self.q_offset}

    @property
    def _key(self) -> tuple[Any, ...]:
        q_offset = torch.as_tensor(self.q_offset)
        offsets = tuple(q_offset.shape), tuple(q_offset.flatten().tolist())
        return self.mask, self.q_len, self.kv_len, self.batch, self.heads, offsets

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, LayerMask) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def _title(self) -> str:
        return f"{self.mask!r}, {self.q_len:,} queries, {self.kv_len:,} keys, batch {self.batch}"

    def __repr__(self) -> str:
        return f"{self._title()}\n{self.draw().text()}"

    def _repr_html_(self) -> str:
        return f"<div>{self.draw().svg()}</div>"


class LayerMasks(Mapping[str, LayerMask]):
    """Masks of a model's layers by the names of the modules, as `masks` returns them.

    Printed, or displayed by Jupyter, they show a picture of each different mask, with its sparsity and the layers that
    have it.
    """

    def __init__(self, by_name: Mapping[str, LayerMask]) -> None:
        self._by_name = dict(by_name)

    def __getitem__(self, name: str) -> LayerMask:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @functools.cached_property
    def distinct(self) -> list[tuple[LayerMask, list[str]]]:
        """Return each different mask, and the names of the layers that have it."""
        found: dict[LayerMask, list[str]] = {}
        for name, mask in self._by_name.items():
            found.setdefault(mask, []).append(name)
        return list(found.items())

    @property
    def sparsity(self) -> float:
        """Return the mean sparsity of all layers."""
        return sum(len(names) * mask.sparsity for mask, names in self.distinct) / len(self)

    def _total(self) -> str:
        different = len(self.distinct)
        return (
            f"{len(self)} call{'s' * (len(self) > 1)} of attention, {different} different mask{'s' * (different > 1)}; "
            f"on average {self.sparsity:.1%} of the pairs lie in skipped blocks"
        )

    def __repr__(self) -> str:
        columns = min(_TEXT_COLUMNS, shutil.get_terminal_size().columns)
        parts = [self._total()]
        for mask, names in self.distinct:
            sparsity = f"{mask.sparsity:.1%} skipped in blocks of 128 x 128"
            parts.append(f"{_shortened(names)}\n{mask._title()}\n{sparsity}\n{mask.draw().text(columns)}")
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(self._total())}</p>"]
        for mask, names in self.distinct:
            title = f"<b>{escape(_shortened(names))}</b><br>{mask.sparsity:.1%} skipped in blocks of 128 x 128"
            style = "display: inline-block; vertical-align: top; margin: 0 1em 1em 0; max-width: 30em"
            parts.append(f'<div style="{style}"><p>{title}</p>{mask.draw().svg()}</div>')
        return f"<div>{''.join(parts)}</div>"


@says_what_to_write()
def masks(model: nn.Module, *args: Any, **inputs: Any) -> LayerMasks:
    """Return the mask of each attention layer of a model, with pictures.

    The model runs once with these inputs, in evaluation mode, without gradients, and compiles nothing. A cache
    among the inputs grows by the step. Most decoders look for packed rows in `position_ids` only with
    `use_cache=False`. Score changes, such as soft-caps, are no part of a mask.

    Args:
        model: a model of transformers that runs by `attn_implementation="flexmasks"`.
        args, inputs: arguments of the model, such as `input_ids` and `attention_mask`.

    Returns:
        The masks by the names of their modules, in the order of the calls, a read-only dictionary. Further calls of the
        same module have names as "layer (call 2)". `.distinct` lists each different mask once, with the layers that
        have it.

    Raises:
        ValueError: no layer of the model attends by flexmasks.

    Example:
        >>> from flexmasks.integrations import huggingface
        >>> layers = huggingface.masks(model, input_ids=ids, attention_mask=padding)  # doctest: +SKIP
        >>> layers  # in Jupyter: a picture of each different mask  # doctest: +SKIP
        >>> layers["model.layers.0.self_attn"].sparsity  # doctest: +SKIP
        0.71875
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_CALL}: `model` must be a torch.nn.Module, got {type(model).__name__}.")
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, LayerMask] = {}

    def watch(module: nn.Module, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> None:
        if module not in names:
            return  # of another model, in another thread
        name, calls = names[module] or type(module).__name__, 1
        while name in found:
            calls += 1
            name = f"{names[module]} (call {calls})"
        given = arguments["block_mask"].mask_mod if "block_mask" in arguments else arguments["mask"]
        if isinstance(given, Plan):
            arguments |= {"mask": given.mask, "q_offset": given.q_offset}
            given = given.mask
        batch, heads, q_len, _ = query.shape
        arguments["backend"] = "reference"  # it compiles nothing, and its memory is bounded on all devices
        found[name] = LayerMask(get_mask(given), arguments.get("q_offset", 0), q_len, key.shape[2], batch, heads)

    modes = {module: module.training for module in names}
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), watched(watch):
            model(*args, **inputs)
    finally:
        for module, is_training in modes.items():
            module.training = is_training
    if not found:
        raise ValueError(
            f"{_CALL}: no layer of {type(model).__name__} attends by flexmasks. Call `huggingface.register()`, and "
            'load the model with attn_implementation="flexmasks".'
        )
    return LayerMasks(found)


def _shortened(names: list[str]) -> str:
    """Return names of layers, with the numbers of layers of the same kind together."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = re.fullmatch(r"(.*\.|)(\d+)(\..*|)", name)
        start, number, end = parts.groups() if parts else (name, None, "")
        numbers.setdefault((start, end), []).extend([] if number is None else [int(number)])
    return ", ".join(f"{start}{_spans(given)}{end}" for (start, end), given in numbers.items())


def _spans(numbers: list[int]) -> str:
    """Return numbers with neighbors joined, "{0-4,6}" for example."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] + 1 == n:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(numbers) < 2 else f"{{{text}}}"
