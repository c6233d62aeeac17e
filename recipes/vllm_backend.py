"""vLLM: a plugin of one file, an attention backend that serves any mask over vLLM's paged caches.

The file is installed as a package whose entry point vLLM loads in each of its processes,

    [project.entry-points."vllm.general_plugins"]
    flexmasks = "vllm_backend:register"

and chosen by `vllm serve MODEL --attention-backend CUSTOM`. Layers have their own masks then, causal or a sliding
window, with soft-caps, ALiBi and sinks. Another mask is a function of the layer's implementation and of the batch:

    FLEXMASKS_VLLM_MASK=my_masks:mask_of vllm serve ...

Positions in it are those of each request, and the batch index is the number of the request in the batch. With
VLLM_BATCH_INVARIANT=1 a request has the same bits in any batch, by `flexmasks.invariant`.

The interface is that of vLLM 0.33. Where vLLM is not installed, classes with the same published fields stand in for it,
so that this file can be read and tested alone.
"""

# %%
from __future__ import annotations

import importlib
import os
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

import flexmasks
from _measure import DEVICE, DTYPE, ON_GPU, Row, check, finish, start

try:
    from vllm import envs
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadataBuilder,
        CommonAttentionMetadata,
        MultipleOf,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    WITH_VLLM = True
except ImportError:
    WITH_VLLM = False


# %% What the backend uses of vLLM's interface, for machines without vLLM.
if not WITH_VLLM:
    envs = SimpleNamespace(VLLM_BATCH_INVARIANT=os.environ.get("VLLM_BATCH_INVARIANT") == "1")
    KVCacheLayout, MultipleOf = SimpleNamespace(LBNHC=(0, 1, 3, 2, 4)), int

    class AttentionBackend:  # type: ignore[no-redef]
        """vllm.v1.attention.backend.AttentionBackend: what a backend can do, asked by class methods."""

    class AttentionImpl:  # type: ignore[no-redef]
        """vllm.v1.attention.backend.AttentionImpl: the attention of one layer."""

    class AttentionMetadataBuilder:  # type: ignore[no-redef]
        """vllm.v1.attention.backend.AttentionMetadataBuilder: makes what the layers of a step share."""

    @dataclass
    class CommonAttentionMetadata:  # type: ignore[no-redef]
        """vllm.v1.attention.backend.CommonAttentionMetadata: a batch of requests, with its published fields."""

        query_start_loc: Tensor  # int32[requests + 1]
        query_start_loc_cpu: Tensor
        seq_lens: Tensor  # int32[requests]
        num_reqs: int
        num_actual_tokens: int
        max_query_len: int
        max_seq_len: int
        block_table_tensor: Tensor  # int32[requests, blocks]
        slot_mapping: Tensor  # int64[tokens], -1 for padding
        causal: bool | Tensor = True


# %% What the layers of a step share.
@dataclass
class Batch:
    """A batch of requests: vLLM's metadata, under flexmasks' names."""

    tokens: int  # without padding
    offsets: Tensor  # int32[requests + 1], where the queries of each start
    kv_lens: Tensor  # int32[requests], with the keys of this step
    page_table: Tensor  # int32[requests, pages]
    is_causal: bool


