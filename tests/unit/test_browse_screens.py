"""What the browser shows and where keys lead, recorded without a terminal."""

from __future__ import annotations

import os
import pty
import termios
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.color import Color
from rich.console import Console

from pipelinerl.cli.browse import add_to
from pipelinerl.cli.parser import Commands
from pipelinerl.errors import UserError
from pipelinerl.experiments.browse.browser import Browser, Keyboard
from pipelinerl.experiments.browse.draw import by_gap, by_logprob, by_version
from pipelinerl.experiments.browse.evaluations import RunEvaluations
from pipelinerl.experiments.browse.pages import RolloutPages
from pipelinerl.experiments.browse.records import Browsed, RunRollouts
from pipelinerl.experiments.browse.tokens import TokenText
from pipelinerl.types import Rollout
from tests.unit.browse_parts import Bytes, group, lines, rollout, run_directory, step, turn


class Seat:
    """Someone in front of the browser."""

    def __init__(
        self,
        folder: Path,
        texts: TokenText | None = None,
        gaps: Callable[[Rollout], Sequence[float]] = lambda _rollout: [],
        *,
        width: int = 120,
        height: int = 24,
        run: Browsed | None = None,
    ) -> None:
        self.size = (width, height)
        self.run = RunRollouts(folder) if run is None else run
        pages = RolloutPages(self.run, lambda: texts or TokenText(Bytes()), gaps)
        self.browser = Browser(self.run, "a run", pages)
        self.look()

    def look(self) -> str:
        """What is to be seen once nothing more happens by itself."""
        while True:
            self.browser.tick()
            text = self.draw()
            if not self.browser.busy:
                return text

    def draw(self) -> str:
        width, height = self.size
        self.console = Console(
            file=StringIO(), width=width, height=height, record=True, color_system="standard", force_terminal=True
        )
        self.console.print(self.browser.view(self.console))
        return self.console.export_text(clear=False)

    def press(self, *keys: str) -> str:
        for key in keys:
            self.browser.press(key)
        return self.look()

    def type(self, text: str) -> str:
        return self.press(*text, "enter")

    def styles(self) -> dict[str, str | None]:
        """Text -> colour, of what was drawn last."""
        found = {}
        for segment in self.console._record_buffer:
            colour: Color | None = segment.style.color if segment.style else None
            found[segment.text] = colour.name if colour else None
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_directory(tmp_path / "run")


def test_groups_with_rewards_lags_and_what_was_dropped(folder: Path) -> None:
    text = Seat(folder).draw()
    assert "a run · 4 groups · the trainer left out: stale 2, zero_advantage 1" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert rows["0"].split()[1:] == ["█·", "0.500", "4", "0-1", "0", "1/2", "sum/0", '{"question":"2+3="}']
    assert rows["1"].split()[-2:] == ["timeout", "2"]
    assert rows["3"].split()[1:7] == ["▄█", "0.750", "4", "4-5", "0-2", "1/2"]


def test_from_all_groups_to_one_token_and_back(folder: Path) -> None:
    seat = Seat(folder)
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
    assert (seat.browser.screen, seat.browser.place, seat.browser.done) == ("groups", 0, False)
    seat.press("q")
    assert seat.browser.done


def test_tokens_have_the_colour_of_their_version_logprob_or_gap(folder: Path) -> None:
    seat = Seat(folder, gaps=lambda _rollout: [-1.0, 0.0, 1.0, 0.0, 0.0])
    assert "v0" in seat.press("enter", "enter")
    styles = seat.styles()
    first, second = by_version([0, 1]).styles
    assert [styles[piece] for piece in ("f", "i", "v", "e", "<end>")] == [first, first, second, second, second]
    assert "p < 0.01" in seat.press("c")
    assert by_logprob([-3.0, -0.01]).styles == ["dark_orange", ""]
    assert seat.styles()["i"] is None
    assert "below -0.7" in seat.press("c")
    assert (seat.styles()["f"], seat.styles()["v"]) == ("red", "bright_blue")
    assert seat.press("c").count("v0") >= 1


def test_a_gap_that_can_not_be_shown_says_why(folder: Path) -> None:
    def none(_rollout: Rollout) -> Sequence[float]:
        raise UserError("no gap without weights")

    page = Seat(folder, gaps=none).press("enter", "enter", "c", "c")
    assert "by gap: no gap without weights" in page
    assert "five" in page


