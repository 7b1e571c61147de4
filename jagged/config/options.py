"""The options of a run, by section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from jagged.artifacts.errors import shown
from jagged.config.section import Problem, Section, option

# Metrics of which less is better, by the name before any cut-off.
_LESS_IS_BETTER = frozenset(("loss", "logloss", "ne", "ne_of_training", "mse", "rmse", "mae"))


class DataOptions(Section):
    """What is trained on."""

    path: str | None = option(None, "events file or folder: text, csv or parquet; none for the built-in sample")
    format: Literal["auto", "text", "csv", "parquet"] = option("auto", "format of the data; auto by file name")
    user_column: str = option("user_id", "column of user ids")
    item_column: str = option("item_id", "column of item ids")
    timestamp_column: str = option("timestamp", "column of times: numbers or timestamps")
    event_columns: tuple[str, ...] = option((), "column of ids that is a side feature of events, may be repeated")
    duplicates: Literal["drop", "keep"] = option("drop", "what becomes of an event with user, item and time of an earlier one")
    min_events: int = option(1, "fewest events of a user and of an item; those with fewer are left out until none is left", ge=1)
    on_error: Literal["stop", "skip"] = option(
        "stop", "at a malformed row stop, or skip it; more than 1 % of the rows always stop"
    )
    items: str | None = option(
        None, "table with a row for each item, whose other columns are side features of the items; none for none"
    )
    items_column: str | None = option(None, "column of items with the items' ids; none for the name that events have")
    item_columns: tuple[str, ...] = option((), "column of items that is a side feature, may be repeated; none for all")
    max_seq_len: int = option(50, "longest history the model sees; older events are left out", ge=1, le=65_536)

    def contradictions(self) -> Iterator[Problem]:
        """Columns are of a table."""
        for name in ("items_column", "item_columns"):
            if self.items is None and (found := getattr(self, name)):
                told = shown(found) if isinstance(found, str) else ", ".join(map(shown, found))
                yield Problem(name, f"got {told} and no items, expected the table that has them")

    def reading(self) -> dict[str, Any]:
        """The options of `jagged.data.read_events`."""
        return self.model_dump(exclude={"path", "items", "items_column", "item_columns", "max_seq_len"})


class LeaveOneOut(Section):
    """The last event of each user is the test, the one before it the validation."""

    type: Literal["leave-one-out"] = option("leave-one-out", "how validation and test are held out")


class GlobalTime(Section):
    """The last events of all are the test, those before them the validation."""

    type: Literal["global-time"] = option("global-time", "how validation and test are held out")
    valid_fraction: float = option(0.1, "the fraction of events used for validation", gt=0, lt=1)
    test_fraction: float = option(0.1, "the last fraction of events, used for the test", gt=0, lt=1)

    def contradictions(self) -> Iterator[Problem]:
        """Both fractions leave something to train on."""
        return leave_something(self.valid_fraction, self.test_fraction)


def leave_something(valid: float, test: float) -> Iterator[Problem]:
    """What is wrong with shares of validation and test that leave nothing to train on."""
    if valid + test >= 1:
        text = f"got {valid}, expected with test_fraction ({test}) less than 1, or nothing is left to train on"
        yield Problem("valid_fraction", text)


class ModelOptions(Section):
    """What a model brings in options: the base of the class that `jagged.models.register` takes.

    A subclass has `name: Literal["mine"] = "mine"` and a field for each option. The model is built with `num_items`,
    `max_seq_len` and these options.
    """

    name: Any = option("", "the model to train")


class SASRecOptions(ModelOptions):
    """A causal transformer over each user's items."""

    name: Literal["sasrec"] = option("sasrec", "the model to train")
    embedding_dim: int = option(256, "width of item embeddings and hidden states", ge=1)
    num_heads: int = option(2, "attention heads; must divide embedding_dim", ge=1)
    num_layers: int = option(2, "transformer blocks", ge=1)
    dropout: float = option(0.5, "dropout probability", ge=0, lt=1)
    num_time_buckets: int | None = option(
        None, "buckets of the time between events, two an octave, whose learned numbers attention adds to its scores", ge=1
    )
    positions: Literal["end", "start"] | None = option(
        "end", "where places are counted from; with start or none a HistoryCache can keep what events become"
    )

    def contradictions(self) -> Iterator[Problem]:
        """The heads share the width."""
        if self.embedding_dim % self.num_heads:
            yield Problem("num_heads", f"got {self.num_heads}, expected a divisor of embedding_dim ({self.embedding_dim})")


