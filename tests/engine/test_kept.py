"""What a backward pass needs of masks and scores is kept, or watched.

After each forward pass something that the mask or score read changes. The backward pass then gives the gradients that
it gave before, or raises torch's error of a tensor that was changed in place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import arguments, label, qkv, skip_unless_flash_takes, spread
from oracles import MASK_CASES, SCORE_CASES, Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexmasks

LENGTH, CHANGED = 70, "modified by an inplace operation"
Attend = Callable[[Tensor, Tensor, Tensor], Any]

ids = torch.arange(LENGTH) // 10  # globals that functions read
reach = 5


def leaves(length: int = LENGTH, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, 2, length, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def differentiate(results: Any, inputs: list[Tensor], **more: Any) -> tuple[Tensor, ...]:
    results = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    total = sum(
        (x.nan_to_num(neginf=0.0) * torch.linspace(0, 3, x.numel(), device=x.device).view_as(x).cos()).sum()
        for x in results
    )
    return torch.autograd.grad(total, inputs, **more)


@contextlib.contextmanager
def refused() -> Iterator[list[str]]:
    """Yield a list, which gets torch's error of a changed tensor if that is raised."""
    found: list[str] = []
    try:
        yield found
    except RuntimeError as error:
        if CHANGED not in str(error):
            raise
        found.append(str(error))


def is_kept(results: Any, inputs: list[Tensor], change: Callable[[], Any]) -> bool:
    """Check the gradients after a change; return whether they are those before it, rather than an error."""
    want = differentiate(results, inputs, retain_graph=True)
    change()
    with refused() as found:
        got = differentiate(results, inputs)  # activation checkpointing computes all anew
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, atol=0, rtol=0)
    return not found


def given(case: Case, device: str = "cpu") -> tuple[dict[str, Any], list[Tensor]]:
    """Return the arguments of a case, with lists as tensors, and the tensors among them."""
    found = arguments(case, device)
    found = {n: torch.tensor(v, device=device) if isinstance(v, list) and v else v for n, v in found.items()}
    found = {n: v.clone() if isinstance(v, Tensor) else v for n, v in found.items()}  # cases are shared by all tests
    return found, [v for v in found.values() if isinstance(v, Tensor)]


def has_tensors(case: Case) -> bool:
    return isinstance(case.q_offset, tuple) or any(isinstance(v, Tensor | list) for v in case.params.values())


_CASES = spread([c for c in MASK_CASES + SCORE_CASES if has_tensors(c)], 1)
_FEW = ("document", "packed", "tree", "key_padding", "alibi", "dense_bias")
CASES = [c if c.name in _FEW else pytest.param(c, marks=pytest.mark.campaign) for c in _CASES]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=label)
def test_tensors_of_every_mask_and_score(case: Case) -> None:
    params, tensors = given(case)
    inputs = qkv(case, torch.float32, size=4)
    kind = "mask" if case in MASK_CASES else "score"
    results = flexmasks.attention(*inputs, return_lse=True, **{kind: case.name}, **params)

    def change() -> None:
        for t in tensors:
            t.copy_(t.flip(-1) if t.ndim else t + 1)

    is_kept(results, inputs, change)


def _held() -> SimpleNamespace:
    return SimpleNamespace(ids=ids.clone(), reach=5, bias=torch.randn(2, LENGTH))


def _documents(held: SimpleNamespace) -> Any:
    document_ids = held.ids
    return lambda b, h, q, kv: document_ids[q] == document_ids[kv]


def _calling(mask: flexmasks.Mask) -> Any:
    return lambda b, h, q, kv: mask(b, h, q, kv) & (q >= kv)


