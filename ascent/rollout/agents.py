"""Agents in training: each response is a session of the run's own endpoint, and an agent talks in it.

    sampler ── prompts.start_episodes ──> Episodes: a session and a key per response
       │                           │ assignments: url, key, problem, seed, deadline
       │ decodes what comes        v
       └── Desk <── Endpoint <── agents, in processes and with clients of their own

An agent that dies, hangs or rewrites its history makes its episode invalid, with the reason: never a reward of 0. One
that ran into a limit of tokens or turns was cut off by what the policy said, so that its episode counts.
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

from ascent.core.types import Prompts, Rollouts, Scores, per_token_reward
from ascent.environments.agents import Agent, AgentResult, Assignment, make_agent
from ascent.environments.chat_session import ChatRenderer, Session
from ascent.inference.request_queue import RecordedConversation, RequestQueue
from ascent.processes.supervisor import START_SECONDS, Limits
from ascent.rollout.conversations import FAILED_PREFIX, ConversationTask, count_truncated_turns
from ascent.server.connections import bind, configure
from ascent.server.endpoint import Endpoint, EndpointConnection
from ascent.server.open_sessions import OpenSession, SessionSettings
from ascent.tasks.text.text_task import Problem

GRACE = 10.0
"""Seconds beyond the deadline, and beyond the start of processes, in which agents have to say that they missed it."""


class ServerThread:
    """An application that listens in a thread of its own."""

    def __init__(self, app: Any, host: str = "127.0.0.1", port: int = 0, certificate: str = "", private_key: str = ""):
        self.listening = bind(host, port)
        self.port = self.listening.getsockname()[1]
        more = {"ssl_certfile": certificate or None, "ssl_keyfile": private_key or None, "timeout_keep_alive": 60}
        self.server = uvicorn.Server(configure(app, EndpointConnection, **more))
        self.thread = threading.Thread(target=self._run, name="ascent endpoint", daemon=True)

    def start(self) -> "ServerThread":
        """Who has come before waits, and is answered now."""
        self.thread.start()
        return self

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.listening]))

    def close(self) -> None:
        self.server.should_exit = True
        if self.thread.ident is not None:
            self.thread.join(10)
        self.listening.close()


class EpisodeNote(str):
    """A note on an episode as text, and the outcome that it is on: rollouts carry notes, and a task scores by them."""

    outcome: AgentResult

    def __new__(cls, text: str, outcome: AgentResult) -> "EpisodeNote":
        made = super().__new__(cls, text)
        made.outcome = outcome
        return made

    def __getnewargs__(self) -> tuple[str, AgentResult]:  # type: ignore[override]
        return str(self), self.outcome


@dataclass
class AgentSessionFactory:
    """Everything that the episodes of a task share. Called, it begins those of some prompts."""

    agent: Agent
    problem: Callable[[Any, int], Problem]
    messages: Callable[[Problem], Any]
    writer: ChatRenderer
    rules: SessionSettings
    vocab: int
    seconds: float
    """The deadline of an episode."""
    most: int
    """Episodes at once; the others wait for their turn, and so do their deadlines."""
    endpoint: Endpoint | None = None
    server: ServerThread | None = None

    def __call__(
        self, prompts: Prompts, samples: int, seeds: list[int], problems: Sequence[Problem] | None = None
    ) -> "AgentSessions":
        every = problems or [self.problem(prompts, place) for place in range(len(prompts))]
        return AgentSessions(self, every, samples, seeds)

    def listen(self, queue: RequestQueue) -> tuple[Endpoint, str]:
        """The endpoint, which hands its turns to this desk, and its address."""
        if self.endpoint is None or self.server is None:
            self.endpoint = Endpoint(queue, self.writer, self.rules, self.vocab)
            self.server = ServerThread(self.endpoint).start()
        self.endpoint.turns.queue = queue
        return self.endpoint, f"http://127.0.0.1:{self.server.port}/v1"

    def close(self) -> None:
        self.agent.close()
        if self.server is not None:
            self.server.close()
            self.server = self.endpoint = None


class AgentSessions:
    """The episodes of one call of a sampler."""

    def __init__(self, player: AgentSessionFactory, problems: Sequence[Problem], samples: int, seeds: list[int]):
        self.player, self.problems, self.samples, self.seeds = player, problems, samples, seeds
        self.queue, self.longest = RequestQueue(len(seeds)), player.rules.max_prompt_tokens
        self.keys: list[str] = []
        self.live: list[OpenSession] = []
        self.outcomes: dict[int, AgentResult] = {}
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._timer: threading.Timer | None = None

    def begin(self, limits: list[int], room: int, temperature: float, support: Any, greedy: bool) -> None:
        """Open a session for each response, and start their agents."""
        endpoint, url = self.player.listen(self.queue)
        assignments = []
        settings = {
            "max_response_tokens": room,
            "temperature": temperature,
            "sampling_params": support,
            "greedy": greedy,
        }
        for i, (seed, limit) in enumerate(zip(self.seeds, limits, strict=True)):
            problem, rules = (
                self.problems[i // self.samples],
                replace(self.player.rules, max_sampled_tokens=limit, **settings),
            )
            key, live = endpoint.open(Session(seed), rules)
            self.keys.append(key)
            self.live.append(live)
            chat = self.player.messages(problem)
            assignments.append(Assignment(url, key, problem, chat, seed, self.player.seconds))
        self._thread = threading.Thread(target=self._run, args=(assignments,), name="ascent agents", daemon=True)
        rounds = -(-len(self.keys) // self.player.most)
        at = min(START_SECONDS + rounds * self.player.seconds + GRACE, threading.TIMEOUT_MAX)
        self._timer = threading.Timer(at, self._end_all, ["it did not end by its deadline"])
        self._timer.daemon = True
        self._thread.start()
        self._timer.start()

    def _run(self, assignments: list[Assignment]) -> None:
        why = "the agents ended without a word about it"
        try:
            for place, outcome in self.player.agent.run(assignments):
                self._end(place, outcome)
                if len(self.outcomes) == len(self.keys):
                    break
        except Exception as error:
            why = f"the agents failed: {type(error).__name__}: {error}"
        self._end_all(why)

    def _end(self, place: int, outcome: AgentResult) -> None:
        """An episode is over: its key opens nothing any more."""
        with self._ending:
            if place in self.outcomes:
                return
            self.outcomes[place] = outcome
            if self.player.endpoint is not None:
                self.player.endpoint.close(self.keys[place], "its episode is over")

    def _end_all(self, why: str) -> None:
        for place in range(len(self.keys)):
            self._end(place, AgentResult(error=why))
        self.queue.close()

    def records(self) -> list[RecordedConversation]:
        return [self._record(i, live) for i, live in enumerate(self.live)]

    def _record(self, place: int, live: OpenSession) -> RecordedConversation:
        session, outcome = live.session, self.outcomes[place]
        error, notes = outcome.error, []
        if outcome.reward is not None and not math.isfinite(outcome.reward):
            error = f"its reward is {outcome.reward}"
        if live.limit_reached and error:
            notes.append(f"cut off: {live.limit_reached}; then {error}")
            error, outcome = "", AgentResult(metrics=outcome.metrics)
        elif live.limit_reached:
            notes.append(f"cut off: {live.limit_reached}")
        if session.mismatch:
            error = f"its history was rewritten: {session.mismatch}"
        if not session.num_turns:
            error = error or "its agent asked nothing of the policy"
        if session.ignored_settings:
            notes.append(
                "asked for and not used: " + ", ".join(f"{k} {v}" for k, v in session.ignored_settings.items())
            )
        notes += [f"{FAILED_PREFIX}{error}"] if error else []
        note = EpisodeNote(f"turn {max(session.num_turns, 1)}: {'; '.join(notes)}" if notes else "", outcome)
        truncated = bool(live.limit_reached) or not session.ended
        tokens = (session.response, session.sampled, session.logp, session.kept_mass, session.turn, session.waited)
        return RecordedConversation(session.prompt, *tokens, truncated, not error, note)

    def close(self) -> None:
        """The call is over, whether or not its agents are."""
        if self._timer is not None:
            self._timer.cancel()
        self._end_all("the call was ended")
        if self._thread is not None:
            self._thread.join(GRACE)


class AgentTask(ConversationTask):
    """A bound task whose responses are sessions of agents."""

    def score(self, rollouts: Rollouts) -> Scores:
        """What agents pay is the reward; where they leave it open, the task's own score of the last turn."""
        shape = rollouts.mask.shape[:2]
        notes = [] if rollouts.notes is None else list(rollouts.notes.flat)
        outcomes = [note.outcome if isinstance(note, EpisodeNote) else AgentResult() for note in notes]
        outcomes = outcomes or [AgentResult()] * (shape[0] * shape[1])
        paid = torch.tensor([outcome.reward is not None for outcome in outcomes]).view(shape)
        reward = torch.tensor([float(outcome.reward or 0.0) for outcome in outcomes]).view(*shape, 1)
        right = reward.squeeze(-1) > 1 - 1e-5
        lenient = right.float()
        scores = Scores(reward, torch.ones_like(paid), right, measures={"lenient": lenient})
        if not bool(paid.all()):
            own = self.task.score(rollouts)
            errors = tuple(compress(own.errors, (~paid[~own.valid]).tolist()))
            outcome = reward if own.reward.shape[-1] == 1 else per_token_reward(rollouts, reward)
            part = torch.where(paid.unsqueeze(-1), outcome, own.reward)
            correct = None if own.correct is None else torch.where(paid, right, own.correct)
            measures = own.measures | {"lenient": torch.where(paid, lenient, own.measures["lenient"])}
            scores = replace(own, reward=part, valid=own.valid | paid, correct=correct, errors=errors)
            scores = replace(scores, measures=measures)
        return replace(scores, measures=scores.measures | self._measures(rollouts, outcomes))

    def _measures(self, rollouts: Rollouts, outcomes: list[AgentResult]) -> dict[str, torch.Tensor]:
        shape = rollouts.mask.shape[:2]
        if rollouts.turn is None or rollouts.environment_seconds is None or rollouts.notes is None:
            return {}
        names = dict.fromkeys(name for outcome in outcomes for name in outcome.metrics)
        values = {
            f"agent/{name}": torch.tensor([float(o.metrics.get(name, math.nan)) for o in outcomes]).view(shape)
            for name in names
        }
        turns = torch.where(rollouts.mask, rollouts.turn + 1, 0).amax(-1).float()
        return {
            "turns": turns,
            "turns/cut": count_truncated_turns(rollouts),
            "time/environment": rollouts.environment_seconds.sum(-1),
            **values,
        }


def bind_agents(task: Any, model: Any, bound: Any) -> Any:
    """A text task, bound to a language model, whose responses are agents' sessions."""
    writer = ChatRenderer(copy.deepcopy(model.tokenizer), model.ends)  # another thread asks the model's own for words

    def problem(prompts: Any, place: int) -> Problem:
        return bound.problem(int(prompts.problem[place]))

    rules = SessionSettings(
        context_length=task.max_prompt + task.room,
        max_prompt_tokens=task.max_prompt,
        max_response_tokens=task.room,
        max_turn_tokens=task.turn_tokens,
        max_sampled_tokens=task.max_tokens,
        max_turns=task.max_turns,
        stop=task.stop,
        fixed=True,
    )
    limits = Limits(task.agent_seconds, task.reward_memory, task.reward_env)
    agent = make_agent(task.agent, limits, task.turn_workers)
    how = (task.agent_seconds, task.turn_workers)
    player = AgentSessionFactory(agent, problem, bound.messages, writer, rules, model.vocab, *how)
    return AgentTask(bound, player, words=True)
