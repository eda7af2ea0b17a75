"""The lab (`ascent lab`): a local web application with lessons, live figures and a viewer of runs."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType


def modules_in(package: str, name: str) -> list[ModuleType]:
    """Import the module with this name from each folder of a package that has one."""
    folders = sorted(info.name for info in iter_modules(import_module(package).__path__) if info.ispkg)
    names = [f"{package}.{folder}.{name}" for folder in folders]
    return [import_module(name) for name in names if find_spec(name) is not None]


def folders_of(kind: str) -> list[Path]:
    """Return the folders that contain the figures or the pages."""
    return [Path(path) for path in import_module(f"ascent.lab.{kind}").__path__]


def assets_of(kind: str, name: str) -> list[str]:
    """Return the addresses of the style and the script of a figure or page, if it has them."""
    files = [f"{name}/{kind.removesuffix('s')}{ending}" for ending in (".css", ".js")]
    existing = [file for file in files if any((folder / file).is_file() for folder in folders_of(kind))]
    return [f"/static/{kind}/{file}" for file in existing]
