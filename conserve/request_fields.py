"""Names of ConServe's own fields in a request's `vllm_xargs`, for those who send them and those who read them."""

TTFT_ARGUMENT = "conserve_ttft_ms"  # a TTFT promise of the request's own
CLASS_ARGUMENT = "conserve_class"  # the class of live traffic that the request belongs to
PUSH_ARGUMENT = "conserve_push"  # true for a row whose job would miss its deadline
RESUME_ARGUMENT = "conserve_resume"  # token ids that an earlier attempt generated
ARGUMENTS = frozenset({TTFT_ARGUMENT, CLASS_ARGUMENT, PUSH_ARGUMENT, RESUME_ARGUMENT})
