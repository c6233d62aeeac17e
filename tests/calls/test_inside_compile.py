"""Calls inside a user's own torch.compile(fullgraph=True): what they compute, and what makes them compile again."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
import pickle
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from helpers import (
    TOLERANCE,
    arguments,
    check_lse,
    error,
    exact,
    in_campaigns,
    label,
    on_gpu_of,
    one_in,
    qkv,
    skip_unless_flash_takes,
    spread,
)
from oracles import MASK_CASES, SCORE_CASES, SCORES, Case, attend, dense
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention.flex_attention import and_masks, create_block_mask
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flexmasks
from flexmasks import Mask, flex, inside_compile
from flexmasks.backends import decode, fa4, fa4_functions, fa4_package, flex_flash, kernel_tiles, short, table, times
from flexmasks.backends.call import Kernel
from flexmasks.backends.encoded import Encoded
from flexmasks.graphs import Flat, in_graph
from flexmasks.kernels.operators import hold
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.sizes import unread
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.encoding import encode
from flexmasks.spec.parameters import Size

BATCH, HEADS, LENGTH, SIZE, V_SIZE = 2, 2, 70, 8, 12
DOCUMENTS = torch.arange(LENGTH).expand(BATCH, -1) // torch.tensor([[20], [33]])
OFFSETS = torch.tensor([0, 25, 60])  # two sequences, and ten tokens of padding
_Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


def results(call: _Call, *tensors: Tensor) -> list[Tensor]:
    """Return a call's outputs, and the gradients of all floating arguments."""
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    learning = [x for x in leaves if x.requires_grad]
    outputs = call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weighted = sum(
        (x.nan_to_num(neginf=0.0) * torch.arange(x.numel(), device=x.device).view(x.shape).cos()).sum() for x in outputs
    )
    return [*outputs, *torch.autograd.grad(weighted, learning)]


def check(call: _Call, *tensors: Tensor, want: _Call | None = None, tolerance: float = 1e-5, **compile_by: Any) -> None:
    """Check a call inside torch.compile, forward and backward, against the same call outside, or another one."""
    compiled = torch.compile(call, fullgraph=True, **{"backend": "aot_eager", **compile_by})
    for x, y in zip(results(compiled, *tensors), results(want or call, *tensors), strict=True):
        assert torch.equal(x.isinf(), y.isinf())
        torch.testing.assert_close(x.to(y.dtype), y, atol=tolerance, rtol=tolerance)
    assert not counters["graph_break"]


def leaves(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(BATCH, HEADS, LENGTH, n, dtype=dtype) for n in (SIZE, SIZE, V_SIZE))


# --- every mask ---


def _has_tensors(case: Case) -> bool:
    return isinstance(case.q_offset, tuple) or any(isinstance(v, Tensor | list) for v in case.params.values())


# Masks whose tensors are used in different ways, of those that no other test here trains: one case takes a second.
_FEW_NAMES = ("packed", "slices", "tree", "flashmask", "key_padding", "block_sparse")
FEW = spread([c for c in MASK_CASES if _has_tensors(c) and c.name in _FEW_NAMES], 1)
MORE = [c for c in MASK_CASES if c not in FEW]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*one_in(2, FEW), *map(in_campaigns, MORE)], ids=label)
def test_every_mask_trains(case: Case) -> None:
    """In float64 by the reference, which honors the block lists."""
    given = {n: torch.tensor(v) if isinstance(v, list) and v else v for n, v in arguments(case).items()}
    names = [n for n, v in given.items() if isinstance(v, Tensor)]
    q, k, v = (x.detach() for x in qkv(case, torch.float64, size=4, v_size=6))

    def call(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        params = {**given, **dict(zip(names, tensors, strict=True))}
        return flexmasks.attention(q, k, v, mask=case.name, return_lse=True, **params)

    tensors = [given[n] for n in names]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, got_lse, *gradients = results(compiled, q, k, v, *tensors)
    want, want_lse, *want_gradients = results(lambda q, k, v: attend(q, k, v, dense(case)), q, k, v)
    check_lse(got_lse, want_lse, 1e-9)
    for x, y in zip([got, *gradients], [want, *want_gradients], strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)
    assert graphs() == 1


@pytest.mark.parametrize("case", spread(MASK_CASES, 3) + SCORE_CASES, ids=label)
def test_functions_take_tensors_of_zeros(case: Case) -> None:
    """A kernel is chosen before tensors have values. On a GPU an index out of range would end the process."""
    given = {n: torch.tensor(v) if isinstance(v, list) and v else v for n, v in arguments(case).items()}
    q_offset = given.pop("q_offset")
    names = (case.name, None) if case in MASK_CASES else (None, case.name)
    mask, score = from_arguments(*names, given)
    size = unread(Size(case.batch, case.heads, case.q_len, case.kv_len, torch.device("cpu")), q_offset)
    function = (ScorePlan(score, size, q_offset) if mask is None else MaskPlan(mask, size, q_offset)).function()
    last = [torch.tensor(n - 1) for n in (case.batch, case.heads, case.q_len, case.kv_len)]
    for indices in (last, [x * 0 for x in last]):
        assert function(*[torch.zeros(())] * (mask is None), *indices).ndim == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["grouped_tril", *(pytest.param(n, marks=pytest.mark.campaign) for n in ("document", "paged"))]
)
def test_kernels_for_the_cpu(name: str) -> None:
    (case,) = spread([c for c in MASK_CASES if c.name == name], 1)
    given = arguments(case)
    compiled = torch.compile(functools.partial(flexmasks.attention, mask=name), fullgraph=True)
    with torch.no_grad():
        q, k, v = (x.detach() for x in qkv(case, torch.float32, v_size=48))
        want, _ = attend(*(exact(x).detach() for x in (q, k, v)), dense(case))
        torch.testing.assert_close(compiled(q, k, v, **given).double(), want, atol=1e-5, rtol=1e-5)
        q[:, :, 0], k[:, :, 1] = math.nan, math.inf  # torch's own kernel would drop the blocks of keys with such scores
        visible = dense(case).expand(case.batch, case.heads, -1, -1)
        is_bad = visible[..., 1] | (visible.any(-1) & (torch.arange(case.q_len) == 0))
        got = compiled(q, k, v, **given)
        assert torch.equal(got.isnan().all(-1), is_bad)
        torch.testing.assert_close(got[~is_bad].double(), want[~is_bad], atol=1e-5, rtol=1e-5)


# On a GPU every mask is compiled in campaigns, and those that make tables of blocks always.
_TABLES = ("bsr", "block_topk", "slices", "vertical_slash", "dense", "t5_bias")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[] if c.name in _TABLES else pytest.mark.campaign, id=label(c))
        for c in spread(MASK_CASES, 1) + spread(SCORE_CASES, 1)
    ],
)
def test_every_mask_trains_gpu(case: Case) -> None:
    """With the tiles of long sequences, which torch.compile does not replace by smaller ones."""
    q, k, v = qkv(case, torch.bfloat16, "cuda", size=64)
    others = [exact(x) for x in (q, k, v)]
    params = arguments(case, "cuda")
    mask, score, changed = case.name, None, None
    if case in SCORE_CASES:
        params |= {n: t.float() for n, t in params.items() if isinstance(t, Tensor) and t.is_floating_point()}
        mask, score, changed = "causal", case.name, lambda x: SCORES[case.name](x, case, **case.params)
    options = {**kernel_tiles.chosen_tiles(q, v, (128, 128)), "BACKEND": "TRITON"}
    compiled = torch.compile(flexmasks.attention, fullgraph=True)
    out = compiled(q, k, v, mask=mask, score=score, backend="flex", kernel_options=options, **params)
    want, _ = attend(*others, dense(replace(case, name=mask, params={} if score else case.params)), changed)
    weight = torch.randn_like(out)
    out.backward(weight)
    want.backward(weight.double().cpu())
    assert error(out, want) < TOLERANCE[torch.bfloat16]
    for x, y in zip((q, k, v), others, strict=True):
        assert error(x.grad, y.grad) < 2 * TOLERANCE[torch.bfloat16]


