#!/bin/sh
# Brings liburing's header and static library where that is possible, and says what happens where it is not: without them
# the package builds all the same and uses another engine.
#
# usage: install-liburing.sh FILE
# FILE gets "yes" or "no" and is touched only when that changes. The exit status is 1 when it changed, otherwise 0.
has_liburing() { echo '#include <liburing.h>
int main(void) { struct io_uring r; io_uring_register_buffers_sparse(&r, 1); return io_uring_queue_init(1, &r, 0); }' |
  ${CC:-cc} -x c - -o /dev/null -Wl,-Bstatic -luring -Wl,-Bdynamic 2>/dev/null; }

before=$(cat "$1" 2>/dev/null)
has_liburing && now=yes || now=no
if [ "$now" = no ] && [ "$(id -u)" = 0 ] && [ "$before" != no ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq liburing-dev; } >/dev/null 2>&1
  has_liburing && now=yes
fi
[ "$now" = "$before" ] && exit 0
if [ "$now" = no ]; then
  echo "liburing's development files are not here (Debian: apt-get install liburing-dev; Fedora: liburing-devel)."
  echo "Building without the C++ io_uring engine; pyuring or aiofiles will do the I/O."
fi
echo "$now" >"$1"
[ -z "$before" ]
