"""Rollouts of trl, verl and AReaL on trees: their own trainers, engines and losses, against the same without trees.

The recipes hold stand-ins of these libraries; here the installed libraries judge them: trl 1.16, verl 0.9.1, AReaL
1.0.4. The last two ask for other versions of torch and transformers; `pip install --no-deps`, and what is missing.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor

import flexmasks

pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("ignore")]


def _imported(*names: str) -> list[Any]:
    """Import modules of a library, or skip: it needs a package that is not here, or another torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [importlib.import_module(name) for name in names]
        except ImportError as missing:
            pytest.skip(str(missing))


def _gradients(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    scale = float(want.detach().abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(scale, 1e-30))


def _check_trls_loss(trainer: Any, recipe: Any, inputs: dict[str, Tensor]) -> None:
    """Hold the recipe's loss to the trainer's."""
    rows = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    kept = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    count = inputs["completion_ids"].shape[1]
    logs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, rows, kept, count)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        inputs[name] = logs.detach() + 0.3 * torch.randn_like(logs)
    _close(
        recipe.loss_of(inputs, logs, trainer.loss_type, 0.04, 0.2, 0.2), trainer._compute_loss(trainer.model, inputs)
    )


@pytest.mark.parametrize("truncated", [False, True])
def test_steps_of_trls_trainer(truncated: bool, tmp_path: Path) -> None:
    """GRPOTrainer generates, scores, and trains twice on that; on trees it has the same losses and weights."""
    trl, datasets, tokenizers, transformers = _imported("trl", "datasets", "tokenizers", "transformers")
    shared, recipe = _imported("_rollouts", "trees_in_trl")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{n}": n for n in range(shared.WORDS)}, unk_token="w0")
    )  # fmt: skip
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1", padding_side="left"
    )
    shared.make_model("sdpa", torch.float32).save_pretrained(tmp_path / "model")

    def of_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(c.split()))) for c in completions]

    found = []
    for trainer_of, attention in ((trl.GRPOTrainer, "sdpa"), (recipe.tree_trainer(), "flexmasks")):
        trainer = trainer_of(
            model=str(tmp_path / "model"),
            reward_funcs=of_words,
            args=trl.GRPOConfig(
                output_dir=str(tmp_path / attention), per_device_train_batch_size=8, num_generations=4, use_cpu=True,
                bf16=False, max_completion_length=12, report_to=[], max_steps=3, learning_rate=1e-2, beta=0.04,
                temperature=shared.TEMPERATURE, mask_truncated_completions=truncated, num_iterations=2, logging_steps=1,
                save_strategy="no", disable_tqdm=True, steps_per_generation=1, gradient_checkpointing=False,
                model_init_kwargs={"attn_implementation": attention, "dtype": "float32"},
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["w5 w6 w7 w8 w9 w11", "w4 w4 w2"] * 8}),
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        for kind in ("grpo", "bnpo", "dapo"):
            trainer.loss_type = kind
            _check_trls_loss(trainer, recipe, recipe.in_trls_format(shared.draw(), 2 if truncated else None))
        logged = [[h[k] for k in ("loss", "kl", "entropy")] for h in trainer.state.log_history if "loss" in h]
        found.append((torch.tensor(logged), torch.cat([p.detach().flatten() for p in trainer.model.parameters()])))
    assert len(found[0][0]) == 3
    assert float(found[0][0][1, 1]) > 0  # the policy has moved away from the reference model
    _close(found[1][0], found[0][0])
    _close(found[1][1], found[0][1], 1e-4)


