"""Pickles of masks, scores and block masks: copies, files, workers of a DataLoader."""

from __future__ import annotations

import copy
import importlib
import io
import itertools
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from oracles import attend
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.data import DataLoader, IterableDataset

import flexmasks
from flexmasks import Mask, Score, flex, get_mask, get_score
from flexmasks.spec.definitions import from_pickle, loaded_function
from flexmasks.spec.parameters import Size

LENGTH, BATCH, HEADS = 70, 2, 2
IDS = torch.arange(LENGTH).expand(BATCH, -1) // torch.tensor([[20], [33]])
LENS = torch.tensor([LENGTH, 40])
LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, reach: Tensor) -> Tensor:
    return (q - kv).abs() <= reach[h]


def third(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv) % 3 == 0


def named_masks() -> dict[str, Mask]:
    """Return masks of the library's own functions, with and without tensors."""
    documents = get_mask("document", document_ids=IDS)
    return {
        "causal": get_mask("causal"),
        "window": get_mask("sliding_window", window=9),
        "number in a tensor": get_mask("sliding_window", window=torch.tensor(9)),
        "documents": documents,
        "lengths": get_mask("grouped_tril", seq_lens=LENS),
        "composed": get_mask("causal") & documents | ~get_mask("padding", kv_lens=LENS),
        "packed": flexmasks.packed("causal", torch.tensor([0, 20, LENGTH])),
        "paged": flexmasks.paged(
            "causal", torch.tensor([[3, 0, 2, 1, 4], [5, 6, -1, -1, -1]]), torch.tensor([70, 20]), 14
        ),
    }  # fmt: skip


def users_masks() -> dict[str, Mask]:
    """Return masks of functions of this module."""
    return {"parameter": get_mask(near, reach=torch.tensor([3, 30])), "plain": get_mask(third) & get_mask("causal")}


MASKS = named_masks() | users_masks()
KEYS = {"paged": 98}  # the keys of all pages


def block_mask_of(name: str) -> BlockMask:
    q_offset = {"lengths": torch.tensor([4, 0]), "window": 5}.get(name, 0)
    q_len = LENGTH - 5 * (name in ("lengths", "window"))
    sizes = {"batch": BATCH, "heads": HEADS, "q_offset": q_offset, "block_size": 32}
    return flexmasks.block_mask(MASKS[name], q_len, KEYS.get(name, LENGTH), **sizes)


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_file(value: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save({"value": value, "weights": torch.ones(3)}, file)
    file.seek(0)
    return torch.load(file, **how)["value"]


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": by_pickle,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "file": lambda value: by_file(value, weights_only=False),
    "file of weights": by_file,
}


@pytest.fixture
def allowed() -> Iterator[None]:
    """Allow the functions of this module in files of weights."""
    with torch.serialization.safe_globals([*flexmasks.safe_globals(), near, third]):
        yield


@pytest.fixture(autouse=True)
def _ours_are_allowed() -> Iterator[None]:
    with torch.serialization.safe_globals(flexmasks.safe_globals()):
        yield


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("name", "way"), [*itertools.product(MASKS, WAYS)])
def test_masks_travel(name: str, way: str) -> None:
    mask, keys = MASKS[name], KEYS.get(name, LENGTH)
    other = WAYS[way](mask)
    assert type(other) is Mask
    assert repr(other) == repr(mask)
    sizes = {"batch": BATCH, "heads": HEADS}
    want = flexmasks.dense_mask(mask, LENGTH, keys, q_offset=0, **sizes)
    assert torch.equal(flexmasks.dense_mask(other, LENGTH, keys, q_offset=0, **sizes), want)


