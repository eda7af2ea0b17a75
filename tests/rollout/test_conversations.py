"""Conversations of language models with environments and tools in separate processes."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.build.backend import PreflightReport
from ascent.build.backends import BACKENDS
from ascent.build.preflight import report_episodes
from ascent.build.trained_run import Run
from ascent.cli.main import main
from ascent.core.errors import ConfigError, RunError
from ascent.core.loop import score_rollouts
from ascent.core.types import Prompts
from ascent.environments.chat_templates import ChatTemplate
from ascent.environments.episode_pool import InProcessEpisodePool
from ascent.models.causal_lm import CausalLM, LanguageModel
from ascent.rewards.small_task import BoundSmallTask
from ascent.rollout.conversation_task import bind_small_environment
from ascent.rollout.conversations import ConversationFactory
from ascent.runs.recorded_conversation import conversation
from ascent.tasks.small.multi_turn import Swaps
from ascent.tasks.text.table_tasks import Jsonl
from ascent.tasks.text.text_task import Problem
from tests.browser import until
from tests.chats import chat_tokenizer, stop_ids
from tests.environments.test_chat_templates import OWN
from tests.language import sampler_of, write_tiny
from tests.processes import ascent_process
from tests.runs.test_resume import bits

pytestmark = pytest.mark.long
WORLDS = """
import os, time
from ascent import Environment, Step


class Talk(Environment):
    def begin(self, problem, rng):
        self.rng, self.turns = rng, 0
        return f"hint {rng.randint(100, 999)}"

    def step(self, action):
        self.turns += 1
        if self.turns == 3:
            return Step("over", reward=1.0, done=True, reason="three turns")
        return Step(f"no {self.rng.randint(0, 9)}", reward=len(action) / 100)


class Falls(Talk):
    def step(self, action):
        if self.rng.random() < 0.4:
            raise ValueError("fell over")
        return super().step(action)


class Hangs(Talk):
    def step(self, action):
        if self.rng.random() < 0.4:
            time.sleep(60)
        return super().step(action)


class Waits(Talk):
    def step(self, action):
        place = os.path.dirname(__file__)
        if self.turns == 1 and os.path.exists(f"{place}/part/checkpoints/step_000001"):
            while not os.path.exists(f"{place}/go"):
                open(f"{place}/waits", "w").close()
                time.sleep(0.01)
        return super().step(action)


class Switches(Talk):
    def begin(self, problem, rng):
        return "/no_think " + super().begin(problem, rng)


class NeverBegins(Environment):
    def begin(self, problem, rng):
        raise RuntimeError("no world today")


class Small(Environment):
    def begin(self, problem, rng):
        if problem.prompt < "2":
            raise RuntimeError("too small a world")
        self.won = problem.prompt > "4"

    def step(self, action):
        return Step(reward=float(self.won), done=True)
