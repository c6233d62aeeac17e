"""Backend "cudnn": on a CPU with a double of the package, which computes attention of intervals in float64."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cudnn_double
import pytest
import torch
from functions import Drawn, compiled, drawn, structured
from helpers import RECIPES, arguments, error, label, on_gpu_of, spread, try_examples
from oracles import MASK_CASES, Case, attend, dense
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from benchmarks import intervals
from flexmasks.backends import cudnn, table
from flexmasks.backends.call import Unavailable
from flexmasks.cache import bytes_of
from flexmasks.plans import plan
from flexmasks.plans.mask_plan import Computed, MaskPlan
from flexmasks.spec.parameters import Size

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_double.replace(monkeypatch)
    cudnn_double.CALLS.clear()


def tensors(case: Any, kv_heads: int | None = None, **given: Any) -> list[Tensor]:
    """Return q, k and v of a case in float64, as leaves."""
    generator = torch.Generator().manual_seed(3)
    shapes = (case.heads, case.q_len, 16), *[(kv_heads or case.heads, case.kv_len, size) for size in (16, 8)]
    made = [torch.randn(case.batch, *s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(**given).requires_grad_() for x in made]


def check(leaves: list[Tensor], visible: Tensor, mask: Any, tolerance: float = 1e-12, **given: Any) -> None:
    """Check output, lse and gradients of both."""
    got = flexmasks.attention(*leaves, mask=mask, backend="cudnn", return_lse=True, **given)
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    want = attend(*exact, visible, scale=given.get("scale"))
    generator = torch.Generator().manual_seed(4)
    slopes = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in want]
    assert bool((got[1].isinf().cpu() == want[1].isinf()).all())
    grads = []
    for inputs, (out, lse) in ((leaves, got), (exact, want)):
        given_slopes = [x.to(out.device) for x in slopes]
        value = (out.double() * given_slopes[0]).sum() + (lse.double() * given_slopes[1])[~lse.isinf()].sum()
        grads.append(torch.autograd.grad(value, inputs))
    finite = [torch.where(x.isinf(), 0.0, x.double()) for x in (got[1], want[1])]
    for a, b in zip((got[0], finite[0], *grads[0]), (want[0], finite[1], *grads[1]), strict=True):
        assert error(a, b) <= tolerance


# Masks that the benchmark of intervals has, and more.
NAMES = {
    "band", "bidirectional_spans", "block_diffusion", "causal", "chunked", "document", "grouped_tril", "multi_item",
    "padding", "prefix_lm", "shared_prefix", "sink_window", "sliding_window",
}  # fmt: skip


@pytest.mark.parametrize("case", spread([c for c in MASK_CASES if c.name in NAMES], 2), ids=label)
@pytest.mark.usefixtures("double")
def test_registered_masks(case: Case) -> None:
    given = arguments(case)
    offset = given.pop("q_offset")
    mask, visible = flexmasks.get_mask(case.name, **given), dense(case)
    padded = torch.nn.functional.pad(visible, (1, 0))
    most = int((padded[..., 1:] & ~padded[..., :-1]).sum(-1).max())
    if most > 4:
        with pytest.raises(ValueError, match=r"do not show|up to 4"):
            flexmasks.attention(*tensors(case), mask=mask, q_offset=offset, backend="cudnn")
        return
    check(tensors(case), visible, mask, q_offset=offset)


@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.campaign)])
@pytest.mark.usefixtures("double")
def test_random_masks(examples: int) -> None:
    refused = 0

    def right(case: Drawn) -> None:
        nonlocal refused
        batch, heads, q_len, kv_len = (min(n, 50) for n in case.sizes[:4])
        mod = compiled(case.expression)
        sizes = SimpleNamespace(batch=batch, heads=heads, q_len=q_len, kv_len=min(kv_len, 40))
        sizes.q_len = min(q_len, 40)
        visible = create_mask(mod, batch, heads, sizes.q_len, sizes.kv_len, device="cpu")
        try:
            check(tensors(sizes), visible, mod, q_offset=0)
        except ValueError as reason:
            assert "backend 'cudnn' cannot run this call: it takes" in str(reason)  # noqa: PT017
            refused += 1

    try_examples(examples, right, drawn(structured))
    assert refused < examples


def _by_token(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _apart(x: Tensor) -> Tensor:
    """Rows whose elements do not lie next to each other."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("layout", [_by_token, _apart, torch.clone])
