"""Speed of the expert-parallel layer under skewed routing, every variant beside the others in one run.

One model per variant, equal weights, and the same sequence of steps. A round is two consecutive steps: all variants
run the first, then all run the second in the reverse order. Each variant's time is the sum of both, so a machine that
slows down or speeds up during a round does it to all alike; variants that are compared closely are neighbours. A step
is what training pays: `begin_step` (planning and pushing replicas), forward and backward of all micro-steps, `end_step`
(gradients home). Python's garbage is collected before each step, not in it: one collection over all imported libraries
takes as long as the differences that are measured, and hits whichever variant is running.

*forced* is the ceiling: routing that is perfectly balanced by itself, run by the static strategy with the same number
of tokens. *even* runs the same balanced routing through the full machinery and shows what that costs by itself.
History-based strategies see the step before, as they would in training.

Two clocks: wall time, and CPU seconds on the critical path. On a shared CPU machine wall time measures the neighbours.
Ranks wait for each other at every exchange of rows, so what a step would take alone is the sum, over the stretches
between exchanges, of the CPU time of the rank that is busiest in that stretch. On GPUs only wall time means anything.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from foremoe.moe.dispatch import Dispatcher
from foremoe.moe.runtime import ExpertParallelRuntime, expert_parallel
from foremoe.planner import PlannerConfig, Strategy
from foremoe.planner.cost import CostConstants
from foremoe.topology import Link, Topology
from foremoe.transfer import ControlPlane

__all__ = ["BenchmarkSettings", "Measurement", "run_benchmark", "skewed_routing"]


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """Sizes of a run. The defaults make experts dominate on one CPU thread a rank."""

    hidden: int = 256
    expert_width: int = 1024
    experts: int = 8
    top_k: int = 4
    layers: int = 2
    tokens: int = 512
    """Tokens of a rank and micro-step."""
    micro_steps: int = 4
    rounds: int = 6
    """Measured rounds, two steps of every variant each, after one that warms up."""
    imbalance: float = 1.6
    """Max over mean of rank loads under the static placement."""
    redundant_slots: int = 2
    dynamic_slots: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One round of one variant: the mean of its two steps. Times are the slowest rank's."""

    variant: str
    wall_seconds: float
    cpu_seconds: float
    """On the critical path: of the busiest rank in each stretch between exchanges, summed."""
    plan_seconds: float
    exposed_seconds: float
    dynamic_exposed_seconds: float
    hidden_seconds: float
    imbalance: float
    """Executed max over mean, averaged over micro-steps and layers."""
    copies: int
    replica_bytes: int
    as_planned: bool


def skewed_routing(settings: BenchmarkSettings, *, ranks: int, source: int, step: int) -> list[torch.Tensor]:
    """Recorded routing of one rank: one int64 [tokens, layers, top_k] per micro-step. Ids of a row are distinct.

    Rank 0's home experts are the busy ones, with a share that gives the wanted imbalance; so the busiest rank is the
    same in all layers and its CPU time is the step's. Inside a rank, popularity has a part that lasts over steps and
    a part that changes from one micro-step to the next.
    """
    lasting = np.random.default_rng(settings.seed).standard_normal((settings.layers, settings.experts))
    shared = np.random.default_rng((settings.seed, step))
    own = np.random.default_rng((settings.seed, step, source))
    busy = np.arange(settings.experts) < settings.experts // ranks
    out = []
    for _ in range(settings.micro_steps):
        layers = []
        for layer in range(settings.layers):
            liking = lasting[layer] + shared.standard_normal(settings.experts)
            layers.append(_draw(liking, busy, _busy_counts(settings, ranks, own), settings.top_k, own))
        out.append(torch.from_numpy(np.stack(layers, axis=1)))
    return out


