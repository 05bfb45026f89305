"""Rows stand before the rule for exactly their key and GPU, and cost a call nothing."""

import json
import warnings
from dataclasses import dataclass, replace

import pytest
import torch

from nearlight.core import tuned
from nearlight.core.errors import BadInput
from nearlight.core.hardware import find_gpu

H200 = find_gpu("h200")
ASKED = ((64, 128), torch.bfloat16, H200)
KEY = "rule (64, 128) bfloat16 forward"


@dataclass(frozen=True)
class Config:
    block: int
    num_warps: int = 4


def candidates(shape, dtype, gpu, direction):
    return {Config(512): "", Config(1024): "", Config(4096): "too much shared memory"}


def rule(shape, dtype, gpu, direction="forward"):
    """Choose a block."""
    return Config(256)


@pytest.fixture
def config(monkeypatch, tmp_path):
    monkeypatch.delenv("NEARLIGHT_TUNED", raising=False)
    monkeypatch.setattr(tuned, "user_path", lambda name, key: tmp_path / "user" / key / name)
    monkeypatch.setattr(tuned, "package_path", lambda name, key: tmp_path / "package" / key / name)
    tuned._rows.cache_clear()
    yield tuned.tunable("scale", candidates)(rule)
    tuned._rows.cache_clear()
    tuned.forget()


def row(block, key=KEY, rule_is_best=False):
    return {"key": key, "config": {"block": block}, "rule_is_best": rule_is_best}


def save(*rows, path="user_path", gpu=H200):
    tuned.save(getattr(tuned, path)("scale", gpu.key), rows)


def test_without_rows_the_rule_chooses(config):
    assert config(*ASKED) == config((1, 1), torch.float32, None, "backward") == Config(256)
    assert config.__doc__ == "Choose a block." and config.__wrapped__ is rule


def test_a_row_serves_exactly_its_key_and_gpu(config):
    save(row(512))
    assert config(*ASKED) == config(*ASKED, direction="forward") == Config(512)
    others = [
        ((64, 129), torch.bfloat16, H200),
        ((64, 128), torch.float32, H200),
        (*ASKED, "backward"),
        (*ASKED[:2], find_gpu("l4")),
        (*ASKED[:2], None),  # the interpreter
        # a slice, and a card of which the table has no row
        (*ASKED[:2], replace(H200, num_sms=66)),
        (*ASKED[:2], replace(H200, key="NVIDIA Thing 1")),
    ]
    assert {config(*each) for each in others} == {Config(256)}


def test_the_users_row_comes_before_the_packages(config):
    save(row(512), row(512, "rule (64, 128) bfloat16 backward"), path="package_path")
    assert config(*ASKED) == Config(512)
    save(row(1024))  # what was chosen already is chosen anew
    assert config(*ASKED) == Config(1024)
    assert config(*ASKED, "backward") == Config(512)


def test_rows_of_other_keys_stay_in_the_file(config):
    save(row(512), row(512, "other"))
    save(row(1024))
    kept = tuned.read(tuned.user_path("scale", "h200"))
    assert {key: each["config"]["block"] for key, each in kept.items()} == {KEY: 1024, "other": 512}


def test_where_the_rule_is_best_it_chooses(config):
    save(row(512, rule_is_best=True))
    assert config(*ASKED) == Config(256)


@pytest.mark.parametrize("changed", [{"block": 2048}, {"block": 4096}, {"tile": 512}])
def test_a_row_that_is_no_candidate_any_more_is_not_taken_in_silence(config, changed):
    save({**row(0), "config": changed})
    with pytest.warns(RuntimeWarning, match=r"run `nearlight tune scale` again"):
        assert config(*ASKED) == Config(256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        config(*ASKED)


def test_off_means_the_rule(config, monkeypatch):
    save(row(512))
    monkeypatch.setenv("NEARLIGHT_TUNED", "off")
    assert config(*ASKED) == Config(256)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", json.dumps({"schema": 9, "rows": []}), json.dumps({"schema": 1, "rows": [{}]}),
     json.dumps({"schema": 1, "rows": [{"key": KEY, "config": {"block": 512}}]})],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named_and_the_rule_serves(config, content):
    path = tuned.user_path("scale", "h200")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(BadInput, match=rf"{path}: .*delete the file"):
        tuned.read(path)
    with pytest.warns(RuntimeWarning, match=rf"{path}: .*the rule's launches are taken"):
        assert config(*ASKED) == Config(256)


def test_two_rules_of_one_op_have_rows_of_their_own(config):
    def other(shape, dtype, gpu, direction="forward"):
        return Config(256)

    chosen = tuned.tunable("scale", candidates)(other)
    save(row(512), row(1024, KEY.replace("rule", "other")))
    assert (config(*ASKED), chosen(*ASKED)) == (Config(512), Config(1024))


def test_a_second_call_looks_nothing_up(config, monkeypatch):
    save(row(512))
    assert config(*ASKED) == Config(512)
    monkeypatch.setattr(tuned, "read", None)
    assert config(*ASKED, "backward") == Config(256)  # another key: the file is not read again
    monkeypatch.setattr(tuned.Asked, "key", None)
    assert config(*ASKED) == Config(512)


def test_forced_inside_the_block_alone(config):
    save(row(512))
    with tuned.recorded() as asked:
        config(*ASKED)
        config(*ASKED, "forward")
        config(*ASKED, "backward")
    assert [each.key for each in asked] == [KEY, "rule (64, 128) bfloat16 backward"]
    with tuned.forced(asked[0], Config(8)):
        assert config(*ASKED) == Config(8)
        assert config(*ASKED, "backward") == Config(256)
        with tuned.forced(asked[1], Config(16)):
            assert (config(*ASKED), config(*ASKED, "backward")) == (Config(8), Config(16))
        assert config(*ASKED, "backward") == Config(256)
    assert config(*ASKED) == Config(512)


def test_a_rule_must_say_for_which_gpu():
    with pytest.raises(TypeError, match="takes no `gpu`"):
        tuned.tunable("scale", candidates)(lambda shape, dtype: Config(1))


def test_rows_lie_by_gpu_and_op():
    for path in (tuned.user_path("scale", "h200"), tuned.package_path("scale", "h200")):
        assert path.parts[-3:] == ("tuned", "h200", "scale.json")
