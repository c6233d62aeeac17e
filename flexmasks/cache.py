"""Caches that hold values and never a user's tensor: an entry dies with the tensors that it was made from."""

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
ENTRY = 4096  # bytes that an entry takes besides its tensors, about


class CacheInfo(NamedTuple):
    """What one cache holds and how it served: see `cache_info()`."""

    hits: int
    misses: int
    entries: int
    bytes: int
    max_bytes: int


@dataclass
class _Entry(Generic[Value]):
    value: Value
    nbytes: int
    made_from: list[tuple[weakref.ref[Tensor], Hashable]]  # tensors and their `identity` then
    used: bool = False  # since it was put there, or had another turn


# One lock for all caches, re-entrant: a tensor may die anywhere in here and call `_forget` of any of them.
_LOCK = threading.RLock()
_CACHES: dict[str, Cache[Any]] = {}


class Cache(Generic[Value]):
    """A cache by a key and by the identity and version of tensors, bounded in bytes: the oldest unused goes first.

    Safe across threads. Tensors made in inference mode have no version: what depends on one is not kept. What is
    made inside inference mode serves only there, since autograd refuses its tensors. In-place changes that torch does
    not count, through `tensor.data` or memory shared with NumPy, go unnoticed: call `clear_caches()` after one.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        self._lock = _LOCK  # held here too: a tensor may die when the interpreter has already cleared the module
        self._entries: OrderedDict[Hashable, _Entry[Value]] = OrderedDict()
        self._bytes = self._hits = self._misses = 0
        self._max_bytes = max_bytes
        _CACHES[name] = self

    def get(self, key: Hashable, tensors: Sequence[Tensor] = ()) -> Value | None:
        """The value put under this key and these very tensors, unless one of them has changed in place since."""
        full = _full(key, tensors)
        with self._lock:
            entry = self._entries.get(full)
            if entry is not None:
                for (ref, then), tensor in zip(entry.made_from, tensors, strict=True):
                    if ref() is not tensor or identity(tensor) != then:
                        self._forget(full)
                        break
                else:
                    entry.used = True
                    self._hits += 1
                    return entry.value
            self._misses += 1
            return None

    def put(self, key: Hashable, tensors: Sequence[Tensor], value: Value, nbytes: int) -> None:
        """Keep a value until its tensors die or change, or the bytes are needed."""
        states = _identities(tensors)
        if states is None or nbytes > self._max_bytes:
            return
        full = _full(key, tensors)
        with self._lock:
            self._forget(full)
            while self._bytes + nbytes > self._max_bytes:
                oldest, entry = self._entries.popitem(last=False)
                if entry.used:  # then it has another turn
                    entry.used = False
                    self._entries[oldest] = entry
                else:
                    self._bytes -= entry.nbytes
            refs = [weakref.ref(t, lambda _, full=full: self._forget(full)) for t in tensors]  # type: ignore[misc]
            self._entries[full] = _Entry(value, nbytes, list(zip(refs, states, strict=True)))
            self._bytes += nbytes

    def drop(self, key: Hashable) -> None:
        """Forget what was put under a key without tensors."""
        self._forget(_full(key, ()))

    def _forget(self, full: Hashable) -> None:
        with self._lock:
            entry = self._entries.pop(full, None)
            if entry is not None:
                self._bytes -= entry.nbytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._bytes = self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        """Counts and sizes."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._entries), self._bytes, self._max_bytes)


def cache_info() -> dict[str, CacheInfo]:
    """Hits, misses, entries and bytes of each of the library's caches, by name.

    `blocks`, `rows`, `scores`, `offsets` (of `paged_attention`) and `calls` (of `attention`; their blocks are mostly
    those in `blocks`) are measured in bytes. `kernels` (compiled code), `outcomes` (of backends) and `numbers` (values
    of masks' numbers) are counted instead: an entry is one byte.

    Example:
        >>> import flexmasks
        >>> sorted(flexmasks.cache_info())
        ['blocks', 'calls', 'kernels', 'numbers', 'offsets', 'outcomes', 'rows', 'scores']
    """
    return {name: cache.info() for name, cache in _CACHES.items()}


def clear_caches() -> None:
    """Empty every cache of the library, see `cache_info`: after a change of a tensor that torch does not count."""
    for cache in _CACHES.values():
        cache.clear()


def identity(tensor: Tensor) -> Hashable | None:
    """What changes when a tensor does, besides the object; None where that cannot be known."""
    if tensor.is_inference():
        return None
    try:
        # `tensor.data = other` counts up no version
        return version(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
    except RuntimeError:  # it has no memory: a fake tensor, or one inside a transform
        return None


def _identities(tensors: Sequence[Tensor]) -> list[Hashable] | None:
    states = [identity(t) for t in tensors]
    return None if None in states else states


def _full(key: Hashable, tensors: Sequence[Tensor]) -> Hashable:
    return key, torch.is_inference_mode_enabled(), *map(id, tensors)
