"""What the planner accepts, checked once at its border; everything inside trusts these arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foremoe.errors import PlannerError
from foremoe.planner.base import BasePlacement
from foremoe.topology import Topology

# Sums of loads over experts, ranks and micro-steps, and a few times that, must stay below 2^63.
_MAX_TOTAL = 1 << 56
MAX_EXPERTS = 1 << 14


def checked_load(load: npt.ArrayLike, *, axes: str, topology: Topology) -> npt.NDArray[np.int64]:
    """Loads as a C-ordered int64 array with the given axes ("SE" or "MSE").

    Raises PlannerError, naming rank and expert where one is at fault.
    """
    array: npt.NDArray[Any] = np.asarray(load)
    if array.ndim != len(axes):
        raise PlannerError(f"load must be [{', '.join(axes)}], got {array.ndim} dimensions")
    if not np.issubdtype(array.dtype, np.integer):
        raise PlannerError(f"loads must be integers, got {array.dtype}")
    sources, experts = array.shape[-2:]
    if 0 in array.shape:
        raise PlannerError(f"load is empty: {list(array.shape)}")
    if sources != topology.size:
        raise PlannerError(f"load has {sources} source ranks, the topology {topology.size}")
    if experts > MAX_EXPERTS:
        raise PlannerError(f"at most {MAX_EXPERTS} experts are supported, got {experts}")
    if array.min() < 0:
        place = np.argwhere(array < 0)[0]
        raise PlannerError("loads must not be negative", rank=int(place[-2]), expert=int(place[-1]))
    if int(array.max()) > _MAX_TOTAL // array.size:
        raise PlannerError(f"loads add up to more than {_MAX_TOTAL} tokens")
    return np.ascontiguousarray(array, dtype=np.int64)


def check_base(base: BasePlacement, *, experts: int, topology: Topology) -> None:
    """Raises PlannerError if a base placement does not fit the load and the topology."""
    if base.experts != experts:
        raise PlannerError(f"the base placement has {base.experts} experts, the load {experts}")
    if base.ranks != topology.size:
        raise PlannerError(f"the base placement has {base.ranks} ranks, the topology {topology.size}")


def checked_hosts(hosts_RE: npt.ArrayLike, *, experts: int, topology: Topology) -> npt.NDArray[np.bool_]:
    """A host matrix, bool [R, E], in which every expert has a host. Raises PlannerError naming the expert."""
    hosts: npt.NDArray[Any] = np.asarray(hosts_RE)
    if hosts.dtype != np.bool_ or hosts.shape != (topology.size, experts):
        raise PlannerError(f"hosts must be bool [{topology.size}, {experts}], got {hosts.dtype} {list(hosts.shape)}")
    missing = np.flatnonzero(~hosts.any(axis=0))
    if missing.size:
        raise PlannerError("no rank hosts this expert", expert=int(missing[0]))
    return np.ascontiguousarray(hosts)
