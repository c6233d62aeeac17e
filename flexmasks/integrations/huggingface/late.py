"""The mask of a step, from transformers' mask function to its attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.attention import block_mask, dense_mask
from flexmasks.blocks.elements import with_indexing_by_numbers
from flexmasks.integrations.huggingface.recognition import Parts, Positions, recognized
from flexmasks.integrations.huggingface.sharding import Sharding, Whole, active, fail
from flexmasks.plans.sizes import is_captured
from flexmasks.spec import Mask, get_mask
from flexmasks.spec.structure import Opaque, replaced


class LateMask(compat.BlockMask):
    """A mask with the sizes of a step.

    The first attention call plans it, for the backend that runs the call; the calls of other layers find the plan.
    transformers hands on a tensor or a BlockMask with a shape of four dimensions, so it is a BlockMask.

    shape: (batch, 1, queries, keys).
    q_offset: the position of the first query, as in `flexmasks.attention`.
    device: the device of the model's tensors, and of the mask as booleans.
    """

    def __init__(
        self, parts: Parts, q_offset: int | Tensor, shape: tuple[int, int, int, int], device: torch.device
    ) -> None:
        self.parts = parts
        self.mask = parts.mask()
        self.q_offset = q_offset
        self.sizes = shape
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    # Models ask these questions of a mask.

    @property
    def dtype(self) -> torch.dtype:
        """torch.bool, by which models know that True is visible."""
        return torch.bool

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def dim(self) -> int:
        return len(self.sizes)

    def size(self, dim: int | None = None) -> Any:
        return self.sizes if dim is None else self.sizes[dim]

    def contiguous(self) -> LateMask:
        """Return the mask itself; generate calls this method."""
        return self

    def to(self, device: torch.device | str, *given: Any, **options: Any) -> LateMask:
        parts = Parts([m.to(device) for m in self.parts.others], [m.to(device) for m in self.parts.packing])
        q_offset = self.q_offset.to(device) if isinstance(self.q_offset, Tensor) else self.q_offset
        return LateMask(parts, q_offset, self.sizes, torch.device(device))

    def to_dense(self) -> Tensor:
        """Return the mask as booleans, True = visible, [batch or 1, 1, queries, keys]."""
        return dense_mask(self.mask, **self._extents())

    def planned(self) -> compat.BlockMask:
        return block_mask(self.mask, **self._extents())

    def _extents(self) -> dict[str, Any]:
        batch, _, q_length, kv_length = self.sizes
        lengths = {"q_len": q_length, "kv_len": kv_length}
        return {**lengths, "batch": batch, "heads": 1, "device": self.device, "q_offset": self.q_offset}

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the mask as booleans, for models that look into their mask."""
        batch, _, q_length, kv_length = self.sizes
        return self.to_dense().expand(batch, 1, q_length, kv_length)[index]

    # Models may combine the mask with booleans of their own, and get booleans.

    def __invert__(self) -> Tensor:
        """Return True for the hidden pairs, as `logical_not`, which torch.compile traces in place of this operator."""
        return self.logical_not()

    def __and__(self, other: Tensor) -> Tensor:
        """Return the pairs that a table of booleans shows, too."""
        return cast(Tensor, self[...]) & other

    def logical_not(self) -> Tensor:
        return ~cast(Tensor, self[...])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(function, "__name__", function)
        # torch's operators would turn a TypeError into one of their own.
        raise ValueError(
            f"flexmasks.integrations.huggingface: the model computes with its mask ({name}), so it takes no attention "
            'function; use attn_implementation="eager".'
        )

    def __repr__(self) -> str:
        return f"LateMask({self.mask!r}, shape={self.sizes})"

    __str__ = __repr__


