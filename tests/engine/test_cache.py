"""The caches: which calls hit and miss, when entries die, and that no call finds anything stale."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

import flexmasks
from flexmasks import road
from flexmasks.cache import Cache, Part, identity
from flexmasks.spec.definitions import _NAMES
from flexmasks.spec.structure import plain_key

pytestmark = pytest.mark.usefixtures("cold")

LENGTH, BLOCK = 64, 16
WINDOW: Any = 0
LIMITS: Any = None


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Let the garbage collector look at the objects of these tests alone, which takes a thousandth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    """Register masks and a score of this module, and forget them before other modules list all masks."""
    before = {kind: dict(known) for kind, known in _NAMES.items()}
    flexmasks.register_mask()(reads_a_global)
    flexmasks.register_mask(prepare=_prepare)(prepares_from_a_global)
    flexmasks.register_mask(prepare=_rename)(renames_a_tensor)
    flexmasks.register_score()(scaled)
    yield
    for kind, known in before.items():
        _NAMES[kind].clear()
        _NAMES[kind].update(known)


def blocks(mask: Any, **params: Any) -> Tensor:
    made = flexmasks.block_mask(mask, LENGTH, batch=2, block_size=BLOCK, **params).to_dense()
    return made.expand(2, 1, *made.shape[2:])


def counts() -> tuple[int, int]:
    info = flexmasks.cache_info()["plans"].parts["blocks"]
    return info.hits, info.misses


def outcome(call: Callable[[], Any]) -> str:
    hits, misses = counts()
    call()
    now = counts()
    return "hit" if now == (hits + 1, misses) else "miss" if now == (hits, misses + 1) else "none"


def globally(**values: Any) -> None:
    globals().update(values)


def tensor(*values: int) -> Tensor:
    return torch.tensor(values)


# --- attacks: each yields a mask, changes what it reads, and yields it again; masks of `OPAQUE` may not be cached ---

ATTACKS: list[Callable[[], Iterator[Any]]] = []
OPAQUE: set[str] = set()


def attack(function: Any) -> Any:
    ATTACKS.append(function)
    return function


def opaque(function: Any) -> Any:
    OPAQUE.add(function.__name__)
    return attack(function)


@attack
def global_number() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: (q - kv).abs() <= WINDOW


@attack
def global_tensor_rebound() -> Iterator[Any]:
    for n in (10, 50):
        globally(LIMITS=tensor(n, n))
        yield lambda b, h, q, kv: kv < LIMITS[b]


@attack
def global_tensor_changed_in_place() -> Iterator[Any]:
    globally(LIMITS=tensor(10, 20))
    for _ in range(3):
        yield lambda b, h, q, kv: kv < LIMITS[b]
        LIMITS.add_(20)


@attack
def global_in_a_nested_lambda() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: (lambda x: x <= WINDOW)((q - kv).abs())


@attack
def global_in_a_comprehension() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: functools.reduce(operator.or_, [kv == i * WINDOW for i in range(3)])


def window_of_a_helper(q: Any, kv: Any) -> Any:
    return (q - kv).abs() <= WINDOW


@attack
def global_of_a_helper() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: window_of_a_helper(q, kv)


@attack
def helper_rebound() -> Iterator[Any]:
    for sign in (1, -1):
        globally(helper=(lambda q, kv: q >= kv) if sign > 0 else (lambda q, kv: q < kv - 20))
        yield lambda b, h, q, kv: helper(q, kv)  # noqa: F821


def recursive(x: Any, depth: int) -> Any:
    return x <= WINDOW if depth == 0 else recursive(x - 1, depth - 1)


@attack
def global_of_a_recursive_helper() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: recursive((q - kv).abs(), 2)


@attack
def builtin_shadowed() -> Iterator[Any]:
    for shadow in (None, lambda x: 60, lambda x: 5):
        globally(**({"abs": shadow} if shadow else {}))
        yield lambda b, h, q, kv: kv < abs(-20)
    del globals()["abs"]


@attack
def closure_number() -> Iterator[Any]:
    def make(window: Any) -> Any:
        return lambda b, h, q, kv: (q - kv).abs() <= window

    yield from map(make, (3, 40, True, 20.5, np.int64(50)))


@attack
def closure_rebound() -> Iterator[Any]:
    window = 3

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= window

    yield mask
    window = 40
    yield mask


@attack
def closure_tensor_changed_in_place() -> Iterator[Any]:
    limits = tensor(10, 20)
    for _ in range(3):
        yield lambda b, h, q, kv: kv < limits[b]
        limits.add_(20)


@attack
def closure_tensor_given_other_data() -> Iterator[Any]:
    limits = tensor(10, 20)
    for _ in range(2):
        yield lambda b, h, q, kv: kv < limits[b]
        limits.data = tensor(40, 50)


@attack
def view_of_a_changed_tensor() -> Iterator[Any]:
    base = tensor(10, 20, 30)
    limits = base[1:]
    for _ in range(2):
        yield lambda b, h, q, kv: kv < limits[b]
        base.add_(20)


@attack
def detached_alias_changed() -> Iterator[Any]:
    limits = tensor(10, 20)
    for _ in range(2):
        yield lambda b, h, q, kv: kv < limits[b]
        limits.detach().add_(20)


@attack
def list_changed() -> Iterator[Any]:
    windows = [3]
    for _ in range(2):
        yield lambda b, h, q, kv: (q - kv).abs() <= windows[0]
        windows[0] = 40


@attack
def nested_dict_changed() -> Iterator[Any]:
    config: dict[str, Any] = {"mask": {"windows": [1, (3, 5)]}}
    for _ in range(2):
        yield lambda b, h, q, kv: (q - kv).abs() <= config["mask"]["windows"][1][0]
        config["mask"]["windows"][1] = (40, 5)


@attack
def tensors_swapped_in_a_list() -> Iterator[Any]:
    limits = [tensor(10, 20), tensor(40, 50)]
    for _ in range(2):
        yield lambda b, h, q, kv: (kv < limits[0][b]) | (q > limits[1][b])
        limits.reverse()


@attack
def default_list_changed() -> Iterator[Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any, windows: Any = [3]) -> Any:  # noqa: B006
        return (q - kv).abs() <= windows[0]

    yield mask
    mask.__defaults__[0][0] = 40  # type: ignore[index]
    yield mask
    mask.__defaults__ = ([20],)
    yield mask


@attack
def keyword_default_changed() -> Iterator[Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any, *, window: Any = 3) -> Any:
        return (q - kv).abs() <= window

    yield mask
    mask.__kwdefaults__["window"] = 40
    yield mask


@attack
def function_attribute() -> Iterator[Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= mask.window  # type: ignore[attr-defined]

    for window in (3, 40):
        mask.window = window  # type: ignore[attr-defined]
        yield mask


@attack
def code_replaced() -> Iterator[Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    yield mask
    mask.__code__ = (lambda b, h, q, kv: q < kv - 20).__code__
    yield mask


@attack
def partial_changed() -> Iterator[Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any, *, window: int) -> Any:
        return (q - kv).abs() <= window

    bound = functools.partial(mask, window=3)
    for _ in range(2):
        yield lambda b, h, q, kv: bound(b, h, q, kv)
        bound.keywords["window"] = 40


@attack
def objects_at_one_address() -> Iterator[Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any, window: int) -> Any:
        return (q - kv).abs() <= window

    for window in (3, 20, 3, 40, 3, 60):
        yield functools.partial(mask, window=window)
        gc.collect()


@opaque
def getters_at_one_address() -> Iterator[Any]:
    windows = (3, 20, 40)
    for i in range(3):
        pick: Any = operator.itemgetter(i)
        yield lambda b, h, q, kv: (q - kv).abs() <= pick(windows)  # noqa: B023
        pick = None
        gc.collect()


@attack
def torch_combinator() -> Iterator[Any]:
    limits = tensor(10, 20)
    made = and_masks(lambda b, h, q, kv: kv < limits[b], lambda b, h, q, kv: q >= 0)
    for _ in range(2):
        yield made
        limits.add_(30)
    yield and_masks(lambda b, h, q, kv: kv < 5, lambda b, h, q, kv: q >= 0)


@attack
def wrapped_library_function() -> Iterator[Any]:
    from flexmasks.masks.causal import causal

    @functools.wraps(causal)
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return causal(b, h, q + WINDOW, kv)

    for window in (3, 40):
        globally(WINDOW=window)
        yield mask


@attack
def mask_mod_of_a_block_mask() -> Iterator[Any]:
    lengths = tensor(10, 20)
    made = flexmasks.block_mask("padding", LENGTH, kv_lens=lengths, q_offset=tensor(0, 0)).mask_mod
    for _ in range(2):
        yield made
        lengths.add_(30)


@attack
def mask_in_a_closure() -> Iterator[Any]:
    for window in (3, 40):
        local = flexmasks.get_mask("sliding_window", window=window)
        yield lambda b, h, q, kv: local(b, h, q, kv) | (kv == 0)  # noqa: B023


@attack
def prepared_mask_in_a_closure() -> Iterator[Any]:
    offsets = tensor(0, 10, LENGTH)
    packed = flexmasks.packed("causal", offsets)
    for _ in range(2):
        yield lambda b, h, q, kv: packed(b, h, q, kv)
        offsets[1] += 30


@attack
def parameter_changed_in_place() -> Iterator[Any]:
    offsets = tensor(0, 10, LENGTH)
    packed = flexmasks.packed("causal", offsets)
    for _ in range(2):
        yield packed
        offsets[1] += 30


@attack
def registered_mask_with_a_global() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield flexmasks.get_mask("reads_a_global")


@attack
def prepare_with_a_global() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield flexmasks.get_mask("prepares_from_a_global")


@attack
def prepare_that_returns_its_tensor() -> Iterator[Any]:
    limits = tensor(10, 20)
    for _ in range(2):
        yield flexmasks.get_mask("renames_a_tensor", ends=limits)
        limits.add_(30)


@attack
def zero_of_either_sign() -> Iterator[Any]:
    for zero in (0.0, -0.0):
        yield lambda b, h, q, kv: torch.atan2(torch.full_like(q, zero, dtype=torch.float32), -(q + 1.0)) * (kv + 1) > 0  # noqa: B023
    for zeros in ((0.0,), (-0.0,)):
        yield lambda b, h, q, kv: torch.atan2(torch.full_like(q, zeros[0], dtype=torch.float32), -(q + 1.0)) > 0  # noqa: B023


@attack
def tensor_attribute() -> Iterator[Any]:
    limits: Any = tensor(10, 20)
    for extra in (0, 40):
        limits.extra = extra
        yield lambda b, h, q, kv: kv < limits[b] + limits.extra


@opaque
def module_variable() -> Iterator[Any]:
    settings: Any = types.ModuleType("settings")
    for window in (3, 40):
        settings.window = window
        yield lambda b, h, q, kv: (q - kv).abs() <= settings.window


class Config:
    window = 3

    def __init__(self, window: int) -> None:
        self.size = window

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= self.size

    method = __call__


@opaque
def class_variable() -> Iterator[Any]:
    for window in (3, 40):
        Config.window = window
        yield lambda b, h, q, kv: (q - kv).abs() <= Config.window


@attack
def object_attribute() -> Iterator[Any]:
    config = Config(3)
    for size in (3, 40):
        config.size = size
        yield lambda b, h, q, kv: (q - kv).abs() <= config.size


@opaque
def callable_object() -> Iterator[Any]:
    config = Config(3)
    for size in (3, 40):
        config.size = size
        yield config


@attack
def bound_method() -> Iterator[Any]:
    config = Config(3)
    for size in (3, 40):
        config.size = size
        yield config.method


@attack
def attribute_of_a_class() -> Iterator[Any]:
    config = Config(3)
    for window in (3, 40):
        Config.window = window
        yield lambda b, h, q, kv: (q - kv).abs() <= config.window


@attack
def attribute_before_that_of_the_class() -> Iterator[Any]:
    config, Config.window = Config(3), 3  # other attacks leave another one
    yield lambda b, h, q, kv: (q - kv).abs() <= config.window
    vars(config)["window"] = 40
    yield lambda b, h, q, kv: (q - kv).abs() <= config.window


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config(3)
        self.register_buffer("lens", tensor(30, 60))

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q - kv).abs() <= self.config.size) & (kv < self.lens[b])


@attack
def buffers_of_a_module() -> Iterator[Any]:
    model = Model()
    yield model.mask
    model.config.size = 40
    yield model.mask
    model.lens = tensor(10, 50)
    yield lambda b, h, q, kv: kv < model.lens[b]
    model.lens[0] = 20
    yield lambda b, h, q, kv: kv < model.lens[b]
    model.config = Config(9)
    yield model.mask


@attack
def attributes_by_two_functions() -> Iterator[Any]:
    model = Model()
    near = flexmasks.get_mask(lambda b, h, q, kv: q - kv <= model.config.size)
    both = near & (lambda b, h, q, kv: kv < model.lens[b])
    yield both
    model.config.size = 40
    yield both
    model.lens = tensor(20, 40)
    yield both


@attack
def slots() -> Iterator[Any]:
    class Slotted:
        __slots__ = ("size",)

    slotted = Slotted()
    for size in (3, 40):
        slotted.size = size
        yield lambda b, h, q, kv: (q - kv).abs() <= slotted.size


@opaque
def computed_attribute() -> Iterator[Any]:
    class Computed(Config):
        @property
        def reach(self) -> int:
            return int(WINDOW)

        def __getattr__(self, name: str) -> int:
            return int(WINDOW)

    computed = Computed(3)
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: (q - kv).abs() <= computed.reach
        yield lambda b, h, q, kv: (q - kv).abs() <= computed.other


@opaque
def objects_that_are_passed_on() -> Iterator[Any]:
    config = Config(3)
    for size in (3, 40):
        config.size = size
        yield lambda b, h, q, kv: config.method(b, h, q, kv)
        yield lambda b, h, q, kv: (q - kv).abs() <= getattr(config, "size")  # noqa: B009
        yield lambda b, h, q, kv: (q - kv).abs() <= [config][0].size + 0 * config.window


@opaque
def object_with_a_capture_method() -> Iterator[Any]:
    class Camera(Config):
        def key_of(self, *_: Any) -> str:
            return "the same"

    for size in (3, 40):
        yield Camera(size)


class Table(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return int(WINDOW)


@opaque
def dict_subclass() -> Iterator[Any]:
    table = Table()
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: (q - kv).abs() <= table["window"]


@opaque
def int_subclass() -> Iterator[Any]:
    class Number(int):
        extra = 0

    number = Number(3)
    for extra in (0, 40):
        number.extra = extra
        yield lambda b, h, q, kv: (q - kv).abs() <= number.extra + number


@attack
def numpy_array() -> Iterator[Any]:
    windows = np.array([3])
    for _ in range(2):
        yield lambda b, h, q, kv: (q - kv).abs() <= int(windows[0])
        windows[0] = 40


@opaque
def neural_module() -> Iterator[Any]:
    class Limit(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.limits = torch.nn.Buffer(tensor(10, 20))

        def forward(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return kv < self.limits[b]

    module = Limit()
    for _ in range(2):
        yield lambda b, h, q, kv: module(b, h, q, kv)
        module.limits.add_(30)


@opaque
def import_inside() -> Iterator[Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        from test_cache import WINDOW as window

        return (q - kv).abs() <= window

    import sys

    sys.modules["test_cache"] = sys.modules[__name__]
    for window in (3, 40):
        globally(WINDOW=window)
        yield mask


@opaque
def globals_called() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: (q - kv).abs() <= globals()["WINDOW"]


@opaque
def evaluated() -> Iterator[Any]:
    for window in (3, 40):
        globally(WINDOW=window)
        yield lambda b, h, q, kv: (q - kv).abs() <= eval("WINDOW")


@attack
def bound_builtin() -> Iterator[Any]:
    windows = {"window": 3}
    get = windows.get
    for window in (3, 40):
        windows["window"] = window
        yield lambda b, h, q, kv: (q - kv).abs() <= get("window")


@opaque
def cached_helper() -> Iterator[Any]:
    @functools.lru_cache
    def window() -> int:
        return int(WINDOW)

    for n in (3, 40):
        globally(WINDOW=n)
        window.cache_clear()
        yield lambda b, h, q, kv: (q - kv).abs() <= window()


@opaque
def iterator() -> Iterator[Any]:
    numbers = iter(range(0, 10_000, 7))  # the call of create_block_mask takes a number, too
    for _ in range(2):
        yield lambda b, h, q, kv: (q - kv).abs() <= next(numbers) * 0 + 3
    globally(WINDOW=40)
    yield lambda b, h, q, kv: (q - kv).abs() <= next(numbers) * 0 + WINDOW


def _prepare(size: Any) -> dict[str, Any]:
    return {"window": WINDOW}


def _rename(size: Any, *, ends: Annotated[Tensor, "int[B]"]) -> dict[str, Any]:
    return {"limits": ends}


def reads_a_global(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A window whose size is a module's variable."""
    return (q - kv).abs() <= WINDOW


