"""Rollouts from a serving engine in its own process: vLLM or SGLang over HTTP. Nothing of them is imported here."""
