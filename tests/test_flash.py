"""What FLASH's compiler would get wrong is found before: against an interpreter that gets it wrong as that does.

The interpreter follows what the compiler writes for each operation, read from torch's CuteDSLOpOverrides and CuTe.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import error, skip_unless_flash_takes
from hypothesis import event, given, reject
from hypothesis import strategies as st
from test_ranges import compiled, expressions
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexmasks
from flexmasks import backends, flash
from flexmasks.attention import _call, _Request
from flexmasks.flash import mistake, traced

CPU = torch.device("cpu")
SIZES = (2, 2, 5, 5)
HEADS = torch.tensor([1.0, 2.0])
OFFSETS = torch.tensor([-3, 4], dtype=torch.int32)


class AsCompiled(torch.fx.Interpreter):
    """Runs a traced function for one pair as FLASH's compiler would."""

    def run_node(self, n: torch.fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        name = str(n.target)
        if name.startswith("aten.remainder"):
            return torch.fmod(*(torch.as_tensor(x) for x in args)).to(n.meta["val"].dtype)
        if name.startswith("aten.where") and not any(self.moves(x) for x in n.args[1:]):
            return torch.where(args[0], args[1].bool(), args[2].bool()).to(n.meta["val"].dtype)
        return super().run_node(n)

    def moves(self, x: Any) -> bool:
        """Whether it depends on the pair, or is read from a tensor: all else is a number to the compiler."""
        if not isinstance(x, torch.fx.Node) or re.search("full|zeros|ones|scalar_tensor", str(x.target)):
            return False
        if x.op == "get_attr":
            return bool(self.fetch_attr(str(x.target)).ndim)
        return x.op == "placeholder" or any(map(self.moves, x.all_input_nodes))


def _pairs() -> list[list[Tensor]]:
    every = itertools.product(*(range(n) for n in SIZES))
    return [[torch.tensor(i, dtype=torch.int32) for i in pair] for pair in every]


def _wrong(function: Callable[..., Tensor], *score: Tensor) -> bool:
    """Whether FLASH would give another value for some pair."""
    module = traced(function, CPU, bool(score))
    runs = (torch.fx.Interpreter(module), AsCompiled(module))
    values = [[run.run(*score, *pair) for pair in _pairs()] for run in runs]
    return not all(torch.equal(x, y) or bool(x.isnan() and y.isnan()) for x, y in zip(*values, strict=True))


WRONG: dict[str, Callable[..., Tensor]] = {
    "windows of heads": lambda b, h, q, kv: q - kv <= torch.where(h < 1, 2, 3),
    "numbers as tensors": lambda b, h, q, kv: q - kv <= torch.where(h < 1, torch.tensor(2), torch.tensor(3)),
    "like": lambda b, h, q, kv: torch.where(q > kv, torch.zeros_like(q), torch.full_like(q, 3)) > 1,
    "folded": lambda b, h, q, kv: torch.where(q > kv, q * 0, q * 0 + 3) > 1,
    "of each other": lambda b, h, q, kv: kv <= torch.where(h < 1, torch.tensor(2) + 1, 4),
    "distance": lambda b, h, q, kv: (q - kv) % 3 == 1,
    "function": lambda b, h, q, kv: torch.remainder(kv - q, 4) < 2,
    "from the front": lambda b, h, q, kv: (q + OFFSETS[b]) % 3 == kv % 3,
    "by a negative number": lambda b, h, q, kv: q % -3 == -1,
    "used twice": lambda b, h, q, kv: ((q - kv) % 3 == 0) | ((q - kv) % 3 == 2),
}
WRONG_SCORES: dict[str, Callable[..., Tensor]] = {
    "factor": lambda score, b, h, q, kv: score * torch.where(q > kv, 2.0, 0.5),
    "added": lambda score, b, h, q, kv: score + torch.where(q >= kv, 0.0, -5.0),
    "fraction": lambda score, b, h, q, kv: score + score % 1.0,
}
RIGHT: dict[str, Callable[..., Tensor]] = {
    "one number": lambda b, h, q, kv: torch.where(h < 1, q, 3) >= kv,
    "truth values": lambda b, h, q, kv: torch.where(q >= kv, True, False),
    "distance, 0": lambda b, h, q, kv: (q - kv) % 3 == 0,
    "distance, not 0": lambda b, h, q, kv: (q - kv) % 3 != 0,
    "sum": lambda b, h, q, kv: (q + kv) % 3 == 1,
    "absolute": lambda b, h, q, kv: (q - kv).abs() % 3 == 1,
    "chunks": lambda b, h, q, kv: (q // 5 + kv * 2) % 3 == 1,
    "bits": lambda b, h, q, kv: ((q - kv) & 3) < 2,
    "by one": lambda b, h, q, kv: OFFSETS[(q - kv) % 1] <= q,
    "a table": lambda b, h, q, kv: OFFSETS[b] <= q - kv,
}
RIGHT_SCORES: dict[str, Callable[..., Tensor]] = {
    "scores": lambda score, b, h, q, kv: torch.where(q > kv, score * 2.0, score * 0.5),
    "hidden": lambda score, b, h, q, kv: torch.where(q > kv, score, -torch.inf),
    "heads": lambda score, b, h, q, kv: score * HEADS[h],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_masks_are_found(name: str) -> None:
    assert _wrong(WRONG[name])
    assert mistake(WRONG[name], CPU) is not None


@pytest.mark.parametrize("name", WRONG_SCORES)
def test_wrong_scores_are_found(name: str) -> None:
    assert _wrong(WRONG_SCORES[name], torch.tensor(-1.25))
    assert mistake(WRONG_SCORES[name], CPU, scored=True) is not None


@pytest.mark.parametrize("name", [*RIGHT, *RIGHT_SCORES])
def test_right_functions_are_left_alone(name: str) -> None:
    scored = name in RIGHT_SCORES
    function = RIGHT_SCORES[name] if scored else RIGHT[name]
    assert mistake(function, CPU, scored) is None
    assert not _wrong(function, *([torch.tensor(-1.25)] if scored else []))


@st.composite
def suspects(draw: st.DrawFn) -> str:
    """Truth values of remainders, and of what `where` chooses, of random expressions."""
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
    )
    return draw(st.sampled_from(forms))


@given(expression=suspects() | expressions("c", 3, odd=False))
def test_whatever_is_wrong_is_found(expression: str) -> None:
    function = compiled(expression)
    try:
        wrong = _wrong(function)
    except Exception:
        reject()  # such as a division by 0, or what cannot be traced
    if wrong:
        assert mistake(function, CPU) is not None
    event(f"wrong: {wrong}, found: {mistake(function, CPU) is not None}")


def test_what_cannot_be_traced_is_not_for_flash() -> None:
    assert "cannot be looked at" in str(mistake(lambda b, h, q, kv: (q >= kv) if h == 0 else (q <= kv), CPU))


def test_each_kind_of_call_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flexmasks.clear_caches()
    q = torch.randn(1, 2, 16, 8)
    looked: list[Any] = []

    def looking(*args: Any, **scored: bool) -> str | None:
        looked.append(args)
        return flash.mistake(*args, **scored)

    monkeypatch.setattr(backends, "mistake", looking)

    def reason(**given: Any) -> str | None:
        return backends._mistake(_call(q, q, q, _Request(**given)))

    for ids in (torch.zeros(16), torch.ones(16)):  # of another tensor, the same
        assert reason(mask=lambda b, h, q, kv, ids=ids: ids[q] == ids[kv]) is None
    assert len(looked) == 1
    for _ in range(2):
        assert "booleans" in str(reason(mask=WRONG["windows of heads"]))
    assert len(looked) == 2
    for _ in range(2):
        assert "remainders" in str(reason(mask="causal", score=WRONG_SCORES["fraction"]))
    assert len(looked) == 3
    block_mask = flexmasks.block_mask(WRONG["distance"], 16)
    assert "remainders" in str(reason(block_mask=block_mask))


def test_blocks_without_a_function_are_not_for_flash() -> None:
    q = torch.randn(1, 2, 256, 8)
    causal = flexmasks.block_mask("causal", 256)
    indices = causal.kv_num_blocks, causal.kv_indices
    without = BlockMask.from_kv_blocks(*indices, BLOCK_SIZE=128, seq_lengths=(256, 256))
    nothing = lambda b, h, q, kv: torch.zeros_like(q, dtype=torch.bool)  # noqa: E731
    wrong: tuple[dict[str, Any], ...] = ({"block_mask": without}, {"mask": nothing})
    for call in wrong:
        assert "looks at no blocks" in str(backends._mistake(_call(q, q, q, _Request(**call))))
    right: tuple[dict[str, Any], ...] = ({}, {"mask": "full"}, {"score": "alibi"})
    for call in right:
        assert backends._mistake(_call(q, q, q, _Request(**call))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WRONG, *WRONG_SCORES])
def test_such_calls_are_right_on_a_gpu(name: str) -> None:
    q, k, v = (torch.randn(2, 2, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = WRONG.get(name, "causal")
    tensors = {"OFFSETS": OFFSETS.cuda()}
    if name == "from the front":
        mask = lambda b, h, q, kv: (q + tensors["OFFSETS"][b]) % 3 == kv % 3  # noqa: E731
    given: dict[str, Any] = {"mask": mask} | ({"score": WRONG_SCORES[name]} if name in WRONG_SCORES else {})
    few = [x[:, :, :256] for x in (q, k, v)]
    want = flexmasks.attention(*(x.double().cpu() for x in few), backend="reference", **_on_cpu(given, name))
    assert error(flexmasks.attention(*few, **given), want) < 1.6e-2
    assert flexmasks.explain(q, k, v, **given).backend == "triton"
    skip_unless_flash_takes((q, k, v), mask="causal")
    with pytest.raises(ValueError, match="cannot run this call: its compiler"):
        flexmasks.attention(q, k, v, backend="flash", **given)


@pytest.mark.gpu
def test_blocks_without_a_function_on_a_gpu() -> None:
    q, k, v = (torch.randn(1, 16, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    chunks = torch.arange(64, device="cuda", dtype=torch.int32)
    counts = torch.ones(1, 1, 64, device="cuda", dtype=torch.int32)
    indices = torch.stack([(chunks + n) % 64 for n in range(64)], -1)[None, None]
    blocks = BlockMask.from_kv_blocks(counts * 0, indices, counts, indices, BLOCK_SIZE=128)
    out = flexmasks.attention(q, k, v, block_mask=blocks)
    want = F.scaled_dot_product_attention(*(x.unflatten(2, (64, 128)).transpose(1, 2)[0] for x in (q, k, v)))
    assert error(out[0], want.transpose(0, 1).flatten(1, 2)) < 1.6e-2
    skip_unless_flash_takes((q, k, v), mask="causal")
    with pytest.raises(ValueError, match="looks at no blocks"):
        flexmasks.attention(q, k, v, block_mask=blocks, backend="flash")


def _on_cpu(given: dict[str, Any], name: str) -> dict[str, Any]:
    return given | ({"mask": WRONG[name]} if name in WRONG else {})
