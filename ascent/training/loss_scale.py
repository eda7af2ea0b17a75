"""Dynamic loss scaling for float16: gradients of scale · loss, divided by the scale afterwards.

Without it small float16 gradients underflow to 0 and large ones overflow. As in torch's GradScaler, an overflow halves
the scale, and `GROWTH_INTERVAL` updates without one double it. Unlike there, an update that overflows is computed again
rather than skipped, and a gradient far below the known range raises the scale at once. Scales are powers of two, so
they cause no rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascent.core.errors import RunError

GROWTH_INTERVAL = 100
MAX_HEADROOM = 2.0**8
"""Ratio of the largest known finite gradient to the present one above which the scale is raised at once."""


class LossScale(NamedTuple):
    """A loss scale with its statistics."""

    scale: float = 2.0**16
    good: float = 0
    """Number of updates since the scale was last changed."""
    fits: float = 2.0**12
    """The largest scaled parameter gradient that is known to be finite. (Activation gradients may be larger.)"""

    def compute(self, gradients_of: Callable[[float], Any], parameters: list[Tensor]) -> tuple[Any, LossScale]:
        """Call `gradients_of` with scales until `.grad` is finite; unscale it. Return the result and the next scale."""
        scale, overflow, drop = self.scale, math.inf, 1
        while scale > 2.0**-40:
            result = gradients_of(scale)
            gradients = [p.grad for p in parameters if p.grad is not None]
            largest = float(torch.stack(torch._foreach_norm(gradients, torch.inf)).max()) if gradients else 0.0
            if not math.isfinite(largest):
                scale, overflow, drop = scale * 2.0**-drop, min(overflow, scale), 2 * drop
                continue
            if largest == 0.0 and (scale, *self[1:]) == LossScale():  # check at a larger scale that it is 0
                scale *= 2.0**32
                continue
            fitting = scale * 2.0 ** math.floor(math.log2(self.fits / largest)) if largest else scale
            fitting = min(fitting, overflow / 2)
            if fitting > scale * (MAX_HEADROOM if overflow == math.inf else 1.0):
                scale, drop = fitting, 1
                continue
            torch._foreach_mul_(gradients, 1 / scale)
            if not largest:
                return result, self
            good = self.good + 1 if scale == self.scale else 0
            fits = largest if overflow < math.inf else max(self.fits, largest)
            return result, LossScale(scale * 2, 0, fits) if good == GROWTH_INTERVAL else LossScale(scale, good, fits)
        raise RunError(
            "gradients in float16 are infinite or NaN however small the loss scale is: the loss or an activation is "
            "outside its range. Start a new run with --policy.dtype mixed or float32 (--init RUN keeps the parameters)"
        )
