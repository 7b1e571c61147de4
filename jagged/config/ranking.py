"""The options of a run on a table's requests, by section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from jagged.config.options import LoopOptions, ModelOptions, leave_something
from jagged.config.section import Problem, Section, option

#: Of `TableOptions`, what says what columns are: the words of `jagged.data.Schema.with_words`.
WORDS = (
    "label", "candidate", "user", "time", "request", "weight", "event", "ids", "numbers", "unused", "candidate_columns",
    "request_columns",
)  # fmt: skip
#: How `TableOptions.history` says that the table decides.
AUTO = "auto"


class TableOptions(Section):
    """What is trained on."""

    path: str | None = option(None, "table: csv or parquet, a file or a folder; none for the built-in sample")
    format: Literal["auto", "csv", "parquet"] = option("auto", "format of the data; auto by file name")
    delimiter: str | None = option(None, "what separates the fields of csv; none to find it out")
    schema_file: str | None = option(None, "TOML file that says what the columns are; none to infer it")
    label: tuple[str, ...] = option((), "column that is a label, 0 to 1; may be repeated")
    candidate: str | None = option(None, "column of the item that a row is about")
    user: str | None = option(None, "column of the user")
    time: str | None = option(None, "column of the time")
    request: str | None = option(None, "column of the request that rows share")
    weight: str | None = option(None, "column of the row's weight")
    event: str | None = option(None, "column of the event's type")
    ids: tuple[str, ...] = option((), "column of ids, may be repeated")
    numbers: tuple[str, ...] = option((), "column of numbers, may be repeated")
    unused: tuple[str, ...] = option((), "column that is not used, may be repeated")
    candidate_columns: tuple[str, ...] = option(
        (), "feature of which each candidate of a request has its own value, may be repeated"
    )
    request_columns: tuple[str, ...] = option(
        (), "feature of which all candidates of a request have the same value, may be repeated"
    )
    history: tuple[str, ...] = option(
        (AUTO,),
        "what a user did before: `events` for the earlier rows, or a list column of candidates, may be repeated; auto: the "
        "earlier rows where there are user, candidate and time; none for none",
    )
    events: str | None = option(None, "another table that histories are gathered from: csv or parquet, a file or a folder")
    event_schema_file: str | None = option(None, "TOML file that says what the columns of events are; none to infer it")
    event_labels: tuple[str, ...] = option((), "label that earlier events show to later rows, may be repeated")
    event_lists: tuple[str, ...] = option((), "list column of ids that earlier events show, may be repeated")
    history_delay: int = option(0, "how long it takes until an event is known, in the unit of times, microseconds of dates", ge=0)
    max_history: int = option(50, "longest history the model sees; older events are left out", ge=1, le=65_536)
    negatives: int | None = option(None, "of a table without labels: items drawn beside each row's own one", ge=1)
    negatives_by: Literal["uniform", "popularity"] = option(
        "uniform", "how likely an item is drawn: as another one, or as often as training has it"
    )
    negative_rate: float | None = option(
        None, "at which rate rows with the label 0 were kept when the table was made; none where all were", gt=0, le=1
    )
    duplicates: Literal["drop", "keep"] = option("drop", "what becomes of a row that equals an earlier one in all columns")
    min_user_events: int = option(1, "fewest rows of a user; with min_item_events until none is left that has fewer", ge=1)
    min_item_events: int = option(1, "fewest rows of a candidate", ge=1)
    min_count: int = option(1, "ids that training has less often count as never seen", ge=1)
    unseen_share: float = option(
        0.1, "share of the places with an id that training has once, which get the unseen id, so that it is learnt", ge=0, le=1
    )
    on_error: Literal["stop", "skip"] = option(
        "stop", "at a malformed row stop, or skip it; more than 1 % of the rows always stop"
    )

    def contradictions(self) -> Iterator[Problem]:
        """What is for drawn negatives or for events comes with them."""
        if self.negatives is None and self.negatives_by != "uniform":
            yield Problem("negatives_by", f"got {self.negatives_by}, expected data.negatives beside it")
        if self.negatives is not None and self.label:
            yield Problem(
                "negatives", f"got {self.negatives}, expected none beside data.label: they are for tables without labels"
            )
        if self.is_thinned and self.negatives is not None:
            yield Problem(
                "negative_rate", f"got {self.negative_rate}, expected none beside data.negatives: it is for tables with labels"
            )
        if self.event_schema_file is not None and self.events is None:
            yield Problem("event_schema_file", f"got {self.event_schema_file}, expected data.events beside it")
        if "none" in self.history and len(self.history) > 1:
            yield Problem("history", f"got {', '.join(self.history)}, expected none alone")

    @property
    def is_thinned(self) -> bool:
        """Whether rows with the label 0 were left out when the table was made."""
        return self.negative_rate is not None and self.negative_rate < 1

    def reading(self) -> dict[str, Any]:
        """The options of `jagged.data.Dataset.from_table`, without the split's."""
        words = {name: list(of) if isinstance(of, tuple) else of for name in WORDS if (of := getattr(self, name))}
        counts = {"user": self.min_user_events, "item": self.min_item_events}
        return {
            **words,
            "history": [name for name in self.history if name != "none"],
            "format": self.format,
            "delimiter": self.delimiter,
            "schema": self.schema_file,
            "events": self.events,
            "event_schema": self.event_schema_file,
            "event_labels": self.event_labels,
            "event_lists": self.event_lists,
            "history_delay": self.history_delay,
            "duplicates": self.duplicates,
            "min_events": {name: count for name, count in counts.items() if count > 1},
            "on_error": self.on_error,
        }

    def drawing(self) -> dict[str, Any]:
        """The options of `jagged.data.Part.loader` about drawn negatives."""
        return {} if self.negatives is None else {"negatives": self.negatives, "by": self.negatives_by}


