"""Backend "fa4": FlashAttention 4 called directly, for windows and soft-caps."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import (
    HALF_DTYPES,
    Call,
    Maker,
    Replay,
    Result,
    Unavailable,
    first_line,
    proven,
    raise_passing_error,
    transformed,
)
from flexmasks.kernels.compiling import announce_once
from flexmasks.plans.intervals import Intervals
from flexmasks.plans.sizes import capability
from flexmasks.plans.windows import Window
from flexmasks.spec.bands import Band, Sequences

_log = logging.getLogger("flexmasks")
MIN_QUERIES = 128  # with fewer queries, kernels that split the keys are faster
_MAX_SEARCHED_SEQUENCES = 2048
# Slots of a page that the kernel copies as a whole tile, up to a head size: in 0.86 of the time that pages of 256 take
# (H200).
_FAST_PAGE, _MAX_SIZE_OF_FAST_PAGE = 128, 128
# Up to version 4.0.0b25 flash-attn-4 gives garbage as gradients in 0.1 to 1% of launches on compute capability 9.0: its
# block-sparse backward pass has a race (flash-attention pull request 2756).
_FIRST_RIGHT_BETA = 26
# The major compute capability of consumer GPUs, with 100 KB of shared memory, for which flash-attn-4 has other kernels.
_SMALL, _MAX_SIZE_ON_SMALL = 12, 128
# Head sizes above 128 that flash-attn-4 takes on compute capability 10 and 11.
_LARGE_SIZES_ABOVE_HOPPER = ((192, 128), (256, 256))
# Different head sizes of q and of v that flash-attn-4 is tested with by its authors, and those tested with gradients.
_V_SIZES, _V_SIZES_WITH_GRADIENTS = ((128, 64), (192, 128)), ((192, 128),)
# Names of the kernel's arguments, in the order of the operators below.
_ARGUMENTS = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    "softmax_scale", "window_size_left", "window_size_right", "causal",
)  # fmt: skip
# The arguments that the library gives to functions of flash-attn-4.
_FOR_BOTH = (*_ARGUMENTS, "score_mod")
_NEEDED = {
    "_flash_attn_fwd": (*_FOR_BOTH, "seqused_k", "page_table", "return_lse"),
    "_flash_attn_bwd": (*_FOR_BOTH, "score_mod_bwd", "dlse", "deterministic"),
}
_FITS_TILES = "_fit_sm90_fwd_tile_to_block_sparsity"  # the function of flash-attn-4 that fits tiles to smaller blocks
# Variables of flash-attn-4: "1" if it keeps compiled kernels on the disk, and where.
KEEPS_KERNELS, KERNEL_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_ONCE_ONLY = "flexmasks.attention: backend 'fa4' cannot be differentiated twice; pass backend='reference', which can."


def is_installed() -> bool:
    """Return whether flash-attn-4 is there, in a version that can be called."""
    return not why_missing()


def why_missing() -> str:
    """Return why flash-attn-4 cannot be called, or "".

    A package of another version is warned of once.
    """
    return _package().why_missing


def fits_tiles() -> bool:
    """Return whether flash-attn-4 fits the tiles of its kernels to blocks that are smaller."""
    return _package().fits_tiles


class _Package(NamedTuple):
    """Facts about the installed flash-attn-4."""

    why_missing: str  # why it cannot be called, or ""
    fits_tiles: bool = False


@functools.cache
def _package() -> _Package:
    """Return facts about the installed flash-attn-4.

    Its source is read instead of imported, which takes seconds.
    """
    try:
        spec = importlib.util.find_spec("flash_attn.cute")
    except ModuleNotFoundError:
        spec = None
    except Exception as error:  # find_spec imports flash_attn, whose code may raise anything
        return _warned(f"cannot be imported: {first_line(error)}")
    if spec is None:
        return _Package("the package flash-attn-4 is not installed")
    files = [Path(folder) / "interface.py" for folder in spec.submodule_search_locations or ()]
    source = next((file.read_text(encoding="utf-8") for file in files if file.exists()), None)
    if source is None:
        return _warned("has no flash_attn.cute.interface")
    try:
        functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        return _warned(f"cannot be imported: {first_line(error)}")
    for name, needed in _NEEDED.items():
        if name not in functions:
            return _warned(f"has no function {name}")
        taken = functions[name]
        names = {argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
        lacking = [argument for argument in needed if argument not in names]
        if lacking and taken.kwarg is None:
            return _warned(f"has a function {name} without {', '.join(lacking)}")
    if _has_race():
        return _warned("may give garbage as gradients: before 4.0.0b26 its backward pass has a race")
    _keep_kernels_on_disk()
    return _Package("", _FITS_TILES in functions)


def _has_race() -> bool:
    """Return whether flash-attn-4 is known to be older than its first right version."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    beta = re.match(r"4\.0\.0\.?(?:b(\d+)(\.?dev)?|a|dev)", version)
    return beta is not None and (int(beta[1] or 0), beta[2] is None) < (_FIRST_RIGHT_BETA, True)


