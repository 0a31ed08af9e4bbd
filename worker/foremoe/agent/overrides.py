"""From a job to the command line and environment of veRL's trainer; pure.

The trainer's arguments come in three layers. What the job's own fields say is fixed, and the API refuses `args` that
set it. What makes veRL work with this runtime, and on machines without a GPU, is a default: an argument of the user
with the same key replaces it. The user's arguments come last. `docs/verl-integration.md` explains each default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foremoe_operator.api.boot import BootConfig
from foremoe_operator.api.constants import (
    CPU_PLATFORM,
    CPU_ROLLOUT,
    ENGINE_VENDOR,
    ENV_EVENTS_TOKEN,
    ENV_EVENTS_URL,
    ENV_EXPERT_PARALLEL,
    ENV_JOB,
    ENV_TRACE_DIRECTORY,
)
from foremoe_operator.api.job import ForeMoEJobSpec, ResumePolicy

DRIVER_MODULE = "verl.trainer.main_ppo"
ENGINE_MODULE = "foremoe.verl.engine"
PLUGIN_MODULE = "foremoe.verl.plugin"
_ACTOR = "actor_rollout_ref"
EXTERNAL_LIB = f"{_ACTOR}.model.external_lib"
_PLAIN = re.compile(r"^[A-Za-z0-9_./@%-]+$")
_WORDS = frozenset({"null", "true", "false"})
_KEY = re.compile(r"^[+~]*([A-Za-z_][^=]*)")
_ENV_PREFIX = "+ray_kwargs.ray_init.runtime_env.env_vars"


@dataclass(frozen=True, kw_only=True)
class Events:
    """Where the processes of the run report, and the word that lets them."""

    url: str
    token: str


def driver_arguments(boot: BootConfig, *, accelerator: bool, environment: Mapping[str, str]) -> list[str]:
    """Hydra overrides for veRL's trainer. `environment` reaches every process of the run through Ray."""
    spec = boot.spec
    defaults = [*runtime_defaults(), *([] if accelerator else cpu_defaults())]
    taken = {override_key(argument) for argument in spec.args}
    chosen = [argument for argument in defaults if override_key(argument) not in taken]
    return [
        *(f"{_ENV_PREFIX}.{name}={quote_always(value)}" for name, value in sorted(environment.items())),
        *job_arguments(boot.job, spec, accelerator=accelerator),
        *chosen,
        *spec.args,
    ]


def run_environment(boot: BootConfig, *, accelerator: bool, events: Events) -> dict[str, str]:
    """Environment that every veRL process of the run must have before its first import."""
    spec = boot.spec
    values = {
        "VERL_USE_EXTERNAL_MODULES": PLUGIN_MODULE,
        "VERL_ENGINE_VENDOR": ENGINE_VENDOR,
        ENV_EXPERT_PARALLEL: str(spec.parallelism.expert),
        ENV_EVENTS_URL: events.url,
        ENV_EVENTS_TOKEN: events.token,
        ENV_JOB: f"{boot.namespace}/{boot.job}",
    }
    if spec.trace is not None:
        values[ENV_TRACE_DIRECTORY] = spec.trace.path
    if not accelerator:
        values["VERL_PLATFORM"] = CPU_PLATFORM
    return values


def job_arguments(job: str, spec: ForeMoEJobSpec, *, accelerator: bool) -> list[str]:
    """What the job's own fields say."""
    val_files = spec.data.val_files or spec.data.train_files
    values = {
        f"{_ACTOR}.model.path": quote(spec.model.path),
        EXTERNAL_LIB: ENGINE_MODULE,
        f"{_ACTOR}.rollout.n_gpus_per_node": str(spec.workers.gpus_per_worker),
        "data.train_files": quote_list(spec.data.train_files),
        "data.val_files": quote_list(val_files),
        "trainer.nnodes": str(spec.workers.replicas),
        "trainer.n_gpus_per_node": str(spec.workers.gpus_per_worker),
        "trainer.device": "cuda" if accelerator else "cpu",
        "trainer.total_training_steps": str(spec.total_steps),
        # The number of steps decides; an epoch has at least one.
        "trainer.total_epochs": str(spec.total_steps + 1),
        "trainer.save_freq": str(spec.checkpoint.every_steps),
        "trainer.default_local_dir": quote(spec.checkpoint.path),
        "trainer.resume_mode": "auto" if spec.checkpoint.resume is ResumePolicy.AUTO else "disable",
    }
    names = {"trainer.experiment_name": quote(job), "trainer.project_name": "foremoe"}
    taken = {override_key(argument) for argument in spec.args}
    values.update({key: value for key, value in names.items() if key not in taken})
    return [f"{key}={value}" for key, value in values.items()]


def runtime_defaults() -> list[str]:
    """What this runtime needs or prefers on any machine."""
    return [
        "algorithm.adv_estimator=grpo",
        f"{_ACTOR}.actor.strategy=fsdp2",
        f"{_ACTOR}.rollout.enable_rollout_routing_replay=True",
        f"{_ACTOR}.rollout.name=vllm",
        f"{_ACTOR}.rollout.mode=async",
        "reward.reward_model.rollout.name=${actor_rollout_ref.rollout.name}",
        "trainer.logger=[console]",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
    ]


def cpu_defaults() -> list[str]:
    """What veRL must be told to run without an accelerator, and to start few processes."""
    plain = {
        f"{_ACTOR}.rollout.name": CPU_ROLLOUT,
        f"{_ACTOR}.rollout.tensor_model_parallel_size": "1",
        f"{_ACTOR}.rollout.agent.num_workers": "1",
        f"{_ACTOR}.model.use_remove_padding": "False",
        f"{_ACTOR}.model.enable_gradient_checkpointing": "False",
        f"{_ACTOR}.actor.use_torch_compile": "False",
        f"{_ACTOR}.actor.fsdp_config.use_torch_compile": "False",
        f"{_ACTOR}.ref.fsdp_config.use_torch_compile": "False",
        "data.dataloader_num_workers": "0",
        "reward.num_workers": "1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": "1",
        "trainer.v1.sampler.custom_sampler.path": quote("pkg://foremoe.verl.replay"),
        "trainer.v1.sampler.custom_sampler.name": "EagerReplayBuffer",
    }
    added = {
        f"{_ACTOR}.model.override_config.attn_implementation": "sdpa",
        f"{_ACTOR}.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"{_ACTOR}.ref.fsdp_config.mixed_precision.param_dtype": "fp32",
    }
    return [
        *(f"{key}={value}" for key, value in plain.items()),
        *(f"+{key}={value}" for key, value in added.items()),
    ]


def override_key(argument: str) -> str:
    """The setting an override is about: `+a.b=1` -> `a.b`."""
    match = _KEY.match(argument)
    return match[1].strip() if match else argument


def quote(value: str) -> str:
    """A string as a Hydra value; quoted where its grammar would read it otherwise."""
    return value if _PLAIN.match(value) and value.lower() not in _WORDS else quote_always(value)


def quote_always(value: str) -> str:
    """A string as a quoted Hydra value, so that `2` stays text."""
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"


def quote_list(values: Iterable[str]) -> str:
    """A list of strings as a Hydra value."""
    return "[" + ",".join(quote(value) for value in values) + "]"
