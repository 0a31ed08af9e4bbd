"""Settings of the planner: the `spec.config` of a ForeMoEPlannerConfig, field for field.

`strategy` is the dial; the other fields have defaults that suit it. Names are snake_case in Python and
camelCase in YAML and JSON.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from foremoe.checked import validated
from foremoe.planner.cost import CostConstants


class Strategy(StrEnum):
    """How replicas and token splits are chosen; one module each in `foremoe.planner.strategies`."""

    STATIC = "static"
    EPLB = "eplb"
    LPLB = "lplb"
    RELIBRA = "relibra"
    FOREMOE = "foremoe"


class PlannerConfig(BaseModel):
    """Planner settings. Immutable; equal settings give equal plans."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )

    config_version: Literal["v1alpha1"] = Field(default="v1alpha1", description="Version of these settings.")
    strategy: Strategy = Field(default=Strategy.FOREMOE, description="How experts are balanced.")
    redundant_slots: int = Field(
        default=2, ge=0, le=64, description="Replica slots of a rank in each layer, filled once per step."
    )
    dynamic_slots: int = Field(
        default=0, ge=0, le=64, description="Replica slots of a rank shared by all layers, filled per micro-step."
    )
    tolerance: float = Field(
        default=0.0, ge=0, le=1, description="Imbalance above 1.0 that needs no weights moved within a micro-step."
    )
    max_moves: int | None = Field(
        default=0,
        ge=0,
        description="Experts of a layer whose home may change at one step boundary; 0 = fixed, null = what pays.",
    )
    min_tokens_per_replica: int = Field(
        default=0, ge=0, description="A replica that would compute fewer tokens in a micro-step computes none."
    )
    replica_memory_bytes: int | None = Field(
        default=None, ge=0, description="Memory of a rank for all replica slots of all layers; a hard limit."
    )
    search_moves: int = Field(
        default=40_000, ge=0, le=10_000_000, description="Tries of the search for step replicas, a layer and step."
    )
    history_steps: int = Field(default=1, ge=1, le=1000, description="Steps a history-based strategy looks back.")
    rebalance_steps: int = Field(default=1, ge=1, le=100000, description="Steps between its re-placements.")
    indifference: float = Field(
        default=0.002, ge=0, le=1, description="Relative modelled time within which the previous plan is kept."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the searches.")
    cost: CostConstants = Field(default=CostConstants(), description="Constants of the cost model.")

    @classmethod
    def checked(cls, data: object) -> PlannerConfig:
        """Like `model_validate`, or `model_validate_json` for text, but raises PlannerError in one line."""
        return validated(cls, data, what="planner config", root="config")