def _keep_kernels_on_disk() -> None:
    """Let flash-attn-4 keep its compiled kernels on the disk.

    They lie in a folder of the user's, from which later processes load them.

    Nothing changes if the user has set one of its variables, if it is imported already, or if the folder cannot be
    written.
    """
    is_chosen = KEEPS_KERNELS in os.environ or KERNEL_FOLDER in os.environ
    if is_chosen or "flash_attn.cute.cache_utils" in sys.modules:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexmasks" / "flash-attn-4"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a RuntimeError says that there is no home
        return
    if os.access(folder, os.W_OK | os.X_OK):
        os.environ.update({KEEPS_KERNELS: "1", KERNEL_FOLDER: str(folder)})


def _warned(what: str) -> _Package:
    """Warn that flash-attn-4 is left out, and return a package that cannot be called."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        what = f"{importlib.metadata.version('flash-attn-4')} {what}"
    why = f"the package flash-attn-4 {what}"
    _log.warning("%s, so other backends run its calls", why)
    return _Package(why)


_import_failures: list[str] = []  # why importing flash-attn-4 failed


def interface() -> Any:
    """Return the module with flash-attn-4's functions.

    Raises Unavailable if importing it fails; later calls of any kind then refuse it.
    """
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # the code of another package may raise anything
        _import_failures[:] = [f"the package flash-attn-4 cannot be imported: {first_line(error)}"]
        raise Unavailable(_import_failures[0]) from error


def refuses_package(call: Call) -> str | None:
    """Return why flash-attn-4 cannot take the call, called directly or through flex_attention, or None."""
    head_size, v_size = call.q.shape[3], call.v.shape[3]
    if not call.is_cuda:
        return "it runs on CUDA only"
    missing = why_missing() or next(iter(_import_failures), "")
    if missing:
        return missing
    major = torch.cuda.get_device_capability(call.q.device)[0]
    if major < 9:
        return "it needs compute capability 9.0 or above"
    if call.q.dtype not in HALF_DTYPES:
        return f"it takes float16 and bfloat16, not {call.dtype}"
    if head_size > 256 or head_size % 8:
        return f"it takes head sizes that are multiples of 8 up to 256, not {head_size}"
    if major == _SMALL and max(head_size, v_size) > _MAX_SIZE_ON_SMALL:
        return f"on compute capability {major} it takes head sizes up to {_MAX_SIZE_ON_SMALL}, not {head_size}"
    if major in (10, 11) and head_size > 128 and (head_size, v_size) not in _LARGE_SIZES_ABOVE_HOPPER:
        return f"on compute capability {major} it takes head sizes up to 128, 192 with 128 for v, and 256"
    if v_size != head_size:
        taken = _V_SIZES_WITH_GRADIENTS if call.needs_grad else _V_SIZES
        if (head_size, v_size) not in taken:
            sizes = " or ".join(f"{size} with {other}" for size, other in taken)
            gradients = " and gradients" if call.needs_grad else ""
            return f"with two head sizes{gradients} it takes {sizes} for v, not {head_size} with {v_size}"
        if call.needs_grad and call.q.shape[1] != call.k.shape[1]:
            return "its backward pass takes two head sizes only if heads are not grouped"
    if call.needs_grad and -head_size % 32 > 8:
        return f"its gradients are wrong for head sizes 8 or 16 past a multiple of 32, as {head_size} is"
    return None


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    reason = refuses_package(call)
    if reason is not None:
        return reason
    if _is_small(call.q.device) and call.needs_grad and call.cap is not None:
        return f"on compute capability {_SMALL} its backward pass takes no score changes"
    if call.mask.window is None:
        reason = _refuses_starts(call)
        if reason is not None:
            return reason
    return _refuses_numbers(call)


def _is_small(device: torch.device) -> bool:
    return capability(device)[0] == _SMALL


def adds_in_any_order(call: Call) -> str | None:
    """Return what the kernel adds in changing order, or None.

    In torch's deterministic mode it sums the gradients of queries in order, but not on each GPU.
    """
    return "the gradients of queries" if call.needs_grad and _is_small(call.q.device) else None


def _refuses_starts(call: Call) -> str | None:
    """Return why a call that is no window from one position cannot run, or None."""
    intervals = call.mask.intervals
    if intervals is None or not isinstance(intervals.offset, Tensor):
        return (
            "it knows only windows, such as full and causal, and windows inside sequences laid end to end, given by "
            "offsets; it would have to read documents given by ids"
            f"{', and where queries start' if call.is_traced else ''}"
        )
    # The kernel must be told of no more keys than there are, and nobody reads where the queries start.
    if intervals.lens is not None or intervals.right != 0 or call.q.shape[2] > call.k.shape[2]:
        return (
            "where queries start at positions of a tensor, it takes windows that end at a query's position, without "
            "lengths of sequences, and no more queries than keys"
        )
    if call.needs_grad:
        return "it gives no gradients for queries that start at positions of a tensor"
    if _is_small(call.q.device):
        return f"on compute capability {_SMALL} it is not told where the keys of each batch element end"
    return None


def plan(call: Call) -> str:
    """Say what takes the place of a plan of blocks, or "" if nothing does."""
    return "" if call.mask.window is not None else "none: the kernel is told where the keys of each batch element end"


def _refuses_numbers(call: Call) -> str | None:
    """Return why a call of a window cannot run here, or None."""
    if call.score is not None and call.cap is None:
        return "it has no score changes except the soft-cap"
    if call.kernel_options:
        return "it takes no kernel_options"
    if call.scale is not None and call.scale <= 0:
        return "it takes scales above 0 only"
    if call.q.shape[2] < MIN_QUERIES:
        return "it does not split the keys among processors, which few queries need"
    if not call.is_traced and (compat.transforms_active() or transformed()):
        return "it does not run inside transforms of torch.func"
    return None


def run(call: Call) -> Result:
    """Run the call; raise Unavailable if flash-attn-4 cannot compile it."""
    _announce(call)
    if call.mask.window is None:
        started = StartedCall.of(call)
        return Result(*started(call.q, call.k, call.v), started)
    replay = DirectCall.of(call)
    with _failures_are_unavailable():
        if call.sinks is None or not folds_sinks(call.q, call.k, call.v, call.sinks):
            return proven(call, replay)
        return proven(call, replay, call.sinks)._replace(has_sinks=True)


def _announce(call: Call, layout: str = "") -> None:
    """Log, once for each kind of kernel, that flash-attn-4 compiles it."""
    if call.is_traced:
        return
    q, window = call.q, call.mask.window
    parts = [
        str(q.dtype).removeprefix("torch."),
        f"head sizes {q.shape[3]} and {call.v.shape[3]}",
        "all keys" if window is not None and window.left is window.right is None else "a window",
        layout or ("sequences" if call.sequences is not None else ""),
        "a soft-cap" if call.cap is not None else "",
        "sinks" if call.sinks is not None else "",
        "gradients" if call.needs_grad else "",
    ]
    announce_once(f"attention for backend 'fa4': {', '.join(filter(None, parts))}", "fa4")


@contextlib.contextmanager
def _failures_are_unavailable() -> Iterator[None]:
    """Raise Unavailable in place of other errors, but for missing memory.

    flash-attn-4 compiles at the first call, and raises errors of any type.
    """
    try:
        yield
    except Unavailable:
        raise
    except Exception as error:
        raise_passing_error(error)
        raise Unavailable(first_line(error)) from error


def folds_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> bool:
    """Return whether the kernel folds in the sinks of a call.

    It does not where sinks alone learn: the call was then chosen as one without gradients.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, sinks))
    only_sinks_learn = sinks.requires_grad and not any(x.requires_grad for x in (q, k, v))
    return not (needs_grad and (only_sinks_learn or _is_small(q.device))) and _knows_sinks()


