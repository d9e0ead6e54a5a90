"""Safetensors files, read and written, beside the package of that name."""

import contextlib
import errno
import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvme_offload import WeightsError, write_sharded
from nvme_offload.offload.weights import writer
from nvme_offload.offload.weights.reader import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, SafetensorsReader
from nvme_offload.offload.weights.staging import ADAPTER_CONFIG, ADAPTER_FILE, STAGING, HiddenFolder
from tests.support.forked import printed
from tests.support.power_loss import Recording
from tests.support.sandbox import needs_mounts, run_python
from tests.support.training import assert_same_bits

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def tensors_of_every_dtype():
    numbers = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (), (0,), (2, 0, 3), (7,), (2, 3, 4)]
    return {
        f"{str(dtype).removeprefix('torch.')}.{place}": (torch.randn(shape, generator=numbers) * 20).to(dtype)
        for dtype in DTYPES
        for place, shape in enumerate(shapes)
    }


def read_all(path):
    with SafetensorsReader(path) as reader:
        return {name: reader.read(name).view(stored.shape) for name, stored in reader.tensors.items()}


def test_it_reads_what_safetensors_writes_and_the_other_way_round(tmp_path):
    tensors = tensors_of_every_dtype()
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert_same_bits(read_all(tmp_path / "theirs.safetensors"), tensors)
    assert_same_bits(read_all(tmp_path), tensors)
    (file,) = write_sharded(tmp_path / "ours", tensors.items(), dtype=None)
    assert file.name == SINGLE_FILE
    assert_same_bits(load_file(file), tensors)
    halves = load_file(write_sharded(tmp_path / "ours", tensors.items())[0])
    assert_same_bits(halves, {n: v.to(torch.bfloat16) if v.is_floating_point() else v for n, v in tensors.items()})


def test_any_range_of_a_tensor_is_read_alone(tmp_path):
    tensor = torch.arange(60.0).view(5, 12)
    save_file({"before": torch.zeros(3), "tensor": tensor}, tmp_path / "file.safetensors")
    with SafetensorsReader(tmp_path / "file.safetensors") as reader:
        for start, stop in ((0, 60), (12, 24), (7, 8), (60, 60)):
            assert reader.read("tensor", start, stop).equal(tensor.flatten()[start:stop])


def sharded(folder, max_shard_bytes=200):
    tensors = {f"layer.{number}": torch.full((10,), float(number)) for number in range(7)}
    return tensors, write_sharded(folder, tensors.items(), dtype=None, max_shard_bytes=max_shard_bytes)


def test_shards_have_the_hugging_face_layout(tmp_path):
    tensors, files = sharded(tmp_path, max_shard_bytes=100)
    assert [file.name for file in files] == [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 280}
    assert all(name in load_file(tmp_path / place) for name, place in index["weight_map"].items())
    assert index["weight_map"].keys() == tensors.keys()
    for path in (tmp_path, tmp_path / INDEX_FILE):
        assert_same_bits(read_all(path), tensors)
    large = write_sharded(tmp_path / "large", [("a", torch.zeros(9)), ("b", torch.zeros(1))], max_shard_bytes=4)
    assert [list(load_file(file)) for file in large] == [["a"], ["b"]]


def test_a_header_is_within_what_the_format_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_HEADER_BYTES", 10_000)
    tensors = {f"{number:02d}" + "\u00e4" * 400: torch.full((2,), float(number)) for number in range(14)}
    files = write_sharded(tmp_path, tensors.items(), dtype=None)
    assert [len(load_file(file)) for file in files] == [3, 3, 3, 3, 2]
    assert max(struct.unpack("<Q", file.read_bytes()[:8])[0] for file in files) <= 10_000
    assert_same_bits(read_all(tmp_path), tensors)


@pytest.mark.parametrize(
    "name", ["__metadata__", "lone \ud800", "x" * MAX_HEADER_BYTES], ids=["theirs", "text", "long"]
)
def test_a_name_that_no_header_can_have_is_refused_before_a_byte_is_written(tmp_path, name):
    with pytest.raises(ValueError, match=r"__metadata__|lone .*rename|xxx'\.\.\. has 100000000 characters.*rename"):
        write_sharded(tmp_path / "new", [("other", torch.zeros(1)), (name, torch.zeros(1))])
    assert not (tmp_path / "new").exists()


def test_an_export_replaces_the_one_before_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.safetensors").touch()
    for max_shard_bytes, num_files in ((100, 4), (1000, 1), (200, 2), (100, 4), (1000, 1)):
        tensors, files = sharded(tmp_path, max_shard_bytes)
        expected = {file.name for file in files} | {"config.json", "other.safetensors"}
        assert len(files) == num_files
        assert {entry.name for entry in tmp_path.iterdir()} == expected | ({INDEX_FILE} if num_files > 1 else set())
        assert_same_bits(read_all(tmp_path), tensors)


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


