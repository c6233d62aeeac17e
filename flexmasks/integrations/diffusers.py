"""Hugging Face diffusers: models run by `model.set_attention_backend("flex")`."""

from __future__ import annotations

import copy
import itertools
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexmasks import Mask, Plan, Score, attention, get_mask
from flexmasks.extend import in_message, mask_and_score, shown_by
from flexmasks.integrations import distributed

__all__ = ["register", "unregister"]

# What diffusers' registry keeps of a backend. A backend gets only the arguments that its signature names.
_TABLES = "_backends", "_constraints", "_supported_arg_names"
_replaced: dict[str, Any] = {}  # the entries of diffusers' own backend


def register() -> str:
    """Let diffusers' models attend by `flexmasks.attention`, under the name "flex", which is returned.

    diffusers takes no new names of backends, so that this replaces its own "flex" in this process, until `unregister`.
    Then `model.set_attention_backend("flex")`, `with attention_backend("flex"):` and `DIFFUSERS_ATTN_BACKEND=flex` take
    flexmasks, as do models that ask for "flex" by themselves, because their masks are block masks: these run without
    torch.compile, and keep no scores of all pairs, whatever diffusers' warning about that says.

    Masks may be, bool (True = visible) or added to the scores, on the CPU or a GPU, inside torch.compile too:

    - [B, KV], the keys that all queries of a batch element see, as with diffusers' "native", also if Q is B;
    - [KV], [1 or Q, KV], [B, 1 or Q, KV] and [B or 1, H or 1, Q or 1, KV];
    - a BlockMask of torch, of any block size, new at each call;
    - a Mask or a plan of this library.

    With `is_causal` query i sees the keys up to i, as in SDPA, of those that a mask shows. Heads are grouped where key
    and value have fewer. A mask that shows all is looked at once, and then costs nothing.

    With context parallelism calls go to `flexmasks.integrations.distributed.attention`, causal and grouped ones too. A
    mask has the keys of all processes, or those of its own process and a row for all queries. Keys and queries must be
    of the same sequence. `ulysses_degree` and `ring_degree` say which processes hold it; heads are exchanged if there
    are enough, else keys and values are gathered.

    `attention_kwargs={"return_lse": True}` returns the log-sum-exp, too, [B, H, Q] as diffusers' other backends do,
    [B, Q, H] with context parallelism.

    Models that call SDPA themselves, such as SD3, CogVideoX and UNets, do so with every backend.

    Raises:
        ImportError: diffusers >= 0.42 is not installed.

    Example:
        >>> from flexmasks.integrations import diffusers
        >>> diffusers.register()  # doctest: +SKIP
        'flex'
        >>> pipeline.transformer.set_attention_backend("flex")  # doctest: +SKIP
    """
    registry, name = _registry()
    if registry._backends[name] is not _attend:
        _replaced.update({table: getattr(registry, table)[name] for table in _TABLES})
        registry.register(name, supports_context_parallel=True)(_attend)
    return cast(str, name.value)


def unregister() -> None:
    """Give the name "flex" back to diffusers' own backend. Without `register` before it this does nothing."""
    if not _replaced:
        return
    registry, name = _registry()
    for table in _TABLES:
        getattr(registry, table)[name] = _replaced.pop(table)
    registry._supports_context_parallel.discard(name.value)


