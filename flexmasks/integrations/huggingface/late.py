"""The mask of a step, from transformers' mask function to its attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import Mask, Plan, dense_mask, get_mask
from flexmasks.extend import is_capturing, is_compiling, is_invariant, over_indices, plan_of_step
from flexmasks.integrations.huggingface.recognition import Parts, Positions, recognized
from flexmasks.integrations.huggingface.sharding import Sharding, Whole, active, fail, fail_sharded


class Rows(NamedTuple):
    """How the tokens of a step stand in a layer's tensors, and the plan for tokens that stand from the first place on.

    Inside `flexmasks.invariant` a text has the same bits if its first key is the first one that a kernel reads. In a
    layer's tensors padding stands before it, or a cache with a window has dropped keys.

    padding: the number of places before each row's first token, int64 [batch], or None if there is no padding.
    dropped: the number of keys that the cache has dropped.
    moves_queries: whether padding stands before queries, too.
    """

    plan: Plan
    padding: Tensor | None
    dropped: int
    moves_queries: bool

    def to(self, device: torch.device | str) -> Rows:
        return self._replace(padding=None if self.padding is None else self.padding.to(device))

    def queries(self, query: Tensor) -> Tensor:
        return _shifted(query, cast(Tensor, self.padding)) if self.moves_queries else query

    def keys(self, key: Tensor) -> Tensor:
        """Keys or values, [B, Hkv, KV, D], with anything in the places of those that no query sees."""
        if self.padding is None:
            return torch.nn.functional.pad(key, (0, 0, self.dropped, 0))
        return _shifted(key, self.padding - self.dropped, key.shape[2] + self.dropped)

    def output(self, out: Tensor) -> Tensor:
        """The output of queries that were moved, where they stood, and 0 for padding."""
        if not self.moves_queries:
            return out
        padding = cast(Tensor, self.padding)
        is_padding = torch.arange(out.shape[2], device=out.device) < padding[:, None]
        return _shifted(out, -padding).masked_fill(is_padding[:, None, :, None], 0)


def _shifted(x: Tensor, count: Tensor, length: int | None = None) -> Tensor:
    """Each row of [B, H, S, D] without its first `count` places, an int64 [B], which may be negative."""
    place = torch.arange(x.shape[2] if length is None else length, device=x.device) + count[:, None]
    place = place.clamp(0, x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[3]))


class LateMask(BlockMask):
    """The plan of a step, as transformers hands it on: a tensor or a BlockMask with a shape of four dimensions.

    parts: what the mask is made of.
    plan: the plan that layers pass to `flexmasks.attention`; the first one plans for all. It has no device, because
        layers may lie on several.
    shape: (batch, 1, queries, keys).
    device: the device of the model's tensors, and of the mask as booleans.
    rows: how tokens are moved before `flexmasks.attention`, or None if they stay.
    """

    shape: tuple[int, int, int, int] = (0, 1, 0, 0)  # in place of a property of BlockMask
    ndim = 4
    dtype = torch.bool  # by which models know that True is visible

    def __init__(
        self,
        parts: Parts,
        q_offset: int | Tensor,
        shape: tuple[int, int, int, int],
        device: torch.device,
        rows: Rows | None = None,
    ) -> None:
        self.rows = rows
        self.parts = parts
        self.plan = plan_of_step(parts.mask(), *shape[2:], q_offset)
        self.shape = shape
        self.device = device

    @property
    def mask(self) -> Mask:
        return self.plan.mask

    @property
    def q_offset(self) -> int | Tensor:
        return self.plan.q_offset

    def dim(self) -> int:
        return self.ndim

    def is_floating_point(self) -> bool:
        return False

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LateMask:
        """The mask itself; generate calls this method."""
        return self

    def to(self, device: torch.device | str, *given: Any, **options: Any) -> LateMask:
        if any(isinstance(x, torch.dtype) for x in (device, *given, *options.values())):
            _fail_for("to(dtype)")
        q_offset = self.q_offset.to(device) if isinstance(self.q_offset, Tensor) else self.q_offset
        rows = None if self.rows is None else self.rows.to(device)
        return LateMask(self.parts.to(device), q_offset, self.shape, torch.device(device), rows)

    def to_dense(self) -> Tensor:
        """The mask as booleans, True = visible, [batch or 1, 1, queries, keys]."""
        batch, heads, q_len, kv_len = self.shape
        if not may_keep(self.device):  # dense_mask looks at the tensors of a mask
            q_offset = self.q_offset[0] if isinstance(self.q_offset, Tensor) else self.q_offset  # one for all
            b, h, q, kv = (torch.arange(n, device=self.device) for n in self.shape)
            return over_indices(self.mask)(b, h, q + q_offset, kv)
        sizes: dict[str, Any] = {"batch": batch, "heads": heads, "q_offset": self.q_offset}
        return dense_mask(self.mask, q_len, kv_len, device=self.device, **sizes)

    # Models may look into their mask, or combine it with booleans of their own, and get booleans.

    def __getitem__(self, index: Any) -> Any:
        return self.to_dense().expand(self.shape)[index]

    def __and__(self, other: Tensor) -> Tensor:
        return cast(Tensor, self[...] & other)

    def __invert__(self) -> Tensor:
        return cast(Tensor, ~self[...])

    logical_not = __invert__  # torch.compile traces it in place of the operator

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        # torch's operators would turn a TypeError into one of their own.
        _fail_for(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return lambda *args, **kwargs: _fail_for(name)

    def __repr__(self) -> str:
        return f"LateMask({self.mask!r}, shape={self.shape})"

    __str__ = __repr__


def _fail_for(operation: str) -> NoReturn:
    fail(
        f"the model computes with its mask ({operation}), so it takes no attention function; use "
        'attn_implementation="eager".'
    )


class DecodingMask(LateMask):
    """The mask of a step of decoding inside `flexmasks.invariant`, which a compiled model gets.

    Its numbers are new at each step, so attention is no part of the graph, which would compile again for each of them.
    """

    def to(self, device: torch.device | str, *given: Any, **options: Any) -> DecodingMask:
        moved = super().to(device, *given, **options)
        return DecodingMask(moved.parts, moved.q_offset, moved.shape, moved.device, moved.rows)


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
        return ShardedMask(moved.parts, self.shape, moved.device, self.sharding, *inputs)

    def to_dense(self) -> NoReturn:
        fail_sharded("the model computes with its mask, which no process has whole.")


class GivenMask(LateMask):
    """A user's mask or plan, which stands for the model's own mask in all layers, but for their windows and chunks.

    replaced: what the model's own mask is made of; None for a mask of a dict by kind of layer, which stands as it is.
    """

    def __init__(
        self, given: Mask | Plan, replaced: list[Mask] | None, shape: tuple[int, int, int, int], device: torch.device
    ) -> None:
        super().__init__(Parts([given if isinstance(given, Mask) else given.mask], []), 0, shape, device)
        self.given = given
        self.replaced = replaced
        if isinstance(given, Plan):
            self.plan = given

    def to(self, device: torch.device | str, *given: Any, **options: Any) -> GivenMask:
        moved, mask = super().to(device, *given, **options), self.given.to(device)
        replaced = None if self.replaced is None else [m.to(device) for m in self.replaced]
        return GivenMask(mask, replaced, self.shape, moved.device)

    def to_dense(self) -> NoReturn:
        _fail_for("its values")


# Models that compute with their mask as a tensor, which masks of one query are, and some that leave out a BlockMask
# without a message.
_REFUSED = (
    "doge", "bloom", "codegen", "xglm", "gpt_neox_japanese", "big_bird", "visual_bert", "longformer", "nllb-moe"
)  # fmt: skip

# Models that need the mask as numbers to add to scores. Two append those of further keys or add a bias, and call an
# attention function; the other one is a part of models that do.
_ADDED = ("deepseek_v4", "beit", "gemma4_audio")


def check_type(model_type: str | None) -> None:
    if model_type in _REFUSED:
        fail(f'models of type {model_type!r} compute with their masks; use attn_implementation="eager".')


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv <= q


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = _causal,
    attention_mask: Tensor | Mask | Plan | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> LateMask | Tensor:
    """The mask of a step; transformers calls this function.

    A step of decoding with a static cache gets the only row of its mask, bool [batch, 1, 1, keys]: transformers makes
    the mask outside of the compiled model, which would compile again for each new number in a LateMask. Inside
    `flexmasks.invariant` it gets the mask of other steps, because the bits of its result must be theirs.

    Args:
        batch_size, q_length, kv_length: the sizes of the step.
        q_offset, kv_offset: the positions of the first query and of the first key. q_offset of a static cache is a
            0-dimensional tensor.
        mask_function: a function (b, h, q, kv) -> bool of positions.
        attention_mask: bool [batch, tokens so far], False for padding; a mask or plan, which stands for the model's own
            mask in all layers, but for their windows and chunks; or None.
        allow_is_causal_skip: False for steps of decoding with a static cache, and for masks that are not only causal.
        use_vmap: whether `mask_function` takes only single indices.
        device: the device of the model's tensors.
        others: arguments for other attention functions.
    """
    model_type = getattr(others.get("config"), "model_type", None)
    check_type(model_type)
    device = torch.device(device)
    step = _Step((batch_size, 1, q_length, kv_length), q_offset, kv_offset, mask_function, use_vmap, device)
    if isinstance(attention_mask, Mask | Plan):
        return _given(attention_mask, step)
    if model_type in _ADDED:
        shown = _without_padding(step.visible(), _padding(attention_mask, kv_offset, kv_length))
        dtype = others.get("dtype", torch.float32)
        return torch.zeros(step.shape, dtype=dtype, device=device).masked_fill(~shown, torch.finfo(dtype).min)
    sharding = active()
    if sharding is not None:
        return cast(ShardedMask, _of_part(sharding, step, attention_mask))
    padding = _padding(attention_mask, kv_offset, kv_length)
    is_for_graph = q_length == 1 and not allow_is_causal_skip
    if is_for_graph and not is_invariant():
        return _without_padding(step.visible(), padding)
    first_query = q_offset - kv_offset
    may_read = may_keep(device)
    if isinstance(first_query, Tensor):
        first_query = int(first_query) if may_read else first_query.reshape(1).expand(batch_size)
    query_stop = kv_offset + (kv_length if isinstance(first_query, Tensor) else first_query + q_length)
    parts = step.parts(query_stop)
    if parts is None and is_compiling():  # torch.compile cannot hand over a function that captures variables
        parts, first_query = Parts([get_mask("dense", visible=step.visible())], []), 0
    elif parts is None:
        moved = _moved(mask_function, torch.tensor(kv_offset, device=device)) if kv_offset else mask_function
        parts = Parts([get_mask(moved)], [])
    # The host waits for one value, as in transformers' "sdpa", because masks without padding have faster kernels.
    if attention_mask is not None and padding is not None and may_read:
        # Keys behind the tokens, as those of a static cache, are padding that no query sees.
        is_causal = any(m.name in ("causal", "sliding_window") for m in parts.others)
        is_real = attention_mask if is_causal and attention_mask.shape[-1] >= query_stop else padding
        padding = None if bool(is_real.all()) else padding
    rows = None
    if is_invariant() and (kv_offset or padding is not None) and isinstance(first_query, int):
        real = None if padding is None else cast(Tensor, attention_mask)[:, : kv_offset + kv_length]
        rows = _from_first_token(parts, step._replace(q_offset=first_query + kv_offset), real)
        # Causal queries see no key behind them, so padding at the end of rows needs no mask.
        padding = None if rows is None and _is_causal(parts) else padding
    if padding is not None:
        parts.others.append(get_mask("key_padding", attention_mask=padding))
    kind = DecodingMask if is_for_graph and may_read else LateMask
    return kind(parts, first_query, step.shape, device, rows)


def _is_causal(parts: Parts) -> bool:
    """Whether a mask shows the keys at some distances before each query."""
    return len(parts.others) == 1 and parts.others[0].name in ("causal", "sliding_window") and not parts.packing


def _from_first_token(parts: Parts, step: _Step, is_real: Tensor | None) -> Rows | None:
    """How the tokens of a step are moved so that keys start with the first token of each row; None if they do.

    is_real: bool [batch, tokens], False for padding, if there may be some.
    """
    first_query, dropped = cast(int, step.q_offset), step.kv_offset
    _, _, q_length, kv_length = step.shape
    padding = None
    if is_real is not None:
        if not may_keep(step.device):
            _fail_invariant("it cannot read inside torch.compile or a CUDA graph where padding is", "leave it out")
        is_real = is_real.bool()
        is_start = is_real & ~torch.nn.functional.pad(is_real[:, :-1], (1, 0))
        padding = is_start.long().argmax(1)
        starts, longest = torch.stack([is_start.sum(1).amax(), padding.amax()]).tolist()
        if starts > 1:
            _fail_invariant("it has padding between tokens", "let the tokens of each row be contiguous")
        if longest and first_query and longest > first_query:
            _fail_invariant("chunks of the prompt end in its padding on the left", "pass the prompt as one chunk")
        padding = padding if longest else None
    if padding is None and not dropped:
        return None
    if not _is_causal(parts):
        what = f"layers with the mask {parts.mask()!r} read keys from the first one on"
        if padding is not None:
            _fail_invariant(f"{what}, and it has padding on the left", "pad on the right, or pass texts of one length")
        fail(
            f"inside flexmasks.invariant() {what}, and the cache has dropped {dropped} of them; pass a cache that "
            "keeps all, `past_key_values=transformers.DynamicCache()`."
        )
    moves_queries = padding is not None and first_query == 0
    start = first_query if padding is None or moves_queries else first_query - padding
    plan = plan_of_step(parts.mask(), q_length, kv_length + dropped, start)
    return Rows(plan, padding, dropped, moves_queries)


def _fail_invariant(problem: str, remedy: str) -> NoReturn:
    fail(f"inside flexmasks.invariant() `attention_mask` is a problem: {problem}; {remedy}.")


def _given(given: Mask | Plan, step: _Step) -> GivenMask:
    """A user's mask or plan as the mask of a step."""
    batch, heads, length, kv_length = step.shape
    kv_length = kv_length if isinstance(kv_length, int) else length  # a mask has no shape to tell transformers of keys
    _check_whole(length, kv_length, isinstance(step.q_offset, Tensor) or step.q_offset or step.kv_offset)
    step = step._replace(shape=(batch, heads, length, length))
    parts = step.parts(length)
    replaced = [get_mask(step.function)] if parts is None else [*parts.others, *parts.packing]
    return GivenMask(given, replaced, step.shape, step.device)


