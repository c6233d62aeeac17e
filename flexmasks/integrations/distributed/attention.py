"""Attention over a sequence that several processes hold together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, cast, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flexmasks import Mask, Score, get_mask
from flexmasks import attention as attention_of_one
from flexmasks.extend import (
    Band,
    Dropout,
    Kept,
    MaskLike,
    PartOfCall,
    ScoreLike,
    Seed,
    Size,
    as_sharded,
    band_of,
    check_placements,
    constants,
    definition_of,
    dropout_of,
    from_arguments,
    in_message,
    inside,
    is_compiling,
    joined,
    key_of,
    part_of,
    says_all,
    says_what_to_write,
    shared_seed,
    under_autocast,
    users_line,
    whole,
)
from flexmasks.integrations.distributed.balance import Order, forgotten_order
from flexmasks.integrations.distributed.counts import (
    WHERE,
    CountedMask,
    Parts,
    common,
    cut,
    fail,
    following,
    merged,
    seen_through,
    size_of,
)
from flexmasks.integrations.distributed.exchange import (
    arranged,
    compare,
    gathered,
    heads_for_sequence,
    rank_in,
    rearranged,
    received,
    sequence_for_heads,
    submesh,
)

_WAYS = ("auto", "heads", "gather", "seen")
_BLOCK = 128  # queries and keys of a block
# "seen" is taken instead of another way if processes then receive at most this share of what they would receive, and
# instead of "heads", by which all compute as much, if the busiest one computes at most so many times the mean.
_SAVES_MUCH, _NEARLY_EVEN = 0.5, 1.15
_WANTED: Kept[tuple[Parts, ...]] = Kept("seen")  # the keys that processes want
_ROWS_COUNTED = 64  # of a part, of which the others are taken to see as many keys
_PIECE = 200  # bytes that a piece of a part takes in a cache, roughly


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: DeviceMesh | None = None, mask: MaskLike | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, how: str = "auto", order: Order | None = None,
    scale: float | None = None, sink_logits: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Seed = None, return_lse: Literal[False] = False, backend: str = "auto",
    kernel_options: dict[str, Any] | None = None, check: bool = True, **params: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: DeviceMesh | None = None, mask: MaskLike | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None, how: str = "auto", order: Order | None = None,
    scale: float | None = None, sink_logits: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Seed = None, return_lse: Literal[True], backend: str = "auto",
    kernel_options: dict[str, Any] | None = None, check: bool = True, **params: Any,
) -> tuple[Tensor, Tensor]: ...
# fmt: on


@says_what_to_write()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    mask: MaskLike | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    how: str = "auto",
    order: Order | None = None,
    scale: float | None = None,
    sink_logits: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    return_lse: bool = False,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
    check: bool = True,
    **params: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `flexmasks.attention` over a sequence that the processes of a mesh hold together.

    Each process passes its part of the sequence and gets its part of the output, which is what `flexmasks.attention`
    computes of the whole sequence. Mask and score are those of the whole sequence: their positions, heads, tensors and
    parameters. All processes make the call.

    Args:
        q: the process's queries, [B, H, S of the part, D]. Parts may have different lengths, 0 too.
        k, v: its keys [B, Hkv, S of the part, D] and values [B, Hkv, S of the part, Dv]. Or q, k and v are DTensors of
            the whole sequence, sharded alike: over the sequence (`Shard(2)`), perhaps over batch elements and heads.
        mesh: the processes; left out for DTensors. The sequence lies over all its dimensions, at most two, the last one
            the fastest. Inside torch.compile, two dimensions need names.
        mask, score, scale, sink_logits, dropout_p, dropout_seed, return_lse, backend, kernel_options, **params: as in
            `flexmasks.attention`. Tensors are equal on all processes, and so is a seed; without one that of the first
            process counts. `sink_logits` and tensors over heads have all heads. DTensors are taken, too.
        how: what processes exchange.
            "heads": each gets all positions of some heads, and gives its part of the sequence for them. The number of
            key heads must be a multiple of the number of processes along the last dimension of the mesh; along the
            first of two dimensions keys and values are gathered.
            "gather": each gets all keys and values.
            "seen": each gets the keys and values that its queries see, in whole blocks of 128. The mask is planned for
            all processes, which reads its tensors.
            "auto": "heads" if it can be; else "gather". "seen" instead of them if the mask reads no tensors
            and no objects that may change, and processes then receive at most half as much; instead of "heads" only
            for windows whose busiest process then computes at most 1.15 times the mean.
        order: which parts of the sequence each process holds, see `balance`. By default the parts follow each other;
            parts that are all as long as those of an order that `balance` or `shard` made for these processes, and
            that is still held, are refused without it; one part is enough where processes do not compare.
        check: whether processes compare their calls before they exchange anything, by small messages between the hosts:
            shapes, and the reprs of all arguments. Other values of tensors and other code of functions go unnoticed,
            unless processes would exchange other keys; then each computes with its own mask. Without this, and inside
            torch.compile, a different call of some process may hang or give wrong results; there, parts without an
            `order` must have equal lengths, and each `order` compiles anew.

    Returns:
        The output [B, H, S of the part, Dv], or (output, lse [B, H, S of the part]); DTensors sharded as q is, if q is
        one. Gradients of q, k and v are whole. A plain tensor among the parameters, or `sink_logits`, gets the part of
        its gradient that comes from the process's own queries or heads, as all weights of a model do whose sequence is
        sharded; FSDP2 and DistributedDataParallel add them up. A DTensor's gradient is whole.

    Raises:
        ValueError, TypeError: an input does not fit, or processes make different calls; all processes raise. But a
            backend named by hand may refuse the parts of some processes only, and the others then wait.
        RuntimeError: a process has failed, or has not called within the timeout of the process group.

    Source: Jacobs et al., DeepSpeed Ulysses, 2023 ("heads"); Llama Team, The Llama 3 Herd of Models, 2024, 3.3.2
        ("gather").

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from flexmasks.integrations import distributed
        >>> mesh = init_device_mesh("cuda", (8,))  # doctest: +SKIP
        >>> out = distributed.attention(q, k, v, mesh=mesh, mask="causal")  # doctest: +SKIP
    """
    has_order, like, is_traced = order is not None, q if isinstance(q, DTensor) else None, is_compiling()
    if like is not None:
        check_placements(q, k, v)
    mesh = _mesh_of(q, mesh, is_traced)
    options: dict[str, Any] = {"scale": scale, "backend": backend, "kernel_options": kernel_options}
    options["return_lse"] = return_lse
    if mesh is None:  # only batch elements or heads are sharded
        options |= {"mask": mask, "score": score, "sink_logits": sink_logits, **params}
        options |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
        return cast(Tensor, attention_of_one(q, k, v, **options))
    q_part, k_part, v_part = q, k, v
    if like is not None:
        order = order or _order_of(q.shape[2], mesh, is_traced)
        q_part, k_part, v_part = (cast(DTensor, x).to_local() for x in (q, k, v))
    problem: Exception | None = None
    call: _Call | None = None
    advice = ""
    try:
        of_mask, of_score, sinks = (whole(x, like) for x in (*from_arguments(mask, score, params), sink_logits))
        _check_shapes(q_part, k_part, v_part)
        place = PartOfCall(*q_part.shape[:2]) if like is None else users_line(like)
        dropout = dropout_of(dropout_p, dropout_seed, f"{WHERE}.attention")
        call = _Call(mesh, place, of_mask, of_score, sinks, how, order, is_traced, dropout)
        _check(call, q_part, k_part)
        advice = "" if has_order else forgotten_order(mesh, rank_in(mesh), q_part.shape[2])
    except (ValueError, TypeError) as error:
        problem = error
    compared = _Compared([], True, False)
    if check and not is_traced:
        checked = None if problem else call
        compared = _compare(q_part, k_part, v_part, mesh, checked, options, bool(advice))
    if problem is not None:
        raise problem
    if advice and compared.are_forgotten:
        _fail(advice)
    lengths = compared.lengths or [q_part.shape[2]] * mesh.size()
    parts = following(lengths) if order is None else constants(order.parts) if is_traced else order.parts
    with under_autocast(q_part, k_part, v_part) as cast_parts:  # processes exchange what the kernel takes
        call = cast(_Call, call)._replace(parts=parts)
        if call.dropout is not None:
            seed = shared_seed(call.dropout.seed, mesh if like is None else like.device_mesh)
            call = call._replace(dropout=call.dropout._replace(seed=seed))
        run = _run if call.dropout is None else _run_with_dropout
        out, lse = run(*cast_parts, call, options, compared.may_want_others)
    if like is not None:
        out = as_sharded(out, like, (*q.shape[:3], v.shape[3]))
        lse = None if lse is None else as_sharded(lse, like, q.shape[:3])
    return out if lse is None else (out, lse)


