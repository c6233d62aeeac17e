from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, register_score


def _prepare(size: Size | None, *, log_gates: Annotated[Tensor, "float[B, H, S]"]) -> dict[str, Any]:
    dtype = torch.promote_types(log_gates.dtype, torch.float32 if size is None else size.dtype)
    sums = log_gates.cumsum(-1, dtype=dtype)
    return {"of_query": sums, "of_key": -sums}  # a kernel on a GPU reads a tensor that learns in one place only


def _example(length: int) -> dict[str, Any]:
    # A few tokens forget most of what came before them.
    gates = torch.full((length,), -2.0 / length, dtype=torch.float32)
    gates[torch.tensor([2, 3, 6]) * length // 8] = -1.5
    return {"log_gates": gates[None, None]}


@register_score(prepare=_prepare, example=_example)
def forgetting(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, of_query: Tensor, of_key: Tensor
) -> Tensor:
    """Scores plus the log forget gates after the key, up to the query.

    The score becomes score + F[b, h, q] - F[b, h, kv], where F is the running sum of log_gates. A causal mask hides
    later keys, which would get a bonus.

    log_gates: [batch, query heads, positions], mostly logsigmoid(x), at most 0: a gate for each key, from position 0
        on; with q_offset, also those of the keys before the queries. A tensor that requires a gradient gets one. In
        half precision the sums are float32, and they are computed once a call.

    Documents laid end to end need no `packed`: between two tokens of one lie only its own gates.

    Source: Lin et al., Forgetting Transformer, 2025 (arXiv 2503.02130).
    Peers: forgetting_attention(log_fgate=) of its authors, with gates [batch, length, heads] unless head_first=True.
    """
    return score + (of_query[b, h, q] + of_key[b, h, kv])
