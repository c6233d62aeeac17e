"""Lightning: batches carry their mask, and Trainer takes it to the device with the rest of a batch.

A LightningModule calls `flexmasks.attention` in `training_step`; nothing is registered. A batch is packed documents and
their Mask, which Trainer moves as it moves tensors, with any `accelerator`, `precision` and `accumulate_grad_batches`.
The losses are those of SDPA with the mask as booleans.
"""

# %%
from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import synchronize
from flexmasks.extend import tensors_of
from packed_language_model import SIZES, Batch, Model, by_sdpa, make_batch

try:
    import lightning
except ImportError as missing:
    raise SystemExit(f"{missing}. This recipe needs lightning >= 2.6: pip install -e '.[doors]'") from None

STEPS = 8 if ON_GPU else 20


# %% The mask is made where the batch is made, here in the loader. All layers share it.
def with_mask(batch: Batch) -> tuple[Batch, flexmasks.Mask]:
    """Return a batch and the mask of its documents."""
    return batch, flexmasks.masks.causal() & flexmasks.masks.document(document_ids=batch.documents)


def loader() -> DataLoader[Any]:
    """Return the loader of some batches, which are the same in each run."""
    generator = torch.Generator().manual_seed(0)
    batches = [with_mask(make_batch(generator)) for _ in range(STEPS)]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


# %% The module.
class Packed(lightning.LightningModule):
    """A small language model, by flexmasks or by SDPA."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model(SIZES)
        self.attention = attention
        self.losses: list[Tensor] = []
        self.ends: list[float] = []

    def training_step(self, given: tuple[Batch, flexmasks.Mask], number: int) -> Tensor:
        batch, mask = given
        assert all(x.device == self.device for x in tensors_of(mask))
        if self.attention == "flexmasks":
            loss: Tensor = self.model(batch, lambda q, k, v: flexmasks.attention(q, k, v, mask=mask))
        else:
            loss = self.model(batch, by_sdpa(batch))
        self.losses.append(loss.detach().float())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        synchronize(DEVICE)
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


# %% Trainer.
def train(attention: str, **options: Any) -> Packed:
    """Train, and return the module."""
    module = Packed(attention)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="gpu" if ON_GPU else "cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, loader())
    return module


def main() -> None:
    """Compare losses, and measure steps."""
    file = start(__doc__)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    rows: list[Row] = []
    options: dict[str, dict[str, Any]] = {
        "32-true": {},
        "32-true, gradients of 2 batches": {"accumulate_grad_batches": 2},
        "bf16-mixed": {"precision": "bf16-mixed"},
    }
    for what, given in options.items():
        ours, theirs = train("flexmasks", **given), train("SDPA", **given)
        tolerance = 5e-2 if "bf16" in what else 2e-3 if ON_GPU else 1e-4
        check(f"losses, {what}", torch.stack(ours.losses), torch.stack(theirs.losses), tolerance)
        for name, module in {"flexmasks": ours, "SDPA": theirs}.items():
            seconds = torch.tensor(module.ends, dtype=torch.float64).diff().median().item()
            rows.append({"attention": name, "precision": what, "ms for a step": float(f"{seconds * 1e3:.4g}")})
    finish(rows, file)


if __name__ == "__main__":
    main()
