"""The training engine: veRL's FSDP2 engine, watched. Loaded by `actor_rollout_ref.model.external_lib`.

Registered for `strategy=fsdp2` under the vendor `foremoe`, on CUDA devices and on the processor. veRL splits a pass
into micro-batches in `prepare_micro_batches` and walks them in a loop of its own; the one hook is there, because only
there all micro-steps of a pass are known and none has run. Everything else is inherited.

On the processor two gaps of veRL are closed: the FSDP2 classes are registered for it, and the reference model's
off-loading, which pins memory, is told not to.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.engine.fsdp.transformer_impl as fsdp
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.base import EngineRegistry

from foremoe.errors import LaunchError, RoutingError
from foremoe.verl import plugin
from foremoe.verl.capture import RoutingCapture, StepBalance, TraceKeeper
from foremoe.verl.events import sender
from foremoe.verl.groups import ExpertGroups
from foremoe.verl.moe_layers import choices, expert_count, experts_modules
from foremoe.verl.observation import Observation, observe
from foremoe.verl.settings import Settings
from foremoe_operator.api.constants import ENGINE_VENDOR

logger = logging.getLogger(__name__)

_BACKEND = "fsdp2"


class _Shared:
    """What the engines of one process share: policy and reference write one trace and one balance."""

    def __init__(self) -> None:
        self.settings = Settings.from_environment()
        self.balance = StepBalance(sender())
        self.trace: TraceKeeper | None = None
        self.running: ForeMoEEngine | None = None

    def trace_of(self, model: str) -> TraceKeeper | None:
        if self.trace is None and self.settings.trace_directory is not None:
            self.trace = TraceKeeper(self.settings.trace_directory, model=model, job=self.settings.job)
        return self.trace


_shared = _Shared()


class ForeMoEEngine(fsdp.FSDPEngineWithLMHead):  # type: ignore[misc]
    """veRL's FSDP2 engine for language models, with routing capture."""

    settings: Settings
    _capture: RoutingCapture | None = None
    _pass_step = -1
    _pass_count = 0

    def __new__(cls, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> ForeMoEEngine:
        """The expert-parallel engine where model and settings allow it; veRL asks for one class for all models."""
        settings = Settings.from_environment()
        if cls is ForeMoEEngine:
            from foremoe.verl.expert_engine import ExpertParallelEngine, reason_against

            reason = reason_against(model_config, engine_config, settings)
            if reason is None:
                cls = ExpertParallelEngine
            elif dist.get_rank() == 0:
                logger.warning("foremoe: no expert parallelism, veRL's own FSDP2 engine is watched: %s", reason)
        engine: ForeMoEEngine = super().__new__(cls)
        engine.settings = settings
        return engine

    def initialize(self) -> None:
        """Build the model, then set up capture; collective over all ranks."""
        super().initialize()
        self._moe_layers = list(experts_modules(self.module))
        self._capture = self._make_capture() if self._moe_layers else None

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        name = get_device_name()
        return torch.device("cpu") if name == "cpu" else torch.device(name, get_device_id())

    @cached_property
    def groups(self) -> ExpertGroups:
        """EP groups of all ranks; made on first use, which is collective."""
        return ExpertGroups.make(size=expert_parallel_size(self.model_config.hf_config, self.settings))

    def _make_capture(self) -> RoutingCapture:
        return RoutingCapture(
            group=self.groups.group,
            info=self.groups.info,
            experts=expert_count(self.model_config.hf_config),
            moe_layers=self._moe_layers,
            balance=_shared.balance,
            trace=_shared.trace_of(str(self.model_config.path)),
            device=self.device,
            counts_rows=dist.get_rank() % self.ulysses_sequence_parallel_size == 0,
        )

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """As veRL's; while it runs, the micro-batches that veRL makes are observed."""
        self._pass_name = self._name_pass(data, forward_only=forward_only)
        _shared.running = self
        try:
            output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        finally:
            _shared.running = None
        self.finish_pass(output)
        return output

    def on_micro_batches(self, micro_batches: list[Any]) -> None:
        """Called once per pass, before its first micro-step; collective over all ranks."""
        if self._capture is None:
            return
        observation = observe(
            micro_batches,
            moe_layers=self._moe_layers,
            experts=expert_count(self.model_config.hf_config),
            top_k=choices(self.model_config.hf_config),
            device=self.device,
        )
        if observation.problem is not None and dist.get_rank() == 0:
            logger.error(
                "foremoe: step %d, pass %s: %s; all ranks drop the record of this pass",
                self._pass_step, self._pass_name, observation.problem,
            )  # fmt: skip
        self._capture.observe(observation, step=self._pass_step, name=self._pass_name)
        self.begin_pass(micro_batches, observation)

    def begin_pass(self, micro_batches: list[Any], observation: Observation) -> None:
        """The micro-batches of a pass and their record are known; nothing has run yet."""

    def finish_pass(self, output: dict[str, Any]) -> None:
        """A pass has run; `output` is what veRL gets."""
        if self._capture is not None:
            self._capture.finish()

    def _name_pass(self, data: Any, *, forward_only: bool) -> str:
        step = step_of(data)
        kind = "forward" if forward_only else "update"
        if (step, kind) != (self._pass_step, getattr(self, "_pass_kind", None)):
            self._pass_step, self._pass_kind, self._pass_count = step, kind, 0
        number = self._pass_count
        self._pass_count += 1
        if not forward_only:
            return f"update_{number}"
        # A reference that shares the policy's engine (an adapter switched off) comes second.
        return "ref" if self.engine_config.forward_only or number else "old_log_prob"


def expert_parallel_size(hf_config: Any, settings: Settings) -> int:
    """Ranks of an EP group: as set, or the largest that divides ranks and experts."""
    if settings.expert_parallel is not None:
        return settings.expert_parallel
    return math.gcd(dist.get_world_size(), expert_count(hf_config))


def step_of(data: Any) -> int:
    """The RL step a batch belongs to. Raises RoutingError if the batch does not say."""
    value = tu.get(data, key="global_steps", default=None)
    if value is None:
        raise RoutingError("the batch carries no global_steps; is this veRL's V1 trainer?")
    if isinstance(value, torch.Tensor):
        return int((value.values() if value.is_nested else value).max())
    return int(max(value)) if isinstance(value, list | tuple) else int(value)


def _observed(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_micro_batches(*args: Any, **kwargs: Any) -> Any:
        micro_batches, indices = original(*args, **kwargs)
        if _shared.running is not None:
            _shared.running.on_micro_batches(list(micro_batches))
        return micro_batches, indices

    prepare_micro_batches.foremoe = True  # type: ignore[attr-defined]
    return prepare_micro_batches


def register() -> None:
    """Register the engine and its hook; a second call does nothing."""
    if getattr(fsdp.prepare_micro_batches, "foremoe", False):
        return
    fsdp.prepare_micro_batches = _observed(fsdp.prepare_micro_batches)
    EngineRegistry.register("language_model", _BACKEND, ["cuda", "cpu"], ENGINE_VENDOR)(ForeMoEEngine)
    if plugin.on_cpu():
        EngineRegistry.register("language_model", _BACKEND, "cpu")(fsdp.FSDPEngineWithLMHead)
        EngineRegistry.register("value_model", _BACKEND, "cpu")(fsdp.FSDPEngineWithValueHead)
        policy = fsdp.CPUOffloadPolicy
        fsdp.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)


def verify() -> None:
    """Raise LaunchError unless veRL would build our engine in this process."""
    found = EngineRegistry.get_engine_cls("language_model", _BACKEND)
    if not issubclass(found, ForeMoEEngine):
        raise LaunchError(
            f"veRL would train with {found.__qualname__}, not with ours: set VERL_ENGINE_VENDOR={ENGINE_VENDOR}"
        )


register()
verify()
