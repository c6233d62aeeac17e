"""Backend "cudnn": kernels of NVIDIA's package `cudnn`, for masks of a few intervals of keys for each query."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks.backends.call import (
    HALF_DTYPES,
    Call,
    Inputs,
    Kernel,
    Plans,
    Result,
    Unavailable,
    differentiated_once,
    failures_are_unavailable,
    first_line,
    proven,
)
from flexmasks.cache import FACT, KINDS, PLANS, Part
from flexmasks.context import is_capturing
from flexmasks.devices import nvidia_capability, nvidia_major
from flexmasks.errors import Unfit
from flexmasks.kernels.compiling import announce_once
from flexmasks.kernels.direct import on
from flexmasks.plans.bounds import SizedMask
from flexmasks.plans.mask_plan import Computed
from flexmasks.plans.sizes import BLOCK_SIZE, shifted_mask
from flexmasks.plans.windows import Look
from flexmasks.ranges import GiveUp
from flexmasks.ranges.intervals import MOST, seen_keys

_MOST = 4  # intervals of a query
_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
_LARGE_SIZES = ((192, 128), (256, 256))  # head sizes of q and v above 128


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    reason = refuses_machine(call)
    if reason is not None:
        return reason
    sizes = call.q.shape[3], call.v.shape[3]
    if (max(sizes) > 128 or any(n % 8 for n in sizes)) and sizes not in _LARGE_SIZES:
        return f"it takes head sizes that are multiples of 8 up to 128, 192 with 128 for v, and 256, not {sizes}"
    if call.score is not None:
        return "it has no score changes"
    if call.mask.is_given:
        return "it takes a mask, not blocks"
    if call.mask.opaque:
        return "it takes no functions that read variables which may change unnoticed"
    if call.learns:
        return "it gives no gradients to captured tensors"
    if call.kernel_options:
        return "it takes no kernel_options"
    if call.scale is not None and call.scale <= 0:
        return "it takes scales above 0 only"
    if call.context.has_transforms or call.context.is_transformed:
        return "it does not run inside transforms of torch.func"
    if 256 in sizes and call.needs_grad and call.with_lse and nvidia_major(call.q.device) == 10:
        return "on compute capability 10 it has no gradient of the lse with heads of 256"
    return None


def refuses_machine(call: Call) -> str | None:
    """Return why no such call can run on this machine, or None."""
    if not call.on_gpu:
        return "it runs on CUDA only"
    if missing := why_unusable():
        return missing
    if nvidia_capability(call.q.device) not in _CAPABILITIES:
        return f"it needs compute capability {', '.join(f'{a}.{b}' for a, b in _CAPABILITIES[:-1])} or 10.3"
    if call.q.dtype not in HALF_DTYPES:
        return f"it takes float16 and bfloat16, not {call.dtype}"
    return None


# --- what "auto" takes ---

# Where it is at least 1.04 times as fast as the others, all in, and mostly 1.2 to 1.9 times (H200, results/cudnn.md):
# these lengths, sizes and heads were measured. Masks of little more than the edges of documents are partial blocks, for
# which others read tensors for each pair, and cuDNN bits. But a new mask takes the host longer than elsewhere: only in
# long rows of large heads does a call with a mask of its own lose little by that. Where FLASH is not there or does not
# add in order, cuDNN is faster in long full rows, too. In order, tiles of queries wait for each other: where a few keys
# are seen by far more queries than others are, it takes up to 13 times as long.
_MIN_LENGTH, _SIZES = 8192, (64, 128)
# The share of partial blocks, and blocks of 128 queries of all heads, for masks with tensors times the head size.
_CUT, _MIN_NUMBERS_IF_CUT = 0.3, 4096 * 128
_WHOLE, _MIN_ROWS_IF_WHOLE = 0.1, 2048
_MOST_UNEVEN = 4.0


def is_fastest(call: Call, has_flash: bool) -> bool:
    """Return whether "auto" takes the backend for a call that none for bands takes.

    has_flash: whether "flex_flash" may run the call.
    """
    batch, heads, length, size = call.q.shape
    is_known = _SIZES[0] <= size <= _SIZES[1] and size == call.v.shape[3] and heads == call.k.shape[1]
    is_long = min(length, call.k.shape[2]) >= _MIN_LENGTH
    if not (is_known and is_long and call.needs_grad and nvidia_capability(call.q.device) == _CAPABILITIES[0]):
        return False
    computed = call.mask.computed(batch * heads)
    return is_for(computed, batch * heads * length / BLOCK_SIZE[0], size, has_flash) and not unfit(call)


def is_for(computed: Computed, rows: float, size: int, has_flash: bool) -> bool:
    """Return whether a mask of these blocks is one for the backend.

    rows: blocks of 128 queries of all heads, whose size is `size`.
    """
    share = computed.partial / max(1e-9, computed.full + computed.partial)
    is_cut = computed.reads_tensors and share >= _CUT and rows * size >= _MIN_NUMBERS_IF_CUT
    is_whole = not has_flash and share <= _WHOLE and rows >= _MIN_ROWS_IF_WHOLE
    return (is_cut or is_whole) and computed.uneven <= _MOST_UNEVEN


def unfit(call: Call) -> str:
    """Return why a mask is not one of a few intervals, or "". The first of a kind decides, for which the host waits."""
    mask: Any = call.mask
    key = mask.kernel_key, mask.size.q_len.bit_length(), mask.size.kv_len.bit_length()
    known = _UNFIT.get(key)
    if known is None:
        if is_capturing(mask.size.device):
            return "nobody may look at the mask while a CUDA graph captures the call"
        try:
            _judge(mask.made(_INTERVALS, KeyIntervals, key_intervals_of).counts.tolist())
            known = ""
        except Unfit as reason:
            known = str(reason)
        _UNFIT.put(key, (), known, FACT)
    return known


# --- the package ---

_import_failures: list[str] = []  # why importing it failed


@functools.cache
def _why_missing() -> str:
    """Return why there are no such kernels, or "". Importing the package takes seconds."""
    spec = importlib.util.find_spec("cudnn")
    if spec is None:
        return "the package nvidia-cudnn-frontend is not installed"
    folders = spec.submodule_search_locations or ()
    if not any((Path(folder) / "flex_attention").is_dir() for folder in folders):
        return "the package nvidia-cudnn-frontend is older than 1.32, which has kernels for intervals"
    return ""


def why_unusable() -> str:
    """Return why the package cannot be called, or imported, or ""."""
    return _why_missing() or next(iter(_import_failures), "")


class Functions(NamedTuple):
    """Functions of the package."""

    plan: Any
    forward: Any
    backward: Any


def functions() -> Functions:
    """Return the functions. Raises Unavailable if importing them fails; later calls of any kind then refuse it."""
    try:
        kernels = importlib.import_module("cudnn.flex_attention.execution")
        plan = importlib.import_module("cudnn").create_mask_plan
        return Functions(plan, kernels._flex_attention_forward, kernels._flex_attention_backward)
    except Exception as error:  # the code of another package may raise anything
        _import_failures[:] = [f"the package nvidia-cudnn-frontend cannot be imported: {first_line(error)}"]
        raise Unavailable(_import_failures[0]) from error


class Attend(torch.autograd.Function):
    """Output [B, S, H, Dv] and lse [B, H, S] of q, k and v [B, S, H, D or Dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float | None) -> tuple[Tensor, Tensor]:
        out, lse, _ = functions().forward(q, k, v, mask_plan=plan, softmax_scale=scale, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.in_order = plan, scale, torch.are_deterministic_algorithms_enabled()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return (None,) * 5
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()  # other layouts compile again
        gradients: tuple[Tensor | None, ...] = tuple(
            functions().backward(
                q, k, v, out, d_out, lse, mask_plan=ctx.plan, softmax_scale=ctx.scale, deterministic=ctx.in_order,
                dlse_tensor=None if d_lse is None else d_lse.contiguous(),
            )
        )  # fmt: skip
        if torch.is_grad_enabled():
            gradients = differentiated_once("cudnn", gradients, q, k, v)
        return *gradients, None, None


# --- the kernel ---


class KeyIntervals(NamedTuple):
    """The keys that each query sees, as cuDNN takes them.

    ends: query i sees the keys from ends[1] to ends[2], from ends[3] to ends[4] and so on; int32 [H or 1, n, B * Q].
    counts: for how many queries the intervals are not known, and the most intervals of one, int64.
    hidden: whether a query sees nothing, bool [B or 1, H or 1, Q or 1].
    """

    ends: Tensor
    counts: Tensor
    hidden: Tensor


_INTERVALS: Part[KeyIntervals] = Part(PLANS, "key_intervals")
_UNFIT: Part[str] = Part(KINDS, "masks_of_no_intervals")


class CudnnPlan(NamedTuple):
    """A mask as cuDNN has planned it."""

    hidden: Tensor  # of KeyIntervals
    plan: Any
    nbytes: int


def key_intervals_of(given: SizedMask) -> list[Tensor]:
    """Return the tensors of KeyIntervals. Raises Unfit."""
    size = given.size
    mask_mod = shifted_mask(given.mask._bind(given.mask._resolve(size, given.lifted)), given.offset)
    try:
        found = seen_keys(mask_mod, size.batch, size.heads, size.q_len, size.kv_len, size.device)
    except GiveUp as reason:
        raise Unfit(
            f"it takes intervals of keys for each query, which the mask's operations do not tell: {reason}"
        ) from None
    is_some = found.starts < found.stops
    counts = torch.stack([(~found.known).sum(), is_some.sum(-1).amax()])
    # The interval from the first key on is left empty, and all others stand behind it.
    ends = torch.stack([found.starts, found.stops], -1).flatten(-2)[..., : 2 * _MOST]
    ends = ends.expand(size.batch, -1, size.q_len, -1).permute(1, 3, 0, 2).flatten(2)
    ends = torch.cat([torch.zeros_like(ends[:, :1]), ends], 1).int()
    return [ends, counts, ~is_some[..., 0]]


def _judge(counts: list[int]) -> None:
    """Raise Unfit for intervals that the kernel does not take."""
    if counts[0]:
        raise Unfit("it takes intervals of keys for each query, which the values of the mask's tensors do not show")
    if counts[1] > _MOST:
        more = " or more" if counts[1] == MOST else ""
        raise Unfit(f"it takes up to {_MOST} intervals of keys for each query, and some see {counts[1]}{more}")


def kernel(call: Call) -> Kernel:
    return CudnnKernel(
        tuple(torch.Size(x.shape) for x in (call.q, call.k, call.v)),
        call.q.dtype,
        call.q.device,
        call.scale,
        call.with_lse,
        call.needs_grad,
    )


@dataclass(frozen=True)
class CudnnKernel(Kernel):
    """cuDNN's attention over intervals of keys."""

    shapes: tuple[torch.Size, ...]  # of q, k and v
    dtype: torch.dtype
    device: torch.device
    scale: float | None
    with_lse: bool
    needs_grad: bool

    key = "cudnn"
    fits_by_values = True  # whether intervals are few

    def compiles(self, forms: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> str:
        return "yes, if it is the first call of these sizes and layouts: cuDNN compiles once for them"

    def instead_of_blocks(self, forms: tuple[Any, ...]) -> str:
        return (
            "none: cuDNN makes its own of the intervals of keys that queries see; the host waits for it at new tensors"
        )

    def forms(self, plans: Plans) -> tuple[CudnnPlan]:
        if is_capturing(self.device):
            raise Unfit(
                "the host reads how large a plan is, and a CUDA graph captures the call; pass a plan that has run"
            )
        made = plans.mask.made(_INTERVALS, KeyIntervals, key_intervals_of)
        # The host waits for the GPU once: planning does, and the counts are there behind it.
        look = Look.at(made.counts, _judge)
        if not plans.mask.is_of_template:
            look.confirm()
        before = self._memory()
        samples = (
            torch.empty_strided((b, n, h, d), (0, 0, 0, 1), dtype=self.dtype, device=self.device)
            for b, h, n, d in self.shapes
        )
        with on(self.device):
            plan = functions().plan(made.ends, *samples, build_backward=self.needs_grad)
        look.confirm()
        return (CudnnPlan(made.hidden, plan, max(0, self._memory() - before)),)

    def _memory(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: CudnnPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Q, Dv], and lse [B, H, Q] or None."""
        (form,) = forms
        rows, lse = [_in_layout(x.transpose(1, 2)) for x in (q, k, v)], None
        if self.needs_grad:
            out, lse = Attend.apply(*rows, form.plan, self.scale)
        else:
            given = {"mask_plan": form.plan, "softmax_scale": self.scale, "return_lse": self.with_lse}
            out, lse, _ = functions().forward(*(x.detach() for x in rows), **given)
        return out.transpose(1, 2), lse.masked_fill(form.hidden, -torch.inf) if self.with_lse else None

    def first(self, call: Call, inputs: Inputs) -> Result:
        sizes = f"{tuple(self.shapes[0])}, {str(self.dtype).removeprefix('torch.')}"
        announce_once(f"attention for backend 'cudnn': {sizes}{', gradients' if self.needs_grad else ''}")
        ready = self.ready(inputs)
        with failures_are_unavailable():
            return proven(call, ready, inputs)


def _in_layout(x: Tensor) -> Tensor:
    """Return a tensor [B, S, H, D] in a layout that the kernel reads."""
    unit = 128 if x.shape[3] == 256 else 16  # bytes of which its memory starts at a multiple
    is_good = x.stride(3) == 1 and not x.is_neg() and x.data_ptr() % unit == 0
    if is_good and all(n * x.element_size() % 16 == 0 for n in x.stride()[:3]):
        return x
    return x.resolve_neg().clone(memory_format=torch.contiguous_format)
