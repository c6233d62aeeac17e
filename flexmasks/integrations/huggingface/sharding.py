"""Models whose sequence several processes hold together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from flexmasks.extend import Kept, says_what_to_write

if TYPE_CHECKING:  # torch may be built without torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

    from flexmasks.integrations.distributed import Order

_ACTIVE: list[Sharding] = []
_GATHERED: Kept[Whole] = Kept("huggingface.sharded")


def active() -> Sharding | None:
    """How the sequence of the models that run is sharded, or None."""
    return _ACTIVE[-1] if _ACTIVE else None


@says_what_to_write()
@contextlib.contextmanager
def sharded(mesh: DeviceMesh, order: Order | None = None, how: str = "auto", *, check: bool = True) -> Iterator[None]:
    """Run models by "flexmasks" whose sequence several processes hold together.

    Each process calls the model with its part of `input_ids`, `position_ids` and `labels`, and of a two-dimensional
    `attention_mask` if there is padding; `distributed.shard` makes the parts of the whole tensors. Inside, each layer
    attends to the whole sequence by `distributed.attention`, with its own mask: causal, windows, chunks, bidirectional,
    packed rows, padding on the left or right; with sinks, soft-caps and scales. In packed rows chunks are counted from
    the start of each document. Processes gather the ids or the padding at most once for each mask of a step, not in
    each layer. Both the forward and the backward pass belong inside, for gradient checkpointing runs layers a second
    time. All processes run the same model.

    `position_ids` are those of the whole sequence, because a model would count those of each part from 0. As in one
    process, they also say where documents of packed rows start, if there is no `attention_mask`, and with
    `use_cache=False`. `labels` are shifted before they are sharded (`shift_labels` of transformers), because
    the last token of a part predicts the first one of another. Gradients of the model's weights are the parts that come
    from the process's tokens; FSDP2 and DistributedDataParallel average them, which is right for a loss that is the
    mean over the process's tokens if all parts count equally many.

    All layers that attend by "flexmasks" are taken to hold the sharded sequence, so towers of images and sounds need
    another `attn_implementation`. Layers are not traced by torch.compile, which breaks its graph there.

    Other tools for sharded sequences:

    - torch's `context_parallel(mesh, buffers=...)` cuts the buffers, and replaces only SDPA, which "flexmasks" does not
      call: use both. Its parts are those of `Order(length, parts)` where, of 2n pieces of equal length, rank r of n has
      the pieces r and 2n - 1 - r; that is `balance("causal", length, mesh)` if 256 n divides the length.
    - accelerate's `ParallelismConfig(cp_size=...)` with `maybe_context_parallel` is the same, with
      `mesh=accelerator.torch_device_mesh["cp"]`. A model that `accelerator.prepare` got is causal without padding: its
      layers get no masks, packed rows are known by their `position_ids`, and models with windows or chunks are refused
      by accelerate. transformers' Trainer with `cp_size` refuses all but "sdpa". Shard by `distributed.shard` instead,
      for any mask.
    - DeepSpeed's Ulysses, also as accelerate's `sp_size`, needs no `sharded`: it exchanges heads itself and calls
      "flexmasks" with whole sequences (`core_attn_implementation="flexmasks"`).

    Args:
        mesh: the processes, of one or two dimensions.
        order: which parts of the sequence each process holds, see `distributed.balance`. By default they follow each
            other, and may have different lengths.
        how: what processes exchange, as in `distributed.attention`.
        check: whether processes compare their calls, as in `distributed.attention`, and whether `position_ids` that
            count from 0 in each part are an error. Without it, parts without an `order` must have equal lengths. It is
            needed only where each part really is a document of its own.

    Raises:
        ValueError: the mask of a layer cannot be made one of the whole sequence: it has tensors other than
            `position_ids` and a two-dimensional `attention_mask`, or a key-value cache is in use; or `position_ids` of
            each part count from 0. All processes raise it.

    Example:
        >>> from flexmasks.integrations import distributed, huggingface
        >>> order = distributed.Order.natural(length, mesh.size())  # doctest: +SKIP
        >>> batch = {name: distributed.shard(x, order, mesh) for name, x in batch.items()}  # doctest: +SKIP
        >>> with huggingface.sharded(mesh, order):  # doctest: +SKIP
        ...     model(**batch, use_cache=False).loss.backward()
    """
    from torch.distributed.device_mesh import DeviceMesh

    from flexmasks.integrations.distributed import Order

    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2:
        fail_sharded(f"`mesh` must be a DeviceMesh of one or two dimensions, got {mesh!r}.", TypeError)
    if order is not None and (not isinstance(order, Order) or order.ranks != mesh.size()):
        fail_sharded(f"`order` must be an Order of the {mesh.size()} processes of the mesh, got {order!r}.")
    sharding = Sharding(mesh, order, how, check)
    _ACTIVE.append(sharding)
    try:
        with _packing_left_to(sharding):
            yield
    finally:
        _ACTIVE.remove(sharding)


@contextlib.contextmanager
def _packing_left_to(sharding: Sharding) -> Iterator[None]:
    """Keep transformers from looking for packed rows in the part of one process. transformers asks one function for the
    documents of a row before it makes the mask; here that function keeps the position_ids and finds no documents.
    """
    from transformers import masking_utils

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(position_ids: Tensor) -> None:
        sharding.position_ids = position_ids

    own = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = keep
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = own


def fail(message: str) -> NoReturn:
    raise ValueError(f"flexmasks.integrations.huggingface: {message}")


def fail_sharded(message: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"flexmasks.integrations.huggingface.sharded: {message}")


class Whole(NamedTuple):
    """A tensor of the whole sequence, or None, and the parts of the processes."""

    tensor: Tensor | None
    order: Order


@dataclass(eq=False)
class Sharding:
    """The processes that hold a sequence together, and what they exchange.

    position_ids: those of the mask that is made next, if they say where documents start.
    """

    mesh: DeviceMesh
    order: Order | None
    how: str
    check: bool
    position_ids: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(self, query: Tensor, key: Tensor, value: Tensor, order: Order, **arguments: Any) -> Tensor:
        from flexmasks.integrations.distributed import attention

        how: dict[str, Any] = {"mesh": self.mesh, "how": self.how, "order": order, "check": self.check}
        return cast(Tensor, attention(query, key, value, **how, **arguments))

    def whole(self, name: str, part: Tensor | None, position_ids: Tensor | None, length: int, problem: str) -> Whole:
        """A whole tensor [B or 1, tokens], and the parts of the processes.

        All processes make the call equally often. All have a part of the tensor, or none has.

        part: this process's part.
        position_ids: this process's positions, if they are known, for the check.
        length: the number of this process's tokens.
        problem: an error that this process has found. All processes raise one then.
        """
        from flexmasks.integrations.distributed.balance import Order, forgotten_order
        from flexmasks.integrations.distributed.counts import following
        from flexmasks.integrations.distributed.exchange import compare, rank_in
        from flexmasks.integrations.distributed.shards import unshard

        order, rank = self.order, rank_in(self.mesh)
        advice = ""
        if order is None:
            advice = "" if problem else forgotten_order(self.mesh, rank, length)
        elif length != order.sizes[rank]:
            problem = problem or f"by `order` this process has {order.sizes[rank]} tokens, but the model got {length}."
        # Without checks a process cannot know whether others have kept their parts, too.
        key, parts = (self.mesh, self.order), [] if part is None else [part]
        known = _GATHERED.get(key, parts) if self.check and parts else None
        is_new = known is None
        lengths = [length] * self.mesh.size()
        if self.check:
            counts_from_0 = is_new and not problem and _counts_from_0(position_ids, length)
            shown = f"{name} {part.dtype} of {part.shape[0]} rows" if part is not None else f"no {name}"
            texts = {"attention_mask or position_ids": shown, "order": repr(self.order)}
            state = 8 * length + 4 * bool(advice) + 2 * is_new + counts_from_0
            states = compare("attention", self.mesh, state, texts, bool(problem))
            lengths = [s >> 3 for s in states]
            is_new = any(s & 2 for s in states)
            advice = advice if all(s & 4 for s in states) else ""
            if sum(lengths) > max(lengths) and all(s & 1 or not s >> 3 for s in states) and not (problem or advice):
                problem = (
                    "the position_ids of each process count from 0, as models number tokens that come without. Pass "
                    "the process's part of the whole position_ids: `distributed.shard(position_ids, order, mesh)`, or "
                    "slices of them. If each part really is a document of its own, set `check=False`."
                )
        if problem or advice:
            fail_sharded(problem or advice)
        if known is not None and not is_new:
            return known
        order = order or Order(sum(lengths), following(lengths))
        if part is None:
            return Whole(None, order)
        given = part.to(torch.uint8) if part.dtype == torch.bool else part
        whole = unshard(given, order, self.mesh, 1, False).to(part.dtype)
        gathered = Whole(whole, order)
        _GATHERED.put(key, parts, gathered, whole.nbytes)
        return gathered


def _counts_from_0(position_ids: Tensor | None, length: int) -> bool:
    if position_ids is None or position_ids.shape[-1] != length or not length:
        return False
    return bool((position_ids == torch.arange(length, device=position_ids.device)).all())
