r"""Figure 1: one generation as a trajectory, its reward, and the advantage of each token.

The policies are transformers of about 3,600 parameters. One has half learned to sort four numbers (sorter.safetensors):

    ascent train sort --length 4 --numbers 5 --policy.width 16 --policy.layers 1 --policy.heads 2 \
        --steps 90 --lr 0.006 --threads 1

The other one has begun to sort three numbers by two swaps, where an environment answers turns (swapper.safetensors):

    ascent train swaps --turns 2 --policy.width 16 --policy.layers 1 --policy.heads 2 \
        --steps 16 --lr 0.006 --threads 1
"""

from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from ascent.build.small_backend import SmallBackend
from ascent.core.advantages import ADVANTAGES
from ascent.core.loop import score_rollouts
from ascent.core.menu import name_of
from ascent.core.types import Batch, Prompts
from ascent.core.values import GAE
from ascent.explain.explain import menu_label
from ascent.lab.figure_base import Choice, ControlState, DataTable, Figure, Look, Slider, short, signed
from ascent.models import Transformer
from ascent.models.small_policies import Policy
from ascent.oracle.exact import ResponseTable as Oracle
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.tasks.small.multi_turn import Swaps
from ascent.tasks.small.sorting import Sort
from ascent.training.small_learner import log_probs


class World(NamedTuple):
    """A prompt and the task that rewards its responses."""

    task: Any
    prompt: tuple[int, ...]
    label: str
    policy: str
    best: float
    """The largest reward."""
    promise: str = "it comes at the end"
    """When the reward comes."""

    @property
    def plays(self) -> bool:
        """Whether a response has several turns."""
        return self.task.make_environment() is not None


_SORT = Sort(reward="positions", length=4, numbers=5)
_SWAPS, _OUTCOME = Swaps(turns=2), Swaps(turns=2, outcome=True)
_PER_TURN = "each turn pays the order that it makes"
_WORLDS = (
    *(World(_SORT, p, "", "sorter", 4) for p in ((3, 1, 4, 0), (2, 4, 1, 3), (4, 0, 2, 2), (1, 3, 0, 1))),
    World(_SWAPS, (2, 0, 1), ", two turns, paid per turn", "swapper", 2, _PER_TURN),
    World(_OUTCOME, (2, 0, 1), ", two turns, paid at the end", "swapper", 1),
    World(_SWAPS, (1, 0, 2), ", up to two turns, paid per turn", "swapper", 1, _PER_TURN),
)
_PROMPT_TEXTS = tuple((str(i), f"[{' '.join(map(str, w.prompt))}]{w.label}") for i, w in enumerate(_WORLDS))
_GROUP = 6
"""Number of responses to the prompt. The figure shows the first one token by token."""
_ADVANTAGES = {name_of(cls): cls() for cls in ADVANTAGES if not (cls().needs or cls().initial_state())}
"""The advantages that need only the rewards of this group."""
_LABELS = {**{name: menu_label(type(choice)) for name, choice in _ADVANTAGES.items()}, "gae": "GAE(λ), exact values"}

_SNIPPET = """\
import torch
from ascent.lab.figures.trajectory.figure import advantages_of, group_of

batch = group_of(prompt={prompt}, temperature={temperature}, seed={seed})
drawn = batch.mask[0, 0]  # what the policy wrote
print("response", batch.response[0, 0][batch.present[0, 0]].tolist())
print("log-probs", [round(x, 3) for x in batch.logp_sampler[0, 0][drawn].tolist()])
print("reward", batch.reward[0, 0].sum().item())
print("advantages", [round(x, 3) for x in advantages_of(batch, "{advantage}", {lam})[drawn].tolist()])
"""


@lru_cache(maxsize=2)
def _policy(name: str) -> Policy:
    space = _SORT.space if name == "sorter" else _SWAPS.space
    policy = Transformer(width=16, layers=1, heads=2)(space, torch.Generator())
    policy.load_state_dict(load_file(Path(__file__).with_name(f"{name}.safetensors")))
    return policy


@lru_cache(maxsize=128)
def group_of(prompt: int, temperature: float, seed: int) -> Batch:
    """Return a group of responses with their rewards and the exact values of their states."""
    world = _WORLDS[prompt]
    sampler = SmallPolicyEngine(_policy(world.policy), temperature, torch.Generator().manual_seed(seed))
    bound, prompts = SmallBackend().bind(world.task, None, {}), Prompts.of(torch.tensor([world.prompt]))
    if world.plays:
        prompts = replace(prompts, start_episodes=bound.conversations)
    batch, _ = score_rollouts(bound, sampler.generate(prompts, _GROUP))
    table = _oracle(prompt, temperature)
    every = {_words(table.batch, row): row for row in range(table.batch.mask.shape[1])}
    rows = torch.tensor([every[_words(batch, sample)] for sample in range(_GROUP)])
    value = table.exact_value[rows, : batch.mask.shape[-1] + 1]
    return batch.add(value=value.unsqueeze(0), reward=batch.reward.double())


