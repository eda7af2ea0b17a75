"""Runs in the virtual environment of verifiers 0.4 and imports nothing of Ascent. Messages are lines of JSON.

    in    {"id": 7, "url": …, "key": …, "task": 3, "seconds": 600}       an episode to run
          {"cancel": 7}                                                  cancel an episode
          {"rows": 100}                                                  request the first tasks
    out   {"ready": true}, or {"error": …} if the taskset cannot be loaded
          {"began": 7}
          {"id": 7, "reward": …, "error": …, "metrics": {…}, "traces": […]}
          {"rows": […]}

The policy is at the URL of the episode, with the key of its session, so the session records the tokens. verifiers sends
the id of its trace as X-Session-ID. No episode is retried: its record would contain both attempts.
"""

import asyncio
import importlib.machinery
import itertools
import json
import logging
import os
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what a library prints is not a message


def reply(answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")


def chat_harness() -> None:
    """Register a harness in this process, for policies without tools. It needs no `uv`."""
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire

    class AscentChatConfig(vf.HarnessConfig):
        pass

    class AscentChat(vf.Harness[AscentChatConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            import httpx

            system, prompt = self.resolve_prompt(data)
            system = [{"role": "system", "content": system}] if system else []
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
            body = {"model": ctx.model, "messages": [*system, *said]}
            async with httpx.AsyncClient(verify=False, timeout=None) as client:
                headers = {"Authorization": f"Bearer {secret}"}
                answer = await client.post(f"{endpoint}/chat/completions", headers=headers, json=body)
            failed = answer.status_code >= 400
            return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text[-500:] if failed else "")

    module = ModuleType("ascent_chat")
    vars(module).update(AscentChat=AscentChat, AscentChatConfig=AscentChatConfig, __all__=["AscentChat"])
    AscentChatConfig.__module__ = AscentChat.__module__ = "ascent_chat"
    sys.modules["ascent_chat"] = module
    module.__spec__ = importlib.machinery.ModuleSpec("ascent_chat", None)


def share_connections() -> None:
    """Make clients with the key of their session that share one connection pool."""
    from verifiers.v1.clients import resolve_client
    from verifiers.v1.clients.base import build_async_httpx
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.configs.client import resolve_api_key, resolve_headers
    from verifiers.v1.interception.server import InterceptionServer

    shared: list[Any] = []

    def client_of(_: Any, config: Any) -> Any:
        if config.type != "eval":
            return resolve_client(config)
        if not shared:
            shared.append(build_async_httpx(config))
        client = EvalClient.__new__(EvalClient)
        client.base_url, client.api_key = config.base_url, resolve_api_key(config)
        client.headers, client.client = resolve_headers(config), shared[0]
        return client

    InterceptionServer._client = client_of


def load_taskset(name: str) -> Any:
    """Load the environment of a taskset: by its name, its file, or a TOML file with an [env]."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.env import default_agent_harness
    from verifiers.v1.utils.loaders import env_config_type

    chat_harness()
    share_connections()
    config: dict[str, Any] = {"taskset": {"id": name}}
    if name.endswith(".toml"):
        config = tomllib.loads(Path(name).read_text())
        config = config.get("env", config)
        sys.path.insert(0, str(Path(name).parent))
    elif name.endswith(".py"):
        sys.path.insert(0, str(Path(name).parent))
        config = {"taskset": {"id": Path(name).stem}}
    taskset = config.get("taskset", {}).get("id", "")
    form = env_config_type(taskset, config.get("id", ""))
    plain = default_agent_harness(taskset).id == "bash"
    for role, field in form.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            seat = config.setdefault(role, {})
            if "runtime" not in seat and type(field.default.runtime).__name__ == "PrimeConfig":
                seat["runtime"] = {"type": "subprocess"}  # the default is a cloud
            if plain and "harness" not in seat and field.default.harness is None:
                seat["harness"] = {"id": "ascent_chat"}
    return vf.load_environment(form.model_validate(config))


class Tasks:
    """The tasks of a taskset, read lazily."""

    def __init__(self, taskset: Any):
        self.coming, self.read = iter(taskset), list[Any]()

    def first(self, count: int) -> list[Any]:
        self.read += itertools.islice(self.coming, max(0, count - len(self.read)))
        return self.read[:count]

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or index < 0 or len(self.first(index + 1)) <= index:
            raise LookupError(f"the taskset has no task {index!r}: the column `task` of a row is a task's number")
        return self.read[index]


async def play_task(env: Any, tasks: Tasks, job: dict[str, Any]) -> dict[str, Any]:
    """Run one episode and return its outcome."""
    import verifiers.v1 as vf

    variable = f"ASCENT_KEY_{job['id']}"
    os.environ[variable] = job["key"]
    try:
        client = vf.EvalClientConfig(base_url=job["url"], api_key_var=variable)
        context = vf.ModelContext(model="policy", client=client, sampling=vf.Sampling())
        async with asyncio.timeout(job["seconds"]):
            episode = await env.run_episode(tasks[job["task"]], context)
    except TimeoutError:
        return {"error": f"its agent took longer than {job['seconds']:g} s"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        del os.environ[variable]
    played = [trace for trace in episode.traces if trace.agent.trainable and trace.num_turns]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or errors:
        words = f"{errors[0].type}: {errors[0].message}" if errors else "verifiers says that its episode is not ok"
        return {"error": words}
    if len(played) != 1:
        return {"error": f"its episode has {len(played)} conversations of the policy, and one is trained"}
    (trace,) = played
    parts = {name: reward.score for name, reward in trace.rewards.items()} | dict(trace.metrics)
    metrics = {name: float(value) for name, value in parts.items()} | {"turns": float(trace.num_turns)}
    return {"reward": trace.reward, "metrics": dict(list(metrics.items())[:32]), "traces": [trace.id]}


def task_row(index: int, task: Any) -> dict[str, Any]:
    """Return a task as a row to train on."""
    prompt = task.data.prompt
    if prompt is not None and not isinstance(prompt, str):
        prompt = [{"role": m.role, "content": m.content if isinstance(m.content, str) else ""} for m in prompt]
    answer = getattr(task.data, "answer", None)
    row = {"prompt": prompt or task.data.name or f"task {index}", "task": index}
    return row | ({"answer": str(answer)} if answer is not None else {})


async def serve(env: Any, max_active: int) -> None:
    tasks, places = Tasks(env.taskset), asyncio.Semaphore(max_active)
    running: dict[int, asyncio.Task[None]] = {}

    async def run(job: dict[str, Any]) -> None:
        async with places:
            reply({"began": job["id"]})
            reply({"id": job["id"]} | await play_task(env, tasks, job))
        running.pop(job["id"], None)

    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with env.serving():
        reply({"ready": True})
        while line := await reader.readline():
            job = json.loads(line)
            if "rows" in job:
                reply({"rows": [task_row(i, task) for i, task in enumerate(tasks.first(job["rows"]))]})
            elif "cancel" in job:
                if task := running.pop(job["cancel"], None):
                    task.cancel()
            else:
                running[job["id"]] = asyncio.create_task(run(job))


def run_bridge(name: str, max_active: int) -> None:
    logging.basicConfig(level=logging.ERROR)
    try:
        env = load_taskset(name)
    except Exception as error:
        return reply({"error": f"{type(error).__name__}: {error}"})
    asyncio.run(serve(env, max_active))


if __name__ == "__main__":
    run_bridge(sys.argv[1], int(sys.argv[2]))
