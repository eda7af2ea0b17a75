"""The live figures. Each is a folder: `figure.py` with its `FIGURE`, `figure.js` that draws it, perhaps `figure.css`.

A folder that is put here is found by itself: it is listed, served and shown. One that needs more than a state has
`routes.py`, as training has.
"""

from __future__ import annotations

from functools import lru_cache

from ascent.lab.figure import Figure
from ascent.lab.folders import modules_in


@lru_cache(maxsize=1)
def all_figures() -> dict[str, Figure]:
    """The figures by name, in their order."""
    found = [module.FIGURE for module in modules_in(__name__, "figure")]
    return {figure.name: figure for figure in sorted(found, key=lambda figure: (figure.place, figure.name))}
