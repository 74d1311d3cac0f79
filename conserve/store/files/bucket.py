"""Buckets: object storage that holds the files of a store.

A bucket's URL names the service, the bucket and a prefix: s3://bucket/prefix. pyarrow's filesystems reach it, with
credentials from the places where the service's own tools look for them. A URL with credentials in it is refused,
since the store's database keeps the URL, and messages show it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from conserve.errors import SEE_DOCTOR, SettingsError, StoreUnreachable

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

SCHEMES = ("s3", "gs", "az")
OPTIONS = ("endpoint", "region")
# Without any character that a pattern or SQL reads.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*(/[A-Za-z0-9._=+-]+)*")
CONNECT_S = 3.0
REQUEST_S = 10.0  # without a byte
ATTEMPTS = 3  # of one request; all together end before a lease does
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or a service account",
    "az": "AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY, or a managed identity",
}
SAID = re.compile(
    r"AWS Error ([A-Z_]+)(?: \(HTTP status (\d+)\))?.*?(?:curlCode: \d+, ([^:;\[]*))?$", re.DOTALL
)


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Bucket:
    """A bucket and a prefix in it."""

    scheme: str
    root: str  # bucket and prefix, as in bucket/prefix
    endpoint: str | None = None  # address of another server than the service's own
    region: str | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL; raises `SettingsError`, whose text never repeats a URL that may hold credentials."""
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        if scheme not in SCHEMES:
            raise SettingsError("files of a store lie in a folder, or in s3://, gs:// or az://BUCKET/PREFIX")
        endpoint = urlsplit(options.get("endpoint", ""))
        if "@" in unquote(rest) or ":" in place:
            raise with_credentials(scheme)
        if unknown := sorted(options.keys() - set(OPTIONS)):
            if any(re.search(r"key|secret|token|password|sig", name, re.IGNORECASE) for name in unknown):
                raise with_credentials(scheme)
            raise SettingsError(f"a {scheme}:// URL takes {' and '.join(OPTIONS)}, not {unknown[0][:40]!r}")
        root = place.strip("/")
        if not NAME.fullmatch(root):
            raise SettingsError(
                f"a {scheme}:// URL names a bucket and a prefix of letters, digits and . _ = + - /; correct it"
            )
        if options.get("endpoint") and endpoint.scheme not in ("http", "https"):
            raise SettingsError(
                f"the endpoint of a {scheme}:// URL begins with http:// or https://; correct it"
            )
        return cls(
            scheme=scheme,
            root=root,
            endpoint=options.get("endpoint") or None,
            region=options.get("region") or None,
        )

    @property
    def name(self) -> str:
        """Name of the bucket alone."""
        return self.root.partition("/")[0]

    @property
    def url(self) -> str:
        """URL of the bucket, which has no credentials."""
        options = {name: value for name in OPTIONS if (value := getattr(self, name))}
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in options.items())
        return f"{self.scheme}://{self.root}" + (f"?{query}" if query else "")

    def is_at(self, other: "Bucket") -> bool:
        """True if both name one place; the address that leads there may differ between machines."""
        return (self.scheme, self.root) == (other.scheme, other.root)

    def filesystem(self) -> "FileSystem":
        """Connect to the service; one connection serves a process."""
        with reached(self):
            return connected(self, os.getpid())


def with_credentials(scheme: str) -> SettingsError:
    """Error for a URL that carries credentials."""
    return SettingsError(
        f"the {scheme}:// URL has credentials in it, or a ':' or '@'; take them out: they come from "
        f"{CREDENTIALS[scheme]}"
    )


@lru_cache(maxsize=16)
def connected(bucket: Bucket, pid: int) -> "FileSystem":
    """Filesystem of a bucket in the process `pid`: connections do not survive a fork."""
    from pyarrow import fs

    if bucket.scheme == "gs":
        return fs.GcsFileSystem(
            endpoint_override=urlsplit(bucket.endpoint).netloc if bucket.endpoint else None,
            scheme=urlsplit(bucket.endpoint).scheme if bucket.endpoint else "https",
        )
    if bucket.scheme == "az":
        return fs.AzureFileSystem(
            account_name=os.environ.get("AZURE_STORAGE_ACCOUNT", ""),
            account_key=os.environ.get("AZURE_STORAGE_KEY"),
        )
    endpoint = endpoint_of(bucket)
    return fs.S3FileSystem(
        region=bucket.region or region_of(bucket, endpoint),
        endpoint_override=urlsplit(endpoint).netloc if endpoint else None,
        scheme=urlsplit(endpoint).scheme if endpoint else "https",
        connect_timeout=CONNECT_S,
        request_timeout=REQUEST_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # a file of one part is one request, and leaves no unfinished upload
    )


def endpoint_of(bucket: Bucket) -> str | None:
    """Address of the S3 server, if it is not Amazon's."""
    environ = os.environ
    return bucket.endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")


def region_of(bucket: Bucket, endpoint: str | None) -> str:
    """Region that the environment names, or that of the bucket."""
    from pyarrow import fs

    if named := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        return named
    return "us-east-1" if endpoint else str(fs.resolve_s3_region(bucket.name))


@contextmanager
def reached(bucket: Bucket) -> Iterator[None]:
    """Turn errors of a service into `StoreUnreachable`; a missing object stays a `FileNotFoundError`.

    The service's own text is not repeated beyond its code, since it may name keys.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreUnreachable(
            f"{bucket.scheme}://{bucket.root} cannot be reached ({reason(error)}); nothing that was committed is "
            "lost",
            step=SEE_DOCTOR,
            joint=", ",
        ) from None


def reason(error: OSError) -> str:
    """Code of a service's error, and the words of a connection's."""
    found = SAID.search(str(error))
    if found is None:
        return error.strerror or type(error).__name__
    code, status, said = found.groups()
    words = [code.lower().replace("_", " "), f"HTTP {status}" if status else "", (said or "").strip().lower()]
    return ", ".join(word for word in words if word)
