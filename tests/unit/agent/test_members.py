"""Which workers have joined, left or fallen silent."""

from __future__ import annotations

from foremoe.agent.members import SILENCE_SECONDS, Call, Members


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def call(index: int, *, joined: bool = True, version: str = "2", leaving: str = "") -> Call:
    return Call(index=index, joined=joined, ray_version=version, accelerator=False, leaving=leaving)


def make(clock: Clock | None = None) -> Members:
    return Members(expected=2, ray_version="2", clock=clock or Clock())


def test_workers_join_once_their_ray_node_is_up() -> None:
    seen: list[int] = []
    members = make()
    members.on_change = seen.append
    members.receive(call(0, joined=False), finished=False, exit_code=None)
    assert members.missing == [0, 1]
    members.receive(call(0), finished=False, exit_code=None)
    members.receive(call(0), finished=False, exit_code=None)
    members.receive(call(1), finished=False, exit_code=None)
    assert members.missing == [] and seen == [1, 2]


def test_another_version_of_ray_is_refused_in_words() -> None:
    answer = make().receive(call(1, version="3"), finished=False, exit_code=None)
    assert "worker 1 has Ray 3, the head 2" in answer.refused


def test_an_index_out_of_range_is_refused() -> None:
    assert make().receive(call(2), finished=False, exit_code=None).refused


def test_a_silent_worker_is_lost_after_a_while() -> None:
    clock = Clock()
    members = make(clock)
    members.receive(call(0), finished=False, exit_code=None)
    clock.now = SILENCE_SECONDS - 1
    assert members.lost() is None
    clock.now = SILENCE_SECONDS + 1
    assert "worker 0" in (members.lost() or "")


def test_a_worker_that_leaves_says_why() -> None:
    members = make()
    members.receive(call(1, joined=False, leaving="its pod was told to stop"), finished=False, exit_code=None)
    assert members.lost() == "worker 1 left: its pod was told to stop"


def test_the_end_is_known_once_everyone_has_called_after_it() -> None:
    members = make()
    members.receive(call(0), finished=False, exit_code=None)
    members.receive(call(1), finished=True, exit_code=0)
    assert not members.all_know_end
    answer = members.receive(call(0), finished=True, exit_code=0)
    assert members.all_know_end and answer.finished and answer.exit_code == 0
