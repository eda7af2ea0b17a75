"""Games of textarena, by their names: textarena:Nim, textarena:TowerOfHanoi-v0-hard.

The game is the environment (environments/games.py): it says its rules behind the prompt, answers every turn and pays at
the end. A problem is no more than the number of a game, which gives its seed. Nothing is graded besides.
"""

from dataclasses import dataclass

from ascent.core.errors import ConfigError
from ascent.tasks.text.text_task import TEXTARENA, Generated, Graded, Problem


@dataclass(frozen=True)
class Textarena(Generated):
    """textarena:NAME: a game of textarena, against players who move at random where it needs any."""

    source: str = ""
    """Name of the game. Short form: textarena:NAME."""
    max_turns: int = 16
    """Maximum number of turns per response."""

    def __post_init__(self) -> None:
        game = f"{TEXTARENA}{self.source}" if self.source else ""
        if self.environment not in ("", game):
            raise ConfigError(f"{game} with --environment {self.environment}: the game answers the turns")
        object.__setattr__(self, "environment", game)
        super().__post_init__()

    def verify(self) -> None:
        if not self.source:
            raise ConfigError("textarena needs the name of a game: ascent train textarena:Nim")
        super().verify()

    def make(self, index: int) -> Problem:
        return Problem(f"Game {index}.")

    def grade(self, problem: Problem, response: str) -> Graded:
        return Graded(0.0, False, False)

    def gold(self, problem: Problem) -> str | None:
        return None
