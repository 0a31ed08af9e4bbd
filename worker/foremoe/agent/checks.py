"""What can be told to be wrong before anything is started.

A wrong path costs a minute or more when veRL finds it, after Ray and a dozen processes have started, and then it is
buried in a traceback. Here it costs a second and is one sentence. Nothing is changed but an empty directory created
where results will go.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from foremoe.agent.overrides import EXTERNAL_LIB, override_key
from foremoe_operator.api.constants import Reason
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.progress import Problem

_EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_PARQUET_MAGIC = b"PAR1"


def find_problem(spec: ForeMoEJobSpec, arguments: list[str]) -> Problem | None:
    """The first thing that would keep the job from starting; None if nothing is found."""
    return next(_problems(spec, arguments), None)


def _problems(spec: ForeMoEJobSpec, arguments: list[str]) -> Iterator[Problem]:
    yield from _model_problems(spec)
    for kind, files in (("trainFiles", spec.data.train_files), ("valFiles", spec.data.val_files)):
        for file in files:
            yield from _data_problems(kind, Path(file))
    yield from _directory_problems("checkpoint.path", Path(spec.checkpoint.path))
    if spec.trace is not None:
        yield from _directory_problems("trace.path", Path(spec.trace.path))
    if any(override_key(argument) == EXTERNAL_LIB for argument in spec.args):
        yield _boot_failed(f"args must not set {EXTERNAL_LIB}: it loads this runtime's engine")
    yield from _argument_problems(arguments)


def _model_problems(spec: ForeMoEJobSpec) -> Iterator[Problem]:
    path = Path(spec.model.path)
    if not path.is_dir():
        yield _missing_model(f"model.path {path} {_what_is_there(path)}: {_prepare_hint(path)}")
        return
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        yield _missing_model(f"model.path {path} is no Hugging Face model: config.json: {error}")
        return
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        yield _missing_model(f"model.path {path} holds no weights ({', '.join(_WEIGHTS)}): was it copied in whole?")
        return
    experts = expert_count(config)
    if experts is None:
        yield _boot_failed(f"model.path {path}: config.json names no experts; is it a Mixture-of-Experts model?")
    elif experts % spec.parallelism.expert:
        yield _boot_failed(
            f"the model has {experts} experts a layer, which do not divide over parallelism.expert = "
            f"{spec.parallelism.expert} ranks"
        )


def expert_count(config: object) -> int | None:
    """Experts of each layer as config.json says; None if it names none."""
    if not isinstance(config, dict):
        return None
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            for field in _EXPERT_COUNT_FIELDS:
                value = part.get(field)
                if isinstance(value, int) and value > 0:
                    return value
    return None


def _data_problems(kind: str, path: Path) -> Iterator[Problem]:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_PARQUET_MAGIC))
    except OSError as error:
        where = error.strerror or str(error)
        yield _boot_failed(f"data.{kind}: {path}: {where}: put the file there, or create one with foremoe data create")
        return
    if path.suffix == ".parquet" and magic != _PARQUET_MAGIC:
        yield _boot_failed(f"data.{kind}: {path} is no parquet file")


def _directory_problems(field: str, path: Path) -> Iterator[Problem]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        yield _boot_failed(f"{field}: cannot write to {path}: {error.strerror}: check the volume and its owner")


def _argument_problems(arguments: list[str]) -> Iterator[Problem]:
    """Compose veRL's configuration, as its trainer will, and report what Hydra refuses."""
    import importlib.util

    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        yield _boot_failed("veRL is not installed: the image must contain foremoe[worker]")
        return
    directory = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    # Settings of Hydra itself exist only on the command line.
    of_trainer = [argument for argument in arguments if not override_key(argument).startswith("hydra.")]
    try:
        with initialize_config_dir(str(directory), version_base=None):
            compose("ppo_trainer", overrides=of_trainer)
    except (HydraException, OmegaConfBaseException) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        message = " ".join(f"{error}{cause}".split())
        yield _boot_failed(f"args: veRL's configuration refuses them: {message}")


def _what_is_there(path: Path) -> str:
    return "is a file, not a directory" if path.exists() else "does not exist"


def _prepare_hint(path: Path) -> str:
    return f"put a model there, or create a small one with foremoe model create {path}"


def _missing_model(message: str) -> Problem:
    return Problem(reason=Reason.MODEL_NOT_FOUND, message=message[:1024])


def _boot_failed(message: str) -> Problem:
    return Problem(reason=Reason.BOOT_FAILED, message=message[:1024])
