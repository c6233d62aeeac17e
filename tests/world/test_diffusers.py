"""diffusers' attention by flexmasks, held against its "native" backend, which is torch's SDPA, and against formulas."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmasks

pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)
from helpers import DEVICES, TOLERANCE, NoReads, error, in_campaigns, peak_memory

from benchmarks.processes import Processes
from flexmasks.integrations import diffusers

BATCH, HEADS, Q, KV, SIZE = 3, 4, 20, 31, 8
FLEX, NATIVE = AttentionBackendName.FLEX, AttentionBackendName.NATIVE
ENTRIES = "_backends", "_constraints", "_supported_arg_names"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    active = _AttentionBackendRegistry._active_backend
    diffusers.register()
    yield
    diffusers.unregister()
    _AttentionBackendRegistry.set_active_backend(active)


def inputs(q_len: int = Q, kv_len: int = KV, kv_heads: int = HEADS, batch: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len + kv_len)
    shapes = (batch, q_len, HEADS, SIZE), *[(batch, kv_len, kv_heads, SIZE)] * 2
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


def expected(query: Tensor, key: Tensor, value: Tensor, added: Tensor, scale: float | None = None) -> list[Tensor]:
    """Output and lse of the definition; a row that sees nothing is 0."""
    k, v = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    is_empty = (added == -math.inf).all(-1, keepdim=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, k) * (scale or query.shape[-1] ** -0.5)
    scores = scores + added.masked_fill(is_empty, 0.0)
    weights = scores.softmax(-1).masked_fill(is_empty, 0.0)
    return [torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1)]


def check(
    mask: Any, added: Tensor, tensors: list[Tensor], learned: tuple[Tensor, ...] = (), **options: Any
) -> None:  # fmt: skip
    """Compare outputs and gradients of the backend with those of the definition."""
    got = dispatch_attention_fn(*tensors, attn_mask=mask, backend=FLEX, **options)
    options.pop("is_causal", None), options.pop("enable_gqa", None)
    want = expected(*tensors, added, **options)[0]
    assert got.shape == want.shape
    assert error(got, want) < 1e-9
    upstream = torch.randn(want.shape, dtype=want.dtype)
    leaves = (*tensors, *learned)
    for x, y in zip(*(torch.autograd.grad(out, leaves, upstream) for out in (got, want)), strict=True):
        assert error(x, y) < 1e-9


def as_added(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -math.inf)


def drawn(*shape: int) -> Tensor:
    """Booleans in which each row shows its first key and half of the others."""
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5
    visible[..., 0] = True
    return visible


# By name: the shape of a mask, and where its dimensions lie in [B, H, Q, KV]. The batch, the heads, the queries and the
# keys have different numbers, but for shapes that can be read in two ways.
FORMS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "keys": ((BATCH, KV), (slice(None), None, None)),
    "keys, one row": ((1, KV), (slice(None), None, None)),
    "keys alone": ((KV,), (None, None, None)),
    "queries": ((Q, KV), (None, None)),
    "keys in four": ((BATCH, 1, 1, KV), ()),
    "pairs of batches": ((BATCH, Q, KV), (slice(None), None)),
    "pairs of a batch": ((1, Q, KV), (slice(None), None)),
    "pairs": ((BATCH, 1, Q, KV), ()),
    "pairs of heads": ((1, HEADS, Q, KV), ()),
    "all": ((BATCH, HEADS, Q, KV), ()),
}


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, is_added: bool) -> None:
    shape, where = FORMS[form]
    visible = drawn(*shape)
    added = as_added(visible)
    if is_added:
        added = (added + torch.randn(shape, dtype=torch.float64)).requires_grad_()
    check(added if is_added else visible, added[where], inputs(), (added,) if is_added else ())


def test_a_mask_of_keys_with_as_many_queries_as_batch_elements() -> None:
    visible = drawn(BATCH, KV)
    check(visible, as_added(visible)[:, None, None], inputs(q_len=BATCH))


def test_three_dimensions_are_of_batch_elements_where_there_are_as_many_heads() -> None:
    visible = drawn(HEADS, Q, KV)
    check(visible, as_added(visible)[:, None], inputs(batch=HEADS))


def test_numbers_that_hide_by_being_large() -> None:
    """Pipelines write -10000 or the lowest number; a row of such keys alone still is an average."""
    visible = drawn(BATCH, 1, Q, KV)
    visible[1, :, 3] = False
    added = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -10000.0)
    check(added, added, inputs())


@pytest.mark.parametrize("number", [-10000.0, torch.finfo(torch.float32).min])
def test_numbers_under_autocast(number: float) -> None:
    """Autocast casts a mask of numbers, too: the lowest one becomes -inf, by which rows see nothing."""
    visible = drawn(BATCH, 1, Q, KV)
    visible[1, :, 3] = False
    mask, tensors = torch.zeros(visible.shape).masked_fill(~visible, number), [x.float() for x in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = (dispatch_attention_fn(*tensors, attn_mask=mask, backend=x) for x in (FLEX, NATIVE))
    assert got.dtype == want.dtype == torch.bfloat16
    assert error(got, want) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms_on_a_gpu(form: str, is_added: bool) -> None:
    shape, where = FORMS[form]
    visible = drawn(*(260 if n == Q else 390 if n == KV else n for n in shape))
    added = as_added(visible)
    if is_added:
        added = added + torch.randn(added.shape, dtype=torch.float64)
    shapes = (BATCH, 260, HEADS, 64), *[(BATCH, 390, HEADS, 64)] * 2
    tensors = [torch.randn(s, dtype=torch.bfloat16, device="cuda").requires_grad_() for s in shapes]
    mask = (added.float() if is_added else visible).cuda()
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = expected(*exact, added.cuda()[where])[0]
    upstream = torch.randn_like(want)
    got = dispatch_attention_fn(*tensors, attn_mask=mask, backend=FLEX)
    assert error(got, want) < TOLERANCE[torch.bfloat16]
    gradients = (
        torch.autograd.grad(out, leaves, upstream.to(out.dtype)) for out, leaves in ((got, tensors), (want, exact))
    )
    for x, y in zip(*gradients, strict=True):
        assert error(x, y) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("q_len", [Q, KV])
def test_causal_starts_at_the_first_query(q_len: int) -> None:
    causal = torch.ones(q_len, KV, dtype=torch.bool).tril()
    check(None, as_added(causal)[None, None], inputs(q_len), is_causal=True)
    visible = drawn(BATCH, KV)
    check(visible, as_added(causal & visible[:, None, None]), inputs(q_len), is_causal=True)


def test_grouped_heads_and_a_scale() -> None:
    visible = drawn(BATCH, 1, 1, KV)
    check(visible, as_added(visible), inputs(kv_heads=2), enable_gqa=True, scale=0.3)
    check(None, torch.zeros(1, dtype=torch.float64), inputs(kv_heads=1), enable_gqa=True)


@pytest.mark.parametrize("form", ["a transposed one", "an expanded one", "a slice", "a step"])
def test_masks_that_are_not_contiguous(form: str) -> None:
    visible = {
        "a transposed one": lambda: drawn(BATCH, KV, Q).transpose(1, 2)[:, None] | (torch.arange(KV) == 0),
        "an expanded one": lambda: drawn(BATCH, 1, 1, KV).expand(BATCH, HEADS, Q, KV),
        "a slice": lambda: drawn(BATCH + 1, 1, Q + 2, KV)[1:, :, 2:],
        "a step": lambda: drawn(BATCH, 1, 2 * Q, KV)[:, :, ::2],
    }[form]()
    check(visible, as_added(visible), inputs())
    keys = drawn(KV, BATCH).T | (torch.arange(KV) == 0)
    check(keys, as_added(keys)[:, None, None], inputs())


def test_padded_text_beside_an_image() -> None:
    """The text of each sample is padded in the middle of the joint sequence, and rows of padding see what others do."""
    lengths, text = torch.tensor([4, 9, 1]), 9
    visible = torch.cat([torch.arange(text) < lengths[:, None], torch.ones(BATCH, KV - text, dtype=torch.bool)], 1)
    check(visible, as_added(visible)[:, None, None], inputs(q_len=KV))
    check(visible[:, None, None, :], as_added(visible)[:, None, None], inputs(q_len=KV))
    both = visible[:, None, :, None] & visible[:, None, None, :]  # rows of padding see nothing, and give 0
    check(both, as_added(both), inputs(q_len=KV))


def test_log_sum_exp() -> None:
    visible, tensors = drawn(BATCH, KV), inputs()
    out, lse = dispatch_attention_fn(
        *tensors, attn_mask=visible, backend=FLEX, attention_kwargs={"return_lse": True}
    )  # fmt: skip
    for got, want in zip((out, lse), expected(*tensors, as_added(visible)[:, None, None]), strict=True):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


# --- block masks ---


def nabla(batch: int, heads: int, length: int, seed: int, size: int = 64) -> tuple[BlockMask, Tensor]:
    """A block mask as Kandinsky makes one for each layer and step, and its pairs: full blocks, without a function."""
    blocks = drawn_blocks(batch, heads, length // size, seed)
    return of_blocks(blocks, size), blocks.repeat_interleave(size, -1).repeat_interleave(size, -2)


def drawn_blocks(batch: int, heads: int, count: int, seed: int) -> Tensor:
    blocks = torch.rand(batch, heads, count, count, generator=torch.Generator().manual_seed(seed)) < 0.3
    return blocks | torch.eye(count, dtype=torch.bool)


def of_blocks(blocks: Tensor, size: int = 64) -> BlockMask:
    numbers, indices = (x.to(torch.int32) for x in (blocks.sum(-1), blocks.int().argsort(-1, descending=True)))
    return BlockMask.from_kv_blocks(
        torch.zeros_like(numbers), indices, numbers, indices, BLOCK_SIZE=size, mask_mod=None
    )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
def test_block_masks_of_blocks_alone(is_causal: bool) -> None:
    mask, visible = nabla(BATCH, HEADS, 256, seed=0)
    visible = visible.tril() if is_causal else visible
    check(mask, as_added(visible), inputs(256, 256), is_causal=is_causal)
    mask.mask_mod = None
    check(mask, as_added(visible), inputs(256, 256), is_causal=is_causal)


def test_block_masks_of_a_function() -> None:
    ids = torch.arange(256) // 50
    mod = lambda b, h, q, kv: (ids[q] == ids[kv]) & (kv <= q + b)  # noqa: E731
    mask = create_block_mask(mod, BATCH, None, 256, 256, device="cpu")
    q, kv = torch.arange(256)[:, None], torch.arange(256)
    visible = torch.stack([mod(b, 0, q, kv) for b in range(BATCH)])[:, None]
    check(mask, as_added(visible), inputs(256, 256))


@pytest.mark.campaign
@pytest.mark.parametrize("learns", [False, True])
def test_block_masks_keep_no_scores_of_all_pairs(learns: bool) -> None:
    """Eager calls with a new block mask each: torch's eager flex_attention would take 2.1 GB for a tensor of scores."""
    length, heads = 16_384, 2
    tensors = [torch.randn(1, length, heads, 16, requires_grad=learns) for _ in range(3)]
    before = peak_memory()
    for seed in range(2):
        blocks = drawn_blocks(1, heads, length // 64, seed)
        out = dispatch_attention_fn(*tensors, attn_mask=of_blocks(blocks), backend=FLEX)
        if learns:
            out.sum().backward()
    assert peak_memory() - before < 5e8


# --- masks of this library, and what is refused ---


def test_masks_and_plans() -> None:
    tensors, mask = inputs(KV), flexmasks.get_mask("sliding_window", window=4)
    visible = flexmasks.dense_mask(mask, KV)
    check(mask, as_added(visible), tensors)
    check(flexmasks.plan(mask, KV), as_added(visible), tensors)
    check(flexmasks.get_mask("local", left=2, right=3), as_added(
        flexmasks.dense_mask("local", KV, left=2, right=3) & torch.ones(KV, KV, dtype=torch.bool).tril()
    ), tensors, is_causal=True)  # fmt: skip


def test_dropout() -> None:
    torch.manual_seed(1)
    out = dispatch_attention_fn(*inputs(), backend=FLEX, dropout_p=0.3)
    torch.manual_seed(1)
    assert torch.equal(out, flexmasks.attention(*inputs(), layout="bshd", q_offset=0, dropout_p=0.3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_kwargs": {"window_size": (3, 0)}}, r"no window_size=\(3, 0\)"),
        ({"attention_kwargs": {"softcap": 30.0}}, "softcap=30.0"),
        ({"attn_mask": "causal"}, "must be a tensor, a BlockMask, a Mask or a plan, got 'causal'"),
        ({"attn_mask": torch.ones(BATCH, KV, dtype=torch.int64)}, "int64"),
        ({"attn_mask": torch.ones(2, Q, KV, dtype=torch.bool)}, r"\[2, 1, 20, 31\]"),
        ({"attn_mask": flexmasks.plan("full", Q, KV), "is_causal": True}, "a plan takes no is_causal"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        dispatch_attention_fn(*inputs(), backend=FLEX, **options)


# --- registration ---


def test_registration_is_undone() -> None:
    diffusers.register()  # a second time
    ours = [getattr(_AttentionBackendRegistry, x)[FLEX] for x in ENTRIES]
    diffusers.unregister()
    theirs = [getattr(_AttentionBackendRegistry, x)[FLEX] for x in ENTRIES]
    assert theirs[0].__module__ == "diffusers.models.attention_dispatch"
    assert theirs[0] is not ours[0]
    assert "dropout_p" not in theirs[2]
    assert theirs[1]
    assert "flex" not in _AttentionBackendRegistry._supports_context_parallel
    diffusers.unregister()  # without a registration this is nothing
    assert [getattr(_AttentionBackendRegistry, x)[FLEX] for x in ENTRIES] == theirs


def test_the_context_manager() -> None:
    tensors, causal = inputs(KV), torch.ones(KV, KV, dtype=torch.bool).tril()
    want = expected(*tensors, as_added(causal))[0]
    with attention_backend("flex"):
        got = dispatch_attention_fn(*tensors, is_causal=True)
    assert error(got, want) < 1e-9


# --- looks at masks ---


def test_a_mask_that_shows_all_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    attend = lambda q, k, v, mask, **_: masks.append(mask) or q  # noqa: E731
    monkeypatch.setattr("flexmasks.integrations.diffusers.attention", attend)
    keys, tensors = torch.ones(BATCH, KV, dtype=torch.bool), inputs()
    call = functools.partial(dispatch_attention_fn, *tensors, backend=FLEX)
    call(attn_mask=keys)
    with NoReads():
        call(attn_mask=keys)
    assert masks == [None] * 2
    keys[1, 4:] = False
    call(attn_mask=keys)
    assert masks[-1] is not None
    ref = weakref.ref(keys)
    masks.clear()
    del keys
    gc.collect()
    assert ref() is None


def test_new_masks_compile_nothing() -> None:
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def layer(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return dispatch_attention_fn(query, key, value, attn_mask=mask, backend=FLEX)

    tensors = inputs()
    for form in ("keys", "pairs"):
        counter.frame_count = 0
        shape, where = FORMS[form]
        for n in range(3):
            visible = drawn(*shape).roll(n, -1) | (torch.arange(KV) == 0)
            want = expected(*tensors, as_added(visible)[where])[0]
            assert error(layer(*tensors, visible), want) < 1e-9
        assert counter.frame_count == 1


@pytest.mark.campaign
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_block_masks_that_graphs_make_and_get(compiler: str, is_causal: bool) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)

    @torch.compile(backend=counter, fullgraph=True)
    def layer(query: Tensor, key: Tensor, value: Tensor, seed: Tensor, given: BlockMask) -> tuple[Tensor, Tensor]:
        blocks = (seed + torch.arange(20)[:, None] * torch.arange(20)) % 3 == 0
        blocks = blocks | torch.eye(20, dtype=torch.bool)
        out = dispatch_attention_fn(
            query, key, value, attn_mask=of_blocks(blocks[None, None]), backend=FLEX, is_causal=is_causal
        )  # fmt: skip
        return out, dispatch_attention_fn(query, key, value, attn_mask=given, backend=FLEX)

    for n in range(3):
        tensors = [x.float().detach() for x in inputs(1280, 1280, batch=1)]
        given, visible = nabla(1, 1, 1280, seed=n)
        made = (n + torch.arange(20)[:, None] * torch.arange(20)) % 3 == 0
        made = (made | torch.eye(20, dtype=torch.bool)).repeat_interleave(64, 0).repeat_interleave(64, 1)
        with torch.no_grad():
            got = layer(*tensors, torch.tensor(n), given)
        for out, shown in zip(got, (made.tril() if is_causal else made, visible), strict=True):
            assert error(out, expected(*tensors, as_added(shown).float())[0]) < 1e-4
    assert counter.frame_count == 1


@pytest.mark.campaign
def test_context_parallelism(two: Processes) -> None:
    import diffusers_jobs as jobs

    for errors in two.run(jobs.context_parallel):
        assert len(errors) == 27
        assert max(errors.values()) < 1e-9, errors


# --- models, tiny and with random weights ---

Arguments = dict[str, Any]
TEXT = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])  # the padding of two texts


def drawn_floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def flux() -> tuple[Any, Arguments]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    mask = torch.cat([TEXT.bool(), torch.ones(2, 16, dtype=torch.bool)], 1)
    return model, {
        "hidden_states": drawn_floats(2, 16, 4), "encoder_hidden_states": drawn_floats(2, 7, 32),
        "pooled_projections": drawn_floats(2, 32), "timestep": torch.tensor([0.5, 0.5]),
        "img_ids": torch.arange(48).view(16, 3) % 4.0, "txt_ids": torch.zeros(7, 3),
        "joint_attention_kwargs": {"attention_mask": mask},
    }  # fmt: skip


def wan() -> tuple[Any, Arguments]:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32, image_dim=4, added_kv_proj_dim=24, pos_embed_seq_len=None,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(2, 4, 2, 8, 8), "timestep": torch.tensor([5, 5]),
        "encoder_hidden_states": drawn_floats(2, 520, 16), "encoder_hidden_states_image": drawn_floats(2, 3, 4),
    }  # fmt: skip


def qwen_image() -> tuple[Any, Arguments]:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(2, 16, 16), "encoder_hidden_states": drawn_floats(2, 7, 16),
        "encoder_hidden_states_mask": TEXT, "timestep": torch.tensor([0.5, 0.5]), "img_shapes": [[(1, 4, 4)]] * 2,
    }  # fmt: skip


