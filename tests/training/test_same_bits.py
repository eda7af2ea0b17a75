"""With several threads a CPU computes the same bits every time: no sum whose order is up to the threads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ascent.core.algorithms import ALGORITHMS
from ascent.core.types import Space
from ascent.models.small_policies import PerPosition
from ascent.training.language_learner import LanguageCritic
from tests.language import batch_of, model_of
from tests.training.test_language_learner import credited, learner_of


class InAnyOrder(TorchDispatchMode):
    """Sees kernels that add numbers up in the order in which threads come."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        adds = "index_put" in str(func) and (args[3:4] == (True,) or (kwargs or {}).get("accumulate", False))
        if adds:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "gspo"])
def test_language_model_update_is_deterministic(name: str, shares: bool) -> None:
    lm, algorithm = model_of(dtype=torch.float32), ALGORITHMS[name]
    lm.can_share_prompts = shares
    learner = learner_of(lm, algorithm)
    batch = credited(batch_of(lm), algorithm, learner)
    with InAnyOrder() as order:
        learner.step(batch, algorithm.objective, algorithm.update)
    assert not order.seen


def test_critic_update_is_deterministic() -> None:
    lm = model_of(dtype=torch.float32)
    batch = batch_of(lm)
    critic = LanguageCritic(lm, shared=False)
    with InAnyOrder() as order:
        critic(batch).sum().backward()
    assert not order.seen and any(p.grad is not None for p in critic.separate_backbone.parameters())


def test_positional_policy_update_is_deterministic() -> None:
    policy = PerPosition()(Space(vocab=5, prompt_length=3, limit=3), torch.Generator().manual_seed(0))
    with InAnyOrder() as order:
        policy.all_logits(torch.tensor([[1, 1, 2], [1, 0, 2]])).sum().backward()
    assert not order.seen and policy.embedding.grad is not None


TWICE = """
import torch
torch.set_num_threads(2)
from ascent.training.packing import gather_rows
g = torch.Generator().manual_seed(0)
hidden, slope = torch.randn(200, 256, generator=g).requires_grad_(), torch.randn(1024, 256, generator=g)
places, found = torch.randint(8, (1024,), generator=g), set()
for _ in range(40):
    hidden.grad = None
    gather_rows(hidden, places).backward(slope)
    found.add(hidden.grad.numpy().tobytes())
print(len(found))
"""


def test_gradients_of_a_repeated_index_are_deterministic() -> None:
    """In a process of its own, for threads that were made once are not there after a fork."""
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["1"]
