"""Modelled time of one MoE layer and micro-step: what makes one plan better than another.

Every candidate plan is priced by the same function, "do nothing" included, so the planner never returns
something it believes to be slower than no plan. The model is deliberately small: the busiest rank's
grouped GEMMs, the busiest rank on NVLink, the busiest node on its network cards, and what of the
expert transfers does not fit behind compute. Absolute seconds depend on the constants below; decisions
depend mostly on their ratios. Everything computed here is *modelled* time and reports say so.

Units: seconds, bytes, floating point operations. A pair is one (token, chosen expert). bf16 activations
and weights (2 bytes), fp32 gradients (4 bytes). A training micro-step counts as five forward passes of
compute (old log-probs, forward, recomputed forward, and two for backward) and four rounds of dispatch
and combine (two in forward passes, recompute and backward one each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from foremoe.errors import PlannerError
from foremoe.topology import Topology

MICRO_STEP_PASSES = 5
MICRO_STEP_EXCHANGES = 4

_MODEL = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False)


class Gpu(StrEnum):
    """GPU generations with known dense bf16 peaks (vendor data sheets, without sparsity)."""

    CPU = "cpu"
    """Stand-in for machines without a GPU: about one core of fp32 matrix products. Use measured links with it."""
    A100 = "a100"
    H20 = "h20"
    H100 = "h100"
    H200 = "h200"
    B200 = "b200"


PEAK_FLOPS_PER_SECOND = {
    Gpu.CPU: 0.1e12,
    Gpu.A100: 312e12,
    Gpu.H20: 148e12,
    Gpu.H100: 989e12,
    Gpu.H200: 989e12,
    Gpu.B200: 2250e12,
}


class ModelShape(BaseModel):
    """Sizes of a model that decide the cost of a layer. Defaults: Qwen3-30B-A3B (public config)."""

    model_config = _MODEL

    hidden: int = Field(default=2048, ge=1, description="Width of the residual stream.")
    expert_width: int = Field(default=768, ge=1, description="Intermediate width of one routed expert.")
    top_k: int = Field(default=8, ge=1, description="Experts per token.")
    moe_layers: int = Field(default=48, ge=1, description="Number of MoE layers.")
    dense_parameters_per_layer: float = Field(
        default=18.9e6, ge=0, description="Parameters every token passes in a layer beside routed experts."
    )
    attention_width: int = Field(default=4096, ge=0, description="Heads times mean head width.")
    vocabulary: int = Field(default=151936, ge=0, description="Rows of the output embedding.")

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert: gate, up and down projection."""
        return 3 * self.hidden * self.expert_width


class CostConstants(BaseModel):
    """Constants of the cost model beside the links, which belong to the topology."""

    model_config = _MODEL

    gpu: Gpu = Field(default=Gpu.H100, description="GPU generation; gives the peak.")
    utilisation: float = Field(default=0.5, gt=0, le=1, description="Share of the peak that grouped GEMMs reach.")
    mean_context: int = Field(default=3072, ge=0, description="Mean number of tokens attention looks back.")
    exchange_overlap: float = Field(default=0.0, ge=0, le=1, description="Share of dispatch and combine hidden.")
    copy_overlap: float = Field(
        default=0.5, ge=0, le=1, description="Share of a layer's compute behind which expert transfers hide."
    )
    model: ModelShape = Field(default=ModelShape(), description="Sizes of the model.")

    @property
    def flops_per_second(self) -> float:
        """Floating point operations a rank sustains."""
        return PEAK_FLOPS_PER_SECOND[self.gpu] * self.utilisation


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """What the cost of one layer and micro-step depends on."""

    max_rank_pairs: int
    """Pairs the busiest rank computes."""
    max_node_pairs: int
    """Pairs that enter or leave the busiest group on the network, the larger direction."""
    tokens_per_rank: float
    copy_rank_experts: int = 0
    """Experts the busiest rank sends or receives for this micro-step, inside a domain or not."""
    copy_network_experts: int = 0
    """The same over the network only."""


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Modelled time of one layer and training micro-step, by cause."""

    expert: float
    dense: float
    exchange: float
    """Dispatch and combine that is not hidden."""
    copy: float
    """Expert transfers, hidden or not."""
    exposed_copy: float
    """The part of `copy` that does not hide behind compute."""

    @property
    def total(self) -> float:
        """Seconds the layer takes."""
        return self.expert + self.dense + self.exchange + self.exposed_copy


class CostModel:
    """Prices plans on one topology. Holds constants only; `layer` is a pure function of its argument."""

    def __init__(self, constants: CostConstants, topology: Topology) -> None:
        self.constants = constants
        self.topology = topology
        shape = constants.model
        rate = constants.flops_per_second
        self.group_size = topology.size / topology.domains
        self.expert_seconds_per_pair = 2 * shape.expert_parameters / rate
        dense = 2 * shape.dense_parameters_per_layer + 4 * constants.mean_context * shape.attention_width
        dense += 2 * shape.hidden * shape.vocabulary / shape.moe_layers
        self.dense_seconds_per_token = dense / rate
        domain = topology.domain_bytes_per_second
        network = topology.network_bytes_per_second
        row_bytes = 2 * shape.hidden
        self.rank_seconds_per_pair = _sent_once(topology.size, shape.top_k) * row_bytes / domain
        self.node_seconds_per_pair = _sent_once(topology.domains, shape.top_k) * row_bytes / network / self.group_size
        weight_bytes = 2 * shape.expert_parameters
        self.copy_seconds = weight_bytes / domain
        self.network_copy_seconds = weight_bytes / network

    def layer(self, load: LayerLoad) -> LayerSeconds:
        """Modelled seconds of one layer and training micro-step."""
        expert = MICRO_STEP_PASSES * load.max_rank_pairs * self.expert_seconds_per_pair
        dense = MICRO_STEP_PASSES * load.tokens_per_rank * self.dense_seconds_per_token
        one_way = max(
            load.max_rank_pairs * self.rank_seconds_per_pair, load.max_node_pairs * self.node_seconds_per_pair
        )
        exchange = MICRO_STEP_EXCHANGES * 2 * one_way * (1 - self.constants.exchange_overlap)
        # Three passes need the weights (log-probs, forward, backward); fp32 gradients weigh as much as two.
        copy = 5 * max(
            load.copy_rank_experts * self.copy_seconds, load.copy_network_experts * self.network_copy_seconds
        )
        hidden = self.constants.copy_overlap * (expert + dense)
        return LayerSeconds(
            expert=expert, dense=dense, exchange=exchange, copy=copy, exposed_copy=max(0.0, copy - hidden)
        )

    def step_push_seconds(self, *, copy_rank_experts: int, copy_network_experts: int) -> float:
        """Pushing step replicas after the optimizer and returning their fp32 gradients, once a step and layer."""
        return 3 * max(copy_rank_experts * self.copy_seconds, copy_network_experts * self.network_copy_seconds)

    def move_seconds(self, *, rank_experts: int, network_experts: int) -> float:
        """Moving homes, by the busiest rank: weights, fp32 master weights and two fp32 moments of each expert."""
        return 7 * max(rank_experts * self.copy_seconds, network_experts * self.network_copy_seconds)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured run of a layer's grouped GEMMs or of one dispatch."""

    pairs: int
    seconds: float


