"""The public doors: names that code outside this repository may use."""

import aio_native
import offload
import optim


def test_offload():
    assert sorted(offload.__all__) == ["OffloadConfig", "TensorSwapper", "Transfer"]


def test_optim():
    assert sorted(optim.__all__) == [
        "OffloadAdamW",
        "OffloadEngine",
        "OptimizerStats",
        "Span",
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
    ]


def test_every_exported_name_exists():
    for package in (aio_native, offload, optim):
        assert list(package.__all__) == sorted(package.__all__)
        for name in package.__all__:
            assert getattr(package, name).__doc__ or name == "ENGINES", f"{package.__name__}.{name} has no docstring"
