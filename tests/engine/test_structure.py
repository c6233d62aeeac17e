"""Structures: a value taken apart is put together again, and its key says what it computes."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flexmasks
from flexmasks import get_mask, get_score
from flexmasks.spec.leaves import MOST
from flexmasks.spec.structure import (
    Opaque,
    Walk,
    flatten,
    key_of,
    plain_key,
    replaced,
    state_of,
    with_inputs,
    with_tensors,
)

INDICES = torch.tensor(1.5), *torch.tensor([0, 1, 5, 3])  # a score, and b, h, q, kv
CPU = torch.device("cpu")

# --- values of a tensor and a number ---


class Model(nn.Module):
    def __init__(self, x: Tensor, n: float) -> None:
        super().__init__()
        self.settings = types.SimpleNamespace(n=n)
        self.register_buffer("x", x)
        self.register_buffer("unread", torch.zeros(3))

    def method(self, y: Tensor) -> Tensor:
        return self.x * y + self.settings.n


def in_closure(x: Tensor, n: float) -> Callable[..., Tensor]:
    return lambda y: x * y + n


def in_default(x: Tensor, n: float) -> Callable[..., Tensor]:
    return lambda y, a=x, b=n: a * y + b


def in_keyword_default(x: Tensor, n: float) -> Callable[..., Tensor]:
    return lambda y, *, a=x, b=n: a * y + b


def in_attribute(x: Tensor, n: float) -> Callable[..., Tensor]:
    def function(y: Tensor) -> Tensor:
        return function.x * y + n  # type: ignore[attr-defined]

    function.x = x  # type: ignore[attr-defined]
    return function


def in_inner_function(x: Tensor, n: float) -> Callable[..., Tensor]:
    inner = in_closure(x, n)
    return lambda y: inner(y) - inner(-y)


def in_partial(x: Tensor, n: float) -> Callable[..., Tensor]:
    return functools.partial(lambda a, y, b: a * y + b, x, b=n)


def in_dictionary(x: Tensor, n: float) -> Callable[..., Tensor]:
    table = {"x": x, "n": n, 3: (x, [x])}
    return lambda y: table["x"] * y + table["n"] - table[3][1][0]


def in_two_places(x: Tensor, n: float) -> Callable[..., Tensor]:
    other = x
    return lambda y: (x * y + n) * other


def in_shared_variable(x: Tensor, n: float) -> Callable[..., Tensor]:
    def inner(y: Tensor) -> Tensor:
        return x + y

    return lambda y: inner(y) * x + n


def in_itself(x: Tensor, n: float) -> Callable[..., Tensor]:
    def power(y: Tensor, times: int = 3) -> Tensor:
        return power(y * x, times - 1) if times else y + n

    return power


def in_builtin_method(x: Tensor, n: float) -> Callable[..., Tensor]:
    multiply = x.mul
    return lambda y: multiply(y) + n


def in_method(x: Tensor, n: float) -> Callable[..., Tensor]:
    return Model(x, n).method


def in_object(x: Tensor, n: float) -> Callable[..., Tensor]:
    model = Model(x, n)
    return lambda y: model.x * y + model.settings.n


OF_FUNCTIONS = [
    in_closure, in_default, in_keyword_default, in_attribute, in_inner_function, in_partial, in_dictionary,
    in_two_places, in_shared_variable, in_itself, in_builtin_method, in_method, in_object,
]  # fmt: skip


@pytest.mark.parametrize("make", OF_FUNCTIONS, ids=lambda make: make.__name__)
def test_a_function_filled_with_other_leaves_computes_with_them(make: Callable[..., Any]) -> None:
    x, other, y = torch.randn(3, 4)
    value = make(x, 2.5)
    structure, leaves = flatten(value)
    assert [t is x for t in leaves.tensors] == [True]
    assert [number.value for number in leaves.numbers if type(number.value) is float] == [2.5]
    numbers = [7.25 if number.value == 2.5 else number.value for number in leaves.numbers]
    filled = structure.fill([other], numbers)
    assert torch.equal(filled(y), make(other, 7.25)(y))
    assert torch.equal(value(y), make(x, 2.5)(y))  # it is as it was
    again, read = flatten(filled)
    assert again.key == flatten(make(other, 7.25))[0].key != structure.key
    assert again.key_without_numbers == structure.key_without_numbers
    assert [t is other for t in read.tensors] == [True]
    assert torch.equal(structure.fill([other])(y), make(other, 2.5)(y))


def test_sequences_dictionaries_and_masks_filled_with_other_leaves() -> None:
    def make(x: Tensor, ids: Tensor, ends: Tensor) -> Any:
        mask = get_mask("document", document_ids=ids) & get_mask(lambda b, h, q, kv: kv < ends[b]) | "causal"
        return (mask, [x, {"a": x, "b": (1, 2)}], None, get_score("alibi", slopes=x))

    first = make(torch.rand(2), torch.arange(8) // 3, torch.tensor([4]))
    leaves = [torch.rand(2), torch.arange(8) // 2, torch.tensor([7])]
    want = make(*leaves)
    structure, found = flatten(first)
    order = [next(leaf for leaf in leaves if leaf.shape == t.shape) for t in found.tensors]
    filled = structure.fill(order)
    assert len(order) == 3
    assert [type(part) for part in filled] == [type(part) for part in first]
    assert torch.equal(flexmasks.dense_mask(filled[0], 8, batch=1), flexmasks.dense_mask(want[0], 8, batch=1))
    assert not torch.equal(flexmasks.dense_mask(filled[0], 8, batch=1), flexmasks.dense_mask(first[0], 8, batch=1))
    assert filled[1][0] is filled[1][1]["a"] is leaves[0]
    assert filled[1][1]["b"] == (1, 2)
    assert filled[3].params["slopes"] is leaves[0]


@pytest.mark.parametrize("make", [*OF_FUNCTIONS, lambda x, n: (x, [n], get_score("alibi", slopes=x))])
def test_a_structure_holds_no_leaf(make: Callable[..., Any]) -> None:
    x = torch.ones(2)
    structure, leaves = flatten(make(x, 2.5))
    alive = weakref.ref(x)
    del x, leaves
    gc.collect()
    assert alive() is None
    assert flatten(structure.fill([torch.zeros(2)]))[0].key == structure.key


def test_a_copy_reads_a_namespace() -> None:
    """It has what the code reads and no more: neither the object nor other tensors stay alive in a cache."""
    model = Model(torch.ones(2), 0.5)
    structure, _ = flatten(model.method)
    copy = structure.fill([torch.zeros(2)]).__self__
    assert type(copy) is types.SimpleNamespace
    assert vars(copy).keys() == {"x", "settings"}
    assert vars(copy.settings) == {"n": 0.5}


GLOBAL, READS = torch.ones(2), 3


def reads_globals(y: Tensor) -> Tensor:
    return GLOBAL * y + READS


def test_only_copies_with_global_variables_of_their_own_have_others_there() -> None:
    y, other = torch.randn(2, 2)
    structure, leaves = flatten(reads_globals)
    assert leaves.has_global
    assert [number.is_global for number in leaves.numbers] == [True]
    assert structure.fill([other]) is reads_globals
    copy = with_tensors(reads_globals, lambda t: other, has_own_globals=True)
    assert torch.equal(copy(y), other * y + 3)
    assert torch.equal(reads_globals(y), y + 3)
    assert copy.__globals__.keys() <= {"GLOBAL", "READS", "__builtins__", "__name__"}  # not all of the module
    assert not flatten(in_closure(other, 2.0))[1].has_global


def test_copies_share_the_parts_without_tensors() -> None:
    x, plain = torch.ones(2), in_closure(torch.ones(()), 1.0)

    def steps(n: list[int]) -> Callable[[], None]:
        return lambda: n.append(1)

    step, holds = steps([]), in_closure(x, 2.0)
    walk = Walk()
    structure = walk.structure((step, holds, plain))
    copies = structure.fill(walk.leaves.tensors, shared=walk.without_tensors())
    assert copies[0] is step
    assert copies[1] is not holds
    assert copies[1].__closure__[0] is holds.__closure__[0] is not copies[1].__closure__[1]  # that of the number


def test_replaced_tensors_are_found_by_identity() -> None:
    x, y = torch.ones(2), torch.ones(2)
    pair = replaced((x, y, [x]), [(x, y + 1)])
    assert pair[0] is pair[2][0] is not x
    assert pair[1] is y
    with pytest.raises(Opaque, match="an object of type object"):
        replaced((x, object()), [(x, y)])


# --- places ---


def test_each_leaf_has_a_place() -> None:
    def places(value: Any, by_name: bool = False) -> list[tuple[str, str] | None]:
        walk = Walk(by_name=by_name)
        walk.structure(value)
        return [place and (place.kind, place.name) for place in walk.leaves.places]

    x = torch.ones(2)
    want = {
        in_closure: ("variable", "x"),
        in_default: ("default", "a"),
        in_keyword_default: ("item", "a"),
        in_partial: ("argument", "argument 0"),
        in_dictionary: ("item", "x"),
        in_object: ("attribute", "x"),
    }
    for make, place in want.items():
        assert places(make(x, 2.5)) == [place]
    assert places(reads_globals) == [("global variable", "GLOBAL")]
    assert places(get_score("alibi", slopes=x)) == [("parameter", "slopes")]
    assert places([x]) == [None]
    assert places({"a": x, "b": x}) == [("item", "a")]
    assert places({"a": x, "b": x, "c": {"b": x}}, by_name=True) == [("item", "a"), ("item", "b")]


# --- numbers ---


@pytest.mark.parametrize("make", OF_FUNCTIONS, ids=lambda make: make.__name__)
def test_tensors_in_places_of_numbers(make: Callable[..., Any]) -> None:
    x, y = torch.randn(2, 4)
    structure, leaves = flatten(make(x, 2.5))
    inputs = {n: a.tensor(torch.float64, CPU) + 5 for n, a in enumerate(leaves.numbers) if a.value == 2.5}
    assert [(a.dtype, a.ndim) for a in inputs.values()] == [(torch.float64, 0)]
    torch.testing.assert_close(with_inputs(structure, leaves, inputs)(y), make(x, 7.5)(y), check_dtype=False)


def test_a_number_in_a_global_variable_stays_a_constant() -> None:
    with pytest.raises(Opaque, match="`READS`, a global variable"):
        with_inputs(*flatten(reads_globals), {0: torch.tensor(3)})


def test_the_kind_and_the_sign_of_a_number_belong_to_the_code() -> None:
    """The sign of a divisor matters, and whether a sum with the number is a whole number."""

    def key(n: Any) -> Any:
        return flatten(in_closure(INDICES[0], n))[0].key_without_numbers

    assert key(4) == key(9) != key(-4) == key(-9)
    assert key(4.0) == key(-9.5) != key(4)
    assert key(MOST) == key(4)
    assert len({key(MOST + 1), key(MOST + 2), key(4), key(True), key(None)}) == 5  # the others are constants
    whole, below = (flatten(in_closure(INDICES[0], n))[1].numbers[0].tensor(torch.float64, CPU) for n in (4, -4))
    assert (whole.dtype, whole.item(), below.item()) == (torch.int64, 4, -4)
    assert whole.bounds == (1, MOST)  # type: ignore[attr-defined]
    assert below.bounds == (-MOST, MOST)  # type: ignore[attr-defined]


def test_numbers_and_lists_in_kernel_keys() -> None:
    def key(lift: bool = False, contents: bool = False, **params: Any) -> Any:
        return flatten(get_mask("prefix_lm", **params), lifts=lift, contents=contents)[0].key

    assert key(prefix_len=[1, 2]) == key(prefix_len=[3, 4])
    assert key(prefix_len=[1, 2], contents=True) != key(prefix_len=[3, 4], contents=True)
    assert key(prefix_len=1) != key(prefix_len=2)
    assert key(prefix_len=1, lift=True) == key(prefix_len=2, lift=True)
    both = [get_mask("causal") & get_mask("padding", kv_lens=[n]) for n in (1, 2)]
    assert len({flatten(mask, contents=False)[0].key for mask in both}) == 1


def test_a_bound_of_lengths_is_no_part_of_a_kernel() -> None:
    keys = [flatten(flexmasks.packed("causal", [0, 4], max_length=n), contents=False)[0].key for n in (4, 9)]
    assert keys[0] == keys[1]
    keys = [flatten(flexmasks.packed("causal", [0, 4], max_length=n))[0].key for n in (4, 9)]
    assert keys[0] != keys[1]


# --- keys ---

CONSTANTS: list[Any] = [
    1, 2, -1, 1.0, 0.0, -0.0, math.nan, True, False, None, "1", b"1", ..., 1j, (), (1,), (1, 2), [1], [1, 2], [1.0], {},
    {"a": 1}, {"a": 2}, {"b": 1}, {1: "a"}, range(2), range(0, 2, 2), torch.float32, torch.float64, CPU,
    torch.device("meta"), torch.Size([1]), torch.strided, torch, math, torch.sin, math.sin, operator.add, torch.Tensor,
    np.float32(1), np.float64(1), np.array([1]), np.array([2]), np.array([[1]]), np.array([1], np.int8),
]  # fmt: skip
WAYS: list[Callable[[Any], Any]] = [
    lambda c: c,
    lambda c: (c, 0),
    lambda c: {"x": c},
    lambda c: lambda: c,
    lambda c: lambda: (c, c),
    lambda c: lambda x=c: x,
    lambda c: lambda *, x=c: x,
    lambda c: functools.partial(len, c),
    lambda c: functools.partial(len, x=c),
]


def test_keys_are_equal_where_code_and_constants_are() -> None:
    """Each value is made twice, as a lambda inside a training step is."""
    made = [[flatten(way(c))[0].key for way, c in itertools.product(WAYS, CONSTANTS)] for _ in range(2)]
    assert made[0] == made[1]
    assert len(set(made[0])) == len(made[0])


def test_tensors_have_the_key_of_their_dtype_and_dimensions() -> None:
    tensors = [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)]
    noted, other = torch.zeros(2), torch.zeros(2)
    noted.limit, other.limit = 1, 2  # type: ignore[attr-defined]
    keys = [flatten(in_closure(x, 1.0))[0].key for x in (*tensors, noted, other)]
    assert len(set(keys)) == len(keys)
    assert flatten(in_closure(torch.ones(9), 1.0))[0].key == keys[0]


def test_library_parts_are_read() -> None:
    parts = (torch, torch.where, torch.Tensor.add, operator.and_, len, int, torch.int32, functools.reduce)
    for part in parts:
        assert key_of(part, []) == key_of(part, [])
    for part in (
        types.ModuleType("settings"),
        Model,
        Model(torch.ones(1), 1),
        np.zeros(600),
        np.array([None]),
        object(),
        {1, 2},
    ):
        with pytest.raises(Opaque):
            key_of(part, [])


def test_functions_that_read_other_values_have_other_keys() -> None:
    """Check both ways to read functions: each value must give its own key."""
    read = lambda: first if second else None  # type: ignore[name-defined] # noqa: E731, F821
    some = ({"first": 1}, {"second": 1}, {"first": 1, "second": 1}, {"first": 1.0}, {"first": True}, {"first": -0.0})
    more = (
        {"first": 0.0},
        {"first": "1"},
        {"first": torch},
        {"first": torch.tensor(1)},
        {"first": torch.tensor(1).int()},
        {},
    )
    functions = [types.FunctionType(read.__code__, dict(variables)) for variables in (*some, *more)]
    for capturing in (key_of, plain_key):
        keys = [capturing(function, []) for function in functions]
        assert None not in keys
        assert len(set(keys)) == len(keys)
        assert keys == [capturing(function, []) for function in functions]
    for unknown in ({"first": object()}, {"first": read}, {"first": types.ModuleType("settings")}):
        assert plain_key(types.FunctionType(read.__code__, unknown), []) is None


def test_tensors_of_opaque_functions_are_found() -> None:
    module = torch.nn.Linear(2, 2)
    tensors: list[Tensor] = []
    with pytest.raises(Opaque):
        key_of(lambda: module, tensors)
    assert any(t is module.weight for t in tensors)


def test_the_state_of_a_value_changes_with_its_tensors() -> None:
    x, other = torch.ones(2, 2)
    value, with_number = in_closure(x, 2.0), in_closure(x, 3.0)
    before = state_of(value, []), state_of(in_closure(x, 2.0), [])
    x.add_(1)
    states = [before[0], state_of(value, []), state_of(in_closure(other, 2.0), []), state_of(with_number, [])]
    assert before[0] == before[1]
    assert len(set(states)) == 4
    assert None not in states
    held: list[Tensor] = []
    assert state_of((x, {1, 2}), held) is None
    assert [t is x for t in held] == [True]
