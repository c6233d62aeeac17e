"""A mask's function and ranges of indices go in; certain and possible truth come out.

The idea
--------
A mask is a function of indices. A BlockMask divides all pairs of a query and a key into blocks, for example of 128
queries by 128 keys. The mask shows all pairs of a block (a full block), none (an empty block, which kernels skip) or
some (a partial block). torch's create_block_mask finds the blocks by calling the function on every pair. A million
tokens have 10^12 pairs, in 67 million blocks.

Here the function is called once, on *ranges* of indices in place of indices. Take a window of 192 keys,

    >>> def window(b, h, q, kv):
    ...     return (kv <= q) & (q - kv <= 192)

over 512 tokens. The queries form four blocks, the ranges 0..127, 128..255, 256..383 and 384..511, and the keys form
the same four. A Range is two tensors, the least and the greatest number of each block. Query blocks lie along one
dimension and key blocks along another:

    >>> import torch
    >>> from flexmasks.ranges import Range
    >>> from flexmasks.ranges.evaluate import evaluate
    >>> first, last = torch.arange(0, 512, 128), torch.arange(127, 512, 128)
    >>> q = Range.of_indices(first.view(1, 1, 4, 1), last.view(1, 1, 4, 1), limit=511)
    >>> kv = Range.of_indices(first.view(1, 1, 1, 4), last.view(1, 1, 1, 4), limit=511)

Arithmetic on ranges gives the range of all results. The least distance of a query from a key is the least query of the
query block minus the greatest key of the key block. So `q - kv` subtracts two tensors for each end, and broadcasting
gives a matrix of all blocks:

    >>> distance = q - kv
    >>> distance.lo[0, 0].int()
    tensor([[-127, -255, -383, -511],
            [   1, -127, -255, -383],
            [ 129,    1, -127, -255],
            [ 257,  129,    1, -127]], dtype=torch.int32)
    >>> distance.hi[0, 0].int()
    tensor([[ 127,   -1, -129, -257],
            [ 255,  127,   -1, -129],
            [ 383,  255,  127,   -1],
            [ 511,  383,  255,  127]], dtype=torch.int32)

A comparison gives a range of truth values: `lo` says "certainly", `hi` says "possibly". A block whose greatest distance
is at most 192 is certainly in the window. A block whose least distance is above 192 is not possibly in it. `&`, `|` and
`~` combine the two ends:

    >>> b = h = Range.of_indices(torch.zeros(1), torch.zeros(1), limit=0)
    >>> visible = evaluate(window, b, h, q, kv).truth
    >>> visible.lo[0, 0].int()  # certainly: full blocks
    tensor([[0, 0, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 0]], dtype=torch.int32)
    >>> visible.hi[0, 0].int()  # not possibly: empty blocks
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1]], dtype=torch.int32)

Seven of sixteen blocks are empty. None is full: even next to the diagonal the distance reaches 255. The other nine
blocks are *undecided*. flexmasks.blocks looks at them element by element, and finds that all of them are partial. For a
million tokens there are some 24,000 undecided blocks among 67 million.

What it costs
-------------
An operation that mixes queries and keys works on a matrix with one element for each block, 128 x 128 times fewer than
there are pairs. Any other operation works on a single row or column of blocks. Looking at the undecided blocks comes
after that. They lie at the edges of what the mask shows, so for a window or for documents their number grows with the
length, not with its square. The function is called, not compiled.

The shape of the result also shows which indices the function uses: the result has a batch dimension, or a head
dimension, only if the function uses that index.

What it knows
-------------
Ranges know arithmetic, comparisons, logic, bits, casts, roots and exponentials, `torch.where`, reductions,
`torch.bucketize`, and indexing of captured tensors. An exact index looks up one element. A range of indices gives the
least and the greatest element that it reaches. Every resulting range contains each value that can occur. An operation
without a rule gives the range of all values. The blocks are then looked at element by element, which is slower but
never wrong. The same happens if a function cannot run on ranges. `Mask.blocks` and `explain` name the operation.

A block in which two documents meet has two ids, far apart where ids are in no order. So the blocks of a table of
integers also keep which ids they hold, as bits of a hash, and `ids[q] == ids[kv]` asks whether two blocks share one.

Correlations are lost: `q - q` is not 0 but -127..127, which again is slower and not wrong. Where tables have several
numbers in a block, ranges do not know which of them come together. If many blocks stay undecided, flexmasks.blocks asks
again for pieces of them, in which no table changes.

A Range has the operations of an integer tensor, but it is no tensor. A function may ask for the type of its arguments,
as type checkers do with `isinstance(q, torch.Tensor)`. Such a question ends the evaluation, and all blocks are looked
at element by element. Questions by `type` do not ask the object, so that nobody notices them: `type(q) is
torch.Tensor`, `issubclass(type(q), torch.Tensor)` and tables with types as their keys find a class that is not
torch.Tensor. Ask `isinstance`, `torch.is_tensor`, `q.__class__` or `match` instead.

How it is exact
---------------
Bounds are float64, exact for integers below 2^52. An integer that its dtype might not hold becomes "any value". Floats
are widened by their rounding error. A float may be NaN only where its range is all of -inf..inf. If both ends of a
range are the same tensor object, the range is an exact value. So on ranges of single elements the function gives the
same results as on the elements themselves.

The files
---------
`evaluate` calls a function on ranges. `context` holds the state of one evaluation, and `value` has the Range and the
dispatch of torch's operations to rules. The rules are in `truth`, `arithmetic`, `bits`, `selection`, `conversion`,
`lookup` and `reductions`, and register themselves with the decorator `value.rule`. All of these files use `operands`,
`lookup` uses `reach`, and `lookup` and `truth` use `members`.

Source: interval arithmetic: Moore, Interval Analysis, 1966; the sparse table of range minima: Bender and
Farach-Colton, The LCA Problem Revisited, 2000; block masks: Dong et al., Flex Attention, 2024.
"""

from flexmasks.ranges.context import GiveUp as GiveUp
from flexmasks.ranges.context import TooLarge as TooLarge
from flexmasks.ranges.context import TooWide as TooWide
from flexmasks.ranges.value import Range as Range
from flexmasks.ranges.value import Steps as Steps
