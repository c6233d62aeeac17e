from typing import Annotated

from torch import Tensor

from flexmasks.spec import register_mask

Distance = Annotated[int | Tensor, "int | int[]"]


@register_mask(example=lambda length: {"lower": -length // 4, "upper": length // 8})
def band(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, lower: Distance, upper: Distance) -> Tensor:
    """Each query sees the keys at distances lower <= kv - q <= upper.

    lower, upper: signed distances; a negative one is a key before the query. `local(left, right)` is
        `band(-left, right)`. Nothing is visible if lower > upper.

    Source: the banded matrices of linear algebra.
    Peers: TensorFlow linalg.band_part(num_lower=-lower, num_upper=upper), where a negative number means no limit;
        MagiAttention BICAUSAL is lower=0, upper=kv_len - q_len; JAX splash LocalMask(window_size=(-lower, upper)).
    """
    return (kv - q >= lower) & (kv - q <= upper)


@register_mask(example=lambda length: {})
def inverse_causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Each query sees itself and the keys after it.

    Position 0 of the queries is position 0 of the keys, unless `q_offset` says where the queries start.

    Source: the backward direction of ELMo, Peters et al., 2018.
    Peers: MagiAttention INVCAUSAL (top-left aligned, q_offset="first"; its CAUSAL is bottom-right aligned).
    """
    return kv >= q
