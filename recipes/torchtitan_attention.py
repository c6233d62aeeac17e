"""torchtitan's inner attention: one class, any mask, and an epilogue for sinks through a differentiable lse.

The models of torchtitan hand q, k and v to a module, their inner attention. Three names of its arguments are fixed,
q_BLNH, k_BLNH and v_BLNH: torchtitan says by them how tensors are sharded. The mask comes as `attention_masks`, as
whatever `model.get_attention_masks(positions)` returned. `out_transform` is a function of the output and the lse,
by which GPT-OSS adds its learned sinks, whose gradient comes through the lse.
"""

# %%
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_mask

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks import Mask, Plan
from flexmasks.bench.clock import synchronize

try:
    from torchtitan.models.common import attention as titan
    from torchtitan.models.gpt_oss import gptoss_configs
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.protocols.module import Module
except ImportError as missing:
    raise SystemExit(f"{missing}. This recipe needs torchtitan >= 0.3: pip install -e '.[doors]'") from None


# %% The inner attention. As a FlexAttention it gets what torchtitan does for one: block masks, sharded inputs, context
# parallelism. It takes these block masks, and Masks and plans.
class FlexmasksAttention(titan.FlexAttention):
    """torchtitan's inner attention by flexmasks."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(titan.FlexAttention.Config):
        """Nothing of its own: the mask says everything."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask | Mask | Plan,
        score_mod: Callable[..., Tensor] | None = None,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Return [B, L, N, H], from q of so many heads and k and v of as many or fewer, [B, L, N, H]."""
        if not isinstance(attention_masks, BlockMask | Mask | Plan):  # None would show the future
            raise TypeError(f"a BlockMask, a Mask or a plan is needed, got {type(attention_masks).__name__}.")
        arguments: dict[str, Any] = {"mask": attention_masks, "score": score_mod, "scale": scale, "layout": "bshd"}
        if out_transform is None:
            out: Tensor = flexmasks.attention(q_BLNH, k_BLNH, v_BLNH, **arguments)
            return out
        out_BLNH, lse_BNL = flexmasks.attention(q_BLNH, k_BLNH, v_BLNH, return_lse=True, **arguments)
        return out_transform(out_BLNH, lse_BNL.transpose(1, 2))


# %% The masks of packed rows, of positions that count from 0 in each document. `model.get_attention_masks = masks_of`
# lets torchtitan's trainer make them, without a compiled `create_block_mask`. Any other mask may stand here.
def masks_of(positions: Tensor) -> Mask:
    """Return the mask of the rows of a batch."""
    documents = (positions == 0).cumsum(1)
    return flexmasks.masks.causal() & flexmasks.masks.document(document_ids=documents)


def masks_of_gpt_oss(positions: Tensor, window: int) -> dict[str, Mask]:
    """Return the masks of the two kinds of layers that GPT-OSS has; torchtitan's window counts the query itself."""
    mask = masks_of(positions)
    return {"basic_mask": mask, "sliding_window_mask": mask & flexmasks.masks.sliding_window(window=window - 1)}


def positions_of(length: int, *starts: list[int]) -> Tensor:
    """Return positions of rows, int64[B, L], of which each is cut into documents."""
    rows = [torch.cat([torch.arange(n) for n in torch.tensor([0, *s, length]).diff().tolist()]) for s in starts]
    return torch.stack(rows).to(DEVICE)


# %% Are these torchtitan's masks? `flexmasks.compare` looks at all pairs, and names one that one of them shows alone.
def compare_masks(positions: Tensor, window: int) -> None:
    """Compare masks with torchtitan's functions for them."""
    batch, length = positions.shape
    causal, efficient = titan.get_causal_mask_mod(), titan.get_efficient_causal_mask_mod_for_packed_document(positions)
    near = titan.get_sliding_window_mask_mod(window)
    of_gpt_oss = masks_of_gpt_oss(positions, window)
    pairs: dict[str, tuple[Any, Mask]] = {
        "documents": (and_masks(causal, titan.get_document_mask_mod(positions)), masks_of(positions)),
        "documents, the efficient way": (and_masks(causal, efficient), masks_of(positions)),
        "documents of GPT-OSS": (and_masks(causal, efficient), of_gpt_oss["basic_mask"]),
        "windows of GPT-OSS": (and_masks(causal, efficient, near), of_gpt_oss["sliding_window_mask"]),
        "fixed blocks": (titan.get_fixed_block_mask_mod(window), flexmasks.masks.chunked(chunk=window)),
    }
    for what, (theirs, ours) in pairs.items():
        found = flexmasks.compare(ours, theirs, length, batch=batch)
        assert found.equal, f"{what}: {found}"
        print(f"check: {what}: the mask is torchtitan's, at all {length} x {length} pairs of {batch} rows")
    found = flexmasks.compare(flexmasks.masks.sliding_window(window=window), near, length)
    assert not found.equal, "torchtitan counts the query itself, flexmasks does not"


