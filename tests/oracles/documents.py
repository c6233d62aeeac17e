"""Masks by lengths, documents, spans and prefixes."""

from __future__ import annotations

from typing import Any

import torch

from oracles.case import Case, Random, int32, int64, mask_oracle, number_of, row_of, runs

RANDOM = Random(2)


@mask_oracle
def grouped_tril(b: int, h: int, q: int, kv: int, size: Case, seq_lens: list[int]) -> bool:
    """Pairs where kv <= q and both are below seq_lens[b]."""
    return kv <= q and q < seq_lens[b] and kv < seq_lens[b]


@mask_oracle
def padding(b: int, h: int, q: int, kv: int, size: Case, kv_lens: list[int]) -> bool:
    """Pairs where kv < kv_lens[b]; queries are not cut."""
    return kv < kv_lens[b]


@mask_oracle
def key_padding(b: int, h: int, q: int, kv: int, size: Case, attention_mask: Any) -> bool:
    """Pairs where attention_mask[b][kv] is 1."""
    return attention_mask[b][kv] == 1


@mask_oracle
def prefix_lm(b: int, h: int, q: int, kv: int, size: Case, prefix_len: int | list[int]) -> bool:
    """Pairs where kv <= q, or kv is in the prefix of batch element b."""
    prefix = number_of(prefix_len, b)
    return kv < prefix or kv <= q


@mask_oracle
def document(b: int, h: int, q: int, kv: int, size: Case, document_ids: Any, **promises: Any) -> bool:
    """Pairs of equal ids, from one row of ids for all batch elements or one row for each."""
    ids = row_of(document_ids, b)
    return bool(ids[q] == ids[kv])


@mask_oracle
def cross_document(b: int, h: int, q: int, kv: int, size: Case, q_document_ids: Any, kv_document_ids: Any) -> bool:
    """Pairs where q and kv have the same document."""
    return bool(row_of(q_document_ids, b)[q] == row_of(kv_document_ids, b)[kv])


@mask_oracle
def bidirectional_spans(b: int, h: int, q: int, kv: int, size: Case, span_ids: Any) -> bool:
    """Pairs where kv <= q, or both are in one span."""
    ids = row_of(span_ids, b)
    return kv <= q or bool(ids[q] >= 0 and ids[q] == ids[kv])


@mask_oracle
def shared_prefix(b: int, h: int, q: int, kv: int, size: Case, document_ids: Any, prefix_of: list[int]) -> bool:
    """Pairs where kv <= q, and kv is in q's document or in the prefix of q's document."""
    ids = row_of(document_ids, b)
    return kv <= q and ids[kv] in (ids[q], prefix_of[ids[q]])


@mask_oracle
def multi_item(b: int, h: int, q: int, kv: int, size: Case, prefix_len: Any, item_positions: Any) -> bool:
    """Pairs where kv <= q, and q is in the prefix, or kv is in it, or kv is in the item of q.

    The keys of q's item are fewer than item_positions[q] positions before q.
    """
    prefix = number_of(prefix_len, b)
    if kv > q:
        return False
    return q < prefix or kv < prefix or q - kv < row_of(item_positions, b)[q]


@mask_oracle
def causal_blockwise(b: int, h: int, q: int, kv: int, size: Case, block_ids: Any) -> bool:
    """Pairs where kv <= q, and q has a negative id (the last block) or both have one id."""
    ids = row_of(block_ids, b)
    return kv <= q and (ids[q] < 0 or ids[q] == ids[kv])


@mask_oracle
def groups(b: int, h: int, q: int, kv: int, size: Case, q_group: Any, kv_group: Any) -> bool:
    """Pairs of one group, which is no negative one."""

    def row(table: Any) -> Any:
        if isinstance(table[0], list) and isinstance(table[0][0], list):
            return table[b % len(table)][h]
        return row_of(table, b)

    return bool(row(q_group)[q] == row(kv_group)[kv] != -1)


@mask_oracle
def private_spans(b: int, h: int, q: int, kv: int, size: Case, span_ids: Any) -> bool:
    """All pairs but those of a key in a span and a query outside of it."""
    ids = row_of(span_ids, b)
    return not (ids[kv] >= 0 and ids[q] != ids[kv])


@mask_oracle
def summaries(b: int, h: int, q: int, kv: int, size: Case, segment_ids: Any, is_summary: Any) -> bool:
    """Keys up to q that are in its segment or summaries."""
    ids = row_of(segment_ids, b)
    return kv <= q and bool(ids[q] == ids[kv] or row_of(is_summary, b)[kv])


