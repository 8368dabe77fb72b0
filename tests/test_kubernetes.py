"""scripts/train.pytorchjob.yaml against the schema of the Kubeflow training operator, as its own package has it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow.training import models as kubeflow
from kubernetes.client import models as kubernetes
from torch.distributed.run import get_args_parser as torchrun_parser

from tests.conftest import python

MANIFEST = Path(__file__).resolve().parents[1] / "scripts" / "train.pytorchjob.yaml"
PLAIN = {"str": str, "int": int, "bool": bool, "float": float, "object": object}


def check(value: Any, kind: str, where: str) -> None:
    """Hold a value to a type of the schema: no unknown name, the right kinds, nothing missing that is required."""
    if many := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), f"{where} must be a list"
        for number, one in enumerate(value):
            check(one, many[1], f"{where}[{number}]")
    elif many := re.fullmatch(r"dict\(str, (.+)\)", kind):
        assert isinstance(value, dict), f"{where} must be a mapping"
        for name, one in value.items():
            check(str(one) if many[1] == "str" and "limits" in where else one, many[1], f"{where}.{name}")
    elif kind in PLAIN:
        assert isinstance(value, PLAIN[kind]), f"{where} must be {kind}, and is {value!r}"
    else:
        model = getattr(kubeflow, kind, None) or getattr(kubernetes, kind)
        names = {outside: inside for inside, outside in model.attribute_map.items()}
        assert isinstance(value, dict), f"{where} must be a mapping"
        for name, one in value.items():
            assert name in names, f"{where} has no {name}; it has {', '.join(sorted(names))}"
            check(one, model.openapi_types[names[name]], f"{where}.{name}")
        model(**{names[name]: one for name, one in value.items()})  # raises where something required is missing


def manifest() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def test_it_fits_the_schema() -> None:
    check(manifest(), "KubeflowOrgV1PyTorchJob", "job")


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (["spec", "nProcPerNode"], "2", "job.spec has no nProcPerNode"),
        (["spec", "nprocPerNode"], 2, "job.spec.nprocPerNode must be str"),
        (["spec", "pytorchReplicaSpecs", "Master", "template", "spec", "containers"], {}, "containers must be a list"),
    ],
)
def test_what_does_not_fit_is_found(where: list[str], value: Any, says: str) -> None:
    job = manifest()
    part = job
    for name in where[:-1]:
        part = part[name]
    part[where[-1]] = value
    with pytest.raises(AssertionError, match=re.escape(says)):
        check(job, "KubeflowOrgV1PyTorchJob", "job")


def test_its_command_is_one_of_the_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator wants the name "pytorch"; torchrun's flags come from the environment that it sets."""
    monkeypatch.chdir(MANIFEST.parents[1])
    for role in manifest()["spec"]["pytorchReplicaSpecs"].values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        program, restarts, script, *flags = [*container["command"], *container["args"]]
        assert [program, script] == ["torchrun", "scripts/train.py"]
        assert torchrun_parser().parse_args([restarts, script]).max_restarts == 3
        result = python(script, *flags, "--print_config")
        assert result.returncode == 0, result.stderr
        config = yaml.safe_load(result.stdout)
        assert (config["name"], config["resume"], config["checkpoint_every"]) == (manifest()["metadata"]["name"], True, 500)
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in role["template"]["spec"]["volumes"]
        }