def prepares_from_a_global(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, window: int) -> Tensor:
    """A window whose size `prepare` reads."""
    return (q - kv).abs() <= window


def renames_a_tensor(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, limits: Tensor) -> Tensor:
    """A tensor that `prepare` passes on."""
    return kv < limits[b]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_nothing_stale(attack: Any) -> None:
    stages: list[Tensor] = []
    earlier: list[tuple[Any, list[Any], Tensor]] = []  # the keys by which a repeated call would be found, and results
    for mask in attack():
        function = lambda b, h, q, kv, mask=mask: mask(b, h, q, kv)  # noqa: E731 - torch takes no methods
        want = create_block_mask(function, 2, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK).to_dense()
        for _ in range(2):
            assert torch.equal(blocks(mask), want)
            assert torch.equal(blocks(flexmasks.get_mask(mask) & (lambda b, h, q, kv: q >= 0)), want)
        stages.append(want)
        tensors: list[Tensor] = []
        key = plain_key(mask, tensors) if type(mask) is types.FunctionType else None
        if key is not None:
            for earlier_key, references, result in earlier:
                same = earlier_key == key and all(
                    tensor_of() is t and state == identity(t)
                    for (tensor_of, state), t in zip(references, tensors, strict=True)
                )
                assert not same or torch.equal(result, want)
            earlier.append((key, [(weakref.ref(t), identity(t)) for t in tensors], want))
        del tensors
    assert any(not torch.equal(a, b) for a, b in itertools.pairwise(stages)), "the attack changed nothing"
    cached = flexmasks.cache_info()["plans"].parts["blocks"].hits > 0
    assert cached == (attack.__name__ not in OPAQUE)


