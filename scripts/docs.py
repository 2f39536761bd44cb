"""Writes the pages of the documentation's site to `build/pages`; `make docs` builds the site of them with Zensical.

The sources are README.md and docs/*.md, which also read well on a forge. Their copies here differ in this:

- A link to a file outside docs/ leads to a copy of it, or if it is a text, to a page that shows it.
- Code blocks without a language get one, and lists have the blank lines and indentation that Python-Markdown needs.
- There are pages for the reference, written from the run file's schema, the command's parsers and the packages' exports.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipelinerl.cli import COMMANDS
from pipelinerl.cli.parser import Commands
from pipelinerl.config import yaml_text
from pipelinerl.config.keys import in_words, run_keys, run_sections, spell
from pipelinerl.errors import PipelineRLError

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) +")
FENCE = re.compile(r" *(`{3,})(\w*)")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
PROGRAM = re.compile(r"(?:\S*bin/)?(?:bash|cd|export|make|pip|pipelinerl|python3?|ray|sqlite3|tar|scripts/\S+)$")
"""The first word of a line of shell commands, after variables."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".txt": "text"}
SHOWN = {
    "pipelinerl.types": ("Problem", "Rollout", "Turn", "Completion", "VersionSpan"),
    "pipelinerl.interfaces": ("GenerationClient", "Environment"),
    "pipelinerl.environments.single_turn": ("Task", "Score"),
}
"""What the reference shows beside everything that these packages export."""
PACKAGES = ("pipelinerl", "pipelinerl.environments", "pipelinerl.engine")


class Block(NamedTuple):
    """A code block of a page. `line`: its first line in the page, from 0; `end`: one after its last; fences included.

    `not_run` is the reason, given in a comment above the block, why tests do not run it.
    """

    line: int
    end: int
    indent: int
    language: str
    code: str
    fenced: bool
    not_run: str | None


class Line(NamedTuple):
    """A line of a page outside of code. `indent`: that of the text of the list item which it is in, or 0."""

    number: int
    text: str
    indent: int


# ---- reading pages


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def parse(text: str) -> list[Block | Line]:
    """A page as lines of text and blocks of code, in order. Raises ValueError for a fence without an end."""
    lines = text.splitlines()
    found: list[Block | Line] = []
    number = indent = 0
    while number < len(lines):
        line = lines[number]
        depth = len(line) - len(line.lstrip())
        blank_before = number == 0 or not lines[number - 1].strip()
        if line.strip() and blank_before and depth < indent:
            indent = 0
        if fence := FENCE.match(line):
            end = next((end for end in range(number + 1, len(lines)) if lines[end].strip() == fence[1]), None)
            if end is None:
                raise ValueError(f"line {number + 1}: a code block without an end")
            found.append(_block(lines, number, end + 1, fence[2]))
            number = end + 1
        elif line.strip() and blank_before and depth >= indent + 4:
            rest = range(number, len(lines))
            end = next((end for end in rest if lines[end].strip() and _depth(lines[end]) < indent + 4), len(lines))
            while not lines[end - 1].strip():
                end -= 1
            found.append(_block(lines, number, end, None, indent))
            number = end
        else:
            if depth == 0 and (item := LIST_ITEM.match(line)):
                indent = len(item[0])
                found.append(Line(number, line, 0))
            else:
                found.append(Line(number, line, indent if depth >= indent else 0))
            number += 1
    return found


def blocks(text: str) -> list[Block]:
    return [part for part in parse(text) if isinstance(part, Block)]


def commands(code: str) -> Iterator[str]:
    """The commands of a shell block, one per line: continued lines are joined, lines of comments left out."""
    for line in code.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def links(text: str) -> Iterator[str]:
    """Targets of the links of a page, without those of other sites."""
    for part in parse(text):
        if isinstance(part, Line):
            yield from (target for _, target, _ in LINK.findall(part.text) if "://" not in target)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _block(lines: list[str], begin: int, end: int, language: str | None, indent: int = 0) -> Block:
    fenced = language is not None
    inner = lines[begin + 1 : end - 1] if fenced else lines[begin:end]
    margin = min((_depth(line) for line in inner if line.strip()), default=0) if fenced else indent + 4
    code = "\n".join(line[margin:] for line in inner) + "\n"
    above = next((line for line in reversed(lines[:begin]) if line.strip()), "")
    reason = NOT_RUN.fullmatch(above.strip())
    depth = _depth(lines[begin]) if fenced else indent
    return Block(begin, end, depth, language or guess(code), code, fenced, reason[1] if reason else None)


