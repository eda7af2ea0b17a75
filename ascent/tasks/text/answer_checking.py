r"""Finding the answer in a response, and comparing it with the right one.

A response gives its answer *strictly* if it marks it and says nothing more:

    Answer: 7        #### 7        \boxed{7}        <answer>7</answer>

or if it ends with it: "4 + 3 = 7." does, "it is 7, I think" does not. Small models can do that even if they cannot
use a mark. *Leniently* the answer is taken from free text: what follows "the answer is", otherwise the last number, the
last word or the last line, depending on the kind of the right answer.
Either way there is one candidate, so a response that lists many guesses gains nothing.
"""

import re
from fractions import Fraction
from itertools import product
from typing import Any

MINUS_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})
"""Characters that models write for a minus. An em dash is not one."""
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
SIMPLE = rf"(?:{DIGITS})(?:[eE][-+]?[0-9]+)?"
NUMBER = re.compile(rf"(?P<sign>(?<![\w)\]}}])[-+])?(?:[$€£]\s?(?P<lower>-)?)?(?<!\w)(?P<size>{SIMPLE}(?:/{SIMPLE})?)")
"""A number in running text: not the 2 of x2, and 4, not −4, in 3-4."""
MAX_DIGITS = 400
"""Numbers with more digits, or with a larger exponent, are ignored: exact arithmetic on them would take forever."""
MARKS = re.compile(
    r"####|\\boxed\s*\{|<answer>|(?:^|(?<=[\s*_(>]))(?:the\s+|my\s+)?(?:final\s+)?answer[\s*_]*:", re.IGNORECASE
)
PHRASE = re.compile(r"\banswer\s+(?:is|would\s+be|must\s+be|equals)\s*:?", re.IGNORECASE)
OPTION_PHRASE = re.compile(r"\b(?:answer|option|choice)\s+(?:is|would\s+be|must\s+be)\s*:?", re.IGNORECASE)
OPTION = re.compile(
    r"\s*(?i:option\s+|choice\s+)?(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Za-z])(?=\s*(?:[).:,;\n–—]|$|because\b|since\b))"
    r"|([B-HJ-Z])(?![\w'’-]))"
)
"""The label of an option. A, I and small letters may be words: they count before punctuation or because alone."""
WRAPPING = "*`\"' \t\r\n"
CLOSING = WRAPPING + ".!%$)]}"
"""Characters that may follow the last number at the end."""


CheckResult = tuple[bool, bool, str]
"""Is it strictly right, is it leniently right, and why."""


def last_number(text: str) -> str | None:
    """The last number of a text, spelled plainly: −$1,234.50. -> -1234.50."""
    numbers = list(NUMBER.finditer(_plain(text)))
    return _spell(numbers[-1]) if numbers else None


def sole_number(text: str) -> str | None:
    """The number that a text consists of, if it is one and nothing else but a currency, a percent sign or a dot."""
    match = NUMBER.fullmatch(_plain(text).strip(WRAPPING).strip("$").rstrip("%").rstrip(".").rstrip("%").strip())
    return _spell(match) if match else None


def number_value(number: str | None) -> Fraction | None:
    """The exact value of a plainly spelled number; None for anything else, for x/0 and for absurdly long ones."""
    if number is None or len(number) > MAX_DIGITS:
        return None
    parts = number.split("/")
    try:
        if any(abs(int(part.lower().partition("e")[2] or 0)) > MAX_DIGITS for part in parts):
            return None
        values = [Fraction(part) for part in parts]
        return values[0] / values[1] if len(values) == 2 else values[0]
    except (ValueError, ZeroDivisionError, IndexError):
        return None


def same_number(one: str | None, other: str | None) -> bool:
    return (value := number_value(one)) is not None and value == number_value(other)


def _plain(text: str) -> str:
    """One kind of minus sign, and LaTeX's fractions and thousands in plain spelling."""
    text = text.translate(MINUS_SIGNS).replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%")
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
    if answer is None or sole_number(answer) is None:
        phrases = list(PHRASE.finditer(response))
        return response[phrases[-1].end() :].strip() if phrases else lenient_answer(response, answer)
    text = _plain(response)
    last = list(NUMBER.finditer(text))[-1:]
    return next((_spell(m) for m in last if not text[m.end() :].strip(CLOSING)), "")


