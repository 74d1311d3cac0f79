#!/usr/bin/env bash
# Run the tests RUNS times with two busy loops beside them: what fails now and then depends on time.
# Prints a line a run; the output of a run that failed stays in .loaded/.
set -uo pipefail
cd "$(dirname "$0")/.."
runs=$1 && shift
mkdir -p .loaded
loops=()
trap 'kill "${loops[@]}" 2>/dev/null' EXIT
for _ in 1 2; do
    (while :; do :; done) &
    loops+=($!)
done
failed=0
for run in $(seq "$runs"); do
    begun=$SECONDS
    log=.loaded/$(date +%Y%m%d-%H%M%S)-$run.log
    if "$@" > "$log" 2>&1; then ended=passed; else ended=FAILED failed=$((failed + 1)); fi
    printf '%3d  %s  %5d s  %s\n' "$run" "$ended" $((SECONDS - begun)) "$(tail -n 1 "$log" | tr -d =)"
    [ "$ended" = FAILED ] || rm "$log"
done
echo "$failed of $runs runs failed"
[ "$failed" = 0 ]
