"""Calls as backends see them, kernels, and the kinds of calls that later ones find."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.counts import Blocks
from flexmasks.cache import FACT, KINDS, Part, bytes_of
from flexmasks.checkpointing import beside_saved_tensors_hooks
from flexmasks.context import Context
from flexmasks.errors import Outgrown, Unfit, cannot_read, cannot_write, passing_error
from flexmasks.plans.mask_plan import GivenPlan, MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.sizes import offset_of_last
from flexmasks.spec.bands import Band
from flexmasks.spec.numbers import Numbers
from flexmasks.spec.structure import Opaque

HALF_DTYPES = (torch.float16, torch.bfloat16)
TRANSFORMED = "it supports neither torch.func.vmap nor forward derivatives"
ONCE_ONLY = "flexmasks.attention: backend {!r} cannot be differentiated twice; pass backend='reference', which can."
_PROVEN: Part[bool] = Part(KINDS, "gradients_that_worked")
_DAMAGED = "; if the compiled code on the disk may be damaged, delete the folder that TORCHINDUCTOR_CACHE_DIR names"
_FOLDERS = "; if compiled code cannot be written, set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to writable folders"


class Unavailable(Exception):
    """Error of a backend that cannot compile a call, or finds no kernel."""


class _DifferentiatedOnce(torch.autograd.Function):
    """Gradients, unchanged, with an error in place of their derivatives, which autograd alone may take for 0."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *gradients_and_inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return gradients_and_inputs[:count]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(ONCE_ONLY.format(ctx.name))


