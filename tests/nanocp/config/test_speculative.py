"""vLLM's --speculative-config: what it sets, and what is refused with the right value's name."""

import json
import shutil
from functools import partial

import pytest

from harness.paths import ROOT
from harness.programs.command_line import nanocp
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.speculative import EXAMPLE, METHODS, num_drafts_of
from nanocp.config.whole import Config
from nanocp.serve.served import open_checkpoint

TALE = ROOT / "models/tale"


serve = partial(nanocp, "serve")


@pytest.mark.parametrize("method", METHODS)
def test_each_name_of_the_mtp_layer_sets_the_number(method):
    both = {"method": method, "num_speculative_tokens": 3}
    assert num_drafts_of(json.dumps(both)) == 3
    assert num_drafts_of(json.dumps({"method": method})) == 1


@pytest.mark.parametrize(("text", "sentence"), [
    ("mtp", 'is no JSON .*; give \'{"method": "mtp"'),
    ('["mtp"]', "it must be an object such as"),
    ("{}", "method is null; it must be mtp, deepseek_mtp or glm4_moe_mtp"),
    ('{"method": "eagle3"}', 'method is "eagle3"; it must be mtp'),
    ('{"method": ["mtp"]}', "method is .* it must be mtp"),
    ('{"method": "mtp", "rejection_sample_method": "block"}',
     "has 'rejection_sample_method'; it may have method and num_speculative_tokens"),
    ('{"method": "mtp", "num_speculative_tokens": 0}', "is 0; it must be a number from 1 on"),
    ('{"method": "mtp", "num_speculative_tokens": true}', "is true; it must be a number"),
    ('{"method": "mtp", "num_speculative_tokens": 1.0}', "is 1.0; it must be a number"),
    ('{"method": "mtp", "num_speculative_tokens": null}', "is null; it must be a number"),
])  # fmt: skip
def test_what_nobody_drafts_by_is_refused_with_what_would_be_right(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        num_drafts_of(text)


def test_the_flag_sets_the_key_and_goes_before_the_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("scheduler: {num_drafts: 2}\n")
    words = ("no-checkpoint", "--print-config", "--config", file)
    assert f"  num_drafts: 2  # {file}\n" in serve(*words).output
    shown = serve(*words, "--speculative-config", EXAMPLE).output
    assert "  num_drafts: 1  # the command line\n" in shown


def test_the_command_refuses_before_anything_is_opened():
    result = serve("no-checkpoint", "--speculative-config", '{"method": "ngram"}')
    assert result.exit_code == 2 and 'method is "ngram"; it must be mtp' in result.output
    too_many = json.dumps({"method": "mtp", "num_speculative_tokens": 64})
    result = serve("no-checkpoint", "--speculative-config", too_many)
    assert result.exit_code == 2 and "num_drafts is 64 and steps_per_window" in result.output


def test_a_checkpoint_without_the_layer_is_refused_before_anything_starts(tmp_path):
    for path in TALE.glob("*.json"):
        shutil.copy(path, tmp_path)
    config = Config(scheduler=SchedulerConfig(num_drafts=1))
    assert open_checkpoint(config, tmp_path).num_layers == 4, "no weights are looked at"
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["num_nextn_predict_layers"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    result = serve(tmp_path, "--speculative-config", EXAMPLE, "--instances", 2)
    assert result.exit_code == 2
    sentence = "num_nextn_predict_layers is 0; scheduler.num_drafts needs a model with an MTP layer"
    assert sentence in result.output
