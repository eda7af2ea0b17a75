"""The same game as an environment of verifiers 0.4.

    make verifiers
    ascent train jsonl:examples/agents/numbers.jsonl --model MODEL --agent verifiers:examples/agents/guess_verifiers.py

A row's column `task` is the number of its task. The policy answers through a harness of Ascent's bridge, in
this process, so neither `uv` nor a container is needed.
"""

import re

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    answer: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=0.1)
    async def in_form(self, trace: vf.Trace) -> float:
        return float(all(re.fullmatch(r"\s*\d\s*", message.content or "") for message in trace.assistant_messages))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for secret in range(1, 10):
            prompt = f"Guess a number from 1 to 9. Game {secret}."
            yield GuessTask(GuessData(prompt=prompt, answer=secret), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        reward = 0.0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for turn in range(3):
                if segment.terminated:
                    break
                numbers = re.findall(r"\d+", segment.last_reply)
                number = int(numbers[-1][:9]) if numbers else 0
                if number == task.data.answer:
                    reward = 1.0 - 0.3 * turn
                    break
                if turn < 2:
                    segment = await talk.turn("higher" if number < task.data.answer else "lower")
        talk.trace.record_reward("won", reward)


__all__ = ["GuessEnv", "GuessTaskset"]
