"""The idea in one page: when the routing of a step is known, balance is a planning problem.

Eight ranks on two nodes, 32 experts of very different popularity, four micro-steps. Two replicas a rank, chosen once
for all micro-steps, and an exact split of tokens bring every rank to the mean, without moving a weight in between.

    python examples/planner_minimal.py
"""

from __future__ import annotations

import numpy as np

from foremoe.planner import BasePlacement, PlannerConfig, plan_step
from foremoe.topology import Topology

RANKS, EXPERTS, MICRO_STEPS, PAIRS = 8, 32, 4, 32_768


def random_loads(seed: int) -> np.ndarray:
    """Token-expert pairs of every micro-step, source rank and expert: int [M, S, E]."""
    rng = np.random.default_rng(seed)
    popularity = rng.normal(0.0, 0.8, EXPERTS)
    odds = popularity + rng.normal(0.0, 0.4, (MICRO_STEPS, RANKS, EXPERTS))
    share = np.exp(odds) / np.exp(odds).sum(axis=2, keepdims=True)
    return np.stack([[rng.multinomial(PAIRS, row) for row in micro] for micro in share])


def main() -> None:
    load_MSE = random_loads(seed=0)
    topology = Topology.uniform(ranks=RANKS, ranks_per_node=4)
    base = BasePlacement.contiguous(experts=EXPERTS, ranks=RANKS)

    nothing = plan_step(load_MSE, base=base, topology=topology, config=PlannerConfig(strategy="static"))
    planned = plan_step(load_MSE, base=base, topology=topology, config=PlannerConfig(redundant_slots=2))
    planned.validate(load_MSE)

    print("micro-step   max/mean without plan   with plan   tokens to the other node")
    for index, (before, after) in enumerate(zip(nothing.plans, planned.plans, strict=True)):
        crossing = [plan.crossing(topology.node_R) for plan in (before, after)]
        print(f"{index:10}   {before.imbalance:21.3f}   {after.imbalance:9.4f}   {crossing[0]:>10} -> {crossing[1]}")
    print(f"\n{len(planned.replicas)} replicas pushed once, {planned.copies} weights moved within micro-steps")
    tokens_SER = planned.plans[0].tokens_SER()
    hottest = int(load_MSE[0].sum(axis=0).argmax())
    print(f"expert {hottest}, the hottest of micro-step 0, on ranks: {tokens_SER[:, hottest].sum(axis=0).tolist()}")


if __name__ == "__main__":
    main()
