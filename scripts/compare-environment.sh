#!/bin/sh
# Makes an environment with a peer's packages beside those of the project's own, so that both use one torch. Where that
# fails it says so and goes on: the comparison then has a row without figures.
#
# usage: compare-environment.sh NAME PROJECT_VENV REQUIREMENT...
set -e
name=$1 project=$2
shift 2
folder=.venv-compare-$name
# A compilation that was stopped leaves its lock, for which the next one would wait for ever.
rm -f "$folder"/torch_extensions/*/lock
[ -e "$folder/.installed" ] && exit 0
rm -rf "$folder"
"$project/bin/python" -m venv "$folder"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
project_site=$("$project/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$project_site')" >"$site/project.pth"
# DeepSpeed compiles its I/O module when it is first used.
if [ "$name" = deepspeed ] && [ "$(id -u)" = 0 ] && [ ! -e /usr/include/libaio.h ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq libaio-dev; } >/dev/null 2>&1 || true
fi
# One after the other: a package that is built here finds what was named before it.
for requirement; do
  if ! "$folder/bin/pip" install -q --disable-pip-version-check --no-build-isolation "$requirement"; then
    echo "compare: $requirement cannot be installed here; its row will say so"
    rm -rf "$folder"
    exit 0
  fi
done
touch "$folder/.installed"
