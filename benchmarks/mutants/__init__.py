"""Mutation testing: sample small changes of the package (mutants), and count those that a test detects.

    python -m benchmarks.mutants --map           once, or after large changes: which functions each test calls (20 min)
    python -m benchmarks.mutants --seed 1        60 mutants, two at a time (about an hour)

Mutants are sampled uniformly over the lines of ascent/**/*.py that have one; equivalent ones are left out beforehand
with their reason (excluded.py). Each is applied in a copy of the tree. The tests that call its function run first, the
most specific ones before the others, and the whole suite (`make test`) only if none of them fails. A test that also
fails without the mutant does not count. A run that takes many times as long as without the mutant counts as detected.
An interrupted sample continues. Results: benchmarks/results/mutants_SEED.json, and a page of all samples.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import ROOT, close, markdown, show, write_page
from benchmarks.mutants.calls import Calls
from benchmarks.mutants.excluded import reason_to_exclude
from benchmarks.mutants.operators import Mutant, by_line, compiles, mutants_of
from benchmarks.mutants.trials import Trials, record_calls

TARGET = 0.95
"""The share of mutants that have to be caught: 57 of 60."""
SMOKE = ("ascent/core/weights.py", "tests/core/test_weights.py")


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--count", type=int, default=60, help="mutants to draw")
    parser.add_argument("--jobs", type=int, default=2, help="mutants to try at once")
    parser.add_argument("--paths", nargs="*", default=["ascent/**/*.py"], help="files to draw from")
    parser.add_argument("--tests", nargs="*", default=[], help="run these tests and no others")
    parser.add_argument("--quick", action="store_true", help="leave out the whole suite for survivors")
    parser.add_argument("--list", action="store_true", help="print the draw, and try nothing")
    parser.add_argument("--fresh", action="store_true", help="forget what is known of this draw")
    parser.add_argument("--map", action="store_true", help="record which functions each test calls, and draw nothing")
    parser.add_argument("--map-flags", default="-n 4 -m 'not smoke'", help="what --map gives to pytest")
    parser.add_argument("--smoke", action="store_true", help="two mutants of one file, with its tests alone")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = options(argv)
    if given.map:
        return make_map(shlex.split(given.map_flags))
    if given.smoke:
        given.count, given.paths, given.tests = 2, [SMOKE[0]], [SMOKE[1]]
    drawn, excluded = draw(given.seed, given.count, given.paths)
    print(f"{sum(excluded.values())} mutants are left out beforehand:")
    show(["mutants", "reason"], [[str(count), reason] for reason, count in excluded.most_common()])
    if given.list:
        show(["line", "operator", "mutant"], [[str(m.line), m.operator, m.key] for m in drawn])
        return 0
    path = common.RESULTS / f"mutants_{given.seed}.json"
    results = {} if given.fresh or given.smoke else read_results(path, drawn, given.quick)
    trials = Trials(ROOT, Calls.read(map_path()), given.jobs, given.tests, not (given.quick or given.smoke))
    try:
        for mutant, result in tried(trials, [m for m in drawn if m.key not in results], given.jobs):
            results[mutant.key] = result
            done = f"{len(results)}/{len(drawn)}"
            print(f"{done} {result['status']:8} {result['seconds']:6.0f} s  {mutant.key}  {result['test']}", flush=True)
            if not given.smoke:
                write_results(path, given.seed, drawn, results, excluded)
    finally:
        trials.close()
    return report(given, drawn, results)


def draw(seed: int, count: int, patterns: list[str]) -> tuple[list[Mutant], Counter[str]]:
    """This many mutants, each of another line, and how many were left out for which reason."""
    excluded, kept, sources = Counter[str](), list[Mutant](), dict[str, str]()
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    for path in paths:
        name = str(path.relative_to(ROOT))
        sources[name] = path.read_text()
        lines = sources[name].splitlines()
        for mutant in mutants_of(name, sources[name]):
            reason = reason_to_exclude(mutant, lines[mutant.line - 1])
            if reason is None:
                kept.append(mutant)
            else:
                excluded[reason] += 1
    chosen = list[Mutant]()
    for _, mutants in sorted(by_line(kept), key=lambda line: _order(seed, min(mutant.key for mutant in line[1]))):
        mutants.sort(key=lambda mutant: _order(seed, mutant.key))
        found = next((m for m in mutants if compiles(m.apply(sources[m.path]))), None)
        if found is not None:
            chosen.append(found)
        if len(chosen) == count:
            break
    return chosen, excluded


def _order(seed: int, key: str) -> str:
    """The place of a line or of a mutant in a draw: changes of other lines do not change it."""
    return hashlib.sha256(f"{seed} {key}".encode()).hexdigest()


def tried(trials: Trials, mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Mutants and their verdicts, in the order in which they are known."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(trials.try_mutant, mutant): mutant for mutant in mutants}
        try:
            for future in as_completed(futures):
                yield futures[future], asdict(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def map_path() -> Path:
    """Where calls are kept: outside of the repository's history."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ascent" / f"calls-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]}.jsonl"


