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

job=$(show 'conserve submit examples/questions.parquet --prompt "{{ question }}" --max-tokens 96 --temperature 0')
echo "$job"

show "conserve run $job"

show "conserve sql --job $job \"select row_index, i.question, r.text as answer
  from results r join inputs i using (job_id, row_index) order by row_index limit 3\""

printf '\nThe answers as a file: CONSERVE_HOME=%s .venv/bin/conserve results %s -o answers.parquet\n' \
    "${CONSERVE_HOME#"$PWD"/}" "$job" >&2
