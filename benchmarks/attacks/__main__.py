"""python -m benchmarks.attacks."""

import sys

from benchmarks.attacks import main

if __name__ == "__main__":
    sys.exit(main())
