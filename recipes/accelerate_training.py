"""accelerate: a loop of one's own, whose batches carry their mask.

`Accelerator.prepare` takes the model, the optimizer and the loader. A batch is packed documents with their Mask, which
the prepared loader moves to the device as it moves tensors. Gradients of several batches are summed by `accumulate`.
The losses are those of SDPA with the mask as booleans.
"""

# %%
from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import synchronize
from packed_language_model import SIZES, Batch, Model, by_sdpa, make_batch

try:
    import accelerate
except ImportError as missing:
    raise SystemExit(f"{missing}. This recipe needs accelerate >= 1.1: pip install -e '.[doors]'") from None

STEPS = 8 if ON_GPU else 20


# %% The mask is made where the batch is made, here in the loader. All layers share it.
def loader() -> DataLoader[Any]:
    """Return the loader of some batches, which are the same in each run."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        batch = make_batch(generator)
        mask = flexmasks.masks.causal() & flexmasks.masks.document(document_ids=batch.documents)
        batches.append((batch, mask))
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


# %% The loop.
def train(attention: str, accumulated: int = 1, precision: str = "no") -> tuple[Tensor, float]:
    """Return the losses and the median of seconds of a step."""
    accelerate.state.AcceleratorState._reset_state(True)  # one accelerator after another, in one process
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=accumulated, mixed_precision=precision, cpu=not ON_GPU
    )
    torch.manual_seed(0)
    model = Model(SIZES)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader())
    losses, ends = [], []
    for batch, mask in batches:
        assert isinstance(batch, Batch)
        with accelerator.accumulate(model):
            if attention == "flexmasks":
                loss = model(batch, lambda q, k, v, mask=mask: flexmasks.attention(q, k, v, mask=mask))
            else:
                loss = model(batch, by_sdpa(batch))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().float())
        synchronize(DEVICE)
        ends.append(time.perf_counter())
    return torch.stack(losses), torch.tensor(ends, dtype=torch.float64).diff().median().item()


def main() -> None:
    """Compare losses, and measure steps."""
    file = start(__doc__)
    rows: list[Row] = []
    options: dict[str, dict[str, Any]] = {
        "no": {},
        "no, gradients of 2 batches": {"accumulated": 2},
        "bf16": {"precision": "bf16"},
    }
    for what, given in options.items():
        (ours, seconds), (theirs, other_seconds) = (train(x, **given) for x in ("flexmasks", "SDPA"))
        tolerance = 5e-2 if "bf16" in what else 2e-3 if ON_GPU else 1e-4
        check(f"losses, {what}", ours, theirs, tolerance)
        for name, value in {"flexmasks": seconds, "SDPA": other_seconds}.items():
            rows.append({"attention": name, "mixed precision": what, "ms for a step": float(f"{value * 1e3:.4g}")})
    finish(rows, file)


if __name__ == "__main__":
    main()
