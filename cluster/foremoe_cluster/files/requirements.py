"""What one image installs, from pyproject.toml and constraints.txt; standard library only.

Runs inside the image build, in a stage of its own: its output, not its input, decides whether the
layer of dependencies is built again, so editing a linter's settings or pin costs nothing.

usage: requirements.py EXTRA FOLDER  ->  FOLDER/requirements.txt, FOLDER/constraints.txt
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extra: str) -> list[str]:
    """The project's dependencies and those of one extra, sorted."""
    table = project["project"]
    assert isinstance(table, dict)
    return sorted({*table.get("dependencies", []), *table["optional-dependencies"][extra]}, key=str.lower)


def relevant_constraints(lines: list[str], project: dict[str, object], extra: str) -> list[str]:
    """All pins but those of packages that only another extra asks for."""
    table = project["project"]
    assert isinstance(table, dict)
    wanted = {package(line) for line in requirements(project, extra)}
    others = {package(line) for names in table["optional-dependencies"].values() for line in names} - wanted
    pins = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return [pin for pin in pins if package(pin) not in others]


def package(line: str) -> str:
    """The normalised name in a requirement or a pin."""
    name = re.match(r"[A-Za-z0-9._-]+", line.strip())
    return re.sub(r"[-_.]+", "-", name.group()).lower() if name else ""


def main(extra: str, folder: str) -> None:
    """Write both files."""
    project = tomllib.loads(Path("pyproject.toml").read_text())
    pins = Path("constraints.txt").read_text().splitlines()
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "requirements.txt").write_text("\n".join(requirements(project, extra)) + "\n")
    (out / "constraints.txt").write_text("\n".join(relevant_constraints(pins, project, extra)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
