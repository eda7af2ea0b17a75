r"""Print LaTeX formulas in a terminal, with the letters and signs of Unicode.

GitHub renders the same text, and the lab makes MathML of it (`ascent/lab/mathml.py`). Spaces are printed as they
are written, and what is not listed here is printed as it stands: `N\cdot{L_i}` is N·L_i, `N \cdot L_i` is N · L_i.
"""

import re
import unicodedata
from collections.abc import Iterator

INLINE = re.compile(r"\$(?!\s)([^$\n]+)(?<!\s)\$")
"""A formula within a text."""
_TABLE = r"""
\alpha α  \beta β  \gamma γ  \delta δ  \epsilon ε  \theta θ  \lambda λ  \pi π  \rho ρ  \sigma σ  \Delta Δ  \ell ℓ
\nabla ∇  \sum Σ  \prod Π  \cdot ·  \pm ±  - −  \le ≤  \ge ≥  \ne ≠  \gets ←  \mid |  \Vert ‖  \ldots …  \_ _
"""
SIGNS = dict(re.findall(r"(\S+) (\S+)", _TABLE)) | {r"\quad": "  ", r"\,": " "}
WORDS = (r"\text", r"\operatorname", r"\mathrm", r"\mathbf", r"\mathbb")
FUNCTIONS = (r"\log", r"\exp", r"\min", r"\max")
HALVES = {("1", "2"): "½", ("3", "4"): "¾"}
SQUARES = {"2": "²", "3": "³"}
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?(?:e[-+]?\d+)?|.", re.DOTALL)


def unicode_in(text: str) -> str:
    """A text whose formulas stand between dollars, as a terminal shows it."""
    return INLINE.sub(lambda match: unicode_of(match[1]), text)


def unicode_of(latex: str) -> str:
    """One formula, as a terminal shows it."""
    return _printed(iter(_TOKEN.findall(latex)))


def _printed(tokens: Iterator[str]) -> str:
    """Up to the end, or to the brace that closes this group."""
    made = ""
    for token in tokens:
        if token == "}":
            break
        made += _one(token, tokens)
    return made


def _one(token: str, tokens: Iterator[str]) -> str:
    """One token, with the groups that belong to it."""
    if token == "{":
        return _printed(tokens)
    if token in ("_", "^"):
        script = _next(tokens)
        if token == "^" and script in SQUARES:
            return SQUARES[script]
        return token + (script if re.fullmatch(r"−?\w*", script) else f"({script})")
    if token in (r"\frac", r"\tfrac"):
        return _fraction(_next(tokens), _next(tokens))
    if token == r"\hat":
        return unicodedata.normalize("NFC", _next(tokens) + "\N{COMBINING CIRCUMFLEX ACCENT}")
    if token in WORDS:
        return _next(tokens, words=True)
    return token[1:] if token in FUNCTIONS else SIGNS.get(token, token)


def _next(tokens: Iterator[str], words: bool = False) -> str:
    """The next token, or the whole group that it opens; in words a hyphen stays a hyphen."""
    token = next(tokens, "")
    if not words:
        return _one(token, tokens)
    return "".join(part.removeprefix("\\") for part in iter(lambda: next(tokens, "}"), "}")) if token == "{" else token


def _fraction(above: str, below: str) -> str:
    """(a − b) / (c + d), and 1/(a·b) where nothing has spaces."""
    if (above, below) in HALVES:
        return HALVES[above, below]
    outside = [re.sub(r"\([^()]*\)", "", part) for part in (above, below)]
    above = f"({above})" if re.search("[+−]", outside[0]) else above
    below = f"({below})" if re.search("[+−·]", outside[1]) else below
    return f"{above} / {below}" if " " in above + below else f"{above}/{below}"
