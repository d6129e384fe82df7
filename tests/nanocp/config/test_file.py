"""The configuration file, the environment and flags: their order, and a sentence per mistake."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nanocp.config.choices import PROFILED, marks_of
from nanocp.config.cost import CPU_COSTS, GPU_DEGREES, CostConfig
from nanocp.config.file import REMOVED, known_keys, load_config, settings
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config

DEFAULT = replace(Config(), scheduler=replace(Config().scheduler, costs=CPU_COSTS))
"""What is loaded if nothing is given: the costs of the default device."""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "nanocp.yaml"
    path.write_text(text)
    return path


def test_nothing_given_is_the_default():
    assert load_config(None, {}, {}) == DEFAULT


def test_an_empty_file_and_an_empty_section_are_the_default(tmp_path):
    assert load_config(write(tmp_path, ""), {}, {}) == DEFAULT
    assert load_config(write(tmp_path, "cluster:\n#  num_instances: 3\n"), {}, {}) == DEFAULT


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path):
    path = write(tmp_path, "cluster: {num_instances: 1, num_frames: 11, max_model_len: 111}\n")
    environment = {"NANOCP_CLUSTER__NUM_INSTANCES": "2", "NANOCP_CLUSTER__NUM_FRAMES": "22"}
    cluster = load_config(
        path, {"cluster.num_instances": 3, "cluster.max_model_len": None}, environment
    ).cluster
    assert (cluster.num_instances, cluster.num_frames, cluster.max_model_len) == (3, 22, 111)
    assert cluster.instances_per_node == Config().cluster.instances_per_node


def test_every_type_of_value_comes_through_the_file(tmp_path):
    path = write(
        tmp_path,
        """
cluster: {bounds: {max_rows: 8, max_attention_rows: 12}}
scheduler:
  policy: cost_aware
  ttft_targets: [[0, 100], [1, 200]]
  growth_promise: percentile:90
