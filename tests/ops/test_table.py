"""The table of operations and the socket that replaces its entries."""

import inspect

import pytest
import torch

import minillm
from minillm import ops
from minillm.ops import AttentionOptions, cpu, reference


def test_the_table_lists_every_operation_with_what_runs_and_why():
    rows = ops.table("cpu")
    assert [row["name"] for row in rows] == list(ops.names())
    assert all(row["runs"] in ("reference", "cpu") and row["why"] for row in rows)
    assert all(row["signature"].startswith(row["name"] + "(") for row in rows)


def test_a_replacement_runs_is_counted_and_leaves_no_trace():
    operations = ops.on("cpu")
    own, version = operations.linear, operations.version
    with minillm.using(linear=lambda x, weight: x * 2) as used:
        assert operations.linear(torch.ones(2), None).tolist() == [2, 2]
        entry = next(row for row in ops.table("cpu") if row["name"] == "linear")
        assert entry["runs"] == "yours" and "replaces" in entry["why"]
        assert operations.version == version + 1, "whatever was captured before belongs to another version"
    assert used.calls == {"linear": 1}
    assert operations.linear is own and operations.version == version + 2


def test_inner_replacements_win_and_outer_ones_return():
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


def test_a_stub_falls_back_and_says_what_is_missing():
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
        ({"linear": 3}, TypeError, "linear must be a function, not int"),
    ],
)
def test_mistakes_are_named(replacements, error, message):
    with pytest.raises(error, match=message), minillm.using(**replacements):
        pass


def test_a_device_without_fast_functions_runs_the_references():
    operations = ops.OperationSet("meta")
    assert {label for label, _ in operations.origin.values()} == {"reference"}


def test_every_function_of_the_table_has_the_signature_that_is_declared():
    for name in ops.names():
        declared = list(inspect.signature(getattr(ops.Operations, name)).parameters)[1:]
        for module in (reference, cpu):
            if hasattr(module, name):
                assert list(inspect.signature(getattr(module, name)).parameters) == declared, (module, name)


@pytest.mark.parametrize("operation", ["decode_attention", "prefill_attention"])
def test_a_replaced_attention_may_take_its_options_by_keyword_those_that_the_model_has(operation):
    seen = {}

    def plain(q, cache, block_table, lengths, *starts, scale, **more):
        seen.update(more, scale=scale)
        return q

    options = AttentionOptions(0.5, window=3)
    tensors, rest = [torch.ones(2)] * (4 if operation == "decode_attention" else 5), (options,)
    if operation == "prefill_attention":
        rest = (9, options)
    with minillm.using(**{operation: plain}) as used:
        assert getattr(ops.on("cpu"), operation)(*tensors, *rest).equal(torch.ones(2))
    assert seen == {"scale": 0.5, "window": 3} | ({"max_queries": 9} if operation == "prefill_attention" else {})
    assert used.calls[operation] == 1


def test_a_replaced_attention_that_takes_what_the_reference_takes_gets_the_options_as_they_are():
    options = AttentionOptions(0.5)
    with minillm.using(decode_attention=lambda *given: given[-1]):
        assert ops.on("cpu").decode_attention(*[torch.ones(2)] * 4, options) is options
