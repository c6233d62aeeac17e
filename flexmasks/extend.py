"""What code around this library builds on, beyond the public names of `flexmasks`.

It is for frameworks that call `flexmasks.attention`, for layouts that take a call apart and put its results together,
for pictures and counts of masks, and for kernels of your own. `flexmasks.integrations`, `trees`, `weighing`,
`pictures`, `asking` and `bench` import from here and from `flexmasks` only.

- Public calls: `says_what_to_write`, `in_message`, `as_number`, `device_named` and `progress` make errors and progress
  look like the library's. `from_arguments`, `definition` and `define` read masks and scores as users write them
  (`MaskLike`, `ScoreLike`), `Alignment` is where queries start, and a `Definition` has a `Parameter` for each of the
  function's.
- A mask that is a tensor, as torch's scaled_dot_product_attention takes it: `mask_and_score` gives what
  `flexmasks.attention` takes in place of it.
- What a mask or score is made of: `definition_of`, `inside`, `tensors_of`, `implied_size`, `accepts`, `says_all`.
- A mask over lengths, outside of a call: `MaskOverLengths`, `ScoreOverLengths`, `band_of`, `over_indices`; `shown_by`
  is the mask that kernels read in a BlockMask. `flatten` takes a mask apart into a structure and the tensors and
  numbers that it reads, `reads_outside` is a function of the pairs at which another one reads outside of tensors.
- A part of a call: `PartOfCall` and `part_of` give mask and score for some batch elements, heads and positions.
  `check_placements`, `users_line`, `whole`, `as_sharded` and `joined` are for DTensors.
- A mask as what it computes: `formula_of` and `expression_of` call a function once and write an `Expression` down;
  `are_same`, `indices_in` and `value_of` read it.
- Dropout of attention weights: `dropout_of` makes a `Dropout` of arguments, a `Seed` among them, and `shared_seed` lets
  processes draw alike.
- The pairs of a call: `PairsOfCall` has the functions of mask and score, `over_indices` and `over_visible` run them.
- The road of a call: `plan_of_step`, `source_of`, `under_autocast`, `copy`. `Kept` and `key_of` find again what
  was made of a mask or of tensors.
- What is true around a call: `is_invariant` says whether it is inside `flexmasks.invariant`.
- Graphs: `is_compiling`, `constants` and `constant_in_graphs` are for torch.compile, `is_capturing` for CUDA graphs.
  `group_timeout` and `all_to_all_single` stand for names of torch's processes that are not public in all of its
  versions.
- A backend: `add_backend` takes a `Backend`, which decides on a `Call` and has a `Kernel` for it, or raises
  `Unavailable`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexmasks.blocks.build import build, materialize
from flexmasks.blocks.counts import Blocks
from flexmasks.blocks.decide import dependence
from flexmasks.blocks.difference import Difference, Side, difference
from flexmasks.blocks.elements import over_indices, over_visible
from flexmasks.blocks.limits import Work, progress
from flexmasks.blocks.lists import of_block_mask
from flexmasks.blocks.reads import reads_outside
from flexmasks.blocks.strips import Counts, count_in_strips, first_key, queries_that_see, visible_in_strips
from flexmasks.cache import ENTRY, PLANS, Part, bytes_of
from flexmasks.compat import BlockMask, constant_in_graphs, constants, group_timeout, is_compiling
from flexmasks.context import is_capturing, is_invariant
from flexmasks.kernels.wide import copy
from flexmasks.planning import Plan
from flexmasks.plans.checks import check_sinks
from flexmasks.plans.held import Sizes, without_plan
from flexmasks.plans.lengths import Lengths, plan_mask
from flexmasks.plans.naming import check_open_extents, named, naming
from flexmasks.plans.portable import PortableBlockMask, function_of_lists
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.sizes import shifted_mask, sized
from flexmasks.spec.arguments import Alignment, MaskLike, ScoreLike, Seed, from_arguments
from flexmasks.spec.bands import Band, band_of
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import Definition, define, definition
from flexmasks.spec.expressions import Expression, are_same, expression_of, indices_in, recorded, value_of
from flexmasks.spec.pairs import MaskAndScore, mask_and_score
from flexmasks.spec.parameters import Parameter, Size, as_number, device_named, in_message, listed
from flexmasks.spec.parts import PartOfCall, part_of
from flexmasks.spec.structure import Opaque, flatten
from flexmasks.spec.structure import key_of as _key_of
from flexmasks.spec.values import Mask, Modifier, Score

if TYPE_CHECKING:
    from flexmasks.backends.call import Call, Kernel, Unavailable
    from flexmasks.backends.table import Backend
    from flexmasks.compat import all_to_all_single
    from flexmasks.dropout import Dropout, dropout_of
    from flexmasks.layouts import under_autocast
    from flexmasks.sharded import as_sharded, check_placements, joined, shared_seed, users_line, whole

# Names whose modules take long to import.
_MODULES = {
    **dict.fromkeys(("Call", "Kernel", "Unavailable"), "flexmasks.backends.call"),
    "Backend": "flexmasks.backends.table",
    "all_to_all_single": "flexmasks.compat",
    "under_autocast": "flexmasks.layouts",
    **dict.fromkeys(("Dropout", "dropout_of"), "flexmasks.dropout"),
    **dict.fromkeys(
        ("as_sharded", "check_placements", "joined", "shared_seed", "users_line", "whole"), "flexmasks.sharded"
    ),
}

__all__ = [
    "says_what_to_write", "in_message", "as_number", "device_named", "progress",
    "from_arguments", "MaskLike", "ScoreLike", "Alignment", "definition", "define", "Definition", "Parameter",
    "mask_and_score", "MaskAndScore",
    "definition_of", "inside", "tensors_of", "implied_size", "accepts", "says_all",
    "MaskOverLengths", "ScoreOverLengths", "Size", "Blocks", "Band", "band_of", "over_indices", "shown_by",
    "reads_outside", "flatten", "PairsOfCall", "over_visible",
    "PartOfCall", "part_of", "check_placements", "users_line", "whole", "as_sharded", "joined",
    "formula_of", "expression_of", "Expression", "are_same", "indices_in", "value_of",
    "Dropout", "dropout_of", "Seed", "shared_seed",
    "plan_of_step", "source_of", "under_autocast", "copy", "Kept", "key_of",
    "is_invariant", "is_compiling", "constants", "constant_in_graphs", "is_capturing", "group_timeout",
    "all_to_all_single",
    "add_backend", "Backend", "Call", "Kernel", "Unavailable",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value


Value = TypeVar("Value")


# --- what a mask or score is made of ---


def definition_of(value: Modifier) -> Definition:
    """Return the function, the parameters and the hooks of a mask or score."""
    return value._definition


def inside(value: Modifier) -> list[Modifier]:
    """Return a mask or score, and all masks or scores inside it."""
    return value._inside()


def tensors_of(value: Modifier) -> list[Tensor]:
    """Return the tensors among parameters and captured variables, without variables that cannot be read."""
    return value._tensors()


def implied_size(value: Mask | Score, dimension: str) -> int | None:
    """Return the size that the shapes of parameters imply for B, H, Q, KV or S, or None."""
    return value._implied_size(dimension)


def accepts(value: Mask | Score, size: Size) -> bool:
    """Return whether parameters fit the sizes of a call."""
    with contextlib.suppress(ValueError, TypeError):
        value._resolve(size)
        return True
    return False


def formula_of(mask: Mask) -> Any:
    """Return what a mask computes of its indices, an Expression or a constant.

    Raises whatever the mask's functions do, if they take tensors only.
    """
    return recorded(mask._bind(mask._resolve(None)))


def says_all(value: Mask | Score) -> bool:
    """Return whether the repr of a mask or score says all that it reads."""
    return value._is_by_library() and not value._holds_lists() and not value._tensors()


# --- masks and scores over lengths ---


class MaskOverLengths:
    """A mask over lengths that a user gives, as in `flexmasks.block_mask`. Its blocks are searched part by part, in
    bounded memory, for any length.

    Args:
        call: the name of the public call, with which errors begin.
        mask: the mask.
        lengths: `q_len`, `kv_len`, `batch`, `heads`, `block_size` and `q_offset`, as in `flexmasks.block_mask`.

    Attributes:
        mask: the mask.
        size: batch, heads, q_len, kv_len and device.
        block_size: queries and keys of a block.
        function: whether pairs of indices (b, h, q, kv) are visible, where q starts at 0 whatever `q_offset` is.

    Raises:
        ValueError, TypeError: a length does not fit the mask, or its function fails, also in the methods.

    Example:
        >>> import flexmasks
        >>> from flexmasks.extend import MaskOverLengths
        >>> mask = MaskOverLengths("my_library.draw", flexmasks.get_mask("causal"), q_len=1024)
        >>> mask.counts().full, [visible.sum().item() for _, visible in mask.strips((0, 256))]
        (28, [3])
    """

    def __init__(self, call: str, mask: Mask, **lengths: Any) -> None:
        plan = plan_mask(call, mask, Lengths(**lengths))
        self.mask, self.size, self.block_size = mask, plan.size, plan.block_size
        self.function = shifted_mask(mask._bind(mask._resolve(sized(plan.size, plan.offset))), plan.offset)
        self._plan = plan
        check_open_extents(mask, self.function, self.size, plan.open_extents)

    def strips(self, rows: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        """Yield strips of the queries start .. stop - 1: the position of the first query, and which blocks have visible
        pairs, bool [B, H, rows, columns]. B and H are 1 if the mask does not depend on the index. Blocks of queries
        start at the first one.
        """
        size = self.size
        with naming(self.mask):
            yield from visible_in_strips(
                self.function, size.batch, size.heads, rows, size.kv_len, self.block_size, size.device
            )

    def counts(self, b: int = 0, h: int = 0) -> Counts:
        """Return the numbers of empty, partial and full blocks of a batch element and head."""
        with naming(self.mask):
            return count_in_strips(self._of(b, h), self.size.q_len, self.size.kv_len, self.block_size, self.size.device)

    def visible_in(self, cell: tuple[int, int], b: int = 0, h: int = 0) -> tuple[Tensor, Tensor]:
        """Return in which cells of (queries, keys) some pair is visible, and in which all are, bool [rows, columns].

        Where the search, which is bounded, did not find out, some pair counts as visible. Cells that reach further than
        the mask count what they have of it.
        """
        mod, (q_len, kv_len) = self._of(b, h), (self.size.q_len, self.size.kv_len)
        lengths = -(-q_len // cell[0]) * cell[0], -(-kv_len // cell[1]) * cell[1]
        repeating: Callable[..., Tensor] = mod
        if lengths != (q_len, kv_len):  # positions past the edge repeat the last query and the last key
            repeating = lambda b, h, q, kv: mod(b, h, q.clamp(max=q_len - 1), kv.clamp(max=kv_len - 1))  # noqa: E731
        layout = build(repeating, 1, 1, *lengths, self.size.device, cell, work=Work.bounded(math.prod(lengths)))
        partial, full = (x[0, 0].cpu() for x in of_block_mask(layout.block_mask(repeating)))
        return partial | full, full

    def difference(self, other: MaskOverLengths) -> Difference:
        """Return how many pairs this mask (a) and another one (b) over the same lengths show alone, exactly."""
        size = self.size
        sides = []
        for mask in (self, other):
            with naming(mask.mask):
                materialize(mask.function, size.batch, size.heads, 1, 1, mask.size.device)
            sides.append(Side(named(mask.mask, mask.function), mask.size.device))
        return difference(sides[0], sides[1], size.batch, size.heads, size.q_len, size.kv_len)

    def seeing(self, mask_mod: Callable[..., Tensor] | None = None, *, keys: bool = False) -> Tensor:
        """Return which queries see a key, bool [B, H, Q]; B and H are 1 if nothing depends on the index. With `keys`,
        return which keys a query sees, bool [B, H, KV]. No more memory is needed than for the blocks of the mask.

        mask_mod: a function of the same indices, by default the mask's.
        """
        size, shows = self.size, mask_mod or self.function
        rows, columns = (size.kv_len, size.q_len) if keys else (size.q_len, size.kv_len)
        turned: Callable[..., Tensor] = lambda b, h, q, kv: shows(b, h, kv, q)  # noqa: E731
        with naming(self.mask):
            return queries_that_see(turned if keys else shows, size.batch, size.heads, rows, columns, size.device)

    def first_key(self, b: int, h: int, q: int, mask_mod: Callable[..., Tensor] | None = None) -> int:
        """Return the first key that a query sees, which sees one. `mask_mod` is as in `seeing`."""
        with naming(self.mask):
            return first_key(mask_mod or self.function, b, h, q, self.size.kv_len, self.size.device)

    def of_positions(self, mask_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function of positions of queries as one of queries that are counted from 0, as `function` is."""
        return shifted_mask(mask_mod, self._plan.offset)

    def why_bits(self) -> str:
        """Return why kernels get the bits of the mask in place of its function, or ""."""
        from flexmasks.backends.forms import why_bits_of  # its module takes long to import

        return why_bits_of(self._plan)

    def compares_floats(self) -> bool:
        """Return whether the mask's function compares floating numbers."""
        from flexmasks.backends.operations import compares_floats

        size = self.size
        return compares_floats(self.function, size.device, (size.batch, size.heads, size.q_len, size.kv_len))

    def depends(self, n: int, dim: int) -> bool:
        """Return whether the mask differs among n batch elements (dim 0) or heads (dim 1)."""
        try:
            return dependence(self.function, *((n, 1), (1, n))[dim], self.size.device)[dim] > 1
        except (ValueError, TypeError, LookupError, RuntimeError):  # the function has data for one index only
            return True

    def _of(self, b: int, h: int) -> Callable[..., Tensor]:
        return lambda _b, _h, q, kv: self.function(_b + b, _h + h, q, kv)


