"""The training script in small: what it reads, and that what it writes is a checkpoint."""

import json
import random
import sys

import torch
from safetensors.torch import load_file

from data_plane.model.config import ModelConfig
from data_plane.reference.oracle import Oracle
from harness.exact.split_decoder import SplitDecoder
from harness.paths import ROOT

sys.path.insert(0, str(ROOT / "models"))
import train_tale

WORDS = (
    *("the", "king", "and", "his", "three", "sons", "went", "to", "a"),
    *("great", "forest", "where", "an", "old", "fox", "said", "nothing"),
)


def write_text(path):
    rng = random.Random(0)
    tales = [" ".join(rng.choices(WORDS, k=400)) + "." for _ in range(12)]
    body = "\n\n\n\n\n".join(f"THE TALE {number}\n\n{tale}" for number, tale in enumerate(tales))
    path.write_text(
        f"Produced by nobody\n*** START OF THIS BOOK ***\n\n\n\n\n{body}\n\n\n\n\n"
        "*** END OF THIS BOOK ***\nAll rights"
    )


def test_a_text_is_read_without_its_header_footer_and_headings(tmp_path):
    write_text(tmp_path / "tales.txt")
    tales = train_tale.tales_of(tmp_path / "tales.txt")
    assert len(tales) == 12 and not any("TALE" in tale or "rights" in tale for tale in tales)


def test_what_it_trains_loads_and_is_exact(tmp_path, monkeypatch):
    write_text(tmp_path / "tales.txt")
    monkeypatch.setattr(train_tale, "WINDOW", 64)
    train_tale.main(tmp_path / "out", [tmp_path / "tales.txt"], minutes=0.05)
    config = ModelConfig.from_folder(tmp_path / "out")
    assert (config.num_layers, config.num_experts, config.tied_embeddings) == (4, 8, True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= {
        name.removeprefix("model.layers.4.") for name in tensors
    }
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["num_hidden_layers"] == 4 and fields["num_nextn_predict_layers"] == 1
    ids = list(range(10, 150))
    decoder = SplitDecoder(tmp_path / "out", 2)
    decoder.add_row(ids)
    logits = decoder.step([ids[-1]], [len(ids) - 1])
    expected = Oracle(tmp_path / "out").logits(ids, [0])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_experts_that_are_visited_too_often_are_chosen_less():
    model = train_tale.Tale()
    model.losses(torch.randint(2, 2048, (2, 34)), torch.arange(34).repeat(2, 1))
    loads = [load.clone() for load in model.loads]
    model.balance()
    for gate, load in zip(model.gates, loads, strict=True):
        fullest, emptiest = int(load.argmax()), int(load.argmin())
        assert gate.e_score_correction_bias[fullest] < 0 < gate.e_score_correction_bias[emptiest]