class HSTUOptions(ModelOptions):
    """Gated attention without softmax over each user's items."""

    name: Literal["hstu"] = option("hstu", "the model to train")
    embedding_dim: int = option(256, "width of item embeddings and hidden states", ge=1)
    num_heads: int = option(2, "attention heads; must divide embedding_dim unless head_dim is given", ge=1)
    head_dim: int | None = option(None, "width of a head; none for embedding_dim / num_heads", ge=1)
    num_layers: int = option(2, "blocks", ge=1)
    dropout: float = option(0.5, "dropout probability", ge=0, lt=1)
    num_time_buckets: int | None = option(
        None, "buckets of the time between events, two an octave, whose learned numbers attention adds to its scores", ge=1
    )
    positions: Literal["end", "start"] | None = option(
        "end", "where places are counted from; with start or none a HistoryCache can keep what events become"
    )

    def contradictions(self) -> Iterator[Problem]:
        """The heads share the width, if they have none of their own."""
        if self.head_dim is None and self.embedding_dim % self.num_heads:
            yield Problem("num_heads", f"got {self.num_heads}, expected a divisor of embedding_dim ({self.embedding_dim})")


class BERT4RecOptions(ModelOptions):
    """A transformer that finds hidden items from both sides."""

    name: Literal["bert4rec"] = option("bert4rec", "the model to train")
    embedding_dim: int = option(256, "width of item embeddings and hidden states", ge=1)
    num_heads: int = option(2, "attention heads; must divide embedding_dim", ge=1)
    num_layers: int = option(2, "transformer blocks", ge=1)
    dropout: float = option(0.5, "dropout probability", ge=0, lt=1)
    mask_probability: float = option(0.2, "probability that an item is hidden in training", gt=0, le=1)

    def contradictions(self) -> Iterator[Problem]:
        """The heads share the width."""
        if self.embedding_dim % self.num_heads:
            yield Problem("num_heads", f"got {self.num_heads}, expected a divisor of embedding_dim ({self.embedding_dim})")


_HEAD = "loss over all items, sampled ones, buckets of high scores, or all items by few weights of their own"


class CrossEntropyHead(Section):
    """The loss over all items."""

    type: Literal["cross-entropy"] = option("cross-entropy", _HEAD)
    label_smoothing: float = option(0.2, "share of the target's probability spread over all items", ge=0, lt=1)


class SampledHead(Section):
    """The loss over some items.

    `bce` and `gbce` have no correction, without which popular items rank last where the sampler draws them more often: with them
    the sampler is uniform.
    """

    type: Literal["sampled"] = option("sampled", _HEAD)
    sampler: Literal["uniform", "popularity", "in-batch", "mixed"] = option(
        "uniform", "where negatives come from; mixed is in-batch and uniform"
    )
    num_negatives: int = option(256, "negatives drawn", when={"sampler": ("uniform", "popularity", "mixed")}, ge=1)
    negatives_per: Literal["row", "batch"] = option(
        "row", "who has a draw of its own", when={"sampler": ("uniform", "popularity")}
    )
    loss: Literal["softmax", "refined", "bce", "gbce"] = option("softmax", "the loss; refined corrects the negatives alone")
    correction: Literal["auto", "none", "negatives", "both"] = option(
        "auto",
        "whose logits are corrected by how probable they were drawn; auto: as the sampler needs it",
        when={"loss": ("softmax",)},
    )
    gbce_t: float = option(0.75, "0 for bce, 1 for scores as over all items", when={"loss": ("gbce",)}, ge=0, le=1)

    def contradictions(self) -> Iterator[Problem]:
        """What has no correction is drawn uniformly."""
        if self.loss in ("bce", "gbce") and self.sampler != "uniform":
            yield Problem(
                "sampler",
                f"got {self.sampler}, expected uniform with loss {self.loss}, which has no correction, so that popular "
                "items would rank last",
            )


class ScalableHead(Section):
    """The loss over buckets of high scores."""

    type: Literal["scalable"] = option("scalable", _HEAD)
    num_buckets: int = option(128, "number of buckets", ge=1)
    rows_per_bucket: int = option(128, "events in a bucket", ge=1)
    items_per_bucket: int = option(256, "items in a bucket", ge=1)


class Rewired(Section):
    """What heads have in common that learn which inputs groups read."""

    rewire_fraction: float = option(0.1, "share of all inputs of groups that are replaced at a time; 0 for never", ge=0, le=1)
    rewire_every: int = option(100, "steps from one time to the next", ge=1)
    rewire_until: float = option(0.6, "share of the steps of max_epochs after which inputs stay", gt=0, le=1)


