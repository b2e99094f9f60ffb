"""What each model has of its own, on the command line and in a config file."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from minillm import cli
from minillm.config import EngineConfig
from minillm.deploy import application
from minillm.deploy.serving import ReplicatedModel, _check_room, check, ranks
from minillm.deploy.settings import model_of, models_of, settings_of
from minillm.errors import ConfigError, MissingPackage
from minillm.server.config import ServerConfig

COMMON = {"replicas": 1, "cpus": 1.0, "gpus": None, "profile": None, "options": {"max_num_seqs": 8, "device": "cpu"}}


def test_a_model_has_its_own_settings_and_those_of_all():
    texts = ["a:replicas=2,gpus=0.5,max-num-seqs=16", "a:--dtype=float32,enforce_eager=true", "b:max_replicas=3"]
    one, two = models_of({"a": "x", "b": None}, COMMON, texts)
    options = {"max_num_seqs": 16, "device": "cpu", "dtype": "float32", "enforce_eager": True}
    assert one == ReplicatedModel("a", "x", 2, options, 1.0, 0.5)
    assert two == ReplicatedModel("b", None, 1, COMMON["options"], max_replicas=3)


def test_names_may_have_colons_and_values_equals_signs():
    assert settings_of(["org/m:tag:plan=a=b:c"]) == {"org/m:tag": {"options": {"plan": "a=b:c"}}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "is not NAME:SETTING=VALUE"),
        ("a:replicas", "is not NAME:SETTING=VALUE"),
        (":replicas=1", "is not NAME:SETTING=VALUE"),
        ("a:name=b", "is not NAME:SETTING=VALUE"),
        ("a:colour=red", "a setting is cpus, .*, or an option of the engine"),
        ("a:replicas=two", "replicas must be a number, not 'two'"),
        ("a:max_num_seqs=0", "max_num_seqs"),
        ("c:replicas=1", "no model is called c: there are a"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        models_of({"a": "x"}, COMMON, [text])


def test_every_option_of_the_engine_can_be_set():
    for name in EngineConfig.__dataclass_fields__:
        value = getattr(EngineConfig(), name)
        value = {} if name == "adapters" else value  # as it is given
        assert settings_of([f"a:{name}={value}"])["a"]["options"] == {name: value}


def test_what_ray_has_no_room_for_is_refused_in_a_cluster_of_its_own_and_named_in_another(caplog):
    four = SimpleNamespace(replicas=4, cpus=1.0, gpus=1.0)
    _check_room([four], [{"CPU": 4.0, "GPU": 4.0}], True)
    with pytest.raises(ConfigError, match=r"need 8 GPUs, and Ray's cluster has 4: .* \(--replica-gpus\)"):
        _check_room([four, four], [{"CPU": 8.0, "GPU": 4.0}], True)
    assert not caplog.records
    _check_room([four], [{"CPU": 1.0}, {"CPU": 1.0}], False)
    assert [each.getMessage() for each in caplog.records] == [
        "the replicas need 4 CPUs, and Ray's cluster has 2: some of them wait until it has more",
        "the replicas need 4 GPUs, and Ray's cluster has 0: some of them wait until it has more",
    ]


def test_a_replica_of_several_gpus_needs_a_machine_that_has_them_all(caplog):
    pair = SimpleNamespace(replicas=2, cpus=1.0, gpus=2.0)
    _check_room([pair], [{"CPU": 1.0, "GPU": 2.0}] * 2, False)
    assert not caplog.records
    _check_room([pair], [{"CPU": 1.0, "GPU": 1.0}] * 4, False)
    assert [each.getMessage() for each in caplog.records] == [
        "a replica needs 2 GPUs of one machine, and the largest has 1: some of them wait until it has more"
    ]


def test_each_rank_of_a_replica_has_a_gpu_of_its_own():
    (model,) = models_of({"a": "x"}, COMMON, ["a:tensor_parallel_size=2"])
    assert model.options["tensor_parallel_size"] == 2 == ranks(model)
    for gpus in (0.5, 1.0, 3.0):
        with pytest.raises(ConfigError, match=f"gpus must be 2, one for each rank of a, or 0, not {gpus:g}"):
            check([replace(model, gpus=gpus)], ServerConfig(), "prefix")
    assert ranks(replace(model, options={})) == 1
    (both,) = models_of({"a": "x"}, COMMON, ["a:tensor_parallel_size=2,pipeline_parallel_size=2"])
    assert ranks(both) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--join"], "name the Ray cluster in which the models are served: ray_address"),
        (["tiny-gemma", "--join", "--ray-address", "x:1"], "--join takes the models that are served"),
        (["--join", "--replicas", "2", "--ray-address", "x:1"], "--join takes the models that are served"),
        (["--join", "--ray-address", "x:1", "--max-num-seqs", "2"], "max_num_seqs: the engines' options belong to"),
        (["--join", "--ray-address", "x:1", "--router", "x"], "router must be prefix, load"),
        (["--ray-address", "x:1"], "--set and --ray-address are for models that have replicas: add --replicas"),
    ],
)
def test_what_does_not_go_together_on_the_command_line_is_refused(options, message):
    done = CliRunner().invoke(cli.app, ["serve", "--port", "0", *options])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "x"}, "a model needs a name"),
        ({"name": "a", "replica": 2}, "a model has no replica: name some of name, model, replicas"),
        ({"name": "a", "options": {"rows": 2}}, "the engine has no option rows"),
    ],
)
def test_a_config_file_is_checked(given, message):
    with pytest.raises(ConfigError, match=message):
        model_of(given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"replicas": 0}, "replicas must be"),
        ({"replicas": 2, "max_replicas": 1}, r"max_replicas must be at least replicas \(2\), not 1"),
        ({"waiting_tokens": 0}, "waiting_tokens must be above 0"),
    ],
)
def test_numbers_of_replicas_are_checked(more, message):
    with pytest.raises(ConfigError, match=message):
        check([ReplicatedModel("a", "x", **more)], ServerConfig(), "prefix")


def test_replicas_have_the_same_adapters_all_the_time():
    model = ReplicatedModel("a", "x", 2, {"adapters": ["pirate=here"]})
    with pytest.raises(ConfigError, match=r"adapter_folder is for one engine: .* --adapter NAME=DIR"):
        check([model], ServerConfig(adapter_folder="."), "prefix")
    for other in (ReplicatedModel("pirate", "y"), replace(model, name="b")):
        with pytest.raises(ConfigError, match="adapter 'pirate' has the name of a model or another adapter"):
            check([model, other], ServerConfig(), "prefix")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "x"}, "unknown argument model: name some of adapter_folder"),
        ({"models": "a=x,a=y"}, "each model needs a name of its own, not a, a"),
        ({"models": "data/x,b=y"}, None),
        ({"models": "a=x", "replicas": "none"}, "replicas must be a number"),
        ({"models": [{"name": "a"}], "router": "random"}, "router must be prefix, load"),
        ({"models": [{"name": "a"}], "max_queued": -1}, "max_queued"),
    ],
)
def test_the_arguments_of_the_application_are_checked(arguments, message, monkeypatch):
    import minillm.deploy.serving as serving

    find_spec = serving.importlib.util.find_spec
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))
    with pytest.raises(ConfigError if message else MissingPackage, match=message or "replicas need ray"):
        application(arguments)
