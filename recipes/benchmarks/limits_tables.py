"""Tables of the benchmark of limits, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.first_calls import CALLS as FIRST_CALLS
from benchmarks.first_calls import STEPS as FIRST_STEPS
from benchmarks.results import Row, measured_on, text_table
from benchmarks.steps_tables import OURS, github_table

# Kinds of rows.
SINKS, HEAD_SIZES, SMALL_CALLS = "sinks", "head sizes", "small calls"
SOFT_CAP, NEIGHBORHOODS = "soft-cap", "neighborhoods"
# Who runs a call; the names of other libraries are those in the benchmark of attention.
WITH_SINKS, CAPPED, PLAIN = "with sinks", "with a soft-cap", "without"
ROWS, TILES, FULL = "row-major", "in tiles", "full attention"
SDPA, FA4, FLEX = "SDPA", "FA4", "flex_attention"
# Targets: the most that sinks and, by head size, a soft-cap may cost, as times of the call without them; how many times
# as long flex_attention should take, on kernels of FlashAttention 4 and on others; seconds of a warm first call; and of
# neighborhoods, times of what the computed blocks of a video allow, and with a stride its pairs, and how many times as
# fast as full attention those of a sequence are.
_SINKS_AT_MOST = 1.05
_SOFT_CAP_AT_MOST = {"64": 1.25, "128": 1.15}
_FLASH_AT_LEAST, _OTHERS_AT_LEAST = 1.3, 1.0
_WARM_AT_MOST = 1.5
_BLOCKS_AT_MOST, _STRIDED_AT_MOST, _LINE_AT_LEAST = 1.25, 1.15, 12.0
_FLASH_BACKENDS = ("fa4", "flex_flash")


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "kind"), ("case", "case"), ("shape", "shape"), ("dtype", "dtype"), ("passes", "passes"),
        ("who", "who"), ("backend", "backend"), ("inference ms", "inference_ms"), ("forward ms", "forward_ms"),
        ("IQR", "forward_iqr"), ("backward ms", "backward_ms"), ("IQR", "backward_iqr"), ("ms", "ms"), ("IQR", "iqr"),
        ("alone, ms", "alone_ms"), ("visible", "visible"), ("computed", "computed"), ("import s", "import_s"),
        ("device s", "device_s"), ("output s", "output_s"), ("gradient s", "gradient_s"), ("step s", "step_s"),
        ("second step s", "second_step_s"), ("modules s", "modules_s"), ("difference", "difference"),
    )  # fmt: skip
    return text_table(results, columns)


_ByWho = dict[str, Row]


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of one run."""
    parts = [f"{measured_on(results)}; medians of interleaved runs."]
    tables: dict[str, Callable[[list[_ByWho]], str]] = {
        SINKS: _sinks_table,
        HEAD_SIZES: _head_sizes_table,
        SMALL_CALLS: _small_calls_table,
        FIRST_CALLS: _first_calls_table,
        FIRST_STEPS: _first_steps_table,
        SOFT_CAP: _soft_cap_table,
        NEIGHBORHOODS: _neighborhoods_table,
    }
    for kind, make in tables.items():
        cases = _cases(r for r in results["rows"] if r["kind"] == kind)
        if cases:
            parts.append(f"### {kind.capitalize()}\n\n{make(cases)}")
    differences = [r["difference"] for r in results["rows"] if "difference" in r]
    if differences:
        parts.append(f"Outputs differ from those that they are compared with by at most {max(differences):.1g}.")
    return "\n\n".join(parts)


def _cases(rows: Iterable[Row]) -> list[_ByWho]:
    """Return the rows of each case, by who runs it."""
    cases: dict[tuple[str, ...], _ByWho] = {}
    for r in rows:
        backend = r["backend"] if r["kind"] in (FIRST_CALLS, FIRST_STEPS) else ""
        key = r["case"], r["shape"], r["dtype"], r.get("passes", ""), backend
        cases.setdefault(key, {})[r["who"]] = r
    return list(cases.values())


# --- sinks and soft-caps, against the same call without ---


def _sinks_table(cases: list[_ByWho]) -> str:
    header = ["mask", "B x H x Hkv x S x D", "backend", "forward, ms", "without", "ratio"]
    header += ["forward / backward, ms", "without", "ratio of totals"]
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    for by_who in cases:
        ours, plain = by_who[WITH_SINKS], by_who[PLAIN]
        only_forward, both = ours["inference_ms"] / plain["inference_ms"], _total(ours) / _total(plain)
        name = f"{ours['case']}, {ours['shape']}"
        ratios |= {f"{name}, forward": only_forward, f"{name}, forward and backward": both}
        rows.append([
            ours["case"], ours["shape"], _backends(ours, plain), f"{ours['inference_ms']:.3g}",
            f"{plain['inference_ms']:.3g}", f"{only_forward:.2f}", _ms(ours), _ms(plain), f"{both:.2f}",
        ])  # fmt: skip
    about = "Forward passes are without gradients at first, then with them, before a backward pass."
    return f"{about} Target: {_at_most(ratios, _SINKS_AT_MOST)}\n\n{github_table(rows, header)}"