"""
LIMITS = {"max_turns": 4, "turn_tokens": 9, "max_tokens": 40, "max_prompt": 64, "check": "number"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("play")
    write_tiny(folder / "tiny")
    (folder / "worlds.py").write_text(WORLDS)
    rows = [{"prompt": f"{a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def model(place: Path) -> Any:
    return CausalLM(model=str(place / "tiny"), dtype="float32").load(0)


def task_of(place: Path, world: str = "", **more: Any) -> Jsonl:
    environment = f"python:{place / 'worlds.py'}:{world}" if world else ""
    return Jsonl(**{"source": str(place / "sums.jsonl"), "environment": environment, **LIMITS, **more})


def language() -> Any:
    return next(backend for backend in BACKENDS if backend.name == "language")


def play(place: Path, model: Any, world: str, samples: int = 4, prompts: int = 3, **more: Any) -> tuple[Any, Any]:
    task = task_of(place, world, **more)
    with closing(language().bind(task, model, {})) as bound:
        sampler = sampler_of(model, limit=task.max_response_tokens, rows=5)
        sampler.max_sampled_tokens = task.max_tokens
        drawn = bound.draw(prompts, torch.Generator().manual_seed(0))
        return score_rollouts(bound, sampler.generate(drawn, samples)), bound


@pytest.fixture(scope="module")
def talk(place: Path, model: Any) -> tuple[Any, Any]:
    """Three prompts with four responses each, in an environment that does not fail."""
    return play(place, model, "Talk")


def said(model: Any, batch: Any, p: int, s: int) -> list[str]:
    """Return the observations of a response as text with special tokens."""
    observed = batch.present[p, s] & ~batch.mask[p, s]
    turn = batch.turn[p, s]
    return [
        model.tokenizer.decode(batch.response[p, s][observed & (turn == k)])
        for k in range(int(turn[observed].max()) + 1)
    ]


def test_environment_from_a_file_returns_observations_and_rewards(talk: Any, model: Any) -> None:
    (batch, errors), bound = talk
    assert not errors and bool(batch.valid.all())
    assert not bool(batch.truncated.any())
    assert bound.task.first_observation is not None
    for p in range(3):
        question = bound.readable_prompt(batch, p)
        assert "hint " in question.text, "what is said first stands in the prompt"
        for s in range(4):
            answers = said(model, batch, p, s)
            assert len(answers) == 2 and all("no " in answer for answer in answers)
            assert "turn 3: three turns" in batch.notes[p, s]
            turn, mask = batch.turn[p, s], batch.mask[p, s]
            assert int(turn[mask].max()) == 2
            paid = [float(batch.reward[p, s][turn == k].sum()) for k in range(3)]
            assert paid[2] >= 1.0 and all(0 <= part < 0.2 for part in paid[:2])
    everything = {answer for p in range(3) for s in range(4) for answer in said(model, batch, p, s)}
    assert len(everything) > 3, "each episode has its own luck"
    measured = dict(zip(batch.measure_names, batch.measures.unbind(-1), strict=True))
    assert bool((measured["turns"] == 3).all())


def test_truncated_turns_and_environment_seconds_are_measured(talk: Any, model: Any) -> None:
    (batch, _), _ = talk
    measured = dict(zip(batch.measure_names, batch.measures.unbind(-1), strict=True))
    for p in range(3):
        for s in range(4):
            turns = [batch.response[p, s][batch.mask[p, s] & (batch.turn[p, s] == k)] for k in range(3)]
            cut = [k for k, turn in enumerate(turns) if len(turn) == 9 and int(turn[-1]) not in model.stop_token_ids]
            assert measured["turns/cut"][p, s] == len(cut)
            noted = conversation({"reason": batch.notes[p, s], **row_of(batch, p, s)})
            assert [said.turn - 1 for said in noted if "cut off at 9 tokens" in said.note] == cut
    assert bool((measured["time/environment"] > 0).all()) and bool((batch.environment_seconds > 0).sum(-1).eq(3).all())
    assert 0 < float(measured["turns/cut"].sum()) < 36, "some are cut off and some are not"


def test_preflight_describes_the_episodes(talk: Any, place: Path) -> None:
    (batch, _), _ = talk
    cut = int(batch.measures[..., batch.measure_names.index("turns/cut")].sum())
    report = PreflightReport()
    report_episodes(batch, task_of(place, "Talk"), report)
    assert report.lines[0].startswith(f"episodes   12 played: 3.0 turns on average, 3 to 3; {cut} of 36 turns cut off")
    assert bool(report.warnings) == (cut > 18)
    report_episodes(batch, task_of(place, tools=("calculator",)), report)
    assert "no call of a tool" in report.lines[-1] and "nothing was called" in report.warnings[-1]
    called = batch.add(
        measures=torch.cat([batch.measures, torch.tensor([2.0, 1.5]).expand(3, 4, 2)], -1),
        measure_names=(*batch.measure_names, "tools/calls", "tools/unparsed"),
    )
    report_episodes(called, task_of(place, tools=("calculator",)), report)
    assert "24 calls of tools: 18 unparsed" in report.lines[-1] and "do not parse" in report.warnings[-1]


def row_of(batch: Any, p: int, s: int) -> dict[str, Any]:
    there = batch.present[p, s]
    tokens, mask, turn = (part[p, s][there].tolist() for part in (batch.response, batch.mask, batch.turn))
    return {"response": tokens, "pieces": list(map(str, tokens)), "mask": mask, "turn": turn}


def test_suffix_equals_the_template_and_sampled_tokens_are_unchanged(talk: Any, model: Any) -> None:
    """Check each turn: sampled tokens, the stop token of truncated turns, and the template's text around them."""
    (batch, _), _ = talk
    for p in range(3):
        for s in range(4):
            words = model.tokenizer.decode(batch.response[p, s][batch.present[p, s]])
            tail = model.tokenizer.apply_chat_template(
                [{"role": "assistant", "content": "x"}, {"role": "user", "content": "no 1"}],
                tokenize=False,
                add_generation_prompt=True,
            ).split("x", 1)[1]
            before, after = tail.split("no 1")
            assert words.count(after) == 2 and before.strip() and before in words


