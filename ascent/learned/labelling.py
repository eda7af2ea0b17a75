"""`ascent label`: pairs of responses, labelled by a judge, as a file of preferences (RLAIF).

Every answer is on disk before it is used. So an interrupted command goes on where it stopped when it is given again,
and the pairs are written once, whole, when all are labelled.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ascent.judge import Asker, Judge, JudgeError, Preference, Unparsed, compare
from ascent.judge.cache import Answers
from ascent.learned.candidates import Candidate, Row, candidates, side_file
from ascent.tasks.text.preferences import write_pairs
from ascent.types import Refused, Trouble


@dataclass(frozen=True)
class Labelled:
    """What came of it, and where it is."""

    pairs: int
    ties: int
    failed: int
    equal: int
    """Pairs of the same response twice: not asked."""
    file: Path
    words: str

    def text(self) -> str:
        more = [f"{self.ties} ties"] + [f"{self.failed} failed"] * bool(self.failed)
        more += [f"{self.equal} with the same response twice, not asked"] * bool(self.equal)
        return f"{self.pairs} pairs in {self.file} ({', '.join(more)}); {self.words}"


def label(
    source: str | Path,
    out: str | Path,
    judge: Judge,
    *,
    prompts: int = 64,
    samples: int = 2,
    seed: int = 0,
    ties: Literal["keep", "drop"] = "keep",
    max_failed: float = 0.1,
    show: bool = True,
) -> Labelled:
    """Label the candidates of a file, or of a run's policy, into `out`. What was asked before is not asked again."""
    out = Path(out)
    check_out(out)
    judge = replace(judge.insist(), cache=judge.cache or str(side_file(out, "answers")))
    found = candidates(source, out, prompts, samples, seed)
    different = [c for c in found if c.one.strip() != c.other.strip()]
    asker = Asker(judge, Answers(judge.cache))
    try:
        with interruptible(asker, out), progress(len(different), "pairs", show) as advance:
            verdicts = compare(asker, different, lambda _: advance(1))
    finally:
        asker.answers.close()
    judged = list(zip(different, verdicts, strict=True))
    won, tied, failed = _sorted(judged, judge.model)
    for kind, rows in (("ties", tied if ties == "keep" else []), ("failed", failed)):
        side_file(out, kind).unlink(missing_ok=True)
        if rows:
            write_pairs(side_file(out, kind), rows)
    if len(failed) > max_failed * len(judged):
        raise Trouble(
            f"the judge failed on {len(failed)} of {len(judged)} pairs, more than --max-failed {max_failed:g} allows "
            f"({side_file(out, 'failed')}). Answers that came are kept: the same command goes on. The first: "
            f"{failed[0]['why']}"
        )
    if not won:
        raise Trouble(f"of {len(found)} pairs, none has a winner: {len(tied)} ties. Nothing is written to {out}")
    write_pairs(out, won)
    return Labelled(len(won), len(tied), len(failed), len(found) - len(different), out, asker.counts.words())


def check_out(out: Path) -> None:
    if out.exists():
        raise Refused(f"--out {out}: already there, and nothing is overwritten. Choose another file")
    if not out.parent.is_dir():
        raise Refused(f"--out {out}: there is no folder {out.parent}")


def _sorted(
    judged: Sequence[tuple[Candidate, Preference | JudgeError]], model: str
) -> tuple[list[Row], list[Row], list[Row]]:
    """Pairs with a winner, ties, and failures with what the judge had said."""
    won: list[Row] = []
    tied: list[Row] = []
    failed: list[Row] = []
    for candidate, verdict in judged:
        row = {"prompt": candidate.prompt, "responses": [candidate.one, candidate.other]}
        if isinstance(verdict, JudgeError):
            raw = verdict.raw if isinstance(verdict, Unparsed) else None
            failed.append(row | {"error": type(verdict).__name__, "why": str(verdict), "raw": raw})
        elif verdict.winner is None:
            tied.append(row | {"verdicts": list(verdict.verdicts), "judge": model})
        else:
            both = row["responses"]
            chosen = {"chosen": both[verdict.winner], "rejected": both[1 - verdict.winner]}
            won.append({"prompt": candidate.prompt, **chosen, "judge": model})
    return won, tied, failed


# ---- what a person sees and does meanwhile ----------------------------------------------------------


@contextmanager
def progress(total: int, what: str, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, ten lines elsewhere; call it with how many more are done."""
    if show and not sys.stderr.isatty():
        done = 0

        def line(more: int) -> None:
            nonlocal done
            done += more
            if done == total or done * 10 // total > (done - more) * 10 // total:
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task("", total=total)
        yield lambda more: bar.advance(task, more)


@contextmanager
def interruptible(asker: Asker, out: Path) -> Iterator[None]:
    """Ctrl-C waits for the answers under way, for they are paid for; a second one does not."""
    advice = f"answers that came are kept in {asker.answers.path}; the same command goes on (nothing is in {out} yet)"
    before = {}

    def handle(*_: Any) -> None:
        if asker.stop.asked:
            raise KeyboardInterrupt
        asker.stop()

    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(advice) from None
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
