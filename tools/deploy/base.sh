#!/usr/bin/env bash
# Make the base image localhost/python:debian from Debian's packages, as root, where no registry is in reach:
#     bash tools/deploy/base.sh && make image BASE=localhost/python:debian
set -euo pipefail

suite=${1:-bookworm}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$suite" "$root" > /dev/null
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah copy --quiet "$container" "$root" / > /dev/null
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
buildah commit --rm --quiet "$container" localhost/python:debian
