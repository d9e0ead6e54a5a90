"""What `offload doctor` finds, on this machine, in confined children, and on machines made of files."""

import errno
import io
import json
import os
from unittest.mock import Mock

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from nvme_offload import OffloadConfig
from nvme_offload.aio_native import _native, uring_refusal
from nvme_offload.offload.host import available_memory, disks
from nvme_offload.offload.host import proc as system_files
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.units import GiB, MiB
from nvme_offload.perf.doctor import command, engines, paths
from nvme_offload.perf.doctor.command import doctor
from nvme_offload.perf.doctor.findings import Group, Level, Report, print_report, saw
from nvme_offload.perf.doctor.trial import TrialSeen
from nvme_offload.perf.measure import machine
from tests.support.forked import forked_children
from tests.support.sandbox import IO_URING_CALLS, can_filter, needs_mounts, run_python

app = typer.Typer(add_completion=False)
app.command()(doctor)

CHILD = """
import json, multiprocessing, sys
from pathlib import Path
from nvme_offload.perf.doctor.command import examine
from tests.support import forked

forked.FORKED = multiprocessing.get_context("fork")  # it is confined already
forked.forked_children().start()
folders = [Path(folder) for folder in sys.argv[2:]]
reports = [examine(folders, Path(config) if config else None) for config in sys.argv[1].split(",")]
json.dump([report.as_dict() for report in reports], sys.stdout)
"""


@pytest.fixture(scope="module", autouse=True)
def _forked():
    with forked_children():
        yield


@pytest.fixture
def tried(monkeypatch):
    """Folders in which a run would be tried; nothing is wrong there."""
    folders = []
    good = TrialSeen(alignment=(512, 512), num_cached=0, written_bytes=8, reached_bytes=8, moved=False)
    monkeypatch.setattr(paths, "try_folder", lambda path, *_: folders.append(path) or good)
    return folders


def section_of(path=None, *, engine="auto", **aio):
    offload = {"device": "nvme", "nvme_path": str(path), "staging_budget": "16MiB"} if path else {}
    return {"zero_optimization": {"offload_optimizer": offload}, "aio": {"engine": engine, **aio}}


def config_of(**sections):
    return OffloadConfig.from_dict(section_of(**sections))


def write_config(file, section):
    file.write_text(json.dumps(section))
    return file


def examine(*arguments):
    result = CliRunner().invoke(app, ["--json", *map(str, arguments)])
    document = json.loads(result.stdout)
    assert result.exit_code == document["exit_status"]
    return document


def examine_confined(configs, *folders, **confinement):
    done = run_python(CHILD, ",".join(map(str, configs)), *folders, timeout=280, **confinement)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def findings_of(document, title=""):
    groups = [group for group in document["groups"] if group["title"].startswith(title)]
    return {finding["check"]: finding for group in groups for finding in group["findings"]}


def levels(findings):
    return {finding.check: finding.level for finding in findings}


class TestHealthyFolder:
    @pytest.fixture(scope="class", name="document")
    @staticmethod
    def _document(tmp_path_factory):
        home = tmp_path_factory.mktemp("healthy")
        path = home / "swap"
        path.mkdir()
        before = os.stat(path).st_nlink
        document = examine("--config", write_config(home / "c.json", section_of(path)))
        assert os.listdir(path) == [], "something was left behind"
        assert os.stat(path).st_nlink == before
        return document | {"path": str(path)}

    def test_no_error_is_found_and_a_run_went_through_the_engine_that_is_named(self, document):
        assert document["exit_status"] in (0, 1)
        found = findings_of(document)
        assert found["section"]["level"] == "ok"
        run = findings_of(document, f"Path {document['path']}")["run"]
        assert run["level"] == "ok"
        assert document["engine"] in found["engine"]["found"]
        assert document["engine"] in run["found"]

    def test_every_question_of_the_page_is_answered(self, document):
        asked = {"kernel", "io_uring", "engine", "memory"}
        asked |= {"versions", "GPU", "folder", "file system", "direct I/O", "promised space", "written", "space", "run"}
        assert asked <= set(findings_of(document))
        for finding in findings_of(document).values():
            assert finding["found"]
            assert finding["level"] == "ok" or finding["meaning"]