DAMAGED = {
    "empty": (b"", "is no safetensors file: of 0 bytes"),
    "header longer than the file": (struct.pack("<Q", 1 << 40) + b"{}", "its header would be 1099511627776"),
    "no JSON": (file_of(b"{broken"), "header that is no JSON"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "header that is no JSON"),
    "no object": (file_of([1]), "no JSON object"),
    "no entry": (file_of({"a": 3}), "a: its entry in the header is 3"),
    "no offsets": (file_of({"a": {"dtype": "F32", "shape": [2]}}), "a: its entry in the header"),
    "negative shape": (file_of(entry(shape=[-2]), bytes(8)), "a: its entry in the header"),
    "unknown dtype": (file_of(entry(dtype="F4"), bytes(8)), "a is F4: this cannot be read; known are F64"),
    "offsets too small": (file_of(entry(data_offsets=[0, 4]), bytes(4)), r"4 bytes for F32 of shape \(2,\)"),
    "too short": (file_of(entry(), bytes(7)), "has .* bytes, and its header describes"),
    "too long": (file_of(entry(), bytes(9)), "has .* bytes, and its header describes"),
    "a gap": (file_of(entry(data_offsets=[4, 12]), bytes(12)), "a begins at byte"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_refused_in_words(tmp_path, kind):
    content, message = DAMAGED[kind]
    file = tmp_path / "file.safetensors"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=message) as caught:
        SafetensorsReader(file)
    assert str(file) in str(caught.value)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(WeightsError, match="there is no such file or folder"):
        SafetensorsReader(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor .* but pytorch_model\.bin"):
        SafetensorsReader(tmp_path)
    _, files = sharded(tmp_path)
    index = tmp_path / INDEX_FILE
    places = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**places["weight_map"], "more": files[0].name}}))
    with pytest.raises(WeightsError, match=r"names more in model-00001.*has no such tensor"):
        SafetensorsReader(tmp_path)
    index.write_text(json.dumps(places))
    files[1].unlink()
    with pytest.raises(WeightsError, match=r"names model-00002-of-00002\.safetensors for 2 tensors.*no such file"):
        SafetensorsReader(index)
    for broken in ("", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'):
        index.write_text(broken)
        with pytest.raises(WeightsError, match="is no index"):
            SafetensorsReader(index)
    index.unlink()
    with pytest.raises(WeightsError, match=r"has model-00001-of-00002.* and no model.*index\.json.*export again, or"):
        SafetensorsReader(tmp_path)
    files[0].rename(tmp_path / "first.safetensors")
    save_file({"layer.0": torch.zeros(1)}, tmp_path / "second.safetensors")
    with pytest.raises(WeightsError, match=r"layer\.0 is in first\.safetensors and second\.safetensors"):
        SafetensorsReader(tmp_path)


def write_values(folder, value, num_files):
    items = [(str(number), torch.full((1000,), value)) for number in range(3)]
    if isinstance(num_files, bytes):
        write_sharded(folder, items, dtype=None, adapter_config=num_files)
        return
    write_sharded(folder, items, dtype=None, max_shard_bytes=4000 if num_files > 1 else 12000)


def values_in(folder):
    try:
        return {number for value in read_all(folder).values() for number in value.tolist()}
    except WeightsError:
        return "refused"


def values_for_any_reader(folder):
    """What is found by our reader; by others, who do not look at digests; and by those who look for an index first."""
    yield values_in(folder)
    index = folder / INDEX_FILE
    if index.exists():
        with contextlib.suppress(ValueError):  # torn: refused by all
            index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
        yield values_in(folder)
        yield values_in(index)


def adapter_in(folder):
    """Return the values that PEFT finds, which reads the config first, and the config beside them."""
    if not (folder / ADAPTER_CONFIG).exists():
        return "refused"
    with SafetensorsReader(folder / ADAPTER_FILE) as reader:
        values = {number for name in reader.tensors for number in reader.read(name).tolist()}
    return values, (folder / ADAPTER_CONFIG).read_bytes()


EXPORTS = [(3, 3), (1, 3), (3, 1), (1, 1), (0, 3), (0, 1)]
"""Number of files of the export before, none at first, and of the one that a crash ends."""

ADAPTERS = [(b"{}", b"{}"), (b"{}", b'{"r": 4}'), (0, b"{}")]
"""The configs of the adapter before and of the one that a crash ends."""

STRANGERS = {".hidden.tmp": b"a", "model.partial": b"b", "notes/model.safetensors": b"c"}


class CrashedExport:
    """An export over another one, recorded, and the rules for what a crash may leave of them."""

    def __init__(self, folder, before, after):
        self.folder = folder / "drive" / "new" / "weights"
        (folder / "drive").mkdir(parents=True)
        self._copy, self._before, self._after = folder / "copy", before, after
        if before:
            write_values(self.folder, 1.0, before)
            for name, content in STRANGERS.items():
                (self.folder / name).parent.mkdir(exist_ok=True)
                (self.folder / name).write_bytes(content)
        with Recording(folder / "drive") as recording:
            write_values(self.folder, 2.0, after)
            recording.mark("exported")
        self.history = recording.history()

    def problem(self, crash):
        shutil.rmtree(self._copy, ignore_errors=True)
        folder = crash.restore(self._copy) / "new" / "weights"
        if not crash.marks and not (self._before or folder.exists()):
            return ""
        if isinstance(self._after, bytes):
            return self._problem_of_adapter(folder, is_done=bool(crash.marks))
        allowed = [{2.0}] if crash.marks else [{1.0} if self._before else "refused", {2.0}]
        if self._before == self._after == 3 and not crash.marks:
            allowed.append("refused")  # one was not whole at every moment
        for found in values_for_any_reader(folder):
            if found not in allowed:
                return f"found {found}"
        write_values(folder, 3.0, 1)
        left = names_and_bytes(folder)
        left.pop(SINGLE_FILE)
        return "" if left == (STRANGERS if self._before else {}) and not (folder / STAGING).exists() else str(set(left))

    def _problem_of_adapter(self, folder, *, is_done):
        """It is never refused where both have one config."""
        allowed = [({2.0}, self._after)]
        if not is_done:
            allowed += [({1.0}, self._before)] + ["refused"] * (self._before != self._after)
        if (found := adapter_in(folder)) not in allowed:
            return f"found {found}"
        write_values(folder, 3.0, b"[]")
        left = names_and_bytes(folder)
        assert adapter_in(folder) == ({3.0}, b"[]")
        others = left.keys() - {ADAPTER_FILE, ADAPTER_CONFIG}
        return "" if others == (STRANGERS.keys() if self._before else set()) else str(others)

    def problems(self, crashes):
        found = ((self.problem(crash), crash) for crash in crashes)
        return [f"{problem}: {crash}" for problem, crash in found if problem]


@pytest.mark.parametrize(("before", "after"), EXPORTS + ADAPTERS)
def test_after_a_crash_an_export_is_the_old_one_the_new_one_or_refused(in_memory, monkeypatch, before, after):
    """Killed, or the power lost, at every moment, on a drive that keeps any part of what was not synced."""
    export = CrashedExport(in_memory, before, after)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what is restored needs no drive
    crashes = [*export.history.kills(), *export.history.power_losses(num_random=500)]
    assert len(crashes) > 40
    assert not export.problems(crashes)


def test_every_sync_of_an_export_is_needed(in_memory, monkeypatch):
    unneeded = {}
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for number, counts in enumerate(EXPORTS + ADAPTERS):
        export = CrashedExport(in_memory / str(number), *counts)
        for sync in export.history.syncs:
            place = sync.caller
            if unneeded.get(place, True):
                unneeded[place] = not any(map(export.problem, export.history.losses_without(sync)))
    assert len(unneeded) > 5
    assert not [place for place in unneeded if unneeded[place]]


def test_a_shard_of_another_export_is_noticed(tmp_path):
    write_values(tmp_path / "old", 1.0, 3)
    write_values(tmp_path / "new", 2.0, 3)
    name = "model-00002-of-00003.safetensors"
    shutil.copy(tmp_path / "old" / name, tmp_path / "new" / name)
    with pytest.raises(WeightsError, match=rf"names {name}, and that file is not the one it was written with.*export"):
        SafetensorsReader(tmp_path / "new")
    shutil.copytree(tmp_path / "old", tmp_path / "twin")
    write_values(tmp_path / "twin", 1.0, 3)
    assert names_and_bytes(tmp_path / "twin") == names_and_bytes(tmp_path / "old"), "the same weights, the same files"


def names_and_bytes(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_not_of_an_export_stays(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "weights"
    elsewhere.mkdir()
    folder.mkdir()
    for name in (SINGLE_FILE, INDEX_FILE, "lock"):
        (elsewhere / name).write_text("a stranger's")
    before = names_and_bytes(elsewhere)
    (folder / STAGING).symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"the weights were not written: .*is in the way, and no folder of an export"):
        write_values(folder, 1.0, 1)
    (folder / STAGING).unlink()
    (folder / STAGING).mkdir()
    (folder / STAGING / SINGLE_FILE).symlink_to(elsewhere / SINGLE_FILE)
    (folder / STAGING / "notes").write_text("a stranger's, too")
    write_values(folder, 1.0, 1)
    assert values_in(folder) == {1.0}
    assert names_and_bytes(elsewhere) == before
    assert names_and_bytes(folder / STAGING) == {"notes": b"a stranger's, too"}


def test_a_second_export_into_the_same_folder_is_refused_while_the_first_is_under_way(tmp_path):
    first = HiddenFolder(tmp_path)
    before = names_and_bytes(tmp_path)
    with pytest.raises(OSError, match="another export into this folder is under way") as caught:
        write_values(tmp_path, 1.0, 3)
    assert caught.value.errno == errno.EBUSY
    assert names_and_bytes(tmp_path) == before
    first.remove()
    write_values(tmp_path, 1.0, 3)
    assert values_in(tmp_path) == {1.0}


def index_naming(folder, place):
    folder.mkdir(exist_ok=True)
    index = folder / INDEX_FILE
    index.write_text(json.dumps({"weight_map": {"a": str(place)}}))
    return index


def test_an_index_names_files_in_its_folder_only(tmp_path):
    folder = tmp_path / "folder"
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "folder").mkdir()
    (folder / "up").symlink_to(tmp_path)
    name = "secret.safetensors"
    for place in (f"../{name}", tmp_path / name, f"up/{name}", "x/../../secret", ""):
        with pytest.raises(WeightsError, match=r"which is not in its folder.*do not trust its source") as caught:
            SafetensorsReader(index_naming(folder, place))
        assert repr(str(place)) in str(caught.value)
    with pytest.raises(WeightsError, match="not in its folder"):
        SafetensorsReader(index_naming(folder, "a\0b"))


def test_the_cache_of_the_hugging_face_hub_can_be_read(tmp_path):
    """Every file of a snapshot is a link to a blob."""
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    blobs.mkdir()
    save_file({"a": torch.ones(1)}, blobs / "0123")
    index_naming(blobs, "model-00001-of-00001.safetensors").rename(blobs / "4567")
    snapshot.mkdir(parents=True)
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/0123")
    (snapshot / INDEX_FILE).symlink_to("../../blobs/4567")
    assert_same_bits(read_all(snapshot), {"a": torch.ones(1)})


def test_names_that_no_file_can_have_are_an_error_in_words(tmp_path):
    with pytest.raises(WeightsError, match=r"names the file 'aaa.*\(5000 characters\).*File name too long"):
        SafetensorsReader(index_naming(tmp_path, "a" * 5000))
    with pytest.raises(WeightsError, match="cannot be opened: File name too long"):
        SafetensorsReader(tmp_path / ("a" * 300))


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path):
    file = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(1000)}, file)
    with SafetensorsReader(file) as reader:
        with file.open("r+b") as shortened:
            shortened.truncate(2000)
        with pytest.raises(WeightsError, match=r"its size_bytes was \d+ and is 2000"):
            reader.read("a")


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a comes twice"):
        write_sharded(tmp_path, [("a", torch.zeros(1)), ("a", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"a would be stored as torch\.complex64"):
        write_sharded(tmp_path, [("a", torch.zeros(1, dtype=torch.complex64))])
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="the weights were not written: Not a directory"):
        write_sharded(tmp_path / "file" / "folder", [("a", torch.zeros(1))])
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


FULL = """
import errno, sys
from pathlib import Path
from unittest.mock import patch
import torch
from nvme_offload.offload.weights.writer import write_sharded
folder = Path(sys.argv[1])
write_sharded(folder, [("a", torch.ones(1000))])
before = {file: file.read_bytes() for file in folder.iterdir()}

def refused(said):
    try:
        items = [(str(number), torch.zeros(1 << 20)) for number in range(40)]
        write_sharded(folder, items, dtype=None, max_shard_bytes=30 << 20)
        sys.exit("it was written")
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        assert said in str(error) and str(folder) in str(error), error
    assert {file: file.read_bytes() for file in folder.iterdir()} == before

refused("needed 160 MiB, free 6")
with patch("shutil.disk_usage", return_value=type("Usage", (), {"free": 1 << 40})):  # somebody else fills it meanwhile
    refused("too little space after")
"""


@needs_mounts
def test_a_full_disk_leaves_nothing_behind_and_the_earlier_export(tmp_path):
    printed(run_python(FULL, tmp_path, mounts={tmp_path: "tmpfs,size=64m"}))
