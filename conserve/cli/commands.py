"""The commands: the module of each, and its line in the program's help. Imports none of them."""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

EXAMPLE = """
conserve submit data.parquet --prompt "Summarize: {{ text }}" --max-tokens 128
conserve run
conserve results last -o answers.parquet
"""
SUMMARY = "Run batch LLM work from a durable queue; no row is lost or answered twice."
OPTIONS = {
    "--home DIR": "Folder of the store, instead of CONSERVE_HOME.",
    "--version": "Show the version and exit.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Print the completion script of the current shell.",
    "-h, --help": "Show this message and exit.",
}


class CommandEntry(NamedTuple):
    """One command. Its module has a function of its name, or `VERBS`; the summary fits on a line of 80."""

    module: str
    summary: str

    def load(self) -> ModuleType:
        """Import the module."""
        return import_module(f"conserve.cli.{self.module}")


COMMANDS = {
    "submit": CommandEntry("submit", "Queue a file of prompts and print the job's id."),
    "run": CommandEntry("run", "Run queued rows until none is left."),
    "serve": CommandEntry("serve", "Serve a model like vllm serve, and run queued rows beside."),
    "api": CommandEntry("api", "Serve OpenAI's files and batches over the store."),
    "keys": CommandEntry("keys", "Make, list and revoke keys of the Batch API and of live requests."),
    "hooks": CommandEntry("hooks", "Tell other programs of batches that end, by signed webhooks."),
    "harvest": CommandEntry("harvest", "Send queued rows to a server that serves live requests too."),
    "fleet": CommandEntry("fleet", "List the servers that get rows; drain one of them."),
    "status": CommandEntry("status", "Show how far the jobs are, and how live requests fare."),
    "top": CommandEntry("top", "Show jobs with forecasts, and servers, live; pause and resume jobs."),
    "jobs": CommandEntry("jobs", "List all jobs, the newest first."),
    "results": CommandEntry("results", "Write the answers a job has so far, in input order."),
    "sql": CommandEntry("sql", "Query jobs, results, inputs, requests and evaluations with DuckDB."),
    "show": CommandEntry("show", "Show one row: what was asked, the answer, where it is now."),
    "pause": CommandEntry("control", "Stop taking rows of a job."),
    "resume": CommandEntry("control", "Let a paused job go on, or a refused one try again."),
    "deadline": CommandEntry("deadline", "Give a job a deadline, and say what becomes of it then."),
    "forecast": CommandEntry("forecast", "Forecast when jobs are done, with 50 and 90 % probability."),
    "cancel": CommandEntry("control", "Stop a job for good; the results it has are kept."),
    "retry": CommandEntry("control", "Put the failed rows of a job back into the queue."),
    "check": CommandEntry("check", "Find what is damaged in the store, and mend it."),
    "rm": CommandEntry("rm", "Remove jobs with their requests and results."),
    "prune": CommandEntry("rm", "Remove finished jobs that ended long ago, and empty the trash."),
    "store": CommandEntry("storage", "Show the store's size, move it, back it up and restore it."),
    "eval": CommandEntry("evaluations", "Run evaluations every night, and say whether the model is worse."),
    "profile": CommandEntry("profile", "Measure how long the engine's iterations take, and show it."),
    "bench": CommandEntry("bench", "Play live traffic under each policy in turn, and compare."),
    "tune": CommandEntry("tune", "Search the promise to live requests that gives queued rows most."),
    "doctor": CommandEntry("doctor", "Try the engine, the endpoint, the store and the machine."),
    "help": CommandEntry("help", "Explain the program, or one command."),
}


def overview() -> str:
    """Help of the program; the example first, which is what most readers look for."""
    example = "\n".join(f"  {line}" for line in EXAMPLE.strip().splitlines())
    commands = {name: entry.summary for name, entry in COMMANDS.items()}
    return (
        f"Example:\n{example}\n\n"
        "Usage: conserve [OPTIONS] COMMAND [ARGS]...\n\n"
        f"  {SUMMARY}\n\n"
        f"Options:\n{definitions(OPTIONS)}\n\n"
        f"Commands:\n{definitions(commands)}\n"
    )


def definitions(terms: dict[str, str]) -> str:
    """Terms and their meanings in two columns."""
    width = max(map(len, terms))
    return "\n".join(f"  {term:<{width}}  {meaning}" for term, meaning in terms.items())
