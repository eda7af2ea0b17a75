"""Figure 1: one generation as a trajectory, its reward at the end, and the credit that each token then gets.

The policy is a transformer of 3,637 parameters that has half learned to sort four numbers (sorter.safetensors):

    ascent train sort --length 4 --numbers 5 --policy.width 16 --policy.layers 1 --policy.heads 2 \\
        --steps 90 --lr 0.006 --threads 1
"""

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from ascent.core.advantages import ADVANTAGES
from ascent.core.loop import scored
from ascent.core.menu import name_of
from ascent.core.types import Batch, Prompts
from ascent.core.values import GAE
from ascent.engines.small.engine import SmallSampler, log_probs
from ascent.explain.explain import menu_label
from ascent.lab.figure import Choice, ControlState, DataTable, Figure, Look, Slider, short, signed
from ascent.oracle.exact import Table as Oracle
from ascent.policies import Transformer
from ascent.policies.small import Policy
from ascent.tasks.small.sort import Sort

_TASK = Sort(reward="positions", length=4, numbers=5)
_PROMPTS = ((3, 1, 4, 0), (2, 4, 1, 3), (4, 0, 2, 2), (1, 3, 0, 1))
_PROMPT_TEXTS = tuple((str(i), _TASK.text(list(prompt))) for i, prompt in enumerate(_PROMPTS))
_GROUP = 6
"""Responses to the prompt; the first is the one that is followed."""
_CREDITS = {name_of(cls): cls() for cls in ADVANTAGES if not (cls().needs or cls().start())}
"""Those of the menu that need nothing but the rewards of this group."""
_LABELS = {**{name: menu_label(type(credit)) for name, credit in _CREDITS.items()}, "gae": "GAE(λ), exact values"}

_SNIPPET = """\
import torch
from ascent.lab.figures.trajectory.figure import credit_of, group_of

batch = group_of(prompt={prompt}, temperature={temperature}, seed={seed})
print("response", batch.response[0, 0].tolist())
print("log-probs", [round(x, 3) for x in batch.logp_sampler[0, 0].tolist()])
print("reward", batch.reward[0, 0].item())
print("credit", [round(x, 3) for x in credit_of(batch, "{credit}", {lam}).tolist()])
"""


@lru_cache(maxsize=1)
def _policy() -> Policy:
    policy = Transformer(width=16, layers=1, heads=2)(_TASK.space, torch.Generator())
    policy.load_state_dict(load_file(Path(__file__).with_name("sorter.safetensors")))
    return policy


@lru_cache(maxsize=128)
def group_of(prompt: int, temperature: float, seed: int) -> Batch:
    """A group of responses to the prompt with their rewards, and the exact value of every state that they pass."""
    sampler = SmallSampler(_policy(), temperature, torch.Generator().manual_seed(seed))
    batch, _ = scored(_TASK, sampler.generate(Prompts.of(torch.tensor([_PROMPTS[prompt]])), _GROUP))
    table = _oracle(prompt, temperature)
    code = _TASK.numbers ** torch.arange(_TASK.length).flip(0)
    row = (batch.response[0] * code).sum(-1)  # responses are enumerated in this order
    return batch.add(value=table.exact_value[row].unsqueeze(0), reward=batch.reward.double())


@lru_cache(maxsize=64)
def _oracle(prompt: int, temperature: float) -> Oracle:
    return Oracle(_policy(), torch.tensor(_PROMPTS[prompt]), _TASK, temperature)


def credit_of(batch: Batch, name: str, lam: float) -> torch.Tensor:
    """δ of each token of the first response, by the library's own credit."""
    credit = GAE(lam=lam) if name == "gae" else _CREDITS[name]
    return credit(batch, {}).expand(batch.mask.shape)[0, 0]


