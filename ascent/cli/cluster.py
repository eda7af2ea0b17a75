"""`ascent cluster`: learners and samplers on the machines of a Ray cluster."""

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

LIVE = ("run", "name", "state", "pid", "version", "tokens", "rate", "idle")
VERBS = {"train": "TASK …", "resume": "RUN", "status": "[RUN]", "add": "COUNT", "remove": "NAME"}


@dataclass
class ClusterCommand(Command):
    """Train with learners and samplers on a Ray cluster; `ascent cluster status` says who does what.

    ascent cluster --learners 2 --samplers 2 train TASK --model MODEL …
    ascent cluster --learners 2 --samplers 2 resume RUN
    ascent cluster status           who is on the cluster
    ascent cluster status RUN       what each sampler of a run did, from its records; Ray is not needed
    ascent cluster add 2            two samplers more for the run on the cluster
    ascent cluster remove sampler-1

    Without --address a Ray cluster is started on this machine, and ends with the run.
    """

    positionals = "train TASK"
    accepts_other_flags = True
    learners: int = 1
    """Ranks that train the model together."""
    samplers: int = 1
    """Copies of the policy that draw responses; one that dies is started again."""
    address: str | None = None
    """A Ray cluster that runs: HOST:PORT, or auto: the one of this machine."""
    gpus: bool = False
    """Give every learner and every sampler a GPU."""
    restarts: int = 0
    """Times that learners go on from the newest checkpoint after one was lost. It needs --out."""
    run: str | None = None
    """For add and remove: the name of the run, where the cluster has several."""
    json: bool = False
    """Print the status as one JSON object."""

    @classmethod
    def read(cls, args: list[str]) -> Self:
        command = super().read(args)
        verb, *rest = command.other_args or ["nothing"]
        if verb in ("train", "resume"):
            command.check_training(verb, rest)
        elif verb not in VERBS or len(rest) > 1 or (not rest and verb != "status"):
            usages = ", ".join(f"{verb} {more}" for verb, more in VERBS.items())
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
                raise ConfigError("ascent cluster resume takes the run's folder, and nothing else")
            check_cluster(Run(rest[0]).config)
            return
        config, options = parse_train(rest, "ascent cluster train")
        check_cluster(config)
        if self.restarts and options.out is None:
            raise ConfigError(f"--restarts {self.restarts} needs --out FOLDER: learners that start again look there")

    def execute(self) -> int | None:
        from ascent.workflows import ray_cluster

        verb, *rest = self.other_args
        if verb in ("train", "resume"):
            return ray_cluster.Launch(self.other_args, self.learners, self.samplers, self.gpus, self.restarts, pass_on)(
                self.address
            )
        if verb == "add":
            run = ray_cluster.add_samplers(self.address, self.run, int(rest[0]))
            print(f"{run}: asked for {rest[0]} more. They draw as soon as the cluster has room: ascent cluster status")
        elif verb == "remove":
            print(f"{ray_cluster.remove_sampler(self.address, self.run, rest[0])}: {rest[0]} has left")
        elif rest:
            self.show(replicas_of(Run(rest[0]).folder), COLUMNS, f"{rest[0]} was not trained on a cluster.")
        else:
            self.show(ray_cluster.cluster_status(self.address), LIVE, "No cluster run is there.")
        return None

    def show(self, found: list[dict[str, Any]], columns: tuple[str, ...], nothing: str) -> None:
        if self.json:
            print(json.dumps({"actors": found}))
        elif not found:
            print(nothing)
        else:
            rows = [[status_cell(name, line.get(name)) for name in columns] for line in found]
            print("\n".join(table(list(columns), rows)))


def status_cell(name: str, value: object) -> str:
    if value is None:
        return "·"
    if isinstance(value, float):
        return f"{value:,.0f}/s" if name == "rate" else f"{value:.0%}"
    return f"{value:,}" if name == "tokens" else str(value)


def pass_on(stream: str, data: bytes) -> None:
    """What a learner says, on the same stream here."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(data.decode(errors="replace"))
    target.flush()


COMMANDS = {"train": (ClusterCommand,)}
