"""Which masks the layers of models have, by `flexmasks.watch`: of transformers' models, and of any by a probe."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from test_huggingface_vision import GRID, PATCHES, TOLERANCE, patches, towers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import flexmasks
from flexmasks import watch
from flexmasks.integrations import huggingface
from flexmasks.integrations.huggingface import attention as adapter
from flexmasks.integrations.layers import LayerMask, layer_of_pairs

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code
OWN_AND_OTHERS = ["flexmasks", "eager", "sdpa", "flex_attention"]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    huggingface.register()


LENGTH, WINDOW = 300, 70
TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
WINDOWS = ["model.layers.0.self_attn", "model.layers.2.self_attn", "model.layers.3.self_attn"]
FULL = ["model.layers.1.self_attn"]
QUERY, KEY = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)


@functools.cache
def decoder(implementation: str = "flexmasks", name: str = "Gemma3", **given: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config"))
    own = copy.deepcopy(TEXT) if name == "Gemma3" else {n: v for n, v in TEXT.items() if n != "layer_types"} | given
    return getattr(transformers, f"{name}ForCausalLM")._from_config(config(**own), attn_implementation=implementation)


def _ids(batch: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(0))


def pairs(layer: LayerMask) -> Tensor:
    """Return the mask of a call as booleans, [batch or 1, heads or 1, queries, keys]."""
    return flexmasks.dense_mask(layer.mask, layer.q_len, layer.kv_len, **layer.extents)


def check_masks(found: Any, causal: Tensor, windows: Tensor) -> None:
    """Compare the masks of the decoder with booleans, [batch or 1, 1, queries, keys]."""
    assert list(found) == sorted([*WINDOWS, *FULL])
    assert [names for _, names in found.distinct] == [WINDOWS, FULL]
    assert not found.unseen
    for names, visible in ((WINDOWS, windows), (FULL, causal)):
        for name in names:
            layer = found[name]
            assert (layer.q_len, layer.kv_len) == visible.shape[-2:]
            dense = pairs(layer)
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


# --- models of transformers ---


@pytest.mark.parametrize("implementation", OWN_AND_OTHERS)
def test_masks_of_a_decoder(implementation: str) -> None:
    model = decoder(implementation)
    check_masks(watch(model, _ids()), CAUSAL, SLIDING)
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, :100] = 0
    real = padding.bool()[:, None, None]
    expected = {
        "sliding_attention": flexmasks.get_mask("sliding_window", window=WINDOW - 1),
        "full_attention": flexmasks.get_mask("causal"),
    }
    found = watch(model, input_ids=_ids(2), attention_mask=padding, mask=expected)
    check_masks(found, CAUSAL & real, SLIDING & real)
    assert list(found.differing) == list(found)  # the padding was not expected
    with_padding = flexmasks.get_mask("key_padding", attention_mask=padding)
    expected = {name: mask & with_padding for name, mask in expected.items()}
    assert not watch(model, input_ids=_ids(2), attention_mask=padding, mask=expected).differing
    positions = torch.cat([torch.arange(170), torch.arange(LENGTH - 170)])[None]
    same = (QUERY < 170) == (KEY < 170)
    found = watch(model, input_ids=_ids(), position_ids=positions, use_cache=False)
    check_masks(found, CAUSAL & same, SLIDING & same)


@pytest.mark.parametrize("implementation", OWN_AND_OTHERS[:3])  # torch's flex has no gradients for this call on a CPU
def test_masks_of_a_step_with_a_cache(implementation: str) -> None:
    own, other = (transformers.DynamicCache(config=decoder().config) for _ in range(2))
    first, last = _ids().split([290, LENGTH - 290], 1)
    watch(decoder(implementation), first, past_key_values=own, use_cache=True)
    expected = {"full_attention": "causal", "sliding_attention": flexmasks.get_mask("sliding_window", window=69)}
    found = watch(decoder(implementation), input_ids=last, past_key_values=own, mask=expected)
    assert not found.differing
    with torch.no_grad():
        for part in (first, last):
            decoder("eager")(part, past_key_values=other, use_cache=True)
    for layer, want in zip(own.layers, other.layers, strict=True):  # later layers' keys need earlier layers' outputs
        assert torch.allclose(layer.keys, want.keys, atol=TOLERANCE)
    kept = 290 - (WINDOW - 1)  # a cache of windows drops what no later query sees
    check_masks(found, CAUSAL[:, :, 290:], SLIDING[:, :, 290:, kept:])


@pytest.mark.parametrize("implementation", OWN_AND_OTHERS)
def test_a_static_cache(implementation: str) -> None:
    model = decoder(implementation, "Llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    for stop in (10, 11):
        found = watch(model, _ids(2, 11)[:, :stop][:, -10 + 9 * (stop > 10) :], past_key_values=cache, mask="causal")
        assert not found.differing
        assert {(layer.q_len, layer.kv_len) for layer in found.values()} == {(10 if stop == 10 else 1, 40)}
        assert all(torch.equal(pairs(x)[0, 0], CAUSAL[0, 0, stop - x.q_len : stop, :40]) for x in found.values())


@pytest.mark.parametrize("implementation", ["flexmasks", "flex_attention"])
def test_masks_that_users_plan(implementation: str) -> None:
    every_third = create_block_mask(lambda b, h, q, kv: kv % 3 == 0, None, None, LENGTH, LENGTH, device="cpu")
    given = {"full_attention": every_third, "sliding_attention": every_third}
    found = watch(decoder(implementation), input_ids=_ids(), attention_mask=given, mask=every_third)
    ((layer, names),) = found.distinct
    assert len(names) == 4
    assert torch.equal(pairs(layer)[0, 0], (KEY % 3 == 0).expand(LENGTH, -1))
    assert not found.differing


@contextlib.contextmanager
def forgetting(layer: Any) -> Iterator[None]:
    """Let a layer drop its mask."""
    forward = layer.forward
    layer.forward = lambda *args, **given: forward(*args, **given | {"attention_mask": None})
    try:
        yield
    finally:
        del layer.forward


@pytest.mark.parametrize("implementation", OWN_AND_OTHERS)
def test_a_layer_that_drops_its_mask_is_named(implementation: str) -> None:
    model = decoder(implementation, "Llama")
    padding = torch.ones(2, 24, dtype=torch.int64)
    padding[1, :7] = 0
    expected = flexmasks.get_mask("causal") & flexmasks.get_mask("key_padding", attention_mask=padding)
    with forgetting(model.model.layers[1].self_attn):
        found = watch(model, _ids(2, 24), attention_mask=padding, mask=expected)
    (name,) = found.differing
    assert name == "model.layers.1.self_attn"
    difference, own = found.differing[name], found[name].mask
    assert f"{name} shows" in repr(found)
    # Without a mask, two functions take the layer for a causal one, and two for one that sees all.
    causal = implementation in ("flexmasks", "sdpa")
    assert own.name == ("causal" if causal else "full")
    assert difference.first == ((1, 0, 0, 0) if causal else (0, 0, 0, 1))
    shown = torch.ones(2, 24, 24, dtype=torch.bool).tril() if causal else torch.ones(2, 24, 24, dtype=torch.bool)
    wanted = torch.ones(24, 24, dtype=torch.bool).tril() & padding.bool()[:, None]
    assert (difference.only_a, difference.only_b) == (0, 4 * int((shown & ~wanted).sum()))
    if implementation != "flex_attention":  # which has no backward pass on a CPU
        found = watch(model, _ids(2, 24), attention_mask=padding, mask=expected, probe=True, rows=[3, 12])
        assert not found.differing  # what padding sees is not compared


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_a_function_that_adds_booleans_to_scores(implementation: str) -> None:
    visible = torch.ones(24, 24, dtype=torch.bool).tril().expand(1, 1, -1, -1)
    model = decoder(implementation, "Llama")
    lowest = torch.finfo(torch.float32).min
    for mask, name in ((visible, "full"), (torch.zeros(visible.shape).masked_fill(~visible, lowest), "causal")):
        found = watch(model, _ids(1, 24), attention_mask=mask)
        assert {layer.mask.name for layer in found.values()} == {name}


def test_a_function_of_another_origin_that_leaves_its_mask_out() -> None:
    def forgetful(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **given: Any) -> Any:
        shown = attention_mask if cast(Any, module).layer_idx % 2 else None
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, shown).transpose(1, 2), None

    interface, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    interface.register("forgetful", forgetful)
    masks.register("forgetful", masks()["eager"])
    found = watch(decoder("forgetful", "Llama"), _ids(2, 24), mask="causal")
    assert list(found.differing) == ["model.layers.0.self_attn", "model.layers.2.self_attn"]


def test_arguments_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that calls FlashAttention runs on GPUs only, so here it gives zeros, which tell nothing."""
    module = transformers.integrations.flash_attention
    monkeypatch.setattr(module, "_flash_attention_forward", lambda q, k, v, *args, **given: torch.zeros_like(q))
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, 200:] = 0
    real = padding.bool()[:, None, None]
    monkeypatch.setattr(transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **given: True)
    model = decoder("sdpa")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    check_masks(watch(model, _ids()), CAUSAL, SLIDING)
    check_masks(watch(model, _ids(2), attention_mask=padding), CAUSAL & real, SLIDING & real)
    positions = torch.cat([torch.arange(170), torch.arange(LENGTH - 170)])[None]
    same = (QUERY < 170) == (KEY < 170)
    check_masks(watch(model, _ids(), position_ids=positions, use_cache=False), CAUSAL & same, SLIDING & same)
    starts = torch.tensor([0, 170, LENGTH], dtype=torch.int32)
    starts_of = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 170, "max_length_k": 170}
    check_masks(watch(model, _ids(), use_cache=False, **starts_of), CAUSAL & same, SLIDING & same)


