"""Independent oracles: every mask and score written element by element, straight from its definition.

No oracle imports or mirrors the library, so an agreement between the two is evidence. The oracles are slow on purpose.
Each file holds the oracles of one kind of mask and the cases that try them.
"""

from oracles import block_patterns, documents, images, language_models, packed, scores, tables, windows
from oracles.attention import attend, dense
from oracles.case import MASKS, SCORES, Case, offsets, plain

MASK_CASES: list[Case] = [
    *windows.CASES,
    *documents.CASES,
    *block_patterns.CASES,
    *language_models.CASES,
    *tables.CASES,
    *images.CASES,
    *packed.CASES,
]
SCORE_CASES: list[Case] = scores.CASES

__all__ = ["Case", "MASKS", "SCORES", "MASK_CASES", "SCORE_CASES", "dense", "attend", "offsets", "plain"]
