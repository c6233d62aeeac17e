"""Masks of other projects: each function is its project's mask, pair by pair, and equals a mask of this library."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import RECIPES, one_in  # it finds the benchmarks
from torch.nn.attention.flex_attention import create_mask

from benchmarks.wild import markdown
from benchmarks.wild_masks import WILD, Pair

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 256
LENGTHS = {"Radial attention": 400, "NABLA": 512}  # that have blocks of several kinds
Visible = Callable[[int, int, int], bool]  # of head, query and key
PROVED = (
    "Axial, rows", "Block diffusion", "Block diffusion, sampling", "Radial attention", "Transformer-XL",
    "Transformer-XL, same length", "VAR", "WeNet, chunks",
)  # fmt: skip
ORACLES: dict[str, Callable[[int, Pair], Visible]] = {}
"""Each project's rule in plain Python, from the length and, where values are drawn, the tensors of the function."""


def oracle(name: str) -> Callable[[Callable[[int, Pair], Visible]], Callable[[int, Pair], Visible]]:
    def add(make: Callable[[int, Pair], Visible]) -> Callable[[int, Pair], Visible]:
        ORACLES[name] = make
        return make

    return add


def captured(pair: Pair, name: str) -> Any:
    """A variable that the function captured, tensors as lists."""
    value = inspect.getclosurevars(pair.function).nonlocals[name]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@oracle("DFlash")