def qwen_image_21() -> tuple[Any, Arguments]:
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel

    model = QwenImage21Transformer2DModel(
        in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=2, context_in_dim=16,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    slots = torch.tensor([[False] * 4 + [True] * 4 + [False] * 3 + [True] * 4])
    return model, {
        "hidden_states": drawn_floats(2, 32, 8), "encoder_hidden_states": drawn_floats(2, 11, 16),
        "timestep": torch.tensor([0.5, 0.5]), "img_shapes": [[(1, 4, 4), (1, 4, 4)]] * 2,
        "img_mask": slots.expand(2, -1), "encoder_hidden_states_mask": torch.tensor([[1] * 11, [1] * 9 + [0] * 2]),
    }  # fmt: skip


def qwen_image_21_by_blocks() -> tuple[Any, Arguments]:
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21FlexAttnProcessor

    model, arguments = qwen_image_21()
    for block in model.transformer_blocks:
        block.attn.set_processor(QwenImage21FlexAttnProcessor())
    return model, arguments


def stable_diffusion_3() -> tuple[Any, Arguments]:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(2, 4, 8, 8), "encoder_hidden_states": drawn_floats(2, 7, 16),
        "pooled_projections": drawn_floats(2, 16), "timestep": torch.tensor([5, 5]),
    }  # fmt: skip