# --- hits and misses ---


def make_window(window: Any) -> Any:
    return lambda b, h, q, kv: q - kv <= window


def make_padding(lengths: Tensor) -> Any:
    return lambda b, h, q, kv: kv < lengths[b]


def test_registered_masks() -> None:
    lengths = tensor(30, 60)
    call = functools.partial(blocks, "grouped_tril")
    assert outcome(lambda: call(seq_lens=lengths)) == "miss"
    assert outcome(lambda: call(seq_lens=lengths)) == "hit"
    assert outcome(lambda: call(seq_lens=[30, 60])) == "miss"
    assert outcome(lambda: call(seq_lens=np.array([30, 60]))) == "hit"
    lengths.add_(1)
    assert outcome(lambda: call(seq_lens=lengths)) == "miss"
    assert outcome(lambda: call(seq_lens=lengths)) == "hit"
    assert outcome(lambda: call(seq_lens=lengths.clone())) == "miss"
    assert outcome(lambda: blocks("padding", kv_lens=lengths)) == "miss"
    assert outcome(lambda: call(seq_lens=lengths, q_offset=0)) == "hit"
    assert outcome(lambda: call(seq_lens=lengths, q_offset=1)) == "miss"


def test_functions() -> None:
    assert outcome(lambda: blocks(make_window(5))) == "miss"
    assert outcome(lambda: blocks(make_window(5))) == "hit"
    assert outcome(lambda: blocks(make_window(6))) == "miss"
    assert outcome(lambda: blocks(make_window(5.0))) == "miss"
    assert outcome(lambda: blocks(flexmasks.get_mask(make_window(5)))) == "hit"
    assert outcome(lambda: blocks(~flexmasks.get_mask(make_window(5)))) == "miss"
    assert outcome(lambda: blocks(~flexmasks.get_mask(make_window(5)))) == "hit"
    assert outcome(lambda: blocks(lambda b, h, q, kv: q - kv <= 5)) == "miss"
    window = torch.tensor(5)
    assert outcome(lambda: blocks(make_window(window))) == "miss"
    assert outcome(lambda: blocks(make_window(window))) == "hit"
    assert outcome(lambda: blocks(make_window(torch.tensor(5)))) == "miss"


