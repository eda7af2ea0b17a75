"""Rollouts from a serving engine in its own process: vLLM over HTTP. Nothing of vLLM is imported here."""