@pytest.mark.parametrize("implementation", OWN_AND_OTHERS)
def test_attention_to_another_sequence(implementation: str) -> None:
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    config = transformers.BartConfig(vocab_size=99, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, **sizes)
    model = transformers.BartModel._from_config(config, attn_implementation=implementation)
    padding = torch.ones(2, 20, dtype=torch.int64)
    padding[1, 13:] = 0
    real = flexmasks.get_mask("key_padding", attention_mask=padding)
    expected = {"encoder.*": real, "*.encoder_attn": real, "decoder.*.self_attn": "causal"}
    given = {"input_ids": _ids(2, 20), "attention_mask": padding, "decoder_input_ids": _ids(2, 9)}
    found = watch(model, **given, mask=expected)
    assert len(found) == 6
    assert not found.differing
    assert not found.unseen
    assert list(watch(model, **given, mask={"*.encoder_attn": "full"}).differing) == [
        "decoder.layers.0.encoder_attn", "decoder.layers.1.encoder_attn",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"no call fits encodr in `mask`. Seen were encoder.layers.\{0-1\}.self_attn"):
        watch(model, **given, mask={"encodr": "full"})


@pytest.mark.parametrize("implementation", OWN_AND_OTHERS)
def test_an_image(implementation: str) -> None:
    config = transformers.SiglipVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    model = transformers.SiglipVisionModel._from_config(config, attn_implementation=implementation)
    found = watch(model, torch.randn(2, 3, 32, 32))
    assert {(layer.mask.name, layer.q_len, layer.batch) for layer in found.values()} == {("full", 16, 2)}
    assert len([name for name in found if "layers" in name]) == 2


