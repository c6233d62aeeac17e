"""What is wrong with a mask, or worth knowing of it, each with a pair that shows it."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexmasks import Mask, get_mask
from flexmasks.asking.compare import Pair
from flexmasks.asking.proofs import Limits, check_without_sizes, found_over_all
from flexmasks.asking.subject import Subject, Subjects, sizes_of, subject_of, takes
from flexmasks.extend import (
    Alignment,
    MaskOverLengths,
    definition_of,
    flatten,
    implied_size,
    inside,
    reads_outside,
    says_what_to_write,
)

_CALL = "flexmasks.check"
Severity = Literal["error", "warning", "note"]
_Function = Callable[..., Tensor]
# How severe a finding is if the caller does not forbid it. An error is wrong whatever the mask is for.
KINDS: dict[str, Severity] = {
    "reads behind the end": "error",
    "reads before the start": "warning",
    "crosses a document": "error",
    "sees nothing": "warning",
    "sees the future": "note",
    "does not see itself": "note",
    "seen by nobody": "note",
    "differs by batch element": "note",
    "differs by head": "note",
    "ignores b": "note",
    "ignores h": "note",
    "differs by dtype": "warning",
    "compares floats": "note",
    "goes as bits": "note",
    "recompiles": "note",
    "not decided": "note",
}


class Finding(NamedTuple):
    """One thing that is true of a mask.

    kind: one of those that `flexmasks.check` lists.
    severity: "error", "warning" or "note".
    words: what was found, and how often.
    pair: batch element, head, query and key of the first pair that shows it, or None where no single pair does. As in
        `flexmasks.dense_mask`, queries count from 0 whatever `q_offset` is.
    """

    kind: str
    severity: Severity
    words: str
    pair: Pair | None = None

    def __str__(self) -> str:
        at = "" if self.pair is None else f", as at (b, h, q, kv) = {self.pair}"
        return f"{self.severity}: {self.kind}: {self.words}{at}"


class Findings(tuple[Finding, ...]):
    """All that was found, errors first. It is true if anything was found; `errors` are what must not be."""

    __slots__ = ()

    @property
    def errors(self) -> Findings:
        return Findings(found for found in self if found.severity == "error")

    def of(self, kind: str) -> Finding | None:
        """Return the finding of a kind, or None."""
        return next((found for found in self if found.kind == kind), None)

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "nothing found"


@says_what_to_write()
def check(
    mask: Subjects,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    q_offset: Alignment = None,
    document_ids: Tensor | Sequence[Any] | None = None,
    forbid: str | Sequence[str] = (),
    lengths: Literal["all"] | None = None,
    parameters: Limits | None = None,
    **params: Any,
) -> Findings:
    """Return what is wrong with a mask, or worth knowing of it, over these lengths: exactly, whatever its function is,
    and without the memory of all pairs.

    | kind | severity | found where |
    |---|---|---|
    | reads behind the end | error | an index is past the end of a captured tensor; nothing else is looked at then |
    | reads before the start | warning | an index is negative, for which Python takes an element from the end |
    | crosses a document | error | a query sees a key of another document, by `document_ids` |
    | sees nothing | warning | a query sees no key; an error if none does |
    | sees the future | note | a query sees a later key |
    | does not see itself | note | a query does not see the key at its own position |
    | seen by nobody | note | no query sees a key |
    | differs by batch element, differs by head | note | two see different pairs |
    | ignores b, ignores h | note | there are several batch elements or heads, and all see the same pairs |
    | differs by dtype | warning | indices in 32 bits, or captured tensors in 64, show other pairs |
    | compares floats | note | rounding may decide what is visible |
    | goes as bits | note | torch's compilers may get the function wrong, so that kernels get its bits |
    | recompiles | note | a number is compiled into kernels, or an object that is read may change unnoticed |
    | not decided | note | with `lengths="all"`, why one of these is not known |

    Args:
        mask: a name, Mask, function, plan, BlockMask, boolean tensor of pairs, or list of masks.
        q_len, kv_len, batch, heads, device, q_offset: as in `flexmasks.block_mask`; those of a plan or BlockMask, of
            which only other ones need be passed, are known.
        document_ids: the document of each position, [S] or [B, S], which no pair may cross. A mask that is given by
            name or as a function, and has a parameter of this name, gets it instead.
        forbid: a kind, or several, whose findings are errors too: what the mask is for tells that, not the mask. For a
            decoder it is "sees the future".
        lengths, parameters: as in `flexmasks.compare`. With `lengths="all"` the mask is asked whether it crosses a
            document, sees nothing, sees the future, does not see itself or is seen by nobody at any length, with as
            many queries as keys, and what is not found is proved not to occur. `document_ids` stand for any.
        params: parameters of a mask that is given by name or as a function.

    Returns:
        A tuple of findings, errors first. `errors` are those that are wrong or forbidden.

    Raises:
        ValueError, TypeError: a kind is unknown, a length or parameter does not fit, or the function fails.

    Example:
        >>> import flexmasks
        >>> flexmasks.check(lambda b, h, q, kv: q - kv <= 4, 1024, forbid="sees the future")
        error: sees the future: 1,023 of 1,024 rows see later keys, as at (b, h, q, kv) = (0, 0, 0, 1)
        >>> assert not flexmasks.check("causal", 1024).errors
        >>> flexmasks.check("prefix_lm", lengths="all", parameters={"prefix_len": (0, None)})
        note: sees the future: a query sees a later key with q_len=2, prefix_len=2, as at (b, h, q, kv) = (0, 0, 0, 1)
    """
    forbidden = [_kind(name) for name in ([forbid] if isinstance(forbid, str) else forbid)]
    if takes(mask, "document_ids"):
        params, document_ids = params | {"document_ids": document_ids}, None
    given = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads, "q_offset": q_offset, "device": device}
    documents = None if document_ids is None else get_mask("document", document_ids=document_ids)
    if lengths is not None or parameters is not None:
        check_without_sizes(_CALL, lengths, given)
        every = found_over_all(_CALL, mask, params, documents, parameters or {})
        return _sorted([Finding(kind, KINDS[kind], words, pair) for kind, words, pair in every], forbidden)
    subject = subject_of(mask, params)
    sizes = sizes_of(_CALL, subject, **given)
    if subject.q_offset is not None:
        sizes["q_offset"] = subject.q_offset
    if documents is not None and sizes["batch"] is None:
        sizes["batch"] = implied_size(documents, "B")
    closed = sizes | {name: sizes[name] or 1 for name in ("batch", "heads")}
    over = MaskOverLengths(_CALL, subject.mask, **closed)
    found = _of_reads(over)
    if not any(f.kind == "reads behind the end" for f in found):  # else a call of the function fails
        over = over if sizes == closed else MaskOverLengths(_CALL, subject.mask, **sizes)
        crosses = None
        if documents is not None:
            same = MaskOverLengths(_CALL, documents.to(over.size.device), **sizes).function
            crosses = lambda *indices: ~same(*indices)  # noqa: E731
        found += [*_of_pairs(over, sizes, crosses), *_of_function(subject, over, sizes)]
    return _sorted(found, forbidden)


def _sorted(found: Sequence[Finding], forbidden: Sequence[str]) -> Findings:
    found = [f._replace(severity="error") if f.kind in forbidden else f for f in found]
    return Findings(sorted(found, key=lambda f: ("error", "warning", "note").index(f.severity)))


def _kind(name: str) -> str:
    kind = name.replace("-", " ").replace("_", " ")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1, 0.5)
        meant = f"did you mean {near[0]!r}?" if near else f"the kinds are {', '.join(map(repr, KINDS))}."
        raise ValueError(f"{_CALL}: `forbid` names no kind of finding {name!r}; {meant}")
    return kind


def _shown(over: MaskOverLengths, kind: str, mask_mod: _Function, words: str) -> list[Finding]:
    """What a function shows, which are the pairs of a kind of finding, as one finding or none."""
    seen = over.seeing(mask_mod)
    if not seen.any():
        return []
    b, h, q = seen.nonzero()[0].tolist()
    return [Finding(kind, KINDS[kind], f"{_share(seen)} rows {words}", (b, h, q, over.first_key(b, h, q, mask_mod)))]


def _of_reads(over: MaskOverLengths) -> list[Finding]:
    """Where the function reads outside of tensors; those that the library's masks prepare have all elements."""
    if all(definition_of(mask).by_library for mask in inside(over.mask)):
        return []
    structure, leaves = flatten(over.mask)
    if not (structure.unreadable or leaves.all_tensors):
        return []

    def found(kind: str, words: str, before: bool) -> list[Finding]:
        outside = functools.partial(reads_outside, over.function, before=before)
        unnamed = _shown(over, kind, outside(), words.format("a captured tensor"))
        named = [
            _shown(over, kind, outside(of=tensor), words.format(f"the {place.kind} `{place.name}`"))
            for place, tensor in zip(leaves.places, leaves.tensors, strict=True)
            if unnamed and place is not None
        ]
        return list(itertools.chain(*named)) or unnamed

    behind = found("reads behind the end", "read past the end of {}", False)
    return behind or found("reads before the start", "read {} at a negative index, which counts from its end", True)


