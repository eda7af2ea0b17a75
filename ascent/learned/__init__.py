"""Rewards that are learned, and the data that they are learned from.

rewards     a run of `ascent reward-model` as a reward
process     a run of `ascent process-reward` as a reward of every step
assess      what a reward model is worth on its held-out pairs
candidates  responses to compare: from a file, or drawn from a policy
pairing     pairs of a policy's responses, labelled by the true reward (`ascent pairs`)
labelling   pairs labelled by a judge (`ascent label`)
stepping    what a response is worth after each of its steps (`ascent label-steps`)
rounds      policy, reward model, policy, …: iterative GRPO (`ascent rounds`), as plan.py says
"""
