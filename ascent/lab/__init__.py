"""The lab: a local web page with lessons and live figures, computed by the library itself (`ascent lab`)."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType


def modules_in(package: str, name: str) -> list[ModuleType]:
    """The module of that name in every folder of a package that has one."""
    folders = sorted(info.name for info in iter_modules(import_module(package).__path__) if info.ispkg)
    names = [f"{package}.{folder}.{name}" for folder in folders]
    return [import_module(name) for name in names if find_spec(name) is not None]


def places_of(kind: str) -> list[Path]:
    """The places where folders of a kind (figures or pages) lie: the package's path."""
    return [Path(path) for path in import_module(f"ascent.lab.{kind}").__path__]


def assets_of(kind: str, name: str) -> list[str]:
    """The addresses of a folder's own style and script, where it has them: figure.css and figure.js."""
    files = [f"{name}/{kind.removesuffix('s')}{ending}" for ending in (".css", ".js")]
    there = [file for file in files if any((place / file).is_file() for place in places_of(kind))]
    return [f"/static/{kind}/{file}" for file in there]
