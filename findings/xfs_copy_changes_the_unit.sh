#!/usr/bin/env bash
# A reflinked copy changes for good what statx says of the ORIGINAL's direct I/O, on XFS.
#
# Guess: Alignment of direct I/O is the drive's: `cp --reflink` leaves what statx says of the
#   original. If it does not, the original is as before when all its blocks are its own again
#   (FALLOC_FL_UNSHARE_RANGE over all of it, the copy removed).
# Seen: 512 becomes a block (4096, or 65536 with blocks of 64 KiB), and stays so.
# Version: Linux 6.18, XFS from mkfs.xfs 6.1 (reflink=1 is its default).
# Why: Blocks that may be shared are written out of place, a whole one at a time, so statx says a
#   block for each file that has the mark of one with shared blocks (xfs_report_dioalign); the mark
#   is there after the last shared block is gone. Smaller writes work, through the page cache.
# Means: Plain `cp` is enough: coreutils 9 reflinks by default. Whoever lays out a file by the
#   alignment of its first day must not ask the file again: ask a new one beside it (O_TMPFILE).
#   `cp --reflink=never` makes a file without the mark.

folder=$(mktemp -d) || exit 77
mounted=
# shellcheck disable=SC2086
trap '[ -z "$mounted" ] || umount $mounted; rm -rf "$folder"' EXIT
[ "$(id -u)" = 0 ] || { echo "needs root"; exit 77; }
command -v python3 > /dev/null || exit 77
fresh() { # an XFS that is made so, mounted at $folder/NAME
  command -v mkfs.xfs > /dev/null || { echo "needs mkfs.xfs"; exit 77; }
  # shellcheck disable=SC2086
  truncate -s 400M "$folder/$1.img" && mkdir "$folder/$1" && mkfs.xfs -q $2 "$folder/$1.img" &&
    mount -o loop "$folder/$1.img" "$folder/$1" || { echo "cannot mount XFS with $2"; exit 77; }
  mounted="$mounted $folder/$1"
}
echo "Linux $(uname -r)"
fresh of4 "-b size=4096"
fresh of64 "-b size=65536"
cat > "$folder/seen.py" <<'PYTHON'
import ctypes
import mmap
import os
import struct
import subprocess
import sys

libc = ctypes.CDLL(None, use_errno=True)


def unit(fd):
    """Where statx lets a direct write begin."""
    answer = ctypes.create_string_buffer(256)
    if libc.statx(fd, b"", 0x1000, 0x2000, answer):  # AT_EMPTY_PATH, STATX_DIOALIGN
        sys.exit(77)
    return struct.unpack_from("=I", answer, 156)[0]  # stx_dio_offset_align


def seen(folder):
    fd = os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    for number in range(8):
        os.pwrite(fd, mmap.mmap(-1, 1 << 20), number << 20)
    os.fsync(fd)
    units = [unit(fd)]
    subprocess.run(["cp", "--reflink=always", f"{folder}/file", f"{folder}/copy"], check=True)
    units.append(unit(fd))
    os.unlink(f"{folder}/copy")
    if libc.fallocate(fd, 0x40, ctypes.c_int64(0), ctypes.c_int64(8 << 20)):  # FALLOC_FL_UNSHARE_RANGE
        sys.exit(77)
    os.fsync(fd)
    units.append(unit(fd))
    subprocess.run(["cp", "--reflink=never", f"{folder}/file", f"{folder}/new"], check=True)
    units.append(unit(os.open(f"{folder}/new", os.O_RDWR | os.O_DIRECT)))
    return units


found = {os.path.basename(folder): seen(folder) for folder in sys.argv[1:]}
print("unit at first, after a copy, unshared and without the copy; of a file that is not reflinked:", found)
sys.exit(found != {"of4": [512, 4096, 4096, 512], "of64": [512, 65536, 65536, 512]})
PYTHON
python3 "$folder/seen.py" "$folder/of4" "$folder/of64"
