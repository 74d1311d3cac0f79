"""HTTP requests that wait far longer than a slow machine needs: httpx gives up after five seconds."""

from functools import partial

import httpx

TIMEOUT_S = 600.0  # reached by a hang alone
get = partial(httpx.get, timeout=TIMEOUT_S)
head = partial(httpx.head, timeout=TIMEOUT_S)
options = partial(httpx.options, timeout=TIMEOUT_S)
post = partial(httpx.post, timeout=TIMEOUT_S)
put = partial(httpx.put, timeout=TIMEOUT_S)
request = partial(httpx.request, timeout=TIMEOUT_S)
stream = partial(httpx.stream, timeout=TIMEOUT_S)
Client = partial(httpx.Client, timeout=TIMEOUT_S)
