# Fetches the programs of requirements/batch-clients, each into an environment of its own.
set -eu
for file in requirements/batch-clients/*.txt; do
    name=$(basename "$file" .txt)
    [ -x ".batch-clients/$name/bin/python" ] || .venv/bin/uv venv --quiet --python .venv/bin/python ".batch-clients/$name"
    .venv/bin/uv pip install --quiet --python ".batch-clients/$name/bin/python" -r "$file"
done
