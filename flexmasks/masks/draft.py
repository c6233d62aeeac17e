from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, at, check_covers_queries, check_one_of_two, may_read, register_mask

Length = Annotated[int, "int in 1.."]


@register_mask(example=lambda length: {"length": length // 2})
def eagle3(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, length: Length) -> Tensor:
    """Training of a draft model over several steps, as in EAGLE-3.

    Query q sees the keys of step 0 causally, and its own key, the q-th, of each later step.

    length: number of positions in a step. The keys of step 0 come first, then `length` keys for each later step.

    Padding at the end of a step is seen only by queries that are padding themselves.

    Source: Li et al., EAGLE-3, 2025 (training-time test).
    Peers: SpecForge generate_eagle3_mask(seq_lengths, Q_LEN=length), which also hides the rows of padding.
    """
    return (kv <= q) & (kv < length) | (kv >= length) & ((kv - q) % length == 0)


def _prepare_block_diffusion(
    size: Size | None,
    *,
    length: Length,
    block: Annotated[int | None, "int in 1.."] = None,
    block_ids: Annotated[Tensor | None, "int[N] | int[B, N]"] = None,
    clean_first: Annotated[bool, "bool"] = False,
) -> dict[str, Any]:
    check_one_of_two(block=block, block_ids=block_ids)
    if block_ids is not None:
        if block_ids.shape[-1] != length:
            raise ValueError(f"`block_ids` must have a block for each of {length} tokens, got {block_ids.shape[-1]}.")
        if size is not None and "S" not in size.at_most and size.positions > 2 * length:
            raise ValueError(f"{length} tokens, noised and clean, make {2 * length} positions, got {size.positions}.")
    return {
        "length": length,
        "block": 1 if block is None else block,
        "block_ids": block_ids,
        "clean_first": clean_first,
    }


@register_mask(prepare=_prepare_block_diffusion, example=lambda length: {"length": length // 2, "block": length // 16})
def block_diffusion(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    length: int,
    block: int,
    block_ids: Tensor | None,
    clean_first: bool,
) -> Tensor:
    """Training of block diffusion: noised tokens beside the same tokens clean.

    Noised tokens see the noised tokens of their own block and the clean tokens of earlier blocks. Clean tokens see the
    clean tokens of their own and of earlier blocks.

    length: number of tokens; positions 0 to length - 1 are noised, the next `length` positions are clean.
    block: number of tokens in a block.
    block_ids: in place of `block` the number of each token's block, for all batch elements or for each; a block is
        earlier if its number is smaller.
    clean_first: True if the clean tokens come first.

    Source: Arriola et al., Block Diffusion (BD3-LM), 2025, figure 3; Huang et al., Self Forcing, 2025 (its teacher
        forcing: clean frames come first).
    Peers: attention-gym generate_block_diffusion_mask(length, block); BD3-LM block_diff_mask(block_size, n), SDAR
        block_diff_mask; Self-Forcing _prepare_teacher_forcing_mask, with clean_first and a frame's tokens as `block`.
    """
    q_second, kv_second = q >= length, kv >= length
    q_token, kv_token = torch.where(q_second, q - length, q), torch.where(kv_second, kv - length, kv)
    if block_ids is None:
        row, column = q_token // block, kv_token // block
    else:
        row, column = at(block_ids, b, q_token), at(block_ids, b, kv_token)
    is_clean = ~kv_second if clean_first else kv_second
    return ((row == column) & (q_second == kv_second)) | ((column < row) & is_clean)


def _prepare_anchored(
    size: Size | None,
    *,
    anchors: Annotated[Tensor, "int[N] | int[B, N]"],
    block: Length,
    context: Annotated[int, "int in 0.."],
) -> dict[str, Any]:
    if may_read(size, anchors) and anchors.numel() and int(anchors.max()) > context:
        raise ValueError(f"`anchors` are at most {context}, the length of the context, got {int(anchors.max())}.")
    drafts = anchors.shape[-1] * block
    check_covers_queries("anchors", drafts, size, "a block")
    if size is not None and "KV" not in size.at_most and size.kv_len > context + drafts:
        raise ValueError(
            f"{context} tokens and {drafts // block} blocks of {block} are {context + drafts} keys, got {size.kv_len}."
        )
    return {"anchors": anchors, "block": block, "context": context}


@register_mask(
    prepare=_prepare_anchored,
    example=lambda length: {
        "anchors": [i * 5 % 8 * length // 16 for i in range(16)],
        "block": -(-length // 16),
        "context": length // 2,
    },
)
def anchored(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, anchors: Tensor, block: int, context: int) -> Tensor:
    """Drafted blocks: each sees itself and the context before its anchor.

    Queries are the drafted tokens, block after block. Keys are the context and then the drafted tokens: query q of
    block n = q // block sees the keys kv < anchors[n] of the context, and the keys of block n.

    anchors: the number of tokens of the context that each block sees, for all batch elements or for each; negative for
        a block that is left out, whose queries see nothing.
    block: number of tokens in a block.
    context: number of keys before those of the drafted tokens.

    Source: Chen et al., DFlash, 2026.
    Peers: SpecForge create_dflash_block_mask(anchor_positions, block_keep_mask, S=context, block_size=block) for
        DFlash, Domino and DSpark; DeepSpec create_dspark_attention_mask.
    """
    own = q // block
    anchor = at(anchors, b, own)
    in_context = (kv < context) & (kv < anchor)
    in_draft = (kv >= context) & ((kv - context) // block == own)
    return (in_context | in_draft) & (anchor >= 0)
