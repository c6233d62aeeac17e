"""Exchanges between processes: calls, to compare them, and parts of tensors.

Tensors travel by DTensor's `redistribute` and torch's all-to-all, which are differentiable. A sequence lies over the
dimensions of a mesh, the last dimension the fastest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flexmasks import compat
from flexmasks.integrations.distributed.counts import WHERE, Parts


@contextlib.contextmanager
def exchanging(what: str) -> Iterator[None]:
    """Say in the error of an exchange what may have happened to the other processes."""
    if compat.is_compiling():
        yield
        return
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's errors of process groups are RuntimeErrors
        raise RuntimeError(
            f"{WHERE}: the processes could not exchange {what}. One of them has failed, or has not made this call "
            f"within the timeout of the process group: {error}"
        ) from error


# --- calls ---


class Difference(NamedTuple):
    """One argument of a call as a number that all processes can compare."""

    name: str
    number: int
    text: str


def compare(mesh: DeviceMesh, length: int, arguments: Sequence[Difference], failed: bool) -> list[int]:
    """Return the lengths of all processes' parts, if all processes make the same call.

    length: the tokens of this process.
    failed: whether this process has found an error, which it will raise. The others then raise an error, too.

    Raises ValueError if the calls differ.
    """
    own = torch.tensor([length, int(failed), *(a.number for a in arguments)])
    with exchanging("their calls"):
        every = own[None]
        for dim in reversed(range(mesh.ndim)):
            group = _host_group(mesh.get_group(dim))
            others = [torch.empty_like(every) for _ in range(mesh.size(dim))]
            dist.all_gather(others, every, group=group)
            every = torch.cat(others)
    lengths, failures, *numbers = every.T.tolist()
    if any(failures) and not failed:
        raise ValueError(f"{WHERE}.attention: rank {failures.index(1)} of the mesh has raised an error in this call.")
    if not failed:
        for argument, values in zip(arguments, numbers, strict=True):
            if len(set(values)) > 1:
                other = next(rank for rank, value in enumerate(values) if value != argument.number)
                raise ValueError(
                    f"{WHERE}.attention: the processes must make the same call, but rank {other} of the mesh has "
                    f"another `{argument.name}` than this process: {argument.text}."
                )
    return list(lengths)


@functools.lru_cache(maxsize=64)
def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same processes that exchanges tensors on the CPU."""
    if "cpu:gloo" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    timeout = compat.group_timeout(group)
    made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return made


# --- tensors ---


def rank_in(mesh: DeviceMesh, ndim: int | None = None) -> int:
    """Return the number of this process in the first `ndim` dimensions of a mesh.

    The last dimension is the fastest.
    """
    dims = range(mesh.ndim if ndim is None else ndim)
    return functools.reduce(lambda rank, dim: rank * mesh.size(dim) + mesh.get_local_rank(dim), dims, 0)


