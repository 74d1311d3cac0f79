"""The openai package: chats, completions, responses, tools, errors. Arguments: URL with /v1, key, model."""

import json
import sys

import openai

url, key, model = sys.argv[1:4]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)

chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0)
assert "Paris" in chat.choices[0].message.content, chat
chunks = client.chat.completions.create(
    model=model,
    messages=QUESTION,
    max_tokens=24,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
text, usage = "", None
for chunk in chunks:
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
    usage = chunk.usage or usage
assert text == chat.choices[0].message.content
assert usage.completion_tokens == chat.usage.completion_tokens
completion = client.completions.create(model=model, prompt="One, two, three,", max_tokens=8, logprobs=1)
assert completion.choices[0].text
assert len(completion.choices[0].logprobs.tokens) == 8
with client.responses.stream(
    model=model, input="What is the capital of France?", max_output_tokens=24
) as stream:
    kinds = [event.type for event in stream]
assert kinds[0] == "response.created", kinds
assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
parameters = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
}
tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": parameters}}
called = client.chat.completions.create(
    model=model, messages=QUESTION, max_tokens=60, tools=[tool], tool_choice="required"
)
(call, *_) = called.choices[0].message.tool_calls
assert "city" in json.loads(call.function.arguments), called
for error, ask in (
    (openai.NotFoundError, lambda: client.embeddings.create(model=model, input="a")),
    (openai.NotFoundError, lambda: client.chat.completions.create(model="none", messages=QUESTION)),
    (
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=model, messages=QUESTION, max_tokens=-1),
    ),
    (
        openai.AuthenticationError,
        lambda: openai.OpenAI(base_url=url, api_key="guess", max_retries=0).models.list(),
    ),
):
    said = None
    try:
        ask()
    except error as refused:
        said = refused.body
    assert said is not None, f"{error.__name__} was expected"
    assert said["message"], said  # OpenAI's error body