@pytest.mark.usefixtures("double")
def test_grouped_heads_scales_and_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    case = Case("prefix_lm", {"prefix_len": torch.tensor([3, 20])}, heads=4)
    leaves = [layout(x.detach()).requires_grad_() for x in tensors(case, kv_heads=2)]
    check(leaves, dense(case), flexmasks.masks.prefix_lm(**case.params), scale=0.3)


@pytest.mark.usefixtures("double")
def test_masks_that_differ_between_heads() -> None:
    case = SimpleNamespace(batch=2, heads=4, q_len=30, kv_len=40)
    starts = torch.tensor([0, 3, 9, 20])

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= starts[h]) & (kv <= q + 5 * b)

    check(tensors(case, kv_heads=2), create_mask(mod, 2, 4, 30, 40, device="cpu"), mod, q_offset=0)


@pytest.mark.usefixtures("double")
def test_new_tensors_are_planned_by_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_PLANS_TO_RECORD", 2)
    calls, found = 0, cudnn.key_intervals_of

    def counted(given: Any) -> list[Tensor]:
        nonlocal calls
        calls += 1
        return found(given)

    monkeypatch.setattr(cudnn, "key_intervals_of", counted)
    for seed in range(5):
        ids = (torch.rand(2, 40, generator=torch.Generator().manual_seed(seed)) < 0.15).cumsum(1)
        case = Case("document", {"document_ids": ids})
        check(tensors(case), dense(case), flexmasks.masks.document(**case.params))
    assert calls <= 3
    with pytest.raises(ValueError, match="which the values of the mask's tensors do not show"):
        flexmasks.attention(*tensors(case), mask="document", document_ids=ids % 2, backend="cudnn")


