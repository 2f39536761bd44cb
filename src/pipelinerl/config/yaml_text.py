"""The dialect of YAML that run files are written in: YAML 1.2's plain values, unique keys, and lines for messages.

PyYAML follows YAML 1.1, where `1e-6` is text, `no` is false, `010` is eight and `12:30` is 750. Here a plain value is
null, true/false, a whole number or a number exactly as in YAML 1.2 (and JSON), and text otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from pipelinerl.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_PLAIN_VALUES = (
    (_TAG + "null", re.compile(r"^(?:~|null|Null|NULL|)$"), ("~", "n", "N", "")),
    (_TAG + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), tuple("tTfF")),
    (_TAG + "int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), tuple("-+0123456789")),
    (
        _TAG + "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        tuple("-+.0123456789"),
    ),
    (_TAG + "merge", re.compile(r"^<<$"), ("<",)),
)


MOST_VALUES = 100_000
"""In a run file, each counted as often as aliases name it."""
LONGEST_NUMBER = 1000


class _Loader(yaml.SafeLoader):
    """Plain values as in YAML 1.2."""

    def whole_number(self, node: yaml.ScalarNode) -> int:
        text = node.value
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        if len(text) > LONGEST_NUMBER:
            raise ValueError(f"line {node.start_mark.line + 1}: a number of {len(text)} characters")
        return int(text if base == 10 else text[2:], base)


class _Dumper(yaml.SafeDumper):
    """Writes what any YAML reader, 1.1 or 1.2, reads back the same."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (PyYAML's signature)
        return True

    def text(self, value: str) -> yaml.ScalarNode:
        # Double quotes escape what is not printable, so that every value stays on its line.
        return self.represent_scalar(_TAG + "str", value, style=None if value.isprintable() else '"')

    def sequence(self, value: list[Any] | tuple[Any, ...]) -> yaml.SequenceNode:
        return self.represent_sequence(_TAG + "seq", value, flow_style=True)


_Loader.yaml_implicit_resolvers = {}  # forget YAML 1.1's; the dumper keeps them too, and quotes what either would take
for _tag, _pattern, _firsts in _PLAIN_VALUES:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_firsts))
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_firsts))
_Loader.add_constructor(_TAG + "int", _Loader.whole_number)
_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(list, _Dumper.sequence)
_Dumper.add_representer(tuple, _Dumper.sequence)


@dataclass(frozen=True)
class YamlText:
    """A parsed text: its value, and the line (from 1) of every key and item of a list, by dotted place."""

    value: Any
    lines: dict[str, int]


def parse(text: str, source: str) -> YamlText:
    """Parse one YAML document. Raises ConfigError, one line with `source` and the line number, if it is not valid."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            lines: dict[str, int] = {}
            _collect_lines(node, "", lines)
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        where = f"{source}:{mark.line + 1}" if (mark := error.problem_mark or error.context_mark) else source
        hint = ' (inside { } and [ ], quote a variable: "${NAME}")' if mark and "${" in str(mark.get_snippet()) else ""
        hint = " (YAML is indented with spaces)" if "'\\t'" in (error.problem or "") else hint
        said = error.problem or error.context
        said = f"{error.context}, {said}" if str(said).startswith("but ") else said
        raise ConfigError(f"{where}: not valid YAML: {said}{hint}") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{source}: not valid YAML: character {error.position}: {error.reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: not usable as YAML: nested too deeply, or a value contains itself") from error
    except ValueError as error:
        raise ConfigError(f"{source}: not usable as YAML: {error}") from error
    return YamlText(value, lines)


def dump(value: Any) -> str:
    """YAML text of plain values: mappings as blocks in their own order, lists and long texts on one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=float("inf")
    )
    return text


def _collect_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> None:
    """Add the line of every key and of every item of a list. Raises MarkedYAMLError for a key that is in a mapping twice.

    Raises ValueError for more than MOST_VALUES. With aliases of aliases, a few lines can stand for billions.
    """
    if len(lines) > MOST_VALUES:
        raise ValueError(f"aliases (`*name`) make it more than {MOST_VALUES} values")
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[f"{prefix}{number}"] = item.start_mark.line + 1
            _collect_lines(item, f"{prefix}{number}.", lines)
    seen = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = key.value if isinstance(key, yaml.ScalarNode) else None
        if name is not None and name in seen:
            raise yaml.MarkedYAMLError(problem=f"the key `{name}` is here twice", problem_mark=key.start_mark)
        seen.add(name)
        lines[f"{prefix}{name}"] = key.start_mark.line + 1
        _collect_lines(value, f"{prefix}{name}.", lines)
