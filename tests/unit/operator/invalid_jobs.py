"""Reads the table of manifests that must be refused."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_TABLE = Path(__file__).parents[2] / "data/invalid_jobs/cases.yaml"


@dataclass(frozen=True)
class Case:
    name: str
    set: dict[str, Any]
    remove: tuple[str, ...]
    expect: tuple[str, ...]

    def manifest(self, valid: dict[str, Any]) -> dict[str, Any]:
        """The valid manifest with this case's changes."""
        changed = copy.deepcopy(valid)
        for path, value in self.set.items():
            holder, key = _find(changed, path)
            holder[key] = value
        for path in self.remove:
            holder, key = _find(changed, path)
            del holder[key]
        return changed


def _find(root: Any, path: str) -> tuple[Any, Any]:
    keys = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]
    for key in keys[:-1]:
        root = root[key] if isinstance(key, int) else root.setdefault(key, {})
    return root, keys[-1]


def cases() -> list[Case]:
    return [
        Case(each["name"], each.get("set", {}), tuple(each.get("remove", ())), tuple(each["expect"]))
        for each in yaml.safe_load(_TABLE.read_text())
    ]
