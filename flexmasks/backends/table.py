"""The backends: one table of what can run a call, in the order in which `backend="auto"` asks."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import compat
from flexmasks.backends import flex as kernels
from flexmasks.backends import reference
from flexmasks.backends.fa4 import Direct
from flexmasks.backends.miscompiled import NO_BLOCKS, UNREADABLE, mistake
from flexmasks.blocks.counts import Blocks
from flexmasks.cache import Cache
from flexmasks.plans.windows import Dense, Sequences

_log = logging.getLogger("flexmasks")
_HALF = (torch.float16, torch.bfloat16)
# Options for kernels of torch, one after the other where those before need more shared memory than there is.
_SMALLER: tuple[dict[str, Any], ...] = (
    {},
    {"num_stages": 1},
    {
        "num_stages": 1, "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32,
        "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
    },
)  # fmt: skip
_ANEW = (
    "another function of the mask or score, another number in them (six values of a mask's, then it is an input), "
    "scale, dtype, batch size, heads, head size, whether gradients or lse are wanted; of lengths and memory layouts "
    "the first few; never by what tensors hold"
)
_FA4_ANEW = "another dtype, head size or cap, and causal, windows or sequences where there were none; never by numbers"
_FEW_QUERIES = 128  # below, kernels that split the keys are faster
_TRANSFORMED = "it runs neither inside torch.func.vmap nor where derivatives are taken forward"


class Unavailable(Exception):
    """A backend turned out to be unable to run a call, when it compiled or looked for a kernel."""


@dataclass(frozen=True)
class Compiled:
    """A call of compiled flex_attention but for q, k and v: what a call that is made again needs."""

    run: kernels.Runner
    score_mod: Callable[..., Tensor] | None
    block_mask: BlockMask
    scale: float | None
    options: dict[str, Any] | None
    with_lse: bool
    needs_grad: bool
    flash: bool

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.block_mask.as_tuple() if isinstance(t, Tensor))

    @property
    def key(self) -> Hashable:
        """Of the kernel."""
        return self.run.key

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output and lse, or None; raises Unavailable where it cannot be compiled."""
        if not self.needs_grad and (q.requires_grad or k.requires_grad or v.requires_grad):
            q, k, v = q.detach(), k.detach(), v.detach()  # torch refuses them on the CPU, even under no_grad
        if q is k or k is v or v is q:  # torch 2.11 has no kernel for the CPU then, and every torch compiles another
            k, v = k.view_as(k), v.view_as(v)
        if compat.in_foreign_dispatch_mode():  # torch would mark the code as never to be compiled, for good
            raise RuntimeError(
                "flexmasks.attention: torch compiles nothing inside a TorchDispatchMode of this kind, such as a "
                'FlopCounterMode; pass backend="reference" there.'
            )
        try:
            out, lse = self.run(q, k, v, self.score_mod, self.block_mask, self.scale, self.options, self.with_lse)
        except torch.OutOfMemoryError:
            raise
        except (compat.TorchDynamoException, compat.InductorError) as error:
            raise Unavailable(_first_line(error)) from error
        except Exception as error:  # the compiler of FLASH runs at the first call, and raises anything
            if not self.flash and not compat.compiler_is_off():
                raise
            raise Unavailable(_first_line(error)) from error
        return out, None if lse is None else lse.float()


