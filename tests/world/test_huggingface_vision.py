"""Vision towers of Hugging Face's models that attend to all images in one call."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
