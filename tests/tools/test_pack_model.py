"""tools/pack_model.py gives back every bit, and refuses what is not whole."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools import pack_model


@pytest.fixture
def directory(tmp_path):
    """A model's directory with a tensor of each kind."""
    generator = torch.Generator().manual_seed(0)

    def codes(most, *shape):
        return torch.randint(0, most, shape, generator=generator)

    scale = torch.rand(64, 1, generator=generator).half().float() + 0.25
    least = -torch.rand(64, 1, generator=generator).half().float()
    four = codes(16, 64, 32)
    four[:, 0], four[:, 1] = 0, 15
    eight = codes(255, 64, 32) - 127
    eight[:, 0] = 127
    short = codes(9, 64, 32)  # blocks that use fewer codes than there are
    short[:, 0] = 0
    made = {
        "four": (four * scale.half().float() + least).view(32, 64),
        "short": (short * scale.half().float() + least).view(32, 64),
        "same": torch.full((2, 32), -0.5),
        "zero": torch.zeros(2, 32),
        "eight": (eight * scale.half().float()).view(16, 128),
        "any": torch.randn(8, 64, generator=generator),
        "norm": torch.randn(64, generator=generator).bfloat16(),
    }
    source = tmp_path / "source"
    source.mkdir()
    save_file(made, source / "model.safetensors")
    (source / "config.json").write_text('{"a": "ü"}', encoding="utf-8")
    return source


def test_a_packed_model_is_the_same_in_fewer_bytes(directory, tmp_path):
    body, target = pack_model.packed(directory), tmp_path / "target"
    pack_model.unpack(body, target)
    before, after = (load_file(each / "model.safetensors") for each in (directory, target))
    assert {name: each.dtype for name, each in before.items()} == {name: each.dtype for name, each in after.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (target / "config.json").read_bytes() == (directory / "config.json").read_bytes()


def test_each_kind_of_weights_is_found(directory):
    weights = load_file(directory / "model.safetensors")
    kinds = {name: next(iter(pack_model._packed(name, each))).split(":")[0] for name, each in weights.items()}
    assert kinds == {
        "four": "q4_1",
        "short": "q4_1",
        "same": "q4_1",
        "zero": "q8_0",
        "eight": "q8_0",
        "any": "plain",
        "norm": "plain",
    }


@pytest.mark.parametrize("break_it", [lambda body: body[:-1], lambda body: body[:50] + b"x" + body[51:]])
def test_missing_or_damaged_parts_are_refused(directory, tmp_path, break_it):
    with pytest.raises(ValueError, match="damaged, or one of them is missing"):
        pack_model.unpack(break_it(pack_model.packed(directory)), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_command_writes_parts_and_puts_them_together(directory, tmp_path, monkeypatch, capsys):
    folder, target = tmp_path / "pack", tmp_path / "target"
    monkeypatch.setattr("sys.argv", ["pack_model.py", "pack", str(directory), str(folder), "--part-mib", "1"])
    monkeypatch.setattr(pack_model, "MIB", 1000)
    assert pack_model.main() == 0
    written = sorted(folder.glob("*/part"))
    assert len(written) > 1 and b"".join(each.read_bytes() for each in written) == pack_model.packed(directory)
    monkeypatch.setattr("sys.argv", ["pack_model.py", "unpack", str(folder), str(target)])
    assert pack_model.main() == 0 and (target / "config.json").is_file()
    (folder / "1" / "part").write_bytes(b"?" * 80)
    assert pack_model.main() == 1
    assert "damaged" in capsys.readouterr().err
