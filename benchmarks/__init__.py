"""One command per published number: `python -m benchmarks.NAME`. See docs/benchmarks.md."""
