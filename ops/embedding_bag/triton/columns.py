"""Columns of what kernels read of a layout and of a batch, as `fields.py` names them."""

from __future__ import annotations

import triton.language as tl

from jagged.ops.embedding_bag.fields import BATCH, FEATURE, PART, PLACE, TABLE

# Of a row of a layout's tensor, whatever it is of.
FIELDS = tl.constexpr(len(FEATURE))
# Of features and of tables alike.
START, ROWS, WIDTH, FIRST_ROW = map(tl.constexpr, (FEATURE.start, FEATURE.rows, FEATURE.width, FEATURE.first_row))
# Of features.
OUTPUT_COLUMN, IS_MEAN, IN_ORDER = map(tl.constexpr, (FEATURE.output_column, FEATURE.is_mean, FEATURE.in_order))
# Of tables.
BY_WIDTH, UNIT_END, FIRST_READER = map(tl.constexpr, (TABLE.by_width, TABLE.unit_end, TABLE.first_reader))
# Of places.
PLACE_FEATURE, PLACE_WIDTH, CLASS_BEGIN, CLASS_END = map(tl.constexpr, PLACE)
# Of parts.
PART_FEATURE, PART_NUMBER, PART_WIDTH = map(tl.constexpr, PART)
# Of features with batches of their own.
BATCH_FIELDS = tl.constexpr(len(BATCH))
FIRST_BAG, NUM_BAGS, OUTPUT_BEGIN, OUTPUT_STRIDE = map(tl.constexpr, BATCH)
