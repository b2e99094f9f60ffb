"""What each model has of its own, on the command line and in a config file."""

import pytest

from minillm.config import EngineConfig
from minillm.deploy import application
from minillm.deploy.serving import ReplicatedModel, check
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
        assert settings_of([f"a:{name}={value}"])["a"]["options"] == {name: value}


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "x"}, "unknown argument model: name some of allowed_hosts"),
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
