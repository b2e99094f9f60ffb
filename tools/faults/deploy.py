"""Faults in routing and replicas."""

from . import Fault

ROUTER = "minillm/deploy/router.py"
TESTS = "tests/deploy/test_router.py"
PLACES = "minillm/deploy/places.py"
SCALING = "minillm/deploy/scaling.py"
FAULTS = [
    Fault(
        "the router ignores the load",
        ROUTER,
        "each.prompt - each.cached + LOAD * each.load, each.load)",
        "each.prompt - each.cached, each.load)",
        TESTS,
    ),
    Fault(
        "the router forgets what ended requests leave in the cache",
        ROUTER,
        "replica.drop(routed)\n            replica.use(keys)",
        "replica.drop(routed)",
        TESTS,
    ),
    Fault(
        "suffixes outlive their prefixes in the router's idea of a cache",
        ROUTER,
        "for key in reversed(keys):",
        "for key in keys:",
        TESTS,
    ),
    Fault(
        "the router counts cached blocks behind one that is missing",
        ROUTER,
        "                break\n            count += 1",
        "                continue\n            count += 1",
        TESTS,
    ),
    Fault(
        "requests of other routers are no load",
        ROUTER,
        "load = replica.load + others * self._answer",
        "load = replica.load",
        TESTS,
    ),
    Fault(
        "a replica's load never falls",
        ROUTER,
        "self.load = self.load - routed.work if self.requests else 0.0",
        "self.load = self.load if self.requests else 0.0",
        TESTS,
    ),
    Fault(
        "simulated users share their prefixes",
        "minillm/deploy/simulation.py",
        "Request(name, talk.said, params, limit, options=talk.options)",
        "Request(name, talk.said, params, limit)",
        "tests/deploy/test_simulation.py",
    ),
    Fault(
        "a place is kept for ever",
        PLACES,
        "replica.spare[0][0] <= now or name not in self._listed",
        "name not in self._listed",
        "tests/deploy/test_places.py",
    ),
    Fault(
        "a replica that is about to end keeps spare places",
        PLACES,
        "replica.spare[0][0] <= now or name not in self._listed",
        "replica.spare[0][0] <= now",
        "tests/deploy/test_places.py",
    ),
    Fault(
        "a place on another replica is counted",
        PLACES,
        "if taken_on == name:",
        "if taken_on:",
        "tests/deploy/test_places.py",
    ),
    Fault(
        "places outlive the connection to their replica",
        "minillm/deploy/replicas.py",
        "self._places.listed(self._listed.keys() & self._replicas.keys())",
        "self._places.listed(self._listed.keys())",
        "tests/deploy/test_replicas.py",
    ),
    Fault(
        "what ended replicas have counted is lost",
        "minillm/deploy/reports.py",
        "before = summed(before, known.pop(name))",
        "known.pop(name)",
        "tests/deploy/test_reports.py",
    ),
    Fault(
        "the requests of other workers are no load",
        "minillm/deploy/replicas.py",
        "running[name] += count",
        "pass",
        "tests/deploy/test_replicas.py",
    ),
    Fault(
        "a worker that has ended keeps its requests",
        "minillm/deploy/replicas.py",
        "if pair[0] != worker}",
        "if worker is not None}",
        "tests/deploy/test_replicas.py",
    ),
    Fault(
        "replicas that have not reported yet count as idle",
        SCALING,
        "if not loads or len(loads) < context.current_num_replicas:",
        "if not loads:",
        "tests/deploy/test_scaling.py",
    ),
    Fault(
        "answers that wait need no replica",
        SCALING,
        "return self.prompts + ANSWER * self.waiting",
        "return self.prompts",
        "tests/deploy/test_scaling.py",
    ),
    Fault(
        "replicas end although what runs would not fit",
        SCALING,
        "for each in loads) / ROOM), 1))",
        "for each in loads)), 1))",
        "tests/deploy/test_scaling.py",
    ),
    Fault(
        "a model's own options give way to those of all",
        "minillm/deploy/settings.py",
        '{**common["options"], **mine["options"]}',
        '{**mine["options"], **common["options"]}',
        "tests/deploy/test_settings.py",
    ),
    Fault(
        "a lost rank ends the streams of its replica",
        "minillm/server/engine_side/line.py",
        'kind = "lost" if isinstance(delta, RankFailed) else "failed"',
        'kind = "failed"',
        "tests/deploy/test_lost_ranks.py -k changes_no_token",
    ),
    Fault(
        "a replica that has lost a rank is used again",
        "minillm/deploy/replicas.py",
        "return name in self._listed and name not in self._broken",
        "return name in self._listed",
        "tests/deploy/test_lost_ranks.py -k changes_no_token",
    ),
    Fault(
        "a replica has one GPU, however many ranks its engine has",
        "minillm/deploy/serving.py",
        "float(ranks(model))",
        "1.0",
        "tests/deploy/test_on_ray.py -k two_gpus",
    ),
    Fault(
        "machines that have too few GPUs for a replica count together",
        "minillm/deploy/serving.py",
        "elif largest > max(has):",
        "elif largest > sum(has):",
        "tests/deploy/test_settings.py -k has_them_all",
    ),
]
