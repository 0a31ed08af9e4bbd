from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foremoe.moe.dispatch import make_split, map_pairs
from foremoe.moe.layer import _combine, _weights_gradient


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[np.ndarray], np.ndarray, list[list[int]]]:
    """Ids of every source [T, K], tokens_SER that fit them, and the experts each rank holds in group order."""
    ranks, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    top_k = draw(st.integers(1, experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = []
    tokens_SER = np.zeros((ranks, experts, ranks), dtype=np.int64)
    hosts = rng.random((ranks, experts)) < 0.5
    hosts[rng.integers(ranks, size=experts), np.arange(experts)] = True
    for source in range(ranks):
        tokens = draw(st.integers(0, 7))
        chosen = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]) if tokens else np.zeros((0, top_k))
        chosen = chosen.astype(np.int64)
        chosen[rng.random(tokens) < 0.2] = -2
        ids.append(chosen)
        for expert in range(experts):
            count = int((chosen == expert).sum())
            where = rng.choice(np.flatnonzero(hosts[:, expert]), size=count)
            tokens_SER[source, expert] = np.bincount(where, minlength=ranks)
    held = [rng.permutation(np.flatnonzero(hosts[rank])).tolist() for rank in range(ranks)]
    return ids, tokens_SER, held


@given(exchanges())
@settings(max_examples=60)
def test_every_pair_reaches_its_expert_once_and_comes_back(case: tuple[list, np.ndarray, list]) -> None:
    ids, tokens_SER, held = case
    ranks, experts, _ = tokens_SER.shape
    splits, maps = [], []
    for rank in range(ranks):
        group_of_E = np.full(experts, -1)
        group_of_E[held[rank]] = np.arange(len(held[rank]))
        split = make_split(tokens_SER[rank], tokens_SER[:, :, rank], group_of_E, groups=len(held[rank]))
        splits.append(split)
        maps.append(map_pairs(torch.from_numpy(ids[rank]), split, experts=experts))
    # Rows carry (source, pair) instead of numbers.
    sent = [[(s, int(pair)) for pair in maps[s].pair_P] for s in range(ranks)]
    received: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for source in range(ranks):
        start = 0
        for target in range(ranks):
            size = splits[source].send_sizes[target]
            assert size == splits[target].receive_sizes[source]
            received[target] += sent[source][start : start + size]
            start += size
    for rank in range(ranks):
        grouped = [received[rank][i] for i in maps[rank].regroup_N]
        start = 0
        for expert, count in zip(held[rank], splits[rank].group_counts, strict=True):
            for source, pair in grouped[start : start + count]:
                assert ids[source].reshape(-1)[pair] == expert
            start += count
        assert start == splits[rank].received
        assert [grouped[i] for i in maps[rank].ungroup_N] == received[rank]
        top_k = ids[rank].shape[1]
        assert [int(p) // top_k for p in maps[rank].pair_P] == maps[rank].token_P.tolist()
        for (token, choice), row in np.ndenumerate(maps[rank].row_TK.numpy()):
            if ids[rank][token, choice] < 0:
                assert row == splits[rank].sent
            else:
                assert sent[rank][row] == (rank, token * top_k + choice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_does_not_depend_on_where_rows_came_from(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(13, 8, dtype=dtype), torch.randn(4, 3)
    row_TK = torch.randperm(12)[:12].view(4, 3)
    order = torch.randperm(12)
    shuffled = torch.cat([rows[:12][order], rows[12:]])
    position = torch.empty(12, dtype=torch.int64)
    position[order] = torch.arange(12)
    assert torch.equal(_combine(rows, row_TK, weights), _combine(shuffled, position[row_TK], weights))


def test_combine_and_its_gradients_equal_autograd() -> None:
    torch.manual_seed(1)
    rows = torch.randn(7, 5, dtype=torch.float64)
    rows[-1] = 0
    rows.requires_grad_()
    weights = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    row_TK = torch.tensor([[0, 3], [6, 1], [4, 2]])
    expected = (rows[row_TK] * weights[..., None]).sum(dim=1)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(_combine(rows.detach(), row_TK, weights.detach()), expected)
    (wanted,) = torch.autograd.grad(expected, weights, grad)
    torch.testing.assert_close(_weights_gradient(grad, rows.detach(), row_TK, weights.detach()), wanted)
