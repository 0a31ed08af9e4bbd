"""How many replicas each rank may hold: the configured slots, cut by its memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foremoe.planner.config import PlannerConfig
from foremoe.topology import Topology

# bf16 weights and the fp32 gradient that a replica accumulates.
REPLICA_BYTES_PER_PARAMETER = 6
# Dynamic slots are filled one layer ahead, so two sets exist.
DYNAMIC_BUFFERS = 2


def slots_per_rank(config: PlannerConfig, topology: Topology) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(step slots in each layer, dynamic slots) of every rank: int64 [R] each.

    A step slot costs memory in every MoE layer, a dynamic one only once (twice for the double buffer), so
    dynamic slots are granted first. Memory limits are hard: slots that do not fit do not exist.
    """
    slot_bytes = REPLICA_BYTES_PER_PARAMETER * config.cost.model.expert_parameters
    memory_R = topology.replica_memory_R
    if config.replica_memory_bytes is not None:
        memory_R = np.minimum(memory_R, config.replica_memory_bytes)
    dynamic_R = np.minimum(memory_R // (DYNAMIC_BUFFERS * slot_bytes), config.dynamic_slots)
    left_R = memory_R - dynamic_R * DYNAMIC_BUFFERS * slot_bytes
    step_R = np.minimum(left_R // (slot_bytes * config.cost.model.moe_layers), config.redundant_slots)
    return step_R.astype(np.int64), dynamic_R.astype(np.int64)


def replica_bytes(config: PlannerConfig, *, step_slots: int, dynamic_slots: int) -> int:
    """Memory of a rank that holds so many slots, in bytes."""
    slot_bytes = REPLICA_BYTES_PER_PARAMETER * config.cost.model.expert_parameters
    return slot_bytes * (step_slots * config.cost.model.moe_layers + DYNAMIC_BUFFERS * dynamic_slots)
