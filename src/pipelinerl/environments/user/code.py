"""Loads user code named by `path/to/file.py:name` or `package.module:name`, and checks what it returns and raises."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import socket
import sys
import zlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from pipelinerl.errors import EnvironmentSetupError, RolloutError

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
TOTAL = "reward"
"""The entry of a returned dict that is the reward. The others are metrics."""
AWAY = (408, 429, 502, 503, 504)
"""Status codes of HTTP servers that may answer later."""
_AWAY = re.compile("Connect|(API|Read|Write|Pool|Server)Timeout")

# ---- importing a Python file by path, or a module by name


def import_module_or_file(name: str) -> ModuleType:
    """Import `path/to/file.py` or `package.module`. Raises EnvironmentSetupError, with the line of the file."""
    return import_file(Path(name)) if name.endswith(".py") or "/" in name else _module(name)


def import_file(path: Path) -> ModuleType:
    """Import a file once per process; its folder is appended to `sys.path`.

    A relative path is relative to the working directory. Raises EnvironmentSetupError.
    """
    path = path.expanduser().resolve()
    # A unique module name: a file must not shadow a real module or another file with the same name.
    name = f"pipelinerl_file_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise EnvironmentSetupError(f"there is no file {path} (a path is relative to the working directory, {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnvironmentSetupError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise EnvironmentSetupError(f"{path} can't be imported: {summarize_error(error, path)}") from error
    return module


def find_user_class(module_name: str, class_name: str, kind: str) -> type:
    """The environment of a module or file that `environment.kind` names. Raises EnvironmentSetupError if it is none."""
    module = import_module_or_file(module_name)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        names = names_in(module, inspect.isclass)
        raise not_defined(module_name, "class", class_name, names, f" (environment.kind {kind})")
    _check_methods(kind, found)
    return found


def _check_methods(kind: str, found: type) -> None:
    for name, wanted in (
        ("problem", "(self, index)"),
        ("held_out", "(self, count)"),
        ("rollout", "(self, problem, client)"),
    ):
        if not callable(getattr(found, name, None)):
            raise EnvironmentSetupError(
                f"environment {kind} has no method `{name}{wanted}`; see `Environment` in interfaces.py"
            )
    if not inspect.iscoroutinefunction(inspect.unwrap(getattr(found, "rollout"))):  # noqa: B009 - `type` has no such attribute
        raise EnvironmentSetupError(f"`rollout` of environment {kind} must be `async def`, and return a Rollout")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise EnvironmentSetupError(f"environment {kind} must define {', '.join(f'`{name}`' for name in missing)}")


def not_defined(module: str, what: str, name: str, names: Sequence[str], where: str = "") -> EnvironmentSetupError:
    """The error for a class or function that `module` does not define; `names` are those that it does."""
    near = get_close_matches(name, names, n=1) or names[:3]
    hint = f"; it has {', '.join(near)}" if near else ""
    return EnvironmentSetupError(f"{module} has no {what} {name!r}{hint}{where}")


def names_in(module: ModuleType, kind: Callable[[object], bool]) -> list[str]:
    """The names of a kind of object, such as classes, that the module itself defines."""
    return [name for name, value in vars(module).items() if kind(value) and value.__module__ == module.__name__]


def summarize_error(error: BaseException, file: Path) -> str:
    """An error from the code of `file` in one line, with the last line of that file in the traceback."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    line = last_line(error, file)
    where = "" if line is None else f"line {line}: "
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


