"""Engines for language models in one process, on a CPU or one GPU."""
