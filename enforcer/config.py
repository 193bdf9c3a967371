"""The configuration: one TOML file, in which nothing must be set. All errors of a file are reported at once."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from enforcer.core.allocation import AllocationOptions
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import ConfigError, CPUSetSyntaxError
from enforcer.core.reserved import Reservation

DEFAULT_PATH: Final = Path("/etc/cpuset-enforcer/config.toml")

EXAMPLE: Final = """\
# cpuset-enforcer: each line that starts with "#" and a key shows the default, or an example where it says so.
# An unknown key is an error. After a change send the agent SIGHUP (its pid is in `cpuset-enforcer status`).

# "audit" looks and reports, "enforce" writes cpusets.
#mode = "audit"

# CPUs that are never given out exclusively; at most one of the two. The default is what the kubelet's own config
# reserves, else the whole core of the lowest CPU. Examples:
#reserved-cpus = "0-1"
#reserved-amount = "500m"

# kubepods roots besides /kubepods and /kubelet (or .slice) at the top of the cgroup tree. Example:
#roots = ["/nested/kubepods"]

# Is the kubelet's cpuCFSQuota on? "off": shares alone say how many CPUs a container asks for.
#cfs-quota = "on"

# Seconds between two looks at everything (events come at once; this is the safety net), and for how long at most a new
# container's set is kept right against its runtime's own writes.
#rescan-seconds = 60
#hold-seconds = 10

# SCHED_FIFO 1 for the thread that pins; nice where that is refused.
#fifo = true

# Where the Prometheus metrics are served (a process of its own); "" for nowhere.
#metrics-listen = "127.0.0.1:9967"

#state-dir = "/run/cpuset-enforcer"
#kubelet-root = "/var/lib/kubelet"
# The default is config.yaml in the kubelet-root.
#kubelet-config = "/var/lib/kubelet/config.yaml"

# The kubelet's CPU Manager policy options: same names, same meaning.
[options]
#full-pcpus-only = false
#distribute-cpus-across-numa = false
#distribute-cpus-across-cores = false
#align-by-socket = false
#prefer-align-cpus-by-uncorecache = false
#strict-cpu-reservation = false

# When somebody else keeps writing to a set: so many repairs within so many seconds make a conflict. Then the next
# repair waits for the back-off, which doubles each time up to its limit.
[drift]
#repairs = 10
#within-seconds = 60
#back-off-seconds = 1
#back-off-limit-seconds = 60
"""


class Mode(StrEnum):
    """AUDIT: the plan is never applied, its writes are findings. ENFORCE: it is applied."""

    AUDIT = "audit"
    ENFORCE = "enforce"


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The kubelet's static policy options, by its names."""

    full_pcpus_only: bool = False
    distribute_cpus_across_numa: bool = False
    distribute_cpus_across_cores: bool = False
    align_by_socket: bool = False
    prefer_align_cpus_by_uncorecache: bool = False
    strict_cpu_reservation: bool = False

    def allocation(self) -> AllocationOptions:
        """Those that say which CPUs are taken (all but strict-cpu-reservation)."""
        return AllocationOptions(
            distribute_numa=self.distribute_cpus_across_numa,
            distribute_cores=self.distribute_cpus_across_cores,
            full_cores=self.full_pcpus_only,
            align_socket=self.align_by_socket,
            align_uncore=self.prefer_align_cpus_by_uncorecache,
        )


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """`repairs` of one set within `within` seconds make a conflict; then `back_off` doubles up to `back_off_limit`."""

    repairs: int = 10
    within: float = 60.0
    back_off: float = 1.0
    back_off_limit: float = 60.0


@dataclass(frozen=True, slots=True)
class Config:
    """What the operator chose. `reservation` None: the kubelet's own, else a default; durations are seconds."""

    mode: Mode = Mode.AUDIT
    reservation: Reservation | None = None
    roots: tuple[str, ...] = ()
    cfs_quota: bool = True
    rescan: float = 60.0
    hold: float = 10.0
    fifo: bool = True
    metrics_listen: str = "127.0.0.1:9967"
    state_dir: Path = Path("/run/cpuset-enforcer")
    kubelet_root: Path = Path("/var/lib/kubelet")
    kubelet_config: Path | None = None
    options: PolicyOptions = field(default_factory=PolicyOptions)
    drift: DriftLimits = field(default_factory=DriftLimits)

    @property
    def kubelet_config_path(self) -> Path:
        """The kubelet's config file: as configured, else config.yaml in its root."""
        return self.kubelet_config or self.kubelet_root / "config.yaml"


