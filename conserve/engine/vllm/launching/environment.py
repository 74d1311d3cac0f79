"""What vLLM reads from the environment and where it writes, settled before it is imported."""

import functools
import logging
import os
import re
import tempfile
import textwrap
import warnings
from io import TextIOWrapper
from pathlib import Path

from conserve.engine.runtime.machine import Cores, cores

LOG_VARIABLE = "CONSERVE_ENGINE_LOG"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
TAIL_BYTES = 65_536
CONSEQUENCES = ("initialization failed", "EngineDeadError")  # what one process says when another has failed


def prepare_environment(*, offline: bool, served: bool = False) -> None:
    """Choose quiet, private defaults where the user chose none; `offline` where the model is a folder."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if served or os.environ.get(LOG_VARIABLE) else "ERROR")
    os.environ.setdefault(
        "VLLM_LOGGING_STREAM", "ext://sys.stderr"
    )  # vLLM's own choice is stdout, our data's
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # vLLM keeps one core for the front end, which a batch run leaves nearly idle: with both cores computing,
    # a two-core machine does 2,136 tokens/s instead of 1,297 (64 rows of 400 in, 48 out, SmolLM2-135M).
    # A server's front end is not idle: there vLLM's choice stands.
    if not served:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    bind_threads(cores())
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def bind_threads(found: Cores) -> None:
    """Compute on as many threads as the control group gives time for, unless the user bound them.

    vLLM binds a thread to each core of its affinity. With a quota of two cores' time on 64 cores, 64 threads would
    wait for each other to be let run.
    """
    if found.bounded_by_quota and BINDING not in os.environ:
        os.environ[BINDING] = "nobind"
        os.environ.setdefault("OMP_NUM_THREADS", str(found.usable))


def quiet_warnings() -> None:
    """Keep what torch and vLLM say of their own code off the user's terminal."""
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.reduce_op`")
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=r"builtin type [sS]wig\w+")
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=r"`torch\.jit\.script_method`")
    # A field of the chat request, which vLLM reads on every request.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="max_tokens is deprecated")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # "Triton not available", on every CPU
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # every retry when offline


class EngineLog:
    """What the engine writes: to the file the user named, or to one that is gone when we are."""

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        # Open to the end: vLLM's loggers and processes write here until they are gone.
        self._file = path.open("a+b", buffering=0) if path else tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._text = TextIOWrapper(self._file, write_through=True)
        self._mark = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def capture_loggers(self) -> None:
        """Send this process's vLLM loggers here too."""
        for handler in logging.getLogger("vllm").handlers:
            if type(handler) is logging.StreamHandler:  # vLLM's own; others' subclasses are left alone
                handler.stream = self._text  # not setStream, which flushes a stream that may be closed

    def mark(self) -> None:
        """Forget earlier errors."""
        self._mark = os.fstat(self.fileno()).st_size

    def last_error(self) -> str | None:
        """The last exception since the mark: vLLM's front end learns only that its processes failed."""
        return last_error(self.tail())

    def tail(self) -> str:
        """The end of what was written since the mark."""
        size = os.fstat(self.fileno()).st_size
        return os.pread(self.fileno(), TAIL_BYTES, max(self._mark, size - TAIL_BYTES)).decode(
            errors="replace"
        )


def last_error(log: str) -> str | None:
    """The last exception in a log that is not just the consequence of another."""
    errors = re.findall(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)$", log, re.MULTILINE)
    causes = [error for error in errors if not any(word in error for word in CONSEQUENCES)]
    return str(causes[-1]) if causes else None


@functools.cache
def engine_log() -> EngineLog:
    """The one log of this process's engine: vLLM's loggers keep it open to the end."""
    path = os.environ.get(LOG_VARIABLE)
    return EngineLog(Path(path).expanduser() if path else None)


def why_not_started(model: str, error: Exception) -> str:
    """One sentence for the user on a failed start; the engine's processes leave theirs in the log."""
    own = " ".join(str(error).split()) or type(error).__name__
    cause = engine_log().last_error() if "initialization failed" in own else None
    fix = f"set {LOG_VARIABLE}=engine.log to keep its log"
    return f"the engine cannot start with {model}: {gist(cause or own)}; {fix}"


def gist(message: str) -> str:
    """What vLLM says, without the wrapping of pydantic and of its worker processes, and not all of it."""
    message = re.sub(r"^\d+ validation errors? for \w+ Value error, ", "", message)
    message = re.sub(r"^RuntimeError: Worker failed with error '(.*)', please check .*$", r"\1", message)
    return textwrap.shorten(message, 300, placeholder=" ...").rstrip(".")
