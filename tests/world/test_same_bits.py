"""Inside `flexmasks.invariant` models of transformers give a text the same bits in any batch, row and cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers import one_in
from torch import Tensor, nn
from torch._dynamo.utils import counters

import flexmasks
from flexmasks.integrations import huggingface
from flexmasks.integrations.huggingface.late import LateMask, make_mask

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils")
same_bits = pytest.importorskip("same_bits")  # the recipe
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code

WORDS, WINDOW, NEW = 99, 12, 20
TEXT = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", TEXT),
    "Gemma3": ("Gemma3ForCausalLM", TEXT | WINDOWS | {"query_pre_attn_scalar": 8}),
    "GptOss": ("GptOssForCausalLM", TEXT | WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2": ("Qwen2ForCausalLM", {n: v for n, v in TEXT.items() if n != "head_dim"} | {"hidden_size": 256}),
}
LENGTHS = (30, 1, 21, 120)  # of prompts; the answer to the last one goes from one tile of keys to the next


@pytest.fixture(autouse=True)
def _inside() -> Iterator[None]:
    assert huggingface.register() == "flexmasks"
    with flexmasks.invariant():
        yield


@functools.cache
def model(name: str, device: str) -> nn.Module:
    class_name, given = MODELS[name]
    cls = getattr(transformers, class_name)
    config = cls.config_class(**given)
    # The products of an expert have as many rows as there are tokens that chose it, but for this way.
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    made = cls._from_config(config, attn_implementation="flexmasks", dtype=dtype(device))
    torch.manual_seed(1)
    for parameter in made.parameters():  # sinks and biases are not 0
        parameter.data += 0.05 * torch.randn_like(parameter)
    return same_bits.prepare(made.to(device).eval())  # type: ignore[no-any-return]


def dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def _texts(device: str, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, WORDS, (n,), generator=generator).to(device) for n in lengths]


def _packed(name: str, texts: Sequence[Tensor]) -> dict[str, Any]:
    """Return the inputs that transformers' collator makes of texts."""
    # GPT-OSS does not look at positions, and is told where texts start as FlashAttention is.
    options = {"return_flash_attn_kwargs": True} if name == "GptOss" else {}
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    inputs = collator([{"input_ids": text.tolist()} for text in texts])
    del inputs["labels"]
    return {n: x.to(texts[0].device) if isinstance(x, Tensor) else x for n, x in inputs.items()}


