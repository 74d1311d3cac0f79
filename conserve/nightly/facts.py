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

ANSWER_S = 5.0


def facts_of(settings: Settings, target: ModelTarget, outcome: SuiteOutcome) -> dict[str, str]:
    """Facts about a target and the answers that it gave, whose items have been read."""
    origins = outcome.origins or asked_origins(settings, outcome.job_ids)
    given = {
        "model": target.model or settings.engine_model,
        "endpoint": target.endpoint or settings.endpoint,
        "flags": flags_of((settings.engine_args, *target.engine_args)),
        "conserve": __version__,
        "engine": ", ".join(sorted(origins.engines)),
        "served_model": ", ".join(sorted(origins.models)),
    }
    given |= served_by(given["endpoint"]) if given["endpoint"] else embedded(given["model"] or "", settings)
    if given["endpoint"] and target.model is None:
        del given["model"]  # the settings' own, which the endpoint does not serve
    given["endpoint"] = address_of(given["endpoint"] or "")
    return {name: value for name, value in given.items() if value}


def asked_origins(settings: Settings, job_ids: Sequence[str]) -> AnswerOrigins:
    """Engines and models that the results name: an embedded engine's name holds a digest of weights and dtype."""
    origins = AnswerOrigins()
    query = "select distinct engine, model, error from results where error is null"
    for row in rows_of(settings, query, job_ids) if job_ids else ():
        origins.noted(row)
    return origins


def embedded(model: str, settings: Settings) -> dict[str, str | None]:
    """Facts about an engine of the run's own."""
    from conserve.engine.vllm.compat.installed import installed_engine

    engine = installed_engine()
    return {
        "vllm": engine.version if engine else None,
        "chat_template": template_digest(folder_of(model, settings)),
    }


def served_by(endpoint: str) -> dict[str, str | None]:
    """Facts that a vLLM server tells of itself; other servers tell none."""
    import httpx

    if not endpoint.startswith(("http://", "https://")):
        return {}
    try:
        answer = httpx.get(f"{endpoint.rstrip('/').removesuffix('/v1')}/version", timeout=ANSWER_S)
        return {"vllm": str(answer.json()["version"])}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return {}


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
