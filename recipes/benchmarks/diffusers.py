"""`python recipes/benchmark.py diffusers`: attention as diffusers' models call it, against diffusers' own backends."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks.memory import peak_bytes
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps_tables import github_table
from flexmasks.bench.clock import device_milliseconds, interleaved, wall_milliseconds
from flexmasks.integrations import diffusers
from flexmasks.spec.arguments import get_mask

_IN_A_ROW = 10  # calls between two looks at the clock, as many layers of a model
_RUNS = 5
_OURS, _NEW, _OURS_COMPILED = "flexmasks", "flexmasks, a new mask at each call", "flexmasks, compiled"
_NATIVE, _FLEX, _FLEX_COMPILED = "native", "flex", "flex, compiled"
_PLAIN = "native, no mask"
_ALL = "flexmasks, all-True mask"
_WAYS = (_OURS, _NEW, _OURS_COMPILED, _ALL, _NATIVE, _PLAIN, _FLEX, _FLEX_COMPILED)
_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A call [batch, text + image tokens, heads, size]; the text of each batch element is padded."""

    what: str
    batch: int
    text: int
    image: int
    heads: int
    size: int


class Blocks(NamedTuple):
    """A call whose mask is lists of full blocks of 64 x 64, others at each call, as NABLA of Kandinsky makes them."""

    what: str
    tokens: int
    heads: int
    size: int
    share: float  # of the blocks, which are drawn


class Video(NamedTuple):
    """A call on a video whose tiles see windows of tiles."""

    what: str
    canvas: tuple[int, int, int]
    tile: tuple[int, int, int]
    window: tuple[int, int, int]
    heads: int
    size: int


_CASES: list[Case | Blocks | Video] = [
    *(Case("Flux", batch, 512, 4096, 24, 128) for batch in (1, 4)),
    *(Case("Qwen-Image", batch, 512, 83 * 83, 24, 128) for batch in (1, 4)),
    Blocks("block mask", 8 * 32 * 32, 28, 64, 0.15),
    Blocks("block mask", 31 * 32 * 48, 28, 64, 0.15),
    Video("Wan, sliding tiles", (21, 30, 52), (3, 10, 4), (3, 3, 5), 12, 128),
]
_QUICK: list[Case | Blocks | Video] = [
    Case("Flux", 2, 24, 40, 2, 16),
    Blocks("block mask", 512, 2, 16, 0.3),
    Video("Wan, sliding tiles", (3, 4, 8), (1, 2, 4), (1, 1, 1), 2, 16),
]


def _of_case(case: Case | Blocks | Video, device: torch.device) -> tuple[tuple[int, ...], dict[str, _Attend]]:
    """Return the shape of the queries and the ways to attend."""
    if isinstance(case, Case):
        return _padded(case, device)
    return _by_blocks(case, device) if isinstance(case, Blocks) else _in_tiles(case, device)


def _padded(case: Case, device: torch.device) -> tuple[tuple[int, ...], dict[str, _Attend]]:
    lengths = torch.linspace(case.text / 8, case.text * 3 / 4, case.batch, device=device).long()
    kept = torch.arange(case.text, device=device) < lengths[:, None]
    keys = torch.cat([kept, kept.new_ones(case.batch, case.image)], 1)
    shows_all, in_four = torch.ones_like(keys), keys[:, None, None, :]
    new = itertools.cycle([keys] * 2)  # each layer of Qwen-Image makes the mask anew
    ways = {
        _OURS: lambda q, k, v: _dispatch(q, k, v, keys),
        _NEW: lambda q, k, v: _dispatch(q, k, v, next(new).clone()),
        _ALL: lambda q, k, v: _dispatch(q, k, v, shows_all),
        _NATIVE: lambda q, k, v: _dispatch(q, k, v, in_four, "native"),
        _PLAIN: lambda q, k, v: _dispatch(q, k, v, None, "native"),
        **_own_flex(lambda: in_four, device),
        **_compiled(lambda: keys),
    }
    return (case.batch, case.text + case.image, case.heads, case.size), ways


def _by_blocks(case: Blocks, device: torch.device) -> tuple[tuple[int, ...], dict[str, _Attend]]:
    generator = torch.Generator(device).manual_seed(0)
    count = case.tokens // 64
    masks = []
    for _ in range(3):
        shown = torch.rand(1, case.heads, count, count, device=device, generator=generator) < case.share
        shown |= torch.eye(count, dtype=torch.bool, device=device)
        masks.append((shown.sum(-1).int(), shown.int().argsort(-1, descending=True).int()))
    turns = {way: itertools.cycle(masks) for way in range(3)}  # the ways get the same ones

    def new(way: int) -> BlockMask:
        numbers, indices = next(turns[way])
        empty = torch.zeros_like(numbers)
        return BlockMask.from_kv_blocks(empty, indices, numbers, indices, BLOCK_SIZE=64, mask_mod=None)

    ways = {
        _OURS: lambda q, k, v: _dispatch(q, k, v, new(0)),
        **_own_flex(functools.partial(new, 1), device),
        **_compiled(functools.partial(new, 2)),
    }
    return (1, case.tokens, case.heads, case.size), ways


