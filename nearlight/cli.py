"""The command line: parses, calls, draws; no logic."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearlight import __version__
from nearlight.core import env
from nearlight.core.errors import BadInput, MissingPart, one_line

if TYPE_CHECKING:
    from nearlight.core.report import Report
    from nearlight.profiler.target import Target

DOORS = """\
nearlight brings a PyTorch program to the speed of light of its GPU, with proof.

  too slow         nearlight optimize smollm2-135m --batch 8 --seq 2048
  does not fit     nearlight predict llama-3.1-8b --gpu h200 --seq 4096
  my own kernel    nearlight new my_op --lang triton
  I want to learn  nearlight inspect swiglu

Every command takes --help. A target is a preset, a folder with a config.json,
or file.py:function."""

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
# Its module differs between versions of typer.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

TargetArgument = Annotated[
    str, typer.Argument(help="a preset, a folder with a config.json, or file.py:function")
]
TaskOption = Annotated[str, typer.Option("--task", help="train, prefill or decode")]
BatchOption = Annotated[int | None, typer.Option("--batch", help="sequences in a step")]
SeqOption = Annotated[int | None, typer.Option("--seq", help="tokens of a sequence")]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="bf16 (default), fp16 or fp32")]
JsonOption = Annotated[
    str | None, typer.Option("--json", help="write the report here; - prints it")
]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="write the report page here")]


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # whoever ends us ends what we started
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(app(standalone_mode=False))
    except (BadInput, MissingPart) as error:
        print(f"nearlight: {error}", file=sys.stderr)
    except USAGE_ERROR as error:
        print(_usage(error), file=sys.stderr)
    except typer.Abort:
        sys.exit(130)
    sys.exit(2)


def _usage(error: Any) -> str:
    """Return what was given, what is allowed and where more is said, in one line."""
    message = " ".join(error.format_message().rstrip(".?").split())
    verb = [word for word in sys.argv[1:2] if word.isalpha()]  # an option's parser names none
    path = error.ctx.command_path if error.ctx else " ".join(("nearlight", *verb))
    if allowed := getattr(getattr(error, "param", None), "help", None):
        message += f": {allowed}"
    elif message.startswith("No such command") and "Did you mean" not in message:
        message += f": allowed are {', '.join(error.ctx.command.commands)}"
    return f"{path}: {message}; see {path} --help"


@app.callback(invoke_without_command=True)
def doors(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Bring a PyTorch program to the limit of its GPU; `nearlight` alone shows where to begin."""
    if version:
        print(f"nearlight {__version__}")
    elif context.invoked_subcommand is None:
        print(DOORS)
    else:
        # A wrong value is told at once, whether the verb comes to read it or not.
        for name in env.VARIABLES:
            env.read(name)


@app.command()
def optimize(
    target: TargetArgument,
    task: TaskOption = "train",
    batch: BatchOption = None,
    seq: SeqOption = None,
    dtype: DtypeOption = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="predict for this GPU instead of measuring")
    ] = None,
    vs: Annotated[
        list[str] | None,
        typer.Option("--vs", metavar="PEER", help="measure this peer's step too (liger)"),
    ] = None,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Find what keeps a model from its limit, fix it and prove it."""
    _writable(json, html)
    from nearlight.core.hardware import find_gpu

    chosen = find_gpu(gpu).key if gpu is not None else None
    from nearlight.fixes.loop import optimize_target

    loaded = _load(target, task, batch, seq, dtype)
    with _progress(json) as say:
        report = optimize_target(loaded, chosen, peers=tuple(vs or ()), progress=say)
    _show(report, json, html)
    if report.proof is not None and not report.proof.passed:
        raise typer.Exit(1)


@app.command()
def predict(
    target: TargetArgument,
    gpu: Annotated[str, typer.Option("--gpu", help="one or more GPUs, a comma between")] = "h200",
    task: TaskOption = "train",
    batch: BatchOption = None,
    seq: SeqOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Predict step time, memory and bounds on any GPU, without one."""
    _writable(json, html)
    from nearlight.core.hardware import find_gpu

    gpus = [find_gpu(name) for name in gpu.split(",")]
    from nearlight.profiler.predict import predict_target

    loaded = _load(target, task, batch, seq, dtype)
    with _progress(json) as say:
        report = predict_target(loaded, gpus, progress=say)
    _show(report, json, html)