def test_registered_names_and_those_of_operators() -> None:
    """A mask may have the name of an operator of scores; pickles would mix up two scores of one name."""

    def ours(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv == q

    flexmasks.register_mask(name="chain")(ours)
    mask = get_mask("causal") & get_mask("chain")
    for way in WAYS.values():
        assert way(mask) == mask
    with pytest.raises(ValueError, match=r"a score named 'chain' is registered already, by flexmasks\.spec"):
        flexmasks.register_score(name="chain")(lambda score, b, h, q, kv: score)


@pytest.mark.parametrize("way", WAYS)
def test_scores_travel(way: str) -> None:
    score = get_score("softcap", cap=3.0)
    scores = [
        score,
        get_score("alibi", slopes=torch.rand(HEADS)),
        flexmasks.packed(score, [0, 9, LENGTH]),
    ]
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, 8)
    for one in scores:
        other = WAYS[way](one)
        assert type(other) is Score
        want = flexmasks.attention(q, k, v, score=one, backend="reference")
        assert torch.equal(flexmasks.attention(q, k, v, score=other, backend="reference"), want)


def check_block_mask(got: BlockMask, want: BlockMask) -> None:
    """Check that a block mask has the same lists, and attends as the other one's function says element by element."""
    for name in LISTS:
        x, y = getattr(got, name), getattr(want, name)
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert (got.seq_lengths, got.BLOCK_SIZE) == (want.seq_lengths, want.BLOCK_SIZE)
    q_len, kv_len = want.seq_lengths
    q, k, v = (torch.randn(BATCH, HEADS, n, 8) for n in (q_len, kv_len, kv_len))
    indices = torch.meshgrid(*(torch.arange(n) for n in (BATCH, HEADS, q_len, kv_len)), indexing="ij")
    expected, _ = attend(q.double(), k.double(), v.double(), want.mask_mod(*indices))
    assert torch.allclose(
        flexmasks.attention(q, k, v, block_mask=got, backend="reference").double(), expected, atol=1e-5
    )


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("name", "way"), [*itertools.product(MASKS, WAYS)])
def test_block_masks_travel(name: str, way: str) -> None:
    block_mask = block_mask_of(name)
    check_block_mask(WAYS[way](block_mask), block_mask)


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("way", WAYS)
def test_block_masks_as_data_travel(way: str) -> None:
    block_mask = flexmasks.block_mask(near, LENGTH, heads=HEADS, as_data=True, reach=torch.tensor([3, 30]))
    other = WAYS[way](block_mask)
    check_block_mask(other, block_mask)
    assert [x.tolist() for x in other.source.bits] == [x.tolist() for x in block_mask.source.bits]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sizes", [(None, None), (BATCH, None), (BATCH, 3)])
def test_lists_for_each_batch_element_and_head_travel(sizes: tuple[int | None, int | None]) -> None:
    block_mask = flex.create_block_mask(get_mask("causal"), *sizes, LENGTH, LENGTH, "cpu", 32)
    other = by_file(block_mask)
    assert other.shape == block_mask.shape
    for name in LISTS:
        assert torch.equal(getattr(other, name), getattr(block_mask, name))


def test_files_of_block_masks_hold_no_lists() -> None:
    file = io.BytesIO()
    torch.save(flexmasks.block_mask("causal", 1 << 14, block_size=32), file)
    assert file.tell() < 4096


@pytest.mark.gpu
def test_block_masks_travel_to_another_device() -> None:
    for mask in ("causal", MASKS["documents"].to("cuda")):
        block_mask = flexmasks.block_mask(mask, LENGTH, device="cuda", check=True)
        assert by_file(block_mask).kv_indices.is_cuda
        check_block_mask(by_file(block_mask, map_location="cpu"), block_mask.to("cpu"))


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
def test_a_loaded_block_mask_compiles() -> None:
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, 8)
    block_mask = by_file(block_mask_of("composed"))
    want = flexmasks.attention(q, k, v, mask=MASKS["composed"], backend="reference")
    assert torch.allclose(flexmasks.attention(q, k, v, block_mask=block_mask, backend="flex"), want, atol=1e-5)


