"""Claims about the manifests of a run on Kubernetes: valid by its schemas, and read back as our own command line reads them."""

import functools
import json
import math
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from msgspec.structs import replace
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config
from offbeat.common.settings.hub_keys import keys_of_learner, keys_of_peer
from offbeat.deploy.cli.arguments import load_config
from offbeat.deploy.cli.cluster import POOLS
from offbeat.deploy.cli.main import make_app
from offbeat.deploy.clusters.kubernetes_files import Cluster, write_manifests
from offbeat.deploy.clusters.kubernetes_pods import PodOptions
from offbeat.deploy.local.model_sizes import sizes_of
from tests.deploy.local.machines import QWEN3_600M

SETTINGS = """\
# a comment of mine
[model]
path = "owner/model"
[data]
train_data = "owner/data"
[train]
num_steps = 7
[launch]
num_actors = 3
"""
RELEASES = ("1.29", "1.33", "1.37")
POD_NAME = "actor-7d9f-x2"
RECONCILED = ("--scaled-by", "reconcile")
VARIANTS = {
    "plain": (),
    "reconciled": RECONCILED,
    "monitored": ("--monitoring", "prometheus"),
    "resources": ("--learner", "nvidia.com/gpu=1", "--actor", "memory=32Gi", "--actor", "nvidia.com/gpu=1"),
    "storage": ("--storage-class", "fast", "--storage", "1Ti", "--secret", "tokens"),
    "pull": ("weights.backend=pull",),
}
Document = dict[str, Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which `offbeat deploy` is started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*options: str, toml: str = SETTINGS) -> dict[str, Document]:
    """Write the manifests to `out`. Return the documents by kind and name."""
    Path("run.toml").write_text(toml)
    arguments = ["deploy", "kubernetes", "run.toml", "--out", "out", "--image", "registry.example/offbeat:1", *options]
    CliRunner().invoke(make_app(), arguments, catch_exceptions=False)
    listed = yaml.safe_load(Path("out/kustomization.yaml").read_text())["resources"]
    documents = [document for name in listed for document in yaml.load_all((Path("out") / name).read_text(), yaml.CSafeLoader)]
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}


def refusal(*options: str, toml: str = SETTINGS) -> SettingError:
    with pytest.raises(SettingError) as caught:
        write(*options, toml=toml)
    return caught.value


def pods(documents: dict[str, Document]) -> list[Document]:
    """Return the specs of the learner's pod and the actors'."""
    return [documents[name]["spec"]["template"]["spec"] for name in ("Job/learner", "Deployment/actor")]


def started(container: Document, folder: Path) -> list[str]:
    """Return the words of the program that a container becomes, its volumes in `folder`."""
    values = {"$$": "$", "$(POD_NAME)": POD_NAME}
    words = [re.sub(r"\$\$|\$\(POD_NAME\)", lambda found: values[found[0]], word) for word in container["command"]]
    if words[0] != "sh":
        return words
    shown = words[2].replace('exec "$@"', "printf '%s\\0' \"$@\"").replace(' "$3"/', f' "{folder}$3"/')
    return subprocess.run(["sh", "-c", shown, *words[3:]], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def config_of(words: list[str], command: str) -> Config:
    """Return the config of a service that a container starts, checked as the service checks it."""
    assert words[:3] == ["offbeat", command, "/etc/offbeat/run.toml"]
    config = load_config(["run.toml", *words[3:]])
    check(config)
    return config


def configs(documents: dict[str, Document], folder: Path) -> tuple[Config, Config]:
    """Return the configs of learner and actor."""
    learner, actor = (pod["containers"][0] for pod in pods(documents))
    return config_of(started(learner, folder), "learner"), config_of(started(actor, folder), "actor")


def unpack(documents: dict[str, Document], pod: Document, folder: Path) -> None:
    """Write the files of a pod's ConfigMaps and Secrets to `folder` as they appear in its first container."""
    contents = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in pod["containers"][0]["volumeMounts"]:
        volume = contents[mount["name"]]
        if "configMap" in volume:
            files = documents[f"ConfigMap/{volume['configMap']['name']}"]["data"]
        elif "secret" in volume:
            files = documents[f"Secret/{volume['secret']['secretName']}"]["stringData"]
        else:
            continue
        for name, text in files.items():
            path = Path(f"{folder}{mount['mountPath']}") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o440)


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_documents_are_valid_in_three_releases_and_have_no_field_that_these_lack(options: tuple[str, ...]) -> None:
    documents = write(*options)
    assert len(documents) >= 10
    for document in documents.values():
        for release in RELEASES:
            validate(json.dumps(document), release)


