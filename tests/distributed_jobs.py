"""What the processes of tests/world/test_distributed.py run; each function runs in all processes of a group."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flexmasks
from flexmasks import trees
from flexmasks.integrations import distributed
from flexmasks.kernels import wide
from flexmasks.spec.registry import example

wide.on_gpu = lambda device: True  # processes on a CPU, too, copy numbers of 16 bytes, as those on GPUs do
LENGTH = 128
WAYS = ("heads", "gather", "seen", "auto")
Parts = tuple[tuple[tuple[int, int], ...], ...]


def mesh_of(ndim: int = 1, rows: int = 2) -> DeviceMesh:
    """Return a mesh of all processes; rows: how many lie along the first of two dimensions."""
    count = dist.get_world_size()
    shape = (count,) if ndim == 1 else (rows, count // rows)
    return init_device_mesh("cpu", shape, mesh_dim_names=("rows", "ranks")[:ndim])


def uneven(length: int, generator: random.Random) -> distributed.Order:
    """Return parts that follow each other, of any lengths, some of them perhaps 0."""
    cuts = sorted(generator.randint(0, length) for _ in range(dist.get_world_size() - 1))
    ends = zip([0, *cuts], [*cuts, length], strict=True)
    return distributed.Order(length, tuple(((a, b),) if a < b else () for a, b in ends))


def scattered(length: int, generator: random.Random) -> distributed.Order:
    """Return an order that gives each process several pieces, of different lengths."""
    cuts = sorted(generator.sample(range(1, length), min(9, length - 1)))
    pieces = list(zip([0, *cuts], [*cuts, length], strict=True))
    count = dist.get_world_size()
    owners = [generator.randrange(count) for _ in pieces]
    parts = (merged([p for p, owner in zip(pieces, owners, strict=True) if owner == rank]) for rank in range(count))
    return distributed.Order(length, tuple(parts))


def merged(pieces: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return pieces with those that touch as one."""
    out: list[tuple[int, int]] = []
    for start, stop in pieces:
        if out and out[-1][1] == start:
            start = out.pop()[0]
        out.append((start, stop))
    return tuple(out)


def own_tokens(order: distributed.Order) -> Tensor:
    """Return the positions that this process holds."""
    parts = [torch.arange(start, stop) for start, stop in order.parts[dist.get_rank()]]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


class Trial:
    """A call of one process, with its gradients, that others are held against."""

    def __init__(self, q_heads: int, kv_heads: int, batch: int, length: int = LENGTH, **call: Any) -> None:
        torch.manual_seed(0)
        self.call = call
        self.inputs = [
            torch.randn(batch, heads, length, size, dtype=torch.float64)
            for heads, size in ((q_heads, 8), (kv_heads, 8), (kv_heads, 6))
        ]
        self.inputs.append(torch.randn(q_heads, dtype=torch.float64))
        self.weights = torch.randn(batch, q_heads, length, 6, dtype=torch.float64)
        self.whole = self._run(self._leaves(slice(None)), slice(None), flexmasks.attention)

    def _leaves(self, tokens: Any) -> list[Tensor]:
        q, k, v, sinks = self.inputs
        return [x.clone().requires_grad_() for x in (*(x[:, :, tokens] for x in (q, k, v)), sinks)]

    def _run(self, leaves: list[Tensor], tokens: Any, attention: Callable[..., Any], **how: Any) -> list[Tensor]:
        """Return output, lse, and the gradients of q, k, v, sinks and learned tensors."""
        q, k, v, sinks = leaves
        learned = [t for value in self.call.values() if hasattr(value, "_tensors") for t in value._tensors()]
        learned = [t for t in learned if t.requires_grad]
        call = {**self.call, **how, "backend": "reference", "return_lse": True, "sink_logits": sinks}
        out, lse = attention(q, k, v, **call)
        weights = self.weights[:, :, tokens]
        loss = (out * weights).sum() + (lse * weights[..., 0]).sum()
        gradients = torch.autograd.grad(loss, [*leaves, *learned], allow_unused=False)
        return [out.detach(), lse.detach(), *gradients]

    def error(self, order: distributed.Order, **how: Any) -> float:
        """Return the largest difference of this process's part from the whole call."""
        tokens = own_tokens(order)
        is_natural = order.tokens().equal(torch.arange(order.length))
        how = how if is_natural else {**how, "order": order}
        results = self._run(self._leaves(tokens), tokens, distributed.attention, **how)
        for gradient in results[5:]:  # those of sinks and learned tensors are parts of sums
            dist.all_reduce(gradient)
        wanted = [x[:, :, tokens] for x in self.whole[:5]] + self.whole[5:]
        pairs = zip(results, wanted, strict=True)
        return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def orders(generator: random.Random, length: int = LENGTH) -> Iterator[distributed.Order]:
    """Yield equal, uneven and scattered parts."""
    yield distributed.Order.natural(length, dist.get_world_size())
    yield uneven(length, generator)
    yield scattered(length, generator)