def _words(batch: Batch, sample: int) -> tuple[int, ...]:
    """Return all tokens of a response, including observed ones."""
    return tuple(batch.response[0, sample][batch.present[0, sample]].tolist())


@lru_cache(maxsize=64)
def _oracle(prompt: int, temperature: float) -> Oracle:
    world = _WORLDS[prompt]
    return Oracle(_policy(world.policy), torch.tensor(world.prompt), world.task, temperature)


def advantages_of(batch: Batch, name: str, lam: float) -> torch.Tensor:
    """Return the advantage of each token of the first response. Those of observed tokens are not used."""
    choice = GAE(lam=lam) if name == "gae" else _ADVANTAGES[name]
    return choice(batch, {}).expand(batch.mask.shape)[0, 0]


class Event(NamedTuple):
    """One step of the animation: a token of the policy, or an observation of several tokens."""

    drawn: bool
    turn: int
    tokens: list[int]
    start: int
    """Index of the first token."""


def _events(batch: Batch, sample: int = 0) -> list[Event]:
    tokens = list(_words(batch, sample))
    drawn = batch.mask[0, sample].tolist()
    turns = [0] * len(tokens) if batch.turn is None else batch.turn[0, sample].tolist()
    runs = [list(run) for _, run in groupby(range(len(tokens)), key=lambda t: t if drawn[t] else -1 - turns[t])]
    return [Event(drawn[run[0]], turns[run[0]], [tokens[t] for t in run], run[0]) for run in runs]


def _compute(state: ControlState, _: Path | None) -> Look:
    state = state | {"prompt": int(state["prompt"])}
    world, batch = _WORLDS[state["prompt"]], group_of(state["prompt"], state["temperature"], state["seed"])
    events, drawn = _events(batch), batch.mask[0, 0]
    step = min(state["step"], len(events))
    with torch.no_grad():  # π(· | s_t) at every state of the first response
        chances = log_probs(_policy(world.policy), batch)[0, 0].exp().tolist()
    logp, advantages = (
        batch.logp_sampler[0, 0][drawn].double(),
        advantages_of(batch, state["advantage"], state["lam"])[drawn],
    )
    written, over = sum(event.drawn for event in events[:step]), step == len(events)
    answered = written if over else step - written
    running = [0.0, *logp.cumsum(0).tolist()]
    paid, rewards = _paid(batch, events), batch.reward[0].sum(-1).tolist()
    value = batch.value
    assert value is not None and batch.correct is not None
    reward = f"{rewards[0]:g} of {world.best:g}" if over else f"not yet: {world.promise}"
    if not over and world.promise == _PER_TURN:
        reward = f"{sum(paid[:answered]):g} so far: {world.promise}"
    texts = {
        "step": str(step),
        "tokens": str(len(events)),
        "where": _where(events, step) if world.plays else f"token {step} of {len(events)}",
        "temperature": short(state["temperature"]),
        "prompt": world.task.text(list(world.prompt)),
        "response": _shown(world, events[:step]) if step else "nothing yet",
        "logp": signed(float(logp[written - 1])) if step else "–",
        "sum": signed(running[written]) if step else "0",
        "reward": reward,
        "advantage": _LABELS[state["advantage"]],
        "lam": short(state["lam"]),
        "mean": signed(sum(rewards) / _GROUP, 2),
        "value0": signed(float(value[0, 0, 0]), 2),
        "chance": f"{float(logp[min(written, len(logp) - 1)].exp()):.2f}",
        "advantages": ", ".join(signed(x, 2) for x in advantages.tolist()) if over else "not yet",
        "verdict": _verdict(world, rewards[0], bool(batch.correct[0, 0])) if over else "",
        **{f"c{i}": signed(x, 2) for i, x in enumerate(advantages.tolist()) if over},
        **{f"l{i}": signed(x, 2) for i, x in enumerate(logp.tolist())},
        **{f"r{i}": f"{x:+g}".replace("-", "−") for i, x in enumerate(paid)},
    }
    group = [{"text": _shown(world, _events(batch, i)), "reward": x} for i, x in enumerate(rewards)]
    drawing = {
        "prompt": list(world.prompt),
        "tokens": list(_words(batch, 0)),
        "blocks": _blocks(world, events),
        "next": _next(world, events, step, chances) if not over else None,
        "promise": world.promise,
        "turns": world.plays,
        "answered": answered,
        "logp": logp.tolist(),
        "reward": rewards[0] if over else None,
        "advantages": advantages.tolist() if over else None,
        "values": value[0, 0].tolist() if over and state["advantage"] == "gae" else None,
        "group": group if over else None,
        "length": len(events),
    }
    tables = _tables(events, chances, running, advantages.tolist(), step, drawing["next"])
    return Look(texts, drawing, tables, _SNIPPET.format(**state))