def test_the_log_probs_of_a_conversation_are_those_of_one_forward_pass(talk: Any, model: Any) -> None:
    (batch, _), _ = talk
    with torch.no_grad():
        for p in range(3):
            prompt = batch.prompt[p][batch.prompt[p] >= 0]
            for s in range(4):
                there, mask = batch.present[p, s], batch.mask[p, s]
                ids = torch.cat([prompt, batch.response[p, s][there]])
                logp = torch.log_softmax(model.model(ids[None]).logits[0].double(), -1)[len(prompt) - 1 : -1]
                want = logp.gather(-1, batch.response[p, s][there][:, None])[:, 0]
                assert (batch.logp_sampler[p, s][there] - want)[mask[there]].abs().max() < 1e-4


@pytest.mark.parametrize(("world", "why"), [("Falls", "ValueError: fell over"), ("Hangs", "longer than 3 s")])
def test_an_environment_that_fails_makes_its_response_invalid_with_the_reason(
    place: Path, model: Any, world: str, why: str
) -> None:
    (batch, errors), _ = play(place, model, world, turn_seconds=3.0)
    failed = ~batch.valid.flatten()
    assert 0 < int(failed.sum()) < 12
    assert len(errors) == int(failed.sum()) and all(why in error for error in errors)
    for bad, note in zip(failed.tolist(), batch.notes.flatten().tolist(), strict=True):
        assert (why in note) == bad


