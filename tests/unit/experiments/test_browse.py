"""Browsing: records, searches, tables, tokens, exports."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pipelinerl.cli.watch import add_to
from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError, RunDirectoryError, UserError
from pipelinerl.experiments.browse import (
    RunRollouts,
    TokenText,
    load_token_text,
    matching,
    parse,
    read_rows,
    rows_of,
    table_of_groups,
    tokens_of_rollout,
)
from pipelinerl.types import Group, Problem, Skip
from tests.unit.experiments.browse_parts import Bytes, group, lines, rollout, run_directory, some_groups, step, turn
from tests.unit.experiments.parts import invoke

# Records


def test_groups_and_what_became_of_their_rollouts(tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    with open(folder / "rollouts" / "rollouts.jsonl", "ab") as file:
        file.write(b'{"index":9,"torn by a ki')
    run = RunRollouts(folder)
    assert [run.at(place) for place in range(len(run.indices))] == some_groups()
    assert run.fates["g3.a0"] == {"step": 5, "lag_min": 0, "lag_max": 2, "advantage": 0.5}
    assert "g3.a1" not in run.fates
    assert [run.find(name) for name in ("2", "g2.a0")] == [1, 1]
    for name in ("9", "g9.a0", "x"):
        with pytest.raises(UserError, match="is not among the 4 groups"):
            run.find(name)


@pytest.mark.parametrize("damage", [b'{"index": "x"}\n', b"\xff\xfe\n", b'{"index":7,"x":0}\n'])
@pytest.mark.parametrize("name", ["rollouts.jsonl", "trained.jsonl"])
def test_a_damaged_line_is_named(tmp_path: Path, name: str, damage: bytes) -> None:
    folder = run_directory(tmp_path)
    path = folder / "rollouts" / name
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + b"".join(rest))
    with pytest.raises(RunDirectoryError, match=rf"{name}, line 2: .*repair or delete"):
        list(table_of_groups(RunRollouts(folder), []))


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    path = run_directory(tmp_path) / "rollouts" / "trained.jsonl"
    path.unlink()
    assert RunRollouts(tmp_path).fates == {}, "before the first step"
    path.mkdir()
    with pytest.raises(RunDirectoryError, match=r"can't read .*trained\.jsonl"):
        RunRollouts(tmp_path)


def test_after_a_resume_the_last_line_of_a_group_and_of_a_step_counts(tmp_path: Path) -> None:
    steps = [step(1, ("g0.a0", 0, 0), stale=[4]) | {"dropped_ids": {"stale": ["g0.a1"]}}, step(2)]
    folder = run_directory(tmp_path, [group(0, rollout(0, 0, 1.0, turn("p", "old")))], steps)
    fates = RunRollouts(folder).fates
    assert (fates["g0.a0"]["step"], fates["g0.a1"]) == (1, {"left_out": "stale"})
    again = group(0, rollout(0, 0, 1.0, turn("p", "new")), rollout(0, 1, 1.0, turn("p", "new")))
    with open(folder / "rollouts" / "rollouts.jsonl", "ab") as file:
        file.write(lines([again]))
    with open(folder / "rollouts" / "trained.jsonl", "ab") as file:
        file.write(lines([step(1, ("g0.a1", 0, 0))]))
    run = RunRollouts(folder)
    assert (run.is_replaced(0), run.is_replaced(1), run.find("0"), run.read(0)[0]) == (True, False, 1, again)
    assert [row.step for place in (0, 1) for row in rows_of(run, place, TokenText())[1]] == [None, None, 1]


# Searches


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("five", ["g0.a0", "g3.a0"]),
        ("SIX", ["g0.a1"]),
        ('"7*8="', ["g2.a0"]),
        ("reward>=0.5", ["g0.a0", "g3.a0", "g3.a1"]),
        ("reward>0.2 reward<0.6", ["g2.a0", "g3.a0"]),
        ("reward=1 five", ["g0.a0"]),
        ("version_max<1", ["g0.a1"]),
        ("lag_max>1", ["g3.a0"]),
        ("completion_tokens<3", ["g3.a1"]),
        ("step>0", ["g0.a0", "g2.a0", "g3.a0"]),
        ("finish_reason=length", ["g2.a0"]),
        ("left_out=stale", ["g0.a1"]),
        ('"step>0"', []),
    ],
)
def test_all_terms_hold_for_the_same_rollout(tmp_path: Path, text: str, found: list[str]) -> None:
    steps = [step(1, ("g0.a0", 0, 0)) | {"dropped_ids": {"stale": ["g0.a1"]}}, step(5, ("g2.a0", 1, 1), ("g3.a0", 0, 2))]
    run = RunRollouts(run_directory(tmp_path, steps=steps))
    assert [row.id for row in matching(read_rows(run, TokenText()), parse(text))] == found


@pytest.mark.parametrize("text", ["rewrd>3", "lag>=1", "reward>x", "left_out>1"])
def test_a_comparison_of_something_unknown_or_with_something_else_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match=text):
        parse(text)
    parse('"x=3" 7*8=')  # text


# Tokens


def test_pieces_are_the_text_and_a_character_comes_whole() -> None:
    ids = [*"a😀b".encode(), 256, 0xF0]
    pieces = TokenText(Bytes()).pieces(ids)
    assert len(pieces) == len(ids)
    assert pieces[:7] == ["a", "", "", "", "😀", "b", "<end>"]
    assert "".join(pieces) == TokenText(Bytes()).text(ids)
    assert TokenText(Bytes()).text(ids[:7], special=False) == "a😀b"


def test_without_a_tokenizer_or_for_ids_that_are_not_its_own_ids_are_shown() -> None:
    assert TokenText(missing="gone").pieces([7, 8]) == ["[7]", "[8]"]
    assert TokenText(Bytes()).pieces([65, 999]) == ["[65]", "[999]"]
    assert TokenText(Bytes()).text([65, 999]) == "[65][999]"


def test_a_model_that_is_gone_is_not_the_end_and_its_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ModelConfig] = []

    def load_tokenizer(model: ModelConfig) -> None:
        asked.append(model)
        raise ModelLoadError("no such model")

    loading = SimpleNamespace(load_tokenizer=load_tokenizer)  # the real one loads torch: seconds
    monkeypatch.setitem(sys.modules, "pipelinerl.models.loading", loading)
    (tmp_path / "config.yaml").write_text("model: {path: some/model, trust_remote_code: true}\n")
    texts = load_token_text(tmp_path)
    assert (texts.known, texts.missing) == (False, "no such model")
    assert [(model.path, model.trust_remote_code) for model in asked] == [("some/model", False)]
    (tmp_path / "config.yaml").write_text("model: {path: demo}\n")
    assert load_token_text(tmp_path).text([5, 6]).isprintable()
    assert len(asked) == 1, "a tokenizer.json needs no transformers"


# Tables


def test_the_table_has_a_line_for_each_group_and_names_what_matches(tmp_path: Path) -> None:
    skip = Skip(equal_groups=2, last_group=0, rollouts=8, reward_mean=0.125, probability=0.25)
    skipped = Group(index=4, problem=Problem("easy", {}), rollouts=(), started=0, skipped=skip)
    run = RunRollouts(run_directory(tmp_path, [*some_groups(), skipped]))
    table = list(table_of_groups(run, parse("")))
    assert table[0].split() == ["group", "rewards", "mean", "tokens", "versions", "lag", "trained", "problem"]
    assert table[1].split() == ["0", "█·", "0.500", "4", "0-1", "0", "1/2", "sum/0", '{"question":"2+3="}']
    assert "dropped: timeout 2" in table[3]
    assert "skipped: equal rewards in 2 groups in a row, up to group 0; mean reward 0.125" in table[5]
    hits = list(table_of_groups(run, parse("reward>=0.5")))
    assert [line.split()[-1] for line in hits[1:]] == ["g0.a0", "g3.a1"]


def command(*arguments: str) -> int:
    return invoke(add_to, "browse", *arguments)


def test_the_command_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_directory(tmp_path / "run")
    assert command(str(folder), "--find", "reward=0.25") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "g2.a0"
    assert command(str(folder), "--find", "reward=0.123") == 1
    assert "nothing matches --find 'reward=0.123'" in capsys.readouterr().err
    for arguments, message in (
        (("--trainer.steps", "3"), "has no flag"),
        (("--export", "x.jsonl"), r"pipelinerl\.Run"),
        (("--evaluations",), r"evaluation-\*\.jsonl"),
    ):
        with pytest.raises(UserError, match=message):
            command(str(folder), *arguments)
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        command(str(tmp_path))


def shown(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command(str(folder), *arguments) == 0
    return capsys.readouterr().out


def test_a_group_shows_its_attempts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_directory(tmp_path)
    text = shown(folder, capsys, "--show", "0")
    assert text.startswith('group 0  sum/0 {"question":"2+3="}\n')
    assert "g0.a0  reward 1, trained on in step 1, lag 0, advantage 0.5, 5 tokens, stop, versions 0-1\nfive\n" in text
    assert "g0.a1  reward 0, not trained on, 4 tokens, stop, versions 0\nSix\n" in text
    assert "g0.a0" not in shown(folder, capsys, "--show", "0", "--find", "reward<1")
    assert "dropped: timeout 2" in shown(folder, capsys, "--show", "1")
    monkeypatch.setattr("pipelinerl.experiments.browse.load_token_text", pytest.fail)  # not for an error
    for name in ("99", "g3.a9"):
        with pytest.raises(UserError, match=r"is not among the 4 groups|has no rollout"):
            command(str(folder), "--show", name)


def test_a_rollout_shows_its_text_and_a_line_for_each_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step(1, ("g0.a0", 0, 0), stale=[4]) | {"dropped_ids": {"stale": ["g0.a1"]}}]
    folder = run_directory(tmp_path, steps=steps)
    assert "left out by the trainer: stale" in shown(folder, capsys, "--show", "g0.a1")
    run = RunRollouts(folder)
    page = "".join(tokens_of_rollout(run, 0, "g0.a0", lambda: TokenText(Bytes())))
    assert page.partition("\n")[2].startswith("── turn 0: prompt, 4 tokens\n")
    assert "── completion, 5 tokens, stop\nfive<end>\n" in page
    rows = [line.split() for line in page.splitlines()[-5:]]
    assert rows[0] == ["0", "0", "102", "0", "-3.0000", "f"]
    assert rows[4] == ["0", "4", "256", "1", "-3.0000", "<end>"]
    page = "".join(tokens_of_rollout(run, 0, "g0.a0", lambda: TokenText(missing="the model is gone")))
    assert "token ids only: the model is gone" in page
    assert "[102][105][118][101][256]" in page
    assert "as text\nfive" in page


def test_a_damaged_rollout_is_one_clear_line(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(turn("p", "text").completion, weight_versions=())
    odd = group(1, rollout(1, 0, 1.0, msgspec.structs.replace(turn("p", "text"), completion=wrong)))
    folder = run_directory(tmp_path, [group(0), odd])
    with pytest.raises(RunDirectoryError, match=r"g1\.a0 is damaged: weight version spans"):
        command(str(folder), "--show", "g1.a0")


def test_a_model_can_not_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;pwned\x07\x1b[2J"
    run = [group(0, rollout(0, 0, 1.0, turn(evil, evil)), question=evil, dropped={evil: 1})]
    folder = run_directory(tmp_path, run)
    for name in ([], ["--show", "0"], ["--show", "g0.a0"]):
        text = shown(folder, capsys, *name)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "␛" in text or "g0.a0" in name


# Rows


def test_a_row_for_each_rollout_with_the_texts_that_are_known(tmp_path: Path) -> None:
    run = RunRollouts(run_directory(tmp_path / "run"))
    rows = [msgspec.to_builtins(row) for row in read_rows(run, TokenText(Bytes()))]
    assert len(rows) == 5
    assert rows[0] == {
        "id": "g0.a0",
        "group": 0,
        "attempt": 0,
        "problem_id": "sum/0",
        "problem": {"question": "2+3="},
        "prompt": "2+3=",
        "completion": "five",
        "reward": 1.0,
        "metrics": {},
        "turns": 1,
        "finish_reason": "stop",
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "version_min": 0,
        "version_max": 1,
        "step": 1,
        "lag_min": 0,
        "lag_max": 0,
        "advantage": 0.5,
        "left_out": None,
    }
    assert (rows[2]["finish_reason"], rows[2]["metrics"], rows[4]["step"]) == ("length", {"guesses": 2.0}, None)
    silent = msgspec.structs.replace(turn("p", "unread"), text="")
    attempts = (rollout(0, 0, 0.0, turn("p", "said")), rollout(0, 1, 0.0, silent))
    run = RunRollouts(run_directory(tmp_path / "silent", [group(0, *attempts)]))
    found = read_rows(run, TokenText())  # without a tokenizer
    assert [(row.prompt, row.completion) for row in found] == [(None, "said"), (None, None)]
