#!/usr/bin/env bash
# Build (or complete) a virtual environment: setup_venv.sh FOLDER REQUIREMENT
# Python 3.11 is preferred where present. Without an NVIDIA GPU a CPU build of torch is installed: a wheel from a
# folder named by PIP_FIND_LINKS, else the one that uv knows to find (plain pip would take a CUDA build of 3 GB).
set -euo pipefail
venv=$1
requirement=$2

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

install_cpu_torch() {
    local newest
    newest=$(ls ${PIP_FIND_LINKS:+$PIP_FIND_LINKS/torch-2.1[123]*+cpu-*.whl} 2>/dev/null | sort -V | tail -n 1 || true)
    if [ -n "$newest" ] && "$venv/bin/pip" install -q "$newest"; then return; fi
    "$venv/bin/pip" install -q uv &&
        UV_HTTP_RETRIES=1 "$venv/bin/uv" pip install -q --python "$venv/bin/python" --torch-backend cpu \
            'torch>=2.11,<2.14' ||
        echo "no CPU build of torch could be found; the default build is installed" >&2
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(bash "$(dirname "$0")/find_python.sh" 3.11 3.12 3.13)
    echo "setting up $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
if ! has_gpu && ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    install_cpu_torch
fi
"$venv/bin/pip" install -q -e "$requirement"