def _in_tiles(case: Video, device: torch.device) -> tuple[tuple[int, ...], dict[str, _Attend]]:
    mask = get_mask("sliding_tile", canvas=case.canvas, tile=case.tile, window=case.window)
    tokens = math.prod(case.canvas)
    pairs = mask.dense(tokens, device=device)
    blocks = create_block_mask(mask, None, None, tokens, tokens, device=str(device))
    ways = {
        _OURS: lambda q, k, v: _dispatch(q, k, v, mask),
        _NATIVE: lambda q, k, v: _dispatch(q, k, v, pairs, "native"),
        _PLAIN: lambda q, k, v: _dispatch(q, k, v, None, "native"),
        **{way: call for way, call in _own_flex(lambda: blocks, device).items() if way == _FLEX_COMPILED},
    }
    return (1, tokens, case.heads, case.size), ways


def _dispatch(q: Tensor, k: Tensor, v: Tensor, mask: Any, backend: str = "flex") -> Tensor:
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    out: Tensor = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=AttentionBackendName(backend))
    return out


def _compiled(new: Callable[[], Any]) -> dict[str, _Attend]:
    attend = torch.compile(_dispatch, dynamic=False)
    return {_OURS_COMPILED: lambda q, k, v: attend(q, k, v, new())}


def _own_flex(new: Callable[[], Any], device: torch.device) -> dict[str, _Attend]:
    """diffusers' own backend "flex"."""
    from diffusers.models.attention_dispatch import _native_flex_attention

    ways: dict[str, _Attend] = {_FLEX: lambda q, k, v: _native_flex_attention(q, k, v, attn_mask=new())}
    if device.type == "cuda":
        attend = torch.compile(_native_flex_attention, dynamic=False)
        ways[_FLEX_COMPILED] = lambda q, k, v: attend(q, k, v, attn_mask=new())
    return ways


def _rows(case: Case | Blocks | Video, device: torch.device, runs: int) -> list[Row]:
    """Return times of forward passes, with the host's time and without, their memory and their differences."""
    torch._dynamo.reset()
    diffusers.register()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, ways = _of_case(case, device)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    calls: dict[str, Callable[[], Tensor]] = {}
    outs, failed, peaks = {}, {}, {}
    with torch.no_grad():
        for who, attend in ways.items():
            call = functools.partial(attend, q, k, v)
            try:
                outs[who] = call()
                peaks[who] = peak_bytes(call, device)
            except Exception as error:  # memory runs out where all scores are kept, and compilers fail
                failed[who] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                torch.cuda.empty_cache()
                continue
            calls[who] = call
        clock = functools.partial(wall_milliseconds, calls_in_a_row=_IN_A_ROW)
        times, of_device = (interleaved(calls, device, runs, c) for c in (clock, device_milliseconds))
    like = next(outs[who] for who in (_NATIVE, _FLEX_COMPILED, _OURS) if who in outs)
    about = {"kind": "forward", "case": case.what, "shape": "x".join(map(str, shape)), "dtype": str(dtype)[6:]}
    rows: list[Row] = [{**about, "who": who, "failed": reason} for who, reason in failed.items()]
    for who in calls:
        row = {**about, "who": who, "ms": float(f"{times[who][0]:.4g}"), "iqr": float(f"{times[who][1]:.3g}")}
        row |= {"device_ms": float(f"{of_device[who][0]:.4g}"), "peak_mb": float(f"{peaks[who] / 1e6:.4g}")}
        if who not in (_PLAIN, _ALL):
            row["difference"] = float(f"{float((outs[who] - like).abs().max()):.2g}")
        rows.append(row)
    return rows


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_small = quick or device.type != "cuda"
    return {
        f"{case.what}, {', '.join(map(str, case[1:]))}": functools.partial(
            _rows, case, device, 2 if is_small else _RUNS
        )
        for case in (_QUICK if is_small else _CASES)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "case"), ("shape", "shape"), ("way", "who"), ("ms", "ms"), ("IQR", "iqr"),
        ("ms of the device", "device_ms"), ("peak MB", "peak_mb"), ("difference", "difference"), ("failed", "failed"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in results["rows"]:
        found.setdefault((row["case"], row["shape"]), {})[row["who"]] = row
    lines = []
    for (case, shape), by_who in found.items():
        ours = by_who[_OURS]["ms"]
        for who in _WAYS:
            row = by_who.get(who)
            if row is None:
                continue
            if "failed" in row:
                cells = ["out of memory" if "OutOfMemory" in row["failed"] else "fails", "", "", ""]
            else:
                cells = [f"{row[name]:.3g}" for name in ("ms", "device_ms")]
                cells += [f"{ours / row['ms']:.2f}", f"{row['peak_mb']:,.0f}"]
            lines.append([case, shape, who, *cells])
            case = shape = ""
    header = ["model", "B x S x H x D", "way", "all in, ms", "GPU, ms", "flexmasks by it", "peak, MB"]
    about = "forward pass of one layer. Target: below 1 of native with its mask, and of flex, compiled."
    return f"{measured_on(results)}; {about}\n\n{github_table(lines, header)}"


BENCHMARK = Benchmark("diffusers", _todo, table)
