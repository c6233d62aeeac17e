from torch import Tensor

from flexmasks.masks.local import Reach
from flexmasks.spec import register_mask


@register_mask(example=lambda length: {"sinks": length // 32, "window": length // 4})
def sink_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, sinks: Reach, window: Reach) -> Tensor:
    """A causal sliding window, and the first keys as attention sinks.

    sinks: number of first keys that all later queries see.
    window: number of visible keys before the query, in addition to its own key, as in the mask `sliding_window`.

    Source: Xiao et al., StreamingLLM, 2024; Han et al., LM-Infinite, 2024; Jiang et al., MInference, 2024 (A-shape).
    Peers: StreamingLLM start_size and recent_size; attention-gym generate_sink_mask; MInference
        streaming_forward(n_init, n_local); in TensorRT-LLM sink_token_length with a window.
    """
    return (kv <= q) & ((kv < sinks) | (q - kv <= window))
