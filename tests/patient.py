"""HTTP requests that wait far longer than a slow machine needs: httpx gives up after five seconds."""

from functools import partial

import httpx

from tests.commands import HANGS_S

get = partial(httpx.get, timeout=HANGS_S)
head = partial(httpx.head, timeout=HANGS_S)
options = partial(httpx.options, timeout=HANGS_S)
post = partial(httpx.post, timeout=HANGS_S)
put = partial(httpx.put, timeout=HANGS_S)
request = partial(httpx.request, timeout=HANGS_S)
stream = partial(httpx.stream, timeout=HANGS_S)
Client = partial(httpx.Client, timeout=HANGS_S)
