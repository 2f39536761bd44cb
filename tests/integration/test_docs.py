"""The documentation is right: links lead somewhere, commands and run files are accepted, snippets run.

By default commands and snippets are only checked. With --exhaustive they are run, in a folder with the names that the pages
use (`RUN_DIR`, `run.yaml`, ...), except blocks below a comment `<!-- not run: REASON -->` and the commands in `NOT_RUN`.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scripts.docs import ROOT, AllCommands, Block, blocks, commands, links, main, page_name, pages

from pipelinerl.config import yaml_text
from pipelinerl.config.keys import run_keys, run_sections
from pipelinerl.config.load import config_from_yaml, load_config, with_flags
from pipelinerl.environments.registry import BUILT_IN, find_class
from pipelinerl.experiments.sweep import make_grid
from tests.integration.runs import command, flags

DOCS = ROOT / "docs"
NAMES = [str(page.relative_to(ROOT)) for page in pages()]
COMMANDS = AllCommands()
NOT_RUN = {
    "sweep": "minutes (tests/integration/test_lab.py)",
    "lab compare": "minutes (tests/integration/test_lab.py)",
    "lab study": "minutes (tests/integration/test_lab.py)",
    "lab calibrate": "minutes (tests/integration/test_lab.py)",
    "lab simulate": "needs a calibration (tests/integration/test_lab.py)",
    "serve": "does not end (tests/integration/test_serve.py)",
    "watch": "does not end (tests/integration/test_watch_page.py)",
}
"""Commands whose arguments are parsed and that are not run."""
OTHER_PROGRAMS = {".", "cd", "export", "head", "hf", "jq", "less", "ray", "scontrol", "source", "sqlite3", "srun", "tar"}
OTHER_PROGRAMS.add("nvidia-cuda-mps-control")
DATA = {"question": "2 + 2?", "answer": "#### 4", "prompt": "12,18:"}


def code_of(name: str, *languages: str) -> list[Block]:
    return [block for block in blocks((ROOT / name).read_text(encoding="utf-8")) if block.language in languages]


# ---- links and the order of pages


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    for test in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / test).exists(), test
    for target in links(text):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_page_has_a_place_in_the_reading_order_which_is_that_of_the_site() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8").partition("## Reading order")[2]
    order = re.findall(r"^- \[.*?\]\((.+?)\)", index, re.MULTILINE)
    assert sorted(order) == sorted(page.name for page in DOCS.glob("*.md") if page.name != "README.md")
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    made = {"index.md", "readme.md", "run_file.md", "commands.md", "python_reference.md"}
    assert [page for part in navigation for page in part_pages(part) if page not in made] == order


def part_pages(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for inner in part.values() if isinstance(part, dict) else part:
            yield from part_pages(inner)


def test_the_reading_path_is_short_and_its_sizes_are_right() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| \[`.*?`\]\((.*?)\).*? \| (?:(\d+) of )?(\d+) \|", readme, re.MULTILINE)
    assert 0 < len(rows) <= 12
    assert sum(int(part or whole) for _, part, whole in rows) <= 2000
    for path, _, whole in rows:
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert abs(lines - int(whole)) <= 20, f"README.md says {whole} lines, {path} has {lines}"


def test_the_pages_of_the_site_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("scripts.docs.PAGES", tmp_path)
    main()
    written = {path.name for path in tmp_path.glob("*.md")}
    assert {page_name(page) for page in pages()} | {"run_file.md", "commands.md", "python_reference.md"} == written
    assert "trainer.learning_rate" in (tmp_path / "run_file.md").read_text()
    overview, _, help_of_each = (tmp_path / "commands.md").read_text().partition("## ")
    assert all(f"\n  {name} " in overview for name in COMMANDS.parsers if " " not in name)
    assert "--dry-run" in help_of_each
    assert "::: pipelinerl.train" in (tmp_path / "python_reference.md").read_text()
    assert (tmp_path / "files/examples/agent.py.md").read_text().startswith("# `examples/agent.py`\n\n````python\n")


# ---- commands, run files and snippets are accepted


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_accepted(name: str) -> None:
    for block in code_of(name, "bash"):
        for line in commands(block.code):
            for words in simple_commands(line):
                check_command(words)
    for inline in re.findall(r"`pipelinerl ([a-z][\w-]*)[^`]*`", (ROOT / name).read_text(encoding="utf-8")):
        assert inline in COMMANDS.parsers, f"pipelinerl {inline}"


def simple_commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, without variables that are set for them and files that they write."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&>;")
    lexer.commenters, lexer.whitespace_split = "#", True
    words: list[str] = []
    for before, word in pairwise([";", *lexer, ";"]):
        if not set(word) <= set("|&>;"):
            words += [word] if before != ">" else []
            continue
        if word == ">":
            continue
        while words and re.match(r"\w+=", words[0]):
            words[:1] = [words[0].partition("$(")[2]] if "$(" in words[0] else []
        if words:
            yield words
        words = []


def check_command(words: list[str]) -> None:
    program, arguments = words[0].rpartition("bin/")[2], words[1:]
    if program == "pipelinerl":
        check_pipelinerl(arguments)
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets, words
    elif program in ("python", "python3"):
        check_python(arguments)
    elif program == "pip":
        check_pip(" ".join(arguments))
    elif script := next((word for word in words[:2] if word.endswith(".sh")), None):
        assert (ROOT / script).is_file(), script
    else:
        assert program in OTHER_PROGRAMS, f"unknown program: {' '.join(words)}"


def check_pipelinerl(arguments: list[str]) -> None:
    if "--help" in arguments:
        assert arguments[0] in {*COMMANDS.parsers, "--help"}
        return
    if arguments == ["--version"]:
        return
    options, settings = COMMANDS.parse(arguments)
    given = getattr(options, "run_file", None)
    if options.command == "sweep":
        make_grid(None, settings, options.seeds)
    elif given is not None and (ROOT / given).is_file():
        load_config(ROOT / given, settings)
    elif settings:
        with_flags(load_config(None), settings, [*run_keys()])


def check_python(arguments: list[str]) -> None:
    match arguments:
        case ["-m", "pytest", *paths]:
            assert all((ROOT / path).exists() for path in paths if not path.startswith("-")), paths
        case ["-m", name, *rest] if name.startswith(("benchmarks.", "tests.")):
            sources = ["tests/chaos/__main__.py", "benchmarks/common.py", f"{name.replace('.', '/')}.py"]
            text = "".join((ROOT / source).read_text(encoding="utf-8") for source in sources if (ROOT / source).is_file())
            assert all(f'"{word}"' in text for word in rest if word.startswith("--")), rest
        case ["-m", "venv" | "pydoc", *_]:
            pass
        case ["-c", code]:
            ast.parse(code)
        case [path, *_]:
            assert (ROOT / path).is_file(), path
        case _:
            pytest.fail(f"python {arguments}")


def check_pip(words: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for named in re.findall(r"(?:pipelinerl|whl|\.)\[(.+?)\]", words):
        assert set(named.split(",")) <= set(extras), named


@pytest.mark.parametrize("name", NAMES)
def test_run_files_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in {"MODELS": "models", "STEPS": "100"}.items():
        monkeypatch.setenv(variable, text)
    for block in code_of(name, "yaml"):
        value = yaml_text.parse(block.code, name).value
        if not set(value) & set(run_sections()):
            assert "apiVersion" in value, block.code
            continue
        own = re.sub(r"^extends: .*", "", block.code)  # the page has only one of the two files
        config = config_from_yaml(own, f"{name}:{block.line + 1}")
        kind = config.environment.kind
        options = getattr(find_class(kind), "Options", None) if kind in BUILT_IN else None
        if options is not None and "environment" in value:
            options.read(config.environment.args)


@pytest.mark.parametrize("name", NAMES)
def test_snippets_are_python(name: str) -> None:
    for block in code_of(name, "python"):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipelinerl"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


# ---- they run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names that the pages use."""
    folder = tmp_path_factory.mktemp("docs")
    assert command("init", "project", cwd=folder).status == 0
    for name in ("problems.jsonl", "rewards.py", "run.yaml"):
        shutil.copy(folder / "project" / name, folder / name)
    shutil.copy(folder / "run.yaml", folder / "RUN.yaml")
    shutil.copytree(ROOT / "examples", folder / "examples")
    small = flags(Path("runs/demo"), trainer__checkpoint_every=1, trainer__keep_checkpoints=9, evaluation__problems=8)
    ended = command("train", *small, "--evaluation.every=2", cwd=folder)
    assert ended.status == 0, ended.error
    for name in ("RUN_DIR", "runs/first", "runs/RUN", "runs/my-run", "runs/ours"):
        (folder / name).symlink_to(folder / "runs/demo")
    (folder / "MODEL").symlink_to(ROOT / "src/pipelinerl/assets/demo_base")
    (folder / "model").symlink_to(ROOT / "src/pipelinerl/assets/demo_base")
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("".join(json.dumps(DATA | {"id": n}) + "\n" for n in range(20)))
    return folder


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_commands_run(name: str, place: Path) -> None:
    """`train` only with `--dry-run`. Each block begins in the folder with the names."""
    for block in (block for block in code_of(name, "bash") if block.not_run is None):
        cwd = place
        for words in (words for line in commands(block.code) for words in simple_commands(line)):
            if words[0] == "cd" and (cwd / words[1]).is_dir():
                cwd = cwd / words[1]
            elif words[0] == "pipelinerl" and words[1:2] and words[1] not in NOT_RUN:
                dry = ["--dry-run"] if words[1] == "train" and "--dry-run" not in words else []
                ended = command(*words[1:], *dry, cwd=cwd)
                assert ended.status == 0, f"{words}: {ended.error}"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_snippets_run(name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Indented blocks are fragments. If the last line of a snippet is a comment, it is what the snippet prints."""
    monkeypatch.chdir(place)
    for block in code_of(name, "python"):
        if block.fenced and block.not_run is None:
            exec(compile(block.code, f"{name}:{block.line + 1}", "exec"), {"__name__": "snippet"})  # noqa: S102 - ours
            printed, last = capsys.readouterr().out.strip(), block.code.strip().splitlines()[-1]
            if last.startswith("# "):
                assert printed == last.removeprefix("# ")
