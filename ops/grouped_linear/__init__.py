"""Linear layers of groups, and mixtures of what they give: the products of experts, towers and tokens."""

from jagged.ops.grouped_linear.api import grouped_linear, mix_groups

__all__ = ["grouped_linear", "mix_groups"]
