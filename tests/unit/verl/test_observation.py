from __future__ import annotations

import numpy as np
import pytest

from foremoe.errors import LaunchError, RoutingError
from foremoe.verl.groups import GroupInfo
from foremoe.verl.observation import check_routes
from foremoe.verl.settings import Settings

LAYERS = [1, 4]


def routes() -> np.ndarray:
    """Four tokens, two MoE layers, top-3 of 8; the third row is filler, the fourth has no record."""
    rows = np.array([[[0, 1, 2], [5, 6, 7]], [[7, 1, 0], [2, 0, 4]], [[0, 0, 0], [0, 0, 0]], [[-1] * 3, [-1] * 3]])
    return rows.astype(np.int16)


def check(rows: np.ndarray, *, top_k: int | None = 3) -> None:
    check_routes(rows, micro_step=5, moe_layers=LAYERS, experts=8, top_k=top_k)


def test_filler_and_rows_without_a_record_are_no_fault() -> None:
    check(routes())
    check(routes(), top_k=None)


@pytest.mark.parametrize("value", [8, 300, -2])
def test_an_expert_out_of_range_is_named_with_its_layer(value: int) -> None:
    rows = routes()
    rows[1, 1, 0] = value
    with pytest.raises(RoutingError, match=r"micro-step 5 .* outside \[0, 8\) at token 1") as raised:
        check(rows)
    assert (raised.value.layer, raised.value.expert) == (4, value)


@pytest.mark.parametrize(("token", "layer"), [(0, 0), (1, 1)])
def test_an_expert_chosen_twice_is_named_with_its_layer(token: int, layer: int) -> None:
    rows = routes()
    rows[token, layer, 2] = rows[token, layer, 0]
    with pytest.raises(RoutingError, match=f"twice at token {token}") as raised:
        check(rows)
    assert (raised.value.layer, raised.value.expert) == (LAYERS[layer], rows[token, layer, 0])


def test_a_row_that_is_zero_in_one_layer_only_is_no_filler() -> None:
    rows = routes()
    rows[0, 0] = 0
    with pytest.raises(RoutingError, match="twice"):
        check(rows)


def test_another_top_k_than_the_models_is_a_fault() -> None:
    with pytest.raises(RoutingError, match="3 experts per token, the model chooses 2"):
        check(routes(), top_k=2)


def test_groups_are_runs_of_neighbours() -> None:
    info = GroupInfo.of(5, world_size=8, size=4)
    assert (info.index, info.groups, info.rank_in_group) == (1, 2, 1)
    with pytest.raises(LaunchError, match="3 does not divide the 8 ranks"):
        GroupInfo.of(0, world_size=8, size=3)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_an_expert_parallel_size_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="FOREMOE_EXPERT_PARALLEL"):
        Settings.from_environment({"FOREMOE_EXPERT_PARALLEL": text})


def test_settings_have_defaults() -> None:
    settings = Settings.from_environment({})
    assert settings.expert_parallel is None
    assert settings.planner_config == ""
