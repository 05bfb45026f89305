from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from nearlight import ops
from nearlight.nn import linear_loss, patch

Batch = dict[str, torch.Tensor]
Make = Callable[..., Any]


def losses(make_model: Make, family: str, **inputs: Any) -> tuple[Any, Any]:
    plain, model = make_model(family), make_model(family)
    patch(model, only=["linear_cross_entropy"])
    return plain(**inputs), model(**inputs)


@pytest.mark.parametrize("num_items", [7, 7.0, torch.tensor(7)])
def test_num_items_in_batch_divides_the_sum(num_items: Any, make_model: Make, batch: Batch) -> None:
    expected, ours = losses(make_model, "Llama", **batch, num_items_in_batch=num_items)
    mean, _ = losses(make_model, "Llama", **batch)
    torch.testing.assert_close(ours.loss, expected.loss)
    torch.testing.assert_close(ours.loss, mean.loss * (19 / 7))  # 22 targets, 3 of them ignored


def test_shift_labels_are_taken_as_they_are(make_model: Make, batch: Batch) -> None:
    shifted = torch.roll(batch["labels"], 3, dims=1)
    expected, ours = losses(make_model, "Llama", **batch, shift_labels=shifted)
    plain, _ = losses(make_model, "Llama", **batch)
    torch.testing.assert_close(ours.loss, expected.loss)
    assert abs(ours.loss - plain.loss) > 1e-2


def test_ignore_index(make_model: Make, batch: Batch) -> None:
    labels = batch["input_ids"].masked_fill(batch["labels"] == -100, 5)
    expected, ours = losses(
        make_model, "Llama", input_ids=batch["input_ids"], labels=labels, ignore_index=5
    )
    torch.testing.assert_close(ours.loss, expected.loss)


def test_logits_to_keep_with_labels_of_that_length(make_model: Make, batch: Batch) -> None:
    kept = {"logits_to_keep": 5, "shift_labels": batch["labels"][:, -5:].contiguous()}
    expected, ours = losses(make_model, "Llama", **batch, **kept)
    torch.testing.assert_close(ours.loss, expected.loss)
    assert ours.logits.shape == (2, 5, 0)


def test_labels_may_be_positional(make_model: Make, batch: Batch) -> None:
    plain, model = make_model("Llama"), make_model("Llama")
    patch(model)
    arguments = (batch["input_ids"], None, None, None, None, batch["labels"])
    output = model(*arguments)
    assert output.logits.shape[-1] == 0
    torch.testing.assert_close(output.loss, plain(*arguments).loss)


def test_tuples_keep_their_places(make_model: Make, batch: Batch) -> None:
    expected, ours = losses(make_model, "Llama", **batch, return_dict=False)
    assert len(ours) == len(expected)
    torch.testing.assert_close(ours[0], expected[0])


@pytest.mark.parametrize("family_capped", ["Gemma2", "Granite"])
def test_softcap_and_scaling_count(family_capped: str, make_model: Make, batch: Batch) -> None:
    expected, ours = losses(make_model, family_capped, **batch)
    torch.testing.assert_close(ours.loss, expected.loss)
    key = {"Gemma2": "final_logit_softcapping", "Granite": "logits_scaling"}[family_capped]
    changed, _ = losses(make_model_with(make_model, **{key: 30.0}), family_capped, **batch)
    assert abs(changed.loss - ours.loss) > 1e-2  # so the case above would notice


def make_model_with(make_model: Make, **options: Any) -> Make:
    return lambda family: make_model(family, **options)


def test_router_loss_stays(make_model: Make, batch: Batch) -> None:
    expected, ours = losses(make_model, "Mixtral", **batch)
    torch.testing.assert_close(ours.loss, expected.loss)
    torch.testing.assert_close(ours.aux_loss, expected.aux_loss)
    bare, _ = losses(make_model, "Mixtral", **batch, output_router_logits=False)
    assert ours.loss > bare.loss


def test_without_labels_or_in_eval_mode_there_are_logits(make_model: Make, batch: Batch) -> None:
    plain, model = make_model("Llama"), make_model("Llama")
    patch(model, only=["linear_cross_entropy"])
    ids = batch["input_ids"]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert model(input_ids=ids).loss is None
    expected, ours = plain.eval()(**batch), model.eval()(**batch)
    assert torch.equal(ours.loss, expected.loss) and torch.equal(ours.logits, expected.logits)