def test_attention_plans_once() -> None:
    q, k, v = torch.randn(3, 2, 1, LENGTH, 8)
    lengths = tensor(30, 60)

    def call() -> None:
        flexmasks.attention(q, k, v, mask="padding", kv_lens=lengths, score="alibi", backend="reference")

    assert [outcome(call) for _ in range(3)] == ["miss", "none", "none"]
    assert flexmasks.cache_info()["plans"].parts["calls"].hits == 2


def test_plans_of_another_default_dtype_are_others() -> None:
    """A quotient of whole numbers has that dtype, and float32 cannot tell the odd key from the even one."""

    def odd(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv % 2 + 2**24) / 1 > 2**24

    q, k, v = torch.randn(3, 1, 2, 40, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    want = {torch.float32: torch.zeros_like(q), torch.float64: attend(q, k[:, :, 1::2], v[:, :, 1::2])}
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            out = flexmasks.attention(q, k, v, mask=odd, backend="reference")
            assert torch.allclose(out, want[dtype], atol=1e-5)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("without_cpp")
def test_parameters_that_look_alike_are_distinguished() -> None:
    q = torch.randn(1, 1, 16, 8)
    limit = torch.tensor([4])

    def signed(score: Any, b: Any, h: Any, q: Any, kv: Any, *, sign: Annotated[float, "float"]) -> Any:
        return score * math.copysign(1.0, sign)

    def limited(b: Any, h: Any, q: Any, kv: Any, *, at: Annotated[Tensor, "int[B]"]) -> Any:
        return kv < getattr(at, "limit", 2)

    outs = [_attend(q, mask="causal", score=signed, sign=sign) for sign in (0.0, -0.0, 0.0)]
    assert torch.equal(outs[0], outs[2])
    assert not torch.allclose(outs[0], outs[1])
    before = flexmasks.attention(q, q, q, mask=limited, at=limit, backend="reference")
    limit.limit = 5  # type: ignore[attr-defined]
    assert not torch.allclose(before, flexmasks.attention(q, q, q, mask=limited, at=limit, backend="reference"))
    ends = [_attend(q, mask=lambda b, h, q, kv, ends=ends: kv < ends.stop) for ends in (range(0, 3, 2), range(0, 4, 2))]
    assert not torch.allclose(*ends)


# --- life and size ---


def test_entries_die_with_their_tensors() -> None:
    lengths = tensor(30, 60)
    blocks("padding", kv_lens=lengths)
    blocks(make_padding(lengths))
    blocks("renames_a_tensor", ends=lengths)
    blocks("causal")
    alive = weakref.ref(lengths)
    assert flexmasks.cache_info()["plans"].parts["blocks"].entries == 4
    del lengths
    gc.collect()
    assert alive() is None
    assert flexmasks.cache_info()["plans"].parts["blocks"].entries == 1


def test_bare_calls_keep_no_tensors_alive() -> None:
    lengths = tensor(30, 60)
    mask = flexmasks.get_mask("padding", kv_lens=lengths)
    create_block_mask(mask, 2, 1, LENGTH, LENGTH, device="cpu")
    alive = weakref.ref(lengths)
    del lengths, mask
    gc.collect()
    assert alive() is None


def test_kinds_of_calls_keep_no_tensors_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind makes the functions of later calls, which the first call's function must not wait for."""
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))
    makes: list[Callable[[Tensor], Any]] = [
        lambda ids: lambda b, h, q, kv: ids[q] == ids[kv],
        lambda ids: lambda b, h, q, kv, *, own=ids: own[q] == own[kv],
    ]
    for make in makes:
        ids = torch.randint(3, (LENGTH,))
        q = torch.randn(2, 2, LENGTH, 16)
        flexmasks.attention(q, q, q, mask=make(ids), backend="reference")
        alive = weakref.ref(ids)
        del ids
        gc.collect()
        assert alive() is None
        entries = flexmasks.cache_info()["kinds"].parts["calls"].entries
        flexmasks.attention(q, q, q, mask=make(torch.randint(3, (LENGTH,))), backend="reference")
        assert flexmasks.cache_info()["kinds"].parts["calls"].entries == entries  # it is of the same kind


