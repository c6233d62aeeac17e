"""`flexmasks.sdpa` is torch's scaled_dot_product_attention, and `sdpa_replaced` puts it in its place."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flexmasks
from flexmasks import dot_product
from flexmasks.backends import short, waiting
from flexmasks.masks import causal, sliding_window
from flexmasks.spec import pairs as spec_pairs

pytestmark = pytest.mark.usefixtures("one_thread")
TORCHS = F.scaled_dot_product_attention


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of any size are taken where their mask has an empty block or a hidden pair, and compile nothing. The list
    has the arguments of `attention`, and of torch's function as those of a mask "torch".
    """
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dot_product, "_FEWEST_PAIRS", {"cpu": 0})
    monkeypatch.setattr(dot_product, "_FEWEST_PAIRS_TO_COMPILE", 0)
    monkeypatch.setattr(dot_product, "_MOST_BLOCKS", {"cpu": 1.0})
    monkeypatch.setattr(short, "refuses_on_cpu", inspect.unwrap(short.refuses_on_cpu))
    monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 1 << 60)

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return flexmasks.attention(q, k, v, **options)

    def torchs(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *rest: Any, **options: Any) -> Tensor:
        calls.append({"mask": "torch", "attn_mask": attn_mask, **options})
        return TORCHS(q, k, v, attn_mask, *rest, **options)

    monkeypatch.setattr(dot_product, "attention", attention)
    monkeypatch.setattr(dot_product, "_torchs", torchs)
    return calls


def qkv(*shape: int, kv_len: int | None = None, kv_heads: int | None = None, **options: Any) -> list[Tensor]:
    of_keys = [*shape]
    of_keys[-2] = shape[-2] if kv_len is None else kv_len
    if kv_heads is not None:
        of_keys[-3] = kv_heads
    return [torch.randn(s, **options) for s in (shape, of_keys, of_keys)]


def test_the_signature_is_torchs() -> None:
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    parameters = inspect.signature(flexmasks.sdpa).parameters
    assert list(parameters) == names
    assert [p.default for p in parameters.values()][3:] == [None, 0.0, False, None, False]
    assert all(f"{name}=" in str(TORCHS.__doc__) or name in ("query", "key", "value") for name in names)


def test_calls_of_any_shape_equal_torchs(taken: list[dict[str, Any]]) -> None:
    drawing, backends = random.Random(0), set()
    for _ in range(60):
        dtype = drawing.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
        lead = drawing.choice([(), (2,), (2,), (2, 3), (1, 2, 2)])
        heads, kv_heads = drawing.choice([(4, 4), (4, 2), (3, 1)])
        shape = (*lead, heads, 20, 16)
        kv_len = drawing.choice([20, 30])
        options: dict[str, Any] = {"enable_gqa": heads != kv_heads, "scale": drawing.choice([None, 0.3, -0.3])}
        q, k, v = qkv(*shape, kv_len=kv_len, kv_heads=kv_heads, dtype=dtype)
        if options["enable_gqa"] and not lead:
            continue  # torch takes grouped heads with a batch only
        of_mask = [drawing.choice([1, n]) for n in (*lead, heads, 20, kv_len)][drawing.randrange(len(lead) + 2) :]
        shown = torch.rand(of_mask) < drawing.choice([0.3, 0.9, 1.0])
        pairs = drawing.choice(
            [
                shown,
                torch.zeros(of_mask, dtype=dtype).masked_fill(~shown, -math.inf),
                torch.zeros(of_mask, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min),
                torch.randn(of_mask, dtype=dtype),
                torch.ones(20, kv_len, dtype=torch.bool).tril(),
            ]
        )
        want = TORCHS(q, k, v, pairs, **options)
        out = flexmasks.sdpa(q, k, v, pairs, **options)
        assert out.shape == want.shape
        torch.testing.assert_close(out, want, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}))
        backends.add(str(taken[-1]["mask"]).partition("(")[0])
    assert backends >= {"torch", "dense", "causal", "None"}


