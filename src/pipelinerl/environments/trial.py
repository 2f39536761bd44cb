"""Calling code that is not ours once, when an environment is built, so that its mistakes are known before a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pipelinerl.environments.threads import in_daemon_thread
from pipelinerl.errors import EnvironmentSetupError


def try_out(trial: Coroutine[Any, Any, object], bound_s: float, what: str) -> None:
    """Run it now, whether or not a loop runs in this thread. Raises EnvironmentSetupError with what goes wrong."""
    try:
        in_daemon_thread(lambda: asyncio.run(trial)).result(bound_s)
    except EnvironmentSetupError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code that isn't ours: whatever it raises is said
        reason = str(error) or f"it took longer than {bound_s:g} s"
        raise EnvironmentSetupError(f"tried on {what}, {reason}") from None
