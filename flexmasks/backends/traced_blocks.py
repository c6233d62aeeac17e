"""Block masks inside torch.compile, and where queries start there, see `plans.alignment`."""

from __future__ import annotations

import dis
import logging
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmasks import compat
from flexmasks.backends.encoded import UNKNOWN, Encoded, errors_logged
from flexmasks.blocks.bits import can_be_bits, visible_in_words, words_of_pairs
from flexmasks.blocks.build import lists_of_blocks, materialize
from flexmasks.blocks.elements import with_indexing_by_numbers
from flexmasks.blocks.lists import lists_of, made_of
from flexmasks.graphs import in_graph
from flexmasks.kernels.operators import separate
from flexmasks.plans.alignment import are_equal, may_differ, of_word, reads_queries, unsaid
from flexmasks.plans.checks import ATTENTION, fail
from flexmasks.plans.data import reading_bits
from flexmasks.plans.plan import over_zeros
from flexmasks.plans.portable import OfMask, PortableBlockMask
from flexmasks.plans.sizes import Offset, shifted_mask, size_of, unread
from flexmasks.spec.code import plain_function
from flexmasks.spec.encoding import Unreadable, decode, encode
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, Modifier

_log = logging.getLogger("flexmasks")


def encode_mask(mask: Mask, device: torch.device) -> Any:
    """Return a mask encoded, or UNKNOWN if only torch's tracing can read it."""
    try:
        return encode(mask, device)
    except Unreadable as why:
        _log_unreadable(why.args[0])
        return UNKNOWN


@compat.constant_in_graphs
def _log_unreadable(why: str) -> None:
    _log.warning("%s Until then its blocks are found by a look at all pairs of queries and keys, at each run.", why)


def traced_block_mask(
    call: str, mask: Mask, q_len: Any, kv_len: Any, sizes: tuple[Any, Any], device: Any, block_size: Any, q_offset: Any
) -> compat.BlockMask:
    """Return what `flexmasks.block_mask` returns, by a plan that is part of the user's graph.

    Blocks are full or empty where bounds of the mask prove it, see `plans.bounds`.

    sizes: of batch and heads, or None.
    """
    kv_len, rows_and_columns = q_len if kv_len is None else kv_len, block_size
    if isinstance(block_size, int):
        rows_and_columns = block_size, block_size
    for name, n in (("q_len", q_len), ("kv_len", kv_len), ("batch", sizes[0]), ("heads", sizes[1])):
        if not isinstance(n, int) and not (n is None and name in ("batch", "heads")):
            fail(f"`{name}` must be an int of at least 1, got {type(n).__name__}.", call=call)
    batch, heads = sizes[0] or mask._implied_size("B"), sizes[1]
    _check_open_extents(call, mask, batch, heads)
    encoded = encode_mask(mask, torch.device("cpu") if device is None else torch.device(device))
    tensors = [] if encoded == UNKNOWN else [x for x in encoded.leaves if isinstance(x, Tensor)]
    start = torch.empty((), device=(tensors[0].device if tensors else "cpu") if device is None else device)
    q, k = start.expand(batch or 1, heads or 1, q_len, 1), start.expand(batch or 1, heads or 1, kv_len, 1)
    offset = aligned_traced(q, k, q_offset, encoded, None, False)
    size = unread(size_of(q, k), offset)
    if encoded == UNKNOWN:
        return of_bits((q_len, kv_len), bits_of_function(call, mask, size, offset, rows_and_columns), rows_and_columns)
    mask_mod = shifted_mask(mask._bind(mask._resolve(size)), offset)
    lists = planned_blocks(encoded, offset, q, k, rows_and_columns)
    arguments: Any = (q_len, kv_len), *lists, rows_and_columns, mask_mod
    made = PortableBlockMask(*arguments)
    made.source = OfMask(mask, batch or 1, heads or 1, offset)
    return made


