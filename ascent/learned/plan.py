"""What `ascent rounds` is to do."""

from __future__ import annotations

from dataclasses import dataclass

from ascent.types import Refused


@dataclass(frozen=True)
class Plan:
    """How many rounds, and what happens in each."""

    rounds: int = 3
    """Rounds of pairs, a reward model and a policy."""
    pairs: int = 256
    """New pairs in each."""
    replay: float = 0.1
    """Share of a reward model's pairs that are of earlier rounds."""
    judge: str | None = None
    """A judge's TOML file. None: the task's own reward labels the pairs, and is hidden from the policy."""

    def __post_init__(self) -> None:
        for name in ("rounds", "pairs"):
            if getattr(self, name) < 1:
                raise Refused(f"--{name} is {getattr(self, name)}: it has to be at least 1")
        if not 0 <= self.replay < 1:
            raise Refused(f"--replay is {self.replay:g}: a share of old pairs, from 0 to below 1")
