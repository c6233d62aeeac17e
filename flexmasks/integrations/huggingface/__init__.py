"""Hugging Face transformers: models run by `attn_implementation="flexmasks"`."""

from __future__ import annotations

from torch.nn.attention.flex_attention import BlockMask

from flexmasks import Mask, Plan
from flexmasks.extend import says_what_to_write
from flexmasks.integrations.huggingface.attention import attend, taking_masks
from flexmasks.integrations.huggingface.late import GivenMask, make_mask
from flexmasks.integrations.huggingface.late import LateMask as LateMask
from flexmasks.integrations.huggingface.sharding import sharded
from flexmasks.integrations.huggingface.vision import patch_vision

__all__ = ["patch_vision", "register", "sharded"]

_OWN_WORDS = ("flash", "sdpa", "flex_attention", "eager", "paged")  # transformers finds its own by parts of a name


@says_what_to_write()
def register(name: str = "flexmasks") -> str:
    """Let transformers' models run by `attn_implementation="flexmasks"`, and return that name.

    Every model that takes an attention function then attends by `flexmasks.attention`: exact under padding, packed
    rows, windows, chunks, soft-caps, sinks and caches, also in `generate` and inside torch.compile. Rows that see no
    key give 0, where "eager" averages all values.

    A model called with `output_attentions=True` returns the attention weights of its layers, those of "eager" but for
    rows that see no key, which are 0, and for sinks: as in GPT-OSS, a row adds up to 1 less the weight of its sink.
    They are those before dropout, and take the memory that attention saves. Inside torch.compile they break its graphs,
    and a few families (GPT-2, OPT) return none there.

    A mask or a plan as a model's `attention_mask` stands for the model's own in all layers, without a key-value cache:
    `model(batch.tokens, position_ids=batch.position_ids, attention_mask=batch.mask, use_cache=False)` of a batch of
    `flexmasks.trees`. In layers with windows or chunks queries see these keys of it alone, in trees along their paths,
    also by a block mask of trees. Any other block mask, and a tensor of four dimensions, holds as it is in all layers.
    Models with several kinds of layers also take a dict, `{"full_attention": mask, "sliding_attention": other}`, of
    which each mask or plan holds as it is. A name is no mask for transformers: write `flexmasks.get_mask(name)`.
    Models with layers that are no attention (Lfm2, Jamba, Qwen3-Next), or that take no `position_ids` (BART), compute
    no trees and raise an error.

    Models by "sdpa" and "flex_attention" take all of these from then on, too: `register` wraps the functions that
    transformers has for them, which hand calls with such masks to flexmasks, and all other calls on as they are.

    transformers' mask functions become masks of this library. Another function goes as it is; inside torch.compile its
    values at all pairs of queries and keys become one tensor.

    Where attention functions get no mask, as with DeepSpeed's Ulysses (`core_attn_implementation="flexmasks"`), it is
    made of `position_ids`, `is_causal` and the layer's window or chunk.

    Register in each process, before a model is made. To register a second time changes nothing. transformers does not
    save the name with a model, so name it again at `from_pretrained`. A model that is made already takes it by
    `model.set_attn_implementation("flexmasks")`, except T5 of transformers 5.17, which keeps its attention.

    transformers accepts the name for every model. Models that take no attention function raise an error (Bloom, Falcon,
    MPT), or keep their own attention, or have none, without a message (DeBERTa, XLNet, Mamba). Models that have sinks
    of each query (Inkling2) raise an error, too.

    Layers that choose keys for each query by an indexer (DeepSeek-V3.2, GLM-5, MiniMax-M3) hand over their indices,
    which become the mask "topk" inside the model's own, one bit for each key and query, in place of a matrix of 0 and
    -inf. Layers that share their indices share a plan. The indexer is the model's own. Such models take neither a mask
    of yours nor a sequence that is spread over processes. Models that make a matrix of their choice in any case, such
    as Qwen4-Exp, are computed with it.

    A few models, such as GPT-OSS, make their masks without `position_ids`, so that these alone leave the documents of a
    packed row together, with "eager" too. The same holds for all models if they get an `attention_mask`, too. A
    warning says so once. `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` adds `cu_seq_lens_q` and its like,
    by which the documents are kept apart here.

    Inside `flexmasks.invariant` attention gives a text the same bits in `generate` with any cache, in batches padded on
    either side, and in packed rows. Padding on the left, and keys that a cache with a window has dropped, cost a copy
    of all keys at each call: texts of one length, and `DynamicCache()` without a config, which drops none, need none.
    With activation checkpoints the backward pass must be inside, too. A compiled step of decoding runs attention
    outside of its graphs. `recipes/same_bits.py` gives the rest of a model the same bits.

    When texts are padded on the left, the last padding predicts the first word of a text. To train without that
    prediction, whose row sees no key, give the first word the label -100.

    Args:
        name: what `attn_implementation` is to be.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers would take the name for one of its own.

    Example:
        >>> import flexmasks.integrations.huggingface as huggingface
        >>> attn_implementation = huggingface.register()  # doctest: +SKIP
        >>> model = AutoModel.from_pretrained(..., attn_implementation="flexmasks")  # doctest: +SKIP
    """
    if not isinstance(name, str) or not name or any(word in name for word in _OWN_WORDS):
        words = ", ".join(map(repr, _OWN_WORDS))
        raise ValueError(
            f"flexmasks.integrations.huggingface.register: `name` must be a string without {words}, which transformers "
            f"takes for implementations of its own, got {name!r}."
        )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise ImportError(
            "flexmasks.integrations.huggingface needs transformers >= 5.17: `pip install 'transformers>=5.17'`."
        ) from None
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    kinds = (str, Mask, Plan)  # names are refused in words
    for own, others in {"sdpa": BlockMask, "flex_attention": GivenMask}.items():
        AttentionInterface.register(own, taking_masks(AttentionInterface()[own], attend, (*kinds, others)))
        AttentionMaskInterface.register(own, taking_masks(AttentionMaskInterface()[own], make_mask, kinds))
    return name
