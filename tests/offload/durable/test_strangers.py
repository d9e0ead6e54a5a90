"""A durable run in a folder that others may write in: what somebody else put there is neither used nor changed."""

import os
import stat

import pytest
from typer.testing import CliRunner

from nvme_offload import ForeignFolderError
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.perf.cli import app
from tests.support.durable_run import SmallRun

PRECIOUS = b"precious " * 2000


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "home" / "thesis.txt"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def drive(tmp_path):
    path = tmp_path / "drive"
    path.mkdir()
    return path


def made(drive):
    """A run that has committed, and nobody is in."""
    small = SmallRun([drive])
    small.begin()
    small.commit("0", 0)
    small.close()
    return small.run.folder


def opened(drive):
    return DurableRun([drive], name="small", rank=0, direct="optional")


def offload_runs(*arguments):
    done = CliRunner().invoke(app, ["runs", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("name", ["owner", "manifest.0", "manifest.1", "manifest.7", "swap", "run.json", "snapshot.a"])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_what_is_no_file_is_neither_opened_nor_followed(drive, precious, name, kind):
    folder = made(drive)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(precious if kind == "link" else precious.with_name("new"))
    with pytest.raises(ForeignFolderError, match=r"is a link|is no file") as caught:
        opened(drive).close()
    assert str(folder / name) in str(caught.value)
    assert offload_runs(drive)[0] == 0
    assert precious.read_bytes() == PRECIOUS
    assert os.listdir(precious.parent) == [precious.name]


def others_may_write(folder):
    folder.chmod(0o770)


def everybody_may_write(folder):
    folder.chmod(0o707)


def of_somebody_else(folder):
    os.chown(folder, 4321, -1)


def a_link(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


STRANGE = [
    (others_may_write, "mode 0770: others may write"),
    (everybody_may_write, "mode 0707: others may write"),
    pytest.param(
        of_somebody_else,
        "belongs to user 4321, and this process is of 0",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away"),
    ),
    (a_link, "is a link, and no folder"),
]


@pytest.mark.parametrize(("change", "words"), STRANGE)
def test_a_folder_that_is_not_this_users_alone_is_refused_listed_and_never_removed(drive, change, words):
    folder = made(drive)
    other = SmallRun([drive], name="other")
    other.begin()
    other.commit("0", 3)
    other.close()
    change(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ForeignFolderError, match=words) as caught:
        opened(drive).close()
    assert str(folder) in str(caught.value)
    assert "choose another nvme_path" in str(caught.value)
    code, listed = offload_runs(drive)
    assert code == 0
    assert words in listed
    assert "other three slots 3" in listed
    code, said = offload_runs("remove", "small", drive)
    assert code == 1
    assert words in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277, 0o777])
def test_files_have_mode_0600_whatever_the_umask(drive, mask):
    before = os.umask(mask)
    try:
        folder = made(drive)
        SmallRun([drive]).close()
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in [folder, *folder.iterdir()]}
    assert modes.pop(folder.name) == "0o700"
    assert set(modes.values()) == {"0o600"}
    assert {"owner", "run.json", "swap", "manifest.0"} < set(modes)