@pytest.mark.parametrize(
    ("backend", "learns"),
    [
        ("reference", False),
        ("reference", True),
        ("auto", True),
        pytest.param("auto", False, marks=pytest.mark.campaign),
    ],
)
def test_a_call_frees_its_tensors_at_once(backend: str, learns: bool) -> None:
    """Nothing that a call makes refers to itself: its tensors would wait for Python's garbage collector."""
    masks: list[Callable[[Tensor], Any]] = [
        lambda ids: flexmasks.get_mask("document", document_ids=ids),
        lambda ids: lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]),
    ]
    for make in masks:
        for step in range(3):  # the first call may compile, of which torch leaves cycles
            tensors = [torch.randn(2, 2, LENGTH, 16, requires_grad=learns) for _ in range(3)]
            alive = [weakref.ref(x) for x in tensors]
            gc.collect()
            gc.disable()
            try:
                flexmasks.attention(*tensors, mask=make(torch.randint(3, (LENGTH,))), backend=backend)
                del tensors
                assert step == 0 or [x() for x in alive] == [None] * 3
            finally:
                gc.enable()


def test_clear() -> None:
    blocks("causal")
    blocks("causal")
    flexmasks.clear_caches()
    assert all(info[:4] == (0, 0, 0, 0) for info in flexmasks.cache_info().values())
    assert outcome(lambda: blocks("causal")) == "miss"


