"""Replacing names of veRL's modules, for a while.

veRL imports most helpers by name, so the one place where such a helper can be exchanged without touching a file is the
module that uses it. Every such use in this package goes through here, and docs/expert-parallel.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(module: ModuleType, **attributes: Any) -> Iterator[None]:
    """While it is active, `module` has `attributes`; all of them must exist. Not for use by several threads."""
    originals = {name: getattr(module, name) for name in attributes}
    for name, value in attributes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)
