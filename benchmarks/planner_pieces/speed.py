"""Time of planning, and ratios to other planners in the same process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from foremoe.planner import BasePlacement, PlannerConfig, assign, plan_micro_step, plan_step
from foremoe.planner._assign import layout_from_hosts
from foremoe.planner.oracle import lp_assignment
from foremoe.planner.problem import homes_of
from foremoe.planner.strategies.eplb import pack_copies, replica_counts
from foremoe.routing.generator import Skew
from foremoe.topology import Topology
from planner_pieces.cells import Cell
from planner_pieces.exactness import random_instance
from planner_pieces.loads import NODE, Scale, cpu_ms, greedy_plan, load_of, machine, refined


def speed(scale: Scale) -> Iterator[Cell]:
    """CPU time of one plan with its split, and of the exact assignment; ratios side by side."""
    for ranks, (must, goal) in {8: (0.02, 0.005), 16: (0.05, 0.01), 32: (0.1, 0.03), 64: (0.25, 0.08)}.items():
        yield from _plan_speed(128, ranks, must, goal)
    topology = machine(64)
    jobs = []
    for layer in range(94):
        load = load_of(128, 64, Skew.MEDIUM, 0, layer, 1, 1)
        base = refined(load, topology)
        jobs.append((load[0], base, layout_from_hosts(homes_of(base))))
    total = cpu_ms(lambda: [greedy_plan(load, base, topology, layout, 0.03) for load, base, layout in jobs], 5)
    yield Cell("speed", "94 layers at EP64, tolerance 3 %: ms", total, 25.0)
    yield from _ratios()


def _plan_speed(experts: int, ranks: int, must: float, goal: float) -> Iterator[Cell]:
    topology = machine(ranks)
    load = load_of(experts, ranks, Skew.MEDIUM, 0, 0, 1)
    base = refined(load, topology)
    layout = layout_from_hosts(homes_of(base))
    for tolerance in (0.03, 0.0):
        times = [
            cpu_ms(lambda m=m, t=tolerance: greedy_plan(load[m], base, topology, layout, t), 20) for m in range(16)
        ]
        name = f"plan and split, EP{ranks}, tolerance {tolerance:.0%}: ms p50"
        yield Cell("speed", name, float(np.median(times)), must, goal)
    config = PlannerConfig(redundant_slots=0, dynamic_slots=2, tolerance=0.03)

    def priced(micro_step: int) -> object:
        return plan_micro_step(load[micro_step], base=base, topology=topology, config=config)

    times = [cpu_ms(lambda m=m: priced(m), 5) for m in range(16)]
    yield Cell("speed", f"the same with checks and pricing, EP{ranks}: ms p50", float(np.median(times)))


def _ratios() -> Iterator[Cell]:
    topology = machine(64)
    load = load_of(256, 64, Skew.MEDIUM, 0, 0, 1)
    base = refined(load, topology)
    layout = layout_from_hosts(homes_of(base))
    ours = float(
        np.median([cpu_ms(lambda m=m: greedy_plan(load[m], base, topology, layout, 0.03), 10) for m in range(8)])
    )
    weights = [load[m].sum(axis=0).tolist() for m in range(8)]
    plain = float(np.median([cpu_ms(lambda w=w: plain_eplb(w, 64, 384)) for w in weights]))
    arrays = float(
        np.median(
            [
                cpu_ms(
                    lambda m=m: pack_copies(
                        load[m].sum(axis=0), replica_counts(load[m].sum(axis=0), 128), np.full(64, 6)
                    )
                )
                for m in range(8)
            ]
        )
    )
    yield Cell(
        "speed",
        "EPLB in plain Python over our plan, E256 EP64",
        plain / ours,
        200,
        1000,
        True,
        f"{plain:.1f} ms, {ours:.3f} ms",
    )
    yield Cell(
        "speed",
        "the same rule on numpy arrays over our plan, E256 EP64",
        arrays / ours,
        None,
        None,
        True,
        f"{arrays:.1f} ms",
    )
    yield from _torch_ratio(load, ours)
    for ranks in (8, 64):
        rng = np.random.default_rng(1)
        flat, nodes = Topology.uniform(ranks=ranks, ranks_per_node=ranks), machine(ranks)
        cap_ratios, full_ratios, gap = [], [], 0
        for _ in range(3):
            case, hosts = random_instance(rng, ranks, 128)
            cap_ms = cpu_ms(lambda c=case, h=hosts, t=flat: assign(c, h, topology=t), 5)
            full_ms = cpu_ms(lambda c=case, h=hosts, t=nodes: assign(c, h, topology=t), 5)
            start = time.process_time_ns()
            best = lp_cap(case.sum(axis=0), hosts)
            cap_ratios.append((time.process_time_ns() - start) / 1e6 / cap_ms)
            gap = max(gap, abs(best - int(assign(case, hosts, topology=flat).rank_load_R.max())))
            if ranks > NODE:
                lexicographic = cpu_ms(lambda c=case, h=hosts, t=nodes: lp_assignment(c, h, t))
                full_ratios.append(lexicographic / full_ms)
        note = f"largest gap {gap} tokens"
        yield Cell(
            "speed",
            f"HiGHS LP for the cap over exact assignment, EP{ranks}",
            float(np.median(cap_ratios)),
            10,
            30,
            True,
            note,
        )
        if full_ratios:
            name = f"HiGHS LP over sources, all three goals, over exact assignment, EP{ranks}"
            yield Cell("speed", name, float(np.median(full_ratios)), 10, 30, True)


def _torch_ratio(load: np.ndarray, ours: float) -> Iterator[Cell]:
    """The rule as DeepSeek publishes it: Python over torch tensors, all layers of a model in one call.

    Replicas are added for all layers at once, packing loops over layers and copies (deepseek-ai/EPLB, global policy).
    """
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
    layers, ranks, copies = load.shape[0], 64, 384

    def rule(weight: torch.Tensor) -> None:
        every = torch.arange(layers)
        count = torch.ones_like(weight, dtype=torch.int64)
        slots = torch.arange(copies).repeat(layers, 1)
        for slot in range(weight.shape[1], copies):
            best = (weight / count).max(dim=-1).indices
            slots[:, slot] = best
            count[every, best] += 1
        share = (weight / count).gather(-1, slots)
        pack = torch.full_like(slots, -1)
        for layer, order in enumerate(share.sort(-1, descending=True).indices):
            sums, used = [0.0] * ranks, [0] * ranks
            for slot in order:
                rank = min((r for r in range(ranks) if used[r] < copies // ranks), key=sums.__getitem__)
                pack[layer, slot] = rank
                sums[rank] += share[layer, slot]  # a tensor from here on, as in the published loops
                used[rank] += 1

    value = cpu_ms(lambda: rule(torch.from_numpy(load.sum(axis=1)).float())) / layers
    name = "EPLB as published, Python on torch tensors, over our plan, E256 EP64"
    yield Cell("speed", name, value / ours, 200, 1000, True, f"{value:.0f} ms a layer")


def lp_cap(load_E: np.ndarray, hosts_RE: np.ndarray) -> int:
    """Minimal cap by HiGHS with one variable per copy, model building included as ours includes its layout."""
    import highspy

    rank_C, expert_C = np.nonzero(hosts_RE)
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    quota = [model.addVariable(lb=0.0) for _ in rank_C]
    cap = model.addVariable(lb=0.0)
    for expert in range(load_E.size):
        model.addConstr(sum(quota[c] for c in np.flatnonzero(expert_C == expert)) == float(load_E[expert]))
    for rank in range(hosts_RE.shape[0]):
        model.addConstr(sum(quota[c] for c in np.flatnonzero(rank_C == rank)) - cap <= 0.0)
    model.minimize(cap)
    return int(np.ceil(model.val(cap) - 1e-6))


def plain_eplb(weight: list[float], ranks: int, copies: int) -> list[list[int]]:
    """The rule of deepseek-ai/EPLB in plain Python, as its packing loops are."""
    count = [1] * len(weight)
    slots = list(range(len(weight)))
    while len(slots) < copies:
        best = max(range(len(weight)), key=lambda expert: weight[expert] / count[expert])
        count[best] += 1
        slots.append(best)
    packs: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for slot in sorted(range(copies), key=lambda slot: -weight[slots[slot]] / count[slots[slot]]):
        rank = min((r for r in range(ranks) if len(packs[r]) < copies // ranks), key=sums.__getitem__)
        packs[rank].append(slots[slot])
        sums[rank] += weight[slots[slot]] / count[slots[slot]]
    return packs


def search(scale: Scale) -> Iterator[Cell]:
    """Time of a whole step plan at EP 64: search, exact assignments, pricing."""
    for micro_steps in (16, 32):
        for experts in (128, 256):
            for skew in (Skew.MEDIUM, Skew.STRONG):
                topology = machine(64)
                load = load_of(experts, 64, skew, 0, 0, 1, micro_steps)
                base = BasePlacement.contiguous(experts=experts, ranks=64)
                seconds = (
                    cpu_ms(lambda x=load, b=base, t=topology: plan_step(x, base=b, topology=t, config=PlannerConfig()))
                    / 1e3
                )
                yield Cell("search", f"step plan, E{experts} EP64 M{micro_steps} {skew}: s a layer", seconds, 3.0, 0.5)
                yield Cell("search", "the same, 94 layers over 64 processes: s", seconds * np.ceil(94 / 64), 10.0)
