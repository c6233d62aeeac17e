"""Private symbols of torch, gathered in the only file that names them.

If a torch release moves a symbol, only this file changes. A torch without one of these symbols costs the feature that
needs it, never the import: something public takes its place, or its use raises `MissingFromTorch`, which says what it
is needed for. `tests/engine/test_missing.py` takes each of them away in turn.

"No public equivalent" was checked on torch 2.11 and 2.13, and up to 2.15 where a comment names that version.

Two public ways of later versions are not taken. FLASH takes Python's numbers in score changes as inputs from torch 2.14
on; nobody has tried it with this library. `torch.compile(isolate_recompiles=True)` (torch 2.13) gives
each call its own recompile limit, but all calls on one function share a limit of 256 compilations, behind which torch
2.13 and 2.15 fail; a code object for each kernel, as `backends/flex_kernels.py` makes it, has no such limit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

if TYPE_CHECKING:
    from torch._dynamo.convert_frame import compile_lock as compile_lock
    from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
    from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
    from torch._inductor.exc import InductorError as InductorError
    from torch._subclasses import FakeTensor as FakeTensor
    from torch.fx.experimental.symbolic_shapes import guard_or_false as guard_or_false
    from torch.fx.experimental.symbolic_shapes import guard_or_true as guard_or_true
    from torch.fx.experimental.symbolic_shapes import has_static_value as has_static_value
    from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
    from torch.nn.attention.flex_attention import AuxRequest as AuxRequest
    from torch.nn.attention.flex_attention import BlockMask as BlockMask
    from torch.nn.attention.flex_attention import flex_attention as flex_attention

    FlexGradients: Any
    SingleLevelFunction: Any
    StopRecomputation: Any
    TorchDispatchMode: Any
    all_to_all_single: Callable[[Tensor, list[int], list[int], Any], Tensor]
    fused_sdp_choice: Callable[..., int]
    inductor_config: Any
    in_dispatch_mode: Callable[[], int]
    is_wrapped: Callable[[Any], bool]
    cute_unary: Any
    copy_all: Callable[[list[Tensor], list[Tensor]], None]
    decompositions: Callable[[], Any]
    forget_code: Callable[[Any], None]
    require: Callable[[Any, Callable[[], str]], None]
    without_torch_function: Any
    transforms_active: Callable[[], bool]
    register_pytree_node: Callable[..., None]
    version: Callable[[Tensor], int]
    base: Callable[[Tensor], Tensor | None]
    CuteOverrides: Any
    flash_on_cpu: Callable[..., tuple[Tensor, Tensor]]
    flash_on_cpu_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    lowering: Any

_Function = TypeVar("_Function", bound=Callable[..., Any])
_here: Any = sys.modules[__name__]  # `_here.NAME` in what each call of `attention` asks is faster than `named("NAME")`


class MissingFromTorch(RuntimeError):
    """Error of a feature that needs a private symbol of torch, which this torch does not have."""


class _Missing:
    """In place of a symbol that this torch does not have: its use raises an error."""

    def __init__(self, path: str, needed_for: str) -> None:
        self._says = (
            f"flexmasks: torch {torch.__version__} has no {path}, which is needed for {needed_for}. "
            f"Install a torch that flexmasks is tested with: 2.11 to {_NEWEST[0]}.{_NEWEST[1]}."
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise MissingFromTorch(self._says)

    __call__ = __enter__ = __exit__ = __and__ = _refuse

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """Return the base of classes that derive from the symbol: their use as a context is refused."""
        return (type("Refused", (), {"__enter__": self._refuse, "__exit__": self._refuse}),)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for what an object may have
            raise AttributeError(name)
        return self._refuse()


class _Never(Exception):
    """In place of a class that this torch does not have: nothing is of it, and nothing raises it."""


# --- versions ---

_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])
_NEWEST = (2, 15)  # that the tests ran with, see recipes/results/versions.md
IS_TESTED = _TORCH <= _NEWEST
if not IS_TESTED:
    logging.getLogger("flexmasks").info(
        "torch %s is newer than %d.%d, the newest tested one", torch.__version__, *_NEWEST
    )

# Whether the lists of a BlockMask may have fewer places than there are blocks (pytorch#185687). Kernels on CPUs do not
# take them: Inductor raises an AssertionError about the length of the keys.
TAKES_NARROW_LISTS = _TORCH >= (2, 14)

# Whether FLASH gives the lse and its gradient: torch 2.11 and 2.12 multiply the lse by ln 2, and up to 2.13 it has no
# gradient.
FLASH_GIVES_LSE = _TORCH >= (2, 14)

# Devices on which torch's flex_attention runs; those of MPS have forward passes only.
FLEX_RUNS_ON = {"cpu", "cuda", "xpu"} | ({"mps"} if _TORCH >= (2, 13) else set())

# Whether FLASH's compiler reads captured tensors by vectors, as in torch 2.13; torch 2.11 does not. GPUs of capability
# 10 and above then read some wrongly.
FLASH_READS_VECTORS = _TORCH > (2, 11)

# Whether Inductor sees that kernels of FLASH read captured tensors (pytorch#181800). Before, a graph frees those that
# another kernel has read and no backward pass keeps, and those from which it computes what is captured in the kernel:
# an UnboundLocalError.
FLASH_HOLDS_CAPTURED = _TORCH >= (2, 13)

# --- private names of torch ---

_versions = itertools.count()


def new_version(x: Tensor) -> int:
    return next(_versions)


def _copy_each(places: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


_FLASH_ON_CPU = "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu"
_CUTE = "torch._inductor.codegen.cutedsl.cutedsl_op_overrides:CuteDSLOpOverrides"
_MODES = "torch.utils._python_dispatch"
_NO_LOOK = "a look at functions of yours"
_NO_MODES = "calls inside a TorchDispatchMode"
_NO_TRANSFORMS = "calls inside transforms of torch.func"

# Each name, where it is in torch (a module and the name in it, or a module alone), and what takes its place in a torch
# that does not have it; a text says what then raises MissingFromTorch. Code reads `compat.NAME`, which looks into torch
# at the first use: torch's compilers and SymPy take longer to import than the rest of torch, and many processes only
# make or draw masks. The names of flex_attention, of symbolic_shapes and of proxy_tensor are public.
NAMES: dict[str, tuple[str, Any]] = {
    # --- pytrees, in which pipelines split masks ---
    "register_pytree_node": ("torch.utils._pytree:register_pytree_node", lambda kind, flatten, unflatten: None),
    # --- torch.func, derivatives ---
    # The active transforms of torch.func, the innermost last, or None.
    "transforms": ("torch._C._functorch:get_interpreter_stack", _NO_TRANSFORMS),
    "transforms_active": (
        "torch._C:_are_functorch_transforms_active", lambda: bool(named("transforms")()),
    ),
    "without_transforms": ("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", _NO_TRANSFORMS),
    # Wrappers that these transforms put around tensors; without the name such tensors look like others.
    "is_wrapped": ("torch._C._functorch:is_functorch_wrapped_tensor", lambda x: False),
    "unwrapped": ("torch._C._functorch:get_unwrapped", _NO_TRANSFORMS),
    # A Function of one level of transforms; a public one, with several, is slower.
    "SingleLevelFunction": ("torch.autograd.function:_SingleLevelFunction", torch.autograd.Function),
    # Switch for forward derivatives in this thread, a context manager.
    "forward_derivatives": ("torch.autograd.forward_ad:_set_fwd_grad_enabled", None),
    # --- tensors, modes of this thread ---
    # Count of in-place changes, by which caches notice a change; without it each tensor counts as changed.
    "version": ("torch:Tensor._version.__get__", new_version),
    # The tensor that a tensor is a view of, or None; without it a view made anew counts as another tensor.
    "base": ("torch:Tensor._base.__get__", lambda x: None),
    # The number of active dispatch modes (torch's `is_in_torch_dispatch_mode` answers for all threads at once), the
    # modes, a way to leave them, and the base of such a mode.
    "in_dispatch_mode": ("torch._C:_len_torch_dispatch_stack", lambda: len(named("dispatch_modes")())),
    "dispatch_modes": (f"{_MODES}:_get_current_dispatch_mode_stack", _NO_MODES),
    "disable_modes": (f"{_MODES}:_disable_current_modes", _NO_MODES),
    "TorchDispatchMode": (f"{_MODES}:TorchDispatchMode", _NO_LOOK),
    # Leaves the active TorchFunctionModes for a block of code; without it, planning a mask takes longer.
    "without_torch_function": ("torch._C:DisableTorchFunction", contextlib.nullcontext),
    # Tensors without data, which tracing makes; their values must not be read.
    "FakeTensor": ("torch._subclasses:FakeTensor", _Never),
    "FakeTensorMode": ("torch._subclasses.fake_tensor:FakeTensorMode", _NO_LOOK),
    # The error by which activation checkpointing ends what it computes again; without it a backend that saves the last
    # tensors would seem to have failed.
    "StopRecomputation": ("torch.utils.checkpoint:_StopRecomputationError", _Never),
    # --- torch.compile ---
    # What torch.compile and torch.export know while they trace; without it, calls that they trace are not noticed.
    "traced_context": ("torch._guards:TracingContext.try_get", lambda: None),
    # What torch.compile knows of the code that it traces; without it functions are not looked at there.
    "traced_code": ("torch._dynamo.symbolic_convert:InstructionTranslator.current_tx", None),
    # The lock that a thread holds while torch compiles. Tracing holds it too: torch keeps what it knows about
    # compilation and dispatch modes in variables of the whole process, and a thread that traces changes them for a
    # thread that compiles.
    "compile_lock": ("torch._dynamo.convert_frame:compile_lock", threading.RLock()),
    # Errors of a failed compilation, which another backend may answer.
    "FailOnRecompileLimitHit": ("torch._dynamo.exc:FailOnRecompileLimitHit", _Never),
    "InductorError": ("torch._inductor.exc:InductorError", _Never),
    "TorchDynamoException": ("torch._dynamo.exc:TorchDynamoException", _Never),
    # The base of errors that torch.compile passes on to the user as they are, and without its own lines.
    "ShortenTraceback": ("torch._dynamo.exc:ShortenTraceback", AssertionError),
    # Frees what torch compiled for a code object; without it, compiled code accumulates.
    "forget_code": ("torch._dynamo.eval_frame:remove_from_cache", lambda code: None),
    # Settings, documented in private modules: whether torch.compile is switched off for the process, how many graphs
    # torch compiles from one code object, and functions with which graphs may be kept on the disk.
    "dynamo_config": ("torch._dynamo.config", types.SimpleNamespace(disable=False, recompile_limit=8)),
    "inductor_config": ("torch._inductor.config", types.SimpleNamespace(unsafe_marked_cacheable_functions=None)),
    # Checks a size inside an operator, also a symbolic one. torch documents it despite its name.
    "require": ("torch:_check", "masks of symbolic sizes in the softmax"),
    # Decompositions of operators that FLASH's compiler applies.
    "decompositions": ("torch._inductor.decomposition:select_decomp_table", "a look at functions for FLASH"),
    # What traces the gradients of flex_attention's scores, see `_mend_gradients_of_scores`.
    "trace_gradients": ("torch._higher_order_ops.flex_attention:create_fw_bw_graph", None),
    # What lets a score change index tensors by tensors while its gradients are traced.
    "TransformGetItemToIndex": ("torch._dynamo._trace_wrapped_higher_order_op:TransformGetItemToIndex", None),
    # What differentiates flex_attention, see `flex_invariant.adds_in_order`; without it no gradients are invariant.
    "FlexGradients": ("torch._higher_order_ops.flex_attention:FlexAttentionAutogradOp", None),
    # What makes an operator an instruction of the GPU in compiled code; without it the operator is not used.
    "lowering": ("torch._inductor.lowering", None),
    "CuteOverrides": (_CUTE, None),
    "cute_unary": (f"{_CUTE}._apply_unary_op", None),
    # --- kernels ---
    # The kernel that scaled_dot_product_attention would use, an SDPBackend's value; without it, calls that torch would
    # run unfused are taken for fused ones.
    "fused_sdp_choice": ("torch:_fused_sdp_choice", lambda *_, **__: 1),
    # torch's kernel for the CPU; the public function gives no lse.
    "flash_on_cpu": (_FLASH_ON_CPU, "masks as tensors on a CPU"),
    "flash_on_cpu_backward": (f"{_FLASH_ON_CPU}_backward", "masks as tensors on a CPU"),
    # Copies tensors into others by one kernel. torch.foreach.copy_ is public from torch 2.15 on.
    "copy_all": ("torch:_foreach_copy_", _copy_each),
    # The address of the current stream of a GPU, by its index. The public way takes longer.
    "stream": (
        "torch._C:_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream,
    ),
    # The public nested_tensor_from_jagged logs a warning about tracing, and fails while another thread traces.
    "nested_view": ("torch.nested._internal.nested_tensor:nested_view_from_values_offsets_lengths", None),
    "all_to_all_single": (
        "torch.distributed._functional_collectives:all_to_all_single_autograd", "attention over several processes",
    ),
    # --- public names that take long to import ---
    "AuxRequest": ("torch.nn.attention.flex_attention:AuxRequest", "compiled kernels"),
    "BlockMask": ("torch.nn.attention.flex_attention:BlockMask", "block masks"),
    "flex_attention": ("torch.nn.attention.flex_attention:flex_attention", "compiled kernels"),
    "get_proxy_mode": ("torch.fx.experimental.proxy_tensor:get_proxy_mode", lambda: None),
    "guard_or_false": ("torch.fx.experimental.symbolic_shapes:guard_or_false", bool),
    "guard_or_true": ("torch.fx.experimental.symbolic_shapes:guard_or_true", bool),
    "has_static_value": ("torch.fx.experimental.symbolic_shapes:has_static_value", lambda n: type(n) in (int, float)),
    "statically_known_true": ("torch.fx.experimental.symbolic_shapes:statically_known_true", lambda x: x is True),
}  # fmt: skip

# Held while these modules are imported. They import each other: threads that began at different ones would find some of
# them half done.
IMPORTING = threading.RLock()


@contextlib.contextmanager
def keeping_environment() -> Iterator[None]:
    """Leave the environment as it is where torch may import torch._dynamo, which names Inductor's folder there."""
    variable = "TORCHINDUCTOR_CACHE_DIR"
    given = os.environ.get(variable)
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(variable, None)


