"""Modelled step time, the recorded run, memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from foremoe.planner import PlannerConfig, Strategy
from foremoe.planner.cost import CostConstants, ModelShape
from foremoe.routing import TraceReader
from foremoe.routing.generator import Skew, TraceSpec, write_trace
from foremoe.simulate import simulate
from foremoe.topology import Topology
from planner_pieces.cells import ROOT, Cell
from planner_pieces.loads import FULL, ONLY_BALANCE, Scale, machine, spread

RECORDED = ROOT / "tests" / "data" / "grpo_e32"
QWEN_235B = ModelShape(
    hidden=4096, expert_width=1536, moe_layers=94, dense_parameters_per_layer=71.3e6, attention_width=8192
)
DEEPSEEK_V3 = ModelShape(
    hidden=7168, expert_width=2048, moe_layers=58, dense_parameters_per_layer=187e6 + 6 * 7168 * 2048,
    attention_width=20480, vocabulary=129280,
)  # fmt: skip


def modelled(scale: Scale) -> Iterator[Cell]:
    """Modelled step time against forced balance and the baselines."""
    shapes = {"Qwen3-235B": (128, QWEN_235B), "DeepSeek-V3": (256, DEEPSEEK_V3)}
    for name, (experts, shape) in shapes.items():
        for ranks in (8, 16, 32, 64) if scale is FULL else (64,):
            for skew in (Skew.NONE, Skew.MILD, Skew.MEDIUM, Skew.STRONG):
                with tempfile.TemporaryDirectory() as folder:
                    spec = TraceSpec(
                        experts=experts, layers=scale.layers, ranks=ranks, micro_steps=8, steps=3, skew=skew
                    )
                    write_trace(Path(folder) / "t", spec)
                    config = PlannerConfig(max_moves=experts // 20, cost=CostConstants(model=shape))
                    free = config.model_copy(update={"max_moves": None})
                    reader = TraceReader(Path(folder) / "t")
                    ours = simulate(
                        reader, topology=machine(ranks), config=config, strategies=[Strategy.FOREMOE, Strategy.STATIC]
                    )
                    rest = simulate(
                        reader,
                        topology=machine(ranks),
                        config=free,
                        strategies=[Strategy.EPLB, Strategy.LPLB, Strategy.RELIBRA],
                    )
                seconds = {r.strategy: r.total_seconds for r in (*ours.results, *rest.results)}
                mine = seconds.pop("foremoe")
                title = f"{name} EP{ranks} {skew}"
                yield Cell("modelled", f"{title}: share of forced balance", ours.ideal_seconds / mine, 0.98, 0.99, True)
                best = min(seconds, key=seconds.__getitem__)
                yield Cell(
                    "modelled", f"{title}: time over the best baseline", mine / seconds[best], 1.005, None, note=best
                )
                if ranks == 64 and skew is not Skew.NONE:
                    yield Cell(
                        "modelled", f"{title}: speed-up over relibra", seconds["relibra"] / mine, 1.03, None, True
                    )


def recorded(scale: Scale) -> Iterator[Cell]:
    """The recorded GRPO run, sources shared out over more ranks than it had."""
    reader = TraceReader(RECORDED)
    for ranks in (4, 8, 16):
        config = PlannerConfig(max_moves=2, redundant_slots=1, cost=ONLY_BALANCE)
        update = {"cost": config.cost.model_copy(update={"gpu": "cpu"})}
        topology = Topology.uniform(ranks=ranks, ranks_per_node=ranks)
        done = simulate(reader, topology=topology, config=config.model_copy(update=update), strategies=list(Strategy))
        for result in done.results:
            mean, p95, most = spread(result.imbalance_ML.ravel().tolist())
            yield Cell(
                "recorded",
                f"{ranks} ranks, one step slot, {result.strategy}: mean max/mean",
                mean,
                note=f"p95 {p95:.3f}, max {most:.3f}",
            )


def memory(scale: Scale) -> Iterator[Cell]:
    """Peak memory of simulating 256 experts x 64 ranks x 94 layers x 32 micro-steps in a process of its own."""
    layers = 94 if scale is FULL else 4
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "planner.py"),
            "--memory-child",
            folder,
            "--layers",
            str(layers),
        ]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ.copy())
    mib = float(out.stdout.strip().splitlines()[-1])
    yield Cell("memory", f"peak RSS, {layers} layers x 32 micro-steps x 64 ranks x 256 experts: MiB", mib, 1024, 300)


def memory_child(folder: str, layers: int) -> None:
    spec = TraceSpec(experts=256, layers=layers, ranks=64, micro_steps=32, steps=1)
    write_trace(Path(folder) / "t", spec)
    simulate(
        TraceReader(Path(folder) / "t"), topology=machine(64), config=PlannerConfig(search_moves=2000),
        strategies=[Strategy.STATIC, Strategy.FOREMOE],
    )  # fmt: skip
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
