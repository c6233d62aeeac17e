"""Backend "flex" inside `flexmasks.invariant`: which calls it takes, and the options of torch's Triton kernels.

A tile of queries reads its keys in order, in tiles cut at multiples of a number, and each row of a tile is by itself:
tiles that no query sees change nothing. So results depend on the size of tiles, and on where keys lie in them, and on
nothing else if all blocks are in one list, documents start at blocks, and one kernel runs for all lengths.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from flexmasks import compat
from flexmasks.backends import fa4, fa4_package, forms
from flexmasks.backends.call import HALF_DTYPES, Call, Operand
from flexmasks.backends.kernel_tiles import Reads, chosen_tiles
from flexmasks.errors import Unfit
from flexmasks.kernels.row_products import less_row_products
from flexmasks.plans.mask_plan import GivenPlan, MaskPlan
from flexmasks.plans.sizes import block_size_for
from flexmasks.spec.bands import may_be_band
from flexmasks.spec.parameters import Size

# A kernel option of this library's. torch's kernels do not read it; the backward pass of flex_attention adds in order
# where it stands, see `adds_in_order`.
IN_ORDER = "FLEXMASKS_IN_ORDER"
_BY_FA4 = "FlashAttention 4 runs such masks here, with other bits"


def varies(call: Call) -> str | None:
    """Return why results may depend on what else is in the call, or None."""
    if call.device_type == "cpu":
        return "torch's compiled flex_attention cuts the keys by the sizes of a call on a CPU"
    if not call.on_gpu:
        return f"it was not shown to be invariant on {call.device_type}"
    if call.kernel_options:
        return "its tiles are fixed inside flexmasks.invariant(), which takes no kernel_options"
    if call.needs_grad and not adds_in_order():
        return "this torch lacks the name by which its backward pass adds in order"
    return _refuses_kind(call) or _refuses_blocks(call) or _refuses_documents(call)


def _refuses_kind(call: Call) -> str | None:
    """Return why another kernel is the only one for calls of this kind, or None.

    Whether the call needs gradients is not asked: a rollout needs none.
    """
    if call.q.dtype not in HALF_DTYPES or call.k.dtype != call.q.dtype:
        return None
    if call.score is not None and call.cap is None:
        return None
    without_gradients = replace(call, needs_grad=False, learns=False)
    if fa4_package.refuses_package(without_gradients) or fa4.varies(call):
        return None
    mask = call.mask
    if isinstance(mask, MaskPlan) and not (mask.is_given and mask.opaque):
        return _BY_FA4 if not mask.opaque and may_be_band(mask.mask) else None
    return (
        "FlashAttention 4 runs windows here, with other bits, and it is not known whether the given blocks are those "
        "of one: pass the mask in place of block_mask"
    )


def _refuses_blocks(call: Call) -> str | None:
    """Return why tiles would not be those of all such calls, or None."""
    if not _tiles(call, _block_size(call)) and getattr(compat.inductor_config, "max_autotune", False):
        return "torch chooses its tiles here by trials, which torch._inductor.config.max_autotune asks for"
    if not call.mask.is_given or call.mask.block_size == _block_size(call):
        return None
    if _tiles(call, call.mask.block_size) == _tiles(call, _block_size(call)):
        return None
    height, width = call.mask.block_size
    return f"its tiles do not divide blocks of {height} queries x {width} keys"


def _refuses_documents(call: Call) -> str | None:
    """Return why it is not known where the keys of a sequence start, or None."""
    mask = call.mask
    if isinstance(mask, GivenPlan) or mask.opaque:  # of a user's function, whose rows are sequences
        return None
    names = {m.name for m in mask.mask._inside() if m._definition.by_library}
    if "paged" in names:
        return "keys in pages lie in any order; flexmasks.paged_attention puts them in their own"
    if "key_padding" in names:
        return (
            "marks of padding do not say where a sequence starts: pass how many keys each has, by the mask `padding`, "
            "with the padding behind them"
        )
    try:
        documents = mask.documents
    except Unfit as reason:
        return str(reason)
    if documents is not None and call.q.shape[2] != call.k.shape[2]:
        return "it lays documents out for as many queries as keys only"
    return None


def _block_size(call: Call) -> tuple[int, int]:
    return block_size_for(Size(1, 1, 1, 1, call.q.device))


def options(call: Call) -> dict[str, Any]:
    """Return the kernel_options of a call, which depend on the dtype, the head sizes and the functions alone."""
    if not call.on_gpu:
        return {}
    return fixed_options(call.q, call.v, call.mask.block_size, reads_of(call))


def fixed_options(
    q: Tensor | Operand, v: Tensor | Operand, block_size: tuple[int, int], reads: Reads
) -> dict[str, Any]:
    """Return the options of kernels whose queries and keys end at blocks, none of torch's for few queries."""
    return {**chosen_tiles(q, v, block_size, reads), "BACKEND": "TRITON", "IS_DIVISIBLE": True, IN_ORDER: True}


def reads_of(call: Call) -> Reads:
    """Return what kernels read for each pair, whether a mask goes as its function or as data."""
    by_function = forms.reads_of(call, as_data=False)
    return by_function if call.mask.is_by_library else max(by_function, forms.reads_of(call, as_data=True))


def _tiles(call: Call, block_size: tuple[int, int]) -> dict[str, int]:
    return chosen_tiles(call.q, call.v, block_size, reads_of(call))


@functools.cache
def adds_in_order() -> bool:
    """Let the backward pass of flex_attention add in order where the kernel option `IN_ORDER` is set.

    Return whether this torch can. Its kernels need the sum of the products of each row of the output and its gradient,
    which its compiler adds in an order that depends on the number of rows, and on trials. It is passed to them beside
    the gradient of the lse, from which they subtract it, and the output counts as 0.
    """
    function = compat.FlexGradients
    if function is None:
        return False
    of_torch = function.backward

    def backward(ctx: Any, gradient: Tensor | None, of_lse: Tensor | None, *others: Any) -> Any:
        if IN_ORDER not in ctx.kernel_options or gradient is None:
            return of_torch(ctx, gradient, of_lse, *others)
        q, k, v, out, *saved = ctx.saved_tensors
        of_lse = less_row_products(out, gradient, of_lse, math.log(2))  # the kernels count in powers of 2
        nothing = out.new_zeros(()).expand(out.shape)
        return of_torch(_Saved(ctx, (q, k, v, nothing, *saved)), gradient, of_lse, *others)

    function.backward = staticmethod(backward)
    return True


class _Saved:
    """The context of an autograd function with other saved tensors."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor, ...]) -> None:
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
