"""Ranks on several hosts: network namespaces on one bridge, with host names and mounts of their own.

All of it lasts as long as somebody has it open: there is nothing to remove, however a test ends.
"""

import ctypes
import os
import socket
import subprocess
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.ranks import start_ranks
from tests.support.sandbox import check

_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_BIND, _REC, _PRIVATE = 4096, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """Where a process runs."""

    host: str
    mounts: dict[Path, Path]  # a folder is seen as another one, which exists, by this process alone


def why_not():
    """Why hosts cannot be made here; nothing where they can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which need root here"
    try:
        with ExitStack() as opened:
            _Network(["probe"], opened)
    except OSError as error:
        return f"network namespaces are not allowed: {error}"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are of no use: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


def run_on_hosts(function, places, *args):
    """Run ``function(rank, world_size, *args)`` at each place, as a launcher would that gives ranks in this order.

    There is no process group, and rank 0 is its address. Returns their results, in the order of the places.
    """
    about = {"MASTER_ADDR": places[0].host, "MASTER_PORT": "29500"}
    with entries(places) as ready:
        return start_ranks(function, [(entry, about) for entry in ready], *args)


@contextmanager
def entries(places):
    """Make the hosts; one function for each place, which takes the process that calls it there."""
    with ExitStack() as opened:
        network = _Network(dict.fromkeys(place.host for place in places), opened)
        names = Path(opened.enter_context(tempfile.TemporaryDirectory()), "hosts")
        names.write_text("".join(f"{address} {host}\n" for host, address in network.addresses.items()))
        known = {Path("/etc/hosts"): names}
        yield [_Entry(network.namespaces[place.host], place.mounts | known) for place in places]


class _Entry:
    """Have this process, which has one thread, be on a host."""

    def __init__(self, namespaces, mounts):
        self.namespaces, self.mounts = namespaces, mounts

    def __call__(self):
        for path in self.namespaces:
            with open(path) as namespace:
                check(_libc.setns(namespace.fileno(), 0), path)
        check(_libc.unshare(_NEWNS), "unshare")
        check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None), "mount --make-rprivate /")
        for point, folder in self.mounts.items():
            check(_libc.mount(os.fsencode(folder), os.fsencode(point), None, ctypes.c_ulong(_BIND), None), str(point))


class _Network:
    """Hosts with these names, as namespaces that `opened` closes."""

    def __init__(self, names, opened):
        self.addresses, self.namespaces = {}, {}
        self._opened = opened
        self._switch, _ = self._made("switch", lambda: _run("ip link add bridge type bridge", "ip link set bridge up"))
        for number, name in enumerate(names, start=1):
            self.addresses[name] = f"10.77.0.{number}"
            self.namespaces[name] = self._made(name, lambda number=number, name=name: self._join(number, name))

    def _join(self, number, name):
        _run(
            f"ip link add eth0 type veth peer name port{number} netns {self._switch}",
            f"ip addr add {self.addresses[name]}/24 dev eth0",
            "ip link set eth0 up",
            "ip link set lo up",
            f"nsenter --net={self._switch} ip link set port{number} master bridge up",
        )

    def _made(self, name, furnish):
        """Paths of new namespaces of network and host name, furnished in a thread that is there and nowhere else."""
        found, problems = [], []

        def make():
            try:
                check(_libc.unshare(_NEWNET | _NEWUTS), "unshare")
                socket.sethostname(name)
                for kind in ("net", "uts"):
                    number = os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                    self._opened.callback(os.close, number)
                    found.append(f"/proc/{os.getpid()}/fd/{number}")
                furnish()
            except BaseException as problem:
                problems.append(problem)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if problems:
            raise problems[0]
        return found


def _run(*commands):
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)
