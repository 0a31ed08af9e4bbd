"""Nodes and NVLink domains as two nested levels of groups, in the flat form planner kernels take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Price of a token that leaves its NVLink domain, in tokens that leave their node. Goals are lexicographic;
# this is exact because one cycle of the flow network changes either number by less than this.
_DOMAIN_PRICE = 1 << 20


class Locality(NamedTuple):
    """Inner (finer) and outer (coarser) groups of ranks, and the price of a token that leaves each."""

    inner_R: Ints
    outer_R: Ints
    inner_start: Ints
    """Members of inner group g: inner_member[inner_start[g]:inner_start[g + 1]]."""
    inner_member: Ints
    outer_start: Ints
    outer_member: Ints
    outer_of_inner: Ints
    inner_price: int
    outer_price: int
    """Zero when one level is enough; then the outer group is all ranks."""

    @property
    def flat(self) -> bool:
        """True if all ranks are in one group, so that locality decides nothing."""
        return self.inner_start.size == 2


def locality_of(node_R: Ints, domain_R: Ints) -> Locality:
    """Nested groups of a topology; one of the two must refine the other."""
    nodes, domains = int(node_R.max()) + 1, int(domain_R.max()) + 1
    if nodes == domains:
        inner_R, outer_R, prices = domain_R, np.zeros_like(domain_R), (1, 0)
    elif nodes > domains:
        inner_R, outer_R, prices = node_R, domain_R, (1, _DOMAIN_PRICE)
    else:
        inner_R, outer_R, prices = domain_R, node_R, (_DOMAIN_PRICE, 1)
    inner_start, inner_member = _members(inner_R)
    outer_start, outer_member = _members(outer_R)
    return Locality(
        inner_R=inner_R,
        outer_R=outer_R,
        inner_start=inner_start,
        inner_member=inner_member,
        outer_start=outer_start,
        outer_member=outer_member,
        outer_of_inner=outer_R[inner_member[inner_start[:-1]]],
        inner_price=prices[0],
        outer_price=prices[1],
    )


def _members(group_R: Ints) -> tuple[Ints, Ints]:
    counts = np.bincount(group_R)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return start, np.argsort(group_R, kind="stable").astype(np.int64)