def guess(code: str) -> str:
    """The language of a block that does not name it."""
    first = next((line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    words = [word for word in first.split() if "=" not in word]
    if words and PROGRAM.match(words[0]) and not first.startswith(" "):
        return "bash"
    try:
        value = yaml_text.parse(code, "block").value
    except PipelineRLError:
        value = None
    if isinstance(value, dict) and code.lstrip().startswith("{"):
        return "json"
    if isinstance(value, dict) and any(isinstance(value.get(section), dict) for section in run_sections()):
        return "yaml"
    try:
        statements = ast.parse(code).body
    except SyntaxError:
        return "text"
    spoken = all(isinstance(one, ast.Expr) and not isinstance(one.value, ast.Call | ast.Attribute) for one in statements)
    return "text" if spoken else "python"


# ---- writing the site's pages


class Site:
    """The pages in `out`, and what they link to."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def write(self, name: str, text: str) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def add_page(self, page: Path) -> None:
        self.write(page_name(page), self.converted(page, page.read_text(encoding="utf-8")))

    def converted(self, page: Path, text: str) -> str:
        """The text of a page as the site needs it. Raises FileNotFoundError for a link that leads nowhere."""
        out: list[str] = []
        for part in parse(text):
            if isinstance(part, Block):
                margin = " " * (4 if part.indent else 0)
                code = part.code.rstrip("\n").split("\n")
                out += [f"{margin}{line}".rstrip() for line in (f"```{part.language}", *code, "```")]
                continue
            line = LINK.sub(lambda found: found[1] + self._target(page, found[2]) + found[3], part.text)
            if part.indent:
                line = "    " + line[part.indent :] if line.strip() else ""
            elif LIST_ITEM.match(line) and out and not (out[-1].startswith(" " * 4) or LIST_ITEM.match(out[-1])):
                out += [""] if out[-1] else []
            out.append(line)
        return "\n".join(out) + "\n"

    def _target(self, page: Path, target: str) -> str:
        """Where a link of a page leads on the site."""
        if "://" in target or target.startswith("#"):
            return target
        name, mark, anchor = target.partition("#")
        path = (page.parent / name).resolve()
        if not path.exists():
            raise FileNotFoundError(f"{page.relative_to(ROOT)}: {target} does not exist")
        if path in pages():
            found = page_name(path)
        elif path.parent == ROOT / "docs":
            found = path.name
        else:
            found = self._add_file(path)
        return os.path.relpath(found, os.path.dirname(page_name(page)) or ".") + mark + anchor

    def _add_file(self, path: Path) -> str:
        """Add a file or a folder of the repository. Returns its page, or the file."""
        relative = path.relative_to(ROOT)
        name = f"files/{relative}"
        if path.is_dir():
            name += "/index.md"
            entries = sorted(path.iterdir())
            listed = [f"- [{one.name}]({os.path.relpath(self._add_file(one), os.path.dirname(name))})" for one in entries]
            self.write(name, f"# `{relative}`\n\n" + "\n".join(listed) + "\n")
        elif path.suffix in LANGUAGES:
            name += ".md"
            text = path.read_text(encoding="utf-8")
            self.write(name, f"# `{relative}`\n\n````{LANGUAGES[path.suffix]}\n{text}````\n")
        else:
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.out / name)
        return name


def page_name(page: Path) -> str:
    """The name of a page on the site. docs/README.md is its first page."""
    if page.name != "README.md":
        return page.name
    return "index.md" if page.parent == ROOT / "docs" else "readme.md"


# ---- the reference


class AllCommands(Commands):
    """The command's parser with all of its subcommands, also by name."""

    def __init__(self) -> None:
        super().__init__()
        for module in dict.fromkeys(COMMANDS.values()):
            importlib.import_module(f"pipelinerl.cli.{module}").add_to(self)
        self.describe(COMMANDS)


def run_file_page() -> str:
    """Every key of the run file."""
    parts = ["# The run file\n", "`pipelinerl config RUN.yaml` prints the same with the values of a run file.\n"]
    section: str | None = None
    for key in run_keys().values():
        if key.section != section:
            section = key.section
            parts.append(f"\n## {section or 'At the top'}\n")
        default = spell(key.schema["default"])
        takes = f"Takes {in_words(key.schema)}." + (f" Default: `{default}`." if default != "" else "")
        parts.append(f"`{key}`{{ #{str(key).replace('.', '-')} }}\n:   {key.description}\n\n    {takes}\n")
        parts += [f"    - `{inner.name}`: {inner.description} Takes {in_words(inner.schema)}.\n" for inner in key.inner]
    return "\n".join(parts)


def commands_page() -> str:
    """The help of every command."""
    found = AllCommands()
    parts = ["# Commands\n", f"```text\n{found.root.format_help()}```\n"]
    parts += [f"## {name}\n\n```text\n{parser.format_help()}```\n" for name, parser in found.parsers.items()]
    return "\n".join(parts)


def python_page() -> str:
    """What can be imported; mkdocstrings fills in signatures and docstrings."""
    parts = ["# Python\n"]
    for package in PACKAGES:
        names = sorted(name for name in importlib.import_module(package).__all__ if not name.startswith("_"))
        parts.append(f"## {package}\n\n" + "\n".join(f"::: {package}.{name}\n" for name in names))
    for module, listed in SHOWN.items():
        parts.append(f"## {module}\n\n" + "\n".join(f"::: {module}.{name}\n" for name in listed))
    return "\n".join(parts)


def main() -> None:
    os.environ["COLUMNS"] = "92"  # of the commands' help: what a page has room for
    shutil.rmtree(PAGES, ignore_errors=True)
    site = Site(PAGES)
    for page in pages():
        site.add_page(page)
    for asset in (path for path in (ROOT / "docs").iterdir() if path.suffix in (".css", ".png", ".svg")):
        shutil.copyfile(asset, PAGES / asset.name)
    site.write("run_file.md", run_file_page())
    site.write("commands.md", commands_page())
    site.write("python_reference.md", python_page())


if __name__ == "__main__":
    main()