def layouts(
    generator: random.Random, ways: Sequence[str], length: int = LENGTH, in_full: bool = False
) -> Iterator[tuple[str, distributed.Order]]:
    """Yield ways with orders: one of the orders for each way, or all."""
    for how in ways:
        every = list(orders(generator, length))
        for order in every if in_full else [generator.choice(every)]:
            yield how, order


def registered(
    kind: str, names: Sequence[str], ndim: int = 1, in_full: bool = False, rows: int = 2
) -> dict[str, float]:
    """Return the largest error for each name: by all ways in all orders, or by one of them, another each day."""
    errors: dict[str, float] = {}
    mesh, generator = mesh_of(ndim, rows), random.Random(int(os.environ["FLEXMASKS_SEED"]))
    for name in names:
        value = example(kind, name, LENGTH)
        heads = value._implied_size("H") or 4
        kv_heads = heads if heads % 2 or dist.get_world_size() > 2 else heads // 2
        trial = Trial(heads, kv_heads, value._implied_size("B") or 2, **{kind: value})
        can_be = {"heads": kv_heads % mesh.size(mesh.ndim - 1) == 0, "seen": ndim == 1}
        ways = [w for w in WAYS if can_be.get(w, True)]
        for how, order in layouts(generator, ways if in_full else [generator.choice(ways)], in_full=in_full):
            errors[f"{name} {how} {order.parts}"] = trial.error(order, mesh=mesh, how=how)
    return errors


def composed(seed: int, count: int) -> dict[str, float]:
    """Return the errors of random compositions, lengths and heads."""
    errors: dict[str, float] = {}
    mesh, generator = mesh_of(), random.Random(seed)
    names = [e.name for e in flexmasks.list_masks()]
    for _ in range(count):
        length = generator.randint(1, 150)
        hidden = torch.tensor([generator.random() < 0.2 for _ in range(length)])
        mask = flexmasks.get_mask(lambda b, h, q, kv, hidden=hidden: ~hidden[kv] | (kv == q - h))
        for _ in range(generator.randint(0, 2)):
            other = example("mask", generator.choice(names), LENGTH)
            if other._implied_size("H") or other._implied_size("B") or other._tensors() or generator.random() < 0.3:
                other = flexmasks.get_mask("sliding_window", window=generator.randint(0, 40))
            try:
                flexmasks.dense_mask(other, length)
            except ValueError:  # its parameters do not fit the length
                continue
            mask = mask & other if generator.random() < 0.6 else ~mask | other
        kv_heads = generator.choice([1, 2, 4])
        trial = Trial(4, kv_heads, 2, length, mask=mask)
        for order in orders(generator, length):
            how = generator.choice([w for w in WAYS if w != "heads" or kv_heads % mesh.size() == 0])
            errors[f"{mask} {how} {length} {order.parts}"] = trial.error(order, mesh=mesh, how=how)
    return errors


def learned() -> dict[str, float]:
    """Return the errors with tensors that scores learn."""
    generator = random.Random(5)
    torch.manual_seed(5)  # all processes learn the same tensors
    mesh = mesh_of()
    table = torch.randn(32, 4, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(4, dtype=torch.float64, requires_grad=True)
    scores = {
        "t5": flexmasks.get_score("t5_bias", table=table),
        "alibi": flexmasks.get_score("alibi", slopes=slopes),
        "own": flexmasks.get_score(lambda score, b, h, q, kv: score * scale[h] + q * 0.01),
    }
    errors = {}
    for name, score in scores.items():
        for mask in (None, "causal"):
            trial = Trial(4, 4, 2, score=score, mask=None if mask is None else flexmasks.get_mask(mask))
            for how, order in layouts(generator, WAYS):
                errors[f"{name} {mask} {how} {order.parts}"] = trial.error(order, mesh=mesh, how=how)
    return errors


def dropped() -> dict[str, float]:
    """Return errors of calls with dropout. Without a seed that of the first process counts."""
    mesh, generator, errors = mesh_of(), random.Random(8), {}
    for score in (None, "alibi"):
        trial = Trial(4, 2, 2, mask=documents(generator), score=score, dropout_p=0.3, dropout_seed=5)
        for how, order in layouts(generator, WAYS):
            errors[f"{score} {how} {order.parts}"] = trial.error(order, mesh=mesh, how=how)
    given = [torch.randn(2, 4, LENGTH, 8, generator=torch.manual_seed(1), dtype=torch.float64) for _ in range(3)]
    torch.manual_seed(0)
    call = {"mask": "causal", "dropout_p": 0.3, "return_lse": True, "backend": "reference"}
    wanted = flexmasks.attention(*given, **call, dropout_seed=torch.randint(2**62, (1,)))
    for dim in range(3):
        torch.manual_seed(dist.get_rank())
        parts = [distribute_tensor(x, mesh, [Shard(dim)]) for x in given]
        results = (distributed.attention if dim else flexmasks.attention)(*parts, **call)
        pairs = zip(results, wanted, strict=True)
        errors[f"Shard({dim})"] = max(float((a.full_tensor() - b).abs().max()) for a, b in pairs)
    return errors


def second_gradients() -> dict[str, float]:
    """Return errors of second gradients, and of gradients under anomaly detection."""
    generator, mesh, errors = random.Random(7), mesh_of(), {}
    for mask in (flexmasks.get_mask("sliding_window", window=20), documents(generator)):
        for order in orders(generator):
            with torch.autograd.detect_anomaly(check_nan=True):
                errors[f"{mask} {order.parts}"] = Trial(8, 4, 2, mask=mask).error(order, mesh=mesh, how="heads")
            errors[f"{mask} {order.parts} twice"] = error_of_second_gradients(mask, order, mesh)
    return errors


def documents(generator: random.Random) -> flexmasks.Mask:
    ids = torch.tensor(sorted(generator.randrange(5) for _ in range(LENGTH)))
    return flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)


