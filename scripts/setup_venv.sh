#!/bin/sh
# Makes the virtual environment that the Makefile works in.
#
#   setup_venv.sh VENV PYTHON TORCH EXTRAS
#
# TORCH says where PyTorch comes from:
#   host    the one that PYTHON can import now; nothing is downloaded or replaced
#   pinned  the version in constraints.txt
#   newest  the newest one that the package index has (a CUDA build on Linux)
#   auto    host if PYTHON has a CUDA build that is new enough; newest if there is a GPU but no such
#           build; pinned otherwise
set -eu

venv=$1 python=$2 torch=$3 extras=$4
here=$(cd "$(dirname "$0")/.." && pwd)
constraints=$venv/constraints.txt

fail() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 || fail "$python not found; set PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" -V) is too old: Python 3.11 or newer is needed; set PYTHON=..."

# prints "version site-packages" of the torch that PYTHON imports; $1: only a CUDA build counts
host_torch() {
    "$python" - "$1" 2>/dev/null <<'PY'
import pathlib, sys
import torch
release = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
if release < (2, 6) or (sys.argv[1] == "cuda" and not torch.version.cuda):
    sys.exit(1)
print(torch.__version__, pathlib.Path(torch.__file__).parents[1])
PY
}

found=
case $torch in
    auto)
        if found=$(host_torch cuda); then torch=host
        elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then torch=newest
        else torch=pinned
        fi ;;
    host) found=$(host_torch any) || fail "TORCH=host: $python has no torch 2.6 or newer" ;;
    pinned | newest) ;;
    *) fail "TORCH=$torch: must be auto, host, pinned or newest" ;;
esac

rm -rf "$venv"
"$python" -m venv "$venv" || fail "python venv module is missing (Debian: apt install python3-venv)"

case $torch in
    pinned) cp "$here/constraints.txt" "$constraints" ;;
    newest) grep -v '^torch==' "$here/constraints.txt" >"$constraints" ;;
    host)
        # A .pth file, not --system-site-packages: it also works when PYTHON is itself a virtual
        # environment. What is installed here comes first in the search path.
        grep -v '^torch==' "$here/constraints.txt" >"$constraints"
        echo "torch==${found%% *}" >>"$constraints"
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "${found#* }" >"$site/zz_host_torch.pth" ;;
esac
echo "setup: $venv with torch from: $torch ${found%% *}"

# compiling all of PyTorch and transformers takes half a minute; a tenth of it is ever imported
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$constraints" --editable "$here$extras"
