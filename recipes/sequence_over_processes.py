"""A language model trained on packed documents, with its sequence over several processes.

No process computes more than its part of the sequence: embeddings, layers and loss take the process's own tokens, and
only attention needs those of others. `distributed.attention` takes the mask of the whole sequence and exchanges either
heads or keys. FSDP2 shards the weights and adds up their gradients. The losses are those of one process.

Processes use NCCL and one GPU each, up to 8; without two GPUs there are 2 processes on the CPU, with gloo. They import
this file, so run it as a script; the cells cannot run one by one.
"""

# %%
from __future__ import annotations

import functools
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import flexmasks
from _measure import Row, check, finish, start
from flexmasks.bench.clock import synchronize
from flexmasks.blocks.limits import progress
from flexmasks.integrations import distributed
from flexmasks.masks import causal, document

ON_GPUS = torch.cuda.device_count() >= 2
PROCESSES = min(torch.cuda.device_count(), 8) if ON_GPUS else 2


class Sizes(NamedTuple):
    """Sizes of the model and its batches."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    batch: int
    length: int  # packed tokens in a row of the batch
    longest: int  # tokens of the longest document
    steps: int


SIZES = Sizes(64, 1024, 8, 12, 1, 16384, 8192, 1000) if ON_GPUS else Sizes(16, 32, 2, 2, 1, 512, 60, 40)
LONG = SIZES._replace(length=65536, longest=32768, steps=40)  # only on GPUs


# %% Code generates the text. A document has one of four languages, in which every word has a word that mostly comes
# next. A batch is made whole, because the word that follows the last word of a part may lie in another part.
class Batch(NamedTuple):
    """Packed documents, [batch, length] each: a word, its document, its place there, and the word that follows."""

    words: Tensor
    documents: Tensor
    places: Tensor
    following: Tensor  # -100 at the end of a document, where nothing is predicted


def make_batch(generator: torch.Generator, sizes: Sizes) -> Batch:
    """Make a batch of random documents, the same on all processes whose generators are in the same state."""
    words = sizes.vocabulary
    rules = torch.stack([torch.randperm(words, generator=torch.Generator().manual_seed(n)) for n in range(4)])
    rows = []
    for _ in range(sizes.batch):
        documents: list[Batch] = []
        room = sizes.length
        while room:
            n = min(room, int(torch.randint(sizes.longest // 8, sizes.longest + 1, (), generator=generator)))
            rule = rules[int(torch.randint(4, (), generator=generator))].tolist()
            text = torch.randint(words, (n,), generator=generator).tolist()
            strays = (torch.rand(n, generator=generator) < 0.1).tolist()
            for place in range(1, n):
                text[place] = text[place] if strays[place] else rule[text[place - 1]]
            number = torch.full((n,), len(documents))
            documents.append(Batch(torch.tensor(text), number, torch.arange(n), torch.tensor([*text[1:], -100])))
            room -= n
        rows.append([torch.cat(column) for column in zip(*documents, strict=True)])
    return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))


# %% A transformer, which does not know that it sees a part of a sequence: `attend` does.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A transformer from words and their places in documents to the losses of the next words, added up."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.word = nn.Embedding(sizes.vocabulary, sizes.width)
        self.place = nn.Embedding(sizes.longest, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.last, self.scores = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, batch: Batch, attend: Attention) -> Tensor:
        x = self.word(batch.words) + self.place(batch.places)
        for layer in self.layers:
            x = layer(x, attend)
        scores = self.scores(self.last(x)).flatten(0, 1).float()
        return F.cross_entropy(scores, batch.following.flatten(), reduction="sum")


# %% What one process does and several do differently. The order says which parts of the sequence each process holds. It
# is that of a causal mask, because the documents of coming steps are not known. It gives each process early and late
# parts, so that even one document as long as the sequence gives all processes the same work. The order matters where
# keys are gathered; where heads are exchanged each process attends over the whole sequence, for its share of the heads.
class Alone:
    """One process, which holds the whole sequence."""

    processes = 1

    def part(self, batch: Batch) -> Batch:
        return batch

    def attention(self, documents: Tensor) -> Attention:
        return functools.partial(flexmasks.attention, mask=mask_of(documents))

    def split(self, model: Model) -> None:
        pass

    def whole(self, gradient: Tensor) -> Tensor:
        return gradient

    def reduce(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        return x


class Together:
    """One of several processes, which hold parts of the sequence."""

    def __init__(self, mesh: DeviceMesh, how: str, length: int) -> None:
        self.mesh, self.how, self.processes = mesh, how, mesh.size()
        self.order = distributed.balance("causal", length, mesh)

    def part(self, batch: Batch) -> Batch:
        return Batch(*(distributed.shard(x, self.order, self.mesh) for x in batch))

    def attention(self, documents: Tensor) -> Attention:
        return functools.partial(
            distributed.attention, mesh=self.mesh, order=self.order, how=self.how, mask=mask_of(documents)
        )

    def split(self, model: Model) -> None:
        for module in (*model.layers, model):
            fully_shard(module, mesh=self.mesh)

    def whole(self, gradient: Tensor) -> Tensor:
        return gradient.full_tensor()  # type: ignore[attr-defined, no-any-return]

    def reduce(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(x, how)
        return x


def mask_of(documents: Tensor) -> flexmasks.Mask:
    """Return the mask of the whole sequence."""
    return causal() & document(document_ids=documents)


# %% Training is the same for one process and for several. Each makes the whole batch and takes its part.
class Run(NamedTuple):
    """Loss and seconds of each step, gradient of all weights at the first step, memory, and time of the kernels."""

    losses: list[float]
    seconds: list[float]
    gradient: Tensor
    peak: int  # bytes, of the process that needs most; 0 on a CPU
    kernels: float  # milliseconds of one step, of the process that computes most, exchange left out; 0 on a CPU


def train(who: str, way: Alone | Together, device: torch.device, sizes: Sizes) -> Run:
    """Train a model; all start from the same weights and see the same batches."""
    torch.manual_seed(0)
    model = Model(sizes).to(device)
    way.split(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4 if ON_GPUS else 1e-2)
    generator = torch.Generator().manual_seed(0)
    losses, seconds, gradient = [], [], torch.empty(0)
    if ON_GPUS:
        gc.collect()  # modules of an earlier training refer to each other in circles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def compute(batch: Batch) -> Tensor:
        predicted = (batch.following >= 0).sum()  # in all parts together
        with torch.autocast(device.type, torch.bfloat16, enabled=ON_GPUS):
            loss = model(way.part(batch), way.attention(batch.documents)) / predicted
        optimizer.zero_grad()
        (loss * way.processes).backward()  # FSDP2 takes the mean of all gradients; times their number it is the sum
        return way.reduce(loss.detach(), dist.ReduceOp.SUM)

    with progress(f"training, {who}", sizes.steps, "step") as advance:
        for step in range(sizes.steps):
            batch = Batch(*(x.to(device) for x in make_batch(generator, sizes)))
            synchronize(device)
            begin = time.perf_counter()
            loss = compute(batch)
            if step == 0:
                gradient = torch.cat(
                    [way.whole(p.grad).flatten() for p in model.parameters() if p.grad is not None]
                ).cpu()
            optimizer.step()
            losses.append(loss.item())
            synchronize(device)
            seconds.append(time.perf_counter() - begin)
            advance(1)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if ON_GPUS else 0, device=device)
    kernels = torch.tensor(kernel_time(lambda: (compute(batch), optimizer.step())) if ON_GPUS else 0.0, device=device)
    peak, kernels = (way.reduce(x, dist.ReduceOp.MAX) for x in (peak, kernels))
    return Run(losses, seconds, gradient, int(peak), float(kernels))


def kernel_time(step: Callable[[], object]) -> float:
    """Return the milliseconds that the GPU computes in a step; where a step takes longer, it waits."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [x for x in profile.events() if x.device_type.name == "CUDA" and "nccl" not in x.name.lower()]
    return float(sum(x.time_range.elapsed_us() for x in kernels)) / 1e3


