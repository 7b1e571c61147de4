"""A head for very many labels, of which a row has a few: a dense layer for the frequent, groups of few weights for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.backward_updates import checked_options, load_state
from jagged.modules.heads import HeadOutput
from jagged.modules.jagged_module import JaggedModule
from jagged.modules.label_groups import LabelGroups, group_at_random, group_by_embedding, group_by_frequency
from jagged.ops import (
    BagLayout,
    GroupSparseOptimizer,
    catalogue_topk,
    embedding_bags,
    group_sparse_bce,
    group_sparse_cross_entropy,
    group_sparse_linear,
    group_sparse_topk,
    linear_bce,
    linear_cross_entropy,
    sample_of_row,
    trust_values,
    validate_ids,
    validate_offsets,
    values_are_trusted,
)

_IGNORED = -100
_OPTIMIZER_OPTIONS = ("learning_rate", "momentum", "weight_decay", "stochastic_rounding", "state_dtype")
# A slot that was there from the start.
_ALWAYS = -(2**30)
# Numbers that are drawn or multiplied at once where slots are given new inputs.
_PIECE_ELEMENTS = 2**23
# Flags that are counted at once.
_COUNTED_ELEMENTS = 2**20
_MOST_LABELS = 2**31 - 1


class GroupSparseHead(JaggedModule):
    """Binary or softmax cross-entropy over very many labels, with few weights each.

    The most frequent labels have a dense layer. The others lie in groups; the labels of a group read the same `fan_in` of the
    features, with weights of their own (`jagged.ops.group_sparse_bce`). Which ones a group reads is random at first, and learned
    by `rewire`. Users give and get their own label ids. A label's bias starts at its log-odds in training, `log((n + 0.5) / (N -
    n + 0.5))` for a label of n of N rows: at a bias of 0, a million labels would start with a loss of 700,000. A label that no
    row has starts there too, at -log(2 N + 1), and is scored by what training makes of it as a negative.

    With `loss="softmax"` all labels share one probability, as for `jagged.ops.group_sparse_cross_entropy`: a row's positives have
    even parts of it, and rows without any do not count. Biases then start at the logarithm of a label's share of all positives,
    `log((n + 0.5) / sum of n + 0.5 over labels)`.

    Args:
        input_dim: width of the features.
        label_counts: `[num_labels]`, int64: in how many rows of training each label is.
        num_rows: rows of training.
        fan_in: features that a group reads, from 1 to the width that the tail reads.
        group_size: labels of a group, at least 1.
        grouping: "random", "frequency", embeddings `[num_labels, E]` of the labels, of which like ones are grouped, or the groups
            themselves (`LabelGroups`), of all labels without a dense layer.
        head: labels that have a dense layer: how many, or as a float in [0, 1] which share of all; the most frequent ones. 1.0:
            all of them, and no group.
        head_dim, tail_dim: width of a linear projection, which the dense layer and the groups read; None: the features. With
            all labels in the dense layer, `head_dim` is the width of a bottleneck.
        adjacent: groups read whole blocks of `fan_in` adjacent features, for good: a block-sparse layer. `rewire` refuses it.
        loss: "bce", a yes or no for each label, or "softmax", one choice among all.
        label_smoothing: as for `jagged.ops.group_sparse_bce`; "softmax" has none.
        optimizer: "sgd": the backward pass updates the groups' `weight` and `bias` (`jagged.ops.GroupSparseOptimizer`), which get
            no gradients; None: they have gradients. The dense layer and projections have gradients either way.
        optimizer_options: `learning_rate`, and any of `momentum`, `weight_decay`, `stochastic_rounding`, `state_dtype`.
        seed: of groups, inputs and `rewire`.
        device, dtype: of parameters. On the meta device nothing is allocated; `to_empty` and `reset_parameters` make the same
            module of it as another device would have.

    Attributes:
        labels: `[num_labels]`, int32, the label at each place: those with a dense layer, then the groups'.
        places: `[num_labels]`, int32, the place of each label.
        supports: `[K, fan_in]`, int32, the features that each group reads, different ones; `[K]`, of adjacent ones the first.
        group_offsets: `[K + 1]`, the first place of each group, counted from the first one without a dense layer.
        born: `[K, fan_in]`, int32, the step at which each slot of a group got its input; `[0]` of adjacent ones.
        weight, bias, head_weight, head_bias: parameters of groups `[n, fan_in]`, `[n]`, and of the dense layer.
        optimizer: what updates `weight` and `bias` in the backward pass, or None; a schedule fills its `learning_rate`.

    Raises:
        ValueError: numbers out of range, counts that do not fit, options without an optimizer or unknown ones.
        RuntimeError: with an optimizer, a call that records a gradient in one of several processes, whose weights would differ.

    Shape:
        features: `[B, input_dim]`; positives: JaggedTensor of label ids, those of each row; row_mask: `[B]`, bool, rows that
        count. Returns the loss, of "bce" summed over labels, averaged over rows, of "softmax" over those that have positives;
        NaN where an unchecked label is none.

    Source:
        HASTE: group-shared fixed fan-in with a dense head, trained with dynamic sparsity.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import GroupSparseHead
        >>> head = GroupSparseHead(16, torch.tensor([9, 2, 2, 1, 0]), num_rows=10, fan_in=4, group_size=2, head=1)
        >>> positives = JaggedTensor(values=torch.tensor([0, 3, 0]), offsets=torch.tensor([0, 2, 3]))
        >>> loss = head(torch.randn(2, 16), positives)
        >>> scores, labels = head.topk(torch.randn(2, 16), k=3)
        >>> labels.shape
        torch.Size([2, 3])
    """

    labels: Tensor
    places: Tensor
    supports: Tensor
    group_offsets: Tensor
    born: Tensor
    optimizer: GroupSparseOptimizer | None
    shown = ("num_labels", "num_head_labels", "num_groups", "fan_in", "loss", "label_smoothing")

    def __init__(
        self,
        input_dim: int,
        label_counts: Tensor,
        num_rows: int,
        *,
        fan_in: int,
        group_size: int = 32,
        grouping: Literal["random", "frequency"] | Tensor | LabelGroups = "random",
        head: int | float = 0,
        head_dim: int | None = None,
        tail_dim: int | None = None,
        adjacent: bool = False,
        loss: Literal["bce", "softmax"] = "bce",
        label_smoothing: float = 0.0,
        optimizer: Literal["sgd"] | None = None,
        optimizer_options: dict[str, Any] | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.get_default_device() if device is None else torch.device(device)
        # Groups are made of numbers, which the meta device has not.
        with torch.device("cpu"):
            counts = _checked_counts(label_counts, num_rows)
        self.input_dim, self.num_labels, self.fan_in = input_dim, counts.shape[0], fan_in
        self.label_smoothing, self.seed = label_smoothing, seed
        self.num_head_labels, self.adjacent = _head_labels(head, self.num_labels), adjacent
        width = input_dim if tail_dim is None else tail_dim
        if not 1 <= fan_in <= width:
            raise ValueError(f"fan_in: expected 1 to {width}, the width that groups read, got {fan_in}")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1], got {label_smoothing}")
        if loss not in ("bce", "softmax"):
            raise ValueError(f"loss: got {loss!r}, expected 'bce' or 'softmax'")
        if loss == "softmax" and label_smoothing:
            raise ValueError(f"label_smoothing: expected 0 for loss='softmax', which has none, got {label_smoothing}")
        if optimizer not in (None, "sgd"):
            raise ValueError(f"optimizer: got {optimizer!r}, expected 'sgd' or None")
        self._optimizer_options = checked_options(optimizer, optimizer_options, _OPTIMIZER_OPTIONS)
        with torch.device("cpu"):
            by_frequency = counts.argsort(descending=True, stable=True)
            frequent, others = by_frequency.split([self.num_head_labels, self.num_labels - self.num_head_labels])
            groups = _groups(others.sort().values, counts, group_size, grouping, seed)
            labels = torch.cat([frequent, groups.labels])
            at_first = (counts.double() + 0.5).log()
            at_first -= (num_rows - counts.double() + 0.5).log() if loss == "bce" else at_first.logsumexp(0)
        self.loss: Literal["bce", "softmax"] = loss
        self.num_groups, self.tail_dim = groups.offsets.shape[0] - 1, width
        self.register_buffer("labels", labels.to(device, torch.int32))
        self.register_buffer("places", labels.argsort().to(device, torch.int32))
        self.register_buffer("group_offsets", groups.offsets.to(device))
        slots = (self.num_groups, fan_in)
        self.register_buffer("supports", torch.empty(slots[:1] if adjacent else slots, dtype=torch.int32, device=device))
        self.register_buffer("born", torch.empty(0 if adjacent else slots, dtype=torch.int32, device=device))
        # What `reset_parameters` takes, by label, where no device and no `torch.load` moves it; and the groups of a module on the
        # meta device, until it has memory.
        self._first_biases = at_first.float().numpy()
        self._groups = (labels.numpy(), groups.offsets.numpy()) if device.type == "meta" else None
        of_floats: dict[str, Any] = {"device": device, "dtype": dtype}
        self.head_projection = (
            nn.Linear(input_dim, head_dim, **of_floats) if head_dim is not None and self.num_head_labels else nn.Identity()
        )
        self.tail_projection = nn.Identity() if tail_dim is None else nn.Linear(input_dim, tail_dim, **of_floats)
        head_width = self.head_projection.out_features if isinstance(self.head_projection, nn.Linear) else input_dim
        self.head_weight = nn.Parameter(torch.empty(self.num_head_labels, head_width, **of_floats))
        self.head_bias = nn.Parameter(torch.empty(self.num_head_labels, **of_floats))
        # Of the dense layer's weights and biases, as tables.
        widths = (head_width, 1) if self.num_head_labels else ()
        self._layouts = tuple(BagLayout((self.num_head_labels,), (table_width,)) for table_width in widths)
        self.weight = nn.Parameter(torch.empty(self.num_labels - self.num_head_labels, fan_in, **of_floats))
        self.bias = nn.Parameter(torch.empty(self.num_labels - self.num_head_labels, **of_floats))
        self.optimizer = self._new_optimizer()
        self.reset_parameters()

    @classmethod
    def shaped(
        cls, input_dim: int, num_labels: int, num_rows: int, *, num_head_labels: int, num_groups: int, **options: Any
    ) -> GroupSparseHead:
        """Return a head of these sizes, whose labels, groups, inputs and weights are to be loaded.

        Args:
            input_dim, num_rows: as of the class.
            num_labels, num_head_labels: labels, and those with a dense layer.
            num_groups: groups of the others.
            options: others of the class.
        """
        with torch.device("cpu"):
            tail = torch.arange(num_head_labels, num_labels)
            offsets = torch.arange(num_groups + 1) * (num_labels - num_head_labels) // max(num_groups, 1)
            counts = torch.zeros(num_labels, dtype=torch.int64)
        return cls(input_dim, counts, num_rows, grouping=LabelGroups(tail, offsets), head=num_head_labels, **options)

    def reset_parameters(self) -> None:
        """Draw weights and the inputs of groups anew; biases are what they were at first."""
        super().reset_parameters()
        if self.labels.is_meta:
            return
        with torch.no_grad(), torch.device("cpu"):
            if self._groups is not None:
                labels, offsets = (torch.from_numpy(array) for array in self._groups)
                for buffer, values in ((self.labels, labels), (self.places, labels.argsort()), (self.group_offsets, offsets)):
                    buffer.copy_(values)
                self._groups = None
            for weight in (self.head_weight, self.weight):
                nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
            at_first = torch.from_numpy(self._first_biases)[self.labels.cpu()]
            self.head_bias.copy_(at_first[: self.num_head_labels])
            self.bias.copy_(at_first[self.num_head_labels :])
            generator = torch.Generator().manual_seed(self.seed)
            for some in _pieces(self.num_groups, self.tail_dim):
                if self.adjacent:
                    blocks = torch.randint(self.tail_dim // self.fan_in, (some.stop - some.start,), generator=generator)
                    inputs = blocks * self.fan_in
                else:
                    keys = torch.rand(some.stop - some.start, self.tail_dim, generator=generator)
                    inputs = keys.topk(self.fan_in).indices.sort(1).values
                self.supports[some] = inputs.to(self.supports)
            self.born.fill_(_ALWAYS)
            if self.optimizer is not None:
                self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> GroupSparseOptimizer | None:
        if self._optimizer_options is None:
            return None
        return GroupSparseOptimizer(self.weight.detach(), self.bias.detach(), **self._optimizer_options)

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """The optimizer's tensors, for a checkpoint beside the state dict; none without one."""
        return {} if self.optimizer is None else self.optimizer.state()

    def load_optimizer_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Copy what `optimizer_state_dict` gave into the optimizer.

        Raises:
            ValueError: other names or shapes than this head's.
        """
        load_state(self.optimizer_state_dict(), state_dict, "head")

    def _apply(self, fn: Any, recurse: bool = True) -> GroupSparseHead:
        super()._apply(fn, recurse)
        if self.optimizer is not None and self.optimizer.step.device != self.weight.device:
            # Of the meta device there is nothing to move.
            was_meta = self.optimizer.step.is_meta
            self.optimizer = self._new_optimizer() if was_meta else self.optimizer.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        """Show the options."""
        return super().extra_repr() + ("" if self.optimizer is None else ", optimizer='sgd'")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not self.labels.is_meta:
            # Those that were loaded.
            self._groups = None

    def forward(self, features: Tensor, positives: JaggedTensor, row_mask: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar."""
        labels, offsets = positives.values(), positives.offsets()
        if labels.is_cpu and not values_are_trusted():
            validate_offsets(offsets, labels.shape[0])
            validate_ids(labels, self.num_labels, name="positives")
        # Elsewhere nothing waits to look: a label that is none makes the loss NaN, and is not taken for another one.
        is_wrong = ((labels < 0) | (labels >= self.num_labels)).any()
        places = self.places[labels.clamp(0, self.num_labels - 1)]
        # What groups read is this module's own, and need not be checked in each call.
        with nullcontext() if torch.compiler.is_compiling() else trust_values():
            if self.loss == "softmax":
                lse, target, counts = self._parts_of_softmax(features, places, offsets, row_mask)
                counted = counts > 0 if row_mask is None else (counts > 0) & row_mask
                losses = torch.where(counted, lse - target / counts.clamp(min=1), 0)
                loss = losses.sum() / counted.sum().clamp(min=1)
            else:
                loss = self._binary(features, places, offsets, row_mask)
        return self._no_number_if(is_wrong, loss)

    def _no_number_if(self, is_wrong: Tensor, loss: Tensor) -> Tensor:
        """Return the loss, NaN if there is a label that is none; so is its gradient where an update would learn from it."""
        if self._updates() is None:
            return loss + torch.where(is_wrong, torch.nan, 0.0).to(loss.dtype)
        return loss * torch.where(is_wrong, torch.nan, 1.0).to(loss.dtype)

    def target_loss(self, features: Tensor, targets: Tensor) -> HeadOutput:
        """Return the softmax cross-entropy of rows that have one label each, its mean, and the labels' scores `[B]`.

        Args:
            features: `[B, input_dim]`.
            targets: `[B]`, int32 or int64, label ids; rows with -100 do not count, and have a score of 0.

        Raises:
            ValueError: a head of another loss than "softmax", or, where values are checked, a target that is no label.
        """
        if self.loss != "softmax":
            raise ValueError(
                f"loss: got a head of {self.loss!r}, expected one of 'softmax', which has one choice among all labels"
            )
        counted = targets != _IGNORED
        if targets.is_cpu and not values_are_trusted():
            validate_ids(targets.masked_fill(~counted, 0), self.num_labels, name="targets")
        wrong = counted & ((targets < 0) | (targets >= self.num_labels))
        places = self.places[targets.clamp(0, self.num_labels - 1)]
        offsets = torch.arange(targets.shape[0] + 1, device=targets.device)
        with nullcontext() if torch.compiler.is_compiling() else trust_values():
            ones = torch.ones_like(places)
            lse, target, _ = self._parts_of_softmax(features, places, offsets, counted, (ones > 0, ones))
        loss = torch.where(counted, lse - target, 0).sum() / counted.sum().clamp(min=1)
        return HeadOutput(self._no_number_if(wrong.any(), loss), torch.where(counted, target, 0).detach())

    def _updates(self) -> GroupSparseOptimizer | None:
        """Return the optimizer if this call is to learn by it."""
        optimizer = self.optimizer if self.weight.requires_grad and torch.is_grad_enabled() else None
        if optimizer is not None and _num_processes() > 1:
            raise RuntimeError(
                f"optimizer: a head's own updates by the gradients of one process, got {_num_processes()} processes, which would "
                "learn apart; make the head without an optimizer"
            )
        return optimizer

    def _binary(self, features: Tensor, places: Tensor, offsets: Tensor, row_mask: Tensor | None) -> Tensor:
        """Return the binary cross-entropy of all labels."""
        is_frequent = places < self.num_head_labels
        options: dict[str, Any] = {"row_mask": row_mask, "label_smoothing": self.label_smoothing, "ignore_index": _IGNORED}
        loss = group_sparse_bce(
            self.tail_projection(features),
            self.weight,
            self.supports,
            self.group_offsets,
            torch.where(is_frequent, _IGNORED, places - self.num_head_labels),
            offsets,
            self.bias,
            optimizer=self._updates(),
            **options,
        )
        if self.num_head_labels:
            of_head = torch.where(is_frequent, places, _IGNORED)
            hidden = self.head_projection(features)
            loss = loss + linear_bce(hidden, self.head_weight, of_head, offsets, self.head_bias, **options)
        return loss

    def _parts_of_softmax(
        self,
        features: Tensor,
        places: Tensor,
        offsets: Tensor,
        row_mask: Tensor | None,
        distinct: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return of each row, `[B]`, the log-sum-exp of all logits, the sum of its positives', and how many of these it has.

        `distinct` is what `_distinct` finds, where it is known.
        """
        is_first, counts = _distinct(places, offsets, self.num_labels) if distinct is None else distinct
        is_frequent = places < self.num_head_labels
        _, lse, target = group_sparse_cross_entropy(
            self.tail_projection(features),
            self.weight,
            self.supports,
            self.group_offsets,
            torch.where(is_frequent, _IGNORED, places - self.num_head_labels),
            offsets,
            self.bias,
            row_mask=row_mask,
            ignore_index=_IGNORED,
            optimizer=self._updates(),
            return_parts=True,
        )
        if not self.num_head_labels:
            return lse, target, counts
        hidden = self.head_projection(features)
        nothing = places.new_zeros(hidden.shape[0])
        if row_mask is not None:
            nothing, hidden = nothing.masked_fill(~row_mask, _IGNORED), torch.where(row_mask[:, None], hidden, 0)
        # Of the dense layer's loss the log-sum-exp alone, whatever the target.
        _, of_head = linear_cross_entropy(
            hidden, self.head_weight, nothing, bias=self.head_bias, ignore_index=_IGNORED, reduction="none", return_lse=True
        )
        # The sum of products with some labels' weights is the product with the sum of these.
        weight, hidden = _as_in_products(self.head_weight), _as_in_products(hidden).to(lse.dtype)
        given: dict[str, Any] = {
            "indices": torch.where(is_frequent, places, 0),
            "offsets": offsets,
            "per_sample_weights": (is_first & is_frequent).to(lse.dtype),
            "output_dtype": lse.dtype,
        }
        of_weights, of_biases = (
            embedding_bags(table, layout, **given)
            for table, layout in zip((weight.flatten(), self.head_bias), self._layouts, strict=True)
        )
        return torch.logaddexp(lse, of_head), target + (hidden * of_weights).sum(1) + of_biases[:, 0], counts

    @torch.no_grad()
    def topk(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best labels of each row: their logits `[B, k]`, at least float32, and the labels `[B, k]`, int64.

        Where there are fewer than k labels a row ends in scores -inf and labels -1.
        """
        with trust_values():
            hidden = self.tail_projection(features).to(self.weight.dtype)
            scores, places = group_sparse_topk(hidden, self.weight, self.supports, self.group_offsets, k, self.bias)
            places = torch.where(places < 0, -1, places + self.num_head_labels)
            if self.num_head_labels:
                hidden = self.head_projection(features).to(self.head_weight.dtype)
                best, of_head = catalogue_topk(hidden, self.head_weight, k, bias=self.head_bias)
                scores, order = torch.cat([best, scores], 1).topk(k, 1)
                places = torch.cat([of_head, places], 1).gather(1, order)
        return scores, torch.where(places < 0, -1, self.labels[places.clamp(min=0)].long())

    @torch.no_grad()
    def dense(self) -> tuple[Tensor, Tensor]:
        """Return the linear layer that scores as this head, by label: weights `[num_labels, input_dim]`, biases `[num_labels]`.

        It takes the memory of such a layer.
        """
        weight = self.weight.new_zeros(self.num_labels, self.input_dim)
        bias = self.bias.new_zeros(self.num_labels)
        frequent, others = self.labels.tensor_split([self.num_head_labels])
        groups = self._group_of_label()
        step = max(1, _PIECE_ELEMENTS // max(self.fan_in, self.tail_dim))
        for begin in range(0, self.weight.shape[0], step):
            some = slice(begin, begin + step)
            of_tail = weight.new_zeros(groups[some].shape[0], self.tail_dim)
            of_tail.scatter_(1, self._inputs_of(groups[some]), self.weight[some])
            labels = others[some]
            weight[labels], bias[labels] = _behind(self.tail_projection, of_tail, self.bias[some])
        weight[frequent], bias[frequent] = _behind(self.head_projection, self.head_weight, self.head_bias)
        return weight, bias

    def _inputs_of(self, groups: Tensor) -> Tensor:
        """Return the features that some groups read, `[n, fan_in]`, int64."""
        inputs = self.supports[groups].long()
        return inputs[:, None] + torch.arange(self.fan_in, device=inputs.device) if self.adjacent else inputs

    @torch.no_grad()
    def probabilities(self, features: Tensor, scores: Tensor) -> Tensor:
        """Return the probabilities of `scores` `[B, k]` of `topk`: of "bce" each label's own, of "softmax" its part of one."""
        if self.loss == "bce":
            return scores.sigmoid()
        nothing = self.places[:0], self.places.new_zeros(features.shape[0] + 1)
        with trust_values():
            lse = self._parts_of_softmax(features.to(self.weight.dtype), *nothing, None)[0]
        return (scores - lse[:, None]).exp()

    @torch.no_grad()
    def rewire(
        self,
        fraction: float,
        *,
        step: int,
        protected: int = 0,
        by: Literal["random", "gradient"] = "random",
        batch: tuple[Tensor, JaggedTensor] | None = None,
        in_each_group: bool = False,
        new_weights: Literal["zero", "uniform"] = "zero",
        optimizer: torch.optim.Optimizer | None = None,
    ) -> int:
        """Give slots that matter little new inputs; everything is changed in place.

        A slot's score is the mean magnitude of its weights over its group's labels. The `round(fraction * slots)` smallest get an
        input that their group neither has nor has just lost; fewer do where fewer are old enough or inputs are left. In a
        `torch.distributed` group every process must call: gradients are those of all batches together, so that all with equal
        weights get the same.

        Args:
            fraction: of all slots, in [0, 1].
            step: of training, which slots are young by, and part of the seed.
            protected: slots that got their input fewer steps ago keep it: new weights start small.
            by: "random", or "gradient": the inputs whose weights would have gradients of the head's loss of the largest
                magnitude, on the mean of the group's labels, in `batch`.
            batch: features and positives as `forward` takes them, for "gradient".
            in_each_group: the fraction of each group's slots, in place of all slots'.
            new_weights: "zero", or "uniform" on +-1 / sqrt(fan_in).
            optimizer: whose state for these weights becomes zero, as far as it has their shape; so does that of the head's own.

        Returns:
            How many slots have a new input.

        Raises:
            ValueError: numbers out of range, "gradient" without a batch, a head of adjacent features.
        """
        if self.adjacent:
            raise ValueError("adjacent: got True, expected a head whose groups may read any features; make it without")
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction: expected a number in [0, 1], got {fraction}")
        if by not in ("random", "gradient"):
            raise ValueError(f"by: got {by!r}, expected 'random' or 'gradient'")
        if new_weights not in ("zero", "uniform"):
            raise ValueError(f"new_weights: got {new_weights!r}, expected 'zero' or 'uniform'")
        if by == "gradient" and batch is None:
            raise ValueError("batch: expected features and positives, which by='gradient' takes gradients of, got None")
        of_rows = self._rows_of_softmax(*batch) if by == "gradient" and batch is not None and self.loss == "softmax" else None
        lost = self._lost(fraction, step, protected, in_each_group)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        done = torch.zeros((), dtype=torch.int64, device=lost.device)
        for some in _pieces(self.num_groups, self.tail_dim):
            here = lost[some]
            if by == "random":
                keys = torch.rand(here.shape[0], self.tail_dim, generator=generator).to(self.supports.device)
            else:
                assert batch is not None
                keys = self._gradients(some, *batch, of_rows)
            # A group's own inputs, old ones and those that it loses, come last; so many are left as the rest.
            keys.scatter_(1, self.supports[some].long(), -torch.inf)
            new = keys.topk(min(self.fan_in, self.tail_dim), 1)
            # The n-th slot that is lost gets the n-th best input, unless there is none.
            rank = (here.cumsum(1) - 1).clamp_(min=0)
            here &= new.values.gather(1, rank) > -torch.inf
            self.supports[some] = torch.where(here, new.indices.gather(1, rank).to(torch.int32), self.supports[some])
            done += here.sum()
        self.born.masked_fill_(lost, step)
        states = [] if optimizer is None else list(optimizer.state.get(self.weight, {}).values())
        states += self.optimizer_state_dict().values()
        states = [state for state in states if isinstance(state, Tensor) and state.shape == self.weight.shape]
        for groups, labels, offsets in self._pieces_of_labels():
            of_labels = lost[groups].repeat_interleave(offsets.diff(), 0, output_size=labels.stop - labels.start)
            for tensor in (self.weight, *states):
                tensor[labels].masked_fill_(of_labels, 0)
            if new_weights == "uniform":
                drawn = (torch.rand(int(of_labels.sum()), generator=generator) * 2 - 1) * self.fan_in**-0.5
                self.weight[labels].masked_scatter_(of_labels, drawn.to(self.weight))
        return int(done)

    def _lost(self, fraction: float, step: int, protected: int, in_each_group: bool) -> Tensor:
        """Return which slots `[K, fan_in]` get another input: the smallest scores among those that are old enough."""
        scores = self.weight.new_empty(self.num_groups, self.fan_in, dtype=torch.float32)
        for groups, labels, offsets in self._pieces_of_labels():
            means = _means(self.weight[labels].abs().float(), offsets)
            # A group without labels has no scores, nor has what is no number.
            is_free = (self.born[groups] <= step - protected) & (offsets.diff() > 0)[:, None] & (means < torch.inf)
            scores[groups] = means.masked_fill_(~is_free, torch.inf)
        if not in_each_group:
            scores = scores.view(1, -1)
        return _smallest(scores, round(fraction * scores.shape[1])).view(self.num_groups, self.fan_in)

    def _group_of_label(self) -> Tensor:
        return torch.repeat_interleave(self.group_offsets.diff(), output_size=self.weight.shape[0])

    def _pieces_of_labels(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield groups whose labels' weights are a piece, these labels, and their offsets: a copy of all is much memory."""
        of_a_group = -(-self.weight.shape[0] // max(1, self.num_groups))
        pieces = list(_pieces(self.num_groups, max(1, of_a_group * self.fan_in)))
        firsts = self.group_offsets[[piece.start for piece in pieces] + [self.num_groups]].tolist()
        for piece, first, last in zip(pieces, firsts, firsts[1:], strict=False):
            yield piece, slice(first, last), self.group_offsets[piece.start : piece.stop + 1] - first

    def _rows_of_softmax(self, features: Tensor, positives: JaggedTensor) -> tuple[Tensor, Tensor]:
        """Return of each row, `[B, 1]`, the log-sum-exp of all logits, inf where it has no positives, and how many it has."""
        with trust_values():
            given = features.to(self.weight.dtype), self.places[positives.values()], positives.offsets()
            lse, _, counts = self._parts_of_softmax(*given, None)
        return lse.masked_fill(counts == 0, torch.inf)[:, None], counts[:, None]

    def _gradients(self, some: slice, features: Tensor, positives: JaggedTensor, of_rows: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the mean magnitude, over a group's labels, of the gradient of an input's weight, `[groups, inputs]`."""
        hidden = self.tail_projection(features).float()
        places = self.places[positives.values()] - self.num_head_labels
        rows = torch.repeat_interleave(positives.offsets().diff(), output_size=places.shape[0])
        found = hidden.new_empty(some.stop - some.start, self.tail_dim)
        # A few groups at a time, as many on every process: the gradient of a dense layer's weights is as large as that layer.
        longest = max(1, int(self.group_offsets.diff().max()))
        step = max(1, _PIECE_ELEMENTS // (longest * self.tail_dim))
        for begin in range(some.start, some.stop, step):
            end = min(begin + step, some.stop)
            offsets = self.group_offsets[begin : end + 1]
            first, last = offsets[[0, -1]].tolist()
            weight, bias = self.weight[first:last].float(), self.bias[first:last].float()
            with trust_values():
                logits = group_sparse_linear(hidden, weight, self.supports[begin:end], offsets - first, bias)
            # A positive of another group goes to a column to spare.
            targets = hidden.new_full((hidden.shape[0], last - first + 1), 0.5 * self.label_smoothing)
            column = torch.where((places >= first) & (places < last), places - first, last - first)
            targets.index_put_((rows, column), targets.new_full((), 1 - 0.5 * self.label_smoothing))
            if of_rows is None:
                slopes = torch.sigmoid(logits) - targets[:, :-1]
            else:
                lse, counts = of_rows
                slopes = torch.exp(logits - lse) - targets[:, :-1] / counts.clamp(min=1)
            gradient = slopes.to(hidden.dtype).t() @ hidden
            if _num_processes() > 1:
                torch.distributed.all_reduce(gradient)
            found[begin - some.start : end - some.start] = _means(gradient.abs(), offsets - first)
        return found


def _num_processes() -> int:
    found = torch.distributed
    return found.get_world_size() if found.is_available() and found.is_initialized() else 1


def _behind(projection: nn.Module, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return a linear layer behind a projection as one layer."""
    if not isinstance(projection, nn.Linear):
        return weight, bias
    return weight @ projection.weight, bias + weight @ projection.bias


def _distinct(places: Tensor, offsets: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """Return which positives are the first of their label in their row, and how many such ones each row has."""
    rows = sample_of_row(offsets, places.shape[0])
    keys, order = (rows * num_labels + places).sort(stable=True)
    # A slice would ask a tracer for its length.
    place = torch.arange(places.shape[0], device=places.device)
    is_new = (place == 0) | (keys != keys.index_select(0, (place - 1).clamp(min=0)))
    is_first = torch.zeros_like(is_new).scatter(0, order, is_new)
    # Of no row at all, wrong offsets give positives to the first.
    counts = torch.zeros_like(offsets, dtype=torch.int64).index_add(0, rows, is_first.to(torch.int64))
    return is_first, counts[:-1]


def _as_in_products(factor: Tensor) -> Tensor:
    """Return a factor as `linear_cross_entropy` has it under autocast, so that the same products come out."""
    kind = factor.device.type
    if factor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return factor
    return factor.to(torch.get_autocast_dtype(kind))


def _means(of_labels: Tensor, offsets: Tensor) -> Tensor:
    """Return the mean `[K, *]` over the labels of each group, zero for one without."""
    sums = torch.segment_reduce(of_labels, "sum", offsets=offsets, axis=0, initial=0)
    return sums / offsets.diff().clamp(min=1)[:, None]


def _smallest(scores: Tensor, count: int) -> Tensor:
    """Return which are the `count` smallest of each row of float32 numbers from 0, the first ones of equals; infinite ones never.

    A sort takes several times the memory of the numbers. Such numbers are in the order of their bits as integers, of which the
    largest that is chosen is found by halves; a piece of them at a time, as a GPU makes integers of bytes before it adds them.
    """
    bits, infinity = scores.view(torch.int32), torch.tensor(torch.inf).view(torch.int32)
    size = max(1, _COUNTED_ELEMENTS // max(1, bits.shape[0]))
    pieces = bits.split(size, 1)
    low = bits.new_zeros(bits.shape[0], 1)
    high = low + infinity
    for _ in range(31):
        middle = low + (high - low) // 2
        at_most = sum(((piece <= middle).sum(1, keepdim=True) for piece in pieces), torch.zeros_like(low))
        low, high = torch.where(at_most >= count, low, middle + 1), torch.where(at_most >= count, middle, high)
    chosen = bits < high
    left = count - sum((piece.sum(1, keepdim=True) for piece in chosen.split(size, 1)), torch.zeros_like(low))
    for piece, of_piece in zip(pieces, chosen.split(size, 1), strict=True):
        is_equal = (piece == high) & (high < infinity)
        rank = is_equal.cumsum(1, dtype=torch.int32)
        of_piece |= is_equal & (rank <= left)
        left = left - rank[:, -1:]
    return chosen


def _pieces(num_groups: int, width: int) -> Iterator[slice]:
    step = max(1, _PIECE_ELEMENTS // width)
    return (slice(first, min(first + step, num_groups)) for first in range(0, num_groups, step))


def _checked_counts(label_counts: Tensor, num_rows: int) -> Tensor:
    if label_counts.dim() != 1 or label_counts.dtype != torch.int64 or not label_counts.shape[0]:
        kind = str(label_counts.dtype).removeprefix("torch.")
        raise ValueError(f"label_counts: expected int64 of shape [num_labels], got {kind} of shape {list(label_counts.shape)}")
    if label_counts.shape[0] > _MOST_LABELS:
        found = f"{label_counts.shape[0]:,}"
        raise ValueError(f"label_counts: expected at most {_MOST_LABELS:,} labels, whose ids are int32, got {found}")
    if label_counts.is_meta:
        raise ValueError("label_counts: got a tensor on the meta device, expected one with numbers; make it on another device")
    counts = label_counts.cpu()
    lowest, highest = (int(value) for value in torch.aminmax(counts))
    if lowest < 0 or highest > num_rows:
        label = int(((counts < 0) | (counts > num_rows)).nonzero()[0])
        raise ValueError(f"label_counts[{label}]: expected 0 to {num_rows}, num_rows, got {int(counts[label])}")
    return counts


def _head_labels(head: int | float, num_labels: int) -> int:
    count = round(head * num_labels) if isinstance(head, float) else head
    if not 0 <= count <= num_labels or (isinstance(head, float) and not 0 <= head <= 1):
        raise ValueError(f"head: expected 0 to {num_labels} labels, or a share in [0, 1] as a float, got {head!r}")
    return count


def _groups(labels: Tensor, counts: Tensor, group_size: int, grouping: str | Tensor | LabelGroups, seed: int) -> LabelGroups:
    if isinstance(grouping, LabelGroups):
        of, offsets = grouping.labels.cpu().long(), grouping.offsets.cpu().long()
        if not torch.equal(of.sort().values, labels):
            raise ValueError(
                f"grouping: expected each of the {labels.shape[0]} labels without a dense layer once, got {of.shape[0]} others"
            )
        validate_offsets(offsets, of.shape[0])
        return LabelGroups(of, offsets)
    if isinstance(grouping, Tensor):
        if grouping.dim() != 2 or grouping.shape[0] != counts.shape[0]:
            raise ValueError(
                f"grouping: expected embeddings [{counts.shape[0]}, E], a row for each label, got {list(grouping.shape)}"
            )
        return group_by_embedding(labels, grouping[labels.to(grouping.device)], group_size, seed=seed)
    if grouping == "frequency":
        return group_by_frequency(labels, counts[labels], group_size)
    if grouping != "random":
        raise ValueError(f"grouping: got {grouping!r}, expected 'random', 'frequency', embeddings of the labels or LabelGroups")
    return group_at_random(labels, group_size, seed)