def cogvideox() -> tuple[Any, Arguments]:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=8,
        num_layers=2, sample_width=8, sample_height=8, sample_frames=8, max_text_seq_length=7,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(2, 2, 4, 8, 8), "encoder_hidden_states": drawn_floats(2, 7, 8),
        "timestep": torch.tensor([5, 5]),
    }  # fmt: skip


def hunyuan_video() -> tuple[Any, Arguments]:
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(2, 4, 1, 5, 5), "timestep": torch.tensor([5, 5]),
        "encoder_hidden_states": drawn_floats(2, 7, 16), "encoder_attention_mask": TEXT,
        "pooled_projections": drawn_floats(2, 8), "guidance": torch.tensor([6.0, 6.0]),
    }  # fmt: skip


def hunyuan_video_15() -> tuple[Any, Arguments]:
    from diffusers import HunyuanVideo15Transformer3DModel

    model = HunyuanVideo15Transformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1, num_refiner_layers=1,
        text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=12, rope_axes_dim=(2, 2, 4), target_size=16,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(2, 4, 1, 5, 5), "timestep": torch.tensor([5.0, 5.0]),
        "encoder_hidden_states": drawn_floats(2, 7, 16), "encoder_attention_mask": TEXT,
        "encoder_hidden_states_2": drawn_floats(2, 3, 8), "encoder_attention_mask_2": TEXT[:, 2:5],
        "image_embeds": drawn_floats(2, 2, 12),
    }  # fmt: skip


