#!/usr/bin/env bash
# fallocate over a cloned file says yes, and the overwrite finds the disk full.
#
# Guess: After fallocate(0, size) has returned 0 no write into that range meets ENOSPC: the manual
#   page guarantees it. A clone (cp --reflink, cp of today) gets blocks of its own by it, or an
#   error.
# Seen: On btrfs and on XFS fallocate over a clone of 100 MiB takes nothing and returns 0. With
#   20 MiB left or less, the overwrite of the clone meets ENOSPC on the way. FALLOC_FL_UNSHARE_RANGE, which
#   is made for it, meets ENOSPC at once on XFS; btrfs does not have it (EOPNOTSUPP).
# Version: Linux 6.18.
# Why: The guarantee of fallocate(2) is about holes. Plain mode gives blocks to those and leaves
#   extents that are there as they are, shared or not; the page says so only by what it says of
#   FALLOC_FL_UNSHARE_RANGE. btrfs_fallocate (fs/btrfs/file.c) reserves where it finds a hole and
#   skips other extents.
# Means: A swap file or a checkpoint that cp made and that is written over in place has no space
#   of its own, whatever fallocate said. Copy with --reflink=never, or unshare where that exists.

folder=$(mktemp -d) || exit 77
mounted=
# shellcheck disable=SC2086
trap '[ -z "$mounted" ] || umount $mounted; rm -rf "$folder"' EXIT
[ "$(id -u)" = 0 ] || { echo "needs root"; exit 77; }
command -v python3 > /dev/null || exit 77
fresh() { # an empty file system of that kind, mounted at $folder/KIND
  command -v "mkfs.$1" > /dev/null || { echo "needs mkfs.$1"; exit 77; }
  truncate -s 600M "$folder/$1.img" && mkdir "$folder/$1" && "mkfs.$1" -q "$folder/$1.img" > /dev/null &&
    mount -o loop "$folder/$1.img" "$folder/$1" || { echo "cannot mount $1"; exit 77; }
  mounted="$mounted $folder/$1"
}
echo "Linux $(uname -r)"
fresh btrfs
fresh xfs
cat > "$folder/seen.py" <<'PYTHON'
import ctypes
import errno
import fcntl
import os
import sys

MIB = 1 << 20
UNSHARE_RANGE = 0x40
FICLONE = 0x40049409
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
folder = sys.argv[1]
kind = os.path.basename(folder)
data = os.urandom(MIB)


def free():
    os.sync()
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize // MIB


def file(name):
    return os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT)


def fill(fd, mebibytes):
    """Write and sync one MiB after the other. Returns how many went."""
    for place in range(mebibytes):
        try:
            os.pwrite(fd, data, place * MIB)
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return place
    return mebibytes


def fallocate(fd, mode):
    return os.strerror(ctypes.get_errno()) if libc.fallocate(fd, mode, 0, 100 * MIB) else "ok"


original, clone = file("original"), file("clone")
if fill(original, 100) < 100:
    sys.exit(77)
try:
    fcntl.ioctl(clone, FICLONE, original)
except OSError as error:
    print(kind, "cannot clone:", error)
    sys.exit(77)
before = free()
plain = fallocate(clone, 0)
took = before - free()
fill(file("others"), free() - 20)
left = free()
unshare = fallocate(clone, UNSHARE_RANGE)
written = fill(clone, 100)
print(f"{kind}: fallocate of 100 MiB of a clone: {plain}, takes {took} MiB; with {left} MiB left:")
print(f"{kind}: UNSHARE_RANGE: {unshare}; the overwrite meets ENOSPC after {written} MiB")
wanted = os.strerror(errno.EOPNOTSUPP if kind == "btrfs" else errno.ENOSPC)
sys.exit(not (plain == "ok" and took <= 1 and written < 80 and unshare == wanted))
PYTHON
status=0
for kind in btrfs xfs; do
  python3 "$folder/seen.py" "$folder/$kind" || status=1
done
exit $status
