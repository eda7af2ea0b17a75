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

from ascent.tasks.base import error_line, refuse
from ascent.tasks.files import absolute_path
from ascent.tasks.text.problems import Problem
from ascent.tasks.text.rows import ColumnsTask, import_optional


@dataclass(frozen=True)
class Dataset(ColumnsTask):
    """dataset:NAME: any Hugging Face data set with a column of prompts and one of answers."""

    source: str = ""
    """Name on the hub, or a folder. Short form: dataset:NAME."""
    subset: str | None = None
    """Its configuration, if it has several."""
    split: str = "train"
    """The split to train on."""
    test_split: str | None = None
    """The split to test on. None: one prompt in ten is held out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source and Path(self.source).expanduser().is_dir():
            object.__setattr__(self, "source", absolute_path(self.source))

    def read(self) -> tuple[list[Problem], list[Problem] | None]:
        if not self.source:
            refuse("dataset needs a name: ascent train dataset:NAME, a name on the hub or a folder")
        return self._split(self.split), self._split(self.test_split) if self.test_split else None

    def _split(self, split: str) -> list[Problem]:
        rows = load_dataset(
            self.source, self.subset, split, hint="a folder works as well: dataset:FOLDER, or jsonl:FILE"
        )
        return [self.problem(row, f"dataset:{self.source}, {split}, row {i}") for i, row in enumerate(rows)]


def load_dataset(name: str, subset: str | None, split: str, hint: str) -> Iterable[dict[str, Any]]:
    """The rows of one split; refused with the reason if it cannot be loaded."""
    if importlib.util.find_spec("datasets") is None:
        refuse(f"dataset:{name} needs datasets: pip install 'ascent-rl[lm]'")
    local = Path(name).is_dir()
    if not local:
        _give_up_early()
    datasets = import_optional("datasets", f"dataset:{name}", "lm")
    try:
        if local and (Path(name, "state.json").exists() or Path(name, "dataset_dict.json").exists()):
            splits = datasets.load_from_disk(name)
        else:
            splits = datasets.load_dataset(name, subset)
    except Exception as error:
        refuse(f"dataset:{name} cannot be loaded: {error_line(error)}. Without a hub {hint}")
    if not hasattr(splits, "keys"):
        return splits  # one table, saved without splits
    if split not in splits:
        refuse(f"dataset:{name} has no split {split}; there are: {', '.join(splits)}.", split, list(splits))
    return splits[split]


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
