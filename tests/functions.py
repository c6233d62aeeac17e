"""Random mask functions: strategies that write them, and their compilation.

Functions are Python expressions of b, h, q, kv and of captured tensors.

`expressions` tries any operation on any operand. `composed` writes functions as the documentation of
`flexmasks.block_mask` allows them, and `structured` masks as people write them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor


def short_and_campaign(short: int, campaign: int) -> pytest.MarkDecorator:
    """Parametrize `examples`, the number of random examples.

    It is small by default and large in the campaign.
    """
    return pytest.mark.parametrize(
        "examples", [pytest.param(short, id="short"), pytest.param(campaign, id="long", marks=pytest.mark.campaign)]
    )


# --- any operation on any operand ---

TABLE_LENGTH = 40
BATCH, HEADS = 2, 2  # sizes of the tables that are indexed by b or h


def _tables(n: int) -> dict[str, Any]:
    """Return tensors to capture, of n elements along most dimensions.

    They have 0 to 3 dimensions, and extreme values among their elements.
    """
    generator = torch.Generator().manual_seed(1)

    def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    odd = torch.randn(n, generator=generator)
    odd[torch.tensor([3, 11, 12, 20])] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    return {
        "torch": torch,
        "np": np,
        "ids": ints(0, n // 5 + 1, n).sort().values,
        "jumbled": ints(-9, 9, n, dtype=torch.int32),
        "small": ints(-128, 128, n, dtype=torch.int8),
        "bytes_": ints(0, 256, n, dtype=torch.uint8),
        "flags": ints(0, 2, n, dtype=torch.bool),
        "huge": 2**62 + ints(-3, 3, n) * ints(0, 2**30, n),
        "near": 2**53 + torch.arange(n) // 3,
        "lowest": torch.full((n,), torch.iinfo(torch.int64).min),
        "real": torch.randn(n, generator=generator, dtype=torch.float64),
        "odd": odd,
        "half": (torch.randn(n, generator=generator) * 3e4).half(),
        "per_batch": ints(0, n, BATCH),
        "per_head": torch.randn(HEADS, generator=generator),
        "rows": ints(-5, 9, BATCH, n),
        "square": ints(0, 2, n, n, dtype=torch.bool),
        "grid": ints(-9, 9, n // 7 + 1, n // 7 + 1, dtype=torch.int16),
        "chosen": ints(0, 2, n // 8 + 1, n // 8 + 1, dtype=torch.bool),
        "cube": ints(-5, 9, BATCH, n, 4, dtype=torch.int32),
        "number": torch.tensor(7),
        "narrow": torch.tensor(100, dtype=torch.int8),
        "wide": torch.tensor(1000),
        "fraction": torch.tensor(0.1),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "nan": torch.tensor(math.nan),
        "true": torch.tensor(True),
    }


TABLES = _tables(TABLE_LENGTH)
ONE_DIMENSIONAL = ["ids", "jumbled", "small", "bytes_", "huge", "near", "real", "odd", "half"]
DTYPES = [
    *("torch.int8", "torch.uint8", "torch.int16", "torch.int32", "torch.int64", "torch.bool"),
    *("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64"),
]

# Holes of templates: x and y are any numbers, i and j indices from 0 to TABLE_LENGTH - 1, k an index below BATCH, c and
# d truth values, t dtypes.
LEAVES = ["b", "h", "q", "kv", "number", "narrow", "fraction", "double", "1", "5", "-3", "0.5", "-2.0", "np.int64(4)"]
ODD_LEAVES = [
    *("wide", "nan", "0", "1000", "2**40", "2**60 + 1", "1e6", "math_inf", "-math_inf", "math_nan", "0.1", "True"),
]
INDICES = ["q", "kv", "-1 - q", "kv - 5", "7", "number", "({x}) % 40", "({x}).clamp(0, 39)", "torch.where({c}, q, 3)"]
CAPTURED = [
    *(f"{name}[{{i}}]" for name in ONE_DIMENSIONAL),
    "per_batch[b]",
    "per_head[h]",
    "rows[{k}, {i}]",
    "rows[{k}, {i}]",
    "cube[{k}, {i}, 1]",
    "cube[{k}, {i}, {j} % 4]",
    "cube[-1, {i}, -3]",
]
ARITHMETIC = [
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "{x} // {y}",
    "{x} % {y}",
    "{x} / {y}",
    "{x} // 3",
    "{x} // -16",
    "{x} % 8",
    "{x} % -5",
    "{x} / 4",
    "7 // ({x})",
    "7 % ({x})",
    "20 / ({x})",
    "torch.div({x}, 3, rounding_mode='trunc')",
    "torch.div({x}, {y}, rounding_mode='floor')",
    "torch.div({x}, {y}, rounding_mode='trunc')",
    "torch.add({x}, {y}, alpha=2)",
    "torch.rsub({x}, {y})",
    "-({x})",
    "+({x})",
    "abs({x})",
    "({x}).square()",
    "({x}) ** 2",
    "({x}) ** 1",
    "({x}) ** 3",
    "2 ** ({x} + q)",
    "({x}) << 3",
    "({x} + q) << ({y})",
    "2 << ({x} + q)",
    "({x}) >> 2",
    "({x} + q) >> ({y})",
    "torch.minimum({x}, {y})",
    "torch.maximum({x}, {y})",
    "torch.min({x}, {y})",
    "torch.max({x}, {y})",
    "({x}).clamp(-3, 11)",
    "({x}).clamp(min=2)",
    "({x}).clamp(max={y})",
    "({x}).clamp(5, 2)",
    "({x}).clamp(max=0.5)",
    "torch.clamp_min({x}, 4)",
    "({x}).clamp_max(4)",
    "torch.where({c}, {x}, {y})",
    "torch.where({c}, {x}, {y})",
    "torch.where({c}, 0.1, 2)",
    "({x}).floor()",
    "({x}).ceil()",
    "torch.trunc({x})",
    "torch.floor(({x}) / 3)",
    "({x}) & ({y})",
    "({x}) | 5",
    "({x}) ^ ({y})",
    "~({x})",
    "({x}).to({t})",
    "({x}).to({t})",
    "({x}).to({y})",
    "({x}).long()",
    "({x}).int()",
    "({x}).short()",
    "({x}).float()",
    "({x}).double()",
    "({x}).half()",
    "({x}).bfloat16()",
    "({x}).type(torch.int32)",
    "({x}).type_as({y})",
    "torch.sin({x})",
    "torch.sqrt({x})",
    "torch.searchsorted(ids, {i})",
    "torch.searchsorted(jumbled, ({i} + 0 * q).int())",
    "torch.searchsorted(real.sort().values, ({x}).double(), right=True)",
    "torch.bucketize({x}, ids, right=True)",
    "({x}).where({c}, {y})",
    "({x}).masked_fill({c}, 3)",
    "({x}).masked_fill({c}, -math_inf)",
    "({x}) ** 0.5",
    "({x}) ** 2.0",
    "({x}).clamp(min=0.0)",
    "torch.take(ids, {i})",
    "torch.take(rows, {i})",
    "ids.type_as({x})[{i}]",
    "ids.to({i})[{j}]",
    "torch.bucketize({i}, ids, out_int32=True)",
    "({x}).round()",
    "({x}).exp()",
    "torch.exp2({x})",
    "torch.log({x})",
    "({x}).log2()",
    "torch.log10(({x}).abs())",
    "torch.log1p({x})",
    "torch.tanh({x})",
    "torch.sigmoid(({x}) / 8)",
    "2 ** ({i} % 5)",
    "torch.pow(2, {i} % 7)",
    "({x}).clamp(min=double)",
    "({x}).clamp(-2, 0.5)",
    "({x}) / (({y}) * 1e-40)",
    "cube[{k}, {i}, :].amax()",
    "cube[{k}, :, {i} % 4].sum()",
    "cube[..., {i} % 4][{k}, {j}]",
    "cube[{k}, {i}][..., 0]",
    "cube[{k}][{i}, 1:3].amin()",
    "(cube[{k}, {i}] - cube[{k}, {j}]).abs().max(-1).values",
    "(cube[{k}, {i}] - cube[{k}, {j}]).min(dim=0)[0]",
    "cube[{k}, {i}].min(0).indices",
    "(cube[{k}, {i}] / 3 - cube[{k}, {j}].float()).square().sum(-1).sqrt()",
    "(cube[{k}, {i}] * odd[{j}]).amax(-1)",
    "(cube[{k}, {i}].half() * half[{j}]).sum()",
    "cube[{k}, {i}].unbind()[1] - cube[{k}, {j}].unbind(-1)[2]",
    "(lambda r, *rest: r * rest[1])(*cube[{k}, {i}])",
    "torch.stack([{i}, {j}]).amax()",
    "torch.stack((cube[{k}, {i}], cube[{k}, {j}]), 1).sum(1).amin()",
    "torch.stack((cube[{k}, {i}], cube[{k}, {j}]), -1)[2, 1]",
    "torch.fmod({x}, 5)",
    "torch.fmod({x}, {y})",
    "({x}).sign()",
    "torch.sgn({x})",
    "5 & ({x} + q)",
    "({x}) & 7",
    "({x}) & -8",
    "({x}) | ({y})",
    "({i}) & ({j})",
    "({i}) | ({j})",
    "({i}) ^ ({j})",
    "5 << ({i} % 4)",
    "({x} + q) << ({i} % 3)",
    "({x} + q) >> ({i} % 3)",
    "1000 >> ({i} % 5)",
    "torch.where({x} < {y}, {x}, {y})",
    "torch.where({i} < 5, 5, {i})",
    "torch.where({i} >= {j}, {i} - {j}, {j} - {i})",
    "torch.where({j} > {i}, {i}, {j})",
    "(lambda x: torch.where(x > 7, 7, x))({i})",
    "(lambda x, y: torch.where(x <= y, y, x))({i}, {j})",
    "(lambda x, y: torch.where(y < x, x, y))({x}, {y})",
    "(ids <= {x}).sum()",
    "(rows[{k}] * {j}).sum()",
    "rows[{k}].amax()",
    "rows[{k}].max()",
    "rows[{k}].min()",
    "(ids - {i}).abs().amin()",
    "torch.count_nonzero(ids > {x})",
    "rows[{k}][{i}]",
    "cube[{k}][{i}][{j} % 4]",
    "cube[{k}, {i}][2]",
    "cube[{k}, {i}].sum(-1)",
    "cube[{k}].sum(dim=(0, 1))",
    "cube[{k}, {i}].unsqueeze(0).amin((0, 1))",
    "cube[{k}].amax(0, keepdim=True)[0, 2]",
    "grid[{i} // 8, {j} // 8]",
    "grid[{i} // 7][{j} // 7]",
    "torch.ones_like({x})",
    "torch.full_like({x}, 3)",
    "({x}).new_tensor(2)",
    "({c}).long()",
    "({c}) * ({x})",
    "({c}) + ({d})",
    "({c}) + 1",
    "({c}) ** 1",
    "({c}) / 2",
]
TRUTH = [
    "{x} < {y}",
    "{x} <= {y}",
    "{x} > {y}",
    "{x} >= {y}",
    "{x} == {y}",
    "{x} != {y}",
    "torch.lt({x}, {y})",
    "torch.ne({x}, {y})",
    "({c}) & ({d})",
    "({c}) | ({d})",
    "({c}) ^ ({d})",
    "~({c})",
    "torch.logical_and({x}, {d})",
    "torch.logical_or({c}, {y})",
    "torch.logical_xor({x}, {y})",
    "torch.logical_not({x})",
    "({x}).bool()",
    "({c}) == ({d})",
    "({c}) <= ({d})",
    "torch.where({c}, {d}, {c})",
    "torch.where({c}, {d}, True)",
    "flags[{i}]",
    "square[{i}, {j}]",
    "(ids == {x}).any()",
    "(ids != {x}).all()",
    "({x} == {i}).any()",
    "(({i} + 0 * q)[..., None] == ids).any(-1)",
    "(({i} + 0 * q)[None] == jumbled).any()",
    "torch.isin({x}, jumbled)",
    "torch.isin({i}, ids, invert=True)",
    "rows[{k}][{i}] == rows[{k}][{j}]",
    "square[{i}][{j}]",
    "(square[{i}] & square[{j}]).any()",
    "chosen[{i} // 8, {j} // 8]",
    "torch.isnan({x})",
    "torch.logical_or(({x}) * 1e-7, half[{i}])",
    "({c}) * ({d})",
    "({c}) + ({d})",
    "({c}).where({d}, {c})",
    "({c}).masked_fill({d}, False)",
    "torch.isin({x}, rows[{k}])",
    "torch.isin({i}, cube[{k}, {j}])",
    "(({x}) - fraction).isclose(({y}) * 1.0)",
    "(bytes_[{i}][None] > 3).any(0)",
    "bytes_[{i}].any().bool()",
    "true & ({c})",
]
PLAIN_TRUTH = ["q >= kv", "b == h", "flags[q]", "square[q, kv]", "q % 3 == 1"]


@st.composite
def expressions(draw: st.DrawFn, kind: str = "c", depth: int = 3, odd: bool = True) -> str:
    """Write Python code of the kind that a hole of a template needs.

    kind: a number ("x", "y"), an index ("i", "j", "k"), a truth value ("c", "d") or a dtype ("t").

    depth: how deeply templates are nested.
    odd: whether values near the limits of their dtypes, infinite ones and NaN occur as operands.
    """

    def fill(template: str, below: int) -> str:
        for hole in "xyijkcdt":
            while f"{{{hole}}}" in template:
                template = template.replace(f"{{{hole}}}", draw(expressions(hole, below, odd)), 1)
        return template

    if kind == "t":
        return draw(st.sampled_from(DTYPES))
    if kind == "k":
        return draw(st.sampled_from(["b", "h", "q % 2", "1", "-2"]))
    if kind in "ij":
        return fill(draw(st.sampled_from(INDICES[:6] if depth <= 0 else INDICES)), depth - 1)
    if depth <= 0:
        simple = LEAVES + ODD_LEAVES * odd + [f"{t}[{i}]" for t in ONE_DIMENSIONAL for i in ("q", "kv")]
        return draw(st.sampled_from(simple if kind in "xy" else PLAIN_TRUTH))
    return fill(draw(st.sampled_from(TRUTH if kind in "cd" else ARITHMETIC + CAPTURED * 2)), depth - 1)


def compiled(expression: str, tables: dict[str, Any] = TABLES) -> Callable[..., Any]:
    """Return the function (b, h, q, kv) of an expression; it captures `tables`."""
    names = tables | {"math_inf": math.inf, "math_nan": math.nan}
    return eval(f"lambda b, h, q, kv: {expression}", names)


# --- masks ---

LONGEST = 600  # the greatest length of q and kv
MAX_BATCH_AND_HEADS = 3


@functools.cache
def long_tables(device: str) -> dict[str, Any]:
    """Return the tensors that `composed` and `structured` functions capture.

    They are longer than TABLES, and have rows for each batch element and head.
    """
    generator = torch.Generator().manual_seed(4)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    more = {
        "doc": (torch.rand(MAX_BATCH_AND_HEADS, LONGEST, generator=generator) < 1 / 64).cumsum(1),
        "rows": ints(-5, 99, MAX_BATCH_AND_HEADS, LONGEST),
        "cube": ints(-5, 9, MAX_BATCH_AND_HEADS, LONGEST, 4).int(),
        "table": ints(-9, 9, MAX_BATCH_AND_HEADS, 2 * LONGEST),  # q - kv may be its index, and wrap
        "bias": ints(-9, 9, MAX_BATCH_AND_HEADS, 90),
        "per_batch": ints(0, 300, MAX_BATCH_AND_HEADS),
        "per_head": torch.randn(MAX_BATCH_AND_HEADS, generator=generator),
        "offsets": torch.arange(20) * 30,
        "seq_idx": torch.arange(LONGEST) // 30,
        "few": torch.tensor([3, 17, 64, 100, 128, 333]),
    }
    every = {**_tables(LONGEST), **more}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in every.items()}


LONG_TABLES = long_tables("cpu")
Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Drawn:
    """A function, as an expression, and the sizes to try it at."""

    expression: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    size: tuple[int, int]

    @property
    def sizes(self) -> tuple[int, int, int, int, tuple[int, int]]:
        return self.batch, self.heads, self.q_len, self.kv_len, self.size


def drawn(write: Callable[[Pick], str]) -> st.SearchStrategy[Drawn]:
    """Return a strategy of functions that `write` composes by picking from lists.

    Hypothesis draws one string of bytes, and each byte picks one item. With one draw for each pick, Hypothesis would
    spend most examples on variations of few functions.
    """

    def decoded(choices: bytes) -> Drawn:
        left = iter(choices)

        def pick(options: Sequence[Any]) -> Any:
            return options[next(left, 0) % len(options)]

        batch, heads = pick([1, 2, 3]), pick([1, 2, 3])
        lengths = [LONGEST - pick([0, 1, 70]) if pick(range(40)) == 39 else pick(pick(LENGTHS)) for _ in range(2)]
        sizes = pick([16, 16, 32, 64, 128, 256, 100]), pick([16, 16, 32, 64, 128, 256, 17])
        expression = write(pick)
        if "isin" in expression:  # torch.vmap calls isin once for every element
            lengths = [n % 48 + 1 for n in lengths]
        return Drawn(expression, batch, heads, *lengths, sizes)

    return st.binary(min_size=160, max_size=160).map(decoded)


# Most lengths are short, because torch's own functions take nearly all the time.
LENGTHS: list[Sequence[int]] = [range(1, 100), range(1, 100), range(20, 120), range(20, 120), range(90, 200)]
LENGTHS += [[1, 16, 127, 128, 129], range(200, 300)]

# Functions as the documentation of `flexmasks.block_mask` allows them: x and y are integers, f and g floats, c, d and e
# truth values, i and j indices of LONGEST elements, k, n (not 0) and s Python numbers, t dtypes. No index leaves its
# tensor, whatever is filled in: on CUDA that would end the process.
GRAMMAR: dict[str, tuple[list[str], list[str]]] = {
    "x": (
        [
            *("{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} + {k}", "{k} - {x}", "{k} * {x}", "-{x}", "abs({x})"),
            *("{x} // {n}", "{x} % {n}", "{x} // ({y} | 1)", "{x} % ({y} | 1)", "{k} // ({x} | 1)", "{k} % ({x} | 1)"),
            *("{x}.clamp({k}, {k})", "{x}.clamp(max={k})", "torch.clip({x}, min={k})", "torch.clip({x}, max={y})"),
            *("torch.minimum({x}, {y})", "torch.maximum({x}, {y})", "torch.min({x}, {y})", "torch.max({x}, {y})"),
            *("torch.where({c}, {x}, {y})", "torch.where({c}, {x}, {k})", "torch.where({c}, {k}, {x})"),
            *("{x} & {y}", "{x} | {y}", "{x} ^ {y}", "{x} & {k}", "{k} | {x}", "{x} ^ {k}", "~{x}"),
            *("{x} >> {s}", "{x} << {s}", "{k} >> ({x} % 6)", "1 << ({x} % 6)", "{x} >> ({y} % 6)"),
            *("{x}.to({t})", "{x}.long()", "{x}.int()", "{x}.to({y})", "{f}.clamp(-900, 900).long()"),
            *("{c}.int()", "{c} * {x}", "{c}.long() + {d}", "(few <= {x}).sum()", "(few - {x}).abs().amin()"),
            *("ids[{i}]", "jumbled[{i}]", "doc[b, {i}]", "doc[b][{i}]", "rows[h, {i}]", "cube[b, {i}, {j} % 4]"),
            *("offsets[seq_idx[{i}]]", "grid[{i} // 8, {j} // 8]", "table[h, {i} - {j} % 600]"),
            *("table[h, q - kv]", "table[h, torch.where(q >= kv, q - kv, 0)]", "bias[h][(q - kv).clamp(-40, 40)]"),
        ],
        ["q", "kv", "q", "kv", "q - kv", "kv - q", "q + kv", "b", "h", "ids[q]", "doc[b, kv]", "per_batch[b]"],
    ),
    "f": (
        [
            *("{x} * 0.5", "{x} / {n}", "{x}.float()", "{x}.double() / 3", "real[{i}]", "per_head[h] * {x}", "-{f}"),
            *("{f} + {g}", "{f} - {x}", "torch.maximum({f}, {g})", "{f}.clamp(-3.5, 80)", "torch.where({c}, {f}, 0.5)"),
        ],
        ["q * 0.1", "kv / 7", "real[kv]", "per_head[h] * q"],
    ),
    "c": (
        [
            *("{x} < {y}", "{x} <= {y}", "{x} > {y}", "{x} >= {y}", "{x} == {y}", "{x} != {y}"),
            *("{x} < {k}", "{k} <= {x}", "{x} > {k}", "{k} >= {x}", "{x} == {k}", "{k} != {x}"),
            *("{f} < {x}", "{f} >= {g}", "{x} <= {f}", "{f} > 2.5", "({x} & {k}) != 0", "{x}.bool()"),
            *("{c} & {d}", "{c} | {d}", "{c} ^ {d}", "~{c}", "{c} & {d} & {e}", "{c} | ~{d}", "{c} == {d}"),
            *("torch.logical_and({c}, {d})", "torch.logical_or({c}, {x})", "torch.logical_xor({c}, {d})"),
            *("torch.logical_not({x})", "torch.where({c}, {d}, {e})", "flags[{i}]", "square[{i}, {j}]"),
            *("doc[b, {i}] == doc[b, {j}]", "doc[b][{i}] == doc[b][{j}]", "square[q][{j}]", "square[kv][{i}]"),
            *("chosen[{i} // 8, {j} // 8]", "torch.isin({x}, few)", "torch.isin({i}, few, invert=True)"),
            *("(few == {x}).any()", "({x} == few).any(-1)", "(few != {x}).all()"),
        ],
        ["q >= kv", "q >= kv", "doc[b, q] == doc[b, kv]", "kv < per_batch[b]", "q - kv < 40", "flags[kv]", "kv < 100"],
    ),
    "i": (["{x}.long() % 40", "{x}.long().clamp(0, 39)", "torch.where({c}, q, 3)"], ["q", "kv", "-1 - q", "kv - 1"]),
    "k": ([], ["0", "1", "3", "-2", "7", "16", "32", "64", "100", "-40", "120"]),
    "n": ([], ["1", "2", "3", "7", "8", "16", "100", "-1", "-3", "-16"]),
    "s": ([], ["0", "1", "3", "5"]),
    "t": ([], ["torch.int8", "torch.uint8", "torch.int16", "torch.int32", "torch.int64"]),
}
GRAMMAR |= {"y": GRAMMAR["x"], "g": GRAMMAR["f"], "d": GRAMMAR["c"], "e": GRAMMAR["c"], "j": GRAMMAR["i"]}


def composed(pick: Pick, kind: str = "c", depth: int = 5) -> str:
    """Write Python code of the kind that a hole in GRAMMAR needs.

    By default this is a mask.
    """
    templates, leaves = GRAMMAR[kind]

    def filled(hole: re.Match[str]) -> str:
        code = composed(pick, hole[1], depth - pick([3, 2, 1]))
        return code if re.fullmatch(r"\w+", code) else f"({code})"

    return re.sub(r"{(\w)}", filled, pick(templates if templates and depth > 0 else leaves))


GEOMETRY = ["kv <= q", "q - kv <= {n}", "kv < {n}", "(q + kv) % {n} == 0", "q // {n} == kv // {n}", "kv <= q + h * {n}"]
GEOMETRY += ["kv < per_batch[b]", "ids[q] == ids[kv]", "abs(q - kv) * per_head[h] < {n}", "q % {n} <= kv % {n}"]
GEOMETRY += ["square[q, kv]", "flags[kv]", "rows[b, q] >= rows[b, kv]", "q > {n}", "kv == {n}"]


def structured(pick: Pick, depth: int = 2) -> str:
    """Write a mask whose conditions on positions are joined by and, or, not."""
    if depth == 0 or pick([True, False, False]):
        return pick(GEOMETRY).replace("{n}", str(pick([1, 7, 32, 100, 250])))
    first, second = structured(pick, depth - 1), structured(pick, depth - 1)
    return pick(["({x}) & ({y})", "({x}) | ({y})", "~({x})"]).format(x=first, y=second)
