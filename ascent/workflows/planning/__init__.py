"""What a run will take on cards that are not there yet: memory, seconds, and how its work is best shared."""
