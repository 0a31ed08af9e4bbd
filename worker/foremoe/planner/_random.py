"""Random numbers inside kernels whose state belongs to the caller, so that searches never disturb each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foremoe.planner._jit import kernel


@kernel
def random_below(random: npt.NDArray[np.uint64], bound: int) -> int:
    """A number in [0, bound), xorshift64*; the state is the caller's, so searches never disturb each other."""
    value = random[0]
    value ^= value >> np.uint64(12)
    value ^= value << np.uint64(25)
    value ^= value >> np.uint64(27)
    random[0] = value
    return int(int((value * np.uint64(2685821657736338717)) >> np.uint64(33)) % bound)