@functools.cache
def validate(document: str, release: str) -> None:
    """Raise `ValidationError` for a document that this release would not take; most are the same in all variants."""
    kubernetes_validate.validate(json.loads(document), release, strict=True)


def test_validation_refuses_a_misspelled_field() -> None:
    job = write()["Job/learner"]
    job["spec"]["backofflimit"] = job["spec"].pop("backoffLimit")
    with pytest.raises(kubernetes_validate.ValidationError, match="backofflimit"):
        kubernetes_validate.validate(job, RELEASES[-1], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl; the next test reads the same files without it")
def test_kubectl_builds_the_kustomization() -> None:
    documents = write(*RECONCILED, "--namespace", "my-run")
    built = subprocess.run(["kubectl", "kustomize", "out"], capture_output=True, text=True, check=True, timeout=60).stdout
    names = {f"{document['kind']}/{document['metadata']['name']}" for document in yaml.safe_load_all(built)}
    assert names == set(documents)
    assert {document["metadata"]["namespace"] for document in yaml.safe_load_all(built)} == {"my-run"}


def test_kustomization_lists_every_file_that_is_written() -> None:
    write(*RECONCILED)
    listed = yaml.safe_load(Path("out/kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in Path("out").glob("*.yaml")}
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path("out").glob("*.yaml")} == {0o600}


def test_services_start_with_one_config_and_the_ports_of_the_service(folder: Path) -> None:
    documents = write("run.seed=5", "data.prompt_field=$$q $(POD_NAME)")
    learner, actor = configs(documents, folder)
    assert learner.data.prompt_field == actor.data.prompt_field == "$$q $(POD_NAME)"
    assert (learner.train.num_steps, learner.run.seed) == (actor.train.num_steps, actor.run.seed) == (7, 5)
    assert (learner.hub.address, actor.actor.name) == (actor.hub.address, POD_NAME)
    host, port = learner.hub.address.removeprefix("tcp://").split(":")
    ports = {port["name"]: port["targetPort"] for port in documents[f"Service/{host}"]["spec"]["ports"]}
    assert ports["hub"] == int(port) == int(learner.hub.bind.rpartition(":")[2])
    assert (ports["weights"], ports["collective"]) == (learner.weights.pull_port, learner.weights.port)
    assert learner.metrics.bind == actor.metrics.actor_bind == f"0.0.0.0:{ports['page']}"
    assert documents["ConfigMap/run-config"]["data"]["run.toml"] == SETTINGS


@pytest.mark.parametrize("run", ["run", "my run", "my $$run"])
def test_every_container_starts_a_command_that_takes_its_arguments(run: str, folder: Path) -> None:
    documents = write(*RECONCILED, f"run.dir=runs/{run}")
    (folder / "runs" / run).mkdir(parents=True)
    (folder / "runs" / run / "config.toml").touch()
    group = get_command(make_app())
    assert isinstance(group, TyperGroup)
    parsed: dict[str, dict[str, Any]] = {}
    for container in [container for pod in pods(documents) for container in pod["containers"]]:
        program, *words = started(container, folder)
        name, command, rest = group.resolve_command(group.make_context("offbeat", words), words)
        assert program == "offbeat" and command is not None
        parsed[str(name)] = command.make_context(name, rest).params
    assert set(parsed) == {"learner", "actor", "reconcile"}
    assert (str(parsed["reconcile"]["run"]), parsed["reconcile"]["on"]) == (f"/runs/{run}", "kubernetes")
    assert parsed["reconcile"]["on"] in POOLS


def test_keys_of_the_pods_open_the_hub_to_actors_by_their_pods_names(folder: Path) -> None:
    documents = write()
    hubs = []
    for config, pod, name in zip(configs(documents, folder), pods(documents), ("learner-pod", "actor-pod"), strict=True):
        unpack(documents, pod, folder / name)
        paths = {key: f"{folder}/{name}{getattr(config.hub, key)}" for key in ("key", "learner_key", "allowed_keys")}
        hubs.append(replace(config.hub, **paths))
    learner, actor = keys_of_learner(hubs[0]), keys_of_peer(hubs[1], POD_NAME)
    assert learner is not None and actor is not None
    sender = learner.allowed.sender(actor.key.owner.public)
    assert sender is not None and sender.may_be(POD_NAME)
    assert actor.learner_key.public == learner.key.owner.public
    # Commands that are run in the learner's container.
    assert keys_of_peer(hubs[0], "operator", "operator") is not None
    assert {path.name for path in (folder / "actor-pod/keys").iterdir()} == {"actor.key", "learner.pub"}


def test_learner_begins_goes_on_and_pauses_in_the_same_folder_by_the_same_words(folder: Path) -> None:
    documents = write("run.dir=runs/mine-{time}")
    run = configs(documents, folder)[0].run
    assert (run.dir, run.resume, run.grace_s) == ("/runs/mine", "auto", 285)
    assert pods(documents)[0]["terminationGracePeriodSeconds"] == 300


def test_learner_of_several_gpus_starts_one_process_for_each(folder: Path) -> None:
    documents = write("launch.learner_processes=4", "--learner", "nvidia.com/gpu=4")
    words = started(pods(documents)[0]["containers"][0], folder)
    # Without a timeout, torchrun kills a learner that pauses after 30 s.
    options = ["--standalone", "--nproc-per-node=4", "--shutdown-timeout=285"]
    assert words[:6] == ["torchrun", *options, "-m", "offbeat.deploy.cli.main"]
    assert config_of(["offbeat", *words[6:]], "learner").run.grace_s == 285
    assert "launch.learner_processes is 1" in str(refusal("--learner", "nvidia.com/gpu=4"))


def test_actor_has_a_gpu_for_each_part_of_its_model() -> None:
    two = "actor.engine_options.tensor_parallel_size=2"
    assert "tensor_parallel_size is 2" in str(refusal(two, "--actor", "nvidia.com/gpu=1"))
    resources = pods(write(two, "--actor", "nvidia.com/gpu=2"))[1]["containers"][0]["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "2"}


def test_containers_have_no_rights_and_write_to_volumes_only() -> None:
    learner, actor = pods(write(*RECONCILED, "--secret", "tokens"))
    for pod in (learner, actor):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert "emptyDir" in mounts["/tmp"] and mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert any("persistentVolumeClaim" in volume for volume in learner["volumes"])
    assert not any("persistentVolumeClaim" in volume for volume in actor["volumes"])


def test_probes_ask_where_the_services_answer_and_give_half_an_hour_to_start(folder: Path) -> None:
    documents = write()
    learner, actor = configs(documents, folder)
    for pod, bind in zip(pods(documents), (learner.metrics.bind, actor.metrics.actor_bind), strict=True):
        (container,) = pod["containers"]
        probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
        assert {f"0.0.0.0:{probe['httpGet']['port']}" for probe in probes.values()} == {bind}
        asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        assert asked == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
        assert probes["startup"]["failureThreshold"] * probes["startup"]["periodSeconds"] == 1800


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [(("actor.leave_within_s=90.5",), 90.5 + 10 + 15), (("actor.leave=return",), 10 + 15)],
    ids=["finish", "return"],
)
def test_actors_may_leave_as_long_as_their_settings_let_them(settings: tuple[str, ...], seconds: float) -> None:
    _, actor = pods(write("hub.dead_after_s=10", *settings))
    assert seconds <= actor["terminationGracePeriodSeconds"] < seconds + 1


def test_only_the_reconciler_sees_an_account_and_that_may_only_scale_the_actors() -> None:
    documents = write(*RECONCILED, "--namespace", "my-run")
    learner, actor = pods(documents)
    mounts = {container["name"]: {mount["name"] for mount in container["volumeMounts"]} for container in learner["containers"]}
    assert "token" in mounts["reconciler"] and "token" not in mounts["learner"]
    assert "serviceAccountName" not in actor
    account = {"kind": "ServiceAccount", "name": learner["serviceAccountName"], "namespace": "my-run"}
    assert documents["RoleBinding/reconciler"]["subjects"] == [account]
    (rule,) = documents["Role/reconciler"]["rules"]
    assert (rule["resources"], rule["resourceNames"]) == (["deployments/scale"], ["actor"])


def test_nobody_but_actors_reaches_the_learner_and_only_collectives_reach_actors() -> None:
    with_pull = write("weights.backend=pull")
    (rule,) = with_pull["NetworkPolicy/learner"]["spec"]["ingress"]
    labels = with_pull["Deployment/actor"]["spec"]["template"]["metadata"]["labels"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels}}]
    assert {port["port"] for port in rule["ports"]} == {5700, 5701}
    assert with_pull["NetworkPolicy/actor"]["spec"]["ingress"] == []
    by_gloo = write("weights.backend=gloo", "--monitoring", "prometheus")
    members, monitors = by_gloo["NetworkPolicy/actor"]["spec"]["ingress"]
    assert len(members["from"]) == 2 and "ports" not in members
    assert monitors["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "prometheus"}}}]


def test_node_of_the_learner_can_be_drained_but_is_not_consolidated() -> None:
    documents = write()
    assert not [name for name in documents if name.startswith("PodDisruptionBudget")]
    annotations = documents["Job/learner"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert "cluster-autoscaler.kubernetes.io/safe-to-evict" not in str(documents["Deployment/actor"])


def test_pods_request_what_the_sums_say_and_what_the_user_names_stays(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_600M))
    toml = SETTINGS.replace("owner/model", str(folder / "model"))
    learner, actor = pods(write("--learner", "nvidia.com/gpu=1", "--actor", "memory=32Gi", toml=toml))
    (requested,) = (container["resources"] for container in learner["containers"])
    # Two copies of the weights in bfloat16, and 4 GiB.
    weights = 2 * 2 * sizes_of(QWEN3_600M).num_parameters
    assert requested["requests"] == {"cpu": "1", "memory": f"{4 + math.ceil(weights / 2**30)}Gi", "nvidia.com/gpu": "1"}
    assert requested["limits"] == {"nvidia.com/gpu": "1"}
    assert actor["containers"][0]["resources"]["requests"] == {"cpu": "2", "memory": "32Gi"}
    (shared,) = (volume["emptyDir"] for volume in learner["volumes"] if volume["name"] == "shm")
    assert shared == {"medium": "Memory", "sizeLimit": requested["requests"]["memory"]}


def test_learner_requests_host_memory_for_what_is_offloaded_from_its_gpu(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_600M))
    toml = SETTINGS.replace("owner/model", str(folder / "model"))

    def requested_gib(*options: str) -> int:
        learner = pods(write("train.zero_stage=2", *options, toml=toml))[0]["containers"][0]
        return int(learner["resources"]["requests"]["memory"].removesuffix("Gi"))

    gpu = ("--learner", "nvidia.com/gpu=1")
    offloaded = "train.deepspeed.zero_optimization.offload_optimizer.device=cpu"
    # 6.7 GiB of optimizer, and 1.0 GiB of the inputs of layers.
    assert (requested_gib(*gpu), requested_gib(*gpu, offloaded)) == (7, 13)
    assert requested_gib(*gpu, "train.activation_checkpointing=offload") == 8
    assert requested_gib() == requested_gib(offloaded)