@compat.constant_in_graphs
def _knows_sinks() -> bool:
    """Return whether flash-attn-4 takes sinks, with their gradient; earlier versions do not."""
    return _has_argument_of_sinks()


@functools.cache
def _has_argument_of_sinks() -> bool:
    """Return what `_knows_sinks` does, found once, because every call with sinks asks.

    torch.compile cannot take the result of a function with a cache as a constant.
    """
    functions = (getattr(interface(), name) for name in _NEEDED)
    return all("learnable_sink" in inspect.signature(function).parameters for function in functions)


def compiles(call: Call) -> str:
    """Say whether the call would compile."""
    return "yes, if it is the first call of its kind: flash-attn-4 compiles once for each kind"


@dataclass(frozen=True)
class DirectCall(Replay):
    """A call of FlashAttention 4 without q, k and v."""

    window: Window
    sequences: Sequences | None
    scale: float | None
    cap: float | None  # cap of a soft-cap
    with_lse: bool
    by_head: Sequences | None = None  # sequences of [B, H, S, D] in memory order, head after head, if that is faster
    is_traced: bool = False  # torch.compile traces the call

    key = "fa4"

    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor | None] | None:
        return self(q, k, v, sinks) if folds_sinks(q, k, v, sinks) else None

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in (self.sequences, self.by_head) if s is not None)

    @classmethod
    def of(cls, call: Call) -> DirectCall:
        """Return the call for the shapes of its q and k."""
        sequences = call.sequences
        batch, heads, length, _ = call.q.shape
        by_head = None
        if sequences is not None and sequences.q is sequences.kv and batch > 1 and heads == call.k.shape[1]:
            # Reading head by head copies nothing. But FlashAttention searches the list of sequences for every tile.
            is_searched_fast = heads * len(sequences.q) <= _MAX_SEARCHED_SEQUENCES
            by_head = sequences.of_heads(heads, length) if is_searched_fast else None
        window = cast(Window, call.mask.window)
        return cls(window, sequences, call.scale, call.cap, call.with_lse, by_head, call.is_traced)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Q, Dv], and lse [B, H, Q] or None.

        sinks: logits of attention sinks, [H].
        """
        k, v = self.window.cut(k), self.window.cut(v)
        sinks = None if sinks is None else sinks.float().contiguous()
        if self.sequences is not None:
            out, lse = self._in_sequences(q, k, v, sinks, self.sequences)
        else:
            out, lse = self._attend(None, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sinks)
            out = out.transpose(1, 2)
        return out, lse if self.with_lse else None

    def _in_sequences(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        if sequences.q is not sequences.kv:
            # Keys in padding that meet no query may get no gradient at all.
            k, v = (hide_padding(x, 2, sequences.counts[1], 0.0) for x in (k, v))
        out, lse = self._over_all_tokens(q, k, v, sinks, sequences)
        count = sequences.counts[0]
        lse_of_nothing = -torch.inf if sinks is None else sinks[:, None]
        return hide_padding(out, 2, count, 0.0), hide_padding(lse, 2, count, lse_of_nothing)

    def _over_all_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Return output and lse of sequences that may include padding."""
        batch, heads, q_len, _ = q.shape
        v_size = v.shape[3]
        has_heads_apart = self.by_head is not None and sinks is None  # where all heads count as one
        if has_heads_apart and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
            out, lse = self._attend(self.by_head, *(x.view(-1, 1, x.shape[3]) for x in (q, k, v)))
            return out.view(batch, heads, q_len, v_size), lse.view(q.shape[:3])
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [tokens, H, D], copied if no view can be so
        out, lse = self._attend(sequences, q, k, v, sinks)
        return out.view(batch, q_len, heads, v_size).transpose(1, 2), lse.view(heads, batch, q_len).transpose(0, 1)

    def _attend(
        self, sequences: Sequences | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output and lse of q, k and v [B, S, H, D or Dv].

        With sequences, q, k and v are [tokens, H, D or Dv].
        """
        arguments = self._arguments(q.shape[1], k.shape[1], sequences)
        if self.is_traced:
            in_order = [arguments.get(name) for name in _ARGUMENTS]
            out, lse = traced_forward(q, k, v, sinks, *in_order, self.cap, self.with_lse)
        else:
            out, lse = _Attend.apply(q, k, v, sinks, arguments, self.cap)
        return out, lse

    def _arguments(self, q_len: int, kv_len: int, sequences: Sequences | None) -> dict[str, Any]:
        """Return the kernel's arguments; FlashAttention counts windows with the last query at the last key."""
        shift = 0 if sequences is not None else self.window.offset - (kv_len - q_len)
        left, right = self.window.left, self.window.right
        left, right = None if left is None else left - shift, None if right is None else right + shift
        arguments = {"softmax_scale": self.scale, **_window_arguments(left, right)}
        if sequences is not None:
            arguments |= {"cu_seqlens_q": sequences.q, "cu_seqlens_k": sequences.kv}
            arguments |= {"max_seqlen_q": sequences.longest[0], "max_seqlen_k": sequences.longest[1]}
        return arguments


# --- pages ---


def refuses_pages(call: Call, band: Band | None) -> str | None:
    """Return why a call cannot read pages here, or None.

    Its queries are the last ones of each sequence. band: the mask inside a sequence.
    """
    if band is None or band.sequences is not None:
        return "it knows only windows"
    if call.needs_grad:
        return "its kernel for pages has no gradients"
    if _is_small(call.q.device):
        return f"on compute capability {_SMALL} it reads no pages"
    return refuses_package(call) or _refuses_numbers(call)


@dataclass(frozen=True)
class PagedCall(Replay):
    """A call of FlashAttention 4 to pages, without q and the caches.

    Its queries are the last ones of each sequence.

    lens: number of keys of each sequence. They and the page table are int32.
    parts: in how many pages the kernel reads each page of the caches.
    """

    left: int | None
    right: int | None
    scale: float | None
    cap: float | None
    with_lse: bool
    pages: tuple[Tensor, Tensor]  # lengths and page table, as they were given
    lens: Tensor
    table: Tensor
    parts: int
    reads = ("pages",)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes if self.parts > 1 else 0

    @classmethod
    def of(cls, call: Call, band: Band, lens: Tensor, table: Tensor, k_cache: Tensor, v_cache: Tensor) -> PagedCall:
        """Return the call for caches of these layouts."""
        q_len, room = call.q.shape[2], call.k.shape[2]
        left = None if band.left is None or band.left >= room - 1 else band.left
        right = None if band.right is None or band.right >= q_len - 1 else band.right
        parts = _parts_of_pages(k_cache, v_cache)
        _announce(call, "pages")
        return cls._made((left, right, call.scale, call.cap, call.with_lse), parts, (lens.detach(), table.detach()))

    @classmethod
    def _made(cls, numbers: tuple[Any, Any, Any, Any, bool], parts: int, pages: tuple[Tensor, Tensor]) -> PagedCall:
        return cls(*numbers, pages, _in_int32(pages[0]), _in_parts(pages[1], parts), parts)

    def taken(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Maker]:
        numbers, parts = (self.left, self.right, self.scale, self.cap, self.with_lse), self.parts
        return self.pages, [], lambda read, captured: PagedCall._made(numbers, parts, (read[0], read[1]))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Q, Dv], and lse [B, H, Q] or None.

        k, v: caches [n_pages, page_size, Hkv, D] and [n_pages, page_size, Hkv, Dv].

        Raises Unavailable if flash-attn-4 cannot compile the call.
        """
        arguments = {"seqused_k": self.lens, "page_table": self.table, "softmax_scale": self.scale}
        arguments |= _window_arguments(self.left, self.right)
        k, v = compat.with_rows_together(k.detach(), v.detach())
        if self.parts > 1:
            k, v = (x.view(-1, _FAST_PAGE, *x.shape[2:]) for x in (k, v))
        with _failures_are_unavailable():
            out, lse = _forward(q.detach().transpose(1, 2), k, v, arguments, self.cap)
        return out.transpose(1, 2), lse if self.with_lse else None


def _parts_of_pages(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return in how many parts the kernel reads each page of the caches.

    Parts have `_FAST_PAGE` slots, or a page is read as it is.
    """
    page_size = k_cache.shape[1]
    has_fast_page = max(k_cache.shape[3], v_cache.shape[3]) <= _MAX_SIZE_OF_FAST_PAGE and page_size % _FAST_PAGE == 0
    is_in_order = all(x.stride(0) == page_size * x.stride(1) for x in (k_cache, v_cache))
    return page_size // _FAST_PAGE if has_fast_page and is_in_order else 1


