"""A range must hold every value that an operation takes.

Hypothesis writes functions as Python expressions of b, h, q, kv and of captured tensors. Their true values come from
torch.vmap over all indices, as in torch's own create_mask.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import ARITHMETIC, BATCH, CAPTURED, HEADS, TRUTH, compiled, expressions, short_and_campaign
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexmasks import compat
from flexmasks.blocks.build import bounds
from flexmasks.blocks.elements import over_indices
from flexmasks.ranges import GiveUp, Range, reach, value
from flexmasks.ranges.evaluate import evaluate
from flexmasks.ranges.value import Steps, rule

LENGTH = 24  # the length of q and kv; tables are longer

pytestmark = pytest.mark.usefixtures("one_thread")


def ranges_of(function: Callable[..., Any], q_size: int, kv_size: int) -> Any:
    """Return the result of a function on the ranges of all blocks."""
    results: list[Any] = []

    def mask(b: Range, h: Range, q: Range, kv: Range) -> Any:
        results.append(function(b, h, q, kv))
        return q >= 0

    evaluate(mask, *_blocks(1, 1, q_size, kv_size))
    return results[0]


def _blocks(b_size: int, h_size: int, q_size: int, kv_size: int) -> list[Range]:
    blocks = []
    for dim, (n, size) in enumerate(((BATCH, b_size), (HEADS, h_size), (LENGTH, q_size), (LENGTH, kv_size))):
        lo = torch.arange(0, n, size).view([-1 if d == dim else 1 for d in range(4)])
        hi = lo if size == 1 else (lo + (size - 1)).clamp(max=n - 1)
        blocks.append(Range.of_indices(lo, hi, n - 1, Steps(0, size, n, dim)))
    return blocks


def values_of(function: Callable[..., Any]) -> Tensor:
    """Return the values of a function at every element."""
    return over_indices(function)(*(torch.arange(n) for n in (BATCH, HEADS, LENGTH, LENGTH)))


def check_sound(expression: str, q_size: int = 5, kv_size: int = 4) -> Range | None:
    """Check that the range of an expression holds all its values.

    Returns the range, or None if there is none.
    """
    function = compiled(expression)
    try:
        values = values_of(function)
    except (RuntimeError, TypeError, ValueError, ArithmeticError, IndexError, AttributeError):
        return None  # the expression is not a function of numbers
    if not isinstance(values, Tensor) or values.ndim != 4:
        return None
    try:
        result = ranges_of(function, q_size, kv_size)
    except GiveUp:
        return None
    if not isinstance(result, Range):
        assert isinstance(result, Tensor)  # the result is a constant
        return None
    lo, hi = (_spread(end, q_size, kv_size) for end in (result.lo, result.hi))
    exact_values = values.to(lo.dtype)
    inside = (lo <= exact_values) & (exact_values <= hi)
    if values.dtype.is_floating_point:
        inside |= (lo == -math.inf) & (hi == math.inf)  # NaN
    wrong = (~inside).nonzero()
    assert not len(wrong), (
        f"{expression} at {wrong[0].tolist()} is {values[tuple(wrong[0])]}, "
        f"its range {lo[tuple(wrong[0])]}..{hi[tuple(wrong[0])]}"
    )
    assert (result.dtype == torch.bool) == (values.dtype == torch.bool)
    assert result.dtype.is_floating_point == values.dtype.is_floating_point
    return result


def _spread(end: Tensor, q_size: int, kv_size: int) -> Tensor:
    end = end.reshape((1,) * (4 - end.ndim) + tuple(end.shape))
    for dim, size in ((2, q_size), (3, kv_size)):
        if end.shape[dim] > 1:
            end = end.repeat_interleave(size, dim).narrow(dim, 0, LENGTH)
    return end.expand(BATCH, HEADS, LENGTH, LENGTH)


sizes = st.sampled_from([1, 2, 4, 5, 8, 24])
EACH = sorted({*ARITHMETIC, *TRUTH, *CAPTURED})


@short_and_campaign(6, 20)
@pytest.mark.parametrize("template", EACH)
def test_each_operation_is_sound(template: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(data=st.data(), q_size=sizes, kv_size=sizes)
    def is_sound(data: st.DataObject, q_size: int, kv_size: int) -> None:
        expression = template
        for hole in "xyijkcdt":
            while f"{{{hole}}}" in expression:
                operand = data.draw(expressions(hole, data.draw(st.integers(0, 1))))
                expression = expression.replace(f"{{{hole}}}", operand, 1)
        check_sound(expression, q_size, kv_size)

    is_sound()


BOTH_SIGNS = [
    "x & y", "x | y", "x ^ y", "x // y", "x % y", "torch.fmod(x, y)", "x * y", "x >> (y & 3)", "x << (y & 3)",
    "x & 7", "x & 4", "x & -8", "y | 5", "x ^ 6", "x // 6", "y // 8",
    "(x * 4 + 1) // 8", "(x * 4 + 1) % 8", "(x * 4 + 2) // 4", "(x * 6 + 3) % 4",
    "(x * 0.5).int()", "(x * 0.75).long()", "(x * 0.5).round()", "torch.div(x, y, rounding_mode='trunc')",
    "(x * 1.0) * math_inf", "(x / 4) * (y * math_inf)", "torch.sqrt(x * 1.0) <= math_inf", "x * math_inf >= -math_inf",
]  # fmt: skip


@pytest.mark.parametrize("operation", BOTH_SIGNS)
def test_operations_on_numbers_of_both_signs_are_sound(operation: str) -> None:
    for first, second, sizes in itertools.product((0, 11, 24), (0, 12, 25), ((1, 1), (3, 4), (24, 5))):
        check_sound(re.sub(r"\by\b", f"(kv - {second})", re.sub(r"\bx\b", f"(q - {first})", operation)), *sizes)


@pytest.mark.slow
@short_and_campaign(100, 400)
def test_compositions_are_sound(examples: int) -> None:
    @settings(max_examples=examples)
    @given(expression=expressions("x") | expressions("c", 4), q_size=sizes, kv_size=sizes)
    def is_sound(expression: str, q_size: int, kv_size: int) -> None:
        check_sound(expression, q_size, kv_size)

    is_sound()


def test_every_rule_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: set[str] = set()
    dispatch = value.dispatch

    def spy(func: Any, args: Any, kwargs: Any) -> Any:
        tried.add(func.__name__.strip("_"))
        return dispatch(func, args, kwargs)

    monkeypatch.setattr(value, "dispatch", spy)
    monkeypatch.setattr(sys.modules[evaluate.__module__], "dispatch", spy)
    aliases = {"negative", "subtract", "multiply", "floor_divide", "true_divide", "divide", "remainder"}
    aliases |= {"absolute", "clip", "positive", "clone", "detach", "contiguous", "mul", "mod", "sub", "eq", "and", "or"}
    aliases |= {"less", "less_equal", "greater", "greater_equal", "not_equal", "xor"}
    aliases |= {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
    aliases |= {"fix", "bitwise_left_shift", "bitwise_right_shift", "sgn", "fmod"}
    for template in EACH:
        expression = template.replace("{t}", "torch.int32")
        operands = ("(q + 1)", "(kv + 1)", "q", "kv", "b", "(q > kv)", "(q > 3)")
        for hole, operand in zip("xyijkcd", operands, strict=True):
            expression = expression.replace(f"{{{hole}}}", operand)
        check_sound(expression)
    for expression in ("3 + q", "3 - q", "3 * q", "True & (q > 3)", "True | (q > 3)", "True ^ (q > 3)"):
        check_sound(expression)
    for name in sorted(aliases):
        function = getattr(torch, name, None)
        if function is not None:
            check_sound(f"torch.{name}(q)")
            check_sound(f"torch.{name}(q, kv + 1)")
            check_sound(f"torch.{name}(q > 3, kv > 2)")
    for expression in ("rows[b].all()", "rows[b].amin()", "q.unsqueeze(-1).amax()"):
        check_sound(expression)
    assert set(value._RULES) - tried - {"contiguous"} == set()


# The range of each expression on queries 8..15 and keys 16..23. "Any value" would be sound, too, but not tight.
TIGHT = [
    ("q + kv", 24, 38),
    ("q - kv", -15, -1),
    ("kv * q", 128, 345),
    ("-q", -15, -8),
    ("abs(q - 10)", 0, 5),
    ("q // 4", 2, 3),
    ("q // -4", -4, -2),
    ("q % 8", 0, 7),
    ("q % 16", 8, 15),
    ("q % -16", -8, -1),
    ("100 // q", 6, 12),
    ("120 / q", 8, 15),
    ("q << 2", 32, 60),
    ("kv >> 3", 2, 2),
    ("q ** 2", 64, 225),
    ("torch.minimum(q, kv - 7)", 8, 15),
    ("torch.maximum(q, kv - 7)", 9, 16),
    ("q.clamp(10, 12)", 10, 12),
    ("torch.where(q < kv, q, kv)", 8, 15),
    ("torch.where(q < 10, 0, 1)", 0, 1),
    ("torch.where(q < 8, 0, 1)", 1, 1),
    ("(q / 4).floor()", 1, 3),
    ("(q < 3).long()", 0, 0),
    ("~q", -16, -9),
    ("torch.arange(40)[q]", 8, 15),
    ("torch.arange(40)[q - 12]", 0, 39),
    ("torch.arange(40)[q - 16]", 32, 39),
    ("torch.arange(40)[q - 30]", 18, 25),
    ("torch.arange(80).view(2, 40)[1, q]", 48, 55),
    ("torch.arange(1600).view(40, 40)[q, 3]", 323, 603),
    ("(torch.arange(40) + 2**60)[kv] > (torch.arange(40) * 300 + 2**60)[q]", 0, 0),
    ("q < kv", 1, 1),
    ("q >= kv", 0, 0),
    ("q <= kv - 1", 1, 1),
    ("q == kv", 0, 0),
    ("(q < kv) & (q < 9)", 0, 1),
    ("(q < kv) | (q < 9)", 1, 1),
    ("(q < kv) ^ (kv < q)", 1, 1),
    ("q < 2**60", 1, 1),
    ("q < math_inf", 1, 1),
    ("q * 0.5 < 7.6", 1, 1),
    ("kv.int() - np.int64(16)", 0, 7),
    ("np.int64(16) > q", 1, 1),
    ("q & 7", 0, 7),
    ("q & 3", 0, 3),
    ("kv & -16", 16, 16),
    ("q & 24", 0, 15),
    ("q | kv", 16, 31),
    ("q ^ kv", 0, 31),
    ("(q - 16) | -kv", -8, -1),
    ("1 << (q // 8)", 2, 2),
    ("kv >> (q // 8)", 8, 11),
    ("torch.fmod(q - 12, 16)", -4, 3),
    ("(q - 12).sign()", -1, 1),
    ("kv * 0.5 // 3", 1, 4),
    ("torch.where(q < 10, 10, q)", 10, 15),
    ("torch.where(q > 12, 12, q)", 8, 12),
    ("torch.where(q < 3, 3, q)", 8, 15),
    ("torch.arange(80).view(2, 40)[1][q]", 48, 55),
    ("torch.arange(1600).view(40, 40)[q, kv]", 336, 623),
    ("torch.arange(1600).view(40, 40)[q][kv]", 336, 623),
    ("torch.arange(25).view(5, 5)[q // 8, kv // 8]", 7, 7),
    ("torch.arange(25).view(5, 5)[q // 9, kv // 9]", 1, 7),
    ("(torch.tensor([3, 9, 20]) <= q).sum()", 1, 2),
    ("torch.isin(q, torch.tensor([3, 16]))", 0, 0),
    ("torch.isin(q, torch.tensor([3, 10]))", 0, 1),
    ("(q[..., None] < torch.tensor([30, 40])).all(-1)", 1, 1),
    ("torch.bucketize(q, torch.arange(0, 40, 5), right=True)", 2, 4),
    ("torch.searchsorted(torch.arange(0, 40, 5), kv)", 4, 5),
    ("torch.searchsorted(torch.arange(0, 40, 5), q, side='right')", 2, 4),
    ("(q + 1).sqrt()", 3, 4),
    ("(kv * 1.0).log2()", 4, math.log2(23)),
    ("(q / 4).round()", 2, 4),
    ("2 ** (q // 8)", 2, 2),
    ("torch.arange(1600).view(40, 40)[..., kv][q]", 336, 623),
    ("torch.arange(1600).view(40, 40)[q, :][kv]", 336, 623),
    ("torch.arange(1600).view(40, 40)[q, 4:8].amax()", 327, 607),
    ("torch.arange(80).view(40, 2)[q].max(-1).values", 17, 31),
    ("(lambda r: r[len(r) - 1])(torch.arange(80).view(40, 2)[q])", 17, 31),
    ("(torch.arange(80).view(40, 2)[q] - torch.arange(80).view(40, 2)[kv]).abs().sum()", 4, 60),
    ("torch.arange(80).view(40, 2)[q].unbind()[0]", 16, 30),
    ("torch.stack([q, kv]).amin()", 8, 15),
    ("(q < 3) * (kv > 3)", 0, 0),
    ("(q < 3) + (kv > 3)", 1, 1),
    ("q.masked_fill(q > 10, 10)", 8, 10),
    ("torch.isin(q, torch.arange(40).view(4, 10)[kv // 8])", 0, 0),
    ("((q * 1.0) ** 2.0).round()", 64, 225),
    ("(torch.arange(80).view(40, 2)[q] * 0.5).sum().round()", 16, 31),
]


@pytest.mark.parametrize(("expression", "least", "most"), TIGHT)
def test_ranges_are_tight(expression: str, least: int, most: int) -> None:
    result = ranges_of(compiled(expression), 8, 8)
    lo, hi = (end.expand(torch.broadcast_shapes(end.shape, (1, 1, 3, 3)))[0, 0, 1, 2] for end in (result.lo, result.hi))
    assert (float(lo), float(hi)) == pytest.approx((least, most), abs=0 if result.dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize(
    "expression",
    [
        *("torch.arange(80)[q - kv + 24]", "torch.arange(80).flip(0)[q + kv]"),
        "torch.arange(1600).view(40, 40)[(q + kv) // 2, (q + 3 * kv) // 4]",
    ],
)
def test_long_reaches_have_the_same_ends(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements in reach are looked up one by one, or in a table of runs if they are many."""
    want = ranges_of(compiled(expression), 5, 4)
    monkeypatch.setattr(reach, "_ALWAYS_LOOKED_UP", 0)
    monkeypatch.setattr(reach, "_MAX_LOOKED_UP", 0)
    got = ranges_of(compiled(expression), 5, 4)
    assert torch.equal(got.lo, want.lo)
    assert torch.equal(got.hi, want.hi)


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("torch.sin(q) > 0", "sin"),
        ("q ** 3 > kv", "pow"),
        ("3 ** q > kv", "pow"),
        ("flags[q[None]][0]", "indexing"),
        ("cube[b, q].topk(2)[0][1] > 0", "topk"),
        ("cube[b, q] @ cube[b, kv] > 0", "matmul"),
    ],
)
def test_unknown_operations_are_named(expression: str, name: str) -> None:
    truth, unknown, *_ = evaluate(compiled(expression), *_blocks(1, 1, 4, 4))
    assert unknown[0] == name
    assert not truth.lo.any()
    assert truth.hi.all()


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        ("q >= kv", (1, 1)),
        ("kv < per_batch[b]", (2, 1)),
        ("q * per_head[h] < kv", (1, 2)),
        ("torch.sin(q + b) < h", (2, 2)),
        ("ids[q] == rows[b, kv]", (2, 1)),
        ("q >= 0", (1, 1)),
        ("torch.ones_like(b, dtype=torch.bool)", (1, 1)),
    ],
)
def test_the_shape_shows_what_a_mask_depends_on(expression: str, shape: tuple[int, int]) -> None:
    truth = evaluate(compiled(expression), *_blocks(1, 1, 4, 4)).truth
    assert tuple(torch.broadcast_shapes(truth.lo.shape, (1, 1, 1, 1))[:2]) == shape