# %% The judge: torchtitan's own functions for masks as a tensor of booleans, and all scores in memory.
class WrittenOut(Module):
    """An inner attention that shares no code with flexmasks."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The mask comes with the call."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Return [B, L, N, H]."""
        groups = q_BLNH.shape[2] // k_BLNH.shape[2]
        k_BLNH, v_BLNH = (x.repeat_interleave(groups, 2) for x in (k_BLNH, v_BLNH))
        scores = torch.einsum("bqnh,bknh->bnqk", q_BLNH, k_BLNH) * (scale or q_BLNH.shape[3] ** -0.5)
        scores = scores.masked_fill(~attention_masks, -torch.inf)
        out = torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v_BLNH)
        return out if out_transform is None else out_transform(out, scores.logsumexp(-1).transpose(1, 2))


def written_out(positions: Tensor) -> Tensor:
    """Return the mask that torchtitan makes of packed rows, bool[B, 1, L, L]."""
    batch, length = positions.shape
    mask_mod = and_masks(titan.get_causal_mask_mod(), titan.get_document_mask_mod(positions))
    visible: Tensor = create_mask(mask_mod, batch, 1, length, length, device=DEVICE)
    return visible


# %% A Llama 3 of torchtitan, trained on packed rows.
def llama(inner: type[Module]) -> Any:
    """Return the debug model with two layers; all inner attentions get the same weights."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = inner.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model.to(DEVICE)


def train(inner: type[Module], attention_masks: Any, positions: Tensor, steps: int = 5) -> Tensor:
    """Return the losses of some steps."""
    model = llama(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2048, positions.shape, generator=generator).to(DEVICE)
    is_last = F.pad(positions[:, 1:] == 0, (0, 1), value=True)
    labels = tokens.roll(-1, 1).masked_fill(is_last, -100)
    losses = []
    for _ in range(steps):
        logits = model(tokens, positions, attention_masks)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# %% GPT-OSS's attention adds its sinks by `out_transform`. Their gradients come through the lse.
def sinks(inner: type[Module], attention_masks: Any, positions: Tensor) -> dict[str, Tensor]:
    """Return the output and gradients of the first layer's attention."""
    config = gptoss_configs["debugmodel"](moe_comm_backend="standard", attn_backend="flex").layers[0].attention
    torch.manual_seed(0)
    layer = dataclasses.replace(config, inner_attention=inner.Config()).build()
    layer.init_states()
    layer = layer.to(DEVICE)
    nn.init.normal_(layer.sinks)
    x = torch.randn(*positions.shape, config.dim, device=DEVICE, requires_grad=True)
    out = layer(x, attention_masks, positions)
    out.backward(torch.randn_like(out))
    return {"output": out, "gradient of the input": x.grad, "gradient of the sinks": layer.sinks.grad}


# %% Times of the attention alone.
def measure(length: int) -> list[Row]:
    """Return the times of forward and backward passes."""
    positions = positions_of(length, [length // 8, length // 2])
    q, k, v = torch.randn(3, 1, length, 16, 64, device=DEVICE, requires_grad=True)
    rows: list[Row] = []
    for inner, attention_masks in ((FlexmasksAttention, masks_of(positions)), (WrittenOut, written_out(positions))):
        module, seconds = inner(inner.Config()), []
        for _ in range(7):
            synchronize(DEVICE)
            begin = time.perf_counter()
            out = module(q, k, v, attention_masks=attention_masks)
            torch.autograd.grad(out.sum(), (q, k, v))
            synchronize(DEVICE)
            seconds.append(time.perf_counter() - begin)
        row: Row = {"inner attention": inner.__name__, "tokens": length, "ms": float(f"{sorted(seconds)[3] * 1e3:.4g}")}
        rows.append(row)
    return rows


def main() -> None:
    """Compare masks, losses and gradients, and measure."""
    file = start(__doc__)
    positions = positions_of(192, [50, 51, 160], [96])
    compare_masks(positions, window=16)
    visible, mask = written_out(positions), masks_of(positions)
    want, tolerance = train(WrittenOut, visible, positions), 1e-3 if ON_GPU else 1e-4
    check("losses of Llama 3, packed, by a mask", train(FlexmasksAttention, mask, positions), want, tolerance)
    blocks = llama(FlexmasksAttention).get_attention_masks(positions)  # torchtitan's block mask
    check("losses of Llama 3, packed, by its block mask", train(FlexmasksAttention, blocks, positions), want, tolerance)
    print("losses: " + ", ".join(f"{x:.3f}" for x in want.tolist()))
    got, wanted = sinks(FlexmasksAttention, mask, positions), sinks(WrittenOut, visible, positions)
    for what in wanted:
        check(f"GPT-OSS's attention with sinks, {what}", got[what], wanted[what], tolerance)
    finish(measure(8192 if ON_GPU else 1024), file)


if __name__ == "__main__":
    main()
