"""Which source's tokens go to which copy, once the quota of every copy is fixed.

A copy serves tokens of its own rank first, then of its inner group, then of its outer group, then any. Groups
nest, so this greedy order attains the fewest tokens leaving each kind of group at the same time. The
result is exact: rows add up to quotas, columns to the loads of the sources.
"""

from __future__ import annotations

import numpy as np

from foremoe.planner._flow import Ints
from foremoe.planner._jit import kernel
from foremoe.topology import Locality


@kernel
def split_sources(load_SE: Ints, quota_C: Ints, start_E1: Ints, host_C: Ints, place: Locality) -> tuple[Ints, Ints]:
    """(row_C, split_XS): tokens of every source on the copies of experts with several hosts.

    row_C is the row of a copy in split_XS, -1 for the only copy of an expert, which takes everything.
    """
    sources, experts = load_SE.shape
    copies = host_C.size
    row_C = np.full(copies, -1, np.int64)
    rows = 0
    for expert in range(experts):
        if start_E1[expert + 1] - start_E1[expert] > 1:
            for copy in range(start_E1[expert], start_E1[expert + 1]):
                row_C[copy] = rows
                rows += 1
    split_XS = np.zeros((rows, sources), np.int64)
    left_S = np.empty(sources, np.int64)
    for expert in range(experts):
        first, last = start_E1[expert], start_E1[expert + 1]
        if last - first < 2:
            continue
        for source in range(sources):
            left_S[source] = load_SE[source, expert]
        row = row_C[first]
        for copy in range(first, last):
            rank = host_C[copy]
            take = min(left_S[rank], quota_C[copy])
            split_XS[row + copy - first, rank] = take
            left_S[rank] -= take
        _serve_groups(
            first, last, row, quota_C, host_C, place.inner_R, place.inner_start, place.inner_member, left_S, split_XS
        )
        _serve_groups(
            first, last, row, quota_C, host_C, place.outer_R, place.outer_start, place.outer_member, left_S, split_XS
        )
        source = 0
        for copy in range(first, last):
            need = quota_C[copy]
            for other in range(sources):
                need -= split_XS[row + copy - first, other]
            while need > 0:
                take = min(left_S[source], need)
                split_XS[row + copy - first, source] += take
                left_S[source] -= take
                need -= take
                if need > 0:
                    source += 1
    return row_C, split_XS


@kernel
def _serve_groups(
    first: int,
    last: int,
    row: int,
    quota_C: Ints,
    host_C: Ints,
    group_R: Ints,
    group_start: Ints,
    group_member: Ints,
    left_S: Ints,
    split_XS: Ints,
) -> None:
    """Let every copy serve what is left in its own group."""
    for copy in range(first, last):
        need = quota_C[copy]
        for source in range(left_S.size):
            need -= split_XS[row + copy - first, source]
        group = group_R[host_C[copy]]
        position = group_start[group]
        while need > 0 and position < group_start[group + 1]:
            source = group_member[position]
            take = min(left_S[source], need)
            split_XS[row + copy - first, source] += take
            left_S[source] -= take
            need -= take
            position += 1


@kernel
def dense_tokens(load_SE: Ints, start_E1: Ints, host_C: Ints, row_C: Ints, split_XS: Ints, tokens_SER: Ints) -> None:
    """Fill a zeroed [S, E, R] array."""
    sources, experts = load_SE.shape
    for expert in range(experts):
        for copy in range(start_E1[expert], start_E1[expert + 1]):
            rank = host_C[copy]
            if row_C[copy] < 0:
                for source in range(sources):
                    tokens_SER[source, expert, rank] = load_SE[source, expert]
            else:
                for source in range(sources):
                    tokens_SER[source, expert, rank] = split_XS[row_C[copy], source]


@kernel
def group_traffic(
    load_SE: Ints, start_E1: Ints, host_C: Ints, row_C: Ints, split_XS: Ints, group_R: Ints, groups: int
) -> Ints:
    """Pairs from every group of sources to every group of ranks: int64 [G, G]."""
    sources, experts = load_SE.shape
    pairs_GG = np.zeros((groups, groups), np.int64)
    for expert in range(experts):
        for copy in range(start_E1[expert], start_E1[expert + 1]):
            target = group_R[host_C[copy]]
            if row_C[copy] < 0:
                for source in range(sources):
                    pairs_GG[group_R[source], target] += load_SE[source, expert]
            else:
                for source in range(sources):
                    pairs_GG[group_R[source], target] += split_XS[row_C[copy], source]
    return pairs_GG


@kernel
def split_evenly(load_SE: Ints, start_E1: Ints, host_C: Ints, count_RE: Ints) -> tuple[Ints, Ints, Ints]:
    """(quota_C, row_C, split_XS): each source's tokens shared out evenly over copies, remainders in turn."""
    sources, experts = load_SE.shape
    quota_C = np.zeros(host_C.size, np.int64)
    row_C = np.full(host_C.size, -1, np.int64)
    rows = 0
    for expert in range(experts):
        if start_E1[expert + 1] - start_E1[expert] > 1:
            for copy in range(start_E1[expert], start_E1[expert + 1]):
                row_C[copy] = rows
                rows += 1
    split_XS = np.zeros((rows, sources), np.int64)
    for expert in range(experts):
        first, last = start_E1[expert], start_E1[expert + 1]
        weight = 0
        for copy in range(first, last):
            weight += count_RE[host_C[copy], expert]
        for source in range(sources):
            load = load_SE[source, expert]
            given = 0
            for copy in range(first, last):
                share = load * count_RE[host_C[copy], expert] // weight
                quota_C[copy] += share
                given += share
                if last - first > 1:
                    split_XS[row_C[copy], source] = share
            for turn in range(load - given):
                copy = first + (source + turn) % (last - first)
                quota_C[copy] += 1
                if last - first > 1:
                    split_XS[row_C[copy], source] += 1
    return quota_C, row_C, split_XS
