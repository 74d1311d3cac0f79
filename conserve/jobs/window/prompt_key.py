"""Keys of prompts: the beginning of a request as the engine sees it, one number a block."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from conserve.endpoints.protocol import KvCache
from conserve.jobs.window.prefix_tree import Key

# Of English text. A wrong figure changes only how much two prompts are believed to share.
BYTES_PER_TOKEN = 4
IN_FRONT = ("tools", "documents", "chat_template", "chat_template_kwargs", "cache_salt", "add_special_tokens")


def prompt_key(url: str, body: Mapping[str, Any], cache: KvCache) -> Key:
    """Key of a prompt: for each whole block a hash of it and of all before it, no more blocks than the cache holds.

    Text is cut by its bytes, since no tokenizer is at hand; prompts of token ids are cut as the engine does.
    The numbers mean nothing in another process.
    """
    front = msgspec.json.encode([body.get(name) for name in IN_FRONT], order="sorted")
    seed = hash((url, front))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        blocks = cut(tuple(prompt), cache.block_tokens)
    else:
        text = (
            prompt
            if isinstance(prompt, str)
            else chat_text(body.get("messages") or prompt or body.get("input"))
        )
        blocks = cut(text.encode(errors="surrogatepass"), cache.block_tokens * BYTES_PER_TOKEN)
    return chained(blocks[: cache.num_blocks], seed)


def chat_text(messages: object) -> str:
    """The messages one after the other, as a chat template writes them."""
    if not isinstance(messages, list):
        return written(messages)
    return "".join(
        f"\x02{message.get('role')}\x03{written(message.get('content'))}"
        if isinstance(message, Mapping)
        else written(message)
        for message in messages
    )


def written(content: object) -> str:
    """Text as it is, anything else as JSON."""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def cut(sequence: Any, size: int) -> Sequence[Any]:
    """Cut a sequence into whole blocks; the rest at its end is dropped, since it cannot be shared."""
    return [sequence[start : start + size] for start in range(0, len(sequence) - size + 1, size)]


def chained(blocks: Iterable[Any], seed: int) -> Key:
    """Hash of each block and all blocks before it, 8 bytes each."""
    key = array("q")
    so_far = seed
    for block in blocks:
        so_far = hash((so_far, block))
        key.append(so_far)
    return key
