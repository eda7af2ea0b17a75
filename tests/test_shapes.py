"""Under pytest the annotated shapes are checked: what tests/shapes.py refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import SHAPED, batch_of
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from ascent.core.types import Prompts, add_outcome
from tests.shapes import shaped

A, B = torch.zeros(2, 3), torch.zeros(3)


@shaped
def added(x: Float[Tensor, "row column"], y: Float[Tensor, "column"], result: Any) -> Float[Tensor, "row"]:
    return (x + y).sum(-1) if result is None else result


def test_an_axis_has_one_size_in_all_arguments_and_in_the_result() -> None:
    assert added(A, B, None).shape == (2,)
    for wrong in ((A, torch.zeros(2)), (B, B), (A, torch.zeros(3, dtype=torch.long)), (A, 1.0)):
        with pytest.raises(TypeCheckError, match="parameter"):
            added(*wrong, None)
    for result in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.bool), 1.0):
        with pytest.raises(TypeCheckError, match=r"(?s)return.*row=2\ncolumn=3"):
            added(A, B, result)
    assert added(torch.zeros(5, 3), B, None).shape == (5,), "sizes are of one call"


def test_functions_and_dataclasses_of_the_library_are_checked() -> None:
    assert len(SHAPED) > 20
    batch = batch_of([[1.0, 2.0]])
    assert add_outcome(batch, torch.zeros(1, 2, 1, dtype=torch.float64)).shape == (1, 2, 1)
    with pytest.raises(TypeCheckError, match="parameter"):
        add_outcome(batch, torch.zeros(1, 2))
    with pytest.raises(TypeCheckError, match="parameter"):
        Prompts(torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
