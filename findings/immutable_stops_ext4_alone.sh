#!/usr/bin/env bash
# `chattr +i` stops writes through a descriptor that is open already on ext4, not on XFS and btrfs.
#
# Guess: Whether a file may be written is looked at when it is opened: a descriptor that is open for
#   writing goes on writing behind `chattr +i`, on every file system.
# Seen: On ext4 the next write and the next ftruncate through it are EPERM. On XFS and btrfs both
#   work, and the bytes of the immutable file change.
# Version: Linux 6.18, ext4, XFS, btrfs.
# Why: ext4 asks for the flag in each write (ext4_write_checks) and truncate (ext4_setattr, both in
#   fs/ext4); for the others it counts where a file is opened, renamed or removed.
# Means: An immutable flag protects no checkpoint that somebody still has open, and on ext4 it ends
#   a live run with EPERM. Make files immutable when their writer has closed them.

folder=$(mktemp -d) || exit 77
mounted=
# shellcheck disable=SC2086
trap '[ -z "$mounted" ] || umount $mounted; rm -rf "$folder"' EXIT
[ "$(id -u)" = 0 ] || { echo "needs root"; exit 77; }
command -v python3 > /dev/null || exit 77
fresh() { # an empty file system of that kind, mounted at $folder/KIND
  command -v "mkfs.$1" > /dev/null || { echo "needs mkfs.$1"; exit 77; }
  truncate -s 400M "$folder/$1.img" && mkdir "$folder/$1" && "mkfs.$1" -q "$folder/$1.img" > /dev/null &&
    mount -o loop "$folder/$1.img" "$folder/$1" || { echo "cannot mount $1"; exit 77; }
  mounted="$mounted $folder/$1"
}
echo "Linux $(uname -r)"
fresh ext4
fresh xfs
fresh btrfs
cat > "$folder/seen.py" <<'PYTHON'
import os
import subprocess
import sys


def comes_of(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.strerror
    return "works"


def seen(folder):
    path = f"{folder}/file"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"x" * 8192)
    if subprocess.run(["chattr", "+i", path]).returncode:
        sys.exit(77)
    came = [comes_of(os.pwrite, fd, b"y", 0), comes_of(os.ftruncate, fd, 1), comes_of(os.open, path, os.O_WRONLY)]
    subprocess.run(["chattr", "-i", path], check=True)
    return came


found = {os.path.basename(folder): seen(folder) for folder in sys.argv[1:]}
print("immutable: a write, an ftruncate, a new open:", found)
no = "Operation not permitted"
sys.exit(found != {"ext4": [no, no, no], "xfs": ["works", "works", no], "btrfs": ["works", "works", no]})
PYTHON
python3 "$folder/seen.py" "$folder/ext4" "$folder/xfs" "$folder/btrfs"
