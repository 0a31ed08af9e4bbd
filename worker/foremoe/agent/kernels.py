"""Compiled planner kernels that came with the image, put where numba can use them.

Compiling the planner's kernels takes each rank some 40 CPU seconds, more than everything else of a start. An image can
carry them compiled, but numba takes a cache directory only if it can write there, and a pod's root is read-only. So the
agent copies the cache (6 MB) into its working directory before it starts Ray. Kernels for another processor are
compiled anew by numba itself.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

ENV_CACHE = "NUMBA_CACHE_DIR"
BAKED_CACHE = Path(sys.prefix) / "share" / "foremoe" / "numba"


def cache_environment(environment: Mapping[str, str], directory: Path, *, baked: Path = BAKED_CACHE) -> dict[str, str]:
    """Environment that makes children use a writable copy of the image's cache; empty if there is none to use."""
    if ENV_CACHE in environment or not baked.is_dir():
        return {}
    target = directory / "numba-cache"
    try:
        shutil.copytree(baked, target, dirs_exist_ok=True)
    except OSError as error:
        logger.warning("planner kernels will be compiled anew, their cache cannot be copied to %s: %s", target, error)
        return {}
    return {ENV_CACHE: str(target)}
