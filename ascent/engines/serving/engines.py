"""Every serving engine: a new one is one file and one line here. `CausalLM.engine` names them."""

from ascent.engines.serving.dialect import Dialect
from ascent.engines.serving.sglang import SGLang
from ascent.engines.serving.vllm import VLLM

ENGINES: tuple[Dialect, ...] = (VLLM(), SGLang())


def dialect_of(name: str) -> Dialect:
    """The dialect of `--engine NAME`."""
    return next(dialect for dialect in ENGINES if dialect.name == name)
