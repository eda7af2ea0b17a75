"""An agent that plays an OpenEnv server with the policy, in the process of its episode.

The first message is the problem with the server's first observation; every answer of the policy is an action. If the
action has one field without a default, the whole answer is its value (for a number, the last number in it); an action
with several fields is requested as JSON. The policy receives an error for an invalid action and may try again. The
reward is the sum of the server's rewards.

A session is a web socket: `reset`, then `step` until the server is done. All episodes of a group have the same seed:
the row's column `seed`, or a hash of its prompt. A column `reset` (an object) is passed to `reset` too.
"""

import json
import random
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ascent.environments.agents.agent import Assignment
from ascent.environments.agents.agent_pool import format_outcome
from ascent.processes.reward_calls import RewardCallError
from ascent.tasks.environment import Environment
from ascent.tasks.user_files import canonical_prompt

MAX_ACTIONS = 64
"""Limit of the actions of an episode, if neither the server nor the limits of the run end it before."""
MAX_ANSWER_BYTES = 1 << 24
"""Limit of an answer of a server, in bytes."""
RETRY_SECONDS = 0.25
"""Time between two attempts to begin a session with a server at capacity."""
TEXT_FIELDS = ("text", "message", "prompt", "content", "result", "observation")
"""Fields of an observation whose text is shown without JSON, the first that is present."""


class OpenEnvAgent(Environment):
    """One episode; it is over when `begin` returns."""

    def __init__(self, url: str, action: Mapping[str, Any]):
        self.url, self.action = url.rstrip("/"), action

    def begin(self, problem: Any, rng: random.Random) -> str:
        assignment: Assignment = problem
        with _Session(self.url, time.monotonic() + assignment.seconds) as session:
            return format_outcome(self._play(session, assignment))

    def _play(self, session: "_Session", assignment: Assignment) -> dict[str, Any]:
        columns = assignment.problem.columns
        seed = columns.get("seed", zlib.crc32(canonical_prompt(assignment.problem.prompt).encode()) >> 1)
        state = session.ask("reset", {"seed": seed, **(columns.get("reset") or {})})
        messages: list[dict[str, Any]] = [dict(message) for message in assignment.messages]
        hint = describe_action(self.action)
        messages[-1]["content"] = "\n".join(filter(None, (messages[-1]["content"], show(state), hint)))
        total, actions, refused = float(state.get("reward") or 0.0), 0, 0
        for _ in range(MAX_ACTIONS):
            if state.get("done"):
                break
            answer = chat(assignment, messages)
            if answer is None:  # a limit of the run is reached
                break
            messages.append(answer)
            try:
                state = session.ask("step", read_action(answer.get("content") or "", self.action))
                total, actions = total + float(state.get("reward") or 0.0), actions + 1
                observed = show(state)
            except ActionParseError as error:
                refused, observed = refused + 1, f"error: {error}"
            messages.append({"role": "user", "content": observed})
        return {"reward": total, "metrics": {"actions": actions, "refused_actions": refused}}


def make_openenv(url: str) -> OpenEnvAgent:
    return OpenEnvAgent(url, _schemas[url])


def prepare_openenv(url: str) -> None:
    """Request the schema of an action, once for all episodes."""
    import websockets.sync.client  # noqa: F401 (for the processes that are forked)

    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=30) as answer:
        _schemas[url] = json.loads(answer.read(MAX_ANSWER_BYTES))["action"]


make_openenv.prepare = prepare_openenv  # type: ignore[attr-defined]
_schemas: dict[str, Mapping[str, Any]] = {}


# ---- observations and actions -------------------------------------------------------------------------


class ActionParseError(Exception):
    """An answer is not a valid action."""


