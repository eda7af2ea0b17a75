"""`ascent env`: versions and hardware, for a report of a bug."""

import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import ascent.cli
from ascent.cli.flags import Command

PACKAGES = (
    *("torch", "numpy", "transformers", "peft", "datasets", "math-verify", "reasoning-gym", "safetensors", "pyarrow"),
    *("cloudpickle", "starlette", "ipykernel", "trl", "vllm", "sglang"),
)
"""The packages whose versions matter in a report."""
VARIABLES = ("CUDA_", "HF_", "OMP_", "PYTORCH_", "TORCH")
"""How the names of environment variables begin that may matter."""


@dataclass
class EnvCommand(Command):
    """Versions and hardware, to copy into a report of a bug.

    It names no user, no path of a file of yours, and no value of an environment
    variable.
    """

    json: bool = False
    """As JSON, for scripts."""

    def execute(self) -> None:
        found = environment()
        if self.json:
            print(json.dumps(found, indent=2))
            return
        for name, value in found.items():
            print(f"{name:<16}{value if not isinstance(value, list) else '; '.join(value) or 'none'}")


def environment() -> dict[str, Any]:
    """What a report needs of this machine."""
    return {
        "ascent": ascent.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processors": os.cpu_count(),
        "memory": _memory(),
        "threads": torch.get_num_threads(),
        "gpus": _gpus(),
        "cuda": torch.version.cuda or "none",
        **{name: _version(name) for name in PACKAGES},
        "variables": sorted(name for name in os.environ if name.startswith(VARIABLES)),
    }


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "not installed"


def _memory() -> str:
    with suppress(ValueError, OSError, AttributeError):
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    return "unknown"


def _gpus() -> list[str]:
    if torch.backends.mps.is_available():
        return ["mps"]
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in devices]


COMMANDS = {"learn": (EnvCommand,)}
