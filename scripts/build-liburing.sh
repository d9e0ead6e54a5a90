#!/bin/sh
# Builds the liburing that binary wheels carry inside, statically, and installs header and library into PREFIX.
#
# usage: build-liburing.sh PREFIX      (LIBURING_REPO: another clone of liburing)
# The commit is checked, so that a moved tag cannot bring other code. Its licence (MIT) is LICENSES/liburing.txt.
set -eu
tag=liburing-2.9
commit=08468cc3830185c75f9e7edefd88aa01e5c2f8ab
prefix=${1:?usage: build-liburing.sh PREFIX}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git -c advice.detachedHead=false clone -q --depth 1 --branch "$tag" "${LIBURING_REPO:-https://github.com/axboe/liburing}" "$scratch/liburing"
cd "$scratch/liburing"
found=$(git rev-parse HEAD)
[ "$found" = "$commit" ] || { echo "$tag is commit $found, not $commit: nothing is built" >&2; exit 1; }
./configure --prefix="$prefix" >/dev/null
make -s -C src ENABLE_SHARED=0 CFLAGS="-O2 -fPIC" install >/dev/null
[ -f "$prefix/lib/liburing.a" ] || { echo "liburing.a was not installed in $prefix/lib" >&2; exit 1; }
echo "$tag is in $prefix"
