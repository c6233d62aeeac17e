"""`flexmasks.check`: what it finds, against masks that are evaluated pair by pair, and planted faults."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from findings_oracle import verify
from functions import LONG_TABLES, Drawn, compiled, composed, drawn, short_and_campaign, structured
from helpers import DEVICES, arguments, label, one_in, try_examples
from oracles import MASK_CASES, Case, dense, offsets
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import flexmasks
from flexmasks import check
from flexmasks.asking.check import KINDS
from flexmasks.blocks import limits, strips
from flexmasks.blocks.decide import Axis, decide
from flexmasks.extend import implied_size, reads_outside

pytestmark = pytest.mark.usefixtures("one_thread")
Function = Callable[..., Tensor]


# --- true findings ---


@pytest.mark.parametrize("case", one_in(4, MASK_CASES), ids=label)
def test_masks_of_the_library(case: Case) -> None:
    found = check(case.name, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, **arguments(case))
    verify(found, dense(case), offsets(case))
    assert not {f.kind for f in found} & {"goes as bits", "differs by dtype", "reads behind the end"}


@pytest.mark.parametrize("name", [entry.name for entry in flexmasks.list_masks()])
def test_examples(name: str) -> None:
    entry = next(e for e in flexmasks.list_masks() if e.name == name)
    mask, n = entry.example(256), 256
    batch, heads = (implied_size(mask, dimension) or 1 for dimension in "BH")
    found = check(mask, n, batch=batch, heads=heads)
    verify(found, flexmasks.dense_mask(mask, n, batch=batch, heads=heads).expand(batch, heads, n, n), [0])
    assert {f.kind for f in found if f.pair is None} <= {"ignores b", "ignores h", "recompiles", "compares floats"}


def _random_function(example: Drawn) -> None:
    function = compiled(example.expression, LONG_TABLES)
    batch, heads, q_len, kv_len, _ = example.sizes
    ids = LONG_TABLES["doc"][:batch, : max(q_len, kv_len)]
    find = functools.partial(check, function, q_len, kv_len, batch=batch, heads=heads, q_offset=0)
    try:
        sizes = batch, heads, q_len, kv_len
        seen = create_mask(function, *sizes, device="cpu")
        narrow = lambda b, h, q, kv: function(b.int(), h.int(), q.int(), kv.int())  # noqa: E731
        in_32 = create_mask(narrow, *sizes, device="cpu")
    except (RuntimeError, IndexError):  # of functions that torch refuses
        return
    found = find(document_ids=ids)
    verify(found, seen, [0], ids)
    assert found.of("reads behind the end") is None
    differ = found.of("differs by dtype")
    if differ is not None and "32 bits" in differ.words:
        assert (seen ^ in_32)[differ.pair]


def test_many_strips_and_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "_BLOCKS_OF_STRIP", 1)
    monkeypatch.setattr(limits, "ELEMENTS_AT_ONCE_ON_CPU", 1)
    jumbled = torch.randperm(500)
    for function in (lambda b, h, q, kv: jumbled[q] == kv, lambda b, h, q, kv: (jumbled[kv] + q * h) % 500 == 7):
        seen = create_mask(function, 1, 2, 500, 500, device="cpu")
        verify(check(function, 500, heads=2), seen, [0])


@short_and_campaign(25, 2000)
def test_random_compositions(examples: int) -> None:
    try_examples(examples, _random_function, drawn(structured))


@short_and_campaign(15, 2000)
def test_random_functions(examples: int) -> None:
    try_examples(examples, _random_function, drawn(composed))


TABLE = torch.arange(30) % 7
INDICES = [
    *("q", "kv", "q + 1", "q - 2", "q - kv", "q + kv", "29 - q", "2 * kv", "q // 2 - kv", "kv.clamp(max=20)"),
    *("torch.where(kv < q, kv, q)", "q * 7 % 31", "q % 3 - 1", "30", "-31", "b * 20 + q", "number + q"),
]


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("code", ["table[{i}] > 3", "by_batch[b, {i}] > 3", "by_batch[b][{i}] > 3", "asks({i}) > 3",
                                  "torch.where(q >= kv, table[{i}] > 3, kv > 9)"])  # fmt: skip
def test_reads_outside_of_tensors(code: str, index: str) -> None:
    names: dict[str, Any] = {"table": TABLE, "by_batch": TABLE.expand(2, -1).contiguous(), "number": torch.tensor(3)}
    names["torch"] = torch
    # Ranges end where a function asks for types: it is evaluated element by element.
    names["asks"] = lambda i: TABLE[i] if isinstance(i, Tensor | int) else TABLE[i * 0]
    function = compiled(code.format(i=index), names)
    found = check(function, 25, 20, batch=2, q_offset=0)
    place = compiled(index, names)
    b, h, q, kv = torch.meshgrid(*(torch.arange(n) for n in (2, 1, 25, 20)), indexing="ij")
    at = torch.as_tensor(place(b, h, q, kv)).expand(b.shape)
    behind, before = (at >= 30) | (at < -30), (at < 0) & (at >= -30)
    for kind, pairs in (("reads behind the end", behind), ("reads before the start", before & ~behind.any())):
        finding = found.of(kind)
        assert (finding is not None) == bool(pairs.any()), found
        assert finding is None or pairs[finding.pair]
    if behind.any():
        assert [f.severity for f in found] == ["error"] * len(found)


def test_ranges_know_where_functions_read() -> None:
    rows, columns = Axis(25, 4), Axis(20, 4)
    for index in INDICES[:10]:
        for read in (f"table[{index}]", f"rows[b][{index}]", f"torch.take(table, {index})"):
            function = compiled(f"{read} > 3", {"torch": torch, "table": TABLE, "rows": TABLE[None]})
            assert not decide(reads_outside(function), 1, 1, rows, columns, torch.device("cpu")).not_understood


# --- planted faults ---


class Fault(NamedTuple):
    """A mask with a mistake, the kind of finding that shows it, and what is true of the finding's pair."""

    kind: str
    mask: Any
    shows: Callable[[Callable[..., bool], int, int, int, int], bool] = lambda sees, b, h, q, kv: True
    options: Mapping[str, Any] = MappingProxyType({})


