"""Attention with dropout by torch's flex_attention, in one backward pass.

The operators of flex_attention take a score change and its gradient as functions. So the weights of a backward pass may
be other ones than those of its forward pass. With the weights P of all pairs, each kept with probability 1 - p, the
output is the sum of P v / (1 - p) over kept pairs, and a score has the gradient P (dout v / (1 - p) - dout out) if its
pair is kept, and -P dout out if it is dropped. P follows from the lse of all pairs, which another call gives.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Call, Plans
from flexmasks.backends.flex import _OPTIONS, FlexKernel, _unchanged, _with_inputs
from flexmasks.backends.flex_kernels import InPlaceOfScore
from flexmasks.backends.forms import why_data
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.kernels.row_products import less_row_products
from flexmasks.spec.values import Score

STEPS = 1 << 16  # p is rounded to a multiple of 1 / STEPS
_HALF = (1 << 15) - 1  # of a word: the lower 15 bits, which are an odd number, and 16 bits above them
_LOG_2_E = 1.4426950408889634


def is_kept(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, q_words: Tensor, kv_words: Tensor, dropped: int) -> Tensor:
    """Return whether a pair is kept.

    In a row the 16 bits that decide are those of an odd number times the independent upper halves of the keys' words,
    so they are as independent as these; likewise in a column. Two products, joined by xor, leave no pattern in both.
    """
    of_q, of_kv = q_words[b, h, q], kv_words[b, h, kv]
    bits = ((of_q & _HALF) * (of_kv >> 15)) ^ ((of_q >> 15) * (of_kv & _HALF))
    return (bits & STEPS - 1) >= dropped


class Drawn(NamedTuple):
    """The words that a call draws, see `flexmasks.dropout`, and the lse of its weights P / (1 - p) to the base 2,
    [B, H, Q], inf for rows without weights.
    """

    q_words: Tensor
    kv_words: Tensor
    lse: Tensor

    @classmethod
    def of(cls, change: Score, lse: Tensor, p: float) -> Drawn:
        """Return what the change of the scores of kept pairs has drawn, with the lse of all pairs."""
        lse = lse.masked_fill(lse == -math.inf, math.inf) * _LOG_2_E + math.log2(1 - p)
        return cls(change.params["q_words"], change.params["kv_words"], lse)


_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class _Functions:
    """The functions of score and mask, whose tensors follow their arguments, and the numbers of a call.

    of_score: how many of these tensors are the score's. dropped: see `is_kept`. name: by which graphs find them.
    """

    score: Callable[..., Tensor] | None
    mask: Callable[..., Tensor]
    of_score: int
    dropped: int
    share: float  # 1 - p
    name: str = field(default_factory=lambda: f"functions {next(_numbers)}")

    def __post_init__(self) -> None:
        _BY_NAME[self.name] = self


_BY_NAME: WeakValueDictionary[str, _Functions] = WeakValueDictionary()
_OF_KERNELS: Part[_Functions] = Part(KINDS, "functions_of_dropout")


class DropoutKernel(FlexKernel):
    """Compiled flex_attention over kept pairs. It gives no lse."""

    def __init__(self, call: Call, dropped: int, p: float) -> None:
        super().__init__(call, None, why_data(call))
        self._dropped, self._p = dropped, p
        self.fits = self._lengths in ("", "whole")  # tables end where tokens do
        with compat.IMPORTING:
            torch.compiler.allow_in_graph(_attend)

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        return self._dropped, self._p, super().key

    def forms(self, plans: Plans) -> tuple[Any, ...]:
        (form,) = super().forms(plans)
        score, of_score = _with_inputs(form.score_mod or _unchanged)
        mask, of_mask = _with_inputs(form.block_mask.mask_mod)
        form = form._replace(of_score=(self._dropped, self._p, form.of_score))
        key = self.runner(form).key
        functions = _OF_KERNELS.get(key)
        if functions is None:
            own = None if form.score_mod is None else score
            functions = _Functions(own, mask, len(of_score), self._dropped, 1 - self._p)
            _OF_KERNELS.put(key, (), functions, FACT)
        return form, functions, (*of_score, *of_mask)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
    ) -> tuple[Tensor, Tensor | None]:
        """forms: those of the kernel, and Drawn."""
        form, functions, tensors, drawn = forms
        kept = InPlaceOfScore(attend_kept, functions.name, (*drawn, *tensors))
        return self._run(q, k, v, form._replace(score_mod=kept))


def attend_kept(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: InPlaceOfScore,
    block_mask: compat.BlockMask,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: dict[str, Any] | None,
) -> Tensor:
    """Return the output, with the arguments of torch's flex_attention. torch.compile reads this function."""
    *lists, _ = block_mask.as_tuple()
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return _attend(score.name, scale, kernel_options or {}, tuple(lists), q, k, v, *score.tensors)


