"""From the paths of a job in a cluster to paths on this machine; pure.

`foremoe run` takes the manifest that a cluster takes. There the job's paths lie below the mount paths of its volumes;
here every claim is a directory, and each path below a mount path becomes the path below that directory. Typed fields,
trainer arguments and environment values are treated alike, so that an argument may name a file on a volume too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from foremoe.errors import LaunchError
from foremoe_operator.api.job import ForeMoEJobSpec, Volume

DEFAULT_ROOT = Path(".foremoe/volumes")
# What may stand before a path inside an argument: its start, `=`, a quote, a list's bracket or comma.
_BEFORE = r"(^|(?<=[=\[,'\"\s:]))"


def parse_mappings(pairs: Sequence[str]) -> dict[str, Path]:
    """`["claim=DIR"]` -> directory of each claim. Raises LaunchError for anything else."""
    mappings: dict[str, Path] = {}
    for pair in pairs:
        claim, separator, directory = pair.partition("=")
        if not separator or not claim or not directory:
            raise LaunchError(f"--volume takes CLAIM=DIRECTORY, got {pair!r}")
        mappings[claim] = Path(directory)
    return mappings


def directories(
    volumes: Sequence[Volume], mappings: Mapping[str, Path], *, root: Path = DEFAULT_ROOT
) -> dict[str, Path]:
    """Directory of every mount path, absolute. Raises LaunchError for a mapping of no claim of the job."""
    claims = {volume.claim_name for volume in volumes}
    unknown = sorted(set(mappings) - claims)
    if unknown:
        raise LaunchError(
            f"the job has no volume with the claim {unknown[0]!r}; it has {', '.join(sorted(claims)) or 'no volumes'}"
        )
    return {
        volume.mount_path: (mappings.get(volume.claim_name) or root / volume.claim_name).absolute()
        for volume in volumes
    }


def localize(spec: ForeMoEJobSpec, places: Mapping[str, Path]) -> ForeMoEJobSpec:
    """The spec with every path below a mount path replaced by the path below that volume's directory."""
    changes: dict[str, object] = {
        "model": spec.model.model_copy(update={"path": rewrite(spec.model.path, places)}),
        "data": spec.data.model_copy(
            update={
                "train_files": [rewrite(file, places) for file in spec.data.train_files],
                "val_files": [rewrite(file, places) for file in spec.data.val_files],
            }
        ),
        "checkpoint": spec.checkpoint.model_copy(update={"path": rewrite(spec.checkpoint.path, places)}),
        "args": [rewrite(argument, places) for argument in spec.args],
        "env": [entry.model_copy(update={"value": rewrite(entry.value, places)}) for entry in spec.env],
    }
    if spec.trace is not None:
        changes["trace"] = spec.trace.model_copy(update={"path": rewrite(spec.trace.path, places)})
    return spec.model_copy(update=changes)


def rewrite(text: str, places: Mapping[str, Path]) -> str:
    """Replace every mount path in `text` that is a path's beginning; the longest mount path that fits wins."""
    if not places:
        return text
    by_length = sorted(places, key=len, reverse=True)
    mounts = "|".join(re.escape(mount) for mount in by_length)
    pattern = re.compile(rf"{_BEFORE}({mounts})(?=/|$|[\],'\"\s])")
    return pattern.sub(lambda match: str(places[match[2]]), text)