def _logits(name: str, texts: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of texts in one row."""
    found = model(name, texts[0].device.type)(**_packed(name, texts), use_cache=False).logits[0]
    return list(found.float().split([len(t) for t in texts]))


def _padded(texts: Sequence[Tensor], side: str) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_side=side)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def _devices(count: int, turns: int) -> list[Any]:
    """Return ("cpu", n) of which one in `turns` has its turn today, and ("cuda", n)."""
    on_gpu = [pytest.param("cuda", n, marks=pytest.mark.gpu) for n in range(count)]
    return [*one_in(turns, [("cpu", n) for n in range(count)]), *on_gpu]


GENERATED = [(name, cache) for name in MODELS for cache in ("dynamic", "static")]


@pytest.mark.parametrize(("device", "which"), _devices(len(GENERATED), 2))
def test_generate(device: str, which: int) -> None:
    """The logits of a rollout are those of one pass over its texts in a row, and over each alone."""
    name, cache = GENERATED[which]
    prompts = _texts(device)
    inputs = _padded(prompts, "left")
    torch.manual_seed(4)
    out = model(name, device).generate(
        **inputs, max_new_tokens=NEW, do_sample=True, cache_implementation=cache, disable_compile=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    answers = out.sequences[:, inputs["input_ids"].shape[1] :]
    texts = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    with torch.no_grad():
        want = _logits(name, texts)
        for n, text in enumerate(texts):
            assert torch.equal(want[n][-NEW - 1 : -1], torch.stack(out.logits, 1)[n]), f"row {n}"
            assert torch.equal(_logits(name, [text])[0], want[n]), f"text {n} alone"


@pytest.mark.parametrize(("device", "which"), _devices(len(MODELS), 2))
def test_training(device: str, which: int) -> None:
    """Losses of packed texts, and the gradients of all weights, are those of one text after the other."""
    name = list(MODELS)[which]
    own, texts = model(name, device), _texts(device, (75, 1, 40, 130))
    results = []
    for rows in (texts,), [(text,) for text in texts]:
        own.zero_grad()
        losses = []
        for row in rows:
            logits, words = torch.cat(_logits(name, row)), torch.cat([text.roll(-1) for text in row])
            losses.append(-same_bits.log_probs(logits, words, [len(text) for text in row]))
            (losses[-1] / 64).sum().backward()
        gradients = {n: p.grad for n, p in own.named_parameters()}
        assert all(g is not None and g.any() for g in gradients.values())
        results.append((torch.cat(losses).detach(), gradients))
    (losses, of_packed), (want, gradients) = results
    assert torch.equal(losses, want)
    for n, gradient in gradients.items():
        assert torch.equal(of_packed[n], gradient), n


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_training_on_padded_rows(side: str, device: str) -> None:
    own, texts = model("Llama", device), _texts(device, (28, 3, 37))
    inputs = _padded(texts, side)
    is_real = inputs["attention_mask"].bool()
    positions = torch.where(is_real, is_real.cumsum(1) - 1, 0)
    gradients = []
    for in_rows in (True, False):
        own.zero_grad()
        if in_rows:
            logits = own(**inputs, position_ids=positions, use_cache=False).logits[is_real]
            logits.float().square().sum().backward()
        else:
            for text in texts:
                _logits("Llama", [text])[0].square().sum().backward()
        gradients.append({n: p.grad for n, p in own.named_parameters()})
    for n, gradient in gradients[0].items():
        assert gradient.any()
        assert torch.equal(gradient, gradients[1][n]), n


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", one_in(2, ["Llama", "Gemma3"]))
def test_other_batches(name: str, device: str) -> None:
    """Padding on both sides, a prompt in chunks, and a cache that goes on with several tokens."""
    own, texts = model(name, device), _texts(device, (40, 3, 28))
    with torch.no_grad():
        want = _logits(name, texts)
        for side in ("left", "right"):
            inputs = _padded(texts, side)
            positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
            got = own(**inputs, position_ids=positions, use_cache=False).logits.float()
            for row, is_real, logits in zip(got, inputs["attention_mask"].bool(), want, strict=True):
                assert torch.equal(row[is_real], logits), side
        for make in (transformers.DynamicCache, functools.partial(transformers.StaticCache, max_cache_len=64)):
            cache, parts = make(config=own.config), []
            for first, stop in ((0, 9), (9, 30), (30, 31), (31, 40)):
                given = {"position_ids": torch.arange(first, stop, device=device)[None], "past_key_values": cache}
                parts.append(own(input_ids=texts[0][None, first:stop], **given, use_cache=True).logits[0])
            assert torch.equal(torch.cat(parts).float(), want[0])


REFUSED = {  # function, q_length, kv_length, q_offset, kv_offset, the first row's padding, words
    "holes": ("causal", 9, 9, 0, 0, range(3, 5), "padding between tokens; let the tokens"),
    "chunks of a prompt": ("causal", 4, 9, 5, 0, range(6), "end in its padding on the left; pass the prompt as one"),
    "both ways": ("bidirectional", 9, 9, 0, 0, range(2), r"mask full\(\) read .* on the left; pad on the right"),
    "dropped keys": ("chunked", 1, 9, 20, 12, (), r"chunked\(.*the cache has dropped 12 of them; pass a cache that"),
}


def _mask(kind: str, *sizes: int, padding: Sequence[int]) -> LateMask:
    q_length, kv_length, q_offset, kv_offset = sizes
    is_real = torch.ones(2, kv_offset + kv_length, dtype=torch.bool)
    is_real[0, list(padding)] = False
    function = {
        "causal": masking_utils.causal_mask_function,
        "bidirectional": masking_utils.bidirectional_mask_function,
        "chunked": masking_utils.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)),
    }[kind]
    mask = make_mask(2, q_length, kv_length, q_offset, kv_offset, function, is_real)
    assert isinstance(mask, LateMask)
    return mask


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_refuses_in_words(name: str) -> None:
    kind, *sizes, padding, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        _mask(kind, *sizes, padding=padding)


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_padding_on_the_right_stays(kind: str) -> None:
    """Causal queries see none of it."""
    mask = _mask(kind, 9, 9, 0, 0, padding=range(6, 9))
    assert mask.rows is None
    assert (mask.mask.name == "causal") == (kind == "causal")
    shown = torch.ones(2, 9, 9, dtype=torch.bool)
    shown = shown.tril() if kind == "causal" else shown.index_fill(2, torch.arange(6, 9), False)
    assert torch.equal(mask.to_dense()[0, 0, :6], shown[0, :6])


def test_masks_of_steps_move_whole() -> None:
    """From device to device, as the layers of a model may lie on several."""
    decoding = make_mask(
        2, 1, 9, 8, attention_mask=torch.arange(9) >= torch.tensor([[4], [0]]), allow_is_causal_skip=False
    )
    given = make_mask(2, 9, 9, attention_mask=flexmasks.get_mask("full"))
    for mask in (decoding, given):
        moved = mask.to("cpu")
        assert type(moved) is type(mask) is not LateMask
        assert moved.mask == mask.mask
    assert torch.equal(decoding.to("cpu").rows.padding, torch.tensor([4, 0]))


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_compiled_decoding(name: str) -> None:
    """Attention is no part of the graph, so that no number of a step compiles again."""
    class_name, given = MODELS[name]
    cls = getattr(transformers, class_name)
    own = cls._from_config(cls.config_class(**given), attn_implementation="flexmasks").eval()
    compiled = transformers.CompileConfig(fullgraph=False, mode=None, backend="eager")
    compiled._compile_all_devices = True
    found = []
    for options in ({"compile_config": compiled}, {"disable_compile": True}):
        torch._dynamo.reset()
        counters.clear()
        out = own.generate(
            **_padded(_texts("cpu"), "left"), max_new_tokens=NEW, do_sample=False, cache_implementation="static",
            return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip
        found.append((torch.stack(out.logits), counters["stats"]["unique_graphs"]))
    (logits, graphs), (want, none) = found
    assert torch.equal(logits, want)
    assert none == 0 < graphs < NEW
