"""Functions that torch's FLASH compiler miscompiles are found before they run.

An interpreter makes the same mistakes: for each operation it follows the code that the compiler writes, read from
torch's CuteDSLOpOverrides and CuTe.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functions import compiled, expressions, short_and_campaign
from helpers import TOLERANCE, error, on_gpu_of, one_in, skip_unless_flash_takes, traced, try_examples
from hypothesis import event, reject
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmasks
from flexmasks import road
from flexmasks.backends import fa4_package, flex_flash, forms
from flexmasks.backends.exact import outside_table
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.request import Request
from flexmasks.road import plan_call
from flexmasks.spec.numbers import MAX_COMPILED_VALUES

CPU = torch.device("cpu")
SIZES = (2, 2, 5, 5)


class AsCompiled(torch.fx.Interpreter):
    """Interpreter that runs a traced function for one pair as FLASH's compiler would."""

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        name = str(n.target)
        if name.startswith("aten.remainder"):
            return torch.fmod(*(torch.as_tensor(x) for x in args)).to(n.meta["val"].dtype)
        if name.startswith("aten.where") and not any(self.moves(x) for x in n.args[1:]):
            return torch.where(args[0], args[1].bool(), args[2].bool()).to(n.meta["val"].dtype)
        if name.startswith("aten.index") and any(bool((i < 0).any()) for i in args[1]):
            out = super().run_node(n)  # any different value will do: the kernel reads memory before the tensor
            return ~out if out.dtype == torch.bool else out + 1
        to_bool = (
            n.op == "call_function" and isinstance(n.meta.get("val"), Tensor) and n.meta["val"].dtype == torch.bool
        )
        if to_bool and re.search("_to_copy|convert_element_type|logical", name):
            return n.target(*map(_truth, args), **kwargs)  # type: ignore[operator]
        return super().run_node(n)

    def moves(self, x: Any) -> bool:
        """Return whether a node depends on the pair or is read from a tensor.

        The compiler treats all other nodes as numbers.
        """
        if not isinstance(x, torch.fx.Node) or re.search("full|zeros|ones|scalar_tensor", str(x.target)):
            return False
        if x.op == "get_attr":
            return bool(self.fetch_attr(str(x.target)).ndim)
        return x.op == "placeholder" or any(map(self.moves, x.all_input_nodes))


def _truth(x: Any) -> Any:
    """Convert a number to a truth value as the kernel does: by its lowest bit, or whether it is 0.0."""
    if not isinstance(x, Tensor) or x.dtype == torch.bool:
        return x
    return x == 0 if x.is_floating_point() else (x & 1).bool()


def _wrong(function: Callable[..., Tensor], *score: Tensor) -> bool:
    """Return whether FLASH would give another value for some pair."""
    module = traced(function, bool(score))
    every = itertools.product(*(range(n) for n in SIZES))
    pairs = [[torch.tensor(i, dtype=torch.int32) for i in pair] for pair in every]
    values = [[run.run(*score, *pair) for pair in pairs] for run in (torch.fx.Interpreter(module), AsCompiled(module))]
    return not all(torch.equal(x, y) or bool(x.isnan() and y.isnan()) for x, y in zip(*values, strict=True))


Functions = dict[str, Callable[..., Tensor]]


