"""`ascent explain` and `ascent list`: what an algorithm or a choice computes, where it is biased, and who differs.

The texts of a choice are its docstring, the docstrings of its fields, and its About. This file combines them into the
formula of a whole algorithm, its objective in words, and the pages that are printed. A test evaluates the printed
formula against the code.
"""

import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple

from ascent.core import kl as kl_
from ascent.core.algorithms import ALGORITHMS, MENU, Algorithm
from ascent.core.errors import ConfigError
from ascent.core.menu import hyperparameters, name_of, nearest
from ascent.core.values import Valued
from ascent.explain.about import ABOUT_ALGORITHMS, OWN, About, bias_of, fill_in, first_line
from ascent.explain.choices import ABOUT_ESTIMATORS, ABOUTS, LOG_RATIO, TOKEN_RATIO
from ascent.explain.latex import unicode_in, unicode_of
from ascent.models import POLICIES
from ascent.settings import field_docs, spell
from ascent.tasks import TASKS
from ascent.tasks.small import sorting
from ascent.tasks.text.answer_checking import CHECKS
from ascent.tasks.user_files import load_python

__all__ = ["MenuPage", "explanation", "formula", "latex", "menu_text", "objective_in_words", "pages_of"]

WIDTH = 96
OBJECTIVE = r"\text{objective} = "
CHOICES: dict[str, tuple[type, ...]] = {"policy": POLICIES, "task": TASKS}
"""What is explained in addition to the axes of an algorithm."""


def about_of(cls: type) -> About | None:
    """The About of a choice; a user's own class may have one as `about = About(...)`."""
    return ABOUTS.get(cls) or vars(cls).get("about")


def menu_label(cls: type) -> str:
    """A few words for a choice in a menu."""
    known = about_of(cls)
    return known.label if known and known.label else name_of(cls)


def describe_choices(algorithm: Algorithm) -> dict[str, About]:
    """By axis, the About of a choice with its numbers; a user's own without one has it from its name and docstring."""
    parts: dict[str, About] = {}
    for axis in MENU:
        choice = getattr(algorithm, axis)
        known = about_of(type(choice))
        if known is None and axis == "kl":
            known = ABOUTS[{"nowhere": kl_.NoKL, "loss": kl_.InLoss, "reward": kl_.InReward}[choice.where]]
        pairs = axis == "loss" and choice.data == "pairs"
        parts[axis] = fill_in(known or OWN["pairs" if pairs else axis], choice)
    return parts


# ── an algorithm as a formula, in words, and how biased it is ──────────────────────────────────


def formula(algorithm: Algorithm) -> str:
    """Return the formulas of an algorithm in one to four lines: (shaped) reward, advantage A, ratio ρ and objective."""
    return "\n".join(map(unicode_of, latex(algorithm)))


def latex(algorithm: Algorithm) -> list[str]:
    """The lines of the formula in LaTeX: the rooms that show mathematics start from these."""
    parts, kl, loss = describe_choices(algorithm), algorithm.kl, algorithm.loss
    surrogate, penalty = parts["loss"], parts["kl"].formula
    if loss.data == "pairs":
        pairs = r"\sum_{\text{pairs}} \frac{1}{\text{pairs}}\,\cdot\,"
        return [str(surrogate.definitions), OBJECTIVE + pairs + str(surrogate.formula)]
    if loss.data == "steps":
        return [OBJECTIVE + str(surrogate.formula)]
    lines = []
    shaped = rf"R_i \gets R_i + {parts['shaping'].formula}" if parts["shaping"].formula else ""
    per_token = kl.where == "reward" and kl.per == "token"
    if per_token:
        first = rf"{shaped}\text{{ on the last token}};\quad{{}}" if shaped else ""
        lines.append(rf"{first}r_t \gets r_t - {penalty},\quad{{R_t}} = \sum_{{u\ge{{t}}}} r_u")
    elif kl.where == "reward" or shaped:
        lines.append((shaped or r"R_i \gets R_i") + (f" - {penalty}" if kl.where == "reward" else ""))
    advantage = parts["advantage"]
    lines += [str(advantage.definitions)] if advantage.definitions else []
    advantage_formula = str(advantage.formula).replace("R_i", "R_t") if per_token else str(advantage.formula)
    by_token = "R_t" in advantage_formula or "value" in algorithm.advantage.needs
    ratio, term = str(surrogate.definitions) or TOKEN_RATIO * kl.importance, str(surrogate.formula)
    if loss.sequence and not algorithm.sequence:  # GSPO-token
        own = r"]\cdot\exp(\text{logp}_t - \operatorname{sg}[\text{logp}_t])"
        ratio, term = ratio.replace(r"i = ", r"t = \operatorname{sg}[") + own, term.removesuffix("/L_i")
    ratio = rf";\quad {ratio}" if ratio else ""
    lines.append(rf"A_{'t' if by_token else 'i'} = {advantage_formula}{ratio}")
    main = f"{parts['correction'].formula}{term}"
    terms = f" - {penalty}" if kl.where == "loss" else ""
    terms += f" + {parts['exploration'].formula}" if parts["exploration"].formula else ""
    weight, tokens = parts["weights"], r"\sum_i \sum_t "
    if algorithm.sequence:
        rest = rf" + {tokens}{weight.formula}\,\cdot\,[{terms} ]" if terms else ""
        objective = rf"\sum_i {weight.response_formula}\,\cdot\,{main}{rest}"
    else:
        objective = rf"{tokens}{weight.formula}\,\cdot\," + (f"[ {main}{terms} ]" if terms else main)
    return [*lines, OBJECTIVE + objective]


