#!/usr/bin/env bash
# Fetch what `make deploy-check` uses into .deploy: packages of pip and, where apt is there, Debian's promtool.
set -euo pipefail
cd "$(dirname "$0")/../.."

mkdir -p .deploy
grep -vE "^(urllib3|requests)==" requirements/cpu.lock > .deploy/constraints.txt
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
if ! .venv/bin/uv pip install --quiet --python .venv/bin/python --target .deploy --constraint .deploy/constraints.txt -r requirements/deploy.txt; then
    echo "deploy-check: the packages of requirements/deploy.txt cannot be fetched" >&2
fi

if ! command -v promtool > /dev/null && [ ! -x .deploy/debian/usr/bin/promtool ] && command -v apt-get > /dev/null; then
    fetched=$(mktemp -d)
    trap 'rm -rf "$fetched"' EXIT
    if (cd "$fetched" && apt-get download -qq prometheus) > /dev/null 2>&1; then
        mkdir -p .deploy/debian && dpkg-deb -x "$fetched"/prometheus_*.deb .deploy/debian
    else
        echo "deploy-check: apt cannot fetch the package prometheus; run apt-get update" >&2
    fi
fi
