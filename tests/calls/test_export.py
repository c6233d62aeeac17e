"""Calls that torch.export holds, calls of tensors without data, and calls that compute nothing."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
import torch.nn.functional as F
from helpers import in_campaigns, one_in
from torch import Tensor
from torch._export.serde.serialize import SerializeError
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask

import flexmasks
from flexmasks import get_mask

BATCH, HEADS, LENGTH, SIZE, V_SIZE = 2, 2, 40, 8, 12
IDS = torch.arange(LENGTH) // 10
WINDOW = get_mask("sliding_window", window=5)
DOCUMENTS = get_mask("causal") & get_mask("document", document_ids=IDS)
TABLE = torch.arange(LENGTH) % 7
BLOCK_MASK = flexmasks.block_mask(DOCUMENTS, LENGTH, block_size=32)
_Call = Callable[..., Tensor]


def _wave(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + torch.cos(0.7 * q + kv)  # another place of a query changes more than a whole row by one number


CALLS: dict[str, _Call] = {
    "causal": lambda q, k, v, lens: flexmasks.attention(q, k, v, mask="causal"),
    "window": lambda q, k, v, lens: flexmasks.attention(q, k, v, mask=WINDOW),
    "documents": lambda q, k, v, lens: flexmasks.attention(q, k, v, mask=DOCUMENTS),
    "lengths": lambda q, k, v, lens: flexmasks.attention(q, k, v, mask="grouped_tril", seq_lens=lens),
    "score": lambda q, k, v, lens: flexmasks.attention(q, k, v, mask="causal", score="alibi"),
    "later score": lambda q, k, v, lens: flexmasks.attention(q[:, :, :1], k, v, score=_wave, q_offset=k.shape[2] - 1),
    "function": lambda q, k, v, lens: flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: q - kv < 7),
    "sinks": lambda q, k, v, lens: flexmasks.attention(q, k, v, mask=WINDOW, sink_logits=torch.ones(HEADS)),
    "varlen": lambda q, k, v, lens: flexmasks.varlen_attention(
        *(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 9, 30]), mask="causal"
    ),
    "softmax": lambda q, k, v, lens: flexmasks.masked_softmax(q @ k.mT, mask="grouped_tril", seq_lens=lens),
}
# Calls whose length is fixed by a tensor that the model holds.
FIXED: dict[str, _Call] = {
    "block mask": lambda q, k, v, lens: flexmasks.attention(q, k, v, block_mask=BLOCK_MASK),
}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """A call between two weights, so that gradients are wanted."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call, self.weight = call, torch.nn.Parameter(torch.rand(SIZE))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
        return self.call(q * self.weight, k, v, lens)


def inputs(batch: int = BATCH, length: int = LENGTH) -> tuple[Tensor, ...]:
    lens = torch.randint(1, length, (batch,))
    return (*(torch.randn(batch, HEADS, length, n) for n in (SIZE, SIZE, V_SIZE)), lens)


def check_program(program: torch.export.ExportedProgram, model: Model, *given: Tensor) -> None:
    with torch.enable_grad():  # by the reference: kernels would be compiled
        want = model(*given)
    torch.testing.assert_close(program.module()(*given), want, atol=1e-5, rtol=1e-5)


# --- torch.export ---


def pairs(names: Sequence[str], quick: set[tuple[str, bool]]) -> list[Any]:
    """Return each name with and without gradients; the campaign tries those that are not quick."""
    marks = pytest.mark.campaign
    every = [(name, learns) for name in names for learns in (True, False)]
    return [pair if pair in quick else pytest.param(*pair, marks=marks) for pair in every]


@pytest.mark.parametrize(
    ("name", "learns"),
    pairs([*CALLS, *FIXED], {*((n, True) for n in (*CALLS, *FIXED)), ("lengths", False), ("block mask", False)}),
)
def test_export(name: str, learns: bool) -> None:
    model = Model((CALLS | FIXED)[name])
    with torch.set_grad_enabled(learns):
        program = torch.export.export(model, inputs(), strict=False)
        for _ in range(2):
            check_program(program, model, *inputs())


