"""The supported serving engines. To add one, write its `EngineAdapter` and append it to `ENGINES`."""

from ascent.inference.remote.engine_adapter import EngineAdapter
from ascent.inference.remote.sglang import SGLang
from ascent.inference.remote.vllm import VLLM

ENGINES: tuple[EngineAdapter, ...] = (VLLM(), SGLang())


def get_adapter(name: str) -> EngineAdapter:
    """Return the adapter of `--engine NAME`."""
    return next(adapter for adapter in ENGINES if adapter.name == name)