def error_of_second_gradients(mask: flexmasks.Mask, order: distributed.Order, mesh: DeviceMesh) -> float:
    """Return the largest error of gradients of the squares of gradients, with a graph that is kept."""
    torch.manual_seed(2)
    given, weights, tokens = torch.randn(3, 1, 8, LENGTH, 4).double(), torch.randn(1, 8, LENGTH, 4), own_tokens(order)

    def run(place: Callable[[Tensor], Tensor], attention: Callable[..., Tensor], **how: Any) -> list[Tensor]:
        leaves = [place(x).clone().requires_grad_() for x in given]
        out = attention(*leaves, mask=mask, backend="reference", **how)
        loss = (out * place(weights)).sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        again = torch.autograd.grad(loss, leaves, create_graph=True)
        assert all(map(torch.allclose, first, again))
        second = torch.autograd.grad(sum((x**2).sum() for x in again), leaves)
        return [out.detach().add_(1), *(x.detach() for x in (*again, *second))]

    got = run(lambda x: x[:, :, tokens], distributed.attention, mesh=mesh, how="heads", order=order)
    wanted = run(lambda x: x, flexmasks.attention)
    pairs = ((a, b[:, :, tokens]) for a, b in zip(got, wanted, strict=True))
    return max((float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a.numel()), default=0.0)


def dtensors() -> dict[str, float]:
    """Return errors of calls whose tensors are DTensors."""
    torch.manual_seed(0)
    given = [*(torch.randn(2, 4, 101, 8, dtype=torch.float64) for _ in range(3)), *torch.rand(2, 4).double()]
    weights = torch.randn(2, 4, 101, 8, dtype=torch.float64)
    mask = flexmasks.get_mask("document", document_ids=torch.arange(101) // 30) & flexmasks.get_mask("causal")

    def run(attention: Callable[..., Any], place: Callable[[Tensor], Tensor], **how: Any) -> list[Tensor]:
        """Return output, lse and all gradients as whole tensors."""
        q, k, v, slopes, sinks = leaves = [place(x.clone()).requires_grad_() for x in given]
        call = {"mask": mask, "score": "alibi", "slopes": slopes, "sink_logits": sinks, "backend": "reference"}
        out, lse = attention(q, k, v, return_lse=True, **call, **how)
        # torch 2.11 exchanges gradients of leaves that some processes hold nothing of, in `backward` only.
        gradients = torch.autograd.grad(out, leaves, place(weights))
        return [x.full_tensor() if isinstance(x, DTensor) else x for x in (out, lse, *gradients)]

    wanted = run(flexmasks.attention, lambda x: x)

    def error(attention: Callable[..., Any], mesh: DeviceMesh, placements: Sequence[Any], **how: Any) -> float:
        def place(x: Tensor) -> DTensor:  # slopes and sinks are the same everywhere
            return distribute_tensor(x, mesh, placements if x.ndim == 4 else [Replicate()] * mesh.ndim)

        got = run(attention, place, **how)
        return max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))

    mesh = mesh_of()
    errors = {f"{p}": error(flexmasks.attention, mesh, [p]) for p in (Shard(0), Shard(1), Replicate())}
    errors["over heads"] = error(distributed.attention, mesh, [Shard(1)])
    errors |= {how: error(distributed.attention, mesh, [Shard(2)], how=how) for how in WAYS}
    if dist.get_world_size() == 4:
        for p in ([Shard(2), Shard(1)], [Shard(0), Shard(2)], [Shard(2), Shard(2)], [Shard(1), Shard(2)]):
            errors[f"{p}"] = error(distributed.attention, mesh_of(2), p)
    return errors


