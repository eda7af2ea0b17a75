"""One command per published number: `python -m benchmarks.NAME`. See docs/benchmarks.md."""

import ascent  # noqa: F401  # before torch, as in the command: it sets what torch reads when it is imported
