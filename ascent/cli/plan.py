"""`ascent plan`: predict what a run would need on other GPUs."""

import json
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

from ascent.build.backends import backend_of
from ascent.cli.flags import Command, wants_help
from ascent.cli.run_flags import parse_train
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of
from ascent.core.types import check_counts

MAX_GPUS = 100_000


@dataclass
class PlanCommand(Command):
    """Predict memory, seconds per step and the best parallel layout on GPUs that you do not have yet.

    The flags of `ascent train` apply: --prompts, --samples, --max-tokens, … Only the
    config.json of the model is read: --model is its folder, or that file.
    docs/scale.md says which numbers are measured and which are assumed.
    """

    positionals = "TASK"
    accepts_other_flags = True
    gpus: int = 1
    """GPUs per node."""
    gpu: str = "h200"
    """Kind of GPU: h200 (measured), h100, b200, a100, mi300x, l40s, rtx4090 (assumed, from published figures)."""
    nodes: int = 1
    """Number of nodes."""
    network: Annotated[str, "RATE"] = "40GB/s"
    """Bandwidth between nodes: 40GB/s or 400Gb/s."""
    prompt_tokens: int = 128
    """Tokens per prompt."""
    answer_tokens: int | None = None
    """Mean number of tokens per response. Default: half of --max-tokens."""
    answer_spread: float = 0.5
    """Spread of the lengths: standard deviation of their logarithm. 0: all equal; 1: a long tail, as in reasoning."""
    json: bool = False
    """Print one JSON object."""
    config: Config = field(init=False)

    @classmethod
    def read(cls, args: list[str]) -> Self:
        command = super().read(args)
        if wants_help(command.other_args):
            raise SystemExit(0)
        command.config, _ = parse_train(command.other_args, cls.prog(), verify=False)
        return command

    def execute(self) -> None:
        from ascent.workflows.planning.gpus import Cluster, bytes_per_second, gpu_named
        from ascent.workflows.planning.model_shapes import read_shape
        from ascent.workflows.planning.plan_text import plan_text
        from ascent.workflows.planning.planner import ResponseLengths, forecast

        config = self.config
        if not backend_of(config).uses_text or config.data != "samples":
            raise ConfigError(
                f"ascent plan {name_of(config.task)}: a plan needs a language model that samples, as in ascent plan "
                "gsm8k --model FOLDER"
            )
        if config.policy.dtype == "float32":
            raise ConfigError("--policy.dtype float32: plans assume bfloat16 on a GPU. Leave it out")
        dtype = "mixed" if config.policy.dtype == "mixed" else "bfloat16"
        config = replace(config, policy=replace(config.policy, dtype=dtype))
        check_counts(1, gpus=self.gpus, nodes=self.nodes, prompt_tokens=self.prompt_tokens)
        if self.gpus * self.nodes > MAX_GPUS:
            raise ConfigError(f"--gpus {self.gpus} --nodes {self.nodes}: plans have at most {MAX_GPUS:,} GPUs")
        limit = config.task.max_response_tokens
        mean = max(1, limit // 2) if self.answer_tokens is None else self.answer_tokens
        if not 1 <= mean <= limit:
            raise ConfigError(f"--answer-tokens {mean}: set 1 to {limit}, the limit of a response (--max-tokens)")
        if not 0 <= self.answer_spread <= 3:
            raise ConfigError(f"--answer-spread {self.answer_spread:g}: set 0 (all equal) to 3")
        cluster = Cluster(gpu_named(self.gpu), self.gpus, self.nodes, bytes_per_second(self.network))
        answers = ResponseLengths(min(self.prompt_tokens, config.task.max_prompt), mean, self.answer_spread, limit)
        plan = forecast(config, read_shape(config.policy.model), cluster, answers)
        print(json.dumps(plan.to_dict()) if self.json else plan_text(plan))


COMMANDS = {"train": (PlanCommand,)}