data_plane: {row_buckets: [1, 4, 8]}
prefill: {synthetic_kv: true}
""",
    )
    config = load_config(path, {}, {})
    assert config.cluster.bounds.max_rows == 8
    assert config.scheduler.policy == "cost_aware"
    assert config.scheduler.ttft_targets == ((0, 100), (1, 200))
    assert config.scheduler.growth_promise == "percentile:90"
    assert config.data_plane.row_buckets == (1, 4, 8)
    assert config.prefill.synthetic_kv is True


def test_every_type_of_value_comes_through_the_environment():
    environment = {
        "NANOCP_CLUSTER__BOUNDS__MAX_ROWS": "8", "NANOCP_SCHEDULER__POLICY": "cost_aware",
        "NANOCP_SCHEDULER__TTFT_TARGETS": "[[0, 100], [1, 200]]",
        "NANOCP_SCHEDULER__GROWTH_PROMISE": "tokens:64", "NANOCP_PREFILL__SYNTHETIC_KV": "true",
        "NANOCP_SERVICE__HOST": "::1", "NANOCP_HOME": "no configuration: it has no section",
        "OTHER_CLUSTER__NUM_INSTANCES": "9",
    }  # fmt: skip
    config = load_config(None, {}, environment)
    assert config.cluster.bounds.max_rows == 8
    assert config.scheduler.policy == "cost_aware"
    assert config.scheduler.ttft_targets == ((0, 100), (1, 200))
    assert config.scheduler.growth_promise == "tokens:64"
    assert config.prefill.synthetic_kv is True
    assert config.service.host == "::1"
    assert config.cluster.num_instances == Config().cluster.num_instances


@pytest.mark.parametrize("section", [field.name for field in fields(Config)])
def test_each_section_can_be_given(section, tmp_path):
    assert load_config(write(tmp_path, f"{section}: {{}}"), {}, {}) == DEFAULT


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cluser: {}", "unknown section 'cluser' in the configuration; did you mean 'cluster'?"),
        (
            "cluster: {num_instance: 3}",
            "unknown key 'num_instance' in section cluster; did you mean 'num_instances'?",
        ),
        (
            "cluster: {bounds: {max_rowz: 3}}",
            "unknown key 'max_rowz' in section cluster.bounds; did you mean 'max_rows'?",
        ),
        (
            "scheduler: {num_instances: 3}",
            "unknown key 'num_instances' in section scheduler; did you mean "
            "'cluster.num_instances'?",
        ),
        (
            "service: {colour: red}",
            "unknown key 'colour' in section service; it knows host, advertised_host, grpc_port, m",
        ),
        ("1: {}", "unknown section '1'"),
        (
            "cluster: {num_instances: four}",
            'cluster.num_instances is "four"; it must be a valid integer',
        ),
        (
            "cluster: {num_instances: 2.5}",
            "cluster.num_instances is 2.5; it must be a valid integer",
        ),
        (
            "cluster: {num_instances: true}",
            "cluster.num_instances is true; it must be a valid integer",
        ),
        (
            'cluster: {num_instances: "2"}',
            'cluster.num_instances is "2"; it must be a valid integer',
        ),
        (
            "cluster: {num_instances: null}",
            "cluster.num_instances is null; it must be a valid integer",
        ),
        (
            "cluster: {num_instances: 0}",
            "in section cluster: num_instances is 0; it must be at least 1",
        ),
        ("cluster: 5", "cluster is 5; it must be a section of keys"),
        ("cluster: {bounds: [1]}", "cluster.bounds is [1]; it must be a section of keys"),
        ("prefill: {synthetic_kv: 1}", "prefill.synthetic_kv is 1; it must be a valid boolean"),
        (
            "data_plane: {dtype: fp8}",
            "in section data_plane: dtype is 'fp8'; it must be float32 or bfloat16",
        ),
        ("data_plane: {dtype: 8}", "data_plane.dtype is 8; it must be a valid string"),
        ("data_plane: {row_buckets: 3}", "data_plane.row_buckets is 3; it must be a valid array"),
        ("scheduler: {ttft_targets: [[1, 2, 3]]}", "scheduler.ttft_targets is [1, 2, 3]"),
        (
            "limits: {plan_timeout_ms: 99999, exchange_timeout_ms: 30000}",
            "the limits must be ordered",
        ),
        (
            "cluster: {layout: pipeline}\ndata_plane: {device: cuda}",
            "nanocp.yaml: cluster.layout is pipeline, and data_plane.device is cuda: it must be",
        ),
        ("service: {grpc_port: 70000}", "grpc_port is 70000; it must be from 0 to 65535"),
        ("service: {host: 2026-01-01}", None),  # A date to YAML: its text is what the user wrote.
        ("- cluster", "it must hold sections"),
        ("just words", "it must hold sections"),
        ("cluster: {num_instances: 1\nscheduler: {}", "line 2, column"),
        ("cluster:\n\tnum_instances: 1", "line 2, column 1"),
        (
            "cluster: {}\nscheduler: {}\ncluster: {}",
            "line 3, column 1: the key 'cluster' is given twice",
        ),
        ("cluster: !!python/object:os.system {}", "line 1"),
    ],
)
def test_a_mistake_in_the_file_is_named(text, sentence, tmp_path):
    path = write(tmp_path, text)
    if sentence is None:
        load_config(path, {}, {})
        return
    with pytest.raises(ValueError) as raised:
        load_config(path, {}, {})
    assert str(path) in str(raised.value)
    assert sentence in str(raised.value)


def test_a_mistake_in_the_environment_names_the_variable():
    with pytest.raises(
        ValueError, match=r"'num_instancez' in section cluster \(NANOCP_CLUSTER__NUM_INSTANCEZ\)"
    ):
        load_config(None, {}, {"NANOCP_CLUSTER__NUM_INSTANCEZ": "2"})
    with pytest.raises(ValueError, match="unknown section 'cluser'"):
        load_config(None, {}, {"NANOCP_CLUSER__NUM_INSTANCES": "2"})
    with pytest.raises(
        ValueError, match='the environment: NANOCP_CLUSTER__NUM_INSTANCES is "two"; it must be'
    ):
        load_config(None, {}, {"NANOCP_CLUSTER__NUM_INSTANCES": "two"})


def test_a_mistake_on_the_command_line_names_it(tmp_path):
    path = write(tmp_path, "cluster: {num_frames: 9}")
    with pytest.raises(ValueError, match="the command line: in section service: grpc_port is -1"):
        load_config(path, {"service.grpc_port": -1}, {})
    with pytest.raises(
        ValueError,
        match=r"nanocp\.yaml and the command line: in section cluster: num_instances is 0",
    ):
        load_config(path, {"cluster.num_instances": 0}, {})


def test_several_mistakes_are_all_named(tmp_path):
    path = write(tmp_path, "cluster: {num_instances: x}\nservice: {host: 1}")
    with pytest.raises(ValueError, match=r"(?s)cluster.num_instances is.*service.host is 1"):
        load_config(path, {}, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent.yaml does not exist"):
        load_config(tmp_path / "absent.yaml", {}, {})
    with pytest.raises(ValueError, match="cannot be read"):
        load_config(tmp_path, {}, {})
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        load_config(binary, {}, {})


def test_costs_are_those_of_the_device_unless_a_profile_has_them(tmp_path):
    def costs(**environment: str) -> CostConfig:
        return load_config(None, {}, environment).scheduler.costs

    assert costs() == costs(NANOCP_DATA_PLANE__DEVICE="cpu") == CPU_COSTS
    assert costs(NANOCP_DATA_PLANE__DEVICE="cuda") == CostConfig() == Config().scheduler.costs
    profile = write(tmp_path, "scheduler: {costs: {link_tokens: 7}}")
    one = costs(NANOCP_SCHEDULER__PROFILE=str(profile))
    assert one == replace(CPU_COSTS, link_tokens=7)
    assert CPU_COSTS.exchange_tokens < CostConfig().exchange_tokens


def test_cp_degrees_are_those_of_the_device_unless_a_profile_has_them(tmp_path):
    def degrees(**environment: str) -> dict[str, Any]:
        own = load_config(None, {}, environment).scheduler
        return {name: getattr(own, name) for name in GPU_DEGREES}

    assert degrees(NANOCP_DATA_PLANE__DEVICE="cuda") == GPU_DEGREES
    assert degrees() == {name: getattr(SchedulerConfig(), name) for name in GPU_DEGREES}
    profile = write(tmp_path, "scheduler: {cp_degree_max: 2}")
    own = {"NANOCP_SCHEDULER__PROFILE": str(profile), "NANOCP_DATA_PLANE__DEVICE": "cuda"}
    assert degrees(**own) == GPU_DEGREES | {"cp_degree_max": 2}


def test_a_profile_of_another_device_is_refused_by_name(tmp_path):
    profile = write(tmp_path, "measured_on: {device: cuda}\nscheduler: {cp_degree_max: 2}")
    given = {"scheduler.profile": str(profile)}
    on_gpu = load_config(None, given | {"data_plane.device": "cuda"}, {})
    assert on_gpu.scheduler.cp_degree_max == 2
    with pytest.raises(ValueError, match=r"measured on cuda, and data_plane\.device is cpu; prof"):
        load_config(None, given, {})
    with pytest.raises(ValueError, match="device is 'gpu'; it must be cpu or cuda"):
        load_config(None, given | {"data_plane.device": "gpu"}, {})


@pytest.mark.parametrize("what", ["[cpu, any]", "7", "cuda", "", "{device: [cuda]}", "{devise: a}"])
def test_a_profile_that_does_not_say_on_what_it_was_measured_is_refused(what, tmp_path):
    profile = write(tmp_path, f"measured_on: {what}\nscheduler: {{cp_degree_max: 2}}")
    with pytest.raises(ValueError, match=r"yaml: measured_on is .+; it must be the device and the"):
        load_config(None, {"scheduler.profile": str(profile)}, {})


def test_gpus_of_several_nodes_are_refused_before_anything_is_loaded():
    on_gpus = {"data_plane.device": "cuda", "cluster.num_instances": 16}
    with pytest.raises(ValueError, match=r"16 instances are on more than one node of 8 .* nvshmem"):
        load_config(None, on_gpus | {"cluster.instances_per_node": 8}, {})
    load_config(None, on_gpus | {"cluster.instances_per_node": 16}, {})
    nvshmem = {"cluster.instances_per_node": 8, "data_plane.exchange_backend": "nvshmem"}
    assert not load_config(None, on_gpus | nvshmem, {}).recovers
    with pytest.raises(ValueError, match="nvshmem and dispatch_backend fused; it must be exchange"):
        load_config(None, on_gpus | nvshmem | {"data_plane.dispatch_backend": "fused"}, {})


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_says_what_to_write_instead(key, tmp_path):
    sentence = f"is no key any more: {REMOVED[key]}"
    *sections, name = key.split(".")
    text = f"{name}: 1"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    with pytest.raises(ValueError, match=sentence) as raised:
        load_config(write(tmp_path, text), {}, {})
    assert str(raised.value).startswith(f"{tmp_path}/nanocp.yaml: {key} {sentence}")
    variable = f"NANOCP_{key.replace('.', '__').upper()}"
    with pytest.raises(ValueError, match=f"the environment: {variable} {sentence}"):
        load_config(None, {}, {variable: "1"})
    with pytest.raises(ValueError, match=f"the command line: {key} {sentence}"):
        load_config(None, {key: 1}, {})


def test_every_hidden_field_is_measured_or_says_what_to_write():
    known, found = {".".join(keys) for keys in known_keys()}, set()

    def fields_of(kind: type, path: str, is_measured: bool) -> None:
        for name, hint in get_type_hints(kind).items():
            key = f"{path}{name}"
            marks = marks_of(kind)[name]
            if name.startswith("__"):
                continue
            if is_dataclass(hint):
                fields_of(hint, f"{key}.", is_measured or PROFILED in marks)
            elif key not in known and not is_measured and PROFILED not in marks:
                found.add(key)

    fields_of(Config, "", False)
    assert found == {*REMOVED}


def test_what_is_measured_is_in_the_profile_only(tmp_path):
    path = write(tmp_path, "scheduler: {lane_table: [[4, 0, 80, nanoflow]]}\n")
    with pytest.raises(ValueError, match=r"scheduler\.lane_table is no key any more: it is mea"):
        load_config(path, {}, {})
    given = {"scheduler.profile": str(path)}
    assert load_config(None, given, {}).scheduler.lane_table == ((4, 0, 80, "nanoflow"),)
    path.write_text("scheduler: {lane_table: [[4, 0, 80]]}\n")
    with pytest.raises(ValueError, match=r"scheduler\.lane_table"):
        load_config(None, given, {})
    path.write_text("scheduler: {policy: chaos}")
    with pytest.raises(ValueError, match=r"scheduler\.policy is not measured: set it beside"):
        load_config(None, given, {})
    path.write_text("scheduler: {costs: {link_token: 1}}")
    with pytest.raises(ValueError, match="did you mean 'link_tokens'"):
        load_config(None, given, {})
    path.write_text("scheduler: {costs: {link_tokens: x}}")
    with pytest.raises(ValueError, match=r"nanocp\.yaml: scheduler\.costs\.link_tokens is \"x\""):
        load_config(None, given, {})
    with pytest.raises(ValueError, match=r"the profile .*absent\.yaml does not exist"):
        load_config(None, {"scheduler.profile": str(tmp_path / "absent.yaml")}, {})


def test_settings_of_the_command_line_are_json_or_text() -> None:
    given = ["cluster.num_frames=512", "service.host=::1", 'service.cors_origins=["*"]']
    assert settings([*given, "scheduler.policy=a=b"]) == {
        "cluster.num_frames": 512,
        "service.host": "::1",
        "service.cors_origins": ["*"],
        "scheduler.policy": "a=b",
    }
    assert settings(["prefill.api_key=12345"]) == {"prefill.api_key": "12345"}
    assert load_config(None, settings(given), {}).service.cors_origins == ("*",)
    for wrong in ("num_frames=3", "cluster.num_frames", ""):
        with pytest.raises(ValueError, match=r"it must be SECTION\.KEY=VALUE, as in cluster"):
            settings([wrong])
    with pytest.raises(ValueError, match="the command line: unknown key 'num_framez'"):
        load_config(None, settings(["cluster.num_framez=3"]), {})
