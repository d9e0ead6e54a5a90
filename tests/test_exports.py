"""The public door: names that code outside this repository may use."""

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

import nvme_offload
from nvme_offload import aio_native


def test_names():
    assert nvme_offload.__all__ == [
        "CheckpointError",
        "CheckpointWriteError",
        "ClosedError",
        "ConfigError",
        "ConfigWarning",
        "CorruptionError",
        "EngineLostError",
        "ForkError",
        "OffloadAdagrad",
        "OffloadAdam",
        "OffloadAdamW",
        "OffloadConfig",
        "OffloadEngine",
        "OffloadError",
        "OffloadLion",
        "OffloadMuon",
        "OffloadOptimizer",
        "OffloadSGD",
        "OptimizerStats",
        "OutOfSpaceError",
        "PeerError",
        "Span",
        "State",
        "StateError",
        "SwapIOError",
        "TensorSwapper",
        "Transfer",
        "UpdateRule",
        "WeightsError",
        "get_full_grad",
        "get_full_optimizer_state",
        "get_full_param",
        "initialize",
        "set_full_grad",
        "set_full_optimizer_state",
        "set_full_param",
        "split_parameters",
    ]


def test_aio_native():
    assert sorted(aio_native.__all__) == [
        "ENGINES",
        "Engine",
        "EngineOptions",
        "EngineStats",
        "EngineUnavailable",
        "Failure",
        "FaultSpec",
        "Op",
        "OpenedEngine",
        "Operation",
        "Registration",
        "Segment",
        "open_engine",
        "open_next_engine",
    ]


def test_every_exported_name_exists():
    for package in (nvme_offload, aio_native):
        assert list(package.__all__) == sorted(package.__all__)
        for name in package.__all__:
            assert getattr(package, name).__doc__ or name == "ENGINES", f"{package.__name__}.{name} has no docstring"


def test_types_name_what_is_there():
    """What type checkers and editors see is where each name is defined, and `__all__` has each."""
    stub = ast.parse(Path(nvme_offload.__file__).with_suffix(".pyi").read_text())
    typed = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(typed) == nvme_offload.__all__
    for name, module in typed.items():
        assert getattr(nvme_offload, name).__module__ == module.replace("offload.config", "offload.config.section")


def test_version():
    assert nvme_offload.__version__ == version("nvme-offload")
    assert "__version__" in dir(nvme_offload)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'nvme_offload' has no attribute 'OffloadAdamWW'"):
        nvme_offload.OffloadAdamWW  # noqa: B018
