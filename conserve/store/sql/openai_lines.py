"""Results as OpenAI Batch output: one line a row."""

import hashlib
from typing import Any

import msgspec

from conserve.openai_error import INVALID, SERVER, error_body


def openai_line(row: dict[str, Any], default_url: str) -> dict[str, Any]:
    """One line of an OpenAI Batch output file."""
    line: dict[str, Any] = {
        "id": f"{row['job_id']}-{row['row_index']}",
        "custom_id": row["custom_id"] if row["custom_id"] is not None else str(row["row_index"]),
        "response": None,
        "error": None,
    }
    if row["error_type"] is not None:
        line["error"] = {"code": row["error_type"], "message": row["error"]}
        line["response"] = refusal(line["id"], **line["error"])
        return line
    body = body_of(row, row["url"] or default_url)
    line["response"] = {"status_code": 200, "request_id": line["id"], "body": body}
    return line


FAULTS = frozenset({"endpoint_fault", "engine_died", "invalid_answer"})
"""Errors of the server's side; all others are of the request."""
BESIDE = ("tool_calls", "function_call", "refusal")  # in a message, beside its text


def refusal(request_id: str, code: str, message: str) -> dict[str, Any]:
    """The response that a live request would have got, for clients that read its status alone."""
    body = error_body(message, kind=SERVER if code in FAULTS else INVALID, code=code)
    return {"status_code": 500 if code in FAULTS else 400, "request_id": request_id, "body": body}


def expired_line(job_id: str, row: dict[str, Any]) -> dict[str, Any]:
    """Line of a row that had no result when its job expired, in OpenAI's words."""
    said = "This request could not be executed before the completion window expired."
    return {
        "id": f"{job_id}-{row['row_index']}",
        "custom_id": row["custom_id"] if row["custom_id"] is not None else str(row["row_index"]),
        "response": None,
        "error": {"code": "batch_expired", "message": said},
    }


def body_of(row: dict[str, Any], url: str) -> dict[str, Any]:
    """The response body in the shape of its route."""
    if url.endswith("/embeddings"):
        return embeddings_body(row)
    if url.endswith("/responses"):
        return response_body(row)
    return openai_body(row, chat=url.endswith("chat/completions"))


def embeddings_body(row: dict[str, Any]) -> dict[str, Any]:
    """Body of the route `/embeddings`, one embedding an input; the text of a choice is its embedding as JSON."""
    texts = (
        [row["text"]]
        if row["choices"] is None
        else [one["text"] for one in msgspec.json.decode(row["choices"])]
    )
    return {
        "object": "list",
        "model": row["model"],
        "data": [
            {"object": "embedding", "index": index, "embedding": msgspec.Raw(text.encode())}
            for index, text in enumerate(texts)
        ],
        "usage": {"prompt_tokens": row["prompt_tokens"], "total_tokens": row["prompt_tokens"]},
    }


def response_body(row: dict[str, Any]) -> dict[str, Any]:
    """Body of the route `/responses`, with one message."""
    whole = row["finish_reason"] in ("stop", "tool_calls")
    part = {"type": "output_text", "text": row["text"], "annotations": []}
    message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    (choice,) = msgspec.json.decode(row["choices"]) if row["choices"] is not None else [{}]
    output = [message] if row["text"] or not choice else []
    if "refusal" in choice:
        output.append({**message, "content": [{"type": "refusal", "refusal": choice["refusal"]}]})
    output += [{**call, "status": "completed"} for call in choice.get("tool_calls", ())]
    return {
        "id": f"{row['job_id']}-{row['row_index']}",
        "object": "response",
        "created_at": int(row["finished_at"].timestamp()),
        "model": row["model"],
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": row["prompt_tokens"],
            "output_tokens": row["completion_tokens"],
            "total_tokens": row["prompt_tokens"] + row["completion_tokens"],
            "input_tokens_details": {"cached_tokens": row["cached_tokens"]},
        },
    }


def openai_body(row: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """The response body that an OpenAI-compatible server would have given."""
    if row["choices"] is not None:
        choices = msgspec.json.decode(row["choices"])
    else:
        choices = [{"text": row["text"], "finish_reason": row["finish_reason"], "logprobs": row["logprobs"]}]
    return {
        "id": f"{row['job_id']}-{row['row_index']}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(row["finished_at"].timestamp()),
        "model": row["model"],
        "system_fingerprint": fingerprint(row["engine"]),
        "choices": [openai_choice(index, choice, chat=chat) for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": row["prompt_tokens"],
            "completion_tokens": row["completion_tokens"],
            "total_tokens": row["prompt_tokens"] + row["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": row["cached_tokens"]},
        },
    }


def fingerprint(engine: str | None) -> str | None:
    """An engine's name; of a server, whose name is its address, a digest, since clients of a batch read it."""
    if engine is None or "://" not in engine:
        return engine
    return f"fp_{hashlib.blake2b(engine.encode(), digest_size=5).hexdigest()}"


def openai_choice(index: int, choice: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """One entry of `choices` in the shape of its route."""
    beside: dict[str, Any] = {name: choice[name] for name in BESIDE if name in choice}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if beside and not choice["text"] else choice["text"],
        **beside,
    }
    text = {"message": message} if chat else {"text": choice["text"]}
    return {
        "index": index,
        **text,
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice["finish_reason"],
    }
