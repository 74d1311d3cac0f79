#!/usr/bin/env bash
# The main job, end to end: a Parquet file of questions in, answers that SQL can query out.
set -euo pipefail
cd "$(dirname "$0")/.."
unset CONSERVE_STORE CONSERVE_DATA  # a store of its own, whatever the user's is
export CONSERVE_HOME=${DEMO_HOME:-$PWD/.demo/store}
export CONSERVE_MODELS=${CONSERVE_MODELS:-$PWD/.demo/models}
PATH=$PWD/.venv/bin:$PATH

# What is shown is what is run.
show() { printf '\n$ %s\n' "$1" >&2; eval "$1"; }

home=${CONSERVE_HOME#"$PWD"/}
printf "The demo's store: CONSERVE_HOME=%s .venv/bin/conserve status\n" "$home" >&2

# An interrupted demo is gone on with.
job=$(conserve jobs --json | python -c 'import json, sys
print(*[job["id"] for job in json.load(sys.stdin) if job["state"] in ("queued", "running")][:1])')
if [ -n "$job" ]; then
    printf '\n%s is not done yet: the demo goes on with it\n' "$job" >&2
else
    job=$(show 'conserve submit examples/questions.parquet --prompt "{{ question }}" --max-tokens 96 --temperature 0')
    echo "$job"
fi

show "conserve run $job"

show "conserve sql --job $job \"select row_index, i.question, r.text as answer
  from results r join inputs i using (job_id, row_index) order by row_index limit 3\""

printf '\nThe answers as a file: CONSERVE_HOME=%s .venv/bin/conserve results %s -o answers.parquet\n' \
    "$home" "$job" >&2
