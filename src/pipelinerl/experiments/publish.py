"""A run for others: its model for the Hugging Face Hub, with a model card, and `pipelinerl lab export`, all of its records.

The export is one tar file that can be replayed, browsed and evaluated anywhere:

    NAME/config.yaml, sessions.jsonl        without secrets and paths
    NAME/summary.json                       without paths
    NAME/metrics.jsonl, rollouts/, ...      as they are
    NAME/checkpoints/, weights/             without `--no-weights`
    NAME/model/                             the initial model, if it is a folder on this machine

Everything else stays out of it: logs, streams, links, and the control files, which have the session's keys.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.checkpoint import OPTIMIZER_FILE, STATE_FILE, load_checkpoint
from pipelinerl.config import yaml_text
from pipelinerl.config.schema import PACKAGED_MODELS, RunConfig
from pipelinerl.config.secrets import without_paths, without_secrets
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments.evaluate.models import Target, find_targets
from pipelinerl.metrics.reading import read_lines
from pipelinerl.metrics.records import SessionRecord
from pipelinerl.report import writing_to
from pipelinerl.report.series import read_config, read_summary
from pipelinerl.report.terminal import summary_sections
from pipelinerl.run_directory import RunDirectory

CURVES = "curves.png"


@contextmanager
def prepared(run_dir: Path, repo: str, version: str | float | None = None) -> Iterator[Path]:
    """A temporary folder with what is uploaded to `repo`. Raises UserError, and CheckpointError for a damaged checkpoint."""
    from pipelinerl.models.folder import can_be_an_id  # noqa: PLC0415 - takes a second

    if repo.count("/") > 1 or not can_be_an_id(repo):
        raise UserError(f"{repo!r} can't be the id of a model on the hub; give owner/name")
    (target,) = find_targets([str(run_dir) if version is None else f"{run_dir}@{version}"])
    source = Path(target.model.path)
    load_checkpoint(source)  # verifies every file
    with tempfile.TemporaryDirectory(prefix="pipelinerl-push-") as name:
        folder, of_a_resume = Path(name), shutil.ignore_patterns(STATE_FILE, OPTIMIZER_FILE)
        shutil.copytree(source, folder, copy_function=_link, ignore=of_a_resume, dirs_exist_ok=True)
        if (run_dir / CURVES).is_file():
            shutil.copyfile(run_dir / CURVES, folder / CURVES)
        (folder / "README.md").write_text(model_card(run_dir, repo, target), encoding="utf-8")
        yield folder


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Upload the folder to the hub; returns its address. Raises UserError if the hub refuses it."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - takes a second

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a model"))
    except Exception as error:  # the hub and its HTTP library raise many types
        reason = " ".join(str(error).split())
        raise UserError(f"the hub did not take {repo}: {reason} (log in with `hf auth login`, or set HF_TOKEN)") from error


def model_card(run_dir: Path, repo: str, target: Target) -> str:
    """The README of the repository, as Markdown."""
    config = read_config(run_dir)
    summary = read_summary(run_dir) or {}
    shown = without_paths(without_secrets(config)) | {"run_dir": None}
    base, task = config.model.path, without_paths(config.environment.kind)
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "pipelinerl"],
        **({"base_model": base} if base.count("/") == 1 and not os.path.isabs(base) else {}),
    }
    figure = f"![curves of the run]({CURVES})\n" if (run_dir / CURVES).is_file() else ""
    return f"""---
{yaml_text.dump(front)}---

# {repo.rpartition("/")[2]}

{without_paths(base)}, trained by reinforcement learning with [pipelinerl](https://arxiv.org/abs/2509.19128) (in-flight
weight updates) on the environment `{task}`. These are the weights after {target.version} optimizer steps.

{_table(summary)}
{figure}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{repo}")
```

## How it was made

{_provenance(run_dir)}
With the run file below: `pipelinerl train run.yaml`

```yaml
{yaml_text.dump(shown).rstrip()}
```
"""


def _table(summary: Mapping[str, Any]) -> str:
    rows = [(name.strip(), value) for section in summary_sections(summary)[:3] for name, value in section] if summary else []
    lines = [f"| {name} | {value.replace('|', ' ')} |" for name, value in (*rows, ("the run", str(summary.get("status"))))]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _provenance(run_dir: Path) -> str:
    path = RunDirectory(run_dir).sessions
    if not path.exists() or not (sessions := read_lines(path, SessionRecord)):
        return ""
    machine = sessions[-1].machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return f"On {machine.processor} ({machine.instructions}), in {len(sessions)} session(s), with {packages}.\n"


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where there can be none: a model may be large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# ---- a run as one tar file

RECORDS = ("metrics.jsonl", "evaluations.jsonl", "published.jsonl", "curves.png", "timeline-*.jsonl")
MODEL = "model"


def export_run(run_dir: Path, out: Path, *, weights: bool = True) -> list[Path]:
    """Write the export to the new file `out`, under a temporary name that is then changed. Returns links that are left out.

    Raises UserError if `out` exists, RunDirectoryError if a file can't be read or written.
    """
    if out.exists():
        raise UserError(f"{out} already exists; choose another file")
    run, config = RunDirectory(run_dir), read_config(run_dir)
    name, links = run.root.resolve().name, []
    hidden = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    with writing_to(out):
        try:
            with tarfile.open(hidden, "w") as tar:
                for member, source in _members(run, config, weights=weights):
                    if isinstance(source, Path) and source.is_symlink():
                        links.append(source)
                    else:
                        _add(tar, f"{name}/{member}", source)
            os.rename(hidden, out)
        finally:
            hidden.unlink(missing_ok=True)
    return links


def _add(tar: tarfile.TarFile, name: str, source: Path | bytes) -> None:
    """Add a file without an owner. Raises RunDirectoryError if it can't be read."""
    entry = tarfile.TarInfo(name)
    entry.mode, entry.mtime = 0o644, int(time.time())
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    except OSError as error:
        raise RunDirectoryError(f"can't read {name}: {error.strerror} (is the run in progress?)") from error
    with file:
        entry.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        tar.addfile(entry, file)


def _members(run: RunDirectory, config: RunConfig, *, weights: bool) -> Iterator[tuple[str, Path | bytes]]:
    """The files of the export, by their name there: contents that are made portable, and paths."""
    path = Path(config.model.path).expanduser()
    model = path if path.is_dir() and config.model.path not in PACKAGED_MODELS else None

    def portable(found: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = without_paths(found) | {"run_dir": None}
        return shown | ({"model": shown["model"] | {"path": MODEL}} if model else {})

    yield "config.yaml", yaml_text.dump(portable(without_secrets(config))).encode()
    if run.sessions.exists():
        sessions = [{**one, "config": portable(one["config"])} for one in read_lines(run.sessions, dict[str, Any])]
        yield run.sessions.name, b"".join(msgspec.json.encode(session) + b"\n" for session in sessions)
    if (summary := read_summary(run.root)) is not None:
        yield run.summary.name, msgspec.json.encode(without_paths(summary))
    for pattern in RECORDS:
        yield from ((path.name, path) for path in sorted(run.root.glob(pattern)))
    folders = {name: run.root / name for name in ("rollouts", *(("checkpoints", "weights") if weights else ()))}
    for name, folder in (folders | ({MODEL: model} if model else {})).items():
        if folder.is_symlink() and name != MODEL:
            yield name, folder
            continue
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if (path.is_file() or path.is_symlink()) and not any(part.startswith(".") for part in parts):
                yield "/".join((name, *parts)), path
