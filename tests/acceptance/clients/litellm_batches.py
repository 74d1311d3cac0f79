"""LiteLLM's batches: a file, a batch, polls until it ends, the answers. argv: base URL, number of rows."""

import json
import sys
import time

import litellm
import openai

URL, ROWS = sys.argv[1], int(sys.argv[2])
ENDED = ("completed", "failed", "expired", "cancelled")
common = {"custom_llm_provider": "openai", "api_base": URL, "api_key": "none"}


def lines() -> bytes:
    """Requests with the ids row-0, row-1, ..."""
    rows = [
        {
            "custom_id": f"row-{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "any", "messages": [{"role": "user", "content": f"q{n}"}], "max_tokens": 8},
        }
        for n in range(ROWS)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


file = litellm.create_file(file=("rows.jsonl", lines()), purpose="batch", **common)
batch = litellm.create_batch(
    completion_window="24h",
    endpoint="/v1/chat/completions",
    input_file_id=file.id,
    metadata={"a": "b"},
    **common,
)
print("SUBMITTED", batch.id, flush=True)
while batch.status not in ENDED:
    time.sleep(0.5)
    try:
        batch = litellm.retrieve_batch(batch_id=batch.id, **common)
    except (openai.APIConnectionError, openai.InternalServerError) as error:
        print("again:", type(error).__name__, flush=True)
assert batch.status == "completed", batch
assert (batch.request_counts.total, batch.request_counts.completed) == (ROWS, ROWS)
text = litellm.file_content(file_id=batch.output_file_id, **common).content.decode()
answers = [json.loads(line) for line in text.splitlines()]
assert sorted(answer["custom_id"] for answer in answers) == sorted(f"row-{n}" for n in range(ROWS))
assert all(answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers)
assert batch.id in {each.id for each in litellm.list_batches(**common).data}
print("DONE", len(answers))
