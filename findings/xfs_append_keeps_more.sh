#!/usr/bin/env bash
# Appending 4 KiB to a 20 MiB file on XFS takes 32 MiB, and a close keeps them.
#
# Guess: XFS allocates ahead of a growing file and gives it back when the file is closed:
#   st_blocks is the size again.
# Seen: That is so for the close after the first writes. When the file is opened again, 4 KiB are
#   appended and it is closed, it holds some 52 MiB for 20 MiB of data, and keeps them. Direct
#   writes of the same size allocate nothing ahead; a truncate to the size gives all back.
# Version: Linux 6.18, XFS from mkfs defaults.
# Why: A file that is closed with such space once more is taken for a log that is opened for each
#   line, and its space is left to a background task (xfs_release in fs/xfs, XFS_IDIRTY_RELEASE;
#   speculative_prealloc_lifetime, 300 s).
# Means: Free space on a small drive shrinks by more than was written, and st_blocks says nothing
#   about what a log needs. Logs that are appended often use allocsize=, or truncate to their size
#   at the end.

folder=$(mktemp -d) || exit 77
mounted=
# shellcheck disable=SC2086
trap '[ -z "$mounted" ] || umount $mounted; rm -rf "$folder"' EXIT
[ "$(id -u)" = 0 ] || { echo "needs root"; exit 77; }
command -v python3 > /dev/null || exit 77
fresh() { # an empty file system of that kind, mounted at $folder/KIND
  command -v "mkfs.$1" > /dev/null || { echo "needs mkfs.$1"; exit 77; }
  truncate -s 600M "$folder/$1.img" && mkdir "$folder/$1" && "mkfs.$1" -q $2 "$folder/$1.img" &&
    mount -o loop "$folder/$1.img" "$folder/$1" || { echo "cannot mount $1"; exit 77; }
  mounted="$mounted $folder/$1"
}
echo "Linux $(uname -r)"
fresh xfs ""
cat > "$folder/seen.py" <<'PYTHON'
import mmap
import os
import sys

MIB = 1 << 20
path = f"{sys.argv[1]}/log"


def append(size, flags=0):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags)
    for _ in range(size // MIB or 1):
        os.write(fd, mmap.mmap(-1, min(size, MIB)))
    os.fsync(fd)
    os.close(fd)
    return os.stat(path).st_blocks * 512 / MIB


seen = {"20 MiB, closed": append(20 * MIB), "4 KiB more, closed": append(4096)}
os.truncate(path, os.stat(path).st_size)
seen["truncated to its size"] = os.stat(path).st_blocks * 512 / MIB
os.unlink(path)
seen["direct, 20 MiB and 4 KiB"] = (append(20 * MIB, os.O_DIRECT), append(4096, os.O_DIRECT))[1]
print("xfs: MiB on the drive:", seen)
exact = 20 + 4 / 1024
sys.exit(
    seen["20 MiB, closed"] != 20
    or seen["4 KiB more, closed"] < 24
    or seen["truncated to its size"] != exact
    or seen["direct, 20 MiB and 4 KiB"] != exact
)
PYTHON
status=0
for kind in xfs; do
  python3 "$folder/seen.py" "$folder/$kind" || status=1
done
exit $status
