"""Training on shared prefixes: sequences that share beginnings become trees, each shared token computed once.

Answers to one prompt, traces of agents that branch, and pairs of preferences share most of their tokens. `pack` lays
the trie of such sequences out in depth-first order and cuts it into rows. The mask `tree` lets each token see its own
path, so that logits and gradients equal those of the sequences computed one by one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from flexmasks import Mask, Plan, block_mask, get_mask
from flexmasks import plan as plan_of
from flexmasks.extend import as_number, definition_of, device_named, in_message, inside, says_what_to_write

__all__ = ["TreeBatch", "TreePages", "pack"]
_AT_ONCE = 1 << 24  # logits held at once, where `TreeBatch.logprobs` computes them

Tokens = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False, repr=False)
class TreeBatch:
    """Sequences as trees in rows of equal length, as `pack` returns them. R rows have N tokens each.

    tokens: int64[R, N], with 0 behind the last token of a row.
    parents: int64[R, N], the place of the token before each in its row, -1 for first tokens and behind the last token.
    position_ids: int64[R, N], the place of each token in its sequences.
    weights: int64[R, N], how many sequences share a token, 0 behind the last token.
    lengths: the number of tokens of each row.
    places: for each sequence its row, and the places of its tokens there, int64[length].
    repeated: how many prefixes stand in more than one row, because their tree is larger than a row.
    kept: bool[S, T], where the tokens of the sequences stand in the padded rows that were packed, if these had a mask.
    """

    hint: ClassVar[str] = ", a batch of trees; write batch.mask"
    tokens: Tensor
    parents: Tensor
    position_ids: Tensor
    weights: Tensor
    lengths: list[int]
    places: list[tuple[int, Tensor]]
    repeated: int = 0
    kept: Tensor | None = None
    _flat: Tensor = field(init=False)  # the places of all sequences in the flattened rows
    _plans: dict[int | None, Plan] = field(init=False, default_factory=dict)  # by their windows

    def __post_init__(self) -> None:
        flat = [row * self.tokens.shape[1] + places for row, places in self.places]
        object.__setattr__(self, "_flat", torch.cat(flat))

    def __repr__(self) -> str:
        counts = {"sequence": len(self.places), "row": len(self.tokens)}
        sequences, rows = (f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items())
        tokens = f"{len(self._flat)} tokens in {sum(self.lengths)}"
        return f"TreeBatch({sequences}, {tokens}, {self.saved:.0%} saved, {rows})"

    @property
    def saved(self) -> float:
        """The share of the sequences' tokens that are not computed, because others share them, from 0 to 1."""
        return 1 - sum(self.lengths) / max(1, len(self._flat))

    @property
    def mask(self) -> Mask:
        """The mask of the trees: each token sees its path. Tokens behind the last of a row see themselves."""
        return get_mask("tree", parents=self.parents)

    @says_what_to_write()
    def sliding_window(self, window: int) -> Mask:
        """The mask of the trees with a window along each path: `window` earlier tokens of it, and the token itself."""
        window = _at_least(0, "TreeBatch.sliding_window", "window", window)
        return windowed(self.mask, window, [depths(self.parents)])

    @says_what_to_write()
    def plan(self, *, window: int | None = None) -> Plan:
        """Return the plan of the mask, or of that with a window, for all layers of a step. It is made once."""
        window = None if window is None else _at_least(0, "TreeBatch.plan", "window", window)
        if window not in self._plans:
            mask = self.mask if window is None else self.sliding_window(window)
            self._plans[window] = plan_of(mask, self.tokens.shape[1], batch=len(self.tokens))
        return self._plans[window]

    def block_mask(self) -> BlockMask:
        """Return the mask as a BlockMask, for models that take one.

        Models of transformers take it as `attention_mask`, with `input_ids=batch.tokens` and
        `position_ids=batch.position_ids`. With attn_implementation="flexmasks" their layers with windows or chunks see
        these along each path, and `mask` or `plan()` does as well; others, such as "flex_attention", take the block
        mask as it is in all layers.
        """
        return block_mask(self.mask, self.tokens.shape[1], batch=len(self.tokens))

    def to(self, device: torch.device | str) -> TreeBatch:
        """Return the batch on a device."""
        device = device_named("flexmasks.trees.TreeBatch.to", device)
        moved = torch.cat([p for _, p in self.places]).to(device).split([len(p) for _, p in self.places])
        places = [(row, p) for (row, _), p in zip(self.places, moved, strict=True)]
        tensors = {n: getattr(self, n).to(device) for n in ("tokens", "parents", "position_ids", "weights")}
        return replace(self, **tensors, places=places, kept=None if self.kept is None else self.kept.to(device))

    @says_what_to_write()
    def gather(self, x: Tensor) -> list[Tensor]:
        """Return values of tokens for each sequence, as if it were alone.

        x: [R, N, ...]. Returns a list of [length, ...], with gradients: those of shared tokens are added.
        """
        _check("TreeBatch.gather", x, self.tokens.shape)
        return list(x.flatten(0, 1).index_select(0, self._flat).split([len(p) for _, p in self.places]))

    @says_what_to_write()
    def padded(self, values: Sequence[Tensor], *, fill: float = 0.0) -> Tensor:
        """Return values of the sequences where their tokens stood in the padded rows, [S, T], with gradients.

        values: for each sequence [length], as of `gather`, or [length - 1], all but the first, as of `logprobs`.
        fill: what stands elsewhere.

        Example:
            >>> import torch
            >>> from flexmasks import trees
            >>> rows = torch.tensor([[0, 5, 6, 7], [5, 6, 8, 0]])
            >>> batch = trees.pack(rows, mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]))
            >>> batch.padded(batch.gather(batch.tokens)).tolist()
            [[0, 5, 6, 7], [5, 6, 8, 0]]
        """
        at = self._padded_rows("padded")
        lengths, got = [len(p) for _, p in self.places], [len(x) for x in values]
        if got == [n - 1 for n in lengths]:
            at = at & (at.cumsum(1) > 1)
        elif got != lengths:
            wanted = f"`values` must have one tensor [length] or [length - 1] for each of {len(lengths)} sequences"
            raise ValueError(f"flexmasks.trees.TreeBatch.padded: {wanted}, got {in_message(values)}.")
        return values[0].new_full(at.shape, fill).masked_scatter(at, torch.cat(list(values)))

    @says_what_to_write()
    def logprobs(
        self, logits: Tensor, head: Callable[[Tensor], Tensor] | None = None, *, wanted: Tensor | None = None
    ) -> list[Tensor]:
        """Return the log-probability of each token of each sequence but the first, given those before it.

        The logits of a shared token are used once for each token that follows it in some sequence, and the result of a
        shared pair of tokens once for each sequence that has it. So a loss that is a sum over sequences has the value
        and the gradients that it has without sharing, also where sequences weigh shared tokens differently.

        logits: [R, N, V], or hidden states [R, N, D] with `head`.
        head: makes logits [n, V] of hidden states [n, D]. It is called on parts of the tokens, and again in the
            backward pass, so that the logits of all tokens are never held.
        wanted: bool or 0 and 1 [S, T] over the padded rows that were packed, such as the mask of a loss. A token that
            it leaves out in all sequences costs no logits, and its log-probability is 0.

        Returns a list of float32 (float64 for float64) tensors [length - 1].

        Example:
            >>> import torch
            >>> from flexmasks import trees
            >>> batch = trees.pack([[5, 6, 7], [5, 6, 8, 9]])
            >>> [x.shape[0] for x in batch.logprobs(torch.randn(1, 5, 10))]
            [2, 3]
        """
        return self._of_pairs("logprobs", logits, head, wanted, _of_targets)[0]

    @says_what_to_write()
    def logprobs_and_entropies(
        self, logits: Tensor, head: Callable[[Tensor], Tensor] | None = None, *, wanted: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what `logprobs` does, and the entropies of the distributions that these tokens were drawn from.

        Both are lists of tensors [length - 1] with gradients, from the same logits.
        """
        found, entropies = self._of_pairs("logprobs_and_entropies", logits, head, wanted, _with_entropy)
        return found, entropies

    def _of_pairs(
        self, call: str, logits: Tensor, head: Callable[[Tensor], Tensor] | None, wanted: Tensor | None, of: _OfTargets
    ) -> list[list[Tensor]]:
        """Return what `of` finds for each token that follows another one, [n] or [n, values], for each sequence."""
        _check(f"TreeBatch.{call}", logits, self.tokens.shape, dims=3)
        if head is not None and not callable(head):
            words = "`head` must be a function that makes logits [n, V] of hidden states [n, D]"
            raise TypeError(f"flexmasks.trees.TreeBatch.{call}: {words}, got {in_message(head)}.")
        follows = (self.parents >= 0).flatten()
        if wanted is not None:
            kept = self._padded_rows(call)
            if not isinstance(wanted, Tensor) or wanted.shape != kept.shape:
                words = f"`wanted` must be bool or 0 and 1 {list(kept.shape)}, as the rows that were packed"
                raise ValueError(f"flexmasks.trees.TreeBatch.{call}: {words}, got {in_message(wanted)}.")
            needed = torch.zeros_like(follows)
            needed[self._flat[wanted.to(kept.device).bool()[kept]]] = True
            follows = follows & needed
        children = follows.nonzero()[:, 0]
        starts = torch.arange(len(self.lengths), device=self.tokens.device)[:, None] * self.tokens.shape[1]
        parents = (self.parents + starts).flatten()[children]
        targets, states = self.tokens.flatten()[children], logits.flatten(0, 1)
        vocabulary = _vocabulary(call, states, head)
        if vocabulary <= self._largest:
            words = f"there are logits of {vocabulary} tokens, and every token after the first must be one of them"
            raise ValueError(f"flexmasks.trees.TreeBatch.{call}: {words}, got {self._largest}.")
        if head is None:
            found = of(states.index_select(0, parents), targets)
        else:

            def of_part(states: Tensor, parents: Tensor, targets: Tensor) -> Tensor:
                return of(head(states.index_select(0, parents)), targets)

            step = max(1, _AT_ONCE // max(1, vocabulary))
            parts = zip(parents.split(step), targets.split(step), strict=True)
            found = torch.cat([checkpoint(of_part, states, *part, use_reentrant=False) for part in parts])
        pairs = found.new_zeros(self.tokens.numel(), found.shape[1]).index_put((children,), found)
        each = [x[1:].unbind(1) for x in self.gather(pairs.view(*self.tokens.shape, -1))]
        return [list(x) for x in zip(*each, strict=True)]

    def _padded_rows(self, call: str) -> Tensor:
        """Return `kept`, which only batches of padded rows have."""
        if self.kept is None:
            words = "it needs a batch of padded rows; write trees.pack(rows, mask=attention_mask)"
            raise ValueError(f"flexmasks.trees.TreeBatch.{call}: {words}.")
        return self.kept

    @says_what_to_write()
    def pages(self, page_size: int, *, room: int = 0) -> TreePages:
        """Return pages of a cache in which sequences share the full pages of equal beginnings, for decoding.

        page_size: tokens of a page.
        room: tokens that may follow each sequence; their pages, and the last one of a sequence that is not full, are
            its own.

        Example:
            >>> from flexmasks import trees
            >>> batch = trees.pack([[5, 6, 7], [5, 6, 8, 9]])
            >>> batch.pages(2, room=1).page_table.tolist()
            [[0, 2, -1], [0, 1, 3]]
        """
        page_size = _at_least(1, "TreeBatch.pages", "page_size", page_size)
        room = _at_least(0, "TreeBatch.pages", "room", room)
        device, length = self.tokens.device, self.tokens.shape[1]
        paths = [row * length + places for row, places in self.places]
        full = [p[: len(p) // page_size * page_size].view(-1, page_size) for p in paths]
        # The place of its last token says all that stands before the end of a page.
        of_last, shared = torch.cat(full)[:, -1].unique(return_inverse=True)
        counts = [-(-(len(p) + room) // page_size) for p in paths]
        start = len(of_last)
        table = torch.full((len(paths), max(counts)), -1, dtype=torch.int32, device="cpu")
        filled = torch.full((start + sum(counts) - len(shared), page_size), -1, device=device)
        filled[shared] = torch.cat(full)
        for n, ids in enumerate(shared.cpu().split([len(f) for f in full])):
            end = start + counts[n] - len(ids)
            table[n, : counts[n]] = torch.cat([ids, torch.arange(start, end, device="cpu")])
            rest = paths[n][len(ids) * page_size :]
            filled[start : start + 1, : len(rest)] = rest
            start = end
        lens = torch.tensor([len(p) for p in paths], dtype=torch.int32, device=device)
        return TreePages(table.to(device), lens, filled, (len(self.tokens), length))

    @functools.cached_property
    def _largest(self) -> int:
        """The largest token that follows another one. It is read once, also from a GPU."""
        return int(torch.where(self.parents >= 0, self.tokens, -1).max())


class TreePages(NamedTuple):
    """Pages of a cache in which sequences share equal beginnings, as `TreeBatch.pages` returns them.

    page_table: int32[S, P], the pages of each sequence, for `flexmasks.paged_attention`, with -1 behind the last.
    kv_lens: int32[S], the lengths of the sequences.
    places: int64[pages, page size], the places of the tokens in the rows of the batch, laid end to end, -1 for none.
    shape: the numbers R of rows of the batch and N of their tokens.
    """

    page_table: Tensor
    kv_lens: Tensor
    places: Tensor
    shape: tuple[int, int]

    def filled(self, x: Tensor) -> Tensor:
        """Return a cache of keys or values, [pages, page size, H, D], with 0 where no token is.

        x: keys or values of all tokens of the batch in one layer, [R, H, N, D].
        """
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 4 or (len(x), x.shape[2]) != self.shape:
            wanted = f"`x` must be a tensor [R, H, N, D] = [{self.shape[0]}, H, {self.shape[1]}, D]"
            raise ValueError(f"flexmasks.trees.TreePages.filled: {wanted}, got {in_message(x)}.")
        rows = x.transpose(1, 2).flatten(0, 1).index_select(0, self.places.clamp(min=0).flatten())
        return rows.view(*self.places.shape, *rows.shape[1:]).masked_fill((self.places < 0)[..., None, None], 0)


def _at_least(least: int, call: str, name: str, value: Any) -> int:
    """Return an argument that is an int, also NumPy's, of at least `least`."""
    number = as_number(value)
    if type(number) is not int or number < least:
        raise ValueError(
            f"flexmasks.trees.{call}: `{name}` must be an int of at least {least}, got {in_message(value)}."
        )
    return number


def _check(call: str, x: Any, rows: torch.Size, dims: int | None = None) -> None:
    """Check values of tokens [R, N, ...], which have `dims` dimensions."""
    if not isinstance(x, Tensor) or x.is_nested or x.shape[:2] != rows or dims not in (None, x.ndim):
        many = "" if dims is None else f" of {dims} dimensions"
        wanted = f"a tensor{many} whose first dimensions are {list(rows)}"
        raise ValueError(f"flexmasks.trees.{call}: expected {wanted}, got {in_message(x)}.")


def windowed(mask: Mask, window: int, depths: list[Tensor]) -> Mask:
    """Return a mask of trees whose queries see at most `window` keys before their own along their paths.

    depths: those of the tokens of each tree in the mask, see `depths`.
    """
    for depth in depths:
        mask = mask & get_mask(functools.partial(_within_path, window=window, depth=depth))
    return mask


def _within_path(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, window: int, depth: Tensor) -> Tensor:
    of_q, of_kv = (depth[b, q], depth[b, kv]) if depth.ndim == 2 else (depth[q], depth[kv])
    return of_q - of_kv <= window


def parents_in(mask: Mask) -> list[Any]:
    """Return the parents of the tokens of each tree in a mask, tensors or tuples."""
    return [m.params["parents"] for m in inside(mask) if m.name == "tree" and definition_of(m).by_library]


def depths(parents: Tensor) -> Tensor:
    """Return the number of ancestors of each token, int64[N] or [B, N]."""
    missing = parents < 0
    ancestors, depth = torch.where(missing, parents.shape[-1], parents).long(), (~missing).long()
    ancestors, depth = (F.pad(x, (0, 1), value=n) for x, n in ((ancestors, parents.shape[-1]), (depth, 0)))
    for _ in range(parents.shape[-1].bit_length()):  # of ancestors that are twice as far in each step
        depth = depth + depth.gather(-1, ancestors)
        ancestors = ancestors.gather(-1, ancestors)
    return depth[..., :-1]


_OfTargets = Callable[[Tensor, Tensor], Tensor]  # logits [n, V] and tokens [n] come in, values [n, count] go out


def _of_targets(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.gather(1, targets[:, None]) - logits.logsumexp(1, keepdim=True)


def _with_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logs = logits - logits.logsumexp(1, keepdim=True)
    terms = logs.exp() * logs.masked_fill(logs == -math.inf, 0)  # 0 * -inf would be NaN
    return torch.cat([logs.gather(1, targets[:, None]), -terms.sum(1, keepdim=True)], 1)


def _vocabulary(call: str, states: Tensor, head: Callable[[Tensor], Tensor] | None) -> int:
    """Return the number of logits of a token."""
    if head is None:
        return states.shape[1]
    with torch.no_grad():
        logits = head(states[:1])
    if not isinstance(logits, Tensor) or logits.shape[:-1] != (1,):
        wanted = f"`head` must make logits [n, V] of hidden states [n, D] = {list(states[:1].shape)}"
        raise ValueError(f"flexmasks.trees.TreeBatch.{call}: {wanted}, it made {in_message(logits)}.")
    return logits.shape[1]


@says_what_to_write()
def pack(
    sequences: Iterable[Tokens],
    *,
    mask: Tensor | None = None,
    prompts: Iterable[Tokens] | None = None,
    max_tokens: int | None = None,
    min_shared: int = 1,
    device: torch.device | str | None = None,
) -> TreeBatch:
    """Lay sequences of tokens out as trees in which equal beginnings stand once.

    A tree that does not fit into a row is cut, and the prefix of what follows stands again in the next row, which
    `TreeBatch.repeated` counts. Rows hold whole trees, or are filled to the end, whichever takes fewer tokens.

    Args:
        sequences: lists or int tensors [length] of tokens that are at least 0, of any lengths but 0; in a list, or
            whatever gives them one after the other, as the rows of a tensor [count, length].
        mask: for padded rows, a tensor [count, length]: bool or 0 and 1 of the same shape, which tokens of each row its
            sequence consists of, as the `attention_mask` of a batch that is padded on any side.
        prompts: for each sequence one that stands before it; sequences of a group have equal ones.
        max_tokens: the most tokens of a row; by default all trees stand in one row.
        min_shared: the fewest tokens that sequences must share to share them.
        device: where the batch lives; by default that of the first sequence, or the CPU.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    Source: Miao et al., SpecInfer, 2024, for attention to trees of tokens; here for training.

    Example:
        >>> from flexmasks import trees
        >>> batch = trees.pack([[5, 6, 7], [5, 6, 8, 9], [3]])
        >>> batch
        TreeBatch(3 sequences, 8 tokens in 6, 25% saved, 1 row)
        >>> batch.tokens.tolist(), batch.parents.tolist()
        ([[3, 5, 6, 7, 8, 9]], [[-1, -1, 1, 2, 2, 4]])
        >>> batch.position_ids.tolist(), batch.weights.tolist()
        ([[0, 0, 1, 2, 2, 3]], [[1, 2, 2, 1, 1, 1]])
    """
    given = _each("sequences", sequences) if mask is None else _without_padding(sequences, mask, prompts)
    if device is None:
        device = next((s.device for s in (sequences, *given) if isinstance(s, Tensor)), "cpu")
    device = device_named("flexmasks.trees.pack", device)
    arrays = _arrays(given, None if prompts is None else _each("prompts", prompts))
    longest = max(map(len, arrays))
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < longest):
        raise ValueError(
            f"flexmasks.trees.pack: `max_tokens` must be an int of at least {longest}, the longest sequence, got "
            f"{max_tokens!r}."
        )
    min_shared = _at_least(1, "pack", "min_shared", min_shared)
    # In the order of their bytes, sequences that share a beginning are neighbours, and a prefix stands before the rest.
    order = sorted(range(len(arrays)), key=[a.astype(">i8").tobytes() for a in arrays].__getitem__)
    shared = [_shared(arrays[a], arrays[b], min_shared) for a, b in itertools.pairwise(order)]
    trees: list[_Tree] = []
    for number, count in zip(order, [0, *shared], strict=True):
        if count == 0:
            trees.append([])
        trees[-1].append((number, count))
    rows, repeated = _rows([len(a) for a in arrays], trees, max_tokens)
    batch = _laid_out(arrays, rows, repeated).to(device)
    return batch if mask is None else replace(batch, kept=mask.to(device).bool())


def _without_padding(rows: Any, mask: Any, prompts: Any) -> list[Tokens]:
    """Return the sequences of padded rows. They are read from a GPU at once."""
    are_tensors = isinstance(rows, Tensor) and isinstance(mask, Tensor)
    if prompts is not None or not are_tensors or rows.ndim != 2 or rows.shape != mask.shape:
        wanted = "with `mask`, `sequences` and `mask` must be tensors [count, length] of one shape, without `prompts`"
        raise ValueError(f"flexmasks.trees.pack: {wanted}, got {in_message(rows)} and {in_message(mask)}.")
    rows, kept = rows.detach().cpu(), mask.detach().cpu().bool()
    return list(rows[kept].split(kept.sum(1).tolist()))


def _each(name: str, given: Iterable[Tokens]) -> list[Tokens]:
    """Return sequences as a list, which holds them: a generator gives them once, a tensor makes new ones each time."""
    try:
        return list(given)
    except TypeError:
        got = in_message(given)
        raise TypeError(f"flexmasks.trees.pack: `{name}` must be a list of sequences of tokens, got {got}.") from None


def _arrays(sequences: list[Tokens], prompts: list[Tokens] | None) -> list[np.ndarray[Any, Any]]:
    if prompts is not None and len(prompts) != len(sequences):
        wanted = f"one for each of the {len(sequences)} sequences"
        raise ValueError(f"flexmasks.trees.pack: `prompts` must have {wanted}, got {len(prompts)}.")
    arrays = [_array(s) for s in sequences]
    if prompts is not None:
        known: dict[int, np.ndarray[Any, Any]] = {id(p): _array(p) for p in prompts}
        arrays = [np.concatenate([known[id(p)], a]) for p, a in zip(prompts, arrays, strict=True)]
    empty = next((n for n, a in enumerate(arrays) if not len(a)), None)
    if not arrays or empty is not None:
        what = "at least one sequence" if not arrays else f"no empty sequence; number {empty} is"
        raise ValueError(f"flexmasks.trees.pack: `sequences` must have {what}.")
    return arrays


def _array(tokens: Tokens) -> np.ndarray[Any, Any]:
    made = np.empty((), dtype=object)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of torch and NumPy; what is wrong is said below
        made = tokens.detach().cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    if made.ndim != 1 or (made.size and not np.issubdtype(made.dtype, np.integer)):
        got = f"{in_message(tokens)}{f' on {tokens.device}' if isinstance(tokens, Tensor) else ''}"
        raise TypeError(f"flexmasks.trees.pack: a sequence must be integers [length], got {got}.")
    if made.size and not 0 <= int(made.min()) <= int(made.max()) < 1 << 63:
        got = f"tokens from {made.min()} to {made.max()}"
        raise ValueError(f"flexmasks.trees.pack: tokens must be at least 0 and below 2**63, got {got}.")
    return made.astype(np.int64)


def _shared(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], least: int) -> int:
    n = min(len(a), len(b))
    differs = (a[:n] != b[:n]).nonzero()[0]
    count = int(differs[0]) if len(differs) else n
    return count if count >= least else 0


