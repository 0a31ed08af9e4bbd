"""From a job to the trainer's command line."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from foremoe.agent import overrides
from foremoe_operator.api.boot import BootConfig
from foremoe_operator.api.constants import CPU_ROLLOUT, OWNED_OVERRIDES

EVENTS = overrides.Events(url="http://10.0.0.1:8470/v1/events", token="secret")


def make_boot(**changes: Any) -> BootConfig:
    spec: dict[str, Any] = {
        "image": "worker:1",
        "model": {"path": "/shared/model"},
        "data": {"trainFiles": ["/shared/train.parquet"]},
        "totalSteps": 7,
        "workers": {"replicas": 2, "gpusPerWorker": 4},
        "parallelism": {"expert": 8},
        "checkpoint": {"path": "/shared/ckpt", "everySteps": 3},
        "trace": {"path": "/shared/trace"},
    }
    return BootConfig.model_validate({"job": "a-job", "namespace": "team", "headHost": "head", "spec": spec | changes})


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What Hydra makes of them: the last value of every key."""
    parser = OverridesParser.create()
    return {override.key_or_group: override.value() for override in parser.parse_overrides(arguments)}


def arguments_of(boot: BootConfig, *, accelerator: bool = False) -> list[str]:
    environment = overrides.run_environment(boot, accelerator=accelerator, events=EVENTS)
    return overrides.driver_arguments(boot, accelerator=accelerator, environment=environment)


def test_fields_of_the_job_become_settings_of_the_trainer() -> None:
    values = parsed(arguments_of(make_boot()))
    assert values["actor_rollout_ref.model.path"] == "/shared/model"
    assert values["data.train_files"] == ["/shared/train.parquet"]
    assert values["data.val_files"] == ["/shared/train.parquet"]
    assert (values["trainer.nnodes"], values["trainer.n_gpus_per_node"]) == (2, 4)
    assert values["trainer.total_training_steps"] == 7
    assert values["trainer.save_freq"] == 3
    assert values["trainer.resume_mode"] == "auto"
    assert values["trainer.default_local_dir"] == "/shared/ckpt"


def test_every_setting_the_job_owns_is_refused_by_the_api() -> None:
    spec = make_boot().spec
    set_by_job = {overrides.override_key(entry) for entry in overrides.job_arguments("a-job", spec, accelerator=True)}
    ours = {"actor_rollout_ref.model.external_lib", "trainer.device"}
    names = {"trainer.experiment_name", "trainer.project_name"}
    assert set_by_job - ours - names <= set(OWNED_OVERRIDES)


def test_resume_never_starts_anew() -> None:
    boot = make_boot(checkpoint={"path": "/shared/ckpt", "resume": "Never"})
    assert parsed(arguments_of(boot))["trainer.resume_mode"] == "disable"


def test_without_an_accelerator_our_rollout_and_platform_are_used() -> None:
    arguments = arguments_of(make_boot())
    values = parsed(arguments)
    assert values["trainer.device"] == "cpu"
    assert values["actor_rollout_ref.rollout.name"] == CPU_ROLLOUT
    assert values["actor_rollout_ref.model.use_remove_padding"] is False
    assert values["ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM"] == "cpu"


def test_with_an_accelerator_verl_keeps_its_own_rollout_and_platform() -> None:
    values = parsed(arguments_of(make_boot(), accelerator=True))
    assert values["trainer.device"] == "cuda"
    assert values["actor_rollout_ref.rollout.name"] == "vllm"
    assert values["actor_rollout_ref.model.external_lib"] == overrides.ENGINE_MODULE
    assert "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM" not in values


def test_environment_values_stay_text() -> None:
    prefix = "ray_kwargs.ray_init.runtime_env.env_vars."
    values = parsed(arguments_of(make_boot()))
    environment = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    assert environment["FOREMOE_EXPERT_PARALLEL"] == "8"
    assert all(isinstance(value, str) for value in environment.values())


@pytest.mark.parametrize(
    "argument",
    [
        "actor_rollout_ref.model.use_remove_padding=True",
        "+actor_rollout_ref.model.use_remove_padding=True",
        "++actor_rollout_ref.model.use_remove_padding=True",
    ],
)
def test_a_users_argument_replaces_the_default_of_its_key(argument: str) -> None:
    arguments = arguments_of(make_boot(args=[argument]))
    about = [entry for entry in arguments if overrides.override_key(entry).endswith("use_remove_padding")]
    assert about == [argument]


def test_users_arguments_come_last() -> None:
    assert arguments_of(make_boot(args=["data.seed=1", "data.train_batch_size=4"]))[-2:] == [
        "data.seed=1",
        "data.train_batch_size=4",
    ]


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40))
def test_any_text_survives_quoting(text: str) -> None:
    value = parsed([f"key={overrides.quote_always('/' + text)}"])["key"]
    assert value == "/" + text


@pytest.mark.parametrize(
    "text", ["null", "True", "a b", "a,b", "it's", "back\\", "${x}", "[1]", "a=b", "/plain/path-1.0"]
)
def test_quoting_leaves_the_value_as_it_is(text: str) -> None:
    value = parsed([f"key={overrides.quote(text)}"])["key"]
    assert (value if isinstance(value, str) else None) == text
