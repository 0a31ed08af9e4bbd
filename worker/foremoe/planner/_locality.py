"""The exact assignment: minimal maximum load, then fewest tokens leaving their domain, then their node.

The tokens of one (expert, group) are alike: served inside the group they cost nothing, outside a fixed price.
So tokens flow expert -> outer group -> inner group -> rank, and the arc into a group is free for as many tokens
as come from that group and costs its price beyond. The start serves every token where it is cheapest, as if ranks
had no limit; that is optimal but unbalanced. Excess then leaves the ranks above the cap along cheapest paths of
the residual network (successive shortest paths, which keep the cost minimal at every moment), all cheapest
paths of one Bellman-Ford pass at a time. Where no path is left, the ranks reached hold only tokens that must stay
on them; their mean is the next lower bound of the cap, and the flow starts again from there. So the result is
optimal in all goals, and typically one pass suffices.

Nodes: ranks 0..R-1, then for every expert with several hosts its own node, one per outer group and one per inner
group among its hosts.
"""

from __future__ import annotations

import numpy as np

from foremoe.planner._flow import Ints, Layout, start_local
from foremoe.planner._jit import inlined, kernel
from foremoe.topology import Locality

_FREE = 1 << 60
_FAR = 1 << 59


@kernel
def cheapest_balance(load_E: Ints, supply_EG: Ints, layout: Layout, place: Locality, floor: int) -> tuple[Ints, Ints]:
    """(quota_C, load_R) of the exact assignment; no cap below `floor` is tried."""
    ranks = place.inner_R.size
    cap = floor
    while True:
        quota_C, load_R = start_local(load_E, supply_EG, layout.start_E1, layout.host_C, place)
        network = _network(
            quota_C, supply_EG, layout.start_E1, layout.host_C, place.inner_R, place.outer_of_inner, ranks
        )
        needed = _flow_excess(quota_C, load_R, cap, layout, place, network)
        if needed == cap:
            return quota_C, load_R
        cap = needed


@kernel
def _flow_excess(
    quota_C: Ints,
    load_R: Ints,
    cap: int,
    layout: Layout,
    place: Locality,
    network: tuple[int, Ints, Ints, Ints, Ints, Ints],
) -> int:
    """Move excess above `cap` along cheapest paths, in place; returns `cap`, or a larger lower bound of it."""
    nodes = network[0]
    ranks = load_R.size
    dist_N = np.empty(nodes, np.int64)
    parent_N = np.empty(nodes, np.int64)
    via_N = np.empty(nodes, np.int64)
    seen_N = np.zeros(nodes, np.int64)
    queue = np.empty(ranks, np.int64)
    stamp = 0
    while True:
        excess = False
        for node in range(nodes):
            dist_N[node] = _FAR
            parent_N[node] = -1
        for rank in range(ranks):
            if load_R[rank] > cap:
                dist_N[rank] = 0
                excess = True
        if not excess:
            return cap
        while _relax(dist_N, parent_N, via_N, quota_C, layout, place, network):
            pass
        nearest = _FAR
        for rank in range(ranks):
            if load_R[rank] < cap:
                nearest = min(nearest, dist_N[rank])
        if nearest == _FAR:
            total, count = 0, 0
            for rank in range(ranks):
                if dist_N[rank] < _FAR:
                    total += load_R[rank]
                    count += 1
            return (total + count - 1) // count
        moved = 1
        fresh = True
        while moved > 0:
            moved = 0
            for rank in range(ranks):
                if load_R[rank] < cap and dist_N[rank] == nearest and (fresh or seen_N[rank] == stamp):
                    moved += _augment(rank, cap, dist_N, parent_N, via_N, quota_C, load_R, place, network)
            stamp += 1
            fresh = False
            _search_tight(cap, stamp, dist_N, parent_N, via_N, seen_N, queue, quota_C, load_R, layout, place, network)


