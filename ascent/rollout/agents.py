"""Agents in training: each response is a session of the run's own endpoint, in which an agent talks to the policy.

    engine ── prompts.start_episodes ──> AgentSessions: a session and a key per response
       │                                   │ assignments: url, key, problem, seed, deadline
       │ decodes requests                  v
       └── RequestQueue <── Endpoint <── agents, in their own processes and with their own clients

An agent that crashes, hangs or rewrites its history makes its episode invalid, with a reason; it never gets a reward of
0. An episode that reached a limit of tokens or turns was truncated by the policy's own text, so it is valid.
"""

import asyncio
import copy
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
import uvicorn
from torch import Tensor

from ascent.core.types import Prompts, Rollouts, Scores, per_token_reward
from ascent.environments.agents import Agent, AgentResult, Assignment, make_agent
from ascent.environments.chat_session import ChatRenderer, Session
from ascent.inference.request_queue import RecordedConversation, RequestQueue
from ascent.processes.supervisor import START_SECONDS, Limits
from ascent.rollout.conversation_task import ConversationTask, count_turns, measure_turns
from ascent.rollout.conversations import FAILED_PREFIX
from ascent.server.connections import bind, configure
from ascent.server.endpoint import Endpoint, EndpointConnection
from ascent.server.open_sessions import OpenSession, SessionSettings
from ascent.tasks.text.text_task import Problem

GRACE_SECONDS = 10.0
"""Time after the deadline in which agents report that they missed it."""


class ServerThread:
    """A server of an application in its own thread."""

    def __init__(self, app: Any, host: str = "127.0.0.1", port: int = 0, certificate: str = "", private_key: str = ""):
        self.socket = bind(host, port)
        self.port = self.socket.getsockname()[1]
        options = {"ssl_certfile": certificate or None, "ssl_keyfile": private_key or None, "timeout_keep_alive": 60}
        self.server = uvicorn.Server(configure(app, EndpointConnection, **options))
        self.thread = threading.Thread(target=self._run, name="ascent endpoint", daemon=True)

    def start(self) -> "ServerThread":
        """Start to respond. Earlier connections have waited."""
        self.thread.start()
        return self

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.socket]))

    def close(self) -> None:
        self.server.should_exit = True
        if self.thread.ident is not None:
            self.thread.join(10)
        self.socket.close()


class EpisodeNote(str):
    """A note on an episode, with the result of its agent: rollouts carry notes, and the task scores the result."""

    result: AgentResult

    def __new__(cls, text: str, result: AgentResult) -> "EpisodeNote":
        note = super().__new__(cls, text)
        note.result = result
        return note

    def __getnewargs__(self) -> tuple[str, AgentResult]:  # type: ignore[override]
        return str(self), self.result


@dataclass
class AgentSessionFactory:
    """Starts the agents of a task's prompts, and holds what their sessions share."""

    agent: Agent
    problem: Callable[[Any, int], Problem]
    messages: Callable[[Problem], Any]
    renderer: ChatRenderer
    settings: SessionSettings
    vocab_size: int
    seconds: float
    """The deadline of an episode."""
    max_running: int
    """Episodes at once. The deadline of an episode starts when it runs."""
    endpoint: Endpoint | None = None
    server: ServerThread | None = None

    def __call__(
        self, prompts: Prompts, samples: int, seeds: list[int], problems: Sequence[Problem] | None = None
    ) -> "AgentSessions":
        problems = problems or [self.problem(prompts, index) for index in range(len(prompts))]
        return AgentSessions(self, problems, samples, seeds)

    def listen(self, queue: RequestQueue) -> tuple[Endpoint, str]:
        """Return the endpoint, which submits its turns to this queue, and its URL."""
        if self.endpoint is None or self.server is None:
            self.endpoint = Endpoint(queue, self.renderer, self.settings, self.vocab_size)
            self.server = ServerThread(self.endpoint).start()
        self.endpoint.turns.queue = queue
        return self.endpoint, f"http://127.0.0.1:{self.server.port}/v1"

    def close(self) -> None:
        self.agent.close()
        if self.server is not None:
            self.server.close()
            self.server = self.endpoint = None


