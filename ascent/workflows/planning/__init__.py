"""`ascent plan`: predicted memory, speed and placement of a run on given GPUs."""
