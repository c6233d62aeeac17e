"""Arguments of attention in the forms in which users may give them: layouts, lists and arrays, two names for one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmasks.spec.parameters import in_message, listed


def with_heads_first(layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in the layout "bhsd"."""
    if layout == "bhsd":
        return q, k, v
    if layout != "bshd":
        raise ValueError(f"flexmasks.attention: `layout` must be 'bhsd' or 'bshd', got {in_message(layout)}.")
    try:
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    except (AttributeError, LookupError, ValueError):  # no tensors, or of fewer dimensions
        got = f"got q {in_message(q)}, k {in_message(k)}, v {in_message(v)}"
        wanted = "with layout='bshd', q, k and v must be tensors [B, S, H, D]"
        raise TypeError(f"flexmasks.attention: {wanted}; {got}.") from None


def check_return_max(return_max: Any) -> None:
    """Raise TypeError for anything but a boolean."""
    if not isinstance(return_max, bool):
        raise TypeError(f"flexmasks.attention: `return_max` must be True or False, got {in_message(return_max)}.")


def mask_or_blocks(mask: Any, block_mask: Any) -> tuple[Any, Any]:
    """Return a mask and a BlockMask, of which a user may pass either as the mask."""
    return (None, mask) if block_mask is None and hasattr(mask, "kv_num_blocks") else (mask, block_mask)


def on_device_of(q: Any, value: Any) -> Any:
    """Return a list or a NumPy array as a tensor on the device of q."""
    return value if value is None or type(value) in (int, str) else listed(value, getattr(q, "device", None))


def longest(name: str, value: Any) -> int | None:
    """Return the most tokens of a sequence, where it is given."""
    number = listed(value, None)
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
        wanted = f"`{name}` must be an int of at least 0"
        raise TypeError(f"flexmasks.varlen_attention: {wanted}, got {in_message(value)}; it may be left out.")
    return number


def one_of(name: str, value: Any, other: str, value_of_other: Any) -> Any:
    """Return an argument that has two names."""
    if value is not None and value_of_other is not None:
        raise TypeError(f"flexmasks.varlen_attention: `{other}` is `{name}` by another name; pass one of them.")
    return value_of_other if value is None else value
