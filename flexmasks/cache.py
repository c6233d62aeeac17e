"""Caches that keep none of the user's tensors alive.

An entry is dropped when a tensor that it was made from dies.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexmasks.compat import version

Value = TypeVar("Value")
ENTRY = 4096  # approximate bytes of an entry without its tensors


class CacheInfo(NamedTuple):
    """Counts and sizes of one cache, see `cache_info()`."""

    hits: int
    misses: int
    entries: int
    bytes: int
    max_bytes: int


@dataclass
class _Entry(Generic[Value]):
    value: Value
    nbytes: int
    made_from: list[tuple[weakref.ref[Tensor], Hashable]]  # tensors, and the `identity` that each had
    used: bool = False  # used since it became the newest entry

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the value was made from these tensors, and none has changed since."""
        pairs = zip(self.made_from, tensors, strict=True)
        return all(ref() is tensor and identity(tensor) == former for (ref, former), tensor in pairs)


# One lock for all caches. It is re-entrant: a tensor may die on any line here, and call `_forget` of any cache.
_LOCK = threading.RLock()
_CACHES: dict[str, Cache[Any]] = {}


class Cache(Generic[Value]):
    """A cache by key and by the identity and version of tensors.

    The cache is bounded in bytes. When it is full, the oldest entries are dropped first; but an entry that was used
    since it became the newest entry becomes the newest entry once more. The cache is safe across threads. Tensors made
    in inference mode have no version, so a value that depends on one is not kept. A value made inside inference mode is
    returned only inside inference mode, because autograd refuses its tensors. In-place changes that torch does not
    count, through `tensor.data` or memory shared with NumPy, go unnoticed: call `clear_caches()` after one.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        self._lock = _LOCK  # an attribute too: a tensor may die after the interpreter has cleared this module
        self._entries: OrderedDict[tuple[Hashable, ...], _Entry[Value]] = OrderedDict()
        self._bytes = self._hits = self._misses = 0
        self._max_bytes = max_bytes
        _CACHES[name] = self

    def get(self, key: Hashable, tensors: Sequence[Tensor] = ()) -> Value | None:
        """Return the value kept for a key and these tensor objects.

        The result is None if there is no such value, or if a tensor has changed.
        """
        full_key = _with_ids(key, tensors)
        with self._lock:
            entry = self._entries.get(full_key)
            if entry is not None:
                if not tensors or entry.is_of(tensors):
                    entry.used = True
                    self._hits += 1
                    return entry.value
                self._forget(full_key)
            self._misses += 1
            return None

    def put(self, key: Hashable, tensors: Sequence[Tensor], value: Value, nbytes: int) -> None:
        """Keep a value until its tensors die or change, or until the cache is full."""
        identities = [identity(t) for t in tensors]
        if None in identities or nbytes > self._max_bytes:
            return
        full_key = _with_ids(key, tensors)
        dropped = []  # what dies with a value, such as a CUDA graph, dies without the lock
        with self._lock:
            former = self._entries.pop(full_key, None)
            if former is not None:
                self._bytes -= former.nbytes
                dropped.append(former)
            while self._bytes + nbytes > self._max_bytes:
                oldest, entry = self._entries.popitem(last=False)
                if entry.used:  # it has a second turn, as the newest entry
                    entry.used = False
                    self._entries[oldest] = entry
                else:
                    self._bytes -= entry.nbytes
                    dropped.append(entry)
            refs = [weakref.ref(t, lambda _, key=full_key: self._forget(key)) for t in tensors]  # type: ignore[misc]
            self._entries[full_key] = _Entry(value, nbytes, list(zip(refs, identities, strict=True)))
            self._bytes += nbytes

    def known_keys(self) -> list[Any]:
        """Return the keys of all entries, oldest first, without tensors."""
        with self._lock:
            return [full_key[0] for full_key in self._entries]

    def drop(self, key: Hashable, tensors: Sequence[Tensor] = ()) -> None:
        """Forget the value that was put under a key and these tensor objects."""
        self._forget(_with_ids(key, tensors))

    def _forget(self, full_key: tuple[Hashable, ...]) -> None:
        with self._lock:
            entry = self._entries.pop(full_key, None)
            if entry is not None:
                self._bytes -= entry.nbytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            dropped, self._entries = self._entries, OrderedDict()
            self._bytes = self._hits = self._misses = 0
        dropped.clear()

    def info(self) -> CacheInfo:
        """Return the cache's counts and sizes."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._entries), self._bytes, self._max_bytes)


def cache_info() -> dict[str, CacheInfo]:
    """Return hits, misses, entries and bytes of each of the library's caches, by name.

    `blocks`, `rows`, `scores`, `offsets` and `layouts` (of `paged_attention` and mixed batches), `calls` (of
    `attention`), `plans` (recorded, for new tensors), `data` (masks as data), `whole` and `added` (masks and biases of
    a few queries), `renewals` (of calls with new tensors) and `orders_of_tiles` (of tokens, for `order="auto"`) are
    measured in bytes; calls share most of their blocks with `blocks`. `huggingface` and `seen` (what processes
    exchange) appear with these integrations. In
    `kernels` (compiled code), `outcomes` (of backends), `numbers` (values of masks' numbers), `templates` (functions
    inside torch.compile), `mostly_partial`, `tried_scores` and `tiles` (facts about kinds) an entry counts as one
    byte.

    Example:
        >>> import flexmasks
        >>> flexmasks.cache_info()["numbers"].max_bytes
        1024
    """
    return {name: cache.info() for name, cache in _CACHES.items()}


def clear_caches() -> None:
    """Empty every cache of the library, see `cache_info`.

    Call this after a change of a tensor that torch does not count. torch does not count changes through `tensor.data`,
    through memory shared with NumPy, or by a kernel of yours.

    Example:
        >>> import flexmasks
        >>> flexmasks.clear_caches()
        >>> flexmasks.cache_info()["blocks"].entries
        0
    """
    for cache in _CACHES.values():
        cache.clear()


def identity(tensor: Tensor) -> Hashable | None:
    """Return a value that differs after each change of a tensor that torch counts.

    The result is None if changes of the tensor cannot be noticed.
    """
    if tensor.is_inference():
        return None
    try:
        # The address is needed because `tensor.data = other` does not raise the version.
        return version(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
    except RuntimeError:  # the tensor has no memory: it is fake, or inside a transform
        return None


def _with_ids(key: Hashable, tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """Return the key of an entry, with its tensors and inference mode."""
    return key, torch.is_inference_mode_enabled(), *map(id, tensors)