def _soft_cap_table(cases: list[_ByWho]) -> str:
    header = ["B x H x Hkv x S x D", "backend", "forward / backward, ms", "without", "ratio of totals", "target"]
    rows = []
    for by_who in cases:
        ours, plain = by_who[CAPPED], by_who[PLAIN]
        target = _SOFT_CAP_AT_MOST.get(ours["shape"].rpartition("x")[2])
        rows.append([
            ours["shape"], _backends(ours, plain), _ms(ours), _ms(plain), f"{_total(ours) / _total(plain):.2f}",
            "" if target is None else f"at most {target}",
        ])  # fmt: skip
    return f"Causal attention with a soft-cap of 30, against causal attention.\n\n{github_table(rows, header)}"


def _backends(ours: Row, plain: Row) -> str:
    """Return the backends of a call and of its plain call, if they differ."""
    if ours["backend"] == plain["backend"]:
        return str(ours["backend"])
    return f"{ours['backend']}; without: {plain['backend']}"


# --- head sizes and dtypes, against flex_attention ---


def _head_sizes_table(cases: list[_ByWho]) -> str:
    header = ["dtype", "B x H x Hkv x S x D", "mask", "backend", "forward / backward, ms", FLEX, "forward", "total"]
    rows = []
    gains: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for by_who in cases:
        ours, flex = by_who[OURS], by_who.get(FLEX)
        cells = [ours["dtype"], ours["shape"], ours["case"], ours["backend"], _ms(ours)]
        if flex is None:
            rows.append([*cells, "fails", "", ""])
            continue
        forward, total = flex["forward_ms"] / ours["forward_ms"], _total(flex) / _total(ours)
        name = f"{ours['case']}, {ours['dtype']}, {ours['shape']}"
        of_backend = gains[ours["backend"] in _FLASH_BACKENDS]
        of_backend |= {f"{name}, forward": forward, f"{name}, total": total}
        rows.append([*cells, _ms(flex), f"{forward:.2f} x", f"{total:.2f} x"])
    about = "The last columns say how many times as long compiled `flex_attention` takes as flexmasks."
    if gains[True]:
        about += f" Target on fa4 and flex_flash: {_at_least(gains[True], _FLASH_AT_LEAST)}"
    if gains[False]:
        about += f" Target on other backends: {_at_least(gains[False], _OTHERS_AT_LEAST)}"
    return f"{about}\n\n{github_table(rows, header)}"


# --- small calls, against all others ---


def _small_calls_table(cases: list[_ByWho]) -> str:
    others = (SDPA, FA4, FLEX)
    header = ["mask", "B x H x Hkv x S x D", "passes", "backend", "flexmasks, ms", *others, "fastest other"]
    header += ["alone: flexmasks", *others, "fastest other"]
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    for by_who in cases:
        ours = by_who[OURS]
        cells = [ours["case"], ours["shape"], ours["passes"], ours["backend"]]
        for key, way in (("ms", "in a row"), ("alone_ms", "alone")):
            cells += [f"{ours[key]:.3g}", *(_cell(by_who, who, key) for who in others)]
            times = [row[key] for who, row in by_who.items() if who != OURS]
            cells.append(f"{min(times) / ours[key]:.2f} x" if times else "")
            if times:
                ratios[f"{ours['case']}, {ours['shape']}, {ours['passes']}, {way}"] = min(times) / ours[key]
        rows.append(cells)
    about = (
        "Wall times, at first of calls in a row without waiting, then of a call that the device starts and ends idle. "
        "Fastest other: how many times as long the fastest of the others takes as flexmasks."
    )
    if ratios:
        about += f" Target: {_at_least(ratios, 1.0)}"
    return f"{about}\n\n{github_table(rows, header)}"


def _cell(by_who: _ByWho, who: str, key: str) -> str:
    if who in by_who:
        return f"{by_who[who][key]:.3g}"
    return "fails" if who in by_who[OURS].get("left_out", {}) else ""


# --- first calls ---

_AROUND = ["modules, s", "import, s", "device, s"]  # seconds of a process beside its calls


def _around(cold: Row, warm: Row) -> list[str]:
    modules = f"{warm['modules_s']:.2f}" if "modules_s" in warm else ""
    return [modules, *(f"{cold[key]:.2f} / {warm[key]:.2f}" for key in ("import_s", "device_s"))]


