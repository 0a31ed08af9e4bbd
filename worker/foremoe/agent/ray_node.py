"""Starting a Ray node: command line, environment, and when it is up.

`ray start --block` stays in the foreground and ends its own children when it is told to. Counts of CPUs are logical:
veRL asks three per rank, whatever the machine has. Nothing here imports ray.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from foremoe.agent.context import AgentContext
from foremoe.agent.kernels import cache_environment
from foremoe_operator.api.constants import Role

# Ray gives a new node 30 s to register, whatever the machine; a machine that is busy needs another try.
START_TRIES = 5
_UP_LINE = "Ray runtime started"
# Bundles of veRL's placement group: three colocated actors a rank.
_CPUS_PER_RANK = 3
_SPARE_CPUS = 2
# Driver, controller, reward, agent loop, transfer queue.
_HEAD_CPUS = 8
# Without a GPU the models are small, and Ray's default of 30 % of memory per node does not fit several on one machine.
_CPU_OBJECT_STORE_BYTES = 400_000_000


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has an NVIDIA or AMD accelerator that a process may open."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


def version() -> str:
    """Installed version of Ray."""
    return importlib.metadata.version("ray")


def start_command(context: AgentContext, *, accelerator: bool, cores: int | None = None) -> list[str]:
    """`ray start` for this agent's role."""
    boot = context.boot
    gpus = boot.spec.workers.gpus_per_worker if context.role is Role.WORKER else 0
    wanted = _HEAD_CPUS if context.role is Role.HEAD else gpus * _CPUS_PER_RANK + _SPARE_CPUS
    cpus = max(wanted, cores if cores is not None else len(os.sched_getaffinity(0)))
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
        f"--node-ip-address={context.address}",
        f"--num-cpus={cpus}",
        f"--num-gpus={gpus}",
    ]
    if context.role is Role.HEAD:
        command += ["--head", f"--port={boot.ray_port}", "--include-dashboard=false"]
        # There is nothing to scale; the monitor would be one more process of 90 MB.
        command.append("--no-monitor")
    else:
        command.append(f"--address={boot.head_host}:{boot.ray_port}")
    if not accelerator:
        command.append(f"--object-store-memory={_CPU_OBJECT_STORE_BYTES}")
    if context.local:
        # Several nodes on one machine: a port that would collide, and session files of the same names.
        command.append("--dashboard-agent-listen-port=0")
        # By default each node hands out the same ports, free when it looks and taken by another node's worker a moment
        # later: let the system choose.
        command += ["--min-worker-port=0", "--max-worker-port=0"]
    if "RAY_TMPDIR" in context.environment:
        command.append(f"--temp-dir={context.environment['RAY_TMPDIR']}")
    return command


def environment(inherited: Mapping[str, str], *, directory: Path | None = None) -> dict[str, str]:
    """Environment of a Ray node and the driver; what the user set wins. `directory`: where caches may be written."""
    defaults = {
        # On by default since Ray 2.60. Jobs have no secret to share yet, so say plainly that it is off.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # Workers started ahead lack the run's environment and are thrown away; they only cost start-up time.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_COLOR_PREFIX": "0",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if not has_accelerator():
        # Several ranks share the cores; torch would start as many threads as there are, in each.
        defaults["OMP_NUM_THREADS"] = "1"
    kernel_cache = cache_environment(inherited, directory) if directory is not None else {}
    return {**defaults, **kernel_cache, **inherited}


def is_up(line: str) -> bool:
    """Whether this line of `ray start` says that the node is up."""
    return _UP_LINE in line
