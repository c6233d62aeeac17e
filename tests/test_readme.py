"""The README and the pages around it: their calls run, their links lead somewhere, their tables are up to date.

`python tests/test_readme.py` rewrites the pictures, the stubs, and every generated part of a page, which stands between
`<!-- generated: NAME, by ... -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers  # noqa: F401  # it finds the benchmarks
import other_gpus
import planted
import pytest
import stubs
import torch
import torch._inductor.config
import torch.nn.functional as F
from tabulate import tabulate

import flexmasks
from benchmarks import attention as bench_attention
from benchmarks import biases as bench_biases
from benchmarks import blocks as bench_blocks
from benchmarks import choice_table, limits_tables, steps_tables
from benchmarks import data as bench_data
from benchmarks import diffusers as bench_diffusers
from benchmarks import documents as bench_documents
from benchmarks import dropout as bench_dropout
from benchmarks import intervals as bench_intervals
from benchmarks import invariant as bench_invariant
from benchmarks import models as bench_models
from benchmarks import ranks as bench_ranks
from benchmarks import rollouts as bench_rollouts
from benchmarks import sdpa as bench_sdpa
from benchmarks import serve as bench_serve
from benchmarks import softmax as bench_softmax
from benchmarks import tangents as bench_tangents
from benchmarks import topk as bench_topk
from benchmarks import trees as bench_trees
from benchmarks import wild as bench_wild
from flexmasks.__main__ import main
from flexmasks.backends import measured_times, times
from flexmasks.backends.call import Plans
from flexmasks.backends.table import BACKENDS, Backend
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.spec.definitions import definition, is_by_library
from flexmasks.spec.parameters import Size
from pages import page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "recipes/results"
LINES, COLUMNS = 150, 120  # the most that the README may have
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [file for folder in ("flexmasks", "recipes") for file in sorted((ROOT / folder).rglob("*.md"))]
NAMES = [str(file.relative_to(ROOT)) for file in PAGES]


def results(name: str) -> dict[str, Any]:
    """Return the figures of one benchmark from its results file."""
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return figures


def own(kind: str) -> str:
    """Return the page of the library's own masks or scores, without those of tests."""
    entries = flexmasks.list_masks() if kind == "mask" else flexmasks.list_scores()
    return page(kind, [entry for entry in entries if is_by_library(kind, entry.name)])


def speed() -> str:
    """Return the table of speed, ten rows of figures from the results files."""
    rows = [*_attention_speed(), _documents_speed(), _training_speed(), _decoding_speed(), _blocks_speed()]
    rows += [_softmax_speed()]
    made, of_documents = results("attention_gpu")["machine"], bench_documents.sentence(results("documents_gpu"))
    about = textwrap.fill(
        f"Milliseconds on one {made['device']}, torch {made['torch']}, medians; in brackets how many times as long "
        f"torch takes. Rows 1 to 5 are forward and backward, bfloat16, 16 x 16 heads of 8,192 x 128{of_documents}. "
        "Decoding is 64 sequences of up to 8,192 keys.",
        COLUMNS,
    )
    head = ["ms", "flexmasks", "compiled torch", "a mask as a tensor"]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return f"{about}\n\n" + "\n".join(lines)


