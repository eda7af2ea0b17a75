"""`ascent explain` and `ascent list`: what a row or a choice computes, where it is biased, and who differs.

Words and equations of a choice are its docstring and those of its fields; formula.py fills in a row's numbers;
notes.py has the biases and what others do under the same name. Everything here returns plain text.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, fields
from typing import Any

from ascent import kl as kl_
from ascent.algorithms import ALGORITHMS, MENU, Algorithm
from ascent.diagnose import notes_preferences as shown
from ascent.diagnose.formula import STATISTICS, first_line, formula, objective_in_words, verdict
from ascent.diagnose.notes import DENOMINATOR, ESTIMATORS, NOTES, OFF, ROWS, Note
from ascent.exploration import Annealed
from ascent.groups import Overlong
from ascent.menu import hyperparameters, name_of, nearest
from ascent.own import load_python
from ascent.policies import POLICIES
from ascent.settings import field_docs
from ascent.tasks import TASKS, sorting
from ascent.types import Refused
from ascent.update import Adam
from ascent.values import Valued

__all__ = ["explain", "formula", "menu_text", "objective_in_words"]

WIDTH = 96
CHOICES: dict[str, tuple[type, ...]] = {**MENU, "policy": POLICIES, "task": TASKS}
KL_EXACT = "Σ_v π(v)·(log π(v) − log π_ref(v)), over the whole vocabulary at each state"


def _item(label: str, text: str, indent: int = 12) -> str:
    """A labelled paragraph, wrapped under itself."""
    start = f"  {label:<{max(indent, len(label) + 2 if label else 0)}}"
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _section(title: str, *lines: str) -> list[str]:
    shown = [line for line in lines if line]
    return ["", title, *shown] if shown else []


def _full(choice: Any) -> str:
    """clipped(low=0.2, high=0.2, dual=None): the name and every field."""
    values = (f"{f.name}={_value(getattr(choice, f.name))}" for f in fields(choice))
    return name_of(choice) + (f"({', '.join(values)})" if fields(choice) else "")


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _elsewhere(note: Note) -> list[str]:
    named = (("paper", note.paper), ("TRL 1.16", note.trl), ("verl 0.9", note.verl), ("others", note.others))
    return _section("ELSEWHERE, UNDER THE SAME NAME", *(_item(label, text) for label, text in named if text))


def _equation(thing: Any) -> str:
    """The first line of a docstring's second paragraph, or its only line."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    return paragraphs[min(1, len(paragraphs) - 1)].splitlines()[0]


def _estimate(name: str) -> str:
    """k2 = ½ ℓ²: what the estimator's own docstring begins with."""
    return f"{name} = " + (KL_EXACT if name == "exact" else re.split("[:,.]", _equation(kl_.ESTIMATORS[name]))[0])


def _where(algorithm: Algorithm) -> list[str]:
    """The symbols of the formula that it does not define itself."""
    if algorithm.loss.data in ("pairs", "steps"):
        return [_item("", shown.WHERE[getattr(algorithm.loss, "trains", "policy")], 2)]
    kl, lines = algorithm.kl, ["N responses, L_i unmasked tokens in response i, logp = log π of a token"]
    lines += ["R_i = 1 for every demonstration"] if algorithm.loss.data == "demonstrations" else []
    lines += [STATISTICS[type(algorithm.advantage)]] if type(algorithm.advantage) in STATISTICS else []
    if kl.where != "nowhere":
        lines.append(f"{_estimate(kl.estimator)}, with ℓ = log π − log π_ref")
    if kl.target is not None:
        lines.append(f"{inspect.getdoc(kl_.adapt)}, from {kl.coef:g}, with the target {kl.target:g}")
    if isinstance(algorithm.shaping, Overlong):
        lines.append(f"overlong: {_equation(Overlong)}; c = {algorithm.shaping.margin}")
    if isinstance(algorithm.exploration, Annealed):
        lines.append(f"{_equation(Annealed)}: {_full(algorithm.exploration)}")
    if not isinstance(algorithm.correction, OFF):
        token = "exp(logp_old_t − logp_sampler_t)·m_t"
        lines.append(f"w = {token if algorithm.correction.level == 'token' else 'Π_t ' + token}")
    return [_item("", line, 2) for line in lines]