def _attend(name: str, scale: float, options: dict[str, Any], lists: tuple[Any, ...], *tensors: Tensor) -> Tensor:
    """Return the output. torch.compile does not look into this function, whose operators enter the graph."""
    for x in tensors[:3]:  # kernels are made for a number of heads and a head size
        int(x.shape[1]), int(x.shape[3])
    how = scale, {**_OPTIONS, **options, "OUTPUT_LOGSUMEXP": True}
    return cast(Tensor, _Attend.apply(_BY_NAME[name], how, lists, *tensors))


class _Attend(torch.autograd.Function):
    """The output, whose graph torch.compile makes: so its backward pass is one, too."""

    @staticmethod
    def forward(
        ctx: Any, functions: _Functions, how: tuple[Any, ...], lists: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor,
        q_words: Tensor, kv_words: Tensor, lse: Tensor, *others: Tensor,
    ) -> Tensor:  # fmt: skip
        of_score, of_mask = others[: functions.of_score], others[functions.of_score :]
        score = functools.partial(_kept, functions)
        out, of_kept, _ = torch.ops.higher_order.flex_attention(
            q, k, v, score, (*lists, functions.mask), *how, (q_words, kv_words, *of_score), of_mask
        )
        out = (out * (of_kept - lse).exp2()[..., None]).to(out.dtype)
        ctx.functions, ctx.how, ctx.lists, ctx.of_own = functions, how, lists, None
        if functions.score is not None and any(ctx.needs_input_grad):
            ctx.of_own = compat.gradient_of_score(functions.score, q, of_score)
        ctx.save_for_backward(q, k, v, out, lse, q_words, kv_words, *others)
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        functions: _Functions = ctx.functions
        q, k, v, out, lse, q_words, kv_words, *others = ctx.saved_tensors
        of_score, of_mask = tuple(others[: functions.of_score]), tuple(others[functions.of_score :])
        products = less_row_products(out, gradient, None, functions.share)
        of_own = ctx.of_own

        def kept(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
            _, _, q_words, kv_words, *more = tensors
            return _kept(functions, s, b, h, i, j, q_words, kv_words, *more)

        def of_scores(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, d: Tensor, *tensors: Tensor) -> list[Any]:
            products, lse, _, _, *more = tensors
            own = s if functions.score is None else functions.score(s, b, h, i, j, *more)
            d = d + products[b, h, i] * (own * _LOG_2_E - lse[b, h, i]).exp2()
            return [d if of_own is None else of_own(s, b, h, i, j, d, *more)[0], *[None] * (4 + len(tensors))]

        nothing = out.new_zeros(()).expand(out.shape)  # so the operator takes no sum of products off
        *gradients, _ = torch.ops.higher_order.flex_attention_backward(
            q, k, v, nothing, lse, gradient, None, kept, of_scores, (*ctx.lists, functions.mask), *ctx.how,
            (products, lse, q_words, kv_words, *of_score), of_mask,
        )  # fmt: skip
        return None, None, None, *gradients, *[None] * (3 + len(others))


def _kept(
    functions: _Functions, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor,
    q_words: Tensor, kv_words: Tensor, *tensors: Tensor,
) -> Tensor:  # fmt: skip
    own = s if functions.score is None else functions.score(s, b, h, i, j, *tensors)
    return torch.where(is_kept(b, h, i, j, q_words, kv_words, functions.dropped), own, -torch.inf)