def ltx() -> tuple[Any, Arguments]:
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=32,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(2, 32, 4), "encoder_hidden_states": drawn_floats(2, 7, 32),
        "timestep": torch.tensor([5, 5]), "encoder_attention_mask": TEXT, "num_frames": 2, "height": 4, "width": 4,
    }  # fmt: skip


def kandinsky(**sparse: Any) -> tuple[Any, Arguments]:
    from diffusers import Kandinsky5Transformer3DModel

    model = Kandinsky5Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, model_dim=32, ff_dim=32,
        num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6),
    )  # fmt: skip
    frames, side = 2, 32
    return model, {
        "hidden_states": drawn_floats(1, frames, side, side, 4), "encoder_hidden_states": drawn_floats(1, 7, 16),
        "timestep": torch.tensor([5.0]), "pooled_projections": drawn_floats(1, 8),
        "visual_rope_pos": tuple(map(torch.arange, (frames, side // 2, side // 2))), "text_rope_pos": torch.arange(7),
        **sparse,
    }  # fmt: skip


def kandinsky_nabla() -> tuple[Any, Arguments]:
    near = torch.eye(8, dtype=torch.bool) | torch.eye(8, dtype=torch.bool).roll(1, 0)
    return kandinsky(sparse_params={"sta_mask": near[None, None], "P": 0.4, "to_fractal": True})


def kandinsky_6_sr() -> tuple[Any, Arguments]:
    from diffusers.models.transformers.transformer_kandinsky6_sr import Kandinsky6SRTransformer3DModel

    model = Kandinsky6SRTransformer3DModel(
        in_visual_dim=4, out_visual_dim=4, time_dim=16, model_dim=32, ff_dim=32, num_visual_blocks=2,
        axes_dims=(4, 6, 6), nabla_threshold=0.4, nabla_window=(1, 1, 1),
    )  # fmt: skip
    return model, {"hidden_states": drawn_floats(1, 2, 16, 16, 9), "timestep": torch.tensor([5.0])}


def anyflow() -> tuple[Any, Arguments]:
    from diffusers import AnyFlowTransformer3DModel

    model = AnyFlowTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(1, 2, 4, 8, 8), "timestep": torch.full((1, 2), 500.0),
        "r_timestep": torch.full((1, 2), 250.0), "encoder_hidden_states": drawn_floats(1, 7, 16),
    }  # fmt: skip


def anyflow_far() -> tuple[Any, Arguments]:
    from diffusers import AnyFlowFARTransformer3DModel

    model = AnyFlowFARTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32, chunk_partition=(1, 2), full_chunk_limit=3,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn_floats(1, 3, 4, 8, 8), "timestep": torch.full((1, 3), 500.0),
        "r_timestep": torch.full((1, 3), 250.0), "encoder_hidden_states": drawn_floats(1, 7, 16),
        "chunk_partition": [1, 2],
    }  # fmt: skip


MODELS = [
    flux, wan, qwen_image, qwen_image_21, qwen_image_21_by_blocks, stable_diffusion_3, hunyuan_video, hunyuan_video_15,
    ltx, cogvideox, kandinsky, kandinsky_nabla, kandinsky_6_sr, anyflow, anyflow_far,
]  # fmt: skip
BY_SDPA = stable_diffusion_3, cogvideox  # they call SDPA themselves, with every backend
# These ask for "flex" by themselves, because their masks are block masks, of which a CPU has no gradients in torch's
# flex_attention: they are compared with SDPA and the dense mask.
OF_BLOCK_MASKS = qwen_image_21_by_blocks, kandinsky_nabla, kandinsky_6_sr, anyflow_far


def by_dense_mask(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, scale: float | None = None) -> Tensor:
    visible = None
    if attn_mask is not None:
        (height, width), (q_len, kv_len) = attn_mask.BLOCK_SIZE, attn_mask.seq_lengths
        at = [
            torch.arange(n, device=query.device).view(-1, *ones)
            for n, ones in ((query.shape[0], (1, 1, 1)), (query.shape[2], (1, 1)))
        ]
        q, kv = torch.arange(q_len, device=query.device), torch.arange(kv_len, device=query.device)
        shown = attn_mask.mask_mod(*at, q[:, None], kv)
        partial, full = (
            of_lists(*lists).repeat_interleave(height, 2).repeat_interleave(width, 3)[:, :, :q_len, :kv_len]
            for lists in (
                (attn_mask.kv_num_blocks, attn_mask.kv_indices),
                (attn_mask.full_kv_num_blocks, attn_mask.full_kv_indices),
            )
        )
        visible = full | (partial & shown)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=scale).transpose(1, 2)


