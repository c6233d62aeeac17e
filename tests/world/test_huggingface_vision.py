"""Vision towers of Hugging Face's models that attend to all images in one call, and the masks of models."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import flexmasks
from flexmasks.integrations import huggingface
from flexmasks.integrations.huggingface import attention as adapter

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code

TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    huggingface.register()


# --- vision towers ---

TOWER = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 24,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen2-VL": (
        "qwen2_vl",
        "Qwen2VisionTransformerPretrainedModel",
        {n: v for n, v in TOWER.items() if "size" not in n}
        | {"embed_dim": 32, "hidden_size": 24, "patch_size": 4, "mlp_ratio": 2},
    ),
    "Qwen2.5-VL": (
        "qwen2_5_vl",
        "Qwen2_5_VisionTransformerPretrainedModel",
        TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Qwen3-VL": (
        "qwen3_vl",
        "Qwen3VLVisionModel",
        TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
    ),
    "Qwen2.5-Omni": (
        "qwen2_5_omni",
        "Qwen2_5OmniVisionEncoder",
        TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Qwen3-Omni": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeVisionEncoder",
        TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
    ),
    "GLM-4V": ("glm4v", "Glm4vVisionModel", TOWER | {"image_size": 32}),
    "GLM-OCR": ("glm_ocr", "GlmOcrVisionModel", TOWER | {"image_size": 32}),
}
GRID = torch.tensor([[1, 10, 6], [1, 4, 8], [2, 6, 6]])  # frames, rows and columns of patches
IMAGES = torch.tensor([[1, 10, 6], [1, 4, 8], [1, 6, 6], [1, 6, 6]])  # GLM-4V itself fails at several frames
PATCHES = int(GRID.prod(1).sum())
FRAMES = 4


def towers(name: str, *implementations: str) -> list[Any]:
    """Return towers with the same parameters, for each name of an implementation."""
    module, class_name, given = TOWERS[name]
    __import__(f"transformers.models.{module}.modeling_{module}")
    cls = getattr(getattr(transformers.models, module), class_name, None)
    if cls is None:
        cls = getattr(getattr(getattr(transformers.models, module), f"modeling_{module}"), class_name)
    config = cls.config_class(**given)
    made = []
    for implementation in implementations:
        torch.manual_seed(0)
        made.append(cls._from_config(copy.deepcopy(config), attn_implementation=implementation))
    return made


def patches() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(PATCHES, 3 * 2 * 4 * 4)


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which each call of attention adds the shape of its queries."""
    shapes: list[tuple[int, ...]] = []
    run = adapter.attention

    def counted(q: Tensor, *args: Any, **given: Any) -> Any:
        shapes.append(tuple(q.shape))
        return run(q, *args, **given)

    monkeypatch.setattr(adapter, "attention", counted)
    return shapes


def _last(tower: nn.Module) -> Tensor:
    output = tower(patches(), GRID)
    last: Tensor = output.last_hidden_state
    return last


