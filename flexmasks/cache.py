"""Caches that keep none of the user's tensors alive.

An entry is dropped when a tensor that it was made from dies.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexmasks import compat

Value = TypeVar("Value")
ENTRY = 4096  # approximate bytes of an entry without its tensors
FACT = 1 << 14  # bytes that a fact about a kind counts, so that there are at most 65,536


def bytes_of(value: Any) -> int:
    """Return the bytes of a value: what it says by `nbytes`, as tensors do, or those of the parts of a NamedTuple, a
    list or a BlockMask. Other tuples hold keys, or tensors of the user's.
    """
    nbytes = getattr(value, "nbytes", None)
    if nbytes is not None:
        return int(nbytes)
    if hasattr(value, "as_tuple"):
        return sum(map(bytes_of, value.as_tuple()))
    return sum(map(bytes_of, value)) if isinstance(value, list) or hasattr(value, "_fields") else 0


class CacheInfo(NamedTuple):
    """Counts and sizes of one cache, see `cache_info()`."""

    hits: int
    misses: int
    entries: int
    bytes: int
    max_bytes: int
    parts: Mapping[str, CacheInfo]  # the same of what it holds, by kind

    @property
    def share(self) -> float:
        """The share of the cache that is full, from 0 to 1."""
        return self.bytes / max(1, self.max_bytes)

    def __repr__(self) -> str:
        """Names of the parts in use stand for what they hold, which takes thousands of characters."""
        counts = ", ".join(f"{name}={value}" for name, value in zip(self._fields, self[:-1], strict=False))
        used = [name for name, info in self.parts.items() if any(info[:4])]
        return f"CacheInfo({counts}, parts={{{', '.join(used)}}})"


class CacheInfos(dict[str, CacheInfo]):
    """The counts and sizes of all caches by name, printed as a table."""

    def __repr__(self) -> str:
        from tabulate import tabulate  # imported at the first use

        rows = []
        for name, info in self.items():
            size = "" if name in ("kernels", "launches") else f"{info.bytes / 1e6:,.1f}"
            used = [part for part, held in info.parts.items() if any(held[:4])]
            rows.append((name, info.hits, info.misses, info.entries, size, f"{info.share:.0%}", ", ".join(used)))
        headers = ["cache", "hits", "misses", "entries", "MB", "full", "holds"]
        aligned = ("left", *["right"] * 5, "left")
        return tabulate(rows, headers, colalign=aligned, disable_numparse=True, maxcolwidths=[*[None] * 6, 40])


@dataclass
class _Entry(Generic[Value]):
    value: Value
    nbytes: int
    made_from: list[tuple[weakref.ref[Tensor], Hashable]]  # tensors, and the `identity` that each had
    used: bool = False  # used since it became the newest entry


# One lock for all caches. It is re-entrant: a tensor may die on any line here, and call `_forget` of any cache.
_LOCK = threading.RLock()


class Cache:
    """Values by key and by the identity and version of tensors, which `Part`s put and get.

    The cache is bounded in bytes. When it is full, the oldest entries are dropped first; but an entry that was used
    since it became the newest entry becomes the newest entry once more. The cache is safe across threads. torch
    does not count all changes of tensors that require a gradient, and none of those made in inference mode: small
    ones on a CPU are compared by their contents, and a value that depends on another one is not kept. A value made
    inside inference mode is returned only inside inference mode, because autograd refuses its tensors. Other
    changes that torch does not count go unnoticed, see `clear_caches`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self.parts: dict[str, Part[Any]] = {}
        self.entries: OrderedDict[tuple[Hashable, ...], _Entry[Any]] = OrderedDict()

    def make_room(self, nbytes: int) -> list[_Entry[Any]]:
        """Drop old entries until there are as many free bytes, and return the dropped ones."""
        dropped = []
        while self.bytes + nbytes > self.max_bytes:
            oldest, entry = self.entries.popitem(last=False)
            if entry.used:  # it has a second turn, as the newest entry
                entry.used = False
                self.entries[oldest] = entry
            else:
                self.account(oldest, -1, -entry.nbytes)
                dropped.append(entry)
        return dropped

    def account(self, full_key: tuple[Hashable, ...], entries: int, nbytes: int) -> None:
        """Count entries of a part that come or go."""
        part = self.parts[str(full_key[0])]
        part.count += entries
        part.bytes += nbytes
        self.bytes += nbytes

    def clear(self) -> None:
        """Forget everything."""
        with _LOCK:
            dropped, self.entries = self.entries, OrderedDict()
            self.bytes = 0
            for part in self.parts.values():
                part.hits = part.misses = part.count = part.bytes = 0
        dropped.clear()  # what dies with a value, such as a CUDA graph, dies without the lock

    def info(self) -> CacheInfo:
        """Return the cache's counts and sizes."""
        with _LOCK:
            parts = {name: part.info() for name, part in self.parts.items()}
            hits, misses = sum(i.hits for i in parts.values()), sum(i.misses for i in parts.values())
            return CacheInfo(hits, misses, len(self.entries), self.bytes, self.max_bytes, parts)