def _dflash(length: int, pair: Pair) -> Visible:
    (anchors,), (keep,) = captured(pair, "anchors"), captured(pair, "keep")
    assert 0 < sum(keep) < len(keep)

    def visible(h: int, q: int, kv: int) -> bool:
        in_own_block = length + q // 16 * 16 <= kv < length + q // 16 * 16 + 16
        return keep[q // 16] and (in_own_block if kv >= length else kv < anchors[q // 16])

    return visible


@oracle("P-EAGLE")
def _peagle(length: int, pair: Pair) -> Visible:
    elements = [*zip(captured(pair, "anchor"), captured(pair, "depth_of"), strict=True)]
    document = captured(pair, "documents")
    places = {element: i for i, element in enumerate(elements)}
    assert max(depth for _, depth in elements) > 2
    seen = []
    for anchor, depth in elements:
        context = {places[a, 0] for a in range(anchor + 1) if document[a] == document[anchor]}
        chain = {places[anchor, d] for d in range(depth + 1)}
        seen.append(context | chain if document[anchor] >= 0 else set())
    return lambda h, q, kv: kv in seen[q]


@oracle("JetSpec, training")
def _jetspec_training(length: int, pair: Pair) -> Visible:
    prefix = length // 2

    def visible(h: int, q: int, kv: int) -> bool:
        start = prefix + q // 16 * 16
        return kv < prefix or start <= kv <= start + q % 16

    return visible


def _path(pair: Pair) -> list[set[int]]:
    """The nodes above each node, and itself."""
    parents = [int(parent) for parent in pair.named.params["parents"]]
    paths = []
    for node in range(len(parents)):
        path = {node}
        while parents[node] >= 0:
            node = parents[node]
            path.add(node)
        paths.append(path)
    assert len(set(map(len, paths))) > 4
    return paths


@oracle("JetSpec, tree")
@oracle("Medusa")
def _tree(length: int, pair: Pair) -> Visible:
    path, prefix = _path(pair), pair.kv_len - pair.q_len
    return lambda h, q, kv: kv < prefix or kv - prefix in path[q]


@oracle("Trees of rollouts")
def _rollouts(length: int, pair: Pair) -> Visible:
    path = _path(pair)
    return lambda h, q, kv: kv in path[q]


@oracle("Self-Forcing, causal")
def _self_forcing_causal(length: int, pair: Pair) -> Visible:
    frame = length // 21
    group = [t // frame // 3 for t in range(21 * frame)]
    is_real = [t < 21 * frame for t in range(pair.q_len)]
    return lambda h, q, kv: group[kv] <= group[q] if is_real[q] and is_real[kv] else q == kv


@oracle("Self-Forcing, teacher")
def _self_forcing_teacher(length: int, pair: Pair) -> Visible:
    frame = length // 2 // 21
    tokens = [(noised, f // 3) for noised in (False, True) for f in range(21) for _ in range(frame)]

    def visible(h: int, q: int, kv: int) -> bool:
        if q >= len(tokens) or kv >= len(tokens):
            return q == kv
        (q_noised, q_group), (kv_noised, kv_group) = tokens[q], tokens[kv]
        if kv_noised:
            return q_noised and q_group == kv_group
        return kv_group < q_group if q_noised else kv_group <= q_group

    return visible


@oracle("Self-Forcing, image to video")
def _self_forcing_image(length: int, pair: Pair) -> Visible:
    frame = length // 21
    last = [0] + [4 * (f // 4) + 4 for f in range(20)]  # the last frame of each frame's group

    def visible(h: int, q: int, kv: int) -> bool:
        if q >= 21 * frame:
            return q == kv
        end = last[q // frame]
        return (q == kv) or end - 7 < kv // frame <= end

    return visible


@oracle("Radial attention")
def _radial(length: int, pair: Pair) -> Visible:
    frames, block = 16, 16
    size = length // frames
    shown = set()

    def decay(distance: int) -> float:
        return 2 ** size.bit_length() / 2 ** distance.bit_length()

    def in_pair(i: int, j: int, row: int, column: int) -> bool:
        """Of frames i and j, whether a token of the first sees one of the second."""
        if j == 0:
            return True
        distance = abs(i - j)
        width = size if distance == 0 else size // 2 if distance == 1 else max(decay(distance), block)
        is_kept = decay(distance) >= 128 or distance % int(128 / decay(distance)) == 0
        return is_kept and abs(row - column) <= width

    for i in range(frames):
        for j in range(frames):
            up, left = i * size % block, j * size % block
            whole = -(-size // block) * block
            for r in range((up + whole) // block):
                for c in range((left + whole) // block):
                    rows = [r * block + n - up for n in range(block) if 0 <= r * block + n - up < size]
                    columns = [c * block + n - left for n in range(block) if 0 <= c * block + n - left < size]
                    counts = [sum(in_pair(i, j, row, column) for row in rows) for column in columns]
                    some = [n / block for n in counts if n]
                    if some and sum(n > 1 / 3 for n in some) / (len(some) + 1e-9) > 0.6:
                        shown.add((i * size // block + r, j * size // block + c))
    assert 0.1 < len(shown) / (pair.q_len // block) ** 2 < 0.9
    return lambda h, q, kv: (q // block, kv // block) in shown


@oracle("NABLA")
def _nabla(length: int, pair: Pair) -> Visible:
    random, blocks = generator(), length // 64
    q_mean, k_mean = (torch.randn(1, 4, blocks, 16, generator=random)[0].tolist() for _ in range(2))
    shown = set()
    for h in range(4):
        for i in range(blocks):
            scores = [math.exp(sum(x * y for x, y in zip(q_mean[h][i], k, strict=True))) for k in k_mean[h]]
            rest = 0.0
            for weight, j in sorted((score / sum(scores), j) for j, score in enumerate(scores)):
                rest += weight
                if rest >= 0.1 or abs(i - j) <= 5:  # the canvas is one block high and wide
                    shown.add((h, i, j))
    assert len(shown) < 4 * blocks**2
    return lambda h, q, kv: (h, q // 64, kv // 64) in shown


@oracle("BAGEL")
def _bagel(length: int, pair: Pair) -> Visible:
    split, noise, document = (captured(pair, name) for name in ("images", "noise", "document"))
    assert len(set(document)) > 2
    assert len(set(noise)) > 2

    def visible(h: int, q: int, kv: int) -> bool:
        if document[q] != document[kv]:
            return False
        if noise[kv] >= 0:
            return noise[q] == noise[kv]
        return kv <= q or (split[q] >= 0 and split[q] == split[kv])

    return visible


@oracle("openpi")
def _openpi(length: int, pair: Pair) -> Visible:
    image, text = length // 4, length // 8
    prompt = 3 * image + text
    block = [0] * prompt + [1] + [2] * (length - prompt - 1)
    hidden = {*range(2 * image, 3 * image), *range(3 * image + text // 2, prompt)}
    return lambda h, q, kv: q not in hidden and kv not in hidden and block[kv] <= block[q]


@oracle("Gemma 3, global layers")
@oracle("Gemma 3, window layers")
def _gemma(length: int, pair: Pair) -> Visible:
    window = inspect.getclosurevars(pair.function).nonlocals.get("window", length)

    def visible(h: int, q: int, kv: int) -> bool:
        same_image = q // 32 == kv // 32 and q // 32 % 2 == 1
        return (kv <= q or same_image) and q - kv < window

    return visible


@oracle("PaliGemma")
def _paligemma(length: int, pair: Pair) -> Visible:
    prefix = length // 4 + 37
    return lambda h, q, kv: kv < prefix if q < prefix else kv <= q


@oracle("Mllama")
def _mllama(length: int, pair: Pair) -> Visible:
    locations = [length // 8, length // 2, length // 2 + 1]  # of the tokens that stand for images
    ends = [*locations[1:], length]
    for i in (1, 0):  # images that follow each other share the text behind them
        if ends[i] == locations[i] + 1:
            ends[i] = ends[i + 1]
    tiles = [4, 1, 2]

    def visible(h: int, q: int, kv: int) -> bool:
        image, tile = divmod(kv // 17, 4)
        return tile < tiles[image] and locations[image] <= q < ends[image]

    return visible


@oracle("Qwen2.5-VL, windows")
def _qwen_windows(length: int, pair: Pair) -> Visible:
    side = (math.isqrt(length) - 2) // 2
    windows = -(-side // 4)
    order = sorted((r // 4 * windows + c // 4, r % 4, c % 4) for r in range(side) for c in range(side))
    window = [number for number, _, _ in order for _ in range(4)]
    assert len({window.count(number) for number in window}) > 2
    return lambda h, q, kv: window[q] == window[kv]


@oracle("Swin, shifted windows")
def _swin(length: int, pair: Pair) -> Visible:
    side = math.isqrt(pair.q_len)
    rolled = torch.arange(side**2).view(side, side).roll((-4, -4), (0, 1))
    cut = [slice(0, -8), slice(-8, -4), slice(-4, None)]
    region = torch.zeros(side, side, dtype=torch.int64)
    for i, rows in enumerate(cut):
        for j, columns in enumerate(cut):
            region[rows, columns] = 3 * i + j
    seen: dict[int, set[int]] = {}
    for r in range(0, side, 8):
        for c in range(0, side, 8):
            inside = (slice(r, r + 8), slice(c, c + 8))
            for number in region[inside].unique():
                tokens = rolled[inside][region[inside] == number].tolist()
                seen |= {token: set(tokens) for token in tokens}
    return lambda h, q, kv: kv in seen[q]


def _groups(groups: torch.Tensor) -> Visible:
    """Of rows of tokens that see each other."""
    seen = {token: set(row) for row in groups.tolist() for token in row}
    return lambda h, q, kv: kv in seen[q]


@oracle("MaxViT, blocks")
def _maxvit_blocks(length: int, pair: Pair) -> Visible:
    side = math.isqrt(pair.q_len)
    windows = torch.arange(side**2).view(side // 8, 8, side // 8, 8).transpose(1, 2)
    return _groups(windows.reshape(-1, 64))


@oracle("MaxViT, grid")
def _maxvit_grid(length: int, pair: Pair) -> Visible:
    side = math.isqrt(pair.q_len)
    grid = torch.arange(side**2).view(8, side // 8, 8, side // 8).permute(1, 3, 0, 2)
    return _groups(grid.reshape(-1, 64))


@oracle("Axial, rows")
def _axial_rows(length: int, pair: Pair) -> Visible:
    return _groups(torch.arange(pair.q_len).view(math.isqrt(pair.q_len), -1))


@oracle("Axial, columns")
def _axial_columns(length: int, pair: Pair) -> Visible:
    return _groups(torch.arange(pair.q_len).view(math.isqrt(pair.q_len), -1).t())


@oracle("VAR")
def _var(length: int, pair: Pair) -> Visible:
    level = captured(pair, "level")
    starts = [i for i in range(len(level)) if i == 0 or level[i] != level[i - 1]]
    ends = [*starts[1:], len(level)]
    assert all(math.isqrt(n) ** 2 == n for n in (b - a for a, b in zip(starts, ends, strict=True)))
    end = [ends[level[i]] for i in range(len(level))]
    return lambda h, q, kv: kv < end[q]


@oracle("LongNet")
def _longnet(length: int, pair: Pair) -> Visible:
    seen: dict[tuple[int, int], set[int]] = {}
    for h in range(4):
        for start in range(0, length, length // 4):
            tokens = range(start + h, start + length // 4, 4)
            seen |= {(h, token): {other for other in tokens if other <= token} for token in tokens}
    return lambda h, q, kv: kv in seen.get((h, q), ())


@oracle("MoBA")
def _moba(length: int, pair: Pair) -> Visible:
    random, chunk = generator(), length // 32
    queries, keys = (torch.randn(4, length, 16, generator=random).double() for _ in range(2))
    gate = torch.einsum("hsd,hnd->hsn", queries, keys.view(4, 32, chunk, 16).mean(2)).tolist()

    def chosen(h: int, q: int) -> set[int]:
        own = q // chunk
        return {own, *sorted(range(own), key=lambda n: gate[h][q][n])[-3:]}

    seen = {(h, q): chosen(h, q) for h in range(4) for q in range(length)}
    return lambda h, q, kv: kv <= q and kv // chunk in seen[h, q]


@oracle("NSA, selected")
def _nsa_selected(length: int, pair: Pair) -> Visible:
    scores = torch.rand(length, length // 8, generator=generator()).tolist()
    chosen = [{q // 8, *sorted(range(q // 8), key=row.__getitem__)[-15:]} for q, row in enumerate(scores)]
    assert len(chosen[0]) == 1 < len(chosen[-1]) < length // 8
    return lambda h, q, kv: kv <= q and kv // 8 in chosen[q]


@oracle("NSA, compressed")
def _nsa_compressed(length: int, pair: Pair) -> Visible:
    return lambda h, q, kv: all(key <= q for key in range(8 * kv, 8 * kv + 8))


@oracle("Gist tokens")
@oracle("Gist tokens, decoder")
def _gist(length: int, pair: Pair) -> Visible:
    first, end = length // 2 - 3, length // 2 + 7
    is_causal = pair.named.name != "intervals"

    def visible(h: int, q: int, kv: int) -> bool:
        if is_causal and kv > q:
            return False
        return kv < end if q < end else kv >= first

    return visible


@oracle("Transformer-XL")
@oracle("Transformer-XL, same length")
def _transformer_xl(length: int, pair: Pair) -> Visible:
    queries = memory = length // 2
    hidden = torch.triu(torch.ones(queries, memory + queries), 1 + memory)
    if pair.named.name != "causal":
        hidden += torch.tril(torch.ones_like(hidden), -(queries - (memory + queries - memory)))
    table = hidden.bool().tolist()
    return lambda h, q, kv: not table[q][kv]


@oracle("XLNet")
def _xlnet(length: int, pair: Pair) -> Visible:
    index, is_masked = captured(pair, "perm_index"), captured(pair, "is_masked")
    assert all((i < 0) != masked for i, masked in zip(index, is_masked, strict=True))
    return lambda h, q, kv: q == kv or not is_masked[kv] or index[kv] < index[q]


@oracle("Block diffusion")
def _block_diffusion(length: int, pair: Pair) -> Visible:
    n = length // 2

    def visible(h: int, q: int, kv: int) -> bool:
        q_block, kv_block = q % n // 32, kv % n // 32
        if kv < n:  # noised
            return q < n and q_block == kv_block
        return kv_block < q_block if q < n else kv_block <= q_block

    return visible


@oracle("Block diffusion, sampling")
def _block_diffusion_sampling(length: int, pair: Pair) -> Visible:
    return lambda h, q, kv: kv < (q // 32 + 1) * 32


@oracle("WeNet, chunks")
def _wenet(length: int, pair: Pair) -> Visible:
    table = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        start, end = max((i // 16 - 4) * 16, 0), min((i // 16 + 1) * 16, length)
        table[i, start:end] = True
    rows = table.tolist()
    return lambda h, q, kv: rows[q][kv]


@oracle("NeMo, chunks")
def _nemo(length: int, pair: Pair) -> Visible:
    real = length - length // 10

    def visible(h: int, q: int, kv: int) -> bool:
        return q < real and kv < real and 0 <= q // 14 - kv // 14 <= 5

    return visible


@pytest.mark.parametrize("name", one_in(4, [*WILD]))
def test_the_function_is_the_projects_mask(name: str) -> None:
    length = LENGTHS.get(name, LENGTH)
    pair = WILD[name].pair(length)
    visible = ORACLES[name](length, pair)
    shown = create_mask(pair.function, 1, pair.heads, pair.q_len, pair.kv_len, device="cpu")
    want = [[[visible(h, q, kv) for kv in range(pair.kv_len)] for q in range(pair.q_len)] for h in range(pair.heads)]
    assert torch.equal(shown[0], torch.tensor(want))


@pytest.mark.parametrize("name", one_in(4, [*WILD]))
def test_it_equals_a_mask_of_this_library(name: str) -> None:
    for length in (LENGTH, 1000):
        found = WILD[name].pair(length).compare()
        assert found.equal, found


def test_every_mask_has_an_oracle() -> None:
    assert ORACLES.keys() == WILD.keys()
    assert len(WILD) >= 25


@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_the_file_defines_what_is_named(package: str) -> None:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    version, place = importlib.metadata.version(package), Path(found.origin).parents[1]
    masks = [wild for wild in WILD.values() if wild.project == f"huggingface/{package}" and wild.version == version]
    if not masks:
        pytest.skip(f"the masks are not those of {package} {version}")
    for wild in masks:
        file, _, names = wild.file.partition(": ")
        text = (place / file.removeprefix("src/")).read_text(encoding="utf-8")
        assert all(re.search(rf"\b(def|class) {name}\b", text) for name in names.split(".")), wild.name


def test_a_wrong_mask_differs() -> None:
    pair = WILD["Block diffusion"].pair(LENGTH)
    wrong = pair._replace(named=WILD["Block diffusion, sampling"].pair(LENGTH).named)
    assert not wrong.compare().equal


def test_every_mask_was_measured_as_it_is() -> None:
    """By `python recipes/benchmark.py wild --device cpu --json recipes/results/wild_cpu.json`."""
    rows = json.loads((RECIPES / "results/wild_cpu.json").read_text(encoding="utf-8"))["rows"]
    assert {row["case"] for row in rows} == WILD.keys()
    assert all(row["equal"] and row["same"] for row in rows)
    assert {row["case"] for row in rows if row["proof"]} == set(PROVED)


def test_figures_of_a_gpu_stand_on_the_page() -> None:
    planned = {"kind": "planning", "case": "MoBA", "q_len": 8, "kv_len": 16, "heads": 4, "blocks": 9, "full": 2}
    planned |= {"partial": 3, "undecided": 4, "function_ms": 1.25, "named_ms": 2.5, "torch_ms": 5.0}
    planned |= {"torch_first_s": 7.0, "same": True, "torch_fails": "SomeError: no. More"}
    passes = {"kind": "attention", "case": "DFlash", "shape": "1x16x8x64", "forward_ms": 2.0, "backward_ms": 3.0}
    ours = passes | {"who": "flexmasks", "backend": "flex_flash", "first_s": 1.0, "left_out": {}}
    theirs = passes | {"who": "flex_attention", "backward_ms": 8.0, "first_s": 9.0}
    alone = ours | {"case": "BAGEL", "left_out": {"flex_attention": "SomeError: no memory"}}
    machine = {"device": "a GPU", "device_type": "cuda", "torch": "2.11.0"}
    of_cpu = json.loads((RECIPES / "results/wild_cpu.json").read_text(encoding="utf-8"))
    text = markdown([of_cpu, {"machine": machine, "rows": [planned, ours, theirs, alone]}])
    rows = {tuple(re.split(r" +\| +", line.strip("| "))) for line in text.splitlines()}
    assert ("MoBA", "8 x 16, 4 heads", "2, 3 of 9", "4", "1.25", "2.5", "5 (7.0), not compiled") in rows
    assert "- MoBA: compiled, it fails with `SomeError: no`." in text
    times = "1 x 16 x 8 x 64", "`flex_flash`", "2, 3 (1.0)"
    assert ("DFlash", *times, "2, 8 (9.0)", "2.00 x") in rows
    assert any(row[:5] == ("BAGEL", *times, "SomeError: no memory") for row in rows)


@pytest.mark.parametrize("name", PROVED)
def test_it_is_proved_for_all_lengths(name: str) -> None:
    assert WILD[name].pair(LENGTH).proof().verdict == "proved"
