"""What was read from files, kept while it is small and the files are as they were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import Any


class Kept:
    """The answers to the last questions about files. A file that changed (size, time) is read again.

    `most` bounds the sum of the weights; whatever was used longest ago goes first.
    """

    def __init__(self, most: int):
        self.most, self.held = most, 0
        self.found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.lock = Lock()

    def __call__(
        self, path: Path, make: Callable[[], Any], *which: Hashable, weight: Callable[[Any], int] = lambda _: 1
    ) -> Any:
        about = path.stat()
        key = (str(path), about.st_size, about.st_mtime_ns, *which)
        with self.lock:
            if key in self.found:
                self.found.move_to_end(key)
                return self.found[key][0]
        made = make()
        heavy = weight(made)
        if heavy > self.most:
            return made
        with self.lock:
            if key not in self.found:
                self.found[key] = (made, heavy)
                self.held += heavy
            while self.held > self.most:
                self.held -= self.found.popitem(last=False)[1][1]
        return made