def test_counted_blocks_travel() -> None:
    blocks = by_pickle(get_mask("causal").blocks(512))
    assert (blocks.partial, blocks.full, blocks.undecided) == (4, 6, 4)


def test_to_moves_the_tensors_of_the_mask() -> None:
    moved = block_mask_of("documents").to("meta")
    (ids,) = moved.source.mask._tensors()  # type: ignore[attr-defined]
    assert moved.kv_indices.is_meta
    assert ids.is_meta


# --- what cannot be pickled ---

LAMBDAS: dict[str, Callable[[], Any]] = {
    "mask": lambda: get_mask(lambda b, h, q, kv: q >= kv),
    "score": lambda: get_score(lambda score, b, h, q, kv: score + q),
    "inside": lambda: flexmasks.packed(get_mask(lambda b, h, q, kv: q >= kv) & get_mask("causal"), [0, 9, LENGTH]),
    "block mask": lambda: flexmasks.block_mask(lambda b, h, q, kv: (q >= kv) & IDS[b, kv] > 0, LENGTH, batch=2),
    "as data": lambda: flexmasks.block_mask(lambda b, h, q, kv: (q - kv) % 3 == 0, LENGTH, as_data=True),
}


@pytest.mark.parametrize("name", LAMBDAS)
def test_lambdas_are_refused(name: str) -> None:
    value = LAMBDAS[name]()
    with pytest.raises(
        pickle.PicklingError, match=r"flexmasks: the (mask|score) '<lambda>' cannot be pickled.*top level"
    ):
        pickle.dumps(value)
    with pytest.raises(pickle.PicklingError, match="cannot be pickled"):
        torch.save(value, io.BytesIO())
    copy.copy(value), copy.deepcopy(value)


class Source(IterableDataset[Any]):
    """Values that a worker makes: of the masks above, or one that cannot be sent."""

    def __init__(self, refused: str | None) -> None:
        self.refused = refused

    def __iter__(self) -> Iterator[Any]:
        if self.refused == "graph":
            yield get_score("alibi", slopes=torch.rand(HEADS, requires_grad=True) * 2)
        elif self.refused is not None:
            yield LAMBDAS[self.refused]()
        else:
            yield {name: (mask, block_mask_of(name)) for name, mask in MASKS.items()}


def received(method: str, refused: str | None = None) -> Any:
    loader = DataLoader(Source(refused), batch_size=None, num_workers=1, multiprocessing_context=method, timeout=100)
    return next(iter(loader))


METHODS = ["fork", *(pytest.param(m, marks=pytest.mark.campaign) for m in ("spawn", "forkserver"))]


@pytest.mark.parametrize("method", METHODS)
def test_workers_send_masks_and_block_masks(method: str) -> None:
    values = received(method)
    for name, (mask, block_mask) in values.items():
        assert repr(mask) == repr(MASKS[name])
        check_block_mask(block_mask, block_mask_of(name))


@pytest.mark.parametrize(
    ("refused", "method"),
    [*((n, "fork") for n in (*LAMBDAS, "graph")), pytest.param("block mask", "spawn", marks=pytest.mark.campaign)],
)
def test_workers_send_the_error_of_what_cannot_be_pickled(refused: str, method: str) -> None:
    with pytest.raises(pickle.PicklingError, match=r"flexmasks: .* cannot be pickled"):
        received(method, refused)


# --- files from strangers ---


def test_files_of_weights_call_no_function_of_a_stranger() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"add_safe_globals\(\[test_pickles.near\]\)"):
        by_file(MASKS["parameter"])
    file = io.BytesIO()
    torch.save(block_mask_of("composed"), file)
    file.seek(0)
    assert not torch.serialization.get_unsafe_globals_in_checkpoint(file)
    with zipfile.ZipFile(file) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("data.pkl"))
        assert b"flexmasks.spec.values loaded" in archive.read(name).replace(b"\n", b" ")


