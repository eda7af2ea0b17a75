"""One command per published number: `python -m benchmarks.NAME`. See docs/benchmarks.md."""

from ascent.processes.torch_variables import set_torch_variables

set_torch_variables()  # as the command `ascent` does, before torch is imported
