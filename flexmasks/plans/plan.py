"""Plans: a mask or score becomes a BlockMask, a mask_mod or a score_mod.

Plans are cached by the values of parameters and the identity of tensors, see flexmasks.cache: the same mask over the
same lengths is planned once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.bits import Bits, can_be_bits
from flexmasks.blocks.build import Layout, build, materialize
from flexmasks.blocks.counts import Blocks
from flexmasks.blocks.decide import dependence
from flexmasks.blocks.elements import over_indices
from flexmasks.cache import ENTRY, Cache
from flexmasks.errors import passing_error
from flexmasks.kernels.whole_mask import Line
from flexmasks.plans.bounds import MaskKind, RecordedPlan, plan_bounds, reads_made_tensors, tensors_in, unread
from flexmasks.plans.data import CannotBeData, MaskData, TooLargeForData, data_of
from flexmasks.plans.intervals import Intervals, intervals_of
from flexmasks.plans.recorded import Form, Recorded, memory_of_capture
from flexmasks.plans.shifted import Offset, shifted_mask, shifted_score
from flexmasks.plans.whole import Added, Spanned, Whole, added_of, line_of, spanned_of, whole_of
from flexmasks.plans.windows import Window, window_of
from flexmasks.ranges.context import Refused
from flexmasks.spec.frames import of_user, place_of
from flexmasks.spec.indexing import bounded
from flexmasks.spec.parameters import Size, describe, how_to_move
from flexmasks.spec.structure import (
    MAX_COMPILED_VALUES,
    Aliases,
    Leaves,
    Number,
    Opaque,
    Structure,
    flatten,
    in_one_piece,
    key_of,
    replaced,
    with_tensors,
)
from flexmasks.spec.values import Mask, Modifier, Score, Spread

BLOCK_SIZE = (128, 128)
_FLASH_BLOCK_SIZE = (256, 128)  # FLASH's kernels for compute capability 10 and 11 compute 256 queries at a time
_CPU_BLOCK_SIZES = ((1 << 10, 32), (1 << 15, 64))  # longest length, and the block size that is fastest up to it
MAX_POSITIONS = 1 << 31  # kernels count positions in 32 bits
_UNKNOWN_FRACTION = 0.5  # assumed fraction of pairs that is computed
_MAX_WIDTH = 1.25  # the most blocks of bounds, in exact blocks, with which bounds are used
_PLANS_TO_RECORD = 16  # plans that take about as long as recording one
_MAX_NOTED_SIZES = 64  # sizes that are noted for a value of a number
_FACTORED_ON = ("cuda",)  # devices whose kernels take the factors of what a score change adds
_SPREADS_ON = ("cuda",)  # devices where a kernel may take no 0-dimensional tensors
_ERRORS_OF_FUNCTIONS = (
    ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError, NameError, AssertionError,
)  # fmt: skip
_FIRST = "these are the first tensors of their shapes"
_PARTIAL_BLOCKS = 2  # full blocks for each partial block, below which a mask counts as mostly partial
_MAX_TABLES, _SMALL_TABLES = 4, 1 << 16  # the most bytes of their tables, in bytes of exact ones, and at least


@dataclass(frozen=True)
class _Prepared:
    """The cached part of a plan; nothing of it is the user's own."""

    resolved: dict[str, Any]  # what `Modifier.resolve` returned
    offset: Tensor | None  # a number q_offset above 0 as a kernel's input: decoding changes it at each step

    @property
    def nbytes(self) -> int:
        return ENTRY + sum(t.nbytes for t in tensors_in(self.resolved))


@dataclass(frozen=True)
class _PreparedMask(_Prepared):
    layout: Layout
    facts: dict[str, Any]  # computed on demand: "options" proven for kernels, "fraction" of pairs computed
    why_exact: str = ""  # why the blocks of a mask with tensors are exact, or "" if they are bounds
    recorded: RecordedPlan | None = None  # the plan that they came from

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(t.nbytes for t in self.layout.indices)


@dataclass
class _Kind:
    """State of all masks that differ in the values of tensors only."""

    why_exact: str  # why their plans must be exact, or ""
    records_soon: bool = True  # at the second plan, instead of after as many as take the time of recording
    plans: int = 1
    # Made when the second mask is planned, later for other sizes than the first. A kind of `_recorded_tensors` has
    # operations of its own.
    recorded: Any = None

    def is_to_be_recorded(self) -> bool:
        """Return whether the next plan is recorded; sizes that grow at every step never return."""
        return not self.why_exact and self.recorded is None and (self.records_soon or self.plans >= _PLANS_TO_RECORD)


@dataclass
class _SeenNumbers:
    """Values that the numbers of one kind of mask or score had."""

    sizes: dict[Hashable, set[Size]] = field(default_factory=dict)  # by kernel key of a first value: where it was met
    had_more: bool = False  # more values came than are compiled in

    def is_compiled_in(self, key: Hashable, size: Size) -> bool:
        """Return whether a value is a constant of kernels for this size.

        key: the kernel key that has the value.
        """
        if key not in self.sizes:
            self.had_more = self.had_more or len(self.sizes) >= MAX_COMPILED_VALUES
            if self.had_more:
                return False
            self.sizes[key] = set()
        sizes = self.sizes[key]
        if not self.had_more and len(sizes) < _MAX_NOTED_SIZES:
            sizes.add(size)
        return size in sizes or not self.had_more


