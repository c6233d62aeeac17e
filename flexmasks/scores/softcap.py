from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.kernels.tanh import tanh_approx
from flexmasks.spec import Size, register_score


def _prepare(
    size: Size | None,
    *,
    cap: Annotated[float | Tensor, "float in 0.. | float[] in 0.."],
    exact: Annotated[bool, "bool"] = False,
) -> dict[str, Any]:
    if not isinstance(cap, Tensor):
        if cap == 0:
            raise ValueError(f"`cap` must be above 0, got {cap}.")
        cap = float(cap)
    return {"cap": cap, "approximate": size is not None and size.approximate and not exact}


def _cap(size: Size, *, cap: float | Tensor, exact: bool) -> float | None:
    return None if exact or isinstance(cap, Tensor) or cap == 0 else float(cap)


@register_score(prepare=_prepare, example=lambda length: {"cap": 30.0}, cap=_cap, relative=True)
def softcap(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, cap: float | Tensor, approximate: bool = False
) -> Tensor:
    """Scores bent into (-cap, cap): cap * tanh(score / cap).

    cap: the bound, above 0 (Gemma 2 uses 50, Grok-1 30). A tensor that requires a gradient gets one.
    exact: on a GPU in float16 and bfloat16 tanh is the processor's own instruction, with a relative error of at most
        2**-11, the error of rounding to float16. `exact=True` computes it in full, two to three times slower.

    Source: Bello et al., Neural Combinatorial Optimization, 2017; Gemma 2, 2024.
    Peers: attention-gym generate_tanh_softcap(cap); FlashAttention softcap=cap; FlashInfer logits_soft_cap=cap.
    """
    return cap * (tanh_approx if approximate else torch.tanh)(score * (1 / cap))
