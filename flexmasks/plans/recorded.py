"""Recorded computations: a function of tensors becomes the program of its operations, see `plans.tracing`.

A function whose shapes depend on shapes only is traced once. On a GPU the operations are captured in a CUDA graph,
which the host launches at once. Nothing is compiled.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.context import is_capturing
from flexmasks.plans.tracing import Operations, trace

_log = logging.getLogger("flexmasks")
_MAX_ELEMENTS_IN_GRAPH = 1 << 25  # elements of the outputs, up to which a CUDA graph holds memory of its own
_LOCK = threading.RLock()  # held while a CUDA graph runs and its outputs are copied
_GRAPHS_ON = ("cuda",)
_CPU = torch.device("cpu")
_NO_CONTEXT = contextlib.nullcontext()
_ALIGNMENT = 64  # kernels expect a tensor to begin at a multiple of this many elements of its memory


def memory_of_graph(nbytes: int) -> int:
    """About how many bytes a CUDA graph holds whose outputs have `nbytes`."""
    return 4 * nbytes if nbytes <= 4 * _MAX_ELEMENTS_IN_GRAPH else 0


class Recorded:
    """Operations of a function from tensors to a list of tensors.

    inputs: tensors like those of all later calls, in shape, strides, dtype and device.
    varies: for each output, whether it depends on an input.

    Raises what `trace` raises.
    """

    def __init__(self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> None:
        with _plain_tensors():
            self._run = trace(function, inputs)
        self.varies = self._run.varies
        self._in_graph: _Graph | None = None
        self._may_capture = True  # until it is tried

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, in memory of their own."""
        with _plain_tensors() if torch.is_inference_mode_enabled() else _NO_CONTEXT:
            device = inputs[0].device if inputs else _CPU
            if device.type not in _GRAPHS_ON or is_capturing(device):
                return self._run_alone(inputs)
            with _LOCK, _NO_CONTEXT if _is_current(device) else torch.cuda.device(device):
                if self._may_capture:
                    self._may_capture = False
                    self._in_graph = _Graph.of(self._run, inputs)
                if self._in_graph is None or self._in_graph.raw_stream != compat.raw_stream(device):
                    return self._run_alone(inputs)
                return self._in_graph(inputs)

    def _run_alone(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run without a CUDA graph; outputs that are part of an input, or the same at each run, are copied."""
        given = {x.untyped_storage().data_ptr() for x in inputs}
        outputs = zip(self._run(*inputs), self.varies, strict=True)
        return [t if varies and t.untyped_storage().data_ptr() not in given else t.clone() for t, varies in outputs]


class Learning:
    """A function from tensors to a tensor, of which only the operations run from the second call on, with gradients.

    function: its tensors have the same layouts at each call, and it does no more than its operations tell.
    """

    def __init__(self, function: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self._function = function
        self._program: Operations | None = None
        self._calls = 0

    def __call__(self, tensors: Sequence[Tensor], visible: Tensor | None = None) -> Tensor:
        self._calls += 1
        if self._calls == 2:  # tracing takes as long as some calls
            with contextlib.suppress(RuntimeError):  # it reads values
                self._program = trace(lambda *given: [self._function(given)], [t.detach() for t in tensors])
        return self._function(tensors) if self._program is None else self._program(*tensors)[0]


def _is_current(device: torch.device) -> bool:
    return device.index == torch.cuda.current_device()


class _Graph:
    """A CUDA graph of operations, with its inputs and outputs in fixed places. It runs on one stream only."""

    def __init__(self, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream()
        self.raw_stream = stream.cuda_stream
        self._places = [_Place(x) for x in inputs]
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._outputs = run(*(p.tensor for p in self._places))
                self._packs = [_Pack(tensors) for tensors in _by_dtype(self._outputs)]
            finally:
                self._graph.capture_end()
        stream.wait_stream(side)

    @classmethod
    def of(cls, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> _Graph | None:
        """The graph of operations, None if they take too much memory or cannot be captured."""
        if sum(x.numel() for x in inputs) > _MAX_ELEMENTS_IN_GRAPH:
            return None
        was_collecting = gc.isenabled()
        gc.disable()  # what dies in a capture may wait for the GPU, which ends the capture
        try:
            graph = cls(run, inputs)
        except RuntimeError as error:  # such as an operation that no graph can hold
            _log.warning("a plan cannot be captured in a CUDA graph, and takes more of the host's time: %s", error)
            return None
        finally:
            if was_collecting:
                gc.enable()
        return graph if sum(t.numel() for t in graph._outputs) <= _MAX_ELEMENTS_IN_GRAPH else None

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for place, x in zip(self._places, inputs, strict=True):
            place.fill(x)
        self._graph.replay()
        outputs = {place: output for pack in self._packs for place, output in pack.copies()}
        return [outputs[place] for place in range(len(outputs))]


class _Place:
    """A fixed place of an input, with the input's layout.

    tensor: its elements may lie in each other's places, as those of an expanded tensor do.
    """

    def __init__(self, like: Tensor) -> None:
        self._span: int | None = None
        if like.numel() and _shares_places(like):  # torch fills no such tensor
            self._span = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
            self._memory = like.new_empty(self._span)
            self.tensor = self._memory.as_strided(like.shape, like.stride())
        else:
            self.tensor = self._memory = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )

    def fill(self, x: Tensor) -> None:
        self._memory.copy_(x if self._span is None else x.as_strided((self._span,), (1,)))


def _shares_places(tensor: Tensor) -> bool:
    end = 1  # of the dimensions with smaller strides
    for stride, n in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < end:
            return True
        end = stride * (n - 1) + end
    return False


class _Pack:
    """Tensors of one dtype, each with its place among the outputs, in one memory that is copied at once."""

    def __init__(self, tensors: Sequence[tuple[int, Tensor]]) -> None:
        self._parts: list[tuple[int, torch.Size, tuple[int, ...], int]] = []
        end = 0
        for place, t in tensors:
            self._parts.append((place, t.shape, torch.empty(t.shape, device="meta").stride(), end))
            end += -(-t.numel() // _ALIGNMENT) * _ALIGNMENT
        first = tensors[0][1]
        self.memory = torch.empty(end, dtype=first.dtype, device=first.device)
        compat.copy_all([self.memory.as_strided(*part[1:]) for part in self._parts], [t for _, t in tensors])

    def copies(self) -> list[tuple[int, Tensor]]:
        copy = self.memory.clone()
        return [(place, copy.as_strided(shape, stride, start)) for place, shape, stride, start in self._parts]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
    groups: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for place, t in enumerate(tensors):
        groups.setdefault(t.dtype, []).append((place, t))
    return list(groups.values())


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors that any later call may use, as they belong neither to an autograd graph nor to inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
