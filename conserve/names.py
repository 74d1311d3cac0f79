"""Names of policies and their parts in flags, settings and reports: for the engine, and for `bench` beside it."""

# Policies.
CONSERVE, PACED = "conserve", "paced"
ONLINE_ONLY, NON_PREEMPTIVE, PRIORITY = "online-only", "non-preemptive", "priority"
SARATHI_PP, HYGEN_STAR, HYGEN = "sarathi++", "hygen-star", "hygen"

ON, OFF = "on", "off"  # of checkpoints and full batches; rules of preemption have names instead of ON
PROMPT = "prompt"  # rule of preemption where none is named
DEFAULT_HARM = 0.1  # promised where the user promises nothing
