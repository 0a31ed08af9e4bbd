"""Reading environment and boot file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.agent.test_overrides import make_boot

from foremoe.agent import ray_node
from foremoe.agent.context import AgentContext
from foremoe.errors import LaunchError
from foremoe_operator.api import constants as c


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "boot.json"
    file.write_text(make_boot().model_dump_json(by_alias=True, exclude_none=True))
    return {c.ENV_ROLE: "worker", c.ENV_WORKER_INDEX: "1", c.ENV_BOOT_FILE: str(file), c.ENV_POD_IP: "10.1.2.3"}


def test_a_worker_knows_its_place(environment: dict[str, str]) -> None:
    context = AgentContext.from_environment(environment)
    assert (context.name, context.address, context.bind_host) == ("worker 1", "10.1.2.3", "0.0.0.0")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({c.ENV_ROLE: "boss"}, c.ENV_ROLE),
        ({c.ENV_WORKER_INDEX: "x"}, c.ENV_WORKER_INDEX),
        ({c.ENV_WORKER_INDEX: "2"}, "[0, 2)"),
        ({c.ENV_BOOT_FILE: "/nowhere/boot.json"}, "/nowhere/boot.json"),
    ],
)
def test_what_is_wrong_is_named(environment: dict[str, str], changes: dict[str, str], word: str) -> None:
    with pytest.raises(LaunchError, match=word.replace("[", r"\[").replace(")", r"\)")):
        AgentContext.from_environment(environment | changes)


def test_a_boot_file_of_another_release_names_the_field(environment: dict[str, str]) -> None:
    Path(environment[c.ENV_BOOT_FILE]).write_text('{"job": "a", "namespace": "b", "headHost": "h", "future": 1}')
    with pytest.raises(LaunchError, match=r"future|spec"):
        AgentContext.from_environment(environment)


def test_a_ray_worker_offers_its_gpus_and_three_cpus_for_each(environment: dict[str, str]) -> None:
    context = AgentContext.from_environment(environment)
    command = ray_node.start_command(context, accelerator=False, cores=2)
    assert "--num-gpus=4" in command and "--num-cpus=14" in command
    assert "--address=head:6379" in command


def test_the_ray_head_offers_no_gpu(environment: dict[str, str]) -> None:
    context = AgentContext.from_environment(environment | {c.ENV_ROLE: "head"})
    command = ray_node.start_command(context, accelerator=True, cores=64)
    assert "--num-gpus=0" in command and "--num-cpus=64" in command and "--head" in command


def test_what_the_user_set_wins() -> None:
    assert ray_node.environment({"RAY_AUTH_MODE": "token"})["RAY_AUTH_MODE"] == "token"


def test_accelerators_are_device_files(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not ray_node.has_accelerator(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert ray_node.has_accelerator(tmp_path)
