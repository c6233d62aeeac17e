"""The functions of `flexmasks.masks` and `flexmasks.scores`: they make what `get_mask` and `get_score` make."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import fresh
import pytest
import torch
from torch import Tensor

import flexmasks
from flexmasks.masks import causal, document, sliding_window
from flexmasks.scores import alibi, softcap
from flexmasks.spec.definitions import definition, is_by_library

OWN = [e for e in [*flexmasks.list_masks(), *flexmasks.list_scores()] if is_by_library(e.kind, e.name)]
MADE = [e for e in OWN if e.name not in ("packed", "paged")]  # whose constructors are not written by hand
Q, K, V = torch.randn(3, 1, 2, 24, 8, dtype=torch.float64)


def ids(entry: flexmasks.spec.registry.Entry) -> str:
    return f"{entry.kind}-{entry.name}"


def package(kind: str) -> Any:
    return flexmasks.masks if kind == "mask" else flexmasks.scores


@pytest.mark.parametrize("entry", OWN, ids=ids)
def test_they_make_what_the_name_makes(entry: flexmasks.spec.registry.Entry) -> None:
    params = definition(entry.kind, entry.name).example
    given = {} if params is None else params(64)
    made = getattr(package(entry.kind), entry.name)(**given)
    named = (flexmasks.get_mask if entry.kind == "mask" else flexmasks.get_score)(entry.name, **given)
    assert type(made) is type(named)
    assert made == named
    assert repr(made) == repr(named)


@pytest.mark.parametrize("entry", MADE, ids=ids)
def test_they_show_what_they_take(entry: flexmasks.spec.registry.Entry) -> None:
    constructor = getattr(package(entry.kind), entry.name)
    signature = inspect.signature(constructor)
    taken = [n if p.default is p.empty else f"{n}={p.default!r}" for n, p in signature.parameters.items()]
    assert f"{entry.name}({', '.join(taken)})" == entry.signature
    assert all(p.kind is p.KEYWORD_ONLY for p in signature.parameters.values())
    assert all(get_origin(p.annotation) in (None, Annotated) for p in signature.parameters.values())
    assert all(get_args(p.annotation)[1:] for p in signature.parameters.values() if p.annotation not in (int, bool))
    assert signature.return_annotation is {"mask": flexmasks.Mask, "score": flexmasks.Score}[entry.kind]
    assert constructor.__doc__.partition("\n")[0] == entry.summary
    assert (constructor.__module__, constructor.__name__) == (f"flexmasks.{entry.kind}s", entry.name)
    assert pickle.loads(pickle.dumps(constructor)) is constructor


def test_one_signature_in_full() -> None:
    cap = "cap: Annotated[float | torch.Tensor, 'float in 0.. | float[] in 0..']"
    exact = "exact: Annotated[bool, 'bool'] = False"
    shown = f"(*, {cap}, {exact}) -> flexmasks.spec.values.Score"
    signature = str(inspect.signature(flexmasks.scores.softcap))
    assert signature.replace("typing.", "") == shown  # which Python 3.11 writes


def test_the_packages_list_them_and_nothing_else() -> None:
    for module, kind in ((flexmasks.masks, "mask"), (flexmasks.scores, "score")):
        expected = sorted(e.name for e in OWN if e.kind == kind)
        assert list(module.__all__) == expected
        assert [name for name in dir(module) if not name.startswith("__")] == expected
        names: dict[str, Any] = {}
        exec(f"from {module.__name__} import *", names)
        assert all(names[name] is getattr(module, name) for name in expected)
    assert flexmasks.masks.packed is flexmasks.scores.packed is flexmasks.packed
    assert flexmasks.masks.paged is flexmasks.scores.paged is flexmasks.paged


def test_they_stand_in_place_of_modules() -> None:
    import flexmasks.masks.causal as of_causal
    from flexmasks.masks.causal import causal as function

    assert of_causal is flexmasks.masks.causal is causal
    assert inspect.ismodule(sys.modules["flexmasks.masks.causal"])
    assert importlib.import_module("flexmasks.masks.causal") is sys.modules["flexmasks.masks.causal"]
    assert list(inspect.signature(function).parameters) == ["b", "h", "q", "kv"]
    code = "import flexmasks.masks.causal; print(flexmasks.masks.causal())"  # the submodule first
    assert fresh.run(code).stdout == "causal()\n"


def test_they_combine() -> None:
    packed = causal() & document(document_ids=[0, 0, 1])
    assert packed == flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=[0, 0, 1])
    shown = flexmasks.dense_mask(packed, 3)[0, 0].int()
    assert shown.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    out = flexmasks.attention(Q, K, V, mask=sliding_window(window=3), score=[alibi(), softcap(cap=2.0)])
    named = flexmasks.attention(Q, K, V, mask="sliding_window", window=3, score=["alibi", "softcap"], cap=2.0)
    assert torch.equal(out, named)


def message_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_wrong_parameters() -> None:
    by_position = "flexmasks.masks.sliding_window takes nothing by position; write sliding_window(window=1024)."
    assert message_of(sliding_window, 1024) == by_position
    assert message_of(causal, 3).endswith("write causal(), which takes no parameters.")
    assert message_of(softcap, 3.0) == "flexmasks.scores.softcap takes nothing by position; write softcap(cap=3.0)."
    for params in ({}, {"windw": 3}, {"causal": True}, {"window": [[3]], "left": 2}):
        messages = message_of(sliding_window, **params), message_of(flexmasks.get_mask, "sliding_window", **params)
        assert len({re.sub("^flexmasks.* is named ", "", message) for message in messages}) == 1
    assert "needs `window`" in message_of(sliding_window)


@pytest.mark.parametrize(
    ("argument", "given", "write"),
    [
        ("mask", causal, "flexmasks.masks.causal, which makes a mask; write causal()"),
        (
            "mask",
            sliding_window,
            "sliding_window, which makes a mask; write sliding_window(window=...)",
        ),
        ("mask", flexmasks.masks.natten, "write natten(height=..., width=..., kernel=...)"),
        ("mask", flexmasks.packed, "which makes a mask; write packed(inner=..., offsets=...)"),
        ("score", softcap, "flexmasks.scores.softcap, which makes a score; write softcap(cap=...)"),
        ("score", alibi, "write alibi()"),
        ("score", flexmasks.paged, "which makes a score; write paged("),
        ("score", causal, "flexmasks.masks.causal, which makes a mask; write mask=causal()"),
        ("mask", softcap, "flexmasks.scores.softcap, which makes a score; write score=softcap(cap=...)"),
    ],
)
def test_a_constructor_in_place_of_a_mask(argument: str, given: Any, write: str) -> None:
    assert write in message_of(flexmasks.attention, Q, K, V, **{argument: given})
    assert write in message_of(flexmasks.attention, Q, K, V, **{argument: [given]})
    assert write in message_of(flexmasks.get_mask if argument == "mask" else flexmasks.get_score, given)
    compiled = torch.compile(flexmasks.attention, backend="eager")
    assert write in message_of(compiled, Q, K, V, **{argument: given})
    if argument == "mask":
        assert write in message_of(flexmasks.block_mask, given, 24)
        assert write in message_of(flexmasks.get_mask("full").__and__, given)
        assert write in message_of(flexmasks.plan, given, 24)
        assert write in message_of(flexmasks.show, given, 24)


def test_inside_compile() -> None:
    def call(q: Tensor, ids: Tensor) -> Tensor:
        packed = causal() & flexmasks.masks.document(document_ids=ids)
        return flexmasks.attention(q, q, q, mask=packed, score=softcap(cap=3.0))

    numbers = torch.arange(24) // 7
    torch._dynamo.reset()
    made = torch.compile(call, fullgraph=True, backend="aot_eager")(Q, numbers)
    torch.testing.assert_close(made, call(Q, numbers))
    other = flexmasks.attention(Q, Q, Q, mask="causal", score="softcap", cap=3.0)
    assert not torch.allclose(made, other)


def test_help_shows_them() -> None:
    code = "from flexmasks.masks import sliding_window; help(sliding_window)"
    printed = fresh.run(code).stdout
    assert re.search(r"sliding_window\(\*, window: .*\) -> flexmasks.spec.values.Mask", printed)
    assert definition("mask", "sliding_window").doc.splitlines()[2] in printed
