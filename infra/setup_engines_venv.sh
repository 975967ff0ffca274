#!/usr/bin/env bash
# Build (or complete) the environment of the engines on CPU: setup_engines_venv.sh FOLDER
# vLLM's CPU build and the CPU build of torch, beside everything that the tests need. Python 3.11, since the pinned
# packages resolve together there. pip's settings (PIP_FIND_LINKS, indexes) are passed on to uv, which installs.
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")/.." && pwd)

if [ ! -x "$venv/bin/python" ]; then
    if ! python3.11 -c 'import venv, ensurepip' 2>/dev/null; then
        echo "the engines' environment needs Python 3.11 with the venv module (python3.11 was not found)" >&2
        exit 1
    fi
    echo "setting up $venv with $(python3.11 --version)"
    python3.11 -m venv "$venv"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/pip" install -q uv

# What vLLM asks for and text generation on CPU does not use: torchvision, torchaudio and torchcodec would come as CUDA
# builds that break imports of transformers; triton is 1 GB and has no CPU backend.
unwanted=$(mktemp)
trap 'rm -f "$unwanted"' EXIT
for name in torchvision torchaudio torchcodec triton anthropic mcp opencv-python-headless; do
    echo "$name ; python_version < \"0\""
done >"$unwanted"

options=(--python "$venv/bin/python" --override "$unwanted" --compile-bytecode)
for place in ${PIP_FIND_LINKS:-}; do options+=(--find-links "$place"); done
# pytorch.org's index is asked only where no folder has the wheel.
if ! ls ${PIP_FIND_LINKS:+$PIP_FIND_LINKS/torch-2.13.*+cpu-cp311-*.whl} 2>/dev/null | grep -q .; then
    options+=(--torch-backend cpu)
fi
index=$("$venv/bin/pip" config get global.index-url 2>/dev/null || true)
if [ -n "$index" ]; then options+=(--default-index "$index"); fi
"$venv/bin/uv" pip install -q "${options[@]}" -e "$here[engines-cpu,test]"