@pytest.mark.parametrize(
    ("name", "learns"),
    pairs(
        [n for n in CALLS if n not in ("documents", "varlen")],
        {("lengths", True), ("softmax", True), ("function", True), ("later score", True), ("causal", False)},
    ),
)
def test_export_with_any_batch_and_length(name: str, learns: bool) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=1)
    shapes = (*[{0: batch, 2: length}] * 3, {0: batch})
    model = Model(CALLS[name])
    with torch.set_grad_enabled(learns):
        program = torch.export.export(model, inputs(), dynamic_shapes=shapes, strict=False)
        for batch_size, n in ((BATCH, LENGTH), (3, 55), (5, 300), (1, 2)):
            check_program(program, model, *inputs(batch_size, n))


# --- one program for all lengths ---

LENGTHS = (1, 2, 3, 17, 127, 128, 129, 300)
ENTRIES = {(e.kind, e.name): e for e in (*flexmasks.list_masks(), *flexmasks.list_scores())}
# Masks and scores that are for one length, and that of their example: of an image, or of a table of blocks or pages.
OF_ONE_LENGTH = dict.fromkeys(
    ("natten", "natten3d", "sasa", "sliding_tile", "relative_bias_2d", "decomposed_bias"), 256
)
OF_ONE_LENGTH |= dict.fromkeys(("anchored", "block_sparse", "block_topk", "bsr", "edges", "paged"), 64)