def wrong_masks(device: str = "cpu") -> Functions:
    starts = torch.tensor([-3, 4], dtype=torch.int32, device=device)
    flags = torch.tensor([True, False, False] * 4, device=device)
    return {
        "windows of heads": lambda b, h, q, kv: q - kv <= torch.where(h < 1, 2, 3),
        "numbers as tensors": lambda b, h, q, kv: q - kv <= torch.where(h < 1, torch.tensor(2), torch.tensor(3)),
        "like": lambda b, h, q, kv: torch.where(q > kv, torch.zeros_like(q), torch.full_like(q, 3)) > 1,
        "filled": lambda b, h, q, kv: torch.full_like(q, 2).masked_fill(h < 1, 3) > q - kv,
        "folded": lambda b, h, q, kv: torch.where(q > kv, q * 0, q * 0 + 3) > 1,
        "of each other": lambda b, h, q, kv: kv <= torch.where(h < 1, torch.tensor(2) + 1, 4),
        "distance": lambda b, h, q, kv: (q - kv) % 3 == 1,
        "function": lambda b, h, q, kv: torch.remainder(kv - q, 4) < 2,
        "alpha": lambda b, h, q, kv: torch.add(q, kv, alpha=-1) % 3 == 1,
        "from the front": lambda b, h, q, kv: (q + starts[b]) % 3 == kv % 3,
        "by a negative number": lambda b, h, q, kv: q % -3 == -1,
        "used twice": lambda b, h, q, kv: ((q - kv) % 3 == 0) | ((q - kv) % 3 == 2),
        "a bit": lambda b, h, q, kv: (q & 2).bool() | (kv == q),
        "numbers as truth": lambda b, h, q, kv: torch.logical_or(q & 2, kv == q),
        "before a table, by a power": lambda b, h, q, kv: flags[4 - (torch.exp2(-h - 1.0) * 10.0).int() - q // 4096],
        "before a table": lambda b, h, q, kv: flags[(q - kv) // 4096 - 1],
        "before a table of rows": lambda b, h, q, kv: flags[q // 2 % 4 - kv // 2 % 4 + 1],
        "before a table of columns": lambda b, h, q, kv: flags[q % 3 - kv % 3 + 1],
    }


def wrong_scores() -> Functions:
    return {
        "factor": lambda score, b, h, q, kv: score * torch.where(q > kv, 2.0, 0.5),
        "added": lambda score, b, h, q, kv: score + torch.where(q >= kv, 0.0, -5.0),
        "filled": lambda score, b, h, q, kv: score + torch.zeros_like(score).masked_fill(kv > q - 2, -5.0),
        "fraction": lambda score, b, h, q, kv: score + score % 1.0,
    }


def other_scores() -> Functions:
    """Return scores that are wrong in the backward pass only, or not known to be right."""
    return {
        "infinite": lambda score, b, h, q, kv: score * torch.log(q - kv + 1.0),
        "divided": lambda score, b, h, q, kv: score / (q - kv + 1.0),
        "steep": lambda score, b, h, q, kv: score * torch.exp(2.0 * (kv - q)),
        "softplus": lambda score, b, h, q, kv: F.softplus(score),
        "in place": lambda score, b, h, q, kv: score.clone().mul_(2.0),
        "bits": lambda score, b, h, q, kv: score + (q >> 1),
    }


def right_functions() -> tuple[Functions, Functions]:
    offsets, of_heads = torch.tensor([-3, 4], dtype=torch.int32), torch.tensor([1.0, 2.0])
    of_distances = torch.arange(9)
    return {
        "one number": lambda b, h, q, kv: torch.where(h < 1, q, 3) >= kv,
        "truth values": lambda b, h, q, kv: torch.where(q >= kv, True, False),
        "distance, 0": lambda b, h, q, kv: (q - kv) % 3 == 0,
        "distance, not 0": lambda b, h, q, kv: (q - kv) % 3 != 0,
        "distance from the least": lambda b, h, q, kv: (q - kv + 4) % 3 == 1,
        "sum": lambda b, h, q, kv: (q + kv) % 3 == 1,
        "absolute": lambda b, h, q, kv: (q - kv).abs() % 3 == 1,
        "chunks": lambda b, h, q, kv: (q // 5 + kv * 2) % 3 == 1,
        "bits": lambda b, h, q, kv: ((q - kv) & 3) < 2,
        "by one": lambda b, h, q, kv: offsets[(q - kv) % 1] <= q,
        "a table": lambda b, h, q, kv: offsets[b] <= q - kv,
        "distances": lambda b, h, q, kv: of_distances[q - kv + 4] > 3,
        "distances in rows": lambda b, h, q, kv: of_distances[q // 2 - kv // 2 + 2] > 1,
        "distances in columns": lambda b, h, q, kv: of_distances[q % 3 - kv % 3 + 2] > 1,
        "least": lambda b, h, q, kv: of_distances[torch.where(q - kv < -1, -1, q - kv) + 1] > 3,
        "negated": lambda b, h, q, kv: ~((q < kv) ^ (h == 0)),
    }, {
        "scores": lambda score, b, h, q, kv: torch.where(q > kv, score * 2.0, score * 0.5),
        "hidden": lambda score, b, h, q, kv: torch.where(q > kv, score, -torch.inf),
        "heads": lambda score, b, h, q, kv: score * of_heads[h],
        "cap": lambda score, b, h, q, kv: 30 * torch.tanh(score / 30),
        "slopes": lambda score, b, h, q, kv: score - torch.exp2(-(h + 1) * 0.5) * (q - kv),
        "square": lambda score, b, h, q, kv: score - 0.1 * (q - kv) ** 2,
        "near": lambda score, b, h, q, kv: score * torch.exp(-0.5 * (q - kv).abs()),
    }


def miscompiled(
    function: Callable[..., Tensor], device: torch.device, sizes: tuple[int, ...], is_score: bool = False
) -> str | None:
    """Return the first reason why FLASH may get a function wrong, or None."""
    return next(iter(outside_table(function, device, sizes, is_score)), None)


@pytest.mark.parametrize("name", wrong_masks())
def test_wrong_masks_are_found(name: str) -> None:
    function = wrong_masks()[name]
    assert _wrong(function)
    assert miscompiled(function, CPU, SIZES) is not None


@pytest.mark.parametrize("name", wrong_scores())
def test_wrong_scores_are_found(name: str) -> None:
    function = wrong_scores()[name]
    assert _wrong(function, torch.tensor(-1.25))
    assert miscompiled(function, CPU, SIZES, is_score=True) is not None


@pytest.mark.parametrize("name", other_scores())
def test_what_may_be_wrong_is_found(name: str) -> None:
    assert miscompiled(other_scores()[name], CPU, (2, 2, 256, 256), is_score=True) is not None


@pytest.mark.parametrize(("scored", "name"), [(n, name) for n, f in enumerate(right_functions()) for name in f])
def test_right_functions_are_left_alone(scored: bool, name: str) -> None:
    function = right_functions()[scored][name]
    assert miscompiled(function, CPU, SIZES, bool(scored)) is None
    assert not _wrong(function, *([torch.tensor(-1.25)] if scored else []))


def test_views_of_tensors_are_not_for_flash() -> None:
    table = torch.randn(6, 6)
    for view in (lambda: table.T, lambda: table[1:], lambda: table * 2, lambda: table.bool(), lambda: table.flatten()):
        assert miscompiled(lambda b, h, q, kv, view=view: view()[q] > 0, CPU, SIZES) is not None
    unsigned = torch.zeros(6, dtype=torch.uint8)
    assert miscompiled(lambda b, h, q, kv: unsigned[q] > unsigned[kv], CPU, SIZES) is not None


@st.composite
def suspects(draw: st.DrawFn) -> str:
    """Draw truth values of remainders and of `where` between numbers, from random expressions."""
    x, y = (draw(expressions("x", 2, odd=False)) for _ in range(2))
    c = draw(expressions("c", 2, odd=False))
    n, m = (draw(st.sampled_from(["3", "-4", "1", "0", "2.5", "True", "torch.tensor(2)", "q // 2"])) for _ in range(2))
    forms = (
        f"({x}) % {n} == {m}",
        f"(q - kv) % {n} < ({x})",
        f"torch.remainder({x}, {y}) != {m}",
        f"torch.where({c}, {n}, {m}) < ({x})",
        f"torch.where({c}, torch.tensor({n}), torch.full_like({x}, 4)) < ({y})",
        f"(torch.where({c}, 2, 3) * ({n}) + (kv - q) % 5) % 4 == {m}",
        f"per_batch[torch.where({c}, q - kv, {n}).int() // 40] > {m}",
        f"torch.logical_and(q & {n}, {c})",
        f"((q + {n}) * ({m})).bool() | ({c})",
    )
    return draw(st.sampled_from(forms))


@pytest.mark.slow
@short_and_campaign(15, 500)
def test_whatever_is_wrong_is_found(examples: int) -> None:
    try_examples(examples, _check_wrong_is_found, suspects() | expressions("c", 3, odd=False))


def _check_wrong_is_found(expression: str) -> None:
    function = compiled(expression)
    try:
        wrong = _wrong(function)
    except Exception:
        reject()  # a division by 0, say, or a function that cannot be traced
    refused = miscompiled(function, CPU, SIZES) is not None
    event(f"wrong: {wrong}, refused: {refused}")
    assert refused or not wrong


def test_what_cannot_be_traced_is_not_for_flash() -> None:
    found = miscompiled(lambda b, h, q, kv: (q >= kv) if h == 0 else (q <= kv), CPU, SIZES)
    assert "cannot be traced" in str(found)


def _reason(q: Tensor, **call: Any) -> str | None:
    """Return why FLASH refuses the functions of a call, or None."""
    return forms.why_not_flash(plan_call(q, q, q, Request(**call)).call)


def test_functions_of_one_kind_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flexmasks.clear_caches()
    q = torch.randn(1, 2, 16, 8)
    calls: list[Any] = []

    def counted(*args: Any) -> tuple[str, ...]:
        calls.append(args)
        return outside_table(*args)

    monkeypatch.setattr(forms, "outside_table", counted)
    for ids in (torch.zeros(16).long(), torch.ones(16).long()):  # tensors with the same shape belong to the same kind
        assert _reason(q, mask=lambda b, h, q, kv, ids=ids: ids[q] == ids[kv]) is None
    assert len(calls) == 1
    for _ in range(2):
        assert "booleans" in str(_reason(q, mask=wrong_masks()["windows of heads"]))
    assert len(calls) == 2
    for _ in range(2):
        assert "remainders" in str(_reason(q, mask="causal", score=wrong_scores()["fraction"]))
    assert len(calls) == 4
    block_mask = flexmasks.block_mask(wrong_masks()["distance"], 16)
    assert "remainders" in str(_reason(q, block_mask=block_mask))


def test_functions_are_traced_again_for_other_sizes() -> None:
    """Reuse a result only for the same lengths, the same first query, and the same shapes of tensors."""
    flexmasks.clear_caches()
    q = torch.randn(1, 2, 16, 8)
    shifted = lambda b, h, q, kv: (q - kv + 15) % 3 == 1  # noqa: E731
    assert _reason(q, mask=shifted) is None
    assert "remainders" in str(_reason(torch.randn(1, 2, 17, 8), mask=shifted))
    assert _reason(q, mask=shifted, q_offset=5) is None
    for n, wrong in ((1, False), (3, True)):
        table = torch.zeros(n)
        reason = _reason(q, mask=lambda b, h, q, kv, table=table: (q - kv) % table.shape[0] == 1)
        assert (reason is not None) == wrong
    opaque = torch.nn.Linear(2, 2)
    assert "may change" in str(_reason(q, mask=lambda b, h, q, kv: (q >= kv) & (opaque.extra_repr() != "")))
    assert _reason(q, mask=lambda b, h, q, kv: (q >= kv) & (opaque.in_features == 2)) is None


def test_tracing_leaves_other_threads_alone() -> None:
    """Trace a function while other threads run compiled calls, which torch's own tracing would forbid."""
    seen = []

    def function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen.append(torch.fx._symbolic_trace.is_fx_tracing())
        return q >= kv

    assert miscompiled(function, CPU, SIZES) is None
    assert seen == [False]


def test_blocks_without_a_function_go_as_data() -> None:
    q = torch.randn(1, 2, 256, 8)
    causal = flexmasks.block_mask("causal", 256)
    without = BlockMask.from_kv_blocks(causal.kv_num_blocks, causal.kv_indices, BLOCK_SIZE=128, seq_lengths=(256, 256))
    nothing = lambda b, h, q, kv: torch.zeros_like(q, dtype=torch.bool)  # noqa: E731
    wrong: tuple[dict[str, Any], ...] = ({"block_mask": without}, {"mask": nothing})
    for call in wrong:
        assert forms.why_bits(plan_call(q, q, q, Request(**call)).call) == "it is constant"
        assert _reason(q, **call) is None
    right: tuple[dict[str, Any], ...] = ({}, {"mask": "full"}, {"score": "alibi"})
    for call in right:
        assert _reason(q, **call) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*wrong_masks(), *wrong_scores()])
def test_such_calls_are_right_on_a_gpu(name: str) -> None:
    """Masks that Inductor may get wrong too go as data; calls that FLASH alone gets wrong run on flex."""
    q, k, v = (torch.randn(2, 2, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call(device: str) -> dict[str, Any]:
        scores = wrong_scores()
        return {"mask": "causal", "score": scores[name]} if name in scores else {"mask": wrong_masks(device)[name]}

    flexmasks.clear_caches()
    few = [x[:, :, :256] for x in (q, k, v)]
    want = flexmasks.attention(*(x.double().cpu() for x in few), backend="reference", **call("cpu"))
    assert error(flexmasks.attention(*few, **call("cuda")), want) < 1.6e-2
    assert error(flexmasks.attention(*few, backend="flex", **call("cuda")), want) < 1.6e-2
    assert flexmasks.explain(q, k, v, **call("cuda")).backend in ("flex", "flex_flash")
    skip_unless_flash_takes(few, mask="causal")
    made = plan_call(*few, Request(**call("cuda"))).call
    reason = forms.why_not_flash(made)
    if reason is None:
        assert forms.why_bits(made)
        assert flexmasks.explain(*few, backend="flex_flash", **call("cuda")).mask.startswith("data: ")
        assert error(flexmasks.attention(*few, backend="flex_flash", **call("cuda")), want) < 1.6e-2
    else:
        explained = flexmasks.explain(q, k, v, **call("cuda"))
        assert (explained.backend, explained.others["flex_flash"]) == ("flex", reason)
        with pytest.raises(ValueError, match=re.escape(reason)):
            flexmasks.attention(*few, backend="flex_flash", **call("cuda"))


@pytest.mark.gpu
def test_blocks_without_a_function_on_a_gpu() -> None:
    q, k, v = (torch.randn(1, 16, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    chunks = torch.arange(64, device="cuda", dtype=torch.int32)
    counts = torch.ones(1, 1, 64, device="cuda", dtype=torch.int32)
    indices = torch.stack([(chunks + n) % 64 for n in range(64)], -1)[None, None]
    blocks = BlockMask.from_kv_blocks(counts * 0, indices, counts, indices, BLOCK_SIZE=128)
    want = F.scaled_dot_product_attention(*(x.unflatten(2, (64, 128)).transpose(1, 2)[0] for x in (q, k, v)))
    want = want.transpose(0, 1).flatten(1, 2).cpu()
    assert error(flexmasks.attention(q, k, v, block_mask=blocks)[0], want) < 1.6e-2
    skip_unless_flash_takes((q, k, v), mask="causal")
    assert error(flexmasks.attention(q, k, v, block_mask=blocks, backend="flex_flash")[0], want) < 1.6e-2


@pytest.mark.gpu
def test_gradients_of_scores_with_grouped_heads_on_a_gpu() -> None:
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    leaves = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    call: dict[str, Any] = {"mask": "causal", "score": "alibi"}
    weight = torch.randn(2, 4, 256, 64)
    flexmasks.attention(q, k, v, **call).backward(weight.cuda())
    flexmasks.attention(*leaves, **call).backward(weight.double())
    for x, y in zip((q, k, v), leaves, strict=True):
        assert y.grad is not None
        assert error(x.grad, y.grad) < 3.2e-2
    skip_unless_flash_takes((q.detach(), k.detach(), v.detach()), mask="causal")
    with pytest.raises(ValueError, match="wrong heads"):
        flexmasks.attention(q, k, v, backend="flex_flash", **call)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["prefix_lm", "documents", "grouped_tril", "function"])
@pytest.mark.parametrize(("size", "kv_heads", "length"), [(64, 4, 512), (128, 2, 700)])
def test_lse_and_its_gradient_on_a_gpu(mask: str, size: int, kv_heads: int, length: int) -> None:
    """Torch has both from 2.14 on."""
    heads = 4, kv_heads, kv_heads
    q, k, v = (torch.randn(2, n, length, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in heads)
    call: dict[str, Any] = {
        "prefix_lm": {"mask": "prefix_lm", "prefix_len": 200},
        "documents": {"mask": "document", "document_ids": (torch.arange(length, device="cuda") // 150).expand(2, -1)},
        "grouped_tril": {"mask": "grouped_tril", "seq_lens": torch.tensor([length - 130, 90], device="cuda")},
        "function": {"mask": lambda b, h, q, kv: (q >= kv) | ((q + kv) % 7 == 0)},
    }[mask]
    skip_unless_flash_takes((q, k, v), return_lse=True, **call)
    out, lse = flexmasks.attention(q, k, v, return_lse=True, backend="flex_flash", **call)
    leaves = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    arguments: dict[str, Any] = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    visible = flexmasks.dense_mask(arguments.pop("mask"), length, batch=2, **arguments)
    exact_q, exact_k, exact_v = leaves[0], *(x.repeat_interleave(4 // kv_heads, 1) for x in leaves[1:])
    scores = (exact_q @ exact_k.mT / math.sqrt(size)).masked_fill(~visible, -math.inf)
    want, want_lse = scores.softmax(-1).nan_to_num(0.0) @ exact_v, scores.logsumexp(-1)
    seen = want_lse.isfinite()
    assert torch.equal(lse.isneginf().cpu(), ~seen)
    assert error(out, want) < TOLERANCE[torch.bfloat16]
    assert error(lse[seen.cuda()], want_lse[seen]) < 1e-5
    weight, lse_weight = torch.randn_like(want), torch.randn_like(want_lse)
    got = (out * weight.cuda()).sum() + (lse * lse_weight.cuda())[seen.cuda()].sum()
    expected = (want * weight).sum() + (want_lse * lse_weight)[seen].sum()
    pairs = zip(torch.autograd.grad(got, (q, k, v)), torch.autograd.grad(expected, leaves), strict=True)
    for x, y in pairs:
        assert error(x, y) < 2 * TOLERANCE[torch.bfloat16]


# --- head sizes above 128 ---


def on_hopper(monkeypatch: pytest.MonkeyPatch, fits: bool = True, capability: tuple[int, int] = (9, 0)) -> None:
    """Let the checks of head sizes see a GPU, and a flash-attn-4 that fits its tiles to blocks or does not."""
    on_gpu_of(monkeypatch, capability)
    monkeypatch.setattr(fa4_package, "fits_tiles", lambda: fits)
    monkeypatch.setattr(road, "block_size_for", lambda size: (128, 128))


@pytest.mark.parametrize(
    ("size", "block_size"), [(128, (128, 128)), (136, (128, 96)), (192, (128, 96)), (256, (128, 64))]
)
def test_blocks_fit_the_head_size(monkeypatch: pytest.MonkeyPatch, size: int, block_size: tuple[int, int]) -> None:
    on_hopper(monkeypatch)
    ids = torch.arange(700) // 150
    q = torch.randn(1, 2, 700, size)
    masks: list[tuple[Any, Callable[..., Tensor]]] = [
        (flexmasks.get_mask("causal"), lambda b, h, q, kv: q >= kv),
        (flexmasks.get_mask("document", document_ids=ids), lambda b, h, q, kv: ids[q] == ids[kv]),
        (lambda b, h, q, kv: (q + kv) // 200 == 3, lambda b, h, q, kv: (q + kv) // 200 == 3),
    ]
    for mask, mask_mod in masks:
        call = plan_call(q, q, q, Request(mask=mask)).call
        assert flex_flash._refuses_head_size(call) is None
        want = create_block_mask(mask_mod, 1, 1, 700, 700, device="cpu", BLOCK_SIZE=block_size)
        got = flex_flash._fitted(call).mask.block_mask
        assert block_size == got.BLOCK_SIZE
        assert torch.equal(got.to_dense(), want.to_dense())
        assert call.mask.blocks().block_mask.BLOCK_SIZE == (128, 128)  # other backends have their own


@pytest.mark.parametrize("are_others_first", [False, True])
def test_new_tensors_have_fitted_blocks(monkeypatch: pytest.MonkeyPatch, are_others_first: bool) -> None:
    on_hopper(monkeypatch)
    flexmasks.clear_caches()
    q = torch.randn(1, 2, 700, 256)
    for step in range(4):  # plans are recorded from the second one on
        ids = (torch.rand(700) < 0.02).cumsum(0)
        made = plan_call(q, q, q, Request(mask="document", params={"document_ids": ids}))
        if are_others_first:
            made.plans.mask.blocks()
        got = flex_flash._fitted(made.call).mask.block_mask
        seen = ids[:, None] == ids
        want = create_block_mask(
            lambda b, h, q, kv, s=seen: s[q, kv], 1, 1, 700, 700, device="cpu", BLOCK_SIZE=(128, 64)
        )
        missing = want.to_dense().bool() & ~got.to_dense().bool()
        assert not missing.any(), step
        assert isinstance(made.plans.mask, MaskPlan)
        assert bool(made.plans.mask.resized((128, 64))._prepared.why_exact) == (step == 0)


def test_head_sizes_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 256, 256)
    call = plan_call(q, q, q, Request(mask="causal")).call
    for fits, capability in ((False, (9, 0)), (True, (10, 0))):
        on_hopper(monkeypatch, fits, capability)
        assert "from 16 to 128 here, not 256" in str(flex_flash._refuses_head_size(call))
    on_hopper(monkeypatch)
    assert flex_flash._refuses_head_size(call) is None
    for block_size, reason in ((128, "takes blocks of 128 queries x 64 keys only"), ((128, 64), "None")):
        block_mask = flexmasks.block_mask("causal", 256, block_size=block_size)
        call = plan_call(q, q, q, Request(block_mask=block_mask)).call
        assert reason in str(flex_flash._refuses_head_size(call))


def test_numbers_of_masks_whose_blocks_are_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where later values of a number cannot go as data, other backends run them."""
    on_hopper(monkeypatch)

    def refused(size: int, n: int) -> bool:
        q = torch.randn(1, 1, 64, size)
        call = plan_call(q, q, q, Request(mask=lambda b, h, q, kv: (q >= kv) & (q - kv < n))).call
        return flex_flash._refuses_numbers(call) is not None

    for size, values in ((192, MAX_COMPILED_VALUES), (128, 20), (256, 20)):
        flexmasks.clear_caches()
        assert [refused(size, n) for n in range(1, 21)] == [n > values for n in range(1, 21)]


def _large_heads(kind: str) -> tuple[tuple[int, int, int, int], dict[str, Any], Callable[[Tensor], Tensor]]:
    """Return head sizes and numbers of heads, arguments of a call on a GPU, and the change of its scores."""
    length, device = 900, "cuda"
    ids = (torch.rand(2, length, device=device) < 1 / 200).cumsum(1)
    table = torch.rand(length, device=device) < 0.7
    causal = flexmasks.get_mask("causal")
    documents = causal & flexmasks.get_mask("document", document_ids=ids)
    lens = torch.tensor([length - 130, 0], device=device)
    same: Callable[[Tensor], Tensor] = lambda scores: scores  # noqa: E731
    return {
        "256, documents, soft-cap, grouped": (
            (256, 256, 4, 2),
            {"mask": documents, "score": flexmasks.get_score("softcap", cap=5.0)},
            lambda scores: 5.0 * torch.tanh(scores / 5.0),
        ),
        "256, a function": ((256, 256, 2, 2), {"mask": lambda b, h, q, kv: (q >= kv) & table[kv]}, same),
        "248, prefix": ((248, 248, 2, 2), {"mask": "prefix_lm", "prefix_len": 300}, same),
        "192, documents": ((192, 192, 2, 2), {"mask": documents}, same),
        "192 and 128, documents": ((192, 128, 2, 2), {"mask": documents}, same),
        "160, grouped_tril": ((160, 160, 4, 1), {"mask": "grouped_tril", "seq_lens": lens}, same),
        "184, block": ((184, 184, 2, 2), {"mask": "block_causal", "block": 100}, same),
    }[kind]


LARGE_HEADS = (
    "256, documents, soft-cap, grouped", "256, a function", "248, prefix", "192, documents", "192 and 128, documents",
    "160, grouped_tril", "184, block",
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", one_in(2, LARGE_HEADS))
def test_large_heads_on_a_gpu(kind: str, is_compiled: bool) -> None:
    if is_compiled and kind not in LARGE_HEADS[::4]:
        pytest.skip("two kinds are compiled")
    attention = torch.compile(flexmasks.attention, fullgraph=True) if is_compiled else flexmasks.attention
    for step in range(3):  # the first tensors are planned exactly, the next ones by bounds, and then renewed
        torch.manual_seed(step)
        (size, v_size, heads, kv_heads), call, change = _large_heads(kind)
        sizes = (heads, size), (kv_heads, size), (kv_heads, v_size)
        q, k, v = (torch.randn(2, n, 900, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n, d in sizes)
        if step == 0:
            skip_unless_flash_takes((q, k, v), **call)
        out = attention(q, k, v, backend="flex_flash", **call)
        arguments = {name: x for name, x in call.items() if name not in ("mask", "score")}
        visible = flexmasks.dense_mask(call["mask"], 900, batch=2, heads=heads, device="cuda", **arguments)
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact_k, exact_v = (x.repeat_interleave(heads // kv_heads, 1) for x in leaves[1:])
        scores = change(leaves[0] @ exact_k.mT / math.sqrt(size)).masked_fill(~visible, -math.inf)
        want = scores.softmax(-1).nan_to_num(0.0) @ exact_v
        assert error(out, want.cpu()) < TOLERANCE[torch.bfloat16]
        weight = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), weight)
        expected = torch.autograd.grad(want, leaves, weight.double())
        for x, y in zip(got, expected, strict=True):
            assert error(x, y.cpu()) < 2 * TOLERANCE[torch.bfloat16]
