from __future__ import annotations

import numpy as np
import pytest
import torch

from foremoe.moe import NO_RECORD, SKIP
from foremoe.verl.expert_rows import Layout, layer_rows

LENGTHS = [3, 5]
LAYERS, TOP_K = 2, 2


def batch(masks: list[list[int]]) -> dict[str, torch.Tensor]:
    ids = [torch.arange(length) for length in LENGTHS]
    return {
        "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        "response_mask": torch.nested.as_nested_tensor([torch.tensor(mask) for mask in masks], layout=torch.jagged),
    }


def routes() -> np.ndarray:
    rows = np.arange(sum(LENGTHS), dtype=np.int16)[:, None, None]
    return np.broadcast_to(rows, (sum(LENGTHS), LAYERS, TOP_K)).copy()


def first_ids(rows: torch.Tensor) -> list[int]:
    assert (rows == rows[:, :1, :1]).all()
    return rows[:, 0, 0].tolist()


def test_packed_rows_are_those_of_the_samples_and_what_nothing_depends_on_is_skipped() -> None:
    rows = layer_rows(batch([[1, 1], [1, 1, 0]]), routes(), layers=LAYERS, top_k=TOP_K, layout=Layout(packed=True))
    # The last trained token of a sample is predicted one row earlier: that row is the last that counts.
    assert first_ids(rows) == [0, 1, SKIP, 3, 4, 5, SKIP, SKIP]


def test_a_rectangle_has_a_row_for_every_padding_column() -> None:
    rows = layer_rows(batch([[1, 1], [0, 0, 0]]), routes(), layers=LAYERS, top_k=TOP_K, layout=Layout(packed=False))
    assert first_ids(rows) == [0, 1, SKIP, SKIP, SKIP, SKIP, SKIP, SKIP, SKIP, SKIP]


def test_needed_rows_without_a_record_are_live() -> None:
    rows = layer_rows(batch([[1, 1], [1, 1, 1]]), None, layers=LAYERS, top_k=TOP_K, layout=Layout(packed=True))
    assert first_ids(rows) == [NO_RECORD, NO_RECORD, SKIP, NO_RECORD, NO_RECORD, NO_RECORD, NO_RECORD, SKIP]


def test_without_a_response_mask_every_row_is_needed() -> None:
    data = batch([[1, 1], [1, 1, 1]])
    del data["response_mask"]
    rows = layer_rows(data, routes(), layers=LAYERS, top_k=TOP_K, layout=Layout(packed=True))
    assert first_ids(rows) == list(range(8))


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("bucket", [1, 5, 16])
def test_padded_and_cut_rows_come_together_again(bucket: int, parts: int) -> None:
    placed = [
        Layout(packed=True, bucket=bucket, parts=parts, part=part).place(routes(), LENGTHS) for part in range(parts)
    ]
    assert len({len(each) for each in placed}) == 1
    whole = np.concatenate(placed)
    assert len(whole) % parts == 0
    assert (whole[:8] == routes()).all()
    assert (whole[8:] == SKIP).all()
