"""What is true around a call: asked once, at its beginning, and part of the key of all that is kept of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from flexmasks import compat

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def reads_at_once(device: torch.device) -> bool:
    """Whether the host reads values of a device's tensors without waiting, so that it may check all of them."""
    return device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the operations of a device."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_traced_or_transformed() -> bool:
    """Whether torch.compile traces or torch.func transforms this code, or derivatives are taken forward.

    No tensor's value can be read then, or operations on parts of buffers would lose its derivative.
    """
    return compat.is_compiling() or compat.transforms_active() or compat.in_forward_derivative()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that torch.autocast casts floats to on a device, or None where it casts nothing."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch knows no autocast of "meta"
        return None
    return torch.get_autocast_dtype(kind)


class invariant:  # in lower case as torch.no_grad
    """Inside this context the result of a sequence does not depend on what else is in a call.

    Its output, its lse and its gradients are equal, bit by bit, alone and in any batch, at any place in it, packed with
    other documents in any order, in rows of any length, eager and inside torch.compile, and from one process to the
    next. Its output and lse are, too, as one prefill, in chunks and token by token, from contiguous keys and from pages
    of any size. This holds on one kind of device and for one dtype, head size and kind of mask.

    It holds for the whole process, not for one thread, as torch's deterministic mode does, and it may decorate a
    function. A plan by `flexmasks.plan(..., invariant=True)` is for its own calls alone. torch's setting, the variable
    TORCHINDUCTOR_BATCH_INVARIANT=1 or `torch._inductor.config.batch_invariant`, turns it on too.

    Kernels then read the keys of a sequence from its first one on, in tiles of one size, without splitting them, and
    add gradients in order. What cannot run so raises ValueError, which says why; `explain` says it before. A backward
    pass in which activation checkpoints make calls again runs inside, too.

    Example:
        >>> import torch, flexmasks
        >>> q, k, v = torch.randn(3, 4, 2, 100, 16)
        >>> with flexmasks.invariant():
        ...     of_all = flexmasks.attention(q, k, v, mask="causal")
        ...     of_one = flexmasks.attention(q[2:3, :, :70], k[2:3, :, :70], v[2:3, :, :70], mask="causal")
        >>> torch.equal(of_all[2:3, :, :70], of_one)
        True
    """

    def __enter__(self) -> None:
        self._change(1)

    def __exit__(self, *_: object) -> None:
        self._change(-1)

    def _change(self, count: int) -> None:
        global _entered, _is_invariant
        if compat.is_compiling():  # torch traces no locks, and no other thread runs what it traces
            if count > 0:
                self._before = _is_invariant
            _is_invariant = count > 0 or self._before
            return
        with _LOCK:
            _entered += count
            _is_invariant = _entered > 0

    def __call__(self, function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def inside(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            with invariant():
                return function(*args, **kwargs)

        return inside


_entered = 0  # contexts that are open, in all threads
_is_invariant = False
_LOCK = threading.Lock()


def is_invariant() -> bool:
    """Whether results must not depend on what else is in a call."""
    return _is_invariant or compat.batch_invariant()


class Context(NamedTuple):
    """Everything around a call that decides how it runs, but for its arguments."""

    has_transforms: bool  # of torch.func
    is_transformed: bool  # by vmap, or a derivative is taken forward
    in_mode: bool  # a TorchDispatchMode
    wants_grad: bool
    is_capturing: bool  # a CUDA graph captures the call
    autocast: torch.dtype | None
    default_dtype: torch.dtype
    # Which kernels of scaled_dot_product_attention torch may take, whether it has to be deterministic, and whether it
    # only warns. The order of these kernels has no public name: a new one goes unnoticed where a call was made before.
    settings: tuple[bool, ...]
    is_invariant: bool  # results must not depend on what else is in the call, see `invariant`
    is_compiling: bool = False  # torch.compile or torch.export traces the call

    @classmethod
    def now(cls, device: torch.device) -> Context:
        """Return what is true now for calls on a device, which torch does not trace."""
        has_transforms, kind, cuda = compat.transforms_active(), device.type, torch.backends.cuda
        autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # `autocast_dtype`, without a call of a function
        return cls(
            has_transforms,
            compat.in_forward_derivative() or (has_transforms and "Vmap" in compat.names_of_transforms()),
            compat.in_dispatch_mode() > 0,
            torch.is_grad_enabled(),
            kind == "cuda" and is_capturing(device),
            torch.get_autocast_dtype(kind) if autocast else None,
            torch.get_default_dtype(),
            (
                cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(),
                cuda.math_sdp_enabled(), torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            _is_invariant or compat.batch_invariant(),
        )  # fmt: skip

    @property
    def adds_in_order(self) -> bool:
        """Whether kernels that can add in order do."""
        return self.is_invariant or self.settings[-2]

    @property
    def must_be_deterministic(self) -> bool:
        """Whether torch forbids results that may differ from run to run."""
        *_, is_deterministic, warns_only = self.settings
        return is_deterministic and not warns_only
