"""The fused single-row decode step of a model that is divided between ranks, which exchange sums through inboxes.

The ranks are threads of one process. Interpreted kernels must run one at a time, and a kernel would wait forever for
one that runs after it, so all ranks run each kernel before any runs the next one.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minillm.model.loader import load_model
from minillm.model.parallel import Inboxes
from minillm.quantization import Recipe
from tests import models
from tests.model.test_decoder import Paged
from tests.model.test_parallel import Thread
from tests.proofs import only_in_proofs

single_row = pytest.importorskip("minillm.model.single_row", reason="triton is not installed here")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, for a GPU's memory")
NAMES = ("gemma-multi-query",)
MORE = ("gemma2-grouped-untied", "llama-biases", "llama3-tied-head-dim", "qwen3-sliding-tied", "gemma3-grouped-scaled")


class Connected(Thread):
    connected = True

    def inboxes(self, sums, width):
        self.own = torch.zeros(sums, self.size, width, dtype=torch.int64)
        addresses = [own.data_ptr() for own in self.all(self.own)]
        return Inboxes(self.own, torch.tensor(addresses), torch.zeros(1, dtype=torch.int32))


def in_turn(monkeypatch, barrier):
    """Make the ranks run kernel by kernel."""
    lock = threading.Lock()

    def one_by_one(run):
        def each(*args, **options):
            with lock:
                found = run(*args, **options)
            barrier.wait(120)
            return found

        return each

    monkeypatch.setattr(single_row, "_product", one_by_one(single_row._product))
    for name in ("send_embedding", "summed"):
        monkeypatch.setattr(single_row.peers, name, one_by_one(getattr(single_row.peers, name)))
    attention = single_row.single_row.RowAttention
    monkeypatch.setattr(attention, "__call__", one_by_one(attention.__call__))


@pytest.mark.proof
@pytest.mark.parametrize("name", [*NAMES, *only_in_proofs(*MORE)])
def test_the_logits_of_two_ranks_are_those_of_the_unfused_step(name, tmp_path, monkeypatch):
    changes = {"head_dim": 16, "num_hidden_layers": 2} if name == "llama-biases" else {}
    if name == "llama-biases":
        changes["intermediate_size"] = 2 * 4128  # rows of the down projection that do not fit into registers
    models.make(name, **changes).save_pretrained(tmp_path)
    whole = load_model(tmp_path, dtype="float32")
    group, barrier = [], threading.Barrier(2)
    ranks = [Connected(rank, group, barrier) for rank in range(2)]
    parts = [load_model(tmp_path, dtype="float32", parallel=rank) for rank in ranks]
    in_turn(monkeypatch, barrier)

    def steps(model, fused):
        paged, found = Paged(model), []
        row = paged.admit()
        with torch.inference_mode():
            model.forward(paged.batch({}, {row: list(range(5, 25))}), paged.caches)
            step = single_row.SingleRow(model) if fused else None
            for token in (7, whole.config.vocab_size - 3, 50):
                batch = paged.batch({row: [token]}, {})
                found.append(
                    step.logits(batch, paged.caches) if fused else model.logits(model.forward(batch, paged.caches))
                )
        return found

    assert all(single_row.SingleRow.fits(part) for part in parts)
    with ThreadPoolExecutor(2) as pool:
        found = [each.result() for each in [pool.submit(steps, part, True) for part in parts]]
    for wanted, *theirs in zip(steps(whole, False), *found, strict=True):
        for mine in theirs:
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(*theirs), "both ranks have the same bits"


def test_quantized_weights_and_ranks_that_are_not_connected_do_not_fit():
    group, barrier = [], threading.Barrier(2)
    far = Thread(0, group, barrier)
    near = Connected(1, group, barrier)
    assert single_row.SingleRow.fits(load_model(parallel=near))
    assert not single_row.SingleRow.fits(load_model(parallel=far))
    assert not single_row.SingleRow.fits(load_model(parallel=near, recipe=Recipe({"*": "int8"})))
