"""`python -m ascent` is the command `ascent`."""

import sys

from ascent.cli.main import main

sys.exit(main())
