"""Attention over sequences that several processes hold together."""

from __future__ import annotations

from flexmasks.integrations.distributed.balance import Order as Order
from flexmasks.integrations.distributed.balance import balance as balance
from flexmasks.integrations.distributed.counts import computed_blocks as computed_blocks
from flexmasks.integrations.distributed.counts import seen_by as seen_by
from flexmasks.integrations.distributed.paper import Plan as Plan
from flexmasks.integrations.distributed.paper import Way as Way
from flexmasks.integrations.distributed.paper import plan as plan
