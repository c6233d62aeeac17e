"""Plans that a user holds: a mask and a score change with the sizes of their calls, and what earlier calls made."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.lists import lists_of
from flexmasks.errors import Unfit
from flexmasks.plans.checks import ATTENTION, described, fail
from flexmasks.plans.data import CannotBeData
from flexmasks.plans.sizes import Offset, sized
from flexmasks.spec.parameters import Size, describe, in_message, is_dense, listed
from flexmasks.spec.structure import Opaque, Structure, Walk, flatten, plain_key
from flexmasks.spec.values import AsAttentionMask, Mask, Modifier, Score

_HOST = torch.device("cpu")
_MAX_LAUNCHES = 64  # kinds of calls that one plan remembers
_LOCK = threading.RLock()  # held by a call that has seen a change, or keeps a launch if there is none
State = tuple[list[int], list[Hashable]]  # versions of a plan's tensors, and keys of its functions with what they read


@dataclass
class Launch:
    """A kernel with its forms, which a plan has made ready for one kind of call.

    plans: what the forms were made of; a plan without tensors, which is never updated, needs none.
    has_faster: whether another kernel would run the call, but for the values of its tensors.
    """

    ready: Any
    plans: Any = None
    has_faster: bool = False
    is_in_graph: bool = False  # a CUDA graph holds it

    def again(self) -> Any:
        """Return the kernel with forms of new values, or None if they cannot be made, as the next call says, or if that
        call asks a faster kernel.
        """
        if self.has_faster and not self.is_in_graph:
            return None
        mask, score = self.plans[:2]
        try:
            plans = self.plans._replace(mask=mask.again(), score=None if score is None else score.again())
            again = self.ready._replace(forms=self.ready.kernel.forms(plans))
            if self.is_in_graph:  # whose replays confirm nothing
                again.kernel.confirm(again.forms)
            return again
        except (Opaque, CannotBeData, Unfit):
            return None

    def in_place(self, again: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that a CUDA graph reads, each with its new value."""
        old, new = list(_parts(self.ready.forms)), list(_parts(again and again.forms))
        if list(map(_fixed, old)) != list(map(_fixed, new)):
            raise RuntimeError(
                "flexmasks.Plan.update: a CUDA graph holds a call whose tensors have other shapes for these values; "
                "capture it again with a new plan."
            )
        return [(x, y) for x, y in zip(old, new, strict=True) if isinstance(x, Tensor) and x.data_ptr() != y.data_ptr()]


def _parts(part: Any) -> Iterator[Any]:
    """Yield the tensors in forms, and what else there is: lengths, numbers, keys of functions."""
    if isinstance(part, compat.BlockMask):
        part = lists_of(part), part.mask_mod, part.seq_lengths, part.BLOCK_SIZE
    elif is_dataclass(part):
        part = [getattr(part, field.name) for field in fields(part)]
    elif callable(part):
        structure, leaves = flatten(part)
        yield structure.key
        part = leaves.tensors
    if isinstance(part, tuple | list):
        yield len(part)
        for inner in part:
            yield from _parts(inner)
    else:
        yield part


def _fixed(part: Any) -> Any:
    """Return what of a part a CUDA graph cannot read anew."""
    return (part.shape, part.dtype) if isinstance(part, Tensor) else part


@dataclass
class Sizes:
    """The sizes of a plan's calls; None for any batch size or number of heads."""

    q_len: int
    kv_len: int
    batch: int | None
    heads: int | None
    device: torch.device | None  # None inside torch.compile, where any device will do

    def __str__(self) -> str:
        known = [("batch", self.batch), ("heads", self.heads)]
        more = "".join(f", {name}={n}" for name, n in known if n is not None)
        where = "" if self.device is None else f" on {self.device}"
        return f"q_len={self.q_len}, kv_len={self.kv_len}{more}{where}"


