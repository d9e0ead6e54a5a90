import pytest

from aio_native.engine import EngineOptions
from aio_native.portable import AiofilesEngine
from tests.support.engine_conformance import EngineConformance


class TestAiofilesEngine(EngineConformance):
    engine_class = AiofilesEngine
    moves_data = True


@pytest.mark.parametrize(("queue_depth", "rings", "depth"), [(4, 1, 4), (4, 3, 12), (4096, 16, 32)])
def test_the_number_of_threads_is_bounded(queue_depth, rings, depth):
    engine = AiofilesEngine(
        EngineOptions(queue_depth=queue_depth, rings=rings, block_size=4096, alignment=4096, max_operations=1)
    )
    assert engine.depth == depth
    engine.close()
