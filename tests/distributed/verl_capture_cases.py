"""Cases of routing capture, run by every rank of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

EXPERTS, DECODER_LAYERS, TOP_K = 8, 4, 2
MOE_LAYERS = [0, 1, 3]


def micro_batch(rng: np.random.Generator, *, recorded: bool = True) -> tuple[dict[str, Any], np.ndarray]:
    """A micro-batch as veRL makes it, and its counts [moe layers, experts] by the plainest loop there is."""
    counts = np.zeros((len(MOE_LAYERS), EXPERTS), dtype=np.int64)
    tokens, masks, records = [], [], []
    for trained in (True, True, False):
        prompt, response = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        record = np.zeros((prompt + response, DECODER_LAYERS, TOP_K), dtype=np.int16)
        for row in range(prompt + response - 1 if trained else 0):
            for place, layer in enumerate(MOE_LAYERS):
                record[row, layer] = rng.choice(EXPERTS, TOP_K, replace=False)
                counts[place, record[row, layer]] += 1
        tokens.append(torch.zeros(prompt + response, dtype=torch.long))
        masks.append(torch.full((response,), int(trained)))
        records.append(torch.from_numpy(record))
    batch = {"input_ids": jagged(tokens), "response_mask": jagged(masks)}
    if recorded:
        batch["routed_experts"] = jagged(records)
    return batch, counts if recorded else np.zeros_like(counts)


def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def capture(
    rank: int,
    world: int,
    *,
    directory: str,
    group_size: int,
    first_step: int,
    steps: int,
    seed: int,
    recorded_ranks: tuple[int, ...] = (0, 1),
) -> dict[str, Any]:
    """Capture some steps of two passes and three micro-steps each; the direct counts and what was captured."""
    from foremoe.verl.capture import RoutingCapture, StepBalance, TraceKeeper
    from foremoe.verl.groups import ExpertGroups
    from foremoe.verl.observation import observe

    groups = ExpertGroups.make(size=group_size)
    events = Events()
    watcher = RoutingCapture(
        group=groups.group,
        info=groups.info,
        experts=EXPERTS,
        moe_layers=MOE_LAYERS,
        balance=StepBalance(events),  # type: ignore[arg-type]
        trace=TraceKeeper(Path(directory), model="toy", job="test"),
        device=torch.device("cpu"),
    )
    rng = np.random.default_rng([seed, rank])
    direct: dict[tuple[int, str], np.ndarray] = {}
    captured: dict[tuple[int, str], np.ndarray | None] = {}
    for step in range(first_step, first_step + steps):
        for name in ("old_log_prob", "update_0"):
            pairs = [micro_batch(rng, recorded=rank in recorded_ranks) for _ in range(3)]
            direct[step, name] = np.stack([counts for _, counts in pairs])
            observation = observe(
                [batch for batch, _ in pairs],
                moe_layers=MOE_LAYERS,
                experts=EXPERTS,
                top_k=TOP_K,
                device=torch.device("cpu"),
            )
            captured[step, name] = watcher.observe(observation, step=step, name=name)
            watcher.finish()
    return {"direct": direct, "captured": captured, "events": events.sent}


class Events:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})
