"""Expert parallelism with known routing: replayed choices, executed plans, exact gradients."""

from foremoe.moe.adapters import ModelAdapter, MoESite, adapter_for, register_adapter, supported_model_types
from foremoe.moe.record import NO_RECORD, SKIP
from foremoe.moe.report import Mismatch, StepReport
from foremoe.moe.runtime import ExpertParallelRuntime, expert_parallel

__all__ = [
    "NO_RECORD",
    "SKIP",
    "ExpertParallelRuntime",
    "Mismatch",
    "MoESite",
    "ModelAdapter",
    "StepReport",
    "adapter_for",
    "expert_parallel",
    "register_adapter",
    "supported_model_types",
]
