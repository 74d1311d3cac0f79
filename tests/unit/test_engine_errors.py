"""Gist of an error of vLLM's for the user, and its cause in the log of the engine's processes."""

import pytest
from pydantic import BaseModel, Field, ValidationError

from conserve.engine.vllm.launching.environment import gist, last_error

WRAPPED = (
    "1 validation error for ParallelConfig Value error, Total number of attention heads (9) must be divisible by "
    "tensor parallel size (2). [type=value_error, input_value=ArgsKwargs((), {'model_co...[30]}), "
    "input_type=ArgsKwargs] For further information visit https://errors.pydantic.dev/2.14/v/value_error"
)
HEADS = "Total number of attention heads (9) must be divisible by tensor parallel size (2)"


class Sizes(BaseModel):
    width: int = Field(gt=0)
    height: int


def test_the_gist_has_nothing_of_what_wraps_it() -> None:
    assert gist(WRAPPED) == HEADS


def test_several_complaints_are_all_in_the_gist() -> None:
    with pytest.raises(ValidationError) as caught:
        Sizes(width=-1, height="a] b")  # type: ignore[arg-type]
    told = gist(" ".join(str(caught.value).split()))
    assert told == (
        "2 validation errors for Sizes width Input should be greater than 0 "
        "height Input should be a valid integer, unable to parse string as an integer"
    )


def test_brackets_of_the_complaint_itself_stay() -> None:
    assert gist("no kernel for [type=fp8]; choose another") == "no kernel for [type=fp8]; choose another"


def test_the_gist_of_a_workers_error_is_the_workers() -> None:
    said = "RuntimeError: Worker failed with error 'out of memory', please check the stack trace above"
    assert gist(said) == "out of memory"


def test_a_long_message_is_cut_between_words() -> None:
    told = gist("word " * 200 + "end.")
    assert len(told) <= 300
    assert told.endswith("word ...")


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("all is well\n", None),
        ("(EngineCore pid=3) ValueError: no such layer\n", "ValueError: no such layer"),
        ("ERROR 11-30 10:00:00 [core.py:1] ValueError: no such layer\n", "ValueError: no such layer"),
        (
            "ValueError: no such layer\nRuntimeError: Engine core initialization failed. See above\n",
            "ValueError: no such layer",
        ),
        ("ValueError: first\nvllm.errors.OddError: second\n", "vllm.errors.OddError: second"),
    ],
)
def test_the_last_error_is_the_cause(log: str, error: str | None) -> None:
    assert last_error(log) == error
