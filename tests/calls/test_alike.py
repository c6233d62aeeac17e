"""`flexmasks.alike`: functions as other projects write them are found under their names here."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks.__main__ import main
from flexmasks.asking.named import entries_like

pytestmark = pytest.mark.usefixtures("one_thread")

_WINDOW = """
def get_sliding_window_mask_mod(window_size: int) -> _mask_mod_signature:
    if window_size < 1:
        raise ValueError("window size must be >= 1")

    def sliding_window_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor):
        return (kv_idx <= q_idx) & (q_idx - kv_idx < window_size)

    sliding_window_mod.__name__ = f"sliding_window_mod_{window_size}"
    return sliding_window_mod
"""
_IN_CHUNKS = """
def chunked_overlay(chunk_size: int, left_padding: torch.Tensor) -> Callable:
    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
        return (kv_idx - left_padding[batch_idx]) // chunk_size == (q_idx - left_padding[batch_idx]) // chunk_size
    return inner_mask
"""
_BLOCKED = """
def get_fixed_block_mask_mod(mask_mod, fixed_block_size):
    def blocked_mask_mod(b, h, q_idx, kv_idx):
        same = q_idx // fixed_block_size == kv_idx // fixed_block_size
        return same & mask_mod(b, h, q_idx % fixed_block_size, kv_idx % fixed_block_size)
    return blocked_mask_mod
