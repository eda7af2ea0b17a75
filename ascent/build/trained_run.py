"""A run with its trained policy: the reader of the run folder, and the backend that loads the policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascent.build.backends import backend_of
from ascent.core.config import Config
from ascent.runs import checkpoint
from ascent.runs.display.notebook import Completions
from ascent.runs.run_reader import RunRecord, check_trains_policy


class Run(RunRecord):
    """A run: its records and its trained policy."""

    def sample(self, prompts: str | Sequence[str], count: int = 1, greedy: bool = False, seed: int = 0) -> Completions:
        """Sample responses of the newest policy to prompts formatted as in training.

        `ascent.sample` has more options.
        """
        path, config = self.checkpoint(), self.config
        backend, policy = backend_of(config), load_policy(config, path)
        task = backend.bind(config.task, policy, {})
        typed, words = task.encode_prompts([prompts] if isinstance(prompts, str) else prompts, False)
        engine = backend.engine_for_prompts(config, policy, typed, seed, checkpoint.step_of(path))
        drawn = engine.generate(typed, count, greedy)
        rows = [(p, s) for p in range(len(words)) for s in range(count)]
        texts = [task.response_text(drawn.response[p, s][drawn.mask[p, s]].tolist()) for p, s in rows]
        return Completions({"prompt": words[p], "response": text} for (p, _), text in zip(rows, texts, strict=True))

    @property
    def policy(self) -> Any:
        """The policy of the newest checkpoint: a small policy, or a language model with its tokenizer."""
        return load_policy(self.config, self.checkpoint())


def load_policy(config: Config, path: Path) -> Any:
    """Load the policy of a checkpoint for inference."""
    check_trains_policy(config, path.parent.parent)
    return backend_of(config).policy(config, checkpoint.params(path))
