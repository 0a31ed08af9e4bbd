"""How kernels are compiled: once per machine, single-threaded, without the interpreter lock.

Compiled code is cached beside the sources (or in numba's user cache where those are read-only). A cold
machine compiles for about half a minute; `foremoe.planner.warm_up()` does it ahead of time. `nogil` lets
a planner thread run while the main thread launches work. No kernel runs in parallel: the planner must not
take cores from the training process, and its results must not depend on scheduling.

Numba's cache looks only at the file of a kernel, not at the kernels it calls, so an edited callee would go on
running in its old form inside cached callers. Here every kernel is stamped with all kernel sources together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from foremoe.planner._compile_lock import compiling_alone

Function = TypeVar("Function", bound=Callable[..., object])


def kernel(function: Function) -> Function:
    """Compile with numba on first use; the annotations of the Python function stay."""
    dispatcher = numba.njit(cache=True, nogil=True, fastmath=False)(function)
    _stamp(dispatcher)
    _compile_once_per_machine(dispatcher)
    return cast(Function, dispatcher)


def inlined(function: Function) -> Function:
    """Compile into the callers: for what is called once per arc, where passing arrays would dominate."""
    return cast(Function, numba.njit(inline="always")(function))


def _stamp(dispatcher: Any) -> None:
    """Make the on-disk cache depend on all kernel sources. Without this hook in numba, do not cache."""
    try:
        dispatcher._cache._cache_file._source_stamp = _sources_digest()
    except AttributeError:
        dispatcher._cache = numba.core.caching.NullCache()


def _compile_once_per_machine(dispatcher: Any) -> None:
    compile_or_load = dispatcher.compile

    def compile_alone(signature: Any) -> Any:
        if _is_cached(dispatcher, signature):  # ranks that only load need not queue
            return compile_or_load(signature)
        with compiling_alone():
            return compile_or_load(signature)

    dispatcher.compile = compile_alone


def _is_cached(dispatcher: Any, signature: Any) -> bool:
    """Whether the on-disk cache lists it. Without this hook in numba, False."""
    cached = dispatcher._cache
    try:
        return cached._index_key(signature, dispatcher.targetctx.codegen()) in cached._cache_file._load_index()
    except AttributeError:
        return False


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
