"""Under pytest the annotated shapes are checked (jaxtyping's import hook in conftest.py)."""

from __future__ import annotations

import pytest
import torch
from conftest import SHAPED, batch_of
from jaxtyping import TypeCheckError

from ascent.core.types import Prompts, add_outcome


def test_functions_and_dataclasses_of_the_library_are_checked() -> None:
    assert len(SHAPED) > 20
    batch = batch_of([[1.0, 2.0]])
    assert add_outcome(batch, torch.zeros(1, 2, 1, dtype=torch.float64)).shape == (1, 2, 1)
    with pytest.raises(TypeCheckError):
        add_outcome(batch, torch.zeros(1, 2))
    with pytest.raises(TypeCheckError):
        Prompts(torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
