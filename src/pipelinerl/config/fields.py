"""The fields of the run file as data: dotted key, type, default and documentation, read off `schema.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import inspect

from pipelinerl.config.schema import RunConfig

_WORDS = {
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.DictType: "a mapping",
    inspect.StrType: "text",
}


@dataclass(frozen=True)
class Field:
    """One key that takes a value. `section` is "" for keys at the top level."""

    section: str
    name: str
    annotation: Any
    kinds: tuple[inspect.Type, ...]
    description: str
    default: Any

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def allowed(self) -> str:
        """What values this key takes, in words."""
        return " or ".join(_in_words(kind) for kind in self.kinds)

    @property
    def is_text(self) -> bool:
        """Whether a value given as text needs no interpretation (apart from null, where it is allowed)."""
        return all(isinstance(kind, inspect.StrType | inspect.LiteralType | inspect.NoneType) for kind in self.kinds)

    @property
    def is_switch(self) -> bool:
        return any(isinstance(kind, inspect.BoolType) for kind in self.kinds)

    @property
    def is_nullable(self) -> bool:
        return any(isinstance(kind, inspect.NoneType) for kind in self.kinds)

    @property
    def is_mapping(self) -> bool:
        return any(isinstance(kind, inspect.DictType | inspect.StructType) for kind in self.kinds)

    @property
    def inner(self) -> tuple[Field, ...]:
        """The keys of a mapping whose keys are known."""
        structs = (kind.cls for kind in self.kinds if isinstance(kind, inspect.StructType))
        return tuple(field for struct in structs for field in _fields_of(struct, self.key))

    def convert(self, value: Any) -> Any:
        """`value` in this field's type. Raises ValueError with what is wrong with it."""
        problem = _not_json(value)
        if problem:
            raise ValueError(f"{problem}; this takes {self.allowed}")
        try:
            return msgspec.convert(value, self.annotation)
        except msgspec.ValidationError as error:
            self._convert_inner(value)
            raise ValueError(f"{show(value)} is not allowed here; this takes {self.allowed}") from error

    def _convert_inner(self, value: Any) -> None:
        """Raise ValueError for the key of a mapping that is wrong, if it is one."""
        known = {field.name: field for field in self.inner}
        for name, inner in value.items() if isinstance(value, dict) else ():
            if name in known:
                try:
                    known[name].convert(inner)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error


def show(value: Any) -> str:
    """A value as it is named in a message: short, on one line."""
    text = repr(value) if isinstance(value, str) else spell(value)
    return text if len(text) <= 60 else text[:57] + "..."


def spell(value: Any) -> str:
    """A value the way a run file spells it: null, true, plain text, [lists]; anything else as Python does."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return repr(list(value))
    return value if isinstance(value, str) else repr(value)


@cache
def run_fields() -> dict[str, Field]:
    """Every field of the run file by dotted key, in the order of the schema."""
    return {field.key: field for field in _fields_of(RunConfig, "")}


@cache
def run_sections() -> tuple[str, ...]:
    """The names of the run file's sections, in the order of the schema."""
    return tuple(dict.fromkeys(field.section for field in run_fields().values() if field.section))


def _fields_of(struct: type[msgspec.Struct], section: str) -> Iterator[Field]:
    described = inspect.type_info(struct)
    if not isinstance(described, inspect.StructType):
        raise TypeError(f"{struct.__name__} is not a struct")
    for info, detail in zip(msgspec.structs.fields(struct), described.fields, strict=True):
        if isinstance(info.type, type) and issubclass(info.type, msgspec.Struct):
            yield from _fields_of(info.type, info.name)
            continue
        description, kind = "", detail.type
        if isinstance(kind, inspect.Metadata):
            description, kind = (kind.extra_json_schema or {}).get("description", ""), kind.type
        if isinstance(kind, inspect.LiteralType):
            kind = inspect.LiteralType(_choices(info.type))
        kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        default = info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
        yield Field(section, info.name, info.type, tuple(kinds), description, default)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a (documented) Literal in the order they are written; `inspect` sorts them."""
    literal = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return get_args(literal)


def _in_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values)) if len(values) > 1 else str(values[0])
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}: " + ", ".join(_in_words(item) for item in items)
        case inspect.VarTupleType(item_type=item):
            return f"a list of any length: {_in_words(item)}"
        case inspect.StructType(fields=fields):
            return f"a mapping of {', '.join(field.name for field in fields)}"
        case inspect.IntType() | inspect.FloatType():
            return _WORDS[type(kind)] + _range_in_words(kind)
    return _WORDS[type(kind)]


def _range_in_words(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
    limits = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
    return f" {' and '.join(limits)}" if limits else ""


def _not_json(value: Any) -> str | None:
    """What keeps a value from being written as JSON: everything in a run file also goes into records and messages."""
    match value:
        case float() if not math.isfinite(value):
            return f"{value} is not a finite number"
        case dict():
            odd = next((key for key in value if not isinstance(key, str)), None)
            if odd is not None:
                return f"the key {show(odd)} is not text; put it in quotes"
            return next(filter(None, map(_not_json, value.values())), None)
        case list() | tuple():
            return next(filter(None, map(_not_json, value)), None)
        case None | bool() | int() | float() | str():
            return None
    return f"a value of type {type(value).__name__} can't be written as JSON"