REFUSED = [
    ("q if q > kv else kv", "decide by `if`"),
    ("q > kv and q > 3", "decide by `if`"),
    ("not q > kv", "decide by `if`"),
    ("0 < q < kv", "chained comparison"),
    ("q.item() > 3", r"call `\.item\(\)`"),
    ("q.tolist()", r"call `\.tolist\(\)`"),
    ("int(q) > 3", r"call `int\(\)`"),
    ("float(q) > 3", r"call `float\(\)`"),
    ("[1, 2, 3][q]", "Python integer"),
    ("ids[q:]", "Python integer"),
    ("len(q) > 0", r"call|take the `len\(\)`"),
    ("any(q)", "iterate"),
]


@pytest.mark.parametrize(("expression", "message"), REFUSED)
def test_python_control_flow_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        evaluate(compiled(expression), *_blocks(1, 1, 4, 4))
    assert "torch.where for if" in str(error.value)


@pytest.mark.parametrize(
    ("expression", "got"),
    [("q", "int64"), ("q + 0.5", "float32"), ("True", "True"), ("None", "None"), ("(q > 3) ** 1", "int64")],
)
def test_only_truth_values_are_masks(expression: str, got: str) -> None:
    with pytest.raises(TypeError, match=rf"must return a boolean tensor, got .*{got}"):
        evaluate(compiled(expression), *_blocks(1, 1, 4, 4))


