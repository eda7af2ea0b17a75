"""Several ranks give the numbers of one process. `python -m benchmarks.ranks` measures every row, and kills ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language import batch_of, model_of

from ascent.core.types import Refused
from ascent.engines.backends import backend_of
from ascent.engines.ranks.ranks import ALONE, shares
from ascent.launch import refuse_other
from ascent.settings import config_from, configure

ROWS = ["grpo", "ppo", "trpo", "gspo", "dpo", "process-reward"]
HARD = ["tied embeddings", "adapters (LoRA)", "a rank without work", "unequal passes", "checkpointing"]
WHOLE = ["exact KL in the loss", "padded (GPT-2)", "five steps", "checkpoints"]


# ---- one group of processes for all cases


@pytest.fixture(scope="module")
def gaps() -> dict[str, Any]:
    from benchmarks.ranks import measure

    return measure([*ROWS, *HARD, *WHOLE], sizes=(3,))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ROWS, *HARD, *WHOLE])
def test_three_ranks_give_the_numbers_of_one_process(gaps: dict[str, Any], case: str) -> None:
    found = {name: value for name, value in gaps.items() if name.startswith(f"{case} |")}
    assert found, f"{case} was not measured"
    assert all(isinstance(value, float) and value <= 1e-12 for value in found.values()), found


# ---- shares


def test_shares_hold_every_prompt_once_and_are_balanced_by_tokens() -> None:
    batch = batch_of(model_of())
    cost = (batch.prompt >= 0).sum(-1) + batch.present.sum((1, 2))
    for size in (1, 2, 3, 5):
        parts = shares(batch, size)
        assert torch.cat(parts).sort().values.tolist() == [0, 1, 2]
        loads = [int(cost[part].sum()) for part in parts]
        assert max(loads) - min(loads) <= int(cost.max())


def test_a_share_divides_by_the_tokens_of_the_whole() -> None:
    batch = batch_of(model_of())
    part = batch.share(shares(batch, 2)[1])
    assert part.tokens == batch.tokens > int(part.counted.sum())


def test_one_process_has_nothing_to_do() -> None:
    batch, numbers = batch_of(model_of()), [torch.ones(3)]
    ALONE.sum(numbers)
    assert ALONE.share(batch) is batch and torch.equal(numbers[0], torch.ones(3))
    assert ALONE.gather(5) == [5] and ALONE.broadcast(6) == 6 and ALONE.most(7) == 7


# ---- settings


def test_settings_of_ranks_are_one_group_that_config_json_keeps() -> None:
    config = configure("lecture", {"ranks.shard": "replicate", "ranks.deadline": 30})
    assert config.to_dict()["ranks"] == {"name": "torchrun", "shard": "replicate", "deadline": 30.0}
    assert config_from(config.to_dict()) == config
    older = {name: value for name, value in config.to_dict().items() if name != "ranks"}
    assert config_from(older).ranks.shard == "auto", "a run from before there were ranks"


@pytest.mark.parametrize(
    ("task", "settings", "why"),
    [
        ("lecture", {"ranks.shard": "shard"}, "a small policy fits everywhere"),
        ("lecture", {"ahead": 1, "loss": "clipped"}, "would depend on their number"),
    ],
)
def test_what_ranks_cannot_do_is_refused_with_a_reason(task: str, settings: dict[str, Any], why: str) -> None:
    config = configure(task, settings)
    with pytest.raises(Refused, match=why):
        backend_of(config).check_ranks(config, 2)


def test_a_deadline_has_to_be_above_zero() -> None:
    with pytest.raises(Refused, match=r"--ranks\.deadline is 0"):
        configure("lecture", {"ranks.deadline": 0})


def test_ranks_that_were_started_with_other_settings_are_refused_by_name() -> None:
    one = configure("lecture", {}).to_dict()
    other = configure("lecture", {"samples": 12}).to_dict()
    with pytest.raises(Refused, match=r"rank 1 was started with samples = 12, and rank 0 with 10"):
        refuse_other(one, other, 1)
    refuse_other(one, dict(one), 1)