def test_pods_of_a_model_of_unknown_size_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    Path("run.toml").write_text(SETTINGS)
    write_manifests(Path("run.toml"), [], Path("out"), Cluster("image", "offbeat", PodOptions(), PodOptions()))
    assert "request no memory" in caplog.text and "--learner memory=" in caplog.text


def test_files_say_what_a_cluster_may_want_otherwise() -> None:
    write()
    assert "operator.key is for" in Path("out/keys.yaml").read_text() and "sealed-secrets" in Path("out/keys.yaml").read_text()
    assert "policyTypes Egress" in Path("out/network.yaml").read_text()


@pytest.mark.parametrize("kind", ["kubernetes", "compose"])
def test_missing_image_is_told_with_the_way_to_one(kind: str) -> None:
    Path("run.toml").write_text(SETTINGS)
    with pytest.raises(SettingError, match=r"--image.*docker build -t NAME"):
        CliRunner().invoke(make_app(), ["deploy", kind, "run.toml", "--out", "out"], catch_exceptions=False)


def test_policies_and_services_select_the_pods_they_are_for() -> None:
    documents = write()
    labels = {name: documents[name]["spec"]["template"]["metadata"]["labels"] for name in ("Job/learner", "Deployment/actor")}
    assert labels["Job/learner"] != labels["Deployment/actor"]
    assert documents["Service/learner"]["spec"]["selector"] == labels["Job/learner"]
    assert documents["Deployment/actor"]["spec"]["selector"] == {"matchLabels": labels["Deployment/actor"]}
    for name, of in (("learner", "Job/learner"), ("actor", "Deployment/actor")):
        assert documents[f"NetworkPolicy/{name}"]["spec"]["podSelector"] == {"matchLabels": labels[of]}