class _Call(NamedTuple):
    mesh: DeviceMesh
    place: PartOfCall
    mask: Mask | None
    score: Score | None
    sinks: Tensor | None
    how: str
    order: Order | None
    is_traced: bool  # by torch.compile
    dropout: Dropout | None
    parts: tuple[Parts, ...] = ()  # of all processes

    @property
    def length(self) -> int:
        return sum(map(size_of, self.parts))


def _fail(message: str, error: type[Exception] = ValueError) -> NoReturn:
    fail("attention", message, error)


# --- checks ---


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4 or x.is_nested:
            _fail(f"`{name}` must be a tensor [batch, heads, tokens, head size], got {in_message(x)}.")
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        _fail(f"a process needs as many keys as queries, got {q.shape[2]}, {k.shape[2]} and {v.shape[2]} of q, k, v.")
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or not k.shape[1] or q.shape[1] % k.shape[1]:
        _fail(f"the shapes of q, k and v do not fit: {list(q.shape)}, {list(k.shape)}, {list(v.shape)}.")


def _check(call: _Call, q: Tensor, k: Tensor) -> None:
    """Raise ValueError if arguments do not fit the processes or the heads of q and k."""
    mesh, order, sinks, heads = call.mesh, call.order, call.sinks, call.place.heads
    if call.how not in _WAYS:
        _fail(f"`how` must be one of {', '.join(map(repr, _WAYS))}, got {call.how!r}.")
    last = mesh.shape[-1]
    if call.how == "heads" and k.shape[1] % last:
        _fail(
            f'how="heads" gives each of {last} processes as many of the {k.shape[1]} heads of k, which cannot be; use '
            '"gather", or a mesh of two dimensions whose last one divides the number of heads.'
        )
    if order is not None:
        if not isinstance(order, Order) or order.ranks != mesh.size():
            _fail(f"`order` must be an Order of the {mesh.size()} processes of the mesh, got {order!r}.")
        rank = rank_in(mesh)
        if q.shape[2] != order.sizes[rank]:
            _fail(f"by `order` this process has {order.sizes[rank]} tokens, but q has {q.shape[2]}.")
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != (heads,)):
        _fail(f"`sink_logits` must be a tensor [{heads}], one for each head, got {in_message(sinks)}.")


