"""What the processes of tests/world/test_distributed_exchange.py run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from flexmasks.integrations import distributed


class Received(TorchDispatchMode):
    """The bytes that this process receives from others by torch's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace not in ("c10d", "_c10d_functional") or name in ("wait_tensor", "_wrap_tensor_autograd"):
            return out
        if name == "all_gather_into_tensor":
            self.bytes += out.nbytes - args[0].nbytes
        elif name == "reduce_scatter_tensor":  # each process sends its part of the sum
            self.bytes += args[0].nbytes - out.nbytes
        elif name == "all_to_all_single":
            self.bytes += self._from_others(
                out, args[1], dist.get_rank(dist.distributed_c10d._resolve_process_group(args[3]))
            )
        elif name == "alltoall_base_":
            self.bytes += self._from_others(args[0], args[3], dist.get_rank(dist.ProcessGroup.unbox(args[2])))
        else:
            raise NotImplementedError(name)
        return out

    def _from_others(self, out: Tensor, splits: list[int], rank: int) -> int:
        rows = splits[rank] if splits else len(out) // dist.get_world_size()
        return out.nbytes - (out[0].nbytes * rows if len(out) else 0)


def received(
    how: str, mask: Any, parts: Any, shape: tuple[int, int, int, int], rows: int | None = None
) -> tuple[int, int]:
    """Return the bytes that this process receives in the forward and in the backward pass.

    shape: batch elements, query heads, key heads, head size.
    rows: the first size of a mesh of two dimensions.
    """
    count, (batch, q_heads, kv_heads, head_size) = dist.get_world_size(), shape
    mesh = init_device_mesh("cpu", (count,) if rows is None else (rows, count // rows))
    order = distributed.Order(max(stop for own in parts for _, stop in own), parts)
    size = order.sizes[mesh.get_rank()]
    q, k, v = (
        torch.randn(batch, heads, size, head_size, requires_grad=True) for heads in (q_heads, kv_heads, kv_heads)
    )
    counts = []
    with Received() as seen:
        out = distributed.attention(q, k, v, mesh=mesh, mask=mask, how=how, order=order, check=False)
    counts.append(seen.bytes)
    with Received() as seen:
        out.sum().backward()
    counts.append(seen.bytes)
    return counts[0], counts[1]
