"""Wrong solutions of lesson 15: keys of adapters that come and go."""

import uuid

from tests.course.mutants import wrong

SHARE = "requests of one load share a key"
MODEL = "the model itself has another key than any adapter"
TWO = "two adapters have different keys"
SALT = "another salt is another key, wherever the load's number begins"
PROCESS = "the same loads have the same keys in every process"
AGAIN = "an adapter that is loaded again under its name has another key"
NEVER = "no number is ever used again"
UNKNOWN = "a name that is not loaded raises KeyError"
TABLES = "two tables know nothing of each other"


class Right:
    def __init__(self):
        self.loads, self.load_of = 0, {}

    def load(self, name):
        self.loads += 1
        self.load_of[name] = self.loads

    def unload(self, name):
        del self.load_of[name]

    def cache_key(self, salt, name):
        return salt, 0 if name is None else self.load_of[name]


@wrong("MyAdapters", fails=SHARE)
class CountsOnUnloading(Right):
    """Every change of the table makes all keys new."""

    def __init__(self):
        super().__init__()
        self.changes = 0

    def unload(self, name):
        super().unload(name)
        self.changes += 1

    def cache_key(self, salt, name):
        return (*super().cache_key(salt, name), self.changes)


@wrong("MyAdapters", fails=SHARE)
class PlaceInTheTable(Right):
    """The number is the place among those loaded, which moves when one before it goes, and the count of all loads."""

    def cache_key(self, salt, name):
        if name is None:
            return salt, 0
        self.load_of[name]
        return salt, 1 + list(self.load_of).index(name), self.loads


@wrong("MyAdapters", fails=MODEL)
class BeginsAtZero(Right):
    def __init__(self):
        super().__init__()
        self.loads = -1


@wrong("MyAdapters", fails=MODEL)
class ModelUnderAName(Right):
    """None is looked up as "base", and an adapter may have that name."""

    def __init__(self):
        super().__init__()
        self.load_of["base"] = 0

    def cache_key(self, salt, name):
        return salt, self.load_of[name or "base"]


@wrong("MyAdapters", fails=MODEL)
class ModelAmongTheNames(Right):
    """The name, and how often it was loaded again."""

    def __init__(self):
        super().__init__()
        self.times = {}

    def load(self, name):
        self.load_of[name] = self.times[name] = self.times.get(name, -1) + 1

    def cache_key(self, salt, name):
        return (salt, "model", 0) if name is None else (salt, name, self.load_of[name])


@wrong("MyAdapters", fails=TWO)
class AFewNumbers(Right):
    def cache_key(self, salt, name):
        return salt, 0 if name is None else 1 + self.load_of[name] % 11


@wrong("MyAdapters", fails=TWO)
class BeginningOfTheName(Right):
    """With the number of loads under it."""

    def __init__(self):
        super().__init__()
        self.times = {}

    def load(self, name):
        self.load_of[name] = self.times[name] = self.times.get(name, 0) + 1

    def cache_key(self, salt, name):
        return (salt,) if name is None else (salt, name[:9], self.load_of[name])


@wrong("MyAdapters", fails=SALT)
class Joined(Right):
    def cache_key(self, salt, name):
        return (f"{salt}{super().cache_key(salt, name)[1]}",)


@wrong("MyAdapters", fails=SALT)
class WithoutSalt(Right):
    def cache_key(self, salt, name):
        return (super().cache_key(salt, name)[1],)


@wrong("MyAdapters", fails=SALT)
class HashOfThisProcess(Right):
    def cache_key(self, salt, name):
        return (hash(super().cache_key(salt, name)),)


@wrong("MyAdapters", fails=AGAIN)
class NameAlone(Right):
    def cache_key(self, salt, name):
        if name is None:
            return salt, 0
        self.load_of[name]
        return salt, 1, name


@wrong("MyAdapters", fails=AGAIN)
class RemembersTheNumberOfAName(Right):
    def __init__(self):
        super().__init__()
        self.once = {}

    def load(self, name):
        super().load(name)
        self.load_of[name] = self.once.setdefault(name, self.load_of[name])


