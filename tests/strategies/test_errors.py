"""What an error says where only its words go."""

from __future__ import annotations

from torch.utils.data import DataLoader, Dataset

from policyfit.strategies.errors import in_words


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError("the disk is gone")


def test_words_are_kind_and_message_of_any_length_and_of_none() -> None:
    class Speechless(Exception):
        def __str__(self) -> str:
            raise KeyError

    assert in_words(ValueError("two\nlines")) == "ValueError: two\nlines"
    assert in_words(Speechless()) == "Speechless"
    assert len(in_words(ValueError("x" * 1_000_000))) == 10_000


def test_words_of_a_worker_are_those_of_the_error_that_it_met() -> None:
    error = None
    try:
        list(DataLoader(Broken(), num_workers=1))
    except ValueError as caught:
        error = caught
    assert error is not None
    assert "Original Traceback" in str(error)
    assert in_words(error) == "ValueError: the disk is gone"
