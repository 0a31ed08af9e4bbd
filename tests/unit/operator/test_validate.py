"""The CRD's checks without an API server: the same table of mistakes as the cluster tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.operator.builders import manifest
from tests.unit.operator.invalid_jobs import Case, cases

from foremoe_operator.api.constants import OWNED_OVERRIDES
from foremoe_operator.api.validate import problems


def test_a_valid_manifest_has_no_problems() -> None:
    assert problems(manifest()) == []


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_mistake_is_found_and_named(case: Case) -> None:
    found = problems(case.manifest(manifest()))
    assert found, "not found"
    text = "\n".join(found)
    missing = [word for word in case.expect if word not in text]
    assert not missing, f"{missing} not in: {text}"


def test_the_table_has_one_name_a_case() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) >= 25


@pytest.mark.parametrize("key", OWNED_OVERRIDES)
@pytest.mark.parametrize("form", ["{}=1", "+{}=1", "++{}=1", "~{}", "~{}=1", "{}.below=1"])
def test_no_form_of_an_owned_override_passes(key: str, form: str) -> None:
    assert any("spec.args[0]" in each for each in problems(manifest(args=[form.format(key)])))


@pytest.mark.parametrize(
    "override",
    [
        "data.train_batch_size=8",
        "data.train_files_seed=1",
        "trainer.logger=[console,file]",
        "trainer.total_epochs_x=1",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm={}",
        "actor_rollout_ref/actor=dp_actor",
        "~reward_model",
        "hydra.run.dir=/scratch/${now:%Y}",
    ],
)
def test_other_overrides_pass(override: str) -> None:
    assert problems(manifest(args=[override])) == []


def test_null_means_not_set() -> None:
    assert problems(manifest(activeDeadlineSeconds=None, trace=None, head=None)) == []


def test_what_is_not_a_manifest_is_said() -> None:
    found = problems({"kind": "Deployment", "extra": 1})
    assert [each.split(":")[0] for each in found] == ["apiVersion", "kind", "metadata.name", "extra", "spec"]


def test_rules_hold_also_for_a_job_without_a_name() -> None:
    broken = manifest(parallelism={"expert": 3})
    del broken["metadata"]["name"]
    assert any("must divide" in each for each in problems(broken))


EXAMPLES = [
    document
    for path in sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if isinstance(document, dict) and document.get("kind") == "ForeMoEJob"
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["metadata"]["name"])
def test_every_example_is_valid(example: dict[str, Any]) -> None:
    assert problems(example) == []
