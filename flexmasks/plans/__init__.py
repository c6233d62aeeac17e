"""Plans: masks, scores and sizes of a call come in, a kernel's arguments go out."""

from __future__ import annotations

from typing import Any

from flexmasks.blocks.counts import Blocks
from flexmasks.spec.values import Mask


def _count_blocks(mask: Mask, q_len: int, kv_len: int | None, **sizes: Any) -> Blocks:
    from flexmasks.plans.portable import count_blocks  # imported at the first use

    return count_blocks(mask, q_len, kv_len, **sizes)


Mask._count_blocks = staticmethod(_count_blocks)