def meanings(algorithm: Algorithm) -> list[str]:
    """What the symbols of the formula stand for, one line each, with LaTeX between dollars."""
    parts = describe_choices(algorithm)
    if algorithm.loss.data in ("pairs", "steps"):
        return [str(parts["loss"].statistics)]
    common = r"$N$ responses, $L_i$ unmasked tokens in response $i$, $\text{logp} = \log \pi$ of a token"
    return [common, *(line for part in parts.values() for line in str(part.statistics).splitlines())]


def objective_in_words(algorithm: Algorithm) -> str:
    """A few sentences: what is maximized, how a step is taken, what the reward is, which samples count."""
    parts, kl, loss = describe_choices(algorithm), algorithm.kl, algorithm.loss
    if loss.data in ("pairs", "steps"):
        return f"{parts['loss'].words}."
    words = {axis: str(part.words) for axis, part in parts.items()}
    mean = parts["weights"].response_words if algorithm.sequence else words["weights"]
    advantage = f" {words['advantage']}" if loss.data == "samples" else ""
    first = f"Maximize the {mean} {words['loss']}{advantage}"
    penalty = f"{words['kl']} to {words['reference']}"
    first += f", minus {penalty}" if kl.where == "loss" else ""
    first += f", plus {words['exploration']}" if words["exploration"] else ""
    reward = [f"has {penalty} taken off, {kl.per} by {kl.per}"] if kl.where == "reward" else []
    reward += [words["shaping"]] if words["shaping"] else []
    each = "response" if algorithm.correction.level == "sequence" else "token"
    sentences = [
        first,
        words["update"],
        words["critic"],
        f"The reward {' and '.join(reward)}" if reward else "",
        f"Each {each} is {words['correction']}" if words["correction"] else "",
        words["groups"],
        "Truncated responses are not trained on" if algorithm.groups.mask_truncated else "",
    ]
    return ". ".join(filter(None, sentences)) + "."


def verdict(algorithm: Algorithm) -> str:
    """Whether the first update on a fresh batch is along the true gradient, judged by the choices alone."""
    parts = describe_choices(algorithm)
    goal = "∇E[R]" if parts["kl"].off else "∇(E[R] − β·KL(π ‖ π_ref))"
    decisive = ("advantage", "weights", "kl", "groups", "exploration")
    classes = [type(getattr(algorithm, axis)) for axis in ("loss", *decisive)]
    unknown = [cls.__name__ for cls in classes if about_of(cls) is None]
    if unknown:
        return f"Not known: {', '.join(unknown)} is not part of this library. The exact oracle can tell."
    if algorithm.loss.data != "samples":
        return f"Not a policy gradient, because nothing is sampled. {bias_of(type(algorithm.loss))}"
    gradients = {parts[axis].gradient for axis in decisive} | ({"other"} if algorithm.groups.mask_truncated else set())
    length = "times a constant" if "scaled" in gradients else "itself"
    if "other" in gradients:
        return f"Biased even on the policy's own samples: the expected gradient is not along {goal}. Axis by axis:"
    if "critic" in gradients:
        return f"As biased as V is wrong: with the exact V the expected gradient is {goal} {length}. Axis by axis:"
    kind = "Right direction" if "scaled" in gradients else "Unbiased"
    return f"{kind}: on the policy's own samples the expected gradient is {goal} {length}."


# ── pages of plain text ────────────────────────────────────────────────────────────────────────


def _item(label: str, text: str, indent: int = 12) -> str:
    """A labelled paragraph with a hanging indent."""
    start = f"  {label:<{max(indent, len(label) + 2 if label else 0)}}"
    if len(start) > WIDTH // 2:
        return f"  {label}\n{_item('', text, indent)}"
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _section(title: str, *lines: str) -> list[str]:
    written = [line for line in lines if line]
    return ["", title, *written] if written else []


