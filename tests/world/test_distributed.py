"""Attention over a sequence of several processes, held against one process in float64."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import flexmasks

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import distributed_jobs as jobs
from helpers import in_campaigns, one_in

from benchmarks.processes import Processes
from flexmasks.integrations.distributed.exchange import exchanging

MASKS = [e.name for e in flexmasks.list_masks()]
SCORES = [e.name for e in flexmasks.list_scores()]


def check(results: list[dict[str, float]], tolerance: float = 1e-12) -> None:
    for errors in results:
        assert errors
        wrong = {case: error for case, error in errors.items() if not error <= tolerance}
        assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(MASKS), 16))
def test_every_mask_over_two_processes(two: Processes, first: int) -> None:
    check(two.run(jobs.registered, "mask", MASKS[first : first + 16]))


@pytest.mark.slow
def test_every_score_over_two_processes(two: Processes) -> None:
    check(two.run(jobs.registered, "score", SCORES))


@pytest.mark.slow
def test_random_masks_lengths_and_heads(two: Processes) -> None:
    check(two.run(jobs.composed, 1, 12))


@pytest.mark.slow
def test_second_gradients(two: Processes) -> None:
    check(two.run(jobs.second_gradients))


@pytest.mark.slow
def test_learned_tensors(two: Processes) -> None:
    check(two.run(jobs.learned))


@pytest.mark.slow
def test_dropout(two: Processes) -> None:
    check(two.run(jobs.dropped))


@pytest.mark.slow
def test_masks_that_change_between_calls(two: Processes) -> None:
    check(two.run(jobs.changing))


def test_packed_scores_over_two_processes(two: Processes) -> None:
    check(two.run(jobs.packed_scores))


def test_what_is_seen_is_planned_once_for_all_layers(two: Processes) -> None:
    assert two.run(jobs.planned_once) == [[0, 1, 1, 2, 2, 3]] * 2


def test_dtensors(two: Processes) -> None:
    check(two.run(jobs.dtensors))


def test_parts_put_together_are_the_whole(two: Processes) -> None:
    assert two.run(jobs.shards) == [True, True]


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        pytest.param("auto", "aot_eager", marks=pytest.mark.slow),  # "auto" is "heads" here
        pytest.param("gather", "aot_eager", marks=pytest.mark.campaign),
        pytest.param("gather", "inductor", marks=pytest.mark.campaign),
    ],
)
def test_a_compiled_layer(two: Processes, how: str, backend: str) -> None:
    assert max(two.run(jobs.compiled, how, False, False, backend)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "dynamic", "documents", "whole"),
    [
        pytest.param("gather", None, True, False, marks=pytest.mark.campaign),
        pytest.param("gather", None, False, False, marks=pytest.mark.campaign),
        *one_in(2, [in_campaigns(("heads", None, True, True)), ("gather", None, False, True)]),
        pytest.param("heads", True, True, False, marks=pytest.mark.campaign),  # as the compiled layer above
    ],
)
def test_lengths_that_change_inside_compile(
    two: Processes, how: str, dynamic: bool | None, documents: bool, whole: bool
) -> None:
    for error, graphs in two.run(jobs.lengths_inside_compile, how, 1, dynamic, documents, whole):
        assert error < 1e-4
        assert graphs <= 2


@pytest.mark.slow
def test_orders_that_change_inside_compile(two: Processes) -> None:
    assert max(two.run(jobs.orders_inside_compile)) < 1e-5


@pytest.mark.slow
def test_parts_of_two_sizes_inside_compile(two: Processes) -> None:
    assert max(two.run(jobs.parts_of_two_sizes_inside_compile)) < 1e-10


def test_autocast(two: Processes) -> None:
    assert two.run(jobs.under_autocast) == [["torch.bfloat16 True"] * 3] * 2


@pytest.mark.slow
def test_activation_checkpointing(two: Processes) -> None:
    assert max(two.run(jobs.compiled, "gather", True)) < 1e-4
    for how in ("gather", "heads", "seen"):
        assert max(two.run(jobs.compiled, how, True, True)) < 1e-4


def test_derivatives_under_fsdp2(two: Processes) -> None:
    assert max(two.run(jobs.derivatives_under_fsdp)) < 1e-12


def test_trees_under_fsdp2(two: Processes) -> None:
    assert max(two.run(jobs.trees_under_fsdp)) < 1e-12


def test_pipelines_split_masks_with_their_microbatches(two: Processes) -> None:
    check(two.run(jobs.pipelined))


def test_a_model_under_fsdp2(two: Processes) -> None:
    assert max(two.run(jobs.sharded_model)) < 1e-5


@pytest.mark.slow
def test_four_processes(four: Processes) -> None:
    names = ["causal", "packed", "sliding_window", "prefix_lm", "key_eviction"]
    check(four.run(jobs.registered, "mask", names))
    check(four.run(jobs.registered, "mask", names, 2))
    check(four.run(jobs.registered, "score", ["alibi", "t5_bias"], 2))
    check(four.run(jobs.composed, 2, 3))
    check(four.run(jobs.dtensors))
    assert four.run(jobs.shards) == [True] * 4


@pytest.mark.campaign
def test_every_mask_and_score_in_every_layout(two: Processes, four: Processes) -> None:
    for processes, ndim in ((two, 1), (four, 1), (four, 2)):
        check(processes.run(jobs.registered, "mask", MASKS, ndim, True))
        check(processes.run(jobs.registered, "score", SCORES, ndim, True))


@pytest.mark.campaign
@pytest.mark.parametrize("rows", [1, 2, 4], ids=["8 in a row", "2 x 4", "4 x 2"])
def test_eight_processes(eight: Processes, rows: int) -> None:
    """Every mask and score; the last dimension of a mesh may exchange heads."""
    ndim = 1 if rows == 1 else 2
    check(eight.run(jobs.registered, "mask", MASKS, ndim, False, rows))
    check(eight.run(jobs.registered, "score", SCORES, ndim, False, rows))


@pytest.mark.campaign
def test_lengths_that_change_on_a_2d_mesh(four: Processes) -> None:
    assert all(error < 1e-4 for error, _ in four.run(jobs.lengths_inside_compile, "auto", 2, None))


@pytest.mark.campaign
def test_many_random_masks(two: Processes, four: Processes) -> None:
    check(two.run(jobs.composed, 11, 300))
    check(four.run(jobs.composed, 12, 150))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    processes = Processes(2, "cuda", timeout=120)
    check(processes.run(jobs.on_gpus), 2e-2)
    processes.close()


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("heads", "has another `q, k, v` than this process"),
        ("mask", "has another `mask` than this process"),
        ("window", "has another `mask` than this process"),
        ("ids", "has another `mask` than this process"),
        ("score", "has another `score` than this process"),
        ("keys by a function", "has another `mask` than this process: <lambda>, by which they exchange"),
        ("keys by a list", "has another `mask` than this process"),
        ("keys by a tensor", "has another `mask` than this process"),
        ("keys, auto", "has another `mask` than this process"),
        ("lse", "has another `return_lse` than this process"),
        ("gradient", "has another `q, k, v` than this process"),
        ("error", "rank 1 of the mesh has raised an error in this call"),
        ("keys, error", "rank 1 of the mesh has raised an error in this call"),
    ],
)
def test_calls_that_differ_fail_everywhere(two: Processes, what: str, message: str) -> None:
    results = two.try_run(jobs.different, what)
    assert message in results[0][1]
    own = {"error": "needs `window`", "keys, error": "256 elements"}.get(what, message)
    assert own in results[1][1]
    assert two.run(jobs.shards) == [True, True]  # the processes are as before


@pytest.mark.parametrize("what", ["order", "part", "dtensor", "compiled"])
def test_an_order_that_is_forgotten(two: Processes, what: str) -> None:
    for forgotten, *others in two.run(jobs.forgotten, what):
        assert "distributed.attention: pass `order`, the Order of these processes" in forgotten
        assert not any(others)


def test_parts_unlike_those_of_a_held_order(two: Processes) -> None:
    """One process has as many tokens as by an order that is held; the other shows that it is another one."""
    assert max(two.run(jobs.unlike_what_is_held)) < 1e-9


def test_parts_put_together_by_different_orders(two: Processes) -> None:
    for rank, error in enumerate(two.run(jobs.unsharded_by_other_orders)):
        assert f"distributed.unshard: the processes must make the same call, but rank {1 - rank}" in error


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtypes", "q, k and v must have one dtype, got torch.float32, torch.float64, torch.float32"),
        ("nested", "`q` must be a tensor [batch, heads, tokens, head size]"),
    ],
)
def test_calls_that_no_process_can_make(two: Processes, what: str, message: str) -> None:
    assert all(message in error for _, error in two.try_run(jobs.different, what))


def test_lack_of_memory_keeps_its_type() -> None:
    with pytest.raises(torch.OutOfMemoryError), exchanging("keys and values"):
        raise torch.OutOfMemoryError("no memory")


def test_dtensors_that_one_process_cannot_take(two: Processes) -> None:
    for job, message in (
        (jobs.sharded_over_the_sequence, "use flexmasks.integrations.distributed.attention"),
        (jobs.sharded_differently, "q, k and v must be sharded alike"),
    ):
        assert all(message in error for _, error in two.try_run(job))


@pytest.mark.slow
def test_a_process_that_fails_stops_the_others(two: Processes) -> None:
    start = time.monotonic()
    results = two.try_run(jobs.fails_alone)
    assert time.monotonic() - start < 40
    assert "this process has failed" in results[1][1]
    assert "could not exchange their calls. One of them has failed" in results[0][1]
    assert two.run(jobs.shards) == [True, True]  # their other groups are as before