def even_routing(settings: BenchmarkSettings, *, ranks: int, source: int, step: int) -> list[torch.Tensor]:
    """The same sizes, every rank and every expert chosen equally often."""
    pairs = settings.tokens * settings.top_k
    experts = np.arange(pairs) % settings.experts
    # Neighbouring ids of a round-robin are distinct; rank by rank interleaving keeps even a short row balanced.
    local = settings.experts // ranks
    order = np.arange(settings.experts).reshape(ranks, local).T.ravel()
    ids = order[experts].reshape(settings.tokens, settings.top_k)
    shift = (source + step) % settings.tokens
    rows = torch.from_numpy(np.roll(ids, shift, axis=0))
    return [rows[:, None].expand(-1, settings.layers, -1).contiguous() for _ in range(settings.micro_steps)]


def run_benchmark(
    settings: BenchmarkSettings,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    progress: Callable[[str], None] = lambda _text: None,
) -> list[Measurement]:
    """Run all variants, interleaved; collective, equal results on every rank."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    control = ControlPlane(group)
    variants: dict[str, tuple[Strategy, Callable[..., list[torch.Tensor]]]] = {
        "forced": (Strategy.STATIC, even_routing),
        "even": (Strategy.FOREMOE, even_routing),
        "static": (Strategy.STATIC, skewed_routing),
        "eplb": (Strategy.EPLB, skewed_routing),
        "foremoe": (Strategy.FOREMOE, skewed_routing),
    }
    progress("measuring the machine")
    topology, cost = _machine(settings, control, device)
    runtimes = {}
    for name, (strategy, _) in variants.items():
        progress(f"preparing {name}")
        config = PlannerConfig(
            strategy=strategy,
            redundant_slots=settings.redundant_slots,
            dynamic_slots=settings.dynamic_slots,
            seed=settings.seed,
            cost=cost,
        )
        runtimes[name] = expert_parallel(_model(settings).to(device), group=group, config=config, topology=topology)
    results: list[Measurement] = []
    for round_ in range(settings.rounds + 1):
        progress(f"round {round_} of {settings.rounds}" if round_ else "warming up")
        steps: dict[str, list[Measurement]] = {name: [] for name in variants}
        for step, names in ((2 * round_, list(variants)), (2 * round_ + 1, list(reversed(variants)))):
            for name in names:
                routing = variants[name][1](settings, ranks=ranks, source=rank, step=step)
                steps[name].append(_measure(name, runtimes[name], routing, settings, control, device, step))
        if round_:
            results += [_mean(measured) for measured in steps.values()]
    for runtime in runtimes.values():
        runtime.close()
    return results


def _mean(steps: Sequence[Measurement]) -> Measurement:
    """What a round says of a variant; copies and memory are the larger step's."""

    def of(field: str) -> float:
        return fmean(getattr(step, field) for step in steps)

    return Measurement(
        variant=steps[0].variant,
        wall_seconds=of("wall_seconds"),
        cpu_seconds=of("cpu_seconds"),
        plan_seconds=of("plan_seconds"),
        exposed_seconds=of("exposed_seconds"),
        dynamic_exposed_seconds=of("dynamic_exposed_seconds"),
        hidden_seconds=of("hidden_seconds"),
        imbalance=of("imbalance"),
        copies=max(step.copies for step in steps),
        replica_bytes=max(step.replica_bytes for step in steps),
        as_planned=all(step.as_planned for step in steps),
    )


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect garbage now, and none inside."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _StretchClock:
    """A dispatcher that notes the CPU time of this process between exchanges."""

    def __init__(self, inner: Dispatcher) -> None:
        self.inner = inner
        self.stretches: list[float] = []
        self._last = 0.0

    def start(self) -> None:
        self._last = time.process_time()

    def mark(self) -> None:
        now = time.process_time()
        self.stretches.append(now - self._last)
        self._last = now

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, *, send: Sequence[int], receive: Sequence[int], layer: int
    ) -> torch.Tensor:
        """See `Dispatcher`."""
        self.mark()
        return self.inner.exchange(rows, out, send=send, receive=receive, layer=layer)


