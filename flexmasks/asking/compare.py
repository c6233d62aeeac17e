"""Two masks compared pair by pair: `flexmasks.compare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

from flexmasks.asking.picture import ComparedPicture, compared_picture
from flexmasks.asking.proofs import Limits, Proof, check_without_sizes, over_all
from flexmasks.asking.subject import Subject, Subjects, sizes_of, subject_of, takes
from flexmasks.extend import Alignment, MaskOverLengths, says_what_to_write
from flexmasks.pictures.cells import short

_CALL = "flexmasks.compare"
Pair = tuple[int, int, int, int]  # b, h, q, kv


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `flexmasks.compare` found over given lengths; it prints as one line.

    Attributes:
        only_a, only_b: the numbers of pairs that a alone and that b alone shows, of all batch elements and heads.
        first: the first pair (b, h, q, kv) that one of them shows alone, in this order, or None.
        equal, implies, implied: whether both show the same pairs, b shows each pair that a shows, and the reverse.
        notes: what is wrong with a or b itself: a BlockMask whose lists are not those of its function.
    """

    only_a: int
    only_b: int
    first: Pair | None
    notes: tuple[str, ...]
    _a: MaskOverLengths
    _b: MaskOverLengths

    @property
    def equal(self) -> bool:
        return self.first is None

    @property
    def implies(self) -> bool:
        return self.only_a == 0

    @property
    def implied(self) -> bool:
        return self.only_b == 0

    def draw(self, b: int | None = None, h: int | None = None) -> ComparedPicture:
        """Return the picture of a batch element and head, by default those of the first difference.

        Pairs that both masks show, that a alone and that b alone shows have a color each. A cell of many pairs has the
        color of a difference even if one pair differs. The picture has the methods of `flexmasks.Picture`.
        """
        first = self.first or (0, 0)
        at = first[0] if b is None else b, first[1] if h is None else h
        title = f"a={short(self._a.mask)}, b={short(self._b.mask)}"
        return compared_picture(_CALL, title, self._a, self._b, at)

    def show(self, b: int | None = None, h: int | None = None, columns: int | None = None) -> None:
        """Show the picture that `draw` returns: in Jupyter as SVG, elsewhere as text of that many columns."""
        self.draw(b, h).show(columns)

    def __repr__(self) -> str:
        size = self._a.size
        found = f"of {size.batch * size.heads * size.q_len * size.kv_len:,} pairs all are the same"
        if self.first is not None:
            found = found.removesuffix("all are the same") + _alone("a", "b", self.only_a, self.only_b, self.first)
        return "; ".join([f"Comparison(a={short(self._a.mask)}, b={short(self._b.mask)}: {found}", *self.notes]) + ")"


@overload
def compare(
    a: Subjects,
    b: Subjects,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    lengths: None = None,
    **others: Any,
) -> Comparison: ...


@overload
def compare(
    a: Subjects, b: Subjects, *, lengths: Literal["all"], parameters: Limits | None = None, **params: Any
) -> Proof: ...