@pytest.mark.parametrize("other", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TOWERS)
def test_a_patched_tower_gives_the_same(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = towers(name, "flexmasks", other)
    depth = TOWER["depth"]
    assert huggingface.patch_vision(own) == depth
    assert huggingface.patch_vision(own) == depth  # the second time changes nothing
    shapes = _calls(monkeypatch)
    for tower in (own, theirs):
        output = tower(patches(), IMAGES if name == "GLM-4V" else GRID)
        tower.outputs = [x for x in (output.last_hidden_state, output.pooler_output) if isinstance(x, Tensor)]
        sum((x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in tower.outputs).backward()
    assert shapes == [(1, 2, PATCHES, 16)] * depth  # one call of each layer
    for x, want in zip(own.outputs, theirs.outputs, strict=True):
        assert torch.allclose(x, want, atol=TOLERANCE, rtol=TOLERANCE), float((x - want).abs().max())
    learned = 0
    for (n, x), want in zip(own.named_parameters(), theirs.parameters(), strict=True):
        if want.grad is None:
            assert x.grad is None, n
            continue
        learned += bool(want.grad.any())
        assert float((x.grad - want.grad).norm()) <= 1e-4 * max(1.0, float(want.grad.norm())), n
    assert learned > 5 * depth


def test_only_the_given_model_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    patched, plain, sdpa = towers("Qwen2.5-VL", "flexmasks", "flexmasks", "sdpa")
    assert huggingface.patch_vision(patched) == 3
    shapes = _calls(monkeypatch)
    want = _last(sdpa)
    assert torch.allclose(_last(plain), want, atol=TOLERANCE)
    assert len(shapes) > 3 * FRAMES  # windows are sequences, too
    for copied in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert huggingface.patch_vision(copied) == 3
        shapes.clear()
        assert torch.allclose(_last(copied), want, atol=TOLERANCE)
        assert len(shapes) == 3
    shapes.clear()
    patched.set_attn_implementation("sdpa")
    assert torch.equal(_last(patched), want)
    patched.set_attn_implementation("flexmasks")
    assert not shapes
    assert torch.allclose(_last(patched), want, atol=TOLERANCE)
    assert len(shapes) == 3


def test_a_tower_inside_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 99, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
        },
        vision_config=TOWERS["Qwen2.5-VL"][2], image_token_id=7, video_token_id=8, vision_start_token_id=5,
        vision_end_token_id=6,
    )  # fmt: skip
    outputs = []
    for implementation in ("flexmasks", "eager"):
        torch.manual_seed(0)
        cls = transformers.Qwen2_5_VLForConditionalGeneration
        model = cls._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
        if implementation == "flexmasks":
            assert huggingface.patch_vision(model) == 3  # of the tower; layers of text stay as they are
            shapes = _calls(monkeypatch)
        ids = torch.tensor([[11, *(x for n in GRID.prod(1).tolist() for x in (5, *[7] * (n // 4), 6, 12))]])
        given = {"input_ids": ids, "mm_token_type_ids": (ids == 7).int(), "image_grid_thw": GRID}
        outputs.append(model(**given, pixel_values=patches()).logits)
    assert len(shapes) == 3 + 2
    assert torch.allclose(*outputs, atol=TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_patched_tower_with_gradient_checkpointing(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (tower.train() for tower in towers("Qwen2.5-VL", "flexmasks", "eager"))
    huggingface.patch_vision(own)
    own.gradient_checkpointing_enable({"use_reentrant": reentrant})
    compile_ = torch.compile  # kernels without gradients are traced, and not made of C++
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_(*args, **options | {"backend": "eager"}))
    shapes = _calls(monkeypatch)
    for tower in (own, other):
        _last(tower).square().sum().backward()
    assert len(shapes) == 2 * 3  # each layer runs again in the backward pass
    for (n, x), want in zip(own.named_parameters(), other.parameters(), strict=True):
        if want.grad is not None and n.startswith("blocks"):
            assert torch.allclose(x.grad, want.grad, atol=1e-4, rtol=1e-4), n


@pytest.mark.slow
def test_a_patched_layer_inside_compile() -> None:
    own, other = (tower.blocks[1].attn for tower in towers("Qwen2.5-VL", "flexmasks", "eager"))
    assert huggingface.patch_vision(own) == 1
    compiled = torch.compile(own, fullgraph=True, backend="eager")
    for ends in ([30, 37, 64], [12, 90]):
        offsets = torch.tensor([0, *ends], dtype=torch.int32)
        given = (torch.randn(ends[-1], 32), offsets, (torch.randn(ends[-1], 16), torch.randn(ends[-1], 16)))
        assert torch.allclose(compiled(*given), other(*given), atol=TOLERANCE)


def test_a_layer_that_names_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check HunYuan's layers, which call attention functions without a mask."""
    module = pytest.importorskip("transformers.models.hunyuan_vl.modeling_hunyuan_vl")
    config = module.HunYuanVLVisionConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    layers = []
    for implementation in ("flexmasks", "sdpa"):
        torch.manual_seed(0)
        config._attn_implementation = implementation
        layers.append(module.HunYuanVLVisionAttention(copy.deepcopy(config)))
    own, other = layers
    x, offsets = torch.randn(1, 50, 32), torch.tensor([0, 30, 37, 50], dtype=torch.int32)
    want = torch.cat(
        [other(part, torch.tensor([0, part.shape[1]]), attention_mask=None)[0] for part in x.split([30, 7, 13], 1)], 1
    )
    assert huggingface.patch_vision(own) == 1
    shapes = _calls(monkeypatch)
    assert torch.allclose(own(x, offsets)[0], want, atol=TOLERANCE)
    assert torch.allclose(own(x, cu_seqlens=offsets)[0], want, atol=TOLERANCE)
    assert shapes == [(1, 2, 50, 16)] * 2


def test_models_that_cannot_be_patched() -> None:
    with pytest.raises(TypeError, match=r"patch_vision: `model` must be a torch.nn.Module, got str"):
        huggingface.patch_vision("Qwen/Qwen2.5-VL")  # type: ignore[arg-type]
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )
    with pytest.raises(ValueError, match="no attention layer of LlamaModel splits its input by image"):
        huggingface.patch_vision(transformers.LlamaModel._from_config(config, attn_implementation="flexmasks"))
    (tower,) = towers("Qwen2.5-VL", "sdpa")
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa'.*set_attn_implementation\(\"flexmasks\"\)"):
        huggingface.patch_vision(tower)
    tower.set_attn_implementation("flexmasks")
    assert huggingface.patch_vision(tower) == 3


# --- masks of a model's layers ---

LENGTH, WINDOW = 300, 70
TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
WINDOWS = ["model.layers.0.self_attn", "model.layers.2.self_attn", "model.layers.3.self_attn"]
FULL = ["model.layers.1.self_attn"]
QUERY, KEY = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)


@functools.cache
def decoder(implementation: str = "flexmasks") -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**copy.deepcopy(TEXT))
    return transformers.Gemma3ForCausalLM._from_config(config, attn_implementation=implementation)


def _ids(batch: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(0))


def check_masks(found: huggingface.LayerMasks, causal: Tensor, windows: Tensor) -> None:
    """Compare the masks of the decoder with booleans, [batch or 1, 1, queries, keys]."""
    assert list(found) == sorted([*WINDOWS, *FULL])
    assert [names for _, names in found.distinct] == [WINDOWS, FULL]
    for names, visible in ((WINDOWS, windows), (FULL, causal)):
        for name in names:
            layer = found[name]
            assert (layer.q_len, layer.kv_len) == visible.shape[-2:]
            sizes = {"batch": layer.batch, "heads": layer.heads, "q_offset": layer.q_offset}
            dense = flexmasks.dense_mask(layer.mask, layer.q_len, layer.kv_len, **sizes)
            assert torch.equal(dense, visible.expand_as(dense)), name
            assert dense.shape[0] >= visible.shape[0]
            assert layer.sparsity == pytest.approx(_skipped(visible))
    mean = (3 * _skipped(windows) + _skipped(causal)) / 4
    assert found.sparsity == pytest.approx(mean)


def _skipped(visible: Tensor) -> float:
    """Return the share of the pairs that lie in blocks of 128 x 128 without visible pairs."""
    blocks = [block for rows in visible.split(128, 2) for part in rows.split(128, 3) for block in part]
    return sum(block.numel() for block in blocks if not block.any()) / visible.numel()


CAUSAL = (QUERY >= KEY)[None, None]
SLIDING = CAUSAL & (QUERY - KEY < WINDOW)


def test_masks_of_a_decoder() -> None:
    check_masks(huggingface.masks(decoder(), _ids()), CAUSAL, SLIDING)
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, 100:] = 0
    real = padding.bool()[:, None, None]
    found = huggingface.masks(decoder(), input_ids=_ids(2), attention_mask=padding)
    check_masks(found, CAUSAL & real, SLIDING & real)
    positions = torch.cat([torch.arange(170), torch.arange(LENGTH - 170)])[None]
    same = (QUERY < 170) == (KEY < 170)
    found = huggingface.masks(decoder(), input_ids=_ids(), position_ids=positions, use_cache=False)
    check_masks(found, CAUSAL & same, SLIDING & same)


def test_masks_of_a_step_with_a_cache() -> None:
    own, other = (transformers.DynamicCache(config=decoder().config) for _ in range(2))
    first, last = _ids().split([290, LENGTH - 290], 1)
    huggingface.masks(decoder(), first, past_key_values=own, use_cache=True)
    found = huggingface.masks(decoder(), input_ids=last, past_key_values=own)
    with torch.no_grad():
        for part in (first, last):
            decoder("eager")(part, past_key_values=other, use_cache=True)
    for layer, want in zip(own.layers, other.layers, strict=True):  # later layers' keys need earlier layers' outputs
        assert torch.allclose(layer.keys, want.keys, atol=TOLERANCE)
    kept = 290 - (WINDOW - 1)  # a cache of windows drops what no later query sees
    check_masks(found, CAUSAL[:, :, 290:], SLIDING[:, :, 290:, kept:])


def test_masks_that_users_plan() -> None:
    every_third = create_block_mask(lambda b, h, q, kv: kv % 3 == 0, None, None, LENGTH, LENGTH, device="cpu")
    given = {"full_attention": every_third, "sliding_attention": every_third}
    found = huggingface.masks(decoder(), input_ids=_ids(), attention_mask=given)
    ((layer, names),) = found.distinct
    assert len(names) == 4
    assert torch.equal(flexmasks.dense_mask(layer.mask, LENGTH)[0, 0], (KEY % 3 == 0).expand(LENGTH, -1))


def test_pictures_of_the_masks() -> None:
    found = huggingface.masks(decoder(), _ids())
    text, html = repr(found), found._repr_html_()
    assert text.startswith("4 calls of attention, 2 different masks; on average")
    for shown in (text, html):
        assert "model.layers.{0,2-3}.self_attn" in shown
        assert "model.layers.1.self_attn" in shown
        for visible in (CAUSAL, SLIDING):
            assert f"{_skipped(visible):.1%} skipped in blocks of 128 x 128" in shown
    assert html.count("<svg") == 2
    assert len(html) < 100_000
    for layer, picture in ((found[FULL[0]], "causal"), (found[WINDOWS[0]], "sliding_window")):
        params = {"window": WINDOW - 1} if picture == "sliding_window" else {}
        drawn = flexmasks.draw(picture, LENGTH, **params)
        assert layer.draw().svg() == drawn.svg()
        assert drawn.svg() in layer._repr_html_()
        assert drawn.svg() in html
        assert repr(layer).endswith(drawn.text())
    formatters = pytest.importorskip("IPython.core.formatters")
    for shown in (found, found[FULL[0]]):
        data, _ = formatters.DisplayFormatter().format(shown)
        assert [kind for kind, value in data.items() if "<svg" in value] == ["text/html"]


def test_masks_leave_the_model_as_it_is() -> None:
    model = decoder()
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = huggingface.masks(compiled, _ids())
    assert [names for _, names in found.distinct] == [[f"_orig_mod.{n}" for n in x] for x in (WINDOWS, FULL)]
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="You must specify"):
        huggingface.masks(model)
    assert [module.training for module in model.modules()] == modes
    assert not adapter._WATCHING
    model.eval()


def test_masks_of_images() -> None:
    (tower,) = towers("Qwen2.5-VL", "flexmasks")
    split = huggingface.masks(tower, patches(), GRID)
    assert {"blocks.1.attn", "blocks.1.attn (call 4)"} <= set(split)  # a call for each frame
    assert all(mask.mask.name == "full" for mask in split.values())
    huggingface.patch_vision(tower)
    found = huggingface.masks(tower, patches(), GRID)
    assert [names for _, names in found.distinct] == [["blocks.0.attn", "blocks.2.attn"], ["blocks.1.attn"]]
    frame = torch.repeat_interleave(torch.arange(FRAMES), torch.repeat_interleave(GRID[:, 1] * GRID[:, 2], GRID[:, 0]))
    dense = flexmasks.dense_mask(found["blocks.1.attn"].mask, PATCHES)[0, 0]
    assert torch.equal(dense, frame[:, None] == frame)


def test_models_without_masks() -> None:
    with pytest.raises(ValueError, match=r"no layer of Gemma3ForCausalLM attends by flexmasks. Call `huggingface.reg"):
        huggingface.masks(decoder("eager"), _ids())
    with pytest.raises(TypeError, match=r"masks: `model` must be a torch.nn.Module, got str"):
        huggingface.masks("google/gemma-3-1b")  # type: ignore[arg-type]
