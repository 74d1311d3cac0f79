"""Environment variables, warnings and logs of vLLM, set up before it is imported."""

import contextlib
import functools
import importlib
import logging
import os
import re
import tempfile
import textwrap
import warnings
from io import TextIOWrapper
from pathlib import Path

from conserve.engine.runtime.machine import BINDING, RESERVED, Cores, cores
from conserve.engine.vllm.compat.installed import installed_engine
from conserve.http_server import KEEP_ALIVE_S
from conserve.variables import ENGINE_LOG

JSON_LOGGING = Path(__file__).with_name("json_logging.json")  # for VLLM_LOGGING_CONFIG_PATH
TAIL_BYTES = 65_536
OUTPUTS = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
OUTPUTS_AT_ONCE = "32"  # requests; vLLM's default is 128
KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # of engine core and workers; vLLM's default is "fork"
PYDANTIC_DETAILS = (  # kind, value and address behind a complaint
    r" *\[type=\w+, input_value=.*?, input_type=\w+\](?: For further information visit https?://\S+)?"
)
CONSEQUENCES = ("initialization failed", "EngineDeadError")  # of one process after another one has failed


def prepare_environment(*, offline: bool, served: bool = False) -> None:
    """Set quiet, private defaults for variables that the user did not set; `offline` if the model is a folder."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if served or os.environ.get(ENGINE_LOG) else "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # vLLM's default, stdout, is for data
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # As `vllm serve` starts them. A fork of this process would lack its threads, and keep the locks that they hold.
    os.environ.setdefault(START_METHOD, "spawn")
    if served:
        # A live token leaves with those that are processed with it, and those of rows take time to become text.
        os.environ.setdefault(OUTPUTS, OUTPUTS_AT_ONCE)
        os.environ.setdefault(KEEP_ALIVE, str(KEEP_ALIVE_S))  # vLLM's 5 s end as the next poll comes
    else:
        # vLLM keeps one core for the front end, which is nearly idle in a batch run: with both cores computing,
        # a two-core machine does 2,136 tokens/s instead of 1,297 (64 rows of 400 in, 48 out, SmolLM2-135M).
        # A server's front end is busy: see `reserve_cores`.
        os.environ.setdefault(RESERVED, "0")
    bind_threads(cores())
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def bind_threads(found: Cores) -> None:
    """On a CPU, use as many threads as the control group gives time for, unless the user bound them.

    vLLM binds a thread to each core of its affinity. With a quota of two cores' time on 64 cores, 64 threads would
    wait for their turn. For a GPU vLLM shares out the quota itself, unless OMP_NUM_THREADS is set: then each worker
    serves with so many threads, which use the quota up.
    """
    engine = installed_engine()
    on_cpu = engine is not None and engine.computes_on_cpu
    if on_cpu and found.bounded_by_quota and BINDING not in os.environ:
        os.environ[BINDING] = "nobind"
        os.environ.setdefault("OMP_NUM_THREADS", str(found.usable))


def quiet_warnings() -> None:
    """Redirect torch's and vLLM's warnings from the terminal to the engine log."""
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.reduce_op`")
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=r"builtin type [sS]wig\w+")
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=r"`torch\.jit\.script_method`")
    # max_tokens is a field of the chat request, which vLLM reads on every request.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="max_tokens is deprecated")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # "Triton not available", on every CPU
    with contextlib.suppress(ImportError):
        importlib.import_module("huggingface_hub.utils.logging")  # which sets the level
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry when offline


class EngineLog:
    """Log of the engine: in the file that the user named, or in a temporary one."""

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        # Kept open: vLLM's loggers and processes write to it until they end.
        self._file = path.open("a+b", buffering=0) if path else tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._text = TextIOWrapper(self._file, write_through=True)
        self._mark = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def capture_loggers(self) -> None:
        """Send this process's vLLM loggers to this log too."""
        for handler in logging.getLogger("vllm").handlers:
            if type(handler) is logging.StreamHandler:  # vLLM's own; others' subclasses are left alone
                handler.stream = self._text  # not setStream, which flushes a stream that may be closed

    def mark(self) -> None:
        """Leave everything logged so far out of `last_error` and `tail`."""
        self._mark = os.fstat(self.fileno()).st_size

    def last_error(self) -> str | None:
        """The last exception since the mark: vLLM's front end only learns that its processes failed."""
        return last_error(self.tail())

    def tail(self) -> str:
        """The end of the text logged since the mark."""
        size = os.fstat(self.fileno()).st_size
        return os.pread(self.fileno(), TAIL_BYTES, max(self._mark, size - TAIL_BYTES)).decode(
            errors="replace"
        )


def last_error(log: str) -> str | None:
    """The last exception in a log that is not merely the consequence of another."""
    errors = re.findall(
        r"(?:^|^\(\w+ pid=\d+\) |\] )((?:\w+\.)*\w*(?:Error|Exception): .+)$", log, re.MULTILINE
    )
    causes = [error for error in errors if not any(word in error for word in CONSEQUENCES)]
    return str(causes[-1]) if causes else None


@functools.cache
def engine_log() -> EngineLog:
    """The engine log of this process. There is one, since vLLM's loggers keep it open to the end."""
    path = os.environ.get(ENGINE_LOG)
    return EngineLog(Path(path).expanduser() if path else None)


def why_not_started(model: str, error: Exception) -> str:
    """One sentence for the user on a failed start, with the cause that the engine's processes logged."""
    own = " ".join(str(error).split()) or type(error).__name__
    cause = engine_log().last_error() if "initialization failed" in own else None
    fix = f"set {ENGINE_LOG}=engine.log to keep its log"
    return f"the engine cannot start with {model}: {gist(cause or own)}; {fix}"


def gist(message: str) -> str:
    """The gist of an error of vLLM's: without the wrapping by pydantic and worker processes, shortened."""
    message = re.sub(r"^\d+ validation errors? for \w+ Value error, ", "", message)
    message = re.sub(PYDANTIC_DETAILS, "", message)
    message = re.sub(r"^RuntimeError: Worker failed with error '(.*)', please check .*$", r"\1", message)
    return textwrap.shorten(message.rstrip("."), 300, placeholder=" ...")