def _first_calls_table(cases: list[_ByWho]) -> str:
    header = ["call", "backend", "cold: first output, s", "first gradient, s", "warm: first output, s"]
    header += ["first gradient, s", *_AROUND]
    rows: list[list[str]] = []
    warm_seconds: dict[str, float] = {}
    for by_who in cases:
        cold, warm = by_who["cold"], by_who["warm"]
        cells = [cold["case"], cold["backend"]]
        for row in (cold, warm):
            cells += [f"{row['output_s']:.2f}", f"{row['gradient_s']:.2f}" if "gradient_s" in row else ""]
        name = f"{warm['case']}, {warm['backend']}"
        warm_seconds[name] = warm["gradient_s" if "gradient_s" in warm else "output_s"]
        rows.append([*cells, *_around(cold, warm)])
    shapes = ", ".join(dict.fromkeys(row["shape"] for by_who in cases for row in by_who.values()))
    about = (
        f"Seconds from the beginning of the first call of a fresh process, B x H x S x D {shapes}. Calls that have "
        "gradients ask for them, so that the first output may wait for the backward pass's compilation. Modules: what "
        "a process takes that only imports what the warm call imported of other packages, such as torch's compilers. "
        "Pairs of figures are cold / warm. Target for the last result of a warm process, in seconds: "
    )
    return f"{about}{_at_most(warm_seconds, _WARM_AT_MOST)}\n\n{github_table(rows, header)}"


def _first_steps_table(cases: list[_ByWho]) -> str:
    header = ["model", "B x H x S x D", "attention", "cold: first step, s", "second", "warm: first step, s", "second"]
    header += _AROUND
    rows: list[list[str]] = []
    for by_who in cases:
        cold, warm = by_who["cold"], by_who["warm"]
        cells = [cold["case"], cold["shape"], cold["backend"]]
        cells += [f"{row[key]:.2f}" for row in (cold, warm) for key in ("step_s", "second_step_s")]
        rows.append([*cells, *_around(cold, warm)])
    about = (
        "Seconds of the first two training steps of a compiled language model in a fresh process, with packed "
        "documents, new at each step, in each of its layers. With flex_attention, create_block_mask is compiled too."
    )
    return f"{about}\n\n{github_table(rows, header)}"


# --- neighborhoods, against full attention ---


def _neighborhoods_table(cases: list[_ByWho]) -> str:
    header = ["mask", "B x H x Hkv x S x D", "tokens", "first calls, s", "without gradients, ms"]
    header += ["forward / backward, ms", FULL]
    header += ["without gradients", "forward", "total", "by its blocks", "by its pairs", "target"]
    rows = []
    for by_who in cases:
        full = by_who[FULL]
        for who in (ROWS, TILES):
            if who in by_who:
                ours = by_who[who]
                gains = [full[key] / ours[key] for key in ("inference_ms", "forward_ms")]
                gains += [_total(full) / _total(ours), 1 / ours["computed"], 1 / ours["visible"]]
                target = _neighborhoods_target(ours) if who == TILES or TILES not in by_who else None
                rows.append([
                    ours["case"], ours["shape"], who, f"{ours['inference_first_s']:.2f}, {ours['first_s']:.2f}",
                    *_neighborhood_times(ours),
                    "; ".join(_neighborhood_times(full)), *(f"{gain:.1f} x" for gain in gains),
                    "" if target is None else f"{target:.1f} x",
                ])  # fmt: skip
    about = (
        "How many times as fast as full attention of the same shape, forward without gradients, forward with them, and "
        "in total, beside what would be possible: by the pairs in computed blocks, and by the visible pairs. The "
        "target is for calls without gradients. First calls plan and compile, first without gradients, then with them; "
        "kernels that another row compiled before are there already."
    )
    return f"{about}\n\n{github_table(rows, header)}"


def _neighborhood_times(row: Row) -> list[str]:
    """Return the times of a forward pass without gradients, and of both passes."""
    return [f"{row['inference_ms']:.3g} ({row['inference_backend']})", f"{_ms(row)} ({row['backend']})"]


def _neighborhoods_target(row: Row) -> float | None:
    """Return how many times as fast as full attention it should be, or None."""
    if "stride" in row["case"]:
        return float(1 / row["visible"] / _STRIDED_AT_MOST)
    if row["case"].startswith("natten3d"):
        return float(1 / row["computed"] / _BLOCKS_AT_MOST)
    return _LINE_AT_LEAST if row["case"].startswith("natten1d") else None


# --- figures ---


def _ms(row: Row) -> str:
    return " / ".join(f"{row[key]:.3g}" for key in ("forward_ms", "backward_ms") if key in row)


def _total(row: Row) -> float:
    return float(row["forward_ms"] + row.get("backward_ms", 0.0))


def _at_most(figures: Mapping[str, float], target: float) -> str:
    """Compare figures with the most that they should be, in words."""
    worst = max(figures, key=lambda name: figures[name])
    met = sum(figure <= target for figure in figures.values())
    return f"at most {target:g}, met by {met} of {len(figures)} figures; the largest is {figures[worst]:.2f} ({worst})."


def _at_least(figures: Mapping[str, float], target: float) -> str:
    """Compare figures with the least that they should be, in words."""
    worst = min(figures, key=lambda name: figures[name])
    met = sum(figure >= target for figure in figures.values())
    return (
        f"at least {target:g}, met by {met} of {len(figures)} figures; the smallest is {figures[worst]:.2f} ({worst})."
    )