def under_autocast() -> list[str]:
    """Return the dtypes of outputs, and how they compare with one process's."""
    torch.manual_seed(0)
    order = distributed.Order.natural(64, dist.get_world_size())
    q, k, v = torch.randn(3, 1, 4, 64, 8).unbind()
    found = []
    for how, backend in (("heads", "auto"), ("gather", "reference"), ("seen", "reference")):
        with torch.autocast("cpu", torch.bfloat16):
            whole = flexmasks.attention(q, k, v, mask="causal", backend="reference")
            parts = (x[:, :, own_tokens(order)] for x in (q, k, v))
            out = distributed.attention(*parts, mesh=mesh_of(), mask="causal", how=how, backend=backend)
        error = float((out - whole[:, :, own_tokens(order)]).abs().max())
        found.append(f"{out.dtype} {error <= 2e-2}")
    return found


def planned_once() -> list[int]:
    """Return how often what processes want was found again, after each of some calls."""
    order = distributed.Order.natural(256, dist.get_world_size())
    ids = torch.arange(256) // 60
    q = torch.randn(1, 2, order.sizes[dist.get_rank()], 8)
    flexmasks.clear_caches()
    found = []
    for _ in range(3):
        mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
        for _ in range(2):  # layers of a step
            distributed.attention(q, q, q, mesh=mesh_of(), mask=mask, how="seen", backend="reference")
            found.append(flexmasks.cache_info()["plans"].parts["seen"].hits)
        ids += 1  # a change in place
    return found


def packed_scores() -> dict[str, float]:
    """Return errors of packed score changes, with keys that not all processes see."""
    length, count = 1024, dist.get_world_size()
    offsets = torch.arange(0, length + 1, 128)
    mask, order = flexmasks.packed("causal", offsets), distributed.Order.natural(length, count)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 8, dtype=torch.float64).unbind()
    tokens = own_tokens(order)
    errors = {}
    for inner in (flexmasks.get_score("alibi"), flexmasks.get_score("softcap", cap=2.0)):
        score = flexmasks.packed(inner, offsets)
        whole = flexmasks.attention(q, k, v, mask=mask, score=score)
        for how in ("heads", "gather", "seen"):
            parts = (x[:, :, tokens] for x in (q, k, v))
            out = distributed.attention(*parts, mesh=mesh_of(), mask=mask, score=score, how=how)
            errors[f"{inner} {how}"] = float((out - whole[:, :, tokens]).abs().max())
    return errors


def on_gpus() -> dict[str, float]:
    """Return relative errors in bfloat16 on GPUs against float32 of one process, for output and gradients."""
    count, device = dist.get_world_size(), torch.device("cuda", dist.get_rank())
    mesh = init_device_mesh("cuda", (count,))
    natural, in_lengths, in_pieces = orders(random.Random(3), 1000)
    ids = (torch.arange(1000) // 300).to(device)
    documents = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    own = flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & ((kv + h) % 7 != 0))
    calls = [
        (flexmasks.get_mask("causal"), "heads", in_lengths),
        (flexmasks.get_mask("sliding_window", window=100), "auto", natural),
        (documents, "heads", natural),
        (documents, "gather", in_pieces),
        (own, "seen", in_lengths),
    ]
    errors = {}
    for mask, how, order in calls:
        torch.manual_seed(0)
        q, k, v, upstream = torch.randn(4, 2, 4, 1000, 64, device=device)
        leaves = [x.clone().requires_grad_() for x in (q, k[:, :2], v[:, :2])]
        whole = flexmasks.attention(*leaves, mask=mask, score="alibi", backend="reference")
        wanted = [whole, *torch.autograd.grad(whole, leaves, upstream)]
        tokens = own_tokens(order).to(device)
        parts = [x.detach()[:, :, tokens].bfloat16().requires_grad_() for x in leaves]
        out = distributed.attention(*parts, mesh=mesh, mask=mask, score="alibi", how=how, order=order)
        got = [out, *torch.autograd.grad(out, parts, upstream[:, :, tokens].bfloat16())]
        pairs = [(a.float(), b[:, :, tokens]) for a, b in zip(got, wanted, strict=True)]
        errors[f"{mask} {how} {order.parts}"] = max(
            (float((a - b).norm() / b.norm()) for a, b in pairs if b.numel()), default=0.0
        )
    return errors


def sharded_over_the_sequence() -> None:
    """Hand a DTensor over the sequence to the call of one process."""
    x = distribute_tensor(torch.randn(1, 2, 16, 8), mesh_of(), [Shard(2)])
    flexmasks.attention(x, x, x, mask="causal")


