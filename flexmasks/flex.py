"""The names of torch.nn.attention.flex_attention: change one import, and flexmasks runs the calls.

    from flexmasks.flex import create_block_mask, flex_attention

Signatures, defaults and results are torch's, inside and outside of torch.compile. What is better than torch's: block
masks are found from ranges of the mask function, not from all pairs of queries and keys; calls need no torch.compile,
and a new mask, length or number compiles little or nothing; a CPU has gradients and lse; FlashAttention 4 runs what it
can; functions that torch's compiler gets wrong are exact. What differs stands in recipes/coming_from/flex_attention.md.

`and_masks`, `or_masks`, `create_mask`, `noop_mask`, `BlockMask`, `AuxRequest`, `AuxOutput` and `FlexKernelOptions` are
torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput as AuxOutput
from torch.nn.attention.flex_attention import AuxRequest as AuxRequest
from torch.nn.attention.flex_attention import BlockMask as BlockMask
from torch.nn.attention.flex_attention import FlexKernelOptions as FlexKernelOptions
from torch.nn.attention.flex_attention import and_masks as and_masks
from torch.nn.attention.flex_attention import create_block_mask as _torch_create_block_mask
from torch.nn.attention.flex_attention import create_mask as create_mask
from torch.nn.attention.flex_attention import flex_attention as _torch_flex_attention
from torch.nn.attention.flex_attention import noop_mask as noop_mask
from torch.nn.attention.flex_attention import or_masks as or_masks

from flexmasks.attention import attention
from flexmasks.attention import block_mask as _block_mask
from flexmasks.backends.plain import compiled_flex_attention, greatest_scores
from flexmasks.blocks.lists import in_full_width, lists_of
from flexmasks.devices import runs_triton
from flexmasks.plans.portable import made_like, repeated
from flexmasks.spec.by_name import says_what_to_write

__all__ = [
    "AuxOutput", "AuxRequest", "BlockMask", "FlexKernelOptions", "and_masks", "create_block_mask", "create_mask",
    "flex_attention", "noop_mask", "or_masks",
]  # fmt: skip


@says_what_to_write()
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Return attention as torch.nn.attention.flex_attention.flex_attention does, by `flexmasks.attention`.

    Args:
        query: [B, Hq, L, E]; key: [B or 1, Hkv, S, E]; value: [B or 1, Hkv, S, Ev].
        score_mod: a function (score, b, h, q_idx, kv_idx) -> score, or a Score.
        block_mask: what is visible, all by default. Of lists for more batch elements or heads, the first count.
        scale: the factor of query @ key^T, 1 / sqrt(E) by default; also a tensor that broadcasts to [B, Hq, L, S].
        enable_gqa: whether Hq may be a multiple of Hkv.
        return_lse: deprecated by torch in favor of return_aux=AuxRequest(lse=True).
        kernel_options: options of torch's kernels, which then run the call.
        return_aux: further results that are wanted, AuxRequest(lse=True, max_scores=True).

    Returns:
        The output, [B, Hq, L, Ev]; (output, lse) with return_lse; (output, AuxOutput) with return_aux. lse is the
        natural log-sum-exp of the scores of each row, [B, Hq, L], and -inf for rows that see nothing; max_scores, of
        the same shape and without a gradient, is the greatest of them.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    Source: Dong et al., Flex Attention, 2024.

    Example:
        >>> import torch
        >>> from flexmasks.flex import create_block_mask, flex_attention
        >>> q, k, v = torch.randn(3, 1, 2, 256, 16, requires_grad=True)
        >>> block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256, "cpu")
        >>> flex_attention(q, k, v, block_mask=block_mask).sum().backward()
    """
    if not isinstance(return_aux, AuxRequest | None):
        advice = "write AuxRequest(lse=True, max_scores=True)"
        raise TypeError(
            f"flexmasks.flex.flex_attention: `return_aux` must be an AuxRequest, got {return_aux!r}; {advice}."
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        counts = f"query has {query.shape[1]} heads, key {key.shape[1]}"
        raise ValueError(f"flexmasks.flex.flex_attention: {counts}; pass enable_gqa=True.")
    if return_lse and return_aux is not None:
        raise ValueError(
            "flexmasks.flex.flex_attention: pass `return_aux=AuxRequest(lse=True)` alone, without `return_lse`."
        )
    if isinstance(scale, Tensor):
        score_mod, scale = _scaled(score_mod, scale, (*query.shape[:3], key.shape[2])), 1.0
    block_mask = _of_first(block_mask, *query.shape[:2])
    by_kernel = return_aux is not None and return_aux.max_scores and runs_triton(query.device)
    if by_kernel:  # torch's kernel has them at no cost
        by_torch: Any = _torch_flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
        return by_torch(
            query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options=kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    result = attention(
        query, key, value, score=score_mod, block_mask=block_mask, scale=scale, q_offset=0, return_lse=wants_lse,
        kernel_options=kernel_options,
    )  # fmt: skip
    if return_aux is None:
        return result
    out, lse = result if wants_lse else (result, None)
    most = greatest_scores(query, key, score_mod, block_mask, scale) if return_aux.max_scores else None
    return out, AuxOutput(lse=lse, max_scores=most)


def _scaled(score_mod: Callable[..., Tensor] | None, scale: Tensor, sizes: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return a score change that multiplies scores by a tensor first."""
    if scale.numel() == 1:
        factor = scale.reshape(())
    else:
        try:
            factors = scale.expand(sizes)
        except RuntimeError:
            wanted = f"broadcast to [B, Hq, L, S] = {[*sizes]}, got {[*scale.shape]}"
            raise ValueError(f"flexmasks.flex.flex_attention: a tensor `scale` must {wanted}.") from None

    def scaled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score * (factor if scale.numel() == 1 else factors[b, h, q_idx, kv_idx])
        return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)

    return scaled


def _of_first(block_mask: Any, batch: int, heads: int) -> Any:
    """Return a block mask whose lists are of no more batch elements and heads than a call has."""
    counts = getattr(block_mask, "kv_num_blocks", None)
    if counts is None or counts.ndim != 3 or (counts.shape[0] <= batch and counts.shape[1] <= heads):
        return block_mask
    lists = [None if x is None else x[:batch, :heads] for x in lists_of(block_mask)]
    return made_like(block_mask, block_mask.seq_lengths, *lists, block_mask.BLOCK_SIZE, block_mask.mask_mod)


def create_block_mask(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    **options: Any,
) -> BlockMask:
    """Return the block mask of a function as torch.nn.attention.flex_attention.create_block_mask does.

    Its blocks are exact, and equal torch's. Inside torch.compile they are found by bounds of the mask: all that may be
    partial is partial; of a function that captures tensors there, by a look at all pairs.

    Args:
        mask_mod: a function (b, h, q_idx, kv_idx) -> bool, True = visible, or a Mask.
        B, H: the numbers of batch elements and heads that the lists have; None is 1, for all.
        Q_LEN, KV_LEN: the numbers of queries and keys.
        device: where the lists live; by default that of the current accelerator, or the CPU.
        BLOCK_SIZE: of a block, for queries and keys, or a pair.
        _compile: has no effect; nothing is compiled.
        separate_full_blocks: False to have no full blocks, only partial ones.
        compute_dq_write_order, dq_kv_order, **options: options of torch 2.13 and later. Torch's own function makes the
            block mask if one of them, or separate_full_blocks, is not the default.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    Example:
        >>> from flexmasks.flex import create_block_mask
        >>> create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 2, 4, 512, 512, "cpu").shape
        (2, 4, 512, 512)
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    defaults = {"separate_full_blocks": True, "compute_dq_write_order": False, "dq_kv_order": True}
    given = separate_full_blocks, compute_dq_write_order, dq_kv_order
    changed = {n: x for (n, default), x in zip(defaults.items(), given, strict=True) if x is not default}
    if changed or any(options.values()):
        options |= changed  # versions of torch without an option say that they have none
        return _torch_create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile, **options)
    sizes: Any = {"batch": B or 1, "heads": H or 1, "device": device, "block_size": BLOCK_SIZE, "q_offset": 0}
    may_read = not torch.compiler.is_compiling()
    made = in_full_width(_block_mask(mask_mod, Q_LEN, KV_LEN, check=may_read, **sizes))
    return repeated(made, B or 1, H or 1)
