"""Products of jagged tensors with dense and with jagged ones."""
