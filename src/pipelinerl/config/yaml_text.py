"""The dialect of YAML that run files are written in: YAML 1.2's plain values, unique keys, environment variables, and lines
for messages.

PyYAML follows YAML 1.1, where `1e-6` is text, `no` is false, `010` is eight and `12:30` is 750. Here a plain value is
null, true/false, a whole number or a number exactly as in YAML 1.2 (and JSON), and text otherwise.

In a text `${NAME}` stands for an environment variable, `${NAME:-TEXT}` for TEXT if the variable is not set, or empty, and
`$${NAME}` for `${NAME}`. A value that is one reference has the type that the variable's text would have in the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import yaml

from pipelinerl.config.secrets import with_texts
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
"""In a run file, each counted as often as aliases name it: with aliases of aliases, a few lines can stand for billions."""
LONGEST_NUMBER = 1000
REFERENCE = re.compile(r"(\$?)\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


class _Loader(yaml.SafeLoader):
    """Plain values as in YAML 1.2."""

    def whole_number(self, node: yaml.ScalarNode) -> int:
        base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
        if len(node.value) > LONGEST_NUMBER:
            raise ValueError(f"line {node.start_mark.line + 1}: a number of {len(node.value)} characters")
        return int(node.value if base == 10 else node.value[2:], base)


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


class YamlText(NamedTuple):
    """A parsed text: its value, and the line (from 1) of every key and item of a list, by dotted place."""

    value: Any
    lines: dict[str, int]


def parse(text: str, source: str, *, variables: bool = False, is_text: Callable[[str], bool] = lambda _: False) -> YamlText:
    """Parse one YAML document. Raises ConfigError, one line with `source` and the line number, if it is not valid.

    `variables`: references to environment variables are replaced. `is_text`: whether the value at a place is always text.
    """
    try:
        loader = _Loader(text)
        try:
            visit = _Visit(source, is_text if variables and "${" in text else None)
            node = loader.get_single_node()
            node = None if node is None else visit.node(node, "")
            return YamlText(None if node is None else loader.construct_document(node), visit.lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        where = f"{source}:{mark.line + 1}" if (mark := error.problem_mark or error.context_mark) else source
        hint = ' (inside { } and [ ], quote a variable: "${NAME}")' if mark and "${" in str(mark.get_snippet()) else ""
        hint = " (YAML is indented with spaces)" if "'\\t'" in (error.problem or "") else hint
        problem = error.problem or error.context
        problem = f"{error.context}, {problem}" if str(problem).startswith("but ") else problem
        raise ConfigError(f"{where}: not valid YAML: {problem}{hint}") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{source}: not valid YAML: character {error.position}: {error.reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: not usable as YAML: nested too deeply, or a value contains itself") from error
    except ValueError as error:
        raise ConfigError(f"{source}: not usable as YAML: {error}") from error


def dump(value: Any) -> str:
    """YAML text of plain values: mappings as blocks in their own order, lists and long texts on one line.

    `parse` reads the same values, also with `variables`.
    """
    escaped = with_texts(partial(REFERENCE.sub, r"$\g<0>"), value)  # `$${NAME}` for `${NAME}`, as a run file has to have it
    text: str = yaml.dump(
        escaped, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=float("inf")
    )
    return text


class _Visit:
    """Collects the line of every key and of every item of a list, and with `is_text` replaces references to variables."""

    def __init__(self, source: str, is_text: Callable[[str], bool] | None) -> None:
        self.lines: dict[str, int] = {}
        self._source = source
        self._is_text = is_text
        self._resolved: dict[int, yaml.Node] = {}  # aliases lead to them again

    def node(self, node: yaml.Node, place: str) -> yaml.Node:
        """The node to construct in place of this one.

        Raises MarkedYAMLError for a key that is in a mapping twice, ConfigError for a variable that is not set, and
        ValueError for more than MOST_VALUES.
        """
        if len(self.lines) > MOST_VALUES:
            raise ValueError(f"aliases (`*name`) make it more than {MOST_VALUES} values")
        prefix = f"{place}." if place else ""
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.lines[f"{prefix}{number}"] = item.start_mark.line + 1
                node.value[number] = self.node(item, f"{prefix}{number}")
        elif isinstance(node, yaml.MappingNode):
            seen = set()
            for number, (key, value) in enumerate(node.value):
                name = key.value if isinstance(key, yaml.ScalarNode) else None
                if name is not None and name in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key `{name}` is here twice", problem_mark=key.start_mark)
                seen.add(name)
                self.lines[f"{prefix}{name}"] = key.start_mark.line + 1
                node.value[number] = (key, self.node(value, f"{prefix}{name}"))
        elif isinstance(node, yaml.ScalarNode) and self._is_text is not None and id(node) not in self._resolved:
            node = self.resolved(node, f"{self._source}:{node.start_mark.line + 1}: {place}", self._is_text(place))
            self._resolved[id(node)] = node
        return node

    def resolved(self, node: yaml.ScalarNode, origin: str, is_text: bool) -> yaml.Node:
        """The same, or a node with the values of variables."""

        def replacement(reference: re.Match[str]) -> str:
            escape, name, default = reference.groups()
            if escape:
                return reference[0].removeprefix("$")
            if default is not None:
                return os.environ.get(name) or str(default)
            if name not in os.environ:
                raise ConfigError(
                    f"{origin}: the environment variable {name} is not set; set it, or write $${{{name}}} if the text "
                    f"${{{name}}} is meant"
                )
            return os.environ[name]

        if not REFERENCE.search(node.value):
            return node
        text, whole = REFERENCE.sub(replacement, node.value), REFERENCE.fullmatch(node.value)
        if is_text or not whole or whole[1]:
            return yaml.ScalarNode(_TAG + "str", text, node.start_mark, node.end_mark, style='"')
        try:
            return yaml.compose(text, _Loader) or yaml.ScalarNode(_TAG + "null", "")
        except yaml.YAMLError as error:
            raise ConfigError(f"{origin}: {text!r}, the value of a variable, is not valid YAML") from error
