"""Faults in the Triton kernels. The tests run them in Triton's interpreter if there is no GPU."""

from . import Fault

ATTENTION, SAMPLING = "kernels/paged_attention.py", "kernels/sampling.py"

FAULTS = (
    Fault(
        "a kernel's attention window has one key too many",
        ATTENTION,
        "(keys[None, :] > positions[:, None] - WINDOW)",
        "(keys[None, :] >= positions[:, None] - WINDOW)",
        "tests/kernels/test_kernels.py -k 'test_prefill_attention or test_decode_attention'",
    ),
    Fault(
        "the splits of a long row leave out its last keys",
        ATTENTION,
        "share = tl.cdiv(length - first, SPLITS * KEYS) * KEYS",
        "share = (length - first) // (SPLITS * KEYS) * KEYS",
        "tests/kernels/test_kernels.py -k long_rows",
    ),
    Fault(
        "a tile of queries stops short of its diagonal",
        ATTENTION,
        "(tile * ROWS + ROWS - 1) // GROUP + 1, length)",
        "(tile * ROWS + ROWS - 1) // GROUP, length)",
        "tests/kernels/test_kernels.py -k test_prefill_attention",
    ),
    Fault(
        "the running sum is not rescaled when the maximum grows",
        ATTENTION,
        "total = total * rescale + tl.sum(weights, 1)",
        "total = total + tl.sum(weights, 1)",
        "tests/kernels/test_kernels.py -k test_decode_attention",
    ),
    Fault(
        "RMSNorm divides by the padded size",
        "kernels/normalization.py",
        "out = x * tl.rsqrt(tl.sum(x * x) / DIM + eps) * weight\n    tl.store(out_ptr + row * DIM + columns, "
        "out.to(out_ptr.dtype.element_ty), mask=inside)\n\n\n@triton.jit",
        "out = x * tl.rsqrt(tl.sum(x * x) / TILE + eps) * weight\n    tl.store(out_ptr + row * DIM + columns, "
        "out.to(out_ptr.dtype.element_ty), mask=inside)\n\n\n@triton.jit",
        "tests/kernels/test_kernels.py -k 'test_rms_norm'",
    ),
    Fault(
        "the GELU approximation lacks a factor of 2",
        "kernels/activation.py",
        "slope = 1.5957691216057308 *",
        "slope = 0.7978845608028654 *",
        "tests/kernels/test_kernels.py -k gated_activation",
    ),
    Fault(
        "the second half of a rotary pair rotates in the other direction",
        "kernels/rope_cache.py",
        "(b * cos + a * sin)",
        "(b * cos - a * sin)",
        "tests/kernels/test_kernels.py -k rotary_embedding",
    ),
    Fault(
        "the first slot of the cache is never written",
        "kernels/rope_cache.py",
        "(slot >= 0)",
        "(slot > 0)",
        "tests/kernels/test_kernels.py -k keys_are_written",
    ),
    Fault(
        "sampling does not subtract the mass of earlier chunks",
        SAMPLING,
        "goal -= tl.sum(tl.where(chunks == chunk, before, 0.0), 0)",
        "goal -= 0.0",
        "tests/kernels/test_kernels.py -k a_sample_is_where",
    ),
    Fault(
        "top-k keeps one tied logit too many",
        "kernels/truncation.py",
        "((equal > 0) & (first > equals))",
        "((equal > 0) & (first > equals + 1))",
        "tests/kernels/test_kernels.py -k truncation",
    ),
    Fault(
        "a captured step draws the random number of the previous position",
        "kernels/decode_step.py",
        "_mix(_mix(seed) + (position + 1).to(tl.uint64))",
        "_mix(_mix(seed) + position.to(tl.uint64))",
        "tests/kernels/test_decode_step.py",
    ),
    Fault(
        "the single-row kernel stores its newest key in the next slot",
        "kernels/single_row.py",
        "(newest % BLOCK_SIZE) * slot_stride",
        "((newest + 1) % BLOCK_SIZE) * slot_stride",
        "tests/kernels/test_single_row.py -k attention_of_one_row",
    ),
    Fault(
        "a table of measured launches stays in effect after its block",
        "kernels/launch_configs.py",
        "        _thread.table = before",
        "        _thread.table = table",
        "tests/kernels/test_launch_configs.py -k launch_table_applies",
    ),
    Fault(
        "the lowest digit of inputs in fixed point has a sign",
        "kernels/integer_rows.py",
        "total = dot4(low, even0, none, DIGITS == 1, COMPILED)",
        "total = dot4(low, even0, none, True, COMPILED)",
        "tests/kernels/test_integer_rows.py -k int8",
    ),
    Fault(
        "the up projection of an integer matrix is scaled like the gate",
        "kernels/integer_rows.py",
        "up_scale_ptr, up_zero_ptr = scale_ptr + ROWS * GROUPS, zero_ptr",
        "up_scale_ptr, up_zero_ptr = scale_ptr, zero_ptr",
        "tests/kernels/test_integer_rows.py -k 14-64",
    ),
    Fault(
        "a split product leaves out its last part",
        "kernels/few_rows.py",
        "for part in tl.static_range(SPLITS):",
        "for part in tl.static_range(SPLITS - 1):",
        "tests/kernels/test_few_rows.py -k dequantized_matrix",
    ),
    Fault(
        "the counter of finished splits stays as the last product left it",
        "kernels/few_rows.py",
        "            tl.store(finished_ptr + program, 0)\n",
        "",
        "tests/kernels/test_few_rows.py -k dequantized_matrix",
    ),
    Fault(
        "rows in int8 are rounded half up",
        "kernels/quantized_inputs.py",
        "return (x + 12582912.0) - 12582912.0",
        "return tl.floor(x + 0.5)",
        "tests/kernels/test_quantized_inputs.py -k halves",
    ),
    Fault(
        "an int8 embedding is scaled by its place in the batch",
        "kernels/embedding.py",
        "tl.load(scale_ptr + row)",
        "tl.load(scale_ptr + token)",
        "tests/kernels/test_quantized_inputs.py -k int8_table",
    ),
    Fault(
        "one request's inputs are rounded to int8 without a static scale",
        "kernels/integer_rows.py",
        "token_scale = tl.load(input_scale_ptr)",
        "token_scale = tl.max(tl.reshape(tl.abs(x), [QUADS * 4 * PER]), 0) / 127.5",
        "tests/kernels/test_integer_rows.py -k matrix_says_so",
    ),
)
