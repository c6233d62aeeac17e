import torch
from torch import Tensor

from flexmasks.registry import register_score


@register_score(example=lambda length: {})
def checkerboard(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Scores at odd distance halved, at even distance doubled: a pattern to learn score changes by.

    Source: FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention, 2024.
    """
    return score * torch.where((q + kv) % 2 == 0, 2.0, 0.5)  # as odd as the distance, and never negative
