"""A traffic trace: arrival times, lengths and shared prompt prefixes of requests.

Arrivals are a Poisson process whose rate switches between calm and busy. Lengths are log-normal, as in production
traffic. Two thirds of the requests begin with one of a few shared prefixes, some of which are far more popular.
"""

import json
import random
from pathlib import Path

SEED = 2026
REQUESTS = 400
RATES = {"calm": 4.0, "busy": 24.0}  # requests per second
STAY = {"calm": 6.0, "busy": 2.0}  # mean seconds before the rate switches
PREFIXES = (48, 96, 128, 192, 256, 320, 384, 512)  # tokens
MAX_INPUT, MAX_OUTPUT = 1024, 512


def lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return max(low, min(high, round(median * 2.718281828 ** rng.gauss(0, sigma))))


def conversation(requests: int = REQUESTS, seed: int = SEED) -> list[dict]:
    """Rows of {arrival (seconds), input_tokens, output_tokens, prefix_id or None, prefix_tokens}.

    input_tokens counts the whole prompt, including its shared prefix.
    """
    rng = random.Random(f"{seed}/trace")
    clock, state, switch = 0.0, "calm", rng.expovariate(1 / STAY["calm"])
    popularity = [1 / (rank + 1) for rank in range(len(PREFIXES))]
    order = rng.sample(range(len(PREFIXES)), len(PREFIXES))
    rows = []
    while len(rows) < requests:
        gap = rng.expovariate(RATES[state])
        if clock + gap > switch:
            clock, state = switch, "busy" if state == "calm" else "calm"
            switch = clock + rng.expovariate(1 / STAY[state])
            continue
        clock += gap
        own = lognormal(rng, 60, 0.9, 4, 512)
        prefix = rng.choices(order, popularity)[0] if rng.random() < 2 / 3 else None
        shared = 0 if prefix is None else PREFIXES[prefix]
        rows.append(
            {
                "arrival": round(clock, 4),
                "input_tokens": min(MAX_INPUT, shared + own),
                "output_tokens": lognormal(rng, 80, 0.8, 4, MAX_OUTPUT),
                "prefix_id": prefix,
                "prefix_tokens": shared,
            }
        )
    return rows


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in conversation()), encoding="utf-8")