def submesh(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    """Return the one-dimensional mesh of the processes along a dimension."""
    return mesh if mesh.ndim == 1 else _of_group(mesh.get_group(dim), mesh.device_type)


@functools.lru_cache(maxsize=64)
def _of_group(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


def gathered(x: Tensor, mesh: DeviceMesh, lengths: Sequence[int], dim: int = 2) -> Tensor:
    """Return the parts of all processes one after the other.

    The gradient of a part is the sum over all processes.

    lengths: the size of each process's part along `dim`.
    """
    longest = max(lengths)
    local = DTensor.from_local(_padded(x, dim, longest), mesh, [Shard(dim)], run_check=False)
    with exchanging("keys and values"):
        full = local.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return _without_padding(full, dim, lengths, longest)


def heads_for_sequence(x: Tensor, mesh: DeviceMesh, lengths: Sequence[int]) -> Tensor:
    """Return some heads of all parts in place of all heads of a part.

    The result is [B, H / ranks, S, D].
    """
    longest = max(lengths)
    local = DTensor.from_local(_padded(x, 2, longest), mesh, [Shard(2)], run_check=False)
    with exchanging("heads for parts of the sequence"):
        heads = local.redistribute(placements=[Shard(1)]).to_local()
    return _without_padding(heads, 2, lengths, longest)


def sequence_for_heads(x: Tensor, mesh: DeviceMesh, lengths: Sequence[int]) -> Tensor:
    """Return all heads of a part in place of some heads of all parts.

    The result is [B, H, S of the part, D].
    """
    longest = max(lengths)
    padded = torch.cat([_padded(part, 2, longest) for part in x.split(list(lengths), 2)], 2)
    local = DTensor.from_local(padded, mesh, [Shard(1)], run_check=False)
    with exchanging("parts of the sequence for heads"):
        parts = local.redistribute(placements=[Shard(2)]).to_local()
    return parts.narrow(2, 0, lengths[mesh.get_local_rank()])


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x.contiguous()


def _without_padding(x: Tensor, dim: int, lengths: Sequence[int], longest: int) -> Tensor:
    if all(length == longest for length in lengths):
        return x
    parts = x.split(longest, dim)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)


def received(x: Tensor, mesh: DeviceMesh, parts: Sequence[Parts], wanted: Sequence[Parts]) -> Tensor:
    """Return the positions of a sequence that this process wants, in their natural order.

    The gradient of a part is the sum over all processes.

    x: this process's part, [B, H, S of the part, D].
    parts, wanted: for each process the positions that it has, in its order, and those that it wants, ascending.
    """
    rank = mesh.get_local_rank()
    starts = _starts(parts[rank])
    sent = [_common(parts[rank], own) for own in wanted]  # to each process
    # The first piece is empty: the sent rows depend on x also where nothing is sent.
    pieces = [x.narrow(2, 0, 0)] + [
        x.narrow(2, starts[index] + start - parts[rank][index][0], stop - start)
        for index, start, stop in chain.from_iterable(sent)
    ]
    batch, heads, _, head_size = x.shape
    width = batch * heads * head_size
    lines = [piece.permute(2, 0, 1, 3).reshape(piece.shape[2], width) for piece in pieces]
    come = [_common(own, wanted[rank]) for own in parts]  # from each process
    counts = [[sum(stop - start for _, start, stop in of_one) for of_one in way] for way in (come, sent)]
    with exchanging("the keys and values that they see"):
        buffer = cast(Tensor, _AllToAll.apply(torch.cat(lines), *counts, mesh.get_group()))
    rows = buffer.unflatten(1, (batch, heads, head_size)).permute(1, 2, 0, 3)
    return arranged(rows, tuple((start, stop) for _, start, stop in chain.from_iterable(come)))


class _AllToAll(torch.autograd.Function):
    """Rows of all processes; backwards, their gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, come: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = sent, come, group
        buffer = rows.new_empty(sum(come), rows.shape[1])
        dist.all_to_all_single(buffer, rows, come, sent, group)
        return buffer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(gradient.contiguous(), *ctx.back), None, None, None


def _common(parts: Parts, wanted: Parts) -> list[tuple[int, int, int]]:
    """Return what is in both, in the order of the parts.

    The results are (index of the part, start, stop).
    """
    both = ((i, max(a, c), min(b, d)) for i, (a, b) in enumerate(parts) for c, d in wanted)
    return [(i, start, stop) for i, start, stop in both if start < stop]


def _starts(parts: Parts) -> list[int]:
    """Return where each part starts in the tensor that holds them."""
    return [0, *accumulate(stop - start for start, stop in parts)]


def arranged(x: Tensor, parts: Parts, dim: int = 2) -> Tensor:
    """Return parts of a sequence in their natural order.

    They lie one after the other along `dim`.
    """
    if list(parts) == sorted(parts):
        return x
    pieces = x.split([stop - start for start, stop in parts], dim)
    return torch.cat([pieces[i] for i in sorted(range(len(parts)), key=lambda i: parts[i])], dim)


def rearranged(x: Tensor, parts: Parts) -> Tensor:
    """Return a sequence in the order of `parts`, the inverse of `arranged` along dimension 2."""
    if list(parts) == sorted(parts):
        return x
    order = sorted(range(len(parts)), key=lambda i: parts[i])
    pieces = x.split([parts[i][1] - parts[i][0] for i in order], 2)
    return torch.cat([pieces[order.index(i)] for i in range(len(parts))], 2)
