"""What every task has. The processes that compute rewards import it, so it does without torch."""

from typing import Any, ClassVar, NamedTuple


class BaseTask:
    """What most tasks answer. A task of your own derives from `SmallTask` or `TextTask`, which derive from this."""

    kind: ClassVar[str]
    """small: prompts and responses are short lists of numbers. text: they are words."""
    data: ClassVar[str] = "samples"
    """What there is to learn from: samples, which the task scores; or demonstrations, pairs or steps of a file."""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Named settings of a whole run; `default` is what `ascent train TASK` uses."""
    epoch_sampler: ClassVar[Any] = None
    """Passes over the rows to train on (`passes.Passes`); None: each step draws anew."""
    conversations: ClassVar[Any] = None
    """Starts the conversations of its prompts, once the task is bound; None: responses have a single turn."""
    is_stream: ClassVar[bool] = False
    """Its problems come in one order, from a stream: each step takes the next ones."""

    @property
    def has_environment(self) -> bool:
        """Are turns of its responses answered by processes, each at its own speed?"""
        return False

    def make_environment(self) -> Any:
        """A new `tasks.environment.Environment` for a response of several turns; None: a response is one turn."""
        return None

    def step_prompts(self, step: int, count: int, seed: int, generator: Any) -> Any:
        """The prompts of a step; without rows they are drawn."""
        return self.draw(count, generator)  # type: ignore[attr-defined]

    @property
    def max_reward(self) -> float | None:
        """The largest reward there is; None: unknown."""
        return None

    @property
    def loophole(self) -> str | None:
        """How a wrong response can earn the whole reward, where that is known."""
        return None

    def check_prompts(self, prompts: int) -> None:
        """Refuse a number of prompts per step that this task cannot draw."""

    def verify(self) -> None:
        """Refuse, before any work, what cannot be trained on: files, columns, names, reward functions."""

    def data_notes(self) -> list[str]:
        """What was left out of the data, in words."""
        return []

    def close(self) -> None:
        """End the processes that the task has started."""


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
"""What the small tasks that ship train with by default."""


class SmallTask(BaseTask):
    """A task whose prompts and responses are short lists of numbers: they are the tokens."""

    kind = "small"


class TaskWrapper:
    """A task that is bound to a policy: whatever its class does not define is the task's own."""

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
    """The first line of an error, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
