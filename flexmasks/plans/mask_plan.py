"""A mask on its way to what kernels read: blocks, the whole mask, intervals, bits."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks import limits
from flexmasks.blocks.bits import Bits, can_be_bits
from flexmasks.blocks.build import Layout, build
from flexmasks.blocks.counts import Blocks
from flexmasks.blocks.limits import Work
from flexmasks.blocks.lists import lists_of, made_of
from flexmasks.cache import ENTRY, FACT, KINDS, PLANS, Part
from flexmasks.context import is_capturing
from flexmasks.errors import Outgrown, Unfit
from flexmasks.kernels.operators import separate
from flexmasks.plans.bounds import RecordedPlan, SizedMask, plan_bounds, reads_made_tensors
from flexmasks.plans.data import MaskData, TooLargeForData, data_of
from flexmasks.plans.naming import check_open_extents, naming
from flexmasks.plans.plan import (
    PROGRAMS,
    ModifierPlan,
    Prepared,
    Program,
    cannot_record,
    over_zeros,
    with_contiguous_tensors,
)
from flexmasks.plans.recorded import memory_of_graph
from flexmasks.plans.sizes import BLOCK_SIZE, Offset, shifted_mask, sized, unread
from flexmasks.plans.whole import Spanned, Whole, spanned_of, whole_of
from flexmasks.plans.windows import Intervals, Look, Window, intervals_of, window_of
from flexmasks.spec.aliases import Aliases, in_one_piece
from flexmasks.spec.bands import Band, Sequences, band_of, counts_of, documents_of
from flexmasks.spec.numbers import Numbers
from flexmasks.spec.parameters import Size
from flexmasks.spec.structure import Opaque, flatten, tensors_of
from flexmasks.spec.values import Mask

UNKNOWN_FRACTION = 0.5  # assumed fraction of pairs that is computed
_MAX_WIDTH = 1.25  # the most blocks of bounds, in exact blocks, with which bounds are used
_ROOM = 64  # the least, for documents that are sequences
# Partial blocks for 128 queries in sequences of random lengths, and as how many full blocks they show.
_EDGES, _VISIBLE = 2.5, 1.3
# Reading q, k and v head after head copies nothing. But FlashAttention searches the list of sequences for every tile.
_MAX_SEARCHED_SEQUENCES = 2048
_FIRST = "these are the first tensors of their shapes"
# Masks that read a tensor for each token and are expected to have few partial blocks from a number of keys on, where no
# values can be read. Marks of padding follow each other. Documents of more than 1,400 tokens are faster on flex_flash,
# shorter ones on flex (H200); if nothing is known of their lengths but that they are between 128 and the row's, most
# are longer in such rows. So are those that matter, since attention takes more of a step.
_CUT_LITTLE_FROM = {"key_padding": 0, "document": 16384}
_MAX_TABLES, _SMALL_TABLES = 4, 1 << 16  # the most bytes of their tables, in bytes of exact ones, and at least
_BLOCKS: Part[_PreparedMask] = Part(PLANS, "blocks")  # the blocks of a million tokens take 1.07 GB
_WHOLE: Part[Whole] = Part(PLANS, "whole")
_SEQUENCES: Part[Sequences] = Part(PLANS, "sequences")
_SPANNED: Part[Spanned] = Part(PLANS, "spanned")
_DATA: Part[MaskData] = Part(PLANS, "data")
# Facts about the first masks of their kinds.
_COMPUTED: Part[Computed] = Part(KINDS, "computed_blocks")
_Form = TypeVar("_Form")


class Computed(NamedTuple):
    """The blocks of 128 x 128 that kernels compute for 128 queries of a head, on average."""

    full: float
    partial: float
    reads_tensors: bool = False  # whether the mask's function reads tensors for each pair of a partial block
    sequences: float = 0  # that a kernel gets for 128 queries, empty ones included
    uneven: float = 1  # how many times as many blocks of queries as on average see a block of keys, at most


@dataclass(frozen=True)
class _PreparedMask(Prepared):
    layout: Layout
    why_exact: str = ""  # why the blocks of a mask with tensors are exact, or "" if they are bounds

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(t.nbytes for t in self.layout.indices)

    @functools.cached_property
    def computed(self) -> Computed:  # kept with the blocks, because finding it waits for the GPU
        partial, full = self.layout.indices[0], self.layout.indices[2]
        height, width = self.layout.block_size
        rows = partial.numel() * height / BLOCK_SIZE[0]
        seen = self.layout.indices[4] + self.layout.indices[6]  # for each block of keys
        *counts, most = torch.stack([full.sum(), partial.sum(), seen.max()]).tolist()
        of_full, of_partial = (n * height * width / math.prod(BLOCK_SIZE) / rows for n in counts)
        return Computed(of_full, of_partial, uneven=most * seen.numel() / max(1, sum(counts)))


class MaskPlan(ModifierPlan):
    """A mask on its way to a BlockMask.

    `open_extents` has "batch" or "heads" if that size is unknown; the mask must not depend on that index. With
    `allows_bounds`, blocks of a mask with tensors may be bounds, see flexmasks.blocks.build. Without `exact` the search
    for blocks is bounded at great lengths, and blocks that it does not reach count as partial. `lists` are those of a
    block mask that is given with its mask, in a graph of torch.compile.
    """

    # Of a template: the mask as intervals without tensors, and which input has the lengths.
    _intervals: tuple[Intervals, int | None] | None = None
    _lens: Tensor | None = None  # what the intervals have as lengths

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
        exact: bool = True,
        lists: Sequence[Any] = (),
    ) -> None:
        super().__init__(mask, size, offset, lift, aliases)
        self._lists = lists
        self.open_extents, self.block_size, self._exact = open_extents, block_size, exact
        self._allows_bounds = allows_bounds and self._kind_key is not None
        self._start()

    @property
    def mask(self) -> Mask:
        return cast(Mask, self.value)

    @property
    def is_given(self) -> bool:
        return bool(self._lists)

    def _start(self) -> None:
        self._wants_bits = False  # until the mask is asked for as data
        self._too_large = ""  # why the mask cannot be data, once that is known
        self._bits: Bits | None = None  # bits of partial blocks, until they are data
        self._resized: dict[tuple[int, int], MaskPlan] = {}

    def resized(self, block_size: tuple[int, int]) -> MaskPlan | None:
        """The plan of the same mask in blocks of another size, made once; given blocks have no other."""
        if block_size == self.block_size:
            return self
        if self.is_given:
            return None
        if block_size not in self._resized:
            plan = self._resized[block_size] = copy.copy(self)
            plan.block_size = block_size
            plan._start()
            for made in ("_prepared", "block_mask"):
                vars(plan).pop(made, None)
        return self._resized[block_size]

    def template(self) -> MaskPlan:
        template, intervals = super().template(), vars(self).get("intervals")
        if intervals is not None and not self.size.reads_at_once:  # where it does, it checks them
            places = [n for n, t in enumerate(self.inputs) if t is self._lens]
            template._intervals = intervals.with_tensors(None, None), None if intervals.lens is None else places[0]
        return template

    def with_tensors(self, tensors: Sequence[Tensor]) -> MaskPlan:
        plan = super().with_tensors(tensors)
        if self._intervals is not None:
            intervals, place = self._intervals
            plan._lens = None if place is None else tensors[place]
            vars(plan)["intervals"] = intervals.with_tensors(plan.offset, plan._lens)
        return plan

    @functools.cached_property
    def window(self) -> Window | None:
        """The mask as a window that kernels know natively, or None."""
        return self._window(is_fitted=True)

    @functools.cached_property
    def unfitted_window(self) -> Window | None:
        """The window with all keys from the first one on, and with the bounds of any other length."""
        return self._window(is_fitted=False)

    def _window(self, is_fitted: bool) -> Window | None:
        if self.opaque or self.is_given or not isinstance(self.offset, int):
            return None
        window = window_of(self.mask, replace(sized(self.size, self.offset), may_read=False), is_fitted)
        return None if window is not None and window.by_look and not self.size.may_read else window

    @functools.cached_property
    def documents(self) -> Band | None:
        """The documents, end to end, inside which the mask shows pairs, as a band without bounds.

        None says that a batch element is one sequence. Raises Unfit, see `documents_of`.
        """
        return None if self.opaque else documents_of(self.mask, unread(self.size, self.offset))

    def sequences(self, heads: int = 0) -> tuple[Sequences, Look | None]:
        """The sequences of the window, or else the documents, and a look that confirms them, or None. Raises Unfit
        where there are none.

        heads: the number of heads if [B, H, S, D] may be read head after head, else 0.
        """
        by_look = cast(Band, self.documents).check is not None if self.window is None else self.window.by_look
        if not by_look:
            return self._sequences(0, heads), None
        if is_capturing(self.size.device):
            raise Unfit(
                "only values show whether documents lie end to end, and a CUDA graph captures the call; promise it by "
                "`contiguous=True`, or pass a plan that has run before"
            )
        # Like tensors have as much room, so that nothing compiles again, and a plan can be updated.
        room = self._programs.get("room", _ROOM)
        made = self._sequences(room, heads)
        if self.is_of_template:  # documents of calls like this one have lain end to end: the kernel may start
            return made, Look.at(made.counts, functools.partial(self._judge, room))
        counts = made.counts.tolist()
        count = abs(counts[0])
        if count > room:
            self._programs["room"] = 1 << (2 * count - 1).bit_length()
            return self.sequences(heads)
        self._judge(room, counts)
        return made, Look(None)

    def room_in_row(self, looked_at: Sequences) -> int:
        """How many of the sequences that a look confirms a batch element has at most, as for the first of a kind."""
        known: int = self._programs.get("room in a row", 1)
        if self.is_of_template:
            return known
        rows = torch.arange(self.size.batch, device=looked_at.q.device)[:, None]
        most = int((looked_at.q[:-1] // self.size.q_len == rows).sum(1).max())
        self._programs["room in a row"] = max(known, 1 << (most - 1).bit_length())
        return cast(int, self._programs["room in a row"])

    def _sequences(self, room: int, heads: int) -> Sequences:
        return self._made(_SEQUENCES, Sequences, functools.partial(_sequences_of, room, heads), room, heads)

    def _judge(self, room: int, counts: list[int]) -> None:
        """Raise Unfit if documents that were counted do not lie end to end, or are too many for the room."""
        if counts[0] < 0:
            _in_sequences(self.mask, unread(self.size, self.offset)).check()
        if abs(counts[0]) > room:
            raise Outgrown(f"the kernel takes at most {room} documents here, and there are {abs(counts[0])}")

    @functools.cached_property
    def intervals(self) -> Intervals | None:
        """The mask as intervals of keys, or None. No value is read."""
        if self.opaque or not self.size.may_read:
            return None
        intervals = intervals_of(self.mask, unread(self.size, self.offset), self.offset)
        self._lens = None if intervals is None else intervals.lens
        return intervals

    def checked_intervals(self) -> Intervals | None:
        """The mask as intervals of keys, or None. The host reads values as for `whole`."""
        intervals = self.intervals
        if intervals is None:
            return None
        self._check_values()
        if not (self.size.reads_at_once or self._intervals is not None):
            self._check_first_values()
        offset, lens = (x.detach() if isinstance(x, Tensor) else x for x in (intervals.offset, intervals.lens))
        return intervals.with_tensors(offset, cast(Tensor | None, lens))

    def _check_first_values(self) -> None:
        if self._kind_key is None or is_capturing(self.size.device):
            return
        key = self._kind_of("intervals")
        if PROGRAMS.get(key) is None:
            self.mask._resolve(sized(self.size, self.offset), self.lifted)
            PROGRAMS.put(key, (), Program(""), ENTRY)

    @functools.cached_property
    def _prepared(self) -> _PreparedMask:
        if not self.size.may_read:
            return self._prepared_in_graph()
        program = self._program("blocks", self.block_size)
        if program is not None:
            return self._prepared_by(program)
        key = self.block_size, self.open_extents, self._allows_bounds
        suits = (lambda prepared: not prepared.layout.unknown) if self._exact else None
        return self._cached(_BLOCKS, self._build, *key, suits=suits)

    @torch.no_grad()
    def _prepared_in_graph(self) -> _PreparedMask:
        with naming(self.mask):
            if self._lists:
                lengths, resolved = (self.size.q_len, self.size.kv_len), self.mask._resolve(self.size)
                return _PreparedMask(resolved, None, Layout(*lengths, self.block_size, tuple(self._lists), None, ()))
            prepared = self._build_by_bounds()
        if not self.size.runs_on_cpu:
            return prepared
        # torch's CPU kernel fails if two lists share their memory.
        layout = prepared.layout._replace(indices=tuple(map(separate, prepared.layout.indices)))
        return replace(prepared, layout=layout)

    def _build(self) -> _PreparedMask:
        inputs, capturing = self.inputs, is_capturing(self.size.device)
        if not self._allows_bounds:
            if capturing:
                return self._build_by_bounds()
            reads = f"the function reads {self.unreadable}"
            return self._build_exactly(why=reads if self.opaque else "lists, or tensors that learn")
        # The first of a kind shows that it does not depend on the indices of open extents.
        size, key = self.size, self._kind_of(self.block_size, self.open_extents)
        program = PROGRAMS.get(key)
        if capturing and (program is None or program.recorded is None):
            return self._build_by_bounds()
        if program is None:
            function = "at other sizes", self._kind_key, size.device, self.block_size, self.open_extents
            if PROGRAMS.get(function) is None:
                prepared, program = self._build_first_of_kind()
            else:
                prepared, program = self._build_by_bounds(), Program("")
            PROGRAMS.put(key, (), program, ENTRY + memory_of_graph(prepared.nbytes))
            if not program.why_exact:
                PROGRAMS.put(function, (), program, ENTRY)
            return prepared
        program.plans += 1
        self._record(program, lambda: RecordedPlan(self._sized_mask, inputs))
        if program.recorded is None:
            return self._build_exactly(why=program.why_exact)
        self._programs["blocks", self.block_size] = program.recorded
        return self._prepared_by(program.recorded)

    def _prepared_by(self, recorded: RecordedPlan) -> _PreparedMask:
        self._check_values()
        arguments, layout = recorded(self.inputs)
        return _PreparedMask(arguments, self._offset_tensor(), layout)

    def _build_by_bounds(self) -> _PreparedMask:
        """Plan by operations that a CUDA graph can hold, whose replays plan with the values that the tensors have."""
        self._check_values()
        arguments, layout = plan_bounds(self._sized_mask)
        return _PreparedMask(arguments, self._offset_tensor(), layout)

    def _check_values(self) -> None:
        if self.size.reads_at_once and self.size.may_read:
            self.mask._resolve(sized(self.size, self.offset), self.lifted)

    @property
    def _sized_mask(self) -> SizedMask:
        return self._sized_like(self.mask, self.offset, self.size)

    def _sized_like(self, mask: Mask, offset: Offset, size: Size) -> SizedMask:
        return SizedMask(mask, offset, size, self.lifted, self.block_size)

    def _build_first_of_kind(self) -> tuple[_PreparedMask, Program]:
        """Plan exactly, and return a program, which says whether bounds can replace the exact blocks of later masks."""
        exact = self._build_exactly()
        try:
            arguments, layout = plan_bounds(self._sized_mask)
            why_exact = _is_much_larger(exact, _PreparedMask(arguments, None, layout))
        except Exception as error:  # a user's function may raise anything
            why_exact = cannot_record(error)
        if why_exact:
            return replace(exact, why_exact=why_exact), Program(why_exact)
        # Later masks have these arguments: kernels compile again for tables of other shapes.
        prepared = replace(exact, resolved=arguments, why_exact=_FIRST)
        return prepared, Program("")

    @torch.no_grad()  # activation checkpointing must not count tensors that a mask with parameters would save
    def _build_exactly(self, why: str = "") -> _PreparedMask:
        size = sized(self.size, self.offset)
        resolved = self.mask._resolve(size, self.lifted)
        mask_mod = shifted_mask(self.mask._bind(resolved), self.offset)
        # An open extent is doubled, so that a dependence on its index shows.
        batch, heads = (n * (1 + (e in self.open_extents)) for n, e in ((size.batch, "batch"), (size.heads, "heads")))
        try:
            with naming(self.mask):
                sizes = batch, heads, size.q_len, size.kv_len
                with_bits = self._wants_bits and can_be_bits(self.block_size)
                # Lists of the masks of a kind have the same shapes, so that one kernel serves them all.
                may_be_narrow = not (self.inputs and self._allows_bounds)
                work = Work.exact() if self._exact else Work.bounded(math.prod(sizes))
                count = None if with_bits else functools.partial(counts_of, self.mask, size, self.block_size)
                layout = build(mask_mod, *sizes, size.device, self.block_size, with_bits, may_be_narrow, work, count)
        except Exception:
            check_open_extents(self.mask, mask_mod, size, self.open_extents)
            raise
        sizes_of_lists = layout.indices[0].shape
        if any(n > 1 and e in self.open_extents for n, e in zip(sizes_of_lists, ("batch", "heads"), strict=False)):
            check_open_extents(self.mask, mask_mod, size, self.open_extents)
        self._bits = layout.bits
        return _PreparedMask(resolved, self._offset_tensor(), layout._replace(bits=None), why)

    @functools.cached_property
    def block_mask(self) -> compat.BlockMask:
        """The BlockMask; its mask_mod is bound to the user's own tensors, or their aliases."""
        prepared = self._prepared
        return prepared.layout.block_mask(shifted_mask(*self._bind(prepared)))

    def mod(self) -> Callable[..., Tensor]:
        return self.block_mask.mask_mod

    def bound(self) -> Callable[..., Tensor]:
        """The function of the BlockMask, without its blocks; values of tensors are checked."""
        resolved = self.mask._resolve(sized(self.size, self.offset))
        return shifted_mask(*self._bind(Prepared(resolved, self._offset_tensor())))

    def blocks(self) -> Blocks:
        """Return the BlockMask with the counts of its blocks and of undecided blocks."""
        layout = self._prepared.layout
        return Blocks(self.block_mask, layout.undecided, layout.not_understood, layout.unknown)

    @property
    def reads_data_as_fast(self) -> bool:
        """Whether kernels read the mask's bits as fast as they compute its function.

        They do on a CPU, unless many pairs make it too long to find the bits; masks without tensors are planned once.
        """
        if self.opaque or self.inputs or not (self.size.runs_on_cpu and self.size.may_read):
            return False
        return self.size.q_len * self.size.kv_len <= limits.PAIRS_WITHOUT_LIMIT

    @functools.cached_property
    def whole(self) -> Whole:
        """The whole mask of a few queries. The host reads values of tensors only to check the first of a kind."""
        return self.made(_WHOLE, Whole, whole_of)

    @functools.cached_property
    def spanned(self) -> Spanned:
        """The whole mask of many queries. The host reads values as for `whole`."""
        return self.made(_SPANNED, Spanned, spanned_of)

    def made(
        self, cache: Part[_Form], form: Callable[..., _Form], make: Callable[[SizedMask], Sequence[Tensor]]
    ) -> _Form:
        """A form of tensors alone, cached or made. The host reads values as for `whole`.

        form: a NamedTuple of tensors. Each has a cache of its own.
        make: makes the tensors, by operations whose shapes depend on shapes only, which read no values.
        """
        return self._made(cache, form, lambda *given: make(self._sized_like(*given)))

    def data(self) -> MaskData:
        """The mask as data: its blocks, and the bits of partial ones. Raises TooLargeForData."""
        if self._too_large:  # all bits were computed to find that out
            raise TooLargeForData(self._too_large)
        more_key = self.block_size, self.open_extents, self._allows_bounds
        try:
            return self._cached(_DATA, lambda: self._as_data((self.size.batch, self.size.heads)), *more_key)
        except TooLargeForData as error:
            self._too_large = str(error)
            raise

    def data_alone(self) -> MaskData:
        """The mask as data, with lists only as large as it needs. Raises ValueError where it cannot be data."""
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
        """sizes: batch size and number of heads of the lists, by default those that the mask needs."""
        self._wants_bits = True  # blocks that are not known yet come with their bits
        block_mask = self.block_mask
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

    def computed(self, rows: int, may_look: bool = True) -> Computed:
        """The blocks that kernels compute, without waiting for a GPU at each new value of a tensor.

        The first mask of a function decides for all of about its lengths: which backend is fastest must not change with
        what tensors hold. In a graph the answer follows from names and shapes, and without a look at blocks from these
        and from how many sequences there are.

        rows: batch elements x heads of the call.
        """
        if self.window is not None and not self.window.has_sequences:
            return Computed(*self.window.blocks(self.size.q_len))
        if not may_look and self.size.may_read and self.window is not None:
            known = self._computed_in_sequences()
            if known is not None:
                return known
        if may_look and self.size.may_read and isinstance(self.offset, int):
            key = self.kernel_key, self.size.q_len.bit_length(), self.size.kv_len.bit_length()
            known = _COMPUTED.get(key) if self.tensors else None
            if known is None and not is_capturing(self.size.device):
                tensors = [] if self.opaque else [*self.tensors, *tensors_of(self._prepared.resolved)]
                known = self._prepared.computed._replace(reads_tensors=any(t.numel() > rows for t in tensors))
                if self.tensors and not self.opaque:
                    _COMPUTED.put(key, (), known, FACT)
            if known is not None:
                return known
        half = compat.size_hint(self.size.kv_len) * UNKNOWN_FRACTION / BLOCK_SIZE[1]
        if not (self.size.may_read or self.opaque) and self._may_be_mostly_partial(rows):
            return Computed(0, half, True)
        return Computed(half, 1)

    def _computed_in_sequences(self) -> Computed | None:
        """What kernels compute in sequences, by their number alone: that of the first ids of a kind, if ids tell it."""
        key = "sequences", self.kernel_key, self.size.batch, self.size.q_len.bit_length()
        known = _COMPUTED.get(key)
        if known is None and not is_capturing(self.size.device):
            try:
                made, look = self.sequences()
                if look is not None:
                    look.confirm()
            except Unfit:
                return None
            room, count = made.q.shape[0] - 1, int(made.q.diff().count_nonzero())  # the others are empty
            known = computed_in_sequences(cast(Window, self.window), self.size.batch, self.size.q_len, count, room)
            _COMPUTED.put(key, (), known, FACT)
        return known

    def _may_be_mostly_partial(self, rows: int) -> bool:
        if not self.is_by_library and self.tensors:
            return True
        few, length = compat.size_hint(rows), compat.size_hint(self.size.kv_len)
        for inner in self.mask._inside() if self.is_by_library else ():
            tensors = [x for x in inner.params.values() if isinstance(x, Tensor)]
            cuts_little = length >= _CUT_LITTLE_FROM.get(inner.name, math.inf)
            if not cuts_little and any(math.prod(map(compat.size_hint, x.shape)) > few for x in tensors):
                return True
        if not self.mask._has_other_function():
            return False
        with compat.without_modes():
            mask, size = over_zeros(self.mask, self.size)
            return reads_made_tensors(mask, mask._resolve(size))


