"""Recorded responses: the texts of tokens, entropies, and failed rewards."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ascent
from ascent.core.types import Batch
from ascent.runs.rollout_files import REPLACEMENT_CHARACTER, TokenTexts
from ascent.tasks.small.sorting import Sort
from ascent.training.language_learner import LanguageLearner, fetch_result


class Bytes:
    """A vocabulary of single bytes and a few longer tokens that begin or end inside a character."""

    TOKENS = (*(bytes([i]) for i in range(256)), " café".encode(), " caf\u00e9"[:4].encode() + b"\xc3", b"\xa9 au", b"")

    def text(self, ids: list[int]) -> str:
        return b"".join(self.TOKENS[i] for i in ids).decode(errors="replace")


class Spaced:
    """Tokens with a leading space, which the decoder omits at the start of a text."""

    TOKENS = (" so", " it", " is", "n't", ",", "\n", " ")

    def text(self, ids: list[int]) -> str:
        return "".join(self.TOKENS[i] for i in ids).removeprefix(" ")


def test_pieces_of_a_list_of_numbers() -> None:
    pieces = TokenTexts(Sort(numbers=10, end=True))
    assert pieces([1, 0, 10], "[1 0 end]") == ["[1", " 0", " end]"]
    assert pieces([7], "[7]") == ["[7]"]


def test_character_belongs_to_the_token_that_completes_it() -> None:
    pieces = TokenTexts(Bytes())
    assert pieces([257, 258], " café au") == [" caf", "é au"]
    assert pieces([*"€!".encode(), 259], "€!") == ["", "", "€", "!", ""]
    assert pieces([0xE2, 0x82], REPLACEMENT_CHARACTER) == ["", REPLACEMENT_CHARACTER], (
        "a character that never ends is shown once, as in the text"
    )


def test_pieces_concatenate_to_the_text() -> None:
    pieces, rng = TokenTexts(Bytes()), random.Random(0)
    for _ in range(500):
        ids = [rng.randrange(260) if rng.random() < 0.5 else rng.choice("日本é a".encode()) for _ in range(12)]
        whole = Bytes().text(ids)
        found = pieces(ids, whole)
        assert len(found) == len(ids) and "".join(found) == whole


def test_space_belongs_to_the_following_word() -> None:
    ids = [0, 1, 2, 3, 4, 6, 0, 5]
    whole = Spaced().text(ids)
    found = TokenTexts(Spaced())(ids, whole)
    assert "".join(found) == whole and found[:4] == ["so", " it", " is", "n't"]


def test_unmatched_text_falls_back_to_token_texts() -> None:
    class Odd:
        def text(self, ids: list[int]) -> str:
            return "?" if len(ids) > 1 else f"<{ids[0]}>"

    assert TokenTexts(Odd())([3, 4], "?") == ["<3>", "<4>"]


def test_pieces_of_a_real_vocabulary(tmp_path: Path) -> None:
    """A byte-level BPE vocabulary without any token for a non-ASCII character."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["sort the numbers, please", "the sorted numbers are"], vocab_size=300)

    class Vocabulary:
        def text(self, ids: list[int]) -> str:
            return trained.decode(ids)

    text = "the numbers 日本 are 😀, naïve"
    ids = trained.encode(text).ids
    found = TokenTexts(Vocabulary())(ids, text)
    assert "".join(found) == text and len(found) == len(ids) and "日" in found and "😀" in found


# ---- entropy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [0, 20])
def test_recorded_entropies_average_to_the_metric(micro: int, tmp_path: Path) -> None:
    given = {"length": 3, "numbers": 4, "end": True, "prompts": 4, "samples": 3, "record_rollouts": "all"}
    run = ascent.train("sort", out=tmp_path / "run", show=False, steps=2, micro_batch=micro, **given)
    for step, line in enumerate(run.metrics):
        rows = run.rollouts(step)
        assert len(rows) == 12 and all(len(row["entropy"]) == len(row["response"]) for row in rows)
        every = [x for row in rows for x in row["entropy"]]
        assert sum(every) / len(every) == pytest.approx(line["entropy"], rel=1e-5)


