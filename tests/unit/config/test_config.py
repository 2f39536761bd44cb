"""The run file: loading, flags, messages, combinations, and printing it back."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl.config.checks import NEEDS, Need, mistakes
from pipelinerl.config.correction import clip_range, resolve
from pipelinerl.config.keys import Key, render, run_keys, run_sections
from pipelinerl.config.load import config_from_yaml, config_to_yaml, load_config, merged, validate, with_flags
from pipelinerl.config.schema import ActorConfig, CorrectionConfig, EnvironmentConfig, RunConfig, TrainerConfig
from pipelinerl.errors import ConfigError

ROOT = Path(__file__).parents[3]
RECORDED = sorted(
    [*ROOT.glob("benchmarks/results/**/config.yaml"), *ROOT.glob("examples/*.yaml"), *ROOT.glob("src/**/*.yaml")]
)


def load(tmp_path: Path, text: str, *flags: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, flags)


def message_of(tmp_path: Path, text: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *flags)
    message = str(caught.value).replace(str(tmp_path), "FOLDER")
    assert "\n" not in message
    return message


# --- files -----------------------------------------------------------------------------------------------------------


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == RunConfig()
    assert load(tmp_path, "# only\ntrainer:\n  # comments\n") == RunConfig()


def test_plain_values_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    text = "{a: no, b: 12:30, c: 2024-01-01, d: 1E5, e: '1e5', f: null, g: 0x1f, h: 0o17, i: True, j: -3, k: 010, l: .1}"
    assert load(tmp_path, f"environment:\n  args: {text}").environment.args == {
        **{"a": "no", "b": "12:30", "c": "2024-01-01", "d": 1e5, "e": "1e5", "f": None},
        **{"g": 31, "h": 15, "i": True, "j": -3, "k": 10, "l": 0.1},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  stepz: 3", "run.yaml:2: trainer.stepz: unknown key; did you mean `trainer.steps`?"),
        ("actor: {slots: 3}", "run.yaml:1: actor.slots: unknown key; did you mean `engine.slots`?"),
        ("trainr: {steps: 3}", "run.yaml:1: trainr: unknown key; did you mean `trainer`?"),
        ("model: demo", "model: this is a section; its keys go below it, indented, as in `model: {path: 'demo'}`"),
        ("qqq: 1", "run.yaml:1: qqq: unknown key; `pipelinerl config` prints all keys"),
        ("trainer: {clamp: 5}", "trainer.clamp: unknown key; it is now `correction.token_high`"),
        ("trainer.steps: 3", "run.yaml:1: trainer.steps: in a run file this is `steps` below `trainer:`"),
        ("trainer:\n  steps: many", "run.yaml:2: trainer.steps: 'many' is not allowed here; this takes a whole number >= 1"),
        ("actor: {top_p: 1.5}", "actor.top_p: 1.5 is not allowed here; this takes a number > 0 and <= 1"),
        ("correction: {token_high: .inf}", "correction.token_high: inf is not a finite number"),
        ("trainer: {betas: [0.9]}", "trainer.betas: [0.9] is not allowed here; this takes a list of 2: a number >= 0"),
        ("schedule: {kind: sync}", "'sync' is not allowed here; this takes one of pipeline, conventional, async"),
        ("environment: {args: [1]}", "environment.args: [1] is not allowed here; this takes a mapping"),
        ("environment: {args: {a: {5: 1}}}", "run.yaml:1: environment.args.a: the key 5 is not text; put it in quotes"),
        ("environment: {args.a: 1}", "environment.args.a: write `environment.args` as a mapping"),
        ("- 1", "run.yaml: a run file is a mapping of keys to values"),
        ("trainer:\n\tsteps: 3", "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token ("),
        ("seed: 1\nmodel:\nseed: 2", "run.yaml:3: not valid YAML: the key `seed` is here twice"),
        ("a: \x01", "run.yaml: not valid YAML: character 3"),
        ("trainer: {steps: ${STEPS}}", '(inside { } and [ ], quote a variable: "${NAME}")'),
    ],
)
def test_mistakes_in_a_file_are_one_line_with_place_and_fix(tmp_path: Path, text: str, message: str) -> None:
    assert message in message_of(tmp_path, text)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read the run file .*absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="is a folder, not a run file; `pipelinerl train --resume"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: {path: caf\xe9}")
    with pytest.raises(ConfigError, match="UTF-8 text; byte 17 is not"):
        load_config(tmp_path / "latin.yaml")


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = "engine: &d {device: cpu, threads: 2}\ntrainer:\n  <<: *d\n  steps: 7\n"
    config = load(tmp_path, text)
    assert (config.trainer.threads, config.trainer.steps) == (2, 7)


# --- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--seed", "3"], "seed", 3),
        (["--run_dir", "2024"], "run_dir", "2024"),
        (["--run_dir", "null"], "run_dir", None),
        (["--model.path", "a: b"], "model.path", "a: b"),
        (["--metrics.plot", "false"], "metrics.plot", False),
        (["--metrics.plot"], "metrics.plot", True),
        (["--engine.max_length", "null"], "engine.max_length", None),
        (["--trainer.betas", "[0.8, 0.9]"], "trainer.betas", (0.8, 0.9)),
        (["--environment.args", "{a: 1}"], "environment.args", {"a": 1}),
    ],
)
def test_values_of_flags(tmp_path: Path, flags: list[str], key: str, value: Any) -> None:
    config = load(tmp_path, "engine: {max_length: 300}\nseed: 9", "--seed", "2", *flags)
    section, _, name = key.rpartition(".")
    assert getattr(getattr(config, section) if section else config, name) == value


def test_flags_reach_into_the_environment_arguments(tmp_path: Path) -> None:
    text = "environment:\n  args: {path: a.jsonl, nested: {x: 1, y: 2}}"
    flags = ["--environment.args.path", "b.jsonl", "--environment.args.nested.y=3", "--environment.args.new.deep", "[1]"]
    assert load(tmp_path, text, *flags).environment.args == {
        "path": "b.jsonl",
        "nested": {"x": 1, "y": 3},
        "new": {"deep": [1]},
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.stepz", "3"], "--trainer.stepz: unknown key; did you mean `--trainer.steps`?"),
        (["--trainer.clamp", "5"], "it is now `--correction.token_high`"),
        (["--run-dir", "x"], "did you mean `--run_dir`?"),
        (["--trainer", "3"], "--trainer: this is a section; set one of its keys, as in `--trainer.steps VALUE`"),
        (["--trainer.steps"], "--trainer.steps: needs a value: a whole number >= 1"),
        (["--trainer.steps="], "--trainer.steps: null is not allowed here"),
        (["--trainer.betas", "[0.9"], "--trainer.betas:1: not valid YAML"),
        (["--environment.args.x", ".inf"], "--environment.args.x: inf is not a finite number"),
        (["--environment.args..x", "1"], "--environment.args..x: unknown key"),
        (["steps", "3"], "'steps' is neither a flag nor the value of one"),
    ],
)
def test_mistakes_in_flags_name_the_flag(tmp_path: Path, flags: list[str], message: str) -> None:
    assert message in message_of(tmp_path, "", *flags)


def test_the_page_for_users_of_other_libraries_names_keys_that_exist() -> None:
    page = (ROOT / "docs/coming_from.md").read_text()
    assert {*re.findall(rf"`((?:{'|'.join(run_sections())})\.\w+)", page)} <= run_keys().keys()


def test_a_path_may_be_text_and_overrides_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {steps: 3}\nenvironment: {args: {a: 1, b: 2}}\n")
    assert load_config(str(path)) == load_config(path)
    values = {"trainer.steps": 20, "environment.args.a": [5], "actor": {"group_size": 4}, "metrics.plot": False}
    config = load_config(str(path), values)
    assert (config.trainer.steps, config.actor.group_size, config.metrics.plot) == (20, 4, False)
    assert config.environment.args == {"a": [5], "b": 2}
    with pytest.raises(ConfigError, match=r"overrides: trainer\.stepz: unknown key; did you mean `trainer.steps`"):
        load_config(path, {"trainer.stepz": 1})
    with pytest.raises(ConfigError, match=r"overrides: trainer\.steps: 'x' is not allowed here"):
        load_config(path, {"trainer": {"steps": "x"}})
    with pytest.raises(ConfigError, match="give a list of words"):
        load_config(path, "--trainer.steps 3")


# --- paths -----------------------------------------------------------------------------------------------------------


def test_paths_are_found_beside_the_run_file_then_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "common", here / "only_here", there / "common", there / "demo", there / "demo-tools"):
        folder.mkdir(parents=True)
    (there / "task.py").touch()
    (here / "task.py").touch()
    monkeypatch.chdir(here)

    def paths(text: str, *flags: str) -> tuple[str, str]:
        config = load(there, text, *flags)
        return config.model.path, config.environment.kind

    both = "model: {path: common}\nenvironment: {kind: 'task.py:Mine'}"
    assert paths(both) == (str(there / "common"), f"{there}/task.py:Mine")
    assert paths("", "--model.path", "common", "--environment.kind=task.py:Mine") == (
        str(here / "common"),
        f"{here}/task.py:Mine",
    )
    assert paths("model: {path: only_here}")[0] == str(here / "only_here")
    assert paths("model: {path: owner/name}\nenvironment: {kind: 'my.module:Mine'}") == ("owner/name", "my.module:Mine")
    for name in ("demo", "demo-tools"):
        assert paths(f"model: {{path: {name}}}")[0] == name, "the name of a packaged model is never a folder"
    assert paths("model: {path: ./demo}")[0] == str(there / "demo")
    assert paths("environment: {kind: 'absent.py:Mine'}")[1] == "absent.py:Mine"
    assert load(there, "run_dir: common\nenvironment: {args: {path: common}}").environment.args == {"path": "common"}
    assert load(there, "run_dir: common").run_dir == "common"
    assert paths('model: {path: "a\\0b"}')[0] == "a\0b"


def other_value(schema: dict[str, Any], name: str = "") -> Any:
    """A value that is not the default of a key with this JSON schema."""
    named = {"url": "redis://h", "urls": ["http://a:1"], "place": {"training": "m"}, "sets": {"hard": {"a": 1}}}
    named |= {"warm_start": {"data": "a.jsonl"}}
    match next((option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"), {}):
        case _ if name in named:
            value: Any = named[name]
        case {"enum": values} | {"examples": values}:
            value = next(value for value in reversed(values) if value not in (schema.get("default"), "cuda:N"))
        case {"prefixItems": items}:
            value = [other_value(item) for item in items]
        case {"items": item}:
            value = [other_value(item)]
        case {"type": "object", **rest}:
            value = {} if "properties" in rest else {"a": [None, 1e-6, "no: #", "é\n"]}
        case {"type": "number", **bounds}:
            value = bounds.get("exclusiveMinimum", bounds.get("minimum", 0)) + 0.3
        case {"type": kind, **rest}:
            value = {"boolean": not schema.get("default"), "integer": 5, "string": rest.get("const", "${A} # b")}[kind]
    return value


def with_value(key: Key, value: Any) -> dict[str, Any]:
    return {key.section: {key.name: value}} if key.section else {key.name: value}


def test_what_is_printed_loads_back_equal() -> None:
    """Every key, with its default and with another value."""
    others: dict[str, Any] = {}
    for key in run_keys().values():
        value = with_value(key, other_value(key.schema, key.name))
        assert RunConfig.model_validate(value) != RunConfig(), key
        others = merged(others, value)
    for config in (RunConfig(), RunConfig.model_validate(others)):
        assert config_from_yaml(config_to_yaml(config)) == config_from_yaml(render(config)) == config


# --- combinations ----------------------------------------------------------------------------------------------------

TAUGHT = "preprocess: {zero_advantage: keep}\ntrainer: {kl_coefficient: 1, "
ROUNDS = "schedule: {kind: conventional, steps_per_round: 4}\n"
VLLM = "engine: {kind: vllm, python: p, vllm_args: "


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("actor: {top_p: 0.9}", "actor.top_p", "set it to 1"),
        ("actor: {top_k: 50}", "actor.top_k", "set it to 0"),
        (ROUNDS + "trainer: {batch_size: 5}", "trainer.batch_size", "multiple of 8"),
        ("schedule: {max_lag: 0}\ntrainer: {batch_size: 12}", "trainer.batch_size", "multiple of 8"),
        ("stream: {kind: memory}", "stream.kind", "set it to files, or launch.kind to embedded"),
        ("stream: {kind: redis, url: 'redis://h'}\nlaunch: {kind: embedded}", "stream.kind", "set it to files"),
        ("stream: {kind: redis, url: 'h:6379'}", "stream.url", "redis://HOST"),
        ("stream: {kind: redis}", "stream.kind", "Set stream.url"),
        ("stream: {capacity: 7}", "stream.capacity", "set it to 8 or more"),
        (ROUNDS + "stream: {capacity: 31}", "stream.capacity", "set it to 32 or more"),
        ("actor: {group_size: 1}\npreprocess: {advantage: leave_one_out}", "leave_one_out", "set it to 2 or more"),
        ("engine: {max_length: 256}", "actor.max_tokens", "set actor.max_tokens below 256, or engine.max_length above 256"),
        ("actor: {online_filter: {}}\nengine: {processes: 2}", "actor.online_filter", "set engine.processes to 1"),
        ("actor: {online_filter: {}}\nstream: {when_full: drop_oldest}", "actor.online_filter", "when_full to block"),
        (ROUNDS + "trainer: {ess_threshold: 0.5}", "trainer.ess_threshold", "set it to 0"),
        ("trainer: {kl_coefficient: 0.1}", "preprocess.zero_advantage", "set it to keep"),
        ("correction: {drift: 1e-3}", "preprocess.zero_advantage", "set it to keep"),
        ("trainer: {kl_estimator: k1}", "trainer.kl_estimator", "set it above 0"),
        ("trainer: {teacher: demo}", "trainer.teacher", "set trainer.kl_coefficient above 0"),
        (TAUGHT + "teacher: 'http://a:1'}\nactor: {temperature: 0.7}", "trainer.teacher", "set actor.temperature to 1"),
        (TAUGHT + "teacher: demo, teacher_key_env: KEY}", "trainer.teacher_key_env", "set it to null"),
        (TAUGHT + "teacher: 'http://a:1/v1'}", "trainer.teacher", "without a path"),
        (TAUGHT + "teacher: 'http://me:secret@a:1'}", "trainer.teacher", "teacher_key_env"),
        (TAUGHT + "teacher: ''}", "trainer.teacher", "set it to null"),
        (TAUGHT.replace("keep", "drop, advantage: none") + "}", "preprocess.zero_advantage", "set it to keep"),
        ("trainer: {loss: 'a.py:b', clip_low: 0.1}", "trainer.clip_low", "remove it"),
        ("preprocess: {advantage: none}", "preprocess.advantage", "set trainer.kl_coefficient above 0"),
        ("preprocess: {advantage: 'a.py:b', normalize_std: true}", "preprocess.normalize_std", "set it to false"),
        ("trainer: {loss: 'a.py:b'}\ncorrection: {token: truncate}", "correction.token", "set it to a mask"),
        ("trainer: {compile: true, gradient_checkpointing: true}", "trainer.compile", "set it to false"),
        ("evaluation: {every: 10}", "evaluation.every", "set evaluation.problems"),
        ("evaluation: {sets: {hard: {}}}", "evaluation.sets", "evaluation.problems says how many"),
        ("evaluation: {problems: 4, sets: {a/b: {}}}", "evaluation.sets", "use letters, digits, - and _"),
        ("engine: {kind: http, api_key_env: KEY}", "engine.api_key_env", "set engine.urls"),
        ("engine: {kind: http, weights_dir: /srv}", "engine.weights_dir", "set engine.urls"),
        ("engine: {kind: http, tls_key: k.pem}\nlaunch: {kind: ray}", "engine.tls_key", "set both, or none"),
        (
            "engine: {kind: http, urls: ['http://a:1'], weights_dir: /srv}\nweights: {kind: collective}",
            "engine.weights_dir",
            "remove one of the two",
        ),
        ("engine: {kind: http, urls: ['http://a:1'], servers: 2}", "engine.servers", "set it to 1"),
        ("engine: {kind: http, urls: ['http://a:1/v1']}", "engine.urls", "http://HOST:PORT"),
        ("engine: {kind: http, urls: ['http://a:1', 'http://a:1/']}", "engine.urls", "name each once"),
        ("engine: {kind: vllm}", "engine.python", "set engine.urls to servers that run already"),
        ("engine: {kind: vllm, python: p, kv_on_update: recompute}", "engine.kv_on_update", "set it to keep"),
        ("engine: {kind: vllm, python: p}\nmodel: {head_dtype: float32}", "model.head_dtype", "to null"),
        ("engine: {kind: vllm, urls: ['http://a:1'], vllm_args: [--seed=1]}", "engine.vllm_args", "set engine.urls to []"),
        (VLLM + "[--max_model_len, '9']}", "engine.vllm_args", "--max-model-len itself; remove it, and set engine.max"),
        (VLLM + "[--seed=1, --no-enable-prefix-caching]}", "engine.vllm_args", "sets --enable-prefix-caching itself"),
        (VLLM + "[--weight-transfer-config.backend=nccl]}", "engine.vllm_args", "sets --weight-transfer-config itself"),
        (VLLM + "[-tp, '2']}\nweights: {kind: collective}", "weights.kind", "asks for 2; set it to shared"),
        ("launch: {kind: ray}\nweights: {kind: shared}", "weights.kind", "set it to collective"),
        ("weights: {encoding: delta}", "weights.encoding", "weights.kind to collective"),
        ("weights: {encoding: adapter}", "weights.encoding", "with model.lora and the `local` engine"),
        ("weights: {encoding: adapter}\nmodel: {lora: {}}\nengine: {kind: http}", "weights.encoding", "set it to full"),
        ("launch: {kind: ray}\nengine: {device: 'cuda:1'}", "engine.device", "write cuda"),
        ("trainer: {loss: ppo}\ncorrection: {token: truncate}", "correction.token", "set it to a mask"),
        ("trainer: {loss: gspo}\ncorrection: {sequence: geo_truncate}", "correction.sequence", "set it to a mask"),
        ("correction: {token: truncate, sequence: truncate}", "correction.sequence", "remove one of the two"),
        ("correction: {token: none, token_high: 5}", "correction.token_high", "remove it"),
        ("correction: {sequence_low: 0.5}", "correction.sequence_low", "remove it"),
        ("correction: {token: band, token_low: 1.2}", "correction.token", "token_low below 1"),
        ("correction: {sequence: geo_mask, sequence_high: 0.95}", "correction.sequence", "sequence_high above 1"),
    ],
)
def test_combinations_that_make_no_sense_name_key_and_fix(tmp_path: Path, text: str, key: str, fix: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = next(line for line in str(caught.value).splitlines() if key in line.split(";")[0])
    assert fix in message
    assert message.strip().startswith(f"{path}:") == (key.rpartition(".")[2] in text), "a default has no line"


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.key} {need.other}")
def test_a_key_without_an_effect_is_refused(need: Need) -> None:
    key, other = run_keys()[need.key], run_keys()[need.other]
    unmet = next(value for value in other.schema["enum"] if value not in need.values)
    settings = merged(with_value(key, other_value(key.schema, key.name)), with_value(other, unmet))
    (found, *_) = [one for one in mistakes(RunConfig.model_validate(settings)) if one.startswith(f"{key}: {need.why}")]
    assert found.endswith(f"or {other} to {' or '.join(need.values)}")


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {batch_size: 12}",
        "schedule: {max_lag: 0}",
        ROUNDS + "trainer: {batch_size: 6}\nstream: {capacity: 24}",
        "stream: {capacity: 8, when_full: drop_oldest}",
        "stream: {kind: memory}\nlaunch: {kind: embedded}",
        "engine: {max_length: 257}",
        VLLM + "[--tensor-parallel-size=1, --gpu-memory-utilization=0.5]}\nweights: {kind: collective}",
        "schedule: {kind: conventional}\ntrainer: {ess_threshold: 0.5}",
        "trainer: {kl_coefficient: 0.1}\npreprocess: {zero_advantage: drop}",
        "engine: {kind: http, servers: 2}\nlaunch: {preprocessor: process}",
        "engine: {kind: http, urls: ['https://a:1', 'http://b:2/'], api_key_env: KEY}",
        "weights: {kind: collective, encoding: delta}",
        "weights: {encoding: adapter}\nmodel: {lora: {}}",
    ],
)
def test_combinations_that_make_sense_pass(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


def test_all_mistakes_are_shown_at_once(tmp_path: Path) -> None:
    def lines(text: str, *flags: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, text, *flags)
        return str(caught.value).replace(str(tmp_path), "").splitlines()

    combinations = "actor: {top_p: 0.5, top_k: 3}\n"
    keys = "trainer:\n  steps: many\n  clip_low: [0, 1]\n  stepz: 3\n"
    assert lines(combinations + keys, "--model.dtype", "int3") == [
        "4 mistakes:",
        "  --model.dtype: 'int3' is not allowed here; this takes one of float32, bfloat16",
        "  /run.yaml:3: trainer.steps: 'many' is not allowed here; this takes a whole number >= 1",
        "  /run.yaml:4: trainer.clip_low: [0, 1] is not allowed here; this takes a number >= 0 or null",
        "  /run.yaml:5: trainer.stepz: unknown key; did you mean `trainer.steps`?",
    ]
    assert [line.partition(": ")[0] for line in lines(combinations)] == ["2 mistakes:", "  /run.yaml:1", "  /run.yaml:1"]
    many = lines("trainer:\n" + "".join(f"  x{number}: 0\n" for number in range(13)))
    assert (many[0], len(many), many[-1]) == ("13 mistakes:", 12, "  ... and 3 more")


def test_configurations_built_in_python_are_checked_the_same(tmp_path: Path) -> None:
    good = RunConfig(trainer=TrainerConfig(learning_rate=1e-4))
    assert validate(good) == good
    with pytest.raises(ConfigError, match=r"actor\.top_p: 0\.5 truncates"):
        validate(RunConfig(actor=ActorConfig(top_p=0.5)))
    for changes, message in (
        ({"trainer": good.trainer.model_copy(update={"steps": 0})}, "trainer.steps: 0 is not allowed"),
        ({"run_dir": tmp_path}, "run_dir: .*Path.* is not allowed"),
        ({"trainer": 3}, "trainer: this is a section"),
        ({"environment": good.environment.model_copy(update={"args": {"x": [object()]}})}, "type object can't be written"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(good.model_copy(update=changes))


# --- printing --------------------------------------------------------------------------------------------------------


def test_written_values_mean_the_same_to_other_yaml_readers() -> None:
    texts = ["1e-6", "no", "0o7", "1:30", "~", "null", "2024-01-01", "a: b", "# x", "- y", " ", "'", '"', "é\n\u2028z", ""]
    values = {"list": [*texts, None, True, -3, 1e-6, 0.1, 1e300, [], {}], "map": {text: [text] for text in texts}}
    written = config_to_yaml(RunConfig(environment=EnvironmentConfig(args=values)))
    assert yaml.safe_load(written)["environment"]["args"] == values


def test_the_printed_run_file_documents_every_key() -> None:
    text = render(RunConfig(trainer=TrainerConfig(steps=7)))
    lines = [line.strip() for line in text.splitlines()]
    for field in run_keys().values():
        assert field.description, f"{field} has no description"
        assert " ".join(line.removeprefix("# ") for line in lines).count(field.description.split(". ")[0]) >= 1
        assert any(line.startswith(f"{field.name}:") for line in lines)
    at = lines.index("steps: 7")
    assert lines[at - 2 : at] == ["# Optimizer steps to take.", "# Takes a whole number >= 1. Default: 100"]


def test_flags_of_some_keys_only() -> None:
    before = RunConfig(environment=EnvironmentConfig(args={"a": 1}))
    keys = ("engine.slots", "environment.args", "evaluation.temperature")
    after = with_flags(before, ["--engine.slots", "3", "--environment.args.b=x"], keys)
    assert (after.engine.slots, after.environment.args) == (3, {"a": 1, "b": "x"})
    assert before.environment.args == {"a": 1}
    for flags, message in (
        (["--slots", "3"], "--slots: unknown key; did you mean `--engine.slots`"),
        (["--actor.temperature", "3"], "--actor.temperature: not used by this command; did you mean `--evaluation.temper"),
        (["--trainer.steps", "3"], "--trainer.steps: not used by this command; its keys are engine.slots, environment.args"),
    ):
        with pytest.raises(ConfigError) as caught:
            with_flags(before, flags, keys)
        assert message in str(caught.value)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: str(path.relative_to(ROOT)))
def test_recorded_run_files_load(path: Path) -> None:
    config_from_yaml(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize(
    ("loss", "given", "thresholds", "clip"),
    [
        ("reinforce", {}, (0.0, 5.0, 0.0, math.inf), None),
        ("decoupled", {}, (0.0, 5.0, 0.0, math.inf), (0.2, 0.2)),
        ("ppo", {}, (0.0, math.inf, 0.0, math.inf), (0.2, 0.2)),
        ("gspo", {}, (0.0, math.inf, 0.0, math.inf), (3e-4, 4e-4)),
        ("reinforce", {"token": "band"}, (0.5, 5.0, 0.0, math.inf), None),
        ("reinforce", {"token": "band", "token_low": 0.8}, (0.8, 5.0, 0.0, math.inf), None),
        ("reinforce", {"token": "tv"}, (0.2, 0.2, 0.0, math.inf), None),
        ("reinforce", {"sequence": "geo_mask"}, (0.0, 5.0, 0.9, 1.1), None),
        # One weight for the whole sequence: nothing is left to truncate by token.
        ("reinforce", {"sequence": "truncate"}, (0.0, math.inf, 0.0, 5.0), None),
        ("reinforce", {"sequence": "geo_truncate"}, (0.0, math.inf, 0.0, 2.0), None),
    ],
)
def test_thresholds_left_out_are_those_of_the_loss_and_their_kind(
    loss: Any, given: Any, thresholds: tuple[float, ...], clip: tuple[float, float] | None
) -> None:
    found = resolve(TrainerConfig(loss=loss), CorrectionConfig(**given))
    assert (found.token_low, found.token_high, found.sequence_low, found.sequence_high) == thresholds
    if clip is not None:
        assert clip_range(TrainerConfig(loss=loss)) == clip
        assert clip_range(TrainerConfig(loss=loss, clip_high=0.7)) == (clip[0], 0.7)


# ------------------------------------------------------------------------------------------------ files that extend others


def written(folder: Path, **files: str) -> Path:
    """`a="..."` writes `a.yaml`. Returns the first file."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def test_what_a_run_file_names_is_found_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "teacher").mkdir(parents=True)
    (tmp_path / "own" / "code.py").touch()
    (tmp_path / "own" / "data.jsonl").touch()
    run = (
        "preprocess: {advantage: 'code.py:mine', zero_advantage: keep}\n"
        "trainer: {loss: 'code.py:mine', teacher: teacher, kl_coefficient: 1, warm_start: {data: data.jsonl}}\n"
    )
    path = written(tmp_path / "own", run=run)
    monkeypatch.chdir(tmp_path)
    config = load_config(path, ["--metrics.callback", "package.module:note"])
    own, trainer = f"{tmp_path}/own", config.trainer
    assert (config.preprocess.advantage, trainer.loss) == (f"{own}/code.py:mine", f"{own}/code.py:mine")
    assert trainer.warm_start is not None
    assert (trainer.teacher, trainer.warm_start.data) == (f"{own}/teacher", f"{own}/data.jsonl")
    assert config.metrics.callback == "package.module:note"
    assert load_config(path, ["--trainer.teacher", "demo"]).trainer.teacher == "demo"


