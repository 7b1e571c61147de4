"""Checks of sampled cross-entropy's arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.sizes import cdiv
from jagged.ops._shared.validation import FLOATS, check_choice, check_device, check_offsets, check_tensor, compute_dtype_of
from jagged.ops.sampled_cross_entropy.draws import Draw, Source, source_of

IDS = (torch.int64, torch.int32)


def check_tensors(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    """Check hidden states, item weights and targets against one another; under autocast, which casts them, also of two dtypes."""
    check_tensor("hidden", hidden, "[N, D]", FLOATS)
    check_tensor("weight", weight, "[V, D]", FLOATS)
    check_tensor("target", target, "[N]", IDS)
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: expected shape [V, {hidden.shape[1]}], as wide as hidden {list(hidden.shape)}, got {list(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one item, got shape " + str(list(weight.shape)))
    if weight.shape[0] >= 2**31:
        raise ValueError(f"weight: expected fewer than 2^31 items, got {weight.shape[0]}; split the catalogue")
    if target.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"target: expected shape [{hidden.shape[0]}], one item per row of hidden {list(hidden.shape)}, "
            f"got {list(target.shape)}"
        )
    check_device("weight", weight, "hidden", hidden)
    check_device("target", target, "hidden", hidden)
    compute_dtype_of(hidden, weight)


def check_options(
    loss: str, correction: str, positive: str, renormalise: bool, reduction: str, filter_eps: float | None, return_lse: bool
) -> None:
    """Check options among themselves."""
    check_choice("loss", loss, ("softmax", "refined", "bce", "gbce"))
    check_choice("correction", correction, ("none", "negatives", "both"))
    check_choice("positive", positive, ("inside", "outside"))
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if filter_eps is not None and not filter_eps >= 0:
        raise ValueError(f"filter_eps: expected a number of at least 0, or None to keep all negatives, got {filter_eps}")
    if loss == "refined" and correction != "negatives":
        raise ValueError(
            f"correction: loss='refined' corrects the negatives alone, got {correction!r}; pass correction='negatives'"
        )
    if loss in ("bce", "gbce"):
        used = {
            "correction": correction != "none",
            "positive": positive != "inside",
            "renormalise": renormalise,
            "filter_eps": filter_eps is not None,
            "return_lse": return_lse,
        }
        for name, is_used in used.items():
            if is_used:
                raise ValueError(f"{name}: loss={loss!r} has no softmax that it could apply to; leave it out")


def source_of_negatives(
    hidden: Tensor,
    weight: Tensor,
    negatives: Tensor | Draw,
    correction: str,
    negative_log_q: Tensor | None,
    target_log_q: Tensor | None,
    sample_weight: Tensor | None,
) -> Source:
    """Check negatives, their probabilities and weights of rows; return negatives as the operator takes them."""
    num_rows = hidden.shape[0]
    if isinstance(negatives, Draw):
        for name, given in (("negative_log_q", negative_log_q), ("target_log_q", target_log_q)):
            if given is not None:
                raise ValueError(f"{name}: a Draw knows its probabilities, got a tensor beside it; leave it out")
        source = source_of(negatives, num_rows, weight.shape[0], hidden.device)
    else:
        source = _source_of_ids(negatives, negative_log_q, num_rows, hidden)
    for name, tensor in (("target_log_q", target_log_q), ("sample_weight", sample_weight)):
        if tensor is not None:
            check_tensor(name, tensor, "[N]", FLOATS)
            if tensor.shape[0] != num_rows:
                raise ValueError(f"{name}: expected shape [{num_rows}], one number per row of hidden, got {list(tensor.shape)}")
            _check_constant(name, tensor, hidden)
    if negative_log_q is not None and correction == "none":
        raise ValueError("negative_log_q: is not used with correction='none'; leave it out, or correct with it")
    if target_log_q is not None and correction != "both":
        raise ValueError(f"target_log_q: is used with correction='both' alone, got correction={correction!r}; leave it out")
    return source


def _source_of_ids(negatives: Tensor, log_q: Tensor | None, num_rows: int, hidden: Tensor) -> Source:
    if not isinstance(negatives, Tensor):
        raise TypeError(f"negatives: expected a Draw or a tensor of ids, got {type(negatives).__name__}")
    if negatives.dim() not in (1, 2):
        raise ValueError(f"negatives: expected shape [N, ns], [G, ns] or [ns], got {list(negatives.shape)}")
    check_tensor("negatives", negatives, "[*]", IDS)
    if negatives.shape[-1] == 0:
        raise ValueError(f"negatives: expected at least one negative, got shape {list(negatives.shape)}")
    check_device("negatives", negatives, "hidden", hidden)
    if log_q is not None:
        check_tensor("negative_log_q", log_q, "[*]", (torch.float32, torch.float64))
        if log_q.shape != negatives.shape:
            raise ValueError(f"negative_log_q: expected the shape of negatives, {list(negatives.shape)}, got {list(log_q.shape)}")
        _check_constant("negative_log_q", log_q, hidden)
    if negatives.dim() == 1:
        negatives, log_q = negatives[None], None if log_q is None else log_q[None]
        return Source(negatives, log_q, None, None, "given", negatives.shape[1], max(1, num_rows))
    groups = negatives.shape[0]
    if num_rows and not 0 < groups <= num_rows:
        raise ValueError(f"negatives: expected from 1 to {num_rows} blocks of rows, got shape {list(negatives.shape)}")
    rows_per_draw = cdiv(num_rows, groups) if num_rows else 1
    return Source(negatives, log_q, None, None, "given", negatives.shape[1], rows_per_draw)


def check_exclude(exclude: tuple[Tensor, Tensor] | None, hidden: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Check rows' lists, and return their ids and offsets."""
    if exclude is None:
        return None, None
    if not isinstance(exclude, tuple) or len(exclude) != 2:
        raise TypeError(f"exclude: expected a pair (ids [M], offsets [N + 1]), got {type(exclude).__name__}")
    excluded, offsets = exclude
    check_tensor("exclude[0]", excluded, "[M]", IDS)
    check_device("exclude[0]", excluded, "hidden", hidden)
    check_offsets(offsets, hidden, "exclude[1]", excluded.shape[0])
    if offsets.shape[0] != hidden.shape[0] + 1:
        raise ValueError(
            f"exclude[1]: expected shape [{hidden.shape[0] + 1}], offsets of a list for each row of hidden, "
            f"got {list(offsets.shape)}"
        )
    return excluded, offsets


def gbce_weight(count: int, num_items: int, t: float) -> float:
    """Return gbce's beta."""
    if not 0 <= t <= 1:
        raise ValueError(f"gbce_t: expected a number from 0 to 1, got {t}")
    if num_items < 2:
        raise ValueError("weight: gbce expects at least two items, got one")
    alpha = count / (num_items - 1)
    return alpha * (t * (1 - 1 / alpha) + 1 / alpha)


def _check_constant(name: str, tensor: Tensor, hidden: Tensor) -> None:
    check_device(name, tensor, "hidden", hidden)
    if tensor.requires_grad:
        raise ValueError(f"{name}: has no gradient here, got a tensor that requires one; pass it with .detach()")
