"""`ascent cluster`: train with learner ranks and sampling replicas on a Ray cluster."""

import json
import sys
from dataclasses import dataclass
from typing import Any, Self

from ascent.build.trained_run import Run
from ascent.cli.flags import Command
from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError
from ascent.core.types import check_counts
from ascent.runs.display.terminal import table
from ascent.runs.replica_log import COLUMNS, replicas_of

STATUS_COLUMNS = ("run", "name", "state", "pid", "version", "tokens", "rate", "idle")
SUBCOMMANDS = {"train": "TASK …", "resume": "RUN", "status": "[RUN]", "add": "COUNT", "remove": "NAME"}


@dataclass
class ClusterCommand(Command):
    """Train with learner ranks and sampling replicas on a Ray cluster.

      ascent cluster --learners 2 --samplers 2 train TASK --model MODEL …
      ascent cluster --learners 2 --samplers 2 resume RUN
      ascent cluster status           the processes on the cluster
      ascent cluster status RUN       what each replica of a run did, from its records (without Ray)
      ascent cluster add 2            add two sampling replicas to the run on the cluster
      ascent cluster remove sampler-1

    Without --address, a Ray cluster is started on this machine and ends with the run.
    """

    positionals = "train TASK"
    accepts_other_flags = True
    learners: int = 1
    """Ranks that train the model together."""
    samplers: int = 1
    """Replicas of the policy that sample responses; one that dies is restarted."""
    address: str | None = None
    """A running Ray cluster: HOST:PORT, or auto for the one on this machine."""
    gpus: bool = False
    """Give each learner and each replica a GPU."""
    restarts: int = 0
    """How often the learners restart from the newest checkpoint after one was lost. Needs --out."""
    run: str | None = None
    """For add and remove: the name of the run, if the cluster has several."""
    json: bool = False
    """Print the status as one JSON object."""

    @classmethod
    def read(cls, args: list[str]) -> Self:
        command = super().read(args)
        verb, *rest = command.other_args or ["nothing"]
        if verb in ("train", "resume"):
            command.check_training(verb, rest)
        elif verb not in SUBCOMMANDS or len(rest) > 1 or (not rest and verb != "status"):
            usages = ", ".join(f"{verb} {args}" for verb, args in SUBCOMMANDS.items())
            words = " ".join(command.other_args) or "no subcommand"
            raise ConfigError(f"{words}: after its flags, `ascent cluster` takes {usages}")
        elif verb == "add" and not (rest[0].isdecimal() and int(rest[0])):
            raise ConfigError(f"add {rest[0]}: the number of samplers to add is 1 or more")
        return command

    def check_training(self, verb: str, rest: list[str]) -> None:
        from ascent.rollout.replica_engine import check_cluster

        check_counts(1, learners=self.learners, samplers=self.samplers)
        check_counts(0, restarts=self.restarts)
        if verb == "resume":
            if len(rest) != 1:
                raise ConfigError("ascent cluster resume takes only the run's folder")
            check_cluster(Run(rest[0]).config)
            return
        config, options = parse_train(rest, "ascent cluster train")
        check_cluster(config)
        if self.restarts and options.out is None:
            raise ConfigError(f"--restarts {self.restarts} needs --out FOLDER, from which the learners restart")

    def execute(self) -> int | None:
        from ascent.workflows import ray_cluster

        verb, *rest = self.other_args
        if verb in ("train", "resume"):
            return ray_cluster.ClusterLaunch(
                self.other_args, self.learners, self.samplers, self.gpus, self.restarts, forward_output
            )(self.address)
        if verb == "add":
            run = ray_cluster.add_samplers(self.address, self.run, int(rest[0]))
            print(f"{run}: requested {rest[0]} more replicas. They start when there is room: ascent cluster status")
        elif verb == "remove":
            print(f"{ray_cluster.remove_sampler(self.address, self.run, rest[0])}: {rest[0]} was removed")
        elif rest:
            self.print_status(replicas_of(Run(rest[0]).folder), COLUMNS, f"{rest[0]} was not trained on a cluster.")
        else:
            self.print_status(ray_cluster.cluster_status(self.address), STATUS_COLUMNS, "The cluster has no run.")
        return None

    def print_status(self, actors: list[dict[str, Any]], columns: tuple[str, ...], if_empty: str) -> None:
        if self.json:
            print(json.dumps({"actors": actors}))
        elif not actors:
            print(if_empty)
        else:
            rows = [[status_cell(name, line.get(name)) for name in columns] for line in actors]
            print("\n".join(table(list(columns), rows)))


def status_cell(name: str, value: object) -> str:
    if value is None:
        return "·"
    if isinstance(value, float):
        return f"{value:,.0f}/s" if name == "rate" else f"{value:.0%}"
    return f"{value:,}" if name == "tokens" else str(value)


def forward_output(stream: str, data: bytes) -> None:
    """Print output of a learner on the same stream here."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(data.decode(errors="replace"))
    target.flush()


COMMANDS = {"train": (ClusterCommand,)}