def test_a_mask_is_used_as_what_it_says(taken: list[dict[str, Any]]) -> None:
    q, k, v = qkv(2, 4, 20, 16)
    shown = torch.ones(20, 20, dtype=torch.bool)
    flexmasks.sdpa(q, k, v, shown)
    assert taken[-1] == {"mask": "torch", "attn_mask": None, "is_causal": False, **OPTIONS}
    flexmasks.sdpa(q, k, v, torch.full((20, 20), -math.inf).triu(1))
    assert taken[-1] == {"mask": "torch", "attn_mask": None, "is_causal": True, **OPTIONS}
    shown[3, 3] = False
    out = flexmasks.sdpa(q, k, v, shown)
    assert taken[-1]["mask"].name == "dense"
    torch.testing.assert_close(out, TORCHS(q, k, v, shown))
    shown[4] = False  # in place
    out = flexmasks.sdpa(q, k, v, shown)
    torch.testing.assert_close(out, TORCHS(q, k, v, shown))
    assert (out[:, :, 4] == 0).all()


def test_numbers_of_each_head_are_looked_at_when_they_come_again(taken: list[dict[str, Any]]) -> None:
    q, k, v = qkv(2, 4, 20, 16)
    added = torch.randn(2, 4, 20, 20).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -math.inf)
    want = TORCHS(q, k, v, added)
    for who in ("torch", "causal", "causal"):
        torch.testing.assert_close(flexmasks.sdpa(q, k, v, added), want)
        mask = taken[-1]["mask"]
        assert who == (mask if isinstance(mask, str) else mask.name)
    added[:, :, :, 5] += 1.0  # in place
    flexmasks.sdpa(q, k, v, added)
    assert taken[-1]["mask"] == "torch"


OPTIONS = {"dropout_p": 0.0, "scale": None, "enable_gqa": False}


def test_torch_keeps_what_flexmasks_does_not_improve(taken: list[dict[str, Any]], monkeypatch: Any) -> None:
    q, k, v = qkv(2, 4, 20, 16)
    shown = torch.rand(20, 20) < 0.5

    def is_torchs(*given: Any, **options: Any) -> bool:
        flexmasks.sdpa(*given, **options)
        return taken[-1]["mask"] == "torch" and (taken[-1]["attn_mask"] is (given[3] if len(given) > 3 else None))

    assert is_torchs(q, k, v)
    assert is_torchs(q, k, v, is_causal=True)
    assert is_torchs(q, k, v, shown, dropout_p=0.5)  # at twice the time, with all blocks visible
    assert is_torchs(q, k, v, shown, dropout_p=1.0)
    assert is_torchs(q.requires_grad_(), k, v, shown)  # kernels for the CPU have no gradients
    q = q.detach()
    assert is_torchs(q.double(), k.double(), v.double(), shown)
    assert is_torchs(q[..., :8], k[..., :8], v, shown)
    assert is_torchs(q[0, 0], k[0, 0], v[0, 0], shown)
    assert is_torchs(q, k[:1], v[:1], shown)  # torch broadcasts batch elements
    assert is_torchs(*(x.to("meta") for x in (q, k, v, shown)))
    five = [x[None].expand(3, -1, -1, -1, -1) for x in (q, k, v)]
    assert is_torchs(*five, (torch.rand(2, 1, 20, 20) < 0.5))
    assert not is_torchs(*five, (torch.rand(3, 2, 1, 20, 20) < 0.5))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert is_torchs(q, k, v, shown)
    with FlopCounterMode(display=False):
        assert is_torchs(q, k, v, shown)
    traced = torch.jit.trace(flexmasks.sdpa, (q, k, v, torch.ones_like(shown)), check_trace=False)
    torch.testing.assert_close(traced(q, k, v, shown), TORCHS(q, k, v, shown))
    assert not is_torchs(q, k, v, shown)
    monkeypatch.setattr(dot_product, "_MOST_BLOCKS", {"cpu": 0.5})
    assert is_torchs(q, k, v, shown)
    with monkeypatch.context() as patched:  # a few of its queries see most blocks, and no more is looked at
        patched.setattr(spec_pairs, "_look", None)
        assert is_torchs(*qkv(2, 4, 300, 16), torch.randn(300, 300))
    monkeypatch.setattr(dot_product, "_FEWEST_PAIRS", {"cpu": 1000})
    flexmasks.sdpa(q, k, v, torch.ones(20, 20, dtype=torch.bool))
    assert taken[-1]["attn_mask"] is not None  # a short call is not looked at
    out = torch.func.vmap(lambda p: flexmasks.sdpa(q, k, v, p))(torch.stack([shown, ~shown]))
    torch.testing.assert_close(out[1], TORCHS(q, k, v, ~shown))


