"""Browsing: records, searches, tables, tokens, exports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pipelinerl.cli.browse import add_to
from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError, RunDirectoryError, UserError
from pipelinerl.experiments.browse.groups import parse, table_of_groups, tokens_of, versions_of
from pipelinerl.experiments.browse.records import (
    Damaged,
    IndexedLines,
    RunEvaluations,
    RunRollouts,
    Trained,
)
from pipelinerl.experiments.browse.tokens import TokenText, export, load_token_text, rollout_text
from pipelinerl.status.screen import printable
from pipelinerl.types import Group, Problem, Skip
from tests.unit.experiments.browse.browse_parts import (
    Bytes,
    answer,
    group,
    lines,
    rollout,
    run_directory,
    some_groups,
    step,
    turn,
)
from tests.unit.experiments.parts import invoke

# Lines


def test_complete_lines_are_read_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    contents = [b"a" * size + b"\n" for size in (0, 1, 5, 3_000_000, 7, 2)]
    (tmp_path / "x").write_bytes(b"".join(contents) + b"torn by a ki")
    found = IndexedLines(tmp_path / "x")
    assert [found.read(i) for i in range(len(found))] == contents
    assert found.read(3, 4) == b"aaaa"
    assert len(IndexedLines(tmp_path / "none")) == 0


# Records


def test_groups_and_what_became_of_their_rollouts(tmp_path: Path) -> None:
    run = RunRollouts(run_directory(tmp_path))
    assert run.group(0) == some_groups()[0]
    assert [(tokens_of(one), versions_of(one)) for one in some_groups()[0].rollouts] == [(5, [0, 1]), (4, [0])]
    assert run.fate(3, "g3.a0") == Trained(step=5, lag_min=0, lag_max=2, advantage=0.5)
    assert run.fate(3, "g3.a1") is None
    assert [run.find(name) for name in ("2", "g2.a0", "9", "g9.a0", "x")] == [1, 1, None, None, None]


def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    for name in ("rollouts.jsonl", "trained.jsonl"):
        path = folder / "rollouts" / name
        first, *rest = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(first + b'{"index": "x"}\n\xff\xfe\n' + b"".join(rest))
    run = RunRollouts(folder)
    assert [place for place in range(len(run)) if isinstance(run.group(place), Damaged)] == [1, 2]
    assert str(run.group(1)).startswith("line 2 is damaged: ")
    assert isinstance(run.group(2), Damaged)
    assert ["trained.jsonl, line 2 is damaged" in run.damage[0], "line 3 is" in run.damage[1]] == [True, True]
    assert run.fate(5, "g3.a0") is not None


def test_after_a_resume_the_last_line_of_a_group_and_of_a_step_counts(tmp_path: Path) -> None:
    folder = run_directory(tmp_path, [group(0, rollout(0, 0, 1.0, turn("p", "old")))], [step(1, ("g0.a0", 0, 0), stale=[1])])
    run = RunRollouts(folder)
    assert run.fate(0, "g0.a0") is not None
    with open(folder / "rollouts" / "rollouts.jsonl", "ab") as file:
        file.write(lines([group(0, rollout(0, 0, 1.0, turn("p", "new")))]))
    with open(folder / "rollouts" / "trained.jsonl", "ab") as file:
        file.write(lines([step(1, ("g7.a0", 0, 0))]))
    run = RunRollouts(folder)
    assert (run.is_replaced(0), run.is_replaced(1), run.find("0")) == (True, False, 1)
    assert run.fate(1, "g0.a0") is None
    assert run.fate(1, "g7.a0") == Trained(1, 0, 0, 0.5)


def test_which_rollouts_the_trainer_left_out_is_known_if_it_said_so(tmp_path: Path) -> None:
    steps = [step(1, ("g0.a0", 0, 0), stale=[4]) | {"dropped_ids": {"stale": ["g0.a1"]}}, step(2, stale=[3])]
    folder = run_directory(tmp_path, steps=steps)
    run = RunRollouts(folder)
    assert run.fate(0, "g0.a1") == "stale"
    with open(folder / "rollouts" / "trained.jsonl", "ab") as file:
        file.write(lines([step(1, ("g0.a1", 0, 0))]))  # after a resume
    assert RunRollouts(folder).fate(0, "g0.a1") == Trained(1, 0, 0, 0.5)


# Evaluations


def evaluated_run(folder: Path) -> Path:
    """Three evaluations of two problems; the last of them failed once."""
    run = run_directory(folder)
    lost = {"problem_id": "h2", "reward": 0.0, "failure": "timeout: it took too long"}
    for name, records in {
        "after": [answer(1, 1.0, 30), lost],
        "v4": [answer(1, 0.5, 4, metrics={"boxed": 1.0}), answer(2, 0.25, 5)],
        "v20": [answer(1, 1.0, 20), answer(2, 1.0, 20)],
        "before": [answer(1, 0.0), answer(2, 0.0)],
        "mine": [{}],
    }.items():
        (run / "rollouts" / f"evaluation-{name}.jsonl").write_bytes(lines(records))
    return run


def test_evaluations_are_a_group_for_each_problem_and_an_attempt_for_each_time(tmp_path: Path) -> None:
    run = RunEvaluations(evaluated_run(tmp_path))
    first, second = (run.group(place) for place in range(len(run)))
    assert [(one.id, one.reward, versions_of(one)) for one in first.rollouts] == [
        ("h1 before", 0.0, [0]),
        ("h1 v4", 0.5, [4]),
        ("h1 v20", 1.0, [20]),
        ("h1 after", 1.0, [30]),
    ]
    assert first.problem == Problem("h1", {"prompt": "what is 1?"})
    assert ([one.id for one in second.rollouts], second.dropped, second.started) == (
        ["h2 before", "h2 v4", "h2 v20"],
        {"timeout": 1},
        4,
    )
    assert [run.find(name) for name in ("1", "h2 v4", "h3 v4", "7")] == [1, 1, None, None]
    whole = run.group(0)
    assert whole.rollouts[1].metrics == {"boxed": 1.0}
    assert whole.rollouts[1].turns[0].text == "1 is 0.5"
    (hit,) = [line for line in table_of_groups(run, parse("version=5"), pytest.fail) if "h2" in line]
    assert hit.endswith("dropped: timeout 1  h2 v4\n")


def test_a_run_without_evaluations_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no evaluation; runs with"):
        RunEvaluations(run_directory(tmp_path / "run"))
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunEvaluations(tmp_path)


# Searches


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("five", {0: [0], 3: [0]}),
        ("SIX", {0: [1]}),
        ('"7*8="', {1: [0]}),
        ("reward>=0.5", {0: [0], 3: [0, 1]}),
        ("reward>0.2 reward<0.6", {1: [0], 3: [0]}),
        ("reward=1 five", {0: [0]}),
        ("version=1", {0: [0]}),
        ("version<1", {0: [0, 1]}),
        ("lag>1", {3: [0]}),
        ("lag=1", {1: [0], 3: [0]}),
        ("lag<=0", {0: [0], 3: [0]}),
        ("length<3", {3: [1]}),
        ("trained", {0: [0], 1: [0], 3: [0]}),
        ("untrained", {0: [1], 3: [1]}),
        ("dropped", {2: []}),
        ("dropped=timeout lost", {2: []}),
        ("dropped=crash", {}),
        ('"trained"', {}),
    ],
)
def test_every_term_holds_for_one_and_the_same_rollout(tmp_path: Path, text: str, found: dict[int, list[int]]) -> None:
    run = RunRollouts(run_directory(tmp_path))
    query = parse(text)
    hits = {place: query.matches(run.group(place), lambda name, place=place: run.fate(place, name)) for place in range(4)}
    assert {place: [one.attempt for one in hit] for place, hit in hits.items() if hit is not None} == found


def test_a_comparison_of_something_unknown_names_what_can_be_compared() -> None:
    with pytest.raises(UserError) as caught:
        parse("rewrd>3")
    assert str(caught.value).startswith("'rewrd>3': did you mean reward? reward, version, lag, length can be compared")
    assert "\n" not in str(caught.value)
    parse('"x=3" 7*8=')  # text


def test_a_skipped_problem_is_shown_with_the_reason(tmp_path: Path) -> None:
    skip = Skip(equal_groups=2, last_group=0, rollouts=8, reward_mean=0.125, probability=0.25)
    skipped = Group(index=1, problem=Problem("easy", {}), rollouts=(), started=0, skipped=skip)
    run = RunRollouts(run_directory(tmp_path, [group(0, rollout(0, 0, 1.0, turn("p", "five"))), skipped]))
    (line,) = list(table_of_groups(run, parse("skipped"), pytest.fail))[1:]
    assert "skipped: equal rewards in 2 groups in a row, up to group 0; mean reward 0.125" in line


# Tokens


def test_pieces_are_the_text_and_a_character_comes_whole() -> None:
    ids = [*"a😀b".encode(), 256, 0xF0]
    pieces = TokenText(Bytes()).pieces(ids)
    assert len(pieces) == len(ids)
    assert pieces[:7] == ["a", "", "", "", "😀", "b", "<end>"]
    assert "".join(pieces) == TokenText(Bytes()).text(ids)
    assert TokenText(Bytes()).text(ids[:7], special=False) == "a😀b"


def test_without_a_tokenizer_or_for_ids_that_are_not_its_own_ids_are_shown() -> None:
    assert TokenText(None, "gone").pieces([7, 8]) == ["[7]", "[8]"]
    assert TokenText(Bytes()).pieces([65, 999]) == ["[65]", "[999]"]
    assert TokenText(Bytes()).text([65, 999]) == "[65][999]"


def test_a_model_that_is_gone_is_not_the_end_and_its_code_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ModelConfig] = []

    def load_tokenizer(model: ModelConfig) -> None:
        asked.append(model)
        raise ModelLoadError("no such model")

    loading = SimpleNamespace(load_tokenizer=load_tokenizer)  # the real one loads torch: seconds
    monkeypatch.setitem(sys.modules, "pipelinerl.models.loading", loading)
    texts = load_token_text(ModelConfig(path="/no/such/model", trust_remote_code=True))
    assert (texts.known, texts.missing) == (False, "no such model")
    assert asked == [ModelConfig(path="/no/such/model", trust_remote_code=False)]


def test_nothing_reaches_the_terminal_as_a_control_code() -> None:
    shown = printable("\x1b[2J\a\r\x9b\u202e\ud800 fine\n")
    assert shown == "␛[2J␇␍<U+009B><U+202E><U+D800> fine\n"


# Tables


def test_the_plain_table_names_groups_hits_and_damage(tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    with open(folder / "rollouts" / "rollouts.jsonl", "ab") as file:
        file.write(b"nonsense\n")
    said: list[str] = []
    table = list(table_of_groups(RunRollouts(folder), parse(""), said.append))
    assert table[0].split() == ["group", "rewards", "mean", "tokens", "versions", "lag", "trained", "problem"]
    assert table[1].split() == ["0", "█·", "0.500", "4", "0-1", "0", "1/2", "sum/0", '{"question":"2+3="}']
    assert "dropped: timeout 2" in table[3]
    assert len(table) == 5
    assert len(said) == 1
    assert "rollouts.jsonl, line 5 is damaged" in said[0]
    hits = list(table_of_groups(RunRollouts(folder), parse("reward>=0.5"), said.append))
    assert [line.split()[-1] for line in hits[1:]] == ["g0.a0", "g3.a1"]


def command(*arguments: str) -> int:
    return invoke(add_to, "browse", *arguments)


def test_the_command_prints_a_table_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = evaluated_run(tmp_path)
    assert command(str(folder), "--find", "reward=0.25") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "g2.a0"
    for more in ([], ["--export", str(folder / "none.jsonl")]):
        assert command(str(folder), "--find", "reward=0.123", *more) == 1
        assert "nothing matches --find 'reward=0.123'" in capsys.readouterr().err
    assert command(str(folder), "--export", str(folder / "x.jsonl")) == 0
    said = capsys.readouterr()
    assert said.out == f"5 rollouts: {folder / 'x.jsonl'}\n"
    assert "can't read" in said.err  # there is no config.yaml, so no tokenizer
    with pytest.raises(UserError, match="has no flag"):
        command(str(folder), "--trainer.steps", "3")
    assert command(str(folder), "--evaluations", "--find", "version=20") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("h1 v20")
    with pytest.raises(UserError, match=r"evaluation-\*\.jsonl"):
        command(str(folder), "--evaluations", "--export", str(folder / "x.jsonl"))


def shown(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command(str(folder), *arguments) == 0
    return capsys.readouterr().out


def test_a_group_shows_its_attempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_directory(tmp_path)
    text = shown(folder, capsys, "--show", "0")
    assert text.startswith('group 0  sum/0 {"question":"2+3="}\n')
    assert "g0.a0  reward 1, trained on in step 1, lag 0, advantage 0.5, 5 tokens, stop, versions 0-1\nfive\n" in text
    assert "g0.a1  reward 0, not trained on, 4 tokens, stop, versions 0\nSix\n" in text
    assert "g0.a0" not in shown(folder, capsys, "--show", "0", "--find", "reward<1")
    assert "dropped: timeout 2" in shown(folder, capsys, "--show", "1")
    for name in ("99", "g99.a0", "x", "g3.a9"):
        with pytest.raises(UserError, match=r"is not among the 4 groups|has no rollout"):
            command(str(folder), "--show", name)


def test_a_rollout_shows_its_text_and_a_line_for_each_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step(1, ("g0.a0", 0, 0), stale=[4]) | {"dropped_ids": {"stale": ["g0.a1"]}}]
    folder = run_directory(tmp_path, steps=steps)
    assert "left out by the trainer: stale" in shown(folder, capsys, "--show", "g0.a1")
    (rollout_of, *_) = some_groups()[0].rollouts
    page = "".join(rollout_text(rollout_of, Trained(1, 0, 0, 0.5), TokenText(Bytes())))
    assert page.startswith(
        "g0.a0  reward 1, trained on in step 1, lag 0, advantage 0.5\n── turn 0: prompt, 4 tokens v0: 0-0\n"
    )
    assert "── completion, 5 tokens, stop v0: 0-1, v1: 2-4\nfive<end>\n" in page
    rows = [line.split() for line in page.splitlines()[-5:]]
    assert rows[0] == ["0", "0", "102", "0", "-3.0000", "f"]
    assert rows[4] == ["0", "4", "256", "1", "-3.0000", "<end>"]


def test_without_a_tokenizer_ids_and_the_environments_text_are_shown() -> None:
    page = "".join(rollout_text(some_groups()[0].rollouts[0], None, TokenText(None, "the model is gone")))
    assert "token ids only: the model is gone" in page
    assert "[102][105][118][101][256]" in page
    assert "as text\nfive" in page


def test_an_answer_shows_its_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = evaluated_run(tmp_path)
    assert "h1 v20  reward 1" in shown(folder, capsys, "--evaluations", "--show", "0")
    page = shown(folder, capsys, "--evaluations", "--show", "h1 v4")
    assert "boxed 1" in page
    assert "v4: 0-7" in page
    assert page.splitlines()[-1].split()[3:5] == ["4", "-"]


def test_a_damaged_rollout_is_one_clear_line(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(turn("p", "text").completion, weight_versions=())
    odd = group(1, rollout(1, 0, 1.0, msgspec.structs.replace(turn("p", "text"), completion=wrong)))
    folder = run_directory(tmp_path, [group(0), odd, {"index": 7, "x": 0}])
    with pytest.raises(RunDirectoryError, match=r"g1\.a0 is damaged: weight version spans"):
        command(str(folder), "--show", "g1.a0")
    for name in ("7", "g7.a0"):
        with pytest.raises(RunDirectoryError, match="line 3 is damaged"):
            command(str(folder), "--show", name)


def test_a_model_can_not_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;pwned\x07\x1b[2J"
    run = [group(0, rollout(0, 0, 1.0, turn(evil, evil)), question=evil, dropped={evil: 1})]
    folder = run_directory(tmp_path, run)
    for name in ([], ["--show", "0"], ["--show", "g0.a0"]):
        text = shown(folder, capsys, *name)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "␛" in text or "g0.a0" in name


def test_flags_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave out --show"):
        command(str(run_directory(tmp_path)), "--show", "0", "--export", "x.jsonl")


# Exports


def exported(folder: Path, out: Path, texts: TokenText | None = None, query: str | None = None) -> tuple[int, list[str]]:
    said: list[str] = []
    count = export(RunRollouts(folder), texts or TokenText(Bytes()), out, parse(query or ""), said.append)
    return count, said


def test_a_row_for_each_rollout(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    assert exported(run_directory(tmp_path / "run"), out) == (5, [])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
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
        "left_out": None,
    }
    assert (rows[2]["finish_reason"], rows[2]["metrics"], rows[4]["step"]) == ("length", {"guesses": 2.0}, None)


def test_without_a_tokenizer_the_texts_of_the_environment_are_exported(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    silent = msgspec.structs.replace(turn("p", "unread"), text="")
    attempts = (rollout(0, 0, 0.0, turn("p", "said")), rollout(0, 1, 0.0, silent))
    exported(run_directory(tmp_path / "run", [group(0, *attempts)]), out, TokenText(None))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt"], row["completion"]) for row in rows] == [(None, "said"), (None, None)]


def test_an_export_is_whole_or_not_there_and_never_over_the_records(tmp_path: Path) -> None:
    folder = run_directory(tmp_path / "run")
    with pytest.raises(UserError, match=r"ends in \.jsonl"):
        exported(folder, tmp_path / "x.csv")
    with pytest.raises(UserError, match="the run's own record"):
        exported(folder, folder / "rollouts" / "rollouts.jsonl")
    with pytest.raises(RunDirectoryError, match="can't write"):
        exported(folder, tmp_path / "nowhere" / "x.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
