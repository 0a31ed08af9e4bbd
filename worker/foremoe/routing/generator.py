"""Synthetic traces: stable steps, noisy micro-steps, deterministic by seed.

Until traces of large RL runs are public, loads are drawn from a model of how routing varies: an expert's log
odds are the sum of a popularity, an offset of the prompt's domain, one of the prompt and one of the response.
All tokens of a response share them, so a micro-step of few responses is far more skewed than the step; that is
what planning per micro-step must cope with. Tokens inside a response are over-dispersed (gamma).

The ladder mild..extreme sets the four standard deviations; docs/trace-format.md gives its statistics beside
those of a recorded run. Layers are independent given the prompts, so a trace is made layer by layer: any (step,
layer) can be drawn alone, in any order, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foremoe.errors import TraceError
from foremoe.routing.trace import TraceWriter
from foremoe.routing.trace_files import TraceMeta

Floats = npt.NDArray[np.float64]

_DOMAINS = 6
_RESPONSES_PER_PROMPT = 16
_MEAN_LENGTH = 4096.0
_LENGTH_SIGMA = 0.7
_LENGTH_LIMITS = (64, 16384)
_DRIFT = 0.05
"""Change of an expert's popularity from step to step."""
_DISPERSION = 16.0


class Skew(StrEnum):
    """Rungs of the ladder; `none` routes uniformly at random."""

    NONE = "none"
    MILD = "mild"
    MEDIUM = "medium"
    STRONG = "strong"
    EXTREME = "extreme"


class Order(StrEnum):
    """How responses are dealt to micro-steps: all of a prompt next to each other, or shuffled."""

    PROMPT = "prompt"
    SHUFFLE = "shuffle"


# Standard deviations of popularity, domain, prompt and response offsets.
_SIGMAS = {
    Skew.NONE: (0.0, 0.0, 0.0, 0.0),
    Skew.MILD: (0.35, 0.30, 0.25, 0.20),
    Skew.MEDIUM: (0.50, 0.50, 0.40, 0.30),
    Skew.STRONG: (0.65, 0.75, 0.55, 0.40),
    Skew.EXTREME: (0.80, 1.00, 0.70, 0.50),
}


@dataclass(frozen=True, kw_only=True)
class TraceSpec:
    """What to generate."""

    experts: int = 128
    layers: int = 4
    ranks: int = 8
    top_k: int = 8
    micro_steps: int = 16
    tokens_per_rank: int = 4096
    """Tokens of every rank in every micro-step."""
    steps: int = 2
    skew: Skew = Skew.MEDIUM
    order: Order = Order.PROMPT
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (
            ("experts", 1 << 14),
            ("layers", 1 << 12),
            ("ranks", 1 << 10),
            ("micro_steps", 1 << 14),
            ("tokens_per_rank", 1 << 24),
            ("steps", 1 << 20),
        ):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise TraceError(f"{name} must be in [1, {most}], got {value}")
        if not 1 <= self.top_k <= self.experts:
            raise TraceError(f"top_k must be in [1, {self.experts}], got {self.top_k}")
        if self.seed < 0:
            raise TraceError(f"seed must not be negative, got {self.seed}")

    @property
    def meta(self) -> TraceMeta:
        """Header of the trace."""
        return TraceMeta(
            experts=self.experts,
            layers=self.layers,
            source_ranks=self.ranks,
            top_k=self.top_k,
            model=f"synthetic {self.skew} skew",
            created_by="foremoe trace generate",
            extra={key: str(value) for key, value in asdict(self).items()},
        )


@dataclass(frozen=True, eq=False)
class _Batch:
    """Chunks of one step: pieces of a response that fall into one bin (micro-step and rank)."""

    prompt_C: npt.NDArray[np.int64]
    response_C: npt.NDArray[np.int64]
    bin_C: npt.NDArray[np.int64]
    tokens_C: npt.NDArray[np.int64]
    domain_P: npt.NDArray[np.int64]
    responses: int


def generate_layer(spec: TraceSpec, *, step: int, layer: int) -> npt.NDArray[np.int32]:
    """Counts of one layer and step: int32 [micro_steps, ranks, experts]; every (micro-step, rank) sums to top_k * T."""
    return _layer(spec, _batch(spec, step), step, layer)


def write_trace(path: str | Path, spec: TraceSpec, *, progress: Callable[[], object] = lambda: None) -> None:
    """Generate a trace, one pass `update_0` per step, with one layer in memory at a time.

    `progress` is called after every layer. Raises TraceError if `path` cannot take the trace.
    """
    writer = TraceWriter(path, spec.meta, resume_step=0)
    for step in range(spec.steps):
        batch = _batch(spec, step)

        def layers(step: int = step, batch: _Batch = batch) -> Iterator[npt.NDArray[np.int32]]:
            for layer in range(spec.layers):
                yield _layer(spec, batch, step, layer)
                progress()

        writer.append_layers("update_0", step, layers())