@pytest.fixture(scope="module")
def small(place: Path, model: Any) -> tuple[Any, Any]:
    """Eight prompts without answers, in an environment that cannot begin with some of them."""
    rows = [{"prompt": f"{a} and {b}?"} for a in range(6) for b in range(4)]
    (place / "open.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return play(place, model, "Small", 1, 8, source=str(place / "open.jsonl"), turn_tokens=2)


def test_a_problem_that_an_environment_cannot_begin_with_fails_alone(small: Any) -> None:
    (batch, errors), bound = small
    failed = [bound.readable_prompt(batch, p).text < "2" for p in range(8)]
    assert 0 < sum(failed) < 8
    assert (~batch.valid[:, 0]).tolist() == failed
    assert len(errors) == sum(failed)
    for error in errors:
        assert "cannot begin with the problem" in error and "RuntimeError: too small a world" in error


def test_full_reward_is_correct_without_a_reference_answer(small: Any) -> None:
    """Games have no reference answers: a won game is correct."""
    (batch, _), bound = small
    won = [bound.readable_prompt(batch, p).text > "4" for p in range(8)]
    assert 0 < sum(won) < 8
    assert batch.correct[:, 0].tolist() == won
    assert batch.measure_names[0] == "lenient" and (batch.measures[:, 0, 0] == 1).tolist() == won


def test_environment_that_never_begins_stops_the_run(place: Path, tmp_path: Path) -> None:
    how = {"model": str(place / "tiny"), "preflight": False, "prompts": 2, "samples": 2, **LIMITS}
    with pytest.raises(RunError, match=r"on 4 of 4 responses.*cannot begin with .*RuntimeError: no world today"):
        ascent.train(
            f"jsonl:{place / 'sums.jsonl'}",
            environment=f"python:{place / 'worlds.py'}:NeverBegins",
            out=tmp_path / "run",
            **how,
        )


def decided(bits: dict[str, Any]) -> dict[str, Any]:
    """Remove what depends on the order of replies: the last bits of log-probs, and the composition of batches."""
    free = ("logp_sampler", "sampling/", "time/")

    def settled(value: Any) -> Any:
        rows = isinstance(value, list) and all(isinstance(row, dict) for row in value)
        return [{k: v for k, v in row.items() if not k.startswith(free)} for row in value] if rows else value

    return {name: settled(value) for name, value in bits.items() if name != "occupancy.jsonl"}


@pytest.mark.smoke
def test_run_killed_during_a_conversation_resumes_exactly(place: Path, tmp_path: Path) -> None:
    """From the command line, with adapters, a critic, mini- and micro-batches and top-p, all at once.

    Its environment stops in a second turn of the second step, until the trainer is killed.
    """
    flags: dict[str, Any] = {"model": place / "tiny", "lr": 1e-3, "steps": 2, "checkpoint-every": 1, **LIMITS}
    flags |= {"prompts": 2, "samples": 2, "eval-prompts": 2, "eval-every": 1, "record-every": 1, "threads": 1}
    flags |= {"algorithm": "ppo", "policy.lora": 2, "epochs": 2, "minibatches": 2, "micro-batch": 60, "top-p": 0.9}
    flags["environment"] = f"python:{place / 'worlds.py'}:Waits"
    rows = f"jsonl:{place / 'sums.jsonl'}"
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command, went = ["train", rows, *words, "--no-preflight", "--out"], place / "go"
    trainer = ascent_process(tmp_path, *command, place / "part")
    until(lambda: (place / "waits").exists() or trainer.poll() is not None, 120)
    trainer.kill()
    assert trainer.wait() == -signal.SIGKILL, trainer.stderr
    assert [line["step"] for line in Run(place / "part").metrics] == [0]
    went.touch()
    assert main(["resume", str(place / "part")]) == main([*command, str(tmp_path / "whole")]) == 0
    killed, whole = (decided(bits(run)) for run in (place / "part", tmp_path / "whole"))
    assert killed.keys() == whole.keys() and [name for name in whole if killed[name] != whole[name]] == []
    assert {row["turns"] for row in Run(place / "part").metrics} == {3.0}


# ---- tools ------------------------------------------------------------------------------------------------------


def test_tool_calls_get_results_and_a_turn_without_a_call_ends_the_response(place: Path, model: Any) -> None:
    task = task_of(place, tools=("calculator",), max_prompt=1024)
    with closing(language().bind(task, model, {})) as bound:
        prompts = bound.draw(1, torch.Generator().manual_seed(0))
        assert "calculator" in model.tokenizer.decode(prompts.prompt[0]), "the prompt says which tools there are"
        with closing(prompts.start_episodes(prompts, 3, [1, 2, 3])) as episodes:
            turns = ['<call>calculator {"expression": "12*12"}</call>', "<call>calculator {</call>", "144"]
            for response, words in enumerate(turns):
                episodes.submit_turn(response, [*model.tokenize(words), model.eos_token_id])
            found: dict[int, Any] = {}
            while len(found) < 3:
                found |= dict(episodes.poll(wait=True))
    assert not episodes.has_step_rewards, "the reward is the outcome's, and not one per token"
    assert "144" in model.tokenizer.decode(found[0].tokens) and "calls=1 unparsed=0" in found[0].note
    assert "error" in model.tokenizer.decode(found[1].tokens) and "unparsed=1" in found[1].note
    assert found[2].tokens == [] and found[2].error is None


def test_the_last_turn_is_graded(talk: Any) -> None:
    (batch, _), bound = talk
    turn = torch.where(batch.mask, batch.turn, -1)
    graded = bound.task._responses(replace(batch))
    for (problem, words), tokens, turns in zip(graded, batch.response.flatten(0, 1), turn.flatten(0, 1), strict=True):
        assert words == bound.response_text(tokens[turns == 2].tolist()) and problem.answer


def test_an_environment_and_tools_are_objects_in_python(place: Path, tmp_path: Path) -> None:
    """A class and a function without a file are pickled for the processes and never read from the run folder."""
    how: dict[str, Any] = {"model": str(place / "tiny"), "preflight": False, "steps": 1, "prompts": 2, "samples": 2}
    how |= {
        "eval_prompts": 2,
        "max_tokens": 12,
        "record_every": 1,
        "check": "number",
        "max_prompt": 1024,
        "turn_tokens": 6,
    }
    rows = [{"prompt": f"{a} + 1?", "answer": str(a + 1)} for a in range(20)]
    high = 7

    class Higher(ascent.Environment):
        def step(self, action: str) -> ascent.Step:
            return ascent.Step("", float(high), done=True)

    run = ascent.train(rows, environment=Higher, out=tmp_path / "environment", **how)
    assert run.metrics[-1]["reward"] == pytest.approx(7.0)
    assert run.config.task.environment.startswith("object:Higher@")
    assert ascent.resume(run.folder, environment=Higher).info == run.info, "it is finished, and the object is its own"
    with pytest.raises(ConfigError, match="Higher differs from that of this run"):
        ascent.resume(run.folder, environment=type("Higher", (Higher,), {}))

    def double(number: int) -> int:
        """Doubles a number.

        Args:
            number: Any.
        """
        return 2 * number

    run = ascent.train(rows, tools=[double, "calculator"], out=tmp_path / "tools", **how)
    assert [name.partition("@")[0] for name in run.config.task.tools] == ["object:double", "calculator"]
    assert run.metrics[-1]["turns"] >= 1
    with pytest.raises(ConfigError, match="a tool must be a function"):
        ascent.train(rows, tools=[3], out=tmp_path / "no", **how)


def test_concurrent_generation_calls_get_their_own_replies(place: Path, model: Any) -> None:
    task = task_of(place, "Talk")
    with closing(language().bind(task, model, {})) as bound:
        prompts = bound.draw(1, torch.Generator().manual_seed(0))
        one, two = (prompts.start_episodes(prompts, 2, [seed, seed + 1]) for seed in (1, 10))
        one.submit_turn(0, model.tokenize("a"))
        two.submit_turn(1, model.tokenize("b"))
        assert bound.conversations.opening(bound.problem(3)).startswith("hint")
        assert [response for response, _ in two.poll(wait=True)] == [1]
        assert [response for response, _ in one.poll(wait=True)] == [0]
        one.close()
        two.close()


def test_poll_without_wait_does_not_wait_for_beginning_episodes() -> None:
    class Slow(InProcessEpisodePool):
        looks = 0

        def wait_for_replies(self, wait: float) -> list[Any]:
            self.looks += 1
            return super().wait_for_replies(wait) if self.looks > 3 else []

    with closing(bind_small_environment(BoundSmallTask(Swaps()))) as bound:
        prompts = bound.held_out(1)
        bound.conversations.pool = Slow(Swaps().make_environment)
        with closing(prompts.start_episodes(prompts, 1, [1])) as episodes:
            episodes.submit_turn(0, [0])
            assert [episodes.poll(wait=False) for _ in range(3)] == [[], [], []]
            assert len(episodes.poll(wait=False)) == 1, "begun and answered"


@pytest.mark.parametrize(
    ("template", "world", "system", "behind"),
    [
        ("a switch in the system message", "Talk", "Be brief. /no_think", "<think>\n\n</think>\n"),
        ("a switch in the system message", "Switches", "Be brief.", ""),
        ("the last switch of any message", "Talk", "Be brief. /no_think", "<think></think>"),
        ("the last switch of any message", "Switches", "", "<think></think>"),
        ("the last switch of any message", "Talk", "", "<think>\n"),
    ],
)
def test_later_turns_are_prompted_as_the_first_one(
    place: Path, model: Any, monkeypatch: pytest.MonkeyPatch, template: str, world: str, system: str, behind: str
) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", OWN[template])
    (rollouts, _), _ = play(place, model, world, samples=2, prompts=2, system=system, max_prompt=90, max_context=250)
    end = model.tokenize(f"assistant\n{behind}")
    observations = 0
    for i, prompt in enumerate(rollouts.prompt):
        assert prompt[prompt >= 0].tolist()[-len(end) :] == end
        for k in range(2):
            present = rollouts.present[i, k]
            tokens, drawn = rollouts.response[i, k][present].tolist(), rollouts.mask[i, k][present].tolist()
            begins = [t for t in range(1, len(tokens)) if drawn[t] and not drawn[t - 1]]
            assert all(tokens[t - len(end) : t] == end for t in begins)
            observations += len(begins)
    assert observations >= 6


def test_observation_that_cannot_be_rendered_is_an_error_of_its_response(place: Path, model: Any) -> None:
    class Odd(ascent.Environment):
        def step(self, action: str) -> ascent.Step:
            return ascent.Step([{"role": "nobody", "content": "x"}] if action == "a" else "")

    with closing(bind_small_environment(BoundSmallTask(replace(Swaps())))) as bound:
        prompts = bound.held_out(1)
        bound.conversations.pool = InProcessEpisodePool(Odd)
        with closing(prompts.start_episodes(prompts, 2, [1, 2])) as episodes:
            episodes.submit_turn(0, [0])
            ((_, answer),) = episodes.poll(wait=True)
            assert answer.tokens == [] and "returned an empty observation without being done" in str(answer.error)
            bound.conversations.decode_turn = lambda *_: "a"
            episodes.submit_turn(1, [0])
            ((_, answer),) = episodes.poll(wait=True)
            assert "cannot be rendered" in str(answer.error)


def test_typed_prompt_is_a_problem(place: Path, model: Any) -> None:
    with closing(language().bind(task_of(place, "Talk"), model, {})) as bound:
        prompts, words = bound.encode_prompts(["so?"], False)
        assert "so?" in words[0] and "hint " in words[0]
        sampler = sampler_of(model, limit=80)
        assert not sampler.generate(prompts, 2).truncated.any()


def test_files_of_pairs_and_offline_data_have_no_conversations(place: Path, tmp_path: Path) -> None:
    task, how = (
        f"jsonl:{place / 'sums.jsonl'}",
        {"model": str(place / "tiny"), "preflight": False, "tools": "calculator"},
    )
    with pytest.raises(ConfigError, match="answer what the policy samples"):
        ascent.train(task, algorithm="sft", out=tmp_path / "sft", **how)
    ascent.train("swaps", steps=1, out=tmp_path / "run", prompts=2, samples=2)
    with pytest.raises(ConfigError, match="has several turns"):
        ascent.make_pairs(tmp_path / "run", tmp_path / "pairs.jsonl", 2)


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tools": ("calculator",), "environment": "python:x.py:Y"}, "only one of them can answer a turn"),
        ({"tools": ("calclator",)}, "calculator"),
        ({"environment": "guess"}, "python:FILE:CLASS"),
        ({"max_turns": 0}, "--max-turns and --turn-workers must be at least 1"),
        ({"turn_seconds": 0.0}, "--turn-seconds above 0"),
        ({"max_context": 10}, "includes the prompt"),
    ],
)
def test_impossible_conversation_settings_are_refused(place: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        task_of(place, **settings)


# ---- tokens that no tokenizer writes ----------------------------------------------------------------------------


def scripted(tokenizer: Any, script: list[int], stops: list[int]) -> LanguageModel:
    """Return a model that generates these tokens in order, whatever the prompt is."""
    import transformers

    size = len(tokenizer)
    shape = {"hidden_size": size, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(
        vocab_size=size,
        **shape,
        head_dim=8,
        max_position_embeddings=2048,
        eos_token_id=stops,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    follows = torch.full((size,), script[0])
    follows[torch.tensor(script[:-1])] = torch.tensor(script[1:])
    with torch.no_grad():
        for matrix in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            matrix.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()[follows, torch.arange(size)] = 40 / size**0.5
    return LanguageModel(model, tokenizer)


class Echo(ascent.Environment):
    """An environment of three turns that repeats the action with the number of the turn."""

    turns = 0

    def step(self, action: str) -> ascent.Step:
        self.turns += 1
        return ascent.Step(f"you said {action} {self.turns}", reward=self.turns, done=self.turns == 3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "bytes") for name in ("qwen3", "gemma3", "mistral", "gptoss", "glm4moe")), ("phi3", "spaces")],
)
def test_sampled_tokens_are_not_encoded_again(name: str, kind: str) -> None:
    """Single characters and incomplete ones: encoding the decoded text gives other tokens."""
    tokenizer = chat_tokenizer(name, kind)
    stops = stop_ids(name, tokenizer)
    half = "Ã" if kind == "bytes" else "<0xC3>"
    script = [*tokenizer.convert_tokens_to_ids([*"power", half]), stops[0]]
    lm = scripted(tokenizer, script, stops)
    words = lm.decode(script[:-1])
    assert lm.tokenize(words) != script[:-1] and None not in script
    template = ChatTemplate(tokenizer, (), stops)
    conversations = ConversationFactory(
        InProcessEpisodePool(Echo),
        lambda *_: Problem("?"),
        lambda turn, _: lm.decode(turn[:-1]),
        render_observation=lambda step, turn, history: template.render_observation(turn, step.observation, history),
    )
    prompt = lm.encode([{"role": "user", "content": "How high is it?"}])
    prompts = replace(Prompts.of(torch.tensor([prompt])), start_episodes=conversations)
    rollouts = sampler_of(lm, limit=300).generate(prompts, 2)
    for s in range(2):
        tokens, mask = rollouts.response[0, s][rollouts.present[0, s]], rollouts.mask[0, s][rollouts.present[0, s]]
        observed = [template.render_observation(script, f"you said {words} {turn}") for turn in (1, 2)]
        assert tokens.tolist() == [*script, *observed[0], *script, *observed[1], *script]
        assert tokens[mask].tolist() == script * 3 and not bool(rollouts.truncated[0, s])
        assert f"you said {words} 2" in tokenizer.decode(tokens)
        with torch.no_grad():
            logits = lm.model(torch.cat([torch.tensor(prompt), tokens])[None]).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
        assert torch.allclose(rollouts.logp_sampler[0, s][rollouts.mask[0, s]], logp[mask], atol=1e-4)
