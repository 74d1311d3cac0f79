"""LiteLLM, by its two ways to an OpenAI-compatible server. Arguments: URL with /v1, key, model."""

import asyncio
import sys

import litellm

url, key, model = sys.argv[1:4]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

for provider in ("openai", "hosted_vllm"):
    asked = {
        "model": f"{provider}/{model}", "api_base": url, "api_key": key, "messages": QUESTION, "max_tokens": 24,
        "temperature": 0, "num_retries": 0,
    }  # fmt: skip
    whole = litellm.completion(**asked)
    assert "Paris" in whole.choices[0].message.content, whole
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)
    )
    assert streamed == whole.choices[0].message.content
    missing = ""
    try:
        litellm.embedding(model=f"{provider}/{model}", input=["a"], api_base=url, api_key=key)
    except litellm.exceptions.NotFoundError as refused:
        missing = str(refused)
    assert "/v1/embeddings" in missing, missing


async def together() -> None:
    answers = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(8)))
    assert {answer.choices[0].message.content for answer in answers} == {whole.choices[0].message.content}


asyncio.run(together())
