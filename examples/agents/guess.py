"""An agent: it lets the policy guess a number in at most three tries, and tells it whether to go higher or lower.

    ascent train jsonl:examples/agents/numbers.jsonl --model MODEL --agent python:examples/agents/guess.py:guess

Nothing in it is specific to Ascent: any client of an OpenAI-compatible endpoint works.
"""

import re

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
"""Created once, because that is slow; each episode uses a copy with its own address and key."""


async def guess(base_url, key, problem):
    client = CLIENT.with_options(base_url=base_url, api_key=key, max_retries=0)
    messages = [{"role": "user", "content": problem.prompt}]
    for turn in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        words = answer.choices[0].message.content or ""
        numbers = re.findall(r"\d+", words)
        number = int(numbers[-1][:9]) if numbers else 0
        if number == int(problem.answer):
            return {"reward": 1.0 - 0.3 * turn, "metrics": {"tries": turn + 1}}
        hint = "higher" if number < int(problem.answer) else "lower"
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": hint}]
    return {"reward": 0.0, "metrics": {"tries": 3}}
