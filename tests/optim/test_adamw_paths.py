"""Paths that cannot hold swap files: said at construction, in words, with nothing left behind."""

import errno
import os

import pytest

from nvme_offload import OffloadAdamW, SwapIOError
from tests.support.sandbox import can_mount, needs_mounts, run_python
from tests.support.training import param, section

PRELUDE = """
import logging, os, sys
import torch
from nvme_offload import OutOfSpaceError, SwapIOError
from nvme_offload import OffloadAdamW
from tests.support.training import SETTINGS, assert_same_training, param, params_of, section, set_grads

path = sys.argv[1]
"""


def sandboxed(code, drive, kind):
    done = run_python(PRELUDE + code, drive, mounts={drive: kind})
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(("name", "code"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR)])
def test_a_path_that_is_no_directory(drive, name, code):
    (drive / "file").write_text("mine")
    with pytest.raises(SwapIOError) as caught:
        OffloadAdamW([param((5,))], offload=section(drive / name))
    assert (caught.value.errno, caught.value.path) == (code, drive / name)
    assert str(caught.value).startswith(f"{drive / name} (nvme_path) cannot be used: {errno.errorcode[code]}, ")
    assert (drive / "file").read_text() == "mine"


@needs_mounts
def test_a_read_only_file_system(drive):
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
remount_read_only = 32 | 1
assert libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(remount_read_only), None) == 0
try:
    OffloadAdamW([param((5,))], offload=section(path, direct="optional"))
except SwapIOError as error:
    print(error.errno, error)
assert os.listdir(path) == []
"""
    done = sandboxed(code, drive, "tmpfs")
    assert done.stdout.startswith(f"{errno.EROFS} ")
    assert str(drive) in done.stdout
    assert "remount it or put nvme_path on another one" in done.stdout


@needs_mounts
@pytest.mark.parametrize("direct", ["optional", "disabled"])
def test_a_file_system_without_direct_io_when_it_is_not_required(drive, direct):
    code = """
logging.basicConfig(level=logging.WARNING)
params = [params_of([(70_000,), (5,)], torch.bfloat16, torch.float32) for _ in range(3)]
optimizers = [OffloadAdamW(params[i], offload=section(path, direct=DIRECT), **SETTINGS) for i in (0, 1)]
optimizers.append(OffloadAdamW(params[2], offload=section(None), **SETTINGS))
for step in range(3):
    for mine, optimizer in zip(params, optimizers):
        set_grads(mine, step)
        optimizer.step()
assert_same_training(optimizers[0], optimizers[2])
assert_same_training(optimizers[1], optimizers[2])
"""
    errors = sandboxed(code.replace("DIRECT", repr(direct)), drive, "ramfs").stderr
    assert errors.count("has no direct I/O: swapping through the page cache") == (1 if direct == "optional" else 0)
    assert errors.count(f"nvme_path {drive} is on ramfs, which is memory") == 1


@needs_mounts
def test_a_file_system_that_is_too_small(drive):
    code = """
numel = 8 << 20
for shapes in ([(numel,)], [(numel // 8,)] * 8):
    try:
        OffloadAdamW(params_of(shapes, torch.bfloat16), offload=section(path, direct="optional"))
    except OutOfSpaceError as error:
        assert error.needed_bytes == 10 * numel, error.needed_bytes
        assert error.free_bytes <= 64 << 20
        print(error)
    else:
        sys.exit("it fitted")
    assert os.listdir(path) == []
"""
    output = sandboxed(code, drive, "tmpfs,size=64m").stdout
    assert output.count("needed 80 MiB, free") == 2
    assert f"({10 * (8 << 20)} and" in output


@pytest.mark.skipif(os.geteuid() == 0 and not can_mount(), reason="root may write everywhere")
def test_a_folder_of_somebody_else(drive):
    drive.chmod(0o555)
    code = """
try:
    OffloadAdamW([param((5,))], offload=section(path))
except SwapIOError as error:
    print(error.errno, error)
"""
    done = run_python(PRELUDE + code, drive, ordinary_user=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{errno.EACCES} ")
    assert "give it permission" in done.stdout