def last_line(error: BaseException, file: Path) -> int | None:
    """The last line of `file` in the traceback of `error`; None if the file is not in it."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == file.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise EnvironmentSetupError(
                f"there is no module {name} (is it installed, or on PYTHONPATH? A file is named by its path, with `.py`)"
            ) from error
        raise EnvironmentSetupError(f"module {name} can't be imported: {error}") from error
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise EnvironmentSetupError(f"module {name} can't be imported: {what}") from error


UserFunction = Callable[..., Any]


def names_a_function(text: str) -> bool:
    """Whether `text` is `file.py:name` or `package.module:name`, as opposed to the name of a field."""
    module, colon, name = text.rpartition(":")
    return bool(colon and name.isidentifier() and (module.endswith(".py") or module.replace(".", "").isidentifier()))


def find_function(spec: str, *, allow_async: bool = False, reward: Signature | None = None) -> UserFunction:
    """The function that `spec` names; as a `reward` of this signature, it is `adapted`. It is imported as by `import_file`.

    Raises EnvironmentSetupError, with the line of the file where known, if there is no such function.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise EnvironmentSetupError(
            f"{spec!r} does not name a function; write path/to/file.py:function or package.module:function"
        )
    module = import_module_or_file(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        if hasattr(module, name):
            raise EnvironmentSetupError(f"{name!r} of {module_name} is a {type(found).__name__}, not a function")
        raise not_defined(module_name, "function", name, names_in(module, inspect.isfunction))
    if inspect.iscoroutinefunction(found) and not allow_async:
        raise EnvironmentSetupError(f"{spec} is `async def`; it must be a plain function, which may block")
    return found if reward is None else adapted(found, spec, reward)


# ---- rewards with the signatures of other trainers, known by their parameter names or by a prefix, as in `trl:file.py:name`

Signature: TypeAlias = Literal["", "trl", "verl"]
CALLED_AS: dict[Signature, str] = {
    "trl": "as TRL calls rewards: (completions=[...], prompts=[...], **fields)",
    "verl": "as verl calls rewards: (data_source, solution_str, ground_truth, extra_info)",
}


def split_signature(spec: str) -> tuple[Signature, str]:
    """The prefix of a reward's name, "" if it has none, and the rest."""
    for signature in CALLED_AS:
        rest = spec.removeprefix(f"{signature}:")
        if rest != spec and ":" in rest:
            return signature, rest
    return "", spec


def adapted(found: UserFunction, spec: str, signature: Signature = "") -> UserFunction:
    """`found`, or if it has the signature of a reward of TRL or verl: a function (completion, example) that calls it.

    The attribute `called_as` of such a function is its signature, which "" leaves to the parameters' names. Raises
    EnvironmentSetupError for a function that takes neither (completion, example) nor the arguments of TRL or verl.
    """
    try:
        taken = inspect.signature(found)
    except (TypeError, ValueError):  # some functions in C have no signature
        return found
    names = list(taken.parameters)
    if names[:2] in (["example", "completion"], ["example", "completions"]):
        raise EnvironmentSetupError(f"{spec} has the parameters ({', '.join(names[:2])}): write them in the other order")
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.parameters.values())
    known_as: Signature = "trl" if "completions" in names and others else "verl" if "solution_str" in names else ""
    signature = signature or known_as
    if not signature:
        if wrong := refusal(taken, spec, "", {}):
            raise EnvironmentSetupError(
                f"{wrong}. It takes ({', '.join(names)}), a reward takes (completion, example). For one of TRL or verl "
                f"write trl:{spec} or verl:{spec} (docs/write_a_task.md)"
            )
        return found
    arguments, read = (_for_trl, _first) if signature == "trl" else (_for_verl, _score)

    def known(completion: str, example: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments(completion, example).items() if others or name in names}

    async def ask(completion: str, example: dict[str, Any]) -> Any:
        return read(await found(**known(completion, example)))

    def call(completion: str, example: dict[str, Any]) -> Any:
        return read(found(**known(completion, example)))

    function = ask if inspect.iscoroutinefunction(found) else call
    function.__dict__["called_as"] = signature
    return function


def described(function: UserFunction) -> tuple[bool, Signature]:
    """Whether the function is `async def`, and as which trainer's it is called."""
    return inspect.iscoroutinefunction(function), getattr(function, "called_as", "")


def refusal(taken: inspect.Signature, spec: str, *arguments: Any) -> str:
    """Why a function of this signature can't be called with these arguments; "" if it can."""
    try:
        taken.bind(*arguments)
    except TypeError as error:
        return f"{spec} can't be called with {len(arguments)} arguments: {error}"
    return ""


def _for_trl(completion: str, example: dict[str, Any]) -> dict[str, Any]:
    """Lists of one: the prompt, the completion (of messages if the prompt is), and every other field."""
    prompt = example.get("prompt")
    answer = [{"role": "assistant", "content": completion}] if isinstance(prompt, list) else completion
    return {"prompts": [prompt], "completions": [answer]} | {name: [it] for name, it in example.items() if name != "prompt"}


def _first(returned: Any) -> Any:
    """The only entry of the list that a reward of TRL returns; None, for "does not apply", is 0."""
    value = plain(returned[0])
    return 0.0 if value is None else value


def _for_verl(completion: str, example: dict[str, Any]) -> dict[str, Any]:
    truth = example.get("reward_model") or {}
    known: dict[str, Any] = {"ground_truth": truth["ground_truth"]} if "ground_truth" in truth else {}
    fields: dict[str, Any] = {name: example[name] for name in ("data_source", "ground_truth") if name in example}
    return {**known, **fields, "solution_str": completion, "extra_info": example.get("extra_info")}


def _score(returned: Any) -> Any:
    """A number, or the numbers of a dict: its `score` is the reward."""
    if not isinstance(returned, dict) or "score" not in returned:
        return returned
    numbers = {name: plain(value) for name, value in returned.items()}
    score = numbers.pop("score")
    return {name: value for name, value in numbers.items() if isinstance(value, bool | int | float)} | {"reward": score}


