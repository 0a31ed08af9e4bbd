"""Fitting a trace's source ranks to the ranks of the topology asked about."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foremoe.errors import TraceError

Ints = npt.NDArray[np.int64]


def recut(load_MSE: npt.NDArray[np.int32], ranks: int) -> Ints:
    """Counts for `ranks` source ranks: int64 [M, R, E]; every expert's total per micro-step stays the same.

    Neighbouring sources are merged, or one source is shared out evenly. Sharing out makes sources more alike than
    they were; loads of experts, and so balance, stay exact. Raises TraceError if neither divides the other.
    """
    sources = load_MSE.shape[1]
    load = load_MSE.astype(np.int64)
    if sources == ranks:
        return load
    if sources % ranks == 0:
        merged: Ints = load.reshape(load.shape[0], ranks, sources // ranks, load.shape[2]).sum(axis=2)
        return merged
    if ranks % sources:
        raise TraceError(f"the trace has {sources} source ranks, which do not map onto {ranks} ranks")
    parts = ranks // sources
    share, rest = np.divmod(load, parts)
    # The remainder of expert e goes to `rest` parts in a row, starting at another part for each expert.
    part = (np.arange(parts)[:, None] - np.arange(load.shape[2])) % parts
    cut = share[:, :, None, :] + (part[None, None] < rest[:, :, None, :])
    return np.ascontiguousarray(cut.reshape(load.shape[0], ranks, load.shape[2]))