_P = TypeVar("_P", bound=_Prepared | MaskData | Whole | Spanned | Added)
_W = TypeVar("_W", Whole, Spanned)
_V = TypeVar("_V")
_BLOCKS: Cache[_PreparedMask] = Cache("blocks", max_bytes=5 << 28)  # the blocks of a million tokens take 1.07 GB
_KINDS: Cache[_Kind] = Cache("plans", max_bytes=1 << 30)
_WHOLE: Cache[Whole] = Cache("whole", max_bytes=1 << 28)
_SPANNED: Cache[Spanned] = Cache("spanned", max_bytes=1 << 28)
_ADDED: Cache[Added] = Cache("added", max_bytes=1 << 28)
_DATA: Cache[MaskData] = Cache("data", max_bytes=1 << 30)
# Facts about the first masks and scores of their kinds. An entry counts one byte.
_MOSTLY_PARTIAL: Cache[bool] = Cache("mostly_partial", max_bytes=1024)
_TRIED: Cache[bool] = Cache("tried_scores", max_bytes=1024)
_SCORES: Cache[_Prepared] = Cache("scores", max_bytes=1 << 26)
_NUMBERS: Cache[_SeenNumbers] = Cache("numbers", max_bytes=1024)  # an entry counts one byte


class Plan:
    """Base of MaskPlan and ScorePlan: a mask or score with a call's sizes.

    Each step runs on demand.

    With `lift`, numbers may become inputs of the kernel. With `aliases`, functions are bound to aliases of the
    tensors if that is possible (`holds_aliases`), so that the bound functions may be cached.
    """

    def __init__(
        self, value: Modifier, size: Size, offset: Offset = 0, lift: bool = False, aliases: Aliases | None = None
    ) -> None:
        self.value, self.size, self.offset = value, size, offset
        self._bound_to: tuple[Any, Offset] = value, offset
        self.holds_aliases = False
        structure, leaves = flatten(value)
        self.tensors = leaves.all_tensors
        self.spread: Spread = []  # filled by `_bind`
        # The function reads something that may change unnoticed, so nothing is cached.
        self.opaque = bool(structure.unreadable)
        self._key = None if self.opaque else structure.key
        self.lifted = False
        if lift and not self.opaque:
            self._lift()
        if aliases is not None and not self.opaque:
            with contextlib.suppress(Opaque):
                of_offset = offset if isinstance(offset, int) else aliases.of(offset)
                self._bound_to = structure.fill([aliases.of(t) for t in leaves.tensors]), of_offset
                self.holds_aliases = True
        if aliases is not None and not self.holds_aliases:
            self._bound_to = with_contiguous_tensors((value, offset), self.inputs)

    def again(self) -> Self:
        """Return a new plan of the same mask or score change, for tensors that have new values."""
        raise NotImplementedError

    @property
    def what(self) -> str:
        """The mask or score in words."""
        return repr(self.value)

    @functools.cached_property
    def _of_kernel(self) -> tuple[Structure, Leaves]:
        return flatten(self.value, contents=False, lifts=self.lifted)

    @functools.cached_property
    def kernel_key(self) -> Hashable:
        """Key of what a compiled kernel depends on."""
        if self.opaque:
            return "opaque", self.value.name, getattr(self.value.definition.function, "__code__", None)
        return self._of_kernel[0].key

    def numbers(self) -> tuple[Hashable, list[Number]]:
        """Return the key of a compiled kernel without values of numbers, and the numbers.

        Raises Opaque if the plan is opaque.
        """
        structure, leaves = self._of_kernel
        return structure.kind, leaves.numbers

    @property
    def is_own(self) -> bool:
        """Return whether this library, not a user, wrote all functions."""
        return self.value.is_own()

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the plan is made from: captured tensors, and the offset."""
        return self.tensors if isinstance(self.offset, int) else [*self.tensors, self.offset]

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the captured tensors."""
        return tuple(t.shape for t in self.tensors)

    @property
    def has_number_tensors(self) -> bool:
        """Return whether a function captured a 0-dimensional tensor by itself, not as a parameter."""
        parameters = {id(t) for t in self.value.numbers()}
        return any(t.ndim == 0 and id(t) not in parameters for t in self.tensors)

    def _lift(self) -> None:
        """Let numbers become inputs of the kernel where that is due.

        They do once `MAX_COMPILED_VALUES` values of them have been compiled in. After a later value the first ones do,
        too, at sizes that they have not had, so that no kernel is compiled for these.
        """
        lifted = flatten(self.value, contents=False, lifts=True)
        key_without_numbers = lifted[0].key
        if key_without_numbers == self.kernel_key:
            return
        seen = _NUMBERS.get(key_without_numbers)
        if seen is None:
            seen = _SeenNumbers()
            _NUMBERS.put(key_without_numbers, (), seen, 1)
        if not seen.is_compiled_in(self.kernel_key, self.size):
            self.lifted, self._of_kernel, self.kernel_key = True, lifted, key_without_numbers

    def _cached(self, cache: Cache[_P], build: Callable[[], _P], *more_key: Hashable) -> _P:
        """Return what the cache holds for this plan, or build it."""
        tensors, captured = self.inputs, is_captured(self.size.device)
        if self.opaque or (captured and tensors):
            return build()
        offset = self.offset if isinstance(self.offset, int) else "tensor"
        key = (self._key, offset, self.size, self.lifted, torch.get_default_dtype(), *more_key)
        prepared = cache.get(key, tensors)
        if prepared is None:
            with outside_transforms(tensors):
                prepared = build()
            if captured:  # the CUDA graph's own memory, which holds nothing before the graph runs
                return prepared
            # What is computed from a tensor that requires a gradient belongs to one autograd graph.
            learned = isinstance(prepared, _Prepared) and bool(tensors_in(prepared.resolved))
            if not (learned and any(t.requires_grad for t in tensors)):
                cache.put(key, tensors, prepared, prepared.nbytes)
        return prepared

    @functools.cached_property
    def _kind_key(self) -> Hashable:
        """Key of all plans that differ in the values of tensors only.

        It is None if there can be no others.
        """
        if self.opaque or not self.inputs or any(t.requires_grad or compat.is_wrapped(t) for t in self.inputs):
            return None  # a tensor that learns belongs to an autograd graph, a wrapped one to a transform
        return None if self.value.holds_lists() else self._key  # a list of numbers is no input of a recorded plan

    def _kind_of(self, *more_key: Hashable) -> Hashable:
        """Return the key of the state of a kind, for tensors of these layouts.

        An offset that is also a parameter has a kind of its own: what is recorded reads one tensor, not two.
        """
        layouts = tuple((t.shape, t.stride(), t.dtype, t.device) for t in self.inputs)
        ids = [id(t) for t in self.inputs]
        places = tuple(ids.index(n) for n in ids)  # of each input, the first place of its tensor
        offset = self.offset if isinstance(self.offset, int) else "tensor"
        return self._kind_key, offset, self.size, self.lifted, torch.get_default_dtype(), layouts, places, *more_key

    def _recorded_tensors(
        self, what: str, make: Callable[[Any, Offset, Size], list[Tensor]], factored: bool = False
    ) -> tuple[list[Tensor], Recorded | None]:
        """Return tensors, and the recorded operations that made them, if they are recorded.

        make: makes the tensors from a value like the plan's, an offset and the sizes, and reads no tensor's values
            unless the sizes say that it may. Its operations are recorded when it is to make them the second time for a
            kind, on a CPU the 16th time, so that lengths that change at every step cost no recording; they lend their
            outputs.
        factored: recorded operations may return the factors of what `make` returns. On a GPU they are recorded at the
            first time.
        """
        captured, inputs = is_captured(self.size.device), self.inputs
        size = unread(self.size, self.offset)
        # A sum and its factors differ in their shapes, and a kernel is compiled for each.
        records_first = factored and not captured and self.size.device.type in _FACTORED_ON
        if self._kind_key is None:
            made = None
            if records_first and not (inputs or self.opaque):
                made = self._recording(lambda: make(self.value, self.offset, size), [], factored)
            return make(self.value, self.offset, size) if isinstance(made, str | None) else made([]), None
        kind_key = self._kind_of(what)
        kind = _KINDS.get(kind_key)
        is_first = kind is None
        if kind is None:
            kind = _Kind("", records_soon=self.size.device.type != "cpu")
            if not captured:
                self.value.resolve(sized(self.size, self.offset), self.lifted)  # checks the values once
        else:
            kind.plans += 1
        if not captured and (records_first or not is_first) and kind.is_to_be_recorded():

            def run(*tensors: Tensor) -> list[Tensor]:
                value, offset = replaced((self.value, self.offset), zip(inputs, tensors, strict=True))
                return make(value, offset, size)

            recorded = self._recording(run, inputs, factored)
            if isinstance(recorded, str):
                kind.why_exact = recorded
            else:
                kind.recorded = recorded
        tensors = make(self.value, self.offset, size) if kind.recorded is None else kind.recorded(inputs)
        if is_first and not captured:
            _KINDS.put(kind_key, (), kind, ENTRY + memory_of_capture(sum(t.nbytes for t in tensors)))
        return tensors, kind.recorded

    def _recording(self, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor], factored: bool) -> Recorded | str:
        """Return recorded operations, or why they cannot be recorded."""
        try:
            return Recorded(run, inputs, lends=True, factored=factored)
        except Exception as error:  # torch's tracing raises errors of any type
            return _cannot_record(error)

    def _offset_tensor(self) -> Tensor | None:
        if not isinstance(self.offset, int) or self.offset == 0:
            return None
        # One element for each batch element: some kernels take no 0-dimensional tensors.
        filled = torch.full((max(self.size.batch, 2),), self.offset, device=self.size.device)
        return bounded(filled, self.offset, 1 << (self.offset - 1).bit_length())

    def _bind(self, prepared: _Prepared) -> tuple[Callable[..., Tensor], Offset]:
        """Return the bound function, and the offset of queries.

        The function is bound to the user's own tensors, or to their aliases.
        """
        value, offset = self._bound_to
        heads = self.size.heads if self.size.device.type in _SPREADS_ON else None
        bound = value.bind(prepared.resolved, heads, self.spread, for_kernels=True)
        return bound, offset if prepared.offset is None else prepared.offset