@pytest.mark.parametrize("implementation", ["flexmasks", "eager"])
@pytest.mark.parametrize("probe", [False, True])
def test_sinks_and_windows(implementation: str, probe: bool) -> None:
    given = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = decoder(implementation, "GptOss", **given)
    expected = {"full_attention": "causal", "sliding_attention": flexmasks.get_mask("sliding_window", window=WINDOW)}
    found = watch(model, _ids(1, 100), mask=expected, probe=probe, rows=[0, 50, 99] if probe else None)
    assert list(found.differing) == ["model.layers.0.self_attn", "model.layers.2.self_attn"]
    assert {x.first for x in found.differing.values()} == {(0, 0, 99 if probe else WINDOW, 29 if probe else 0)}


def test_pictures_of_the_masks() -> None:
    found = watch(decoder(), _ids())
    text, html = repr(found), found._repr_html_()
    assert text.startswith("4 calls of attention were seen, with 2 different masks; on average")
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
    for value in (found, found[FULL[0]]):
        data, _ = formatters.DisplayFormatter().format(value)
        assert [kind for kind, value in data.items() if "<svg" in value] == ["text/html"]


@pytest.mark.parametrize("implementation", ["flexmasks", "eager", "sdpa"])
def test_attention_weights(implementation: str) -> None:
    """Those that a model returns are shown; torch's own kernel returns none."""
    model = copy.deepcopy(decoder(implementation))  # transformers leaves hooks in a model that returns weights
    found = watch(model, _ids(), output_attentions=True)
    if implementation == "sdpa":
        assert not found.weights
        return
    want = model(_ids(), output_attentions=True).attentions
    assert list(found.weights) == list(found)
    for weights, wanted in zip(found.weights.values(), want, strict=True):
        assert torch.allclose(weights, wanted, atol=1e-5)
    text, html = repr(found), found._repr_html_()
    for name, weights in found.weights.items():
        picture = flexmasks.draw(weights[0].mean(0))
        assert f"{name}\n{picture.text(40)}" in text
        assert picture.svg() in html
    assert not watch(model, _ids()).weights


