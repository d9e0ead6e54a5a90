"""Style as a test: what reviewers would otherwise have to say again and again."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FACE = "nvme_offload"
LAYERS = ("aio_native", "offload", "optim", "perf")
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_FUNCTION_LINES = 70
PRIVATE_TORCH = re.compile(
    r"\btorch(\.\w+)*\._[a-z]\w*|^\s*(from|import) torch(\.\w+)*\._\w+|\._version\b", re.MULTILINE
)

assert len(SOURCES) > 20, "the sources were not found"


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(tree):
    """Dotted names of modules; of what is imported from a package both the package and the name in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write it from {FACE} down"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages(tree):
    """Top-level packages; of our own the part below the one name that is installed."""
    for module in imported_modules(tree):
        first, *rest = module.split(".")
        yield rest[0] if first == FACE and rest else first


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    above = set(LAYERS[layer + 1 :]) | ({"torch"} if layer == 0 else set())
    wrong = above & set(imported_packages(parsed(path)))
    assert not wrong, (
        f"{path.name} imports {sorted(wrong)}: the arrow is {' <- '.join(LAYERS)}, and no torch in the first"
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_print_and_no_call_inside_assert(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path.name}:{node.lineno}: print; use rich or logging"
        if isinstance(node, ast.Assert):
            calls = [call for call in ast.walk(node.test) if isinstance(call, ast.Call) and not is_question(call)]
            assert not calls, f"{path.name}:{node.lineno}: acts inside an assert, which python -O leaves out"


def is_question(call):
    return isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "len", "all", "any")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_fit_on_a_screen(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path.name}:{node.lineno}: {node.name} has {lines} lines; split it"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_torch_names_have_one_place(path):
    if path.name == "_torch_private.py":
        return
    found = PRIVATE_TORCH.search(path.read_text(encoding="utf-8"))
    assert not found, f"{path.name}: {found and found.group().strip()} belongs in offload/_torch_private.py"


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_one_name_is_imported(path):
    """The folders are no packages of their own: a user's `optim.py` or `perf/` must not hide them, nor they it."""
    wrong = {module for module in imported_modules(parsed(path)) if module.split(".")[0] in LAYERS}
    assert not wrong, f"{path.name} imports {sorted(wrong)}: write {FACE}.{min(wrong)}"


def test_imports_are_free():
    """No ring, thread or CUDA context; the face and aio_native without torch, the command too."""
    code = """
import sys, threading, os
import nvme_offload, nvme_offload.aio_native
assert "torch" not in sys.modules
threads = len(os.listdir("/proc/self/task"))
import torch
with_torch = len(os.listdir("/proc/self/task"))
for name in nvme_offload.__all__:
    getattr(nvme_offload, name)
assert not [name for name in sys.modules if name.startswith('nvme_offload.perf')], "the arrow"
import nvme_offload.perf.cli
assert len(os.listdir("/proc/self/task")) == with_torch, "a thread was started"
assert not [fd for fd in os.listdir("/proc/self/fd") if "io_uring" in (os.readlink("/proc/self/fd/" + fd)
            if os.path.lexists("/proc/self/fd/" + fd) else "")]
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