def figures() -> str:
    """Return three rows of the table of speed, for the first screen."""
    soft_cap = ["causal with a soft-cap, 8,192 tokens, forward and backward", *_attention_speed()[4][1:3]]
    rows = [soft_cap, _documents_speed()[:3], _blocks_speed()[:3]]
    device = results("attention_gpu")["machine"]["device"]
    head = [f"milliseconds on one {device}", "flexmasks", "torch, compiled"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _attention_speed() -> list[list[str]]:
    titles = {
        "causal": "causal",
        "sliding_window": "sliding window of 1,024",
        "prefix_lm": "prefix LM",
        "natten": "neighborhoods of 7 x 7 pixels",
        "softcap, causal": "causal with a soft-cap",
    }
    rows = [row for row in results("attention_gpu")["rows"] if row["shape"] == "16x16x8192x128"]
    ms = {(row["case"], row["who"]): row["forward_ms"] + row["backward_ms"] for row in rows}
    return [
        _row(title, ms[case, "flexmasks"], ms[case, "flex_attention"], ms.get((case, "SDPA + mask")))
        for case, title in titles.items()
    ]


def _documents_speed() -> list[str]:
    count, ours, flex, _ = bench_documents.headline(results("documents_gpu"))
    return _row(f"{count} packed documents, new ones at each step", ours, flex, None)


def _training_speed() -> list[str]:
    step = {row[""]: row["ms for a step"] for row in results("packed_language_model")["rows"]}
    title = "a step of training, [packed documents](recipes/packed_language_model.py)"
    return _row(title, step["flexmasks"], None, step["SDPA + materialised mask"])


def _decoding_speed() -> list[str]:
    rows = [r for r in results("serve_gpu")["rows"] if (r["case"], r["shape"]) == ("decoding", "64x32x8x128x8192")]
    ms = {r["who"]: r["ms"] for r in rows}
    return _row("decoding, all in", ms["flexmasks"], None, ms["SDPA + mask"])


def _blocks_speed() -> list[str]:
    row = max((row for row in results("blocks_gpu")["rows"] if row["mask"] == "document"), key=lambda r: r["length"])
    return _row(f"block mask of {row['length']:,} tokens, documents", row["ms"], row["torch_ms"], None)


def _softmax_speed() -> list[str]:
    rows = [r for r in results("softmax_gpu")["rows"] if (r["case"], r["shape"]) == ("causal", "4x32x4096x4096")]
    ms = {who: sum(r["ms"] for r in rows if r["who"] == who) for who in ("flexmasks", "torch.compile", "eager")}
    return _row("softmax of 4 x 32 x 4,096 x 4,096 scores, causal", ms["flexmasks"], ms["torch.compile"], ms["eager"])


def _row(title: str, ours: float, *others: float | None) -> list[str]:
    return [title, f"{ours:.3g}", *("" if ms is None else f"{ms:.3g} ({_times(ms / ours)})" for ms in others)]


def _times(ratio: float) -> str:
    return f"{ratio:.0f} x" if ratio >= 100 else f"{ratio:.1f} x"


def steps(name: str) -> str:
    """Return the tables of steps with new tensors from a results file."""
    return steps_tables.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def data(name: str) -> str:
    """Return the tables of masks as functions and as data from a results file."""
    return bench_data.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def choice() -> str:
    """Return the table of calls that judge the choice of a backend."""
    return choice_table.markdown(results("choice_gpu"))


def documents() -> str:
    """Return the picture and the table of packed documents."""
    return f"![bars of these figures](documents_gpu.svg)\n\n{bench_documents.markdown(results('documents_gpu'))}"


def serve(name: str) -> str:
    """Return the tables of a serving loop from a results file."""
    return bench_serve.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def models(name: str) -> str:
    """Return the tables of Hugging Face models from a results file."""
    return bench_models.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def ranks(name: str) -> str:
    """Return the table of sequences over several GPUs from a results file."""
    return bench_ranks.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def biases() -> str:
    """Return the table of short sequences with a bias that learns."""
    return bench_biases.markdown(results("biases_gpu"))


def tangents() -> str:
    """Return what forward mode costs."""
    exists = (RESULTS / "tangents_gpu.json").exists()
    return bench_tangents.markdown(results("tangents_gpu")) if exists else "Not measured yet."


def invariant() -> str:
    """Return what the same bits in any batch cost."""
    return bench_invariant.markdown(results("invariant_gpu"))


def dropout() -> str:
    """Return what dropout of attention weights costs."""
    exists = (RESULTS / "dropout_gpu.json").exists()
    return bench_dropout.markdown(results("dropout_gpu")) if exists else "Not measured yet."


def sdpa() -> str:
    """Return the table of masks as tensors."""
    return bench_sdpa.markdown(results("sdpa_gpu")) if (RESULTS / "sdpa_gpu.json").exists() else "Not measured yet."


def topk() -> str:
    """Return the tables of keys that an indexer chose."""
    return bench_topk.markdown(results("topk_gpu")) if (RESULTS / "topk_gpu.json").exists() else "Not measured yet."


def wild() -> str:
    """Return the tables of masks of other projects, of the runs that there are."""
    return bench_wild.markdown(
        [results(name) for name in ("wild_cpu", "wild_gpu") if (RESULTS / f"{name}.json").exists()]
    )


def trees(name: str) -> str:
    """Return the table of training on trees from a results file."""
    return bench_trees.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def rollouts(name: str) -> str:
    """Return the table of policy steps on answers to prompts from a results file."""
    return bench_rollouts.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def of_diffusers(name: str) -> str:
    """Return the table of attention as diffusers' models call it, from a results file."""
    return bench_diffusers.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def limits(name: str) -> str:
    """Return the tables of sinks, head sizes, small and first calls, soft-caps and neighborhoods, from a file."""
    return limits_tables.markdown(results(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet."


def versions() -> str:
    """Return the table of suites with other versions, from the file that `.ci/versions` writes."""
    if not (RESULTS / "versions.json").exists():
        return "Not run yet."
    rows = [row | {"seconds": f"{row['seconds']:,}"} for row in results("versions")["rows"]]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def faults() -> str:
    """Return the table of planted faults, from the file that `tests/planted.py` writes."""
    return planted.markdown(results("planted")["rows"]) if planted.TABLE.exists() else "Not run yet."


def gpus() -> str:
    """Return the table of kernels compiled for other GPUs, from the file that `tests/other_gpus.py` writes."""
    return other_gpus.markdown(results("gpus")["rows"]) if other_gpus.TABLE.exists() else "Not compiled yet."


GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"figures": figures, "speed": speed},
    "flexmasks/masks/README.md": {"masks": lambda: own("mask")},
    "flexmasks/scores/README.md": {"scores": lambda: own("score")},
    "recipes/results/attention.md": {"attention": lambda: bench_attention.markdown(results("attention_gpu"))},
    "recipes/results/registry.md": {"registry": lambda: bench_attention.registry_markdown(results("registry_gpu"))},
    "recipes/results/blocks.md": {
        "blocks": lambda: bench_blocks.markdown(results("blocks_gpu"), results("blocks_cpu")),
        "undecided": lambda: bench_blocks.undecided_markdown(results("undecided")),
    },
    "recipes/results/softmax.md": {"softmax": lambda: bench_softmax.markdown(results("softmax_gpu"))},
    "recipes/results/steps.md": {
        name: functools.partial(steps, name) for name in ("steps_gpu", "steps_triton", "steps_cpu")
    },
    "recipes/results/choice.md": {"choice_gpu": choice},
    "recipes/results/documents.md": {"documents_gpu": documents},
    "recipes/results/cudnn.md": {"cudnn_gpu": lambda: bench_intervals.markdown(results("cudnn_gpu"))},
    "recipes/results/serve.md": {
        name: functools.partial(serve, name) for name in ("serve_gpu", "serve_flash", "serve_cpu")
    },
    "recipes/results/models.md": {"models_gpu": functools.partial(models, "models_gpu")},
    "recipes/results/ranks.md": {
        name: functools.partial(ranks, name) for name in ("ranks_gpu_four", "ranks_gpu", "ranks_triton")
    },
    "recipes/results/trees.md": {"trees_gpu": functools.partial(trees, "trees_gpu")},
    "recipes/results/rollouts.md": {"rollouts_gpu": functools.partial(rollouts, "rollouts_gpu")},
    "recipes/results/diffusers.md": {"diffusers_gpu": functools.partial(of_diffusers, "diffusers_gpu")},
    "recipes/results/limits.md": {name: functools.partial(limits, name) for name in ("limits_gpu", "limits_triton")},
    "recipes/results/biases.md": {"biases_gpu": biases},
    "recipes/results/dropout.md": {"dropout_gpu": dropout},
    "recipes/results/sdpa.md": {"sdpa_gpu": sdpa},
    "recipes/results/topk.md": {"topk_gpu": topk},
    "recipes/results/wild.md": {"wild": wild},
    "recipes/results/invariant.md": {"invariant_gpu": invariant},
    "recipes/results/tangents.md": {"tangents_gpu": tangents},
    "recipes/results/versions.md": {"versions": versions},
    "recipes/results/planted.md": {"planted": faults},
    "recipes/results/gpus.md": {"gpus": gpus},
    "recipes/results/data.md": {name: functools.partial(data, name) for name in ("data_gpu", "data_cpu")},
}


def up_to_date(name: str) -> str:
    """Return the text of a page with its generated parts made from the registry and the results."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for part, make in GENERATED[name].items():
        start, end = re.findall(rf"<!-- generated: {part}, .*? -->|<!-- end of {part} -->", text)
        before, rest = text.split(start)
        text = f"{before}{start}\n\n{make()}\n\n{end}{rest.split(end)[1]}"
    return text


def pictures() -> dict[str, flexmasks.Picture]:
    """Return the pictures of the pages by their files."""
    ids = (torch.arange(1024)[:, None] >= torch.tensor([90, 250, 400, 640, 760])).sum(-1)
    packed = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    # two prompts, of which one has answers that branch
    answers = [[*range(300), *range(300 + 1000 * n, 400 + 1000 * n)] for n in range(3)]
    answers += [[*range(5000, 5200), *range(6000 + 1000 * n, 6112 + 1000 * n)] for n in range(2)]
    return {
        "notebooks/pictures/documents.svg": flexmasks.draw(packed, 1024, block_size=64),
        "notebooks/pictures/window.svg": flexmasks.draw("sliding_window", 1024, window=192, block_size=64),
        "notebooks/pictures/tree.svg": flexmasks.draw(flexmasks.trees.pack(answers).mask, 1024, block_size=64),
        "notebooks/pictures/natten.svg": flexmasks.draw("natten", 1024, height=32, width=32, kernel=7, block_size=64),
    }


def charts() -> dict[str, str]:
    """Return the pictures of results by their files."""
    return {"recipes/results/documents_gpu.svg": bench_documents.chart(results("documents_gpu"))}


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_parts_are_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == up_to_date(name), "run `python tests/test_readme.py`"


def test_the_pictures_are_up_to_date() -> None:
    texts = "".join(file.read_text(encoding="utf-8") for file in PAGES)
    for file, picture in pictures().items():
        assert file in texts
        assert (ROOT / file).read_text(encoding="utf-8") == picture.svg(), "run `python tests/test_readme.py`"
    for file, chart in charts().items():
        assert (ROOT / file).read_text(encoding="utf-8") == chart, "run `python tests/test_readme.py`"


def test_the_table_of_times_is_up_to_date() -> None:
    """The same numbers are fitted on any machine, but for rounding."""
    fitted: dict[str, Any] = {}
    exec(choice_table.source(results("choice_gpu")["rows"]), fitted)
    for name in ("HOST", "DEVICE"):
        kept = getattr(measured_times, name)
        assert kept.keys() == fitted[name].keys(), "run `python tests/test_readme.py`"
        for key, value in fitted[name].items():
            assert value == pytest.approx(kept[key], rel=0.02, abs=1e-6), "run `python tests/test_readme.py`"


@pytest.mark.parametrize("kind", stubs.FILES)
def test_the_stubs_are_up_to_date(kind: str) -> None:
    assert (ROOT / stubs.FILES[kind]).read_text(encoding="utf-8") == stubs.stub(kind), (
        "run `python tests/test_readme.py`"
    )


def test_the_readme_is_short_and_narrow() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES
    assert not [line for line in lines if len(line) > COLUMNS]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    for target in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', file.read_text(encoding="utf-8")):
        path, _, heading = "".join(target).partition("#")
        if path.startswith("https://"):
            continue
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), target
        assert not heading or heading in _anchors(there), target


def _anchors(file: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", file.read_text(encoding="utf-8"))  # a link counts as its words
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "flexmasks/README.md"])
def test_the_calls_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if name.endswith(("transformers.md", "guides/diffusers.md")):
        pytest.importorskip(Path(name).stem)
    monkeypatch.chdir(tmp_path)  # pages write files
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # traced, not compiled
    for variable, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)  # as torchrun starts one process
    # float64 runs on the reference backend, which compiles nothing
    q, k, v = torch.randn(3, 1, 2, 64, 16, dtype=torch.float64)
    world: dict[str, Any] = {"flexmasks": flexmasks, "q": q, "k": k, "v": v}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL):
        # A tenth of the tokens, for which it says nothing less; guides have few.
        exec(block if "site/docs" in name else re.sub(r"00\b", "0", block), world)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if name == "README.md":
        assert world["out"].shape == (2, 8, 100, 64)


def test_what_padded_queries_give() -> None:
    q, k, v = torch.randn(3, 2, 4, 100, 16, dtype=torch.float64)
    lens = torch.tensor([100, 60])
    out = flexmasks.attention(q, k, v, mask="grouped_tril", seq_lens=lens)
    assert torch.equal(out[1, :, 60:], torch.zeros(4, 40, 16, dtype=torch.float64))
    kept = (torch.arange(100) < lens[:, None]).int()
    averages = F.scaled_dot_product_attention(q[1, :, 60:], k[1, :, :60], v[1, :, :60])
    for mask in (
        flexmasks.get_mask("padding", kv_lens=lens),
        flexmasks.get_mask("key_padding", attention_mask=kept),
        flexmasks.get_mask("causal") & flexmasks.get_mask("key_padding", attention_mask=kept),
    ):
        assert torch.allclose(flexmasks.attention(q, k, v, mask=mask)[1, :, 60:], averages)


def test_the_masks_that_the_readme_recommends_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Which mask do I want?")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z]\w*)\(([\w, ]*)\)`", section)
    assert len(named) > 12
    for name, parameters in named:
        known = definition("mask", name).parameters
        assert {*parameters.split(", ")} - {""} <= {*known}, name
        assert {n for n, p in known.items() if p.required} <= {*parameters.split(", ")} | {"max_length"}, name


def test_the_diffs_of_the_readme_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # what it returns is judged, not how fast
    imports, calls = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    q, k, v = torch.randn(3, 1, 2, 64, 16, dtype=torch.float64)
    outs = []
    for of_imports, of_calls in itertools.product("-+", repeat=2):
        code = [
            line[1:]
            for text, sign in ((imports, of_imports), (calls, of_calls))
            for line in text.splitlines()
            if line[0] == sign
        ]
        world: dict[str, Any] = {"flexmasks": flexmasks, "torch": torch, "q": q, "k": k, "v": v}
        exec("\n".join(code), world | {"ids": torch.arange(64) // 20, "S": 64}, world)
        outs.append(world["out"])
    for out in outs:
        torch.testing.assert_close(out, outs[0])


def test_the_machines_of_the_readme_are_those_of_the_page() -> None:
    tables = [
        re.findall(r"^\| .* \| (?:un)?tested.*", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name in ("README.md", "recipes/good_to_know.md")
    ]
    assert tables[0] == tables[1]
    assert len(tables[0]) > 5


def test_the_house_names_every_room_and_module() -> None:
    house = (ROOT / "flexmasks/README.md").read_text(encoding="utf-8")
    for path in (ROOT / "flexmasks").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"[`{path.name}/`]({path.name}/)" in house
        elif path.suffix == ".py":
            assert f"`{path.name}`" in house


def _code_of_the_house(part: str) -> dict[str, Any]:
    """Return what the example with some words defines."""
    house = (ROOT / "flexmasks/README.md").read_text(encoding="utf-8")
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", house, re.DOTALL) if part in code)
    world: dict[str, Any] = {}
    exec(example, world)
    return world


def test_the_backend_of_the_house_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _code_of_the_house('Backend "mine"')
    mine["my_kernel"] = lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    monkeypatch.setitem(BACKENDS, "mine", Backend("mine", mine["refuses"], mine["kernel"]))
    q, k, v = torch.randn(3, 1, 2, 10, 16)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(flexmasks.attention(q, k, v, mask="causal", backend="mine"), want)
    for mask in ("full", flexmasks.packed("causal", [0, 4, 10])):
        with pytest.raises(ValueError, match="it knows only the mask causal"):
            flexmasks.attention(q, k, v, mask=mask, backend="mine")


def test_the_form_of_the_house_is_made() -> None:
    kernel = _code_of_the_house("class Firsts")["_Mine"]()
    plan = MaskPlan(flexmasks.get_mask("sliding_window", window=2), Size(1, 1, 6, 6, torch.device("cpu")))
    assert kernel.forms(Plans(plan))[0].firsts.tolist() == [[[0, 0, 0, 1, 2, 3]]]


@pytest.mark.slow
def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    for entry in [*flexmasks.list_masks(), *flexmasks.list_scores()]:
        assert entry.name in listed
        assert main(["show", entry.name, "--length", "256"]) == 0
        assert entry.summary in capsys.readouterr().out
    assert main(["show", "sliding_window", "--length", "16", "--window", "2"]) == 0
    assert "·███····" in capsys.readouterr().out
    assert main(["show", "grouped_tril", "--length", "300", "--seq-lens", "[300, 100]", "-b", "1"]) == 0
    assert main(["show", "sliding_windw"]) == 2
    assert "did you mean 'sliding_window'" in capsys.readouterr().err
    assert main(["show", "sliding_window", "--windw", "3"]) == 2
    assert "no parameter is named `windw`; did you mean `window`" in capsys.readouterr().err


@pytest.mark.slow  # CI runs the demo each day, as README says
def test_the_demo_runs_under_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    # Compiled as users do: the kernels of other tests are slow at real sizes.
    compiler = None, os.environ.get("FLEXMASKS_CXX", "g++")
    with torch._inductor.config.patch({"cpp.cxx": compiler, "cpp_cache_precompile_headers": False}):
        assert main(["demo"]) == 0
    assert time.perf_counter() - start < 60
    printed = capsys.readouterr().out
    worst = float(re.search(r"materialized mask, .*: (\S+)", printed)[1])  # type: ignore[index]
    assert worst < (1e-5 if "float32" in printed else 3e-2)
    assert "SDPA + materialized mask" in printed
    assert "skipped:" in printed


if __name__ == "__main__":
    for file, picture in pictures().items():
        (ROOT / file).write_text(picture.svg(), encoding="utf-8")
    for file, chart in charts().items():
        (ROOT / file).write_text(chart, encoding="utf-8")
    table = choice_table.source(results("choice_gpu")["rows"])
    Path(measured_times.__file__).write_text(table, encoding="utf-8")
    exec(table, vars(times))  # the page tells what this table chooses
    for kind, file in stubs.FILES.items():
        (ROOT / file).write_text(stubs.stub(kind), encoding="utf-8")
    for name in GENERATED:
        (ROOT / name).write_text(up_to_date(name), encoding="utf-8")
