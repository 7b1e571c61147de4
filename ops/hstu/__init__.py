"""An HSTU block around its attention: gates, values, queries and keys of rows, and the gated output that is added to them."""

from jagged.ops.hstu.api import hstu_output, hstu_projection

__all__ = ["hstu_output", "hstu_projection"]