_Tree = list[tuple[int, int]]  # sequences by their numbers, each with how many tokens it shares with the one before it


class _Part:
    """Sequences of a tree that stand in one row."""

    def __init__(self) -> None:
        self.sequences: _Tree = []
        self.size = 0

    def add(self, number: int, shared: int, length: int) -> None:
        self.sequences.append((number, shared))
        self.size += length - shared


_Row = list[_Part]


def _rows(lengths: list[int], trees: list[_Tree], most: int | None) -> tuple[list[_Row], int]:
    """The parts of each row, and how many prefixes are repeated: of two ways the one with fewer tokens in all."""
    ways = [_whole_trees(lengths, trees, most), _one_after_the_other(lengths, itertools.chain(*trees), most)]
    return min(ways, key=lambda way: (len(way[0]) * max(sum(p.size for p in row) for row in way[0]), way[1]))


def _whole_trees(lengths: list[int], trees: list[_Tree], most: int | None) -> tuple[list[_Row], int]:
    """Cut only trees that are larger than a row, and put the largest part first into the first row that has room."""
    parts: list[_Part] = []
    repeated = 0
    for tree in trees:
        cut, count = _one_after_the_other(lengths, tree, most)
        parts += itertools.chain(*cut)
        repeated += count
    if most is None:
        return [parts], 0
    rows: list[_Row] = []
    room: list[int] = []
    for part in sorted(parts, key=lambda p: -p.size):
        row = next((n for n, left in enumerate(room) if left >= part.size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(most)
        rows[row].append(part)
        room[row] -= part.size
    return rows, repeated


def _one_after_the_other(
    lengths: list[int], sequences: Iterable[tuple[int, int]], most: int | None
) -> tuple[list[_Row], int]:
    """Fill each row to the end, and cut the tree there."""
    rows: list[_Row] = [[]]
    room: float = math.inf if most is None else most
    repeated = 0
    for number, count in sequences:
        is_cut = room < lengths[number] - count
        if is_cut:
            rows.append([])
            room = most or 0
            repeated += count > 0
        if count == 0 or is_cut:
            rows[-1].append(_Part())
        rows[-1][-1].add(number, 0 if is_cut else count, lengths[number])
        room -= lengths[number] - (0 if is_cut else count)
    return rows, repeated


def _laid_out(arrays: list[np.ndarray[Any, Any]], rows: list[_Row], repeated: int) -> TreeBatch:
    lengths = [sum(part.size for part in row) for row in rows]
    shape = len(rows), max(lengths)
    tokens, parents, depths, weights = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    parents -= 1
    places: list[Any] = [None] * len(arrays)
    for n, row in enumerate(rows):
        end = 0
        for part in row:
            path = np.zeros(0, dtype=np.int64)
            for number, count in part.sequences:
                array = arrays[number]
                new = np.arange(end, end + len(array) - count)
                path = np.concatenate([path[:count], new])
                tokens[n, new], depths[n, new] = array[count:], np.arange(count, len(array))
                if len(new):
                    parents[n, new] = path[count - 1 : -1] if count else np.concatenate([[-1], path[:-1]])
                weights[n, path] += 1
                places[number] = n, torch.from_numpy(path)
                end += len(new)
    tensors = [torch.from_numpy(x) for x in (tokens, parents, depths, weights)]
    return TreeBatch(tensors[0], tensors[1], tensors[2], tensors[3], lengths, places, repeated)