class Part(Generic[Value]):
    """The values of one kind in a cache."""

    def __init__(self, cache: Cache, name: str) -> None:
        self._lock = _LOCK  # an attribute too: a tensor may die after the interpreter has cleared this module
        self._cache, self._name = cache, name
        self.hits = self.misses = self.count = self.bytes = 0
        cache.parts[name] = self

    def get(self, key: Hashable, tensors: Sequence[Tensor] = ()) -> Value | None:
        """Return the value kept for a key and these tensor objects.

        The result is None if there is no such value, or if a tensor has changed.
        """
        full_key = self._full_key(key, tensors)
        with self._lock:
            entry = self._cache.entries.get(full_key)
            if entry is not None:
                for (ref, former), tensor in zip(entry.made_from, tensors, strict=True):
                    if ref() is not tensor or identity(tensor) != former:
                        self._forget(full_key)
                        break
                else:
                    entry.used = True
                    self.hits += 1
                    return entry.value  # type: ignore[no-any-return]
            self.misses += 1
            return None

    def put(self, key: Hashable, tensors: Sequence[Tensor], value: Value, nbytes: int) -> None:
        """Keep a value until its tensors die or change, or until the cache is full."""
        identities, cache = [identity(t) for t in tensors], self._cache
        if None in identities or nbytes > cache.max_bytes:
            return
        nbytes += sum(len(x[-1]) for x in identities if isinstance(x, tuple) and isinstance(x[-1], bytes))
        full_key = self._full_key(key, tensors)
        with self._lock:
            former = self._forget(full_key)
            dropped = cache.make_room(nbytes)
            refs = [weakref.ref(t, lambda _, key=full_key: self._forget(key)) for t in tensors]  # type: ignore[misc]
            cache.entries[full_key] = _Entry(value, nbytes, list(zip(refs, identities, strict=True)))
            cache.account(full_key, 1, nbytes)
        del former, dropped  # what dies with a value, such as a CUDA graph, dies without the lock

    def known_keys(self) -> list[Any]:
        """Return the keys of all entries, oldest first, without tensors."""
        with self._lock:
            return [full_key[1] for full_key in self._cache.entries if full_key[0] == self._name]

    def drop(self, key: Hashable, tensors: Sequence[Tensor] = ()) -> None:
        """Forget the value that was put under a key and these tensor objects."""
        self._forget(self._full_key(key, tensors))

    def _full_key(self, key: Hashable, tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
        return self._name, key, torch.is_inference_mode_enabled(), *map(id, tensors)

    def _forget(self, full_key: tuple[Hashable, ...]) -> _Entry[Any] | None:
        with self._lock:
            entry = self._cache.entries.pop(full_key, None)
            if entry is not None:
                self._cache.account(full_key, -1, -entry.nbytes)
            return entry

    def info(self) -> CacheInfo:
        """Return the part's counts and sizes."""
        return CacheInfo(self.hits, self.misses, self.count, self.bytes, self._cache.max_bytes, {})


_Launch = TypeVar("_Launch")


class Launches(dict[Hashable, _Launch]):
    """Launches of kernels by layouts of tensors; when there are too many, all are dropped.

    A dictionary, because looking into it takes a tenth of the time of a `Part`.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        _LAUNCHES[name] = self

    def keep(self, key: Hashable, launch: _Launch) -> None:
        """Keep a launch."""
        if len(self) >= MAX_LAUNCHES:
            self.clear()
        self[key] = launch


# What the library remembers of calls and masks:
# - of kinds of masks, scores and calls, which differ in the values of tensors only: recorded programs, calls, what
#   numbers came, which backends failed, and other facts;
KINDS = Cache(max_bytes=1 << 30)
# - of these tensors: blocks, other forms of masks and scores, layouts, and calls with all that they read. The blocks of
#   a million tokens take 1.07 GB;
PLANS = Cache(max_bytes=1 << 32)
# - compiled flex_attention, each counted as one byte;
KERNELS = Cache(max_bytes=256)
# - launches of the library's own kernels.
_LAUNCHES: dict[str, Launches[Any]] = {}
MAX_LAUNCHES = 4096  # of a kernel
_MAX_COMPARED = 1 << 16  # bytes of a tensor whose changes torch does not count, compared in some microseconds


def cache_info() -> CacheInfos:
    """Return hits, misses, entries and bytes: the total of the library's four caches, then each, by name, in a
    dictionary that prints as a table.

    The bytes of the total are those of `kinds` and `plans`. `kinds` holds what is known about kinds of calls, which
    differ in the values of tensors only, `plans` what was made for certain tensors, `kernels` compiled kernels, each
    counted as one byte, and `launches` how the library's own kernels are launched, whose hits are not counted. What
    they hold appears in `parts` once it is used.

    Example:
        >>> import flexmasks
        >>> list(flexmasks.cache_info())
        ['total', 'kinds', 'plans', 'kernels', 'launches']
        >>> flexmasks.cache_info()["plans"].max_bytes
        4294967296
    """
    parts = {name: CacheInfo(0, 0, len(kept), len(kept), MAX_LAUNCHES, {}) for name, kept in _LAUNCHES.items()}
    count = sum(info.entries for info in parts.values())
    launches = CacheInfo(0, 0, count, count, MAX_LAUNCHES * len(parts), parts)
    caches = {"kinds": KINDS.info(), "plans": PLANS.info(), "kernels": KERNELS.info(), "launches": launches}
    infos, of_tensors = caches.values(), (caches["kinds"], caches["plans"])
    total = CacheInfo(
        sum(info.hits for info in infos),
        sum(info.misses for info in infos),
        sum(info.entries for info in infos),
        sum(info.bytes for info in of_tensors),
        sum(info.max_bytes for info in of_tensors),
        {},
    )
    return CacheInfos(total=total, **caches)


def clear_caches() -> None:
    """Empty the library's four caches, see `cache_info`.

    Call this after a change of a tensor that torch does not count: through `tensor.data`, through memory shared
    with NumPy, by a kernel of yours, or by a collective of torch.distributed into a tensor that you keep. For a
    single tensor, `torch.autograd.graph.increment_version(tensor)` does as well. Parameters, whose changes by fused
    optimizers and FSDP2 torch does not count either, need nothing: what depends on a tensor that requires a
    gradient is computed anew, in evaluation too, which `requires_grad_(False)` spares. Plans that you hold keep what
    they have.

    Call it too before `torch.utils.swap_tensors`, which refuses tensors to which there are weak references. Under
    `torch.__future__.set_swap_module_params_on_conversion(True)` nothing is kept of tensors, but in plans.

    Example:
        >>> import flexmasks
        >>> flexmasks.clear_caches()
        >>> flexmasks.cache_info()["plans"].entries
        0
    """
    for cache in (KINDS, PLANS, KERNELS):
        cache.clear()
    for launches in _LAUNCHES.values():
        launches.clear()


def _contents(tensor: Tensor) -> bytes:
    own = tensor.detach().clone()  # a tensor shared with NumPy can never be resized, as FSDP2 does
    contents: bytes = own.reshape(-1).view(torch.uint8).numpy().tobytes()
    return contents


def identity(tensor: Tensor) -> Hashable | None:
    """Return a value that differs after each change of a tensor that torch counts.

    The result is None if changes of the tensor cannot be noticed, or if torch is to swap the tensors of modules: it
    swaps none to which there are weak references, and nothing but these tells when a tensor dies.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        return None
    try:
        # torch does not count what fused optimizers and FSDP2 write into parameters.
        if tensor.is_inference() or tensor.requires_grad:
            is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
            is_small = is_plain and tensor.nbytes <= min(_MAX_COMPARED, tensor.untyped_storage().nbytes())
            return (tensor.shape, tensor.dtype, _contents(tensor)) if is_small else None
        # The address is needed because `tensor.data = other` does not raise the version.
        return compat.version(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except RuntimeError:  # the tensor has no memory: it is fake, or inside a transform
        return None