def calibrate(
    constants: CostConstants, topology: Topology, *, gemm: Sequence[Measurement], exchange: Sequence[Measurement] = ()
) -> tuple[CostConstants, Topology]:
    """Fit the sustained compute rate and the domain link to measurements of one forward pass.

    `gemm`: pairs one rank computed and the seconds its grouped GEMMs took. `exchange`: pairs one rank
    received inside its domain and the seconds of that dispatch. Slopes are fitted by least squares with
    an intercept, so constant launch costs do not distort the rate. Raises PlannerError for fewer than two
    different sizes, or for times that do not grow with size.
    """
    shape = constants.model
    per_pair, _ = _fit(gemm, "gemm")
    peak = PEAK_FLOPS_PER_SECOND[constants.gpu]
    utilisation = min(1.0, 2 * shape.expert_parameters / per_pair / peak)
    fitted = constants.model_copy(update={"utilisation": utilisation})
    if not exchange:
        return fitted, topology
    per_pair, latency = _fit(exchange, "exchange")
    bandwidth = _sent_once(topology.size, shape.top_k) * 2 * shape.hidden / per_pair
    link = topology.domain_link.model_copy(
        update={"bandwidth_bytes_per_second": bandwidth, "latency_seconds": max(0.0, latency)}
    )
    network = topology.network_link.model_copy(update={"bandwidth_bytes_per_second": topology.network_bytes_per_second})
    # A matrix of measurements would win over the fitted link.
    links = {"domain_link": link, "network_link": network, "measured_bytes_per_second": None}
    return fitted, topology.model_copy(update=links)


def _fit(samples: Sequence[Measurement], what: str) -> tuple[float, float]:
    """Slope (seconds a pair) and intercept (seconds) of measured times."""
    if len({sample.pairs for sample in samples}) < 2:
        raise PlannerError(f"calibration of {what} needs at least two different sizes")
    pairs: npt.NDArray[np.float64] = np.array([sample.pairs for sample in samples], dtype=np.float64)
    seconds: npt.NDArray[np.float64] = np.array([sample.seconds for sample in samples], dtype=np.float64)
    if not np.isfinite(seconds).all():
        raise PlannerError(f"calibration of {what}: times must be finite")
    slope, intercept = np.polyfit(pairs, seconds, 1)
    if slope <= 0:
        raise PlannerError(f"calibration of {what}: times do not grow with the number of pairs")
    return float(slope), float(intercept)


def _sent_once(groups: int, top_k: int) -> float:
    """Share of pairs that cross when a token is sent at most once to each of `groups` equal groups."""
    return float((1 - (1 - 1 / groups) ** top_k) * groups / top_k)
