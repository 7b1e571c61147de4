"""Binary cross-entropy of all labels of a dense layer, without its matrix of logits."""

from jagged.ops.linear_bce.api import linear_bce

__all__ = ["linear_bce"]
