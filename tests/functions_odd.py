"""Mask functions in odd styles: some written by hand, the others generated.

All of them are functions that torch's `create_mask` evaluates. Compilers evaluate many of them otherwise.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Callable[..., Tensor]
# (generator, batch, heads, q_len, kv_len, device="cpu") -> function (b, h, q, kv) -> bool. q_len counts positions: with
# an offset, the lengths of the queries and the largest offset together.
Factory = Callable[..., Mask]
Tables = dict[str, Any]
MODULES: Tables = {"torch": torch, "math": math, "F": F, "np": np}


# --- captured tensors ---


def tables(generator: torch.Generator, batch: int, heads: int, q_len: int, kv_len: int, device: str = "cpu") -> Tables:
    """Return tensors to capture by name: of all dtypes, dimensions and layouts.

    Those of one dimension have as many elements as there are queries or keys, whichever are more.
    """
    n = max(q_len, kv_len)

    def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    i8, special, half_special = ints(-128, 128, n, dtype=torch.int8), floats(n), floats(n)
    i8[:3] = torch.tensor([-128, 127, 0])
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 3e38, 1e-40])
    places = torch.arange(n) % 11
    special = torch.where(places < 8, values[places % 8], special)
    half_special = torch.where(places < 6, values[places % 6], half_special)
    quarters = ints(-8, 9, 4, n) / 4  # sums of these meet exactly
    base = ints(-50, 50, 2 * n + 10)
    found: Tables = {
        # one dimension
        "ids": ints(0, 2, n).cumsum(0) // 7,
        "perm": torch.randperm(n, generator=generator),
        "flag": ints(0, 2, n, dtype=torch.bool),
        "i8": i8,
        "u8": ints(0, 256, n, dtype=torch.uint8),
        "i16": ints(-(2**15), 2**15, n, dtype=torch.int16),
        "u16": ints(0, 2**16, n, dtype=torch.uint16),
        "u32": ints(0, 2**32, n, dtype=torch.uint32),
        "u64": ints(0, 2**40, n, dtype=torch.uint64),
        "i32": ints(-100, 100, n, dtype=torch.int32),
        "i64": ints(-100, 100, n),
        "near31": ints(2**31 - 80, 2**31, n, dtype=torch.int32),
        "near62": 2**62 + ints(-(2**61), 2**61, n),
        "near53": 2**53 + torch.arange(n) // 3,
        "divisor": ints(1, 9, n) * (1 - 2 * ints(0, 2, n)),
        "f16": floats(n, dtype=torch.float16),
        "bf": (floats(n) * 4).bfloat16(),
        "f32": floats(n),
        "f64": floats(n, dtype=torch.float64),
        "special": special,
        "special16": half_special.half(),
        "wa": floats(n) * 1e4,
        "wb": quarters[0],
        "wc": quarters[1],
        "wd": quarters[2],
        "tenth": torch.arange(n) / 10,
        "cplx": torch.complex(floats(n), floats(n)),
        "few": ints(0, n, 6),
        "edges": ints(0, n, 9).sort().values,
        "cuts": floats(20).sort().values,
        # more dimensions
        "t2": ints(-50, 50, q_len, kv_len),
        "seen": ints(0, 2, q_len, kv_len, dtype=torch.bool),
        "grid": floats(n, n),
        "small2": ints(-128, 128, n, n, dtype=torch.int8),
        "bb": ints(0, 2, batch, heads, q_len, kv_len, dtype=torch.bool),
        "rows": ints(-9, 9, batch, n),
        "hrows": floats(heads, n),
        "docs": ints(0, 2, batch, n).cumsum(1) // 9,
        "per_b": ints(n // 4, n, batch),
        "per_h": ints(1, 30, heads),
        "slope": floats(heads).abs(),
        "pair": ints(-9, 9, batch, heads),
        "sel": ints(0, n, n, 5),
        "emb": floats(n, 4),
        "emb16": floats(n, 4, dtype=torch.float16),
        "embi": ints(-9, 9, n, 4),
        "vocab": floats(12, 3),
        "bits": ints(0, 2**31, n, (n + 30) // 31),
        # no dimension
        "n0": torch.tensor(7),
        "z8": torch.tensor(100, dtype=torch.int8),
        "zu8": torch.tensor(200, dtype=torch.uint8),
        "z16": torch.tensor(30000, dtype=torch.int16),
        "z32": torch.tensor(2**31 - 5, dtype=torch.int32),
        "zb": torch.tensor(True),
        "zneg": torch.tensor(-3),
        "ztenth": torch.tensor(0.1),
        "zhalf": torch.tensor(0.1, dtype=torch.float16),
        "zdouble": torch.tensor(0.1, dtype=torch.float64),
        "znan": torch.tensor(math.nan),
        "zinf": torch.tensor(math.inf),
        "zbf": torch.tensor(300.0, dtype=torch.bfloat16),
        "base": base,
        "cols": ints(-9, 9, n, 7),
        "row": ints(-9, 9, kv_len),
        # of heads and batch elements, in narrow dtypes
        "h8": ints(-128, 128, heads, dtype=torch.int8),
        "h16": ints(-(2**15), 2**15, heads, dtype=torch.int16),
        "h32": ints(-(2**31), 2**31, heads, dtype=torch.int32),
        "hhalf": floats(heads, dtype=torch.float16),
        "bu8": ints(0, 256, batch, dtype=torch.uint8),
        "least": torch.where(torch.arange(n) % 5 == 3, -(2**63), ints(-9, 9, n)),
    }
    found = {name: x.to(device) for name, x in found.items()}
    # Views, made on the device: a copy to a device may change the strides.
    base, grid = found["base"], found["grid"]
    found |= {
        "even": base[::2],
        "later": base[5:],
        "column": found["cols"][:, 3],
        "turned": found["t2"].T,
        "spread": found["row"].expand(q_len, kv_len),
        "same": found["n0"].expand(n),
        "windows": base.unfold(0, 4, 2),
        "diagonal": grid.diagonal(),
        "inner": grid[1:-1, 2:],
        "permuted": found["bb"].permute(3, 1, 0, 2),
        "toeplitz": base.as_strided((n, n), (1, 1)),
    }
    return found


@functools.cache
def _maker(expression: str) -> tuple[Callable[..., Mask], list[str]]:
    """Return the maker of an expression's function, and the names of its arguments: captured tensors."""
    known = tables(torch.Generator(), 1, 1, 3, 3)
    names = sorted(set(re.findall(r"[a-z_]\w*", expression)) & set(known))
    return eval(f"lambda {', '.join(names)}: lambda b, h, q, kv: {expression}", dict(MODULES)), names


