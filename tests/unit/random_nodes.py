"""Random nodes as a person would describe them, for properties of plan(), simulate and explain."""

from __future__ import annotations

import random

QOS = ("guaranteed", "guaranteed", "guaranteed", "burstable", "besteffort")
OPTIONS = (
    [], [], ["full-pcpus-only"], ["distribute-cpus-across-numa"], ["distribute-cpus-across-cores"],
    ["strict-cpu-reservation"], ["prefer-align-cpus-by-uncorecache"], ["full-pcpus-only", "strict-cpu-reservation"],
)  # fmt: skip


def described(chance: random.Random) -> dict[str, object]:
    """A node as a person describes it: any shape, any pods, some pinned already."""
    sockets, threads = chance.choice([1, 1, 2]), chance.choice([1, 2])
    cores = chance.choice([2, 3, 4, 8])
    total = sockets * cores * threads
    numa = chance.choice([n for n in (1, sockets, 2 * sockets) if n <= sockets or cores % 2 == 0])
    pods = [described_pod(chance, number, total) for number in range(chance.randrange(7))]
    return {
        "cgroup": chance.choice([1, 2]),
        "topology": {"sockets": sockets, "cores": cores, "threads": threads, "numa": numa,
                     "siblings": chance.choice(["apart", "adjacent"])},
        "options": chance.choice(OPTIONS),
        "pods": pods,
    }  # fmt: skip


def described_pod(chance: random.Random, number: int, total: int) -> dict[str, object]:
    qos = chance.choice(QOS)
    rows: list[dict[str, object]] = []
    for one in range(chance.choice([1, 1, 2, 3])):
        row: dict[str, object] = {"name": f"c{one}"}
        if qos != "besteffort":
            row["cpus"] = chance.choice([1, 1, 2, 2, 3, 4, 6, "500m", "1500m"])
        if chance.random() < 0.15:
            first = chance.randrange(total)
            row["pinned"] = f"{first}-{min(total - 1, first + chance.randrange(3))}"
        rows.append(row)
    return {"name": f"p{number}", "qos": qos, "containers": rows, "sandbox": chance.random() < 0.8}
