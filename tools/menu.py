"""Writes the menu into docs/menu.md, between its two markers: python -m tools.menu docs/menu.md."""

import sys
from pathlib import Path
from typing import Any

from ascent.core.algorithms import ALGORITHMS, MENU, Algorithm
from ascent.core.errors import ConfigError
from ascent.core.menu import hyperparameters, name_of
from ascent.explain.explain import describe_choices, objective_in_words
from ascent.settings import field_docs

BEGIN = "<!-- menu: written by `python -m tools.menu docs/menu.md` -->"
END = "<!-- end of the menu -->"
DATA = {"demonstrations": "demonstrations", "pairs": "preference pairs", "steps": "labelled steps"}
COLUMNS = ("advantage", "loss", "weights")


def _table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    lines = [list(head), ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _spell(choice: Any) -> str:
    """Clipped (low 0.2, high 0.28): the name, and the fields that are not off."""
    values = {name: getattr(choice, name) for name in hyperparameters(type(choice))}
    on = [f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items() if v not in (None, False)]
    return name_of(choice) + (f" ({', '.join(on)})" if on else "").replace(" True", "")


def _rest(algorithm: Algorithm) -> str:
    """What a named algorithm sets in addition to credit, loss and weights."""
    kl, parts = algorithm.kl, describe_choices(algorithm)
    place = f"{kl.where} per {kl.per}" if kl.where == "reward" else kl.where
    penalty = [f"{kl.coef:g}·{kl.estimator} in the {place}"] if kl.where != "nowhere" else []
    axes = [axis for axis in MENU if axis not in (*COLUMNS, "kl") and not parts[axis].off and parts[axis].words]
    return "; ".join([*penalty, *(f"{_spell(getattr(algorithm, axis))}" for axis in axes)])


def menu_markdown() -> str:
    """Three tables: the axes with their choices, the named policy-gradient algorithms, and those on offline data."""
    docs, choices = field_docs(Algorithm), []
    for axis, menu in MENU.items():
        named = (name_of(cls) + (f" ({', '.join(h)})" if (h := hyperparameters(cls)) else "") for cls in menu)
        choices.append([f"`--{axis}`", docs[axis].splitlines()[0].rstrip("."), ", ".join(named)])
    sampled = {name: row for name, row in ALGORITHMS.items() if row.loss.data == "samples"}
    rows = [[f"`{name}`", *(_spell(getattr(a, axis)) for axis in COLUMNS), _rest(a)] for name, a in sampled.items()]
    data = {name: row for name, row in ALGORITHMS.items() if name not in sampled}
    learned = [[f"`{name}`", DATA[row.loss.data], objective_in_words(row)] for name, row in data.items()]
    lines = [
        *_table(("axis", "what it decides", "choices (with their fields)"), choices),
        "",
        "Set a field with a flag such as `--loss.high 0.28`. A named algorithm is one row of this menu and",
        "nothing more. `ascent explain NAME` prints the formula that it computes.",
        "",
        *_table(("row", *COLUMNS, "KL and the rest"), rows),
        "",
        "The following rows learn from offline data. They use the same learner, loop and comparisons.",
        "",
        *_table(("row", "learns from", "objective"), learned),
    ]
    return "\n".join(lines)


def with_menu(page: str) -> str:
    """This text with the current menu between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"there is no place for the menu: add the lines {BEGIN} and {END} to the page")
    return f"{before}{BEGIN}\n{menu_markdown()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/menu.md")
    path.write_text(with_menu(path.read_text()))