def of_kind(given: Mask | Plan, query: Tensor, key: Tensor) -> GivenMask:
    """A user's mask or plan for the layers of one kind."""
    _check_whole(query.shape[2], key.shape[2], False)
    return GivenMask(given, None, (query.shape[0], 1, query.shape[2], key.shape[2]), query.device)


def _check_whole(q_length: int, kv_length: int, starts_later: Any) -> None:
    if starts_later or q_length != kv_length:
        fail(
            "a mask or plan as `attention_mask` is for whole texts without a key-value cache, and the step has "
            f"{q_length} queries and {kv_length} keys; pass `use_cache=False`."
        )


class _Step(NamedTuple):
    """A mask function and the positions of a step, as transformers gives them, see `make_mask`."""

    shape: tuple[int, int, int, int]
    q_offset: int | Tensor
    kv_offset: int
    function: Callable[..., Any]
    use_vmap: bool
    device: torch.device

    def parts(self, query_stop: int) -> Parts | None:
        """The masks of this library, or None if the function has none; queries are before `query_stop`."""
        key_stop = self.kv_offset + self.shape[3]
        extents = self.shape[0], self.kv_offset, key_stop, query_stop, self.device
        return recognized(self.function, Positions(*extents, trusted=not self.use_vmap))

    def visible(self) -> Tensor:
        """All values of the function, bool [batch, 1, queries, keys]."""
        batch, heads, q, kv = (torch.arange(n, device=self.device) for n in self.shape)
        q, kv = q + self.q_offset, kv + self.kv_offset
        if self.use_vmap:
            return over_indices(self.function)(batch, heads, q, kv)
        visible: Tensor = self.function(batch[:, None, None, None], heads[:, None, None], q[:, None], kv)
        return visible.expand(self.shape)


