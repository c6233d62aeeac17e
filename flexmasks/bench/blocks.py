"""`python -m flexmasks bench blocks`: what finding block masks costs, against torch's create_block_mask."""

from __future__ import annotations

import ctypes
import difflib
import functools
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexmasks import compat
from flexmasks.attention import block_mask
from flexmasks.bench.console import device_name, progress, synchronize
from flexmasks.cache import clear_caches
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.examples import at_most, fitting, on_device
from flexmasks.spec.registry import list_masks
from flexmasks.spec.values import Mask, Score

LENGTHS = {"cuda": (4096, 8192, 65536, 262144, 1048576), "cpu": (4096, 16384, 65536, 262144)}
EXAMPLE_LENGTH = 32768
_COMPARED_ON_CPU = 16384  # eager create_block_mask needs 5 GB there, and four times as much at twice the length
_RUNS = 9
_STATUS = Path("/proc/self/status")


def masks(length: int, device: torch.device) -> dict[str, Mask]:
    """The masks that are measured, at their parameters for a length; a canvas is as square as powers of two allow."""
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
    """Measure, print a table, and write the figures to a JSON file where one is named.

    Args:
        lengths: numbers of tokens; LENGTHS by default, and EXAMPLE_LENGTH of registered examples.
        names: of `masks`, and of other registered masks, which are measured at their examples.
        registry: every registered mask at its example, and none of `masks`.
        device: cuda or cpu; by default a GPU where there is one.
        file: the JSON file.
        resume: go on with what the file has of an earlier run.
    """
    at = chosen(device)
    lengths = tuple(lengths)
    known = masks(4096, at)
    names = tuple(names)
    known_names(names, known)
    if registry:
        todo = [(m.name, True) for m in list_masks()]
    else:
        todo = [(name, name not in known) for name in names or known]
    steps = {
        f"{name}{', example' * registered}, {n} tokens": functools.partial(_row, name, registered, n, at)
        for name, registered in todo
        for n in lengths or ((EXAMPLE_LENGTH,) if registered else LENGTHS[at.type])
    }
    results: dict[str, Any] = {"benchmark": "blocks", "machine": machine(at), "rows": []}
    longest = max(lengths or ((EXAMPLE_LENGTH,) if all(r for _, r in todo) else LENGTHS[at.type]))
    results["first_call_tokens"] = longest
    results["first_call_ms"] = _milliseconds(lambda: block_mask("causal", longest, device=at), at)
    clear_caches()
    measure(results, steps, file, resume)
    print(table(results))
    return results


def chosen(device: str | None) -> torch.device:
    """The device of that name; by default a GPU where there is one."""
    at = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if at.type == "cuda" else at


