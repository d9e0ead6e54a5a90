"""A pinned step is read past the tiers: all of it, or an error that names the file."""

import os

import pytest
import torch

from nvme_offload import SwapIOError
from nvme_offload.offload.durable.chain import Chain, Written
from nvme_offload.offload.durable.pinned import PinnedReader
from nvme_offload.offload.durable.seal import ExtentLayout, SealedAs
from nvme_offload.offload.storage.swap_space import SwapSpace

SIZE = 3 << 16


@pytest.fixture
def space(tmp_path):
    space = SwapSpace([tmp_path], direct="optional")
    yield space
    space.close()


def chain_of(space):
    content = ExtentLayout(SIZE - 4096, 0, space.alignment)
    return Chain(Written(space.allocate(content.size_bytes), content, SealedAs(0, 1, 1), 0))


def test_all_of_a_chain_is_read(space):
    chain = chain_of(space)
    size_bytes = chain.base.content.size_bytes
    content = os.urandom(size_bytes)
    with open(space.path_of(space.fds[0]), "r+b") as file:
        file.seek(chain.base.extent.stripes[0].offset)
        file.write(content)
    memory = PinnedReader(space).read(chain)
    assert memory.view(torch.uint8, 0, size_bytes).numpy().tobytes() == content


@pytest.mark.parametrize("beyond", [0, 100], ids=["between two pages", "inside a page"])
def test_a_file_that_ends_too_soon_is_an_error_and_no_hang(space, beyond):
    chain = chain_of(space)
    os.truncate(space.path_of(space.fds[0]), chain.base.extent.stripes[0].offset + 8192 + beyond)
    with pytest.raises(SwapIOError, match="a pinned step"):
        PinnedReader(space).read(chain)
