"""`foremoe bench`: measurements of this machine.

`foremoe bench ep` starts its own ranks on a machine without GPUs; on GPUs it runs under torchrun, one process a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from foremoe.errors import LaunchError
from foremoe.moe.benchmark import BenchmarkSettings, Measurement, run_benchmark
from foremoe.moe.benchmark_table import Clock, findings, to_json, variant_rows

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure this machine.")

_TIMEOUT = timedelta(minutes=10)
# Keep freed memory: row buffers of some megabytes would otherwise go back to the kernel and be mapped again, zeroed, in
# every layer. GPUs have torch's caching allocator for that. Read by glibc when a process starts.
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@app.callback()
def root() -> None:
    """Measure this machine."""


@app.command()
def ep(
    ranks: int = typer.Option(2, min=1, help="Processes to start; ignored under torchrun."),
    hidden: int = typer.Option(256, min=8, help="Width of the residual stream."),
    expert_width: int = typer.Option(1024, min=8, help="Intermediate width of an expert."),
    experts: int = typer.Option(8, min=1, help="Experts of a layer."),
    top_k: int = typer.Option(4, min=1, help="Experts of a token."),
    layers: int = typer.Option(2, min=1, help="MoE layers."),
    tokens: int = typer.Option(512, min=1, help="Tokens of a rank and micro-step."),
    micro_steps: int = typer.Option(4, min=1, help="Micro-steps of a step."),
    rounds: int = typer.Option(6, min=1, help="Measured rounds, two steps of every variant each."),
    imbalance: float = typer.Option(1.6, min=1.0, help="Max over mean of rank loads under static placement."),
    redundant_slots: int = typer.Option(2, min=0, help="Replica slots of a rank and layer, filled once per step."),
    dynamic_slots: int = typer.Option(0, min=0, help="Replica slots shared by all layers, filled per micro-step."),
    dtype: str = typer.Option("fp32", help="fp32 or bf16."),
    seed: int = typer.Option(0, min=0, help="Seed of weights and routing."),
    json_file: Path | None = typer.Option(None, "--json", help="Write settings, findings and every run here."),
) -> None:
    """Expert-parallel training steps under skewed routing: static, eplb and foremoe against forced balance.

    Variants are interleaved in one run. On GPUs: torchrun --no-python --nproc-per-node=8 foremoe bench ep
    """
    if dtype not in _DTYPES:
        raise LaunchError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    settings = BenchmarkSettings(
        hidden=hidden,
        expert_width=expert_width,
        experts=experts,
        top_k=top_k,
        layers=layers,
        tokens=tokens,
        micro_steps=micro_steps,
        rounds=rounds,
        imbalance=imbalance,
        redundant_slots=redundant_slots,
        dynamic_slots=dynamic_slots,
        seed=seed,
        dtype=_DTYPES[dtype],
    )
    world = int(os.environ.get("WORLD_SIZE", ranks))
    _check(settings, world)
    if "RANK" in os.environ:
        _under_torchrun(settings, json_file)
        return
    if torch.cuda.is_available():
        raise LaunchError("one process a GPU: torchrun --no-python --nproc-per-node=8 foremoe bench ep")
    for name, value in _ALLOCATOR.items():
        os.environ.setdefault(name, value)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    spawn(  # type: ignore[no-untyped-call]
        _local_rank, args=(ranks, store.port, settings, json_file), nprocs=ranks
    )


def _check(settings: BenchmarkSettings, ranks: int) -> None:
    local = settings.experts // ranks
    if settings.experts % ranks or settings.top_k > settings.experts:
        raise LaunchError(f"{settings.experts} experts must divide over {ranks} ranks and be at least top-k")
    if settings.top_k > settings.experts - local and ranks > 1 and settings.top_k > local:
        share = settings.imbalance * settings.top_k / ranks
        if settings.top_k - share > settings.experts - local:
            raise LaunchError("so few experts cannot give that imbalance")
    if settings.imbalance * settings.top_k / ranks > local:
        raise LaunchError(
            f"one rank's {local} experts cannot take {settings.imbalance} times their share of top-{settings.top_k}: "
            "use more experts, a smaller top-k or less imbalance"
        )


def _local_rank(rank: int, world: int, port: int, settings: BenchmarkSettings, json_file: Path | None) -> None:
    # One thread a rank: with more, ranks share cores and the busiest one is not the slowest.
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    _run(settings, torch.device("cpu"), "cpu_seconds", json_file)
    dist.destroy_process_group()


def _under_torchrun(settings: BenchmarkSettings, json_file: Path | None) -> None:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=_TIMEOUT)
        _run(settings, device, "wall_seconds", json_file)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        _run(settings, torch.device("cpu"), "cpu_seconds", json_file)
    dist.destroy_process_group()


def _run(settings: BenchmarkSettings, device: torch.device, clock: Clock, json_file: Path | None) -> None:
    group = dist.group.WORLD
    assert group is not None  # init_process_group was called
    # Piped output has no width of its own; eighty columns would cut every heading.
    width = None if sys.stdout.isatty() else 150
    console = Console(quiet=dist.get_rank() != 0, width=width)
    with console.status("starting") as status:
        measurements = run_benchmark(settings, group=group, device=device, progress=status.update)
    if dist.get_rank() == 0:
        _show(console, measurements, settings, clock)
        if json_file is not None:
            found = findings(measurements, settings, clock)
            machine = f"{dist.get_world_size()} ranks on {_machine(device)}"
            json_file.write_text(json.dumps(to_json(measurements, settings, found, machine=machine), indent=1) + "\n")
            console.print(f"written to {json_file}")


def _show(console: Console, measurements: list[Measurement], settings: BenchmarkSettings, clock: Clock) -> None:
    table = Table(
        title=f"one step of {settings.micro_steps} micro-steps, medians of {settings.rounds} rounds of two (measured)"
    )
    for name in (
        "variant", "CPU s, critical path", "wall s", "plan ms", "exposed ms", "hidden ms", "max/mean", "copies",
        "replica MiB", "as planned",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "variant" else "right")
    for row in variant_rows(measurements):
        table.add_row(*row)
    console.print(table)
    verdicts = Table(title="ratios of runs side by side")
    for name in ("what", "measured", "must", "goal", "met"):
        verdicts.add_column(name)
    for finding in findings(measurements, settings, clock):
        verdicts.add_row(finding.name, finding.value, finding.must, finding.goal, "yes" if finding.met else "NO")
    console.print(verdicts)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, one thread a rank, torch {torch.__version__}"
