"""The page of `pipelinerl watch` in a real browser: Debian's Chromium, driven by Playwright (extra `pages`)."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.experiments.browse_parts import group, rollout, turn
from tests.unit.experiments.watch.watch_parts import HOSTILE, a_step, append, make_run
from tests.unit.record_parts import evaluation

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install 'pipelinerl[pages]'")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]
COMMAND = "import sys; from pipelinerl.cli import main; sys.exit(main())"


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command with a page, and the address that it prints."""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"watch(?:ing at| it at) (\S+)", line):
                    yield process, found[1]
                    break
            else:
                pytest.fail("it printed no address")
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in which nothing may be refused by the content security policy, fail, or come from elsewhere."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: None if "127.0.0.1" in request.url or request.url.startswith("data:") else wrong.append(request.url),
    )
    yield page
    context.close()
    assert [text for text in wrong if "ERR_INCOMPLETE_CHUNKED" not in text and "ERR_CONNECTION_REFUSED" not in text] == []


def test_a_run_is_shown_grows_and_fails(tmp_path: Path, page: Any) -> None:
    root = make_run(tmp_path / "run", steps=6, status=None)
    with command("watch", str(root), "--port", "0") as (_, address):
        page.goto(address)
        page.wait_for_selector("#curves canvas")
        assert "step 6 of 10" in page.text_content("#times")
        append(root / "metrics.jsonl", a_step(7, 10.0, 0.9))
        append(root / "evaluations.jsonl", evaluation("after", 7, 9.0, reward_mean=0.75, reward_standard_error=0.1))
        page.wait_for_selector("#times:has-text('step 7 of 10')")
        page.wait_for_selector("#evaluations:has-text('0.750 ± 0.100')")
        (root / "summary.json").write_text('{"status": "failed: <b>the trainer died</b>"}')
        page.wait_for_selector("#message:has-text('<b>the trainer died</b>')")
        shutil.rmtree(root)
        page.wait_for_selector("#state:has-text('gone')")


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1200, "dark")])
def test_text_of_models_is_text_fits_any_width_and_is_readable_in_both_themes(
    tmp_path: Path, page: Any, width: int, scheme: Any
) -> None:
    hostile = group(7, rollout(7, 0, 1.0, turn(HOSTILE, HOSTILE, (3, 20), (4, 0))), question=HOSTILE)
    root = make_run(tmp_path / "a-run-with-a-<b>name</b>-that-is-much-too-long-for-a-telephone", steps=6, groups=[hostile])
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    with command("watch", str(root), "--port", "0") as (_, address):
        page.goto(address)
        page.wait_for_selector(".attempt pre")
        assert "<script>document.title" in page.text_content("#rollouts")
        assert page.locator("#rollouts script, #rollouts img, #runs b").count() == 0
        assert "owned" not in page.title()
        assert page.locator(".attempt sup").all_text_contents() == ["3", "4"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
        light = [sum(map(int, re.findall(r"\d+", text)[:3])) for text in (ink, paper)]
        assert light[0] < light[1] if scheme == "light" else light[0] > light[1]


def test_several_runs_are_compared_with_the_keyboard(tmp_path: Path, page: Any) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        append(make_run(tmp_path / name, steps=6) / "sessions.jsonl", {"config": {"seed": seed, "trainer": {"steps": 10}}})
    with command("watch", str(tmp_path), "--port", "0") as (_, address):
        page.goto(address)
        page.wait_for_selector("#curves canvas")
        other = page.locator("#runs input:not(:checked)")
        other.focus()
        page.keyboard.press("Space")
        page.wait_for_selector("#differences tbody tr:has-text('seed')", state="attached")
        page.locator("#differences summary").press("Enter")
        page.wait_for_selector("#differences tbody tr:has-text('seed')")
        (differs,) = page.locator("#differences tbody tr").all_text_contents()
        assert differs in ("seed01", "seed10")
        page.locator("input[value=minutes]").check()
        page.reload()
        page.wait_for_selector("#runs input:checked >> nth=1")


def test_train_with_a_page_shows_the_run_and_ends_with_it(tmp_path: Path, page: Any) -> None:
    root = tmp_path / "run"
    settings = ("--trainer.steps", "4", "--trainer.batch_size", "32", "--evaluation.problems", "8", "--run_dir", str(root))
    with command("train", "--watch", "--watch-port", "0", *settings) as (process, address):
        page.goto(address)
        page.wait_for_selector("#stages li:has-text('trainer')")
        page.wait_for_selector("#connection:has-text('The run has ended')", timeout=120_000)
        assert page.text_content("#state") == "finished"
        assert page.text_content("#times").startswith("step 4 of 4")
        assert process.wait(30) == 0
    assert (root / "logs" / "watch.log").read_text() == ""
