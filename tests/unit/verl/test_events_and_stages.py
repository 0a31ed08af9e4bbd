"""What the processes of a run report, and that reporting never hurts the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from foremoe.verl import stages
from foremoe.verl.events import EventSender
from foremoe.verl.settings import Settings


class Recorder(EventSender):
    def __init__(self) -> None:
        super().__init__(Settings())
        self.sent: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})


@contextmanager
def timer(name: str, timing: dict[str, float], color: str = "") -> Iterator[None]:
    yield
    timing[name] = 1.0


def test_a_timer_announces_its_stage_and_still_times() -> None:
    events, timing = Recorder(), dict[str, float]()
    wrapped = stages.announcing(timer, events)
    with wrapped("gen", timing, color="red"), wrapped("adv", timing):
        pass
    assert timing == {"gen": 1.0, "adv": 1.0}
    assert events.sent == [{"kind": "stage", "stage": "Rollout"}]


def test_a_saved_checkpoint_is_announced_when_it_is_complete() -> None:
    events = Recorder()
    wrapped = stages.announcing(timer, events)
    with pytest.raises(OSError), wrapped("save_checkpoint", {}):
        raise OSError("disk full")
    assert [event["kind"] for event in events.sent] == ["stage"]
    with wrapped("save_checkpoint", {}):
        pass
    assert events.sent[-1] == {"kind": "checkpoint"}


def test_metrics_of_a_step_are_passed_on_as_plain_numbers() -> None:
    events, logged = Recorder(), list[int]()

    def log(self: object, data: dict[str, Any], step: int) -> None:
        logged.append(step)

    stages.reporting(log, events)(object(), {"a": 1, "b": float("nan"), "c": "text", "d": None}, step=4)
    assert logged == [4]
    assert events.sent == [{"kind": "step", "step": 4, "metrics": {"a": 1.0}}]


def test_events_arrive_in_order_with_the_token() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.headers["Authorization"], json.loads(body)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sender = EventSender(Settings(events_url=f"http://127.0.0.1:{server.server_port}/", events_token="t"))
        for number in range(5):
            sender.send("step", step=number)
        sender.drain(10)
        server.shutdown()
    assert [event["step"] for _, event in seen] == list(range(5))
    assert {token for token, _ in seen} == {"Bearer t"}


def test_without_an_agent_sending_does_nothing() -> None:
    sender = EventSender(Settings())
    sender.send("stage", stage="Rollout")
    assert sender._thread is None
