"""Base placement: the home rank of every expert, which owns its weights and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foremoe.errors import PlannerError


@dataclass(frozen=True, eq=False)
class BasePlacement:
    """Homes of all experts of one layer; every rank owns the same number of experts."""

    home_E: npt.NDArray[np.int64]
    """Home rank of every expert, int64 [E]; read-only."""
    ranks: int

    def __post_init__(self) -> None:
        homes = np.asarray(self.home_E)
        if homes.ndim != 1 or homes.size == 0 or not np.issubdtype(homes.dtype, np.integer):
            raise PlannerError(f"homes must be a non-empty integer vector, got {homes.dtype} {list(homes.shape)}")
        if self.ranks < 1:
            raise PlannerError(f"ranks must be at least 1, got {self.ranks}")
        if homes.size % self.ranks:
            raise PlannerError(f"{homes.size} experts do not divide over {self.ranks} ranks")
        outside = np.flatnonzero((homes < 0) | (homes >= self.ranks))
        if outside.size:
            expert = int(outside[0])
            raise PlannerError(f"home {homes[expert]} is no rank in [0, {self.ranks})", expert=expert)
        homes = homes.astype(np.int64)
        counts = np.bincount(homes, minlength=self.ranks)
        if (counts != homes.size // self.ranks).any():
            rank = int(counts.argmax())
            raise PlannerError(
                f"{counts[rank]} experts have their home here, the home slots are {homes.size // self.ranks}", rank=rank
            )
        homes.setflags(write=False)
        object.__setattr__(self, "home_E", homes)

    @classmethod
    def contiguous(cls, *, experts: int, ranks: int) -> BasePlacement:
        """Expert e lives on rank e // (experts / ranks), as expert-parallel frameworks do by default."""
        if experts < 1 or ranks < 1 or experts % ranks:
            raise PlannerError(f"{experts} experts do not divide over {ranks} ranks")
        return cls(home_E=np.repeat(np.arange(ranks), experts // ranks), ranks=ranks)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return int(self.home_E.size)

    def moved_from(self, other: BasePlacement) -> npt.NDArray[np.int64]:
        """Experts whose home differs from `other`, ascending: int64 [n]."""
        return np.flatnonzero(self.home_E != other.home_E)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BasePlacement):
            return NotImplemented
        return self.ranks == other.ranks and np.array_equal(self.home_E, other.home_E)

    def __hash__(self) -> int:
        return hash((self.ranks, self.home_E.tobytes()))
