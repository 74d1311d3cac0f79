"""Local tasks in the shapes of MMLU, TruthfulQA, GSM8K and a corpus; a tokenizer whose tokens are characters."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.evals.reference")

SUBJECTS = ("stones", "birds", "rivers", "bridges", "clocks", "ships", "winds", "roots")
LETTERS = ("A", "B", "C", "D")
WHOLE = "{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No network, a cache of data sets of this session's own, and answers of the fake endpoint."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))
    monkeypatch.setenv("CONSERVE_FAKE", "1")


@pytest.fixture(scope="session")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model without weights, whose tokens are characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"?": 0, "<end>": 1, "\n": 2} | {chr(code): code for code in range(32, 127) if code != 63}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    folder = tmp_path_factory.mktemp("characters")
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of task files for lm-eval, with their data."""
    folder = tmp_path_factory.mktemp("tasks")
    chosen = [
        {"question": f"What is {subject}?", "choices": list(SUBJECTS[at : at + 4]), "answer": at % 4}
        for at, subject in enumerate(SUBJECTS[:4])
    ]
    write_task(
        folder, "knows", chosen, output_type="multiple_choice", doc_to_text=WHOLE, doc_to_choice=list(LETTERS),
        doc_to_target="answer", num_fewshot=2, metric_list=[{"metric": "acc"}], target_delimiter="",
    )  # fmt: skip
    write_task(
        folder, "says", chosen, output_type="multiple_choice", doc_to_text="Q: {{question}}\nA:",
        doc_to_choice="choices", doc_to_target="answer", num_fewshot=0,
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip
    sums = [{"question": f"{a} + {a}", "answer": str(2 * a)} for a in range(6)]
    write_task(
        folder, "counts", sums, output_type="generate_until", doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_target="answer", num_fewshot=2, metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": ["\n", "cedar", "X", "Y", "Z"], "do_sample": False, "max_gen_toks": 6},
    )  # fmt: skip
    write_task(
        folder, "dreams", sums, output_type="generate_until", doc_to_text="{{question}}", doc_to_target="answer",
        num_fewshot=0, metric_list=[{"metric": "exact_match"}], repeats=2,
        generation_kwargs={"until": ["\n"], "do_sample": True, "temperature": 1.0, "max_gen_toks": 6},
    )  # fmt: skip
    write_task(
        folder, "reads", [{"text": "a river runs"}, {"text": "x" * 150}], output_type="loglikelihood_rolling",
        doc_to_text="", doc_to_target="{{text}}", metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    return folder


def write_task(folder: Path, name: str, rows: Sequence[dict[str, Any]], **task: Any) -> None:
    """Write one task: its file and its rows; the first two are also the shots."""
    test, shots = folder / f"{name}.jsonl", folder / f"{name}_shots.jsonl"
    test.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shots.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    files = {"test": str(test)}
    document = {"task": name, "dataset_path": "json", "test_split": "test", **task}
    if task.get("num_fewshot"):
        files["shots"] = str(shots)
        document |= {"fewshot_split": "shots", "fewshot_config": {"sampler": "first_n"}}
    document["dataset_kwargs"] = {"data_files": files}
    (folder / f"{name}.yaml").write_text(json.dumps(document))  # YAML reads JSON


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Warnings of the harnesses are theirs."""
    for item in items:
        if "tests/evals" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