def _in_parts(table: Tensor, parts: int) -> Tensor:
    """Return a table of pages as one of their parts, int32."""
    table = _in_int32(table)
    if parts == 1:
        return table
    return (table[:, :, None] * parts + torch.arange(parts, dtype=torch.int32, device=table.device)).flatten(1)


def _in_int32(x: Tensor) -> Tensor:
    return x.detach().int().contiguous()


# --- queries that start where a tensor says ---


@dataclass(frozen=True)
class StartedCall(Replay):
    """A call of FlashAttention 4 whose queries start where a tensor says.

    The kernel lays the last query at the last key, so it is told of the keys up to the last query's position.

    ends: the number of keys that the kernel is told of, int32 [B].
    """

    left: int | None
    scale: float | None
    cap: float | None
    with_lse: bool
    lengths: tuple[int, int]  # numbers of queries and of keys
    starts: Tensor
    ends: Tensor
    reads = ("intervals",)

    @property
    def nbytes(self) -> int:
        return self.ends.nbytes

    @classmethod
    def of(cls, call: Call) -> StartedCall:
        """Return the call."""
        intervals = cast(Intervals, call.mask.intervals)
        lengths = call.q.shape[2], call.k.shape[2]
        numbers = intervals.left, call.scale, call.cap, call.with_lse, lengths
        starts = cast(Tensor, intervals.offset)
        return cls(*numbers, starts, _ends(starts, lengths))

    def taken(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Maker]:
        numbers = self.left, self.scale, self.cap, self.with_lse, self.lengths
        make = lambda read, captured: StartedCall(*numbers, read[0], _ends(read[0], numbers[-1]))  # noqa: E731
        return [self.starts], [], make

    def refresh(self) -> None:
        self.ends.copy_(_ends(self.starts, self.lengths))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Q, Dv], and lse [B, H, Q] or None.

        Raises Unavailable if flash-attn-4 cannot compile the call.
        """
        q, k, v = compat.with_rows_together(q.detach(), k.detach(), v.detach())
        shows_all_before = self.left is None or self.left >= self.lengths[1] - 1
        arguments = {"seqused_k": self.ends, "softmax_scale": self.scale}
        arguments |= _window_arguments(None if shows_all_before else self.left, 0)
        with _failures_are_unavailable():
            out, lse = _forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), arguments, self.cap)
        return out.transpose(1, 2), lse if self.with_lse else None


def _ends(starts: Tensor, lengths: tuple[int, int]) -> Tensor:
    """Return the number of keys up to the last query's position, int32 [B].

    starts: the position of the first query of each batch element. Wrong ones let no kernel read memory behind the keys.
    lengths: numbers of queries and of keys.
    """
    q_len, kv_len = lengths
    return (starts.detach().long() + q_len).clamp_(0, kv_len).int()


# --- arguments and results of the kernel ---


def _window_arguments(left: int | None, right: int | None) -> dict[str, Any]:
    """Return the kernel's arguments for the keys at distances -left..right of a query.

    None is no limit.
    """
    if left is None and right == 0:
        return {"causal": True}
    limits = {"window_size_left": left, "window_size_right": right}
    return {name: limit for name, limit in limits.items() if limit is not None}


def hide_padding(x: Tensor, dim: int, count: Tensor, value: float | Tensor) -> Tensor:
    """Return `x` with a value behind the first `count` places of a dimension.

    The elements of x there get gradient 0. count: int64[1]. value: a number, or a tensor that broadcasts with x.
    """
    place = torch.arange(x.shape[dim], device=x.device)
    return torch.where((place < count).view(-1, *[1] * (x.ndim - dim - 1)), x, value)


class _Attend(torch.autograd.Function):
    """Attention by the kernel.

    q and k are [B, S, H, D] and v is [B, S, H, Dv], or they are [tokens, H, D] and [tokens, H, Dv].
    The output is [B, S, H, Dv] or [tokens, H, Dv], the lse [B, H, S] or [H, tokens].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        arguments: dict[str, Any],
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, arguments, cap, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.arguments, ctx.cap = arguments, cap
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return None, None, None, None, None, None
        d_out = torch.zeros_like(out) if d_out is None else d_out
        gradients = _backward(q, k, v, out, lse, d_out, d_lse, ctx.arguments, ctx.cap, sinks)
        if torch.is_grad_enabled():
            gradients = _NotDifferentiable.apply(q, k, v, *gradients)
        return *gradients, *([None] * (4 - len(gradients))), None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], cap: float | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    functions = {}
    if cap is not None:
        scale = arguments.get("softmax_scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        arguments = {**arguments, "softmax_scale": scale / cap}
        functions = {"score_mod": _softcap_of_share(cap)}
    given = {} if sinks is None else {"learnable_sink": sinks}
    out, lse = interface()._flash_attn_fwd(q, k, v, return_lse=True, **arguments, **functions, **given)[:2]
    return out, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    arguments: dict[str, Any],
    cap: float | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, and of sinks if there are some."""
    functions = {}
    if cap is not None:
        functions = dict(zip(("score_mod", "score_mod_bwd"), _softcap(cap), strict=True))
    given = {} if sinks is None else {"learnable_sink": sinks}
    deterministic = torch.are_deterministic_algorithms_enabled() and not _is_small(q.device)
    tensors = (q, k, v, out, d_out, lse)
    gradients = interface()._flash_attn_bwd(
        *tensors, **arguments, **functions, **given, dlse=d_lse, deterministic=deterministic
    )
    return tuple(gradients[: 3 if sinks is None else 4])


class _NotDifferentiable(torch.autograd.Function):
    """The gradients, unchanged, with an error in place of their derivatives.

    Autograd alone would give zero derivatives.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(_ONCE_ONLY)


# --- the same as operators, for calls that torch.compile traces ---


def _given(*in_order: Any) -> dict[str, Any]:
    """Return the arguments of the kernel, without those that are None."""
    return {name: value for name, value in zip(_ARGUMENTS, in_order, strict=True) if value is not None}


@torch.library.custom_op("flexmasks::fa4_forward", mutates_args=(), device_types="cuda")
def traced_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    q_starts: Tensor | None,
    kv_starts: Tensor | None,
    max_q_len: int | None,
    max_kv_len: int | None,
    scale: float | None,
    left: int | None,
    right: int | None,
    causal: bool | None,
    cap: float | None,
    lse_may_learn: bool,
) -> tuple[Tensor, Tensor]:
    """Return output and lse, as `_Attend` does.

    lse_may_learn: the gradient of the lse counts.
    """
    arguments = _given(q_starts, kv_starts, max_q_len, max_kv_len, scale, left, right, causal)
    return _forward(q, k, v, arguments, cap, sinks)


