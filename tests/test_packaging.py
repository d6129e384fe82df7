"""The wheel holds what runs, the base install brings the client, and a missing extra is named."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from functools import cache, partial
from importlib import metadata

import pytest

from harness.paths import ROOT
from harness.programs.made_once import made_once
from nanocp.cli.main import app
from nanocp.cli.options.extras import EXTRAS

PACKAGES = ("nanocp", "control_plane", "data_plane")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE_IMPORTS = {
    "nanocp --help": ["--help"],
    "nanocp generate --help": ["generate", "--help"],
    "nanocp bench serve --help": ["bench", "serve", "--help"],
    "nanocp top --help": ["top", "--help"],
    "nanocp serve --help": ["serve", "--help"],
    "nanocp simulate --help": ["simulate", "--help"],
    "nanocp profile --help": ["profile", "--help"],
}
BLOCKER = """
import sys
class Blocker:
    allowed = set({allowed!r})
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = self.allowed | sys.stdlib_module_names
        if top not in known and not top.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {{top!r}}", name=top)
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, worker_id):
    """The wheel of the files that git has, or would have once they are added."""
    make = partial(_make_wheel, tmp_path_factory.mktemp("tree"))
    (path,) = made_once(tmp_path_factory, worker_id, "wheel", make).glob("*.whl")
    return zipfile.ZipFile(path)


def _make_wheel(tree, out):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    out.mkdir()
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", out)
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *options, tree],
        check=True,
        cwd=out,
    )


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel):
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected
    suffixes = {name.rpartition(".")[2] for name in held}
    assert {"py", "pyi", "typed", "html", "yaml", "toml", "h", "cpp"} == suffixes
    assert {f"{package}/py.typed" for package in PACKAGES} <= held


def test_the_wheels_metadata_names_the_base_and_the_extras(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    fields = Parser().parsestr(wheel.read(name).decode())
    base = [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line).group() for line in base} == {
        "grpcio", "protobuf", "rich", "typer",
    }  # fmt: skip
    assert {"bench", "serve", "simulate", "gpu", "nixl", "dev"} <= set(
        fields.get_all("Provides-Extra")
    )
    assert fields["License-Expression"] == "Apache-2.0"
    assert any(entry.startswith("nanocp = ") for entry in entry_points(wheel))


def entry_points(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    return wheel.read(name).decode().splitlines()


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements):
    return {normal(re.match(r"[\w.-]+", line).group()) for line in requirements}


def modules_of(requirements):
    """Top-level modules of distributions and of all that these require."""
    found, waiting = set(), list(names_of(requirements))
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            try:
                required = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            waiting += names_of(line for line in required if "extra ==" not in line)
    modules = distributions().items()
    return {module for module, names in modules if found & set(map(normal, names))}


distributions = cache(metadata.packages_distributions)


def run_with(modules, program):
    """Run a program that can import these modules, this tree and the standard library only."""
    code = BLOCKER.format(allowed=sorted({*modules, *PACKAGES})) + program
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def command(*words):
    arguments = ["nanocp", *words]
    return f"import sys; sys.argv = {arguments!r}\nfrom nanocp.cli.main import app; app()"


EACH_IN_A_FORK = """
import json, os, sys, tempfile
from nanocp.cli.main import app
ends = []
for words in {lines!r}:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        if not (pid := os.fork()):
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv = ["nanocp", *words]
            sys.exit(app())
        _, status = os.waitpid(pid, 0)
        texts = [file.seek(0) or file.read().decode() for file in (output, errors)]
        ends.append([os.waitstatus_to_exitcode(status), *texts])
print(json.dumps(ends))
"""
BASE = PROJECT["dependencies"]
TO_NOBODY = [
    ["generate", "--target", "127.0.0.1:1", "--prompt", "x"],
    ["top", "--target", "127.0.0.1:1"],
]


@pytest.fixture(scope="module")
def base_install(tmp_path_factory, tiny_checkpoint, worker_id):
    """Say how a command line ends, (status, output, errors), where only the base is installed."""
    lines = [*BASE_IMPORTS.values(), *TO_NOBODY, *NEEDY.values()]

    def run_all(answer):
        values = {"checkpoint": tiny_checkpoint, "folder": answer.with_name("new")}
        filled = [[word.format(**values) for word in words] for words in lines]
        result = run_with(modules_of(BASE), EACH_IN_A_FORK.format(lines=filled))
        assert result.returncode == 0, result.stderr
        answer.write_text(result.stdout)

    answer = made_once(tmp_path_factory, worker_id, "base_install.json", run_all)
    ends = dict(zip(map(tuple, lines), json.loads(answer.read_text()), strict=True))
    return lambda words: ends[tuple(words)]


@pytest.mark.parametrize("words", BASE_IMPORTS.values(), ids=BASE_IMPORTS)
def test_the_base_install_shows_help(words, base_install):
    status, output, errors = base_install(words)
    assert status == 0, errors
    assert "Usage: nanocp" in output


def test_the_base_install_has_the_clients():
    program = (
        "import nanocp, nanocp.client; nanocp.Client('127.0.0.1:1').close(); nanocp.AsyncClient"
    )
    result = run_with(modules_of(BASE), program)
    assert result.returncode == 0, result.stderr


