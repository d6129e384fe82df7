"""A field that config.json lacks means what it means in `transformers`, or is refused by name."""

import json
from functools import cache

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from data_plane.model.config import ModelConfig
from data_plane.model.families import FAMILIES
from data_plane.model.presets import PRESETS

TINY = [name for name in PRESETS if name.startswith("tiny")]
# Without an id that the folder names, a text ends where its tokenizer says.
SKIPPED = {"architectures", "model_type", "eos_token_id"}


@cache
def written(preset):
    """(architecture, config.json as `transformers` writes it)."""
    config = AutoConfig.for_model(**json.loads(json.dumps(PRESETS[preset])))
    name = AutoModelForCausalLM._model_mapping[type(config)].__name__
    return name, json.dumps(config.to_dict(), default=str)


def spelled(preset, is_published):
    architecture, text = written(preset)
    fields = json.loads(text) | {"architectures": [architecture]}
    rope = fields.get("rope_parameters")
    if is_published and rope:
        del fields["rope_parameters"]
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                fields[name] = rope.pop(name)
        fields["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return fields


def changed(fields):
    """(what was changed, the field's name, the fields)."""
    places = [(name,) for name in fields if name not in SKIPPED]
    for outer in ("rope_parameters", "rope_scaling"):
        places += [(outer, name) for name in fields.get(outer) or ()]
    for place in places:
        for value in ("absent", None):
            copy = json.loads(json.dumps(fields))
            inner = copy[place[0]] if len(place) > 1 else copy
            if value is None:
                inner[place[-1]] = None
            else:
                del inner[place[-1]]
            yield f"{'.'.join(place)} {value}", place[-1], copy


def renamed(fields):
    """Fields by their other names, both ways."""
    names = AutoConfig.for_model(fields["model_type"]).attribute_map.items()
    for old, new in [*names, *((new, old) for old, new in names)]:
        if old in fields:
            copy = {new if name == old else name: value for name, value in fields.items()}
            yield f"{old} as {new}", old, copy


def read(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields, default=str))
    try:
        return ModelConfig.from_folder(folder)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("is_published", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("preset", TINY)
def test_what_is_absent_is_what_transformers_takes(tmp_path, preset, is_published):
    fields, num_read = spelled(preset, is_published), 0
    for what, name, asked in (*changed(fields), *renamed(fields)):
        given = json.loads(json.dumps({k: v for k, v in asked.items() if k != "architectures"}))
        try:
            theirs = AutoConfig.for_model(**given).to_dict()
        except Exception:
            continue  # it refuses the file
        theirs["architectures"] = asked["architectures"]
        found = read(tmp_path, asked)
        # A width that is absent is refused, sometimes by another name of it.
        is_refused = isinstance(found, str) and (name in found or "is missing" in found)
        assert is_refused or found == read(tmp_path, theirs), (what, found)
        num_read += not is_refused
    assert num_read > 20


def test_every_family_is_tried():
    families = {written(preset)[0] for preset in TINY}
    assert families == set(FAMILIES)


@pytest.mark.parametrize(("preset", "more", "sentence"), [
    ("tiny-qwen3-moe", {"num_experts": 8}, "num_experts is 8 and num_local_experts is 16"),
    ("tiny-kimi-linear", {"n_group": 9}, "n_group is 9 and num_expert_group is"),
])  # fmt: skip
def test_two_names_of_one_field_that_differ_are_refused(tmp_path, preset, more, sentence):
    assert sentence in read(tmp_path, spelled(preset, False) | more)


def test_kimi_without_a_list_of_layers_is_refused(tmp_path):
    fields = spelled("tiny-kimi-linear", False) | {"layer_types": None}
    assert "linear_attn_config has no kda_layers" in read(tmp_path, fields)