def show(state: Mapping[str, Any]) -> str:
    """Return an observation as the policy reads it: its text, or JSON."""
    observation = {k: v for k, v in (state.get("observation") or {}).items() if k != "metadata" and v not in (None, "")}
    if len(observation) == 1 and isinstance(words := next(iter(observation.values())), str):
        return words
    texts = [name for name in TEXT_FIELDS if isinstance(observation.get(name), str)]
    rest = {name: value for name, value in observation.items() if name not in texts[:1]}
    words = [observation[name] for name in texts[:1]] + ([json.dumps(rest, ensure_ascii=False)] if rest else [])
    return "\n".join(words)


def fields_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an action that the policy sets: those without a default, or else all but metadata."""
    properties = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    required = {name: properties[name] for name in schema.get("required", ()) if name in properties}
    return required or properties


def describe_action(schema: Mapping[str, Any]) -> str:
    """Return the instruction for the format of an action; empty if the whole answer is the action."""
    fields = fields_of(schema)
    if len(fields) <= 1:
        return ""
    listed = ", ".join(f'"{name}" ({field.get("type", "any")})' for name, field in fields.items())
    return f"Answer with one JSON object: {listed}."


def read_action(words: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Parse an answer as an action."""
    fields = fields_of(schema)
    if len(fields) != 1:
        start, end = words.find("{"), words.rfind("}")
        try:
            action = json.loads(words[start : end + 1])
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise ActionParseError(f"that is not a JSON object. {describe_action(schema)}")
        return action
    ((name, field),) = fields.items()
    kind = field.get("type", "string")
    if kind not in ("integer", "number"):
        return {name: words.strip() if kind == "string" else _parsed(words)}
    numbers = re.findall(r"-?\d+" if kind == "integer" else r"-?\d+(?:\.\d+)?", words)
    if not numbers:
        raise ActionParseError("there is no number in that answer")
    return {name: int(numbers[-1][:18]) if kind == "integer" else float(numbers[-1])}


def _parsed(words: str) -> Any:
    try:
        return json.loads(words)
    except (ValueError, RecursionError):
        raise ActionParseError("that is not JSON") from None


# ---- the two servers ----------------------------------------------------------------------------------


class _Session:
    """A session with an OpenEnv server over a web socket."""

    def __init__(self, url: str, deadline: float):
        self.address, self.deadline = f"ws{url.removeprefix('http')}/ws", deadline
        self.socket: Any = None

    def __enter__(self) -> "_Session":
        self._connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _connect(self) -> None:
        import websockets.sync.client

        self.socket = websockets.sync.client.connect(self.address, max_size=MAX_ANSWER_BYTES, compression=None)

    def ask(self, verb: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state after a reset or a step."""
        from websockets.exceptions import ConnectionClosed

        while True:
            try:
                with suppress(ConnectionClosed):  # it may have said why before it closed
                    self.socket.send(json.dumps({"type": verb, "data": data}))
                said = json.loads(self.socket.recv(max(0.0, self.deadline - time.monotonic())))
            except ConnectionClosed as error:
                said = {"type": "error", "data": {"message": f"it closed the connection ({error!s:.100})"}}
            kind, about = said.get("type"), said.get("data") or {}
            if kind == "observation":
                return about
            code, message = about.get("code"), str(about.get("message") or about)[:200]
            if code == "CAPACITY_REACHED" and verb == "reset" and time.monotonic() + RETRY_SECONDS < self.deadline:
                time.sleep(RETRY_SECONDS)
                self._connect()
                continue
            if code == "VALIDATION_ERROR" and verb == "step":
                raise ActionParseError(message)
            raise RewardCallError(f"the OpenEnv server answered {verb} with an error: {message}")


def chat(assignment: Assignment, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the policy's answer to these messages; None: the context is full."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {assignment.key}"}
    request = urllib.request.Request(f"{assignment.url}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=assignment.seconds) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        if error.code == 400 and "context_length_exceeded" in said:
            return None
        raise RewardCallError(f"the endpoint answered with HTTP {error.code}: {said:.200}") from None
    return choice["message"]