class _Shares(Section):
    valid_fraction: float = option(0.1, "the share used for validation", gt=0, lt=1)
    test_fraction: float = option(0.1, "the share used for the test", gt=0, lt=1)

    def contradictions(self) -> Iterator[Problem]:
        """Both leave something to train on."""
        return leave_something(self.valid_fraction, self.test_fraction)

    def splitting(self) -> dict[str, Any]:
        """The options of `jagged.data.Dataset.split`."""
        return {"valid": self.valid_fraction, "test": self.test_fraction}


class ByTime(_Shares):
    """The last rows are the test, those before them the validation."""

    type: Literal["time"] = option("time", "how validation and test are held out")


class ByOrder(_Shares):
    """The last rows of the source are the test, those before them the validation; for a table without times."""

    type: Literal["order"] = option("order", "how validation and test are held out")


class ByUser(_Shares):
    """Some users are the test, others the validation."""

    type: Literal["user"] = option("user", "how validation and test are held out")


class ByColumn(Section):
    """A column says which rows are which part."""

    type: Literal["column"] = option("column", "how validation and test are held out")
    column: str = option("split", "column with train, valid or test in each row", min_length=1)

    def splitting(self) -> dict[str, Any]:
        """The options of `jagged.data.Dataset.split`."""
        return {}


class LastOfUser(Section):
    """The last row of each user is the test, the one before it the validation."""

    type: Literal["leave-one-out"] = option("leave-one-out", "how validation and test are held out")

    def splitting(self) -> dict[str, Any]:
        """The options of `jagged.data.Dataset.split`."""
        return {}


