"""Aggregation: every weight by hand on ragged responses, and who is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import F64, batch_of, close
from hypothesis import given
from hypothesis import strategies as st

from ascent.core.weights import WEIGHTS, FixedLength, SequenceMean, SequenceSum, TokenMean

# Lengths 3 1 | 2 4 in a width of 6, with a limit of 5: N = 4, ΣL = 10, L_max = 5.
LENGTHS = [[3, 1], [2, 4]]
EACH: dict[type, Any] = {
    TokenMean: [[1 / 10, 1 / 10], [1 / 10, 1 / 10]],
    SequenceMean: [[1 / 12, 1 / 4], [1 / 8, 1 / 16]],
    SequenceSum: [[1 / 4, 1 / 4], [1 / 4, 1 / 4]],
    FixedLength: [[1 / 20, 1 / 20], [1 / 20, 1 / 20]],
}


def spread(per_token: Any, lengths: Any, width: int) -> torch.Tensor:
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    return torch.where(mask, torch.tensor(per_token, dtype=F64).unsqueeze(-1), 0.0)


@pytest.mark.parametrize("cls", WEIGHTS)
@pytest.mark.parametrize("width", [4, 6, 9])
def test_golden_whatever_the_padded_width(cls: type, width: int) -> None:
    assert cls in EACH, f"{cls.__name__} is on the menu and has no golden"
    batch = batch_of([[0, 0], [0, 0]], LENGTHS, width=width, limit=5)
    close(cls()(batch), spread(EACH[cls], LENGTHS, width))


@pytest.mark.parametrize("cls", WEIGHTS)
def test_failed_and_wholly_masked_responses_are_in_neither_count(cls: type) -> None:
    """Two more responses a prompt, one failed and one without tokens: the weights of the rest stay the same."""
    more = [[*row, 4, 0] for row in LENGTHS]
    batch = batch_of([[0] * 4] * 2, more, width=6, limit=5, valid=[[True, True, False, True]] * 2)
    weight = cls()(batch)
    close(weight[:, :2], spread(EACH[cls], LENGTHS, 6))
    assert torch.equal(weight[:, 2:], torch.zeros(2, 2, 6, dtype=F64))


@pytest.mark.parametrize("cls", WEIGHTS)
def test_responses_without_signal_count(cls: type) -> None:
    """The denominator knows nothing of rewards or credit."""
    batch = batch_of([[0, 0], [0, 0]], LENGTHS, limit=5)
    other = batch_of([[1, 0], [0, 1]], LENGTHS, limit=5, advantage=torch.zeros(2, 2, 1, dtype=F64))
    assert torch.equal(cls()(batch), cls()(other))


@pytest.mark.parametrize("cls", WEIGHTS)
def test_nothing_to_count_is_zero_and_not_nan(cls: type) -> None:
    failed = batch_of([[0, 0]], [[2, 3]], valid=[[False, False]])
    masked = batch_of([[0, 0]], [[0, 0]], width=3)
    for batch in (failed, masked):
        assert torch.equal(cls()(batch), torch.zeros(1, 2, 3, dtype=F64))
    assert cls()(masked.select(torch.tensor([], dtype=torch.long))).shape == (0, 2, 3)


def test_fixed_length_uses_the_limit() -> None:
    short, long = (batch_of([[0, 0], [0, 0]], LENGTHS, limit=limit) for limit in (5, 50))
    close(FixedLength()(short), 10 * FixedLength()(long))
    for cls in (TokenMean, SequenceMean, SequenceSum):
        assert torch.equal(cls()(short), cls()(long))


@pytest.mark.parametrize("cls", WEIGHTS)
def test_masks_may_have_holes(cls: type) -> None:
    """L counts unmasked tokens, wherever they are."""
    holes = torch.tensor([[[True, False, True, True], [False, True, False, False]]])
    batch = batch_of([[0, 0]], [[3, 1]], width=4, limit=4)
    plain = cls()(batch)
    weight = cls()(batch.add(mask=holes))
    close(weight.sum(-1), plain.sum(-1))
    assert torch.equal(weight[~holes], torch.zeros(4, dtype=F64))


@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=4))
def test_totals(lengths: list[list[int]]) -> None:
    """Both means sum to 1, sequence sum to the mean length, fixed length to its share of the limit."""
    batch = batch_of([[0.0] * 3] * len(lengths), lengths, width=8, limit=7)
    flat = [n for row in lengths for n in row if n > 0]
    total = {cls: float(cls()(batch).sum()) for cls in WEIGHTS}
    mean = sum(flat) / len(flat) if flat else 0.0
    assert total[TokenMean] == pytest.approx(1.0 if flat else 0.0)
    assert total[SequenceMean] == pytest.approx(1.0 if flat else 0.0)
    assert total[SequenceSum] == pytest.approx(mean)
    assert total[FixedLength] == pytest.approx(mean / 7)


def test_equal_lengths_make_all_of_them_proportional() -> None:
    batch = batch_of([[0, 0], [0, 0]], [[3, 3], [3, 3]], limit=5)
    close(TokenMean()(batch), SequenceMean()(batch))
    close(SequenceSum()(batch), 3 * TokenMean()(batch))
    close(FixedLength()(batch), SequenceSum()(batch) / 5)