def _without_padding(visible: Tensor, padding: Tensor | None) -> Tensor:
    return visible if padding is None else visible & padding[:, None, None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_part(sharding: Sharding, step: _Step, attention_mask: Tensor | None) -> ShardedMask:
    _, _, length, kv_length = step.shape
    if any(isinstance(x, Tensor) or x for x in (step.q_offset, step.kv_offset)):
        fail_sharded(
            "the model goes on with a key-value cache, and a sharded sequence has none. Call the model with whole "
            "texts and `use_cache=False`, and `generate` outside of `sharded`."
        )
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[1] != kv_length):
        fail_sharded(f"`attention_mask` must be [batch, tokens], got {list(attention_mask.shape)}.")
    if length != kv_length:
        fail_sharded(
            f"the step has {length} queries and {kv_length} keys. `attention_mask` must be this process's part of the "
            "whole one, `distributed.shard(attention_mask, order, mesh)`. Static caches cannot be used."
        )
    parts = step.parts(length) or Parts([get_mask(step.function)], [])
    position_ids, sharding.position_ids = sharding.position_ids, None
    return ShardedMask(parts, step.shape, step.device, sharding, attention_mask, position_ids)


def may_keep(device: torch.device) -> bool:
    """Whether the host may read the values of a device's tensors and keep them: not while a graph is made."""
    return not (is_compiling() or is_capturing(device))


def _padding(attention_mask: Tensor | None, first: int, length: int) -> Tensor | None:
    """The padding of the keys of a step; keys that a static cache has not written yet are padding, too."""
    if attention_mask is None:
        return None
    missing = first + length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    if first == 0 and attention_mask.shape[-1] == length:
        return attention_mask
    return attention_mask[:, first : first + length]


def _moved(function: Callable[..., Any], first: Tensor) -> Callable[..., Any]:

    def moved(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return function(b, h, q + first, kv + first)

    return moved
