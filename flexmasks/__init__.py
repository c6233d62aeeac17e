"""Attention masks and score changes for PyTorch FlexAttention: name a mask, get fast, exact attention."""

from flexmasks import former as former
from flexmasks import masks as masks
from flexmasks import scores as scores
from flexmasks.attention import attention as attention
from flexmasks.attention import block_mask as block_mask
from flexmasks.attention import dense_mask as dense_mask
from flexmasks.attention import explain as explain
from flexmasks.attention import paged_attention as paged_attention
from flexmasks.attention import varlen_attention as varlen_attention
from flexmasks.cache import cache_info as cache_info
from flexmasks.cache import clear_caches as clear_caches
from flexmasks.masks.packed import packed as packed
from flexmasks.masks.paged import paged as paged
from flexmasks.pictures.picture import Picture as Picture
from flexmasks.pictures.show import draw as draw
from flexmasks.pictures.show import show as show
from flexmasks.softmax import masked_softmax as masked_softmax
from flexmasks.softmax import scaled_masked_softmax as scaled_masked_softmax
from flexmasks.spec.arguments import get_mask as get_mask
from flexmasks.spec.arguments import get_score as get_score
from flexmasks.spec.registry import list_masks as list_masks
from flexmasks.spec.registry import list_scores as list_scores
from flexmasks.spec.registry import register_mask as register_mask
from flexmasks.spec.registry import register_score as register_score
from flexmasks.spec.values import Mask as Mask
from flexmasks.spec.values import Score as Score
