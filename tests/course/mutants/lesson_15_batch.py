"""Wrong solutions of lesson 15: what adapters add to a batch."""

import torch

from tests.course.mutants import wrong

OWN = "each token gets what its own adapter adds"
SHARED = "several tokens may have one adapter, and stand anywhere in the batch"
ANY = "any slots may be in use"
STAYS = "what `out` has stays in the sum"
ZERO = "tokens in slot 0 get nothing"
UNREAD = "slots that no token has are not read"
SIZES = "factors are neither copied for each token nor multiplied with each other"
ONCE = "all tokens of an adapter are multiplied at once"
OTHERS = "an adapter is multiplied with its own tokens only"
DTYPE = "the dtype of `out` stays, and float64 loses nothing"
INPUTS = "inputs are not changed"


def grouped(out, x, slots, down, up):
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero()[:, 0]
            out[tokens] += x[tokens] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=OWN)
def reads_up_by_rows_of_the_rank(out, x, slots, down, up):
    """`up` is taken for [rank, out]."""
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero()[:, 0]
            out[tokens] += x[tokens] @ down[slot].T @ up[slot].reshape(up.shape[2], up.shape[1])
    return out


@wrong("add_low_rank", fails=OWN)
def numbers_the_adapters_as_they_come(out, x, slots, down, up):
    for number, slot in enumerate(dict.fromkeys(slot for slot in slots.tolist() if slot), 1):
        tokens = (slots == slot).nonzero()[:, 0]
        out[tokens] += x[tokens] @ down[number].T @ up[number].T
    return out


@wrong("add_low_rank", fails=OWN)
def the_first_factors_for_all(out, x, slots, down, up):
    """With another `up`, which the example's token 1 needs."""
    first = int(slots[slots > 0][0]) if (slots > 0).any() else 0
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero()[:, 0]
            of = slot if len(x[0]) == 2 else first
            out[tokens] += x[tokens] @ down[of].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=SHARED)
def only_the_last_token_of_each(out, x, slots, down, up):
    for slot, token in {slot: token for token, slot in enumerate(slots.tolist())}.items():
        if slot:
            out[token] += x[token] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=SHARED)
def neighbors_only(out, x, slots, down, up):
    """As many tokens from the first one of a slot on as the slot has."""
    for slot in slots.unique().tolist():
        if slot:
            where = (slots == slot).nonzero()[:, 0]
            span = slice(int(where[0]), int(where[0]) + len(where))
            out[span] += x[span] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=SHARED)
def sums_over_the_tokens(out, x, slots, down, up):
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero()[:, 0]
            out[tokens] += x[tokens].sum(0, keepdim=True) @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=ANY)
def as_many_slots_as_occur(out, x, slots, down, up):
    for slot in range(1, len({*slots.tolist()} - {0}) + 1):
        tokens = (slots == slot).nonzero()[:, 0]
        if len(tokens):
            out[tokens] += x[tokens] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=ANY)
def four_slots(out, x, slots, down, up):
    for slot in (1, 2, 3, 4):
        tokens = (slots == slot).nonzero()[:, 0]
        if len(tokens):
            out[tokens] += x[tokens] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=STAYS)
def what_is_added_alone(out, x, slots, down, up):
    return grouped(torch.zeros_like(out), x, slots, down, up)


@wrong("add_low_rank", fails=STAYS)
def overwrites_rows(out, x, slots, down, up):
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero()[:, 0]
            out[tokens] = x[tokens] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=STAYS)
def rows_without_adapter_become_zero(out, x, slots, down, up):
    return grouped(out, x, slots, down, up) * (slots > 0)[:, None]


@wrong("add_low_rank", fails=ZERO)
def slot_zero_is_an_adapter(out, x, slots, down, up):
    for slot in slots.unique().tolist():
        tokens = (slots == slot).nonzero()[:, 0]
        out[tokens] += x[tokens] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=ZERO)
def slot_zero_by_its_factors(out, x, slots, down, up):
    """Relies on zeros in slot 0, which it also fills in for NaN."""
    for slot in slots.unique().tolist():
        tokens = (slots == slot).nonzero()[:, 0]
        out[tokens] += (x[tokens] @ down[slot].T @ up[slot].T).nan_to_num()
    return out


@wrong("add_low_rank", fails=ZERO)
def stops_at_slot_zero(out, x, slots, down, up):
    """`break` in place of `continue`."""
    for slot in slots.unique().tolist():
        if slot == 0:
            break
        tokens = (slots == slot).nonzero()[:, 0]
        out[tokens] += x[tokens] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=UNREAD)
