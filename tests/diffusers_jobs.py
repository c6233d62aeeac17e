"""What the processes of tests/world/test_diffusers.py run: attention of diffusers with context parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

import flexmasks
from flexmasks.integrations import diffusers

BATCH, LENGTH, HEADS, SIZE = 2, 24, 4, 8


def _config(**degrees: Any) -> ParallelConfig:
    config = ContextParallelConfig(**degrees)
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    return parallel


def context_parallel() -> dict[str, float]:
    """Return the largest difference of outputs, gradients and lse from those of one process, by cases."""
    diffusers.register()
    rank, count = dist.get_rank(), dist.get_world_size()
    errors = {}
    ways: dict[str, dict[str, Any]] = {
        "ulysses": {"ulysses_degree": count}, "ring": {"ring_degree": count},
        "ulysses, any": {"ulysses_degree": count, "ulysses_anything": True},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for way, degrees in ways.items():
        config = _config(**degrees)
        cuts = [0, LENGTH // 2 + 5 * ("any" in way), LENGTH]
        own = slice(cuts[rank], cuts[rank + 1])
        keys = torch.rand(BATCH, LENGTH, generator=generator) < 0.6
        keys[:, 0] = True
        added = torch.randn(BATCH, LENGTH, generator=generator, dtype=torch.float64)
        pairs = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator) < 0.5
        pairs |= torch.eye(LENGTH, dtype=torch.bool)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu")
        cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # a process's mask, that of one process, other arguments
            "none": (None, None, {}),
            "keys": (keys[:, own], keys[:, None, None], {}),
            "keys in four": (keys[:, None, None, own], keys[:, None, None], {}),
            "added": (added[:, own], added[:, None, None], {}),
            "pairs": (pairs, pairs, {}),
            "causal": (None, causal, {"is_causal": True}),
            "causal keys": (keys[:, own], keys[:, None, None] & causal, {"is_causal": True}),
            "blocks": (blocks, causal, {}),
            "grouped": (None, None, {"enable_gqa": True}),
        }  # fmt: skip
        for case, (mask, whole_mask, options) in cases.items():
            kv_heads = HEADS // 2 if case == "grouped" else HEADS
            shapes = (BATCH, LENGTH, HEADS, SIZE), *[(BATCH, LENGTH, kv_heads, SIZE)] * 2
            whole = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
            parts = [x.detach()[:, own].clone().requires_grad_() for x in whole]
            got = dispatch_attention_fn(
                *parts, attn_mask=mask, backend=AttentionBackendName.FLEX, parallel_config=config,
                attention_kwargs={"return_lse": True}, **options,
            )  # fmt: skip
            added_mask = whole_mask is not None and whole_mask.is_floating_point()
            want = flexmasks.attention(
                *whole, layout="bshd", return_lse=True, q_offset=0, backend="reference",
                mask=None if added_mask else whole_mask, score=whole_mask if added_mask else None,
            )  # fmt: skip
            of_own = want[0][:, own], want[1].transpose(1, 2)[:, own]
            pairs_of: list[tuple[Tensor, Tensor]] = [*zip(got, of_own, strict=True)]
            upstream = torch.randn(want[0].shape, generator=generator, dtype=torch.float64)
            gradients = torch.autograd.grad(want[0], whole, upstream)
            pairs_of += zip(
                torch.autograd.grad(got[0], parts, upstream[:, own]), [x[:, own] for x in gradients], strict=True
            )  # fmt: skip
            assert all(x.shape == y.shape for x, y in pairs_of)
            errors[f"{way}: {case}"] = max(float((x - y).abs().max()) for x, y in pairs_of)
    diffusers.unregister()
    return errors
