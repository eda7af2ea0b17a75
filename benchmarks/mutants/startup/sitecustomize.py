"""Records the calls of a Python process that a test starts: this folder is on its path."""

import os

if os.environ.get("ASCENT_MUTANTS_CALLS") and os.environ.get("PYTEST_CURRENT_TEST"):
    from record_calls import recorder

    found = recorder()
    if found is not None:
        found.start()