def sharded_differently() -> None:
    """Hand over queries and keys that are sharded differently."""
    q, k = (distribute_tensor(torch.randn(2, 2, 16, 8), mesh_of(), [Shard(dim)]) for dim in (0, 1))
    flexmasks.attention(q, k, k, mask="causal")


class Layer(nn.Module):
    """A layer of attention over the part of a sequence."""

    def __init__(self, mesh: DeviceMesh | None, how: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(32, 96)
        self.slopes = nn.Parameter(torch.rand(4))
        self.mesh, self.how = mesh, how

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
        if self.mesh is None:
            out = flexmasks.attention(q, k, v, mask=mask, score="alibi", slopes=self.slopes)
        else:
            out = distributed.attention(
                q, k, v, mesh=self.mesh, how=self.how, mask=mask, score="alibi", slopes=self.slopes
            )
        return x + out.transpose(1, 2).flatten(2)


def compiled(how: str, checkpointed: bool = False, selective: bool = False, backend: str = "aot_eager") -> float:
    """Return the largest error of a layer's output and gradients against one process's.

    checkpointed: whether the layer is checkpointed, and not compiled.
    selective: whether the checkpoint keeps the results of matrix products.
    """
    mesh, length = mesh_of(), 96
    torch.manual_seed(0)
    x = torch.randn(2, length, 32)
    ids = torch.arange(length) // 37
    part = length // dist.get_world_size()
    own = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    one, layer = Layer(None, ""), Layer(mesh, how)
    wanted = one(x, ids)
    wanted.square().sum().backward()

    def run(given: Tensor) -> Tensor:
        if checkpointed:
            return checkpoint(layer, given, ids, use_reentrant=False, **more)
        return layer(given, ids)

    keeping = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    more: dict[str, Any] = {"context_fn": keeping} if selective else {}
    step = run if checkpointed else torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    out = step(x[:, own])
    out.square().sum().backward()
    errors = [(out - wanted[:, own]).abs().max()]
    for a, b in zip(layer.parameters(), one.parameters(), strict=True):
        dist.all_reduce(a.grad)
        errors.append((a.grad - b.grad).abs().max() / b.grad.abs().max())
    return float(max(errors))


def parts_of_two_sizes_inside_compile() -> float:
    """Return the largest error of a compiled call for one batch element, of its output and gradients."""
    torch._dynamo.reset()
    length, parts = 128, ((0, 101), (101, 128))
    q, k, v = (torch.randn(1, heads, length, size, dtype=torch.float64) for heads, size in ((8, 8), (4, 8), (4, 6)))
    call = functools.partial(distributed.attention, mesh=mesh_of(), how="heads", backend="reference")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    mine = slice(*parts[dist.get_rank()])
    own = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    order = distributed.Order(length, tuple((part,) for part in parts))
    out, _ = compiled(*own, score="alibi", return_lse=True, order=order)
    whole = [x.requires_grad_() for x in (q, k, v)]
    want, _ = flexmasks.attention(*whole, score="alibi", return_lse=True, backend="reference")
    got = [out, *torch.autograd.grad(out.square().sum(), own)]
    wanted = [want, *torch.autograd.grad(want.square().sum(), whole)]
    return max(float((a - b[:, :, mine]).abs().max()) for a, b in zip(got, wanted, strict=True))


def lengths_inside_compile(
    how: str, ndim: int, dynamic: bool | None, documents: bool = True, whole: bool = False
) -> tuple[float, int]:
    """Return the largest error of compiled calls whose lengths change, and the number of graphs that they took.

    documents: whether the mask has documents, and is no window.
    whole: whether the tensors are DTensors.
    """
    mesh, count = mesh_of(ndim), dist.get_world_size()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    error = 0.0

    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, order: distributed.Order | None) -> Tensor:
        mask = flexmasks.get_mask("causal")
        if documents:
            mask = mask & flexmasks.get_mask("document", document_ids=ids)
        given = None if whole else mesh
        return distributed.attention(q, k, v, mesh=given, how=how, order=order, mask=mask, score="alibi")

    step = torch.compile(run, fullgraph=True, backend=counter, dynamic=dynamic)
    for own in (36, 44, 60):
        length = own * count
        ids = torch.arange(length) // (30 if documents else length)
        apart = torch.arange(length)[:, None] - torch.arange(length)
        visible = (apart >= 0) & (ids[:, None] == ids)
        inputs = [
            x.requires_grad_() for x in torch.randn(3, 1, 4, length, 8, generator=torch.Generator().manual_seed(own))
        ]
        q, k, v = (x.double() for x in inputs)
        slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]).view(4, 1, 1)
        scores = (q @ k.mT / 8**0.5 - slopes * apart).masked_fill(~visible, -torch.inf)
        want = scores.softmax(-1) @ v
        tokens = own_tokens(distributed.Order.natural(length, count))
        parts = [x.detach()[:, :, tokens] for x in inputs]
        if whole:
            parts = [DTensor.from_local(x, mesh, [Shard(2)]) for x in parts]
        parts = [x.requires_grad_() for x in parts]
        out = step(*parts, ids, None)
        got = [out, *torch.autograd.grad(out.square().sum(), parts)]
        wanted = [want, *torch.autograd.grad(want.square().sum(), inputs)]
        got = [x.to_local() if isinstance(x, DTensor) else x for x in got]
        pairs = zip(got, wanted, strict=True)
        error = max(error, *(float((a - b[:, :, tokens]).abs().max()) for a, b in pairs))
    return error, counter.frame_count


