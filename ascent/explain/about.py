"""About: what `ascent explain` says of a choice beyond its docstring. The other files of this folder have one for each.

What is said of TRL 1.16.0, verl 0.9.1 and the papers was read in their sources. Percentages and cosines come from a
small policy whose gradient is enumerated. "Unbiased" means: with sequence-sum weights, on the policy's own samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Text = str | Callable[[Any], str]
"""A text with the choice's fields in braces, or a function from the choice to its text."""
Gradient = Literal["exact", "scaled", "critic", "other"]
"""The expected gradient on the policy's own samples: ∇E[R], a constant times it, ∇E[R] if V is exact, or another."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What a choice computes, where it is biased, and what others do under its name."""

    formula: Text = ""
    """Its part of the objective. A test evaluates it against the code."""
    definitions: Text = ""
    """What the formula defines first: a critic's advantage, a ratio, the margin of a pair."""
    statistics: Text = ""
    """What the other symbols mean, and over what a mean or a sum is taken; one line for each."""
    words: Text = ""
    """Its part of the sentence that says what is maximised. For a named algorithm: what it is."""
    response_formula: str = ""
    response_words: str = ""
    """For weights: the same for a loss that has one term per response."""
    denominator: str = ""
    """What the weight of a token divides by."""
    gradient: Gradient | Callable[[Any], Gradient] = "other"
    """Not used for a loss: at ρ = 1 every surrogate has the gradient of the log-prob."""
    bias: str = ""
    """Where and why the gradient differs from ∇E[R]."""
    label: str = ""
    """A few words for a menu, where the name alone is not clear enough."""
    off: bool = False
    """Does it do nothing? An algorithm that has it does not mention its axis."""
    paper: str = ""
    trl: str = "none."
    verl: str = "none."
    """What TRL and verl have under this name, or instead of it."""
    others: str = ""


def off(bias: str = "None.", **texts: Any) -> About:
    """The About of a choice that does nothing."""
    return About(off=True, gradient="exact", bias=bias, **texts)


TEXTS = ("formula", "definitions", "statistics", "words", "response_words", "gradient")
OWN = {
    "advantage": About(formula="{name}(R)", words="the credit of {name} ({line})"),
    "loss": About(formula="{name}(logp, logp_old, δ)", words="the surrogate of {name} ({line}) for"),
    "pairs": About(
        formula="{name}(m)",
        definitions="m = the margin of the pair",
        words="Maximise the mean over pairs of the value of {name} ({line})",
    ),
    "weights": About(
        formula="weight_t",
        response_formula="Σ_t weight_t",
        words="sum, with the weights of {name} ({line}), of",
        response_words="sum, with the weights of {name} ({line}), of",
    ),
    "reference": About(words="the reference of {name} ({line})"),
    "exploration": About(formula="{name}·H", words="the entropy bonus of {name} ({line})"),
    "correction": About(formula="{name}·", words="weighted by {name} ({line})"),
    "groups": About(words="Groups are chosen by {name} ({line})"),
    "shaping": About(formula="{name}(L_i)", words="is shaped by {name} ({line})"),
    "critic": About(words="The critic is {name} ({line})"),
    "update": About(words="A step is taken by {name} ({line})"),
}
"""For a user's own choice without an About: texts from its class name and the first line of its docstring."""


def first_line(thing: Any) -> str:
    """The first line of a docstring, or "no description" if @dataclass generated it."""
    doc = inspect.getdoc(thing) or ""
    generated = doc.startswith(f"{getattr(thing, '__name__', '')}(")
    return doc.splitlines()[0] if doc and not generated else "no description"


def fill_in(about: About, choice: Any) -> About:
    """An About with the numbers of this choice, its class name and the first line of its docstring."""
    facts = {"name": type(choice).__name__, "line": first_line(type(choice)), **vars(choice)}
    texts: dict[str, Any] = {}
    for name in TEXTS:
        text = getattr(about, name)
        texts[name] = text(choice) if callable(text) else text.format_map(facts)
    return replace(about, **texts)
