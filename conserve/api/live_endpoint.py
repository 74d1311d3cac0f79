"""Endpoint of servers that answer live requests too: rows wait behind these."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from conserve.api.running import ProfileFlags, make_endpoint
from conserve.config import Settings

if TYPE_CHECKING:
    from conserve.endpoints.protocol import Endpoint


def live_endpoint(
    urls: Sequence[str],
    lists: Sequence[str],
    settings: Settings,
    *,
    window: int | None,
    steady: bool = False,
    follow: bool = False,
    of_jobs: bool = False,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> "Endpoint":
    """The servers at these URLs and of these lists as one endpoint; the fake if the first URL is its address.

    `window` is the most rows in flight at each server, and `steady` keeps that many whatever the load. With
    `follow` several servers may all be gone for a while: the rows wait for one. With `of_jobs` the model is that
    of the queued jobs, which a single server need not have.
    """
    if not lists and not urls[0].startswith(("http://", "https://")):
        return make_endpoint(settings, [], ProfileFlags(), say=say)
    from conserve.endpoints.roster import rosters_of
    from conserve.jobs.fleet.fleet import Fleet

    several = len(urls) > 1 or bool(lists)
    return Fleet(
        rosters_of(urls, lists),
        partial(
            live_server, settings=settings, window=window, steady=steady, of_fleet=several, of_jobs=of_jobs
        ),
        model=settings.model if several else None,
        patient=bool(lists) or (follow and several),
        say=say,
        warn=warn,
    )


def live_server(
    url: str,
    *,
    settings: Settings,
    window: int | None,
    steady: bool = False,
    of_fleet: bool = False,
    of_jobs: bool = False,
) -> "Endpoint":
    """One server as an endpoint; `of_fleet` and `of_jobs` are as of `HttpEndpoint`."""
    from conserve.endpoints.exchange import AnswerLimits
    from conserve.endpoints.http import HttpEndpoint

    return HttpEndpoint(
        url,
        api_key=settings.harvest_key or settings.api_key,
        model=settings.model,
        most_rows=window,
        considerate=True,
        steady=steady,
        of_fleet=of_fleet,
        of_jobs=of_jobs,
        limits=AnswerLimits.of(settings),
    )
