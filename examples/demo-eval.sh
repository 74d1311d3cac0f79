#!/usr/bin/env bash
# Three nights: a first one, an equal one, and one with weights that are worse on purpose. The gate tells them apart.
set -euo pipefail
cd "$(dirname "$0")/.."
unset CONSERVE_STORE CONSERVE_DATA  # a store of its own, whatever the user's is
export CONSERVE_HOME=${DEMO_HOME:-$PWD/.demo/eval-store}
export CONSERVE_MODELS=${CONSERVE_MODELS:-$PWD/.demo/models}
export PYTHONPATH=$PWD/.evals HF_HUB_OFFLINE=1
PATH=$PWD/.venv/bin:$PATH
model=$CONSERVE_MODELS/smollm2-135m-instruct
worse=$PWD/.demo/worse

# What is shown is what is run.
show() { printf '\n$ %s\n' "$1" >&2; eval "$1"; }

# Run a gate that has to end with this exit code.
gate() {
    local code=0
    show "conserve eval gate last --against baseline --fail-on regression" || code=$?
    printf 'exit code %s\n' "$code" >&2
    [ "$code" = "$1" ] || { printf 'expected exit code %s\n' "$1" >&2; exit 1; }
}

show "conserve eval run examples/nightly.toml --model $model"
show "conserve eval name last baseline"

show "conserve eval run examples/nightly.toml --model $model"
gate 0

show "python examples/worse_weights.py $model $worse"
show "conserve eval run examples/nightly.toml --model $worse"
gate 6

show "conserve eval report last --against baseline --html .demo/nightly.html"
