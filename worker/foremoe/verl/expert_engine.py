"""veRL's FSDP2 engine with experts in parallel: their homes spread over an EP group, the record replayed by a plan.

Everything dense stays FSDP2's, over all ranks. Experts are taken out before FSDP wraps the model: each rank keeps its
home experts (with several EP groups, its share of them) as ordinary parameters, and `foremoe.moe` moves tokens, weights
and gradients. Of veRL's engine the methods are overridden that would otherwise touch experts as if every rank held the
same ones; its loop over micro-batches, its losses and its optimizer stay. docs/expert-parallel.md lists what is
supported and what is refused.

Always: gradients of home experts are complete, and scaled as FSDP scales dense ones, when `forward_backward_batch`
returns. The policy replays the record; a reference model routes live, and takes the record as a forecast only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.utils.checkpoint.fsdp_checkpoint_manager as checkpoints
import verl.workers.engine.fsdp.transformer_impl as fsdp
from torch import nn
from verl.utils import tensordict_utils as tu
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config.optimizer import build_optimizer

from foremoe.errors import LaunchError, TransferError
from foremoe.moe import ExpertParallelRuntime, StepReport, expert_parallel, supported_model_types
from foremoe.planner import PlannerConfig
from foremoe.planner.cost import CostConstants, Gpu
from foremoe.verl import plugin
from foremoe.verl.engine import ForeMoEEngine, expert_parallel_size
from foremoe.verl.expert_checkpoint import ExpertFiles, dense_only, with_experts
from foremoe.verl.expert_loading import CheckpointFiles, load_weights, without_storage
from foremoe.verl.expert_report import pass_metrics
from foremoe.verl.expert_rows import Layout, layer_rows
from foremoe.verl.expert_weights import full_state_on_rank_0, streamed_weights
from foremoe.verl.moe_layers import choices
from foremoe.verl.observation import Observation
from foremoe.verl.patching import replaced
from foremoe.verl.settings import Settings
from foremoe_operator.api.constants import ENV_PLANNER_CONFIG

logger = logging.getLogger(__name__)


def reason_against(model_config: Any, engine_config: Any, settings: Settings) -> str | None:
    """Why a model is trained by veRL's own engine rather than with experts in parallel; None if nothing speaks
    against it. Equal on all ranks.
    """
    model_type = getattr(model_config.hf_config, "model_type", None)
    if model_type not in supported_model_types():
        return f"{model_type!r} is no MoE model known here ({', '.join(sorted(supported_model_types()))})"
    if model_config.lora_rank > 0:
        return "LoRA adapters on distributed experts are not supported"
    if getattr(getattr(engine_config, "qat", None), "enable", False):
        return "quantization-aware training of distributed experts is not supported"
    if (engine_config.mixed_precision or {}).get("param_dtype") in ("fp16", "float16", torch.float16):
        return "fp16 with a loss scaler is not supported; use bf16"
    if expert_parallel_size(model_config.hf_config, settings) == 1:
        return "the expert-parallel size is 1"
    return None


class ExpertParallelEngine(ForeMoEEngine):
    """Actor, or reference model, of an MoE model."""

    _runtime: ExpertParallelRuntime
    _micro_batches: list[Any]

    # -- building --------------------------------------------------------------------------------------------------

    def _build_module(self) -> Any:
        with without_storage():
            module: Any = super()._build_module()
        # Parameters were exchanged for empty ones as they were registered, which separates tied ones.
        module.tie_weights()
        # Which files hold what is asked before experts are taken apart, while all names are the model's own.
        self._files = CheckpointFiles.of(Path(self.model_config.local_path), module)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        self._runtime = expert_parallel(
            module,
            group=self.groups.group,
            twins=self.groups.twins,
            compute_dtype=self._compute_dtype(),
            config=read_planner_config(self.settings.planner_config),
        )
        experts = set(self._runtime.expert_parameters())

        def shard(model: nn.Module, fsdp_kwargs: dict[str, Any], config: Any) -> None:
            _apply(model, {**fsdp_kwargs, "ignored_params": experts}, config)

        _apply = fsdp.apply_fsdp2
        with replaced(fsdp, apply_fsdp2=shard, fsdp2_load_full_state_dict=self._load_weights):
            wrapped: nn.Module = super()._build_fsdp_module(module)
        return wrapped

    def _compute_dtype(self) -> torch.dtype:
        precision = self.engine_config.mixed_precision or {}
        dtype: torch.dtype = PrecisionType.to_dtype(precision.get("param_dtype", "bf16"))
        return dtype

    def _load_weights(self, module: nn.Module, _state: Any, _mesh: Any = None, cpu_offload: Any = None) -> None:
        homes = self._runtime.home_experts()
        load_weights(
            module,
            self._files,
            experts_of=homes.get,
            own=self._runtime.own_experts,
            dense_device=torch.device("cpu") if cpu_offload is not None else self.device,
            device=self.device,
        )
        self._files.close()

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        # Two groups: an optimizer that works on lists of tensors must not mix plain tensors with DTensors.
        groups = [
            {"params": self._runtime.dense_parameters()},
            {"params": self._runtime.expert_parameters()},
        ]
        optimizer: torch.optim.Optimizer = build_optimizer(groups, self.optimizer_config)
        self._runtime.attach_optimizer(optimizer)
        return optimizer

    # -- a pass ----------------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """As veRL's; expert gradients are complete when it returns."""
        with ExitStack() as self._visit, self._accumulating():
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)

    def begin_pass(self, micro_batches: list[Any], observation: Observation) -> None:
        """Plan the pass and push its replicas; collective over the EP group."""
        self._micro_batches = micro_batches
        top_k = choices(self.model_config.hf_config)
        assert top_k is not None
        routing = [
            layer_rows(each, routes, layers=len(self._moe_layers), top_k=top_k, layout=self._layout(each))
            for each, routes in zip(micro_batches, observation.routes, strict=True)
        ]
        self._runtime.begin_step(routing, forecast=self.engine_config.forward_only)

    def _layout(self, micro_batch: Any) -> Layout:
        parts = self.ulysses_sequence_parallel_size
        return Layout(
            packed=tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True),
            bucket=self.pad_to_length_bucket if self.pad_to_length else 1,
            parts=parts,
            part=dist.get_rank() % parts,
        )

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """As veRL's, inside the micro-step; it stays open, because veRL runs backward after this returns."""
        index = next(index for index, each in enumerate(self._micro_batches) if each is micro_batch)
        self._visit.close()
        self._visit.enter_context(self._runtime.micro_step(index))
        return super().forward_step(micro_batch, loss_function, forward_only)

    def finish_pass(self, output: dict[str, Any]) -> None:
        """Replica gradients go home, the report into trace, progress and veRL's metrics."""
        self._visit.close()
        report = self._runtime.end_step()
        self._scale_expert_gradients()
        assert self._capture is not None
        self._capture.finish(report.executed_MLR + report.live_MLR, bases=self._runtime.bases)
        output["metrics"].update({name: [value] for name, value in pass_metrics(report).items()})
        self._report(report)

    def _report(self, report: StepReport) -> None:
        if not report.as_planned and dist.get_rank() == 0:
            logger.error("foremoe: step %d, pass %s was not executed as planned", self._pass_step, self._pass_name)
        if self._capture is not None:
            self._capture.report_executed(report, step=self._pass_step)

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Scaling concerns this pass alone: gradients of earlier passes are set aside and added again."""
        parameters = self._runtime.expert_parameters()
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _scale_expert_gradients(self) -> None:
        """The runtime sums over the losses of all ranks; FSDP takes the mean over them."""
        for parameter in self._runtime.expert_parameters():
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size())

    def optimizer_step(self) -> float:
        """As veRL's, clipping by the norm of dense and expert gradients together; collective."""

        def clip(_parameters: Any, max_norm: float) -> torch.Tensor:
            return self._runtime.clip_gradients(max_norm)

        with replaced(fsdp, fsdp2_clip_grad_norm_=clip):
            return float(super().optimizer_step())

    # -- weights and checkpoints -----------------------------------------------------------------------------------

    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any) -> Any:
        """Whole tensors for the rollout, under the names that inference engines load; collective at every item."""
        weights = streamed_weights(self._runtime, device=self.device, model_type=self.model_config.hf_config.model_type)
        renamed = (convert_weight_keys(dict([item]), self.module).items() for item in weights)
        return chain.from_iterable(renamed), None

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        """Refused: a shard of an expert tensor has no place in veRL's delta updates."""
        raise TransferError(
            "weight updates by shards (the delta transport) are not supported with expert parallelism; use "
            "actor_rollout_ref.rollout.checkpoint_engine.backend=naive or another that sends whole tensors"
        )

    def save_checkpoint(self, local_path: str | None, *args: Any, **kwargs: Any) -> None:
        """As veRL's, with experts stored apart from any placement; collective."""
        if local_path is None:
            return
        homes, manager = self._runtime.home_experts(), self.checkpoint_manager
        with ExitStack() as stack:
            hooks = stack.enter_context(ExitStack())
            hooks.enter_context(dense_only(self.module, homes, self.optimizer))

            def export(*_: object, **__: object) -> dict[str, Any]:
                hooks.close()
                return full_state_on_rank_0(self._runtime, device=self.device)

            stack.enter_context(replaced(checkpoints, get_fsdp_full_state_dict=export))
            super().save_checkpoint(local_path, *args, **kwargs)
        if manager.should_save_model:
            ExpertFiles(Path(local_path)).write(
                dict(self.module.named_parameters()),
                homes,
                self.optimizer if manager.should_save_optimizer else None,
                whole=lambda name, own: self._runtime.whole_experts(name, own.to(self.device)),
                info=self.groups.info,
            )
        dist.barrier()

    def load_checkpoint(self, local_path: str | None, *args: Any, **kwargs: Any) -> None:
        """As veRL's; every rank takes the experts it is home of, under whatever placement they were saved."""
        if local_path is None:
            return
        files = ExpertFiles(Path(local_path))
        with with_experts(
            self.module, self._runtime.home_experts(), self.optimizer, files, own=self._runtime.own_experts
        ):
            super().load_checkpoint(local_path, *args, **kwargs)


def read_planner_config(text: str) -> PlannerConfig:
    """Settings as JSON, or the path of a JSON file with them. Raises PlannerError or LaunchError.

    Without settings the cost model gets the constants of what this run computes on: priced as on a GPU, balancing a
    model that fits a processor never pays.
    """
    if not text:
        return PlannerConfig(cost=CostConstants(gpu=Gpu.CPU)) if plugin.on_cpu() else PlannerConfig()
    if text.startswith("{"):
        return PlannerConfig.checked(text)
    try:
        return PlannerConfig.checked(Path(text).read_text())
    except OSError as error:
        raise LaunchError(f"{ENV_PLANNER_CONFIG} names {text}, which cannot be read: {error}") from error
