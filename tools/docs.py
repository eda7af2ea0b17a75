"""The documentation as a site that can be read and searched without a network: make docs.

    python tools/docs.py                   # build/site/index.html, from README, docs/, lessons/ and docstrings

The pages are copied to build/docs with their relative links. There formulas become MathML, lessons get the numbers that
their figures start with, every name that `ascent explain` knows has a page, and so has every room of `import ascent`. A
link that leads nowhere ends the build.
"""

from __future__ import annotations

import html
import logging
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ascent
from ascent.core.algorithms import MENU
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of
from ascent.explain.about import ABOUT_ALGORITHMS, fill_in, first_line
from ascent.explain.choices import ABOUT_ESTIMATORS
from ascent.explain.explain import CHOICES, MenuPage, Section, about_of, pages_of
from ascent.explain.latex import INLINE
from ascent.lab.figures import all_figures
from ascent.lab.mathml import block_of_math, mathml
from ascent.lab.pages.lesson.page import BOUND, Lesson, read_lessons
from ascent.tasks.small import sorting
from ascent.tasks.text.answer_checking import CHECKS

ROOT = Path(__file__).parents[1]
GUIDES = {
    "architecture": "Architecture",
    "command-line": "The command line",
    "menu": "The menu in three tables",
    "language-models": "Language models",
    "environments": "Conversations and tools",
    "agents": "Agents",
    "endpoint": "The endpoint",
    "sandbox": "Code in a sandbox",
    "serving": "Rollouts from vLLM and SGLang",
    "scale": "Several processes",
    "python": "Python and notebooks",
    "runs": "Runs",
    "learned-rewards": "SFT, DPO, reward models",
    "judges-and-rounds": "Judges and rounds",
    "from-trl": "From TRL",
    "lab": "The lab",
    "viewer": "The viewer",
    "performance": "Performance",
    "trust": "Why trust it",
}
FOLDERS = {
    "api": "Training",
    "build": "Runs",
    "runs": "Trust of runs",
    "workflows": "What is done with runs",
    "tasks": "Tasks",
    "processes": "Rewards",
    "models": "Policies",
    "core": "The menu and its types",
}
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "notebooks/README.md", "lessons/README.md")
STYLE = """
.md-typeset math { font-size: 1.08em; }
.md-typeset .formula { overflow: auto hidden; margin: 0.5em 0; padding: 0.5em 0; }
mtd { padding: 0.2em 0.15em; }
mtd[columnalign="left"] { text-align: left; }
mtd[columnalign="right"] { text-align: right; }
mtd:nth-child(3) { text-align: left; padding-left: 1.6em; opacity: 0.75; font-size: 0.88em; }
.md-typeset th:empty { display: none; }
.md-typeset td:first-child code { white-space: nowrap; }
.docstring { white-space: pre-wrap; margin: 1em 0; }
.md-typeset pre > code { overflow-x: auto; }
"""
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme would load from elsewhere, so that the search works on pages opened as files. Ours does the same."""
WORKER = """// A page that was opened as a file may not start workers: there the search runs in a frame without borders.
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inner = frame.contentWindow;
    this.inner.document.open();
    this.inner.document.write("<body></body>");
    this.inner.document.close();
    this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.loaded = new Promise((done) => {
      const script = this.inner.document.createElement("script");
      script.src = url;
      script.onload = done;
      this.inner.document.body.append(script);
    });
  }
  async postMessage(data) {
    await this.loaded;
    this.inner.dispatchEvent(new MessageEvent("message", { data }));
  }
  terminate() {}
};
"""


# ── formulas ────────────────────────────────────────────────────────────────────────────────────


def with_mathematics(text: str) -> str:
    """Markdown whose formulas are MathML; code stays as it is."""

    def inline(part: str) -> str:
        pieces = re.split(r"(`[^`\n]+`)", part)
        return "".join(p if p.startswith("`") else INLINE.sub(lambda m: _inline(m[1]), p) for p in pieces)

    def fence(match: re.Match[str]) -> str:
        return _guarded(block_of_math(match[2])) if match[1] == "math" else match[0]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        re.sub(r"\A```(\w*)\n(.*)```\Z", fence, p, flags=re.DOTALL) if i % 2 else inline(p) for i, p in enumerate(parts)
    )


def _inline(latex: str) -> str:
    """A formula within a line. The span is there because Markdown takes a line that begins with <math> for a block."""
    return f"<span>{_guarded(mathml(latex))}</span>"


def _guarded(made: str) -> str:
    """MathML in which Markdown finds nothing to read."""
    return "".join(f"&#{ord(c)};" if c in "|*_" else c for c in made)


# ── lessons ─────────────────────────────────────────────────────────────────────────────────────


def lesson_page(lesson: Lesson, files: dict[str, str], live: bool) -> str:
    """A lesson without its figure: with the numbers that the figure starts with, and links between pages."""
    figure = all_figures()[lesson.figure] if lesson.figure else None
    texts: dict[str, str] = figure.look(lesson.state)["texts"] if figure and live else defaultdict(lambda: "0")
    text = INLINE.sub(lambda m: BOUND.sub(lambda live: rf"\text{{{texts[live[1]]}}}", m[0]), lesson.text)
    text = BOUND.sub(lambda match: texts[match[1]], text)
    text = re.sub(r"\]\(lesson:([\w-]+)\)", lambda match: f"]({files[match[1]]})", text)
    text = re.sub(r"\]\(figure:[^)]*\)", "](../docs/lab.md)", text)
    beside = (
        f"\n*Beside this lesson the [lab](../docs/lab.md) has the live figure “{figure.title}”.*\n" if figure else ""
    )
    return f"# {lesson.title}\n{beside}\n{text}"


# ── the menu: a page for every name that `explain` knows ────────────────────────────────────────


def names_of_the_menu() -> dict[str, list[tuple[str, str]]]:
    """By heading, every name with its line."""
    found = {"Algorithms (`--algorithm`)": [(name, str(row.words)) for name, row in ABOUT_ALGORITHMS.items()]}
    for axis, menu in (MENU | CHOICES).items():
        found[f"`--{axis}`" if axis in MENU else axis.capitalize()] = [(name_of(cls), first_line(cls)) for cls in menu]
    found["`--kl.estimator`"] = [(name, known.formula) for name, known in ABOUT_ESTIMATORS.items()]
    found["Rewards of the sorting tasks"] = list(sorting.REWARDS.items())
    found["Checks of answers"] = [(name, first_line(check)) for name, check in CHECKS.items()]
    return found


def menu_page(name: str, known: Iterable[str]) -> str:
    """Everything with this name, as `ascent explain` has it."""
    parts = "\n\n".join(_explained(page, link_to(known)) for page in pages_of(name))
    return f"# {name}\n\n{parts}\n"


def link_to(known: Iterable[str]) -> Callable[[str], str]:
    """A name as a link to its page, if there is one."""
    names = set(known)
    return lambda name: f"[{name}]({name}.md)" if name in names else name


def _explained(page: MenuPage, link: Callable[[str], str]) -> str:
    kind = page.kind.replace("--", r"\--")
    text = f'<div class="docstring">{html.escape(page.text)}</div>' if "$" not in page.text else page.text
    parts = [
        f"*{kind[0].upper()}{kind[1:]}.* {page.line}" if "$" not in kind else f"{kind[0].upper()}{kind[1:]}.",
        text,
    ]
    return "\n\n".join([*parts, *_formula_of(page), *(_section(section, link) for section in page.sections)])


def _formula_of(page: MenuPage) -> list[str]:
    """The formula of a choice at its defaults."""
    choices = [
        cls
        for axis, menu in MENU.items()
        for cls in menu
        if page.kind == f"a choice of --{axis}" and name_of(cls) == page.name
    ]
    abouts = [fill_in(known, cls()) for cls in choices if (known := about_of(cls)) and known.formula]
    found: list[str] = []
    for about in abouts:
        found += [
            "## Its part of the formula",
            *(f"```math\n{line}\n```" for line in (about.definitions, about.formula) if line),
        ]
        found += [f"- {line}" for line in str(about.statistics).splitlines() if line]
    return found


def _section(section: Section, link: Callable[[str], str]) -> str:
    labelled = [item for item in section.items if item[0] and item[1]]
    texts = [text for label, text in section.items if text and not label]
    if section.title.startswith("ALGORITHMS THAT USE"):
        texts = [", ".join(map(link, text.split(", "))) for text in texts]
    parts = [f"```math\n{line}\n```" for line in section.latex]
    parts += [f"- {text}" for text in texts] if section.latex else texts
    if labelled:
        rows = [(label, _first_linked(text, link) if section.title == "CHOICES" else text) for label, text in labelled]
        parts.append("\n".join(["| | |", "|---|---|", *(f"| {label} | {_cell(text)} |" for label, text in rows)]))
    parts += [f"```console\n{section.command}\n```"] if section.command else []
    return "\n\n".join([f"## {section.title.capitalize().replace('kl', 'KL')}", *parts]) if parts else ""


def _first_linked(text: str, link: Callable[[str], str]) -> str:
    name, opening, rest = text.partition("(")
    return link(name) + opening + rest


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def menu_index(found: dict[str, list[tuple[str, str]]]) -> str:
    lines = [
        "# The menu",
        "",
        "Every name, as `ascent list` and `ascent explain NAME` have it. An algorithm is one choice per axis.",
        "",
    ]
    for title, names in found.items():
        rows = [f"| [{name}]({name}.md) | {_cell(line)} |" for name, line in names]
        lines += [
            f"## {title.replace('--', chr(92) + '--') if '`' not in title else title}",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
        ]
    return "\n".join(lines)


# ── the whole ───────────────────────────────────────────────────────────────────────────────────


def reference_page(folder: str) -> str:
    """Return the reference page of the public names of a folder."""
    names = {name: module for name, module in ascent._HOME.items() if module.split(".")[0] == folder}
    parts = [f"::: ascent.{module}.{name}\n" for name, module in names.items()]
    return "\n".join(
        [
            f"# {FOLDERS[folder]}\n",
            f"`from ascent import {', '.join(list(names)[:4])}`{' …' if len(names) > 4 else ''}\n",
            *parts,
        ]
    )


def write_pages(folder: Path, live: bool = True) -> list[Any]:
    """All pages into this folder, and the order in which the site shows them."""
    pages: dict[str, str] = {name: (ROOT / name).read_text() for name in TOP}
    pages |= {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("docs", "benchmarks/results")
        for path in sorted((ROOT / folder).rglob("*.md"))
    }
    lessons = read_lessons()
    files = {re.sub(r"^\d+-", "", path.stem): path.name for path in (ROOT / "lessons").glob("[0-9]*.md")}
    pages |= {f"lessons/{files[lesson.slug]}": lesson_page(lesson, files, live) for lesson in lessons}
    found = names_of_the_menu()
    known = sorted({name for names in found.values() for name, _ in names})
    pages |= {f"menu/{name}.md": menu_page(name, known) for name in known} | {"menu/index.md": menu_index(found)}
    pages |= {f"reference/{folder}.md": reference_page(folder) for folder in FOLDERS}
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(with_mathematics(text))
    for pattern in ("docs/images/*", "benchmarks/results/*.*[!d]", "notebooks/*.ipynb", "LICENSE"):
        for path in ROOT.glob(pattern):
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.relative_to(ROOT))
    (folder / "site.css").write_text(STYLE)
    (folder / "worker.js").write_text(WORKER)
    return _order(pages, lessons, files, found)


def _order(
    pages: dict[str, str], lessons: list[Lesson], files: dict[str, str], found: dict[str, list[tuple[str, str]]]
) -> list[Any]:
    missing = [
        name
        for name in pages
        if re.fullmatch(r"docs/[\w-]+\.md", name) and Path(name).stem not in {*GUIDES, "benchmarks"}
    ]
    if missing:
        raise ConfigError(f"{', '.join(missing)} has no place in the documentation: add it to GUIDES in tools/docs.py")
    results = [name for name in pages if name.startswith("benchmarks/results/")]
    placed: set[str] = set()
    menu: list[Any] = ["menu/index.md"]
    for title, names in found.items():
        fresh = [name for name, _ in names if name not in placed]
        placed |= set(fresh)
        menu.append({title.replace("`", ""): [{name: f"menu/{name}.md"} for name in fresh]})
    return [
        {"Start": "README.md"},
        {"Guides": [{title: f"docs/{name}.md"} for name, title in GUIDES.items()]},
        {"Lessons": ["lessons/README.md", *({lesson.title: f"lessons/{files[lesson.slug]}"} for lesson in lessons)]},
        {"Notebooks": "notebooks/README.md"},
        {"Menu": menu},
        {"Reference": [{title: f"reference/{room}.md"} for room, title in FOLDERS.items()]},
        {
            "Benchmarks": [
                {"Commands and figures": "docs/benchmarks.md"},
                *({Path(n).stem.replace("_", " "): n} for n in results),
            ]
        },
        {"Contributing": ["CONTRIBUTING.md", "CHANGELOG.md"]},
    ]


def broken_links(folder: Path) -> list[str]:
    """Links of the pages to a page or a heading that is not there."""
    wrong: list[str] = []
    for path in sorted(folder.rglob("*.md")):
        text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([\w-]+))?\)", text):
            file = (path.parent / target).resolve() if target else path
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor and file.is_file() else []
            slugs = {
                re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings
            }
            if not file.is_file() or (anchor and anchor not in slugs):
                wrong.append(f"{path.relative_to(folder)}: {target}{anchor and '#' + anchor}")
    return wrong


def build(out: Path = ROOT / "build", live: bool = True) -> Path:
    """The site, strictly: a warning of mkdocs ends it."""
    try:
        from mkdocs.commands.build import build as build_site
        from mkdocs.config import load_config
    except ImportError:
        raise ConfigError("the documentation needs mkdocs-material: pip install 'ascent-rl[docs]'") from None
    order = write_pages(out / "docs", live)
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(out / "docs"), site_dir=str(out / "site"), nav=order)
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build_site(config)
    finally:
        config.plugins.on_shutdown()
    for path in (out / "site").rglob("*.html"):
        above = "../" * (len(path.relative_to(out / "site").parts) - 1)
        path.write_text(path.read_text().replace(SHIM, f"{above}worker.js"))
    return out / "site" / "index.html"


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        print(build())
    except ConfigError as error:
        sys.exit(str(error))