def _registry() -> tuple[Any, Any]:
    """diffusers' table of backends, and the name of the one that is replaced."""
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError:
        raise ImportError(
            "flexmasks.integrations.diffusers needs diffusers >= 0.42: `pip install 'diffusers>=0.42'`."
        ) from None
    return _AttentionBackendRegistry, AttentionBackendName.FLEX


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The output [B, Q, H, Dv] of a layer's attention; diffusers calls this function with the arguments that it names.

    query, key, value: [B, Q, H, D], [B, KV, Hkv, D] and [B, KV, Hkv, Dv].
    enable_gqa: whether heads are grouped, which the shapes say, too.
    window_size, softcap, deterministic, return_attn_probs: what some of diffusers' backends take. They are named to be
        refused: diffusers leaves out what is not named, in silence.
    """
    if tuple(window_size) != (-1, -1) or softcap or deterministic or return_attn_probs:
        _fail(
            f"the backend takes no window_size={window_size}, softcap={softcap}, deterministic={deterministic} or "
            f"return_attn_probs={return_attn_probs}; leave them out. `flexmasks.attention` has a mask for windows and "
            "a score for soft-caps, and obeys torch.use_deterministic_algorithms."
        )
    options: dict[str, Any] = {"scale": scale, "return_lse": return_lse, "dropout_p": dropout_p}
    if _parallel_config is not None:
        config = _parallel_config.context_parallel_config
        return _attend_over_processes(query, key, value, attn_mask, is_causal, config, options)
    mask, score = _of_mask(attn_mask, query, query.shape[1], key.shape[1])
    if not hasattr(mask, "q_offset"):  # a plan says by itself where its queries start
        options["q_offset"] = 0
    mask = _causal(mask) if is_causal else mask
    result: Any = attention(query, key, value, mask=mask, score=score, layout="bshd", **options)
    return cast(Tensor | tuple[Tensor, Tensor], result)


def _of_mask(given: Any, query: Tensor, q_len: int, kv_len: int) -> tuple[Any, Score | None]:
    """What `flexmasks.attention` takes in place of diffusers' mask."""
    if isinstance(given, Tensor):
        batch, _, heads, _ = query.shape
        of_keys = given.shape == (batch, kv_len)
        pairs = given[:, None] if given.ndim == 3 else given
        return mask_and_score(pairs, (batch, heads, q_len, kv_len), of_keys=of_keys)[:2]
    if isinstance(given, BlockMask) and given.mask_mod is None:
        given = copy.copy(given)
        given.mask_mod = noop_mask
    if not (given is None or isinstance(given, BlockMask | Mask | Plan)):
        _fail(f"a mask must be a tensor, a BlockMask, a Mask or a plan, got {in_message(given)}.", TypeError)
    return given, None


def _causal(mask: Any) -> Mask:
    """The mask with those keys of each query alone that do not come after it."""
    if isinstance(mask, Plan):
        _fail("a plan takes no is_causal; make it of a mask that is causal.")
    causal = get_mask("causal")
    return causal if mask is None else (shown_by(mask) if isinstance(mask, BlockMask) else mask) & causal


def _attend_over_processes(
    query: Tensor, key: Tensor, value: Tensor, given: Any, is_causal: bool, config: Any, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """The output of queries of which each process has some, as it has keys and values."""
    mesh: DeviceMesh = config._mesh["ring", "ulysses"]
    if isinstance(given, Tensor) and given.shape[-1] == key.shape[1]:
        given = _of_all(given, mesh, config.ulysses_anything or config.ring_anything)
    length = given.shape[-1] if isinstance(given, Tensor) else 0
    mask, score = _of_mask(given, query, length, length)
    if isinstance(mask, Plan):
        _fail("with context parallelism a plan is no mask; pass its `mask`.")
    mask = _causal(mask) if is_causal else shown_by(mask) if isinstance(mask, BlockMask) else mask
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    result: Any = distributed.attention(q, k, v, mesh=mesh, mask=mask, score=score, **options)
    return (result[0].transpose(1, 2), result[1].transpose(1, 2)) if options["return_lse"] else result.transpose(1, 2)


def _of_all(mask: Tensor, mesh: DeviceMesh, may_differ: bool) -> Tensor:
    """A mask with the keys of all processes, of which each has those of its own keys.

    may_differ: whether the processes may have different numbers of keys.
    """
    lengths = [mask.shape[-1]] * mesh.size()
    if may_differ:
        own = torch.tensor(lengths[:1], device=mask.device)
        lengths = distributed.unshard(own, distributed.Order.natural(mesh.size(), mesh.size()), mesh, dim=0).tolist()
    ends = list(itertools.accumulate(lengths))
    order = distributed.Order(ends[-1], tuple(((end - n, end),) for end, n in zip(ends, lengths, strict=True)))
    return distributed.unshard(mask, order, mesh, dim=-1)


def _fail(message: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f'diffusers\' attention backend "flex" (flexmasks): {message}')
