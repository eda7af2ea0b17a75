"""Names of metrics that several packages read. Importing it does not import torch."""

MISMATCH = "sampling/sampling_logp_difference/mean"
"""Mean difference between the log-probs of trainer and sampler, under TRL's name."""
LAG = "sampling/lag"
"""Mean number of updates since the trained tokens were sampled."""