class GivenPlan:
    """A user's own BlockMask, in place of a MaskPlan."""

    tensors: tuple[Tensor, ...] = ()
    size: Size | None = None
    is_given = True
    reads_data_as_fast = False
    window: Window | None = None
    unfitted_window: Window | None = None
    intervals: Intervals | None = None
    is_by_library = False
    what = "a given block mask"

    _form: tuple[tuple[int, int], tuple[int, int], list[bool]]  # of a template: lengths, block size, which lists it has

    def __init__(self, block_mask: compat.BlockMask, aliases: Aliases | None = None) -> None:
        structure, leaves = flatten(block_mask.mask_mod)
        self._structure, captured = structure, leaves.all_tensors
        self.inputs = [*captured, *(t for t in lists_of(block_mask) if t is not None)]
        self.opaque, self.holds_aliases = bool(structure.unreadable), False
        self.kernel_key: Hashable = "opaque", getattr(block_mask.mask_mod, "__code__", None)
        if not self.opaque:
            self.kernel_key = "given", structure.key
        self.shapes = tuple(t.shape for t in captured)
        if aliases is not None and not self.opaque:
            with contextlib.suppress(Opaque):
                lists = [None if t is None else aliases.of(t) for t in lists_of(block_mask)]
                mask_mod = structure.fill([aliases.of(t) for t in leaves.tensors])
                self._block_mask = made_of(block_mask.seq_lengths, lists, block_mask.BLOCK_SIZE, mask_mod)
                self.holds_aliases = True
                return
        mask_mod = with_contiguous_tensors(block_mask.mask_mod, captured)
        if mask_mod is not block_mask.mask_mod:
            block_mask = copy.copy(block_mask)
            block_mask.mask_mod = mask_mod
        self._block_mask = block_mask

    def template(self) -> GivenPlan:
        """Return the plan without its tensors, see `ModifierPlan.template`."""
        if not (self.holds_aliases and self._structure.is_whole):
            raise Opaque("a function of which no copy can hold other tensors")
        template, blocks = copy.copy(self), self._block_mask
        lists = [t is not None for t in lists_of(blocks)]
        template.inputs, template._form = [], (blocks.seq_lengths, blocks.BLOCK_SIZE, lists)
        for name in ("_block_mask", "numbers"):
            vars(template).pop(name, None)
        return template

    def with_tensors(self, tensors: Sequence[Tensor]) -> GivenPlan:
        """Return the plan that a template is of, for other inputs of the same layouts."""
        plan, own = copy.copy(self), [in_one_piece(t.detach()) for t in tensors]
        lengths, block_size, lists = self._form
        in_order = iter(own[len(own) - sum(lists) :])
        given = [next(in_order) if is_given else None for is_given in lists]
        mask_mod = self._structure.fill(own[: len(own) - sum(lists)])
        plan.inputs, plan._block_mask = list(tensors), made_of(lengths, given, block_size, mask_mod)
        return plan

    @property
    def block_mask(self) -> compat.BlockMask:
        return self._block_mask

    @property
    def block_size(self) -> tuple[int, int]:
        height, width = self._block_mask.BLOCK_SIZE
        return height, width

    def resized(self, block_size: tuple[int, int]) -> GivenPlan | None:
        """The plan if its blocks have this size: a user's own blocks have no other."""
        return self if block_size == self._block_mask.BLOCK_SIZE else None

    @property
    def has_number_tensors(self) -> bool:
        return any(not shape for shape in self.shapes)

    @functools.cached_property
    def numbers(self) -> Numbers:
        of_function = flatten(self._block_mask.mask_mod)
        return Numbers("mask", *of_function, self._block_mask.seq_lengths, self._block_mask.kv_num_blocks.device)

    def blocks(self) -> Blocks:
        return Blocks(self._block_mask)

    def mod(self) -> Callable[..., Tensor]:
        return self._block_mask.mask_mod

    function = mod

    def data(self) -> MaskData:
        return data_of(self._block_mask, *self._block_mask.kv_num_blocks.shape[:2])

    def explained(self) -> str:
        return "the given block mask"

    def computed(self, rows: int, may_look: bool = True) -> Computed:
        return Computed(self._block_mask.seq_lengths[1] * UNKNOWN_FRACTION / BLOCK_SIZE[1], 1)