def of_expression(expression: str) -> Factory:
    """Return the factory of an expression; the tensors that it names become a closure."""

    def factory(generator: torch.Generator, *sizes: int, device: str = "cpu") -> Mask:
        make, names = _maker(expression)
        found = tables(generator, *sizes, device=device)
        return make(*(found[name] for name in names))

    return factory


# --- written by hand ---

EXPRESSIONS: dict[str, list[str]] = {
    "chained indices": [
        "t2[q][kv] > 20",
        "bb[b][h][q][kv]",
        "bb[b, h][q, kv]",
        "emb[q][0] > emb[kv][1]",
        "t2[q][..., kv] > 0",
        "grid[q, :][kv] > grid[kv, :][q]",
        "bb[b][:, q][h][kv]",
        "rows[b][q] > hrows[h][kv]",
        "grid[q, None, kv][0] > 0",
        "bb[b, :, q, kv].any()",
        "torch.stack([rows[b, q], rows[b, kv]])[h % 2] > 0",
        "bits[q][kv // 31] >> (kv % 31) & 1 == 1",
    ],
    "reductions": [
        "(sel[q] == kv).any(-1)",
        "(sel[q] != kv).all()",
        "(sel[q] > kv).sum() > 2",
        "(embi[q] * embi[kv]).sum(-1) > 0",
        "emb[q].max(-1).values > emb[kv].min(-1).values",
        "emb[q].argmax() == emb[kv].argmax()",
        "torch.isin(kv, sel[q])",
        "torch.isin(q - kv, few)",
        "torch.stack([q == kv, q > kv + 9, flag[kv]]).any()",
        "(emb[q] > 0).eq(emb[kv] > 0).all(-1)",
        "(few == kv).any() | (few < q).all()",
        "embi[q].prod() > embi[kv].prod()",
        "embi[q].cumsum(0)[2] > kv",
        "embi[q].sort().values[1] > embi[kv].sort(descending=True).values[1]",
        "(emb[q] - emb[kv]).abs().amax() < 1.5",
        "emb16[q].mean(-1) > emb16[kv].amin(-1)",
        "torch.logical_and(*(embi[kv][:2] > embi[q][:2]))",
        "embi[q].topk(2).values.sum() > embi[kv].median()",
    ],
    "gathers": [
        "F.embedding(q % 12, vocab)[0] > F.embedding(kv % 12, vocab)[1]",
        "torch.gather(i64, 0, q[None])[0] > torch.gather(i64, 0, kv[None])[0]",
        "torch.take(grid, q * 3 + kv) > 0",
        "i64.index_select(0, q[None]).squeeze() > i64[kv]",
        "torch.searchsorted(cuts, f32[q]) > torch.searchsorted(cuts, f32[kv], right=True)",
        "torch.bucketize(q, edges) == torch.bucketize(kv, edges)",
        "perm[perm[q]] > kv",
        "ids[perm[q]] == ids[perm[perm[kv]]]",
        "perm[q].eq(perm[kv]) | flag[perm[kv]]",
        "grid[perm[q], perm[kv]] > grid[kv, q]",
        "torch.take_along_dim(embi[q], (kv % 4)[None], 0)[0] > 0",
        "F.one_hot(q % 5, 5)[kv % 5] == 1",
        "torch.where(flag[q], perm[q], kv)[None].take(q * 0) > kv",
    ],
    "no dimensions": [
        "n0 + q > kv",
        "z8 + q > kv * 2",
        "(z8 + i8[q]) > i8[kv]",
        "z8 + z8 + q > kv - 60",
        "(zu8 + zu8) + q > kv + 60",
        "i8[q] + zu8 > i8[kv]",
        "zu8 - i32[q] > kv",
        "z16 + z16 + q < kv",
        "z32 + 10 + q < kv",
        "z32 + q > z32",
        "zb + q > kv",
        "zb & (q >= kv)",
        "tenth[q] == q * ztenth",
        "tenth[q] >= q * zdouble",
        "q * zdouble > kv * ztenth",
        "f16[q] > zhalf",
        "q * zhalf == kv * 0.1",
        "zbf + q > zbf + kv",
        "~(q * znan <= kv)",
        "(zinf - q) > kv - zinf",
        "q // zneg == kv // zneg",
        "q % zneg >= kv % zneg",
    ],
    "narrow dtypes": [
        "i8[q] + i8[kv] > 0",
        "i8[q] * 2 > i8[kv]",
        "abs(i8[q]) < 5",
        "-i8[q] > i8[kv]",
        "i8[q] > -129",
        "u8[q] - u8[kv] > 100",
        "u8[q] + 100 > u8[kv]",
        "-u8[q] > u8[kv]",
        "u8[q] > -1",
        "~u8[q] > u8[kv]",
        "(u8[q] << 4) > u8[kv]",
        "(i8[q] << 1) >> 1 == i8[q]",
        "i8[q] << (kv % 7) > 0",
        "u8[q] >> (u8[kv] % 8) & 1 == 1",
        "i16[q] * i16[kv] > 0",
        "i16[q] ** 2 > i16[kv]",
        "u16[q] == u16[perm[q]]",
        "u16[q].view(torch.int16) > u16[kv].view(torch.int16)",
        "u16[q].int() - u16[kv].int() > 0",
        "u32[q].long() * 2 > u32[kv].long()",
        "u64[q].long() % 97 > u64[kv].long() % 89",
        "u8[q] // 7 == u8[kv] // 7",
        "i8[q] // -3 > i8[kv] % 5",
        "(i8[q] - i8[kv]).abs() < 40",
        "i8[q].sum() > i8[kv]",
        "u8[q] * -1 > kv",
        "i8[q].bitwise_xor(i8[kv]) < 0",
        "i8[q] + u8[kv] > 0",
        "(flag[q] + u8[kv]) > 200",
    ],
    "overflow": [
        "i32[q] * 100000000 > 0",
        "q.int() << 28 > kv",
        "(q.int() * 1000003) ^ (kv.int() * 998244353) > 0",
        "i32[q] ** 8 > i32[kv]",
        "near31[q] + kv.int() > 0",
        "near31[q] + near31[kv] == -2",
        "near62[q] + near62[kv] > 0",
        "near62[q] * 3 > near62[kv]",
        "q * 40000000 * kv > 2**31",
        "(q * 6364136223846793005 + kv * 1442695040888963407) >> 33 & 1 == 1",
        "near53[q].double() == near53[kv].double()",
        "near53[q].float() > near53[kv].float()",
        "near53[q] * 1.0 == near53[kv] * 1.0",
        "(q + 2**53) / 2 > (kv + 2**53) / 2",
        "abs(near62[q] * 2) < near62[kv]",
        "q * kv * 46341 * 46341 % 7 == 3",
        "i32[q] * i32[kv] * i32[q] * i32[kv] * i32[q] > 0",
        "(near31[q] + 1 - 1).long() > near31[kv]",
    ],
    "division": [
        "(q - 50) // 7 == (kv - 50) // 7",
        "(q - 50) % 7 >= (kv - 50) % -7",
        "(q - 50) // -7 > (kv - 37) // 7",
        "(q - 50) // divisor[kv] > 2",
        "(q - 50) % divisor[kv] > 0",
        "i64[q] // divisor[q] > i64[kv] // divisor[kv]",
        "torch.div(i64[q], divisor[kv], rounding_mode='trunc') > 3",
        "torch.div(i64[q], 7, rounding_mode='floor') > i64[kv] // 7",
        "torch.div(f32[q], 0.1, rounding_mode='floor') > torch.div(f32[kv], 0.1, rounding_mode='trunc')",
        "torch.fmod(i64[q], 7) > torch.fmod(i64[kv], -7)",
        "torch.fmod(f32[q], 0.1) > 0.05",
        "torch.remainder(f32[q], -0.3) < torch.remainder(f32[kv], 0.3) - 0.3",
        "q / 3 == kv / 3 + 1",
        "(q / 7) * 7 == q",
        "q / (kv - 20) > 1",
        "100 // (q + 1) > kv % 9",
        "-q // 4 < -kv // 3",
        "(q.int() / 3).int() == (kv.int() / 3).int()",
        "f32[q] // wb[kv] > 1",
        "special[q] % 2 > 0.5",
        "q.float() // 0.1 == kv.float() * 10",
        "tenth[q] // 0.1 == q",
    ],
    "half precision": [
        "f16[q] * 60000 * 2 == f16[kv] * 60000 * 2",
        "bf[q] + 256 > bf[kv] + 256",
        "f16[q] + 2048 > f16[kv] + 2048",
        "f16[q] * 0.1 > f16[kv] * zhalf",
        "(f16[q] * 10).round() == (f16[kv] * 10).round()",
        "f16[q] == f16[q].half() + 1e-5",
        "q.half() == kv.half() + 0.25",
        "(q + 2040).half() == (kv + 2040).half()",
        "(q + 250).bfloat16() == (kv + 250).bfloat16()",
        "q.bfloat16() * 0.1 >= kv.bfloat16() * 0.1 + 0.5",
        "q.half() / 3 * 3 == q",
        "f16[q] - bf[kv] > 0.1",
        "f16[q] + f32[kv] > 0.1",
        "(f16[q] * f16[kv] - f16[q]) * f16[kv] >= f16[q] * 0.5",
        "bf[q] * bf[kv] + bf[q] == (bf[q].float() * bf[kv] + bf[q]).bfloat16()",
        "(emb16[q] * emb16[kv]).amax() > 0.1",
        "tenth[q].half() == 0.1 * q.half()",
        "special16[q] * 2 > special16[kv]",
    ],
    "floats": [
        "special[q] * 0 == 0",
        "special[q] != special[q]",
        "torch.isnan(special[q]) | torch.isinf(special[kv])",
        "torch.nan_to_num(special[q]) > torch.nan_to_num(special[kv], nan=1.0, posinf=2.0)",
        "torch.signbit(special[q])",
        "1 / special[q] > special[kv]",
        "torch.maximum(special[q], f32[kv]) > 0",
        "torch.fmin(special[q], special[kv]) < 0",
        "special[q].clamp(-1, 1) >= special[kv].clamp(min=0)",
        "~(special[q] < special[kv])",
        "wb[q] * wc[kv] + wd[q] > wd[kv]",
        "wb[q] * wc[kv] + wd[q] == wd[kv]",
        "wa[q] * f32[kv] + wa[kv] - wa[q] * f32[kv] == wa[kv]",
        "(wa[q] + f32[kv]) - wa[q] > f32[kv]",
        "f32[q] * f32[kv] - f32[q] * f32[kv] == 0",
        "tenth[q] + tenth[kv] == (q + kv) / 10",
        "q * 0.1 + kv * 0.2 == (q + 2 * kv) * 0.1",
        "tenth[q] == q.double() * 0.1",
        "f64[q] + 1e-17 > f64[q]",
        "f64[q].float() == f64[q]",
        "special[q] * special[kv] > 1e38",
        "special[q] / 3 * 3 == special[q]",
        "(special[q] - special[kv]) <= 0",
        "torch.copysign(f32[q], special[kv]) > 0",
        "torch.isclose(tenth[q], kv * 0.1)",
        "(q * 1e-40).float() > 0",
        "special[q].bool()",
        "math.nan < f32[q]",
    ],
    "where": [
        "torch.where(q > kv, 1, 0) + torch.where(flag[q], 0, -1) == 0",
        "torch.where(flag[kv], q, 0.5) > torch.where(flag[q], kv, f32[q])",
        "torch.where(q > 50, i8[q], 100) > kv",
        "torch.where(q > kv, f16[q], f64[kv]) > 0.1",
        "torch.where(flag[q], u8[kv], i8[kv]) > 0",
        "torch.where(flag[q], math.inf, kv) > torch.where(flag[kv], -math.inf, q)",
        "torch.where(q >= kv, q - kv, kv - q).bool()",
        "torch.where(flag[q], seen[q, kv % 40], True)",
        "q.where(flag[kv], kv.float()) >= kv",
        "i64[q].masked_fill(flag[kv], -3) < i64[kv]",
        "torch.where(kv == 0, 1, q // torch.where(kv == 0, 1, kv)) > 1",
    ],
    "casts": [
        "(q * 40 + kv).to(torch.int8) > 0",
        "(q - kv).byte() < 100",
        "(i64[q] * 1000).short() > i64[kv]",
        "(q % 3).bool() & (kv % 2).bool()",
        "f32[q].long() == f32[kv].long()",
        "(f32[q] * 20).to(torch.int8) >= (f32[kv] * 20).to(torch.int8)",
        "(q * 1.0 - 50).int() // 10 == (kv * 1.0 - 50).int() // 10",
        "f32[q].bool() & (f32[kv].int().bool())",
        "i64[q].float().half().long() > kv - 50",
        "(near62[q]).int() > near62[kv].short()",
        "flag[q].float() + flag[kv].half() > 1",
        "q.to(torch.float64).div(3).to(torch.float32) == kv / 3",
        "(f32[q] > 0).int() * 2 - 1 == (f32[kv] > 0).char()",
        "f32[q].view(torch.int32) % 2 == f32[kv].view(torch.int32) % 2",
        "u8[q].view(torch.int8) > 0",
        "i32[q].type_as(f32) / 3 > i32[kv].type(torch.float16)",
    ],
    "truth values as numbers": [
        "(q > 3) + (kv > 5)",
        "(q > 30) * (kv > 5) == (q > kv)",
        "flag[q] ^ flag[kv] ^ (q > kv)",
        "~flag[q] | flag[kv]",
        "~(q - q.clone() - 1 + flag[kv]).bool()",
        "(q > 30) + 1 > (kv > 20) * 2",
        "1 * flag[q] - 1 * flag[kv] < 0",
        "flag[q] > flag[kv]",
        "(flag[q] == flag[kv]) != (q < kv)",
        "flag[q] & 1 == flag[kv]",
        "(q & 12 & kv) == 0",
        "((q | kv) ^ 5) & 1 == 0",
        "torch.logical_and(q - 5, kv % 3)",
        "torch.logical_or(f32[q].round(), i64[kv] // 50)",
        "torch.logical_not(q - kv)",
        "torch.logical_xor(q % 4, special[kv])",
        "flag[q].mul(flag[kv]).add(q > kv)",
        "(q > kv) < (kv > 10)",
        "1 - (q > kv).int() == flag[q]",
        "(flag[q] / 2 + flag[kv]) > 0.5",
        "flag[q] << 1 > flag[kv]",
        "q.bool() & kv.bool() & ~h.bool()",
    ],
    "negative indices": [
        "i64[q - 5] > i64[kv]",
        "i64[-1 - kv] > i64[q]",
        "t2[q, kv - 30] > 0",
        "t2[-q - 1][-1 - kv] > 0",
        "bb[b - 1, h - 2, q, kv]",
        "emb[q, -1] > emb[kv][-2]",
        "i64[(q - kv).clamp(-50, 50)] > 0",
        "flag[torch.where(q > kv, -1, kv)]",
    ],
    "views": [
        "turned[kv, q] > 0",
        "t2.T[kv, q] > 20",
        "even[q] > even[kv]",
        "i64[::2][q // 2] > i64[::3][kv // 3]",
        "later[q] > later[kv]",
        "base[7:][q] > base[3:][kv]",
        "column[q] > column[kv]",
        "spread[q, kv] > 0",
        "row.expand(5, -1)[q % 5, kv % row.shape[0]] > 0",
        "same[q] + q > kv",
        "windows[q].sum() > windows[kv, 1]",
        "diagonal[q] > diagonal[kv]",
        "inner[q % inner.shape[0], kv % inner.shape[1]] > 0",
        "permuted[kv, h, b, q]",
        "toeplitz[q, kv] > 0",
        "i64.flip(0)[q] > i64.roll(3)[kv]",
        "bb.flatten()[((b * bb.shape[1] + h) * bb.shape[2] + q) * bb.shape[3] + kv]",
        "seen.view(-1)[q * seen.size(1) + kv]",
        "torch.tril(seen)[q, kv]",
        "grid.t().contiguous()[q, kv] > grid.movedim(0, 1)[kv, q]",
    ],
    "functions of numbers": [
        "torch.clamp(q - kv, 0, 9) == (q - kv)",
        "torch.clamp(q, min=kv, max=kv + 9) == q",
        "torch.clamp(q - 0.5, 3) > kv",
        "torch.sign(q - kv) == torch.sign(f32[q])",
        "(f32[q] * 2).round() == (f32[kv] * 2).round()",
        "(q / 2).round() == torch.floor(kv / 2) + 1",
        "torch.ceil(q / 10) > torch.floor(kv / 10)",
        "torch.frac(tenth[q]) > torch.trunc(tenth[kv]) / 10",
        "torch.sqrt(q.float()) > kv ** 0.5 + 0.01",
        "torch.exp(f32[q]) > torch.exp2(f32[kv])",
        "torch.tanh(f32[q]) > torch.sigmoid(f32[kv])",
        "torch.sin(q * 1000.0) > torch.cos(kv)",
        "torch.log(q - 50.0) < 3",
        "torch.atan2(q - 40.5, kv - 30.5) > 0.5",
        "torch.minimum(i8[q], kv) < torch.maximum(u8[q], q)",
        "torch.pow(2, q % 40) > kv * 1000",
        "torch.hypot(q - 40.0, kv - 40.0) < 30.2",
        "torch.lerp(f32[q], f32[kv], 0.3) > 0",
        "torch.addcmul(wb[q], wc[kv], wd[q], value=0.5) > wd[kv]",
        "torch.rsqrt(q + 1.0) < torch.reciprocal(kv + 1.0)",
        "torch.gcd(q + 1, kv + 1) == 1",
        "(q ** 3 - kv ** 2) % 11 > 5",
        "torch.erf(f32[q]) > f32[kv].square()",
    ],
    "constants": [
        "torch.tensor(True, device=q.device)",
        "torch.ones((), dtype=torch.bool, device=q.device)",
        "zb",
        "~zb",
        "zb.logical_not() | flag[3]",
        "q.new_ones(()).bool() & (kv >= 0)",
        "torch.full_like(kv, 5) > q",
        "q == q",
        "torch.zeros_like(flag[q])",
    ],
    "batch and head": [
        "docs[b, q] == docs[b, kv]",
        "(docs[b][q] == docs[b][kv]) & (q >= kv)",
        "kv < per_b[b]",
        "(q - kv).abs() < per_h[h]",
        "(q - kv) * slope[h] < 3.3",
        "pair[b, h] > rows[b, kv]",
        "pair[b][h] * (q - kv) >= 0",
        "(b + h + q + kv) % 3 == 0",
        "(q ^ kv) >> (b + h) & 1 == 0",
        "hrows[h, q] * (b + 1) > hrows[h - 1, kv]",
        "torch.where(b == 0, q >= kv, kv >= q) & (h != 1) | (kv == h)",
        "b == h",
        "(1 << h) & q != 0",
        "h * 1.5 + b / 3 > rows[b, q]",
    ],
    "bits": [
        "(lambda x: x - ((x >> 1) & 0x55555555))(q ^ kv) & 3 == 1",
        "(q ^ kv) & -(q ^ kv) > 2",
        "(q & (q - 1)) == (kv & (kv - 1))",
        "~q & kv == 0",
        "(q >> kv) == 0",
        "(q << kv) > 2**20",
        "(1 << (kv % 63)) > q",
        "(i32[q] >> 40 % 31) == i32[kv] >> 31",
        "(-q) >> 2 == (-kv) // 4",
        "(u8[q] & u8[kv]).bool()",
        "(q.int() << 31) < (kv.int() << 30)",
    ],
    "complex numbers": [
        "(cplx[q] * cplx[kv]).real > 0",
        "cplx[q].abs() > cplx[kv].imag",
        "torch.view_as_real(cplx[q])[1] > torch.angle(cplx[kv])",
    ],
    "lists and constants": [
        "grid[[q, kv]] > 0",
        "(i64[torch.tensor([3, 5, 8], device=q.device)] > kv - q).any()",
        "torch.stack([i8, i8.flip(0)])[h % 2, q] > i8[kv]",
        "torch.tensor([3, 50, 9], device=q.device)[h] > (q - kv).abs()",
        "torch.cat([few, edges])[q % 15] > kv",
        "(few[:0] == kv).any() | flag[q]",
        "(few[:0] == kv).all() & flag[q]",
        "torch.vmap(lambda x: x > kv)(few).any() & flag[q]",
        "bb.sum(-1)[b, h, q] > kv",
        "torch.cumsum(flag, 0)[q] > flag.cumsum(0, dtype=torch.int8)[kv]",
        "q.new_tensor([1, 2**40, 3])[q % 3] * q > kv * 2**39",
        "torch.arange(5, device=q.device)[q % 5] == kv % 4",
    ],
    "indices of 64 bits": [
        "q + 2**31 > kv + 2**31 - 3",
        "q * 2**33 // 2**33 == q - kv % 2",
        "q - 2**62 - 2**62 > kv - 2**62 - 2**62",
        "kv < torch.iinfo(q.dtype).max - q",
        "(q << 40) + kv > (kv << 40) + q",
        "(q - kv) ** 7 > 10**10",
        "(q - kv) >> 63 == -1",
        "(q * 2**32).bool()",
        "(q + 2**24).float() > (kv + 2**24).float()",
        "(q * 3 - 2**40) % 1000003 > kv * 10000",
    ],
    "arrays of NumPy": [
        "q + np.int8(100) > kv * 2",
        "f32[q] > np.float64(0.1)",
        "q * np.float32(0.1) == kv * 0.1",
        "torch.where(q > np.int64(3), kv, np.pi) > 4",
    ],
}