def test_recorded_entropy_is_that_of_the_first_update(tmp_path: Path) -> None:
    """In `lecture`, the first update has the sampling policy, so the entropy is that of its probabilities."""
    run = ascent.train("lecture", out=tmp_path / "run", show=False, steps=2, record_every=1, epochs=3, minibatches=3)
    rows = run.rollouts(1)
    first = [row for row in rows if row["logp_update"][0] == 0]
    for t in range(3):
        seen = {row["response"][t]: row["logp_old"][t] for row in first}
        (entropy,) = {row["entropy"][t] for row in first}
        assert entropy > 0 and all(x < 0 for x in seen.values())
        assert -sum(np.exp(x) * x for x in seen.values()) <= entropy + 1e-5, "a part of the sum"


def test_a_reward_model_has_no_entropy(tmp_path: Path) -> None:
    given = {"algorithm": "reward-model", "length": 3, "numbers": 4, "prompts": 4, "steps": 1}
    run = ascent.train("sort", out=tmp_path / "run", show=False, **given)
    assert "entropy" not in run.rollouts(0)[0]


def test_language_model_records_entropy() -> None:
    from ascent.core.algorithms import ALGORITHMS
    from tests.language import batch_of, model_of

    algorithm, lm = ALGORITHMS["dr-grpo"], model_of()
    learner = LanguageLearner(lm, algorithm.update, False, algorithm.outputs, micro_batch=12)
    batch: Batch = algorithm.compute_advantages(batch_of(lm), algorithm.initial_state())[0]
    mini = batch.add(weight=algorithm.weights(batch))
    stepped = learner.step(mini, algorithm.objective, algorithm.update)
    assert stepped.entropy is not None and stepped.entropy.shape == mini.mask.shape
    assert torch.allclose((stepped.entropy * mini.loss_mask).sum(), stepped.sums["entropy"])
    for given in (stepped, replace(stepped, entropy=None)):  # as a GPU's numbers are fetched
        found = fetch_result(given, torch.device("cpu"))
        assert found.metrics.keys() == given.metrics.keys() and found.sums == given.sums
        assert torch.equal(found.logp, given.logp)
        assert found.entropy is None if given.entropy is None else torch.equal(found.entropy, given.entropy)


# ---- status -----------------------------------------------------------------------------------------


def rows_of(tmp_path: Path, reward: str, **more: Any) -> list[dict[str, Any]]:
    (tmp_path / "own.py").write_text(f"def own(prompt, response):\n    return {reward}\n")
    given = {"reward": f"python:{tmp_path / 'own.py'}:own", "max_reward_errors": 1.0, **more}
    return ascent.train("lecture", out=tmp_path / "run", show=False, steps=1, **given).rollouts(0)


def test_failed_rewards_are_marked(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "1 / response[0]")
    assert {row["status"] for row in rows if row["response"][0] == 0} == {"failed"}
    assert {row["status"] for row in rows if row["response"][0] != 0} == {"ok"}


def test_excluded_groups_are_not_marked_as_failed(tmp_path: Path) -> None:
    """No group has a signal, so none is trained on, but the rewards are recorded."""
    rows = rows_of(tmp_path, "1", groups="with-signal")
    assert not any(row["valid"] for row in rows) and {row["status"] for row in rows} == {"ok"}


# ---- updates ----------------------------------------------------------------------------------------


def test_clip_ratios_of_every_update(tmp_path: Path) -> None:
    run = ascent.train("lecture", out=tmp_path / "a", show=False, steps=1)
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean"):
        own = [line[name] for line in run.updates if line["step"] == 0]
        assert len(own) == 10 and own[0] == 0 < max(own)
        assert sum(own) / 10 == pytest.approx(run.metrics[0][name])
    plain = ascent.train("lecture", out=tmp_path / "b", show=False, steps=1, loss="log-prob")
    assert set(plain.updates[0]) == {"step", "update", "loss", "grad_norm"}
    assert json.loads((tmp_path / "b" / "updates.jsonl").read_text().splitlines()[0]) == plain.updates[0]