class Section(NamedTuple):
    """A part of a page: formulas, then labelled texts, or a command."""

    title: str
    items: Sequence[tuple[str, str]] = ()
    """Label and text; the text has LaTeX between dollars."""
    indent: int = 12
    latex: Sequence[str] = ()
    command: str = ""


@dataclass(frozen=True)
class MenuPage:
    """What is known of one thing. A terminal prints it; the documentation has a page of it."""

    name: str
    kind: str
    line: str = ""
    text: str = ""
    """A docstring, as it is indented."""
    sections: Sequence[Section] = ()

    def printed(self) -> str:
        lines = [textwrap.fill(unicode_in(f"{self.name}: {self.kind}.{self.line and f' {self.line}'}"), WIDTH)]
        lines += ["", textwrap.indent(unicode_in(self.text), "  ")] if self.text else []
        for section in self.sections:
            aside = 2 if section.latex else 0
            items = (item for item in section.items if item[1])
            texts = (_item(label, unicode_in(text), section.indent if label else aside) for label, text in items)
            formulas = (f"  {unicode_of(line)}" for line in section.latex)
            lines += _section(section.title, *formulas, *texts, section.command and f"  {section.command}")
        return "\n".join(lines)


def _elsewhere(known: About) -> Section:
    named = (("paper", known.paper), ("TRL 1.16", known.trl), ("verl 0.9", known.verl), ("others", known.others))
    return Section("ELSEWHERE, UNDER THE SAME NAME", named)


def _try(command: str) -> Section:
    return Section("TRY", command=f"ascent train {command}" if command else "")


def _row(name: str) -> MenuPage:
    algorithm, row = ALGORITHMS[name], ABOUT_ALGORITHMS[name]
    parts, kl, sampled = describe_choices(algorithm), algorithm.kl, algorithm.loss.data == "samples"
    on = [axis for axis, part in parts.items() if not part.off and (part.formula or part.words)]
    off = ", ".join(axis for axis, part in parts.items() if part.off)
    choices = [(axis, spell(getattr(algorithm, axis), every=True)) for axis in on]
    biases = [(axis, bias_of(type(getattr(algorithm, axis)))) for axis in on if axis != "reference" and sampled]
    gradients = []
    if kl.where != "nowhere":
        places = (("here", kl.where), ("not here", "reward" if kl.where == "loss" else "loss"))
        known = ABOUT_ESTIMATORS[kl.estimator]
        gradients = [(label, f"{kl.estimator} in the {where}: {getattr(known, where)}.") for label, where in places]
    sections = (
        Section("CHOICES", [*choices, ("off", off)]),
        Section("IN WORDS", [("", objective_in_words(algorithm))]),
        Section("FORMULA", [("", line) for line in meanings(algorithm)], latex=latex(algorithm)),
        Section("DENOMINATOR", [("", parts["weights"].denominator + parts["loss"].denominator)]),
        Section("BIAS", [("", verdict(algorithm)), *biases]),
        Section("WHAT THE KL'S GRADIENT IS", gradients),
        _elsewhere(row),
        _try(_row_command(name)),
    )
    return MenuPage(name, "a named algorithm", str(row.words), sections=sections)


def _row_command(name: str) -> str:
    """How to train a named algorithm, with the file without which it has nothing to learn from."""
    return f"sort --algorithm {name}" + (" --labels FILE" if ALGORITHMS[name].loss.data == "steps" else "")


def _command(axis: str, cls: Any, off: bool) -> str:
    """The arguments that train with this choice, with the other choices that it requires."""
    also = {"kl": " --reference frozen", "correction": " --old-logp learner", "critic": " --advantage gae"}
    also["advantage"] = " --critic own-critic" if issubclass(cls, Valued) else ""
    if axis == "task":
        return name_of(cls)
    if axis not in MENU | CHOICES:
        return ""
    if axis == "loss" and cls.data != "samples":
        return next((_row_command(row) for row, a in ALGORITHMS.items() if type(a.loss) is cls), "")
    return f"sort --{axis} {name_of(cls)}" + ("" if off else also.get(axis, ""))


