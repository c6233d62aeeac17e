"""What a user hands over as a mask, in any form, as a Mask over lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import Mask, Plan, get_mask
from flexmasks.extend import (
    MaskLike,
    MaskOverLengths,
    as_number,
    define,
    definition,
    from_arguments,
    implied_size,
    shown_by,
)

Subjects = MaskLike | Sequence[MaskLike] | Plan | BlockMask
_SIZES = ("q_len", "kv_len", "batch", "heads")


class Subject(NamedTuple):
    """A mask of which a user asks something, with what is known of its lengths."""

    mask: Mask
    sizes: Mapping[str, Any]  # q_len, kv_len, batch and heads that the mask is for, each int or None
    q_offset: Any = None  # of a plan or BlockMask, whatever the user says
    function: Mask | None = None  # of a BlockMask, whose lists may hide and show other pairs

    def over(self, call: str, **lengths: Any) -> MaskOverLengths:
        """Return the mask over lengths: the user's, and those of the mask itself in place of None.

        call: the name of the public call, with which errors begin.

        Raises ValueError if the mask is for other lengths, and what `MaskOverLengths` raises.
        """
        lengths = sizes_of(call, self, **lengths)
        if self.q_offset is not None:
            lengths["q_offset"] = self.q_offset
        return MaskOverLengths(call, self.mask, **lengths)


def subject_of(given: Subjects, params: Mapping[str, Any] | None = None) -> Subject:
    """Return a subject of a name, Mask, function, plan, BlockMask, boolean tensor of pairs, or list of masks. Functions
    of transformers take their indices by position, as all functions do.

    params: parameters of a mask that is given by name or as a function.

    Raises ValueError or TypeError for anything else.
    """
    params = params or {}
    if isinstance(given, BlockMask):
        batch, heads = (n if n > 1 else None for n in given.kv_num_blocks.shape[:2])
        sizes = dict(zip(_SIZES, (*given.seq_lengths, batch, heads), strict=True))
        return Subject(shown_by(given), sizes, 0, get_mask(given.mask_mod, **params))
    if isinstance(given, Plan):
        mask, own = get_mask(given.mask, **params), given.sizes
        return Subject(mask, {name: getattr(own, name) for name in _SIZES}, given.q_offset)
    if isinstance(given, list | tuple):
        return Subject(cast(Mask, from_arguments(given, None, params)[0]), {})
    mask = get_mask(cast(MaskLike, given), **params)
    if isinstance(given, Tensor):
        return Subject(mask, {"q_len": given.shape[-2] if given.shape[-2] > 1 else None, "kv_len": given.shape[-1]})
    return Subject(mask, {})


def takes(given: Subjects, name: str) -> bool:
    """Return whether a mask by name or a function has a parameter of this name."""
    if isinstance(given, str):
        return name in definition("mask", given).parameters
    if not callable(given) or isinstance(given, Mask | Plan | BlockMask | Tensor):
        return False
    return name in define("mask", given).parameters


def sizes_of(call: str, *subjects: Subject, **lengths: Any) -> dict[str, Any]:
    """Return lengths with what subjects know in place of None. Raises ValueError where they are for other lengths."""
    lengths |= {name: as_number(lengths.get(name)) for name in _SIZES}
    for subject in subjects:
        for name, own in subject.sizes.items():
            if own is not None and lengths.get(name) not in (None, own):
                raise ValueError(f"{call}: {subject.mask!r} is for {name}={own}, got {name}={lengths[name]!r}.")
            lengths[name] = own if lengths.get(name) is None else lengths[name]
    if lengths.get("q_len") is None:
        raise ValueError(f"{call}: pass `q_len`, the number of queries.")
    for name, dimension in (("batch", "B"), ("heads", "H")):
        if lengths.get(name) is None:
            lengths[name] = next((n for subject in subjects if (n := implied_size(subject.mask, dimension))), None)
    q_offset: Any = lengths.get("q_offset")
    if lengths["batch"] is None and (isinstance(q_offset, list | tuple) or getattr(q_offset, "ndim", 0) > 0):
        lengths["batch"] = len(q_offset)
    return lengths