class _Compared(NamedTuple):
    """What the calls of all processes say."""

    lengths: list[int]  # of their parts
    are_forgotten: bool  # whether all may have forgotten an order
    may_want_others: bool  # whether a mask reads what processes did not compare, and decides what they exchange


def _compare(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, call: _Call | None, options: dict[str, Any], is_forgotten: bool
) -> _Compared:
    """Compare shapes and reprs of what processes call with; without `call` this process has failed.

    Raises ValueError unless all processes make the same call.
    """
    own = q.shape[2] if isinstance(q, Tensor) and q.ndim == 4 else 0
    arguments: dict[str, Any] = dict.fromkeys(
        ("q, k, v", "mask", "score", "sink_logits", "how", "order", "dropout_p", "dropout_seed", *options)
    )
    may_want_others = False
    if call is not None:
        learns = torch.is_grad_enabled()
        shapes = [(*x.shape[:2], x.shape[3], x.dtype, learns and x.requires_grad) for x in (q, k, v)]
        arguments |= {"q, k, v": (*shapes, call.place.batch, call.place.heads), "mask": call.mask, "score": call.score}
        arguments |= {"sink_logits": call.sinks is not None, "how": call.how, "order": call.order, **options}
        if call.dropout is not None:
            p, seed = call.dropout
            arguments |= {"dropout_p": p, "dropout_seed": seed if isinstance(seed, int) else type(seed)}
        may_want_others = call.how in ("auto", "seen") and call.mask is not None and not says_all(call.mask)
    texts = {name: repr(value) for name, value in arguments.items()}
    states = compare("attention", mesh, 4 * own + 2 * may_want_others + is_forgotten, texts, call is None)
    return _Compared([s >> 2 for s in states], all(s & 1 for s in states), any(s & 2 for s in states))