@kernel
def _search_tight(
    cap: int,
    stamp: int,
    dist_N: Ints,
    parent_N: Ints,
    via_N: Ints,
    seen_N: Ints,
    queue: Ints,
    quota_C: Ints,
    load_R: Ints,
    layout: Layout,
    place: Locality,
    network: tuple[int, Ints, Ints, Ints, Ints, Ints],
) -> None:
    """Rebuild the path tree from the ranks above the cap, over arcs whose price equals the difference in distance.

    As long as such paths reach a rank below the cap at the nearest distance, no new distances are needed.
    """
    node_E, inner_C, outer_C, flow_N, supply_N = network[1], network[2], network[3], network[4], network[5]
    start_E1, host_C = layout.start_E1, layout.host_C
    inner_price, outer_price = place.inner_price, place.outer_price
    tail = 0
    for rank in range(load_R.size):
        if load_R[rank] > cap and dist_N[rank] == 0:
            seen_N[rank] = stamp
            parent_N[rank] = -1
            queue[tail] = rank
            tail += 1
    head = 0
    while head < tail:
        rank = queue[head]
        head += 1
        for position in range(layout.rank_start_R1[rank], layout.rank_start_R1[rank + 1]):
            copy = layout.rank_copy[position]
            inner = inner_C[copy]
            if quota_C[copy] == 0 or seen_N[inner] == stamp or dist_N[inner] != dist_N[rank]:
                continue
            seen_N[inner], parent_N[inner], via_N[inner] = stamp, rank, copy
            expert = layout.expert_C[copy]
            node, outer = node_E[expert], outer_C[copy]
            if seen_N[outer] != stamp and flow_N[inner] > 0:
                price = inner_price if flow_N[inner] > supply_N[inner] else 0
                if dist_N[outer] == dist_N[inner] - price:
                    seen_N[outer], parent_N[outer], via_N[outer] = stamp, inner, copy
            if seen_N[outer] == stamp and seen_N[node] != stamp and flow_N[outer] > 0:
                price = outer_price if flow_N[outer] > supply_N[outer] else 0
                if dist_N[node] == dist_N[outer] - price:
                    seen_N[node], parent_N[node], via_N[node] = stamp, outer, copy
            for other in range(start_E1[expert], start_E1[expert + 1]):
                inner, outer, target = inner_C[other], outer_C[other], host_C[other]
                if seen_N[node] == stamp and seen_N[outer] != stamp:
                    price = outer_price if flow_N[outer] >= supply_N[outer] else 0
                    if dist_N[outer] == dist_N[node] + price:
                        seen_N[outer], parent_N[outer], via_N[outer] = stamp, node, other
                if seen_N[outer] == stamp and seen_N[inner] != stamp:
                    price = inner_price if flow_N[inner] >= supply_N[inner] else 0
                    if dist_N[inner] == dist_N[outer] + price:
                        seen_N[inner], parent_N[inner], via_N[inner] = stamp, outer, other
                if seen_N[inner] == stamp and seen_N[target] != stamp and dist_N[target] == dist_N[inner]:
                    seen_N[target], parent_N[target], via_N[target] = stamp, inner, other
                    queue[tail] = target
                    tail += 1


@kernel
def _network(
    quota_C: Ints, supply_EG: Ints, start_E1: Ints, host_C: Ints, inner_R: Ints, outer_of_inner: Ints, ranks: int
) -> tuple[int, Ints, Ints, Ints, Ints, Ints]:
    """Number the nodes: (count, node_E, inner node of each copy, outer node of each copy, flow_N, supply_N).

    flow_N and supply_N are tokens through a group node and tokens that come from that group.
    """
    experts = start_E1.size - 1
    groups = supply_EG.shape[1]
    outers = outer_of_inner.max() + 1
    node_E = np.full(experts, -1, np.int64)
    inner_C = np.full(host_C.size, -1, np.int64)
    outer_C = np.full(host_C.size, -1, np.int64)
    limit = ranks + 1
    for expert in range(experts):
        copies = start_E1[expert + 1] - start_E1[expert]
        if copies > 1:
            limit += 1 + 2 * copies
    flow_N = np.zeros(limit, np.int64)
    supply_N = np.zeros(limit, np.int64)
    inner_node_G = np.empty(groups, np.int64)
    outer_node_G = np.empty(outers, np.int64)
    count = ranks + 1
    for expert in range(experts):
        first, last = start_E1[expert], start_E1[expert + 1]
        if last - first < 2:
            continue
        node_E[expert] = count
        count += 1
        for copy in range(first, last):
            inner_node_G[inner_R[host_C[copy]]] = -1
            outer_node_G[outer_of_inner[inner_R[host_C[copy]]]] = -1
        for copy in range(first, last):
            group = inner_R[host_C[copy]]
            outer = outer_of_inner[group]
            if outer_node_G[outer] < 0:
                outer_node_G[outer] = count
                for member in range(groups):
                    if outer_of_inner[member] == outer:
                        supply_N[count] += supply_EG[expert, member]
                count += 1
            if inner_node_G[group] < 0:
                inner_node_G[group] = count
                supply_N[count] = supply_EG[expert, group]
                count += 1
            inner_C[copy] = inner_node_G[group]
            outer_C[copy] = outer_node_G[outer]
            flow_N[inner_C[copy]] += quota_C[copy]
            flow_N[outer_C[copy]] += quota_C[copy]
    return count, node_E, inner_C, outer_C, flow_N[:count], supply_N[:count]


