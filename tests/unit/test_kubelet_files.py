"""The kubelet's files: its policy, its reservation, and whether we may enforce beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enforcer.audit.kubelet import KubeletView, left_over_state, read_kubelet, static_policy_reason
from enforcer.core.cpuset import CPUSet

HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


class Node:
    """A kubelet's root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.state = root / "cpu_manager_state"

    def read(self, config: str | None = None, state: str | None = None, **drop_ins: str) -> KubeletView:
        for path, text in ((self.config, config), (self.state, state)):
            if text is not None:
                path.write_text(text)
        for name, text in drop_ins.items():
            folder = self.root / "config.yaml.d"
            folder.mkdir(exist_ok=True)
            (folder / name.replace("_", ".")).write_text(text)
        return read_kubelet(self.root, self.config)


def test_no_kubelet_at_all(node: Node) -> None:
    view = node.read()
    assert view == KubeletView(node.config, node.state)
    assert static_policy_reason(view) is None
    assert left_over_state(view) is None


@pytest.mark.parametrize(
    ("config", "millicores"),
    [
        ("systemReserved: {cpu: 500m}", 500),
        ("systemReserved: {cpu: 500m, memory: 1Gi}\nkubeReserved: {cpu: 250m}", 750),
        ("kubeReserved:\n  cpu: 1", 1000),
        ("kubeReserved:\n  cpu: '1.5'\n  ephemeral-storage: 1Gi", 1500),
        ("systemReserved: {cpu: 0.1}", 100),
        ("systemReserved: {cpu: 010}", 10000),  # Kubernetes reads ten here, YAML 1.1 eight
        ('{"kind": "KubeletConfiguration", "systemReserved": {"cpu": "2"}}', 2000),
    ],
)
def test_reserved_amounts_are_added_up(node: Node, config: str, millicores: int) -> None:
    view = node.read(config)
    assert view.problems == ()
    assert view.reservation is not None
    assert (view.reservation.millicores, view.reservation.cpus) == (millicores, None)
    assert view.reservation.source == f"systemReserved.cpu + kubeReserved.cpu in {node.config}"


@pytest.mark.parametrize(("value", "cpus"), [("0-1", "0-1"), ("0", "0"), ('"0,8"', "0,8"), ("0-1,24-25", "0-1,24-25")])
def test_the_reserved_list_overrules_the_amounts(node: Node, value: str, cpus: str) -> None:
    view = node.read(f"{HEAD}reservedSystemCPUs: {value}\nsystemReserved: {{cpu: 4}}")
    assert view.reservation is not None
    assert (view.reservation.cpus, view.reservation.millicores) == (CPUSet.parse(cpus), None)
    assert view.reservation.source == f"reservedSystemCPUs in {node.config}"


@pytest.mark.parametrize(
    "config",
    [
        "", HEAD, "systemReserved: {}", "systemReserved: null", "systemReserved: {memory: 1Gi}",
        "systemReserved: {cpu: ~}", "kubeReserved: {cpu: 0}", "reservedSystemCPUs: ''", "reservedSystemCPUs: null",
    ],
)  # fmt: skip
def test_nothing_reserved(node: Node, config: str) -> None:
    view = node.read(config)
    assert view.reservation is None
    assert view.problems == ()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system ['true']", None),
        ("- a", "its top is no map"),
        ("just words", "its top is no map"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("a: &x [*x]\nb: \x01", "not YAML"),
        ("a: " + "[" * 1000, "not YAML"),
        ("? [a]\n: b", "not YAML"),
        ("systemReserved: {cpu: lots}", "systemReserved.cpu: 'lots' is not an amount of CPUs"),
        ("kubeReserved: {cpu: [1]}", "kubeReserved.cpu: "),
        ("reservedSystemCPUs: 0-x", "reservedSystemCPUs: CPU list '0-x'"),
        ("cpuManagerPolicy: dynamic", "cpuManagerPolicy is 'dynamic'"),
        ("cpuManagerPolicy: [static]", "cpuManagerPolicy is ['static']"),
    ],
)
def test_what_cannot_be_understood_is_told_and_stops_nothing(node: Node, config: str, words: str | None) -> None:
    view = node.read(config, '{"policyName":"none"}')
    assert view.state_policy == "none"
    assert view.reservation is None
    assert [str(node.config) in line and "\n" not in line for line in view.problems] == [True] * (words is not None)
    assert words is None or words in view.problems[0]
    assert static_policy_reason(view) is None


def test_half_of_the_reservation_that_is_understood_counts(node: Node) -> None:
    view = node.read("systemReserved: {cpu: lots}\nkubeReserved: {cpu: 300m}")
    assert view.reservation is not None
    assert view.reservation.millicores == 300
    assert len(view.problems) == 1


def test_drop_ins_are_laid_over_the_config_in_the_order_of_their_names(node: Node) -> None:
    view = node.read(
        "cpuManagerPolicy: none\nsystemReserved: {cpu: 1, memory: 1Gi}\nkubeReserved: {cpu: 1}",
        b_conf="systemReserved: {cpu: 3}",
        a_conf="cpuManagerPolicy: static\nsystemReserved: {cpu: 2}",
        c_yaml="systemReserved: {cpu: 100}",
    )
    assert view.policy == "static"
    assert view.reservation is not None
    assert view.reservation.millicores == 4000


