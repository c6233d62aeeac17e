"""`python recipes/benchmark.py data`: masks as functions and as data, in the same kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import private_torch
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.runner import measure_passes
from flexmasks.backends import fa4_package, flex, flex_flash, forms
from flexmasks.backends.call import Call, Plans
from flexmasks.bench.clock import progress, wall_milliseconds
from flexmasks.cache import clear_caches
from flexmasks.orders import tile_order
from flexmasks.plans.data import MaskData, TooLargeForData, data_of
from flexmasks.request import Request
from flexmasks.road import plan_call
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.values import Mask

FUNCTION, DATA = "function", "data"  # the forms in which a kernel gets a mask
_TORCH_NAMES = {"flex": None, "flex_flash": "FLASH"}  # names of backends in kernel_options
_DOCUMENT = 600  # mean number of tokens of a document
_DENSITY = 0.1  # the fraction of a random pattern's blocks that is visible
_RUNS, _QUICK_RUNS = 7, 2
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # largest difference of the outputs of two forms


class Scale(NamedTuple):
    """Sizes of the cases."""

    heads: int
    head_size: int
    video: tuple[int, int, int]
    kernel: tuple[int, int, int]
    tile: tuple[int, int, int]  # as many voxels as a block has tokens
    image: tuple[int, int]
    length: int
    pattern_block: int  # half the size of the kernels' blocks, so that these are partial
    pattern_lengths: tuple[int, ...]


_GPU = Scale(8, 128, (30, 48, 80), (18, 24, 24), (2, 8, 8), (64, 128), 8192, 64, (8192, 115200))
_CPU = Scale(8, 64, (8, 16, 16), (5, 7, 7), (2, 4, 8), (32, 64), 2048, 32, (2048,))
_QUICK = Scale(2, 32, (4, 8, 8), (3, 3, 3), (2, 4, 4), (16, 16), 256, 16, (256,))


@dataclass(frozen=True)
class Case:
    """A mask to measure, and the number of tokens."""

    name: str
    length: int
    mask: Mask | Callable[..., Tensor]


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Return all cases."""
    generator = torch.Generator().manual_seed(0)
    length = scale.length
    causal = get_mask("causal")
    made: list[Case] = []

    def add(name: str, mask: Mask | Callable[..., Tensor], length: int = length) -> None:
        made.append(Case(name, length, mask))

    depth, height, width = scale.video
    video = {"depth": depth, "height": height, "width": width, "kernel": scale.kernel}
    about = f"natten3d {_by(scale.kernel)} on {_by(scale.video)}"
    order = tile_order(scale.video, scale.tile).to(device)
    add(f"{about}, row-major", get_mask("natten3d", **video), math.prod(scale.video))
    add(f"{about}, tiles of {_by(scale.tile)}", get_mask("natten3d", **video, order=order), math.prod(scale.video))
    rows, columns = scale.image
    dilation = min(4, rows // 7)
    for name, more in (("", {}), (f", dilation {dilation}", {"dilation": dilation})):
        natten = get_mask("natten", height=rows, width=columns, kernel=7, **more)
        add(f"natten 7 x 7 on {_by(scale.image)}{name}", natten, rows * columns)
    window = min(1024, length // 4)
    ids = (torch.rand(length, generator=generator) < 1 / _DOCUMENT).cumsum(0).to(device)
    add("causal", causal)
    add("documents, causal", causal & get_mask("document", document_ids=ids))
    add(f"window of {window}", get_mask("sliding_window", window=window))
    add(f"window of {window}, dilation 4", get_mask("dilated_window", window=window, dilation=4))
    add("strided, stride 100", get_mask("strided", stride=100))
    add("checkerboard", lambda b, h, q, kv: (q + kv) % 2 == 0)
    for tokens in scale.pattern_lengths:
        count = -(-tokens // scale.pattern_block)
        layout = (torch.rand(count, count, generator=generator) < _DENSITY).to(device)
        pattern = get_mask("block_sparse", visible_blocks=layout, block=scale.pattern_block)
        add(f"random blocks of {scale.pattern_block}", pattern, tokens)
    add("residues and tables", _residues(generator, device))
    add("bits of q ^ kv", _few_bits)
    return made


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def _residues(generator: torch.Generator, device: torch.device) -> Callable[..., Tensor]:
    """Return a function of remainders and tables that is dear to evaluate."""
    of_q, of_kv, of_both = (torch.randint(0, 1000, (n,), generator=generator).to(device) for n in (1021, 509, 1024))

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        total = of_q[q % 1021] + of_kv[kv % 509] + of_both[(q + kv) % 1024]
        total = total + q % 7 * (kv % 11) + (q + 3 * kv) % 13 + (q // 5 + kv // 3) % 17
        return total % 5 == 0

    return visible


def _few_bits(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Return whether at most 5 bits of the indices differ."""
    differing = q ^ kv
    count = differing & 1
    for place in range(1, 17):
        count = count + ((differing >> place) & 1)
    return count <= 5


# --- rows ---


def _rows(case: Case, backend: str, scale: Scale, device: torch.device, runs: int) -> list[Row]:
    """Return the figures of one case; backward passes on a GPU only.

    Raises ValueError if the outputs of the two forms differ by more than rounding.
    """
    torch.compiler.reset()
    clear_caches()
    torch.manual_seed(0)
    backward = device.type == "cuda"
    dtype = torch.bfloat16 if backward else torch.float32
    shape = (1, scale.heads, case.length, scale.head_size)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=backward) for _ in range(3))
    call = plan_call(q, k, v, Request(mask=case.mask, params={})).call
    blocks = call.mask.blocks()
    about: Row = {
        "case": case.name,
        "length": case.length,
        "shape": "x".join(map(str, shape)),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "partial": blocks.partial,
        "full": blocks.full,
    }
    left_out = {form: reason for form, reason in _refused(call, backend).items() if reason}
    try:
        made, about["data_ms"] = _made_data(call)
        about |= {"different": made.different, "data_bytes": 4 * sum(shape.numel() for shape in made.shapes)}
    except TooLargeForData as error:
        left_out[DATA] = str(error)
    implementations = {form: _attend(call, backend, form) for form in (FUNCTION, DATA) if form not in left_out}
    with private_torch.empty_compile_cache():
        measured, failed = measure_passes(implementations, (q, k, v), runs=runs, required=(), backward=backward)
    left_out |= failed
    for form, reason in left_out.items():
        progress(f"{case.name}: {form} on {backend} left out: {reason}")
    outputs = {form: figures.output.detach() for form, figures in measured.items()}
    if list(outputs) == [DATA] and backend == "flex_flash":  # FLASH may compute what it refuses, and then wrongly
        outputs["data on flex"] = _attend(call, "flex", DATA)(q, k, v).detach()
    difference = _difference(outputs, dtype)
    rows: list[Row] = []
    for form, figures in measured.items():
        rows.append({**about, "who": form, "difference": difference, **figures.entries()})
    rows = rows or [{**about, "who": ""}]
    if left_out:
        rows[0]["left_out"] = left_out
    return rows


def _refused(call: Call, backend: str) -> dict[str, str | None]:
    """Return why a backend may compute a form wrongly, or not at all, by form."""
    if backend == "flex_flash":
        return {FUNCTION: flex_flash.refuses(call), DATA: fa4_package.refuses_package(call)}
    return {FUNCTION: forms.why_bits(call)}


def _made_data(call: Call) -> tuple[MaskData, float]:
    """Return the mask as data, and the least milliseconds that making it took."""
    make = functools.partial(data_of, call.mask.blocks().block_mask, *call.q.shape[:2])
    with torch.no_grad():
        made = make()  # warms up
        return made, float(f"{min(wall_milliseconds(make, call.q.device) for _ in range(3)):.4g}")


def _attend(call: Call, backend: str, form: str) -> Callable[..., Tensor]:
    kernel = flex.FlexKernel(call, _TORCH_NAMES[backend], why_data="the benchmark asks" if form == DATA else "")
    forms = kernel.forms(Plans(call.mask))
    return lambda q, k, v: kernel(q, k, v, None, *forms)[0]


def _difference(outputs: dict[str, Tensor], dtype: torch.dtype) -> float | None:
    """Return the largest difference of two outputs, or None if there is one output."""
    if len(outputs) < 2:
        return None
    first, second = outputs.values()
    difference = float((first.float() - second.float()).abs().max())
    if not difference <= _TOLERANCE[dtype]:
        raise ValueError(f"the outputs by {' and by '.join(outputs)} differ by {difference:.3g}")
    return difference


# --- the command ---


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_cuda = device.type == "cuda"
    scale = _QUICK if quick else _GPU if is_cuda else _CPU
    backends = ["flex", "flex_flash"] if is_cuda and fa4_package.is_installed() else ["flex"]
    return {
        f"{case.name}, {case.length} tokens, {backend}": functools.partial(
            _rows, case, backend, scale, device, _QUICK_RUNS if quick else _RUNS
        )
        for case in cases(scale, device)
        for backend in backends
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("case", "case"), ("shape", "shape"), ("form", "who"), ("backend", "backend"),
        ("forward ms", "forward_ms"), ("IQR", "forward_iqr"), ("backward ms", "backward_ms"), ("IQR", "backward_iqr"),
        ("first call s", "first_s"), ("data ms", "data_ms"), ("partial", "partial"), ("full", "full"),
        ("different", "different"), ("data bytes", "data_bytes"), ("difference", "difference"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of one run, one for each backend."""
    by_backend: dict[str, dict[tuple[str, str], dict[str, Row]]] = {}
    for r in results["rows"]:
        by_backend.setdefault(r["backend"], {}).setdefault((r["case"], r["shape"]), {})[r["who"]] = r
    parts = [f"{measured_on(results)}; medians of interleaved runs."]
    parts += [_backend_markdown(backend, by_case) for backend, by_case in by_backend.items()]
    return "\n\n".join(parts)


def _backend_markdown(backend: str, by_case: dict[tuple[str, str], dict[str, Row]]) -> str:
    rows, reasons, gains = [], [], []
    for (case, shape), by_form in by_case.items():
        known = next(iter(by_form.values()))
        function, as_data = by_form.get(FUNCTION), by_form.get(DATA)
        factor = ""
        if function is not None and as_data is not None:
            gains.append(_total(as_data) / _total(function))
            factor = f"{gains[-1]:.2f} x"
        first = [f"{row['first_s']:.1f}" if row is not None else "-" for row in (function, as_data)]
        rows.append([
            case, shape, f"{known['partial']:,} / {known['full']:,}",
            *([f"{known['different']:,}", f"{known['data_bytes'] / 1e6:.2f}"] if "different" in known else ["", ""]),
            _ms(function), _ms(as_data), factor, " / ".join(first),
            _figure(known["data_ms"]) if "data_ms" in known else "",
        ])  # fmt: skip
        reasons += [f"- {case}, {form}: {reason}" for form, reason in known.get("left_out", {}).items()]
    header = ["case", "B x H x S x D", "partial / full blocks", "different", "data, MB", "function, ms", "data, ms"]
    header += ["data / function", "first call, s", "data made in, ms"]
    text = f"### {backend}\n\n{tabulate(rows, headers=header, tablefmt='github', disable_numparse=True)}"
    if gains:
        text += f"\n\nData take {min(gains):.2f} to {max(gains):.2f} times as long as the function. "
        worst = max(row["difference"] or 0.0 for by_form in by_case.values() for row in by_form.values() if row["who"])
        text += f"The outputs of both forms differ by at most {worst:.1g}." if worst else "The outputs are equal."
    return "\n\n".join([text, *(["Left out:\n\n" + "\n".join(reasons)] if reasons else [])])


def _ms(row: Row | None) -> str:
    if row is None:
        return "left out"
    return " / ".join(_figure(row[key]) for key in ("forward_ms", "backward_ms") if key in row)


def _figure(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _total(row: Row) -> float:
    return float(row["forward_ms"] + row.get("backward_ms", 0.0))


BENCHMARK = Benchmark("data", _todo, table)
