"""A rollout for machines without a GPU, with veRL's interfaces: `actor_rollout_ref.rollout.name=foremoe_hf`.

Three parts, as with veRL's own engines. The *replica* lives in the controller and starts one server actor per rollout
replica, on the node of its training rank. The *server* holds a copy of the model and samples; requests that arrive
while it is busy form the next batch. The *adapter* lives in the training rank and ships new weights to the server.
Sampling is real, and so are log-probs and routes; what is missing is the speed of an inference engine.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from foremoe.errors import LaunchError, TransferError
from foremoe.verl.packing import pack_experts
from foremoe.verl.sampler import Request, Sample, Sampler
from foremoe_operator.api.constants import CPU_ROLLOUT

# How long the first request of a batch waits for others: far below a forward call, well above the gap in a burst.
_GATHER_SECONDS = 0.02


def server_name(replica_rank: int, suffix: str = "") -> str:
    """Ray name of the server of a replica."""
    return f"{CPU_ROLLOUT}_server_{replica_rank}{suffix}"


class TransformersServer:
    """Ray actor: holds the model, samples for everyone who asks."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._config = omega_conf_to_dataclass(config)
        model_settings = omega_conf_to_dataclass(model_config)
        self._replica_rank = replica_rank
        self._global_steps: int | None = None
        self._model = AutoModelForCausalLM.from_config(
            model_settings.hf_config, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._sampler = Sampler(
            self._model,
            end_tokens=end_tokens(model_settings),
            pad_token=model_settings.tokenizer.pad_token_id or 0,
            record_routes=bool(self._config.enable_rollout_routing_replay),
        )
        self._asked: Counter[int] = Counter()
        self._waiting: list[tuple[Request, asyncio.Future[Sample]]] = []
        self._arrived = asyncio.Event()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._idle = asyncio.Lock()
        self._loop_task: asyncio.Task[None] | None = None

    def address(self) -> str:
        """Identity of this server; nothing listens there."""
        return f"{ray.util.get_node_ip_address()}:0/{self._replica_rank}"

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue one prompt. Raises LaunchError for images and video."""
        if image_data or video_data:
            raise LaunchError(f"the rollout {CPU_ROLLOUT} takes text only")
        await self._admitting.wait()
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._serve())
        sample = await self._enqueue(self._request(list(prompt_ids), sampling_params))
        return TokenOutput(
            token_ids=sample.tokens,
            log_probs=sample.log_probs if sampling_params.get("logprobs") else None,
            routed_experts=sample.routes,
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )

    def _request(self, prompt: list[int], params: dict[str, Any]) -> Request:
        room = self._config.prompt_length + self._config.response_length - len(prompt)
        limit = params.get("max_tokens") or params.get("max_new_tokens") or min(self._config.response_length, room)
        # Repeated prompts are the rule (rollout.n); a count tells them apart and keeps runs repeatable.
        fingerprint = zlib.crc32(np.array(prompt, dtype=np.int32).tobytes())
        occurrence = self._asked[fingerprint]
        self._asked[fingerprint] += 1
        seed = [self._config.seed or 0, self._replica_rank, self._global_steps or 0, fingerprint, occurrence]
        return Request(
            prompt=prompt,
            max_tokens=int(limit),
            seed=int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]),
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=int(params.get("top_k", -1)),
            ignore_end=bool(self._config.ignore_eos),
        )

    async def _enqueue(self, request: Request) -> Sample:
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._arrived.set()
        return await future

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            await asyncio.sleep(_GATHER_SECONDS)
            batch = self._waiting[: self._config.max_num_seqs]
            del self._waiting[: len(batch)]
            if not self._waiting:
                self._arrived.clear()
            async with self._idle:
                await self._run(batch)

    async def _run(self, batch: list[tuple[Request, asyncio.Future[Sample]]]) -> None:
        try:
            samples = await asyncio.to_thread(self._sampler.run, [request for request, _ in batch])
        except Exception as error:  # whatever went wrong belongs to the callers, who report it
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), sample in zip(batch, samples, strict=True):
            if not future.done():
                future.set_result(sample)

    async def load_weights(self, named: dict[str, npt.NDArray[Any]]) -> int:
        """Replace all weights. Raises TransferError if a parameter is missing."""
        missing = set(dict(self._model.named_parameters())) - set(named)
        if getattr(self._model.config, "tie_word_embeddings", False):
            missing.discard("lm_head.weight")
        if missing:
            raise TransferError(f"weight update lacks {len(missing)} parameters, for example {min(missing)}")
        async with self._idle:
            # Ray hands out read-only views of its store; torch wants memory of its own.
            state = {name: torch.from_numpy(array.copy()) for name, array in named.items()}
            self._model.load_state_dict(state, strict=False)
        return len(named)

    async def set_global_steps(self, step: int) -> None:
        """The step whose weights these are; reported with every sample."""
        self._global_steps = step
        self._asked.clear()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Admit nothing more until `resume_generation`; running samples finish, they are short."""
        self._admitting.clear()
        return {"aborted_count": 0, "request_ids": []}

    async def resume_generation(self) -> None:
        """Admit requests again."""
        self._admitting.set()

    async def wake_up(self, tags: Any = None) -> None:
        """Nothing was released."""

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to release: the model stays in memory."""

    async def clear_kv_cache(self) -> None:
        """A cache lives only as long as its batch."""

    async def release_kv_cache(self) -> None:
        """A cache lives only as long as its batch."""

    async def resume_kv_cache(self) -> None:
        """A cache lives only as long as its batch."""

    async def start_profile(self, **kwargs: Any) -> None:
        """No profiler here."""

    async def stop_profile(self, **kwargs: Any) -> None:
        """No profiler here."""


def end_tokens(model_config: Any) -> frozenset[int]:
    """Tokens that end a sample: the tokenizer's, and those of the generation configuration."""
    found: list[int | None] = [model_config.tokenizer.eos_token_id]
    more = getattr(model_config.generation_config, "eos_token_id", None)
    found.extend(more if isinstance(more, list) else [more])
    return frozenset(token for token in found if token is not None)


class TransformersReplica(RolloutReplica):  # type: ignore[misc]
    """Starts the server of one rollout replica beside the rank that feeds it."""

    async def launch_servers(self) -> None:
        """Start the server and note its handle."""
        options: dict[str, Any] = {
            "name": server_name(self.replica_rank, self.name_suffix),
            "max_concurrency": self.max_concurrency,
            "num_cpus": 0,
        }
        if self.workers:
            node = await self.workers[0].__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        server = ray.remote(TransformersServer).options(**options)
        handle = server.remote(self.config, self.model_config, self.replica_rank)
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = await handle.address.remote()


class RolloutAdapter(BaseRollout):  # type: ignore[misc]
    """In the training rank: ships the policy's weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self._replica_rank = rank // size if replica_rank == -1 else replica_rank
        self._sends = rank % size == 0
        self.sleep_level = 2

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Ship all weights. Every rank walks through them, because gathering each one is a collective."""
        if wire_format != "named_tensors":
            raise TransferError(f"the rollout {CPU_ROLLOUT} takes whole tensors only, not {wire_format}")
        named = pack_experts(weights)
        if not self._sends:
            return
        server = ray.get_actor(server_name(self._replica_rank))
        await server.load_weights.remote(named)
        if global_steps is not None:
            await server.set_global_steps.remote(global_steps)