def _traps(kl: Any) -> list[str]:
    """What the gradient of this penalty is."""
    if kl.where == "nowhere":
        return []
    in_loss, in_reward = ESTIMATORS[kl.estimator]
    here, there = (in_loss, in_reward) if kl.where == "loss" else (in_reward, in_loss)
    other = "reward" if kl.where == "loss" else "loss"
    return [
        _item("here", f"{kl.estimator} in the {kl.where}: {here}."),
        _item("not here", f"{kl.estimator} in the {other}: {there}."),
    ]


def _row(name: str) -> str:
    algorithm, note = ALGORITHMS[name], ROWS[name]
    choices = {axis: getattr(algorithm, axis) for axis in MENU}
    on = {axis: choice for axis, choice in choices.items() if not isinstance(choice, (*OFF, Adam))}
    off = [axis for axis, choice in choices.items() if isinstance(choice, OFF)]
    lines = [textwrap.fill(f"{name}: a row of the menu. {note.bias}", WIDTH)]
    lines += _section("CHOICES", *(_item(axis, _full(c)) for axis, c in on.items()), _item("off", ", ".join(off)))
    lines += _section("IN WORDS", _item("", objective_in_words(algorithm), 0))
    lines += _section("FORMULA", *(f"  {line}" for line in formula(algorithm).splitlines()), *_where(algorithm))
    whole = " The one term of a response takes the sum of its tokens' weights." if algorithm.loss.sequence else ""
    whole = shown.DENOMINATOR if algorithm.loss.data == "pairs" else whole
    lines += _section("DENOMINATOR", _item("", DENOMINATOR[type(algorithm.weights)] + whole, 0))
    biases = [_item(axis, NOTES[type(c)].bias) for axis, c in on.items() if axis != "reference"]
    biases = biases if algorithm.loss.data == "samples" else []
    lines += _section("BIAS", _item("", verdict(algorithm), 0), *biases)
    lines += _section("WHAT THE KL'S GRADIENT IS", *_traps(algorithm.kl))
    lines += _elsewhere(note)
    return "\n".join([*lines, *_section("TRY", f"  ascent train sort --algorithm {name}{_given(algorithm)}")])


def _given(algorithm: Algorithm) -> str:
    """The file without which a row has nothing to learn from."""
    return " --labels FILE" if algorithm.loss.data == "steps" else ""


def _command(axis: str, cls: type) -> str:
    """A command that runs this choice, with what it cannot be without."""
    also = {"kl": " --reference frozen", "correction": " --old-logp learner", "critic": " --advantage gae"}
    also["advantage"] = " --critic own-critic" if issubclass(cls, Valued) else ""
    if axis == "task":
        return f"ascent train {name_of(cls)}"
    if axis == "loss" and getattr(cls, "data", "samples") != "samples":
        row = next(row for row, a in ALGORITHMS.items() if type(a.loss) is cls)
        return f"ascent train sort --algorithm {row}{_given(ALGORITHMS[row])}"
    return f"ascent train sort --{axis} {name_of(cls)}" + (also.get(axis, "") if cls not in OFF else "")


def _choice(cls: type, axis: str) -> str:
    docs, note = field_docs(cls), NOTES.get(cls, Note(""))
    kind = f"a choice of --{axis}" if axis in MENU else f"a {axis}" if axis in CHOICES else axis
    lines = [f"{name_of(cls)}: {kind}.", ""]
    lines.append(textwrap.indent(inspect.getdoc(cls) or first_line(cls), "  "))
    defaults = {
        name: "" if f.default is MISSING else f" ({_value(f.default)})" for name, f in hyperparameters(cls).items()
    }
    lines += _section("FIELDS", *(_item(name + default, docs.get(name, ""), 24) for name, default in defaults.items()))
    lines += _section("DENOMINATOR", _item("", DENOMINATOR[cls], 0) if cls in DENOMINATOR else "")
    lines += _section("BIAS", _item("", note.bias, 0))
    if axis == "kl" and cls not in OFF:
        place = 0 if getattr(cls, "where", "") == "loss" else 1
        lines += _section("WHAT ITS GRADIENT IS", *(_item(k, v[place] + ".") for k, v in ESTIMATORS.items()))
    rows = [name for name, row in ALGORITHMS.items() if axis in MENU and type(getattr(row, axis)) is cls]
    lines += _section("ROWS THAT HAVE IT", _item("", ", ".join(rows), 0) if rows and cls not in OFF else "")
    lines += _elsewhere(note)
    return "\n".join([*lines, *(_section("TRY", f"  {_command(axis, cls)}") if axis in CHOICES else [])])


