"""The options of a run on rows with sets of labels, by section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from jagged.config.options import LoopOptions, ModelOptions, Rewired
from jagged.config.section import Problem, Section, option

_HEAD = "the labels' weights: few inputs shared by groups, all inputs, all behind a narrow layer, few for each label, or adjacent"


class LabelDataOptions(Section):
    """What is trained on."""

    path: str | None = option(
        None, "training rows: text of the extreme classification repository, parquet with id lists, or arff; none for a sample"
    )
    test: str | None = option(None, "test rows, such a file; none to hold rows of data.path out")
    format: Literal["auto", "text", "parquet", "arff"] = option("auto", "format of the data; auto by file name")
    labels_column: str = option("labels", "of parquet, the column of lists of labels, ids or text")
    features_column: str = option("features", "of parquet, the column of lists of features")
    values_column: str | None = option("values", "of parquet, the column of lists of the features' values; none, or not there: 1")
    embeddings_column: str | None = option(
        None, "of parquet, in place of features the column of lists of numbers, as many in each row; none: rows have features"
    )
    num_labels: int | None = option(
        None, "of arff, how many of the first attributes are labels, below 0 of the last ones; none: as the file says (-C)"
    )
    label_names: str | None = option(
        None, "file of names of labels, one a line in the order of their ids, UTF-8; none: labels are told by id"
    )
    filter: str | None = option(None, "file of pairs, a row of data.path and a label, that validation leaves out of the ranking")
    test_filter: str | None = option(None, "the same of a row of data.test")
    on_error: Literal["stop", "skip"] = option(
        "stop", "at a malformed row stop, or skip it; more than 1 % of the rows always stop"
    )

    def contradictions(self) -> Iterator[Problem]:
        """A test goes with rows to train on, and a filter has the numbers of a file's rows."""
        if self.test is not None and self.path is None:
            yield Problem("test", f"got {self.test}, expected none without path, which has the rows to train on")
        if self.filter is not None and self.path is None:
            yield Problem("filter", f"got {self.filter}, expected none without path, whose rows it is for")
        if self.test_filter is not None and self.test is None:
            yield Problem("test_filter", f"got {self.test_filter}, expected none without test, whose rows it is for")
        if self.on_error == "skip" and (self.filter or self.test_filter):
            yield Problem("on_error", "got skip, expected stop beside a filter, whose rows have the numbers of the file's")


class HeldOutRows(Section):
    """Rows that are drawn by the seed are the validation, and, where no file has them, the test."""

    type: Literal["rows"] = option("rows", "how validation and test are held out")
    valid_fraction: float = option(0.1, "the fraction of rows used for validation", gt=0, lt=1)
    test_fraction: float | None = option(
        None, "the fraction of rows used for the test; none: 0.1, or nothing where data.test has them", gt=0, lt=1
    )


class MultiLabelOptions(ModelOptions):
    """A weighted sum of the embeddings of a row's features, a layer on top, and a head of all labels."""

    name: Literal["multilabel"] = option("multilabel", "the model to train")
    embedding_dim: int = option(256, "width of embeddings and of what the head reads", ge=1)
    dropout: float = option(0.0, "dropout probability", ge=0, lt=1)


class LabelHead(Section):
    """What the heads of labels have in common."""

    type: Any = option("", _HEAD)
    loss: Literal["bce", "softmax"] = option("bce", "a yes or no for each label, or one choice among all of them")
    label_smoothing: float = option(0.0, "share of a label's 0 or 1 that becomes a half", when={"loss": ("bce",)}, ge=0, le=1)


class SparseLabelHead(LabelHead):
    """What those have in common that give few inputs to a label."""

    fan_in: int = option(64, "inputs of a label, at most model.embedding_dim", ge=1)
    dense_share: float = option(0.02, "share of the labels, the most frequent, that read all inputs", ge=0, le=1)
    optimizer: Literal["adamw", "sgd"] = option(
        "adamw",
        "what trains labels of few inputs: AdamW with all else, or SGD in the backward pass, which keeps no gradient and is not "
        "clipped",
    )
    sgd_learning_rate: float = option(
        0.5, "peak learning rate of that SGD, on the schedule of all", when={"optimizer": ("sgd",)}, gt=0
    )
    sgd_momentum: float = option(
        0.9, "momentum of that SGD; 0 for none, which keeps no state", when={"optimizer": ("sgd",)}, ge=0, lt=1
    )


class RewiredHead(Rewired, SparseLabelHead):
    """What those have in common that learn which inputs."""

    rewire_by: Literal["random", "gradient"] = option(
        "random", "which inputs are new: any, or those with the largest gradients, which takes a dense layer's time"
    )


class GroupSparseHeadOptions(RewiredHead):
    """Groups of labels read the same few inputs."""

    type: Literal["group-sparse"] = option("group-sparse", _HEAD)
    group_size: int = option(16, "labels of a group", ge=1, le=128)
    grouping: Literal["features", "frequency", "random"] = option(
        "features", "which labels share a group: of rows with like features, about as frequent ones, or any"
    )


class DenseHeadOptions(LabelHead):
    """Each label reads all inputs."""

    type: Literal["dense"] = option("dense", _HEAD)


class BottleneckHeadOptions(LabelHead):
    """Each label reads a narrow layer."""

    type: Literal["bottleneck"] = option("bottleneck", _HEAD)
    bottleneck_dim: int = option(64, "width of the layer", ge=1)


class FixedFanInHeadOptions(RewiredHead):
    """Each label reads a few inputs of its own."""

    type: Literal["fixed-fan-in"] = option("fixed-fan-in", _HEAD)


class BlockSparseHeadOptions(SparseLabelHead):
    """Groups of labels read blocks of adjacent inputs, for good."""

    type: Literal["block-sparse"] = option("block-sparse", _HEAD)
    group_size: int = option(16, "labels of a group", ge=1, le=128)
    grouping: Literal["features", "frequency", "random"] = option(
        "features", "which labels share a group: of rows with like features, about as frequent ones, or any"
    )


class MultiLabelTrainingOptions(LoopOptions):
    """How it is trained."""

    batch_size: int = option(256, "rows per step and process", ge=1)
    num_workers: int = option(0, "loader processes", ge=0)
    learning_rate: float = option(2e-3, "peak learning rate of AdamW", gt=0)
    max_epochs: int = option(20, "most passes over the training data", ge=1)
    patience: int = option(3, "validations without a better metric before training stops", ge=1)
    monitor: str = option(
        "p@1",
        "validation metric that selects the checkpoint: p, psp, ndcg, psndcg or recall, @ and any cut-off, or loss",
        expected="p, psp, ndcg, psndcg or recall with a cut-off, for example p@1, or loss",
        pattern=r"^((p|psp|ndcg|psndcg|recall)@[1-9][0-9]{0,3}|loss)$",
    )


class MultiLabelEvaluationOptions(Section):
    """How it is validated and tested."""

    eval_batch_size: int = option(1024, "rows per evaluation step", ge=1)
    propensity_a: float = option(
        0.55, "of how much seldom labels weigh in psp and psndcg: 0.5 for Wikipedia, 0.6 for Amazon", gt=0
    )
    propensity_b: float = option(1.5, "the same: 0.4 for Wikipedia, 2.6 for Amazon", gt=0)
