"""The endpoint: overhead of sampling through HTTP, attacks by clients, and an agent that learns through it.

    python -m benchmarks.endpoint [--gpu] [--agents] [--repeats 3] [--steps 25] [--smoke]

Speed: 64 concurrent sessions, each with its own connection from another process, against plain rollouts of 64 sequences
with the same prompts (50 to 70 tokens, and 64 sampled tokens, 256 on a GPU; SmolLM2-135M's shape, float32 on two
threads, or bfloat16 on a GPU). No response ends early. The two alternate after a warm-up; `value` and `peer` are their
medians in tokens per second, and the target is a ratio of 0.85. `turns` is the same with four turns per session.

Attacks: beside a running session, others disconnect during streams, flood, stall, send garbage and other sessions'
keys. The session's tokens have to equal those that it samples alone, and no key may reach another record.

Agents: a function with OpenAI's client, a taskset of verifiers and a server of OpenEnv are each trained on a tiny
random model (not with --gpu; --agents: nothing else). The reward of all three is the share of words below w64 in the
policy's last answer. Their reward has to rise, and the log-probs have to be the learner's. The last two are those of
`make verifiers openenv`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

from ascent.build.model_verification import verify_model
from ascent.core.types import Prompts
from ascent.environments.chat_session import ChatRenderer, Session
from ascent.inference.continuous_batching import serve_requests
from ascent.inference.engine import LocalEngine
from ascent.inference.request_queue import RequestQueue
from ascent.rollout.agents import ServerThread
from ascent.server.endpoint import Endpoint
from ascent.server.open_sessions import SessionSettings
from benchmarks.common import ROOT, close, show
from benchmarks.peers.models import SMOKE as TINY
from benchmarks.peers.models import random_model
from benchmarks.rollouts_gpu import SHAPES, SMOKE, model_of, prompts_of

SPEED, THREADS, SESSIONS, TURNS, OBSERVED = 0.85, 2, 64, 4, 8
TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w2', 'user': 'w3', 'assistant': 'w4', 'tool': 'w5'}[m.role] }} "
    "{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}w4 {% endif %}"
)
AGENT = '''
import openai

async def agent(base_url, key, problem):
    """Two turns; the reward is the share of words below w64."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        messages = [{"role": "user", "content": problem.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "w9"}]
    words = [int(word[1:]) for word in said.content.split() if word.startswith("w")]
    return sum(number < 64 for number in words) / max(len(words), 1)
