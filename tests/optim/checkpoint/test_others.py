"""Boxes and pieces that a checkpoint is cut into, and ranks that say through a store what they have written."""

import itertools
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from nvme_offload import CheckpointWriteError
from nvme_offload.optim.checkpoint.background import Others
from nvme_offload.optim.checkpoint.files import FileRecord
from nvme_offload.optim.checkpoint.save_load import SavedIndex
from nvme_offload.optim.layout.geometry import Part, boxes
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.layout.subgroup import Run


def rank(number, save="now", store=dist.HashStore()):  # noqa: B008  # one for all
    return Others(store, save, number, "saved/now.partial")


def test_what_all_ranks_have_written_of_this_save_is_heard():
    rank(1, "before").say("written", b"before")
    rank(0).say("written", b"first")
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(rank(0).heard, "written", range(2))
        time.sleep(0.1)
        assert not heard.done()
        rank(1).say("written", b"second")
        assert heard.result(60) == [b"first", b"second"]


def test_what_another_rank_failed_with_is_raised():
    rank(0, "failing").say("written")
    rank(1, "failing").say_failed(OSError("no room"))
    with pytest.raises(
        CheckpointWriteError, match=r"saved/now\.partial failed: EIO.*on rank 1, host .*: OSError: no room"
    ):
        rank(0, "failing").heard("written", range(2))


def test_the_index_that_ranks_say_is_text_and_names_no_file_of_others():
    records = {"__0_0.distcp": FileRecord(7, "00", host="here")}
    index = SavedIndex({".metadata": b"\x80\xff", "state.json": b"{}", "objects.pt": b""}, records)
    assert SavedIndex.from_json(index.as_json()) == index
    with pytest.raises(ValueError, match=r"not \.\./\.bashrc, state\.json, objects\.pt"):
        SavedIndex.from_json(index.as_json().replace(".metadata", "../.bashrc"))
    with pytest.raises(ValueError, match="Expecting value"):
        SavedIndex.from_json(pickle.dumps("an index", 0).decode())


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (5, 1), (1, 6), (3, 1, 4), (2, 3, 4)], ids=str)
def test_boxes_are_the_run_and_few(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        found = list(boxes(shape, start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        values = []
        for box in found:
            part = whole
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            assert int(part.flatten()[0]) == box.start
            values += part.flatten().tolist()
        assert values == list(range(start, stop))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_chunks_of_a_parameter_whose_dimensions_lie_in_another_order(order):
    memory = torch.arange(60)
    sizes = [3, 4, 5]
    tensor = memory.view([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(3)])
    assert tuple(tensor.shape) == (3, 4, 5)
    part, seen = Part.of(tensor), torch.zeros(3, 4, 5, dtype=torch.int64)
    first = 7
    for chunk in part.chunks(first, 53):
        values = chunk.view(memory[first:53], first)
        target = seen
        for dim, (offset, size) in enumerate(zip(chunk.saved.offsets, chunk.saved.sizes, strict=True)):
            target = target.narrow(dim, offset, size)
        target.copy_(values)
    assert torch.equal(seen, torch.where((tensor >= first) & (tensor < 53), tensor, 0))


def test_pieces_are_whole_blocks_of_at_most_an_item():
    start, stop = 3 * TILE_NUMEL, 8 * TILE_NUMEL + 17
    found = Run(4, start, stop, at=64).pieces(2 * TILE_NUMEL + 5)
    assert [piece.start for piece in found] == [start, start + 2 * TILE_NUMEL, start + 4 * TILE_NUMEL]
    assert [piece.stop for piece in found] == [*(piece.start for piece in found[1:]), stop]
    assert [piece.at for piece in found] == [64, 64 + 2 * TILE_NUMEL, 64 + 4 * TILE_NUMEL]
    assert {piece.param for piece in found} == {4}
