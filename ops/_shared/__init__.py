"""What two op families use unchanged: declarations of operators, launches, validation, offsets, device functions."""
