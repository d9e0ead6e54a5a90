"""An NVMe tier for PyTorch training: exact, at the speed of the drive, and nothing lost.

The public names of all parts in one place: `__init__.pyi` lists them, for type checkers and for this file. A name is
imported when it is first used, so that ``import nvme_offload`` costs nothing and the `offload` command starts without
torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _homes() -> dict[str, str]:
    """The module of each public name, as the stub imports it."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names if node.module}


_HOMES = _homes()

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("nvme-offload")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
