"""Small mistakes that `tests/planted.py` plants into the library, grouped by room."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one place in the source.

    file: a path in the folder of the package.
    old, new: the text, which occurs once in the file, and what takes its place.
    tests: files or node ids of tests that are tried first: those of a place that hundreds of tests run, and those that
        run it unseen by coverage, as kernels by Triton's interpreter, code that torch.compile traces, or code in
        started processes.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


_SOFTMAX = ("tests/calls/test_softmax.py::test_kernels_by_the_interpreter",)
_FEW_QUERIES = ("tests/engine/test_few_queries.py::test_kernels_by_the_interpreter",)
_SINKS = ("tests/engine/test_sinks.py::test_kernels_by_the_interpreter",)
_WHOLE_MASK = ("tests/engine/test_whole_mask.py::test_by_the_interpreter",)
_COMPILED = ("tests/calls/test_inside_compile.py",)
_SOFTMAX_IN_TRANSFORMS = ("tests/calls/test_softmax_transforms.py",)
_DISTRIBUTED = ("tests/world/test_distributed.py",)
_EXCHANGED = ("tests/world/test_distributed_exchange.py", "tests/world/test_distributed.py")
_HELD = ("tests/engine/test_plan_held.py",)
_UPDATES = ("tests/engine/test_plan_updates.py",)
_INVARIANT = ("tests/engine/test_invariant_on_cpu.py",)
_CHECK = ("tests/calls/test_check.py",)
_PLACED = ("tests/calls/test_inside_compile.py::test_scores_see_where_queries_start",)
_DEVICES = ("tests/engine/test_devices.py",)
_FITS = ("tests/engine/test_whole_mask.py::test_tiles_fit_a_small_gpu",)

FAULTS: list[Fault] = [
    # --- intervals of keys that each query sees ---
    Fault("ranges/intervals.py", "starts.shape[-1] > MOST:", "starts.shape[-1] > MOST + 99:"),
    Fault(
        "ranges/intervals.py",
        "known = (low == high).all(-1, keepdim=True) & (wanted == upper)",
        "known = wanted == upper",
    ),
    Fault(
        "ranges/intervals.py", "are_two | (last - start == stop - first)", "are_two | (last - start >= stop - first)"
    ),
    Fault("ranges/intervals.py", "(a.known & b.known) | _is_empty(a)", "(a.known & b.known) | a.known"),
    Fault(
        "backends/cudnn.py",
        "ctx.in_order = plan, scale, torch.are_deterministic_algorithms_enabled()",
        "ctx.in_order = plan, scale, False",
    ),
    Fault("backends/cudnn.py", " and computed.uneven <= _MOST_UNEVEN", ""),
    Fault("backends/cudnn.py", "lse.masked_fill(form.hidden, -torch.inf)", "lse"),
    # --- masks compared ---
    Fault("blocks/difference.py", "(a.certain & ~b.possible) * pairs", "(a.possible & ~b.possible) * pairs"),
    Fault("blocks/difference.py", "possible & found.possible", "found.certain"),
    Fault("blocks/difference.py", "(self._lengths - at[:, 2:]).clamp(0, side)", "(self._lengths - at[:, 2:]).clamp(0)"),
    Fault("blocks/difference.py", " & exists).flatten(2)", ").flatten(2)"),
    Fault("blocks/difference.py", "differing[int(place.argmin())]", "differing[0]"),
    Fault("blocks/difference.py", "(batch // of_batch) * (heads // of_heads)", "batch // of_batch"),
    Fault("asking/compare.py", "            if first is not None:", "            if only_a:"),
    Fault("asking/picture.py", "torch.where(only_a & only_b, _EITHER, kinds)", "kinds"),
    # --- formulas: proofs of what is false, and differences that are not the smallest ---
    Fault("asking/formulas.py", "self._z3.If(y > 0, x / y, (-x) / (-y))", "x / y"),
    Fault("asking/formulas.py", "(x if divisor > 0 else x.neg())", "x"),
    Fault("asking/formulas.py", '"or_" if operation == "add" else "and_"', "operation"),
    Fault("asking/formulas.py", "one[-1] <= other[-1]), x <= y", "one[-1] <= other[-1]), x == y"),
    Fault("asking/formulas.py", "            if solver.check(mistake) != z3.unsat:", "            if False:"),
    Fault("asking/formulas.py", "least = middle + 1", "least = value(term)"),
    Fault("asking/formulas.py", "found = within - found.eliminate", "found = found - found.eliminate"),
    Fault("asking/proofs.py", "pairs += [self._specified(name, tensor) for name in names]", "pairs += [(None, None)]"),
    Fault(
        "asking/proofs.py",
        "box.are_implied(one, other), box.are_implied(other, one)",
        "box.are_implied(one, other), None",
    ),
    # --- pieces of blocks ---
    Fault("blocks/pieces.py", "later > self._starts, later, ends) - 1", "later > self._starts, later, ends) - 2"),
    Fault("blocks/pieces.py", "number = number + 1", "number = number + 2"),
    Fault("blocks/pieces.py", "(cut.unit, cut.shift) == (1, 0)", "cut.unit == 1"),
    Fault("blocks/pieces.py", "self._counts = in_block + 1", "self._counts = in_block.clamp(max=9)"),
    Fault("blocks/pieces.py", "        line = self._line(b)\n", "        line = 0 * b\n"),
    Fault("blocks/undecided.py", "certain.all(1) | ~possible.any(1)", "certain.all(1) | ~possible.all(1)"),
    Fault(
        "blocks/pieces.py",
        "cut.of_batch and batch > 1",
        "batch > 1",
        ("tests/engine/test_blocks.py::test_pieces_of_tables_that_heads_read",),
    ),
    Fault("blocks/undecided.py", "        still &= some <= every", "        still &= some == every"),
    # --- ranges: bounds that are too narrow, so that visible blocks are empty or partial blocks are full ---
    Fault("ranges/arithmetic.py", "lo = x.lo - y.hi\n", "lo = x.lo - y.lo\n"),
    Fault("ranges/arithmetic.py", "torch.maximum(x.hi, -x.lo)\n    if", "torch.maximum(x.hi, x.lo)\n    if"),
    Fault(
        "ranges/arithmetic.py",
        "    if dtype.is_floating_point:\n"
        "        lo, hi = any_value_where(is_inexact(x, y), lo, hi)  # 0 * inf is NaN\n",
        "",
    ),
    Fault("ranges/arithmetic.py", "b % steps.size == 0 and steps.first % steps.size == 0", "b % steps.size == 0"),
    Fault(
        "ranges/arithmetic.py",
        "return any_value_where(_may_be_zero(y) | is_inexact(x, y), lo, hi)",
        "return any_value_where(is_inexact(x, y), lo, hi)",
    ),
    Fault("ranges/arithmetic.py", " & (first == last)", ""),
    Fault("ranges/arithmetic.py", "may_be_nan(x) | (x.lo < least), operation", "may_be_nan(x), operation"),
    Fault("ranges/bits.py", "b & (b + 1) == 0, -b", "b & (b - 1) == 0, -b"),
    Fault("ranges/bits.py", "torch.where(_have_same_sign(x, y), smaller, mixed)", "smaller"),
    Fault(
        "ranges/bits.py",
        "torch.where(_have_same_sign(x, y), 0.0, -1 - all_bits)",
        "torch.where(_have_same_sign(x, y), 0.0, -all_bits)",
    ),
    Fault("ranges/selection.py", "torch.minimum(x.lo, y.lo), y.lo", "torch.maximum(x.lo, y.lo), y.lo"),
    Fault("ranges/selection.py", '_NEGATED = {"<": ">=",', '_NEGATED = {"<": ">",'),
    Fault("ranges/value.py", "return self.shape[0] if", "return self.shape[1] if", ("tests/engine/test_ranges.py",)),
    Fault("ranges/truth.py", 'x.lo <= y.hi, "<="', 'x.lo < y.hi, "<="'),
    Fault("ranges/truth.py", "lambda x, y: (x.lo & ~y.hi)", "lambda x, y: (x.lo & ~y.lo)"),
    Fault(
        "ranges/truth.py",
        "certain(_without_nan(x), _without_nan(y))",
        "certain(x, y)",
        ("tests/engine/test_ranges.py::test_operations_on_numbers_of_both_signs_are_sound",),
    ),
    Fault(
        "ranges/reach.py",
        "last - (1 << level) + 1)",
        "last - (1 << level))",
        ("tests/engine/test_ranges.py::test_long_reaches_have_the_same_ends",),
    ),
    Fault("ranges/reach.py", "values.narrow(d, n - rest, rest)", "values.narrow(d, 0, rest)"),
    Fault(
        "ranges/lookup.py",
        'right=right or side == "right"',
        "right=right",
        ("tests/engine/test_ranges.py::test_ranges_are_tight",),
    ),
    Fault("ranges/reductions.py", "a.shape[dim] - 1.0", "a.shape[dim] - 2.0"),
    Fault("ranges/conversion.py", "x.lo.trunc(), x.hi.trunc()", "x.lo.floor(), x.hi.floor()"),
    # --- blocks ---
    Fault("blocks/decide.py", "decided.certain.shape[0], decided.certain.shape[1]", "decided.certain.shape[0], 1"),
    Fault("blocks/build.py", "    if columns.length % columns.block_size:\n        full[..., -1] = False\n", ""),
    Fault(
        "blocks/undecided.py",
        "all_visible = decided.possible.clone(memory_format=torch.contiguous_format)",
        "all_visible = decided.certain.clone(memory_format=torch.contiguous_format)",
    ),
    Fault("blocks/build.py", "(b, h, part, kv), 4))", "(b, h, q[: len(part)], kv), 4))"),
    Fault("blocks/lists.py", "first_place[kind] + (runs.line", "(runs.line"),
    Fault("blocks/lists.py", "[:, None] >= first_line[1:]", "[:, None] > first_line[1:]"),
    Fault(
        "blocks/lists.py",
        "flat.numel() % 8 or flat.numel() <",
        "flat.numel() <",
        ("tests/engine/test_blocks.py::test_places_are_found_one_by_one_or_eight_at_a_time",),
    ),
    Fault(
        "blocks/lists.py",
        "(0, width - indices.shape[-1])",
        "(width - indices.shape[-1], 0)",
        ("tests/engine/test_blocks.py::test_narrow_lists_are_widened_for_kernels_on_a_cpu",),
    ),
    Fault("blocks/counts.py", "keys = min(_TILE, self._block_size[1])", "keys = self._block_size[1]"),
    Fault("blocks/counts.py", "zip(lists[::2], lists[1::2], strict=True)", "zip(lists[:4:2], lists[1:4:2])"),
    Fault("blocks/counts.py", "        visible = visible & (kv < kv_len)[:, None, :]\n", ""),
    Fault(
        "blocks/undecided.py",
        "offsets.clamp(max=axis.block_size - 1)",
        "offsets",
        ("tests/engine/test_blocks.py::test_edges_of_blocks",),
    ),
    Fault("blocks/undecided.py", "(parts[is_first], parts[~is_first])", "(parts[is_first],)"),
    Fault("blocks/strips.py", "decide(moved(mask_mod, start, 0), batch", "decide(mask_mod, batch"),
    Fault("blocks/strips.py", "[(runs[0][0], runs[-1][1])]", "[(runs[0][0], runs[-1][0])]"),
    Fault(
        "blocks/bits.py",
        "rows.block_size == 0 and columns",
        "rows.block_size == 0 or columns",
        ("tests/engine/test_blocks.py::test_bits_past_the_edges_are_hidden",),
    ),
    Fault(
        "blocks/bits.py",
        "        if len(undecided):\n"
        "            number = torch.where(undecided[number] == among, number, len(undecided))\n",
        "",
    ),
    Fault(
        "blocks/limits.py", "return min(free)", "return max(free)", ("tests/calls/test_errors.py::test_free_memory",)
    ),
    Fault(
        "blocks/elements.py",
        "x.clone().to(self.device) for x",
        "x.to(self.device) for x",
        ("tests/engine/test_blocks.py::test_in_place_changes_of_the_batch_index_stay_inside",),
    ),
    # --- spec ---
    Fault("spec/structure.py", "else (key, *states)", "else key"),
    Fault(
        "spec/values.py",
        "or known[0] != state:",
        "or known[1] != state:",
        ("tests/masks/test_values.py::test_a_mask_called_by_itself_is_prepared_once_until_its_tensors_change",),
    ),
    Fault(
        "spec/parameters.py", "a.dtype == b.dtype and a.shape", "a.shape", ("tests/masks/test_values.py::test_unequal",)
    ),
    Fault(
        "spec/values.py",
        "value.dtype in (torch.float16, torch.bfloat16)",
        "value.dtype == torch.float16",
        ("tests/masks/test_scores.py::test_parameters_in_half_precision_change_scores_in_float32",),
    ),
    Fault(
        "spec/values.py",
        'inner_size is not None and dimension != "H"',
        "inner_size is not None",
        ("tests/masks/test_values.py::test_values_inside_sequences_imply_heads_alone",),
    ),
    Fault("spec/values.py", "self.params.keys() == other.params.keys()", "self.params.keys() <= other.params.keys()"),
    Fault("spec/values.py", "for m in self._inside() for v in m.params", "for m in [self] for v in m.params"),
    Fault("spec/parameters.py", "return max(self.positions_of_q, self.kv_len)", "return self.positions_of_q"),
    Fault("spec/parameters.py", "high is None or n <= high", "high is None or n < high"),
    Fault("spec/parameters.py", " and len(alternative.dims) == len(shape) and dimension", " and dimension"),
    Fault(
        "spec/parameters.py",
        "    if isinstance(value, bool):\n        return False\n    return isinstance(value, int",
        "    return isinstance(value, int",
    ),
    Fault("spec/bands.py", "left=min(lefts, default=None)", "left=max(lefts, default=None)"),
    Fault("spec/bands.py", " or (with_sequences and with_sequences[0].has_other_keys and (lefts or rights))", ""),
    Fault(
        "spec/bands.py",
        "kv_offsets is None and isinstance(q_start, int) and q_start == 0",
        "kv_offsets is None",
    ),
    Fault("spec/bands.py", "starts // length * (heads - 1)", "starts // length * heads"),
    Fault("spec/bands.py", "starts.sum() > batch * most", "starts.sum() > batch * most + 1"),
    Fault("backends/fa4_functions.py", "torch.where(counts[place] < 0, torch.nan, value)", "value"),
    Fault("masks/document.py", "if contiguous and may_read(size, document_ids):", "if False:"),
    Fault(
        "spec/parts.py",
        "inner(*score, _shifted(b, first_batch), _shifted(h, first_head)",
        "inner(*score, _shifted(b, first_batch), h",
        ("tests/engine/test_parts.py::test_a_part_is_a_slice_of_the_whole", *_DISTRIBUTED),
    ),
    Fault(
        "spec/parts.py",
        "q_len=q_len, q_offset=positions - q_len",
        "q_len=q_len, q_offset=0",
        ("tests/calls/test_mixed.py::test_every_mask",),
    ),
    Fault(
        "spec/structure.py",
        "return self._number(value, place, value > 0)",
        "return self._number(value, place, True)",
        ("tests/engine/test_structure.py::test_the_kind_and_the_sign_of_a_number_belong_to_the_code",),
    ),
    Fault("spec/inside.py", "inside = used & (page_table >= 0)", "inside = (page_table >= 0)"),
    Fault(
        "spec/inside.py",
        "if max(q_len, kv_len) > max_length:",
        "if q_len > max_length:",
        ("tests/masks/test_layouts.py::test_tables_inside_sequences_may_have_any_length_up_to_the_bound",),
    ),
    Fault("spec/indexing.py", "count < size.positions_of_q:", "count < size.q_len:"),
    Fault(
        "spec/structure.py",
        "return (kind, repr(value)), lambda",
        "return (kind, value), lambda",
        ("tests/engine/test_structure.py::test_keys_are_equal_where_code_and_constants_are",),
    ),
    # --- plans ---
    Fault("plans/windows.py", "offset + right >= stop - 1", "offset + right >= stop - 2"),
    Fault(
        "plans/mask_plan.py",
        "        if counts[0] < 0:\n",
        "        if False:\n",
        ("tests/masks/test_windows.py::test_documents_that_lie_end_to_end",),
    ),
    Fault(
        "plans/mask_plan.py",
        "        if abs(counts[0]) > room:\n",
        "        if False:\n",
        ("tests/masks/test_windows.py::test_more_documents_than_there_was_room_for",),
    ),
    Fault(
        "plans/mask_plan.py",
        "rows = partial.numel() * height / BLOCK_SIZE[0]",
        "rows = partial.numel()",
        ("tests/engine/test_mask_plan.py::test_the_blocks_that_are_computed",),
    ),
    Fault("plans/windows.py", "Window(left, right, offset - first,", "Window(left, right, offset,"),
    Fault("plans/sizes.py", "(lengths - q_len).clamp(min=0)", "lengths - q_len"),
    Fault("plans/rows.py", "return definition, x.shape, x.device,", "return definition, x.device,"),
    Fault(
        "plans/rows.py",
        "torch.where(seen, column + 1, 0).amax(-1)",
        "torch.where(seen, column, 0).amax(-1)",
        _SOFTMAX_IN_TRANSFORMS,
    ),
    Fault("plans/lengths.py", "            implied = len(q_offset)\n", "            implied = 1\n"),
    Fault(
        "plans/checks.py",
        '    if k.shape[2] != v.shape[2]:\n        wrong("k and v must have the same length")\n',
        "",
    ),
    Fault("plans/checks.py", "(kv_lens > 0) & (kv_lens < counts)", "kv_lens < counts"),
    Fault("plans/checks.py", " and made_for[1] in (1, size.heads)", ""),
    Fault("plans/mixed.py", "torch.full((total,), int(given.offsets[-1]),", "torch.full((total,), 0,"),
    Fault(
        "plans/mixed.py", "torch.searchsorted(ends, piece, right=True)", "torch.searchsorted(ends, piece)", _COMPILED
    ),
    Fault(
        "plans/plan.py",
        "self.lifted, torch.get_default_dtype(), *more_key)\n        prepared",
        "self.lifted, *more_key)\n        prepared",
        ("tests/engine/test_cache.py::test_plans_of_another_default_dtype_are_others",),
    ),
    Fault("plans/plan.py", "layouts, places, *more_key", "layouts, *more_key"),
    Fault(
        "plans/bounds.py",
        " or bands[0].has_other_keys or size.q_len != size.kv_len:",
        ":",
        ("tests/masks/test_layouts.py::test_windows_in_sequences_of_later_queries",),
    ),
    Fault(
        "plans/data.py",
        "number[torch.cat(numbers)]",
        "number",
        ("tests/engine/test_data.py::test_blocks_that_are_read_in_several_parts",),
    ),
    # --- masks and scores ---
    Fault(
        "masks/bigbird.py",
        "else (min(global_blocks, blocks), 0)",
        "else (0, min(global_blocks, blocks))",
        ("tests/masks/test_masks.py::test_global_blocks_of_bigbird",),
    ),
    Fault("masks/block_sparse.py", "have[0] < need[0] or have[1] < need[1]", "have[0] < need[0] and have[1] < need[1]"),
    Fault("masks/dilated.py", "kv % stride >= stride - summary", "kv % stride > stride - summary"),
    Fault("masks/tree.py", "while 2 ** len(ancestors) < count:", "while 2 ** len(ancestors) < count // 2:"),
    Fault(
        "masks/spans.py",
        "torch.promote_types(document_ids.dtype, prefix_of.dtype)",
        "prefix_of.dtype",
        ("tests/masks/test_masks.py::test_more_documents_than_small_whole_numbers",),
    ),
    Fault("masks/vertical_slash.py", "torch.where(index > rest, rest, index).int()", "index.int()"),
    Fault("masks/padding.py", "kv < kv_lens[b]", "kv <= kv_lens[b]"),
    Fault("spec/indexing.py", "table[*leading(table, b, h, position), position]", "table[b, h, position]"),
    Fault("masks/natten.py", "        leader = torch.where(leader > end, end, leader)\n", ""),
    Fault("masks/sliding_tile.py", "any(w > n for w, n in", "any(w >= n for w, n in"),
    Fault(
        "masks/natten.py",
        "_neighborhood(q, kv, axes, pixels) if words",
        "_neighborhood(q, kv, axes) if words",
        ("tests/masks/test_masks.py::test_what_kernels_compute",),
    ),
    Fault("masks/longformer.py", "shift = -tokens % frame", "shift = tokens % frame"),
    Fault(
        "scores/t5_bias.py",
        "bounded(table, 0, buckets - 1)",
        "bounded(table, 0, buckets - 2)",
        ("tests/masks/test_scores.py::test_bounds_that_scores_note_hold",),
    ),
    Fault("scores/t5_bias.py", "far**steps >= max_distance", "far**steps > max_distance"),
    Fault("scores/alibi.py", "2 * (h - below) + 1", "2 * (h - below)"),
    Fault("scores/relative_bias.py", "distance < -reach, -reach, distance", "distance < -reach, -reach + 1, distance"),
    # --- backends ---
    Fault("backends/short_kernel.py", " or not all(map(has_memory, upstream))", ""),
    Fault(
        "backends/short.py",
        '    if call.with_lse:\n        return "on a CPU it gives no gradient of the lse"\n',
        "",
    ),
    Fault("backends/added.py", "x.unflatten(1, (-1, groups))", "x.unflatten(1, (groups, -1))"),
    Fault("backends/decode.py", "max(b for _, b in filled)", "min(b for _, b in filled)"),
    Fault(
        "backends/decode.py",
        "scores_of(q.float(), k.float(), self",
        "scores_of(q, k, self",
        ("tests/engine/test_decode.py::test_products_beyond_half_precision_beside_poison",),
    ),
    Fault("backends/decode.py", '    if call.needs_grad:\n        return "it has no gradients"\n', ""),
    # --- dropout ---
    *(
        Fault("backends/flex_dropout.py", right, wrong, ("tests/calls/test_dropout.py",))
        for right, wrong in (
            ("((of_q >> 15) * (of_kv & _HALF))", "(of_q >> 15) ^ of_kv"),
            ("lse.masked_fill(lse == -math.inf, math.inf)", "lse"),
            ("d = d + products", "d = d - products"),
            ("gradient, None, functions.share)", "gradient, None, 1.0)"),
        )
    ),
    Fault("road.py", "dropout._replace(seed=0))).call", "dropout)).call", ("tests/calls/test_dropout.py",)),
    Fault("dropout.py", "**by) | 1", "**by) & ~1"),
    Fault("dropout.py", "2 * table + n + 1", "n + 1"),
    Fault("dropout.py", "2 * table + n + 1", "2 * table + 1"),
    Fault("dropout.py", "(seed & _WORD, seed >> 32 & _WORD)", "(seed & _WORD,)"),
    Fault("backends/call.py", "not self._finds_mask", "True", ("tests/calls/test_dropout.py",)),
    Fault("dropout.py", "        q = q - first\n", "        q = q * 1\n"),
    Fault("dropout.py", ".masked_fill(of_kept == -math.inf, -math.inf)", ""),
    Fault("dropout.py", "return out, lse if request.return_lse else None", "return out, of_kept"),
    Fault("backends/added.py", "== (-math.inf, -math.inf)", "is not None"),
    Fault("backends/added.py", '(name == "sub" and sums == [0])', '(name == "sub" and len(sums) == 1)'),
    Fault("backends/added.py", '(sums == [0] or kwargs.get("alpha", 1) == 1)', "True"),
    Fault("backends/reference.py", "        ctx.check()\n        out, lse", "        out, lse"),
    Fault(
        "backends/sdpa.py",
        "(window.right, window.offset) != (0, 0)",
        "window.right != 0",
        ("tests/calls/test_attention.py::test_sdpa_takes_no_later_queries",),
    ),
    Fault(
        "backends/sdpa.py", "call.scale is not None and call.scale <= 0", "call.scale is not None and call.scale < 0"
    ),
    Fault(
        "backends/sdpa.py",
        "x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x",
        "x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x",
    ),
    Fault(
        "backends/slices.py",
        "        out = torch.where(bad_values > 0, math.nan, out)\n",
        "",
        ("tests/calls/test_attention.py::test_the_reference_shows_poison_that_is_seen_to_transforms",),
    ),
    Fault(
        "backends/flex_kernels.py",
        "torch.where(q >= 0, score_mod(score, b, h, q, kv), score)",
        "score_mod(score, b, h, q, kv)",
        ("tests/masks/test_scores.py::test_scores_that_depend_on_few_indices",),
    ),
    Fault(
        "blocks/elements.py",
        "out if self._is_of_pairs(args[0]) else self._gated(out)",
        "out",
        ("tests/masks/test_scores.py::test_hidden_pairs_teach_nothing",),
    ),
    Fault("backends/plain.py", "sum((x.sum() for x in learned), q.sum()", "(q.sum()"),
    Fault(
        "backends/tiles.py",
        ".sum(-1, keepdim=True) - grad_lse[..., None]",
        ".sum(-1, keepdim=True) + grad_lse[..., None]",
    ),
    Fault("backends/tiles.py", "rows = torch.where(sees_something, grad_out, 0.0)", "rows = grad_out"),
    Fault(
        "backends/tiles.py",
        ".repeat(_length(tile.batch), 1, 1)",
        ".repeat_interleave(_length(tile.batch), 0)",
    ),
    Fault(
        "backends/tiles.py",
        "            grads = of_scores.contiguous()\n            self._set_hidden_to_zero(grads, tile)\n",
        "            grads = of_scores.contiguous()\n",
        ("tests/masks/test_scores.py::test_gradients_of_scores_that_are_nan_where_the_mask_hides",),
    ),
    Fault(
        "backends/tiles.py",
        "torch.zeros_like(x, dtype=torch.promote_types(x.dtype, self._dtype))",
        "torch.zeros_like(x)",
        ("tests/masks/test_scores.py::test_gradients_of_captured_tensors_in_half_precision_are_summed_in_float32",),
    ),
    Fault(
        "backends/tiles_operator.py",
        "score_mod, visible, self.scale)\n        layout",
        "score_mod, visible, None)\n        layout",
        _COMPILED,
    ),
    Fault("backends/ordered.py", " & self._are_whole[1][kv]", "", _INVARIANT),
    Fault(
        "backends/ordered_places.py",
        "of_q.gather(1, q_at), _ranks(of_q).gather(1, q_at), of_kv.gather(1, kv_at), _ranks(of_kv).gather(1, kv_at)",
        "of_q.gather(1, q_at), q_at, of_kv.gather(1, kv_at), kv_at",
        _INVARIANT,
    ),
    Fault("backends/ordered_places.py", "kv_at = places.kv_position - first", "kv_at = places.kv_position", _INVARIANT),
    Fault("pages.py", 'return is_invariant() and q.device.type == "cpu"', "return False", _INVARIANT),
    Fault("inside_compile.py", "_bound(score, size, q_offset,", "_bound(score, size, 0,", _PLACED),
    Fault(
        "inside_compile.py",
        "score._bind(score._resolve(size)), q_offset)",
        "score._bind(score._resolve(size)), 0)",
        ("tests/calls/test_export.py::test_programs_for_onnx_hold_plain_operations",),
    ),
    Fault("inside_compile.py", "_scored(of_score, q_offset, like_q", "_scored(of_score, 0, like_q", _PLACED),
    Fault("inside_compile.py", "any(isinstance(x, Tensor) and x.req", "any(isinstance(x, Tensor) or x.req", _PLACED),
    Fault("backends/encoded.py", "self.q_offset), self.q_offset)", "self.q_offset), 0)", _PLACED),
    Fault("backends/times.py", "[1, rows * memory, full", "[1, rows * matrices, full"),
    Fault("backends/table.py", '"" if _FAILURES.get(kind) is None else reason', "reason"),
    Fault(
        "spec/numbers.py",
        "seen.why_constant = difference(function, made, device, sizes)",
        'seen.why_constant = ""',
        ("tests/engine/test_numbers.py::test_a_number_that_cannot_be_an_input_is_warned_of_once",),
    ),
    Fault("plans/held.py", "_write(former)", "pass", _UPDATES),
    Fault("plans/held.py", "if list(map(_fixed, old)) != list(map(_fixed, new)):", "if False:", _UPDATES),
    Fault(
        "plans/held.py",
        "mask=mask.again()",
        "mask=mask",
        ("tests/engine/test_starts.py::test_updated_starts_reach_the_kernel",),
    ),
    Fault("planning.py", "self._blocks[1] != state", "False", _UPDATES),
    Fault("spec/structure.py", "_name_of(former) != _name_of(place)", "False", _UPDATES),
    Fault("plans/held.py", "if self._versions != present:", "if False:", _HELD),
    Fault(
        "plans/held.py",
        "None if score is None else score.again()",
        "score",
        ("tests/engine/test_decode.py::test_plans_whose_mask_and_score_change",),
    ),
    Fault(
        "backends/forms.py",
        "None if offset is None else count(offset), *shapes, call.device_type",
        "*shapes, call.device_type",
        ("tests/engine/test_data.py::test_functions_are_looked_at_again_for_later_positions",),
    ),
    # --- kernels, which Triton's interpreter runs ---
    Fault("kernels/softmax_forward.py", "    if SIGN < 0:\n        scores = -scores\n", "", _SOFTMAX),
    Fault(
        "kernels/softmax_forward.py",
        'is_nan = (total != total) | (row_max == float("-inf"))',
        "is_nan = total != total",
        _SOFTMAX,
    ),
    Fault("kernels/softmax_forward.py", "tl.exp2((row_max - new) * scale)", "tl.exp2(row_max - new)", _SOFTMAX),
    Fault("kernels/softmax_backward.py", "tl.where(weights == 0, 0.0, weights * slopes)", "weights * slopes", _SOFTMAX),
    Fault("kernels/softmax_tiles.py", "high = (end + 15) // 16 * 16", "high = end // 16 * 16", _SOFTMAX),
    Fault(
        "kernels/few_queries_kernel.py",
        "kept = tl.exp2((row_max - base) * _LOG2_E)",
        "kept = tl.exp2(row_max - base)",
        _FEW_QUERIES,
    ),
    Fault(
        "kernels/few_queries_kernel.py", "_clipped(start + queries - 1 - left,", "_clipped(start - left,", _FEW_QUERIES
    ),
    Fault(
        "kernels/few_queries_kernel.py",
        "element_ty), mask=column < V_SIZE)\n    if lse is not None:\n        tl.store(lse + at,",
        "element_ty), mask=column <= V_SIZE)\n    if lse is not None:\n        tl.store(lse + at,",
        _FEW_QUERIES,
    ),
    Fault(
        "kernels/few_queries_kernel.py",
        "row = head % GROUP * queries + query",
        "row = head * queries + query",
        _FEW_QUERIES,
    ),
    Fault(
        "kernels/few_queries_kernel.py",
        "if not CAP and bias is None:\n            row_max",
        "if not CAP:\n            row_max",
        _FEW_QUERIES,
    ),
    Fault(
        "kernels/whole_mask_kernel.py",
        "-= tl.load(d_lse + line + query, mask=is_query, other=0.0)\n    tl",
        "+= tl.load(d_lse + line + query, mask=is_query, other=0.0)\n    tl",
        _WHOLE_MASK,
    ),
    Fault("kernels/whole_mask_kernel.py", "        acc += d_scores\n", "        acc = d_scores\n", _WHOLE_MASK),
    Fault(
        "spec/code.py",
        "if name in variables and not _is_fixed(variables[name])",
        "if False",
        ("tests/calls/test_inside_compile.py::test_variables_of_a_module_may_change",),
    ),
    Fault(
        "spec/code.py",
        "if defaults and (is_made_anew or",
        "if defaults and (",
        ("tests/calls/test_inside_compile.py::test_captured_numbers_may_change",),
    ),
    Fault(
        "kernels/whole_mask_kernel.py",
        "(of_key - of_query - shift).to(tl.float32)",
        "(of_key - of_query).to(tl.float32)",
        _WHOLE_MASK,
    ),
    Fault("kernels/whole_mask_kernel.py", "_store_rows(d_k, k_acc * scale,", "_store_rows(d_k, k_acc,", _WHOLE_MASK),
    Fault("kernels/sinks_kernel.py", "to_sink += slope * of_sink", "to_sink += slope * of_keys", _SINKS),
    Fault(
        "kernels/sinks_kernel.py",
        "both = tl.maximum(lse, sink) + tl.log(total)",
        "both = tl.maximum(lse, sink)",
        _SINKS,
    ),
    # --- kernels in plain torch ---
    Fault(
        "kernels/sinks.py",
        "of_share, -of_share",
        "of_share, of_share",
        ("tests/engine/test_sinks.py::test_gradients_in_plain_torch",),
    ),
    Fault("kernels/sinks.py", "may_change=not learns and are_plain)", "may_change=are_plain)"),
    # --- the masked softmax ---
    Fault("kernels/softmax_operator.py", "slopes = scale * weights * (slopes", "slopes = weights * (slopes"),
    Fault("kernels/softmax_operator.py", "weights.masked_fill(hidden, 0.0).to(x.dtype)", "weights.to(x.dtype)"),
    Fault("kernels/softmax_operator.py", "(columns >= bounds[..., 1:])", "(columns > bounds[..., 1:])"),
    Fault(
        "kernels/softmax_operator.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return torch.float32",
    ),
    Fault("kernels/softmax_operator.py", "dy.to(weights.dtype).masked_fill(hidden, 0)", "dy.to(weights.dtype)"),
    Fault(
        "kernels/softmax_operator.py", "active() or compat.in_forward_derivative()", "active()", _SOFTMAX_IN_TRANSFORMS
    ),
    Fault("kernels/softmax_operator.py", "if torch.is_grad_enabled() or", "if", _SOFTMAX_IN_TRANSFORMS),
    Fault("plans/checks.py", "mask.ndim > x.ndim or not all", "not all"),
    # --- Hugging Face transformers ---
    Fault(
        "integrations/huggingface/recognition.py",
        "limit = more - is_strict",
        "limit = more",
        ("tests/world/test_huggingface.py::test_windows_by_the_absolute_distance",),
    ),
    Fault(
        "integrations/huggingface/recognition.py",
        "min(one.high, other.high) + 1",
        "min(one.high, other.high) + 2",
        ("tests/world/test_huggingface.py::test_two_windows_with_a_gap",),
    ),
    Fault("integrations/huggingface/recognition.py", "start=chunk[1] - positions.first", "start=chunk[1]"),
    Fault(
        "integrations/huggingface/recognition.py",
        "    if interval.remapped and not is_packed:\n        return None\n",
        "",
    ),
    Fault("integrations/huggingface/late.py", "first_query = q_offset - kv_offset", "first_query = q_offset"),
    Fault(
        "spec/pairs.py",
        "~(table <= lowest / 2)",
        "~(table < 0)",
        ("tests/calls/test_pairs.py::test_what_masks_become",),
    ),
    Fault(
        "spec/pairs.py",
        "(greatest <= lowest / 4) & ",
        "False & ",
        ("tests/calls/test_pairs.py::test_numbers_near_the_lowest_are_compared_like_all_others",),
    ),
    Fault(
        "dot_product.py",
        "torch.backends.mha.set_fastpath_enabled(_before[1])",
        "torch.backends.mha.set_fastpath_enabled(True)",
        ("tests/calls/test_dot_product.py::test_all_is_as_before_when_the_last_block_ends",),
    ),
    Fault("weighing.py", "q if places is None else places[q], kv)", "q, kv)"),
    Fault("weighing.py", "keys.masked_fill(is_hidden, -1)", "keys"),
    Fault("weighing.py", "if bool(is_tied.any()):", "if False:"),
    Fault("weighing.py", "k[:, of_heads // (q.shape[1] // k.shape[1])]", "k[:, of_heads % k.shape[1]]"),
    Fault("pictures/cells.py", "return Grid(summed / queries[:, None], cell)", "return Grid(summed / height, cell)"),
    Fault(
        "backends/slices.py",
        "x.view_as(x) if differentiable and x.requires_grad else x.detach()",
        "x",
        ("tests/calls/test_attention.py::test_second_derivatives_where_inputs_are_made_of_each_other",),
    ),
    Fault("integrations/huggingface/attention.py", "else found.mask, 0, found.score", "else found.mask, 0, None"),
    Fault(
        "integrations/huggingface/attention.py", "if isinstance(mask, kinds) else function", "if False else function"
    ),
    Fault("integrations/huggingface/late.py", "if starts_later or q_length != kv_length:", "if starts_later:"),
    Fault(
        "integrations/huggingface/attention.py",
        "prepend=first) != 1)",
        "prepend=first) < 1)",
        ("tests/world/test_huggingface.py::test_documents_start_where_positions_do_not_go_on_by_one",),
    ),
    Fault(
        "integrations/huggingface/attention.py",
        "side = window - 1 if side is None",
        "side = window if side is None",
        ("tests/world/test_huggingface.py::test_windows_of_layers_that_look_both_ways",),
    ),
    Fault(
        "integrations/huggingface/attention.py",
        "documents * documents.shape[1] + position_ids // chunk",
        "documents + position_ids // chunk",
    ),
    # --- sequences over several processes, and DTensors ---
    Fault(
        "integrations/distributed/exchange.py",
        "result[:, :, place].add_(piece)",
        "result[:, :, place].copy_(piece)",
        ("tests/world/test_distributed.py::test_dtensors", *_EXCHANGED),
    ),
    Fault(
        "integrations/distributed/exchange.py",
        "grad_placements=[Partial()]",
        "grad_placements=[Replicate()]",
        _EXCHANGED,
    ),
    Fault(
        "integrations/distributed/counts.py", "min(length, rows[1] + band.right)", "min(length, rows[0] + band.right)"
    ),
    Fault(
        "integrations/distributed/counts.py",
        "max(stop, result[-1][1])",
        "stop",
        ("tests/world/test_distributed_plan.py::test_parts_inside_others_are_merged",),
    ),
    Fault(
        "integrations/distributed/attention.py",
        "place.first_head + last.get_local_rank() * q.shape[1]",
        "place.first_head",
        _DISTRIBUTED,
    ),
    Fault(
        "integrations/distributed/attention.py",
        "made((of_mask, *sizes, call.parts)",
        "made((of_mask, call.parts)",
        ("tests/world/test_distributed_plan.py",),
    ),
    Fault("integrations/distributed/balance.py", "cuts = [size * n // count", "cuts = [size // count * n"),
    Fault(
        "spec/parts.py",
        "sinks.narrow(0, self.first_head, heads)",
        "sinks.narrow(0, 0, heads)",
        ("tests/engine/test_parts.py",),
    ),
    # --- calls, caches, orders, threads, pictures ---
    Fault(
        "cache.py",
        "compat.version(tensor), tensor.data_ptr(),",
        "compat.version(tensor),",
        ("tests/engine/test_cache.py::test_nothing_stale",),
    ),
    Fault(
        "cache.py",
        "self._name, key, torch.is_inference_mode_enabled(), *map",
        "self._name, key, *map",
        ("tests/engine/test_cache.py::test_inference_then_training",),
    ),
    Fault(
        "cache.py",
        "tensor.shape, tensor.stride(), tensor.dtype",
        "tensor.shape, tensor.dtype",
        ("tests/engine/test_cache.py::test_tensors_given_other_data_are_others",),
    ),
    Fault(
        "cache.py",
        "tensor.data_ptr(), tensor.shape, tensor.stride(),",
        "tensor.data_ptr(), tensor.stride(),",
        ("tests/engine/test_cache.py::test_tensors_given_other_data_are_others",),
    ),
    Fault(
        "cache.py",
        "tensor.stride(), tensor.dtype\n",
        "tensor.stride()\n",
        ("tests/engine/test_cache.py::test_tensors_given_other_data_are_others",),
    ),
    Fault(
        "road.py",
        "return Known((functions, of_sizes, learning), tensors)",
        "return Known((functions, of_sizes), tensors)",
        _WHOLE_MASK,
    ),
    Fault(
        "flex.py", "score_mod, block_mask, scale) if", "score_mod, block_mask, None) if", ("tests/calls/test_flex.py",)
    ),
    Fault(
        "road.py",
        "key += [name, repr(value)]",
        "key += [name, value]",
        ("tests/engine/test_cache.py::test_parameters_that_look_alike_are_distinguished",),
    ),
    Fault(
        "plans/plan.py",
        "in_one_piece(t if t.requires_grad else t.detach())",
        "in_one_piece(t.detach())",
        _WHOLE_MASK,
    ),
    Fault("road.py", "q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()", "q.shape, k.shape, v.shape"),
    Fault(
        "request.py",
        "request.block_mask is not None and request.mask is not None",
        "False",
        ("tests/calls/test_errors.py::test_bad_input",),
    ),
    Fault(
        "pages.py",
        "size = Size(len(q), q.shape[1], q.shape[2], n_pages",
        "size = Size(len(q), q.shape[0], q.shape[2], n_pages",
        ("tests/calls/test_paging.py::test_masks_of_all_kinds_count_positions_in_the_sequence",),
    ),
    Fault("orders.py", "return _Moved.apply(results, back, into)", "return _Moved.apply(results, into, back)"),
    Fault("orders.py", "_Moved.apply(gradients[0], inverse, order)", "_Moved.apply(gradients[0], order, inverse)"),
    Fault("pages.py", ".long().clamp(0, len(cache.k) - 1)", ".long()"),
    Fault("pages.py", "if not _WHOLE.get(key, given):", "if _WHOLE.get(key, given) is None:"),
    Fault("orders.py", "number * -(-length // size)", "number * (length // size)"),
    Fault(
        "workers.py", "torch.inference_mode(inference), torch.set_grad_enabled(grad)", "torch.inference_mode(inference)"
    ),
    Fault(
        "pictures/picture.py", "elif cell[0] < block[0]", "elif cell[0] < block[1]", ("tests/calls/test_picture.py",)
    ),
    Fault(
        "pictures/svg.py",
        "int(b[i : i + 2], 16)",
        "int(b[i : i + 2], 17)",
        ("tests/calls/test_picture.py::test_levels_of_a_score_lie_evenly_between_two_colors",),
    ),
    Fault(
        "pictures/cells.py",
        "if cell[dim] >= self.block_size[dim] and length",
        "if cell[dim] > self.block_size[dim] and length",
    ),
    Fault(
        "plans/mask_plan.py",
        "        if self.is_given:\n            return None\n",
        "        if self.is_given:\n            return self\n",
        ("tests/calls/test_inside_compile.py::test_given_blocks_have_the_backends_that_take_them", *_COMPILED),
    ),
    Fault("spec/code.py", "or not chain:", "or False:", ("tests/masks/test_objects.py", "tests/engine/test_cache.py")),
    Fault("spec/code.py", "found[first] = None", "found.setdefault(first, {})", ("tests/masks/test_objects.py",)),
    Fault(
        "spec/code.py",
        ' or hasattr(of_class, "__set__"):',
        ":",
        ("tests/engine/test_cache.py::test_tensors_given_other_data_are_others",),
    ),
    Fault("plans/held.py", " or structure.reads_objects", "", ("tests/engine/test_plan_held.py",)),
    Fault(
        "plans/score_plan.py",
        "if self.is_by_library:",
        "if True:",
        ("tests/masks/test_biases.py::test_numbers_of_learning_scores",),
    ),
    Fault(
        "backends/reference.py",
        'find_nodes(op="get_attr")',
        "find_nodes()",
        ("tests/engine/test_kept.py::test_variables_that_get_other_values",),
    ),
    Fault(
        "backends/exact.py",
        "if not all(_holds(x, out.dtype) for x in numbers):",
        "if False:",
        ("tests/engine/test_data.py::test_functions_that_go_as_data",),
    ),
    Fault(
        "plans/plan.py",
        "most // 2 + 1, most)",
        "self.offset, most)",
        ("tests/engine/test_data.py::test_functions_are_looked_at_for_all_positions_of_a_kind",),
    ),
    Fault(
        "backends/forms.py",
        "if not reason and most != _OPEN_LENGTHS[0]:",
        "if False:",
        ("tests/engine/test_data.py::test_lengths_that_a_graph_leaves_open",),
    ),
    Fault(
        "blocks/elements.py",
        "dtype = functools.reduce(torch.maximum, tensors).dtype",
        "dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])",
        ("tests/engine/test_blocks.py::test_delicate_functions",),
    ),
    Fault("plans/whole.py", "(1, -1, 1, 1).clone()", "(1, -1, 1, 1)"),
    Fault(
        "spec/parts.py",
        "factors.slopes[first_head : first_head + size.heads]",
        "factors.slopes[: size.heads]",
        ("tests/engine/test_parts.py::test_bands_caps_and_slopes_of_a_part",),
    ),
    Fault(
        "plans/tracing.py",
        "tracer, _NoArrays():",
        "tracer:",
        ("tests/engine/test_tracing.py",),
    ),
    Fault(
        "plans/tracing.py",
        "if varies and (",
        "if not varies and (",
        ("tests/engine/test_tracing.py",),
    ),
    # --- what is wrong with a mask ---
    Fault("blocks/strips.py", "possible & ~sees_block[..., None]", "possible & sees_block[..., None]", _CHECK),
    Fault("blocks/strips.py", "blocks[at_once:][~seen.all(-1)", "blocks[at_once:][~seen.any(-1)", _CHECK),
    Fault("blocks/strips.py", "moved(mask_mod, first, 0)", "mask_mod", _CHECK),
    Fault("blocks/reads.py", "outside = (index >= n)", "outside = (index > n)", _CHECK),
    Fault("blocks/reads.py", "index < 0 if before", "index < 1 if before", _CHECK),
    Fault("ranges/lookup.py", "guarded(values, i, n) for", "i for", _CHECK),
    Fault("asking/check.py", "min(q, size.kv_len - 1)", "q", _CHECK),
    Fault("asking/check.py", "over.of_positions(lambda b, h, q, kv: kv > q)", "lambda b, h, q, kv: kv > q", _CHECK),
    Fault("asking/check.py", "if d == dim else x for", "if d >= dim else x for", _CHECK),
    Fault("asking/check.py", "in forbidden else f", "not in forbidden else f", _CHECK),
    Fault("asking/check.py", "has_own_globals=True", "has_own_globals=False", _CHECK),
    # --- other GPUs ---
    Fault("devices.py", "if torch.version.hip is not None:", "if False:", _DEVICES),
    Fault("backends/kernel_tiles.py", "    if capability is None:\n        return ()\n", "", _DEVICES),
    Fault("backends/flex.py", 'return f"on {device} it runs forward passes only"', "return None", _DEVICES),
    Fault("backends/exact.py", 'on_metal=device.type == "mps"', "on_metal=False", _DEVICES),
    Fault("kernels/whole_mask_launch.py", "tiles = tiles._replace(stages=2)", "pass", _FITS),
]
