"""torch.use_deterministic_algorithms: equal calls give equal bits, or the backend refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import flash_double
import pytest
import torch
from helpers import on_gpu_of, skip_unless_flash_takes
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import flexmasks
from flexmasks import inside_compile
from flexmasks.backends import cudnn, fa4_functions, fa4_package, table
from flexmasks.backends.encoded import UNKNOWN, Encoded
from flexmasks.context import Context


@pytest.fixture
def deterministic() -> Iterator[Callable[..., None]]:
    """Switch torch's deterministic mode on; a later call may switch it otherwise."""
    torch.use_deterministic_algorithms(True)
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def _call(**given: Any) -> Any:
    q = torch.empty(1, 4, 200, 64, dtype=torch.bfloat16, device="meta")
    facts = {"learns": False, "needs_grad": True, "pages": None, "on_gpu": True, "is_traced": False}
    return SimpleNamespace(**{"q": q, "k": q, **facts, **given}, context=Context.now(q.device))


@pytest.mark.parametrize(
    ("name", "capability", "given", "sums"),
    [
        ("flex", (9, 0), {"learns": True}, "the gradients of tensors"),
        ("flex", (9, 0), {}, None),
        ("flex_flash", (9, 0), {}, "the gradients of queries"),
        ("flex_flash", (9, 0), {"needs_grad": False}, None),
        ("fa4", (9, 0), {}, None),
        ("fa4", (12, 0), {}, "the gradients of queries"),
        ("fa4", (12, 0), {"needs_grad": False}, None),
        ("reference", (9, 0), {"learns": True}, None),
    ],
)
def test_what_backends_refuse(
    name: str,
    capability: tuple[int, int],
    given: dict[str, Any],
    sums: str | None,
    deterministic: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu_of(monkeypatch, capability)
    for other in (name, "short"):
        monkeypatch.setitem(table.BACKENDS, other, replace(table.BACKENDS[other], refuses=lambda call: None))
    reason = table.why_not(name, call := _call(**given))
    assert (reason is None) if sums is None else (sums in str(reason) and str(reason).endswith("forbids"))
    # Where "short" does not run what learns either, the reason says what the reference costs.
    monkeypatch.setitem(table.BACKENDS, "short", replace(table.BACKENDS["short"], refuses=lambda call: "too long"))
    assert str(table.why_not(name, call)).endswith(table._COST_OF_ORDER) == (name == "flex" and sums is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.warn_of_order(name, call)
    deterministic(True, warn_only=True)
    call = _call(**given)
    assert table.why_not(name, call) is None
    if sums is not None:
        with pytest.warns(UserWarning, match=f"backend '{name}' adds {sums}.*warn_only=True"):
            table.warn_of_order(name, call)
    deterministic(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.warn_of_order(name, _call(**given))


def test_own_block_masks_inside_compile(deterministic: Callable[..., None]) -> None:
    def first(learns: bool) -> str:
        with FakeTensorMode(), torch.device("cuda:0"):
            q = torch.empty(1, 2, 256, 64, requires_grad=True)
            encoded = Encoded(UNKNOWN, 0, (128, 128), score=UNKNOWN)
            call = inside_compile._call_of(encoded.plans(q, q, (q,)), q, q, q, None, {}, (True, learns, False))
            return table.choose(call)[0][0].name

    assert first(learns=True) == "reference"
    assert first(learns=False) == "flex"


_IDS = torch.tensor([[0] * 3 + [1] * 20 + [2] * 17, [0] * 40])
_WINDOWS: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "window": {"mask": "sliding_window", "window": 9},
    "packed": {"mask": flexmasks.packed("causal", [0, 3, 23, 40])},
    "documents": {"mask": flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=_IDS)},
    "contiguous": {
        "mask": flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=_IDS, contiguous=True)
    },
    "window of documents": {
        "mask": flexmasks.get_mask("sliding_window", window=5) & flexmasks.get_mask("document", document_ids=_IDS)
    },
}


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", _WINDOWS)
def test_windows_run_on_flash_attention_4(
    kind: str, is_compiled: bool, deterministic: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward pass is told to add in order, in the mode only. In graphs nobody can look at ids of documents."""
    in_order: list[bool] = []

    def backward(*tensors: Tensor, deterministic: bool, **arguments: Any) -> tuple[Tensor, ...]:
        in_order.append(deterministic)
        with ThreadPoolExecutor(1) as threads:  # inside of an operator, this one records no gradients
            return threads.submit(flash_double.backward, *tensors, **arguments).result()

    flash_double.replace(monkeypatch, _flash_attn_bwd=backward)
    refuses = lambda call: None if call.mask.window else "it knows only windows"  # noqa: E731
    fa4 = replace(table.BACKENDS["fa4"], refuses=refuses)
    monkeypatch.setattr(table, "BACKENDS", {"fa4": fa4, **{b: table.BACKENDS[b] for b in ("flex", "reference")}})
    leaves = [torch.randn(2, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight, call = torch.randn(2, 2, 40, 8, dtype=torch.float64), _WINDOWS[kind]

    def attend(*tensors: Tensor) -> Tensor:
        out: Tensor = flexmasks.attention(*tensors, **call)
        return out

    want = flexmasks.attention(*leaves, backend="reference", **call)
    expected = torch.autograd.grad(want, leaves, weight)
    with torch.library._scoped_library("flexmasks", "FRAGMENT") as library:
        for operator in (fa4_functions.traced_forward, fa4_functions.traced_backward):
            library.impl(operator._opoverload, operator._init_fn, "CPU")
        torch._dynamo.reset()
        function = torch.compile(attend, fullgraph=True, backend="aot_eager") if is_compiled else attend
        for mode in (False, True):
            deterministic(mode)
            in_order.clear()
            out = function(*leaves)
            torch.testing.assert_close(out, want)
            for got, exactly in zip(torch.autograd.grad(out, leaves, weight), expected, strict=True):
                torch.testing.assert_close(got, exactly)
            # The first call of a kind is differentiated once more, outside of graphs.
            assert set(in_order) == (set() if is_compiled and "documents" in kind else {mode})
            assert is_compiled or flexmasks.explain(*leaves, **call).backend == "fa4"


def test_so_many_sequences_that_their_order_takes_gigabytes(
    deterministic: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4_package, "is_small", lambda device: False)
    refuses = lambda call: None if call.mask.window else "it knows only windows"  # noqa: E731
    fa4 = replace(table.BACKENDS["fa4"], refuses=refuses)
    monkeypatch.setattr(table, "BACKENDS", {"fa4": fa4, **{b: table.BACKENDS[b] for b in ("flex", "reference")}})
    length = 1 << 16
    mask = flexmasks.get_mask("document", document_ids=torch.arange(length) // 8)
    q, k = (torch.empty(1, heads, length, 1).requires_grad_() for heads in (32, 4))
    told = flexmasks.explain(q, k, k, mask=mask)
    # 8,192 documents and room for others, 32 heads, 1,024 tiles, 4 bytes, and as much for tiles of keys
    assert "4.0 GB for up to 16,384 sequences of up to 65,536 tokens" in told.others["fa4"], told
    assert told.backend == "reference"
    with torch.no_grad():
        assert flexmasks.explain(q, k, k, mask=mask).backend == "fa4"
    deterministic(False)
    assert flexmasks.explain(q, k, k, mask=mask).backend == "fa4"


def _learned(device: str, length: int) -> dict[str, tuple[Tensor, Any]]:
    """Return learned tensors, and scores that read each number for many pairs."""
    bias = torch.randn(1, 4, length, length, device=device, requires_grad=True)
    table_of = torch.randn(4, 2 * length, device=device, requires_grad=True)
    slopes = torch.rand(4, device=device, requires_grad=True)
    return {
        "dense_bias": (bias, flexmasks.get_score("dense_bias", bias=bias)),
        "a function": (table_of, lambda s, b, h, q, kv: s + table_of[h, q - kv + length]),
        "alibi": (slopes, flexmasks.get_score("alibi", slopes=slopes)),
    }


def _gradients(call: Callable[..., Tensor], q: Tensor, learned: Tensor, score: Any, mask: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, q, q)]
    out = call(*leaves, mask=mask, score=score)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, learned], weight)]


@pytest.mark.parametrize("score", ["dense_bias", "a function", "alibi"])
def test_learned_scores(score: str, deterministic: Callable[..., None]) -> None:
    learned, changed = _learned("cpu", 150)[score]
    q = torch.randn(3, 4, 150, 16)
    first = _gradients(flexmasks.attention, q, learned, changed, "causal")
    for _ in range(2):
        assert all(map(torch.equal, first, _gradients(flexmasks.attention, q, learned, changed, "causal")))


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("score", ["dense_bias", "a function", "alibi"])
def test_learned_scores_on_a_gpu(score: str, is_compiled: bool, deterministic: Callable[..., None]) -> None:
    """torch's kernel would add their gradients by atomic operations."""
    learned, changed = _learned("cuda", 700)[score]
    q = torch.randn(4, 4, 700, 64, device="cuda", dtype=torch.bfloat16)
    call: Any = torch.compile(flexmasks.attention) if is_compiled else flexmasks.attention
    first = _gradients(call, q, learned, changed, "causal")
    for _ in range(3):
        assert all(map(torch.equal, first, _gradients(call, q, learned, changed, "causal")))
    if not is_compiled:
        with pytest.raises(ValueError, match="'flex' cannot run this call: it adds the gradients of tensors"):
            flexmasks.attention(q, q, q, mask="causal", score=changed, backend="flex")
        deterministic(True, warn_only=True)
        with warnings.catch_warnings(record=True) as told:  # other packages may warn, too
            warnings.simplefilter("always")
            flexmasks.attention(q, q, q, mask="causal", score=changed, backend="flex")
        assert any("adds the gradients of tensors" in str(w.message) for w in told)


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "function", "block_mask"])
def test_masks_on_a_gpu(kind: str, is_compiled: bool, deterministic: Callable[..., None]) -> None:
    """Also after calls of the same kind outside the mode, whose kernels may add in changing order."""
    ids = torch.arange(8192, device="cuda") // 700
    mask: dict[str, Any] = {
        "causal": {"mask": "causal"},
        "window": {"mask": "sliding_window", "window": 300},
        "documents": {"mask": "document", "document_ids": ids},
        "function": {"mask": lambda b, h, q, kv: (q >= kv) & (kv % 5 != 2)},
        "block_mask": {"block_mask": create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 8192, 8192)},
    }[kind]
    call: Any = torch.compile(flexmasks.attention) if is_compiled else flexmasks.attention
    q, k, v = (torch.randn(2, 8, 8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weight = torch.randn_like(q)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(q, k, v, **mask), (q, k, v), weight)

    deterministic(False)
    gradients()
    deterministic(True)
    first = gradients()
    for _ in range(3):
        assert all(map(torch.equal, first, gradients()))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    ("kind", "is_compiled"),
    [(kind, mode) for kind in _WINDOWS for mode in (False, True) if not (mode and "documents" in kind)],
)
def test_flash_attention_4_adds_in_order(
    kind: str, is_compiled: bool, kv_heads: int, deterministic: Callable[..., None]
) -> None:
    """In graphs nobody can look at ids of documents."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    window = flexmasks.get_mask("sliding_window", window=300)
    causal, starts = flexmasks.get_mask("causal"), torch.arange(0, 4097, 256, device="cuda", dtype=torch.int32)
    ids = torch.arange(4096, device="cuda") // 300
    document = flexmasks.get_mask("document", document_ids=ids)
    mask = {
        "causal": causal, "window": window, "packed": flexmasks.packed("causal", starts),
        "documents": causal & document, "window of documents": window & document,
        "contiguous": causal & flexmasks.get_mask("document", document_ids=ids, contiguous=True),
    }[kind]  # fmt: skip
    shapes = [(2, heads, 4096, 64) for heads in (8, kv_heads, kv_heads)]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    weight = torch.randn_like(leaves[0])
    torch._dynamo.reset()
    call: Any = torch.compile(flexmasks.attention) if is_compiled else flexmasks.attention

    def gradients() -> tuple[Tensor, ...]:
        out = call(*leaves, mask=mask, backend="fa4")
        return out.detach(), *torch.autograd.grad(out, leaves, weight)

    first = gradients()
    for _ in range(10):
        assert all(map(torch.equal, first, gradients()))


@pytest.mark.gpu
def test_flash_is_not_taken_with_gradients(deterministic: Callable[..., None]) -> None:
    q = torch.randn(2, 16, 8192, 64, device="cuda", dtype=torch.bfloat16)
    mask: dict[str, Any] = {"mask": "prefix_lm", "prefix_len": 900}
    deterministic(False)
    skip_unless_flash_takes((q, q, q), **mask)
    assert flexmasks.explain(q, q, q, **mask).backend == "flex_flash"
    deterministic(True)
    assert flexmasks.explain(q, q, q, **mask).backend == "flex_flash"  # without gradients nothing is added twice
    leaves = [x.detach().requires_grad_() for x in (q, q, q)]
    told = flexmasks.explain(*leaves, **mask)
    assert told.backend == ("flex" if cudnn.why_unusable() else "cudnn")
    assert "it adds the gradients of queries in changing order" in told.others["flex_flash"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "fa4", "flex_flash", "flex", "short"])
def test_a_sequence_does_not_depend_on_its_batch(backend: str) -> None:
    """With a backend named by hand. "decode" is not among them: it shares out all keys of a batch."""
    mask: Any = "causal" if backend in ("sdpa", "fa4") else lambda b, h, q, kv: (q >= kv) & (kv % 5 != 2)
    length = 300 if backend == "short" else 1024
    q, k, v = (torch.randn(8, 8, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def attend(*tensors: Tensor) -> Tensor:
        return flexmasks.attention(*tensors, mask=mask, backend=backend)

    try:
        whole = attend(q, k, v)
    except ValueError as error:
        pytest.skip(str(error))
    alone = [attend(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(8)]
    assert torch.equal(whole, torch.cat(alone))
