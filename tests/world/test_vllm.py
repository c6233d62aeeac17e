"""The attention backend for vLLM: steps of a scheduler against dense attention, request by request.

Where vLLM is installed its classes and metadata are used, else the recipe's stand-ins with the same fields.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmasks

vllm_backend = pytest.importorskip("vllm_backend")
HEADS, KV_HEADS, SIZE = 4, 2, 16
SLOPES = [0.5, 0.25, 0.125, 0.0625]


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles nothing."""
    monkeypatch.setattr(vllm_backend, "DTYPE", torch.float64)


def _dense(requests: Any, q: Tensor, news: list[int], sees: Any, cap: float, slopes: Any, sinks: Any) -> Tensor:
    """Return attention as a textbook has it, for each request, query and head by itself."""
    outs = []
    for n, part in enumerate(q.double().split(news)):
        k, v = (torch.cat(x[n]).double() for x in (requests.keys, requests.values))
        for i, row in enumerate(part):
            place = len(k) - len(part) + i
            seen = torch.tensor([sees(n, place, kv) for kv in range(len(k))])
            for h in range(HEADS):
                of_head = h // (HEADS // KV_HEADS)
                scores = (k[:, of_head] @ row[h]) * 0.3
                scores = cap * torch.tanh(scores / cap) if cap else scores
                scores = scores - slopes[h] * (place - torch.arange(len(k))) if slopes else scores
                weights = scores.masked_fill(~seen, -math.inf).exp()
                total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
                outs.append((weights / total) @ v[:, of_head])
    return torch.stack(outs).view(-1, HEADS, SIZE) if outs else q.double()


def _prefixes(_: Any, batch: Any) -> flexmasks.Mask:
    """A mask with a number for each request of the batch."""
    return flexmasks.get_mask("prefix_lm", prefix_len=torch.arange(len(batch.kv_lens)) * 3)


CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "causal": ({}, None, lambda n, q, kv: kv <= q),
    "window": ({"sliding_window": 5}, None, lambda n, q, kv: q - 5 < kv <= q),
    "cap, slopes and sinks": (
        {"logits_soft_cap": 2.0, "alibi_slopes": SLOPES, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        None, lambda n, q, kv: kv <= q,
    ),
    "a mask of one's own": ({}, _prefixes, lambda n, q, kv: kv <= q or kv < 3 * n),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_steps_of_a_scheduler(name: str) -> None:
    """Prompts in chunks, decoding and both in one batch; padded tokens; pages in any order; requests without tokens."""
    arguments, mask_of, sees = CASES[name]
    torch.manual_seed(0)
    layer = vllm_backend.Attention(HEADS, SIZE, 0.3, num_kv_heads=KV_HEADS, **arguments)
    layer.mask_of = mask_of
    requests = vllm_backend.Requests(layer, count=3, pages=3, page_size=8)
    scores = (arguments.get(x) for x in ("logits_soft_cap", "alibi_slopes", "sinks"))
    cap, slopes, sinks = scores
    for news, padding in (([9, 0, 4], 3), ([1, 13, 1], 0), ([1, 1, 7], 2), ([1, 1, 1], 5)):
        q, out = requests.step(news, padding)
        torch.testing.assert_close(out, _dense(requests, q, news, sees, cap or 0, slopes, sinks), atol=1e-10, rtol=1e-8)
    used = sum(map(len, (torch.cat(x) for x in requests.keys)))
    assert int((requests.cache[1:] != 0).any(-1).sum()) == used * KV_HEADS  # nothing else was written but page 0


def test_layers_that_are_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = vllm_backend.Attention(HEADS, SIZE, 0.3, num_kv_heads=KV_HEADS)
    requests = vllm_backend.Requests(layer, count=2, pages=2, page_size=8)
    usual = vllm_backend.CommonAttentionMetadata
    monkeypatch.setattr(vllm_backend, "CommonAttentionMetadata", lambda **x: usual(**x, causal=False))
    q, out = requests.step([6, 9])
    want = _dense(requests, q, [6, 9], lambda n, q, kv: True, 0, None, None)
    torch.testing.assert_close(out, want, atol=1e-10, rtol=1e-8)
    monkeypatch.setattr(vllm_backend, "CommonAttentionMetadata", lambda **x: usual(**x, causal=torch.tensor([True])))
    with pytest.raises(NotImplementedError, match="causal beside others"):
        requests.step([1, 1])
    monkeypatch.setattr(vllm_backend, "CommonAttentionMetadata", lambda **x: usual(**x, causal=False))
    layer.sliding_window = 4
    with pytest.raises(NotImplementedError, match="on both sides"):
        requests.step([1, 1])


def test_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request alone, read at once, and among others, read in chunks, as `supports_batch_invariance` promises."""
    assert vllm_backend.FlexmasksBackend.supports_batch_invariance()
    monkeypatch.setattr(vllm_backend, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    entered = []
    usual = flexmasks.invariant
    monkeypatch.setattr(flexmasks, "invariant", lambda: entered.append(1) or usual())  # type: ignore[func-returns-value]
    layer = vllm_backend.Attention(HEADS, SIZE, 0.3, num_kv_heads=KV_HEADS)
    torch.manual_seed(1)
    among = vllm_backend.Requests(layer, count=3, pages=3, page_size=8)
    found = [among.step(news) for news in ([9, 7, 1], [1, 6, 1], [1, 1, 1])]
    starts = (9, 1, 1)
    q = torch.cat([q[start : start + n] for (q, _), start, n in zip(found, starts, (7, 6, 1), strict=True)])
    outs = torch.cat([out[start : start + n] for (_, out), start, n in zip(found, starts, (7, 6, 1), strict=True)])
    k, v = torch.cat(among.keys[1]), torch.cat(among.values[1])

    alone = vllm_backend.Requests(layer, count=1, pages=2, page_size=8)
    given = iter((q, k, v))
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: next(given))
    _, out = alone.step([len(q)])
    assert torch.equal(out, outs)
    assert len(entered) == 4


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ({"attn_type": "encoder_only"}, {"kv_cache_dtype": "fp8"}):
        with pytest.raises(NotImplementedError, match="attention with a cache of"):
            vllm_backend.Attention(HEADS, SIZE, 0.3, **arguments)
    with pytest.raises(NotImplementedError, match="attention with use_alibi_sqrt"):
        vllm_backend.Attention(HEADS, SIZE, 0.3, use_alibi_sqrt=True, sinks=None, block_m=None)
    layer = vllm_backend.Attention(HEADS, SIZE, 0.3)
    x = torch.ones(2, HEADS, SIZE)
    assert not bool(layer.forward(None, x, x, x, x, None, x.clone()).any())  # no metadata: vLLM measures memory
    with pytest.raises(NotImplementedError, match="quantized"):
        layer.forward(None, x, x, x, x, None, x, output_scale=x)
    monkeypatch.setenv("FLEXMASKS_VLLM_MASK", "vllm_backend:first_words_stay")
    assert vllm_backend.Attention(HEADS, SIZE, 0.3).mask_of is vllm_backend.first_words_stay


def test_vllm_finds_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads the entry point, resolves CUSTOM to the backend, and finds nothing that it lacks."""
    if not vllm_backend.WITH_VLLM:
        pytest.skip("vLLM is not installed")
    plugins = sys.modules.get("vllm.plugins") or __import__("vllm.plugins").plugins
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    folder = tmp_path / "vllm_backend-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-backend\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\nflexmasks = vllm_backend:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    plugins.load_general_plugins()
    backend = registry.AttentionBackendEnum.CUSTOM.get_class()
    assert backend is vllm_backend.FlexmasksBackend
    interface = sys.modules["vllm.v1.attention.backend"]
    assert issubclass(backend, interface.AttentionBackend)
    assert issubclass(backend.get_impl_cls(), interface.AttentionImpl)
    reasons = backend.validate_configuration(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True,
        use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=None,
        attn_type="decoder", has_sliding_window=True, use_non_causal=True, use_batch_invariant=True,
    )  # fmt: skip
    assert reasons == []
