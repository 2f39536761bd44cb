"""The page in one file: reports of runs, and the sections of experiments."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.watch.page import page, report_page
from pipelinerl.metrics.summary import summarize
from pipelinerl.report import Chart, PageSection, table
from pipelinerl.report.series import labels_of
from tests.unit.experiments.watch.watch_parts import a_step, append, make_run
from tests.unit.record_parts import answered


def data_of(html: str) -> dict[str, Any]:
    """What the scripts of a page read."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_loads_nothing_and_allows_no_other_script() -> None:
    html = page("<script>alert(1)</script>", [PageSection(title="</script><script>alert(2)</script>")])
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 2
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    policy = re.search(r'content-security-policy" content="([^"]*)"', html)
    assert policy is not None
    assert re.findall(r"'sha256-(.*?)'", policy[1]) == digests
    assert "default-src 'none'" in policy[1]
    assert not re.findall(r'(?:src|href)="(?!data:|#)', html)
    assert data_of(html)["sections"][0]["title"] == "</script><script>alert(2)</script>"


def test_sections_have_tables_and_charts_and_runs_share_colours() -> None:
    chart = Chart(title="KL", x_label="lag", x=[0, 1], lines={"a": [0.5, None]}, log=True)
    sections = [
        table("Schedules", [{"schedule": "x", "rate": "1"}], "note", strong=["x"]),
        PageSection(title="y", charts=[chart]),
    ]
    data = data_of(page("t", sections, {"x 0": {}, "x 1": {}, "y 0": {}}, {"x 0": "x", "x 1": "x", "y 0": "y"}))
    assert (data["sections"][0]["header"], data["sections"][0]["rows"]) == (["schedule", "rate"], [["x", "1"]])
    assert data["sections"][1]["charts"][0]["lines"] == {"a": [0.5, None]}
    assert [(run["label"], run["colour"]) for run in data["runs"]] == [("x 0", 0), ("x 1", 0), ("y 0", 1)]


def test_a_report_has_all_of_a_run(tmp_path: Path) -> None:
    root = make_run(tmp_path / "<b>run<b>")
    config = RunConfig()
    summary = summarize(config, [a_step(n, 3.0 + n) for n in range(1, 5)], [], {}, wall_s=9.0, status="finished")
    (root / "summary.json").write_bytes(msgspec.json.encode(summary))
    for when, text, reward in (("before", ">35", 0.0), ("after", ">07", 1.0)):
        one = answered(reward, prompt="07,35:", completion=text)
        append(root / "rollouts" / f"evaluation-{when}.jsonl", one)
    html = report_page([root, make_run(tmp_path / "killed", steps=0, status=None)])
    assert "<b>" not in html
    data = data_of(html)
    run, killed = (data["news"][label] for label in ("<b>run<b>", "killed"))
    assert run["steps"]["columns"]["version"] == [1, 2, 3, 4]
    assert run["now"]["state"] == "finished"
    assert run["groups"]["groups"][0]["index"] == 1
    result = dict(run["result"])
    assert result["training, without start-up"].startswith("4 steps, 32 rollouts in 4.0 s: 8.0 samples/s")
    assert "trained" in result
    assert run["gain"] == [["before", "07,35:", ">35", "0"], ["after", "07,35:", ">07", "1"]]
    assert (killed["now"]["state"], killed["result"], killed["gain"]) == ("ended", [["model", "demo"]], [])


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    assert labels_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    with pytest.raises(RunDirectoryError, match="named twice"):
        labels_of([tmp_path / "a", tmp_path / "b" / ".." / "a"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", None, "it has no config.yaml"),
        ("summary.json", b"{", "summary.json"),
        ("summary.json", b'{"status": "finished"}', "summary.json"),
    ],
)
def test_damage_is_named_or_counted(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    run = make_run(tmp_path / "run", status=None)
    append(run / "metrics.jsonl", {})
    shown = data_of(report_page([run]))["news"]["run"]
    assert shown["now"]["damaged"] == 1
    assert not any("samples/s" in text for _, text in shown["result"])  # the damaged step took its time, too
    (run / name).unlink() if content is None else (run / name).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=message) as error:
        report_page([run])
    assert "\n" not in str(error.value)
    with pytest.raises(RunDirectoryError, match="there is no such folder"):
        report_page([tmp_path / "absent"])
