"""Bars for what takes long: seen by people at a terminal, by nobody else, and gone when it is done."""

import os
import pty
import re
import select
import threading
from types import SimpleNamespace

import pytest
import torch

from nvme_offload import OffloadAdamW, initialize
from nvme_offload.offload import progress as progress_module
from nvme_offload.offload.progress import progress, tracked
from tests.support.sharded_model import Model
from tests.support.small_engine import BF16, backward, section


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


def test_each_long_thing_has_one(alone, screen, tmp_path):
    """Birth, from initialisers and from files, placement, save, verification, load, export, state dicts."""
    seen = {}

    def during(what, act):
        screen.text()
        result = act()
        found = re.findall(
            r"(?:initializing|loading|placing|writing|verifying|exporting|reading) the \w+", screen.text()
        )
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
    assert seen == {
        "birth": ["initializing the model"],
        "save": ["writing the checkpoint"],
        "load": ["verifying the checkpoint", "loading the checkpoint"],
        "export": ["exporting the weights"],
        "files": ["loading the weights"],
        "placement": ["placing the state"],
        "state_dict": ["reading the state"],
        "load_state_dict": ["writing the state"],
    }
