"""What two op families use unchanged: registration, validation, offsets and tile schedules."""
