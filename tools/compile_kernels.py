"""Compile every kernel for GPUs that this machine lacks, and print the resources each uses, one JSON object per line.

The engine's own wrappers are called on small CPU tensors, so launch configurations and specializations are the real
ones. A stub driver names the GPU to compile for. The kernels are compiled as far as LLVM and not launched.
GPUs of one generation (8.0 to 8.9) have the same matrix instructions, so a launch that an earlier one compiled is not
compiled again.

    python tools/compile_kernels.py 80 86 89 90
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).parents[1]))

from minillm.kernels import (
    activation,
    adapted_activation,
    adapted_norm,
    adapted_rotary,
    adapted_row,
    decode_step,
    embedding,
    few_rows,
    fixed_order,
    fp8_rows,
    integer_rows,
    low_rank,
    normalization,
    paged_attention,
    partial_attention,
    peers,
    prompt_lookup,
    quantized_inputs,
    rope_cache,
    sampling,
    single_row,
    single_row_parts,
    truncation,
)
from minillm.kernels.arguments import CodeMatrix
from minillm.kv_cache.layer_cache import CacheSpec, LayerCache
from minillm.kv_cache.split_pages import BlockShare
from minillm.ops import AttentionOptions, Rows

KIB = 1024
SHARED_MEMORY = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB}  # bytes per block (CUDA programming guide)


# head_dim, dtype, query heads per KV head, queries per decode row, options
ATTENTION = [
    (256, torch.bfloat16, 8, 1, {}),
    (256, torch.bfloat16, 8, 8, {"soft_cap": 50.0}),  # 64 and 128 packed rows, as in speculative decoding
    (256, torch.bfloat16, 8, 16, {}),
    (256, torch.float16, 16, 1, {"window": 512}),
    (128, torch.bfloat16, 4, 1, {"window": 4096, "soft_cap": 50.0}),
    (64, torch.bfloat16, 4, 1, {}),
    (256, torch.bfloat16, 8, 1, {"rotary": ...}),  # keys are rotated when they are read
    (64, torch.float16, 4, 1, {"rotary": ..., "soft_cap": 50.0}),
    (256, torch.float32, 8, 1, {}),
    (128, torch.float32, 4, 1, {"rotary": ...}),
]
# The same, then the format of the cache
QUANTIZED = [
    (256, torch.bfloat16, 8, 1, {}, "int8"),
    (256, torch.bfloat16, 8, 8, {"soft_cap": 50.0}, "fp8"),
    (256, torch.bfloat16, 8, 1, {"rotary": ...}, "fp8"),
    (64, torch.float16, 4, 1, {"rotary": ..., "soft_cap": 50.0}, "int8"),
]


def cases(capability: int) -> list[tuple]:
    """The cases of attention for a GPU: all for the newest, which the others share their options' code with.

    On the others, those that need the most shared memory: rotation reads keys in fewer stages, and the other options
    change what a kernel computes, not what it holds.
    """
    found = [*((*each, "auto") for each in ATTENTION), *QUANTIZED]
    if capability == max(SHARED_MEMORY):
        return found
    return [each for each in found if not each[4] or (each[5] == "fp8" and "rotary" not in each[4])]


class AbsentGPU:
    """The part of a driver that compilation needs."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # kernels are cached by device

    def get_current_stream(self, device):
        return 0


class NoAssembly(CUDABackend):
    """Compiles as far as LLVM's form: shared memory is known then, and assembling takes a third of the time."""

    def __init__(self, target: GPUTarget):
        super().__init__(target)
        self.binary_ext = "llir"

    def hash(self) -> str:
        """A key of its own: what is compiled here cannot be launched, so no engine may find it in Triton's cache."""
        return f"{super().hash()}-as-far-as-llvm"

    def add_stages(self, stages, options, language):
        super().add_stages(stages, options, language)
        del stages["ptx"], stages["cubin"]
        lower = stages["llir"]

        def named(source, metadata):
            metadata["name"] = "none"  # the assembly has it
            return lower(source, metadata)

        stages["llir"] = named


backends["nvidia"] = dataclasses.replace(backends["nvidia"], compiler=NoAssembly)


def launch(kernel, args, kwargs) -> tuple:
    """What a kernel is compiled for: tensors' dtypes, other arguments, constants, warps and stages."""

    def fixed(value):
        if isinstance(value, TensorDescriptor):
            return value.base.dtype, *value.block_shape
        return value.dtype if isinstance(value, torch.Tensor) else value

    return kernel.fn.__name__, *map(fixed, args), *((name, fixed(value)) for name, value in sorted(kwargs.items()))


