#!/usr/bin/env bash
# Build the container image with the builder that is there: image.sh none|cpu|cuda [BASE].
set -euo pipefail
cd "$(dirname "$0")/../.."
engine=$1 base=${2:-}

if command -v docker > /dev/null && docker info > /dev/null 2>&1; then builder=(docker build)
elif command -v podman > /dev/null; then builder=(podman build)
elif command -v buildah > /dev/null; then builder=(buildah build --isolation "${BUILDAH_ISOLATION:-chroot}")
else echo "make image needs docker with its daemon, podman or buildah" >&2; exit 2
fi
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' conserve/__init__.py)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
"${builder[@]}" --file deploy/image/Dockerfile --tag "conserve:$engine" ${base:+--build-arg "BASE=$base"} \
    --build-arg "ENGINE=$engine" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" .