CASES: list[Case] = [
    Case("groups", {"q_group": RANDOM.ints(-1, 3, 40), "kv_group": RANDOM.ints(-1, 3, 2, 40)}),
    Case(
        "groups",
        {"q_group": RANDOM.ints(-1, 4, 2, 3, 37), "kv_group": RANDOM.ints(-1, 4, 1, 3, 50)},
        heads=3,
        q_len=17,
        kv_len=50,
        q_offset=(20, 4),
    ),
    Case("groups", {"q_group": runs([70, 80]), "kv_group": runs([30, 120], torch.int32)}, 1, 1, 150, 150),
    Case("private_spans", {"span_ids": RANDOM.ints(-1, 3, 40)}),
    Case("private_spans", {"span_ids": RANDOM.ints(-2, 2, 2, 45, dtype=torch.int32)}, q_len=15, kv_len=45, q_offset=30),
    Case("private_spans", {"span_ids": runs([40, 30, 80]) - 1}, 1, 1, 150, 150),
    Case("summaries", {"segment_ids": runs([12, 8, 20]), "is_summary": RANDOM.bools(0.2, 40)}),
    Case(
        "summaries", {"segment_ids": RANDOM.ints(0, 3, 2, 50), "is_summary": RANDOM.bools(0.2, 2, 50)}, 2, 2, 25, 50, 25
    ),
    Case("summaries", {"segment_ids": runs([70, 80]), "is_summary": RANDOM.bools(0.05, 150)}, 1, 1, 150, 150),
    Case("grouped_tril", {"seq_lens": int64([40, 13])}),
    Case("grouped_tril", {"seq_lens": int32([0, 1, 39])}, batch=3, q_len=40, kv_len=40),
    Case("grouped_tril", {"seq_lens": int64([30, 61])}, q_len=21, kv_len=61, q_offset=40),
    Case("grouped_tril", {"seq_lens": int32([25, 47])}, q_len=17, kv_len=50, q_offset=(8, 33)),
    Case("grouped_tril", {"seq_lens": int64([16, 33])}, q_len=57, kv_len=33),
    Case("grouped_tril", {"seq_lens": int32([129, 128, 0, 300])}, batch=4, q_len=300, kv_len=300),
    Case("grouped_tril", {"seq_lens": int64([200, 131])}, q_len=50, kv_len=257, q_offset=(150, 128)),
    Case("padding", {"kv_lens": int64([40, 13])}),
    Case("padding", {"kv_lens": int32([0, 1, 64])}, batch=3, q_len=30, kv_len=64),
    Case("padding", {"kv_lens": int64([16, 17])}, q_len=55, kv_len=17),
    Case("padding", {"kv_lens": int32([69, 48])}, heads=3, q_len=5, kv_len=70, q_offset=(64, 43)),
    Case("padding", {"kv_lens": int64([0, 0])}, q_len=20, kv_len=20),
    Case("key_padding", {"attention_mask": torch.arange(40) >= int64([[0], [13]])}),
    Case(
        "key_padding",
        {"attention_mask": (torch.arange(51) < int64([[51], [0], [20]])).int()},
        batch=3,
        q_len=17,
        kv_len=51,
        q_offset=34,
    ),
    Case("key_padding", {"attention_mask": RANDOM.ints(0, 2, 2, 150)}, heads=1, q_len=30, kv_len=150),
    Case("prefix_lm", {"prefix_len": 11}),
    Case("prefix_lm", {"prefix_len": 0}, q_len=33, kv_len=47),
    Case("prefix_lm", {"prefix_len": 100}, q_len=33, kv_len=47),
    Case("prefix_lm", {"prefix_len": int64(16)}, q_len=39, kv_len=39),
    Case("prefix_lm", {"prefix_len": int32(40)}, q_len=21, kv_len=66, q_offset=30),
    Case("prefix_lm", {"prefix_len": int64([0, 7, 50])}, batch=3, q_len=50, kv_len=50),
    Case("prefix_lm", {"prefix_len": int32([45, 1])}, q_len=10, kv_len=60, q_offset=(20, 50)),
    Case("prefix_lm", {"prefix_len": int64([5, 20])}, q_len=61, kv_len=30),
    Case("document", {"document_ids": runs([7, 16, 1, 16])}),
    Case("document", {"document_ids": RANDOM.ints(0, 4, 2, 40)}),
    Case("document", {"document_ids": RANDOM.ints(-2, 3, 3, 53, dtype=torch.int32)}, batch=3, q_len=53, kv_len=53),
    Case("document", {"document_ids": torch.arange(30, dtype=torch.int32)}, q_len=30, kv_len=30),
    Case("document", {"document_ids": torch.zeros(2, 45, dtype=torch.int64)}, q_len=45, kv_len=45),
    Case("document", {"document_ids": RANDOM.ints(0, 3, 62, dtype=torch.int32)}, q_len=19, kv_len=62, q_offset=43),
    Case("document", {"document_ids": RANDOM.ints(0, 3, 2, 50)}, q_len=19, kv_len=50, q_offset=(5, 31)),
    Case("document", {"document_ids": RANDOM.ints(0, 2, 2, 66)}, q_len=66, kv_len=20),
    Case("document", {"document_ids": runs([9, 30]), "contiguous": True, "max_documents": 2}, q_len=39, kv_len=39),
    # Ids that differ only above the lowest 32 bits.
    Case("document", {"document_ids": RANDOM.ints(0, 3, 35) * 2**32 + 7}, q_len=35, kv_len=35),
    Case("document", {"document_ids": runs([100, 28, 1, 99, 72], torch.int32)}, q_len=300, kv_len=300),
    Case("document", {"document_ids": RANDOM.ints(0, 5, 2, 150)}, heads=1, q_len=150, kv_len=150),
    Case(
        "document",
        {"document_ids": torch.stack([runs([127, 2, 171]), runs([256, 44])])},
        q_len=44,
        kv_len=300,
        q_offset=(100, 256),
    ),
    Case(
        "cross_document",
        {"q_document_ids": runs([9, 4, 20]), "kv_document_ids": runs([20, 1, 30])},
        q_len=33,
        kv_len=51,
    ),
    Case(
        "cross_document",
        {"q_document_ids": RANDOM.ints(0, 4, 2, 60), "kv_document_ids": RANDOM.ints(-1, 5, 29)},
        q_len=19,
        kv_len=29,
        q_offset=41,
    ),
    Case(
        "cross_document",
        {
            "q_document_ids": runs([100, 50], torch.int32),
            "kv_document_ids": torch.stack([runs([17, 120], torch.int32), runs([130, 7], torch.int32)]),
        },
        heads=1,
        q_len=150,
        kv_len=137,
    ),
    Case("bidirectional_spans", {"span_ids": int64([-1] * 5 + [3] * 9 + [-1] * 6 + [1] * 12 + [-7] * 8)}),
    # Spans that other tokens interrupt, in any order of ids.
    Case(
        "bidirectional_spans",
        {"span_ids": RANDOM.ints(-2, 4, 2, 53, dtype=torch.int32)},
        q_len=21,
        kv_len=53,
        q_offset=(32, 4),
    ),
    Case("bidirectional_spans", {"span_ids": torch.full((30,), -1)}, q_len=30, kv_len=22),
    Case("bidirectional_spans", {"span_ids": runs([70, 80]) * 5}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("shared_prefix", {"document_ids": runs([10, 8, 7, 15]), "prefix_of": int64([-1, 0, 0, 0])}),
    Case(
        "shared_prefix",
        {
            "document_ids": torch.stack([runs([5, 6, 9, 4, 8, 8]), runs([1, 1, 20, 9, 0, 9])]),
            "prefix_of": int32([0, 0, 0, -1, 3, 3]),
        },
    ),
    Case(
        "shared_prefix",
        {"document_ids": RANDOM.ints(0, 4, 47), "prefix_of": int64([1, -1, 0, 2])},
        q_len=20,
        kv_len=47,
        q_offset=(27, 9),
    ),
    Case(
        "shared_prefix",
        {"document_ids": runs([60, 50, 40]), "prefix_of": int64([-1, 0, 0])},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case(
        "multi_item",
        {"prefix_len": 11, "item_positions": int64([0] * 11 + [0, 1, 2, 3, 0, 1, 0, 0, 1, 2] + list(range(19)))},
    ),
    Case("multi_item", {"prefix_len": int64([4, 30]), "item_positions": RANDOM.ints(0, 9, 2, 40, dtype=torch.int32)}),
    Case(
        "multi_item", {"prefix_len": 0, "item_positions": torch.arange(50) % 13}, q_len=17, kv_len=50, q_offset=(33, 8)
    ),
    Case(
        "multi_item",
        {"prefix_len": 64, "item_positions": torch.arange(150) % 20},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("causal_blockwise", {"block_ids": int64([0] * 12 + [1] * 5 + [2] * 10 + [-1] * 13)}),
    Case("causal_blockwise", {"block_ids": RANDOM.ints(-1, 3, 2, 40)}),
    Case("causal_blockwise", {"block_ids": runs([9, 30, 14])}, q_len=19, kv_len=53, q_offset=(34, 3)),
    Case(
        "causal_blockwise",
        {"block_ids": int32([0] * 70 + [1] * 40 + [-1] * 40)},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
]
