"""Masks and scores encoded for torch.compile: what is decoded computes what was encoded."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import arguments, label, spread
from oracles import MASK_CASES, SCORE_CASES, Case
from torch import Tensor

import flexmasks
from flexmasks import get_mask, get_score
from flexmasks.blocks.elements import over_indices
from flexmasks.masks.causal import causal
from flexmasks.spec import definitions, leading
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.encoding import Unreadable, decode, encode, encode_if_readable, note_constants, seen_in_graphs
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Modifier

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LENGTH = 32
SIZE = Size(1, 2, LENGTH, LENGTH, CPU)
LIMIT = 3


def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, window: int, ids: Tensor) -> Tensor:
    return ((q - kv).abs() <= window) & (ids[q] == ids[kv])


def root(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, of: float = 2.0) -> Tensor:
    return score * math.sqrt(of) + h


def evaluated(value: Modifier, size: Size) -> Tensor:
    """Return the mask, or the changed scores, of all pairs; scores are 1 before the change."""
    bound = value._bind(value._resolve(size))
    indices = [torch.arange(n) for n in (size.batch, size.heads, size.q_len, size.kv_len)]
    if value._kind == "mask":
        return over_indices(bound)(*indices)
    return over_indices(bound, (0,))(torch.ones([len(i) for i in indices]), *indices)


def check(value: Modifier, size: Size = SIZE) -> None:
    decoded = decode(value._kind, encode(value, CPU).values())
    assert type(decoded) is type(value)
    assert torch.equal(evaluated(decoded, size), evaluated(value, size))


# --- encoded and decoded ---


@pytest.mark.parametrize("case", [*spread(MASK_CASES, 1), *spread(SCORE_CASES, 1)], ids=label)
def test_values_of_the_library(case: Case) -> None:
    given = {name: value for name, value in arguments(case).items() if name != "q_offset"}
    value = get_mask(case.name, **given) if case in MASK_CASES else get_score(case.name, **given)
    check(value, Size(case.batch, case.heads, case.q_len, case.kv_len, CPU))


def test_values_of_users_and_combinations() -> None:
    check(get_mask(near, window=3, ids=torch.arange(LENGTH) // 5))
    check(~get_mask("causal") & get_mask(near, window=3, ids=torch.zeros(LENGTH)) | get_mask("chunked", chunk=4))
    check(flexmasks.packed(get_mask(near, window=2, ids=torch.arange(LENGTH) % 3), [0, 7, LENGTH]))
    check(get_score(root, of=5.0))
    check(get_score(root))
    chain = from_arguments(None, ["alibi", get_score(root, of=5.0), "softcap"], {"slopes": [0.5, 0.1], "cap": 3.0})[1]
    assert chain is not None
    check(chain)


def test_tensors_and_numbers_are_leaves_and_sequences_become_tensors() -> None:
    ids = torch.arange(LENGTH)
    encoded = encode(get_mask(near, window=3, ids=ids), CPU)
    assert [leaf is ids for leaf in encoded.leaves] == [False, True]
    assert encoded.leaves[0] == 3
    assert "3" not in encoded.text.partition("'window'")[2]  # graphs of other windows have the same text
    lengths = encode(get_mask("padding", kv_lens=[3, 4]), CPU).leaves
    assert [leaf.tolist() for leaf in lengths] == [[3, 4]]
    meta = encode(get_mask("padding", kv_lens=[3, 4]), torch.device("meta")).leaves
    assert [leaf.device.type for leaf in meta] == ["meta"]


def test_what_was_forgotten_cannot_be_decoded() -> None:
    values = encode(get_mask(near, window=3, ids=torch.zeros(LENGTH)), CPU).values()
    flexmasks.clear_caches()
    with pytest.raises(RuntimeError, match="a mask's function is missing; it was noted too long ago"):
        decode("mask", values)


# --- names of functions ---


def compiled(source: str, **variables: Any) -> Callable[..., Tensor]:
    """Return the function of a source, as a notebook's cell makes it that runs again."""
    space: dict[str, Any] = {"__name__": __name__, **variables}
    exec(source, space)
    function: types.FunctionType = space["f"]
    return function


