"""A run file and dotted command-line flags, made into a `RunConfig`; each mistake is one line that names its place.

Relative paths. Some values of a run file may name something on disk: `model.path` (a folder), and the file part of
`environment.kind` (`tasks/my.py:MyTask`), `trainer.loss` and others. If it exists relative to the run file's folder, or else
relative to the working directory, it becomes an absolute path, so that the resolved configuration means the same from
anywhere. In flags only the working directory counts. Nothing else is touched: not `run_dir`, and no value in
`environment.args`.

`extends: base.yaml`, relative to the run file, takes the keys that the run file does not set from another one. A file that
sets `environment.kind` takes nothing of `environment.args`. `${NAME}` stands for an environment variable (see `yaml_text`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelinerl.config import yaml_text
from pipelinerl.config.keys import EXTENDS, Key, explain, in_words, run_keys, run_sections, settable, show, unknown_key
from pipelinerl.config.schema import PACKAGED_MODELS, RunConfig
from pipelinerl.errors import ConfigError

DEMO_SOURCE = "the built-in demo.yaml"
FOLDERS = ("model.path", "trainer.teacher")
FUNCTIONS = ("environment.kind", "metrics.callback", "preprocess.advantage", "trainer.loss")
PATHS = (*FOLDERS, *FUNCTIONS, "trainer.warm_start.data")
"""Keys whose value may name something on disk."""
MOST_SHOWN = 10


def load_config(path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """The configuration of a run file with settings on top.

    overrides   flags as on the command line (`["--trainer.steps", "20", "--metrics.plot=false"]`), or values by dotted key
                (`{"trainer.steps": 20, "environment.args": {"data": "x.jsonl"}}`)

    Without a path it is the demo's run file, which is part of the package. What neither sets keeps its default. Raises
    ConfigError for wrong keys and values, or if there are none, for combinations. It has a line for each, at most 10.
    """
    if path is None:
        text = (resources.files("pipelinerl") / "assets" / "demo.yaml").read_text(encoding="utf-8")
        draft = _RunFile.of_text(text, DEMO_SOURCE)
        draft.make_absolute([Path.cwd()])
    else:
        draft = _RunFile.of_file(Path(path))
    draft.override(overrides)
    return draft.checked()


def config_of_file(path: Path) -> RunConfig:
    """The configuration in a run's `config.yaml`. Raises ConfigError, also if the file can't be read."""
    return config_from_yaml(_read(path), str(path))


def config_from_yaml(text: str, source: str = "config.yaml") -> RunConfig:
    """The configuration that `config_to_yaml` or `render` wrote, or any text of a run file.

    Keys, types and ranges are checked, combinations are not, and paths stay as they are. Raises ConfigError.
    """
    return _RunFile.of_text(text, source).config()


def config_to_yaml(config: RunConfig, *, only_given: bool = False) -> str:
    """Every key and its value, or only the keys that were set. `config_from_yaml` reads back an equal configuration."""
    return yaml_text.dump(config.model_dump(mode="json", exclude_unset=only_given))


def config_of_values(values: Mapping[str, Any], base: RunConfig | None = None) -> RunConfig:
    """`base`, or the defaults, with values by key on top (as `overrides` of `load_config`). Raises ConfigError."""
    draft = _RunFile({} if base is None else base.model_dump(exclude_unset=True), "RunConfig")
    draft.override(values)
    return draft.checked()


def with_flags(config: RunConfig, flags: Sequence[str], keys: Collection[str]) -> RunConfig:
    """A copy of `config` with flags on top, for commands that use only the given keys of a run file.

    Raises ConfigError, also for a flag of another key. Combinations are not checked.
    """
    draft = _RunFile(config.model_dump(), "RunConfig")
    draft.override(flags, keys)
    return draft.config()


def validate(config: RunConfig) -> RunConfig:
    """Check a configuration built in Python the way a run file is checked, and return it. Raises ConfigError."""
    return _RunFile(config.model_dump(warnings=False, exclude_unset=True), "RunConfig").checked()


class _RunFile:
    """The values of a run file, and where each comes from: `origins` has the start of every message about a key."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        # A section with all its keys commented out is null, and that is fine.
        self.values = {name: value for name, value in values.items() if value is not None or name not in run_sections()}
        self.source = source
        self.origins: dict[str, str] = {}

    @classmethod
    def of_text(cls, text: str, source: str) -> _RunFile:
        values, lines = yaml_text.parse(text, source, variables=True, is_text=_takes_only_text)
        if not isinstance(values, dict | None):
            raise ConfigError(f"{source}: a run file is a mapping of keys to values, this is {show(values)}")
        draft = cls(values or {}, source)
        draft.origins = {key: f"{source}:{line}: {key}" for key, line in lines.items()}
        return draft

    @classmethod
    def of_file(cls, path: Path, extending: Sequence[Path] = ()) -> _RunFile:
        """With the keys of the files that it extends. `extending`: the files that extend this one."""
        draft = cls.of_text(_read(path), str(path))
        draft.make_absolute([path.parent, Path.cwd()])
        base, chain = draft.values.pop(EXTENDS, None), [*extending, path]
        if base is None:
            return draft
        here = draft.origin(EXTENDS)
        if not isinstance(base, str):
            raise ConfigError(f"{here}: must be the path of a run file, not {show(base)}")
        other = path.parent / os.path.expanduser(base)
        if any(other.resolve() == one.resolve() for one in chain):
            raise ConfigError(f"{here}: {' extends '.join(map(str, [*chain, other]))}: take one of them out")
        if not other.is_file():
            raise ConfigError(f"{here}: there is no file {other}")
        under = cls.of_file(other, chain)
        if draft.get("environment.kind") is not None and isinstance(environment := under.get("environment"), dict):
            under.values["environment"] = {name: value for name, value in environment.items() if name != "args"}
        draft.values, draft.origins = merged(under.values, draft.values), under.origins | draft.origins
        return draft

    def make_absolute(self, folders: Sequence[Path]) -> None:
        for key in PATHS:
            if (before := self.get(key)) is not None:
                self.set(key, _absolute(key, before, folders), self.origin(key))

    def override(self, overrides: Sequence[str] | Mapping[str, Any], keys: Collection[str] | None = None) -> None:
        """Put flags, of `keys` only, or values by dotted key on top."""
        if isinstance(overrides, str):  # a sequence of its letters, to Python
            raise ConfigError(
                f"overrides: {show(overrides)} is one text; give a list of words, or a dict of values by dotted key"
            )
        if not isinstance(overrides, Mapping):
            given = [(f"--{key}", key, value) for key, value in _values_of_flags(overrides, keys)]
        else:
            given = []
            for key, value in overrides.items():
                inner = value if key in run_sections() and isinstance(value, Mapping) else None
                values = {str(key): value} if inner is None else {f"{key}.{name}": of for name, of in inner.items()}
                given += [(f"overrides: {name}", name, of) for name, of in values.items()]
        for origin, key, value in given:
            if settable(key) is None and key not in run_sections():
                raise ConfigError(f"{origin}: {unknown_key(key)}")
            self.set(key, _absolute(key, value, [Path.cwd()]), origin)

    def set(self, key: str, value: Any, origin: str) -> None:
        """Keys inside a mapping (`environment.args.x`) change that key alone. No dict is changed, as YAML may share them."""
        *outer, name = key.split(".")
        target = self.values
        for part in outer:
            before = target.get(part)
            if part in run_sections() and target is self.values and not isinstance(before, dict | None):
                return  # not a mapping in the file, which is an error
            target[part] = target = dict(before) if isinstance(before, dict) else {}
        target[name] = value
        self.origins[key] = origin

    def get(self, key: str) -> Any:
        value: Any = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def origin(self, place: str, key: Key | None = None) -> str:
        """Where `place` comes from, or if nobody knows, the innermost mapping in `key` that it is in."""
        while key and place not in self.origins and place != str(key):
            place = place.rpartition(".")[0]
        return self.origins.get(place, f"{self.source}: {place}")

    def config(self) -> RunConfig:
        try:
            return RunConfig.model_validate(self.values)
        except ValidationError as error:
            found = [explain(each, self.get) for each in error.errors(include_url=False)]
            raise _refusal(f"{self.origin(each.place, each.key)}: {each.text}" for each in found) from error

    def checked(self) -> RunConfig:
        from pipelinerl.config.checks import mistakes  # noqa: PLC0415 - the processes of a run read what was checked

        config = self.config()
        found: dict[str, str] = {}
        for mistake in mistakes(config):
            key, _, text = mistake.partition(": ")
            found.setdefault(key, text)  # what else is wrong with a key may go with its first mistake
        if found:
            raise _refusal(f"{self.origins.get(key, key)}: {text}" for key, text in found.items())
        return config


