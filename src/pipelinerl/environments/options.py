"""`environment.args`: each environment declares its arguments once, as a struct.

    class CoinsOptions(Options, kw_only=True):
        count: Annotated[int, Meta(ge=1)] = 3
        \"""How many coins are tossed.\"""

    class Coins(SingleTurn):
        Options = CoinsOptions

        def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
            super().__init__(tokenizer, seed)
            self._count = CoinsOptions.read(args).count

The names, types, ranges and defaults of the struct are checked before a run starts and listed in errors. The docstrings of
its fields are the documentation. A class with an ordinary constructor needs no struct.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from pipelinerl.errors import EnvironmentSetupError

Files: TypeAlias = str | Annotated[list[str], Meta(min_length=1)]
"""A file (JSON lines, a JSON array, CSV or Parquet, by its suffix), a data set (`dataset:...`), or a list of them."""
Share: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
FunctionName: TypeAlias = str
"""`path/to/file.py:function` or `package.module:function`."""
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]

SHOWN_CHARACTERS = 60
"""Characters of a wrong value that an error quotes."""


def listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An environment within another one: `kind` and `args`, as under `environment` in a run file."""

    kind: str
    args: dict[str, Any] = {}


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the structs. A subclass may check several fields together in `__post_init__` (EnvironmentSetupError)."""

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> Self:
        """Raises EnvironmentSetupError for the first argument that is unknown, missing, or has a wrong type or range."""
        check_arguments(cls.__name__, cls.signature(), args)
        try:
            return msgspec.convert(dict(args), cls)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise EnvironmentSetupError(_mistake(cls, what, where.rstrip("`"), args)) from error

    def refuse_without_effect(self, why: str, *names: str) -> None:
        """Raises EnvironmentSetupError if one of these arguments is neither its default nor empty, for it has no effect."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.name in names and value not in ("", field.default):
                raise EnvironmentSetupError(f"environment.args.{field.name} has no effect: {why}; leave it out")

    @classmethod
    def signature(cls) -> inspect.Signature:
        """The signature of a constructor that takes the fields as keyword arguments."""
        one = inspect.Parameter
        base = [one(name, one.POSITIONAL_OR_KEYWORD) for name in ("tokenizer", "seed")]
        fields = msgspec.structs.fields(cls)
        own = [one(field.name, one.KEYWORD_ONLY, default=one.empty if field.required else None) for field in fields]
        return inspect.Signature([*base, *own])


def _mistake(options: type[Options], what: str, where: str, args: Mapping[str, Any]) -> str:
    """An error of msgspec about the argument `where`, or about a part of an argument such as `numbers[0]`."""
    hint = get_type_hints(options).get(where)
    if get_origin(hint) is Literal:
        what = f"it must be {' or '.join(f'`{value}`' for value in get_args(hint))}"
    value = repr(args.get(where))
    shown = value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]}..."
    place = f"{where} is {shown}" if where in args else where
    return f"environment.args.{place}: {what[:1].lower()}{what[1:].replace('array', 'list')}"


def check_arguments(name: str, signature: inspect.Signature, args: Mapping[str, Any]) -> None:
    """Raises EnvironmentSetupError if `args` don't fit the constructor's signature (given without `self`).

    Checked before the call, so that a TypeError raised inside the constructor is not mistaken for wrong arguments.
    """
    try:
        signature.bind(None, 0, **args)
    except TypeError as error:
        own = list(signature.parameters.values())[2:]
        required = [it.name for it in own if it.default is it.empty and it.kind < it.VAR_KEYWORD]
        optional = [it.name for it in own if it.name not in required]
        names = [*required, *optional]
        close = ((unknown, get_close_matches(unknown, names, n=1)) for unknown in args if unknown not in names)
        hints = (f". Did you mean {match!r} instead of {unknown!r}?" for unknown, found in close for match in found)
        takes = ", ".join([*(f"{it} (required)" for it in required), *optional]) or "nothing"
        raise EnvironmentSetupError(
            f"environment.args don't fit {name}: {error}; after `tokenizer` and `seed` it takes {takes}" + next(hints, "")
        ) from error
