"""The same agent as a program, in any language: this one needs nothing but Python.

ascent train jsonl:examples/agents/numbers.jsonl --model MODEL --agent command:"python examples/agents/guess_program.py"
"""

import json
import os
import re
import urllib.request

URL, KEY = os.environ["ASCENT_BASE_URL"], os.environ["ASCENT_API_KEY"]


def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def main():
    problem = json.loads(os.environ["ASCENT_PROBLEM"])
    secret, messages = int(problem["answer"]), [{"role": "user", "content": problem["prompt"]}]
    for turn in range(3):
        words = ask(messages)
        numbers = re.findall(r"\d+", words)
        number = int(numbers[-1][:9]) if numbers else 0
        if number == secret:
            return 1.0 - 0.3 * turn
        hint = "higher" if number < secret else "lower"
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": hint}]
    return 0.0


print(json.dumps({"reward": main()}))
