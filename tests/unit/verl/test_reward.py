"""The reward function, with the library's own verifier."""

from __future__ import annotations

import json

import pytest

from foremoe.errors import LaunchError

pytest.importorskip("reasoning_gym")

from foremoe.verl import reward

INFO = {"task": "chain_sum", "entry": json.dumps({"question": "4 - 9 =", "answer": "-5", "metadata": {}})}


@pytest.mark.parametrize(
    ("answer", "verified", "form"),
    [("-5", 1.0, 1.0), (" -5 ", 1.0, 1.0), ("5", 0.0, 1.0), ("", 0.0, 0.0), ("- 5", 0.0, 0.0), ("six", 0.0, 0.0)],
)
def test_verifier_and_form_are_told_apart(answer: str, verified: float, form: float) -> None:
    score = reward.compute_score("reasoning_gym/chain_sum", answer, "-5", INFO)
    assert (score["verified"], score["form"]) == (verified, form)
    assert score["score"] == pytest.approx(verified + 0.1 * form)


def test_text_answers_have_the_form_of_one_line() -> None:
    assert reward.has_form_of("a cat", "the dog")
    assert not reward.has_form_of("a\ncat", "the dog")


def test_rows_that_did_not_come_from_the_library_are_refused() -> None:
    with pytest.raises(LaunchError, match="foremoe data"):
        reward.compute_score("gsm8k", "4", "4", {"index": 3})