class AgentSessions:
    """The sessions of one generation call, one per response."""

    def __init__(self, factory: AgentSessionFactory, problems: Sequence[Problem], samples: int, seeds: list[int]):
        self.factory, self.problems, self.samples, self.seeds = factory, problems, samples, seeds
        self.queue, self.max_prompt_tokens = RequestQueue(len(seeds)), factory.settings.max_prompt_tokens
        self.keys: list[str] = []
        self.open_sessions: list[OpenSession] = []
        self.results: dict[int, AgentResult] = {}
        self._end_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._timer: threading.Timer | None = None

    def begin(
        self, limits: list[int], max_response_tokens: int, temperature: float, sampling_params: Any, greedy: bool
    ) -> None:
        """Open a session for each response and start the agents. `limits`: sampled tokens per response."""
        endpoint, url = self.factory.listen(self.queue)
        shared = replace(
            self.factory.settings,
            max_response_tokens=max_response_tokens,
            temperature=temperature,
            sampling_params=sampling_params,
            greedy=greedy,
        )
        assignments = []
        for i, (seed, limit) in enumerate(zip(self.seeds, limits, strict=True)):
            problem = self.problems[i // self.samples]
            key, open_session = endpoint.open(Session(seed), replace(shared, max_sampled_tokens=limit))
            self.keys.append(key)
            self.open_sessions.append(open_session)
            messages = self.factory.messages(problem)
            assignments.append(Assignment(url, key, problem, messages, seed, self.factory.seconds))
        self._thread = threading.Thread(target=self._run, args=(assignments,), name="ascent agents", daemon=True)
        rounds = -(-len(self.keys) // self.factory.max_running)
        seconds = min(START_SECONDS + rounds * self.factory.seconds + GRACE_SECONDS, threading.TIMEOUT_MAX)
        self._timer = threading.Timer(seconds, self._end_all, ["it did not end by its deadline"])
        self._timer.daemon = True
        self._thread.start()
        self._timer.start()

    def _run(self, assignments: list[Assignment]) -> None:
        reason = "the agents ended without a result"
        try:
            for index, result in self.factory.agent.run(assignments):
                self._end(index, result)
                if len(self.results) == len(self.keys):
                    break
        except Exception as error:
            reason = f"the agents failed: {type(error).__name__}: {error}"
        self._end_all(reason)

    def _end(self, index: int, result: AgentResult) -> None:
        """Record the result of an episode and close its session."""
        with self._end_lock:
            if index in self.results:
                return
            self.results[index] = result
            if self.factory.endpoint is not None:
                self.factory.endpoint.close(self.keys[index], "its episode is over")

    def _end_all(self, reason: str) -> None:
        for index in range(len(self.keys)):
            self._end(index, AgentResult(error=reason))
        self.queue.close()

    def records(self) -> list[RecordedConversation]:
        return [self._record(i, open_session) for i, open_session in enumerate(self.open_sessions)]

    def _record(self, index: int, open_session: OpenSession) -> RecordedConversation:
        session, result = open_session.session, self.results[index]
        error, notes = result.error, []
        if result.reward is not None and not math.isfinite(result.reward):
            error = f"its reward is {result.reward}"
        if limit := open_session.limit_reached:
            notes.append(f"cut off: {limit}; then {error}" if error else f"cut off: {limit}")
            if error:
                error, result = "", AgentResult(metrics=result.metrics)
        if session.mismatch:
            error = f"its history was rewritten: {session.mismatch}"
        if not session.num_turns:
            error = error or "its agent requested nothing from the policy"
        if session.ignored_settings:
            settings = ", ".join(f"{name} {value}" for name, value in session.ignored_settings.items())
            notes.append(f"requested and not used: {settings}")
        notes += [f"{FAILED_PREFIX}{error}"] if error else []
        note = EpisodeNote(f"turn {max(session.num_turns, 1)}: {'; '.join(notes)}" if notes else "", result)
        truncated = bool(open_session.limit_reached) or not session.ended
        tokens = (session.response, session.sampled, session.logp, session.kept_mass, session.turn, session.waited)
        return RecordedConversation(session.prompt, *tokens, truncated, not error, note)

    def close(self) -> None:
        """End the call, even if agents are still running."""
        if self._timer is not None:
            self._timer.cancel()
        self._end_all("the call was ended")
        if self._thread is not None:
            self._thread.join(GRACE_SECONDS)


class AgentTask(ConversationTask):
    """A bound task whose responses are sessions of agents."""

    def score(self, rollouts: Rollouts) -> Scores:
        """Return the rewards of agents; where an agent gives none, the task's own score of the last turn."""
        shape = rollouts.response.shape[:2]
        notes = [] if rollouts.notes is None else list(rollouts.notes.flat)
        results = [note.result if isinstance(note, EpisodeNote) else AgentResult() for note in notes]
        results = results or [AgentResult()] * (shape[0] * shape[1])
        has_reward = torch.tensor([result.reward is not None for result in results]).view(shape)
        reward = torch.tensor([float(result.reward or 0.0) for result in results]).view(*shape, 1)
        correct = reward.squeeze(-1) > 1 - 1e-5
        lenient = correct.float()
        scores = Scores(reward, torch.ones_like(has_reward), correct, measures={"lenient": lenient})
        if not bool(has_reward.all()):
            scores = self._fill_in(self.task.score(rollouts), rollouts, has_reward, reward, correct)
        measures = scores.measures | self._measure(rollouts, results)
        return replace(scores, measures=measures)

    def _fill_in(
        self, scores: Scores, rollouts: Rollouts, has_reward: Tensor, reward: Tensor, correct: Tensor
    ) -> Scores:
        """Replace the task's scores by the agents' rewards where there are any."""
        errors = tuple(compress(scores.errors, (~has_reward[~scores.valid]).tolist()))
        outcome = reward if scores.reward.shape[-1] == 1 else per_token_reward(rollouts, reward)
        lenient = torch.where(has_reward, correct.float(), scores.measures["lenient"])
        return replace(
            scores,
            reward=torch.where(has_reward.unsqueeze(-1), outcome, scores.reward),
            valid=scores.valid | has_reward,
            correct=None if scores.correct is None else torch.where(has_reward, correct, scores.correct),
            errors=errors,
            measures=scores.measures | {"lenient": lenient},
        )

    def _measure(self, rollouts: Rollouts, results: list[AgentResult]) -> dict[str, Tensor]:
        if rollouts.turn is None or rollouts.environment_seconds is None or rollouts.notes is None:
            return {}
        names = dict.fromkeys(name for result in results for name in result.metrics)
        metrics = {
            f"agent/{name}": torch.tensor([float(r.metrics.get(name, math.nan)) for r in results]).view(
                rollouts.response.shape[:2]
            )
            for name in names
        }
        return {"turns": count_turns(rollouts).float(), **measure_turns(rollouts), **metrics}


def bind_agents(task: Any, model: Any, bound: Any) -> Any:
    """Return a text task whose responses are sessions of agents. `bound`: the task bound to a language model."""
    renderer = ChatRenderer(
        copy.deepcopy(model.tokenizer), model.stop_token_ids
    )  # the decode thread uses model.tokenizer

    def find_problem(prompts: Any, index: int) -> Problem:
        return bound.problem(int(prompts.problem[index]))

    settings = SessionSettings(
        context_length=task.max_prompt + task.max_response_tokens,
        max_prompt_tokens=task.max_prompt,
        max_response_tokens=task.max_response_tokens,
        max_turn_tokens=task.turn_tokens,
        max_sampled_tokens=task.max_tokens,
        max_turns=task.max_turns,
        stop=task.stop,
        fixed=True,
    )
    limits = Limits(task.agent_seconds, task.reward_memory, task.reward_env)
    agent = make_agent(task.agent, limits, task.turn_workers)
    sessions = AgentSessionFactory(
        agent,
        find_problem,
        bound.messages,
        renderer,
        settings,
        model.vocab_size,
        seconds=task.agent_seconds,
        max_running=task.turn_workers,
    )
    return AgentTask(bound, sessions, is_text=True)
