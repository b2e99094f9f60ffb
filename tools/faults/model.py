"""Faults in loading a model and in its forward pass."""

from . import Fault

DECODER, CONFIG, LOADER = "minillm/model/decoder.py", "minillm/model/config.py", "minillm/model/loader.py"
FAMILIES = "minillm/model/families.py"
SIZING = "minillm/model/sizing.py"

FAULTS = (
    Fault(
        "the size of a quantized cache leaves out its scales",
        "minillm/model/sizing.py",
        "+ CACHE_SCALE_BYTES.get(dtype, 0)",
        "",
        "tests/engine/test_quantized_cache.py -k nearly_twice",
    ),
    Fault(
        "Llama 3's rope scaling uses the wrong limit for short wavelengths",
        DECODER,
        "torch.where(waves < trained / high,",
        "torch.where(waves < trained / low,",
        "tests/model/test_decoder.py -k logits_equal_those_of_transformers",
    ),
    Fault(
        "the sines of the wrong half are negated",
        DECODER,
        "torch.cat((-sin, sin), -1)",
        "torch.cat((sin, -sin), -1)",
        "tests/model/test_decoder.py -k logits_equal_those_of_transformers",
    ),
    Fault(
        "local layers use the rope scaling of global layers",
        DECODER,
        "rope_theta=config.local_rope_theta, rope_scaling=None)",
        "rope_theta=config.local_rope_theta)",
        "tests/model/test_decoder.py -k logits_equal_those_of_transformers",
    ),
    Fault(
        "the residual stream is rotated again, not back, before the final norm",
        DECODER,
        "residual + x, inverse=True)",
        "residual + x)",
        "tests/calibration/test_rotation.py -k computes_the_same",
    ),
    Fault(
        "the fused step of one request leaves out rotations",
        "minillm/model/single_row.py",
        "            and not shape.rotations\n",
        "",
        "tests/calibration/test_rotation.py -k fused_step",
    ),
    Fault(
        "other programs take a model with rotations for one without",
        "minillm/model/saver.py",
        'config["model_type"] = ROTATED',
        "pass",
        "tests/calibration/test_rotation.py -k other_programs",
    ),
    Fault(
        "logits have no soft cap",
        DECODER,
        "cap = self.config.final_soft_cap",
        "cap = None",
        "tests/model/test_decoder.py -k soft_cap",
    ),
    Fault(
        "the model's attention scale is ignored",
        DECODER,
        "scale = config.attention_scale or head_dim**-0.5",
        "scale = head_dim**-0.5",
        "tests/model/test_decoder.py -k logits_equal_those_of_transformers",
    ),
    Fault(
        "Gemma 3's global layers come one layer too early",
        FAMILIES,
        "slides=lambda layer: (layer + 1) % pattern != 0",
        "slides=lambda layer: (layer + 2) % pattern != 0",
        "tests/model/test_config.py -k 'default or formats'",
    ),
    Fault(
        "the end tokens of generation_config.json are ignored",
        CONFIG,
        '*_ids((generation or {}).get("eos_token_id"))',
        "",
        "tests/model/test_config.py tests/model/test_config_file.py tests/model/test_loader.py -k 'not memory'",
    ),
    Fault(
        "keys and values are swapped on loading",
        "minillm/model/modules.py",
        "k_proj=kv, v_proj=kv",
        "v_proj=kv, k_proj=kv",
        "tests/model/test_loader.py -k every_tensor_is_loaded",
    ),
    Fault(
        "Gemma's norms are not offset by 1",
        LOADER,
        "norm.add_(model.config.norm_offset)",
        "norm.add_(0.0)",
        "tests/model/test_loader.py -k every_tensor_is_loaded",
    ),
    Fault(
        "a file that lacks the end of its last tensor is accepted",
        LOADER,
        "if entry.start + entry.nbytes > size:",
        "if entry.start > size:",
        "tests/model/test_loader.py -k truncated",
    ),
    Fault(
        "random weights ignore the seed",
        LOADER,
        "manual_seed(seed)",
        "manual_seed(0)",
        "tests/model/test_loader.py -k dummy_weights",
    ),
    Fault(
        "the cache size per token counts keys but not values",
        SIZING,
        "return 2 * config.num_kv_heads * (config.head_dim",
        "return config.num_kv_heads * (config.head_dim",
        "tests/model/test_sizing.py -k kv_bytes_per_token",
    ),
    Fault(
        "a tied head is counted twice",
        SIZING,
        "matrices = 1 if config.tie_word_embeddings else 2",
        "matrices = 2",
        "tests/model/test_sizing.py -k parameter_counts",
    ),
    Fault(
        "factors of down_proj's inputs scale the gate",
        "minillm/model/input_factors.py",
        "range(config.intermediate_size, 2 * config.intermediate_size)",
        "range(config.intermediate_size)",
        "tests/model/test_input_factors.py -k dense_twin",
    ),
    Fault(
        "factors of all heads are those of the first that reads their values",
        "minillm/model/input_factors.py",
        "if not heads.equal(heads[:, :1].expand_as(heads)):",
        "if False:",
        "tests/model/test_input_factors.py -k must_agree",
    ),
    Fault(
        "a quantized head of a tied model is not named",
        "minillm/model/loader.py",
        "if config.tie_word_embeddings and (head :=",
        "if False and (head :=",
        "tests/quantization/test_checkpoints.py -k tied_model",
    ),
    Fault(
        "a simulated format is run without a word",
        "minillm/model/loader.py",
        "for name, why in simulated(built).items():",
        "for name, why in ():",
        "tests/quantization/test_fp4.py -k says_that_it_simulates",
    ),
)
