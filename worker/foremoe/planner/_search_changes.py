"""Changes of the search's state that repair just the flows they touch, and how to take them back.

A change sends the tokens of the copies concerned home, then lets excess flow out again. Flows are saved in a second
state before they are touched, so that a change that is not kept costs a copy back and nothing else. Every
change stops repairing once more than `limit` tokens are stuck; it must then be taken back.
"""

from __future__ import annotations

from foremoe.planner._jit import kernel
from foremoe.planner._search_state import Bools, State, attach, detach, drain


@kernel
def save(state: State, micro_step: int, backup: State, touched_M: Bools) -> None:
    """Save the flow of a micro-step before its first change."""
    if not touched_M[micro_step]:
        touched_M[micro_step] = True
        backup.quota_MC[micro_step] = state.quota_MC[micro_step]
        backup.load_MR[micro_step] = state.load_MR[micro_step]
        backup.stuck_M[micro_step] = state.stuck_M[micro_step]


@kernel
def restore(state: State, backup: State, touched_M: Bools) -> None:
    """Bring back the flows that were saved."""
    for micro_step in range(touched_M.size):
        if touched_M[micro_step]:
            state.quota_MC[micro_step] = backup.quota_MC[micro_step]
            state.load_MR[micro_step] = backup.load_MR[micro_step]
            state.stuck_M[micro_step] = backup.stuck_M[micro_step]


@kernel
def send_home(state: State, micro_step: int, copy: int) -> None:
    """Let the home of a replica's expert compute what the replica does."""
    quota = state.quota_MC[micro_step, copy]
    if quota > 0:
        home = state.expert_C[copy]
        state.quota_MC[micro_step, home] += quota
        state.load_MR[micro_step, state.host_C[home]] += quota
        state.quota_MC[micro_step, copy] = 0
        state.load_MR[micro_step, state.host_C[copy]] -= quota


@kernel
def repair(state: State, touched_M: Bools, limit: float) -> int:
    """Drain the touched micro-steps; returns all stuck tokens, or as soon as more than `limit` are."""
    total = 0
    for micro_step in range(touched_M.size):
        if not touched_M[micro_step]:
            total += state.stuck_M[micro_step]
    for micro_step in range(touched_M.size):
        if touched_M[micro_step] and total <= limit:
            total += drain(state, micro_step)
    return total


@kernel
def change_slot(state: State, copy: int, expert: int, backup: State, touched_M: Bools, limit: float) -> int:
    """Give a slot to another expert (-1 = none) and repair the flows; returns all stuck tokens.

    Stops repairing once more than `limit` tokens are stuck; the change must then be undone.
    Flows of touched micro-steps are saved in `backup` first, so that `undo` can restore them.
    """
    touched_M[:] = False
    for micro_step in range(touched_M.size):
        if state.quota_MC[micro_step, copy] > 0 or (expert >= 0 and state.stuck_M[micro_step] > 0):
            save(state, micro_step, backup, touched_M)
            send_home(state, micro_step, copy)
    if state.expert_C[copy] >= 0:
        detach(state, copy)
    if expert >= 0:
        attach(state, copy, expert)
    return repair(state, touched_M, limit)


@kernel
def undo(state: State, copy: int, old: int, backup: State, touched_M: Bools) -> None:
    """Take back `change_slot`."""
    if state.expert_C[copy] >= 0:
        detach(state, copy)
    if old >= 0:
        attach(state, copy, old)
    restore(state, backup, touched_M)


@kernel
def exchange_slots(state: State, left: int, right: int, backup: State, touched_M: Bools, limit: float) -> int:
    """Exchange the experts of two filled slots and repair the flows; returns all stuck tokens, like `change_slot`."""
    touched_M[:] = False
    for micro_step in range(touched_M.size):
        used = state.quota_MC[micro_step, left] + state.quota_MC[micro_step, right]
        if used > 0 or state.stuck_M[micro_step] > 0:
            save(state, micro_step, backup, touched_M)
            send_home(state, micro_step, left)
            send_home(state, micro_step, right)
    exchange(state, left, right)
    return repair(state, touched_M, limit)


@kernel
def exchange(state: State, left: int, right: int) -> None:
    """Exchange the experts of two slots; their quotas must have gone home before, or be restored after."""
    one, two = state.expert_C[left], state.expert_C[right]
    detach(state, left)
    detach(state, right)
    attach(state, left, two)
    attach(state, right, one)


@kernel
def swap_homes(
    state: State, left: int, right: int, back: int, forth: int, backup: State, touched_M: Bools, limit: float
) -> int:
    """Swap the homes of two experts and repair all flows; returns all stuck tokens, like `change_slot`.

    `back` and `forth` swap homes before, if they are not -1.
    """
    touched_M[:] = False
    for micro_step in range(touched_M.size):
        save(state, micro_step, backup, touched_M)
    if back >= 0:
        trade_loads(state, back, forth)
        trade_places(state, back, forth)
    trade_loads(state, left, right)
    trade_places(state, left, right)
    return repair(state, touched_M, limit)


@kernel
def trade_loads(state: State, left: int, right: int) -> None:
    """Change the ranks' loads as if two home copies traded ranks with what they compute."""
    one, two = state.host_C[left], state.host_C[right]
    for micro_step in range(state.load_MR.shape[0]):
        delta = state.quota_MC[micro_step, right] - state.quota_MC[micro_step, left]
        state.load_MR[micro_step, one] += delta
        state.load_MR[micro_step, two] -= delta


@kernel
def trade_places(state: State, left: int, right: int) -> None:
    """Let two home copies trade ranks."""
    one, two = state.host_C[left], state.host_C[right]
    for position in range(state.rank_copy_RX.shape[1]):
        if state.rank_copy_RX[one, position] == left:
            state.rank_copy_RX[one, position] = right
        if state.rank_copy_RX[two, position] == right:
            state.rank_copy_RX[two, position] = left
    state.host_C[left], state.host_C[right] = two, one
