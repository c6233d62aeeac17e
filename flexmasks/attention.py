"""The public calls for attention: attention, varlen_attention, paged_attention, block_mask, dense_mask, explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, overload

import torch
from torch import Tensor

from flexmasks import compat, later
from flexmasks.plans.explanation import Explanation
from flexmasks.spec.arguments import Alignment, Ints, Layout, MaskLike, Masks, Pages, ScoreLike, Seed, get_mask
from flexmasks.spec.by_name import named, says_what_to_write
from flexmasks.spec.definitions import KEYWORDS
from flexmasks.spec.parameters import as_number, in_message, listed

if TYPE_CHECKING:
    from flexmasks.plans.held import HeldPlan

    MasksOrPlan: TypeAlias = Masks | HeldPlan
else:
    MasksOrPlan = Masks  # the class takes long to import


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MasksOrPlan | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    block_mask: compat.BlockMask | None = None, q_offset: Alignment = None, layout: Layout = "bhsd",
    sink_logits: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Seed = None,
    return_lse: Literal[False] = False, return_max: Literal[False] = False, backend: str = "auto",
    kernel_options: dict[str, Any] | None = None, **params: Any,
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MasksOrPlan | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    block_mask: compat.BlockMask | None = None, q_offset: Alignment = None, layout: Layout = "bhsd",
    sink_logits: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Seed = None,
    return_lse: Literal[True], return_max: Literal[False] = False, backend: str = "auto",
    kernel_options: dict[str, Any] | None = None, **params: Any,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MasksOrPlan | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    block_mask: compat.BlockMask | None = None, q_offset: Alignment = None, layout: Layout = "bhsd",
    sink_logits: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Seed = None,
    return_lse: bool, return_max: Literal[False] = False, backend: str = "auto",
    kernel_options: dict[str, Any] | None = None, **params: Any,
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MasksOrPlan | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    block_mask: compat.BlockMask | None = None, q_offset: Alignment = None, layout: Layout = "bhsd",
    sink_logits: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Seed = None,
    return_lse: bool = False, return_max: Literal[True], backend: str = "auto",
    kernel_options: dict[str, Any] | None = None, **params: Any,
) -> tuple[Tensor, ...]: ...
# fmt: on


@says_what_to_write()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MasksOrPlan | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    block_mask: compat.BlockMask | None = None,
    q_offset: Alignment = None,
    layout: Layout = "bhsd",
    sink_logits: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    return_lse: bool = False,
    return_max: bool = False,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
    **params: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Compute exact, differentiable attention under a mask, on the fastest possible backend.

    The result is softmax(score(q @ k^T * scale)) @ v over the keys that the mask lets each query see. A row that sees
    nothing gives output 0, lse -inf and zero gradients. In the forward pass, hidden keys and queries that see nothing
    may hold anything, NaN too. Hidden values must be finite. In the backward pass, hidden keys and queries that see
    nothing must be finite too. The reference backend has neither limit.

    Queries of padding are rows like all others: 0 where they see nothing, as with `grouped_tril`, and an average of
    real values where they see real keys, as with `padding` and `key_padding`.

    In forward mode, torch.func.jvp or dual tensors of torch.autograd.forward_ad, output and lse get the tangents that
    those of q, k and v give them: on a GPU from one kernel for all masks, in about 3 times the time of a forward pass;
    with a score, in float64 and on a CPU from slices of torch's operations. Inside torch.compile, too; there slices are
    part of the graph where the score learns, and for given blocks. Output and tangents have gradients. The reference
    runs nested transforms of torch.func, torch.func.vmap, and calls whose mask or score has a tangent. Gradients of
    gradients (create_graph=True) are computed by slices after SDPA, "short" and "reference"; other kernels have none,
    and an error says to pass backend="reference". No memory of all this grows with Q x KV.

    A tensor that the mask or score reads may not be changed in place before the backward pass: torch's own error says
    so, in activation checkpoints too, but not with `use_reentrant=True`, where the changed tensor is read.

    Args:
        q: queries, [B, H, Q, D], floating; or a jagged nested tensor [B, H, jagged, D], and k and v likewise.
        k, v: keys [B, Hkv, KV, D] and values [B, Hkv, KV, Dv]; H must be a multiple of Hkv (grouped-query attention).
            Of batch size 1 they are for all queries, as a prompt that all share. As a cache they may have a dtype of
            fewer bits than q's, such as float8, with its scale in the score; only the backends "flex", on a GPU and
            without gradients, and "reference" take that, and a warning is logged once where the slow reference runs.
            Any other dtype than q's is a TypeError. Dv may be another head size than D, as in multi-head latent
            attention. Compiled kernels for the CPU get copies of tensors that lie in memory neither as [B, H, S, D] nor
            as [B, S, H, D], up to 256 MiB a call: keys that are expanded over the batch then take the memory of the
            whole batch. Larger ones are not copied, and compile a kernel for their layout. q, k and v may be DTensors
            that are sharded alike over batch elements and heads, and then so is the output; for a sharded sequence
            there is `flexmasks.integrations.distributed.attention`.
        mask: a registered mask's name, a Mask, a plan, a function (b, h, q, kv) -> bool of index tensors, True =
            visible, or booleans as SDPA takes them, [Q, KV], [H, Q, KV] or [B or 1, H or 1, Q or 1, KV]; or a list of
            these, which all must show a key; or torch's BlockMask. By default everything is visible. Tensors that a
            function captures are inputs of the kernel. A change of such a tensor, also in place, is noticed, unless
            torch does not count it: a change through `tensor.data`, through memory shared with NumPy, by a kernel of
            yours, or by a collective into a tensor that you keep. Call `torch.autograd.graph.increment_version(tensor)`
            or `clear_caches` after such a change. Parameters need no such call.
            A function with an operation that torch's compilers are not known to get right goes to the kernel as data:
            the bits of its different partial blocks, at most 256 MB, 2 KB for each block of 128 x 128; `explain` says
            so. So do functions without tensors on a CPU, where it compiles nothing and is as fast. Whole numbers in
            captured 64-bit tensors are taken to be between -2**60 and 2**60, and -2**30 and 2**30 where the function
            converts them to 32 bits.
            Inside your own torch.compile(fullgraph=True) the blocks of the mask are computed by your graph, from the
            tensors of each run, and so are the bits of functions that go as data, by a look at all pairs. Pass a name,
            a Mask, or a function at the top level of a module with its tensors and numbers as parameters behind `*`:
            `mask=function, ids=ids`. Any other function, a lambda that captures variables or a partial, is slow: torch
            asks it for all pairs, at each run. Make the block mask once for all layers, or write the function so.
            Write `mask.inverse()` for `~mask`, which torch does not trace. Values of tensors are not checked there.
            The same holds for torch.export.export, before torch 2.13 with strict=False. A program with a dynamic length
            takes all lengths, by PyTorch's operations in place of a block-sparse kernel; it can be saved; import
            flexmasks where it is loaded. One for a fixed length that was exported on a GPU, or where no gradient was
            wanted, holds torch's flex_attention, which torch compiles but does not save: let an input or a parameter
            require a gradient, or make the length dynamic, to save it.
        score: a change of the scores: a name, a Score, a function (score, b, h, q, kv) -> score, or floats that are
            added, of the shapes of booleans for a mask, with a gradient if they learn; or a list of these, applied in
            order. Kernels compute a function as torch.compile computes it: in single precision, with indices of 32
            bits. One that would end the process, by rows of tensors, negative indices on a GPU or whole numbers that
            overflow, runs on the reference, and `explain` says why.
            In half precision the gradient of a tensor that a score learns errs by the rounding of the output times
            the size of what the score adds; use float32 q, k and v where that matters.
        scale: factor of q @ k^T, 1 / sqrt(D) by default.
        block_mask: in place of `mask`, a BlockMask that `flexmasks.block_mask` or torch has made.
        q_offset: where the queries start: query i is at position i + q_offset to mask and score, key j is at j. An
            int >= 0, or integers [B], a tensor or a list; "last" for KV - Q, as in decoding, where the queries are the
            last tokens of a KV cache, or "first" for 0. It must be given where the numbers of queries and keys differ,
            unless neither mask nor score reads the query's position. With `block_mask`, which has its own offset built
            in, q_offset moves the score only. Integers [B] must be 0 or at most KV - Q, an int may be larger. On a GPU
            only the first call of a kind checks them, and inside torch.compile none does: larger ones then give wrong
            results.
        layout: of q, k, v and the output: "bhsd", [B, H, S, D] as in SDPA, or "bshd", [B, S, H, D] as in FlashAttention
            and diffusers. The lse is [B, H, Q] in both.
        sink_logits: logits of learned attention sinks, float [H], one per query head. The exponential of a head's
            logit joins each row's sum of exponentials and adds nothing to its output (gpt-oss; Xiao et al., Efficient
            Streaming Language Models with Attention Sinks, 2024). Differentiable; -inf for a head without a sink. The
            lse includes it: for a row that sees nothing, the lse is the logit. Not for jagged inputs, for which
            `varlen_attention` takes it.
        dropout_p: the share of weights that are dropped, from 0 to 1; the others are divided by 1 - dropout_p. Weights
            are dropped whenever it is above 0: pass 0 in evaluation. Whether a pair of a query and a key is dropped
            follows from a random word of each: the same in the backward pass, in activation checkpoints that keep
            torch's random state, on every backend, and however processes share a sequence. The call takes about twice
            its time: a kernel runs for the kept pairs, and one for the log-sum-exp of all. Sinks are never dropped. A
            row whose keys are all dropped has output 0 and zero gradients. Pairs are dropped with a probability that
            is dropout_p rounded to a multiple of 2**-16.
        dropout_seed: an int or a tensor of one, for the same pairs in each call with the same sizes, on any device; or
            a torch.Generator. By default torch's own generator of the device draws, which torch.manual_seed seeds.
        return_lse: also return the natural logarithm of each row's sum of exponentials, [B, H, Q], float32 (float64
            for float64), -inf for a row that sees nothing; differentiable. It is that without dropout.
        return_max: also return the greatest score of each row, [B, H, Q], float32 (float64 for float64), -inf for a row
            that sees nothing, without a gradient, as QK-clip needs it (Kimi K2, 2025). The scores are computed once
            more for it. Not for jagged inputs and DTensors, and inside torch.compile `flexmasks.flex` has it.
        backend: "auto" to choose a backend, or the name of one: "fa4" (FlashAttention 4), "decode" (few queries),
            "sdpa", "flex" (torch's compiled flex_attention), "flex_flash" (the same by FlashAttention 4: "flex" with
            torch's kernel_options={"BACKEND": "FLASH"}), "cudnn" (NVIDIA's kernels for up to four intervals of keys for
            each query), "short" (the whole mask as a tensor) or "reference". A named backend that cannot run the call
            raises an error.
        kernel_options: passed on to torch's flex_attention. BACKEND is "AUTO", "TRITON", "FLASH" or "TRITON_DECODE".
        **params: the parameters of the mask and the score that are given by name. Tensors and lists are inputs of the
            compiled kernel and change freely. Numbers are constants of the kernel, so each value compiles a kernel of
            its own, as do numbers that a function captures. After six values the numbers of a score, and those of a
            mask that may also be tensors, become inputs; for other numbers the mask goes as data. A warning says so
            where neither can be: numbers by which a score decides with `if`, and global variables that it reads. Inside
            torch.compile a parameter that torch has seen change becomes an input where it may be a tensor, or is a
            number of your own score function; any other number compiles a graph for each value.

    Returns:
        The output, [B, H, Q, Dv] in q's dtype, or a tuple of it and what is asked for, lse first. B, Q
        and KV may be 0: without keys, the output is 0 and the lse -inf. Tensors on the meta device or of a
        FakeTensorMode give outputs without data. Under torch.autocast q, k and v are first cast to its dtype, as for
        torch's scaled_dot_product_attention. Jagged inputs give jagged outputs.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.
        MemoryError: the lists of the mask's blocks need more memory than is free on the device.
        RuntimeError: a backend chosen by name failed to compile the call.

    Source: Dong et al., Flex Attention, 2024; Dao et al., FlashAttention, 2022.

    Example:
        >>> import torch, flexmasks
        >>> q, k, v = torch.randn(3, 2, 4, 100, 64)
        >>> flexmasks.attention(q, k, v, mask="causal").shape
        torch.Size([2, 4, 100, 64])
        >>> flexmasks.attention(q, k, v[..., :48], mask="causal").shape
        torch.Size([2, 4, 100, 48])

        Texts packed end to end, and a padded batch:

        >>> document_ids = torch.arange(100) // 30
        >>> from flexmasks.masks import causal, document
        >>> packed = causal() & document(document_ids=document_ids)
        >>> out = flexmasks.attention(q, k, v, mask=packed)
        >>> out = flexmasks.attention(q, k, v, mask="grouped_tril", seq_lens=torch.tensor([100, 60]))
        >>> bool((out[1, :, 60:] == 0).all())
        True
    """
    if layout != "bhsd":
        q, k, v = _with_heads_first(layout, q=q, k=k, v=v)
    if return_max is not False:
        _check_return_max(return_max)
    if block_mask is None and hasattr(mask, "kv_num_blocks"):
        mask, block_mask = None, mask
    scale = scale if scale is None else as_number(scale)
    q_offset = q_offset if q_offset is None else _on_device_of(q, q_offset)
    request = later.request.Request(
        mask, score, params, scale, block_mask, q_offset, sink_logits, return_lse, backend, kernel_options
    )
    if type(dropout_p) is not float or dropout_p:
        request = request._replace(dropout=later.dropout.dropout_of(dropout_p, dropout_seed))
    is_sharded = hasattr(q, "device_mesh") or hasattr(k, "device_mesh")
    if return_max and is_sharded:
        raise TypeError("flexmasks.attention: `return_max` takes no DTensors.")
    run: Any = later.sharded.run if is_sharded else later.road.attend
    out, lse = run(q, k, v, request)
    out = out.transpose(1, 2) if layout == "bshd" else out
    if return_max:
        greatest = later.road.greatest(q, k, v, request)
        return (out, lse, greatest) if return_lse else (out, greatest)
    return (out, lse) if return_lse else out


