"""What plans of masks and of scores share: with the sizes of a call they become what kernels read.

Plans are cached by the values of parameters and the identity of tensors, see flexmasks.cache: the same mask over the
same lengths is planned once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from flexmasks import compat
from flexmasks.cache import ENTRY, KINDS, Part, bytes_of, identity
from flexmasks.context import is_capturing
from flexmasks.devices import compiles_by_triton
from flexmasks.errors import passing_error
from flexmasks.plans.checks import check_dense, check_unbatched
from flexmasks.plans.naming import naming
from flexmasks.plans.recorded import Recorded, memory_of_graph
from flexmasks.plans.sizes import Offset, shifted_mask, shifted_score, sized, unread
from flexmasks.spec.aliases import Aliases, in_one_piece
from flexmasks.spec.indexing import bounded
from flexmasks.spec.leaves import Leaves
from flexmasks.spec.numbers import Numbers, seen_of
from flexmasks.spec.parameters import Size, is_dense
from flexmasks.spec.structure import Opaque, Structure, flatten, replaced, tensors_of, with_tensors
from flexmasks.spec.values import Modifier

_PLANS_TO_RECORD = 16  # on a CPU: plans that take about as long as recording one


@dataclass(frozen=True)
class Prepared:
    """The cached part of a plan; nothing of it is the user's own."""

    resolved: dict[str, Any]  # what `Modifier._resolve` returned
    offset: Tensor | None  # a number q_offset above 0 as a kernel's input: decoding changes it at each step

    @property
    def nbytes(self) -> int:
        return ENTRY + sum(t.nbytes for t in tensors_of(self.resolved))


@dataclass
class Program:
    """How a form is made of the tensors of all masks, or scores, that differ in the values of these only."""

    why_exact: str  # why values must be read, so that nothing is recorded, or ""
    records_soon: bool = True  # at the second plan, instead of after as many as take the time of recording
    plans: int = 1
    recorded: Any = None  # the operations, once that is due

    def record(self, record: Callable[[], Any]) -> None:
        """Record if that is due, or note why the plans cannot be recorded."""
        is_due = self.records_soon or self.plans >= _PLANS_TO_RECORD
        if is_due and self.recorded is None and not self.why_exact:
            try:
                self.recorded = record()
            except Exception as error:  # torch's tracing raises errors of any type
                self.why_exact = cannot_record(error)


_P = TypeVar("_P")
_V = TypeVar("_V")
PROGRAMS: Part[Program] = Part(KINDS, "programs")


