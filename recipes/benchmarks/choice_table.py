"""The table of times that `backend="auto"` chooses by, fitted to measurements, and how well it chooses."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.choice import CHECK
from benchmarks.results import Row, measured_on
from flexmasks.backends import times
from flexmasks.plans.mask_plan import Computed, computed_in_sequences
from flexmasks.plans.windows import Window

NEAR = 1.15  # times as long as the fastest backend
# Times as long as a fast host takes, from which a GPU's time shows: hosts of processes differed by up to 1.8 times.
_ABOVE_HOST = 3.0
_NOISE = 1.0  # of the host's time, which is added to a time to which errors are relative
# What is multiplied by `times.features` in a usual kernel, up to a factor: a number that is twice as much counts as a
# relative error of _TRUST in one call, so these decide only where measurements say little.
_USUAL, _TRUST = [200.0, 0.5, 1.0, 1.3], 0.02
# Few calls that are fitted have many sequences, so what these take is mostly presumed: one of a head about as much as a
# full block, as it takes in documents that are promised, where a kernel is told of many empty ones (documents.md).
_MORE_USUAL = {"flex": [0.3, 0.7], "flex_flash": [0.3, 0.7], "fa4": [1.0], "short": [13.0], "sdpa": []}
_MORE_TRUST = {"fa4": 0.2}


def source(rows: list[Row]) -> str:
    """Return the module with the tables, as Python."""
    hosts = {key: float(f"{value:.2g}") for key, value in _hosts(rows).items()}
    fitted = {key: tuple(float(f"{x:.3g}") for x in value) for key, value in _fitted(rows, hosts).items()}
    lines = ['"""Written by `python tests/test_readme.py` from recipes/results/choice_gpu.json, see `times`."""', ""]
    tables: dict[str, dict[Any, Any]] = {"HOST": hosts, "DEVICE": fitted}
    for name, table in tables.items():
        lines += [f"{name} = {{", *(f"    {_text(key)}: {_text(table[key])}," for key in sorted(table)), "}"]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return repr(value).replace("'", '"')


def _hosts(rows: list[Row]) -> dict[tuple[str, bool, bool], float]:
    """Microseconds of the shortest calls: backend, gradients, whether the mask has tensors, which are new ones.

    The host of one process may be slower than that of another one, so these are of a fast one.
    """
    found: dict[tuple[str, bool, bool], list[float]] = {}
    for r, name, us in _microseconds(r for r in rows if _is_usual(r) and not r.get("apart")):
        found.setdefault((name, r["gradients"], r["has_tensors"]), []).append(us)
    return {key: statistics.quantiles(us, n=20)[0] for key, us in found.items()}


def _fitted(rows: list[Row], hosts: dict[tuple[str, bool, bool], float]) -> dict[tuple[str, int, bool], list[float]]:
    """Microseconds of the GPU: backend, head size, gradients."""
    found: dict[tuple[str, int, bool], list[tuple[list[float], float, float]]] = {}
    for r, name, us in _microseconds(r for r in rows if r["use"] != CHECK):
        features = times.features(name, _case(r), _blocks(r), r["reads"])
        host = hosts[name, r["gradients"], r["has_tensors"]]
        found.setdefault((name, r["head_size"], r["gradients"]), []).append((features, us, host))
    return {key: _fit(key[0], measured) for key, measured in found.items()}


def judges(r: Row) -> bool:
    """Whether the choice is judged by a call. The table takes tensors for new ones."""
    return r["use"] == CHECK and _is_usual(r)


def _is_usual(r: Row) -> bool:
    return bool(r["new"] == r["has_tensors"])


def _case(r: Row) -> times.Case:
    return times.Case(r["head_size"], r["gradients"], r["has_tensors"], r["rows"], r["length"] / 128, r["whole"])


def _blocks(r: Row) -> Computed:
    return Computed(r["full"], r["partial"], sequences=r["sequences"] * r["heads"] / r["rows"])


def _microseconds(rows: Iterable[Row]) -> Iterator[tuple[Row, str, float]]:
    for r in rows:
        yield from ((r, name, ms * 1e3) for name, ms in r["ms"].items() if name != "auto")


def _fit(name: str, measured: list[tuple[list[float], float, float]]) -> list[float]:
    """What features are to be multiplied by, so that the GPU takes as long as was measured where it decides.

    measured: features, the time of the call, and that of the host.
    """
    usual = torch.tensor(_USUAL + _MORE_USUAL[name], dtype=torch.float64)
    trust = torch.tensor([_TRUST] * len(_USUAL) + [_MORE_TRUST.get(name, _TRUST)] * len(_MORE_USUAL[name]))
    features = torch.tensor([f for f, *_ in measured], dtype=torch.float64)
    took, host = torch.tensor([us for _, *us in measured], dtype=torch.float64).T
    usual *= took @ (features @ usual) / (features @ usual).square().sum()
    decides = took > _ABOVE_HOST * host
    while True:
        found = _least_squares(features[decides], took[decides], (took + _NOISE * host)[decides], usual, trust)
        too_long = ~decides & (features @ found > took)
        if not too_long.any():
            return found.tolist()
        decides |= too_long


def _least_squares(features: Tensor, took: Tensor, scale: Tensor, usual: Tensor, trust: Tensor) -> Tensor:
    """Numbers of at least 0, with the least squares of errors relative to a scale."""
    a = torch.cat([features / scale[:, None], torch.diag(trust / usual)])
    b = torch.cat([took / scale, trust.to(usual)])
    found, kept = torch.zeros_like(usual), torch.ones_like(usual, dtype=torch.bool)
    while True:
        found[kept] = torch.linalg.lstsq(a[:, kept], b[:, None]).solution[:, 0]
        if found.min() >= 0:
            return found
        kept[found.argmin()] = False
        found.zero_()


def factors(rows: Iterable[Row]) -> list[tuple[float, str, str, Row]]:
    """How many times as long as the fastest backend the chosen one takes, with both, of calls that judge."""
    found = []
    for r in rows:
        own = {name: ms for name, ms in r["ms"].items() if name != "auto"}
        if r["use"] == CHECK and len(own) > 1:
            chosen, best = chosen_of(r, own), min(own, key=own.__getitem__)
            found.append((own[chosen] / own[best], chosen, best, r))
    return found


def chosen_of(r: Row, names: Iterable[str]) -> str:
    """The backend that "auto" takes on the GPU of the measurements."""
    found = _blocks(r), r["reads"]
    if "fa4" in names and r["has_tensors"]:  # nobody looks at blocks
        length, batch, room = r["length"], r["batch"], r["sequences"]
        window = Window(None, None if r["mask"].endswith("both ways") else 0, 0, (0, length), True)
        found = computed_in_sequences(window, batch, length, batch * length // r["mean"], room), times.PLAIN
    return times.by_times(list(names), _case(r), lambda: found)[0]


def markdown(results: dict[str, Any]) -> str:
    """Return the table of calls that judge."""
    rows, found = [], factors(results["rows"])
    judged = [factor for factor, *_, r in found if judges(r)]
    near = sum(factor <= NEAR for factor in judged)
    for factor, chosen, _, r in found:
        about = f"{r['mask']} of {r['mean']:,}" if r["mean"] else r["mask"]
        size = f"{r['batch']}x{r['heads']}x{r['length']}x{r['head_size']}"
        ms = " / ".join(f"{name} {t:.3g}" for name, t in sorted(r["ms"].items(), key=lambda x: x[1]) if name != "auto")
        passes = "both" if r["gradients"] else "forward"
        rows.append([about, size, passes, "new" if r["new"] else "same", f"{factor:.2f}", chosen, ms])
    table = tabulate(
        rows,
        headers=["mask", "B x H x S x D", "passes", "tensors", "x", "auto", "ms"],
        tablefmt="github",
        disable_numparse=True,
    )
    bar = (
        f"In {near} of {len(judged)} calls without tensors of the mask, or with new ones, the chosen backend takes at "
        f"most {NEAR} times as long as the fastest one, and in none more than {max(judged):.2f} times."
    )
    return f"{measured_on(results)}. {bar}\n\n{table}"
