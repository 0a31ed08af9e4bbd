from __future__ import annotations

import pytest

from tests.distributed import transfer_cases as cases
from tests.distributed.launch import Pools

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("path", ["host", "direct", None])
def test_weights_and_gradients_arrive_bit_for_bit(pools: Pools, path: str | None, dtype: str) -> None:
    for moves in pools(2).run(cases.bits_arrive, path=path, dtype=dtype):
        assert sum(moves.values()) == 12  # two rounds out, one back; four moves each that a rank takes part in
        if path is not None:
            assert moves[path] == 12


def test_host_memory_of_another_node_is_read_once_per_node(pools: Pools) -> None:
    answers = pools(4).run(cases.across_nodes, path="host")
    # Two rounds: each of four experts crosses once, and rank 0's of the second layer once; all are read by two ranks.
    assert sum(answer["network_bytes"] for answer in answers) == 2 * 5 * cases.WIDE_BYTES
    assert all(answer["direct"] == 0 for answer in answers)
    direct = pools(4).run(cases.across_nodes, path="direct")
    # The second layer is asked for twice; direct moves cross each time and for every reader.
    assert sum(answer["network_bytes"] for answer in direct) == 2 * (8 + 4) * cases.WIDE_BYTES
    assert all(answer["host"] == 0 for answer in direct)
    pools(4).run(cases.across_nodes, path=None)


def test_shared_memory_has_no_name_left(pools: Pools) -> None:
    assert pools(2).run(cases.nothing_left) == [[], []]


def test_without_room_for_shared_memory_all_ranks_go_direct(pools: Pools) -> None:
    assert pools(2).run(cases.no_room) == [{"host": 0, "direct": 2}] * 2


def test_an_error_of_one_rank_is_raised_on_all(pools: Pools) -> None:
    assert pools(2).run(cases.errors_are_shared) == [("no good (layer 3, rank 1)", 1)] * 2
