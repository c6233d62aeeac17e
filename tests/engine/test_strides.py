"""Memory layouts of q, k and v, and of tensors that functions read: no call changes what another one runs."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICES, TOLERANCE, error, torch_says
from hypothesis import given
from hypothesis import strategies as st
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flexmasks
from benchmarks import private_torch
from flexmasks import road
from flexmasks.backends import flex_kernels, sdpa
from flexmasks.kernels import wide

BATCH, HEADS, LENGTH, SIZE = 2, 2, 96, 32

pytestmark = pytest.mark.usefixtures("one_thread", "cold")

# Tensors [BATCH, HEADS, LENGTH, SIZE] in all kinds of layouts.
LAYOUTS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "contiguous": lambda randn: randn(BATCH, HEADS, LENGTH, SIZE),
    "tokens first": lambda randn: randn(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2),
    "one for the batch": lambda randn: randn(1, HEADS, LENGTH, SIZE).expand(BATCH, -1, -1, -1),
    "one for the heads": lambda randn: randn(BATCH, 1, LENGTH, SIZE).expand(-1, HEADS, -1, -1),
    "one for all tokens": lambda randn: randn(BATCH, HEADS, 1, SIZE).expand(-1, -1, LENGTH, -1),
    "one for the size": lambda randn: randn(BATCH, HEADS, LENGTH, 1).expand(-1, -1, -1, SIZE),
    "of a buffer": lambda randn: randn(BATCH, HEADS, 2 * LENGTH, SIZE)[:, :, :LENGTH],
    "every second token": lambda randn: randn(BATCH, HEADS, 2 * LENGTH, SIZE)[:, :, ::2],
    "size first": lambda randn: randn(BATCH, HEADS, SIZE, LENGTH).transpose(2, 3),
    "every second of the size": lambda randn: randn(BATCH, HEADS, LENGTH, 2 * SIZE)[..., ::2],
    "one of q, k and v": lambda randn: randn(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)[1],
}


def _window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv <= 20)


def _attended(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible)


def _of_indices(mask: Callable[..., Tensor]) -> Tensor:
    position = torch.arange(LENGTH)
    zero = torch.zeros((), dtype=torch.int64)
    return mask(zero, zero, position[:, None], position)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in messages if "No CUDA runtime" not in text]  # of a torch with CUDA where no GPU is


# --- q, k and v ---


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize(
    ("layout", "quick_kernels"),
    [
        ("contiguous", "in C++"),
        ("one for the batch", "without C++"),
        pytest.param("one for the batch", "in C++", marks=pytest.mark.campaign),
    ],
    indirect=["quick_kernels"],
)
def test_one_kernel_serves_all_layouts(layout: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """On a CPU a kernel is compiled for the first call alone, and torch has nothing to say about a limit."""
    if layout != "contiguous":  # quick kernels take no heed of blocks: there is one
        monkeypatch.setitem(globals(), "LENGTH", 30)
    visible, graphs = _of_indices(_window), private_torch.compiled_graphs()
    for name, places in ((layout, "kv"), *itertools.product(LAYOUTS, ("k", "kv", "qkv"))):
        with torch_says(caplog):
            tensors = [LAYOUTS[name if x in places else "contiguous"](torch.randn) for x in "qkv"]
            for _ in range(2):
                out = flexmasks.attention(*tensors, mask=_window, backend="flex")
                assert error(out, _attended(*tensors, visible)) < TOLERANCE[torch.float32]
    assert private_torch.compiled_graphs() == graphs + 1
    assert "no: such a call has run" in flexmasks.explain(*tensors, mask=_window, backend="flex").compiles
    assert not _warnings(caplog)


def test_large_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt for all batch elements would take the memory of many."""
    q, k = (LAYOUTS[name](torch.randn) for name in ("contiguous", "one for the batch"))
    assert all(x.is_contiguous() for x in flex_kernels._laid_out("key", (), q, k, k))
    monkeypatch.setattr(flex_kernels, "_MAX_COPIED", 2 * k.nbytes - 1)
    assert flex_kernels._laid_out("key", (), q, k, k) == (q, k, k)


