"""Every serving engine: a new one is one file and one line here. `CausalLM.engine` names them."""

from ascent.inference.remote.engine_adapter import EngineAdapter
from ascent.inference.remote.sglang import SGLang
from ascent.inference.remote.vllm import VLLM

ENGINES: tuple[EngineAdapter, ...] = (VLLM(), SGLang())


def get_adapter(name: str) -> EngineAdapter:
    """The dialect of `--engine NAME`."""
    return next(dialect for dialect in ENGINES if dialect.name == name)
