"""Each process of a run imports what it needs, and no more: start-up time and memory, and who may depend on whom."""

from __future__ import annotations

import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.util import find_spec

import grimp
import pytest

from pipelinerl.cli import COMMANDS
from pipelinerl.cli.parser import Commands

pytestmark = pytest.mark.slow
LAUNCHER = (
    "config.load config.keys config.checks config.yaml_text launch.run launch.run_lock launch.checks resources.memory "
    "launch.hosts.processes launch.hosts.host status.view report cli experiments"
)

PROCESSES = {
    "launcher": (
        "cli.project launch.run",
        "actor.actor actor.rollouts channel engine environments.chat preprocess serving trainer weights "
        "launch.tryout launch.resume "
        "launch.hosts.ray resources.gpus resources.placement launch.stages.generation "
        "launch.stages.training "
        "hub.redis report experiments torch",
    ),
    "launcher, before a run": (
        "launch.checks environments.tasks.gcd",
        "environments.chat environments.data environments.user.function environments.user.pool torch",
    ),
    "worker": (
        "launch.hosts.worker",
        f"actor engine environments models preprocess serving trainer weights launch.stages.generation torch {LAUNCHER}",
    ),
    "generation": (
        "launch.hosts.worker launch.stages.generation weights.receiving engine",
        "checkpoint engine.cache_runner environments.chat environments.options models.lora "
        "models.own_forward models.packed preprocess serving hub.redis trainer "
        "weights.broadcast launch.stages.servers launch.stages.training "
        f"launch.stages.preprocessing weights.sending {LAUNCHER}",
    ),
    "generation with engine servers": (
        "launch.hosts.worker launch.stages.generation",
        f"engine checkpoint environments.chat preprocess serving trainer {LAUNCHER}",
    ),
    "preprocessing": (
        "launch.hosts.worker launch.stages.preprocessing",
        f"actor engine environments models serving trainer weights torch {LAUNCHER}",
    ),
    "training": (
        "launch.hosts.worker launch.stages.training weights.sending",
        f"actor engine environments models.lora models.own_forward serving weights.broadcast "
        f"launch.stages.generation trainer.sharding {LAUNCHER}",
    ),
    "server": (
        "launch.hosts.worker launch.stages.servers",
        f"actor environments preprocess trainer launch.stages.generation torch {LAUNCHER}",
    ),
}
"""For each process, the modules that it starts with, and modules and packages that it must not import with them."""


HEAVY = {"torch", "transformers"}
FIND_CLASSES = """
from pipelinerl.environments.registry import BUILT_IN, find_class
for kind in BUILT_IN:
    find_class(kind)
"""


def imported(code: str) -> set[str]:
    """The modules of a new process that runs `code`."""
    code += "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_nothing_that_it_has_no_use_for(process: str) -> None:
    entries, useless = map(str.split, PROCESSES[process])
    found = imported("\n".join(f"import pipelinerl.{entry}" for entry in entries))
    assert {f"pipelinerl.{entry}" for entry in entries} <= found
    for name in useless:
        module = name if name == "torch" else f"pipelinerl.{name}"
        assert find_spec(module), f"there is no {module} any more"
        assert not [one for one in found if one == module or one.startswith(f"{module}.")], f"{process} imports {module}"


@pytest.mark.parametrize("module", sorted({*COMMANDS.values()}))
def test_a_command_is_in_the_module_that_the_table_names(module: str) -> None:
    names = {name for name, of in COMMANDS.items() if of == module}
    code = f"from pipelinerl.cli import main\nassert main(['{min(names)}', '--help']) == 0"
    cli = {name for name in imported(code) if name.startswith("pipelinerl.cli.")}
    assert cli == {f"pipelinerl.cli.{name}" for name in ("parser", module)}
    commands = Commands()
    __import__(f"pipelinerl.cli.{module}", fromlist=["add_to"]).add_to(commands)
    assert {name for name in commands.parsers if " " not in name} == names


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import pipelinerl.preprocess", HEAVY),
        ("from pipelinerl.metrics import summary; from pipelinerl.status import view, watchdog", HEAVY | {"tensorboard"}),
        ("import pipelinerl.report.trackers", HEAVY | {"tensorboard", "wandb", "trackio", "mlflow"}),
        ("import pipelinerl; pipelinerl.start", HEAVY | {"pandas"}),
        ("from pipelinerl.cli import main; main(['config']); main(['train', '--trainer.steps=x'])", HEAVY | {"numpy"}),
        (FIND_CLASSES, HEAVY),
        ("from pipelinerl.files import shared_memory; shared_memory()", {"torch"}),
        ("from pipelinerl.channel import listen; listen().close()", {"torch"}),
        ("import pipelinerl.serving.agents.verifiers", {"verifiers"}),
    ],
)
def test_code_imports_none_of_these(code: str, absent: set[str]) -> None:
    assert not absent & {name.partition(".")[0] for name in imported(code)}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Wherever in a module an import stands, except for type checkers."""
    graph = grimp.build_graph("pipelinerl", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # a CycleError has the circle
