"""Judges that another process can make: classes of a module, without torch."""

from harness.services.hash_members import MODEL
from nanocp.values.sampling import SamplingParams


class CountingJudge:
    """The right output counts on from the prompt's last token."""

    def __init__(self, checkpoint=None):
        """checkpoint: not used."""

    def first_wrong(self, prompt_ids, params, output_ids):
        """See nanocp.cli.demo.judge.Judge."""
        expected = range(prompt_ids[-1] + 1, prompt_ids[-1] + 1 + len(output_ids))
        pairs = enumerate(zip(output_ids, expected, strict=True))
        return next((index for index, (one, other) in pairs if one != other), None), 0


class HashJudge:
    """Knows the one right output of a HashModel."""

    def __init__(self, checkpoint):
        """checkpoint: not used."""

    def first_wrong(self, prompt_ids, params, output_ids):
        """See nanocp.cli.demo.judge.Judge."""
        seed, max_tokens = params.seed, max(len(output_ids), params.max_tokens)
        expected = MODEL.generate(prompt_ids, SamplingParams(max_tokens=max_tokens, seed=seed))
        pairs = enumerate(zip(output_ids, expected, strict=False))
        return next((index for index, (one, other) in pairs if one != other), None), 0
