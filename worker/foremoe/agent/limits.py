"""Limits of this process and its children."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

# What Ray's documentation asks for; a raylet holds a few descriptors per worker process and object.
_WANTED_FILES = 65536


def raise_open_files() -> int:
    """Raise the soft limit of open files as far as it may go and is useful; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.warning("cannot raise the limit of open files from %d to %d: %s", soft, wanted, error)
        return soft
    return wanted