def _set(x: Tensor, places: Any, values: Any) -> Tensor:
    x[places] = values
    return x


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "name"),
    one_in(2, list(itertools.product(["flex", "flex_flash"], ["dense", "bsr", "document", "q_offset", "dense_bias"]))),
)
def test_constants_in_which_the_graph_sets_elements_gpu(name: str, backend: str) -> None:
    """torch's own compiled flex_attention takes them for the constants."""
    length, device = 300, "cuda"
    q, k, v = (torch.randn(2, 2, length, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    places = torch.arange(0, length, 7, device=device)

    def given(places: Tensor, values: Tensor) -> dict[str, Any]:
        if name == "dense":
            rows, columns = places[:, None], torch.arange(length, device=device)
            visible = torch.zeros(length, length, dtype=torch.bool, device=device)
            return {
                "mask": "dense",
                "visible": _set(visible, (rows, columns), torch.ones_like(columns, dtype=torch.bool)),
            }
        if name == "bsr":
            return {"mask": "bsr", "crow_indices": places[:4] // 7, "col_indices": places[:3] // 7, "block": 100}
        if name == "document":
            return {
                "mask": "document",
                "document_ids": _set(torch.zeros(length, dtype=torch.long, device=device), places, places),
            }
        if name == "q_offset":
            return {
                "mask": "causal",
                "q_offset": _set(torch.zeros(2, dtype=torch.long, device=device), places[:1], places[1:2]),
            }
        bias = torch.zeros(length, length, device=device)
        return {"mask": "causal", "score": "dense_bias", "bias": _set(bias, (places[:, None], places), values)}

    def run(q: Tensor, k: Tensor, v: Tensor, places: Tensor, values: Tensor) -> Any:
        return flexmasks.attention(q, k, v, backend=backend, **given(places, values))

    if name == "q_offset":
        q = q[:, :, 7:].contiguous()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    values = torch.randn(len(places), len(places), device=device)
    if backend == "flex_flash":
        skip_unless_flash_takes(leaves, **given(places, values))
    elif name == "dense_bias":
        leaves.append(values.requires_grad_())
    got, want = torch.compile(run, fullgraph=True)(q, k, v, places, values), run(q, k, v, places, values)
    assert error(got, want.cpu()) < TOLERANCE[torch.bfloat16]
    gradients = [torch.autograd.grad(x.float().square().sum(), leaves) for x in (got, want)]
    for x, y in zip(*gradients, strict=True):
        assert error(x, y.cpu()) < 2 * TOLERANCE[torch.bfloat16]


def test_tensors_are_held_until_a_result_is_written() -> None:
    def run(x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        total, result = read.sum(-1), torch.mm(x, x)
        hold(result, [read[None]])
        return total, result * 2

    with torch.no_grad():
        results, (code,) = run_and_get_code(torch.compile(run), torch.eye(8), torch.ones(4, 3))
    torch.testing.assert_close(results, (torch.full((4,), 3.0), 2 * torch.eye(8)))
    freed_later = code.split("torch.ops.flexmasks.hold.default(")[1]
    assert freed_later.count("del arg") == 1
    assert "copy" not in freed_later


@pytest.mark.gpu
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", ["document", "key_padding"])
def test_flash_reads_tensors_that_a_graph_computes(name: str, learns: bool) -> None:
    """torch 2.11 frees what they are computed from, and without a backward pass them, once the blocks are planned."""
    shape = 2, 2, 640, 64
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=learns) for _ in range(3)]
    ids = torch.arange(640, device="cuda").expand(2, -1) // 100

    def mask(ids: Tensor) -> Mask:
        if name == "document":
            return flexmasks.get_mask("document", document_ids=ids // 2)
        return flexmasks.get_mask("key_padding", attention_mask=ids < 4)

    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
        return flexmasks.attention(q, k, v, mask=mask(ids), backend="flex_flash") * 2

    skip_unless_flash_takes(leaves, mask=mask(ids))
    got, want = torch.compile(run, fullgraph=True)(*leaves, ids), run(*leaves, ids)
    results = [got], [want]
    if learns:
        results = tuple([x, *torch.autograd.grad(x.float().square().sum(), leaves)] for x in (got, want))
    for x, y in zip(*results, strict=True):
        assert error(x, y.cpu()) < 2 * TOLERANCE[torch.bfloat16]


# --- a model ---


class Block(torch.nn.Module):
    """Attention between two projections, whose q, k and v are views of one tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: Tensor, attention: _Call) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.into(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        return x + self.out(attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Model(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor, mask: Mask | None = None, visible: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            if mask is None:
                x = block(x, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible))
            else:
                x = block(x, lambda q, k, v: flexmasks.attention(q, k, v, mask=mask))
        return x.square().mean()


def _documents(ids: Tensor) -> Mask:
    return flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)


def _users_documents(ids: Tensor) -> Mask:
    return flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "backend"),
    [(_users_documents, "aot_eager"), pytest.param(_documents, "inductor", marks=pytest.mark.campaign)],
)
def test_a_model_trains_with_new_documents_at_every_step(made: Callable[[Tensor], Mask], backend: str) -> None:
    model, other = Model(3), Model(3)
    other.load_state_dict(model.state_dict())
    step = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(3):
        ids, x = torch.randint(0, 5, (BATCH, LENGTH)).sort(1).values, torch.randn(BATCH, LENGTH, 16)
        same = (ids[:, :, None] == ids[:, None])[:, None]
        losses = step(x, made(ids)), other(x, visible=same & torch.ones(LENGTH, LENGTH).tril().bool())
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-6, rtol=1e-4)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_sharded_model_trains(whole: bool) -> None:
    """FSDP2, of one process: layers compiled one by one, or the whole model."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model, other = Model(2), Model(2)
        other.load_state_dict(model.state_dict())
        for part in (*model.blocks, model):
            torch.distributed.fsdp.fully_shard(part, mesh=mesh)
        if whole:
            model.compile(backend="aot_eager")
        else:
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        for _ in range(2):
            ids, x = torch.randint(0, 5, (BATCH, LENGTH)).sort(1).values, torch.randn(BATCH, LENGTH, 16)
            losses = model(x, _documents(ids)), other(x, _documents(ids))
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(*losses)
        for sharded, y in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(sharded.grad.full_tensor(), y.grad, atol=1e-6, rtol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_torch_traces_few_calls_for_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is most of a model's first call, and torch takes equally long for nearly every call of a function."""
    calls, inline_call = [], InliningInstructionTranslator.inline_call
    monkeypatch.setattr(
        InliningInstructionTranslator,
        "inline_call",
        lambda *args, **more: calls.append(args) or inline_call(*args, **more),
    )
    numbers = []
    for layers in (1, 2):
        calls.clear()
        torch.compile(Model(layers), fullgraph=True, backend="eager")(
            torch.randn(BATCH, LENGTH, 16), _documents(DOCUMENTS)
        )
        numbers.append(len(calls))
    assert 50 < numbers[1] - numbers[0] <= 110  # 1,225 at first


@pytest.mark.parametrize("dynamic", [True, False])
def test_arguments_of_functions_that_are_not_traced_arrive_as_they_are(dynamic: bool) -> None:
    seen: list[tuple[Any, ...]] = []

    @in_graph
    def noted(*values: Any) -> Tensor:
        seen.append(values)
        tensors, number = values[2], values[3]
        return tensors[0] * tensors[1][0] + number

    def run(x: Tensor, n: int) -> Tensor:
        flat = Flat("('it\\'s', 0, (None, 0))", (x, n))
        constant = (True, False, 'it\'s "0"', (), (None, (2.5, math.inf)))
        return noted(None, constant, (x, (x.double(), "0"), flat), n, 0, -0.0)

    x = torch.randn(5)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (3, 4):
        torch.testing.assert_close(compiled(x, n), x * x.double() + n)
    for values in seen:
        none, constants, tensors, number, zero, negative = values
        assert none is None
        assert constants == (True, False, 'it\'s "0"', (), (None, (2.5, math.inf)))
        assert [type(c) for c in constants[:2]] == [bool, bool]
        assert tensors[0].dtype == torch.float32
        assert tensors[1][0].dtype == torch.float64
        assert tensors[1][1] == "0"
        assert (tensors[2][0], tensors[2][2]) == ("it's", (None, number))
        assert tensors[2][1].dtype == torch.float32
        assert number in (3, 4)
        assert (zero, math.copysign(1, negative)) == (0, -1)


@pytest.mark.slow
def test_torch_finds_compiled_graphs_on_the_disk() -> None:
    """What is kept must be that of this mask: of its name, its numbers, and the code of its function."""
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    functions = (lambda b, h, q, kv: kv % 7 != 3), (lambda b, h, q, kv: kv % 7 != 4)
    masks = [
        (
            flexmasks.get_mask("sliding_window", window=window) & functions[n],
            (distance >= 0) & (distance <= window) & (place % 7 != 3 + n),
        )
        for window, n in ((9, 0), (5, 0), (5, 1))
    ]
    scale = random.SystemRandom().random()  # graphs of this run alone
    q, k, v = leaves()
    for is_second, (mask, visible) in [*((False, m) for m in masks), (True, masks[0])]:
        torch._dynamo.reset()
        flexmasks.clear_caches()
        counters.clear()
        call = functools.partial(flexmasks.attention, mask=mask, scale=scale, backend="reference")
        with torch.no_grad():
            got = torch.compile(call, fullgraph=True)(q, k, v)
        assert not counters["graph_break"]
        torch.testing.assert_close(got.double(), _naive(q, k, v, visible, scale), atol=1e-5, rtol=1e-5)
        found = counters["aot_autograd"]
        assert (found["autograd_cache_hit"], found["autograd_cache_miss"]) == (is_second, not is_second)
        assert not found["autograd_cache_bypass"]


def _window(ids: Tensor) -> Mask:
    return flexmasks.get_mask("sliding_window", window=9)


@pytest.mark.slow
def _shown(what: Any, n: float, lens: Tensor) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if callable(what):
            return what(kv, q) & (kv < lens[b] + n)
        if what in ("causal", torch.int64, None, ("a", 1)):
            return (kv <= q) & (kv < lens[b] + n)
        return (kv >= q) & (kv < lens[b] + n)

    return mask


_MODE = "causal"


def _by_mode(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv <= q if _MODE == "causal" else kv >= q


_by_mode.note = "an attribute"  # type: ignore[attr-defined] # it is read, too


@pytest.mark.slow
def test_variables_of_a_module_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a Mask reads which was made before."""
    torch._dynamo.reset()
    held, q = flexmasks.get_mask(_by_mode), torch.randn(1, 2, 40, 16)
    for mask in (held, _by_mode):
        call = lambda q, mask=mask: flexmasks.attention(q, q, q, mask=mask)  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        for mode in ("causal", "other", "causal"):
            monkeypatch.setattr(sys.modules[__name__], "_MODE", mode)
            want = flexmasks.attention(q, q, q, mask="causal" if mode == "causal" else _by_mode, backend="reference")
            assert error(compiled(q), want.double()) < TOLERANCE[torch.float32]


_compare = torch.minimum


def _by_alias(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return _compare(q, kv) > kv - 5


@pytest.mark.slow
def test_other_names_of_functions_of_torch_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 40, 16)
    compiled = torch.compile(lambda: flexmasks.attention(q, q, q, mask=_by_alias), fullgraph=True, backend="eager")
    for compare in (torch.minimum, torch.maximum, torch.sub):
        monkeypatch.setattr(sys.modules[__name__], "_compare", compare)
        want = flexmasks.attention(q, q, q, mask=_by_alias, backend="reference")
        assert error(compiled(), want.double()) < TOLERANCE[torch.float32]


_POSITIONS = torch.arange(50)


def _with_a_table(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor = _POSITIONS) -> Tensor:
    return table[q] >= table[kv]


def test_tensors_in_defaults_are_read() -> None:
    q = torch.randn(1, 2, 40, 16)
    compiled = torch.compile(lambda: flexmasks.attention(q, q, q, mask=_with_a_table), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), flexmasks.attention(q, q, q, mask="causal"))


def _wide(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, w: int) -> Tensor:
    return (q - kv).abs() <= w + b


def _behind(unused: None, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, w: int) -> Tensor:
    return _wide(b, h, q, kv, w=w)


class _Wide:
    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, w: int) -> Tensor:
        return _wide(b, h, q, kv, w=w)

    def method(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, w: int = 20) -> Tensor:
        return _wide(b, h, q, kv, w=w)

    @classmethod
    def of_class(cls, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, w: int) -> Tensor:
        return _wide(b, h, q, kv, w=w)


def _nested(more: int) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, w: int) -> Tensor:
        return (q - kv).abs() <= w + more + b

    return mask


@functools.wraps(_wide)
def _decorated(*args: Any, **kwargs: Any) -> Tensor:
    return _wide(*args, **kwargs)


_WITH_PARAMETERS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "lambda": lambda: lambda b, h, q, kv, *, w: (q - kv).abs() <= w + b,
    "lambda, default": lambda: lambda b, h, q, kv, *, w=20: (q - kv).abs() <= w + b,
    "lambda, tensors in defaults": lambda: (
        lambda b, h, q, kv, more=_POSITIONS, *, w=_POSITIONS[:1]: (q - kv).abs() <= w + more[b]
    ),
    "nested": lambda: _nested(0),
    "partial": lambda: functools.partial(_wide),
    "partial, given": lambda: functools.partial(_wide, w=20),
    "partial of a lambda": lambda: functools.partial(lambda b, h, q, kv, *, w: (q - kv).abs() <= w + b, w=20),
    "partial, an argument that is not read": lambda: functools.partial(_behind, None),
    "object": _Wide,
    "method": lambda: _Wide().method,
    "method of a class": lambda: _Wide.of_class,
    "decorated": lambda: _decorated,
    "any arguments": lambda: lambda *indices, w: _wide(*indices, w=w),
}


@pytest.mark.parametrize("name", one_in(8, list(_WITH_PARAMETERS)))
def test_functions_of_any_kind_take_parameters(name: str) -> None:
    q, make = torch.randn(2, 1, 40, 16), _WITH_PARAMETERS[name]
    made = make()

    def call() -> tuple[Tensor, ...]:
        return tuple([flexmasks.attention(q, q, q, mask=mask, w=3) for mask in (made, make())])

    want = flexmasks.attention(q, q, q, mask=_wide, w=3, backend="reference")
    for got in torch.compile(call, fullgraph=True, backend="eager")():
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lambda b, h, q, kv, *, v: q - kv <= v, "no parameter is named `w`; mask '<lambda>' takes `v`"),
        (lambda: lambda b, h, q, *, w: q <= w, r"must take \(b, h, q, kv\) by position, its signature is \(b, h, q\)"),
    ],
)
def test_functions_made_inside_that_do_not_fit(make: Callable[[], Callable[..., Tensor]], words: str) -> None:
    q = torch.randn(1, 1, 40, 16)
    with pytest.raises(TypeError, match=words):
        torch.compile(lambda: flexmasks.attention(q, q, q, mask=make(), w=3), fullgraph=True, backend="eager")()


@pytest.mark.slow
def test_numbers_of_masks_beside_functions_that_only_torch_reads_may_change() -> None:
    table, q = torch.arange(50), torch.randn(1, 2, 40, 16)

    def call(window: int, backend: str = "auto") -> Tensor:
        near = flexmasks.get_mask("sliding_window", window=window)
        return flexmasks.attention(q, q, q, mask=near & (lambda b, h, q, kv: table[q] > kv - 3), backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for window in (3, 9, 5):
        torch.testing.assert_close(compiled(window), call(window, backend="reference"))


def _shown_to(what: Any, n: float, lens: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, **_: Any) -> Tensor:
    return _shown(what, n, lens)(b, h, q, kv)


@pytest.mark.slow
@pytest.mark.parametrize("backend", one_in(2, ["auto", "reference"]))
def test_captured_numbers_may_change(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, **call: flexmasks.attention(q, q, q, backend=backend, **call), fullgraph=True, backend="eager"
    )
    q = torch.randn(1, 2, 40, 16)
    for slope, width in ((0.5, 5), (0.25, 9), (-0.125, 3)):
        mask = flexmasks.get_mask(lambda b, h, q, kv, width=width: (q - kv).abs() <= width)
        score = flexmasks.get_score(lambda s, b, h, q, kv, slope=slope: s - slope * (q - kv).abs())
        want = flexmasks.attention(q, q, q, mask=mask, score=score, backend="reference")
        assert error(compiled(q, mask=mask, score=score), want.double()) < TOLERANCE[torch.float32]


_BY_WHOLE_NUMBERS: dict[str, Callable[[Tensor, int, Tensor], Tensor]] = {
    "product": lambda s, n, distance: n * s,
    "sum": lambda s, n, distance: (s + n) * distance / 9,
    "difference": lambda s, n, distance: (n - s) * (s - n) * distance / 9,
    "quotient": lambda s, n, distance: s / n + n / (s.abs() + 1),
    "in place": lambda s, n, distance: (s * distance).add_(n).mul_(0.1 * distance),
    "torch's functions": lambda s, n, distance: torch.sub(torch.mul(input=s, other=distance), s, alpha=n),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, list(_BY_WHOLE_NUMBERS)))
@pytest.mark.parametrize("is_parameter", [True, False])
def test_whole_numbers_in_scores_may_change(name: str, is_parameter: bool) -> None:
    change, distance = _BY_WHOLE_NUMBERS[name], torch.arange(40)[:, None] - torch.arange(40)

    def scaled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, n: int) -> Tensor:
        return change(s, n, q - kv)

    def call(x: Tensor, n: int) -> Tensor:
        if is_parameter:
            return flexmasks.attention(x, x, x, score=scaled, n=n)
        return flexmasks.attention(x, x, x, score=lambda s, b, h, q, kv: change(s, n, q - kv))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for n in (2, 3, 5, 7):
        x = torch.randn(1, 2, 40, 16, requires_grad=True)
        exactly = exact(x)
        want, _ = attend(exactly, exactly, exactly, None, lambda s, n=n: change(s, n, distance))
        got = compiled(x, n)
        assert error(got, want) < TOLERANCE[torch.float32]
        (gradient,), (wanted,) = (torch.autograd.grad(y.square().sum(), z) for y, z in ((got, x), (want, exactly)))
        assert error(gradient, wanted) < 2 * TOLERANCE[torch.float32]
    assert graphs() <= 2


def test_the_inverse_of_a_mask_inside() -> None:
    documents = flexmasks.get_mask("document", document_ids=DOCUMENTS)
    check(
        lambda q, k, v: flexmasks.attention(q, k, v, mask=documents.inverse() & "causal"),
        *leaves(),
        want=lambda *x: attend(
            *x, (DOCUMENTS[:, :, None] != DOCUMENTS[:, None])[:, None] & torch.ones(LENGTH, LENGTH).tril().bool()
        )[0],
    )


def _near(width: Any) -> Callable[..., Tensor]:
    return lambda q, kv: (q - kv).abs() <= width


_IDS = torch.arange(40) // 7
# What a mask reads, as attributes of `_HELD`; what is put there later; and the mask.
_HELD: dict[str, Any] = {}
_REPLACED: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Tensor]]] = {
    "function": ({"a": torch.ge}, {"a": torch.eq}, lambda b, h, q, kv: _HELD["a"](q, kv)),
    "closure": ({"a": _near(5)}, {"a": _near(9)}, lambda b, h, q, kv: _HELD["a"](q, kv)),
    "closure over a tensor": (
        {"a": _near(torch.tensor(5))}, {"a": _near(torch.tensor(9))}, lambda b, h, q, kv: _HELD["a"](q, kv),
    ),
    "one of two places": (
        {"a": _IDS, "b": _IDS}, {"a": _IDS, "b": -torch.arange(40)},
        lambda b, h, q, kv: (_HELD["a"][q] == _HELD["a"][kv]) & (_HELD["b"][q] >= _HELD["b"][kv]),
    ),
    "one of two lists": (
        {"a": (ends := [4, 6]), "b": ends}, {"a": ends, "b": [9, 1]},
        lambda b, h, q, kv: (q - kv <= _HELD["a"][0]) & (kv - q <= _HELD["b"][1]),
    ),
    "longer list": ({"a": []}, {"a": [5]}, lambda b, h, q, kv: (q - kv).abs() <= sum(_HELD["a"]) + 1),
    "type": ({"a": int}, {"a": float}, lambda b, h, q, kv: (q - kv).abs() <= _HELD["a"](4.6) + _HELD["a"](0.6)),
    "NumPy scalar": ({"a": np.int64(5)}, {"a": np.int64(9)}, lambda b, h, q, kv: (q - kv).abs() <= _HELD["a"]),
}  # fmt: skip


def test_a_mask_may_read_a_parameter() -> None:
    """It gives it no gradient, and torch's kernels refuse those that want one."""
    width, q = torch.nn.Parameter(torch.tensor(9.0)), torch.randn(1, 2, 40, 16)
    mask = flexmasks.get_mask(lambda b, h, q, kv: (q - kv).abs() <= width)
    compiled = torch.compile(lambda: flexmasks.attention(q, q, q, mask=mask), fullgraph=True, backend="aot_eager")
    want = flexmasks.attention(q, q, q, mask=mask, backend="reference")
    assert error(compiled(), want.detach().double()) < TOLERANCE[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("name", _REPLACED)
def test_what_functions_read_may_be_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    before, after, function = _REPLACED[name]
    monkeypatch.setattr(sys.modules[__name__], "_HELD", dict(before))
    mask, q = flexmasks.get_mask(function), torch.randn(1, 2, 40, 16)
    compiled = torch.compile(lambda: flexmasks.attention(q, q, q, mask=mask), fullgraph=True, backend="eager")
    for held in (before, after):
        _HELD.update(held)
        want = flexmasks.attention(q, q, q, mask=mask, backend="reference")
        assert error(compiled(), want.double()) < TOLERANCE[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(
    "captured",
    [("causal", "other"), (None, True), (torch.int64, torch.int32), (("a", 1), ("b", 1)), (torch.le, torch.ge)],
    ids=["text", "None or True", "dtype", "tuple", "function"],
)
def test_what_functions_captured_may_change(captured: tuple[Any, Any], is_partial: bool) -> None:
    """Functions of the same code differ in what they captured: strings and the like choose what they compute."""
    torch._dynamo.reset()
    call = lambda q, mask: flexmasks.attention(q, q, q, mask=mask)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    q = torch.randn(2, 2, 40, 16)
    for what in (*captured, captured[0]):
        for n in (2, 3):
            values = what, n, torch.tensor([30, 20]) - n
            partial = functools.partial(functools.partial(_shown_to, *values[:2]), values[2], more=what)
            mask = flexmasks.get_mask(partial if is_partial else _shown(*values))
            want = flexmasks.attention(q, q, q, mask=mask, backend="reference")
            assert error(compiled(q, mask), want.double()) < TOLERANCE[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "learns"),
    [*one_in(2, [(_documents, True), (_window, False)]), *map(in_campaigns, [(_documents, False), (_window, True)])],
)
def test_layers_share_one_plan_which_the_backward_pass_reuses(made: Callable[[Tensor], Mask], learns: bool) -> None:
    forward, *backward = _counted(Model(2), made(DOCUMENTS), learns)
    of_one, *_ = _counted(Model(1), made(DOCUMENTS), learns)
    of_plan = ("aten.cumsum.default", "aten.scatter.src")
    lists = 1 if learns else 2  # flex_attention, which runs without gradients, takes lists of both directions
    assert [forward[name] for name in of_plan] == [of_one[name] for name in of_plan] == [lists] * 2
    assert [[x[name] for name in of_plan] for x in backward] == [[0, 0]] * learns


def _counted(model: Model, mask: Mask, learns: bool) -> list[collections.Counter[str]]:
    """Return how often each operation is in the graphs of a model's passes."""
    counted = []

    def boxed(module: torch.fx.GraphModule, _: Any) -> Any:
        from functorch.compile import make_boxed_func

        counted.append(collections.Counter(str(n.target) for n in module.graph.nodes))
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=boxed, bw_compiler=boxed, inference_compiler=boxed,
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    with torch.set_grad_enabled(learns):
        loss = torch.compile(model, fullgraph=True, backend=backend)(torch.randn(BATCH, LENGTH, 16), mask)
    if learns:
        loss.backward()
    return counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "is_causal"),
    [(torch.enable_grad, True), *one_in(2, [(torch.no_grad, False), (torch.inference_mode, True)])],
)
def test_a_tensor_that_changes_inside_a_graph_is_planned_again(mode: _Call, is_causal: bool) -> None:
    """Layers of a graph share a plan only while the mask's tensors are the same."""
    learns = mode is torch.enable_grad
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)

    def changed(given: Tensor) -> Iterator[Tensor]:
        ids = given.clone()
        yield ids
        ids = ids.clone() if learns else ids  # the backward pass reads the ids that a call has got
        ids[:, 10:] += 3
        yield ids
        ids = ids.clone() if learns else ids
        ids.view(-1)[-20:] += 3
        yield ids

    def call(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        made = _documents if is_causal else lambda ids: flexmasks.get_mask("document", document_ids=ids)
        outputs = [flexmasks.attention(q, k, v, mask=made(ids)) for ids in changed(given)]
        if learns:
            outputs += [flexmasks.attention(q, k, v, mask="sliding_window", window=n) for n in (1, 30, 1)]
        return torch.stack(outputs)

    def want(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        least = 0 if is_causal else -LENGTH
        same = [(ids[:, :, None] == ids[:, None])[:, None] & (distance >= least) for ids in changed(given)]
        outputs = [_naive(q, k, v, visible) for visible in same]
        if learns:
            outputs += [_naive(q, k, v, (distance >= 0) & (distance <= n)) for n in (1, 30, 1)]
        return torch.stack(outputs)

    tensors = *leaves(), DOCUMENTS
    if learns:
        check(call, *tensors, want=want)
        return
    with mode():
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
        torch.testing.assert_close(got.double(), want(*tensors), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("selective", [True, in_campaigns(False)])
def test_layers_in_checkpoints_that_share_a_plan(selective: bool) -> None:
    more = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _saved)} if selective else {}

    def call(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        mask, x = _documents(ids), q
        for _ in range(2):
            x = checkpoint(_two_kinds, x, k, v, mask, use_reentrant=False, **more)
        return x

    check(call, *(x[..., :SIZE] for x in leaves()), DOCUMENTS)


def _two_kinds(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    x = flexmasks.attention(q.sin(), k, v, mask=mask)
    return flexmasks.attention(x.cos(), k, v, mask="sliding_window", window=9)


# --- what a call may be made of ---


def _jagged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    nested = [torch.nested.nested_tensor_from_jagged(x, OFFSETS).transpose(1, 2) for x in (q, k, v)]
    return flexmasks.attention(*nested, mask="causal").transpose(1, 2).values()


def _inside_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return flexmasks.attention(q, k, v, mask="document", document_ids=DOCUMENTS)


def _saved(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op == torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _in_checkpoint(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexmasks.attention(q.sin(), k, v, mask=_CAUSAL_DOCUMENTS, score="alibi")

    return checkpoint(block, q, k, v, use_reentrant=False, **more)  # type: ignore[no-any-return]


_CAUSAL_DOCUMENTS = _documents(DOCUMENTS)
_WINDOW = 7


def _number(limit: int) -> Mask:
    return flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < limit))


def _with_tables(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, ids: Tensor, window: int) -> Tensor:
    return (ids[b, q] == ids[b, kv]) & (q - kv < window)


def _plain(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (kv % 7 != 3)


def _near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor) -> Tensor:
    return (q >= kv) & (table[q] - kv < 20)


_FUNCTIONS = {
    "closure": _users_documents(DOCUMENTS),
    "and_masks": flexmasks.get_mask(and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: DOCUMENTS[b, q] > 0)),
    "global number": flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < _WINDOW)),
    "default": flexmasks.get_mask(lambda b, h, q, kv, ids=DOCUMENTS: ids[b, q] == ids[b, kv]),
    "inverse": flexmasks.get_mask("causal") | ~flexmasks.get_mask("document", document_ids=DOCUMENTS),
    "parameters": flexmasks.get_mask(_with_tables, ids=DOCUMENTS, window=9),
    "plain": _plain,
}
_TABLE = torch.arange(128)
_BLOCK_MASKS: dict[str, _Call] = {
    "documents": lambda: flexmasks.block_mask(_CAUSAL_DOCUMENTS, LENGTH, batch=BATCH),
    "offset": lambda: flexmasks.block_mask("sliding_window", LENGTH, LENGTH, window=9, q_offset=5),
    "function": lambda: flexmasks.block_mask(_near, LENGTH, table=_TABLE),
    "data": lambda: flexmasks.block_mask(
        lambda b, h, q, kv: (q - kv) % (h + 3) == 0, LENGTH, heads=HEADS, as_data=True
    ),
}


def test_functions_that_only_torch_can_read_in_a_checkpoint() -> None:
    reading = lambda b, h, q, kv: (q >= kv) & (_TABLE[q] - kv < 20)  # noqa: E731
    for call in (
        {"mask": reading},
        {"block_mask": flexmasks.block_mask(reading, LENGTH)},
    ):
        attend = functools.partial(flexmasks.attention, **call)
        torch._dynamo.reset()
        step = lambda *x, attend=attend: checkpoint(attend, *x, use_reentrant=False)  # noqa: E731
        with pytest.raises(Exception, match=r"inside an activation checkpoint torch.compile cannot read the function"):
            torch.compile(step, fullgraph=True, backend="aot_eager")(*[x.requires_grad_() for x in leaves()])


@pytest.mark.slow
@pytest.mark.parametrize("name", _BLOCK_MASKS)
@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_block_masks_train(name: str, in_checkpoint: bool) -> None:
    block_mask = _BLOCK_MASKS[name]()

    def block(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        out: Tensor = flexmasks.attention(q.sin(), k, v, block_mask=block_mask, score="alibi", slopes=slopes)
        return out

    def call(*tensors: Tensor) -> Tensor:
        return checkpoint(block, *tensors, use_reentrant=False) if in_checkpoint else block(*tensors)

    seen = block_mask.mask_mod(*torch.meshgrid(*map(torch.arange, (BATCH, HEADS, LENGTH, LENGTH)), indexing="ij"))

    def want(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
        return attend(q.sin(), k, v, seen, lambda scores: scores + slopes[:, None, None] * distance)[0]

    check(call, *leaves(), torch.rand(HEADS), want=want, tolerance=1e-4)
    assert graphs() == 1


def test_block_masks_of_calls_that_torch_cannot_compile_on_a_cpu() -> None:
    """Its kernels give no lse there: the reference does."""
    block_mask = _BLOCK_MASKS["documents"]()

    def call(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flexmasks.attention(q, k, v, block_mask=block_mask, return_lse=True, backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    seen = block_mask.mask_mod(*torch.meshgrid(*map(torch.arange, (BATCH, HEADS, LENGTH, LENGTH)), indexing="ij"))
    with torch.no_grad():
        tensors = leaves()
        for got, want in zip(compiled("auto", *tensors), attend(*(x.double() for x in tensors), seen), strict=True):
            assert torch.allclose(got.double(), want, atol=1e-4)
        with pytest.raises(Exception, match=r"backend \\?'flex\\?' cannot run this call inside"):
            compiled("flex", *tensors)


_COMPOSED: dict[str, _Call] = {
    "score": lambda q, k, v, slopes: flexmasks.attention(
        q, k, v, mask="document", document_ids=DOCUMENTS, score=["alibi", "softcap"], slopes=slopes, cap=3.0
    ),
    "sinks and lse": lambda q, k, v, sinks: flexmasks.attention(
        q, k, v, mask=_CAUSAL_DOCUMENTS, sink_logits=sinks, return_lse=True
    ),
    "grouped heads": lambda q, k, v, _: flexmasks.attention(q, k[:, :1], v[:, :1], mask=_CAUSAL_DOCUMENTS) + _.sum(),
    "number as offset": lambda q, k, v, _: flexmasks.attention(q[:, :, :30], k, v, mask="causal", q_offset=9) + _.sum(),
    "made inside": lambda q, k, v, _: flexmasks.attention(
        q, k, v, mask=flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=DOCUMENTS)
    ) + _.sum(),
    "inverse made inside": lambda q, k, v, _: flexmasks.attention(
        q, k, v, mask=flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=DOCUMENTS).inverse()
    ) + _.sum(),
    "function inside": lambda q, k, v, _: flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: q - kv < 9) + _.sum(),
    "checkpoint": lambda q, k, v, _: _in_checkpoint(q, k, v) + _.sum(),
    "causal": lambda q, k, v, _: flexmasks.attention(q, k, v, mask="causal") + _.sum(),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, list(_COMPOSED)))
def test_composed(name: str) -> None:
    check(_COMPOSED[name], *leaves(), torch.rand(HEADS))


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, list(_FUNCTIONS)))
def test_users_functions(name: str) -> None:
    check(lambda q, k, v: flexmasks.attention(q, k, v, mask=_FUNCTIONS[name]), *leaves())


def _annotated(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, ids: Tensor, window: int = 30) -> Tensor:
    return (ids[b, q] == ids[b, kv]) & ((q - kv).abs() <= window)


def _annotated_score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, cap: float = 2.0) -> Tensor:
    return cap * torch.tanh(s / cap)


