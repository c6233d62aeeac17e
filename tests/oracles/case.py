"""One case of a mask or a score, the tables of oracles, and tensors for cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


# eq=False: params hold tensors and dicts, whose generated __eq__ and __hash__ would raise. Cases compare by identity.
@dataclass(frozen=True, eq=False)
class Case:
    """Parameters of one registered mask or score, and the sizes at which it is tried."""

    name: str
    params: dict[str, Any]  # python numbers, bools and tuples, or torch tensors on the CPU
    batch: int = 2
    heads: int = 2
    q_len: int = 40
    kv_len: int = 40
    q_offset: int | tuple[int, ...] = 0  # added to q before the mask sees it; a tuple has one number per batch element


# Every oracle of a mask takes (b, h, q, kv, size, **params) and returns whether q sees kv. Parameters arrive as plain
# Python, tensors as nested lists, and q has its offset added.
MASKS: dict[str, Callable[..., bool]] = {}
# Every oracle of a score takes (scores, case, **params). Parameters arrive unchanged.
SCORES: dict[str, Callable[..., Tensor]] = {}


def mask_oracle(function: Callable[..., bool]) -> Callable[..., bool]:
    """Register a function as the oracle of the mask of its name."""
    MASKS[function.__name__] = function
    return function


def score_oracle(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register a function as the oracle of the score of its name."""
    SCORES[function.__name__] = function
    return function


def plain(value: Any) -> Any:
    """Return a value with every tensor in it as nested lists, and 0-dim tensors as numbers."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(inner) for inner in value)
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def offsets(case: Case) -> list[int]:
    """Return the q_offset of each batch element."""
    if isinstance(case.q_offset, tuple):
        assert len(case.q_offset) == case.batch
        return list(case.q_offset)
    return [case.q_offset] * case.batch


def row_of(values: Any, b: int) -> Any:
    """Return the row of batch element b of a matrix, or the one row that all share."""
    return values[b] if isinstance(values[0], list) else values


def number_of(value: Any, b: int) -> Any:
    """Return the number of batch element b of a list, or the one number that all share."""
    return value[b] if isinstance(value, list) else value


def table_of(values: Any, b: int, h: int) -> Any:
    """Return the table of batch element b and head h, of one table or of [batch or 1, heads or 1] tables."""
    if not isinstance(values[0][0], list):
        return values
    tables = values[b if len(values) > 1 else 0]
    return tables[h if len(tables) > 1 else 0]


def pair(value: Any) -> Any:
    """Return a pair unchanged, and a number as a pair of it."""
    return value if isinstance(value, tuple) else (value, value)


def int32(values: Any) -> Tensor:
    """Return an int32 tensor of the values."""
    return torch.tensor(values, dtype=torch.int32)


def int64(values: Any) -> Tensor:
    """Return an int64 tensor of the values."""
    return torch.tensor(values, dtype=torch.int64)


def runs(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the ids 0, 1, 2, ..., each repeated by its length."""
    return torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=dtype)


class Random:
    """A source of random tensors for the cases of one file, independent of other files."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return whole numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def floats(self, *shape: int) -> Tensor:
        """Return normal float64 numbers, a leaf tensor."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def bools(self, fraction: float, *shape: int) -> Tensor:
        """Return truth values of which a fraction is true."""
        return torch.rand(shape, generator=self.generator) < fraction

    def order(self, count: int) -> Tensor:
        """Return a permutation of 0..count-1."""
        return torch.randperm(count, generator=self.generator)
