"""The arguments of environments: read from structs, and listed in the documentation."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from pipelinerl.environments.options import AtLeastOne, Files, Inner, Options
from pipelinerl.environments.questions import QuestionOptions
from pipelinerl.environments.registry import BUILT_IN, find_class
from pipelinerl.environments.user.function import FunctionOptions
from pipelinerl.errors import EnvironmentSetupError
from tests.unit.environments.env_client import one_line

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


class Coins(Options, kw_only=True):
    path: Files
    count: AtLeastOne = 3
    side: Literal["heads", "tails"] = "heads"
    odds: Annotated[float, Meta(ge=0, le=1)] | None = None
    bounds: Annotated[tuple[AtLeastOne, ...], Meta(min_length=2, max_length=2)] = (1, 2)
    inner: Inner | None = None


def test_arguments_are_converted_and_have_defaults() -> None:
    assert Coins.read({"path": "a"}) == Coins(path="a")
    assert Coins.read({"path": ["a", "b"], "odds": 1, "bounds": [3, 4]}) == Coins(path=["a", "b"], odds=1.0, bounds=(3, 4))
    assert Coins.read({"path": "a", "inner": {"kind": "gcd"}}).inner == Inner("gcd")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({}, "environment.args don't fit Coins: missing a required "),  # from Python 3.12 on: keyword-only
        ({}, "argument: 'path'; after `tokenizer` and"),
        ({"path": "a", "coutn": 1}, "got an unexpected keyword argument 'coutn'"),
        ({"path": "a", "coutn": 1}, "inner. Did you mean 'count' instead of 'coutn'?"),
        ({"paht": "a"}, "argument: 'path'"),
        ({"paht": "a"}, "Did you mean 'path' instead of 'paht'?"),
        ({"path": 3}, "environment.args.path is 3: expected `str | list`, got `int`"),
        ({"path": []}, "environment.args.path is []: expected `list` of length >= 1"),
        ({"path": "a", "count": 0}, "environment.args.count is 0: expected `int` >= 1"),
        ({"path": "a", "count": "many " * 30}, "...: expected `int`, got `str`"),
        ({"path": "a", "count": True}, "environment.args.count is True: expected `int`, got `bool`"),
        ({"path": "a", "side": "edge"}, "environment.args.side is 'edge': it must be `heads` or `tails`"),
        ({"path": "a", "odds": 2}, "environment.args.odds is 2: expected `float` <= 1"),
        ({"path": "a", "bounds": [1]}, "environment.args.bounds is [1]: expected `list` of length >= 2"),
        ({"path": "a", "bounds": [1, 0]}, "environment.args.bounds[1]: expected `int` >= 1"),
        ({"path": "a", "inner": {"args": {}}}, "inner is {'args': {}}: object missing required field `kind`"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(args: dict[str, Any], complaint: str) -> None:
    with one_line(EnvironmentSetupError, complaint):
        Coins.read(args)


# ---------------------------------------------------------------------------------------------- documentation


def field_docs(options: type[Options]) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(options.__mro__[: options.__mro__.index(Options)]):
        (tree,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return docs


def table(title: str, options: type[Options], note: str = "") -> str:
    """The arguments of one kind of environment, as they are listed in the documentation, without inherited ones."""
    docs = field_docs(options)
    before = {field.name for field in msgspec.structs.fields(options.__bases__[0])}
    rows = [f"### {title}", "", *([note, ""] if note else []), "| argument | default | |", "|---|---|---|"]
    own = (field for field in msgspec.structs.fields(options) if field.name not in before)
    for field in sorted(own, key=lambda field: not field.required):
        default = "required" if field.required else f"`{msgspec.json.encode(field.default).decode()}`"
        rows.append(f"| `{field.name}` | {default if len(default) < 30 else 'a text'} | {docs[field.name]} |")
    return "\n".join(rows) + "\n"


def tables() -> str:
    kinds = {kind: getattr(find_class(kind), "Options", None) for kind in BUILT_IN}
    before = {QuestionOptions: "The arguments of a question, and:", FunctionOptions: "The arguments of `function`, and:"}
    question = "A question: `math`, `countdown`, `reasoning_gym`"
    parts = [table(question, QuestionOptions, "Each kind has its own default of `system` and `text`.")]
    for kind, options in kinds.items():
        if options is not None:
            parts.append(table(f"`{kind}`", options, before.get(options.__base__, "")))
    return "\n".join(parts)


def test_the_documentation_lists_the_arguments() -> None:
    _, _, listed = PAGE.read_text(encoding="utf-8").partition("## Arguments\n")
    assert listed.strip().endswith(tables().strip()), f"docs/environments.md must end with\n\n{tables()}"