def _batch(spec: TraceSpec, step: int) -> _Batch:
    """Draw prompts and response lengths of a step and cut the stream of tokens into bins."""
    rng = np.random.default_rng([spec.seed, 1, step])
    mix_D = np.random.default_rng([spec.seed, 0]).dirichlet(np.full(_DOMAINS, 2.0))
    total = spec.micro_steps * spec.ranks * spec.tokens_per_rank
    lengths = np.empty(0, dtype=np.int64)
    scale = np.log(_MEAN_LENGTH) - _LENGTH_SIGMA**2 / 2
    while lengths.sum() < total:
        drawn = rng.lognormal(scale, _LENGTH_SIGMA, _RESPONSES_PER_PROMPT * 16)
        lengths = np.concatenate([lengths, np.clip(drawn, *_LENGTH_LIMITS).astype(np.int64)])
    response_N = np.arange(lengths.size)
    if spec.order is Order.SHUFFLE:
        # Only responses that fit into the step are dealt out, so that both orders see the same samples.
        used = int(np.searchsorted(np.cumsum(lengths), total)) + 1
        response_N = response_N[:used]
        rng.shuffle(response_N)
    ends = np.cumsum(lengths[response_N])
    cuts = np.union1d(ends, np.arange(0, total + 1, spec.tokens_per_rank))
    cuts = cuts[cuts <= total]
    starts, tokens = cuts[:-1], np.diff(cuts)
    response_C = response_N[np.searchsorted(ends, starts, side="right")]
    prompts = lengths.size // _RESPONSES_PER_PROMPT
    return _Batch(
        prompt_C=response_C // _RESPONSES_PER_PROMPT,
        response_C=response_C,
        bin_C=starts // spec.tokens_per_rank,
        tokens_C=tokens,
        domain_P=rng.choice(_DOMAINS, size=prompts, p=mix_D),
        responses=lengths.size,
    )


def _layer(spec: TraceSpec, batch: _Batch, step: int, layer: int) -> npt.NDArray[np.int32]:
    popularity, domain, prompt, response = _SIGMAS[spec.skew]
    fixed = np.random.default_rng([spec.seed, 2, layer])
    pop_E = fixed.normal(0.0, popularity, spec.experts)
    offset_DE = fixed.normal(0.0, domain, (_DOMAINS, spec.experts))
    if spec.skew is not Skew.NONE:
        for past in range(step):
            drift = np.random.default_rng([spec.seed, 3, layer, past])
            pop_E += drift.normal(0.0, _DRIFT, spec.experts)
    rng = np.random.default_rng([spec.seed, 4, layer, step])
    prompt_PE = offset_DE[batch.domain_P] + rng.normal(0.0, prompt, (batch.domain_P.size, spec.experts))
    response_NE = rng.normal(0.0, response, (batch.responses, spec.experts))
    odds_CE = pop_E + prompt_PE[batch.prompt_C] + response_NE[batch.response_C]
    share_CE = inclusion(odds_CE, spec.top_k)
    mean_CE = share_CE * batch.tokens_C[:, None]
    drawn_CE = _DISPERSION * rng.standard_gamma(np.maximum(mean_CE / _DISPERSION, 1e-3))
    drawn_CE = np.minimum(drawn_CE, batch.tokens_C[:, None])
    bins = spec.micro_steps * spec.ranks
    load_BE = np.zeros((bins, spec.experts))
    np.add.at(load_BE, batch.bin_C, drawn_CE)
    counts = _round_rows(load_BE, pairs=spec.top_k * spec.tokens_per_rank, most=spec.tokens_per_rank)
    return counts.reshape(spec.micro_steps, spec.ranks, spec.experts)


def inclusion(odds_CE: Floats, top_k: int) -> Floats:
    """Chance of each expert to be among `top_k` distinct choices, from log odds: rows sum to top_k, at most 1."""
    weight = np.exp(odds_CE - odds_CE.max(axis=1, keepdims=True))
    share: Floats = np.minimum(1.0, top_k * weight / weight.sum(axis=1, keepdims=True))
    for _ in range(8):
        full = share >= 1.0
        open_weight = np.where(full, 0.0, weight)
        left = top_k - full.sum(axis=1, keepdims=True)
        sums = open_weight.sum(axis=1, keepdims=True)
        share = np.where(full, 1.0, np.minimum(1.0, left * open_weight / np.where(sums > 0, sums, 1.0)))
    return share


def _round_rows(load_BE: Floats, *, pairs: int, most: int) -> npt.NDArray[np.int32]:
    """Scale every row to `pairs` and round by largest remainders; no entry exceeds `most`, as ids are distinct."""
    for _ in range(8):
        full = load_BE >= most
        left = pairs - most * full.sum(axis=1, keepdims=True)
        free = np.where(full, 0.0, load_BE)
        load_BE = np.where(full, most, free * left / np.maximum(free.sum(axis=1, keepdims=True), 1e-9))
    counts = np.floor(load_BE).astype(np.int64)
    counts = np.minimum(counts, most)
    remainder = np.where(counts < most, load_BE - counts, -1.0)
    missing = pairs - counts.sum(axis=1)
    rank_BE = np.argsort(np.argsort(-remainder, axis=1, kind="stable"), axis=1, kind="stable")
    counts += rank_BE < missing[:, None]
    return counts.astype(np.int32)
