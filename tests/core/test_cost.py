import pytest
import torch

from nearlight.core import cost
from nearlight.core.cost import Cost
from nearlight.core.hardware import find_gpu

H200 = find_gpu("h200")


def test_the_limit_is_the_slower_of_flops_and_bytes():
    # 8192³ in bf16: 1.0995e12 flops at 989.4e12/s; 403 MB at 4.8e12 B/s is far less.
    product = Cost({"bf16": 2 * 8192**3}, 2 * 2 * 8192**2, 2 * 8192**2, pattern="matmul")
    assert product.limit_s(H200) == pytest.approx(2 * 8192**3 / (H200.peak_tflops("bf16") * 1e12))
    assert product.bound(H200) == "compute"
    copy = Cost(bytes_read=10**9, bytes_written=10**9)
    assert copy.limit_s(H200) == pytest.approx(2e9 / (H200.memory_gbps * 1e9))
    assert copy.bound(H200) == "memory"


def test_pipes_work_at_once_so_the_slowest_counts():
    both = Cost({"bf16": 10**12, "fp32": 10**12})
    assert both.limit_s(H200) == pytest.approx(1e12 / (H200.peak_tflops("fp32") * 1e12))
    assert both.total_flops == 2 * 10**12


def test_a_sum_adds_work_and_keeps_the_larger_workspace():
    total = Cost({"bf16": 1}, 2, 3, 1, 100) + Cost({"bf16": 10, "fp32": 5}, 20, 30, 2, 7)
    assert total == Cost({"bf16": 11, "fp32": 5}, 22, 33, 3, 100)


def test_formulas_are_found_by_name():
    @cost.register_cost("test::double", "test::double_")
    def double(args, kwargs, outputs):
        return Cost(bytes_read=args[0].numel())

    assert cost.formula_for("test::double_") is double
    assert cost.formula_for("test::triple") is None


def test_fp32_products_leave_their_pipe_only_when_tf32_is_allowed():
    assert cost.matmul_pipe(torch.float32) == "fp32"
    assert cost.matmul_pipe(torch.float32, allow_tf32=True) == "tf32"
    assert cost.matmul_pipe(torch.bfloat16) == "bf16"


def test_an_expanded_dimension_is_stored_once():
    x = torch.ones(4, 8)
    assert cost.tensor_bytes(x) == 128
    assert cost.tensor_bytes(x[:1].expand(1000, 8)) == 32
    assert cost.tensor_bytes(x[:0]) == 0
