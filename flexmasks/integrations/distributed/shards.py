"""The parts of tensors that processes hold by an order of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexmasks.extend import in_message, is_compiling, says_what_to_write
from flexmasks.integrations.distributed.balance import Order, hold
from flexmasks.integrations.distributed.counts import fail
from flexmasks.integrations.distributed.exchange import arranged, compare, gathered, rank_in, submesh


@says_what_to_write()
def shard(x: Tensor, order: Order, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return this process's part of a tensor that each process holds whole.

    Labels and position ids are made of the whole sequence and sharded as its tokens are, because neighbors in a part
    need not be neighbors in the sequence.

    Args:
        x: a tensor with `order.length` tokens along `dim`, such as token ids [B, S].
        order: which parts of the sequence each process holds, see `balance`.
        mesh: the processes, in the order of `order`; the last dimension is the fastest.
        dim: the dimension of the tokens: 1 for [B, S] and [B, S, D], 2 for [B, H, S, D].

    Returns:
        The tensor with `order.sizes[rank]` tokens along `dim`. It keeps the order alive, see `balance`.

    Raises:
        ValueError: x has another number of tokens, or mesh another number of processes.

    Example:
        >>> from flexmasks.integrations import distributed
        >>> order = distributed.balance("causal", length=65536, mesh=mesh)  # doctest: +SKIP
        >>> tokens = distributed.shard(tokens, order, mesh)  # doctest: +SKIP
    """
    _check("shard", x, order, mesh, dim, is_whole=True)
    parts = [x.narrow(dim, start, stop - start) for start, stop in order.parts[rank_in(mesh)]]
    part = torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)
    if not is_compiling():
        hold(order, mesh)
        part.order = order  # type: ignore[attr-defined]
    return part


@says_what_to_write()
def unshard(x: Tensor, order: Order, mesh: DeviceMesh, dim: int = 1, check: bool = True) -> Tensor:
    """Return the whole tensor whose parts the processes hold.

    Each process gets it, in its natural order. The gradient of a part is the sum over all processes.

    Arguments and errors are those of `shard`; x has this process's part. With `check`, outside of torch.compile, the
    processes compare their orders and shapes first, and all raise an error if they differ.

    Example:
        >>> from flexmasks.integrations import distributed
        >>> order = distributed.balance("causal", length=65536, mesh=mesh)  # doctest: +SKIP
        >>> logits = distributed.unshard(model(distributed.shard(tokens, order, mesh)), order, mesh)  # doctest: +SKIP
    """
    problem: ValueError | None = None
    try:
        _check("unshard", x, order, mesh, dim, is_whole=False)
    except ValueError as error:
        problem = error
    is_traced = is_compiling()
    if check and not is_traced:
        shape = "" if problem is not None else str(([*x.shape[:dim], *x.shape[dim:][1:]], x.dtype, dim))
        compare("unshard", mesh, 0, {"order": repr(order), "x": shape}, problem is not None)
    if problem is not None:
        raise problem
    dim %= x.ndim
    sizes = list(order.sizes)
    for mesh_dim in reversed(range(mesh.ndim)):
        ranks = mesh.size(mesh_dim)
        groups = [sizes[i : i + ranks] for i in range(0, len(sizes), ranks)]
        x = gathered(x, submesh(mesh, mesh_dim, is_traced), groups[rank_in(mesh, mesh_dim)], dim)
        sizes = [sum(group) for group in groups]
    return arranged(x, sum(order.parts, ()), dim)


def _check(name: str, x: Any, order: Any, mesh: Any, dim: int, is_whole: bool) -> None:
    """Raise ValueError if x does not have the tokens of the order, or those of this process's part of it."""
    if not isinstance(mesh, DeviceMesh):
        fail(name, f"`mesh` must be a DeviceMesh, got {in_message(mesh)}.")
    if not isinstance(order, Order) or order.ranks != mesh.size():
        fail(name, f"`order` must be an Order of the {mesh.size()} processes of the mesh, got {order!r}.")
    length = order.length if is_whole else order.sizes[rank_in(mesh)]
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != length:
        got = list(x.shape) if isinstance(x, Tensor) else in_message(x)
        fail(name, f"`x` must have {length} tokens along dimension {dim}, got {got}.")