def compile_all(capability: int, known: dict[tuple, dict]) -> list[dict]:
    """The needs of every kernel on a GPU. known: those of launches compiled so far, by generation and launch."""
    triton.runtime.driver.set_active(AbsentGPU(capability))
    device = paged_attention.Device(SHARED_MEMORY[capability], 100)
    paged_attention._device = lambda _: device
    compiled, case = [], ""

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        key = (capability // 10, *launch(kernel, args, kwargs))
        if key not in known:
            metadata = run(kernel, *args, grid=grid, warmup=True, **kwargs).metadata
            known[key] = {"shared": metadata.shared, "warps": metadata.num_warps}
        named = {"capability": capability, "kernel": kernel.fn.__name__, "case": case, "limit": device.shared_memory}
        compiled.append(named | known[key])

    run, triton.runtime.JITFunction.run = triton.runtime.JITFunction.run, compile_only
    try:
        single_row_parts.has_dependent_launch = lambda _: capability >= 90
        for module in (integer_rows, few_rows, fp8_rows, truncation, fixed_order, low_rank, adapted_activation):
            module.is_compiled = lambda _: True
        x = torch.zeros(2, 2048, dtype=torch.bfloat16)
        normalization.rms_norm(x, torch.zeros(2048), 1e-6)
        normalization.add_rms_norm(x, x, torch.zeros(2048), 1e-6)
        activation.gated_activation(x, "gelu_tanh")
        q, k = torch.zeros(2, 8, 256, dtype=torch.bfloat16), torch.zeros(2, 1, 256, dtype=torch.bfloat16)
        rope_cache.rotary_embedding(q, k, torch.zeros(2, 2, 256))
        rows, tokens = torch.zeros(2, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int32)
        positions, seed = torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
        table = torch.zeros(1, 4, 16, dtype=torch.int32)
        state = tokens, table, seed, torch.zeros(4, 4)
        decode_step.prepare(rows, positions, *state, block_size=16, width=16)
        decode_step.prepare(rows, rows, *state, block_size=16, width=16, host_tokens=rows)
        decode_step.advance(rows, rows, positions, tokens, rows, tokens)
        running = prompt_lookup.RunningTokens(rows, rows, rows)
        prompt_lookup.look_up(rows, rows, rows, positions, tokens, 7, running)
        prompt_lookup.accept(rows, rows, running, rows, positions, tokens, 7)
        normalization.rms_norm(k.expand(2, 3, 256), torch.zeros(256), 1e-6)
        limits = torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.ones(2)
        for dtype in (torch.float32, torch.bfloat16):
            sampling.sample(torch.zeros(2, 9000, dtype=dtype), torch.ones(2), torch.ones(2), limits)
            sampling.sample(torch.zeros(2, 9000, dtype=dtype), torch.ones(2), torch.ones(2))
        sampling.soft_cap(torch.zeros(2, 9000, dtype=torch.bfloat16), 30.0)
        row, weight = torch.zeros(1, 2048, dtype=torch.bfloat16), torch.zeros(2560, 2048, dtype=torch.bfloat16)
        single_row.product(row, weight, norm=torch.zeros(2048), eps=1e-6, residual=row)
        single_row.product(row, weight, activation="gelu_tanh")
        for dtype in (torch.float32, torch.bfloat16):
            fixed_order.product(x.to(dtype), torch.zeros(16384, 2048, dtype=dtype), torch.zeros(16384, dtype=dtype))
            fixed_order.product(x.to(dtype), torch.zeros(512, 2048, dtype=dtype))
        single_row.product(torch.zeros(1, 16384, dtype=torch.bfloat16), torch.zeros(8, 16384, dtype=torch.bfloat16))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            down, up = torch.zeros(4, 192, 2048, dtype=dtype), torch.zeros(4, 2048, 64, dtype=dtype)
            for tokens in (2, low_rank.FEW_TOKENS + 1):
                slots, wide = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, 2048, dtype=dtype)
                tiles = low_rank.token_tiles(slots, len(down))
                low_rank.add_grouped(wide, wide, tiles, down, up, (512, 1024, 2048))
                inner, wide = low_rank.inner_products(wide, tiles, down), torch.zeros(tokens, 2048, dtype=dtype)
                tiles = low_rank.token_tiles(slots, len(down), adapted_activation.tile_tokens(tokens))
                adapted_activation.adapted_activation(wide, inner, tiles, up, "gelu_tanh")
            both = torch.zeros(2, 2560 + 3 * 48, dtype=dtype)
            inner, up = low_rank.Inner.beneath(both[:, 2048:2304], 64), torch.zeros(5, 2048, 32, dtype=dtype)
            tiles = low_rank.token_tiles(slots[:2], 5, adapted_activation.tile_tokens(2))
            adapted_activation.adapted_activation(both[:, :2048], inner, tiles, up, "gelu_tanh")
            term = low_rank.Term(both[:, 2560:], slots[:2], torch.zeros(4, 2560, 16, dtype=dtype), 3)
            residual = torch.zeros(2, 2048, dtype=dtype)
            adapted_norm.adapted_add_rms_norm(both[:, :2048], residual, torch.zeros(2048), 1e-6, term)
            cache, angles = LayerCache(*torch.zeros(2, 4, 16, 1, 256, dtype=dtype)), torch.zeros(2, 2, 256)
            adapted_rotary.adapted_rotary_write(both[:, :2560], 8, angles, cache, slots[:2], True, True, term)
            cache = CacheSpec.of("int8", 2, 256, dtype).allocate(4, 16, x.device)
            adapted_rotary.adapted_rotary_write(both[:, :2560], 6, angles, cache, slots[:2], True, False, term)
        low_rank.add_low_rank(x, x, slots[:2], down.bfloat16(), up.bfloat16(), (512, 1024, 2048))
        slot = torch.zeros(1, dtype=torch.int64)
        for shape, ends, options in (
            ((2560, 2048), (2048, 2304, 2560), {"norm": torch.zeros(2048), "eps": 1e-6, "residual": row}),
            ((512, 2048), (256, 512), {"activation": "gelu_tanh"}), ((8, 16384), (8,), {}),
        ):  # fmt: skip
            a, b = torch.zeros(2, 16 * len(ends), shape[1]).bfloat16(), torch.zeros(2, shape[0], 16).bfloat16()
            term = adapted_row.LowRankTerm(slot, a, b, ends, torch.zeros(16 * len(ends)).long(), slot.int())
            matrix = torch.zeros(shape, dtype=torch.bfloat16)
            adapted_row.product(matrix[:1].clone(), matrix, term, **options)
        address, epoch = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        outbox, long = peers.Outbox(address, epoch, 0), torch.zeros(8, 16384, dtype=torch.bfloat16)
        single_row.product(row, weight, outbox=outbox)
        single_row.product(torch.zeros(1, 16384, dtype=torch.bfloat16), long, outbox=outbox)
        peers.send_embedding(torch.zeros(1, dtype=torch.int64), weight, 2.0, 0, outbox)
        peers.summed(torch.zeros(2, 2048, dtype=torch.int64), outbox, 2048, torch.bfloat16)
        peers.summed(torch.zeros(2, 2048, dtype=torch.int64), outbox, 2048, torch.bfloat16, first=True)
        reducer = peers.Reducer(0, torch.zeros(2, 2, 4, 2048, dtype=torch.int64), address, torch.zeros(4).int())
        for each in (row, row.float()):  # two numbers share a word, or none do
            reducer.all_reduce(each)
            reducer.add_rms_norm(each, each, torch.zeros(2048), 1e-6)
        scales, groups = torch.zeros(len(weight)), torch.zeros(len(weight), 16, dtype=torch.bfloat16)
        words = torch.zeros(len(weight), 512, dtype=torch.int32)
        for matrix in (
            CodeMatrix(8, words, scales),
            CodeMatrix(8, words, scales, fp8=True),
            CodeMatrix(4, words[:, :256].contiguous(), groups),
            CodeMatrix(4, words[:, :256].contiguous(), groups, groups.to(torch.int8)),
        ):
            if not matrix.fp8:
                integer_rows.product(row, matrix, norm=torch.zeros(2048), eps=1e-6, residual=row)
                integer_rows.product(row, matrix, activation="gelu_tanh")
            elif capability >= 89:  # 8.9 is the first with FP8
                for each in (matrix, matrix._replace(rounded_inputs=True)):
                    fp8_rows.product(row, each, norm=torch.zeros(2048), eps=1e-6, residual=row)
                    fp8_rows.product(row, each, activation="gelu_tanh")
            for tokens in (2, 64):
                few_rows.product(row.expand(tokens, -1), matrix)
            few_rows.dequantized(matrix)
        integer_rows.product(row, CodeMatrix(8, words, scales, rounded_inputs=True), activation="gelu_tanh")
        wide = torch.zeros(1, 2 * activation.MOST_COLUMNS, dtype=torch.bfloat16)
        for dtype in (torch.int8, torch.float8_e4m3fn)[: 1 + (capability >= 89)]:
            quantized_inputs.quantize_rows(x, dtype)
            normalization.rms_norm_codes(x, torch.zeros(2048), 1e-6, dtype)
            for static in (None, torch.ones(1)):
                normalization.add_rms_norm_codes(x, x, torch.zeros(2048), 1e-6, dtype, static)
            activation.gated_activation_codes(wide, "gelu_tanh", dtype)
        codes, factors = torch.zeros(2, 2048, dtype=torch.int8), torch.zeros(2, 1)
        quantized_inputs.scaled(x, factors, torch.zeros(2048))
        few_rows.product(codes, CodeMatrix(8, words, scales), factors)
        if capability >= 89:
            for tokens in (2, few_rows.MOST_ROWS):
                codes, factors = torch.zeros(tokens, 2048, dtype=torch.float8_e4m3fn), torch.zeros(tokens, 1)
                few_rows.product(codes, CodeMatrix(8, words, scales, fp8=True), factors)
        for tokens in (2, 8192):
            many = torch.zeros(tokens, 2048, dtype=torch.int8)
            quantized_inputs.int8_product(many, factors, words.view(torch.int8), scales, torch.bfloat16)
        for table in (words.view(torch.int8), words.view(torch.float8_e4m3fn)):
            embedding.code_embedding(rows, table, scales, 1.0, torch.bfloat16)
        for dim, dtype, heads, queries, options, held in cases(capability):
            case = f"{str(dtype).removeprefix('torch.')} head_dim {dim} cache {held}"
            cache = CacheSpec.of(held, 1, dim, dtype).allocate(4, 16, x.device)
            k, angles, slots = (torch.zeros(size, dtype=dtype) for size in ((2, 1, dim), (2, 2, dim), 2))
            rope_cache.write_kv(k, k, cache, slots.long())
            rope_cache.rotary_write(k.expand(-1, heads, -1), k, k, angles, cache, slots.long())
            table = torch.zeros(2, 256, dtype=torch.int32)
            lengths = torch.ones(2, dtype=torch.int32)
            rows_held, one = Rows.decoding(table, lengths), Rows.decoding(table[:1], lengths[:1], queries)
            q = torch.zeros(2, heads, dim, dtype=dtype)
            several = q[:, None].expand(-1, queries, -1, -1)
            if "rotary" in options:
                options = options | {"rotary": torch.zeros(4096, 2, dim, dtype=dtype)}
            attention = AttentionOptions(0.1, **options)
            paged_attention.decode_attention(several, cache, Rows.decoding(table, lengths, queries), attention)
            if held != "auto":  # few programs have larger tiles of codes
                paged_attention.decode_attention(several[:1], cache, one, attention)
            paged_attention.prefill_attention(q, cache, rows_held, attention)
            if "rotary" not in options:
                fixed_order.attention(q, cache, rows_held, attention)
                own, paged_attention.gathers = paged_attention.gathers, lambda *_: True
                paged_attention.prefill_attention(q, cache, rows_held, attention)
                paged_attention.gathers = own
                if held == "auto":
                    whole = dataclasses.replace(Rows.decoding(table[:1], lengths[:1], 2), whole=1)
                    paged_attention.prefill_attention(q, cache, whole, attention, (k, k))
            share = BlockShare(1, 2)
            part = share.spec(CacheSpec.of(held, 1, dim, dtype)).allocate(4, 16, x.device)
            partial_attention.partial_attention(q, part, rows_held, attention, share, decode=True)
            partial_attention.partial_attention(q, part, rows_held, attention, share, decode=False)
            partial_attention.merged(torch.zeros(2, 8, dim), torch.zeros(2, 8), dtype)
            norm = torch.zeros(dim)
            qkv, turns = torch.zeros(1, (heads + 2) * dim, dtype=dtype), torch.zeros(1, 2, dim, dtype=dtype)
            if dtype == torch.bfloat16:  # in others it needs as little shared memory
                attend = single_row.RowAttention(heads, 1, dim, qkv.device)
                attend(qkv, turns, cache, table[:1], lengths[:1], AttentionOptions(0.1))
                capped = AttentionOptions(0.1, window=4096, soft_cap=50.0)
                attend(qkv, turns, cache, table[:1], lengths[:1], capped, q_norm=norm, k_norm=norm, eps=1e-6)
    finally:
        triton.runtime.JITFunction.run = run
    return compiled


if __name__ == "__main__":
    known = {}
    for capability in map(int, sys.argv[1:]):
        for needs in compile_all(capability, known):
            print(json.dumps(needs))
