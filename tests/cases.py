"""Tables of cases of which `make test` tries some, and `make smokes` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_smokes(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases of a whole run each: `make test` tries those that are kept, `make smokes` the others."""
    cases = list(cases)
    assert kept and all(case in cases for case in kept)
    return [case if case in kept else pytest.param(*_values(case), marks=pytest.mark.smoke) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
