"""A reward being hacked: sort five numbers out of three with the inclusion-and-ordering reward.

    python -m benchmarks.loophole [--steps N]

Every prompt repeats a number. The reward asks whether a number appears, but not how often, so wrong answers can earn
the full reward. `value` is the held-out reward as a share of its maximum (target: at least 99 %). The peer is the
held-out exact accuracy, which must stay under 50 %. Both are greedy. The run itself must report it: in the words of
run.json's result, and as an alert in events.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import ascent
from benchmarks.common import close

SHARE, ACCURACY = 0.99, 0.5
ALERT = "reward-without-accuracy"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=None, help="default: those of `ascent train sort`")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    settings = {"length": 5, "numbers": 3, "reward": "inclusion-ordering", "seed": options.seed}
    settings |= {} if options.steps is None else {"steps": options.steps}
    with tempfile.TemporaryDirectory() as folder:
        run = ascent.train("sort", out=Path(folder) / "run", show=False, **settings)
        result, events = run.info["result"], run.events
    share, accuracy = result["eval/reward"] / result["max_reward"], result["eval/accuracy"]
    alerts = [event for event in events if event.get("event") == "alert" and event.get("name") == ALERT]
    for event in alerts:
        print(f"alert at step {event['step']}: {event['text']}")
    print(*(f"result: {word}" for word in result["words"]), sep="\n")
    says = bool(alerts) and any(word.startswith("Reward without accuracy") for word in result["words"])
    ok = share >= SHARE and accuracy < ACCURACY and says
    return close("loophole", share, accuracy, SHARE, ok, accuracy_below=ACCURACY, says_so=says)[1]


if __name__ == "__main__":
    sys.exit(main())
