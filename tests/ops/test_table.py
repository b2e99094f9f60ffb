"""The table of operations, and `using`, which overrides its entries."""

import inspect

import pytest
import torch

import minillm
from minillm import ops
from minillm.ops import AttentionOptions, cpu, reference
from minillm.ops.signatures import Truncation
from minillm.overrides import OverrideError

pytestmark = pytest.mark.key


def test_the_table_shows_which_function_each_operation_runs_and_why():
    rows = ops.table("cpu")
    assert [row["name"] for row in rows] == list(ops.names())
    assert all(row["runs"] in ("reference", "cpu") and row["why"] for row in rows)
    assert all(row["signature"].startswith(row["name"] + "(") for row in rows)


def test_a_gpu_runs_kernels_for_what_the_reference_would_compute_in_several_launches():
    triton = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
    assert {"embedding", "linear", "lm_head", "rms_norm", "sample"} <= vars(triton).keys() & set(ops.names())


def test_an_override_runs_is_counted_and_is_fully_undone():
    operations = ops.on("cpu")
    own, version = operations.linear, operations.version
    with minillm.using(linear=lambda x, weight: x * 2) as used:
        assert operations.linear(torch.ones(2), None).tolist() == [2, 2]
        entry = next(row for row in ops.table("cpu") if row["name"] == "linear")
        assert entry["runs"] == "yours" and "replaces" in entry["why"]
        assert operations.version == version + 1, "graphs captured before must belong to another version"
    assert used.calls == {"linear": 1}
    assert operations.linear is own and operations.version == version + 2


def test_inner_overrides_win_and_outer_ones_return():
    operations = ops.on("cpu")
    with minillm.using(linear=lambda *_: "outer") as outer:
        with minillm.using(linear=lambda *_: "inner") as inner:
            assert operations.linear(1, 2) == "inner"
        assert operations.linear(1, 2) == "outer"
    assert (outer.calls["linear"], inner.calls["linear"]) == (1, 1)


def test_a_failing_block_restores_the_engines_own_operations():
    own = ops.on("cpu").sample
    with pytest.raises(ZeroDivisionError), minillm.using(sample=lambda *_: 1 / 0):
        ops.on("cpu").sample()
    assert ops.on("cpu").sample is own


def test_a_stub_falls_back_and_is_reported():
    def stub(x, weight, eps):
        raise minillm.NotSolvedYet("compute the mean square first")

    x, weight = torch.randn(3, 8), torch.ones(8)
    with minillm.using(rms_norm=stub) as used:
        found = ops.on("cpu").rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, reference.rms_norm(x, weight, 1e-6))
    assert used.calls == {"rms_norm": 0}
    assert used.not_solved == {"rms_norm": "compute the mean square first"}


@pytest.mark.parametrize(
    ("replacements", "error", "message"),
    [
        ({"atention": print}, ValueError, "no part is called 'atention'; there are: .*embedding, linear"),
        ({"linear": 3}, ValueError, "linear must be a function, not int"),
    ],
)
def test_invalid_overrides_are_reported_by_name(replacements, error, message):
    with pytest.raises(error, match=message), minillm.using(**replacements):
        pass


def test_a_device_without_fast_functions_runs_the_reference_functions():
    operations = ops.OperationSet("meta")
    assert {label for label, _ in operations.origin.values()} == {"reference"}


def test_every_function_in_the_table_has_the_declared_signature():
    for name in ops.names():
        declared = list(inspect.signature(getattr(ops.Operations, name)).parameters)[1:]
        for module in (reference, cpu):
            if hasattr(module, name):
                assert list(inspect.signature(getattr(module, name)).parameters) == declared, (module, name)


@pytest.mark.parametrize("operation", ["decode_attention", "prefill_attention"])
def test_an_attention_override_may_take_the_models_options_as_keywords(operation):
    seen = {}

    def plain(q, cache, block_table, lengths, *starts, scale, **more):
        seen.update(more, scale=scale)
        return q

    options = AttentionOptions(0.5, window=3)
    rows = ops.Rows(*[torch.ones(2)] * 3, max_queries=9)
    with minillm.using(**{operation: plain}) as used:
        assert getattr(ops.on("cpu"), operation)(torch.ones(2), None, rows, options).equal(torch.ones(2))
    assert seen == {"scale": 0.5, "window": 3} | ({"max_queries": 9} if operation == "prefill_attention" else {})
    assert used.calls[operation] == 1


def test_a_sampling_override_may_take_three_arguments_and_then_gets_truncated_logits():
    def plain(logits, temperature, uniform):
        return (logits > -torch.inf).sum(-1)

    logits, ones = torch.arange(6.0).repeat(3, 1), torch.ones(3)
    truncation = Truncation(torch.tensor([0, 1.0, 0]), torch.tensor([3, 0, 0], dtype=torch.int32), ones)
    with minillm.using(sample=plain) as used:
        assert ops.on("cpu").sample(logits, ones, ones / 2, truncation).tolist() == [3, 1, 6]
        assert ops.on("cpu").sample(logits, ones, ones / 2).tolist() == [6, 6, 6]
    assert used.calls == {"sample": 2} and logits.isfinite().all()
    refused = pytest.raises(OverrideError, match="sample cannot be a function of .logits.*temperature, uniform, trunc")
    with refused, minillm.using(sample=lambda logits: logits):
        pass


def test_an_attention_override_may_take_any_options_without_naming_one():
    def plain(q, cache, block_table, lengths, **more):
        return lengths, more

    lengths = torch.ones(2)
    rows = ops.Rows(torch.ones(2), lengths, torch.ones(2), max_queries=1)
    with minillm.using(decode_attention=plain):
        got, more = ops.on("cpu").decode_attention(torch.ones(2), None, rows, AttentionOptions(0.5))
    assert got is lengths and more == {"scale": 0.5}


def test_an_attention_override_may_call_its_tensors_as_it_likes():
    def plain(x, keys, table, sizes, *, scale=1.0):
        return sizes

    rows = ops.Rows(torch.ones(2), sizes := torch.ones(2), torch.ones(2), max_queries=1)
    with minillm.using(decode_attention=plain):
        assert ops.on("cpu").decode_attention(torch.ones(2), None, rows, AttentionOptions(0.5)) is sizes


OTHER_ARGUMENTS = {
    "decode_attention": [
        lambda q, cache, block_table, lengths, options: q,
        lambda q, keys, values, table, lens: q,
        lambda q, cache, *, scale: q,
    ],
    "prefill_attention": [
        lambda q, cache, block_table, lengths, query_start, max_queries, options: q,
        lambda q, cache, block_table, lengths, *, max_queries, scale: q,
    ],
}


@pytest.mark.parametrize("name, function", [(name, each) for name, all in OTHER_ARGUMENTS.items() for each in all])
def test_an_attention_override_with_other_arguments_is_refused(name, function):
    before = getattr(ops.on("cpu"), name)
    message = rf"{name} cannot be a function of \(q, .* with an `ops.Rows`, or as"
    with pytest.raises(OverrideError, match=message), minillm.using(**{name: function}):
        pass
    assert getattr(ops.on("cpu"), name) is before


def test_an_attention_override_with_the_reference_signature_gets_the_options_object():
    options = AttentionOptions(0.5)
    with minillm.using(decode_attention=lambda *given: given[-1]):
        assert ops.on("cpu").decode_attention(*[torch.ones(2)] * 3, options) is options