def test_a_run_file_extends_another(tmp_path: Path) -> None:
    (tmp_path / "shared" / "weights").mkdir(parents=True)
    written(
        tmp_path / "shared",
        base="extends: first.yaml\nmodel: {path: weights}\nenvironment: {args: {low: 2, high: 9}}\n",
        first="seed: 3\ntrainer: {steps: 7, batch_size: 16}\nenvironment: {kind: gcd}\nactor: {group_size: 4}\n",
    )
    path = written(
        tmp_path / "own", run="extends: ../shared/base.yaml\ntrainer: {steps: 9}\nenvironment: {args: {high: 30}}\nactor:\n"
    )
    config = load_config(path, ["--seed", "4"])
    assert (config.seed, config.trainer.steps, config.trainer.batch_size, config.actor.group_size) == (4, 9, 16, 4)
    assert config.environment.args == {"low": 2, "high": 30}
    assert config.model.path == str(tmp_path / "shared" / "weights"), "relative to the file that sets it"
    path.write_text("extends: ../shared/base.yaml\nenvironment: {kind: sum}\n")
    assert load_config(path).environment.args == {}, "they are those of another kind"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "seed: 1\nextends: b.yaml\n"}, "a.yaml:2: extends: there is no file {}/b.yaml"),
        ({"a": "extends: [b.yaml]\n"}, "a.yaml:1: extends: must be the path of a run file"),
        (
            {"a": "extends: b.yaml\n", "b": "extends: a.yaml\n"},
            "b.yaml:1: extends: {0}/a.yaml extends {0}/b.yaml extends {0}/a.yaml: take one of them out",
        ),
        ({"a": "extends: b.yaml\n", "b": "trainer: {steps: x}\n"}, "b.yaml:1: trainer.steps: "),
        ({"a": "extends: b.yaml\n", "b": "trainr: {steps: 1}\n"}, "b.yaml:1: trainr: unknown key"),
    ],
)
def test_a_mistake_names_the_file_that_has_it(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, **files))
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message.format(tmp_path))