def test_a_broken_drop_in_leaves_the_rest(node: Node) -> None:
    view = node.read("systemReserved: {cpu: 1}", a_conf="a: [")
    assert view.reservation is not None
    assert [str(node.root / "config.yaml.d" / "a.conf") in line for line in view.problems] == [True]


@pytest.mark.parametrize(
    ("document", "policy"),
    [
        ('{"policyName":"none","defaultCpuSet":"","checksum":1353318690}', "none"),
        ('{"policyName":"static","defaultCpuSet":"0-63","checksum":1058907510}', "static"),
        ('{"policyName":"static","defaultCPUSet":"1-3","entries":{"id1":"4-6"},"checksum":3680390589}', "static"),
        ('{"policyName":"static","entries":{"pod":{"c":"4-6"}},"podEntries":{"pod":{"cpuSet":"4-6"}}}', "static"),
        ('{"policyName":"static","data":"{\\"policyName\\":\\"static\\"}","dataChecksum":1}', "static"),
        ('{"PolicyName":"static"}', "static"),
        ('{"POLICYNAME":"none","checksum":"odd","entries":[]}', "none"),
        ('{"policyName":"none","policyname":"static"}', "static"),
        ("", None),
    ],
)
def test_the_state_files_policy_in_every_form(node: Node, document: str, policy: str | None) -> None:
    view = node.read(state=document)
    assert view.state_policy == policy
    assert view.problems == ()


@pytest.mark.parametrize(
    "document", ["{", "[]", "null", "{}", '{"policyName":3}', '{"policyName":""}', "\0" * 40, "[" * 100000, "9" * 9999]
)
def test_a_broken_state_file_is_told(node: Node, document: str) -> None:
    view = node.read(state=document)
    assert view.state_policy is None
    (problem,) = view.problems
    assert problem.startswith(f"{node.state}: broken: ")
    assert static_policy_reason(view) is None


@pytest.mark.parametrize(
    ("config", "state", "words"),
    [
        ("cpuManagerPolicy: static", None, "cpuManagerPolicy is static in"),
        ("cpuManagerPolicy: static", "none", "cpuManagerPolicy is static in"),
        ("cpuManagerPolicy: static", "static", "cpuManagerPolicy is static in"),
        ("cpuManagerPolicy: Static", None, "cpuManagerPolicy is static in"),
        (None, "static", "policyName is static in"),
        (HEAD, "static", "policyName is static in"),  # a flag may say static
        ("a: [", "static", "policyName is static in"),
        ("cpuManagerPolicy: dynamic", "static", "policyName is static in"),
    ],
)
def test_beside_a_static_kubelet_we_refuse(node: Node, config: str | None, state: str | None, words: str) -> None:
    view = node.read(config, state and f'{{"policyName":"{state}"}}')
    reason = static_policy_reason(view)
    assert reason is not None
    assert words in reason
    assert "use mode audit here" in reason


@pytest.mark.parametrize("config", [None, HEAD, "cpuManagerPolicy: none", "cpuManagerPolicy: null"])
@pytest.mark.parametrize("state", [None, "none"])
def test_beside_a_kubelet_of_policy_none_we_may_enforce(node: Node, config: str | None, state: str | None) -> None:
    view = node.read(config, state and f'{{"policyName":"{state}"}}')
    assert static_policy_reason(view) is None
    assert left_over_state(view) is None


def test_a_static_state_file_is_left_over_when_the_config_says_none(node: Node) -> None:
    view = node.read("cpuManagerPolicy: none", '{"policyName":"static"}')
    assert static_policy_reason(view) is None
    line = left_over_state(view)
    assert line is not None
    assert f"{node.state} is left over from policy static" in line
    assert "drain the node and remove the file" in line


def test_a_state_file_of_none_is_left_over_when_the_config_says_static(node: Node) -> None:
    view = node.read("cpuManagerPolicy: static", '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}')
    line = left_over_state(view)
    assert line is not None
    assert "left over from policy none" in line


def test_files_that_cannot_be_read(node: Node) -> None:
    for path in (node.config, node.state):
        path.mkdir()
    (node.root / "config.yaml.d").write_text("")
    view = node.read()
    assert [line.split(": ")[0] for line in view.problems] == [
        str(node.root / "config.yaml.d"),
        str(node.config),
        str(node.state),
    ]
    assert all("cannot be read: " in line for line in view.problems)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes(node: Node, config: bytes, state: bytes) -> None:
    node.config.write_bytes(config)
    node.state.write_bytes(state)
    static_policy_reason(read_kubelet(node.root, node.config))


yaml_values = st.recursive(
    st.sampled_from(["static", "none", "null", "0-1", "500m", "", "1e9", "[]", "-1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["cpu", "memory"]), inner, max_size=2),
    max_leaves=4,
)
KEYS = ["cpuManagerPolicy", "reservedSystemCPUs", "systemReserved", "kubeReserved"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), yaml_values))
def test_any_value_under_the_keys_we_read(node: Node, config: dict[str, object]) -> None:
    import yaml

    node.config.write_text(yaml.safe_dump(config))
    static_policy_reason(read_kubelet(node.root, node.config))
