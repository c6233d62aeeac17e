"""Which mask each attention call of a model really has, with pictures."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import Comparison, Mask, Picture, Plan, compare, draw, get_mask
from flexmasks.extend import MaskLike, says_what_to_write, shown_by
from flexmasks.integrations.layers import LayerMask
from flexmasks.integrations.probe import probed

_CALL = "flexmasks.watch"
_TURN = threading.RLock()  # threads that watch replace the same functions
_TEXT_COLUMNS = 40  # of a picture among several


class Watched(dict[str, LayerMask]):
    """The masks of a model's attention calls by the names of their modules, as `flexmasks.watch` returns it.

    Printed, or displayed by Jupyter, it says which calls differ from the expected mask, and shows a picture of each
    different mask, with its sparsity and the layers that have it.

    Attributes:
        differing: the calls whose mask is not the expected one, each with `flexmasks.compare(expected, mask, ...)`.
        unseen: the modules whose class is called attention, of which no call was seen.
        weights: the attention weights of the calls, [B, H, Q, KV], where the model computes them, as with
            `output_attentions=True` among its inputs; printed, there is a picture of the mean over the heads.
    """

    def __init__(self, model: nn.Module, expected: Mapping[str, Mask], probe: bool, rows: Sequence[int] | None) -> None:
        super().__init__()
        self.differing: dict[str, Comparison] = {}
        self.unseen: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self._model, self._expected, self._probe, self._rows = model, expected, probe, rows
        self._names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self._whole = f"{type(model).__name__} from end to end"
        self._fitting: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        self._context = self._watching()
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        calls: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        called = {n: m for m, n in self._names.items() if re.search("attention|attn", type(m).__name__, re.I)}
        layers = [m for n, m in called.items() if not any(other.startswith(f"{n}.") for other in called)]
        if self._probe:
            calls = probed(self._model, self._hear, self._rows, layers)
        elif "transformers" in sys.modules:
            from flexmasks.integrations.huggingface.calls import calls_heard

            calls = calls_heard(self._model, self._hear, lambda x: self.weights.update({next(reversed(self)): x}))
        with _TURN, torch.compiler.set_stance("force_eager"), calls:
            yield
        seen = {f"{name.partition(' (call')[0]}." for name in self}
        names = [self._names[layer] for layer in layers]
        self.unseen = [n for n in names if not any(s.startswith(f"{n}.") or f"{n}.".startswith(s) for s in seen)]
        self.differing = self._compared()

    def _hear(self, module: nn.Module | None, layer: LayerMask) -> None:
        own = self._whole if module is None else self._names[module]
        calls = sum(name == own or name.startswith(f"{own} (call") for name in self)
        name = f"{own} (call {calls + 1})" if calls else own
        kinds, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
        kind = kinds[index] if kinds and index is not None else None
        self[name] = layer
        self._fitting[name] = [p for p in self._expected if p == kind or fnmatch.fnmatchcase(own, p)][:1]

    def _compared(self) -> dict[str, Comparison]:
        unused = set(self._expected).difference(*self._fitting.values())
        if unused:
            seen = _shortened(list(self)) or "none: pass probe=True for models whose calls are not transformers'"
            raise ValueError(f"{_CALL}: no call fits {', '.join(unused)} in `mask`. Seen were {seen}.")
        found: dict[tuple[LayerMask, str, bool], Comparison] = {}
        differing: dict[str, Comparison] = {}
        for name, layer in self.items():
            for pattern in self._fitting[name]:
                key = layer, pattern, name == self._whole
                found[key] = found.get(key) or _comparison(layer, self._expected[pattern], name == self._whole)
                differing |= {} if found[key].equal else {name: found[key]}
        return differing

    @property
    def distinct(self) -> list[tuple[LayerMask, list[str]]]:
        """Return each different mask, and the names of the layers that have it."""
        found: dict[LayerMask, list[str]] = {}
        for name, mask in self.items():
            found.setdefault(mask, []).append(name)
        return list(found.items())

    @property
    def sparsity(self) -> float:
        """Return the mean sparsity of all layers."""
        return sum(len(names) * mask.sparsity for mask, names in self.distinct) / len(self)

    def _findings(self) -> list[str]:
        what = "modules that mix tokens" if self._probe else "calls of attention"
        lines = [f"{len(self)} {what} were seen, with {len(self.distinct)} different masks"]
        if self:
            lines[0] += f"; on average {self.sparsity:.1%} of the pairs lie in skipped blocks"
        for name, found in self.differing.items():
            more = f"{found.only_b:,} pairs more and {found.only_a:,} less than expected"
            lines.append(f"{name} shows {more}, the first (b, h, q, kv) = {found.first}")
        more = "" if self._probe else "; `probe=True` sees what they do"
        return lines + ([f"not seen: {_shortened(self.unseen)}{more}"] if self.unseen else [])

    def __repr__(self) -> str:
        columns = min(_TEXT_COLUMNS, shutil.get_terminal_size().columns)
        parts = ["\n".join(self._findings())]
        for mask, names in self.distinct:
            sparsity = f"{mask.sparsity:.1%} skipped in blocks of 128 x 128"
            parts.append(f"{_shortened(names)}\n{mask.title()}\n{sparsity}\n{mask.draw().text(columns)}")
        parts += [f"{name}\n{_mean(weights).text(columns)}" for name, weights in self.weights.items()]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<p>{'<br>'.join(map(escape, self._findings()))}</p>"]
        pictures = [
            (_shortened(names), f"{mask.sparsity:.1%} skipped in blocks of 128 x 128", mask.draw())
            for mask, names in self.distinct
        ]
        pictures += [(name, "mean over the heads", _mean(weights)) for name, weights in self.weights.items()]
        for name, what, picture in pictures:
            style = "display: inline-block; vertical-align: top; margin: 0 1em 1em 0; max-width: 30em"
            parts.append(f'<div style="{style}"><p><b>{escape(name)}</b><br>{what}</p>{picture.svg()}</div>')
        return f"<div>{''.join(parts)}</div>"


@says_what_to_write()
def watch(
    model: nn.Module,
    *args: Any,
    mask: MaskLike | Plan | BlockMask | Mapping[str, MaskLike | Plan | BlockMask] | None = None,
    probe: bool = False,
    rows: Sequence[int] | None = None,
    **inputs: Any,
) -> Watched:
    """Find out which mask each attention layer of a model really has, and which layers drop or change it.

    With inputs the model runs once, in evaluation mode and without gradients. Without inputs the result is a context
    that sees the calls inside it: `with flexmasks.watch(model) as layers: model(ids)`. Nothing is compiled meanwhile.

    Seen are the attention functions that models of transformers call, whatever `attn_implementation` says. Up to 4,096
    x 4,096 pairs, each function but this library's is called again with values that tell which pairs it shows. So a
    mask that the function itself leaves out is found as well: "eager" adds booleans to the scores as 0 and 1. Longer
    masks are those that the arguments say. A mask that is data gets a name if it is a causal mask, a window or a full
    one, with documents or padding. Score changes, such as soft-caps, are no part of a mask, unless they lower a weight
    to 0. A cache among the inputs grows by the step. Most decoders look for packed rows in `position_ids` only with
    `use_cache=False`.

    With `probe=True` modules of any model of torch are seen by what they do: the gradient of a row of their output with
    respect to their input is 0 at tokens that the row does not see. Found are the modules that are called attention,
    the innermost ones that mix tokens, and the model from end to end, in which tokens may also mix outside of modules.
    Inputs and outputs are [batch, tokens, width]. A probe does not tell whether a token sees itself, nor heads apart; a
    weight that is rounded to 0 hides a key; and the functions that run need a backward pass, which flex_attention lacks
    on a CPU.

    Args:
        model: a model of transformers, or with `probe` any model of torch.
        args, inputs: arguments of the model, such as `input_ids` and `attention_mask`.
        mask: what the layers should have, one mask for all or several by kinds of layers as transformers names them
            ("sliding_attention") and by patterns of names ("decoder.*.self_attn"); the first that fits counts. With
            `probe`, rows that it hides are not compared. Its positions are those of the mask that was seen; without
            one, the last query is at the last key.
        probe: whether to see what modules do, in place of their calls.
        rows: the queries that a probe looks at, each by a backward pass of each module; by default 64, or all of fewer.

    Returns:
        The masks by the names of the modules, in the order of the calls, a dictionary. Further calls of a
        module have names as "layer (call 2)". `.distinct` lists each different mask once, with the layers that have it;
        `.differing` has the comparison of each call that differs from `mask`; `.unseen` lists the modules whose class
        is called attention, of which no call was seen; `.weights` has the attention weights of calls that return them.

    Raises:
        ValueError: a mask is given for calls of which none was seen, or it is for another length.

    Example:
        >>> import torch
        >>> import flexmasks
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
        >>> seen = flexmasks.watch(layer, x, x, x, mask="causal", probe=True)
        >>> seen["MultiheadAttention"].mask
        full()
        >>> seen.differing["MultiheadAttention"].first
        (0, 0, 0, 1)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_CALL}: `model` must be a torch.nn.Module, got {type(model).__name__}.")
    expected = {} if mask is None else mask if isinstance(mask, Mapping) else {"*": mask}
    watched = Watched(model, {pattern: _as_mask(given) for pattern, given in expected.items()}, probe, rows)
    if args or inputs:
        training = [module for module in model.modules() if module.training]
        try:
            model.eval()
            with torch.no_grad(), watched:
                model(*args, **inputs)
        finally:
            for module in training:
                module.training = True
    return watched


