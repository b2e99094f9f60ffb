"""Policies for tests."""


def by_parity(candidates):
    """Prompts of odd lengths go to one end of the list of replicas, others to the other end."""
    return sorted(candidates, key=lambda each: each.replica, reverse=bool(candidates[0].prompt % 2))
