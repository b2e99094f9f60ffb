"""Decide which adapter each slot of the device holds.

A slot has room for one adapter. Those of running requests stay; of the others, the one that was used the longest time
ago makes room. So a request may have to wait for a slot, as it waits for blocks.
"""

from collections import Counter, OrderedDict


class SlotLedger:
    """Gives slots 1 to `slots` to adapters, which are known by the numbers of their loads. Load 0 is no adapter."""

    def __init__(self, slots: int):
        self.free = list(range(slots, 0, -1))
        self.held: OrderedDict[int, int] = OrderedDict()  # load -> slot, least recently used first
        self.users: Counter[int] = Counter()  # running requests of each load

    def has_slot_for(self, load: int) -> bool:
        """Return whether a request with this adapter could run now."""
        return load == 0 or load in self.held or bool(self.free) or any(not self.users[each] for each in self.held)

    def take(self, load: int) -> int:
        """Return the slot of a request that begins to run, which `has_slot_for` must allow; 0 if it has no adapter."""
        if load == 0:
            return 0
        if load not in self.held:
            if not self.free:
                idle = next(each for each in self.held if not self.users[each])
                self.free.append(self.held.pop(idle))
            self.held[load] = self.free.pop()
        self.held.move_to_end(load)
        self.users[load] += 1
        return self.held[load]

    def give(self, load: int) -> None:
        """A request has left its row. Its adapter stays in its slot until another one needs that."""
        if load:
            self.users[load] -= 1
            self.held.move_to_end(load)
