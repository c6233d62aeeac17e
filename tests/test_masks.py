"""Every registered mask against the oracle that was written from its definition."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICES, TOLERANCE, arguments, check_lse, error, exact, label, qkv, spread
from oracles import MASK_CASES, MASKS, Case, attend, dense

import flexmasks


def test_every_mask_has_an_oracle_and_three_cases() -> None:
    names = {m.name for m in flexmasks.list_masks()}
    assert names == set(MASKS)
    for name in names:
        assert sum(c.name == name for c in MASK_CASES) >= 3


@pytest.mark.parametrize("case", MASK_CASES, ids=label)
def test_dense_mask(case: Case) -> None:
    got = flexmasks.dense_mask(
        case.name, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, **arguments(case)
    )
    want = dense(case)
    assert got.dtype == torch.bool
    assert all(n in (1, full) for n, full in zip(got.shape[:2], want.shape[:2], strict=True))
    assert torch.equal(got.expand_as(want), want)


@pytest.mark.parametrize("case", MASK_CASES, ids=label)
def test_reference_in_float64_with_gradients(case: Case) -> None:
    leaves = [exact(x) for x in qkv(case, torch.float32, grouped=case.kv_len % 2 == 0, size=8)]
    others = [exact(x) for x in leaves]
    out, lse = flexmasks.attention(*leaves, mask=case.name, return_lse=True, backend="reference", **arguments(case))
    want, want_lse = attend(*others, dense(case))
    assert torch.allclose(out, want, atol=1e-12, rtol=1e-12)
    check_lse(lse, want_lse, 1e-12)
    some = ~want_lse.isinf()
    weight, lse_weight = torch.randn_like(out), torch.randn_like(lse)
    ((out * weight).sum() + (lse * lse_weight)[some].sum()).backward()
    ((want * weight).sum() + (want_lse * lse_weight)[some].sum()).backward()
    for x, y in zip(leaves, others, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert torch.allclose(x.grad, y.grad, atol=1e-9, rtol=1e-9)


def _compiled(case: Case, dtype: torch.dtype, device: str, backend: str = "auto") -> None:
    leaves = qkv(case, dtype, device, grouped=case.kv_len % 2 == 0)
    others = [exact(x) for x in leaves]
    mask = dense(case)
    cuda = device == "cuda"
    with torch.set_grad_enabled(cuda):
        result = flexmasks.attention(
            *leaves, mask=case.name, backend=backend, return_lse=cuda, **arguments(case, device)
        )
        out = result[0] if cuda else result
    want, want_lse = attend(*others, mask)
    assert out.dtype == dtype
    assert error(out, want) < TOLERANCE[dtype]
    hidden = ~mask.any(-1)
    assert torch.all(out.cpu()[hidden.expand(out.shape[:3])] == 0)
    if cuda:
        check_lse(result[1], want_lse, TOLERANCE[dtype])
        weight = torch.randn_like(out)
        out.backward(weight)
        want.backward(weight.double().cpu())
        for x, y in zip(leaves, others, strict=True):
            assert error(x.grad, y.grad) < 2 * TOLERANCE[dtype]


# Each kernel takes seconds to compile: every mask has one case in each dtype, another in each, and on a CPU only every
# fourth mask has one in a half precision.
_THREE = spread(MASK_CASES, 3)
_ONE = {
    dtype: [_THREE[n + (n // 3 + turn) % 3] for n in range(0, len(_THREE), 3)] for turn, dtype in enumerate(TOLERANCE)
}
_ALL_DTYPES = [(case, dtype) for dtype, cases in _ONE.items() for case in cases]
_CPU = [
    (case, dtype)
    for start, (dtype, cases) in enumerate(_ONE.items())
    for case in (cases if dtype == torch.float32 else cases[start::4])
]


@pytest.mark.parametrize(("case", "dtype"), _CPU, ids=label)
def test_compiled_cpu(case: Case, dtype: torch.dtype) -> None:
    _compiled(case, dtype, "cpu", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), _ALL_DTYPES, ids=label)
def test_compiled_gpu(case: Case, dtype: torch.dtype) -> None:
    _compiled(case, dtype, "cuda", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), _ALL_DTYPES, ids=label)
def test_chosen_gpu(case: Case, dtype: torch.dtype) -> None:
    _compiled(case, dtype, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dense_kernels_with_gradients(dtype: torch.dtype, causal: bool, device: str) -> None:
    """Plain and causal attention, which go to SDPA."""
    case = Case("causal" if causal else "full", {}, 2, 4, 150, 150)
    grouped = device == "cpu" or dtype != torch.float32  # torch has no such kernel there
    leaves = qkv(case, dtype, device, grouped)
    others = [exact(x) for x in leaves]
    out = flexmasks.attention(*leaves, mask=case.name, backend="sdpa")
    want, _ = attend(*others, dense(case))
    weight = torch.randn_like(out)
    out.backward(weight)
    want.backward(weight.double().cpu())
    assert error(out, want) < TOLERANCE[dtype]
    for x, y in zip(leaves, others, strict=True):
        assert error(x.grad, y.grad) < 2 * TOLERANCE[dtype]
