"""What a person types after `ascent`: flags into settings, settings into work, and what is printed of it."""
