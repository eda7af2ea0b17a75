"""`ascent env`: versions and hardware, for bug reports."""

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
"""Packages whose versions a bug report needs."""
VARIABLE_PREFIXES = ("CUDA_", "HF_", "OMP_", "PYTORCH_", "TORCH")
"""Prefixes of the environment variables whose names a bug report lists."""


@dataclass
class EnvCommand(Command):
    """Print versions and hardware, for bug reports.

    The output has no user name, no paths, and no values of environment variables.
    """

    json: bool = False
    """As JSON, for scripts."""

    def execute(self) -> None:
        report = environment()
        if self.json:
            print(json.dumps(report, indent=2))
            return
        for name, value in report.items():
            print(f"{name:<16}{value if not isinstance(value, list) else '; '.join(value) or 'none'}")


def environment() -> dict[str, Any]:
    """Return versions of packages, hardware, and names of environment variables."""
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
        "variables": sorted(name for name in os.environ if name.startswith(VARIABLE_PREFIXES)),
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