class MaskPlan(Plan):
    """A mask on its way to a BlockMask.

    `open_extents` has "batch" or "heads" if that size is unknown; the mask must not depend on that index. With
    `allows_bounds`, blocks of a mask with tensors may be bounds, see flexmasks.blocks.build.
    """

    def __init__(
        self,
        mask: Mask,
        size: Size,
        offset: Offset = 0,
        *,
        lift: bool = False,
        block_size: tuple[int, int] = BLOCK_SIZE,
        open_extents: tuple[str, ...] = (),
        aliases: Aliases | None = None,
        allows_bounds: bool = False,
    ) -> None:
        super().__init__(mask, size, offset, lift, aliases)
        self.mask, self.open_extents, self._may_lift = mask, open_extents, lift
        self._allows_bounds = allows_bounds and self._kind_key is not None
        self._wants_bits = False  # until the mask is asked for as data
        self._start_in(block_size)

    def again(self) -> MaskPlan:
        return MaskPlan(
            self.mask, self.size, self.offset, lift=self._may_lift, block_size=self.block_size,
            open_extents=self.open_extents, aliases=Aliases(), allows_bounds=self._allows_bounds,
        )  # fmt: skip

    def _start_in(self, block_size: tuple[int, int]) -> None:
        """Know nothing yet that depends on the size of blocks."""
        self.block_size = block_size
        self._too_large = ""  # why the mask cannot be data, once that is known
        self._bits: Bits | None = None  # bits of partial blocks, until they are data
        self._resized: dict[tuple[int, int], MaskPlan] = {}
        self.spread = []
        vars(self).pop("_prepared", None)

    def resized(self, block_size: tuple[int, int]) -> MaskPlan:
        """Return the plan of the same mask in blocks of another size.

        It is made once.
        """
        if block_size == self.block_size:
            return self
        if block_size not in self._resized:
            plan = self._resized[block_size] = copy.copy(self)
            plan._start_in(block_size)
        return self._resized[block_size]

    @functools.cached_property
    def window(self) -> Window | None:
        """The mask as a window that kernels know natively, or None."""
        if self.opaque or not isinstance(self.offset, int):
            return None
        return window_of(self.mask, replace(sized(self.size, self.offset), may_read=False))

    @functools.cached_property
    def intervals(self) -> Intervals | None:
        """The mask as intervals of keys, or None.

        The host reads values of tensors only to check them, on a GPU for the first mask of a kind.
        """
        if self.opaque:
            return None
        intervals = intervals_of(self.mask, unread(self.size, self.offset), self.offset)
        if intervals is None:
            return None
        self._check_values()
        if self.size.device.type != "cpu":
            self._check_first_values()
        self._given = intervals
        offset, lens = (x.detach() if isinstance(x, Tensor) else x for x in (intervals.offset, intervals.lens))
        return intervals.with_tensors(offset, cast(Tensor | None, lens))

    def _check_first_values(self) -> None:
        """Check the values of tensors if the mask is the first of its kind."""
        if self._kind_key is None or is_captured(self.size.device):
            return
        key = self._kind_of("intervals")
        if _KINDS.get(key) is None:
            self.mask.resolve(sized(self.size, self.offset), self.lifted)
            _KINDS.put(key, (), _Kind(""), ENTRY)

    @functools.cached_property
    def _prepared(self) -> _PreparedMask:
        return self._cached(_BLOCKS, self._build, self.block_size, self.open_extents, self._allows_bounds)

    def _build(self) -> _PreparedMask:
        inputs, captured = self.inputs, is_captured(self.size.device)
        if captured and not self._allows_bounds:
            return self._build_by_bounds()
        if not self._allows_bounds:
            reason = "the function reads variables that may change" if self.opaque else "lists, or tensors that learn"
            return replace(self._build_exactly(), why_exact=reason)
        size, key = self.size, self._kind_of(self.block_size)
        kind = _KINDS.get(key)
        if captured and (kind is None or kind.recorded is None):
            return self._build_by_bounds()
        if kind is None:
            function = "at other sizes", self._kind_key, size.device, self.block_size
            if _KINDS.get(function) is None:
                prepared, kind = self._build_first_of_kind()
            else:
                prepared, kind = self._build_by_bounds(), _Kind("", records_soon=False)
            _KINDS.put(key, (), kind, ENTRY + memory_of_capture(prepared.nbytes))
            if not kind.why_exact:
                _KINDS.put(function, (), kind, ENTRY)
            return prepared
        kind.plans += 1
        if kind.is_to_be_recorded():
            try:
                kind.recorded = RecordedPlan(self._mask_kind, inputs)
            except Exception as error:  # torch's tracing raises errors of any type
                kind.why_exact = _cannot_record(error)
        if kind.recorded is None:
            by_bounds = not kind.why_exact
            return self._build_by_bounds() if by_bounds else replace(self._build_exactly(), why_exact=kind.why_exact)
        self._check_values()
        arguments, layout = kind.recorded(inputs)
        return _PreparedMask(arguments, self._offset_tensor(), layout, {}, recorded=kind.recorded)

    def _build_by_bounds(self) -> _PreparedMask:
        """Plan by operations that a CUDA graph can hold.

        Each replay then plans with the values that the tensors have.
        """
        self._check_values()
        arguments, layout = plan_bounds(self._mask_kind)
        return _PreparedMask(arguments, self._offset_tensor(), layout, {})

    def _check_values(self) -> None:
        """Check the values of tensors on a CPU, where reading them costs nothing."""
        if self.size.device.type == "cpu":
            self.mask.resolve(sized(self.size, self.offset), self.lifted)

    @property
    def _mask_kind(self) -> MaskKind:
        return MaskKind(self.mask, self.offset, self.size, self.lifted, self.block_size)

    def _build_first_of_kind(self) -> tuple[_PreparedMask, _Kind]:
        """Plan exactly, and return the state of the kind.

        It says whether bounds can replace the exact blocks of later masks.
        """
        exact = self._build_exactly()
        try:
            arguments, layout = plan_bounds(self._mask_kind)
            why_exact = _is_much_larger(exact, _PreparedMask(arguments, None, layout, {}))
        except Exception as error:  # a user's function may raise anything
            why_exact = _cannot_record(error)
        if why_exact:
            return replace(exact, why_exact=why_exact), _Kind(why_exact)
        # Later masks have these arguments: kernels compile again for tables of other shapes.
        prepared = replace(exact, resolved=arguments, why_exact=_FIRST)
        return prepared, _Kind("")

    @torch.no_grad()  # activation checkpointing must not count tensors that a mask with parameters would save
    def _build_exactly(self) -> _PreparedMask:
        size = sized(self.size, self.offset)
        resolved = self.mask.resolve(size, self.lifted)
        mask_mod = shifted_mask(self.mask.bind(resolved), self.offset)
        # An open extent is doubled, so that a dependence on its index shows.
        batch, heads = (n * (1 + (e in self.open_extents)) for n, e in ((size.batch, "batch"), (size.heads, "heads")))
        try:
            with naming(self.mask):
                sizes = batch, heads, size.q_len, size.kv_len
                with_bits = self._wants_bits and can_be_bits(self.block_size)
                # Lists of the masks of a kind have the same shapes, so that one kernel serves them all.
                may_be_narrow = not (self.inputs and self._allows_bounds)
                layout = build(mask_mod, *sizes, size.device, self.block_size, with_bits, may_be_narrow)
        except Exception:
            check_open_extents(self.mask, mask_mod, size, self.open_extents)
            raise
        sizes_of_lists = layout.indices[0].shape
        if any(n > 1 and e in self.open_extents for n, e in zip(sizes_of_lists, ("batch", "heads"), strict=False)):
            check_open_extents(self.mask, mask_mod, size, self.open_extents)
        self._bits = layout.bits
        return _PreparedMask(resolved, self._offset_tensor(), replace(layout, bits=None), {})

    def block_mask(self) -> compat.BlockMask:
        """Return the BlockMask; its mask_mod is bound to the user's own tensors, or their aliases."""
        prepared = self._prepared
        return prepared.layout.block_mask(shifted_mask(*self._bind(prepared)))

    def mask_mod(self, resolved: dict[str, Any]) -> Callable[..., Tensor]:
        """Return the function of the BlockMask, given what `Modifier.resolve` returned."""
        return shifted_mask(*self._bind(_Prepared(resolved, self._offset_tensor())))

    def form(self, name: str, block_size: tuple[int, int] | None = None) -> Form:
        """Return what a kernel reads: "blocks" of a size, "whole", "spanned" or "intervals".

        The lists of blocks have the tensors that were made for the function behind them.
        """
        if name == "intervals":
            made, given = (
                [x for x in (i.offset, i.lens) if isinstance(x, Tensor)]
                for i in (cast(Intervals, self.intervals), self._given)
            )
            return Form(made, given, list)
        if name in ("whole", "spanned"):
            tensors: tuple[Sequence[Tensor], Recorded | None] = self.whole if name == "whole" else self.spanned
            return Form(tensors[0], self.inputs, tensors[1])
        plan = self.resized(block_size or self.block_size)
        prepared = plan._prepared
        program = None if prepared.recorded is None else prepared.recorded.make
        return Form([*prepared.layout.indices, *tensors_in(prepared.resolved)], self.inputs, program, plan.spread)

    def blocks(self) -> Blocks:
        """Return the BlockMask with the counts of its blocks and of undecided blocks."""
        layout = self._prepared.layout
        return Blocks(self.block_mask(), layout.undecided, layout.not_understood)

    @property
    def reads_data_as_fast(self) -> bool:
        """Whether kernels read the mask's bits as fast as they compute its function.

        They do on a CPU, where masks without tensors are planned once.
        """
        return not (self.opaque or self.inputs) and self.size.device.type == "cpu"

    @functools.cached_property
    def whole(self) -> tuple[Whole, Recorded | None]:
        """The whole mask of a few queries, and the recorded operations that made it.

        The host reads no value of a tensor, but of the first mask of a kind to check them.
        """
        return self._made_whole("whole", Whole, whole_of, _WHOLE)

    @functools.cached_property
    def spanned(self) -> tuple[Spanned, Recorded | None]:
        """The whole mask of many queries, and the recorded operations that made it.

        The host reads values as for `whole`.
        """
        return self._made_whole("spanned", Spanned, spanned_of, _SPANNED)

    def _made_whole(
        self, what: str, form: type[_W], make: Callable[[MaskKind], _W], cache: Cache[_W]
    ) -> tuple[_W, Recorded | None]:
        """Return a whole mask in a form, and the recorded operations that made it."""
        recorded: list[Recorded | None] = [None]

        def run(mask: Mask, offset: Offset, size: Size) -> list[Tensor]:
            with naming(self.mask), torch.no_grad():
                return list(make(self._mask_kind._replace(mask=mask, offset=offset, size=size)))

        def build() -> _W:
            self._check_values()
            tensors, recorded[0] = self._recorded_tensors(what, run)
            return form(*tensors)

        return self._cached(cache, build), recorded[0]

    def data(self) -> MaskData:
        """Return the mask as data: its blocks, and the bits of partial ones.

        Raises TooLargeForData.
        """
        if self._too_large:  # all bits were computed to find that out
            raise TooLargeForData(self._too_large)
        more_key = self.block_size, self.open_extents, self._allows_bounds
        try:
            return self._cached(_DATA, lambda: self._as_data((self.size.batch, self.size.heads)), *more_key)
        except TooLargeForData as error:
            self._too_large = str(error)
            raise

    def data_alone(self) -> MaskData:
        """Return the mask as data, with lists only as large as the mask needs.

        Raises ValueError for blocks or masks that cannot be data.
        """
        if not can_be_bits(self.block_size):
            sizes = " x ".join(map(str, self.block_size))
            raise ValueError(
                f"flexmasks.block_mask: with as_data the sizes of blocks must be powers of 2 from 32 on, got {sizes}."
            )
        try:
            return self._as_data()
        except TooLargeForData as error:
            raise ValueError(str(error)) from None

    def _as_data(self, sizes: tuple[int, int] | None = None) -> MaskData:
        """Return the mask as data.

        sizes: batch size and number of heads of its lists, by default those that the mask needs.

        Blocks that are not known yet come with their bits.
        """
        self._wants_bits = True
        block_mask = self.block_mask()
        bits, self._bits = self._bits, None
        with naming(self.mask), torch.no_grad():
            batch, heads = sizes or block_mask.kv_num_blocks.shape[:2]
            return data_of(block_mask, batch, heads, bits)

    def explained(self) -> str:
        """Return how the blocks are found, in words."""
        if not self.inputs:
            return "exact, once for these sizes"
        reason = self._prepared.why_exact
        if not reason:
            return "bounds, on the device: new values of the tensors are planned without waiting for it"
        if reason == _FIRST:
            return f"exact: {reason}; later tensors are planned by bounds, on the device"
        cost = "each change of the tensors takes some milliseconds, and waits for the device"
        return f"exact: {reason}; {cost}"

    def proven_options(self, has_score: bool) -> dict[str, bool]:
        """Return options of torch's kernels that are proven for these blocks.

        Only masks without tensors have such options: what holds for one content of a tensor may not hold for the next.
        With a score change, no row is sure to keep a finite score.
        """
        if self.opaque or self.lifted or self.tensors or not isinstance(self.offset, int) or self.offset != 0:
            return {}
        options = self._fact("options", lambda: self.blocks().kernel_options)
        return {n: v for n, v in options.items() if not (has_score and n == "ROWS_GUARANTEED_SAFE")}

    def computed_fraction(self) -> float:
        """Return the approximate fraction of all pairs that is computed.

        It is one half where tensors decide: which backend is fastest must not change with what they hold.
        """
        if self.tensors or not isinstance(self.offset, int):
            return _UNKNOWN_FRACTION
        window = self.window
        if window is not None:
            pairs = self.size.q_len * self.size.kv_len
            return window.pairs(self.size.q_len) / pairs if window.sequences is None else _UNKNOWN_FRACTION
        return cast(float, self._fact("fraction", lambda: 1 - self.blocks().sparsity))

    def is_mostly_partial(self) -> bool:
        """Return whether kernels may read tensors at many pairs: those of many partial blocks.

        There are at least half as many as full blocks.

        The first mask of a function decides for all: which backend is fastest must not change with what tensors hold.
        """
        if self.opaque or not (self.tensors or reads_made_tensors(self.value, self._prepared.resolved)):
            return False
        known = _MOSTLY_PARTIAL.get(self.kernel_key)
        if known is None and not is_captured(self.size.device):
            indices = self._prepared.layout.indices
            known = bool(_PARTIAL_BLOCKS * indices[0].sum() > indices[2].sum())
            _MOSTLY_PARTIAL.put(self.kernel_key, (), known, 1)
        return bool(known)

    def _fact(self, name: str, find: Callable[[], Any]) -> Any:
        """Return a fact about the blocks and keep it with them.

        Computing a fact waits for the GPU, so it is done once.
        """
        facts = self._prepared.facts
        if name not in facts:
            facts[name] = find()
        return facts[name]