# fmt: off
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Ints | None = None, kv_offsets: Ints | None = None,
    *, cu_seqlens_q: Ints | None = None, cu_seqlens_k: Ints | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, page_table: Pages | None = None, kv_lens: Ints | None = None,
    mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    q_offset: Alignment = None, sink_logits: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Seed = None, return_lse: Literal[False] = False,
    backend: str = "auto", kernel_options: dict[str, Any] | None = None, **params: Any,
) -> Tensor: ...


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Ints | None = None, kv_offsets: Ints | None = None,
    *, cu_seqlens_q: Ints | None = None, cu_seqlens_k: Ints | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, page_table: Pages | None = None, kv_lens: Ints | None = None,
    mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    q_offset: Alignment = None, sink_logits: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Seed = None, return_lse: Literal[True],
    backend: str = "auto", kernel_options: dict[str, Any] | None = None, **params: Any,
) -> tuple[Tensor, Tensor]: ...


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Ints | None = None, kv_offsets: Ints | None = None,
    *, cu_seqlens_q: Ints | None = None, cu_seqlens_k: Ints | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, page_table: Pages | None = None, kv_lens: Ints | None = None,
    mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    q_offset: Alignment = None, sink_logits: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Seed = None, return_lse: bool, backend: str = "auto",
    kernel_options: dict[str, Any] | None = None, **params: Any,
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