def test_all_labels_ignored_is_zero_with_zero_gradients(make_model: Make, batch: Batch) -> None:
    model = make_model("Llama")
    patch(model)
    labels = torch.full_like(batch["labels"], -100)
    loss = model(input_ids=batch["input_ids"], labels=labels).loss
    loss.backward()
    assert loss == 0.0  # where transformers gives NaN: said in the docstring
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("where", ["body", "loss"])
def test_an_exception_leaves_no_state(
    where: str, make_model: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("Llama")
    patch(model)
    expected = model(**batch).loss

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError

    with monkeypatch.context() as patched:
        if where == "body":
            patched.setattr(model.model.layers[1].mlp, "forward", fails)
        else:
            patched.setattr(ops, "linear_cross_entropy", fails)
        with pytest.raises(ArithmeticError):
            model(**batch)
    assert linear_loss._calls.stack == []
    assert model(input_ids=batch["input_ids"]).logits.shape == (2, 12, 97)
    assert model.lm_head(torch.zeros(1, 64)).shape == (1, 97)
    assert torch.equal(model(**batch).loss, expected)


def test_threads_do_not_meet(make_model: Make, batch: Batch) -> None:
    model = make_model("Llama")
    patch(model)
    batches = [{key: value.roll(shift, 1) for key, value in batch.items()} for shift in range(4)]
    expected = [model(**each).loss.item() for each in batches]
    inside, found = threading.Barrier(4, timeout=60), [0.0] * 4

    def meet(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.wait()  # all four stand between the opening of the call and the head

    handle = model.lm_head.register_forward_pre_hook(meet)

    def work(index: int) -> None:
        found[index] = model(**batches[index]).loss.item()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    assert found == expected and len(set(found)) == 4


def test_a_forward_inside_a_forward(make_model: Make, batch: Batch) -> None:
    model, teacher = make_model("Llama"), make_model("Qwen2").eval()
    patch(model)
    patch(teacher)
    seen: list[torch.Size] = []
    model.lm_head.register_forward_pre_hook(
        lambda *_: seen.append(teacher(**batch).logits.shape) if not seen else None
    )
    expected = make_model("Llama")(**batch).loss
    torch.testing.assert_close(model(**batch).loss, expected)
    assert seen == [(2, 12, 97)]


class LoRALinear(nn.Module):
    """A stand-in for PEFT's LoRA layer: the base layer and a low-rank change."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 97, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def test_a_lora_head_is_left_alone_with_the_reason(make_model: Make, batch: Batch) -> None:
    model = make_model("Llama")
    model.lm_head = LoRALinear(model.lm_head)
    expected = model(**batch).loss
    patched = patch(model, only=["linear_cross_entropy"])
    assert patched.rows == ()
    assert "LoRALinear, not a plain nn.Linear" in patched.skipped[0].reason
    assert torch.equal(model(**batch).loss, expected)


def test_a_lora_head_put_in_after_patching_counts(make_model: Make, batch: Batch) -> None:
    plain, model = make_model("Llama"), make_model("Llama")
    patch(model)
    for each in (plain, model):
        torch.manual_seed(3)
        each.lm_head = LoRALinear(each.lm_head)
    output, expected = model(**batch), plain(**batch)
    assert output.logits.shape == (2, 12, 97)
    torch.testing.assert_close(output.loss, expected.loss)


def test_a_loss_function_of_the_users_own_is_kept(make_model: Make, batch: Batch) -> None:
    def own(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return logits.square().mean()

    model = make_model("Llama")
    model.loss_function = own
    assert "loss function of its own" in patch(model).skipped[0].reason
    model = make_model("Llama")
    patch(model)
    model.loss_function = own
    output = model(**batch)
    torch.testing.assert_close(output.loss, output.logits.square().mean())


def test_a_head_of_another_size_than_the_config_says(make_model: Make, batch: Batch) -> None:
    model = make_model("Llama")
    patch(model)
    model.config.vocab_size = 96
    with pytest.raises(ValueError, match=r"97 rows but the config says vocab_size=96"):
        model(**batch)


def test_a_head_with_a_bias(make_model: Make, batch: Batch) -> None:
    models = [make_model("Llama") for _ in range(2)]
    for model in models:
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 97))
    patch(models[1])
    results = [model(**batch).loss for model in models]
    for result in results:
        result.backward()
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(models[1].lm_head.bias.grad, models[0].lm_head.bias.grad)


def test_autocast_gives_the_same_loss_and_fp32_gradients(make_model: Make, batch: Batch) -> None:
    plain, model = make_model("Llama"), make_model("Llama")
    patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected, ours = plain(**batch).loss, model(**batch).loss
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=2**-8, atol=0)
    ours.backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_items_in_a_tensor_of_one_element(make_model: Make, batch: Batch) -> None:
    expected, ours = losses(make_model, "Llama", **batch, num_items_in_batch=torch.tensor([7]))
    torch.testing.assert_close(ours.loss, expected.loss[0])


def test_a_sharded_head_is_refused(make_model: Make, batch: Batch) -> None:
    model = make_model("Llama")
    patch(model)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = DTensor.from_local(model.lm_head.weight.detach(), mesh, [Shard(0)])
        model.lm_head.weight = nn.Parameter(sharded)
        with pytest.raises(ValueError, match="sharded DTensor"):
            model(**batch)
    finally:
        torch.distributed.destroy_process_group()
    assert linear_loss._calls.stack == []