def test_the_total_comes_first() -> None:
    blocks("causal")
    (name, total), *caches = flexmasks.cache_info().items()
    assert name == "total"
    assert {name for name, _ in caches} == {"kinds", "plans", "kernels", "launches"}
    for field in ("hits", "misses", "entries"):
        assert getattr(total, field) == sum(getattr(info, field) for _, info in caches) > 0 or field == "hits"
    assert total.bytes == sum(info.bytes for name, info in caches if name in ("kinds", "plans")) > 0


def test_bytes_are_counted_and_bounded() -> None:
    whole = Cache(max_bytes=100)
    cache, other = Part[int](whole, "ours"), Part[int](whole, "other")
    for i in range(20):
        cache.put(i, (), i, 30)
        assert cache.info().bytes == 30 * cache.info().entries <= 100
    assert [i for i in range(20) if cache.get(i) is not None] == [17, 18, 19]
    cache.put(20, (), 20, 30)
    cache.get(18)
    cache.put(21, (), 21, 30)
    assert [i for i in range(22) if cache.get(i) is not None] == [18, 20, 21]  # entries in use survive a round
    cache.put(22, (), 22, 101)
    assert cache.get(22) is None
    cache.put(20, (), 20, 40)
    assert cache.info()[2:5] == (3, 100, 100)
    other.put(20, (), "of another kind", 50)  # the same key, in the same bytes
    assert other.get(20) == "of another kind"
    assert whole.info().bytes == cache.info().bytes + other.info().bytes <= 100
    assert whole.info().entries == cache.info().entries + other.info().entries
    whole.clear()
    assert whole.info()[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    "other",
    [lambda x: x.clone(), lambda x: x.T, lambda x: x[:2], lambda x: x.view(8, 2), lambda x: x.view(torch.int32)],
    ids=["memory", "strides", "length", "shape", "dtype"],
)
def test_tensors_given_other_data_are_others(other: Callable[[Tensor], Tensor], learns: bool) -> None:
    """`tensor.data = other` raises no version; all but one of what describes a tensor may stay as it was."""
    cache: Part[int] = Part(Cache(max_bytes=1 << 20), "first")
    made = torch.arange(16.0).view(4, 4).requires_grad_(learns)
    cache.put("key", [made], 1, 1)
    assert cache.get("key", [made]) == 1
    made.requires_grad_(False).data = other(made.data)
    made.requires_grad_(learns and made.is_floating_point())
    assert cache.get("key", [made]) is None or (learns and torch.equal(made, torch.arange(16.0).view(4, 4)))


def test_the_blocks_count_their_bytes() -> None:
    made: BlockMask = flexmasks.block_mask("causal", 4096)
    held = sum(t.numel() * t.element_size() for t in made.as_tuple() if isinstance(t, Tensor))
    assert flexmasks.cache_info()["plans"].parts["blocks"].bytes == held + 4096  # an entry itself counts 4096 bytes


# --- inference mode ---


@pytest.mark.parametrize("most", [0, 16])
def test_inference_tensors_are_right_and_cached_if_small(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexmasks.cache, "_MAX_COMPARED", most)
    with torch.inference_mode():
        lengths = tensor(10, 20)
    assert lengths.is_inference()
    for increase in (0, 30):
        if increase:
            with torch.inference_mode():
                lengths.add_(increase)
        want = blocks("padding", kv_lens=(lengths + 0).tolist())
        before = flexmasks.cache_info()["plans"].parts["blocks"].entries
        assert outcome(lambda: blocks("padding", kv_lens=lengths)) == "miss"
        assert torch.equal(blocks("padding", kv_lens=lengths), want)
        assert torch.equal(blocks(lambda b, h, q, kv: kv < lengths[b]), want)
        assert most or flexmasks.cache_info()["plans"].parts["blocks"].entries == before
        assert outcome(lambda: blocks("padding", kv_lens=lengths)) == ("hit" if most else "miss")
        q, k, v = torch.randn(3, 2, 1, LENGTH, 8)
        out = flexmasks.attention(q.requires_grad_(), k, v, mask="padding", kv_lens=lengths, backend="reference")
        same = flexmasks.attention(q, k, v, mask="padding", kv_lens=lengths.tolist(), backend="reference")
        assert torch.equal(out, same)
        out.sum().backward()


def scaled(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, factors: Annotated[Tensor, "float[H]"]
) -> Tensor:
    """Scores times the first factor, whose gradient needs a view of the unchanged factors."""
    return score * factors[0]