class ScorePlan(Plan):
    """A score change on its way to a score_mod."""

    def __init__(self, score: Score, size: Size, offset: Offset = 0, *, aliases: Aliases | None = None) -> None:
        super().__init__(score, size, offset, aliases=aliases)
        self.score = score

    def again(self) -> ScorePlan:
        return ScorePlan(self.score, self.size, self.offset, aliases=Aliases())

    def score_mod(self) -> Callable[..., Tensor]:
        """Return the score_mod, bound to the user's own tensors, or their aliases."""
        return shifted_score(*self._bind(self._prepared))

    @functools.cached_property
    def _prepared(self) -> _Prepared:
        return self._cached(_SCORES, self._build)

    @functools.cached_property
    def added(self) -> tuple[Added, Recorded | None]:
        """The numbers that the score change adds, and the recorded operations that made them.

        The score change must only add.
        """
        made: list[Recorded | None] = [None]

        def build() -> Added:
            if self.size.device.type == "cpu":
                sized(self.size, self.offset)  # checks the values of the offset
            tensors, made[0] = self._recorded_tensors("added", self._added_of, factored=True)
            return Added(*tensors)

        added = self._cached(_ADDED, build)
        return added, made[0]

    def form(self, name: str, block_size: tuple[int, int] | None = None) -> Form:
        """Return what a kernel reads: "added", or what "functions" read of the user's tensors alone."""
        if name == "added":
            added, recorded = self.added
            return Form([t for t in added if t is not None], self.inputs, recorded)
        if self.prepares_tensors:
            raise Opaque("tensors that are made for the score change")
        return Form(spread=self.spread)

    def line(self) -> Line | None:
        """Return the line that the added numbers are over the distance, or None.

        Looking waits for the device. What tensors hold makes no line, and in a CUDA graph none is looked for.
        """
        if not isinstance(self.offset, int) or is_captured(self.size.device):
            return None
        added, recorded = self.added
        if self.inputs and (recorded is None or recorded.varies[0]):
            return None
        return line_of(added.numbers, self.size, self.offset)

    def _added_of(self, score: Score, offset: Offset, size: Size) -> list[Tensor]:
        with naming(self.score), torch.no_grad():
            return [added_of(score, offset, size)]

    @property
    def prepares_tensors(self) -> bool:
        """Return whether the function needs tensors that are made from the user's tensors."""
        return bool(self.inputs) and bool(tensors_in(self._prepared.resolved))

    def _build(self) -> _Prepared:
        key = self.kernel_key, self.size, self.shapes
        is_known = not self.opaque and _TRIED.get(key) is not None
        # On a GPU the values are read for the first score of a kind only.
        reads = self.size.device.type == "cpu" or not is_known
        if is_captured(self.size.device) or not reads:
            return _Prepared(self.score.resolve(unread(self.size, self.offset)), self._offset_tensor())
        resolved = self.score.resolve(sized(self.size, self.offset))
        if not is_known:
            self._try(shifted_score(self.score.bind(resolved), self.offset))
            _TRIED.put(key, (), True, 1)
        return _Prepared(resolved, self._offset_tensor())

    def _try(self, score_mod: Callable[..., Tensor]) -> None:
        """Call the function on some scores, to raise its errors here and by name.

        On a CPU the first and last index of each kind are tried; on CUDA only the first, because an index out of
        range would end the process.
        """
        size = self.size
        lengths = size.batch, size.heads, size.q_len, size.kv_len
        ends = [[0, n - 1] if size.device.type == "cpu" else [0] for n in lengths]
        scores = torch.zeros([len(e) for e in ends], dtype=size.dtype, device=size.device)
        with naming(self.score), torch.no_grad():
            indices = (torch.tensor(e, device=size.device) for e in ends)
            changed = over_indices(score_mod, (0,))(scores, *indices)
            if not changed.dtype.is_floating_point or changed.shape != scores.shape:
                got = f"{describe(changed)} for {describe(scores)}"
                raise TypeError(f"a score function must return a floating number for each score, got {got}.")