def _check_open_extents(call: str, mask: Mask, batch: int | None, heads: int | None) -> None:
    """Check that a mask which may depend on the batch element or the head is given their numbers."""
    for inner in mask._inside():
        reads_b, reads_h = (False, False) if inner._definition.by_library else reads_batch_and_heads(inner)
        reads_h = reads_h or inner._implied_size("H") is not None
        for name, n, is_read in (("batch", batch, reads_b), ("heads", heads, reads_h)):
            if is_read and n is None:
                fail(f"mask {inner.name!r} may depend on the index that `{name}` counts: pass `{name}`.", call=call)


def bits_of_function(
    call: str, mask: Mask, size: Size, q_offset: Offset, block_size: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return words and table, see `plans.data.reading_bits`, and the lists of blocks of a function.

    Only torch's tracing can read it: it is asked for all pairs of queries and keys, at each run of the graph.
    """
    check_can_be_asked()
    if not can_be_bits(block_size):
        fail(f"the sizes of blocks must be powers of 2 from 32 on here, got {block_size}.", call=call)
    bound = shifted_mask(mask._bind(mask._resolve(size)), q_offset)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # torch takes no methods and partials
        return bound(b, h, q, kv)

    check_numbers(mask_mod, size.device)
    reads_b, reads_h = reads_batch_and_heads(mask)
    batch, heads = size.batch if reads_b else 1, size.heads if reads_h else 1
    with torch.no_grad():
        visible = materialize(mask_mod, batch, heads, size.q_len, size.kv_len, size.device)
        words = words_of_pairs(visible, block_size, is_traced=True)
        lists = lists_of_blocks(*visible_in_words(words))
        table = torch.arange(math.prod(words.shape[:4]), dtype=torch.int32, device=size.device).view(words.shape[:4])
    made = words.flatten(0, 3), table, *lists
    # torch's kernel for CPUs fails if the graph computes what it reads otherwise.
    return tuple([separate(x) for x in made]) if size.device.type == "cpu" else made


def check_can_be_asked() -> None:
    """Raise an error where torch.compile cannot ask a function for pairs."""
    if not compat.can_trace_transforms():
        fail(
            "inside an activation checkpoint torch.compile cannot read the function of the mask: write it at the top "
            "level of a module, with tensors and numbers as parameters after `*`, and pass these by name."
        )


def of_bits(lengths: tuple[int, int], made: Sequence[Tensor], block_size: tuple[int, int]) -> compat.BlockMask:
    """Return a block mask of what `bits_of_function` returned."""
    words, table, *lists = made
    return made_of(lengths, lists, block_size, reading_bits(words, table, block_size))


_NARROW = (torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16)


class _Narrow(TorchFunctionMode):
    """Notes whether a function computes with numbers of less than 32 bits, which kernels compute in other types.

    It may read and convert them, and compare numbers of one type that it read.
    """

    found: torch.dtype | None = None

    def __init__(self) -> None:
        super().__init__()
        self._read: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            self._read.append(out)
        elif isinstance(out, Tensor):
            tensors = [x for x in args if isinstance(x, Tensor) and x.dtype != torch.bool]
            numbers = [x for x in args if isinstance(x, int | float) and not isinstance(x, bool)]
            if out.dtype in _NARROW:
                self.found = out.dtype
            for x in tensors:
                if x.dtype in _NARROW:
                    # While torch traces, some operations, such as abs(x), pass a mode by.
                    is_read = any(x is known for known in self._read)
                    is_mixed = any(other.dtype != x.dtype for other in tensors)
                    if not is_read or is_mixed or not all(_holds(x.dtype, n) for n in numbers):
                        self.found = x.dtype
        return out


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Return whether a comparison with a number is the same in a dtype and in kernels."""
    if dtype.is_floating_point:
        return number == 0
    return isinstance(number, float) or torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def check_numbers(mask_mod: Callable[..., Tensor], device: torch.device) -> None:
    """Check that a mask's function that only torch's tracing can read computes in no less than 32 bits."""
    if not compat.can_trace_transforms():
        return
    narrow = _Narrow()

    def watched(*indices: Tensor) -> Tensor:
        with narrow:
            return mask_mod(*indices)

    with torch.no_grad():
        pair = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
        with_indexing_by_numbers(torch.vmap(watched))(*pair)  # torch traces one vmap in place of four
    if narrow.found is not None:
        fail(
            f"torch.compile may compute the mask's function otherwise than Python does, because it computes with "
            f"{narrow.found}: convert such numbers first, as in `table[q].int()` or `.float()`, or make the blocks "
            "outside, with flexmasks.block_mask(function, ..., as_data=True), and pass them as block_mask."
        )


def reads_batch_and_heads(mask: Modifier) -> tuple[bool, bool]:
    reads_b = reads_h = False
    for inner in mask._inside():
        function, bound = plain_function(inner._definition.function)
        found = _indices_read(function.__code__, bound) if isinstance(function, types.FunctionType) else (True, True)
        reads_b, reads_h = reads_b or found[0], reads_h or found[1]
    return reads_b, reads_h


@compat.constant_in_graphs
def _indices_read(code: types.CodeType, bound: int) -> tuple[bool, bool]:
    """Return whether code may read the first and the second of its arguments behind the bound ones."""
    if code.co_argcount < bound + 2:
        return True, True
    read = set(code.co_cellvars)
    for instruction in dis.get_instructions(code):
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        read.update(name for name in names if isinstance(name, str))
    return code.co_varnames[bound] in read, code.co_varnames[bound + 1] in read


@in_graph
def planned_blocks(
    encoded: Any, q_offset: Offset, q: Tensor, k: Tensor, block_size: tuple[int, int]
) -> tuple[Tensor | None, ...]:
    """Return the index tensors of a mask's blocks.

    encoded: the mask as `encode` returns it.
    """
    with errors_logged():
        return lists_of(Encoded(encoded, q_offset).plans(q, k).mask.resized(block_size).block_mask)


def aligned_traced(q: Tensor, k: Tensor, q_offset: Any, encoded: Any, encoded_score: Any, given_blocks: bool) -> Offset:
    """Return where queries start, see `plans.alignment`; a symbolic number becomes a tensor.

    given_blocks: the user gives the blocks, whose own offset is built in.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    if isinstance(q_offset, str):
        q_offset = of_word(ATTENTION, q_offset, q_len, kv_len)
    if q_offset is None:
        is_unknown = (encoded == UNKNOWN and not given_blocks) or encoded_score == UNKNOWN
        is_known = are_equal(q_len, kv_len) or not (is_unknown or _readers(encoded, encoded_score, q, k).shape[0])
        if not is_known and may_differ(q_len, kv_len):
            unsaid(ATTENTION, q_len, kv_len)
        return 0
    return in_graph_offset(cast(Offset, q_offset), q)


def in_graph_offset(q_offset: Offset, q: Tensor) -> Offset:
    """Return where queries start, as graphs take it; a symbolic number other than 0 becomes a tensor."""
    if isinstance(q_offset, Tensor):
        return q_offset
    # A comparison would tie an exported program to its result.
    if compat.has_static_value(q_offset) or (not compat.is_exporting() and q_offset == 0):
        return int(compat.as_constant(q_offset))  # a guard may have fixed a symbolic number
    return torch.full((q.shape[0],), q_offset, device=q.device)  # is planned like one that changes


@in_graph
def _readers(encoded: Any, encoded_score: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return a tensor as long as the number of functions that may read the query's position."""
    values = [decode(kind, x) for kind, x in (("mask", encoded), ("score", encoded_score)) if x not in (UNKNOWN, None)]
    with compat.without_modes():
        return torch.empty(sum(reads_queries(*over_zeros(v, size_of(q, k))) for v in values))