def lenient_answer(response: str, answer: str | None) -> str:
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
    if sole_number(answer) is not None:
        near = lines[0] if marked is not None else ""
        return last_number(near) or last_number(text) or ""
    if marked is not None:
        return lines[0]
    return lines[-1] if " " in answer.strip() else "".join(lines[-1].split()[-1:])


def strip_decoration(text: str) -> str:
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


def check_exact(answer: str, response: str) -> CheckResult:
    """The same text. Leniently, case, quotation marks and a closing full stop do not matter."""
    marked = marked_answer(response)
    strict = answer.strip() in (response.strip(), marked)
    loose = lenient_answer(response, answer)
    lenient = (
        strip_decoration(loose).casefold() == strip_decoration(answer).casefold()
        or strip_decoration(response).casefold() == strip_decoration(answer).casefold()
    )
    return strict, strict or lenient, f"answered {on_one_line(marked if marked is not None else loose)}"


def check_number(answer: str, response: str) -> CheckResult:
    """The same number, exactly: marked, or at the end. Leniently: the last number of the response."""
    gold = _whole(answer) or last_number(answer)
    strict = gold is not None and same_number(_whole(final_answer(response, gold)), gold)
    loose = lenient_answer(response, gold)
    return strict, strict or same_number(loose, gold), f"answered {on_one_line(loose) if loose else 'no number'}"


def _whole(text: str) -> str | None:
    """The number that a text consists of, with a decimal comma too."""
    return sole_number(text) or sole_number(with_decimal_point(text) or "")


