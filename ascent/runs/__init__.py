"""The run folder: what a run writes down, so that other tools can read it and a kill loses nothing."""