def _of_pairs(over: MaskOverLengths, lengths: dict[str, Any], crosses: _Function | None) -> Iterator[Finding]:
    shows, size = over.function, over.size
    if crosses is not None:
        yield from _shown(over, "crosses a document", lambda *i: shows(*i) & crosses(*i), "see keys of other documents")
    sees, seen = over.seeing(), over.seeing(keys=True)
    if not sees.all():
        b, h, q = (~sees).nonzero()[0].tolist()
        severity = KINDS["sees nothing"] if sees.any() else "error"
        yield Finding("sees nothing", severity, f"{_share(~sees)} rows see no key", (b, h, q, min(q, size.kv_len - 1)))
    if not seen.all():
        b, h, kv = (~seen).nonzero()[0].tolist()
        words = f"{_share(~seen)} keys are seen by no query"
        yield Finding("seen by nobody", KINDS["seen by nobody"], words, (b, h, min(kv, size.q_len - 1), kv))
    if size.q_len == size.kv_len or lengths["q_offset"] is not None:
        later, own = over.of_positions(lambda b, h, q, kv: kv > q), over.of_positions(lambda b, h, q, kv: kv == q)
        yield from _shown(over, "sees the future", lambda *i: shows(*i) & later(*i), "see later keys")
        yield from _shown(over, "does not see itself", lambda *i: own(*i) & ~shows(*i), "hide their own key")
    for dim, count, index, what in ((0, size.batch, "b", "batch element"), (1, size.heads, "h", "head")):
        if count > 1:
            words = f"see other keys than the same row of the first {what}"
            differ = _shown(over, f"differs by {what}", _differing(shows, _of_first(shows, dim)), words)
            yield from differ or [Finding(f"ignores {index}", "note", f"all {count} {what}s see the same")]


