"""Trainers that lay texts end to end: transformers' collator, and trl's SFT without padding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexmasks
from flexmasks import Mask, Plan
from flexmasks.extend import Size, band_of, tensors_of
from flexmasks.integrations import huggingface
from flexmasks.integrations.huggingface import attention as hf_attention

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

WORDS = 40
TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", TEXT),
    "Gemma3": ("Gemma3ForCausalLM", TEXT | WINDOWS),
    "GptOss": ("GptOssForCausalLM", TEXT | WINDOWS | {"num_local_experts": 2, "num_experts_per_tok": 1}),
}


def _model(name: str, implementation: str) -> nn.Module:
    class_name, given = MODELS[name]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    model: nn.Module = cls._from_config(cls.config_class(**given), attn_implementation=implementation)
    return model


def _texts(count: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, WORDS, (n,), generator=generator).tolist()} for n in lengths]


class _Seen:
    """The sequences that attention calls of layers were told of, as the places where they start."""

    def __init__(self) -> None:
        self.starts: list[list[int]] = []

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> None:
        mask: Mask | Plan = arguments["mask"]
        mask = mask.mask if isinstance(mask, Plan) else mask
        (batch, heads, length, _), kv_length = query.shape, key.shape[2]
        band = band_of(mask, Size(batch, heads, length, kv_length, query.device))
        assert band is not None
        assert band.sequences is not None  # by which varlen kernels run
        self.starts.append(band.sequences(length).q.tolist())


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    huggingface.register()


def _alone(model: nn.Module, texts: list[dict[str, list[int]]]) -> Tensor:
    """Return the mean loss of all predicted words of texts that are computed one by one."""
    losses = []
    for text in texts:
        ids = torch.tensor([text["input_ids"]])
        logits = model(ids, use_cache=False).logits[0, :-1]
        losses.append(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    return torch.cat(losses).mean()


def _learned(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"return_flash_attn_kwargs": True}, {}], ids=["cu_seq_lens", "position_ids"])
def test_the_collator_of_transformers(name: str, options: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    """Its rows run as varlen sequences, and learn what the texts learn one by one, by "eager"."""
    if name == "GptOss" and not options:
        pytest.skip("it makes its masks without position_ids, of which a warning tells")
    texts = _texts(5)
    batch = transformers.DataCollatorWithFlattening(return_seq_idx=True, **options)(texts)
    model, other, seen = _model(name, "flexmasks"), _model(name, "eager"), _Seen()
    with hf_attention.watched(seen):
        loss = model(**batch, use_cache=bool(options)).loss  # a cache hides position_ids, and cu_seq_lens not
    want = _alone(other, texts)
    for got, wanted in zip(_learned(model, loss), _learned(other, want), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-4)
    starts = [0, *itertools.accumulate(len(x["input_ids"]) for x in texts)]
    assert len(seen.starts) == 2
    assert all(sorted(set(s)) == starts for s in seen.starts)
    assert not [r for r in caplog.records if r.name == "flexmasks"]


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"padding_free": True}, {"packing": True}], ids=["padding_free", "packing"])
def test_training_without_padding_by_trl(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The losses of all steps are those of padded texts by "eager", and layers run varlen sequences."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
    words = {f"w{n}": n for n in range(WORDS)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1")),
        pad_token="w0", unk_token="w1", eos_token="w2",
    )  # fmt: skip
    texts = _texts(16)
    steps, per_step = 4, 4
    if options.get("packing"):  # one row of all texts, at each step
        per_step, options = 16, options | {"max_length": sum(len(x["input_ids"]) for x in texts)}

    def losses(implementation: str, seen: Any, **given: Any) -> list[float]:
        packs = given.get("packing", False)
        arguments = trl.SFTConfig(
            str(tmp_path), max_steps=steps, per_device_train_batch_size=1 if packs else per_step, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
            train_sampling_strategy="sequential", dataset_kwargs={"skip_prepare_dataset": not packs},
            gradient_checkpointing=False, **{"max_length": None} | given,
        )  # fmt: skip
        dataset = datasets.Dataset.from_list(texts)
        model = _model(name, implementation)
        trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)
        with hf_attention.watched(seen):
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    seen = _Seen()
    got, want = losses("flexmasks", seen, **options), losses("eager", lambda *_: None)
    assert len(got) == steps
    assert got[-1] < got[0] or not options.get("packing")
    assert got == pytest.approx(want, abs=2e-5)
    first = sorted(len(x["input_ids"]) for x in texts[:per_step])
    assert len(seen.starts) == 2 * steps
    assert sorted(torch.tensor(seen.starts[0]).unique().diff().tolist()) == first


@pytest.mark.parametrize(
    ("module", "name"),
    [("accelerate.utils", "send_to_device"), ("lightning.fabric.utilities.apply_func", "move_data_to_device")],
)
def test_masks_in_batches_go_to_the_device(module: str, name: str) -> None:
    """Lightning's Trainer and accelerate's loaders call these functions."""
    move = getattr(pytest.importorskip(module, reason=f"{module} is not installed"), name)
    mask = flexmasks.masks.causal() & flexmasks.masks.document(document_ids=torch.arange(8) // 3)
    tokens, moved = move((torch.arange(8), mask), torch.device("meta"))
    assert tokens.is_meta
    assert [x.device.type for x in tensors_of(moved)] == ["meta"]
    assert [x.device.type for x in tensors_of(mask)] == ["cpu"]
    _, plan = move((torch.arange(8), flexmasks.plan(mask, 8, batch=1)), torch.device("cpu"))
    assert isinstance(plan, Plan)