@says_what_to_write()
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Ints | None = None,
    kv_offsets: Ints | None = None,
    *,
    cu_seqlens_q: Ints | None = None,
    cu_seqlens_k: Ints | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Pages | None = None,
    kv_lens: Ints | None = None,
    mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    q_offset: Alignment = None,
    sink_logits: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    return_lse: bool = False,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
    **params: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention` inside each of several sequences laid end to end, without a batch axis.

    It equals `attention` under `flexmasks.packed(mask, offsets, kv_offsets, q_offset)`, for q, k and v in the layout
    of FlashAttention's varlen functions. To mask and score, the batch index is the number of the sequence, and
    positions start at 0 in each.

    With `page_table` and `kv_lens`, k and v are a paged KV cache as in `paged_attention`, and q may be a mixed batch:
    of some sequences the next token, of others a chunk of the prompt or a few drafted tokens, of others none.

    On a CPU, sequences with equally many queries of a mixed batch are computed together, as by `paged_attention`.
    Elsewhere, and inside torch.compile, the queries are cut into pieces of 16 to 64 of one sequence. Their number
    depends on the shapes of q and kv_lens alone: with q padded to one length, steps with new offsets, lengths and pages
    read nothing on the host and compile nothing, and a captured CUDA graph sees changes in place. There, a gradient of
    the cache takes the memory of the cache for each piece.

    Args:
        q: queries, [total, H, D].
        k, v: keys and values, [total of keys, Hkv, D] and [total of keys, Hkv, Dv]; with pages, the caches
            [n_pages, page_size, Hkv, D] and [n_pages, page_size, Hkv, Dv].
        offsets: int[N + 1], the start of each of N sequences and the end of the last (cu_seqlens_q). Tokens past the
            end are padding, with output 0.
        kv_offsets: the same for the keys (cu_seqlens_k), if they are packed differently. Not with pages.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: flash-attn's names: offsets, kv_offsets, and the most
            queries and keys of a sequence, which may be left out. Where they are given and lengths are not read on the
            host, plans assume them in place of all tokens, and tables of the mask may have any lengths up to the larger
            one.
        page_table: int[N, P], the pages of each sequence (block_table), as in `paged_attention`.
        kv_lens: int[N], the number of keys of each sequence in its pages (seqused_k), with the keys of this call
            included.
        q_offset: where the queries of each sequence start, as in `attention`: an int >= 0, integers [N], "first" or
            "last". FlashAttention aligns the ends, which is "last". It must be given where sequences have other numbers
            of queries than of keys, and on a GPU with `kv_offsets`, whose values are not read, unless neither mask nor
            score reads the query's position. With pages the default is "last", `kv_lens - offsets.diff()`, and no
            queries may end behind the P * page_size keys that a sequence has room for, unless they start at 0.
        mask, score, scale, sink_logits, dropout_p, dropout_seed, return_lse, backend, kernel_options, **params: as in
            `attention`. There is no dropout with pages, which hold a cache.

    Returns:
        The output, [total, H, Dv], or (output, lse [H, total]).

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    Source: Dao et al., FlashAttention, 2022 (flash_attn_varlen_func); Kwon et al., Efficient Memory Management for
    Large Language Model Serving with PagedAttention, 2023.

    Example:
        >>> import torch, flexmasks
        >>> q, k, v = torch.randn(3, 100, 4, 64)
        >>> flexmasks.varlen_attention(q, k, v, [0, 30, 100], mask="sliding_window", window=16).shape
        torch.Size([100, 4, 64])

        One sequence decodes, one has no query in this step, one takes 5 tokens of its prompt:

        >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 64)  # 8 pages of 16 keys
        >>> pages = {"page_table": torch.tensor([[3, 0, 6], [5, -1, -1], [1, 2, -1]])}
        >>> pages["kv_lens"] = torch.tensor([40, 7, 25])
        >>> flexmasks.varlen_attention(q[:6], k_cache, v_cache, [0, 1, 1, 6], mask="causal", **pages).shape
        torch.Size([6, 4, 64])
    """
    request = later.request.Request(
        mask, score, params, as_number(scale), None, _on_device_of(q, q_offset), sink_logits, return_lse, backend,
        kernel_options,
    )  # fmt: skip
    if type(dropout_p) is not float or dropout_p:
        dropout = later.dropout.dropout_of(dropout_p, dropout_seed, "flexmasks.varlen_attention")
        request = request._replace(dropout=dropout)
    offsets = _one_of("offsets", offsets, "cu_seqlens_q", cu_seqlens_q)
    kv_offsets = _one_of("kv_offsets", kv_offsets, "cu_seqlens_k", cu_seqlens_k)
    most = [_longest("max_seqlen_q", max_seqlen_q), _longest("max_seqlen_k", max_seqlen_k)]
    pages, lens = _on_device_of(q, page_table), _on_device_of(q, kv_lens)
    layout = offsets, kv_offsets, max([n for n in most if n is not None], default=None), pages, lens
    out, lse = later.pages.run_varlen(q, k, v, *layout, request)
    return (out, cast(Tensor, lse)) if return_lse else out


# fmt: off
@overload
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Pages, kv_lens: Ints, *, mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    q_offset: Alignment = None, layout: Layout = "bhsd", sink_logits: Tensor | None = None,
    return_lse: Literal[False] = False, backend: str = "auto", **params: Any,
) -> Tensor: ...


@overload
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Pages, kv_lens: Ints, *, mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    q_offset: Alignment = None, layout: Layout = "bhsd", sink_logits: Tensor | None = None,
    return_lse: Literal[True], backend: str = "auto", **params: Any,
) -> tuple[Tensor, Tensor]: ...


@overload
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Pages, kv_lens: Ints, *, mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, scale: float | None = None,
    q_offset: Alignment = None, layout: Layout = "bhsd", sink_logits: Tensor | None = None,
    return_lse: bool, backend: str = "auto", **params: Any,
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


@says_what_to_write()
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Pages,
    kv_lens: Ints,
    *,
    mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    q_offset: Alignment = None,
    layout: Layout = "bhsd",
    sink_logits: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **params: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention to keys and values in a paged KV cache.

    The cache is laid out as vLLM and FlashAttention hold it. To mask and score, key j is the j-th key of its own
    sequence, wherever its page lies, as if the cache were contiguous. Decoding, prefill in chunks and prefill are the
    same call with one, some and all queries.

    On a CPU the pages are copied side by side: all B * P of the table, so that it should have no more columns than the
    longest sequence needs. On a GPU the cache is never copied as a whole. Where no gradient is wanted, kernels there
    read only the keys of each sequence, for up to 2,048 queries, at most an eighth of the keys: pages of any size cost
    little more than a contiguous cache, and nothing is compiled. Otherwise blocks have 128 keys, and a block that holds
    a page of a sequence is computed for that sequence: pages of 16 keys that lie apart from each other then cost up to
    eight times as much as pages of a multiple of 128 keys. A step that changes `page_table` or
    `kv_lens` is planned again; the other layers of the step find the plan. With flash-attn-4 installed, chunks of 128
    and more queries that are the last ones of each sequence run on FlashAttention 4, which reads the pages and plans
    nothing, in float16 and bfloat16 and where the mask is a window, such as full, causal and sliding_window.
    On a GPU the gradient of a cache takes B times the memory of the cache. For sequences with different numbers of
    queries there is `varlen_attention`.

    Args:
        q: queries, [B, H, Q, D], the last Q of each sequence unless `q_offset` says otherwise; see `layout`.
        k_cache, v_cache: [n_pages, page_size, Hkv, D] and [n_pages, page_size, Hkv, Dv], one pool for all sequences;
            the pages of each cache must follow each other in memory. Unused slots of k_cache may hold anything, NaN
            too; unused slots of v_cache must be finite.
        page_table: int[B, P], a tensor or lists; entry [b, p] is the page that holds the keys of batch element b from
            p * page_size on (block_table). Entries of keys that no query sees, behind the last key or behind a window,
            may hold anything, such as -1 or one page for all. Sequences may share pages, and a page may hold some keys
            of a sequence after others, as in a ring: then queries may see the last ones. On a GPU only the first table
            of a kind is checked.
        kv_lens: int[B], the number of keys of each sequence, from 0 to P * page_size, with the keys of this call
            included (cache_seqlens). A sequence without keys gives output 0.
        mask: as in `attention`: a name, a Mask or a function; "causal" for a language model. By default each query
            sees all keys of its sequence.
        score: as in `attention`.
        q_offset: where the queries start in their sequences, as in `attention`; by default "last", kv_lens - Q.
        layout: of q and the output: "bhsd", [B, H, Q, D], or "bshd", [B, Q, H, D], as FlashAttention and vLLM hold
            them. The caches are as above and the lse is [B, H, Q] in both.
        scale, sink_logits, return_lse, backend, **params: as in `attention`.

    Returns:
        The output, [B, H, Q, Dv] or as `layout` says, in q's dtype, or (output, lse).

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.

    Example:
        >>> import torch, flexmasks
        >>> q, (k_cache, v_cache) = torch.randn(2, 4, 1, 64), torch.randn(2, 8, 16, 2, 64)  # 8 pages of 16 keys
        >>> page_table, kv_lens = torch.tensor([[3, 0, 6], [5, -1, -1]]), torch.tensor([40, 7])
        >>> flexmasks.paged_attention(q, k_cache, v_cache, page_table, kv_lens, mask="causal").shape
        torch.Size([2, 4, 1, 64])
    """
    if layout != "bhsd":
        (q,) = _with_heads_first(layout, q=q)
    request = later.request.Request(
        mask, score, params, as_number(scale), None, _on_device_of(q, q_offset), sink_logits, return_lse, backend
    )
    pages, lens = _on_device_of(q, page_table), _on_device_of(q, kv_lens)
    out, lse = later.pages.run_paged(q, k_cache, v_cache, pages, lens, request)
    out = out.transpose(1, 2) if layout == "bshd" else out
    return (out, cast(Tensor, lse)) if return_lse else out


@says_what_to_write()
def block_mask(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
    q_offset: Alignment = None,
    as_data: bool = False,
    check: bool = False,
    **params: Any,
) -> compat.BlockMask:
    """Return the BlockMask of a mask: its empty, partial and full blocks.

    It shows the pairs that torch's create_block_mask shows, without evaluating the mask at all Q x KV pairs, and works
    in torch's flex_attention too. On a CPU, and of a mask without tensors, its blocks are exact: they equal those of
    create_block_mask.

    Of a mask with tensors on a GPU, the first block mask is exact. Later ones, in which only the values of tensors or
    the sizes are new, are found as calls of `attention` find them: blocks are full or empty where bounds of the mask
    prove it, and the host reads no value and waits for nothing. With `check`, blocks are exact there too. They always
    are where bounds would give many more blocks, where a function has to read values to be planned, and where a list or
    a tensor that requires a gradient is among the parameters; then the host waits.

    On a GPU, from torch 2.14 on, exact lists of more than 16 million places in all are only about as long as the
    fullest one, so that a million tokens need not take a gigabyte; those of masks with tensors need `check` for it.

    Inside torch.compile it is part of the graph. Blocks are then always found by bounds of the mask. `batch` and
    `heads` must be given there if a function of yours reads b or h.

    It can be copied, pickled, saved by torch.save, and sent from a DataLoader's worker, and so can masks and scores.
    `.to(device)` moves the tensors among its mask's parameters, too. A pickle holds a function of yours by its name and
    that of its module: lambdas, and functions inside functions, cannot be pickled. A block mask is saved as its mask
    and sizes, and planned again when it is loaded. torch.load with weights_only=True, the default, takes what
    torch.serialization.safe_globals allows: `flexmasks.safe_globals()`, and functions of yours.

    Args:
        mask: a name, a Mask, or a function (b, h, q, kv) -> bool of index tensors.
        q_len, kv_len: numbers of queries and keys, above 0; kv_len is q_len by default.
        batch, heads: the numbers of batch elements and of heads. The BlockMask's own batch and head sizes are 1 if the
            mask does not depend on the index. By default they are what the parameters' shapes imply; a mask that
            depends on b or h in another way needs the sizes.
        device: where the index tensors live; by default the device of the parameters' tensors, or the CPU.
        block_size: an int above 0, or (queries, keys).
        q_offset: where the queries start, as in `attention`.
        as_data: let the BlockMask's mask_mod read the bits of the different partial blocks, at most 256 MB, in place of
            the mask's function. All such masks share compiled kernels, and a function that torch's compiler computes
            otherwise than Python does is exact. The sizes of blocks must be powers of 2 from 32 on. The host
            waits for it, and blocks are exact.
        check: whether the host waits for a GPU to read the values of tensors: parameters are checked, and blocks are
            exact. On a CPU both always hold. By default only the first tensors of a kind are read.
        **params: the mask's parameters.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.
        MemoryError: the lists of blocks need more memory than is free on the device.

    Example:
        >>> import flexmasks
        >>> flexmasks.block_mask("causal", 512).full_kv_num_blocks[0, 0].tolist()
        [0, 1, 2, 3]
    """
    if not isinstance(as_data, bool):
        raise TypeError(f"flexmasks.block_mask: `as_data` must be True or False, got {as_data!r}.")
    if not isinstance(check, bool):
        raise TypeError(f"flexmasks.block_mask: `check` must be True or False, got {check!r}.")
    if compat.is_compiling():
        if as_data or check:
            name = "as_data" if as_data else "check"
            raise ValueError(
                f"flexmasks.block_mask: inside torch.compile it reads no values for `{name}`; make it outside."
            )
        given = get_mask(mask, **params), q_len, kv_len, (batch, heads), device, block_size, q_offset
        return later.traced_blocks.traced_block_mask("flexmasks.block_mask", *given)
    lengths = later.lengths.Lengths(q_len, kv_len, batch, heads, device, q_offset, block_size)
    return later.portable.block_mask_of("flexmasks.block_mask", get_mask(mask, **params), lengths, as_data, check)


@says_what_to_write()
def dense_mask(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    q_offset: Alignment = None,
    **params: Any,
) -> Tensor:
    """Return a mask as booleans, True = visible.

    The result is [batch or 1, heads or 1, q_len, kv_len]. The batch and head dimensions are 1 if the mask does not
    depend on the index. Arguments and errors are those of `block_mask`.

    Example:
        >>> import flexmasks
        >>> flexmasks.dense_mask("sliding_window", 4, window=1)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    lengths = later.lengths.Lengths(q_len, kv_len, batch, heads, device, q_offset)
    return later.lengths.materialize_mask("flexmasks.dense_mask", get_mask(mask, **params), lengths)


def _explained() -> list[str]:
    return [name for name in later.request.Request._fields if name in KEYWORDS]


@says_what_to_write(lambda *given: named(given[3], _explained()), also=KEYWORDS)
def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Explanation:
    """Explain how a call of `attention` would run.

    The explanation names the backend, whether it compiles, which blocks it skips, and why the other backends were not
    chosen. It prints as text, and Jupyter shows it as a table. Arguments and errors are those of `attention`.

    Example:
        >>> import torch, flexmasks
        >>> q, k, v = torch.randn(3, 1, 2, 300, 64)
        >>> explanation = flexmasks.explain(q, k, v, mask="causal")
        >>> explanation.backend, explanation.compiles
        ('sdpa', 'no: it runs without compiling')
    """
    own = {name: arguments.pop(name) for name in _explained() if name in arguments}
    _check_return_max(arguments.pop("return_max", False))
    dropout_p, seed = arguments.pop("dropout_p", 0.0), arguments.pop("dropout_seed", None)
    if type(dropout_p) is not float or dropout_p:
        own["dropout"] = later.dropout.dropout_of(dropout_p, seed)
    q, k, v = _with_heads_first(arguments.pop("layout", "bhsd"), q=q, k=k, v=v)
    own |= {"scale": as_number(own.get("scale")), "q_offset": _on_device_of(q, own.get("q_offset"))}
    own["mask"], own["block_mask"] = _mask_or_blocks(own.get("mask"), own.get("block_mask"))
    with compat.keeping_environment():
        return later.road.explain(q, k, v, later.request.Request(params=arguments, **own))


def _with_heads_first(layout: str, **tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors, which messages name, in the layout "bhsd"."""
    if layout == "bhsd":
        return tuple(tensors.values())
    if layout != "bshd":
        raise ValueError(f"flexmasks.attention: `layout` must be 'bhsd' or 'bshd', got {in_message(layout)}.")
    try:
        return tuple([x.transpose(1, 2) for x in tensors.values()])
    except (AttributeError, LookupError, ValueError):  # no tensors, or of fewer dimensions
        got = ", ".join(f"{name} {in_message(x)}" for name, x in tensors.items())
        names = ", ".join(tensors)
        wanted = f"with layout='bshd', {names} must be {'a tensor' if len(tensors) == 1 else 'tensors'} [B, S, H, D]"
        raise TypeError(f"flexmasks.attention: {wanted}; got {got}.") from None


def _check_return_max(return_max: Any) -> None:
    """Raise TypeError for anything but a boolean."""
    if not isinstance(return_max, bool):
        raise TypeError(f"flexmasks.attention: `return_max` must be True or False, got {in_message(return_max)}.")


def _mask_or_blocks(mask: Any, block_mask: Any) -> tuple[Any, Any]:
    """Return a mask and a BlockMask, of which a user may pass either as the mask."""
    return (None, mask) if block_mask is None and hasattr(mask, "kv_num_blocks") else (mask, block_mask)


def _on_device_of(q: Any, value: Any) -> Any:
    """Return a list or a NumPy array as a tensor on the device of q."""
    return value if value is None or type(value) in (int, str) else listed(value, getattr(q, "device", None))


def _longest(name: str, value: Any) -> int | None:
    """Return the most tokens of a sequence, where it is given."""
    number = listed(value, None)
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
        wanted = f"`{name}` must be an int of at least 0"
        raise TypeError(f"flexmasks.varlen_attention: {wanted}, got {in_message(value)}; it may be left out.")
    return number


def _one_of(name: str, value: Any, other: str, value_of_other: Any) -> Any:
    """Return an argument that has two names."""
    if value is not None and value_of_other is not None:
        raise TypeError(f"flexmasks.varlen_attention: `{other}` is `{name}` by another name; pass one of them.")
    return value_of_other if value is None else value