class GroupSparseItems(Rewired):
    """The loss over all items, which do not share weights with the item table: groups of them read the same few inputs."""

    type: Literal["group-sparse"] = option("group-sparse", _HEAD)
    fan_in: int = option(32, "inputs of an item, at most model.embedding_dim", ge=1)
    dense_share: float = option(0.02, "share of the items, the most frequent, that read all inputs", ge=0, le=1)
    group_size: int = option(16, "items of a group", ge=1, le=128)
    grouping: Literal["frequency", "random"] = option("random", "which items share a group: about as frequent ones, or any")


TableOptimizer = Literal[
    "adamw", "adagrad", "rowwise-adagrad", "sgd", "sparse-adamw", "rowwise-adamw", "lamb", "rowwise-lamb"
]  # fmt: skip
_ADAGRADS, _ADAMS, _LAMBS = ("adagrad", "rowwise-adagrad"), ("sparse-adamw", "rowwise-adamw"), ("lamb", "rowwise-lamb")
# The next bfloat16 number is a 256th away, so a mean that moves by less than a half of that a step never falls.
_LARGEST_BFLOAT16_BETA = 0.99


class LoopOptions(Section):
    """What `TrainerConfig` and a run's `training` have in common."""

    learning_rate: float = option(1e-3, "peak learning rate of AdamW", gt=0)
    weight_decay: float = option(0.01, "decoupled weight decay of AdamW", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "learning rate after the warm-up: as it is, or down to 0 at the last of max_epochs"
    )
    warmup_steps: int = option(0, "steps of linear learning-rate warm-up", ge=0)
    table_optimizer: TableOptimizer = option(
        "adamw",
        "optimizer of embedding tables; all else has AdamW. But for adamw, a step changes only the rows that it reads or scores",
    )
    table_learning_rate: float | None = option(None, "peak rate of embedding tables; none for learning_rate", gt=0)
    table_weight_decay: float | None = option(
        None,
        "decoupled weight decay of embedding tables, under adamw of those of more than 100 rows; "
        "none for weight_decay, and for 0 under adagrad and rowwise-adagrad",
        when={"table_optimizer": ("adamw", *_ADAMS, *_LAMBS, *_ADAGRADS)},
        ge=0,
    )
    table_beta2: float = option(
        0.999,
        "of embedding tables: how slowly their mean of squared gradients moves",
        when={"table_optimizer": (*_ADAMS, *_LAMBS)},
        ge=0,
        lt=1,
    )
    table_decay_missed_steps: bool = option(
        False,
        "a row that steps did not read decays its moments and weights for each of them when it is read again",
        when={"table_optimizer": _ADAMS},
    )
    table_max_norm: float | None = option(
        None,
        "longest row of embedding tables after its update; none for any",
        when={"table_optimizer": (*_ADAMS, *_LAMBS, *_ADAGRADS, "sgd")},
        gt=0,
    )
    table_states: Literal["float32", "bfloat16"] = option(
        "float32",
        "numbers of the optimizer's states of embedding tables; sums of adagrad in bfloat16 stop growing",
        when={"table_optimizer": (*_ADAMS, *_LAMBS, *_ADAGRADS)},
    )
    table_gradient_bytes: int | None = option(
        None,
        "most bytes of a whole table's gradient, which a head makes over all items or with negatives of each row; a larger one "
        "is made in slices, those beyond seven eighths of it twice where gradients are clipped; none for any",
        when={"table_optimizer": (*_ADAMS, *_LAMBS, *_ADAGRADS, "sgd")},
        ge=1,
    )
    table_plan: Literal["replicated", "planned", "table-wise", "row-wise"] = option(
        "replicated",
        "embedding tables in several processes: all in each, or each row in one of them: as TorchRec's planner chooses, whole "
        "tables, or blocks of rows",
    )
    table_cache_bytes: int | None = option(
        None,
        "bytes of the device for rows of embedding tables, which are then in the host's memory: the rows that a batch needs, and "
        "the most frequent ones; none for whole tables on the device",
        when={"table_optimizer": (*_ADAMS, *_LAMBS, *_ADAGRADS, "sgd")},
        ge=1,
    )
    gradient_clip_norm: float | None = option(1.0, "largest global gradient norm; none for no clipping", gt=0)
    accumulate: int = option(1, "batches whose gradients make one step", ge=1)
    max_epochs: int = option(60, "most passes over the training data", ge=1)
    validate_every: str = option(
        "1 epoch",
        "epochs or steps between validations, as `2 epochs`",
        expected="a number of epochs or steps, for example `2 epochs`",
        pattern=r"^[1-9][0-9]{0,8} (epoch|step)s?$",
    )
    patience: int = option(6, "validations without a better metric before training stops", ge=1)
    monitor: str = option("loss", "validation metric that selects the checkpoint", min_length=1, expected="the name of a metric")
    monitor_goal: Literal["auto", "max", "min"] = option(
        "auto", "whether more or less is better; auto: less for losses and errors, else more"
    )
    cuda_graphs: bool | None = option(
        None,
        "on one GPU, replay steps as CUDA graphs; none: where they can be; true: or refuse",
    )
    release_memory: bool = option(
        False, "on a CPU, give memory of large tensors back at once (glibc): much less of it where sizes vary, and slower steps"
    )
    checkpoint_every: int | None = option(None, "steps between checkpoints, beside those after validations", ge=1)
    checkpoint_seconds: float = option(30.0, "a validation sooner than this after a checkpoint writes none", ge=0)
    hang_seconds: float = option(
        45.0,
        "several processes: one that stands still for longer ends the run; one that compiles or imports has ten times as long",
        gt=0,
    )
    tensorboard: bool = option(True, "write TensorBoard curves where tensorboard is installed")

    def contradictions(self) -> Iterator[Problem]:
        """A mean that is kept in bfloat16 moves."""
        is_mean = self.table_states == "bfloat16" and self.table_optimizer in (*_ADAMS, *_LAMBS)
        if is_mean and self.table_beta2 > _LARGEST_BFLOAT16_BETA:
            yield Problem(
                "table_beta2",
                f"got {self.table_beta2}, expected at most {_LARGEST_BFLOAT16_BETA} with table_states bfloat16, in which a mean "
                "that moves more slowly never falls",
            )


