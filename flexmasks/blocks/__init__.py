"""A mask's function and lengths go in; a BlockMask comes out.

Its empty, partial and full blocks are exactly those of torch's create_block_mask. Where the function is not a mask, all
files raise ValueError or TypeError.

`decide` asks ranges which blocks are certainly full and which are possibly visible. `undecided` looks at the other
blocks element by element, `pieces` says where blocks are cut for that, and `elements` evaluates the mask there; where
kernels read the mask as bits, `bits` evaluates them whole instead, and keeps the result. `build` joins both results,
and `lists` makes the index lists. `counts` counts the blocks and pairs of a BlockMask and proves what kernels may rely
on. `strips` counts at any length in bounded memory, and `difference` the pairs that one of two masks shows alone.
`limits` bounds the work done at once, and that of a whole search.
"""

from flexmasks.blocks.build import Layout as Layout
from flexmasks.blocks.build import materialize as materialize
from flexmasks.blocks.counts import Blocks as Blocks
from flexmasks.blocks.decide import dependence as dependence
from flexmasks.blocks.elements import Elements as Elements
from flexmasks.blocks.lists import of_block_mask as of_block_mask
from flexmasks.blocks.strips import count_in_strips as count_in_strips
from flexmasks.blocks.strips import visible_in_strips as visible_in_strips
