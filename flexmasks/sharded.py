"""Calls whose tensors are DTensors, sharded over batch elements or heads.

Each process computes its own part: no process needs anything of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flexmasks import compat
from flexmasks.dropout import with_dropout
from flexmasks.plans.alignment import of_word
from flexmasks.plans.checks import fail
from flexmasks.plans.held import without_plan
from flexmasks.request import Request
from flexmasks.road import attend
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.parts import PartOfCall, part_of
from flexmasks.spec.values import Mask, Modifier, Score


def run(q: DTensor, k: DTensor, v: DTensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return the output and lse (or None) of a call, sharded as q is."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, DTensor) and any(p.is_shard(2) for p in x.placements):
            fail(
                f"`{name}` is sharded over the sequence ({x.placements}), so processes need keys of each other; "
                "use flexmasks.integrations.distributed.attention."
            )
    check_placements(q, k, v)
    if request.dropout is not None:
        seed = shared_seed(request.dropout.seed, q.device_mesh)
        return with_dropout(run, q, k, v, request._replace(dropout=request.dropout._replace(seed=seed)))
    request = without_plan(q, k, request)
    if request.block_mask is not None or isinstance(request.q_offset, Tensor):
        fail("DTensors take `mask` and a number as `q_offset`, no `block_mask` and no tensor `q_offset`.")
    if isinstance(request.q_offset, str):
        request = request._replace(q_offset=of_word("flexmasks.attention", request.q_offset, q.shape[2], k.shape[2]))
    place = users_line(q)
    mask, score = (whole(x, q) for x in from_arguments(request.mask, request.score, dict(request.params)))
    q_part, k_part, v_part = (x.to_local() for x in (q, k, v))
    if not place.has_all(q_part):
        length = max(k.shape[2], int(request.q_offset or 0) + q.shape[2])
        part = place._replace(length=length)
        mask, score = (None if x is None else part_of(x, part) for x in (mask, score))
    sinks = place.sinks_of(whole(request.sink_logits, q), q_part.shape[1])
    request = request._replace(mask=mask, score=score, params={}, sink_logits=sinks)
    results = [x for x in attend(q_part, k_part, v_part, request) if x is not None]
    out, *lse = joined(results, [q_part, k_part, v_part, mask, score, sinks])
    sharded_out = as_sharded(out, q, (*q.shape[:3], v.shape[3]))
    return sharded_out, as_sharded(lse[0], q, q.shape[:3]) if lse else None


def check_placements(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError unless q, k and v are DTensors that are sharded alike."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            fail(f"q, k and v must all be DTensors, or none of them; `{name}` is none.", TypeError)
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            fail(f"q, k and v must be sharded alike, got {q.placements} for `q` and {x.placements} for `{name}`.")
        for placement in x.placements:
            if not (placement.is_replicate() or (type(placement) is Shard and placement.dim < 3)):
                fail(
                    "DTensors must be replicated, or sharded over batch elements, heads, sequence (dimensions 0, 1, "
                    f"2), got {x.placements} for `{name}`."
                )
    for mesh_dim, placement in enumerate(q.placements):
        ranks = q.device_mesh.size(mesh_dim)  # torch 2.11 cannot trace the mesh's shape here
        if placement.is_shard(1) and k.shape[1] % ranks:
            fail(f"the {k.shape[1]} heads of k must be a multiple of the {ranks} ranks that they are sharded over.")


def shared_seed(seed: Any, mesh: DeviceMesh) -> Any:
    """Return a seed of dropout that all processes of a mesh have, where `seed` is each one's own."""
    if isinstance(seed, int | Tensor):
        return seed
    own = torch.randint(2**62, (1,), device=mesh.device_type, generator=seed)
    return DTensor.from_local(own, mesh, [Shard(0)] * mesh.ndim, run_check=False).full_tensor()[:1]


def users_line(q: DTensor) -> PartOfCall:
    """Return which batch elements and heads of a DTensor [B, H, S, D] this process holds."""
    (first_batch, _), (first_head, _) = (own_range(q, dim) for dim in (0, 1))
    return PartOfCall(q.shape[0], q.shape[1], first_batch=first_batch, first_head=first_head)


def own_range(x: DTensor, dim: int) -> tuple[int, int]:
    """Return where a process's part of a dimension starts and stops, as torch.chunk cuts."""
    start, stop = 0, x.shape[dim]
    for mesh_dim, placement in enumerate(x.placements):
        if placement.is_shard(dim):
            mesh = x.device_mesh
            step = -(-(stop - start) // mesh.size(mesh_dim))
            start = min(start + step * mesh.get_local_rank(mesh_dim), stop)
            stop = min(start + step, stop)
    return start, stop


def whole(value: Any, q: DTensor | None = None) -> Any:
    """Return a tensor, or a mask or score with its tensors, without DTensors.

    The gradient of a DTensor is the sum over all processes.

    q: the queries, if they are a DTensor: processes that hold the same queries have the same gradients, which are not
        added up.
    """
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        gradients: list[Any] = [Partial()] * mesh.ndim
        if q is not None and q.device_mesh == mesh:
            gradients = [Replicate() if p.is_replicate() else Partial() for p in q.placements]
        return value.redistribute(placements=[Replicate()] * mesh.ndim).to_local(grad_placements=gradients)
    if isinstance(value, tuple):
        return tuple(whole(x, q) for x in value)
    if isinstance(value, Mask | Score) and any(map(_has_dtensors, value.params.values())):
        return type(value)(value._definition, {name: whole(x, q) for name, x in value.params.items()})
    return value


def _has_dtensors(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(
        isinstance(x, DTensor) or (isinstance(x, Modifier) and any(map(_has_dtensors, x.params.values())))
        for x in values
    )


def as_sharded(x: Tensor, q: DTensor, shape: tuple[int, ...] | torch.Size) -> DTensor:
    """Return a process's part of an output as a DTensor, sharded as q is."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return DTensor.from_local(
        x.contiguous(), q.device_mesh, q.placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


class _Joined(torch.autograd.Function):
    """Values whose backward pass runs that of other tensors, too."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.others = len(tensors) - count
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradients, *[None] * ctx.others)


def joined(results: list[Tensor], exchanged: Sequence[Tensor | Mask | Score | None]) -> list[Tensor]:
    """Return results whose backward pass exchanges the gradients of `exchanged`, and of tensors in it.

    Other processes wait for it, also where the results do not depend on them because no key is visible.
    """
    if compat.is_compiling() or not torch.is_grad_enabled():
        return results
    tensors = [t for x in exchanged if x is not None for t in ([x] if isinstance(x, Tensor) else x._tensors())]
    learned = [t for t in tensors if t.requires_grad]
    return list(_Joined.apply(len(results), *results, *learned)) if learned else results
