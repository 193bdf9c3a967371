"""The kubelet's own files: what policy its CPU Manager has, and what it reserves.

Read leniently: whatever stands in the files, the answer is a view with lines about what could not be understood.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from enforcer.config import parse_millicores
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CPUSetSyntaxError
from enforcer.core.reserved import Reservation

STATIC: Final = "static"
NONE: Final = "none"

_SIZE_LIMIT: Final = 16 << 20
# PyYAML takes 10 s and more for a megabyte, and the agent's loop waits. libyaml's loader would be fast, but recurses on
# the C stack without a limit. A kubelet's own file has a few kilobytes.
_YAML_LIMIT: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class KubeletView:
    """What the kubelet's files say. None: the file, or the key in it, is not there or cannot be read.

    `policy` is cpuManagerPolicy of the config file, `state_policy` the policyName of cpu_manager_state; `reservation`
    is what the config reserves of the CPUs. `problems` has a line for each thing that could not be understood.
    """

    config_path: Path
    state_path: Path
    policy: str | None = None
    reservation: Reservation | None = None
    state_policy: str | None = None
    problems: tuple[str, ...] = ()


def read_kubelet(root: Path, config_path: Path) -> KubeletView:
    """Reads `config_path`, the drop-ins in the folder of its name plus ".d", and cpu_manager_state in `root`."""
    problems: list[str] = []
    state_path = root / "cpu_manager_state"
    config = _read_config(config_path, problems)
    return KubeletView(
        config_path=config_path,
        state_path=state_path,
        policy=_policy(config, config_path, problems),
        reservation=_reservation(config, config_path, problems),
        state_policy=_state_policy(state_path, problems),
        problems=tuple(problems),
    )


def static_policy_reason(view: KubeletView) -> str | None:
    """Why we must not enforce on this node, for the operator; None when the kubelet gives out no CPUs itself.

    A state file of policy static counts unless the config says none in so many words: the policy may come from a
    command line flag, which the config does not show.
    """
    remedy = "use mode audit here, or drain the node, set cpuManagerPolicy: none, remove cpu_manager_state, restart it"
    if view.policy == STATIC:
        return f"the kubelet gives out CPUs itself: cpuManagerPolicy is static in {view.config_path}; {remedy}"
    if view.state_policy == STATIC and view.policy != NONE:
        said = f"{view.config_path} does not say otherwise" if view.policy is None else f"the config has {view.policy}"
        return f"the kubelet gives out CPUs itself: policyName is static in {view.state_path}, and {said}; {remedy}"
    return None


def left_over_state(view: KubeletView) -> str | None:
    """A state file of another policy than the config's, with which a kubelet does not start (kubernetes#95041)."""
    if view.policy is None or view.state_policy is None or view.policy == view.state_policy:
        return None
    return (
        f"{view.state_path} is left over from policy {view.state_policy}, {view.config_path} has {view.policy}: the "
        f"kubelet will not start with it; drain the node and remove the file"
    )


def _policy(config: Mapping[str, Any], path: Path, problems: list[str]) -> str | None:
    policy = _given(config, "cpuManagerPolicy")
    if not policy:
        return None
    if isinstance(policy, str) and policy.lower() in (STATIC, NONE):
        return policy.lower()
    problems.append(f"{path}: cpuManagerPolicy is {policy!r}; the kubelet knows none and static")
    return None


def _reservation(config: Mapping[str, Any], path: Path, problems: list[str]) -> Reservation | None:
    """reservedSystemCPUs overrules the amounts (cmd/kubelet/app/server.go); the amounts are added up."""
    listed = _given(config, "reservedSystemCPUs")
    if listed:
        try:
            return Reservation(f"reservedSystemCPUs in {path}", cpus=CPUSet.parse(str(listed)))
        except CPUSetSyntaxError as error:
            problems.append(f"{path}: reservedSystemCPUs: {error}")
            return None
    amount = sum(_amount(config, key, path, problems) for key in ("systemReserved", "kubeReserved"))
    return Reservation(f"systemReserved.cpu + kubeReserved.cpu in {path}", millicores=amount) if amount else None


def _amount(config: Mapping[str, Any], key: str, path: Path, problems: list[str]) -> int:
    reserved = config.get(key)
    cpu = _given(reserved, "cpu") if isinstance(reserved, dict) else None
    if not cpu:
        return 0
    try:
        return parse_millicores(str(cpu))
    except ValueError as error:
        problems.append(f"{path}: {key}.cpu: {error}")
        return 0


def _given(config: Mapping[str, Any], key: str) -> object:
    """A key's value; None when it is not there or is YAML's null."""
    value = config.get(key)
    return None if value in ("null", "~", "Null", "NULL") else value


def _read_config(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """The config file with its drop-ins laid over it, in the order of their names (kubelet --config-dir: *.conf)."""
    config: dict[str, Any] = {}
    for file in [path, *_drop_ins(path.with_name(path.name + ".d"), problems)]:
        _lay_over(config, _parse_yaml(file, problems))
    return config


def _drop_ins(folder: Path, problems: list[str]) -> Iterable[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix == ".conf")
    except FileNotFoundError:
        return ()
    except OSError as error:
        problems.append(f"{folder}: cannot be read: {error.strerror}")
        return ()


def _lay_over(config: dict[str, Any], newer: Mapping[str, Any]) -> None:
    """A JSON merge patch: maps are merged, everything else is replaced."""
    for key, value in newer.items():
        old = config.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _lay_over(old, value)
        else:
            config[key] = value


def _parse_yaml(path: Path, problems: list[str]) -> Mapping[str, Any]:
    import yaml  # slow to import, and only needed where a kubelet is

    data = _read(path, problems, _YAML_LIMIT)
    if not data:
        return {}
    try:
        # As safe as safe_load, and texts stay texts: YAML 1.1 would make other numbers of 010, 1_0 and 1:30.
        config = yaml.load(data, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(f"{path}: not YAML: {' '.join(str(error).split())}")
        return {}
    if isinstance(config, dict) and all(isinstance(key, str) for key in config):
        return config
    problems.append(f"{path}: not a kubelet configuration: its top is no map")
    return {}


def _state_policy(path: Path, problems: list[str]) -> str | None:
    """The policyName, in any form of the file, V1 to V4; names fit without regard to case, as in Go's encoding/json.

    An empty file is none, as for the kubelet.
    """
    data = _read(path, problems)
    if not data:
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        problems.append(f"{path}: broken: not JSON: {error}")
        return None
    policy = _named(document, "policyname")
    if isinstance(policy, str) and policy:
        return policy
    problems.append(f"{path}: broken: it has no policyName")
    return None


def _named(document: object, name: str) -> object:
    """A repeated name: the last one counts."""
    if not isinstance(document, dict):
        return None
    return next((value for key, value in reversed(document.items()) if key.lower() == name), None)


def _read(path: Path, problems: list[str], limit: int = _SIZE_LIMIT) -> bytes | None:
    """None: there is no such file, or it cannot be read, which is a problem."""
    try:
        # A pipe in the file's place must not block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return None
    if len(data or b"") > limit:
        problems.append(f"{path}: too large: more than {limit >> 10} KiB")
        return None
    return data
