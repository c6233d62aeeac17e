"""Layouts of q, k and v: what kernels read of plain tensors, jagged tensors, and tensors under autocast."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICES, TOLERANCE, check_lse, error
from oracles import attend
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor

import flexmasks
from flexmasks import get_mask, get_score
from flexmasks.layouts import as_kernels_read, as_nested, cast_as, laid_end_to_end, under_autocast
from flexmasks.request import Request

# --- plain tensors ---


def test_plain_tensors_are_not_copied() -> None:
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 7, 8).mT.contiguous().mT, torch.randn(2, 2, 7, 8)
    assert [a is b for a, b in zip(as_kernels_read(q, k, v), (q, k, v), strict=True)] == [True] * 3


def test_keys_of_one_batch_element_are_for_all() -> None:
    q, k, v = torch.randn(3, 4, 9, 8), *torch.randn(2, 1, 2, 7, 8)
    _, k_read, v_read = as_kernels_read(q, k, v)
    for x, read in ((k, k_read), (v, v_read)):
        assert read.shape == (3, 2, 7, 8)
        assert read.data_ptr() == x.data_ptr()
        assert torch.equal(read, x.repeat(3, 1, 1, 1))
    both = as_kernels_read(q[:1], k, v)
    assert both[1] is k
    mixed = as_kernels_read(q, k, v.repeat(3, 1, 1, 1))  # checks say what is wrong
    assert mixed[1] is k


def test_queries_that_overlap_are_copied_on_a_cpu() -> None:
    signal = torch.randn(40)
    q = signal.unfold(0, 8, 1).view(1, 1, 33, 8)
    read, _, _ = as_kernels_read(q, q, q)
    assert q.stride()[2:] == (1, 1)
    assert read.is_contiguous()
    assert torch.equal(read, q)
    one = signal.view(1, 1, 40, 1)  # of one element there is nothing to overlap
    assert as_kernels_read(one, one, one)[0] is one


@pytest.mark.parametrize("what", [None, torch.zeros(2, 3), torch.zeros(3, 2, 4, 5).to_sparse()])
def test_what_is_no_plain_tensor_is_left_to_checks(what: Any) -> None:
    q, k = torch.randn(3, 2, 4, 5), torch.randn(1, 2, 4, 5)
    for given in ((what, k, k), (q, what, k), (q, k, what)):
        assert [a is b for a, b in zip(as_kernels_read(*given), given, strict=True)] == [True] * 3


# --- autocast ---


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensors_are_cast_as_torch_casts_them(dtype: torch.dtype, to: torch.dtype) -> None:
    x = torch.randn(1, 1, 4, 8).to(dtype)
    with torch.autocast("cpu", to):
        want = F.scaled_dot_product_attention(x, x, x).dtype
        with under_autocast(x, x, x) as inside:
            assert not torch.is_autocast_enabled("cpu")
            assert [t.dtype for t in inside] == [want] * 3
        assert torch.is_autocast_enabled("cpu")
    assert (cast_as(x, to) is x) == (want == dtype)
    with under_autocast(x, None, x) as plain:
        assert plain[0] is plain[2] is x


def test_what_is_no_float_is_not_cast() -> None:
    whole = torch.arange(4)
    assert cast_as(whole, torch.bfloat16) is whole
    assert cast_as("no tensor", torch.bfloat16) == "no tensor"
    with torch.autocast("cpu", torch.bfloat16), under_autocast(*torch.empty(3, 1, 1, 4, 8, device="meta")) as (q, _, _):
        assert q.dtype == torch.float32  # torch knows no autocast of this device
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_as_sdpa_does(device: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16, device=device)
    with torch.autocast(device, torch.bfloat16):
        for mask in ("causal", "prefix_lm"):
            params: dict[str, Any] = {"prefix_len": 3} if mask == "prefix_lm" else {}
            out = flexmasks.attention(q, k.bfloat16(), v, mask=mask, **params)
            assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
            visible = flexmasks.dense_mask(mask, 40, **params).cpu()
            want, want_lse = attend(*(x.bfloat16().double().cpu() for x in (q, k, v)), visible)
            assert error(out, want) < TOLERANCE[torch.bfloat16]
            _, lse = flexmasks.attention(q, k, v, mask=mask, return_lse=True, backend="reference", **params)
            assert lse.dtype == torch.float32
            check_lse(lse, want_lse, 1e-5)


# --- jagged tensors ---


def nested(lengths: tuple[int, ...], heads: int = 2, size: int = 8) -> Tensor:
    sequences = [torch.randn(n, heads, size) for n in lengths]
    return torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("others", [None, (1, 4, 0)])
def test_sequences_are_laid_end_to_end_without_a_copy(others: tuple[int, ...] | None) -> None:
    q = nested((3, 0, 5))
    k = v = q if others is None else nested(others)
    request = Request(mask="sliding_window", score="alibi", params={"window": 2, "slopes": [0.5, 1.0]}, scale=0.3)
    *dense, laid = laid_end_to_end(q, k, v, request)
    for x, from_jagged in zip(dense, (q, k, v), strict=True):
        assert x.data_ptr() == from_jagged.values().data_ptr()
        assert torch.equal(x[0], torch.cat(list(from_jagged.unbind()), 1))
    offsets = [0, 3, 3, 8], None if others is None else [0, 1, 5, 5]
    want = flexmasks.packed("sliding_window", *offsets, window=2)
    sizes = {"q_len": 8, "kv_len": 8 if others is None else 5}
    assert torch.equal(flexmasks.dense_mask(laid.mask, **sizes), flexmasks.dense_mask(want, **sizes))
    assert laid.score == flexmasks.packed(get_score("alibi", slopes=[0.5, 1.0]), *map(as_tensor, offsets))
    assert laid._replace(mask=None, score=None) == Request(scale=0.3, params={})


def as_tensor(offsets: list[int] | None) -> Tensor | None:
    return None if offsets is None else torch.tensor(offsets)


def test_without_a_mask_a_sequence_sees_itself_alone() -> None:
    q = nested((3, 5))
    mask = laid_end_to_end(q, q, q, Request())[-1].mask
    want = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).bool()
    assert torch.equal(flexmasks.dense_mask(mask, 8)[0, 0], want)
    assert mask == flexmasks.packed(get_mask("full"), torch.tensor([0, 3, 8]))


def test_results_are_jagged_as_q_is() -> None:
    q = nested((3, 0, 5))
    dense, lse = torch.randn(1, 2, 8, 6), torch.randn(1, 2, 8)
    out, of_lse = as_nested(q, dense, lse)
    assert of_lse is not None
    assert [tuple(x.shape) for x in out.unbind()] == [(2, 3, 6), (2, 0, 6), (2, 5, 6)]
    assert torch.equal(torch.cat(list(out.unbind()), 1), dense[0])
    assert torch.equal(torch.cat(list(of_lse.unbind()), 1), lse[0])
    assert as_nested(q, dense, None)[1] is None


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(5, 130, 0, 40), (300,), (1, 1)])
def test_jagged(lengths: tuple[int, ...], device: str) -> None:
    sequences = [torch.randn(n, 4, 32, device=device) for n in lengths]
    nested = torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)
    seq_lens = torch.tensor([max(0, n - 3) for n in lengths], device=device)
    backend = (
        "auto" if len(lengths) > 2 or device == "cuda" else "reference"
    )  # one compiled kernel for the CPU is enough
    out = flexmasks.attention(nested, nested, nested, mask="grouped_tril", seq_lens=seq_lens, backend=backend)
    assert out.shape == nested.shape
    for x, y, n in zip(sequences, out.unbind(), seq_lens.tolist(), strict=True):
        x = x.transpose(0, 1)[None].double().cpu()
        visible = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
        visible[n:] = False
        assert y.shape == x.shape[1:]
        if x.shape[2]:
            want, _ = attend(x, x, x, visible)
            assert error(y, want[0]) < TOLERANCE[torch.float32]


def test_jagged_cross_attention_with_gradients_and_lse() -> None:
    queries = [torch.randn(n, 2, 16, dtype=torch.float64) for n in (3, 50, 20)]
    keys = [torch.randn(n, 2, 16, dtype=torch.float64) for n in (70, 0, 20)]
    values = [torch.randn(n, 2, 24, dtype=torch.float64) for n in (70, 0, 20)]
    q, k, v = (torch.nested.nested_tensor(x, layout=torch.jagged, requires_grad=True) for x in (queries, keys, values))
    out, lse = flexmasks.attention(
        q.transpose(1, 2),
        k.transpose(1, 2).contiguous(),
        v.transpose(1, 2).contiguous(),
        score="alibi",
        q_offset="first",
        return_lse=True,
    )
    out.values().sum().backward()
    assert q.grad.offsets() is q.offsets()
    assert v.grad.values().shape == (90, 2, 24)
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64).view(1, 2, 1, 1)
    for x, y, z, got, got_lse in zip(queries, keys, values, out.unbind(), lse.unbind(), strict=True):
        if not len(y):
            assert torch.all(got == 0)
            assert torch.all(got_lse == -math.inf)
            continue
        x, y, z = (t.transpose(0, 1)[None] for t in (x, y, z))
        distance = torch.arange(x.shape[2])[:, None] - torch.arange(y.shape[2])
        want, want_lse = attend(x, y, z, None, lambda s, d=distance: s - slopes * d)
        assert torch.allclose(got, want[0])
        assert torch.allclose(got_lse, want_lse[0])


@pytest.mark.parametrize("device", DEVICES)
def test_jagged_queries_that_start_later(device: str) -> None:
    """The last queries of each sequence see what they see in causal attention over the whole sequence."""
    whole = [torch.randn(n, 2, 16, dtype=torch.float64, device=device) for n in (40, 7, 130)]
    query_counts = [1, 7, 30]
    nested = [torch.nested.nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in (
        [x[-n:] for x, n in zip(whole, query_counts, strict=True)], whole)]  # fmt: skip
    out = flexmasks.attention(
        nested[0], nested[1], nested[1], mask="causal", q_offset=torch.tensor([39, 0, 100], device=device)
    )
    for x, got in zip(whole, out.unbind(), strict=True):
        y = x.transpose(0, 1)[None].cpu()
        want, _ = attend(y, y, y, torch.ones(len(x), len(x), dtype=torch.bool).tril())
        assert torch.allclose(got.cpu(), want[0, :, -got.shape[1] :])
