"""Code of an environment that writes where it may not: it gets an error, and every file outside is as it was."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.environments.user.pool import FunctionPool, Limits
from pipelinerl.environments.user.worker import landlock_version
from pipelinerl.errors import EnvironmentSetupError

pytestmark = pytest.mark.skipif(landlock_version() == 0, reason="this system has no Landlock")

WAYS = {
    "write": "open(outside + '/new', 'w').write('x')",
    "append": "open(outside + '/old', 'a').write('x')",
    "overwrite": "open(outside + '/old', 'r+').write('x')",
    "truncate": "os.truncate(outside + '/old', 0)",
    "remove": "os.remove(outside + '/old')",
    "remove a folder": "shutil.rmtree(outside)",
    "make a folder": "os.mkdir(outside + '/folder')",
    "move out": "(open(inside + '/a', 'w').write('x'), os.rename(inside + '/a', outside + '/a'))",
    "move in": "os.rename(outside + '/old', inside + '/old')",
    "link out": "(open(inside + '/b', 'w').write('x'), os.link(inside + '/b', outside + '/b'))",
    "link and write": "(os.symlink(outside + '/old', inside + '/link'), open(inside + '/link', 'w').write('x'))",
    "by a parent": "open(inside + '/../outside/new', 'w').write('x')",
    "a pipe": "os.mkfifo(outside + '/pipe')",
    "a socket": "socket.socket(socket.AF_UNIX).bind(outside + '/socket')",
    "a database": "sqlite3.connect(outside + '/new.db').execute('create table t (x)')",
    "a process": "subprocess.run(['/bin/sh', '-c', 'echo x > ' + outside + '/new'], check=True)",
    "a process of a process": "subprocess.run(['/bin/sh', '-c', 'sh -c \"echo x > ' + outside + '/new\"'], check=True)",
    "open the parent's files": "open('/proc/%d/fd/2' % os.getppid(), 'w').write('x')",
    "the program itself": "open(sys.executable, 'r+b').write(b'x')",
}

FUNCTIONS = """
import os, shutil, socket, sqlite3, subprocess, sys

def act(code, inside, outside):
    eval(code, globals(), {"inside": inside, "outside": outside})
    return "done"
"""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside/old").write_text("as it was")


def call(folder: Path, codes: dict[str, str], writes: list[Path]) -> dict[str, str]:
    """What each code gives: "done", or the error."""

    async def run() -> dict[str, str]:
        limits = Limits(writes=tuple(map(str, writes)), workers=1)
        pool = FunctionPool({"act": f"{folder / 'functions.py'}:act"}, limits)
        try:
            results = {}
            for name, code in codes.items():
                try:
                    results[name] = await pool.call("act", code, str(folder / "inside"), str(folder / "outside"))
                except RuntimeError as error:
                    results[name] = str(error)
            return results
        finally:
            pool.close()

    return asyncio.run(run())


def outside(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "outside").iterdir()}


def test_nothing_outside_is_changed(tmp_path: Path) -> None:
    results = call(tmp_path, WAYS, [tmp_path / "inside"])
    assert [name for name, result in results.items() if result == "done"] == []
    assert outside(tmp_path) == {"old": "as it was"}


def test_what_is_allowed_works(tmp_path: Path) -> None:
    codes = {
        "write": "open(inside + '/new', 'w').write('x')",
        "truncate": "os.truncate(inside + '/new', 0)",
        "folders": "(os.makedirs(inside + '/a/b'), os.rename(inside + '/new', inside + '/a/b/new'))",
        "remove": "shutil.rmtree(inside + '/a')",
        "a process": "subprocess.run(['/bin/sh', '-c', 'echo x > ' + inside + '/new'], check=True)",
        "read": "open(outside + '/old').read()",
        "null": "open('/dev/null', 'w').write('x')",
        "print": "print('x')",
    }
    assert call(tmp_path, codes, [tmp_path / "inside"]) == dict.fromkeys(codes, "done")


def test_without_the_limit_each_way_works(tmp_path: Path) -> None:
    """So each of them fails because of the limit, not by itself."""
    own = ("open the parent's files", "the program itself", "remove a folder", "remove", "move in")
    codes = {name: code for name, code in WAYS.items() if name not in own}
    for name, code in codes.items():
        (tmp_path / "outside/old").write_text("as it was")
        for left in (tmp_path / "outside/new", tmp_path / "inside/link"):
            left.unlink(missing_ok=True)
        program = "import sys; from functions import act; act(*sys.argv[1:])"
        arguments = [code, str(tmp_path / "inside"), str(tmp_path / "outside")]
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (name, done.stderr)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentSetupError, match=r"writes: .*missing: No such file"):
        call(tmp_path, {"write": "1"}, [tmp_path / "missing"])


def test_a_system_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelinerl.environments.user import worker

    monkeypatch.setattr(worker, "landlock_version", lambda: 0)
    with pytest.raises(EnvironmentSetupError, match=r"needs Linux 5\.13"):
        worker.write_only_below([])
