"""Attention over sequences that several processes hold together, on torch.distributed.

All processes run the same program:

    mesh = init_device_mesh("cuda", (8,))
    order = distributed.Order.natural(length, mesh.size())  # which parts of the sequence each process holds
    tokens = distributed.shard(tokens, order, mesh)
    ...
    out = distributed.attention(q, k, v, mesh=mesh, mask="causal", order=order)  # in each layer

Where the processes do not divide the number of key heads, `distributed.balance` gives all of them the same work.
"""

from flexmasks.integrations.distributed.attention import attention as attention
from flexmasks.integrations.distributed.balance import Order as Order
from flexmasks.integrations.distributed.balance import balance as balance
from flexmasks.integrations.distributed.counts import computed_blocks as computed_blocks
from flexmasks.integrations.distributed.counts import seen_by as seen_by
from flexmasks.integrations.distributed.shards import shard as shard
from flexmasks.integrations.distributed.shards import unshard as unshard

__all__ = [
    "attention", "balance", "Order", "shard", "unshard", "computed_blocks", "seen_by",
]  # fmt: skip
