"""The grouped tril softmax, with a mask that is computed instead of loaded.

A ranking model holds scores [B, M, S, S] of sequences that are padded to S. Row r of batch element b counts columns
0..r, and only the first seq_lens[b] rows and columns are real; everything else must be 0. The usual way builds the
mask as a tensor, fills the hidden scores with -inf, and takes a softmax: four passes over memory. The fused operator
computes from two numbers which columns a row sees, reads only those columns, and writes the result once.
"""

# %% The reference is the definition, element by element.
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import interleaved


def by_hand(scores: Tensor, seq_lens: list[int]) -> Tensor:
    """Loop over every row; a row that sees nothing stays 0."""
    out = torch.zeros_like(scores)
    batch, groups, length, _ = scores.shape
    for b in range(batch):
        for m in range(groups):
            for row in range(min(length, seq_lens[b])):
                visible = [math.exp(float(scores[b, m, row, column])) for column in range(row + 1)]
                out[b, m, row, : row + 1] = torch.tensor(visible) / sum(visible)
    return out


# %% The usual way, in plain torch. Rows past the end see nothing: their softmax is 0 / 0, so the mask clears them.
def eager(scores: Tensor, seq_lens: Tensor) -> Tensor:
    """Make the mask [B, 1, S, S], fill the hidden scores, take a softmax, and clear the hidden places."""
    length = scores.shape[-1]
    position = torch.arange(length, device=scores.device)
    real = position < seq_lens[:, None]
    seen = (position[:, None] >= position) & real[:, None, :, None] & real[:, None, None, :]
    return torch.softmax(scores.masked_fill(~seen, -math.inf), -1).masked_fill(~seen, 0.0)


# %% The fused way takes the mask by its name.
def fused(scores: Tensor, seq_lens: Tensor) -> Tensor:
    """Run one kernel, or on a CPU plain torch in bounded memory."""
    return flexmasks.masked_softmax(scores, mask="grouped_tril", seq_lens=seq_lens)


# %% Print an example that is small enough to read, check, and time.
def main() -> None:
    """Check and time the softmax."""
    file = start(__doc__)
    lens = [3, 4, 5]
    scores = torch.randn(3, 1, 5, 5, device=DEVICE)
    weights = fused(scores, torch.tensor(lens, device=DEVICE))
    print(f"seq_lens {lens} of 5; batch element 0, whose rows 3 and 4 are padding:\n{weights[0, 0].cpu()}\n")
    check("against the definition, element by element", weights, by_hand(scores.cpu(), lens).to(DEVICE))

    # With equal scores row r is 1 / (r + 1) everywhere. 1 / S in the last row is correct, and not padding.
    equal = fused(torch.zeros(1, 1, 5, 5, device=DEVICE), torch.tensor([5], device=DEVICE))
    check("equal scores, last row", equal[0, 0, 4], torch.full((5,), 0.2, device=DEVICE))

    # A NaN in a hidden place must reach nothing.
    poisoned = scores.clone()
    poisoned[0, 0, 3:] = math.nan
    check("hidden NaN", fused(poisoned, torch.tensor(lens, device=DEVICE)), weights, 0.0)

    rows: list[Row] = []
    for batch, groups, length in ((3, 64, 1000), (12, 64, 1000)) if ON_GPU else ((3, 4, 500),):
        rows += _timed(torch.randn(batch, groups, length, length, device=DEVICE))
    finish(rows, file, "TB/s counts what must move: visible scores are read once, all weights are written once.")


def _timed(scores: Tensor) -> list[Row]:
    batch, _, length, _ = scores.shape
    seq_lens = torch.randint(length // 2, length + 1, (batch,), device=DEVICE)
    shape = "x".join(map(str, scores.shape))
    check(f"fused against eager, {shape}", fused(scores, seq_lens), eager(scores, seq_lens))
    calls = {"flexmasks": fused, "eager": eager}
    leaf = scores.clone().requires_grad_()
    upstream = torch.randn_like(scores)
    forward: dict[str, Callable[[], object]] = {}
    backward: dict[str, Callable[[], object]] = {}
    for who, call in calls.items():
        out = call(leaf, seq_lens)
        forward[who] = lambda call=call: call(scores, seq_lens)  # type: ignore[misc]
        backward[who] = lambda out=out: torch.autograd.grad(out, leaf, upstream, retain_graph=True)  # type: ignore[misc]
    ours, theirs = (torch.autograd.grad(call(leaf, seq_lens), leaf, upstream)[0] for call in calls.values())
    check(f"gradients, {shape}", ours, theirs)

    visible = float((seq_lens.double() * (seq_lens + 1) / 2).sum()) / (batch * length**2)
    rows: list[Row] = []
    for name, timed, moved in (("forward", forward, 1 + visible), ("backward", backward, 1 + 2 * visible)):
        times = interleaved(timed, DEVICE, 7)
        for who, (ms, _) in times.items():
            rows.append(
                {
                    "scores": shape,
                    "pass": name,
                    "": who,
                    "ms": float(f"{ms:.4g}"),
                    "TB/s": float(f"{moved * scores.numel() * 4 / ms / 1e9:.3g}"),
                    "flexmasks is faster": f"{ms / times['flexmasks'][0]:.1f} x",
                }
            )
    return rows


if __name__ == "__main__":
    main()
