"""Of which types `environment.args` must be: a struct says it, and mistakes are told in the run file's words."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pipelinerl.errors import EnvironmentSetupError

Types = TypeVar("Types", bound=msgspec.Struct)


def checked(types: type[Types], **arguments: object) -> Types:
    """The arguments as `types` has them. Raises EnvironmentSetupError that names the first of another type or range."""
    try:
        return msgspec.convert(arguments, types)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise EnvironmentSetupError(f"environment.args.{where.rstrip('`')}: {what[:1].lower()}{what[1:]}") from error