def _as_mask(given: Any) -> Mask:
    given = shown_by(given) if isinstance(given, BlockMask) else given
    return get_mask(given.mask if isinstance(given, Plan) else given)


def _comparison(layer: LayerMask, expected: Mask, is_whole: bool) -> Comparison:
    """Compare the expected mask with a layer's, and with what a probe found at its rows. Of what reaches the output of
    a whole model, that alone counts which masks as expected do not let through.
    """
    layer, expected = replace(layer, mask=layer.mask.to("cpu")), expected.to("cpu")
    if layer.rows is None:
        return compare(expected, layer.mask, layer.q_len, layer.kv_len, **layer.extents)
    found = layer.dense("cpu")
    wanted = replace(layer, mask=expected, q_offset=0).dense("cpu").any(1, keepdim=True)
    # A row that is expected to see nothing is padding, of which functions compute what they like.
    rows = torch.zeros(layer.q_len, 1, dtype=torch.bool).index_fill(0, torch.tensor(layer.rows), True)
    rows = rows & wanted.any(-1, keepdim=True)
    if layer.q_len == layer.kv_len:
        wanted = wanted | torch.eye(layer.q_len, dtype=torch.bool)
    while is_whole and not (further := wanted.float() @ wanted.float() > 0).equal(wanted):
        wanted = further
    return compare(wanted & rows, (found | wanted if is_whole else found) & rows, batch=layer.batch)


def _mean(weights: Tensor) -> Picture:
    """Return the picture of the mean of the first batch element's heads."""
    return draw(weights[0].float().mean(0))


def _shortened(names: list[str]) -> str:
    """Return names of layers, with the numbers of layers of the same kind together, such as "layers.{0-4,6}.attn"."""
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
