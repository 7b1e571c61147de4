"""Events in, jagged batches out: files, vocabularies, splits and loaders.

Everything is loaded on first use: reading and splitting need neither torchrec nor fbgemm, only the batches do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jagged.data.arff import read_arff as read_arff
    from jagged.data.batches import BatchLoader as BatchLoader
    from jagged.data.batches import SequenceBatch as SequenceBatch
    from jagged.data.dataset import SequenceDataset as SequenceDataset
    from jagged.data.encoding import Encoders as Encoders
    from jagged.data.errors import DataError as DataError
    from jagged.data.events import read_events as read_events
    from jagged.data.impressions import ImpressionTruth as ImpressionTruth
    from jagged.data.impressions import synthetic_impressions as synthetic_impressions
    from jagged.data.inspection import Inspection as Inspection
    from jagged.data.inspection import inspect_table as inspect_table
    from jagged.data.item_table import ItemTable as ItemTable
    from jagged.data.item_table import read_item_table as read_item_table
    from jagged.data.label_batches import LabelBatch as LabelBatch
    from jagged.data.label_batches import label_loader as label_loader
    from jagged.data.label_features import label_embeddings as label_embeddings
    from jagged.data.label_tables import label_names_of_table as label_names_of_table
    from jagged.data.label_tables import read_label_table as read_label_table
    from jagged.data.multilabel import LabelTruth as LabelTruth
    from jagged.data.multilabel import synthetic_labels as synthetic_labels
    from jagged.data.recorded import RecordedBatches as RecordedBatches
    from jagged.data.recorded import read_batches as read_batches
    from jagged.data.recorded import record_batches as record_batches
    from jagged.data.records import Dataset as Dataset
    from jagged.data.schema import Column as Column
    from jagged.data.schema import Kind as Kind
    from jagged.data.schema import Schema as Schema
    from jagged.data.splits import SequencePart as SequencePart
    from jagged.data.splits import SequenceSplit as SequenceSplit
    from jagged.data.splits import leaks as leaks
    from jagged.data.splits import split_global_time as split_global_time
    from jagged.data.splits import split_leave_one_out as split_leave_one_out
    from jagged.data.synthetic import Attainable as Attainable
    from jagged.data.synthetic import synthetic_sessions as synthetic_sessions
    from jagged.data.table_batches import Batch as Batch
    from jagged.data.table_batches import Part as Part
    from jagged.data.table_splits import Split as Split
    from jagged.data.vocabulary import Vocabulary as Vocabulary
    from jagged.data.xmc import MultiLabelRows as MultiLabelRows
    from jagged.data.xmc import read_xmc as read_xmc
    from jagged.data.xmc import write_xmc as write_xmc

_WHERE = {
    "Attainable": "synthetic",
    "Batch": "table_batches",
    "BatchLoader": "batches",
    "Column": "schema",
    "DataError": "errors",
    "Dataset": "records",
    "Encoders": "encoding",
    "ImpressionTruth": "impressions",
    "Inspection": "inspection",
    "ItemTable": "item_table",
    "Kind": "schema",
    "RecordedBatches": "recorded",
    "LabelTruth": "multilabel",
    "LabelBatch": "label_batches",
    "MultiLabelRows": "xmc",
    "label_embeddings": "label_features",
    "read_arff": "arff",
    "label_names_of_table": "label_tables",
    "read_label_table": "label_tables",
    "label_loader": "label_batches",
    "Part": "table_batches",
    "Schema": "schema",
    "SequenceBatch": "batches",
    "SequenceDataset": "dataset",
    "SequencePart": "splits",
    "SequenceSplit": "splits",
    "Split": "table_splits",
    "Vocabulary": "vocabulary",
    "inspect_table": "inspection",
    "leaks": "splits",
    "read_batches": "recorded",
    "read_events": "events",
    "read_item_table": "item_table",
    "read_xmc": "xmc",
    "record_batches": "recorded",
    "split_global_time": "splits",
    "split_leave_one_out": "splits",
    "synthetic_impressions": "impressions",
    "synthetic_labels": "multilabel",
    "synthetic_sessions": "synthetic",
    "write_xmc": "xmc",
}

__all__ = [
    "Attainable",
    "BatchLoader",
    "Column",
    "DataError",
    "Dataset",
    "ImpressionTruth",
    "Inspection",
    "ItemTable",
    "Kind",
    "LabelBatch",
    "LabelTruth",
    "MultiLabelRows",
    "RecordedBatches",
    "Schema",
    "SequenceBatch",
    "SequenceDataset",
    "SequencePart",
    "SequenceSplit",
    "Vocabulary",
    "inspect_table",
    "label_embeddings",
    "label_loader",
    "label_names_of_table",
    "leaks",
    "read_arff",
    "read_batches",
    "read_events",
    "read_item_table",
    "read_label_table",
    "read_xmc",
    "record_batches",
    "split_global_time",
    "split_leave_one_out",
    "synthetic_impressions",
    "synthetic_labels",
    "synthetic_sessions",
    "write_xmc",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"jagged.data.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'jagged.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