def _attend(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
    """Attend; queries that start later are fewer, so that they end among the keys."""
    return flexmasks.attention(q[:, :, :-10] if "q_offset" in call else q, k, v, **call)


# What reads tensors: arguments of a call, made of an object.
READERS: dict[str, Callable[[SimpleNamespace], dict[str, Any]]] = {
    "parameter": lambda held: {"mask": "document", "document_ids": held.ids},
    "composition": lambda held: {"mask": flexmasks.get_mask("document", document_ids=held.ids) & _documents(held)},
    "closure": lambda held: {"mask": _documents(held)},
    "view": lambda held: {"mask": _documents(SimpleNamespace(ids=held.ids[:]))},
    "attribute": lambda held: {"mask": lambda b, h, q, kv: held.ids[q] == held.ids[kv]},
    "mask in a function": lambda held: {"mask": _calling(flexmasks.get_mask("document", document_ids=held.ids))},
    "block_mask": lambda held: {
        "block_mask": torch.nn.attention.flex_attention.create_block_mask(
            _documents(held), None, None, LENGTH, LENGTH, device="cpu"
        )
    },
    "q_offset": lambda held: {"mask": "causal", "q_offset": held.ids[-1:]},
    "score": lambda held: {"score": lambda s, b, h, q, kv: s + held.ids[kv] * 0.1},
    "slopes": lambda held: {"score": "alibi", "slopes": held.bias[:, 0]},
}


@pytest.mark.parametrize("how", ["", "checkpoint", "twice", "reference", "batched"])
@pytest.mark.parametrize("name", READERS)
def test_tensors_that_change_in_place(name: str, how: str) -> None:
    """By the backends of `auto` and the reference; with activation checkpointing, or derivatives of gradients."""
    held = _held()
    call = functools.partial(_attend, **READERS[name](held))
    q, k, v = inputs = leaves(dtype=torch.float64 if how == "twice" else torch.float32)
    if how == "checkpoint":
        results = checkpoint(call, q, k, v, use_reentrant=False)
    elif how == "twice":
        results = differentiate(call(q, k, v), inputs, create_graph=True)
    else:
        results = call(q, k, v, return_lse=how == "reference")

    def change() -> None:
        held.ids.div_(2, rounding_mode="floor")
        held.bias.mul_(2)

    if how == "batched":
        rows = torch.stack([torch.randn_like(results) for _ in range(2)])
        take = functools.partial(torch.autograd.grad, results, inputs, rows, is_grads_batched=True)
        want = take(retain_graph=True)
        change()
        with refused():
            assert all(map(torch.equal, take(), want))
    else:
        is_kept(results, inputs, change)


SOFTMAX: dict[str, Callable[[SimpleNamespace], Attend]] = {
    "softmax": lambda held: lambda q, k, v: flexmasks.masked_softmax(q @ k.mT, mask=_documents(held)) @ v,
    "softmax, by name": lambda held: (
        lambda q, k, v: flexmasks.masked_softmax(q @ k.mT, mask="document", document_ids=held.ids) @ v
    ),
    "softmax, booleans": lambda held: lambda q, k, v: flexmasks.masked_softmax(q @ k.mT, mask=held.seen) @ v,
    "softmax, hidden": lambda held: lambda q, k, v: flexmasks.scaled_masked_softmax(q @ k.mT, held.seen) @ v,
}


@pytest.mark.parametrize("way", ["reentrant", "reentrant, nested", "not reentrant"])
@pytest.mark.parametrize("name", [*READERS, *SOFTMAX])
def test_checkpoints_of_tensors_that_change(name: str, way: str) -> None:
    """The backward pass makes the call again, and raises where that would be another call."""
    held = _held()
    held.seen = held.ids[:, None] == held.ids
    call = SOFTMAX[name](held) if name in SOFTMAX else None
    call = call or functools.partial(_attend, backend="reference", **READERS[name](held))
    again = functools.partial(checkpoint, use_reentrant=way != "not reentrant")
    layer = (lambda *x: again(call, *x)) if "nested" in way else call

    def gradients(attend: Attend, change: Callable[[], Any], inputs: list[Tensor]) -> list[Tensor | None]:
        inputs = [x.detach().requires_grad_() for x in inputs]
        results = attend(*inputs)
        change()
        results.square().sum().backward()
        return [x.grad for x in inputs]

    def change() -> None:
        held.ids.div_(2, rounding_mode="floor")
        held.bias.mul_(2)
        held.seen.logical_not_()

    inputs = leaves()
    want = gradients(call, lambda: None, inputs)
    for _ in range(2):  # the second call is found in a cache
        got = gradients(lambda *x: again(layer, *x), lambda: None, inputs)
        torch.testing.assert_close(got, want)
        with pytest.raises(RuntimeError, match=CHANGED):
            gradients(lambda *x: again(layer, *x), change, inputs)
        want = gradients(call, lambda: None, inputs)


class _WritesItsBuffer(torch.nn.Module):
    """It takes the documents of each batch into its own memory, also when a checkpoint runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = torch.nn.Buffer(torch.zeros_like(ids))
        self.plan = flexmasks.plan("document", LENGTH, document_ids=ids)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, new: Tensor) -> Tensor:
        self.ids.copy_(new)
        self.plan.update(document_ids=new)
        out = flexmasks.attention(q, k, v, mask="document", document_ids=self.ids, backend="reference")
        return out + flexmasks.attention(q, k, v, mask=self.plan, backend="reference")


def test_reentrant_checkpoints_of_what_changes_rightly() -> None:
    """After the backward pass, inside what is made again, and in evaluation between both."""
    layer, plan = _WritesItsBuffer(), flexmasks.plan("document", LENGTH, document_ids=ids)
    for step in range(2, 5):
        new, inputs = torch.arange(LENGTH) // (5 * step), leaves()
        plan.update(document_ids=new)
        checkpoint(layer, *inputs, new, use_reentrant=True).sum().backward()
        planned = functools.partial(flexmasks.attention, mask=plan, backend="reference")
        outs = [checkpoint(planned, *inputs, use_reentrant=True) for _ in range(3)]  # micro-batches
        with torch.no_grad():
            layer(*inputs, ids)
            planned(*inputs)
        sum(outs, torch.zeros(())).sum().backward()
        copies = [x.detach().requires_grad_() for x in inputs]
        visible = new[:, None] == new
        want = torch.nn.functional.scaled_dot_product_attention(*copies, attn_mask=visible)
        (5 * want).sum().backward()
        torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in copies], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", ["", "twice"])
def test_variables_that_get_other_values(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Globals, attributes, dicts and variables of closures: the values of the forward pass count."""
    held, table, near = _held(), {"ids": ids}, 3

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (ids[q] == ids[kv]) | ((q - kv).abs() <= reach)

    def near_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (table["ids"][q] == table["ids"][kv]) | ((q - kv).abs() <= near)

    masks = [mask, near_mask, lambda b, h, q, kv: (held.ids[q] == held.ids[kv]) | ((q - kv).abs() <= held.reach)]
    masks.append(lambda b, h, q, kv: vars(held)["ids"][q] == vars(held)["ids"][kv])  # shows only where it runs
    scores = [None, lambda s, b, h, q, kv: s * held.reach + held.bias[h, kv], lambda s, b, h, q, kv: s / (reach + near)]
    inputs = leaves(dtype=torch.float64 if how == "twice" else torch.float32)
    results = [flexmasks.attention(*inputs, mask=m, score=s, return_lse=True) for m in masks for s in scores]
    if how == "twice":
        results = [differentiate(x, inputs, create_graph=True) for x in results]

    def change() -> None:
        nonlocal near
        monkeypatch.setitem(globals(), "ids", torch.zeros_like(ids))
        monkeypatch.setitem(globals(), "reach", 50)
        held.ids, held.reach, held.bias, table["ids"] = torch.zeros_like(ids), 50, torch.zeros(2, LENGTH), held.ids
        near = 30

    assert is_kept(tuple(x for one in results for x in one), inputs, change)


def test_tensors_that_objects_hold_learn() -> None:
    held = _held()
    held.bias.requires_grad_()
    inputs = [*leaves(), held.bias]
    found = flexmasks.attention(
        *inputs[:3], score=lambda s, b, h, q, kv: s + held.bias[h, kv] * held.reach, return_lse=True
    )

    def change() -> None:
        held.reach = 1

    assert is_kept(found, inputs, change)


def at_distances(q: Tensor, kv: Tensor, n: int) -> Tensor:
    return (q - kv == n) | at_distances(q, kv, n - 1) if n else q == kv


def test_functions_that_call_themselves() -> None:
    inputs = leaves()
    got = flexmasks.attention(*inputs, mask=lambda b, h, q, kv: at_distances(q, kv, reach), return_lse=True)
    want = flexmasks.attention(*inputs, mask="sliding_window", window=reach, return_lse=True)
    torch.testing.assert_close(differentiate(got, inputs), differentiate(want, inputs))


@pytest.mark.parametrize("how", ["", "twice"])
def test_the_softmax_reads_no_mask_again(how: str) -> None:
    x = torch.randn(1, 2, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    held, hidden = _held(), torch.rand(LENGTH, LENGTH) < 0.5
    masks = [_documents(held), flexmasks.get_mask("document", document_ids=held.ids), ~hidden]
    results = [flexmasks.masked_softmax(x, mask=m) for m in masks] + [flexmasks.scaled_masked_softmax(x, hidden, 2.0)]
    if how == "twice":
        results = [differentiate(y, [x], create_graph=True)[0] for y in results]

    def change() -> None:
        held.ids.zero_()
        hidden.zero_()

    assert is_kept(tuple(results), [x], change)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flex", "flex_flash", "short", "reference"])
@pytest.mark.parametrize("in_checkpoint", [False, True])
@pytest.mark.parametrize("name", ["parameter", "closure", "q_offset", "slopes"])
def test_tensors_that_change_in_place_gpu(name: str, in_checkpoint: bool, backend: str) -> None:
    held = SimpleNamespace(ids=torch.arange(256, device="cuda") // 40, bias=torch.randn(2, 256, device="cuda"))
    q, k, v = inputs = [torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
    params = READERS[name](held)
    if backend == "flex_flash":
        skip_unless_flash_takes([q[:, :, :-10] if name == "q_offset" else q, k, v], **params)
    call = functools.partial(_attend, backend=backend, **params)

    def run() -> Any:
        return checkpoint(call, q, k, v, use_reentrant=False) if in_checkpoint else call(q, k, v)

    want = differentiate(run(), inputs)  # compiled backward passes run once
    results = run()
    held.ids.div_(2, rounding_mode="floor")
    held.bias.mul_(2)
    with refused():
        for x, y in zip(differentiate(results, inputs), want, strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
