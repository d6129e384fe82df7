"""A judge that another process can make: a function of a module, without torch."""


class CountingJudge:
    """The right output counts on from the prompt's last token."""

    def __init__(self, checkpoint=None):
        """checkpoint: not used."""

    def first_wrong(self, prompt_ids, params, output_ids):
        """See nanocp.chaos.judge.Judge."""
        expected = range(prompt_ids[-1] + 1, prompt_ids[-1] + 1 + len(output_ids))
        pairs = enumerate(zip(output_ids, expected, strict=True))
        return next((index for index, (one, other) in pairs if one != other), None), 0
