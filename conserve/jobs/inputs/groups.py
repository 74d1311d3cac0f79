"""Size of row groups, the rows that are read, rendered and written at a time."""

ROWS_PER_GROUP = 8192  # a claim reads whole row groups; this many short requests parse in about 10 ms
GROUP_BYTES = 16 << 20  # of payload, whichever comes first: long requests must not fill the memory
