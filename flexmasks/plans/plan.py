"""From a mask or score and the sizes of a call to what torch takes: a BlockMask, a mask_mod, a score_mod.

What is found is kept by value and by the identity of tensors, see flexmasks.cache: the same mask over the same
lengths is planned once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import compat
from flexmasks.blocks import build as blocks
from flexmasks.blocks.build import Layout
from flexmasks.blocks.counts import Blocks
from flexmasks.cache import ENTRY, Cache
from flexmasks.plans.windows import Dense, told
from flexmasks.spec.captures import Aliases, Opaque, capture
from flexmasks.spec.parameters import Size, bounded, describe
from flexmasks.spec.registry import get_mask
from flexmasks.spec.values import Mask, Modifier, NestedExtras

Offset = int | Tensor
BLOCK_SIZE = (128, 128)
_SMALL_BLOCKS = ((1 << 10, 32), (1 << 15, 64))  # up to which length, torch's kernel for the CPU wins by such blocks
_CONSTANTS = 6  # so many values of a mask's numbers are compiled in; from then on they are inputs of the kernel

_POSITIONS = 1 << 31  # kernels count them in 32 bits
_UNKNOWN_SHARE = 0.5  # of the pairs, computed


@dataclass(frozen=True)
class _Found:
    """What is kept of a planned mask or score: nothing of the user's own."""

    extras: dict[str, Any]
    moved: Tensor | None  # q_offset, where it is a number above 0, as an input of the kernel: decoding changes it

    @property
    def nbytes(self) -> int:
        return ENTRY + sum(t.nbytes for t in _tensors_in(self.extras))


@dataclass(frozen=True)
class _FoundMask(_Found):
    layout: Layout
    facts: dict[str, Any]  # "options" that hold for kernels, "share" of the pairs that is computed: once asked for

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(t.nbytes for t in self.layout.indices)


_Kept = TypeVar("_Kept", bound=_Found)
_BLOCKS: Cache[_FoundMask] = Cache("blocks", max_bytes=5 << 28)  # a million tokens take 1.07 GB
_SCORES: Cache[_Found] = Cache("scores", max_bytes=1 << 26)
_NUMBERS: Cache[set[Hashable]] = Cache("numbers", max_bytes=1024)  # values seen of masks' numbers; one byte each