def differentiated_once(name: str, gradients: Sequence[Tensor | None], *inputs: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a backend that has no second derivatives, which say so when they are differentiated.

    inputs: what the gradients depend on, if the autograd graph does not say so.
    """
    given = [x for x in gradients if x is not None]
    made = iter(_DifferentiatedOnce.apply(name, len(given), *given, *inputs))
    return tuple(None if x is None else next(made) for x in gradients)


def with_gradients_once(
    name: str, out: Tensor, kernel: str, *, by_compiler: bool = False,
    again: Callable[[Any, Sequence[bool], Tensor], Sequence[Tensor | None]] | None = None,
) -> Tensor:  # fmt: skip
    """Return an output of torch's kernel whose gradients say that they have no derivatives.

    kernel: how torch calls the kernel's node in the autograd graph. The output may be a view of what that made.
    again: makes of this node, which of q, k and v need a gradient, and that of the output gradients with derivatives.
    by_compiler: whether torch compiled the gradients. Then it computes none that are to be differentiated.
    """
    node = out.grad_fn
    for _ in range(3):
        if node is None or node.name().startswith(kernel):
            break
        node = node.next_functions[0][0] if node.next_functions else None
    else:
        return out
    if node is not None and by_compiler:

        def refuse(_: Sequence[Tensor | None]) -> None:
            if torch.is_grad_enabled():
                raise RuntimeError(ONCE_ONLY.format(name))

        node.register_prehook(refuse)
    elif node is not None:

        def note(gradients: Sequence[Tensor | None], upstream: Any) -> tuple[Tensor | None, ...] | None:
            # Under torch.func, which differentiates all that it can, torch itself says what has no derivatives.
            if not torch.is_grad_enabled() or compat.transforms_active():
                return None
            if again is None or upstream[0] is None:
                return differentiated_once(name, gradients)
            made = again(node, [x is not None for x in gradients[:3]], upstream[0])
            return *made, *[None] * (len(gradients) - 3)

        node.register_hook(note)
    return out


class RefusedByAll(RuntimeError):
    """Error of a call that no other backend is to run either."""


class PageTable(NamedTuple):
    """The numbers of keys of sequences, and the pages in which they lie, see `flexmasks.paged_attention`."""

    lens: Tensor
    table: Tensor


class Plans(NamedTuple):
    """A call's mask and score change, planned, and its pages: what the forms that a kernel reads are made of."""

    mask: Any  # MaskPlan or GivenPlan
    score: Any = None  # ScorePlan
    pages: PageTable | None = None
    encoded: Any = None  # in a graph of torch.compile what the plans are of, see `backends.encoded`


class BlocksAndScore(NamedTuple):
    """A mask as its blocks, with the function of partial ones, and a score change as a function."""

    block_mask: compat.BlockMask
    score_mod: Callable[..., Tensor] | None

    @classmethod
    def of(cls, plans: Plans) -> BlocksAndScore:
        return cls(plans.mask.block_mask, None if plans.score is None else plans.score.mod())


class Kernel:
    """Base of kernels: functions of q, k, v, sinks and forms, for all calls that differ in the values of tensors only.

    A kernel holds no tensor. `forms` makes what it reads of a mask and a score change.
    """

    key: Hashable = None  # of what was compiled; where there is one, the first call is differentiated
    why_data: str = ""  # why the kernel reads the mask as data, or ""
    uncompiled: Any = None  # of a kind whose calls wait with compiling, see `waiting.Uncompiled`

    @property
    def fits_by_values(self) -> bool:
        """Whether it runs some calls of a kind only, and values of tensors tell which."""
        return False

    def forms(self, plans: Plans) -> tuple[Any, ...]:
        """Return what the kernel reads of mask, score change and pages. Raises Unfit.

        It runs again for new tensors of later calls, while `ready` and `first` run for the first one only.
        """
        return ()

    def confirm(self, forms: tuple[Any, ...]) -> None:
        """Wait for values on which forms of new tensors rest, and raise Unfit for others. A call does it by itself."""

    def starts(self, forms: tuple[Any, ...]) -> Tensor | None:
        """Return where sequences of queries start, end to end in all rows, int32 [N + 1], None if each row is one."""
        return None

    def folds_sinks(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> bool:
        """Return whether the kernel takes sinks into output and lse."""
        return False

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the lse or None; k and v are caches if the forms have a page table.

        sinks: None if the kernel does not fold them in. Raises Unavailable if it cannot be compiled.
        """
        raise NotImplementedError

    def compiles(self, forms: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> str:
        """Say whether a call would compile."""
        return "no: it runs without compiling" if self.uncompiled is None else str(self.uncompiled.says)

    def instead_of_blocks(self, forms: tuple[Any, ...]) -> str:
        """Say what takes the place of a plan of blocks, or "" if nothing does."""
        return ""

    def blocks(self, plans: Plans) -> Blocks:
        """Return the mask's blocks in the size that the kernel takes."""
        blocks: Blocks = plans.mask.blocks()
        return blocks

    def ready(self, inputs: Inputs) -> Ready:
        """Return the kernel with the forms of a first call. Raises Unfit."""
        return Ready(self, self.forms(inputs.plans))

    def first(self, call: Call, inputs: Inputs) -> Result:
        """Run the first call of its kind. Raises Unfit."""
        return proven(call, self.ready(inputs), inputs)


class Ready(NamedTuple):
    """A kernel with the forms of a mask and a score change: all of a call but q, k, v and sinks."""

    kernel: Kernel
    forms: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that keeping the forms takes."""
        return sum(map(bytes_of, self.forms))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Result:
        if sinks is not None and not self.kernel.folds_sinks(q, k, v, sinks):
            sinks = None
        out, lse = self.kernel(q, k, v, sinks, *self.forms)
        return Result(out, lse, self, sinks is not None)


class Result(NamedTuple):
    """Output and lse of a call, and what runs it again if that may be kept.

    has_sinks: the kernel has folded the call's sinks into both.
    faster: a kernel that would have run it, but for the values of its tensors.
    """

    out: Tensor
    lse: Tensor | None
    ready: Ready | None = None
    has_sinks: bool = False
    faster: Kernel | None = None


class Inputs(NamedTuple):
    """The tensors of a call, whose facts are a Call. k and v are caches if the plans have a page table."""

    q: Tensor
    k: Tensor
    v: Tensor
    # Logits of attention sinks. A kernel that knows none gives the lse, into which they are folded.
    sinks: Tensor | None
    plans: Plans


class Operand(NamedTuple):
    """What backends ask of q, k or v."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_negated: bool

    @classmethod
    def of(cls, x: Tensor) -> Operand:
        return cls(x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_neg())

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


class Pages(NamedTuple):
    """Facts of a call whose k and v lie in pages, as `flexmasks.paged_attention` takes them."""

    k_cache: Operand
    v_cache: Operand
    band: Band | None  # the mask inside a sequence, without its length, as a window
    are_last: bool  # the queries are the last ones of each sequence


@dataclass(frozen=True)
class Call:
    """Facts of one call of attention, by which a backend is chosen; its tensors are Inputs.

    The plans of its mask and score answer for structures. They make tensors only where forms are asked for.
    """

    q: Operand
    k: Operand  # with pages, of the keys of a sequence by themselves
    v: Operand
    mask: MaskPlan | GivenPlan
    score: ScorePlan | None
    q_offset: int | None  # None if a tensor says where queries start
    scale: float | None
    with_lse: bool
    kernel_options: dict[str, Any] | None
    needs_grad: bool  # q, k, v or a captured tensor needs a gradient
    learns: bool  # a captured tensor of the mask or score needs a gradient
    context: Context
    has_sinks: bool = False
    pages: Pages | None = None

    @property
    def is_traced(self) -> bool:
        """Whether torch.compile traces the call: tensors have no values, and lengths may be symbolic."""
        return self.context.is_compiling

    @property
    def parts(self) -> list[Any]:
        """The mask, and the score change if there is one."""
        return [self.mask] if self.score is None else [self.mask, self.score]

    @property
    def what(self) -> str:
        """The mask, and the score change if there is one, as their authors call them."""
        return self.mask.what if self.score is None else f"{self.mask.what} with score {self.score.what}"

    @property
    def cap(self) -> float | None:
        """The cap, if the score change is a soft-cap."""
        return None if self.score is None else self.score.cap

    @functools.cached_property
    def kernel_key(self) -> tuple[Hashable, Hashable]:
        """Keys of the functions of mask and score, with their constants."""
        return self.mask.kernel_key, None if self.score is None else self.score.kernel_key

    @functools.cached_property
    def shapes(self) -> tuple[Any, ...] | None:
        """Where queries start if it is a number, and shapes of captured tensors; None if they cannot be read."""
        if any(part.opaque for part in self.parts):
            return None
        return (self.q_offset, *(part.shapes for part in self.parts))

    def numbers_of(self, part: Any) -> Numbers | None:
        """Return the numbers of the mask or score change; None if they cannot be read, or torch traces."""
        return None if part is None or self.is_traced or self.shapes is None else part.numbers

    @property
    def has_number_tensors(self) -> bool:
        """Whether a captured tensor is 0-dimensional."""
        return any(part.has_number_tensors for part in self.parts)

    @property
    def holds_aliases(self) -> bool:
        """Whether the functions hold aliases instead of the user's tensors, so that what is made ready may be kept."""
        return all(part.holds_aliases for part in self.parts)

    @property
    def device_type(self) -> str:
        return self.q.device.type

    @property
    def on_gpu(self) -> bool:
        return self.device_type == "cuda"

    @property
    def dtype(self) -> str:
        """Name of the dtype of q, without `torch.`."""
        return str(self.q.dtype).removeprefix("torch.")

    @functools.cached_property
    def outcome_key(self) -> Hashable:
        """Key of what decides whether a backend can run the call, without lengths."""
        q = self.q
        sizes = q.shape[3], self.v.shape[3]
        starts_by_tensor, in_pages = self.q_offset is None, self.pages is not None
        flags = self.needs_grad, self.has_sinks, q.shape[1] != self.k.shape[1], starts_by_tensor, in_pages
        layouts = tuple(map(_layout, (q, self.k, self.v)))
        return self.kernel_key, q.dtype, q.device, sizes, flags, layouts

    def resized(self, block_size: tuple[int, int]) -> Call | None:
        """Return the call with blocks of a size, or None: a user's own blocks have one size only."""
        mask = self.mask.resized(block_size)
        return None if mask is None else replace(self, mask=mask)

    @functools.cached_property
    def findings(self) -> dict[bool, tuple[str, ...]]:
        """What a look at the functions of the mask, False, and of the score, True, has found; see `forms.outside`."""
        return {}


def _layout(x: Operand) -> Hashable:
    """Return the order of a tensor's dimensions, and their steps of 0 and 1."""
    if x.is_contiguous():
        return None
    strides = x.strides
    return tuple(sorted(range(len(strides)), key=strides.__getitem__)), tuple(min(n, 2) for n in strides)


def exports_any_length(q: Tensor | Operand, k: Tensor | Operand) -> bool:
    """Return whether torch.export makes a program for more than one length.

    Then no decision may rest on a comparison of lengths: it would hold for some of them only.
    """
    return compat.is_exporting() and not all(map(compat.has_static_value, (q.shape[2], k.shape[2])))


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message.

    If a file cannot be written, or torch's compiler read a damaged one, the variables that name its folders follow.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    if cannot_write(error):
        return f"{line}{_FOLDERS}"
    is_of_compiler = type(error).__name__ == "InductorError"
    return f"{line}{_DAMAGED}" if is_of_compiler and cannot_read(error) else line


def raise_passing_error(error: Exception) -> None:
    """Raise the error, among an error and its causes, that says nothing about a backend.

    Either memory ran out, or torch's activation checkpointing stops here because it has all that it needs.
    """
    passing = passing_error(error)
    if passing is not None:
        raise passing from None


@contextlib.contextmanager
def failures_are_unavailable() -> Iterator[None]:
    """Raise Unavailable in place of other errors, but for missing memory.

    flash-attn-4 and cuDNN compile at the first call, and raise errors of any type.
    """
    try:
        yield
    except Unavailable:
        raise
    except Exception as error:
        raise_passing_error(error)
        raise Unavailable(first_line(error)) from error


def proven(call: Call, ready: Ready, inputs: Inputs) -> Result:
    """Run a call, and differentiate the first call of its kind.

    A failure of the gradient is then raised while another backend can still run the call. If memory runs out meanwhile,
    the next call of the kind is differentiated.
    """
    q, k, v, sinks, _ = inputs
    if ready.kernel.key is not None and call.needs_grad and any(x.requires_grad for x in (q, k, v)):
        kind = ready.kernel.key, call.outcome_key
        unproven = _PROVEN.get(kind) is None and not compat.transforms_active()
        if unproven and _has_gradients(ready, inputs):
            _PROVEN.put(kind, (), True, FACT)
    return ready(q, k, v, sinks)


def _has_gradients(ready: Ready, inputs: Inputs) -> bool:
    """Differentiate a call; return False if memory runs out, and raise Unavailable for another error.

    All tensors of it are free when the call itself runs.
    """
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs[:3]]
    with beside_saved_tensors_hooks():  # activation checkpointing must not count its tensors
        q, k, v = leaves
        result = ready(q, k, v, None if inputs.sinks is None else inputs.sinks.detach())
    outputs = [x for x in result[:2] if x is not None]
    try:
        wanted = [x for x in leaves if x.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.zeros_like(x) for x in outputs])
    except Exception as error:
        if passing_error(error) is not None:
            return False
        raise Unavailable(first_line(error)) from error
    return True


