#!/usr/bin/env bash
# On btrfs a punched hole frees nothing while one block of its extent is left.
#
# Guess: FALLOC_FL_PUNCH_HOLE over 63 of 64 MiB frees 63 MiB, and st_blocks and the free space say
#   the same. A reserved file that is written over again and again takes its size.
# Seen: On btrfs st_blocks falls to 1 MiB, and the free space stays as it was until the last
#   block goes. A file of 64 MiB from fallocate, of which 63 MiB are written over twice, takes
#   127 MiB. On ext4 63 MiB come back and the file takes its 64.
# Version: Linux 6.18.
# Why: A file refers to parts of an extent (up to 128 MiB for data that is not compressed), and an
#   extent is freed as a whole, with its last reference (btrfs_file_extent_item: offset and
#   num_bytes beside disk_num_bytes).
# Means: du says what a file refers to, not what it holds. Whoever gives space back in pieces, or
#   writes over most of a file, may hold nearly twice its size: remove the file, or punch and write
#   whole extents.

folder=$(mktemp -d) || exit 77
mounted=
# shellcheck disable=SC2086
trap '[ -z "$mounted" ] || umount $mounted; rm -rf "$folder"' EXIT
[ "$(id -u)" = 0 ] || { echo "needs root"; exit 77; }
command -v python3 > /dev/null || exit 77
fresh() { # an empty file system of that kind, mounted at $folder/KIND
  command -v "mkfs.$1" > /dev/null || { echo "needs mkfs.$1"; exit 77; }
  truncate -s 600M "$folder/$1.img" && mkdir "$folder/$1" && "mkfs.$1" -q $2 "$folder/$1.img" > /dev/null &&
    mount -o loop "$folder/$1.img" "$folder/$1" || { echo "cannot mount $1"; exit 77; }
  mounted="$mounted $folder/$1"
}
echo "Linux $(uname -r)"
fresh ext4 "-m 0"
fresh btrfs ""
cat > "$folder/seen.py" <<'PYTHON'
import ctypes
import os
import sys

MIB = 1 << 20
PUNCH_HOLE = 2 | 1  # with KEEP_SIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
folder = sys.argv[1]
data = os.urandom(MIB)


def free():
    os.sync()
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize // MIB


def file(name):
    return os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT)


def fill(fd, mebibytes):
    for place in range(mebibytes):
        os.pwrite(fd, data, place * MIB)
    os.fsync(fd)


empty = free()
fd = file("punched")
fill(fd, 64)
written = empty - free()
if libc.fallocate(fd, PUNCH_HOLE, 0, 63 * MIB):
    sys.exit(77)
punched = empty - free()
said = os.fstat(fd).st_blocks * 512 // MIB
os.close(fd)
os.unlink(f"{folder}/punched")
gone = empty - free()
fd = file("reserved")
if libc.fallocate(fd, 0, 0, 64 * MIB):
    sys.exit(77)
taken = [empty - free()]
for _ in range(2):
    fill(fd, 63)
    taken.append(empty - free())
kind = os.path.basename(folder)
print(f"{kind}: 64 MiB written take {written}, with 63 punched {punched} (st_blocks says {said}), removed {gone}")
print(f"{kind}: 64 MiB reserved take {taken[0]}, with 63 written over once {taken[1]}, twice {taken[2]}")
frees = punched <= 3 and max(taken) <= 68
keeps = punched >= 60 and said == 1 and gone <= 4 and taken[1] <= 70 and taken[2] >= 120
sys.exit(not (frees if kind == "ext4" else keeps))
PYTHON
status=0
for kind in ext4 btrfs; do
  python3 "$folder/seen.py" "$folder/$kind" || status=1
done
exit $status
