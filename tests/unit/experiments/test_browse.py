"""Browsing: records, searches, tables, tokens, rows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

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
from tests.unit.experiments.browse_parts import Bytes, group, rollout, run_directory, some_groups, step, turn
from tests.unit.experiments.parts import invoke


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = run_directory(tmp_path_factory.mktemp("run"))
    with open(made / "rollouts" / "rollouts.jsonl", "ab") as file:
        file.write(b'{"index":9,"torn by a ki')
    return made


def test_groups_and_what_became_of_their_rollouts(folder: Path) -> None:
    run = RunRollouts(folder)
    assert [run.at(place) for place in range(len(run.indices))] == some_groups()
    assert (run.fates["g0.a1"], "g3.a1" in run.fates) == ({"left_out": "stale"}, False)
    assert [run.find(name) for name in ("2", "g2.a0")] == [1, 1]


@pytest.mark.parametrize("damage", [b'{"index": "x"}\n', b"\xff\xfe\n", b'{"index":7,"x":0}\n'])
@pytest.mark.parametrize("name", ["rollouts.jsonl", "trained.jsonl"])
def test_a_damaged_line_is_named(tmp_path: Path, name: str, damage: bytes) -> None:
    path = run_directory(tmp_path) / "rollouts" / name
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + b"".join(rest))
    with pytest.raises(RunDirectoryError, match=rf"{name}, line 2: .*repair or delete"):
        list(table_of_groups(RunRollouts(tmp_path), []))


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunRollouts(tmp_path)
    path = run_directory(tmp_path) / "rollouts" / "trained.jsonl"
    path.unlink()
    assert RunRollouts(tmp_path).fates == {}, "before the first step"
    path.mkdir()
    with pytest.raises(RunDirectoryError, match=r"can't read .*trained\.jsonl"):
        RunRollouts(tmp_path)


def test_after_a_resume_the_last_line_of_a_group_and_of_a_step_counts(tmp_path: Path) -> None:
    again = group(0, *(rollout(0, attempt, 1.0, turn("p", "new")) for attempt in (0, 1)))
    groups = [group(0, rollout(0, 0, 1.0, turn("p", "old"))), again]
    run = RunRollouts(run_directory(tmp_path, groups, [step(1, ("g0.a0", 0, 0)), step(2), step(1, ("g0.a1", 0, 0))]))
    assert (run.is_replaced(0), run.is_replaced(1), run.find("0"), run.read(0)[0]) == (True, False, 1, again)
    assert [row.step for place in (0, 1) for row in rows_of(run, place, TokenText())[1]] == [None, None, 1]


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
        ("step>0", ["g0.a0", "g2.a0", "g3.a0"]),
        ("finish_reason=length", ["g2.a0"]),
        ("left_out=stale", ["g0.a1"]),
        ('"step>0"', []),
    ],
)
def test_all_terms_hold_for_the_same_rollout(folder: Path, text: str, found: list[str]) -> None:
    assert [row.id for row in matching(read_rows(RunRollouts(folder), TokenText()), parse(text))] == found


@pytest.mark.parametrize("text", ["rewrd>3", "lag>=1", "reward>x", "left_out>1"])
def test_a_comparison_of_something_unknown_or_with_something_else_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match=text):
        parse(text)
    parse('"x=3" 7*8=')  # text


def test_pieces_are_the_text_and_a_character_comes_whole_and_ids_that_are_unknown_are_shown() -> None:
    ids = [*"a😀b".encode(), 256, 0xF0]
    pieces = TokenText(Bytes()).pieces(ids)
    assert len(pieces) == len(ids)
    assert pieces[:7] == ["a", "", "", "", "😀", "b", "<end>"]
    assert "".join(pieces) == TokenText(Bytes()).text(ids)
    assert TokenText(Bytes()).text(ids[:7], special=False) == "a😀b"
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


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert invoke(add_to, "browse", *arguments) == status
    output = capsys.readouterr()
    return output.err if status else output.out


def test_the_table_has_a_line_for_each_group_and_names_what_matches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = Skip(equal_groups=2, last_group=0, rollouts=8, reward_mean=0.125, probability=0.25)
    skipped = Group(index=4, problem=Problem("easy", {}), rollouts=(), started=0, skipped=skip)
    run_directory(tmp_path, [*some_groups(), skipped])
    table = shown(capsys, tmp_path).splitlines()
    assert table[0].split() == ["group", "rewards", "mean", "tokens", "versions", "lag", "trained", "problem"]
    assert table[1].split() == ["0", "█·", "0.500", "4", "0-1", "0", "1/2", "sum/0", '{"question":"2+3="}']
    assert "dropped: timeout 2" in table[3]
    assert "skipped: equal rewards in 2 groups in a row, up to group 0; mean reward 0.125" in table[5]
    hits = shown(capsys, tmp_path, "--find", "reward>=0.5").splitlines()
    assert [line.split()[-1] for line in hits[1:]] == ["g0.a0", "g3.a1"]
    assert "nothing matches --find 'reward=0.123'" in shown(capsys, tmp_path, "--find", "reward=0.123", status=1)


def test_a_group_shows_its_attempts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, folder, "--show", "0")
    assert text.startswith('group 0  sum/0 {"question":"2+3="}\n')
    assert "g0.a0  reward 1, trained on in step 1, lag 0, advantage 0.5, 5 tokens, stop, versions 0-1\nfive\n" in text
    assert "g0.a1  reward 0, left out by the trainer: stale, 4 tokens, stop, versions 0\nSix\n" in text
    assert "g0.a0" not in shown(capsys, folder, "--show", "0", "--find", "reward<1")
    monkeypatch.setattr("pipelinerl.experiments.browse.load_token_text", pytest.fail)  # not for an error
    for name in ("99", "g9.a0", "x", "g3.a9"):
        with pytest.raises(UserError, match=r"is not among the 4 groups|has no rollout"):
            shown(capsys, folder, "--show", name)


def test_a_rollout_shows_its_text_and_a_line_for_each_token(tmp_path: Path, folder: Path) -> None:
    page = "".join(tokens_of_rollout(RunRollouts(folder), 0, "g0.a0", lambda: TokenText(Bytes())))
    assert page.partition("\n")[2].startswith("── turn 0: prompt, 4 tokens\n2+3=\n")
    assert "── completion, 5 tokens, stop\nfive<end>\n" in page
    rows = [line.split() for line in page.splitlines()[-5:]]
    assert rows[0] == ["0", "0", "102", "0", "-3.0000", "f"]
    assert rows[4] == ["0", "4", "256", "1", "-3.0000", "<end>"]
    page = "".join(tokens_of_rollout(RunRollouts(folder), 0, "g0.a0", lambda: TokenText(missing="the model is gone")))
    assert "token ids only: the model is gone" in page
    assert "[102][105][118][101][256]" in page
    assert "as text\nfive" in page

    first, second, other = turn("2+3=", "5"), turn("2+3=5<end>yes?", "y"), turn("again", "z")
    second = replace(second, prompt_ids=(*first.prompt_ids, *first.completion.token_ids, *b"yes?"))
    damaged = replace(first, completion=replace(first.completion, weight_versions=()))
    groups = [group(0, rollout(0, 0, 1.0, first, second, other)), group(1, rollout(1, 0, 1.0, damaged))]
    run = RunRollouts(run_directory(tmp_path, groups))
    page = "".join(tokens_of_rollout(run, 0, "g0.a0", lambda: TokenText(Bytes())))
    assert "── turn 1: what the prompt adds, 4 tokens\nyes?\n" in page
    assert "── turn 2: prompt, which does not continue the turn before, 5 tokens\nagain\n" in page
    with pytest.raises(RunDirectoryError, match=r"g1\.a0 is damaged: weight version spans"):
        list(tokens_of_rollout(run, 1, "g1.a0", TokenText))


def test_a_model_can_not_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;pwned\x07\x1b[2J"
    run_directory(tmp_path, [group(0, rollout(0, 0, 1.0, turn(evil, evil)), question=evil, dropped={evil: 1})])
    for name in ([], ["--show", "0"], ["--show", "g0.a0"]):
        text = shown(capsys, tmp_path, *name)
        assert not {"\x1b", "\x07"} & set(text)
        assert "␛" in text or "g0.a0" in name


def test_a_row_for_each_rollout_with_the_texts_that_are_known(tmp_path: Path, folder: Path) -> None:
    rows = list(read_rows(RunRollouts(folder), TokenText(Bytes())))
    assert len(rows) == 5
    places = {"id": "g0.a0", "group": 0, "attempt": 0, "problem_id": "sum/0", "problem": {"question": "2+3="}}
    tokens = {"turns": 1, "finish_reason": "stop", "prompt_tokens": 4, "completion_tokens": 5, "version_min": 0}
    trained = {"version_max": 1, "step": 1, "lag_min": 0, "lag_max": 0, "advantage": 0.5, "left_out": None}
    texts = {"prompt": "2+3=", "completion": "five", "reward": 1.0, "metrics": {}}
    assert msgspec.to_builtins(rows[0]) == places | texts | tokens | trained
    assert (rows[2].finish_reason, rows[2].metrics, rows[4].step) == ("length", {"guesses": 2.0}, None)
    attempts = (rollout(0, 0, 0.0, turn("p", "known")), rollout(0, 1, 0.0, replace(turn("p", "unread"), text="")))
    found = read_rows(RunRollouts(run_directory(tmp_path, [group(0, *attempts)])), TokenText())  # without a tokenizer
    assert [(row.prompt, row.completion) for row in found] == [(None, "known"), (None, None)]