def _views_by_dtype() -> bool:
    """Return whether vmap knows views in another dtype; that of torch 2.11 does not."""
    try:
        torch.vmap(lambda x: x.view(torch.int32))(torch.ones(2))
    except RuntimeError:
        return False
    return True


# name -> factory
WRITTEN: dict[str, Factory] = {
    f"{style}: {expression}": of_expression(expression)
    for style, group in EXPRESSIONS.items()
    for expression in group
    if ".view(torch." not in expression or _views_by_dtype()
}

# Functions that torch evaluates otherwise on single numbers. It rounds a constant to half precision before it
# multiplies a single half-precision number, and computes in float32 for several. A list as an index makes it warn.
UNLIKE_SINGLE_NUMBERS = [
    "half precision: tenth[q].half() == 0.1 * q.half()",
    "half precision: f16[q] * 0.1 > f16[kv] * zhalf",
    "lists and constants: grid[[q, kv]] > 0",
]


def written(make: Callable[[Tables], Mask]) -> Callable[[Tables], Mask]:
    """Add a function that makes a mask from tables to WRITTEN, under its own name."""

    def factory(generator: torch.Generator, *sizes: int, device: str = "cpu") -> Mask:
        return make(tables(generator, *sizes, device=device))

    WRITTEN[f"def: {make.__name__.strip('_').replace('_', ' ')}"] = factory
    return make


