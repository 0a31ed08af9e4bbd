"""Loaded by veRL in every process, by `VERL_USE_EXTERNAL_MODULES=foremoe.verl.plugin`.

Registers what has to be known before anything else is imported: on machines without an accelerator the platform and
the rollout, everywhere the observers of `stages`. What it does depends on `VERL_PLATFORM` alone, so that a CUDA run
keeps veRL's own platform and rollout.

veRL reports a plugin that failed to load only in its debug log and then runs on without it. So loading asserts what it
has done (`verify`), and the engine asserts it again.
"""

from __future__ import annotations

import os
from typing import Any

import verl.utils.debug as _debug
import verl.utils.distributed as _distributed
from verl.utils import tracking as _tracking

from foremoe.errors import LaunchError
from foremoe.verl import stages
from foremoe.verl.events import sender
from foremoe_operator.api.constants import CPU_PLATFORM, CPU_ROLLOUT, ENGINE_VENDOR

_ADAPTER = "foremoe.verl.rollout.RolloutAdapter"
_MARK = "_foremoe"


def on_cpu() -> bool:
    """True if this run asked for the platform without accelerators."""
    return os.environ.get("VERL_PLATFORM") == CPU_PLATFORM


def observe_stages() -> None:
    """Pass stages and steps on to the agent; once per process."""
    if getattr(_debug.marked_timer, _MARK, False):
        return
    _debug.marked_timer = stages.announcing(_debug.marked_timer, sender())
    _tracking.Tracking.log = stages.reporting(_tracking.Tracking.log, sender())
    setattr(_debug.marked_timer, _MARK, True)


def default_to_gloo() -> None:
    """veRL composes "cpu:gloo,cpu:gloo" on the processor, which torch refuses: name the backend plainly."""
    original = _distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second, backend or "gloo")

    _distributed.initialize_global_process_group_ray = initialize


def register_rollout() -> None:
    """Make the transformers rollout selectable as `actor_rollout_ref.rollout.name=foremoe_hf`."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> type:
        from foremoe.verl.rollout import TransformersReplica

        return TransformersReplica

    RolloutReplicaRegistry.register(CPU_ROLLOUT, load)
    base._ROLLOUT_REGISTRY[(CPU_ROLLOUT, "async")] = _ADAPTER


def verify() -> None:
    """Raise LaunchError unless platform and rollout of this process are ours."""
    from verl.plugin.platform import get_platform
    from verl.workers.rollout import base

    platform = type(get_platform())
    if platform.__module__ != "foremoe.verl.platform":
        raise LaunchError(f"veRL took the platform {platform.__qualname__}, not ours; was it loaded before the plugin?")
    if base._ROLLOUT_REGISTRY.get((CPU_ROLLOUT, "async")) != _ADAPTER:
        raise LaunchError(f"the rollout {CPU_ROLLOUT} is not registered")


# What veRL looks its engine up by; the engine itself is registered by `foremoe.verl.engine`, and by nothing else.
os.environ.setdefault("VERL_ENGINE_VENDOR", ENGINE_VENDOR)
observe_stages()
if on_cpu():
    from foremoe.verl import platform as _platform  # noqa: F401  registers itself

    default_to_gloo()
    register_rollout()
    verify()