def outside_transforms(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """What is made and kept must not belong to a transform of torch.func, unless what it is made from does."""
    inside = compat.transforms_active()
    if not inside or any(compat.is_wrapped(t) for t in tensors):
        return contextlib.nullcontext()
    return compat.outside_transforms()


class Plan:
    """A mask or score with the sizes of a call. Work is done, or found done, when it is asked for.

    With `aliases` its functions are bound to aliases of the tensors where that can be (`kept`), so that they may be
    kept.
    """

    def __init__(
        self, value: Modifier, size: Size, offset: Offset = 0, lift: bool = False, aliases: Aliases | None = None
    ) -> None:
        self.value, self.size, self.offset = value, size, offset
        self._bound_to: tuple[Any, Offset] = value, offset
        self.kept = False
        self.tensors: list[Tensor] = []
        self.opaque = False
        try:
            self._key = value.capture(self.tensors)
        except Opaque:
            self.opaque = True
        self.lifted = lift and not self.opaque and self._lift()
        if aliases is not None and not self.opaque:
            with contextlib.suppress(Opaque):
                self._bound_to = aliases.of((value, offset))
                self.kept = True

    @functools.cached_property
    def kernel_key(self) -> Hashable:
        """What a compiled kernel depends on."""
        if self.opaque:
            return "opaque", self.value.name, getattr(self.value.definition.function, "__code__", None)
        return self.value.capture([], contents=False)

    def _lift(self) -> bool:
        """Whether the numbers are to be inputs of the kernel: when many values of them were seen."""
        key = self.value.capture([], lift=True, contents=False)
        if key == self.kernel_key:
            return False
        seen = _NUMBERS.get(key)
        if seen is None:
            seen = set()
            _NUMBERS.put(key, (), seen, 1)
        if self.kernel_key not in seen:
            if len(seen) >= _CONSTANTS:
                self.kernel_key = key
                return True
            seen.add(self.kernel_key)
        return False

    def _find(self, cache: Cache[_Kept], build: Callable[[], _Kept], *more: Hashable) -> _Kept:
        if self.opaque:
            return build()
        offset = self.offset if isinstance(self.offset, int) else "tensor"
        tensors = self.tensors if isinstance(self.offset, int) else [*self.tensors, self.offset]
        key = (self._key, offset, self.size, self.lifted, torch.get_default_dtype(), *more)
        found = cache.get(key, tensors)
        if found is None:
            with outside_transforms(tensors):
                found = build()
            # what was computed from a tensor that learns belongs to one autograd graph
            if not any(t.requires_grad for t in tensors) or not _tensors_in(found.extras):
                cache.put(key, tensors, found, found.nbytes)
        return found

    def _moved(self) -> Tensor | None:
        if not isinstance(self.offset, int) or self.offset == 0:
            return None
        # one for each batch element: some kernels have no 0-dimensional tensors
        moved = torch.full((max(self.size.batch, 2),), self.offset, device=self.size.device)
        return bounded(moved, self.offset, self.offset)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Of the tensors."""
        return tuple(t.shape for t in self.tensors)

    def _bind(self, found: _Found) -> tuple[Callable[..., Tensor], Offset]:
        value, offset = self._bound_to
        heads = self.size.heads if self.size.device.type == "cuda" else None
        return value.bind(found.extras, heads), offset if found.moved is None else found.moved

    @property
    def has_numbers(self) -> bool:
        """Whether a function captured a 0-dimensional tensor by itself, not as a parameter."""
        known = {id(t) for t in self.value.numbers()}
        return any(t.ndim == 0 and id(t) not in known for t in self.tensors)


class MaskPlan(Plan):
    """A mask on its way to a BlockMask."""

    def __init__(
        self,
        mask: Mask,
        size: Size,
        offset: Offset = 0,
        lift: bool = False,
        block_size: tuple[int, int] = BLOCK_SIZE,
        open_extents: tuple[str, ...] = (),
        aliases: Aliases | None = None,
    ) -> None:
        """`open_extents`: "batch", "heads" where nobody said how far b and h range: the mask must not depend on it."""
        super().__init__(mask, size, offset, lift, aliases)
        self.block_size, self.open_extents = block_size, open_extents

    @functools.cached_property
    def dense(self) -> Dense | None:
        """What kernels that have masks of their own are to be told, where that is all of the mask."""
        if self.opaque or not isinstance(self.offset, int):
            return None
        return told(cast(Mask, self.value), sized(self.size, self.offset))

    @functools.cached_property
    def _found(self) -> _FoundMask:
        return self._find(_BLOCKS, self._build, self.block_size, self.open_extents)

    def _build(self) -> _FoundMask:
        size = sized(self.size, self.offset)
        extras = self.value.resolve(size, self.lifted)
        mod = shifted_mask(self.value.bind(extras), self.offset)
        batch, heads = (n * (1 + (e in self.open_extents)) for n, e in ((size.batch, "batch"), (size.heads, "heads")))
        try:
            with explained(self.value):
                found = blocks.build(mod, batch, heads, size.q_len, size.kv_len, size.device, self.block_size)
        except Exception:
            check_open_extents(self.value, mod, size, self.open_extents)
            raise
        own = found.indices[0].shape
        if any(n > 1 for n, e in ((own[0], "batch"), (own[1], "heads")) if e in self.open_extents):
            check_open_extents(self.value, mod, size, self.open_extents)
        return _FoundMask(extras, self._moved(), found, {})

    def block_mask(self) -> BlockMask:
        """The BlockMask; its mask_mod is bound to the user's own tensors, or their aliases."""
        found = self._found
        return found.layout.block_mask(shifted_mask(*self._bind(found)))

    def blocks(self) -> Blocks:
        """The BlockMask, and what it took to find it."""
        layout = self._found.layout
        return Blocks(self.block_mask(), layout.undecided, layout.not_understood)

    def kernel_options(self, scored: bool) -> dict[str, bool]:
        """Options of torch's kernels that hold for these blocks whatever tensors contain: of masks without any.

        With a change of scores, `scored`, no row is sure to keep a score that is finite.
        """
        if self.opaque or self.lifted or self.tensors or not isinstance(self.offset, int) or self.offset != 0:
            return {}
        options = self._fact("options", lambda: self.blocks().kernel_options)
        return {n: v for n, v in options.items() if not (scored and n == "ROWS_GUARANTEED_SAFE")}

    def share(self) -> float:
        """The share of all pairs that is computed, about; a half where blocks are found only to know it."""
        dense = self.dense
        if dense is not None:
            pairs = self.size.q_len * self.size.kv_len
            return dense.pairs(self.size.q_len) / pairs if dense.sequences is None else _UNKNOWN_SHARE
        return cast(float, self._fact("share", lambda: 1 - self.blocks().sparsity))

    def _fact(self, name: str, find: Callable[[], Any]) -> Any:
        """What was found of the blocks, kept with them; to find it waits for a GPU."""
        facts = self._found.facts
        if name not in facts:
            facts[name] = find()
        return facts[name]


class ScorePlan(Plan):
    """A score change on its way to a score_mod."""

    def score_mod(self) -> Callable[..., Tensor]:
        """The score_mod, bound to the user's own tensors, or their aliases."""
        return shifted_score(*self._bind(self._find(_SCORES, self._build)))

    def _build(self) -> _Found:
        extras = self.value.resolve(sized(self.size, self.offset))
        # some scores, for the function's own errors; on CUDA only the first, for an index out of range ends the process
        size = self.size
        ends = [
            [0] if size.device.type != "cpu" else [0, n - 1] for n in (size.batch, size.heads, size.q_len, size.kv_len)
        ]
        score = torch.zeros([len(e) for e in ends], dtype=size.dtype, device=size.device)
        mod = shifted_score(self.value.bind(extras), self.offset)
        with explained(self.value), torch.no_grad():
            changed = blocks.over_indices(mod, (0,))(score, *(torch.tensor(e, device=size.device) for e in ends))
            if not changed.dtype.is_floating_point or changed.shape != score.shape:
                got = f"{describe(changed)} for {describe(score)}"
                raise TypeError(f"a score function must return a floating number for each score, got {got}.")
        return _Found(extras, self._moved())


class GivenPlan:
    """A BlockMask that came from outside, in a MaskPlan's place."""

    tensors: tuple[Tensor, ...] = ()
    dense: Dense | None = None
    kept = False

    def __init__(self, block_mask: BlockMask) -> None:
        self._block_mask = block_mask
        captured: list[Tensor] = []
        self.kernel_key: Hashable
        try:
            self.kernel_key, self.opaque = ("given", capture(block_mask.mask_mod, captured)), False
        except Opaque:
            self.kernel_key, self.opaque = ("opaque", getattr(block_mask.mask_mod, "__code__", None)), True
        self.shapes = tuple(t.shape for t in captured)

    @property
    def has_numbers(self) -> bool:
        return any(not shape for shape in self.shapes)

    def block_mask(self) -> BlockMask:
        return self._block_mask

    def blocks(self) -> Blocks:
        return Blocks(self._block_mask)

    def kernel_options(self, scored: bool) -> dict[str, bool]:
        return {}

    def share(self) -> float:
        return _UNKNOWN_SHARE


FULL = get_mask("full")


def block_size_for(size: Size) -> tuple[int, int]:
    """The block size that suits the kernels of a call's device."""
    if size.device.type == "cpu":
        for length, n in _SMALL_BLOCKS:
            if max(size.q_len, size.kv_len) <= length:
                return n, n
    return BLOCK_SIZE


def sized(size: Size, offset: Offset) -> Size:
    """The size with the largest offset in it; reads a tensor's values, and raises ValueError for a negative one."""
    least, most = (offset, offset) if isinstance(offset, int) else torch.stack(torch.aminmax(offset)).tolist()
    if least < 0:
        raise ValueError(f"flexmasks: `q_offset` must be at least 0, got values from {least} to {most}.")
    if most + size.q_len > _POSITIONS:
        raise ValueError(f"flexmasks: `q_offset` must be at most 2**31 - {size.q_len}, the queries, got {most}.")
    return replace(size, q_offset=most)


def check_open_extents(value: Modifier, mod: Callable[..., Tensor], size: Size, extents: tuple[str, ...]) -> None:
    """Raise ValueError where a mask depends on b or h and nobody said how far that ranges; its own errors first."""
    for extent in extents:
        twice = replace(size, **{extent: 2 * getattr(size, extent)})
        try:
            found = blocks.dependence(mod, twice.batch, twice.heads, size.device)
        except Exception as error:
            # an index out of range for a second one; all else is the function's own error, told when it is used
            if not isinstance(error, IndexError) and "indexes a dimension" not in str(error):
                continue
            found = twice.batch, twice.heads
        if found[extent == "heads"] > 1:
            with explained(value):
                blocks.dense(mod, size.batch, size.heads, 1, 1, size.device)
            raise ValueError(
                f"flexmasks: the mask {value!r} depends on its {extent} index; pass `{extent}`, how far it ranges."
            )


def shifted_mask(mod: Callable[..., Tensor], offset: Offset) -> Callable[..., Tensor]:
    """The mask_mod with query i at position i + offset."""
    if isinstance(offset, int) and offset == 0:
        return mod
    if isinstance(offset, int) or offset.ndim == 0:
        return lambda b, h, q, kv: mod(b, h, q + offset, kv)
    return lambda b, h, q, kv: mod(b, h, q + offset[b].to(q.dtype), kv)


def shifted_score(mod: Callable[..., Tensor], offset: Offset) -> Callable[..., Tensor]:
    """The score_mod with query i at position i + offset."""
    if isinstance(offset, int) and offset == 0:
        return mod
    if isinstance(offset, int) or offset.ndim == 0:
        return lambda score, b, h, q, kv: mod(score, b, h, q + offset, kv)
    return lambda score, b, h, q, kv: mod(score, b, h, q + offset[b].to(q.dtype), kv)


@contextlib.contextmanager
def explained(value: Modifier) -> Iterator[None]:
    """Errors of a mask's or score's own function, as errors that name it."""
    what = f"flexmasks {value.kind} {value!r}"
    try:
        yield
    except (ValueError, TypeError) as error:
        if str(error).startswith("flexmasks"):
            raise
        raise type(error)(f"{what}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError, ArithmeticError, AttributeError, NameError, AssertionError) as error:
        if "data-dependent control flow" in str(error) or ".item()" in str(error):
            raise ValueError(
                f"{what} may not decide by `if`, `and`, `or` or `not`, nor read the value of an index or score: they "
                "stand for many at once. Use torch.where, torch.minimum and torch.maximum, `&`, `|` and `~`."
            ) from error
        raise ValueError(f"{what} failed on index tensors: {type(error).__name__}: {str(error)[:300]}") from error


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | NestedExtras):
        value = tuple(value.values()) if isinstance(value, dict) else value.extras
    children = value if isinstance(value, tuple) else ()
    return [t for child in children for t in _tensors_in(child)]
