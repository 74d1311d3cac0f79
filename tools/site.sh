#!/usr/bin/env bash
# Build the documentation into site/, from the locked dependencies in an environment of its own. A warning or a broken link fails.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
lock=requirements/docs.lock
wanted=$(sha256sum < "$lock")
if [ "$(cat .docs/.locked 2>/dev/null || true)" != "$wanted" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        echo "docs: the lock file is for CPython 3.11 and '$python' is not; run: make docs PYTHON=/path/to/python3.11" >&2
        exit 2
    fi
    rm -rf .docs
    "$python" -m venv .docs
    .docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r "$lock"
    echo "$wanted" > .docs/.locked
fi
.docs/bin/zensical build --clean --strict
