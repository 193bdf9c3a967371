"""The unit as it is shipped, under a real systemd: only its ExecStart is another, as the guest has no /opt."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.core.cpuset import CPUSet

from .kit import SystemdNode, read, wait_until

pytestmark = pytest.mark.guest("systemd")

REPOSITORY = Path(__file__).parents[3]
SHIPPED = REPOSITORY / "systemd" / "cpuset-enforcer.service"
NAME = SHIPPED.name
UNITS = Path("/run/systemd/system")
UID = "5a3e7f0c-1111-2222-3333-{:012x}"
STATE = Path("/run/cpuset-enforcer/state.json")
STARTS = 90.0  # seconds; emulated, Python alone takes some


class Service:
    """The unit, installed with a config and a kubelet's folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.kubelet = folder / "kubelet"
        self.kubelet.mkdir(parents=True)
        self.config = folder / "config.toml"
        self.configure()
        UNITS.mkdir(exist_ok=True)
        shutil.copy(SHIPPED, UNITS)
        (UNITS / f"{NAME}.d").mkdir()
        (UNITS / f"{NAME}.d/guest.conf").write_text(
            f"[Service]\nEnvironment=PYTHONPATH={REPOSITORY} PYTHONDONTWRITEBYTECODE=1\n"
            f"ExecStart=\nExecStart=/usr/bin/python3 -m enforcer run --config {self.config}\n"
        )
        self.do("daemon-reload", "")

    def configure(self, **more: object) -> None:
        keys = {"mode": "enforce", "kubelet-root": str(self.kubelet), "reserved-cpus": "0", **more}
        self.config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))

    def do(self, verb: str, unit: str = NAME, *, good: bool = True) -> None:
        """systemctl VERB; `start` and `restart` return when the agent has said READY."""
        command = ["systemctl", verb, *([unit] if unit else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STARTS, check=False)
        assert (done.returncode == 0) == good, f"{verb}: {done.returncode} {done.stderr}\n{self.journal()}"

    def is_now(self, key: str, unit: str = NAME) -> str:
        command = ["systemctl", "show", "--value", "--property", key, unit]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def journal(self) -> str:
        command = ["journalctl", "--unit", NAME, "--output", "cat", "--no-pager"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def status(self, key: str) -> str:
        """A line of /proc/PID/status of the agent."""
        lines = Path(f"/proc/{self.is_now('MainPID')}/status").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:"))

    def start_with_kubelet(self) -> None:
        """Both in one transaction, as at boot; ours fails, and the kubelet starts after that."""
        unit = UNITS / "kubelet.service"
        unit.write_text("[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n")
        self.do("daemon-reload", "")
        command = ["systemctl", "start", NAME, unit.name]
        assert subprocess.run(command, capture_output=True, timeout=STARTS, check=False).returncode
        assert self.is_now("ActiveState", unit.name) == "active"
        ended = int(self.is_now("ExecMainExitTimestampMonotonic"))
        assert ended < int(self.is_now("ExecMainStartTimestampMonotonic", unit.name)), "Before=kubelet.service"
        self.do("stop", unit.name)

    def remove(self) -> None:
        subprocess.run(["systemctl", "stop", NAME], check=False)
        subprocess.run(["systemctl", "reset-failed", NAME], stderr=subprocess.DEVNULL, check=False)
        (UNITS / NAME).unlink()
        (UNITS / "kubelet.service").unlink(missing_ok=True)
        shutil.rmtree(UNITS / f"{NAME}.d")
        shutil.rmtree(STATE.parent, ignore_errors=True)
        self.do("daemon-reload", "")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    if not SHIPPED.exists():
        pytest.skip("systemd/ is not among what tests/vm/fleet.py copies into a guest (_TREES)")
    # PrivateTmp hides /tmp from the unit
    folder = Path("/run/service-test")
    made = Service(folder)
    yield made
    made.remove()
    shutil.rmtree(folder)


def test_life_of_the_service(node: SystemdNode, service: Service) -> None:
    service.do("start")
    assert (service.is_now("ActiveState"), service.is_now("SubState")) == ("active", "running")
    assert "ready: enforce, reserved CPUs 0" in service.journal(), "active means ready"
    agent = int(service.is_now("MainPID"))
    assert read(Path(f"/proc/{agent}/cgroup")) == f"0::/system.slice/{NAME}"
    assert service.status("Cpus_allowed_list") == "0"
    chrt = subprocess.run(["chrt", "--pid", str(agent)], capture_output=True, text=True, check=True).stdout
    assert "SCHED_FIFO" in chrt, service.journal()
    assert "foreign writers will not be named" not in service.journal()
    assert "CPU hotplug is seen" not in service.journal()
    assert "cpusets are written to the files only" not in service.journal()

    pod = node.pod(UID.format(1), milli_cpu=2000)
    owner = node.run(pod, f"{1:064x}", 2000)
    own = owner.first_affinity()
    assert len(own) == 2
    other = node.run(node.pod(UID.format(2), "besteffort"), f"{2:064x}")
    assert other.first_affinity() == CPUSet(range(8)) - own
    moments = len(owner.moments()), len(other.moments())

    def nobody_moved(after: str) -> None:
        assert (len(owner.moments()), len(other.moments())) == moments, f"moved by {after}:\n{service.journal()}"
        assert (owner.affinity(), other.affinity()) == (own, CPUSet(range(8)) - own), after

    service.do("restart")
    nobody_moved("a restart")
    assert "keeps CPUs" in service.journal()

    service.configure(**{"rescan-seconds": 7, "no-such-key": 1})
    service.do("reload")
    wait_until(lambda: "the config was not taken" in service.journal(), "a wrong config is refused", STARTS)
    service.configure(**{"rescan-seconds": 7})
    service.do("reload")
    wait_until(lambda: "config read again: mode enforce" in service.journal(), "the config is read again", STARTS)
    nobody_moved("a reload")

    killed = service.is_now("MainPID")
    subprocess.run(["systemctl", "kill", "--signal=SIGKILL", NAME], check=True)
    wait_until(lambda: service.is_now("NRestarts") == "1", "systemd starts it again", STARTS)
    wait_until(lambda: service.is_now("ActiveState") == "active", "and it is ready", STARTS)
    assert service.is_now("MainPID") not in (killed, "0")
    nobody_moved("a kill")

    service.do("stop")
    assert STATE.exists(), "RuntimeDirectoryPreserve"
    nobody_moved("a stop")
    assert service.is_now("Result") == "success"


def test_what_cannot_mend_itself_is_not_tried_again(service: Service) -> None:
    state = service.kubelet / "cpu_manager_state"
    state.write_text('{"policyName":"static","defaultCpuSet":"0-7","checksum":0}')
    service.start_with_kubelet()
    assert (service.is_now("ActiveState"), service.is_now("ExecMainStatus")) == ("failed", "3")
    assert "refusing to enforce: the kubelet gives out CPUs itself" in service.journal()
    time.sleep(4)  # twice RestartSec
    assert (service.is_now("ActiveState"), service.is_now("NRestarts")) == ("failed", "0")
    state.unlink()
    service.configure(mode="enfroce")
    service.do("restart", good=False)
    assert (service.is_now("ActiveState"), service.is_now("ExecMainStatus")) == ("failed", "2")
    assert 'did you mean "enforce"?' in service.journal()