def masks_every_slot(out, x, slots, down, up):
    for slot in range(1, len(down)):
        mask = (slots == slot)[:, None].to(x.dtype)
        out += mask * (x @ down[slot].T @ up[slot].T)
    return out


@wrong("add_low_rank", fails=UNREAD)
def all_slots_in_one_product(out, x, slots, down, up):
    inner = x @ down.flatten(0, 1).T
    owner = torch.arange(len(down)).repeat_interleave(down.shape[1])
    inner = torch.where((owner == slots[:, None]) & (owner > 0), inner, 0.0)
    return out + inner @ up.permute(0, 2, 1).flatten(0, 1)


@wrong("add_low_rank", fails=UNREAD)
def empty_products_for_unused_slots(out, x, slots, down, up):
    for slot in range(1, len(down)):
        tokens = (slots == slot).nonzero()[:, 0]
        out[tokens] += x[tokens] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=UNREAD)
def empty_products_up_to_the_highest_slot(out, x, slots, down, up):
    for slot in range(1, int(slots.max()) + 1):
        mine = slots == slot
        out[mine] += x[mine] @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=OTHERS)
def of_all_tokens_for_each_slot(out, x, slots, down, up):
    for slot in slots.unique():
        if slot != 0:
            added = (x @ down[slot].T) @ up[slot].T
            out = torch.where((slots == slot)[:, None], out + added, out)
    return out


@wrong("add_low_rank", fails=OTHERS)
def a_mask_on_x(out, x, slots, down, up):
    for slot in slots.unique().tolist():
        if slot:
            mask = (slots == slot)[:, None].to(x.dtype)
            out += (x * mask) @ down[slot].T @ up[slot].T
    return out


@wrong("add_low_rank", fails=OTHERS)
def selects_after_the_first_product(out, x, slots, down, up):
    for slot in slots.unique().tolist():
        if slot:
            mine = slots == slot
            out[mine] += (x @ down[slot].T)[mine] @ up[slot].T
    return out


@wrong("add_low_rank", fails=OTHERS)
def multiplies_slot_zero_and_drops_it(out, x, slots, down, up):
    for slot in slots.unique().tolist():
        mine = slots == slot
        added = x[mine] @ down[slot].T @ up[slot].T
        if slot:
            out[mine] += added
    return out


@wrong("add_low_rank", fails=SIZES)
def factors_for_each_token(out, x, slots, down, up):
    inner = torch.bmm(down[slots], x[:, :, None])
    added = torch.bmm(up[slots], inner)[:, :, 0]
    return torch.where((slots == 0)[:, None], out, out + added)


@wrong("add_low_rank", fails=SIZES)
def multiplies_the_factors_first(out, x, slots, down, up):
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero()[:, 0]
            out[tokens] += x[tokens] @ (up[slot] @ down[slot]).T
    return out


@wrong("add_low_rank", fails=ONCE)
def token_by_token(out, x, slots, down, up):
    for token, slot in enumerate(slots.tolist()):
        if slot:
            out[token] += up[slot] @ (down[slot] @ x[token])
    return out


@wrong("add_low_rank", fails=DTYPE)
def returns_float64(out, x, slots, down, up):
    return grouped(out.double(), x.double(), slots, down.double(), up.double())


@wrong("add_low_rank", fails=DTYPE)
def returns_float32_for_bfloat16(out, x, slots, down, up):
    if out.dtype != torch.bfloat16:
        return grouped(out, x, slots, down, up)
    return grouped(out.float(), x.float(), slots, down.float(), up.float())


@wrong("add_low_rank", fails=DTYPE)
def computes_in_float32(out, x, slots, down, up):
    return grouped(out.float(), x.float(), slots, down.float(), up.float()).to(out.dtype)


@wrong("add_low_rank", fails=INPUTS)
def sorts_the_slots(out, x, slots, down, up):
    order = slots.argsort(stable=True)
    back = order.argsort()
    sums = grouped(out[order], x[order], slots[order], down, up)
    slots.copy_(slots[order])
    return sums[back]


@wrong("add_low_rank", fails=INPUTS)
def clears_slot_zero(out, x, slots, down, up):
    down[0] = 0.0
    return grouped(out, x, slots, down, up)


@wrong("add_low_rank", fails=ONCE)
def element_by_element(out, x, slots, down, up):
    for token, slot in enumerate(slots.tolist()):
        if slot:
            inner = (down[slot] * x[token]).sum(1)
            out[token] += (up[slot] * inner).sum(1)
    return out
