"""The public door: names that code outside this repository may use."""

import ast
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist

import nvme_offload
from nvme_offload import adapters
from nvme_offload.offload import errors
from tests.support.training import run_child

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs").rglob
SHOWN = [ROOT / "README.md", *sorted(DOCS("*.md")), *sorted(DOCS("*.py"))]  # pages and examples
IMPORT = re.compile(r"^ *from (?P<module>nvme_offload[\w.]*) import (?P<names>\([^)]*\)|[^\n#]*)", re.MULTILINE)


def test_adapters():
    """They are at the face, too, but a star import must not import the packages of their trainers."""
    names = ["OffloadLightningCallback", "OffloadTrainer", "OffloadTrainerCallback", "trainer_optimizer"]
    assert adapters.__all__ == dir(adapters) == names
    assert not {*adapters.__all__} & {*nvme_offload.__all__}
    assert all(getattr(nvme_offload, name) is vars(adapters)[name] for name in adapters.__all__)


def test_an_adapter_says_which_package_it_needs():
    code = """
import sys
for name in [name for name in sys.modules if name == "nvme_offload" or "adapters" in name]:
    del sys.modules[name]
sys.modules["lightning"] = sys.modules["transformers"] = None
import nvme_offload
for name in ("OffloadLightningCallback", "OffloadTrainer", "OffloadTrainerCallback"):
    try:
        getattr(nvme_offload, name)()
    except ImportError as error:
        sys.stdout.write(f"{error}; ")
"""
    assert run_child(code) == (
        "OffloadLightningCallback needs lightning: pip install lightning; "
        "OffloadTrainer needs transformers, accelerate: pip install transformers accelerate; "
        "OffloadTrainerCallback needs transformers: pip install transformers; "
    )


def test_every_error_is_offered():
    """Wherever it is defined but in the command, which turns its own into a sentence."""
    raised = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    elsewhere = {
        node.name
        for package in ("offload", "optim", "aio_native")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        if any(ast.unparse(base).endswith(("Error", "Exception", "Warning")) for base in node.bases)
    }
    assert elsewhere == raised | {"EngineUnavailable"} <= {*nvme_offload.__all__, "_CannotGoOnError"}
    assert all(name.removeprefix("_CannotGoOn") in errors.__doc__ for name in elsewhere)


def imports_of(text):
    """Modules of ours and names that code imports from them, also where it stands on a page."""
    for match in IMPORT.finditer(text):
        names = match["names"].strip("()").split(",")
        yield from ((match["module"], name.split()[0]) for name in names if name.strip())


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_and_examples_import_from_the_face_alone(path):
    text = path.read_text(encoding="utf-8")
    offered = {"nvme_offload": nvme_offload.__all__, "nvme_offload.adapters": adapters.__all__}
    wrong = [f"from {module} import {name}" for module, name in imports_of(text) if name not in offered.get(module, ())]
    wrong += re.findall(r"^ *import nvme_offload\.(?!adapters\b).*", text, re.MULTILINE)
    assert not wrong, f"offer it in src/nvme_offload/__init__.pyi, or show something that is: {wrong}"


def test_imports_on_pages_are_found():
    """The test above would pass on pages in which it finds nothing."""
    assert len([found for path in SHOWN for found in imports_of(path.read_text(encoding="utf-8"))]) > 40
    found = imports_of("from nvme_offload.a import (\n    B,\n    C as D,\n)\n")
    assert [*found] == [("nvme_offload.a", "B"), ("nvme_offload.a", "C")]


MAIN = ("", "OffloadAdamW", "OffloadEngine", "OffloadOptimizer", "TensorSwapper", "UpdateRule", "initialize")
"""The face itself, and what is used first."""


@pytest.mark.filterwarnings("ignore:.* does not honour these keys")
@pytest.mark.parametrize("name", MAIN)
def test_help_shows_an_example_first_that_runs(name, tmp_path):
    """It comes before arguments and all other words but one paragraph and the line above it."""
    shown = inspect.getdoc(getattr(nvme_offload, name) if name else nvme_offload)
    _, before, rest = shown.split("\n\n", 2)
    assert before.endswith("::"), f"{name} shows no example first, but: {before}"
    example = re.match(r"(?: {4}.*\n|\n)+", rest + "\n")[0]
    section = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    known = {key: getattr(nvme_offload, key) for key in nvme_offload.__all__}
    known |= {"__name__": "reader", "section": {**section, "optimizer": {"type": "AdamW"}} | {"train_batch_size": 8}}
    known |= {"model": torch.nn.Linear(4, 4), "batches": torch.randn(2, 8, 4), "keys": torch.randn(9)}
    if name == "OffloadOptimizer":
        known["Mine"] = type("Mine", (nvme_offload.UpdateRule,), {"name": "Mine"})
    exec(dedent(example).replace("/mnt/nvme0", str(tmp_path)), known)
    if dist.is_initialized():
        dist.destroy_process_group()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_repr_of_an_optimizer_says_where_its_state_is(device, tmp_path):
    """Before it is placed, after, while a step is behind, and when it is closed; asking changes nothing."""
    path = {"nvme_path": str(tmp_path)} if device == "nvme" else {}
    section = {"zero_optimization": {"offload_optimizer": {"device": device, **path}}}
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = nvme_offload.OffloadAdamW([weight], lr=0.5, offload=section)
    engine = optimizer.stats().engine
    line = {"nvme": f"8 MiB on nvme; {engine} to {tmp_path}", "cpu": "8 MiB on host"}[device]
    expected = f"OffloadAdamW (\n    rule: AdamW; state: {line}\nParameter Group 0\n    amsgrad: False\n"
    assert repr(optimizer).startswith(expected)
    assert optimizer.stats().num_subgroups == 0
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert repr(optimizer).startswith(expected)
    assert optimizer.stats().num_subgroups == 1
    optimizer.close()
    assert repr(optimizer).startswith(expected)


def test_every_exported_name_exists():
    assert list(nvme_offload.__all__) == sorted(nvme_offload.__all__)
    for name in nvme_offload.__all__:
        assert getattr(nvme_offload, name).__doc__, f"{name} has no docstring"


def test_types_name_what_is_there():
    """What type checkers and editors see is where each name is defined, and `__all__` has each."""
    stub = ast.parse(Path(nvme_offload.__file__).with_suffix(".pyi").read_text())
    typed = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {name for name, module in typed.items() if module == adapters.__name__} == {*adapters.__all__}
    for name in adapters.__all__:
        del typed[name]
    assert sorted(typed) == nvme_offload.__all__
    for name, module in typed.items():
        assert getattr(nvme_offload, name).__module__ == module.replace("offload.config", "offload.config.section")


def test_version():
    assert nvme_offload.__version__ == version("nvme-offload")
    assert dir(nvme_offload) == sorted([*nvme_offload.__all__, "__version__", "adapters"])


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'nvme_offload' has no attribute 'OffloadAdamWW'"):
        nvme_offload.OffloadAdamWW  # noqa: B018
