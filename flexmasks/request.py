"""The arguments of a call of `attention`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from flexmasks import compat
from flexmasks.backends.table import BACKENDS
from flexmasks.context import is_invariant
from flexmasks.plans.checks import ATTENTION, check_block_mask, check_offset, check_qkv, check_scale, fail
from flexmasks.plans.sizes import size_of
from flexmasks.spec.parameters import Size, in_message

_BACKENDS_OF_TORCH = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")


@compat.constant_in_graphs
def _unknown_options(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a name that is no option of torch's kernels, and the options; nothing if all names are."""
    from torch.nn.attention.flex_attention import FlexKernelOptions

    known = {*FlexKernelOptions.__annotations__, "SPLIT_KV"}
    wrong = [n for n in names if not isinstance(n, str) or n.removeprefix("fwd_").removeprefix("bwd_") not in known]
    return (str(wrong[0]), *sorted(known)) if wrong else ()


class Request(NamedTuple):
    """The arguments of `attention` other than q, k and v."""

    mask: Any = None
    score: Any = None
    params: Mapping[str, Any] = MappingProxyType({})
    scale: float | None = None
    block_mask: compat.BlockMask | None = None
    q_offset: int | Tensor | str | None = 0  # see `plans.alignment`
    sink_logits: Tensor | None = None
    return_lse: bool = False
    backend: str = "auto"
    kernel_options: dict[str, Any] | None = None
    dropout: Any = None  # of attention weights, see `flexmasks.dropout`
    is_invariant: bool = False  # as inside `flexmasks.invariant`, which a plan says of its own calls
    ends_among_keys: bool = True  # False where a tensor q_offset of the library's own may break the rule, see `sized`

    @property
    def must_be_invariant(self) -> bool:
        """Whether the result of a sequence must not depend on what else is in the call."""
        return self.is_invariant or is_invariant()

    @property
    def backend_name(self) -> str:
        """The name of the backend: "flex" with torch's kernel_options={"BACKEND": "FLASH"} is "flex_flash"."""
        options = self.kernel_options
        is_flash = self.backend == "flex" and isinstance(options, dict) and options.get("BACKEND") == "FLASH"
        return "flex_flash" if is_flash else self.backend


def checked(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Size:
    """Check all arguments except mask and score, which planning checks, and return the sizes."""
    backend, kernel_options = request.backend, request.kernel_options
    if not isinstance(backend, str) or (backend != "auto" and backend not in BACKENDS):
        fail(f"`backend` must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {in_message(backend)}.")
    if kernel_options is not None and not isinstance(kernel_options, dict):
        fail(f"`kernel_options` must be a dict, got {in_message(kernel_options)}.", TypeError)
    unknown = _unknown_options(tuple(kernel_options)) if kernel_options else ()
    if unknown:
        fail(f"`kernel_options` has no option {unknown[0]!r}; torch knows {', '.join(unknown[1:])}.")
    if (kernel_options or {}).get("BACKEND", "AUTO") not in _BACKENDS_OF_TORCH:
        known = ", ".join(map(repr, _BACKENDS_OF_TORCH))
        fail(f"`kernel_options`: BACKEND must be one of {known}, got {in_message((kernel_options or {})['BACKEND'])}.")
    if not isinstance(request.return_lse, bool):
        fail(f"`return_lse` must be True or False, got {in_message(request.return_lse)}.", TypeError)
    if request.block_mask is not None and request.mask is not None:
        fail("pass `mask` or `block_mask`, not both.", TypeError)
    check_qkv(q, k, v)
    check_scale(request.scale)
    size = size_of(q, k, ends_among_keys=request.ends_among_keys)
    if request.q_offset is not None and not isinstance(request.q_offset, str):
        check_offset(ATTENTION, request.q_offset, size.batch, size.device)
    if request.block_mask is not None:
        check_block_mask(request.block_mask, size)
    return size