# --- places ---


def _mesh_of(q: Tensor, mesh: DeviceMesh | None, is_traced: bool) -> DeviceMesh | None:
    """The mesh of the processes that hold the sequence together, or None if each has it whole."""
    if isinstance(q, DTensor):
        if mesh is not None and mesh != q.device_mesh:
            _fail("`mesh` must be left out for DTensors, which have their own.")
        mesh, dims = q.device_mesh, [dim for dim, placement in enumerate(q.placements) if placement.is_shard(2)]
        if not dims:
            return None
        if len(dims) == 1:
            mesh = submesh(mesh, dims[0], is_traced)
        elif len(dims) < mesh.ndim:
            if mesh.mesh_dim_names is None:
                _fail("a mesh whose sequence lies over some of its dimensions needs `mesh_dim_names`.")
            mesh = mesh[tuple(mesh.mesh_dim_names[dim] for dim in dims)]
    elif mesh is None:
        _fail("pass `mesh`, the processes that hold the sequence, or DTensors.", TypeError)
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2 or mesh.get_coordinate() is None:
        _fail(f"`mesh` must be a DeviceMesh of one or two dimensions that holds this process, got {mesh!r}.")
    return mesh


def _order_of(length: int, mesh: DeviceMesh, is_traced: bool) -> Order | None:
    """The parts of a DTensor that is sharded over a whole mesh; inside torch.compile None for equal parts, so that the
    length may be symbolic.
    """
    if is_traced:
        if length % mesh.size() == 0:
            return None
        length = int(constants(length))
    parts = [(0, length)]
    for dim in range(len(mesh.shape)):
        parts = [piece for part in parts for piece in cut(*part, mesh.size(dim))]
    return Order(length, tuple((part,) for part in parts))


# --- the call ---


def _run(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, options: dict[str, Any], may_want_others: bool
) -> tuple[Tensor, Tensor | None]:
    dtypes = [x.dtype for x in (q, k, v)]
    if len(set(dtypes)) > 1:
        _fail(f"q, k and v must have one dtype, got {', '.join(map(str, dtypes))}.", TypeError)
    mesh, parts, place = call.mesh, call.parts, call.place
    last = submesh(mesh, len(mesh.shape) - 1, call.is_traced)
    row = rank_in(mesh) // last.size()  # processes that exchange heads hold neighboring parts
    rows = [parts[i : i + last.size()] for i in range(0, mesh.size(), last.size())]
    way, wanted = _compared_way(q, k, v, call) if may_want_others else _way(q, k, v, call)
    lengths = [size_of(part) for part in rows[row]]
    own: Parts = parts[rank_in(mesh)]
    if way == "heads":
        q, k, v = heads_for_sequence((q, k, v), last, lengths, call.is_traced)
        place = place._replace(first_head=place.first_head + last.get_local_rank() * q.shape[1])
        own = sum(rows[row], ())
    elif way == "gather":
        k, v = (gathered(x, last, lengths) for x in (k, v))
    if way == "seen":
        k, v = received((k, v), mesh, parts, wanted)
        keys = wanted[rank_in(mesh)]
    else:
        if mesh.ndim == 2:
            of_rows = [size_of(sum(r, ())) for r in rows]
            k, v = (gathered(x, submesh(mesh, 0, call.is_traced), of_rows) for x in (k, v))
        keys = sum(parts, ())
    k, v = (arranged(x, keys) for x in (k, v))
    call = call._replace(place=place)
    results = _attend(arranged(q, own), k, v, own, merged(keys), call, options)
    results = joined(results, [q, k, v, call.mask, call.score, call.sinks])
    out, *lse = [rearranged(x, own) for x in results]
    if way == "heads":
        out = sequence_for_heads(out, last, lengths, call.is_traced)
        lse = [sequence_for_heads(x[..., None], last, lengths, call.is_traced)[..., 0] for x in lse]
    return out, lse[0] if lse else None


