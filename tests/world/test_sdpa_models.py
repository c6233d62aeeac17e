"""Models of timm, torchvision and open_clip inside `flexmasks.sdpa_replaced`: tiny ones with random weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexmasks
from flexmasks import dot_product
from flexmasks.backends import short, waiting

pytestmark = [pytest.mark.campaign, pytest.mark.usefixtures("one_thread")]
WIDTH, HEADS = 32, 2


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size)


def timm_vit() -> tuple[nn.Module, list[Any]]:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "depth": 2, "embed_dim": WIDTH, "num_heads": HEADS, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **sizes), [images(32)]


def timm_vit_with_mask() -> tuple[nn.Module, list[Any]]:
    model, (x,) = timm_vit()
    visible = torch.rand(5, 5) < 0.6
    return _Calling(model, lambda m, x: m.forward_features(x, attn_mask=visible)), [x]


def timm_naflex() -> tuple[nn.Module, list[Any]]:
    """Padded patches."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("naflexvit_base_patch16_gap", embed_dim=WIDTH, num_heads=HEADS, depth=2, num_classes=5)
    valid = torch.arange(12) < torch.tensor([12, 7])[:, None]
    coordinates = torch.stack([torch.arange(12) // 4, torch.arange(12) % 4], -1).expand(2, -1, -1)
    x = torch.randn(2, 12, 3 * 16 * 16)
    return _Calling(model, lambda m, x: m(x, patch_coord=coordinates, patch_valid=valid)), [x]


def timm_swin() -> tuple[nn.Module, list[Any]]:
    """A bias that learns, with shifted windows."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": WIDTH, "num_classes": 5}
    timm.layers.set_fused_attn(True, experimental=True)
    try:
        return timm.create_model("swin_tiny_patch4_window7_224", **sizes), [images(56)]
    finally:
        timm.layers.set_fused_attn(True)


def torchvision_vit() -> tuple[nn.Module, list[Any]]:
    models = pytest.importorskip("torchvision").models
    return models.VisionTransformer(32, 8, 2, HEADS, WIDTH, 64, num_classes=5), [images(32)]


def open_clip_text_and_images() -> tuple[nn.Module, list[Any]]:
    """Causal text."""
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "layers": 2, "width": WIDTH, "head_width": 16, "patch_size": 8}
    text = {"context_length": 12, "vocab_size": 50, "width": WIDTH, "heads": HEADS, "layers": 2}
    model = open_clip.CLIP(embed_dim=WIDTH, vision_cfg=vision, text_cfg=text)
    return _Calling(model, lambda m, x, ids: torch.cat(m(x, ids)[:2])), [images(32), torch.randint(1, 50, (2, 12))]


class _Calling(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *given: Any) -> Tensor:
        return self.call(self.model, *given)


# With what their masks become.
MODELS = {
    timm_vit: "None",
    timm_vit_with_mask: "dense",
    timm_naflex: "dense",
    timm_swin: "None",
    torchvision_vit: "None",
    open_clip_text_and_images: "causal",
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_outputs_and_gradients(
    make: Callable[[], tuple[nn.Module, list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dot_product, "_FEWEST_PAIRS", {"cpu": 0})
    monkeypatch.setattr(dot_product, "_FEWEST_PAIRS_TO_COMPILE", 0)
    monkeypatch.setattr(dot_product, "_MOST_BLOCKS", {"cpu": 1.0})
    monkeypatch.setattr(short, "refuses_on_cpu", inspect.unwrap(short.refuses_on_cpu))
    monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 1 << 60)
    became, calls = set[str](), []
    look = dot_product.read_pairs

    def looking(*given: Any, **options: Any) -> Any:
        found = look(*given, **options)
        if found is not None:
            became.add("None" if found.mask is None else found.mask.name)
        return found

    ours = flexmasks.sdpa
    monkeypatch.setattr(dot_product, "read_pairs", looking)
    monkeypatch.setattr(dot_product, "sdpa", lambda *given, **options: calls.append(1) or ours(*given, **options))
    model, given = make()
    with torch.no_grad():
        want = model.eval()(*given)
        with flexmasks.sdpa_replaced():
            out = model(*given)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    assert calls
    assert MODELS[make] in became or (MODELS[make] == "None" and not became)
    gradients = []
    for inside in (nullcontext(), flexmasks.sdpa_replaced()):
        own = copy.deepcopy(model)
        with inside:
            own(*given).square().sum().backward()
        gradients.append([p.grad for p in own.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