def known_names(masks: Iterable[str], others: Iterable[str]) -> None:
    """ValueError for a name that is neither a registered mask's nor one of the others."""
    others = list(others)
    registered = {m.name for m in list_masks()}
    for name in masks:
        if name not in registered and name not in others:
            near = difflib.get_close_matches(name, [*registered, *others], n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`python -m flexmasks list` names them."
            raise ValueError(f"flexmasks bench: no mask {name!r} to measure; {hint}")


def measure(
    results: dict[str, Any],
    steps: Mapping[str, Callable[[], list[dict[str, Any]]]],
    file: str | None,
    resume: bool = False,
) -> None:
    """Add the rows of each step, by its description, to results["rows"], and write these to the file as they come.

    A step that raises is named in results["failed"] and on stderr, with what it raised, and the others go on. With
    `resume` what the file has of this machine stays, and what it lacks is measured.
    """
    results["measured"] = []
    if file is not None and (Path(file).is_dir() or not os.access(Path(file).resolve().parent, os.W_OK)):
        raise ValueError(f"flexmasks bench: {file} cannot be written.")
    if resume and file is not None and Path(file).exists():
        try:
            earlier = json.loads(Path(file).read_text())
        except ValueError:
            earlier = None
        of_another = not isinstance(earlier, dict) or earlier.get("benchmark") != results["benchmark"]
        if of_another or "measured" not in earlier:
            raise ValueError(f"flexmasks bench: {file} is not of a run of this benchmark that can go on.")
        if earlier["machine"] != results["machine"]:
            raise ValueError(f"flexmasks bench: {file} is of another machine or torch, {earlier['machine']}.")
        results |= {name: earlier[name] for name in ("rows", "measured")}
    for n, (what, rows) in enumerate(steps.items()):
        if what in results["measured"]:
            continue
        progress(f"{n + 1} of {len(steps)}: {what}")
        try:
            results["rows"] += rows()
            results["measured"].append(what)
        except Exception as error:  # of a mask of the user's, or of what memory there is
            results.setdefault("failed", {})[what] = f"{type(error).__name__}: {error}"[:2000]
        if file is not None:  # what is measured stays, whatever happens next
            written = Path(f"{file}.part")
            written.write_text(json.dumps(results, indent=1) + "\n")
            written.replace(file)
    progress("")
    for what, reason in results.get("failed", {}).items():
        print(f"{what} failed: {reason.splitlines()[0]}", file=sys.stderr)


@contextmanager
def backward_twice() -> Iterator[None]:
    """torch.compile keeps what a second backward pass needs, which it otherwise refuses."""
    with compat.donated_buffers_off():
        yield


def table(results: dict[str, Any]) -> str:
    """The figures of one run as text."""
    torch_name = "compiled" if results["machine"]["device_type"] == "cuda" else "eager"
    header = ["mask", "tokens", "ms", "IQR", "again, ms", "peak, MB", "its size, MB", "blocks", "looked at", "partial"]
    header += [f"torch {torch_name}, ms", "peak, MB", "faster", "equal"]
    rows = []
    for r in results["rows"]:
        row = [r["mask"], r["length"], r["ms"], r["iqr"], r["again_ms"], r["peak_mb"], r["size_mb"]]
        row += [r["blocks"], r["undecided"], r["partial"]]
        if "torch_ms" in r:
            row += [r["torch_ms"], r["torch_peak_mb"], f"{r['torch_ms'] / r['ms']:.1f} x", r["equal"]]
        rows.append(row)
    first = f"first call of the process, {results['first_call_tokens']} tokens, causal: "
    about = ", ".join(str(v) for k, v in results["machine"].items() if k != "device_type")
    return f"{about}\n{tabulate(rows, headers=header, floatfmt='.3g')}\n{first}{results['first_call_ms']:.0f} ms"


def markdown(gpu: dict[str, Any], cpu: dict[str, Any]) -> str:
    """The README's tables, of a run on a GPU and one on a CPU."""
    by_key = {(r["mask"], r["length"]): r for r in gpu["rows"]}
    names = list(dict.fromkeys(r["mask"] for r in gpu["rows"]))
    lengths = sorted({r["length"] for r in gpu["rows"]})
    growth = [
        [
            f"{length:,}",
            *(f"{by_key[name, length]['ms']:.2g} ({by_key[name, length]['undecided']:,})" for name in names),
        ]
        for length in lengths
    ]
    longest, short = lengths[-1], 8192
    against = []
    for name in names:
        at_long, at_short = by_key[name, longest], by_key[name, short]
        on_cpu = next(
            r for r in cpu["rows"] if r["mask"] == name and "torch_ms" in r and r["length"] == _COMPARED_ON_CPU
        )
        against.append(
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
    names_of = [f"{r['machine']['device']}, torch {r['machine']['torch']}" for r in (gpu, cpu)]
    first = tabulate(
        against,
        headers=[
            "mask",
            f"{longest:,} tokens: ms here / compiled",
            "faster",
            "peak GB here / compiled",
            f"{short:,}: ms here, again / compiled",
            f"CPU, {_COMPARED_ON_CPU:,}: ms here / eager",
            "faster",
            "less memory",
        ],
        tablefmt="github",
        disable_numparse=True,
    )
    second = tabulate(growth, headers=["tokens", *names], tablefmt="github", disable_numparse=True)
    size = by_key[names[0], longest]["size_mb"] / 1e3
    return (
        f"Against torch's `create_block_mask`, on one {names_of[0]}, and on {names_of[1]}; medians. The BlockMask "
        f"itself takes {size:.2f} GB at {longest:,} tokens. Compilation of torch's, {_span(gpu['rows'])} for each "
        "function and length, is left out; here nothing is compiled. At short lengths a mask that is new, or whose "
        "tensors changed, takes some milliseconds of the host, longer than torch's compiled function; one that was "
        "seen before is found "
        f'in the cache ("again"):\n\n{first}\n\n'
        f"Milliseconds by length on the GPU, and in brackets how many blocks had to be looked at:\n\n{second}"
    )


def undecided_markdown(results: dict[str, Any]) -> str:
    """The README's table of what is looked at, of a run of every registered mask: where it is much, or too much."""
    rows = sorted(results["rows"], key=lambda r: r["partial"] - r["undecided"])
    exact = sum(r["undecided"] == r["partial"] for r in rows)
    many = [r for r in rows if r["undecided"] > r["blocks"] / 10 or r["undecided"] > r["partial"]]
    lengths = sorted({r["length"] for r in rows}, reverse=True)
    slowest = max(rows, key=lambda r: r["ms"])
    made = results["machine"]
    about = (
        f"Of the {len(rows)} registered masks, at their examples and {', '.join(f'{n:,}' for n in lengths)} tokens, "
        f"{exact} look at no block but partial ones. On {made['device']}, torch {made['torch']}, that takes "
        f"{statistics.median(r['ms'] for r in rows):.2g} ms in the median, at most {slowest['ms']:.3g} "
        f"(`{slowest['mask']}`). Those that look at other blocks, or at more than a tenth of all:"
    )
    table = [
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
    return f"{about}\n\n{tabulate(table, headers=header, tablefmt='github', disable_numparse=True)}"


def machine(device: torch.device) -> dict[str, str]:
    """What a figure depends on."""
    return {
        "device": device_name(device).removeprefix("NVIDIA "),
        "device_type": device.type,
        "torch": torch.__version__.partition("+")[0],
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def _row(name: str, registered: bool, length: int, device: torch.device) -> list[dict[str, Any]]:
    """The figures of one mask at one length; of a registered one at a shorter length where its example needs that."""
    if registered:

        def there(value: Mask | Score, length: int) -> Any:
            moved = on_device(value, device)
            moved.blocks(length, device=device)
            return moved

        length, _, mask = fitting("mask", name, at_most(length), there)
    else:
        mask = masks(length, device)[name]

    def ours() -> BlockMask:
        return block_mask(mask, length, device=device)

    def fresh() -> BlockMask:
        clear_caches()
        return ours()

    calls: dict[str, Callable[[], BlockMask]] = {"ours": fresh}
    compile_s = None
    if device.type == "cuda" or length <= _COMPARED_ON_CPU:
        mod = fresh().mask_mod
        make = create_block_mask
        if device.type == "cuda":
            torch.compiler.reset()
            make = torch.compile(create_block_mask, dynamic=False)

        def theirs() -> BlockMask:
            return make(mod, 1, 1, length, length, device=str(device))

        start = time.perf_counter()
        want = theirs()
        synchronize(device)
        compile_s = time.perf_counter() - start
        got = ours()
        equal = all(torch.equal(a, b) for a, b in zip(_tensors(got), _tensors(want), strict=True))
        del want, got
        calls["torch"] = theirs
    times: dict[str, list[float]] = {who: [] for who in calls}
    runs = _RUNS if device.type == "cuda" else 5
    for run in range(runs + 1):
        for who, call in calls.items():
            elapsed = _milliseconds(call, device)
            if run and not (who == "torch" and run > 3 and elapsed > 500):
                times[who].append(elapsed)
    peak = {}
    for who, call in calls.items():
        clear_caches()
        with _peak_memory(device) as used:
            call()
        peak[who] = used[0]
    found = mask.blocks(length, device=device)
    again = statistics.median(_milliseconds(ours, device) for _ in range(20))
    quarters = statistics.quantiles(times["ours"], n=4)
    row = {
        "mask": name,
        "length": length,
        "ms": round(statistics.median(times["ours"]), 4),
        "iqr": round(quarters[2] - quarters[0], 4),
        "again_ms": round(again, 4),
        "peak_mb": round(peak["ours"] / 1e6, 2),
        "size_mb": round(sum(t.numel() * t.element_size() for t in _tensors(found.block_mask)) / 1e6, 2),
        "blocks": found.total,
        "undecided": found.undecided,
        "partial": found.partial,
    }
    if registered:
        row["example"] = repr(mask)
    if compile_s is not None:
        row["torch_ms"] = round(statistics.median(times["torch"]), 4)
        row["torch_first_s"] = round(compile_s, 2)
        row["torch_peak_mb"] = round(peak["torch"] / 1e6, 2)
        row["equal"] = equal
    clear_caches()
    return [row]


def _tensors(made: BlockMask) -> list[Tensor]:
    return [t for t in made.as_tuple() if isinstance(t, Tensor)]


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[list[float]]:
    """Bytes in use at most, beyond those before; on a CPU those of the process, NaN where that is not told."""
    used = [math.nan]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield used
        torch.cuda.synchronize(device)
        used[0] = torch.cuda.max_memory_allocated(device) - before
    elif _STATUS.exists():
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # starts the count of the peak anew
        before = _resident("VmRSS")
        yield used
        used[0] = max(_resident("VmHWM") - before, 1)
    else:
        yield used


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _span(rows: list[dict[str, Any]]) -> str:
    seconds = sorted(r["torch_first_s"] for r in rows if "torch_first_s" in r)
    return f"{seconds[0]:.0f} to {seconds[-1]:.0f} s"
