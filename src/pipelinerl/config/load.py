"""A run file and dotted command-line flags, made into a `RunConfig`; every mistake is one line that names its place.

Relative paths. Two values of a run file may name something on disk: `model.path` (a folder) and the file part of
`environment.kind` (`tasks/my.py:MyTask`). If it exists relative to the run file's folder, or else relative to the working
directory, it becomes an absolute path, so that the resolved configuration means the same from anywhere. In flags only the
working directory counts. Nothing else is touched: not `run_dir`, and no value in `environment.args`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config import yaml_text
from pipelinerl.config.checks import check
from pipelinerl.config.fields import Field, run_fields, run_sections, show
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError

SYNONYMS = {
    "lr": "trainer.learning_rate",
    "lr_scheduler": "trainer.lr_schedule",
    "lr_scheduler_type": "trainer.lr_schedule",
    "num_warmup_steps": "trainer.warmup_steps",
    "warmup_ratio": "trainer.warmup_steps",
    "beta": "trainer.kl_coefficient",
    "kl_coef": "trainer.kl_coefficient",
    "kl_loss_coef": "trainer.kl_coefficient",
    "epochs": "trainer.steps",
    "num_epochs": "trainer.steps",
    "num_train_epochs": "trainer.steps",
    "total_epochs": "trainer.steps",
    "max_steps": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "train_batch_size": "trainer.batch_size",
    "rollout_batch_size": "trainer.batch_size",
    "per_device_train_batch_size": "trainer.batch_size",
    "clip_ratio": "trainer.clip_high",
    "clip_ratio_low": "trainer.clip_low",
    "clip_ratio_high": "trainer.clip_high",
    "epsilon": "trainer.clip_low",
    "epsilon_high": "trainer.clip_high",
    "loss_type": "trainer.loss",
    "loss_agg_mode": "trainer.loss_normalization",
    "max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "save_steps": "trainer.checkpoint_every",
    "save_freq": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "n": "actor.group_size",
    "num_generations": "actor.group_size",
    "rollouts_per_example": "actor.group_size",
    "max_completion_length": "actor.max_tokens",
    "max_completion_tokens": "actor.max_tokens",
    "max_new_tokens": "actor.max_tokens",
    "max_response_length": "actor.max_tokens",
    "response_length": "actor.max_tokens",
    "max_model_len": "engine.max_length",
    "max_prompt_length": "engine.max_length",
    "max_seq_len": "engine.max_length",
    "max_seq_length": "engine.max_length",
    "max_num_seqs": "engine.slots",
    "model": "model.path",
    "model_id": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "peft_config": "model.lora",
    "max_staleness": "schedule.max_lag",
    "max_async_level": "schedule.max_lag",
    "max_off_policy_steps": "schedule.max_lag",
    "scale_rewards": "preprocess.normalize_std",
    "mask_truncated_completions": "preprocess.overlong",
    "eval_steps": "evaluation.every",
    "test_freq": "evaluation.every",
    "report_to": "metrics.tensorboard",
    "output_dir": "run_dir",
    "reward_funcs": "environment.args",
    "dataset": "environment.args",
    "train_dataset": "environment.args",
}
"""What other libraries (TRL, verl, prime-rl, transformers, vLLM) call a setting -> the key of the run file."""

DEMO_SOURCE = "the built-in demo.yaml"
MOVED = {"trainer.clamp": "`{prefix}correction.token_high` (with `correction.token: truncate`, the default of reinforce)"}
"""Keys of earlier versions and where to set the same thing now."""


@dataclass(frozen=True)
class Setting:
    """One value someone set, and where: `origin` starts every message about it."""

    key: str
    value: Any
    origin: str


def load_config(path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """The configuration of a run file with settings on top.

    overrides   flags as on the command line (`["--trainer.steps", "20", "--metrics.plot=false"]`), or values by dotted key
                (`{"trainer.steps": 20, "environment.args": {"data": "x.jsonl"}}`)

    Without a path it is the demo's run file, which is part of the package. What neither sets keeps its default. Raises
    ConfigError, in one line, for everything that is not right, combinations included.
    """
    if path is None:
        text, source = (resources.files("pipelinerl") / "assets" / "demo.yaml").read_text(encoding="utf-8"), DEMO_SOURCE
        folders = [Path.cwd()]
    else:
        path = Path(path)
        text, source = _read(path), str(path)
        folders = [path.parent, Path.cwd()]
    settings = {setting.key: _with_absolute_path(setting, folders) for setting in _settings_of_text(text, source)}
    for setting in _settings_on_top(overrides):
        _override(settings, _with_absolute_path(setting, [Path.cwd()]))
    config = _build(settings)
    check(config)
    return config


def config_from_yaml(text: str, source: str = "config.yaml") -> RunConfig:
    """The configuration that `document.config_to_yaml` or `render` wrote, or any text of a run file.

    Keys, types and ranges are checked, combinations are not, and paths stay as they are. Raises ConfigError.
    """
    return _build({setting.key: setting for setting in _settings_of_text(text, source)})


def validate(config: RunConfig) -> RunConfig:
    """Check a configuration built in Python the way a run file is checked, and return it. Raises ConfigError."""
    checked = _build({setting.key: setting for setting in _settings_of_mapping(_as_mapping(config), "RunConfig", {})})
    check(checked)
    return checked


def _as_mapping(value: Any) -> Any:
    if not isinstance(value, msgspec.Struct):
        return value
    return {name: _as_mapping(inner) for name, inner in msgspec.structs.asdict(value).items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"can't read the run file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: a run file is UTF-8 text; byte {error.start} is not") from error


def _settings_of_text(text: str, source: str) -> Iterator[Setting]:
    parsed = yaml_text.parse(text, source)
    if parsed.value is None:
        return
    if not isinstance(parsed.value, dict):
        raise ConfigError(f"{source}: a run file is a mapping of keys to values, this is {show(parsed.value)}")
    yield from _settings_of_mapping(parsed.value, source, parsed.lines)


def _settings_of_mapping(values: dict[Any, Any], source: str, lines: dict[str, int]) -> Iterator[Setting]:
    def setting(key: str, value: Any) -> Setting:
        place = f"{source}:{lines[key]}" if key in lines else source
        return Setting(key, value, f"{place}: {key}")

    for name, value in values.items():
        if str(name) in run_fields() and "." in str(name):
            section, _, key = str(name).partition(".")
            raise ConfigError(
                f"{setting(str(name), value).origin}: in a run file this is `{key}` below `{section}:`, indented"
            )
        if name not in run_sections():
            yield setting(str(name), value)
        elif isinstance(value, dict):
            for inner, inner_value in value.items():
                yield setting(f"{name}.{inner}", inner_value)
        elif value is not None:  # a section with all its keys commented out is null, and that is fine
            example = next(field for field in run_fields().values() if field.section == name)
            hint = f", as in `{name}: {{{example.name}: {show(value)}}}`" if isinstance(value, str) else ""
            raise ConfigError(f"{setting(name, None).origin}: this is a section; its keys go below it, indented{hint}")


def _settings_on_top(overrides: Sequence[str] | Mapping[str, Any]) -> Iterator[Setting]:
    if isinstance(overrides, str):  # a sequence of its letters, to Python
        raise ConfigError(
            f"overrides: {show(overrides)} is one text; give a list of words, or a dict of values by dotted key"
        )
    if not isinstance(overrides, Mapping):
        yield from _settings_of_flags(overrides)
        return
    for key, value in overrides.items():
        if key in run_sections() and isinstance(value, Mapping):
            yield from (Setting(f"{key}.{name}", inner, f"overrides: {key}.{name}") for name, inner in value.items())
        else:
            yield Setting(str(key), value, f"overrides: {key}")


def _settings_of_flags(arguments: Sequence[str]) -> Iterator[Setting]:
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        key = flag.removeprefix("--")
        if key == flag or not key:
            raise ConfigError(f"{flag!r} is neither a flag nor the value of one; flags are `--section.key value`")
        if key in run_sections():
            example = next(field for field in run_fields().values() if field.section == key)
            raise ConfigError(f"{flag}: this is a section; set one of its keys, as in `--{example.key} VALUE`")
        field = _field(key, flag, "--")
        if not equals and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), "="
        if equals:
            yield Setting(key, _value_of_flag(field, key, text, flag), flag)
        elif field.is_switch:
            yield Setting(key, True, flag)
        else:
            raise ConfigError(f"{flag}: needs a value: {_field(key, flag).allowed}")


def _value_of_flag(field: Field, key: str, text: str, flag: str) -> Any:
    if field.key == key and field.is_text and not (field.is_nullable and text == "null"):
        return text  # `--run_dir 2024` and `--model.path ~` are text, whatever YAML makes of them
    return yaml_text.parse(text, flag).value


def _override(settings: dict[str, Setting], setting: Setting) -> None:
    """Put a flag over what the run file says. Keys inside a mapping (`environment.args.x`) change that key alone."""
    field = _field(setting.key, setting.origin)
    inner = setting.key[len(field.key) + 1 :].split(".") if setting.key != field.key else []
    value = setting.value
    if inner:
        before = settings.get(field.key)
        value = deepcopy(before.value) if before and isinstance(before.value, dict) else {}
        target = value
        for name in inner[:-1]:
            if not isinstance(target.get(name), dict):
                target[name] = {}
            target = target[name]
        target[inner[-1]] = setting.value
    settings[field.key] = replace(setting, key=field.key, value=value)


def _build(settings: dict[str, Setting]) -> RunConfig:
    values: dict[str, Any] = {}
    for setting in settings.values():
        field = _field(setting.key, setting.origin)
        if field.key != setting.key:
            raise ConfigError(f"{setting.origin}: write `{field.key}` as a mapping")
        try:
            value = field.convert(setting.value)
        except ValueError as error:
            raise ConfigError(f"{setting.origin}: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"{setting.origin}: nested too deeply, or a value that contains itself") from error
        target = values.setdefault(field.section, {}) if field.section else values
        target[field.name] = value
    return msgspec.convert(values, RunConfig)


def _field(key: str, origin: str, prefix: str = "") -> Field:
    """The field of a key; keys inside a mapping field belong to that field. Raises ConfigError for an unknown key."""
    fields = run_fields()
    if key in fields:
        return fields[key]
    if key in MOVED:
        raise ConfigError(f"{origin}: unknown key; it is now {MOVED[key].format(prefix=prefix)}")
    parents = [field for field in fields.values() if field.is_mapping and key.startswith(field.key + ".")]
    if parents and all(key.split(".")):
        return parents[0]
    closest = closest_key(key, sections=not prefix)
    hint = f"did you mean `{prefix}{closest}`?" if closest else "`pipelinerl config` prints all keys"
    raise ConfigError(f"{origin}: unknown key; {hint}")


def closest_key(key: str, *, sections: bool = False) -> str | None:
    """The existing key that someone who wrote `key` most likely meant, if there is one; with `sections`, or section."""
    keys = list(run_fields())
    name = key.rpartition(".")[2].replace("-", "_")
    if sections and "." not in key and (near := difflib.get_close_matches(name, run_sections(), n=1, cutoff=0.75)):
        return near[0]
    if name in SYNONYMS and SYNONYMS[name] in keys:
        return SYNONYMS[name]
    misplaced = [known for known in keys if known.rpartition(".")[2] == name]
    if misplaced:
        return max(misplaced, key=lambda known: difflib.SequenceMatcher(None, key, known).ratio())
    near = difflib.get_close_matches(key.replace("-", "_"), keys, n=1, cutoff=0.6)
    if near:
        return near[0]
    by_name = {known.rpartition(".")[2]: known for known in keys}
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)
    return by_name[near[0]] if near else None


def _with_absolute_path(setting: Setting, folders: Sequence[Path]) -> Setting:
    value = setting.value
    if not isinstance(value, str):
        return setting
    if setting.key == "model.path" and value != "demo":
        found = _first(value, folders, os.path.isdir)
        return setting if found is None else replace(setting, value=found)
    if setting.key == "environment.kind" and ".py:" in value:
        file, _, name = value.rpartition(":")
        found = _first(file, folders, os.path.isfile)
        return setting if found is None else replace(setting, value=f"{found}:{name}")
    return setting


def _first(path: str, folders: Sequence[Path], is_there: Callable[[str], bool]) -> str | None:
    # os.path, not pathlib: its questions answer False, and raise nothing, for text that can't be a path.
    places = (os.path.abspath(folder / os.path.expanduser(path)) for folder in folders)
    return next((place for place in places if is_there(place)), None)