@app.command()
def doctor(json: JsonOption = None) -> None:
    """Say what this machine has and what it lacks."""
    _writable(json)
    from nearlight.core.doctor import diagnose

    _show(diagnose(), json)


@app.command()
def calibrate(
    repo: Annotated[
        bool, typer.Option("--repo", help="write into nearlight/data instead of the user's folder")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Measure what this GPU reaches: copies, products, launches."""
    _writable(json)
    from nearlight.profiler.calibrate import calibrate as measure

    with _progress(json) as say:
        report = measure(into_repo=repo, progress=say)
    _show(report, json)


@app.command()
def ops(json: JsonOption = None) -> None:
    """List the ops with their signatures and proofs."""
    _writable(json)
    from nearlight.workbench.check import list_ops

    _show(list_ops(), json)


@app.command()
def new(
    op: Annotated[str, typer.Argument(help="name of the op, its file and its function")],
    lang: Annotated[str, typer.Option("--lang", help="triton or cuda")],
    directory: Annotated[Path, typer.Option("--dir", help="folder of the files")] = Path(),
    json: JsonOption = None,
) -> None:
    """Write an op of your own and its test, proved as they stand."""
    _writable(json)
    from nearlight.workbench.new import new as write

    _show(write(op, lang, directory), json)


@app.command()
def check(
    op: Annotated[str, typer.Argument(help="an op of ours, file.py or file.py:NAME")],
    quick: Annotated[bool, typer.Option("--quick", help="the edit loop: a few seconds")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PROPERTY",
            help="values, layouts, shapes, size, lifecycle, extremes, poison, torch, determinism, "
            "memory, sanitizer or machine code; again for more",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="cuda runs compiled kernels, cpu interprets them")
    ] = "cpu",
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="run the compute-sanitizer, too (minutes, a GPU)")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Prove an op: values, gradients, layouts, shapes and more."""
    _writable(json)
    from nearlight.workbench.apart import check_apart

    with _progress(json) as say:
        report = check_apart(
            op, quick, device, tuple(only or ()) or None, sanitize=sanitize, progress=say
        )
    _show(report, json)
    if report.proof is None or report.proof.verdict == "failed":
        raise typer.Exit(1)


@app.command()
def bench(
    op: Annotated[str | None, typer.Argument(help="an op of ours, file.py or file.py:NAME")] = None,
    vs: Annotated[
        list[str] | None, typer.Option("--vs", metavar="PEER", help="a peer, again for more")
    ] = None,
    repo: Annotated[
        bool, typer.Option("--repo", help="write into nearlight/data instead of the user's folder")
    ] = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="A B", help="two results, files of --json"),
    ] = None,
    max_loss: Annotated[
        str | None, typer.Option("--max-loss", help="exit 1 if B is slower by more than, e.g. 2%")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Time an op on this GPU against its peers, if it is right."""
    _writable(json)
    if (op is None) == (diff is None) or (diff is not None and (vs or repo)):
        raise BadInput("bench takes OP [--vs PEER] [--repo], or --diff A B [--max-loss 2%]")
    if diff is not None:
        from nearlight.workbench.bench_diff import diff as compare

        report = compare(*diff, max_loss)
    else:
        if max_loss is not None:
            raise BadInput("--max-loss compares two results: bench --diff A B --max-loss 2%")
        from nearlight.workbench.bench import bench as bench_op
        from nearlight.workbench.load import load_op

        assert op is not None
        with _progress(json) as say:
            report = bench_op(load_op(op), peers=tuple(vs or ()), into_repo=repo, progress=say)
    _show(report, json)
    if report.proof is not None and not report.proof.passed:
        raise typer.Exit(1)


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="an op of ours, file.py or file.py:NAME")],
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--cases",
            metavar="CASE",
            help='a case by name or sizes ("rows=3000,N=5000"), again for more',
        ),
    ] = None,
    repo: Annotated[
        bool, typer.Option("--repo", help="write into nearlight/data instead of the user's folder")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Search the best launches of an op's kernels on this GPU."""
    _writable(json)
    from nearlight.workbench.load import load_op
    from nearlight.workbench.tune import cases_named
    from nearlight.workbench.tune import tune as tune_op

    found = load_op(op)
    with _progress(json) as say:
        report = tune_op(found, cases_named(found, cases or ()), into_repo=repo, progress=say)
    _show(report, json)
    if report.proof is None or not report.proof.passed:
        raise typer.Exit(1)


@app.command()
def inspect(
    target: Annotated[
        str | None,
        typer.Argument(
            help="an op, file.py, file.py:NAME (a record or a kernel), file.cu or "
            "file.cu:kernel<args>"
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch", help="or GPUs, a comma between; default sm_80,sm_90a,sm_100a,sm_120a"
        ),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="A B", help="two targets side by side on one arch"),
    ] = None,
    block: Annotated[int, typer.Option("--block", help="threads of a .cu kernel's block")] = 0,
    shared: Annotated[
        int, typer.Option("--shared", help="dynamic shared memory of a .cu kernel's block, bytes")
    ] = 0,
    types: Annotated[
        str, typer.Option("--types", help='of a Triton kernel: "x_ptr=*bf16,n=i64,stride=4096"')
    ] = "",
    constants: Annotated[
        str,
        typer.Option("--constants", help='of a Triton kernel: "BLOCK=1024,ACC=fp32,num_warps=8"'),
    ] = "",
    json: JsonOption = None,
) -> None:
    """Say what the compiler made of a kernel, without a GPU."""
    _writable(json)
    from nearlight.workbench.inspect_kept import inspect_kept

    if (target is None) == (diff is None):
        raise BadInput("inspect takes one target, or --diff A B")
    first, other = diff or (target, None)
    assert first is not None
    # A log of compilations helps nobody; a terminal shows that something goes on.
    with _progress(json if sys.stderr.isatty() else "-") as say:
        report = inspect_kept(
            first,
            arch.split(",") if arch is not None else None,
            other,
            block=block,
            shared=shared,
            types=types,
            constants=constants,
            progress=say,
        )
    _show(report, json)


def _load(target: str, task: str, batch: int | None, seq: int | None, dtype: str | None) -> Target:
    from nearlight.profiler import target as targets

    return targets.load(target, task=task, batch=batch, seq=seq, dtype=dtype)


def _writable(json: str | None, html: Path | None = None) -> None:
    """Refuse a report path that cannot be written before minutes of work, not after."""
    from nearlight.core.report import require_writable

    for path in (json if json != "-" else None, html):
        if path is not None:
            require_writable(path, makes_folders=False)


def _progress(json: str | None) -> Any:
    from nearlight.profiler.pages.progress import progress

    return progress(is_quiet=json == "-")


def _show(report: Report, json: str | None, html: Path | None = None) -> None:
    try:
        if html is not None:
            from nearlight.profiler.pages.html import save_html

            save_html(report, html)
        if json is not None and json != "-":
            report.save_json(json)
    except OSError as error:
        # It could be written when the work began: the disk is full, the folder gone.
        raise BadInput(f"the report cannot be written: {one_line(error)}") from None
    if json == "-":
        print(report.to_json())
        return
    from rich.console import Console

    from nearlight.profiler.pages.terminal import draw

    written = [f"{kind}: {path}" for kind, path in (("page", html), ("data", json)) if path]
    draw(report, Console(emoji=False), written)
