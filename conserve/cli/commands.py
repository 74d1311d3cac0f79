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


class Entry(NamedTuple):
    """One command. The module has a function of the command's name; the summary fits on a line of 80."""

    module: str
    summary: str

    def load(self) -> ModuleType:
        """Import the module."""
        return import_module(f"conserve.cli.{self.module}")


COMMANDS = {
    "submit": Entry("submit", "Queue a file of prompts and print the job's id."),
    "run": Entry("run", "Run queued rows until none is left."),
    "serve": Entry("serve", "Serve a model like vllm serve, and run queued rows beside."),
    "api": Entry("api", "Serve OpenAI's files and batches over the store."),
    "keys": Entry("keys", "Make, list and revoke keys of the Batch API and of live requests."),
    "hooks": Entry("hooks", "Tell other programs of batches that end, by signed webhooks."),
    "harvest": Entry("harvest", "Send queued rows to a server that serves live requests too."),
    "fleet": Entry("fleet", "List the servers that get rows; drain one of them."),
    "status": Entry("status", "Show how far the jobs are, and how live requests fare."),
    "top": Entry("top", "Show jobs with forecasts, and servers, live; pause and resume jobs."),
    "jobs": Entry("jobs", "List all jobs, the newest first."),
    "results": Entry("results", "Write the answers a job has so far, in input order."),
    "sql": Entry("sql", "Query jobs, results, inputs, requests and evaluations with DuckDB."),
    "show": Entry("show", "Show one row: what was asked, the answer, where it is now."),
    "pause": Entry("control", "Stop taking rows of a job."),
    "resume": Entry("control", "Let a paused job go on, or a refused one try again."),
    "deadline": Entry("deadline", "Give a job a deadline, and say what becomes of it then."),
    "forecast": Entry("forecast", "Forecast when jobs are done, with 50 and 90 % probability."),
    "cancel": Entry("control", "Stop a job for good; the results it has are kept."),
    "retry": Entry("control", "Put the failed rows of a job back into the queue."),
    "check": Entry("check", "Find what is damaged in the store, and mend it."),
    "rm": Entry("rm", "Remove jobs with their requests and results."),
    "prune": Entry("rm", "Remove finished jobs that ended long ago, and empty the trash."),
    "store": Entry("storage", "Show the store's size, move it, back it up and restore it."),
    "eval": Entry("evaluations", "Run evaluations every night, and say whether the model is worse."),
    "profile": Entry("profile", "Measure how long the engine's iterations take, and show it."),
    "bench": Entry("bench", "Play live traffic under each policy in turn, and compare."),
    "tune": Entry("tune", "Search the promise to live requests that gives queued rows most."),
    "doctor": Entry("doctor", "Try the engine, the endpoint, the store and the machine."),
    "help": Entry("help", "Explain the program, or one command."),
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
