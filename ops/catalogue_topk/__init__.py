"""The best items of a catalogue for each hidden state, without the logits matrix."""

from jagged.ops.catalogue_topk.api import DEFAULT_MAX_BYTES, catalogue_topk

__all__ = ["DEFAULT_MAX_BYTES", "catalogue_topk"]
