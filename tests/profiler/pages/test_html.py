"""The page in a real browser: figures readable, no errors, nothing wider than a phone."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from nearlight.core.report import Figure, Finding, OpRow, Proof, Report, State
from nearlight.profiler.pages import html

CHROMIUM = Path("/usr/bin/chromium")


def state(step_ms, peak_bytes, scale):
    rows = [
        OpRow(
            "aten::mm",
            f"model.layers.{i}.mlp",
            4,
            3.0 * scale,
            2.5 * scale,
            2.5 / 3,
            "compute",
            10**12,
            10**9,
        )
        for i in range(12)
    ] + [OpRow("aten::mul", "<script>alert(1)</script>", 9, 2.0, 0.0, None, "memory", 0, 10**9)]
    return State(
        mode="predicted", step_ms=step_ms, tokens_per_s=16384 / step_ms * 1e3, samples_per_s=8.0,
        peak_bytes=peak_bytes, limit_ms=20.0, share=20.0 / step_ms, ops=rows,
        memory={"parameters": peak_bytes // 4, "activations": peak_bytes - peak_bytes // 4},
        peak_tensors=[{"name": "logits", "module": "lm_head", "shape": [8, 2048, 49152],
                       "dtype": "float32", "bytes": 2**31, "owner": "activations"}],
    )  # fmt: skip


@pytest.fixture
def report():
    return Report(
        verb="optimize",
        answer="smollm2-135m on h200: 61.2 → 44.8 ms a step",
        target="smollm2-135m", task="train", gpu="h200", setup="bf16, fused AdamW",
        versions={"torch": "2.13.0", "triton": "3.7.1"},
        before=state(61.2, 20 * 2**30, 1.0), after=state(44.8, 9 * 2**30, 0.7),
        findings=[Finding("61 × norm in separate kernels", "evidence", "cause", "patch:rms_norm",
                          9.5, 2**30, applied=True, note="+9.5 ms"),
                  Finding("launches", "evidence", "cause", "", 0.5, 0, next_step="torch.compile")],
        proof=Proof(True, [{"name": "loss", "passed": True, "error": 1e-7, "plain_error": 2e-7,
                            "of_allowed": 0.3, "reason": ""}], "32 tokens"),
        next="next: nearlight.patch(model)",
    )  # fmt: skip


def test_page_is_small_self_contained_and_escaped(report):
    page = html.render(report)
    assert len(page.encode()) < html.MAX_BYTES
    assert "http://" not in page and "https://" not in page
    assert "<script>" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("pipe", "words"),
    [("fp8", "1979 TFLOP/s dense fp8"), ("tf32", "495 TFLOP/s dense tf32"), ("", "dense bf16")],
)
def test_the_roof_is_that_of_the_pipe_with_most_flops(report, pipe, words):
    # The setup names bf16, whatever the products run on.
    page = html.render(replace(report, before=replace(report.before, pipe=pipe)))
    assert words in page and page.count("TFLOP/s dense") == 1


def test_time_without_a_cost_model_is_said(report):
    assert "without a cost model" not in html.render(report)
    figures = {"unmodelled_ms": Figure(4.48, "ms", "predicted", "s")}
    page = html.render(replace(report, after=replace(report.after, figures=figures)))
    assert "4.48 ms, 10.0% of the step, are ops without a cost model" in page


def test_a_report_without_a_step_says_what_to_do_instead():
    with pytest.raises(ValueError, match="use --json"):
        html.render(Report("doctor", "fine"))


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if not CHROMIUM.exists():
        if os.environ.get("CI") == "true":
            pytest.fail("CI has no browser: apt-get install chromium")
        pytest.skip("no browser: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=str(CHROMIUM),
            args=["--no-sandbox", "--disable-background-networking", "--disable-component-update"],
        )
        yield browser
        browser.close()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_page_shows_its_figures_in_a_browser(browser, report, tmp_path, width, height):
    path = tmp_path / "report.html"
    html.save_html(report, path)
    page = browser.new_page(viewport={"width": width, "height": height})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(path.as_uri())
    assert page.inner_text("#answer") == report.answer
    assert page.inner_text("#step-ms-before") == "61.20 ms"
    assert page.inner_text("#step-ms-after") == "44.80 ms"
    assert page.inner_text("#peak-after") == "9.00 GiB"
    assert page.locator(".finding").count() == 2
    assert page.locator("svg circle.after").count() >= 1
    assert "passed" in page.inner_text("#proof")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert errors == []
    page.close()