def with_decimal_point(text: str) -> str | None:
    """The text with a point for its decimal comma: 1,22 -> 1.22 and 1.234,5 -> 1234.5; None where it has none.

    A decimal comma is the only comma of a text, stands between two digits, and is in no brackets. With three digits
    behind it, it separates thousands (1,234), unless they cannot begin like that (0,125 and 1234,567).
    """
    text = _plain(text)
    left, _, right = text.partition(",")
    whole = re.search(r"(?<![0-9.])(?:[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]+)$", left)
    decimals = re.match(r"[0-9]+(?!\.?[0-9])", right)
    bracket = re.search(r"[(\[{]", re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", "", text))
    if whole is None or decimals is None or bracket or "," in right:
        return None
    if len(decimals[0]) == 3 and re.fullmatch("[1-9][0-9]{0,2}", whole[0]):
        return None
    return f"{left[: whole.start()]}{whole[0].replace('.', '')}.{right}"


def check_math(answer: str, response: str) -> CheckResult:
    """The same mathematics, by math-verify: 1/2 = 0.5, x+1 = 1+x. Leniently: in any words.

    What is spelled like the right answer is right, whatever it means: 12:00, 1/0, a word. What
    math-verify cannot read or compare is otherwise wrong; what it cannot read in time is an error,
    because then nothing is known. A comma means the same in the right answer and in a response:

        1,000 and 12,345      thousands, never a decimal comma; and 1.000 is 1
        1,22 and 0,5          a decimal comma, or a list: only the writer's country would tell, so
                              both readings count, and 0.5 is right, and so is 5, 0
        1, 22 and (1,22)      a list, a point or an interval: a decimal comma has no space behind
                              it, and no brackets around it
        1.234,5 and 1,234.5   1234.5
    """
    boxed = marked_answer(answer) if "\\boxed" in answer else None
    marked = marked_answer(response)
    if any(_same_text(boxed or answer, candidate or "") for candidate in (response, marked)):
        return True, True, f"answered {on_one_line(answer)}"
    gold = _readings(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not gold:
        raise ValueError(f"math-verify cannot read the right answer {on_one_line(answer)}")
    if marked is None and not re.search(r"\n|(?<![\\A-Za-z])[A-Za-z]{2,}", response.strip()):
        marked = response  # nothing but an expression
    strict = bool(marked) and _equal(gold, _readings(f"${(marked or '').strip('$ ')}$"))
    loose = _readings(response)
    spelled = sole_number(answer) is None and _same_text(answer, lenient_answer(response, answer))
    reason = f"answered {on_one_line(str(loose[-1]))}" if loose else "no mathematics in the response"
    return strict, strict or spelled or _equal(gold, loose), reason


def _same_text(one: str, other: str) -> bool:
    """The same text, but for what never changes its meaning: spacing, emphasis, dollars and a full stop around it."""
    texts = [" ".join(_plain(text).split()) for text in (one, other)]
    bare = [text.strip("*$ ").removesuffix(".").strip("*$ ") for text in texts]
    return texts[0] != "" and (texts[0] == texts[1] or "" != bare[0] == bare[1])


def _readings(text: str) -> list[Any]:
    """What math-verify makes of a text, and of the number with a decimal comma that it may be."""
    return _parsed(text) + _parsed(with_decimal_point(text) or "")


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    try:
        return parse(text, parsing_timeout=3, raise_on_error=True) if text else []
    except Exception:  # its time-out is not an Exception and reaches the caller
        return []


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    """Is one of the readings the same? Each pair by itself: one that cannot be compared says nothing of the others."""
    return any(_same_value(one, other) for one, other in product(gold, answer))


def _same_value(one: Any, other: Any) -> bool:
    from math_verify import verify

    try:
        return verify(one, other, timeout_seconds=3, raise_on_error=True)
    except Exception:
        return False


def check_choice(answer: str, response: str) -> CheckResult:
    r"""The same option of a multiple choice, by its letter: B, (b), **B**, B), Answer: B, \boxed{B}.

    Strictly: the letter alone, after a mark or "the answer is", on the last line, or as the whole
    response. Leniently: with more words behind it ("The answer is B. There is only …", "B) Paris"),
    or as the last word.
    """
    gold = option_letter(answer)
    if gold is None:
        raise ValueError(f"the right answer {on_one_line(answer)} is not the letter of an option, such as B")
    strict, letter = _chosen(response)
    return strict and letter == gold, letter == gold, f"answered {letter or 'no option'}"


def chosen_option(response: str) -> str | None:
    """The letter of the option that a response chooses, as a capital; None for none. There is one candidate."""
    return _chosen(response)[1]


def option_letter(answer: str) -> str | None:
    r"""The letter of an answer that is an option: B, (b), B) Paris, \boxed{B}; None for anything else."""
    text = _undecorated(marked_answer(answer) or answer)
    return _only(text) or _first(text)


def _chosen(response: str) -> tuple[bool, str | None]:
    """Does a response give the letter alone, and which one? A letter is no word: not the A of "A good answer is"."""
    text, marked = _undecorated(response), marked_answer(response)
    if marked is not None:
        return _only(_undecorated(marked)) is not None, option_letter(marked)
    phrases = [phrase.end() for phrase in OPTION_PHRASE.finditer(text)]
    for start in (0, text.rfind("\n") + 1, *phrases[-1:]):
        if letter := _only(text[start:]):
            return True, letter
    if phrases:  # "the answer is not B" chooses nothing
        return False, next((letter for start in reversed(phrases) if (letter := _first(text, start))), None)
    last = re.search(r"(?:[(\[]([A-Za-z])[)\]]|(?<![\w'’-])([A-Z]))\.?$", text)
    return False, _first(text) or (last and (last[1] or last[2]).upper())


def _undecorated(text: str) -> str:
    """Without emphasis, quotation marks and LaTeX's words around a letter."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[*_`$\"“”]", "", text).strip()


def _only(text: str) -> str | None:
    """The letter that a text consists of."""
    label = r"(?:(?:option|choice) )?[(\[]? ?([a-z]) ?[)\]]? ?[.:]?"
    match = re.fullmatch(label, " ".join(text.split()).lower())
    return match[1].upper() if match else None


def _first(text: str, start: int = 0) -> str | None:
    """The letter that a text begins with, if it labels an option."""
    match = OPTION.match(text, start)
    return next(letter for letter in match.groups() if letter).upper() if match else None


CHECKS = {"exact": check_exact, "number": check_number, "math": check_math, "choice": check_choice}


def on_one_line(text: str, length: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]}…"
