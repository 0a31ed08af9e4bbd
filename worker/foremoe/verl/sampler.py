"""Batched sampling from a transformers model, with the experts that every fed token chose.

A rollout on a processor is bound by the number of forward calls, not by their size. So requests that wait together run
together: left-padded, with a shared key-value cache, each row with its own temperature and limits. Rows that have ended
stay in the batch as padding until few enough are left that compacting pays.

Always: a row's tokens depend on its own seed and prompt, not on its neighbours (up to rounding); log-probs are those of
`softmax(logits / temperature)`, as veRL recomputes them; routes cover exactly the tokens that were fed, so the last
sampled token has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foremoe.errors import RoutingError
from foremoe.verl.moe_layers import experts_modules

Int16Array = npt.NDArray[np.int16]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue."""

    prompt: list[int]
    max_tokens: int
    seed: int
    """Of this request's own random numbers."""
    temperature: float = 1.0
    """0 picks the likeliest token."""
    top_p: float = 1.0
    top_k: int = -1
    ignore_end: bool = False


@dataclass(kw_only=True)
class Sample:
    """What was sampled for one request."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    routes: Int16Array | None = None
    """Chosen experts, int16 [prompt + sampled - 1, decoder layers, top_k]; zeros in layers without experts."""


class RouteRecorder:
    """Keeps what the routers chose during one forward call."""

    def __init__(self, model: torch.nn.Module, *, decoder_layers: int) -> None:
        self._decoder_layers = decoder_layers
        self._chosen: dict[int, torch.Tensor] = {}
        self._modules = experts_modules(model)
        if not self._modules:
            raise RoutingError("the model has no Mixture-of-Experts layer, so there is no routing to record")
        for layer, module in self._modules.items():
            module.register_forward_pre_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def record(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            self._chosen[layer] = args[1]

        return record

    def take(self, *, rows: int, columns: int) -> torch.Tensor:
        """Choices of the last forward call: int16 [rows, columns, decoder layers, top_k]."""
        missing = next((layer for layer in self._modules if layer not in self._chosen), None)
        if missing is not None:
            raise RoutingError("the forward call did not reach the experts", layer=missing)
        top_k = next(iter(self._chosen.values())).shape[-1]
        routes = torch.zeros(rows, columns, self._decoder_layers, top_k, dtype=torch.int16)
        for layer, chosen in self._chosen.items():
            routes[:, :, layer] = chosen.reshape(rows, columns, top_k).to(torch.int16)
        self._chosen.clear()
        return routes


class Sampler:
    """Continues batches of prompts with one model. Not thread-safe: one call at a time."""

    def __init__(self, model: Any, *, end_tokens: frozenset[int], pad_token: int, record_routes: bool) -> None:
        self._model = model
        self._end_tokens = end_tokens
        self._pad_token = pad_token
        self._recorder = RouteRecorder(model, decoder_layers=model.config.num_hidden_layers) if record_routes else None

    @torch.no_grad()
    def run(self, requests: list[Request]) -> list[Sample]:
        """One sample per request, in order."""
        if not requests:
            return []
        samples = [Sample() for _ in requests]
        batch = _Batch(requests, self._pad_token)
        routes: list[list[torch.Tensor]] = [[] for _ in requests]
        while batch.active:
            output = self._model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids,
                past_key_values=batch.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            if self._recorder is not None:
                self._keep_routes(batch, routes)
            tokens, log_probs = _choose(output.logits[:, -1].float(), batch)
            ended = []
            for row, request in enumerate(batch.requests):
                sample = samples[request]
                if row in batch.ended:
                    continue
                token = int(tokens[row])
                sample.tokens.append(token)
                sample.log_probs.append(float(log_probs[row]))
                spec = requests[request]
                if len(sample.tokens) >= spec.max_tokens or (token in self._end_tokens and not spec.ignore_end):
                    ended.append(row)
            batch.advance(tokens, output.past_key_values, ended)
        for sample, pieces in zip(samples, routes, strict=True):
            if pieces:
                sample.routes = torch.cat(pieces).numpy()
        return samples

    def _keep_routes(self, batch: _Batch, routes: list[list[torch.Tensor]]) -> None:
        assert self._recorder is not None
        rows, columns = batch.input_ids.shape
        chosen = self._recorder.take(rows=rows, columns=columns)
        for row, request in enumerate(batch.requests):
            if row not in batch.ended:
                routes[request].append(chosen[row, batch.padding[row] if columns > 1 else 0 :].clone())


class _Batch:
    """State of the rows that still run: inputs of the next forward call, cache, random numbers."""

    def __init__(self, requests: list[Request], pad_token: int) -> None:
        longest = max((len(request.prompt) for request in requests), default=0)
        self.requests = list(range(len(requests)))
        self.ended: set[int] = set()
        self.padding = [longest - len(request.prompt) for request in requests]
        self.input_ids = torch.tensor(
            [[pad_token] * pad + request.prompt for pad, request in zip(self.padding, requests, strict=True)],
            dtype=torch.long,
        )
        columns = torch.arange(longest).unsqueeze(0)
        offsets = torch.tensor(self.padding, dtype=torch.long).unsqueeze(1)
        self.attention_mask = (columns >= offsets).long()
        self.position_ids = (columns - offsets).clamp(min=0)
        self.cache: Any = None
        self.column = 0
        self.temperature = torch.tensor([request.temperature for request in requests])
        self.top_p = torch.tensor([request.top_p for request in requests])
        self.top_k = [request.top_k for request in requests]
        steps = max((request.max_tokens for request in requests), default=0)
        self.uniforms = torch.tensor(
            np.array([np.random.default_rng(request.seed).random(steps) for request in requests]).reshape(-1, steps)
        )

    @property
    def active(self) -> bool:
        """True while a row still runs."""
        return len(self.ended) < len(self.requests)

    def advance(self, tokens: torch.Tensor, cache: Any, ended: list[int]) -> None:
        """Feed the sampled tokens next; rows in `ended` have finished."""
        self.ended.update(ended)
        self.cache = cache
        self.column += 1
        self.input_ids = tokens.unsqueeze(1)
        self.position_ids = self.position_ids[:, -1:] + 1
        self.attention_mask = torch.cat([self.attention_mask, torch.ones(len(self.requests), 1, dtype=torch.long)], 1)
        if self.active and 2 * len(self.ended) >= len(self.requests):
            self._compact()

    def _compact(self) -> None:
        """Drop ended rows; worth its copy of the cache once they are half of the batch."""
        keep = [row for row in range(len(self.requests)) if row not in self.ended]
        index = torch.tensor(keep)
        self.cache.batch_select_indices(index)
        for name in ("input_ids", "position_ids", "attention_mask", "temperature", "top_p", "uniforms"):
            setattr(self, name, getattr(self, name)[index])
        for name in ("requests", "padding", "top_k"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in keep])
        self.ended = set()


def _choose(logits: torch.Tensor, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled token and its log-prob per row, from logits [B, V]."""
    greedy = batch.temperature == 0
    scaled = logits / torch.where(greedy, torch.ones_like(batch.temperature), batch.temperature).unsqueeze(1)
    log_probs = scaled.log_softmax(-1)
    weights = _truncate(log_probs.exp().double(), batch)
    cumulative = weights.cumsum(-1)
    # Inverse of the distribution function: one random number a token, whatever else is in the batch.
    threshold = batch.uniforms[:, batch.column].unsqueeze(1) * cumulative[:, -1:]
    tokens = (cumulative <= threshold).sum(-1).clamp(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _truncate(weights: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """Zero what top-k and top-p leave out, per row; weights are [B, V]."""
    if all(k <= 0 for k in batch.top_k) and bool((batch.top_p >= 1).all()):
        return weights
    ordered, order = weights.sort(descending=True, dim=-1)
    rank = torch.arange(weights.shape[1]).unsqueeze(0)
    limits = torch.tensor([k if k > 0 else weights.shape[1] for k in batch.top_k]).unsqueeze(1)
    before = ordered.cumsum(-1) - ordered
    keep = (rank < limits) & (before < batch.top_p.unsqueeze(1))
    return torch.zeros_like(weights).scatter(1, order, ordered * keep)