@dataclass(eq=False)
class HeldPlan(AsAttentionMask):
    """Base of `flexmasks.Plan`, as calls know it.

    The tensors of its mask and score change are its own, unless they learn, or a function reads something that cannot
    be copied. Then nothing is kept, and each call plans as if it were given the mask.
    """

    hint: ClassVar[str] = ", a plan, which flexmasks.attention takes in place of a mask; write plan.mask or plan.score"
    mask: Mask
    score: Score | None
    sizes: Sizes
    q_offset: Offset
    launches: dict[Hashable, Launch] = field(default_factory=dict, repr=False)
    tensors: dict[str, list[Tensor]] = field(default_factory=dict, repr=False)  # its own, by the names that users know
    owns_tensors: bool = False
    is_invariant: bool = False  # its calls run as inside `flexmasks.invariant`
    of_one_step: bool = False  # never updated: it copies no tensors, and its calls take what those of others made
    _ids: frozenset[int] = frozenset()  # of its own tensors
    _versions: list[int] = field(default_factory=list, repr=False)
    _by_users: list[Modifier] = field(default_factory=list, repr=False)  # whose functions read variables that change
    _functions: list[Hashable] = field(default_factory=list, repr=False)  # their keys, with what they read

    def __post_init__(self) -> None:
        if compat.is_compiling():  # torch traces no copies of functions, and keeps equal results by itself
            return
        walk = Walk(by_name=True)
        structure, leaves = walk.structure((self.mask, self.score)), walk.leaves
        of_offset = [self.q_offset] if isinstance(self.q_offset, Tensor) else []
        all_tensors = [*leaves.all_tensors, *of_offset]
        learns = any(t.requires_grad or type(t) not in (Tensor, torch.nn.Parameter) for t in all_tensors)
        if structure.unreadable or not structure.is_whole or structure.reads_objects or leaves.has_global or learns:
            return
        if all_tensors:
            self._own_tensors(walk, structure, of_offset)
        if not self.of_one_step:
            self._by_users = [x for x in (self.mask, self.score) if x is not None and not x._is_by_library()]
            self._functions = self._present_functions()
        is_sized = self.sizes.batch is not None and self.sizes.heads is not None
        if is_sized and self.sizes.device == _HOST:  # elsewhere reading values takes time: the first call checks them
            self._check_values()
        self.owns_tensors = True

    def _own_tensors(self, walk: Walk, structure: Structure, of_offset: list[Tensor]) -> None:
        own = [*walk.leaves.tensors, *of_offset]
        if not self.of_one_step or any(t.is_inference() for t in own):  # those of inference mode have no versions
            with torch.inference_mode(False), torch.no_grad():
                own = [t.detach().clone(memory_format=torch.contiguous_format) for t in own]
            self.mask, self.score = structure.fill(own, shared=walk.without_tensors())
            self.q_offset = own[-1] if of_offset else self.q_offset
        names = ["" if place is None else place.name for place in walk.leaves.places]
        for name, tensor in zip([*names, "q_offset"], own, strict=False):
            self.tensors.setdefault(name, []).append(tensor)
        self._ids = frozenset(map(id, own))
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [compat.version(t) for tensors in self.tensors.values() for t in tensors]

    def _present_functions(self) -> list[Hashable]:
        return [_present_key(value, self._ids) for value in self._by_users]

    def launch(self, key: Hashable) -> tuple[Launch | None, State]:
        """Return what an earlier call made ready, or None, and the state of all that calls read."""
        if self.tensors:
            present = self._present_versions()
            if self._versions != present:  # somebody wrote into the plan's own tensors
                self.launches.clear()
                self._versions = present
        if self._by_users and self._functions != (functions := self._present_functions()):
            with _LOCK:
                self.launches.clear()
                self._functions = functions
        return self.launches.get(key), (self._versions, self._functions)

    def keep(self, key: Hashable, launch: Launch, planned_in: State) -> None:
        """Keep what a call made ready, if all that it read is still as it was in that state."""
        with _LOCK:
            if planned_in != (self._present_versions(), self._present_functions()):
                return
            if len(self.launches) >= _MAX_LAUNCHES:
                self.launches.pop(next(iter(self.launches)))
            self.launches[key] = launch

    def check(self, q: Any, k: Any) -> None:
        """Raise ValueError unless the sizes are those of a call."""
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4):
            return  # `attention` says what is wrong
        sizes = self.sizes
        fits = not q.is_nested and (q.shape[2], k.shape[2]) == (sizes.q_len, sizes.kv_len)
        fits = fits and sizes.batch in (None, q.shape[0]) and sizes.heads in (None, q.shape[1])
        if not fits or sizes.device not in (None, q.device):
            fail(
                f"the plan is for {sizes}, and q is {describe(q)}, k is {describe(k)} on {q.device}; make a plan for "
                "these sizes, or pass the mask."
            )

    def update(self, **given: Any) -> None:
        """Replace values of tensors, and all that was planned with them; what CUDA graphs read, in its memory."""
        if not self.owns_tensors:
            raise ValueError(
                "flexmasks.Plan.update: the plan has no tensors of its own, because its mask or score learns or reads "
                "variables that cannot be copied; calls see changes of these by themselves."
            )
        new = [(own, value) for name in given for own, value in self._checked(name, given[name])]
        is_known = self._versions == self._present_versions()  # else calls see that somebody wrote into the tensors
        can_check = self._can_check_values()
        with torch.inference_mode(False), torch.no_grad():
            former = [(own, own.clone()) for own, _ in new]
            _write(new)
            try:
                if can_check:
                    self._check_values()
                again = {key: launch.again() for key, launch in self.launches.items()}
                in_graphs = [launch.in_place(again[key]) for key, launch in self.launches.items() if launch.is_in_graph]
            except Exception:
                _write(former)
                self._versions = self._present_versions() if is_known else self._versions
                raise
        with torch.inference_mode():  # what a call inside it has made can be written nowhere else
            for pairs in in_graphs:
                _write(pairs)
        self.launches = {
            key: launch if launch.is_in_graph else replace(launch, ready=again[key])
            for key, launch in self.launches.items()
            if again[key] is not None
        }
        self._versions = self._present_versions()

    def _checked(self, name: str, value: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the plan's tensors of a name, each with its new value in its dtype."""
        if name not in self.tensors:
            known = ", ".join(f"`{n}`" for n in self.tensors if n) or "none"
            fail(f"the plan has no tensor `{name}`; it has {known}. Numbers are fixed: make a new plan.", call=_UPDATE)
        own = self.tensors[name]
        if len({t is self.q_offset for t in own}) > 1:
            fail(
                "`q_offset` is where the queries start, and a variable of the mask or score too: make the plan again, "
                "with another name for the variable.",
                call=_UPDATE,
            )
        made, (dtype, device) = listed(value, _HOST), (own[0].dtype, own[0].device)
        fits = isinstance(made, Tensor) and is_dense(made) and {t.shape for t in own} == {made.shape}
        if not fits or (made is value and made.device != device):
            got = described(made) if isinstance(made, Tensor) else in_message(value)
            fail(f"`{name}` must be {described(own[0])}, got {got}.", call=_UPDATE)
        if not torch.can_cast(made.dtype, dtype) or _may_wrap(made, dtype):
            fail(f"`{name}` must have dtype {dtype}, got {made.dtype}, whose numbers may not fit.", TypeError, _UPDATE)
        if made.requires_grad or compat.is_wrapped(made):
            fail(
                f"`{name}` must not learn: the plan would keep its values alone. Pass `{name}.detach()`, or make a new "
                "plan of a tensor that requires a gradient, or that belongs to a transform of torch.func.",
                call=_UPDATE,
            )
        return [(t, made.to(device, dtype)) for t in own]

    def _can_check_values(self) -> bool:
        """Whether values are read on the host, at sizes that the present ones fit: others may be those of the calls."""
        with contextlib.suppress(ValueError, TypeError):
            return self.sizes.device == _HOST and self._check_values()
        return False

    def _check_values(self) -> bool:
        """Check the values of parameters. Sizes that are not known are those that shapes imply, or 1."""
        values, q_offset, sizes = [x for x in (self.mask, self.score) if x is not None], self.q_offset, self.sizes
        of_offset = [len(q_offset)] if isinstance(q_offset, Tensor) else []
        batch = max([1, *of_offset, *(v._implied_size("B") or 1 for v in values)])
        heads = max(v._implied_size("H") or 1 for v in values)
        size = Size(sizes.batch or batch, sizes.heads or heads, sizes.q_len, sizes.kv_len, _HOST)
        size = sized(size, q_offset)
        for value in values:
            value._resolve(size)
        return True


def _write(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for place, value in pairs:
        place.copy_(value)


def _may_wrap(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether whole numbers may become others in a dtype. They are looked at where the host may do it at once."""
    if value.dtype in (dtype, torch.bool) or dtype.is_floating_point or dtype.is_complex:
        return False
    given, own = torch.iinfo(value.dtype), torch.iinfo(dtype)
    fits = own.min <= given.min and given.max <= own.max
    return not fits and (value.device != _HOST or bool((value.to(dtype).double() != value.double()).any()))


_UPDATE = "flexmasks.Plan.update"


def without_plan(q: Any, k: Any, request: Any) -> Any:
    """The request with the mask and the score change of its plan in its place; the sizes are checked."""
    held = request.mask
    if not isinstance(held, HeldPlan):
        return request
    held.check(q, k)
    if request.q_offset is not None:
        fail("a plan has its own `q_offset`; pass it to `flexmasks.plan`.", TypeError, ATTENTION)
    if request.block_mask is not None:
        fail("pass a plan as `mask`, or `block_mask`, not both.", TypeError, ATTENTION)
    if request.score is not None and held.score is not None:
        fail("the plan has a score change; pass `score` to `flexmasks.plan` or to this call, not to both.", TypeError)
    score = held.score if request.score is None else request.score
    q_offset = held.q_offset
    if type(q_offset) is not int:  # inside torch.compile a plan has it as it was given
        q_offset = listed(q_offset, getattr(q, "device", None))
    return request._replace(mask=held.mask, score=score, q_offset=q_offset)


def _present_key(value: Modifier, own: frozenset[int]) -> Hashable:
    """A key with what functions read, which differs where that cannot be read, or is a tensor that is not the plan's.

    own: ids of the plan's tensors.
    """
    tensors: list[Tensor] = []
    key = plain_key(value._alone, tensors) if type(value._alone) is FunctionType else None
    if key is None:
        structure, leaves = flatten(value)
        tensors, key = leaves.all_tensors, None if structure.unreadable else structure.key
    return object() if key is None or not own.issuperset(map(id, tensors)) else key
