"""Measure routing over replicas, in simulated time: hit rate, balance, and time to the first token, by policy.

    python tools/routing.py --record routing

Conversations run on four simulated replicas (`minillm.deploy.simulation`) under each policy, and on one replica of
their joint size, whose hit rate is the best possible. Nothing here depends on the machine. Loads differ in how many
conversations begin in a second, in the number of system prompts and users, and in the size of the cache.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minillm.bench import records  # noqa: E402
from minillm.deploy.router import Policy, ReplicaState, by_load, by_prefix_and_load  # noqa: E402
from minillm.deploy.simulation import Simulated, Size, conversations, run  # noqa: E402

REPLICAS = 4
SEEDS = 3
LOADS = {
    "many conversations": {"rate": 400, "prompts": 8, "salts": 1, "blocks": 3000},
    "little memory": {"rate": 400, "prompts": 8, "salts": 1, "blocks": 1000},
    "one hot prompt": {"rate": 400, "prompts": 2, "salts": 1, "blocks": 3000},
    "many users": {"rate": 400, "prompts": 8, "salts": 40, "blocks": 3000},
    "idle": {"rate": 40, "prompts": 8, "salts": 1, "blocks": 3000},
}


def by_prefix(candidates: Sequence[ReplicaState]) -> list[ReplicaState]:
    """Prefer the longest cached prefix, whatever the load."""
    return sorted(candidates, key=lambda each: (-each.cached, each.load))


def at_random(candidates: Sequence[ReplicaState]) -> list[ReplicaState]:
    return RANDOM.sample(list(candidates), len(candidates))


RANDOM = random.Random(0)
POLICIES: dict[str, tuple[Policy, int, bool]] = {  # policy, HTTP workers, whether they tell each other
    "prefix and load": (by_prefix_and_load, 1, True),
    "prefix and load, 4 workers": (by_prefix_and_load, 4, True),
    "prefix and load, 4 workers apart": (by_prefix_and_load, 4, False),
    "prefix alone": (by_prefix, 1, True),
    "load alone": (by_load, 1, True),
    "random": (at_random, 1, True),
}


def row(load: str, seed: int, policy: str, found: Simulated, best: Simulated) -> dict:
    times = sorted(found.first_tokens)
    return {
        "load": load,
        "seed": seed,
        "policy": policy,
        "requests": len(times),
        "hit_rate": found.hit_rate,
        "of_best": found.hit_rate / best.hit_rate,
        "imbalance": found.imbalance,
        "held": statistics.mean(found.held),
        "first_token_p50": times[len(times) // 2],
        "first_token_p99": times[len(times) * 99 // 100],
    }


def measure(count: int, seeds: int) -> list[dict]:
    rows = []
    for load, facts in LOADS.items():
        for seed in range(seeds):
            users = {name: facts[name] for name in ("prompts", "salts")}
            talks = list(conversations(count, facts["rate"], seed=seed, **users))
            size = Size(facts["blocks"])
            best = run(talks, 1, size.times(REPLICAS))
            rows.append(row(load, seed, "one large replica", best, best))
            for name, (policy, workers, told) in POLICIES.items():
                RANDOM.seed(seed)
                found = run(talks, REPLICAS, size, policy, workers=workers, told=told)
                rows.append(row(load, seed, name, found, best))
                print(show(rows[-1]), flush=True)
    return rows


def show(row: dict) -> str:
    return (
        f"{row['load']:20s} {row['seed']} {row['policy']:34s} hits {row['of_best']:.3f} of the best  "
        f"max/mean load {row['imbalance']:.2f}  first token {1e3 * row['first_token_p50']:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--record", metavar="NAME", help="write data/results/<device>/NAME.json")
    options = parser.parse_args()
    begun = records.begin(options.record)
    rows = measure(options.conversations, options.seeds)
    records.publish(records.record(rows, begun, replicas=REPLICAS), options.record)


if __name__ == "__main__":
    main()