@says_what_to_write()
def compare(
    a: Subjects,
    b: Subjects,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    q_offset: Alignment = None,
    lengths: Literal["all"] | None = None,
    parameters: Limits | None = None,
    **params: Any,
) -> Comparison | Proof:
    """Say whether two masks show the same pairs of a query and a key, how many pairs one shows alone, and which first.

    The answer is exact and takes no memory of queries x keys. Ranges decide most pairs in blocks, so that documents of
    131,072 tokens take less than a second; pairs that they cannot decide are evaluated, 50 million in a second.

    Args:
        a, b: masks, each a name, a Mask, a function (b, h, q, kv) -> bool, also of transformers, a list of masks, which
            all must show a pair, a plan, booleans [queries, keys] or [batch or 1, heads or 1, queries, keys], or
            torch's BlockMask. A BlockMask shows what kernels read of it: its full blocks, and what its function shows
            of its partial blocks.
        q_len, kv_len: numbers of queries and keys; by default those of a plan, BlockMask or booleans among a and b,
            else kv_len is q_len.
        batch, heads: numbers of batch elements and heads; by default what the masks' parameters imply, else 1.
        q_offset: where the queries start among the keys, as in `flexmasks.attention`; a plan has its own, and a
            BlockMask counts queries from 0.
        lengths: "all" asks whether the masks are the same at all lengths: for all batch elements and heads, and all
            positions of queries and keys from 0 on. islpy and z3 prove it (`pip install 'flexmasks[proofs]'`). They
            read sums, comparisons, `//` and `%`, which round down, minima, maxima, absolute values and `torch.where`,
            of whole numbers that do not overflow. Numbers stay as they are, but for those in `parameters`. A tensor
            stands for any tensor of its dtype, and equal tensors for the same one; what masks compute of one, as its
            length, stays.
        parameters: with `lengths`, which parameters of a and b, or variables that their functions captured, stand for
            many values, and for which: `{"window": (1, None)}` for all from 1 on. A limit is a number, None, another
            of these names, or "q_len", the number of queries and of keys. A name that a and b share has one value in
            both. The name of a tensor has limits of its elements, or "increasing" if they never fall along a row.
        params: parameters of a and b that are given by name or as functions; each goes to whichever takes it.

    Returns:
        A Comparison, or with `lengths="all"` a Proof, which says "proved", "refuted", with the smallest counterexample,
        or "not decided", and why.

    Raises:
        ValueError, TypeError: an argument is wrong, or a and b are for other lengths; the message says which.
        ImportError: neither islpy nor z3 is installed, and `lengths="all"` needs them.

    Example:
        >>> import flexmasks
        >>> found = flexmasks.compare("causal", lambda b, h, q, kv: (q - kv <= 2) & (kv - q <= 1), 6)
        >>> found
        Comparison(a=causal(), b=<lambda>: of 36 pairs a alone shows 6, b alone 5, first (b, h, q, kv) = (0, 0, 0, 1))
        >>> found.equal, found.implies, found.implied
        (False, False, False)
        >>> found.show()
        █b····
        ██b···
        ███b··
        a███b·
        aa███b
        aaa███
        · hidden by both   █ shown by both   a shown by a alone   b shown by b alone
        6 queries (down) x 6 keys (across), a character is 1 x 1 of them
        >>> flexmasks.compare("causal", "sliding_window", lengths="all", parameters={"window": ("q_len", None)})
        Proof(proved for all lengths, window in q_len..: a and b are the same)
        >>> found = flexmasks.compare("causal", "sliding_window", lengths="all", parameters={"window": (0, None)})
        >>> found.verdict, found.first, found.parameters
        ('refuted', (0, 0, 1, 0), {'window': 0})
    """
    # A parameter that neither takes goes to a, which says so.
    of_b = {name: value for name, value in params.items() if takes(b, name)}
    of_a = {name: value for name, value in params.items() if takes(a, name) or name not in of_b}
    given = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads, "q_offset": q_offset}
    if lengths is not None or parameters is not None:
        check_without_sizes(_CALL, lengths, given)
        return over_all(_CALL, (a, of_a), (b, of_b), parameters or {}, compare)
    subjects = subject_of(a, of_a), subject_of(b, of_b)
    sizes = sizes_of(_CALL, *subjects, **given)
    masks = [subject.over(_CALL, **sizes) for subject in subjects]
    found, notes = masks[0].difference(masks[1]), []
    for name, subject, mask in zip("ab", subjects, masks, strict=True):
        if subject.function is not None:
            of_function = Subject(subject.function, subject.sizes, subject.q_offset).over(_CALL, **sizes)
            only_a, only_b, first = mask.difference(of_function)
            if first is not None:
                shown = _alone("what kernels read", "the function", only_a, only_b, first)
                notes.append(f"the lists of {name} are not those of its function: {shown}")
    return Comparison(*found, tuple(notes), masks[0], masks[1])


def _alone(a: str, b: str, only_a: int, only_b: int, first: Pair) -> str:
    return f"{a} alone shows {only_a:,}, {b} alone {only_b:,}, first (b, h, q, kv) = {first}"