class TestOutput:
    REPORT = Report(
        (
            Group("One", (saw("kernel", "6.1"), saw("space", "1 GiB").warning("little", "rm [x]"))),
            Group("Path /a[b]", (saw("drive", "vda").note("virtual"),)),
        ),
        "io_uring",
    )

    def test_lines_are_whole_and_in_order(self):
        stream = io.StringIO()
        print_report(self.REPORT, Console(file=stream, width=20))
        assert stream.getvalue().splitlines() == [
            "One",
            "  ok       kernel: 6.1",
            "  warning  space: 1 GiB",
            "           means: little",
            "           to do: rm [x]",
            "",
            "Path /a[b]",
            "  note     drive: vda",
            "           means: virtual",
            "",
            "NVMe offload works, with reservations: 1 warning, 1 note.",
        ]

    @pytest.mark.parametrize(("found", "status", "words"), [
        ([], 0, "All is fine."), ([Level.OK], 0, "All is fine."),
        ([Level.NOTE, Level.NOTE], 0, "All is fine: 2 notes."),
        ([Level.WARNING, Level.OK], 1, "with reservations: 1 warning."),
        ([Level.NOTE, Level.ERROR, Level.WARNING], 2, "does not work like this: 1 error, 1 warning, 1 note."),
    ])  # fmt: skip
    def test_exit_status_and_summary(self, found, status, words):
        report = Report((Group("x", tuple(saw("a", "b").at(level, "c") for level in found)),), None)
        assert report.exit_status == status
        assert report.summary().endswith(words)

    def test_without_a_folder_it_says_what_was_not_looked_at(self):
        result = CliRunner().invoke(app, [])
        assert "note     paths: none was named" in result.stdout
        assert "offload doctor /mnt/nvme0" in result.stdout


class TestConfiguration:
    def test_every_problem_is_an_error_of_its_own(self, tmp_path):
        file = write_config(tmp_path / "c.json", {"aio": {"queue_depth": 0, "bloksize": 1}})
        document = examine("--config", file)
        (group,) = [group for group in document["groups"] if group["title"] == f"Configuration {file}"]
        assert [finding["level"] for finding in group["findings"]] == ["error", "error"]
        missing = examine("--config", tmp_path / "none.json")
        assert "there is no such section" in findings_of(missing, "Configuration")["section"]["found"]
        assert document["exit_status"] == missing["exit_status"] == 2

    def test_keys_without_effect_and_a_device_without_nvme_are_noted(self, tmp_path):
        file = write_config(tmp_path / "c.json", {"aio": {"thread_count": 4}})
        found = findings_of(examine("--config", file), "Configuration")
        assert (found["section"]["level"], found["device"]["level"]) == ("note", "note")
        assert found["section"]["found"].startswith("aio.thread_count = 4")
        assert found["left out"]["found"].startswith("gradient_clipping: DeepSpeed clips at 1.0")

    def test_the_folders_of_all_tiers_are_examined(self, tmp_path, tried):
        places = [tmp_path / name for name in ("state", "halves", "gradients", "inputs")]
        for place in places:
            place.mkdir()
        state, halves, gradients, inputs = ({"device": "nvme", "nvme_path": str(place)} for place in places)
        tiers = {"offload_param": halves, "offload_optimizer": state}
        section = {"bf16": {"enabled": True}, "zero_optimization": tiers, "offload_gradients": gradients}
        section["activations"] = inputs
        document = examine("--config", write_config(tmp_path / "c.json", section))
        assert {f"Path {place}" for place in places} <= {group["title"] for group in document["groups"]}
        assert set(tried) == set(places)
        for key, place in (("zero_optimization", places[1]), ("activations", places[3])):
            tiers.pop("offload_optimizer", None)
            written = write_config(tmp_path / "c.json", {"bf16": section["bf16"], key: section[key]})
            document = examine("--config", written)
            assert "device" not in findings_of(document, "Configuration")
            assert findings_of(document, f"Path {place}")["run"]["level"] == "ok"