def test_autocast_casts_the_mask_too(taken: list[dict[str, Any]]) -> None:
    q, k, v = qkv(2, 4, 20, 16)
    pairs = torch.full((20, 20), torch.finfo(torch.float32).min)  # -inf in bfloat16
    pairs[::2] = 1.001  # 1 in bfloat16
    pairs[::2, ::3] = -math.inf
    with torch.autocast("cpu", torch.bfloat16):
        out = flexmasks.sdpa(q, k, v, pairs)
        torch.testing.assert_close(out, TORCHS(q, k, v, pairs), rtol=2e-2, atol=2e-2)
    assert (out[:, :, 1] == 0).all()
    assert taken[-1]["score"] is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, m: (q, k, v, m[:5]),
        lambda q, k, v, m: (q, k, v, m.int()),
        lambda q, k, v, m: (q, k, v, m.half()),
        lambda q, k, v, m: (q, k.double(), v, m),
        lambda q, k, v, m: (q, k[:, :2], v[:, :2], m),
        lambda q, k, v, m: (q, k[..., :8], v, m),
        lambda q, k, v, m: (q, k, v, m, 2.0),
        lambda q, k, v, m: (q[0, 0, 0], k, v, m),
        lambda q, k, v, m: (q, k, v, m[0]),
        lambda q, k, v, m: (None, k, v, m),
    ],
)
def test_errors_are_torchs(change: Callable[..., Any], taken: list[dict[str, Any]]) -> None:
    q, k, v = qkv(2, 4, 20, 16)
    given = change(q, k, v, torch.rand(20, 20) < 0.5)
    with pytest.raises(Exception) as error:  # noqa: PT011
        TORCHS(*given)
    with pytest.raises(type(error.value)) as ours:
        flexmasks.sdpa(*given)
    assert str(ours.value) == str(error.value)


def test_masks_of_this_library() -> None:
    q, k, v = qkv(2, 3, 4, 20, 16, kv_len=30, requires_grad=True)
    shown = flexmasks.dense_mask(sliding_window(window=7), 20, 30, q_offset=0)[0, 0]
    want = TORCHS(q, k, v, shown, scale=0.3)
    upstream = torch.randn_like(want)
    grads = torch.autograd.grad(want, (q, k, v), upstream)
    blocks = flexmasks.block_mask(sliding_window(window=7), 20, 30, q_offset=0)
    plan = flexmasks.plan(sliding_window(window=7), 20, 30, q_offset=0)
    for mask in (sliding_window(window=7), blocks, plan, lambda b, h, q, kv: (kv <= q) & (q - kv <= 7)):
        out = flexmasks.sdpa(q, k, v, mask, scale=0.3)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), upstream), grads)
    three = [x[0, 0] for x in (q, k, v)]
    torch.testing.assert_close(flexmasks.sdpa(*three, "causal"), TORCHS(*three, is_causal=True))
    with pytest.raises(ValueError, match=r"flexmasks\.sdpa: `is_causal` and `attn_mask` exclude each other"):
        flexmasks.sdpa(q, k, v, "causal", is_causal=True)
    torch.manual_seed(1)
    dropped = flexmasks.sdpa(q, k, v, causal(), 0.1)
    torch.manual_seed(1)
    of_four = [x.flatten(0, 1) for x in (q, k, v)]
    same = flexmasks.attention(*of_four, mask="causal", q_offset=0, dropout_p=0.1)
    assert torch.equal(dropped.flatten(0, 1), same)
    with pytest.raises(ValueError, match="query has 4 heads and key 2; pass `enable_gqa=True`"):
        flexmasks.sdpa(q, k[:, :, :2], v[:, :, :2], causal())
    grouped = flexmasks.sdpa(q, k[:, :, :2], v[:, :, :2], causal(), enable_gqa=True)
    torch.testing.assert_close(grouped, TORCHS(q, k[:, :, :2], v[:, :, :2], is_causal=True, enable_gqa=True))


