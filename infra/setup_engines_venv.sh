#!/usr/bin/env bash
# Build (or complete) an environment of the engines on CPU: setup_engines_venv.sh FOLDER PYTHON
# vLLM's CPU build, Megatron Core and the CPU build of torch, beside everything that the tests need. PYTHON decides the
# versions:
#   3.11: the newest vLLM that the engine was checked with, and the newest Megatron Core that runs on this Python.
#   3.12: those of the GPU machines, every one pinned by infra/gpu_versions.txt.
# pip's settings (PIP_FIND_LINKS, indexes) are passed on to uv, which installs.
set -euo pipefail
venv=$1
version=$2
here=$(cd "$(dirname "$0")/.." && pwd)
pins=()
case $version in
3.11) torch=2.13.0 ;;
3.12) torch=2.11.0 pins=(--constraint "$here/infra/gpu_versions.txt") ;;
*)
    echo "setup_engines_venv.sh: PYTHON is $version; allowed: 3.11, 3.12" >&2
    exit 2
    ;;
esac

if [ ! -x "$venv/bin/python" ]; then
    python=$(bash "$here/infra/find_python.sh" "$version")
    echo "setting up $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/pip" install -q uv

# What vLLM asks for and text generation on CPU does not use: torchvision, torchaudio and torchcodec would come as CUDA
# builds that break imports of transformers; triton is 1 GB and has no CPU backend.
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
for name in torchvision torchaudio torchcodec triton anthropic mcp opencv-python-headless; do
    echo "$name ; python_version < \"0\""
done >"$overrides"
# vLLM's CPU build names the CPU build of torch; another build of the same version does as well.
echo "torch==$torch" >>"$overrides"

options=(--python "$venv/bin/python" --override "$overrides" "${pins[@]}" --compile-bytecode)
for place in ${PIP_FIND_LINKS:-}; do options+=(--find-links "$place"); done
index=$("$venv/bin/pip" config get global.index-url 2>/dev/null || true)
if [ -n "$index" ]; then options+=(--default-index "$index"); fi
# pytorch.org's index is asked only where no folder has the wheel.
if ! ls ${PIP_FIND_LINKS:+$PIP_FIND_LINKS/torch-$torch+cpu-cp${version/./}-*.whl} 2>/dev/null | grep -q .; then
    if echo "torch==$torch" | UV_HTTP_RETRIES=1 "$venv/bin/uv" pip compile -q --no-deps --python "$venv/bin/python" \
        --torch-backend cpu - >/dev/null 2>&1; then
        options+=(--torch-backend cpu)
    else
        echo "no CPU build of torch $torch could be had; the default build is installed (3 GB more on disk)" >&2
    fi
fi
"$venv/bin/uv" pip install -q "${options[@]}" -e "$here[engines-cpu,test]"