class RequestModelOptions(ModelOptions):
    """What models of requests with candidates have in common."""

    embedding_dim: int = option(16, "width of embedding tables", ge=1)
    dropout: float = option(0.0, "dropout probability", ge=0, lt=1)
    tasks: tuple[str, ...] = option((), "label to learn, may be repeated; all of them where none is named")
    conditional: tuple[str, ...] = option(
        (),
        "a label that can be 1 only where another one is, as `buy=click`; may be repeated",
        expected="two labels, for example buy=click",
    )
    loss: Literal["binary", "focal", "listwise", "pairwise"] = option(
        "binary",
        "loss of each task: of rows, binary cross entropy or focal; or of each request's candidates, listwise or pairwise",
    )
    focal_gamma: float = option(
        2.0, "the larger, the less do rows count that are predicted well", when={"loss": ("focal",)}, ge=0
    )
    focal_alpha: float | None = option(
        None, "what a positive counts, a negative the rest to 1; none for 1 of both", when={"loss": ("focal",)}, ge=0, le=1
    )
    implied: bool = option(False, "count a row with such a label 1 as one with the other 1, too, in place of an error")

    def contradictions(self) -> Iterator[Problem]:
        """Conditions are pairs, and every layer has a width."""
        for name, widths in self:
            if name.endswith("_sizes") and (not widths or min(widths) < 1):
                yield Problem(name, f"got {list(widths)}, expected one width or several, each at least 1")
        for pair in self.conditional:
            if pair.count("=") != 1 or not all(pair.split("=")):
                yield Problem("conditional", f"got {pair!r}, expected two labels, for example buy=click")
        if self.conditional and self.loss in ("listwise", "pairwise"):
            yield Problem("loss", f"got {self.loss}, expected binary or focal beside conditional, which multiplies probabilities")

    def arguments(self, max_history: int) -> dict[str, Any]:
        """The options of `of` of the class of `jagged.models` that has the name.

        Args:
            max_history: the longest history that batches have.
        """
        values = self.model_dump(exclude={"name"})
        pairs = (pair.split("=") for pair in self.conditional)
        return {
            **{name: list(of) if isinstance(of, tuple) else of for name, of in values.items()},
            "tasks": list(self.tasks) or None,
            "conditional": {child.strip(): parent.strip() for child, parent in pairs},
        }


class RankingOptions(RequestModelOptions):
    """The general model of requests with candidates."""

    name: Literal["ranking"] = option("ranking", "the model to train")
    embedding_dim: int = option(16, "width of embedding tables and of the history", ge=1)
    cross: Literal["dcn", "dot", "none"] = option("dcn", "how features are crossed")
    cross_layers: int = option(3, "layers of the cross", when={"cross": ("dcn",)}, ge=1)
    cross_rank: int | None = option(None, "rank of the cross; none for full", when={"cross": ("dcn",)}, ge=1)
    num_layers: int = option(1, "transformer blocks on the history; 0 for none", ge=0)
    num_heads: int = option(2, "attention heads; must divide embedding_dim", ge=1)
    num_time_buckets: int | None = option(64, "buckets of the time since an event; none for none", ge=1)
    recompute: bool = option(False, "activation checkpointing: histories are encoded again in the backward pass")
    layer_sizes: tuple[int, ...] = option(
        (128, 64), "widths: where request and candidate meet, then of each task's hidden layers; may be repeated"
    )

    def contradictions(self) -> Iterator[Problem]:
        """The heads share the width."""
        if self.embedding_dim % self.num_heads:
            yield Problem("num_heads", f"got {self.num_heads}, expected a divisor of embedding_dim ({self.embedding_dim})")
        yield from super().contradictions()

    def arguments(self, max_history: int) -> dict[str, Any]:
        """With the longest history, of which each place has a vector."""
        found = super().arguments(max_history)
        cross = None if found.get("cross") == "none" else found.get("cross")
        return {**found, "cross": cross, "max_history": max_history}


class MixtureOptions(RankingOptions):
    """The general model with experts that its tasks share."""

    name: Literal["mmoe"] = option("mmoe", "the model to train")  # type: ignore[assignment]
    cross: Literal["dcn", "dot", "none"] = option("none", "how features are crossed")
    experts: Literal["mmoe", "ple"] = option("mmoe", "experts of all tasks, or layers of experts of each task and of all")
    num_experts: int = option(4, "experts; of ple those of each task, and the shared ones", ge=1)
    expert_sizes: tuple[int, ...] = option((64,), "widths of an expert's layers; may be repeated")
    expert_layers: int = option(1, "layers of experts", when={"experts": ("ple",)}, ge=1)