@pytest.mark.parametrize("probe", [False, True])
def test_the_model_and_its_library_stay_as_they_are(probe: bool) -> None:
    model = decoder("sdpa")
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    before = dict(vars(transformers.AttentionInterface))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    rows = [0, LENGTH - 1] if probe else None
    found = watch(compiled, _ids(), probe=probe, rows=rows)
    own = [[f"_orig_mod.{n}" for n in x] for x in (WINDOWS, FULL)]
    assert {*own[0], *own[1]} <= set(found)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="You must specify"):
        watch(model, probe=probe, use_cache=False)
    with pytest.raises(AttributeError, match="wrong"), watch(model, probe=probe, rows=rows):
        model(_ids()).wrong()
    assert [module.training for module in model.modules()] == modes
    assert not adapter._WATCHING
    assert dict(vars(transformers.AttentionInterface)) == before
    assert transformers.AttentionInterface.__getitem__.__qualname__ == "GeneralInterface.__getitem__"
    assert "__getitem__" not in before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.eval()


def test_two_watched_models_and_later_calls() -> None:
    one, other = decoder("sdpa", "Llama"), decoder("eager")
    with watch(one) as outer, watch(other) as inner:
        for model in (one, other, one):
            model(_ids(1, 20))
    one(_ids(1, 20))
    assert (len(outer), len(inner)) == (8, 4)
    assert [n for n in outer if "(call 2)" in n] == [f"model.layers.{n}.self_attn (call 2)" for n in range(4)]


def test_masks_of_images() -> None:
    (tower,) = towers("Qwen2.5-VL", "flexmasks")
    split = watch(tower, patches(), GRID)
    assert {"blocks.1.attn", "blocks.1.attn (call 4)"} <= set(split)  # a call for each frame
    assert all(mask.mask.name == "full" for mask in split.values())
    huggingface.patch_vision(tower)
    found = watch(tower, patches(), GRID)
    assert [names for _, names in found.distinct] == [["blocks.0.attn", "blocks.2.attn"], ["blocks.1.attn"]]
    frame = torch.repeat_interleave(torch.arange(4), torch.repeat_interleave(GRID[:, 1] * GRID[:, 2], GRID[:, 0]))
    dense = flexmasks.dense_mask(found["blocks.1.attn"].mask, PATCHES)[0, 0]
    assert torch.equal(dense, frame[:, None] == frame)


# --- any model, by a probe ---


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        weights = (q @ k.mT / 8).masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.sum, self.mlp, self.norm = Attention(), Sum(), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = self.sum(self.attn(x, visible), x)  # of two inputs, of which one was made of the other
        x = x + self.mlp(x).relu()
        out: Tensor = self.norm(x)  # the sum of a row is always the same
        return out


class Model(nn.Module):
    """A model of packed documents. leaks: the layer that sees all, or "before" the first layer or "between" two."""

    def __init__(self, leaks: Any = None) -> None:
        super().__init__()
        self.embed, self.blocks, self.leaks = nn.Embedding(9, 16), nn.ModuleList(Block() for _ in range(3)), leaks

    def forward(self, ids: Tensor, visible: Tensor) -> Tensor:
        x = self.embed(ids)
        x *= 4  # in place
        x = x + x.roll(1, 1) if self.leaks == "before" else x
        for n, block in enumerate(self.blocks):
            x = block(x, torch.ones_like(visible) if n == self.leaks else visible)
            x = x + x.roll(1, 1) if (n, self.leaks) == (0, "between") else x
        return cast(Tensor, x)