def test_an_index_out_of_bounds_is_an_error() -> None:
    for expression in ("per_batch[q] > 0", "ids[q + 20] > 0", "rows[kv, 3] > 0"):
        with pytest.raises(ValueError, match=r"indexes a dimension of \d+ elements with an index up to \d+"):
            evaluate(compiled(expression), *_blocks(1, 1, 4, 4))
    for expression in ("ids[q + 16] > 0", "ids[q - 24] > 0", "ids[torch.where(q > 3, q * 5, 0) % 40] > 0"):
        evaluate(compiled(expression), *_blocks(1, 1, 4, 4))


@pytest.mark.parametrize(
    "expression",
    [
        *("q.add_(1) > kv", "q[None] > 3", "rows[b] > 3", "ids[q > 3]", "q.T > 3", "ids > q", "q.type() == 'x'"),
        *("torch.add(q, 1, out=q) > kv", "{}['q'] > kv", "1 / 0 > q"),
    ],
)
def test_functions_that_ranges_cannot_evaluate_give_up(expression: str) -> None:
    with pytest.raises(GiveUp):
        evaluate(compiled(expression), *_blocks(1, 1, 4, 4))


def test_changes_in_place_give_up() -> None:
    captured = torch.zeros(24)

    def alias(b: Any, h: Any, q: Any, kv: Any) -> Any:
        moved = q
        moved += 20
        return q > kv

    def item(b: Any, h: Any, q: Any, kv: Any) -> Any:
        captured[q] = 1.0
        return q > kv

    def added(b: Any, h: Any, q: Any, kv: Any) -> Any:
        table = captured
        table += q
        return q > kv

    for function in (alias, item, added):
        with pytest.raises(GiveUp, match="in place"):
            evaluate(function, *_blocks(1, 1, 4, 4))
    assert not captured.any()


