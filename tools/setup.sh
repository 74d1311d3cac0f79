#!/usr/bin/env bash
# Set up .venv: the locked CPU dependencies and this package in editable mode. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
locks=(requirements/bootstrap.lock requirements/cpu.lock)
wanted=$(cat "${locks[@]}" pyproject.toml tools/setup.sh | sha256sum)
ready() { echo "setup: ready: run \`. .venv/bin/activate\` for the command conserve, or call .venv/bin/conserve" >&2; }
if [ "$(cat .venv/.locked 2>/dev/null || true)" = "$wanted" ]; then
    [ -n "${QUIET:-}" ] || ready
    exit 0
fi

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    echo "setup: the lock file is for CPython 3.11 to 3.13 and '$python' is not; run: make setup PYTHON=/path/to/python3.12" >&2
    exit 2
fi

echo "setup: creating .venv and installing the locked dependencies (3 GB on disk, a minute or two)" >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/bootstrap.lock

# uv has no pip.conf; hand it what pip was told about mirrors and local wheels.
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
[ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
# Compiled once here, so that no command pays for it later, whatever PYTHONDONTWRITEBYTECODE says.
install=(.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --compile-bytecode)

# The CPU build of torch: from the wheels at hand, else from PyTorch's own CPU index.
torch=$(grep '^torch==' requirements/cpu.lock)
"${install[@]}" "$torch" 2>/dev/null || "${install[@]}" --torch-backend cpu "$torch"
"${install[@]}" -r requirements/cpu.lock
# The distribution was once called conserve, like its command: uninstalled later, it would take the command with it.
.venv/bin/uv pip uninstall --quiet --python .venv/bin/python conserve
"${install[@]}" --no-build-isolation --editable .
.venv/bin/python -m compileall -q conserve  # which the editable install leaves where it is
echo "$wanted" > .venv/.locked
ready