class ShardedMask(LateMask):
    """The mask of one process's part of a sequence; the first attention call makes it one of the whole sequence.

    The sizes, and the tensors of `parts`, are those of the part.

    sharding: how the sequence is sharded.
    padding: bool [batch, tokens of the part], False for padding; or None.
    position_ids: [batch, tokens of the part], if they say where documents start; or None.
    of_whole: the mask of the whole sequence, and the parts of the processes, once they are known.
    """

    def __init__(
        self,
        parts: Parts,
        shape: tuple[int, int, int, int],
        device: torch.device,
        sharding: Sharding,
        padding: Tensor | None,
        position_ids: Tensor | None,
    ) -> None:
        super().__init__(parts, 0, shape, device)
        self.sharding = sharding
        self.padding = padding
        self.position_ids = position_ids
        self.of_whole: tuple[Mask, Whole] | None = None

    def to(self, device: torch.device | str, *given: Any, **options: Any) -> ShardedMask:
        moved = super().to(device)
        inputs = (None if x is None else x.to(device) for x in (self.padding, self.position_ids))
        return ShardedMask(moved.parts, self.sizes, moved.device, self.sharding, *inputs)

    def _extents(self) -> NoReturn:
        fail("the model computes with its mask, which no process has whole.")


# Models that compute with their mask as a tensor, which masks of one query are, and some that leave out a BlockMask
# without a message.
_REFUSED = (
    "doge", "bloom", "codegen", "xglm", "gpt_neox_japanese", "big_bird", "visual_bert", "longformer"
)  # fmt: skip

# Models that need the mask as numbers to add to scores. The first one appends those of further keys, and calls an
# attention function; the other one is a part of models that do.
_ADDED = ("deepseek_v4", "gemma4_audio")


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv <= q


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = _causal,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> LateMask | Tensor:
    """Return the mask of a step; transformers calls this function.

    A step of decoding with a static cache gets the only row of its mask, bool [batch, 1, 1, keys]: transformers makes
    the mask outside of the compiled model, which would compile again for each new number in a LateMask.

    Args:
        batch_size, q_length, kv_length: the sizes of the step.
        q_offset, kv_offset: the positions of the first query and of the first key. q_offset of a static cache is a
            0-dimensional tensor.
        mask_function: a function (b, h, q, kv) -> bool of positions.
        attention_mask: bool [batch, tokens so far], False for padding; or None.
        allow_is_causal_skip: False for steps of decoding with a static cache, and for masks that are not only causal.
        use_vmap: whether `mask_function` takes only single indices.
        device: the device of the model's tensors.
        others: arguments for other attention functions.
    """
    model_type = getattr(others.get("config"), "model_type", None)
    if model_type in _REFUSED:
        raise ValueError(
            f"flexmasks.integrations.huggingface: models of type {model_type!r} compute with their masks; use "
            'attn_implementation="eager".'
        )
    device = torch.device(device)
    shape = batch_size, 1, q_length, kv_length

    def visible() -> Tensor:
        return _evaluated(mask_function, shape, q_offset, kv_offset, use_vmap, device)

    if model_type in _ADDED:
        shown = _without_padding(visible(), _padding(attention_mask, kv_offset, kv_length))
        dtype = others.get("dtype", torch.float32)
        return torch.zeros(shape, dtype=dtype, device=device).masked_fill(~shown, torch.finfo(dtype).min)
    sharding = active()
    if sharding is not None:
        offsets = q_offset, kv_offset
        of_part: ShardedMask = _of_part(sharding, shape, offsets, mask_function, attention_mask, use_vmap, device)
        return of_part
    padding = _padding(attention_mask, kv_offset, kv_length)
    if q_length == 1 and not allow_is_causal_skip:
        return _without_padding(visible(), padding)
    first_query = q_offset - kv_offset
    may_read = may_keep(device)
    if isinstance(first_query, Tensor):
        first_query = int(first_query) if may_read else first_query.reshape(1).expand(batch_size)
    query_stop = kv_offset + (kv_length if isinstance(first_query, Tensor) else first_query + q_length)
    positions = Positions(batch_size, kv_offset, kv_offset + kv_length, query_stop, device, not use_vmap)
    parts = recognized(mask_function, positions)
    if parts is None and compat.is_compiling():  # torch.compile cannot hand over a function that captures variables
        parts, first_query = Parts([get_mask("dense", visible=visible())], []), 0
    elif parts is None:
        moved = _moved(mask_function, torch.tensor(kv_offset, device=device)) if kv_offset else mask_function
        parts = Parts([get_mask(moved)], [])
    # The host waits for one value, as in transformers' "sdpa", because masks without padding have faster kernels.
    if attention_mask is not None and padding is not None and may_read:
        is_real = attention_mask if _hides_keys_behind(attention_mask.shape[-1], query_stop, parts) else padding
        padding = None if bool(is_real.all()) else padding
    if padding is not None:
        parts.others.append(get_mask("key_padding", attention_mask=padding))
    if may_read and torch.is_inference_mode_enabled():
        parts = Parts([with_versions(m) for m in parts.others], [with_versions(m) for m in parts.packing])
    return LateMask(parts, first_query, shape, device)


