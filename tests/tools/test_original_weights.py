"""The original of a packaged model gets the same report, and is compared with the packaged one where that is."""

from minillm.pretrained import CATALOG, folder_of
from tools import original_weights


def test_the_report_is_of_the_original_and_the_packaged_model_is_compared_with_it(monkeypatch, tmp_path):
    name, offer = "smollm2-135m", CATALOG["smollm2-135m"]
    report = ["report", "HuggingFaceTB/SmolLM2-135M-Instruct", "--out", "smollm2-135m-original.html", "--quick"]
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    assert original_weights.commands(name, ["--quick"]) == [report]
    monkeypatch.setattr(original_weights, "downloaded", folder_of)
    assert original_weights.commands(name, ["--quick"]) == [
        report,
        ["eval", "--compare", str(tmp_path / "models" / name), "--model", offer.original],
    ]
