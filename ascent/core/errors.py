"""Errors that Ascent raises. Importing this module does not import torch."""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input, found before any work was done: what was given, why it cannot be, what to set."""


class RunError(RuntimeError):
    """A run that had to stop: what happened, where its last good state is, what to change."""
