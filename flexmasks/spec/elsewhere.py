"""What other libraries call the arguments of calls and the parameters of masks and scores, and what to write here."""

from __future__ import annotations

# By a name elsewhere its names here, of which the first is meant that the call, the mask or the score takes. Behind
# "=" stands the value, if it is another one here. A name in another spelling (BLOCK_SIZE, seq_lengths) needs no entry.
NAMES: dict[str, tuple[str, ...]] = {
    # arguments of calls
    "query": ("q",),
    "key": ("k", "k_cache"),
    "value": ("v", "v_cache"),
    **dict.fromkeys(("input", "logits", "scores"), ("x",)),
    **dict.fromkeys(("mask_mod", "custom_mask"), ("mask",)),
    "score_mod": ("score",),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), ("scale",)),
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs", "return_aux"), ("return_lse",)),
    **dict.fromkeys(("s_aux", "learnable_sink"), ("sink_logits",)),
    "op": ("backend",),
    **dict.fromkeys(("cache_position", "past_len", "start_pos"), ("q_offset",)),
    **dict.fromkeys(("head", "head_idx"), ("h",)),  # of a picture
    **dict.fromkeys(("group", "process_group", "cp_group", "device_mesh"), ("mesh",)),
    **dict.fromkeys(("B", "batch_size"), ("batch",)),
    **dict.fromkeys(("H", "num_heads", "n_heads", "nheads"), ("heads", "height")),
    **dict.fromkeys(("S", "seq_len", "seqlen", "length", "L"), ("q_len", "seq_lens", "max_tokens")),
    "max_length": ("max_tokens",),
    **dict.fromkeys(("Q_LEN", "num_queries", "q_seq_len"), ("q_len",)),
    **dict.fromkeys(("KV_LEN", "num_keys", "kv_seq_len"), ("kv_len",)),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q"), ("offsets",)),
    **dict.fromkeys(("cu_seqlens_k", "cu_seqlens_kv"), ("kv_offsets",)),
    "max_seqlen": ("max_length",),
    **dict.fromkeys(("block_table", "block_tables", "page_indices"), ("page_table",)),
    **dict.fromkeys(("seqused_k", "cache_seqlens", "context_lens"), ("kv_lens",)),
    "seq_lens": ("kv_lens",),  # of keys alone
    "kv_lens": ("seq_lens",),  # of queries and keys
    # parameters of masks and scores
    "window_size": ("window", "left=..., right=...", "kernel"),
    "sliding_window": ("window=sliding_window - 1",),
    "W": ("width", "window=W - 1"),
    "attention_window": ("window=attention_window // 2",),
    **dict.fromkeys(("window_left", "left_window"), ("window", "left")),
    **dict.fromkeys(("window_right", "right_window"), ("right",)),
    "kernel_size": ("kernel",),
    **dict.fromkeys(("kernel_h", "kernel_w"), ("kernel=(kernel_h, kernel_w)",)),
    "canvas_h": ("height",),
    "canvas_w": ("width",),
    "is_causal": ("causal",),
    **dict.fromkeys(("chunk_size", "attention_chunk_size", "fixed_block_size"), ("chunk", "block")),
    "block_size": ("block", "page_size"),
    **dict.fromkeys(("doc_id", "doc_ids", "segment_ids", "sequence_ids", "seq_idx"), ("document_ids",)),
    **dict.fromkeys(("lengths", "lens", "seqlens"), ("seq_lens", "kv_lens")),
    "position_ids": ("document_ids=(position_ids == 0).cumsum(-1)",),
    "key_padding_mask": ("attention_mask=~key_padding_mask",),
    **dict.fromkeys(("num_sinks", "sink_size", "start_size"), ("sinks",)),
    **dict.fromkeys(("global_tokens", "is_global"), ("tokens",)),
    **dict.fromkeys(("softcap", "soft_cap", "logit_cap", "logits_soft_cap"), ("cap",)),
    "alibi_slopes": ("slopes",),
}
# By the name of a call elsewhere what to write here.
CALLS: dict[str, str] = {
    **dict.fromkeys(
        ("flash_attn_func", "flash_attn_with_kvcache", "decode"),
        "flexmasks.attention",
    ),
    "scaled_dot_product_attention": "flexmasks.sdpa",
    **dict.fromkeys(("varlen", "varlen_attn", "flash_attn_varlen_func"), "flexmasks.varlen_attention"),
    **dict.fromkeys(("plot", "visualize"), "flexmasks.draw"),
    "register": "from flexmasks.integrations.huggingface import register",
}
# What to do where no argument takes the place of one elsewhere.
ADVICE: dict[str, str] = {
    **dict.fromkeys(("is_causal", "causal"), 'pass mask="causal"'),
    "attn_mask": "pass `mask`, a name or function, or `block_mask`",
    "attn_bias": "pass `score`, a name or function",
    "attention_mask": 'pass `mask`: for padding mask="key_padding", attention_mask=m',
    "key_padding_mask": 'pass mask="key_padding", attention_mask=m, where 1 is a key that is visible',
    **dict.fromkeys(("enable_gqa", "pack_gqa"), "grouped heads are recognized from the shapes"),
    **dict.fromkeys(("softcap", "soft_cap", "logit_cap", "logits_soft_cap"), 'pass score="softcap", cap=...'),
    "alibi_slopes": 'pass score="alibi", slopes=...',
    "block_mask": "only flexmasks.attention takes one; pass `mask`",
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), "flexmasks.varlen_attention and flexmasks.packed take offsets"
    ),
    "cu_seqlens_kv": "pass it to flexmasks.varlen_attention as `cu_seqlens_k`",
    "deterministic": "call torch.use_deterministic_algorithms(True)",
    **dict.fromkeys(
        (
            "need_weights", "average_attn_weights", "return_weights", "return_attn_weights", "return_attention",
            "return_attention_weights", "return_attn", "output_attentions",
        ),
        "flexmasks.weights(q, k, mask=..., rows=...) returns attention weights, and return_lse=True the log-sum-exp",
    ),
    "sinks": "learned sinks are `sink_logits`",
    "num_splits": "leave it out: the keys are split as the call needs it",
    "_compile": "leave it out: blocks are found without looking at all pairs",
    "dtype": "convert q, k and v",
    "dim": "leave it out: the softmax is over the last dimension, that of the keys",
    **dict.fromkeys(
        ("seqused_k", "cache_seqlens"),
        "pass where queries start as `q_offset`; of a paged cache, flexmasks.paged_attention takes them as `kv_lens`",
    ),
    "block_table": "flexmasks.paged_attention takes it as `page_table`, with `kv_lens`",
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), "leave it out: the offsets say the lengths"),
    "window_size": 'pass mask="sliding_window", window=... or mask="local", left=..., right=...',
    "sliding_window": 'pass mask="sliding_window", window=sliding_window - 1',
    **dict.fromkeys(("layout", "batch_first"), "q, k and v are [B, H, S, D]: transpose them"),
    "q_offset": "positions are those of the whole sequence, from 0 on; flexmasks.attention takes it",
    **dict.fromkeys(
        ("dropout_p", "dropout", "p"),
        "flexmasks.attention and flexmasks.varlen_attention drop weights, by `dropout_p`",
    ),
}  # fmt: skip
