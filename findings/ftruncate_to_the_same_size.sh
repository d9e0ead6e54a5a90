#!/usr/bin/env bash
# ftruncate to the size that a file has gives reserved space back.
#
# Guess: ftruncate(fd, size) with the present size does nothing; blocks behind the end, from
#   fallocate(KEEP_SIZE), stay.
# Seen: A file of 1 MiB with 8 MiB reserved holds 8 MiB before and 1 MiB after, on ext4 and on
#   XFS. ftruncate to a larger size keeps them.
# Version: Linux 6.18.
# Why: A truncate frees all blocks behind the new end, and both file systems do that work for an
#   unchanged size, too; the manual page of fallocate(2) speaks of the size only.
# Means: Code that "sets the length to be sure" before a log or a swap file is appended to loses
#   the space that was promised, and meets ENOSPC later. Compare the size first, or promise again.

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
fresh ext4 "-m 0"
fresh xfs ""
cat > "$folder/seen.py" <<'PYTHON'
import ctypes
import os
import sys

MIB = 1 << 20
KEEP_SIZE = 1
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
folder = sys.argv[1]


def held(fd):
    return os.fstat(fd).st_blocks * 512 // MIB


fd = os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT)
os.write(fd, b"x" * MIB)
os.fsync(fd)
if libc.fallocate(fd, KEEP_SIZE, 0, 8 * MIB):
    sys.exit(77)
seen = [held(fd)]
os.ftruncate(fd, MIB)
seen.append(held(fd))
print(os.path.basename(folder), "MiB held after fallocate:", seen[0], " after ftruncate to the same size:", seen[1])
sys.exit(seen != [8, 1])
PYTHON
status=0
for kind in ext4 xfs; do
  python3 "$folder/seen.py" "$folder/$kind" || status=1
done
exit $status
