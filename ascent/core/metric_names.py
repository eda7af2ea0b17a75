"""Names of metrics that several rooms read. Importing it does not import torch."""

MISMATCH = "sampling/sampling_logp_difference/mean"
"""How far the trainer's log-probs are from the sampler's: TRL's name for it."""
LAG = "sampling/lag"
"""How many updates ago the trained tokens were drawn, on average."""