@pytest.mark.usefixtures("double")
def test_a_held_plan_is_updated() -> None:
    case = Case("document", {"document_ids": torch.arange(40).expand(2, -1) // 9})
    held = flexmasks.plan("document", q_len=40, batch=2, heads=2, **case.params)
    check(tensors(case), dense(case), held)
    other = Case("document", {"document_ids": torch.arange(40).expand(2, -1) // 7})
    held.update(**other.params)
    check(tensors(case), dense(other), held)


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.usefixtures("double")
def test_deterministic_mode_is_that_of_the_call(is_on: bool) -> None:
    q, k, v = tensors(SimpleNamespace(batch=1, heads=2, q_len=20, kv_len=20))
    torch.use_deterministic_algorithms(is_on)
    try:
        out = flexmasks.attention(q, k, v, mask="sink_window", sinks=2, window=5, backend="cudnn")
    finally:
        torch.use_deterministic_algorithms(False)
    out.sum().backward()
    assert cudnn_double.CALLS[-1] == {"deterministic": is_on}
    with torch.no_grad():
        flexmasks.attention(q, k, v, mask="sink_window", sinks=2, window=5, backend="cudnn")
    assert cudnn_double.CALLS[-1] == {"return_lse": False}


@pytest.mark.usefixtures("double")
def test_sinks_and_second_derivatives() -> None:
    q, k, v = tensors(SimpleNamespace(batch=1, heads=2, q_len=20, kv_len=20))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    given = {"mask": "prefix_lm", "prefix_len": 7, "sink_logits": sinks}
    results = [flexmasks.attention(q, k, v, backend=name, **given) for name in ("cudnn", "reference")]
    for got, want in zip(*[torch.autograd.grad(x.sin().sum(), (q, k, v, sinks)) for x in results], strict=True):
        assert error(got, want) < 1e-12
    out = flexmasks.attention(q, k, v, mask="prefix_lm", prefix_len=7, backend="cudnn")
    (gradient,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="backend 'cudnn' cannot be differentiated twice"):
        gradient.sum().backward()


@pytest.mark.usefixtures("double")
def test_explain_looks_at_the_mask() -> None:
    leaves = tensors(SimpleNamespace(batch=1, heads=2, q_len=20, kv_len=20))
    given = {"backend": "reference"}
    assert "`mod` of a query and a key" in flexmasks.explain(*leaves, mask="strided", stride=4, **given).others["cudnn"]
    able = flexmasks.explain(*leaves, mask="prefix_lm", prefix_len=3, **given).others["cudnn"]
    assert able == "it can run the call, but reference was asked for"


_SEEN = torch.ones(20, 20, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mask": "strided", "stride": 4}, "which the mask's operations do not tell: `mod` of a query and a key"),
        ({"mask": "dense", "visible": _SEEN}, "the mask's operations do not tell: `getitem` of a query and a key"),
        ({"mask": lambda b, h, q, kv: (kv % 4 == 0) & (q >= 0)}, "up to 4 intervals of keys .* and some see 5"),
        ({"mask": "causal", "score": "alibi"}, "it has no score changes"),
        ({"mask": "causal", "scale": -1.0}, "it takes scales above 0 only"),
        ({"mask": "causal", "kernel_options": {"BLOCK_M": 64}}, "it takes no kernel_options"),
    ],
)
@pytest.mark.usefixtures("double")
def test_refusals_of_calls(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"backend 'cudnn' cannot run this call: .*{why}"):
        flexmasks.attention(*tensors(SimpleNamespace(batch=1, heads=2, q_len=20, kv_len=20)), backend="cudnn", **given)


@pytest.mark.parametrize(
    ("sizes", "is_taken"),
    [((64, 128), True), ((192, 128), True), ((256, 256), True), ((128, 192), False), ((60, 64), False)],
)
@pytest.mark.usefixtures("double")
def test_head_sizes(sizes: tuple[int, int], is_taken: bool) -> None:
    q, k, v = (torch.randn(1, 1, 4, n, dtype=torch.float64) for n in (sizes[0], *sizes))
    reason = flexmasks.explain(q, k, v, mask="causal").others.get("cudnn", "")
    assert ("head sizes" in reason) == (not is_taken)


def _facts(**given: Any) -> Any:
    call = {"on_gpu": True, "q": torch.empty(1, dtype=torch.bfloat16), "dtype": "float32"}
    return SimpleNamespace(**call | given)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    on_gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(cudnn, "_import_failures", [])
    monkeypatch.setattr(cudnn, "_why_missing", lambda: "")
    return monkeypatch


def test_what_a_machine_lacks(machine: pytest.MonkeyPatch) -> None:
    assert cudnn.refuses_machine(_facts()) is None
    assert cudnn.refuses_machine(_facts(on_gpu=False)) == "it runs on CUDA only"
    float32 = _facts(q=torch.empty(1))
    assert cudnn.refuses_machine(float32) == "it takes float16 and bfloat16, not float32"
    on_gpu_of(machine, (12, 0))
    assert cudnn.refuses_machine(_facts()) == "it needs compute capability 9.0, 10.0 or 10.3"
    machine.setattr(importlib, "import_module", lambda name: SimpleNamespace())
    with pytest.raises(Unavailable, match="nvidia-cudnn-frontend cannot be imported: AttributeError"):
        cudnn.functions()
    assert str(cudnn.refuses_machine(_facts())).startswith("the package nvidia-cudnn-frontend cannot be imported")


@pytest.mark.parametrize(
    ("folders", "why"), [(None, "is not installed"), (["cudnn"], "is older than 1.32"), (["cudnn/flex_attention"], "")]
)
def test_which_package_is_there(
    folders: list[str] | None, why: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in folders or ():
        (tmp_path / folder).mkdir(parents=True)
    spec = None if folders is None else SimpleNamespace(submodule_search_locations=[str(tmp_path / "cudnn")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    found = cudnn._why_missing.__wrapped__()
    assert why in found
    assert bool(found) == bool(why)


def test_bytes_of_forms_are_counted() -> None:
    assert bytes_of(cudnn.KeyIntervals(torch.empty(3, dtype=torch.int32), torch.empty(2), torch.empty(5))) == 40


# --- what "auto" takes ---


def test_auto_takes_it_where_it_was_measured_as_faster() -> None:
    """At least 1.04 times as fast wherever it is taken, and taken in most cases with 1.2 times."""
    results = json.loads((RECIPES / "results/cudnn_gpu.json").read_text(encoding="utf-8"))
    missed, taken = [], 0
    for case in intervals._CASES:
        mask = intervals.mask_of(case, torch.Generator().manual_seed(0))()
        size = Size(case.batch, case.heads, case.length, case.length, torch.device("cpu"))
        computed = MaskPlan(mask, size, block_size=(128, 128), allows_bounds=True).computed(case.batch * case.heads)
        ways = intervals._cases(results)[case.mask, case.describe()]
        for in_order in (False, True):
            ours, theirs = intervals._pair(ways, intervals._decides(ways), in_order)
            assert ours is not None
            assert theirs is not None
            rows = case.batch * case.heads * case.length / 128
            if cudnn.is_for(computed, rows, case.size, has_flash=not in_order):
                assert ours / theirs >= 1.04, case
                taken += 1
            elif ours / theirs >= intervals.BAR:
                missed.append((case.mask, case.length, case.size, in_order))
    assert taken == 18
    assert [case for case in missed if case[2] == 128] == [("bidirectional_spans & document", 8192, 128, False)]
    assert len(missed) == 5


def test_a_few_keys_that_many_queries_see_are_left_to_others() -> None:
    """In order, tiles of queries would wait for each other at these keys."""
    assert cudnn.is_for(Computed(60, 2, uneven=4), 4096, 64, has_flash=False)
    assert not cudnn.is_for(Computed(60, 2, uneven=4.1), 4096, 64, has_flash=False)
    seen_by_all = flexmasks.masks.sink_window(sinks=64, window=256)
    found = MaskPlan(seen_by_all, Size(1, 1, 4096, 4096, torch.device("cpu")), block_size=(128, 128)).computed(1)
    columns = flexmasks.dense_mask(seen_by_all, 4096, 4096)[0, 0].view(32, 128, 32, 128).any(3).any(1).sum(0)
    assert found.uneven == pytest.approx(float(columns.max() / columns.float().mean()))


def _long(**given: Any) -> Any:
    q = torch.empty(1, 16, 32768, 64, device="meta")
    mask = SimpleNamespace(
        computed=lambda rows: Computed(60, 1), kernel_key=object(),
        size=SimpleNamespace(q_len=32768, kv_len=32768, device=q.device),
        made=lambda *_: SimpleNamespace(counts=torch.tensor([0, 2])),
    )  # fmt: skip
    facts = {"q": q, "k": q, "v": q, "needs_grad": True, "mask": mask}
    return SimpleNamespace(**facts | given)


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ({}, True),
        ({"needs_grad": False}, False),
        ({"k": torch.empty(1, 4, 32768, 64, device="meta")}, False),
        ({"v": torch.empty(1, 16, 32768, 128, device="meta")}, False),
        ({"q": torch.empty(1, 16, 4096, 64, device="meta")}, False),
    ],
)
def test_what_was_not_measured_is_not_taken(given: dict[str, Any], is_taken: bool, machine: pytest.MonkeyPatch) -> None:
    assert cudnn.is_fastest(_long(**given), has_flash=False) == is_taken
    assert not cudnn.is_fastest(_long(**given), has_flash=True)
    on_gpu_of(machine, (10, 0))
    assert not cudnn.is_fastest(_long(**given), has_flash=False)


def test_the_first_mask_shows_whether_its_kind_fits(machine: pytest.MonkeyPatch) -> None:
    for counts, is_taken in (([0, 4], True), ([0, 5], False), ([1, 2], False)):
        call, other = _long(), _long()
        call.mask.made = lambda *_, counts=counts: SimpleNamespace(counts=torch.tensor(counts))
        assert cudnn.is_fastest(call, has_flash=False) == is_taken
        other.mask.kernel_key = call.mask.kernel_key  # of the same kind, which nobody looks at
        other.mask.made = None
        assert cudnn.is_fastest(other, has_flash=False) == is_taken


@pytest.mark.parametrize(
    ("able", "in_order", "has_flash"),
    [
        (["flex"], False, False),
        (["flex", "flex_flash"], False, True),
        (["flex", "flex_flash"], True, False),
        (["flex", "fa4"], False, None),
    ],
)
def test_the_choice_asks_what_others_can(
    able: list[str], in_order: bool, has_flash: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(table, "why_not", lambda name, call: None)
    monkeypatch.setattr(cudnn, "is_fastest", lambda call, has_flash: asked.append(has_flash) or True)
    call: Any = SimpleNamespace(context=SimpleNamespace(must_be_deterministic=in_order))
    assert table._is_for_cudnn(call, able) == (has_flash is not None)
    assert asked == ([] if has_flash is None else [has_flash])


# --- with the package itself ---

_GPU_CASES = [
    Case("grouped_tril", {"seq_lens": torch.tensor([300, 77])}, heads=4, q_len=400, kv_len=400),
    Case("prefix_lm", {"prefix_len": 100}, heads=4, q_len=400, kv_len=400),
    Case("block_diffusion", {"length": 200, "block": 8}, heads=4, q_len=400, kv_len=400),
    Case("sink_window", {"sinks": 5, "window": 60}, heads=4, q_len=400, kv_len=400),
    Case("document", {"document_ids": torch.arange(400).expand(2, -1) // 90}, heads=4, q_len=400, kv_len=400),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # of another package
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("case", _GPU_CASES, ids=label)
def test_on_a_gpu(case: Case, kv_heads: int) -> None:
    pytest.importorskip("cudnn")
    given = arguments(case, "cuda")
    offset = given.pop("q_offset")
    mask = flexmasks.get_mask(case.name, **given)
    shapes = (case.heads, 64), (kv_heads, 64), (kv_heads, 64)
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(case.batch, h, 400, d, generator=generator) for h, d in shapes]
    leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in made]
    plain_arguments = arguments(case)
    del plain_arguments["q_offset"]
    visible = flexmasks.dense_mask(case.name, 400, 400, batch=2, heads=1, **plain_arguments).expand(
        2, case.heads, -1, -1
    )
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            check(leaves, visible, mask, tolerance=2e-2, q_offset=offset)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_new_tensors_on_a_gpu() -> None:
    """The operations that find intervals are recorded at the second mask, and replayed from the third one on."""
    pytest.importorskip("cudnn")
    leaves = [torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    for seed in range(5):
        marks = torch.rand(2, 300, generator=torch.Generator().manual_seed(seed)) < 0.02
        spans = torch.where(marks.roll(5, 1).cumsum(1) % 2 == 1, marks.cumsum(1), -1)
        masks = [
            flexmasks.masks.document(document_ids=(marks.cumsum(1) // 2).to(device))
            & flexmasks.masks.bidirectional_spans(span_ids=spans.to(device))
            for device in ("cpu", "cuda")
        ]
        check(leaves, flexmasks.dense_mask(masks[0], 300, 300, batch=2).expand(-1, 2, -1, -1), masks[1], tolerance=2e-2)
    ids = torch.arange(300, device="cuda").expand(2, -1) % 3
    with pytest.raises(ValueError, match="which the values of the mask's tensors do not show"):
        flexmasks.attention(*leaves, mask="document", document_ids=ids, backend="cudnn")


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_auto_on_a_gpu() -> None:
    pytest.importorskip("cudnn")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it was measured on compute capability 9.0")
    q, k, v = (torch.empty(1, 16, 32768, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    ids = (torch.rand(1, 32768, generator=torch.Generator().manual_seed(0)) < 1 / 700).cumsum(1).cuda()
    documents = flexmasks.masks.document(document_ids=ids)
    in_documents, large = (
        flexmasks.masks.prefix_lm(prefix_len=8192) & documents,
        [torch.cat([x, x], 3) for x in (q, k, v)],
    )
    assert flexmasks.explain(q, k, v, mask=in_documents).backend != "cudnn"
    assert flexmasks.explain(*large, mask=in_documents).backend == "cudnn"
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            explanation = flexmasks.explain(q, k, v, mask="prefix_lm", prefix_len=8192)
            sinks = flexmasks.explain(q, k, v, mask="sink_window", sinks=64, window=1024)
        finally:
            torch.use_deterministic_algorithms(False)
        has_flash = explanation.others.get("flex_flash", "the chosen one").startswith(("it can", "the chosen"))
        assert explanation.backend == ("cudnn" if is_deterministic or not has_flash else "flex_flash")
        assert sinks.backend != "cudnn"
