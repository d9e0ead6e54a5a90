"""`offload tune`: the choice on made-up scores, and a short search on a real folder."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nvme_offload import OffloadConfig
from nvme_offload.offload.units import KiB, MiB
from nvme_offload.perf.cli import app
from nvme_offload.perf.tune.command import Scores, Setting

DEFAULT = Setting(engine="io_uring", block_size=MiB, queue_depth=32)
SMALL = Setting(engine="io_uring", block_size=MiB, queue_depth=8)
LARGE = Setting(engine="io_uring", block_size=4 * MiB, queue_depth=64)


def scores(**by_name):
    found = Scores()
    for name, values in by_name.items():
        for value in values:
            found.add({"default": DEFAULT, "small": SMALL, "large": LARGE}[name], value, value * 1e9)
    return found


def test_within_the_noise_the_simplest_wins():
    found = scores(default=[1.0, 1.02, 0.98], small=[0.99, 1.0, 1.01], large=[1.01, 1.02, 1.0])
    assert found.choose([DEFAULT, SMALL, LARGE]) == SMALL


def test_a_real_gain_wins_although_it_is_larger():
    found = scores(default=[1.0, 1.01, 0.99], small=[0.6, 0.61, 0.6], large=[1.3, 1.31, 1.29])
    assert found.choose([DEFAULT, SMALL, LARGE]) == LARGE


def test_one_lucky_score_does_not_win():
    found = scores(default=[1.0, 1.0, 1.0], large=[1.0, 1.5, 1.0])
    assert found.choose([DEFAULT, LARGE]) == DEFAULT


def test_simpler_means_fewer_bytes_in_flight_then_fewer_rings_then_the_first_engine():
    one_ring = Setting(engine="io_uring", block_size=MiB, queue_depth=16)
    two_rings = Setting(engine="io_uring", block_size=MiB, queue_depth=8, rings=2)
    other = Setting(engine="pyuring", block_size=MiB, queue_depth=16)
    assert sorted([LARGE, other, two_rings, one_ring], key=lambda setting: setting.cost) == [
        one_ring,
        other,
        two_rings,
        LARGE,
    ]


def test_the_best_the_simple_and_the_defaults_are_finalists():
    found = scores(default=[1.0], small=[0.5], large=[1.4])
    assert found.finalists(DEFAULT) == [LARGE, DEFAULT]
    assert SMALL in scores(default=[1.0], small=[0.95], large=[1.0]).finalists(DEFAULT)


def test_neighbours_stay_in_range():
    edge = Setting(engine="io_uring", block_size=64 * KiB, queue_depth=1)
    assert all(near.block_size >= 64 * KiB and near.queue_depth >= 1 for near in edge.neighbours())
    assert len(DEFAULT.neighbours()) == 6


def test_a_short_search_writes_a_section_that_can_be_read(tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    output = tmp_path / "aio.json"
    command = ["tune", "--path", drive, "--size", "64MiB", "--seconds", "3", "--direct", "optional"]
    result = CliRunner().invoke(app, [*map(str, command), "--output", str(output)])
    assert result.exit_code == 0, result.output
    aio = OffloadConfig.from_file(output).aio
    assert aio.block_size >= 64 * KiB
    assert json.loads(output.read_text())["aio"]["queue_depth"] == aio.queue_depth
    assert '"block_size"' in result.stdout
    assert f"saved {output}" in result.stderr
    assert not list(drive.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seconds", "0"), "no time"),
        (("--seconds", "nan"), "no time"),
        (("--seconds", "inf"), "no time"),
        (("--size", "1MiB"), "too small"),
        (("--output", "/no/such/folder/aio.json"), "no directory"),
        (("--output", str(Path(__file__).parent)), "no file that can be written"),
    ],
)
def test_bad_values(tmp_path, monkeypatch, arguments, said):
    monkeypatch.setenv("COLUMNS", "400")
    result = CliRunner().invoke(app, ["tune", "--path", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert said in result.output
    assert not list(tmp_path.iterdir())
