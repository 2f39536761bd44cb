"""Names a function or class of the user by its file, `path/to/file.py:name`, so that other processes can import it.

What was defined in a notebook has no file: its source is written to one, with the imports, constants, functions and classes
that it uses.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import symtable
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType

from pipelinerl.errors import UserError
from pipelinerl.files import write_atomically

Named = FunctionType | type
_ADVICE = "put it into a file, and give `path/to/file.py:name`"


def name_by_file(found: object, folder: Path) -> str:
    """`path/to/file.py:name` or `package.module:name` of a function or class. Raises UserError if that can't be.

    If it has no file, its source is written to `folder/NAME.py`.
    """
    name = getattr(found, "__qualname__", "<lambda>")
    if not isinstance(found, FunctionType | type) or name == "<lambda>":
        raise UserError(f"{found!r} has no name by which other processes can import it; write a function with `def`")
    if "." in name:
        raise UserError(f"{name} is defined inside a function or class; define it at the top of a file or cell")
    module = sys.modules.get(found.__module__)
    dotted = getattr(getattr(module, "__spec__", None), "name", "")
    if file := getattr(module, "__file__", None):
        path, paths = Path(file).resolve(), sysconfig.get_paths()
        places = [paths["purelib"], paths["platlib"], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        installed = "." in dotted and any(place and path.is_relative_to(Path(place).resolve()) for place in places)
        return f"{dotted}:{name}" if installed else f"{path}:{name}"
    imports, parts = dict[str, str](), dict[str, str]()
    _write(found, imports, parts)
    text = "\n\n".join(["from __future__ import annotations", "\n".join(imports.values()), *filter(None, parts.values())])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    write_atomically(path, f"{text}\n".encode())
    return f"{path.resolve()}:{name}"


def _write(found: Named, imports: dict[str, str], parts: dict[str, str]) -> None:
    """Add the source of a function or class to `parts`, after all that it uses. Both are by name."""
    parts[found.__name__] = ""  # begun
    node = _source_of(found)
    known = vars(sys.modules[found.__module__])
    for name in sorted(_globals_of(node) & known.keys() - parts.keys()):
        value = known[name]
        if isinstance(value, ModuleType):
            imports[name] = f"import {value.__name__} as {name}"
        elif isinstance(value, FunctionType | type) and value.__module__ == found.__module__:
            if name not in parts:
                _write(value, imports, parts)
        elif getattr(value, "__module__", None) and getattr(value, "__qualname__", None):
            imports[name] = f"from {value.__module__} import {value.__qualname__} as {name}"
        else:
            text = repr(value)
            with suppress(ValueError, SyntaxError):
                if ast.literal_eval(text) == value:
                    parts[name] = f"{name} = {text}"
                    continue
            raise UserError(
                f"{found.__name__} uses {name}, a {type(value).__name__} that can't be written to a file; {_ADVICE}"
            )
    parts.pop(found.__name__)
    parts[found.__name__] = ast.unparse(node)


def _source_of(found: Named) -> ast.stmt:
    """The last definition of its name in the text that it was compiled from."""
    members = [found] if isinstance(found, FunctionType) else [*map(inspect.unwrap, filter(callable, vars(found).values()))]
    files = [code.co_filename for one in members if (code := getattr(one, "__code__", None))]
    file = next((file for file in files if file != "<string>"), "")
    kinds = (ast.ClassDef,) if isinstance(found, type) else (ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        nodes = ast.parse("".join(linecache.getlines(file))).body
    except SyntaxError:  # a cell with commands of IPython
        nodes = []
    for node in reversed(nodes):
        if isinstance(node, kinds) and node.name == found.__name__:
            return node
    raise UserError(f"the source of {found.__name__} is not known here; {_ADVICE}")


def _globals_of(node: ast.stmt) -> set[str]:
    """The global names that a definition uses."""
    whole = symtable.symtable(ast.unparse(node), "source", "exec")
    names: set[str] = set()
    tables = [whole]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used = (symbol for symbol in table.get_symbols() if symbol.is_referenced())
        names |= {symbol.get_name() for symbol in used if symbol.is_global() or table is whole}
    return names