DOCUMENTS = torch.tensor([[0] * 20 + [1] * 33 + [2] * 27, [0] * 51 + [1] * 29])
PACKED = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=DOCUMENTS)
VISIBLE = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]).tril()
LAYERS = [f"blocks.{n}.attn" for n in range(3)]
TOKENS = _ids(2, 80) % 9


def model_of(leaks: Any = None) -> Model:
    torch.manual_seed(0)
    return Model(leaks).eval()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_probe_finds_the_leak_across_documents(is_frozen: bool) -> None:
    found = watch(model_of().requires_grad_(not is_frozen), TOKENS, VISIBLE, mask=PACKED, probe=True)
    assert list(found) == [*LAYERS, "Model from end to end"]
    assert not found.differing
    found = watch(model_of(1).requires_grad_(not is_frozen), TOKENS, VISIBLE, mask=PACKED, probe=True)
    assert list(found.differing) == ["blocks.1.attn", "Model from end to end"]
    assert found.differing["blocks.1.attn"].first == (0, 0, 0, 1)
    assert repr(found).startswith("4 modules that mix tokens were seen, with 2 different masks; on average")
    assert found.differing["blocks.1.attn"].only_a == 0
    assert not found.unseen


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_probe_finds_what_mixes_outside_of_layers(is_frozen: bool) -> None:
    tokens, visible = TOKENS[:, 15:45], VISIBLE[:, 15:45, 15:45]
    for leaks in ("before", "between", None):
        model = model_of(leaks).requires_grad_(not is_frozen)
        found = watch(model, tokens, visible, mask=visible[:, None], probe=True)
        assert list(found.differing) == (["Model from end to end"] if leaks else [])


def test_a_probe_knows_that_windows_reach_farther_one_after_the_other() -> None:
    window = flexmasks.get_mask("sliding_window", window=8)
    found = watch(
        model_of(), TOKENS, VISIBLE.new_ones(80, 80).tril().triu(-8).expand(2, -1, -1), mask=window, probe=True
    )
    assert not found.differing  # windows one after the other reach farther than one
    assert found["Model from end to end"].mask != found["blocks.0.attn"].mask


