"""Loops of attention whose masks have new tensors at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.model import Attend
from flexmasks.attention import attention, explain, varlen_attention
from flexmasks.masks.packed import packed
from flexmasks.scores.alibi import alibi_slopes
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.values import Mask

CALLS = 4  # calls of attention in a step
_DOCUMENT = 600  # mean number of tokens of a document
_WINDOW = 128  # keys before a query that it sees
_DRAWS = 8  # different tensors, which the steps take by turns
Shape = tuple[int, int, int, int]  # batch, heads, length, head size
Prepare = Callable[[Tensor], Attend]
Mod = Callable[..., Tensor]


class Draws:
    """Tensors of many steps, drawn before the first step.

    A step copies its tensor, because a new tensor is a new object. So does a step with old tensors, which does not use
    the copy.
    """

    def __init__(self, drawn: Tensor) -> None:
        self._drawn, self._steps = list(drawn.unbind()), 0
        self._place = drawn[0].clone()

    def new(self) -> Tensor:
        """Return a new tensor with new values."""
        self._steps += 1
        return self._drawn[self._steps % len(self._drawn)].clone()

    def old(self) -> Tensor:
        """Return a tensor that was there before, with the same values as `new`."""
        self.new()
        return self._drawn[self._steps % len(self._drawn)]

    def in_place(self) -> Tensor:
        """Return the same tensor with new values."""
        return self._place.copy_(self.new())


@dataclass(frozen=True)
class Loop:
    """Calls of attention whose mask has a tensor."""

    name: str
    draw: Callable[[int, int, torch.Generator], Tensor]  # of batch, length: [draws, ...]
    arguments: Callable[[Tensor], dict[str, Any]]  # from the tensor to keyword arguments of `attention`
    mask_mod: Callable[[Tensor, int], Mod]  # the same mask for torch, of the tensor and the length
    has_alibi: bool = False
    is_varlen: bool = False  # q, k, v are [tokens, heads, head size], and the tensor has offsets


def draw_ids(batch: int, length: int, generator: torch.Generator, document: int = _DOCUMENT) -> Tensor:
    """Return document ids, [draws, batch, length], with random cuts.

    document: the mean number of tokens of a document.
    """
    cuts = torch.rand(_DRAWS, batch, length, generator=generator, device=generator.device) < 1 / document
    return cuts.cumsum(-1)


def draw_lengths(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return lengths of sequences, [draws, batch]."""
    return torch.randint(length // 4, length + 1, (_DRAWS, batch), generator=generator, device=generator.device)


def draw_padding(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return booleans of the keys that are no padding, [draws, batch, length]."""
    return torch.arange(length, device=generator.device) < draw_lengths(batch, length, generator)[..., None]


def draw_offsets(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return where sequences laid end to end start and end.

    The offsets, [draws, sequences + 1], cover all tokens of all batch elements.
    """
    tokens = batch * length
    order = torch.rand(_DRAWS, tokens - 1, generator=generator, device=generator.device)
    cuts = order.topk(max(tokens // _DOCUMENT - 1, 1), dim=-1).indices.sort(dim=-1).values + 1
    return F.pad(F.pad(cuts, (1, 0)), (0, 1), value=tokens).int()


def documents(ids: Tensor) -> Mask:
    """Return the mask of packed documents, causal inside each."""
    return get_mask("causal") & get_mask("document", document_ids=ids)


def documents_mod(ids: Tensor, length: int = 0) -> Mod:
    """Return the same mask as torch takes it."""
    return lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])


def _lengths_mod(lengths: Tensor, length: int) -> Mod:
    return lambda b, h, q, kv: (kv <= q) & (q < lengths[b]) & (kv < lengths[b])


def _padding_mod(real: Tensor, length: int) -> Mod:
    return lambda b, h, q, kv: real[b, kv]


def offsets_mod(offsets: Tensor, length: int) -> Mod:
    """Return the causal mask inside sequences laid end to end, as torch takes it."""
    places = torch.arange(length, dtype=offsets.dtype, device=offsets.device)
    sequences = torch.bucketize(places, offsets[1:], right=True)
    return lambda b, h, q, kv: (q >= kv) & (sequences[q] == sequences[kv])


LOOPS = [
    Loop("documents", draw_ids, lambda ids: {"mask": documents(ids)}, documents_mod),
    Loop("grouped_tril", draw_lengths, lambda n: {"mask": "grouped_tril", "seq_lens": n}, _lengths_mod),
    Loop("key_padding", draw_padding, lambda real: {"mask": "key_padding", "attention_mask": real}, _padding_mod),
    Loop("a lambda over document ids", draw_ids, lambda ids: {"mask": documents_mod(ids)}, documents_mod),
    Loop(
        "documents, ALiBi",
        draw_ids,
        lambda ids: {"mask": documents(ids), "score": "alibi"},
        documents_mod,
        has_alibi=True,
    ),
    Loop("varlen_attention", draw_offsets, lambda n: {"mask": packed("causal", n)}, offsets_mod, is_varlen=True),
]


def _causal_mod(drawn: Tensor, length: int) -> Mod:
    return lambda b, h, q, kv: q >= kv


def _window_mod(drawn: Tensor, length: int) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= _WINDOW)


# Loops with gradients on a CPU. The first two masks are the same at every step, and leave the tensor alone.
WITH_GRADIENTS = [
    Loop("causal", draw_lengths, lambda _: {"mask": "causal"}, _causal_mod),
    Loop("sliding_window", draw_lengths, lambda _: {"mask": "sliding_window", "window": _WINDOW}, _window_mod),
    *(loop for loop in LOOPS if not loop.is_varlen),
]


def by_flexmasks(loop: Loop) -> Prepare:
    """Return attention as users of this library write it."""

    def prepare(drawn: Tensor) -> Attend:
        if loop.is_varlen:
            return lambda q, k, v: varlen_attention(q, k, v, drawn, mask="causal")
        arguments = loop.arguments(drawn)
        return lambda q, k, v: attention(q, k, v, **arguments)

    return prepare


def by_torch(loop: Loop, shape: Shape, device: torch.device, dynamic: bool | None = False) -> Prepare:
    """Return attention as users of torch write it; dynamic: as torch.compile has it."""
    batch, heads, length, _ = shape
    create, flex = compiled_create(dynamic), compiled_flex(dynamic)
    slopes = torch.tensor(alibi_slopes(heads), device=device)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - slopes[h] * (q - kv)

    score_mod = alibi if loop.has_alibi else None

    def prepare(drawn: Tensor) -> Attend:
        block_mask = create(loop.mask_mod(drawn, length), batch, length, device)
        if not loop.is_varlen:
            return lambda q, k, v: flex(q, k, v, score_mod, block_mask)

        def attend(*tokens: Tensor) -> Tensor:
            out: Tensor = flex(*(x.transpose(0, 1)[None] for x in tokens), score_mod, block_mask)
            return out[0].transpose(0, 1)

        return attend

    return prepare


def by_sdpa(loop: Loop, shape: Shape, device: torch.device) -> Prepare:
    """Return attention by SDPA, with the mask as a tensor made at each step."""
    batch, heads, length, _ = shape
    b, h, q, kv = indices(batch, heads, length, device)
    slopes = torch.tensor(alibi_slopes(heads), device=device)

    def prepare(drawn: Tensor) -> Attend:
        seen = loop.mask_mod(drawn, length)(b, h, q, kv)
        mask = torch.where(seen, -slopes[h] * (q - kv), -torch.inf) if loop.has_alibi else seen
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return prepare


def indices(batch: int, heads: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return indices b, h, q and kv that broadcast to [batch, heads, length, length]."""
    b, h, q, kv = (torch.arange(n, device=device) for n in (batch, heads, length, length))
    return b[:, None, None, None], h[:, None, None], q[:, None], kv


def compiled_create(dynamic: bool | None = False) -> Callable[[Mod, int, int, torch.device], BlockMask]:
    """Return a compiled create_block_mask of a mask that does not depend on the head."""
    create = torch.compile(create_block_mask, dynamic=dynamic)
    return lambda mask_mod, batch, length, device: create(mask_mod, batch, None, length, length, device=str(device))


def compiled_flex(dynamic: bool | None = False) -> Callable[..., Tensor]:
    """Return flex_attention, compiled for one kind of call."""
    return torch.compile(flex_attention, dynamic=dynamic, fullgraph=True)


class Chain:
    """Attentions in a chain that share a mask, and a backward pass.

    calls: how many attentions; backward: whether there is a backward pass, by default on a GPU.
    """

    def __init__(
        self, loop: Loop, shape: Shape, device: torch.device, dtype: torch.dtype, calls: int = CALLS,
        backward: bool | None = None,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        batch, heads, length, size = shape
        self._loop, self._calls = loop, calls
        self._backward = device.type == "cuda" if backward is None else backward
        self._q, self._k, self._v = (
            torch.randn(
                (length, heads, size) if loop.is_varlen else shape,
                device=device,
                dtype=dtype,
                requires_grad=self._backward,
            )
            for _ in range(3)
        )
        self._upstream = torch.randn_like(self._q)
        self.drawn = loop.draw(batch, length, torch.Generator(device).manual_seed(0))

    def run(self, prepare: Prepare, drawn: Tensor) -> Tensor:
        """Run one step, and return the last output."""
        attend, x = prepare(drawn), self._q
        for _ in range(self._calls):
            x = attend(x, self._k, self._v)
        if self._backward:
            torch.autograd.grad(x, (self._q, self._k, self._v), self._upstream)
        return x.detach()

    def backend(self, drawn: Tensor) -> str:
        """Return the backend that runs the calls."""
        tensors = [x.detach().requires_grad_(self._backward) for x in (self._q, self._k, self._v)]
        if self._loop.is_varlen:
            tensors = [x.transpose(0, 1)[None] for x in tensors]
        return explain(*tensors, **self._loop.arguments(drawn)).backend


def in_place(chain: Chain, prepare: Prepare, draws: Draws) -> Tensor:
    """Run a step whose tensor changes in place."""
    return chain.run(prepare, draws.in_place())


class Replayed:
    """Steps by a CUDA graph, captured at the first step, whose tensor changes in place."""

    def __init__(self, step: Callable[[Tensor], Tensor], draws: Draws) -> None:
        self._step, self._draws = step, draws
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        place = self._draws.in_place()
        if self._graph is None:
            self._graph, self._output = self._capture(place)
        self._graph.replay()
        return self._output

    def _capture(self, place: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step(place)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._step(place)
        return graph, output