def orders_inside_compile() -> float:
    """Return the largest error of compiled calls with one order after the other."""
    mesh, count, length = mesh_of(), dist.get_world_size(), 24
    error = 0.0

    def run(x: Tensor, order: distributed.Order) -> Tensor:
        return distributed.attention(x, x + 0, x + 1, mesh=mesh, how="gather", order=order, mask="causal")

    torch._dynamo.reset()
    step = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 4, length, 8, generator=torch.Generator().manual_seed(length))
    scores = (x @ x.mT / 8**0.5).masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    want = scores.softmax(-1) @ (x + 1)
    for order in (
        distributed.Order.natural(length, count),
        distributed.balance("causal", length, count, block_size=4),
    ):
        tokens = own_tokens(order)
        error = max(error, float((step(x[:, :, tokens], order) - want[:, :, tokens]).abs().max()))
    return error


def sharded_model() -> float:
    """Return the largest relative difference of parameters that FSDP2 trains from those of one process."""
    from torch.distributed.fsdp import fully_shard

    mesh, length = mesh_of(), 90
    torch.manual_seed(0)
    x = torch.randn(2, length, 32)
    ids = torch.arange(length) // 37
    order = distributed.Order.natural(length, dist.get_world_size())
    own = own_tokens(order)
    one, layer = Layer(None, ""), Layer(mesh, "heads")
    fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, layer)]
    for _ in range(3):
        one(x, ids).square().mean().backward()
        # FSDP2 averages gradients; the sum over a part, times the number of processes, is a mean over all tokens.
        (layer(x[:, own], ids).square().sum() / x.numel() * dist.get_world_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(layer.parameters(), one.parameters(), strict=True)
    return max(float((a.full_tensor() - b).abs().max() / b.abs().max()) for a, b in pairs)


class _OfTrees(nn.Module):
    """Words, a layer of attention, and the log-probabilities of words by parts of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)

    def forward(self, batch: trees.TreeBatch) -> list[Tensor]:
        x = self.words(batch.tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + flexmasks.attention(q, k, v, mask=batch.plan()).transpose(1, 2).flatten(2)
        return batch.logprobs(x, head=self.head)


class _Block(nn.Module):
    """A layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(flexmasks.attention(q, k, v, mask="causal").transpose(1, 2).flatten(2))


def derivatives_under_fsdp() -> float:
    """Return the largest difference of parameters that FSDP2 trains towards the model's derivative, by torch.func.jvp,
    from those of one process, whose attention torch differentiates itself.
    """
    from torch.distributed.fsdp import fully_shard

    mesh, count = mesh_of(), dist.get_world_size()
    torch.manual_seed(0)
    one = nn.Sequential(_Block(), _Block()).double()
    sharded = copy.deepcopy(one)
    for part in (*sharded, sharded):
        fully_shard(part, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, sharded)]
    x, along = torch.randn(2, count, 1, 40, 16, dtype=torch.float64)

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        out, tangent = torch.func.jvp(model, (x[rank],), (along[rank],))
        return (out - tangent.detach()).square().mean()

    for _ in range(2):
        attention = functools.partial(flexmasks.attention, backend="reference")
        with mock.patch.object(flexmasks, "attention", attention):
            torch.stack([loss_of(one, rank) for rank in range(count)]).mean().backward()
        loss_of(sharded, dist.get_rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(sharded.parameters(), one.parameters(), strict=True)
    return max(float((a.full_tensor() - b).abs().max()) for a, b in pairs)


def trees_under_fsdp() -> float:
    """Return the largest difference of parameters that FSDP2 trains on trees from those of one process.

    Each process has trees of its own, new at each step, and the log-probabilities of their answers.
    """
    from torch.distributed.fsdp import fully_shard

    mesh, count = mesh_of(), dist.get_world_size()
    torch.manual_seed(0)
    one = _OfTrees().double()
    sharded = copy.deepcopy(one)
    fully_shard(sharded.qkv, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, sharded)]

    def loss_of(model: _OfTrees, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        prompt = torch.randint(20, (5 + rank,), generator=generator)
        answers = [torch.randint(20, (3 + n,), generator=generator) for n in range(4)]
        batch = trees.pack([torch.cat([prompt, a]) for a in answers], max_tokens=20)
        return torch.stack([x[len(prompt) - 1 :].mean() * (n - 1) for n, x in enumerate(model(batch))]).sum()

    for step in range(3):
        torch.stack([loss_of(one, step, rank) for rank in range(count)]).mean().backward()
        loss_of(sharded, step, dist.get_rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(sharded.parameters(), one.parameters(), strict=True)
    return max(float((a.full_tensor() - b).abs().max()) for a, b in pairs)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: flexmasks.Mask, score: flexmasks.Score) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = flexmasks.attention(q, k, v, mask=mask, score=score, backend="reference")
        return x + self.out(attended.transpose(1, 2).flatten(2)).tanh()


class _Layers(nn.ModuleList):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        for layer in self:
            x = layer(x, **given)
        return x


def pipelined() -> dict[str, float]:
    """Return by schedules the largest difference of the loss and of gradients from those of one process."""
    from torch.distributed import pipelining

    rank, batch, length = dist.get_rank(), 8, 24
    whole = _Layers(_Layer() for _ in range(4)).double()
    x, target = torch.randn(2, batch, length, 16, dtype=torch.float64)
    ids, places = torch.randint(0, 3, (batch, length)).sort(1).values, torch.rand(batch, 2, length).double()
    mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    given = {
        "mask": mask & (lambda b, h, q, kv: (q == kv) | (places[b, 0, kv] > 0.3)),
        "score": flexmasks.get_score(lambda score, b, h, q, kv: score + places[b, h, kv]),
    }
    want = nn.functional.mse_loss(whole(x, **given), target)
    gradients = dict(zip(whole.parameters(), torch.autograd.grad(want, [*whole.parameters()]), strict=True))
    errors = {}
    for schedule, stages in (
        ("Schedule1F1B", [rank]),
        ("ScheduleInterleaved1F1B", [rank, rank + 2]),
        ("ScheduleInterleavedZeroBubble", [rank, rank + 2]),  # gradients of inputs and of weights one after the other
        ("ScheduleZBVZeroBubble", [rank, 3 - rank]),
    ):
        if "ZeroBubble" in schedule and torch.torch_version.TorchVersion(torch.__version__) < (2, 13):
            continue  # torch 2.11 asks all keyword arguments for gradients, also those that are no tensors
        count = dist.get_world_size() * len(stages)
        size = len(whole) // count
        own = [copy.deepcopy(whole[n * size : (n + 1) * size]) for n in stages]
        made = [pipelining.PipelineStage(m, n, count, torch.device("cpu")) for m, n in zip(own, stages, strict=True)]
        kind, losses = getattr(pipelining, schedule), list[Tensor]()
        runs = kind(made if len(made) > 1 else made[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
        has_last = count - 1 in stages
        runs.step(*([x] if 0 in stages else []), **given, **({"target": target, "losses": losses} if has_last else {}))
        wrong = [float((torch.stack(losses).mean() - want).detach().abs())] if has_last else []
        for module, n in zip(own, stages, strict=True):
            pairs = zip(module.parameters(), whole[n * size : (n + 1) * size].parameters(), strict=True)
            wrong += [float((p.grad - gradients[q]).abs().max()) for p, q in pairs]
        errors[schedule] = max(wrong)
    return errors


def shards() -> bool:
    """Return whether parts put together again are the whole."""
    generator = random.Random(7)
    for ndim in (1, 2) if dist.get_world_size() == 4 else (1,):
        mesh = mesh_of(ndim)
        balanced = distributed.balance("causal", LENGTH, mesh, block_size=4)
        groups = distributed.balance("causal", LENGTH, mesh.size(0), block_size=4)
        if balanced.ranks != mesh.size() or not balanced.tokens().equal(groups.tokens()):
            return False
        for order in [*orders(generator), balanced]:
            x = torch.randn(2, LENGTH, 3, generator=torch.Generator().manual_seed(0))
            part = distributed.shard(x, order, mesh)
            if not part.equal(x[:, own_tokens(order)]) or not distributed.unshard(part, order, mesh).equal(x):
                return False
            words = torch.arange(LENGTH).expand(2, -1)
            if not distributed.unshard(distributed.shard(words, order, mesh, dim=-1), order, mesh, dim=-1).equal(words):
                return False
    return True


def forgotten(what: str) -> list[str]:
    """Return the errors of calls without the order that the process holds."""
    mesh, length = mesh_of(), 64
    natural = distributed.Order.natural(length, mesh.size())
    held: list[Any] = [distributed.balance("causal", length, mesh, block_size=4)]
    x: Tensor = distributed.shard(torch.randn(1, 2, length, 8), natural, mesh, dim=2)
    if what == "part":  # it alone keeps its order alive
        held = [distributed.shard(torch.arange(length)[None], held[0], mesh)]
    given: dict[str, Any] = {"mesh": mesh, "mask": "causal"}
    if what == "dtensor":
        x, given["mesh"] = DTensor.from_local(x, mesh, [Shard(2)]), None
    attention = distributed.attention
    if what == "compiled":
        attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    errors = [error_of(lambda: attention(x, x, x, **given))]
    if what != "compiled":
        errors.append(error_of(lambda: attention(x, x, x, **given, order=natural)))
        held.clear()
        errors.append(error_of(lambda: attention(x, x, x, **given)))
    return errors


def unlike_what_is_held() -> float:
    """Return the error of natural parts of which one is as long as by an order that is held, and another is not."""
    mesh, length = mesh_of(), 64
    held = distributed.balance("causal", length, mesh, block_size=4)
    sizes = [length // mesh.size(), *[length // mesh.size() + 3] * (mesh.size() - 1)]
    assert held.sizes[0] == sizes[0]
    ends = list(itertools.accumulate(sizes, initial=0))
    order = distributed.Order(ends[-1], tuple(((start, stop),) for start, stop in itertools.pairwise(ends)))
    return Trial(4, 2, 1, ends[-1], mask="causal").error(order, mesh=mesh)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, torch._dynamo.exc.Unsupported) as error:
        return str(error)
    return ""


def unsharded_by_other_orders() -> str:
    """Return the error of parts of one length that each process puts together by another order."""
    pieces: Any = ((0, 4),), ((4, 8),)
    order = distributed.Order(8, pieces if dist.get_rank() else pieces[::-1])
    return error_of(lambda: distributed.unshard(torch.arange(4)[None], order, mesh_of()))


def changing() -> dict[str, float]:
    """Return errors of calls in a row whose masks change what they read, and of an empty sequence."""
    mesh, errors, length = mesh_of(), {}, 512
    order = distributed.Order.natural(length, dist.get_world_size())
    window, limits = 10, SimpleNamespace(window=10)
    masks = {
        "variable": flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < window)),
        "object": flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < limits.window)),
    }
    for window in (10, 400):
        limits.window = window
        for name, mask in masks.items():
            trial = Trial(2, 1, 1, length, mask=mask)
            for how in ("seen", "auto"):
                errors[f"{name} {how} {window}"] = trial.error(order, mesh=mesh, how=how)
    nothing = torch.randn(1, 4, 0, 8)
    for how in WAYS:
        errors[f"empty {how}"] = distributed.attention(nothing, nothing, nothing, mesh=mesh, how=how).numel()
    return errors


