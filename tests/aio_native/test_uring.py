import os

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

    def test_a_forked_child_does_not_keep_a_ring_alive(self):
        """Nor what a ring that breaks is watched by: nobody would know when its last request has ended."""
        self.open(rings=2)
        descriptors = len(os.listdir("/proc/self/fd"))
        pid = os.fork()
        if pid == 0:
            links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
            os._exit(sum("io_uring" in os.readlink(link) for link in links if os.path.islink(link)))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(os.listdir("/proc/self/fd")) == descriptors
