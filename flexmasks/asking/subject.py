"""What a user hands over as a mask, in any form, as a Mask over lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import Mask, Plan, get_mask
from flexmasks.extend import MaskOverLengths, shown_by

SIZES = ("q_len", "kv_len", "batch", "heads")


class Subject(NamedTuple):
    """A mask of which a user asks something, with what is known of its sizes without him."""

    mask: Mask
    sizes: Mapping[str, Any]  # some of q_len, kv_len, batch, heads and q_offset
    function: Mask | None = None  # of a BlockMask, whose lists hide and show pairs beside its function

    def over(self, call: str, **lengths: Any) -> MaskOverLengths:
        """Return the mask over lengths: those of the user where they are not None, else its own.

        call: the name of the public call, with which errors begin.

        Raises ValueError if the mask is for other lengths, and what `MaskOverLengths` raises.
        """
        return MaskOverLengths(call, self.mask, **sizes_of(call, self, **lengths))


def subject_of(given: Any, params: Mapping[str, Any] | None = None) -> Subject:
    """Return a subject of a name, Mask, function, plan, BlockMask or boolean tensor of pairs. Functions of transformers
    take their indices by position, as all functions do.

    params: parameters of a mask that is given by name or as a function.

    Raises ValueError or TypeError for anything else.
    """
    if isinstance(given, BlockMask):
        batch, heads = (n if n > 1 else None for n in given.kv_num_blocks.shape[:2])
        sizes = dict(zip(SIZES, (*given.seq_lengths, batch, heads), strict=True))
        return Subject(shown_by(given), sizes, get_mask(given.mask_mod))
    if isinstance(given, Plan):
        own = given.sizes
        sizes = {"q_len": own.q_len, "kv_len": own.kv_len, "batch": own.batch, "heads": own.heads}
        return Subject(given.mask, sizes | {"q_offset": given.q_offset})
    mask = get_mask(given, **(params or {}))
    if isinstance(given, Tensor):
        return Subject(mask, {"q_len": given.shape[-2] if given.shape[-2] > 1 else None, "kv_len": given.shape[-1]})
    return Subject(mask, {})


def sizes_of(call: str, *subjects: Subject, **lengths: Any) -> dict[str, Any]:
    """Return lengths with what subjects know in place of None. Raises ValueError where they are for other lengths."""
    merged = dict(lengths)
    for subject in subjects:
        for name, own in subject.sizes.items():
            if merged.get(name) is None:
                merged[name] = own
            elif type(own) is int and merged[name] != own:
                raise ValueError(f"{call}: {subject.mask!r} is for {name}={own}, and `{name}` is {merged[name]!r}.")
    if merged.get("q_len") is None:
        raise ValueError(f"{call}: pass `q_len`, the number of queries.")
    for name in ("batch", "heads"):
        if merged.get(name) is None:
            merged[name] = next((n for subject in subjects if (n := subject.mask.implied_size(name[0].upper()))), None)
    return merged
