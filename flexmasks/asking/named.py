"""The masks and scores whose names, here or in other libraries, are most like some words."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from flexmasks import list_masks, list_scores

_MOST, _LEAST = 5, 0.5  # answers, and their weight, as a part of the first one's
_WEIGHTS = {"name": 3.0, "peers": 2.0, "summary": 1.0}
_START = 4  # letters that words have in common, as slide and sliding
_COMMON = ("mask", "mod", "attention", "attn", "bia", "create", "make", "get", "generate", "with", "and", "the", "of")


def entries_like(text: str) -> list[Any]:
    """Return the masks and scores whose names, names in other libraries or meanings share words with a text, the
    nearest first.
    """
    entries = [*list_masks(), *list_scores()]
    words = {(n, field): _words(getattr(e, field)) for n, e in enumerate(entries) for field in _WEIGHTS}
    in_entries = Counter(w for n in range(len(entries)) for w in set().union(*(words[n, field] for field in _WEIGHTS)))
    wanted = _words(text)
    wanted = {word for word in wanted if word not in _COMMON} or wanted
    whole = text.strip().rpartition(".")[2]
    is_word = whole.isalpha() and whole.islower()  # and no name as FullMask, which counts wherever it stands
    weights = {}
    for n, entry in enumerate(entries):
        weight = 100.0 * (whole == entry.name)
        if not is_word and re.search(rf"(?<!\w){re.escape(whole)}(?!\w)", f"{entry.name} {entry.peers}"):
            weight += 50
        for word in wanted:
            rarity = math.log(1 + len(entries) / (1 + in_entries[word]))
            weight += rarity * max(_WEIGHTS[field] * _likeness(word, words[n, field]) for field in _WEIGHTS)
        others = len(words[n, "name"] - wanted)
        libraries = entry.peers.count(";")  # what many libraries have comes first
        weights[n] = weight / (1 + others / 10 - libraries / 100)
    most = max(weights.values())
    order = sorted((n for n in weights if weights[n] > _LEAST * most), key=lambda n: -weights[n])
    return [entries[n] for n in order[:_MOST]]


def _words(text: str) -> set[str]:
    """Return the words of names and sentences: BlockDiagonalMask, block_diagonal and "Block diagonal" have the same."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[a-z])(?=[0-9]d\b)", " ", text.replace("_", " "))
    return {word.removesuffix("s") for word in re.findall("[a-z]+[0-9]*|[0-9]+d", apart.lower())}


def _likeness(word: str, words: set[str]) -> float:
    if word in words:
        return 1.0
    return 0.5 if len(word) >= _START and any(w[:_START] == word[:_START] for w in words) else 0.0