N = 300
IDS = torch.stack([torch.arange(N) // 100, torch.arange(N) // 30])
LENGTHS, WINDOWS = torch.tensor([N, 200]), torch.tensor([10, 50, 100])
BYTES = (torch.arange(N) * 3).to(torch.uint8)
CONFIG = SimpleNamespace(window=torch.nn.Linear(1, 1), size=20)


def _of_config(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv <= len(CONFIG.__dict__))


FAULTS = {
    "a comparison turned around": Fault(
        "sees the future", lambda b, h, q, kv: q <= kv, lambda sees, b, h, q, kv: kv > q and sees(b, h, q, kv)
    ),
    "a window that is symmetric": Fault(
        "sees the future", lambda b, h, q, kv: (q - kv).abs() < 10, lambda sees, *i: i[3] > i[2] and sees(*i)
    ),
    "less in place of less or equal": Fault(
        "sees nothing",
        lambda b, h, q, kv: kv < q,
        lambda sees, b, h, q, kv: not any(sees(b, h, q, k) for k in range(N)),
    ),
    "a query that does not see itself": Fault(
        "does not see itself",
        lambda b, h, q, kv: (kv < q) | (kv == 0),
        lambda sees, b, h, q, kv: q == kv and not sees(b, h, q, kv),
    ),
    "a length in place of a position": Fault(
        "seen by nobody",
        lambda b, h, q, kv: (q >= kv) & (kv < LENGTHS[b] - 1),
        lambda sees, b, h, q, kv: not any(sees(b, h, i, kv) for i in range(N)),
        {"batch": 2},
    ),
    "documents of another batch element": Fault(
        "crosses a document",
        lambda b, h, q, kv: (q >= kv) & (IDS[0, q] == IDS[b, kv]),
        lambda sees, b, h, q, kv: bool(IDS[b, q] != IDS[b, kv]) and sees(b, h, q, kv),
        {"document_ids": IDS},
    ),
    "a head in place of a batch element": Fault(
        "ignores b", lambda b, h, q, kv: (q >= kv) & (kv < LENGTHS[h]), options={"batch": 2, "heads": 2}
    ),
    "one window for all heads": Fault(
        "ignores h", lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOWS[0]), options={"heads": 3}
    ),
    "a batch element that differs": Fault(
        "differs by batch element",
        lambda b, h, q, kv: (q >= kv) & (kv < LENGTHS[b]),
        lambda sees, b, h, q, kv: sees(b, h, q, kv) != sees(0, h, q, kv),
        {"batch": 2},
    ),
    "the next token's document": Fault(
        "reads behind the end",
        lambda b, h, q, kv: (q >= kv) & (IDS[0, q + 1] == IDS[0, kv]),
        lambda sees, *i: i[2] == N - 1,
    ),
    "the last token's document": Fault(
        "reads before the start",
        lambda b, h, q, kv: (q >= kv) & (IDS[0, q - 1] == IDS[0, kv]),
        lambda sees, *i: i[2] == 0,
    ),
    "bytes that wrap around": Fault(
        "differs by dtype",
        lambda b, h, q, kv: BYTES[q] - BYTES[kv] <= 6,
        lambda sees, b, h, q, kv: sees(b, h, q, kv) != (int(BYTES[q]) - int(BYTES[kv]) <= 6),
    ),
    "a product that overflows 32 bits": Fault(
        "differs by dtype",
        lambda b, h, q, kv: q * kv * 100_003 % 7 < 3,
        lambda sees, b, h, q, kv: q * kv * 100_003 >= 2**31,
    ),
    "floating distances": Fault("compares floats", lambda b, h, q, kv: (q - kv) * 0.1 <= 0.3),
    "an operation that compilers get wrong": Fault("goes as bits", lambda b, h, q, kv: (q - kv) * 0.1 <= 0.3),
    "a number in a closure": Fault("recompiles", (lambda n: lambda b, h, q, kv: q - kv <= n)(20)),
    "an object that may change": Fault("recompiles", _of_config),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str) -> None:
    kind, mask, shows, options = FAULTS[name]
    found = check(mask, N, forbid=kind, **options)
    finding = found.of(kind)
    assert finding is not None
    assert finding in found.errors

    def sees(*pair: int) -> bool:
        return bool(mask(*map(torch.tensor, pair)))

    if finding.pair is not None:
        assert shows(sees, *finding.pair), finding
    else:
        assert kind in ("ignores b", "ignores h", "compares floats", "goes as bits", "recompiles")


def test_masks_without_faults() -> None:
    def of_documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (IDS[b, q] == IDS[b, kv])

    found = check(of_documents, N, batch=2, document_ids=IDS, forbid=[*KINDS.keys() - {"differs by batch element"}])
    assert [f.kind for f in found] == ["differs by batch element"]
    assert not found.errors
    assert repr(check("causal", N)) == "nothing found"
    assert not check("causal", N)


# --- arguments ---


def test_findings_are_errors_if_they_are_forbidden() -> None:
    note = check("full", 8).of("sees the future")
    assert note is not None
    assert note.severity == "note"
    assert str(note) == "note: sees the future: 7 of 8 rows see later keys, as at (b, h, q, kv) = (0, 0, 0, 1)"
    for forbidden in ("sees the future", "sees-the-future", ["ignores_h", "sees the future"]):
        assert [f.kind for f in check("full", 8, forbid=forbidden).errors] == ["sees the future"]
    with pytest.raises(
        ValueError, match=r"names no kind of finding 'see the future'; did you mean 'sees the future'\?"
    ):
        check("full", 8, forbid="see the future")
    with pytest.raises(ValueError, match="the kinds are 'reads behind the end', "):
        check("full", 8, forbid="zzz")


def test_all_forms_of_a_mask() -> None:
    future = lambda b, h, q, kv: q >= kv - 1  # noqa: E731
    table = flexmasks.dense_mask(future, 200)
    blocks = create_block_mask(future, 1, 1, 200, 200, device="cpu")
    for mask in (future, flexmasks.get_mask(future), table[0, 0], blocks, flexmasks.block_mask(future, 200)):
        found = check(mask, 200)
        assert found.of("sees the future") == check(future, 200).of("sees the future")
        assert {f.kind for f in found} <= {"sees the future"}
    assert check(flexmasks.plan(future, 200)).of("sees the future")
    assert check(blocks)
    # The lists of a block mask count, whatever its function shows.
    blocks.mask_mod = lambda b, h, q, kv: q >= kv - 5
    (finding,) = (f for f in check(blocks) if f.pair)
    assert finding.pair == (0, 0, 0, 1)


def test_where_queries_start() -> None:
    window = flexmasks.get_mask("local", left=3, right=1)
    for offset in (5, "last", torch.tensor([5, 2])):
        starts = offset.tolist() if isinstance(offset, Tensor) else [5]
        found = check(window, 7, 12, q_offset=offset)
        seen = flexmasks.dense_mask(window, 7, 12, batch=len(starts), q_offset=offset)
        verify(found, seen.expand(len(starts), 1, 7, 12), starts)
    few = lambda b, h, q, kv: (q < 12) & (kv < 5)  # noqa: E731
    for q_len, kv_len in ((20, 8), (4, 8)):
        seen = flexmasks.dense_mask(few, q_len, kv_len, q_offset=0)
        verify(check(few, q_len, kv_len, q_offset=0), seen, [0])
    # Where nothing says where queries start, nothing is said of the future.
    assert {f.kind for f in check("key_padding", 3, 8, attention_mask=torch.ones(1, 8).bool())} == set()
    with pytest.raises(ValueError, match=r"^flexmasks\.check: 3 queries, 8 keys: pass q_offset=5"):
        check("causal", 3, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_on_a_device(device: str) -> None:
    ids = IDS.to(device)
    masks: list[Function] = [
        lambda b, h, q, kv: (q >= kv - 1) & (ids[b, q] == ids[0, kv]),
        lambda b, h, q, kv: (ids[b, q] * q - ids[b, kv] * kv) % 7 < 2,
        lambda b, h, q, kv: ids[b, q + 1] == ids[b, kv],
    ]
    for mask in masks[:2]:
        found = check(mask, N, batch=2, document_ids=IDS)
        verify(found, create_mask(mask, 2, 1, N, N, device=device).cpu(), [0], IDS)  # type: ignore[arg-type]
    (finding,) = check(masks[2], N, batch=2)
    assert (finding.kind, finding.pair) == ("reads behind the end", (0, 0, N - 1, 0))


def test_functions_of_one_dtype() -> None:
    def of_64_bits(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= (kv if q.dtype == torch.int64 else None)  # type: ignore[operator,no-any-return]

    assert [f.kind for f in check(of_64_bits, 20)] == ["goes as bits"]


def test_errors() -> None:
    with pytest.raises(ValueError, match="depends on its batch index; pass `batch`"):
        check(lambda b, h, q, kv: kv < LENGTHS[b], 8)
    with pytest.raises(ValueError, match="pass `q_len`"):
        check("causal")
    with pytest.raises(ValueError, match="`document_ids` must"):
        check("causal", 8, document_ids=[0, 0, 1])
    with pytest.raises(ValueError, match="may not decide by `if`"):
        check(lambda b, h, q, kv: q if q > kv else kv, 8)


def test_long_sequences() -> None:
    n = 16_384
    ids = (torch.rand(n) < 1 / 300).cumsum(0)
    for mask in (lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), lambda b, h, q, kv: (q - kv) % 8 == 0):
        check(mask, 256, document_ids=ids[:256])  # imports
        start = time.process_time()
        found = check(mask, n, document_ids=ids, forbid="sees the future")
        assert time.process_time() - start < 4  # it takes 0.3
        assert {f.kind for f in found.errors} in (set(), {"sees the future", "crosses a document"})
