"""All others stand on these: numbers of bytes as people write them, and progress that is shown."""

import os
import pty
import re
import select
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nvme_offload import OffloadAdamW, initialize
from nvme_offload.offload import progress as progress_module
from nvme_offload.offload.progress import progress, tracked
from nvme_offload.offload.units import GB, GiB, KiB, MiB, TiB, format_bytes, format_rate, parse_bytes
from tests.support.ranks import on_ranks
from tests.support.sharded_model import Model
from tests.support.small_engine import BF16, backward, section


@pytest.mark.parametrize(("text", "size_bytes"), [
    (0, 0), (4096, 4096), (1e9, 10**9), ("0", 0), ("1048576", MiB), ("17B", 17), ("4KiB", 4 * KiB), ("4 KiB", 4 * KiB),
    (" 512MiB ", 512 * MiB), ("8GiB", 8 * GiB), ("2TiB", 2 * TiB), ("1.5GiB", 3 * GiB // 2), ("1kB", 1000),
    ("1KB", 1000), ("3MB", 3_000_000), ("1.5GB", 1_500_000_000),
    ("1.1GB", 1_100_000_000),  # exactly, which 1.1 * 1e9 in floating point is not
    ("1TB", 10**12), ("0.3KiB", 307),  # a part of a byte is dropped
])  # fmt: skip
def test_parse_bytes_accepts(text, size_bytes):
    parsed = parse_bytes(text)
    assert parsed == size_bytes
    assert type(parsed) is int


WORDS = ["", "GiB", "8G", "8gib", "8Gb", "8 GiBs", "-1GiB", "1e9", "1_000", "1,5GB", "0x10", ".5GiB", "1.GiB"]
NO_WORDS = [-1, True, False, 1.5, -2.0, float("inf"), float("nan"), None, [], b"1GiB"]


@pytest.mark.parametrize("text", [*WORDS, "\u0663GiB", *NO_WORDS])
def test_parse_bytes_refuses_and_names_value_and_forms(text):
    with pytest.raises(ValueError, match="is not a number of bytes") as caught:
        parse_bytes(text)
    assert str(caught.value).startswith(repr(text))
    assert '"8GiB", "1.5GB"' in str(caught.value)


@pytest.mark.parametrize(("size_bytes", "text"), [
    (0, "0 B"), (1023, "1023 B"), (KiB, "1 KiB"), (512 * MiB, "512 MiB"), (3 * GiB // 2, "1.5 GiB"),
    (100 * GiB, "100 GiB"), (2 * TiB, "2048 GiB"), (GB, "953.67 MiB"), (-2 * GiB, "-2 GiB"),
])  # fmt: skip
def test_format_bytes(size_bytes, text):
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 2**60))
@example(1152)
def test_what_format_bytes_shows_is_read_back(size_bytes):
    """To two decimals; and a part of a byte is dropped."""
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, abs=0.0051 * size_bytes + 1)


@given(st.integers(0, 2**20))
def test_whole_gib_are_read_back_exactly(num_gib):
    assert parse_bytes(format_bytes(num_gib * GiB)) == num_gib * GiB


@pytest.mark.parametrize(
    ("rate", "text"), [(0, "0.00 GB/s"), (2.314e9, "2.31 GB/s"), (GB, "1.00 GB/s"), (12_345_678, "0.0123 GB/s")]
)
def test_format_rate(rate, text):
    assert format_rate(rate) == text


class Screen:
    """A terminal as standard error, and what was written on it."""

    def __init__(self):
        self._master, slave = pty.openpty()
        self.file = os.fdopen(slave, "w")

    def text(self):
        self.file.flush()
        seen = b""
        while select.select([self._master], [], [], 0.05)[0]:
            seen += os.read(self._master, 1 << 16)
        return seen.decode()

    def close(self):
        self.file.close()
        os.close(self._master)