FLEXMASKS_CALLED = {("flexmasks.spec.values", "loaded"), ("flexmasks.spec.definitions", "from_pickle")}
TORCH_CALLED = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
}


class Named(pickle.Unpickler):
    """Notes the names that a pickle asks for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add((module, name))
        return super().find_class(module, name)


def definitions_called(run: Callable[[], Any]) -> set[str]:
    """Return the names of the functions of masks and scores that run while a function runs."""
    codes: set[types.CodeType] = set()
    sys.setprofile(lambda frame, event, _: codes.add(frame.f_code) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    package = Path(flexmasks.__file__).parent
    assert str(package / "spec/values.py") in {code.co_filename for code in codes}
    folders, users = (package / "masks", package / "scores"), (near.__code__, third.__code__)
    return {code.co_name for code in codes if Path(code.co_filename).parent in folders or code in users}


@pytest.mark.parametrize("name", named_masks())
def test_pickles_of_masks_name_functions_that_rebuild_them_only(name: str) -> None:
    loader = Named(pickle.dumps(MASKS[name]))
    assert repr(loader.load()) == repr(MASKS[name])
    assert loader.names >= FLEXMASKS_CALLED
    assert loader.names <= FLEXMASKS_CALLED | TORCH_CALLED
    data = pickle.dumps(block_mask_of(name))
    loader = Named(data)
    loader.load()
    assert loader.names <= FLEXMASKS_CALLED | TORCH_CALLED | {("flexmasks.plans.portable", "loaded_block_mask")}


@pytest.mark.parametrize("name", MASKS)
def test_unpickling_calls_no_function_of_a_mask(name: str) -> None:
    data = pickle.dumps(MASKS[name])
    assert not definitions_called(lambda: pickle.loads(data))
    sizes = {"batch": BATCH, "heads": HEADS}
    keys = KEYS.get(name, LENGTH)
    assert definitions_called(lambda: flexmasks.dense_mask(pickle.loads(data), LENGTH, keys, q_offset=0, **sizes))


def test_unpickling_calls_no_hook_of_a_registered_mask() -> None:
    calls: list[str] = []

    def prepare(size: Size | None, *, reach: Annotated[int, "int in 0.."]) -> dict[str, Any]:
        calls.append("prepare")
        return {"reach": reach}

    @flexmasks.register_mask(prepare=prepare)
    def with_hooks(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, reach: int) -> Tensor:
        """Keys at most `reach` before the query."""
        calls.append("function")
        return q - kv <= reach

    data = pickle.dumps(get_mask("with_hooks", reach=3))
    block_mask = pickle.dumps(flexmasks.block_mask("with_hooks", 8, reach=3))
    calls.clear()
    mask = pickle.loads(data)
    assert not calls
    flexmasks.dense_mask(mask, 8)
    assert {"prepare", "function"} <= set(calls)
    calls.clear()
    pickle.loads(block_mask)
    assert {"prepare", "function"} <= set(calls)  # SECURITY.md says it


class Program:
    """An object whose pickle makes a folder, in place of something worse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_what_a_pickle_of_a_stranger_runs(tmp_path: Path) -> None:
    """SECURITY.md says it: files of weights run nothing, other pickles run what they ask for."""
    loaded, (kind, definition, _) = get_mask("sliding_window", window=3).__reduce__()

    class Changed:
        def __reduce__(self) -> Any:
            return loaded, (kind, definition, {"window": Program(tmp_path / "made")})

    file = io.BytesIO()
    torch.save(Changed(), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=r"mkdir"):
        torch.load(file)
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(Changed()))
    assert (tmp_path / "made").is_dir()
    assert "run **any code**" in (Path(__file__).parent.parent.parent / "SECURITY.md").read_text()