# %% The processes. If one fails, `spawn` ends the others and raises its error.
def device_of(rank: int) -> torch.device:
    """Return the device of a process."""
    return torch.device("cuda", rank) if ON_GPUS else torch.device("cpu")


def work(rank: int, processes: int, ways: list[str], sizes: Sizes, folder: str) -> None:
    """Be one of the processes; the first one writes what came out to a file."""
    device = device_of(rank)
    if ON_GPUS:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # one core for a process, whether there are several or not
    backend, store = "nccl" if ON_GPUS else "gloo", Path(folder, "store").as_uri()
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=processes)
    mesh = init_device_mesh(device.type, (processes,))
    runs = {}
    for how in ways:
        steps = max(sizes.steps // 10, 20) if ON_GPUS and how != ways[0] else sizes.steps
        way = Together(mesh, how, sizes.length) if how != "alone" else Alone()
        who = f"{processes} processes, {how}" if how != "alone" else "1 process"
        runs[who] = tuple(train(who, way, device, sizes._replace(steps=steps)))
    if rank == 0:
        torch.save(runs, Path(folder, "runs"))
    gc.collect()  # modules that refer to each other hold gloo's threads, which must end before Python does
    dist.destroy_process_group()


def train_in(processes: int, ways: list[str], sizes: Sizes) -> dict[str, Run]:
    """Start processes, and return what came out of each way; one process, too, compiles for its own length only."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (processes, ways, sizes, folder), processes)
        return {who: Run(*run) for who, run in torch.load(Path(folder, "runs")).items()}


# %% Compare the losses, and time a step.
def print_balance() -> None:
    """Print how evenly orders share the work of ten batches: a word sees as many words as its place says."""
    generator = torch.Generator().manual_seed(0)
    batches = [(make_batch(generator, SIZES).places + 1).sum(0) for _ in range(10)]
    orders = {
        "of a causal mask": distributed.balance("causal", SIZES.length, PROCESSES),
        "of the sequence": distributed.Order.natural(SIZES.length, PROCESSES),
    }
    print("the busiest process's pairs of words over the mean, in ten batches and in one document of full length:")
    for name, order in orders.items():
        shares = []
        for pairs in (*batches, torch.arange(SIZES.length) + 1):
            of_processes = torch.stack([x.sum() for x in pairs[order.tokens()].split(order.sizes)]).double()
            shares.append(float(of_processes.max() / of_processes.mean()))
        print(f"  order {name}: {min(shares[:-1]):.2f} to {max(shares[:-1]):.2f}, and {shares[-1]:.2f}")
    print()


def main() -> None:
    """Train with one process and with several, and compare."""
    file = start(__doc__, device_of(0))
    backend = "GPUs, NCCL" if ON_GPUS else "CPU, gloo"
    print(f"{PROCESSES} processes ({backend})\n")
    print_balance()
    rows = [row for sizes in ((SIZES, LONG) if ON_GPUS else (SIZES,)) for row in compare(sizes)]
    note = "heads: each process attends for some heads of the whole sequence. gather: its part sees the keys of all."
    if ON_GPUS:
        note += (
            "\nKernels: the milliseconds of a step in which the GPU computes, without exchange, in the busiest process."
            "\nThe rest of a step is the host's work, waiting, and exchange that hides behind nothing."
        )
    else:
        note += (
            "\nA process has one core. At this size several are slower than one: they exchange more than they compute."
            "\nOn GPUs this recipe trains 12 layers on sequences of 16,384 tokens, 1,000 steps."
        )
    finish(rows, file, note, device_of(0))


def check_losses(who: str, got: Tensor, want: Tensor) -> None:
    """Compare the losses of the first steps one by one, and the mean of all.

    Training in bfloat16 magnifies differences in rounding: single losses after some hundred steps differ as much as
    those of one process do after its weights were changed by a millionth.
    """
    check(f"the losses of the first {len(got[:100])} steps, {who}", got[:100], want[:100], 1e-2 if ON_GPUS else 1e-5)
    check(f"the mean of all {len(got)} losses, {who}", got.mean(), want.mean(), 3e-2 if ON_GPUS else 1e-5)


def compare(sizes: Sizes) -> list[Row]:
    """Train with one process and with several on the same batches, compare the losses, and return the times."""
    print(f"a batch: {sizes.batch} x {sizes.length} tokens")
    runs = train_in(1, ["alone"], sizes)
    alone = runs["1 process"]
    together = train_in(PROCESSES, ["gather"] if sizes.heads % PROCESSES else ["heads", "gather"], sizes)
    for who, run in together.items():
        check(f"the gradient of all weights, step 1, {who}", run.gradient, alone.gradient, 3e-2 if ON_GPUS else 1e-5)
        check_losses(who, torch.tensor(run.losses), torch.tensor(alone.losses[: len(run.losses)]))
    shown = range(0, sizes.steps, sizes.steps // 5)
    print("loss: " + ", ".join(f"step {n + 1}: {alone.losses[n]:.3f}" for n in (*shown, sizes.steps - 1)))
    assert sizes is not SIZES or alone.losses[-1] < alone.losses[0] * 0.75, "the loss does not fall"

    rows: list[Row] = []
    for who, run in (runs | together).items():
        middle = sorted(run.seconds[len(run.seconds) // 2 :])[len(run.seconds) // 4]
        row: Row = {
            "tokens": sizes.batch * sizes.length,
            "": who,
            "ms for a step": float(f"{middle * 1e3:.4g}"),
            "tokens a second": round(sizes.batch * sizes.length / middle),
            "first step, s": round(run.seconds[0], 2),
            "steps": len(run.losses),
            "last loss": round(run.losses[-1], 4),
        }
        if ON_GPUS:
            row |= {"kernels, ms": float(f"{run.kernels:.4g}"), "peak MB of a process": round(run.peak / 1e6)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
