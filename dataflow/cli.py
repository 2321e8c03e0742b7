"""The command line: run, show, plan, timeline, compare. Wrong input is one sentence on stderr and exit code 2."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError, DataError, DataflowError, Interrupted, UserError, nearest
from dataflow.policy import PRESETS

EXAMPLES = {
    "run": "dataflow run pipelines/gsm8k_grpo.py policy=mini-batch steps=5",
    "show": "dataflow show pipelines/gsm8k_grpo.py policy=both steps=2",
    "plan": "dataflow plan runs/gsm8k_grpo-baseline-1 sweep=reward.concurrency:16:256 -o plan.png",
    "timeline": "dataflow timeline runs/gsm8k_grpo-both-1 -o timeline.png",
    "compare": "dataflow compare runs/a runs/b -o compare.png",
}
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 1 (the run failed), 2 (wrong input) or 130 (Ctrl-C)."""
    parser = _parser()
    # Options may stand between key=value arguments, which argparse alone would not take.
    options, rest = parser.parse_known_args(arguments)
    takes_more = getattr(options, "overrides", getattr(options, "runs", None))
    if rest and (takes_more is None or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        takes_more += rest
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(options.act(options) or 0)
    except Interrupted as error:
        print(f"\ninterrupted: {error}", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except DataflowError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _notes(error)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _notes(error: BaseException) -> None:
    """Prints where in the user's code it came from: the worker's traceback."""
    cause = error.__cause__
    for note in getattr(cause, "__notes__", ()):
        print(note, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dataflow",
        description="Schedules RL post-training so that slow rewards hide behind GPU work.",
        epilog="example: " + EXAMPLES["run"],
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, act: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: {EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(act=act)
        return command

    run = add("run", _run, "Trains a pipeline.")
    run.add_argument("pipeline", metavar="PIPELINE.py")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="configuration; --keys lists them")
    run.add_argument("--keys", action="store_true", help="list every key with its default, and stop")
    run.add_argument("--json", action="store_true", help="print the summary as JSON")
    run.add_argument("--quiet", action="store_true", help="no progress")

    show = add("show", _show, "Shows the stages of a pipeline, or the graph unrolled over steps=N.")
    show.add_argument("pipeline", metavar="PIPELINE.py")
    show.add_argument("overrides", nargs="*", metavar="key=value")
    show.add_argument("-o", dest="out", metavar="FILE.mmd|.svg|.png", help="draw it")
    show.add_argument("--json", action="store_true", help="print nodes and edges as JSON")

    plan = add("plan", _plan, "Predicts every policy from a run, a verl log or costs written by hand (costs.yaml).")
    plan.add_argument(
        "source", nargs="?", metavar="SOURCE", help="a run's directory, a verl CSV or TensorBoard directory, a .yaml"
    )
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="what SOURCE does not hold; --keys lists them")
    plan.add_argument("-o", dest="out", metavar="FILE.png|.svg|.html", help="draw it")
    plan.add_argument("--keys", action="store_true", help="list every key with its default, and stop")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")

    timeline = add("timeline", _timeline, "Shows one run's overlap.")
    timeline.add_argument("run", metavar="RUN", help="a run's directory, or its trace.json")
    timeline.add_argument("-o", dest="out", metavar="FILE.png|.svg|.txt")
    timeline.add_argument("--json", action="store_true", help="print the numbers as JSON")

    compare = add("compare", _compare, "Shows several runs on one time axis; given a pipeline, runs all four policies.")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or PIPELINE.py key=value ...")
    compare.add_argument("-o", dest="out", metavar="FILE.png|.svg")
    compare.add_argument("--predicted", action="store_true", help="one RUN beside its own prediction, stage by stage")
    compare.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    from dataflow.config import load_pipeline_file, parse_overrides

    module = load_pipeline_file(options.pipeline)
    return module, parse_overrides(module.Config, options.overrides)


def _run(options: argparse.Namespace) -> int:
    from dataflow.config import describe, load_pipeline_file
    from dataflow.progress import Progress, end_table

    if options.keys:
        print(describe(load_pipeline_file(options.pipeline).Config))
        return 0
    module, config = _load(options)
    from dataflow.session import Session, prepare_logging

    prepare_logging()
    session = Session(config, module, Progress(quiet=options.quiet))
    summary = session.run()
    _picture(session.directory)
    if options.json:
        print(json.dumps(summary, indent=1))
    else:
        print(end_table(summary))
        print(f"timeline: {session.directory / 'timeline.png'}")
        print(f"trace:    {session.directory / 'trace.json'} (opens in https://ui.perfetto.dev)")
    return 0


def _picture(directory: Path) -> None:
    from dataflow.timeline.picture import draw

    draw(_trace(str(directory)), directory / "timeline.png")


def _show(options: argparse.Namespace) -> int:
    from dataflow.policy import expand

    unroll = any(text.startswith("steps=") for text in options.overrides)
    module, config = _load(options)
    pipeline = module.pipeline(config)
    policy = config.policy.resolve(config.trainer.mini_batches)
    steps = config.steps
    graph = expand(pipeline, policy, steps, config.trainer.mini_batches, groups=config.data.prompts)
    if options.out:
        from dataflow.graph_picture import draw_graph

        draw_graph(pipeline, graph if unroll else None, Path(options.out))
        print(options.out)
    elif options.json:
        window = graph.window(1, steps if unroll else 1)
        nodes = [{"task": str(task), **facts} for task, facts in window.nodes(data=True)]
        print(json.dumps({"tasks": nodes, "edges": [[str(a), str(b)] for a, b in window.edges]}, indent=1))
    else:
        print(pipeline.explain())
        if unroll:
            facts = f"{policy.split} parts, max_staleness {policy.max_staleness}, {steps} steps"
            print(f"\n{config.policy.preset}, {facts}:\n")
            print(graph.explain(1, steps))
    return 0


def _plan(options: argparse.Namespace) -> int:
    if options.keys:
        from dataflow.overrides import describe
        from dataflow.plan_config import PlanConfig

        print(describe(PlanConfig))
        return 0
    if options.source is None:
        raise ConfigError("plan: give a SOURCE: a run's directory, a verl log or a costs.yaml.")
    from rich.console import Console

    from dataflow.plan import make_plan
    from dataflow.plan_picture import KINDS, draw_plan

    if options.out and Path(options.out).suffix.lower() not in KINDS:
        raise DataError(f"picture {options.out}: no such kind; give a name in .png, .svg or .html.")
    with Console(stderr=True).status("") as status:
        plan = make_plan(options.source, options.overrides, status.update)
    if options.out:
        draw_plan(plan.rows, plan.sweeps, options.out, f"predicted: {Path(options.source).name}")
    print(json.dumps(plan.as_dict(), indent=1) if options.json else plan.text())
    if options.out and not options.json:
        print(f"\npicture: {options.out}")
    return 0


def _trace(run: str) -> Any:
    from dataflow.timeline import perfetto

    path = Path(run)
    if path.is_dir():
        path = path / "trace.json"
    if not path.is_file():
        near = nearest(run, [str(p) for p in path.parent.parent.glob("*")]) if path.parent.parent.is_dir() else ""
        raise DataError(f"no run at '{run}': there is no {path}{near or '; give a run directory (runs/NAME)'}")
    return perfetto.read(path)


def _timeline(options: argparse.Namespace) -> int:
    from dataflow.timeline import attribution
    from dataflow.timeline.text import gantt

    trace = _trace(options.run)
    if options.json:
        print(json.dumps(attribution.summary(trace), indent=1))
        return 0
    if options.out and not options.out.endswith(".txt"):
        from dataflow.timeline.picture import draw

        draw(trace, options.out)
        print(options.out)
        return 0
    text = gantt(trace, 140)
    if options.out:
        Path(options.out).write_text(text)
        print(options.out)
    else:
        print(text)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from dataflow.timeline import attribution
    from dataflow.timeline.text import table

    runs = options.runs
    if options.predicted:
        return _compare_predicted(options)
    if runs[0].endswith(".py"):
        runs = _run_all(runs[0], runs[1:])
    traces: dict[str, Any] = {}
    rows = []
    for run in runs:
        trace = _trace(run)
        name = str(trace.meta.get("policy") or Path(run).name)
        name = name if name not in traces else Path(run).name
        if name in traces:
            raise ConfigError(f"run '{run}' is given twice; give different runs.")
        traces[name] = trace
        numbers = attribution.summary(trace)
        summary = _summary_of(Path(run))
        rows.append(
            {
                "run": str(run),
                "policy": name,
                "wall_s": numbers["wall_s"],
                "step_s": numbers["step_s"],
                "change": numbers["wall_s"] / rows[0]["wall_s"] - 1 if rows else 0.0,
                "gpu_busy": numbers["gpu_busy_s"] / numbers["wall_s"] if numbers["wall_s"] else 0.0,
                "exposed_wait_s": numbers["exposed_wait_s"],
                "lower_bound_s": summary.get("lower_bound_s"),
                "accuracy_before": summary.get("accuracy_before"),
                "accuracy_after": summary.get("accuracy_after"),
            }
        )
    if options.out:
        from dataflow.timeline.picture import draw

        draw(traces, options.out)
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    lines = [("policy", "wall s", "s/step", "change", "GPU busy", "exposed wait s", "lower bound s", "accuracy")]
    for row in rows:
        bound, after = row["lower_bound_s"], row["accuracy_after"]
        lines.append(
            (
                row["policy"],
                f"{row['wall_s']:.1f}",
                f"{row['step_s']:.2f}",
                f"{row['change']:+.1%}",
                f"{row['gpu_busy']:.0%}",
                f"{row['exposed_wait_s']:.1f}",
                "-" if bound is None else f"{bound:.1f}",
                "-" if after is None else f"{row['accuracy_before']:.2f} -> {after:.2f}",
            )
        )
    print(table(lines))
    if options.out:
        print(f"\npicture: {options.out}")
    return 0


def _compare_predicted(options: argparse.Namespace) -> int:
    from dataflow.backtest import backtest
    from dataflow.timeline.text import table

    if len(options.runs) != 1 or options.runs[0].endswith(".py"):
        raise ConfigError("compare --predicted: give one RUN, to lay beside its own prediction.")
    run = options.runs[0]
    trace = _trace(run)
    lines, predicted = backtest(trace, run)
    if options.out:
        from dataflow.timeline.picture import draw

        draw({str(trace.meta.get("policy", "measured")): trace, "predicted": predicted}, options.out)
    if options.json:
        rows = [
            {"what": at.what, "measured_s": at.measured_s, "predicted_s": at.predicted_s, "error": at.error}
            for at in lines
        ]
        print(json.dumps(rows, indent=1))
        return 0
    cells = [("seconds in all", "measured", "predicted", "error")]
    for at in lines:
        error = "-" if at.error is None else f"{at.error:+.1%}"
        cells.append((at.what, f"{at.measured_s:.2f}", f"{at.predicted_s:.2f}", error))
    print(table(cells))
    if options.out:
        print(f"\npicture: {options.out}")
    return 0


def _run_all(pipeline: str, overrides: Sequence[str]) -> list[str]:
    """Runs the pipeline under each preset, one process after another, and returns the runs' directories."""
    from dataflow.config import load_pipeline_file, parse_overrides

    given = [text for text in overrides if text.split("=")[0] in ("policy", "name")]
    if given:
        raise ConfigError(f"'{given[0]}': compare sets policy and name itself; leave it out.")
    module = load_pipeline_file(pipeline)
    config = parse_overrides(module.Config, list(overrides))
    number = 1
    while any((Path(config.runs) / f"compare-{number}-{name}").exists() for name in PRESETS):
        number += 1
    runs = []
    for name in PRESETS:
        directory = Path(config.runs) / f"compare-{number}-{name}"
        print(f"{name}:", file=sys.stderr)
        command = [sys.executable, "-m", "dataflow.cli", "run", pipeline, *overrides]
        command += [f"policy={name}", f"name={directory.name}"]
        # The child prints its own error; stdout belongs to the table.
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        if code:
            raise (UserError if code == 2 else DataflowError)(
                f"compare: the run under '{name}' ended with exit code {code}."
            )
        runs.append(str(directory))
    return runs


def _summary_of(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}; the run may have been cut off.") from error


if __name__ == "__main__":
    sys.exit(main())