@traced_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("flexmasks::fa4_backward", mutates_args=(), device_types="cuda")
def traced_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    d_out: Tensor,
    d_lse: Tensor | None,
    q_starts: Tensor | None,
    kv_starts: Tensor | None,
    max_q_len: int | None,
    max_kv_len: int | None,
    scale: float | None,
    left: int | None,
    right: int | None,
    causal: bool | None,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sinks, the last one empty without sinks."""
    arguments = _given(q_starts, kv_starts, max_q_len, max_kv_len, scale, left, right, causal)
    dq, dk, dv, *d_sinks = _backward(q, k, v, out, lse, d_out, d_lse, arguments, cap, sinks)
    return dq, dk, dv, d_sinks[0] if d_sinks else lse.new_empty(0)


@traced_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_sinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, q_starts, kv_starts, *numbers, lse_may_learn = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, q_starts, kv_starts)
    ctx.numbers, ctx.lse_may_learn = numbers, lse_may_learn


def _differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sinks, *starts = ctx.saved_tensors
    d_lse = d_lse if ctx.lse_may_learn else None
    dq, dk, dv, d_sinks = traced_backward(q, k, v, out, lse, sinks, d_out, d_lse, *starts, *ctx.numbers)
    return dq, dk, dv, None if sinks is None else d_sinks, *[None] * 10


def _refuse_twice(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise RuntimeError(_ONCE_ONLY)


traced_forward.register_autograd(_differentiate, setup_context=_save)
traced_backward.register_autograd(_refuse_twice)


@functools.lru_cache(maxsize=64)
def _softcap_of_share(cap: float) -> Any:
    """Return cap * tanh(share) as a function in CuTe, for shares score / cap.

    The kernel's scale divides by the cap, which saves a multiplication of each pair. In the backward pass it would
    enlarge the gradients that are kept in half precision.
    """
    import cutlass.cute as cute

    @cute.jit
    def softcap(share: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return cap * cute.math.tanh(share, fastmath=True)

    return softcap


@functools.lru_cache(maxsize=64)
def _softcap(cap: float) -> tuple[Any, Any]:
    """Return cap * tanh(score / cap) and its derivative, as functions in CuTe.

    FlashAttention's own soft-cap is slow because it divides exactly; both use the GPU's tanh instruction.
    """
    import cutlass.cute as cute

    inverse_cap = 1 / cap

    @cute.jit
    def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return cap * cute.math.tanh(score * inverse_cap, fastmath=True)

    @cute.jit
    def derivative(
        grad: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        tanh = cute.math.tanh(score * inverse_cap, fastmath=True)
        return grad * (1.0 - tanh * tanh)

    return softcap, derivative
