"""What is told once."""

from __future__ import annotations

from gemmtuned.configs.say import Once


def test_a_text_is_new_once_and_the_memory_of_texts_is_bounded() -> None:
    told = Once(most=3)

    assert [told.is_new(text) for text in "abab"] == [True, True, False, False]
    assert [told.is_new(text) for text in "cd"] == [True, True]
    assert not told.is_new("b")  # told lately
    assert told.is_new("a")  # forgotten
    for number in range(10_000):
        assert told.is_new(f"error at {number}")
    assert len(told._told) == 3
