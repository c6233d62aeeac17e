"""Masks and scores as values: functions and parameters come in, Mask and Score go out.

Mask and score files import what they need from here.
"""

from flexmasks.blocks.bits import bytes_of_bits as bytes_of_bits
from flexmasks.compat import constant_in_graphs as constant_in_graphs
from flexmasks.compat import constants as constants
from flexmasks.devices import device_of_float64 as device_of_float64
from flexmasks.spec import batches as batches  # which makes masks nodes of pytrees
from flexmasks.spec.arguments import get_mask as get_mask
from flexmasks.spec.arguments import get_score as get_score
from flexmasks.spec.bands import Band as Band
from flexmasks.spec.bands import Factors as Factors
from flexmasks.spec.bands import band_of as band_of
from flexmasks.spec.bands import cap_of as cap_of
from flexmasks.spec.bands import changes_in as changes_in
from flexmasks.spec.bands import factors_of as factors_of
from flexmasks.spec.bands import in_documents as in_documents
from flexmasks.spec.bands import in_sequences as in_sequences
from flexmasks.spec.bands import lie_end_to_end as lie_end_to_end
from flexmasks.spec.by_name import says_what_to_write as says_what_to_write
from flexmasks.spec.indexing import always as always
from flexmasks.spec.indexing import at as at
from flexmasks.spec.indexing import at_head as at_head
from flexmasks.spec.indexing import bounded as bounded
from flexmasks.spec.indexing import check_canvas as check_canvas
from flexmasks.spec.indexing import check_covers_queries as check_covers_queries
from flexmasks.spec.indexing import check_one_of_two as check_one_of_two
from flexmasks.spec.indexing import entries_of_keys as entries_of_keys
from flexmasks.spec.indexing import first_row as first_row
from flexmasks.spec.indexing import leading as leading
from flexmasks.spec.indexing import pair as pair
from flexmasks.spec.indexing import per_batch as per_batch
from flexmasks.spec.indexing import row_of as row_of
from flexmasks.spec.indexing import rows_of_csr as rows_of_csr
from flexmasks.spec.inside import example_pages as example_pages
from flexmasks.spec.inside import positions_in_pages as positions_in_pages
from flexmasks.spec.inside import prepare_pages as prepare_pages
from flexmasks.spec.inside import prepare_sequences as prepare_sequences
from flexmasks.spec.inside import size_inside_pages as size_inside_pages
from flexmasks.spec.inside import size_inside_sequences as size_inside_sequences
from flexmasks.spec.parameters import Size as Size
from flexmasks.spec.parameters import describe as describe
from flexmasks.spec.parameters import may_read as may_read
from flexmasks.spec.registry import register_mask as register_mask
from flexmasks.spec.registry import register_score as register_score
from flexmasks.spec.values import Mask as Mask
from flexmasks.spec.values import Score as Score