@written
def _partial(t: Tables) -> Mask:
    def mask(limit: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, ids: Tensor, more: int) -> Tensor:
        return (ids[q] == ids[kv]) | (q + more > kv + limit)

    return functools.partial(mask, t["z8"], ids=t["ids"], more=50)


@written
def _partial_of_a_partial(t: Tables) -> Mask:
    def mask(x: Tensor, y: float, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return x[q] * y > x[kv]

    return functools.partial(functools.partial(mask, t["f16"]), 0.1)


@written
def _nested_closures(t: Tables) -> Mask:
    def outer(x: Tensor) -> Mask:
        def middle(scale: int) -> Mask:
            def inner(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                return x[q] * scale > x[kv]

            return inner

        first, second = middle(3), middle(100)
        return lambda b, h, q, kv: first(b, h, q, kv) ^ second(b, h, kv, q)

    return outer(t["i8"])


@written
def _default_arguments(t: Tables) -> Mask:
    def mask(
        b: Tensor, h: Tensor, q: Tensor, kv: Tensor, x: Tensor = t["u8"], n: int = 200, f: Any = operator.sub
    ) -> Tensor:
        return f(x[q], x[kv]) > n

    return mask


@dataclass
class _Rule:
    """Mask function as a method, and as an object that is called."""

    table: Tensor
    limit: Tensor
    scale: float = 0.1

    def mask(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.table[q] * self.scale > self._limited(kv)

    def _limited(self, kv: Tensor) -> Tensor:
        return self.table[kv].float().clamp(max=self.limit)

    @classmethod
    def of_class(cls, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q * cls.scale).half() > kv * cls.scale

    @staticmethod
    def alone(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - 50) // 7 > (kv - 50) % -7


class _Called(_Rule):
    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.mask(b, h, q, kv) ^ (q == kv)


@written
def _method(t: Tables) -> Mask:
    return _Rule(t["bf"], t["ztenth"]).mask


@written
def _method_of_a_class(t: Tables) -> Mask:
    return _Rule.of_class


@written
def _static_method(t: Tables) -> Mask:
    return _Rule.alone


@written
def _method_of_an_object_with_wide_numbers(t: Tables) -> Mask:
    return _Rule(t["near62"], t["near62"][3], 3).mask


@written
def _called_object(t: Tables) -> Mask:
    called = _Called(t["f16"], t["zhalf"])
    return lambda b, h, q, kv: called(b, h, q, kv)


@written
def _changes_a_tensor_of_its_own(t: Tables) -> Mask:
    table = t["i8"]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = table[q].clone()
        x += 100
        x.mul_(2)
        return x > table[kv]

    return mask


@written
def _changes_an_index(t: Tables) -> Mask:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q = q.clone()
        q //= -7
        kv = kv.clone().neg_().sub_(3)
        return q <= kv // 7

    return mask


@written
def _fills_a_copy(t: Tables) -> Mask:
    row = t["embi"]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        mine = row[q] + 0
        mine[1] = 7
        return mine.sum() > row[kv].sum()

    return mask


@written
def _loops(t: Tables) -> Mask:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = (q * 2654435761 + kv * 40503).int()
        for shift in (13, 7, 17):
            x = x ^ (x << shift)
        return x % 3 == 0

    return mask


@written
def _popcount(t: Tables) -> Mask:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = q ^ kv
        count = torch.zeros_like(x)
        while_bits = 8
        for i in range(while_bits):
            count = count + ((x >> i) & 1)
        return count % 2 == 0

    return mask


@written
def _popcount_of_bytes(t: Tables) -> Mask:
    table = t["u8"]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = table[q] ^ table[kv]
        x = x - ((x >> 1) & 0x55)
        x = (x & 0x33) + ((x >> 2) & 0x33)
        return ((x + (x >> 4)) & 0x0F) * 67 > 15

    return mask


@written
def _list_of_tensors(t: Tables) -> Mask:
    listed = [t["i8"], t["u8"], t["i16"]]
    return lambda b, h, q, kv: sum(x[q] for x in listed) > sum(x[kv] for x in listed)  # type: ignore[return-value]


@written
def _dictionary_of_tensors(t: Tables) -> Mask:
    held = {"a": t["f16"], "b": (t["bf"], [t["ztenth"]])}
    return lambda b, h, q, kv: held["a"][q] * 3 > held["b"][0][kv] * held["b"][1][0]


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


@written
def _named_tuple(t: Tables) -> Mask:
    pair = _Pair(t["special"], t["special16"])
    return lambda b, h, q, kv: pair.first[q] * 0.1 >= pair[1][kv]


@written
def _branches_on_a_dtype(t: Tables) -> Mask:
    table = t["f64"]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if table.dtype == torch.float64 and table.dim() == 1:
            return table[q] * 1e-300 * 1e-20 > table[kv] * 1e-310
        return q > kv

    return mask


@written
def _limits_of_dtypes(t: Tables) -> Mask:
    table = t["f16"]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        low = torch.finfo(torch.float16).min
        return torch.where(q > kv, table[q], low) - 100 > torch.where(kv % 3 == 0, low, table[kv])

    return mask


@written
def _composition_of_functions(t: Tables) -> Mask:
    parts = [
        lambda b, h, q, kv: q >= kv,
        lambda b, h, q, kv: t["u8"][q] - t["u8"][kv] > 128,
        lambda b, h, q, kv: (q - kv) // -5 == -2,
    ]
    return lambda b, h, q, kv: functools.reduce(operator.or_, (part(b, h, q, kv) for part in parts))


@written
def _operators_as_functions(t: Tables) -> Mask:
    table = t["i64"]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = operator.floordiv(operator.getitem(table, q), -7)
        return operator.lt(x, operator.mod(table[kv], -7))

    return mask


@written
def _product_of_matrices(t: Tables) -> Mask:
    keys = t["embi"]
    return lambda b, h, q, kv: keys[q] @ keys[kv] > 10


@written
def _einsum(t: Tables) -> Mask:
    keys = t["embi"]
    return lambda b, h, q, kv: torch.einsum("i,i->", keys[q], keys[kv]) % 3 == 1


@written
def _distance(t: Tables) -> Mask:
    places = t["embi"]
    return lambda b, h, q, kv: (places[q] - places[kv]).square().sum().sqrt() < 11.5


@written
def _module(t: Tables) -> Mask:
    norm = torch.nn.LayerNorm(4, elementwise_affine=False)
    keys = t["emb"]
    return lambda b, h, q, kv: norm(keys[q])[0] > torch.nn.functional.relu(keys[kv])[1]


@written
def _walrus(t: Tables) -> Mask:
    table = t["i32"]
    return lambda b, h, q, kv: (d := table[q] * 2**20 * 2**10) + d > (table[kv] << 20)


@written
def _casts_back_and_forth(t: Tables) -> Mask:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        far = (q * 77).to(torch.int8).to(torch.float16) / 3
        return far.to(torch.bfloat16).to(torch.int32) > (kv * 91).to(torch.uint8).to(torch.int8)

    return mask


@written
def _captured_numbers(t: Tables) -> Mask:
    wide, tenth, endless, on = 2**40 + 1, 0.1, math.inf, True
    return lambda b, h, q, kv: (q * wide % 1000 > kv * tenth) ^ ((q / endless == 0) & on) ^ (q * -endless < kv)


@written
def _learned_table(t: Tables) -> Mask:
    table = torch.nn.Parameter(t["f32"].clone())
    return lambda b, h, q, kv: table[q] * 3 > table[kv].exp()


@written
def _function_of_the_module(t: Tables) -> Mask:
    return _module_level


def _module_level(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query - key - 3) // GLOBAL_DIVISOR < torch.remainder(key - query, GLOBAL_DIVISOR)


GLOBAL_DIVISOR = -4


# --- generated ---

# Holes of templates: x and y are integers of any dtype, f and g floats of any dtype, c and d truth values, i and j
# indices of all tables, k, n and s Python numbers (n is not 0, s from 0 to 7). Casts of floats to integers hold their
# values, and floats are summed exactly or not at all: what eager torch computes otherwise may depend on its vectors.
TEMPLATES: dict[str, tuple[list[str], list[str]]] = {
    "x": (
        [
            *("{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} * {k}", "{x} + {k}", "{k} - {x}", "-({x})", "abs({x})"),
            *("{x} // {n}", "{x} % {n}", "{x} // divisor[{i}]", "{x} % divisor[{i}]", "{k} // ({x} | 1)"),
            *("torch.div({x}, {n}, rounding_mode='trunc')", "torch.fmod({x}, {n})", "{x} ** 2", "{x} ** 3"),
            *("{x} & {y}", "{x} | {k}", "{x} ^ {y}", "~{x}", "{x} << {s}", "{x} >> {s}", "{x} << ({i} % 8)"),
            *("{x} >> ({i} % 8)", "{x}.to(torch.int8)", "{x}.byte()", "{x}.short()", "{x}.int()", "{x}.long()"),
            *("torch.where({c}, {x}, {y})", "torch.where({c}, {x}, {k})", "{x}.clamp(-9, 60)", "{x}.clamp(min={y})"),
            *("torch.minimum({x}, {y})", "torch.maximum({x}, {y})", "torch.sign({x})", "{c} + {x}", "{c} * {x}"),
            *("({c}).int() - {x}", "({f}).clamp(-99, 99).nan_to_num().long()", "torch.stack([{i}, {j}]).sum()"),
            *("({f}).clamp(-99, 99).nan_to_num().to(torch.int8)", "(sel[{i}] > {j}).sum()", "(few < {x}).sum()"),
            *("embi[{i}].amax()", "embi[{i}].prod()", "(embi[{i}] * embi[{j}]).sum(-1)", "embi[{i}].min(-1).values"),
            *("torch.searchsorted(edges, {i})", "torch.bucketize({f}, cuts, right=True)", "torch.take(rows, {i})"),
            *("i64.index_select(0, ({i})[None])[0]", "torch.gather(perm, 0, ({i})[None])[0]", "n0 + {x}", "z8 + {x}"),
            *("{x} + zu8", "{x} * zneg", "zb + {x}", "{x} - z16", "z32 + {x}", "t2[q][kv] + {x}", "embi[{i}][kv % 4]"),
            *("{x}.masked_fill({c}, {k})", "(lambda a: a ^ (a >> 3))({x})", "F.one_hot({i} % 5, 5)[{j} % 5]"),
        ],
        [
            *("q", "kv", "q", "kv", "q - kv", "q - 50", "kv - 31", "q.int()", "kv.int()", "q * 40000000", "h", "b"),
            *("i8[{i}]", "u8[{i}]", "i16[{i}]", "i32[{i}]", "i64[{i}]", "near31[{i}]", "near62[{i}]", "near53[{i}]"),
            *("ids[{i}]", "perm[{i}]", "i8[q]", "u8[kv]", "i16[q]", "i32[kv]", "near31[q]", "near62[kv]"),
            *("t2[q][kv]", "t2.T[kv, q]", "rows[b, {i}]", "rows[b][{i}]", "per_b[b]", "per_h[h]", "pair[b, h]"),
            *("even[{i}]", "later[{i}]", "column[{i}]", "base[3:][{i}]", "same[{i}]", "toeplitz[q, kv]", "sel[{i}, 2]"),
            *("small2[{i}][{j}]", "spread[q, kv]", "windows[{i}, 1]", "perm[perm[{i}]]", "i64[{i} - 9]"),
        ],
    ),
    "f": (
        [
            *("{f} + {g}", "{f} - {g}", "{f} * {g}", "{f} * {k}", "{f} + 256", "{f} * 0.1", "0.1 - {f}", "-({f})"),
            *("{f} * {g} + {f}", "{f} * 60000", "{f} / 3", "{f} / {g}", "{x} / {n}", "{x} / 3 * 3", "{x} * 0.1"),
            *("{f} // 0.3", "{f} % 0.3", "{f} % -2", "torch.fmod({f}, 0.7)", "({x}).half()", "({x}).float()"),
            *("({x}).bfloat16()", "({x}).double()", "({f}).half()", "({f}).float()", "({f}).bfloat16()"),
            *("torch.where({c}, {f}, {g})", "torch.where({c}, {f}, {x})", "torch.where({c}, {f}, 0.1)", "{f} * {x}"),
            *("torch.where({c}, {f}, math.inf)", "torch.where({c}, math.nan, {f})", "torch.nan_to_num({f})"),
            *("({f}).clamp(-1, 1)", "({f}).clamp(min=0.1)", "torch.maximum({f}, {g})", "torch.minimum({f}, {g})"),
            *("({f}).floor()", "({f}).ceil()", "({f}).round()", "({f}).abs()", "({f}).abs().sqrt()", "torch.frac({f})"),
            *("emb[{i}].amax(-1)", "emb16[{i}].max(-1).values", "(emb[{i}] * emb[{j}]).amin()", "({f}).sign() * {x}"),
            *("ztenth * {x}", "zdouble * {x}", "zhalf * {f}", "zbf + {f}", "{f} + znan", "zinf * {f}", "{f} ** 2"),
            *("hrows[h][{i}] * {f}", "slope[h] * {x}", "({x}).sqrt()", "1 / ({f})", "grid[{i}][{j}] + {f}"),
        ],
        [
            *("f16[{i}]", "bf[{i}]", "f32[{i}]", "f64[{i}]", "special[{i}]", "special16[{i}]", "wa[{i}]", "wb[{i}]"),
            *("wc[{i}]", "wd[{i}]", "tenth[{i}]", "grid[{i}, {j}]", "emb[{i}][1]", "emb16[{i}, 0]", "hrows[h, {i}]"),
            *("slope[h]", "diagonal[{i}]", "q / 3", "kv * 0.1", "q.half()", "kv.bfloat16()"),
            "F.embedding(q % 12, vocab)[0]",
        ],
    ),
    "c": (
        [
            *("{x} < {y}", "{x} <= {y}", "{x} > {y}", "{x} >= {y}", "{x} == {y}", "{x} != {y}", "{x} > {k}"),
            *("{f} < {g}", "{f} <= {g}", "{f} > {g}", "{f} >= {g}", "{f} > {k}", "{f} > 0.1", "{f} < {x}", "{x} > {f}"),
            *("({c}) & ({d})", "({c}) | ({d})", "({c}) ^ ({d})", "~({c})", "({c}) + ({d})", "({c}) * ({d})"),
            *("({c}) == ({d})", "({c}) < ({d})", "({c}) >= ({d})", "torch.where({c}, {d}, {c})", "({x}).bool()"),
            *("torch.where({c}, {d}, False)", "torch.logical_and({x}, {f})", "torch.logical_or({c}, {x})"),
            *("torch.logical_xor({x}, {y})", "torch.logical_not({f})", "torch.isnan({f})", "torch.isinf({f})"),
            *("torch.signbit({f})", "~({f} <= {g})", "(sel[{i}] == {j}).any(-1)", "(sel[{i}] != {j}).all()"),
            *("(few == {x}).any()", "torch.stack([{c}, {d}]).any()", "torch.stack([{c}, {d}, {c}]).all(0)"),
            *("(emb[{i}] > emb[{j}]).all()", "({f}).bool()", "({c}).int() + ({d}).int() == 1", "{x} & 1 == {y} & 1"),
            *("({f}).half() == ({g}).half()", "{f} != {f}", "({x}).half() == ({y}).half()", "({x}) % 3 == ({y}) % 3"),
        ],
        [
            *("q >= kv", "flag[{i}]", "seen[q][kv]", "bb[b][h][q][kv]", "q % 3 == 1", "kv % 5 < 3"),
            "small2[q, kv] > 0",
            *("docs[b, q] == docs[b, kv]", "ids[q] == ids[kv]", "(q - kv).abs() < per_h[h]", "kv < per_b[b]"),
            *("(q ^ kv) & 4 == 0", "permuted[kv, h, b, q]", "f32[q] > f32[kv]", "b == h", "toeplitz[q, kv] > 3"),
        ],
    ),
    "i": (["perm[{i}]", "torch.where({c}, {i}, {j})", "({x}) % 40", "({x}).clamp(0, 39).long()"], ["q", "kv"]),
    "k": ([], ["1", "2", "-1", "3", "-5", "7", "100", "127", "-128", "200", "300", "1000", "2**20", "40000", "2**31"]),
    "n": ([], ["2", "3", "7", "-1", "-2", "-3", "-7", "16", "100"]),
    "s": ([], ["0", "1", "2", "3", "5", "7"]),
}  # fmt: skip
TEMPLATES |= {name: TEMPLATES[same] for name, same in {"y": "x", "g": "f", "d": "c", "j": "i"}.items()}


# Functions that mix what depends on q or kv with what depends on b or h, or on nothing.
MIXED: dict[str, tuple[list[str], list[str]]] = {
    "x": (
        [
            *("{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} * {k}", "{x} + {k}", "{k} - {x}", "-({x})", "abs({x})"),
            *("{x} // {n}", "{x} % {n}", "{x} // ({y} | 1)", "{x} % ({y} | 1)", "{x} << {s}", "{x} >> (h + {s})"),
            *("{x} & {y}", "{x} | {y}", "{x} ^ {y}", "~{x}", "{x} << h", "torch.where({c}, {x}, {y})"),
            *("torch.where({c}, {x}, {k})", "{x}.clamp(min={y})", "{x}.clamp(max={y})", "{x}.clamp(-9, 60)"),
            *("torch.maximum({x}, {y})", "torch.minimum({x}, {y})", "{x}.int()", "{x}.long()", "{x}.short()"),
            "{x}.to(q.dtype)",
        ],
        [
            *("i8[q]", "i8[kv]", "u8[q]", "u8[kv]", "i16[q]", "i16[kv]", "i32[kv]", "near31[q]", "least[kv]"),
            *("i8[q]", "i8[kv]", "u8[q]", "u8[kv]", "i16[q]", "i16[kv]", "i32[kv]", "q", "kv", "q - kv", "q.int()"),
            *("h", "b", "h + 1", "h * 10", "b * 50", "h8[h]", "h16[h]", "h32[h]", "bu8[b]", "per_h[h]", "pair[b, h]"),
            *("per_b[b]", "n0", "z8", "z16"),
        ],
    ),
    "c": (
        [
            *("{x} < {y}", "{x} >= {y}", "{x} == {y}", "{x} != {y}", "{x} > {k}", "{x} <= {y}", "{x} < {y}"),
            *("({c}) & ({d})", "({c}) | ({d})", "({c}) ^ ({d})", "~({c})", "torch.where({c}, {d}, {c})"),
            *("{f} < {g}", "{f} == {g}", "torch.where({c}, {f}, {g}) > {f}", "torch.maximum({f}, {g}) > {f}"),
        ],
        ["q >= kv", "flag[kv]", "b == h", "(q - kv) % 3 == 1", "i8[kv] > 0", "q + (q.dtype == torch.int32) > kv"],
    ),
    "f": ([], ["f16[q]", "f16[kv]", "bf[kv]", "f32[q]", "f32[kv]", "hhalf[h]", "slope[h]", "zhalf", "ztenth", "zbf"]),
    **{name: TEMPLATES[name] for name in "kns"},
}  # fmt: skip
MIXED |= {name: MIXED[same] for name, same in {"y": "x", "g": "f", "d": "c"}.items()}


def _code(chance: random.Random, kind: str, depth: int, of: dict[str, tuple[list[str], list[str]]] = TEMPLATES) -> str:
    templates, leaves = of[kind]
    template = chance.choice(templates if templates and depth > 0 else leaves)
    if kind in "ij" and chance.random() < 0.6:
        template = chance.choice(leaves)

    def filled(hole: re.Match[str]) -> str:
        code = _code(chance, hole[1] or hole[2], depth - chance.choice([1, 1, 2]), of)
        return code if re.fullmatch(r"\w+(\[\w+(, \w+)?\])*", code) and not hole[1] else f"({code})"

    return re.sub(r"\({(\w)}\)|{(\w)}", filled, template)


def generated(seed: int) -> tuple[Factory, str]:
    """Return the factory of a random function, and the function's expression.

    Few of the functions are no masks: torch's `create_mask` refuses them.
    """
    chance = random.Random(seed)
    expression = _code(chance, "c", chance.choice([2, 3, 3, 4]))
    if chance.random() < 0.6:  # most of the others that are the same everywhere
        expression = f"({expression}) {chance.choice('^^^&|')} ({_code(chance, 'c', 0)})"
    return of_expression(expression), expression


def mixed(seed: int) -> str:
    """Return the expression of a random function of MIXED."""
    chance = random.Random(seed)
    return _code(chance, "c", chance.choice([2, 2, 3]), MIXED)


def together(expressions: list[str]) -> Factory:
    """Return the factory of a mask that is another function in each pair of batch elements."""

    def factory(generator: torch.Generator, batch: int, *sizes: int, device: str = "cpu") -> Mask:
        state = generator.get_state()
        functions = []
        for expression in expressions:
            generator.set_state(state)
            functions.append(of_expression(expression)(generator, 2, *sizes, device=device))

        def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            visible = (b // 2 == 0) & functions[0](b % 2, h, q, kv)
            for number in range(1, len(functions)):
                visible = visible | ((b // 2 == number) & functions[number](b % 2, h, q, kv))
            return visible

        return mask

    return factory