def _compute(state: ControlState, _: Path | None) -> Look:
    state = state | {"prompt": int(state["prompt"])}
    batch = group_of(state["prompt"], state["temperature"], state["seed"])
    with torch.no_grad():  # π(· | s_t) at every state of the first response
        chances = log_probs(_policy(), batch)[0, 0].exp().tolist()
    step, prompt = state["step"], list(_PROMPTS[state["prompt"]])
    tokens, length = batch.response[0, 0].tolist(), _TASK.length
    logp = batch.logp_sampler[0, 0].double()
    running, over, now = logp.cumsum(0).tolist(), step == length, min(step, length - 1)
    credit = credit_of(batch, state["credit"], state["lam"]).tolist()
    rewards, value = batch.reward[0].sum(-1).tolist(), batch.value
    assert value is not None and batch.correct is not None
    verdict = f"Not sorted, yet {rewards[0]:g} positions are right, and that is what it is paid for."
    if batch.correct[0, 0]:
        verdict = "Sorted: every position is right."
    texts = {
        "step": str(step),
        "tokens": str(length),
        "temperature": short(state["temperature"]),
        "prompt": _TASK.text(prompt),
        "response": _TASK.text(tokens[:step]) if step else "nothing yet",
        "logp": signed(float(logp[step - 1])) if step else "–",
        "sum": signed(running[step - 1]) if step else "0",
        "reward": f"{rewards[0]:g} of {_TASK.max_reward:g}" if over else "not yet: it comes at the end",
        "credit": _LABELS[state["credit"]],
        "lam": short(state["lam"]),
        "mean": signed(float(batch.reward.mean()), 2),
        "value0": signed(float(value[0, 0, 0]), 2),
        "chance": f"{chances[now][tokens[now]]:.2f}",
        "credits": ", ".join(signed(x, 2) for x in credit) if over else "not yet",
        "verdict": verdict if over else "",
        **{f"c{i}": signed(x, 2) for i, x in enumerate(credit) if over},
        **{f"l{i}": signed(x, 2) for i, x in enumerate(logp.tolist())},
    }
    others = zip(batch.response[0].tolist(), rewards, strict=True)
    drawing = {
        "prompt": prompt,
        "tokens": tokens,
        "chances": chances,
        "logp": logp.tolist(),
        "reward": rewards[0] if over else None,
        "credit": credit if over else None,
        "values": value[0, 0].tolist() if over and state["credit"] == "gae" else None,
        "group": [{"text": _TASK.text(response), "reward": x} for response, x in others] if over else None,
        "length": length,
    }
    return Look(texts, drawing, _tables(batch, chances, running, credit, step), _SNIPPET.format(**state))


def _tables(batch: Batch, chances: list, running: list[float], credit: list[float], step: int) -> list[DataTable]:
    tokens, logp = batch.response[0, 0].tolist(), batch.logp_sampler[0, 0].tolist()
    rows = []
    for t in range(step):
        numbers = (f"{chances[t][tokens[t]]:.3f}", signed(logp[t]), signed(running[t]))
        rows.append([str(t + 1), str(tokens[t]), *numbers, signed(credit[t]) if step == len(credit) else "not yet"])
    head = ("token", "number", "probability", "log-prob", "running sum", "credit δ")
    tables = [DataTable("The trajectory so far", head, rows)]
    if step < len(credit):
        coming = [[str(n), f"{p:.3f}"] for n, p in enumerate(chances[step])]
        tables.append(DataTable("The next number", ("number", "probability"), coming))
    return tables


FIGURE = Figure(
    name="trajectory",
    place=1,
    title="Trajectory",
    about="A response is written token by token; the reward comes once, at the end, and credit is spread backwards.",
    controls=(
        Slider("step", "tokens written", 0, 0, _TASK.length, 1, "How far the response has been written."),
        Choice("prompt", "prompt", "0", _PROMPT_TEXTS, "To be sorted."),
        Slider("temperature", "temperature", 1.0, 0.2, 3.0, 0.1, "Divides the logits: low is greedy, high is even."),
        Slider("seed", "seed", 0, 0, 99, 1, "Another draw from the same policy."),
        Choice("credit", "credit", "centered", tuple(_LABELS.items()), "How R becomes δ."),
        Slider("lam", "λ of GAE", 0.95, 0.0, 1.0, 0.05, "0: the one-step TD error; 1: the whole return minus V."),
    ),
    compute=_compute,
    keys=(("space", "play and pause"), ("←  →", "one token back or on"), ("r", "back to the start")),
)
