"""`python recipes/benchmark.py blocks`: finding block masks, against create_block_mask."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks.examples import at_most, fitting, on_device
from benchmarks.memory import peak_bytes
from benchmarks.results import Row, check_mask_names, choose_device, machine, machine_line, run_steps
from flexmasks.attention import block_mask
from flexmasks.bench.clock import interleaved, synchronize, wall_milliseconds
from flexmasks.cache import clear_caches
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.registry import list_masks
from flexmasks.spec.values import Mask, Score

LENGTHS = {"cuda": (4096, 8192, 65536, 262144, 1048576), "cpu": (4096, 16384, 65536, 262144)}  # tokens
EXAMPLE_LENGTH = 32768  # tokens, for registered masks at their examples
_SHORT_LENGTH = 8192  # tokens, for the table's column of a short length
_COMPARED_ON_CPU = (
    16384  # tokens; eager create_block_mask needs 5 GB for them, and four times as much at twice the length
)
_RUNS = {"cuda": 9, "cpu": 5}


def masks(length: int, device: torch.device) -> dict[str, Mask]:
    """Return the usual masks; a canvas has sides of powers of two."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.rand(length, generator=generator) < 1 / 1000
    rows = 1 << (int(math.log2(length)) // 2)
    canvas = {"height": rows, "width": length // rows}
    return {
        "causal": get_mask("causal"),
        "sliding_window": get_mask("sliding_window", window=1024),
        "document": get_mask("document", document_ids=ends.cumsum(0).to(device)),
        "prefix_lm": get_mask("prefix_lm", prefix_len=2048),
        "grouped_tril": get_mask("grouped_tril", seq_lens=torch.tensor([length * 3 // 4], device=device)),
        "natten": get_mask("natten", kernel=7, **canvas),
        "sasa": get_mask("sasa", window=8, **canvas),
        "dilated window": get_mask(lambda b, h, q, kv: (kv <= q) & (q - kv < 4096) & ((q - kv) % 4 == 0)),
        "every 100th key": get_mask(lambda b, h, q, kv: (kv <= q) & (kv % 100 == 99)),
    }


def blocks(
    lengths: Iterable[int] = (),
    names: Iterable[str] = (),
    *,
    registry: bool = False,
    device: str | None = None,
    file: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure block masks, print a table, and write the figures to a file.

    Args:
        lengths: numbers of tokens; by default LENGTHS, and EXAMPLE_LENGTH for registered examples.
        names: of `masks`, and of other registered masks, which are measured at their examples.
        registry: measure every registered mask at its example, and none of `masks`.
        device: cuda or cpu; by default a GPU if the machine has one.
        file: the JSON file.
        resume: keep the rows that the file has of an earlier run.
    """
    at = choose_device(device)
    lengths, names = tuple(lengths), tuple(names)
    usual = masks(4096, at)
    check_mask_names(names, usual)
    if registry:
        chosen = [(mask.name, True) for mask in list_masks()]
    else:
        chosen = [(name, name not in usual) for name in names or usual]
    todo = [
        (name, registered, length)
        for name, registered in chosen
        for length in lengths or ((EXAMPLE_LENGTH,) if registered else LENGTHS[at.type])
    ]
    steps = {
        f"{name}{', example' * registered}, {length} tokens": functools.partial(_row, name, registered, length, at)
        for name, registered, length in todo
    }
    results: dict[str, Any] = {"benchmark": "blocks", "machine": machine(at), "rows": []}
    longest = max(length for _, _, length in todo)
    results["first_call_tokens"] = longest
    results["first_call_ms"] = wall_milliseconds(lambda: block_mask("causal", longest, device=at), at)
    clear_caches()
    run_steps(results, steps, file, resume)
    print(table(results))
    return results


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    torch_name = "compiled" if results["machine"]["device_type"] == "cuda" else "eager"
    header = ["mask", "tokens", "ms", "IQR", "again, ms", "peak, MB", "its size, MB", "blocks", "looked at", "partial"]
    header += [f"torch {torch_name}, ms", "peak, MB", "faster", "equal"]
    keys = ("mask", "length", "ms", "iqr", "again_ms", "peak_mb", "size_mb", "blocks", "undecided", "partial")
    rows = []
    for r in results["rows"]:
        row = [r[key] for key in keys]
        if "torch_ms" in r:
            row += [r["torch_ms"], r["torch_peak_mb"], f"{r['torch_ms'] / r['ms']:.1f} x", r["equal"]]
        rows.append(row)
    first = f"first call of the process, {results['first_call_tokens']} tokens, causal: "
    text = tabulate(rows, headers=header, floatfmt=".3g")
    return f"{machine_line(results)}\n{text}\n{first}{results['first_call_ms']:.0f} ms"


def markdown(gpu: dict[str, Any], cpu: dict[str, Any]) -> str:
    """Return the tables of two runs: against torch, and by length."""
    by_key = {(r["mask"], r["length"]): r for r in gpu["rows"]}
    names = list(dict.fromkeys(r["mask"] for r in gpu["rows"]))
    lengths = sorted({r["length"] for r in gpu["rows"]})
    longest = lengths[-1]
    growth = [
        [f"{n:,}", *(f"{by_key[name, n]['ms']:.2g} ({by_key[name, n]['undecided']:,})" for name in names)]
        for n in lengths
    ]
    growth_table = tabulate(growth, headers=["tokens", *names], tablefmt="github", disable_numparse=True)
    gpu_name, cpu_name = (f"{r['machine']['device']}, torch {r['machine']['torch']}" for r in (gpu, cpu))
    size = by_key[names[0], longest]["size_mb"] / 1e3
    seconds = sorted(r["torch_first_s"] for r in gpu["rows"] if "torch_first_s" in r)
    return (
        f'flexmasks ("here") against torch\'s `create_block_mask`, on one {gpu_name}, and on {cpu_name}; medians. The '
        f"BlockMask itself takes {size:.2f} GB at {longest:,} tokens. The times leave out the compilation of "
        f"`create_block_mask`, {seconds[0]:.0f} to {seconds[-1]:.0f} s for each function and length; flexmasks "
        "compiles nothing. At short lengths a new mask, or a mask with changed tensors, takes some milliseconds on the "
        "host, longer than compiled `create_block_mask`. A mask that was seen before comes from the cache "
        f'("again"):\n\n{_comparison(gpu["rows"], cpu["rows"], names, longest)}\n\n'
        "Milliseconds by length on the GPU, and in brackets the number of blocks looked at element by "
        f"element:\n\n{growth_table}"
    )


def _comparison(gpu_rows: list[Row], cpu_rows: list[Row], names: list[str], longest: int) -> str:
    """Return the table against torch, on a GPU and on a CPU."""
    gpu = {(r["mask"], r["length"]): r for r in gpu_rows}
    cpu = {r["mask"]: r for r in cpu_rows if "torch_ms" in r and r["length"] == _COMPARED_ON_CPU}
    rows = []
    for name in names:
        at_long, at_short, on_cpu = gpu[name, longest], gpu[name, _SHORT_LENGTH], cpu[name]
        rows.append(
            [
                name,
                f"{at_long['ms']:.3g} / {at_long['torch_ms']:.0f}",
                f"{at_long['torch_ms'] / at_long['ms']:.0f} x",
                f"{at_long['peak_mb'] / 1e3:.2f} / {at_long['torch_peak_mb'] / 1e3:.2f}",
                f"{at_short['ms']:.2f}, {at_short['again_ms']:.3f} / {at_short['torch_ms']:.3f}",
                f"{on_cpu['ms']:.2g} / {on_cpu['torch_ms']:.0f}",
                f"{on_cpu['torch_ms'] / on_cpu['ms']:.0f} x",
                f"{on_cpu['torch_peak_mb'] / on_cpu['peak_mb']:.0f} x",
            ]
        )
    header = [
        "mask",
        f"{longest:,} tokens: ms here / compiled",
        "faster",
        "peak GB here / compiled",
        f"{_SHORT_LENGTH:,}: ms here, again / compiled",
        f"CPU, {_COMPARED_ON_CPU:,}: ms here / eager",
        "faster",
        "less memory",
    ]
    return tabulate(rows, headers=header, tablefmt="github", disable_numparse=True)


def undecided_markdown(results: dict[str, Any]) -> str:
    """Return the table of registered masks with many undecided blocks."""
    rows = sorted(results["rows"], key=lambda r: r["partial"] - r["undecided"])
    exact = sum(r["undecided"] <= r["partial"] for r in rows)
    many = [r for r in rows if r["undecided"] > r["blocks"] / 10 or r["undecided"] > r["partial"]]
    lengths = sorted({r["length"] for r in rows}, reverse=True)
    slowest = max(rows, key=lambda r: r["ms"])
    about = (
        f"The {len(rows)} registered masks are measured at their examples with {', '.join(f'{n:,}' for n in lengths)} "
        f"tokens. For {exact} of them only partial blocks are looked at element by element. On "
        f"{results['machine']['device']}, torch {results['machine']['torch']}, finding the blocks takes "
        f"{statistics.median(r['ms'] for r in rows):.2g} ms in the median, and at most "
        f"{slowest['ms']:,.0f} ms (`{slowest['mask']}`). The table lists the masks for which "
        "other blocks are looked at, too, or more than a tenth of all blocks:"
    )
    cells = [
        [
            f"`{r['mask']}`",
            f"{r['blocks']:,}",
            f"{r['undecided']:,} ({r['undecided'] / r['blocks']:.1%})",
            f"{r['partial']:,}",
            f"{r['undecided'] - r['partial']:,}",
        ]
        for r in many
    ]
    header = ["mask", "blocks", "looked at", "of these partial", "not partial"]
    return f"{about}\n\n{tabulate(cells, headers=header, tablefmt='github', disable_numparse=True)}"


def _row(name: str, registered: bool, length: int, device: torch.device) -> list[Row]:
    """Return the figures of one mask.

    A registered mask is measured at its example, at the length or at the first shorter length that fits.
    """
    if registered:
        length, _, mask = fitting("mask", name, at_most(length), functools.partial(_usable, device))
    else:
        mask = masks(length, device)[name]

    def ours() -> BlockMask:
        return block_mask(mask, length, device=device, check=True)  # as exact as torch's

    def ours_uncached() -> BlockMask:
        clear_caches()
        return ours()

    calls: dict[str, Callable[[], BlockMask]] = {"ours": ours_uncached}
    compared: Row = {}
    if device.type == "cuda" or length <= _COMPARED_ON_CPU:
        calls["torch"] = _torch_call(ours_uncached(), length, device)
        start = time.perf_counter()
        expected = calls["torch"]()
        synchronize(device)
        compared["torch_first_s"] = round(time.perf_counter() - start, 2)
        equal = all(torch.equal(a, b) for a, b in zip(_tensors(ours()), _tensors(expected), strict=True))
        del expected  # its memory would count as in use before the call
    times = interleaved(calls, device, _RUNS[device.type], wall_milliseconds)
    peak_mb = {}
    for who, call in calls.items():
        clear_caches()
        peak_mb[who] = round(peak_bytes(call, device) / 1e6, 2)
    counted = mask.blocks(length, device=device)
    row: Row = {
        "mask": name,
        "length": length,
        "ms": round(times["ours"][0], 4),
        "iqr": round(times["ours"][1], 4),
        "again_ms": round(interleaved({"again": ours}, device, 20, wall_milliseconds)["again"][0], 4),
        "peak_mb": peak_mb["ours"],
        "size_mb": round(sum(t.numel() * t.element_size() for t in _tensors(counted.block_mask)) / 1e6, 2),
        "blocks": counted.total,
        "undecided": counted.undecided,
        "partial": counted.partial,
    }
    if registered:
        row["example"] = repr(mask)
    if compared:
        row |= {"torch_ms": round(times["torch"][0], 4), **compared, "torch_peak_mb": peak_mb["torch"], "equal": equal}
    clear_caches()
    return [row]


def _usable(device: torch.device, value: Mask | Score, length: int) -> Any:
    """Return an example on the device, or raise if it does not fit."""
    moved = on_device(value, device)
    moved.blocks(length, device=device)
    return moved


def _torch_call(made: BlockMask, length: int, device: torch.device) -> Callable[[], BlockMask]:
    """Return a call of create_block_mask, compiled on a GPU, for the same function."""
    create = create_block_mask
    if device.type == "cuda":
        torch.compiler.reset()
        create = torch.compile(create_block_mask, dynamic=False)
    function = made.mask_mod
    return lambda: create(function, 1, 1, length, length, device=str(device))


def _tensors(made: BlockMask) -> list[Tensor]:
    return [t for t in made.as_tuple() if isinstance(t, Tensor)]