class _Calls:
    """A double of a function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.count = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("other", ["size first", "settings"])
def test_a_call_runs_what_explain_says_whatever_ran_before(
    other: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal attention with gradients takes torch's own kernel, but for what has none."""
    by_torch = _Calls(F.scaled_dot_product_attention)
    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", by_torch)

    def run(name: str) -> None:
        randn = functools.partial(torch.randn, device=device)
        q, k, v = (LAYOUTS["contiguous"](randn).requires_grad_() for _ in range(3))
        if name in LAYOUTS:
            q = LAYOUTS[name](randn).requires_grad_()
        before = by_torch.count
        with sdpa_kernel(SDPBackend.MATH if name == "settings" else list(SDPBackend.__members__.values())):
            explained = flexmasks.explain(q, k, v, mask="causal").backend
            out = flexmasks.attention(q, k, v, mask="causal")
        assert (explained == "sdpa") == (by_torch.count == before + 1) == (name == "usual")
        want = _attended(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).tril())
        assert error(out, want.cpu()) < TOLERANCE[torch.float32]

    for name in (other, "usual", other, "usual", "usual", other):
        run(name)


# --- tensors that functions read ---


def _strided() -> dict[str, tuple[dict[str, Any], str, Tensor]]:
    """Return calls by name: fixed arguments, and the name and a view for the tensor."""
    ids = torch.arange(2 * LENGTH) // 23
    return {
        "ids": ({"mask": "document"}, "document_ids", ids[::2]),
        "column": ({"mask": "document"}, "document_ids", ids[: LENGTH * 2].view(LENGTH, 2)[:, 0].expand(BATCH, -1)),
        "lengths": ({"mask": "padding"}, "kv_lens", torch.tensor(77).expand(BATCH)),
        "slopes": ({"mask": "causal", "score": "alibi"}, "slopes", torch.rand(2 * HEADS)[::2]),
    }


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("name", ["lengths", "slopes"])
def test_views_run_by_the_kernel_of_what_is_contiguous(name: str, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, SIZE) for _ in range(3))
    fixed, parameter, view = _strided()[name]
    graphs = private_torch.compiled_graphs()
    for tensor in (view, view.contiguous(), view.clone().repeat_interleave(2, 0)[::2]):
        call = {**fixed, parameter: tensor}
        out = flexmasks.attention(q, k, v, **call)
        want = flexmasks.attention(q.double(), k.double(), v.double(), **call, backend="reference")
        assert error(out, want) < TOLERANCE[torch.float32]
        assert flexmasks.explain(q, k, v, **call).backend == "flex"
    assert private_torch.compiled_graphs() == graphs + 1
    assert not _warnings(caplog)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("learns", [False, True])
