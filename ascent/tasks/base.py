"""Base classes of tasks. Reward workers import this module, so it must not import torch."""

from typing import Any, ClassVar, NamedTuple


class BaseTask:
    """Defaults that all tasks share. User-defined tasks derive from `SmallTask` or `TextTask`."""

    kind: ClassVar[str]
    """small: prompts and responses are short lists of numbers. text: they are text."""
    data: ClassVar[str] = "samples"
    """Training data: samples, which the task scores, or offline data from a file (demonstrations, pairs, steps)."""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Named settings of a whole run; `default` is what `ascent train TASK` uses."""
    epoch_sampler: ClassVar[Any] = None
    """Order of the training rows (`epochs.EpochSampler`); None: each step draws new prompts."""
    conversations: ClassVar[Any] = None
    """Starts the conversations of prompts; set when the task is bound. None: responses have a single turn."""
    is_stream: ClassVar[bool] = False
    """Whether the problems come from a stream in a fixed order, so that each step takes the next ones."""

    @property
    def has_environment(self) -> bool:
        """Whether environments in other processes answer the turns of a response."""
        return False

    def make_environment(self) -> Any:
        """Create a `tasks.environment.Environment` for one multi-turn response; None: responses have a single turn."""
        return None

    def step_prompts(self, step: int, count: int, seed: int, generator: Any) -> Any:
        """Return the prompts of a step. Without rows they are drawn at random."""
        return self.draw(count, generator)  # type: ignore[attr-defined]

    @property
    def max_reward(self) -> float | None:
        """Maximum reward of a response; None: unknown."""
        return None

    @property
    def loophole(self) -> str | None:
        """Describe a known way to earn the full reward with a wrong response; None: none is known."""
        return None

    def check_prompts(self, prompts: int) -> None:
        """Raise ConfigError if the task cannot draw this number of prompts per step."""

    def verify(self) -> None:
        """Raise ConfigError for missing or invalid files, columns, names and reward functions, before any work."""

    def data_notes(self) -> list[str]:
        """Describe the rows that were left out of the data."""
        return []

    def close(self) -> None:
        """Stop the processes that the task started."""


SMALL_PRESET: dict[str, Any] = {
    "policy": "transformer",
    "algorithm": "dr-grpo",
    "lr": 2e-3,
    "update.schedule": "linear",
    "update.max_norm": 1.0,
    "prompts": 64,
    "samples": 8,
    "epochs": 1,
    "seed": 0,
    "eval_every": 50,
    "record_every": 50,
    "checkpoint_every": 100,
}
"""Default training settings of the built-in small tasks."""


class SmallTask(BaseTask):
    """A task whose prompts and responses are short lists of numbers, which are the tokens."""

    kind = "small"


class TaskWrapper:
    """A task that wraps `task`: attributes that it does not define are those of `task`."""

    task: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "task":
            raise AttributeError(name)
        return getattr(self.task, name)


class ReadablePrompt(NamedTuple):
    """A prompt for display and for JSONL files."""

    text: str
    content: Any
    """As in a JSONL file: text, a list of messages, or a list of numbers."""
    messages: Any
    """A text prompt always as a list of messages; a prompt of a small task as in `content`."""
    answer: Any = None
    """The reference answer, if known."""


def error_line(error: Exception) -> str:
    """Return the first line of an error message, or the error's type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