class Builder(AttentionMetadataBuilder):  # type: ignore[misc,type-arg,unused-ignore]
    """Takes vLLM's metadata over; nothing is read on the host."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device
        )  # fmt: skip

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        """Return the batch of a step."""
        common: CommonAttentionMetadata = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError("flexmasks in vLLM: requests that are causal beside others that are not")
        return Batch(
            common.num_actual_tokens, common.query_start_loc, common.seq_lens, common.block_table_tensor, common.causal
        )  # fmt: skip


# %% The backend: what it can do, as vLLM asks when it chooses one.
class FlexmasksBackend(AttentionBackend):  # type: ignore[misc,unused-ignore]
    """flexmasks for the layers of decoders."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class of a layer's attention."""
        return Attention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that takes vLLM's metadata."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Pages of 16 tokens, 32, and so on."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """[pages, page size, heads, head size], as `flexmasks.paged_attention` takes caches."""
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned sinks are `sink_logits`."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """A window is a mask."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """The mask "full"."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """`flexmasks.invariant` computes the same bits in any batch, or refuses in words."""
        return True


class Attention(AttentionImpl):  # type: ignore[misc,type-arg,unused-ignore]
    """The attention of one layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, **others: Any,
    ) -> None:  # fmt: skip
        if attn_type != "decoder" or kv_cache_dtype not in FlexmasksBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"flexmasks in vLLM: {attn_type} attention with a cache of {kv_cache_dtype}")
        if unknown := [name for name, value in others.items() if value is not None and value is not False]:
            raise NotImplementedError(f"flexmasks in vLLM: attention with {', '.join(unknown)}")
        self.num_heads, self.head_size, self.scale, self.sinks = num_heads, head_size, float(scale), sinks
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.sliding_window = sliding_window
        self.mask = "causal" if sliding_window is None else flexmasks.masks.sliding_window(window=sliding_window - 1)
        scores = []
        if logits_soft_cap:
            scores.append(flexmasks.scores.softcap(cap=logits_soft_cap))
        if alibi_slopes is not None:
            scores.append(flexmasks.scores.alibi(slopes=torch.tensor(alibi_slopes)))
        self.score = scores or None
        where = os.environ.get("FLEXMASKS_VLLM_MASK", "")
        module, _, function = where.partition(":")
        self.mask_of = getattr(importlib.import_module(module), function) if where else None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:  # fmt: skip
        """Write new keys and values; tokens of padding, of slot -1, go to the first page, which vLLM leaves unused."""
        k_cache, v_cache = self.caches(kv_cache)
        slots = slot_mapping.clamp(min=0).long()
        places = slots // k_cache.shape[1], slots % k_cache.shape[1]
        k_cache[places], v_cache[places] = key[: len(slots)], value[: len(slots)]

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Batch | None,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write attention into `output`, [tokens, heads, head size]; some requests decode, others read prompts."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("flexmasks in vLLM: an output that is quantized by attention")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        batch = attn_metadata
        if not batch.is_causal and self.sliding_window is not None:
            raise NotImplementedError("flexmasks in vLLM: a window over keys on both sides")
        mask = self.mask if batch.is_causal else "full"
        if self.mask_of is not None:
            mask = self.mask_of(self, batch)
        k_cache, v_cache = self.caches(kv_cache)
        with flexmasks.invariant() if envs.VLLM_BATCH_INVARIANT else nullcontext():
            out = flexmasks.varlen_attention(
                query[: batch.tokens], k_cache, v_cache, batch.offsets, page_table=batch.page_table,
                kv_lens=batch.kv_lens, mask=mask, score=self.score, scale=self.scale, sink_logits=self.sinks,
            )  # fmt: skip
        output[: batch.tokens].copy_(out)
        return output

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the caches of keys and values of a layer, [pages, page size, heads, head size]."""
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k_cache, v_cache


def register() -> None:
    """Enter the backend as CUSTOM; vLLM may call this more than once in a process."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{FlexmasksBackend.__module__}.{FlexmasksBackend.__qualname__}")