def _paid(batch: Batch, events: list[Event]) -> list[float]:
    """Return the reward of each sampled token; an outcome reward is on the last one."""
    reward, actions = batch.reward[0, 0].tolist(), [event.start for event in events if event.drawn]
    return [reward[t] for t in actions] if len(reward) > 1 else [0.0] * (len(actions) - 1) + reward


def _shown(world: World, events: list[Event]) -> str:
    """Return a response as text; for several turns, the swaps and the resulting lists."""
    if not world.plays:
        return str(world.task.text([token for event in events for token in event.tokens]))
    return " ".join(str(event.tokens[0]) if event.drawn else world.task.text(event.tokens) for event in events)


def _where(events: list[Event], step: int) -> str:
    if not step:
        return "before the first turn"
    return f"turn {events[step - 1].turn + 1}" + ("" if events[step - 1].drawn else ", answered")


def _verdict(world: World, reward: float, right: bool) -> str:
    if world.plays:
        return "Sorted." if right else "Not sorted when the turns were over."
    if right:
        return "Sorted: every position is right."
    return f"Not sorted, yet {reward:g} positions are right, and that is what it is paid for."


def _blocks(world: World, events: list[Event]) -> list[dict[str, Any]]:
    """Return the turns and observations, each with the numbers of its events and of its first action."""
    blocks, action = list[dict[str, Any]](), 0
    for (turn, drawn), group in groupby(enumerate(events), key=lambda each: (each[1].turn, each[1].drawn)):
        part = list(group)
        tokens = [(number, token) for number, event in part for token in event.tokens]
        caption = (f"turn {turn + 1}: swap at" if drawn else "the environment answers") if world.plays else "response"
        blocks.append({"caption": caption, "drawn": drawn, "tokens": tokens, "action": action})
        action += len(tokens) if drawn else 0
    return blocks


def _next(world: World, events: list[Event], step: int, chances: list[list[float]]) -> dict[str, Any]:
    """Return the distribution of what comes next: of the policy, or of the environment."""
    if events[step].drawn:
        ways = [{"label": str(n), "p": p} for n, p in enumerate(chances[events[step].start])]
        caption = "π(place to swap at | state)" if world.plays else "π(next number | state)"
        return {"caption": caption, "ways": ways}
    answers: dict[str, float] = {}
    before = [event.tokens for event in events[:step] if not event.drawn]
    state = (tuple(before[-1]) if before else world.prompt, events[step].turn)
    for chance, _, answer in world.task.make_environment().outcomes(state, str(events[step - 1].tokens[0])):
        answers[f"[{answer.observation}]"] = answers.get(f"[{answer.observation}]", 0.0) + chance
    caption = "P(list | state, swap), which is the environment's: one swap in five slips"
    return {"caption": caption, "ways": [{"label": label, "p": p} for label, p in answers.items()]}


def _tables(
    events: list[Event], chances: list, running: list[float], advantages: list[float], step: int, following: Any
) -> list[DataTable]:
    rows, action = [], 0
    for number, event in enumerate(events[:step], 1):
        if not event.drawn:
            rows.append([str(number), " ".join(map(str, event.tokens)), *["observed"] * 3, "none"])
            continue
        token, logp = event.tokens[0], running[action + 1] - running[action]
        numbers = (f"{chances[event.start][token]:.3f}", signed(logp), signed(running[action + 1]))
        rows.append(
            [str(number), str(token), *numbers, signed(advantages[action]) if step == len(events) else "not yet"]
        )
        action += 1
    head = ("token", "number", "probability", "log-prob", "running sum", "advantage A")
    tables = [DataTable("The trajectory so far", head, rows)]
    if following is not None:
        coming = [[way["label"], f"{way['p']:.3f}"] for way in following["ways"]]
        tables.append(DataTable("What may come next", ("next", "probability"), coming))
    return tables


FIGURE = Figure(
    name="trajectory",
    place=1,
    title="Trajectory",
    about="A response is written token by token, in one turn or two; it gets a reward, and each token an advantage.",
    controls=(
        Slider("step", "tokens written", 0, 0, _SORT.length, 1, "How far the response has been written."),
        Choice(
            "prompt", "prompt", "0", _PROMPT_TEXTS, "To be sorted: written at once, or by swaps with answers between."
        ),
        Slider("temperature", "temperature", 1.0, 0.2, 3.0, 0.1, "Divides the logits: low is greedy, high is even."),
        Slider("seed", "seed", 0, 0, 99, 1, "Another draw from the same policy."),
        Choice("advantage", "advantage", "centered", tuple(_LABELS.items()), "How R becomes A."),
        Slider("lam", "λ of GAE", 0.95, 0.0, 1.0, 0.05, "0: the one-step TD error; 1: the whole return minus V."),
    ),
    compute=_compute,
    keys=(("space", "play and pause"), ("←  →", "one token back or on"), ("r", "back to the start")),
)
