"""python -m benchmarks.mutants."""

import sys

from benchmarks.mutants import main

if __name__ == "__main__":
    sys.exit(main())