def of_lists(numbers: Tensor, indices: Tensor) -> Tensor:
    """Which blocks stand in the lists of a BlockMask."""
    blocks = torch.zeros_like(indices, dtype=torch.bool)
    places = torch.arange(indices.shape[-1], device=indices.device)
    return blocks.scatter(-1, indices.long(), places < numbers[..., None])


def passes(model: Any, arguments: Arguments) -> list[Tensor]:
    """The output and the gradients of all weights."""
    model.zero_grad()
    out = model(**arguments, return_dict=False)
    out = out[0] if isinstance(out, tuple) else out
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def on(device: str, value: Any) -> Any:
    """A model, or arguments of one, on a device."""
    if isinstance(value, dict):
        return {name: on(device, x) for name, x in value.items()}
    if isinstance(value, tuple):
        return tuple(on(device, x) for x in value)
    return value.to(device) if isinstance(value, Tensor | torch.nn.Module) else value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("build", [x if x is qwen_image else in_campaigns(x) for x in MODELS])
def test_models(build: Callable[[], tuple[Any, Arguments]], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, arguments = on(device, build())
    for parameter in model.parameters():  # layers that start at 0 would hide what attention gives
        torch.nn.init.normal_(parameter, std=0.1) if not parameter.any() else None
    calls: list[Any] = []
    attend = lambda *args, **given: calls.append(given["mask"]) or flexmasks.attention(*args, **given)  # noqa: E731
    monkeypatch.setattr("flexmasks.integrations.diffusers.attention", attend)
    model.set_attention_backend("flex" if build in OF_BLOCK_MASKS else "native")
    with monkeypatch.context() as patched:
        if build in OF_BLOCK_MASKS:
            patched.setitem(_AttentionBackendRegistry._backends, FLEX, by_dense_mask)
            patched.setitem(
                _AttentionBackendRegistry._supported_arg_names, FLEX, {*signature(by_dense_mask).parameters}
            )
        want = passes(model, arguments)
    assert not calls
    model.set_attention_backend("flex")
    got = passes(model, arguments)
    assert bool(calls) == (build not in BY_SDPA)
    if build in OF_BLOCK_MASKS:
        assert any(isinstance(mask, BlockMask) for mask in calls)
    assert len(got) == len(want) > 5
    for x, y in zip(got, want, strict=True):
        assert error(x, y) < (1e-4 if device == "cpu" else 1e-2)  # tensor cores round float32


@pytest.mark.campaign
@pytest.mark.parametrize("build", [flux, qwen_image])
def test_compiled_models_with_new_masks(build: Callable[[], tuple[Any, Arguments]]) -> None:
    torch.manual_seed(0)
    model, arguments = build()
    model.set_attention_backend("native")
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    frames = []
    for n in range(3):
        text = TEXT.roll(n, 0) | (torch.arange(7) < 3 + n)
        if build is flux:
            mask = torch.cat([text.bool(), torch.ones(2, 16, dtype=torch.bool)], 1)
            arguments["joint_attention_kwargs"] = {"attention_mask": mask}
        else:
            arguments["encoder_hidden_states_mask"] = text
        with torch.no_grad():
            model.set_attention_backend("native")
            want = model(**arguments, return_dict=False)[0]
            model.set_attention_backend("flex")
            assert error(compiled(**arguments, return_dict=False)[0], want) < 1e-4
        frames.append(counter.frame_count)
    assert frames[0] == frames[2] > 0
