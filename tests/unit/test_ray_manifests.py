"""KubeRay manifests and the cluster launcher's file: fields, names that belong together, room for a run's actors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from conf.compose import compose
from flows.placement import placement, shortage
from infra.device import Node

INFRA = Path(__file__).parents[2] / "infra"
UNITS = {"Gi": 2**30, "Mi": 2**20}

CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
POD_FIELDS = {"securityContext", "containers", "volumes"}
CONTAINER_FIELDS = {
    "name", "image", "command", "env", "envFrom", "ports", "resources", "securityContext", "livenessProbe",
    "volumeMounts",
}  # fmt: skip
"""Fields of KubeRay's API (v1) and of Kubernetes that the manifests use: another one is a misspelling."""


def _documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((INFRA / "kuberay" / name).read_text()))


def _cluster() -> Any:
    (found,) = _documents("raycluster.yaml")
    return found


def _groups(cluster: Any) -> list[Any]:
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


def _containers(cluster: Any) -> Iterator[tuple[Any, Any]]:
    for group in _groups(cluster):
        for container in group["template"]["spec"]["containers"]:
            yield group["template"]["spec"], container


def manifest_problems(cluster: Any, shared: Sequence[Any]) -> list[str]:
    """What is wrong with a RayCluster beside the objects that it names."""
    spec, found = cluster["spec"], []
    if (cluster["apiVersion"], cluster["kind"]) != ("ray.io/v1", "RayCluster"):
        found.append("not a RayCluster of ray.io/v1")
    found += [f"spec.{name}: no such field" for name in spec.keys() - CLUSTER_FIELDS]
    if f"ray=={spec.get('rayVersion')}\n" not in (INFRA / "docker" / "worker.txt").read_text():
        found.append(f"rayVersion is {spec.get('rayVersion')}, which the images do not have")
    if spec.get("authOptions", {}).get("mode") != "token":
        found.append("authOptions.mode is not token")
    for group in _groups(cluster):
        found += [f"{name}: no such field of a group" for name in group.keys() - GROUP_FIELDS]
        if "groupName" in group and not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            found.append(f"{group['groupName']}: replicas are not between their bounds")
        found += [f"{name}: no such field of a pod" for name in group["template"]["spec"].keys() - POD_FIELDS]
    names = {(o["kind"], o["metadata"]["name"]) for o in shared}
    for pod, container in _containers(cluster):
        found += [f"{container['name']}: {text}" for text in _container_problems(pod, container, names)]
    return found


def _container_problems(pod: Any, container: Any, names: set[tuple[str, str]]) -> Iterator[str]:
    yield from (f"{name}: no such field" for name in container.keys() - CONTAINER_FIELDS)
    if not re.fullmatch(r"fp8-grpo-(driver|worker):\d+\.\d+\.\d+", container["image"]):
        yield f"image {container['image']}: not one of this project's, with its version"
    if container["resources"]["requests"] != container["resources"]["limits"]:
        yield "requests differ from limits, which Ray counts"
    if pod["securityContext"] != {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}:
        yield "the user is not that of the images"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    yield from (f"volume {m['name']} is not declared" for m in container["volumeMounts"] if m["name"] not in volumes)
    claims = [v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v]
    yield from (
        f"claim {claim}: not in shared.yaml" for claim in claims if ("PersistentVolumeClaim", claim) not in names
    )
    for source in container.get("envFrom", []):
        reference = source.get("configMapRef")
        if reference is not None and ("ConfigMap", reference["name"]) not in names:
            yield f"config map {reference['name']}: not in shared.yaml"
    memory = _bytes(container["resources"]["limits"]["memory"])
    for volume in volumes.values():
        size = volume.get("emptyDir", {}).get("sizeLimit")
        if size is not None and _bytes(size) > memory / 2:
            yield f"volume {volume['name']}: more than half of the container's memory, which it counts to"