class ScoreOverLengths:
    """A score change over lengths that a user gives. Arguments, attributes and errors are those of `MaskOverLengths`.

    Example:
        >>> import torch, flexmasks
        >>> from flexmasks.extend import ScoreOverLengths
        >>> score = ScoreOverLengths("my_library.draw", flexmasks.get_score("softcap", cap=2.0), q_len=64)
        >>> zero = torch.tensor([0])
        >>> score.changed(torch.zeros(1, 1, 1, 1), zero, zero, zero, zero).item()
        0.0
    """

    def __init__(self, call: str, score: Score, **lengths: Any) -> None:
        self.score = score
        self.size, _, offset = Lengths(**lengths).check(call, score)
        self._changed = over_indices(ScorePlan(score, self.size, offset).mod(), (0,))

    def changed(self, scores: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return scores [b, h, q, kv] as the score change makes them at these indices, which are vectors."""
        with naming(self.score), torch.no_grad():
            return self._changed(scores, b, h, q, kv)


# --- the road of a call ---


class PairsOfCall(NamedTuple):
    """What a call of `flexmasks.attention` computes of its pairs, for calls that look at some of them.

    q, k: the queries and keys, k of q's batch size.
    scale: the factor of q @ k^T.
    mask: whether pairs of indices (b, h, q, kv) are visible, where q starts at 0 whatever `q_offset` is, or None if all
        are; `over_indices` runs it.
    score: the score change, likewise, or None; `over_visible` runs it.
    check: raises torch's error if a tensor that both read was changed in place since.

    Example:
        >>> import torch
        >>> from flexmasks.extend import PairsOfCall, over_indices
        >>> q, index = torch.randn(1, 2, 100, 16), torch.arange(100)
        >>> pairs = PairsOfCall.of(q, q, mask="sliding_window", params={"window": 4})
        >>> over_indices(pairs.mask)(index[:1], index[:1], index[-2:], index).sum(-1)
        tensor([[[5, 5]]])
    """

    q: Tensor
    k: Tensor
    scale: float
    mask: Callable[..., Tensor] | None
    score: Callable[..., Tensor] | None
    check: Callable[[], None]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, **arguments: Any) -> PairsOfCall:
        """Check the arguments of a call: q and k, and those of `flexmasks.attention` by their names.

        Raises the errors of `flexmasks.attention`, also inside torch.compile, where no value can be read.
        """
        from flexmasks import road  # this module and these take long to import
        from flexmasks.backends.reference import frozen_functions
        from flexmasks.layouts import as_kernels_read
        from flexmasks.request import Request

        road.refuse_in_graph(
            "a call that looks at pairs is not for torch.compile; torch.compiler.disable(function) breaks the graph."
        )
        if hasattr(q, "device_mesh") or hasattr(k, "device_mesh"):
            raise TypeError("flexmasks.attention: a call that looks at pairs takes no DTensors; pass x.to_local().")
        blocks = arguments.pop("mask") if isinstance(arguments.get("mask"), BlockMask) else None
        request = Request(block_mask=blocks, **arguments)
        if isinstance(q, Tensor):
            request = request._replace(q_offset=listed(request.q_offset, q.device), scale=as_number(request.scale))
        if request.sink_logits is not None:
            check_sinks(q, request.sink_logits)
        q, k, _ = as_kernels_read(q, k, k)
        call, plans, *_ = road.plan_call(q, k, k, without_plan(q, k, request))
        mask: Any = None if blocks is None else shown_by(blocks)
        if blocks is None and plans.mask.mask.name != "full":
            mask = plans.mask.bound()
            with naming(plans.mask.mask):  # of errors that the function raises
                materialize(mask, q.shape[0], q.shape[1], 1, 1, q.device)
        score = None if plans.score is None else plans.score.mod()
        scale = 1 / math.sqrt(q.shape[3]) if call.scale is None else call.scale
        return cls(q, k, scale, *frozen_functions(mask, score, q))


def plan_of_step(mask: Mask, q_len: int, kv_len: int, q_offset: int | Tensor) -> Plan:
    """Return a plan for the layers of one step: the first call plans for all.

    Unlike one of `flexmasks.plan` it has no device and no batch size, copies no tensors, and takes no `update`.
    torch.compile can trace this.
    """
    return Plan(mask, None, Sizes(q_len, kv_len, None, None, None), q_offset, of_one_step=True)


def source_of(block_mask: BlockMask) -> tuple[Mask, int | Tensor] | None:
    """Return the mask that `flexmasks.block_mask` made a block mask of, and where its queries start.

    The result is None for another library's block mask.
    """
    if not isinstance(block_mask, PortableBlockMask):
        return None
    return block_mask.source.mask, block_mask.source.q_offset


def shown_by(block_mask: BlockMask) -> Mask:
    """Return what kernels show of a BlockMask: all pairs of its full blocks, and those pairs of its partial blocks that
    its function shows.

    Example:
        >>> import flexmasks
        >>> from flexmasks.extend import shown_by
        >>> blocks = flexmasks.block_mask("causal", 256)
        >>> blocks.mask_mod = flexmasks.get_mask("full")
        >>> flexmasks.dense_mask(shown_by(blocks), 256)[0, 0, 0].sum().item()
        128
    """
    name = f"BlockMask of {define('mask', block_mask.mask_mod).name}"
    return Mask._of(define("mask", function_of_lists(block_mask), name), {})


class Kept(Part[Value]):
    """Values that are made of tensors once, and found until one of the tensors changes or dies.

    name: under it `flexmasks.cache_info()["plans"].parts` counts them.

    Example:
        >>> import torch
        >>> from flexmasks.extend import Kept
        >>> lengths = Kept("my_library.lengths")
        >>> mask = torch.ones(2, 5)
        >>> first = lengths.made("sum", [mask], lambda: mask.sum(1))
        >>> first is lengths.made("sum", [mask], lambda: mask.sum(1))
        True
    """

    def __init__(self, name: str) -> None:
        super().__init__(PLANS, name)

    def made(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        make: Callable[[], Value],
        nbytes: Callable[[Value], int] = bytes_of,
    ) -> Value:
        """Return what `make` returned before for this key and these tensors, or call it.

        nbytes: the bytes of a value, roughly. By default those of a tensor, or of the parts of a NamedTuple or list.
        """
        value = self.get(key, tensors)
        if value is None:
            value = make()
            self.put(key, tensors, value, ENTRY + nbytes(value))
        return value


def key_of(value: Mask | Score) -> tuple[Hashable | None, list[Tensor]]:
    """Return a key of all that a mask or score reads but for tensors, and the tensors.

    The key is None if it reads objects that may change without notice.
    """
    tensors: list[Tensor] = []
    try:
        return _key_of(value, tensors), tensors
    except Opaque:
        return None, []


# --- backends ---


def add_backend(backend: Backend) -> None:
    """Let `flexmasks.attention` run calls by a kernel of your own: `backend="auto"` asks it before "reference", and its
    name as `backend` chooses it. Inside torch.compile it is asked only if it says `can_be_traced`.

    Raises ValueError if there is a backend of this name.

    Example:
        >>> from flexmasks.extend import Backend, Call, Kernel, add_backend
        >>> def refuses(call: Call) -> str | None:
        ...     return "it has no gradients" if call.needs_grad else None
        >>> class Mine(Kernel):
        ...     def forms(self, plans):
        ...         return (plans.mask.block_mask,)
        ...     def __call__(self, q, k, v, sinks, /, block_mask):
        ...         return my_kernel(q, k, v, block_mask), None
        >>> add_backend(Backend("mine", refuses, lambda call: Mine()))  # doctest: +SKIP
    """
    from flexmasks.backends.table import BACKENDS  # its module takes long to import

    if backend.name in BACKENDS:
        raise ValueError(f"flexmasks.extend.add_backend: there is a backend {backend.name!r}; take another name.")
    reference = BACKENDS.pop("reference")
    BACKENDS.update({backend.name: backend, "reference": reference})
