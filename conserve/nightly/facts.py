"""Facts about what answered a run: versions, flags, and digests. Two runs that differ in one say so."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from conserve import __version__
from conserve.config import DEMO_MODEL, Settings
from conserve.evals.outcome import AnswerOrigins, SuiteOutcome
from conserve.evals.plan import ModelTarget
from conserve.nightly.redacted import address_of, flags_of
from conserve.nightly.rows import rows_of
from conserve.nightly.targets import ask_server, with_target


def facts_of(settings: Settings, target: ModelTarget, outcome: SuiteOutcome) -> dict[str, str]:
    """Facts about a target and the answers that it gave, whose items have been read."""
    origins = outcome.origins or asked_origins(settings, outcome.job_ids)
    given = asked_facts(settings, target) | {
        "conserve": __version__,
        "engine": ", ".join(sorted(origins.engines)),
        "served_model": ", ".join(sorted(origins.models)),
    }
    return {name: value for name, value in given.items() if value}


def asked_facts(settings: Settings, target: ModelTarget) -> dict[str, str | None]:
    """Facts about what is asked; a server has a model, flags and a version of vLLM that are not the settings'."""
    if target.answered_by == "serve":
        return {"model": target.model}
    asked, flags = with_target(settings, target), flags_of((settings.engine_args, *target.engine_args))
    if asked.endpoint is None:
        return {"model": asked.engine_model, "flags": flags, **engine_facts(asked.engine_model, settings)}
    given = {"model": target.model, "endpoint": address_of(asked.endpoint), "flags": flags}
    return given | served_by(asked.endpoint, settings.api_key)


def asked_origins(settings: Settings, job_ids: Sequence[str]) -> AnswerOrigins:
    """Engines and models that the results name: an embedded engine's name holds a digest of weights and dtype."""
    origins = AnswerOrigins()
    query = "select distinct engine, model, error from results where error is null"
    for row in rows_of(settings, query, job_ids) if job_ids else ():
        origins.noted(row)
    return origins


def engine_facts(model: str, settings: Settings) -> dict[str, str | None]:
    """Facts about an engine of the run's own."""
    from conserve.engine.vllm.compat.installed import installed_engine

    engine = installed_engine()
    return {
        "vllm": engine.version if engine else None,
        "chat_template": template_digest(folder_of(model, settings)),
    }


def served_by(endpoint: str, api_key: str | None) -> dict[str, str | None]:
    """Facts that a vLLM server tells of itself; other servers tell none."""
    from conserve.endpoints.discovery import vllm_version

    version = ask_server(endpoint, api_key, vllm_version) if endpoint.startswith("http") else None
    return {} if version is None else {"vllm": version.removeprefix("vLLM ")}


def folder_of(model: str, settings: Settings) -> Path | None:
    """Folder of a model on this machine; None if there is none."""
    from conserve.engine.vllm.model.demo_model import converted
    from conserve.engine.vllm.model.tokenizer import folder_at_hand

    return converted(settings.models_folder) if model == DEMO_MODEL else folder_at_hand(model)


def template_digest(folder: Path | None) -> str | None:
    """Digest of a model's chat template; None if it has none."""
    if folder is None:
        return None
    try:
        text = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            text = json.dumps(config["chat_template"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
