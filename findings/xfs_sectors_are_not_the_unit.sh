#!/usr/bin/env bash
# XFS with sectors of 32 KiB still takes direct writes of 512 bytes.
#
# Guess: `mkfs.xfs -s size=32768` makes a file system whose direct I/O begins and ends at sectors,
#   so by 32 KiB: statx says so, and a direct write of 512 bytes is EINVAL.
# Seen: statx says 512, and the write of 512 bytes at offset 512 works, with blocks of 64 KiB, too.
# Version: Linux 6.18, mkfs.xfs 6.1, a loop device of 512-byte sectors.
# Why: The size is that of the file system's own metadata. Direct I/O goes by the logical block of
#   the device (xfs_report_dioalign in fs/xfs).
# Means: Alignment is what statx says of the open file, and no number from xfs_info or mkfs. Who
#   tests code for drives of large sectors needs such a drive (losetup --sector-size), no -s size.

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
fresh small "-s size=512"
fresh large "-s size=32768 -b size=65536"
cat > "$folder/seen.py" <<'PYTHON'
import ctypes
import mmap
import os
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)


def unit(fd):
    """Where statx lets a direct write begin."""
    answer = ctypes.create_string_buffer(256)
    if libc.statx(fd, b"", 0x1000, 0x2000, answer):  # AT_EMPTY_PATH, STATX_DIOALIGN
        sys.exit(77)
    return struct.unpack_from("=I", answer, 156)[0]  # stx_dio_offset_align


seen = {}
for name in sys.argv[1:]:
    fd = os.open(f"{name}/file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, 1 << 20)
    written = os.pwrite(fd, memoryview(mmap.mmap(-1, 4096))[:512], 512)
    seen[os.path.basename(name)] = (unit(fd), written)
print("sectors: unit that statx says, bytes written of 512:", seen)
sys.exit(seen != {"small": (512, 512), "large": (512, 512)})
PYTHON
python3 "$folder/seen.py" "$folder/small" "$folder/large"