def test_unpickling_a_users_function_imports_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SECURITY.md says it; a file of weights imports nothing."""
    (tmp_path / "of_a_stranger.py").write_text(
        "from pathlib import Path\n"
        "(Path(__file__).parent / 'imported').touch()\n"
        "def causal_too(b, h, q, kv):\n"
        "    (Path(__file__).parent / 'called').touch()\n"
        "    return q >= kv\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("of_a_stranger")
    mask = get_mask(module.causal_too)
    data, file = pickle.dumps(mask), io.BytesIO()
    torch.save(mask, file)
    monkeypatch.delitem(sys.modules, "of_a_stranger")
    for made in ("imported", "called"):
        (tmp_path / made).unlink(missing_ok=True)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=r"of_a_stranger"):
        torch.load(file)
    assert not (tmp_path / "imported").exists()
    mask = pickle.loads(data)
    assert (tmp_path / "imported").exists()
    assert not (tmp_path / "called").exists()
    assert flexmasks.dense_mask(mask, 2).tolist() == [[[[True, False], [True, True]]]]
    assert (tmp_path / "called").exists()


@pytest.mark.parametrize("params", [{"window": print}, {"window": {}}, {"windows": 3}, {}, None])
def test_damaged_pickles_of_masks(params: Any) -> None:
    mask = get_mask("sliding_window", window=3)
    loaded, (kind, definition, _) = mask.__reduce__()
    for changed in ((kind, definition, params), (kind, mask, {"window": 3}), ("score", definition, {"window": 3})):
        with pytest.raises(TypeError, match="flexmasks"):  # parameters are checked at the first use
            flexmasks.dense_mask(loaded(*changed), 4)


def test_damaged_names() -> None:
    tensor = torch.ones(2)
    for arguments in (("evil", "causal"), (["mask"], "causal"), ("mask", ["causal"]), ("mask", tensor), (tensor, "&")):
        with pytest.raises(TypeError, match="flexmasks: a pickle of a mask or score is damaged"):
            from_pickle(*arguments)  # type: ignore[arg-type]
    for given in (("evil", near, "near"), ("mask", 3, "near"), ("mask", near, tensor)):
        with pytest.raises(TypeError, match="flexmasks: a pickle of a mask or score is damaged"):
            loaded_function(*given)  # type: ignore[arg-type]


def test_the_former_format_of_files() -> None:
    """Its tensors have no contents yet while the file is read; masks without block lists do not mind."""
    file = io.BytesIO()
    torch.save(flexmasks.block_mask(MASKS["documents"], LENGTH), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with pytest.raises(ValueError, match=r"a pickled block mask .*_use_new_zipfile_serialization=False"):
        torch.load(file)
    file = io.BytesIO()
    torch.save(MASKS["documents"], file, _use_new_zipfile_serialization=False)
    file.seek(0)
    assert repr(torch.load(file)) == repr(MASKS["documents"])


def test_damaged_pickles_of_block_masks() -> None:
    rebuild, arguments = flexmasks.block_mask(MASKS["documents"], LENGTH).__reduce__()
    rebuild(*arguments)
    short = get_mask("document", document_ids=IDS[:, :9])
    wrong: list[tuple[int, Any]] = [
        (0, "cpu"), (0, torch.tensor(7)), (0, arguments[0].to("meta")), (1, near), (1, short), (2, (LENGTH, 0, 1, 1)),
        (2, (LENGTH, 70.0, 1, 1)), (2, (LENGTH, LENGTH, 7, 1)), (3, print), (3, torch.tensor([1])), (4, 0),
    ]  # fmt: skip
    for place, value in wrong:
        with pytest.raises((TypeError, ValueError), match=r"^flexmasks"):
            rebuild(*arguments[:place], value, *arguments[place + 1 :])


def test_block_masks_of_torch_are_left_alone() -> None:
    block_mask = create_block_mask(third, 1, 1, 128, 128, device="cpu")
    assert type(by_pickle(block_mask)) is BlockMask
