"""Any Hugging Face data set, by its name on the hub or from a folder."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ascent.tasks.text.base import Problem, refuse
from ascent.tasks.text.rows import Columns, need


@dataclass(frozen=True)
class Dataset(Columns):
    """dataset:NAME: any Hugging Face data set with a column of prompts and one of answers."""

    source: str = ""
    """Name on the hub, or a folder. Short form: dataset:NAME."""
    subset: str | None = None
    """Its configuration, where it has several."""
    split: str = "train"
    """What is trained on."""
    test_split: str | None = None
    """What is tested with. None: one prompt in ten is held out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source and Path(self.source).expanduser().is_dir():
            object.__setattr__(self, "source", str(Path(self.source).expanduser().resolve()))

    def read(self) -> tuple[list[Problem], list[Problem] | None]:
        if not self.source:
            refuse("dataset needs a name: ascent train dataset:NAME, a name on the hub or a folder")
        return self._split(self.split), self._split(self.test_split) if self.test_split else None

    def _split(self, split: str) -> list[Problem]:
        rows = load(self.source, self.subset, split, hint="a folder works as well: dataset:FOLDER, or jsonl:FILE")
        return [self.problem(row, f"dataset:{self.source}, {split}, row {i}") for i, row in enumerate(rows)]


def load(name: str, subset: str | None, split: str, hint: str) -> Iterable[dict[str, Any]]:
    """The rows of one split; whatever hinders that is refused with its reason."""
    if importlib.util.find_spec("datasets") is None:
        refuse(f"dataset:{name} needs datasets: pip install 'ascent-rl[lm]'")
    local = Path(name).is_dir()
    if not local:
        _give_up_early()
    datasets = need("datasets", f"dataset:{name}", "lm")
    try:
        if local and (Path(name, "state.json").exists() or Path(name, "dataset_dict.json").exists()):
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, subset)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        refuse(f"dataset:{name} cannot be loaded: {first}. Without a hub {hint}")
    if not hasattr(found, "keys"):
        return found  # one table, saved without splits
    if split not in found:
        refuse(f"dataset:{name} has no split {split}; there are: {', '.join(found)}.", split, list(found))
    return found[split]


def _give_up_early() -> None:
    """With no hub in reach, use what is cached at once, instead of retrying for half a minute."""
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxied or host.hostname is None:
        return
    try:
        socket.getaddrinfo(host.hostname, host.port or 443)
    except OSError:
        from huggingface_hub import constants

        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