def test_functions_with_annotated_parameters() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask=_annotated, score=_annotated_score, ids=ids)

    q, k, v = leaves()
    check(call, q, k, v, torch.arange(q.shape[2]).expand(q.shape[0], -1) // 40)


def test_offsets_in_a_tensor() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return flexmasks.attention(q[:, :, :20], k, v, mask="causal", q_offset=starts)

    check(call, *leaves(), torch.tensor([50, 3]))


_ANGLES = 0.7 * torch.arange(2 * LENGTH)


def _of_places(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, angles: Tensor) -> Tensor:
    return s + torch.cos(angles[q] + kv)  # other places change more than a whole row by one number


_PLACED = flexmasks.get_score(_of_places, angles=_ANGLES)


@pytest.mark.parametrize(
    ("made", "offset"),
    [
        (lambda: _PLACED, torch.tensor([41, 3])),
        (lambda: lambda s, b, h, q, kv: _of_places(s, b, h, q, kv, angles=_ANGLES), 9),
    ],
    ids=["value", "function"],
)
@pytest.mark.parametrize("way", one_in(2, ["flex", "reference", "with gradients", "in a transform"]))
def test_scores_see_where_queries_start(way: str, made: _Call, offset: int | Tensor) -> None:
    backend = way if way in ("flex", "reference") else "auto"

    def call(q: Tensor, k: Tensor, v: Tensor, offset: int | Tensor) -> Any:
        attention = functools.partial(flexmasks.attention, score=made(), q_offset=offset, backend=backend)
        if way == "in a transform":
            return torch.func.vmap(attention)(q[None], k[None], v[None])[0]
        return attention(q, k, v)

    q, k, v = (x[:, :, -n:].requires_grad_(way == "with gradients") for x, n in zip(leaves(), (20, 0, 0), strict=True))
    at_first, places = torch.as_tensor(offset).view(-1, 1, 1, 1), torch.arange(LENGTH)
    added = torch.cos(0.7 * (places[:20, None] + at_first) + places)
    want, _ = attend(*map(exact, (q, k, v)), None, lambda s: s + added)
    out = torch.compile(call, fullgraph=True, backend="eager")(q, k, v, offset)
    assert error(out, want) < TOLERANCE[torch.float32]


@pytest.mark.slow
def test_varlen() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, sinks: Tensor) -> Tensor:
        return flexmasks.varlen_attention(q, k, v, offsets, mask="causal", score="alibi", sink_logits=sinks)

    check(call, *torch.randn(3, LENGTH, HEADS, SIZE).unbind(), OFFSETS, torch.rand(HEADS))