def _run_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, options: dict[str, Any], may_want_others: bool
) -> tuple[Tensor, Tensor | None]:
    dropout = cast(Dropout, call.dropout)
    kept = dropout.kept((call.place.batch, call.place.heads, call.length), call.length, q.device)
    score = kept if call.score is None else from_arguments(None, [call.score, kept], {})[1]
    with_lse = options | {"return_lse": True}
    out, of_kept = _run(q, k, v, call._replace(score=score, sinks=None), with_lse, may_want_others)
    _, lse = _run(q, k, v.detach(), call, with_lse, may_want_others)
    out = dropout.rescaled(out, cast(Tensor, of_kept), cast(Tensor, lse))
    return out, lse if options["return_lse"] else None


def _compared_way(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[str, tuple[Parts, ...]]:
    """Return `_way`; raise ValueError if it fails on some process, or if processes would wait for different tensors."""
    problem: Exception | None = None
    found: tuple[str, tuple[Parts, ...]] = "", ()
    try:
        found = _way(q, k, v, call)
    except Exception as error:  # of the mask's function, too
        problem = error
    text = f"{call.mask!r}, by which they exchange {found}"
    compare("attention", call.mesh, 0, {"mask": text}, problem is not None)
    if problem is not None:
        raise problem
    return found


def _way(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[str, tuple[Parts, ...]]:
    """The way, "heads", "gather" or "seen", and for "seen" the keys that each process wants."""
    how, mesh, parts = call.how, call.mesh, call.parts
    if how == "seen":
        if mesh.ndim == 2:
            _fail('how="seen" needs a mesh of one dimension.')
        if call.is_traced:
            _fail('how="seen" plans the mask on the host, which torch.compile cannot trace; use "gather" or "heads".')
        return how, _wanted(call)
    if how != "auto":
        return how, ()
    last = mesh.shape[-1]
    other = "gather" if k.shape[1] % last else "heads"
    if mesh.ndim == 2 or call.is_traced:
        return other, ()
    band = _distances(call, q)
    if band is None:  # then blocks are counted only where that saves most and is done once
        key, tensors = (None, []) if other == "heads" else key_of(cast(Mask, call.mask))
        if key is None or tensors:
            return other, ()
    elif other == "heads" and _unevenness(band, call.parts, call.length) > _NEARLY_EVEN:
        return other, ()
    wanted = _wanted(call)
    kv = k.shape[1] * (k.shape[3] + v.shape[3])
    most = max(size_of(w) - size_of(common(w, own)) for w, own in zip(wanted, parts, strict=True)) * kv
    share = (mesh.size() - 1) / mesh.size() * call.length
    everything = share * (kv + q.shape[1] * (q.shape[3] + v.shape[3])) / last if other == "heads" else share * kv
    return ("seen", wanted) if most <= _SAVES_MUCH * everything else (other, ())


@functools.lru_cache(maxsize=64)
def _unevenness(band: Band, parts: tuple[Parts, ...], length: int) -> float:
    """The pairs of a query and a key that the busiest process computes of its own queries, over the mean."""
    pairs = [0] * len(parts)
    for rank, own in enumerate(parts):
        for start, stop in own:
            step = max(1, (stop - start) // _ROWS_COUNTED)
            for row in range(start, stop, step):
                first, end = seen_through(band, (row, row + 1), length)
                pairs[rank] += (end - first) * min(step, stop - row)
    return max(pairs) * len(pairs) / max(sum(pairs), 1)


def _wanted(call: _Call) -> tuple[Parts, ...]:
    """The keys that each process's queries see."""
    if not call.length:
        return call.parts
    mask = get_mask("full") if call.mask is None else call.mask
    sizes = call.length, _BLOCK, call.place.batch, call.place.heads
    of_mask, tensors = key_of(mask)

    def count() -> tuple[Parts, ...]:
        return tuple(CountedMask("attention", mask, *sizes).seen(call.parts))

    if of_mask is None:
        return count()
    return _WANTED.made((of_mask, *sizes, call.parts), tensors, count, lambda wanted: _PIECE * sum(map(len, wanted)))


def _distances(call: _Call, q: Tensor) -> Band | None:
    if call.mask is None:
        return Band()
    if any(isinstance(x, Tensor) for value in inside(call.mask) for x in value.params.values()):
        return None
    band = band_of(call.mask, Size(*call.place[:2], call.length, call.length, q.device))
    return None if band is None or band.sequences is not None else band


def _attend(
    q: Tensor, k: Tensor, v: Tensor, own: Parts, keys: Parts, call: _Call, options: dict[str, Any]
) -> list[Tensor]:
    """The output of a process's queries, and lse if it is wanted.

    q: the queries at the positions `own`, in their natural order.
    keys: the positions of k and v, ascending.
    """
    band, sinks = _distances(call, q), call.place.sinks_of(call.sinks, q.shape[1])
    takes_all_keys = call.is_traced and call.score is not None
    results, at, parts = [], 0, merged(own) or ((0, 0),)
    for start, stop in parts:
        rows = q if len(parts) == 1 else q.narrow(2, at, stop - start)  # a slice's gradient would be copied
        at += stop - start
        of_rows, k_rows, v_rows = _keys_of(band, start, stop, keys, takes_all_keys), k, v
        if of_rows != keys:
            first = of_rows[0][0] - keys[0][0]
            k_rows, v_rows = (x.narrow(2, first, size_of(of_rows)) for x in (k, v))
        mask, score, offset = _local(call, q, start, of_rows, is_band=band is not None)
        arguments = {"mask": mask, "score": score, "q_offset": offset, "sink_logits": sinks, **options}
        result = attention_of_one(rows, k_rows, v_rows, **arguments)
        results.append((result,) if isinstance(result, Tensor) else result)
    return list(results[0]) if len(results) == 1 else [torch.cat(parts, 2) for parts in zip(*results, strict=True)]


def _keys_of(band: Band | None, start: int, stop: int, keys: Parts, all_of_them: bool) -> Parts:
    """The keys that rows are computed with: for windows only those that the rows may see.

    all_of_them: inside torch.compile with a score change, which would have the positions of some keys as constants.
    """
    if band is None or len(keys) != 1 or keys[0][0] > start or all_of_them:
        return keys
    first, end = seen_through(band, (start, stop), keys[0][1])
    first = min(max(first, keys[0][0]), start)
    return ((first, max(first, end)),)


def _local(call: _Call, q: Tensor, start: int, keys: Parts, is_band: bool) -> tuple[Mask | None, Score | None, int]:
    """Mask, score and `q_offset` of a call with rows from `start` on and some keys."""
    place, has_all_keys = call.place, keys == ((0, call.length),)
    length = None if has_all_keys else call.length  # torch.compile compiles for one length if it is a parameter
    first = keys[0][0] if len(keys) == 1 else 0
    if len(keys) == 1 and first <= start:
        part, offset = place._replace(length=length, first_position=first), start - first
    else:
        part, offset = place._replace(length=length, key_positions=_positions(keys, q.device)), start
    is_whole = place.has_all(q) and has_all_keys
    mask, score = call.mask, call.score
    if mask is not None and not (is_band and part.key_positions is None) and not (is_whole and not _prepares(mask)):
        mask = part_of(mask, part)
    if score is not None and not (is_whole and not _prepares(score)):
        score = part_of(score, part)
    return mask, score, offset


@functools.lru_cache(maxsize=8)
def _positions(keys: Parts, device: torch.device) -> Tensor:
    """The positions of keys, always the same tensor, by which calls find each other's plans."""
    return torch.cat([torch.arange(start, stop) for start, stop in keys] or [torch.arange(0)]).to(device)


def _prepares(value: Mask | Score) -> bool:
    """Whether a mask or score makes tensors for the lengths of a call."""
    definitions = [definition_of(inner) for inner in inside(value)]
    return any(d.prepare is not None or d.inner_size is not None for d in definitions)
