import io
import re

from rich.console import Console

from nearlight.core.report import Finding, Report
from nearlight.profiler.pages.terminal import draw


def drawn(report, width=80):
    console = Console(file=io.StringIO(), width=width, no_color=True)
    draw(report, console)
    return console.file.getvalue()


def test_a_table_per_kernel_with_a_line_per_quantity_and_a_column_per_arch():
    rows = [
        {"kernel": kernel, "arch": arch, "registers": 1234, "spill_store_bytes": spills, "tma": 0,
         "occupancy": 0.5, "limited_by": "registers and shared memory"}
        for kernel in ("a[0]", "b") for arch, spills in (("sm_80", 0), ("sm_90a", 8))
    ]  # fmt: skip
    text = drawn(Report("inspect", "the answer", rows=rows, next="next"))
    assert text.splitlines()[0] == "the answer" and text.splitlines()[-1] == "next"
    assert text.count("sm_80") == text.count("sm_90a") == 2
    assert re.search(r"^a\[0\]", text, re.MULTILINE) and re.search(r"^b", text, re.MULTILINE)
    assert re.search(r"registers +1,234 +1,234", text)
    assert re.search(r"spill store bytes +0 +8", text)
    assert re.search(r"occupancy +50% +50%", text)
    assert "tma" not in text  # 0 everywhere


def test_two_targets_have_the_columns_and_advice_promises_nothing():
    rows = [{"kernel": "k", "arch": "sm_90a", "target": name, "registers": n}
            for name, n in (("a.cu", 8), ("b.cu", 9))]  # fmt: skip
    long = [{**row, "target": f"{'folder/' * 9}{row['target']}"} for row in rows]
    assert "…" not in drawn(Report("inspect", "x", rows=long))
    assert re.search(r"^ +a\.cu +b\.cu", drawn(Report("inspect", "x", rows=long)), re.MULTILINE)
    alike = [{**row, "target": f"{folder}/a.cu"} for row, folder in zip(rows, "xy", strict=True)]
    assert re.search(r"x/a\.cu +y/a\.cu", drawn(Report("inspect", "x", rows=alike)))
    for targets, headings in (
        (("/h/x/a.cu:f<int>", "/h/y/a.cu:f<int, float>"), r"x/a\.cu +y/a\.cu"),
        (("/h/x/a.cu:f<int>", "/h/y/b.cu:g"), r"^ +a\.cu +b\.cu"),
        (("/h/x/a.cu:f<int>", "/h/x/a.cu:f<float>"), r"^ +f<int> +f<float>"),
        (("/h/a.py", "/h/a.py again"), r"a\.py +a\.py again"),
        (("a.py", "a.py:OTHER"), r"a\.py +a\.py:OTHER"),
    ):
        pair = [{**row, "target": name} for row, name in zip(rows, targets, strict=True)]
        text = drawn(Report("inspect", "x", rows=pair))
        assert re.search(headings, text, re.MULTILINE) and text.count("a.cu") < 3, text
    finding = Finding("spills", "8 bytes", "why so", "", 0.0, 0, next_step="fewer values")
    text = drawn(Report("inspect", "x", rows=rows, findings=[finding]))
    assert re.search(r"a\.cu +b\.cu", text)
    assert "1. spills\n" in text and "do: fewer values" in text
    refused = [*rows[:1], {"kernel": "k", "arch": "sm_90a", "target": "b.cu", "refusal": "no"}]
    assert re.search(r"refusal +no", drawn(Report("inspect", "x", rows=refused)))


def test_a_title_is_whole_above_a_table_that_is_narrower_and_texts_break_at_words():
    name = "gain_bwd<__nv_bfloat16, float> → _gain_bwd_kernel bf16/fp32"
    archs = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
    rows = [{"kernel": name, "arch": arch, "registers": 255,
             "local_memory": "local array, no spill",
             "limited_by": "registers and shared memory"} for arch in archs]  # fmt: skip
    text = drawn(Report("inspect", "x", rows=rows))
    assert f"\n{name}\n" in re.sub(" +\n", "\n", text)
    assert max(map(len, text.splitlines())) <= 80 and text.count("spill") == 4
    assert all(text.count(word) >= 4 for word in ("registers", "shared", "memory", "array,"))