class Registered(torch.nn.Module):
    """A call with a registered mask or score, whose tensors are inputs."""

    def __init__(self, kind: str, name: str, fixed: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.name, self.fixed = kind, name, fixed
        self.weight = torch.nn.Parameter(torch.rand(SIZE))

    def made(self, length: int, tensors: dict[str, Tensor]) -> Any:
        fixed = dict(self.fixed)
        if "length" in fixed:
            fixed["length"] = length // 2 if self.name in ("block_diffusion", "eagle3") else length
        make = flexmasks.get_mask if self.kind == "mask" else flexmasks.get_score
        return make(self.name, **fixed, **tensors)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        made: Any = {self.kind: self.made(q.shape[2], tensors)}
        return flexmasks.attention(q * self.weight, k, v, q_offset="first", **made)

    def expected(self, q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        n = q.shape[2]
        if self.kind == "score":
            made = self.made(n, tensors)
            return flexmasks.attention(q * self.weight, k, v, score=made, backend="reference")
        visible = flexmasks.dense_mask(self.made(n, tensors), n, batch=1, heads=1)
        return F.scaled_dot_product_attention(q * self.weight, k, v, attn_mask=visible).nan_to_num()


def tensors_of(entry: Any, length: int) -> dict[str, Tensor]:
    value = entry.example(length)
    known = value._definition.parameters
    given = {n: x for n, x in value.params.items() if isinstance(x, Tensor) or known[n].is_sequence(x)}
    return {n: x if isinstance(x, Tensor) else known[n].tensor(x, None) for n, x in given.items()}


def skip_strict_lengths() -> None:
    """Skip what README.md promises of torch 2.13 and later: strict export of a dynamic length."""
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("before torch 2.13, export of a dynamic length takes `strict=False`")


def check_all_lengths(kind: str, name: str, example: int, learns: bool, strict: bool) -> None:
    """Export at one length, with all dimensions dynamic that follow the length, and run at all lengths."""
    if strict:
        skip_strict_lengths()
    entry = ENTRIES[kind, name]
    base = OF_ONE_LENGTH.get(name, 64)
    example = base if name in OF_ONE_LENGTH else example
    tensors, longer = tensors_of(entry, base), tensors_of(entry, 2 * base)
    follow = {
        n: [d for d, size in enumerate(x.shape) if (size, longer[n].shape[d]) == (base, 2 * base)]
        for n, x in tensors.items()
    }

    def given(n: int) -> tuple[Any, ...]:
        cut = dict(tensors)
        for key, dims in follow.items():
            for dim in dims:
                cut[key] = torch.cat([cut[key]] * -(-n // base), dim).narrow(dim, 0, n).contiguous()
        return (*torch.randn(3, 1, 1, n, SIZE), cut)

    params = entry.example(base).params
    model = Registered(kind, name, {n: x for n, x in params.items() if n not in tensors})
    length = torch.export.Dim("length", min=1, max=512)
    shapes = (*[{2: length}] * 3, {n: dict.fromkeys(dims, length) for n, dims in follow.items()})
    with torch.set_grad_enabled(learns):
        program = torch.export.export(model, given(example), dynamic_shapes=shapes, strict=strict).module()
        tried = 0
        for n in (*LENGTHS, base):
            call = given(n)
            try:
                want = model.expected(*call)
            except ValueError:  # the mask is not for this length
                if name in OF_ONE_LENGTH and name not in ("block_topk", "edges"):  # which see nothing at such an index
                    # What is known of values only is found by reading: an index past the end.
                    with pytest.raises((ValueError, IndexError, RuntimeError), match=f"{kind} '{name}'|out of bounds"):
                        program(*call)
                continue
            torch.testing.assert_close(program(*call), want, atol=1e-5, rtol=1e-5)
            tried += 1
        assert tried


@pytest.mark.parametrize(
    ("kind", "name", "example", "learns"),
    [
        ("mask", "sliding_window", 10, True),
        ("mask", "sliding_window", 10, False),
        *one_in(2, [("mask", "sliding_window", 64, True), ("mask", "local", 64, True)]),
        ("mask", "bidirectional_spans", 64, False),
        ("mask", "block_sparse", 64, True),
        *one_in(3, [("mask", "natten1d", 64, True), ("mask", "sasa", 256, False), ("mask", "multi_item", 64, False)]),
        ("score", "dense_bias", 10, True),
    ],
)
def test_one_program_for_all_lengths(kind: str, name: str, example: int, learns: bool) -> None:
    check_all_lengths(kind, name, example, learns, strict=False)


@pytest.mark.slow
def test_one_strict_program_for_all_lengths() -> None:
    check_all_lengths("mask", "sliding_window", 10, True, strict=True)


@pytest.mark.campaign
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_mask_and_score_in_one_program_for_all_lengths(kind: str, name: str, learns: bool, strict: bool) -> None:
    for example in (64, 150):
        check_all_lengths(kind, name, example, learns, strict)


@pytest.mark.parametrize(
    ("mask", "lengths"), one_in(2, list(itertools.product(["causal", WINDOW, "full"], [(10, 40), (40, 12)])))
)
def test_one_program_for_all_lengths_of_queries_and_keys(mask: Any, lengths: tuple[int, int]) -> None:
    model = Model(lambda q, k, v, lens: flexmasks.attention(q, k, v, mask=mask, q_offset="first"))
    batch, rows, columns = (torch.export.Dim(name, min=1, max=512) for name in ("batch", "rows", "columns"))
    shapes = ({0: batch, 2: rows}, *[{0: batch, 2: columns}] * 2, {0: batch})

    def given(batch: int, q_len: int, kv_len: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, HEADS, q_len, SIZE), *torch.randn(2, batch, HEADS, kv_len, SIZE), torch.ones(batch)

    program = torch.export.export(model, given(2, *lengths), dynamic_shapes=shapes, strict=False).module()
    for sizes in ((1, 1, 1), (3, 2, 2), (2, 129, 129), (1, 5, 130), (2, 130, 7)):
        visible = flexmasks.dense_mask(mask, *sizes[1:], q_offset="first")
        q, k, v, lens = given(*sizes)
        want = F.scaled_dot_product_attention(q * model.weight, k, v, attn_mask=visible).nan_to_num()
        torch.testing.assert_close(program(q, k, v, lens), want, atol=1e-5, rtol=1e-5)


class Biased(torch.nn.Module):
    """A call whose score function captures a parameter, by the module or by itself."""

    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.by_module, self.table = by_module, torch.nn.Parameter(torch.randn(HEADS, 64))

    def forward(self, q: Tensor) -> Tensor:
        table = self.table

        def own(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + self.table[h, (i - j).clamp(-32, 31) + 32]

        def captured(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + table[h, (i - j).clamp(-32, 31) + 32]

        return flexmasks.attention(q, q, q, mask="causal", score=own if self.by_module else captured)

    def expected(self, q: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        bias = self.table[:, (i[:, None] - i).clamp(-32, 31) + 32]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias.masked_fill(i[:, None] < i, -math.inf))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by_module", "strict", "learns"),
    [
        (True, False, True),
        *one_in(2, [(False, False, False), (False, True, True)]),
        *map(in_campaigns, [(True, False, False), (False, False, True), (False, True, False)]),
    ],
)
def test_a_score_function_that_captures_a_parameter(by_module: bool, strict: bool, learns: bool) -> None:
    if strict:
        skip_strict_lengths()
    model, length = Biased(by_module), torch.export.Dim("length", min=2, max=512)
    with torch.set_grad_enabled(learns):
        exported = torch.export.export(
            model, (torch.randn(1, HEADS, 10, SIZE),), dynamic_shapes=({2: length},), strict=strict
        )
        program = exported.module()
        for n in LENGTHS[1:]:
            q = torch.randn(1, HEADS, n, SIZE, requires_grad=learns)
            out, want = program(q), model.expected(q)
            torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
            if learns:
                got, expected = (
                    torch.autograd.grad(x.sin().sum(), t)
                    for x, t in ((out, (q, program.table)), (want, (q, model.table)))
                )
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_what_no_program_for_all_lengths_takes() -> None:
    length = torch.export.Dim("length", min=1, max=512)
    given, shapes = inputs(), (*[{2: length}] * 3, None)
    wrong = Model(lambda q, k, v, lens: flexmasks.attention(q, k, v, mask="sliding_window", window=-1))
    with pytest.raises(ValueError, match="`window` must be int in 0"):
        torch.export.export(wrong, given, dynamic_shapes=shapes, strict=False)
    named = Model(lambda q, k, v, lens: flexmasks.attention(q, k, v, mask=WINDOW, backend="flex"))
    with torch.no_grad(), pytest.raises(ValueError, match=r"'flex' cannot run .* tie an exported program to a range"):
        torch.export.export(named, given, dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize("strict", [False, True])
def test_programs_for_all_lengths_are_saved_before_any_other_call(strict: bool) -> None:
    flexmasks.clear_caches()  # what is known of a mask from an earlier call is not looked at again
    model = Model(CALLS["score"])
    length = torch.export.Dim("length", min=2)
    q, k, v, lens = inputs()
    shapes = ({2: length}, {2: length}, {2: length}, {})
    program = torch.export.export(model, (q, k, v, lens), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    others = inputs(length=LENGTH + 7)
    assert torch.allclose(loaded(*others), model(*others), atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_of_last_queries_takes_all_of_them(strict: bool) -> None:
    if strict:
        skip_strict_lengths()
    model = Model(lambda q, k, v, lens: flexmasks.attention(q, k, v, mask="causal", q_offset="last"))
    q_len, kv_len = (torch.export.Dim(name, min=1, max=512) for name in ("q_len", "kv_len"))
    shapes = ({2: q_len}, {2: kv_len}, {2: kv_len}, {})
    _, k, v, lens = inputs()
    example, *_ = inputs(length=7)
    program = torch.export.export(model, (example, k, v, lens), dynamic_shapes=shapes, strict=strict).module()
    for count in (2, 7, LENGTH):
        q, *_ = inputs(length=count)
        assert torch.allclose(program(q, k, v, lens), model(q, k, v, lens), atol=1e-5)


def test_an_exported_program_learns() -> None:
    model = Model(CALLS["score"])
    given = inputs()
    program = torch.export.export(model, given, strict=False).module()
    for module in (model, program):
        module(*given).sin().sum().backward()
    torch.testing.assert_close(program.weight.grad, model.weight.grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "learns"),
    [
        *one_in(3, [("lengths", True), ("function", False), ("softmax", True)]),
        *map(in_campaigns, [("lengths", False), ("function", True), ("softmax", False)]),
    ],
)
def test_strict_export(name: str, learns: bool) -> None:
    model = Model(CALLS[name])
    with torch.set_grad_enabled(learns):
        program = torch.export.export(model, inputs(), strict=True)
        check_program(program, model, *inputs())


@pytest.mark.parametrize("name", one_in(2, [*CALLS, *FIXED]))
def test_programs_for_onnx_hold_plain_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.onnx.is_in_onnx_export", lambda: True)
    model = Model((CALLS | FIXED)[name])
    program = torch.export.export(model, inputs(), strict=False)
    monkeypatch.undo()
    called = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert called
    assert not [name for name in called if "flex" in name]
    check_program(program, model, *inputs())


@pytest.mark.parametrize("is_full", [False, True])
def test_programs_for_onnx_see_given_blocks(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the listed blocks are seen, of full ones all pairs."""
    count, columns = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)
    lists = (count * 0, columns, count, columns) if is_full else (count, columns)
    function = (lambda b, h, q, kv: kv < 0) if is_full else (lambda b, h, q, kv: kv != 200)
    made: Any = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=function, seq_lengths=(256, 256))
    q, k, v = torch.randn(3, 1, 1, 256, 16)
    visible = (torch.arange(256) >= 128) & (is_full | (torch.arange(256) != 200))

    class InBlocks(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = flexmasks.attention(q, k, v, block_mask=made)
            return out

    monkeypatch.setattr("torch.onnx.is_in_onnx_export", lambda: True)
    program = torch.export.export(InBlocks(), (q, k, v), strict=False)
    monkeypatch.undo()
    torch.testing.assert_close(program.module()(q, k, v), F.scaled_dot_product_attention(q, k, v, visible[None]))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: flexmasks.masked_softmax(x, mask="causal"),
        lambda x: flexmasks.scaled_masked_softmax(x, torch.zeros(1, 1, dtype=torch.bool)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_exports_by_tracing_of_a_softmax_are_refused(call: Callable[[Tensor], Tensor]) -> None:
    class Softmax(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return call(x)

    with torch.no_grad(), pytest.raises(RuntimeError, match="needs dynamo=True"):
        torch.onnx.export(Softmax(), (torch.zeros(1, 2, 8, 8),), io.BytesIO(), dynamo=False)


@pytest.mark.filterwarnings("ignore")
def test_onnx() -> None:
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    model = Model(CALLS["lengths"])
    program = torch.onnx.export(model, inputs(), dynamo=True, verbose=False)
    evaluator = reference.ReferenceEvaluator(program.model_proto)
    given = inputs()
    names = [i.name for i in program.model_proto.graph.input]
    (got,) = evaluator.run(None, {n: x.numpy() for n, x in zip(names, given, strict=True)})
    torch.testing.assert_close(torch.tensor(got), model(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["causal", "window", "score", "varlen"])
@pytest.mark.filterwarnings("ignore")
def test_jit_trace_says_what_to_do(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot .* use torch\.export\.export"):
        torch.jit.trace(Model(CALLS[name]), inputs())


# --- tensors without data ---


def _paged(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
    table = torch.arange(5, device=q.device).expand(len(q), 5)
    caches = (x.new_zeros((9, 8, HEADS, x.shape[3])) for x in (k, v))
    return flexmasks.paged_attention(q[:, :, :1], *caches, table, lens, mask="causal")  # type: ignore[no-any-return]


WITHOUT_DATA = {n: c for n, c in CALLS.items() if n not in ("sinks", "varlen")} | {"paged": _paged}


@pytest.mark.parametrize("name", WITHOUT_DATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_and_meta_tensors(name: str, dtype: torch.dtype) -> None:
    call = WITHOUT_DATA[name]
    given = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs()]
    want = call(*given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in given]
        results = [(call(*fake), fake)]
    meta = [x.detach().to("meta").requires_grad_(x.requires_grad) for x in given]
    results.append((call(*meta), meta))
    for out, leaves in results:
        assert (out.shape, out.dtype, out.device) == (want.shape, want.dtype, leaves[0].device)
        with mode if leaves is fake else torch.enable_grad():
            out.sum().backward()
        assert leaves[0].grad is not None
        assert leaves[0].grad.shape == given[0].shape


def test_the_lse_of_fake_and_meta_tensors() -> None:
    q, k, v, _ = (x.to("meta") for x in inputs())
    out, lse = flexmasks.attention(q, k, v, mask="causal", return_lse=True, q_offset=3)
    assert (lse.shape, lse.dtype, lse.device.type) == (q.shape[:3], torch.float32, "meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert flexmasks.attention(q, k, v, mask="causal").shape == out.shape
        with FakeTensorMode() as mode:
            assert flexmasks.attention(*map(mode.from_tensor, inputs()[:3])).dtype == torch.bfloat16


def test_arguments_are_checked_without_data() -> None:
    q, k, v, _ = (x.to("meta") for x in inputs())
    with pytest.raises(ValueError, match="no mask is named"):
        flexmasks.attention(q, k, v, mask="casual")
    with pytest.raises(ValueError, match="seq_lens"):
        flexmasks.attention(q, k, v, mask="grouped_tril", seq_lens=torch.zeros(5, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="same length"):
        flexmasks.attention(q, k, v[:, :, :9])


def test_what_needs_data_says_so() -> None:
    q, k, v, lens = (x.to("meta") for x in inputs())
    with pytest.raises(ValueError, match="`explain` needs q, k and v with data"):
        flexmasks.explain(q, k, v, mask="causal")
    for call in (flexmasks.block_mask, flexmasks.dense_mask):
        with pytest.raises(ValueError, match="hold data"):
            call("causal", LENGTH, device="meta")
        with pytest.raises(ValueError, match="hold data"):
            call("grouped_tril", LENGTH, seq_lens=lens)
        with FakeTensorMode(), pytest.raises(ValueError, match="FakeTensorMode"):
            call("causal", LENGTH)


# --- calls that compute nothing ---

EMPTY = {"no batch": (0, 9, 9), "no queries": (2, 0, 9), "no keys": (2, 9, 0), "nothing": (0, 0, 0)}


def _slopes(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse of a call that learns its slopes."""
    return flexmasks.attention(q, k, v, mask="causal", score="alibi", slopes=slopes, return_lse=True)  # type: ignore[no-any-return]


DTYPES = torch.float32, torch.float16, torch.float64
COMPILED = {("no batch", torch.float32), ("no queries", torch.float16), ("no keys", torch.float64)}


@pytest.mark.parametrize(
    ("sizes", "dtype", "compiled"),
    [
        pytest.param(
            EMPTY[name], dtype, how, id=f"{name}, {dtype}{', compiled' * how}",
            marks=pytest.mark.campaign if how and (name, dtype) not in COMPILED else [],
        )
        for name, dtype, how in itertools.product(EMPTY, DTYPES, (False, True))
    ],
)  # fmt: skip
def test_empty(sizes: tuple[int, int, int], dtype: torch.dtype, compiled: bool) -> None:
    batch, q_len, kv_len = sizes
    q = torch.full((batch, HEADS, q_len, SIZE), math.nan, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(batch, 1, kv_len, n, dtype=dtype, requires_grad=True) for n in (SIZE, V_SIZE))
    slopes = torch.rand(HEADS, requires_grad=True)
    call = torch.compile(_slopes, fullgraph=True, backend="aot_eager") if compiled else _slopes
    out, lse = call(q, k, v, slopes)
    assert torch.equal(out, torch.zeros(batch, HEADS, q_len, V_SIZE, dtype=dtype))
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(lse, torch.full((batch, HEADS, q_len), -math.inf, dtype=precise))
    (out.sum() + lse.nan_to_num(neginf=0.0).sum()).backward()
    for x in (q, k, v, slopes):
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_empty_in_other_layouts() -> None:
    q, k, v = torch.randn(3, 0, HEADS, SIZE)
    assert flexmasks.varlen_attention(q, k, v, [0, 0], mask="causal").shape == (0, HEADS, SIZE)
    caches = torch.randn(2, 4, 8, HEADS, SIZE)
    tables = torch.zeros((0, 3), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    assert flexmasks.paged_attention(torch.randn(0, HEADS, 1, SIZE), *caches, *tables).shape == (0, HEADS, 1, SIZE)
    sinks = torch.rand(HEADS)
    q, k, v = torch.randn(2, HEADS, 9, SIZE), *torch.randn(2, 2, HEADS, 0, SIZE)
    out, lse = flexmasks.attention(q, k, v, sink_logits=sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand(2, HEADS, 9))
    lens = torch.zeros(0, dtype=torch.int64)
    assert not len(flexmasks.attention(q[:0], q[:0], q[:0], mask="grouped_tril", seq_lens=lens))
    assert not len(flexmasks.masked_softmax(torch.randn(0, HEADS, 3, 3), mask="causal"))


# --- saved programs ---

_LOAD = """
import sys, torch, flexmasks
for folder in sys.argv[1:]:
    inputs, want = torch.load(folder + "/results.pt")
    loaded = torch.export.load(folder + "/program.pt2").module()
    out = loaded(*inputs)
    assert torch.allclose(out, want, atol=1e-6), folder
    out.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in loaded.parameters()), folder
"""


class _Vmapped(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(torch.sin)(x)


def _saves_vmap() -> bool:
    """Return whether torch saves a program with vmap."""
    try:
        torch.export.save(torch.export.export(_Vmapped(), (torch.ones(2),), strict=False), io.BytesIO())
    except SerializeError:
        return False
    return True


@pytest.mark.slow
def test_saved_programs_need_the_import_of_flexmasks_alone(tmp_path: Path) -> None:
    names = ["lengths", *(["softmax"] if _saves_vmap() else [])]  # torch 2.11 saves no vmap, which computes masks there
    for name in names:
        (tmp_path / name).mkdir()
        model, given = Model(CALLS[name]), inputs()
        torch.export.save(torch.export.export(model, given, strict=False), tmp_path / name / "program.pt2")
        torch.save((given, model(*given).detach()), tmp_path / name / "results.pt")
    folders = [str(tmp_path / name) for name in names]
    ran = fresh.run(_LOAD, *folders)
    assert ran.returncode == 0, ran.stderr
