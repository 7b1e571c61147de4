"""Rows that move between a table in the host's memory and its cached rows on a GPU."""

from jagged.ops.host_rows.api import SeatedRows, claim_rows, exchange_rows, seat_rows

__all__ = ["SeatedRows", "claim_rows", "exchange_rows", "seat_rows"]
