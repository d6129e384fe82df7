"""Prompts of `nanocp demo`: beginnings of tales, short and long."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHORT_PROMPTS = (
    "Once upon a time there was",
    "The king had three sons, and the youngest",
    "'Who are you?' said the old woman.",
    "In the middle of the forest the children found a little house, and",
    "The fox said to the golden bird,",
    "The princess looked up, and there stood " * 4,
)
LONG_PROMPT_TOKENS = (2000, 3000)
SAMPLED_PROMPT = "Once upon a time"
_WHO = ("a miller", "a tailor", "an old king", "a poor fisherman", "a queen", "a young prince")
_WHAT = ("a golden ring", "three apples", "a white horse", "a silver key", "a little bird")
_WHERE = ("in the forest", "by the sea", "on a high hill", "at the well", "in the castle")
_SENTENCES = (
    "There was once {who} who had {what} and lived {where}.",
    "One day {who} went out and found {what} {where}.",
    "'Give me {what},' said {who}, 'and I will take you home.'",
    "But when the night came, {who} lost {what} {where}.",
    "So they went on together until they met {who} {where}.",
    "Then {who} wept, for nobody had ever seen {what} {where}.",
)


def long_prompt(tokenizer: Tokenizer, num_tokens: int, seed: int) -> list[int]:
    """First tokens of an endless tale."""
    ids: list[int] = []
    for sentence in _tale(seed):
        ids += tokenizer.encode(sentence + " ", add_special_tokens=False).ids
        if len(ids) >= num_tokens:
            return ids[:num_tokens]
    raise AssertionError("a tale without end")


def _tale(seed: int) -> Iterator[str]:
    random = Random(seed)
    while True:
        yield random.choice(_SENTENCES).format(
            who=random.choice(_WHO), what=random.choice(_WHAT), where=random.choice(_WHERE)
        )
