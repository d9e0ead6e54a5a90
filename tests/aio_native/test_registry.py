"""One table names the engines, and everything that offers them follows it."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from nvme_offload.aio_native.python_engine import PythonEngine
from nvme_offload.aio_native.registry import ENGINES, REGISTRY, open_engine
from nvme_offload.perf.cli import load
from nvme_offload.perf.experiments.__main__ import EXPERIMENTS
from scripts.configuration_page import json_schema

ROOT = Path(__file__).parents[2]
SOURCES = [path for part in ("aio_native", "offload", "optim", "perf") for path in (ROOT / part).rglob("*.py")]


LISTS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.ClassDef)


def option_choices(command, name):
    (option,) = [option for option in command.params if name in option.opts]
    return option.metavar.split("|")


def page(name):
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("name", REGISTRY)
def test_an_entry_leads_to_its_engine(name):
    assert getattr(import_module(REGISTRY[name].module), REGISTRY[name].class_name).name == name


def test_every_python_engine_has_an_entry():
    for path in (ROOT / "aio_native").glob("*.py"):
        import_module(f"nvme_offload.aio_native.{path.stem}" if path.stem != "__init__" else "nvme_offload.aio_native")
    engines = PythonEngine.__subclasses__()
    ours = [engine for engine in engines if engine.__module__.startswith("nvme_offload.aio_native.")]
    assert {engine.name for engine in ours} < REGISTRY.keys()
    assert len(ours) > 1


def test_auto_tries_what_moves_bytes_in_the_order_of_the_ranks():
    assert [REGISTRY[name].rank for name in ENGINES] == sorted(entry.rank for entry in REGISTRY.values() if entry.rank)
    assert set(REGISTRY) - set(ENGINES) == {"null"}


def test_an_unknown_engine_is_told_which_there_are():
    with pytest.raises(ValueError, match=rf"'libaio': there is no such engine; .* auto, {', '.join(REGISTRY)}"):
        open_engine("libaio", None)


def test_everything_that_offers_engines_offers_these(tmp_path):
    assert json_schema()["$defs"]["AioConfig"]["properties"]["engine"]["enum"] == ["auto", *ENGINES]
    assert option_choices(load("bench"), "--ioengine") == ["auto", *REGISTRY]
    assert option_choices(load("demo", EXPERIMENTS), "--engine") == ["auto", *ENGINES]


def test_the_pages_name_them():
    rows = re.findall(r"^\| `(\w+)` \|", page("storage.md").split("| Engine |")[1].split("\n\n")[0], re.MULTILINE)
    assert rows == list(ENGINES)
    (bench,) = re.findall(r"^\| `--ioengine` \|.*$", page("benchmark.md"), re.MULTILINE)
    (demo_row,) = re.findall(r"^\| `--engine` \|.*$", page("demo.md"), re.MULTILINE)
    (word,) = re.findall(r"^\| engine, I/O engine \|.*$", page("glossary.md"), re.MULTILINE)
    for row, names in ((bench, ("auto", *REGISTRY)), (demo_row, ("auto", *ENGINES)), (word, ENGINES)):
        assert [name for name in dict.fromkeys(re.findall(r"`([\w-]+)`", row)) if name in names] == [*names]


def names_in(node):
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)} & set(ENGINES)


def test_nobody_keeps_a_list_of_their_own():
    for path in SOURCES:
        if path.name != "registry.py":
            nodes = ast.walk(ast.parse(path.read_text()))
            lists = [node for node in nodes if isinstance(node, LISTS)]
            kept = [node.lineno for node in lists if len(names_in(node)) == len(ENGINES)]
            assert not kept, f"{path.name}:{kept}: take it from aio_native.registry"