class DLRMHSTUOptions(RankingOptions):
    """DLRM-HSTU: candidates are targets behind the history, in gated attention without softmax."""

    name: Literal["dlrm-hstu"] = option("dlrm-hstu", "the model to train")  # type: ignore[assignment]
    cross: Literal["dcn", "dot", "none"] = option("none", "how features are crossed")
    num_layers: int = option(2, "blocks over the history and the candidates behind it", ge=1)
    num_time_buckets: int | None = option(64, "buckets of the time between events; none for none", ge=1)


class DINOptions(RequestModelOptions):
    """DIN: each candidate sums its history, every event by a weight that a small network makes of both."""

    name: Literal["din"] = option("din", "the model to train")
    embedding_dim: int = option(16, "width of embedding tables and of the history", ge=1)
    attention_sizes: tuple[int, ...] = option(
        (64, 16), "widths of the hidden layers of the network that weighs an event for a candidate; may be repeated"
    )
    activation: Literal["silu", "relu", "gelu"] = option("silu", "what follows these layers")
    recompute: bool = option(False, "activation checkpointing: histories are encoded again in the backward pass")
    layer_sizes: tuple[int, ...] = option(
        (128, 64), "widths: where request and candidate meet, then of each task's hidden layers; may be repeated"
    )


class DLRMOptions(RequestModelOptions):
    """DLRM: products of pairs of features, and a perceptron over them."""

    name: Literal["dlrm"] = option("dlrm", "the model to train")
    bottom_sizes: tuple[int, ...] = option((64,), "widths of the hidden layers on numbers; may be repeated")
    top_sizes: tuple[int, ...] = option((128, 64), "widths of the hidden layers over products; may be repeated")


class DCNv2Options(RequestModelOptions):
    """DCN V2: crosses of all features of a row, and a perceptron."""

    name: Literal["dcnv2"] = option("dcnv2", "the model to train")
    cross_layers: int = option(3, "layers of the cross", ge=1)
    cross_rank: int | None = option(None, "rank of the cross; none for full", ge=1)
    cross_experts: int | None = option(None, "experts of low rank in each layer of the cross; none for no mixture", ge=1)
    structure: Literal["stacked", "parallel"] = option("stacked", "the perceptron behind the cross, or beside it")
    layer_sizes: tuple[int, ...] = option((128, 64), "widths of the perceptron's layers; may be repeated")

    def contradictions(self) -> Iterator[Problem]:
        """Experts have a low rank."""
        yield from super().contradictions()
        if self.cross_experts is not None and self.cross_rank is None:
            yield Problem("cross_experts", f"got {self.cross_experts}, expected model.cross_rank beside it")


class WukongOptions(RequestModelOptions):
    """Wukong: layers of factorization machines over a token of each feature."""

    name: Literal["wukong"] = option("wukong", "the model to train")
    num_layers: int = option(2, "layers", ge=1)
    num_fm_tokens: int = option(8, "tokens of products in each layer", ge=1)
    num_linear_tokens: int = option(8, "tokens of linear combinations in each layer", ge=1)
    rank: int = option(8, "combinations of its tokens that each token meets", ge=1)
    hidden_sizes: tuple[int, ...] = option((64,), "widths of the hidden layers on products in each layer; may be repeated")
    top_sizes: tuple[int, ...] = option((128, 64), "widths of the hidden layers over tokens; may be repeated")


class RankingTrainingOptions(LoopOptions):
    """How it is trained."""

    batch_size: int = option(
        256, "requests per step and process, of several processes on average", when={"max_tokens": (None,)}, ge=1
    )
    balance: Literal["lengths", "squares"] = option(
        "lengths",
        "several processes: the work of requests by which they are dealt: their lengths, or squares of these",
        when={"max_tokens": (None,)},
    )
    max_tokens: int | None = option(None, "events of histories and candidates per step and process, instead of batch_size", ge=1)
    num_workers: int = option(0, "loader processes", ge=0)
    max_epochs: int = option(20, "most passes over the training data", ge=1)
    patience: int = option(2, "validations without a better metric before training stops", ge=1)


class RankingEvaluationOptions(Section):
    """How it is validated and tested."""

    eval_batch_size: int = option(1024, "requests per evaluation step", ge=1)