def _estimator(name: str) -> str:
    in_loss, in_reward = ESTIMATORS[name]
    rows = [row for row, a in ALGORITHMS.items() if a.kl.where != "nowhere" and a.kl.estimator == name]
    lines = [f"{name}: an estimator of KL(π ‖ π_ref), with ℓ = log π − log π_ref of a token drawn from π."]
    lines += ["", f"  {_estimate(name)}"]
    lines += _section("BIAS", _item("in the loss", in_loss + ".", 15), _item("in the reward", in_reward + ".", 15))
    lines += _section("ROWS THAT HAVE IT", _item("", ", ".join(rows), 0) if rows else "")
    place = "in-reward" if name == "k1" else "in-loss"
    command = f"  ascent train sort --kl {place} --kl.estimator {name} --reference frozen"
    return "\n".join([*lines, *_section("TRY", command)])


def _reward(name: str) -> str:
    """A sorting reward, in the words of the file that computes it."""
    words: list[str] = []
    for line in (inspect.getdoc(sorting) or "").splitlines():
        if line.startswith(f"    {name} ") or (words and line.startswith(" " * 8)):
            words.append(line.strip().removeprefix(name).strip())
        elif words:
            break
    lines = [f"{name}: a reward of the sorting tasks.", "", _item("", " ".join(words), 0)]
    return "\n".join([*lines, *_section("TRY", f"  ascent train sort --reward {name}")])


def explain(name: str) -> str:
    """All that goes by this name: a row, choices, an estimator of the KL, a policy, a task, a reward."""
    if name.startswith("python:"):
        return _choice(load_python("explain", name), "your own choice")
    wanted = name.strip().lower().replace("_", "-")
    found = [_row(wanted)] if wanted in ALGORITHMS else []
    found += [_choice(cls, axis) for axis, menu in CHOICES.items() for cls in menu if name_of(cls) == wanted]
    found += [_estimator(wanted)] if wanted in ESTIMATORS else []
    found += [_reward(wanted)] if wanted in sorting.REWARDS else []
    if not found:
        named = [*ALGORITHMS, *(name_of(c) for menu in CHOICES.values() for c in menu), *ESTIMATORS, *sorting.REWARDS]
        raise Refused(
            f"explain {name}: nothing goes by this name.{nearest(wanted, named)} `ascent list` has every name there is"
        )
    return ("\n\n" + "─" * WIDTH + "\n").join(found)


def menu_text() -> str:
    """Every name there is, with a line each."""
    lines: list[str] = []
    for title, axis in (("TASKS", "task"), ("POLICIES", "policy")):
        lines += _section(title, *(_item(name_of(cls), first_line(cls), 20) for cls in CHOICES[axis]))
    lines += _section("ALGORITHMS  (--algorithm)", *(_item(name, note.bias, 20) for name, note in ROWS.items()))
    about = field_docs(Algorithm)
    for axis, menu in MENU.items():
        title = f"{axis.upper()}  (--{axis}: {about[axis].splitlines()[0]})"
        lines += _section(title, *(_item(name_of(cls), first_line(cls), 20) for cls in menu))
    estimators = (_item(name, _estimate(name).removeprefix(f"{name} = "), 20) for name in ESTIMATORS)
    lines += _section("KL ESTIMATORS  (--kl.estimator, with ℓ = log π − log π_ref)", *estimators)
    return "\n".join([*lines[1:], "", "`ascent explain NAME` says more of any of them."])