"""
_DIFFUSION = """
def block_diff_mask(b, h, q_idx, kv_idx, block_size=None, n=None):
    clean_q, clean_kv = q_idx >= n, kv_idx >= n
    block_q = torch.where(clean_q, (q_idx - n) // block_size, q_idx // block_size)
    block_kv = torch.where(clean_kv, (kv_idx - n) // block_size, kv_idx // block_size)
    diagonal = (block_q == block_kv) & (clean_q == clean_kv)
    return diagonal | ((block_q > block_kv) & clean_kv & ~clean_q) | ((block_q >= block_kv) & clean_kv & clean_q)
"""
_SASA = """
CANVAS_WIDTH = 32
RADIUS = 3

def get_x_y(idx):
    return idx // CANVAS_WIDTH, idx % CANVAS_WIDTH

def sasa_mask(b, h, q_idx, kv_idx):
    (q_x, q_y), (kv_x, kv_y) = get_x_y(q_idx), get_x_y(kv_idx)
    return ((q_x - kv_x).abs() <= RADIUS) & ((q_y - kv_y).abs() <= RADIUS)

block_mask = create_block_mask(sasa_mask, B=None, H=None, Q_LEN=S, KV_LEN=S)
"""
_NATTEN = """
def generate_natten(canvas_w, canvas_h, kernel_w, kernel_h):
    def natten(b, h, q, kv):
        q_x, q_y, kv_x, kv_y = q % canvas_w, q // canvas_w, kv % canvas_w, kv // canvas_w
        x = q_x.clamp(kernel_w // 2, (canvas_w - 1) - kernel_w // 2)
        y = q_y.clamp(kernel_h // 2, (canvas_h - 1) - kernel_h // 2)
        return ((x - kv_x).abs() <= kernel_w // 2) & ((y - kv_y).abs() <= kernel_h // 2)
    return natten
"""
_METHOD = """
    @staticmethod
    def mod(self, batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= self.config.local_attention // 2
"""
_DENSE = """
def make_mask(seq_len, window):
    i, j = torch.arange(seq_len)[:, None], torch.arange(seq_len)
    return torch.where((j <= i) & (i - j < window), 0.0, float("-inf"))
"""
_OVERLAYS = """
def sliding_window_overlay(sliding_window: int) -> Callable:
    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
        return kv_idx > q_idx - sliding_window

    return inner_mask

def causal_mask_function(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
    return kv_idx <= q_idx

def sliding_window_causal_mask_function(sliding_window: int) -> Callable:
    return and_masks(sliding_window_overlay(sliding_window), causal_mask_function)
"""
_INSIDE = """
causal = q_idx >= kv_idx
near = (q_idx - kv_idx).abs() <= window
return causal & near & ((q_idx - kv_idx) % dilation == 0)
"""
_DOCUMENTS = "(seq_ids[b, q] == seq_ids[b, kv])"
FOUND = {
    "q_idx >= kv_idx": "causal()",
    _WINDOW: "sliding_window(window=window_size - 1)",
    _IN_CHUNKS: "chunked(chunk=chunk_size, start=left_padding)",
    _BLOCKED: "chunked_causal(chunk=fixed_block_size)",
    _DIFFUSION: "block_diffusion(length=n, block=block_size)",
    _SASA: "sasa(height=6, width=32, window=3)",
    _METHOD: "local(left=local_attention // 2, right=local_attention // 2)",
    _DENSE: "sliding_window(window=window - 1)",
    _OVERLAYS: "sliding_window(window=sliding_window - 1)",
    _INSIDE: "causal() & dilated_window(window=window, dilation=dilation)",
    "lambda b, h, q, kv: ((q - kv).abs() <= window) & ((q - kv) % dilation == 0)": (
        "dilated_window(window=window, dilation=dilation)"
    ),
    "lambda b, h, q, kv: (q >= kv) & (q // 8192 == kv // 8192)": "chunked_causal(chunk=8192)",
    "lambda b, h, q, kv: (kv <= q) & ((q - kv < 1024) | (kv < 4))": "sink_window(sinks=4, window=1023)",
    "lambda b, h, q, k: (k // 16 <= q // 16) & (q // 16 - k // 16 <= 4)": "block_window(chunk=16, left=4, right=0)",
    "lambda b, h, m, n: torch.abs(m - n) < 64": "local(left=63, right=63)",
    "lambda b, h, q, kv: (q.clamp(3, L - 4) - kv).abs() <= 3": "natten1d(length=L, kernel=7)",
    "lambda b, h, q, kv: layout[h, q // 16, kv // 16]": "block_sparse(visible_blocks=layout[None], block=16)",
    "lambda b, h, q, kv: level[q] >= level[kv]": "block_causal(ids=level)",
    "lambda b, h, q, kv: (q >= kv) & (kv < lens[b]) & (q < lens[b])": "grouped_tril(seq_lens=lens)",
    "lambda b, h, q, kv: (kv <= prefix[b]) | (kv <= q)": "prefix_lm(prefix_len=prefix + 1)",
    "lambda b, h, q, kv: (q >= kv) & keep[b, kv]": "causal() & key_padding(attention_mask=keep)",
    f"lambda b, h, q, kv: (q >= kv) & (q - kv <= 4096) & {_DOCUMENTS}": (
        "sliding_window(window=4096) & document(document_ids=seq_ids)"
    ),
    f"lambda b, h, q, kv: (q >= kv) & ((q - kv < 1024) | (kv < 4)) & {_DOCUMENTS}": (
        "document(document_ids=seq_ids) & sink_window(sinks=4, window=1023)"
    ),
    "lambda b, h, q, kv: ((q >= kv) & (q - kv < 8)) | (kv < 16)": "sliding_window(window=7) | padding(kv_lens=[16])",
    "lambda b, h, q, kv: (torch.abs(q - kv) <= 25) | is_global[q] | is_global[kv]": (
        "longformer(window=25, tokens=is_global)"
    ),
    "or_masks(lambda b, h, q, kv: kv < 16, causal_mask)": "prefix_lm(prefix_len=16)",
    "lambda score, b, h, q, kv: torch.where(q >= kv, score, -float('inf'))": "causal()",
    "lambda score, b, h, q, kv: 30.0 * torch.tanh(score / 30.0)": "softcap(cap=30.0)",
    "lambda score, b, h, q, kv: score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / H))": "alibi()",
    "lambda score, b, h, q, kv: score + bias[b, h, q, kv]": "dense_bias(bias=bias)",
    "lambda score, b, h, q, kv: score + rel[h, kv - q + 128]": "relative_bias(table=rel)",
}
_SLOW = {_NATTEN: "natten(height=canvas_h, width=canvas_w, kernel=kernel_w)"}
_AT_ONCE = 4  # the others take turns


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param(text, want, marks=pytest.mark.slow if n >= _AT_ONCE else (), id=str(n))
        for n, (text, want) in enumerate({**FOUND, **_SLOW}.items())
    ],
)
def test_functions_of_other_projects_are_found(text: str, want: str) -> None:
    first = flexmasks.alike(text)[0]
    assert first.written == want
    assert first.equal
    assert first.share == 1
    assert first.first is None


def test_what_is_found_is_the_function() -> None:
    ids = torch.arange(200) // 30

    def mine(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (ids[q] == ids[kv]) & (q - kv <= 9)

    first, second = flexmasks.alike(mine)[:2]
    want = create_mask(mine, 1, 1, 200, 200, device="cpu")
    assert isinstance(first.mask, flexmasks.Mask)
    assert torch.equal(flexmasks.dense_mask(first.mask, 200), want)
    assert isinstance(second.mask, flexmasks.Mask)
    differs = flexmasks.dense_mask(second.mask, 200) != want
    assert not second.equal
    assert second.share == pytest.approx(1 - differs.float().mean().item())
    assert second.first is not None
    assert bool(differs[second.first])


def test_documents_are_not_taken_for_masks_that_are_the_same_for_some_ids() -> None:
    ids = torch.arange(200) // 30
    found = flexmasks.alike(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]))
    # causal_blockwise(block_ids=ids) is the same for these, and has another meaning for negative ids
    assert found[0].written == "causal() & document(document_ids=ids)"


def test_the_length_reaches_all_lengths_of_batch_elements() -> None:
    lens = torch.tensor([300, 77])
    found = flexmasks.alike(lambda b, h, q, kv: (q >= kv) & (kv < lens[b]))
    assert found[0].written == "causal() & padding(kv_lens=lens)"
    assert found[0].equal
    assert found[0].lengths[-1] >= 300


def test_a_dense_mask_is_looked_up() -> None:
    visible = torch.ones(50, 50).tril().bool()
    first = flexmasks.alike(visible)[0]
    assert first.written == "causal()"
    assert first.lengths[-1] == 50
    assert flexmasks.alike(lambda b, h, q, kv: visible[q, kv])[0].written == "dense(visible=visible)"


def test_what_stands_before_a_function_runs_once_and_what_comes_after_it_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = """
print("before")
width = window + 1
mask_mod = lambda b, h, q, kv: (q >= kv) & (q - kv < width) & (kv % dilation == 0)
print("after")
"""
    assert list(flexmasks.alike(text).made_up) == ["window", "dilation"]
    assert capsys.readouterr().out == "before\n"


def test_given_values_are_used() -> None:
    text = "lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])"
    found = flexmasks.alike(text, ids=[[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2]])
    assert found[0].written == "causal() & document(document_ids=ids)"
    assert not found.made_up
    space: dict[str, Any] = {}
    exec("without_source = lambda b, h, q, kv: (q >= kv) & (q - kv <= 300)", space)
    assert flexmasks.alike(space["without_source"])[0].written == "sliding_window(window=300)"
    text = "lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]) & (q - kv < window)"
    found = flexmasks.alike(text, window=300)
    assert list(found.made_up) == ["ids"]
    assert found[0].written == "sliding_window(window=299) & document(document_ids=ids)"
    assert repr(found).splitlines()[-1].startswith("made up, since the text does not say: ids = ")


@pytest.mark.slow
def test_what_is_no_mask_of_the_library_is_said_to_differ() -> None:
    found = flexmasks.alike("lambda b, h, q, kv: (q * kv) % 7 == 3")
    assert not found[0].equal
    assert re.search(r"differs in \d\d\.\d\d% of the pairs of \d+ tokens, first in \(b, h, q, kv\) = ", repr(found))


@pytest.mark.parametrize(
    ("function", "names", "says"),
    [
        ("lambda b, h, q kv: q", {}, "the text is no Python; line 1"),
        ("", {}, "the text has no function of (b, h, q, kv)"),
        ("x = 3", {}, "3 is no function of (b, h, q, kv) and no dense mask"),
        ("def f(n):\n    return 3", {}, "3 is no function of (b, h, q, kv) and no dense mask"),
        ("lambda b, h, q, kv: near(q) > kv", {}, "calls `near` without its definition"),
        ("lambda b, h, q, kv: (q > window).none", {}, "window had to be made up: pass values, as in window=..."),
        ("lambda b, h, q, kv: q > kv", {"window": 3}, "leaves no `window` open"),
        (lambda b, h, q, kv: q > kv, {"window": 3}, "leaves no `window` open"),
        (lambda b, h, q, kv: q + kv, {}, "a mask function returns booleans, this one int64"),
        (lambda b, h: h, {}, "is no function of (b, h, q, kv) and no dense mask"),
        ("lambda b, h, q, kv: q >= kv and q > 3", {}, "the function fails (RuntimeError: vmap"),
        (3, {}, "pass a function, its text, or a dense mask, got 3"),
        (math.nan, {}, "pass a function, its text, or a dense mask, got nan"),
    ],
)
def test_wrong_arguments(function: Any, names: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(says)):
        flexmasks.alike(function, **names)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "lambda b, h, q, kv: (q >= kv) & (q - kv < window)"
    assert main(["list", "--like", text, "--with", "window=128"]) == 0
    assert capsys.readouterr().out.startswith("sliding_window(window=127): the same")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["list", "--like", "-"]) == 0
    assert capsys.readouterr().out.startswith("sliding_window(window=window - 1): the same")
    assert main(["list", "--like", "alike_me:causal"]) == 2
    assert "alike_me" in capsys.readouterr().err
    assert main(["list", "--like", "lambda b h"]) == 2
    assert "the text is no Python" in capsys.readouterr().err
    assert main(["list", "--like", "zzz"]) == 2
    assert "nothing is named like 'zzz'" in capsys.readouterr().err
    for wrong, says in ((["--with", "x"], "must be a name and a value"), (["--with", "x=1"], "to the text of --like")):
        with pytest.raises(SystemExit):
            main(["list", *wrong])
        assert says in capsys.readouterr().err


def test_the_command_reads_functions_of_modules(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "alike_mine.py").write_text(
        _WINDOW.replace(" -> _mask_mod_signature", "").replace(": torch.Tensor", "")
    )
    monkeypatch.chdir(tmp_path)
    assert main(["list", "--like", "alike_mine.py:get_sliding_window_mask_mod", "--with", "window_size=9"]) == 0
    assert capsys.readouterr().out.startswith("sliding_window(window=8): the same")


NAMED = {
    "sliding_window": "sliding_window",
    "window": "sliding_window",
    "documents": "document",
    "sliding_window_causal_mask_function": "sliding_window",
    "chunked_causal_mask_function": "chunked_causal",
    "BlockDiagonalCausalMask": "packed",
    "prefix lm": "prefix_lm",
    "LowerTriangularMaskWithTensorBias": "alibi",
    "make_swin_window_mask": "document",
    "xformers.ops.fmha.attn_bias.LowerTriangularMask": "causal",
    "natten 3d": "natten3d",
    "chunked attention": "chunked",
    "streamingllm": "sink_window",
    "SlidingWindowMask": "sliding_window",
    "soft cap": "softcap",
    "block sparse": "block_sparse",
}


def test_names_of_other_libraries_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert {text: entries_like(text)[0].name for text in NAMED} == NAMED
    assert entries_like("zzz") == []
    assert main(["list", "--like", "create_causal_mask"]) == 0
    assert "causal()" in capsys.readouterr().out