@inlined
def _arc(
    source: int,
    target: int,
    copy: int,
    quota_C: Ints,
    ranks: int,
    inner_price: int,
    outer_price: int,
    network: tuple[int, Ints, Ints, Ints, Ints, Ints],
) -> tuple[int, int]:
    """(price, room) of a residual arc as things are now."""
    if source < ranks:
        return 0, quota_C[copy]
    if target < ranks:
        return 0, _FREE
    flow_N, supply_N = network[4], network[5]
    inner, outer = network[2][copy], network[3][copy]
    if source == inner or target == inner:
        group, price = inner, inner_price
    else:
        group, price = outer, outer_price
    balance = supply_N[group] - flow_N[group]
    if target == group and source != inner:
        return (0, balance) if balance > 0 else (price, _FREE)
    if source == inner and target == outer:
        return (-price, -balance) if balance < 0 else (0, flow_N[group])
    return (-price, -balance) if balance < 0 else (0, flow_N[group])


@kernel
def _augment(
    sink: int,
    cap: int,
    dist_N: Ints,
    parent_N: Ints,
    via_N: Ints,
    quota_C: Ints,
    load_R: Ints,
    place: Locality,
    network: tuple[int, Ints, Ints, Ints, Ints, Ints],
) -> int:
    """Push along the tree path to `sink`, as far as arcs still have the price the path was found with;
    returns the tokens moved."""
    ranks = load_R.size
    amount = cap - load_R[sink]
    node = sink
    while parent_N[node] >= 0:
        before = parent_N[node]
        price, room = _arc(before, node, via_N[node], quota_C, ranks, place.inner_price, place.outer_price, network)
        if price != dist_N[node] - dist_N[before]:
            return 0
        amount = min(amount, room)
        node = before
    amount = min(amount, load_R[node] - cap)
    if amount <= 0:
        return 0
    load_R[node] -= amount
    load_R[sink] += amount
    node = sink
    while parent_N[node] >= 0:
        _push(parent_N[node], node, amount, via_N[node], quota_C, ranks, network)
        node = parent_N[node]
    return int(amount)


@inlined
def _push(
    source: int,
    target: int,
    amount: int,
    copy: int,
    quota_C: Ints,
    ranks: int,
    network: tuple[int, Ints, Ints, Ints, Ints, Ints],
) -> None:
    """Move `amount` along one residual arc. A group's flow is that of the arc from above it."""
    flow_N = network[4]
    inner, outer = network[2][copy], network[3][copy]
    if source < ranks:
        quota_C[copy] -= amount
    elif target < ranks:
        quota_C[copy] += amount
    elif source == inner:
        flow_N[inner] -= amount
    elif target == inner:
        flow_N[inner] += amount
    elif source == outer:
        flow_N[outer] -= amount
    else:
        flow_N[outer] += amount


@kernel
def _relax(
    dist_N: Ints,
    parent_N: Ints,
    via_N: Ints,
    quota_C: Ints,
    layout: Layout,
    place: Locality,
    network: tuple[int, Ints, Ints, Ints, Ints, Ints],
) -> bool:
    """One Bellman-Ford sweep, in an order in which a whole move between two ranks takes one sweep."""
    # Written out arc by arc: a call for each would cost more than the arc.
    node_E, inner_C, outer_C, flow_N, supply_N = network[1], network[2], network[3], network[4], network[5]
    start_E1, host_C = layout.start_E1, layout.host_C
    inner_price, outer_price = place.inner_price, place.outer_price
    changed = False
    for expert in range(node_E.size):
        node = node_E[expert]
        if node < 0:
            continue
        first, last = start_E1[expert], start_E1[expert + 1]
        reached = False
        for copy in range(first, last):
            near = dist_N[host_C[copy]]
            if near >= _FAR or quota_C[copy] == 0:
                continue
            reached = True
            inner, outer = inner_C[copy], outer_C[copy]
            if near < dist_N[inner]:
                dist_N[inner], parent_N[inner], via_N[inner] = near, host_C[copy], copy
                changed = True
            if flow_N[inner] > 0:
                near = dist_N[inner] - (inner_price if flow_N[inner] > supply_N[inner] else 0)
                if near < dist_N[outer]:
                    dist_N[outer], parent_N[outer], via_N[outer] = near, inner, copy
                    changed = True
            if flow_N[outer] > 0:
                near = dist_N[outer] - (outer_price if flow_N[outer] > supply_N[outer] else 0)
                if near < dist_N[node]:
                    dist_N[node], parent_N[node], via_N[node] = near, outer, copy
                    changed = True
        if not reached:
            continue
        top = dist_N[node]
        for copy in range(first, last):
            rank, inner, outer = host_C[copy], inner_C[copy], outer_C[copy]
            near = top + (outer_price if flow_N[outer] >= supply_N[outer] else 0)
            if near < dist_N[outer]:
                dist_N[outer], parent_N[outer], via_N[outer] = near, node, copy
                changed = True
            near = dist_N[outer] + (inner_price if flow_N[inner] >= supply_N[inner] else 0)
            if near < dist_N[inner]:
                dist_N[inner], parent_N[inner], via_N[inner] = near, outer, copy
                changed = True
            if dist_N[inner] < dist_N[rank]:
                dist_N[rank], parent_N[rank], via_N[rank] = dist_N[inner], inner, copy
                changed = True
    return changed
