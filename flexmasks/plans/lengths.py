"""Plans over lengths that users give, outside a call of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.build import materialize
from flexmasks.plans.alignment import aligned
from flexmasks.plans.checks import check_dense, check_offset, fail
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.naming import check_open_extents, naming
from flexmasks.plans.sizes import MAX_POSITIONS, shifted_mask, sized, unread
from flexmasks.spec.parameters import Size, describe, device_named, freeze, is_dense, listed
from flexmasks.spec.values import Mask, Modifier


@dataclass(frozen=True)
class Lengths:
    """Lengths that users give to `block_mask` and `dense_mask`."""

    q_len: Any
    kv_len: Any = None
    batch: Any = None
    heads: Any = None
    device: Any = None
    q_offset: Any = None
    block_size: Any = 128

    def __post_init__(self) -> None:
        for name in ("q_len", "kv_len", "batch", "heads", "block_size"):
            object.__setattr__(self, name, freeze(getattr(self, name)))

    def check(
        self, call: str, mask: Modifier, score: Modifier | None = None
    ) -> tuple[Size, tuple[str, ...], int | Tensor]:
        """Return the size, which of "batch" and "heads" are open, and where queries start.

        An extent is open if neither the caller nor a parameter's shape gives it. Raises ValueError or TypeError in the
        name of `call`.
        """
        kv_len = self.q_len if self.kv_len is None else self.kv_len
        for name, n in (("q_len", self.q_len), ("kv_len", kv_len), ("batch", self.batch), ("heads", self.heads)):
            is_open = n is None and name in ("batch", "heads")
            if not is_open and (type(n) is not int or n < 1):
                advice = "; pass a length such as q.shape[2]" if isinstance(n, Tensor) and n.ndim > 1 else ""
                fail(f"`{name}` must be an int of at least 1, got {describe(n)}{advice}.", call=call)
            if not is_open and n > MAX_POSITIONS:
                fail(f"`{name}` must be at most 2**31 = {MAX_POSITIONS}, got {n}.", call=call)
        for value in (mask, score):
            if value is not None:
                check_dense(value, value._tensors())
        implied, device = mask._implied_size("B"), self._device(call, mask)
        q_offset = listed(self.q_offset, device)
        if implied in (None, 1) and isinstance(q_offset, Tensor) and is_dense(q_offset) and q_offset.ndim:
            implied = len(q_offset)
        batch, heads = self.batch or implied, self.heads
        if heads is None and (of_tables := mask._implied_size("H")) != 1:  # tables of one head are for all
            heads = of_tables
        size = Size(batch or 1, heads or 1, self.q_len, kv_len, device)
        q_offset = aligned(call, q_offset, size, (mask, score))
        check_offset(call, q_offset, size.batch, size.device)
        return size, tuple(name for name, n in (("batch", batch), ("heads", heads)) if n is None), q_offset

    def check_parameters(self, size: Size, q_offset: int | Tensor, values: Sequence[Modifier]) -> None:
        """Check parameters against the sizes that are given or implied. Values are read on a CPU only."""
        size = sized(size, q_offset) if size.reads_at_once else unread(size, q_offset)
        known = size.named()
        for name, n in (("B", self.batch), ("H", self.heads)):
            if n is None:
                del known[name]
        if isinstance(q_offset, Tensor) and q_offset.ndim and len(q_offset) > 1:
            known["B"] = len(q_offset)
        for value in values:
            value._check(size, known)

    def _device(self, call: str, mask: Modifier) -> torch.device:
        device = self.device
        if device is None:
            mask._check_data(call)
            tensors = [t for t in [*mask._tensors(), self.q_offset] if isinstance(t, Tensor)]
            device = tensors[0].device if tensors else "cpu"
        if isinstance(torch.empty(0), compat.FakeTensor):
            fail("blocks depend on values, which a FakeTensorMode does not have; call it outside.", call=call)
        device = device_named(call, device)
        if device.type == "meta":
            fail(f"`device` must hold data, got {device}.", call=call)
        try:
            return device_of_tensors(device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0][:150]
            fail(f"`device` must be available, got {device}, and torch says: {reason}.", call=call)


def device_of_tensors(device: torch.device) -> torch.device:
    """Return a device as its tensors name it: "cuda" with the present index, "cpu:0" as "cpu"."""
    return torch.empty(0, device=device).device


def plan_mask(call: str, mask: Mask, lengths: Lengths, exact: bool = True, may_wait: bool = True) -> MaskPlan:
    """The plan of a mask over lengths.

    may_wait: whether the host may wait for a device to read values of tensors. If not, blocks of a mask with tensors
        are bounds there, as in calls of attention.
    """
    given = lengths.block_size
    block_size = tuple(given) if isinstance(given, tuple | list) else (given, given)
    if len(block_size) != 2 or not all(type(n) is int and n > 0 for n in block_size):
        fail(f"`block_size` must be an int above 0 or a pair, got {given!r}.", call=call)
    size, open_extents, q_offset = lengths.check(call, mask)
    allows_bounds = not (may_wait or size.reads_at_once)
    return MaskPlan(
        mask, size, q_offset, block_size=block_size, open_extents=open_extents, allows_bounds=allows_bounds, exact=exact
    )


def materialize_mask(call: str, mask: Mask, lengths: Lengths) -> Tensor:
    """The mask as booleans [batch or 1, heads or 1, q_len, kv_len]."""
    size, open_extents, q_offset = lengths.check(call, mask)
    mask_mod = shifted_mask(mask._bind(mask._resolve(sized(size, q_offset))), q_offset)
    check_open_extents(mask, mask_mod, size, open_extents)
    with naming(mask):
        return materialize(mask_mod, size.batch, size.heads, size.q_len, size.kv_len, size.device)
