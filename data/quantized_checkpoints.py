"""Write `checkpoints/`: a tiny model, quantized by other projects' tools, with the logits that they say it has.

    python data/quantized_checkpoints.py {gptqmodel,auto-round,modelopt,rounding,sparse}

Run it in an environment of its own with the packages that each part names, transformers and torch for a CPU; the
engine's environment needs none of them. The tests read what it wrote. Another version of a tool may round a few
weights in another way, so new files are as good as the committed ones, but need not be the same.

    gptqmodel   GPTQModel 7.7 (GPTQ; without a GPU, set GPTQMODEL_CPU_WORKERS=2)
    auto-round  auto-round 0.16, and AutoAWQ 0.2.9, which dequantizes what auto-round wrote (AWQ)
    modelopt    nvidia-modelopt 0.47
    rounding    gguf 0.19 and torchao 0.18: matrices that they rounded to 4 and 8 bits
    sparse      compressed-tensors 0.10.2: sparse matrices as it stored them; later versions do not

Each folder has config.json, model.safetensors, the tool's own configuration, and expected.safetensors with "ids"
[tokens] and "logits" [tokens, vocabulary]: computed in float32 by transformers with the weights that the tool
dequantized, or, if activations are quantized, with the tool's own simulation of them.
"""

import copy
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = Path(__file__).resolve().parent / "checkpoints"
VOCABULARY, GROUP = 16, 16
KEPT = ("config.json", "quantize_config.json", "hf_quant_config.json", "model.safetensors")


def source(directory: Path, kv_heads: int) -> None:
    """A model of one layer, whose output depends on every part, and a tokenizer for tools that ask for one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        attention_bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, (1.0 if "embed" in name else 2.5) * parameter.shape[1] ** -0.5)
    model.half().save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(directory)


def calibration(rows: int = 16, length: int = 64) -> torch.Tensor:
    """Token ids of an uneven distribution, so that some inputs matter more than others."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(VOCABULARY, generator=generator) ** 3
    return torch.multinomial(weights, rows * length, replacement=True, generator=generator).view(rows, length)


IDS = list(range(3, 15))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float()


def keep(name: str, made: Path, logits: torch.Tensor) -> None:
    """Copy the files that an engine reads, and what it should compute."""
    target = OUT / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in KEPT:
        if (made / file).is_file():
            shutil.copy(made / file, target)
    expected = {"ids": torch.tensor(IDS), "logits": logits.contiguous()}
    save_file(expected, target / "expected.safetensors")


def dequantized(directory: Path, weight_of: Callable[[str, dict[str, torch.Tensor]], torch.Tensor]) -> torch.Tensor:
    """Logits of a checkpoint whose quantized modules a tool dequantizes: (module, tensors) -> [rows, in]."""
    tensors = load_file(directory / "model.safetensors")
    for name in [each for each in tensors if each.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        parts = {last: tensors.pop(f"{module}.{last}", None) for last in ("qweight", "qzeros", "scales", "g_idx")}
        tensors[f"{module}.weight"] = weight_of(module, parts)
    config = LlamaConfig.from_pretrained(directory)
    del config.quantization_config
    model = LlamaForCausalLM(config).float()
    missing = model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys, missing
    model.tie_weights()
    return logits_of(model)


def gptqmodel(work: Path) -> None:
    package, linear = import_module("gptqmodel"), import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    convert = import_module("gptqmodel.utils.model").convert_gptq_v1_to_v2_format_module
    source(work / "source", kv_heads=1)
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in calibration()]
    act_order = {"desc_act": True, "sym": False}
    for name, how in {
        "gptq-symmetric": {"desc_act": False, "sym": True, "format": "gptq"},
        "gptq-act-order": act_order | {"format": "gptq"},
        "gptq-v2": {"desc_act": False, "sym": False, "format": "gptq_v2"},
        "gptq-8-bits": {"bits": 8, "group_size": -1, "desc_act": False, "sym": True, "format": "gptq"},
    }.items():
        how = {
            "bits": 4,
            "group_size": GROUP,
            "device": "cpu",
            "act_group_aware": False,
            "offload_to_disk": False,
        } | how
        model = package.GPTQModel.load(str(work / "source"), package.QuantizeConfig(**how), dtype=torch.float16)
        model.quantize(rows, batch_size=1)
        model.save(str(work / name))

        def weight_of(module: str, parts: dict[str, torch.Tensor], how: dict = how) -> torch.Tensor:
            inputs, outputs = len(parts["g_idx"]), parts["scales"].shape[1]
            shared = {key: how[key] for key in ("bits", "group_size", "sym", "desc_act")}
            layer = linear(in_features=inputs, out_features=outputs, bias=False, **shared)
            layer.load_state_dict(parts, strict=False, assign=True)
            layer.scales, layer.dequant_dtype = layer.scales.float(), torch.int32
            if how["format"] == "gptq":
                convert(layer, bits=how["bits"], pack_dtype=torch.int32)
            layer.post_init()
            return layer.dequantize_weight().t()

        keep(name, work / name, dequantized(work / name, weight_of))


