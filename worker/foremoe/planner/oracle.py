"""Independent optima for small cases: linear and integer programs solved by HiGHS, and the subset bound.

Slow and simple on purpose. Tests and benchmarks compare the planner's kernels with these; planning never calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, lil_matrix

from foremoe.errors import PlannerError
from foremoe.planner.plan import Bools, Ints
from foremoe.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """What the best assignment of all reaches."""

    max_load: int
    cross_domain: int
    cross_node: int


def subset_bound(load_E: Ints, hosts_RE: Bools) -> int:
    """Smallest possible maximum load: over all rank sets, load that must stay on them over their number.

    By max-flow min-cut this is the optimum. All 2^R sets are tried, so R <= 16.
    """
    ranks = hosts_RE.shape[0]
    if ranks > 16:
        raise PlannerError(f"all rank sets are tried, so at most 16 ranks, got {ranks}")
    masks_E = (hosts_RE * (1 << np.arange(ranks))[:, None]).sum(axis=0)
    best = 0
    for subset in range(1, 1 << ranks):
        inside = int(load_E[(masks_E & ~subset) == 0].sum())
        best = max(best, -(-inside // subset.bit_count()))
    return best


def lp_assignment(load_SE: Ints, hosts_RE: Bools, topology: Topology) -> Optimum:
    """Lexicographic optimum by linear programs over tokens of every source, expert and host."""
    model = _AssignmentModel(load_SE, hosts_RE)
    max_load = int(np.ceil(model.least_cap() - 1e-6))
    domain_R, node_R = topology.domain_R, topology.node_R
    away_domain = (domain_R[model.source_X] != domain_R[model.rank_X]).astype(float)
    away_node = (node_R[model.source_X] != node_R[model.rank_X]).astype(float)
    cross_domain = round(model.least(away_domain, max_load, []))
    cross_node = round(model.least(away_node, max_load, [(away_domain, cross_domain)]))
    return Optimum(max_load=max_load, cross_domain=cross_domain, cross_node=cross_node)


class _AssignmentModel:
    """Variables x[source, expert, host] >= 0 that add up to the loads."""

    def __init__(self, load_SE: Ints, hosts_RE: Bools) -> None:
        self.ranks = hosts_RE.shape[0]
        pairs = [
            (int(source), int(expert), int(rank))
            for source, expert in np.argwhere(load_SE > 0)
            for rank in np.flatnonzero(hosts_RE[:, expert])
        ]
        self.source_X, expert_X, self.rank_X = np.array(pairs or [(0, 0, 0)], dtype=np.int64).T
        size = len(self.source_X)
        row_of = {(int(s), int(e)): row for row, (s, e) in enumerate(np.argwhere(load_SE > 0))}
        rows = [row_of.get((int(s), int(e)), 0) for s, e in zip(self.source_X, expert_X, strict=True)]
        self.supply = csr_matrix((np.ones(size), (rows, np.arange(size))), shape=(max(1, len(row_of)), size))
        self.demand = load_SE[load_SE > 0].astype(float) if row_of else np.zeros(1)
        self.rank_rows = csr_matrix((np.ones(size), (self.rank_X, np.arange(size))), shape=(self.ranks, size))
        self.size = size

    def least_cap(self) -> float:
        """Smallest maximum rank load."""
        cost = np.zeros(self.size + 1)
        cost[-1] = 1.0
        upper = csr_matrix(np.hstack([self.rank_rows.toarray(), -np.ones((self.ranks, 1))]))
        equal = csr_matrix(np.hstack([self.supply.toarray(), np.zeros((self.supply.shape[0], 1))]))
        return self._solve(cost, upper, np.zeros(self.ranks), equal)

    def least(
        self, cost: npt.NDArray[np.float64], cap: int, at_most: Sequence[tuple[npt.NDArray[np.float64], int]]
    ) -> float:
        """Smallest cost under a cap and further limits."""
        rows = [self.rank_rows.toarray(), *[weights[None, :] for weights, _ in at_most]]
        limits = np.concatenate([np.full(self.ranks, float(cap)), [limit + 1e-6 for _, limit in at_most]])
        return self._solve(cost, csr_matrix(np.vstack(rows)), limits, self.supply)

    def _solve(
        self, cost: npt.NDArray[np.float64], upper: csr_matrix, limits: npt.NDArray[np.float64], equal: csr_matrix
    ) -> float:
        result = linprog(cost, A_ub=upper, b_ub=limits, A_eq=equal, b_eq=self.demand, method="highs")
        if not result.success:
            raise PlannerError(f"HiGHS: {result.message}")
        return float(result.fun)


def mip_homes(load_ME: Ints, *, ranks: int, node_R: Ints, node_weight: int) -> float:
    """Least `home_cost` over all placements with equal counts, by an integer program; small cases only."""
    micro_steps, experts = load_ME.shape
    nodes = int(node_R.max()) + 1
    size_N = np.bincount(node_R)
    total_M = load_ME.sum(axis=1)
    mean_M = -(-total_M // ranks)
    mean_MN = -(-total_M[:, None] * size_N // ranks)
    places = experts * ranks
    excess = micro_steps * ranks
    size = places + excess + micro_steps * nodes
    cost = np.zeros(size)
    cost[places : places + excess] = 1.0
    cost[places + excess :] = node_weight
    once = lil_matrix((experts, size))
    room = lil_matrix((ranks, size))
    for expert in range(experts):
        for rank in range(ranks):
            once[expert, expert * ranks + rank] = 1.0
            room[rank, expert * ranks + rank] = 1.0
    over_rank = lil_matrix((excess, size))
    over_node = lil_matrix((micro_steps * nodes, size))
    for micro_step in range(micro_steps):
        for expert in range(experts):
            for rank in range(ranks):
                load = float(load_ME[micro_step, expert])
                over_rank[micro_step * ranks + rank, expert * ranks + rank] = load
                over_node[micro_step * nodes + node_R[rank], expert * ranks + rank] = load
        for rank in range(ranks):
            over_rank[micro_step * ranks + rank, places + micro_step * ranks + rank] = -1.0
        for node in range(nodes):
            over_node[micro_step * nodes + node, places + excess + micro_step * nodes + node] = -1.0
    integrality = np.zeros(size)
    integrality[:places] = 1
    upper = np.full(size, np.inf)
    upper[:places] = 1.0
    homes = experts // ranks
    result = milp(
        cost,
        integrality=integrality,
        bounds=Bounds(np.zeros(size), upper),
        constraints=[
            LinearConstraint(once.tocsr(), 1, 1),
            LinearConstraint(room.tocsr(), homes, homes),
            LinearConstraint(over_rank.tocsr(), -np.inf, np.repeat(mean_M, ranks)),
            LinearConstraint(over_node.tocsr(), -np.inf, mean_MN.ravel()),
        ],
        options={"time_limit": 60.0, "mip_rel_gap": 0.0},
    )
    if result.status != 0:
        raise PlannerError(f"HiGHS: {result.message}")
    return float(result.fun)


def fewest_copies_bound(load_R: Ints, load_of_home_R: list[Ints], cap: int) -> int:
    """A lower bound of the copies that bring every rank to `cap`, from the loads at home.

    The larger of two: holes needed to take up all excess, largest first; and, over ranks above the cap, the experts
    that must leave (or excess over the largest hole), at least one each.
    """
    excess = np.maximum(load_R - cap, 0)
    holes = np.sort(np.maximum(cap - load_R, 0))[::-1]
    if excess.sum() == 0:
        return 0
    by_holes = int(np.searchsorted(np.cumsum(holes), excess.sum()) + 1)
    by_ranks = 0
    for rank in np.flatnonzero(excess):
        largest = np.sort(load_of_home_R[rank])[::-1]
        must_leave = int(np.searchsorted(np.cumsum(largest), excess[rank]) + 1)
        by_ranks += max(1, must_leave, -(-int(excess[rank]) // int(max(holes[0], 1))))
    return max(by_holes, by_ranks)


def least_missed(load_ME: Ints, home_E: Ints, *, slots_R: Ints, limit: float, seconds: float = 10.0) -> int:
    """Micro-steps that must stay above `limit` times the mean on fixed homes, whatever fills the step slots.

    A lower bound: a rank whose home experts have more than the limit needs replicas, elsewhere, of experts that
    make up the excess; slots in all bound how many experts can have one. Where replicas go is left out. An
    integer program with one variable for each expert and micro-step; after `seconds` its bound so far.
    """
    micro_steps, experts = load_ME.shape
    ranks = slots_R.size
    load_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
    np.add.at(load_MR.T, home_E, load_ME.T)
    cap_M = np.floor(load_ME.sum(axis=1) * limit / ranks + 1e-9)
    rows = np.argwhere(load_MR > cap_M[:, None])
    if rows.size == 0:
        return 0
    cover = lil_matrix((len(rows) + 1, experts + micro_steps))
    least = np.zeros(len(rows) + 1)
    for row, (micro_step, rank) in enumerate(rows):
        least[row] = load_MR[micro_step, rank] - cap_M[micro_step]
        members = np.flatnonzero(home_E == rank)
        cover[row, members] = load_ME[micro_step, members].astype(float)
        cover[row, experts + micro_step] = least[row]
    cover[len(rows), :experts] = -1.0
    least[-1] = -float(slots_R.sum())
    cost = np.concatenate([np.zeros(experts), np.ones(micro_steps)])
    result = milp(
        cost,
        integrality=np.ones(experts + micro_steps),
        bounds=Bounds(np.zeros(experts + micro_steps), np.ones(experts + micro_steps)),
        constraints=[LinearConstraint(cover.tocsr(), least, np.inf)],
        options={"time_limit": seconds},
    )
    bound = result.mip_dual_bound
    if bound is None:
        raise PlannerError(f"HiGHS: {result.message}")
    return max(0, int(np.ceil(bound - 1e-6)))
