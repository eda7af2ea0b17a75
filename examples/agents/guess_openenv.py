"""The same game as a server of OpenEnv 0.10. It needs the package openenv, which may be in another virtual environment.

python examples/agents/guess_openenv.py 8765
ascent train jsonl:examples/agents/numbers.jsonl --model MODEL --agent openenv:http://127.0.0.1:8765
"""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.now, self.secret = State(), 0

    def reset(self, seed=None, episode_id=None, **_):
        self.secret, self.now = 1 + (seed or 0) % 9, State(episode_id=episode_id, step_count=0)
        return Hint(text="You have three tries.")

    def step(self, action, timeout_s=None, **_):
        tries, self.now.step_count = self.now.step_count, self.now.step_count + 1
        if action.number == self.secret:
            return Hint(text="right", done=True, reward=1.0 - 0.3 * tries)
        return Hint(text="higher" if action.number < self.secret else "lower", done=tries == 2, reward=0.0)

    @property
    def state(self):
        return self.now


def main(port):
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main(int(sys.argv[1]))
