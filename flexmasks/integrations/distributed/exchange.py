"""Exchanges between processes: calls, to compare them, and parts of tensors.

Tensors travel by DTensor's `redistribute` and torch's all-to-all. A sequence lies over the dimensions of a mesh, the
last dimension the fastest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
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


Arriving = Callable[[], Tensor]  # waits for what other processes send
_Piece = tuple[int, int, int]  # index of a part, start, stop


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


def heads_for_sequence(x: Tensor, mesh: DeviceMesh, lengths: Sequence[int], groups: int) -> list[Arriving]:
    """Start to exchange all heads of a part for some heads of all parts, one group of these heads after the other.

    What arrives for a group is [B, H / ranks / groups, S, D]. In memory it is [S, B, H / ranks / groups, D].
    """
    batch, heads, size, head_size = x.shape
    of_group, count = heads // mesh.size() // groups, mesh.size()
    starts = []
    for group in x.unflatten(1, (count, groups, of_group)).unbind(2):
        rows = group.permute(1, 3, 0, 2, 4).reshape(count * size, batch * of_group * head_size)
        starts.append(_started("heads for parts of the sequence", rows, lengths, [size] * count, mesh))

    def arrived(rows: Arriving) -> Tensor:
        return rows().view(sum(lengths), batch, of_group, head_size).permute(1, 2, 0, 3)

    return [functools.partial(arrived, rows) for rows in starts]


def sequence_for_heads(x: Tensor, mesh: DeviceMesh, lengths: Sequence[int]) -> Arriving:
    """Start to exchange some heads of all parts for all heads of a part.

    What arrives is [S of the part, B, ranks, H / ranks, D].
    """
    batch, heads, _, head_size = x.shape
    size, count = lengths[mesh.get_local_rank()], mesh.size()
    rows = x.permute(2, 0, 1, 3).reshape(sum(lengths), batch * heads * head_size)
    start = _started("parts of the sequence for heads", rows, [size] * count, lengths, mesh)
    return lambda: start().view(count, size, batch, heads, head_size).permute(1, 2, 0, 3, 4)


def all_heads(groups: Sequence[Tensor]) -> Tensor:
    """Return all heads of a part, [B, H, S of the part, D], of groups that `sequence_for_heads` has brought.

    In memory it is [S of the part, B, H, D].
    """
    return torch.stack(list(groups), 3).flatten(2, 4).permute(1, 2, 0, 3)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x.contiguous()


def _without_padding(x: Tensor, dim: int, lengths: Sequence[int], longest: int) -> Tensor:
    if all(length == longest for length in lengths):
        return x
    parts = x.split(longest, dim)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)


def received(x: Tensor, mesh: DeviceMesh, parts: Sequence[Parts], wanted: Sequence[Parts]) -> Arriving:
    """Start to exchange the positions of a sequence that processes want.

    They arrive in their natural order. The gradient of a part is the sum over all processes.

    x: this process's part, [B, H, S of the part, D].
    parts, wanted: for each process the positions that it has, in its order, and those that it wants, ascending.
    """
    rank = mesh.get_local_rank()
    sent = [() if other == rank else _common(parts[rank], own) for other, own in enumerate(wanted)]  # to each process
    come = [() if other == rank else _common(own, wanted[rank]) for other, own in enumerate(parts)]  # from each process
    kept = _common(parts[rank], wanted[rank])
    batch, heads, _, head_size = x.shape
    # The first piece is empty: the sent rows depend on x also where nothing is sent.
    pieces = [x.narrow(2, 0, 0), *_pieces(x, parts[rank], chain.from_iterable(sent))]
    lines = [piece.permute(2, 0, 1, 3).reshape(piece.shape[2], batch * heads * head_size) for piece in pieces]
    come_rows, sent_rows = ([sum(stop - start for _, start, stop in one) for one in way] for way in (come, sent))
    start = _started("the keys and values that they see", torch.cat(lines), come_rows, sent_rows, mesh)

    def arrived() -> Tensor:
        rows = start().view(sum(come_rows), batch, heads, head_size).permute(1, 2, 0, 3)
        places = tuple((start, stop) for _, start, stop in (*chain.from_iterable(come), *kept))
        return arranged(torch.cat([rows, *_pieces(x, parts[rank], kept)], 2), places)

    return arrived


def _started(what: str, rows: Tensor, come: Sequence[int], sent: Sequence[int], mesh: DeviceMesh) -> Arriving:
    """Start to exchange rows, by torch's all-to-all; while they travel the process may compute.

    what: what the rows are, for errors.
    come, sent: numbers of rows from and to each process.
    """
    if compat.is_compiling():
        come_rows = compat.all_to_all(rows, list(come), list(sent), mesh.get_group())
        return lambda: come_rows
    travel = _Travel(what, list(come), list(sent), mesh.get_group())
    ticket = _Start.apply(rows, travel)
    return lambda: cast(Tensor, _Finish.apply(ticket, travel))


class _Travel:
    """Rows under way, one way at a time."""

    def __init__(self, what: str, come: list[int], sent: list[int], group: dist.ProcessGroup) -> None:
        self._what, self.come, self.sent, self._group = what, come, sent, group
        self._under_way: tuple[Tensor, dist.Work] | None = None

    def start(self, rows: Tensor, come: list[int], sent: list[int]) -> None:
        with exchanging(self._what):
            rows, buffer = rows.contiguous(), rows.new_empty(sum(come), rows.shape[1])
            self._under_way = buffer, dist.all_to_all_single(buffer, rows, come, sent, self._group, async_op=True)

    def finish(self) -> Tensor:
        """Return the rows that came; on a GPU its later work waits for them, and the host does not."""
        buffer, work = cast(tuple[Tensor, dist.Work], self._under_way)
        self._under_way = None
        with exchanging(self._what):
            work.wait()
        return buffer


class _Start(torch.autograd.Function):
    """Send rows off; backwards, wait for their gradients.

    The result stands for the rows in the graph and has no memory.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        travel.start(rows, travel.come, travel.sent)
        return rows.new_zeros(()).expand(rows.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.finish(), None


class _Finish(torch.autograd.Function):
    """Wait for rows; backwards, send their gradients off."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, travel: _Travel) -> Tensor:
        ctx.travel, ctx.ticket_shape = travel, ticket.shape
        return travel.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        travel = ctx.travel
        travel.start(gradient, travel.sent, travel.come)
        return gradient.new_zeros(()).expand(ctx.ticket_shape), None


def _pieces(x: Tensor, parts: Parts, places: Iterable[_Piece]) -> list[Tensor]:
    """Return pieces of a process's part."""
    starts = [0, *accumulate(stop - start for start, stop in parts)]
    return [x.narrow(2, starts[i] + start - parts[i][0], stop - start) for i, start, stop in places]


def _common(parts: Parts, wanted: Parts) -> list[_Piece]:
    """Return what is in both, in the order of the parts."""
    both = ((i, max(a, c), min(b, d)) for i, (a, b) in enumerate(parts) for c, d in wanted)
    return [(i, start, stop) for i, start, stop in both if start < stop]


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
