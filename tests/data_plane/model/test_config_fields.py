"""What is said of a checkpoint that is not there: nothing is downloaded, and what would get it."""

import re

import pytest

from data_plane.model.config import ModelConfig


@pytest.mark.parametrize(("name", "said"), [
    ("deepseek-ai/DeepSeek-V3",
     "`hf download deepseek-ai/DeepSeek-V3 --local-dir checkpoints/DeepSeek-V3`, then give "
     "checkpoints/DeepSeek-V3"),
    ("Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir checkpoints/Qwen3-0.6B`"),
    ("absent", "Nothing is downloaded here: give a folder of this machine"),
    ("/a/b", "Nothing is downloaded here: give a folder of this machine"),
    ("../a", "Nothing is downloaded here: give a folder of this machine"),
    ("a/b/c", "Nothing is downloaded here: give a folder of this machine"),
])  # fmt: skip
def test_a_name_for_a_folder_is_told_what_gets_it(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"config\.json is missing; .*Nothing is downloaded"
    ) as raised:
        ModelConfig.from_folder(name)
    assert said in str(raised.value)


def test_a_folder_without_the_file_is_there(tmp_path):
    with pytest.raises(
        ValueError, match=re.escape("a Hugging Face folder with a config.json")
    ) as raised:
        ModelConfig.from_folder(tmp_path)
    assert "downloaded" not in str(raised.value)
