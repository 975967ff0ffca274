#!/usr/bin/env bash
# Print the first Python of these versions that can make virtual environments: find_python.sh VERSION ...
# Looked for on the path and among those of pyenv. Without one: exit 1 and one line that says so.
set -euo pipefail

usable() { "$1" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" 2>/dev/null; }

for version in "$@"; do
    for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python python3; do
        if usable "$python" "$version"; then
            echo "$python"
            exit
        fi
    done
done
echo "no Python $(echo "$*" | sed 's/ / or /g') with the venv module was found" >&2
exit 1
