"""Private names of torch that benchmarks and tests read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor


def compiled_graphs() -> int:
    """Return how many graphs Dynamo has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def inductor_graphs() -> int:
    """Return how many graphs Inductor has compiled or loaded."""
    from torch._dynamo.utils import counters

    return sum(int(counters["inductor"][f"fxgraph_cache_{outcome}"]) for outcome in ("hit", "miss", "bypass"))


def empty_compile_cache() -> contextlib.AbstractContextManager[Any]:
    """Keep compiled code in an empty folder, so that every compilation is a cold one.

    The environment variable TORCHINDUCTOR_CACHE_DIR is public, but what is in memory would still be found.
    """
    from torch._inductor.utils import fresh_cache

    cache: contextlib.AbstractContextManager[Any] = fresh_cache()
    return cache


def masked_softmax(x: Tensor, hidden: Tensor) -> Tensor:
    """Return torch's own masked softmax over the last dimension; a row that sees nothing is NaN.

    hidden: booleans of x's shape, True = hidden.
    """
    return torch._masked_softmax(x, hidden, -1, 2)  # 2: a mask of x's shape


@contextlib.contextmanager
def donated_buffers_off() -> Iterator[None]:
    """Let a compiled backward pass run more than once over one graph.

    Benchmarks time the backward pass that way.
    """
    from torch._functorch import config

    kept = config.donated_buffer
    config.donated_buffer = False
    try:
        yield
    finally:
        config.donated_buffer = kept


def flex_over_processes(
    mask_mod: Callable[..., Tensor], length: int, mesh: Any, device: torch.device, is_balanced: bool
) -> Callable[..., Tensor]:
    """Return torch's flex_attention over the processes of a mesh, as a function.

    is_balanced: whether each process holds a piece of the first half of the sequence, and one of the second half.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as experimental
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.run = torch.compile(flex_attention)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
            return self.run(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] > k.shape[1])

    style = experimental._ContextParallel
    module = parallelize_module(Flex(), mesh, style(seq_dim=2, attention_type=style.AttentionType.FLEX))
    balancer = balancers._HeadTailLoadBalancer(length, mesh.size(), device) if is_balanced else None
    block_mask = experimental._create_cp_block_mask(mask_mod, 1, 1, length, length, mesh, load_balancer=balancer)
    return lambda q, k, v: cast(Tensor, module(q, k, v, block_mask))