def test_without_a_tokenizer_ids_and_the_environments_text_are_shown(folder: Path) -> None:
    page = Seat(folder, TokenText(None, "the model is gone")).press("enter", "enter")
    assert "token ids only: the model is gone" in page
    assert "[102][105][118][101][256]" in page
    assert "as the environment read it\nfive" in page.replace(" \n", "\n").replace("  ", "")


def test_turns_show_what_they_add_to_the_prompt(tmp_path: Path) -> None:
    first = turn("guess", "50")
    ids = (*first.prompt_ids, *first.completion.token_ids)
    turns = (first, turn((*ids, *b"higher"), "75"), turn("rewritten", "80"))
    page = Seat(run_directory(tmp_path, [group(0, rollout(0, 0, 1.0, *turns, guesses=3.0))])).press("enter", "enter")
    assert "guesses 3" in page
    assert "turn 1: what the prompt adds, 6 tokens" in page
    assert "higher" in page
    assert "turn 2: prompt, which does not continue the turn before, 9 tokens" in page
    assert page.count("guess") == 2


def test_searching_goes_from_hit_to_hit_and_says_when_there_are_no_more(folder: Path) -> None:
    seat = Seat(folder)
    seat.press("/")
    seat.type("reward>=0.5")
    places = [(seat.browser.place, seat.browser.attempt)]
    seat.press("enter", "enter")
    for key in ("n", "n", "N"):
        seat.press(key)
        places.append((seat.browser.place, seat.browser.attempt))
    assert places == [(0, 0), (3, 0), (3, 1), (3, 0)]
    assert "is not found further down" in seat.press("n", "n")
    seat.press("/")
    assert "does not compare with a number" in seat.type("reward>x")
    seat.press("escape", "escape", "/", *"dropped")
    assert "/dropped" in seat.draw()
    seat.press("backspace", "d", "enter", "N")
    seat.press("n")
    assert (seat.browser.place, seat.browser.screen) == (2, "groups")


def test_jumping_to_a_group_and_to_a_rollout(folder: Path) -> None:
    seat = Seat(folder)
    seat.press(":")
    seat.type("2")
    assert seat.browser.place == 1
    seat.press(":")
    assert "g3.a1" in seat.type("g3.a1")
    for text, why in (("99", "not among the 4"), ("g3.a9", "has no attempt 9"), ("x", "is not a group")):
        seat.press(":")
        assert why in seat.type(text)


def test_the_end_follows_a_run_that_goes_on(folder: Path) -> None:
    seat = Seat(folder)
    seat.press("end")
    with open(folder / "rollouts" / "rollouts.jsonl", "ab") as file:
        file.write(lines([group(7, rollout(7, 0, 1.0, turn("p", "new")))]))
    assert "sum/7" in seat.look()
    assert seat.browser.place == 4
    seat.press("up")
    with open(folder / "rollouts" / "rollouts.jsonl", "ab") as file:
        file.write(lines([group(8, rollout(8, 0, 1.0, turn("p", "new")))]))
    seat.look()
    assert seat.browser.place == 3


def test_a_long_list_and_a_long_rollout_scroll(tmp_path: Path) -> None:
    long = rollout(0, 0, 1.0, turn("p", "\n".join(f"line {i}" for i in range(60))))
    seat = Seat(
        run_directory(tmp_path, [group(0, long), *(group(i, rollout(i, 0, 0.0, turn("p", "x"))) for i in range(1, 90))])
    )
    text = seat.press("pagedown", "pagedown", "pagedown")
    assert len(text.splitlines()) <= 24
    assert f"sum/{seat.browser.place} " in text
    page = seat.press("home", "enter", "enter")
    assert "line 3⏎" in page
    assert "more lines" in page
    assert len(page.splitlines()) <= 24
    page = seat.press("end")
    assert "line 59<end>" in page
    assert "more lines" not in page
    assert "line 3⏎" not in page


