#!/usr/bin/env bash
# Install ConServe with its engine into an environment of its own: install.sh cuda|cpu|none UV FOLDER, from the root.
set -euo pipefail
engine=$1 uv=$2 folder=$3

"$uv" venv --quiet --no-project --python python3 "$folder"
install=("$uv" pip install --quiet --no-cache --compile-bytecode --python "$folder/bin/python")
case $engine in
    none) "${install[@]}" --constraint requirements/cpu.lock ".[api,postgres]" fsspec ;;
    cuda) "${install[@]}" ".[cuda,api,postgres]" ;;
    cpu)  # torch's build for CPUs: from wheels that uv was told of, else from PyTorch's own index
        cpu=("${install[@]}" --constraint requirements/cpu.lock --override deploy/image/unused.txt ".[cpu,api,postgres]")
        "${cpu[@]}" || {
            echo "install.sh: trying once more, with PyTorch's index of builds for CPUs" >&2
            "${cpu[@]}" --torch-backend cpu
        } ;;
    *) echo "install.sh: ENGINE is cuda, cpu or none, not '$engine'" >&2; exit 2 ;;
esac
"$folder/bin/conserve" --version