def test_changes_of_views_are_noticed(learns: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A view changes with the tensor that it is of, also where a GPU would renew the call."""
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu",))
    q, k, v = (torch.randn(1, HEADS, LENGTH, SIZE, requires_grad=learns) for _ in range(3))
    ids = torch.arange(2 * LENGTH) // 23
    view = ids[::2]
    for _ in range(3):
        out = flexmasks.attention(q, k, v, mask="document", document_ids=view)
        assert error(out, _attended(q, k, v, view[:, None] == view)) < TOLERANCE[torch.float32]
        ids += torch.arange(2 * LENGTH) // 61
    assert not _warnings(caplog)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("learns", [False, True])
def test_tokens_that_overlap_in_memory(learns: bool, backend: str) -> None:
    """Windows of a signal, a step apart that is smaller than a head, and one token expanded over the length."""
    for (q_len, kv_len), step, which in itertools.product([(5, 70), (40, 70), (64, 64)], (0, 1, 3), "qkv"):
        lengths = {"q": q_len, "k": kv_len, "v": kv_len}
        tensors = {n: torch.randn(1, 2, length, 8) for n, length in lengths.items()}
        if step:
            signal = torch.randn(1, 2, lengths[which] * step + 8)
            tensors[which] = signal.unfold(2, 8, step)[:, :, : lengths[which]]
        else:
            tensors[which] = torch.randn(1, 2, 1, 8).expand(-1, -1, lengths[which], -1)
        q, k, v = tensors.values()
        wanted = scaled_dot_product_attention(*(x.double().contiguous() for x in (q, k, v)))
        out = flexmasks.attention(q.detach().requires_grad_(learns), k, v, q_offset=0, backend=backend)
        assert error(out, wanted) < 1e-5


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradients_reach_what_a_view_is_of(backend: str) -> None:
    q, k, v = (torch.randn(1, HEADS, LENGTH, SIZE, requires_grad=True) for _ in range(3))
    table = torch.randn(2 * HEADS, 2 * LENGTH, requires_grad=True)
    view = table[::2, ::2]
    position = torch.arange(LENGTH)

    def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + view[h, (q - kv).clamp(min=0)]

    out = flexmasks.attention(q, k, v, mask="causal", score=bias, backend=backend)
    exact = table.detach().double().requires_grad_()
    added = exact[::2, ::2][:, (position[:, None] - position).clamp(min=0)]
    hidden = position[:, None] < position
    want = _attended(q, k, v, added.masked_fill(hidden, -torch.inf))
    weight = torch.randn_like(out)
    (got,), (wanted,) = torch.autograd.grad(out, [table], weight), torch.autograd.grad(want, [exact], weight.double())
    assert error(out, want) < TOLERANCE[torch.float32]
    assert error(got, wanted) < 2 * TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("name", _strided())
@pytest.mark.parametrize("learns", [False, True])
def test_views_on_a_gpu(name: str, learns: bool, caplog: pytest.LogCaptureFixture) -> None:
    shape = BATCH, HEADS, LENGTH, SIZE
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=learns) for _ in range(3))
    fixed, parameter, view = _strided()[name]
    for step in range(4):  # later steps renew the call
        given = (view.cuda() + step).repeat_interleave(2, 0)[::2] if step else view.cuda()
        call = {**fixed, parameter: given}
        out = flexmasks.attention(q, k, v, **call, backend="flex")
        want = flexmasks.attention(q.double(), k.double(), v.double(), **call, backend="reference")
        assert error(out, want.cpu()) < TOLERANCE[torch.bfloat16]
    assert not _warnings(caplog)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_on_a_gpu(name: str) -> None:
    randn = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = (LAYOUTS[name](randn) for _ in range(3))
    visible = _of_indices(_window).cuda()
    out = flexmasks.attention(q, k, v, mask=_window, backend="flex")
    assert error(out, _attended(q, k, v, visible).cpu()) < TOLERANCE[torch.bfloat16]


@given(st.data())
def test_wide_copies_between_any_layouts(data: st.DataObject) -> None:
    def laid(shape: list[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape, as a part of a larger one with its dimensions in any order."""
        places = data.draw(st.permutations(range(len(shape))))
        if data.draw(st.booleans()):  # the last dimension stays the last one, as where copies are wide
            places = [*(n for n in places if n != len(shape) - 1), len(shape) - 1]
        more = [shape[n] + data.draw(st.sampled_from([0, 0, 1, 8])) for n in places]
        first = data.draw(st.sampled_from([0, 0, 1]))
        numbers = torch.zeros(first + math.prod(more), dtype=dtype)[first:].view(more)
        return numbers.permute([places.index(n) for n in range(len(shape))])[tuple(slice(n) for n in shape)]

    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int64]))
    shape = [*data.draw(st.lists(st.integers(0, 4), max_size=3)), data.draw(st.sampled_from([1, 6, 8, 16]))]
    place, x = laid(shape, dtype), laid(shape, dtype)
    x.copy_(torch.arange(1, 1 + x.numel()).view(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "on_gpu", lambda device: True)
        wide.copy(place, x)
    assert place.equal(x)
