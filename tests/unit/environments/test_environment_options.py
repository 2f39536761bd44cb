"""The arguments of environments: read from structs, and listed in the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Strict

from pipelinerl.config.schema import Count
from pipelinerl.environments.options import Files, Inner, Options, QuestionOptions
from pipelinerl.environments.registry import BUILT_IN, find_class
from pipelinerl.environments.user.function import FunctionOptions
from pipelinerl.errors import EnvironmentSetupError
from tests.unit.environments.env_client import one_line

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


class Coins(Options, frozen=True):
    path: Files
    count: Count = 3
    bounds: Annotated[tuple[Count, Count], Strict(False)] = (1, 2)
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({}, "environment.args.path: it is missing; this takes text or a list of 1 or more: text"),
        ({"path": "a", "coutn": 1}, "environment.args.coutn: unknown; did you mean `count`?"),
        ({"path": "a", "x": 1}, "environment.args.x: unknown; it takes path (required), count, bounds, inner"),
        ({"path": 3}, "environment.args.path: 3 is not allowed here; this takes text or a list of 1 or more: text"),
        ({"path": "a", "bounds": [1]}, "environment.args.bounds: [1] is not allowed here; this takes a list of 2: a whole "),
        ({"path": "a", "inner": {"kind": "gcd", "arg": {}}}, "(at arg: Extra inputs are not permitted)"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(args: dict[str, Any], complaint: str) -> None:
    with one_line(EnvironmentSetupError, complaint):
        Coins.read(args)


# ---------------------------------------------------------------------------------------------- documentation


def table(title: str, options: type[Options], note: str = "") -> str:
    """The arguments of one kind of environment, as they are listed in the documentation, without inherited ones."""
    inherited = options.__bases__[0].model_fields
    rows = [f"### {title}", "", *([note, ""] if note else []), "| argument | default | |", "|---|---|---|"]
    own = {name: field for name, field in options.model_fields.items() if name not in inherited}
    for name, field in sorted(own.items(), key=lambda item: not item[1].is_required()):
        default = "required" if field.is_required() else f"`{json.dumps(field.default, separators=(',', ':'))}`"
        words = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {default if len(default) < 30 else 'a text'} | {words} |")
    return "\n".join(rows) + "\n"


def tables() -> str:
    kinds = {kind: getattr(find_class(kind), "Options", None) for kind in BUILT_IN}
    before = {QuestionOptions: "The arguments of a question, and:", FunctionOptions: "The arguments of `function`, and:"}
    question = "A question: `math`, `reasoning_gym`, `function`"
    parts = [table(question, QuestionOptions, "Each kind has its own default of `system` and `text`.")]
    for kind, options in kinds.items():
        if options is not None:
            parts.append(table(f"`{kind}`", options, before.get(options.__base__, "")))
    return "\n".join(parts)


def test_the_documentation_lists_the_arguments() -> None:
    _, _, listed = PAGE.read_text(encoding="utf-8").partition("## Arguments\n")
    assert listed.strip().endswith(tables().strip()), f"docs/environments.md must end with\n\n{tables()}"
