"""Rollouts from a serving engine (vLLM or SGLang) in a separate process, over HTTP. Neither engine is imported here."""