def computed_in_sequences(window: Window, batch: int, length: int, count: int, room: int) -> Computed:
    """What kernels compute of self-attention in `count` sequences of random lengths, given in tables with
    places for `room` sequences.
    """
    mean = batch * length / max(1, count)  # also of keys before a query, as most tokens are in long sequences
    visible = min(mean if window.right is not None else 2 * mean, window.pairs(length) / length)
    full = max(0.0, visible / BLOCK_SIZE[1] - _VISIBLE)
    return Computed(full, _EDGES, sequences=room * BLOCK_SIZE[0] / batch / length)


def _in_sequences(mask: Mask, size: Size) -> Any:
    return band_of(mask, size) or documents_of(mask, size)


def _sequences_of(room: int, heads: int, mask: Mask, offset: Offset, size: Size) -> list[Tensor]:
    sequences: Sequences = _in_sequences(mask, size).sequences(room)
    # `len` would bind a graph to the number of sequences.
    if sequences.kv is sequences.q and 0 < heads * sequences.q.shape[0] <= _MAX_SEARCHED_SEQUENCES:
        sequences = sequences.head_after_head(heads, size.q_len)
    return [t for t in sequences if t is not None]


def _is_much_larger(exact: _PreparedMask, bounds: _PreparedMask) -> str:
    """Why bounds are too far from the exact plan, or ""."""
    found, needed = (int(p.layout.indices[0].sum() + p.layout.indices[2].sum()) for p in (bounds, exact))
    if found > _MAX_WIDTH * needed:
        return f"bounds have {found} blocks, {needed} are needed"
    size, least = (sum(t.nbytes for t in tensors_of(p.resolved)) for p in (bounds, exact))
    if size > max(_MAX_TABLES * least, _SMALL_TABLES):
        return f"tables for any values take {size} bytes, {least} are needed"
    return ""
