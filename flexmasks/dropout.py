"""Dropout of attention weights, exact on every backend, by two calls of a kernel.

Dropped pairs have a score of -inf in the first call. The second call has all pairs, and gives the log-sum-exp by which
the weights are normalized: out * exp(lse of kept pairs - lse of all pairs) / (1 - p). Both are differentiated; but on a
GPU flex_attention takes the second lse as it is, and has a backward pass for both (`backends/flex_dropout.py`).

Whether a pair is kept follows from a word of its query and a word of its key, by an operation that all compilers get
right within 32 bits. So no kernel draws numbers, forward and backward pass agree, and where a call is cut into parts or
made again by an activation checkpoint, it drops the same pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from flexmasks.backends import fa4_package
from flexmasks.backends.flex_dropout import STEPS, is_kept
from flexmasks.backends.plain import computes_nothing
from flexmasks.plans.checks import ATTENTION, fail
from flexmasks.plans.held import without_plan
from flexmasks.request import Request, checked
from flexmasks.spec import Size, first_row
from flexmasks.spec.definitions import add_operator, define
from flexmasks.spec.parameters import as_number, in_message
from flexmasks.spec.values import Score

_WORD = (1 << 32) - 1
_FEW = 16  # values of each key where only the log-sum-exp is wanted: the fewest that kernels take
_SEEDS = -(1 << 63), (1 << 63) - 1
_Results = tuple[Tensor, Tensor | None]


class Dropout(NamedTuple):
    """The share of pairs that are dropped, and what draws them; None for torch's generator of the device."""

    p: float
    seed: int | Tensor | torch.Generator | None = None

    @property
    def dropped(self) -> int:
        """How many of 2**16 pairs are dropped."""
        return round(self.p * STEPS)

    def kept(self, sizes: tuple[int, ...], kv_len: int, device: torch.device) -> Score:
        """Return the change of the scores of a call that drops pairs.

        sizes: batch, query heads and queries.
        """
        tables = [self._words(table, sizes[0], sizes[1], n, device) for table, n in enumerate((sizes[2], kv_len))]
        return Score(_KEPT, {"q_words": tables[0], "kv_words": tables[1], "dropped": self.dropped})

    def rescaled(self, out: Tensor, of_kept: Tensor, lse: Tensor) -> Tensor:
        """Return the output of a call, given that of its kept pairs, with its lse, and the lse of all pairs."""
        # Of a row without kept pairs the difference may be NaN; it has no gradient.
        share = (of_kept - lse).masked_fill(of_kept == -math.inf, -math.inf).exp()
        return (out * (share / (1 - self.p) if self.p < 1 else share)[..., None]).to(out.dtype)

    def _words(self, table: int, batch: int, heads: int, length: int, device: torch.device) -> Tensor:
        """Return random words with an odd lower half, int32 [B, H, length]."""
        shape = batch, heads, length
        if self.seed is None or isinstance(self.seed, torch.Generator):
            by: Any = {} if self.seed is None else {"generator": self.seed}  # torch traces no symbolic shape with one
            return torch.randint(2**31 - 1, shape, dtype=torch.int32, device=device, **by) | 1
        seed = self.seed
        seed = torch.full((), seed, device=device) if isinstance(seed, int) else seed.to(device, torch.int64).view(())
        parts = []
        for n, count in enumerate((batch * heads, length)):  # words depend on the place, not on the length
            key = _mixed(torch.full((), 2 * table + n + 1, device=device))
            for half in (seed & _WORD, seed >> 32 & _WORD):
                key = _mixed(key ^ half)
            parts.append(_mixed(key ^ torch.arange(count, device=device)))
        return (_mixed(parts[0][:, None] ^ parts[1]) >> 1).to(torch.int32).view(shape) | 1