def test_graphs_stay_whole_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dot_product, "_FEWEST_PAIRS", {"cpu": 0})
    compiled = torch.compile(flexmasks.sdpa, backend="eager", fullgraph=True)
    q, k, v = qkv(2, 4, 20, 16)
    for pairs in (torch.rand(20, 20) < 0.5, torch.ones(20, 20, dtype=torch.bool)):
        torch.testing.assert_close(compiled(q, k, v, pairs), TORCHS(q, k, v, pairs))
    with torch.compiler.set_stance("fail_on_recompile"):
        pairs = torch.zeros(20, 20, dtype=torch.bool)
        torch.testing.assert_close(compiled(q, k, v, pairs), TORCHS(q, k, v, pairs))
    torch.testing.assert_close(compiled(q, k, v, causal()), TORCHS(q, k, v, is_causal=True))


def test_inside_invariant_no_call_is_torchs(taken: list[dict[str, Any]]) -> None:
    q, k, v = qkv(2, 4, 20, 16, requires_grad=True)
    shown = torch.rand(2, 1, 20, 20) < 0.5
    with flexmasks.invariant():
        for options in ({}, {"is_causal": True}, {"attn_mask": shown}, {"attn_mask": torch.ones_like(shown)}):
            torch.testing.assert_close(flexmasks.sdpa(q, k, v, **options), TORCHS(q, k, v, **options))
    assert "torch" not in [call["mask"] for call in taken]


def test_inside_invariant_tensors_that_do_not_fit_or_have_no_values() -> None:
    q, visible = torch.randn(1, 2, 64, 16), torch.ones(64, 64).tril().bool()
    with flexmasks.invariant():
        with pytest.raises(ValueError, match="must broadcast to"):
            flexmasks.sdpa(q, q, q, visible[:10])
        with pytest.raises(TypeError, match="must be bool"):
            flexmasks.sdpa(q, q, q, visible.int())
        with pytest.raises(ValueError, match=r"a dimension that torch\.vmap hides"):
            torch.func.vmap(lambda pairs: flexmasks.sdpa(q, q, q, pairs))(visible[None])
        with FakeTensorMode() as mode:
            fake, pairs = mode.from_tensor(q), mode.from_tensor(visible)
            assert flexmasks.sdpa(fake, fake, fake, pairs).shape == q.shape


# --- in place of torch's function ---


def is_torchs() -> bool:
    return F.scaled_dot_product_attention is TORCHS and torch.backends.mha.get_fastpath_enabled()


def test_the_import_replaces_nothing() -> None:
    assert inspect.isbuiltin(TORCHS)
    assert is_torchs()


