"""`foremoe run JOB.yaml`: a ForeMoEJob as processes on this machine, without Kubernetes.

The same manifest, checked by the same rules, run by the same agents: one head and one agent per worker, each with a
loopback address of its own, so that they are as separate as pods. What a volume is there is a directory here. Meant for
trying a job before it goes to a cluster, and for machines that have no cluster.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer
import yaml
from rich.console import Console

from foremoe.cli import local_volumes
from foremoe.cli.local_job import LocalJob
from foremoe.errors import LaunchError
from foremoe_operator.api.job import ForeMoEJobSpec

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    manifest: Path = typer.Argument(help="Manifest of a ForeMoEJob; - reads standard input."),
    volume: list[str] = typer.Option(
        [], help="Directory that stands for a claim, as CLAIM=DIRECTORY; default .foremoe/volumes/CLAIM. Repeatable."
    ),
    steps: int | None = typer.Option(None, min=1, help="Train for so many steps instead of spec.totalSteps."),
    log_directory: Path = typer.Option(Path(".foremoe/runs"), help="Where logs of the processes go."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Print the head's log as it comes."),
) -> None:
    """Run a ForeMoEJob manifest as local processes, without Kubernetes; Ctrl-C stops everything."""
    name, spec = read_manifest(manifest)
    places = local_volumes.directories(spec.volumes, local_volumes.parse_mappings(volume))
    local = local_volumes.localize(spec, places)
    if steps is not None:
        local = local.model_copy(update={"total_steps": steps})
    for directory in places.values():
        directory.mkdir(parents=True, exist_ok=True)
    check_inputs(spec, local)
    console = Console(stderr=True, highlight=False)
    job = LocalJob(name=name, spec=local, logs=(log_directory / name).absolute(), console=console, verbose=verbose)
    sys.exit(job.run())


def read_manifest(path: Path) -> tuple[str, ForeMoEJobSpec]:
    """Name and spec of the ForeMoEJob in a file of one or more documents. Raises LaunchError, a line per mistake."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path} is no YAML: {error}") from error
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == "ForeMoEJob"]
    if len(jobs) != 1:
        raise LaunchError(f"{path} holds {len(jobs)} ForeMoEJob documents, foremoe run takes one")
    from foremoe_operator.api.validate import problems

    found = problems(jobs[0])
    if found:
        raise LaunchError(f"{path}:\n  " + "\n  ".join(found))
    return str(jobs[0]["metadata"]["name"]), ForeMoEJobSpec.model_validate(jobs[0]["spec"])


def check_inputs(spec: ForeMoEJobSpec, local: ForeMoEJobSpec) -> None:
    """Raise LaunchError with the commands that create what is missing on this machine's side of the volumes."""
    lines = []
    model = Path(local.model.path)
    if not (model / "config.json").is_file():
        lines.append(f"model.path {spec.model.path} is missing; for a small model:\n  foremoe model create {model}")
    shown = [*spec.data.train_files, *spec.data.val_files]
    real = [Path(file) for file in (*local.data.train_files, *local.data.val_files)]
    missing = [(name, file) for name, file in zip(shown, real, strict=True) if not file.is_file()]
    if missing:
        names = ", ".join(dict.fromkeys(name for name, _ in missing))
        lines.append(f"data files {names} are missing; for small ones:\n  foremoe data create {missing[0][1].parent}")
    if lines:
        raise LaunchError("this job's input is not there yet\n" + "\n".join(lines))
