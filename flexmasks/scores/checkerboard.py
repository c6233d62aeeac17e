from torch import Tensor

from flexmasks.spec import register_score


@register_score(example=lambda length: {}, relative=True)
def checkerboard(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Scores at even distance doubled, at odd distance halved: an example.

    The code of the source tests `distance % 1 == 0` for odd distances, which every distance passes: to the letter, it
    multiplies even distances by 1 and odd ones by 0.5. What its text says, 2 and 0.5, is here.

    Source: FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention, 2024.
    """
    odd = (q - kv) & 1
    return score * (2.0 - 1.5 * odd)
