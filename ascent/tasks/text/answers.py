"""Finding the answer in a response, and comparing it with the right one.

A response says its answer *strictly* where it marks it, and then says nothing more:

    Answer: 7        #### 7        \\boxed{7}        <answer>7</answer>

or where it ends with it: "4 + 3 = 7." does, "it is 7, I think" does not. Small models manage that where they
manage no mark. *Leniently* the answer is taken from free text: what stands after "the answer is", else the
last number, the last word or the last line, whichever kind the right answer is.
Either way it is one candidate: a response that lists many guesses gains nothing by it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

MINUS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})
"""Signs that models write for a minus. An em dash is none."""
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
SIMPLE = rf"(?:{DIGITS})(?:[eE][-+]?[0-9]+)?"
NUMBER = re.compile(rf"(?P<sign>(?<![\w)\]}}])[-+])?(?:[$€£]\s?(?P<lower>-)?)?(?<!\w)(?P<size>{SIMPLE}(?:/{SIMPLE})?)")
"""A number in running text: not the 2 of x2, and 4, not −4, in 3-4."""
LONGEST = 400
"""Digits, or decimal exponent, from which on a number is none: exact arithmetic on it would take for ever."""
MARKS = re.compile(
    r"####|\\boxed\s*\{|<answer>|(?:^|(?<=[\s*_(>]))(?:the\s+|my\s+)?(?:final\s+)?answer\s*[*_]*\s*:", re.IGNORECASE
)
PHRASE = re.compile(r"\banswer\s+(?:is|would\s+be|must\s+be|equals)\s*:?", re.IGNORECASE)
WRAPPING = "*`\"' \t\r\n"


CLOSING = WRAPPING + ".!%$)]}"
"""What may stand between the last number and the end."""


class Verdict(NamedTuple):
    strict: bool
    lenient: bool
    reason: str


# ---- numbers


def last_number(text: str) -> str | None:
    """The last number of a text, spelled plainly: −$1,234.50. -> -1234.50."""
    found = list(NUMBER.finditer(_plain(text)))
    return _spell(found[-1]) if found else None


def whole_number(text: str) -> str | None:
    """The number that a text consists of, if it is one and nothing else but a currency, a percent sign or a dot."""
    found = NUMBER.fullmatch(_plain(text).strip(WRAPPING).strip("$").rstrip("%").rstrip(".").rstrip("%").strip())
    return _spell(found) if found else None


def value_of(number: str | None) -> Fraction | None:
    """A plainly spelled number, exactly; None for what is none, for x/0 and for what is absurdly long."""
    if number is None or len(number) > LONGEST:
        return None
    parts = number.split("/")
    try:
        if any(abs(int(part.lower().partition("e")[2] or 0)) > LONGEST for part in parts):
            return None
        values = [Fraction(part) for part in parts]
        return values[0] / values[1] if len(values) == 2 else values[0]
    except (ValueError, ZeroDivisionError, IndexError):
        return None


def same_number(one: str | None, other: str | None) -> bool:
    return (value := value_of(one)) is not None and value == value_of(other)


def _plain(text: str) -> str:
    """Minus signs made one, and LaTeX's fractions and thousands as anybody writes them."""
    text = text.translate(MINUS).replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%")
    return re.sub(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)


def _spell(match: re.Match[str]) -> str:
    negative = (match["sign"] == "-") != (match["lower"] is not None)
    return "-" * negative + match["size"].replace(",", "")


# ---- where the answer stands


def stated(response: str) -> str | None:
    """What follows the last mark, to the end of the response (or of its braces, or its tag)."""
    marks = list(MARKS.finditer(response))
    if not marks:
        return None
    mark = marks[-1][0].lower()
    rest = response[marks[-1].end() :]
    if mark.startswith("\\boxed"):
        return _braced(rest)
    if mark == "<answer>":
        inside, closed, _ = rest.partition("</answer>")
        return inside.strip() if closed else None
    return rest.strip().strip("*").strip()


