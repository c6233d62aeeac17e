"""Masks and scores of other libraries, where these are installed, compared with the masks and scores here.

Where the two libraries differ, a test says how and checks the difference, so it notices a change of the other library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks.orders import morton_order, tile_order

GENERATOR = torch.Generator().manual_seed(7)


def peer(function: Callable[..., Any], q_len: int, kv_len: int, batch: int) -> Tensor:
    return create_mask(function, batch, 1, q_len, kv_len, device="cpu")  # type: ignore[arg-type]


def ours(mask: Any, q_len: int, kv_len: int, batch: int, **params: Any) -> Tensor:
    return flexmasks.dense_mask(mask, q_len, kv_len, batch=batch, **params).expand(batch, 1, q_len, kv_len)


def same(
    function: Callable[..., Any], mask: Any, q_len: int, kv_len: int | None = None, batch: int = 2, **params: Any
) -> bool:
    kv_len = q_len if kv_len is None else kv_len
    return torch.equal(peer(function, q_len, kv_len, batch), ours(mask, q_len, kv_len, batch, **params))


# --- attention-gym ---


@pytest.fixture(scope="module")
def gym() -> Any:
    return pytest.importorskip("attn_gym.masks")


@pytest.fixture(scope="module")
def mods() -> Any:
    return pytest.importorskip("attn_gym.mods")


def test_windows_of_attention_gym(gym: Any) -> None:
    assert same(gym.causal_mask, "causal", 40, 55)
    for window in (0, 1, 7, 100):
        assert same(gym.generate_sliding_window(window), "sliding_window", 40, window=window)
        assert same(gym.generate_prefix_lm_mask(window), "prefix_lm", 40, prefix_len=window)
        for dilation in (1, 3):
            theirs = gym.generate_dilated_sliding_window(window, dilation)
            assert same(theirs, "dilated_window", 40, 33, window=window, dilation=dilation)
        tokens = torch.rand(40, generator=GENERATOR) < 0.2
        theirs = gym.generate_global_sliding_window(window, tokens)
        assert same(theirs, "longformer", 40, window=window, tokens=tokens)


def test_documents_of_attention_gym(gym: Any) -> None:
    offsets = torch.tensor([0, 9, 10, 25, 40])
    assert same(gym.generate_doc_mask_mod(gym.causal_mask, offsets), flexmasks.packed("causal", offsets), 40)
    assert same(gym.generate_packed_causal_doc_mask_mod(offsets), flexmasks.packed("causal", offsets), 40)
    document_ids = torch.repeat_interleave(torch.arange(4), offsets.diff())
    prefix_of = torch.tensor([0, 0, 2, 2])
    theirs = gym.generate_shared_prefix_mask_mod(offsets.int(), prefix_of)
    assert same(theirs, "shared_prefix", 40, document_ids=document_ids, prefix_of=prefix_of)
    # There a document that stands before its prefix sees the prefix in the future; here all is causal.
    theirs = gym.generate_shared_prefix_mask_mod(offsets.int(), torch.tensor([1, 1, 2, 3]))
    assert not same(theirs, "shared_prefix", 40, document_ids=document_ids, prefix_of=torch.tensor([1, 1, 2, 3]))


def test_chunks_of_attention_gym(gym: Any) -> None:
    assert same(gym.batchify_mask_mod(lambda b, h, q, kv: q >= 0, 7), "chunked", 40, chunk=7)
    assert same(gym.batchify_mask_mod(gym.causal_mask, 7), "chunked_causal", 40, chunk=7)
    assert same(gym.generate_block_diffusion_mask(20, 6), "block_diffusion", 40, length=20, block=6)


def test_images_of_attention_gym(gym: Any) -> None:
    assert same(gym.generate_natten(8, 8, 3, 5), "natten", 64, height=8, width=8, kernel=(3, 5))
    # Theirs swaps the sides of a canvas that is no square, and an even kernel shows one more key.
    assert not same(gym.generate_natten(8, 6, 3, 3), "natten", 48, height=6, width=8, kernel=3)
    assert not same(gym.generate_natten(8, 8, 4, 4), "natten", 64, height=8, width=8, kernel=4)
    order = tile_order((6, 8), (3, 4))
    theirs = gym.generate_tiled_natten(8, 6, 5, 3, 4, 3)
    assert same(theirs, "natten", 48, height=6, width=8, kernel=(3, 5), order=order)
    # Their Morton order has the bits of x below the bits of y, as here.
    theirs = gym.generate_morton_natten(8, 8, 3, 5)
    assert same(theirs, "natten", 64, height=8, width=8, kernel=(5, 3), order=morton_order((8, 8)))
    theirs = gym.generate_sta_mask_mod_2d((6, 8), (4, 4), (2, 4), 5)
    assert same(theirs, "sliding_tile", 53, canvas=(6, 8), tile=(2, 4), window=(2, 1), text=5)
    theirs = gym.generate_sta_mask_mod_3d((4, 6, 4), (2, 6, 2), (2, 2, 2))
    assert same(theirs, "sliding_tile", 96, canvas=(4, 6, 4), tile=(2, 2, 2), window=(1, 3, 1))


def test_trees_of_attention_gym(gym: Any) -> None:
    parents = [-1, 0, 0, 1, 1, 2, 5, 4]
    ancestors = gym.build_tree_ancestor_matrix(parents, device="cpu")
    theirs = gym.generate_jetspec_tree_causal_mask_mod(20, ancestors)
    assert same(theirs, "tree", 8, 28, parents=parents, start=20, q_offset=20)
    blocks = torch.cat([torch.zeros(20, dtype=torch.long), torch.arange(1, 5).repeat_interleave(3)])
    theirs = gym.generate_jetspec_training_mask_mod(20, 3)
    assert same(theirs, "shared_prefix", 12, 32, document_ids=blocks, prefix_of=[0] * 5, q_offset=20)


def test_videos_of_attention_gym(gym: Any) -> None:
    theirs = gym.generate_temporal_head_mask_mod(4, 6, 12, 2)
    assert same(theirs, "temporal_window", 4 + 6 * 12, frame=12, window=3, tokens=4)
    theirs = gym.generate_spatial_head_mask_mod(4, 6, 12, 2, round_width=8)
    assert same(theirs, "longformer", 4 + 6 * 12, window=23, tokens=4)
    # With their attention sink all tokens see the first frame, which does not see all tokens.
    sink = flexmasks.get_mask("longformer", window=23, tokens=4) | (lambda b, h, q, kv: kv < 4 + 12)
    assert same(gym.generate_spatial_head_mask_mod(4, 6, 12, 2, True, 8), sink, 4 + 6 * 12)


def test_images_in_text_of_attention_gym(gym: Any) -> None:
    intervals = torch.tensor([[0, 10], [10, 25], [25, 40]])
    theirs = gym.generate_vision_cross_attention_mask_mod(intervals, 11)
    image_ids = torch.arange(3).repeat_interleave(11)
    assert same(theirs, "vision_cross", 40, 33, intervals=intervals, image_ids=image_ids)


def score_of(function: Callable[..., Any], scores: Tensor) -> Tensor:
    indices = (torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(scores.shape))
    changed: Tensor = function(scores, *indices)
    return changed


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_scores_of_attention_gym(mods: Any, heads: int) -> None:
    from attn_gym.mods.graphormer import generate_graphormer_spatial_bias
    from attn_gym.mods.sandwich import generate_sandwich_bias

    q, k, v = torch.randn(3, 2, heads, 20, 8, generator=GENERATOR)
    table = torch.randn(heads, 5, generator=GENERATOR)
    distances = torch.randint(0, 5, (2, 20, 20), generator=GENERATOR)
    pairs: list[tuple[Any, str, dict[str, Any]]] = [
        (mods.generate_alibi_bias(heads), "alibi", {}),
        (mods.generate_tanh_softcap(3, approx=False), "softcap", {"cap": 3.0}),
        (generate_sandwich_bias(heads, 20), "sandwich", {}),
        (generate_graphormer_spatial_bias(table, distances), "distance_bias", {"table": table, "distances": distances}),
    ]
    for theirs, name, params in pairs:
        scores = score_of(theirs, q @ k.mT / 8**0.5)
        want = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1) @ v
        got = flexmasks.attention(q, k, v, mask="causal", score=name, backend="reference", **params)
        assert torch.allclose(got, want, atol=1e-5), name


# --- Hugging Face transformers ---


@pytest.fixture(scope="module")
def masking() -> Any:
    return pytest.importorskip("transformers.masking_utils")


def test_masks_of_transformers(masking: Any) -> None:
    m = masking
    assert same(m.causal_mask_function, "causal", 40)
    assert same(m.bidirectional_mask_function, "full", 40)
    for window in (1, 5, 50):
        assert same(m.sliding_window_causal_mask_function(window), "sliding_window", 40, window=window - 1)
        theirs = m.sliding_window_bidirectional_mask_function(window)
        assert same(theirs, "local", 40, left=window, right=window)
        padding = torch.tensor([0, 3])
        theirs = m.chunked_causal_mask_function(window, padding)
        assert same(theirs, "chunked_causal", 40, chunk=window, start=padding)
        assert same(m.chunked_overlay(window, padding), "chunked", 40, chunk=window, start=padding)
    given = torch.rand(2, 40, generator=GENERATOR) < 0.7
    assert same(m.padding_mask_function(given), "key_padding", 40, attention_mask=given)
    ids = torch.randint(0, 4, (2, 40), generator=GENERATOR)
    assert same(m.packed_sequence_mask_function(ids), "document", 40, document_ids=ids)
    later = m.add_offsets_to_mask_function(m.causal_mask_function, 30, 0)
    assert same(later, "causal", 10, 40, q_offset=30)


def test_spans_of_transformers(masking: Any) -> None:
    if not hasattr(masking, "blockwise_overlay"):
        pytest.skip("this version of transformers has no blockwise_overlay")
    spans = torch.randint(-1, 3, (2, 40), generator=GENERATOR)
    theirs = masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(spans))
    assert same(theirs, "bidirectional_spans", 40, span_ids=spans)


@pytest.mark.slow
def test_buckets_of_transformers() -> None:
    from flexmasks.scores.t5_bias import t5_bucket

    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = range(-300, 301)
    for bidirectional in (True, False):
        for buckets, furthest in ((32, 128), (64, 256), (16, 50)):
            theirs = t5.T5Attention._relative_position_bucket(
                torch.tensor(distances), bidirectional, num_buckets=buckets, max_distance=furthest
            )
            assert theirs.tolist() == [t5_bucket(d, buckets, furthest, bidirectional) for d in distances]


@pytest.mark.slow
def test_the_table_of_swin_of_transformers() -> None:
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    if not hasattr(swin, "SwinRelativePositionBias"):
        pytest.skip("this version holds the table in another module")
    theirs = swin.SwinRelativePositionBias(3, (4, 6)).double()
    torch.nn.init.normal_(theirs.relative_position_bias_table)
    table = theirs.relative_position_bias_table.T.reshape(-1, 7, 11)
    added = flexmasks.get_score("relative_bias_2d", table=table, height=4, width=6)
    assert torch.equal(score_of(added, torch.zeros(1, 3, 24, 24, dtype=torch.float64)), theirs())


@pytest.mark.slow
def test_the_positions_of_sam_of_transformers() -> None:
    """Of images, whose positions are computed from queries that are not scaled."""
    sam = pytest.importorskip("transformers.models.sam.modeling_sam")
    config = sam.SamVisionConfig(hidden_size=24, num_attention_heads=3, image_size=80, patch_size=16)
    layer = sam.SamVisionAttention(config, window_size=0).double()
    torch.nn.init.normal_(layer.rel_pos_h)
    torch.nn.init.normal_(layer.rel_pos_w)
    x = torch.randn(2, 5, 5, 24, dtype=torch.float64)
    q, k, v = layer.qkv(x).view(2, 25, 3, 3, 8).permute(2, 0, 3, 1, 4)
    image = q.reshape(6, 5, 5, 8)
    tables = (layer.get_rel_pos(5, 5, rel) for rel in (layer.rel_pos_h, layer.rel_pos_w))
    axes = zip(("bhwc,hkc->bhwk", "bhwc,wkc->bhwk"), tables, strict=True)
    rel_h, rel_w = (torch.einsum(axis, image, table).reshape(2, 3, 25, 5) for axis, table in axes)
    out = flexmasks.attention(q, k, v, score="decomposed_bias", rel_h=rel_h, rel_w=rel_w)
    out = layer.proj(out.transpose(1, 2).reshape(2, 5, 5, 24))
    assert torch.allclose(out, layer(x)[0], atol=1e-6)  # whose softmax is float32


# --- DeepSpeed: layouts as its documentation of SparsityConfig describes them ---


def bigbird_of_deepspeed(blocks: int, window_blocks: int, global_blocks: int, causal: bool) -> list[list[bool]]:
    """A window around each block, and global rows and columns from index 0 on; if causal, none after the diagonal."""
    half = window_blocks // 2
    return [
        [
            (abs(i - j) <= half or i < global_blocks or j < global_blocks) and (j <= i or not causal)
            for j in range(blocks)
        ]
        for i in range(blocks)
    ]


def fixed_of_deepspeed(blocks: int, local_blocks: int) -> list[list[bool]]:
    """Blocks up to the diagonal in windows, and the last block of each window in all rows from its own on."""
    layout = [[False] * blocks for _ in range(blocks)]
    for start in range(0, blocks, local_blocks):
        window = range(start, min(start + local_blocks, blocks))
        for i in window:
            for j in range(start, i + 1):
                layout[i][j] = True
        for i in range(window[-1], blocks):
            layout[i][window[-1]] = True
    return layout


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_blocks", [1, 3, 4, 5])
@pytest.mark.parametrize("global_blocks", [0, 1, 2, 7])
def test_big_bird_of_deepspeed(window_blocks: int, global_blocks: int, causal: bool) -> None:
    for blocks, block in ((7, 2), (16, 3), (33, 1)):
        mask = flexmasks.get_mask(
            "bigbird", length=blocks * block, block=block, window=window_blocks // 2, global_blocks=global_blocks,
            random_blocks=0, both_ends=False,
        )  # fmt: skip
        mask = mask & flexmasks.get_mask("block_causal", block=block) if causal else mask
        layout = torch.tensor(bigbird_of_deepspeed(blocks, window_blocks, global_blocks, causal))
        want = layout.repeat_interleave(block, 0).repeat_interleave(block, 1)
        assert torch.equal(flexmasks.dense_mask(mask, blocks * block)[0, 0], want)


@pytest.mark.parametrize("local_blocks", [1, 2, 4, 7])
def test_fixed_of_deepspeed(local_blocks: int) -> None:
    for blocks in (3, 8, 29):
        got = flexmasks.dense_mask("fixed", blocks, stride=local_blocks, summary=1)[0, 0]
        assert got.tolist() == fixed_of_deepspeed(blocks, local_blocks)


# --- NATTEN ---


@pytest.mark.parametrize("canvas", [(13,), (6, 8), (3, 4, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_neighborhoods_of_natten(canvas: tuple[int, ...], causal: bool) -> None:
    """Compare with NATTEN's own FlexAttention backend, where it can be imported."""
    flex = pytest.importorskip("natten.backends.flex")
    axes = len(canvas)
    for kernel, stride, dilation in ((3, 1, 1), (2, 2, 1), (3, 2, 1)):
        each = [(x,) * axes for x in (kernel, stride, dilation, causal)]
        made = flex.get_na_flex_mask("cpu", axes, canvas, *each)
        tokens = torch.Size(canvas).numel()
        names = ("length",) if axes == 1 else ("depth", "height", "width")[3 - axes :]
        given = dict(zip(names, canvas, strict=True))
        name = ("natten1d", "natten", "natten3d")[axes - 1]
        assert same(
            made.mask_mod, name, tokens, kernel=kernel, stride=stride, dilation=dilation, causal=causal, **given
        )