def merged(base: Any, over: Any) -> Any:
    """`over` where it says something. Mappings are merged key by key, everything else is replaced."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {name: merged(base[name], value) if name in base else value for name, value in over.items()}


def _refusal(found: Iterable[str]) -> ConfigError:
    """The error for mistakes. It is the mistake itself if there is one."""
    lines = list(dict.fromkeys(found))  # a key that takes several types has a mistake for each
    if len(lines) == 1:
        return ConfigError(lines[0])
    more = [f"... and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return ConfigError("\n  ".join([f"{len(lines)} mistakes:", *lines[:MOST_SHOWN], *more]))


def _values_of_flags(arguments: Sequence[str], keys: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    """Keys and values of `--key value`, `--key=value` and `--switch`; `keys`: the only ones that may be set."""
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        name = flag.removeprefix("--")
        if name == flag or not name:
            raise ConfigError(f"{flag!r} is neither a flag nor the value of one; flags are `--section.key value`")
        if name in run_sections():
            example = next(key for key in keys or run_keys() if key.startswith(f"{name}."))
            raise ConfigError(f"{flag}: this is a section; set one of its keys, as in `--{example} VALUE`")
        key = settable(name)
        if key is None:
            raise ConfigError(f"{flag}: {unknown_key(name, '--', keys=keys)}")
        if keys is not None and str(key) not in keys:
            same = next((used for used in keys if used.rpartition(".")[2] == key.name), None)
            hint = f"did you mean `--{same}`?" if same else f"its keys are {', '.join(keys)}"
            raise ConfigError(f"{flag}: not used by this command; {hint}")
        if not equals and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), "="
        if equals:
            # `--run_dir 2024` and `--model.path ~` are text, whatever YAML makes of them.
            plain = _takes_only_text(name) and not ("null" in key.types and text == "null")
            yield name, text if plain else yaml_text.parse(text, flag).value
        elif "boolean" in key.types:
            yield name, True
        else:
            raise ConfigError(f"{flag}: needs a value: {in_words(key.schema)}")


def _takes_only_text(place: str) -> bool:
    key = settable(place)
    return key is not None and str(key) == place and key.types <= {"string", "null"}


def _read(path: Path) -> str:
    if path.suffix == ".toml":
        raise ConfigError(f"{path}: a run file is YAML; [trainer] with steps = 20 is `trainer: {{steps: 20}}` there")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a run file; `pipelinerl train --resume {path}` continues a run")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"can't read the run file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: a run file is UTF-8 text; byte {error.start} is not") from error


def _absolute(key: str, value: Any, folders: Sequence[Path]) -> Any:
    """`value` with an absolute path if it names something that exists relative to one of `folders`."""
    if key not in PATHS or not isinstance(value, str) or not value:
        return value
    if key in FUNCTIONS:
        file, _, name = value.rpartition(":")
        return f"{_first(file, folders, os.path.isfile) or file}:{name}" if ".py:" in value else value
    if key in FOLDERS:
        return value if value in PACKAGED_MODELS else _first(value, folders, os.path.isdir) or value
    return _first(value, folders, os.path.isfile) or value


def _first(path: str, folders: Sequence[Path], is_there: Callable[[str], bool]) -> str | None:
    # os.path, not pathlib: its questions answer False, and raise nothing, for text that can't be a path.
    places = (os.path.abspath(folder / os.path.expanduser(path)) for folder in folders)
    return next((place for place in places if is_there(place)), None)
