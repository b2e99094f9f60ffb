"""Faults in loading a model and in its forward pass."""

from . import Fault

DECODER, LOADER = "minillm/model/decoder.py", "minillm/model/loader.py"
CHOOSING = "minillm/advice/choosing.py"

FAULTS = (
    Fault(
        "the estimated speed of few requests leaves out the arithmetic of products of codes",
        CHOOSING,
        "share), 2 * numbers * rows / rate)",
        "share), 0.0)",
        "tests/advice/test_choosing.py -k near_the_measured",
    ),
    Fault(
        "a precision that loses more is recommended where another is nearly as fast",
        CHOOSING,
        "NEAR = 0.97",
        "NEAR = 1.0",
        "tests/advice/test_choosing.py -k nearly_as_fast",
    ),
    Fault(
        "Llama 3's rope scaling uses the wrong limit for short wavelengths",
        "minillm/model/rope_scaling.py",
        "frequencies.where(waves < trained / high,",
        "frequencies.where(waves < trained / low,",
        "tests/model/test_decoder.py -k logits_equal_those_of_transformers",
    ),
    Fault(
        "logits have no soft cap",
        DECODER,
        "cap = self.config.final_soft_cap",
        "cap = None",
        "tests/model/test_decoder.py -k soft_cap",
    ),
    Fault(
        "keys and values are swapped on loading",
        "minillm/model/modules.py",
        "k_proj=(kv, kv_heads), v_proj=(kv, kv_heads)",
        "v_proj=(kv, kv_heads), k_proj=(kv, kv_heads)",
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
        "a head that differs from the embedding only in its last rows is dropped",
        "minillm/model/checkpoint.py",
        "all(mine.to(wide).equal(yours.to(wide)) for mine, yours in zip(*read, strict=True))",
        "next(mine.to(wide).equal(yours.to(wide)) for mine, yours in zip(*read, strict=True))",
        "tests/model/test_checkpoint.py -k head_of_its_own",
    ),
    Fault(
        "a tensor with more bytes than its shape takes is accepted",
        "minillm/model/checkpoint.py",
        "return entry.nbytes == math.prod",
        "return entry.nbytes >= math.prod",
        "tests/model/test_checkpoint.py -k more_or_fewer_bytes",
    ),
    Fault(
        "random weights ignore the seed",
        LOADER,
        "manual_seed(seed)",
        "manual_seed(0)",
        "tests/model/test_loader.py -k dummy_weights",
    ),
    Fault(
        "a quantized head is dropped if config.json ties the head",
        "minillm/model/loader.py",
        "    if own == {head}:\n",
        "    if own:\n",
        "tests/quantization/test_checkpoints.py -k quantized_head_is_used",
    ),
    Fault(
        "a simulated format is run without a word",
        "minillm/model/loader.py",
        "for name, why in simulated(built).items():",
        "for name, why in ():",
        "tests/quantization/test_fp4.py -k says_that_it_simulates",
    ),
)
