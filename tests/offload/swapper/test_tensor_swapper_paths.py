"""Paths that fill up, refuse or are shared; processes that fork, are killed or forget to close."""

import pytest
import torch

from tests.support.sandbox import needs_mounts
from tests.support.swapper_tools import PATIENCE, PRELUDE, MiB, random_bits, run_with_swapper, same_bits, swap_file
from tests.support.training import run_child


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 1, 1], [3, 1, 1]], ids=str)
def test_every_piece_is_striped_by_weight(open_swapper, tmp_path, weights):
    paths = [tmp_path / str(number) for number in range(len(weights))]
    for path in paths:
        path.mkdir()
    swapper = open_swapper(*paths, path_weights=weights, staging_budget=4 * MiB)
    tensors = {str(number): random_bits((number * MiB + 12_345,), torch.uint8, number) for number in range(1, 8)}
    for name, tensor in tensors.items():
        swapper.swap_out(name, tensor)
    for name, tensor in tensors.items():
        assert same_bits(swapper.swap_in(name).wait(PATIENCE), tensor)
    sizes = [swap_file(swapper, index).stat().st_size for index in range(len(paths))]
    for size, weight in zip(sizes, weights, strict=True):
        assert size / sum(sizes) == pytest.approx(weight / sum(weights), rel=0.02)


@needs_mounts
def test_a_disk_that_fills_up_keeps_what_was_stored(tmp_path):
    code = """
with open_swapper(direct="disabled") as swapper:
    values = {}
    for number in range(10):
        try:
            swapper.swap_out("x", torch.full((3 << 20,), number)).wait(PATIENCE)  # 24 MiB, 48 while overwriting
            swapper.swap_out(str(number), torch.full((1 << 20,), number)).wait(PATIENCE)
            values[str(number)] = number
        except OutOfSpaceError as error:
            assert error.free_bytes < error.needed_bytes and str(path) in str(error), error
            break
    else:
        raise SystemExit("a full disk went unnoticed")
    assert values
    for name, number in values.items():
        assert (swapper.swap_in(name).wait(PATIENCE) == number).all()
    x = swapper.swap_in("x").wait(PATIENCE)
    assert (x == x[0]).all() and len(x) == 3 << 20
    for name in values:
        swapper.delete(name)
    swapper.swap_out("fits again", torch.ones(1 << 20)).wait(PATIENCE)
    assert swapper.pool.num_free == swapper.pool.num_buffers
assert list(path.iterdir()) == []
"""
    run_with_swapper(code, tmp_path, mounts={tmp_path: "tmpfs,size=64m"})


def test_a_forked_child_is_told_so_and_disturbs_nothing_and_a_program_that_forgets_to_close_cleans_up(tmp_path):
    code = """
swapper = open_swapper()
swapper.swap_out("x", torch.arange(500_000))
if os.fork() == 0:
    swap_in, swap_out = lambda: swapper.swap_in("x"), lambda: swapper.swap_out("y", torch.ones(1))
    for call in (swap_in, swap_out, swapper.names, swapper.synchronize):
        try:
            call()
        except ForkError as error:
            assert "make one in each process, after the fork" in str(error)
        else:
            sys.exit("no ForkError")
    swapper.close()
    sys.exit(0)  # through the exit handlers, as a DataLoader worker might
status = os.waitstatus_to_exitcode(os.wait()[1])
assert status == 0, status
assert torch.equal(swapper.swap_in("x").wait(PATIENCE), torch.arange(500_000))
assert len(list(path.iterdir())) == 1
transfer = swapper.swap_out("z", torch.ones(1 << 20))  # is under way at the end
"""
    run_child(PRELUDE + code, tmp_path, fresh=True)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_makes_its_own_in_place_of_the_inherited_one(tmp_path):
    """A new thread may have the handle of one that stayed in the parent: dropping the old engine must not touch it."""
    code = """
swapper = open_swapper()
if os.fork() == 0:
    swapper = open_swapper()
    gc.collect()
    swapper.swap_out("x", torch.arange(1000))
    assert torch.equal(swapper.swap_in("x").wait(30), torch.arange(1000))
    swapper.close()
    del swapper
    gc.collect()
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.wait()[1])
assert status == 0, status
assert len(list(path.iterdir())) == 1
swapper.close()
"""
    run_with_swapper("import gc\n" + code, tmp_path)


@needs_mounts
def test_a_tensor_that_does_not_fit_takes_no_byte_of_the_drive(tmp_path):
    code = """
swapper = open_swapper(direct="optional")
swapper.swap_out("x", torch.ones(1000)).wait(60)
space = swapper.tier.space
before = os.fstat(space.fds[0]).st_blocks
grown = []
promise = os.posix_fallocate
os.posix_fallocate = lambda *arguments: (grown.append(arguments), promise(*arguments))
try:
    swapper.swap_out("y", torch.ones(50_000_000)).wait(60)
except OutOfSpaceError as error:
    assert error.needed_bytes > 190_000_000, error
else:
    raise SystemExit("a full disk went unnoticed")
assert grown == [], grown
assert os.fstat(space.fds[0]).st_blocks == before
swapper.swap_out("z", torch.ones(10_000_000)).wait(60)
swapper.close()
"""
    run_with_swapper(code, tmp_path, mounts={tmp_path: "tmpfs,size=64m"})


def test_a_process_without_descriptors_is_told_which_limit_to_raise(tmp_path):
    code = """
import resource
from nvme_offload.aio_native.bell import Bell
first = open_swapper()
first.swap_out("x", torch.arange(1000)).wait()
used = max(map(int, os.listdir("/proc/self/fd")))
while os.dup(0) < used:  # no number below it is free
    pass
used += 1
said = set()
for more in range(1, 12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, 1 << 14))
    try:
        open_swapper().close()
    except OSError as error:
        said.add("`ulimit -n`" in str(error))
assert said == {True}, said
assert len(list(path.iterdir())) == 1
assert torch.equal(first.swap_in("x").wait(30), torch.arange(1000))
first.close()
try:
    while True:
        os.dup(0)
except OSError:
    pass
try:
    Bell()
except OSError as error:
    assert "`ulimit -n`" in str(error)
else:
    raise AssertionError
"""
    run_with_swapper(code, tmp_path)