def describe(error: BaseException, spec: str) -> str:
    """An error from the function `spec` in one line, with its file and the last line of that file in the traceback."""
    file = Path(spec.rpartition(":")[0])
    summary = summarize_error(error, file)
    return f"{file.name}, {summary}" if summary.startswith("line ") else summary


def is_away(error: BaseException | None) -> bool:
    """Whether a call failed because a server can't be reached now, is overloaded, or answered too late for its client.

    Clients wrap such errors in their own, with the cause, the status of the answer, or a telling name.
    """
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        response = getattr(error, "response", error)
        status = next((got for name in ("status_code", "status", "code") if (got := getattr(response, name, None))), None)
        if status in AWAY or _AWAY.search(type(error).__name__):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


async def retried(call: Callable[[], Coroutine[Any, Any, T]], retries: int) -> T:
    """The result of `call`, which is made again, after 1, 4, 16, ... s, if it raises ConnectionError."""
    import asyncio  # noqa: PLC0415

    for number in range(retries):
        try:
            return await call()
        except ConnectionError:
            await asyncio.sleep(4**number)
    return await call()


def plain(value: object) -> object:
    """Scalars of NumPy, torch and similar libraries as floats, also within a dict or list; other values unchanged."""
    if type(value) is dict:
        return {key: plain(entry) for key, entry in value.items()}
    if type(value) is list:
        return [plain(entry) for entry in value]
    if isinstance(value, bool | int | str) or not hasattr(type(value), "__float__"):
        return value
    return float(value)  # type: ignore[arg-type]  # it has `__float__`


def finite_number(value: object, name: str, wanted: str = "a number") -> float:
    """The value that the function `name` returned, as a reward. Raises RolloutError if it isn't a finite number."""
    number = plain(value)
    if not isinstance(number, bool | int | float):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise RolloutError(f"{name} returned {kind}, not {wanted}")
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise RolloutError(not_finite(name, reward))
    return reward


def score_of(value: object, name: str) -> tuple[float, dict[str, float]]:
    """The reward and the metrics that the function `name` returned: a number, a dict of a reward and metrics, or both."""
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], dict) and TOTAL not in value[1]:
        value = {TOTAL: value[0], **value[1]}
    if not isinstance(value, dict):
        return finite_number(value, name, f"a number, a dict of {TOTAL!r} and other numbers, or (reward, dict)"), {}
    if TOTAL not in value:
        raise RolloutError(f"{name} returned a dict without {TOTAL!r}; it has {', '.join(map(str, value)) or 'nothing'}")
    metrics = {str(key): finite_number(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    return metrics.pop(TOTAL), metrics


def not_finite(name: str, value: float) -> str:
    return f"{name} returned {value}, not a finite number"


# ---- calling user code once when an environment is built, so that its errors appear before the first rollout
# The imports are local because the pool's workers, which import this module, need to start fast.


def in_daemon_thread(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a new daemon thread.

    In a thread pool, calls that never return would block other calls and keep the process from exiting.
    """
    from concurrent.futures import Future  # noqa: PLC0415
    from threading import Thread  # noqa: PLC0415

    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a waiter can be cancelled, but not the call

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by `Future.result`
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, also where this thread runs an event loop, as in a notebook: then in another thread.

    There, code that computes for too long is not interrupted. Ctrl-C cancels `work`.
    """
    import asyncio  # noqa: PLC0415

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    begun: list[Callable[[], object]] = []

    async def cancellable() -> T:
        if (task := asyncio.current_task()) is not None:
            begun.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await work

    done = in_daemon_thread(lambda: asyncio.run(cancellable()))
    try:
        return done.result()
    except KeyboardInterrupt:
        for cancel in begun:
            cancel()
        raise


def try_out(trial: Coroutine[Any, Any, T], bound_s: float, what: str) -> T:
    """Run `trial` to its end, even if this thread runs an event loop. Raises EnvironmentSetupError if it fails."""
    import asyncio  # noqa: PLC0415

    try:
        return in_daemon_thread(lambda: asyncio.run(trial)).result(bound_s)
    except EnvironmentSetupError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        reason = str(error) or f"it took longer than {bound_s:g} s"
        raise EnvironmentSetupError(f"tried on {what}, {reason}") from None


RENAMED = {"curriculum": "`difficulty_filter`", "math_words": "`math` with `judge: numbers` in environment.args"}
"""What former names of built-in kinds are called now."""


def unknown_kind(kind: str, built_in: Collection[str]) -> EnvironmentSetupError:
    """The error for a kind that is neither built in nor names a class."""
    close = get_close_matches(kind, built_in, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if kind in RENAMED:
        hint = f" It is now called {RENAMED[kind]}."
    return EnvironmentSetupError(
        f"environment.kind {kind!r} is unknown.{hint} It is one of {', '.join(built_in)}, `path/to/file.py:ClassName` "
        "or `package.module:ClassName`"
    )