@pytest.mark.parametrize("wrapped", ["DDP", "FSDP2"])
def test_trees_go_through_what_wraps_a_model(wrapped: str, tmp_path: Path) -> None:
    """DDP and FSDP2 work in a model's forward; the recipe for trl calls it."""
    shared, recipe = _imported("_rollouts", "trees_in_trl")
    inputs = recipe.in_trls_format(shared.draw())
    rows = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    kept = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    found = []
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        for way in ("plain", wrapped):
            model: Any = shared.make_model()
            recipe.add_tree_head(model, shared.TEMPERATURE)
            if way == "FSDP2":
                for layer in (*model.model.layers, model):
                    torch.distributed.fsdp.fully_shard(layer)
            called = torch.nn.parallel.DistributedDataParallel(model) if way == "DDP" else model
            logs, _ = recipe.of_answers(called, rows, kept, inputs["completion_ids"].shape[1])
            logs.sum().backward()
            grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
            found.append((logs.detach(), torch.cat([g.flatten() for g in grads])))
    finally:
        torch.distributed.destroy_process_group()
    for got, want in zip(found[1], found[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_step_of_verls_engine(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`forward_step` of the FSDP engine with `ppo_loss`: clipping, entropy and KL."""
    names = ("tensordict", "verl.workers.engine.fsdp.transformer_impl", "verl.workers.utils.losses")
    tensordict, engines, losses, configs, tools, functional = _imported(
        *names, "verl.workers.config", "verl.utils.tensordict_utils", "verl.utils.torch_functional"
    )
    shared, recipe = _imported("_rollouts", "trees_in_verl")
    monkeypatch.setattr(engines, "get_device_id", lambda: "cpu")
    rollouts = shared.draw()
    generator = torch.Generator().manual_seed(0)
    fields = {k: v for k, v in recipe.in_verls_format(rollouts).items() if isinstance(v, Tensor)}
    mask = fields["response_mask"]
    old, reference = (-4 + 0.3 * torch.randn(mask.shape, generator=generator) for _ in range(2))
    fields |= {"old_log_probs": old, "ref_log_prob": reference, "advantages": fields["advantages"].float()}

    class TreeEngine(recipe.OnTrees, engines.FSDPEngineWithLMHead):  # type: ignore[misc,name-defined]
        pass

    registry = engines.EngineRegistry  # as the guide registers it
    monkeypatch.setattr(registry, "_engines", copy.deepcopy(registry._engines))
    registry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")(
        TreeEngine
    )
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert registry.get_engine_cls("language_model", "fsdp2") is TreeEngine

    found = []
    for kind, attention in ((engines.FSDPEngineWithLMHead, "sdpa"), (TreeEngine, "flexmasks")):
        engine = object.__new__(kind)  # its __init__ starts process groups
        engine.module, engine._autocast_dtype = shared.make_model(attention, torch.float32), torch.float32
        engine.pad_to_length, engine.use_ulysses_sp, engine.get_data_parallel_group = None, False, lambda: None
        engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
        engine.compute_entropy_from_logits = functional.entropy_from_logits
        batch = tensordict.TensorDict(dict(fields), batch_size=[len(rollouts)])
        settings = {"temperature": shared.TEMPERATURE, "calculate_entropy": True, "use_remove_padding": False}
        settings |= {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
        for name, value in {**settings, "max_response_len": mask.shape[1]}.items():
            tools.assign_non_tensor_data(batch, name, value)
        settings = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1, "loss_agg_mode": mode}
        with_kl, without = (configs.ActorConfig(**settings, entropy_coeff=0.01, use_kl_loss=x) for x in (True, False))
        loss, output = engine.forward_step(batch, partial(losses.ppo_loss, with_kl), False)
        loss.backward()
        of_answers = losses.no_padding_2_padding(output["model_output"]["log_probs"], batch)
        entropies = losses.no_padding_2_padding(output["model_output"]["entropy"], batch)
        without_kl, _ = losses.ppo_loss(without, output["model_output"], batch)
        _close(recipe.loss_of(fields, of_answers, entropies, mode), without_kl)
        found.append((loss.detach(), _gradients(engine.module), of_answers * mask))
    for got, want in zip(found[1], found[0], strict=True):
        _close(got, want)


def test_the_mask_of_prefix_grouper() -> None:
    """PrefixGrouper, verl's way to share prompts, makes two causal calls with masks of keys: together a tree's mask."""
    (prefix_grouper,) = _imported("prefix_grouper")
    (recipe,) = _imported("trees_in_verl")
    length, answers = 7, [5, 1, 9]
    total = length + sum(answers)
    grouper = prefix_grouper.PrefixGrouper(group_info=[[length, *answers]], device=torch.device("cpu"))
    tree = flexmasks.trees.pack([[n] * count for n, count in enumerate(answers)], prompts=[[9] * length] * 3)

    def causal(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        seen = seen & keys[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    q, k, v = torch.randn(3, 1, 2, total, 8, dtype=torch.float64)
    want = flexmasks.attention(q, k, v, mask=tree.mask).transpose(1, 2)
    torch.testing.assert_close(grouper.forward(causal, q, k, v), want)
    # What each token sees, by values that say which key they are of.
    alike = torch.zeros(1, 1, total, 8, dtype=torch.float64)
    ids = torch.eye(total, dtype=torch.float64)[None, None]
    seen = grouper.forward(causal, alike, alike, ids)[0, :, 0] > 0
    for mask in (recipe.grouped(length, answers), tree.mask):
        same = flexmasks.compare(seen, mask, total)
        assert same.equal, same


@pytest.mark.parametrize("length", [256, 1024])
def test_areals_tries(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of AReaL's trie, and with it in a model its own log-probabilities and loss, against those of rows."""
    trees, functional, cli, losses, patch = _imported(
        "areal.models.tree_attn.tree", "areal.models.tree_attn.functional", "areal.api.cli_args",
        "areal.utils.functional", "areal.models.tree_attn.module_fsdp",
    )  # fmt: skip
    shared, recipe = _imported("_rollouts", "trees_in_areal")
    rollouts = [r for seed in range(length // 256) for r in shared.draw(seed)]
    data = recipe.in_areals_format(rollouts)
    ready = recipe.rolled(data)
    shape = ready["loss_mask"].shape
    generator = torch.Generator().manual_seed(0)
    for name in ("prox_logp", "logprobs"):
        ready[name] = -4 + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    batch = trees.build_packed_tree_batch(ready, cli.MicroBatchSpec(max_tokens_per_mb=length))
    assert len(batch.mbs) == 1
    (mb,) = batch.mbs
    trie, count = mb["trie_node"], batch.group_lens[0]
    theirs = trees.build_block_mask_from_trie(trie, length, torch.device("cpu"))
    seen = trees._build_attention_mask(trie, length, torch.device("cpu"))
    ours = recipe.mask_of(trie, length, "cpu")
    behind = torch.diag(torch.arange(length) >= count)  # there AReaL's tokens see nothing, ours themselves
    assert flexmasks.compare(seen | behind, ours, length).equal
    difference = flexmasks.compare(theirs, ours, length)
    assert (difference.only_a, difference.only_b) == (0, length - count)
    assert torch.equal(recipe.parents_of(trie, length)[None], trees.trie_to_parent_array(trie, length).long())
    assert count == sum(flexmasks.trees.pack(data["input_ids"], mask=data["attention_mask"]).lengths)

    # AReaL's trie, position ids, patch of transformers, gathering and loss, with our mask and attention in the model.
    clip: dict[str, Any] = {"eps_clip": 0.2, "c_clip": 3.0}
    clip["rejection_sampling"] = cli.RejectionSamplingConfig(level="token", action="clamp", metric="ratio", upper=5.0)
    monkeypatch.setattr(patch, "_tree_attn_fwd_func", recipe.attend)
    patch.patch_fsdp_for_tree_training()
    try:
        ours_model, rows_model = shared.make_model("sdpa"), shared.make_model()
        ours_model.config._attn_implementation = "flash_attention_2"  # whose function is the patched one
        given = {"input_ids": mb["input_ids"], "position_ids": mb["position_ids"], "attention_mask": None}
        logits = ours_model(**given, use_cache=False, **recipe.tree_kwargs(trie, length, "cpu")).logits[0]
    finally:
        patch.restore_patch_fsdp_for_tree_training()
    logs, _ = functional.gather_packed_tree_logprobs_entropy(logits, trie, mb["input_ids"], shared.TEMPERATURE)
    names = {"proximal_logprobs": "prox_logp", "old_logprobs": "logprobs", "advantages": "advantages"}
    of_trie, _ = losses.ppo_actor_loss_fn(
        logprobs=logs, loss_mask=mb["loss_mask"].bool(), **{k: mb[v] for k, v in names.items()}, **clip
    )
    of_trie.backward()
    # The recipe's rows, under AReaL's loss and under the recipe's.
    rows, _ = recipe.by_trees(rows_model, data, shared.TEMPERATURE)
    of_rows, _ = losses.ppo_actor_loss_fn(
        logprobs=rows, loss_mask=ready["loss_mask"].bool(), **{k: ready[v] for k, v in names.items()}, **clip
    )
    of_rows.backward()
    _close(of_rows, of_trie.to(of_rows.dtype))
    _close(of_rows, recipe.loss_of(ready, rows, 3.0), 1e-6)  # AReaL weighs in float32
    _close(_gradients(rows_model), _gradients(ours_model))
