"""Names that are imported when they are first used: a stub beside the module says where each is defined."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def homes_of(file: str) -> dict[str, str]:
    """Return the module of each name that the stub of `file` imports."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names if node.module}


def fetched(module: str, homes: dict[str, str], name: str) -> Any:
    """Import a name of `module` from its home, and keep it there.

    Raises:
        AttributeError: the module does not offer it.
    """
    if name not in homes:
        from difflib import get_close_matches

        near = [home for home in homes if home.lower() == name.lower()]
        near = near or get_close_matches(name, homes, n=1, cutoff=0.55)
        hint = f"; did you mean {near[0]}?" if near and not name.startswith("_") else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
    value = getattr(import_module(homes[name]), name)
    setattr(sys.modules[module], name, value)
    return value