def test_damage_is_shown_where_it_is(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(turn("p", "text").completion, weight_versions=())
    odd = group(1, rollout(1, 0, 1.0, msgspec.structs.replace(turn("p", "text"), completion=wrong)))
    seat = Seat(run_directory(tmp_path, [{"index": 0}, odd]))
    assert "line 1 is damaged" in seat.draw()
    assert seat.press("enter", "right").count("line 1 is damaged") == 1
    assert seat.browser.screen == "groups"
    assert "line 2 is damaged: weight version spans" in seat.press("down", "enter", "enter")


def test_a_model_can_not_write_to_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;pwned\x07[red]markup[/red]\x1b[2J"
    run = [group(0, rollout(0, 0, 1.0, turn(evil, evil)), question=evil, dropped={evil: 1})]
    seat = Seat(run_directory(tmp_path, run))
    for keys in ((), ("enter",), ("enter",)):
        text = seat.press(*keys)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[red]" in text


def test_an_empty_run_is_waited_for(tmp_path: Path) -> None:
    seat = Seat(run_directory(tmp_path, [], []))
    assert "no group is finished yet" in seat.press("down", "enter", "right", "end", "n", "c")


@pytest.mark.parametrize("height", [1, 3, 6, 8])
def test_a_tiny_terminal_is_no_reason_to_fail(folder: Path, height: int) -> None:
    seat = Seat(folder, width=12, height=height)
    for key in ("down", "pagedown", "home", "enter", "down", "end", "enter", "end", "c", "escape", "/"):
        seat.press(key)
    assert seat.draw()


def test_gap_colours_say_which_way() -> None:
    assert by_gap([-1.0, -0.2, 0.0, 0.2]).styles == ["bold red", "red", "", "bright_blue"]
    assert by_version(list(range(9))).styles[0] != by_version(list(range(9))).styles[1]


def test_the_terminal_is_given_back_as_it_was() -> None:
    leader, follower = pty.openpty()
    try:
        before = termios.tcgetattr(follower)
        keyboard = Keyboard(follower)
        with keyboard:
            assert not termios.tcgetattr(follower)[3] & (termios.ICANON | termios.ECHO)
            os.write(leader, b"\x1b[Bq")
            assert keyboard.read(5.0) == ["down", "q"]
            assert keyboard.read(0.0) == []
        assert termios.tcgetattr(follower) == before
    finally:
        os.close(leader)
        os.close(follower)


def command(*arguments: str) -> int:
    commands = Commands()
    add_to(commands)
    own, settings = commands.split(["browse", *arguments])
    options = commands.root.parse_args(own)
    status: int = options.run(options, settings)
    return status


def test_the_command_prints_a_table_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(folder), "--find", "reward=0.25") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "g2.a0"
    assert command(str(folder), "--export", str(folder / "x.jsonl")) == 0
    said = capsys.readouterr()
    assert said.out == f"5 rollouts: {folder / 'x.jsonl'}\n"
    assert "can't read" in said.err  # there is no config.yaml, so no tokenizer
    with pytest.raises(UserError, match="has no flag"):
        command(str(folder), "--trainer.steps", "3")


def test_evaluations_are_looked_at_in_the_same_screens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_directory(tmp_path)
    for name, reward, version in (("before", 0.0, 0), ("v20", 1.0, 20)):
        text = f"answer {reward:g}"
        answer = {
            "problem_id": "sum/held-out/1",
            "reward": reward,
            "prompt": "2+3=",
            "completion": text,
            "token_ids": list(text.encode()),
            "weight_versions": [{"version": version, "start": 0, "end": len(text)}],
            "metrics": {"boxed": 1.0},
        }
        (folder / "rollouts" / f"evaluation-{name}.jsonl").write_bytes(lines([answer]))
    seat = Seat(folder, run=RunEvaluations(folder))
    assert "1 held-out problems · evaluations: before, v20" in seat.look()
    side_by_side = seat.press("enter")
    assert 'sum/held-out/1 {"prompt":"2+3="}' in side_by_side
    assert "before  reward 0" in side_by_side
    assert "v20  reward 1" in side_by_side
    tokens = seat.press("right", "enter")
    assert "boxed 1" in tokens
    assert "v20: 0-7" in tokens
    assert "answer 1" in tokens
    assert "log-probs are not recorded" in seat.press("c")
    assert command(str(folder), "--evaluations", "--find", "version=20") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("sum/held-out/1 v20")
    with pytest.raises(UserError, match=r"evaluation-\*\.jsonl"):
        command(str(folder), "--evaluations", "--export", str(folder / "x.jsonl"))


def test_the_screen_of_a_rollout_says_why_the_trainer_left_it_out(tmp_path: Path) -> None:
    steps = [step(1, ("g0.a0", 0, 0), stale=[4]) | {"dropped_ids": {"stale": ["g0.a1"]}}]
    seat = Seat(run_directory(tmp_path, steps=steps))
    assert "left out by the trainer" not in seat.press("enter", "enter")
    assert "left out by the trainer: stale" in seat.press("right")
