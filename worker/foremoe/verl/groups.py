"""How the ranks of a training run stand in expert-parallel groups.

An EP group is a run of neighbouring ranks, so that on machines of several GPUs it stays inside as few of them as
possible. With more ranks than one group, every expert has a home in each group; the ranks that hold the same experts
are *twins*, over which those experts are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from foremoe.errors import LaunchError

__all__ = ["ExpertGroups", "GroupInfo"]


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """Where this rank stands among the EP groups."""

    index: int
    groups: int
    size: int
    rank_in_group: int

    @classmethod
    def of(cls, rank: int, *, world_size: int, size: int) -> GroupInfo:
        """Raises LaunchError if the groups do not fill the world."""
        if size < 1 or world_size % size:
            raise LaunchError(
                f"expert-parallel size {size} does not divide the {world_size} ranks; change parallelism.expert "
                "(FOREMOE_EXPERT_PARALLEL)",
                rank=rank,
            )
        return cls(index=rank // size, groups=world_size // size, size=size, rank_in_group=rank % size)


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """The process groups of this rank."""

    info: GroupInfo
    group: dist.ProcessGroup
    """The EP group."""
    twins: dist.ProcessGroup | None
    """Ranks that hold the same experts; None if this rank has no twin."""

    @classmethod
    def make(cls, *, size: int) -> ExpertGroups:
        """Collective over all ranks."""
        world = dist.get_world_size()
        info = GroupInfo.of(dist.get_rank(), world_size=world, size=size)
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        twins = None
        if info.groups > 1:
            twins = [dist.new_group(list(range(place, world, size))) for place in range(size)][info.rank_in_group]
        return cls(info=info, group=groups[info.index], twins=twins)
