"""The live figures: folders with `figure.py` (its `FIGURE`) and `figure.js`, perhaps `figure.css` and `routes.py`."""

from functools import lru_cache

from ascent.lab import modules_in
from ascent.lab.figure_base import Figure


@lru_cache(maxsize=1)
def all_figures() -> dict[str, Figure]:
    """The figures by name, in their order."""
    figures: list[Figure] = [module.FIGURE for module in modules_in(__name__, "figure")]
    return {figure.name: figure for figure in sorted(figures, key=lambda figure: (figure.place, figure.name))}