def ending(response: str, answer: str | None) -> str:
    """What is marked, or else what the response ends with, of the kind that the right answer is; "" for neither."""
    found = stated(response)
    if found is not None:
        return found
    if answer is None or whole_number(answer) is None:
        phrases = list(PHRASE.finditer(response))
        return response[phrases[-1].end() :].strip() if phrases else loosely(response, answer)
    text = _plain(response)
    last = list(NUMBER.finditer(text))[-1:]
    return next((_spell(m) for m in last if not text[m.end() :].strip(CLOSING)), "")


def loosely(response: str, answer: str | None) -> str:
    """One candidate out of free text, of the kind that the right answer is."""
    found = stated(response)
    if found is None and (phrases := list(PHRASE.finditer(response))):
        found = response[phrases[-1].end() :]
    text = (response if found is None else found).strip()
    if answer is None:
        return text
    lines = answer.strip().count("\n") + 1
    if lines > 1:
        return "\n".join(text.splitlines()[-lines:]) if found is None else text
    if whole_number(answer) is not None:
        near = _first_line(text) if found is not None else ""
        return last_number(near) or last_number(text) or ""
    line = _first_line(text) if found is not None else text.splitlines()[-1] if text else ""
    if " " not in answer.strip() and found is None:
        line = line.split()[-1] if line.split() else ""
    return line


def tidy(text: str) -> str:
    """Without quotation marks, emphasis and a closing full stop."""
    text = text.strip(WRAPPING)
    return text.removesuffix(".").strip(WRAPPING) if not text.endswith("..") else text


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _braced(rest: str) -> str | None:
    """The inside of the brace that was just opened; None where it is never closed."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i].strip()
    return None


# ---- checks


def exact(answer: str, response: str) -> Verdict:
    """The same words. Leniently: whatever their case, quotation marks and closing full stop."""
    found = stated(response)
    strict = answer.strip() in (response.strip(), found)
    loose = loosely(response, answer)
    lenient = tidy(loose).casefold() == tidy(answer).casefold() or tidy(response).casefold() == tidy(answer).casefold()
    return Verdict(strict, strict or lenient, f"answered {_head(found if found is not None else loose)}")


def number(answer: str, response: str) -> Verdict:
    """The same number, exactly: marked, or at the end. Leniently: the last number of the response."""
    gold = whole_number(answer) or last_number(answer)
    strict = gold is not None and same_number(whole_number(ending(response, gold)), gold)
    loose = loosely(response, gold)
    return Verdict(strict, strict or same_number(loose, gold), f"answered {_head(loose) if loose else 'no number'}")


def math(answer: str, response: str) -> Verdict:
    """The same mathematics, by math-verify: 1/2 = 0.5, x+1 = 1+x. Leniently: wherever it finds an expression.

    What math-verify cannot read is wrong; what it cannot read in time is an error, for then nothing is known.
    """
    gold = _parsed(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not gold:
        raise ValueError(f"math-verify cannot read the right answer {_head(answer)}")
    found = stated(response)
    if found is None and not re.search(r"\n|(?<![\\A-Za-z])[A-Za-z]{2,}", response.strip()):
        found = response  # nothing but an expression
    strict = bool(found) and _equal(gold, _parsed(f"${(found or '').strip('$ ')}$"))
    loose = _parsed(response)
    said = f"answered {_head(str(loose[-1]))}" if loose else "no mathematics in the response"
    return Verdict(strict, strict or _equal(gold, loose), said)


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    try:
        return parse(text, parsing_timeout=3, raise_on_error=True)
    except Exception:  # its time-out is none: that one goes on to whoever called
        return []


def _equal(gold: list[Any], found: list[Any]) -> bool:
    from math_verify import verify

    try:
        return bool(found) and verify(gold, found, timeout_seconds=3, raise_on_error=True)
    except Exception:
        return False


CHECKS = {"exact": exact, "number": number, "math": math}


def _head(text: str, length: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]}…"
