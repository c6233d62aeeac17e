from torch import Tensor

from flexmasks.spec import register_score


@register_score(example=lambda length: {}, relative=True)
def checkerboard(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Scores at even distance doubled, at odd distance halved: an example.

    Source: FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention, 2024.
    """
    odd = (q - kv) & 1
    return score * (2.0 - 1.5 * odd)
