"""Tensors that say they are on a device which is not here, such as Apple's GPU. Their numbers are on the CPU.

They hold what such a device refuses: operations on tensors of two devices, and on Apple's GPUs numbers of float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_MAKE = ("empty", "zeros", "ones", "full", "arange", "tensor", "randint", "rand", "randn", "empty_strided", "linspace")
_READ = ("__int__", "__bool__", "__float__", "__index__", "tolist", "item")
_CPU = torch.device("cpu")


class _Elsewhere(Tensor):
    """A tensor of another device. torch's own code for a device is that for a CPU."""

    kind = ""
    has_float64 = True
    numbers: Tensor

    @staticmethod
    def __new__(cls: type[_Elsewhere], numbers: Tensor, requires_grad: bool = False) -> _Elsewhere:
        if numbers.dtype == torch.float64 and not cls.has_float64:
            raise TypeError(f"{cls.kind} has no float64")
        made: _Elsewhere = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=_CPU, requires_grad=requires_grad,
        )  # fmt: skip
        made.numbers = numbers
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.kind, 0)

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.kind}: {self.numbers!r}"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = {id(x.numbers): x for x in given if isinstance(x, _Elsewhere)}
        stays = True
        if "copy_" in func.__name__:
            stays = isinstance(given[0], _Elsewhere)
        elif any(x.ndim and not isinstance(x, _Elsewhere) and not _is_of_autograd(x) for x in given):
            raise RuntimeError(f"{func}: tensors on {cls.kind} and on the CPU")
        if "device" in kwargs:  # that of another tensor, which torch's own code takes for the CPU
            kwargs["device"] = _CPU
        args, kwargs = tree_map(numbers, args), tree_map(numbers, kwargs)

        def there(x: Any) -> Any:
            if not stays or not isinstance(x, Tensor):
                return x
            return known[id(x)] if id(x) in known else cls(x)

        return tree_map(there, func(*args, **kwargs))


def numbers(x: Any) -> Any:
    """Return a tensor's numbers on the CPU, and anything else as it is."""
    return x.numbers if isinstance(x, _Elsewhere) else x


def _is_of_autograd(x: Tensor) -> bool:
    """Whether a tensor is one of the zeros that autograd makes where it has no gradient."""
    return x.is_floating_point() and not bool(x.any())


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[_Elsewhere]) -> Tensor:
        ctx.kind = kind
        return x.numbers.clone() if isinstance(x, _Elsewhere) else kind(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.numbers if isinstance(grad, _Elsewhere) else ctx.kind(grad), None


@contextmanager
def device_elsewhere(kind: str, has_float64: bool) -> Iterator[Callable[..., Tensor]]:
    """Let torch make tensors on a kind of device that is not here. Yields what moves a tensor there."""
    there = type(kind, (_Elsewhere,), {"kind": kind, "has_float64": has_float64})

    def is_there(device: Any) -> bool:
        return isinstance(device, str | torch.device) and torch.device(device).type == kind

    def making(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
            if not is_there(device):
                return make(*args, device=device, requires_grad=requires_grad, **kwargs)
            return there(make(*args, device=_CPU, **kwargs), requires_grad)

        return made

    def reading(read: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *args: read(numbers(x.detach()) if isinstance(x, _Elsewhere) else x, *args)

    move = Tensor.to

    def moved(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        to = next((a for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)), x.device)
        args = tuple(a for a in args if not isinstance(a, str | torch.device))
        kwargs.pop("device", None)
        x = move(x, *args, **kwargs) if args or kwargs else x
        return x if is_there(to) == isinstance(x, _Elsewhere) else _Moved.apply(x, there)  # type: ignore[no-untyped-call]

    with pytest.MonkeyPatch.context() as patch:
        for name in _MAKE:
            patch.setattr(torch, name, making(getattr(torch, name)))
        for name in _READ:
            patch.setattr(Tensor, name, reading(getattr(Tensor, name)))
        patch.setattr(Tensor, "to", moved)
        patch.setattr(Tensor, "cpu", lambda x: x.to(_CPU))
        yield there
