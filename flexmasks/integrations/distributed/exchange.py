"""Exchanges between processes: calls, to compare them, and parts of tensors.

Tensors travel by DTensor's `redistribute` and torch's all-to-all. A sequence lies over the dimensions of a mesh, the
last dimension the fastest.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flexmasks.extend import all_to_all_single, copy, group_timeout
from flexmasks.integrations.distributed.counts import WHERE, Parts, are_ascending, common, size_of


@contextlib.contextmanager
def exchanging(what: str) -> Iterator[None]:
    """Add to the error of an exchange of `what` what may have happened to the other processes."""
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


def compare(call: str, mesh: DeviceMesh, state: int, texts: Mapping[str, str], failed: bool) -> list[int]:
    """The states of all processes, if all make the same call.

    call: its name, for errors.
    state: a number of this process that may differ, such as that of its tokens.
    texts: the arguments of the call by their names.
    failed: whether this process has found an error, which it will raise. The others then raise an error, too.

    Raises ValueError if the calls differ.
    """
    numbers = [zlib.crc32(text.encode()) for text in texts.values()]
    own = torch.tensor([state, int(failed), *numbers], device="cpu")
    with exchanging("their calls"):
        every = own[None]
        for dim in reversed(range(mesh.ndim)):
            group = _host_group(mesh.get_group(dim))
            others = [torch.empty_like(every) for _ in range(mesh.size(dim))]
            dist.all_gather(others, every, group=group)
            every = torch.cat(others)
    states, failures, *of_all = every.T.tolist()
    if any(failures) and not failed:
        raise ValueError(f"{WHERE}.{call}: rank {failures.index(1)} of the mesh has raised an error in this call.")
    if not failed:
        for (name, text), number, values in zip(texts.items(), numbers, of_all, strict=True):
            if len(set(values)) > 1:
                other = next(rank for rank, value in enumerate(values) if value != number)
                raise ValueError(
                    f"{WHERE}.{call}: the processes must make the same call, but rank {other} of the mesh has "
                    f"another `{name}` than this process: {text}."
                )
    return list(states)


@functools.lru_cache(maxsize=64)
def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same processes that exchanges tensors on the CPU."""
    if "cpu:gloo" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    timeout = group_timeout(group)
    made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return made


# --- tensors ---


def rank_in(mesh: DeviceMesh, ndim: int | None = None) -> int:
    """The number of this process in the first `ndim` dimensions of a mesh, the last one the fastest."""
    dims = range(len(mesh.shape) if ndim is None else ndim)
    return functools.reduce(lambda rank, dim: rank * mesh.size(dim) + mesh.get_local_rank(dim), dims, 0)


def submesh(mesh: DeviceMesh, dim: int, is_traced: bool) -> DeviceMesh:
    """The one-dimensional mesh of the processes along a dimension.

    is_traced: whether torch.compile traces the call.
    """
    if mesh.ndim == 1:
        return mesh
    if not is_traced:
        return _of_group(mesh.get_group(dim), mesh.device_type)
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{WHERE}: inside torch.compile a mesh of two dimensions needs `mesh_dim_names`.")
    return mesh[mesh.mesh_dim_names[dim]]


@functools.lru_cache(maxsize=64)
def _of_group(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


def gathered(x: Tensor, mesh: DeviceMesh, lengths: Sequence[int], dim: int = 2) -> Tensor:
    """The parts of all processes one after the other; the gradient of a part is the sum over all processes.

    lengths: the size of each process's part along `dim`.
    """
    longest = max(lengths)
    missing = longest - x.shape[dim]
    x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x.contiguous()
    local = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
    with exchanging("keys and values"):
        full = local.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    if all(length == longest for length in lengths):
        return full
    parts = full.split(longest, dim)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)


