"""Find a policy by its name: one of the router's, or a function of the user's."""

from importlib import import_module

from minillm.errors import ConfigError
from minillm.values import shown

from .router import Policy, by_load, by_prefix_and_load

POLICIES: dict[str, Policy] = {"prefix": by_prefix_and_load, "load": by_load}


def find_policy(name: str) -> Policy:
    """Return a policy: "prefix", "load", or a function as MODULE:NAME. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name]
    module, _, function = name.partition(":")
    ways = f"{', '.join(POLICIES)}, or a function as MODULE:NAME"
    if not module or not function:
        raise ConfigError(f"router must be {ways}, not {shown(name)}")
    try:
        imported = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"router {shown(name)} cannot be imported ({error}): name {ways}") from None
    if not callable(imported):
        raise ConfigError(f"router {shown(name)} is no function: name {ways}")
    policy: Policy = imported
    return policy