class ModifierPlan:
    """Base of MaskPlan and ScorePlan: a mask or score with a call's sizes.

    Each form of it is made when it is asked for. If the size says that no values may be read, as in a graph of
    torch.compile, forms are made of operations of fixed shapes, and nothing is cached or recorded.

    With `lift`, numbers may become inputs of the kernel. With `aliases`, functions are bound to aliases of the
    tensors if that is possible (`holds_aliases`), so that the bound functions may be cached.
    """

    _STATIC = frozenset(
        (
            "size", "offset", "lifted", "opaque", "unreadable", "holds_aliases", "_structure", "_key", "_kind_key",
            "kernel_key", "open_extents", "block_size", "_allows_bounds", "_exact", "_lists", "_programs",
            "window",
        )
    )  # fmt: skip # attributes that do not change with tensors

    def __init__(
        self, value: Modifier, size: Size, offset: Offset = 0, lift: bool = False, aliases: Aliases | None = None
    ) -> None:
        self.value, self.size, self.offset = value, size, offset
        self._bound_to = value, offset
        self.holds_aliases = False
        structure, leaves = flatten(value)
        self._structure, self.tensors = structure, leaves.all_tensors
        check_dense(value, leaves.tensors)
        if compat.transforms_active():
            check_unbatched(value, self.tensors, offset)
        self._programs: dict[Hashable, Any] = {}  # what was recorded for forms: plans of one template share it
        self.is_of_template = False
        self.unreadable = structure.unreadable
        self.opaque = bool(self.unreadable) and size.may_read  # it may change unnoticed, so nothing is cached
        self._key = None if self.unreadable else structure.key
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

    def template(self) -> Self:
        """Return the plan without its tensors and all that was made of them, see `with_tensors`. Raises Opaque."""
        if self.opaque or not self._structure.is_whole:
            raise Opaque(self.unreadable or "objects of which no copy can hold other tensors")
        if not self.holds_aliases and not all(type(t) in (Tensor, Parameter) and not vars(t) for t in self.inputs):
            raise Opaque("a tensor that learns beside one that has attributes")
        template = copy.copy(self)
        for made in {*vars(self)}.difference(self._STATIC):
            del vars(template)[made]
        template.offset = cast(int, self.offset if isinstance(self.offset, int) else None)
        return template

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return the plan that a template is of, for other inputs of the same layouts."""
        plan, given = copy.copy(self), list(tensors)
        of_offset = given.pop() if self.offset is None else self.offset
        plan.tensors, plan.offset, plan.is_of_template = given, of_offset, True
        plan._start()
        return plan

    @functools.cached_property
    def value(self) -> Modifier:
        value: Modifier = self._structure.fill(self.tensors)
        return value

    @functools.cached_property
    def _bound_to(self) -> tuple[Any, Offset]:
        """The value and the offset with tensors as kernels take them."""
        own = [in_one_piece(t if t.requires_grad else t.detach()) for t in self.inputs]
        return self._structure.fill(own[: len(self.tensors)]), self.offset if isinstance(self.offset, int) else own[-1]

    def _program(self, *name: Hashable) -> Any:
        """Return the recorded operations that make a form of new tensors, if plans of this template have them."""
        is_new = self.is_of_template and not is_capturing(self.size.device)
        return self._programs.get(name) if is_new else None

    def again(self) -> Self:
        """Return a new plan of the same mask or score change, for tensors that have new values."""
        return self.template().with_tensors(self.inputs)

    def _start(self) -> None:
        """Begin without anything made."""

    @property
    def what(self) -> str:
        return repr(self.value)

    @functools.cached_property
    def _of_kernel(self) -> tuple[Structure, Leaves]:
        return flatten(self.value, contents=False, lifts=self.lifted)

    @functools.cached_property
    def kernel_key(self) -> Hashable:
        """Key of what a compiled kernel depends on."""
        if self.unreadable:
            return "opaque", self.value.name, getattr(self.value._definition.function, "__code__", None)
        return self._of_kernel[0].key

    @property
    def is_by_library(self) -> bool:
        """Return whether this library, not a user, wrote all functions."""
        return self.value._is_by_library()

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the plan is made from: captured tensors, and the offset."""
        return self.tensors if isinstance(self.offset, int) else [*self.tensors, self.offset]

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(t.shape for t in self.tensors)

    @property
    def has_number_tensors(self) -> bool:
        """Return whether a function captured a 0-dimensional tensor by itself, not as a parameter."""
        parameters = {id(t) for t in self.value._numbers()} if self.size.may_read else ()
        return any(t.ndim == 0 and id(t) not in parameters for t in self.tensors)

    def _lift(self) -> None:
        """Let parameters that may be tensors become tensors once they had other values, by the rule of numbers."""
        lifted = flatten(self.value, contents=False, lifts=True)
        key = lifted[0].key
        if key == self.kernel_key:
            return
        seen = seen_of(key)
        seen.note(self.kernel_key, self.size)
        if seen.are_inputs(self.kernel_key, self.size):
            self.lifted, self._of_kernel, self.kernel_key = True, lifted, key

    @functools.cached_property
    def numbers(self) -> Numbers:
        """The numbers that kernels have compiled in, or get otherwise. Raises Opaque if the plan is opaque."""
        return Numbers(self.value._kind, *self._of_kernel, self.size, self.size.device)

    def _cached(
        self, cache: Part[_P], build: Callable[[], _P], *more_key: Hashable, suits: Callable[[_P], bool] | None = None
    ) -> _P:
        """Return what the cache holds for this plan, or build it; also if what the cache holds does not suit."""
        tensors, capturing = self.inputs, is_capturing(self.size.device)
        if self.opaque or (capturing and tensors) or not self.size.may_read:
            return build()
        offset = self.offset if isinstance(self.offset, int) else "tensor"
        key = (self._key, offset, self.size, self.lifted, torch.get_default_dtype(), *more_key)
        prepared = cache.get(key, tensors)
        if prepared is None or (suits is not None and not suits(prepared)):
            states = list(map(identity, tensors))
            with outside_transforms(tensors):
                prepared = build()
            if capturing:  # the CUDA graph's own memory, which holds nothing before the graph runs
                return prepared
            # What is computed from a tensor that requires a gradient belongs to one autograd graph.
            learned = isinstance(prepared, Prepared) and bool(tensors_of(prepared.resolved))
            is_of_graph = learned and any(t.requires_grad for t in tensors)
            if not is_of_graph and self._is_as_keyed() and states == list(map(identity, tensors)):
                cache.put(key, tensors, prepared, bytes_of(prepared))
        return prepared

    def _is_as_keyed(self) -> bool:
        """Return whether functions read what they read at first; another thread may have changed a variable."""
        structure = None if self.is_by_library else flatten(self.value)[0]
        return structure is None or (not structure.unreadable and structure.key == self._key)

    def _record(self, program: Program, record: Callable[[], Any]) -> None:
        """Record what a kind is made by, if that is due."""
        known = program.recorded
        program.record(record)
        if program.recorded is not known and not self._is_as_keyed():
            program.recorded = None

    @functools.cached_property
    def _kind_key(self) -> Hashable:
        """Key of all plans that differ in the values of tensors only. It is None if there can be no others."""
        if self.opaque or not self.inputs or any(t.requires_grad or compat.is_wrapped(t) for t in self.inputs):
            return None  # a tensor that learns belongs to an autograd graph, a wrapped one to a transform
        return None if self.value._holds_lists() else self._key  # a list of numbers is no input of a recorded plan

    def _kind_of(self, *more_key: Hashable) -> Hashable:
        """Return the key of the state of a kind, for tensors of these layouts.

        An offset that is also a parameter has a kind of its own: what is recorded reads one tensor, not two.
        """
        layouts = tuple((t.shape, t.stride(), t.dtype, t.device) for t in self.inputs)
        ids = [id(t) for t in self.inputs]
        places = tuple(ids.index(n) for n in ids)  # of each input, the first place of its tensor
        offset = self.offset if isinstance(self.offset, int) else "tensor"
        return self._kind_key, offset, self.size, self.lifted, torch.get_default_dtype(), layouts, places, *more_key

    def _made(
        self,
        cache: Part[_P],
        form: Callable[..., _P],
        make: Callable[[Any, Offset, Size], Sequence[Tensor]],
        *variant: Hashable,
    ) -> _P:
        """The tensors of a form, cached or made.

        make: makes the tensors from a value like the plan's, an offset and sizes which say that no value may be read.
            Its operations are recorded when it is to make them the second time for a kind, on a CPU the 16th time, so
            that lengths that change at every step cost no recording.
        variant: what else the operations depend on.
        """
        program = self._program(form, *variant)
        if program is not None:
            self._check_values()
            return form(*program(self.inputs))
        size = unread(self.size, self.offset)

        def run(value: Any, offset: Offset) -> list[Tensor]:
            with naming(self.value), torch.no_grad():
                return list(make(value, offset, size))

        def build() -> _P:
            self._check_values()
            return form(*self._recorded_tensors((form, *variant), run))

        return self._cached(cache, build, *variant)

    def _check_values(self) -> None:
        """Check the values of tensors where the host reads them at once."""
        raise NotImplementedError

    def _recorded_tensors(self, name: tuple[Hashable, ...], run: Callable[[Any, Offset], list[Tensor]]) -> list[Tensor]:
        capturing, inputs = is_capturing(self.size.device), self.inputs
        if self._kind_key is None or not self.size.may_read:
            return run(self.value, self.offset)
        kind_key = self._kind_of(*name)
        program = PROGRAMS.get(kind_key)
        is_first = program is None
        if program is None:
            program = Program("", records_soon=not self.size.reads_at_once)
            if not capturing:
                self.value._resolve(sized(self.size, self.offset), self.lifted)  # checks the values once
        else:
            program.plans += 1
        if not capturing and not is_first:

            def run_with(*tensors: Tensor) -> list[Tensor]:
                return run(*replaced((self.value, self.offset), zip(inputs, tensors, strict=True)))

            self._record(program, lambda: Recorded(run_with, inputs))
        tensors = run(self.value, self.offset) if program.recorded is None else program.recorded(inputs)
        if program.recorded is not None:
            self._programs[name] = program.recorded
        if is_first and not capturing:
            PROGRAMS.put(kind_key, (), program, ENTRY + memory_of_graph(sum(t.nbytes for t in tensors)))
        return tensors

    def _offset_tensor(self) -> Tensor | None:
        if not isinstance(self.offset, int) or self.offset == 0 or not self.size.may_read:
            return None
        # One element for each batch element: some kernels take no 0-dimensional tensors.
        filled = torch.full((max(self.size.batch, 2),), self.offset, device=self.size.device)
        most = 1 << (self.offset - 1).bit_length()
        return bounded(filled, most // 2 + 1, most)  # functions are looked at once for all of these, see backends.forms

    def function(self, device: torch.device | None = None) -> Callable[..., Tensor]:
        """The function as kernels get it, for a look at its operations: nothing else is made, and no value is read.

        Where the size says that none may be read, it is over tensors of zeros: the plan's are those of a graph.

        device: of these zeros, by default that of the plan.
        """
        if self.size.may_read:
            with compat.without_dispatch_modes(), compat.outside_transforms():
                resolved = self.value._resolve(unread(self.size, self.offset), self.lifted)
                bound, offset = self._bind(Prepared(resolved, self._offset_tensor()))
        else:
            with compat.without_modes():
                (value, offset), size = over_zeros((self.value, self.offset), self.size, device)
                bound = value._bind(value._resolve(size), size.heads, for_kernels=True)
        return shifted_mask(bound, offset) if self.value._kind == "mask" else shifted_score(bound, offset)

    def _bind(self, prepared: Prepared) -> tuple[Callable[..., Tensor], Offset]:
        """The function, bound to the user's own tensors or to their aliases, and the offset of queries."""
        value, offset = self._bound_to
        heads = self.size.heads if compiles_by_triton(self.size.device) else None
        bound = value._bind(prepared.resolved, heads, for_kernels=True)
        return bound, offset if prepared.offset is None else prepared.offset


def over_zeros(value: _V, size: Size, device: torch.device | None = None) -> tuple[_V, Size]:
    """A mask or score, or a tuple with one, with tensors of zeros, and a size of numbers that are known."""

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros([compat.size_hint(n) for n in x.shape], dtype=x.dtype, device=device or x.device)

    lengths = (size.batch, size.heads, size.q_len, size.kv_len, size.q_offset)
    batch, heads, q_len, kv_len, q_end = map(compat.size_hint, lengths)
    starts = None if size.starts is None else zeros(size.starts)
    known = replace(
        size, batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, q_offset=q_end, starts=starts,
        device=device or size.device,
    )  # fmt: skip
    return with_tensors(value, zeros, has_own_globals=True), known


def with_contiguous_tensors(value: _V, tensors: Sequence[Tensor]) -> _V:
    """Return a value with contiguous copies of its tensors, if it can be copied."""
    if not all(t.is_contiguous() for t in tensors if is_dense(t)):
        with contextlib.suppress(Opaque):
            return cast(_V, with_tensors(value, in_one_piece))
    return value


def outside_transforms(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Leave the transforms of torch.func, so that results may be cached, unless one of `tensors` belongs to one."""
    return contextlib.nullcontext() if any(map(compat.is_wrapped, tensors)) else compat.outside_transforms()


def cannot_record(error: Exception) -> str:
    """Why a plan cannot be recorded. An error that says nothing about that is raised."""
    if passing_error(error) is not None:
        raise error
    first_line = next(iter(str(error).splitlines()), "")
    return f"its plan cannot be recorded, {type(error).__name__}: {first_line}"[:300]