@wrong("MyAdapters", fails=NEVER)
class LowestFreeNumber(Right):
    def load(self, name):
        self.load_of[name] = min({*range(1, 99)} - {*self.load_of.values()})


@wrong("MyAdapters", fails=NEVER)
class HowManyAreLoaded(Right):
    def load(self, name):
        self.load_of[name] = len(self.load_of) + 1


@wrong("MyAdapters", fails=NEVER)
class TheHighestThatIsLeft(Right):
    def unload(self, name):
        super().unload(name)
        self.loads = max(self.load_of.values(), default=0)


@wrong("MyAdapters", fails=NEVER)
class BeginsAgainWhenEmpty(Right):
    def unload(self, name):
        super().unload(name)
        if not self.load_of:
            self.loads = 0


@wrong("MyAdapters", fails=NEVER)
class OneMoreThanTheHighest(Right):
    def load(self, name):
        self.load_of[name] = max(self.load_of.values(), default=0) + 1


@wrong("MyAdapters", fails=NEVER)
class TakesTheNewestBack(Right):
    def unload(self, name):
        if self.load_of.pop(name) == self.loads:
            self.loads -= 1


@wrong("MyAdapters", fails=NEVER)
class RemembersTheLastThatWasUnloaded(Right):
    def __init__(self):
        super().__init__()
        self.used = 0

    def load(self, name):
        self.load_of[name] = max([self.used, *self.load_of.values()]) + 1

    def unload(self, name):
        self.used = self.load_of.pop(name)


@wrong("MyAdapters", fails=NEVER)
class NameAndHowManyAreLoaded(Right):
    """Unloaded and loaded again at once, it has the same key."""

    def load(self, name):
        self.load_of[name] = len(self.load_of) + 1

    def cache_key(self, salt, name):
        return (salt,) if name is None else (salt, name, self.load_of[name])


@wrong("MyAdapters", fails=NEVER)
class ForgetsNamesThatAreGone(Right):
    """The name, and the number of loads under it since another one was unloaded."""

    def __init__(self):
        super().__init__()
        self.last, self.times = None, {}

    def load(self, name):
        self.times[name] = self.load_of[name] = self.times.get(name, 0) + 1

    def unload(self, name):
        del self.load_of[name]
        if self.last is not None and self.last != name and self.last not in self.load_of:
            self.times.pop(self.last)
        self.last = name

    def cache_key(self, salt, name):
        return (salt,) if name is None else (salt, name, self.load_of[name])


@wrong("MyAdapters", fails=TWO)
class NameAndNumberInOne(Right):
    def cache_key(self, salt, name):
        return (salt,) if name is None else (salt, f"{name}{self.load_of[name]}")


@wrong("MyAdapters", fails=TWO)
class NameAndNumberFromZeroInOne(Right):
    def cache_key(self, salt, name):
        return (salt,) if name is None else (salt, f"{name}{self.load_of[name] - 1}")


@wrong("MyAdapters", fails=PROCESS)
class HashOfNameAndNumber(Right):
    def cache_key(self, salt, name):
        return salt, 0 if name is None else hash((name, self.load_of[name]))


@wrong("MyAdapters", fails=PROCESS)
class UniqueIdentifiers(Right):
    def load(self, name):
        self.load_of[name] = uuid.uuid4().hex


@wrong("MyAdapters", fails=NEVER)
class WrapsAround(Right):
    """A number of five bits."""

    def load(self, name):
        super().load(name)
        self.load_of[name] = 1 + self.load_of[name] % 32


@wrong("MyAdapters", fails=UNKNOWN)
class ModelInItsPlace(Right):
    def cache_key(self, salt, name):
        return salt, self.load_of.get(name, 0)


@wrong("MyAdapters", fails=UNKNOWN)
class NeverForgets(Right):
    def unload(self, name):
        pass


@wrong("MyAdapters", fails=TABLES)
class InTheClass(Right):
    load_of: dict = {}

    def __init__(self):
        self.loads = 0
