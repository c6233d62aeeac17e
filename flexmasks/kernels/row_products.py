"""The operator torch.ops.flexmasks.less_row_products: what is given, float32 [...] or nothing, less a factor times the
sums of products of the rows of two tensors [..., D].

A row has the same bits in any batch, at any place and in each process: one kernel, whose tile depends on D alone, adds
in one order. torch's own reductions, and those that its compiler makes, choose by the number of rows, or by trials.
What is given is subtracted from here, where no compiler fuses it with what it was computed of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks.devices import runs_own_kernels
from flexmasks.kernels.direct import on
from flexmasks.kernels.operators import define


def _run(x: Tensor, y: Tensor, given: Tensor | None, factor: float) -> Tensor:
    products = _products(x, y).mul_(factor)
    return products.neg_() if given is None else torch.sub(given, products, out=products)


def _products(x: Tensor, y: Tensor) -> Tensor:
    if runs_own_kernels(x.device) and x.numel() > 0:
        from flexmasks.kernels.row_products_kernel import products_of_rows  # needs Triton

        with on(x.device):
            return products_of_rows(x, y)
    return (x.float() * y.float()).sum(-1)


def _fake(x: Tensor, y: Tensor, given: Tensor | None, factor: float) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


_SCHEMA = "less_row_products(Tensor x, Tensor y, Tensor? given, float factor) -> Tensor"
less_row_products = define(_SCHEMA, _run, _fake)
