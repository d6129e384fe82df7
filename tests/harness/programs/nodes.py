"""Machines made of namespaces of this one, joined by a network. Needs root.

Each has a network address, a name, processes, /dev/shm, /tmp/ray and a home of its own, and an
sshd. They share the file system, so that code and checkpoints need no copy.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

NETWORK = "198.18.77"
"""A network that no real machine has: it is in the range for benchmarks (RFC 2544)."""
BRIDGE = "nanocp0"
GATEWAY = f"{NETWORK}.254"
_NAMESPACES = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]


def why_not() -> str:
    """The reason why no such machine can be made here; empty if one can."""
    missing = [
        tool
        for tool in ("ip", "unshare", "nsenter", "sshd", "ssh", "rsync")
        if shutil.which(tool) is None
    ]
    if missing:
        packages = "iproute2, util-linux, openssh-server, openssh-client, rsync"
        return f"needs {', '.join(missing)} (Debian: {packages})"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if _run("ip", "netns", "add", "nanocp-try").returncode:
        return "this machine may not make network namespaces"
    _run("ip", "netns", "delete", "nanocp-try")
    return ""


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60
    )


def _must(*command: str | Path) -> None:
    done = _run(*command)
    assert done.returncode == 0, f"{command}: {done.stderr}"


class Node:
    """One machine: a network namespace, and in it a process that is the init of all others."""

    def __init__(self, number: int, folder: Path, key: Path) -> None:
        self.name = f"nanocp-{number}"
        self.address = f"{NETWORK}.{number}"
        self.home = folder / self.name
        self._link = f"nanocp-v{number}"
        self._key = key
        self.home.mkdir(parents=True)
        users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        users = [
            [*user[:5], str(self.home), "/bin/bash"] if user[0] == "root" else user
            for user in users
        ]
        (folder / f"{self.name}.passwd").write_text(
            "".join(":".join(user) + "\n" for user in users)
        )
        (folder / f"{self.name}.hosts").write_text(
            f"127.0.0.1 localhost\n{self.address} {self.name}\n"
        )
        (self.home / ".bashrc").touch()
        self._add_network()
        self._process = self._boot(folder)
        self._await_ssh()

    def _add_network(self) -> None:
        inside = ["ip", "-n", self.name]
        _must("ip", "netns", "add", self.name)
        veth = ["type", "veth", "peer", "name", "eth0", "netns", self.name]
        _must("ip", "link", "add", self._link, *veth)
        _must("ip", "link", "set", self._link, "master", BRIDGE, "up")
        _must(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _must(*inside, "link", "set", device, "up")
        _must(*inside, "route", "add", "default", "via", GATEWAY)

    def _boot(self, folder: Path) -> subprocess.Popen[bytes]:
        host_key = folder / "host_key"
        options = (
            f"-o AuthorizedKeysFile={self._key}.pub -o StrictModes=no -o PidFile=none -o UsePAM=no"
        )
        script = "\n".join([
            "set -e", "mkdir -p /tmp/ray /run/sshd", "mount -t tmpfs -o size=2g tmpfs /dev/shm",
            "mount -t tmpfs tmpfs /tmp/ray",
            f"mount --bind {folder / self.name}.passwd /etc/passwd",
            f"mount --bind {folder / self.name}.hosts /etc/hosts", f"hostname {self.name}",
            f"exec {shutil.which('sshd')} -D -e -h {host_key} {options}",
        ])  # fmt: skip
        command = ["ip", "netns", "exec", self.name, "unshare", *_NAMESPACES, "sh", "-c", script]
        environment = {"PATH": os.environ["PATH"]}
        with (folder / f"{self.name}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                    env=environment, start_new_session=True)  # fmt: skip

    def _await_ssh(self) -> None:
        deadline = time.monotonic() + 20
        while self.run("true").returncode:
            assert time.monotonic() < deadline and self._process.poll() is None, (
                f"{self.name} has no sshd"
            )
            time.sleep(0.1)

    def ssh(self, command: str) -> list[str]:
        """The words of a command that runs a shell command on the machine, as a login does."""
        options = [
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            "ConnectTimeout=5",
        ]
        words = [
            "ssh", "-i", str(self._key), *(word for option in options for word in ("-o", option)),
        ]  # fmt: skip
        return [*words, f"root@{self.address}", f"bash --login -c {shlex.quote(command)}"]

    def run(self, command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a shell's command line on the machine."""
        return subprocess.run(self.ssh(command), capture_output=True, text=True, timeout=timeout_s)

    def processes(self, pattern: str) -> list[str]:
        """The command lines of the machine's processes that match."""
        return self.run(f"pgrep -af {shlex.quote(pattern)} | grep -v pgrep").stdout.splitlines()

    def shared_memory(self) -> list[str]:
        """The names in the machine's /dev/shm that begin as this project's."""
        return [
            name for name in self.run("ls /dev/shm").stdout.split() if name.startswith("nanocp-")
        ]

    def kill(self) -> None:
        """End all processes at once, as a kernel does that panics and reboots."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def unplug(self) -> None:
        """Cut the machine off the network: peers see silence."""
        _must("ip", "link", "set", self._link, "down")

    def plug(self) -> None:
        """Join the machine to the network again."""
        _must("ip", "link", "set", self._link, "up")

    def close(self) -> None:
        """End the machine and remove its network."""
        self.kill()
        _run("ip", "netns", "delete", self.name)
        _run("ip", "link", "delete", self._link)


@contextlib.contextmanager
def nodes(count: int, folder: Path):
    """Make `count` machines on one network, where this process is at GATEWAY."""
    folder.mkdir()
    key = folder / "key"
    for name in (key, folder / "host_key"):
        _must("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name)
    with contextlib.ExitStack() as held:
        _must("ip", "link", "add", BRIDGE, "type", "bridge")
        held.callback(_run, "ip", "link", "delete", BRIDGE)
        _must("ip", "address", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        _must("ip", "link", "set", BRIDGE, "up")
        made = []
        for number in range(1, count + 1):
            made.append(Node(number, folder, key))
            held.callback(made[-1].close)
        yield made
