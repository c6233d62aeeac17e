"""Recorded computations: a function of tensors becomes a list of torch's operations.

The operations run without the function's work in Python. A function whose shapes depend on shapes only is traced once.
What does not depend on its inputs is computed once and kept, and repeated operations are merged. On a GPU the
operations are captured in a CUDA graph, which the host launches at once. Nothing is compiled.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from flexmasks import compat
from flexmasks.spec.values import Spread

_log = logging.getLogger("flexmasks")
_MAX_KEPT_ELEMENTS = 1 << 18  # larger constants are computed at each run
_MAX_CAPTURED_ELEMENTS = 1 << 25  # elements of the outputs, up to which a CUDA graph holds memory of its own
# Held from a run whose outputs are lent until they are used: no run of another thread may come between.
LOCK = threading.RLock()
_CAPTURED_ON = ("cuda",)
_NO_CONTEXT = contextlib.nullcontext()
_ALIGNMENT = 64  # kernels expect a tensor to begin at a multiple of this many elements of its memory


def memory_of_capture(nbytes: int) -> int:
    """Return about how many bytes a CUDA graph holds whose outputs have `nbytes`."""
    return 4 * nbytes if nbytes <= 4 * _MAX_CAPTURED_ELEMENTS else 0


class Recorded:
    """Operations of a function from tensors to a list of tensors.

    inputs: tensors like those of all later calls, in shape, strides, dtype and device.
    lends: outputs are lent, see `lend`.
    factored: the function returns one tensor [..., KV] in float32. Where it is a product of a tensor [..., 1] with one
        that has fewer elements than the product, these two are the outputs: first [..., KV], then [..., 1].
    turn: the number of the last run.
    varies: for each output, whether it depends on an input.

    Raises what the function raises, and torch's error where the function reads a tensor's value.
    """

    def __init__(
        self,
        function: Callable[..., list[Tensor]],
        inputs: Sequence[Tensor],
        *,
        lends: bool = False,
        factored: bool = False,
    ) -> None:
        with _plain_tensors(), compat.compile_lock:
            graph_module = make_fx(torch.func.functionalize(function), tracing_mode="fake")(*inputs)
            _simplify(graph_module, keeps_results=not factored)
            if factored:
                _give_out_factors(graph_module)
        self.varies = _dependence(graph_module.graph)
        self._run: Callable[..., list[Tensor]] = graph_module.forward
        self._captured: _Captured | None = None
        self._may_capture = True  # until it is tried
        self._lends = lends
        self.turn = 0

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs, which no later run changes."""
        if not self._lends:
            return self.lend(inputs)
        with LOCK:
            return [t.clone() for t in self.lend(inputs)]

    def lend(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs, which the next run may change if this object lends its outputs.

        The caller then holds LOCK until it has used them, on the current stream.
        """
        with _plain_tensors() if torch.is_inference_mode_enabled() else _NO_CONTEXT:
            self.turn += 1
            if not inputs or self.turn == 1 or inputs[0].device.type not in _CAPTURED_ON:
                return self._run(*inputs)
            device = inputs[0].device
            if torch.cuda.is_current_stream_capturing():
                return self._run(*inputs)
            with LOCK, _NO_CONTEXT if _is_current(device) else torch.cuda.device(device):
                if self._may_capture:
                    self._may_capture = False
                    self._captured = _Captured.of(self._run, inputs, self._lends)
                if self._captured is None or self._captured.raw_stream != compat.raw_stream(device):
                    return self._run(*inputs)
                return self._captured(inputs)


class Form(NamedTuple):
    """Tensors in which a kernel reads a mask or a score change, and what they are made from.

    inputs: the tensors that they are made from.
    program: makes them from other tensors in the places of the inputs. None if values that the host read decided: then
        other tensors are planned from the start.
    spread: numbers among the inputs that functions read for each head, see `Modifier.bind`.
    """

    tensors: Sequence[Tensor] = ()
    inputs: Sequence[Tensor] = ()
    program: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
    spread: Spread = []  # noqa: RUF012 # it is not changed


def _is_current(device: torch.device) -> bool:
    return device.index == torch.cuda.current_device()


class _Captured:
    """A CUDA graph of operations, with its inputs and outputs in fixed places.

    It runs on one stream only, so that no run overtakes another.
    """

    def __init__(self, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor], lends: bool) -> None:
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
                self._packs = [] if lends else [_Pack(tensors) for tensors in _by_dtype(self._outputs)]
            finally:
                self._graph.capture_end()
        stream.wait_stream(side)

    @classmethod
    def of(cls, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor], lends: bool) -> _Captured | None:
        """Return the captured operations, or None.

        None if they take too much memory or cannot be captured.
        """
        if sum(x.numel() for x in inputs) > _MAX_CAPTURED_ELEMENTS:
            return None
        was_collecting = gc.isenabled()
        gc.disable()  # what dies in a capture may wait for the GPU, which ends the capture
        try:
            captured = cls(run, inputs, lends)
        except RuntimeError as error:  # such as an operation that no graph can hold
            _log.warning("a plan cannot be captured in a CUDA graph, and takes more of the host's time: %s", error)
            return None
        finally:
            if was_collecting:
                gc.enable()
        return captured if sum(t.numel() for t in captured._outputs) <= _MAX_CAPTURED_ELEMENTS else None

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for place, x in zip(self._places, inputs, strict=True):
            place.fill(x)
        self._graph.replay()
        if not self._packs:
            return self._outputs
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
        """Copy a tensor into the place."""
        self._memory.copy_(x if self._span is None else x.as_strided((self._span,), (1,)))


def _shares_places(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may lie in each other's places."""
    end = 1  # of the dimensions with smaller strides
    for stride, n in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < end:
            return True
        end = stride * (n - 1) + end
    return False


class _Pack:
    """Tensors of one dtype side by side in one memory, which is copied at once.

    tensors: each with its place among the outputs.
    """

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
        """Return copies of the tensors, each with its place."""
        copy = self.memory.clone()
        return [(place, copy.as_strided(shape, stride, start)) for place, shape, stride, start in self._parts]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
    """Return groups of tensors of one dtype, each tensor with its place."""
    groups: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for place, t in enumerate(tensors):
        groups.setdefault(t.dtype, []).append((place, t))
    return list(groups.values())


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors that any later call may use.

    They belong neither to an autograd graph nor to inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


# --- fewer operations ---


def _simplify(graph_module: fx.GraphModule, keeps_results: bool) -> None:
    """Compute constants, merge repeated operations, and drop the ones that do nothing.

    keeps_results: also what is as large as a result may become a constant.
    """
    graph = graph_module.graph
    graph.eliminate_dead_code()  # a tensor with a dead use seems to be used twice
    results: Any = [] if keeps_results else graph.output_node().args[0]
    constants = _Constants(graph_module, min([_MAX_KEPT_ELEMENTS, *(n.meta["val"].numel() - 1 for n in results)]))
    known: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        same = _same_as(node, constants)
        if same is None:
            constants.keep(node)
            if node.op != "call_function":
                continue
            same = known.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    constants.insert()
    graph.eliminate_dead_code()
    graph_module.recompile()


def _same_as(node: fx.Node, constants: _Constants) -> fx.Node | None:
    """Return the node whose value a node repeats, or None."""
    aten = torch.ops.aten
    if node.target in (aten.detach.default, aten.lift_fresh_copy.default):
        return cast(fx.Node, node.args[0])
    if node.target is aten.clone.default and _copies_in_vain(node):
        return cast(fx.Node, node.args[0])
    if _is_given_out(node):  # a result may not be the memory of an input
        return None
    if node.target is aten.index.Tensor and constants.counts_up(node):
        return cast(fx.Node, node.args[0])
    return constants.added_to_zero(node) if node.target is aten.add.Tensor else None


def _is_given_out(node: fx.Node) -> bool:
    """Return whether a node, or a view of it, is a result of the graph."""
    return any(user.op == "output" or (_is_view(user) and _is_given_out(user)) for user in node.users)


def _is_view(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info for r in schema.returns)


def _copies_in_vain(clone: fx.Node) -> bool:
    """Return whether a node copies a new contiguous tensor that nothing else uses."""
    source: Any = clone.args[0]
    value = source.meta.get("val")
    keeps_layout = clone.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
    if not keeps_layout or not isinstance(value, Tensor) or not value.is_contiguous():
        return False
    while True:
        if source.op != "call_function" or len(source.users) > 1 or not isinstance(source.meta.get("val"), Tensor):
            return False
        if not hasattr(source.target, "_schema") or source.meta["val"].numel() != value.numel():
            return False
        if not _is_view(source):
            return True
        source = source.args[0]  # what a view is of


def _key(value: Any) -> Hashable:
    """Return a key of an operation's arguments; numbers of different types differ."""
    if isinstance(value, tuple | list):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((n, _key(v)) for n, v in value.items())
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


def _layout(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype  # later views of a tensor depend on its strides


def _give_out_factors(graph_module: fx.GraphModule) -> None:
    """Replace a graph's result by its factors, if it is a product."""
    aten, graph = torch.ops.aten, graph_module.graph
    output: Any = graph.output_node()
    product: Any = output.args[0][0]
    ndim, size = product.meta["val"].ndim, product.meta["val"].numel()
    while _broadcasts(product):
        product = product.args[0]
    is_negative = product.target is aten.sub.Tensor and not product.kwargs and _is_zero(product.args[0])
    if is_negative:
        product = product.args[1]
    if product.target is not aten.mul.Tensor:
        return
    factors = [n for n in product.args if isinstance(n, fx.Node) and n.meta["val"].dtype == torch.float32]
    if len(factors) < 2:
        return
    weight, numbers = sorted(factors, key=_has_columns)
    if _has_columns(weight) or numbers.meta["val"].numel() >= size:
        return
    with graph.inserting_before(output):
        if is_negative:
            negative = graph.call_function(aten.neg.default, (weight,))
            negative.meta["val"] = weight.meta["val"]
            weight = negative
        shapes = [(1,) * (ndim - n.meta["val"].ndim) + n.meta["val"].shape for n in (numbers, weight)]
        views = [
            graph.call_function(aten.view.default, (n, shape))
            for n, shape in zip((numbers, weight), shapes, strict=True)
        ]
    output.args = (views,)
    graph.eliminate_dead_code()
    graph_module.recompile()


def _broadcasts(node: fx.Node) -> bool:
    """Return whether a node behind a product only repeats it, or copies it."""
    aten = torch.ops.aten
    if node.target is aten.unsqueeze.default:
        return bool(node.args[1] == 0)
    return node.target in (aten.clone.default, aten.expand.default, aten.slice.Tensor)  # slices of what repeats


def _dependence(graph: fx.Graph) -> list[bool]:
    """Return for each result of a graph whether it depends on an input."""
    depends: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        depends[node] = node.op == "placeholder" or any(depends[n] for n in node.all_input_nodes)
    results: Any = graph.output_node().args[0]
    return [depends[n] for n in results]


def _has_columns(node: fx.Node) -> bool:
    """Return whether the last dimension of a tensor does not broadcast."""
    return node.meta["val"].shape[-1:] not in ((), (1,))


def _is_zero(node: Any) -> bool:
    """Return whether a node is a constant of zeros."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and not node.meta["val"].any()


class _Constants:
    """The nodes of a graph that depend on no input, with their values."""

    def __init__(self, graph_module: fx.GraphModule, max_elements: int) -> None:
        self._module, self._max_elements = graph_module, max_elements
        self._values: dict[fx.Node, Any] = {}

    def keep(self, node: fx.Node) -> None:
        """Compute the value of a node, if all that it depends on is known."""
        if node.op == "get_attr":
            self._values[node] = getattr(self._module, str(node.target))
            return
        is_known = all(n in self._values for n in node.all_input_nodes)
        size = getattr(node.meta.get("val"), "numel", lambda: self._max_elements + 1)()
        if is_known and size <= self._max_elements:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._values[n])
            target: Any = node.target
            self._values[node] = target(*args, **kwargs)

    def added_to_zero(self, add: fx.Node) -> fx.Node | None:
        """Return what a node adds to known zeros, if it is the node's value."""
        result = add.meta["val"]
        for zeros, other in (add.args, add.args[::-1]):
            zeros = self._values.get(zeros) if isinstance(zeros, fx.Node) else None
            value = other.meta.get("val") if isinstance(other, fx.Node) else None
            if not isinstance(zeros, Tensor) or not isinstance(value, Tensor) or add.kwargs:
                continue
            if _layout(result) == _layout(value) and not bool(zeros.any()):
                return cast(fx.Node, other)
        return None

    def counts_up(self, index: fx.Node) -> bool:
        """Return whether a node reads all elements along the first dimension, in their order."""
        value, (source, indices) = index.meta["val"], cast(Any, index.args)
        places = self._values.get(indices[0]) if len(indices) == 1 else None
        if not isinstance(places, Tensor) or places.ndim != 1 or _layout(source.meta["val"]) != _layout(value):
            return False
        return bool((places == torch.arange(len(places), device=places.device)).all())

    def insert(self) -> None:
        """Put the values in the places of their nodes, where other nodes need them."""
        graph = self._module.graph
        for number, (node, value) in enumerate(self._values.items()):
            if node.op == "call_function" and any(user not in self._values for user in node.users):
                name = f"_constant_{number}"
                self._module.register_buffer(name, value, persistent=False)
                with graph.inserting_before(node):
                    kept = graph.get_attr(name)
                kept.meta["val"] = value
                node.replace_all_uses_with(kept)
