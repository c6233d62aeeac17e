"""torch's scaled_dot_product_attention: the same call by flexmasks, and its replacement inside a block of code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks import compat
from flexmasks.attention import attention
from flexmasks.context import is_capturing, is_invariant, is_traced_or_transformed
from flexmasks.plans.held import HeldPlan
from flexmasks.spec.arguments import MaskLike
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.pairs import mask_and_score, read_pairs

if TYPE_CHECKING:
    from flexmasks.compat import BlockMask

_torchs = F.scaled_dot_product_attention

# Tensors of fewer pairs of a query and a key are handed on to torch without a look.
_FEWEST_PAIRS = {"cuda": 1 << 20, "cpu": 1 << 20}
# On a CPU a kernel for other masks than the causal one is compiled, which takes 10 to 30 s once.
_FEWEST_PAIRS_TO_COMPILE = 1 << 22
# The largest share of blocks with visible pairs at which skipping the others pays.
_MOST_BLOCKS = {"cuda": 0.9, "cpu": 0.5}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@says_what_to_write()
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | MaskLike | Sequence[MaskLike] | HeldPlan | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute torch.nn.functional.scaled_dot_product_attention, block-sparse where that pays.

    Arguments, results and errors are torch's. A tensor as `attn_mask` is looked at once, by blocks of 128 x 128: what
    shows all is left out, a lower triangle becomes `is_causal`, and where a long call has enough empty blocks,
    `flexmasks.attention` skips them. torch runs all other calls: those without a mask, those inside torch.compile,
    torch.func, dispatch modes and CUDA graphs, where no values may be read, and those for which
    torch.nn.attention.sdpa_kernel allows the formula only. Inside `flexmasks.invariant` it runs none. What was found in
    a tensor is kept until the tensor changes, also in place, or is freed: give all layers the same one, or views of it.

    A query that sees nothing, by booleans or by -inf, gives 0 where flexmasks runs the call; torch's kernels give 0 or,
    some on GPUs, NaN. A query whose keys all have finite numbers near the lowest one gives what torch gives, see
    `flexmasks.extend.mask_and_score`.

    Args:
        query: [..., H, Q, D], with any leading dimensions.
        key, value: [..., Hkv, KV, D] and [..., Hkv, KV, Dv].
        attn_mask: booleans (True = visible) or numbers that are added to the scores, with a gradient if they learn, of
            any shape that broadcasts to [..., H, Q, KV] and has two dimensions at least. Or what `flexmasks.attention`
            takes as a mask: a Mask, a name, a plan, a function or a BlockMask; then `flexmasks.attention` runs the
            call, also inside torch.compile, and query i is at position i, as with `is_causal`; a plan or BlockMask says
            itself where queries start.
        dropout_p: as in torch; `flexmasks.attention` draws other pairs than torch does.
        is_causal: query i sees the keys 0 to i; not together with `attn_mask`.
        scale: factor of query @ key^T, 1 / sqrt(D) by default.
        enable_gqa: whether H may be a multiple of Hkv.

    Returns:
        The output, [..., H, Q, Dv].

    Raises:
        ValueError: for an `attn_mask` that is no tensor, what `flexmasks.attention` raises, and for `is_causal` or
            grouped heads without `enable_gqa`.
        RuntimeError: torch's errors.

    Example:
        >>> import torch, flexmasks
        >>> query, key, value = torch.randn(3, 2, 4, 100, 16)
        >>> attn_mask = torch.rand(100, 100) < 0.5
        >>> out = flexmasks.sdpa(query, key, value, attn_mask)
        >>> want = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask)
        >>> torch.allclose(out, want, atol=1e-6)
        True
        >>> flexmasks.sdpa(query, key, value, flexmasks.masks.sliding_window(window=16)).shape
        torch.Size([2, 4, 100, 16])
    """
    must_be_ours = is_invariant()  # torch's kernels do not promise the same bits
    if attn_mask is None and must_be_ours:
        attn_mask, is_causal = "causal" if is_causal else "full", False
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        _check_of_mask(query, key, is_causal, enable_gqa)
        has_start = isinstance(attn_mask, HeldPlan) or hasattr(attn_mask, "kv_num_blocks")
        q, k, v = (_of_four(x) for x in (query, key, value))
        start = None if has_start else 0
        out = attention(q, k, v, mask=attn_mask, q_offset=start, scale=scale, dropout_p=dropout_p)
        return out.reshape(*query.shape[:-1], value.shape[-1])
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    drops_some = isinstance(dropout_p, int | float) and 0 <= dropout_p < 1
    if attn_mask is None or is_causal or not drops_some:
        return _torchs(query, key, value, attn_mask, is_causal=is_causal, **options)
    if not must_be_ours and not _may_pay(query, key, value, attn_mask, enable_gqa):
        return _torchs(query, key, value, attn_mask, is_causal=is_causal, **options)
    q, k, v, pairs = (_of_four(x) for x in (query, key, value, attn_mask))
    device, sizes = query.device.type, (*q.shape[:3], k.shape[2])
    # With dropout a call of `attention` takes twice its time.
    most = _MOST_BLOCKS.get(device, 1.0) / (2 if dropout_p else 1)
    # `_may_pay` has checked what `read_pairs` takes as checked.
    found = mask_and_score(pairs, sizes) if must_be_ours else read_pairs(pairs, sizes, most=most)
    if found is None:
        return _torchs(query, key, value, attn_mask, **options)
    mask, score, visible_blocks = found
    name = None if mask is None else mask.name
    # torch masks causal scores before it scales them: a negative scale would turn -inf into inf.
    if score is None and name in (None, "causal") and (scale is None or scale > 0) and not must_be_ours:
        return _torchs(query, key, value, is_causal=name == "causal", **options)
    is_sparse = visible_blocks is not None and visible_blocks <= most
    if device == "cpu":
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, pairs))
        is_sparse = is_sparse and not learns and q.shape[2] * k.shape[2] >= _FEWEST_PAIRS_TO_COMPILE
    if not is_sparse and not must_be_ours:
        return _torchs(query, key, value, attn_mask, **options)
    out = attention(q, k, v, mask=mask, score=score, q_offset=0, scale=scale, dropout_p=dropout_p)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _of_four(x: Tensor) -> Tensor:
    """A tensor with its leading dimensions as one, or with ones in place of missing ones."""
    return x.flatten(0, -4) if x.ndim > 4 else x.expand(*(1,) * (4 - x.ndim), *x.shape)


