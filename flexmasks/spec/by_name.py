"""Errors of the public calls: arguments that do not fit, and short tracebacks."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.spec.definitions import advice_on_tensor, owners_of
from flexmasks.spec.frames import of_user

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ATTENTION, _DROP_IN = "flexmasks.attention:", "flexmasks.flex."  # whose errors come from the former
# Keyword arguments of torch and other libraries, and what to pass here instead.
KEYWORDS_ELSEWHERE = {
    "is_causal": 'pass mask="causal"',
    "attn_mask": "pass `mask`, a name or function, or `block_mask`",
    "mask_mod": "pass `mask`",
    "score_mod": "pass `score`",
    "enable_gqa": "grouped heads are recognized from the shapes",
    "causal": 'pass mask="causal"',
    "attn_bias": "pass `score`, a name or function",
    "attention_mask": 'pass `mask`: for padding mask="key_padding", attention_mask=m',
    "key_padding_mask": 'pass mask="key_padding", attention_mask=m, where 1 is a key that is visible',
    "softmax_scale": "pass `scale`",
    "sm_scale": "pass `scale`",
    "softcap": 'pass score="softcap", cap=...',
    "alibi_slopes": 'pass score="alibi", slopes=...',
    "block_mask": "only flexmasks.attention takes one; pass `mask`",
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), "pass them to flexmasks.varlen_attention"),
    "cu_seqlens_kv": "pass it to flexmasks.varlen_attention as `cu_seqlens_k`",
    "deterministic": "call torch.use_deterministic_algorithms(True)",
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs", "return_aux"), "pass return_lse=True"),
    **dict.fromkeys(("need_weights", "average_attn_weights"), "no call returns attention weights"),
    **dict.fromkeys(("logits_soft_cap", "logit_cap"), 'pass score="softcap", cap=...'),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink"), "learned sinks are `sink_logits`"),
    "num_splits": "leave it out: the keys are split as the call needs it",
    "dtype": "convert q, k and v",
    **dict.fromkeys(("seqused_k", "cache_seqlens"), "pass them as `kv_lens`, with `page_table`"),
    "block_table": "pass it as `page_table`, with `kv_lens`",
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), "leave it out: the offsets say the lengths"),
    "window_size": 'pass mask="sliding_window", window=... or mask="local", left=..., right=...',
    **dict.fromkeys(
        ("dropout_p", "dropout"),
        "there is no dropout of attention weights: leave it out, and use torch.nn.functional.dropout on the output",
    ),
}


def says_what_to_write(hint: Callable[..., str] | None = None) -> Callable[[_Function], _Function]:
    """Decorate a public call, so that its errors say what to write.

    Arguments by position that need names, arguments that the call does not take and missing ones raise a TypeError that
    says what to write. The traceback of an error of this library shows the user's code and the call alone.

    hint: takes all arguments that were given by position, and returns what to write, as the rest of a sentence after
        "write". By default the first argument that needs a name gets the name that fits its type.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        most = sys.maxsize if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(by_position)
        where = _public_name(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > most:
                what = hint(*args) if hint is not None else named(args[most], by_name)
                taken = f"takes {', '.join(by_position)} by position" if by_position else "takes nothing by position"
                raise TypeError(f"{where} {taken}; write {what}.")
            if compat.is_compiling():  # torch traces no tracebacks
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except (ValueError, TypeError) as error:
                if str(error).startswith("flexmasks"):
                    if where.startswith(_DROP_IN):
                        error.args = (str(error).replace(_ATTENTION, f"{where}:", 1),)
                    raise error.with_traceback(of_user(error.__traceback__)) from error.__cause__
                problem = _unfit(where, signature, args, kwargs)
                if not problem:
                    raise
                raise TypeError(problem) from None

        return cast(_Function, call)

    return decorate


def _public_name(function: Callable[..., Any]) -> str:
    parts = function.__module__.split(".")
    is_elsewhere = parts[1:2] in (["integrations"], ["orders"], ["flex"]) or parts[1:] in (["masks"], ["scores"])
    return ".".join([*(parts[:3] if is_elsewhere else parts[:1]), function.__name__])


def _unfit(where: str, signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any]) -> str:
    """Return the message of a call whose arguments do not fit its signature, or ""."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        takes = f"it takes {', '.join(names) or 'none'}"
        unknown = next((name for name in kwargs if name not in names), None)
        if unknown is None or "unexpected" not in str(error):
            hints = [f"`{name}`: {KEYWORDS_ELSEWHERE[name]}" for name in kwargs if name in KEYWORDS_ELSEWHERE]
            return f"{where}: {error}; {'; '.join([takes, *hints])}."
        near = difflib.get_close_matches(unknown, names, n=1, cutoff=0.7)
        hint = f"; did you mean `{near[0]}`" if near else owners_of(unknown)
        return f"{where}: no argument is named `{unknown}`; {takes}{hint}."
    return ""


def named(value: Any, names: list[str]) -> str:
    """Return what to write for an argument: of all names that it may have, the one that fits its type."""
    if isinstance(value, str) and "mask" in names:
        return f'mask="{value}"'
    kind = getattr(value, "kind", "mask" if callable(value) else "")  # a Mask or Score says what it is
    if isinstance(value, compat.BlockMask):
        kind = "block_mask"
    if isinstance(value, Tensor) and "mask" in names and value.ndim >= 2:
        is_bool = value.dtype == torch.bool
        return 'mask="dense", visible=m for a boolean tensor m' if is_bool else advice_on_tensor("mask", value)
    if kind in names:
        return f"`{kind}=` before the {kind.replace('_', ' ')}"
    return f"the names of the others: {', '.join(f'{name}=' for name in names)}"