def load(path: Path | None = None) -> Config:
    """Reads a config file; None = DEFAULT_PATH, which need not exist. Raises ConfigError."""
    source = path or DEFAULT_PATH
    try:
        return parse(source.read_text(encoding="utf-8"), str(source))
    except FileNotFoundError:
        if path is None:
            return Config()
        raise ConfigError(f"{source}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from error


def parse(text: str, source: str) -> Config:
    """Reads a config text; `source` names it in messages. Raises one ConfigError with a line for each error."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from error
    values, problems = _read_all(document)
    problems += _contradictions(values)
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return _build(values, source)


def parse_millicores(text: str) -> int:
    """A Kubernetes CPU quantity ("500m", "1.5", "2", "1e-1") in millicores, rounded up; raises ValueError."""
    match = _QUANTITY.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not an amount of CPUs such as 500m, 1.5 or 2")
    exponent = int(match[3]) if match[3] else _SUFFIXES[match[2] or ""]
    milli = Fraction(match[1]) * Fraction(10) ** (exponent + 3)
    return -int(-milli // 1)


# apimachinery resource.Quantity: decimal suffixes or an exponent; digits are bounded so that no text costs time.
_QUANTITY: Final = re.compile(r"\+?(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})(?:([numk]?)|[eE]([-+]?\d{1,2}))", re.ASCII)
_SUFFIXES: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3}


@dataclass(frozen=True, slots=True)
class _Key:
    """`read` turns a TOML value into ours and raises ValueError; `allowed` says what it takes."""

    allowed: str
    read: Callable[[Any], Any]


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _choice(*choices: str) -> _Key:
    def read(value: object) -> str:
        if value not in choices:
            near = difflib.get_close_matches(str(value).lower(), choices, 1)
            raise ValueError(f'did you mean "{near[0]}"?' if near else "")
        return str(value)

    return _Key(" or ".join(f'"{choice}"' for choice in choices), read)


def _number(low: float, high: float, unit: str = "", *, whole: bool = False) -> _Key:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
            raise ValueError
        return value

    return _Key(f"a {'whole ' if whole else ''}number{unit} from {low:g} to {high:g}", read)


def _cpu_list(value: object) -> CPUSet:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    try:
        return CPUSet.parse(value)
    except CPUSetSyntaxError as error:
        raise ValueError(error.message) from error


def _millicores(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError
    amount = parse_millicores(str(value))
    if not amount:
        raise ValueError
    return amount


def _path(value: object) -> Path:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ValueError
    return Path(value)


def _roots(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError
    return tuple(dict.fromkeys(_root(one) for one in value))


def _root(value: object) -> str:
    path = str(_path(value))
    # The top of the tree as a root would make every service of the node a pod.
    if path.strip("/") == "" or ".." in path.split("/"):
        raise ValueError(f"{_shown(value)} is not such a path")
    return path


def _address(value: object) -> str:
    """A host is looked up by whoever listens; here the form counts."""
    text = str(value)
    host, colon, port = text.rpartition(":")
    if not isinstance(value, str) or (text and not (colon and port.isascii() and port.isdigit())):
        raise ValueError("")
    if text and not 0 < int(port) < 65536:
        raise ValueError(f"{port} is no port")
    return text


_BOOLEAN: Final = _Key("true or false", _boolean)
_ABSOLUTE: Final = _Key('an absolute path such as "/run/cpuset-enforcer"', _path)

# Every key by its full name, table included.
KEYS: Final[Mapping[str, _Key]] = {
    "mode": _choice("audit", "enforce"),
    "reserved-cpus": _Key('a CPU list such as "0-1" or "0,8"', _cpu_list),
    "reserved-amount": _Key('an amount of CPUs above 0 such as "500m", 1.5 or 2', _millicores),
    "roots": _Key('a list of cgroup paths below the top such as ["/nested/kubepods"]', _roots),
    "cfs-quota": _choice("on", "off"),
    "rescan-seconds": _number(1, 3600),
    "hold-seconds": _number(0.1, 60),
    "fifo": _BOOLEAN,
    "metrics-listen": _Key('HOST:PORT such as "127.0.0.1:9967", or "" for no metrics', _address),
    "state-dir": _ABSOLUTE,
    "kubelet-root": _ABSOLUTE,
    "kubelet-config": _ABSOLUTE,
    "options.full-pcpus-only": _BOOLEAN,
    "options.distribute-cpus-across-numa": _BOOLEAN,
    "options.distribute-cpus-across-cores": _BOOLEAN,
    "options.align-by-socket": _BOOLEAN,
    "options.prefer-align-cpus-by-uncorecache": _BOOLEAN,
    "options.strict-cpu-reservation": _BOOLEAN,
    "drift.repairs": _number(1, 1000, whole=True),
    "drift.within-seconds": _number(1, 3600),
    "drift.back-off-seconds": _number(0.1, 3600),
    "drift.back-off-limit-seconds": _number(0.1, 3600),
}
TABLES: Final = ("options", "drift")
_TOP: Final = tuple(key for key in KEYS if "." not in key)

_BARE: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")

# Start errors of the kubelet too (cm/cpumanager policy_options.go).
_EXCLUSIVE: Final = (
    ("full-pcpus-only", "distribute-cpus-across-cores"),
    ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
)


def _read_all(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(full key -> our value, the problems)."""
    values: dict[str, Any] = {}
    problems = []
    for name, value in _flat(document):
        key = KEYS.get(name)
        if name in TABLES:
            problems.append(f"{name} = {_shown(value)}: {name} is a table; write [{name}] and its keys below it")
        elif key is None:
            problems.append(_unknown(name, value))
        else:
            try:
                values[name] = key.read(value)
            except ValueError as error:
                why = f" ({error})" if str(error) else ""
                problems.append(f"{name} = {_shown(value)}: allowed: {key.allowed}{why}")
    return values, problems


def _flat(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if name in TABLES and isinstance(value, dict):
            yield from ((f"{name}.{inner}", one) for inner, one in _flat(value))
        else:
            # Quoted, a key may hold anything; it is shown so, and a quoted "options.x" is not the x of [options].
            yield (name if _BARE.fullmatch(name) else json.dumps(name)), value


def _unknown(name: str, value: object) -> str:
    said = f"[{name}]" if isinstance(value, dict) else f"{name} = {_shown(value)}"
    near = _nearest(name)
    if near in TABLES:
        return f"{said}: unknown table; nearest: [{near}]"
    if near is None:
        return f"{said}: unknown key; known are {', '.join(_TOP)} and the tables [{'], ['.join(TABLES)}]"
    table, _, key = near.rpartition(".")
    place = f" in the table [{table}]" if table else " at the top of the file, before any table" if "." in name else ""
    return f"{said}: unknown key; nearest: {key}{place} ({KEYS[near].allowed})"


def _nearest(name: str) -> str | None:
    """The known key or table most like a name, whatever its case, dashes and table."""
    known = {_plain(key): key for key in (*KEYS, *TABLES)}
    near = difflib.get_close_matches(_plain(name), known, 1, cutoff=0.6)
    return known[near[0]] if near else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition(".")[2].lower())


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    if "reserved-cpus" in values and "reserved-amount" in values:
        yield "reserved-cpus and reserved-amount: only one of the two may be set"
    for pair in _EXCLUSIVE:
        if all(values.get(f"options.{name}") for name in pair):
            yield f"options {pair[0]} and {pair[1]} exclude each other: only one of the two may be true"
    limits = _drift(values)
    if limits.back_off > limits.back_off_limit:
        yield (
            f"drift.back-off-seconds = {limits.back_off:g}: must not be above back-off-limit-seconds, "
            f"which is {limits.back_off_limit:g}"
        )


def _build(values: Mapping[str, Any], source: str) -> Config:
    default = Config()
    options = {key: values.get(f"options.{key}", False) for key in _option_names()}
    return Config(
        mode=Mode(values.get("mode", default.mode)),
        reservation=_reservation(values, source),
        roots=values.get("roots", default.roots),
        cfs_quota=values.get("cfs-quota", "on") == "on",
        rescan=values.get("rescan-seconds", default.rescan),
        hold=values.get("hold-seconds", default.hold),
        fifo=values.get("fifo", default.fifo),
        metrics_listen=values.get("metrics-listen", default.metrics_listen),
        state_dir=values.get("state-dir", default.state_dir),
        kubelet_root=values.get("kubelet-root", default.kubelet_root),
        kubelet_config=values.get("kubelet-config"),
        options=PolicyOptions(**{key.replace("-", "_"): on for key, on in options.items()}),
        drift=_drift(values),
    )


def _option_names() -> list[str]:
    return [key.removeprefix("options.") for key in KEYS if key.startswith("options.")]


def _reservation(values: Mapping[str, Any], source: str) -> Reservation | None:
    if "reserved-cpus" in values:
        return Reservation(f"{source}: reserved-cpus", cpus=values["reserved-cpus"])
    if "reserved-amount" in values:
        return Reservation(f"{source}: reserved-amount", millicores=values["reserved-amount"])
    return None


def _drift(values: Mapping[str, Any]) -> DriftLimits:
    default = DriftLimits()
    return DriftLimits(
        repairs=values.get("drift.repairs", default.repairs),
        within=values.get("drift.within-seconds", default.within),
        back_off=values.get("drift.back-off-seconds", default.back_off),
        back_off_limit=values.get("drift.back-off-limit-seconds", default.back_off_limit),
    )


def _shown(value: object) -> str:
    """A value as TOML would write it, short enough for a line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