def different(what: str) -> None:
    """Make a call that differs on the last process."""
    mesh, is_last = mesh_of(), dist.get_rank() == dist.get_world_size() - 1
    heads = 2 if is_last and what == "heads" else 4
    length = 256 if what.startswith("keys") else 16
    q, k, v = torch.randn(3, 1, heads, length, 8).unbind()
    mask = "full" if is_last and what == "mask" else "causal"
    call: dict[str, Any] = {"mask": mask}
    if what == "window":
        call = {"mask": "sliding_window", "window": 5 if is_last else 4}
    if what == "score":
        call = {"score": "softcap", "cap": 2.0 + is_last}
    if what.startswith("keys"):
        call = {"how": "auto" if "auto" in what else "seen"}
        ids = torch.arange(512) // (300 if is_last else 200)
        if "list" in what:
            call |= {"mask": "document", "document_ids": ids.tolist()}
        elif "tensor" in what:
            call |= {"mask": "document", "document_ids": ids}
        elif "error" in what:
            table = torch.zeros(256 if is_last else 512)
            call |= {"mask": lambda b, h, q, kv: (q >= kv) & (table[q] == 0)}
        else:
            window = 20 if is_last else 200
            call |= {"mask": lambda b, h, q, kv: (q >= kv) & (q - kv < window)}
        if "auto" in what:
            q, k, v = q[:, :3], k[:, :3], v[:, :3]  # three heads cannot go to two processes
    if what == "lse":
        call = {"return_lse": is_last, "how": "heads"}
    if what == "ids":
        call = {"mask": "document", "document_ids": (torch.arange(32) // 5)[: None if is_last else 31]}
    if what == "error":
        call = {"mask": "sliding_window"} if is_last else {"mask": "causal"}
    if what == "dtypes":
        k = k.double()
    if what == "nested":
        q = k = v = torch.nested.as_nested_tensor([torch.randn(4, 3, 8)] * 2, layout=torch.jagged)
    if what == "gradient" and is_last:
        k.requires_grad_()
    distributed.attention(q, k, v, mesh=mesh, **call)


def fails_alone() -> None:
    """Fail on the last process before the call, which waits for it two seconds."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("this process has failed")
    q = torch.randn(1, 4, 16, 8)
    distributed.attention(q, q, q, mesh=mesh, mask="causal")