def test_all_is_as_before_when_the_last_block_ends() -> None:
    with flexmasks.sdpa_replaced():
        assert F.scaled_dot_product_attention is flexmasks.sdpa
        assert not torch.backends.mha.get_fastpath_enabled()
        with pytest.raises(RuntimeError, match="inside"), flexmasks.sdpa_replaced():
            raise RuntimeError("inside")
        assert F.scaled_dot_product_attention is flexmasks.sdpa
    assert is_torchs()
    with pytest.raises(KeyError), flexmasks.sdpa_replaced():
        raise KeyError
    assert is_torchs()

    @flexmasks.sdpa_replaced()
    def inside() -> bool:
        return is_torchs()

    assert not inside()
    assert not inside()
    assert is_torchs()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with flexmasks.sdpa_replaced():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_functions_of_others_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stood there before stands there again, and one that is put there inside stays."""
    other = lambda *given, **options: TORCHS(*given, **options)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", other)
    with flexmasks.sdpa_replaced():
        assert F.scaled_dot_product_attention is flexmasks.sdpa
    assert F.scaled_dot_product_attention is other
    q, k, v = qkv(1, 2, 20, 16)
    with flexmasks.sdpa_replaced():
        ours = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given: ours(*given))
    assert F.scaled_dot_product_attention(q, k, v).shape == q.shape


def test_threads_share_the_blocks() -> None:
    inside, leave, seen = threading.Barrier(2), threading.Event(), []

    def run() -> None:
        with flexmasks.sdpa_replaced():
            inside.wait()
            leave.wait()
            seen.append(F.scaled_dot_product_attention is flexmasks.sdpa)

    thread = threading.Thread(target=run)
    thread.start()
    with flexmasks.sdpa_replaced():
        inside.wait()
    assert F.scaled_dot_product_attention is flexmasks.sdpa  # the other thread is inside
    leave.set()
    thread.join()
    assert seen == [True]
    assert is_torchs()


def test_the_block_is_not_entered_in_graphs() -> None:
    def entering(x: Tensor) -> Tensor:
        with flexmasks.sdpa_replaced():
            return F.scaled_dot_product_attention(x, x, x)

    with pytest.raises(Exception, match="enter it outside of what torch"):
        torch.compile(entering, backend="eager", fullgraph=True)(torch.randn(1, 2, 20, 16))
    assert is_torchs()
    with flexmasks.sdpa_replaced():
        compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager", fullgraph=True)
        x = torch.randn(1, 2, 20, 16)
        torch.testing.assert_close(compiled(x), TORCHS(x, x, x))
    torch.testing.assert_close(compiled(x), TORCHS(x, x, x))


LENGTH, WIDTH = 24, 32
PADDED = torch.arange(LENGTH) >= torch.tensor([LENGTH, 17, 5])[:, None]  # True where nn.Transformer is to hide
WINDOW = flexmasks.dense_mask("local", LENGTH, left=4, right=4)[0, 0]
ADDED = torch.zeros(LENGTH, LENGTH).masked_fill(~WINDOW, -math.inf)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)


def multihead(attn: nn.MultiheadAttention, x: Tensor, **options: Any) -> Tensor:
    return attn(x, x, x, need_weights=False, **options)[0]


def of_torch() -> dict[str, tuple[nn.Module, Callable[..., Tensor], list[dict[str, Any]]]]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True), 2)
    masks: list[dict[str, Any]] = [{}, {"src_mask": ADDED}, {"src_mask": CAUSAL}, {"src_key_padding_mask": PADDED}]
    masks += [{"src_mask": ~WINDOW, "src_key_padding_mask": PADDED}, {"src_mask": CAUSAL, "is_causal": True}]
    of_encoder = [{n.replace("src_mask", "mask"): m for n, m in options.items()} for options in masks]
    of_attn = [{n.replace("src_mask", "attn_mask").replace("src_", ""): m for n, m in o.items()} for o in masks]
    of_decoder: list[dict[str, Any]] = [
        {"tgt_mask": CAUSAL, "tgt_is_causal": True},
        {"tgt_mask": ADDED, "memory_key_padding_mask": PADDED, "memory_mask": ADDED},
    ]
    return {
        "MultiheadAttention": (nn.MultiheadAttention(WIDTH, 2, batch_first=True), multihead, of_attn),
        "TransformerEncoderLayer": (layer, lambda m, x, **o: m(x, **o), masks),
        "TransformerEncoder": (nn.TransformerEncoder(layer, 2), lambda m, x, **o: m(x, **o), of_encoder),
        "TransformerDecoder": (decoder, lambda m, x, **o: m(x, x.flip(1), **o), of_decoder),
    }


@pytest.mark.parametrize("name", of_torch())
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_layers(name: str, taken: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in evaluation, and gradients in training. torch's fast path gives NaN to queries that see nothing, and
    0 to padding.
    """
    module, run, options = of_torch()[name]
    x = torch.randn(len(PADDED), LENGTH, WIDTH)
    for given in options:
        of_rows = ~PADDED if any("padding" in n and "memory" not in n for n in given) else torch.ones_like(PADDED)
        with torch.no_grad():
            fast = run(module.eval(), x, **given)
            with flexmasks.sdpa_replaced():
                out = run(module, x, **given)
            with monkeypatch.context() as patched:
                patched.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
                torch.testing.assert_close(out, run(module, x, **given), rtol=1e-4, atol=1e-5)
        if len(given) < 2:
            torch.testing.assert_close(out[of_rows], fast[of_rows], rtol=1e-4, atol=1e-5)
        results = []
        for replaced in (False, True):
            own = copy.deepcopy(module).train()
            leaf = x.clone().requires_grad_()
            with flexmasks.sdpa_replaced() if replaced else contextlib.nullcontext():
                run(own, leaf, **given).square().sum().backward()
            results.append([leaf.grad, *(p.grad for p in own.parameters())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert {str(call["mask"]).partition("(")[0] for call in taken} >= {"torch", "dense"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """With the sizes at which a GPU's calls are taken: outputs and gradients, new masks, and a mask of a CUDA graph."""
    within = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 5e-3, "atol": 5e-3}
    q, k, v, upstream = torch.randn(4, 2, 4, 1100, 64, device="cuda", dtype=dtype)
    place = torch.arange(1100, device="cuda")
    window = (place[:, None] - place).abs() < 100
    padding = (place < torch.tensor([300, 700], device="cuda")[:, None])[:, None, None]
    bias = torch.randn(1, 4, 1100, 1100, device="cuda", dtype=dtype)
    masks = {
        "window": window, "padding": padding, "all": padding | True, "causal": place[:, None] >= place,
        "bias": bias, "bias in a window": bias.masked_fill(~window, -math.inf),
        "lowest": torch.zeros_like(bias[:, :1]).masked_fill(~window | (place[:, None] < 3), torch.finfo(dtype).min),
        "sees nothing": window & (place[:, None] > 10),
        "learned": bias.masked_fill(~window, -math.inf).requires_grad_(),
    }  # fmt: skip
    for name, mask in masks.items():
        for given in (mask, mask.clone()):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)] + [given] * given.requires_grad
            out, want = (run(*leaves[:3], given) for run in (flexmasks.sdpa, TORCHS))
            if name == "lowest":  # torch's kernels differ in rows of nothing else
                torch.testing.assert_close(out[:, :, :3], v.mean(2, keepdim=True).expand(-1, -1, 3, -1), **within)
                torch.testing.assert_close(out[:, :, 3:], want[:, :, 3:], **within)
                continue
            if name == "sees nothing":  # some of torch's kernels give NaN
                assert (out[:, :, :11] == 0).all()
                torch.testing.assert_close(out[:, :, 11:], want[:, :, 11:], **within)
                continue
            torch.testing.assert_close(out, want, msg=lambda m, name=name: f"{name}: {m}", **within)
            got, exact = (torch.autograd.grad(x, leaves, upstream) for x in (out, want))
            torch.testing.assert_close(got, exact, msg=lambda m, name=name: f"{name}: {m}", **within)
        with torch.no_grad():
            out, want = flexmasks.sdpa(q, k, v, mask), TORCHS(q, k, v, mask)
            torch.testing.assert_close(out[:, :, 11:], want[:, :, 11:], **within)
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        flexmasks.sdpa(q, k, v, window)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = flexmasks.sdpa(q, k, v, window)
    window.logical_not_()
    graph.replay()
    torch.testing.assert_close(out, TORCHS(q, k, v, window), **within)