def _bytes(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def test_the_cluster_has_no_problem() -> None:
    assert manifest_problems(_cluster(), _documents("shared.yaml")) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('rayVersion: "2.60.0"', 'rayVersion: "2.9.0"', "rayVersion is 2.9.0"),
        ("mode: token", "mode: disabled", "authOptions.mode"),
        ("workerGroupSpecs", "workerGroupsSpecs", None),
        ("maxReplicas: 8", "maxReplicas: 0", "replicas are not between"),
        ("image: fp8-grpo-worker:0.1.0", "image: rayproject/ray:latest", "not one of this project's"),
        ('limits: {cpu: "32"', 'limits: {cpu: "16"', "requests differ from limits"),
        ("claimName: fp8-grpo-shared", "claimName: fp8-shared", "claim fp8-shared: not in"),
        ("configMapRef: {name: fp8-grpo-servers}", "configMapRef: {name: servers}", "config map servers: not in"),
        ("{name: shm, emptyDir: {medium: Memory, sizeLimit: 64Gi}}", "{name: sh, emptyDir: {}}", "volume shm is not"),
        ("sizeLimit: 64Gi", "sizeLimit: 400Gi", "more than half of the container's memory"),
        ("runAsUser: 10001", "runAsUser: 0", "the user is not"),
        ("livenessProbe:", "liveness_probe:", "liveness_probe: no such field"),
    ],
)
def test_a_mistake_is_found(right: str, wrong: str, said: str | None) -> None:
    text = (INFRA / "kuberay" / "raycluster.yaml").read_text()
    assert right in text
    if said is None:
        with pytest.raises(KeyError):
            manifest_problems(yaml.safe_load(text.replace(right, wrong)), _documents("shared.yaml"))
        return
    found = manifest_problems(yaml.safe_load(text.replace(right, wrong)), _documents("shared.yaml"))
    assert any(said in problem for problem in found), found


def test_the_second_container_of_the_head_joins_its_ray() -> None:
    cluster = _cluster()
    head, beside = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for mount in head["volumeMounts"]}
    assert {"/tmp/ray", "/dev/shm"} <= mounts == {mount["mountPath"] for mount in beside["volumeMounts"]}
    env = {entry["name"]: entry for entry in beside["env"]}
    secret = env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    # KubeRay names the secret after the cluster.
    assert secret == {"name": cluster["metadata"]["name"], "key": "auth_token"}
    assert env["RAY_AUTH_MODE"]["value"] == "token"


def _nodes(**replicas: int) -> list[Node]:
    """What Ray would hand out: the head nothing, the pods of a group what they are limited to."""
    cluster, found = _cluster(), []
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["spec"]["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        node = Node(float(limits["cpu"]), float(limits.get("nvidia.com/gpu", 0)))
        found += [node] * replicas.get(group["groupName"], group["replicas"])
    return found


EXISTING = ("cluster=existing", "cluster.address=auto")
EIGHT = ("model=qwen3_8b_base", "rollout=vllm", "trainer=megatron", "trainer.tensor_parallel_size=2")


@pytest.mark.parametrize(
    ("overrides", "replicas"),
    [
        ((*EIGHT, "trainer.ranks=8"), {}),
        ((*EIGHT, "trainer.ranks=4"), {}),
        ((*EIGHT, "trainer.ranks=16"), {"gpu": 2}),
        ((), {"gpu": 0, "cpu": 1}),
    ],
)
def test_runs_of_the_readme_fit(overrides: tuple[str, ...], replicas: dict[str, int]) -> None:
    nodes = _nodes(**replicas)
    config = compose([*overrides, *EXISTING, "recipe=fp8_rollout_kv"])
    assert shortage(placement(config, sum(node.gpus for node in nodes)), nodes, "the cluster") is None


def test_a_run_that_is_too_large_does_not_fit() -> None:
    nodes = _nodes()
    config = compose([*EIGHT, *EXISTING, "recipe=fp8_rollout_kv", "trainer.ranks=16"])
    assert "has 8 GPUs in all" in str(shortage(placement(config, 8), nodes, "the cluster"))


def _launcher() -> Any:
    return yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())


def test_rays_own_launcher_accepts_its_file() -> None:
    validate_config(prepare_config(_launcher()))


def test_rays_own_launcher_refuses_a_misspelt_key() -> None:
    content = _launcher() | {"worker_start_commands": []}
    with pytest.raises(Exception, match="worker_start_commands"):
        validate_config(prepare_config(content))


def test_the_launchers_workers_are_counted_and_show_the_token() -> None:
    content = _launcher()
    assert content["min_workers"] == content["max_workers"] == len(content["provider"]["worker_ips"])
    assert content["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    for commands in (content["head_start_ray_commands"], content["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in commands[-1]
