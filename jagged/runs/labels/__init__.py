"""What is done with rows that have sets of labels: train a model of them, evaluate it, rank labels of other rows."""

from jagged.runs.labels.run import LabelRun as LabelRun

__all__ = ["LabelRun"]
