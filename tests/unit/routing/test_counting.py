"""Counting recorded choices: filler never counts, real rows always do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foremoe.errors import RoutingError
from foremoe.routing import count_experts, rank_imbalance, rank_loads, recorded_rows


@dataclass(frozen=True)
class Homes:
    home_E: np.ndarray
    ranks: int


def draw(tokens: int, layers: int, top_k: int, experts: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    order = rng.random((tokens, layers, experts)).argsort(axis=2)
    return order[:, :, :top_k].astype(np.int16)


@given(
    tokens=st.integers(0, 40),
    layers=st.integers(1, 4),
    experts=st.integers(2, 40),
    top_k=st.integers(2, 16),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_counts_equal_a_plain_loop(tokens: int, layers: int, experts: int, top_k: int, seed: int) -> None:
    top_k = min(top_k, experts)
    routed = draw(tokens, layers, top_k, experts, seed)
    rng = np.random.default_rng(seed + 1)
    filler = rng.random((tokens, layers)) < 0.3
    routed[filler] = 0
    routed[rng.random((tokens, layers)) < 0.1] = -1
    mask = rng.random(tokens) < 0.8
    want = np.zeros((layers, experts), dtype=np.int64)
    for token in np.flatnonzero(mask):
        for layer in range(layers):
            ids = routed[token, layer].tolist()
            if len(set(ids)) == top_k and -1 not in ids:
                for expert in ids:
                    want[layer, expert] += 1
    np.testing.assert_array_equal(count_experts(routed, experts=experts, mask_T=mask), want)


def test_filler_rows_are_no_record() -> None:
    routed = draw(6, 2, 4, 8, seed=3)
    routed[5] = 0
    routed[2, 1, 3] = -1
    recorded = recorded_rows(routed, experts=8)
    assert recorded[:, 0].tolist() == [True] * 5 + [False]
    assert recorded[:, 1].tolist() == [True, True, False, True, True, False]
    assert count_experts(routed, experts=8).sum(axis=1).tolist() == [20, 16]


def test_single_choice_needs_the_mask() -> None:
    routed = np.array([[[3]], [[0]]])
    assert count_experts(routed, experts=4, mask_T=np.array([True, False])).tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("bad", [-2, 8, 32000])
def test_ids_out_of_range_name_the_layer(bad: int) -> None:
    routed = draw(4, 3, 2, 8, seed=1)
    routed[2, 1, 0] = bad
    with pytest.raises(RoutingError, match="layer 1") as caught:
        count_experts(routed, experts=8)
    assert str(bad) in str(caught.value)


@pytest.mark.parametrize("routed", [np.zeros((2, 2)), np.zeros((2, 2, 2)), np.zeros(3, dtype=int)])
def test_wrong_arrays_are_refused(routed: np.ndarray) -> None:
    with pytest.raises(RoutingError):
        count_experts(routed, experts=4)


def test_wrong_mask_is_refused() -> None:
    with pytest.raises(RoutingError, match="mask"):
        count_experts(draw(4, 1, 2, 8, 0), experts=8, mask_T=np.array([True]))


def test_rank_loads_and_imbalance() -> None:
    load = np.zeros((2, 1, 2, 4), dtype=np.int32)
    load[0, 0] = [[4, 0, 1, 1], [2, 0, 0, 0]]
    home = np.array([0, 0, 1, 1])
    assert rank_loads(load, home, ranks=2).tolist() == [[[6, 2]], [[0, 0]]]
    assert rank_imbalance(load, Homes(home, 2)).tolist() == [[1.5], [1.0]]
    per_layer = rank_loads(load, home[None, :][:, ::-1], ranks=2)
    assert per_layer.tolist() == [[[2, 6]], [[0, 0]]]


def test_homes_are_checked() -> None:
    load = np.ones((1, 1, 1, 4), dtype=np.int32)
    with pytest.raises(RoutingError, match="home"):
        rank_loads(load, np.array([0, 1, 2, 3]), ranks=3)
    with pytest.raises(RoutingError, match="homes must be"):
        rank_loads(load, np.array([0, 1]), ranks=3)
