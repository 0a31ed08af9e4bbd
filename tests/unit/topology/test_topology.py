"""Topologies: JSON in and out, nesting, and what is refused."""

from __future__ import annotations

import pytest

from foremoe.errors import PlannerError
from foremoe.topology import Topology


def test_uniform_and_json_round_trip() -> None:
    topology = Topology.uniform(ranks=16, ranks_per_node=8)
    assert (topology.size, topology.nodes, topology.domains) == (16, 2, 2)
    again = Topology.model_validate_json(topology.model_dump_json(by_alias=True))
    assert again == topology
    assert again.node_R.tolist() == [0] * 8 + [1] * 8


def test_domains_may_span_or_split_nodes() -> None:
    rack = Topology.uniform(ranks=8, ranks_per_node=2, ranks_per_domain=8)
    assert (rack.nodes, rack.domains, rack.locality.inner_start.size - 1) == (4, 1, 4)
    islands = Topology.uniform(ranks=8, ranks_per_node=8, ranks_per_domain=4)
    assert (islands.nodes, islands.domains) == (1, 2)
    with pytest.raises(PlannerError, match="must nest"):
        Topology.of_places([("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")])


def test_measured_bandwidths_are_those_of_the_slowest_rank_to_all_its_peers() -> None:
    data = {"ranks": [{"node": node} for node in "aabb"]}
    plain = Topology.checked(data)
    assert plain.domain_bytes_per_second == plain.domain_link.bandwidth_bytes_per_second
    measured = [[0, 8, 4, 4], [8, 0, 4, 2], [3, 3, 0, 6], [3, 3, 9, 0]]
    topology = Topology.checked({**data, "measuredBytesPerSecond": measured})
    assert topology.domain_bytes_per_second == pytest.approx(6.0)
    assert topology.network_bytes_per_second == pytest.approx(1 / ((1 / 4 + 1 / 2) / 2))
    apart = topology.subset([0, 2])
    assert apart.domain_bytes_per_second == apart.domain_link.bandwidth_bytes_per_second
    assert apart.network_bytes_per_second == pytest.approx(3.0)


def test_subset_keeps_places_and_measurements() -> None:
    measured = [[1.0 if a == b else 10.0 * a + b for b in range(4)] for a in range(4)]
    data = {"ranks": [{"node": "a"}, {"node": "a"}, {"node": "b"}, {"node": "b"}], "measuredBytesPerSecond": measured}
    part = Topology.checked(data).subset([3, 0])
    assert part.node_R.tolist() == [0, 1]
    assert part.measured_bytes_per_second == ((1.0, 30.0), (3.0, 1.0))
    with pytest.raises(PlannerError, match="rank 9"):
        part.subset([9])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"ranks": []}, "ranks"),
        ({"ranks": [{"domain": "x"}]}, "node"),
        ({"ranks": [{"node": ""}]}, "node"),
        ({"ranks": [{"node": "a"}], "domainLink": {"bandwidthBytesPerSecond": float("inf")}}, "finite"),
        ({"ranks": [{"node": "a"}], "networkLink": {"bandwidthBytesPerSecond": 0}}, "networkLink"),
        ({"ranks": [{"node": "a"}], "networkLink": {"bandwidthBytesPerSecond": float("nan")}}, "networkLink"),
        ({"ranks": [{"node": "a"}, {"node": "a"}], "measuredBytesPerSecond": [[1.0]]}, "2 x 2"),
        ({"ranks": [{"node": "a"}, {"node": "a"}], "measuredBytesPerSecond": [[1, -1], [1, 1]]}, "rank 0"),
        ({"ranks": [{"node": "a"}], "colour": "red"}, "colour"),
        ("not json", "topology"),
    ],
)
def test_refused(data: object, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        Topology.checked(data)


@pytest.mark.parametrize("sizes", [(0, 1), (8, 3), (8, 0)])
def test_sizes_must_divide(sizes: tuple[int, int]) -> None:
    with pytest.raises(PlannerError):
        Topology.uniform(ranks=sizes[0], ranks_per_node=sizes[1])
