"""What activation checkpointing sees of a call: hooks for saved tensors, and the modes of its selective kind."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat

_LEFT: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("modes that were left", default=[])  # noqa: B039


def in_selective_checkpointing() -> bool:
    """Return whether selective activation checkpointing watches the operations of this thread.

    It keeps their results, and counts those that it computes again.
    """
    return bool(compat.in_dispatch_mode()) and any(map(compat.is_of_checkpointing, compat.active_modes()))


@contextlib.contextmanager
def unseen_by_checkpointing() -> Iterator[None]:
    """Leave the modes of selective checkpointing, but for what runs in `seen_by_checkpointing`."""
    modes = compat.active_modes()
    token = _LEFT.set(modes)
    try:
        with compat.without_dispatch_modes(), _told([mode for mode in modes if not compat.is_of_checkpointing(mode)]):
            yield
    finally:
        _LEFT.reset(token)


def is_unseen_by_checkpointing() -> bool:
    return bool(_LEFT.get())


@contextlib.contextmanager
def seen_by_checkpointing() -> Iterator[None]:
    """Return to the modes that `unseen_by_checkpointing` has left."""
    with compat.without_dispatch_modes(), _told(_LEFT.get()):
        yield


@contextlib.contextmanager
def _told(modes: list[Any]) -> Iterator[None]:
    """Tell modes of each operation, the oldest first. `with mode:` would make a mode of checkpointing count anew."""

    class Told(compat.TorchDispatchMode):
        def __init__(self, mode: Any) -> None:
            super().__init__()
            self.mode = mode

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.mode.__torch_dispatch__(func, types, args, kwargs or {})

    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(Told(mode))
        yield


@contextlib.contextmanager
def beside_saved_tensors_hooks() -> Iterator[None]:
    """Let tensors be saved for a backward pass without the hooks of the code around.

    Hooks of its own take their place, which keep a tensor without its history: with it, a result that a function saves
    would keep itself alive. Where the code around has forbidden all hooks, there are none, and new ones raise an error.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x))
        yield


def saves_by_hooks() -> bool:
    """Return whether the code around has hooks for saved tensors, as activation checkpointing does.

    torch does not answer that, but refuses to forbid hooks where there are some.
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("flexmasks asks whether there are hooks"):
            return False
    except RuntimeError:
        return True


Results = tuple[Tensor | None, ...]


def watched(results: Results, check_of: Callable[[], Callable[[], None]]) -> Results:
    """Return the results of a call. Where activation checkpointing makes the call again, a check comes before that.

    Checkpointing reads the tensors of a mask and a score again, and compares no versions.

    check_of: returns the check, which raises an error if the call would give other results.
    """
    for x in results:
        if x is not None and x.requires_grad:
            return cast(Results, _Watched.apply(check_of(), *results)) if saves_by_hooks() else results
    if not torch.is_grad_enabled() and (nodes := _nodes_of_reentrant_checkpoints()):
        check = check_of()
        for node in nodes:
            node.register_prehook(lambda _: check())
    return results


class _Watched(torch.autograd.Function):
    """Results of a call whose backward pass first checks what the forward pass read."""

    @staticmethod
    def forward(ctx: Any, check: Callable[[], None], *results: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.check = check
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else x.view_as(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.check()
        return None, *gradients


def _nodes_of_reentrant_checkpoints() -> list[Any]:
    """Return the autograd nodes of the reentrant checkpoints around this call, which their backward passes make again.

    Such a checkpoint, torch's or that of another library, is an autograd.Function whose forward method runs a function
    without gradients, and whose backward method runs it again. torch tells the function nothing about it.
    """
    nodes: list[Any] = []
    frame = inspect.currentframe() if compat.in_function_without_gradients() else None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            node = frame.f_locals.get(code.co_varnames[0])
            is_checkpoint = isinstance(node, torch.autograd.function.FunctionCtx) and "heckpoint" in type(node).__name__
            nodes += [node] if is_checkpoint else []
        frame = frame.f_back
    return nodes