def put_in_place_of_stderr(monkeypatch, file):
    """For the module alone: pytest has standard error itself, and takes it back between setup and test."""
    monkeypatch.setattr(progress_module, "sys", SimpleNamespace(stderr=file))


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setattr(progress_module, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "REFRESH_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    screen = Screen()
    put_in_place_of_stderr(monkeypatch, screen.file)
    yield screen
    screen.close()


def test_a_bar_says_how_far_it_is_and_goes(screen):
    threads, shown = threading.active_count(), []
    for _ in tracked("counting", [1, 2, 1], size=float):
        shown.append(screen.text())
        assert threading.active_count() == threads
    assert shown[0] == ""
    assert "counting" in shown[1]
    assert "25%" in shown[1]
    assert "75%" in shown[2]
    assert screen.text().endswith("\x1b[2K"), "the line is not cleared"


def test_only_the_outermost_of_several_is_shown(screen):
    with progress("outer", 2) as advance:
        for _ in tracked("inner", [1, 2]):
            advance(1)
    shown = screen.text()
    assert "outer" in shown
    assert "inner" not in shown
    for _ in tracked("later", [1]):
        pass
    assert "later" in screen.text()


def test_it_ends_with_an_exception(screen):
    def fail():
        with progress("failing", 2) as advance:
            advance(1)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert "failing" in screen.text()
    with progress("next", 1) as advance:
        advance(1)
    assert "next" in screen.text()


def test_what_is_done_within_a_second_shows_nothing(screen, monkeypatch):
    monkeypatch.setattr(progress_module, "DELAY_SECONDS", 3600.0)
    for _ in tracked("quick", range(1000)):
        pass
    assert screen.text() == ""


@pytest.mark.parametrize("silenced", ["another rank", "no terminal", "no standard error"])
def test_nobody_else_sees_it(screen, silenced, monkeypatch, tmp_path):
    if silenced == "another rank":
        monkeypatch.setenv("RANK", "1")
    else:
        file = None if silenced == "no standard error" else (tmp_path / "err").open("w")
        put_in_place_of_stderr(monkeypatch, file)
    assert list(tracked("counting", [1, 2, 3])) == [1, 2, 3]
    assert screen.text() == ""
    if silenced == "no terminal":
        file.close()
        assert (tmp_path / "err").read_text() == ""


@on_ranks(2)
def test_the_first_rank_of_a_group_alone_shows_it(rank, world_size):
    """Also without a launcher."""
    patch, screen = pytest.MonkeyPatch(), Screen()
    patch.setattr(progress_module, "DELAY_SECONDS", 0.0)
    patch.setenv("TERM", "xterm")
    patch.delenv("RANK")
    put_in_place_of_stderr(patch, screen.file)
    assert list(tracked("counting", [1, 2, 3])) == [1, 2, 3]
    assert ("counting" in screen.text()) == (rank == 0)


def test_each_long_thing_has_one(alone, screen, tmp_path):
    """Birth, from initialisers and from files, placement, save, verification, load, export, state dicts."""
    seen = {}

    def during(what, act):
        screen.text()
        result = act()
        kinds = "initializing|loading|placing|writing|verifying|exporting|reading"
        found = re.findall(rf"(?:{kinds}) the \w+", screen.text())
        seen[what] = list(dict.fromkeys(found))
        return result

    def on_meta():
        with torch.device("meta"):
            return Model()

    config = section(path=tmp_path, **BF16)
    with during("birth", lambda: initialize(on_meta(), config)) as engine:
        for step in range(2):
            backward(engine, 0, step)
            engine.step()
        during("save", lambda: engine.save_checkpoint(tmp_path / "saved"))
        during("load", lambda: engine.load_checkpoint(tmp_path / "saved"))
        during("export", lambda: engine.export_safetensors(tmp_path / "weights"))
    with during("files", lambda: initialize(on_meta(), config, weights=tmp_path / "weights")):
        pass
    with during("placement", lambda: initialize(Model(), config)):
        pass
    model = torch.nn.Linear(64, 64).bfloat16()
    with OffloadAdamW(model.parameters(), offload={}) as optimizer:
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        state = during("state_dict", optimizer.state_dict)
        during("load_state_dict", lambda: optimizer.load_state_dict(state))
    assert seen.pop("load") == ["verifying the checkpoint", "loading the checkpoint"]
    said = {"birth": "initializing the model", "save": "writing the checkpoint", "export": "exporting the weights"}
    said |= {"files": "loading the weights", "placement": "placing the state", "state_dict": "reading the state"}
    assert seen == {what: [words] for what, words in said.items()} | {"load_state_dict": ["writing the state"]}