def name_of(function: Any, **params: Any) -> str:
    return str(encode(get_mask(function, **params), CPU).values()[1])


def test_equal_functions_have_one_name_and_others_have_others() -> None:
    sources = [
        "def f(b, h, q, kv): return q >= kv",
        "def f(b, h, q, kv): return q > kv",
        "def f(b, h, q, kv, *, n=1): return q > kv + n",
        "def f(b, h, q, kv, *, n=2): return q > kv + n",
        "def f(b, h, q, kv, n=2): return q > kv + n",
        "def f(b, h, q, kv): return q > kv + 2",
        "def f(b, h, q, kv): return q > kv + 2.0",
    ]
    names = [[name_of(compiled(source)) for source in sources] for _ in range(2)]
    assert names[0] == names[1]
    assert len(set(names[0])) == len(sources)
    modules = [name_of(compiled("def f(b, h, q, kv): return m.sqrt(4) > kv", m=m)) for m in (math, torch)]
    assert modules[0] != modules[1]


def test_graphs_on_the_disk_are_not_those_of_other_registrations() -> None:
    """What a user has registered under a name may be another mask in the next process."""

    def looked_up(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return flexmasks.get_mask("causal")(b, h, q, kv)

    def helped(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return leading(q, b, h, q)[0] >= kv

    with pytest.raises(Unreadable, match="reads the variable 'flexmasks'"):
        encode(flexmasks.get_mask(looked_up), CPU)
    names = {encode(flexmasks.get_mask(helped), CPU).values()[1] for _ in range(2)}
    assert len(names) == 1

    @functools.wraps(causal)
    def wrapped(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv - 3

    for name, function in (("another_causal", causal), ("wrapped_causal", wrapped)):
        flexmasks.register_mask(name=name)(function)
        assert not flexmasks.get_mask(name)._is_by_library()
    assert flexmasks.packed("causal", [0, 9])._is_by_library()
    assert all(d.by_library for d in definitions.OPERATORS.values())
    assert flexmasks.get_mask("causal")._is_by_library()


def test_what_only_torch_can_read_is_refused_in_words() -> None:
    window = torch.tensor(2)

    def captures(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < window

    def reads(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < LIMIT

    def has_default(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, n: int = 3) -> Tensor:
        return q - kv < n

    words = {
        captures: "the mask function 'captures' captures variables: inside torch.compile write it at the top level",
        reads: "the mask function 'reads' reads the variable 'LIMIT'",
        has_default: "the mask function 'has_default' reads the defaults of its parameters",
        functools.partial(reads): "is a partial",
    }
    for function, text in words.items():
        for mask in (get_mask(function), get_mask("causal") & get_mask(function)):  # type: ignore[call-overload]
            with pytest.raises(Unreadable, match=text):
                encode(mask, CPU)
            assert encode_if_readable(mask, CPU) is None
    assert encode_if_readable(None, CPU) is None
    assert encode_if_readable(get_mask("causal"), CPU) == encode(get_mask("causal"), CPU)


# --- numbers that graphs take as tensors ---


def test_numbers_of_users_scores_are_tried_as_tensors() -> None:
    def tried(function: Any, **params: Any) -> Any:
        score = get_score(function, **params)
        note_constants(score, SIZE)
        return seen_in_graphs(encode(score, CPU).values()[1], next(iter(params)))

    as_product = compiled("def f(score, b, h, q, kv, *, n): return score * n")
    decides = compiled("def f(score, b, h, q, kv, *, n): return score * n if n > 2 else score")
    by_type = compiled("def f(score, b, h, q, kv, *, n): return score * n if isinstance(n, float) else score")
    assert tried(as_product, n=1.5).checked == {"n"}
    assert tried(as_product, n=1.5).why_constant == ""
    assert tried(decides, n=1.5).why_constant.startswith("its function fails with tensors in their places")
    assert tried(by_type, n=1.5).why_constant == "its function computes otherwise with tensors in their places"
    note_constants(get_score("softcap", cap=2.0), SIZE)
    assert not seen_in_graphs("softcap", "cap").checked  # the library says itself what may be a tensor