def test_a_table_changed_in_the_function_is_read_again() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        table = torch.zeros(24)
        before = table[q] > 0
        table += 1
        return before | (table[kv] > 0)

    assert evaluate(mask, *_blocks(1, 1, 4, 4)).truth.lo.all()

    def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
        table = torch.zeros(24, 2)
        row = table[q]
        table += 1
        return row[0] > 0

    with pytest.raises(GiveUp, match="in place"):
        evaluate(late, *_blocks(1, 1, 4, 4))


@pytest.mark.parametrize("expression", ["torch.where(q > 3, q, 0)", "torch.where(q > 3, 0, q)", "torch.pow(2, q)"])
def test_torch_may_ask_for_types(expression: str) -> None:
    """The call of a torch function with a number is not a question of the function, which is called once."""
    calls = 0

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        nonlocal calls
        calls += 1
        return compiled(expression)(b, h, q, kv) > kv

    evaluate(mask, *_blocks(1, 1, 4, 4))
    assert calls == 1


def test_a_question_for_a_type_ends_the_evaluation() -> None:
    """Even if the function catches the exception."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        with contextlib.suppress(Exception):
            isinstance(q, Tensor)
        return q >= kv

    for function in (mask, compiled("(q if torch.is_tensor(q) else kv) > 3"), compiled("q.__class__ is int or q > kv")):
        with pytest.raises(GiveUp, match="a question for the type of an index"):
            evaluate(function, *_blocks(1, 1, 4, 4))


def test_ranges_have_their_own_type_outside_a_function() -> None:
    q = _blocks(1, 1, 4, 4)[2]
    assert q.__class__ is Range
    assert not isinstance(q, Tensor)


def test_an_unknown_attribute_gives_up() -> None:
    with pytest.raises(GiveUp, match="'nonsense'"):
        evaluate(compiled("q.nonsense"), *_blocks(1, 1, 4, 4))


def test_expressions_are_mostly_masks() -> None:
    """The random tests would prove nothing if most of their expressions raised."""
    tried = kept = 0

    @settings(max_examples=60, database=None)
    @given(expression=expressions("c", 3))
    def count(expression: str) -> None:
        nonlocal tried, kept
        tried += 1
        kept += check_sound(expression) is not None

    count()
    assert kept > tried // 3


def test_a_rule_registers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value, "_RULES", dict(value._RULES))

    @rule("sinc")
    def sinc(a: Any) -> Range:
        ones = torch.ones_like(a.lo)
        return Range(-ones, ones, torch.float32)

    truth, not_understood, *_ = evaluate(compiled("torch.sinc(q) < 2"), *_blocks(1, 1, 4, 4))
    assert not_understood == ()
    assert truth.lo.all()
    with pytest.raises(ValueError, match="'add' already has a range rule"):
        rule("add")(sinc)


def _parity(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    bits = q ^ kv
    odd = bits & 1
    for n in range(1, 5):
        odd = odd ^ ((bits >> n) & 1)
    return odd == 0


def _hashed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    number = q * 7 + kv * 3
    for n in range(4):
        number = (number % 11 * 5 + number // 3 * kv) % (n + 50)
    return number < 9


@pytest.mark.slow
@pytest.mark.parametrize("mask", [_parity, _hashed])
def test_chains_are_compiled_in_time_that_grows_linearly(mask: Callable[..., Tensor], monkeypatch: Any) -> None:
    """torch's compiler computes an operation again at each use, unless its result is stored."""
    monkeypatch.setattr(compat, "is_compiling", lambda: True)
    traced = make_fx(lambda: bounds(mask, 1, 1, 512, 512, torch.device("cpu")).indices)()
    operations: dict[Any, int] = {}
    for node in traced.graph.nodes:
        computed = 1 + sum(operations[x] for x in node.all_input_nodes)
        operations[node] = 1 if "as_strided" in str(node.target) else computed
        assert computed < 2000, node
    indices = bounds(mask, 1, 1, 512, 512, torch.device("cpu")).indices
    assert all(torch.equal(x, y) for x, y in zip(traced(), indices, strict=True))
