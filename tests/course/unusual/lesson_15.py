"""Right but unusual solutions of lesson 15."""

import itertools

import torch

from tests.course.unusual import right


@right("low_rank")
def values_on_both_sides(change, rank):
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    roots = s[:rank].sqrt()
    return [torch.diag(roots) @ v[:rank], u[:, :rank] @ torch.diag(roots)]


@right("low_rank")
def by_projection(change, rank):
    """The whole SVD, from which the directions of the outputs are taken."""
    u = torch.linalg.svd(change).U[:, :rank]
    return u.T @ change, u


@right("low_rank")
def by_eigenvectors(change, rank):
    """Of the moments of the inputs, whose largest values come last."""
    _, vectors = torch.linalg.eigh(change.T.double() @ change.double())
    down = vectors[:, -rank:].T.to(change.dtype)
    return down, change @ down.T


@right("low_rank")
def by_the_old_name(change, rank):
    u, s, v = torch.svd(change)
    up = (u * s)[:, :rank]
    return v.T[:rank], up


@right("numbers_read")
def with_a_loop(out, inputs, rank, tokens):
    merged = by_token = grouped = 0
    for name, count in tokens.items():
        if count == 0:
            continue
        merged += out * inputs
        if name is None:
            continue
        by_token += count * rank * out + count * rank * inputs
        grouped += rank * out + rank * inputs
    if any(tokens.values()):
        by_token += out * inputs
        grouped += out * inputs
    return [merged, by_token, grouped]


@right("add_low_rank")
def with_masks(out, x, slots, down, up):
    result = out.clone()
    for slot in sorted(set(slots.tolist()) - {0}):
        mine = slots == slot
        result[mine] = result[mine] + torch.nn.functional.linear(
            torch.nn.functional.linear(x[mine], down[slot]), up[slot]
        )
    return result


@right("add_low_rank")
def sorted_and_split(out, x, slots, down, up):
    order = torch.argsort(slots)
    values, counts = torch.unique_consecutive(slots[order], return_counts=True)
    for slot, tokens in zip(values.tolist(), order.split(counts.tolist()), strict=True):
        if slot > 0:
            added = torch.einsum("ti,ri,or->to", x[tokens].float(), down[slot].float(), up[slot].float())
            added = added if out.dtype != torch.float64 else x[tokens] @ down[slot].T @ up[slot].T
            out.index_add_(0, tokens, added.to(out.dtype))
    return out


@right("add_low_rank")
def transposed(out, x, slots, down, up):
    """Every slot is looked at, and those that have tokens are multiplied."""
    for slot in range(1, len(down)):
        if (mine := slots == slot).any():
            out.T[:, mine] += up[slot] @ (down[slot] @ x[mine].T)
    return out


@right("add_low_rank")
def by_counts(out, x, slots, down, up):
    for slot, count in enumerate(slots.bincount(minlength=len(down)).tolist()):
        if slot and count:
            tokens = torch.where(slots == slot)[0]
            out.index_copy_(0, tokens, out[tokens].addmm(x[tokens].mm(down[slot].t()), up[slot].t()))
    return out


@right("MyAdapters")
class WithACounter:
    def __init__(self):
        self.numbers = itertools.count(1)
        self.known = {None: 0}

    def load(self, name):
        self.known[name] = next(self.numbers)

    def unload(self, name):
        self.known.pop(name)

    def cache_key(self, salt, name):
        return (salt, self.known[name])


@right("MyAdapters")
class WithNames:
    """The name, and how often it was loaded."""

    def __init__(self):
        self.times, self.here = {}, set()

    def load(self, name):
        self.times[name] = self.times.get(name, 0) + 1
        self.here.add(name)

    def unload(self, name):
        self.here.remove(name)

    def cache_key(self, salt, name):
        if name is None:
            return (salt,)
        if name not in self.here:
            raise KeyError(name)
        return (salt, name, self.times[name])


@right("MyAdapters")
class WithUnloads:
    """The name, and how many adapters had been unloaded when it was loaded: again under its name, one more has."""

    def __init__(self):
        self.unloads, self.of = 0, {}

    def load(self, name):
        self.of[name] = (name, self.unloads)

    def unload(self, name):
        del self.of[name]
        self.unloads += 1

    def cache_key(self, salt, name):
        return (salt,) if name is None else (salt, *self.of[name])