def _choice(cls: type, axis: str) -> MenuPage:
    docs, known = field_docs(cls), about_of(cls) or About(trl="", verl="")
    kind = f"a choice of --{axis}" if axis in MENU else f"a {axis}" if axis in CHOICES else axis
    fields: list[tuple[str, str]] = []
    for name, default in ((name, f.default) for name, f in hyperparameters(cls).items()):
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        fields.append((name + (f" ({shown})" if default is not MISSING else ""), docs.get(name, "")))
    place = "loss" if getattr(cls, "where", "") == "loss" else "reward"
    gradients = [(name, f"{getattr(e, place)}.") for name, e in ABOUT_ESTIMATORS.items()]
    rows = [name for name, row in ALGORITHMS.items() if axis in MENU and type(getattr(row, axis)) is cls]
    sections = (
        Section("FIELDS", fields, 24),
        Section("DENOMINATOR", [("", known.denominator if axis == "weights" else "")]),
        Section("WHAT ITS GRADIENT IS", gradients if axis == "kl" and not known.off else ()),
        Section("ALGORITHMS THAT USE IT", [("", "" if known.off else ", ".join(rows))]),
        _elsewhere(known),
        _try(_command(axis, cls, known.off)),
    )
    return MenuPage(name_of(cls), kind, text=inspect.getdoc(cls) or first_line(cls), sections=sections)


def _estimator(name: str) -> MenuPage:
    estimator = ABOUT_ESTIMATORS[name]
    rows = [row for row, a in ALGORITHMS.items() if a.kl.where != "nowhere" and a.kl.estimator == name]
    place = "in-reward" if name == "k1" else "in-loss"
    sections = (
        Section("BIAS", [(f"in the {where}", f"{getattr(estimator, where)}.") for where in ("loss", "reward")], 15),
        Section("ALGORITHMS THAT USE IT", [("", ", ".join(rows))]),
        _try(f"sort --kl {place} --kl.estimator {name} --reference frozen"),
    )
    kind = f"an estimator of KL(π ‖ π_ref), with {LOG_RATIO} of a token drawn from π"
    return MenuPage(name, kind, text=f"{name} = {estimator.formula}", sections=sections)


def _reward(name: str) -> MenuPage:
    text = textwrap.fill(sorting.REWARDS[name], WIDTH - 2, break_on_hyphens=False)
    return MenuPage(name, "a reward of the sorting tasks", text=text, sections=(_try(f"sort --reward {name}"),))


def _check(name: str) -> MenuPage:
    command = _try(f"jsonl:FILE --model MODEL --check {name}")
    return MenuPage(name, "a check of answers", text=inspect.getdoc(CHECKS[name]) or "", sections=(command,))


def explanation(name: str) -> str:
    """Everything with this name, as a terminal shows it."""
    return ("\n\n" + "─" * WIDTH + "\n").join(page.printed() for page in pages_of(name))


def pages_of(name: str) -> list[MenuPage]:
    """Everything with this name: an algorithm, choices, an estimator of the KL, a policy, a task, a reward, a check."""
    if name.startswith("python:"):
        return [_choice(load_python("explain", name), "your own choice")]
    wanted = name.strip().lower().replace("_", "-")
    menus = MENU | CHOICES
    pages = [_row(wanted)] if wanted in ALGORITHMS else []
    pages += [_choice(cls, axis) for axis, menu in menus.items() for cls in menu if name_of(cls) == wanted]
    pages += [_estimator(wanted)] if wanted in ABOUT_ESTIMATORS else []
    pages += [_reward(wanted)] if wanted in sorting.REWARDS else []
    pages += [_check(wanted)] if wanted in CHECKS else []
    if not pages:
        choices = (name_of(c) for menu in menus.values() for c in menu)
        names = [*ALGORITHMS, *choices, *ABOUT_ESTIMATORS, *sorting.REWARDS, *CHECKS]
        hint = f"{nearest(wanted, names)} `ascent list` shows every name"
        raise ConfigError(f"explain {name}: there is no algorithm or choice with this name.{hint}")
    return pages


def menu_text() -> str:
    """Every name of the menu, with one line for each."""
    lines: list[str] = []
    for title, axis in (("TASKS", "task"), ("POLICIES", "policy")):
        lines += _section(title, *(_item(name_of(cls), first_line(cls), 20) for cls in CHOICES[axis]))
    rows = (_item(name, str(row.words), 20) for name, row in ABOUT_ALGORITHMS.items())
    lines += _section("ALGORITHMS  (--algorithm)", *rows)
    docs = field_docs(Algorithm)
    for axis, menu in MENU.items():
        title = f"{axis.upper()}  (--{axis}: {docs[axis].splitlines()[0]})"
        lines += _section(title, *(_item(name_of(cls), first_line(cls), 20) for cls in menu))
    estimators = (_item(name, unicode_in(estimator.formula), 20) for name, estimator in ABOUT_ESTIMATORS.items())
    lines += _section("KL ESTIMATORS  (--kl.estimator, with ℓ = log π − log π_ref)", *estimators)
    return "\n".join([*lines[1:], "", "`ascent explain NAME` says more about each of them."])