def test_the_base_install_asks_a_service(base_install):
    status, _, errors = base_install(TO_NOBODY[0])
    assert status == 2 and "nanocp generate: no service answers at 127.0.0.1:1" in errors
    status, _, errors = base_install(TO_NOBODY[1])
    assert status == 2 and "nanocp top: no NanoCP answers" in errors


NEEDY = {
    "batch": ["batch", "-i", "{folder}", "-o", "{folder}.out"],
    "bench": ["bench", "serve", "--num-prompts", "1"],
    "chaos": ["chaos", "{checkpoint}"],
    "demo": ["demo", "{checkpoint}"],
    "make-checkpoint": ["make-checkpoint", "{folder}"],
    "plan": ["plan", "{checkpoint}"],
    "prefill-flags": ["prefill-flags", "{checkpoint}"],
    "profile": ["profile", "{checkpoint}"],
    "serve": ["serve", "{checkpoint}"],
    "overlap": ["overlap", "model", "--paper"],
    "overlap run": ["overlap", "run", "{checkpoint}"],
    "simulate": ["simulate", "--seconds", "0.1"],
}


@pytest.mark.parametrize("name", NEEDY)
def test_a_missing_extra_is_one_sentence_that_names_it(name, base_install):
    status, _, errors = base_install(NEEDY[name])
    assert status == 2, errors
    assert re.fullmatch(
        rf"nanocp {name.partition(' ')[0]}: the package \w+ is not installed; pip install "
        rf"'\.\[{EXTRAS.get(name, 'serve')}\]' brings it\n",
        errors,
    )


def test_every_command_has_an_extra_or_needs_none():
    names = {
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
    }
    names |= {group.name for group in app.registered_groups}
    assert names == {
        *EXTRAS,
        *("config", "generate", "status", "top", "why", "experts", "abort"),
        *("drain", "scale", "upgrade", "layout"),
    }
    assert set(EXTRAS.values()) <= set(PROJECT["optional-dependencies"])


def test_the_extra_of_the_simulator_brings_all_that_it_imports(tmp_path):
    modules = modules_of([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["simulate"]])
    words = ("simulate", "--seconds", "0.1", "--set", "warm_up=0", "--json", "--rate", "5")
    result = run_with(modules, command(*words, "--plots", str(tmp_path)))
    assert result.returncode in (0, 1), result.stderr
    assert "cost_aware" in json.loads(result.stdout)


def test_the_extra_of_the_benchmark_brings_all_that_it_imports(tiny_checkpoint):
    modules = modules_of([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["bench"]])
    words = ("bench", "serve", "--backend", "grpc", "--port", "1", "--num-prompts", "1")
    result = run_with(modules, command(*words, "--tokenizer", str(tiny_checkpoint)))
    assert result.returncode == 1, result.stderr
    assert "Failed requests:                         1" in result.stdout


def test_names_that_are_empty_on_pypi_come_from_their_sources():
    lines = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    for line in lines:
        name = re.match(r"[\w.-]+", line)[0].replace("_", "-")
        assert name not in {"flash-mla", "deep-gemm", "deep-ep"} or " @ git+https://" in line


def test_the_extra_of_the_service_brings_all_that_its_modules_import():
    """Every third-party module that a file of the packages names is of the base or of an extra."""
    extras = PROJECT["optional-dependencies"]
    modules = modules_of(
        [*PROJECT["dependencies"], *(line for name in EXTRAS.values() for line in extras[name])]
    )
    optional = {
        "triton",
        "flash_mla",
        "deep_ep",
        "deep_gemm",
        "nixl_cu13",
        "triton_dist",
        "vllm",
        "zmq",
    }
    imported = {
        match.partition(".")[0]
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for match in re.findall(
            r"^ *(?:import|from) ([\w.]+)(?: import|$| as)", path.read_text(), re.M
        )
    }
    missing = imported - modules - optional - set(sys.stdlib_module_names) - set(PACKAGES)
    assert not missing, missing


@pytest.fixture(scope="module")
def editable(tmp_path_factory):
    """The folder of an environment into which the checkout is installed as `make setup` does."""
    folder = tmp_path_factory.mktemp("editable")
    build = (
        "import sys; from setuptools.build_meta import build_editable; "
        "print(build_editable(sys.argv[1]))"
    )
    tree = folder / "nanocp"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", build, folder], cwd=tree, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder


def test_a_script_beside_a_clone_named_nanocp_imports_the_client(editable):
    """Python takes that folder for a package, unless a path of the environment has another."""
    (editable / "ask.py").write_text("from nanocp import Client; print(Client.__module__)\n")
    path = f"import site, sys, runpy; site.addsitedir({str(editable / 'site')!r})"
    # As after an installation: the environment of these tests has the checkout itself.
    code = (
        f"{path}; sys.path.insert(0, {str(editable)!r}); "
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each).lower()]"
        "; sys.path[:] = [each for each in sys.path if not each.rstrip('/').endswith("
        f"{str(ROOT)!r})]; runpy.run_path({str(editable / 'ask.py')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout == "nanocp.client.sync_client\n", done.stderr


def test_the_command_is_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "nanocp", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Usage: nanocp " in done.stdout
