"""`python -m flexmasks bench attention`: attention with masks and scores, against what else there is for it."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from flexmasks.attention import attention, block_mask, dense_mask
from flexmasks.bench import backward_twice, chosen, machine, measure
from flexmasks.console import progress, synchronize
from flexmasks.kernels import separate
from flexmasks.params import Size
from flexmasks.registry import get_mask, get_score
from flexmasks.timing import interleaved
from flexmasks.values import Mask, Score

_RUNS = 7
_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A mask and a score over q, k, v [batch, heads, length, size]."""

    name: str
    mask: Mask
    score: Score | None = None
    # Those of FlashAttention 4's own keyword arguments that say the same, if any do.
    fa4: dict[str, Any] | None = None
    batch: int | None = None
    length: int | None = None
    lengths: Tensor | None = field(default=None, repr=False)  # of documents laid end to end


def cases(batch: int, heads: int, length: int, device: torch.device) -> list[Case]:
    """What is measured, at its parameters for a length; a canvas is as square as powers of two allow."""
    generator = torch.Generator().manual_seed(0)
    rows = 1 << (int(math.log2(length)) // 2)
    canvas = {"height": rows, "width": length // rows}
    window = min(1024, length // 4)
    halves = torch.arange(length, device=device) * 2 // length
    lens = torch.randint(length // 4, length + 1, (batch,), generator=generator).to(device)
    causal = get_mask("causal")
    documents = torch.randint(64, 1137, (57 * 4,), generator=generator)
    total = 4 * length
    documents = documents[: int((documents.cumsum(0) <= total).sum())]
    documents = torch.cat([documents, (total - documents.sum())[None]]) if documents.sum() < total else documents
    ids = torch.arange(len(documents)).repeat_interleave(documents).to(device)
    return [
        Case("full", get_mask("full"), fa4={}),
        Case("causal", causal, fa4={"causal": True}),
        Case(
            "sliding_window",
            get_mask("sliding_window", window=window),
            fa4={"causal": True, "window_size": (window, 0)},
        ),
        Case("prefix_lm", get_mask("prefix_lm", prefix_len=length // 4)),
        Case("document, causal", causal & get_mask("document", document_ids=halves)),
        Case("grouped_tril", get_mask("grouped_tril", seq_lens=lens)),
        Case("sasa", get_mask("sasa", window=8, **canvas)),
        Case("natten", get_mask("natten", kernel=7, **canvas)),
        Case("alibi, causal", causal, get_score("alibi")),
        Case("softcap, causal", causal, get_score("softcap", cap=30.0), fa4={"causal": True, "softcap": 30.0}),
        Case(
            "packed documents",
            causal & get_mask("document", document_ids=ids),
            fa4={"causal": True},
            batch=1,
            length=total,
            lengths=documents.to(device),
        ),
    ]


def bench(
    names: Iterable[str] | None = None,
    device: str | None = None,
    file: str | None = None,
    sizes: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Measure, print a table, and write the figures to a JSON file where one is named."""
    at = chosen(device)
    large = at.type == "cuda"
    batch, heads, length = (16, 16, 8192) if large else (1, 8, 4096)
    dtype = torch.bfloat16 if large else torch.float32
    known = cases(batch, heads, length, at)
    wanted = list(names or [c.name for c in known if large or c.lengths is None])
    for name in wanted:
        if name not in [c.name for c in known]:
            there = ", ".join(repr(c.name) for c in known)
            raise ValueError(f"flexmasks bench: no case {name!r}; there are {there}.")
    results: dict[str, Any] = {"machine": machine(at), "rows": []}
    todo = [(size, case) for size in sizes or ((64, 128) if large else (64,)) for case in known if case.name in wanted]
    steps = {}
    for size, case in todo:
        shape = (case.batch or batch, heads, case.length or length, size)
        steps[f"{case.name}, head size {size}"] = functools.partial(_rows, case, shape, dtype, at)
    with backward_twice():
        measure(results, steps, file)
    print(table(results))
    return results


def table(results: dict[str, Any]) -> str:
    """The figures of one run as text."""
    keys = [
        "case",
        "shape",
        "who",
        "forward_ms",
        "forward_tflops",
        "backward_ms",
        "backward_tflops",
        "first_s",
        "peak_mb",
    ]
    rows = [[r.get(k) for k in keys] for r in results["rows"]]
    about = ", ".join(str(v) for k, v in results["machine"].items() if k != "device_type")
    header = ["case", "shape", "who", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "first call s", "peak MB"]
    return f"{about}\n{tabulate(rows, headers=header, floatfmt='.4g', missingval='')}"


_RIVALS = {
    "flex_attention": ("flex_attention",),
    "FlashAttention 4, called directly": ("FA4", "FA4, varlen"),
    "SDPA's own causal, or varlen_attn": ("SDPA", "torch varlen_attn"),
    "SDPA + mask": ("SDPA + mask",),
}


def markdown(results: dict[str, Any]) -> str:
    """The README's table, of a run on a GPU: forward / backward milliseconds, and how much faster both are here."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for r in results["rows"]:
        rows.setdefault((r["case"], r["shape"]), {})[r["who"]] = r
    table = []
    for (case, shape), found in rows.items():
        ours = found["flexmasks"]
        cells = [
            case,
            shape.rpartition("x")[2],
            _ms(ours),
            f"{ours['forward_tflops']:.0f} / {ours['backward_tflops']:.0f}",
        ]
        for names in _RIVALS.values():
            rival = next((found[n] for n in names if n in found), None)
            cells.append("" if rival is None else f"{_ms(rival)} ({_total(rival) / _total(ours):.2f} x)")
        table.append(cells)
    shapes = list(dict.fromkeys(shape.rpartition("x")[0] for _, shape in rows))
    machine = results["machine"]
    about = (
        f"On one {machine['device']}, torch {machine['torch']}, {results['rows'][0]['dtype']}, batch x heads x length "
        f"{' and, packed, '.join(shapes)}: forward / backward ms, medians of interleaved runs, and in brackets the "
        "time of both over that of flexmasks."
    )
    header = ["case", "D", "flexmasks", "TFLOP/s", *_RIVALS]
    return f"{about}\n\n{tabulate(table, headers=header, tablefmt='github')}"


def _ms(row: dict[str, Any]) -> str:
    return f"{row['forward_ms']:.3g} / {row['backward_ms']:.3g}"


def _total(row: dict[str, Any]) -> float:
    return float(row["forward_ms"] + row["backward_ms"])


def _rows(
    case: Case, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """The figures of one case, one row for each implementation."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    trains = device.type == "cuda"
    if trains:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    upstream = torch.randn_like(q)
    batch, heads, length, size = shape
    found = case.mask.blocks(length, batch=batch, heads=heads, device=device)
    visible = (1 - found.sparsity) * (1 - found.hidden) * length * length * batch * heads
    calls = _implementations(case, shape, device)
    outputs: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Any]] = {}
    for who in list(calls):
        try:
            torch._dynamo.reset()
            start = time.perf_counter()
            outputs[who] = calls[who](q, k, v)
            if trains:
                torch.autograd.grad(outputs[who], (q, k, v), upstream, retain_graph=True)
            synchronize(device)
            first = time.perf_counter() - start
            peak = _peak(calls[who], q, k, v, upstream) if trains else None
        except Exception as error:  # of a rival that is not made for this
            if who == "flexmasks":
                raise
            progress(f"{who} left out: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}")
            del calls[who]
            outputs.pop(who, None)
            continue
        rows[who] = {
            "case": case.name,
            "shape": "x".join(map(str, shape)),
            "dtype": str(dtype).removeprefix("torch."),
            "who": who,
            "first_s": round(first, 2),
            "peak_mb": None if peak is None else round(peak / 1e6),
            "difference": float((outputs[who].detach() - outputs["flexmasks"].detach()).abs().max()),
        }
    timed: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {who: lambda call=call: call(q, k, v) for who, call in calls.items()},  # type: ignore[misc]
    }
    if trains:
        timed["backward"] = {
            who: lambda out=out: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)  # type: ignore[misc]
            for who, out in outputs.items()
        }
    for name, products in (("forward", 2), ("backward", 5)):  # each of 2 operations for a pair and a number of a head
        for who, (ms, spread) in interleaved(timed.get(name, {}), device, _RUNS).items():
            rows[who][f"{name}_ms"], rows[who][f"{name}_iqr"] = float(f"{ms:.5g}"), float(f"{spread:.3g}")
            rows[who][f"{name}_tflops"] = float(f"{products * 2 * size * visible / ms / 1e9:.4g}")
    return list(rows.values())


def _peak(call: _Attend, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> int:
    """Bytes in use at most of a forward and a backward pass, beyond those before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(call(q, k, v), (q, k, v), upstream)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _implementations(case: Case, shape: tuple[int, int, int, int], device: torch.device) -> dict[str, _Attend]:
    """Ours; compiled flex_attention with its defaults; SDPA; FlashAttention 4 and torch's varlen, called directly."""
    batch, heads, length, _ = shape
    made = block_mask(case.mask, length, batch=batch, heads=heads, device=device)
    size = Size(batch, heads, length, length, device)
    score_mod = None if case.score is None else case.score.bind(case.score.resolve(size))
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    found: dict[str, _Attend] = {
        "flexmasks": lambda q, k, v: attention(q, k, v, mask=case.mask, score=case.score),
        "flex_attention": lambda q, k, v: compiled(q, k, v, score_mod, made),
    }
    if device.type != "cuda":
        found["flex_attention"] = lambda q, k, v: separate(compiled(q, k, v, score_mod, made))
    if case.score is None and case.lengths is None:
        seen = dense_mask(case.mask, length, batch=batch, heads=heads, device=device)
        found["SDPA + mask"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    if case.name in ("full", "causal"):
        causal = case.name == "causal"
        found["SDPA"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if device.type == "cuda":
            for who, backend in (
                ("SDPA, FA2", SDPBackend.FLASH_ATTENTION),
                ("SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION),
            ):
                found[who] = _pinned(backend, causal)
    if device.type == "cuda":
        found |= _direct(case, device)
    return found


def _pinned(backend: SDPBackend, causal: bool) -> _Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def _direct(case: Case, device: torch.device) -> dict[str, _Attend]:
    """FlashAttention 4 and torch's varlen attention, where they are here and know the mask."""
    found: dict[str, _Attend] = {}
    if case.fa4 is None:
        return found
    arguments = case.fa4
    try:
        fa4 = importlib.import_module("flash_attn.cute")
    except Exception:  # not here, or not for this machine
        fa4 = None
    if case.lengths is None:
        if fa4 is not None:

            def dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
                out = fa4.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **arguments)
                return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

            found["FA4"] = dense
        return found
    starts = F.pad(case.lengths.cumsum(0), (1, 0)).int()
    longest = int(case.lengths.max())

    def varlen(call: Callable[..., Any]) -> _Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            out = call(*(x[0].transpose(0, 1) for x in (q, k, v)))
            return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]

        return attend

    if fa4 is not None:
        known = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        found["FA4, varlen"] = varlen(lambda q, k, v: fa4.flash_attn_varlen_func(q, k, v, causal=True, **known))
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return found
    by_window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if by_window else {"is_causal": True}
    found["torch varlen_attn"] = varlen(
        lambda q, k, v: varlen_attn(q, k, v, starts, starts, longest, longest, **causal)
    )
    return found
