"""The head's HTTP interface, without a socket."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.unit.agent.test_checks import spec_of
from tests.unit.agent.test_members import call

from foremoe.agent.members import Members
from foremoe.agent.metrics import ProgressCollector
from foremoe.agent.server import PATH_EVENTS, PATH_WORKERS, HeadApi
from foremoe.agent.tracker import Tracker
from foremoe_operator.api import constants as c
from foremoe_operator.api.progress import Progress


@pytest.fixture
def api(tmp_path: Path) -> HeadApi:
    tracker = Tracker(spec_of(tmp_path))
    return HeadApi(
        tracker=tracker,
        members=Members(expected=2, ray_version="2", on_change=tracker.joined),
        collector=ProgressCollector(tracker, job="a-job", namespace="team"),
        token="secret",
    )


def client_of(api: HeadApi) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(api.application()), base_url="http://head")


async def test_health_and_progress(api: HeadApi) -> None:
    async with client_of(api) as client:
        assert (await client.get(c.PATH_HEALTH)).status_code == 200
        progress = Progress.model_validate_json((await client.get(c.PATH_PROGRESS)).content)
    assert progress.stage is c.Stage.BOOTING and progress.total_steps == 1


async def test_events_need_the_token(api: HeadApi) -> None:
    event = {"kind": "stage", "stage": "Rollout"}
    async with client_of(api) as client:
        assert (await client.post(PATH_EVENTS, json=event)).status_code == 401
        good = {"Authorization": "Bearer secret"}
        assert (await client.post(PATH_EVENTS, json=event, headers=good)).status_code == 204
        assert (await client.post(PATH_EVENTS, content=b"{", headers=good)).status_code == 422
        assert (await client.post(PATH_EVENTS, json=[1], headers=good)).status_code == 422
    assert api.tracker.progress.stage is c.Stage.ROLLOUT


async def test_workers_join_and_hear_of_the_end(api: HeadApi) -> None:
    async with client_of(api) as client:
        await client.post(PATH_WORKERS, json=call(0).model_dump())
        assert api.tracker.progress.workers_joined == 1
        assert (await client.post(PATH_WORKERS, json={"index": 0})).status_code == 422
        api.tracker.finish(0)
        answer = (await client.post(PATH_WORKERS, json=call(0).model_dump())).json()
        assert answer["ready"] is True
    assert answer["finished"] is True and answer["exit_code"] == 0


async def test_metrics_are_in_prometheus_text_format(api: HeadApi) -> None:
    api.tracker.handle({"kind": "step", "step": 1, "metrics": {"critic/score/mean": 0.25, "timing_s/step": 2.0}})
    async with client_of(api) as client:
        text = (await client.get(c.PATH_METRICS)).text
    assert "foremoe_step 1.0" in text and "foremoe_reward 0.25" in text
    assert 'foremoe_stage{stage="Booting"} 1.0' in text
    assert 'foremoe_stage_seconds{stage="step"} 2.0' in text
