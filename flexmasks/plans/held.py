"""Plans that a user holds: a mask and a score change with the sizes of their calls, and what earlier calls made."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.plans.checks import ATTENTION, fail
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.recorded import Form
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.shifted import Offset
from flexmasks.plans.sizes import sized
from flexmasks.spec.parameters import Size, describe, listed
from flexmasks.spec.structure import Leaves, Opaque, Structure, flatten
from flexmasks.spec.values import Mask, Score

_HOST = torch.device("cpu")
_MAX_LAUNCHES = 64  # kinds of calls that one plan remembers


@dataclass
class Launch:
    """A kernel that a plan has made ready for one kind of call.

    forms: what it reads, each with the plan of the mask or score that it comes from, its name and its size of blocks.
        None if they cannot be made again in the same memory.
    """

    replay: Any
    forms: list[tuple[MaskPlan | ScorePlan, str, tuple[int, int] | None, Form]] | None
    is_captured: bool = False  # a CUDA graph holds it

    def with_new_values(self, known: set[int]) -> list[tuple[Tensor, Tensor]] | None:
        """Return the tensors that it reads, each with its new value, or None if they do not fit.

        known: ids of tensors that have their new values, to which these are added.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for plan, name, block_size, form in self.forms or ():
            ids = set(map(id, form.tensors))
            if not form.inputs or ids <= known:
                continue
            known |= ids
            made = plan.again().form(name, block_size).tensors
            layouts = ([(t.shape, t.dtype) for t in tensors] for tensors in (form.tensors, made))
            if next(layouts) != next(layouts):
                return None
            pairs += [(old, new) for old, new in zip(form.tensors, made, strict=True) if old is not new]
        return pairs


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
class HeldPlan:
    """Base of `flexmasks.Plan`, as calls know it.

    The tensors of its mask and score change are its own, unless they learn, or a function reads something that cannot
    be copied. Then nothing is kept, and each call plans as if it were given the mask.
    """

    ndim: ClassVar[int] = Mask.ndim
    shape: ClassVar[Any] = Mask.shape
    mask: Mask
    score: Score | None
    sizes: Sizes
    q_offset: Offset
    launches: dict[Hashable, Launch] = field(default_factory=dict, repr=False)
    tensors: dict[str, list[Tensor]] = field(default_factory=dict, repr=False)  # its own, by the names that users know
    is_own: bool = False
    of_one_step: bool = False  # never updated: it copies no tensors, and its calls take what those of others made
    _versions: list[int] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if compat.is_compiling():  # torch traces no copies of functions, and keeps equal results by itself
            return
        structure, leaves = flatten((self.mask, self.score, self.q_offset))
        is_global = any(place is not None and place.kind == "global variable" for place in leaves.places)
        learns = any(t.requires_grad or type(t) not in (Tensor, torch.nn.Parameter) for t in leaves.all_tensors)
        if structure.unreadable or not structure.is_whole or structure.reads_objects or is_global or learns:
            return
        if leaves.tensors:
            self._own_tensors(structure, leaves)
        if self.sizes.device == _HOST:  # elsewhere reading values takes time: the first call checks them
            self._check_values(self.mask, self.score, self.q_offset)
        self.is_own = True

    def _own_tensors(self, structure: Structure, leaves: Leaves) -> None:
        own = leaves.tensors
        if not self.of_one_step or any(t.is_inference() for t in own):  # those of inference mode have no versions
            with torch.inference_mode(False), torch.no_grad():
                own = [t.detach().clone(memory_format=torch.contiguous_format) for t in own]
            self.mask, self.score, self.q_offset = structure.fill(own)
        for place, tensor in zip(leaves.places, own, strict=True):
            name = "q_offset" if tensor is self.q_offset else "" if place is None else place.name
            self.tensors.setdefault(name, []).append(tensor)
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [compat.version(t) for tensors in self.tensors.values() for t in tensors]

    def launch(self, key: Hashable) -> Launch | None:
        if self.tensors and self._versions != self._present_versions():  # somebody wrote into the plan's own tensors
            self.launches.clear()
            self._versions = self._present_versions()
        return self.launches.get(key)

    def keep(self, key: Hashable, launch: Launch) -> None:
        if len(self.launches) >= _MAX_LAUNCHES:
            self.launches.pop(next(iter(self.launches)))
        self.launches[key] = launch

    def check(self, q: Any, k: Any) -> None:
        """Raise ValueError unless the sizes are those of a call."""
        if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k)):
            return  # `attention` says what is wrong
        sizes = self.sizes
        pairs = [(q.shape[2], sizes.q_len), (k.shape[2], sizes.kv_len), (q.shape[0], sizes.batch)]
        fits = all(own is None or n == own for n, own in [*pairs, (q.shape[1], sizes.heads)])
        if q.is_nested or not fits or sizes.device not in (None, q.device):
            fail(
                f"the plan is for {sizes}, and q is {describe(q)}, k is {describe(k)} on {q.device}; make a plan for "
                "these sizes, or pass the mask."
            )

    def update(self, **given: Any) -> None:
        """Replace values of tensors, and all that was planned with them, in the same memory."""
        if not self.is_own:
            raise ValueError(
                "flexmasks.Plan.update: the plan has no tensors of its own, because its mask or score learns or reads "
                "variables that cannot be copied; calls see changes of these by themselves."
            )
        new = {name: self._checked(name, value) for name, value in given.items()}
        if self.sizes.device == _HOST:
            others = {id(own): value for name, value in new.items() for own in self.tensors[name]}
            structure, leaves = flatten((self.mask, self.score, self.q_offset))
            self._check_values(*structure.fill([others.get(id(t), t) for t in leaves.tensors]))
        held = [key for key, launch in self.launches.items() if launch.is_captured and launch.forms is None]
        if held:
            raise RuntimeError(
                "flexmasks.Plan.update: a CUDA graph holds a call whose backend reads values of tensors when it plans; "
                "capture it again with a new plan, or choose another backend."
            )
        with torch.inference_mode(False), torch.no_grad():
            for name, value in new.items():
                for own in self.tensors[name]:
                    own.copy_(value)
            self._refresh()
        self._versions = self._present_versions()

    def _checked(self, name: str, value: Any) -> Tensor:
        if name not in self.tensors or not name:
            known = ", ".join(f"`{n}`" for n in self.tensors if n) or "none"
            fail(f"the plan has no tensor `{name}`; it has {known}. Numbers are fixed: make a new plan.", call=_UPDATE)
        own = self.tensors[name]
        value = listed(value, self.sizes.device)
        shapes = {t.shape for t in own}
        if not isinstance(value, Tensor) or shapes != {value.shape} or value.device != own[0].device:
            got = describe(value) + (f" on {value.device}" if isinstance(value, Tensor) else "")
            fail(f"`{name}` must be {describe(own[0])} on {own[0].device}, got {got}.", call=_UPDATE)
        if not torch.can_cast(value.dtype, own[0].dtype):
            fail(f"`{name}` must have dtype {own[0].dtype}, got {value.dtype}.", TypeError, _UPDATE)
        return value

    def _check_values(self, mask: Mask, score: Score | None, q_offset: Offset) -> None:
        """Check the values of parameters, if all sizes are known."""
        sizes = self.sizes
        if sizes.batch is None or sizes.heads is None:
            return
        size = sized(Size(sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len, _HOST), q_offset)
        for value in (mask, score):
            if value is not None:
                value.resolve(size)

    def _refresh(self) -> None:
        """Write new values into what calls read, and forget the calls where that cannot be done."""
        known: set[int] = set()
        for key, launch in list(self.launches.items()):
            try:
                pairs = None if launch.forms is None else launch.with_new_values(known)
            except Opaque:
                pairs = None
            if pairs is not None:
                for old, value in pairs:
                    old.copy_(value)
                launch.replay.refresh()
            elif launch.is_captured:
                raise RuntimeError(
                    "flexmasks.Plan.update: a CUDA graph holds a call whose tensors have other shapes for these "
                    "values; capture it again with a new plan."
                )
            else:
                del self.launches[key]


_UPDATE = "flexmasks.Plan.update"


def unwrapped(q: Any, k: Any, request: Any) -> Any:
    """The request with the mask and the score change of its plan, whose sizes are checked."""
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
    return request._replace(mask=held.mask, score=score, q_offset=held.q_offset)
