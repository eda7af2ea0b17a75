"""`ascent cluster`: learners and samplers on the machines of a Ray cluster."""

import json
import sys
from dataclasses import dataclass
from typing import Self

from ascent.cli.flags import Command, parse_train
from ascent.core.types import Refused, check_counts
from ascent.records.display import table

COLUMNS = ("run", "name", "state", "pid", "version", "tokens", "rate", "idle")


@dataclass
class ClusterCommand(Command):
    """Train with learners and samplers on a Ray cluster; `ascent cluster status` says who does what.

    ascent cluster --learners 2 --samplers 2 train TASK --model MODEL …
    ascent cluster status

    Without --address a Ray cluster is started on this machine, and ends with the run.
    """

    words = "train TASK"
    takes_more = True
    learners: int = 1
    """Ranks that train the model together."""
    samplers: int = 1
    """Copies of the policy that draw responses; one that dies is started again."""
    address: str | None = None
    """A Ray cluster that runs: HOST:PORT, or auto: the one of this machine."""
    gpus: bool = False
    """Give every learner and every sampler a GPU."""
    json: bool = False
    """Print the status as one JSON object."""

    @classmethod
    def read(cls, args: list[str]) -> Self:
        command = super().read(args)
        if command.rest[:1] == ["train"]:
            from ascent.engines.cluster.sampler import check_cluster

            check_counts(1, learners=command.learners, samplers=command.samplers)
            check_cluster(parse_train(command.rest[1:], "ascent cluster train")[0])
        elif command.rest != ["status"]:
            raise Refused(
                f"{' '.join(command.rest) or 'nothing'}: after its flags `ascent cluster` takes train or status"
            )
        return command

    def execute(self) -> int | None:
        from ascent.workflows.cluster import cluster_status, launch_cluster

        if self.rest[0] == "train":
            return launch_cluster(self.rest, self.learners, self.samplers, self.gpus, self.address, pass_on)
        found = cluster_status(self.address)
        if self.json:
            print(json.dumps({"actors": found}))
        elif not found:
            print("No cluster run is there.")
        else:
            rows = [[status_cell(name, line.get(name)) for name in COLUMNS] for line in found]
            print("\n".join(table(list(COLUMNS), rows)))
        return None


def status_cell(name: str, value: object) -> str:
    if value is None:
        return "·"
    if isinstance(value, float):
        return f"{value:.0%}" if name == "idle" else f"{value:,.0f}/s"
    return str(value)


def pass_on(stream: str, data: bytes) -> None:
    """What a learner says, on the same stream here."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(data.decode(errors="replace"))
    target.flush()


COMMANDS = {"train": (ClusterCommand,)}
