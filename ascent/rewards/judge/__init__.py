"""A judge: a language model behind an OpenAI-compatible API that scores one response or compares two."""
