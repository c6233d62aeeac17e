"""Attention masks and score changes for PyTorch FlexAttention: name a mask, get fast, exact attention."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from flexmasks import masks as masks
from flexmasks import orders as orders
from flexmasks import plans as plans
from flexmasks import scores as scores
from flexmasks.attention import attention as attention
from flexmasks.attention import block_mask as block_mask
from flexmasks.attention import dense_mask as dense_mask
from flexmasks.attention import explain as explain
from flexmasks.attention import paged_attention as paged_attention
from flexmasks.attention import varlen_attention as varlen_attention
from flexmasks.backends import operators as _operators  # noqa: F401 # saved graphs need them
from flexmasks.cache import cache_info as cache_info
from flexmasks.cache import clear_caches as clear_caches
from flexmasks.context import invariant as invariant
from flexmasks.errors import no_such_name as _no_such_name
from flexmasks.masks.packed import packed as packed
from flexmasks.masks.paged import paged as paged
from flexmasks.spec.arguments import get_mask as get_mask
from flexmasks.spec.arguments import get_score as get_score
from flexmasks.spec.definitions import known_elsewhere as _known_elsewhere
from flexmasks.spec.elsewhere import CALLS as _CALLS
from flexmasks.spec.registry import list_masks as list_masks
from flexmasks.spec.registry import list_scores as list_scores
from flexmasks.spec.registry import register_mask as register_mask
from flexmasks.spec.registry import register_score as register_score
from flexmasks.spec.values import Mask as Mask
from flexmasks.spec.values import Score as Score

if TYPE_CHECKING:
    from flexmasks import flex as flex
    from flexmasks import integrations as integrations
    from flexmasks import trees as trees
    from flexmasks.asking.alike import Likeness as Likeness
    from flexmasks.asking.alike import Likenesses as Likenesses
    from flexmasks.asking.alike import alike as alike
    from flexmasks.asking.check import Finding as Finding
    from flexmasks.asking.check import Findings as Findings
    from flexmasks.asking.check import check as check
    from flexmasks.asking.compare import Comparison as Comparison
    from flexmasks.asking.compare import compare as compare
    from flexmasks.asking.proofs import Proof as Proof
    from flexmasks.dot_product import sdpa as sdpa
    from flexmasks.dot_product import sdpa_replaced as sdpa_replaced
    from flexmasks.integrations.watching import watch as watch
    from flexmasks.pictures.picture import Picture as Picture
    from flexmasks.pictures.show import draw as draw
    from flexmasks.pictures.show import show as show
    from flexmasks.planning import Plan as Plan
    from flexmasks.planning import plan as plan
    from flexmasks.plans.portable import safe_globals as safe_globals
    from flexmasks.softmax import masked_softmax as masked_softmax
    from flexmasks.softmax import scaled_masked_softmax as scaled_masked_softmax
    from flexmasks.weighing import TopKeys as TopKeys
    from flexmasks.weighing import key_sums as key_sums
    from flexmasks.weighing import weights as weights

__version__ = "0.1.0"
__all__ = [
    "attention", "varlen_attention", "paged_attention", "masked_softmax", "scaled_masked_softmax",
    "sdpa", "sdpa_replaced",
    "weights", "TopKeys", "key_sums",
    "plan", "Plan", "invariant", "block_mask", "dense_mask", "explain", "show", "draw", "Picture",
    "compare", "Comparison", "check", "Finding", "Findings", "Proof", "watch", "alike", "Likeness", "Likenesses",
    "get_mask", "get_score", "packed", "paged", "Mask", "Score",
    "list_masks", "list_scores", "register_mask", "register_score", "cache_info", "clear_caches",
    "safe_globals",
    "flex", "integrations", "masks", "orders", "scores", "trees",
]  # fmt: skip
# Names that are imported at their first use, with their modules: processes that only make masks do not need them.
_MODULES = {
    "Comparison": "flexmasks.asking.compare",
    "Finding": "flexmasks.asking.check",
    "Findings": "flexmasks.asking.check",
    "Likeness": "flexmasks.asking.alike",
    "Likenesses": "flexmasks.asking.alike",
    "Picture": "flexmasks.pictures.picture",
    "Plan": "flexmasks.planning",
    "Proof": "flexmasks.asking.proofs",
    "TopKeys": "flexmasks.weighing",
    "alike": "flexmasks.asking.alike",
    "check": "flexmasks.asking.check",
    "compare": "flexmasks.asking.compare",
    "draw": "flexmasks.pictures.show",
    "show": "flexmasks.pictures.show",
    "key_sums": "flexmasks.weighing",
    "masked_softmax": "flexmasks.softmax",
    "plan": "flexmasks.planning",
    "safe_globals": "flexmasks.plans.portable",
    "scaled_masked_softmax": "flexmasks.softmax",
    "sdpa": "flexmasks.dot_product",
    "sdpa_replaced": "flexmasks.dot_product",
    "watch": "flexmasks.integrations.watching",
    "weights": "flexmasks.weighing",
}

_LATER = ("flex", "integrations", "trees")  # modules that are imported at their first use


def _advice(name: str) -> str:
    """Return where a name stands that users look for here, as the rest of a sentence, or ""."""
    places = (
        [] if name.startswith("_") else [masks, scores, *(importlib.import_module(f"{__name__}.{n}") for n in _LATER)]
    )
    found = next((place.__name__ for place in places if name in place.__all__), None)
    if found:
        return f"; write `from {found} import {name}`"
    return f"; write `{_CALLS[name]}`" if name in _CALLS else _known_elsewhere(name)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULES:
            raise _no_such_name(__name__, name, _advice(name))
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value


def _html_of(value: Mask | Score) -> str:
    from flexmasks.pictures.show import html_of  # imported at the first use

    return html_of(value)


Mask._calls = Score._calls = sys.modules[__name__]


def __dir__() -> list[str]:
    return sorted(name for name in globals() if name.startswith("__")) + sorted(__all__)
