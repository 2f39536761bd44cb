"""The page's server: who may read, what it sends, and `pipelinerl watch` and `train --watch` as commands."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.resources
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from pipelinerl.cli import main
from pipelinerl.experiments.watch.server import Runs, make_app
from tests.unit.experiments.watch.watch_parts import make_run

ASSETS = Path(str(importlib.resources.files("pipelinerl"))) / "assets" / "watch"


async def get(root: Path, path: str, *, host: str = "127.0.0.1:7117", **headers: str) -> httpx2.Response:
    """One answer of a server that stops, so that its events end."""
    stopping = asyncio.Event()
    stopping.set()
    app = make_app(Runs([root]), stopping=stopping, end_note="over")
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=f"http://{host}") as client:
        return await client.get(path, headers=headers)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "one")


@pytest.mark.parametrize("host", ["127.0.0.1:7117", "localhost", "[::1]:80"])
async def test_names_of_this_machine_are_answered(run: Path, host: str) -> None:
    answer = await get(run, "/", host=host)
    assert answer.status_code == 200
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("host", ["evil.example:7117", "127.0.0.1.evil.example", "192.168.1.5", "[", ""])
@pytest.mark.parametrize("path", ["/", "/runs", "/events?run=one", "/watch.js"])
async def test_other_names_are_refused(run: Path, host: str, path: str) -> None:
    answer = await get(run, path, Host=host)
    assert answer.status_code == 403
    assert "one" not in answer.text.replace("one of", "")


async def test_the_events_end_with_the_last_state_when_the_server_stops(run: Path) -> None:
    answer = await get(run, "/events?run=one")
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, last = answer.text.strip().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["one"]["now"]["state"] == "finished"
    assert last == 'event: end\ndata: "over"'
    assert (await get(run, "/events?run=../one")).status_code == 404


async def test_a_folder_of_runs_lists_them_newest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        os.utime(make_run(tmp_path / name) / "config.yaml", (10_000 - age, 10_000 - age))
    (tmp_path / "no run").mkdir()
    shown = (await get(tmp_path, "/runs")).json()
    assert shown == [{"label": "new", "first": True}, {"label": "middle", "first": False}, {"label": "old", "first": False}]


def test_the_chart_library_is_the_one_that_is_recorded() -> None:
    recorded = json.loads((ASSETS / "vendored.json").read_text())["sha256"]
    assert recorded == {name: hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() for name in recorded}
    assert {path.name for path in ASSETS.iterdir()} == {*recorded, "vendored.json", "index.html", "watch.js", "watch.css"}


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_of_data() -> None:
    for name in ("index.html", "watch.js", "watch.css"):
        text = (ASSETS / name).read_text()
        assert not re.findall(r"https?:|//cdn|@import|url\(", text), name
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function| style=| on\w+=", text
        ), name


def test_what_can_not_be_watched_is_one_line(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "neither a run directory nor a folder of them" in capsys.readouterr().err
    assert main(["watch", str(run), "--port", "99999"]) == 2
    assert main(["watch", str(run), "--host", "0.0.0.0"]) == 2  # noqa: S104 - what is tested
    assert "ssh -L 7117:127.0.0.1:7117" in capsys.readouterr().err


def test_train_with_a_page_that_can_not_be_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], not_installed: Callable[[str], None]
) -> None:
    root = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["train", "--watch", "--watch-port", port, "--run_dir", str(root)]) == 2
    assert f"can't listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert main(["train", "--watch-port", port]) == 2
    assert "--watch-port needs --watch" in capsys.readouterr().err
    not_installed("uvicorn")
    assert main(["train", "--watch", "--run_dir", str(root)]) == 2
    assert "pip install 'uvicorn>=" in capsys.readouterr().err
    assert not root.exists()