@pytest.mark.parametrize("length", [30, 80])
def test_a_probe_sees_any_mask(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    visible = torch.rand(2, length, length, generator=generator) < 0.3
    visible |= torch.eye(length, dtype=torch.bool)
    found = watch(model_of(), TOKENS[:, :length], visible, mask=visible[:, None], probe=True)
    assert not found.differing
    for name in LAYERS:
        rows = torch.tensor(found[name].rows)
        assert torch.equal(pairs(found[name])[:, 0, rows], visible[:, rows])
        assert len(rows) == min(length, 64)
    wrong = visible.clone()
    wrong[1, length - 1, 3] ^= True
    found = watch(model_of(), TOKENS[:, :length], visible, mask={"*attn": wrong[:, None]}, probe=True)
    assert {x.first for x in found.differing.values()} == {(1, 0, length - 1, 3)}
    assert list(found.differing) == LAYERS
    rows = [0, length - 2, 1000]  # the last one is of no layer
    assert not watch(model_of(), TOKENS[:, :length], visible, mask=wrong[:, None], probe=True, rows=rows).differing


def test_a_probe_inside_of_training() -> None:
    model, other = model_of(1), model_of(1)
    with watch(model, mask=PACKED, probe=True) as found:
        model(TOKENS, VISIBLE).square().sum().backward()
    other(TOKENS, VISIBLE).square().sum().backward()
    assert list(found.differing) == ["blocks.1.attn", "Model from end to end"]
    for mine, want in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(cast(Tensor, mine.grad), cast(Tensor, want.grad))


class AttentionWithConvolution(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        return super().forward(self.near(x.mT).mT, visible)


def test_a_probe_sees_layers_and_what_mixes_inside_of_them() -> None:
    model = model_of()
    model.blocks[1].attn = AttentionWithConvolution()
    causal = torch.ones(2, 30, 30, dtype=torch.bool).tril()
    found = watch(model, TOKENS[:, :30], causal, mask={"*attn": "causal"}, probe=True)
    assert list(found)[:4] == [LAYERS[0], "blocks.1.attn.near", *LAYERS[1:]]
    assert repr(found["blocks.1.attn.near"].mask) == "local(left=1, right=1)"
    assert torch.equal(pairs(found[LAYERS[1]])[0, 0], torch.ones(30, 30, dtype=torch.bool).tril(1))
    assert list(found.differing) == [LAYERS[1]]


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_probe_of_torch_layers(batch_first: bool) -> None:
    layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=batch_first)
    model = nn.TransformerDecoder(layer, 2)
    target, memory = torch.randn(2, 7, 16), torch.randn(2, 11, 16)
    if not batch_first:
        target, memory = target.transpose(0, 1), memory.transpose(0, 1)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = {"*self_attn": "causal", "*multihead_attn": "full"}
    with watch(model.eval(), mask=expected, probe=True) as found:
        model(target, memory, tgt_mask=hidden)
    assert list(found)[:4] == [f"layers.{n}.{kind}" for n in (0, 1) for kind in ("self_attn", "multihead_attn")]
    assert not found.differing
    assert [(x.q_len, x.kv_len, x.batch) for x in found.values()][:2] == [(7, 7, 2), (7, 11, 2)]
    with watch(model, mask=expected, probe=True) as found:
        model(target, memory)
    assert list(found.differing) == ["layers.0.self_attn", "layers.1.self_attn"]
    recurrent = watch(nn.GRU(4, 4, batch_first=True), torch.randn(2, 9, 4), mask="causal", probe=True)
    assert list(recurrent) == ["GRU"]
    assert not recurrent.differing


def test_layers_that_are_not_seen_are_said() -> None:
    found = watch(model_of(), TOKENS, VISIBLE)
    assert found.unseen == LAYERS
    assert "not seen: blocks.{0-2}.attn; `probe=True` sees what they do" in repr(found)
    model = model_of()
    forward = model.blocks[1].forward
    model.blocks[1].forward = torch.no_grad()(forward)  # type: ignore[method-assign]
    found = watch(model, TOKENS, VISIBLE, probe=True)
    assert found.unseen == [LAYERS[1]]
    with pytest.raises(ValueError, match=r"no call fits \* in `mask`. Seen were none: pass probe=True"):
        watch(model_of(), TOKENS, VISIBLE, mask=PACKED)
    with pytest.raises(TypeError, match=r"watch: `model` must be a torch.nn.Module, got str"):
        watch("google/gemma-3-1b")  # type: ignore[arg-type]


# --- masks by their pairs ---


@pytest.mark.parametrize("seed", range(4))
def test_pairs_have_the_mask_that_shows_them(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length, earlier = 12, int(torch.randint(0, 3, (1,), generator=generator)) * 3
    q, kv = torch.arange(earlier, earlier + length)[:, None], torch.arange(earlier + length)
    padding = torch.rand(2, earlier + length, generator=generator) < 0.7
    ids = torch.randint(0, 2, (2, length), generator=generator).cumsum(1)
    windows = {
        "full": q >= -kv, "causal": q >= kv, "sliding_window": (q >= kv) & (q - kv <= 3), "local": (q - kv).abs() <= 2
    }  # fmt: skip
    for name, window in windows.items():
        for others in ("", "key_padding", "document", "document & key_padding"):
            visible = window.expand(2, 1, -1, -1)
            if "document" in others:
                if earlier:
                    continue
                visible = visible & (ids[:, None, :, None] == ids[:, None, None])
            visible = visible & padding[:, None, None] if "padding" in others else visible
            for heads in (1, 3):
                layer = layer_of_pairs(visible.expand(2, heads, -1, -1))
                assert torch.equal(pairs(layer).expand(2, heads, -1, -1), visible.expand(2, heads, -1, -1))
                assert layer.heads == heads
                assert others or layer.mask.name == name
                assert layer.mask.name != "dense"
    for visible in (torch.rand(2, 3, 8, 9, generator=generator) < 0.5, torch.zeros(1, 1, 5, 5, dtype=torch.bool)):
        layer = layer_of_pairs(visible)
        assert torch.equal(pairs(layer).expand_as(visible), visible)
