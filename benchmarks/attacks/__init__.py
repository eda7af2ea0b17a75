"""Attacks on everything that listens, reads untrusted files, or runs untrusted code, by kind.

    python -m benchmarks.attacks
    python -m benchmarks.attacks --trial
    python -m benchmarks.attacks --only kills

All of it happens on loopback and in temporary folders. Each attack runs twice, each time in its own process: against
the library, where it has to fail, and with the defense against it switched off, where it has to succeed. In addition,
runs are killed 100 times, by SIGKILL, SIGTERM and SIGHUP (`lives.py`, `killed_commands.py`): training of small tasks,
agents and environments, `ascent rounds` and `ascent compare`. Continued as a user would, they have to be bit-identical
to an uninterrupted run, and leave no process and no temporary file. And 1,000 folders with seeded damage are shown,
reported, sampled from, resumed, and opened in the lab by every route: without a traceback, a status of 500, a hang, or
a byte written outside. Programs that cheat on their verdict are generated too (`cheats.py`), and judged in batches;
correct programs have to pass beside them.

`value` is the share of attacks that were prevented. `real` counts the attacks that succeed without their defense.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.attacks import folders, judges, killed_commands, lab, lives, looking, rewards, text, verdicts
from benchmarks.attacks.attempt import DEADLINE, Attack, Fork, outcome, scratch
from benchmarks.attacks.stage import build_stage
from benchmarks.common import close, show

MODULES = (looking, rewards, text, judges, folders, lab, lives)
TRIAL = {
    *("half a character in a reason", "in a line of progress", "in a line of error", "sample through a link"),
    *("metrics.jsonl has a second name", "a token that was used", "a server on another port"),
}
"""The attacks of a trial: the cheapest."""
HANDS = 2


class Result(NamedTuple):
    """What became of an attack: what the attacker got, with the defence and without it; None is nothing."""

    kind: str
    name: str
    armed: str | None
    disarmed: str | None


def try_attack(attack: Attack) -> Result:
    armed = outcome(attack, armed=True)
    try:
        return Result(attack.kind, attack.name, armed, outcome(attack, armed=False))
    except AssertionError as error:  # the attack is none
        return Result(attack.kind, attack.name, armed or str(error), None)


def try_all(attacks: list[Attack]) -> list[Result]:
    """Every attack, with its defence and without it, by several hands."""
    hands = [
        Fork(lambda hand=hand: [try_attack(a) for a in attacks[hand::HANDS]], 2 * DEADLINE * len(attacks))  # type: ignore[misc]
        for hand in range(HANDS)
    ]
    found = [hand.result() for hand in hands]
    lost = next((words for words in found if not isinstance(words, list)), None)
    if lost is not None:
        raise RuntimeError(f"the attacks could not be tried: {lost}")
    order = [(attack.kind, attack.name) for attack in attacks]
    return sorted((Result(*one) for share in found for one in share), key=lambda one: order.index((one.kind, one.name)))


def tally(results: list[Result]) -> dict[str, list[int]]:
    """By kind: tried, held, and those that succeeded without the defence."""
    table: dict[str, list[int]] = {}
    for one in results:
        row = table.setdefault(one.kind, [0, 0, 0])
        row[0] += 1
        row[1] += one.armed is None
        row[2] += one.disarmed is not None
    return table


def kill_many(seed: int, count: int) -> tuple[dict[str, Counter[str]], list[str]]:
    """Kills by several hands: the signals by kind of run, and what was wrong with the runs."""
    seconds = (count + HANDS) * 4 * killed_commands.DEADLINE
    shares = [-(-count // HANDS)] * min(HANDS, count)
    hands = [
        Fork(lambda i=i, n=n: killed_commands.kill_many(HANDS * seed + i, n), seconds)  # type: ignore[misc]
        for i, n in enumerate(shares)
    ]
    found = [hand.result() for hand in hands]
    shares_done = [share if isinstance(share, list) else ({}, [share]) for share in found]  # words: the hand was lost
    tally: dict[str, Counter[str]] = {}
    for by_kind, _ in shares_done:
        for kind, signals in by_kind.items():
            tally.setdefault(kind, Counter()).update(signals)
    return tally, [wrong for _, complaints in shares_done for wrong in complaints]


def damage_many(stage: Path, seed: int, count: int) -> tuple[list[int], list[str]]:
    """Damaged folders: tried, held, and whether one of the first of them hurts where nothing is in its way."""
    complaints = folders.visit_many(stage, seed, count, HANDS)
    bad = {complaint.partition(",")[0].partition(":")[0] for complaint in complaints}
    first = range(min(count, 20) if count > 1 else 0)
    hurt = any(folders.visit(stage, seed, index, folders.nothing_in_the_way, 20.0) for index in first)
    return [count, count - len(bad), int(hurt)], complaints


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", type=int, default=1000, help="damaged folders")
    parser.add_argument("--kills", type=int, default=100, help="kills")
    parser.add_argument("--cheats", type=int, default=1800, help="programs that cheat on their verdict")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="attacks with these words in their kind or name, also kills, damaged folders"
    )
    parser.add_argument("--trial", action="store_true", help="a few of each, in seconds")
    args = parser.parse_args(argv)
    few = args.trial
    count, kills = (1, 1) if few else (args.folders, args.kills)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with scratch() as stage:
            return attack_all(build_stage(stage, small=few), args, count, kills)
    finally:
        torch.set_num_threads(threads)


def attack_all(stage: Path, args: Any, count: int, kills: int) -> int:
    began = time.monotonic()
    attacks = [attack for module in MODULES for attack in module.attacks(stage)]
    attacks += verdicts.attacks(stage, args.seed, args.cheats)
    attacks = [a for a in attacks if args.only in f"{a.kind} {a.name}" and (not args.trial or a.name in TRIAL)]
    print(f"{len(attacks)} attacks, each with its defence and without it …", flush=True)
    results = try_all(attacks)
    for one in results:
        print(f"{one.kind}: {one.name}: {'held' if one.armed is None else 'NOT HELD'}; without: {_short(one.disarmed)}")
    table, complaints = tally(results), [f"{r.kind}, {r.name}: {r.armed}" for r in results if r.armed is not None]
    if kills and args.only in lives.KILLS:
        print(f"{kills} kills …", flush=True)
        signals, wrong = kill_many(args.seed, kills)
        done = sum(of_kind.total() for of_kind in signals.values())
        for kind, of_kind in signals.items():
            print(f"kills: {kind}: {', '.join(f'{name} {number}' for name, number in sorted(of_kind.items()))}")
        row = table.setdefault(lives.KILLS, [0, 0, 0])
        table[lives.KILLS] = [row[0] + done, row[1] + done - len(wrong), row[2]]
        complaints += wrong
    if count and args.only in folders.DAMAGED:
        print(f"{count} damaged folders …", flush=True)
        table[folders.DAMAGED], found = damage_many(stage, args.seed, count)
        complaints += found
    print(*(f"NOT HELD: {complaint}" for complaint in complaints), sep="\n")
    cells = [[kind, *(f"{number:,}" for number in row)] for kind, row in table.items()]
    show(["kind", "tried", "held", "succeeded without the defence"], cells)
    tried, held, real = (sum(row[i] for row in table.values()) for i in range(3))
    alone = [row for kind, row in table.items() if kind not in (folders.DAMAGED, lives.KILLS)]
    ok = (
        tried == held
        and all(row[0] == row[2] for row in alone)
        and all(row[2] for row in table.values() if not args.trial)
    )
    seconds = round(time.monotonic() - began)
    return close("attacks", held / max(1, tried), None, 1.0, ok, tried=tried, held=held, real=real, seconds=seconds)[1]


def _short(words: str | None) -> str:
    return "NOTHING" if words is None else " ".join(re.sub(r"\S*ascent-attacks-\w+", "…", words).split())[:100]
