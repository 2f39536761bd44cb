"""What the browser's screens show and where keys lead, in a terminal that exists in memory only."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments.browse.records import Browsed, RunEvaluations, RunRollouts
from pipelinerl.experiments.browse.tokens import TokenText, by_gap, by_logprob, by_version
from pipelinerl.types import Rollout
from tests.unit.experiments.browse.browse_parts import Bytes, answer, group, lines, rollout, run_directory, step, turn

pytest.importorskip("textual", reason="needs textual: pip install 'pipelinerl[browse]'")
from textual.events import MouseScrollDown, Paste

from pipelinerl.experiments.browse.textual_app import Level, RolloutBrowser

SVG_COLUMN, SVG_LINE = 12.2, 24.4  # the size of a character in a screenshot


class Seat:
    """A user in front of the browser. The app only runs while a key is handled or a screen is awaited."""

    def __init__(
        self,
        folder: Path,
        texts: TokenText | None = None,
        gaps: Callable[[Rollout], Sequence[float]] = lambda _rollout: [],
        *,
        width: int = 120,
        height: int = 24,
        run: Browsed | None = None,
        find: str | None = None,
    ) -> None:
        rollouts = RunRollouts(folder) if run is None else run
        self.app = RolloutBrowser(rollouts, "a run", lambda: texts or TokenText(Bytes()), gaps, find)
        self._runner = asyncio.Runner()
        self._test = self.app.run_test(size=(width, height), notifications=True)
        self._pilot = self._runner.run(self._test.__aenter__())
        self.draw()

    def close(self) -> None:
        self._runner.run(self._test.__aexit__(None, None, None))
        self._runner.close()

    def look(self) -> str:
        """The screen after the files were read again."""
        self.app.call_later(self.app.look)
        return self.draw()

    def draw(self) -> str:
        """The screen once nothing more happens by itself."""
        return "\n".join("".join(character for character, _ in line) for line in self.characters())

    def characters(self) -> list[list[tuple[str, str]]]:
        """The screen: for each line its characters and their colours."""
        svg = self._runner.run(self._screenshot())
        colours = dict(re.findall(r"\.[\w-]+-(r\d+) { fill: (#\w+)", svg))
        width, height = self.app.size
        screen = [[(" ", "")] * width for _ in range(height)]
        for style, x, y, text in re.findall(r'<text class="[\w-]+-(r\d+)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<\n]*)', svg):
            start, line = round(float(x) / SVG_COLUMN), screen[int(float(y) / SVG_LINE)]
            shown = html.unescape(text).replace("\xa0", " ")
            line[start : start + len(shown)] = [(character, colours[style]) for character in shown]
        return screen

    def colours(self, text: str) -> list[str]:
        """The colours of the characters of the last line with this text."""
        line = next(line for line in reversed(self.characters()) if text in "".join(character for character, _ in line))
        start = "".join(character for character, _ in line).index(text)
        return [colour for _, colour in line[start : start + len(text)]]

    def press(self, *keys: str) -> str:
        self._runner.run(self._pilot.press(*keys))
        return self.draw()

    def enter(self, key: str, text: str) -> str:
        """The screen after an entry that was begun by `key`."""
        self._runner.run(self._pilot.press(key))
        self.app.post_message(Paste(text))
        return self.press("enter")

    async def _screenshot(self) -> str:
        while self.app.return_code is None:
            await self._pilot.pause()
            if not self.app.busy:
                return self.app.export_screenshot()
        return ""


Sit = Callable[..., Seat]


@pytest.fixture
def sit() -> Iterator[Sit]:
    """Makes seats, and closes them in the end."""
    seats: list[Seat] = []

    def one(*arguments: Any, **options: Any) -> Seat:
        seats.append(Seat(*arguments, **options))
        return seats[-1]

    yield one
    for seat in seats:
        seat.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_directory(tmp_path / "run")


def test_groups_with_rewards_lags_and_what_was_dropped(sit: Sit, folder: Path) -> None:
    text = sit(folder).draw()
    assert "a run · 4 groups · the trainer left out: stale 2, zero_advantage 1" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert rows["0"].split()[1:] == ["█·", "0.500", "4", "0-1", "0", "1/2", "sum/0", '{"question":"2+3="}']
    assert rows["1"].split()[-2:] == ["timeout", "2"]
    assert rows["3"].split()[1:7] == ["▄█", "0.750", "4", "4-5", "0-2", "1/2"]


def test_from_all_groups_to_one_token_and_back(sit: Sit, folder: Path) -> None:
    seat = sit(folder)
    columns = seat.press("enter")
    assert "attempt 0  reward 1" in columns
    assert "attempt 1  reward 0" in columns
    assert "step 1, lag 0" in columns
    assert "not trained on" in columns
    page = seat.press("right", "enter")
    assert "g0.a1   reward 0   trained on in step -   lag -" in page
    assert "── turn 0: prompt, 4 tokens v0: 0-0" in page
    assert "── completion, 4 tokens, stop v0: 0-3" in page
    assert "Six<end>" in page
    assert "five<end>" in seat.press("left")
    seat.press("escape", "escape")
    assert (seat.app.level, seat.app.place, seat.app.return_code) == (Level.GROUPS, 0, None)
    seat.press("q")
    assert seat.app.return_code == 0


def test_tokens_have_the_colour_of_their_version_logprob_or_gap(sit: Sit, folder: Path) -> None:
    seat = sit(folder, gaps=lambda _rollout: [-1.0, 0.0, 1.0, 0.0, 0.0])

    def legend(*labels: str) -> list[str]:
        colours = [seat.colours(f"██ {label}")[0] for label in labels]
        assert len(set(colours)) == len(labels)
        return colours

    assert "by version" in seat.press("enter", "enter")
    first, second = legend("v0", "v1")
    assert seat.colours("five<end>") == [first, first, *[second] * 7]
    assert "by logprob" in seat.press("c")
    _, unlikely, _, _, likely = legend("p < 0.01", "from 0.01", "from 0.1", "from 0.5", "from 0.9")
    assert seat.colours("five<end>") == [unlikely, likely, unlikely, likely, *[unlikely] * 5]
    assert "by gap" in seat.press("c")
    less, none, more = legend("below -0.7", "from -0.01", "from 0.7")
    assert seat.colours("five") == [less, none, more, none]
    assert "by version" in seat.press("c")


def test_a_gap_that_can_not_be_shown_says_why(sit: Sit, folder: Path) -> None:
    def none(_rollout: Rollout) -> Sequence[float]:
        raise UserError("no gap without weights")

    page = sit(folder, gaps=none).press("enter", "enter", "c", "c")
    assert "by gap: no gap without weights" in page
    assert "five" in page


def test_without_a_tokenizer_ids_and_the_environments_text_are_shown(sit: Sit, folder: Path) -> None:
    page = sit(folder, TokenText(None, "the model is gone")).press("enter", "enter")
    assert "token ids only: the model is gone" in page
    assert "[102][105][118][101][256]" in page
    assert re.search(r"as text *\nfive", page)


def test_turns_show_what_they_add_to_the_prompt(sit: Sit, tmp_path: Path) -> None:
    first = turn("guess", "50")
    ids = (*first.prompt_ids, *first.completion.token_ids)
    turns = (first, turn((*ids, *b"higher"), "75"), turn("rewritten", "80"))
    page = sit(run_directory(tmp_path, [group(0, rollout(0, 0, 1.0, *turns, guesses=3.0))])).press("enter", "enter")
    assert "guesses 3" in page
    assert "turn 1: what the prompt adds, 6 tokens" in page
    assert "higher" in page
    assert "turn 2: prompt, which does not continue the turn before, 9 tokens" in page
    assert page.count("guess") == 2


def test_searching_goes_from_hit_to_hit_and_says_when_there_are_no_more(sit: Sit, folder: Path) -> None:
    seat = sit(folder)
    seat.enter("/", "reward>=0.5")
    places = [(seat.app.place, seat.app.attempt)]
    seat.press("enter", "enter")
    for key in ("n", "n", "N"):
        seat.press(key)
        places.append((seat.app.place, seat.app.attempt))
    assert places == [(0, 0), (3, 0), (3, 1), (3, 0)]
    assert "is not found further down" in seat.press("n", "n")
    assert "does not compare with a number" in seat.enter("/", "reward>x")
    assert " dropped" in seat.press("escape", "escape", "/", *"dropped")
    seat.press("backspace", "d", "enter", "N", "n")
    assert (seat.app.place, seat.app.level) == (2, Level.GROUPS)


def test_jumping_to_a_group_and_to_a_rollout(sit: Sit, folder: Path) -> None:
    seat = sit(folder)
    seat.enter(":", "2")
    assert seat.app.place == 1
    assert "g3.a1" in seat.enter(":", "g3.a1")
    for text, why in (("99", "not among the 4"), ("g3.a9", "has no attempt 9"), ("x", "is not a group")):
        assert why in seat.enter(":", text)
    seat.enter(":", "1")
    assert (seat.app.place, seat.app.level) == (2, Level.GROUPS)  # no attempt of this group is left


def test_the_end_follows_a_run_that_goes_on(sit: Sit, folder: Path) -> None:
    def finish(index: int) -> str:
        with open(folder / "rollouts" / "rollouts.jsonl", "ab") as file:
            file.write(lines([group(index, rollout(index, 0, 1.0, turn("p", "new")))]))
        return seat.look()

    seat = sit(folder)
    seat.press("end")
    assert "sum/7" in finish(7)
    assert seat.app.place == 4
    seat.press("enter")
    assert "sum/7" in finish(8)
    assert seat.app.place == 4
    seat.press("escape")
    finish(9)
    assert seat.app.place == 6
    seat.press("up")
    finish(10)
    assert seat.app.place == 5


def test_a_long_list_and_a_long_rollout_scroll(sit: Sit, tmp_path: Path) -> None:
    long = rollout(0, 0, 1.0, turn("p", "\n".join(f"line {i}" for i in range(60))))
    seat = sit(
        run_directory(tmp_path, [group(0, long), *(group(i, rollout(i, 0, 0.0, turn("p", "x"))) for i in range(1, 90))])
    )
    text = seat.press("pagedown", "pagedown", "pagedown")
    assert f"sum/{seat.app.place} " in text
    for _ in range(2):
        seat.app.post_message(MouseScrollDown(None, 5, 5, 0, 1, 0, False, False, False))
    before = seat.app.place
    seat.draw()
    assert seat.app.place == before + 2
    page = seat.press("home", "enter", "enter")
    assert "line 3⏎" in page
    assert "line 59<end>" not in page
    assert "line 9⏎" in seat.press("pagedown", "pageup")
    page = seat.press("end")
    assert "line 59<end>" in page
    assert "line 3⏎" not in page


def test_damage_is_shown_where_it_is(sit: Sit, tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(turn("p", "text").completion, weight_versions=())
    odd = group(1, rollout(1, 0, 1.0, msgspec.structs.replace(turn("p", "text"), completion=wrong)))
    seat = sit(run_directory(tmp_path, [{"index": 0}, odd]))
    assert "line 1 is damaged" in seat.draw()
    assert seat.press("enter", "right").count("line 1 is damaged") == 1
    assert seat.app.level == Level.GROUPS
    assert "line 2 is damaged: weight version spans" in seat.press("down", "enter", "enter")


def test_a_model_can_not_write_to_the_terminal(sit: Sit, tmp_path: Path) -> None:
    evil = "\x1b]0;pwned\x07[red]markup[/red]\x1b[2J"
    run = [group(0, rollout(0, 0, 1.0, turn(evil, evil)), question=evil, dropped={evil: 1})]
    seat = sit(run_directory(tmp_path, run))
    for keys in ((), ("enter",), ("enter",)):
        text = seat.press(*keys)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[red]" in text
        assert "␛" in text


def test_an_empty_run_is_waited_for(sit: Sit, tmp_path: Path) -> None:
    seat = sit(run_directory(tmp_path, [], []))
    assert "no group is finished yet" in seat.press("down", "enter", "right", "end", "n", "c")


@pytest.mark.parametrize("height", [1, 6])
def test_a_tiny_terminal_is_no_reason_to_fail(sit: Sit, folder: Path, height: int) -> None:
    seat = sit(folder, width=12, height=height)
    assert seat.press("down", "pagedown", "home", "enter", "down", "end", "enter", "end", "c", "escape", "/")


def test_gap_colours_say_which_way() -> None:
    assert by_gap([-1.0, -0.2, 0.0, 0.2]).styles == ["bold red", "red", "", "bright_blue"]
    assert by_logprob([-3.0, -0.01]).styles == ["dark_orange", ""]
    assert by_version(list(range(9))).styles[0] != by_version(list(range(9))).styles[1]


def test_evaluations_are_looked_at_in_the_same_screens(sit: Sit, tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    for name, reward, version in (("before", 0.0, 0), ("v20", 1.0, 20)):
        answers = lines([answer(1, reward, version, metrics={"boxed": 1.0})])
        (folder / "rollouts" / f"evaluation-{name}.jsonl").write_bytes(answers)
    seat = sit(folder, run=RunEvaluations(folder))
    assert "1 held-out problems · evaluations: before, v20" in seat.look()
    side_by_side = seat.press("enter")
    assert 'h1 {"prompt":"what is 1?"}' in side_by_side
    assert "before  reward 0" in side_by_side
    assert "v20  reward 1" in side_by_side
    tokens = seat.press("right", "enter")
    assert "boxed 1" in tokens
    assert "v20: 0-5" in tokens
    assert "1 is 1" in tokens
    assert "log-probs are not recorded" in seat.press("c")


def test_the_screen_of_a_rollout_says_why_the_trainer_left_it_out(sit: Sit, tmp_path: Path) -> None:
    steps = [step(1, ("g0.a0", 0, 0), stale=[4]) | {"dropped_ids": {"stale": ["g0.a1"]}}]
    seat = sit(run_directory(tmp_path, steps=steps))
    assert "left out by the trainer" not in seat.press("enter", "enter")
    assert "left out by the trainer: stale" in seat.press("right")


def test_a_file_that_is_replaced_ends_the_browser_with_the_error(
    sit: Sit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl.experiments.browse.textual_app.POLL_S", 0.01)
    seat = sit(folder)
    (folder / "rollouts" / "rollouts.jsonl").write_bytes(b"another\n")
    while seat.app.return_code is None:
        seat.draw()
    assert isinstance(seat.app.return_value, RunDirectoryError)
    assert "replaced" in str(seat.app.return_value)


def test_the_browser_starts_at_the_first_match(sit: Sit, folder: Path) -> None:
    assert sit(folder, find="reward=0.25").app.place == 1
    with pytest.raises(UserError, match="does not compare with a number"):
        sit(folder, find="reward>x")