# %% A scheduler's steps: prompts in chunks, decoding, and both in one batch, with pages in any order.
class Requests:
    """Requests and their pages, and all of their keys and values once more, for the check."""

    def __init__(self, layer: Attention, count: int, pages: int, page_size: int) -> None:
        self.layer, self.page_size = layer, page_size
        shape = 1 + count * pages, page_size, layer.num_kv_heads, 2 * layer.head_size
        self.cache = torch.zeros(shape, dtype=DTYPE, device=DEVICE).transpose(1, 2)  # as vLLM views it
        self.table = (1 + torch.randperm(count * pages)).view(count, pages).int()  # page 0 is vLLM's null page
        self.lens = torch.zeros(count, dtype=torch.int32)
        self.keys: list[list[Tensor]] = [[] for _ in range(count)]
        self.values: list[list[Tensor]] = [[] for _ in range(count)]

    def step(self, news: list[int], padding: int = 0) -> tuple[Tensor, Tensor]:
        """Give each request new tokens; return their queries, and what the layer makes of them."""
        tokens, heads = sum(news), (self.layer.num_heads, self.layer.num_kv_heads, self.layer.num_kv_heads)
        q, k, v = (torch.randn(tokens + padding, h, self.layer.head_size, dtype=DTYPE, device=DEVICE) for h in heads)
        starts = torch.tensor([0, *news]).cumsum(0).int()
        slots = torch.full((tokens + padding,), -1)
        for n, count in enumerate(news):
            part = slice(int(starts[n]), int(starts[n + 1]))
            places = self.lens[n] + torch.arange(count)
            slots[part] = self.table[n, places // self.page_size] * self.page_size + places % self.page_size
            self.keys[n].append(k[part])
            self.values[n].append(v[part])
        self.lens = self.lens + torch.tensor(news, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE), query_start_loc_cpu=starts, seq_lens=self.lens.to(DEVICE),
            num_reqs=len(news), num_actual_tokens=tokens, max_query_len=max(news), max_seq_len=int(self.lens.max()),
            block_table_tensor=self.table.to(DEVICE), slot_mapping=slots.to(DEVICE),
        )  # fmt: skip
        batch = Builder(None, [], None, DEVICE).build(0, common)
        self.layer.do_kv_cache_update(None, k, v, self.cache, common.slot_mapping)
        output = torch.zeros_like(q)
        self.layer.forward(None, q, k, v, self.cache, batch, output)
        return q[:tokens], output[:tokens]


def dense(requests: Requests, q: Tensor, news: list[int], sees: Any) -> Tensor:
    """Return attention to all keys of each request, by `sees(n, query, key)`, with softmax over all scores."""
    layer, outs = requests.layer, []
    for n, part in enumerate(q.double().split(news)):
        k, v = (torch.cat(x[n]).double() for x in (requests.keys, requests.values))
        k, v = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for x in (k, v))
        places = torch.arange(len(k), device=DEVICE)
        scores = torch.einsum("qhd,khd->hqk", part, k) * layer.scale
        seen = sees(n, places[len(k) - len(part) :, None], places)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(outs)


STEPS = ([37, 5, 0, 18], [1, 20, 3, 1], [1, 1, 30, 1], [1, 1, 1, 1], [0, 4, 1, 2])  # new tokens of each request


def first_words_stay(layer: Attention, batch: Batch) -> flexmasks.Mask:
    """As a `mask_of` of one's own: a window, and the first 4 tokens of each request, which all later ones see."""
    return flexmasks.get_mask("sink_window", sinks=4, window=15)


def main() -> None:
    """Serve requests with three masks, and compare each step with dense attention."""
    file = start(__doc__)
    print(f"vLLM's interface: {'installed' if WITH_VLLM else 'stand-ins with its published fields'}\n")
    masks: dict[str, tuple[int | None, Any, Any]] = {
        "causal": (None, None, lambda n, q, kv: kv <= q),
        "window of 16": (16, None, lambda n, q, kv: (kv <= q) & (q - kv < 16)),
        "first words and a window": (None, first_words_stay, lambda n, q, kv: (kv <= q) & ((q - kv < 16) | (kv < 4))),
    }
    rows: list[Row] = []
    for name, (window, mask_of, sees) in masks.items():
        torch.manual_seed(0)
        layer = Attention(4, 64, 0.125, num_kv_heads=2, sliding_window=window)
        layer.mask_of = mask_of
        requests = Requests(layer, count=4, pages=6, page_size=16)
        found, wanted = [], []
        for news in STEPS:
            q, out = requests.step(news, padding=3)
            found.append(out)
            wanted.append(dense(requests, q, news, sees))
        what = f"{name}, {len(STEPS)} steps of 4 requests"
        check(what, torch.cat(found), torch.cat(wanted), 2e-2 if ON_GPU else 1e-5)
        rows.append({"mask": name, "tokens": sum(map(sum, STEPS)), "keys at the end": int(requests.lens.sum())})
    finish(rows, file)


if __name__ == "__main__":
    main()