class GivenPlan:
    """A user's own BlockMask, in place of a MaskPlan."""

    tensors: tuple[Tensor, ...] = ()
    reads_data_as_fast = False
    window: Window | None = None
    intervals: Intervals | None = None
    holds_aliases = False
    is_own = False
    what = "a given block mask"

    def __init__(self, block_mask: compat.BlockMask) -> None:
        captured: list[Tensor] = []
        self.kernel_key: Hashable
        try:
            self.kernel_key, self.opaque = ("given", key_of(block_mask.mask_mod, captured)), False
        except Opaque:
            self.kernel_key, self.opaque = ("opaque", getattr(block_mask.mask_mod, "__code__", None)), True
        self.shapes = tuple(t.shape for t in captured)
        mask_mod = with_contiguous_tensors(block_mask.mask_mod, captured)
        if mask_mod is not block_mask.mask_mod:
            block_mask = copy.copy(block_mask)
            block_mask.mask_mod = mask_mod
        self._block_mask = block_mask

    def resized(self, block_size: tuple[int, int]) -> GivenPlan | None:
        """Return the plan if its blocks have this size.

        A user's own blocks have no other.
        """
        return self if block_size == self._block_mask.BLOCK_SIZE else None

    @property
    def has_number_tensors(self) -> bool:
        return any(not shape for shape in self.shapes)

    def numbers(self) -> tuple[Hashable, list[Number]]:
        """Return a key of the function without its numbers, and the numbers, see `Plan.numbers`."""
        structure, leaves = flatten(self._block_mask.mask_mod)
        return structure.kind, leaves.numbers

    def blocks(self) -> Blocks:
        return Blocks(self._block_mask)

    def data(self) -> MaskData:
        """Return the mask as data, see `MaskPlan.data`."""
        return data_of(self._block_mask, *self._block_mask.kv_num_blocks.shape[:2])

    def proven_options(self, has_score: bool) -> dict[str, bool]:
        return {}

    def explained(self) -> str:
        return "the given block mask"

    def computed_fraction(self) -> float:
        return _UNKNOWN_FRACTION

    def is_mostly_partial(self) -> bool:
        return False