def test_pods_fields_are_passed_through_but_do_not_replace_ours() -> None:
    fields = {"nodeSelector": {"pool": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}
    for name, value in fields.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump({name: value}))
    words = ("cpu=2", "nodeSelector.yaml", "memory=32Gi", "tolerations.yaml")
    documents = write(*(argument for word in words for argument in ("--actor", word)))
    learner, actor = pods(documents)
    assert actor["containers"][0]["resources"]["limits"] == {"cpu": "2", "memory": "32Gi"}
    assert {name: actor[name] for name in fields} == fields
    assert not fields.keys() & learner.keys()
    kubernetes_validate.validate(documents["Deployment/actor"], RELEASES[-1], strict=True)
    Path("learner-pod.yaml").write_text("volumes: []\n")
    assert "volumes" in str(refusal("--learner", "learner-pod.yaml"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("- a\n", "no mapping"), ("a: [\n", "not valid YAML"), (None, "cannot be read")],
    ids=["list", "broken", "absent"],
)
def test_file_that_is_no_mapping_is_refused(text: str | None, problem: str) -> None:
    if text is not None:
        Path("pod.yaml").write_text(text)
    error = str(refusal("--actor", "pod.yaml"))
    assert problem in error
    assert ("--actor memory=32Gi" in error) == (text is None)


