"""Errors that Ascent raises. Importing this module does not import torch."""

from __future__ import annotations


class ConfigError(ValueError):
    """Invalid input, found before any work: what was given, why it cannot work, and what to set."""


class RunError(RuntimeError):
    """A failed run: what happened, where its last good state is, and what to change."""