def _check_of_mask(query: Tensor, key: Tensor, is_causal: bool, enable_gqa: bool) -> None:
    """Check what torch checks of a call with a mask that is no tensor."""
    problem = ""
    if is_causal:
        problem = "`is_causal` and `attn_mask` exclude each other; pass `mask & causal()` of flexmasks.masks"
    elif not enable_gqa and query.ndim > 2 and query.shape[-3] != key.shape[-3]:
        problem = f"query has {query.shape[-3]} heads and key {key.shape[-3]}; pass `enable_gqa=True`"
    if problem:
        raise ValueError(f"flexmasks.sdpa: {problem}.")


def _may_pay(query: Tensor, key: Tensor, value: Tensor, pairs: Tensor, enable_gqa: bool) -> bool:
    """Whether flexmasks can run a call, and may be faster than torch: then the values of the mask decide."""
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in (query, key, value, pairs)):
        return False
    if not _may_read(query.device):
        return False
    kind = query.device.type
    if kind not in _FEWEST_PAIRS or min(query.ndim, key.ndim, value.ndim) < 3 or pairs.ndim < 2:
        return False
    (*lead, heads, q_len, size), (kv_heads, kv_len) = query.shape, key.shape[-3:-1]
    if q_len * kv_len < _FEWEST_PAIRS[kind] or query.numel() == 0 or key.numel() == 0:
        return False
    is_grouped = enable_gqa and kv_heads > 0 and heads % kv_heads == 0
    fits = (heads == kv_heads or is_grouped) and key.shape == (*lead, kv_heads, kv_len, size)
    fits = fits and value.shape[:-1] == key.shape[:-1] and min(size, value.shape[-1]) >= 16
    fits = fits and max(size, value.shape[-1]) <= 256 and query.dtype == key.dtype == value.dtype
    fits = fits and query.device == key.device == value.device == pairs.device
    taken = _DTYPES if torch.is_autocast_enabled(kind) else (torch.float32, query.dtype)
    if not fits or query.dtype not in _DTYPES or pairs.dtype not in (torch.bool, *taken):
        return False
    whole, of_pairs = (*lead, heads, q_len, kv_len), pairs.shape[:-3]
    if pairs.ndim > len(whole) or any(n not in (1, m) for n, m in zip(pairs.shape[::-1], whole[::-1], strict=False)):
        return False
    if of_pairs.numel() != 1 and list(of_pairs) != lead:
        return False  # some leading dimensions are alike, so that they cannot become one
    cuda = torch.backends.cuda  # else torch is to take its formula, which has second derivatives
    return any((cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()))


def _may_read(device: torch.device) -> bool:
    """Whether what values say holds for all runs of what is computed now."""
    if is_traced_or_transformed() or torch.jit.is_tracing() or is_capturing(device):  # type: ignore[attr-defined]
        return False
    return all(map(compat.is_of_checkpointing, compat.active_modes()))


_LOCK = threading.Lock()
_open = 0  # blocks, in all threads
_before: tuple[Any, bool] = _torchs, True  # what stood there before the first one, and torch's fast path


@says_what_to_write()
@contextlib.contextmanager
def sdpa_replaced() -> Iterator[None]:
    """Inside this block torch.nn.functional.scaled_dot_product_attention is `flexmasks.sdpa`.

    So the attention of torch.nn.MultiheadAttention and its Transformer layers, timm, torchvision, open_clip and other
    code that calls torch.nn.functional goes there. torch's fast path of MultiheadAttention, which calls no such
    function, is off meanwhile. It holds for the whole process, for all threads while one of them is inside, and it may
    be nested and decorate a function. A backward pass in which activation checkpoints make calls again runs inside,
    too. When the last block is left, also by an exception, all is as before. Importing flexmasks replaces nothing.

    Not replaced are names that were imported before, as by `from torch.nn.functional import
    scaled_dot_product_attention`, torch.ops.aten, C++ code, and MultiheadAttention with `need_weights=True`, its
    default, which computes its weights itself. torch.compile is to be called and run inside, and the block is not to be
    entered in what it compiles.

    Example:
        >>> import torch, flexmasks
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
        >>> x, mask = torch.randn(2, 100, 64), torch.nn.Transformer.generate_square_subsequent_mask(100)
        >>> want = layer(x, mask)
        >>> with flexmasks.sdpa_replaced():
        ...     out = layer(x, mask)
        >>> torch.allclose(out, want, atol=1e-5)
        True
    """
    global _open, _before
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError("flexmasks.sdpa_replaced: enter it outside of what torch.compile compiles, and call that.")
    with _LOCK:
        if _open == 0:
            _before = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
            F.scaled_dot_product_attention = sdpa
            torch.backends.mha.set_fastpath_enabled(False)
        _open += 1
    try:
        yield
    finally:
        with _LOCK:
            _open -= 1
            if _open == 0:
                if F.scaled_dot_product_attention is sdpa:  # else somebody has replaced it in the block
                    F.scaled_dot_product_attention = _before[0]
                torch.backends.mha.set_fastpath_enabled(_before[1])
