"""Convert LaTeX formulas of lessons and `explain` to MathML, which browsers show without a script."""

import html
import re
from functools import cache
from xml.etree.ElementTree import tostring

from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline

from ascent.core.errors import ConfigError
from ascent.explain.latex import INLINE

_LIVE = re.compile(r"\{\{\s*([A-Za-z0-9_.]+)\s*\}\}")
_SMALL = re.compile(r"(\d+(?:\.\d+)?)e-0*(\d+)")
_FUNCTIONS = {"log": "0.17em", "exp": "0", "min": "0", "max": "0", "clip": "0", "sg": "0", "overlong": "0"}
"""Names of functions, and the space after each."""
_ATTRIBUTES = ("display", "displaystyle", "scriptlevel", "stretchy", "mathvariant", "columnalign", "width", "minsize")


@cache
def mathml(latex: str, block: bool = False) -> str:
    """Convert one formula. A live number, {{name}}, stays for the page to fill in. Markup in a formula is escaped."""
    latex = _LIVE.sub(r"\\text{⟦\1⟧}", latex.replace(r"\_", "_"))
    latex = _SMALL.sub(lambda m: ("" if m[1] == "1" else rf"{m[1]} \cdot ") + f"10^{{-{m[2]}}}", latex)
    try:
        root = convert_to_element(latex, display="block" if block else "inline")
    except Exception as error:  # the library has no common base for its errors
        raise ConfigError(f"the formula {latex!r} cannot be read: {type(error).__name__}") from None
    for part in root.iter():
        part.attrib = {name: value for name, value in part.attrib.items() if name in _ATTRIBUTES}
        part.text = html.unescape(part.text or "")
        if part.text in _FUNCTIONS:
            part.tag, part.attrib = "mo", {"lspace": "0.17em", "rspace": _FUNCTIONS[part.text]}
    return re.sub("⟦(.*?)⟧", r"{{\1}}", tostring(root, "unicode"))


def block_of_math(latex: str) -> str:
    """Return a formula as a block; one that is wider than its column is scrolled, not cut off."""
    return f'<div class="scroll formula" tabindex="0">{mathml(latex.strip(), block=True)}</div>\n'


def with_mathematics(parser: MarkdownIt) -> MarkdownIt:
    """Add GitHub's mathematics to a Markdown parser: `$…$` and code blocks of the language `math`."""

    def inline(state: StateInline, silent: bool) -> bool:
        match = INLINE.match(state.src, state.pos)
        if match is None:
            return False
        if not silent:
            state.push("html_inline", "", 0).content = mathml(match[1])
        state.pos = match.end()
        return True

    def blocks(state: StateCore) -> None:
        for token in state.tokens:
            if token.type == "fence" and token.info == "math":
                token.type, token.content = "html_block", block_of_math(token.content)

    parser.inline.ruler.before("escape", "math", inline)
    parser.core.ruler.push("math", blocks)
    return parser