@pytest.mark.parametrize("quantity", ["memory=much", "=3", "cpu=1=2"])
def test_quantity_of_another_form_is_refused_with_an_example(quantity: str) -> None:
    assert "--actor memory=32Gi" in str(refusal("--actor", quantity))


def test_as_many_actors_are_there_as_the_run_wants_unless_something_else_scales_them() -> None:
    assert write()["Deployment/actor"]["spec"]["replicas"] == 3
    assert write("scale.actors=5")["Deployment/actor"]["spec"]["replicas"] == 5
    for options in (RECONCILED, ("--scaled-by", "keda:http://prometheus:9090")):
        assert "replicas" not in write(*options)["Deployment/actor"]["spec"]


def test_keda_copies_the_number_that_the_learner_wants() -> None:
    documents = write("--scaled-by", "keda:http://prometheus:9090", "--namespace", "my-run")
    spec = documents["ScaledObject/actor"]["spec"]
    assert spec["scaleTargetRef"]["name"] == documents["Deployment/actor"]["metadata"]["name"]
    (trigger,) = spec["triggers"]
    # As many replicas as the number is large.
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert spec["maxReplicaCount"] == Config().hub.max_actors
    assert 'offbeat_actors_wanted{namespace="my-run"}' in trigger["metadata"]["query"]


@pytest.mark.parametrize("scaler", ["keda", "keda:", "reconcile:http://prometheus:9090", "hpa"])
def test_scaler_of_another_form_is_refused_with_those_that_there_are(scaler: str) -> None:
    assert "Write --scaled-by reconcile, or --scaled-by keda:URL" in str(refusal("--scaled-by", scaler))


def test_keys_are_kept_when_the_files_are_written_again_and_a_folder_without_actors_is_refused() -> None:
    first = write()
    assert write()["Secret/actor-keys"] == first["Secret/actor-keys"]
    Path("out/keys/actor.key").unlink()
    assert "there is no actor.key" in str(refusal())
    shutil.rmtree("out/keys")
    assert write()["Secret/actor-keys"] != first["Secret/actor-keys"]


def test_long_texts_are_written_as_people_read_them() -> None:
    write()
    assert "    # a comment of mine\n    [model]\n" in Path("out/config.yaml").read_text()