def _busy_counts(settings: BenchmarkSettings, ranks: int, rng: np.random.Generator) -> np.ndarray:
    """How many of each token's experts live on rank 0; their mean gives the wanted imbalance."""
    wanted = min(settings.imbalance / ranks, 1.0) * settings.top_k
    wanted = min(wanted, settings.experts // ranks)
    floor = int(wanted)
    counts = np.full(settings.tokens, floor)
    extra = round((wanted - floor) * settings.tokens)
    counts[rng.permutation(settings.tokens)[:extra]] += 1
    return counts


def _draw(liking: np.ndarray, busy: np.ndarray, counts: np.ndarray, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct experts per token, `counts` of them among `busy`, likelier ones first (Gumbel top-k)."""
    score = liking + rng.gumbel(size=(counts.size, liking.size))
    busy_order = np.argsort(-np.where(busy, score, -np.inf), axis=1)
    other_order = np.argsort(-np.where(busy, -np.inf, score), axis=1)
    column = np.arange(top_k)
    take_busy = column < counts[:, None]
    other_index = np.maximum(column - counts[:, None], 0)
    return np.where(take_busy, busy_order[:, :top_k], np.take_along_axis(other_order, other_index, axis=1))


def _machine(
    settings: BenchmarkSettings, control: ControlPlane, device: torch.device
) -> tuple[Topology | None, CostConstants]:
    """Topology and cost constants as measured here: a CPU trades compute for copies at another rate than a GPU."""
    if device.type == "cuda":
        return None, CostConstants()
    rows = torch.randn(settings.tokens, settings.hidden)
    weights = torch.randn(settings.hidden, 2 * settings.expert_width)
    gemm = _best_seconds(lambda: rows @ weights)
    copied = torch.empty_like(weights)
    copy = _best_seconds(lambda: copied.copy_(weights))
    slowest = control.gather(np.array([gemm, copy]), what="measuring the machine").max(axis=0)
    flops = 4 * settings.tokens * settings.hidden * settings.expert_width / slowest[0]
    link = Link(bandwidth_bytes_per_second=float(weights.nbytes / slowest[1]), latency_seconds=1e-4)
    cost = CostConstants()
    topology = Topology.uniform(ranks=control.size, ranks_per_node=control.size)
    return (
        topology.model_copy(update={"domain_link": link, "network_link": link}),
        cost.model_copy(update={"utilisation": cost.utilisation * flops / cost.flops_per_second}),
    )


def _best_seconds(action: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best


def _model(settings: BenchmarkSettings) -> nn.Module:
    import transformers  # slow to import, and nothing else here needs it

    torch.manual_seed(settings.seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=settings.hidden,
        intermediate_size=settings.expert_width,
        moe_intermediate_size=settings.expert_width,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(16, settings.hidden // 8),
        num_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=settings.dtype)
    return model.train()


def _measure(
    name: str,
    runtime: ExpertParallelRuntime,
    routing: Sequence[torch.Tensor],
    settings: BenchmarkSettings,
    control: ControlPlane,
    device: torch.device,
    step: int,
) -> Measurement:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (settings.micro_steps, 1, settings.tokens), generator=generator).to(device)
    for parameter in runtime.model.parameters():
        parameter.grad = None
    clock = _StretchClock(runtime.dispatcher)
    runtime.dispatcher = clock
    with _without_collections():
        control.barrier(what="start of a measured step")
        wall = time.perf_counter()
        clock.start()
        runtime.begin_step(routing)
        for index in range(settings.micro_steps):
            with runtime.micro_step(index):
                logits = runtime.model(input_ids=tokens[index], use_cache=False).logits
                logits.float().pow(2).mean().backward()
        report = runtime.end_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock.mark()
        # The first entry is wall time, the others the stretches; every rank has equally many.
        mine = np.array([time.perf_counter() - wall, *clock.stretches])
    runtime.dispatcher = clock.inner
    slowest = control.gather(mine, what="gathering times").max(axis=0)
    return Measurement(
        variant=name,
        wall_seconds=float(slowest[0]),
        cpu_seconds=float(slowest[1:].sum()),
        plan_seconds=report.plan_seconds,
        exposed_seconds=report.exposed_seconds,
        dynamic_exposed_seconds=report.dynamic_exposed_seconds,
        hidden_seconds=report.hidden_seconds,
        imbalance=float(report.imbalance_ML.mean()),
        copies=report.copies,
        replica_bytes=report.replica_bytes,
        as_planned=report.as_planned,
    )
