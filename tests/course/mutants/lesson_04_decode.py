"""Wrong solutions of lesson 04: a paged decode kernel."""

import inspect
import linecache

import torch
import triton
import triton.language as tl

from minillm.course.shared.interpret import INTERPRETED, how_kernels_run
from minillm.ops import AttentionOptions, Rows, reference
from tests.course.mutants import wrong


@triton.jit
def _wrong_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, scale, table_stride, block_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MISTAKE: tl.constexpr,
):  # fmt: skip
    """A correct kernel, except for its one mistake."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    packed, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    head = (row * tl.num_programs(1) + kv_head) * GROUP + packed
    at_q = head[:, None] * DIM + dims[None, :]
    real = (packed < GROUP)[:, None]
    q = tl.load(q_ptr + at_q, mask=real, other=0.0).to(tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, length, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < length
        if MISTAKE == "three tiles":
            present = present & (keys < 96)
        if MISTAKE == "256 keys":
            present = present & (keys < 256)
        number, offset = keys // BLOCK_SIZE, keys % BLOCK_SIZE
        if MISTAKE == "block of the tile":
            number, offset = start // BLOCK_SIZE + keys * 0, start % BLOCK_SIZE + keys - start
        if MISTAKE == "offset in the tile":
            offset = (keys - start) % BLOCK_SIZE
        if MISTAKE == "offset in the row":
            offset = keys
        if MISTAKE == "blocks of 16":
            number, offset = keys // 16, keys % 16
        at_table = table_ptr + row * table_stride + number
        if MISTAKE == "table unmasked":
            block = tl.load(at_table).to(tl.int64)
        elif MISTAKE == "table up to the length":
            block = tl.load(at_table, mask=keys <= length, other=0).to(tl.int64)
        else:
            block = tl.load(at_table, mask=present, other=0).to(tl.int64)
        at = block * block_stride + offset * slot_stride
        if MISTAKE == "blocks without gaps":
            at = (block * BLOCK_SIZE + offset) * slot_stride
        if MISTAKE == "heads without gaps":
            at += kv_head * DIM
        elif MISTAKE == "heads of a whole group":
            at += kv_head * GROUP * DIM
        elif MISTAKE == "heads fill a slot":
            at += kv_head * (slot_stride // tl.num_programs(1))
        elif MISTAKE == "two KV heads":
            at += tl.minimum(kv_head, 1) * head_stride
        elif MISTAKE != "first KV head":
            at += kv_head * head_stride
        at = at[:, None] + dims[None, :]
        if MISTAKE == "k unmasked":
            k = tl.load(k_ptr + at).to(tl.float32)
        else:
            k = tl.load(k_ptr + at, mask=present[:, None], other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MISTAKE != "scale" and MISTAKE != "scale in the weights":
            scores *= scale
        if MISTAKE == "scores up to 600":
            scores = tl.minimum(scores, 600.0)
        if MISTAKE == "a low score":
            scores = tl.where(present[None, :], scores, -1e4)
        elif MISTAKE != "length":
            scores = tl.where(present[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        if MISTAKE == "one maximum":
            new_maximum = tl.maximum(maximum, tl.max(tl.where(real, scores, float("-inf"))))
        if MISTAKE == "first maximum":
            new_maximum = tl.where(maximum == float("-inf"), tl.max(scores, 1), maximum)
        weights = tl.exp(scores - new_maximum[:, None])
        if MISTAKE == "scale in the weights":
            weights = tl.exp((scores - new_maximum[:, None]) * scale)
        if MISTAKE == "full tiles":
            weights = tl.where((start + KEYS <= length) | (start == 0), weights, 0.0)
        if MISTAKE == "no tile of one key":
            weights = tl.where((length - start > 1) | (start == 0), weights, 0.0)
        if MISTAKE == "a block of a partial tile":
            weights = tl.where(((start + KEYS <= length) | (keys < start + 16) | (start == 0))[None, :], weights, 0.0)
        rescale = tl.exp(maximum - new_maximum)
        if MISTAKE == "powers of two for the rescaling":
            rescale = tl.exp2(maximum - new_maximum)
        if MISTAKE == "forgets":
            rescale = tl.where(maximum == new_maximum, 1.0, 0.0)
        if MISTAKE == "one factor":
            rescale = tl.min(rescale, 0) + total * 0.0
        if MISTAKE == "rescaled up to key 64":
            rescale = tl.where(start <= 64, rescale, 1.0)
        if MISTAKE == "v unmasked":
            v = tl.load(v_ptr + at).to(tl.float32)
        elif MISTAKE == "v without other":
            v = tl.load(v_ptr + at, mask=present[:, None]).to(tl.float32)
        else:
            v = tl.load(v_ptr + at, mask=present[:, None], other=0.0).to(tl.float32)
        total = total * rescale + tl.sum(weights, 1)
        if MISTAKE != "rescale":
            out = out * rescale[:, None]
        if MISTAKE == "output rescaled twice":
            out = out * rescale[:, None]
        if MISTAKE == "16-bit products":
            weights, v = weights.to(tl.bfloat16).to(tl.float32), v.to(tl.bfloat16).to(tl.float32)
        out += tl.dot(weights, v, input_precision="ieee")
        if MISTAKE == "16-bit sums":
            out = out.to(k_ptr.dtype.element_ty).to(tl.float32)
        if MISTAKE == "16-bit total":
            total = total.to(k_ptr.dtype.element_ty).to(tl.float32)
        maximum = new_maximum
    tl.store(out_ptr + at_q, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def _with(mistake, kernel=_wrong_kernel):
    def decode(q, cache, block_table, lengths, *, scale):
        q, kv_heads = q.contiguous(), cache.k.shape[2]
        out = torch.empty_like(q)
        kernel[(len(q), kv_heads)](
            q, cache.k, cache.v, block_table, lengths, out, scale, block_table.stride(0), *cache.k.stride()[:3],
            GROUP=q.shape[2] // kv_heads, ROWS=16, KEYS=32, DIM=q.shape[3], BLOCK_SIZE=cache.k.shape[1],
            MISTAKE=mistake,
        )  # fmt: skip
        return out

    return decode


for _mistake, _fails in {
    "offset in the row": "a key's offset is counted inside its block",
    "block of the tile": "a tile of keys may come from several blocks",
    "blocks of 16": "sizes and strides are those of the cache",
    "blocks without gaps": "sizes and strides are those of the cache",
    "offset in the tile": "sizes and strides are those of the cache",
    "full tiles": "every key before the length counts",
    "no tile of one key": "every key before the length counts",
    "a block of a partial tile": "every key before the length counts",
    "a low score": "slots from the length on have no weight",
    "length": "slots from the length on have no weight",
    "v unmasked": "nothing from the length on is loaded",
    "heads without gaps": "every KV head is read",
    "heads of a whole group": "every KV head is read",
    "heads fill a slot": "every KV head is read",
    "first KV head": "every KV head is read",
    "two KV heads": "every KV head is read",
    "scale": "scores are multiplied by the scale",
    "scale in the weights": "scores are multiplied by the scale",
    "rescale": "the sum and the output are rescaled from tile to tile",
    "powers of two for the rescaling": "the sum and the output are rescaled from tile to tile",
    "forgets": "the sum and the output are rescaled from tile to tile",
    "one factor": "the sum and the output are rescaled from tile to tile",
    "rescaled up to key 64": "the sum and the output are rescaled from tile to tile",
    "output rescaled twice": "the sum and the output are rescaled from tile to tile",
    "256 keys": "the sum and the output are rescaled from tile to tile",
    "three tiles": "the sum and the output are rescaled from tile to tile",
    "first maximum": "scores of any size give exact weights",
    "one maximum": "scores of any size give exact weights",
    "scores up to 600": "scores of any size give exact weights",
    "16-bit total": "sums are in 32 bits, also with 16-bit keys and values",
    "16-bit sums": "sums are in 32 bits, also with 16-bit keys and values",
}.items():
    wrong("paged_decode", fails=_fails)(_with(_mistake))


if how_kernels_run() == INTERPRETED:  # compiled, these load too much, and nothing shows it
    for _mistake in ("k unmasked", "table unmasked", "table up to the length", "v without other"):
        wrong("paged_decode", fails="nothing from the length on is loaded")(_with(_mistake))


def _changed(before, after):
    """The kernel above with another text, which Triton finds in the cache of source lines."""
    text = inspect.getsource(_wrong_kernel.fn).replace(before, after)
    file = f"<{before} became {after}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names = dict(globals())
    exec(compile(text, file, "exec"), names)  # noqa: S102
    return names["_wrong_kernel"]


_ADDRESSES = "addresses have 64 bits, and products all of float32's"
for _before, _after in (
    (".to(tl.int64)", ""),
    (', input_precision="ieee"', ""),
    ('(weights, v, input_precision="ieee")', "(weights, v)"),
    ('"ieee"', '"tf32"'),
):
    wrong("paged_decode", fails=_ADDRESSES)(_with("none", _changed(_before, _after)))
if how_kernels_run() == INTERPRETED:  # compiled, an address with an error would end the process
    wrong("paged_decode", fails=_ADDRESSES)(
        _with("none", _changed("at = block * block_stride", "at = (block.to(tl.int32) * block_stride).to(tl.int64)"))
    )


@wrong("paged_decode", fails="your own kernel computes the result")
def without_a_kernel(q, cache, block_table, lengths, *, scale):
    return reference.decode_attention(q, cache, Rows.decoding(block_table, lengths), AttentionOptions(scale))


@wrong("paged_decode", fails="your own kernel computes the result")
def kernel_named_and_not_launched(q, cache, block_table, lengths, *, scale):
    _wrong_kernel  # noqa: B018
    return reference.decode_attention(q, cache, Rows.decoding(block_table, lengths), AttentionOptions(scale))


@wrong("paged_decode", fails="your own kernel computes the result")
def the_engines_kernel(q, cache, block_table, lengths, *, scale):
    from minillm.kernels import paged_attention

    _wrong_kernel  # noqa: B018
    return paged_attention.decode_attention(q, cache, Rows.decoding(block_table, lengths), AttentionOptions(scale))


if how_kernels_run() == INTERPRETED:

    @wrong("paged_decode", fails="your own kernel computes the result")
    def kernel_launched_and_its_result_dropped(q, cache, block_table, lengths, *, scale):
        _with("none")(q, cache, block_table, lengths, scale=scale)
        return reference.decode_attention(q, cache, Rows.decoding(block_table, lengths), AttentionOptions(scale))
