"""What a dense single process makes of a training: the numbers that every distribution of the experts has to meet.

They depend on the model and the batches only. So each process works them out once for all cases that differ in
strategy, group size, replicas or paths.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foremoe.moe import adapter_for
from tests.distributed.moe_models import Batch, DenseReference, make_batches, make_model, make_steep, moe_layers

# Unselected rows of a renormalised router get rounding noise as gradient; Adam with a tiny eps would turn its sign into
# a full step, and equality would be a matter of luck.
ADAM = {"lr": 1e-2, "eps": 1.0, "weight_decay": 0.1}
CLIP = 0.7
"""Gradients are clipped to this part of their norm, so that clipping always does something."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Model and batches of a training; `sources` is the number of ranks that bring a batch to each micro-step."""

    sources: int
    model_type: str = "qwen3_moe"
    dtype: str = "float64"
    lengths_MS: tuple[tuple[int, ...], ...] = ()
    experts: int = 8
    top_k: int = 2
    skew: float = 6.0
    only: tuple[int, ...] | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    live_every: int = 0
    skip_every: int = 0
    steep: bool = False

    @classmethod
    def of(
        cls,
        *,
        sources: int,
        lengths_MS: Any = None,
        only: Any = None,
        changes: dict[str, Any] | None = None,
        **rest: Any,
    ) -> Training:
        """From lists and dicts; without lengths three micro-steps of unequal ones."""
        lengths = lengths_MS or [[5 + 3 * s + m for s in range(sources)] for m in range(3)]
        return cls(
            sources=sources,
            lengths_MS=tuple(tuple(row[:sources]) for row in lengths),
            only=None if only is None else tuple(only),
            changes=tuple(sorted((changes or {}).items())),
            **rest,
        )

    def model(self) -> nn.Module:
        kind = getattr(torch, self.dtype)
        model = make_model(self.model_type, experts=self.experts, top_k=self.top_k, dtype=kind, **dict(self.changes))
        if self.steep:
            make_steep(model)
        return model

    def batches(self, step: int, *, layers: int) -> list[list[Batch]]:
        """[M][S] batches of one step."""
        batches = make_batches(
            ranks=self.sources, lengths_MS=self.lengths_MS, layers=layers, experts=self.experts, top_k=self.top_k,
            dtype=getattr(torch, self.dtype), skew=self.skew, only=self.only, seed=10 + step,
        )  # fmt: skip
        for batch in (batch for row in batches for batch in row):
            if self.live_every:
                batch.routing_TLK[1 :: self.live_every] = -1
            if self.skip_every:
                batch.routing_TLK[self.skip_every - 1 :: self.skip_every] = -2
        return batches


@dataclass(frozen=True, kw_only=True)
class DenseStep:
    """One step's batches and numbers; gradients are before clipping, parameters after the update."""

    batches: list[list[Batch]]
    logits: list[list[torch.Tensor]]
    gradients: dict[str, torch.Tensor]
    norm: float
    parameters: dict[str, torch.Tensor]


class DenseTraining:
    """The steps of a training, each worked out when it is first asked for."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._reference = DenseReference(training.model())
        self._optimizer = torch.optim.AdamW(self._reference.model.parameters(), foreach=False, **ADAM)
        self._steps: list[DenseStep] = []

    def step(self, number: int) -> DenseStep:
        while len(self._steps) <= number:
            self._steps.append(self._next())
        return self._steps[number]

    def _next(self) -> DenseStep:
        model = self._reference.model
        batches = self._training.batches(len(self._steps), layers=moe_layers(model))
        logits: list[list[torch.Tensor]] = []
        for row in batches:
            logits.append([])
            for batch in row:
                loss, out = self._reference.run(batch)
                loss.backward()
                logits[-1].append(out)
        gradients = {name: value.clone() for name, value in self._reference.gradients().items()}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP * norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        parameters = {name: value.clone() for name, value in model.state_dict().items()}
        return DenseStep(batches=batches, logits=logits, gradients=gradients, norm=norm, parameters=parameters)


def steepness(training: Training) -> tuple[float, float]:
    """The smallest probability that the chosen experts of a token have together in the first step, and how many times
    larger the gradients of small embeddings are than the others'.

    For models whose routers return (logits, weights, ids).
    """
    reference = DenseReference(training.model())
    masses: list[float] = []

    def weigh(_router: nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        logits, _, ids = output
        masses.append(float(logits.detach().softmax(-1).gather(-1, ids).sum(-1).min()))

    for site in adapter_for(reference.model).sites(reference.model):
        site.block.get_submodule("gate").register_forward_hook(weigh)
    for row in training.batches(0, layers=moe_layers(reference.model)):
        for batch in row:
            reference.run(batch)[0].backward()
    embedding = reference.model.get_input_embeddings().weight
    norms = embedding.grad.norm(dim=-1)
    small, others = norms[::2], norms[1::2]
    return min(masses), float(small[small > 0].mean() / others[others > 0].mean())


dense = functools.cache(DenseTraining)
"""The numbers of a training, kept by this process."""