@pytest.mark.slow
def test_paged() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return flexmasks.paged_attention(q, k, v, table, lens, mask="causal")

    pool = torch.randn(2, 8, 16, HEADS, SIZE).unbind()
    check(call, torch.randn(BATCH, HEADS, 5, SIZE), *pool, torch.tensor([[0, 2, 4], [1, 3, 5]]), torch.tensor([40, 33]))


@pytest.mark.slow
def test_jagged() -> None:
    check(_jagged, *torch.randn(3, 60, HEADS, SIZE).unbind())


@pytest.mark.slow
def test_autocast() -> None:
    check(_inside_autocast, *leaves(), tolerance=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        check(lambda q, k, v: flexmasks.attention(q, k, v, mask=_CAUSAL_DOCUMENTS), *leaves(), tolerance=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*context_fn.*")
def test_selective_checkpoint() -> None:
    saving = functools.partial(create_selective_checkpoint_contexts, _saved)
    check(functools.partial(_in_checkpoint, context_fn=saving), *leaves(), want=_in_checkpoint)


@pytest.mark.slow
def test_many_scores_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmasks.backends.slices._MAX_SCORES", 5000)
    check(lambda q, k, v: flexmasks.attention(q, k, v, mask=_CAUSAL_DOCUMENTS), *leaves())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call",
    [
        {"mask": "causal"},
        {"mask": "sliding_window", "window": 100},
        {"mask": "document", "document_ids": torch.arange(600) // 150},
        {"mask": "grouped_tril", "seq_lens": torch.tensor([600, 77])},
        {"mask": "causal", "score": "softcap", "cap": 5.0},
        {"mask": "document", "document_ids": torch.arange(600) // 150, "score": "alibi", "return_lse": True},
        {"mask": flexmasks.packed("causal", [0, 100, 600])},
    ],
)
@pytest.mark.parametrize("length", [600, 16384])
def test_kernels_for_the_gpu(call: dict[str, Any], length: int) -> None:
    """The longer calls are long enough for FlashAttention 4 and FLASH, if they are installed."""
    if length > 600 and any(isinstance(v, Tensor | Mask) for v in call.values()):
        pytest.skip("its tensors have 600 elements")
    params = {n: v.cuda() if isinstance(v, Tensor) else v for n, v in call.items()}
    q, k, v = torch.randn(3, 2, 4, length, 64, device="cuda", dtype=torch.bfloat16).unbind()
    run = functools.partial(flexmasks.attention, **params)
    got = results(torch.compile(run, fullgraph=True), q, k, v)
    assert graphs() == 1
    for x, y in zip(got, results(run, q, k, v), strict=True):
        x, y = x.detach().float(), y.detach().float()
        assert float((x - y).norm()) <= 0.02 * float(y.norm())


def _same_bytes(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, small: Tensor) -> Tensor:
    return (q >= kv) & (small[b, q] + 120 == small[b, kv] + 120)  # the compiler would compute it in 32 bits


@pytest.mark.gpu
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("as_bits", [False, True])
def test_cuda_graphs_of_torch_compile(as_bits: bool, needs_grad: bool) -> None:
    """Each replay of a graph of mode="reduce-overhead" plans with the documents of its step."""
    q, k, v = torch.randn(3, 2, 4, 1024, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(needs_grad).unbind()
    small = torch.zeros(2, 1024, dtype=torch.int8, device="cuda")

    def call(ids: Tensor) -> Tensor:
        if as_bits:
            return flexmasks.attention(q, k, v, mask=_same_bytes, small=small)
        mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
        return flexmasks.attention(q, k, v, mask=mask)

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(6):
        ids = (torch.rand(2, 1024, device="cuda") < 0.01).cumsum(1).int()
        small.copy_(ids)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(ids).detach().float().clone()
        want = call(ids).detach().float()
        assert float((got - want).norm()) <= 0.02 * float(want.norm())
    assert counters["inductor"]["cudagraph_skips"] == 0


# --- what compiles again ---


@pytest.mark.slow
def test_changing_lengths_and_batch_sizes_compile_a_bounded_number_of_graphs() -> None:
    compiled = _compiled()
    for batch, n in ((2, 40), (3, 50), (4, 60), (5, 70)):
        q, k, v = torch.randn(3, batch, 1, n, SIZE).unbind()
        ids = (torch.arange(n) // n.bit_length()).expand(batch, n)
        call = {"mask": "document", "document_ids": ids, "return_lse": True}
        for x, y in zip(compiled(q, k, v, **call), flexmasks.attention(q, k, v, **call), strict=True):
            torch.testing.assert_close(x, y)
    assert graphs() <= 3


@pytest.mark.slow
def test_a_captured_number_that_changes_is_never_stale() -> None:
    q, k, v = leaves()
    compiled = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager")
    for limit in (3, 30, 11, 5):
        want = flexmasks.attention(q, k, v, mask=_number(limit), backend="reference")
        torch.testing.assert_close(compiled(q, k, v, mask=_number(limit), backend="reference"), want)
    assert graphs() <= 3


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": "casual"}, "did you mean 'causal'"),
        ({"mask": "sliding_window"}, "needs `window`"),
        ({"mask": "padding", "kv_lens": torch.zeros(3, dtype=torch.int64)}, "`kv_lens` must be int[B]"),
        ({"mask": "causal", "q_offset": torch.zeros(3, dtype=torch.int64)}, "`q_offset` must be an int from 0"),
        (
            {"mask": "causal", "backend": "flex_flash"},
            "'flex_flash' cannot run this call inside torch.compile: it runs",
        ),
        ({"mask": "causal", "sink_logits": torch.zeros(3)}, "`sink_logits` must be a floating tensor"),
    ],
)
def test_errors_say_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    compiled = torch.compile(flexmasks.attention, fullgraph=True, backend="eager")
    re.purge()  # torch cannot trace the compilation of a pattern
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        compiled(*leaves(), **arguments)


_REFUSED: dict[str, _Call] = {
    "fa4": lambda *qkv: flexmasks.attention(*qkv, mask="document", document_ids=DOCUMENTS, backend="fa4"),
    "short": lambda *qkv: flexmasks.attention(
        *qkv, mask=_causal_and("document", document_ids=DOCUMENTS), backend="short"
    ),
    "decode": lambda *qkv: flexmasks.attention(*qkv, mask=_reading(DOCUMENTS[0]), backend="decode", return_lse=True),
    "flex_flash": lambda *qkv: flexmasks.varlen_attention(
        *(x[0].transpose(0, 1) for x in qkv), OFFSETS, backend="flex_flash"
    ),
}


@pytest.mark.parametrize("backend", list(_REFUSED))
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_backend_that_refuses_says_so(backend: str, fullgraph: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without fullgraph torch leaves the user's graph at an error, and would trace the library's functions alone."""
    compiled = torch.compile(_REFUSED[backend], fullgraph=fullgraph, backend="eager", dynamic=backend == "short")
    with pytest.raises(ValueError, match=f"'{backend}' cannot run this call inside torch.compile: ") as caught:
        compiled(*leaves())
    assert type(pickle.loads(pickle.dumps(caught.value))) is ValueError
    assert not [r for r in caplog.records if r.name == "flexmasks"]  # what reaches the user is not logged, too


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_users_code_may_catch_the_error_of_a_backend(how: str, fullgraph: bool) -> None:

    def call(*qkv: Tensor) -> Tensor:
        try:
            out: Tensor = _REFUSED["fa4"](*qkv)
        except ValueError:
            out = flexmasks.attention(*qkv, mask="document", document_ids=DOCUMENTS)
        return out

    q, k, v = leaves()
    want = flexmasks.attention(q, k, v, mask="document", document_ids=DOCUMENTS, backend="reference")
    torch.testing.assert_close(torch.compile(call, fullgraph=fullgraph, backend=how)(q, k, v), want)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mask": "document", "document_ids": torch.zeros(2, 50, dtype=torch.long)}, "got int64[2, 50]"),
        ({"mask": "document", "document_ids": torch.zeros(2, LENGTH)}, "pass `x.long()`"),
        ({"score": "dense_bias", "bias": torch.ones(50, LENGTH)}, "must have a row for each of the 70 positions"),
        ({"block_mask": create_block_mask(and_masks(), None, None, 256, 256, "cpu")[:1]}, "was made for"),
    ],
)
def test_errors_take_a_few_lines(given: dict[str, Any], words: str) -> None:
    """The words are the first line, and the frames of torch and of the library are left out."""
    compiled = torch.compile(lambda q, k, v: flexmasks.attention(q, k, v, **given), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="flexmasks") as caught:
        compiled(*leaves())
    assert words in str(caught.value).splitlines()[0]
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) <= 20
    assert not any(f'File "{flexmasks.__path__[0]}' in line for line in lines)


def test_sdpa_would_run_unfused_with_values_of_another_head_size() -> None:
    """While torch traces, it cannot be asked for its kernel."""
    call = functools.partial(flexmasks.attention, mask="causal", backend="sdpa")
    q, k, v = leaves()
    with torch.no_grad():
        torch.compile(call, fullgraph=True, backend="eager")(q, k, v[..., :SIZE])
        torch._dynamo.reset()
        with pytest.raises(Exception, match="torch has no fused kernel for this call"):
            torch.compile(call, fullgraph=True, backend="eager")(q, k, v)


@pytest.mark.slow
def test_functions_that_only_torch_can_read(caplog: pytest.LogCaptureFixture) -> None:
    """A function made inside that captures, and one that calls a Mask: exact, and the log says what is faster."""
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("Dynamo asks a Mask that a function calls for its truth before torch 2.13")
    calling = flexmasks.get_mask(lambda b, h, q, kv: _CAUSAL_DOCUMENTS(b, h, q, kv))

    def call(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = ids + 1
        made = flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv))
        return made, flexmasks.attention(q, k, v, mask=calling)

    q, k, v = leaves()
    want = flexmasks.attention(q, k, v, mask=_CAUSAL_DOCUMENTS, backend="reference")
    with caplog.at_level(logging.WARNING, "flexmasks"):
        results = torch.compile(call, fullgraph=True, backend="eager")(q, k, v, DOCUMENTS)
    for out in results:
        torch.testing.assert_close(out, want)
    assert "'<lambda>' captures variables" in caplog.text
    assert "'<lambda>' reads the variable '_CAUSAL_DOCUMENTS'" in caplog.text
    assert caplog.text.count("write it at the top level of a module, with tensors and numbers as parameters") >= 2


_SPAN: Any = None
_FIRST_KEY: Any = 7


@pytest.mark.slow
def test_variables_that_get_another_kind_of_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mask knows where its variables are, and in which order, by the kinds of values that they held."""
    reading = flexmasks.get_mask(lambda b, h, q, kv: ((q - kv).abs() < _SPAN) & (q * 0 + kv >= _FIRST_KEY[0]))
    made = flexmasks.get_mask(lambda b, h, q, kv: (q - kv).abs() < _SPAN)
    q, k, v = leaves()
    compiled = torch.compile(flexmasks.attention, fullgraph=True, backend="eager")
    for span in (3, 9, torch.tensor(5)):
        monkeypatch.setattr(sys.modules[__name__], "_SPAN", span)
        want = flexmasks.attention(q, k, v, mask=made, backend="reference")
        torch.testing.assert_close(compiled(q, k, v, mask=made), want)
    monkeypatch.setattr(sys.modules[__name__], "_FIRST_KEY", torch.tensor([2]))
    want = flexmasks.attention(q, k, v, mask=reading, backend="reference")
    torch.testing.assert_close(compiled(q, k, v, mask=reading), want)


@pytest.mark.parametrize("q_offset", [0, 5])
def test_block_masks_of_any_length(q_offset: int) -> None:
    """dynamic=True makes numbers of objects symbolic, such as where the queries of a block mask start."""
    compiled = torch.compile(flexmasks.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 56):
        q, k, v = torch.randn(3, 1, 2, length, SIZE).unbind()
        q = q[:, :, : length - q_offset]
        made = flexmasks.block_mask("causal", length - q_offset, length, q_offset=q_offset)
        want = flexmasks.attention(q, k, v, mask="causal", q_offset=q_offset, backend="reference")
        torch.testing.assert_close(compiled(q, k, v, block_mask=made), want)


def _of_lists(name: str, length: int) -> flexmasks.Mask:
    if name == "topk":
        return flexmasks.get_mask("topk", indices=torch.randint(-1, length // 4, (length, 1, 5)), granularity=4)
    if name == "tree":
        return flexmasks.get_mask("tree", parents=torch.arange(length) // 2 - 1)
    counts = torch.arange(length + 1) // 2  # of keys before each row
    return flexmasks.get_mask("edges", crow=counts, col=torch.randint(0, length, (length // 2,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, ["topk", "edges", "tree"]))
def test_lists_of_any_length(name: str) -> None:
    """`len` of a tensor would make its length a constant of the graph, and so would `pad` with it as the value."""
    compiled = torch.compile(flexmasks.attention, fullgraph=True, dynamic=True, backend="eager")
    for length in (40, 44, 52):
        q, k, v = torch.randn(3, 1, 2, length, SIZE).unbind()
        mask = _of_lists(name, length)
        want = flexmasks.attention(q, k, v, mask=mask, backend="reference")
        torch.testing.assert_close(compiled(q, k, v, mask=mask, backend="reference"), want)
    assert graphs() == 1


def test_numbers_of_any_size() -> None:
    """Operators take whole numbers of 64 bits, functions capture any."""
    most = 2**63
    mask = flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & (kv.double() < float(most)))
    q = torch.randn(1, 2, 32, 16, dtype=torch.float64, requires_grad=True)
    call = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(q, q, q, mask=mask), flexmasks.attention(q, q, q, mask="causal"))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_sizes_may_be_symbols(gpu: bool, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend asks for the hash of a size, which symbols do not have, to say whether it can run a call."""
    if gpu:  # the questions are those of a GPU, the tensors not
        for module in (short, decode):
            monkeypatch.setattr(module, "_ON_GPU", ("cpu",))
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 4)
    q, k, v = (
        fakes.from_tensor(torch.empty(2, 4, 24, size, dtype=torch.bfloat16), symbolic_context=context)
        for size in (32, 32, 24)
    )
    mask: Any = encode(flexmasks.get_mask("causal"), q.device)
    score: Any = encode(flexmasks.get_score("alibi", slopes=torch.ones(4, requires_grad=True)), q.device)
    with fakes:
        encoded, facts = Encoded(mask.values(), score=score.values() if learns else None), (True, learns, False)
        call = inside_compile._call_of(encoded.plans(q, k), q, k, v, None, {}, facts)
        reasons = {name: table.why_not(name, call) for name in table.BACKENDS}
    assert reasons["reference"] is None
    if gpu and learns:
        assert reasons["short"] is None


@pytest.mark.parametrize(("documents", "heads"), [(3, 8), (8, 8), (8, 16)])
def test_blocks_made_for_one_head_are_as_partial_as_their_mask(documents: int, heads: int) -> None:
    """The fastest backend is the same for a mask and for its blocks."""
    offsets = torch.arange(documents + 1) * 64
    mask: Any = encode(flexmasks.packed("causal", offsets), offsets.device)
    q, facts = torch.empty(1, heads, 512, 16), (True, False, False)
    for encoded, lists in ((Encoded(mask.values()), ()), (Encoded(mask.values(), 0, (128, 128), (1, 1)), (q,))):
        call = inside_compile._call_of(encoded.plans(q, q, lists), q, q, q, None, {}, facts)
        assert call.mask.computed(heads).reads_tensors == (documents + 1 > heads)


# --- FlashAttention 4, with its kernels replaced by plain torch ---


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, arguments: Any, cap: float | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    left, right = arguments.get("window_size_left"), arguments.get("window_size_right")
    right = 0 if arguments.get("causal") else right
    visible = (distance >= -(math.inf if left is None else left)) & (distance <= (math.inf if right is None else right))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(~visible, -math.inf)
    if sinks is not None:  # one more key, without a value
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
        v = F.pad(v, (0, 0, 0, 0, 0, 1))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).contiguous(), scores.logsumexp(-1)


def _differentiate_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Any,
    arguments: Any,
    cap: Any,
    sinks: Tensor | None,
    _counts: None,
    _in_order: bool,
) -> tuple[Tensor, ...]:
    def outputs(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Any:
        out, lse = _attend_plainly(q, k, v, arguments, cap, *sinks)
        return out if d_lse is None else (out, lse)

    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    _, differentiate = torch.func.vjp(outputs, *inputs)
    gradients = differentiate(d_out if d_lse is None else (d_out, d_lse))
    return tuple(torch.empty_like(x).copy_(g) for x, g in zip(inputs, gradients, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        {"mask": "causal"},
        {"mask": "sliding_window", "window": 9},
        {"mask": "causal", "score": "softcap", "cap": 2.0},
        {"mask": "sliding_window", "window": 9, "return_lse": True},
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_windows_reach_flash_attention_4(
    call: dict[str, Any], with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def launch(*args: Any) -> tuple[Tensor, Tensor]:
        launched.append(args)
        return _attend_plainly(*args[:6])

    for name, value in (("forward", launch), ("backward", _differentiate_plainly)):
        monkeypatch.setattr(fa4_functions, name, value)
    monkeypatch.setattr(fa4, "MIN_QUERIES", 16)
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    monkeypatch.setattr(fa4_package, "knows_sinks", lambda: True)
    with torch.library._scoped_library("flexmasks", "FRAGMENT") as library:
        for operator in (fa4_functions.traced_forward, fa4_functions.traced_backward):
            library.impl(operator._opoverload, operator._init_fn, "CPU")
        # Learned sinks are the fourth tensor.
        tensors = [*leaves(), *([torch.tensor([0.5, -1.0])[:HEADS]] if with_sinks else [])]

        def attention(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor, **backend: Any) -> Any:
            return flexmasks.attention(q, k, v, sink_logits=sinks[0] if sinks else None, **call, **backend)

        check(attention, *tensors, want=functools.partial(attention, backend="reference"))
    assert launched
    assert all((args[5] is not None) == with_sinks for args in launched)


@pytest.mark.parametrize(
    ("mask", "length", "backend"),
    [
        (lambda n: flexmasks.get_mask("grouped_tril", seq_lens=torch.ones(4, dtype=torch.int64)), 8192, "flex_flash"),
        (lambda n: _causal_and("key_padding", attention_mask=torch.ones(4, n, dtype=torch.bool)), 8192, "flex_flash"),
        (lambda n: _causal_and("document", document_ids=torch.zeros(4, n, dtype=torch.int64)), 8192, "flex"),
        (lambda n: _causal_and("document", document_ids=torch.zeros(4, n, dtype=torch.int64)), 32768, "flex_flash"),
        (lambda n: flexmasks.get_mask("key_eviction", evicted=torch.zeros(n, dtype=torch.int64)), 32768, "flex"),
        (lambda n: _reading(torch.zeros(n, dtype=torch.int64)), 32768, "flex"),
    ],
    ids=["lengths", "padding", "documents", "long documents", "table", "function"],
)
def test_the_backend_for_gradients_follows_from_names_and_shapes(
    mask: Callable[[int], Any], length: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    reading = {"flex": (0, 0, 1.5, 1.5, 0.5, 0), "flex_flash": (0, 0, 1, 1, 3, 0)}  # dear for the second
    monkeypatch.setattr(times, "MEASURED", tuple(reading))
    monkeypatch.setattr(times, "HOST", {(name, True, False): 1 for name in reading})
    monkeypatch.setattr(times, "DEVICE", {(name, 64, True): numbers for name, numbers in reading.items()})
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        q, k, v = (torch.empty(4, 16, length, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        encoded = Encoded(encode(mask(length), q.device).values())
        for lists in ((), (q,)):  # blocks of the library, and given ones
            call = inside_compile._call_of(encoded.plans(q, k, lists), q, k, v, None, {}, (True, False, False))
            assert next(b.name for b in table._fastest_first(call) if b.name in ("flex_flash", "flex")) == backend


_TRANSFORMED: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "full": {},
    "documents": {"mask": "document", "document_ids": torch.arange(33) // 10},
    "score": {"mask": "sliding_window", "window": 3, "score": "alibi"},
    "lambda": {"mask": lambda b, h, q, kv: q - kv < 3},
    "lse": {"mask": "causal", "return_lse": True},
}


@pytest.mark.parametrize(
    ("name", "transform"), one_in(2, list(itertools.product(_TRANSFORMED, ["grad", "vmap", "jvp", "vmap of grad"])))
)
def test_transforms_inside_the_compiled_function(name: str, transform: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 33, 8).unbind()
    call = _TRANSFORMED[name]

    def attention(q: Tensor) -> Tensor:
        found = flexmasks.attention(q, k, v, **call)
        return found[1] if isinstance(found, tuple) else found

    gradient = torch.func.grad(lambda q: attention(q).square().sum())
    function: Any = {
        "grad": gradient,
        "vmap": lambda q: torch.func.vmap(attention)(torch.stack([q, 2 * q])),
        "jvp": lambda q: torch.func.jvp(attention, (q,), (q,))[1],
        "vmap of grad": lambda q: torch.func.vmap(gradient)(torch.stack([q, 2 * q])),
    }[transform]
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: function(q), fullgraph=True, backend="eager")
    assert torch.allclose(compiled(q), function(q), atol=1e-5)


def test_a_backend_that_torch_cannot_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = table.Backend("mine", lambda call: None, table.BACKENDS["reference"].kernel)
    monkeypatch.setattr(table, "BACKENDS", {"mine": mine, **table.BACKENDS})
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 8, 16)
        encoded = Encoded(encode(flexmasks.get_mask("causal"), q.device).values())
        call = inside_compile._call_of(encoded.plans(q, q), q, q, q, None, {}, [False] * 3)
    able, reasons = table.choose(call)
    assert reasons["mine"] == "torch.compile does not trace it"
    assert [b.name for b in able][-1] == "reference"


class _Ones(Kernel):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any) -> tuple[Tensor, None]:
        return torch.ones_like(q), None


def test_an_added_backend_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs what is encoded. Functions that only torch can read are for those backends that torch knows."""
    mine = table.Backend("mine", lambda call: None, lambda call: _Ones(), can_be_traced=True)
    monkeypatch.setitem(table.BACKENDS, "mine", mine)
    q, n = torch.randn(1, 2, 40, 16), torch.tensor(7)

    def call(backend: str, **more: Any) -> Tensor:
        compiled = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager")
        return compiled(q, q, q, mask="causal", backend=backend, **more)

    assert torch.equal(call("mine"), torch.ones_like(q))
    score = lambda score, b, h, q, kv: score - n * kv  # noqa: E731
    want = flexmasks.attention(q, q, q, mask="causal", score=score, backend="reference")
    torch.testing.assert_close(call("auto", score=score), want)
    with pytest.raises(Exception, match="only torch can read its functions"):
        call("mine", score=score)


def test_given_blocks_have_the_backends_that_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4_package, "why_missing", lambda: "")
    monkeypatch.setattr(fa4_package, "_import_failures", [])
    on_gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(flex_flash, "_fits_blocks", lambda device: True)
    causal = encode(flexmasks.get_mask("causal"), torch.device("cuda")).values()

    def reasons(mask: Any, block_size: tuple[int, int], size: int = 64) -> dict[str, str]:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
            q, k, v = (torch.empty(4, 16, 8192, size, dtype=torch.bfloat16) for _ in range(3))
            plans = Encoded(mask, 0, block_size).plans(q, k, (q,))
            call = inside_compile._call_of(plans, q, k, v, None, {}, [False] * 3)
            able, reasons = table.choose(call)
            return {**dict.fromkeys((b.name for b in able), ""), **reasons}

    found = reasons(causal, (128, 128))
    assert found["flex_flash"] == ""
    assert all(found[name].startswith("it knows only") for name in ("fa4", "sdpa"))
    assert reasons(causal, (128, 128), size=256)["flex_flash"] == flex_flash.only_blocks_of((128, 64))
    for size, block_size in ((256, (128, 64)), (192, (128, 96)), (128, (128, 128))):
        assert reasons(causal, block_size, size=size)["flex_flash"] == ""
    assert reasons(causal, (128, 128), size=192)["flex_flash"] == flex_flash.only_blocks_of((128, 96))
    found = reasons(("unknown", ""), (128, 128))
    assert next(name for name in found if not found[name]) == "flex"
    assert found["flex_flash"] == "it may miscompile the function, which reads variables that may change"


def _causal_and(name: str, **params: Tensor) -> flexmasks.Mask:
    return flexmasks.get_mask("causal") & flexmasks.get_mask(name, **params)


def _same(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, ids: Tensor) -> Tensor:
    return ids[q] == ids[kv]


def _reading(ids: Tensor) -> flexmasks.Mask:
    return flexmasks.get_mask(_same, ids=ids)


# --- sizes and numbers that change ---


def _naive(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = (q.double() @ k.double().mT * scale).masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v.double()


def _compiled(call: _Call = flexmasks.attention, **how: Any) -> _Call:
    """Return a compiled call without AOTAutograd, which takes half of the time and decides no guard of Dynamo's."""
    return torch.compile(call, fullgraph=True, backend="eager", **how)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", pytest.param("document", marks=pytest.mark.campaign)])
def test_batch_sizes_share_a_graph(mask: str) -> None:
    compiled = _compiled()
    for batch in range(2, 7):
        q, k, v = torch.randn(3, batch, 2, 40, 8)
        ids = torch.randint(0, 3, (batch, 40)).sort(-1).values
        out = compiled(q, k, v, mask=mask, **({"document_ids": ids} if mask == "document" else {}))
        of_documents = ids[:, None, :, None] == ids[:, None, None]
        visible = of_documents if mask == "document" else torch.ones(40, 40, dtype=torch.bool).tril()
        assert torch.allclose(out.double(), _naive(q, k, v, visible), atol=1e-5)
    assert graphs() == 2


@pytest.mark.slow
@pytest.mark.parametrize("queries", [pytest.param(1, marks=pytest.mark.campaign), 5])
def test_offsets_of_a_growing_cache_share_a_graph(queries: int) -> None:
    compiled = _compiled()
    for keys in range(40, 44):
        q, (k, v) = torch.randn(2, 2, queries, 8), torch.randn(2, 2, 2, keys, 8)
        out = compiled(q, k, v, mask="causal", q_offset=keys - queries)
        visible = torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]
        assert torch.allclose(out.double(), _naive(q, k, v, visible), atol=1e-5)
    assert graphs() == 2


@pytest.mark.slow
def test_parameters_of_unusual_types() -> None:
    @flexmasks.register_mask()
    def unusual_types(b, h, q, kv, *, length: int, tensors, dtype, device, number):  # type: ignore[no-untyped-def]
        return (q >= kv) & (kv != length)

    q = torch.randn(1, 2, LENGTH, 8)
    distance = torch.arange(LENGTH)
    visible = (distance[:, None] >= distance) & (distance != 9)
    unusual = {"tensors": {"seen": distance}, "dtype": torch.float64, "device": torch.device("cpu"), "number": math.inf}
    out = _compiled()(q, q, q, mask="unusual_types", length=9, **unusual)
    assert torch.allclose(out.double(), _naive(q, q, q, visible), atol=1e-5)


@pytest.mark.slow
def test_a_symbolic_offset_that_a_guard_has_fixed() -> None:
    def run(q: Tensor, k: Tensor, n: int) -> Tensor:
        if n == 3:
            q = q + 1
        return flexmasks.attention(q, k, k, mask="causal", q_offset=n)

    compiled = _compiled(run, dynamic=True)
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 60, 8)
    distance = torch.arange(40)[:, None] - torch.arange(60)
    want = _naive(q + 1, k, k, distance + 3 >= 0)
    assert torch.allclose(compiled(q, k, 3).double(), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.campaign)])
def test_numbers_that_change(dynamic: bool | None) -> None:
    """Each compiles a graph of its own."""
    compiled = _compiled(dynamic=dynamic)
    q, k, v = torch.randn(3, 2, 2, 40, 8)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    for window in (5, 6):
        out = compiled(q, k, v, mask="sliding_window", window=window)
        visible = (distance >= 0) & (distance <= window)
        assert torch.allclose(out.double(), _naive(q, k, v, visible), atol=1e-5)
    assert graphs() == 2
    for cap in (3.5, 4.5):
        out = compiled(q, k, v, mask="causal", score="softcap", cap=cap)
        want = flexmasks.attention(q, k, v, mask="causal", score="softcap", cap=cap, backend="reference")
        assert torch.allclose(out, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dynamic"),
    [*one_in(2, [("bigbird", True), ("t5_bias", True)]), *map(in_campaigns, [("bigbird", None), ("t5_bias", None)])],
)  # fmt: skip
def test_numbers_of_tables_that_change(kind: str, dynamic: bool | None) -> None:
    """Tables that are computed while torch traces take numbers that torch would make symbolic."""
    compiled = _compiled(dynamic=dynamic)
    for n in (4, 6) if dynamic else (4, 6, 8):
        calls: dict[str, tuple[int, dict[str, Any]]] = {
            "bigbird": (8 * n, {"mask": "bigbird", "length": 8 * n, "block": n, "random_blocks": 2}),
            "t5_bias": (40, {"score": "t5_bias", "table": torch.randn(2 * n, 2), "max_distance": 4 * n}),
        }
        length, call = calls[kind]
        q, k, v = torch.randn(3, 2, 2, length, 8)
        want = flexmasks.attention(q, k, v, backend="reference", **call)
        assert torch.allclose(compiled(q, k, v, **call), want, atol=1e-5)


@pytest.mark.slow
def test_totals_of_packed_sequences_share_a_graph() -> None:
    compiled = _compiled(functools.partial(flexmasks.varlen_attention, mask="causal"))
    for total in (60, 67, 126):
        q, k, v = torch.randn(3, total, 2, 8)
        offsets = torch.tensor([0, total // 3, total - 3])
        want = flexmasks.varlen_attention(q, k, v, offsets, mask="causal", backend="reference")
        assert torch.allclose(compiled(q, k, v, offsets), want, atol=1e-5)
    assert graphs() == 2


def _rows(n: int, parts: int = 8) -> Tensor:
    """Return numbers of parts, other ones for each batch element, [2, n]."""
    return torch.arange(n) // torch.tensor([[max(1, n // parts)], [max(1, n // 3)]])


_OF_LENGTHS: dict[str, Callable[[int], dict[str, Any]]] = {
    "padding": lambda n: {"kv_lens": torch.tensor([n, n // 2])},
    "grouped_tril": lambda n: {"seq_lens": torch.tensor([n, n // 2])},
    "prefix_lm": lambda n: {"prefix_len": torch.tensor([n // 3, 5])},
    "key_padding": lambda n: {"attention_mask": torch.arange(n) < torch.tensor([[n], [n // 2]])},
    "document": lambda n: {"document_ids": _rows(n)},
    "causal": lambda n: {"q_offset": torch.tensor([0, 7])},
    "sliding_window": lambda n: {"window": torch.tensor(20)},
    "chunked_causal": lambda n: {"chunk": 50, "start": torch.tensor([0, 9])},
    "bidirectional_spans": lambda n: {"span_ids": _rows(n) - 1},
    "causal_blockwise": lambda n: {"block_ids": _rows(n)},
    "cross_document": lambda n: {"q_document_ids": _rows(n), "kv_document_ids": _rows(n, 5)},
    "dense": lambda n: {"visible": torch.rand(2, 1, n, n) < 0.3},
    "dilated_window": lambda n: {"window": torch.tensor(20), "dilation": 2},
    "flashmask": lambda n: {
        "causal": True, "startend_row_indices": (torch.arange(n) + 40).clamp(max=n).int().view(n, 1).expand(2, 1, n, 1),
    },
    "global_tokens": lambda n: {"tokens": torch.rand(2, n) < 0.1},
    "key_eviction": lambda n: {"evicted": torch.randint(1, 2 * n, (2, n))},
    "longformer": lambda n: {"window": 9, "tokens": torch.rand(2, n) < 0.1},
    "multi_item": lambda n: {"prefix_len": torch.tensor([9, 20]), "item_positions": _rows(n)},
    "packed": lambda n: {"inner": flexmasks.get_mask("causal"), "offsets": torch.tensor([0, n // 3, n - 5])},
    "shared_prefix": lambda n: {
        "document_ids": _rows(n).clamp(max=7), "prefix_of": torch.tensor([-1, 0, 0, -1, 3, 3, -1, 6]),
    },
    "sink_window": lambda n: {"sinks": torch.tensor(3), "window": torch.tensor(20)},
    "slices": lambda n: {
        "q_ranges": torch.tensor([[0, n // 2], [n // 2, n]]), "kv_ranges": torch.tensor([[0, n // 2], [0, n]]),
        "types": torch.tensor([1, 0]),
    },
    "tree": lambda n: {"parents": (torch.arange(n) - 1 - torch.arange(n) % 3 % 2).clamp(min=-1).expand(2, n)},
    "vertical_slash": lambda n: {
        "vertical": torch.tensor([[[1, 9]] * 2] * 2), "slash": torch.tensor([[[0, 30]] * 2] * 2),
    },
    "vision_cross": lambda n: {
        "intervals": torch.tensor([[0, n // 2], [n // 2, n]]), "image_ids": _rows(n, 2).clamp(max=1),
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dynamic", "lengths"),
    [
        *one_in(2, [("padding", None, (70,))]),
        *(in_campaigns((name, how, (96, 160, 70))) for name in _OF_LENGTHS for how in (None, True)),
    ],
)
def test_compiled_training_at_other_lengths(name: str, dynamic: bool | None, lengths: tuple[int, ...]) -> None:
    """By Inductor, which aot_eager leaves out, with a batch."""

    def call(params: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flexmasks.attention(q, k, v, mask=name, **params)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    for n in lengths:
        q, k, v = torch.randn(3, 2, 2, n, 16)
        params = _OF_LENGTHS[name](n)
        q = q[:, :, 7:] if "q_offset" in params else q  # queries that start later end among the keys
        got, want = (results(functools.partial(c, params), q, k, v) for c in (compiled, call))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)
    assert graphs() <= 3


@pytest.mark.slow
@pytest.mark.parametrize("decodes", [False, True])
def test_symbolic_lengths_of_what_masks_read(decodes: bool) -> None:
    """A kernel needs the sizes of the tensors that it reads: here of documents, with a length that becomes symbolic."""
    call = torch.compile(flexmasks.attention, fullgraph=True)
    for length in (220, 190, 205):
        q_len = 7 if decodes else length
        q, k, v = torch.randn(2, 4, q_len, 16), *torch.randn(2, 2, 4, length, 16)
        ids = torch.randint(0, 4, (2, length)).sort(1).values
        mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
        rows = torch.arange(length - q_len, length)
        visible = (rows[:, None] >= torch.arange(length)) & (ids[:, rows, None] == ids[:, None])
        with torch.no_grad():
            got = call(q, k, v, mask=mask, q_offset=torch.full((2,), length - q_len))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible[:, None])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


# --- what Inductor makes of it ---

# Lengths that neither blocks nor the tables' steps divide, with queries in one block of 128 and in two.
_KV_LEN, _STEP = 200, 48
_OPEN = torch.tensor([True, False, True, False, True])  # by steps of keys


def _steps(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return _OPEN[kv // _STEP]


def _first_keys(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv // 128 == 0


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _more(scores: Tensor, table: Tensor) -> Tensor:
    return scores + table[:, torch.arange(scores.shape[-1]) // _STEP].unsqueeze(-2)


class _Road(NamedTuple):
    """A way into a compiled function: a call of q, k, v and a table [H, steps], and what it computes."""

    call: Callable[..., Any]  # its first argument is what `given` makes outside the compiled function
    sees: Callable[..., Tensor]
    given: Callable[[int], Any] = lambda q_len: None
    changes: Callable[..., Tensor] | None = None
    has_sinks: bool = False


def _by_score(given: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, **how: Any) -> Any:
    """Only torch can read this score, which captures a tensor of the graph."""
    score = lambda s, b, h, q, kv: s + table[h, kv // _STEP]  # noqa: E731
    blocks = {} if given is None else {"block_mask": given}
    return flexmasks.attention(q, k, v, score=score, q_offset=0, **blocks, **how)


def _by_torchs_name(given: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wanted = flex.AuxRequest(lse=True, max_scores=True)
    out, aux = flex.flex_attention(q, k, v, block_mask=given, enable_gqa=True, return_aux=wanted)
    return out, aux.lse, aux.max_scores


def _of_table(given: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    is_open = table.detach()[0] > 0  # in the graph, and only torch can read a function that captures it
    return flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: is_open[kv // _STEP], q_offset=0)


def _by_mask(mask: Any, **how: Any) -> Callable[..., Any]:
    return lambda given, q, k, v, table: flexmasks.attention(q, k, v, mask=mask, q_offset=0, **how)


def _with_sinks(given: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
    return flexmasks.attention(q, k, v, block_mask=given, sink_logits=table[:, 0], return_lse=True)


def _with_blocks(made: Callable[[int, int], Any] | None = None, **how: Any) -> Callable[..., Any]:
    def call(given: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        given = made(q.shape[2], k.shape[2]) if made is not None else given
        return flexmasks.attention(q, k, v, block_mask=given, **how)

    return call


def _in_torchs_blocks(mask_mod: Callable[..., Tensor]) -> Callable[[int], Any]:
    return lambda q_len: create_block_mask(mask_mod, None, None, q_len, _KV_LEN, "cpu")


def _in_own_blocks(mask: Any, **how: Any) -> Callable[[int], Any]:
    return lambda q_len: flexmasks.block_mask(mask, q_len, _KV_LEN, q_offset=0, **how)


_TABLE_OF_HEADS = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def _table_of_heads_is_positive(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return _TABLE_OF_HEADS[0, kv // _STEP] > 0


_BLOCKS = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
_ROADS = {
    "torch's blocks": _Road(_with_blocks(), _causal, _in_torchs_blocks(_causal)),
    "torch's blocks, lse": _Road(_with_blocks(return_lse=True), _causal, _in_torchs_blocks(_causal)),
    "torch's blocks of a table": _Road(_with_blocks(), _steps, _in_torchs_blocks(_steps)),
    "torch's blocks and a score": _Road(_by_score, _causal, _in_torchs_blocks(_causal), _more),
    "torch's name": _Road(_by_torchs_name, _causal, _in_torchs_blocks(_causal)),
    "own blocks": _Road(_with_sinks, _causal, _in_own_blocks("causal"), has_sinks=True),
    "own blocks of a table": _Road(_with_blocks(), _steps, _in_own_blocks(_steps)),
    "own blocks and a score": _Road(_by_score, _causal, _in_own_blocks("causal"), _more),
    "data": _Road(_with_blocks(return_lse=True), _steps, _in_own_blocks(_steps, as_data=True)),
    "blocks made inside": _Road(_with_blocks(lambda m, n: flexmasks.block_mask("causal", m, n, q_offset=0)), _causal),
    "blocks of a table made inside": _Road(
        _with_blocks(lambda m, n: flexmasks.block_mask(_steps, m, n, q_offset=0)), _steps
    ),
    "torch's name makes blocks inside": _Road(
        _with_blocks(lambda m, n: flex.create_block_mask(_causal, None, None, m, n, "cpu")), _causal
    ),
    "name": _Road(_by_mask("chunked", chunk=128), lambda b, h, q, kv: q // 128 == kv // 128),
    "name with a table": _Road(
        _by_mask("block_sparse", visible_blocks=_BLOCKS, block=(128, _STEP), return_lse=True),
        lambda b, h, q, kv: _BLOCKS[q // 128, kv // _STEP],
    ),
    "function": _Road(_by_mask(_steps), _steps),
    "function of a quotient": _Road(_by_mask(_first_keys), _first_keys),
    "function of a table that only torch reads": _Road(_of_table, _table_of_heads_is_positive),
    "Mask": _Road(
        _by_mask(flexmasks.get_mask("causal") & flexmasks.get_mask(_steps), return_lse=True),
        lambda b, h, q, kv: _OPEN[kv // _STEP] & (q >= kv),
    ),
    "score": _Road(functools.partial(_by_score, mask=_steps), _steps, changes=_more),
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2, 60), in_campaigns(pytest.param((2, 4, 2, 170)))], ids=str)
@pytest.mark.parametrize("learns", [True, in_campaigns(False)])
@pytest.mark.parametrize("name", one_in(6, list(_ROADS)))
def test_every_road_by_inductor(name: str, learns: bool, sizes: tuple[int, int, int, int]) -> None:
    """Against float64: "aot_eager" is right where Inductor makes wrong code."""
    road, (batch, heads, kv_heads, q_len) = _ROADS[name], sizes
    given = road.given(q_len)
    visible = road.sees(*torch.meshgrid(*map(torch.arange, (batch, heads, q_len, _KV_LEN)), indexing="ij"))

    def want(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        changed = None if road.changes is None else functools.partial(road.changes, table=table)
        out, lse = attend(q, k, v, visible, changed)
        if road.has_sinks:
            sinks = table[:, :1]
            out, lse = out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks)
        scores = q @ k.repeat_interleave(heads // kv_heads, 1).mT / 4
        return out, lse, scores.masked_fill(~visible, -math.inf).amax(-1)

    def found(call: _Call, leaves: Sequence[Tensor]) -> list[list[Tensor]]:
        outputs = call(*leaves)
        outputs = [*outputs] if isinstance(outputs, tuple) else [outputs]
        if not learns:
            return [outputs, []]
        total = sum((x.nan_to_num(neginf=0.0).square()).sum() for x in outputs[:2])
        return [outputs, [*torch.autograd.grad(total, leaves, materialize_grads=True)]]

    compiled = torch.compile(functools.partial(road.call, given), fullgraph=True)
    q, k, v = torch.randn(batch, heads, q_len, 16), *torch.randn(2, batch, kv_heads, _KV_LEN, 16)
    leaves = [q, k, v, _TABLE_OF_HEADS[:heads].clone()]
    got, gradients = found(compiled, [x.requires_grad_(learns) for x in leaves])
    count = len(got)
    wanted, of_wanted = found(lambda *x: want(*x)[:count], [exact(x).requires_grad_(learns) for x in leaves])
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    assert all(error(x, y) < 1e-5 for x, y in zip(gradients, of_wanted, strict=True))
