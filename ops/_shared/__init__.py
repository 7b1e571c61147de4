"""What two op families use unchanged: registration, validation, offsets, device functions."""
