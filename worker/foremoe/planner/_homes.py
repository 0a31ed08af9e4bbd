"""Base refinement: swap the homes of experts so that fewer replicas have less to repair.

The objective adds, over micro-steps, the load of ranks above the mean and, weighted, that of nodes above theirs:
replicas later fix ranks inside a node cheaply, but nodes only over the network (ReLibra, arXiv 2605.08639, anneals
swaps with a smooth surrogate of the same two levels). A swap keeps the number of experts a rank; its effect
is found in O(micro-steps). Homes that may not all move are chosen by steepest descent, which gets most of
the gain from the first few swaps; free homes are then polished by random swaps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foremoe.planner._flow import Ints
from foremoe.planner._jit import kernel
from foremoe.planner._random import random_below


@kernel
def home_cost(load_ME: Ints, home_E: Ints, node_R: Ints, node_weight: int) -> int:
    """Tokens above the mean on ranks, plus `node_weight` times those above the mean on nodes, over micro-steps."""
    load_MR, load_MN, mean_M, mean_MN = _loads(load_ME, home_E, node_R)
    cost = 0
    for micro_step in range(load_ME.shape[0]):
        for rank in range(node_R.size):
            cost += max(0, load_MR[micro_step, rank] - mean_M[micro_step])
        for node in range(load_MN.shape[1]):
            cost += node_weight * max(0, load_MN[micro_step, node] - mean_MN[micro_step, node])
    return cost


@kernel
def _loads(load_ME: Ints, home_E: Ints, node_R: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(load_MR, load_MN, mean_M, mean_MN) with means rounded up."""
    micro_steps, experts = load_ME.shape
    ranks = node_R.size
    nodes = node_R.max() + 1
    size_N = np.zeros(nodes, np.int64)
    for rank in range(ranks):
        size_N[node_R[rank]] += 1
    load_MR = np.zeros((micro_steps, ranks), np.int64)
    load_MN = np.zeros((micro_steps, nodes), np.int64)
    mean_M = np.zeros(micro_steps, np.int64)
    mean_MN = np.zeros((micro_steps, nodes), np.int64)
    for micro_step in range(micro_steps):
        total = 0
        for expert in range(experts):
            load = load_ME[micro_step, expert]
            load_MR[micro_step, home_E[expert]] += load
            load_MN[micro_step, node_R[home_E[expert]]] += load
            total += load
        mean_M[micro_step] = (total + ranks - 1) // ranks
        for node in range(nodes):
            mean_MN[micro_step, node] = (total * size_N[node] + ranks - 1) // ranks
    return load_MR, load_MN, mean_M, mean_MN


@kernel
def _swap_change(
    left: int,
    right: int,
    load_ME: Ints,
    home_E: Ints,
    node_R: Ints,
    node_weight: int,
    load_MR: Ints,
    load_MN: Ints,
    mean_M: Ints,
    mean_MN: Ints,
) -> int:
    """Change of the cost if two experts swap homes."""
    one, two = home_E[left], home_E[right]
    node_one, node_two = node_R[one], node_R[two]
    change = 0
    for micro_step in range(load_ME.shape[0]):
        delta = load_ME[micro_step, right] - load_ME[micro_step, left]
        mean = mean_M[micro_step]
        here, there = load_MR[micro_step, one], load_MR[micro_step, two]
        change += max(0, here + delta - mean) - max(0, here - mean)
        change += max(0, there - delta - mean) - max(0, there - mean)
        if node_one != node_two:
            mean_one, mean_two = mean_MN[micro_step, node_one], mean_MN[micro_step, node_two]
            here, there = load_MN[micro_step, node_one], load_MN[micro_step, node_two]
            change += node_weight * (max(0, here + delta - mean_one) - max(0, here - mean_one))
            change += node_weight * (max(0, there - delta - mean_two) - max(0, there - mean_two))
    return change


@kernel
def _swap(left: int, right: int, load_ME: Ints, home_E: Ints, node_R: Ints, load_MR: Ints, load_MN: Ints) -> None:
    """Swap the homes of two experts and update the loads."""
    one, two = home_E[left], home_E[right]
    for micro_step in range(load_ME.shape[0]):
        delta = load_ME[micro_step, right] - load_ME[micro_step, left]
        load_MR[micro_step, one] += delta
        load_MR[micro_step, two] -= delta
        load_MN[micro_step, node_R[one]] += delta
        load_MN[micro_step, node_R[two]] -= delta
    home_E[left], home_E[right] = two, one


@kernel
def descend(load_ME: Ints, start_E: Ints, node_R: Ints, node_weight: int, max_moves: int, stop_at: float) -> Ints:
    """Steepest descent over swaps with at most `max_moves` experts away from `start_E`: the new homes.

    Of all swaps the one with the largest gain per newly moved expert is taken. Ends when no swap gains more than
    `stop_at` times the first gain.
    """
    experts = start_E.size
    home_E = start_E.copy()
    load_MR, load_MN, mean_M, mean_MN = _loads(load_ME, home_E, node_R)
    first_gain = 0.0
    moved = 0
    while True:
        best, best_left, best_right, best_new = 0.0, -1, -1, 0
        for left in range(experts):
            for right in range(left + 1, experts):
                if home_E[left] == home_E[right]:
                    continue
                new = 0
                new += (home_E[right] != start_E[left]) - (home_E[left] != start_E[left])
                new += (home_E[left] != start_E[right]) - (home_E[right] != start_E[right])
                if moved + new > max_moves:
                    continue
                change = _swap_change(
                    left, right, load_ME, home_E, node_R, node_weight, load_MR, load_MN, mean_M, mean_MN
                )
                gain = -change / max(new, 1)
                if change < 0 and gain > best:
                    best, best_left, best_right, best_new = gain, left, right, new
        first_gain = max(first_gain, best)
        if best_left < 0 or best < stop_at * first_gain:
            return home_E
        _swap(best_left, best_right, load_ME, home_E, node_R, load_MR, load_MN)
        moved += best_new


@kernel
def polish(load_ME: Ints, start_E: Ints, node_R: Ints, node_weight: int, tries: int, seed: int) -> Ints:
    """Random swaps from `start_E`, kept when they do not raise the cost: the new homes."""
    experts = start_E.size
    home_E = start_E.copy()
    load_MR, load_MN, mean_M, mean_MN = _loads(load_ME, home_E, node_R)
    random = np.array([seed * 2 + 88172645463325253], np.uint64)
    for _ in range(tries):
        left, right = random_below(random, experts), random_below(random, experts)
        if home_E[left] == home_E[right]:
            continue
        change = _swap_change(left, right, load_ME, home_E, node_R, node_weight, load_MR, load_MN, mean_M, mean_MN)
        if change <= 0:
            _swap(left, right, load_ME, home_E, node_R, load_MR, load_MN)
    return home_E


@kernel
def longest_first(weight_E: npt.NDArray[np.int64], ranks: int) -> Ints:
    """LPT with equal counts: heaviest expert first, to the least loaded rank that has room."""
    experts = weight_E.size
    homes = experts // ranks
    load_R = np.zeros(ranks, np.int64)
    count_R = np.zeros(ranks, np.int64)
    home_E = np.empty(experts, np.int64)
    order = np.argsort(-weight_E, kind="mergesort")
    for position in range(experts):
        expert = order[position]
        best = -1
        for rank in range(ranks):
            if count_R[rank] < homes and (best < 0 or load_R[rank] < load_R[best]):
                best = rank
        home_E[expert] = best
        load_R[best] += weight_E[expert]
        count_R[best] += 1
    return home_E
