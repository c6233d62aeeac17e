"""Exchanges between processes: calls, to compare them, and parts of tensors.

Tensors travel by DTensor's `redistribute` and torch's all-to-all. A sequence lies over the dimensions of a mesh, the
last dimension the fastest.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
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


Arriving = Callable[[], list[Tensor]]  # waits for what other processes send
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


def heads_for_sequence(
    tensors: Sequence[Tensor], mesh: DeviceMesh, lengths: Sequence[int], groups: int
) -> list[Arriving]:
    """Start to exchange all heads of a part for some heads of all parts, one group of these heads after the other.

    What arrives for a group is [B, H / ranks / groups, S, D] for each tensor; in memory the sequence comes first.
    """
    count, size, batch = mesh.size(), tensors[0].shape[2], tensors[0].shape[0]
    of_groups = zip(*(_in_groups(x, count, groups) for x in tensors), strict=True)
    starts = [
        _started("heads for parts of the sequence", group, (sum(lengths), batch), lengths, [size] * count, mesh)
        for group in of_groups
    ]
    return [functools.partial(_permuted, start, (1, 2, 0, 3)) for start in starts]


def _in_groups(x: Tensor, count: int, groups: int) -> list[Tensor]:
    """Return groups of heads for each process, [ranks, S of the part, B, H / ranks / groups, D]."""
    of_groups = x.unflatten(1, (count, groups, -1)).unbind(2)
    return [group.permute(1, 3, 0, 2, 4) for group in of_groups]


def sequence_for_heads(x: Tensor, mesh: DeviceMesh, lengths: Sequence[int]) -> Arriving:
    """Start to exchange some heads of all parts for all heads of a part.

    What arrives is [B, S of the part, ranks, H / ranks, D].
    """
    size, count, batch = lengths[mesh.get_local_rank()], mesh.size(), x.shape[0]
    rows = [x.permute(2, 0, 1, 3)]
    start = _started("parts of the sequence for heads", rows, (count, size, batch), [size] * count, lengths, mesh)
    return functools.partial(_permuted, start, (2, 1, 0, 3, 4))


def _permuted(arriving: Arriving, order: tuple[int, ...]) -> list[Tensor]:
    return [x.permute(order) for x in arriving()]


def all_heads(groups: Sequence[Tensor]) -> Tensor:
    """Return all heads of a part, [B, H, S of the part, D], of groups that `sequence_for_heads` has brought."""
    return torch.stack(list(groups), 3).flatten(2, 4).transpose(1, 2)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x.contiguous()


def _without_padding(x: Tensor, dim: int, lengths: Sequence[int], longest: int) -> Tensor:
    if all(length == longest for length in lengths):
        return x
    parts = x.split(longest, dim)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)


def received(tensors: Sequence[Tensor], mesh: DeviceMesh, parts: Sequence[Parts], wanted: Sequence[Parts]) -> Arriving:
    """Start to exchange the positions of a sequence that processes want.

    They arrive in their natural order. The gradient of a part is the sum over all processes.

    tensors: this process's part, [B, H, S of the part, D] each.
    parts, wanted: for each process the positions that it has, in its order, and those that it wants, ascending.
    """
    rank, batch = mesh.get_local_rank(), tensors[0].shape[0]
    sent = [() if other == rank else _common(parts[rank], own) for other, own in enumerate(wanted)]  # to each process
    come = [() if other == rank else _common(own, wanted[rank]) for other, own in enumerate(parts)]  # from each process
    kept = _common(parts[rank], wanted[rank])
    come_rows, sent_rows = ([sum(stop - start for _, start, stop in one) for one in way] for way in (come, sent))
    leaving, coming = list(chain.from_iterable(sent)), list(chain.from_iterable(come))
    lines, left = [], []
    for x in tensors:
        empty, pieces = _cut(x, parts[rank], [*leaving, *kept])
        # The empty piece makes the sent rows depend on x also where nothing is sent.
        lines.append(torch.cat([empty, *chain.from_iterable(pieces[: len(leaving)])], 2).permute(2, 0, 1, 3))
        left.append(pieces[len(leaving) :])
    start = _started("the keys and values that they see", lines, (sum(come_rows), batch), come_rows, sent_rows, mesh)

    begins = [begin for _, begin, _ in (*coming, *kept)]
    in_order = sorted(range(len(begins)), key=begins.__getitem__)

    def arrived() -> list[Tensor]:
        results = []
        for rows, pieces in zip(start(), left, strict=True):
            came = rows.permute(1, 2, 0, 3).contiguous()  # `torch.cat` is slow where one tensor is not
            split = [[x] for x in came.split([stop - begin for _, begin, stop in coming], 2)] if coming else []
            of_places = [*split, *pieces]
            results.append(torch.cat([came.narrow(2, 0, 0), *chain.from_iterable(of_places[i] for i in in_order)], 2))
        return results

    return arrived


def _started(
    what: str,
    tensors: Sequence[Tensor],
    lead: Sequence[int],
    come: Sequence[int],
    sent: Sequence[int],
    mesh: DeviceMesh,
) -> Arriving:
    """Start to exchange rows, by torch's all-to-all; while they travel the process may compute.

    what: what the rows are, for errors.
    tensors: the rows to be sent, [..., B, H, D] each, all but the last two sizes alike.
    lead: the sizes [..., B] of what arrives.
    come, sent: numbers of rows from and to each process.
    """
    here = _Layout(tensors[0].shape[:-2], tuple(x.shape[-2:] for x in tensors))
    travel = _Travel(what, here, here._replace(lead=torch.Size(lead)), list(come), list(sent), mesh.get_group())
    if compat.is_compiling():
        rows = compat.all_to_all(here.packed(tensors), travel.come, travel.sent, travel.group)
        return lambda: travel.there.unpacked(rows)
    ticket = _Start.apply(travel, *tensors)
    return lambda: list(_Finish.apply(travel, ticket))


class _Layout(NamedTuple):
    """Sizes of tensors that travel side by side in rows: [..., B, H, D] each."""

    lead: torch.Size  # [..., B]
    sizes: tuple[torch.Size, ...]  # [H, D] of each tensor

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors as rows [N, numbers]."""
        if compat.is_compiling():  # Inductor fuses this; in eager mode it would copy twice
            rows = torch.cat([x.flatten(-2) for x in tensors], -1)
        else:
            rows, at = tensors[0].new_empty(*self.lead, self._width), 0
            for x, size in zip(tensors, self.sizes, strict=True):
                rows.narrow(-1, at, size.numel()).unflatten(-1, size).copy_(x)
                at += size.numel()
        return rows.view(math.prod(self.lead[:-1]), self.lead[-1] * self._width)

    def unpacked(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors, which share the memory of the rows."""
        parts = rows.view(*self.lead, self._width).split([size.numel() for size in self.sizes], -1)
        return [part.unflatten(-1, size) for part, size in zip(parts, self.sizes, strict=True)]

    @property
    def _width(self) -> int:
        return sum(size.numel() for size in self.sizes)


class _Travel:
    """Rows under way from here to there, or their gradients the other way."""

    def __init__(
        self, what: str, here: _Layout, there: _Layout, come: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> None:
        self._what, self.here, self.there, self.come, self.sent, self.group = what, here, there, come, sent, group
        self._under_way: tuple[Tensor, dist.Work] | None = None

    def start(self, rows: Tensor, come: list[int], sent: list[int]) -> None:
        with exchanging(self._what):
            buffer = rows.new_empty(sum(come), rows.shape[1])
            self._under_way = buffer, dist.all_to_all_single(buffer, rows, come, sent, self.group, async_op=True)

    def finish(self) -> Tensor:
        """Return the rows that came; on a GPU its later work waits for them, and the host does not."""
        buffer, work = cast(tuple[Tensor, dist.Work], self._under_way)
        self._under_way = None
        with exchanging(self._what):
            work.wait()
        return buffer


class _Start(torch.autograd.Function):
    """Send rows off; backwards, wait for their gradients.

    The result stands for the rows in the graph.
    """

    @staticmethod
    def forward(ctx: Any, travel: _Travel, *tensors: Tensor) -> Tensor:
        ctx.travel = travel
        travel.start(travel.here.packed(tensors), travel.come, travel.sent)
        return tensors[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.travel.here.unpacked(ctx.travel.finish())


class _Finish(torch.autograd.Function):
    """Wait for rows; backwards, send their gradients off."""

    @staticmethod
    def forward(ctx: Any, travel: _Travel, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.travel = travel
        return tuple(travel.there.unpacked(travel.finish()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        travel = ctx.travel
        travel.start(travel.there.packed(gradients), travel.sent, travel.come)
        return None, gradients[0].new_zeros(())


def _cut(x: Tensor, parts: Parts, places: Sequence[_Piece]) -> tuple[Tensor, list[list[Tensor]]]:
    """Return an empty piece of a process's part, and the pieces of each place.

    All are cut at once, so that the backward pass puts their gradients together at once.
    """
    starts = [0, *accumulate(stop - start for start, stop in parts)]
    local = [(starts[i] + start - parts[i][0], starts[i] + stop - parts[i][0]) for i, start, stop in places]
    cuts = sorted({0, x.shape[2], *chain.from_iterable(local)})
    empty, *pieces = x.split([0, *(stop - start for start, stop in pairwise(cuts))], 2)
    return empty, [pieces[cuts.index(start) : cuts.index(stop)] for start, stop in local]


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
