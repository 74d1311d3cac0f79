"""Names of a request's fields, to find a misspelt one: servers ignore a name that they do not know."""

from collections.abc import Iterable
from difflib import get_close_matches

from conserve.jobs.task import KEEP_LOGPROBS

GENERATION = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos
include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_payload
mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt prompt_embeds prompt_logprobs
reasoning_effort repetition_detection repetition_penalty request_id response_format return_mm_kwargs
return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
stop_token_ids stream stream_interval stream_options structured_outputs suffix temperature
thinking_token_budget tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens truncation_side
use_beam_search user vllm_xargs watermarking
"""
"""Fields that vLLM 0.32 takes for chats and completions."""

OTHER_ROUTES = """
background dimensions embed_dtype enable_response_messages encoding_format endianness include input
instructions max_output_tokens max_tool_calls metadata padding previous_input_messages previous_response_id
prompt_cache_key reasoning service_tier store text truncation use_activation
"""
"""Fields that vLLM 0.32 takes for responses and embeddings alone."""

OPENAI_ALONE = """
audio best_of function_call functions modalities prediction prompt_cache_retention safety_identifier verbosity
web_search_options
"""
"""Fields of OpenAI's that vLLM does not name."""

KNOWN = frozenset([*" ".join((GENERATION, OTHER_ROUTES, OPENAI_ALONE)).split(), KEEP_LOGPROBS])


def unknown_name(names: Iterable[str], sends: str = "--unknown-params sends") -> str | None:
    """Sentence on the first name that neither vLLM nor OpenAI has, with the nearest known one; None without one.

    `sends` says what sends it all the same.
    """
    for name in names:
        if name not in KNOWN:
            near = get_close_matches(name, KNOWN, n=1)
            meant = f"did you mean {near[0]}? If not, " if near else ""
            return f"neither vLLM nor OpenAI has a field {name}; {meant}{sends} it all the same"
    return None
