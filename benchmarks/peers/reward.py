"""The reward of the step benchmarks: cheap, and different from response to response. Every side imports it."""


def reward(response: str) -> float:
    return sum(map(ord, response)) % 100 / 100
