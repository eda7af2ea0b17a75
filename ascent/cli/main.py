"""The entry point of the command `ascent`."""

import sys
from collections.abc import Sequence

from ascent.processes.torch_variables import set_torch_variables


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 finished, 1 failed, 2 invalid input, 130 interrupted."""
    set_torch_variables()
    from ascent.cli.dispatch import run_command  # imports torch

    return run_command(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