class RunOptions(Section):
    """What `TrainerConfig` and `TrainConfig` have in common."""

    output: str = option("runs/model", "directory to write the run into")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: the GPU where there is one")
    precision: Literal["32-true", "bf16-mixed", "auto"] = option("auto", "auto: bf16-mixed on a GPU, else 32-true")
    seed: int = option(0, "seed of everything random", ge=0, lt=2**63)


class TrainerConfig(LoopOptions, RunOptions):
    """How `jagged.training.Trainer` trains, whatever the model and the data.

    Raises:
        ConfigError: one line per wrong option: its name, what was found, what is expected.
    """

    @property
    def validation_steps(self) -> int | None:
        """Steps between validations; None where they come after epochs."""
        number, unit = self.validate_every.split()
        return int(number) if unit.startswith("step") else None

    @property
    def validation_epochs(self) -> int:
        """Epochs between validations."""
        number, unit = self.validate_every.split()
        return int(number) if unit.startswith("epoch") else 1

    @property
    def less_is_better(self) -> bool:
        """Whether a smaller monitored value is the better one."""
        if self.monitor_goal != "auto":
            return self.monitor_goal == "min"
        return self.monitor.rpartition("/")[2].partition("@")[0] in _LESS_IS_BETTER


class TrainingOptions(LoopOptions):
    """How it is trained."""

    batch_size: int = option(
        256, "users per step and process, of several processes on average", when={"max_tokens": (None,)}, ge=1
    )
    balance: Literal["lengths", "squares"] = option(
        "lengths",
        "several processes: the work of users by which they are dealt: their lengths, or squares of these",
        when={"max_tokens": (None,)},
    )
    max_tokens: int | None = option(None, "events per step and process, instead of batch_size", ge=1)
    stochastic_length: float | None = option(
        None,
        "alpha: in training a history of n events keeps a random N^(alpha / 2) of them with probability 1 - N^alpha / n^2, N "
        "being data.max_seq_len; none for whole histories",
        gt=0,
        le=2,
    )
    num_workers: int = option(0, "loader processes", ge=0)
    monitor: str = option(
        "ndcg@10",
        "validation metric that selects the checkpoint: ndcg, recall, mrr, coverage or surprisal, @ and any cut-off",
        expected="ndcg, recall, mrr, coverage or surprisal with a cut-off, for example ndcg@10",
        pattern=r"^(ndcg|recall|mrr|coverage|surprisal)@[1-9][0-9]{0,8}$",
    )


class EvaluationOptions(Section):
    """How it is validated and tested."""

    validate_users: int | None = option(None, "most users of a validation, drawn by seed; none for all of them", ge=1)
    filter_viewed: bool = option(False, "take items of a user's history out of the ranking")
    eval_batch_size: int = option(1024, "users per evaluation step", ge=1)
