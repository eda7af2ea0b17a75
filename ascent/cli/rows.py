"""`ascent rows`: write the tasks of a verifiers taskset as rows to train on."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ascent.cli.flags import Command
from ascent.core.errors import ConfigError
from ascent.environments.agents.verifiers_agent import VerifiersAgent
from ascent.processes.supervisor import Limits
from ascent.tasks.agent_sources import agent_source, verify_agent
from ascent.tasks.user_files import write_jsonl


@dataclass
class RowsCommand(Command):
    """Write the tasks of a verifiers taskset as a JSONL file to train on.

    Then: ascent train jsonl:FILE --model MODEL --agent verifiers:NAME
    """

    agent: str
    """verifiers:NAME, verifiers:FILE.py or verifiers:FILE.toml."""
    file: str
    """The file to write."""
    count: int = 1000
    """Maximum number of tasks."""

    def execute(self) -> None:
        source = agent_source(self.agent)
        if not source.startswith("verifiers:"):
            raise ConfigError(f"ascent rows {self.agent}: give a verifiers taskset, verifiers:NAME")
        if self.count < 1:
            raise ConfigError(f"--count is {self.count}: set 1 or more")
        verify_agent(source)
        with closing(VerifiersAgent(source.removeprefix("verifiers:"), Limits(0.0), 1)) as agent:
            rows = agent.rows(self.count)
        write_jsonl(Path(self.file), rows)
        print(f"{len(rows)} rows in {self.file}")


COMMANDS = {"make data": (RowsCommand,)}
