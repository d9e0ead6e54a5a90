"""The whole suite under another default device: ``pytest -p tests.support.default_device``.

Whatever the product makes, or torch on its behalf, is made on ``meta`` unless a device is named. What tests make is
not, nor what the programs in ``perf`` make, which are processes of their own: they would have no data to train with.
"""

import sys
from pathlib import Path

import pytest
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(str(ROOT / folder) for folder in ("aio_native", "offload", "optim", "src"))
OTHERS = tuple(str(ROOT / folder) for folder in ("tests", "perf", "src/nvme_offload/perf"))


class OnMeta(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and is_for_the_product():
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def is_for_the_product():
    """Whether the nearest caller that is ours is no test and no program."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OTHERS):
            return False
        if name.startswith(PRODUCT):
            return True
        frame = frame.f_back
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with OnMeta():
        return (yield)
