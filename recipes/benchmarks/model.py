"""A small language model that is trained on packed documents, with any attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k and v, [batch, heads, length, head size]
WAYS = ("eager", "compiled layers", "compiled")  # ways to run a model


class Sizes(NamedTuple):
    """Sizes of the model and its batches."""

    vocabulary: int = 1024
    width: int = 1024
    heads: int = 16
    layers: int = 12
    batch: int = 4
    length: int = 8192

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, length and head size of attention."""
        return self.batch, self.heads, self.length, self.width // self.heads


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        batch, length, width = x.shape
        together = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = together.permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A transformer from words to the loss of the next word.

    attend_of: from the third argument of `forward` to the attention of all layers.
    """

    def __init__(self, sizes: Sizes, attend_of: Callable[[Any], Attend]) -> None:
        super().__init__()
        self.attend_of = attend_of
        self.word = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.last, self.scores = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, words: Tensor, following: Tensor, packing: Any) -> Tensor:
        attend = self.attend_of(packing)
        x = self.word(words)
        for layer in self.layers:
            x = layer(x, attend)
        return F.cross_entropy(self.scores(self.last(x)).flatten(0, 1).float(), following.flatten())


class Training:
    """A model with its optimizer; a call is one training step, and returns the loss.

    All models start from the same weights, and see the same words at all steps.

    Args:
        sizes: sizes of the model and its batches.
        attend_of: attention, see Model.
        packing: returns what `attend_of` takes, at each step.
        device, dtype: of the model.
        way: one of WAYS. Layers and models are compiled without graph breaks.
    """

    def __init__(
        self,
        sizes: Sizes,
        attend_of: Callable[[Any], Attend],
        packing: Callable[[], Any],
        device: torch.device,
        dtype: torch.dtype,
        way: str,
    ) -> None:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            model = Model(sizes, attend_of).to(dtype)
            self._words = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1))
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        if way == "compiled layers":
            for layer in model.layers:
                layer.compile(fullgraph=True)
        self._model: Callable[..., Tensor] = torch.compile(model, fullgraph=True) if way == "compiled" else model
        self._packing = packing

    def __call__(self) -> Tensor:
        loss = self._model(self._words[:, :-1], self._words[:, 1:], self._packing())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()