def auto_round(work: Path) -> None:
    package, awq = import_module("auto_round"), import_module("awq.utils.packing_utils")
    source(work / "source", kv_heads=1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "source")
    model = LlamaForCausalLM.from_pretrained(work / "source", dtype=torch.float16)
    how = {"bits": 4, "group_size": GROUP, "sym": False, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    package.AutoRound(model, tokenizer, **how).quantize_and_save(work / "awq", format="auto_awq")
    (made,) = [each.parent for each in (work / "awq").rglob("model.safetensors")]

    def weight_of(module: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return awq.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, GROUP).t()

    keep("awq", made, dequantized(made, weight_of))


def modelopt(work: Path) -> None:
    quantization, export = import_module("modelopt.torch.quantization"), import_module("modelopt.torch.export")
    fuse = import_module("modelopt.torch.export.unified_export_hf").requantize_resmooth_fused_llm_layers
    awq, w4a8 = (_with_group(each) for each in (quantization.INT4_AWQ_CFG, quantization.W4A8_AWQ_BETA_CFG))
    fp8, mixed = (copy.deepcopy(quantization.FP8_DEFAULT_CFG) for _ in range(2))
    fp8["quant_cfg"] += quantization.FP8_KV_CFG["quant_cfg"]
    mixed["quant_cfg"] += [
        {"quantizer_name": "*down_proj*weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
        {"quantizer_name": "*down_proj*input_quantizer", "enable": False},
        {"quantizer_name": "*o_proj*", "enable": False},
    ]
    # AWQ and SmoothQuant leave factors at o_proj: only if each head has its own values can an engine fold them.
    for name, config, kv_heads in (
        ("modelopt-fp8", fp8, 1),
        ("modelopt-mixed", mixed, 1),
        ("modelopt-smoothquant", quantization.INT8_SMOOTHQUANT_CFG, 2),
        ("modelopt-awq", awq, 2),
        ("modelopt-w4a8", w4a8, 2),
    ):
        source(work / f"source-{kv_heads}", kv_heads)
        model = LlamaForCausalLM.from_pretrained(work / f"source-{kv_heads}", dtype=torch.float32)
        quantization.quantize(model, config, lambda model: [model(row[None]) for row in calibration()])
        fuse(model)  # as the export does
        left_out = _not_simulated(model)
        for each in left_out:
            each.disable()
        logits = logits_of(model)
        for each in left_out:
            each.enable()
        with torch.inference_mode():
            export.export_hf_checkpoint(model, export_dir=work / name)
        keep(name, work / name, logits)


def _not_simulated(model: torch.nn.Module) -> list[Any]:
    """Quantizers of what the engine does not quantize: the cache, and W4A8's dequantized weights once more, to FP8."""
    found = []
    for module in model.modules():
        caches = [getattr(module, f"{which}_bmm_quantizer", None) for which in "kv"]
        found += [each for each in caches if each is not None and each.is_enabled]
        weights = getattr(module, "weight_quantizer", None)
        if type(weights).__name__ == "SequentialQuantizer":
            found.append(weights[1])
    return found


def _with_group(config: dict) -> dict:
    """The same configuration with groups of GROUP inputs."""
    config = copy.deepcopy(config)

    def visit(value: Any) -> None:
        if isinstance(value, dict) and -1 in value.get("block_sizes", {}):
            value["block_sizes"][-1] = GROUP
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            visit(each)

    visit(config)
    return config


def rounding(work: Path) -> None:
    gguf = import_module("gguf")
    primitives = import_module("torchao.quantization.quant_primitives")
    torch.manual_seed(0)
    weight = torch.randn(8, 32)
    tensors = {"weight": weight}
    for name in ("Q4_0", "Q8_0"):
        packed = gguf.quantize(weight.numpy(), getattr(gguf.GGMLQuantizationType, name))
        tensors[f"gguf.{name}"] = torch.from_numpy(
            gguf.dequantize(packed, getattr(gguf.GGMLQuantizationType, name)).copy()
        )
        tensors[f"gguf.{name}.scales"] = torch.from_numpy(packed[:, :2].copy()).view(torch.float16)
    mapping, block = primitives.MappingType, (1, weight.shape[1])
    for name, (kind, low, high) in {
        "int8": (mapping.SYMMETRIC, -127, 127),
        "int4": (mapping.SYMMETRIC, -8, 7),
        "int4-zeros": (mapping.ASYMMETRIC, -8, 7),
    }.items():
        scales, zeros = primitives.choose_qparams_affine(weight, kind, block, torch.int8, low, high)
        codes = primitives.quantize_affine(weight, block, scales, zeros, torch.int8, low, high)
        tensors |= {f"torchao.{name}.codes": codes, f"torchao.{name}.scales": scales, f"torchao.{name}.zeros": zeros}
    OUT.mkdir(exist_ok=True)
    save_file(tensors, OUT / "rounding.safetensors")


def sparse(work: Path) -> None:
    compressors = "compressed_tensors.compressors.sparse_compressors"
    two_four = import_module(f"{compressors}.sparse_24_bitmask").Sparse24BitMaskTensor
    unstructured = import_module(f"{compressors}.sparse_bitmask").BitmaskTensor
    torch.manual_seed(0)
    weight = torch.randn(6, 20).bfloat16()
    holes = weight * (torch.rand(6, 20) > 0.6)
    holes[2] = 0
    tensors = {"weight": weight, "holes": holes}
    for name, stored in (("sparse24", two_four.from_dense(weight)), ("pruned", unstructured.from_dense(holes))):
        tensors |= stored.dict(name_prefix=name)
        tensors[f"{name}.dense"] = stored.decompress()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, OUT / "sparse.safetensors")


PARTS = {
    "gptqmodel": gptqmodel,
    "auto-round": auto_round,
    "modelopt": modelopt,
    "rounding": rounding,
    "sparse": sparse,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PARTS:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        PARTS[sys.argv[1]](Path(folder))
