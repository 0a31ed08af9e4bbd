"""Bad input is refused with an error that names what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foremoe.errors import PlannerError
from foremoe.planner import BasePlacement, PlannerConfig, assign, optimize_base, plan_micro_step, plan_step
from foremoe.topology import Topology


def call(load: Any, **changes: Any) -> None:

    arguments: dict[str, Any] = {
        "base": BasePlacement.contiguous(experts=8, ranks=4),
        "topology": Topology.uniform(ranks=4, ranks_per_node=2),
        "config": PlannerConfig(),
    }
    arguments.update(changes)
    plan_micro_step(load, **arguments)


GOOD = np.ones((4, 8), dtype=np.int64)


def negative() -> np.ndarray:
    load = GOOD.copy()
    load[2, 5] = -1
    return load


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (negative(), r"negative \(expert 5, rank 2\)"),
        (GOOD * 1.0, "must be integers"),
        (np.full((4, 8), np.nan), "must be integers"),
        (GOOD.astype(bool), "must be integers"),
        (GOOD[0], r"must be \[S, E\]"),
        (GOOD[None], r"must be \[S, E\]"),
        (GOOD[:, :0], "empty"),
        (GOOD[:3], "3 source ranks, the topology 4"),
        (GOOD[:, :6], "8 experts, the load 6"),
        (GOOD * 2**53, "add up to more"),
        (np.full((4, 8), 2**63 + 1, dtype=np.uint64), "add up to more"),
        ([["a"] * 8] * 4, "must be integers"),
    ],
)
def test_loads(load: Any, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        call(load)


def test_huge_but_possible_loads_are_planned() -> None:
    call(np.full((4, 8), 10**9))
    call(np.zeros((4, 8), dtype=np.int64))


def test_base_placements() -> None:
    with pytest.raises(PlannerError, match="do not divide"):
        BasePlacement.contiguous(experts=10, ranks=4)
    with pytest.raises(PlannerError, match=r"no rank in \[0, 4\) \(expert 3\)"):
        BasePlacement(home_E=np.array([0, 1, 2, 4]), ranks=4)
    with pytest.raises(PlannerError, match=r"home slots are 1 \(rank 1\)"):
        BasePlacement(home_E=np.array([0, 1, 1, 3]), ranks=4)
    with pytest.raises(PlannerError, match="integer vector"):
        BasePlacement(home_E=np.array([0.0, 1.0]), ranks=2)
    with pytest.raises(PlannerError, match="2 ranks, the topology 4"):
        call(GOOD, base=BasePlacement.contiguous(experts=8, ranks=2))


def test_hosts() -> None:

    topology = Topology.uniform(ranks=4, ranks_per_node=2)
    hosts = np.ones((4, 8), dtype=bool)
    hosts[:, 6] = False
    with pytest.raises(PlannerError, match=r"no rank hosts this expert \(expert 6\)"):
        assign(GOOD, hosts, topology=topology)
    with pytest.raises(PlannerError, match="hosts must be bool"):
        assign(GOOD, hosts.astype(int), topology=topology)
    with pytest.raises(PlannerError, match="resident hosts"):
        call(GOOD, resident_RE=hosts[:2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"strategy": "best"}, "strategy"),
        ({"redundantSlots": -1}, "redundantSlots"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"tolerance": 2}, "tolerance"),
        ({"slots": 2}, "slots"),
        ({"configVersion": "v2"}, "configVersion"),
        ('{"redundantSlots": "many"}', "redundantSlots"),
        ("{", "config"),
        ({"cost": {"gpu": "h900"}}, "cost.gpu"),
        ({"cost": {"utilisation": 0}}, "cost.utilisation"),
    ],
)
def test_configs(data: object, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        PlannerConfig.checked(data)


def test_config_speaks_camel_case_and_snake_case() -> None:
    config = PlannerConfig.checked('{"redundantSlots": 3, "maxMoves": null, "minTokensPerReplica": 256}')
    assert (config.redundant_slots, config.max_moves, config.min_tokens_per_replica) == (3, None, 256)
    assert PlannerConfig.checked(config.model_dump_json(by_alias=True)) == config
    assert PlannerConfig(redundant_slots=3, max_moves=None, min_tokens_per_replica=256) == config


def test_one_rank_and_steps() -> None:

    topology = Topology.uniform(ranks=1, ranks_per_node=1)
    base = BasePlacement.contiguous(experts=4, ranks=1)
    plan = plan_step(np.ones((2, 1, 4), dtype=int), base=base, topology=topology, config=PlannerConfig(dynamic_slots=1))
    assert plan.chosen == "static"
    with pytest.raises(PlannerError, match=r"must be \[M, S, E\]"):
        plan_step(GOOD, base=base, topology=topology, config=PlannerConfig())
    with pytest.raises(PlannerError, match="do not divide"):
        optimize_base(
            np.ones((1, 4, 6), dtype=int), topology=Topology.uniform(ranks=4, ranks_per_node=2), config=PlannerConfig()
        )