@dataclass(frozen=True)
class Fused:
    """A call of torch's scaled_dot_product_attention but for q, k and v."""

    dense: Dense
    scale: float | None
    nbytes = 0

    def is_there(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether torch would take a fused kernel; asking changes none of its switches, and copies nothing."""
        k, v = self.dense.cut(k), self.dense.cut(v)
        if _repeats(q, k):
            k, v = (x.new_empty(len(x), q.shape[1], *x.shape[2:]) for x in (k, v))
        return compat.fused_sdp_choice(q, k, v, **self._keywords(q, k)) != SDPBackend.MATH.value

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        if not self.is_there(q, k, v):
            raise Unavailable("torch has no fused kernel for this call")
        k, v = self.dense.cut(k), self.dense.cut(v)
        if _repeats(q, k):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, **self._keywords(q, k)), None

    def _keywords(self, q: Tensor, k: Tensor) -> dict[str, Any]:
        grouped = q.shape[1] != k.shape[1]
        return {"is_causal": self.dense.right is not None, "scale": self.scale, "enable_gqa": grouped}


def _repeats(q: Tensor, k: Tensor) -> bool:
    """Whether grouped heads are repeated: torch's fused kernel for the CPU has none."""
    return q.shape[1] != k.shape[1] and not q.is_cuda


Again = Compiled | Fused | Direct


class Ran(NamedTuple):
    """What a backend gave, and how to do the same again, where that is known."""

    out: Tensor
    lse: Tensor | None
    again: Again | None = None


@dataclass(frozen=True)
class Call:
    """One call of attention, checked, with what a backend needs to decide and to run."""

    q: Tensor
    k: Tensor
    v: Tensor
    dense: Callable[[], Dense | None]  # the mask as some kernels have it
    cap: float | None  # the change of scores is a soft-cap of this
    blocks: Callable[[], Blocks]
    share: Callable[[], float]  # of all pairs, that is computed, about
    proven_options: Callable[[], dict[str, bool]]  # kernel options that hold, whatever tensors contain
    score_mod: Callable[[], Callable[..., Tensor]] | None
    scale: float | None
    with_lse: bool
    options: dict[str, Any] | None
    key: Hashable  # of the functions of mask and score and their constants
    form: Hashable  # shapes of what they captured, where queries start if that is a number; None if they cannot be read
    needs_grad: bool  # of q, k, v or a captured tensor
    learned: bool  # a captured tensor of the mask or score needs a gradient
    number_tensors: bool  # a captured tensor is 0-dimensional
    kept: bool  # its functions hold no tensor of the user's

    @property
    def cuda(self) -> bool:
        return self.q.device.type == "cuda"

    @functools.cached_property
    def sequences(self) -> Sequences | None:
        """Those of the dense form, once they have been looked at."""
        dense = self.dense()
        return None if dense is None or dense.sequences is None else dense.sequences()


@dataclass(frozen=True)
class Backend:
    """One way to run a call: `refuses` says why it cannot, or None; `compiles` whether it would compile, in words."""

    name: str
    refuses: Callable[[Call], str | None]
    run: Callable[[Call], Ran]
    compiles: Callable[[Call], str] = lambda call: "no: it is there as it is"
    anew: str = ""  # what makes it compile again


def _refuses_fa4(call: Call) -> str | None:
    reason = _refuses_any_flash(call)
    if reason is not None:
        return reason
    if call.score_mod is not None and call.cap is None:
        return "it has no score changes but the soft-cap"
    if call.options:
        return "it takes no kernel_options"
    dense = call.dense()
    if dense is None:
        return "it knows only windows, such as full and causal, and those inside packed sequences"
    if call.scale is not None and call.scale <= 0:
        return "it takes scales above 0 only"
    if call.q.shape[2] < _FEW_QUERIES:
        return "it does not split the keys among processors, which few queries need"
    if compat.transforms_active() or transformed():
        return "it does not run inside transforms of torch.func"
    if dense.sequences is not None and call.sequences is None:
        return (
            "the documents are not laid end to end with rising numbers, or the ends of queries and keys are not aligned"
        )
    return None


def _run_fa4(call: Call) -> Ran:
    again = Direct.of(cast(Dense, call.dense()), call.sequences, call.scale, call.cap, call.with_lse, call.q, call.k)
    try:
        return _proven(call, again)
    except (torch.OutOfMemoryError, Unavailable):
        raise
    except Exception as error:  # its compiler runs at the first call, and raises anything
        raise Unavailable(_first_line(error)) from error


def _refuses_sdpa(call: Call) -> str | None:
    dense = call.dense()
    known = dense is not None and dense.left is None and dense.sequences is None
    if dense is None or not known or (dense.right is not None and (dense.right, dense.offset) != (0, 0)):
        return "it knows only the masks full and causal, with the first query at the first key"
    if transformed():
        return _TRANSFORMED
    if call.score_mod is not None:
        return "it has no score changes"
    if call.with_lse:
        return "it gives no lse"
    if call.options:
        return "it takes no kernel_options"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not used on {call.q.device.type}"
    if dense.right is not None and call.scale is not None and call.scale <= 0:
        return "it is wrong where scale is not above 0, for it scales what it has masked"
    if call.q.dtype == torch.float64 and call.needs_grad:
        return "it has no second derivative, which float64 is for"
    if not Fused(dense, call.scale).is_there(call.q, call.k, call.v):
        return "torch has no fused kernel for this call"
    return None


def _run_sdpa(call: Call) -> Ran:
    again = Fused(cast(Dense, call.dense()), call.scale)
    return Ran(*again(call.q, call.k, call.v), again)


def _refuses_any_flash(call: Call) -> str | None:
    """What FlashAttention 4 cannot, called directly or through flex_attention."""
    if not call.cuda:
        return "it runs on CUDA only"
    if not flash_installed():
        return "the package flash-attn-4 is not installed"
    if torch.cuda.get_device_capability(call.q.device)[0] < 9:
        return "it needs compute capability 9.0 or above"
    if call.q.dtype not in _HALF:
        return f"it takes float16 and bfloat16, not {_dtype(call)}"
    if call.q.shape[-1] > 256 or call.q.shape[-1] % 8:
        return f"it takes head sizes that are multiples of 8 up to 256, not {call.q.shape[-1]}"
    if call.needs_grad and -call.q.shape[-1] % 32 > 8:
        return f"its gradients are wrong for head sizes 8 or 16 past a multiple of 32, as {call.q.shape[-1]} is"
    return None


def _refuses_flash(call: Call) -> str | None:
    reason = _refuses_any_flash(call)
    if reason is not None:
        return reason
    if reason := _refuses_compiled():
        return reason
    if not 16 <= call.q.shape[-1] <= 128:
        return f"with blocks it takes head sizes from 16 to 128, not {call.q.shape[-1]}"
    if call.learned:
        return "it gives no gradient to tensors that a mask or score captured"
    if call.with_lse:
        return "its lse has no gradient, and torch 2.11 gives it times ln 2"
    if call.number_tensors:
        return "its compiler has no 0-dimensional captured tensors"
    if call.q.shape[2] == 1 and call.needs_grad:
        return "its backward pass needs more than one query"
    grouped = call.q.shape[1] != call.k.shape[1]
    if grouped and call.needs_grad and call.score_mod is not None and call.cap is None:
        return "its backward pass gives score changes other heads where these are grouped"
    return _mistake(call)


def _mistake(call: Call) -> str | None:
    """Why FLASH may get the functions of mask and score wrong, looked at once for all calls of a kind."""
    if call.form is None:
        return "it is not known whether its compiler gets a function right that reads what may change"
    device, sizes = call.q.device, (*call.q.shape[:3], call.k.shape[2])
    kind = "mistake", call.key, call.form, device.type, sizes
    found = _OUTCOMES.get(kind)
    if found is None:
        of_score = None if call.score_mod is None else mistake(call.score_mod(), device, sizes, scored=True)
        found = of_score or mistake(call.blocks().block_mask.mask_mod, device, sizes) or ""
        if not found.startswith(UNREADABLE):  # which may depend on what the call is in
            _OUTCOMES.put(kind, (), found, 1)
    if found == NO_BLOCKS and call.dense() is not None:  # which has one value for all pairs: True
        return None
    return found or None


def _refuses_triton(call: Call) -> str | None:
    if not call.cuda:
        return "it runs on CUDA only"
    if call.q.dtype not in (*_HALF, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {_dtype(call)}"
    return _refuses_compiled()


def _refuses_cpu(call: Call) -> str | None:
    if call.q.device.type != "cpu":
        return "it runs on the CPU only"
    if call.q.dtype not in (*_HALF, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {_dtype(call)}"
    if call.needs_grad:
        return "torch's compiled flex_attention has no gradients on the CPU"
    if call.with_lse:
        return "torch's compiled flex_attention gives no lse on the CPU"
    return _refuses_compiled()


def _refuses_compiled() -> str | None:
    """Why nothing compiled runs where this call is."""
    if compat.compiler_is_off():
        return "torch.compile is switched off, by torch._dynamo.config.disable"
    return _TRANSFORMED if transformed() else None


def transformed() -> bool:
    """Whether torch maps over a batch here, or takes derivatives forward, of which fused kernels know nothing."""
    return compat.in_forward_derivative() or compat.in_vmap()


def _compiled(backend: str | None, call: Call, smaller: dict[str, Any] | None = None) -> Compiled:
    """The call for compiled flex_attention, with options on top for kernels that take less of a processor."""
    q, k = call.q, call.k
    options = kernels.options(q, k, backend, call.options, call.proven_options) | (smaller or {})
    block_mask = call.blocks().block_mask
    learning = tuple(call.needs_grad and x.requires_grad for x in (q, k, call.v))
    key = (
        call.key, backend, q.dtype, q.device, q.shape[0], q.shape[1], k.shape[1], q.shape[3], call.with_lse, call.scale,
        repr(options), block_mask.BLOCK_SIZE, block_mask.kv_num_blocks.shape[:2], torch.is_grad_enabled(), *learning,
    )  # fmt: skip
    return Compiled(
        run=kernels.Runner(key, call.form),
        score_mod=None if call.score_mod is None else call.score_mod(),
        block_mask=block_mask,
        scale=call.scale,
        options=options or None,
        with_lse=call.with_lse,
        needs_grad=call.needs_grad,
        flash=backend == "FLASH",
    )


def _run_flex(backend: str | None, call: Call) -> Ran:
    tries = _SMALLER if backend is None and call.cuda and not call.options else _SMALLER[:1]
    for smaller in tries:
        again = _compiled(backend, call, smaller)
        try:
            return _proven(call, again)
        except Unavailable as error:
            if smaller is tries[-1] or "out of resource" not in str(error):
                raise
            _log.info("the kernel takes too much shared memory: compiled again, with smaller blocks")
    raise AssertionError("one of them returns or raises")


def _compiles(backend: str | None, call: Call) -> str:
    return _compiled(backend, call).run.compiles(call.q, call.k, call.v)


def _proven(call: Call, again: Compiled | Direct) -> Ran:
    """Run a call; the first of its kind is differentiated too: what fails there fails while others can serve."""
    kind = "proven", again.key, _kind(call)
    learns = call.needs_grad and any(x.requires_grad for x in (call.q, call.k, call.v))
    if learns and _OUTCOMES.get(kind) is None and not compat.transforms_active():
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in (call.q, call.k, call.v)]
        given = [x for x in again(*leaves) if x is not None]
        try:
            torch.autograd.grad(given, [x for x in leaves if x.requires_grad], [torch.zeros_like(x) for x in given])
        except torch.OutOfMemoryError:
            pass
        except Exception as error:
            raise Unavailable(_first_line(error)) from error
        _OUTCOMES.put(kind, (), "", 1)
    return Ran(*again(call.q, call.k, call.v), again)


def _run_reference(call: Call) -> Ran:
    score_mod = None if call.score_mod is None else call.score_mod()
    return Ran(*reference.attend(call.q, call.k, call.v, score_mod, call.blocks().block_mask, call.scale))


BACKENDS = {
    b.name: b
    for b in (
        Backend(
            "fa4", _refuses_fa4, _run_fa4, lambda call: "flash-attn-4 does, once for all calls of a kind", _FA4_ANEW
        ),
        Backend("sdpa", _refuses_sdpa, _run_sdpa),
        Backend(
            "flash", _refuses_flash, functools.partial(_run_flex, "FLASH"), functools.partial(_compiles, "FLASH"), _ANEW
        ),
        Backend(
            "triton", _refuses_triton, functools.partial(_run_flex, None), functools.partial(_compiles, None), _ANEW
        ),
        Backend("cpu", _refuses_cpu, functools.partial(_run_flex, None), functools.partial(_compiles, None), _ANEW),
        Backend("reference", lambda call: None, _run_reference),
    )
}
# A small call on a GPU takes the time in which the host makes it, which is least for sdpa and most for flash. Where
# these gain, in floating-point operations of a forward pass over the pairs that are computed: measured on one H200.
_FA4_GAINS, _FLASH_GAINS = 36e9, 100e9
# How kinds of call went: why a backend failed, which is then not tried again under "auto"; "" where gradients worked.
# And what FLASH would get wrong of them, "" for nothing.
_OUTCOMES: Cache[str] = Cache("outcomes", max_bytes=1024)  # counted, one byte each


def choose(call: Call) -> tuple[list[Backend], dict[str, str]]:
    """The backends that can run a call, best first, and why the others cannot."""
    reasons = {}
    able = []
    for backend in _in_order(call):
        reason = _reason_against(backend, call)
        if reason is None:
            able.append(backend)
        else:
            reasons[backend.name] = reason
    return able, reasons


def _in_order(call: Call) -> list[Backend]:
    """The backends, those first that are the faster for this call where several can run it."""
    last: list[str] = []
    if call.cuda and _refuses_any_flash(call) is None:
        dense = call.dense()
        batch, heads, q_len, size = call.q.shape
        work = 4 * batch * heads * q_len * call.k.shape[2] * size * call.share()
        # packed sequences are told to fa4 in a millisecond, their blocks take three to find
        if work < _FA4_GAINS and (dense is None or dense.sequences is None):
            last.append("fa4")
        if work < _FLASH_GAINS:
            last.append("flash")
    names = [name for name in BACKENDS if name not in last]
    names[-1:-1] = last  # the reference stays the last of all
    return [BACKENDS[name] for name in names]


def _reason_against(backend: Backend, call: Call) -> str | None:
    return backend.refuses(call) or _OUTCOMES.get((backend.name, _kind(call)))


def check(call: Call, name: str) -> None:
    """Raise ValueError where the backend of that name cannot run a call."""
    reason = None if name == "auto" else BACKENDS[name].refuses(call)
    if reason is not None:
        raise ValueError(f"flexmasks.attention: backend {name!r} cannot run this call: {reason}.")


def run(call: Call, name: str) -> Ran:
    """Run a call on the backend of that name, or under "auto" on the first that can."""
    check(call, name)
    if name != "auto":
        try:
            return BACKENDS[name].run(call)
        except Unavailable as error:
            raise RuntimeError(f"flexmasks.attention: backend {name!r} failed: {error}") from error
    for backend in _in_order(call):
        if _reason_against(backend, call) is not None:
            continue
        try:
            return backend.run(call)
        except Unavailable as error:
            if not _apart(call):
                _OUTCOMES.put((backend.name, _kind(call)), (), f"it failed before: {error}", 1)
            _log.warning("backend %r failed and is left out for such calls: %s", backend.name, error)
    raise RuntimeError("flexmasks.attention: no backend could run this call.")


def _apart(call: Call) -> bool:
    """Whether a failure may be due to where a call is, or to what its tensors are views of, not to its kind."""
    return compat.transforms_active() or any(x.is_neg() for x in (call.q, call.k, call.v))


def _kind(call: Call) -> Hashable:
    return call.key, call.q.dtype, call.q.device, call.q.shape[-1], call.needs_grad, call.q.shape[1] == call.k.shape[1]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _dtype(call: Call) -> str:
    return str(call.q.dtype).removeprefix("torch.")


@functools.cache
def flash_installed() -> bool:
    """Whether FlashAttention 4, which torch's FLASH backend calls, can be imported."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False