def _of_function(subject: Subject, over: MaskOverLengths, lengths: dict[str, Any]) -> Iterator[Finding]:
    """What compilers do with the function; of a BlockMask with its own, not with its lists."""
    if subject.function is not None:
        over = MaskOverLengths(_CALL, subject.function, **lengths)
    mask, shows = over.mask, over.function
    structure, leaves = flatten(mask, lifts=True)  # without numbers that become tensors where they change
    if over.compares_floats():
        yield Finding("compares floats", KINDS["compares floats"], "rounding may decide what is visible")
    if why := over.why_bits():
        yield Finding("goes as bits", KINDS["goes as bits"], f"kernels get the mask's bits, not its function: {why}")
        in_32 = lambda *indices: shows(*(x.int() for x in indices))  # noqa: E731
        yield from _by_dtype(over, in_32, "see other keys where indices have 32 bits, as in kernels")
        if (wide := _in_64_bits(mask)) is not None:
            words = "see other keys if captured tensors have 64 bits: numbers wrap around, or are rounded"
            yield from _by_dtype(over, MaskOverLengths(_CALL, wide, **lengths).function, words)
    elif leaves.numbers:
        named = " and ".join(sorted(f"`{n.name}` = {n.value!r}" for n in leaves.numbers))
        words = f"{named} in a kernel, and other values compile others; a tensor compiles none"
        yield Finding("recompiles", KINDS["recompiles"], words)
    if structure.unreadable:
        words = f"each call is planned again: the function reads {structure.unreadable}, which may change unnoticed"
        yield Finding("recompiles", KINDS["recompiles"], words)


def _by_dtype(over: MaskOverLengths, other: _Function, words: str) -> list[Finding]:
    try:
        return _shown(over, "differs by dtype", _differing(over.function, other), words)
    except (ValueError, TypeError):  # the function fails for other dtypes
        return []


def _share(chosen: Tensor) -> str:
    return f"{int(chosen.sum()):,} of {chosen.numel():,}"


def _of_first(mask_mod: _Function, dim: int) -> _Function:
    """The mask of the first batch element, or of the first head, for all of them."""
    return lambda *indices: mask_mod(*(x * 0 if d == dim else x for d, x in enumerate(indices)))


def _differing(a: _Function, b: _Function) -> _Function:
    return lambda *indices: a(*indices) ^ b(*indices)


def _in_64_bits(mask: Mask) -> Mask | None:
    """The mask with captured tensors of 64 bits, or None if it has such tensors only or cannot be copied."""
    structure, leaves = flatten(mask)
    wide = [t.double() if t.is_floating_point() else t if t.dtype == torch.bool else t.long() for t in leaves.tensors]
    if not structure.is_whole or all(a.dtype == b.dtype for a, b in zip(wide, leaves.tensors, strict=True)):
        return None
    copied: Mask = structure.fill(wide, has_own_globals=True)
    return copied