_LONGEST_REST = 64  # calls of a kind for which a kernel that did not fit their values is not asked


class Kind:
    """All calls that differ from a first one in the values of tensors only. It keeps no tensors."""

    others: Kind | None = None  # runs those with values that the kernel does not fit
    is_unrun = False  # no call has run by the kernel, which the first one did not fit
    _refusals = _rest = 0  # refusals in a row, and for how many calls the kernel is not asked

    def __init__(self, kernel: Kernel, plans: Plans, tensors: Sequence[Tensor], where_last: Tensor | None) -> None:
        """Raises Opaque if the first call does not tell how others are planned.

        tensors: what the first call read. With pages, the last two are lengths and page table.
        where_last: where the last queries of each sequence start, if the plans read that.
        """
        places = {id(t): n for n, t in enumerate(tensors)}
        if len(places) < len(tensors):
            raise Opaque("one tensor in two places, which may be two tensors in the next call")
        self.kernel, self._has_pages = kernel, plans.pages is not None
        self._q_len = 0
        if where_last is not None:
            self._q_len, places[id(where_last)] = plans.mask.size.q_len, len(tensors)
        # Where a score's tensors are new in each call, the mask is not, and caches have what was made of it.
        self._finds_mask = plans.score is not None and plans.score.value._is_drawn()
        self._plans = [(plan.template(), [_place_of(t, places) for t in plan.inputs]) for plan in plans[:2] if plan]

    def plans(self, tensors: Sequence[Tensor]) -> Plans:
        """Return the plans of a call with these tensors, of which nothing is made yet.

        Gradients flow through those tensors alone that functions read.
        """
        tensors = list(tensors)
        pages = PageTable(*tensors[-2:]) if self._has_pages else None
        if self._q_len:
            tensors.append(offset_of_last(tensors[-2].detach(), self._q_len))
        plans = [template.with_tensors([tensors[n] for n in places]) for template, places in self._plans]
        mask, score, *_ = *plans, None
        mask.is_of_template = not self._finds_mask
        return Plans(mask, score, pages)

    def in_turn(self, refused: Kernel | None = None) -> list[Kind]:
        """Return this kind and that of other values, in the order in which a call is to try them.

        refused: a kernel that has run the call, and then found that it does not fit the values.

        After a refusal the next call asks the kernel again, before it runs. After more in a row fewer calls do, so that
        those of values that never fit pay little for it.
        """
        if refused is None and not (self._rest and self.others):
            return [self, self.others] if self.others else [self]
        if refused is None:
            self._rest -= 1
        elif refused is self.kernel:
            self.refuse()
        return [self.others] if self.others and refused in (None, self.kernel) else []

    def refuse(self) -> None:
        """Note that the kernel does not fit the values of a call."""
        self._refusals += 1
        self._rest = min(2 ** (self._refusals - 1), _LONGEST_REST) - 1

    def ready(self, tensors: Sequence[Tensor]) -> tuple[Ready, Plans]:
        """Return the kernel with the forms of a call with these tensors, and its plans. Raises Unfit."""
        plans = self.plans(tensors)
        try:
            made = Ready(self.kernel, self.kernel.forms(plans))
            if self._refusals:
                self.kernel.confirm(made.forms)
                self._refusals = 0
        except Unfit as reason:
            if not isinstance(reason, Outgrown):
                self.refuse()
            raise
        return made, plans


def _place_of(tensor: Tensor, places: dict[int, int]) -> int:
    place = places.get(id(tensor))
    if place is None:
        raise Opaque("a tensor that was made of those of the call")
    return place