def named(name: str) -> Any:
    """Return what `NAMES` calls so."""
    if name in globals():
        return globals()[name]
    path, without = NAMES[name]
    module, _, attribute = path.partition(":")
    with IMPORTING, keeping_environment():
        if name == "compile_lock":  # whoever traces holds it
            _keep_device_guard()
        if name == "flex_attention":
            _mend_gradients_of_scores()
        try:
            value: Any = importlib.import_module(module)
            if attribute:
                value = operator.attrgetter(attribute)(value)
        except (ImportError, AttributeError):
            value = _Missing(path.replace(":", "."), without) if isinstance(without, str) else without
        globals()[name] = value
    return value


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return named(name)


@functools.cache
def _mend_gradients_of_scores() -> None:
    """Let torch trace the gradients of a score in the thread that compiles, and sum them over visible pairs.

    A thread that compiles flex_attention holds torch's compile lock, traces the gradients of the score, and so waits
    for the one thread that runs all backward passes of a GPU. That thread waits for the lock if it comes to a backward
    pass that is not compiled yet: both wait without end. Where autograd uses no other threads, as in all other tracing
    of torch, the first thread does not wait. Seen in torch 2.11 to 2.15.
    """
    create = named("trace_gradients")
    operators = importlib.import_module("torch._higher_order_ops.flex_attention")

    def create_fw_bw_graph(score_mod: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        def of_both(score: Tensor, b: Tensor, *others: Tensor) -> Tensor:
            return torch.where(b >= 0, score_mod(score, b, *others), score)

        with torch.autograd.set_multithreading_enabled(False):
            try:
                forward, backward = create(score_mod, *args, **kwargs)
            except RuntimeError as error:  # torch 2.15 refuses a score that does not depend on the given one
                if "to depend on score" not in str(error):
                    raise
                forward, backward = create(of_both, *args, **kwargs)
        _mend_backward(backward)
        return forward, backward

    if create is not None:
        operators.create_fw_bw_graph = create_fw_bw_graph  # type: ignore[attr-defined]


def gradient_of_score(score_mod: Callable[..., Tensor], q: Tensor, tensors: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Return the function that flex_attention makes for the gradient of a score change.

    It takes the arguments of the score change, with the gradient of its result in front of its tensors, and returns a
    gradient for each of the others, the first one that of the score.
    """
    operators = importlib.import_module("torch._higher_order_ops.flex_attention")
    indices = [q.new_zeros((), dtype=torch.int32) for _ in range(4)]
    with named("TransformGetItemToIndex")(), torch.enable_grad():
        score = q.new_zeros((), requires_grad=True)
        return cast(Callable[..., Any], operators.create_fw_bw_graph(score_mod, (score, *indices), tensors)[1])


def _mend_backward(backward: Any) -> None:
    """Change the backward pass that torch made of a score.

    Tensors learn only from pairs whose score has a gradient. That of a hidden score is 0, which torch multiplies by the
    derivative there: NaN where this is not finite. And a score that does not depend on the given one has the gradient 0
    of the size of a tile, which torch's kernels need.
    """
    graph, ops = backward.graph, torch.ops.aten
    _, _, _, _, _, of_score, *_ = graph.find_nodes(op="placeholder")
    output = graph.output_node()
    of_given, *others = output.args[0]
    if of_given is None:
        with graph.inserting_before(output):
            output.args = ([graph.call_function(ops.mul.Tensor, (of_score, 0)), *others],)
    for node in graph.find_nodes(op="call_function", target=torch.ops.flex_lib.zeros_and_scatter.default):
        shape, indices, values = node.args
        like = values.meta["val"]
        with graph.inserting_before(node):
            has_none = graph.call_function(ops.eq.Scalar, (of_score, 0))
            zero = graph.call_function(ops.scalar_tensor.default, (0,), {"dtype": like.dtype, "device": like.device})
            node.args = shape, indices, graph.call_function(ops.where.self, (has_none, zero, values))
    backward.recompile()


@functools.cache
def _keep_device_guard() -> None:
    """Install the device guard of machines without a GPU in a thread that never ends.

    torch 2.11 and 2.12, built for CUDA, keep it in the thread that traces first. When that thread has ended, another
    one that traces ends the process by a segmentation fault. torch 2.13 does not.
    """
    if _TORCH >= (2, 13) or torch.cuda.is_available():
        return
    mode, is_installed = fake_mode(), threading.Event()

    def install() -> None:
        try:
            with mode:  # torch installs the guard where such a mode begins
                pass
        finally:
            is_installed.set()
        threading.Event().wait()

    threading.Thread(target=install, name="flexmasks-device-guard", daemon=True).start()
    is_installed.wait()


# --- transforms of torch.func, derivatives, dispatch modes, autocast: what is active around a call ---


def without_wrappers(x: Tensor) -> Tensor | None:
    """Return a tensor without the wrappers of torch.func, None for one of which torch.vmap hides a dimension."""
    while named("is_wrapped")(x):
        inner = named("unwrapped")(x)
        if inner.dim() != x.dim():
            return None
        x = inner
    return x


def _left(leave: str, is_active: str) -> contextlib.AbstractContextManager[Any]:
    return cast(
        contextlib.AbstractContextManager[Any], (named(leave) if named(is_active)() else contextlib.nullcontext)()
    )


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Leave the active transforms for a block of code, so that what it computes may be cached."""
    return _left("without_transforms", "transforms_active")


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Leave the active dispatch modes for a block of code."""
    return _left("disable_modes", "in_dispatch_mode")


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave dispatch modes and TorchFunctionModes for a trial that no program may hold: torch.export's are of both."""
    with named("without_torch_function")(), without_dispatch_modes():
        yield


def in_tracing_mode() -> bool:
    """Return whether make_fx records the operations of this thread. No public equivalent."""
    return any(type(mode).__name__ == "ProxyTorchDispatchMode" for mode in active_modes())


def active_modes() -> list[Any]:
    """Return the active dispatch modes of this thread, the oldest first."""
    return list(_here.dispatch_modes()) if _here.in_dispatch_mode() else []


def in_foreign_dispatch_mode() -> bool:
    """Return whether this thread is in a mode where torch compiles nothing. No public equivalent."""
    return not all(mode.ignore_compile_internals() for mode in active_modes())


def names_of_transforms() -> list[str]:
    """Return the names of the active transforms of torch.func, the innermost last. No public equivalent."""
    return [level.key().name for level in _here.transforms() or ()] if _here.transforms_active() else []


def can_leave_forward_derivatives() -> bool:
    return named("forward_derivatives") is not None


def in_forward_derivative() -> bool:
    """Return whether derivatives are taken forward (torch.autograd.forward_ad, jvp). No public equivalent."""
    # Dynamo traces torch.func.jvp without entering a level.
    is_dual = bool(getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0)
    return (is_dual and not _is_switched_off(otherwise=False)) or (
        _here.transforms_active() and "Jvp" in names_of_transforms()
    )


@contextlib.contextmanager
def outside_forward_derivatives() -> Iterator[None]:
    """Leave forward mode and torch.func.jvp for a block of code."""
    with outside_transforms(), named("forward_derivatives")(False):
        yield


def _is_switched_off(otherwise: bool) -> bool:
    """Return whether this thread takes no derivatives forward: within such a block, and in methods of Functions.

    otherwise: the result of a torch that does not tell.
    """
    switch = named("forward_derivatives")
    if switch is None:
        return otherwise
    asked = switch(False)
    with asked:
        return not asked.prev


def in_function_without_gradients() -> bool:
    """Return whether the forward method of an autograd.Function may be running in this thread, without gradients.

    torch switches forward derivatives off there, which torch.no_grad does not.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return _is_switched_off(otherwise=True)


def is_of_checkpointing(mode: Any) -> bool:
    """Return whether a mode is one of selective activation checkpointing, which have no public names."""
    return type(mode).__module__ == torch.utils.checkpoint.__name__


# --- torch.compile ---


def is_compiling() -> bool:
    """Return whether torch.compile or torch.export traces the code of this thread.

    torch.compiler.is_compiling is public. In torch 2.13 it is also True while another thread compiles.
    """
    if not torch.compiler.is_compiling():
        return False
    # While Dynamo traces, the next function is constant, and Dynamo looks no further.
    if torch.compiler.is_dynamo_compiling() or named("traced_context")() is not None:
        return True
    return not all(map(is_of_checkpointing, active_modes()))


# Whether Dynamo tells torch.export from torch.compile: torch 2.11 takes all that it traces for an export.
_DYNAMO_KNOWS_EXPORTS = _TORCH >= (2, 13)


def is_exporting() -> bool:
    """Return whether torch.export traces the code; with strict=True only if Dynamo knows."""
    is_known = _DYNAMO_KNOWS_EXPORTS or not torch.compiler.is_dynamo_compiling()
    return is_known and torch.compiler.is_exporting()


def in_onnx_export() -> bool:
    """Return whether torch.onnx.export traces this code, other than by torch.compile."""
    if torch.compiler.is_dynamo_compiling():
        return False
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return is_traced and torch.onnx.is_in_onnx_export()


def constant_in_graphs(function: _Function) -> _Function:
    """Let torch.compile call a function while it traces, and take the result as a constant.

    Without it torch.compile would trace the function, and fail. torch.compiler.assume_constant_result is public, and
    imports torch's compilers. Numbers that may be symbolic are passed through `constants`. The result is no dict, which
    torch.compile would watch for changes and fails to.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def can_trace_transforms() -> bool:
    """Return whether torch.compile, which traces this, can trace vmap and modes here.

    Inside an operator of other code, such as an activation checkpoint, it cannot.
    """
    traced_code = named("traced_code")
    return traced_code is not None and traced_code().output.current_tracer.parent is None


def passed_on(
    kind: type[Exception], message: str, package: str, users: Callable[[Any], types.TracebackType | None]
) -> Exception | None:
    """Return an error that torch.compile, while it traces, passes on to the user as it is, with the lines of code that
    is not the package's. None if such code may catch the error.

    users: gives the part of a traceback that the user sees.
    """
    tracers: list[Any] = []
    tracer: Any = named("traced_code")().output.current_tx
    while tracer is not None:
        tracers.append(tracer)
        tracer = tracer.parent
    others = [t for t in reversed(tracers) if t.f_globals["__name__"].partition(".")[0] != package]
    if any(t.current_instruction.exn_tab_entry is not None for t in others):
        return None
    base = named("ShortenTraceback")
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__reduce__": lambda self: (kind, self.args),  # pickled, it is the plain error
        "remove_dynamo_frames": lambda self: self.with_traceback(users(self.__traceback__)),
        "real_stack": [t.frame_summary() for t in others],
    }
    error: Exception = type(kind.__name__, (kind, base), members)(message)
    base.__init__(error, message, **({} if base is AssertionError else {"first_useful_frame": None}))
    return error


def compilation() -> Any:
    """Return an object that torch.compile has for each compilation while it traces, or None."""
    traced_code = named("traced_code")
    return None if traced_code is None else getattr(traced_code(), "speculation_log", None)


def as_constant(number: int | float) -> int | float:
    """Return a number for which torch.compile, where it traces this, compiles anew when it changes.

    Otherwise the number may be symbolic. No function of torch says that; range and float.hex need the value.
    """
    if isinstance(number, float):
        return float.fromhex(number.hex())
    return len(range(number)) if number >= 0 else -len(range(-number))


@constant_in_graphs
def batch_invariant() -> bool:
    """Return whether torch is set to give results that do not depend on a batch (torch 2.13).

    No public equivalent but the variable, which is read where torch's compilers are not loaded.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        return os.environ.get("TORCHINDUCTOR_BATCH_INVARIANT") == "1"
    return bool(getattr(config, "batch_invariant", False))


def constants(value: Any) -> Any:
    """Return a value whose numbers, those of tuples included, are constants where torch.compile traces this.

    The functions that `constant_in_graphs` marks take no symbolic numbers. Other values are returned as they are.
    """
    if isinstance(value, tuple):
        return tuple([constants(v) for v in value])
    return as_constant(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def kept_with_graph(x: Tensor) -> dict[Any, Any] | None:
    """Return what is kept as long as the graph that torch traces now, or as its look at the graph's shapes.

    The result is None if torch traces no graph from a function of x. No public equivalent; without it each call in a
    graph plans its mask.
    """
    mode = named("get_proxy_mode")()
    owner = cast(Any, x).fake_mode if mode is None and type(x) is named("FakeTensor") else getattr(mode, "tracer", None)
    return None if owner is None else vars(owner).setdefault("_flexmasks_kept", {})


def value_in_graph(x: Tensor) -> tuple[tuple[int, ...], Any]:
    """Return a key of the value that a tensor of a traced graph has now, and what must live as long as the key.

    A change in place changes the version, or, where torch replaces values instead, the value inside, which
    `from_functional` returns.
    """
    is_replaced = hasattr(type(x), "from_functional")
    value = cast(Any, x).from_functional() if is_replaced else x
    return (id(x), named("version")(x), id(value)), (x, value)


def size_hint(n: Any) -> Any:
    """Return a number, or the present value of a symbolic one. No public equivalent."""
    return n.node.hint if isinstance(n, torch.SymInt | torch.SymFloat) else n


def raw_stream(device: torch.device) -> int:
    return int(named("stream")(device.index))


def compiler_is_off() -> bool:
    """Return whether torch.compile is switched off for the process. No public equivalent."""
    return bool(getattr(named("dynamo_config"), "disable", False))


def recompile_limit() -> int:
    return int(getattr(named("dynamo_config"), "recompile_limit", 8))


def fake_mode() -> Any:
    """Return a mode in which operations make tensors without data. No public equivalent."""
    return named("FakeTensorMode")(allow_non_fake_inputs=True)


# --- nested tensors ---


def nested(values: Tensor, offsets: Tensor, jagged_dim: int, is_traced: bool) -> Tensor:
    """Return a nested tensor of values; is_traced: whether torch.compile traces the call."""
    view = None if is_traced else named("nested_view")
    if view is None:
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=jagged_dim)
    return cast(Tensor, view(values, offsets, None, ragged_idx=jagged_dim))


# --- processes ---


# `ProcessGroup._get_backend` and `Options._timeout`: how long a process group waits, so that a second group of the
# same processes waits as long. No public equivalent; without them the second group has torch's default.
def group_timeout(group: Any) -> Any:
    """Return how long a process group waits for its processes, or None."""
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None
