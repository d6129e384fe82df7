"""The checkpoint that ships: small enough, with the tensors it names, and exact in a cluster."""

import pytest
from tokenizers import Tokenizer

from data_plane.model.config import ModelConfig
from harness.exact.decode_cluster import Prompt
from harness.exact.exact_runs import assert_exact, cluster_of
from harness.paths import ROOT
from nanocp.cli.demo.prompts import SHORT_PROMPTS, long_prompt
from nanocp.values.sampling import SamplingParams

TALE = ROOT / "models/tale"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TALE / "tokenizer.json"))


def test_it_is_small_and_has_an_mtp_layer():
    assert sum(path.stat().st_size for path in TALE.iterdir()) < 6_200_000
    assert (TALE / "model.safetensors").stat().st_size <= 6_000_000
    assert ModelConfig.from_folder(TALE).num_layers == 4


def test_it_tells_words_exactly_at_degree_two(tokenizer, models):
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    prompts = [Prompt(tokenizer.encode(text).ids, greedy) for text in SHORT_PROMPTS[:3]]
    prompts.append(Prompt(long_prompt(tokenizer, 700, seed=1), greedy))
    with cluster_of(TALE, policy="fixed_degree:2") as cluster:
        cluster.run(prompts)
    assert prompts[-1].placements[0].cp_degree == 2
    assert_exact(models("models/tale").oracle, prompts)
    known = set(" ".join(_words(tokenizer, long_prompt(tokenizer, 3000, seed=2))).split())
    known |= {"the", "and", "he", "she", "was", "to", "a", "in", "of", "his", "said", "it", "had"}
    words = [word for prompt in prompts for word in _words(tokenizer, prompt.output)]
    assert sum(word in known for word in words) > len(words) / 4, words


def _words(tokenizer, ids):
    return "".join(c if c.isalpha() else " " for c in tokenizer.decode(ids).lower()).split()