def make_map(flags: list[str]) -> int:
    map_path().parent.mkdir(parents=True, exist_ok=True)
    outcome = record_calls(ROOT, map_path(), flags)
    calls = Calls.read(map_path())
    print(outcome.text)
    functions = set().union(*calls.of.values()) if calls.of else set()
    print(f"{len(calls.of)} tests call {len(functions)} functions: {map_path()}")
    return 0 if calls.of else 1


def read_results(path: Path, drawn: list[Mutant], quick: bool) -> dict[str, dict[str, Any]]:
    """What is known of this draw; mutants that survived some of the tests are tried again with the whole suite."""
    if not path.exists():
        return {}
    mutants = json.loads(path.read_text())["mutants"]
    known = {m["key"]: m for m in mutants if m["status"] != "survived" or quick or "whole suite" in m["stages"]}
    return {mutant.key: known[mutant.key] for mutant in drawn if mutant.key in known}


def write_results(path: Path, seed: int, drawn: list[Mutant], results: dict[str, Any], excluded: Counter[str]) -> None:
    mutants = [
        {"key": m.key, "line": m.line, "operator": m.operator, **results[m.key]} for m in drawn if m.key in results
    ]
    whole = {"seed": seed, "count": len(drawn), "excluded": dict(excluded), "mutants": mutants}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(whole, indent=1) + "\n")
    part.replace(path)


def report(given: argparse.Namespace, drawn: list[Mutant], results: dict[str, dict[str, Any]]) -> int:
    rows = [[results[m.key]["status"], m.operator, m.key, results[m.key]["test"]] for m in drawn]
    show(["status", "operator", "mutant", "noticed by"], rows)
    caught = sum(row[0] != "survived" for row in rows)
    if not given.smoke:
        write_page("mutants", page())
    return close(
        "mutants", caught / len(drawn), None, TARGET, caught >= TARGET * len(drawn), caught=caught, drawn=len(drawn),
        survived=[m.key for m in drawn if results[m.key]["status"] == "survived"],
    )[1]  # fmt: skip


def page() -> str:
    """All draws, in Markdown."""
    rows, left = [], []
    for path in sorted(common.RESULTS.glob("mutants_*.json")):
        one = json.loads(path.read_text())
        alive = [m for m in one["mutants"] if m["status"] == "survived"]
        survived, whole = [m["key"] for m in alive], all("whole suite" in m["stages"] for m in alive)
        caught = len(one["mutants"]) - len(survived)
        share = f"{caught / len(one['mutants']):.0%}"
        rows.append([str(one["seed"]), str(len(one["mutants"])), str(caught), share, "yes" if whole else "no"])
        left += [f"- seed {one['seed']}: `{key}`" for key in survived]
    table = markdown(["seed", "mutants", "caught", "share", "survivors were tried with the whole suite"], rows)
    survivors = "\n".join(left) or "none"
    return f"# Mutants\n\n{__doc__}\n{table}\n\nThose that survived:\n\n{survivors}\n"


if __name__ == "__main__":
    sys.exit(main())
