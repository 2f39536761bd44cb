"""Limits where this process, and all that it starts, may write: Landlock, a part of Linux since 5.13.

The restriction can't be undone. Files can still be read everywhere, and the network is not restricted. The system calls are
those of landlock(7). Python's packages for them are unreleased or new, and this needs three calls.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.errors import EnvironmentSetupError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_SET_NO_NEW_PRIVILEGES = 38

_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
"""Remove and make folders, files, links, sockets, pipes and devices."""
_ALWAYS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty")


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """The version of Landlock; 0 if this system has none."""
    return max(0, _call(_CREATE_RULESET, None, 0, _ASK_VERSION))


def write_only_below(folders: Sequence[Path]) -> None:
    """From now on, this process and its future children can write, make and remove files only below `folders`.

    Raises EnvironmentSetupError if a folder does not exist or the system can't do that.
    """
    newest = version()
    if not newest:
        raise EnvironmentSetupError("`writes` needs Linux 5.13 or newer with Landlock; leave it out, or use a container")
    handled = _WRITE_FILE | _CHANGE_FOLDER | (_REFER if newest >= 2 else 0) | (_TRUNCATE if newest >= 3 else 0)
    rules = _checked(_call(_CREATE_RULESET, ctypes.byref(_Ruleset(handled)), ctypes.sizeof(_Ruleset), 0))
    try:
        for folder in folders:
            _allow(rules, folder, handled)
        for device in filter(os.path.exists, _ALWAYS):
            _allow(rules, Path(device), handled & (_WRITE_FILE | _TRUNCATE))
        _checked(ctypes.CDLL(None, use_errno=True).prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(_call(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _allow(rules: int, path: Path, allowed: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise EnvironmentSetupError(f"writes: {path}: {error.strerror}") from error
    try:
        _checked(_call(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(_PathBeneath(allowed, opened)), 0))
    finally:
        os.close(opened)


def _call(number: int, *arguments: object) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    return result


def _checked(result: int) -> int:
    if result < 0:
        raise EnvironmentSetupError(f"`writes` can't be enforced here: {os.strerror(ctypes.get_errno())}")
    return result