class TestFolders:
    def test_a_missing_one_and_a_file(self, tmp_path):
        finding = paths.check_usable(tmp_path / "not here")
        assert (finding.level, finding.remedy) == (Level.ERROR, f"mkdir -p '{tmp_path}/not here'")
        (tmp_path / "file").touch()
        assert paths.check_usable(tmp_path / "file").found == "is not a directory"
        assert paths.check_usable(tmp_path / "file/below").level is Level.ERROR

    def test_one_that_belongs_to_somebody_else(self, tmp_path):
        folder = tmp_path / "theirs"
        folder.mkdir(mode=0o555)
        (document,) = examine_confined([""], folder, ordinary_user=True)
        finding = findings_of(document, f"Path {folder}")["folder"]
        assert (finding["level"], document["exit_status"]) == ("error", 2)
        assert "cannot be written by user" in finding["found"]
        assert "sudo install -d -o" in finding["remedy"]

    def test_a_drive_that_fails_meanwhile_is_a_finding(self, tmp_path, monkeypatch):
        monkeypatch.setattr(paths, "check_space", Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
        findings, _ = paths.check_path(tmp_path, config_of(), [])
        assert "Stale file handle" in findings[-1].found

    @pytest.mark.parametrize(
        ("sabotage", "said"),
        [
            ("Path(path).write_bytes(os.urandom(Path(path).stat().st_size))", "ResumeError: "),
            ("Path(path).unlink()", "ResumeError: "),
            ("shutil.rmtree(Path(path).parent)", "step 2 was committed, and after a kill step 0 was found"),
        ],
    )
    def test_a_drive_that_does_not_keep_what_was_committed_is_an_error(self, tmp_path, sabotage, said):
        code = f"""
import json, os, shutil, sys
from dataclasses import asdict
from pathlib import Path
from nvme_offload.perf.doctor import trial

def killed(site, engine, before=trial._killed):
    failure = before(site, engine)
    for path in site.folder.glob("*/swap"):
        {sabotage}
    return failure

trial._killed = killed
site = trial.TrialSite(Path(sys.argv[1]), {{}}, ["aiofiles"])
trial.trial(iter([site]), lambda kind, seen: print(json.dumps(asdict(seen))))
"""
        done = run_python(code, tmp_path)
        assert done.returncode == 0, done.stderr
        (failure,) = json.loads(done.stdout)["failures"].values()
        assert said in failure

    def test_two_on_one_drive(self, tmp_path, monkeypatch, tried):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        disk = machine.Drive("nvme0n1", None, (), False, "none", 1023, 1280)
        monkeypatch.setattr(paths, "drive_of", lambda path: disk)
        finding = findings_of(examine(tmp_path / "a", tmp_path / "b", tmp_path / "a"), "All paths")["paths"]
        assert tried == [tmp_path / "a", tmp_path / "b"]
        assert finding["level"] == "note"
        assert finding["found"] == f"{tmp_path}/a, {tmp_path}/b are on the same drive, nvme0n1"

    @pytest.mark.parametrize(
        ("blocks", "free", "level"), [(1000, 900, Level.OK), (1000, 0, Level.WARNING), (0, 0, Level.OK)]
    )
    def test_space(self, monkeypatch, blocks, free, level):
        fields = {"f_blocks": blocks, "f_bavail": free, "f_frsize": GiB}
        monkeypatch.setattr(os, "statvfs", lambda path: type("System", (), fields))
        assert paths.check_space("").level is level


class TestFileSystems:
    @pytest.mark.parametrize(
        "kind", ["ext4", "xfs", "overlay", "nfs4", "cifs", "9p", "virtiofs", "fuse.sshfs", "lustre"]
    )
    def test_what_a_trial_cannot_show_is_said_by_kind(self, kind):
        finding = paths.check_file_system(system_files.Mount(1, "/", "/mnt", kind, "x", ()))
        is_local = kind in ("ext4", "xfs", "overlay")
        assert finding.level is (Level.OK if is_local else Level.WARNING)
        assert is_local or "on another machine" in finding.meaning

    @pytest.mark.parametrize(
        ("came", "expected"),
        [
            ({}, {}),
            ({"moved": True}, {"promised space": Level.WARNING}),
            ({"moved": None}, {"promised space": Level.NOTE}),
            ({"num_cached": 7}, {"direct I/O": Level.WARNING}),
            ({"num_cached": 7, "direct": "disabled"}, {"direct I/O": Level.NOTE}),
            ({"reached_bytes": 0}, {"written": Level.WARNING}),
            ({"reached_bytes": None}, {"written": Level.NOTE}),
            ({"said": ["it is memory"]}, {"run says": Level.WARNING}),
            ({"failures": {"b": "no"}}, {"run": Level.WARNING}),
            ({"failures": {"a": "no"}}, {"run": Level.ERROR}),
        ],
    )
    def test_what_came_of_a_trial_is_what_is_said(self, came, expected):
        config = config_of(direct=came.pop("direct", "required"))
        seen = TrialSeen(
            **{"alignment": (512, 512), "num_cached": 0, "written_bytes": 8, "reached_bytes": 8, "moved": False} | came
        )
        findings = [finding for finding in paths.check_trial(seen, ["a", "b"], config) if finding.level is not Level.OK]
        assert levels(findings) == expected
        assert all(finding.meaning for finding in findings)

    @needs_mounts
    def test_memory_file_systems_for_real(self, tmp_path):
        tmpfs, ramfs = tmp_path / "tmpfs", tmp_path / "ramfs"
        tmpfs.mkdir()
        ramfs.mkdir()
        lenient = write_config(tmp_path / "c.json", section_of(direct="optional"))
        strict, optional = examine_confined(
            ["", lenient], tmpfs, ramfs, mounts={tmpfs: "tmpfs", ramfs: "ramfs"}, memlock_bytes=None
        )
        held, refused, allowed = (findings_of(document, f"Path {folder}") for document, folder in (
            (strict, tmpfs), (strict, ramfs), (optional, ramfs)
        ))  # fmt: skip
        assert (held["run"]["level"], held["run says"]["level"]) == ("ok", "warning")
        assert f"nvme_path {tmpfs} is on tmpfs, which is memory" in held["run says"]["found"]
        assert (refused["run"]["level"], strict["exit_status"]) == ("error", 2)
        assert "this file system has no direct I/O (O_DIRECT)" in refused["run"]["found"]
        assert (allowed["run"]["level"], allowed["run says"]["level"], allowed["direct I/O"]["level"]) == (
            "ok", "warning", "warning"
        )  # fmt: skip
        assert allowed["space"]["found"] == "not counted by this file system"
        assert optional["exit_status"] == 1


@pytest.fixture
def sys_tree(tmp_path, monkeypatch):
    """A /sys in which `make` puts drives."""
    root = tmp_path / "sys"
    (root / "dev/block").mkdir(parents=True)
    monkeypatch.setattr(disks, "SYS", root)

    def make(number, name, partition=None, members=(), **queue):
        disk = root / "devices" / name
        (disk / "queue").mkdir(parents=True)
        usual = {"rotational": 0, "scheduler": "[none] mq-deadline", "nr_requests": 1023}
        for key, value in (usual | {"max_sectors_kb": 1280} | queue).items():
            (disk / "queue" / key).write_text(f"{value}\n")
        for member in members:
            (disk / "slaves" / member).mkdir(parents=True)
        target = disk
        if partition:
            target = disk / partition
            target.mkdir()
            (target / "partition").write_text("1\n")
        (root / f"dev/block/{number}").symlink_to(target)
        major, minor = map(int, number.split(":"))
        return machine.find_drive(os.makedev(major, minor), None)

    return make


class TestDrives:
    def test_a_partition_is_judged_by_its_disk_and_a_combination_names_its_members(self, sys_tree):
        disk = sys_tree("259:1", "nvme0n1", partition="nvme0n1p1")
        assert (disk.name, disk.rotational, disk.scheduler, disk.nr_requests) == ("nvme0n1", False, "none", 1023)
        assert levels(paths.check_drive(disk)) == {"drive": Level.OK}
        disk = sys_tree("253:0", "dm-0", members=("nvme1n1", "nvme0n1"))
        assert "dm-0 on nvme0n1, nvme1n1" in next(paths.check_drive(disk)).found

    @pytest.mark.parametrize(
        ("name", "level"),
        [("sda", Level.WARNING), ("vda", Level.NOTE), ("loop0", Level.NOTE)],
    )
    def test_drives_that_are_not_nvme(self, sys_tree, name, level):
        finding = next(paths.check_drive(sys_tree("8:0", name, rotational=1)))
        assert finding.level is level
        assert name != "vda" or finding.remedy.endswith("offload bench --path PATH")

    def test_a_scheduler_that_does_not_suit(self, sys_tree):
        _, found = paths.check_drive(sys_tree("259:0", "nvme0n1", scheduler="none [bfq]"))
        assert (found.check, found.level) == ("scheduler", Level.NOTE)
        assert found.remedy == "echo none | sudo tee /sys/block/nvme0n1/queue/scheduler"

    def test_a_file_system_with_device_numbers_of_its_own(self, sys_tree, tmp_path):
        sys_tree("259:0", "nvme0n1")
        (tmp_path / "sys/class/block").mkdir(parents=True)
        (tmp_path / "sys/class/block/nvme0n1").symlink_to(tmp_path / "sys/devices/nvme0n1")
        mount = system_files.Mount(1, "/", "/mnt", "btrfs", "/dev/no-such-folder/nvme0n1", ())
        assert machine.find_drive(os.makedev(0, 42), mount).name == "nvme0n1"
        assert machine.find_drive(os.makedev(0, 42), None) is None


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A /proc (and control groups) written by the test: `write("meminfo", text)`."""
    root = tmp_path / "proc"
    for module in (system_files, available_memory):
        monkeypatch.setattr(module, "PROC", root)

    def write(name, text):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    write("meminfo", "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n")
    return write


class TestMemory:
    def limit(self, proc, tmp_path, version, limit, used, membership="/job/step"):
        group = tmp_path / "cgroup/job/step"
        group.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for name, value in zip(names, (limit, used), strict=True):
            (group.parent / name).write_text(f"{value}\n")  # the limit is that of an ancestor
        (group.parent / "memory.stat").write_text(f"inactive_file {MiB}\ntotal_inactive_file {MiB}\n")
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        proc("self/mountinfo", f"30 1 0:26 / {tmp_path}/cgroup rw - {kind} cgroup {options}\n")
        proc("self/cgroup", f"0::{membership}\n" if version == 2 else f"4:memory:{membership}\n0::/\n")

    @pytest.mark.parametrize("version", [1, 2])
    def test_a_limit_of_an_ancestor_counts(self, proc, tmp_path, version):
        self.limit(proc, tmp_path, version, 256 * MiB, 100 * MiB)
        assert available_memory.available_bytes() == 157 * MiB, "page cache can be dropped"
        finding = command.check_memory(config_of())
        assert finding.level is Level.ERROR
        assert f"cgroup v{version} limit 256 MiB, 157 MiB of it left" in finding.found
        assert "staging_budget" in finding.remedy

    @pytest.mark.parametrize(("budget", "level"), [("12GiB", Level.OK), ("17GiB", Level.ERROR), ("auto", Level.OK)])
    def test_a_host_budget_counts_instead_of_the_staging_buffers(self, proc, budget, level):
        finding = command.check_memory(OffloadConfig.from_dict({"host_budget": budget}))
        assert finding.level is level
        assert level is Level.OK or finding.remedy == "write less than 17 GiB for host_budget"

    def test_a_membership_outside_the_mount_is_looked_for_at_its_root(self, proc, tmp_path):
        self.limit(proc, tmp_path, 2, 2 * GiB, GiB, membership="/../other")
        (tmp_path / "cgroup/memory.max").write_text(f"{GiB}\n")
        (tmp_path / "cgroup/memory.current").write_text("0\n")
        assert available_memory.cgroup_limit().limit_bytes == GiB

    @pytest.mark.parametrize("unlimited", ["max", 2**63 - 4096])
    def test_no_limit_is_none(self, proc, tmp_path, unlimited):
        self.limit(proc, tmp_path, 2, unlimited, 0)
        assert available_memory.cgroup_limit() is None

    def test_staging_buffers_that_take_half_are_a_warning(self, proc):
        finding = command.check_memory(config_of())
        assert (finding.level, finding.found) == (Level.OK, "16 GiB available of 32 GiB; no cgroup limit")
        proc("meminfo", "MemTotal: 33554432 kB\nMemAvailable: 819200 kB\n")
        assert command.check_memory(config_of()).level is Level.WARNING


class TestEngines:
    @pytest.mark.parametrize(
        ("release", "level"),
        [("6.18.44-x", Level.OK), ("6.1", Level.OK), ("5.15.0-101-generic", Level.NOTE), ("4.19", Level.WARNING)],
    )
    def test_kernels(self, release, level):
        assert engines.check_kernel(release).level is level

    @pytest.mark.parametrize(
        ("code", "sysctl", "seccomp", "meaning", "remedy"),
        [
            (errno.EPERM, "0", 2, "a seccomp filter forbids io_uring", "seccomp=unconfined"),
            (errno.EPERM, None, 2, "a seccomp filter forbids io_uring", "seccomp=unconfined"),
            (errno.EPERM, "2", 0, "the sysctl forbids io_uring to everybody;", "sysctl -w kernel.io_uring_disabled=0"),
            (errno.EPERM, "1", 2, "CAP_SYS_ADMIN outside kernel.io_uring_group, and a seccomp filter", "sysctl -w"),
            (errno.EPERM, "0", 0, "a security module", "ausearch"),
            (errno.ENOSYS, None, 2, "a seccomp filter hides it", "6.1 or newer"),
            (errno.EMFILE, "0", 0, "no file descriptor", "ulimit -n"),
        ],
    )
    def test_what_forbids_io_uring(self, proc, tmp_path, monkeypatch, code, sysctl, seccomp, meaning, remedy):
        if sysctl is not None:
            (tmp_path / "sysctl").write_text(f"{sysctl}\n")
        monkeypatch.setattr(uring_refusal, "SYSCTL", tmp_path / "sysctl")
        proc("self/status", f"CapEff:\t0\nSeccomp:\t{seccomp}\nSeccomp_filters:\t{seccomp // 2}\n")
        finding = engines.check_io_uring(code)
        assert finding.level is Level.WARNING
        assert errno.errorcode[code] in finding.found
        assert f"kernel.io_uring_disabled = {'absent' if sysctl is None else sysctl}" in finding.found
        assert meaning in finding.meaning
        assert remedy in finding.remedy

    @pytest.mark.skipif(not hasattr(_native, "UringEngine"), reason="built without liburing: that is the reason given")
    @pytest.mark.skipif(not can_filter(), reason="no seccomp filter is written for this architecture")
    def test_a_real_filter(self, tmp_path):
        explicit = write_config(tmp_path / "c.json", section_of(engine="io_uring"))
        auto, named = examine_confined(["", explicit], tmp_path, forbid=list(IO_URING_CALLS))
        finding = findings_of(auto)["io_uring"]
        assert (finding["level"], auto["exit_status"], auto["engine"]) == ("warning", 1, "aiofiles")
        assert "refused with EPERM" in finding["found"]
        assert "seccomp filter active" in finding["found"]
        assert "seccomp=unconfined" in finding["remedy"]
        assert "auto takes aiofiles, because io_uring and pyuring" in findings_of(auto)["engine"]["found"]
        assert findings_of(auto)["run"]["found"].endswith("through aiofiles")
        assert (named["exit_status"], named["engine"]) == (2, None)
        choice = findings_of(named)["engine"]
        assert (choice["level"], choice["remedy"]) == (
            "error",
            'write "auto" for aio.engine, which takes aiofiles here',
        )
        assert "seccomp" in choice["meaning"]

    @pytest.mark.skipif(not can_filter(), reason="no seccomp filter is written for this architecture")
    def test_a_filter_that_lets_rings_be_made_but_not_used(self, tmp_path):
        (document,) = examine_confined([""], tmp_path, forbid=["enter"])
        assert (document["engine"], document["exit_status"]) == ("aiofiles", 1)

    def test_a_build_without_liburing(self, monkeypatch):
        why = "the package was built without liburing. Install its development files"
        monkeypatch.setattr(engines, "probe_errno", lambda entries: 0)
        probe = engines.EngineProbe({"io_uring": why})
        found = {finding.check: finding for finding in engines.check_engines(config_of(), probe)}
        assert (found["C++ engine"].level, found["C++ engine"].remedy) == (Level.WARNING, why)
        assert found["engine"].found == "auto takes pyuring, because io_uring cannot be opened"


class TestSoftware:
    @pytest.mark.parametrize(
        ("pin_memory", "works", "level"),
        [(None, True, Level.OK), (True, False, Level.ERROR), (None, False, Level.NOTE), (False, False, Level.NOTE)],
    )
    def test_a_gpu(self, monkeypatch, pin_memory, works, level):
        def pin(region, device):
            if not works:
                raise RuntimeError("cudaHostRegister refused 1 MiB (CUDA error 2)")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
        monkeypatch.setattr(HostRegion, "pin", pin)
        config = OffloadConfig.from_dict({"zero_optimization": {"offload_optimizer": {"pin_memory": pin_memory}}})
        finding = command.check_gpu(config)
        assert finding.level is level
        assert finding.found.startswith("GPU 0, GPU 1")
