import pytest

from nvme_offload.aio_native import _native
from nvme_offload.aio_native.uring import UringEngine
from tests.support.engine_conformance import EngineConformance

pytestmark = pytest.mark.skipif(
    not hasattr(_native, "UringEngine"), reason="built without liburing: there is no C++ engine to test"
)


class TestUringEngine(EngineConformance):
    engine_class = UringEngine
    moves_data = True