def _without_padding(visible: Tensor, padding: Tensor | None) -> Tensor:
    return visible if padding is None else visible & padding[:, None, None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_part(
    sharding: Sharding,
    shape: tuple[int, int, int, int],
    offsets: tuple[int | Tensor, int],
    function: Callable[..., Any],
    attention_mask: Tensor | None,
    use_vmap: bool,
    device: torch.device,
) -> ShardedMask:
    batch, _, length, kv_length = shape
    if any(isinstance(x, Tensor) or x for x in offsets):
        fail(
            "the model goes on with a key-value cache, and a sharded sequence has none. Call the model with whole "
            "texts and `use_cache=False`, and `generate` outside of `sharded`."
        )
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[1] != kv_length):
        fail(f"`attention_mask` must be [batch, tokens], got {list(attention_mask.shape)}.")
    if length != kv_length:
        fail(
            f"the step has {length} queries and {kv_length} keys. `attention_mask` must be this process's part of the "
            "whole one, `distributed.shard(attention_mask, order, mesh)`. Static caches cannot be used."
        )
    positions = Positions(batch, 0, length, length, device, not use_vmap)
    parts = recognized(function, positions) or Parts([get_mask(function)], [])
    return ShardedMask(parts, shape, device, sharding, attention_mask, sharding.take_position_ids())


def with_versions(mask: Mask) -> Mask:
    """Return the mask with copies of its tensors that count their changes.

    Layers find each other's plans by these counts, which tensors of inference mode lack.
    """
    tensors = mask.tensors()
    try:
        with torch.inference_mode(False):
            copied: Mask = replaced(mask, [(t, t.clone()) for t in tensors])
    except Opaque:
        return mask
    return copied


def may_keep(device: torch.device) -> bool:
    """Return whether the host may read the values of a device's tensors and keep them: not while a graph is made."""
    return not compat.is_compiling() and not is_captured(device)


def _hides_keys_behind(length: int, query_stop: int, parts: Parts) -> bool:
    """Return whether no query sees keys behind the first `length` tokens, as those of a static cache."""
    return length >= query_stop and any(m.name in ("causal", "sliding_window") for m in parts.others)


def _padding(attention_mask: Tensor | None, first: int, length: int) -> Tensor | None:
    """Return the padding of the keys of a step; keys that a static cache has not written yet are padding, too."""
    if attention_mask is None:
        return None
    missing = first + length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    if first == 0 and attention_mask.shape[-1] == length:
        return attention_mask
    return attention_mask[:, first : first + length]


def _moved(function: Callable[..., Any], first: Tensor) -> Callable[..., Any]:
    """Return the function of positions that are counted from the first key."""

    def moved(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return function(b, h, q + first, kv + first)

    return moved


def _evaluated(
    function: Callable[..., Any],
    shape: tuple[int, int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    use_vmap: bool,
    device: torch.device,
) -> Tensor:
    """Return all values of a mask function, bool [batch, 1, queries, keys]."""
    batch, _, q_length, kv_length = shape
    b, h = torch.arange(batch, device=device), torch.arange(1, device=device)
    q = torch.arange(q_length, device=device) + q_offset
    kv = torch.arange(kv_length, device=device) + kv_offset
    if use_vmap:
        for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            function = torch.vmap(function, in_dims=axes)
        visible: Tensor = with_indexing_by_numbers(function)(b, h, q, kv)
        return visible
    visible = function(b[:, None, None, None], h[:, None, None], q[:, None], kv)
    return visible.expand(shape)