def test_inference_then_training() -> None:
    q, k, v = torch.randn(3, 2, 1, LENGTH, 8)
    mask = flexmasks.get_mask("padding", kv_lens=[30, 60])

    def call(x: Tensor) -> Any:
        both = {"mask": lambda b, h, q, kv: mask(b, h, q, kv), "score": "scaled", "factors": [0.5]}
        return flexmasks.attention(x, k, v, backend="reference", **both)

    with torch.inference_mode():
        evaluated = call(q)
    trained = call(q.requires_grad_())
    trained.sum().backward()
    assert torch.equal(evaluated, trained)
    with torch.inference_mode():
        assert torch.equal(call(q), evaluated)


# --- threads ---


@pytest.mark.slow
def test_threads() -> None:
    q, k, v = torch.randn(3, 1, 1, LENGTH, 8)
    cases: list[dict[str, Any]] = [
        {"mask": "sliding_window", "window": 3},
        {"mask": make_window(20)},
        {"mask": flexmasks.get_mask("causal") & (lambda b, h, q, kv: kv % 3 != 1)},
        {"mask": "document", "document_ids": [i // 20 for i in range(LENGTH)], "score": "alibi"},
    ]
    want = [flexmasks.attention(q, k, v, backend="reference", **case) for case in cases]
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            for i in range(12):
                n = (number + i) % len(cases)
                if not torch.equal(flexmasks.attention(q, k, v, backend="reference", **cases[n]), want[n]):
                    failures.append(f"case {n}")
                lengths = tensor(number * 8 + 1)
                seen = flexmasks.dense_mask("padding", LENGTH, kv_lens=lengths)
                made = flexmasks.block_mask("padding", LENGTH, kv_lens=lengths, block_size=1)
                if not torch.equal(made.to_dense().bool(), seen):
                    failures.append(f"length {lengths}")
                if i % 5 == number % 5:
                    flexmasks.clear_caches()
        except Exception as error:  # the main thread shows the error
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- repeated calls ---


@pytest.fixture
def without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile kernels by torch's tracing alone; the cache of calls holds them as it holds kernels in C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def _attend(q: Tensor, **arguments: Any) -> Tensor:
    """Return the output of a call that is made twice; the cache of calls must hold the second call."""
    first = flexmasks.attention(q, q, q, backend="flex", **arguments)
    hits = flexmasks.cache_info()["plans"].parts["calls"].hits
    again = flexmasks.attention(q, q, q, backend="flex", **arguments)
    assert flexmasks.cache_info()["plans"].parts["calls"].hits == hits + 1
    assert torch.equal(first, again)
    return first


def _wanted(q: Tensor, seen: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = q @ q.mT / q.shape[-1] ** 0.5 + bias
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ q


@pytest.mark.slow
@pytest.mark.usefixtures("without_cpp")
def test_a_repeated_call_sees_what_changed() -> None:
    """In one block: a mask that goes as data has any values in other blocks, which kernels in C++ do not ask for."""
    q = torch.randn(2, 1, 32, 16)
    i, j = torch.arange(32)[:, None], torch.arange(32)

    lens = torch.tensor([20, 32])
    for change in ([20, 32], [10, 3], [32, 1]):
        lens.copy_(torch.tensor(change))
        seen = (j <= i) & (i < lens.view(2, 1, 1, 1)) & (j < lens.view(2, 1, 1, 1))
        torch.testing.assert_close(_attend(q, mask="grouped_tril", seq_lens=lens), _wanted(q, seen))
        composed = flexmasks.get_mask("grouped_tril", seq_lens=lens) & flexmasks.get_mask("sliding_window", window=5)
        torch.testing.assert_close(_attend(q, mask=composed), _wanted(q, seen & (i - j <= 5)))

    bounds = torch.tensor([10, 25])
    width = 7

    def own(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < bounds[b]) & (q - kv < width)

    for width in (7, 9):  # the function reads `width`
        for _ in range(2):
            seen = (j < bounds.view(2, 1, 1, 1)) & (i - j < width)
            torch.testing.assert_close(_attend(q, mask=own), _wanted(q, seen))
            bounds += 1
    bounds = torch.tensor([5, 6])
    torch.testing.assert_close(_attend(q, mask=own), _wanted(q, (j < bounds.view(2, 1, 1, 1)) & (i - j < 9)))
    bounds.data = torch.tensor([15, 16])
    torch.testing.assert_close(_attend(q, mask=own), _wanted(q, (j < bounds.view(2, 1, 1, 1)) & (i - j < 9)))

    global WINDOW
    for window in (3, 20):
        WINDOW = window
        named = _attend(q, mask="reads_a_global")
        assert torch.equal(named, _attend(q, mask=reads_a_global))
        visible = flexmasks.dense_mask(reads_a_global, 32)
        torch.testing.assert_close(named, _wanted(q, visible))
        seen_by_rows = flexmasks.masked_softmax(torch.zeros(1, 1, 32, 32), mask="reads_a_global") > 0
        assert torch.equal(seen_by_rows, visible.expand(1, 1, 32, 32))

    bias = torch.randn(32)

    def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[kv]

    for _ in range(2):
        torch.testing.assert_close(_attend(q, score=biased), _wanted(q, torch.ones(32, 32).bool(), bias))
        bias.mul_(-2)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cpp")
def test_a_repeated_call_is_checked_again() -> None:
    q = torch.randn(2, 1, 64, 16)
    _attend(q, mask="sliding_window", window=5, scale=1.0)
    with pytest.raises(TypeError, match="`scale`"):
        flexmasks.attention(q, q, q, mask="sliding_window", window=5, scale=True)
    with pytest.raises(TypeError, match="one dtype"):
        flexmasks.attention(q, q, q.double(), mask="sliding_window", window=5, scale=1.0)
    with pytest.raises(ValueError, match="no gradients"):
        flexmasks.attention(q.requires_grad_(), q, q, mask="sliding_window", window=5, scale=1.0, backend="flex")
    with torch.no_grad():
        _attend(q, mask="sliding_window", window=5, scale=1.0)
    bias = torch.zeros(64)

    def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[kv]

    q = q.detach()
    _attend(q, score=biased)
    bias.requires_grad_()
    flexmasks.attention(q, q, q, score=biased).sum().backward()
    assert bias.grad is not None


@pytest.mark.slow
@pytest.mark.usefixtures("without_cpp")
def test_a_repeated_call_keeps_nothing_alive() -> None:
    q = torch.randn(2, 1, 64, 16)
    lens, bounds = torch.tensor([40, 64]), torch.tensor([20, 50])
    memory = [weakref.ref(t.untyped_storage()) for t in (lens, bounds)]
    tensors = [weakref.ref(t) for t in (lens, bounds)]

    def run(bounds: Tensor) -> None:
        _attend(q, mask=lambda b, h, q, kv: kv < bounds[b])

    _attend(q, mask="grouped_tril", seq_lens=lens)
    run(bounds)
    assert flexmasks.cache_info()["plans"].parts["calls"].entries == 2
    assert None not in [r() for r in (*tensors, *memory)]
    del lens, bounds
    gc.collect()
    assert [r() for r in tensors] == [None, None]
    assert [r() for r in memory] == [None, None]
    assert flexmasks.cache_info()["plans"].parts["calls"].entries == 0


def test_recorded_factors_of_a_score_are_copies() -> None:
    """A factor may be a view of the user's tensor: kept, it would keep that alive, and a change of it would be lost."""
    q = torch.randn(1, 4, 40, 16, requires_grad=True)
    alive = []
    for _ in range(40):  # on a CPU the 16th is recorded
        slopes = torch.rand(4)
        out = flexmasks.attention(q, q, q, mask="causal", score="alibi", slopes=slopes)
        slopes.zero_()
        out.sum().backward()
        alive.append(weakref.ref(slopes))
        del slopes, out
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_cache_info_reads_well() -> None:
    flexmasks.clear_caches()
    q = torch.randn(1, 1, 8, 4)
    flexmasks.attention(q, q, q, mask="causal")
    infos = flexmasks.cache_info()
    head, _, *lines = repr(infos).splitlines()
    assert head.split() == ["cache", "hits", "misses", "entries", "MB", "full", "holds"]
    assert [line.split()[0] for line in lines if line[0] != " "] == [*infos]
    plans = next(line for line in lines if line.startswith("plans"))
    assert plans.split()[3] == str(infos["plans"].entries) > "0"
    assert "calls" in plans
    assert max(map(len, lines)) <= 100
    assert "entries=" in repr(infos["plans"])


class _Documents(torch.nn.Module):
    """Its mask reads a parameter, its score one that learns, its softmax a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.ids = torch.nn.Parameter(torch.arange(48) // size, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(48))
        self.register_buffer("others", torch.arange(48) // size)

    def forward(self, x: Tensor) -> Tensor:
        calls: Any = {"mask": "document", "document_ids": self.ids}, {"mask": lambda b, h, q, kv: self.others[kv] < 2}
        biased = {"score": lambda s, b, h, q, kv: s + self.bias[kv]}
        out = sum(flexmasks.attention(x, x, x, backend="reference", **call) for call in (*calls, biased))
        return out + flexmasks.masked_softmax(x @ x.mT, mask="document", document_ids=self.others) @ x

    def expected(self, x: Tensor) -> Tensor:
        same, others = self.ids[:, None] == self.ids, self.others[:, None] == self.others
        masks = same, (self.others < 2).expand(48, 48), self.bias.expand(48, 48)
        out = sum(torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask) for mask in masks)
        return out + (x @ x.mT).masked_fill(~others, -torch.inf).softmax(-1) @ x


def test_modules_whose_tensors_are_swapped() -> None:
    """torch swaps no tensor to which there are weak references."""
    module, other = _Documents(20), _Documents(7)
    x = torch.randn(1, 1, 48, 16)

    def call() -> None:
        for learns in (True, False, False):
            with torch.set_grad_enabled(learns):
                dtype = module.bias.dtype
                torch.testing.assert_close(module(x.to(dtype)), module.expected(x.to(dtype)))

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        call()
        module.load_state_dict(other.state_dict())
        call()
        module.double()
        call()
        for name, tensor in list(other.named_buffers()) + list(other.named_parameters()):
            torch.utils.swap_tensors(getattr(module, name), tensor.to(getattr(module, name).dtype).flip(0))
        call()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    call()
    flexmasks.clear_caches()
    torch.utils.swap_tensors(module.others, torch.arange(48) // 3)
    call()
