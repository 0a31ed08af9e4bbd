"""Which rows of a micro-batch count."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from foremoe.errors import RoutingError  # noqa: E402
from foremoe.verl import rows  # noqa: E402

LAYERS, TOP_K = 3, 2


def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def batch(lengths: list[int], masks: list[list[int]]) -> dict[str, torch.Tensor]:
    """Samples whose record is expert 1 and 2 wherever the rollout fed a token, zeros where it did not."""
    routes = []
    for length, mask in zip(lengths, masks, strict=True):
        fed = length - 1 if any(mask) else 0
        record = torch.zeros(length, LAYERS, TOP_K, dtype=torch.int16)
        record[:fed] = torch.tensor([1, 2], dtype=torch.int16)
        routes.append(record)
    return {
        "input_ids": jagged([torch.zeros(length, dtype=torch.long) for length in lengths]),
        "response_mask": jagged([torch.tensor(mask) for mask in masks]),
        "routed_experts": jagged(routes),
    }


def test_the_last_sampled_token_has_no_record() -> None:
    routes = rows.recorded_routes(batch([5, 4], [[1, 1], [1]]), moe_layers=[0, 1, 2])
    assert routes is not None
    counted = (routes >= 0).all(axis=(1, 2))
    assert counted.tolist() == [True] * 4 + [False] + [True] * 3 + [False]


def test_a_padding_sample_has_no_record_at_all() -> None:
    routes = rows.recorded_routes(batch([5, 3], [[1, 1], [0, 0]]), moe_layers=[0])
    assert routes is not None
    assert (routes[5:] == rows.NO_RECORD).all()


def test_the_tail_of_a_dialogue_has_no_record() -> None:
    real = rows.real_rows([8], [np.array([True, True, False, False])])
    # Response tokens sit at 4..7; the last trained one, 5, is predicted by row 4.
    assert real.tolist() == [True] * 5 + [False] * 3


def test_tool_output_between_two_answers_counts() -> None:
    real = rows.real_rows([8], [np.array([True, False, False, True])])
    assert real.tolist() == [True] * 7 + [False]


def test_layers_without_experts_are_left_out() -> None:
    routes = rows.recorded_routes(batch([4], [[1]]), moe_layers=[0, 2])
    assert routes is not None and routes.shape == (4, 2, TOP_K)


def test_a_batch_without_a_record() -> None:
    assert rows.recorded_routes({"input_ids": jagged([torch.zeros(3)])}, moe_layers=[0]) is None


def test_a_record_of_too_few_layers_is_an_error() -> None:
    with pytest.raises(RoutingError, match="3 layers"):
        rows.recorded_routes(batch([4], [[1]]), moe_layers=[0, 3])


def test_a_record_of_another_length_is_an_error() -> None:
    data = batch([4], [[1]])
    data["routed_experts"] = jagged([torch.zeros(3, LAYERS, TOP_K, dtype=torch.int16)])
    with pytest.raises(RoutingError, match="3 rows for 4 tokens"):
        rows.recorded_routes(data, moe_layers=[0])


def test_a_padded_record_is_read_like_a_jagged_one() -> None:
    data = batch([5, 3], [[1, 1], [1]])
    expected = rows.recorded_routes(data, moe_layers=[0, 1])
    padded = data | {"routed_experts": torch.nested.to_padded_tensor(data["routed_experts"], 0)}
    found = rows.recorded_routes(padded, moe_layers=[0, 1])
    assert expected is not None and found is not None and (expected == found).all()