def heads_for_sequence(
    tensors: Sequence[Tensor], mesh: DeviceMesh, lengths: Sequence[int], is_traced: bool
) -> list[Tensor]:
    """Some heads of all parts in place of all heads of a part: [B, H / ranks, S, D] each. In memory the sequence comes
    first, and for each position the heads of all tensors lie side by side.
    """
    count, batch, size = mesh.size(), tensors[0].shape[0], tensors[0].shape[2]
    rows = [x.unflatten(1, (count, x.shape[1] // count)).permute(1, 3, 0, 2, 4) for x in tensors]
    here = _Layout(rows[0].shape[:-2], tuple(x.shape[-2:] for x in rows))
    there = here._replace(lead=torch.Size([sum(lengths), batch]))
    what, strides = "heads for parts of the sequence", [None] * len(rows)
    come = _exchanged(_Travel(what, here, there, lengths, [size] * count, mesh.get_group(), strides), rows, is_traced)
    return [x.permute(1, 2, 0, 3) for x in come]


def sequence_for_heads(x: Tensor, mesh: DeviceMesh, lengths: Sequence[int], is_traced: bool) -> Tensor:
    """All heads of a part in place of some heads of all parts: [B, H, S of the part, D]. In memory the sequence comes
    before the heads.
    """
    count, (batch, heads, length, d), own_length = mesh.size(), x.shape, lengths[mesh.get_local_rank()]
    rows = x.permute(2, 0, 1, 3)
    here = _Layout(rows.shape[:-2], (rows.shape[-2:],))
    there = here._replace(lead=torch.Size([count, own_length, batch]))
    strides = heads * d, count * heads * d, own_length * count * heads * d, d, 1  # batch, sequence, all heads
    of_gradients = d, heads * length * d, length * d, 1  # those of [B, H, S, D], which kernels take without a copy
    what, group = "parts of the sequence for heads", mesh.get_group()
    travel = _Travel(what, here, there, [own_length] * count, lengths, group, [strides], of_gradients)
    (come,) = _exchanged(travel, [rows], is_traced)
    return come.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def received(
    tensors: Sequence[Tensor], mesh: DeviceMesh, parts: Sequence[Parts], wanted: Sequence[Parts]
) -> tuple[Tensor, ...]:
    """The positions of a sequence that this process wants, in their natural order.

    The gradient of a part is the sum over all processes that want it.

    tensors: this process's part, [B, H, S of the part, D] each.
    parts, wanted: for each process the positions that it has, in its order, and those that it wants, ascending.
    """
    rank, own, result = mesh.get_local_rank(), parts[mesh.get_local_rank()], wanted[mesh.get_local_rank()]
    sent = [common(own, other) if n != rank else () for n, other in enumerate(wanted)]
    come = [common(other, result) if n != rank else () for n, other in enumerate(parts)]
    pieces = _Pieces(
        sent=[size_of(pieces) for pieces in sent],
        come=[size_of(pieces) for pieces in come],
        leave=[_place(own, piece) for pieces in sent for piece in pieces],
        arrive=[_place(result, piece) for pieces in come for piece in pieces],
        stay=[(_place(own, piece), _place(result, piece)) for piece in common(own, result)],
        sizes=(size_of(own), size_of(result)),
        group=mesh.get_group(),
    )
    return cast(tuple[Tensor, ...], _Exchanged.apply(pieces, *tensors))


class _Layout(NamedTuple):
    """Sizes of tensors that travel side by side in rows: [..., B, H, D] each."""

    lead: torch.Size  # [..., B]
    sizes: tuple[torch.Size, ...]  # [H, D] of each tensor

    def packed(self, tensors: Sequence[Tensor], is_traced: bool) -> Tensor:
        """The tensors side by side, as rows [N, numbers]."""
        if is_traced:  # Inductor fuses this; in eager mode it would copy twice
            parts = [x.reshape(*self._flat, size.numel()) for x, size in zip(tensors, self.sizes, strict=True)]
            rows = torch.cat(parts, -1)
        elif len(tensors) == 1 and tensors[0].is_contiguous():
            rows = tensors[0].detach()
        else:
            rows, at = tensors[0].new_empty(*self.lead, self._width), 0
            for x, size in zip(tensors, self.sizes, strict=True):
                copy(rows.narrow(-1, at, size.numel()).unflatten(-1, size), x)
                at += size.numel()
        return rows.view(self._flat[0], self._flat[1] * self._width)

    def unpacked(self, rows: Tensor) -> list[Tensor]:
        """The tensors, which share the memory of the rows."""
        parts = rows.view(*self._flat, self._width).split([size.numel() for size in self.sizes], -1)
        return [part.view(*self.lead, *size) for part, size in zip(parts, self.sizes, strict=True)]

    @property
    def _flat(self) -> tuple[int, int]:
        """[..., B] in two dimensions: torch.cat, also as a gradient, may keep channels last where there are three, and
        its fake result does not say so.
        """
        return math.prod(self.lead[:-1]), self.lead[-1]

    @property
    def _width(self) -> int:
        return sum(size.numel() for size in self.sizes)


class _Travel(NamedTuple):
    """An exchange of rows: what they are, for errors, and their layouts on both sides.

    come, sent: numbers of rows from and to each process, in the order of the rows.
    strides: those of each result, or None for a result that shares the memory of the rows.
    of_gradients: strides of the gradients; by default those of the tensors.
    """

    what: str
    here: _Layout
    there: _Layout
    come: Sequence[int]
    sent: Sequence[int]
    group: dist.ProcessGroup
    strides: Sequence[tuple[int, ...] | None]
    of_gradients: tuple[int, ...] | None = None

    def run(self, tensors: Sequence[Tensor], is_traced: bool = False) -> tuple[Tensor, ...]:
        rows, come, sent = self.here.packed(tensors, is_traced), list(self.come), list(self.sent)
        with exchanging(self.what):
            if is_traced:
                rows_here = all_to_all_single(rows, come, sent, self.group)
            else:
                rows_here = rows.new_empty(sum(come), rows.shape[1])
                dist.all_to_all_single(rows_here, rows, come, sent, self.group)
        results = zip(self.there.unpacked(rows_here), self.strides, strict=True)
        return tuple(x if strides is None or is_traced else _laid(x, strides) for x, strides in results)

    def back(self, tensors: Sequence[Tensor]) -> _Travel:
        """The exchange that sends the gradients of tensors back."""
        strides = [self.of_gradients or _strides_to_fill(x) for x in tensors]
        return _Travel(self.what, self.there, self.here, self.sent, self.come, self.group, strides)


def _laid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    place = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    copy(place, x)
    return place


def _strides_to_fill(x: Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor without gaps or overlaps in its memory; None for another one."""
    return x.stride() if torch.empty_like(x, device="meta").stride() == x.stride() else None


def _exchanged(travel: _Travel, tensors: Sequence[Tensor], is_traced: bool) -> tuple[Tensor, ...]:
    if is_traced:
        return travel.run(tensors, is_traced=True)
    return cast(tuple[Tensor, ...], _Exchanged.apply(travel, *tensors))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, travel: _Travel | _Pieces, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = travel.back(tensors)
        return travel.run(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Exchanged.apply(ctx.back, *gradients)


class _Pieces(NamedTuple):
    """An exchange of the positions that each process wants.

    sent, come: numbers of positions to and from each process.
    leave, arrive: where the pieces that go stand in a tensor, and those that come in the result.
    stay: where the pieces that this process keeps stand in a tensor and in the result.
    sizes: numbers of positions of a tensor and of the result.
    adds: whether what comes is added up, as gradients are.
    """

    sent: list[int]
    come: list[int]
    leave: list[slice]
    arrive: list[slice]
    stay: list[tuple[slice, slice]]
    sizes: tuple[int, int]
    group: dist.ProcessGroup
    adds: bool = False

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        batch = tensors[0].shape[0]
        sizes = tuple(torch.Size([x.shape[1], x.shape[3]]) for x in tensors)
        here, there = (_Layout(torch.Size([sum(rows), batch]), sizes) for rows in (self.sent, self.come))
        what, strides = "the keys and values that they see", [None] * len(tensors)
        travel = _Travel(what, here, there, self.come, self.sent, self.group, strides)
        rows = [torch.cat([x[:, :, :0], *(x[:, :, s] for s in self.leave)], 2).permute(2, 0, 1, 3) for x in tensors]
        come = travel.run(rows)
        return tuple(self._result(x, y.permute(1, 2, 0, 3)) for x, y in zip(tensors, come, strict=True))

    def _result(self, x: Tensor, come: Tensor) -> Tensor:
        result = x.new_empty(*x.shape[:2], self.sizes[1], x.shape[3])
        if self.adds and sum(_width(place) for _, place in self.stay) < self.sizes[1]:
            result.zero_()
        for here, there in self.stay:
            copy(result[:, :, there], x[:, :, here])
        for place, piece in zip(self.arrive, come.split([_width(s) for s in self.arrive], 2), strict=True):
            if self.adds:
                result[:, :, place].add_(piece)
            else:
                copy(result[:, :, place], piece)
        return result

    def back(self, tensors: Sequence[Tensor]) -> _Pieces:
        stay = [(there, here) for here, there in self.stay]
        numbers = self.come, self.sent, self.arrive, self.leave, stay, self.sizes[::-1], self.group
        return _Pieces(*numbers, adds=not self.adds)


def _place(parts: Parts, piece: tuple[int, int]) -> slice:
    """Where a piece of one of the parts stands in a tensor that holds them one after the other."""
    start, stop = piece
    index = next(i for i, (first, end) in enumerate(parts) if first <= start and stop <= end)
    at = size_of(parts[:index]) + start - parts[index][0]
    return slice(at, at + stop - start)


def _width(place: slice) -> int:
    return int(place.stop - place.start)


def arranged(x: Tensor, parts: Parts, dim: int = 2) -> Tensor:
    """Parts of a sequence, which lie one after the other along `dim`, in their natural order."""
    return x if are_ascending(parts) else _in_order(x, parts, sorted(parts), dim)


def rearranged(x: Tensor, parts: Parts) -> Tensor:
    """A sequence in the order of `parts`, the inverse of `arranged` along dimension 2."""
    return x if are_ascending(parts) else _in_order(x, sorted(parts), parts, 2)


def _in_order(x: Tensor, parts: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]], dim: int) -> Tensor:
    pieces = dict(zip(parts, x.split([stop - start for start, stop in parts], dim), strict=True))
    return torch.cat([pieces[part] for part in wanted], dim)
