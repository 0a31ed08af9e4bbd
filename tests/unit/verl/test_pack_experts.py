"""Weights on their way from the trainer to the rollout."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from foremoe.errors import TransferError  # noqa: E402
from foremoe.verl.packing import pack_experts  # noqa: E402


def per_expert(experts: int) -> list[tuple[str, torch.Tensor]]:
    weights = [("model.embed_tokens.weight", torch.full((2, 2), 7.0))]
    for expert in range(experts):
        for number, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            shape = (3, 4) if name != "down_proj" else (4, 3)
            weights.append(
                (f"model.layers.0.mlp.experts.{expert}.{name}.weight", torch.full(shape, expert + number / 10))
            )
    return weights


def test_experts_are_stacked_gate_before_up() -> None:
    named = pack_experts(per_expert(3))
    packed = named["model.layers.0.mlp.experts.gate_up_proj"]
    assert packed.shape == (3, 6, 4) and named["model.layers.0.mlp.experts.down_proj"].shape == (3, 4, 3)
    assert packed[2, 0, 0] == pytest.approx(2.0) and packed[2, 3, 0] == pytest.approx(2.1)
    assert named["model.embed_tokens.weight"][0, 0] == 7.0


def test_a_missing_projection_names_its_expert() -> None:
    weights = [entry for entry in per_expert(3) if ".1.up_proj" not in entry[0]]
    with pytest.raises(TransferError, match=r"up_proj.*\(expert 1\)"):
        pack_experts(weights)