'''


TASKSET = """
import verifiers.v1 as vf

class Low(vf.Task[vf.TaskData]):
    @vf.reward
    async def low(self, trace: vf.Trace) -> float:
        words = [int(word[1:]) for word in trace.last_reply.split() if word.startswith("w")]
        return sum(number < 64 for number in words) / max(len(words), 1)

class Words(vf.Taskset[Low, vf.TasksetConfig]):
    def load(self):
        for i in range(20, 60):
            yield Low(vf.TaskData(prompt=f"w{i} w{i + 1}"), self.config.task)

__all__ = ["Words"]
"""
OPENENV = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    text: str

class Heard(Observation):
    text: str = ""

class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.now = State()

    def reset(self, seed=None, episode_id=None, **_):
        self.now = State(episode_id=episode_id, step_count=0)
        return Heard(text="w9")

    def step(self, action, timeout_s=None, **_):
        self.now.step_count += 1
        words = [int(word[1:]) for word in action.text.split() if word.startswith("w")]
        share = sum(number < 64 for number in words) / max(len(words), 1)
        over = self.now.step_count == 2
        return Heard(text="w9", done=over, reward=share if over else 0.0)

    @property
    def state(self):
        return self.now

app = create_fastapi_app(Words, Say, Heard, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
ENGINES = ROOT / ".engines"


class Silent:
    """A tokenizer for clients that send tokens."""


# ---- a client in a process of its own ---------------------------------------------------------------------------


async def ask(
    port: int, key: str, body: dict[str, Any], path: str = "/inference/v1/generate", leave: bool = False
) -> tuple[int, Any]:
    """One request over a connection of its own; its status and its answer. `leave`: without waiting for it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    if leave:
        await reader.read(20)
        writer.close()
        return 0, None
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, length = int(head.split()[1]), [line for line in head.lower().splitlines() if "content-length" in line]
    answer = await reader.readexactly(int(length[0].split(":")[1])) if length else await reader.read()
    writer.close()
    return status, json.loads(answer) if length else answer


async def converse(port: int, key: str, prompt: list[int], turns: int, tokens: int) -> list[int]:
    """A session of so many turns, each of so many tokens; everything that was read and drawn."""
    ids = list(prompt)
    for turn in range(turns):
        status, answer = await ask(port, key, {"token_ids": ids, "sampling_params": {"max_tokens": tokens}})
        assert status == 200, answer
        ids += answer["choices"][0]["token_ids"]
        ids += [5] * OBSERVED if turn + 1 < turns else []
    return ids


def client(pipe: Any) -> None:
    """Answers (port, keys, prompts, turns, tokens) with the seconds that all sessions together took."""
    while (work := pipe.recv()) is not None:

        async def all_at_once(port: int, keys: Any, prompts: Any, turns: int, tokens: int) -> float:
            begin = time.perf_counter()
            talks = [converse(port, key, ids, turns, tokens) for key, ids in zip(keys, prompts, strict=True)]
            await asyncio.gather(*talks)
            return time.perf_counter() - begin

        pipe.send(asyncio.run(all_at_once(*work)))


# ---- speed ------------------------------------------------------------------------------------------------------


@contextmanager
def serving(sampler: LocalEngine, slots: int, limit: int, longest: int, renderer: Any) -> Iterator[Any]:
    queue = RequestQueue(slots)
    settings = SessionSettings(limit + longest, longest, limit, fixed=True)
    endpoint = Endpoint(queue, renderer, settings, sampler.lm.vocab_size)
    server = ServerThread(endpoint).start()
    decoding = threading.Thread(target=serve_requests, args=(sampler, queue, slots, limit, longest))
    decoding.start()
    try:
        yield endpoint, server.port
    finally:
        queue.close()
        decoding.join()
        server.close()


def speed(options: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if options.gpu else "cpu"
    shape = SHAPES["135m"] | (SMOKE if options.smoke else {})
    tokens, sessions = (8, 8) if options.smoke else (256 if options.gpu else 64, SESSIONS)
    lm = model_of(shape, device)
    prompt = prompts_of(sessions, lm.vocab_size, 50, 70)
    limit = tokens + TURNS * OBSERVED
    verify_model(lm, 70 + limit)
    sampler = LocalEngine(lm, tokens, 1.0, torch.Generator().manual_seed(0), max_num_seqs=sessions)
    ids = [row[row >= 0].tolist() for row in prompt]
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=client, args=(theirs,), daemon=True)
    process.start()
    found: dict[str, list[float]] = {"plain": [], "endpoint": [], "turns": []}

    def through(turns: int) -> float:
        renderer = ChatRenderer(Silent(), lm.stop_token_ids)
        with serving(sampler, sessions, limit, 70, renderer) as (endpoint, port):
            keys = [endpoint.open(Session(seed), endpoint.settings)[0] for seed in range(sessions)]
            mine.send((port, keys, ids, turns, tokens // turns))
            return sessions * tokens / mine.recv()

    for _ in range(options.repeats + 1):
        sampler.version += 1
        begin = time.perf_counter()
        rollouts = sampler.generate(Prompts.of(prompt), 1)
        found["plain"].append(int(rollouts.mask.sum()) / (time.perf_counter() - begin))
        found["endpoint"].append(through(1))
        found["turns"].append(through(TURNS))
    mine.send(None)
    process.join()
    return {name: statistics.median(values[1:]) for name, values in found.items()} | {"every": found}


# ---- attacks ----------------------------------------------------------------------------------------------------

NONSENSE: tuple[Any, ...] = (
    {},
    {"messages": "x"},
    {"messages": [{"role": "king"}]},
    {"messages": [{"role": "user", "content": "x"}], "n": 9},
    {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"},
    {"messages": [{"role": "user", "content": "x " * 100_000}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "user", "content": "x"}], "tools": [3]},
    {"messages": [{"role": "user", "content": "x"}], "stop": ["", 3]},
    [1, 2],
)


async def attack(port: int, key: str, closed: str, words: list[int]) -> dict[str, bool]:
    """What bad clients try, and whether it was held."""
    chat, said = "/v1/chat/completions", {"messages": [{"role": "user", "content": "w7 w8"}]}
    held: dict[str, bool] = {}
    for i, body in enumerate(NONSENSE):
        held[f"nonsense {i}"] = (await ask(port, key, body, chat))[0] == 400
    for i, odd in enumerate(([], [-1], [10**9], ["x"], [True], None)):
        held[f"odd tokens {i}"] = (await ask(port, key, {"token_ids": odd}))[0] == 400
    for name, wrong in {"no key": "", "a closed key": closed, "half a key": key[:-3], "a made-up key": "sk-x"}.items():
        held[name] = (await ask(port, wrong, said, chat))[0] == 401
    held["another path"] = (await ask(port, key, said, "/v1/../etc/passwd"))[0] == 404
    for i in range(4):
        await ask(port, key, said | {"stream": bool(i % 2), "max_tokens": 40}, chat, leave=True)
    for _ in range(8):  # connections that owe a request
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-le")
    status = 409
    while status == 409:  # until the server has seen that the others left
        status, _ = await ask(port, key, {"token_ids": words, "sampling_params": {"max_tokens": 4}})
    held["a request after those that left"] = status in (200, 400)
    flood = await asyncio.gather(*(ask(port, key, said, chat) for _ in range(60)))
    held["a flood"] = {status for status, _ in flood} <= {200, 400, 409, 429}
    return held


def attacks(folder: Path) -> tuple[dict[str, bool], int]:
    """Everything that was tried while a session talked; and what it drew, alone and beside them."""
    lm = tiny(folder)
    sampler = LocalEngine(lm, 300, 1.0, torch.Generator(), max_num_seqs=4)
    sampler.version = 0
    with serving(sampler, 8, 300, 120, ChatRenderer(lm.tokenizer, lm.stop_token_ids)) as (endpoint, port):
        sessions = [endpoint.open(Session(seed), endpoint.settings) for seed in (7, 7, 3, 4)]
        (alone_key, alone), (key, beside), (bad, _), (over, _) = sessions
        endpoint.close(over, "over")
        prompt = [3, 7, 8, 9, 0, 4]
        asyncio.run(converse(port, alone_key, prompt, 6, 12))

        async def together() -> dict[str, bool]:
            _, held = await asyncio.gather(converse(port, key, prompt, 6, 12), attack(port, bad, over, prompt))
            return held

        held = asyncio.run(together())
        same = (alone.session.prompt, alone.session.response, alone.session.sampled)
        held["nothing leaks"] = same == (beside.session.prompt, beside.session.response, beside.session.sampled)
        held["nothing is left"] = not endpoint.queue.active
    return held, beside.session.num_turns


def tiny(folder: Path) -> Any:
    from transformers import AutoTokenizer

    from ascent.models import CausalLM

    random_model(folder, TINY | {"max_position_embeddings": 1024})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    lm = CausalLM(str(folder), dtype="float32", device="cpu").load()
    verify_model(lm, 500)
    return lm


# ---- agents -----------------------------------------------------------------------------------------------------


@contextmanager
def openenv(folder: Path) -> Iterator[str]:
    """The address of a server of OpenEnv, in a process of its own."""
    (folder / "words_server.py").write_text(OPENENV)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(ENGINES / "openenv" / "bin" / "python"), str(folder / "words_server.py"), str(port)]
    process, url = subprocess.Popen(command, cwd=folder), f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urlopen(f"{url}/schema", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server of OpenEnv does not start"
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def agents(folder: Path, steps: int, smoke: bool) -> dict[str, dict[str, float]]:
    """What each agent learned. A smoke has the first alone."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "words_taskset.py").write_text(TASKSET)
    found = {"client": learn(folder, steps, "client", f"python:{folder}/agent.py:agent")}
    if not smoke:
        taskset = f"verifiers:{folder}/words_taskset.py:{ENGINES}/verifiers"
        found["verifiers"] = learn(folder, steps, "verifiers", taskset)
        with openenv(folder) as url:
            found["openenv"] = learn(folder, steps, "openenv", f"openenv:{url}")
    return found


def learn(folder: Path, steps: int, name: str, agent: str) -> dict[str, float]:
    """Reward at the start and at the end, and the largest mean gap between sampler and learner."""
    from ascent.api import start
    from ascent.core.metric_names import MISMATCH
    from ascent.runs.display.terminal import Display
    from ascent.settings import configure

    rows = [{"prompt": f"w{i} w{i + 1}", "answer": "x", "task": i - 20, "seed": i} for i in range(20, 60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "policy": "causal-lm",
        "model": str(folder / "model"),
        "policy.device": "cpu",
        "agent": agent,
    }
    settings |= {
        "kl": "no-kl",
        "reference": "no-reference",
        "max_tokens": 24,
        "turn_tokens": 12,
        "max_prompt": 40,
        "max_context": 120,
    }
    settings |= {"prompts": 4, "samples": 8, "steps": steps, "lr": 2e-2, "algorithm": "grpo", "eval_prompts": 4}
    settings |= {"eval_every": steps, "checkpoint_every": steps, "record_rollouts": "none", "agent_seconds": 120.0}
    tiny(folder / "model")
    run = start(configure(f"jsonl:{folder}/rows.jsonl", settings), folder / f"run-{name}", Display(), preflight=False)
    rewards, part = [row["reward"] for row in run.metrics], max(1, steps // 5)
    gap = max(row[MISMATCH] for row in run.metrics)
    errors = sum(row["reward_errors"] for row in run.metrics)
    first, last = statistics.mean(rewards[:part]), statistics.mean(rewards[-part:])
    print(f"{name}: reward {first:.3f} → {last:.3f} in {steps} steps, log-probs within {gap:.1g}", flush=True)
    return {"first": first, "last": last, "gap": gap, "errors": errors}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="speed on one GPU; no agents")
    parser.add_argument("--agents", action="store_true", help="agents alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25, help="of each agent's training")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and two steps, only to see that it runs")
    options = parser.parse_args(argv)
    options.repeats, options.steps = (1, 2) if options.smoke else (options.repeats, options.steps)
    torch.set_num_threads(THREADS)
    found = {} if options.agents else speed(options)
    names = ("plain", "endpoint", "turns") if found else ()
    rates = [[name, f"{found[name]:,.0f}", f"{found[name] / found['plain']:.2f}"] for name in names]
    show(["tokens per second", "", "of plain"], rates)
    with tempfile.TemporaryDirectory() as place:
        held = {} if options.agents else attacks(Path(place) / "attacked")[0]
        failed = [name for name, fine in held.items() if not fine]
        print(f"attacks: {len(held) - len(failed)} of {len(held)} held {failed or ''}", flush=True)
        learned = {} if options.gpu else agents(Path(place), options.steps, options.smoke)
    rose = all(
        each["gap"] < 1e-5 and not each["errors"] and (options.smoke or each["last"] > each["first"] + 0.1)
        for each in learned.values()
    )
    fast = options.smoke or options.agents or found["endpoint"] >= SPEED * found["plain"]
    ok = not failed and rose and fast
    more = {"turns": found.get("turns"), "attacks": len(held), "failed": failed, "agents": learned}
    more |= {"every": found.get("every")}
    if options.smoke:
        return close("endpoint", None, None, SPEED, ok, smoke=True, **more)[1]
    return close("endpoint", found.get("endpoint"), found.get("plain"), SPEED, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())
