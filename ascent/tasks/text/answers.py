"""Finding the answer in a response, and comparing it with the right one.

A response gives its answer *strictly* if it marks it and says nothing more:

    Answer: 7        #### 7        \\boxed{7}        <answer>7</answer>

or if it ends with it: "4 + 3 = 7." does, "it is 7, I think" does not. Small models can do that even if they cannot
use a mark. *Leniently* the answer is taken from free text: what follows "the answer is", otherwise the last number, the
last word or the last line, depending on the kind of the right answer.
Either way there is one candidate, so a response that lists many guesses gains nothing.
"""

import re
from fractions import Fraction
from typing import Any

MINUS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})
"""Characters that models write for a minus. An em dash is not one."""
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
SIMPLE = rf"(?:{DIGITS})(?:[eE][-+]?[0-9]+)?"
NUMBER = re.compile(rf"(?P<sign>(?<![\w)\]}}])[-+])?(?:[$€£]\s?(?P<lower>-)?)?(?<!\w)(?P<size>{SIMPLE}(?:/{SIMPLE})?)")
"""A number in running text: not the 2 of x2, and 4, not −4, in 3-4."""
LONGEST = 400
"""Numbers with more digits, or with a larger exponent, are ignored: exact arithmetic on them would take forever."""
MARKS = re.compile(
    r"####|\\boxed\s*\{|<answer>|(?:^|(?<=[\s*_(>]))(?:the\s+|my\s+)?(?:final\s+)?answer\s*[*_]*\s*:", re.IGNORECASE
)
PHRASE = re.compile(r"\banswer\s+(?:is|would\s+be|must\s+be|equals)\s*:?", re.IGNORECASE)
WRAPPING = "*`\"' \t\r\n"
CLOSING = WRAPPING + ".!%$)]}"
"""Characters that may follow the last number at the end."""


Verdict = tuple[bool, bool, str]
"""Is it strictly right, is it leniently right, and why."""


def last_number(text: str) -> str | None:
    """The last number of a text, spelled plainly: −$1,234.50. -> -1234.50."""
    numbers = list(NUMBER.finditer(_plain(text)))
    return _spell(numbers[-1]) if numbers else None


def whole_number(text: str) -> str | None:
    """The number that a text consists of, if it is one and nothing else but a currency, a percent sign or a dot."""
    match = NUMBER.fullmatch(_plain(text).strip(WRAPPING).strip("$").rstrip("%").rstrip(".").rstrip("%").strip())
    return _spell(match) if match else None


def value_of(number: str | None) -> Fraction | None:
    """The exact value of a plainly spelled number; None for anything else, for x/0 and for absurdly long ones."""
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
    """One kind of minus sign, and LaTeX's fractions and thousands in plain spelling."""
    text = text.translate(MINUS).replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%")
    return re.sub(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)


def _spell(match: re.Match[str]) -> str:
    negative = (match["sign"] == "-") != (match["lower"] is not None)
    return "-" * negative + match["size"].replace(",", "")


def marked_answer(response: str) -> str | None:
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


def final_answer(response: str, answer: str | None) -> str:
    """What is marked, or else what the response ends with, of the kind that the right answer is; "" for neither."""
    marked = marked_answer(response)
    if marked is not None:
        return marked
    if answer is None or whole_number(answer) is None:
        phrases = list(PHRASE.finditer(response))
        return response[phrases[-1].end() :].strip() if phrases else loose_answer(response, answer)
    text = _plain(response)
    last = list(NUMBER.finditer(text))[-1:]
    return next((_spell(m) for m in last if not text[m.end() :].strip(CLOSING)), "")


def loose_answer(response: str, answer: str | None) -> str:
    """One candidate out of free text, of the kind that the right answer is."""
    marked = marked_answer(response)
    if marked is None and (phrases := list(PHRASE.finditer(response))):
        marked = response[phrases[-1].end() :]
    text = (response if marked is None else marked).strip()
    if answer is None:
        return text
    lines, asked = text.splitlines() or [""], answer.strip().count("\n") + 1
    if asked > 1:
        return "\n".join(lines[-asked:]) if marked is None else text
    if whole_number(answer) is not None:
        near = lines[0] if marked is not None else ""
        return last_number(near) or last_number(text) or ""
    if marked is not None:
        return lines[0]
    return lines[-1] if " " in answer.strip() else "".join(lines[-1].split()[-1:])


def tidy(text: str) -> str:
    """Without quotation marks, emphasis and a closing full stop."""
    text = text.strip(WRAPPING)
    return text.removesuffix(".").strip(WRAPPING) if not text.endswith("..") else text


def _braced(rest: str) -> str | None:
    """The inside of the brace that was just opened; None where it is never closed."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i].strip()
    return None


def check_exact(answer: str, response: str) -> Verdict:
    """The same text. Leniently, case, quotation marks and a closing full stop do not matter."""
    marked = marked_answer(response)
    strict = answer.strip() in (response.strip(), marked)
    loose = loose_answer(response, answer)
    lenient = tidy(loose).casefold() == tidy(answer).casefold() or tidy(response).casefold() == tidy(answer).casefold()
    return strict, strict or lenient, f"answered {on_one_line(marked if marked is not None else loose)}"


def check_number(answer: str, response: str) -> Verdict:
    """The same number, exactly: marked, or at the end. Leniently: the last number of the response."""
    gold = whole_number(answer) or last_number(answer)
    strict = gold is not None and same_number(whole_number(final_answer(response, gold)), gold)
    loose = loose_answer(response, gold)
    return strict, strict or same_number(loose, gold), f"answered {on_one_line(loose) if loose else 'no number'}"


def check_math(answer: str, response: str) -> Verdict:
    """The same mathematics, by math-verify: 1/2 = 0.5, x+1 = 1+x. Leniently: wherever it finds an expression.

    What math-verify cannot read is wrong; what it cannot read in time is an error, because then nothing is known.
    """
    gold = _parsed(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not gold:
        raise ValueError(f"math-verify cannot read the right answer {on_one_line(answer)}")
    marked = marked_answer(response)
    if marked is None and not re.search(r"\n|(?<![\\A-Za-z])[A-Za-z]{2,}", response.strip()):
        marked = response  # nothing but an expression
    strict = bool(marked) and _equal(gold, _parsed(f"${(marked or '').strip('$ ')}$"))
    loose = _parsed(response)
    reason = f"answered {on_one_line(str(loose[-1]))}" if loose else "no mathematics in the response"
    return strict, strict or _equal(gold, loose), reason


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    try:
        return parse(text, parsing_timeout=3, raise_on_error=True)
    except Exception:  # its time-out is not an Exception and reaches the caller
        return []


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    try:
        return bool(answer) and verify(gold, answer, timeout_seconds=3, raise_on_error=True)
    except Exception:
        return False


CHECKS = {"exact": check_exact, "number": check_number, "math": check_math}


def on_one_line(text: str, length: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]}…"