def with_contiguous_tensors(value: _V, tensors: Sequence[Tensor]) -> _V:
    """Return a value with contiguous copies of its tensors, if it can be copied."""
    if not all(t.is_contiguous() for t in tensors):
        with contextlib.suppress(Opaque):
            return cast(_V, with_tensors(value, in_one_piece))
    return value


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph captures the operations of a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def block_size_for(size: Size) -> tuple[int, int]:
    """Return the block size that suits the kernels of a call's device."""
    if size.device.type == "cpu":
        for length, n in _CPU_BLOCK_SIZES:
            if max(size.q_len, size.kv_len) <= length:
                return n, n
    elif size.device.type == "cuda" and capability(size.device)[0] in (10, 11):
        return _FLASH_BLOCK_SIZE
    return BLOCK_SIZE


@compat.constant_in_graphs
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU.

    For fake tensors on a machine without a GPU the result is (0, 0).
    """
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def sized(size: Size, offset: Offset) -> Size:
    """Return the size with the largest offset in it.

    The values of an offset tensor are read. Raises ValueError for an offset that is negative or too large. A tensor's
    values are 0 or at most kv_len - q_len, so that no kernel needs to be told of more keys than there are, and tables
    that are made without reading the values are long enough.
    """
    least, most = (offset, offset) if isinstance(offset, int) else torch.stack(torch.aminmax(offset)).tolist()
    if least < 0:
        raise ValueError(f"flexmasks: `q_offset` must be at least 0, got values from {least} to {most}.")
    if most + size.q_len > MAX_POSITIONS:
        raise ValueError(
            f"flexmasks: `q_offset` must be at most 2**31 - {size.q_len} for {size.q_len} queries, got {most}."
        )
    is_ruled = isinstance(offset, Tensor) and size.ends_among_keys
    if is_ruled and most > 0 and most + size.q_len > size.kv_len:
        raise ValueError(
            "flexmasks: the values of a tensor `q_offset` must be 0 or at most KV - Q, the number of keys minus the "
            f"number of queries, {size.kv_len} - {size.q_len}, got {most}; a number may be larger."
        )
    return replace(size, q_offset=most)


def check_open_extents(mask: Mask, mask_mod: Callable[..., Tensor], size: Size, extents: tuple[str, ...]) -> None:
    """Raise ValueError if a mask depends on an index of unknown size.

    extents: the open extents, "batch" or "heads". The mask's own errors come first.
    """
    for extent in extents:
        doubled = replace(size, **{extent: 2 * getattr(size, extent)})
        try:
            sizes = dependence(mask_mod, doubled.batch, doubled.heads, size.device)
        except Exception as error:
            # An index out of range shows a dependence; any other error is raised when the mask is used.
            if not isinstance(error, IndexError) and "indexes a dimension" not in str(error):
                continue
            sizes = doubled.batch, doubled.heads
        if sizes[extent == "heads"] > 1:
            with naming(mask):
                materialize(mask_mod, size.batch, size.heads, 1, 1, size.device)
            raise ValueError(
                f"flexmasks: the mask {mask!r} depends on its {extent.removesuffix('s')} index; pass `{extent}`, the "
                "size of that index."
            )


@contextlib.contextmanager
def naming(value: Modifier) -> Iterator[None]:
    """Turn errors of a mask's or score's own function into errors that name it.

    They name the line of the user's code, and their tracebacks show that code alone.
    """
    what = f"flexmasks {value.kind} {value!r}"
    try:
        yield
    except CannotBeData as error:
        raise type(error)(f"{what}: {error}") from None
    except torch.OutOfMemoryError:
        raise
    except _ERRORS_OF_FUNCTIONS as error:
        text, is_refusal = str(error), isinstance(error, Refused)
        if isinstance(error, ValueError | TypeError):
            if text.startswith("flexmasks"):
                raise
            text = f"{what}: {text}"
        elif "data-dependent control flow" in text or ".item()" in text:
            is_refusal = True
            text = (
                f"{what} may not decide by `if`, `and`, `or` or `not`, nor read the value of an index or score, "
                "which stands for many values. Use torch.where, torch.minimum and torch.maximum, `&`, `|` and `~`."
            )
        else:
            text = f"{what} failed on index tensors: {type(error).__name__}: {text[:300]}"
        if "device" in text or " on meta" in text:
            text = f"{text.rstrip('.')}{_whereabouts(value)}"
        place, trace = place_of(error.__traceback__, value.definition.function), of_user(error.__traceback__)
        named = (TypeError if isinstance(error, TypeError) else ValueError)(f"{text} ({place})" if place else text)
        if is_refusal or (trace is None and isinstance(error, ValueError | TypeError)):  # the message says all
            raise named.with_traceback(trace) from None
        error.__suppress_context__ = True  # what this library tried before
        raise named from error.with_traceback(trace or error.__traceback__)


def _whereabouts(value: Modifier) -> str:
    """Return where a mask's or score's tensors are, as the end of a message."""
    named = value.named_tensors()
    here = "".join(f"; {name} is on {tensor.device}" for name, tensor in named)
    return here + next((f"; {how_to_move(t.device)}" for _, t in named if t.is_meta), "")


def outside_transforms(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Leave the transforms of torch.func for a block of code.

    The results of the block may then be cached. No transform is left if one of `tensors` belongs to a transform.
    """
    if not compat.transforms_active() or any(compat.is_wrapped(t) for t in tensors):
        return contextlib.nullcontext()
    return compat.outside_transforms()


def _is_much_larger(exact: _PreparedMask, bounds: _PreparedMask) -> str:
    """Return why bounds are too far from the exact plan, or ""."""
    found, needed = (int(p.layout.indices[0].sum() + p.layout.indices[2].sum()) for p in (bounds, exact))
    if found > _MAX_WIDTH * needed:
        return f"bounds have {found} blocks, {needed} are needed"
    size, least = (sum(t.nbytes for t in tensors_in(p.resolved)) for p in (bounds, exact))
    if size > max(_MAX_TABLES * least, _SMALL_TABLES):
        return f"tables for any values take {size} bytes, {least} are needed"
    return ""


def _cannot_record(error: Exception) -> str:
    """Return why a plan cannot be recorded, unless the error says nothing about that.

    Then it is raised.
    """
    if passing_error(error) is not None:
        raise error
    first_line = next(iter(str(error).splitlines()), "")
    return f"its plan cannot be recorded, {type(error).__name__}: {first_line}"[:300]
