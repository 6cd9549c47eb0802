"""The templates for Kubernetes, Slurm and a cloud: valid by their readers' schemas, safe, and short to edit."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

import cluster

TEMPLATES = Path(cluster.__file__).parent / "templates"
KUBERAY, SLURM, LAUNCHER = TEMPLATES / "kuberay.yaml", TEMPLATES / "slurm.sbatch", TEMPLATES / "launcher.yaml"

# The fields of KubeRay's ray.io/v1 types (ray-operator/apis/ray/v1); pod templates as far as we use them.
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_CONTAINER = {
    "type": "object",
    "required": ["name", "image"],
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "env": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "value": {"type": "string"},
                    "valueFrom": {"type": "object"},
                },
                "additionalProperties": False,
            },
        },
        "resources": {
            "type": "object",
            "properties": {"requests": _TEXTS, "limits": _TEXTS},
            "additionalProperties": False,
        },
        "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
    },
    "additionalProperties": False,
}
_POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "properties": {
                "containers": {"type": "array", "minItems": 1, "items": _CONTAINER},
                "restartPolicy": {"enum": ["Never", "OnFailure", "Always"]},
                "serviceAccountName": {"type": "string"},
                "terminationGracePeriodSeconds": {"type": "integer"},
                "volumes": {"type": "array"},
            },
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}
_WORKERS = {
    "type": "object",
    "required": ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    "properties": {
        "groupName": {"type": "string"},
        **{name: {"type": "integer"} for name in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")},
        "rayStartParams": _TEXTS,
        "template": _POD,
    },
    "additionalProperties": False,
}
RAY_JOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["rayClusterSpec", "entrypoint"],
            "properties": {
                "entrypoint": {"type": "string"},
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
                "backoffLimit": {"type": "integer"},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "runtimeEnvYAML": {"type": "string"},
                "submitterPodTemplate": _POD,
                "rayClusterSpec": {
                    "type": "object",
                    "required": ["headGroupSpec"],
                    "properties": {
                        "headGroupSpec": {
                            "type": "object",
                            "required": ["rayStartParams", "template"],
                            "properties": {"rayStartParams": _TEXTS, "template": _POD},
                            "additionalProperties": False,
                        },
                        "workerGroupSpecs": {"type": "array", "items": _WORKERS},
                    },
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}


def loaded(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", [KUBERAY, SLURM, LAUNCHER], ids=lambda path: path.name)
def test_three_lines_are_marked_for_editing(path: Path) -> None:
    assert re.findall(r"# EDIT (\d)", path.read_text()) == ["1", "2", "3"]


def test_the_kubernetes_template_is_a_ray_job() -> None:
    jsonschema.validate(loaded(KUBERAY), RAY_JOB)


def test_every_pod_of_the_kubernetes_template_has_the_token_from_a_secret_and_never_in_the_file() -> None:
    spec = loaded(KUBERAY)["spec"]
    cluster_spec = spec["rayClusterSpec"]
    pods = [spec["submitterPodTemplate"], cluster_spec["headGroupSpec"]["template"]]
    pods += [group["template"] for group in cluster_spec["workerGroupSpecs"]]
    for pod in pods:
        for container in pod["spec"]["containers"]:
            env = {entry["name"]: entry for entry in container["env"]}
            assert env["RAY_AUTH_MODE"]["value"] == "token"
            assert "secretKeyRef" in env["RAY_AUTH_TOKEN"]["valueFrom"]


def test_the_cloud_template_is_valid_by_rays_own_schema_and_asks_for_the_token() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    config = loaded(LAUNCHER)
    jsonschema.validate(config, schema)
    assert config["head_node_type"] in config["available_node_types"]
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [line for line in config[commands] if "ray start" in line]
        assert starts
        assert all(line.startswith("RAY_AUTH_MODE=token ") for line in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert "chmod 600 ~/.ray/auth_token" in config["setup_commands"]


def stand_ins(folder: Path) -> Path:
    """Programs of Slurm and ours that write down what they were asked, and for the driver, end as they are told."""
    log = folder / "log"
    programs = {
        "scontrol": f'echo "scontrol $*" >> {log}; if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; fi',
        "srun": f'echo "srun $*" >> {log}; case "$*" in *hostname*) echo 127.0.0.1;; esac',
        "geosweep": f'echo "geosweep $*" >> {log}; stat -c "token %a" "$RAY_AUTH_TOKEN_PATH" >> {log}; exit $CODE',
        "sleep": "exit 0",
    }
    for name, text in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return log


@pytest.mark.parametrize("code", [0, 130, 3])
def test_the_slurm_script_starts_ray_on_every_node_and_asks_to_be_queued_again_when_it_was_stopped(
    tmp_path: Path, code: int
) -> None:
    log = stand_ins(tmp_path)
    venv = tmp_path / "activate"
    venv.touch()
    script = tmp_path / "script"
    script.write_text(SLURM.read_text().replace("/shared/venv/bin/activate", str(venv)))
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "CODE": str(code),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_GPUS_PER_NODE": "1",
    }
    done = subprocess.run(["bash", str(script), "sweep.yaml"], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    asked = log.read_text().splitlines()
    heads = [line for line in asked if "ray start --head" in line]
    workers = [line for line in asked if "ray start --address=127.0.0.1:24711" in line]
    assert len(heads) == 1
    assert "--nodelist=n1 " in heads[0]
    assert {re.search(r"--nodelist=(\w+)", line)[1] for line in workers} == {"n2", "n3"}  # type: ignore[index]
    assert "geosweep run sweep.yaml --store /shared/geosweep-store --address 127.0.0.1:24711" in asked
    assert "token 600" in asked
    assert not list((tmp_path / ".ray").iterdir()), "the token goes with the allocation"
    assert ("scontrol requeue 4711" in asked) == (code == 130)