def _mixed(x: Tensor) -> Tensor:
    """Return a permutation of numbers of 32 bits, held in 64, that depends on each bit (Wellons, Prospecting for Hash
    Functions, 2018).
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ x >> shift) * factor & _WORD
    return x ^ x >> 15


def dropout_of(p: Any, seed: Any, call: str = ATTENTION) -> Dropout | None:
    """Return the dropout that arguments of a call say, None if nothing is dropped. Raises ValueError or TypeError."""
    p, seed = as_number(p), as_number(seed)
    if isinstance(p, bool) or not isinstance(p, int | float):
        fail(f"`dropout_p` must be a number from 0 to 1, got {in_message(p)}.", TypeError, call)
    if not 0 <= p <= 1:
        fail(f"`dropout_p` must be a number from 0 to 1, the share of weights that are dropped, got {p}.", call=call)
    is_tensor = isinstance(seed, Tensor) and seed.numel() == 1 and not (seed.is_floating_point() or seed.is_complex())
    is_number = isinstance(seed, int) and not isinstance(seed, bool)
    if not (seed is None or is_tensor or is_number or isinstance(seed, torch.Generator)):
        wanted = "an int, a tensor of one whole number, a torch.Generator, or None for torch's own"
        fail(f"`dropout_seed` must be {wanted}, got {in_message(seed)}.", TypeError, call)
    if is_number and not _SEEDS[0] <= seed <= _SEEDS[1]:
        fail(f"`dropout_seed` must fit 64 bits, got {seed}.", call=call)
    return Dropout(float(p), seed) if p else None


def kept_of(q: Tensor, k: Tensor, request: Request, dropout: Dropout) -> Request:
    """Return the request for the kept pairs of a call, and for their lse."""
    request = without_plan(q, k, request)
    own, kept = request.score, dropout.kept(tuple(q.shape[:3]), k.shape[2], q.device)
    scores = [] if own is None else list(own) if isinstance(own, list | tuple) else [own]
    return request._replace(score=[*scores, kept], sink_logits=None, return_lse=True)


def with_dropout(
    run: Callable[..., _Results],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    request: Request,
    is_traced: bool = False,
    at_once: Callable[..., _Results | None] | None = None,
) -> _Results:
    """Return output and lse (or None) of a call of which `run` computes those without dropout.

    is_traced: whether torch.compile traces the call.
    at_once: takes q, k, v, as much of v as the lse takes, `request` without dropout, and the dropout. Returns the
        results, or None for a call that it cannot compute in one backward pass.
    """
    dropout, request = request.dropout, request._replace(dropout=None)
    if dropout is None or computes_nothing(q, k, v):
        return run(q, k, v, request)
    checked(q, k, v, request)
    if isinstance(dropout.seed, torch.Generator):
        if is_traced:
            fail("inside torch.compile `dropout_seed` must be an int, a tensor or None, got a generator.")
        if dropout.seed.device.type != q.device.type:
            fail(f"`dropout_seed` must be a generator on {q.device}, where q is, got one on {dropout.seed.device}.")
    few = v.detach()[..., :_FEW] if _takes_few_values(q, request) else v.detach()
    results = None if at_once is None else at_once(q, k, v, few, request, dropout)
    if results is not None:
        return results
    out, of_kept = run(q, k, v, kept_of(q, k, request, dropout))
    _, lse = run(q, k, few, request._replace(return_lse=True))
    out = dropout.rescaled(out, of_kept, lse)
    return out, lse if request.return_lse else None


def _takes_few_values(q: Tensor, request: Request) -> bool:
    """Return whether the fastest backend for the lse takes values of any head size. FlashAttention 4 does not."""
    if request.backend != "auto" or q.device.type != "cuda":
        return request.backend in ("auto", "flex", "reference")
    return request.score is not None or bool(fa4_package.why_unusable())


# --- the change of the scores ---


def _prepare(
    size: Size | None,
    *,
    q_words: Annotated[Tensor, "int[B, H, N]"],
    kv_words: Annotated[Tensor, "int[B, H, KV]"],
    dropped: Annotated[int, "int in 0.."],
) -> dict[str, Any]:
    first = first_row("q_words", q_words.shape[2], size)
    return {"q_words": q_words, "kv_words": kv_words, "dropped": dropped, "first": first}


def _kept(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    q_words: Tensor,
    kv_words: Tensor,
    dropped: int,
    first: int | Tensor,
) -> Tensor:
    """The score of pairs that are kept, -inf for those that are dropped."""
    if isinstance(first, Tensor):
        q = q - first[b].type_as(q)
    elif q_words.shape[2] == 1:
        q = q * 0
    elif first:
        q = q - first
    return torch.where(is_kept(b, h, q, kv, q_words, kv_words, dropped), score, -math.inf)


_KEPT = add_operator(define("score", _kept, "dropout", registered=True, prepare=_prepare, drawn=True))
